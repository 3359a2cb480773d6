// Times of events, a line each: its name and microseconds, or the name of the error. Declares what it needs of HIP, as
// embedded.hip does.
extern "C" int printf(const char *, ...);

#define __global__ __attribute__((global))

using size_t = decltype(sizeof 0);
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef enum hipError_t { hipSuccess } hipError_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipEvent_t *hipEvent_t;
typedef struct ihipGraph *hipGraph_t;
typedef struct hipGraphExec *hipGraphExec_t;
extern "C" {
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t shared = 0, hipStream_t stream = nullptr);
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t hipMalloc(void **, size_t);
hipError_t hipMemcpyAsync(void *, const void *, size_t, int, hipStream_t);
hipError_t hipMemsetAsync(void *, int, size_t, hipStream_t);
hipError_t hipDeviceGetAttribute(int *, int, int);
hipError_t hipStreamCreateWithFlags(hipStream_t *, unsigned);
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned);
hipError_t hipEventCreateWithFlags(hipEvent_t *, unsigned);
hipError_t hipEventRecord(hipEvent_t, hipStream_t);
hipError_t hipEventSynchronize(hipEvent_t);
hipError_t hipEventElapsedTime(float *, hipEvent_t, hipEvent_t);
hipError_t hipStreamBeginCapture(hipStream_t, int);
hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t *);
hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t *, hipGraph_t, unsigned long long);
hipError_t hipGraphLaunch(hipGraphExec_t, hipStream_t);
const char *hipGetErrorName(hipError_t);
}

__global__ void copy(const float *x, float *y) {
    unsigned i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
    y[i] = x[i];
}

// Each block waits for the one before it.
__global__ void chain(int *done) {
    unsigned block = __builtin_amdgcn_workgroup_id_x();
    if (block > 0)
        while (__hip_atomic_load(done + block - 1, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) == 0) {}
    __hip_atomic_store(done + block, 1, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}

static void require(hipError_t result, const char *what) {
    if (result != hipSuccess) printf("%s gives %s\n", what, hipGetErrorName(result));
}
#define OK(call) require(call, #call)

static hipEvent_t from, to;

static void print(const char *name) {
    float ms;
    OK(hipEventSynchronize(to));
    hipError_t result = hipEventElapsedTime(&ms, from, to);
    if (result == hipSuccess) {
        printf("%s %.3f\n", name, 1000.0 * ms);
    } else {
        printf("%s %s\n", name, hipGetErrorName(result));
    }
}

template <class Work>
static void time(const char *name, hipStream_t stream, Work work) {
    OK(hipEventRecord(from, stream));
    work();
    OK(hipEventRecord(to, stream));
    print(name);
}

int main() {
    constexpr size_t kBytes = 16 << 20;
    constexpr unsigned kBlocks = kBytes / 1024, kNonBlocking = 1;
    static char host[1 << 16];
    void *memory[2], *done;
    hipStream_t blocking, free_running;
    hipEvent_t middle;
    int cus;
    for (void *&m : memory) OK(hipMalloc(&m, kBytes));
    OK(hipMalloc(&done, 4096));
    OK(hipEventCreateWithFlags(&from, 0));
    OK(hipEventCreateWithFlags(&to, 0));
    OK(hipEventCreateWithFlags(&middle, 0));
    OK(hipStreamCreateWithFlags(&blocking, 0));
    OK(hipStreamCreateWithFlags(&free_running, kNonBlocking));
    OK(hipDeviceGetAttribute(&cus, 63, 0));
    printf("cus %d\n", cus);
    float *x = (float *)memory[0], *y = (float *)memory[1];
    OK(hipMemsetAsync(x, 0, kBytes, nullptr));

    auto launch = [&](hipStream_t stream, unsigned parts = 1) { copy<<<kBlocks / parts, 256, 0, stream>>>(x, y); };
    time("nothing", nullptr, [] {});
    time("launch", nullptr, [&] { launch(nullptr); });
    time("again", nullptr, [&] { launch(nullptr); });
    time("quarter", nullptr, [&] { launch(nullptr, 4); });
    time("two", blocking, [&] { launch(blocking), launch(blocking); });
    time("fill", blocking, [&] { OK(hipMemsetAsync(y, 1, kBytes, blocking)); });
    time("copy", blocking, [&] { OK(hipMemcpyAsync(y, x, kBytes, 4, blocking)); });
    time("upload", blocking, [&] { OK(hipMemcpyAsync(x, host, sizeof host, 4, blocking)); });
    // The null stream is behind blocking streams, and they are behind it.
    time("behind blocking", nullptr, [&] { launch(blocking), launch(nullptr), launch(blocking); });
    time("beside", nullptr, [&] { launch(free_running), launch(nullptr); });

    // A stream that waits for an event goes on at its time, whatever the event is recorded for afterwards.
    OK(hipEventRecord(from, nullptr));
    OK(hipStreamWaitEvent(free_running, from, 0));
    launch(nullptr);
    OK(hipEventRecord(middle, nullptr));
    OK(hipStreamWaitEvent(free_running, middle, 0));
    launch(nullptr), launch(nullptr);
    OK(hipEventRecord(middle, nullptr));
    launch(free_running);
    OK(hipEventRecord(to, free_running));
    print("waits");

    hipGraph_t graph;
    hipGraphExec_t exec;
    OK(hipStreamBeginCapture(blocking, 0));
    launch(blocking), launch(blocking);
    OK(hipStreamEndCapture(blocking, &graph));
    OK(hipGraphInstantiateWithFlags(&exec, graph, 0));
    time("graph", blocking, [&] { OK(hipGraphLaunch(exec, blocking)); });

    time("chain", free_running, [&] {
        OK(hipMemsetAsync(done, 0, 4096, free_running));
        chain<<<64, 64, 0, free_running>>>((int *)done);
    });
    time("not behind it", nullptr, [&] { launch(nullptr); });
}
