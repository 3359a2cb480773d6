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
// With kDq, blocks of keys add to the gradients of queries, too: 5 products. ds crosses LDS; the columns of the block's keys stay in
// registers. Sums are f32 in memory, by tile of queries, and are added to by atomics, tile by tile: in any order, or, if `ordered`, one block
// of keys after the other. A block waits for the one before it, which has a lower ticket; tickets are drawn when blocks start, so that the
// block with the lowest one never waits.
// With 256 columns of 16 bits, two waves share 32 keys: one has k, p and dk, the other v, ds and dv. p and ds cross LDS, p rounded: ds is
// made of the rounded p.
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
#include <hk/fence.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/philox.h>
#include <hk/row_broadcast.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/warpgroup.h>
#include <hk/wave.h>
#include <hk/wave_tile.h>

namespace backward {

using namespace attention;

struct Params {
    attention::Params all;  // queries, fresh keys and values, lse, scores, sequences
    Sequences by_keys;  // the same with keys in the place of queries
    HeadRows dout, dq, dk, dv;
    u64 delta;  // f32 [rows of q, heads]
    u64 dq_sums;  // with kDq, f32 [key heads, dq_tiles, kTile, dqk rounded up to 4]
    u64 turns;  // u32: the next ticket; then, of each tile of dq_sums, the block of keys that adds to it next
    u32 key_blocks;  // the first blocks have keys, the others queries
    u32 dout_vectorized;
    u32 dq_vectorized;  // four columns of its rows are aligned, without kDq 16 bytes
    u32 dq_tiles;
    u32 ordered;
    u32 keys_vectorized;  // 16 bytes of the rows of dk and dv are aligned
};

inline constexpr int kThreads = 256, kWaves = kThreads / hk::kWaveSize;

/// Stationary rows of a wave. Same values as in src/backward/mod.rs.
template <class T, int kDqk, int kDv, bool kOfKeys>
inline constexpr int kDimOf =
    hk::kRowsPerLane == 1 && (kDqk + kDv) * sizeof(T) <= 1024 && (kDv * sizeof(T) < 512 || (!kOfKeys && sizeof(T) == 2))
        ? 32
        : 16;
/// Two waves share the keys: one has the keys themselves, the other their values.
template <class T, int kDqk, int kDv, bool kHstu>
inline constexpr bool kPairsOf = !kHstu && sizeof(T) == 2 && hk::kRowsPerLane == 1 && kDqk == 256 && kDv == 256;
/// Moving rows of a tile. Same values as in src/backward/fused.rs.
template <class T, int kDqk, int kDv>
inline constexpr int kTileOf = sizeof(T) == 2 && kDqk + kDv <= 320 ? 64
                               : (kDqk + kDv) * sizeof(T) <= 1024  ? 32
                                                                   : 16;

/// The walk by warpgroup instructions: backward_warpgroup.h.
template <class P>
class WarpgroupWalk;
/// Warpgroup instructions serve tiles of this kind, where the target has them.
template <class T, int kDqk, int kDv>
inline constexpr bool kWarpgroupsOf =
#if defined(HK_WARPGROUPS)
    sizeof(T) == 2 && kDqk == kDv && kDqk <= 128;
#else
    false;
#endif
/// They take whole vectors, rows that are near each other, and no scores but products.
HK_FN bool takes_warpgroups(const Params &p) {
    const auto &of = p.all.scores;
    const auto near = [](i64 stride) { return u64(stride) < 1u << 23; };
    const auto rows = [&](const HeadRows &rows) { return near(rows.row) && near(rows.head); };
    return p.all.q_vectorized && p.dout_vectorized && p.all.fresh.vectorized && p.all.group <= 128 && rows(p.all.q) &&
           rows(p.dout) && near(p.all.fresh.k.token) && near(p.all.fresh.v.token) && of.softcap == 0.0f && !of.alibi &&
           !of.dropout;
}

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
    float lse[kTile], slope[kTile];
    // -lse / scale in the units of the products and -delta: accumulators begin with them.
    alignas(16) float from_lse[kTile], from_delta[kTile];

    HK_FN void put_place(u32 i, const Query &q) { index[i] = q.index, head[i] = q.head; }
    HK_FN void put_numbers(u32 i, const auto &q, float inverse) {
        lse[i] = q.lse, slope[i] = q.slope;
        from_lse[i] = -q.lse * inverse, from_delta[i] = -q.delta;
    }
};

/// ds of a tile, [key][row of the tile]; of pairs, p follows in the other half of the row.
template <int kKeys, bool kHasDs>
struct DsTile {};
template <int kKeys>
struct DsTile<kKeys, true> {
    hk::SharedTile<kKeys, 128> ds;
    u32 ticket;
};

template <class T, int kDqk, int kDv, bool kHstu, bool kDq>
struct Lds : DsTile<kWaves * kDimOf<T, kDqk, kDv, true>, kDq || kPairsOf<T, kDqk, kDv, kHstu>> {
    static constexpr int kTile = kTileOf<T, kDqk, kDv>;
    using Part = hk::SharedTile<kTile, 128>;

    // dk of pairs is a tile behind.
    static constexpr int kStages = kPairsOf<T, kDqk, kDv, kHstu> ? 2 : 1;
    Part first[kStages][kDqk * int(sizeof(T)) / 128], second[kDv * int(sizeof(T)) / 128];
    u64 rows[2][2][kTile];  // addresses of the two operands' rows
    QueryTable<kTile> queries[2];
    alignas(16) float zeros[kTile];
};

/// The first of the tiles in dq_sums of the work's sequence and key head.
template <int kTile>
HK_FN u64 first_dq_tile(const Params &p, const Work &work) {
    const u64 first = p.all.sequences.q_starts ? work.q_start : u64(work.sequence) * p.all.sequences.sq;
    return u64(work.kv_head) * p.dq_tiles + first * p.all.group / kTile + work.sequence;
}
HK_FN u32 dq_row_floats(const Params &p) { return (p.all.dqk + 3) / 4 * 4; }

/// This wave's atomics are performed. No fence where a wait does: that would write the caches back in each tile.
HK_FN void atomics_performed() {
    if constexpr (hk::kWaveSize == 64)
        hk::drain_register_loads();
    else
        hk::release_to_device();
}

/// Gradients of a block's keys, of its queries, or of its keys and, with kDq, the share of its keys in those of queries.
template <class T, int kDqk, int kDv, bool kOfKeys, bool kHstu, bool kDq = false>
class Pass {
    template <class P>
    friend class WarpgroupWalk;
    using Element = T;
    static constexpr int kDqkOf = kDqk, kDvOf = kDv;
    static constexpr bool kKeys = kOfKeys, kAddsQueries = kDq;
    static constexpr bool kPairs = kOfKeys && kPairsOf<T, kDqk, kDv, kHstu>;
    static constexpr int kDim = kPairs ? 32 : kDimOf<T, kDqk, kDv, kOfKeys>, kSharers = kPairs ? 2 : 1;
    using Places = hk::AccLayout<kDim>;
    using Mma = hk::FragMma<T, T, kDim>;
    using L = Lds<T, kDqk, kDv, kHstu, kDq>;
    static constexpr int kTile = L::kTile, kStep = kTile < 32 ? kTile : 32;  // moving rows of a step
    static constexpr int kUnrolledSteps =
        sizeof(T) == 2 && kDqk + kDv <= 128 ? 2 : 1;  // of wide tiles registers are too few
    static constexpr int kVec = 16 / int(sizeof(T)), kPartCols = 128 / int(sizeof(T));
    static constexpr int kFragBytes = hk::kFragBytesOf<kDim>;
    static constexpr int kRowsOfPass = kThreads / 8;  // rows that the block loads together, 128 bytes each
    static constexpr int kLoads = (kTile + kRowsOfPass - 1) / kRowsOfPass;
    static constexpr int kLaneRows = hk::kRowsPerLane;
    using Scores = hk::WaveTile<Mma, kStep, kDim>;
    using Operand = typename Scores::template AsOperand<T>;
    static constexpr int kFragRows = kVec * hk::kLaneGroups<kDim>;  // moving rows of a fragment
    // Of dq: tiles of kDqDim rows and columns, of 16 where waves have as many columns only so, or where columns of ds are read in pairs. Waves have a share of the columns, and of the rows where columns are few.
    static constexpr bool kNarrow = sizeof(T) == 2 && kLaneRows == 1 && kDqk == 64;
    static constexpr int kDqDim =
        ((kPairs || kNarrow) && !hk::kHasReadTr) || (kDqk / kDim % kWaves == kWaves / 2 && kDqk > 64) ? 16 : kDim;
    static constexpr int kDqRows = kTile / kDqDim, kDqCols = kDqk / kDqDim;
    static constexpr int kRowShares = (kNarrow || kDqCols < kWaves) && kDqRows > 1 ? 2 : 1,
                         kColShares = kWaves / kRowShares;
    static constexpr int kOwnRows = kDqRows / kRowShares, kOwnCols = (kDqCols + kColShares - 1) / kColShares;
    using DqPlaces = hk::AccLayout<kDqDim>;
    using DqMma = hk::FragMma<T, T, kDqDim>;
    static constexpr int kDqFragRows = kVec * hk::kLaneGroups<kDqDim>;
    // Lanes of a row of 16 have the first numbers of the step's accumulators in pairs: an eighth of the LDS clocks, for 16 vector
    // instructions. With four products on gfx950, vector issue is the scarcer.
    static constexpr bool kBroadcasts = kOfKeys && !kHstu && sizeof(T) == 2 && hk::kWaveSize == 64 && kDim == 32 &&
                                        kStep == 32 && kDqk + kDv <= 128 && (kDq || !hk::kHasReadTr);

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
    // Of the block: the lane's first own row; of a tile: the wave's first row of dq. In registers, not recomputed in each step.
    u32 own_, dq_rows_;
    Columns<kDqk> a_;
    Columns<kDv> b_;
    Query query_[kLaneRows];  // of queries
    u32 key_[kLaneRows];  // of keys; ~0: none
    hk::WaveTile<Mma, kDqk, kDim> da_;
    hk::WaveTile<Mma, kDv, kDim> db_;  // of keys
    HstuMask mask_;

  public:
    static constexpr int kRows = kWaves / kSharers * kDim;
    static constexpr bool kWarpgroups = kWarpgroupsOf<T, kDqk, kDv> && !kHstu;

  private:
    hk::Frag k_columns_[kDq ? kOwnCols : 1]
                       [kDq ? kRows / kDqFragRows : 1];  // of the wave's columns, over the block's keys

  public:
    HK_FN Pass(const Params &p, const Work &work, L &lds)
        : p_(p), work_(work), lds_(lds), packed_(p.all.sequences.q_starts != 0),
          own_(hk::wave_id() / kSharers * kDim + hk::row_of_lane<kDim>(hk::lane_id(), 0)),
          dq_rows_(row_share() * (kOwnRows * kDqDim)), mask_(p.all.hstu, work) {
        hk::opaque(own_);
        if constexpr (kDq) hk::opaque(dq_rows_);
    }

    HK_FN void run() {
        const attention::Params &p = hk::reload_params(p_).all;
        u64 rows[kLaneRows][2];
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const u32 row = own_row(r);
            rows[r][0] = rows[r][1] = 0;
            if constexpr (kOfKeys) {
                key_[r] = row < work_.fresh ? row : ~0u;
                if (row < work_.fresh) key_rows(row, rows[r]);
            } else {
                const bool there = row < work_.q_len * p.group;
                Query &query = query_[r];
                query = find_place(there ? row : 0);
                load_numbers(query);
                if (there) query_rows(query, rows[r]);
                if (!there) query.last = -1, query.first = 0;
            }
        }
        u32 from, to;
        find_moving(from, to);
        if constexpr (kWarpgroups) {
            if (takes_warpgroups(params())) {
                if (from < to && !work_.poison) WarpgroupWalk<Pass>(*this, from, to).run();
                return store();
            }
        }
        if constexpr (!kPairs) {
            a_ = stationary<kDqk>(rows, 0);
            b_ = stationary<kDv>(rows, 1);
            if constexpr (kDq) load_columns<true>();
            if (!work_.poison) walk(from, to);
            store();
        } else if (hk::wave_id() % 2 == 0) {
            run_of_pair<false>(rows, from, to);
        } else {
            run_of_pair<true>(rows, from, to);
        }
    }

  private:
    /// The wave of a pair that has keys and scores, or values and the gradients of probabilities.
    template <bool kValues>
    HK_FN void run_of_pair(const u64 (&rows)[kLaneRows][2], u32 from, u32 to) {
        a_ = stationary<kDqk>(rows, kValues);
        if constexpr (kDq) load_columns<!kValues>();
        if (!work_.poison) walk_pairs<kValues>(from, to);
        store_of_pair<kValues>();
    }

    /// What scores of a tile take to become gradients.
    enum class Form { kProducts, kMasked, kGeneral };
    using Visible = u32[kLaneRows];

    HK_FN u32 first_own() const { return work_.first + hk::wave_id() / kSharers * kDim; }
    /// The lane's row r.
    HK_FN u32 own_row(int r) const { return work_.first + own_of_block(r); }
    HK_FN u32 own_of_block(int r) const {
        return own_ + (hk::row_of_lane<kDim>(hk::lane_id(), r) - hk::row_of_lane<kDim>(hk::lane_id(), 0));
    }
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
    HK_FN Query find_place(u32 row) const {
        const Params &p = params();
        const hk::DivMod at(row, p.all.group, p.all.group_inverse);
        const u32 index = at.quotient, head = work_.kv_head * p.all.group + at.remainder;
        if (kOfKeys || kHstu) return {index, head, 0, i32(work_.keys()) - 1, 0.0f, 0.0f, 0.0f};
        const KeyRange keys = key_range(p.all, work_, index);
        return {index, head, keys.first, keys.last, 0.0f, 0.0f, 0.0f};
    }
    HK_FN void load_numbers(Query &query) const {
        if (kHstu) return;
        const Params &p = params();
        // One NaN, whose bits rounding does not carry over.
        const auto f32_at = [](u64 at) {
            const float v = *reinterpret_cast<GlobalPtr<const float>>(at);
            return v == v ? v : __builtin_nanf("");
        };
        const float lse = f32_at(row_address(p.all.lse, work_, packed_, query.index, query.head)) * kLog2E;
        const u64 first = packed_ ? work_.q_start : u64(work_.sequence) * p.all.sequences.sq;
        query.delta = f32_at(p.delta + ((first + query.index) * p.all.heads + query.head) * 4);
        const auto &of = p.all.scores;
        if (of.alibi) query.slope = f32_at(of.alibi + u64(i64(work_.sequence) * of.alibi_batch + query.head) * 4);
        query.lse = lse == kMinusInf ? -kMinusInf : lse;
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

    /// Queries [begin, end) that see keys of a block.
    HK_FN void find_queries(u32 first, i32 &begin, i32 &end) const {
        const attention::Params &p = params().all;
        constexpr i32 kUnbounded = 1 << 29;
        const u32 last = first + kRows < work_.fresh ? first + kRows - 1 : work_.fresh - 1;
        const i32 off = behind();
        begin = p.scores.right >= kUnbounded ? 0 : i32(first) - p.scores.right - off;
        end = p.scores.left >= kUnbounded ? i32(work_.q_len) : i32(last) + p.scores.left - off + 1;
        begin = begin < 0 ? 0 : begin;
        end = end < i32(work_.q_len) ? end : i32(work_.q_len);
        if constexpr (kHstu) begin = p.hstu.causal && !p.hstu.contextual ? i32(first) : 0, end = i32(work_.q_len);
        if (end < begin) end = begin;
    }
    /// Moving rows [from, to): keys that the block's queries see, or rows of queries that see its keys.
    HK_FN void find_moving(u32 &from, u32 &to) const {
        const attention::Params &p = params().all;
        i32 begin, end;
        if constexpr (kOfKeys) {
            find_queries(work_.first, begin, end);
            begin *= i32(p.group), end *= i32(p.group);
            if (kDq) begin = begin / kTile * kTile;
        } else {
            const u32 rows = work_.q_len * p.group;
            const u32 last = work_.first + kRows < rows ? work_.first + kRows - 1 : rows - 1;
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

    /// Threads find a row of a tile each. Those past the last one are the last one, which nobody sees there.
    HK_FN void fill(u32 from, u32 to, u32 at) {
        const u32 i = hk::thread_x(), row = from + i;
        if (i >= kTile) return;
        u64 rows[2];
        const u32 there = row < to ? row : to - 1;
        if constexpr (kOfKeys) {
            const Query query = find_place(there);
            query_rows(query, rows);
            lds_.queries[at].put_place(i, query);
        } else {
            key_rows(there, rows);
        }
        lds_.rows[at][0][i] = rows[0], lds_.rows[at][1][i] = rows[1];
    }
    /// What threads bring of a tile.
    struct Prefetched {
        Chunks<kDqk> a;
        Chunks<kDv> b;
        float lse, delta, slope;
    };
    HK_FN Prefetched load_tile(u32 from, u32 to, u32 at) const {
        Prefetched tile;
        tile.a = load_rows<kDqk>(at, 0);
        tile.b = load_rows<kDv>(at, 1);
        if constexpr (kOfKeys && !kHstu) {
            const u32 row = from + hk::thread_x();
            if (hk::thread_x() < kTile) {
                Query query = find_place(row < to ? row : to - 1);
                load_numbers(query);
                tile.lse = query.lse, tile.delta = query.delta, tile.slope = query.slope;
            }
        }
        return tile;
    }
    HK_FN void store_tile(const Prefetched &tile, u32 at) {
        store_rows<kDqk>(lds_.first[kPairs ? at : 0], tile.a, at, 0);
        store_rows<kDv>(lds_.second, tile.b, at, 1);
        if (kOfKeys && !kHstu && hk::thread_x() < kTile)
            lds_.queries[at].put_numbers(hk::thread_x(), tile, 1.0f / (params().all.scores.scale * kLog2E));
    }
    /// Whole rows of an operand have aligned chunks: they are prefetched.
    template <int kD>
    HK_FN bool is_prefetched(int operand) const {
        const Params &p = params();
        const u32 of_queries = operand ? p.dout_vectorized : p.all.q_vectorized;
        return (kOfKeys ? of_queries : p.all.fresh.vectorized) && (operand ? p.all.dv : p.all.dqk) == kD;
    }
    template <int kD>
    HK_FN Chunks<kD> load_rows(u32 at, int operand) const {
        Chunks<kD> chunks;
        if (!is_prefetched<kD>(operand)) return chunks;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const u32 row = i * kRowsOfPass + hk::thread_x() / 8;
            if (kTile % kRowsOfPass != 0 && row >= kTile) continue;
            const u64 address = lds_.rows[at][operand][row];
            const auto from = reinterpret_cast<GlobalPtr<const u8>>(address + hk::thread_x() % 8 * 16);
#pragma unroll
            for (int part = 0; part < Columns<kD>::kParts; ++part)
                chunks.part[i][part] = *reinterpret_cast<GlobalPtr<const Vec<T, kVec>>>(from + part * 128);
        }
        return chunks;
    }
    template <int kD>
    HK_FN void store_rows(typename L::Part *tile, const Chunks<kD> &chunks, u32 at, int operand) {
        const u32 chunk = hk::thread_x() % 8;
        if (is_prefetched<kD>(operand)) {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const u32 row = i * kRowsOfPass + hk::thread_x() / 8;
                if (kTile % kRowsOfPass != 0 && row >= kTile) continue;
#pragma unroll
                for (int part = 0; part < Columns<kD>::kParts; ++part)
                    tile[part].chunk[tile[part].place(row, chunk)] =
                        __builtin_bit_cast(Vec<u32, 4>, chunks.part[i][part]);
            }
        } else {
#pragma unroll 1
            for (u32 row = hk::thread_x() / 8; row < kTile; row += kRowsOfPass) {
#pragma unroll 1
                for (u32 part = 0; part < Columns<kD>::kParts; ++part)
                    tile[part].chunk[tile[part].place(row, chunk)] = __builtin_bit_cast(
                        Vec<u32, 4>, load(lds_.rows[at][operand][row], !kOfKeys, operand, (part * 8 + chunk) * kVec));
            }
        }
    }

    HK_FN void walk(u32 from, u32 to) {
        if (from >= to) return;
        const u32 tiles = (to - from + kTile - 1) / kTile;
        if (hk::thread_x() < kTile) lds_.zeros[hk::thread_x()] = 0.0f;
        fill(from, to, 0);
        hk::block_barrier();
        Prefetched next = load_tile(from, to, 0);
        Turns turns(*this);
#pragma unroll 1
        for (u32 t = 0; t < tiles; ++t) {
            // All waves have left the tile before the last one, and its table.
            fill(from + (t + 1) * kTile, to, (t + 1) % 2);
            store_tile(next, t % 2);
            hk::block_barrier();
            next = load_tile(from + (t + 1) * kTile, to, (t + 1) % 2);
            const Form form = form_of(from + t * kTile, kTile, work_.first, kRows, to);
#pragma unroll kUnrolledSteps
            for (u32 i = 0; i < kTile; i += kStep) {
                const Form of_wave =
                    kDq && form == Form::kMasked ? form_of(from + t * kTile + i, kStep, first_own(), kDim, to) : form;
                step(of_wave, from + t * kTile, to, i, t % 2);
            }
            if (kDq && t > 0) turns.performed();
            hk::block_barrier();
            if constexpr (kDq) {
                if (t > 0) turns.pass(from / kTile + t - 1);
                add_queries(from / kTile + t, turns);
            }
        }
        if constexpr (kDq) {
            turns.performed();
            hk::block_barrier();
            turns.pass(from / kTile + tiles - 1);
        }
    }

    /// The same of pairs, in three phases a tile, in each of which both waves have as many MFMAs:
    ///   k: scores, p      dk of the tile before    dq, if kDq
    ///   v: dout . v       ds, dv                   dq
    template <bool kValues>
    HK_FN void walk_pairs(u32 from, u32 to) {
        if (from >= to) return;
        const u32 tiles = (to - from + kTile - 1) / kTile;
        if (hk::thread_x() < kTile) lds_.zeros[hk::thread_x()] = 0.0f;
        fill(from, to, 0);
        hk::block_barrier();
        Prefetched next = load_tile(from, to, 0);
        Turns turns(*this);
        Operand before{};  // ds of the wave's keys in the tile before
#pragma unroll 1
        for (u32 t = 0; t < tiles; ++t) {
            const u32 first = from + t * kTile, at = t % 2;
            fill(first + kTile, to, 1 - at);
            store_tile(next, at);
            if (t > 0) {
                if constexpr (!kValues) before = get_ds(0);
                if constexpr (kDq) add_queries(from / kTile + t - 1, turns);
            }
            hk::block_barrier();
            next = load_tile(first + kTile, to, 1 - at);
            const Form form = form_of(first, kTile, first_own(), kDim, to);
            const bool plain = form != Form::kGeneral, masked = form != Form::kProducts;
            Visible visible;
            if (masked) visible[0] = visible_rows(first, to, 0);
            const u32 kept = params().all.scores.dropout ? kept_scores(first, 0, at) : ~0u;
            Scores scores;
            const auto &of = lds_.queries[at];
            begin(scores, !plain ? lds_.zeros : kValues ? of.from_delta : of.from_lse, 0);
            multiply<kDqk>(scores, kValues ? lds_.second : lds_.first[at], a_, 0);
            if constexpr (!kValues) {
                if (plain)
                    put_probs(scores, masked, visible);
                else
                    put_probs_general(scores, kept, visible, first, at);
            }
            hk::block_barrier();
            if constexpr (kValues) {
                const Operand probs = get_ds(kTile);
                put_ds(ds_of(scores, plain ? probs : get_ds(0), form, kept, visible, at), 0);
                add<kDv>(da_, lds_.second, probs, 0);
            } else {
                // Of the first tile nothing: a branch would cost moves of accumulators.
                add<kDqk>(da_, lds_.first[t > 0 ? 1 - at : at], before, 0);
            }
            if (kDq && t > 0) turns.performed();
            hk::block_barrier();
            if (kDq && t > 0) turns.pass(from / kTile + t - 1);
        }
        if constexpr (kDq) add_queries(from / kTile + tiles - 1, turns);
        if constexpr (!kValues) add<kDqk>(da_, lds_.first[(tiles - 1) % 2], get_ds(0), 0);
        if constexpr (kDq) {
            turns.performed();
            hk::block_barrier();
            turns.pass(from / kTile + tiles - 1);
        }
    }
    HK_FN void put_probs(Scores &s, bool masked, const Visible &visible) {
        const float scale = params().all.scores.scale * kLog2E;
#pragma unroll
        for (int e = 0; e < kScores; e += 2) {
            Vec<float, 2> x = {score(s, e), score(s, e + 1)};
            x *= scale;
            score(s, e) = hk::exp2_fast(x[0]), score(s, e + 1) = hk::exp2_fast(x[1]);
        }
        if (masked) mask(s, visible);
        put_ds(rounded(s), kTile);
    }
    /// With softcap, p (1 - tanh^2) is where ds will be.
    HK_FN void put_probs_general(Scores &s, u32 kept, const Visible &visible, u32 first, u32 at) {
        Scores slope;
        each_score([&](int e) { score(slope, e) = 1.0f; });
        probabilities(s, slope, first, 0, at);
        each_score([&](int e) { score(slope, e) *= score(s, e); });
        const auto &of = params().all.scores;
        if (of.dropout) each_score([&](int e) { score(s, e) *= kept >> e & 1 ? of.kept : 0.0f; });
        mask(s, visible), mask(slope, visible);
        put_ds(rounded(s), kTile), put_ds(rounded(slope), 0);
    }
    /// ds from the gradients of probabilities, less delta where form is not kGeneral.
    HK_FN Operand ds_of(Scores &d, const Operand &probs, Form form, u32 kept, const Visible &visible, u32 at) const {
        if (form == Form::kGeneral) {
            const auto &of = params().all.scores;
            if (of.dropout) each_score([&](int e) { score(d, e) *= kept >> e & 1 ? of.kept : 0.0f; });
            each_score([&](int e) { score(d, e) -= query_delta(e, 0, at); });
        }
#pragma unroll
        for (int e = 0; e < kScores; e += 2) {
            Vec<float, 2> y = {score(d, e), score(d, e + 1)};
            const u32 pair = probs.frag[e / kVec][e % kVec / 2];
            if constexpr (__is_same(T, hk::bf16))
                y *=
                    Vec<float, 2>{__builtin_bit_cast(float, pair << 16), __builtin_bit_cast(float, pair & 0xffff0000u)};
            else
                y *= __builtin_convertvector(__builtin_bit_cast(Vec<T, 2>, pair), Vec<float, 2>);
            score(d, e) = y[0], score(d, e + 1) = y[1];
        }
        if (form != Form::kProducts) mask(d, visible);
        return rounded(d);
    }

    /// The turns of blocks of keys at the tiles of dq_sums.
    class Turns {
        const Pass &of_;
        u64 first_;  // tile of the sequence and key head
        u32 block_;
        u32 shared_;  // tiles to which the block before adds, too

        HK_FN GlobalPtr<u32> turn(u32 tile) const {
            return reinterpret_cast<GlobalPtr<u32>>(of_.params().turns) + 1 + first_ + tile;
        }

      public:
        HK_FN Turns(const Pass &of) : of_(of), first_(0), block_(0), shared_(0) {
            if constexpr (kDq) {
                first_ = first_dq_tile<kTile>(of.params(), of.work_);
                block_ = of.work_.first / kRows;
                i32 begin, end;
                if (block_ > 0) {
                    of.find_queries(of.work_.first - kRows, begin, end);
                    shared_ = (u32(end) * of.params().all.group + kTile - 1) / kTile;
                }
            }
        }
        HK_FN u64 sums(u32 tile) const {
            const Params &p = of_.params();
            return p.dq_sums + (first_ + tile) * (kTile * sizeof(float)) * dq_row_floats(p);
        }
        /// Waits for the block before. Atomics are performed in the order in which they are issued to a tile: no fence.
        HK_FN void wait(u32 tile) const {
            if (!of_.params().ordered || tile >= shared_) return;
            while (hk::uniform(hk::atomic_load(turn(tile))) != block_) {}
        }
        HK_FN void performed() const {
            if (of_.params().ordered) atomics_performed();
        }
        /// After a barrier at which all waves have performed theirs.
        HK_FN void pass(u32 tile) const {
            if (!of_.params().ordered || hk::thread_x() != 0) return;
            __scoped_atomic_store_n(turn(tile), block_ + 1, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
        }
    };

    HK_FN static u32 row_share() { return hk::wave_id() % kRowShares; }
    HK_FN static u32 first_col() { return hk::wave_id() / kRowShares * kOwnCols * kDqDim; }

    /// Columns of the block's keys, in the order of ds_frags: the waves' fragments cross LDS, as rows of the first operand, a tile at a time.
    template <bool kHasKeys>
    HK_FN void load_columns() {
        const u32 lane = hk::lane_id();
#pragma unroll
        for (int first = 0; first < kRows; first += kTile) {
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                const u32 row = own_of_block(r) - first;
                if (row >= kTile || !kHasKeys) continue;
#pragma unroll
                for (int step = 0; step < a_.kSteps; ++step) {
                    constexpr int kStepsOfPart = 128 / kFragBytes;
                    Vec<u32, 4> chunk;
#pragma unroll
                    for (int i = 0; i < 4; ++i) chunk[i] = a_.frag[step][r * 4 + i];
                    const u32 at = step % kStepsOfPart * hk::kLaneGroups<kDim> + hk::group_of_lane<kDim>(lane);
                    auto &part = lds_.first[0][step / kStepsOfPart];
                    part.chunk[part.place(row, at)] = chunk;
                }
            }
            hk::block_barrier();
#pragma unroll
            for (int c = 0; c < kOwnCols; ++c) {
#pragma unroll
                for (int f = 0; f < kTile / kDqFragRows; ++f) {
                    u32 own_col = first_col() + c * kDqDim;
                    if (kOwnCols * kColShares > kDqCols && own_col >= kDqk) own_col = 0;
                    hk::Frag &frag = k_columns_[c][first / kDqFragRows + f];
                    if constexpr (sizeof(T) == 2 && hk::kHasReadTr) {
#pragma unroll
                        for (u32 half = 0; half < 2; ++half) {
                            const u32 row = f * kDqFragRows + DqPlaces::n(lane, 4 * half) + lane % 16 / 4;
                            const u32 col = own_col + lane % kDqDim / 16 * 16 + lane % 4 * 4;
                            const auto &part = lds_.first[0][col / kPartCols];
                            const auto *at = reinterpret_cast<const Vec<short, 4> *>(
                                                 part.chunk + part.place(row, col % kPartCols / kVec)) +
                                             col / 4 % 2;
                            const auto four = __builtin_bit_cast(Vec<u32, 2>, hk::detail::read_transposed(at));
                            frag[2 * half] = four[0], frag[2 * half + 1] = four[1];
                        }
                        continue;
                    }
                    frag = hk::joined(hk::per_row([&](u32 r) {
                        const u32 col = own_col + hk::row_of_lane<kDqDim>(lane, r);
                        Vec<T, kVec> v;
#pragma unroll
                        for (u32 i = 0; i < kVec; ++i) {
                            const u32 key = f * kDqFragRows + dq_key(lane, i);
                            v[i] = lds_.first[0][col / kPartCols].template get<T>(key, col % kPartCols * sizeof(T));
                        }
                        return __builtin_bit_cast(Vec<u32, 4>, v);
                    }));
                }
            }
            hk::block_barrier();
        }
    }
    // Of AMD targets, 16 bits: the halves of a chunk change places in every other 8 rows, so that writes of 8 bytes, a column of 16 rows at a
    // time on 32 banks, have no bank conflicts; of 64 banks again in every other 16, for reads of 32 rows at a time. Others read whole chunks.
    static constexpr bool kSwapped = sizeof(T) == 2 && !hk::kHasLdmatrix;
    HK_FN static u32 swapped(u32 key) {
        const u32 of_reads = hk::kHasReadTr ? key / 16 : 0;
        return kSwapped ? (key / 8 + of_reads) % 2 * 8 : 0;
    }

    /// Key i of the lane's fragments of ds. Of dwords, lanes 0-15 and 16-31 have rows whose swizzles differ by 4.
    HK_FN static u32 dq_key(u32 lane, u32 i) {
        if constexpr (kSwapped && !hk::kHasReadTr && kOwnRows == 2 && kDqDim == 16)
            return i % 2 + lane / 16 % 2 * 2 + i / 2 % 2 * 4 + lane / 32 * 8 + i / 4 * 16;
        return DqPlaces::n(lane, i / 4 * 4 * kLaneRows + i % 4);
    }
    /// Fragments of the wave's rows of the tile, over the keys of fragment f.
    HK_FN void ds_frags(int f, hk::Frag (&frags)[kOwnRows]) const {
        const u32 lane = hk::lane_id(), first = f * kDqFragRows;
        if constexpr (!kSwapped) {
            hk::Frag all[kPartCols / kDqDim];
            if constexpr (sizeof(T) == 4)
                element_frags(lds_.ds, first, all);
            else
                lds_.ds.template column_frags<kDqDim, true>(first, all);
#pragma unroll
            for (int i = 0; i < kOwnRows; ++i) {
                frags[i] = all[i];
                if (kRowShares == 2 && dq_rows_ != 0) frags[i] = all[i + kOwnRows];
            }
        } else if constexpr (hk::kHasReadTr) {
            using Four = Vec<short, 4>;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                // Swizzles repeat every 16 rows.
                const u32 key = DqPlaces::n(lane, 4 * half) + lane % 16 / 4;
#pragma unroll
                for (u32 i = 0; i < kOwnRows; ++i) {
                    const u32 col = dq_rows_ + i * kDqDim + lane % kDqDim / 16 * 16 + lane % 4 * 4;
                    const u32 byte = lds_.ds.place(key, col / 8) * 16 + (col / 4 % 2 * 8 ^ swapped(key));
                    const auto *of_frag = reinterpret_cast<const u8 *>(lds_.ds.chunk) + first * 128;
                    const auto *at = reinterpret_cast<const Four *>(of_frag + (byte ^ swapped(first)));
                    const auto four = __builtin_bit_cast(Vec<u32, 2>, hk::detail::read_transposed(at));
                    frags[i][2 * half] = four[0], frags[i][2 * half + 1] = four[1];
                }
            }
        } else {
            // A lane has consecutive columns, one of each operand.
            using Columns = Vec<u32, kOwnRows / 2>;
            Columns of_key[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 key = dq_key(lane, i), byte = dq_rows_ * 2 + lane % kDqDim * sizeof(Columns);
                of_key[i] = lds_.ds.template get<Columns>(first + key, byte ^ swapped(first + key));
            }
#pragma unroll
            for (u32 j = 0; j < kOwnRows; ++j) {
                const hk::detail::SelectHalf half(j % 2 != 0);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) frags[j][i] = half(of_key[2 * i][j / 2], of_key[2 * i + 1][j / 2]);
            }
        }
    }
    /// The row of the tile that row n of the fragments is.
    HK_FN static u32 dq_row(u32 n) {
        if constexpr (sizeof(T) == 4) return n;
        if constexpr (kSwapped && !hk::kHasReadTr) {
            constexpr u32 kShare = kOwnRows * kDqDim;
            return n / kShare * kShare + n % kDqDim * kOwnRows + n % kShare / kDqDim;
        }
        return L::Part::template column<kDqDim>(n);
    }
    /// Adds the share of the block's keys to the gradients of a tile of queries.
    HK_FN void add_queries(u32 tile, const Turns &turns) const {
        typename DqMma::Acc sums[kOwnCols][kOwnRows] = {};
#pragma unroll
        for (int f = 0; f < kRows / kDqFragRows; f += DqMma::kFrags) {
            hk::Frag ds[kOwnRows][DqMma::kFrags];
#pragma unroll
            for (int e = 0; e < DqMma::kFrags; ++e) {
                hk::Frag of_step[kOwnRows];
                ds_frags(f + e, of_step);
#pragma unroll
                for (int i = 0; i < kOwnRows; ++i) ds[i][e] = of_step[i];
            }
#pragma unroll
            for (int c = 0; c < kOwnCols; ++c) {
#pragma unroll
                for (int i = 0; i < kOwnRows; ++i) sums[c][i] = DqMma::mma(ds[i], &k_columns_[c][f], sums[c][i]);
            }
        }
        turns.wait(tile);
        const u32 lane = hk::lane_id(), stride = dq_row_floats(params()), dqk = params().all.dqk;
        const u64 of_tile = turns.sums(tile);
#pragma unroll
        for (int c = 0; c < kOwnCols; ++c) {
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                const u32 first = first_col() + c * kDqDim, own = hk::row_of_lane<kDqDim>(lane, r);
                if (first + own >= dqk) continue;
                u32 of_lane = (dq_row(DqPlaces::n(lane, 0)) * stride + first + own) * u32(sizeof(float));
#pragma unroll
                for (int e = 0; e < kOwnRows * DqPlaces::kElements; ++e) {
                    if (e / hk::kMmaRows % kLaneRows != r) continue;
                    const u32 n = row_share() * (kOwnRows * kDqDim) + e / DqPlaces::kElements * kDqDim +
                                  DqPlaces::n(0, e % DqPlaces::kElements);
                    hk::opaque(of_lane);  // else sums of it and scalar addresses are kept, of 64 bits each
                    const u64 from = of_tile + u64(dq_row(n) * stride) * sizeof(float);
                    hk::atomic_add(reinterpret_cast<GlobalPtr<float>>(from + of_lane),
                                   sums[c][e / DqPlaces::kElements][e % DqPlaces::kElements]);
                }
            }
        }
    }

    /// Of `n` moving rows from `first` on and `n_own` of the block's from `own` on; kProducts: all keys see all queries.
    HK_FN Form form_of(u32 first, u32 n, u32 own, u32 n_own, u32 to) const {
        const attention::Params &p = params().all;
        const auto &of = p.scores;
        if (kHstu || of.softcap != 0.0f || of.alibi || of.dropout || !(of.scale > 0.0f)) return Form::kGeneral;
        const u32 row = kOfKeys ? first : own, rows = kOfKeys ? n : n_own;
        const u32 key = kOfKeys ? own : first, keys = kOfKeys ? n_own : n;
        if (first + n > to || key + keys > work_.fresh || row + rows > work_.q_len * p.group) return Form::kMasked;
        const auto query = [&](u32 row) { return hk::DivMod(row, p.group, p.group_inverse).quotient; };
        const bool all = key_range(p, work_, query(row)).last >= i32(key + keys - 1) &&
                         key_range(p, work_, query(row + rows - 1)).first <= i32(key);
        return all ? Form::kProducts : Form::kMasked;
    }

    /// Adds products of `kStep` moving rows and the wave's own, over columns.
    template <int kD>
    HK_FN void multiply(Scores &scores, const typename L::Part *tile, const Columns<kD> &own, u32 row) const {
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
    HK_FN static void element_frags(const auto &tile, u32 row, hk::Frag (&frags)[kPartCols / kDim]) {
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

    HK_FN void step(Form form, u32 first, u32 to, u32 i, u32 at) {
        u32 visible[kLaneRows];
        if (form != Form::kProducts) {
            u32 any = 0;
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) any |= visible[r] = visible_rows(first + i, to, r);
            if (hk::ballot(any != 0) == 0) {
                if constexpr (kDq) put_ds(Operand{}, i);
                return;
            }
        }
        Operand probs, ds;
        {
            Scores s, d;
            u32 kept = ~0u;
            if (!kHstu && params().all.scores.dropout) kept = kept_scores(first + i, i, at);
            const bool plain = form != Form::kGeneral;
            if constexpr (kOfKeys) begin(s, plain ? lds_.queries[at].from_lse : lds_.zeros, i);
            multiply<kDqk>(s, lds_.first[0], a_, i);
            if constexpr (kOfKeys) begin(d, plain ? lds_.queries[at].from_delta : lds_.zeros, i);
            multiply<kDv>(d, lds_.second, b_, i);
            if (plain)
                gradients(s, d, form == Form::kMasked, visible, probs, ds);
            else
                general_gradients(s, d, kept, visible, first + i, i, at, probs, ds);
        }
        if constexpr (kDq) put_ds(ds, i);
        if constexpr (kDqk + kDv > 256) hk::sched_barrier();  // fewer registers
        add<kDqk>(da_, lds_.first[0], ds, i);
        if constexpr (kOfKeys) add<kDv>(db_, lds_.second, probs, i);
    }

    /// Accumulators that begin with a number for each moving row.
    HK_FN void begin(Scores &sums, const float *numbers, u32 row) const {
        if constexpr (kBroadcasts) {
            const float *of_lane = numbers + row + moving_row(hk::lane_id() % 8 * 2);
            return begin_in_pairs(sums, *reinterpret_cast<const Vec<float, 2> *>(of_lane),
                                  __make_integer_seq<Pairs, u32, kScores / 2>{});
        }
#pragma unroll
        for (int e = 0; e < kScores; e += hk::kMmaRows) {
            const auto four = *reinterpret_cast<const Vec<float, hk::kMmaRows> *>(numbers + row + moving_row(e));
#pragma unroll
            for (int j = 0; j < hk::kMmaRows; ++j) score(sums, e + j) = four[j];
        }
    }
    template <class U, U... n>
    struct Pairs {};
    template <u32... n>
    HK_FN static void begin_in_pairs(Scores &sums, Vec<float, 2> pairs, Pairs<u32, n...>) {
        const auto put = [&](u32 i, Vec<float, 2> pair) {
            score(sums, 2 * i) = pair[0], score(sums, 2 * i + 1) = pair[1];
        };
        (put(n, hk::row_broadcast<n>(pairs)), ...);
    }
    static constexpr int kScores = kStep / kDim * Places::kElements;  // of a lane
    HK_FN static auto &score(auto &tile, int e) {
        return reinterpret_cast<float *>(&tile.acc[0][e / Places::kElements])[e % Places::kElements];
    }
    /// The moving row of the lane's score e.
    HK_FN static u32 moving_row(u32 e) {
        return Places::n(hk::lane_id(), e % Places::kElements) + e / Places::kElements * kDim;
    }
    /// The moving rows, of kStep from `first` on, that the lane's own row sees: bit `moving_row(e) - moving_row(0)` for score e.
    HK_FN u32 visible_rows(u32 first, u32 to, int r) const {
        const attention::Params &p = params().all;
        i32 begin, end;
        if constexpr (kOfKeys) {
            constexpr i32 kUnbounded = 1 << 29;
            const i32 key = i32(key_[r]) - behind(), queries = i32(work_.q_len);
            const auto rows = [&](i32 query) {
                return (query < 0 ? 0 : query < queries ? query : queries) * i32(p.group);
            };
            begin = p.scores.right >= kUnbounded ? 0 : rows(key - p.scores.right);
            end = p.scores.left >= kUnbounded ? queries * i32(p.group) : rows(key + p.scores.left + 1);
            if (kHstu) begin = 0, end = i32(to);
            if (end > i32(to)) end = i32(to);
            if (key_[r] == ~0u) end = 0;
        } else {
            begin = query_[r].first, end = query_[r].last + 1;
        }
        begin -= i32(first), end -= i32(first);
        const u32 from = begin <= 0 ? ~0u : begin < 32 ? ~0u << begin : 0;
        const u32 below = end <= 0 ? 0 : end < 32 ? ~(~0u << end) : ~0u;
        return (from & below) >> moving_row(0);
    }

    /// ds of the wave's keys, for the products of queries.
    HK_FN void put_ds(const Operand &ds, u32 row) {
#pragma unroll
        for (int f = 0; f < Operand::kFrags; ++f) {
#pragma unroll
            for (int e = 0; e < kVec; e += hk::kMmaRows) {
#pragma unroll
                for (int r = 0; r < kLaneRows; ++r) {
                    const int at = (f * kVec + e) * kLaneRows + r * hk::kMmaRows;
                    const u32 n =
                        row + Places::n(hk::lane_id(), at % Places::kElements) + at / Places::kElements * kDim;
                    const u32 key = own_of_block(r);
                    Vec<u32, sizeof(T)> four;
#pragma unroll
                    for (u32 w = 0; w < sizeof(T); ++w) four[w] = ds.frag[f][r * 4 + e * sizeof(T) / 4 + w];
                    lds_.ds.put(key, n * u32(sizeof(T)) ^ swapped(key), four);
                }
            }
        }
    }

    /// What put_ds has put for the lane.
    HK_FN Operand get_ds(u32 row) const {
        static_assert(!kPairs || kVec == 2 * hk::kMmaRows, "two runs of rows a fragment");
        Operand ds;
        const u32 key = own_of_block(0);
#pragma unroll
        for (int f = 0; f < Operand::kFrags; ++f) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 n = row + Places::n(hk::lane_id(), f * kVec + half * hk::kMmaRows);
                const auto four = lds_.ds.template get<Vec<u32, 2>>(key, n * u32(sizeof(T)) ^ swapped(key));
                ds.frag[f][2 * half] = four[0], ds.frag[f][2 * half + 1] = four[1];
            }
        }
        return ds;
    }

    /// p and ds of scores that are products.
    HK_FN void gradients(Scores &s, Scores &d, bool masked, const Visible &visible, Operand &probs, Operand &ds) const {
        const float scale = params().all.scores.scale * kLog2E;
        constexpr int kPacked = kDq ? 2 : 1;  // without dq a VGPR spills on gfx942
#pragma unroll
        for (int e = 0; e < kScores; e += kPacked) {
            Vec<float, kPacked> x, y;
#pragma unroll
            for (int i = 0; i < kPacked; ++i) x[i] = score(s, e + i), y[i] = score(d, e + i);
            x *= scale;
            if constexpr (!kOfKeys) {
                const Query &query = query_[e / hk::kMmaRows % kLaneRows];
                x -= query.lse, y -= query.delta;
            }
#pragma unroll
            for (int i = 0; i < kPacked; ++i) x[i] = hk::exp2_fast(x[i]);
            y *= x;
#pragma unroll
            for (int i = 0; i < kPacked; ++i) score(s, e + i) = x[i], score(d, e + i) = y[i];
        }
        if (masked) {
            mask(s, d, visible);
            round(s, d, probs, ds);
        } else {
            round(s, d, probs, ds);
        }
    }
    /// The same of all others; `first` is the moving row of the step's first, `i` its place in the tile.
    HK_FN void general_gradients(Scores &s, Scores &d, u32 kept, const Visible &visible, u32 first, u32 i, u32 at,
                                 Operand &probs, Operand &ds) const {
        const attention::Params &p = params().all;
        const auto &of = p.scores;
        if constexpr (kHstu) {
            each_score([&](int e) {
                const u32 n = moving_row(e);
                const u32 query = kOfKeys ? lds_.queries[at].index[i + n] : query_[e / hk::kMmaRows % kLaneRows].index;
                const u32 key = kOfKeys ? key_[e / hk::kMmaRows % kLaneRows] : first + n;
                const float x = score(s, e) * of.scale, f = hk::sigmoid(x);
                const bool sees = mask_.sees(i32(query), i32(key));
                score(s, e) = sees ? x * f : 0.0f;
                score(d, e) = sees ? score(d, e) * f * (1.0f + x * (1.0f - f)) : 0.0f;
            });
        } else {
            if (of.dropout) {
                each_score([&](int e) { score(d, e) *= kept >> e & 1 ? of.kept : 0.0f; });
            }
            each_score([&](int e) { score(d, e) -= query_delta(e, i, at); });
            probabilities(s, d, first, i, at);
            each_score([&](int e) { score(d, e) *= score(s, e); });
            if (of.dropout) each_score([&](int e) { score(s, e) *= kept >> e & 1 ? of.kept : 0.0f; });
        }
        mask(s, d, visible);
        round(s, d, probs, ds);
    }
    /// Products to probabilities; `d` is multiplied by the slope of the softcap.
    HK_FN void probabilities(Scores &s, Scores &d, u32 first, u32 i, u32 at) const {
        const attention::Params &p = params().all;
        const auto &of = p.scores;
        const float softcap = of.softcap, inverse = softcap != 0.0f ? 1.0f / softcap : 0.0f;
        each_score([&](int e) { score(s, e) *= of.scale; });
        if (softcap != 0.0f) {
            each_score([&](int e) {
                const float t = hk::tanh(score(s, e) * inverse);
                score(s, e) = softcap * t, score(d, e) *= 1.0f - t * t;
            });
        }
        if (of.alibi) {
            const i32 off = behind();
#pragma unroll
            for (int e = 0; e < kScores; ++e) {
                const u32 n = moving_row(e);
                const Query &own = query_[e / hk::kMmaRows % kLaneRows];
                const u32 index = kOfKeys ? lds_.queries[at].index[i + n] : own.index;
                const u32 key = kOfKeys ? key_[e / hk::kMmaRows % kLaneRows] : first + n;
                const float slope = kOfKeys ? lds_.queries[at].slope[i + n] : own.slope;
                score(s, e) -= slope * __builtin_fabsf(float(i32(index) + off - i32(key)));
            }
        }
        each_score([&](int e) {
            const float lse =
                kOfKeys ? lds_.queries[at].lse[i + moving_row(e)] : query_[e / hk::kMmaRows % kLaneRows].lse;
            score(s, e) = hk::exp2_fast(__builtin_fmaf(score(s, e), kLog2E, -lse));
        });
    }
    HK_FN float query_delta(int e, u32 i, u32 at) const {
        return kOfKeys ? -lds_.queries[at].from_delta[i + moving_row(e)] : query_[e / hk::kMmaRows % kLaneRows].delta;
    }
    /// `f(e)` for the lane's scores.
    HK_FN static void each_score(auto f) {
#pragma unroll
        for (int e = 0; e < kScores; ++e) {
            if (kPairs && e % 4 == 0) hk::sched_barrier();  // fewer registers
            f(e);
        }
    }
    HK_FN static void mask(Scores &s, Scores &d, const Visible &visible) { mask(s, visible), mask(d, visible); }
    HK_FN static void mask(Scores &s, const Visible &visible) {
        each_score([&](int e) {
            const u32 bit = Places::n(0, e % Places::kElements) + e / Places::kElements * kDim;
            const i32 all = i32(visible[e / hk::kMmaRows % kLaneRows] << (31 - bit)) >> 31;
            score(s, e) = __builtin_bit_cast(float, __builtin_bit_cast(i32, score(s, e)) & all);
        });
    }
    HK_FN static void round(const Scores &s, const Scores &d, Operand &probs, Operand &ds) {
        ds = rounded(d);
        if constexpr (kOfKeys) probs = rounded(s);
    }
    /// NaN have no low bits, so that ties may go away from 0; the signs of zeros do not matter.
    HK_FN static Operand rounded(const Scores &tile) {
        constexpr bool kHalvesUp = __is_same(T, hk::bf16) && !hk::kHasCvtBf16;
        if constexpr (!kHalvesUp && !__is_same(T, hk::f16)) return tile.template as_operand<T>(0);
        if constexpr (__is_same(T, hk::f16)) return tile.template as_operand<T, true>(0);
        Operand operand;
#pragma unroll
        for (int e = 0; e < kScores; e += 2) {
            const auto up = [&](int i) {
                const float v = tile.acc[0][i / Places::kElements][i % Places::kElements];
                return __builtin_bit_cast(u32, v) + 0x8000u;
            };
            operand.frag[e / kVec][e % kVec / 2] = hk::detail::high_halves(up(e), up(e + 1));
        }
        return operand;
    }

    /// Which of the lane's scores dropout keeps: bit e. `first` is the moving row of the step's first, `i` its place in the tile.
    HK_FN u32 kept_scores(u32 first, u32 i, u32 at) const {
        const attention::Params &p = params().all;
        const auto &of = p.scores;
        const u64 of_row = (of.longest_k + 3) / 4;
        u32 bits = 0;
#pragma unroll 1
        for (u32 e = 0; e < kScores; e += kOfKeys ? 1 : hk::kMmaRows) {
            const u32 n = moving_row(e);
            u32 index, head, key;
            if constexpr (kOfKeys) {
                index = lds_.queries[at].index[i + n], head = lds_.queries[at].head[i + n];
                key = kLaneRows == 2 && e / hk::kMmaRows % 2 ? key_[kLaneRows - 1] : key_[0];
            } else {
                const Query &query = kLaneRows == 2 && e / hk::kMmaRows % 2 ? query_[kLaneRows - 1] : query_[0];
                index = query.index, head = query.head, key = first + n;
            }
            const u64 row = (u64(work_.sequence) * p.heads + head) * of.longest_q + index;
            const u64 counter = of.offset + row * of_row + key / 4;
            const auto words = hk::philox({u32(counter), u32(counter >> 32), 0, 0}, of.seed);
            if constexpr (kOfKeys) {
                bits |= u32(word_of(words, key) >> 8 >= of.dropout) << e;
            } else {
#pragma unroll
                for (u32 j = 0; j < hk::kMmaRows; ++j) bits |= u32(words[j] >> 8 >= of.dropout) << (e + j);
            }
        }
        return bits;
    }
    template <class Words>
    HK_FN static u32 word_of(const Words &words, u32 key) {
        u32 word = words[0];
#pragma unroll
        for (u32 j = 1; j < 4; ++j) word = key % 4 == j ? words[j] : word;
        return word;
    }

    /// The row of dk or dv of the lane's key r.
    HK_FN u64 key_row(const HeadRows &rows, int r) const {
        const bool packed = params().all.sequences.k_starts != 0;
        const i64 row = i64(work_.k_start) + key_[r];
        return rows.data +
               u64((packed ? 0 : i64(work_.sequence) * rows.batch) + row * rows.row + i64(work_.kv_head) * rows.head);
    }
    template <bool kValues>
    HK_FN void store_of_pair() const {
        const Params &p = params();
        if (key_[0] == ~0u) return;
        if constexpr (kValues)
            store_row(da_.acc[0], 0, key_row(p.dv, 0), p.all.dv, 1.0f, p.keys_vectorized);
        else
            store_row(da_.acc[0], 0, key_row(p.dk, 0), p.all.dqk, p.all.scores.scale, p.keys_vectorized);
    }
    HK_FN void store() const {
        const Params &p = params();
        const float values = kHstu ? p.all.hstu.inverse_longest : 1.0f, scale = p.all.scores.scale * values;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            if constexpr (kOfKeys) {
                if (key_[r] == ~0u) continue;
                store_row(da_.acc[0], r, key_row(p.dk, r), p.all.dqk, scale, p.keys_vectorized);
                store_row(db_.acc[0], r, key_row(p.dv, r), p.all.dv, values, p.keys_vectorized);
            } else {
                const Query &query = query_[r];
                if (own_row(r) >= work_.q_len * p.all.group) continue;
                store_row(da_.acc[0], r, row_address(p.dq, work_, packed_, query.index, query.head), p.all.dqk, scale,
                          p.dq_vectorized);
            }
        }
    }
    template <int kTiles>
    HK_FN void store_row(const typename Mma::Acc (&sums)[kTiles], int r, u64 row, u32 width, float scale,
                         u32 vectorized) const {
        const auto to = reinterpret_cast<GlobalPtr<T>>(row);
        const float factor = work_.poison ? __builtin_nanf("") : scale;
        // MMA tiles whose columns alternate.
        constexpr int kTurns = sizeof(T) == 2 && !hk::kHasReadTr ? 64 / kDim : 1, kRun = hk::kMmaRows * kTurns;
        if (kLaneRows == 1 && vectorized) {
#pragma unroll
            for (int t = 0; t < kTiles; t += kTurns) {
#pragma unroll
                for (int e = 0; e < Places::kElements; e += hk::kMmaRows) {
                    Vec<float, kRun> run;
#pragma unroll
                    for (int i = 0; i < kRun; ++i) run[i] = sums[t + i % kTurns][e + i / kTurns] * factor;
                    const auto rounded = hk::narrow<T, kRun>(run);
                    const u32 col = column(t * Places::kElements + e);
                    constexpr int kStore = kRun < kVec ? kRun : kVec;
#pragma unroll
                    for (int i = 0; i < kRun; i += kStore) {
                        Vec<T, kStore> part;
#pragma unroll
                        for (int j = 0; j < kStore; ++j) part[j] = rounded[i + j];
                        if (col + i < width) *reinterpret_cast<GlobalPtr<Vec<T, kStore>>>(to + col + i) = part;
                    }
                }
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kTiles * Places::kElements; ++i) {
            if (i / hk::kMmaRows % kLaneRows != r) continue;
            const u32 col = column(i);
            const Vec<float, 1> y = sums[i / Places::kElements][i % Places::kElements] * factor;
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

/// The block's LDS, for passes of either walk.
template <class T, int kDqk, int kDv, bool kHstu, bool kDq, class P>
HK_FN auto &block_lds() {
    using L = Lds<T, kDqk, kDv, kHstu, kDq>;
    if constexpr (P::kWarpgroups) {
        static_assert(sizeof(L) <= sizeof(typename WarpgroupWalk<P>::Lds));
        return reinterpret_cast<L &>(hk::block_lds<typename WarpgroupWalk<P>::Lds>());
    } else {
        return hk::block_lds<L>();
    }
}

template <class T, int kDqk, int kDv, bool kHstu = false>
HK_FN void backward(const Params &p) {
    using Keys = Pass<T, kDqk, kDv, true, kHstu>;
    auto &lds = block_lds<T, kDqk, kDv, kHstu, false, Keys>();
    Work work;
    if (hk::block_x() < p.key_blocks) {
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

/// Blocks of keys; those of a sequence and key head in ascending order of their tickets.
template <class T, int kDqk, int kDv>
HK_FN void backward_fused(const Params &p) {
    using Keys = Pass<T, kDqk, kDv, true, false, true>;
    auto &lds = block_lds<T, kDqk, kDv, false, true, Keys>();
    u32 ticket = hk::block_x();
    if (p.ordered) {
        if (hk::thread_x() == 0)
            lds.ticket = __scoped_atomic_fetch_add(reinterpret_cast<GlobalPtr<u32>>(p.turns), 1u, __ATOMIC_RELAXED,
                                                   __MEMORY_SCOPE_DEVICE);
        hk::block_barrier();
        ticket = hk::uniform(lds.ticket);
    }
    Work work;
    const u32 task = ticket % p.all.kv_heads * p.by_keys.tiles + ticket / p.all.kv_heads;
    if (!find_key_work<Keys::kRows>(p, task, work)) return;
    Keys(p, work, lds).run();
}

template <u32 kVectors>
struct Batch {};

/// Rounds the sums of a tile of queries.
template <class T, int kTile>
HK_FN void round_queries(const Params &p) {
    Work work;
    if (!find_work<kTile>(p.all, hk::block_x(), work)) return;
    find_keys(p.all, work);
    constexpr u32 kLanes = 8, kCols = 4 * kLanes;  // lanes of a row have four columns each of kCols
    const u32 floats = dq_row_floats(p), rows = work.q_len * p.all.group;
    const auto sums = reinterpret_cast<GlobalPtr<const float>>(p.dq_sums) +
                      (first_dq_tile<kTile>(p, work) + work.first / kTile) * kTile * floats;
    const bool packed = p.all.sequences.q_starts != 0;
    const bool of_warpgroups =
        kWarpgroupsOf<T, 64, 64> && kTile == 64 && p.all.dqk <= 128 && p.all.dv <= 128 && takes_warpgroups(p);
    const auto load = [&](u32 row, u32 col) {
        if (!of_warpgroups) return *reinterpret_cast<GlobalPtr<const Vec<float, 4>>>(sums + row * floats + col);
        // As WarpgroupWalk::put_queries has them.
        const u32 thread = row / 16 * 32 + (row % 16 / 4 * 2 + row % 2) * 4 + col % 8 / 2;
        const auto at = sums + col / 8 * (kTile * 8) + thread * 4 + row / 2 % 2 * 2;
        const auto pair = [&](u32 i) { return *reinterpret_cast<GlobalPtr<const Vec<float, 2>>>(at + i * 4); };
        const Vec<float, 2> low = pair(0), high = pair(1);
        return Vec<float, 4>{low[0], low[1], high[0], high[1]};
    };
    const float scale = work.poison ? __builtin_nanf("") : p.all.scores.scale;
    const u32 of_lane = hk::thread_x() % kLanes * 4, dqk = p.all.dqk;
    // Whole vectors, kBatch of them in flight.
    const auto round_row = [&]<u32 kBatch>(u32 row, GlobalPtr<T> to, Batch<kBatch>) {
        for (u32 first = 0; first < dqk; first += kBatch * kCols) {
            Vec<float, 4> y[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) y[i] = load(row, first + of_lane + i * kCols);
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                *reinterpret_cast<GlobalPtr<Vec<T, 4>>>(to + (first + of_lane + i * kCols)) =
                    hk::narrow<T, 4>(y[i] * scale);
        }
    };
    for (u32 row = hk::thread_x() / kLanes; row < u32(kTile); row += kThreads / kLanes) {
        if (work.first + row >= rows) return;
        const hk::DivMod at(work.first + row, p.all.group, p.all.group_inverse);
        const u32 head = work.kv_head * p.all.group + at.remainder;
        const auto to = reinterpret_cast<GlobalPtr<T>>(row_address(p.dq, work, packed, at.quotient, head));
        if (p.dq_vectorized && dqk % (4 * kCols) == 0) {
            round_row(row, to, Batch<4>{});
        } else if (p.dq_vectorized && dqk % (2 * kCols) == 0) {
            round_row(row, to, Batch<2>{});
        } else {
            for (u32 col = of_lane; col < dqk; col += kCols) {
                const auto rounded = hk::narrow<T, 4>(load(row, col) * scale);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    if (col + j < dqk) to[col + j] = rounded[j];
                }
            }
        }
    }
}

}  // namespace backward

#include "backward_warpgroup.h"
