// shared.h: tiles in LDS.
#pragma once

#include <hk/arch.h>
#include <hk/mma.h>
#include <hk/types.h>
#include <hk/wave.h>
#include HK_TARGET_HEADER(shared.h)

namespace hk {

/// A tile in LDS: `kRows` rows of `kBytes` bytes, in chunks of 16 bytes. Chunk c of a row is at c ^ swizzle(row), so that accesses have
/// no bank conflicts. Lanes that LDS serves together, of a wave of 64, with banks of 4 bytes:
///
///   writes of 16 bytes  8 lanes in a row, 32 banks: whole rows; or a chunk of rows 0-7, or 8-15
///   reads of 16 bytes   8 lanes of 32, 32 banks: {0-3, 20-23}, {4-7, 16-19}, {8-11, 28-31}, {12-15, 24-27};
///   or, on gfx950       16 of 32, 64 banks: {0-3, 12-15, 20-27}, {4-11, 16-19, 28-31}
///
/// Lanes 16-31 of a read have a chunk of the same rows as lanes 0-15 and the adjacent chunk, c ^ 1, in fragments of 16 rows;
/// in those of 32, the same chunk of the next 16 rows, where the swizzle is the same again.
///   Rows of 128 bytes are 32 banks. All of rows 0-7, all of 8-15, all even and all odd ones have different swizzles, those of a
///   parity among rows 4-11 two pairs {s, s ^ 1}. Transposed reads of gfx950, of 8 bytes of 32 lanes, on 64 banks, take two
///   adjacent chunks of 4 rows and of 4 others that are 4 or 8 further on, of which those of a parity differ in s / 2;
///   or four adjacent chunks of 4 rows, of which those of a parity differ in s / 4.
///   Where a lane has two rows, eight lanes read the four chunks of a step of two adjacent rows: their swizzles differ by 4.
///   Two rows of 64 bytes are 32 banks. Rows 2i and 2i + 1 share a swizzle: i = 0 .. 7 have 0, 1, 2, 3, 3, 2, 1, 0.
template <int kRows_, int kBytes_>
struct SharedTile {
    static constexpr int kRows = kRows_, kBytes = kBytes_, kChunks = kBytes / 16;
    static_assert(kChunks == 4 || kChunks == 8, "rows of 64 or 128 bytes");

    Vec<u32, 4> chunk[kRows * kChunks];

    /// The XOR of a row's chunk index; periodic in 16 rows.
    HK_FN static constexpr u32 swizzle(u32 row) {
        if constexpr (kChunks == 8 && kRowsPerLane > 1) return row % 2 * 4 | row / 4 % 4;
        if constexpr (kChunks == 8) return (row % 2 | row / 4 % 2 * 2 | row / 2 % 2 * 4) ^ row / 8 % 2 * 3;
        return row / 2 % 4 ^ row / 8 % 2 * 3;
    }

    /// The index of chunk `c` of a row, and the chunk at index `c`.
    HK_FN static constexpr u32 place(u32 row, u32 c) { return row * kChunks + (c ^ swizzle(row)); }

    /// The lane's fragment of kDim rows from `row` (a multiple of 16), of bytes from `kFragBytesOf<kDim> * step`, for an MMA: the
    /// order of columns may differ from that of `chunks` where that is faster. `kOfW`: as the first operand.
    template <int kDim = 16, bool kOfW = false>
    HK_FN Frag frag(u32 row, u32 step) const {
        if constexpr (!kHasLdmatrix)
            return joined(chunks<kDim>(row, step));
        else
            return ldmatrix<kOfW>(row, step);
    }

  private:
    template <bool kOfW>
    HK_FN Frag ldmatrix(u32 row, u32 step) const {
        // ldmatrix: the lane gives the address of a row of one of four matrices, and gets a dword of each, in the order of the MMA:
        // for x the two halves of rows first, for w the two halves of columns.
        const u32 lane = lane_id(), matrix = lane / 8;
        const u32 half = kOfW ? matrix / 2 : matrix % 2, next = kOfW ? matrix % 2 : matrix / 2;
        const u32 of_lane = lane % 8 / 2 * 4 + lane % 2 + half * 2;
        Frag frag;
#pragma unroll
        for (u32 i = 0; i < 4; i += 2) {
            const auto *at = chunk + place(of_lane, 4 * step + i + next) + row * kChunks;
            u32 word[4];
            detail::ldmatrix_x4(word, at);
            frag[i] = word[0], frag[i + 1] = word[kOfW ? 1 : 2], frag[i + 4] = word[kOfW ? 2 : 1],
            frag[i + 5] = word[3];
        }
        return frag;
    }

  public:
    /// Of the lane's rows among kDim from `row` on, 16 bytes each, beside those of the next group of lanes.
    template <int kDim = 16>
    HK_FN PerRow<Vec<u32, 4>> chunks(u32 row, u32 step) const {
        const u32 at = step * kLaneGroups<kDim> + group_of_lane<kDim>(lane_id());
        return per_row([&](u32 i) { return chunk[place(row_of_lane<kDim>(lane_id(), i), at) + row * kChunks]; });
    }

    /// Fragments of the tile's columns, 64 of 2 bytes, over the rows from `row`, a multiple of 16, on: column `column<kDim>(i)` is
    /// row i % kDim of the operand that `frags[i / kDim]` is of. Its columns k are rows of the tile, in order; if `kOfSums`, in
    /// the order of accumulators that are the other operand (WaveTile::as_operand). `kWide`: rows are in the order of
    /// AccLayout::wide.
    template <int kDim, bool kOfSums, bool kWide = false>
    HK_FN void column_frags(u32 row, Frag (&frags)[64 / kDim]) const {
        static_assert(kBytes == 128, "64 columns");
        constexpr u32 kOperands = 64 / kDim;
        const u32 lane = lane_id();
        const auto row_of = [&](u32 i) { return kOfSums ? AccLayout<kDim>::n(lane, i) : lane / kDim * 8 + i; };
        if constexpr (kHasLdmatrix) {
            static_assert(kOfSums, "the order of other operands differs between MMAs and loads");
            // Matrices of 8 columns: two of the lanes' first rows, two of their second ones.
            const u32 matrix = lane / 8, of_lane = lane % 8 / 2 * 4 + matrix % 2 * 2 + lane % 2;
#pragma unroll
            for (u32 j = 0; j < kOperands; ++j) {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    u32 word[4];
                    detail::ldmatrix_x4_trans(word,
                                              chunk + place(of_lane + 16 * half, 2 * j + matrix / 2) + row * kChunks);
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) frags[j][i / 2 * 4 + half * 2 + i % 2] = word[i];
                }
            }
        } else if constexpr (kHasReadTr) {
            // 16 lanes have addresses of 4 consecutive elements, 4 in a row, of 4 rows; each gets a column.
            using Four = Vec<short, 4>;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 from = row_of(4 * half) + lane % 16 / 4;
#pragma unroll
                for (u32 j = 0; j < kOperands; ++j) {
                    const u32 first = lane % kDim / 16 * 16 + lane % 4 * 4;
                    const u32 col = j * kDim + (kWide ? AccLayout<kDim>::wide(first) : first);
                    const auto *at =
                        reinterpret_cast<const Four *>(chunk + place(from, col / 8) + row * kChunks) + col / 4 % 2;
                    const auto four = __builtin_bit_cast(Vec<u32, 2>, detail::read_transposed(at));
                    frags[j][2 * half] = four[0], frags[j][2 * half + 1] = four[1];
                }
            }
        } else {
            // A lane has consecutive columns, one of each operand.
            using Columns = Vec<u32, kOperands / 2>;
            Columns of_row[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) of_row[i] = get<Columns>(row + row_of(i), lane % kDim * sizeof(Columns));
#pragma unroll
            for (u32 j = 0; j < kOperands; ++j) {
                const detail::SelectHalf half(j % 2 != 0);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) frags[j][i] = half(of_row[2 * i][j / 2], of_row[2 * i + 1][j / 2]);
            }
        }
    }
    template <int kDim, bool kWide = false>
    HK_FN static constexpr u32 column(u32 i) {
        // Of the rows of a lane, the first ones are in the first 8 columns.
        if constexpr (kHasLdmatrix) return (i & ~15u) | (i & 2) << 2 | (i & 12) >> 1 | (i & 1);
        if constexpr (kHasReadTr) return kWide ? AccLayout<kDim>::wide(i) : i;
        return i % kDim * (64 / kDim) + i / kDim;
    }

    /// A value of up to 16 bytes at `byte`, a multiple of its size, of a row.
    template <class V>
    HK_FN V get(u32 row, u32 byte) const {
        return *reinterpret_cast<const V *>(reinterpret_cast<const u8 *>(chunk + place(row, byte / 16)) + byte % 16);
    }
    template <class V>
    HK_FN void put(u32 row, u32 byte, V v) {
        *reinterpret_cast<V *>(reinterpret_cast<u8 *>(chunk + place(row, byte / 16)) + byte % 16) = v;
    }
};

}  // namespace hk
