// warpgroup_rows.h: tiles of rows of keys and values in LDS for warpgroup instructions (hk/warpgroup.h), where the target has them.
#pragma once

#include "keys.h"

#include <hk/warpgroup.h>

namespace attention {

/// Barriers of stages in LDS, if warpgroups multiply them: what is in a stage has landed; its K, its V have been multiplied.
template <int kStages, bool kWarpgroups>
struct StageBarriers {};

#if defined(HK_WARPGROUPS)
template <int kStages>
struct StageBarriers<kStages, true> {
    hk::SplitBarrier first_landed, landed[kStages], k_left[kStages], v_left[kStages];

    /// So many threads copy, so many waves multiply.
    HK_FN void init(u32 threads, u32 waves) {
        first_landed.init(threads);
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            landed[i].init(threads);
            k_left[i].init(waves);
            v_left[i].init(waves);
        }
    }
};

/// A tile of kRows keys, in the order of MMAs: as rows of S^T, and as columns k of the product with V.
template <int kRows, int kCols>
struct WarpgroupTile {
    using Part = hk::WarpgroupRows<kRows>;
    Part part[kCols / 64];

    /// The descriptor of all rows of a tile at an address as the operand K, of columns from 16 `step` on.
    HK_FN static u64 keys(u32 at, int step) {
        return Part::descriptor_at(at + step / 4 * sizeof(Part), 0, step % 4 * 32);
    }
    /// That of 16 rows from 16 `step` on as the operand V^T.
    HK_FN static u64 values(u32 at, int step) {
        return Part::template descriptor_at<kCols == 64 ? 16 : int(sizeof(Part))>(at, step * 16, 0);
    }
};

/// As RowMover, straight to LDS.
template <int kRows_, int kCols, int kThreads, u32 kWindow>
class WarpgroupRowMover {
  public:
    using Tile = WarpgroupTile<kRows_, kCols>;
    static constexpr int kRows = kRows_;
    static constexpr int kParts = kRows * kCols / 8 / kThreads;

  private:
    using Part = typename Tile::Part;
    static constexpr u32 kOfPart = kRows * Part::kChunks;
    static_assert(kWindow == kRows && kOfPart % kThreads == 0, "a thread's chunks have one column offset in a part");
    u32 row_, offset_[kCols / 64], step_;

    /// The row of the thread's i-th chunk of a part.
    static constexpr u32 kStep = kThreads / Part::kChunks;
    static_assert(kStep % 16 == 0, "whole MMAs");

  public:
    HK_FN static u32 first_row(int) { return 0; }

    /// As RowMover's.
    HK_FN WarpgroupRowMover(i64 stride, u32 cols, u32 thread) : step_(kStep * u32(stride)) {
        const u32 place = thread / Part::kChunks;
        row_ = Part::of_mma(place);
#pragma unroll
        for (u32 part = 0; part < kCols / 64; ++part) {
            const u32 col = part * 64 + (thread % Part::kChunks ^ Part::swizzle(place)) * 8;
            offset_[part] = col < cols ? row_ * u32(stride) + col * 2 : hk::Window::kOutOfBounds;
        }
    }

    /// As RowMover::copy.
    HK_FN void copy(const auto &rows, Tile &tile, u32 skip = 0) const {
#pragma unroll
        for (u32 i = 0; i < kParts; ++i) {
            const u32 part = i * kThreads / kOfPart, at = i * kThreads % kOfPart, step = at / kThreads;
            const u32 offset = row_ + step * kStep < skip ? hk::Window::kOutOfBounds : offset_[part] + step * step_;
            rows.of_part(i).load_to_lds(&tile.part[part].chunk[at + hk::wave_id() * hk::kWaveSize % kThreads], offset,
                                        0);
        }
    }
    HK_FN static constexpr bool full() { return true; }
};

#endif

}  // namespace attention
