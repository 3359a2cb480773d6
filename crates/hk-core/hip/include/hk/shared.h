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
///   Rows of 128 bytes are 32 banks. All of 0-7, all of 8-15, all even and all odd rows have different swizzles; those of rows
///   4-11 of a parity are pairs of the form {s, s ^ 1}.
///   Two rows of 64 bytes are 32 banks. Rows 2i and 2i + 1 share a swizzle: i = 0 .. 7 have 0, 1, 2, 3, 3, 2, 1, 0.
template <int kRows_, int kBytes_>
struct SharedTile {
    static constexpr int kRows = kRows_, kBytes = kBytes_, kChunks = kBytes / 16;
    static_assert(kChunks == 4 || kChunks == 8, "rows of 64 or 128 bytes");

    Vec<u32, 4> chunk[kRows * kChunks];

    /// What a row's chunks are permuted by: the same 16 rows on.
    HK_FN static constexpr u32 swizzle(u32 row) {
        if constexpr (kChunks == 8) return row / 2 % 8 ^ row % 2 * 4;
        return row / 2 % 4 ^ row / 8 % 2 * 3;
    }

    /// Where chunk `c` of a row is; and which chunk it is that stands at place `c`.
    HK_FN static constexpr u32 place(u32 row, u32 c) { return row * kChunks + (c ^ swizzle(row)); }

    /// The lane's fragment of kDim rows from `row`, a multiple of 16, on, of bytes from `kFragBytesOf<kDim> * step` on.
    template <int kDim = 16>
    HK_FN Frag frag(u32 row, u32 step) const {
        constexpr u32 kGroups = kWaveSize / kDim;
        return chunk[place(lane_id() % kDim, step * kGroups + lane_id() / kDim) + row * kChunks];
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
