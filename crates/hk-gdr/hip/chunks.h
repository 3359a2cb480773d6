// chunks.h: the chunks of packed sequences, found by waves.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/wave.h>

namespace gdr {

/// Calls `f(first, rows, in_range)` for each chunk of `chunk` tokens that begins among the tokens of a run, `run * chunk` to
/// `(run + 1) * chunk`: at most one of each sequence. All of it is wave-uniform. `starts` is i32 [sequences + 1], or 0: then all tokens are
/// one sequence. Starts are clamped to the tokens; `in_range` is false for those of a sequence that had to be.
template <class F>
HK_FN void for_chunks(hk::u64 starts, hk::u32 sequences, hk::u32 tokens, hk::u32 chunk, hk::u32 run, F f) {
    using hk::i32;
    using hk::u32;
    const u32 from = run * chunk, to = tokens - from < chunk ? tokens : from + chunk;
    const i32 all = i32(tokens);
    const auto start = [&](u32 n) { return hk::load_uniform<i32>(starts + 4 * hk::u64(n)); };
    const u32 count = starts ? sequences : 1;
    // The last sequence that begins at or before this run, or the first.
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (start(middle) <= i32(from)) {
            low = middle;
        } else {
            high = middle;
        }
    }
    for (u32 n = low; n < count; ++n) {
        const i32 begin = starts ? start(n) : 0, end = starts ? start(n + 1) : all;
        const u32 first = u32(begin < 0 ? 0 : begin < all ? begin : all);
        const u32 last = end < i32(first) ? first : u32(end < all ? end : all);
        if (first >= to) break;
        const u32 at = first >= from ? first : first + (from - first + chunk - 1) / chunk * chunk;
        if (at >= to || at >= last) continue;
        f(at, last - at < chunk ? last - at : chunk, begin >= 0 && begin <= end && end <= all);
    }
}

/// Sums of the logarithms of decays of a chunk's tokens, as many at a time as a wave has lanes, in f64: those of a token do not depend on later
/// ones. A gate that is positive or NaN makes them NaN. One below -150 counts as -150: its exponential is 0 in f32, while sums after it still
/// differ by what their gates are.
struct GateSums {
    double before = 0.0;

    HK_FN static double checked(float gate) {
        return double(gate <= 0.0f ? __builtin_fmaxf(gate, -150.0f) : __builtin_nanf(""));
    }

    /// The sum up to the lane's token. All lanes take part, in the order of tokens.
    HK_FN float add(float gate) {
        const double sum = before + hk::wave_scan(checked(gate));
        before = hk::last_lane(sum);
        return float(sum);
    }
};

}  // namespace gdr
