// softmax.h: online softmax of a wave's tile of scores S^T (WaveTile: n are keys, m are rows).
// Source: Milakov and Gimelshein 2018, algorithm 3.
#pragma once

#include "outputs.h"

#include <hk/arch.h>
#include <hk/math.h>
#include <hk/matrix.h>
#include <hk/mma.h>
#include <hk/types.h>
#include <hk/wave.h>
#include <hk/wave_tile.h>

namespace attention {

/// MMA tiles along n.
template <class Tile>
inline constexpr int kTiles = sizeof(Tile::acc[0]) / sizeof(Tile::acc[0][0]);

/// Replaces a lane's accumulators of its row `r`, two of neighbouring n at a time, by `f(i, pair)`: i is the index of the first one.
template <class Tile>
HK_FN void map_pairs(Tile &tile, u32 r, auto f) {
    constexpr int kElements = hk::AccLayout<Tile::kDim>::kElements;
#pragma unroll
    for (int t = 0; t < kTiles<Tile>; ++t) {
        auto &acc = tile.acc[0][t];
#pragma unroll
        for (int i = 0; i < kElements; i += 2) {
            if (u32(i) / hk::kMmaRows % hk::kRowsPerLane != r) continue;
            const Vec<float, 2> pair = f(t * kElements + i, Vec<float, 2>{acc[i], acc[i + 1]});
            acc[i] = pair[0], acc[i + 1] = pair[1];
        }
    }
}

/// What exponentials relative to `own` are multiplied by to be relative to `base`, a maximum that `own` is among.
HK_FN float rescaled(float own, float base) { return hk::exp2_fast(own - (base == kMinusInf ? 0.0f : base)); }

struct FinishedRow {
    float factor, lse;
};
/// What the accumulators of a row of OnlineSoftmax::sums `sums` are multiplied by at the end, and the row's LSE. `sink`, in natural
/// units: one more score, without a value; -inf: none. As merge.h does it, so that the bits are the same.
HK_FN FinishedRow finish_row(Vec<float, 2> sums, float sink = kMinusInf) {
    sink *= kLog2E;
    const float most = __builtin_fmaxf(sums[0], sink), base = most == kMinusInf ? 0.0f : most;
    const float keep = hk::exp2_fast(sums[0] - base), total = __builtin_fmaf(sums[1], keep, hk::exp2_fast(sink - base));
    return total == 0.0f ? FinishedRow{0.0f, kMinusInf}
                         : FinishedRow{keep * (1.0f / total), (base + hk::log2_fast(total)) * kLn2};
}

/// Maximum, in units of log2, and the lane's part of the sum, of each of the lane's rows. Exponents are relative to a base that
/// follows the maximum when that has grown by kSlack or more: accumulators are rarely rescaled. What a row does depends on that row
/// alone: a factor of 1 is exact.
///
/// P: what pack_positive makes of the probabilities, the base being a little below the maximum.
/// fp8: by kLift, so that the largest one is near the type's, 240 or 448, and small ones are numbers; the factor is part of the sum, too.
/// Cut ones: by kCut, so that they are right on average; sums() takes it back.
template <int kDim, class P>
class OnlineSoftmax {
    static constexpr bool kFp8 = __is_same(P, hk::Fp8);
    static constexpr float kSlack = kFp8 ? 3.0f : 8.0f;
    static constexpr float kCut = hk::kCutBits<P>;
    static constexpr float kLift = !kFp8 ? kCut : hk::kFp8IsFnuz ? 4.0f : 5.0f;
    float base_[hk::kRowsPerLane];  // 0 as long as no score is finite: no -inf - -inf
    float bar_[hk::kRowsPerLane];  // a maximum above it moves the base
    float sum_[hk::kRowsPerLane];

  public:
    HK_FN OnlineSoftmax() {
#pragma unroll
        for (int r = 0; r < hk::kRowsPerLane; ++r) base_[r] = 0.0f, bar_[r] = kMinusInf, sum_[r] = 0.0f;
    }

    /// Turns scores, to be multiplied by `scale` > 0, into probabilities relative to the base; `o` is rescaled. Masked scores are
    /// -inf. A NaN makes its row's sum NaN. Scores have kBias added; the offset of the exponents takes it away, rounded once for a tile.
    template <float kBias = 0.0f, class S, class O>
    HK_FN void update(S &s, O &o, float scale) {
        float top[hk::kRowsPerLane];
        bool grows = false;
#pragma unroll
        for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
            top[r] = (hk::reduce_over_lane_groups<kDim>(largest(s, r), Larger{}) - kBias) * scale;
            grows |= top[r] > bar_[r];
        }
        if (hk::ballot(grows) != 0) rescale(top, o);
#pragma unroll
        for (u32 r = 0; r < hk::kRowsPerLane; ++r) exponentiate<kBias>(s, r, scale);
    }

    /// The base of row `r`, -inf without a visible key, and the sum of its exponentials.
    HK_FN Vec<float, 2> sums(u32 r) const {
        const float sum = hk::reduce_over_lane_groups<kDim>(sum_[r], hk::Sum{});
        return {bar_[r] > kMinusInf ? base_[r] + kCut : kMinusInf, sum * __builtin_exp2f(-kCut)};
    }

  private:
    /// A NaN is as good as any number: its row's sum is NaN.
    struct Larger {
        HK_FN float operator()(float a, float b) const { return hk::max3(a, b, b); }
    };

    template <class S>
    HK_FN static float largest(S &s, u32 r) {
        // The compiler knows no wait states between MFMAs and inline assembly: max3 depends on an instruction that has read each MFMA's
        // result. Two chains: the compiler has an instruction that depends on inline assembly wait.
        float first = __builtin_canonicalizef(s.acc[0][0][r * hk::kMmaRows]);
#pragma unroll
        for (int t = 1; t < kTiles<S>; ++t) first = __builtin_fmaxf(first, s.acc[0][t][r * hk::kMmaRows]);
        float most[2] = {first, first};
        map_pairs(s, r, [&](int i, Vec<float, 2> pair) {
            most[i / 2 % 2] = hk::max3(most[i / 2 % 2], pair[0], pair[1]);
            return pair;
        });
        return Larger{}(most[0], most[1]);
    }

    template <class O>
    HK_FN void rescale(const float (&top)[hk::kRowsPerLane], O &o) {
#pragma unroll
        for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
            const bool grows = top[r] > bar_[r];
            const float base = grows ? top[r] - kLift : base_[r];
            const float factor = bar_[r] > kMinusInf ? hk::exp2_fast(base_[r] - base) : 1.0f;
            base_[r] = base;
            bar_[r] = grows ? top[r] + kSlack : bar_[r];
            sum_[r] *= factor;
            map_pairs(o, r, [&](int, Vec<float, 2> pair) { return pair * factor; });
        }
    }

    template <float kBias>
    HK_FN float offset(u32 r, float scale) const {
        if constexpr (kBias != 0.0f) return __builtin_fmaf(kBias, scale, base_[r]);
        return base_[r];
    }

    template <float kBias, class S>
    HK_FN void exponentiate(S &s, u32 r, float scale) {
        Vec<float, 2> sum = 0.0f;
        map_pairs(s, r, [&](int, Vec<float, 2> pair) {
            if constexpr (hk::kMmaBlocksPackedF32) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    pair[i] = hk::exp2_fast(__builtin_fmaf(pair[i], scale, -offset<kBias>(r, scale)));
                    sum[0] += pair[i];
                }
            } else {
                using Pair = Vec<float, 2>;
                pair = hk::exp2_fast(__builtin_elementwise_fma(pair, Pair(scale), Pair(-offset<kBias>(r, scale))));
                sum += pair;
            }
            return pair;
        });
        sum_[r] += sum[0] + sum[1];
    }
};

}  // namespace attention
