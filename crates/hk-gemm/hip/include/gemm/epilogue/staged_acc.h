// staged_acc.h: accumulators staged in LDS, so that lanes store rows of outputs in coalesced 16-byte accesses.
#pragma once

#include <gemm/epilogue/store.h>

namespace gemm {
/// Accumulator rows in LDS, `kCols` columns each. Waves put tiles of 16 x 16; lanes get kVecCols columns of a row. Chunks of four
/// columns are swizzled: neither the puts of a tile nor the gets of neighbouring rows, or of a gate and its value, have bank
/// conflicts.
template <class Number, int kCols, int kRows = 16>
struct StagedAcc {
    static constexpr u32 kChunks = kCols / 4;
    static constexpr u32 kSwizzled = kChunks & (~kChunks + 1);  // a swizzle stays within so many chunks
    static_assert(kCols % 16 == 0 && kChunks <= 64, "rows of 16 to 256 columns");
    using Chunk = Vec<Number, 4>;
    Chunk chunk[kRows * kChunks];

    HK_FN static u32 place(u32 row, u32 c) {
        const u32 r = row % 16;
        const u32 swizzle = kChunks == 4 ? r / 2 ^ r / 4 : r ^ r / 2 ^ r / 8 ^ r * 8;
        return row * kChunks + (c ^ swizzle % kSwizzled);
    }

    /// Stores a lane's accumulators of 16 rows from `first` on.
    template <class Acc, int kN>
    HK_FN void put(u32 first, const Acc (&acc)[kN]) {
        static_assert(16 * kN == kCols, "whole rows");
#pragma unroll
        for (u32 n = 0; n < kN; ++n) {
            const auto acc_tile = __builtin_convertvector(acc[n], Vec<Number, hk::kRowsPerLane * hk::kMmaRows>);
            const u32 lane = hk::lane_id(), c = 4 * n + hk::group_of_lane(lane);
#pragma unroll
            for (u32 i = 0; i < hk::kRowsPerLane; ++i) {
                chunk[place(first + hk::row_of_lane(lane, i), c)] = reinterpret_cast<const Chunk *>(&acc_tile)[i];
            }
        }
    }

    HK_FN Vec<Number, kVecCols> get(u32 row, u32 col) const {
        return __builtin_shufflevector(chunk[place(row, col / 4)], chunk[place(row, col / 4 + 1)], 0, 1, 2, 3, 4, 5, 6,
                                       7);
    }
};

}  // namespace gemm
