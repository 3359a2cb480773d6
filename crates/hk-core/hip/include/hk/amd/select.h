// hk/amd/select.h: selection of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Of ranks: one instruction where integers would take three.
HK_FN u64 larger(u64 a, u64 b) {
    double out;
    asm("v_max_f64 %0, %1, %2" : "=v"(out) : "v"(__builtin_bit_cast(double, a)), "v"(__builtin_bit_cast(double, b)));
    return __builtin_bit_cast(u64, out);
}
HK_FN u64 smaller(u64 a, u64 b) {
    double out;
    asm("v_min_f64 %0, %1, %2" : "=v"(out) : "v"(__builtin_bit_cast(double, a)), "v"(__builtin_bit_cast(double, b)));
    return __builtin_bit_cast(u64, out);
}

namespace detail {

// The larger of two lanes' values for the lane whose bit Bit is 0, the smaller for the other.
template <int Bit>
HK_FN u32 keep(u32 mine, u32 other, u32 lane) {
    // The median of two values and a bound is the larger or the smaller.
    const u32 bound = lane & Bit ? 0u : ~0u;
    u32 out;
    asm("v_med3_u32 %0, %1, %2, %3" : "=v"(out) : "v"(mine), "v"(other), "v"(bound));
    return out;
}

template <int Bit>
HK_FN u64 keep(u64 mine, u64 other, u32 lane) {
    const bool upper = lane & Bit;
    return (mine < other) != upper ? other : mine;
}

// The same for the value that lane `lane ^ Mask` has.
template <int Mask, int Bit, class R>
HK_FN R meet(R v, u32 lane) {
    if constexpr (sizeof(R) == 8) {
        // Signs are put on before the exchange; the other lane's is the opposite of this one's.
        const u64 sign = u64(lane & Bit ? 0x80000000u : 0u) << 32;
        const u64 own = v ^ sign;
        const double other = __builtin_bit_cast(double, shuffle_xor<Mask>(own));
        double out;
        asm("v_max_f64 %0, %1, -%2" : "=v"(out) : "v"(__builtin_bit_cast(double, own)), "v"(other));
        return __builtin_bit_cast(u64, out) ^ sign;
    }
    return keep<Bit>(v, shuffle_xor<Mask>(v), lane);
}

/// Of each half, its sign in all bits.
HK_FN Vec<short, 2> signs(Vec<short, 2> halves) { return halves >> 15; }

// Bit i: key[i] < bound. Two instructions a key: on AMD GPUs the sign of a difference that does not wrap is shifted in.
template <int N>
HK_FN u32 keys_below(const i32 (&key)[N], i32 bound) {
    static_assert(N <= 32, "a bit for each");
    u32 bits = 0;
#pragma unroll
    for (int i = N - 1; i >= 0; --i) bits = bits << 1 | u32(__builtin_elementwise_sub_sat(key[i], bound)) >> 31;
    return bits;
}

}  // namespace detail

}  // namespace hk
