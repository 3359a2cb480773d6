// prepare.h: wy_representation and recompute_w_u: what the states of a chunk are updated with
//   A_ij = beta_i exp(G_i - G_j) k_i k_j for j < i, else 0     G_i = sum of g_j, j <= i; i, j of the chunk
//   X = (I + A)^-1,  u = X diag(beta) V,  w = X diag(beta exp(G)) K
//   k     [batch, T, k_heads, K]   T = bf16 | f16 | f32   any strides of tokens and heads; divided by their norms on request
//   v     [batch, T, v_heads, V]   T                      the same
//   g     [batch, T, v_heads]      f32, optional          logarithms of decays; of recompute_w_u the sums G
//   x     [batch, T, v_heads, C]   T                      of recompute_w_u
//   w, u  [batch, T, v_heads, K], [.., V]  T              contiguous
// With gates of channels, gk [batch, T, v_heads, K] f32, the sums G_i are of each channel d, made by a kernel of its own:
//   A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd),  w = X diag(beta) (K exp(G)),  kg = K exp(G_last - G)
// Products of tiles below the diagonal are of k_i exp(G_i - R) and k_j exp(R - G_j) with R that of the first token of the tile of i: no exponent
// is positive. In tiles on the diagonal each exponent is made.
// Packed: one batch, sequence b from starts[b] to starts[b + 1].
// One wave for a chunk of a value head, from keys to w and u in registers. Tiles of A have i = n and j = m, those of X^T j = n and i = m:
//   X_jj by substitution, 16 lanes a block, a lane a column: x[i] -= A[i, j] x[j]; the only ones that go through LDS
//   X_ij^T = -X_jj^T Z,  Z = sum_k A_kj^T X_ik^T, j < k <= i, by f32 MFMA, whose accumulators are the next one's operands
// The accumulators of X^T, times beta (exp(G)), are operands over tokens; the others are columns of v and k, from memory. See tokens.h.
// With warpgroup instructions, four waves for a chunk: see prepare_warpgroup.h.
// Rounds X diag(..) to T where it is an operand, and w and u.
// Floor: bytes of k, v, w, u; C (C K + C K + C V) operations a chunk and value head, and C^3 / 2 in f32.
#pragma once

#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/shared.h>

#include "prepare_warpgroup.h"
#include "tokens.h"

namespace gdr::prepare {
using Params = Prefill;

/// A diagonal block: 16 rows of four 16-byte pieces.
using Block = hk::SharedTile<16, 64>;

struct Lds {
    Block diagonal[kTiles];
    float gates[kMostTokens], betas[kMostTokens], norms[kMostTokens];

    /// Piece `c` of a row of a block. Blocks are apart in banks, too.
    HK_FN Four &piece(u32 block, u32 row, u32 c) {
        return reinterpret_cast<Four &>(diagonal[block].chunk[Block::place(row, c ^ block)]);
    }
    HK_FN Four four(const float (&of)[kMostTokens], u32 t) const { return *reinterpret_cast<const Four *>(&of[t]); }
};

/// The chunk's gates and weights, in LDS; `kSums`: sums of the gates.
template <bool kSums>
HK_FN void load_gates(const Prefill &p, const Chunk &chunk, u32 head, Lds &lds) {
    const u64 row = chunk.row(p);
    GateSums sums;
    for (u32 t = hk::lane_id(); t < kMostTokens; t += hk::kWaveSize) {
        const bool there = t < chunk.tokens;
        const u64 at = (row + (there ? t : 0)) * p.v_heads + head;
        float gate = p.g && there ? reinterpret_cast<GlobalPtr<const float>>(p.g)[at] : 0.0f;
        if constexpr (kSums) {
            gate = sums.add(gate);
            if (p.sums && there) reinterpret_cast<GlobalPtr<float>>(p.sums)[at] = gate;
        }
        lds.gates[t] = gate;
        lds.betas[t] = there ? reinterpret_cast<GlobalPtr<const float>>(p.beta)[at] : 0.0f;
        lds.norms[t] = 1.0f;
    }
    hk::wave_barrier();
}

/// A of the chunk, with i = n and j = m.
template <bool kChannels, class T, Access kAccess>
HK_FN void products(const Prefill &p, const Chunk &chunk, u32 head, bool keep_norms, const Rows<T, kAccess> &k,
                    Lds &lds, Lower &a) {
    constexpr int V = hk::kVecLen<T>;
    const u32 group = hk::group_of_lane(hk::lane_id());
    clear(a);
    if constexpr (kChannels) {
        Channels<T, kAccess>(p, chunk.row(p), head, chunk.tokens).template lower<true>(k, chunk.tokens, p.k_dim, a);
    } else {
        for (u32 col = 0; col < p.k_dim; col += 4 * V) {
            Frag rows[kTiles];
            const auto of_lane = k.lanes(col + V * group);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                if (16 * u32(i) >= chunk.tokens) continue;
                rows[i] = k.frag(of_lane, 16 * i);
#pragma unroll
                for (int j = 0; j <= i; ++j) a[i][j] = hk::FragMma<T>::mma(&rows[i], &rows[j], a[i][j]);
            }
        }
    }
    if (p.l2norm) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            each_sum([&](int e, u32 n, u32 m) {
                if (n == m) lds.norms[16 * i + n] = 1.0f / __builtin_sqrtf(a[i][i][e] + 1e-6f);
            });
        }
        hk::wave_barrier();
        for (u32 t = hk::lane_id(); keep_norms && t < chunk.tokens; t += hk::kWaveSize) {
            reinterpret_cast<GlobalPtr<float>>(p.norms)[(chunk.row(p) + t) * p.k_heads + head / p.group] = lds.norms[t];
        }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const u32 t = 16 * i + 4 * group;
        const Four gates = lds.four(lds.gates, t), weights = lds.four(lds.betas, t) * lds.four(lds.norms, t);
#pragma unroll
        for (int j = 0; j <= i; ++j) {
            if (16 * u32(i) >= chunk.tokens) continue;
            Vec<float, hk::kRowsPerLane> gate, norm;
#pragma unroll
            for (int r = 0; r < hk::kRowsPerLane; ++r) {
                const u32 m = 16 * j + hk::row_of_lane(hk::lane_id(), r);
                gate[r] = lds.gates[m], norm[r] = lds.norms[m];
            }
#pragma unroll
            for (int e = 0; e < hk::kRowsPerLane * 4; ++e) {
                const float weight = weights[e % 4] * norm[e / 4] * decay(gates[e % 4] - gate[e / 4], kLog2E);
                const bool later = 16 * j + hk::row_of_lane(hk::lane_id(), e / 4) >= t + e % 4;
                a[i][j][e] = later ? 0.0f : weight * a[i][j][e];
            }
        }
    }
}

/// X^T, with j = n and i = m.
HK_FN void solve(u32 tokens, Lds &lds, const Lower &a, Lower &x) {
    const u32 lane = hk::lane_id(), group = hk::group_of_lane(lane);
#pragma unroll
    for (int b = 0; b < kTiles; ++b) {
#pragma unroll
        for (int i = 0; i < hk::kRowsPerLane; ++i) {
            lds.piece(b, hk::row_of_lane(lane, i), group) =
                Four{a[b][b][4 * i], a[b][b][4 * i + 1], a[b][b][4 * i + 2], a[b][b][4 * i + 3]};
        }
    }
    hk::wave_barrier();
    const u32 m = lane % 16;
#pragma unroll
    for (u32 first = 0; first < kTiles; first += hk::kWaveSize / 16) {
        const u32 b = first + lane / 16;
        float column[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) column[i] = u32(i) == m ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < 15; ++j) {
#pragma unroll
            for (int c = (j + 1) / 4; c < 4; ++c) {
                const Four of = lds.piece(b, j, c);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (4 * c + e > j) column[4 * c + e] = __builtin_fmaf(-of[e], column[j], column[4 * c + e]);
                }
            }
        }
        hk::wave_barrier();
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            lds.piece(b, m, c) = Four{column[4 * c], column[4 * c + 1], column[4 * c + 2], column[4 * c + 3]};
        }
    }
    hk::wave_barrier();
    // Rows of X_jj^T as operands.
    MmaAcc diagonal[kTiles], one;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        diagonal[j] = __builtin_bit_cast(MmaAcc, hk::joined(hk::per_row([&](u32 i) {
                                             return __builtin_bit_cast(Vec<u32, 4>,
                                                                       lds.piece(j, hk::row_of_lane(lane, i), group));
                                         })));
    }
    each_sum([&](int e, u32 n, u32 m) { one[e] = n == m ? 1.0f : 0.0f; });
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        if (16 * u32(i) >= tokens) continue;
        x[i][i] = product(diagonal[i], one, MmaAcc(0.0f));
#pragma unroll
        for (int j = i - 1; j >= 0; --j) {
            MmaAcc z(0.0f);
#pragma unroll
            for (int k = j + 1; k <= i; ++k) z = product(a[k][j], x[i][k], z);
            x[i][j] = -product(diagonal[j], z, MmaAcc(0.0f));
        }
    }
}

/// X times weights of its columns, as operands of 16 rows each over tokens: fragments up to the diagonal.
template <class T>
struct Operand {
    static constexpr int V = hk::kVecLen<T>, kFrags = kMostTokens / (4 * V);
    Frag frag[kTiles][kFrags];
    HK_FN static constexpr int frags(int i) { return (16 * i + 16 + 4 * V - 1) / (4 * V); }
};

/// to = X f(of), for the columns of `of`; f as of Rows::columns.
template <bool kOfSums, class T, Access kAccess, class F>
HK_FN void multiply(const Operand<T> &x, const Rows<T, kAccess> &of, const Rows<T, kAccess> &to, float factor, F f_of) {
    using O = Operand<T>;
    constexpr int V = O::V, kAtOnce = 2;
    for (u32 col = 0; col < of.cols; col += 16 * V) {
#pragma unroll
        for (int first = 0; first < kTiles; first += kAtOnce) {
            if (16 * u32(first) >= of.rows) continue;
            MmaAcc out[kAtOnce][V];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int j = 0; j < V; ++j) out[i][j] = MmaAcc(0.0f);
            }
#pragma unroll
            for (int f = 0; f < O::frags(first + kAtOnce - 1); ++f) {
                const auto columns = of.template columns<kOfSums>(4 * V * f, col, f_of);
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    const Frag column = columns.frag(j);
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        if (f < O::frags(first + i))
                            out[i][j] = hk::FragMma<T>::mma(&column, &x.frag[first + i][f], out[i][j]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                store_unit(to, out[i], 16 * (first + i), col, Vec<float, hk::kRowsPerLane>(factor));
        }
    }
}

template <class T, Access kAccess, bool kSolve, bool kChannels = false>
HK_FN void prepare(const Prefill &p) {
    using R = Rows<T, kAccess>;
    using O = Operand<T>;
    constexpr int V = R::V;
    __shared__ Lds lds;
    const u32 head = hk::block_x() % p.v_heads, k_head = head / p.group;
    const Chunk chunk(p, hk::block_x() / p.v_heads);
    if (chunk.tokens == 0) return;
    const R k(p.k, chunk.batch, chunk.first, k_head, chunk.tokens, p.k_dim);
    const R v(p.v, chunk.batch, chunk.first, head, chunk.tokens, p.v_dim);
    const R w(p.w, chunk.batch, chunk.first, head, chunk.tokens, p.k_dim);
    const R u(p.u, chunk.batch, chunk.first, head, chunk.tokens, p.v_dim);
    load_gates<kSolve && !kChannels>(p, chunk, head, lds);
    const u32 group = hk::group_of_lane(hk::lane_id());
    O of_v, of_k;
    if constexpr (kSolve) {
        Lower a, x;
        products<kChannels>(p, chunk, head, p.norms && head % p.group == 0, k, lds, a);
        solve(chunk.tokens, lds, a, x);
        Four weights[kTiles], decayed[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const u32 t = 16 * j + 4 * group;
            weights[j] = lds.four(lds.betas, t);
            decayed[j] = weights[j] * lds.four(lds.norms, t) * hk::exp2_fast(lds.four(lds.gates, t) * kLog2E);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            if (16 * u32(i) >= chunk.tokens) continue;
#pragma unroll
            for (int f = 0; f < O::frags(i); ++f) {
                const auto operand = [&](const Four(&of)[kTiles]) {
                    return frag_of_sums<T>(
                        f, [&](int j, int e) { return j <= i ? x[i][j <= i ? j : 0][e] * of[j][e % 4] : 0.0f; });
                };
                of_v.frag[i][f] = operand(weights);
                of_k.frag[i][f] = operand(decayed);
            }
        }
    } else {
        const auto at = reinterpret_cast<GlobalPtr<T>>(p.x) + (chunk.row(p) * p.v_heads + head) * p.chunk;
        const R x(at, chunk.tokens, i64(p.v_heads) * p.chunk, p.chunk);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            if (16 * u32(i) >= chunk.tokens) continue;
#pragma unroll
            for (int f = 0; f < O::frags(i); ++f) {
                const u32 first = 4 * V * f + V * group;
                const auto rows = __builtin_bit_cast(hk::PerRow<Vec<T, V>>, x.frag(x.lanes(first), 16 * i));
                const auto operand = [&](auto weight) {
                    return hk::joined(hk::per_row([&](u32 r) {
                        const u32 row = 16 * i + hk::row_of_lane(hk::lane_id(), r);
                        Vec<float, V> of;
#pragma unroll
                        for (int e = 0; e < V; ++e) {
                            of[e] = first + e <= row ? float(rows.row[r][e]) * weight(first + e) : 0.0f;
                        }
                        return __builtin_bit_cast(Vec<u32, 4>, hk::narrow<T, V>(of));
                    }));
                };
                of_v.frag[i][f] = operand([&](u32 t) { return lds.betas[t]; });
                of_k.frag[i][f] =
                    operand([&](u32 t) { return lds.betas[t] * decay(lds.gates[t], p.base_2 ? 1.0f : kLog2E); });
            }
        }
    }
    const float factor = chunk.in_range ? 1.0f : __builtin_nanf("");
    const auto as_they_are = [](Vec<u32, 4> of, u32, u32) { return of; };
    multiply<kSolve>(of_v, v, u, factor, as_they_are);
    if constexpr (kChannels) {
        const Channels<T, kAccess> channels(p, chunk.row(p), head, chunk.tokens);
        multiply<kSolve>(of_k, k, w, factor, [&](Vec<u32, 4> of, u32 row, u32 col) {
            return channels.decayed(of, channels.load(row, col));
        });
        const R kg(p.kg, chunk.batch, chunk.first, head, chunk.tokens, p.k_dim);
        for (u32 col = 0; col < p.k_dim; col += 4 * V) {
            const u32 own = col + V * group;
            const auto last = channels.load(chunk.tokens - 1, own);
            for (u32 first = 0; first < chunk.tokens; first += 16) {
#pragma unroll
                for (int i = 0; i < hk::kRowsPerLane; ++i) {
                    const u32 t = first + hk::row_of_lane(hk::lane_id(), i);
                    const auto of = channels.values(k.load(t, own)) * lds.norms[t];
                    kg.store(of * channels.decays(last - channels.load(t, own)), t, own);
                }
            }
        }
    } else {
        multiply<kSolve>(of_k, k, w, factor, as_they_are);
    }
}

/// Sums of gates of channels: a wave for a chunk of as many channels of a value head as it has lanes.
HK_FN void sums(const Prefill &p) {
    const u32 slices = (p.k_dim + hk::kWaveSize - 1) / hk::kWaveSize;
    const u32 channel = hk::block_x() % slices * hk::kWaveSize + hk::lane_id(), rest = hk::block_x() / slices;
    const u32 head = rest % p.v_heads;
    const Chunk chunk(p, rest / p.v_heads);
    if (chunk.tokens == 0) return;
    sum_channel(p, chunk, head, channel);
}
}  // namespace gdr::prepare

#define PREPARE_32(T)                                         \
    HK_ENTRY_WAVES_PER_SIMD(prepare_##T, hk::kWaveSize, 2, 8, \
                            gdr::prepare::prepare<hk::T, hk::Access::Vectorized, true>)
#if defined(HK_WARPGROUPS)
#define PREPARE_16(T) \
    HK_ENTRY_WAVES_PER_SM(prepare_##T, gdr::warpgroup::kWarpgroupThreads, 16, gdr::warpgroup::warpgroup_prepare<hk::T>)
#else
#define PREPARE_16(T) PREPARE_32(T)
#endif
// Of elements of so many bits.
#define PREPARE_ENTRIES(T, bits)                                                                      \
    PREPARE_##bits(T) HK_ENTRY_WAVES_PER_SIMD(prepare_##T##_scalar, hk::kWaveSize, 2, 8,              \
                                              gdr::prepare::prepare<hk::T, hk::Access::Scalar, true>) \
    HK_ENTRY_WAVES_PER_SIMD(recompute_##T, hk::kWaveSize, 2, 8,                                       \
                            gdr::prepare::prepare<hk::T, hk::Access::Vectorized, false>)              \
    HK_ENTRY_WAVES_PER_SIMD(recompute_##T##_scalar, hk::kWaveSize, 2, 8,                              \
                            gdr::prepare::prepare<hk::T, hk::Access::Scalar, false>)

#define CHANNELS_ENTRIES(T)                                                                   \
    HK_ENTRY_WAVES_PER_SIMD(prepare_##T##_channels, hk::kWaveSize, 1, 8,                      \
                            gdr::prepare::prepare<hk::T, hk::Access::Vectorized, true, true>) \
    HK_ENTRY_WAVES_PER_SIMD(prepare_##T##_channels_scalar, hk::kWaveSize, 1, 8,               \
                            gdr::prepare::prepare<hk::T, hk::Access::Scalar, true, true>)
