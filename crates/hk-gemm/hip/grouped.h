// grouped.h: products of groups of rows, whose sizes are on the device.
//   Group g has the rows from the sum of the sizes before it on. A size below zero is zero; rows past the last one are none.
//   Each wave finds the groups by itself: it reads the sizes of as many groups as it has lanes, and adds them up by a scan. A
//   block's tasks come in rising order, so that it reads each size once.
#pragma once

#include <hk/transpose.h>

#include "epilogue.h"
#include "tiles.h"

namespace gemm {
using hk::i32;

/// An operand of a product, whose rows are what becomes rows or columns of the output; same layout as `Strided` in src/gmm.rs.
struct Strided {
    u64 data;
    i64 group, row, step;  // bytes from a group, row, or column of K to the next one
    u32 rows;
    u32 pad;

    HK_FN GlobalPtr<const u8> at(u32 group_index, u32 row_index, u32 column) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(group_index) * group + i64(row_index) * row +
               i64(column) * step;
    }
};

/// Same layout as `GroupSizes` in src/gmm.rs.
struct GroupSizes {
    u64 sizes;   // 0: one group of all rows
    u32 count;
    u32 rows;    // of all groups
    u32 wide;    // sizes are of 64 bits
    u32 pad;

    /// Rows of a group, as far as there are any.
    HK_FN u32 size(u32 group) const {
        if (group >= count) return 0;
        if (!sizes) return rows;
        const i64 n = wide ? reinterpret_cast<GlobalPtr<const i64>>(sizes)[group]
                           : i64(reinterpret_cast<GlobalPtr<const i32>>(sizes)[group]);
        return n < 0 ? 0 : n < i64(rows) ? u32(n) : rows;
    }
};

/// A group's rows.
struct Group {
    u32 index, first, size;
};

/// The groups in their order.
class Walk {
    u32 tile_;         // rows of a tile
    u32 base_ = 0;     // the group of lane 0
    u32 first_, size_, tiles_, upto_;  // of the lane's group: rows, tiles, and tiles of all groups up to it

    HK_FN void read(const GroupSizes &groups, u64 rows_before, u32 tiles_before) {
        const u32 size = groups.size(base_ + hk::lane_id());
        const u64 end = rows_before + hk::wave_scan(u64(size)), begin = end - size;
        const u64 rows = groups.rows;
        first_ = u32(begin < rows ? begin : rows);
        size_ = u32(end < rows ? end : rows) - first_;
        tiles_ = (size_ + tile_ - 1) / tile_;
        upto_ = tiles_before + hk::wave_scan(tiles_);
    }
    HK_FN void next(const GroupSizes &groups) {
        base_ += hk::kWaveSize;
        // Rows past the last one are none, however many.
        read(groups, hk::last_lane(first_) + hk::last_lane(size_), hk::last_lane(upto_));
    }
    HK_FN Group of_lane(u32 lane) const {
        return {base_ + lane, hk::broadcast(first_, lane), hk::broadcast(size_, lane)};
    }

public:
    HK_FN Walk(const GroupSizes &groups, u32 tile) : tile_(tile) { read(groups, 0, 0); }

    /// A group, none before one that was asked for.
    HK_FN Group find(const GroupSizes &groups, u32 index) {
        while (base_ + hk::kWaveSize <= index) next(groups);
        return of_lane(index - base_);
    }

    /// The group with tile `tile` of all groups' rows, none before one that was asked for; `tile` becomes the first one of the
    /// group. Its index is `count` if there is no such tile.
    HK_FN Group find_tile(const GroupSizes &groups, u32 &tile) {
        while (hk::last_lane(upto_) <= tile) {
            if (base_ + hk::kWaveSize >= groups.count) return {groups.count, 0, 0};
            next(groups);
        }
        const u32 lane = u32(__builtin_popcountll(hk::ballot(upto_ <= tile)));
        tile = hk::broadcast(upto_, lane) - hk::broadcast(tiles_, lane);
        return of_lane(lane);
    }
};

struct GroupedParams {  // same layout as `Params` in src/gmm.rs
    Strided x, w;
    GroupSizes groups;
    u64 y;
    i64 y_group, y_row;  // strides, in elements
    u64 bias;            // of gmm: [groups, N] of the type of y; 0: none
    u64 row_sums;        // of tgmm: f32 [groups, K]; 0: none
    u32 rows, cols;      // of the output of a group (rows: of tgmm)
    u32 columns;         // of K, of gmm
    u32 n_tiles;
    u32 span;            // tiles of M that are walked together, see `Work`
    u32 vectors;         // rows of y begin on 16 bytes
    u32 accumulate;
    u32 pad;
};

/// 8 values of a row from `at` on, those past `left` zero; `vectors`: on 16 bytes.
template <class E>
HK_FN Vec<float, 8> load_part(u64 data, i64 at, u32 left, bool vectors) {
    const auto from = reinterpret_cast<GlobalPtr<const E>>(data) + at;
    if (vectors && left >= 8) return hk::widen<E, 8>(*reinterpret_cast<GlobalPtr<const Vec<E, 8>>>(from));
    Vec<float, 8> v = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        if (i < left) v[i] = float(from[i]);
    }
    return v;
}

/// How an operand comes to LDS.
enum class Way {
    Rows,    ///< rows are contiguous, on 16 bytes, and multiples of 16 bytes long
    Across,  ///< columns of K are contiguous, on 8 bytes, and multiples of 8 bytes long
    Ragged,  ///< as Rows, but for what they begin and end with: groups are of columns of K
    Any,
};

template <class E, int kM, int kN, int kWavesM, int kWavesN, Way kX_, Way kW_>
struct GroupedTile : Tile<E, Access::Vectors, kM, kN, kWavesM, kWavesN, 5> {
    using Element = E;
    using Base = Tile<E, Access::Vectors, kM, kN, kWavesM, kWavesN, 5>;
    static constexpr Way kX = kX_, kW = kW_;
    static constexpr int kStep = 1;
    static constexpr bool kPingPong = Base::kPingPong && kX == Way::Rows && kW == Way::Rows;

    template <Way kWay, int kRows>
    using Mover = decltype([] {
        using Shared = hk::SharedTile<kRows, Base::kBytes>;
        if constexpr (kWay == Way::Rows) return (hk::Mover<Shared, Base::kThreads, Access::Vectors, sizeof(E)> *)nullptr;
        else if constexpr (kWay == Way::Across) return (hk::TransposingMover<Shared, Base::kThreads, kX == Way::Ragged> *)nullptr;
        else if constexpr (kWay == Way::Ragged) return (hk::RaggedMover<Shared, Base::kThreads> *)nullptr;
        else return (hk::StridedMover<Shared, Base::kThreads> *)nullptr;
    }());
    using X = __remove_pointer(Mover<kX, kM>);
    using W = __remove_pointer(Mover<kW, kN>);
    using Pipeline = hk::Pipeline<X, W, hk::NoWords, 5, kStep>;

    /// What brings rows from `first` on, of `columns` of K, without the first `skipped`.
    template <Way kWay, class Mover>
    HK_FN static Mover mover(const Strided &of, GlobalPtr<const u8> first, u32 rows, u32 columns, u32 skipped) {
        const u32 end = columns * u32(sizeof(E)), begin = skipped * u32(sizeof(E));
        if constexpr (kWay == Way::Rows) return Mover(first, rows, hk::RowLayout::by_rows(of.row), end, [](u32 row) { return row; });
        else if constexpr (kWay == Way::Across) return Mover(first, rows, u32(of.step), end, begin);
        else if constexpr (kWay == Way::Ragged) return Mover(first, rows, u32(of.row), end, begin);
        else return Mover(first, rows, of.row, of.step, end);
    }
};

/// Where tiles, and then sums, are in LDS.
template <class T>
union GroupedLds {
    typename T::Pipeline::Lds stages;
    Strip<float, T::kWaveN> strips[T::kThreads / hk::kWaveSize];
};

/// The sums of a tile: from row `m` of x and column `n` of the output on, over `columns` of K from `column` on. `rows`: of x.
template <class T, class SumsOf>
HK_FN void add_products(const GroupedParams &p, u32 group, u32 m, u32 rows, u32 n, u32 column, u32 columns,
                        GroupedLds<T> &lds, SumsOf &sums) {
    // Chunks of 8 columns are on 16 bytes.
    const u32 skipped = T::kX == Way::Ragged ? column % 8 : 0;
    column -= skipped;
    columns += skipped;
    const auto x = T::template mover<T::kX, typename T::X>(p.x, p.x.at(group, m, column), rows, columns, skipped);
    const auto w = T::template mover<T::kW, typename T::W>(p.w, p.w.at(group, n, column), p.w.rows - n, columns, skipped);
    const hk::NoWords none;
    const u32 stages = (columns * u32(sizeof(typename T::Element)) + T::kBytes - 1) / T::kBytes;
    sums.run(typename T::Pipeline(x, w, none, lds.stages), 0, stages);
    hk::block_barrier();
}

}  // namespace gemm
