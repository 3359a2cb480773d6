// topk.hip: the k first columns of each row, by value (largest or smallest), then by index; k <= 64
//   x        [rows, cols]  T = bf16 | f16 | f32   unit stride on cols, rows any stride
//   values   [rows, k]     T                      the bits that x has
//   indices  [rows, k]     i32 | i64
//   from, to [rows, ..]    ranks (hk/select.h), for split rows, see below
// The order is that of hk/select.h. Every result is exact, so the split does not change it.
//
// How the work is split
//   lists    k <= 8, cols <= 256. Lanes of a row sort their columns in registers and keep the first eight; a butterfly
//            merges the lists. 8 or 16 lanes per row, so 8 or 4 rows per wave (8 columns per lane, 16 for 256).
//   wave     cols <= 1024: a wave holds a row. It finds a bound that k elements and few others reach, writes their columns to
//            LDS, reads them back one or two per lane and sorts them.
//   block    cols <= 16384: each wave of a block does so with its share of the row, then the first with the candidates of all.
//   tiles    longer rows, and rows beyond 1024 columns if there is one for every wave of the device: a wave walks its row,
//            or a segment of 4096 to 65536 columns, 1024 at a time. Columns whose elements precede the running k-th one go
//            to a list in LDS; when it is full, its first k stay. Ranks of segments go to the workspace, and merge selects
//            from them.
// Floor
//   Memory: rows * cols * sizeof(T) + rows * k * (sizeof(T) + 4 or 8). The values are read again by index, from cache.
//   Vector instructions of a wave at 1024 columns of normal values and k = 32, counted: bf16 240, f32 299. Keys take 2.5
//   and 3 per element, the bound 0.5 and one for each bit tried, comparison with it 2 per element, the scan 8, sorting 45 and
//   100. Sorting rows within lanes first would take 120 for 16 elements of a lane before any exchange; k reductions 16 each,
//   with as many selects. Sorted rows raise the bound more often: at most 623 and 751. Walking tiles takes 110 for 1024 columns
//   of a bf16 row of 65536: keys, the largest of each eight, and ever more rarely comparison with the bound and sorting.
#include <hk/block.h>
#include <hk/reg.h>
#include <hk/rows.h>

#include "topk.h"

namespace {
using namespace topk;
using hk::Access;
using hk::kWaveSize;

/// Results, at most.
constexpr int kResults = 64;
/// Elements that a wave sorts after the selection, at most.
constexpr u32 kSlots = 2 * kResults;

/// Ranks fit 32 bits.
template <class T>
constexpr bool kShort = sizeof(T) == 2;

/// Rows of at most Lanes * ColsPerLane columns, k <= 8.
template <Access kAccess, class T, int Lanes, int ColsPerLane>
HK_FN void lists(const Params &p) {
    using Rank = hk::RankOf<T>;
    constexpr int kVec = hk::kVecLen<T> < ColsPerLane ? hk::kVecLen<T> : ColsPerLane;
    using RowT = hk::Row<T, Lanes, kVec, ColsPerLane / kVec>;
    const u32 side = hk::thread_x() / Lanes;
    const u32 lane = hk::thread_x() % Lanes;
    const u32 cols = p.x.cols();
    hk::for_row_batches<false>(p.x.rows(), cols, lane * kVec, p.batch, [&](const hk::RowBatch &batch) {
        const RowT x = RowT::load(batch.at<T, kAccess, false>(p.x, side));
        Rank rank[ColsPerLane];
#pragma unroll
        for (int e = 0; e < ColsPerLane; ++e) {
            const u32 column = (e / kVec * Lanes + lane) * kVec + e % kVec;
            const u32 key = hk::order_key<T>(x.chunk[e / kVec][e % kVec], p.smallest);
            if constexpr (kShort<T>)
                rank[e] = column < cols ? hk::ranked16(key, column) : 0;
            else
                rank[e] = column < cols ? hk::ranked(key, column) : 0;
        }
#pragma unroll
        for (int e = 0; e < ColsPerLane; e += 8) hk::sort8(rank + e);
#pragma unroll
        for (int e = 8; e < ColsPerLane; e += 8) hk::merge8(rank, [&](int i) { return rank[e + i]; });
        // Merged groups have the same list in all their lanes, so reversing a larger group equals swapping its halves.
        hk::merge8(rank, [&](int i) { return hk::shuffle_xor<1>(rank[i]); });
        hk::merge8(rank, [&](int i) { return hk::shuffle_xor<2>(rank[i]); });
        if constexpr (Lanes > 4) hk::merge8(rank, [&](int i) { return hk::shuffle_xor<7>(rank[i]); });
        if constexpr (Lanes > 8) hk::merge8(rank, [&](int i) { return hk::shuffle_xor<15>(rank[i]); });
        Rank mine = rank[0];
#pragma unroll
        for (u32 i = 1; i < 8; ++i) mine = lane == i ? rank[i] : mine;
        if (lane < p.k && side < batch.count) {
            if constexpr (kShort<T>)
                write_result<T>(p, batch.first + side, lane, hk::ranked16_index(mine));
            else
                write_result<T>(p, batch.first + side, lane, hk::ranked_index(mine));
        }
    });
}

/// Elements of a row of x, from column `first` on, `cols` of them: a wave's share, at most Cols.
template <class T, Access kAccess, int Cols>
struct Elements {
    static constexpr int kKeys = Cols / kWaveSize;
    static constexpr int kVec = hk::kVecLen<T> < kKeys ? hk::kVecLen<T> : kKeys;
    using Rank = hk::RankOf<T>;
    using Keys = hk::RoughKeys<T>;

    hk::GlobalPtr<const T> x;
    u32 cols;
    u32 first;  // added to columns for their index
    u32 smallest;

    HK_FN static u32 column(u32 e) { return (e / kVec * kWaveSize + hk::lane_id()) * kVec + e % kVec; }
    HK_FN Keys keys() const { return {smallest}; }

    using RowT = hk::Row<T, kWaveSize, kVec, kKeys / kVec>;

    /// This lane's share of the Cols elements from column `at` on.
    HK_FN RowT fetch(u32 at) const {
        const hk::Window window((hk::GlobalPtr<T>)x, cols * u32(sizeof(T)));
        using Place = hk::Cursor<T, kAccess>;
        return RowT::load(Place{window, (at + hk::lane_id() * kVec) * u32(sizeof(T)), Place::kToEnd});
    }

    /// Their keys, and which of them belong to the row.
    HK_FN u32 make_keys(const RowT &row, u32 at, i32 (&key)[kKeys]) const {
        keys().of(row, key);
        u32 valid = kKeys == 32 ? ~0u : (1u << kKeys) - 1u;
        if (cols - at < u32(Cols)) {
            i32 left = i32(cols - at) - i32(hk::lane_id() * kVec);
            hk::opaque(
                left);  // opaque: or the compiler hoists the comparisons out of the loop over rows, and keeps them in registers
            valid = 0;
#pragma unroll
            for (int e = 0; e < kKeys; ++e) {
                // On the vectorized path, a vector is within the row or beyond it.
                const int ahead = e / kVec * kVec * kWaveSize + (kAccess == Access::Vectorized ? 0 : e % kVec);
                const bool within = ahead < left;
                if (kAccess == Access::Scalar)
                    valid |= u32(within) << e;
                else if (e % kVec == 0)
                    valid |= (within ? (1u << kVec) - 1u : 0u) << e;
                key[e] = within ? key[e] : Keys::kLowest;
            }
        }
        return valid;
    }
    HK_FN u32 load(i32 (&key)[kKeys]) const { return make_keys(fetch(0), 0, key); }

    HK_FN Rank rank(u32 column) const {
        const u32 key = hk::order_key<T>(x[column], smallest);
        if constexpr (kShort<T>)
            return hk::ranked16(key, column);
        else
            return hk::ranked(key, column);
    }
    HK_FN static u32 key_of(Rank rank) {
        if constexpr (kShort<T>)
            return rank & 0xffff0000u;
        else
            return hk::ranked_key(rank);
    }
    HK_FN static u32 column_of(Rank rank) {
        if constexpr (kShort<T>)
            return hk::ranked16_index(rank);
        else
            return hk::ranked_index(rank);
    }
    /// The rank with the index in the whole row.
    HK_FN u64 full(Rank rank) const {
        if constexpr (kShort<T>)
            return hk::ranked(rank & 0xffff0000u, first + hk::ranked16_index(rank));
        else
            return rank - first;
    }
};

/// Ranks in memory, 0 for none; Pointer is to global memory or LDS.
template <class Pointer, int Cols>
struct Ranks {
    static constexpr int kKeys = Cols / kWaveSize;
    static constexpr int kVec = 1;
    using Rank = u64;
    using Keys = hk::ExactKeys;

    Pointer ranks;
    u32 cols;

    HK_FN static u32 column(u32 e) { return e * kWaveSize + hk::lane_id(); }
    HK_FN Keys keys() const { return {}; }

    HK_FN u32 load(i32 (&key)[kKeys]) const {
#pragma unroll
        for (int e = 0; e < kKeys; ++e) {
            const u64 rank = column(e) < cols ? ranks[column(e)] : 0;
            key[e] = i32(hk::ranked_key(rank) ^ 0x80000000u);
        }
        const u32 none = hk::detail::keys_below(key, Keys::kLowest + 1);
        return kKeys == 32 ? ~none : ~none & ((1u << kKeys) - 1u);
    }

    HK_FN Rank rank(u32 column) const { return ranks[column]; }
    HK_FN u64 full(Rank rank) const { return rank; }
};

/// Sorts the `count` elements whose columns `slots` has, up to Regs for each lane: calls `use(place, rank)` for the first
/// k places, with rank 0 for missing elements.
template <int Regs, class Source, class Use>
HK_FN void sort_slots(const Source &source, const u32 *slots, u32 count, u32 k, Use use) {
    typename Source::Rank rank[Regs];
#pragma unroll
    for (int r = 0; r < Regs; ++r) {
        const u32 place = r * kWaveSize + hk::lane_id();
        rank[r] = 0;
        if (place < count) rank[r] = source.rank(slots[place]);
    }
    hk::sort_wave(rank);
    constexpr int kFirst = kResults / kWaveSize;
#pragma unroll
    for (int r = 0; r < (Regs < kFirst ? Regs : kFirst); ++r) {
        const u32 place = r * kWaveSize + hk::lane_id();
        if (place < k) use(place, place < count ? rank[r] : 0);
    }
}

/// Calls `emit(place, rank)` for the k first of a source's elements, in order; rank 0 for missing ones.
template <class Source, class Emit>
HK_FN void select(const Source &source, u32 k, bool pairs, u32 *slots, Emit emit) {
    i32 key[Source::kKeys];
    const u32 valid = source.load(key);
    const bool two = k > u32(kWaveSize) / 2 || pairs;
    const u32 most = two ? kSlots : kSlots / 2;
    const hk::Marked marked = hk::mark_first<Source::kVec>(source.keys(), key, valid, k, most, two);
    hk::wave_barrier();
    const u32 count = marked.total();
    hk::for_marked(marked, [&](u32 place, u32 e) { slots[place] = Source::column(e); });
    hk::wave_barrier();
    const auto use = [&](u32 place, auto rank) { emit(place, rank != 0 ? source.full(rank) : 0); };
    if (two)
        sort_slots<kSlots / kWaveSize>(source, slots, count, k, use);
    else
        sort_slots<kSlots / kWaveSize / 2>(source, slots, count, k, use);
}

/// The same for any number of elements, tile by tile. LDS holds the candidate columns: a tile adds those above the bound, the
/// k-th of all sorted before. A full list is sorted, and its first k stay.
template <class Source, class Emit>
HK_FN void select_tiles(const Source &source, u32 k, u32 *slots, Emit emit) {
    constexpr u32 kTile = Source::kKeys * kWaveSize;
    constexpr int kGroup = 8;
    const u32 most = k > kSlots / 4 ? kSlots : kSlots / 2;
    const bool pairs = k > u32(kWaveSize) / 2 || source.cols < kTile;
    u32 count = 0;
    u32 last = 0;  // order key of the k-th
    i32 bound = Source::Keys::kLowest;
    const auto sort = [&] {
        const auto use = [&](u32 place, auto rank) {
            slots[place] = Source::column_of(rank);
            if (place == k - 1) last = Source::key_of(rank);
        };
        hk::wave_barrier();
        if (count > kSlots / 2)
            sort_slots<kSlots / kWaveSize>(source, slots, count, k, use);
        else
            sort_slots<kSlots / kWaveSize / 2>(source, slots, count, k, use);
        hk::wave_barrier();
        last = hk::broadcast(last, (k - 1) % kWaveSize);
        if (count >= k) bound = source.keys().above(last);
        count = count < k ? count : k;
    };
    auto row = source.fetch(0);
    for (u32 at = 0; at < source.cols; at += kTile) {
        const bool last_tile = source.cols - at <= kTile;
        i32 key[Source::kKeys];
        const u32 valid = source.make_keys(row, at, key);
        row = source.fetch(at + kTile);
        u32 above = valid;
        bool to_sort = last_tile || bound == Source::Keys::kLowest;
        if (bound != Source::Keys::kLowest) {
            above = 0;
#pragma unroll
            for (int e = 0; e < Source::kKeys; e += kGroup) {
                i32 group[kGroup];
                for (int i = 0; i < kGroup; ++i) group[i] = key[e + i];
                i32 best = group[0];
#pragma unroll
                for (int i = 1; i < kGroup; ++i) best = group[i] > best ? group[i] : best;
                if (hk::ballot(best >= bound) != 0) {
                    above |= (~hk::detail::keys_below(group, bound) & ((1u << kGroup) - 1u)) << e;
                }
            }
            above &= valid;
        }
        const u32 lanes = u32(__builtin_popcountll(hk::ballot(above != 0)));
        if (lanes == 0 && !to_sort) continue;
        // Many candidates: only the first k of the tile and few others.
        if (lanes > kWaveSize * 3u / 4) {
            above = hk::mark_first<Source::kVec>(source.keys(), key, above, k, most, pairs).bits;
        }
        for (;;) {
            const u64 found = hk::ballot(above != 0);
            if (found == 0 ? to_sort : count == most) {
                sort();
                if (found == 0) break;
                // Lanes add by element, not by column: what is equal to the k-th may still come before it.
                above &= ~hk::detail::keys_below(key, source.keys().from(last));
                continue;
            }
            if (found == 0) break;
            const u32 place = count + hk::lanes_below(found);
            if (above != 0 && place < most) {
                slots[place] = at + Source::column(u32(__builtin_ctz(above)));
                above &= above - 1;
            }
            count += u32(__builtin_popcountll(found));
            count = count < most ? count : most;
        }
    }
#pragma unroll
    for (int r = 0; r < kResults / kWaveSize; ++r) {
        const u32 place = r * kWaveSize + hk::lane_id();
        if (place < k) emit(place, place < count ? source.full(source.rank(slots[place])) : 0);
    }
}

/// One row per wave.
template <Access kAccess, class T, int Cols>
HK_FN void wave(const Params &p) {
    __shared__ u32 slots[kSlots];
    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        const Elements<T, kAccess, Cols> x = {p.x.row<const T>(row), p.x.cols(), 0, p.smallest};
        select(x, p.k, p.pairs, slots,
               [&](u32 place, u64 rank) { write_result<T>(p, row, place, hk::ranked_index(rank)); });
    }
}

/// This wave's share of a segment: start and length.
struct Part {
    u32 from, cols;

    HK_FN Part(u32 first, u32 end, u32 widest) {
        const u32 before = first + hk::wave_id() * widest;
        from = before < end ? before : end;
        cols = end - from < widest ? end - from : widest;
    }
};

/// The first k of the candidates of a block's waves, to the results, or for a segment to the workspace.
template <class T, int Waves>
HK_FN void gather(const Params &p, u64 row, u32 segment, u64 *found, u32 *slots) {
    hk::block_barrier();
    if (hk::wave_id() == 0) {
        const Ranks<const u64 *, Waves * kResults> ranks = {found, Waves * kResults};
        select(ranks, p.k, true, slots,
               [&](u32 place, u64 rank) { write_rank<T>(p, row, segment * p.k + place, rank); });
    }
    hk::block_barrier();
}

/// One row per block.
template <Access kAccess, class T, int Waves>
HK_FN void block(const Params &p) {
    constexpr u32 kPart = 1024;
    __shared__ u32 slots[Waves][kSlots];
    __shared__ u64 found[Waves * kResults];
    const u32 wave = hk::wave_id();
    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        const Part part(0, p.x.cols(), kPart);
        const Elements<T, kAccess, kPart> x = {p.x.row<const T>(row) + part.from, part.cols, part.from, p.smallest};
        u64 *mine = found + wave * kResults;
        for (u32 i = hk::lane_id(); i < u32(kResults); i += kWaveSize) mine[i] = 0;
        hk::wave_barrier();
        select(x, p.k, part.cols < kPart, slots[wave], [&](u32 place, u64 rank) { mine[place] = rank; });
        gather<T, Waves>(p, row, 0, found, slots[0]);
    }
}

/// A row or segment per wave: up to 65536 columns, the range of ranks.
template <Access kAccess, class T>
HK_FN void tiles(const Params &params) {
    __shared__ u32 slots[kSlots];
    const u64 units = u64(params.x.rows()) * params.segments;
    for (u64 unit = hk::block_x(); unit < units; unit += hk::grid_x()) {
        const Params &p = hk::reload_params(params);  // reloaded: they do not all fit in SGPRs at once
        const u64 row = p.segments == 1 ? unit : unit / p.segments;
        const u32 segment = u32(unit - row * p.segments);
        const u32 first = segment * p.segment;
        const u32 cols = p.x.cols() - first < p.segment ? p.x.cols() - first : p.segment;
        const Elements<T, kAccess, 1024> x = {p.x.row<const T>(row) + first, cols, first, p.smallest};
        select_tiles(x, p.k, slots, [&](u32 place, u64 rank) { write_rank<T>(p, row, segment * p.k + place, rank); });
    }
}

/// Ranks of a row, or a segment of them, per block.
template <class T, int Waves>
HK_FN void merge(const Params &p) {
    constexpr u32 kPart = 1024;
    __shared__ u32 slots[Waves][kSlots];
    __shared__ u64 found[Waves * kResults];
    const u32 wave = hk::wave_id();
    const u64 units = u64(p.x.rows()) * p.segments;
    for (u64 unit = hk::block_x(); unit < units; unit += hk::grid_x()) {
        const u64 row = unit / p.segments;
        const u32 segment = u32(unit - row * p.segments);
        const u32 first = segment * p.segment;
        const u32 end = p.from_len - first < p.segment ? p.from_len : first + p.segment;
        const Part part(first, end, kPart);
        const Ranks<hk::GlobalPtr<const u64>, kPart> ranks = {p.read_from(row) + part.from, part.cols};
        u64 *mine = found + wave * kResults;
        for (u32 i = hk::lane_id(); i < u32(kResults); i += kWaveSize) mine[i] = 0;
        hk::wave_barrier();
        select(ranks, p.k, true, slots[wave], [&](u32 place, u64 rank) { mine[place] = rank; });
        gather<T, Waves>(p, row, segment, found, slots[0]);
    }
}
}  // namespace

#define TOPK_ENTRIES(T)                                                                              \
    HK_ENTRY(topk_##T##_lists_64, hk::row_threads(8), lists<Access::Vectorized, hk::T, 8, 8>)        \
    HK_ENTRY(topk_##T##_lists_128, hk::row_threads(16), lists<Access::Vectorized, hk::T, 16, 8>)     \
    HK_ENTRY(topk_##T##_lists_256, hk::row_threads(16), lists<Access::Vectorized, hk::T, 16, 16>)    \
    HK_ENTRY(topk_##T##_lists_256_scalar, hk::row_threads(16), lists<Access::Scalar, hk::T, 16, 16>) \
    HK_ENTRY(topk_##T##_256, kWaveSize, wave<Access::Vectorized, hk::T, 256>)                        \
    HK_ENTRY(topk_##T##_512, kWaveSize, wave<Access::Vectorized, hk::T, 512>)                        \
    HK_ENTRY(topk_##T##_1024, kWaveSize, wave<Access::Vectorized, hk::T, 1024>)                      \
    HK_ENTRY(topk_##T##_1024_scalar, kWaveSize, wave<Access::Scalar, hk::T, 1024>)                   \
    HK_ENTRY(topk_##T##_4096, 4 * kWaveSize, block<Access::Vectorized, hk::T, 4>)                    \
    HK_ENTRY(topk_##T##_16384, 16 * kWaveSize, block<Access::Vectorized, hk::T, 16>)                 \
    HK_ENTRY(topk_##T##_4096_scalar, 4 * kWaveSize, block<Access::Scalar, hk::T, 4>)                 \
    HK_ENTRY(topk_##T##_16384_scalar, 16 * kWaveSize, block<Access::Scalar, hk::T, 16>)              \
    HK_ENTRY(topk_##T##_tiles, kWaveSize, tiles<Access::Vectorized, hk::T>)                          \
    HK_ENTRY(topk_##T##_tiles_scalar, kWaveSize, tiles<Access::Scalar, hk::T>)                       \
    HK_ENTRY(topk_##T##_merge, 4 * kWaveSize, merge<hk::T, 4>)

TOPK_ENTRIES(bf16)
TOPK_ENTRIES(f16)
TOPK_ENTRIES(f32)
