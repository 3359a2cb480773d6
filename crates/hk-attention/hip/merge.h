// merge.h: partial results of parts of the keys, in ascending order: the same bits each time.
//   M = max over s of m[s];  w[s] = 2^(m[s] - M);  total = sum of w l + 2^(sink - M)
//   out = sum of (w (1 / total)) acc;  lse = ln 2 (M + log2 total)
// Of one part that has keys the bits are those of a launch without parts.
#pragma once

#include "outputs.h"

#include <hk/math.h>
#include <hk/wave.h>

namespace attention {

/// As instructions make it: a row of NaN has the same bits with splits and without.
#if defined(HK_AMD)
constexpr float kNan = __builtin_nanf("");
#else
constexpr float kNan = __builtin_nanf("0x3fffff");
#endif

/// Calls `use(load(s), true)` for s < count in ascending order, with kAhead loads in flight; past the last one it gets that again, and false.
/// `use` does not branch: compilers move a load to the branch that uses it, and then the loads wait for each other.
template <int kAhead>
HK_FN void each_part(u32 count, auto load, auto use) {
    for (u32 first = 0; first < count; first += kAhead) {
        decltype(load(0u)) values[kAhead];
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) values[i] = load(first + i < count ? first + i : count - 1);
        hk::sched_barrier();
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) use(values[i], first + i < count);
    }
}

/// Of parts first, first + kStep and so on below `count`: store(s, load(s)), with four loads in flight. Past the last part `store` gets
/// that again, with numbers below kMost.
template <u32 kStep, u32 kMost>
HK_FN void copy_parts(u32 first, u32 count, auto load, auto store) {
    constexpr u32 kAhead = 4;
    static_assert(kMost % (kAhead * kStep) == 0);
    for (u32 s = first; s < count; s += kAhead * kStep) {
        decltype(load(0u)) values[kAhead];
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) values[i] = load(s + i * kStep < count ? s + i * kStep : count - 1);
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) store(s + i * kStep, values[i]);
    }
}

/// Adds the factor's share of a part. A factor of 0 adds nothing, whatever `acc` is: parts without a visible key have no sums of values.
HK_FN void add_part(Vec<float, 4> &sum, Vec<float, 4> acc, float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __builtin_fmaf(factor != 0.0f ? acc[i] : 0.0f, factor, sum[i]);
}

template <int kRuns>
struct FourColumns {
    Vec<float, 4> of[kRuns];
};
/// Runs of four columns: the sum of factor(of(s)) acc(s, run), in ascending order, with the loads of kParts parts in flight.
template <int kRuns, int kParts>
HK_FN FourColumns<kRuns> sum_of_parts(u32 count, auto of, auto factor, auto acc) {
    struct Part {
        decltype(of(0u)) of;
        Vec<float, 4> acc[kRuns];
    };
    FourColumns<kRuns> sum = {};
    each_part<kParts>(
        count,
        [&](u32 s) {
            Part part = {of(s), {}};
#pragma unroll
            for (int run = 0; run < kRuns; ++run) part.acc[run] = acc(s, run);
            return part;
        },
        [&](const Part &part, bool there) {
            const float weight = there ? factor(part.of) : 0.0f;
#pragma unroll
            for (int run = 0; run < kRuns; ++run) add_part(sum.of[run], part.acc[run], weight);
        });
    return sum;
}

/// A row of `count` parts.
class MergedRow {
    float base_, total_, inverse_;

    MergedRow() = default;

  public:
    /// `sink`, in natural units: one more score, without a value; -inf: none. `sums(s)`: the base of part s, in units of log2, and its sum
    /// of exponentials; kAhead of them are in flight.
    template <int kAhead>
    HK_FN static MergedRow of(u32 count, float sink, auto sums) {
        MergedRow row;
        sink *= kLog2E;
        float most = sink;
        each_part<kAhead>(count, sums, [&](Vec<float, 2> part, bool) { most = __builtin_fmaxf(most, part[0]); });
        row.base_ = most == kMinusInf ? 0.0f : most;
        row.total_ = hk::exp2_fast(sink - row.base_);
        each_part<kAhead>(count, sums, [&](Vec<float, 2> part, bool there) {
            const float sum = __builtin_fmaf(part[1], hk::exp2_fast(part[0] - row.base_), row.total_);
            row.total_ = there ? sum : row.total_;
        });
        row.invert();
        return row;
    }
    /// The same, found by the kPlaces lanes of a group together, all of which take part. `at(s)`: the sums of part s in LDS. Factors take
    /// the place of bases, and 0 that of up to 15 parts that are not there, to a multiple of 16.
    template <u32 kPlaces>
    HK_FN static MergedRow together(u32 count, float sink, u32 place, auto at) {
        MergedRow row;
        sink *= kLog2E;
        float most = sink;
        for (u32 s = place; s < count; s += kPlaces) most = __builtin_fmaxf(most, at(s)[0]);
        most = hk::group_reduce<kPlaces>(most, hk::Max());
        row.base_ = most == kMinusInf ? 0.0f : most;
        const u32 padded = (count + 15) / 16 * 16;
        for (u32 s = place; s < padded; s += kPlaces) {
            const Vec<float, 2> part = at(s), weighted = {hk::exp2_fast(part[0] - row.base_), part[1]};
            at(s) = s < count ? weighted : Vec<float, 2>(0.0f);
        }
        hk::wave_barrier();
        row.total_ = hk::exp2_fast(sink - row.base_);
        for (u32 first = 0; first < count; first += 8) {
            Vec<float, 2> parts[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) parts[i] = at(first + i);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) row.total_ = __builtin_fmaf(parts[i][1], parts[i][0], row.total_);
        }
        row.invert();
        hk::wave_barrier();
        for (u32 s = place; s < count; s += kPlaces) at(s)[0] *= row.inverse_;
        return row;
    }
    /// w / total of a part. One whose scores are NaN weighs nothing, and makes the total NaN.
    HK_FN float factor(Vec<float, 2> sums) const { return hk::exp2_fast(sums[0] - base_) * inverse_; }
    HK_FN float lse() const { return total_ == 0.0f ? kMinusInf : (base_ + hk::log2_fast(total_)) * kLn2; }

  private:
    HK_FN void invert() { inverse_ = total_ == 0.0f ? 0.0f : 1.0f / total_; }
};

/// The sink of a head, -inf without one.
HK_FN float sink_of(const Params &p, u32 head) {
    return p.scores.sink ? reinterpret_cast<GlobalPtr<const float>>(p.scores.sink)[head] : kMinusInf;
}

}  // namespace attention
