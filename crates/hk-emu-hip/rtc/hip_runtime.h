// What hiprtc declares before a program's source where there is no ROCm: coordinates, barriers, atomics, shuffles and the maths
// that the target has instructions for. Compiles without any other header and without device libraries.
#pragma once
#define HK_EMU_HIPRTC 1
#ifndef __HIPCC_RTC__
#define __HIPCC_RTC__ 1
#endif

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __managed__ __attribute__((managed))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __HK_BOUNDS1(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define __HK_BOUNDS2(threads, waves) __HK_BOUNDS1(threads) __attribute__((amdgpu_waves_per_eu(waves)))
#define __HK_BOUNDS(a, b, name, ...) name
#define __launch_bounds__(...) __HK_BOUNDS(__VA_ARGS__, __HK_BOUNDS2, __HK_BOUNDS1)(__VA_ARGS__)
#define HIP_DYNAMIC_SHARED(type, name) extern __shared__ type name[];

#ifndef __SIZE_T
#define __SIZE_T
typedef __SIZE_TYPE__ size_t;
#endif
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef __INT64_TYPE__ int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef unsigned int uint;

#define __HK_VECTORS(type, name, alignment)                                                         \
    struct alignas(sizeof(type)) name##1 { type x; };                                               \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                        \
    struct alignas(sizeof(type)) name##3 { type x, y, z; };                                         \
    struct alignas(alignment) name##4 { type x, y, z, w; };                                         \
    __host__ __device__ inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
    __host__ __device__ inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    __host__ __device__ inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
__HK_VECTORS(float, float, 16)
__HK_VECTORS(int, int, 16)
__HK_VECTORS(unsigned int, uint, 16)
__HK_VECTORS(double, double, 16)

struct dim3 {
    unsigned x, y, z;
    __host__ __device__ constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define __HK_COORDINATE(type, X, Y, Z)                                               \
    struct type {                                                                    \
        __device__ static unsigned get_x() { return X; }                             \
        __device__ static unsigned get_y() { return Y; }                             \
        __device__ static unsigned get_z() { return Z; }                             \
        __declspec(property(get = get_x)) unsigned x;                                \
        __declspec(property(get = get_y)) unsigned y;                                \
        __declspec(property(get = get_z)) unsigned z;                                \
        __device__ operator dim3() const { return dim3(get_x(), get_y(), get_z()); } \
    };
__HK_COORDINATE(__hk_thread, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
                __builtin_amdgcn_workitem_id_z())
__HK_COORDINATE(__hk_block, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
                __builtin_amdgcn_workgroup_id_z())
__HK_COORDINATE(__hk_block_size, __builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(),
                __builtin_amdgcn_workgroup_size_z())
__HK_COORDINATE(__hk_grid_size, ((unsigned *)__builtin_amdgcn_implicitarg_ptr())[0],
                ((unsigned *)__builtin_amdgcn_implicitarg_ptr())[1],
                ((unsigned *)__builtin_amdgcn_implicitarg_ptr())[2])
extern const __device__ __attribute__((weak)) __hk_thread threadIdx;
extern const __device__ __attribute__((weak)) __hk_block blockIdx;
extern const __device__ __attribute__((weak)) __hk_block_size blockDim;
extern const __device__ __attribute__((weak)) __hk_grid_size gridDim;
constexpr int warpSize = 64;

__device__ inline void __threadfence_block() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"); }
__device__ inline void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
__device__ inline void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
__device__ inline void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

#define __HK_ATOMIC(name, operation)                                                                \
    template <class T>                                                                              \
    __device__ inline T name(T *at, decltype(T()) value) {                                          \
        return __hip_atomic_##operation(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);     \
    }                                                                                               \
    template <class T>                                                                              \
    __device__ inline T name##_block(T *at, decltype(T()) value) {                                  \
        return __hip_atomic_##operation(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); \
    }                                                                                               \
    template <class T>                                                                              \
    __device__ inline T name##_system(T *at, decltype(T()) value) {                                 \
        return __hip_atomic_##operation(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);    \
    }
__HK_ATOMIC(atomicAdd, fetch_add)
__HK_ATOMIC(atomicSub, fetch_sub)
__HK_ATOMIC(atomicMin, fetch_min)
__HK_ATOMIC(atomicMax, fetch_max)
__HK_ATOMIC(atomicAnd, fetch_and)
__HK_ATOMIC(atomicOr, fetch_or)
__HK_ATOMIC(atomicXor, fetch_xor)
__HK_ATOMIC(atomicExch, exchange)
template <class T>
__device__ inline T atomicCAS(T *at, decltype(T()) expected, decltype(T()) value) {
    __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                         __HIP_MEMORY_SCOPE_AGENT);
    return expected;
}

__device__ inline unsigned __lane_id() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
__device__ inline unsigned long long __ballot(int predicate) { return __builtin_amdgcn_ballot_w64(predicate != 0); }
__device__ inline int __any(int predicate) { return __ballot(predicate) != 0; }
__device__ inline int __all(int predicate) { return __ballot(!predicate) == 0; }

// Barriers that count the threads of the block whose predicate is not 0: a wave's first lane adds those of its wave.
__device__ inline int __syncthreads_count(int predicate) {
    __shared__ static int count;
    __syncthreads();  // every thread has read what the last call counted
    if ((threadIdx.x | threadIdx.y | threadIdx.z) == 0) count = 0;
    __syncthreads();
    int of_wave = __builtin_popcountll(__ballot(predicate));
    if (__lane_id() == 0) __hip_atomic_fetch_add(&count, of_wave, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    __syncthreads();
    return count;
}
__device__ inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }
__device__ inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }

__device__ inline int __popc(unsigned x) { return __builtin_popcount(x); }
__device__ inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
__device__ inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
__device__ inline int __ffs(int x) { return __builtin_ffs(x); }

// Words of a value, each moved from another lane.
template <class T>
__device__ inline T __hk_from_lane(T value, int lane) {
    static_assert(sizeof(T) % 4 == 0, "shuffles move 4 or 8 bytes");
    int words[sizeof(T) / 4];
    __builtin_memcpy(words, &value, sizeof(T));
    for (int &word : words) word = __builtin_amdgcn_ds_bpermute(4 * lane, word);
    __builtin_memcpy(&value, words, sizeof(T));
    return value;
}
template <class T>
__device__ inline T __shfl(T value, int lane, int width = warpSize) {
    int self = __lane_id();
    return __hk_from_lane(value, (self & ~(width - 1)) + (lane & (width - 1)));
}
template <class T>
__device__ inline T __shfl_up(T value, unsigned delta, int width = warpSize) {
    int self = __lane_id(), from = self - (int)delta;
    return __hk_from_lane(value, from < (self & ~(width - 1)) ? self : from);
}
template <class T>
__device__ inline T __shfl_down(T value, unsigned delta, int width = warpSize) {
    int self = __lane_id();
    return __hk_from_lane(value, (self & (width - 1)) + (int)delta >= width ? self : self + (int)delta);
}
template <class T>
__device__ inline T __shfl_xor(T value, int mask, int width = warpSize) {
    int self = __lane_id(), from = self ^ mask;
    return __hk_from_lane(value, from >= ((self + width) & ~(width - 1)) ? self : from);
}

#define __HK_UNARY(name)                                                        \
    __device__ inline float name##f(float x) { return __builtin_##name##f(x); } \
    __device__ inline float name(float x) { return __builtin_##name##f(x); }
__HK_UNARY(exp)
__HK_UNARY(exp2)
__HK_UNARY(log)
__HK_UNARY(log2)
__HK_UNARY(log10)
#define __HK_BOTH(name) \
    __HK_UNARY(name) __device__ inline double name(double x) { return __builtin_##name(x); }
__HK_BOTH(sqrt)
__HK_BOTH(fabs)
__HK_BOTH(floor)
__HK_BOTH(ceil)
__HK_BOTH(trunc)
__HK_BOTH(rint)
__HK_BOTH(round)
#define __HK_BINARY(name)                                                                   \
    __device__ inline float name##f(float x, float y) { return __builtin_##name##f(x, y); } \
    __device__ inline double name(double x, double y) { return __builtin_##name(x, y); }
__HK_BINARY(fmin)
__HK_BINARY(fmax)
__HK_BINARY(copysign)
__device__ inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
__device__ inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
__device__ inline float rsqrtf(float x) { return 1 / __builtin_sqrtf(x); }
__device__ inline float __expf(float x) { return __builtin_expf(x); }
__device__ inline float __logf(float x) { return __builtin_logf(x); }
template <class T>
__host__ __device__ constexpr T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
__host__ __device__ constexpr T max(T a, T b) {
    return a < b ? b : a;
}
__device__ inline int abs(int x) { return __builtin_abs(x); }

// Buffered printf: the compiler stores formats and arguments where this says.
extern "C" __device__ int printf(const char *, ...);
extern "C" __device__ inline __attribute__((used)) char *__printf_alloc(unsigned bytes) {
    auto *buffer = ((unsigned **)__builtin_amdgcn_implicitarg_ptr())[9];
    unsigned at = __hip_atomic_load(buffer, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    do
        if (at + bytes > buffer[1]) return nullptr;
    while (!__hip_atomic_compare_exchange_weak(buffer, &at, at + bytes, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                               __HIP_MEMORY_SCOPE_AGENT));
    return (char *)(buffer + 2) + at;
}

// A frame for stderr: control word, format, text.
template <unsigned N>
__device__ inline void __hk_assert_fail(const char (&text)[N]) {
    constexpr unsigned bytes = 4 + 8 + (N + 7) / 8 * 8;
    if (char *frame = __printf_alloc(bytes)) {
        unsigned words[3] = {bytes << 2 | 1, '%' | 's' << 8, 0};
        __builtin_memcpy(frame, words, sizeof words);
        for (unsigned i = 0; i < bytes - 12; i++) frame[12 + i] = i < N ? text[i] : 0;
    }
    __builtin_trap();
}
#define __HK_TEXT(x) #x
#define __HK_LINE(x) __HK_TEXT(x)
#define assert(condition) \
    ((condition)          \
         ? (void)0        \
         : __hk_assert_fail(__FILE__ ":" __HK_LINE(__LINE__) ": Device-side assertion `" #condition "' failed.\n"))
