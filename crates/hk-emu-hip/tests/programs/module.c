// A program of the module API, against HIP's own headers: what users of hipModuleLaunchKernel write.
#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                                                                                   \
    do {                                                                                              \
        hipError_t e = (call);                                                                        \
        if (e != hipSuccess) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %s (%s)\n", __FILE__, __LINE__, #call, hipGetErrorName(e),    \
                    hipGetErrorString(e));                                                            \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

enum { N = 1000 };

static void expect(const float *got, float a, float offset) {
    for (int i = 0; i < N; i++) {
        float want = a * (float)i + 2.0f + offset;
        if (got[i] != want) {
            fprintf(stderr, "element %d is %g, not %g\n", i, got[i], want);
            exit(1);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    CHECK(hipInit(0));
    int count = 0;
    CHECK(hipGetDeviceCount(&count));
    for (int d = 0; d < count; d++) {
        CHECK(hipSetDevice(d));
        hipDeviceProp_t properties;
        CHECK(hipGetDeviceProperties(&properties, d));
        int wave = 0;
        CHECK(hipDeviceGetAttribute(&wave, hipDeviceAttributeWarpSize, d));
        printf("%s wave %d CUs %d LDS %zu\n", properties.gcnArchName, wave, properties.multiProcessorCount,
               properties.sharedMemPerBlock);

        char path[4096];
        snprintf(path, sizeof path, "%s/%.*s.co", argv[1], (int)strcspn(properties.gcnArchName, ":"),
                 properties.gcnArchName);
        hipModule_t module;
        hipFunction_t saxpy;
        CHECK(hipModuleLoad(&module, path));
        CHECK(hipModuleGetFunction(&saxpy, module, "saxpy"));

        float *x, *y, *host;
        CHECK(hipMalloc((void **)&x, N * sizeof(float)));
        CHECK(hipMalloc((void **)&y, N * sizeof(float)));
        CHECK(hipHostMalloc((void **)&host, N * sizeof(float), hipHostMallocDefault));
        for (int i = 0; i < N; i++) host[i] = (float)i;
        hipStream_t stream;
        hipEvent_t start, stop;
        CHECK(hipStreamCreateWithFlags(&stream, hipStreamNonBlocking));
        CHECK(hipEventCreate(&start));
        CHECK(hipEventCreate(&stop));
        CHECK(hipMemcpyAsync(x, host, N * sizeof(float), hipMemcpyHostToDevice, stream));

        // By pointers to the arguments.
        float a = 3.0f, two = 2.0f;
        int n = N, pattern;
        memcpy(&pattern, &two, sizeof pattern);
        CHECK(hipMemsetD32Async((hipDeviceptr_t)y, pattern, N, stream));
        void *params[] = {&x, &y, &a, &n};
        CHECK(hipEventRecord(start, stream));
        CHECK(hipModuleLaunchKernel(saxpy, (N + 255) / 256, 1, 1, 256, 1, 1, 0, stream, params, NULL));
        CHECK(hipEventRecord(stop, stream));
        CHECK(hipStreamSynchronize(stream));
        float ms = -1.0f;
        CHECK(hipEventElapsedTime(&ms, start, stop));
        if (!(ms > 0.0f)) return 1;
        float out[N];
        CHECK(hipMemcpy(out, y, sizeof out, hipMemcpyDeviceToHost));
        expect(out, a, 0.0f);

        // By a buffer, with a device variable changed.
        hipDeviceptr_t offset;
        size_t bytes;
        float ten = 10.0f;
        CHECK(hipModuleGetGlobal(&offset, &bytes, module, "offset"));
        if (bytes != 2 * sizeof(float)) return 1;
        CHECK(hipMemcpyHtoD(offset, &ten, sizeof ten));
        CHECK(hipMemsetD32((hipDeviceptr_t)y, pattern, N));
        struct { float *x, *y; float a; int n; } args = {x, y, a, n};
        size_t size = sizeof args;
        void *extra[] = {HIP_LAUNCH_PARAM_BUFFER_POINTER, &args, HIP_LAUNCH_PARAM_BUFFER_SIZE, &size,
                         HIP_LAUNCH_PARAM_END};
        CHECK(hipModuleLaunchKernel(saxpy, (N + 63) / 64, 1, 1, 64, 1, 1, 0, stream, NULL, extra));
        CHECK(hipDeviceSynchronize());
        CHECK(hipMemcpyDtoH(host, (hipDeviceptr_t)y, N * sizeof(float)));
        expect(host, a, ten);

        int blocks = 0;
        CHECK(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, saxpy, 256, 0));
        if (blocks < 1) return 1;
        CHECK(hipModuleUnload(module));
        CHECK(hipEventDestroy(start));
        CHECK(hipEventDestroy(stop));
        CHECK(hipStreamDestroy(stream));
        CHECK(hipFree(x));
        CHECK(hipFree(y));
        CHECK(hipHostFree(host));
    }
    puts("ok");
    return 0;
}
