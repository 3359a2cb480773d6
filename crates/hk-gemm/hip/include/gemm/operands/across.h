// across.h: weights whose summed axis is not contiguous, w[k, n], to registers.
//   A lane loads 8 columns of 8 rows and transposes them (hk::column_of) to fragments of 8 columns, so its accumulators are 8
//   neighbouring outputs. Each weight is read once by one wave.
#pragma once

#include <gemm/args.h>

#include <hk/global.h>
#include <hk/mma.h>
#include <hk/transpose.h>
#include <hk/wave_tile.h>

namespace gemm {
/// Columns of an n tile, and rows of w per step.
inline constexpr u32 kAcrossCols = 128, kAcrossStep = hk::kFragBytes / 2;
/// Columns that a lane accumulates, for each row of x.
inline constexpr u32 kAcrossColumns = 8;

/// Loads 16-bit rows of w: 8 columns at a time, 16-byte aligned.
class AcrossRows {
    hk::Window window_;
    u32 stride_, end_, bytes_, offset_[hk::kRowsPerLane];

    /// First of the lane's 8 rows of a step, and its byte offset in an n tile for each row of a fragment.
    HK_FN static u32 row() { return hk::group_of_lane(hk::lane_id()) * 8; }
    HK_FN static u32 byte(u32 i) { return hk::row_of_lane(hk::lane_id(), i) * 16; }

  public:
    struct Stage {
        Vec<u32, 4> row[hk::kRowsPerLane][8];
    };

    /// `end` rows from `first` on, of `width` columns.
    HK_FN AcrossRows(GlobalPtr<const u8> first, u32 stride, u32 end, u32 width)
        : window_(first, hk::Window::kOutOfBounds - 1), stride_(stride), end_(end), bytes_(width * 2) {
#pragma unroll
        for (u32 i = 0; i < hk::kRowsPerLane; ++i) offset_[i] = row() * stride + byte(i);
    }

    /// The lane's 8 columns of n tile `n_tile`, of 8 of the kAcrossStep rows from `from` on.
    HK_FN Stage load(u32 from, u32 n_tile) const {
        const u32 at = n_tile * (kAcrossCols * 2);
        // Past the end the sign bit moves the offset beyond the window: zeros are read.
        const u32 rows_left = end_ - 1u - (from + row());
        Stage stage;
#pragma unroll
        for (u32 i = 0; i < hk::kRowsPerLane; ++i) {
            const u32 bytes_left = bytes_ - 1u - (at + byte(i));
            const u32 past = (rows_left | bytes_left) & hk::Window::kOutOfBounds;
#pragma unroll
            for (u32 r = 0; r < 8; ++r)
                stage.row[i][r] = window_.load<Vec<u32, 4>>(offset_[i] | past, (from + r) * stride_ + at);
        }
        return stage;
    }
};

/// A wave's accumulators of an n tile: fragment j has columns j, 8 + j, 16 + j ..
template <class T, int kMTiles>
struct AcrossAcc {
    hk::MmaAcc acc[kMTiles][kAcrossColumns] = {};

    HK_FN void add(const AcrossRows::Stage &stage, const Frag (&h)[kMTiles]) {
#pragma unroll
        for (u32 j = 0; j < kAcrossColumns; ++j) {
            const Frag w = hk::joined(hk::per_row([&](u32 i) { return hk::column_of(stage.row[i], j); }));
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) acc[m][j] = hk::FragMma<T>::mma(&w, &h[m], acc[m][j]);
        }
    }

    /// Calls `part(row, col, y)` for each 8 columns that the lane has of a row of an M tile.
    template <class F>
    HK_FN void each(int tile, F part) const {
        const u32 lane = hk::lane_id();
#pragma unroll
        for (u32 i = 0; i < hk::kRowsPerLane * hk::kMmaRows; ++i) {
            Vec<float, 8> y;
#pragma unroll
            for (u32 j = 0; j < kAcrossColumns; ++j) y[j] = acc[tile][j][i];
            part(hk::AccLayout<16>::m(lane, i), hk::AccLayout<16>::n(lane, i) * kAcrossColumns, y);
        }
    }
};

}  // namespace gemm
