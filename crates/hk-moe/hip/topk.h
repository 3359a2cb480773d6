// topk.h: the k experts of a token, by one wave.
//   Lane l has experts kEach l .. kEach (l + 1) - 1. Scores become keys, unsigned numbers in their order. The k-th largest key is found
//   bit by bit: a ballot for each key of a lane counts the keys that reach a bound, and the search ends when k do. Where more are
//   equal to the last of the k, those of the highest indices are taken, or of the lowest.
#pragma once

#include <hk/math.h>
#include <hk/select.h>

#include "lists.h"

namespace route {

/// Experts of a token at most.
constexpr u32 kChoices = 32;
/// Experts at most where they are in groups.
constexpr u32 kGroupedExperts = 256;

/// What scores and weights are, the same numbers as `Scores` in crates/hk-moe/src/topk.rs.
enum Scores : u32 { kLogits = 0, kSoftmaxChosen = 1, kSoftmax = 2, kSigmoid = 3, kSqrtSoftplus = 4 };

/// Bits of `Topk::flags`.
enum TopkFlag : u32 {
    kRenormalize = 1,
    kWeightsF32 = 2,  // rather than as the logits
    kLowTies = 4,  // of equals the lower index is preferred
    kByPreference = 8,  // slots of a token in descending order of keys, not by expert
    kVectorized = 16,  // loads of kEach logits
};

struct Topk {
    hk::Global x;  // [tokens, experts] T
    u64 bias;  // [experts] f32, or 0
    u64 weights;  // [tokens, k] T | f32
    u64 ids;  // [tokens, k] i32
    u64 bitmatrix;  // [words, bitmatrix_rows] u32, or 0
    float scaling;
    u32 tokens, k, experts;
    u32 scores, flags;
    u32 groups, kept_groups, group_size;  // of experts; groups = 0: none
    u32 group_inverse;  // 2^16 / group_size, rounded up
    u32 words, bitmatrix_rows;
};

/// A number in the order of floats by their bits: negative NaNs, negative numbers, -0, +0, positive numbers, positive NaNs.
HK_FN u32 total_order(u32 bits) { return bits ^ (u32(i32(bits) >> 31) | 0x80000000u); }
HK_FN float from_total_order(u32 key) {
    return __builtin_bit_cast(float, key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// a + b; a NaN keeps its sign, and infinity - infinity is positive.
HK_FN float signed_sum(float a, float b) {
    const float sum = a + b;
    const float nan = a != a ? a : b != b ? b : __builtin_bit_cast(float, 0x7fc00000u);
    return sum == sum ? sum : nan;
}

/// sqrt(ln(1 + e^x)).
HK_FN float sqrt_softplus(float x) {
    const float u = hk::exp(-__builtin_fabsf(x));
    // ln(1 + u): the rounding of 1 + u is divided out.
    const float above = 1.0f + u, rest = above - 1.0f;
    const float log = rest == 0.0f ? u : hk::log(above) * hk::divide(u, rest);
    return __builtin_sqrtf((x > 0.0f ? x : 0.0f) + log);
}

/// The largest bound, a multiple of 2^lowest, that at least k keys reach; or one that exactly k do.
template <int kEach>
HK_FN u32 bound_of(const u32 (&key)[kEach], u32 k, u32 lowest) {
    u32 bound = 0;
    for (u32 step = 0x80000000u; step >> lowest != 0; step /= 2) {
        const u32 higher = bound | step;
        u32 reach = 0;
#pragma unroll
        for (int e = 0; e < kEach; ++e) reach += u32(__builtin_popcountll(hk::ballot(key[e] >= higher)));
        if (reach >= k) bound = higher;
        if (reach == k) break;
    }
    return bound;
}

/// Marks the first k elements, of which there are as many; keys are multiples of 2^lowest, and 0 where there is none.
template <int kEach>
HK_FN u32 choose(const u32 (&key)[kEach], u32 k, u32 lowest, bool low_ties) {
    const u32 bound = bound_of(key, k, lowest);
    u32 above = 0, equal = 0, n_above = 0, n_equal = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        above |= u32(key[e] > bound) << e;
        equal |= u32(key[e] == bound) << e;
        n_above += u32(__builtin_popcountll(hk::ballot(key[e] > bound)));
        n_equal += u32(__builtin_popcountll(hk::ballot(key[e] == bound)));
    }
    if (n_above + n_equal == k) return above | equal;
    if (n_above == k) return above;
    const u32 needed = k - n_above, first = low_ties ? 0 : n_equal - needed;
    u32 rank = hk::wave_scan(u32(__builtin_popcount(equal))) - u32(__builtin_popcount(equal));
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const u32 one = equal >> e & 1;
        above |= (rank - first < needed ? one : 0) << e;
        rank += one;
    }
    return above;
}

/// LDS of a wave that chooses experts.
template <bool kGroups>
struct ChoiceLds {
    u32 id[kChoices], key[kChoices];
    float value[kChoices];
};
template <>
struct ChoiceLds<true> : ChoiceLds<false> {
    u32 keys[kGroupedExperts];
};

/// The experts of a token that lane `slot` has; lanes from k on have none.
struct Choice {
    bool mine;
    u32 id;
    u32 slot;  // its place among the token's
    float weight;
};

/// Tokens' experts, by a wave: up to kExpertsMost experts.
template <class T, int kExpertsMost>
class Chooser {
    static constexpr int kEach = kExpertsMost / kWaveSize;
    static constexpr bool kGroups = kExpertsMost <= int(kGroupedExperts);

    const Topk &p_;

    /// The experts of a lane.
    struct Share {
        u32 first, left;  // the first, and experts from there on

        /// Computed again for each token: what is derived from it would else be kept in registers from token to token.
        HK_FN Share(const Topk &p, u32 token) {
            u32 sum = hk::lane_id() * kEach + token;
            hk::opaque(sum);
            first = sum - token;
            left = p.experts > first ? p.experts - first : 0;
        }
    };

  public:
    using Lds = ChoiceLds<kGroups>;
    /// A lane's share of a row.
    struct Row {
        T x[kEach];
    };

    HK_FN explicit Chooser(const Topk &p) : p_(p) {}

    /// The logits of a token; none past the last.
    HK_FN Row load(u32 token) const {
        Row row = {};
        if (token < p_.tokens) load_each(Share(p_, token), p_.x.template row<const T>(token), row.x);
        return row;
    }

    HK_FN Choice choose(u32 token, const Row &row, Lds &lds) const {
        const bool exact = p_.scores <= kSoftmax;  // keys are those of the logits
        const Share share(p_, token);
        const u32 lowest = exact ? u32(hk::FloatBits<T>::kShift) : 0;
        float score[kEach];
        u32 key[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            score[e] = number(row.x[e]);
            key[e] = hk::FloatBits<T>::lift(row.x[e]);
        }
        if (!exact) {
            if (p_.scores == kSigmoid)
                transform(score, [](float x) { return hk::sigmoid(x); });
            else
                transform(score, [](float x) { return sqrt_softplus(x); });
            float bias[kEach] = {};
            if (p_.bias != 0) load_each(share, at<const float>(p_.bias), bias);
#pragma unroll
            for (int e = 0; e < kEach; ++e) {
                key[e] = __builtin_bit_cast(u32, p_.bias != 0 ? signed_sum(score[e], bias[e]) : score[e]);
            }
        }
        // Only what is no expert has the key 0.
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const u32 some = hk::larger(total_order(key[e]) >> lowest, 1) << lowest;
            key[e] = u32(e) < share.left ? some : 0;
        }
        if constexpr (kGroups) {
            if (p_.groups != 0) keep_groups(share.first, key, lds);
        }
        const u32 chosen = route::choose(key, p_.k, lowest, p_.flags & kLowTies);
        float largest = 0.0f, sum = 1.0f;
        if (p_.scores == kSoftmax) softmax(score, share.left, largest, sum);

        // From lanes that have experts to a lane for each of the k.
        u32 place = hk::wave_scan(u32(__builtin_popcount(chosen))) - u32(__builtin_popcount(chosen));
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            if (chosen >> e & 1) {
                lds.id[place] = share.first + e;
                lds.key[place] = key[e];
                lds.value[place] = score[e];
                ++place;
            }
        }
        hk::wave_barrier();
        const u32 lane = hk::lane_id();
        Choice c = {lane < p_.k, 0, lane, 0.0f};
        float value = 0.0f;
        u32 mine = 0;
        if (c.mine) {
            c.id = lds.id[lane];
            mine = lds.key[lane];
            value = lds.value[lane];
        }
        hk::wave_barrier();
        c.weight = weight(c.mine, value, largest, sum);
        if (p_.flags & kByPreference) c.slot = slot(mine);
        return c;
    }

    /// Writes the choice of a token.
    HK_FN void write(u32 token, const Choice &c) const {
        if (!c.mine) return;
        const u64 gate = u64(token) * p_.k + c.slot;
        at<u32>(p_.ids)[gate] = c.id;
        if (p_.flags & kWeightsF32)
            at<float>(p_.weights)[gate] = c.weight;
        else
            at<T>(p_.weights)[gate] = hk::narrow<T>(hk::Vec<float, 1>(c.weight))[0];
    }

    /// Writes the token's bits, none for a token past the last.
    HK_FN void write_bits(u32 token, const Choice &c) const {
        const u32 lane = hk::lane_id();
        u32 word = 0;
        for (u32 j = 0; j < p_.k; ++j) {
            const u32 id = hk::broadcast(c.id, j);
            word |= id / 32 == lane ? 1u << id % 32 : 0;
        }
        if (lane < p_.words)
            at<u32>(p_.bitmatrix)[u64(lane) * p_.bitmatrix_rows + token] = token < p_.tokens ? word : 0;
    }

  private:
    /// This lane's share of a row of experts; past the last, anything.
    template <class U>
    HK_FN void load_each(Share share, hk::GlobalPtr<const U> row, U (&out)[kEach]) const {
        constexpr int kPart = kEach < hk::kVecLen<U> ? kEach : hk::kVecLen<U>;
        if (p_.flags & kVectorized) {
            if (share.left == 0) return;
#pragma unroll
            for (int e = 0; e < kEach; e += kPart) {
                const auto part = *reinterpret_cast<hk::GlobalPtr<const hk::Vec<U, kPart>>>(row + share.first + e);
#pragma unroll
                for (int i = 0; i < kPart; ++i) out[e + i] = part[i];
            }
        } else {
            const u32 last = p_.experts - 1;
#pragma unroll
            for (int e = 0; e < kEach; ++e) out[e] = row[hk::smaller(share.first + e, last)];
        }
    }

    /// A NaN keeps its sign, which conversions of NVIDIA drop.
    HK_FN static float number(T x) {
        const float v = float(x);
#if defined(HK_AMD)
        return v;
#else
        const u32 bits = __builtin_bit_cast(u32, v), sign = hk::FloatBits<T>::lift(x) & 1u << 31;
        return v == v ? v : __builtin_bit_cast(float, (bits & ~(1u << 31)) | sign);
#endif
    }

    /// Scores of logits; a NaN stays what it is.
    template <class F>
    HK_FN static void transform(float (&score)[kEach], F f) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            score[e] = score[e] == score[e] ? f(score[e]) : score[e];
            if (e % 4 == 3) hk::sched_barrier();  // else the temporaries of all elements would be live at once
        }
    }

    /// Place of an expert's key in LDS: fours of each 32 are swizzled, so that lanes of different groups have no bank conflicts.
    HK_FN static u32 key_place(u32 e) { return e ^ e / 32 * 4; }

    /// Leaves the experts of the groups that are kept. A group's score is its largest key, or with a bias the sum of its two largest.
    HK_FN void keep_groups(u32 first, u32 (&key)[kEach], Lds &lds) const {
#pragma unroll
        for (int e = 0; e < kEach; ++e) lds.keys[key_place(first + e / 4 * 4) + e % 4] = key[e];
        hk::wave_barrier();
        u32 lanes = kWaveSize;  // of a group
        while (lanes * p_.groups > u32(kWaveSize)) lanes /= 2;
        const u32 lane = hk::lane_id(), group = lane / lanes;
        u32 largest = 0, second = 0;
        for (u32 i = lane % lanes; i < p_.group_size; i += lanes) {
            const u32 k = group < p_.groups ? lds.keys[key_place(group * p_.group_size + i)] : 0;
            second = hk::larger(second, hk::smaller(largest, k));
            largest = hk::larger(largest, k);
        }
        hk::wave_barrier();
        for (u32 apart = 1; apart < lanes; apart *= 2) {
            const u32 l = hk::shuffle(largest, lane ^ apart), s = hk::shuffle(second, lane ^ apart);
            second = hk::larger(hk::larger(second, s), hk::smaller(largest, l));
            largest = hk::larger(largest, l);
        }
        if (p_.bias != 0 && p_.group_size > 1) {
            const float sum = signed_sum(from_total_order(largest), from_total_order(second));
            largest = hk::larger(total_order(__builtin_bit_cast(u32, sum)), 1);
        }
        const bool counts = group < p_.groups && lane % lanes == 0;
        const u32 scores[1] = {counts ? largest : 0};
        const u64 kept = hk::ballot(route::choose(scores, p_.kept_groups, 0, p_.flags & kLowTies) != 0);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const u32 of = (first + e) * p_.group_inverse >> 16;
            key[e] = kept >> (of * lanes & 63) & 1 ? key[e] : 0;
        }
    }

    /// The largest score of a token and the sum of exponentials below it.
    HK_FN static void softmax(const float (&score)[kEach], u32 left, float &largest, float &sum) {
        largest = -__builtin_inff();
#pragma unroll
        for (int e = 0; e < kEach; ++e) largest = u32(e) < left ? hk::Max{}(largest, score[e]) : largest;
        largest = hk::group_reduce<kWaveSize>(largest, hk::Max{});
        sum = 0.0f;
#pragma unroll
        for (int e = 0; e < kEach; ++e) sum += u32(e) < left ? hk::exp(score[e] - largest) : 0.0f;
        sum = hk::group_reduce<kWaveSize>(sum, hk::Sum{});
    }

    /// The weight of a lane's choice, from its score.
    HK_FN float weight(bool mine, float v, float largest, float sum) const {
        if (p_.scores == kSoftmaxChosen) {
            largest = hk::group_reduce<kWaveSize>(mine ? v : -__builtin_inff(), hk::Max{});
            v = mine ? hk::exp(v - largest) : 0.0f;
            sum = hk::group_reduce<kWaveSize>(v, hk::Sum{});
        } else if (p_.scores == kSoftmax) {
            v = mine ? hk::exp(v - largest) : 0.0f;
        }
        v = hk::divide(v, sum);
        if (p_.flags & kRenormalize)
            v = hk::divide(v, hk::group_reduce<kWaveSize>(mine ? v : 0.0f, hk::Sum{}) + 1e-20f);
        return v * p_.scaling;
    }

    /// How many of the k come before a lane's.
    HK_FN u32 slot(u32 key) const {
        const u32 lane = hk::lane_id();
        u32 before = 0;
        for (u32 j = 0; j < p_.k; ++j) {
            const u32 other = hk::broadcast(key, j);
            const bool earlier = p_.flags & kLowTies ? j < lane : j > lane;
            before += other > key || (other == key && earlier) ? 1 : 0;
        }
        return before;
    }
};

}  // namespace route
