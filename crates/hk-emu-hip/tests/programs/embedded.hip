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
hipError_t hipLaunchCooperativeKernel(const void *, dim3, dim3, void **, unsigned, hipStream_t);
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

// What a cooperative launch gives to ROCm's device library: this is its barrier of a grid.
struct Grid {
    unsigned long barrier_of_grids;
    unsigned grid, grids;
    unsigned long threads_before, threads;
    unsigned arrived, unused, blocks;
};

__device__ void grid_barrier(Grid *grid) {
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
    __builtin_amdgcn_s_barrier();
    if (__builtin_amdgcn_workitem_id_x() == 0) {
        unsigned before = __hip_atomic_fetch_add(&grid->arrived, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        if ((before & 0xffff) == grid->blocks - 1)
            __hip_atomic_fetch_add(&grid->arrived, 0x10000 - grid->blocks, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        else
            while (__hip_atomic_load(&grid->arrived, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) >> 16 == before >> 16)
                __builtin_amdgcn_s_sleep(1);
    }
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
}

// Each block hands a value to the next one, so often that it comes back; y[n] is what the launch says of its grid.
__global__ void round_trip(int *y) {
    auto *grid = ((Grid **)__builtin_amdgcn_implicitarg_ptr())[11];
    int n = grid->blocks, b = __builtin_amdgcn_workgroup_id_x();
    for (int step = 0; step < n; step++) {
        int value = y[(b + 1) % n];
        grid_barrier(grid);
        if (__builtin_amdgcn_workitem_id_x() == 0) y[b] = value + 1;
        grid_barrier(grid);
    }
    if (b == 0) y[n] = grid->threads * 100 + grid->grids * 10 + grid->grid;
}

// Whether the launch is a cooperative one.
__global__ void cooperates(int *y) { *y = ((Grid **)__builtin_amdgcn_implicitarg_ptr())[11] != nullptr; }

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

        constexpr int blocks = 21;
        int *turns, values[blocks + 1];
        for (int i = 0; i < blocks; i++) values[i] = i;
        CHECK(hipMalloc((void **)&turns, sizeof values));
        CHECK(hipMemcpy(turns, values, sizeof values, 1));
        void *args[] = {&turns};
        auto launch = [&](const void *kernel, unsigned blocks, unsigned threads) -> int {
            return hipLaunchCooperativeKernel(kernel, blocks, threads, args, 0, nullptr);
        };
        for (int again = 0; again < 2; again++) CHECK(launch((const void *)round_trip, blocks, 128));
        CHECK(hipMemcpy(values, turns, sizeof values, 2));
        for (int i = 0; i < blocks; i++) EXPECT(values[i] == i + 2 * blocks);
        EXPECT(values[blocks] == blocks * 128 * 100 + 10);
        EXPECT(launch((const void *)round_trip, 100000, 128) == 720);
        EXPECT(launch((const void *)round_trip, 0, 128) == 9);
        EXPECT(launch((const void *)round_trip, 1, 2048) == 9);
        EXPECT(launch(nullptr, 1, 64) == 98);
        hipGetLastError();
        int cooperative[2];
        CHECK(launch((const void *)cooperates, 1, 1));
        CHECK(hipMemcpy(&cooperative[0], turns, sizeof(int), 2));
        cooperates<<<1, 1>>>(turns);
        CHECK(hipMemcpy(&cooperative[1], turns, sizeof(int), 2));
        EXPECT(cooperative[0] == 1 && cooperative[1] == 0);
        CHECK(hipFree(turns));
        CHECK(hipFree(x));

        int grid = 0, block = 0;
        CHECK(hipOccupancyMaxPotentialBlockSize(&grid, &block, (const void *)sum, 0, 0));
        EXPECT(block == 1024 && grid > 0);
    }
    printf("ok on %d devices\n", devices);
}
