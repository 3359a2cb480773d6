// kkt_channels.hip: fused_cumsum_kkt with gates of channels: their sums, and the products of the keys of each chunk, below the diagonal
//   G_i = sum of gk_j, j <= i in the chunk, of each channel d
//   A[i, j] = beta_i sum_d k_id k_jd exp(G_id - G_jd)  for j < i, else 0
//   k         [batch, T, k_heads, K]   T = bf16 | f16 | f32   any strides of tokens and heads
//   gk, sums  [batch, T, v_heads, K]   f32                    logarithms of decays, their sums; contiguous
//   beta      [batch, T, v_heads]      f32                    contiguous
//   a         [batch, T, v_heads, C]   f32                    contiguous
// Packed: one batch, sequence b from starts[b] to starts[b + 1]. A chunk begins with the first token of a sequence.
// One wave for a chunk of a value head: first the sums, a lane a channel, then tiles of 16 x 16 products as in prepare.h; no exponent
// is positive. A lane has four neighbouring j of an i: 16-byte stores.
// Floor: bytes of k, gk, sums, A; C^2 K operations a chunk and value head, and as many exponentials / 4 on the diagonal tiles.
#include <hk/arch.h>
#include <hk/entry.h>

#include "tokens.h"

namespace {
using namespace gdr;
using Params = Prefill;

template <class T, Access kAccess>
HK_FN void kkt(const Prefill &p) {
    const u32 lane = hk::lane_id(), group = hk::group_of_lane(lane);
    const u32 head = hk::block_x() % p.v_heads;
    const Chunk chunk(p, hk::block_x() / p.v_heads);
    if (chunk.tokens == 0) return;
    for (u32 channel = lane; channel < p.k_dim; channel += hk::kWaveSize) sum_channel(p, chunk, head, channel);
    // The lanes read each other's.
    __scoped_atomic_thread_fence(__ATOMIC_RELEASE, __MEMORY_SCOPE_WRKGRP);
    hk::wave_barrier();
    __scoped_atomic_thread_fence(__ATOMIC_ACQUIRE, __MEMORY_SCOPE_WRKGRP);

    const u64 row = chunk.row(p);
    const Rows<T, kAccess> k(p.k, chunk.batch, chunk.first, head / p.group, chunk.tokens, p.k_dim);
    Lower a;
    clear(a);
    Channels<T, kAccess>(p, row, head, chunk.tokens).template lower<false>(k, chunk.tokens, p.k_dim, a);

    const auto betas = reinterpret_cast<GlobalPtr<const float>>(p.beta) + row * p.v_heads + head;
    const u32 row_bytes = p.v_heads * p.chunk * 4;
    const Window out(reinterpret_cast<GlobalPtr<float>>(p.x) + (row * p.v_heads + head) * p.chunk,
                     (chunk.tokens - 1) * row_bytes + p.chunk * 4);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int r = 0; r < hk::kRowsPerLane; ++r) {
            const u32 t = 16 * i + hk::row_of_lane(lane, r);
            const float beta = betas[u64(t < chunk.tokens ? t : 0) * p.v_heads];
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                const u32 col = 16 * j + 4 * group;
                Four v(0.0f);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (j <= i && col + e < t) v[e] = beta * a[i][j <= i ? j : 0][4 * r + e];
                    if (!chunk.in_range) v[e] = __builtin_nanf("");
                }
                const bool there = t < chunk.tokens && col < p.chunk;
                out.store(v, there ? t * row_bytes + col * 4 : Window::kOutOfBounds);
            }
        }
    }
}
}  // namespace

#define KKT_CHANNELS_ENTRIES(T)                                                                    \
    HK_ENTRY_WAVES_PER_SIMD(kkt_channels_##T, hk::kWaveSize, 2, 8, kkt<hk::T, Access::Vectorized>) \
    HK_ENTRY_WAVES_PER_SIMD(kkt_channels_##T##_scalar, hk::kWaveSize, 2, 8, kkt<hk::T, Access::Scalar>)
KKT_CHANNELS_ENTRIES(bf16)
KKT_CHANNELS_ENTRIES(f16)
KKT_CHANNELS_ENTRIES(f32)
