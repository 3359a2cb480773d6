// outputs.hip: chunk_o: outputs of the tokens of each chunk
//   o_i = scale (exp(G_i) H^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i k_j) D_j)     i, j of the chunk; exp2 if G is of base 2
//   q, k  [batch, T, k_heads, K]   T = bf16 | f16 | f32   any strides of tokens and heads
//   d, o  [batch, T, v_heads, V]   T                      the same
//   g     [batch, T, v_heads]      f32, optional          sums of logarithms of decays in the chunk
//   h     [chunks, v_heads, K, V] or [.., V, K]  T        the states that enter the chunks
// With sums of gates of channels, gk [batch, T, v_heads, K] f32, instead of g: exp(G_id) and exp(G_id - G_jd) of each channel d of a
// product, so that no exponent is positive; see prepare.h.
// Packed: one batch, sequence b from starts[b] to starts[b + 1].
// One wave for 32 or 64 tokens of a chunk and a unit of columns of a value head (see tokens.h), all operands from memory: the decayed q k are
// from accumulators the operand of D. Of 32 tokens H^T q and k q are made in one pass over K (on sm_90 in two); of 64 in two, and H is read
// once. The bits are the same. LDS holds the gates of the chunk. With warpgroup instructions see outputs_warpgroup.h.
// Rounds the decayed q k to T where it is an operand, and o.
// Floor: bytes of q, k, D, H, o; 2 C (K V + C K + C V) operations a chunk and value head, of the last two about half.
#include <hk/arch.h>
#include <hk/entry.h>

#include "outputs_warpgroup.h"
#include "tokens.h"

namespace {
using namespace gdr;
using Params = Prefill;

struct Lds {
    float gates[kMostTokens], norms[kMostTokens];
};

/// kOwn tiles of 16 tokens.
template <class T, Access kAccess, int kOwn, bool kChannels = false>
HK_FN void outputs(const Prefill &p) {
    using R = Rows<T, kAccess>;
    constexpr int V = R::V, kFrags = kMostTokens / (4 * V);
    constexpr bool kWhole = kOwn == kTiles;  // all of the chunk
    // Fewer registers. Where a lane has two rows of a tile (sm_90) one pass would spill three times as much.
    constexpr bool kTwoPasses = kWhole || kChannels || hk::kRowsPerLane == 2;
    __shared__ Lds lds;
    const u32 group = hk::group_of_lane(hk::lane_id());
    const u32 units = (p.v_dim + 16 * V - 1) / (16 * V), parts = (p.chunk + 16 * kOwn - 1) / (16 * kOwn);
    u32 rest = hk::block_x();
    const u32 v0 = rest % units * (16 * V);
    rest /= units;
    const u32 first = kWhole ? 0 : rest % parts * (16 * kOwn);
    rest /= parts;
    const u32 head = rest % p.v_heads, number = rest / p.v_heads, k_head = head / p.group;
    const Chunk chunk(p, number);
    if (first >= chunk.tokens) return;
    // Tokens up to the wave's last one.
    const u32 rows = chunk.tokens < first + 16 * kOwn ? chunk.tokens : first + 16 * kOwn;
    const R q(p.q, chunk.batch, chunk.first, k_head, rows, p.k_dim);
    const R k(p.k, chunk.batch, chunk.first, k_head, rows, p.k_dim);
    const R d(p.d, chunk.batch, chunk.first, head, rows, p.v_dim);
    const R o(p.o, chunk.batch, chunk.first, head, rows, p.v_dim);
    const auto state = reinterpret_cast<GlobalPtr<T>>(p.h) + (u64(number) * p.v_heads + head) * (p.k_dim * p.v_dim);
    const R h = p.h_vk ? R(state, p.v_dim, p.k_dim, p.k_dim) : R(state, p.k_dim, p.v_dim, p.v_dim);

    const u64 row = chunk.row(p);
    for (u32 t = hk::lane_id(); t < kMostTokens; t += hk::kWaveSize) {
        const u64 at = row + (t < rows ? t : rows - 1);
        lds.gates[t] = p.g ? reinterpret_cast<GlobalPtr<const float>>(p.g)[at * p.v_heads + head] : 0.0f;
        lds.norms[t] = p.norms ? reinterpret_cast<GlobalPtr<const float>>(p.norms)[at * p.k_heads + k_head] : 1.0f;
    }
    hk::wave_barrier();

    MmaAcc out[kOwn][V], scores[kOwn][kTiles];
    Vec<float, hk::kRowsPerLane> squares[kOwn];
#pragma unroll
    for (int m = 0; m < kOwn; ++m) {
        squares[m] = 0.0f;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) scores[m][j] = MmaAcc(0.0f);
    }
    [[maybe_unused]] const Channels<T, kAccess> channels(p, row, head, rows);
    // Over K: H^T q, k q, or both; kRowsOfV: h is [V, K].
    const auto pass = [&]<bool kState, bool kTokens, bool kRowsOfV = false>() __attribute__((always_inline)) {
        if constexpr (kState) {
#pragma unroll
            for (int m = 0; m < kOwn; ++m) {
#pragma unroll
                for (int j = 0; j < V; ++j) out[m][j] = MmaAcc(0.0f);
            }
        }
        for (u32 col = 0; col < p.k_dim; col += 4 * V) {
            const u32 own = col + V * group;
            const auto of_lane = q.lanes(own);
            Frag of_q[kOwn];
            // Gates of channels: decayed from the first token of the tile, and its gates.
            [[maybe_unused]] Frag from_first[kOwn];
            [[maybe_unused]] Vec<float, V> of_first[kOwn];
#pragma unroll
            for (int m = 0; m < kOwn; ++m) {
                of_q[m] = q.frag(of_lane, first + 16 * m);
                if (kTokens && p.l2norm) {
                    const auto part = __builtin_bit_cast(hk::PerRow<Vec<T, V>>, of_q[m]);
#pragma unroll
                    for (int i = 0; i < hk::kRowsPerLane; ++i) {
#pragma unroll
                        for (int e = 0; e < V; ++e) {
                            squares[m][i] = __builtin_fmaf(float(part.row[i][e]), float(part.row[i][e]), squares[m][i]);
                        }
                    }
                }
            }
            if constexpr (kChannels) {
#pragma unroll
                for (int m = 0; m < kOwn; ++m) {
                    const auto gates = channels.load_rows(first + 16 * m, own);
                    if constexpr (kTokens) {
                        of_first[m] = channels.load(first + 16 * m, own);
                        from_first[m] = channels.decayed(of_q[m], [&](u32 i) { return gates.row[i] - of_first[m]; });
                    }
                    if constexpr (kState) of_q[m] = channels.decayed(of_q[m], [&](u32 i) { return gates.row[i]; });
                }
            }
            if constexpr (kState) {
                const auto add = [&](int j, const Frag &of_h) {
#pragma unroll
                    for (int m = 0; m < kOwn; ++m) out[m][j] = hk::FragMma<T>::mma(&of_h, &of_q[m], out[m][j]);
                };
                if constexpr (kRowsOfV) {
                    // Row n of tile j is column v0 + V n + j.
                    const auto of_h = h.lanes(own, V);
                    Frag rows_of_h[V];
#pragma unroll
                    for (int j = 0; j < V; ++j) rows_of_h[j] = h.frag(of_h, v0 + j);
                    hk::sched_barrier();  // else they would be loaded one by one
#pragma unroll
                    for (int j = 0; j < V; ++j) add(j, rows_of_h[j]);
                } else {
                    const auto of_h = h.template columns<false>(col, v0);
#pragma unroll
                    for (int j = 0; j < V; ++j) add(j, of_h.frag(j));
                }
            }
            if constexpr (kTokens) {
                const auto of_keys = k.lanes(own);
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    if (!kWhole && 16 * u32(j) >= rows) continue;
                    const Frag of_k = k.frag(of_keys, 16 * j);
#pragma unroll
                    for (int m = 0; m < kOwn; ++m) {
                        if (kWhole && j > m) continue;
                        if constexpr (kChannels) {
                            if (16 * u32(j) >= first + 16 * m) continue;
                            const auto gates = channels.load_rows(16 * j, own);
                            const Frag to_first =
                                channels.decayed(of_k, [&](u32 i) { return of_first[m] - gates.row[i]; });
                            scores[m][j] = hk::FragMma<T>::mma(&to_first, &from_first[m], scores[m][j]);
                        } else {
                            scores[m][j] = hk::FragMma<T>::mma(&of_k, &of_q[m], scores[m][j]);
                        }
                    }
                }
            }
        }
    };
    const auto pass_of_state = [&]<bool kTokens>() __attribute__((always_inline)) {
        if (p.h_vk) {
            pass.template operator()<true, kTokens, true>();
        } else {
            pass.template operator()<true, kTokens, false>();
        }
    };
    if constexpr (kTwoPasses) {
        pass.template operator()<false, true>();
    } else {
        pass_of_state.template operator()<true>();
    }

    if constexpr (kChannels) {
#pragma unroll
        for (int m = 0; m < kOwn; ++m) {
            if (first + 16 * m >= rows) continue;
            const MmaAcc own = channels.template diagonal<false>(q, k, first + 16 * m, p.k_dim);
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                if (16 * u32(j) == first + 16 * m) scores[m][j] = own;
            }
        }
    }

    const float unit = p.base_2 ? 1.0f : kLog2E;
    Vec<float, hk::kRowsPerLane> factor[kOwn], of_state[kOwn];
    Frag of_scores[kFrags][kOwn];
#pragma unroll
    for (int m = 0; m < kOwn; ++m) {
        Vec<float, hk::kRowsPerLane> gate;
#pragma unroll
        for (int i = 0; i < hk::kRowsPerLane; ++i) {
            gate[i] = lds.gates[first + 16 * m + hk::row_of_lane(hk::lane_id(), i)];
            of_state[m][i] = decay(gate[i], unit);
            const float sum = hk::reduce_over_lane_groups(squares[m][i], hk::Sum{});
            factor[m][i] = p.l2norm ? p.scale / __builtin_sqrtf(sum + 1e-6f) : p.scale;
            if (!chunk.in_range) factor[m][i] = __builtin_nanf("");
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            if (!kWhole && 16 * u32(j) >= rows) continue;
            // Of the token's tile, of those before it, or after it.
            const u32 own = first + 16 * m;
            if (16 * u32(j) > own) {
                scores[m][j] = MmaAcc(0.0f);
                continue;
            }
            const u32 t = 16 * j + 4 * group;
            const Four gates = *reinterpret_cast<const Four *>(&lds.gates[t]);
            const Four norms = *reinterpret_cast<const Four *>(&lds.norms[t]);
#pragma unroll
            for (int e = 0; e < hk::kRowsPerLane * 4; ++e) {
                scores[m][j][e] *= decay(gate[e / 4] - gates[e % 4], unit) * norms[e % 4];
            }
            if (16 * u32(j) < own) continue;
#pragma unroll
            for (int e = 0; e < hk::kRowsPerLane * 4; ++e) {
                if (4 * group + e % 4 > hk::row_of_lane(hk::lane_id(), e / 4)) scores[m][j][e] = 0.0f;
            }
        }
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {
            of_scores[f][m] = frag_of_sums<T>(f, [&](int tile, int e) { return scores[m][tile][e]; });
            if constexpr (kWhole) {
                if (4 * V * f > 16 * m) continue;
                // Else they would be made after the pass over H.
#pragma unroll
                for (int i = 0; i < 4 * hk::kRowsPerLane; ++i) {
                    u32 pair = of_scores[f][m][i];
                    hk::opaque(pair);
                    of_scores[f][m][i] = pair;
                }
            }
        }
    }
    if constexpr (kTwoPasses) pass_of_state.template operator()<false>();
#pragma unroll
    for (int m = 0; m < kOwn; ++m) {
#pragma unroll
        for (int j = 0; j < V; ++j) out[m][j] *= hk::broadcast_m(of_state[m]);
    }
#pragma unroll
    for (int f = 0; f < kFrags; ++f) {
        if (!kWhole && 4 * V * u32(f) >= rows) continue;
        const auto of_d = d.template columns<true>(4 * V * f, v0);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const Frag column = of_d.frag(j);
#pragma unroll
            for (int m = 0; m < kOwn; ++m) {
                if (kWhole && 4 * V * f > 16 * m) continue;
                out[m][j] = hk::FragMma<T>::mma(&column, &of_scores[f][m], out[m][j]);
            }
        }
        if constexpr (kWhole) hk::sched_barrier();  // else the columns of all f would be in flight
    }
#pragma unroll
    for (int m = 0; m < kOwn; ++m) store_unit(o, out[m], first + 16 * m, v0, factor[m]);
}
}  // namespace

#define OUTPUTS_ENTRIES(T)                                                                           \
    HK_ENTRY_WAVES_PER_SIMD(outputs_##T, hk::kWaveSize, 2, 8, outputs<hk::T, Access::Vectorized, 2>) \
    HK_ENTRY_WAVES_PER_SIMD(outputs_##T##_scalar, hk::kWaveSize, 2, 8, outputs<hk::T, Access::Scalar, 2>)
#define CHANNELS_ENTRIES(T)                                                                                           \
    HK_ENTRY_WAVES_PER_SIMD(outputs_##T##_channels, hk::kWaveSize, 1, 8, outputs<hk::T, Access::Vectorized, 2, true>) \
    HK_ENTRY_WAVES_PER_SIMD(outputs_##T##_channels_scalar, hk::kWaveSize, 1, 8, outputs<hk::T, Access::Scalar, 2, true>)
OUTPUTS_ENTRIES(bf16)
OUTPUTS_ENTRIES(f16)
OUTPUTS_ENTRIES(f32)
CHANNELS_ENTRIES(bf16)
CHANNELS_ENTRIES(f16)
CHANNELS_ENTRIES(f32)
#if defined(HK_WARPGROUPS)
HK_ENTRY_WAVES_PER_SM(outputs_bf16_64, gdr::warpgroup::kWarpgroupThreads, 8,
                      gdr::warpgroup::warpgroup_outputs<hk::bf16>)
HK_ENTRY_WAVES_PER_SM(outputs_f16_64, gdr::warpgroup::kWarpgroupThreads, 8, gdr::warpgroup::warpgroup_outputs<hk::f16>)
#else
// Chunks of 64 tokens. Where a lane has two rows of a tile (sm_90) there are not registers enough: nothing launches them.
constexpr int kMostOwn = kTiles / hk::kRowsPerLane;
HK_ENTRY_WAVES_PER_SIMD(outputs_bf16_64, hk::kWaveSize, 2, 8, outputs<hk::bf16, Access::Vectorized, kMostOwn>)
HK_ENTRY_WAVES_PER_SIMD(outputs_f16_64, hk::kWaveSize, 2, 8, outputs<hk::f16, Access::Vectorized, kMostOwn>)
#endif
