// split_k.h: split-K slices that meet in the last block of their tile to arrive.
//   Each block stores its accumulators to the workspace. The last one (hk/arrive.h) adds those of all slices, in ascending order of K
//   whatever the order of arrival, and goes on to the epilogue. Nobody waits, and there is no second launch.
//   A slice is [batches, groups of 16 rows, n_tiles] chunks of 16 rows by the columns of a tile: of a group without a row in M nothing is
//   stored. Partial sums are as the accumulators are: i32 of int8, and scales of rows and columns come after the sum.
#pragma once

#include <gemm/epilogue/store.h>
#include <gemm/tile_coord.h>

#include <hk/arrive.h>

namespace gemm {
/// Whether a target has the path: AMD targets. On sm_90 a second launch was measured.
inline constexpr bool kSlicesMeet = hk::kXcds > 1;
/// Outputs of a tile at most. Of more, one block would load the slices for longer than a second launch takes.
inline constexpr u32 kMostSummed = 128 * 128;

/// The slices of a tile of kM x kN.
template <u32 kM, u32 kN>
class TileSlices {
    static constexpr u32 kChunkBytes = 16 * kN * 4;
    u64 first_;  // of the tile's chunks in slice 0
    i64 stride_;
    u32 group_;  // bytes between groups of 16 rows
    GlobalPtr<u64> flags_;
    u64 mark_;

  public:
    u32 count, own;
    /// Groups of 16 rows that have one in M.
    u32 groups;

    template <class Params>
    HK_FN TileSlices(const Params &p, const TileCoord &coord) : count(p.grid.splits), own(coord.split) {
        const SplitK &s = p.split_k;
        constexpr u32 kGroups = kM / 16;
        const u32 all = (p.epilogue.rows + 15) / 16, first = coord.m_tile * kGroups;
        groups = all - first < kGroups ? all - first : kGroups;
        group_ = p.grid.n_tiles * kChunkBytes;
        first_ = s.partials + (u64(coord.batch) * all + first) * group_ + u64(coord.n_tile) * kChunkBytes;
        stride_ = s.stride;
        const u32 tile = (coord.batch * p.grid.m_tiles + coord.m_tile) * p.grid.n_tiles + coord.n_tile;
        flags_ = reinterpret_cast<GlobalPtr<u64>>(s.flags) + u64(tile) * count;
        mark_ = s.mark;
    }

    /// Slice `s`, from its first group on.
    HK_FN hk::Window slice(u32 s) const {
        return {reinterpret_cast<GlobalPtr<u8>>(first_ + i64(s) * stride_), hk::Window::kOutOfBounds - 1};
    }
    HK_FN u32 group(u32 g) const { return g * group_; }
    /// Of row-major chunks.
    HK_FN u32 at(u32 row, u32 col) const { return group(row / 16) + (row % 16 * kN + col) * 4; }

    /// True for the last block. All have stored their slices; `word` of LDS is free.
    HK_FN bool last_to_arrive(void *word) const {
        return hk::all_arrived(flags_, own, count, mark_, *static_cast<u32 *>(word));
    }
    HK_FN void clear() const { hk::clear_flags(flags_, count); }

    /// The sums of N numbers over all slices, in ascending order, with the loads of kAhead of them in flight: add(s, i) adds the i-th of those
    /// in flight. `load(s, i)` loads it.
    template <int kAhead>
    HK_FN void each(auto load, auto add) const {
#pragma unroll 1
        for (u32 s = 0; s < count; s += kAhead) {
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) load(s + i < count ? s + i : count - 1, i);
            hk::sched_barrier();
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                if (s + i < count) add(s + i, i);
            }
        }
    }
};

/// x + kNothing<Number> is x, even for -0.
template <class Number>
inline constexpr Number kNothing = __is_same(Number, float) ? Number(-0.0f) : Number(0);

/// Where K is split, stores the accumulators of the block's slice; the last block adds those of the others to its own. False for blocks
/// that have nothing more to do. All waves have read LDS, of which `word` is used.
template <class T, class Params, class Acc, int kRows, int kCols>
HK_FN bool sum_slices(const Params &p, const TileCoord &coord, Acc (&acc)[kRows][kCols], void *word) {
    if constexpr (kSlicesMeet && T::kM * T::kN <= kMostSummed) {
        if (!p.split_k.partials) return true;
        using Number = decltype(acc[0][0][0] + 0);
        constexpr u32 kFragBytes = sizeof(Acc) * hk::kWaveSize;
        static_assert(sizeof(Acc) == 16 && kFragBytes == 16 * 16 * sizeof(Number),
                      "a lane stores 16 bytes of a fragment");
        // Groups of rows whose loads are in flight together, and slices. Where LDS limits the blocks of a CU, registers are free for them.
        constexpr bool kFree = requires { requires T::kReadsFirst; };
        constexpr int kMost = kFree ? 16 : 4, kTogether = kRows * kCols <= kMost ? kRows : 1;
        constexpr int kSlices = kFree ? kMost / (kTogether * kCols) : 8 / kCols, kAhead = kSlices > 1 ? kSlices : 1;
        const TileSlices<T::kM, T::kN> slices(p, coord);
        const u32 first = T::wave_m() / 16, lane = T::wave_n() / 16 * kFragBytes + hk::lane_id() * sizeof(Acc);
        {
            const hk::Window own = slices.slice(slices.own);
#pragma unroll
            for (u32 m = 0; m < kRows; ++m) {
                if (first + m >= slices.groups) continue;
#pragma unroll
                for (u32 n = 0; n < kCols; ++n) own.store(acc[m][n], lane + slices.group(first + m), n * kFragBytes);
            }
        }
        if (!slices.last_to_arrive(word)) return false;
#pragma unroll
        for (u32 group = 0; group < kRows; group += kTogether) {
            if (first + group >= slices.groups) continue;
            Acc sum[kTogether][kCols], part[kAhead][kTogether][kCols];
#pragma unroll
            for (u32 m = 0; m < kTogether; ++m) {
#pragma unroll
                for (u32 n = 0; n < kCols; ++n) sum[m][n] = Acc(kNothing<Number>);
            }
            slices.template each<kAhead>(
                [&](u32 s, u32 i) {
                    if (s == slices.own) return;  // it is in registers
                    const hk::Window from = slices.slice(s);
#pragma unroll
                    for (u32 m = 0; m < kTogether; ++m) {
                        // Nothing is where M has ended: a load out of bounds takes no memory.
                        const u32 row = first + group + m;
                        const u32 at = row < slices.groups ? lane + slices.group(row) : hk::Window::kOutOfBounds;
#pragma unroll
                        for (u32 n = 0; n < kCols; ++n) part[i][m][n] = from.template load<Acc>(at, 0, n * kFragBytes);
                    }
                },
                [&](u32 s, u32 i) {
#pragma unroll
                    for (u32 m = 0; m < kTogether; ++m) {
#pragma unroll
                        for (u32 n = 0; n < kCols; ++n) {
                            if (s == slices.own)
                                sum[m][n] += acc[group + m][n];
                            else
                                sum[m][n] += part[i][m][n];
                        }
                    }
                });
#pragma unroll
            for (u32 m = 0; m < kTogether; ++m) {
#pragma unroll
                for (u32 n = 0; n < kCols; ++n) acc[group + m][n] = sum[m][n];
            }
        }
        slices.clear();
        hk::block_barrier();
    }
    return true;
}

/// Decode GEMM: the block's slice has rows of kN numbers in a chunk; `total(col)` gives kVecCols of row `row` of the tile.
template <u32 kM, u32 kN, bool kGated, class Params>
HK_FN void store_slice(const Params &p, const TileCoord &coord, u32 row, u32 col, auto total) {
    const TileSlices<kM, kN> slices(p, coord);
    if (row >= 16 * slices.groups) return;
    const hk::Window own = slices.slice(slices.own);
    const auto store = [&](u32 at) {
        const auto v = total(at);
        const u32 to = slices.at(row, at);
        own.store(__builtin_shufflevector(v, v, 0, 1, 2, 3), to);
        own.store(__builtin_shufflevector(v, v, 4, 5, 6, 7), to, 16);
    };
    store(col);
    if constexpr (kGated) store(kN / 2 + col);
}

/// The sums over all slices of such numbers.
template <class Number, u32 kM, u32 kN>
HK_FN Vec<Number, kVecCols> sum_of_slices(const TileSlices<kM, kN> &slices, u32 row, u32 col) {
    constexpr int kAhead = 4;
    const u32 at = slices.at(row, col);
    using Half = Vec<Number, 4>;
    Half sum[2] = {Half(kNothing<Number>), Half(kNothing<Number>)}, part[kAhead][2];
    slices.template each<kAhead>(
        [&](u32 s, u32 i) {
            const hk::Window from = slices.slice(s);
            part[i][0] = from.template load<Half>(at);
            part[i][1] = from.template load<Half>(at, 0, 16);
        },
        [&](u32, u32 i) {
            sum[0] += part[i][0];
            sum[1] += part[i][1];
        });
    return __builtin_shufflevector(sum[0], sum[1], 0, 1, 2, 3, 4, 5, 6, 7);
}

}  // namespace gemm
