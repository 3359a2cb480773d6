// A program that compiles kernels while it runs: options, headers, name expressions, logs and errors of hiprtc. Declares what it
// needs, so that no header of ROCm is needed to compile it.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *Handle;
int hiprtcVersion(int *, int *);
int hiprtcCreateProgram(Handle *, const char *, const char *, int, const char **, const char **);
int hiprtcDestroyProgram(Handle *);
int hiprtcAddNameExpression(Handle, const char *);
int hiprtcCompileProgram(Handle, int, const char **);
int hiprtcGetLoweredName(Handle, const char *, const char **);
int hiprtcGetProgramLogSize(Handle, size_t *);
int hiprtcGetProgramLog(Handle, char *);
int hiprtcGetCodeSize(Handle, size_t *);
int hiprtcGetCode(Handle, char *);
int hiprtcGetBitcodeSize(Handle, size_t *);
int hiprtcGetBitcode(Handle, char *);
int hiprtcLinkCreate(unsigned, int *, void **, Handle *);
int hiprtcLinkAddData(Handle, int, void *, size_t, const char *, unsigned, int *, void **);
int hiprtcLinkAddFile(Handle, int, const char *, unsigned, int *, void **);
int hiprtcLinkComplete(Handle, void **, size_t *);
int hiprtcLinkDestroy(Handle);
const char *hiprtcGetErrorString(int);
int hipModuleLoadData(Handle *, const void *);
int hipModuleGetFunction(Handle *, Handle, const char *);
int hipModuleGetGlobal(void **, size_t *, Handle, const char *);
int hipModuleLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
int hipMalloc(void **, size_t);
int hipMemcpy(void *, const void *, size_t, int);
int hipDeviceSynchronize(void);
const char *hipGetErrorName(int);

#define WANT(code, call)                                                                                       \
    do {                                                                                                       \
        int got = (call);                                                                                      \
        if (got != (code)) return printf("%s gives %d, line %d\n", #call, got, __LINE__), 1;                    \
    } while (0)
#define CHECK(call) WANT(0, call)

static const char *source =
    "#include <hip/hip_runtime.h>\n"
    "#include \"parts/add.h\"\n"
    "__constant__ float scale = SCALE;\n"
    "__device__ int count;\n"
    "template <class T, int N> __global__ __launch_bounds__(256) void add(T *y, const T *x, int n) {\n"
    "    __shared__ T part[256];\n"
    "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "    part[threadIdx.x] = i < n ? x[i] : T(0);\n"
    "    __syncthreads();\n"
    "    if (i < n) y[i] = together(T(scale) * part[threadIdx.x], T(N));\n"
    "    if (__shfl_down(i, 1) > i) atomicAdd(&count, 1);\n"
    "}\n"
    "namespace one { __global__ void last(float4 *y) { y[threadIdx.x] = make_float4(sqrtf(16), exp2f(3), fmaf(2, 3, 4), gridDim.x); } }\n"
    "extern \"C\" __global__ void check(int n) {\n"
    "    if (threadIdx.x == 1) printf(\"%d of %s\\n\", n, \"many\");\n"
    "    assert(threadIdx.x % 64 < n);\n"
    "}\n"
    "extern \"C\" __global__ void votes(int *y, int n) {\n"
    "    int below = threadIdx.x < n, count = __syncthreads_count(below);\n"
    "    int all = __syncthreads_and(below), any = __syncthreads_or(below);\n"
    "    y[threadIdx.x] = 4 * count + 2 * all + any;\n"
    "}\n";

static char *log_of(Handle program) {
    size_t bytes = 0;
    if (hiprtcGetProgramLogSize(program, &bytes) || !bytes) return NULL;
    char *text = malloc(bytes);
    return hiprtcGetProgramLog(program, text) || strlen(text) + 1 != bytes ? NULL : text;
}

static int errors(void) {
    Handle program, none = (Handle)7;
    WANT(3, hiprtcCreateProgram(&program, NULL, "x", 0, NULL, NULL));
    const char *text = "int x;", *outside = "../x.h";
    WANT(3, hiprtcCreateProgram(&program, "", "x", 1, &text, &outside));
    WANT(4, hiprtcCompileProgram(none, 0, NULL));
    WANT(4, hiprtcDestroyProgram(&none));
    CHECK(hiprtcCreateProgram(&program, "__global__ void f() { undeclared(); }\n", "wrong.cu", 0, NULL, NULL));
    size_t bytes;
    const char *name;
    WANT(4, hiprtcGetCodeSize(program, &bytes));
    WANT(9, hiprtcGetLoweredName(program, "f", &name));
    WANT(10, hiprtcAddNameExpression(program, " "));
    WANT(6, hiprtcCompileProgram(program, 0, NULL));
    char *log = log_of(program);
    if (!log || !strstr(log, "wrong.cu:1:23: error: use of undeclared identifier 'undeclared'")) return printf("log: %s\n", log), 1;
    const char *unknown = "--no-such-option";
    WANT(6, hiprtcCompileProgram(program, 1, &unknown));
    log = log_of(program);
    if (!log || !strstr(log, "--no-such-option")) return printf("log: %s\n", log), 1;
    CHECK(hiprtcDestroyProgram(&program));
    if (program) return 1;
    if (strcmp(hiprtcGetErrorString(6), "HIPRTC_ERROR_COMPILATION") || strcmp(hiprtcGetErrorString(0), "HIPRTC_SUCCESS")) return 1;
    return 0;
}

// A kernel and the function that it calls, compiled apart.
static int linked(void) {
    enum { OPTIONS = 10000, COUNT = 10001, OBJECT = 3, BITCODE = 100 };
    const char *sources[] = {
        "__device__ int thrice(int x);\nextern \"C\" __global__ void parts(int *y) { y[threadIdx.x] = thrice(threadIdx.x); }\n",
        "__device__ int thrice(int x) { return FACTOR * x; }\n",
    };
    const char *options[] = {"-fgpu-rdc", "-DFACTOR=3"}, *compiler[] = {"-mllvm", "-inline-threshold=1"};
    int names[] = {OPTIONS, COUNT};
    void *values[] = {compiler, (void *)2};
    Handle link, module, function, none = NULL;
    void *code = NULL, *y;
    size_t bytes, linked;
    CHECK(hiprtcLinkCreate(2, names, values, &link));
    for (int i = 0; i < 2; i++) {
        Handle program;
        CHECK(hiprtcCreateProgram(&program, sources[i], "part.cu", 0, NULL, NULL));
        CHECK(hiprtcCompileProgram(program, 2, options));
        CHECK(hiprtcGetBitcodeSize(program, &bytes));
        char *bitcode = malloc(bytes);
        CHECK(hiprtcGetBitcode(program, bitcode));
        CHECK(hiprtcDestroyProgram(&program));
        if (i == 1) WANT(100, hiprtcLinkComplete(link, &code, &linked)); // `thrice` is undefined
        CHECK(hiprtcLinkAddData(link, BITCODE, bitcode, bytes, "part", 0, NULL, NULL));
        WANT(3, hiprtcLinkAddData(link, OBJECT, bitcode, bytes, "part", 0, NULL, NULL));
        free(bitcode);
    }
    WANT(3, hiprtcLinkAddData(link, BITCODE, NULL, 8, "part", 0, NULL, NULL));
    WANT(2, hiprtcLinkAddFile(link, BITCODE, "no/such/file", 0, NULL, NULL));
    WANT(3, hiprtcLinkComplete(none, &code, &linked));
    CHECK(hiprtcLinkComplete(link, &code, &linked));
    CHECK(hipModuleLoadData(&module, code));
    CHECK(hiprtcLinkDestroy(link));
    WANT(3, hiprtcLinkDestroy(link));
    int host[64];
    CHECK(hipMalloc(&y, sizeof host));
    CHECK(hipModuleGetFunction(&function, module, "parts"));
    CHECK(hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, NULL, (void *[]){&y}, NULL));
    CHECK(hipMemcpy(host, y, sizeof host, 2));
    for (int i = 0; i < 64; i++)
        if (host[i] != 3 * i) return printf("%d: %d\n", i, host[i]), 1;
    return 0;
}

int main(void) {
    int major = 0, minor = -1;
    CHECK(hiprtcVersion(&major, &minor));
    if (major != 6 || minor < 0) return 1;
    if (errors() || linked()) return 1;
    Handle program;
    const char *header = "template <class T> __device__ T together(T a, T b) { return a + b; }\n", *name = "parts/add.h";
    CHECK(hiprtcCreateProgram(&program, source, "kernels.cu", 1, &header, &name));
    const char *expressions[] = {"add<float, 3>", "&add<int, 4>", "one::last", "&count", "scale"};
    for (int i = 0; i < 5; i++) CHECK(hiprtcAddNameExpression(program, expressions[i]));
    const char *options[] = {"-DSCALE=2", "-std=c++17", "-Werror"};
    int failed = hiprtcCompileProgram(program, 3, options);
    if (failed) return printf("%s\n%s\n", hiprtcGetErrorString(failed), log_of(program)), 1;
    WANT(8, hiprtcAddNameExpression(program, "add<double, 1>"));
    size_t bytes;
    CHECK(hiprtcGetCodeSize(program, &bytes));
    char *code = malloc(bytes);
    CHECK(hiprtcGetCode(program, code));
    WANT(4, hiprtcGetBitcodeSize(program, &bytes));
    const char *lowered[5];
    for (int i = 0; i < 5; i++) CHECK(hiprtcGetLoweredName(program, expressions[i], &lowered[i]));
    WANT(10, hiprtcGetLoweredName(program, "add<double, 1>", &name));
    printf("%s %s %s %s %s\n", lowered[0], lowered[1], lowered[2], lowered[3], lowered[4]);

    Handle module, function;
    CHECK(hipModuleLoadData(&module, code));
    void *x, *y, *count;
    float host[256], last[8];
    int n = 250, counted = -1;
    for (int i = 0; i < 256; i++) host[i] = i;
    CHECK(hipMalloc(&x, sizeof host));
    CHECK(hipMalloc(&y, sizeof host));
    CHECK(hipMemcpy(x, host, sizeof host, 1));
    void *args[] = {&y, &x, &n};
    CHECK(hipModuleGetFunction(&function, module, lowered[0]));
    CHECK(hipModuleLaunchKernel(function, 2, 1, 1, 128, 1, 1, 0, NULL, args, NULL));
    CHECK(hipMemcpy(host, y, n * sizeof *host, 2));
    for (int i = 0; i < n; i++)
        if (host[i] != 2 * i + 3) return printf("%d: %f\n", i, host[i]), 1;
    CHECK(hipModuleGetGlobal(&count, &bytes, module, lowered[3]));
    CHECK(hipMemcpy(&counted, count, sizeof counted, 2));
    if (bytes != sizeof counted || counted != 4 * 63) return printf("counted %d\n", counted), 1;
    CHECK(hipModuleGetFunction(&function, module, lowered[2]));
    CHECK(hipModuleLaunchKernel(function, 1, 1, 1, 2, 1, 1, 0, NULL, (void *[]){&y}, NULL));
    CHECK(hipMemcpy(last, y, sizeof last, 2));
    for (int i = 0; i < 2; i++)
        if (last[4 * i] != 4 || last[4 * i + 1] != 8 || last[4 * i + 2] != 10 || last[4 * i + 3] != 1) return 1;

    // Waves that agree and that do not, and one that is not whole.
    CHECK(hipModuleGetFunction(&function, module, "votes"));
    const int below[][2] = {{0, 0}, {1, 1}, {70, 1}, {199, 1}, {200, 3}, {1000, 3}};
    for (int i = 0; i < 6; i++) {
        int votes[200], limit = below[i][0], count = limit < 200 ? limit : 200;
        CHECK(hipModuleLaunchKernel(function, 1, 1, 1, 200, 1, 1, 0, NULL, (void *[]){&y, &limit}, NULL));
        CHECK(hipMemcpy(votes, y, sizeof votes, 2));
        for (int t = 0; t < 200; t++)
            if (votes[t] != 4 * count + below[i][1]) return printf("%d below %d: %d\n", t, limit, votes[t]), 1;
    }

    const char *separate[] = {"-fgpu-rdc", "-DSCALE=1", "--gpu-architecture=gfx950"};
    CHECK(hiprtcCompileProgram(program, 3, separate));
    CHECK(hiprtcGetBitcodeSize(program, &bytes));
    CHECK(hiprtcGetBitcode(program, code = malloc(bytes)));
    if (memcmp(code, "BC\xC0\xDE", 4)) return printf("no bitcode\n"), 1;
    WANT(4, hiprtcGetCodeSize(program, &bytes));
    CHECK(hiprtcDestroyProgram(&program));

    CHECK(hipModuleGetFunction(&function, module, "check"));
    n = 60;
    CHECK(hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, NULL, (void *[]){&n}, NULL));
    printf("%s\n", hipGetErrorName(hipDeviceSynchronize()));
    return 0;
}
