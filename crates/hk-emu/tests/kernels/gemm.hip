// gemm.hip: d[m, n] = sum over k of a[m, k] * b[n, k]
//   a, b  rows of k_bytes bytes, contiguous; bf16, or the target's 8-bit e4m3
//   d     f32, contiguous
// m and n are multiples of 128, k_bytes of 64. A block of four waves makes a tile of 128 x 128, each wave a quarter.
// A stage is 64 bytes of k of all rows. A lane reads 16 bytes of its row at a time: which k they are does not matter,
// as it is the same in a and b.

typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef short i16x4 __attribute__((ext_vector_type(4)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
typedef long i64x2 __attribute__((ext_vector_type(2)));

constexpr int kTile = 128, kStage = 64, kThreads = 256;

struct Args {
    const char *a, *b;
    float *d;
    int n, k_bytes;
};

// Two steps of 32 bytes of k.
struct Bf16 {
    static __device__ f32x16 mma(const i32x4 (&a)[2], const i32x4 (&b)[2], f32x16 c) {
        for (int s = 0; s < 2; ++s) {
#if defined(__gfx950__)
            c = __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(bf16x8, a[s]),
                                                        __builtin_bit_cast(bf16x8, b[s]), c, 0, 0, 0);
#else
            struct Halves {
                i16x4 part[2];
            };
            Halves x = __builtin_bit_cast(Halves, a[s]), y = __builtin_bit_cast(Halves, b[s]);
            for (int h = 0; h < 2; ++h) c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x.part[h], y.part[h], c, 0, 0, 0);
#endif
        }
        return c;
    }
};

struct Fp8 {
    static __device__ f32x16 mma(const i32x4 (&a)[2], const i32x4 (&b)[2], f32x16 c) {
        for (int s = 0; s < 2; ++s) {
            i64x2 x = __builtin_bit_cast(i64x2, a[s]), y = __builtin_bit_cast(i64x2, b[s]);
            for (int h = 0; h < 2; ++h) c = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(x[h], y[h], c, 0, 0, 0);
        }
        return c;
    }
};

#if defined(__gfx950__)
struct F8f6f4 {
    static __device__ f32x16 mma(const i32x4 (&a)[2], const i32x4 (&b)[2], f32x16 c) {
        i32x8 x = __builtin_shufflevector(a[0], a[1], 0, 1, 2, 3, 4, 5, 6, 7);
        i32x8 y = __builtin_shufflevector(b[0], b[1], 0, 1, 2, 3, 4, 5, 6, 7);
        return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(x, y, c, 0, 0, 0, 0, 0, 0);
    }
};
#endif

// A wave's quarter: 2 x 2 tiles of 32 x 32.
template <class Type, int Pitch>
__device__ void multiply(const char *a, const char *b, f32x16 (&acc)[2][2]) {
    const int lane = TID % 64, wave = TID / 64;
    i32x4 x[2][2], y[2][2];
    for (int t = 0; t < 2; ++t)
        for (int s = 0; s < 2; ++s) {
            const int at = (32 * t + lane % 32) * Pitch + 32 * s + lane / 32 * 16;
            x[t][s] = *(const i32x4 *)(a + wave / 2 * 64 * Pitch + at);
            y[t][s] = *(const i32x4 *)(b + wave % 2 * 64 * Pitch + at);
        }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) acc[i][j] = Type::mma(x[i], y[j], acc[i][j]);
}

__device__ void store(const Args &p, int row, int column, const f32x16 (&acc)[2][2]) {
    const int lane = TID % 64, wave = TID / 64;
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j)
            for (int r = 0; r < 16; ++r) {
                const int m = row + wave / 2 * 64 + 32 * i + r / 4 * 8 + lane / 32 * 4 + r % 4;
                p.d[(u64)m * p.n + column + wave % 2 * 64 + 32 * j + lane % 32] = acc[i][j][r];
            }
}

// Through registers, one buffer.
template <class Type>
__device__ void gemm(const Args &p) {
    constexpr int kPitch = kStage + 16;
    __shared__ __attribute__((aligned(16))) char lds[2][kTile * kPitch];
    const int row = BID / (p.n / kTile) * kTile, column = BID % (p.n / kTile) * kTile;
    f32x16 acc[2][2] = {};
    for (int k = 0; k < p.k_bytes; k += kStage) {
        i32x4 next[2][2];
        for (int i = 0; i < 2; ++i) {
            const int r = (i * kThreads + TID) / 4, at = k + TID % 4 * 16;
            next[0][i] = *(const i32x4 *)(p.a + (u64)(row + r) * p.k_bytes + at);
            next[1][i] = *(const i32x4 *)(p.b + (u64)(column + r) * p.k_bytes + at);
        }
        BARRIER();  // the stage before has been read
        for (int i = 0; i < 2; ++i)
            for (int o = 0; o < 2; ++o)
                *(i32x4 *)(lds[o] + (i * kThreads + TID) / 4 * kPitch + TID % 4 * 16) = next[o][i];
        BARRIER();  // this one has been written
        multiply<Type, kPitch>(lds[0], lds[1], acc);
    }
    store(p, row, column, acc);
}

// Straight from global memory to LDS, two buffers: the next stage is loaded while this one is multiplied.
template <class Type>
__device__ void gemm_dma(const Args &p) {
#if defined(__gfx950__)
    constexpr int kSize = 16;
#else
    constexpr int kSize = 4;
#endif
    constexpr int kRows = 64 * kSize / kStage;  // of one instruction
    __shared__ __attribute__((aligned(16))) char lds[2][2][kTile * kStage];
    const int row = BID / (p.n / kTile) * kTile, column = BID % (p.n / kTile) * kTile;
    const int lane = TID % 64, wave = __builtin_amdgcn_readfirstlane(TID / 64);
    auto load = [&](int buffer, int k) {
        for (int r = wave * kRows; r < kTile; r += 4 * kRows)
            for (int o = 0; o < 2; ++o) {
                const char *from = (o ? p.b : p.a) + (u64)((o ? column : row) + r + lane * kSize / kStage) * p.k_bytes +
                                   k + lane * kSize % kStage;
                __builtin_amdgcn_global_load_lds(
                    (__attribute__((address_space(1))) void *)from,
                    (__attribute__((address_space(3))) void *)(lds[buffer][o] + r * kStage), kSize, 0, 0);
            }
    };
    f32x16 acc[2][2] = {};
    load(0, 0);
    __builtin_amdgcn_s_waitcnt(0x0F70);  // vmcnt(0): the first stage of this wave is in LDS
    BARRIER();                           // and that of the others
    for (int k = 0, buffer = 0; k < p.k_bytes; k += kStage, buffer ^= 1) {
        if (k + kStage < p.k_bytes) load(buffer ^ 1, k + kStage);
        multiply<Type, kStage>(lds[buffer][0], lds[buffer][1], acc);
        __builtin_amdgcn_s_waitcnt(0x0F70);  // vmcnt(0): the next stage of this wave
        BARRIER();                           // of all, and this one may be written over
    }
    store(p, row, column, acc);
}

#define ENTRY(name, body)                                                                                      \
    extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) void name(Args p) { \
        body(p);                                                                                               \
    }
ENTRY(gemm_bf16, gemm<Bf16>)
ENTRY(gemm_fp8, gemm<Fp8>)
ENTRY(gemm_bf16_dma, gemm_dma<Bf16>)
ENTRY(gemm_fp8_dma, gemm_dma<Fp8>)
#if defined(__gfx950__)
ENTRY(gemm_f8f6f4, gemm<F8f6f4>)
ENTRY(gemm_f8f6f4_dma, gemm_dma<F8f6f4>)
#endif
