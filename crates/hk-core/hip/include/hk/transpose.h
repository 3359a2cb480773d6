// transpose.h: loads of tiles that are contiguous along rows, not along K (hk/pipeline.h).
//
//   matrix [K, rows], 16-bit elements, rows contiguous  -->  SharedTile, K contiguous
//
// The tile in LDS is the same as that of an operand with K contiguous.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/shared.h>
#include <hk/types.h>

namespace hk {

/// Column `j` of 8 rows of 8 elements of 16 bits.
HK_FN Vec<u32, 4> column_of(const Vec<u32, 4> (&rows)[8], u32 j) {
    const detail::SelectHalf half(j % 2 != 0);
    Vec<u32, 4> column;
#pragma unroll
    for (int i = 0; i < 4; ++i) column[i] = half(rows[2 * i][j / 2], rows[2 * i + 1][j / 2]);
    return column;
}

/// Loads a tile of 16-bit elements and transposes it in registers. A thread loads 4 columns of K of 4 (or 2) neighbouring rows,
/// transposes them (one v_perm for two elements), and stores 8 bytes of each row.
/// Columns lie within 2 GiB / 32 of each other; their addresses and the number of rows are multiples of 8 bytes.
///
/// A wave loads 16 columns of 16 neighbouring pieces of rows: coalesced 128-byte accesses if pieces are of 4 rows. The 16 lanes that
/// LDS writes together have 4 pieces. Even rows are on one half of the banks, odd rows on the other, so lanes of every second piece,
/// or pair of pieces, write odd rows where the others write even ones: no bank conflicts.
///
/// `kBegins`: columns before `begin` read as zero.
template <class Tile_, int kThreads, bool kBegins = false>
class TransposingMover {
  public:
    using Tile = Tile_;
    static constexpr u32 kStageBytes = Tile::kBytes;  // of a row in memory
    static constexpr int kQuads = Tile::kBytes / 8;  // groups of 4 columns in a row
    static constexpr int kSide = Tile::kRows * kQuads / kThreads >= 4 ? 4 : 2;  // rows of a piece
    static constexpr int kParts = Tile::kRows / kSide * kQuads / kThreads;
    static constexpr bool kDirectToLds = false;
    static_assert(Tile::kChunks == 4, "quads of columns come in two groups of four");
    static_assert(kParts * kThreads * kSide == Tile::kRows * kQuads, "every thread has as many pieces");

    /// A thread's pieces, four columns each.
    struct Chunks {
        Vec<u32, kSide / 2> part[kParts][4];
    };

  private:
    struct Place {
        u32 piece, quad;
        HK_FN explicit Place(int part) {
            const u32 unit = thread_x() + part * kThreads;
            piece = unit / 128 * 16 + unit / 16 % 4 * 4 + unit % 4;
            quad = unit / 64 % 2 * 4 + unit / 4 % 4;
        }
    };

    GlobalPtr<const u8> first_;
    u32 stride_, begin_, columns_, row_bytes_;
    u32 offset_[kParts];  // of the first columns in their stage; beyond its end for rows past the last

  public:
    /// Column c of K is `stride` bytes after column c - 1. `begin` and `end` are the range of valid columns, in bytes of a row of K; rows
    /// from `rows` on read as zero.
    HK_FN TransposingMover(GlobalPtr<const u8> first, u32 rows, u32 stride, u32 end, u32 begin = 0)
        : first_(first), stride_(stride), begin_(begin / 2), columns_(end / 2) {
        row_bytes_ = (rows < u32(Tile::kRows) ? rows : u32(Tile::kRows)) * 2;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const Place at(i);
            const u32 row = at.piece * kSide;
            offset_[i] = row < rows ? at.quad * 4 * stride + row * 2 : Window::kOutOfBounds;
        }
    }

    /// Loads the thread's pieces of the stage at byte `from` of the rows.
    HK_FN Chunks load(u32 from) const {
        constexpr u32 kColumns = Tile::kBytes / 2;
        // The window ends with the last column.
        const u32 column = from / 2;
        const u32 rest = column < columns_ ? columns_ - column : 0;
        const u32 last = (rest < kColumns ? rest : kColumns) - 1;
        const Window window(first_ + u64(column) * stride_, rest ? last * stride_ + row_bytes_ : 0);
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                u32 offset = offset_[i] + c * stride_;
                // Before `begin` the sign bit moves the offset beyond the window.
                if (kBegins) offset |= (column + Place(i).quad * 4 + c - begin_) & Window::kOutOfBounds;
                chunks.part[i][c] = window.template load<Vec<u32, kSide / 2>>(offset);
            }
        }
        return chunks;
    }

    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const Place at(i);
            const u32 odd = kSide == 4 ? at.piece / 2 % 2 : at.piece % 2;
            const auto &part = chunks.part[i];
#pragma unroll
            for (u32 r = 0; r < kSide; ++r) {
                const u32 row = at.piece * kSide + (r ^ odd);
                const detail::SelectHalf half((r ^ odd) % 2 != 0);
                auto *chunk = reinterpret_cast<Vec<u32, 2> *>(&tile.chunk[Tile::place(row, at.quad / 2)]);
                chunk[at.quad % 2] =
                    Vec<u32, 2>{half(part[0][r / 2], part[1][r / 2]), half(part[2][r / 2], part[3][r / 2])};
            }
        }
    }
};

/// As the vectorized Mover, for rows of 16-bit elements that begin and end at any column of a chunk: slices of rows that are 16-byte
/// aligned and multiples of 16 bytes long.
template <class Tile, int kThreads>
class RaggedMover : public ThreadChunks<Tile, kThreads> {
    using Base = ThreadChunks<Tile, kThreads>;

  public:
    using Base::kParts, typename Base::Chunks;
    static constexpr u32 kStageBytes = Tile::kBytes;  // of a row in memory
    static constexpr bool kDirectToLds = false;

  private:
    Window window_;
    u32 begin_, end_, lane_byte_;
    u32 offset_[kParts];

  public:
    /// Rows `stride` bytes apart, of `end` bytes, of which the first `begin` read as zero; rows from `rows` on read as zero.
    HK_FN RaggedMover(GlobalPtr<const u8> first, u32 rows, u32 stride, u32 end, u32 begin)
        : window_(first, Window::kOutOfBounds - 1), begin_(begin), end_(end), lane_byte_(Base::chunk() * 16) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = Base::row(i);
            offset_[i] = from < rows ? from * stride + lane_byte_ : Window::kOutOfBounds;
        }
    }

    HK_FN Chunks load(u32 from) const {
        const u32 at = from + lane_byte_;
        const u32 past = (end_ - 1u - at) & Window::kOutOfBounds;
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) chunks.part[i] = window_.load<Vec<u32, 4>>(offset_[i] | past, from);
        // Only the first and the last stages mask what they have loaded, and so wait for it.
        if (from < begin_ || from + Tile::kBytes > end_) {
            Vec<u32, 4> mask;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const auto valid = [&](u32 byte) { return byte >= begin_ && byte < end_; };
                mask[j] = (valid(at + 4 * j) ? 0xffffu : 0u) | (valid(at + 4 * j + 2) ? 0xffff0000u : 0u);
            }
#pragma unroll
            for (int i = 0; i < kParts; ++i) chunks.part[i] &= mask;
        }
        return chunks;
    }
};

/// Loads a tile of 16-bit elements with any strides, on the scalar path.
template <class Tile, int kThreads>
class StridedMover : public ThreadChunks<Tile, kThreads> {
    using Base = ThreadChunks<Tile, kThreads>;

  public:
    using Base::kParts, typename Base::Chunks;
    static constexpr u32 kStageBytes = Tile::kBytes;  // of a row in memory
    static constexpr bool kDirectToLds = false;

  private:
    GlobalPtr<const u8> row_[kParts];
    bool valid_[kParts];
    i64 step_;
    u32 columns_, lane_byte_;

  public:
    /// Rows `stride` bytes apart, columns `step` bytes apart; `end` and `rows` as in TransposingMover.
    HK_FN StridedMover(GlobalPtr<const u8> first, u32 rows, i64 stride, i64 step, u32 end)
        : step_(step), columns_(end / 2), lane_byte_(Base::chunk() * 8) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = Base::row(i);
            valid_[i] = from < rows;
            row_[i] = first + (valid_[i] ? from : 0) * stride;
        }
    }

    HK_FN Chunks load(u32 from) const {
        const u32 column = from / 2 + lane_byte_;
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            Vec<u16, 8> v = u16(0);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                if (valid_[i] && column + j < columns_) {
                    v[j] = *reinterpret_cast<GlobalPtr<const u16>>(row_[i] + i64(column + j) * step_);
                }
            }
            chunks.part[i] = __builtin_bit_cast(Vec<u32, 4>, v);
        }
        return chunks;
    }
};

}  // namespace hk
