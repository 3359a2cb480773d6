// topk.h: parameters and stores shared by topk.hip and topk_sort.hip.
#pragma once

#include <hk/entry.h>
#include <hk/global.h>
#include <hk/select.h>

namespace topk {

using hk::i32;
using hk::i64;
using hk::u32;
using hk::u64;

struct Params {
    hk::Global x, values, indices;
    u64 from, to;          // ranks in the workspace, read instead of x and written instead of the results; 0: none
    u32 from_len, to_len;  // ranks of a row in each
    u32 k;
    u32 smallest;
    u32 index_is_64;
    u32 pairs;     // topk.hip: a lane's even and odd elements give a bound each
    u32 batch;     // topk.hip: rows per block and step
    u32 segments;  // segments of a row; of topk_sort.hip's merge, blocks that share a row
    u32 segment;  // columns of x, or ranks of `from`, in a segment; of topk_sort.hip, columns that a list of `from` stands for
    u32 list;  // topk_sort.hip: capacity of a list of `from`, in ranks

    HK_FN hk::GlobalPtr<const u64> read_from(u64 row) const {
        return reinterpret_cast<hk::GlobalPtr<const u64>>(from) + row * from_len;
    }
    HK_FN hk::GlobalPtr<u64> write_to(u64 row) const { return reinterpret_cast<hk::GlobalPtr<u64>>(to) + row * to_len; }
};

/// Element `place` of a row's results is column `column` of x.
template <class T>
HK_FN void write_result(const Params &p, u64 row, u32 place, u32 column) {
    p.values.row<T>(row)[place] = p.x.row<const T>(row)[column];
    if (p.index_is_64)
        p.indices.row<i64>(row)[place] = column;
    else
        p.indices.row<i32>(row)[place] = i32(column);
}

/// Element `place` of a row's results, or of its ranks in the workspace.
template <class T>
HK_FN void write_rank(const Params &p, u64 row, u32 place, u64 rank) {
    if (p.to != 0)
        p.write_to(row)[place] = rank;
    else
        write_result<T>(p, row, place, hk::ranked_index(rank));
}

}  // namespace topk
