// tokens.h: tokens of a chunk as operands of MMA, from memory to registers, and what the kernels of the chunked form are told.
//   d[n, m] += sum over k of w[n, k] x[m, k]
// With V = 16 / sizeof(T) elements to 16 bytes, a unit is 16 V columns: 256 bytes of a row. Its columns as rows of operands are V
// tiles: row n of tile j is column V n + j, so that a lane loads 16 bytes of a token, and has V adjacent columns of each of its four
// results n = 4 group + r over the tiles.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/transpose.h>
#include <hk/types.h>
#include <hk/wave.h>

#include "chunks.h"
#include "heads.h"

namespace gdr {

using hk::Access;
using hk::Frag;
using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::MmaAcc;
using hk::u32;
using hk::u64;
using hk::Vec;
using hk::Window;
using Four = Vec<float, 4>;
using Layout16 = hk::AccLayout<16>;

/// The exponential of a logarithm to a base, given 1 over the logarithm of 2 to it: that of differences of sums of gates, in two instructions.
HK_FN float decay(float gate, float unit) { return hk::exp2_fast(gate * unit); }
inline constexpr float kLog2E = 1.44269504f;

/// Most tokens of a chunk, and tiles of 16 of them.
inline constexpr int kMostTokens = 64, kTiles = kMostTokens / 16;

/// What prepare, states and outputs are told. [B, T, heads, dim] with any strides of tokens and heads, or packed, [T, heads, dim].
struct Prefill {
    Heads q, k, v, w, u, d, o;
    Heads kg;  // of prepare with gates of channels: [.., v_heads, K] T, k exp(G_last - G), for states instead of k
    u64 g;  // f32 [.., v_heads], or 0: logarithms of decays; of each token for prepare, else sums in the chunk
    u64 sums;  // f32 [.., v_heads], or [.., v_heads, K] of channels: those sums, of prepare
    u64 gk;  // f32 [.., v_heads, K], or 0: sums in the chunk of gates of channels, instead of g
    u64 beta;  // f32 [.., v_heads]
    u64 x;  // T [.., v_heads, chunk]: (I + A)^-1; of kkt_channels f32, A
    u64 norms;  // f32 [.., k_heads], or 0: reciprocal norms of keys
    u64 h;  // T [chunks, v_heads, K, V] or [.., V, K], or 0: states that enter them
    u64 from, to;  // states: read, written, or 0
    i64 from_slot, to_slot;  // elements from a slot to the next
    u64 starts;  // i32 [sequences + 1], or 0
    u64 slots;  // i32 [sequences], or 0
    u32 sequences, tokens;  // tokens of each, or of all
    u32 chunk, chunks;  // tokens of a chunk; chunks of a sequence that is not packed, or of all that are
    u32 k_dim, v_dim, k_heads, v_heads, group;  // value heads of a key head
    u32 n_slots;
    u32 k_stride, v_stride;  // of a state, in elements
    u32 h_vk;  // snapshots are [V, K]
    u32 bf16_states, l2norm, base_2;
    float scale;
    u32 pad;
};

/// The lane's index, opaque: else the compiler would keep offsets from one use to another.
HK_FN u32 opaque_lane() {
    u32 lane = hk::lane_id();
    hk::opaque(lane);
    return lane;
}

/// Rows of a tensor: the tokens of a chunk, of a head.
template <class T, Access kAccess>
struct Rows {
    static constexpr int V = hk::kVecLen<T>;
    Window window;
    u32 rows, row_bytes, cols;

    Rows() = default;
    HK_FN Rows(GlobalPtr<T> from, u32 rows, i64 stride, u32 cols)
        : window(from, (rows - 1) * u32(stride) * u32(sizeof(T)) + cols * u32(sizeof(T))), rows(rows),
          row_bytes(u32(stride) * u32(sizeof(T))), cols(cols) {}
    HK_FN Rows(const Heads &of, i64 b, u64 token, u32 head, u32 rows, u32 cols)
        : Rows(reinterpret_cast<GlobalPtr<T>>(of.data) + b * of.batch + i64(token) * of.token + i64(head) * of.head,
               rows, of.token, cols) {}

    /// What to add to an offset in a row from column `col` on: nothing, or what is outside of the window past the last column. No select:
    /// compares take a pair of SGPRs each, and there are too few.
    HK_FN u32 past(u32 col) const { return (cols - 1 - col) & Window::kOutOfBounds; }

    /// The byte of column `col` of row `i`; outside of the window past the last row or column. Vectorized rows do not overlap: those past
    /// the last are beyond the window.
    HK_FN u32 at(u32 i, u32 col) const {
        const u32 offset = (i * row_bytes + col * u32(sizeof(T))) | past(col);
        return kAccess == Access::Vectorized ? offset : offset | ((rows - 1 - i) & Window::kOutOfBounds);
    }

    /// 16 bytes of row `i` from column `col` on; zeros past the last row and column.
    HK_FN Vec<u32, 4> load(u32 i, u32 col) const {
        if constexpr (kAccess == Access::Vectorized) {
            return window.load<Vec<u32, 4>>(at(i, col));
        } else {
            Vec<T, V> v;
#pragma unroll
            for (int e = 0; e < V; ++e) v[e] = window.load<T>(at(i, col + e));
            hk::sched_barrier();  // else the elements of all vectors would be in flight
            return __builtin_bit_cast(Vec<u32, 4>, v);
        }
    }

    /// Stores 16 bytes of row `i` from column `col` on; drops what is past the last row and column.
    HK_FN void put(Vec<u32, 4> v, u32 i, u32 col) const {
        if constexpr (kAccess == Access::Vectorized) {
            window.store(v, at(i, col));
        } else {
            const auto elements = __builtin_bit_cast(Vec<T, V>, v);
#pragma unroll
            for (int e = 0; e < V; ++e) window.store(T(elements[e]), at(i, col + e));
        }
    }
    HK_FN void store(Vec<float, V> v, u32 i, u32 col) const {
        put(__builtin_bit_cast(Vec<u32, 4>, hk::narrow<T, V>(v)), i, col);
    }

    /// The lane's place in rows: its offset in the window, from which rows are a wave-uniform number of rows away.
    struct Lane {
        u32 row, col, offset;
    };
    HK_FN Lane lane(u32 row, u32 col) const {
        Lane lane{row, col, (row * row_bytes + col * u32(sizeof(T))) | past(col)};
        hk::opaque(lane.offset);
        return lane;
    }
    HK_FN u32 at(const Lane &lane, u32 rows_on) const {
        const u32 offset = lane.offset + rows_on * row_bytes;
        return kAccess == Access::Vectorized ? offset
                                             : offset | ((rows - 1 - lane.row - rows_on) & Window::kOutOfBounds);
    }
    HK_FN Vec<u32, 4> load(const Lane &lane, u32 rows_on) const {
        if constexpr (kAccess == Access::Vectorized) {
            return window.load<Vec<u32, 4>>(at(lane, rows_on));
        } else {
            return load(lane.row + rows_on, lane.col);
        }
    }

    /// The lane's places for fragments of 16 rows: V columns from `col` on, which is the lane's. Rows are `apart` rows from each other.
    using Lanes = hk::PerRow<Lane>;
    HK_FN Lanes lanes(u32 col, u32 apart = 1) const {
        return hk::per_row([&](u32 i) { return lane(apart * hk::row_of_lane(hk::lane_id(), i), col); });
    }
    /// The lane's fragment of rows from `first` on.
    HK_FN Frag frag(const Lanes &lanes, u32 first) const {
        return hk::joined(hk::per_row([&](u32 i) { return load(lanes.row[i], first); }));
    }

    /// The lane's places for a tile of 16 rows n by 16 columns m from `col` on, element by element.
    HK_FN Lanes elements(u32 col) const {
        const u32 lane_id = hk::lane_id(), group = hk::group_of_lane(lane_id);
        return hk::per_row([&](u32 i) { return lane(4 * group, col + hk::row_of_lane(lane_id, i)); });
    }
    /// The offset of element `e` of the accumulators of a tile whose rows begin with `first`.
    HK_FN u32 element(const Lanes &lanes, u32 first, int e) const { return at(lanes.row[e / 4], first + e % 4); }

    /// A unit's columns over 4 V rows, as operands.
    struct ColumnTiles {
        hk::PerRow<Vec<u32, 4>> rows[V];

        /// The fragment of tile `j`.
        HK_FN Frag frag(int j) const {
            return hk::joined(hk::per_row([&](u32 i) {
                Vec<u32, 4> part[V];
#pragma unroll
                for (int e = 0; e < V; ++e) part[e] = rows[e].row[i];
                if constexpr (V == 8) {
                    return hk::column_of(part, j);
                } else {
                    return Vec<u32, 4>{part[0][j], part[1][j], part[2][j], part[3][j]};
                }
            }));
        }
    };
    /// Those of columns from `col` on and rows from `first` on, in the order of accumulators that are the other operand, or of `frag`.
    template <bool kOfSums>
    HK_FN ColumnTiles columns(u32 first, u32 col) const {
        return columns<kOfSums>(first, col, [](Vec<u32, 4> of, u32, u32) { return of; });
    }
    /// The same, with `f(elements, row, column)` instead of V elements of a row.
    template <bool kOfSums, class F>
    HK_FN ColumnTiles columns(u32 first, u32 col, F f) const {
        const u32 lane_id = opaque_lane(), group = hk::group_of_lane(lane_id);
        const Lanes lanes =
            hk::per_row([&](u32 i) { return lane((kOfSums ? 4 : V) * group, col + V * hk::row_of_lane(lane_id, i)); });
        ColumnTiles tiles;
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const u32 on = first + (kOfSums ? e / 4 * 16 + e % 4 : e);
            tiles.rows[e] =
                hk::per_row([&](u32 i) { return f(load(lanes.row[i], on), lanes.row[i].row + on, lanes.row[i].col); });
        }
        return tiles;
    }
};

/// Tiles on and below the diagonal.
using Lower = MmaAcc[kTiles][kTiles];
HK_FN void clear(Lower &a) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j <= i; ++j) a[i][j] = MmaAcc(0.0f);
    }
}

/// Sums of gates of channels of a value head's tokens.
template <class T, Access kAccess>
struct Channels {
    static constexpr int V = hk::kVecLen<T>;
    static constexpr float kMost = 64.0f;  // its exponential times products of keys is finite
    using Values = Vec<float, V>;
    Rows<float, kAccess> rows;

    HK_FN Channels(const Prefill &p, u64 row, u32 head, u32 count)
        : rows(reinterpret_cast<GlobalPtr<float>>(p.gk) + (row * p.v_heads + head) * p.k_dim, count,
               i64(p.v_heads) * p.k_dim, p.k_dim) {}

    /// Of token `i`, V channels from `col` on; zeros past the last.
    HK_FN Values load(u32 i, u32 col) const {
        Values v;
#pragma unroll
        for (int e = 0; e < V; e += 4) {
            const Four part = __builtin_bit_cast(Four, rows.load(i, col + e));
#pragma unroll
            for (int r = 0; r < 4; ++r) v[e + r] = part[r];
        }
        return v;
    }
    /// Of the lane's rows of 16 from `first` on.
    HK_FN hk::PerRow<Values> load_rows(u32 first, u32 col) const {
        const u32 lane = opaque_lane();
        return hk::per_row([&](u32 i) { return load(first + hk::row_of_lane(lane, i), col); });
    }

    /// exp(gates), none of which is positive but of tokens that are not there, or later ones: what is made of those is not used, but has to be
    /// finite. NaN stays NaN.
    HK_FN static Values decays(Values gates) {
        Values v;
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = decay(gates[e] > kMost ? kMost : gates[e], kLog2E);
        return v;
    }
    HK_FN static Values values(Vec<u32, 4> of) { return hk::widen<T, V>(__builtin_bit_cast(Vec<T, V>, of)); }
    /// Elements times exp(gates), rounded to T.
    HK_FN static Vec<u32, 4> decayed(Vec<u32, 4> of, Values gates) {
        return __builtin_bit_cast(Vec<u32, 4>, hk::narrow<T, V>(values(of) * decays(gates)));
    }
    /// The same of a fragment's rows, `gates(i)` of each.
    template <class F>
    HK_FN static Frag decayed(const Frag &of, F gates) {
        const auto rows = __builtin_bit_cast(hk::PerRow<Vec<u32, 4>>, of);
        return hk::joined(hk::per_row([&](u32 i) { return decayed(rows.row[i], gates(i)); }));
    }

    /// For 16 tokens from `first` on: sum over channels of x_i y_j exp(G_i - G_j) for the tokens j <= i of them, as accumulators: of `kOfRows`
    /// i = n and j = m, else i = m and j = n. Each exponent is made, none is positive.
    template <bool kOfRows, class R>
    HK_FN MmaAcc diagonal(const R &x, const R &y, u32 first, u32 k_dim) const {
        const u32 group = hk::group_of_lane(hk::lane_id());
        // Of the lane's rows m, each of the 16 n.
        Vec<float, hk::kRowsPerLane> sums[16];
#pragma unroll
        for (int n = 0; n < 16; ++n) sums[n] = 0.0f;
        for (u32 col = 0; col < k_dim; col += 4 * V) {
            const u32 own = col + V * group;
            const auto of_m = __builtin_bit_cast(hk::PerRow<Vec<u32, 4>>, (kOfRows ? y : x).frag(x.lanes(own), first));
            const auto gates_m = load_rows(first, own);
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                const Values of_n = values((kOfRows ? x : y).load(first + n, own)), gates_n = load(first + n, own);
#pragma unroll
                for (int i = 0; i < hk::kRowsPerLane; ++i) {
                    const Values off = kOfRows ? gates_n - gates_m.row[i] : gates_m.row[i] - gates_n;
                    const Values terms = of_n * values(of_m.row[i]) * decays(off);
#pragma unroll
                    for (int e = 0; e < V; ++e) sums[n][i] += terms[e];
                }
                hk::sched_barrier();  // else the loads of all n would be in flight
            }
        }
        MmaAcc acc;
#pragma unroll
        for (int i = 0; i < hk::kRowsPerLane; ++i) {
#pragma unroll
            for (int n = 0; n < 16; ++n) sums[n][i] = hk::reduce_over_lane_groups(sums[n][i], hk::Sum{});
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float low = group % 2 ? sums[4 + r][i] : sums[r][i];
                const float high = group % 2 ? sums[12 + r][i] : sums[8 + r][i];
                acc[4 * i + r] = group / 2 ? high : low;
            }
        }
        return acc;
    }

    /// The products of `tokens` keys of a chunk: sum over channels of k_i k_j exp(G_i - G_j), as accumulators of tiles (i, j), which are zeros
    /// before; orientation as of `diagonal`. Below the diagonal they are products of k_i exp(G_i - R) and k_j exp(R - G_j) with R that of the
    /// first token of the tile of i.
    template <bool kOfRows, class R>
    HK_FN void lower(const R &k, u32 tokens, u32 k_dim, Lower &a) const {
        const u32 group = hk::group_of_lane(hk::lane_id());
        for (u32 col = 0; col < k_dim; col += 4 * V) {
            const u32 own = col + V * group;
            const auto of_lane = k.lanes(own);
#pragma unroll
            for (int i = 1; i < kTiles; ++i) {
                if (16 * u32(i) >= tokens) continue;
                const auto first = load(16 * i, own);
                const auto gates = load_rows(16 * i, own);
                const Frag row = decayed(k.frag(of_lane, 16 * i), [&](u32 r) { return gates.row[r] - first; });
#pragma unroll
                for (int j = 0; j < i; ++j) {
                    const auto before = load_rows(16 * j, own);
                    const Frag column = decayed(k.frag(of_lane, 16 * j), [&](u32 r) { return first - before.row[r]; });
                    a[i][j] = hk::FragMma<T>::mma(kOfRows ? &row : &column, kOfRows ? &column : &row, a[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            if (16 * u32(i) < tokens) a[i][i] = diagonal<kOfRows>(k, k, 16 * i, k_dim);
        }
    }
};

/// Fragments over n of accumulators: `value(tile, e)` is element e of a tile of 16 n. Of fragment `f`, in T.
template <class T, class F>
HK_FN Frag frag_of_sums(int f, F value) {
    constexpr int V = hk::kVecLen<T>;
    return hk::joined(hk::per_row([&](u32 i) {
        Vec<float, V> v;
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = value((f * V + e) / 4, int(i) * 4 + e % 4);
        return __builtin_bit_cast(Vec<u32, 4>, hk::narrow<T, V>(v));
    }));
}

/// Stores the accumulators of a unit's columns from `col` on, of 16 rows m from `first` on, times a factor of each of the lane's rows.
template <class R>
HK_FN void store_unit(const R &to, const MmaAcc (&of)[R::V], u32 first, u32 col, Vec<float, hk::kRowsPerLane> factor) {
    const u32 lane = opaque_lane(), group = hk::group_of_lane(lane);
#pragma unroll
    for (int i = 0; i < hk::kRowsPerLane; ++i) {
#pragma unroll
        for (int r = 0; r < hk::kMmaRows; ++r) {
            Vec<float, R::V> v;
#pragma unroll
            for (int j = 0; j < R::V; ++j) v[j] = of[j][i * hk::kMmaRows + r] * factor[i];
            to.store(v, first + hk::row_of_lane(lane, i), col + R::V * (4 * group + r));
        }
    }
}

/// d + w x of f32: accumulators as operands over n, and their rows m.
HK_FN MmaAcc product(const MmaAcc &w, const MmaAcc &x, MmaAcc d) {
    const Frag ws = __builtin_bit_cast(Frag, w), xs = __builtin_bit_cast(Frag, x);
    return hk::FragMma<float>::mma(&ws, &xs, d);
}

/// Calls `f(element, n, m)` for a lane's accumulators of a tile.
template <class F>
HK_FN void each_sum(F f) {
    const u32 lane = opaque_lane(), group = hk::group_of_lane(lane);
#pragma unroll
    for (int i = 0; i < hk::kRowsPerLane; ++i) {
#pragma unroll
        for (int r = 0; r < hk::kMmaRows; ++r) f(i * hk::kMmaRows + r, 4 * group + r, hk::row_of_lane(lane, i));
    }
}

/// The first token and the token after the last of packed sequence `n`, clamped to the tokens.
struct Range {
    u32 first, end;
    bool in_range;  // nothing was clamped

    HK_FN Range(const Prefill &p, u32 n) {
        const i32 begin = hk::load_uniform<i32>(p.starts + 4 * u64(n));
        const i32 after = hk::load_uniform<i32>(p.starts + 4 * u64(n) + 4), all = i32(p.tokens);
        first = u32(begin < 0 ? 0 : begin < all ? begin : all);
        end = after < i32(first) ? first : u32(after < all ? after : all);
        in_range = begin >= 0 && begin <= after && after <= all;
    }
};

/// The tokens of a sequence, and the number of its first chunk among all. Packed sequence n has those from first / chunk + n on: no
/// others reach it, and no sequence has to know the chunks before it.
struct Sequence {
    u32 batch, first, tokens, chunk;
    bool in_range;

    HK_FN Sequence(const Prefill &p, u32 n)
        : batch(n), first(0), tokens(p.tokens), chunk(n * p.chunks), in_range(true) {
        if (p.starts) {
            const Range range(p, n);
            batch = 0, first = range.first, tokens = range.end - range.first;
            chunk = first / p.chunk + n, in_range = range.in_range;
        }
    }
};

/// Chunk `number` of a call: its tokens, none if there is no such chunk.
struct Chunk {
    u32 batch, first, tokens;
    bool in_range;

    HK_FN Chunk(const Prefill &p, u32 number) {
        u32 n = number / p.chunks;
        if (p.starts) {
            // The last sequence whose first chunk is this one or before it.
            u32 high = p.sequences;
            for (n = 0; high - n > 1;) {
                const u32 middle = n + (high - n) / 2;
                if (Range(p, middle).first / p.chunk + middle <= number) {
                    n = middle;
                } else {
                    high = middle;
                }
            }
        }
        const Sequence of(p, n);
        const u32 at = (number - of.chunk) * p.chunk;
        batch = of.batch, first = of.first + at, in_range = of.in_range;
        tokens = number < of.chunk || at >= of.tokens ? 0 : of.tokens - at < p.chunk ? of.tokens - at : p.chunk;
    }

    /// The first token among those of all batches.
    HK_FN u64 row(const Prefill &p) const { return u64(batch) * p.tokens + first; }
};

/// Sums of gates of a channel of a value head over the tokens of a chunk, from p.g to p.sums. Channels past the last have none.
HK_FN void sum_channel(const Prefill &p, const Chunk &chunk, u32 head, u32 channel) {
    const u64 first = (chunk.row(p) * p.v_heads + head) * p.k_dim;
    const u32 row_bytes = p.v_heads * p.k_dim * 4, bytes = (chunk.tokens - 1) * row_bytes + p.k_dim * 4;
    const Window from(reinterpret_cast<GlobalPtr<float>>(p.g) + first, bytes);
    const Window to(reinterpret_cast<GlobalPtr<float>>(p.sums) + first, bytes);
    const u32 at = channel < p.k_dim ? channel * 4 : Window::kOutOfBounds;
    double sum = chunk.in_range ? 0.0 : double(__builtin_nanf(""));
    // Loads of some tokens before their stores, which might be to the same memory for all that the compiler knows.
    constexpr u32 kAtOnce = 8;
    for (u32 first_token = 0; first_token < chunk.tokens; first_token += kAtOnce) {
        const u32 offset = at + first_token * row_bytes;
        float gates[kAtOnce];
#pragma unroll
        for (u32 t = 0; t < kAtOnce; ++t) gates[t] = from.load<float>(offset + t * row_bytes);
#pragma unroll
        for (u32 t = 0; t < kAtOnce; ++t) {
            sum += GateSums::checked(gates[t]);
            to.store(float(sum), offset + t * row_bytes);
        }
    }
}

}  // namespace gdr
