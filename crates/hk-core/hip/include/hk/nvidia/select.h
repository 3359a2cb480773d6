// hk/nvidia/select.h: selection of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Of ranks: one instruction where integers would take three.
HK_FN u64 larger(u64 a, u64 b) { return a > b ? a : b; }
HK_FN u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

namespace detail {

// The larger of two lanes' values for the lane whose bit Bit is 0, the smaller for the other.
template <int Bit>
HK_FN u32 keep(u32 mine, u32 other, u32 lane) {
    const bool upper = lane & Bit;
    return (mine < other) != upper ? other : mine;
}

template <int Bit>
HK_FN u64 keep(u64 mine, u64 other, u32 lane) {
    const bool upper = lane & Bit;
    return (mine < other) != upper ? other : mine;
}

// The same for the value that lane `lane ^ Mask` has.
template <int Mask, int Bit, class R>
HK_FN R meet(R v, u32 lane) {
    return keep<Bit>(v, shuffle_xor<Mask>(v), lane);
}

/// Of each half, its sign in all bits.
HK_FN Vec<short, 2> signs(Vec<short, 2> halves) {
    const u32 bits = __builtin_bit_cast(u32, halves);
    u32 out;
    asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(out) : "r"(bits));
    return __builtin_bit_cast(__typeof__(halves), out);
}

// Bit i: key[i] < bound. Two instructions a key: on AMD GPUs the sign of a difference that does not wrap is shifted in.
template <int N>
HK_FN u32 keys_below(const i32 (&key)[N], i32 bound) {
    static_assert(N <= 32, "a bit for each");
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) bits |= key[i] < bound ? 1u << i : 0u;
    return bits;
}

}  // namespace detail

}  // namespace hk
