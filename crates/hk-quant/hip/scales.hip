// scales.hip: e8m0 scales [rows, blocks] to and from the order in which gfx950's scaled MFMA reads them: rows padded to
// a multiple of 256, blocks to a multiple of 8 (mx::shuffled_index)
//   plain     [rows, blocks]  e8m0   any strides
//   shuffled  [n]             e8m0   contiguous
// How the work is split: the vectorized path (blocks a multiple of 16, rows and the shuffled order 16-byte aligned) gives a
// lane 16 blocks of rows r .. r + 3 and r + 16 .. r + 19 of a strip of 32 rows: 8 accesses of 16 bytes in either order, and
// adjacent lanes are adjacent in both. The scalar path gives a lane 4 bytes of the shuffled order: rows r and r + 16, blocks
// b and b + 4.
// Floor: each byte once.
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/quant.h>

#include "mx.h"
#include "tiles.h"

namespace {
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;

struct Params {
    hk::Global plain, shuffled;
    u64 dwords;  // of the shuffled order
    u32 rows, blocks;
    u32 strip_lanes;  // log2 of the lanes that share rows, in the vectorized path
    u32 pad;
};

constexpr u8 kOne = 127;  // padding

/// Calls `f(place, row, block)` for each byte of each dword of this thread.
template <class F>
HK_FN void for_bytes(const Params &p, F f) {
    const u64 strip_dwords = (p.blocks + 7) / 8 * 64;  // of 32 rows
    for (u64 dword = u64(hk::block_x()) * hk::kWaveSize + hk::thread_x(); dword < p.dwords;
         dword += u64(hk::grid_x()) * hk::kWaveSize) {
        const u64 strip = dword / strip_dwords;
        const u32 in_strip = u32(dword % strip_dwords);
        const u32 block = in_strip / 64 * 8 + in_strip % 64 / 16;
        const u64 row = strip * 32 + in_strip % 16;
        for (u32 byte = 0; byte < 4; ++byte) f(4 * dword + byte, row + byte % 2 * 16, block + byte / 2 * 4);
    }
}

HK_FN GlobalPtr<u8> plain_at(const Params &p, u64 row, u32 block) {
    return p.plain.row<u8>(0) + row * u64(p.plain.strides[2]) + block * u64(p.plain.strides[3]);
}

HK_FN void shuffle_scalar(const Params &p) {
    for_bytes(p, [&](u64 place, u64 row, u32 block) {
        const bool inside = row < p.rows && block < p.blocks;
        p.shuffled.row<u8>(0)[place] = inside ? *plain_at(p, row, block) : kOne;
    });
}

HK_FN void unshuffle_scalar(const Params &p) {
    for_bytes(p, [&](u64 place, u64 row, u32 block) {
        if (row < p.rows && block < p.blocks) *plain_at(p, row, block) = p.shuffled.row<u8>(0)[place];
    });
}

using Bytes16 = hk::Vec<u32, 4>;
using Ptr16 = GlobalPtr<Bytes16>;

/// A lane's 16 blocks of eight rows, in both orders.
struct Place {
    Ptr16 plain, shuffled;
    i64 row_step;  // in units of 16 bytes, as all here
    u64 row;

    static constexpr int kRows = 8;
    /// Offset of row i from the first: 0 .. 3, 16 .. 19.
    HK_FN static constexpr u32 offset(int i) { return i < 4 ? i : 12 + i; }
    HK_FN Ptr16 in_plain(int i) const { return plain + i64(offset(i)) * row_step; }
    /// Blocks b and b + 4 of eight-block group `half`, b = 0 .. 3, of rows 0 .. 3 and 16 .. 19.
    HK_FN Ptr16 in_shuffled(int half, int b) const { return shuffled + half * 16 + b * 4; }
};

/// Calls `f(place, full)` for each of this lane's places. `full`: no row of the wave is padding.
template <class F>
HK_FN void for_places(const Params &p, F f) {
    const u32 lanes = 1u << p.strip_lanes;  // lanes that share rows
    const u32 strips = hk::kWaveSize / 4 >> p.strip_lanes;  // strips per wave
    const u32 pieces = p.blocks / 16;
    const u64 all_strips = (u64(p.rows) + 255) / 256 * 8;
    const u32 quarter = hk::thread_x() % 4, lane = hk::thread_x() / 4 % lanes, side = hk::thread_x() / 4 / lanes;
    quant::for_row_tiles((all_strips + strips - 1) / strips, (pieces + lanes - 1) / lanes, [&](u64 group, u32 tile) {
        const u64 strip = group * strips + side;
        const u32 piece = tile * lanes + lane;
        if (piece >= pieces || strip >= all_strips) return;
        const u64 row = strip * 32 + quarter * 4;
        const Place place = {
            reinterpret_cast<Ptr16>(p.plain.row<u8>(row)) + piece,
            reinterpret_cast<Ptr16>(p.shuffled.row<u8>(0)) + strip * 32 * pieces + piece * 32 + quarter,
            p.plain.row_stride() / 16, row};
        f(place, (group + 1) * strips * 32 <= p.rows);
    });
}

HK_FN void shuffle(const Params &p) {
    for_places(p, [&](const Place &place, bool full) {
        Bytes16 plain[Place::kRows];
        if (full) {
#pragma unroll
            for (int i = 0; i < Place::kRows; ++i) plain[i] = *place.in_plain(i);
        } else {
#pragma unroll
            for (int i = 0; i < Place::kRows; ++i) {
                plain[i] = kOne * 0x01010101u;
                if (place.row + Place::offset(i) < p.rows) plain[i] = *place.in_plain(i);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Bytes16 out[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Bytes16 blocks = hk::detail::transpose_bytes(
                    {plain[i][2 * half], plain[4 + i][2 * half], plain[i][2 * half + 1], plain[4 + i][2 * half + 1]});
#pragma unroll
                for (int b = 0; b < 4; ++b) out[b][i] = blocks[b];
            }
#pragma unroll
            for (int b = 0; b < 4; ++b) *place.in_shuffled(half, b) = out[b];
        }
    });
}

HK_FN void unshuffle(const Params &p) {
    for_places(p, [&](const Place &place, bool full) {
        Bytes16 plain[Place::kRows];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Bytes16 in[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) in[b] = *place.in_shuffled(half, b);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Bytes16 rows = hk::detail::transpose_bytes({in[0][i], in[1][i], in[2][i], in[3][i]});
                plain[i][2 * half] = rows[0], plain[4 + i][2 * half] = rows[1];
                plain[i][2 * half + 1] = rows[2], plain[4 + i][2 * half + 1] = rows[3];
            }
        }
#pragma unroll
        for (int i = 0; i < Place::kRows; ++i) {
            if (full || place.row + Place::offset(i) < p.rows) *place.in_plain(i) = plain[i];
        }
    });
}
}  // namespace

HK_ENTRY(scales_shuffle, hk::kWaveSize, shuffle)
HK_ENTRY(scales_unshuffle, hk::kWaveSize, unshuffle)
HK_ENTRY(scales_shuffle_scalar, hk::kWaveSize, shuffle_scalar)
HK_ENTRY(scales_unshuffle_scalar, hk::kWaveSize, unshuffle_scalar)
