// printf and assert of device code. Declares the little of HIP that it needs; its kernels are compiled with the
// functions of device_library.h, or, with ROCM, with ROCm's headers and device libraries.
#ifdef ROCM
#include <assert.h>
#include <hip/hip_runtime.h>
#include <stdio.h>
#else
extern "C" int printf(const char *, ...);

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))

using size_t = decltype(sizeof 0);
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef enum hipError_t { hipSuccess } hipError_t;
enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost };
typedef struct ihipStream_t *hipStream_t;
extern "C" {
__device__ int printf(const char *, ...);
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t shared = 0, hipStream_t stream = nullptr);
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t hipMalloc(void **, size_t);
hipError_t hipMemcpy(void *, const void *, size_t, hipMemcpyKind);
hipError_t hipDeviceSynchronize();
hipError_t hipDeviceReset();
const char *hipGetErrorName(hipError_t);
}
#include "device_library.h"
#define assert(condition) ((condition) ? (void)0 : __assert_fail(#condition, "printf.hip", __LINE__, __func__))
#endif

#define CHECK(call) \
    if (int code = (call)) return printf("%s gives %d, line %d\n", #call, code, __LINE__), 1

__global__ void greet(int *count) {
    int block = __builtin_amdgcn_workgroup_id_x(), thread = __builtin_amdgcn_workitem_id_x();
    if (thread % 40 == 0) {
        const char *where = block ? "elsewhere" : "first";
        count[2 * block + thread / 40] = printf("%s: block %d of thread %3u: %.3f %c %lx\n", where, block, thread,
                                                0.5 * thread, 'a' + block, 1ul << 40);
    }
}

__global__ void plain() {
    if (__builtin_amdgcn_workitem_id_x() < 2) printf("a line\n");
}

__global__ void format(const char *text, int value) { printf(text, value, 255); }

__global__ void flood(int *lost) {
    if (printf("%d %s\n", 1, "of many lines that are too long together for the buffer of 4 mebibyte") < 0)
        __hip_atomic_fetch_add(lost, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

__global__ void check(int bound) {
    int thread = __builtin_amdgcn_workitem_id_x();
    assert(thread < bound);
}

int main(int argc, char **) {
    int *out, got[4];
    CHECK(hipMalloc((void **)&out, sizeof got));
    printf("host\n");
    greet<<<2, 64>>>(out);
    plain<<<1, 64>>>();
    char text[] = "<%d %x>\n", *at;
    CHECK(hipMalloc((void **)&at, sizeof text));
    CHECK(hipMemcpy(at, text, sizeof text, hipMemcpyHostToDevice));
    format<<<1, 1>>>(at, 7);
    CHECK(hipDeviceSynchronize());
    CHECK(hipMemcpy(got, out, sizeof got, hipMemcpyDeviceToHost));
    printf("host again: %d %d %d %d\n", got[0], got[1], got[2], got[3]);
    if (argc > 1) {
        int lost = 0;
        CHECK(hipMemcpy(out, &lost, sizeof lost, hipMemcpyHostToDevice));
        flood<<<1024, 64>>>(out);
        CHECK(hipMemcpy(&lost, out, sizeof lost, hipMemcpyDeviceToHost));
        return printf("%d lost\n", lost), 0;
    }
    check<<<1, 64>>>(64);
    CHECK(hipDeviceSynchronize());
    check<<<1, 64>>>(62);
    printf("%s\n", hipGetErrorName(hipDeviceSynchronize()));
    CHECK(hipDeviceReset());
    plain<<<1, 64>>>();
    CHECK(hipDeviceSynchronize());
    return 0;
}
