// filter.h: which tokens of a row the filters keep, and which of those a uniform number draws.
//   kept(i)  <=>  #{j : P_j > P_i} < k  and  sum{P_j : P_j > P_i} < p  and  P_i >= min_p * max_j P_j  and  P_i > 0
//   id       =    the smallest kept i with  sum{P_j : j <= i, kept} >= u * sum{P_j : kept}
// Source: top-p Holtzman et al. 2020, min-p Nguyen et al. 2024.
//
// How
//   Each filter keeps all tokens from some probability on, so together they are one threshold: the largest of theirs. The
//   bits of a positive f32 are ordered as the number is, so the threshold is found digit by digit from the top (radix
//   select): a histogram of the next digit among tokens that agree in the digits before, then from its upper end the bin
//   where the count reaches k or the mass reaches p. That takes 3 histograms at most (4 in blocks of one wave).
// Exactness
//   A bin lies within one exponent, so that its mantissas add up as integers: a cell counts its tokens and the sum of their
//   lower bits, in rows.hip in one 64-bit word, and the LDS atomics that make it commute. Only sums over bins are
//   rounded, in f64, in an order that the number of bins fixes: masses are within 2^-45 of themselves, and no result
//   depends on the order of the atomics, the grid or other rows.
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
inline constexpr u32 kNone = 0xffffffffu;     // no thread, no token yet, a filter that is off
inline constexpr u32 kNoToken = 0xfffffffeu;  // a token beyond every row, but not `kNone`

/// The bits of a clean probability: in the order of the numbers, 0 for what cannot be drawn.
HK_FN u32 key_of(float probability) { return __builtin_bit_cast(u32, probability); }

HK_FN float value_of(u32 key) { return __builtin_bit_cast(float, key); }

/// What one unit of the mantissa is worth, 2^(exponent - 150).
HK_FN double unit_of(u32 key) {
    const u32 exponent = key >> 23;
    return __builtin_bit_cast(double, u64((exponent ? exponent : 1u) + (1023u - 150u)) << 52);
}

/// Tokens of one bin: their number, and the sum of what their keys are above the least key of the bin.
struct Bin {
    u32 count;
    u64 rest;

    HK_FN double mass(u32 least_key) const {
        // The last bins are those of infinity and NaN, which are empty.
        const double least = count != 0 ? double(value_of(least_key)) : 0.0;
        return __builtin_fma(double(count), least, double(rest) * unit_of(least_key));
    }
};

/// A bin in one word, so that one atomic adds a token. 2^24 - 1 tokens in bins 2^11 wide, or 2^17 in bins 2^22 wide, do not
/// carry from one part to the other.
class Cell {
    static constexpr int kRestBits = 40;
    u64 bits_;

public:
    HK_FN static u64 tokens(u32 count, u32 rest) { return u64(count) << kRestBits | rest; }
    HK_FN explicit Cell(u64 bits) : bits_(bits) {}
    HK_FN Bin bin() const { return {u32(bits_ >> kRestBits), bits_ & ((u64(1) << kRestBits) - 1)}; }
};

using hk::add_in_lds;

/// The filters of one row, each of them switched off by a value that it never reaches.
struct Filters {
    u32 k;
    double p;
    u32 min_key;              // least key that min-p keeps, at least 1
    bool p_of_total = false;  // p is yet to be multiplied by the mass of the row
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

/// A search for the threshold: the upper bits of it found so far, and what lies above all keys with these.
struct Search {
    u32 prefix = 0;
    u32 active = 0;  // kK | kP | kMin: the filters whose threshold has this prefix
    Amount above = {};
    Amount in = {};   // what has the prefix itself
    Amount all = {};  // what was above the bins of the last step, and in them

    static constexpr u32 kK = 1, kP = 2, kMin = 4;  // in the order of `digits` in `step`

    /// The rest of the bits cannot make a difference: the prefix, with zeros, is a threshold.
    HK_FN bool done() const { return active == 0 || (active < kMin && in.count == 1); }
    HK_FN u32 kept_count() const { return above.count + in.count; }
    HK_FN double kept_mass() const { return above.mass + in.mass; }
};

/// LDS for sums over the threads of a block.
template <int Threads>
struct ScanScratch {
    double mass[Threads / kWaveSize];
    u32 count[Threads / kWaveSize];
};

/// Of a number for each wave, adds to `before` those of the waves below this one, and to `all` all of them.
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
        hk::forget(lane);  // which lanes take part is not kept, in scalar registers, from one call to the next
        const T up_to = hk::wave_scan(lane < kWaves ? of_wave[lane] : T(0));
        if (wave > 0) before += hk::broadcast(up_to, wave - 1);
        all += hk::broadcast(up_to, kWaves - 1);
    }
}

/// Adds to `v` what the threads below have, and `all`; to `all` what all threads have. All threads of the block call it; a
/// barrier is due before the scratch is used again.
template <int Threads>
HK_FN void block_scan(Amount &v, Amount &all, ScanScratch<Threads> &scratch) {
    constexpr u32 kWaves = Threads / kWaveSize;
    v = {hk::wave_scan(v.count), hk::wave_scan(v.mass)};
    Amount base = all;
    if constexpr (kWaves == 1) {
        all += {hk::last_lane(v.count), hk::last_lane(v.mass)};
    } else {
        u32 lane = hk::lane_id();
        hk::forget(lane);
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

/// LDS for a search step of a block of Threads.
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

    /// The digit of up to `bits` bits that ends where `top` bits of the key begin.
    HK_FN static Digit below(u32 top, u32 bits) {
        bits = bits < top ? bits : top;
        return {top - bits, (1u << bits) - 1};
    }
    HK_FN u32 of(u32 key) const { return key >> shift & mask; }
    HK_FN u32 rest(u32 key) const { return key & ((1u << shift) - 1); }
    HK_FN u64 token(u32 key) const { return Cell::tokens(1, rest(key)); }
};

/// The keys that have the bits of `prefix` from bit `top` on, but not 0.
struct Followers {
    u32 least;
    u32 width;

    HK_FN Followers(u32 prefix, u32 top)
        : least(prefix > 0 ? prefix : 1), width(prefix + (1u << top) - least) {}
    HK_FN bool contain(u32 key) const { return key - least < width; }
};

/// One digit further: `bin(i)` is what has the prefix of the search and the value i in the digit. All threads of the
/// block call it; what it reads from LDS has been written before a barrier.
template <int Threads, int Bins, class Reducer, class BinAt>
HK_FN void step(Search &search, Filters &f, Digit at, Reducer &block, StepScratch<Threads> &scratch, BinAt bin) {
    constexpr u32 kEach = Bins > Threads ? Bins / Threads : 1;  // bins of a thread, which count from the top
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
            // Turned by the lane, so that the lanes' cells lie in different banks.
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

    // The first thread that reaches k, and the first that reaches p: at most one of each, and none means that this
    // filter keeps everything here.
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
    // Digit 0 also stands for "everything", but then nothing is left to find: the filter would keep all further down.
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
    u32 greedy;  // at a temperature of zero the token that has it all, or kNoToken; else kNone

    HK_FN float exponential(float logit) const { return hk::exp2_fast((logit - max) * log2_scale); }
};

/// What an operator is asked for; the same fields as `Params` in src/sample.rs.
struct Params {
    hk::Global x;            // [R, V] T: probabilities, or logits
    hk::Global row_index;    // [B] i32, optional: the row of an output
    hk::Global temperature;  // [R] f32, optional
    hk::Global k;            // [R] i32, optional
    hk::Global p;            // [R] f32, optional
    hk::Global min_p;        // [R] f32, optional
    hk::Global uniform;      // [B] f32, optional: u of an output
    hk::Global ids;          // [B] i32, absent: nothing is drawn
    hk::Global mass;         // [B] f32, optional
    hk::Global count;        // [B] i32, optional
    hk::Global y;            // [R, V] T, optional: the kept probabilities, renormalised
    hk::Global workspace;    // bytes
    u64 seed;
    u64 offset;
    u32 k_value;  // where there is no tensor
    float p_value;
    float min_p_value;
    float temperature_value;
    u32 logits;       // x are logits
    u32 top_k_first;  // p is a share of what top-k and min-p keep
    u32 first;        // output of the first row of this launch
    u32 outputs;      // outputs of this launch
    u32 segments;     // of a row
    u32 segment;      // tokens of a segment
    u32 share;        // segments of a block
    u32 unused;
};

/// Element `i` of a tensor with one axis, or `value` if it is absent.
template <class T>
HK_FN T element_or(const hk::Global &g, u64 i, T value) {
    return g.present() ? g.row<T>(0)[i] : value;
}

/// The row of output `b`; kNoRow if that is out of range.
inline constexpr u64 kNoRow = ~u64(0);
HK_FN u64 row_of(const Params &p, u64 b) {
    if (!p.row_index.present()) return b;
    const i32 row = p.row_index.row<i32>(0)[b];
    return u32(row) < p.x.rows() ? u64(row) : kNoRow;
}

/// Temperature of a row: zero is greedy, all others at least 1e-5.
HK_FN float temperature_of(const Params &p, u64 row) {
    const float t = element_or(p.temperature, row, p.temperature_value);
    return t == 0.0f ? 0.0f : hk::Max{}(t, 1e-5f);
}

/// The filters of a row whose largest key is `max_key`, and in `active` those that are on. Switched off: k as large as the
/// row, p above one or NaN, min_p not above zero or NaN. At the other end, k and p keep the maxima at least.
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
        // The least f32 that is not below the product, which is exact in f64.
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

/// Calls `f(value, column)` for every element of a lane's share of a row; `column` is that of its first one. Nothing is
/// carried from one walk over a row to the next: what each lane finds of each element would fill the scalar registers.
template <int L, int N, int C, class F>
HK_FN void for_each(hk::Row<float, L, N, C> &row, u32 column, F f) {
    hk::forget(column);
#pragma unroll
    for (int k = 0; k < C; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float value = row.chunk[k][i];
            hk::forget(value);
            f(value, column + u32(k * L * N + i));
            row.chunk[k][i] = value;
        }
    }
}

/// Logits to probabilities. What is no number, or lies beyond the row, gets none.
template <class RowF>
HK_FN void apply(const Softmax &softmax, RowF &row, u32 column, u32 cols) {
    if (softmax.greedy != kNone) {
        for_each(row, column, [&](float &v, u32 c) { v = c == softmax.greedy ? 1.0f : 0.0f; });
    } else {
        for_each(row, column, [&](float &v, u32 c) {
            v = c < cols ? softmax.exponential(v) * softmax.inverse_sum : 0.0f;
        });
    }
}

/// What part of a row has to say to a draw.
struct Drawn {
    u32 first;     // the first kept token at which the sum reaches the target; kNone
    u32 past_last;  // one past the last kept token; 0: none is kept
    double sum;    // up to the end of the part
};

/// LDS for a draw from a part of a row.
template <int Threads, int Chunks>
struct DrawScratch {
    double sums[Chunks * (Threads / kWaveSize)];
};

/// Makes of a row its drawable probabilities: NaN and negative ones become 0. Gives the largest key of the lane's share,
/// `kInfinity` if there is an infinity.
template <class RowF>
HK_FN u32 clean(RowF &row) {
    float max = 0.0f;
    for_each(row, 0, [&](float &v, u32) {
        v = hk::Max{}(v, 0.0f);  // the other one of a NaN, and of two zeros the positive one
        max = hk::Max{}(max, v);
    });
    return key_of(max);
}

/// Sums the kept ones of a clean row's probabilities, from `sum` on in the order of tokens. All threads of the block call
/// it.
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
            hk::forget(v);
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
    hk::block_barrier();  // the sums may be written again
    return drawn;
}

}  // namespace sampling
