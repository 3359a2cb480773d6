// states.h: chunk_delta_h: states over the chunks of each sequence
//   D_t = u_t - H^T w_t,  H' = exp(G_last) H + sum_t exp(G_last - G_t) k_t D_t^T     t of the chunk; exp2 if G is of base 2
//   k           [batch, T, k_heads, K]  T = bf16 | f16 | f32   any strides of tokens and heads
//   w, u, d     [batch, T, v_heads, K], [.., V]  T             d may be absent
//   g           [batch, T, v_heads]     f32, optional          sums of logarithms of decays in the chunk
//   h           [chunks, v_heads, K, V] or [.., V, K]  T       the states that enter the chunks; may be absent
//   from, to    [sequences or slots, v_heads, K, V] or V, K    f32 | bf16
// Packed: one batch, sequence b from starts[b] to starts[b + 1].
// With sums of gates of channels, gk [batch, T, v_heads, K], k is given with its decays, and rows of H decay by exp(gk_last).
// One wave for 16 columns v of a value head of a sequence. It has them of all K rows in accumulators, and needs no other wave: rows of w
// and columns of k go from memory to operands, H and D from accumulators. LDS holds the gates of a chunk. On NVIDIA's GPUs, where few
// waves are resident, two waves of a block share w, k and u of a chunk in LDS, two chunks ahead.
// Rounds H to T where it is an operand and a snapshot, the decayed D where it is an operand, and D where it is stored; H itself is f32.
// Floor: latency; 4 K V operations a token and value head.
#pragma once

#include <hk/arch.h>
#include <hk/entry.h>

#include "slots.h"
#include "states_warpgroup.h"
#include "tokens.h"

namespace gdr::states {
using Params = Prefill;

/// The lane's part of 16 columns v of a state: kUnits units of k, V tiles each.
template <class T, int kUnits>
struct Columns {
    static constexpr int V = hk::kVecLen<T>;
    MmaAcc h[kUnits * V];

    /// Row k of element `r` of tile `j` of unit `u`; see tokens.h.
    HK_FN static u32 k(u32 lane, int u, int j, int r) {
        return 16 * V * u + 4 * V * hk::group_of_lane(lane) + V * r + j;
    }

    /// Sets elements to `f(k, m)`.
    template <class F>
    HK_FN void set(F f) {
        const u32 lane = opaque_lane();
#pragma unroll
        for (int i = 0; i < kUnits * V; ++i) {
#pragma unroll
            for (int e = 0; e < hk::kRowsPerLane * 4; ++e) {
                h[i][e] = f(k(lane, i / V, i % V, e % 4), hk::row_of_lane(lane, e / 4));
            }
        }
    }

    /// Calls `f(element, k, m)`.
    template <class F>
    HK_FN void each(F f) const {
        const u32 lane = opaque_lane();
#pragma unroll
        for (int i = 0; i < kUnits * V; ++i) {
#pragma unroll
            for (int e = 0; e < hk::kRowsPerLane * 4; ++e) {
                f(h[i][e], k(lane, i / V, i % V, e % 4), hk::row_of_lane(lane, e / 4));
            }
        }
    }

    /// As an operand over k: fragment r of unit u has k(u, 0 .., r).
    HK_FN Frag frag(int u, int r) const {
        return hk::joined(hk::per_row([&](u32 i) {
            Vec<float, V> v;
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] = h[u * V + j][i * 4 + r];
            return __builtin_bit_cast(Vec<u32, 4>, hk::narrow<T, V>(v));
        }));
    }
};

/// Waves of a block that share chunks in LDS: two of NVIDIA's 32 lanes; 1: chunks go straight to registers.
template <class T, Access kAccess, int kUnits>
inline constexpr int kWaves =
    hk::kRowsPerLane == 2 && kAccess == Access::Vectorized && sizeof(T) == 2 && kUnits == 1 ? 2 : 1;
template <class T, int kUnits>
inline constexpr int kThreads = hk::kWaveSize * kWaves<T, Access::Vectorized, kUnits>;
template <class T, int kUnits>
inline constexpr int kWavesOfSm = kWaves<T, Access::Vectorized, kUnits> == 1 ? 16 : 4;
/// Chunks that are loaded while the waves work on another.
inline constexpr u32 kAhead = 2;

/// A chunk in LDS: rows of w and k, 16 chunks of 16 bytes each, and the block's columns of u.
template <int kWaves>
struct Stage {
    static constexpr u32 kChunks = 16, kOfU = 2 * kWaves;
    Vec<u32, 4> w[kMostTokens * kChunks], k[kMostTokens * kChunks], u[kMostTokens * kOfU];

    /// What to xor with the place of a chunk: lanes that read together have neighbouring rows, or rows 4 apart.
    HK_FN static constexpr u32 swizzle(u32 row) { return row % 2 * 4 + row / 4 % 4; }
    /// The chunk at a place, and the place of a chunk: groups read every fourth.
    HK_FN static constexpr u32 turned(u32 c) { return c % 4 * 4 + c / 4; }
    HK_FN static constexpr u32 place(u32 row, u32 c) { return row * kChunks + (turned(c) ^ swizzle(row)); }
    HK_FN static constexpr u32 place_of_u(u32 row, u32 c) { return row * kOfU + (c ^ row / 4 % kOfU); }

    static constexpr int kThreads = kWaves * hk::kWaveSize,
                         kLoads = int(2 * kMostTokens * kChunks + kMostTokens * kOfU) / kThreads;

    /// Starts to load a chunk; u from column `v` on.
    template <class R>
    HK_FN void copy(const R &of_w, const R &of_k, const R &of_u, u32 v) {
        const u32 thread = hk::thread_x();
#pragma unroll
        for (u32 i = 0; i < sizeof(k) / 16; i += kThreads) {
            const u32 row = (i + thread) / kChunks, c = turned((i + thread) % kChunks ^ swizzle(row));
            const u32 to = i + hk::wave_id() * hk::kWaveSize;
            of_w.window.load_to_lds(&w[to], of_w.at(row, c * R::V), 0);
            of_k.window.load_to_lds(&k[to], of_k.at(row, c * R::V), 0);
        }
#pragma unroll
        for (u32 i = 0; i < sizeof(u) / 16; i += kThreads) {
            const u32 row = (i + thread) / kOfU, c = (i + thread) % kOfU ^ row / 4 % kOfU;
            of_u.window.load_to_lds(&u[i + hk::wave_id() * hk::kWaveSize], of_u.at(row, v + c * R::V), 0);
        }
    }

    /// As Rows::frag of w.
    HK_FN Frag frag(u32 col, u32 first) const {
        return hk::joined(
            hk::per_row([&](u32 i) { return w[place(hk::row_of_lane(hk::lane_id(), i), col / 8) + first * kChunks]; }));
    }
    /// As Rows::columns<true> of k.
    template <class R>
    HK_FN typename R::ColumnTiles columns(u32 first) const {
        const u32 lane = opaque_lane();
        typename R::ColumnTiles tiles;
#pragma unroll
        for (u32 e = 0; e < 8; ++e) {
            tiles.rows[e] = hk::per_row([&](u32 i) {
                return k[place(4 * hk::group_of_lane(lane) + e % 4, hk::row_of_lane(lane, i)) +
                         (first + e / 4 * 16) * kChunks];
            });
        }
        return tiles;
    }
    /// Element `e` of u of the tile whose rows begin with `first`, and of the wave's columns.
    template <class T>
    HK_FN T element(u32 first, int e) const {
        const u32 lane = hk::lane_id(), col = hk::row_of_lane(lane, e / 4);
        const u32 row = 4 * hk::group_of_lane(lane) + e % 4;
        const auto of_row =
            reinterpret_cast<const T *>(&u[place_of_u(row, 2 * hk::wave_id() + col / 8) + first * kOfU]);
        return of_row[col % 8];
    }
};

template <int kWaves>
struct Lds {
    Stage<kWaves> stages[kAhead + 1];
    float gates[kWaves][kMostTokens];  // of a token's k D^T
};
template <>
struct Lds<1> {
    float gates[1][kMostTokens];
};

/// Of the lane's tokens of a chunk: the sums of gates, and norms of keys.
struct Gates {
    static constexpr int kTokens = kMostTokens / hk::kWaveSize;
    float last, of[kTokens], norm[kTokens];
};

template <class T, Access kAccess, int kUnits, bool kChannels = false>
HK_FN void states(const Prefill &p) {
    using R = Rows<T, kAccess>;
    using C = Columns<T, kUnits>;
    constexpr int V = R::V, kFrags = kMostTokens / (4 * V), kBlock = kWaves<T, kAccess, kUnits>;
    constexpr bool kStaged = kBlock > 1;
    auto &lds = hk::block_lds<Lds<kBlock>>();
    const u32 blocks = (p.v_dim + 16 * kBlock - 1) / (16 * kBlock);
    const u32 first_slice = hk::block_x() % blocks * kBlock, rest = hk::block_x() / blocks;
    const u32 wave = kStaged ? hk::wave_id() : 0, slice = first_slice + wave;
    const u32 head = rest % p.v_heads, n = rest / p.v_heads;
    if (n >= p.sequences) return;
    const Sequence sequence(p, n);
    const u32 k_head = head / p.group;

    const i32 slot = p.slots ? hk::load_uniform<i32>(p.slots + 4 * u64(n)) : i32(n);
    const bool poison = !sequence.in_range || (p.slots && slot >= i32(p.n_slots));
    C c;
    const auto place = [&](u32 k, u32 m, u32 size) {
        const u32 v = 16 * slice + m, past = (p.k_dim - 1 - k) | (p.v_dim - 1 - v);
        return (k * p.k_stride + v * p.v_stride) * size | (past & Window::kOutOfBounds);
    };
    if (p.from && !poison && slot >= 0) {
        if (p.bf16_states) {
            const Window from = state<hk::bf16>(p, p.from, p.from_slot, slot, head);
            c.set([&](u32 k, u32 m) { return float(from.load<hk::bf16>(place(k, m, 2))); });
        } else {
            const Window from = state<float>(p, p.from, p.from_slot, slot, head);
            c.set([&](u32 k, u32 m) { return from.load<float>(place(k, m, 4)); });
        }
    } else {
        c.set([&](u32, u32) { return poison ? __builtin_nanf("") : 0.0f; });
    }

    const auto rows_at = [&](u32 at) { return sequence.tokens - at < p.chunk ? sequence.tokens - at : p.chunk; };
    const auto load_gates = [&](u32 at) __attribute__((always_inline)) {
        const u32 rows = rows_at(at);
        const u64 row = u64(sequence.batch) * p.tokens + sequence.first + at;
        const auto gate = [&](u32 t) {
            return p.g ? reinterpret_cast<GlobalPtr<const float>>(p.g)[(row + t) * p.v_heads + head] : 0.0f;
        };
        Gates gates;
        gates.last = gate(rows - 1);
        const u32 lane = opaque_lane();
#pragma unroll
        for (u32 i = 0; i < Gates::kTokens; ++i) {
            const u32 t = lane + i * hk::kWaveSize, there = t < rows ? t : rows - 1;
            gates.of[i] = gate(there);
            gates.norm[i] =
                p.norms ? reinterpret_cast<GlobalPtr<const float>>(p.norms)[(row + there) * p.k_heads + k_head] : 1.0f;
        }
        return gates;
    };
    const auto copy = [&](u32 at, u32 stage) __attribute__((always_inline)) {
        if constexpr (kStaged) {
            if (at < sequence.tokens) {
                const u32 rows = rows_at(at), token = sequence.first + at;
                lds.stages[stage].copy(R(p.w, sequence.batch, token, head, rows, p.k_dim),
                                       R(p.k, sequence.batch, token, k_head, rows, p.k_dim),
                                       R(p.u, sequence.batch, token, head, rows, p.v_dim), 16 * first_slice);
            }
            hk::commit_loads();
        }
    };
    Gates next;
    u32 stage = 0;
    if constexpr (kStaged) {
        static_assert(kAhead == 2);
        copy(0, 0);
        copy(p.chunk, 1);
        if (sequence.tokens != 0) next = load_gates(0);
    }

    for (u32 at = 0; at < sequence.tokens; at += p.chunk) {
        const u32 lane = opaque_lane();
        const u32 group = hk::group_of_lane(lane);
        const u32 rows = rows_at(at), token = sequence.first + at;
        const R k(p.k, sequence.batch, token, k_head, rows, p.k_dim);
        const R w(p.w, sequence.batch, token, head, rows, p.k_dim);
        const R us(p.u, sequence.batch, token, head, rows, p.v_dim);

        const Gates gates = kStaged ? next : load_gates(at);
        if constexpr (kStaged) {
            hk::wait_loads<kAhead - 1, Stage<kBlock>::kLoads>();
            hk::block_barrier();  // of the chunk before all waves have read the stage that is loaded now
            copy(at + kAhead * p.chunk, stage == 0 ? kAhead : stage - 1);
            if (at + p.chunk < sequence.tokens) next = load_gates(at + p.chunk);
        }
        const float unit = p.base_2 ? 1.0f : kLog2E, last = gates.last;
        hk::wave_barrier();
#pragma unroll
        for (u32 i = 0; i < Gates::kTokens; ++i)
            lds.gates[wave][lane + i * hk::kWaveSize] = decay(last - gates.of[i], unit) * gates.norm[i];
        hk::wave_barrier();

        Frag of_h[kUnits * 4];
#pragma unroll
        for (int i = 0; i < kUnits * 4; ++i) of_h[i] = c.frag(i / 4, i % 4);
        if (p.h) {
            const u64 number = sequence.chunk + at / p.chunk;
            const auto h = reinterpret_cast<GlobalPtr<T>>(p.h) + (number * p.v_heads + head) * (p.k_dim * p.v_dim);
            if (p.h_vk) {
                const R to(h, p.v_dim, p.k_dim, p.k_dim);
                const u32 lane = opaque_lane();
#pragma unroll
                for (int i = 0; i < kUnits * 4; ++i) {
                    const auto part = __builtin_bit_cast(hk::PerRow<Vec<u32, 4>>, of_h[i]);
#pragma unroll
                    for (int r = 0; r < hk::kRowsPerLane; ++r)
                        to.put(part.row[r], 16 * slice + hk::row_of_lane(lane, r), C::k(lane, i / 4, 0, i % 4));
                }
            } else {
                const R to(h, p.k_dim, p.v_dim, p.v_dim);
                c.each([&](float h, u32 k, u32 m) { to.window.store(T(h), to.at(k, 16 * slice + m)); });
            }
        }

        MmaAcc d[kTiles];
        const auto of_u = us.elements(16 * slice);
        const auto col_of_w = [&](int f) { return u32(16 * V * (f / 4) + 4 * V * group + V * (f % 4)); };
        typename R::Lanes of_w[kUnits * 4];
#pragma unroll
        for (int f = 0; f < kUnits * 4; ++f) of_w[f] = w.lanes(col_of_w(f));
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            d[i] = MmaAcc(0.0f);
            if (16 * u32(i) >= rows) continue;
#pragma unroll
            for (int f = 0; f < kUnits * 4; ++f) {
                Frag row;
                if constexpr (kStaged) {
                    row = lds.stages[stage].frag(col_of_w(f), 16 * i);
                } else {
                    row = w.frag(of_w[f], 16 * i);
                }
                d[i] = hk::FragMma<T>::mma(&row, &of_h[f], d[i]);
            }
#pragma unroll
            for (int e = 0; e < hk::kRowsPerLane * 4; ++e) {
                if constexpr (kStaged) {
                    d[i][e] = float(lds.stages[stage].template element<T>(16 * i, e)) - d[i][e];
                } else {
                    d[i][e] = float(us.window.template load<T>(us.element(of_u, 16 * i, e))) - d[i][e];
                }
            }
            if (p.d.data) {
                const R to(p.d, sequence.batch, token, head, rows, p.v_dim);
                const auto of_d = to.elements(16 * slice);
#pragma unroll
                for (int e = 0; e < hk::kRowsPerLane * 4; ++e) to.window.store(T(d[i][e]), to.element(of_d, 16 * i, e));
            }
            d[i] *= hk::broadcast_n(*reinterpret_cast<const Four *>(&lds.gates[wave][16 * i + 4 * group]));
        }

        if constexpr (kChannels) {
            // Of each row k.
            const Channels<T, kAccess> channels(p, u64(sequence.batch) * p.tokens + token + rows - 1, head, 1);
#pragma unroll
            for (int i = 0; i < kUnits * 4; ++i) {
                const auto of_last = channels.decays(channels.load(0, C::k(lane, i / 4, 0, i % 4)));
#pragma unroll
                for (int j = 0; j < V; ++j) {
#pragma unroll
                    for (int r = 0; r < hk::kRowsPerLane; ++r) c.h[i / 4 * V + j][4 * r + i % 4] *= of_last[j];
                }
            }
        } else {
            const float of_last = decay(last, unit);
#pragma unroll
            for (int i = 0; i < kUnits * V; ++i) c.h[i] *= of_last;
        }
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {
            if (4 * V * u32(f) >= rows) continue;
            const Frag of_d = frag_of_sums<T>(f, [&](int tile, int e) { return d[tile][e]; });
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                typename R::ColumnTiles of_k;
                if constexpr (kStaged) {
                    of_k = lds.stages[stage].template columns<R>(4 * V * f);
                } else {
                    of_k = k.template columns<true>(4 * V * f, 16 * V * u);
                }
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    const Frag column = of_k.frag(j);
                    c.h[u * V + j] = hk::FragMma<T>::mma(&column, &of_d, c.h[u * V + j]);
                }
            }
        }
        stage = stage == kAhead ? 0 : stage + 1;
    }
    if constexpr (kStaged) hk::wait_loads<0, 0>();

    if (!p.to || poison || slot < 0 || (p.slots && sequence.tokens == 0)) return;
    if (p.bf16_states) {
        const Window to = state<hk::bf16>(p, p.to, p.to_slot, slot, head);
        c.each([&](float h, u32 k, u32 m) { to.store(hk::bf16(h), place(k, m, 2)); });
    } else {
        const Window to = state<float>(p, p.to, p.to_slot, slot, head);
        c.each([&](float h, u32 k, u32 m) { to.store(h, place(k, m, 4)); });
    }
}
}  // namespace gdr::states

// As many waves to a SIMD as have 128, or 256 registers; of blocks that share chunks as many as have LDS.
#define STATES_ROWS_BY_WAVES(name, T, units, ...)                                                                    \
    HK_ENTRY_WAVES_PER_SIMD(name, (gdr::states::kThreads<hk::T, units>), 4, (gdr::states::kWavesOfSm<hk::T, units>), \
                            gdr::states::states<hk::T, hk::Access::Vectorized, units __VA_OPT__(, ) __VA_ARGS__>)
#if defined(HK_WARPGROUPS)
#define STATES_ROWS_1(name, T, ...)                                                            \
    HK_ENTRY_WAVES_PER_SM(name, gdr::states::kStatesThreads, gdr::states::kStatesThreads / 32, \
                          gdr::states::warpgroup_states<hk::T __VA_OPT__(, ) __VA_ARGS__>)
#else
#define STATES_ROWS_1(name, T, ...) STATES_ROWS_BY_WAVES(name, T, 1 __VA_OPT__(, ) __VA_ARGS__)
#endif
#define STATES_ROWS_2(name, T, ...) STATES_ROWS_BY_WAVES(name, T, 2 __VA_OPT__(, ) __VA_ARGS__)
#define STATES_ROWS(name, T, units, ...) STATES_ROWS_##units(name, T __VA_OPT__(, ) __VA_ARGS__)
#define STATES_ENTRIES(T, units)                                                             \
    STATES_ROWS(states_##T##_128, T, units)                                                  \
    HK_ENTRY_WAVES_PER_SIMD(states_##T##_256, hk::kWaveSize, 2, 8,                           \
                            gdr::states::states<hk::T, hk::Access::Vectorized, 2 * (units)>) \
    HK_ENTRY_WAVES_PER_SIMD(states_##T##_scalar_256, hk::kWaveSize, 2, 8,                    \
                            gdr::states::states<hk::T, hk::Access::Scalar, 2 * (units)>)
#define CHANNELS_ENTRIES(T, units)                                                                 \
    STATES_ROWS(states_##T##_128_channels, T, units, true)                                         \
    HK_ENTRY_WAVES_PER_SIMD(states_##T##_256_channels, hk::kWaveSize, 2, 8,                        \
                            gdr::states::states<hk::T, hk::Access::Vectorized, 2 * (units), true>) \
    HK_ENTRY_WAVES_PER_SIMD(states_##T##_scalar_256_channels, hk::kWaveSize, 2, 8,                 \
                            gdr::states::states<hk::T, hk::Access::Scalar, 2 * (units), true>)
