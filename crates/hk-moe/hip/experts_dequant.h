// experts_dequant.h: expert tiles whose w is dequantized to 16-bit floats between global memory and LDS, as in
// gemm/operands/dequant.h; a row of the tile is any row of w.
#pragma once

#include "experts.h"

#include <gemm/operands/dequant.h>

namespace experts {
/// As hk::DequantMover, vectorized, for any rows of w. `Dequant::of_row(row, rows)` tells the thread's row.
template <class Tile_, int kThreads, int kBits, class Dequant>
class DequantRows {
  public:
    using Tile = Tile_;
    static constexpr u32 kStageBytes = Tile::kBytes / 2 * kBits / 8;
    static constexpr bool kDirectToLds = false;

  private:
    static constexpr int kOfThread = Tile::kRows * Tile::kChunks / kThreads;  // chunks per thread
    static constexpr int kPerRow = Tile::kChunks / kOfThread;  // threads per row
    static constexpr int kBytes = kOfThread * kBits;  // bytes of quantized values per thread, 8 values a chunk
    static_assert(kOfThread * kPerRow == Tile::kChunks && kThreads / kPerRow == Tile::kRows,
                  "every thread has as much");

    hk::Window window_;
    Dequant dequant_;
    u32 end_, lane_byte_, chunk_shift_, offset_;

  public:
    struct Chunks {
        Vec<u32, kBytes / 4> quants;
        typename Dequant::Extra extra;
    };

    HK_FN DequantRows(GlobalPtr<const u8> first, u32 rows, const hk::RowLayout &layout, u32 end, const auto &of)
        : window_(first, hk::Window::kOutOfBounds - 1), dequant_(of.dequant), end_(end),
          chunk_shift_(layout.chunk_shift) {
        // Loaded here: a parameter that is loaded between the first writes to LDS and the main loop makes clang 22 drop the wait for
        // LDS ahead of the loop's first barrier.
        hk::opaque(chunk_shift_);
        chunk_shift_ = hk::uniform(chunk_shift_);
        lane_byte_ = hk::thread_x() % kPerRow * kBytes;
        const u32 row = of.row_of(hk::thread_x() / kPerRow);
        if constexpr (requires { dequant_.of_row(row, rows); }) dequant_.of_row(row, rows);
        const u32 in_row = (lane_byte_ & ~15u) << chunk_shift_ | (lane_byte_ & 15u);
        offset_ = row < rows ? layout.window_offset(row) + in_row : hk::Window::kOutOfBounds;
    }

    HK_FN Chunks load(u32 from) const {
        constexpr int kWords = kBytes < 16 ? kBytes / 4 : 4;
        Chunks chunks;
#pragma unroll
        for (u32 i = 0; i < kBytes / 4; i += kWords) {
            const u32 past = (end_ - 1u - (from + lane_byte_ + 4 * i)) & hk::Window::kOutOfBounds;
            const auto part = window_.load<Vec<u32, kWords>>(offset_ | past, (from + 4 * i) << chunk_shift_);
#pragma unroll
            for (u32 j = 0; j < kWords; ++j) chunks.quants[i + j] = part[j];
        }
        chunks.extra = dequant_.load(from, end_);
        return chunks;
    }

    HK_FN void store(const Chunks &chunks, Tile &tile) const {
        Vec<u32, 4> floats[kOfThread];
        dequant_.decode(chunks.quants, chunks.extra, floats);
        const u32 row = hk::thread_x() / kPerRow, first = hk::thread_x() % kPerRow * kOfThread;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) tile.chunk[Tile::place(row, first + i)] = floats[i];
    }
};

/// A tile of `kBits` bits of w by T.
template <class T, class Dequant_, int kBits, int kM, int kN, int kWavesM, int kWavesN>
struct ExpertDequantTile : gemm::DequantTile<T, Dequant_, hk::Access::Vectorized, kM, kN, kWavesM, kWavesN> {
    using Base = gemm::DequantTile<T, Dequant_, hk::Access::Vectorized, kM, kN, kWavesM, kWavesN>;
    using A = typename Base::A;
    using W = DequantRows<hk::SharedTile<kN, Base::kBytes>, Base::kThreads, kBits, Dequant_>;
    template <class Scales>
    using Pipeline = hk::RegisterPipeline<A, W, Scales, Base::kStep>;
};
}  // namespace experts
