// fake_hip.c: the part of the HIP runtime that hk-core calls, on host memory and at once, so that the driver for AMD
// GPUs is tested where there is none. The environment says what the device is and which call fails:
//   FAKE_HIP_COUNT  number of devices (1)
//   FAKE_HIP_ARCH   name in the device properties (gfx942:sramecc+:xnack-); empty: hipGetDeviceProperties fails
//   FAKE_HIP_POOLS  stream-ordered allocation is supported (1)
//   FAKE_HIP_FAIL   CALL=CODE: what this call returns
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { uint64_t data; uint32_t shape[4]; int64_t strides[4]; } Tensor;
typedef struct { Tensor x, y; float a; uint32_t pad; } Params;

static const char *env(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static int fails(const char *call) {
    const char *fail = env("FAKE_HIP_FAIL", "");
    size_t n = strlen(call);
    return strncmp(fail, call, n) == 0 && fail[n] == '=' ? atoi(fail + n + 1) : 0;
}
#define BEGIN do { int code = fails(__func__); if (code) return code; } while (0)

static long live;  // objects and allocations, for the count at the end
static void *object(size_t bytes) { live++; return malloc(bytes ? bytes : 1); }
static int release(void *p) { live--; free(p); return 0; }
__attribute__((destructor)) static void report(void) { fprintf(stderr, "fake hip: %ld alive\n", live); }

int hipInit(unsigned flags) { BEGIN; return flags; }
int hipGetDeviceCount(int *count) { *count = atoi(env("FAKE_HIP_COUNT", "1")); BEGIN; return *count ? 0 : 100; }
int hipDeviceGet(int *device, int ordinal) { BEGIN; *device = ordinal; return 0; }
int hipSetDevice(int ordinal) { BEGIN; return ordinal == 0 ? 0 : 101; }
int hipDeviceGetName(char *name, int len, int device) { BEGIN; snprintf(name, len, "Fake Instinct %d", device); return 0; }
int hipDeviceTotalMem(size_t *bytes, int device) { BEGIN; *bytes = (192ul << 30) + device; return 0; }
int hipDeviceCanAccessPeer(int *can, int device, int peer) { BEGIN; *can = device != peer; return 0; }
int hipDeviceEnablePeerAccess(int peer, unsigned flags) { BEGIN; return peer == 1 ? 704 : flags; }
const char *hipGetErrorName(int code) { return code == 2 ? "hipErrorOutOfMemory" : "hipErrorUnknown"; }

int hipDeviceGetAttribute(int *value, int attribute, int ordinal) {
    BEGIN;
    switch (attribute) {
        case 23: *value = 9; return 0;           // ComputeCapabilityMajor
        case 61: *value = 5; return 0;           // ComputeCapabilityMinor
        case 29: *value = 2147483647; return 0;  // MaxGridDimX
        case 30: case 31: *value = 65536; return 0;
        case 56: *value = 1024; return 0;        // MaxThreadsPerBlock
        case 63: *value = 304; return 0;         // MultiprocessorCount
        case 74: *value = 65536; return 0;       // MaxSharedMemoryPerBlock
        case 87: *value = 64; return 0;          // WarpSize
        case 88: *value = atoi(env("FAKE_HIP_POOLS", "1")); return 0;
        default: return ordinal + 1;
    }
}

int hipGetDeviceProperties(void *properties, int ordinal) {
    BEGIN;
    const char *arch = env("FAKE_HIP_ARCH", "gfx942:sramecc+:xnack-");
    if (!*arch) return 4242;
    // As large as ROCm 6's structure, larger than the one of the headers in use.
    memset(properties, 0, 1472);
    snprintf(properties, 256, "Fake gfx Instinct %d", ordinal);
    strcpy((char *)properties + 1160, arch);
    return 0;
}

int hipStreamCreateWithFlags(void **stream, unsigned flags) { BEGIN; *stream = object(flags); return 0; }
int hipStreamDestroy(void *stream) { return release(stream); }
int hipStreamSynchronize(void *stream) { BEGIN; return stream == 0; }
int hipStreamWaitEvent(void *stream, void *event, unsigned flags) { BEGIN; return !stream || !event || flags; }

static float now;  // milliseconds, one more with each event
int hipEventCreateWithFlags(void **event, unsigned flags) { BEGIN; *event = object(sizeof(float) + flags); return 0; }
int hipEventDestroy(void *event) { return release(event); }
int hipEventRecord(void *event, void *stream) { BEGIN; *(float *)event = ++now; return stream == 0; }
int hipEventQuery(void *event) { BEGIN; return event == 0; }
int hipEventSynchronize(void *event) { BEGIN; return event == 0; }
int hipEventElapsedTime(float *ms, void *start, void *stop) { BEGIN; *ms = *(float *)stop - *(float *)start; return 0; }

int hipMalloc(void **address, size_t bytes) { BEGIN; *address = object(bytes); return 0; }
int hipExtMallocWithFlags(void **address, size_t bytes, unsigned flags) { BEGIN; *address = object(bytes); return flags != 3; }
int hipFree(void *address) { return release(address); }
// Handles hold the address: the processes that share memory are one.
typedef struct { char bytes[64]; } IpcHandle;
int hipIpcGetMemHandle(IpcHandle *handle, void *address) { BEGIN; memcpy(handle, &address, sizeof address); return 0; }
int hipIpcOpenMemHandle(void **address, IpcHandle handle, unsigned flags) { BEGIN; live++; memcpy(address, &handle, sizeof *address); return flags != 1; }
int hipIpcCloseMemHandle(void *address) { live--; return address == 0; }
int hipMallocAsync(void **address, size_t bytes, void *stream) { BEGIN; *address = object(bytes); return stream == 0; }
int hipFreeAsync(void *address, void *stream) { release(address); return stream == 0; }
int hipMemcpyHtoDAsync(void *dst, void *src, size_t n, void *stream) { BEGIN; memcpy(dst, src, n); return stream == 0; }
int hipMemcpyDtoHAsync(void *dst, void *src, size_t n, void *stream) { BEGIN; memcpy(dst, src, n); return stream == 0; }

// Copies on the device, which are all that is captured.
typedef struct { size_t count; struct { void *dst, *src; size_t n; } copy[8]; } Graph;
static void *captured;  // stream
static Graph *noted;
int hipMemcpyDtoDAsync(void *dst, void *src, size_t n, void *stream) {
    BEGIN;
    if (stream != captured) memcpy(dst, src, n);
    else noted->copy[noted->count].dst = dst, noted->copy[noted->count].src = src, noted->copy[noted->count++].n = n;
    return stream == 0;
}
int hipStreamBeginCapture(void *stream, int mode) {
    BEGIN;
    captured = stream, noted = object(sizeof(Graph)), noted->count = 0;
    return mode != 1;
}
int hipStreamEndCapture(void *stream, void **graph) { BEGIN; *graph = noted; captured = 0; return stream == 0; }
int hipGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    BEGIN;
    *exec = object(sizeof(Graph));
    memcpy(*exec, graph, sizeof(Graph));
    return flags != 0;
}
int hipGraphDestroy(void *graph) { return release(graph); }
int hipGraphExecDestroy(void *exec) { return release(exec); }
int hipGraphLaunch(void *exec, void *stream) {
    BEGIN;
    Graph *graph = exec;
    for (size_t i = 0; i < graph->count; i++) memcpy(graph->copy[i].dst, graph->copy[i].src, graph->copy[i].n);
    return stream == 0;
}

int hipHostMalloc(void **host, size_t bytes, unsigned flags) { BEGIN; *host = object(bytes); return flags != 1; }
int hipHostFree(void *host) { return release(host); }
int hipMemsetD8Async(uint8_t *dst, uint8_t v, size_t n, void *stream) { BEGIN; while (n--) *dst++ = v; return stream == 0; }
int hipMemsetD16Async(uint16_t *dst, uint16_t v, size_t n, void *stream) { BEGIN; while (n--) *dst++ = v; return stream == 0; }
int hipMemsetD32Async(int *dst, int v, size_t n, void *stream) { BEGIN; while (n--) *dst++ = v; return stream == 0; }

int hipModuleLoadData(void **module, const void *image) { BEGIN; *module = object(1); return memcmp(image, "\177ELF", 4) ? 200 : 0; }
int hipModuleUnload(void *module) { return release(module); }
int hipModuleGetFunction(void **function, void *module, const char *name) {
    BEGIN;
    *function = module;
    return strcmp(name, "scale") ? 500 : 0;
}

// Every function is `scale`.
int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned lds, void *stream, void **params, void **extra) {
    BEGIN;
    if (!function || !stream || params || lds || gy * gz * by * bz != 1 || bx != 64) return 1;
    if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != (void *)3) return 1;
    if (*(size_t *)extra[3] != sizeof(Params)) return 1;
    const Params *p = extra[1];
    const float *x = (const float *)p->x.data;
    float *y = (float *)p->y.data;
    for (uint32_t i = 0; i < p->y.shape[3] && i < gx * bx; i++)
        y[i * p->y.strides[3]] = p->a * x[i * p->x.strides[3]];
    return 0;
}
