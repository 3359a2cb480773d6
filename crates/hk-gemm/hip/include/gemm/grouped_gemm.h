// grouped_gemm.h: GEMMs of groups of rows whose sizes are on the device.
#pragma once

#include <gemm/gemm.h>

#include <hk/transpose.h>

namespace gemm {
using hk::i32;

/// An operand with free strides; its rows are rows or columns of the output.
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

///
struct GroupSizes {
    u64 sizes;   // 0: one group of all rows
    u32 count;
    u32 rows;    // rows of all groups
    u32 wide;    // sizes are 64-bit
    u32 pad;

    /// Rows of a group, clamped to [0, rows].
    HK_FN u32 size(u32 group) const {
        if (group >= count) return 0;
        if (!sizes) return rows;
        const i64 n = wide ? reinterpret_cast<GlobalPtr<const i64>>(sizes)[group]
                           : i64(reinterpret_cast<GlobalPtr<const i32>>(sizes)[group]);
        return n < 0 ? 0 : n < i64(rows) ? u32(n) : rows;
    }
};

/// The rows of a group.
struct Group {
    u32 index, first, size;
};

/// Finds groups in ascending order.
class GroupWalk {
    u32 tile_;         // rows of a tile
    u32 base_ = 0;     // group of lane 0
    u32 first_, size_, tiles_, tiles_end_;  // of the lane's group: first row, rows, tiles, and tiles up to its end

    HK_FN void read(const GroupSizes &groups, u64 rows_before, u32 tiles_before) {
        const u32 size = groups.size(base_ + hk::lane_id());
        const u64 end = rows_before + hk::wave_scan(u64(size)), begin = end - size;
        const u64 rows = groups.rows;
        first_ = u32(begin < rows ? begin : rows);
        size_ = u32(end < rows ? end : rows) - first_;
        tiles_ = (size_ + tile_ - 1) / tile_;
        tiles_end_ = tiles_before + hk::wave_scan(tiles_);
    }
    HK_FN void next(const GroupSizes &groups) {
        base_ += hk::kWaveSize;
        // Row numbers are clamped to `rows`.
        read(groups, hk::last_lane(first_) + hk::last_lane(size_), hk::last_lane(tiles_end_));
    }
    HK_FN Group of_lane(u32 lane) const {
        return {base_ + lane, hk::broadcast(first_, lane), hk::broadcast(size_, lane)};
    }

  public:
    HK_FN GroupWalk(const GroupSizes &groups, u32 tile) : tile_(tile) { read(groups, 0, 0); }

    /// Group `index`. Calls must not descend.
    HK_FN Group find(const GroupSizes &groups, u32 index) {
        while (base_ + hk::kWaveSize <= index) next(groups);
        return of_lane(index - base_);
    }

    /// The group that has tile `tile`, counted over all groups; `tile` becomes the group's first tile. Its index is `count` past the
    /// last tile. Calls must not descend.
    HK_FN Group find_tile(const GroupSizes &groups, u32 &tile) {
        while (hk::last_lane(tiles_end_) <= tile) {
            if (base_ + hk::kWaveSize >= groups.count) return {groups.count, 0, 0};
            next(groups);
        }
        const u32 lane = u32(__builtin_popcountll(hk::ballot(tiles_end_ <= tile)));
        tile = hk::broadcast(tiles_end_, lane) - hk::broadcast(tiles_, lane);
        return of_lane(lane);
    }
};

struct GroupedParams {
    Strided a, w;
    GroupSizes groups;
    u64 y;
    i64 y_group, y_row;  // strides, in elements
    u64 bias;  // gmm: [groups, N], dtype of y; 0: none
    u64 row_sums;  // tgmm: f32 [groups, K]; 0: none
    u32 rows, cols;  // of one group's output (rows: tgmm)
    u32 columns;  // of K (gmm)
    u32 n_tiles;
    u32 span;  // M tiles that share an N tile before the next one, see `TileCoord`
    u32 vectors;  // rows of y are 16-byte aligned
    u32 accumulate;
    u32 pad;
};

/// 8 values of a row from `at` on; past `left` they are zero. `vectors`: 16-byte aligned.
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

/// Layout of an operand in memory, which decides how it comes to LDS.
enum class OperandLayout {
    Rows,  ///< K contiguous, rows 16-byte aligned and multiples of 16 bytes long
    Across,  ///< rows contiguous (K strided), 8-byte aligned, multiples of 8 bytes
    Ragged,  ///< as Rows, but a group's columns of K begin and end within 16-byte chunks
    Any,
};

template <class E, int kM, int kN, int kWavesM, int kWavesN, OperandLayout kX_, OperandLayout kW_>
struct GroupedTile : Tile<E, Access::Vectorized, kM, kN, kWavesM, kWavesN, 5, 1, false> {
    using Element = E;
    using Base = Tile<E, Access::Vectorized, kM, kN, kWavesM, kWavesN, 5, 1, false>;
    static constexpr OperandLayout kA = kX_, kW = kW_;
    static constexpr int kStep = 1;
    static constexpr bool kPingPong = Base::kPingPong && kA == OperandLayout::Rows && kW == OperandLayout::Rows;

    template <OperandLayout kLayout, int kRows>
    using Mover = decltype([] {
        using Shared = hk::SharedTile<kRows, Base::kBytes>;
        if constexpr (kLayout == OperandLayout::Rows)
            return (hk::Mover<Shared, Base::kThreads, Access::Vectorized, sizeof(E)> *)nullptr;
        else if constexpr (kLayout == OperandLayout::Across)
            return (hk::TransposingMover<Shared, Base::kThreads, kA == OperandLayout::Ragged> *)nullptr;
        else if constexpr (kLayout == OperandLayout::Ragged)
            return (hk::RaggedMover<Shared, Base::kThreads> *)nullptr;
        else
            return (hk::StridedMover<Shared, Base::kThreads> *)nullptr;
    }());
    using A = __remove_pointer(Mover<kA, kM>);
    using W = __remove_pointer(Mover<kW, kN>);
    using Pipeline = hk::Pipeline<A, W, hk::NoScales, 5, kStep>;

    /// The loader of rows from `first` on and `columns` of K, of which the first `skipped` read as zero.
    template <OperandLayout kLayout, class Mover>
    HK_FN static Mover mover(const Strided &of, GlobalPtr<const u8> first, u32 rows, u32 columns, u32 skipped) {
        const u32 end = columns * u32(sizeof(E)), begin = skipped * u32(sizeof(E));
        if constexpr (kLayout == OperandLayout::Rows)
            return Mover(first, rows, hk::RowLayout::by_rows(of.row), end, [](u32 row) { return row; });
        else if constexpr (kLayout == OperandLayout::Across)
            return Mover(first, rows, u32(of.step), end, begin);
        else if constexpr (kLayout == OperandLayout::Ragged)
            return Mover(first, rows, u32(of.row), end, begin);
        else
            return Mover(first, rows, of.row, of.step, end);
    }
};

/// LDS of a tile: the pipeline's stages, then the staged accumulators.
template <class T>
union GroupedLds {
    typename T::Pipeline::Lds stages;
    StagedAcc<float, T::kWaveN> staged[T::kThreads / hk::kWaveSize];
};

/// Accumulates a tile: rows from `m` of a (`rows` of them) and output columns from `n` on, over `columns` of K from `column` on.
template <class T, class Accum>
HK_FN void accumulate_tile(const GroupedParams &p, u32 group, u32 m, u32 rows, u32 n, u32 column, u32 columns,
                           GroupedLds<T> &lds, Accum &acc_tile) {
    // Chunks of 8 columns are 16-byte aligned.
    const u32 skipped = T::kA == OperandLayout::Ragged ? column % 8 : 0;
    column -= skipped;
    columns += skipped;
    const auto a = T::template mover<T::kA, typename T::A>(p.a, p.a.at(group, m, column), rows, columns, skipped);
    const auto w =
        T::template mover<T::kW, typename T::W>(p.w, p.w.at(group, n, column), p.w.rows - n, columns, skipped);
    const hk::NoScales none;
    const u32 stages = (columns * u32(sizeof(typename T::Element)) + T::kBytes - 1) / T::kBytes;
    acc_tile.run(typename T::Pipeline(a, w, none, lds.stages), 0, stages);
    hk::block_barrier();
}

}  // namespace gemm
