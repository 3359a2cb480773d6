// A program with kernels in it: launches by <<<..>>>, device, constant and managed variables, and host memory that a
// kernel uses. Declares the little of HIP that it needs, so that no header of ROCm is needed to compile it.
extern "C" int printf(const char *, ...);

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __constant__ __attribute__((constant))
#define __managed__ __attribute__((managed))

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
hipError_t hipHostFree(void *);
hipError_t hipMemcpy(void *, const void *, size_t, int);
hipError_t hipMemcpyToSymbol(const void *, const void *, size_t, size_t, int);
hipError_t hipMemcpyFromSymbol(void *, const void *, size_t, size_t, int);
hipError_t hipDeviceSynchronize();
hipError_t hipGetLastError();
hipError_t hipGetDeviceCount(int *);
hipError_t hipSetDevice(int);
hipError_t hipOccupancyMaxPotentialBlockSize(int *, int *, const void *, size_t, int);
}

__device__ int total;
__constant__ int scale = 2;
__managed__ int shared_count = 5;

__global__ void sum(const int *x, int n) {
    int i = __builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x();
    if (i < n) __hip_atomic_fetch_add(&total, scale * x[i], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    if (i == 0) shared_count += 1;
}

struct __attribute__((packed)) Packed {
    char tag;
    int value;
    double wide;
};

// Members at odd addresses, through global memory and LDS.
__global__ void pack(Packed *y) {
    __attribute__((shared)) static Packed lds[64];
    int i = __builtin_amdgcn_workitem_id_x();
    lds[63 - i].value = i;
    lds[63 - i].wide = 0.5 * i;
    __builtin_amdgcn_s_barrier();
    y[i].value = lds[i].value;
    y[i].wide = lds[i].wide;
}

template <class T>
__global__ void fill(T *y, T value, int n) {
    int i = __builtin_amdgcn_workitem_id_x();
    if (i < n) y[i] = value;
}

#define CHECK(call)                                               \
    do {                                                          \
        int e = (call);                                           \
        if (e != 0) {                                             \
            printf("line %d: %s gives %d\n", __LINE__, #call, e); \
            return 1;                                             \
        }                                                         \
    } while (0)
#define EXPECT(condition)                                      \
    do {                                                       \
        if (!(condition)) {                                    \
            printf("line %d: not %s\n", __LINE__, #condition); \
            return 1;                                          \
        }                                                      \
    } while (0)

int main() {
    constexpr int n = 300;
    int devices = 0;
    CHECK(hipGetDeviceCount(&devices));
    for (int d = 0; d < devices; d++) {
        CHECK(hipSetDevice(d));
        int host[n], *x, zero = 0, result = 0, three = 3;
        for (int i = 0; i < n; i++) host[i] = i;
        CHECK(hipMalloc((void **)&x, sizeof host));
        CHECK(hipMemcpy(x, host, sizeof host, 1));
        CHECK(hipMemcpyToSymbol((const void *)&total, &zero, sizeof zero, 0, 1));
        sum<<<3, 128>>>(x, n);
        CHECK(hipGetLastError());
        CHECK(hipMemcpyFromSymbol(&result, (const void *)&total, sizeof result, 0, 2));
        EXPECT(result == n * (n - 1));
        CHECK(hipMemcpyToSymbol((const void *)&scale, &three, sizeof three, 0, 1));
        sum<<<dim3(3), dim3(128), 0, nullptr>>>(x, n);
        CHECK(hipDeviceSynchronize());
        CHECK(hipMemcpyFromSymbol(&result, (const void *)&total, sizeof result, 0, 2));
        EXPECT(result == n * (n - 1) / 2 * 5);
        // Managed memory is seen by both sides, and by both devices.
        EXPECT(shared_count == 7 + 2 * d);

        float *mapped;
        CHECK(hipHostMalloc((void **)&mapped, 64 * sizeof(float), 0));
        mapped[63] = 1.0f;
        fill<<<1, 64>>>(mapped, 2.5f, 63);
        CHECK(hipDeviceSynchronize());
        EXPECT(mapped[0] == 2.5f && mapped[62] == 2.5f && mapped[63] == 1.0f);
        CHECK(hipHostFree(mapped));

        Packed packed[64], *device;
        CHECK(hipMalloc((void **)&device, sizeof packed));
        pack<<<1, 64>>>(device);
        CHECK(hipMemcpy(packed, device, sizeof packed, 2));
        EXPECT(packed[0].value == 63 && packed[5].value == 58 && packed[5].wide == 29.0);
        CHECK(hipFree(device));
        CHECK(hipFree(x));

        int grid = 0, block = 0;
        CHECK(hipOccupancyMaxPotentialBlockSize(&grid, &block, (const void *)sum, 0, 0));
        EXPECT(block == 1024 && grid > 0);
    }
    printf("ok on %d devices\n", devices);
}
