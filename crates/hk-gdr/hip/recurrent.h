// recurrent.h: the gated delta rule, token by token, with the state in registers.
//   S~ = exp(g) exp(gk) exp(gv) S     by the value head, by k, by v; each may be absent
//   d = beta (v - S~^T k),  S = S~ + k d^T,  o = scale S^T q
// A wave has all K rows of some columns of v of one (sequence, value head), so that it needs no other wave. With eight (16) lanes to a
// column, each has K / 8 rows of 4 (8) columns. Accesses of a state are 16 bytes a lane, in lines of 128 bytes.
// S~^T k, S~^T q, k k, q q and q k are sums over a lane's rows, then over the lanes of its column, all at once: o and the norms of q
// and k follow from them, so that a token waits for lanes once.
#pragma once

#include <hk/global.h>
#include <hk/math.h>
#include <hk/types.h>
#include <hk/wave.h>

#include "gates.h"
#include "heads.h"

namespace gdr {

using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::kVecLen;
using hk::kWaveSize;
using hk::u16;
using hk::u32;
using hk::u64;
using hk::Vec;
using hk::Window;

struct Recurrent {
    Heads q, k, v, o;
    u64 g, beta;  // f32 [.., v_heads], or 0; beta [.., v_heads, v_dim] if beta_of_v
    u64 gk, gv;  // f32 [.., v_heads, k_dim], [.., v_heads, v_dim], or 0
    u64 a, b;  // T [.., v_heads] for g and beta, or 0; a [.., v_heads, k_dim], for gk, if a_of_k
    u64 a_log, dt_bias;  // f32 [v_heads]; T, or f32 if f32_bias, [v_heads], or [v_heads, k_dim] if a_of_k
    u64 from, to;  // states: read, written, or 0
    i64 from_slot, to_slot;  // elements from a slot to the next
    u64 starts;  // i32 [sequences + 1], or 0
    u64 slots;  // i32 [sequences, slot_cols], or 0
    u64 accepted;  // i32 [sequences], or 0
    u32 sequences, tokens;  // tokens of each, or of all
    u32 k_dim, v_dim, v_heads, group;  // value heads of a key head
    u32 slices;  // waves of a value head
    u32 n_slots, slot_cols;
    u32 each_token;  // writes a state for each token
    u32 beta_of_v, a_of_k, f32_bias, l2norm;
    u32 k_stride, v_stride;  // of a state, in elements
    float scale, softplus_beta, softplus_threshold;
    u32 pad;
};

/// How a state lies in memory: rows k of columns v, the other way round, or by strides.
enum class Layout { Kv, Vk, Any };

/// A lane's part of the wave's columns of a state.
template <class S, Layout kLayout, int kMostK>
struct Part {
    static constexpr bool kVk = kLayout == Layout::Vk;
    static constexpr int kVec = kLayout == Layout::Any ? 4 : kVecLen<S>;
    static constexpr int kCols = kVk ? 4 : kVec;  // v of a lane
    // More lanes to a column where a lane's part would take more than half of the registers. As in src/recurrent.rs.
    static constexpr int kLanes = kLayout == Layout::Any || kCols * kMostK > 16 * kWaveSize ? 16 : 8;
    static constexpr int kRows = kMostK / kLanes;  // k of a lane
    static constexpr int kRun = kVk ? kVec : kRows;  // adjacent ones
    static constexpr int kAcross = kWaveSize / kLanes;

    // Lanes along the unit stride are adjacent.
    HK_FN static u32 lane_of_column() { return kVk ? hk::lane_id() % kLanes : hk::lane_id() / kAcross; }
    HK_FN static u32 across() { return kVk ? hk::lane_id() / kLanes : hk::lane_id() % kAcross; }

    /// Row `i`, which is constant.
    HK_FN static u32 k(int i) { return (u32(i / kRun * kLanes) + lane_of_column()) * kRun + i % kRun; }

    /// Lanes that differ in the lowest bit of `across`.
    static constexpr int kNeighbour = kVk ? kLanes : 1;

    /// Sums over the lanes of a column, the same bits in all of them.
    template <int N>
    HK_FN static void reduce(float (&v)[N]) {
        if constexpr (kVk) {
            hk::group_reduce_each<kLanes>(v, hk::Sum{});
        } else {
            step<kAcross>(v);
        }
    }

  private:
    template <int kMask, int N>
    HK_FN static void step(float (&v)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            v[i] = hk::Sum{}(v[i], hk::shuffle_xor<kMask>(v[i]));
        }
        if constexpr (2 * kMask < kWaveSize) step<2 * kMask>(v);
    }
};

/// N elements of a row, in runs of kRun adjacent ones, run r from `place(r)` on; past the row they are zero.
template <class T, int kRun, bool kVectorized, int N, class Place>
HK_FN Vec<T, N> load_runs(Window row, Place place) {
    constexpr int kVec = kVecLen<T>;
    constexpr int kPart = !kVectorized ? 1 : kRun < kVec ? kRun : kVec;
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < N; i += kPart) {
        const u32 at = place(i / kRun) + i % kRun;
        if constexpr (kPart == 1) {
            v[i] = row.load<T>(at * sizeof(T));
        } else if constexpr (kPart == kVec) {
            const auto part = row.load<Vec<T, kVec>>(at * sizeof(T));
#pragma unroll
            for (int j = 0; j < kVec; ++j) v[i + j] = part[j];
        } else {
            // Half of 16 bytes: another lane takes the other one.
            static_assert(2 * kPart == kVec, "halves");
            const auto both = row.load<Vec<u32, 4>>((at & ~u32(kPart)) * sizeof(T));
            const bool upper = at & kPart;
            const Vec<u32, 2> half = {upper ? both[2] : both[0], upper ? both[3] : both[1]};
            const auto part = __builtin_bit_cast(Vec<T, kPart>, half);
#pragma unroll
            for (int j = 0; j < kPart; ++j) v[i + j] = part[j];
        }
    }
    return v;
}

/// A wave's columns of a state.
template <class S, Layout kLayout, int kMostK>
struct Tile {
    using P = Part<S, kLayout, kMostK>;
    // Vectors along the unit stride: of columns, or of rows.
    static constexpr int kLen = P::kVk ? P::kRun : P::kCols;
    static constexpr int kVecs = P::kRows * P::kCols / kLen;
    using Floats = Vec<float, kLen>;
    Floats s[kVecs];

    /// Offset in bytes of vector `i` of the lane.
    HK_FN static u32 offset(const Recurrent &p, u32 col, int i) {
        if constexpr (P::kVk) {
            constexpr int kRuns = P::kRows / kLen;
            const u32 k = P::k(i % kRuns * kLen);
            const u32 at = ((col + i / kRuns) * p.k_dim + k) * sizeof(S);
            return k < p.k_dim ? at : Window::kOutOfBounds;
        } else {
            const u32 base = (P::k(0) * p.v_dim + col) * sizeof(S);
            return (col < p.v_dim ? base : Window::kOutOfBounds) + u32(i) * (p.v_dim * u32(sizeof(S)));
        }
    }

    /// The same of column `j` of row `i`, by strides.
    HK_FN static u32 offset(const Recurrent &p, u32 col, int i, int j) {
        const u32 k = P::k(i), v = col + j;
        const u32 at = (k * p.k_stride + v * p.v_stride) * sizeof(S);
        return k < p.k_dim && v < p.v_dim ? at : Window::kOutOfBounds;
    }

    HK_FN static Window window(const Recurrent &p, u64 states, i64 slot_stride, i64 slot, u32 head) {
        const u32 size = p.k_dim * p.v_dim;
        const auto at = reinterpret_cast<GlobalPtr<S>>(states) + slot * slot_stride + i64(head) * size;
        return Window(at, size * u32(sizeof(S)));
    }

    HK_FN void clear() {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) s[i] = Floats(0.0f);
    }

    HK_FN void load(const Recurrent &p, Window from, u32 col) {
        if constexpr (kLayout == Layout::Any) {
#pragma unroll
            for (int i = 0; i < kVecs; ++i) {
#pragma unroll
                for (int j = 0; j < kLen; ++j) s[i][j] = float(from.load<S>(offset(p, col, i, j)));
            }
        } else {
            Vec<S, kLen> raw[kVecs];
#pragma unroll
            for (int i = 0; i < kVecs; ++i) raw[i] = from.load<Vec<S, kLen>>(offset(p, col, i));
#pragma unroll
            for (int i = 0; i < kVecs; ++i) s[i] = hk::widen<S, kLen>(raw[i]);
        }
    }

    HK_FN void store(const Recurrent &p, Window to, u32 col) const {
        hk::opaque(col);  // else the offsets of `load` would be kept
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
            const auto narrow = hk::narrow<S, kLen>(s[i]);
            if constexpr (kLayout == Layout::Any) {
#pragma unroll
                for (int j = 0; j < kLen; ++j) to.store(S(narrow[j]), offset(p, col, i, j));
            } else {
                to.store(narrow, offset(p, col, i));
            }
        }
    }

    using Rows = float[P::kRows];
    using Cols = float[P::kCols];

    /// S *= by_k by_v^T
    HK_FN void scale(const Rows &by_k, const Cols &by_v) {
        each([&](int i, Floats k, Floats v) { s[i] *= k * v; }, by_k, by_v);
    }

    /// S = decay S + k d^T
    HK_FN void update(float decay, const Rows &k, const Cols &d) {
        each([&](int i, Floats k, Floats d) { s[i] = __builtin_elementwise_fma(k, d, s[i] * decay); }, k, d);
    }

    /// A lane's share of S^T x.
    HK_FN void product(const Rows &x, Cols &out) const {
        if constexpr (P::kVk) {
            constexpr int kRuns = P::kRows / kLen;
#pragma unroll
            for (int j = 0; j < P::kCols; ++j) {
                Floats sum(0.0f);
#pragma unroll
                for (int r = 0; r < kRuns; ++r) {
                    sum = __builtin_elementwise_fma(s[j * kRuns + r], run(x, r), sum);
                }
                out[j] = sum[0];
#pragma unroll
                for (int e = 1; e < kLen; ++e) out[j] += sum[e];
            }
        } else {
            Floats sum(0.0f);
#pragma unroll
            for (int i = 0; i < kVecs; ++i) sum = __builtin_elementwise_fma(s[i], Floats(x[i]), sum);
#pragma unroll
            for (int j = 0; j < P::kCols; ++j) out[j] = sum[j];
        }
    }

  private:
    HK_FN static Floats run(const Rows &x, int r) {
        Floats v;
#pragma unroll
        for (int e = 0; e < kLen; ++e) v[e] = x[r * kLen + e];
        return v;
    }

    /// Calls `f` with each vector's factors of rows and of columns.
    template <class F>
    HK_FN static void each(F f, const Rows &by_k, const Cols &by_v) {
        if constexpr (P::kVk) {
            constexpr int kRuns = P::kRows / kLen;
#pragma unroll
            for (int i = 0; i < kVecs; ++i) f(i, run(by_k, i % kRuns), Floats(by_v[i / kRuns]));
        } else {
            Floats cols;
#pragma unroll
            for (int j = 0; j < P::kCols; ++j) cols[j] = by_v[j];
#pragma unroll
            for (int i = 0; i < kVecs; ++i) f(i, Floats(by_k[i]), cols);
        }
    }
};

/// A sequence of the call: its tokens, and where its states are.
struct Sequence {
    u32 first, length;
    i64 batch;
    i64 from, to;  // slots; negative: none
    bool poison;  // something of it is out of range: o is NaN, no slot is written

    HK_FN Sequence(const Recurrent &p, u32 n) : first(0), length(p.tokens), batch(n), from(n), to(n), poison(false) {
        if (p.starts) {
            const i32 begin = hk::load_uniform<i32>(p.starts + 4 * u64(n));
            const i32 end = hk::load_uniform<i32>(p.starts + 4 * u64(n) + 4);
            const i32 all = i32(p.tokens);
            poison = begin < 0 || end < begin || end > all;
            const i32 low = begin < 0 ? 0 : begin < all ? begin : all;
            const i32 high = end < low ? low : end < all ? end : all;
            first = u32(low);
            length = u32(high - low);
            batch = 0;
        }
        if (p.slots) {
            u32 column = 0;
            if (p.accepted) column = u32(hk::load_uniform<i32>(p.accepted + 4 * u64(n))) - 1;
            poison |= column >= p.slot_cols || (p.each_token && length > p.slot_cols);
            from = to = column < p.slot_cols ? slot(p, n, column) : -1;
            poison |= from >= i64(p.n_slots);
            if (p.each_token) {
                const u32 cols = length < p.slot_cols ? length : p.slot_cols;
                for (u32 t = 0; t < cols; ++t) poison |= slot(p, n, t) >= i64(p.n_slots);
            }
        }
        if (!p.from) from = -1;
        if (!p.to) to = -1;
    }

    HK_FN static i64 slot(const Recurrent &p, u32 n, u32 column) {
        return hk::load_uniform<i32>(p.slots + 4 * (u64(n) * p.slot_cols + column));
    }
};

template <class T, class S, Layout kLayout, int kMostK>
struct Wave {
    using P = Part<S, kLayout, kMostK>;
    static constexpr bool kVectorized = kLayout != Layout::Any;
    const Recurrent &p;
    const Sequence seq;
    u32 head, col;

    /// What a token loads.
    struct Token {
        Vec<T, P::kRows> q, k;
        Vec<T, P::kCols> v;
        float g, beta;
        T a, b;
    };

    HK_FN Token load(u32 t) const {
        Token x;
        const Recurrent &p = hk::reload_params(this->p);
        const i64 token = seq.first + t;
        const u32 k_bytes = p.k_dim * u32(sizeof(T)), v_bytes = p.v_dim * u32(sizeof(T));
        const auto row = [](int r) { return P::k(r * P::kRun); };
        x.q = load_runs<T, P::kRun, kVectorized, P::kRows>(p.q.row<const T>(seq.batch, token, head / p.group, k_bytes),
                                                           row);
        x.k = load_runs<T, P::kRun, kVectorized, P::kRows>(p.k.row<const T>(seq.batch, token, head / p.group, k_bytes),
                                                           row);
        const auto own = [&](int) { return col; };
        x.v = load_runs<T, P::kCols, kVectorized, P::kCols>(p.v.row<const T>(seq.batch, token, head, v_bytes), own);
        const u64 at = scalar(t);
        if (p.g) x.g = hk::load_uniform<float>(p.g + 4 * at);
        if (p.beta && !p.beta_of_v) x.beta = hk::load_uniform<float>(p.beta + 4 * at);
        if (p.b) x.b = reinterpret_cast<GlobalPtr<const T>>(p.b)[at];
        if (p.a && !p.a_of_k) x.a = reinterpret_cast<GlobalPtr<const T>>(p.a)[at];
        return x;
    }

    /// Index of the token's scalars.
    HK_FN u64 scalar(u32 t) const { return (u64(seq.batch) * p.tokens + seq.first + t) * p.v_heads + head; }

    /// N values of a row of gates, in runs as `load_runs`; past `dim` zero.
    template <class E, int kRun, int N, class Place>
    HK_FN static void load_gates(u64 data, u64 row, u32 dim, float (&v)[N], Place place) {
        const Window window(reinterpret_cast<GlobalPtr<const E>>(data) + row * dim, dim * u32(sizeof(E)));
        const auto gates = load_runs<E, kRun, kVectorized, N>(window, place);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = float(gates[i]);
    }

    HK_FN void store(u32 t, const float (&o)[P::kCols]) const {
        const Window row = p.o.row<T>(seq.batch, i64(seq.first) + t, head, p.v_dim * u32(sizeof(T)));
        Vec<float, P::kCols> v;
#pragma unroll
        for (int j = 0; j < P::kCols; ++j) v[j] = o[j];
        const auto out = hk::narrow<T, P::kCols>(v);
        constexpr int kVec = kVecLen<T>;
        const bool first = P::lane_of_column() == 0;
        if constexpr (!kVectorized) {
            if (!first) return;
#pragma unroll
            for (int j = 0; j < P::kCols; ++j) row.store(T(out[j]), (col + j) * sizeof(T));
        } else if constexpr (P::kCols >= kVec) {
            if (!first) return;
#pragma unroll
            for (int j = 0; j < P::kCols; j += kVec) {
                Vec<T, kVec> part;
#pragma unroll
                for (int e = 0; e < kVec; ++e) part[e] = out[j + e];
                row.store(part, (col + j) * sizeof(T));
            }
        } else {
            // 16 bytes are those of two lanes.
            const auto mine = __builtin_bit_cast(Vec<u32, 2>, out);
            const u32 low = hk::shuffle_xor<P::kNeighbour>(u32(mine[0]));
            const u32 high = hk::shuffle_xor<P::kNeighbour>(u32(mine[1]));
            if (first && P::across() % 2 == 0) row.store(Vec<u32, 4>{mine[0], mine[1], low, high}, col * sizeof(T));
        }
    }

    HK_FN void poison() const {
        float nan[P::kCols];
#pragma unroll
        for (int j = 0; j < P::kCols; ++j) nan[j] = __builtin_nanf("");
        for (u32 t = 0; t < seq.length; ++t) store(t, nan);
    }

    /// The decays by k and by v.
    HK_FN void scale_channels(Tile<S, kLayout, kMostK> &tile, u64 at) const {
        const Recurrent &p = hk::reload_params(this->p);
        const auto row = [](int r) { return P::k(r * P::kRun); };
        float by_k[P::kRows], by_v[P::kCols];
        if (p.a_of_k) {
            const float rate = hk::load_uniform<float>(p.a_log + 4 * u64(head));
            float bias[P::kRows];
            load_gates<T, P::kRun>(p.a, at, p.k_dim, by_k, row);
            if (p.f32_bias) {
                load_gates<float, P::kRun>(p.dt_bias, head, p.k_dim, bias, row);
            } else {
                load_gates<T, P::kRun>(p.dt_bias, head, p.k_dim, bias, row);
            }
#pragma unroll
            for (int i = 0; i < P::kRows; ++i) {
                by_k[i] = log_decay(by_k[i] + bias[i], rate, p.softplus_beta, p.softplus_threshold);
                hk::sched_barrier();  // else the temporaries of all rows would be live at once
            }
        } else if (p.gk) {
            load_gates<float, P::kRun>(p.gk, at, p.k_dim, by_k, row);
        } else {
#pragma unroll
            for (int i = 0; i < P::kRows; ++i) by_k[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < P::kRows; ++i) by_k[i] = decay_of(by_k[i]);
#pragma unroll
        for (int j = 0; j < P::kCols; ++j) by_v[j] = 0.0f;
        if (p.gv) load_gates<float, P::kCols>(p.gv, at, p.v_dim, by_v, [&](int) { return col; });
#pragma unroll
        for (int j = 0; j < P::kCols; ++j) by_v[j] = decay_of(by_v[j]);
        tile.scale(by_k, by_v);
    }

    /// One token: from S and the token's vectors to S and o.
    HK_FN void step(Tile<S, kLayout, kMostK> &tile, const Token &x, u32 t) const {
        const Recurrent &p = hk::reload_params(this->p);
        const u64 at = scalar(t);
        if (p.gk || p.gv || p.a_of_k) scale_channels(tile, at);

        float decay = p.g ? decay_of(x.g) : 1.0f;
        if (p.a && !p.a_of_k) {
            const float bias = p.f32_bias ? hk::load_uniform<float>(p.dt_bias + 4 * u64(head))
                                          : float(reinterpret_cast<GlobalPtr<const T>>(p.dt_bias)[head]);
            const float rate = hk::load_uniform<float>(p.a_log + 4 * u64(head));
            decay = decay_of(log_decay(float(x.a) + bias, rate, p.softplus_beta, p.softplus_threshold));
        }
        float beta[P::kCols];
        const float all = p.b ? hk::sigmoid(float(x.b)) : p.beta ? x.beta : 1.0f;
#pragma unroll
        for (int j = 0; j < P::kCols; ++j) beta[j] = all;
        if (p.beta_of_v) load_gates<float, P::kCols>(p.beta, at, p.v_dim, beta, [&](int) { return col; });

        float q[P::kRows], k[P::kRows];
#pragma unroll
        for (int i = 0; i < P::kRows; ++i) q[i] = float(x.q[i]), k[i] = float(x.k[i]);

        // S^T k, S^T q, then k k, q q, q k.
        constexpr int C = P::kCols;
        float sums[2 * C + 3], of_k[C], of_q[C];
        tile.product(k, of_k);
        tile.product(q, of_q);
        float kk = 0.0f, qq = 0.0f, qk = 0.0f;
#pragma unroll
        for (int i = 0; i < P::kRows; ++i) {
            kk = __builtin_fmaf(k[i], k[i], kk);
            qq = __builtin_fmaf(q[i], q[i], qq);
            qk = __builtin_fmaf(q[i], k[i], qk);
        }
#pragma unroll
        for (int j = 0; j < C; ++j) sums[j] = of_k[j], sums[C + j] = of_q[j];
        sums[2 * C] = kk, sums[2 * C + 1] = qq, sums[2 * C + 2] = qk;
        P::reduce(sums);

        float k_norm = 1.0f, q_norm = p.scale;
        if (p.l2norm) {
            k_norm = hk::rsqrt(sums[2 * C] + kNormEps);
            q_norm *= hk::rsqrt(sums[2 * C + 1] + kNormEps);
        }
        float d[C], o[C];
#pragma unroll
        for (int j = 0; j < C; ++j) {
            // d of the normalised k, times its norm's inverse: what the state gets for each unit of the given k.
            d[j] = k_norm * beta[j] * (float(x.v[j]) - decay * k_norm * sums[j]);
            o[j] = q_norm * __builtin_fmaf(sums[2 * C + 2], d[j], decay * sums[C + j]);
        }
        tile.update(decay, k, d);
        store(t, o);
    }
};

/// One wave: columns `task % slices` of value head `task / slices % v_heads` of a sequence.
template <class T, class S, Layout kLayout, int kMostK>
HK_FN void recurrent(const Recurrent &p) {
    using P = Part<S, kLayout, kMostK>;
    using State = Tile<S, kLayout, kMostK>;
    const u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());
    const u32 row = task / p.slices;
    const u32 head = row % p.v_heads;
    const u32 col = (task % p.slices * P::kAcross + P::across()) * P::kCols;
    const Wave<T, S, kLayout, kMostK> wave = {p, Sequence(p, row / p.v_heads), head, col};
    const Sequence &seq = wave.seq;
    if (seq.poison) return wave.poison();
    const bool in_place = p.slots != 0;
    if (seq.length == 0 && in_place) return;

    auto next = seq.length ? wave.load(0) : typename Wave<T, S, kLayout, kMostK>::Token{};
    State tile;
    if (seq.from >= 0) {
        tile.load(p, State::window(p, p.from, p.from_slot, seq.from, head), col);
    } else {
        tile.clear();
    }
    for (u32 t = 0; t < seq.length; ++t) {
        const auto now = next;
        if (t + 1 < seq.length) next = wave.load(t + 1);
        wave.step(tile, now, t);
        if (p.each_token) {
            const i64 slot = Sequence::slot(p, row / p.v_heads, t);
            if (slot >= 0) tile.store(p, State::window(p, p.to, p.to_slot, slot, head), col);
        }
    }
    if (seq.to >= 0 && !p.each_token) tile.store(p, State::window(p, p.to, p.to_slot, seq.to, head), col);
}

}  // namespace gdr
