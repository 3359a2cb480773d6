// backward.h: gradients of attention. For row i (a query and its head) and key j, with the scores s of prefill_general.h:
//
//   p = exp(s - lse[i]);  d = keep (dout[i] . v[j]);  ds = p (d - delta[i]) (1 - tanh(s0 / softcap)^2);  delta[i] = dout[i] . out[i]
//   dv[j] = sum over i of keep p dout[i];  dk[j] = scale sum of ds q[i];  dq[i] = scale sum over j of ds k[j]
//
// A block has kWaves waves of kDim rows, of keys or of queries, that stay in registers: of keys with their values, of queries with the
// gradients of their outputs. The other rows move past it in tiles: as rows for the two products over columns, and by columns for the sums
// over rows. p and ds stay in the lane that has the scores. Sums over the heads of a group are those over the rows of its key head:
// no atomics, the same bits each time.
//   Products: 4 for keys, 3 for queries; 5 are needed.
// Of hstu_attn, with x = scale (q[i] . k[j]) and f = 1 / (1 + exp(-x)), p = x f and ds = (dout[i] . v[j]) f (1 + x (1 - f)); results are divided
// by the longest length.
// Source: Dao et al. 2022, "FlashAttention", algorithm 4.
#pragma once

#include "outputs.h"
#include "problem.h"
#include "rows.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/philox.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>
#include <hk/wave_tile.h>

namespace backward {

using namespace attention;

struct Params {
    attention::Params all;  // queries, fresh keys and values, lse, scores, sequences
    Sequences by_keys;  // the same with keys in the place of queries
    HeadRows dout, dq, dk, dv;
    u64 delta;  // f32 [rows of q, heads]
    u32 key_blocks;  // the first blocks have keys, the others queries
    u32 dout_vectorized;
};

inline constexpr int kThreads = 256, kWaves = kThreads / hk::kWaveSize;

/// Stationary rows of a wave.
template <class T, int kDqk, int kDv>
inline constexpr int kDimOf =
    hk::kRowsPerLane == 1 && (kDqk + kDv) * sizeof(T) <= 1024 && kDv * sizeof(T) < 512 ? 32 : 16;
/// Moving rows of a tile.
template <class T, int kDqk, int kDv>
inline constexpr int kTileOf = (kDqk + kDv) * sizeof(T) <= 640    ? 64
                               : (kDqk + kDv) * sizeof(T) <= 1024 ? 32
                                                                  : 16;

/// What scores of a query need to become gradients.
struct Query {
    u32 index, head;
    i32 first, last;  // keys that it sees
    float lse;  // in units of log2; inf: no key is seen
    float delta;
    float slope;
};

/// The queries of a tile.
template <int kTile>
struct QueryTable {
    u32 index[kTile], head[kTile];
    i32 first[kTile], last[kTile];
    float lse[kTile], delta[kTile], slope[kTile];

    HK_FN void put(u32 i, const Query &q) {
        index[i] = q.index, head[i] = q.head, first[i] = q.first, last[i] = q.last;
        lse[i] = q.lse, delta[i] = q.delta, slope[i] = q.slope;
    }
    HK_FN Query get(u32 i) const { return {index[i], head[i], first[i], last[i], lse[i], delta[i], slope[i]}; }
};

template <class T, int kDqk, int kDv>
struct Lds {
    static constexpr int kTile = kTileOf<T, kDqk, kDv>;
    using Part = hk::SharedTile<kTile, 128>;

    Part first[kDqk * int(sizeof(T)) / 128], second[kDv * int(sizeof(T)) / 128];
    u64 rows[2][2][kTile];  // addresses of the two operands' rows; 0: no such row
    QueryTable<kTile> queries[2];
};

/// Gradients of a block's keys, or of its queries.
template <class T, int kDqk, int kDv, bool kOfKeys, bool kHstu>
class Pass {
    static constexpr int kDim = kDimOf<T, kDqk, kDv>;
    using Places = hk::AccLayout<kDim>;
    using Mma = hk::FragMma<T, T, kDim>;
    using L = Lds<T, kDqk, kDv>;
    static constexpr int kTile = L::kTile, kStep = kTile < 32 ? kTile : 32;  // moving rows of a step
    static constexpr int kVec = 16 / int(sizeof(T)), kPartCols = 128 / int(sizeof(T));
    static constexpr int kFragBytes = hk::kFragBytesOf<kDim>;
    static constexpr int kRowsOfPass = kThreads / 8;  // rows that the block loads together, 128 bytes each
    static constexpr int kLoads = (kTile + kRowsOfPass - 1) / kRowsOfPass;
    static constexpr int kLaneRows = hk::kRowsPerLane;
    using Scores = hk::WaveTile<Mma, kStep, kDim>;
    using Operand = typename Scores::template AsOperand<T>;
    static constexpr int kFragRows = kVec * hk::kLaneGroups<kDim>;  // moving rows of a fragment

    /// The lane's fragments of kD columns.
    template <int kD>
    struct Columns {
        static constexpr int kSteps = kD * int(sizeof(T)) / kFragBytes, kParts = kD * int(sizeof(T)) / 128;
        hk::Frag frag[kSteps];
    };
    template <int kD>
    struct Chunks {
        Vec<T, kVec> part[kLoads][kD * int(sizeof(T)) / 128];
    };

    const Params &p_;
    const Work &work_;
    L &lds_;
    bool packed_;
    Columns<kDqk> a_;
    Columns<kDv> b_;
    Query query_[kLaneRows];  // of queries
    u32 key_[kLaneRows];  // of keys; ~0: none
    hk::WaveTile<Mma, kDqk, kDim> da_;
    hk::WaveTile<Mma, kDv, kDim> db_;  // of keys
    HstuMask mask_;

  public:
    static constexpr int kRows = kWaves * kDim;

    HK_FN Pass(const Params &p, const Work &work, L &lds)
        : p_(p), work_(work), lds_(lds), packed_(p.all.sequences.q_starts != 0), mask_(p.all.hstu, work) {}

    HK_FN void run() {
        const attention::Params &p = hk::reload_params(p_).all;
        u64 rows[kLaneRows][2];
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const u32 row = work_.first + hk::wave_id() * kDim + hk::row_of_lane<kDim>(hk::lane_id(), r);
            rows[r][0] = rows[r][1] = 0;
            if constexpr (kOfKeys) {
                key_[r] = row < work_.fresh ? row : ~0u;
                if (row < work_.fresh) key_rows(row, rows[r]);
            } else {
                const bool there = row < work_.q_len * p.group;
                query_[r] = find_query(there ? row : 0);
                if (there) query_rows(query_[r], rows[r]);
                if (!there) query_[r].last = -1, query_[r].first = 0;
            }
        }
        a_ = stationary<kDqk>(rows, 0);
        b_ = stationary<kDv>(rows, 1);
        u32 from, to;
        find_moving(from, to);
        if (!work_.poison) walk(from, to);
        store();
    }

  private:
    HK_FN const Params &params() const { return hk::reload_params(p_); }
    HK_FN i32 behind() const { return i32(work_.keys()) - i32(work_.q_len); }

    HK_FN void key_rows(u32 key, u64 (&rows)[2]) const {
        const attention::Params &p = params().all;
        const bool packed = p.sequences.k_starts != 0;
        const u32 token = key + work_.k_start, batch = packed ? 0 : work_.sequence;
        rows[0] = p.fresh.k.row(batch, work_.kv_head, token);
        rows[1] = p.fresh.v.row(batch, work_.kv_head, token);
    }
    HK_FN void query_rows(const Query &query, u64 (&rows)[2]) const {
        const Params &p = params();
        rows[0] = row_address(p.all.q, work_, packed_, query.index, query.head);
        rows[1] = row_address(p.dout, work_, packed_, query.index, query.head);
    }
    HK_FN Query find_query(u32 row) const {
        const Params &p = params();
        const hk::DivMod at(row, p.all.group, p.all.group_inverse);
        const u32 index = at.quotient, head = work_.kv_head * p.all.group + at.remainder;
        if (kHstu) return {index, head, 0, i32(work_.keys()) - 1, 0.0f, 0.0f, 0.0f};
        const KeyRange keys = key_range(p.all, work_, index);
        const auto f32_at = [](u64 at) { return *reinterpret_cast<GlobalPtr<const float>>(at); };
        const float lse = f32_at(row_address(p.all.lse, work_, packed_, index, head)) * kLog2E;
        const u64 first = packed_ ? work_.q_start : u64(work_.sequence) * p.all.sequences.sq;
        const float delta = f32_at(p.delta + ((first + index) * p.all.heads + head) * 4);
        const auto &of = p.all.scores;
        const float slope = of.alibi ? f32_at(of.alibi + u64(i64(work_.sequence) * of.alibi_batch + head) * 4) : 0.0f;
        return {index, head, keys.first, keys.last, lse == kMinusInf ? -kMinusInf : lse, delta, slope};
    }

    /// Chunk `col`, in elements, of a row of the first (0) or the second operand.
    HK_FN Vec<T, kVec> load(u64 row, bool of_keys, int operand, u32 col) const {
        const Params &p = params();
        const u32 width = operand ? p.all.dv : p.all.dqk;
        Vec<T, kVec> v = T(0);
        if (row != 0 && col < width) {
            const u32 of_queries = operand ? p.dout_vectorized : p.all.q_vectorized;
            const u32 vectorized = of_keys ? p.all.fresh.vectorized : of_queries;
            v = load_row<T, kVec>(reinterpret_cast<GlobalPtr<const u8>>(row + col * sizeof(T)), kOwn, vectorized,
                                  sizeof(T), i32(width - col));
        }
        return v;
    }
    template <int kD>
    HK_FN Columns<kD> stationary(const u64 (&rows)[kLaneRows][2], int operand) const {
        Columns<kD> columns;
        const u32 group = hk::group_of_lane<kDim>(hk::lane_id());
#pragma unroll
        for (int step = 0; step < columns.kSteps; ++step) {
            const u32 col = (step * hk::kLaneGroups<kDim> + group) * kVec;
            columns.frag[step] = hk::joined(hk::per_row(
                [&](u32 r) { return __builtin_bit_cast(Vec<u32, 4>, load(rows[r][operand], kOfKeys, operand, col)); }));
        }
        return columns;
    }

    /// Moving rows [from, to): keys that the block's queries see, or rows of queries that see its keys.
    HK_FN void find_moving(u32 &from, u32 &to) const {
        const attention::Params &p = params().all;
        const u32 rows = kOfKeys ? work_.fresh : work_.q_len * p.group;
        const u32 last = work_.first + kRows < rows ? work_.first + kRows - 1 : rows - 1;
        i32 begin, end;
        if constexpr (kOfKeys) {
            constexpr i32 kUnbounded = 1 << 29;
            const i32 off = behind();
            begin = p.scores.right >= kUnbounded ? 0 : i32(work_.first) - p.scores.right - off;
            end = p.scores.left >= kUnbounded ? i32(work_.q_len) : i32(last) + p.scores.left - off + 1;
            begin = begin < 0 ? 0 : begin;
            end = end < i32(work_.q_len) ? end : i32(work_.q_len);
            if constexpr (kHstu)
                begin = p.hstu.causal && !p.hstu.contextual ? i32(work_.first) : 0, end = i32(work_.q_len);
            if (end < begin) end = begin;
            begin *= i32(p.group), end *= i32(p.group);
        } else {
            const auto query = [&](u32 row) { return hk::DivMod(row, p.group, p.group_inverse).quotient; };
            begin = key_range(p, work_, query(work_.first)).first & ~3;  // a counter of dropout is for four keys
            end = key_range(p, work_, query(last)).last + 1;
            if constexpr (kHstu) {
                begin = 0;
                if (p.hstu.causal && query(work_.first) >= p.hstu.contextual) end = i32(query(last)) + 1;
            }
            if (end < begin) end = begin;
        }
        from = hk::uniform(u32(begin)), to = hk::uniform(u32(end));
    }

    /// Threads find a row of a tile each.
    HK_FN void fill(u32 from, u32 to, u32 at) {
        const u32 i = hk::thread_x(), row = from + i;
        if (i >= kTile) return;
        u64 rows[2] = {0, 0};
        if constexpr (kOfKeys) {
            Query query = find_query(row < to ? row : to - 1);
            if (row < to)
                query_rows(query, rows);
            else
                query.first = 0, query.last = -1;
            lds_.queries[at].put(i, query);
        } else if (row < to) {
            key_rows(row, rows);
        }
        lds_.rows[at][0][i] = rows[0], lds_.rows[at][1][i] = rows[1];
    }
    template <int kD>
    HK_FN Chunks<kD> load_tile(u32 at, int operand) const {
        Chunks<kD> chunks;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const u32 row = i * kRowsOfPass + hk::thread_x() / 8;
            const u64 address = row < kTile ? lds_.rows[at][operand][row] : 0;
#pragma unroll
            for (int part = 0; part < Columns<kD>::kParts; ++part)
                chunks.part[i][part] = load(address, !kOfKeys, operand, (part * 8 + hk::thread_x() % 8) * kVec);
        }
        return chunks;
    }
    template <int kD>
    HK_FN static void store_tile(typename L::Part *tile, const Chunks<kD> &chunks) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const u32 row = i * kRowsOfPass + hk::thread_x() / 8;
            if (kTile % kRowsOfPass != 0 && row >= kTile) continue;
#pragma unroll
            for (int part = 0; part < Columns<kD>::kParts; ++part)
                tile[part].chunk[tile[part].place(row, hk::thread_x() % 8)] =
                    __builtin_bit_cast(Vec<u32, 4>, chunks.part[i][part]);
        }
    }

    HK_FN void walk(u32 from, u32 to) {
        if (from >= to) return;
        const u32 tiles = (to - from + kTile - 1) / kTile;
        fill(from, to, 0);
        hk::block_barrier();
        Chunks<kDqk> a = load_tile<kDqk>(0, 0);
        Chunks<kDv> b = load_tile<kDv>(0, 1);
#pragma unroll 1
        for (u32 t = 0; t < tiles; ++t) {
            const bool more = t + 1 < tiles;
            // All waves have left the tile before the last one, and its table.
            if (more) fill(from + (t + 1) * kTile, to, (t + 1) % 2);
            store_tile<kDqk>(lds_.first, a);
            store_tile<kDv>(lds_.second, b);
            hk::block_barrier();
            if (more) a = load_tile<kDqk>((t + 1) % 2, 0), b = load_tile<kDv>((t + 1) % 2, 1);
#pragma unroll 1
            for (u32 i = 0; i < kTile; i += kStep) step(from + t * kTile, i, t % 2);
            hk::block_barrier();
        }
    }

    /// Products of `kStep` moving rows and the wave's own, over columns.
    template <int kD>
    HK_FN Scores multiply(const typename L::Part *tile, const Columns<kD> &own, u32 row) const {
        Scores scores;
        struct {
            const typename L::Part *tile;
            const Columns<kD> &own;
            u32 row;
            HK_FN hk::Frag w(int i, int step) const {
                constexpr int kStepsOfPart = 128 / kFragBytes;
                return hk::joined(tile[step / kStepsOfPart].template chunks<kDim>(row + i * kDim, step % kStepsOfPart));
            }
            HK_FN hk::Frag a(int, int step) const { return own.frag[step]; }
        } const from{tile, own, row};
        scores.template multiply_fragments<Columns<kD>::kSteps>(from);
        return scores;
    }
    /// Adds the moving rows, weighed by their operand, to sums by column.
    template <int kD>
    HK_FN void add(hk::WaveTile<Mma, kD, kDim> &sums, const typename L::Part *tile, const Operand &weights,
                   u32 row) const {
        constexpr int kOperands = kPartCols / kDim;
#pragma unroll
        for (int f = 0; f < Operand::kFrags; f += Mma::kFrags) {
#pragma unroll
            for (int part = 0; part < Columns<kD>::kParts; ++part) {
                hk::Frag columns[kOperands][Mma::kFrags];
#pragma unroll
                for (int e = 0; e < Mma::kFrags; ++e) {
                    const u32 first = row + (f + e) * kFragRows;
                    hk::Frag of_part[kOperands];
                    if constexpr (sizeof(T) == 2)
                        tile[part].template column_frags<kDim, true>(first, of_part);
                    else
                        element_frags(tile[part], first, of_part);
#pragma unroll
                    for (int j = 0; j < kOperands; ++j) columns[j][e] = of_part[j];
                }
#pragma unroll
                for (int j = 0; j < kOperands; ++j) {
                    auto &acc = sums.acc[0][part * kOperands + j];
                    acc = Mma::mma(columns[j], &weights.frag[f], acc);
                }
            }
        }
    }
    /// column_frags of f32: columns are in order.
    HK_FN static void element_frags(const typename L::Part &tile, u32 row, hk::Frag (&frags)[kPartCols / kDim]) {
        const u32 lane = hk::lane_id();
#pragma unroll
        for (int j = 0; j < kPartCols / kDim; ++j) {
            frags[j] = hk::joined(hk::per_row([&](u32 r) {
                Vec<float, 4> v;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 of_row = row + hk::group_of_lane<kDim>(lane) * 4 + i;
                    v[i] = tile.template get<float>(of_row, (j * kDim + hk::row_of_lane<kDim>(lane, r)) * 4);
                }
                return __builtin_bit_cast(Vec<u32, 4>, v);
            }));
        }
    }
    /// The column of the lane's accumulator i.
    HK_FN static u32 column(int i) {
        const u32 n = Places::n(hk::lane_id(), i % Places::kElements) + i / Places::kElements * kDim;
        if constexpr (sizeof(T) == 4)
            return n;
        else
            return n / 64 * 64 + L::Part::template column<kDim>(n % 64);
    }

    HK_FN void step(u32 tile_first, u32 i, u32 at) {
        Scores s = multiply<kDqk>(lds_.first, a_, i), d = multiply<kDv>(lds_.second, b_, i);
        gradients(s, d, tile_first + i, i, at);
        add<kDqk>(da_, lds_.first, d.template as_operand<T>(0), i);
        if constexpr (kOfKeys) add<kDv>(db_, lds_.second, s.template as_operand<T>(0), i);
    }

    /// `s` to keep p, `d` to ds; `first` is the moving row of the step's first, `i` its place in the tile.
    HK_FN void gradients(Scores &s, Scores &d, u32 first, u32 i, u32 at) const {
        const attention::Params &p = params().all;
        if constexpr (kHstu) return activations(s, d, first, i, at);
        const auto &of = p.scores;
        const float softcap = of.softcap, inverse = softcap != 0.0f ? 1.0f / softcap : 0.0f;
        const i32 off = behind();
        const u64 of_row = (of.longest_k + 3) / 4;
        const auto words = [&](const Query &query, u32 key) {
            const u64 row = (u64(work_.sequence) * p.heads + query.head) * of.longest_q + query.index;
            const u64 counter = of.offset + row * of_row + key / 4;
            return hk::philox({u32(counter), u32(counter >> 32), 0, 0}, of.seed);
        };
        constexpr int kAll = kStep / kDim * Places::kElements;
#pragma unroll
        for (int e = 0; e < kAll; e += hk::kMmaRows) {
            const int r = e / hk::kMmaRows % kLaneRows;
            const u32 n = Places::n(hk::lane_id(), e % Places::kElements) + e / Places::kElements * kDim;
            decltype(words(query_[0], 0u)) four;
            if (!kOfKeys && of.dropout) four = words(query_[r], first + n);
#pragma unroll
            for (int j = 0; j < hk::kMmaRows; ++j) {
                const Query query = kOfKeys ? lds_.queries[at].get(i + n + j) : query_[r];
                const u32 key = kOfKeys ? key_[r] : first + n + j;
                auto &s_acc = s.acc[0][(e + j) / Places::kElements], &d_acc = d.acc[0][(e + j) / Places::kElements];
                float x = s_acc[(e + j) % Places::kElements] * of.scale, slope = 1.0f;
                if (softcap != 0.0f) {
                    const float t = hk::tanh(x * inverse);
                    x = softcap * t, slope = 1.0f - t * t;
                }
                if (of.alibi) x -= query.slope * __builtin_fabsf(float(i32(query.index) + off - i32(key)));
                const bool visible = i32(key) >= query.first && i32(key) <= query.last;
                const float prob = hk::exp2_fast(__builtin_fmaf(x, kLog2E, -query.lse));
                float kept = 1.0f;
                if (of.dropout) {
                    const u32 word = kOfKeys ? word_of(words(query, key), key) : four[j];
                    kept = word >> 8 >= of.dropout ? of.kept : 0.0f;
                }
                const float ds = prob * (d_acc[(e + j) % Places::kElements] * kept - query.delta) * slope;
                s_acc[(e + j) % Places::kElements] = visible ? prob * kept : 0.0f;
                d_acc[(e + j) % Places::kElements] = visible ? ds : 0.0f;
            }
        }
    }
    HK_FN void activations(Scores &s, Scores &d, u32 first, u32 i, u32 at) const {
        const attention::Params &p = params().all;
#pragma unroll
        for (int e = 0; e < kStep / kDim * Places::kElements; ++e) {
            const int r = e / hk::kMmaRows % kLaneRows;
            const u32 n = Places::n(hk::lane_id(), e % Places::kElements) + e / Places::kElements * kDim;
            const Query query = kOfKeys ? lds_.queries[at].get(i + n) : query_[r];
            const u32 key = kOfKeys ? key_[r] : first + n;
            float &s_acc = reinterpret_cast<float *>(&s.acc[0][e / Places::kElements])[e % Places::kElements];
            float &d_acc = reinterpret_cast<float *>(&d.acc[0][e / Places::kElements])[e % Places::kElements];
            const bool visible = i32(key) <= query.last && query.last >= 0 && key < work_.fresh &&
                                 mask_.sees(i32(query.index), i32(key));
            const float x = s_acc * p.scores.scale, f = hk::sigmoid(x);
            s_acc = visible ? x * f : 0.0f;
            d_acc = visible ? d_acc * f * (1.0f + x * (1.0f - f)) : 0.0f;
        }
    }
    template <class Words>
    HK_FN static u32 word_of(const Words &words, u32 key) {
        u32 word = words[0];
#pragma unroll
        for (u32 j = 1; j < 4; ++j) word = key % 4 == j ? words[j] : word;
        return word;
    }

    HK_FN void store() const {
        const Params &p = params();
        const float values = kHstu ? p.all.hstu.inverse_longest : 1.0f, scale = p.all.scores.scale * values;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            if constexpr (kOfKeys) {
                if (key_[r] == ~0u) continue;
                const bool packed = p.all.sequences.k_starts != 0;
                const auto address = [&](const HeadRows &rows) {
                    const i64 row = i64(work_.k_start) + key_[r];
                    return rows.data + u64((packed ? 0 : i64(work_.sequence) * rows.batch) + row * rows.row +
                                           i64(work_.kv_head) * rows.head);
                };
                store_row(da_, r, address(p.dk), p.all.dqk, scale);
                store_row(db_, r, address(p.dv), p.all.dv, values);
            } else {
                const u32 row = work_.first + hk::wave_id() * kDim + hk::row_of_lane<kDim>(hk::lane_id(), r);
                if (row >= work_.q_len * p.all.group) continue;
                store_row(da_, r, row_address(p.dq, work_, packed_, query_[r].index, query_[r].head), p.all.dqk, scale);
            }
        }
    }
    template <int kD>
    HK_FN void store_row(const hk::WaveTile<Mma, kD, kDim> &sums, int r, u64 row, u32 width, float scale) const {
        const auto to = reinterpret_cast<GlobalPtr<T>>(row);
        const float factor = work_.poison ? __builtin_nanf("") : scale;
#pragma unroll
        for (int i = 0; i < kD / kDim * Places::kElements; ++i) {
            if (i / hk::kMmaRows % kLaneRows != r) continue;
            const u32 col = column(i);
            const Vec<float, 1> y = sums.acc[0][i / Places::kElements][i % Places::kElements] * factor;
            if (col < width) to[col] = hk::narrow<T, 1>(y)[0];
        }
    }
};

/// The keys of the block, and the queries of their sequence. False: there are none.
template <int kRows>
HK_FN bool find_key_work(const Params &p, u32 task, Work &work) {
    const struct {
        const Sequences &sequences;
        struct {
            u32 count;
        } splits;
        u32 kv_heads, group;
    } by_keys{p.by_keys, {1}, p.all.kv_heads, 1};
    if (!find_work<kRows>(by_keys, task, work)) return false;
    work.cached = 0, work.fresh = work.q_len, work.k_start = work.q_start, work.pages = 0;
    // The first tiles first: where keys after a query are masked, they are seen by most.
    work.first = (work.fresh - 1) / kRows * kRows - work.first;
    const Sequences &s = p.all.sequences;
    work.q_start = 0, work.q_len = s.sq;
    if (s.q_starts) {
        const hk::i32 first = index_at(s.q_starts, work.sequence), end = index_at(s.q_starts, work.sequence + 1);
        const bool valid = first >= 0 && end >= first && u32(end) <= s.total_q;
        work.poison = work.poison || !valid;
        work.q_start = valid ? u32(first) : 0, work.q_len = valid ? u32(end - first) : 0;
    }
    return true;
}

template <class T, int kDqk, int kDv, bool kHstu = false>
HK_FN void backward(const Params &p) {
    auto &lds = hk::block_lds<Lds<T, kDqk, kDv>>();
    Work work;
    if (hk::block_x() < p.key_blocks) {
        using Keys = Pass<T, kDqk, kDv, true, kHstu>;
        const u32 task = hk::xcd_remap(hk::block_x(), p.key_blocks);
        if (!find_key_work<Keys::kRows>(p, task, work)) return;
        if (kHstu) work.poison |= !targets_fit(p.all.hstu, work);
        Keys(p, work, lds).run();
    } else {
        using Queries = Pass<T, kDqk, kDv, false, kHstu>;
        const u32 task = hk::xcd_remap(hk::block_x() - p.key_blocks, hk::grid_x() - p.key_blocks);
        if (!find_work<Queries::kRows>(p.all, task, work)) return;
        find_keys(p.all, work);
        if (kHstu) work.poison |= !targets_fit(p.all.hstu, work);
        Queries(p, work, lds).run();
    }
}

}  // namespace backward
