// Kernels whose resources the tests know.
#define KERNEL(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads)))

struct Params {
    const float *x;
    float *y;
    long n;
    float scale;
};

KERNEL(256) void lds(Params p) {
    static __attribute__((shared)) float tile[1000];
    const int t = __builtin_amdgcn_workitem_id_x();
    tile[t] = p.x[t];
    __builtin_amdgcn_s_barrier();
    p.y[t] = tile[(t * 7 + int(p.n)) % 256] * p.scale;
}

using F32x16 = float __attribute__((ext_vector_type(16)));
using Bf16x4 = short __attribute__((ext_vector_type(4)));

// 16 accumulators of 16 registers: they fill the accumulation registers.
template <int N>
static __attribute__((device)) inline void mma(const Bf16x4 *a, F32x16 *c) {
    const int t = __builtin_amdgcn_workitem_id_x();
    F32x16 acc[N];
    for (int i = 0; i < N; i++) acc[i] = c[t * N + i];
    for (int k = 0; k < 100; k++) {
        const Bf16x4 x = a[t + k * 256];
#pragma unroll
        for (int i = 0; i < N; i++) acc[i] = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, x, acc[i], 0, 0, 0);
    }
    for (int i = 0; i < N; i++) c[t * N + i] = acc[i];
}
KERNEL(256) __attribute__((amdgpu_waves_per_eu(1, 1))) void agprs(const Bf16x4 *a, F32x16 *c) { mma<16>(a, c); }
KERNEL(1024) void spills(const Bf16x4 *a, F32x16 *c) { mma<16>(a, c); }

KERNEL(64) void hidden(int *y) {
    const int *implicit = (const __attribute__((address_space(4))) int *)__builtin_amdgcn_implicitarg_ptr();
    y[__builtin_amdgcn_workitem_id_x()] = implicit[0];
}

// A table of addresses: relocated when loaded.
__attribute__((device)) int a, b;
__attribute__((device)) int *const volatile table[2] = {&a, &b};
KERNEL(64) void relocated(int i) { *table[i] = i; }
