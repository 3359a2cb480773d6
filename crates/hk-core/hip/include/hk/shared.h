// shared.h: tiles in LDS.
#pragma once

#include <hk/arch.h>
#include <hk/mma.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// A tile in LDS: `kRows` rows of `kBytes` bytes, in chunks of 16 bytes. Chunk c of a row is at place c ^ swizzle(row), such
/// that no two lanes that LDS serves together meet in a bank. With banks of 4 bytes, these are, of a wave of 64:
///
///   writes of 16 bytes  8 lanes in a row, 32 banks: whole rows; or a chunk of rows 0-7, or 8-15
///   reads of 16 bytes   8 lanes of 32, 32 banks: {0-3, 20-23}, {4-7, 16-19}, {8-11, 28-31}, {12-15, 24-27};
///   or, on gfx950       16 of 32, 64 banks: {0-3, 12-15, 20-27}, {4-11, 16-19, 28-31}
///
/// Lanes 16-31 of a read have a chunk of the same rows as lanes 0-15 and the chunk's neighbour, c ^ 1, in fragments of 16 rows;
/// in those of 32, the same chunk of the next 16 rows, where the swizzle is the same again.
///   Rows of 128 bytes are 32 banks. All of rows 0-7, all of 8-15, all even and all odd ones have different swizzles, those of a
///   parity among rows 4-11 two pairs {s, s ^ 1}. Transposed reads of gfx950, of 8 bytes of 32 lanes, on 64 banks, take two
///   neighbouring chunks of 4 rows and of 4 others that are 4 or 8 further on, of which those of a parity differ in s / 2;
///   or four neighbouring chunks of 4 rows, of which those of a parity differ in s / 4.
///   Where a lane has two rows, eight lanes read the four chunks of a step of two neighbouring rows: their swizzles differ by 4.
///   Two rows of 64 bytes are 32 banks. Rows 2i and 2i + 1 share a swizzle: i = 0 .. 7 have 0, 1, 2, 3, 3, 2, 1, 0.
template <int kRows_, int kBytes_>
struct SharedTile {
    static constexpr int kRows = kRows_, kBytes = kBytes_, kChunks = kBytes / 16;
    static_assert(kChunks == 4 || kChunks == 8, "rows of 64 or 128 bytes");

    Vec<u32, 4> chunk[kRows * kChunks];

    /// What a row's chunks are permuted by: the same 16 rows on.
    HK_FN static constexpr u32 swizzle(u32 row) {
        if constexpr (kChunks == 8 && kLaneRows > 1) return row % 2 * 4 | row / 4 % 4;
        if constexpr (kChunks == 8) return (row % 2 | row / 4 % 2 * 2 | row / 2 % 2 * 4) ^ row / 8 % 2 * 3;
        return row / 2 % 4 ^ row / 8 % 2 * 3;
    }

    /// Where chunk `c` of a row is; and which chunk it is that stands at place `c`.
    HK_FN static constexpr u32 place(u32 row, u32 c) { return row * kChunks + (c ^ swizzle(row)); }

    /// The lane's fragment of kDim rows from `row`, a multiple of 16, on, of bytes from `kFragBytesOf<kDim> * step` on, for
    /// products: of other columns among these than `chunks` has, if that is faster. `kOfW`: as their first operand.
    template <int kDim = 16, bool kOfW = false>
    HK_FN Frag frag(u32 row, u32 step) const {
#if defined(HK_AMD)
        return joined(chunks<kDim>(row, step));
#else
        // The lane has the address of a row of one of four matrices, and gets a word of each. They are in the order in which
        // products take them: rows of one half, then of the other, of x; columns of one half of w.
        const u32 lane = lane_id(), matrix = lane / 8;
        const u32 half = kOfW ? matrix / 2 : matrix % 2, next = kOfW ? matrix % 2 : matrix / 2;
        const u32 of_lane = lane % 8 / 2 * 4 + lane % 2 + half * 2;
        Frag frag;
#pragma unroll
        for (u32 i = 0; i < 4; i += 2) {
            const auto *at = chunk + place(of_lane, 4 * step + i + next) + row * kChunks;
            const u32 address = u32(reinterpret_cast<__UINTPTR_TYPE__>((__attribute__((address_space(3))) const void *)at));
            u32 word[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                         : "r"(address)
                         : "memory");
            frag[i] = word[0], frag[i + 1] = word[kOfW ? 1 : 2], frag[i + 4] = word[kOfW ? 2 : 1], frag[i + 5] = word[3];
        }
        return frag;
#endif
    }

    /// Of the lane's rows among kDim from `row` on, 16 bytes each, beside those of the next group of lanes.
    template <int kDim = 16>
    HK_FN OfRows<Vec<u32, 4>> chunks(u32 row, u32 step) const {
        const u32 at = step * kLaneGroups<kDim> + group_of_lane<kDim>(lane_id());
        return of_rows([&](u32 i) { return chunk[place(row_of_lane<kDim>(lane_id(), i), at) + row * kChunks]; });
    }

    /// Fragments of the tile's columns, 64 of 2 bytes, over the rows from `row`, a multiple of 16, on: column `column<kDim>(i)` is
    /// row i % kDim of the operand that `frags[i / kDim]` is of. Its columns k are rows of the tile, in order; or, if `kOfSums`,
    /// in that of sums which are the other operand, see WaveSums::as_operand.
    template <int kDim, bool kOfSums>
    HK_FN void column_frags(u32 row, Frag (&frags)[64 / kDim]) const {
        static_assert(kBytes == 128, "64 columns");
        constexpr u32 kOperands = 64 / kDim;
        const u32 lane = lane_id();
        const auto row_of = [&](u32 i) { return kOfSums ? Sums<kDim>::n(lane, i) : lane / kDim * 8 + i; };
        if constexpr (kHasReadTr) {
#if defined(HK_AMD)
            // 16 lanes have addresses of 4 neighbouring elements, 4 in a row, of 4 rows; each gets a column.
            using Four = Vec<short, 4>;
            using Lds = __attribute__((address_space(3))) Four *;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 from = row_of(4 * half) + lane % 16 / 4;
#pragma unroll
                for (u32 j = 0; j < kOperands; ++j) {
                    const u32 col = j * kDim + lane % kDim / 16 * 16 + lane % 4 * 4;
                    const auto *at = reinterpret_cast<const Four *>(chunk + place(from, col / 8) + row * kChunks) + col / 4 % 2;
                    const auto four = __builtin_bit_cast(Vec<u32, 2>, __builtin_amdgcn_ds_read_tr16_b64_v4i16((Lds)at));
                    frags[j][2 * half] = four[0], frags[j][2 * half + 1] = four[1];
                }
            }
#endif
        } else {
            // A lane has neighbouring columns, one of each operand.
            using Columns = Vec<u32, kOperands / 2>;
            Columns of_row[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) of_row[i] = get<Columns>(row + row_of(i), lane % kDim * sizeof(Columns));
#pragma unroll
            for (u32 j = 0; j < kOperands; ++j) {
                const detail::HalfOf half(j % 2 != 0);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) frags[j][i] = half(of_row[2 * i][j / 2], of_row[2 * i + 1][j / 2]);
            }
        }
    }
    template <int kDim>
    HK_FN static constexpr u32 column(u32 i) {
        return kHasReadTr ? i : i % kDim * (64 / kDim) + i / kDim;
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
