// types.h: element types and their conversions from and to f32.
#pragma once

#include <hk/arch.h>

namespace hk {

using bf16 = __bf16;
using f16 = _Float16;
using f32 = float;

/// N elements in registers; the compiler maps arithmetic on pairs of f32 to packed instructions.
template <class T, int N>
using Vec = T __attribute__((ext_vector_type(N)));

/// Elements of T in one 16-byte access.
template <class T>
inline constexpr int kVecLen = kVecBytes / int(sizeof(T));

/// Exact: f32 holds every bf16 and f16, subnormals, infinities and NaNs included.
template <class T, int N>
HK_FN Vec<float, N> widen(Vec<T, N> v) {
#if !defined(HK_AMD)
    // From words: halves by themselves would take a register each for as long as they wait, and an instruction more.
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        const auto pairs = __builtin_bit_cast(Vec<u32, N / 2>, v);
        Vec<float, N> out;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            float low, high;
            if constexpr (__is_same(T, bf16)) {
                low = __builtin_bit_cast(float, pairs[i] << 16);
                high = __builtin_bit_cast(float, pairs[i] & 0xffff0000u);
            } else {
                asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
                    : "=f"(low), "=f"(high)
                    : "r"(pairs[i]));
            }
            out[2 * i] = low;
            out[2 * i + 1] = high;
        }
        return out;
    }
#endif
    return __builtin_convertvector(v, Vec<float, N>);
}

namespace detail {

// High halves of two words.
HK_FN u32 high_halves(u32 low, u32 high) {
#if defined(HK_AMD)
    return __builtin_amdgcn_perm(high, low, 0x07060302u);
#else
    return (high & 0xffff0000u) | (low >> 16);
#endif
}

/// The low or the high halves of two words.
struct HalfOf {
#if defined(HK_AMD)
    u32 selector;
    HK_FN explicit HalfOf(bool high) : selector(high ? 0x07060302u : 0x05040100u) {}
    HK_FN u32 operator()(u32 first, u32 second) const { return __builtin_amdgcn_perm(second, first, selector); }
#else
    bool high;
    HK_FN explicit HalfOf(bool high) : high(high) {}
    HK_FN u32 operator()(u32 first, u32 second) const {
        return high ? high_halves(first, second) : (second << 16 | (first & 0xffffu));
    }
#endif
};

// Two bf16 from two f32 where there is no instruction for it. Adding half a unit of the kept part, less one if
// that is even, rounds to nearest even; a carry out of the mantissa steps the exponent, up to infinity. Only a
// NaN with a long payload carries into the sign (a quiet one, which the caller sees to, does not round to
// infinity): then the result, one above its largest NaN, is stepped back.
HK_FN u32 round_to_bf16(float low, float high) {
    using Halves = Vec<short, 2>;
    const u32 l = __builtin_bit_cast(u32, low);
    const u32 h = __builtin_bit_cast(u32, high);
    const u32 rounded = high_halves(l + 0x7fffu + ((l >> 16) & 1u), h + 0x7fffu + ((h >> 16) & 1u));
    const Halves sign_flipped = __builtin_bit_cast(Halves, rounded ^ high_halves(l, h)) >> 15;  // 0 or -1
    return __builtin_bit_cast(u32, __builtin_bit_cast(Halves, rounded) + sign_flipped);
}

}  // namespace detail

/// The largest element; of NaNs and numbers, a number.
template <class T, int N>
HK_FN float largest(Vec<T, N> v) {
#if defined(HK_NVIDIA)
    // Two elements of 16 bits by one instruction. One that is a signalling NaN is passed over, too.
    if constexpr (sizeof(T) == 2) {
        Vec<T, 2> most = {v[0], v[1]};
#pragma unroll
        for (int i = 2; i < N; i += 2) most = __builtin_elementwise_max(most, Vec<T, 2>{v[i], v[i + 1]});
        const auto wide = widen<T, 2>(most);
        return __builtin_fmaxf(wide[0], wide[1]);
    } else {
        return __builtin_reduce_max(v);
    }
#else
    // No maximum is a signalling NaN.
    return __builtin_reduce_max(__builtin_elementwise_canonicalize(widen<T, N>(v)));
#endif
}

/// f32 to T, to nearest even; beyond T's largest finite value gives infinity; NaN stays NaN.
template <class T, int N>
HK_FN Vec<T, N> narrow(Vec<float, N> v) {
    if constexpr (__is_same(T, bf16) && !kHasCvtBf16 && N % 2 == 0) {
        // Quiets NaNs; costs nothing where the compiler sees arithmetic, whose results are quiet.
        v = __builtin_elementwise_canonicalize(v);
        Vec<u32, N / 2> packed;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) packed[i] = detail::round_to_bf16(v[2 * i], v[2 * i + 1]);
        return __builtin_bit_cast(Vec<T, N>, packed);
    } else {
#if defined(HK_AMD)
        // LLVM 22 takes a product and its rounding to f16 for one instruction that adds 0, and so loses the sign of a
        // zero: it must not see the product.
        if constexpr (__is_same(T, f16)) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float element = v[i];
                forget(element);
                v[i] = element;
            }
        }
#endif
        return __builtin_convertvector(v, Vec<T, N>);
    }
}

/// n / divisor and what is left, for divisors that the host knows: `inverse` is (2^32 - 1) / divisor, rounded down.
struct Quotient {
    u32 whole, rest;

    HK_FN Quotient(u32 n, u32 divisor, u32 inverse) {
        // Too small by one, at most.
        whole = u32(u64(n) * inverse >> 32);
        rest = n - whole * divisor;
        const bool more = rest >= divisor;
        whole += more ? 1 : 0;
        rest -= more ? divisor : 0;
    }
};

}  // namespace hk
