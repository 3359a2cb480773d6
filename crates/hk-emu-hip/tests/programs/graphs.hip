// Graphs: what a stream captures, nodes that are made one by one, instances and their updates. Declares what it needs of HIP,
// as embedded.hip does.
extern "C" int printf(const char *, ...);

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))

using size_t = decltype(sizeof 0);
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef enum hipError_t {
    hipSuccess,
    hipErrorInvalidValue = 1,
    hipErrorIllegalState = 401,
    hipErrorNotSupported = 801,
    hipErrorStreamCaptureUnsupported = 900,
    hipErrorStreamCaptureInvalidated = 901,
    hipErrorStreamCaptureMerge = 902,
    hipErrorStreamCaptureUnmatched = 903,
    hipErrorStreamCaptureUnjoined = 904,
    hipErrorStreamCaptureIsolation = 905,
    hipErrorStreamCaptureImplicit = 906,
    hipErrorCapturedEvent = 907,
    hipErrorGraphExecUpdateFailure = 910
} hipError_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipEvent_t *hipEvent_t;
typedef struct ihipGraph *hipGraph_t;
typedef struct hipGraphNode *hipGraphNode_t;
typedef struct hipGraphExec *hipGraphExec_t;
typedef struct hipUserObject *hipUserObject_t;
typedef void (*hipHostFn_t)(void *);
struct hipKernelNodeParams {
    dim3 blockDim;
    void **extra;
    void *func;
    dim3 gridDim;
    void **kernelParams;
    unsigned sharedMemBytes;
};
struct hipMemsetParams {
    void *dst;
    unsigned elementSize;
    size_t height, pitch;
    unsigned value;
    size_t width;
};
struct hipHostNodeParams {
    hipHostFn_t fn;
    void *userData;
};
struct hipMemAllocNodeParams {
    int allocType, handleTypes, locationType, locationId;
    size_t pool[9];
    const void *accessDescs;
    size_t accessDescCount, bytesize;
    void *dptr;
};
extern "C" {
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t shared = 0, hipStream_t stream = nullptr);
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t hipMalloc(void **, size_t);
hipError_t hipFree(void *);
hipError_t hipMallocAsync(void **, size_t, hipStream_t);
hipError_t hipFreeAsync(void *, hipStream_t);
hipError_t hipMemcpy(void *, const void *, size_t, int);
hipError_t hipMemcpyAsync(void *, const void *, size_t, int, hipStream_t);
hipError_t hipMemsetAsync(void *, int, size_t, hipStream_t);
hipError_t hipMemcpyFromSymbolAsync(void *, const void *, size_t, size_t, int, hipStream_t);
hipError_t hipLaunchHostFunc(hipStream_t, hipHostFn_t, void *);
hipError_t hipDeviceSynchronize();
hipError_t hipStreamCreate(hipStream_t *);
hipError_t hipStreamDestroy(hipStream_t);
hipError_t hipStreamSynchronize(hipStream_t);
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned);
hipError_t hipEventCreate(hipEvent_t *);
hipError_t hipEventRecord(hipEvent_t, hipStream_t);
hipError_t hipEventSynchronize(hipEvent_t);
hipError_t hipStreamBeginCapture(hipStream_t, int);
hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t *);
hipError_t hipStreamIsCapturing(hipStream_t, int *);
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t, int *, unsigned long long *, hipGraph_t *, const hipGraphNode_t **,
                                      size_t *);
hipError_t hipGraphCreate(hipGraph_t *, unsigned);
hipError_t hipGraphDestroy(hipGraph_t);
hipError_t hipGraphClone(hipGraph_t *, hipGraph_t);
hipError_t hipGraphNodeFindInClone(hipGraphNode_t *, hipGraphNode_t, hipGraph_t);
hipError_t hipGraphGetNodes(hipGraph_t, hipGraphNode_t *, size_t *);
hipError_t hipGraphGetEdges(hipGraph_t, hipGraphNode_t *, hipGraphNode_t *, size_t *);
hipError_t hipGraphNodeGetType(hipGraphNode_t, int *);
hipError_t hipGraphAddDependencies(hipGraph_t, const hipGraphNode_t *, const hipGraphNode_t *, size_t);
hipError_t hipGraphRemoveDependencies(hipGraph_t, const hipGraphNode_t *, const hipGraphNode_t *, size_t);
hipError_t hipGraphAddKernelNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t,
                                 const hipKernelNodeParams *);
hipError_t hipGraphKernelNodeGetParams(hipGraphNode_t, hipKernelNodeParams *);
hipError_t hipGraphExecKernelNodeSetParams(hipGraphExec_t, hipGraphNode_t, const hipKernelNodeParams *);
hipError_t hipGraphAddMemsetNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t, const hipMemsetParams *);
hipError_t hipGraphAddMemcpyNode1D(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t, void *, const void *,
                                   size_t, int);
hipError_t hipGraphAddHostNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t, const hipHostNodeParams *);
hipError_t hipGraphAddChildGraphNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t, hipGraph_t);
hipError_t hipGraphAddMemAllocNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t,
                                   hipMemAllocNodeParams *);
hipError_t hipGraphAddMemFreeNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t, void *);
hipError_t hipDeviceGetGraphMemAttribute(int, int, void *);
hipError_t hipGraphInstantiate(hipGraphExec_t *, hipGraph_t, hipGraphNode_t *, char *, size_t);
hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t *, hipGraph_t, unsigned long long);
hipError_t hipGraphNodeSetEnabled(hipGraphExec_t, hipGraphNode_t, unsigned);
hipError_t hipGraphExecUpdate(hipGraphExec_t, hipGraph_t, hipGraphNode_t *, int *);
hipError_t hipGraphLaunch(hipGraphExec_t, hipStream_t);
hipError_t hipGraphExecDestroy(hipGraphExec_t);
hipError_t hipUserObjectCreate(hipUserObject_t *, void *, hipHostFn_t, unsigned, unsigned);
hipError_t hipUserObjectRelease(hipUserObject_t, unsigned);
hipError_t hipGraphRetainUserObject(hipGraph_t, hipUserObject_t, unsigned, unsigned);
}

#define WANT(code, call)                                                        \
    do {                                                                        \
        int e = (call);                                                         \
        if (e != (code)) {                                                      \
            printf("line %d: %s gives %d, not %d\n", __LINE__, #call, e, code); \
            return 1;                                                           \
        }                                                                       \
    } while (0)
#define OK(call) WANT(hipSuccess, call)
#define SAME(a, b) WANT(1, (a) == (b))

enum { HostToDevice = 1, DeviceToHost = 2, DeviceToDevice = 3 };
enum { Global, ThreadLocal, Relaxed };
constexpr int N = 64;

__device__ int total;

__global__ void add(int *y, const int *x, int a) {
    int i = __builtin_amdgcn_workitem_id_x();
    y[i] += a * x[i];
    if (i == 0) total += 1;
}

static void increment(void *count) { ++*(int *)count; }

static int captured() {
    int x[N], y[N], launches = 0, calls = 0, status = -1;
    for (int i = 0; i < N; i++) x[i] = i;
    int *dx, *dy;
    OK(hipMalloc((void **)&dx, sizeof x));
    OK(hipMalloc((void **)&dy, sizeof y));
    hipStream_t stream;
    OK(hipStreamCreate(&stream));
    OK(hipStreamBeginCapture(stream, Global));
    OK(hipStreamIsCapturing(stream, &status));
    SAME(status, 1);
    WANT(hipErrorIllegalState, hipStreamBeginCapture(stream, Global));
    OK(hipMemcpyAsync(dx, x, sizeof x, HostToDevice, stream));
    OK(hipMemsetAsync(dy, 0, sizeof y, stream));
    int factor = 3;
    add<<<1, N, 0, stream>>>(dy, dx, factor);
    factor = 1000;  // the node has 3
    OK(hipLaunchHostFunc(stream, increment, &calls));
    OK(hipMemcpyAsync(y, dy, sizeof y, DeviceToHost, stream));
    OK(hipMemcpyFromSymbolAsync(&launches, &total, sizeof total, 0, DeviceToHost, stream));
    SAME(calls, 0);
    const hipGraphNode_t *last;
    size_t count = 0;
    OK(hipStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &last, &count));
    SAME(count, 1);
    hipGraph_t graph;
    OK(hipStreamEndCapture(stream, &graph));
    OK(hipStreamIsCapturing(stream, &status));
    SAME(status, 0);
    hipGraph_t none;
    WANT(hipErrorIllegalState, hipStreamEndCapture(stream, &none));

    hipGraphNode_t nodes[8];
    count = 8;
    OK(hipGraphGetNodes(graph, nodes, &count));
    SAME(count, 6);
    SAME(nodes[6], nullptr);
    const int types[] = {1, 2, 0, 3, 1, 1};
    for (int i = 0; i < 6; i++) {
        int type = -1;
        OK(hipGraphNodeGetType(nodes[i], &type));
        SAME(type, types[i]);
    }
    OK(hipGraphGetEdges(graph, nullptr, nullptr, &count));
    SAME(count, 5);
    hipGraphExec_t exec;
    OK(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    for (int run = 1; run <= 2; run++) {
        OK(hipGraphLaunch(exec, stream));
        OK(hipStreamSynchronize(stream));
        for (int i = 0; i < N; i++) SAME(y[i], 3 * i);
        SAME(launches, run);
        SAME(calls, run);
    }

    // Other arguments for the instance; the graph keeps its own.
    hipKernelNodeParams params;
    OK(hipGraphKernelNodeGetParams(nodes[2], &params));
    SAME(*(int *)params.kernelParams[2], 3);
    int five = 5;
    void *args[] = {&dy, &dx, &five};
    params.kernelParams = args;
    OK(hipGraphExecKernelNodeSetParams(exec, nodes[2], &params));
    OK(hipGraphLaunch(exec, stream));
    for (int i = 0; i < N; i++) SAME(y[i], 5 * i);
    OK(hipGraphNodeSetEnabled(exec, nodes[2], 0));
    WANT(hipErrorInvalidValue, hipGraphNodeSetEnabled(exec, nodes[3], 0));
    OK(hipGraphLaunch(exec, stream));
    for (int i = 0; i < N; i++) SAME(y[i], 0);
    int result = -1;
    hipGraphNode_t at;
    OK(hipGraphNodeSetEnabled(exec, nodes[2], 1));
    OK(hipGraphExecUpdate(exec, graph, &at, &result));
    SAME(result, 0);
    OK(hipGraphLaunch(exec, stream));
    for (int i = 0; i < N; i++) SAME(y[i], 3 * i);

    hipGraph_t clone;
    OK(hipGraphClone(&clone, graph));
    OK(hipGraphNodeFindInClone(&at, nodes[2], clone));
    WANT(hipErrorInvalidValue, hipGraphNodeFindInClone(&at, nodes[2], graph));
    OK(hipGraphDestroy(clone));
    OK(hipGraphDestroy(graph));
    WANT(hipErrorIllegalState, hipGraphDestroy(graph));
    OK(hipGraphLaunch(exec, stream));  // an instance stands alone
    OK(hipGraphExecDestroy(exec));
    WANT(hipErrorInvalidValue, hipGraphLaunch(exec, stream));
    OK(hipStreamDestroy(stream));
    OK(hipFree(dx));
    OK(hipFree(dy));
    return 0;
}

static int streams_join() {
    hipStream_t a, b;
    hipEvent_t fork, join, early;
    OK(hipStreamCreate(&a));
    OK(hipStreamCreate(&b));
    OK(hipEventCreate(&fork));
    OK(hipEventCreate(&join));
    OK(hipEventCreate(&early));
    int *d, y[2] = {}, status;
    OK(hipMalloc((void **)&d, 8));
    OK(hipEventRecord(early, a));
    OK(hipStreamBeginCapture(a, ThreadLocal));
    OK(hipMemsetAsync(d, 0, 8, a));
    OK(hipEventRecord(fork, a));
    OK(hipStreamWaitEvent(b, fork, 0));
    OK(hipStreamIsCapturing(b, &status));
    SAME(status, 1);
    OK(hipMemsetAsync(d, 1, 4, b));
    OK(hipMemsetAsync(d + 1, 2, 4, a));
    OK(hipEventRecord(join, b));
    OK(hipStreamWaitEvent(a, join, 0));
    OK(hipMemcpyAsync(y, d, 8, DeviceToHost, a));
    hipGraph_t graph;
    WANT(hipErrorStreamCaptureUnmatched, hipStreamEndCapture(b, &graph));
    OK(hipStreamEndCapture(a, &graph));
    size_t edges = 0;
    OK(hipGraphGetEdges(graph, nullptr, nullptr, &edges));
    SAME(edges, 4);  // a diamond
    hipGraphExec_t exec;
    OK(hipGraphInstantiateWithFlags(&exec, graph, 0));
    OK(hipGraphLaunch(exec, b));
    SAME(y[0], 0x01010101);
    SAME(y[1], 0x02020202);
    OK(hipGraphExecDestroy(exec));
    OK(hipGraphDestroy(graph));

    // Work that does not come back.
    OK(hipStreamBeginCapture(a, ThreadLocal));
    OK(hipEventRecord(fork, a));
    OK(hipStreamWaitEvent(b, fork, 0));
    OK(hipMemsetAsync(d, 1, 4, b));
    WANT(hipErrorStreamCaptureUnjoined, hipStreamEndCapture(a, &graph));

    // Events from before, from another capture, and waits for them.
    OK(hipStreamBeginCapture(a, ThreadLocal));
    WANT(hipErrorStreamCaptureIsolation, hipStreamWaitEvent(b, early, 0));
    OK(hipEventRecord(fork, a));
    OK(hipStreamBeginCapture(b, ThreadLocal));
    WANT(hipErrorStreamCaptureMerge, hipStreamWaitEvent(b, fork, 0));
    OK(hipStreamEndCapture(b, &graph));
    OK(hipGraphDestroy(graph));
    WANT(hipErrorCapturedEvent, hipEventSynchronize(fork));
    WANT(hipErrorStreamCaptureInvalidated, hipMemsetAsync(d, 1, 4, a));
    WANT(hipErrorStreamCaptureInvalidated, hipStreamEndCapture(a, &graph));
    SAME(graph, nullptr);

    // What may not be called meanwhile.
    void *p;
    OK(hipStreamBeginCapture(a, Relaxed));
    OK(hipMalloc(&p, 8));
    OK(hipFree(p));
    WANT(hipErrorStreamCaptureImplicit, hipMemcpy(d, y, 8, HostToDevice));
    WANT(hipErrorStreamCaptureInvalidated, hipStreamEndCapture(a, &graph));
    OK(hipStreamBeginCapture(a, Global));
    WANT(hipErrorStreamCaptureUnsupported, hipMalloc(&p, 8));
    WANT(hipErrorStreamCaptureInvalidated, hipStreamEndCapture(a, &graph));
    OK(hipStreamBeginCapture(a, Global));
    WANT(hipErrorStreamCaptureUnsupported, hipStreamSynchronize(a));
    WANT(hipErrorStreamCaptureInvalidated, hipStreamEndCapture(a, &graph));
    OK(hipStreamBeginCapture(a, Global));
    WANT(hipErrorStreamCaptureUnsupported, hipDeviceSynchronize());
    WANT(hipErrorStreamCaptureInvalidated, hipStreamEndCapture(a, &graph));
    WANT(hipErrorStreamCaptureUnsupported, hipStreamBeginCapture(nullptr, Global));
    WANT(hipErrorInvalidValue, hipStreamBeginCapture(a, 3));
    OK(hipFree(d));
    return 0;
}

static int nodes() {
    hipGraph_t graph, child;
    OK(hipGraphCreate(&graph, 0));
    OK(hipGraphCreate(&child, 0));
    WANT(hipErrorInvalidValue, hipGraphCreate(&graph, 1));
    int x[N], y[N], calls = 0;
    for (int i = 0; i < N; i++) x[i] = i;
    int *dx, *dy, factor = 2;
    OK(hipMalloc((void **)&dx, sizeof x));
    OK(hipMalloc((void **)&dy, sizeof y));
    hipGraphNode_t up, fill, kernel, host, part, down;
    OK(hipGraphAddMemcpyNode1D(&up, graph, nullptr, 0, dx, x, sizeof x, HostToDevice));
    WANT(hipErrorInvalidValue, hipGraphAddMemcpyNode1D(&up, graph, nullptr, 0, dx, x, 0, HostToDevice));
    WANT(hipErrorInvalidValue, hipGraphAddMemcpyNode1D(&up, graph, nullptr, 0, dx, x, sizeof x + 1, HostToDevice));
    hipMemsetParams zero = {dy, 4, 1, 0, 7, N};
    OK(hipGraphAddMemsetNode(&fill, graph, nullptr, 0, &zero));
    zero.elementSize = 3;
    WANT(hipErrorInvalidValue, hipGraphAddMemsetNode(&fill, graph, nullptr, 0, &zero));
    void *args[] = {&dy, &dx, &factor};
    hipKernelNodeParams params = {dim3(N), nullptr, (void *)add, dim3(1), args, 0};
    OK(hipGraphAddKernelNode(&kernel, child, nullptr, 0, &params));
    OK(hipGraphAddChildGraphNode(&part, graph, &fill, 1, child));
    OK(hipGraphDestroy(child));  // the node has its own
    WANT(hipErrorInvalidValue, hipGraphAddChildGraphNode(&part, graph, nullptr, 0, child));
    hipHostNodeParams call = {increment, &calls};
    OK(hipGraphAddHostNode(&host, graph, &part, 1, &call));
    OK(hipGraphAddMemcpyNode1D(&down, graph, &host, 1, y, dy, sizeof y, DeviceToHost));
    OK(hipGraphAddDependencies(graph, &up, &part, 1));
    WANT(hipErrorInvalidValue, hipGraphAddDependencies(graph, &up, &part, 1));
    WANT(hipErrorInvalidValue, hipGraphAddDependencies(graph, &up, &up, 1));
    hipGraphExec_t exec;
    OK(hipGraphAddDependencies(graph, &down, &up, 1));
    WANT(hipErrorInvalidValue, hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));  // a cycle
    OK(hipGraphRemoveDependencies(graph, &down, &up, 1));
    WANT(hipErrorInvalidValue, hipGraphRemoveDependencies(graph, &down, &up, 1));
    OK(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    WANT(hipErrorInvalidValue, hipGraphInstantiateWithFlags(&exec, graph, 64));
    factor = 100;
    OK(hipGraphLaunch(exec, nullptr));
    for (int i = 0; i < N; i++) SAME(y[i], 7 + 2 * i);
    SAME(calls, 1);

    // Another shape is no update.
    hipGraph_t other;
    hipGraphNode_t at;
    int result = -1;
    OK(hipGraphCreate(&other, 0));
    WANT(hipErrorGraphExecUpdateFailure, hipGraphExecUpdate(exec, other, &at, &result));
    SAME(result, 2);
    OK(hipGraphDestroy(other));
    OK(hipGraphExecDestroy(exec));
    OK(hipGraphDestroy(graph));

    // Objects live as long as graphs have references to them.
    int destroyed = 0;
    hipUserObject_t object;
    OK(hipUserObjectCreate(&object, &destroyed, increment, 2, 1));
    OK(hipGraphCreate(&graph, 0));
    OK(hipGraphRetainUserObject(graph, object, 1, 1));
    OK(hipUserObjectRelease(object, 1));
    OK(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    OK(hipGraphDestroy(graph));
    SAME(destroyed, 0);
    OK(hipGraphExecDestroy(exec));
    SAME(destroyed, 1);
    OK(hipFree(dx));
    OK(hipFree(dy));
    return 0;
}

static int memory() {
    hipGraph_t graph;
    hipGraphNode_t alloc, fill, copy, free;
    OK(hipGraphCreate(&graph, 0));
    hipMemAllocNodeParams params = {1, 0, 1, 0};
    WANT(hipErrorInvalidValue, hipGraphAddMemAllocNode(&alloc, graph, nullptr, 0, &params));  // no bytes
    params.bytesize = 1024;
    OK(hipGraphAddMemAllocNode(&alloc, graph, nullptr, 0, &params));
    SAME(params.dptr != nullptr, 1);
    hipMemsetParams value = {params.dptr, 1, 1, 0, 9, 1024};
    OK(hipGraphAddMemsetNode(&fill, graph, &alloc, 1, &value));
    unsigned char bytes[1024] = {};
    OK(hipGraphAddMemcpyNode1D(&copy, graph, &fill, 1, bytes, params.dptr, 1024, DeviceToHost));
    OK(hipGraphAddMemFreeNode(&free, graph, &copy, 1, params.dptr));
    WANT(hipErrorInvalidValue, hipGraphAddMemFreeNode(&free, graph, &copy, 1, params.dptr));
    hipGraphExec_t exec;
    OK(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    WANT(hipErrorNotSupported, hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    OK(hipGraphLaunch(exec, nullptr));
    OK(hipGraphLaunch(exec, nullptr));
    for (int i = 0; i < 1024; i++) SAME(bytes[i], 9);
    unsigned long long used = 1, high = 0;
    OK(hipDeviceGetGraphMemAttribute(0, 0, &used));
    OK(hipDeviceGetGraphMemAttribute(0, 1, &high));
    SAME(used, 0);
    SAME(high, 1024);
    OK(hipGraphExecDestroy(exec));
    OK(hipGraphDestroy(graph));

    // Memory in the order of a captured stream.
    hipStream_t stream;
    OK(hipStreamCreate(&stream));
    OK(hipStreamBeginCapture(stream, Global));
    void *p;
    OK(hipMallocAsync(&p, 1024, stream));
    OK(hipMemsetAsync(p, 5, 1024, stream));
    OK(hipMemcpyAsync(bytes, p, 1024, DeviceToHost, stream));
    OK(hipFreeAsync(p, stream));
    OK(hipStreamEndCapture(stream, &graph));
    OK(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    OK(hipGraphLaunch(exec, stream));
    for (int i = 0; i < 1024; i++) SAME(bytes[i], 5);
    OK(hipGraphExecDestroy(exec));
    OK(hipGraphDestroy(graph));
    return 0;
}

int main() {
    if (captured() || streams_join() || nodes() || memory()) return 1;
    printf("ok\n");
}
