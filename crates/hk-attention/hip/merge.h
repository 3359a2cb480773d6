// merge.h: partial results of parts of the keys, in ascending order: the same bits each time.
//   M = max over s of m[s];  w[s] = 2^(m[s] - M);  total = sum of w l + 2^(sink - M)
//   out = sum of (w / total) acc;  lse = ln 2 (M + log2 total)
// Of one part that has keys the bits are those of a launch without parts.
#pragma once

#include "outputs.h"

#include <hk/math.h>

namespace attention {

/// Calls `use(load(s))` for s < count in ascending order, with kAhead loads in flight.
template <int kAhead>
HK_FN void each_part(u32 count, auto load, auto use) {
    for (u32 first = 0; first < count; first += kAhead) {
        decltype(load(0u)) values[kAhead];
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) values[i] = load(first + i < count ? first + i : count - 1);
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) {
            if (first + i < count) use(values[i]);
        }
    }
}

/// A row of `count` parts. `sums(s)`: the base of part s, in units of log2, and its sum of exponentials.
template <int kAhead, class Sums>
class MergedRow {
    u32 count_;
    Sums sums_;
    float base_, total_;

  public:
    /// `sink`, in natural units: one more score, without a value; -inf: none.
    HK_FN MergedRow(u32 count, float sink, Sums sums) : count_(count), sums_(sums) {
        sink *= kLog2E;
        float most = sink;
        each_part<kAhead>(count, sums, [&](Vec<float, 2> part) { most = __builtin_fmaxf(most, part[0]); });
        base_ = most == kMinusInf ? 0.0f : most;
        total_ = hk::exp2_fast(sink - base_);
        each_part<kAhead>(count, sums, [&](Vec<float, 2> part) {
            total_ = __builtin_fmaf(part[1], hk::exp2_fast(part[0] - base_), total_);
        });
    }

    template <int kRuns>
    struct Runs {
        Vec<float, 4> of[kRuns];
    };
    /// Runs of four columns. `acc(s, run)`: those of part s. Loads of kParts parts are in flight.
    template <int kRuns, int kParts>
    HK_FN Runs<kRuns> runs(auto acc) const {
        struct Part {
            Vec<float, 2> sums;
            Vec<float, 4> acc[kRuns];
        };
        Runs<kRuns> sum = {};
        each_part<kParts>(
            count_,
            [&](u32 s) {
                Part part = {sums_(s), {}};
#pragma unroll
                for (int run = 0; run < kRuns; ++run) part.acc[run] = acc(s, run);
                return part;
            },
            [&](const Part &part) {
                const float weight = hk::exp2_fast(part.sums[0] - base_);
                // Parts without a visible key have no sums of values. One whose scores are NaN weighs nothing, and makes the total NaN.
                if (weight == 0.0f && total_ == total_) return;
#pragma unroll
                for (int run = 0; run < kRuns; ++run) sum.of[run] += part.acc[run] * (weight / total_);
            });
        return sum;
    }
    /// Four columns. `acc(s)`: those of part s.
    HK_FN Vec<float, 4> merged(auto acc) const {
        return runs<1, kAhead>([&](u32 s, int) { return acc(s); }).of[0];
    }
    HK_FN float lse() const { return total_ == 0.0f ? kMinusInf : (base_ + hk::log2_fast(total_)) * kLn2; }
};
template <int kAhead, class Sums>
HK_FN MergedRow<kAhead, Sums> merged_row(u32 count, float sink, Sums sums) {
    return {count, sink, sums};
}

/// The sink of a head, -inf without one.
HK_FN float sink_of(const Params &p, u32 head) {
    return p.scores.sink ? reinterpret_cast<GlobalPtr<const float>>(p.scores.sink)[head] : kMinusInf;
}

}  // namespace attention
