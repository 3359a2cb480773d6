// A kernel with a race in LDS, one without, and memory that is not freed. Exits with 0 whatever the kernels do wrong.
extern "C" int printf(const char *, ...);

#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))

using size_t = decltype(sizeof 0);
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef enum hipError_t { hipSuccess } hipError_t;
typedef struct ihipStream_t *hipStream_t;
extern "C" {
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t shared = 0, hipStream_t stream = nullptr);
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t hipMalloc(void **, size_t);
hipError_t hipHostMalloc(void **, size_t, unsigned);
hipError_t hipFree(void *);
hipError_t hipDeviceSynchronize();
const char *hipGetErrorName(hipError_t);
}

__global__ void racy(int *out) {
    __shared__ int part[128];
    int i = __builtin_amdgcn_workitem_id_x();
    part[i] = i;
    out[i] = ((volatile int *)part)[127 - i];
}

__global__ void clean(int *out) { out[__builtin_amdgcn_workitem_id_x()] = 1; }

__attribute__((noinline)) void run(int *out) {
    clean<<<1, 128>>>(out);
    racy<<<1, 128>>>(out);
}

__attribute__((noinline)) void *keep() {
    void *kept;
    return hipMalloc(&kept, 1000) ? nullptr : kept;
}

int main() {
    int *out;
    void *host;
    if (hipMalloc((void **)&out, 512) || hipHostMalloc(&host, 64, 0)) return 1;
    if (!keep()) return 1;
    run(out);
    printf("%s\n", hipGetErrorName(hipDeviceSynchronize()));
    hipFree(out);
    return 0;
}
