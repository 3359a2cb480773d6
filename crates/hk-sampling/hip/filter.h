// filter.h: the tokens of a row that the filters keep, and the one of them that a uniform number draws.
//   kept(i)  <=>  #{j : P_j > P_i} < k  and  sum{P_j : P_j > P_i} < p  and  P_i >= min_p * max_j P_j  and  P_i > 0
//   id       =    the smallest kept i with  sum{P_j : j <= i, kept} >= u * sum{P_j : kept}
// Source: top-p Holtzman et al. 2020, min-p Nguyen et al. 2024.
//
// How
//   Each filter keeps all tokens from some probability on, so all filters are one threshold: the largest of theirs. The bits
//   of a positive f32 have the order of its value, so radix select finds the threshold digit by digit from the top: a
//   histogram of the next digit over the tokens with the prefix so far, then a scan from its upper end to the bin where the
//   count reaches k or the mass reaches p. That takes at most 3 histograms (4 in blocks of one wave).
// Exactness
//   A bin lies within one exponent, so mantissas add up as integers: a cell counts its tokens and sums their lower bits, in
//   rows.hip in one 64-bit cell, with LDS atomics, which commute. Only sums over bins round, in f64, in an order that the
//   number of bins fixes: the relative error of a mass is at most 2^-45, and results are deterministic: they do not depend
//   on the order of the atomics, the grid or other rows.
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/math.h>
#include <hk/philox.h>
#include <hk/reg.h>
#include <hk/rows.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace sampling {

using hk::Access;
using hk::i32;
using hk::kWaveSize;
using hk::RowBatch;
using hk::u32;
using hk::u64;

inline constexpr u32 kInfinity = 0x7f800000u;
inline constexpr u32 kNone = 0xffffffffu;  // no thread, no token yet, a disabled filter
inline constexpr u32 kNoToken = 0xfffffffeu;  // a token beyond every row; not `kNone`

/// The bits of a clean probability, which have its order; 0 for tokens that cannot be drawn.
HK_FN u32 key_of(float probability) { return __builtin_bit_cast(u32, probability); }

HK_FN float value_of(u32 key) { return __builtin_bit_cast(float, key); }

/// One unit of the mantissa, 2^(exponent - 150).
HK_FN double unit_of(u32 key) {
    const u32 exponent = key >> 23;
    return __builtin_bit_cast(double, u64((exponent ? exponent : 1u) + (1023u - 150u)) << 52);
}

/// Tokens of one bin: their number, and the sum of their keys minus the least key of the bin.
struct Bin {
    u32 count;
    u64 rest;

    HK_FN double mass(u32 least_key) const {
        // The bins of infinity and NaN are empty.
        const double least = count != 0 ? double(value_of(least_key)) : 0.0;
        return __builtin_fma(double(count), least, double(rest) * unit_of(least_key));
    }
};

/// A bin in 64 bits, so that one atomic adds a token. The sum does not carry into the count with 2^24 - 1 tokens in bins 2^11
/// wide, or 2^17 tokens in bins 2^22 wide.
class Cell {
    static constexpr int kRestBits = 40;
    u64 bits_;

  public:
    HK_FN static u64 tokens(u32 count, u32 rest) { return u64(count) << kRestBits | rest; }
    HK_FN explicit Cell(u64 bits) : bits_(bits) {}
    HK_FN Bin bin() const { return {u32(bits_ >> kRestBits), bits_ & ((u64(1) << kRestBits) - 1)}; }
};

using hk::lds_atomic_add;

/// The filters of one row, each disabled by a value that it never reaches.
struct Filters {
    u32 k;
    double p;
    u32 min_key;  // least key that min-p keeps; at least 1
    bool p_of_total = false;  // p is still to be multiplied by the mass of the row
};

/// Tokens and their mass.
struct Amount {
    u32 count;
    double mass;

    HK_FN void operator+=(const Amount &other) {
        count += other.count;
        mass += other.mass;
    }
};

/// Radix select of the threshold: the prefix found so far, and the tokens above it.
struct Search {
    u32 prefix = 0;
    u32 active = 0;  // kK | kP | kMin: the filters whose threshold has this prefix
    Amount above = {};
    Amount in = {};  // with the prefix
    Amount all = {};  // in and above the bins of the last step

    static constexpr u32 kK = 1, kP = 2, kMin = 4;  // in the order of `digits` in `step`

    /// The remaining bits make no difference: the prefix, padded with zeros, is a threshold.
    HK_FN bool done() const { return active == 0 || (active < kMin && in.count == 1); }
    HK_FN u32 kept_count() const { return above.count + in.count; }
    HK_FN double kept_mass() const { return above.mass + in.mass; }
};

/// LDS of sums over the threads of a block.
template <int Threads>
struct ScanScratch {
    double mass[Threads / kWaveSize];
    u32 count[Threads / kWaveSize];
};

/// Adds the sums of the waves below this one to `before`, and those of all waves to `all`.
template <u32 kWaves, class T>
HK_FN void sum_waves(const T *of_wave, T &before, T &all) {
    const u32 wave = hk::wave_id();
    if constexpr (kWaves <= 4) {
#pragma unroll
        for (u32 w = 0; w < kWaves; ++w) {
            before += w < wave ? of_wave[w] : T(0);
            all += of_wave[w];
        }
    } else {
        u32 lane = hk::lane_id();
        hk::opaque(lane);  // keeps the compiler from holding lane masks in SGPRs across calls
        const T up_to = hk::wave_scan(lane < kWaves ? of_wave[lane] : T(0));
        if (wave > 0) before += hk::broadcast(up_to, wave - 1);
        all += hk::broadcast(up_to, kWaves - 1);
    }
}

/// Inclusive scan of `v` over the block, on top of `all`; then adds the block's total to `all`. All threads of the block call
/// it. The caller puts a barrier before the next use of the scratch.
template <int Threads>
HK_FN void block_scan(Amount &v, Amount &all, ScanScratch<Threads> &scratch) {
    constexpr u32 kWaves = Threads / kWaveSize;
    v = {hk::wave_scan(v.count), hk::wave_scan(v.mass)};
    Amount base = all;
    if constexpr (kWaves == 1) {
        all += {hk::last_lane(v.count), hk::last_lane(v.mass)};
    } else {
        u32 lane = hk::lane_id();
        hk::opaque(lane);
        if (lane == kWaveSize - 1) {
            scratch.count[hk::wave_id()] = v.count;
            scratch.mass[hk::wave_id()] = v.mass;
        }
        hk::block_barrier();
        sum_waves<kWaves>(scratch.count, base.count, all.count);
        sum_waves<kWaves>(scratch.mass, base.mass, all.mass);
    }
    v += base;
}

/// LDS of a radix select step.
template <int Threads>
struct StepScratch {
    ScanScratch<Threads> scan;
    Amount above;
    Amount in;
    u32 digit_k;
    u32 digit_p;
};

/// A digit of a key.
struct Digit {
    u32 shift;
    u32 mask;

    /// The digit of up to `bits` bits below bit `top`.
    HK_FN static Digit below(u32 top, u32 bits) {
        bits = bits < top ? bits : top;
        return {top - bits, (1u << bits) - 1};
    }
    HK_FN u32 of(u32 key) const { return key >> shift & mask; }
    HK_FN u32 rest(u32 key) const { return key & ((1u << shift) - 1); }
    HK_FN u64 token(u32 key) const { return Cell::tokens(1, rest(key)); }
};

/// The nonzero keys that have the bits of `prefix` from bit `top` on.
struct Followers {
    u32 least;
    u32 width;

    HK_FN Followers(u32 prefix, u32 top) : least(prefix > 0 ? prefix : 1), width(prefix + (1u << top) - least) {}
    HK_FN bool contain(u32 key) const { return key - least < width; }
};

/// One radix select step: `bin(i)` has the tokens with the prefix of the search and digit i. All threads of the block call it,
/// after a barrier that follows the last write of a bin.
template <int Threads, int Bins, class Reducer, class BinAt>
HK_FN void step(Search &search, Filters &f, Digit at, Reducer &block, StepScratch<Threads> &scratch, BinAt bin) {
    constexpr u32 kEach = Bins > Threads ? Bins / Threads : 1;  // bins per thread, from the top
    const u32 thread = hk::thread_x();
    const auto digit_of = [&](u32 i) { return Bins - 1 - (thread * kEach + i); };
    const bool any = Bins >= Threads || thread < Bins;
    const auto amount_of = [&](u32 digit) {
        const Bin b = bin(digit);
        return Amount{b.count, b.mass(search.prefix + (digit << at.shift))};
    };

    Amount own = {};
    if (any) {
#pragma unroll
        for (u32 i = 0; i < kEach; ++i) {
            // Rotated by lane: no bank conflicts.
            own += amount_of(digit_of((i + thread / 2) % kEach));
        }
    }
    Amount up_to = own;
    search.all = search.above;
    block_scan(up_to, search.all, scratch.scan);
    if (f.p_of_total) {
        f.p *= search.all.mass;
        f.p_of_total = false;
    }
    const Amount before = {up_to.count - own.count, up_to.mass - own.mass};

    // The first thread that reaches k, and the first that reaches p; none means that the filter keeps all bins.
    const u32 reached_k = (search.active & Search::kK) && up_to.count >= f.k ? thread : kNone;
    const u32 reached_p = (search.active & Search::kP) && up_to.mass >= f.p ? thread : kNone;
    const u32 thread_k = block.reduce(reached_k, hk::Min{});
    const u32 thread_p = block.reduce(reached_p, hk::Min{});
    if (thread == 0) {
        if (thread_k == kNone) scratch.digit_k = 0;
        if (thread_p == kNone) scratch.digit_p = 0;
    }
    if (thread == thread_k) {
        u32 count = before.count;
        u32 i = 0;
        for (; i + 1 < kEach; ++i) {
            count += bin(digit_of(i)).count;
            if (count >= f.k) break;
        }
        scratch.digit_k = digit_of(i);
    }
    if (thread == thread_p) {
        double mass = before.mass;
        u32 i = 0;
        for (; i + 1 < kEach; ++i) {
            mass += amount_of(digit_of(i)).mass;
            if (mass >= f.p) break;
        }
        scratch.digit_p = digit_of(i);
    }
    hk::block_barrier();

    u32 digits[3] = {scratch.digit_k, scratch.digit_p, 0};
    if (search.active & Search::kMin) digits[2] = (f.min_key - search.prefix) >> at.shift;
    u32 digit = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) digit = digits[i] > digit ? digits[i] : digit;
    u32 active = search.active;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        if (digits[i] < digit) active &= ~(1u << i);
    }
    // Digit 0 also stands for "keeps all bins"; such a filter is done, as it keeps all below too.
    if (thread_k == kNone) active &= ~Search::kK;
    if (thread_p == kNone) active &= ~Search::kP;

    const u32 place = Bins - 1 - digit;
    if (thread == place / kEach) {
        Amount above = before;
        for (u32 i = 0; i < place % kEach; ++i) above += amount_of(digit_of(i));
        scratch.above = above;
        scratch.in = amount_of(digit);
    }
    hk::block_barrier();
    search.prefix += digit << at.shift;
    search.active = active;
    search.above = scratch.above;
    search.in = scratch.in;
}

/// The softmax of a row of logits.
struct Softmax {
    float max;
    float log2_scale;  // log2(e) / temperature
    float inverse_sum;
    u32 greedy;  // at a temperature of zero the token of probability 1, or kNoToken; else kNone

    HK_FN float exponential(float logit) const { return hk::exp2_fast((logit - max) * log2_scale); }
};

/// Kernel arguments.
struct Params {
    hk::Global x;  // [R, V] T: probabilities, or logits
    hk::Global row_index;  // [B] i32, optional: the row of an output
    hk::Global temperature;  // [R] f32, optional
    hk::Global k;  // [R] i32, optional
    hk::Global p;  // [R] f32, optional
    hk::Global min_p;  // [R] f32, optional
    hk::Global uniform;  // [B] f32, optional: u of an output
    hk::Global ids;  // [B] i32, absent: nothing is drawn
    hk::Global mass;  // [B] f32, optional
    hk::Global count;  // [B] i32, optional
    hk::Global y;  // [R, V] T, optional: the kept probabilities, renormalised
    hk::Global workspace;  // bytes
    u64 seed;
    u64 offset;
    u32 k_value;  // if there is no tensor
    float p_value;
    float min_p_value;
    float temperature_value;
    u32 logits;  // 1: x is logits
    u32 top_k_first;  // 1: p is a share of the mass that top-k and min-p keep
    u32 first;  // first output of this launch
    u32 outputs;  // outputs of this launch
    u32 segments;  // per row
    u32 segment;  // tokens per segment
    u32 share;  // segments per block
    u32 unused;
};

/// Element `i` of a tensor with one axis, or `value` if it is absent.
template <class T>
HK_FN T element_or(const hk::Global &g, u64 i, T value) {
    return g.present() ? g.row<T>(0)[i] : value;
}

/// The row of output `b`; kNoRow if it is out of range.
inline constexpr u64 kNoRow = ~u64(0);
HK_FN u64 row_of(const Params &p, u64 b) {
    if (!p.row_index.present()) return b;
    const i32 row = p.row_index.row<i32>(0)[b];
    return u32(row) < p.x.rows() ? u64(row) : kNoRow;
}

/// Temperature of a row: zero is greedy, others are at least 1e-5.
HK_FN float temperature_of(const Params &p, u64 row) {
    const float t = element_or(p.temperature, row, p.temperature_value);
    return t == 0.0f ? 0.0f : hk::Max{}(t, 1e-5f);
}

/// The filters of a row whose largest key is `max_key`, and in `active` the enabled ones. Disabled: k at least as large as the
/// row, p above one or NaN, min_p not above zero or NaN. At the other end, k and p keep at least the maxima.
HK_FN Filters filters_of(const Params &p, u64 row, u32 max_key, u32 &active) {
    const i32 k = element_or(p.k, row, i32(p.k_value));
    const float top_p = element_or(p.p, row, p.p_value);
    const float min_p = element_or(p.min_p, row, p.min_p_value);
    Filters f = {k > 0 ? u32(k) : 1u, top_p > 0.0f ? double(top_p) : 0x1p-800, 1};
    active = 0;
    if (f.k < p.x.cols()) active |= Search::kK;
    if (top_p <= 1.0f) active |= Search::kP;
    if (min_p > 0.0f) {
        active |= Search::kMin;
        // The product is exact in f64; rounded up to f32.
        const double least = double(min_p < 1.0f ? min_p : 1.0f) * double(value_of(max_key));
        const float rounded = float(least);
        f.min_key = __builtin_bit_cast(u32, rounded) + (double(rounded) < least ? 1u : 0u);
        if (f.min_key == 0) f.min_key = 1;
    }
    return f;
}

/// The number in (0, 1] that draws for output `b`.
HK_FN float uniform_of(const Params &p, u64 b) {
    if (p.uniform.present()) return p.uniform.row<float>(0)[b];
    return hk::unit_interval(hk::philox({u32(p.offset), u32(p.offset >> 32), u32(b), u32(b >> 32)}, p.seed)[0]);
}

HK_FN void write_output(const Params &p, u64 b, u32 id, float mass, u32 count) {
    if (p.ids.present()) p.ids.row<i32>(0)[b] = i32(id);
    if (p.mass.present()) p.mass.row<float>(0)[b] = mass;
    if (p.count.present()) p.count.row<i32>(0)[b] = i32(count);
}

/// Calls `f(value, column)` for every element of a lane's share of a row; `column` is that of its first one. `opaque` keeps the
/// compiler from holding per-element lane masks in SGPRs from one pass to the next.
template <int L, int N, int C, class F>
HK_FN void for_each(hk::Row<float, L, N, C> &row, u32 column, F f) {
    hk::opaque(column);
#pragma unroll
    for (int k = 0; k < C; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float value = row.chunk[k][i];
            hk::opaque(value);
            f(value, column + u32(k * L * N + i));
            row.chunk[k][i] = value;
        }
    }
}

/// Logits to probabilities; 0 for NaN and beyond the row.
template <class RowF>
HK_FN void apply(const Softmax &softmax, RowF &row, u32 column, u32 cols) {
    if (softmax.greedy != kNone) {
        for_each(row, column, [&](float &v, u32 c) { v = c == softmax.greedy ? 1.0f : 0.0f; });
    } else {
        for_each(row, column,
                 [&](float &v, u32 c) { v = c < cols ? softmax.exponential(v) * softmax.inverse_sum : 0.0f; });
    }
}

/// The draw from a part of a row.
struct Drawn {
    u32 first;  // first kept token at which the sum reaches the target, or kNone
    u32 past_last;  // one past the last kept token; 0: none is kept
    double sum;  // up to the end of the part
};

/// LDS of a draw.
template <int Threads, int Chunks>
struct DrawScratch {
    double sums[Chunks * (Threads / kWaveSize)];
};

/// Cleans probabilities: NaN and negative ones become 0. Returns the largest key of the lane's share, `kInfinity` if there is
/// an infinity.
template <class RowF>
HK_FN u32 clean(RowF &row) {
    float max = 0.0f;
    for_each(row, 0, [&](float &v, u32) {
        v = hk::Max{}(v, 0.0f);  // NaN and -0 become +0
        max = hk::Max{}(max, v);
    });
    return key_of(max);
}

/// Prefix sum of the kept probabilities of a clean row, from `sum` on, in the order of tokens; finds where it reaches `target`.
/// All threads of the block call it.
template <int L, int N, int C, class Reducer>
HK_FN Drawn draw(hk::Row<float, L, N, C> &row, u32 column, u32 threshold, double sum, double target, Reducer &block,
                 DrawScratch<L, C> &scratch) {
    constexpr u32 kWaves = L / kWaveSize;
    const u32 wave = hk::wave_id();
    const auto kept = [&](float v) { return v >= value_of(threshold); };
    double own[C], up_to[C];
#pragma unroll
    for (int k = 0; k < C; ++k) {
        own[k] = 0.0;
#pragma unroll
        for (int i = 0; i < N; ++i) own[k] += double(kept(row.chunk[k][i]) ? row.chunk[k][i] : 0.0f);
        up_to[k] = hk::wave_scan(own[k]);
        if (hk::thread_x() % kWaveSize == kWaveSize - 1) scratch.sums[k * kWaves + wave] = up_to[k];
    }
    hk::block_barrier();
    Drawn drawn = {kNone, 0, sum};
#pragma unroll
    for (int k = 0; k < C; ++k) {
        double before = drawn.sum;
        sum_waves<kWaves>(&scratch.sums[k * kWaves], before, drawn.sum);
        before += up_to[k] - own[k];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float v = row.chunk[k][i];
            hk::opaque(v);
            const u32 c = column + u32(k * L * N + i);
            if (kept(v)) {
                before += double(v);
                drawn.past_last = c + 1;
                if (drawn.first == kNone && before >= target) drawn.first = c;
            }
        }
    }
    drawn.first = block.reduce(drawn.first, hk::Min{});
    drawn.past_last = block.reduce(drawn.past_last, hk::Max{});
    hk::block_barrier();  // before the sums are overwritten
    return drawn;
}

}  // namespace sampling
