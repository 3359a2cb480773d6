// bitmatrix.hip: how many tokens have each expert, and how many before each part of the tokens (moe_bitmatrix)
//   bits      [words, rows] u32       bit e % 32 of word e / 32 of a token: it has expert e
//   counts    [32 words] i32          tokens with expert e
//   partials  [parts, 32 words] i32   those before the part
// How the work is split
//   A block of 16 waves for each word, a wave for a share of the tokens. Lanes transpose the bits of 32 tokens, so that each lane has
//   those of one expert. Shares are counted, then scanned, then counted again for the parts.
// Floor
//   The bits are read twice, the second time from cache; the counts are written once.

#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/wave.h>

namespace bitmatrix {
using hk::u32;
using hk::u64;

struct Params {
    u64 bits, counts, partials;
    u32 tokens, rows, words;
    u32 per_part;  // steps of 32 tokens in a part
};
}  // namespace bitmatrix

namespace {
using namespace bitmatrix;

constexpr int kWaves = 16;
/// Tokens, and experts of a word.
constexpr u32 kStep = 32;
constexpr u32 kHalves = hk::kWaveSize / kStep;

template <class T>
HK_FN hk::GlobalPtr<T> at(u64 address) {
    return reinterpret_cast<hk::GlobalPtr<T>>(address);
}

/// One step of a transposition: exchanges the bits that are not of `Mask` in lanes without the bit `Apart` with those of `Mask` in the
/// others.
template <int Apart, u32 Mask>
HK_FN u32 exchange(u32 v) {
    const u32 other = hk::shuffle_xor<Apart>(v);
    const bool upper = hk::lane_id() & Apart;
    return upper ? (v & ~Mask) | (other >> Apart & Mask) : (v & Mask) | (other & Mask) << Apart;
}

/// Transposes the bits of each 32 lanes: bit r of lane b was bit b of lane r.
HK_FN u32 transpose_bits(u32 v) {
    v = exchange<16, 0x0000ffffu>(v);
    v = exchange<8, 0x00ff00ffu>(v);
    v = exchange<4, 0x0f0f0f0fu>(v);
    v = exchange<2, 0x33333333u>(v);
    return exchange<1, 0x55555555u>(v);
}

/// Calls `f(from, count)` for each wave's worth of tokens: of the lane's 32, those with its expert.
template <class F>
HK_FN void for_tokens(const Params &p, u32 first, u32 end, F f) {
    const auto bits = at<const u32>(p.bits) + u64(hk::block_x()) * p.rows;
    for (u32 from = first; from < end; from += hk::kWaveSize) {
        const u32 token = from + hk::lane_id();
        f(from, u32(__builtin_popcount(transpose_bits(token < p.tokens ? bits[token] : 0))));
    }
}

/// The same lane's of the other half of a wave, where there is one.
HK_FN u32 other_half(u32 v) {
    if constexpr (kHalves == 2)
        return hk::shuffle_xor<hk::kWaveSize / 2>(v);
    else
        return 0;
}

HK_FN void sum(const Params &p) {
    __shared__ u32 sums[kWaves][kStep];
    const u32 wave = hk::wave_id(), lane = hk::lane_id();
    const u32 half = lane / kStep, column = lane % kStep;
    const u32 each = ((p.tokens + kWaves - 1) / kWaves + hk::kWaveSize - 1) / hk::kWaveSize * hk::kWaveSize;
    const u32 first = wave * each;
    const u32 end = first + each < p.tokens ? first + each : p.tokens;
    u32 total = 0;
    for_tokens(p, first, end, [&](u32, u32 count) { total += count; });
    total += other_half(total);
    if (half == 0) sums[wave][column] = total;
    hk::block_barrier();
    const u32 cols = p.words * kStep, expert = hk::block_x() * kStep + column;
    u32 before = 0;
    for (u32 w = 0; w < wave; ++w) before += sums[w][column];
    if (wave == kWaves - 1 && half == 0) at<u32>(p.counts)[expert] = before + total;
    const auto partials = at<u32>(p.partials);
    for_tokens(p, first, end, [&](u32 from, u32 count) {
        const u32 other = other_half(count), step = from / kStep + half;
        if (step * kStep < p.tokens && step % p.per_part == 0)
            partials[u64(step / p.per_part) * cols + expert] = before + (half == 0 ? 0 : other);
        before += count + other;
    });
}
}  // namespace

// The entry point, as in src/bitmatrix.rs.
HK_ENTRY(bitmatrix_sum, (kWaves * hk::kWaveSize), sum)
