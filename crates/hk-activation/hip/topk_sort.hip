// topk_sort.hip: the k first columns of each row in order, for any k: see topk.hip for the tensors
//   tiles  a block sorts 2048 columns by their ranks in registers, eight a thread: a bitonic network of 66 steps. Steps up
//          to distance 8 stay in a lane, up to 512 in a wave, and three go through LDS. The first k go to the results if the
//          row has one tile, else to the workspace.
//   merge  the first k of up to eight sorted lists of ranks: each rank finds its place by counting the ranks that precede it,
//          with a binary search in each other list. Repeated until one list is left.
// Ranks are distinct and give the whole order, so results are exact.
// Floor
//   Memory: as topk.hip's, and twice 8 bytes for each rank that a pass keeps.
#include <hk/block.h>
#include <hk/reg.h>
#include <hk/rows.h>

#include "topk.h"

namespace {
using namespace topk;
using hk::Access;
using hk::kWaveSize;

constexpr int kThreads = 256;
constexpr int kTile = kThreads * 8;
constexpr u32 kFan = 8;

/// One step of a network over a block: each value is compared with that of thread `thread ^ Mask`, in reverse order if
/// `kTurned`. Threads whose bit Bit is 0 keep the larger.
template <int Mask, int Bit, bool kTurned>
HK_FN void meet(u64 (&v)[8], u64 *shared) {
    u64 other[8];
    if constexpr (Mask < kWaveSize) {
#pragma unroll
        for (int i = 0; i < 8; ++i) other[i] = hk::shuffle_xor<Mask>(v[i]);
    } else {
        // Neighbouring threads are adjacent in LDS: no bank conflicts.
#pragma unroll
        for (int i = 0; i < 8; ++i) shared[i * kThreads + hk::thread_x()] = v[i];
        hk::block_barrier();
#pragma unroll
        for (int i = 0; i < 8; ++i) other[i] = shared[i * kThreads + (hk::thread_x() ^ Mask)];
        hk::block_barrier();
    }
    const bool upper = hk::thread_x() & Bit;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u64 &mine = v[i];
        const u64 theirs = other[kTurned ? 7 - i : i];
        mine = (mine < theirs) != upper ? theirs : mine;
    }
}

/// Sorts the bitonic sequence of each group of Group threads, descending.
template <int Group>
HK_FN void merge_threads(u64 (&v)[8], u64 *shared) {
    if constexpr (Group > 1) {
        meet<Group / 2, Group / 2, false>(v, shared);
        merge_threads<Group / 2>(v, shared);
    } else {
#pragma unroll
        for (int apart = 4; apart >= 1; apart /= 2) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (!(i & apart)) hk::order(v[i], v[i + apart]);
            }
        }
    }
}

/// Sorts the values of each group of Group threads, descending: eight per thread.
template <int Group>
HK_FN void sort_threads(u64 (&v)[8], u64 *shared) {
    if constexpr (Group > 1) {
        sort_threads<Group / 2>(v, shared);
        meet<Group - 1, Group / 2, true>(v, shared);
        merge_threads<Group / 2>(v, shared);
    } else {
        hk::sort8(v);
    }
}

template <Access kAccess, class T>
HK_FN void tiles(const Params &p) {
    constexpr int kVec = hk::kVecLen<T>;
    using RowT = hk::Row<T, kThreads, kVec, 8 / kVec>;
    __shared__ u64 shared[kTile];
    const u64 units = u64(p.x.rows()) * p.segments;
    for (u64 unit = hk::block_x(); unit < units; unit += hk::grid_x()) {
        const u64 row = p.segments == 1 ? unit : unit / p.segments;
        const u32 tile = u32(unit - row * p.segments);
        const u32 first = tile * kTile;
        const u32 cols = p.x.cols() - first < u32(kTile) ? p.x.cols() - first : u32(kTile);
        const hk::Window window(p.x.row<T>(row) + first, cols * u32(sizeof(T)));
        using Place = hk::Cursor<T, kAccess>;
        const RowT x = RowT::load(Place{window, hk::thread_x() * u32(kVec * sizeof(T)), Place::kToEnd});
        u64 rank[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const u32 column = (e / kVec * kThreads + hk::thread_x()) * kVec + e % kVec;
            const u32 key = hk::order_key<T>(x.chunk[e / kVec][e % kVec], p.smallest);
            rank[e] = column < cols ? hk::ranked(key, first + column) : 0;
        }
        sort_threads<kThreads>(rank, shared);
        const u32 keep = p.k < cols ? p.k : cols;
        const u32 start = tile * p.list;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const u32 place = hk::thread_x() * 8 + e;
            if (place < keep) write_rank<T>(p, row, start + place, rank[e]);
        }
    }
}

/// Merges eight lists of `list` ranks, each of `segment` columns, into one.
template <class T>
HK_FN void merge(const Params &p) {
    const u32 cols = p.x.cols();
    const u64 units = u64(p.x.rows()) * p.segments;
    for (u64 unit = hk::block_x(); unit < units; unit += hk::grid_x()) {
        const u64 row = unit / p.segments;
        const u32 index = u32(unit - row * p.segments) * kThreads + hk::thread_x();
        const u32 list = index / p.list;
        const u32 at = index - list * p.list;
        const auto length = [&](u64 of) -> u32 {
            const u64 before = of * p.segment;
            if (before >= cols) return 0;
            return cols - u32(before) < p.list ? cols - u32(before) : p.list;
        };
        if (index >= p.from_len || at >= length(list)) continue;
        const hk::GlobalPtr<const u64> ranks = p.read_from(row);
        const u64 mine = ranks[index];
        const u32 group = list / kFan;
        u32 place = at;
#pragma unroll 1
        for (u32 other = group * kFan; other < (group + 1) * kFan; ++other) {
            u32 low = 0, high = other == list ? 0 : length(other);
            while (low < high) {
                const u32 middle = (low + high) / 2;
                if (ranks[u64(other) * p.list + middle] > mine)
                    low = middle + 1;
                else
                    high = middle;
            }
            place += low;
        }
        // Ranks after the first k of a group are after the first k of the row.
        const u64 room = u64(p.list) * kFan;
        const u32 keep = p.k < room ? p.k : u32(room);
        if (place < keep) write_rank<T>(p, row, group * keep + place, mine);
    }
}
}  // namespace

#define TOPK_SORT_ENTRIES(T)                                                       \
    HK_ENTRY(topk_sort_##T##_tiles, kThreads, tiles<Access::Vectorized, hk::T>)    \
    HK_ENTRY(topk_sort_##T##_tiles_scalar, kThreads, tiles<Access::Scalar, hk::T>) \
    HK_ENTRY(topk_sort_##T##_merge, kThreads, merge<hk::T>)

TOPK_SORT_ENTRIES(bf16)
TOPK_SORT_ENTRIES(f16)
TOPK_SORT_ENTRIES(f32)
