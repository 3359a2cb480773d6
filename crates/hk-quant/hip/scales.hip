// scales.hip: e8m0 scales [rows, blocks] to and from the order in which gfx950's matrix instructions read them: rows padded to
// a multiple of 256, blocks to one of 8 (mx::shuffled_index)
//   plain     [rows, blocks]  e8m0   any strides
//   shuffled  [n]             e8m0   contiguous, on 4 bytes
// A thread has 4 bytes of the shuffled order, those of rows r and r + 16 and blocks b and b + 4. Floor: each byte once.
#include <hk/entry.h>
#include <hk/global.h>

#include "mx.h"

namespace {
using hk::u32;
using hk::u64;
using hk::u8;

struct Params {  // same fields, same order as `Params` in src/scales.rs
    hk::Global plain, shuffled;
    u64 words;  // of the shuffled order
    u32 rows, blocks;
};

constexpr u8 kOne = 127;  // padding

/// Calls `f(place, row, block)` for each byte of each word of this thread.
template <class F>
HK_FN void for_bytes(const Params &p, F f) {
    const u64 strip_words = (p.blocks + 7) / 8 * 64;  // of 32 rows
    for (u64 word = u64(hk::block_x()) * 256 + hk::thread_x(); word < p.words; word += u64(hk::grid_x()) * 256) {
        const u64 strip = word / strip_words;
        const u32 in_strip = u32(word % strip_words);
        const u32 block = in_strip / 64 * 8 + in_strip % 64 / 16;
        const u64 row = strip * 32 + in_strip % 16;
        for (u32 byte = 0; byte < 4; ++byte) f(4 * word + byte, row + byte % 2 * 16, block + byte / 2 * 4);
    }
}

HK_FN hk::GlobalPtr<u8> plain_at(const Params &p, u64 row, u32 block) {
    return p.plain.row<u8>(0) + row * u64(p.plain.strides[2]) + block * u64(p.plain.strides[3]);
}

HK_FN void shuffle(const Params &p) {
    for_bytes(p, [&](u64 place, u64 row, u32 block) {
        const bool inside = row < p.rows && block < p.blocks;
        p.shuffled.row<u8>(0)[place] = inside ? *plain_at(p, row, block) : kOne;
    });
}

HK_FN void unshuffle(const Params &p) {
    for_bytes(p, [&](u64 place, u64 row, u32 block) {
        if (row < p.rows && block < p.blocks) *plain_at(p, row, block) = p.shuffled.row<u8>(0)[place];
    });
}

HK_FN void pad(const Params &p) {
    for_bytes(p, [&](u64 place, u64 row, u32 block) {
        if (row >= p.rows || block >= p.blocks) p.shuffled.row<u8>(0)[place] = kOne;
    });
}
}  // namespace

HK_ENTRY(scales_shuffle, 256, shuffle)
HK_ENTRY(scales_unshuffle, 256, unshuffle)
HK_ENTRY(scales_pad, 256, pad)
