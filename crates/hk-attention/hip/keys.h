// keys.h: tiles of consecutive rows of keys and values, 16-bit elements, from global memory to LDS.
#pragma once

#include "problem.h"

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/matrix.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace attention {

/// Walks along rows, a tile at a time. The window of a tile ends with the last row's columns, so that rows past it read as zero
/// and lane offsets are the same for all tiles.
class RowWalk {
    u64 next_;
    i64 stride_;  // at least the bytes of a row, and tiles within 2 GiB
    u32 row_bytes_;
    i32 left_;  // rows

  public:
    HK_FN RowWalk(u64 first, i64 stride, u32 row_bytes, i32 rows)
        : next_(u64(hk::uniform(u32(first >> 32))) << 32 | hk::uniform(u32(first))), stride_(stride),
          row_bytes_(row_bytes), left_(i32(hk::uniform(u32(rows)))) {}

    template <int kRows>
    HK_FN hk::Window next() {
        const u32 rows = left_ < kRows ? u32(left_) : u32(kRows);
        const u32 bytes = left_ > 0 ? (rows - 1) * u32(stride_) + row_bytes_ : 0;
        const hk::Window window(reinterpret_cast<GlobalPtr<const u8>>(next_), bytes);
        next_ += u64(stride_ * kRows);
        left_ -= kRows;
        return window;
    }
};

/// A tile in LDS: rows of kCols 16-bit columns.
template <int kRows, int kCols>
struct RowTile {
    using Part = hk::SharedTile<kRows, 128>;
    Part part[kCols / 64];
};

/// Moves tiles of rows, 16 bytes per lane and part.
template <int kRows, int kCols, int kThreads>
class RowMover {
    using Part = typename RowTile<kRows, kCols>::Part;
    static constexpr int kChunks = kRows * kCols / 8;
    static_assert(kChunks % hk::kWaveSize == 0, "whole waves");

  public:
    using Tile = RowTile<kRows, kCols>;
    static constexpr int kParts = (kChunks + kThreads - 1) / kThreads;
    struct Chunks {
        Vec<u32, 4> part[kParts];
    };

  private:
    u32 offset_[kParts];

    /// The wave takes part in part `i`.
    HK_FN static bool takes(int i) {
        return (i + 1) * kThreads <= kChunks || hk::wave_id() < u32(kChunks - i * kThreads) / hk::kWaveSize;
    }
    HK_FN static Vec<u32, 4> *chunk(Tile &tile, u32 i) {
        constexpr u32 kOfPart = kRows * Part::kChunks;
        return &tile.part[i / kOfPart].chunk[i % kOfPart];
    }

  public:
    /// Rows `stride` bytes apart; columns from `cols` on read as zero.
    HK_FN RowMover(i64 stride, u32 cols) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 at = hk::thread_x() + i * kThreads;
            const u32 row = at % (kRows * Part::kChunks) / Part::kChunks;
            const u32 col = at / (kRows * Part::kChunks) * 64 + (at % Part::kChunks ^ Part::swizzle(row)) * 8;
            offset_[i] = col < cols && takes(i) ? row * u32(stride) + col * 2 : hk::Window::kOutOfBounds;
        }
    }

    HK_FN Chunks load(const hk::Window &rows) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            chunks.part[i] = rows.load<Vec<u32, 4>>(offset_[i]);
        }
        return chunks;
    }
    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            // All waves load as much, else the compiler would wait for all loads.
            if (takes(i)) *chunk(tile, hk::thread_x() + i * kThreads) = chunks.part[i];
        }
    }
    /// Straight to LDS: kParts loads, or one less for waves that are not `full`.
    HK_FN void copy(const hk::Window &rows, Tile &tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            if (takes(i)) rows.load_to_lds(chunk(tile, hk::wave_id() * hk::kWaveSize + i * kThreads), offset_[i], 0);
        }
    }
    HK_FN static bool full() { return takes(kParts - 1); }
};

/// A tile of values in LDS as the operand V^T: rows are columns of V in the order of AccLayout::wide, columns are keys in the order of
/// accumulators (AccLayout::place).
template <int kDim, int kKeys, int kCols>
struct TransposedTile {
    static constexpr int kPartKeys = kKeys < 64 ? kKeys : 64;
    using Part = hk::SharedTile<kCols, kPartKeys * 2>;
    Part part[kKeys / kPartKeys];
};

/// Moves tiles of values through registers, 4 keys by 4 columns per lane and part, transposed by v_perm (two elements each).
///
/// A wave has 64 columns of four quads of keys: coalesced 128-byte accesses. The 16 lanes that LDS writes together have 16 columns,
/// the rows of four swizzles. Of 64 keys a row is 32 banks: quads q, q + 2, q + 8 and q + 10 are both halves of chunks c and c ^ 4.
/// Of 32 keys a row is 16 banks: quads q and q + 2 are both halves of a chunk; q + 1 and q + 3 are written to the row of the other
/// parity.
template <int kDim, int kKeys, int kCols, int kThreads>
class TransposingRows {
    static_assert(kDim == 32, "quads of keys alternate between two groups of lanes");
    static constexpr int kUnits = kKeys * kCols / 16;

  public:
    using Tile = TransposedTile<kDim, kKeys, kCols>;
    static constexpr int kParts = (kUnits + kThreads - 1) / kThreads;
    struct Chunks {
        Vec<u32, 2> part[kParts][4];
    };

  private:
    using Part = typename Tile::Part;
    static constexpr bool kParity = Tile::kPartKeys < 64;
    u32 offset_[kParts];
    u32 place_[kParts];  // in the tile in LDS, of the first column
    u32 stride_;

    /// The last waves have the remainder.
    HK_FN static bool takes(int i) {
        return (i + 1) * kThreads <= kUnits || hk::wave_id() >= u32((i + 1) * kThreads - kUnits) / hk::kWaveSize;
    }
    struct Place {
        u32 quad, col;
        HK_FN explicit Place(int i) {
            constexpr u32 kIdle = kUnits < kThreads ? kThreads - kUnits : 0;
            const u32 lane = hk::lane_id(), wave = hk::wave_id() + (i * kThreads - kIdle) / hk::kWaveSize;
            const u32 of_row = wave % (kCols / 64), of_keys = wave / (kCols / 64);
            col = of_row * 64 + lane / 16 * 16 + lane % 4 * 4;
            quad = kParity ? of_keys * 4 + lane / 4 % 2 * 2 + lane / 8 % 2
                           : of_keys / 4 * 16 + of_keys / 2 % 2 * 4 + of_keys % 2 + lane / 4 % 2 * 2 + lane / 8 % 2 * 8;
        }
    };

  public:
    /// Rows `stride` bytes apart; columns from `cols` on, a multiple of 8, read as zero.
    HK_FN TransposingRows(i64 stride, u32 cols) : stride_(u32(stride)) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const Place at(i);
            using Places = hk::AccLayout<kDim>;
            const u32 key = at.quad * 4 % Tile::kPartKeys, byte = Places::template place<hk::bf16>(key) * 2;
            const u32 row = Places::wide(at.col) + (kParity ? at.quad % 2 : 0);
            place_[i] =
                at.quad * 4 / Tile::kPartKeys * u32(sizeof(Part)) + Part::place(row, byte / 16) * 16 + byte % 16;
            offset_[i] = at.col < cols && takes(i) ? at.quad * 4 * stride_ + at.col * 2 : hk::Window::kOutOfBounds;
        }
    }

    HK_FN Chunks load(const hk::Window &rows) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
#pragma unroll
            for (u32 r = 0; r < 4; ++r) chunks.part[i][r] = rows.load<Vec<u32, 2>>(offset_[i] + r * stride_);
        }
        return chunks;
    }

    HK_FN void store(const Chunks &chunks, Tile &tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            if (!takes(i)) continue;
            const u32 odd = kParity ? hk::lane_id() / 8 % 2 : 0;
            const auto &rows = chunks.part[i];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const hk::detail::SelectHalf half((j ^ odd) % 2 != 0);
                const Vec<u32, 2> v = {half(rows[0][j / 2], rows[1][j / 2]), half(rows[2][j / 2], rows[3][j / 2])};
                // Rows are xored, not added, and so are their swizzles.
                *reinterpret_cast<Vec<u32, 2> *>(reinterpret_cast<u8 *>(&tile) + (place_[i] ^ Part::place(j, 0) * 16)) =
                    v;
            }
        }
    }
};

}  // namespace attention
