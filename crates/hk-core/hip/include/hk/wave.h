// wave.h: exchange between lanes of a wave through registers: shuffles, ballots, reductions, scans.
#pragma once

#include <hk/arch.h>

namespace hk {

struct Sum {
    HK_FN float operator()(float a, float b) const {
        // No contraction to an fma: two lanes that add the same two values in either order must round alike.
#pragma clang fp contract(off)
        return a + b;
    }
};

/// The smaller.
struct Min {
    HK_FN u32 operator()(u32 a, u32 b) const { return a < b ? a : b; }
};

/// The larger; of a NaN and a number, the number.
struct Max {
    HK_FN float operator()(float a, float b) const { return __builtin_fmaxf(a, b); }
    HK_FN u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

}  // namespace hk

#include HK_TARGET_HEADER(wave.h)

namespace hk {

/// Index of this wave in its block, in a scalar register. A block is one-dimensional.
HK_FN u32 wave_id() { return uniform(thread_x() / kWaveSize); }

/// Transposes 2 x 2 matrices. Lanes that differ in the bit `Mask` hold the two rows, the upper lane the second; `a` and `b` are the
/// columns. All lanes take part.
template <int Mask, class T>
HK_FN void transpose_lanes(T &a, T &b) {
    static_assert((Mask & (Mask - 1)) == 0, "one bit");
    const bool upper = lane_id() & Mask;
    const T from_b = shuffle_xor<Mask>(b), from_a = shuffle_xor<Mask>(a);
    a = upper ? from_b : a;
    b = upper ? b : from_a;
}

/// Broadcasts the last lane: after a scan, the total. T has 4 or 8 bytes.
template <class T>
HK_FN T last_lane(T v) {
    return broadcast(v, kWaveSize - 1);
}

}  // namespace hk
