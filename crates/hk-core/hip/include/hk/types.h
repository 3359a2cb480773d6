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

}  // namespace hk

#include HK_TARGET_HEADER(types.h)

namespace hk {

namespace detail {

// Two f32 to bf16 without a conversion instruction. Adding 0x7fff plus the lowest kept bit rounds to nearest even; a carry out of
// the mantissa increments the exponent, up to infinity. NaNs come in quiet, so none rounds to infinity; one with a long payload
// carries into the sign, and the result is decremented.
HK_FN u32 round_to_bf16(float low, float high) {
    using Short2 = Vec<short, 2>;
    const u32 l = __builtin_bit_cast(u32, low);
    const u32 h = __builtin_bit_cast(u32, high);
    const u32 rounded = high_halves(l + 0x7fffu + ((l >> 16) & 1u), h + 0x7fffu + ((h >> 16) & 1u));
    const Short2 sign_flipped = __builtin_bit_cast(Short2, rounded ^ high_halves(l, h)) >> 15;  // 0 or -1
    return __builtin_bit_cast(u32, __builtin_bit_cast(Short2, rounded) + sign_flipped);
}

}  // namespace detail

/// f32 to T, to nearest even; beyond T's largest finite value gives infinity; NaN stays NaN.
template <class T, int N>
HK_FN Vec<T, N> narrow(Vec<float, N> v) {
    if constexpr (__is_same(T, bf16) && !kHasCvtBf16 && N % 2 == 0) {
        // Quiets NaNs; free after arithmetic, whose results are quiet.
        v = __builtin_elementwise_canonicalize(v);
        Vec<u32, N / 2> packed;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) packed[i] = detail::round_to_bf16(v[2 * i], v[2 * i + 1]);
        return __builtin_bit_cast(Vec<T, N>, packed);
    } else {
        return __builtin_convertvector(before_narrow<T>(v), Vec<T, N>);
    }
}

/// n / divisor and n % divisor. The host gives `inverse` = (2^32 - 1) / divisor, rounded down.
struct DivMod {
    u32 quotient, remainder;

    HK_FN DivMod(u32 n, u32 divisor, u32 inverse) {
        // Too small by at most one.
        quotient = u32(u64(n) * inverse >> 32);
        remainder = n - quotient * divisor;
        const bool more = remainder >= divisor;
        quotient += more ? 1 : 0;
        remainder -= more ? divisor : 0;
    }
};

}  // namespace hk
