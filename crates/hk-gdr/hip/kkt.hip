// kkt.hip: chunk_scaled_dot_kkt, fused_cumsum_kkt: the products of the keys of each chunk of C tokens, below the diagonal
//   A[i, j] = beta_i exp(G_i - G_j) k_i k_j  for j < i, else 0;  exp2 if G is of base 2, exp(0) without G
//   k     [batch, T, k_heads, K]  E = bf16 | f16 | f32   any strides of tokens and heads
//   g     [batch, T, heads]       f32, optional          sums of logarithms of decays in the chunk, or, if sums are made here, of tokens;
//                                                        contiguous
//   sums  [batch, T, heads] or [batch, heads, T]  f32    optional; contiguous
//   beta  [batch, T, heads]       f32                    contiguous
//   a     [batch, T, heads, C]    f32                    contiguous
// Packed: one batch, sequence b from starts[b] to starts[b + 1]. A chunk begins with the first token of a sequence.
// One wave for a chunk and key head: tiles of 16 x 16 products on and below the diagonal stay in accumulators, keys go from memory to
// operands; then each value head of the group is a pass over them. A lane has four neighbouring j of an i: 16-byte stores.
// Without matrix instructions of f32 (sm_90), keys of f32 are multiplied by lanes.
// Floor: bytes of k and A; 2 C^2 K operations a chunk and key head, of which 5/8 are made.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/types.h>
#include <hk/wave.h>

#include "chunks.h"

namespace {
using hk::Access;
using hk::Frag;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::Vec;
using hk::Window;
using Four = Vec<float, 4>;
using Layout = hk::AccLayout<16>;

struct Params {
    u64 k, g, beta, a, sums, starts;  // g, sums and starts may be 0
    i64 k_batch, k_token, k_head;  // strides, in elements
    i64 sums_batch, sums_token, sums_head;
    u32 batch, tokens, k_heads, group;  // value heads of a key head
    u32 sequences;
    u32 k_dim;
    u32 base_2;  // of g; of sums, if they are made here
    u32 pad;
};

constexpr float kLog2E = 1.44269504f;

/// Keys of a chunk.
template <class E, Access kAccess>
struct Keys {
    static constexpr int kVec = hk::kVecLen<E>;
    Window window;
    u32 rows, token_bytes, dim;

    /// 16 bytes of row `i` from column `col` on; zeros past the last row and column.
    HK_FN Vec<u32, 4> load(u32 i, u32 col) const {
        const u32 at = i * token_bytes + col * u32(sizeof(E));
        if constexpr (kAccess == Access::Vectorized) {
            return window.load<Vec<u32, 4>>(i < rows && col < dim ? at : Window::kOutOfBounds);
        } else {
            Vec<E, kVec> v;
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                v[e] = window.load<E>(i < rows && col + e < dim ? at + e * u32(sizeof(E)) : Window::kOutOfBounds);
            }
            return __builtin_bit_cast(Vec<u32, 4>, v);
        }
    }
};

/// The lower tiles: `sums[I][J]` has i = 16 I + m, j = 16 J + n.
template <class E, Access kAccess, int N>
HK_FN void products(const Keys<E, kAccess> &keys, hk::MmaAcc (&sums)[N][N]) {
    const u32 lane = hk::lane_id();
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j <= i; ++j) sums[i][j] = hk::MmaAcc(0.0f);
    }
    if constexpr (sizeof(E) == 2 || hk::kRowsPerLane == 1) {
        constexpr u32 kCols = hk::kFragBytes / sizeof(E);
        const u32 own = hk::group_of_lane(lane) * hk::kVecLen<E>;
        for (u32 col = 0; col < keys.dim; col += kCols) {
            Frag rows[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const auto row = [&](u32 r) { return keys.load(16 * i + hk::row_of_lane(lane, r), col + own); };
                rows[i] = __builtin_bit_cast(Frag, hk::per_row(row));
            }
#pragma unroll
            for (int i = 0; i < N; ++i) {
#pragma unroll
                for (int j = 0; j <= i; ++j) sums[i][j] = hk::FragMma<E>::mma(&rows[j], &rows[i], sums[i][j]);
            }
        }
    } else {
        constexpr int kOwn = hk::kRowsPerLane;
        for (u32 col = 0; col < keys.dim; col += 4) {
            Four w[N][hk::kMmaRows], x[N][kOwn];
#pragma unroll
            for (int i = 0; i < N; ++i) {
#pragma unroll
                for (int r = 0; r < hk::kMmaRows; ++r)
                    w[i][r] = __builtin_bit_cast(Four, keys.load(16 * i + Layout::n(lane, r), col));
#pragma unroll
                for (int r = 0; r < kOwn; ++r)
                    x[i][r] = __builtin_bit_cast(Four, keys.load(16 * i + hk::row_of_lane(lane, r), col));
            }
#pragma unroll
            for (int i = 0; i < N; ++i) {
#pragma unroll
                for (int j = 0; j <= i; ++j) {
#pragma unroll
                    for (int e = 0; e < kOwn * hk::kMmaRows; ++e) {
#pragma unroll
                        for (int c = 0; c < 4; ++c) {
                            sums[i][j][e] =
                                __builtin_fmaf(w[j][e % hk::kMmaRows][c], x[i][e / hk::kMmaRows][c], sums[i][j][e]);
                        }
                    }
                }
            }
        }
    }
}

/// Wave `block`: the chunks of a key head that begin among C tokens.
template <class E, Access kAccess, int C>
HK_FN void kkt(const Params &p) {
    constexpr int N = C / 16;
    __shared__ float gates[C], betas[C];
    const u32 lane = hk::lane_id();
    const u32 k_head = hk::block_x() % p.k_heads, rest = hk::block_x() / p.k_heads;
    const u32 runs = (p.tokens + C - 1) / C;
    const u32 run = rest % runs, b = rest / runs, heads = p.k_heads * p.group;
    if (b >= p.batch) return;
    gdr::for_chunks(p.starts, p.sequences, p.tokens, C, run, [&](u32 first, u32 rows, bool in_range) {
        const auto from = reinterpret_cast<GlobalPtr<const E>>(p.k) + i64(b) * p.k_batch + i64(first) * p.k_token +
                          i64(k_head) * p.k_head;
        const u32 token_bytes = u32(p.k_token) * u32(sizeof(E));
        const Keys<E, kAccess> keys = {Window(from, (rows - 1) * token_bytes + p.k_dim * u32(sizeof(E))), rows,
                                       token_bytes, p.k_dim};
        hk::MmaAcc sums[N][N];
        products(keys, sums);
        const u64 token = u64(b) * p.tokens + first;
        const float unit = p.base_2 && !p.sums ? 1.0f : kLog2E;
        for (u32 head = k_head * p.group; head < (k_head + 1) * p.group; ++head) {
            hk::wave_barrier();
            gdr::GateSums scan;
            for (u32 from = 0; from < C; from += hk::kWaveSize) {
                const u32 t = from + lane;
                const u64 at = (token + (t < rows ? t : 0)) * heads + head;
                float gate = p.g ? reinterpret_cast<GlobalPtr<const float>>(p.g)[at] : 0.0f;
                if (p.sums) {
                    gate = scan.add(t < rows ? gate : 0.0f);
                    const i64 to = i64(b) * p.sums_batch + i64(first + t) * p.sums_token + i64(head) * p.sums_head;
                    const float sum = in_range ? p.base_2 ? gate * kLog2E : gate : __builtin_nanf("");
                    if (t < rows) reinterpret_cast<GlobalPtr<float>>(p.sums)[to] = sum;
                }
                if (t >= C) continue;
                gates[t] = gate;
                betas[t] = reinterpret_cast<GlobalPtr<const float>>(p.beta)[at];
            }
            hk::wave_barrier();
            const u32 row_bytes = heads * C * 4;
            const Window out(reinterpret_cast<GlobalPtr<float>>(p.a) + (token * heads + head) * C,
                             (rows - 1) * row_bytes + C * 4);
#pragma unroll
            for (int i = 0; i < N; ++i) {
#pragma unroll
                for (int r = 0; r < hk::kRowsPerLane; ++r) {
                    const u32 row = 16 * i + hk::row_of_lane(lane, r);
                    const float g = gates[row], beta = betas[row];
#pragma unroll
                    for (int j = 0; j < N; ++j) {
                        const u32 col = 16 * j + Layout::n(lane, 0);
                        Four v(0.0f);
#pragma unroll
                        for (int e = 0; e < hk::kMmaRows; ++e) {
                            if (j <= i) {
                                const float off = g - gates[col + e];
                                const float decay = hk::exp2_fast(off * unit);
                                v[e] =
                                    col + e < row ? beta * decay * sums[i][j <= i ? j : 0][r * hk::kMmaRows + e] : 0.0f;
                            }
                            if (!in_range) v[e] = __builtin_nanf("");
                        }
                        // Rows past the last one are out of the window.
                        out.store(v, row < rows ? row * row_bytes + col * 4 : Window::kOutOfBounds);
                    }
                }
            }
        }
    });
}
}  // namespace

#define KKT_ENTRIES(E)                                                           \
    HK_ENTRY(kkt_##E##_16, hk::kWaveSize, kkt<hk::E, Access::Vectorized, 16>)    \
    HK_ENTRY(kkt_##E##_32, hk::kWaveSize, kkt<hk::E, Access::Vectorized, 32>)    \
    HK_ENTRY(kkt_##E##_64, hk::kWaveSize, kkt<hk::E, Access::Vectorized, 64>)    \
    HK_ENTRY(kkt_##E##_16_scalar, hk::kWaveSize, kkt<hk::E, Access::Scalar, 16>) \
    HK_ENTRY(kkt_##E##_32_scalar, hk::kWaveSize, kkt<hk::E, Access::Scalar, 32>) \
    HK_ENTRY(kkt_##E##_64_scalar, hk::kWaveSize, kkt<hk::E, Access::Scalar, 64>)
KKT_ENTRIES(bf16)
KKT_ENTRIES(f16)
KKT_ENTRIES(f32)
