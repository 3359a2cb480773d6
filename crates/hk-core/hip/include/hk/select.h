// select.h: top-k of a row: keys that order floats, bitonic sorting networks over lanes, selection in a wave.
//   The order is total: larger first (or smaller first), -0 equal to +0, equal ones by their index; a NaN is above every
//   number where the largest are wanted, and last in preference where the smallest are.
#pragma once

#include <hk/arch.h>
#include <hk/reg.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Facts of T's bits, seen in the high bits of a word (`lift`).
template <class T>
struct FloatBits {
    static constexpr int kShift = 32 - 8 * int(sizeof(T));
    /// From a value's bits to the next one's.
    static constexpr u32 kUnit = 1u << kShift;
    static constexpr i32 kInf = __is_same(T, f16) ? 0x7c000000 : 0x7f800000;

    HK_FN static u32 lift(T v) {
        if constexpr (sizeof(T) == 2)
            return u32(__builtin_bit_cast(u16, v)) << 16;
        else
            return __builtin_bit_cast(u32, v);
    }
};

/// A number that orders T's values: unsigned, a multiple of `FloatBits<T>::kUnit`, never 0 and below 0xff900000. The
/// largest come first, or if `smallest`, those; NaNs are equal to each other, and so are zeros.
template <class T>
HK_FN u32 order_key(T v, bool smallest) {
    using Bits = FloatBits<T>;
    constexpr i32 kNan = Bits::kInf + i32(Bits::kUnit);
    const u32 lifted = Bits::lift(v);
    const i32 magnitude = i32(lifted & 0x7fffffffu);
    const bool negate = (i32(lifted) < 0) != smallest;
    const i32 number = negate ? -magnitude : magnitude;
    const i32 nan = smallest ? -kNan : kNan;
    return u32(magnitude > Bits::kInf ? nan : number) ^ 0x80000000u;
}

/// A key with an index below 2^31, in one number: the larger is preferred. 0 is none. As a double it is positive
/// and finite, so that it can be compared by double-precision instructions.
HK_FN u64 ranked(u32 key, u32 index) { return u64(key) << 31 | (0x7fffffffu - index); }
HK_FN u32 ranked_key(u64 rank) { return u32(rank >> 31); }
HK_FN u32 ranked_index(u64 rank) { return 0x7fffffffu - (u32(rank) & 0x7fffffffu); }

/// The same in one word for elements of 2 bytes and an index below 2^16.
HK_FN u32 ranked16(u32 key, u32 index) { return key | (0xffffu - index); }
HK_FN u32 ranked16_index(u32 rank) { return 0xffffu - (rank & 0xffffu); }

namespace detail {
template <bool kShort>
struct RankType {
    using Type = u64;
};
template <>
struct RankType<true> {
    using Type = u32;
};
}  // namespace detail

/// What ranks T's elements among up to 2^16 columns.
template <class T>
using RankOf = typename detail::RankType<sizeof(T) == 2>::Type;

HK_FN u32 larger(u32 a, u32 b) { return a > b ? a : b; }
HK_FN u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
}  // namespace hk

#include HK_TARGET_HEADER(select.h)

namespace hk {

/// Compare-exchange: the larger goes to `a`.
template <class R>
HK_FN void order(R &a, R &b) {
    const R high = larger(a, b);
    b = smaller(a, b);
    a = high;
}

namespace detail {

// Sorts each group of Size lanes, a bitonic sequence (rising, then falling, or turned), descending.
template <int Size, class R>
HK_FN R merge_lanes(R v, u32 lane) {
    if constexpr (Size == 1)
        return v;
    else
        return merge_lanes<Size / 2>(meet<Size / 2, Size / 2>(v, lane), lane);
}

// Sorts each group of Size lanes descending: bitonic sort, the second half reversed by the lane exchange.
template <int Size, class R>
HK_FN R sort_lanes(R v, u32 lane) {
    if constexpr (Size == 1) {
        return v;
    } else {
        v = sort_lanes<Size / 2>(v, lane);
        return merge_lanes<Size / 2>(meet<Size - 1, Size / 2>(v, lane), lane);
    }
}

}  // namespace detail

/// Sorts Regs * kWaveSize values descending; element r of lane l is at place r * kWaveSize + l. A bitonic network: 21
/// steps for 64 values, of 2 instructions for 32-bit and 4 for 64-bit values.
template <int Regs, class R>
HK_FN void sort_wave(R (&v)[Regs]) {
    u32 lane = lane_id();
    opaque(lane);  // else the lane masks of each step would be kept in SGPRs from sort to sort
#pragma unroll
    for (int r = 0; r < Regs; ++r) v[r] = detail::sort_lanes<kWaveSize>(v[r], lane);
#pragma unroll
    for (int size = 2; size <= Regs; size *= 2) {
#pragma unroll
        for (int first = 0; first < Regs; first += size) {
#pragma unroll
            for (int i = 0; i < size / 2; ++i) {
                R &a = v[first + i];
                R &b = v[first + size - 1 - i];
                const R turned = shuffle_xor<kWaveSize - 1>(b);
                b = smaller(b, shuffle_xor<kWaveSize - 1>(a));
                a = larger(a, turned);
            }
#pragma unroll
            for (int apart = size / 4; apart >= 1; apart /= 2) {
#pragma unroll
                for (int i = 0; i < size; ++i) {
                    if (!(i & apart)) order(v[first + i], v[first + i + apart]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < Regs; ++r) v[r] = detail::merge_lanes<kWaveSize>(v[r], lane);
    }
}

/// Sorts eight values of a lane descending: Batcher's network of 19 comparisons.
template <class R>
HK_FN void sort8(R *v) {
    order(v[0], v[1]), order(v[2], v[3]), order(v[4], v[5]), order(v[6], v[7]);
    order(v[0], v[2]), order(v[1], v[3]), order(v[4], v[6]), order(v[5], v[7]);
    order(v[1], v[2]), order(v[5], v[6]);
    order(v[0], v[4]), order(v[1], v[5]), order(v[2], v[6]), order(v[3], v[7]);
    order(v[2], v[4]), order(v[3], v[5]);
    order(v[1], v[2]), order(v[3], v[4]), order(v[5], v[6]);
}

/// Of two descending lists of eight, the first of which becomes the result, the eight largest, descending. `other(i)` is
/// element i of the second.
template <class R, class Other>
HK_FN void merge8(R *v, Other other) {
    R turned[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) turned[i] = other(7 - i);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = larger(v[i], turned[i]);
#pragma unroll
    for (int apart = 4; apart >= 1; apart /= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (!(i & apart)) order(v[i], v[i + apart]);
        }
    }
}

/// Keys made quickly, for comparison with a bound: signed, in the order of `order_key`, but zeros and NaNs differ among
/// themselves, and below `FloatBits<T>::kUnit` there is anything. Classes of equals are contiguous.
template <class T>
struct RoughKeys {
    using Bits = FloatBits<T>;
    static constexpr i32 kUnit = i32(Bits::kUnit);
    static constexpr int kLowestBit = Bits::kShift;
    // Moves negative NaNs from below the numbers round to above them, or the other way.
    static constexpr i32 kTurn = (0x7fffffff - Bits::kInf) & ~(kUnit - 1);
    static constexpr i32 kLowest = i32(0x80000000u);

    u32 smallest;  // rather than the largest

    /// The keys of a lane's share of a row, in its order.
    template <int L, int N, int C, int E>
    HK_FN void of(const Row<T, L, N, C> &row, i32 (&key)[E]) const {
        static_assert(E == N * C, "a key for each element");
        if (smallest)
            make<true>(row, key);
        else
            make<false>(row, key);
    }

    /// The lowest key that is equal to `key` in the order.
    HK_FN i32 first(i32 key) const {
        key &= ~(kUnit - 1);
        if (smallest) {
            constexpr i32 kLastNan = kTurn - Bits::kInf - 2 * kUnit;
            if (key <= kLastNan) return kLowest;
            return key == kTurn ? kTurn - kUnit : key;
        }
        constexpr i32 kFirstNan = Bits::kInf + kUnit - kTurn;
        if (key >= kFirstNan) return kFirstNan;
        return key == -kTurn ? -kTurn - kUnit : key;
    }

    /// The lowest key above those that are equal to `first`, a result of `first()`; `kLowest` if there is none.
    HK_FN i32 next(i32 first) const {
        if (smallest) {
            if (first == kLowest) return kTurn - Bits::kInf - kUnit;
            return i32(u32(first) + u32(first == kTurn - kUnit ? 2 * kUnit : kUnit));
        }
        if (first == Bits::kInf + kUnit - kTurn) return kLowest;
        return first + (first == -kTurn - kUnit ? 2 * kUnit : kUnit);
    }

    /// A key up to which nothing comes before what has `key` in `order_key`; keys of those that do are as large or larger.
    HK_FN i32 above(u32 key) const {
        const i32 number = i32(key ^ 0x80000000u);
        if (!smallest && number > Bits::kInf) return 0x7fffffff;
        return number + (number < 0 ? 0 : kUnit) + (smallest ? kTurn : -kTurn);
    }

    /// The lowest key of what is equal to `key`, an `order_key`.
    HK_FN i32 from(u32 key) const { return first(above(key) - kUnit); }

  private:
    template <bool kSmallest, class RowT, int E>
    HK_FN static void make(const RowT &row, i32 (&key)[E]) {
        constexpr int kChunk = E / (sizeof(row.chunk) / sizeof(row.chunk[0]));
#pragma unroll
        for (int e = 0; e < E; e += sizeof(T) == 2 ? 2 : 1) {
            if constexpr (sizeof(T) == 2) {
                using Short2 = Vec<short, 2>;
                const Vec<T, 2> pair = {row.chunk[e / kChunk][e % kChunk], row.chunk[e / kChunk][e % kChunk + 1]};
                const Short2 bits = __builtin_bit_cast(Short2, pair);
                Short2 rough = bits ^ (detail::signs(bits) & short(0x7fff));
                rough = kSmallest ? ~rough + short(kTurn >> 16) : rough - short(kTurn >> 16);
                key[e + 1] = __builtin_bit_cast(i32, rough);  // with the other's key below it
                key[e] = i32(__builtin_bit_cast(u32, rough) << 16);
            } else {
                const i32 bits = __builtin_bit_cast(i32, T(row.chunk[e / kChunk][e % kChunk]));
                const i32 rough = bits ^ ((bits >> 31) & 0x7fffffff);
                key[e] = i32(kSmallest ? u32(~rough) + u32(kTurn) : u32(rough) - u32(kTurn));
            }
        }
    }
};

/// The same interface for keys of `order_key` with the top bit turned: each is a class of its own.
struct ExactKeys {
    static constexpr int kLowestBit = 0;
    static constexpr i32 kLowest = i32(0x80000000u);

    HK_FN i32 first(i32 key) const { return key; }
    HK_FN i32 next(i32 first) const { return first + 1; }
};

namespace detail {

// A bound that at least k, of `best`, and as few more as there are, reach: the highest, bit by bit, until it is met by k.
template <int N>
HK_FN i32 bound_for(const i32 (&best)[N], u32 k, int lowest_bit) {
    u32 bound = 0;
    for (u32 step = 0x80000000u; step >= 1u << lowest_bit; step /= 2) {
        const u32 higher = bound | step;
        u32 reach = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            reach += u32(__builtin_popcountll(ballot(best[i] >= i32(higher ^ 0x80000000u))));
        }
        if (reach >= k) bound = higher;
        if (reach == k) break;
    }
    return i32(bound ^ 0x80000000u);
}

// The lowest n of the bits of `from`.
HK_FN u32 lowest_bits(u32 from, u32 n) {
    u32 out = 0;
    for (; n > 0 && from != 0; --n) {
        out |= from & -from;
        from &= from - 1;
    }
    return out;
}

}  // namespace detail

/// Elements of a wave: bit e is element e of this lane; and how many there are up to this lane.
struct Marked {
    u32 bits;
    u32 upto;

    HK_FN explicit Marked(u32 bits) : bits(bits), upto(wave_scan(u32(__builtin_popcount(bits)))) {}
    HK_FN u32 total() const { return last_lane(upto); }
};

/// Marks elements of a wave. All the k first ones by `keys`, then by column, are among
/// them, and at most `most`, k or more, in the whole wave; where many keys are equal, exactly the k first ones. Only those
/// `valid` count; if they are fewer than k, all are marked. Element e of lane l is of column ((e / V) * kWaveSize + l) * V + e % V.
///
/// A bound comes from the largest keys of each lane (`pairs`: of its even and odd elements): k of those that reach it
/// are elements that do. Few others reach it, unless the row is in an order of some kind: then the bound is raised.
template <int V, class Keys, int E>
HK_FN Marked mark_first(const Keys &keys, const i32 (&key)[E], u32 valid, u32 k, u32 most, bool pairs) {
    i32 best[2] = {key[0], key[1]};
#pragma unroll
    for (int e = 2; e < E; ++e) best[e % 2] = key[e] > best[e % 2] ? key[e] : best[e % 2];
    const i32 both[1] = {best[0] > best[1] ? best[0] : best[1]};
    i32 bound = pairs ? detail::bound_for(best, k, Keys::kLowestBit) : detail::bound_for(both, k, Keys::kLowestBit);
    bound = keys.first(bound);
    const Marked first(valid & ~detail::keys_below(key, bound));
    if (first.total() <= most) return first;

    // Rare. Bits in which the bound and the largest key agree are settled.
    const i32 top = i32(group_reduce<kWaveSize>(u32(both[0]) ^ 0x80000000u, [](u32 a, u32 b) { return larger(a, b); }));
    const u32 low = u32(bound) ^ 0x80000000u;
    int bit = 31 - __builtin_clz((low ^ u32(top)) | 1u);
    u32 raised = low & ~((2u << bit) - 1u);
    for (; bit >= Keys::kLowestBit; --bit) {
        const u32 higher = raised | 1u << bit;
        const u32 count = Marked(valid & ~detail::keys_below(key, i32(higher ^ 0x80000000u))).total();
        if (count >= k) raised = higher;
        if (count >= k && count <= most) break;
    }
    bound = keys.first(i32(raised ^ 0x80000000u));
    const Marked raised_to(valid & ~detail::keys_below(key, bound));
    if (raised_to.total() <= most) return raised_to;

    // Many are equal to the last of the k: those of the lowest columns are taken.
    const i32 next = keys.next(bound);
    const u32 above = next == Keys::kLowest ? 0u : raised_to.bits & ~detail::keys_below(key, next);
    const u32 equal = raised_to.bits & ~above;
    const u32 n_above = Marked(above).total();
    u32 needed = k > n_above ? k - n_above : 0u;
    u32 bits = above;
    constexpr u32 kChunk = V >= 32 ? ~0u : (1u << V) - 1u;
#pragma unroll 1
    for (int chunk = 0; chunk < E / V; ++chunk) {
        const u32 here = equal >> (chunk * V) & kChunk;
        const Marked those(here);
        const u32 before = those.upto - u32(__builtin_popcount(here));
        bits |= detail::lowest_bits(here, needed > before ? needed - before : 0u) << (chunk * V);
        needed = needed > those.total() ? needed - those.total() : 0u;
    }
    return Marked(bits);
}

/// Calls `f(place, e)` for each marked element e of this lane; places count all that are marked in the wave.
template <class F>
HK_FN void for_marked(const Marked &marked, F f) {
    u32 place = marked.upto - u32(__builtin_popcount(marked.bits));
    for (u32 bits = marked.bits; bits != 0; bits &= bits - 1) f(place++, u32(__builtin_ctz(bits)));
}

}  // namespace hk
