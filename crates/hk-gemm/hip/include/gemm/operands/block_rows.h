// block_rows.h: decode GEMM's register loader for operands that are dequantized or come with scales.
//   A lane has 32 neighbouring columns of its rows (hk/mixed_mma.h).
#pragma once

#include <gemm/args.h>

#include <hk/global.h>
#include <hk/mixed_mma.h>
#include <hk/mma.h>

namespace gemm {
/// Rows as they follow each other.
struct InOrder {
    HK_FN u32 operator()(u32 row) const { return row; }
};

/// Loads 16 kTiles rows to registers: kCount times kMxCols columns each. `from` is in bytes of a, which has kABits bits per column.
/// `kStreamed`: no other wave reads these rows (non-temporal loads).
template <class Raw, int kBits, int kABits, int kTiles, int kCount, bool kStreamed>
class BlockRows {
    hk::Window window_;
    u32 end_;  // of a row, in bytes
    u32 chunk_shift_;
    u32 offset_[kTiles][hk::kRowsPerLane];

    HK_FN static u32 lane_byte() { return hk::group_of_lane(hk::lane_id()) * Raw::kLaneStep; }

  public:
    static constexpr u32 kBytes = hk::kMxCols * kBits / 8;

    /// Row r of the tiles is row `row_of(r)` from `first_row` on, which is at `first`.
    template <class Args, class RowOf = InOrder>
    HK_FN BlockRows(GlobalPtr<const u8> first, const Args &args, u32 first_row, u32 end, RowOf row_of = {})
        : window_(first, hk::Window::kOutOfBounds - 1), end_(u32(u64(end) * kBits / kABits)),
          chunk_shift_(args.layout.chunk_shift) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                const u32 row = row_of(16 * i + hk::row_of_lane(hk::lane_id(), r));
                const bool valid = row < args.rows - first_row;
                offset_[i][r] =
                    valid ? args.layout.window_offset(row) + (lane_byte() << chunk_shift_) : hk::Window::kOutOfBounds;
            }
        }
    }

    HK_FN void load(hk::PerRow<Raw> (&blocks)[kTiles][kCount], u32 from) const {
        const u32 bytes = u32(u64(from) * kBits / kABits);
        // Blocks of one line follow each other, so that it is filled once.
        constexpr u32 kOfLine = kCount % 2 == 0 && 2 * kBytes <= kLineBytes ? 2 : 1;
#pragma unroll
        for (u32 first = 0; first < kCount; first += kOfLine) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (u32 b = first; b < first + kOfLine; ++b) {
#pragma unroll
                    for (u32 c = 0; c < Raw::kChunks; ++c) {
                        // Past the row's end the sign bit moves the offset beyond the window: zeros are read.
                        const u32 at = bytes + b * kBytes + c * Raw::kStep;
                        const u32 past = (end_ - 1u - (at + lane_byte())) & hk::Window::kOutOfBounds;
#pragma unroll
                        for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                            auto &chunk = blocks[i][b].row[r].chunk[c];
                            if constexpr (kStreamed)
                                chunk = window_.load_streaming(offset_[i][r] | past, at << chunk_shift_);
                            else
                                chunk = window_.template load<Vec<u32, 4>>(offset_[i][r] | past, at << chunk_shift_);
                        }
                    }
                }
            }
        }
    }
};

}  // namespace gemm
