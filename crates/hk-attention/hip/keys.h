// keys.h: tiles of rows of keys and values, of 16-bit elements or fp8, from global memory to LDS.
#pragma once

#include "problem.h"

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/matrix.h>
#include <hk/quant.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace attention {

/// Rows of a window into a page: pages are multiples of it.
inline constexpr u32 kPageRows = 16;

namespace detail {
HK_FN u64 uniform_address(u64 at) { return u64(hk::uniform(u32(at >> 32))) << 32 | hk::uniform(u32(at)); }
}  // namespace detail

/// Walks along consecutive rows, a tile of Mover at a time. The tile's window ends with the last row's columns, so that rows past it
/// read as zero and lane offsets are the same for all tiles.
template <class Mover>
class RowWalk {
    u64 next_;
    i64 stride_;  // at least the bytes of a row, and tiles within 2 GiB
    u32 row_bytes_;
    i32 left_;  // rows

  public:
    static constexpr u32 kWindowRows = Mover::kRows;
    struct Windows {
        hk::Window all;
        HK_FN const hk::Window &of_part(int) const { return all; }
    };

    HK_FN RowWalk(u64 first, i64 stride, u32 row_bytes, i32 rows)
        : next_(detail::uniform_address(first)), stride_(stride), row_bytes_(row_bytes),
          left_(i32(hk::uniform(u32(rows)))) {}

    HK_FN Windows next() {
        const u32 rows = left_ < Mover::kRows ? u32(left_) : u32(Mover::kRows);
        const u32 bytes = left_ > 0 ? (rows - 1) * u32(stride_) + row_bytes_ : 0;
        const hk::Window window(reinterpret_cast<GlobalPtr<const u8>>(next_), bytes);
        next_ += u64(stride_ * Mover::kRows);
        left_ -= Mover::kRows;
        return {window};
    }
};

/// Walks along the rows of a sequence in pages. What a wave moves in one part of a tile is within kPageRows rows, which have a
/// window; those of pages that are not in the cache, and rows past the last one, read as zero.
template <class Mover>
class PageWalk {
    u64 page_0_;  // token 0 of page 0
    i64 page_stride_;
    u32 stride_, row_bytes_;
    u64 table_;  // of the sequence
    u32 n_pages_, tokens_, inverse_;
    u32 row_, end_;
    u32 entry_[Mover::kParts];  // of the next tile: table entries are loaded a tile ahead

  public:
    static constexpr u32 kWindowRows = kPageRows;
    struct Windows {
        hk::Window window[Mover::kParts];
        HK_FN const hk::Window &of_part(int i) const { return window[i]; }
    };

    /// Rows [first, end) of a sequence; first is a multiple of kPageRows.
    HK_FN PageWalk(const Pages &pages, u64 of_sequence, u64 page_0, i64 page_stride, i64 stride, u32 row_bytes,
                   u32 first, u32 end)
        : page_0_(detail::uniform_address(page_0)), page_stride_(page_stride), stride_(u32(stride)),
          row_bytes_(row_bytes), table_(detail::uniform_address(pages.table + of_sequence * 4)),
          n_pages_(pages.n_pages), tokens_(pages.tokens), inverse_(pages.inverse), row_(hk::uniform(first)),
          end_(hk::uniform(end)) {
        look_up();
    }

    HK_FN Windows next() {
        Windows windows;
#pragma unroll
        for (int i = 0; i < Mover::kParts; ++i) {
            const u32 row = row_ + Mover::first_row(i);
            const u32 after = end_ - 1 - row, most = kPageRows - 1;
            const bool there = row < end_ && entry_[i] < n_pages_;
            const u64 at = page_0_ + u64(i64(entry_[i]) * page_stride_) +
                           u64(hk::DivMod(row, tokens_, inverse_).remainder) * stride_;
            windows.window[i] = hk::Window(reinterpret_cast<GlobalPtr<const u8>>(at),
                                           there ? (after < most ? after : most) * stride_ + row_bytes_ : 0);
        }
        row_ += Mover::kRows;
        look_up();
        return windows;
    }

  private:
    HK_FN void look_up() {
#pragma unroll
        for (int i = 0; i < Mover::kParts; ++i) {
            const u32 row = row_ + Mover::first_row(i), last = end_ - 1;
            const u32 page = hk::DivMod(row < last ? row : last, tokens_, inverse_).quotient;
            entry_[i] = u32(index_at(table_, page));
        }
    }
};

/// Elements as they are in memory: 16-bit ones.
struct Stored {
    static constexpr u32 kBytes = 2;
    template <int N>
    HK_FN static Vec<u32, N> widened(Vec<u32, N> v) {
        return v;
    }
};
/// fp8 in memory, T in LDS, exactly.
template <class T>
struct StoredFp8 {
    static constexpr u32 kBytes = 1;
    /// N dwords of T from half as many.
    template <int N>
    HK_FN static Vec<u32, N> widened(Vec<u32, N / 2> v) {
        const auto values = hk::dequantize_packed<hk::kMmaFp8Type>(v);
        if constexpr (__is_same(T, hk::bf16))
            return __builtin_bit_cast(Vec<u32, N>, hk::detail::exact_bf16<2 * N>(values));
        else
            return __builtin_bit_cast(Vec<u32, N>, __builtin_convertvector(values, Vec<T, 2 * N>));
    }
};

/// A tile in LDS: rows of kCols 16-bit columns.
template <int kRows, int kCols>
struct RowTile {
    using Part = hk::SharedTile<kRows, 128>;
    Part part[kCols / 64];
};

/// Moves tiles of rows, 16 bytes of LDS per lane and part. kWindow: rows of a window, of the walk.
template <int kRows_, int kCols, int kThreads, u32 kWindow = kRows_, class From = Stored>
class RowMover {
    using Part = typename RowTile<kRows_, kCols>::Part;
    static constexpr int kChunks = kRows_ * kCols / 8;
    static_assert(kChunks % hk::kWaveSize == 0, "whole waves");

  public:
    using Tile = RowTile<kRows_, kCols>;
    static constexpr int kRows = kRows_;
    static constexpr int kParts = (kChunks + kThreads - 1) / kThreads;
    struct Chunks {
        Vec<u32, 2 * From::kBytes> part[kParts];
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
    HK_FN static u32 row_of(u32 chunk) { return chunk % (kRows * Part::kChunks) / Part::kChunks; }

  public:
    /// The first row of the window of the wave's part `i`.
    HK_FN static u32 first_row(int i) {
        return row_of(hk::wave_id() * hk::kWaveSize + i * kThreads) / kWindow * kWindow;
    }

    /// Rows `stride` bytes apart; columns from `cols` on read as zero. `thread`: hk::thread_x().
    HK_FN RowMover(i64 stride, u32 cols, u32 thread) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 at = thread + i * kThreads, row = row_of(at);
            const u32 col = at / (kRows * Part::kChunks) * 64 + (at % Part::kChunks ^ Part::swizzle(row)) * 8;
            offset_[i] =
                col < cols && takes(i) ? row % kWindow * u32(stride) + col * From::kBytes : hk::Window::kOutOfBounds;
        }
    }

    /// The first `skip` rows are zero.
    HK_FN Chunks load(const auto &rows, u32 skip = 0) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 offset = row_of(hk::thread_x() + i * kThreads) < skip ? hk::Window::kOutOfBounds : offset_[i];
            chunks.part[i] = rows.of_part(i).template load<Vec<u32, 2 * From::kBytes>>(offset);
        }
        return chunks;
    }
    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            // All waves load as much, else the compiler would wait for all loads.
            if (takes(i)) *chunk(tile, hk::thread_x() + i * kThreads) = From::template widened<4>(chunks.part[i]);
        }
    }
    /// Straight to LDS: kParts loads, or one less for waves that are not `full`. The first `skip` rows are zero.
    HK_FN void copy(const auto &rows, Tile &tile, u32 skip = 0) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            if (!takes(i)) continue;
            const u32 at = i * kThreads;
            const u32 offset = row_of(hk::thread_x() + at) < skip ? hk::Window::kOutOfBounds : offset_[i];
            rows.of_part(i).load_to_lds(chunk(tile, hk::wave_id() * hk::kWaveSize + at), offset, 0);
        }
    }
    HK_FN static bool full() { return takes(kParts - 1); }
};

/// Rows of V^T, written 8 bytes per lane. Of 64 keys: four columns of V that differ in bits 2 and 3, and four neighbouring quads of keys,
/// which are two adjacent chunks. Other swizzles have those conflict.
template <int kRows, int kBytes>
struct QuadTile : hk::SharedTile<kRows, kBytes> {};
template <int kRows>
struct QuadTile<kRows, 128> : hk::SharedTile<kRows, 128> {
    HK_FN static constexpr u32 swizzle(u32 row) { return row % 2 | row / 4 % 2 * 2 | (row / 2 ^ row / 8) % 2 * 4; }
    HK_FN static constexpr u32 place(u32 row, u32 c) { return row * 8 + (c ^ swizzle(row)); }
    template <int kDim, bool>
    HK_FN hk::Frag frag(u32 row, u32 step) const {
        const u32 lane = hk::lane_id(), at = step * hk::kLaneGroups<kDim> + hk::group_of_lane<kDim>(lane);
        return hk::joined(
            hk::per_row([&](u32 i) { return this->chunk[place(hk::row_of_lane<kDim>(lane, i), at) + row * 8]; }));
    }
};

/// A tile of values in LDS as the operand V^T: rows are columns of V in the order of AccLayout::wide, columns are keys in the order of
/// accumulators (AccLayout::place).
template <int kDim, int kKeys, int kCols, int kBytes = 2>
struct TransposedTile {
    static constexpr int kPartKeys = kKeys < 64 ? kKeys : 64;
    using Part = QuadTile<kCols, kPartKeys * kBytes>;
    Part part[kKeys / kPartKeys];
};

/// Pieces of four neighbouring rows of a tile, in each part.
template <class Piece, int kParts>
struct Quads {
    Piece part[kParts][4];

    /// From the parts' offsets on, `stride` bytes apart; `first_row(i)` is the first row of part `i`. The first `skip` rows are zero.
    HK_FN static Quads load(const auto &rows, const u32 (&offset)[kParts], u32 stride, auto first_row, u32 skip) {
        Quads quads;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
#pragma unroll
            for (u32 r = 0; r < 4; ++r) {
                const u32 at = first_row(i) + r < skip ? hk::Window::kOutOfBounds : offset[i] + r * stride;
                quads.part[i][r] = rows.of_part(i).template load<Piece>(at);
            }
        }
        return quads;
    }
};

/// Moves tiles of values through registers, 4 keys by 4 columns per lane and part, transposed by v_perm (two elements each).
///
/// A wave has 64 columns of 16 neighbouring keys: coalesced 128-byte accesses. The 16 lanes that LDS writes together have 16 columns,
/// the rows of four swizzles, and quads q to q + 3 of keys: quads q and q + 2 are the halves of a chunk, q + 1 and q + 3 those of the
/// next one. Of 64 keys a row is 32 banks (QuadTile). Of 32 keys it is 16: quads q + 1 and q + 3 are written to the row of the other
/// parity.
template <int kDim, int kKeys, int kCols, int kThreads, u32 kWindow = kKeys, class From = Stored>
class TransposingRows {
    static_assert(kDim == 32, "quads of keys alternate between two groups of lanes");
    static constexpr int kUnits = kKeys * kCols / 16;
    static constexpr int kColumnsOfWave = 64;  // 16 lanes of four

  public:
    using Tile = TransposedTile<kDim, kKeys, kCols>;
    static constexpr int kRows = kKeys;
    static constexpr int kParts = (kUnits + kThreads - 1) / kThreads;
    using Chunks = Quads<Vec<u32, From::kBytes>, kParts>;

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
    /// The wave's unit of part `i`: 16 keys by kColumnsOfWave columns.
    HK_FN static u32 unit(int i) {
        constexpr u32 kIdle = kUnits < kThreads ? kThreads - kUnits : 0;
        return hk::wave_id() + (i * kThreads - kIdle) / hk::kWaveSize;
    }

    HK_FN static u32 quad_of(int i, u32 lane) {
        return unit(i) / (kCols / kColumnsOfWave) * 4 + lane / 4 % 2 * 2 + lane / 8 % 2;
    }

  public:
    /// The first row of the window of the wave's part `i`.
    HK_FN static u32 first_row(int i) { return unit(i) / (kCols / kColumnsOfWave) * 16 / kWindow * kWindow; }

    /// Rows `stride` bytes apart; columns from `cols` on, a multiple of 8, read as zero.
    HK_FN TransposingRows(i64 stride, u32 cols, u32 thread) : stride_(u32(stride)) {
        using Places = hk::AccLayout<kDim>;
        const u32 lane = thread % hk::kWaveSize;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 quad = quad_of(i, lane);
            const u32 col = unit(i) % (kCols / kColumnsOfWave) * kColumnsOfWave + lane / 16 * 16 + lane % 4 * 4;
            const u32 key = quad * 4 % Tile::kPartKeys, byte = Places::template place<hk::bf16>(key) * 2;
            const u32 row = Places::wide(col) + (kParity ? quad % 2 : 0);
            place_[i] = quad * 4 / Tile::kPartKeys * u32(sizeof(Part)) + Part::place(row, byte / 16) * 16 + byte % 16;
            offset_[i] =
                col < cols && takes(i) ? quad * 4 % kWindow * stride_ + col * From::kBytes : hk::Window::kOutOfBounds;
        }
    }

    /// The first `skip` rows are zero.
    HK_FN Chunks load(const auto &rows, u32 skip = 0) const {
        return Chunks::load(rows, offset_, stride_, [&](int i) { return quad_of(i, hk::lane_id()) * 4; }, skip);
    }

    HK_FN void store(const Chunks &chunks, Tile &tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            if (!takes(i)) continue;
            const u32 odd = kParity ? hk::lane_id() / 8 % 2 : 0;
            Vec<u32, 2> rows[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) rows[r] = From::template widened<2>(chunks.part[i][r]);
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

/// The same for fp8: v_perm transposes 4 x 4 bytes.
///
/// A wave has 32 columns of 32 keys. The 32 lanes that LDS writes together have 16 columns, the rows of four swizzles, and eight quads
/// of keys: those of a parity are the dwords of a chunk, and odd ones are written to the row of the other parity.
template <int kDim, int kKeys, int kCols, int kThreads, u32 kWindow = kKeys>
class TransposingBytes {
    static_assert(kDim == 32 && kKeys == 64, "rows of V^T have four chunks");
    static constexpr int kUnits = kKeys * kCols / 16;
    static_assert(kUnits % kThreads == 0, "all waves have as much");
    static constexpr int kWaveSide = 32;  // keys and columns of a wave
    static_assert(kWindow % kWaveSide == 0, "a window for each wave");

  public:
    using Tile = TransposedTile<kDim, kKeys, kCols, 1>;
    static constexpr int kRows = kKeys;
    static constexpr int kParts = kUnits / kThreads;
    using Chunks = Quads<u32, kParts>;

  private:
    using Part = typename Tile::Part;
    u32 offset_[kParts];
    u32 place_[kParts];  // in the tile in LDS, of the first column
    u32 stride_;

    HK_FN static u32 unit(int i) { return hk::wave_id() + i * kThreads / hk::kWaveSize; }
    HK_FN static u32 quad_of(int i, u32 lane) { return unit(i) / (kCols / kWaveSide) * 8 + lane / 4 % 8; }

  public:
    /// The first row of the window of the wave's part `i`.
    HK_FN static u32 first_row(int i) { return unit(i) / (kCols / kWaveSide) * kWaveSide / kWindow * kWindow; }

    /// Rows `stride` bytes apart; columns from `cols` on, a multiple of 4, read as zero.
    HK_FN TransposingBytes(i64 stride, u32 cols, u32 thread) : stride_(u32(stride)) {
        using Places = hk::AccLayout<kDim>;
        const u32 lane = thread % hk::kWaveSize;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 quad = quad_of(i, lane);
            const u32 col = unit(i) % (kCols / kWaveSide) * kWaveSide + lane / 32 * 16 + lane % 4 * 4;
            const u32 byte = Places::template place<hk::Fp8>(quad * 4), row = Places::wide(col) + quad % 2;
            place_[i] = Part::place(row, byte / 16) * 16 + byte % 16;
            offset_[i] = col < cols ? quad * 4 % kWindow * stride_ + col : hk::Window::kOutOfBounds;
        }
    }

    /// The first `skip` rows are zero.
    HK_FN Chunks load(const auto &rows, u32 skip = 0) const {
        return Chunks::load(rows, offset_, stride_, [&](int i) { return quad_of(i, hk::lane_id()) * 4; }, skip);
    }

    HK_FN void store(const Chunks &chunks, Tile &tile) const {
        using Bytes = Vec<u8, 4>;
        const u32 odd = hk::lane_id() / 4 % 2;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            u32 two[2][2];  // columns 2 j and 2 j + 1 of rows 2 r and 2 r + 1
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const auto a = __builtin_bit_cast(Bytes, chunks.part[i][2 * r]);
                const auto b = __builtin_bit_cast(Bytes, chunks.part[i][2 * r + 1]);
                two[r][0] = __builtin_bit_cast(u32, Bytes(__builtin_shufflevector(a, b, 0, 4, 1, 5)));
                two[r][1] = __builtin_bit_cast(u32, Bytes(__builtin_shufflevector(a, b, 2, 6, 3, 7)));
            }
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const hk::detail::SelectHalf half((j ^ odd) % 2 != 0);
                *reinterpret_cast<u32 *>(reinterpret_cast<u8 *>(&tile) + (place_[i] ^ Part::place(j, 0) * 16)) =
                    half(two[0][j / 2], two[1][j / 2]);
            }
        }
    }
};

}  // namespace attention
