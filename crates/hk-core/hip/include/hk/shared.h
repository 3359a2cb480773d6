// shared.h: tiles in LDS.
#pragma once

#include <hk/arch.h>
#include <hk/mma.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// A tile in LDS: `kRows` rows of `kBytes` bytes, in chunks of 16 bytes. Chunks of a row are permuted (swizzled) such that
/// neither rows that are written, lane after lane, nor fragments of 16 rows that are read meet in a bank:
///
///   Row pitch 128 bytes: chunk c is at place c ^ (row % 8). Lanes that a read serves together have 8 different rows of a
///   chunk on 32 banks, or 16 rows, 8 of each of two neighbouring chunks, on 64.
///   Row pitch 64 bytes: two rows cover 32 banks, so c ^ (row / 2 % 4). Four cover 64, where the lanes of a read have rows
///   {0-3, 12-15} of a chunk and {4-11} of its neighbour, or the other way around: these four groups of four rows take
///   the places c ^ {0, 2, 3, 1}.
template <int kRows_, int kBytes_>
struct SharedTile {
    static constexpr int kRows = kRows_, kBytes = kBytes_, kChunks = kBytes / 16;
    static_assert(kChunks == 4 || kChunks == 8, "rows of 64 or 128 bytes");

    Vec<u32, 4> chunk[kRows * kChunks];

    /// What a row's chunks are permuted by.
    HK_FN static constexpr u32 swizzle(u32 row) {
        if constexpr (kChunks == 8) return row % 8;
        if constexpr (kLdsReadLanes == 16) return (row / 4 ^ row / 8) % 2 * 2 + row / 8 % 2;
        return row / 2 % 4;
    }

    /// Where chunk `c` of a row is; and which chunk it is that stands at place `c`.
    HK_FN static constexpr u32 place(u32 row, u32 c) { return row * kChunks + (c ^ swizzle(row)); }

    /// The lane's fragment of 16 rows from `row` on, of bytes from `kFragBytes * step` on.
    HK_FN Frag frag(u32 row, u32 step) const {
        constexpr u32 kParts = kFragBytes / 16;
        return chunk[place(lane_id() % 16, step * kParts + lane_id() / 16) + row * kChunks];
    }
};

}  // namespace hk
