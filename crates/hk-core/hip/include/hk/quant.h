// quant.h: quantization and dequantization: int8, fp8, fp4 and power-of-two scales. The host's side is hk_core::quant; results are
// bitwise identical to the host's conversions, on every target.
//   Every conversion rounds to nearest even and saturates; infinities saturate too.
//   For the same byte the two encodings of fp8 e4m3 differ by a factor of two, except NaN, -0 and the largest values: the target
//   converts its own encoding natively, and the other one through it.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>
#include HK_TARGET_HEADER(math.h)
#include HK_TARGET_HEADER(quant.h)

namespace hk {

/// Element type of a quantized tensor of bytes; same values as `hk_core::quant::QuantType`.
enum class QuantType : u32 {
    I8 = 0,  ///< -127..127; NaN gives 0
    Fp8 = 1,  ///< e4m3 of the OCP, up to 448; NaN gives 0x7f
    Fp8Fnuz = 2,  ///< e4m3 FNUZ, up to 240; NaN gives 0x80, -0 gives 0
    Fp8E5M2 = 3,  ///< e5m2 of the OCP, up to 57344; NaN gives 0x7f, infinities saturate
};

/// Largest value of a type.
template <QuantType kType>
inline constexpr float kQuantMax = kType == QuantType::I8        ? 127.0f
                                   : kType == QuantType::Fp8     ? 448.0f
                                   : kType == QuantType::Fp8Fnuz ? 240.0f
                                                                 : 57344.0f;

/// A QuantType as a type, to be passed to a generic lambda.
template <QuantType kType>
struct QuantTypeConstant {
    static constexpr QuantType value = kType;
};

/// The quantized type that a launch writes, chosen at run time. Same layout as `hk_core::quant::QuantFormat`.
struct QuantFormat {
    float qmax;  ///< kQuantMax of `quant_type`
    QuantType quant_type;

    /// Calls `f` with the type as a constant: one branch for all the work of `f`. int8 and both e4m3 only.
    template <class F>
    HK_FN void with_type(F f) const {
        if (quant_type == QuantType::I8) {
            f(QuantTypeConstant<QuantType::I8>{});
        } else if (quant_type == QuantType::Fp8) {
            f(QuantTypeConstant<QuantType::Fp8>{});
        } else {
            f(QuantTypeConstant<QuantType::Fp8Fnuz>{});
        }
    }
};
static_assert(sizeof(QuantFormat) == 8, "same layout as hk_core::quant::QuantFormat");

namespace detail {

/// [-limit, limit], and `nan` for NaN.
HK_FN float clamp_or(float v, float limit, float nan) {
    // Else the NaN tests would be hoisted above a branch on the type, and keep a pair of SGPRs each.
    u32 bits = bits_of(v);
    opaque(bits);
    v = __builtin_bit_cast(float, bits);
    const float clamped = clamp(v, limit);
    return v == v ? clamped : nan;
}

/// Bit 7 of each byte: the signs of four values.
HK_FN u32 sign_bytes(float a, float b, float c, float d) { return high_bytes(a, b, c, d) & 0x80808080u; }

template <QuantType kType>
HK_FN u32 quantize_dword(float a, float b, float c, float d) {
    constexpr float kMax = kQuantMax<kType>;
    constexpr bool kE5M2 = kType == QuantType::Fp8E5M2;
    constexpr bool kFnuz = kType == QuantType::Fp8Fnuz;
    if constexpr (kType == QuantType::I8) {
        // The last place of the sum is 1: it rounds to an integer, in two's complement in its low bits.
        constexpr float kRound = 0x1.8p+23f;
        const auto code = [](float v) { return bits_of(clamp_or(v, kMax, 0.0f) + kRound); };
        return low_bytes(code(a), code(b), code(c), code(d));
    } else if constexpr (kFnuz == kFp8IsFnuz && kFp8Saturates) {
        return native_fp8<kE5M2>(a, b, c, d);
    } else if constexpr (kFnuz == kFp8IsFnuz) {
        const auto in_range = [](float v) { return clamp_or(v, kMax, __builtin_nanf("")); };
        return native_fp8<kE5M2>(in_range(a), in_range(b), in_range(c), in_range(d));
    } else if constexpr (kFp8IsFnuz) {
        // OCP from FNUZ, of half the value: 0x7f, the NaN, is its largest value; it has no -0.
        constexpr float kNan = kE5M2 ? 57344.0f : 240.0f;
        const auto half = [](float v) { return clamp_or(v * 0.5f, kMax * 0.5f, kNan); };
        a = half(a), b = half(b), c = half(c), d = half(d);
        return native_fp8<kE5M2>(a, b, c, d) | sign_bytes(a, b, c, d);
    } else {
        // FNUZ from OCP, of twice the value: 0x80, the NaN, is its -0, which nothing else may become; 0x7f, the largest value, is
        // its NaN: computed as 0x7e + 1.
        constexpr float kBelowHalfStep = 0x1p-10f, kBelowLargest = 448.0f;
        constexpr float kRoundsToLargest = 232.0f, kOne = 0x1p-9f;  // the value of byte 1
        const auto twice = [](float v) {
            const float t = clamp(v * 2.0f, kBelowLargest);
            const float positive = __builtin_fabsf(t) <= kBelowHalfStep ? 0.0f : t;
            return v == v ? positive : -0.0f;
        };
        const auto step = [](float v) { return __builtin_fabsf(v) > kRoundsToLargest ? kOne : 0.0f; };
        return native_fp8<false>(twice(a), twice(b), twice(c), twice(d)) +
               native_fp8<false>(step(a), step(b), step(c), step(d));
    }
}

template <QuantType kType>
HK_FN Vec<float, 4> dequantize_dword(u32 dword) {
    Vec<float, 4> v;
    if constexpr (kType == QuantType::I8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = float(i32(dword << (24 - 8 * i)) >> 24);
    } else if constexpr (kType == QuantType::Fp8E5M2) {
        // The upper byte of an f16.
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = float(__builtin_bit_cast(f16, u16(((dword >> (8 * i)) & 0xffu) << 8)));
    } else {
        constexpr bool kFnuz = kType == QuantType::Fp8Fnuz;
        if constexpr (kHasCvtFromFp8 && kFnuz == kFp8IsFnuz) return native_fp8_values(dword);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 code = (dword >> (8 * i)) & 0xffu;
            // Exponent and mantissa at the position of an f32's (subnormals included), then the bias.
            const u32 placed = (code & 0x7fu) << 20 | (code & 0x80u) << 24;
            const float value = __builtin_bit_cast(float, placed) * (kFnuz ? 0x1p+119f : 0x1p+120f);
            const bool is_nan = kFnuz ? code == 0x80u : (code & 0x7fu) == 0x7fu;
            v[i] = is_nan ? __builtin_nanf("") : value;
        }
    }
    return v;
}

}  // namespace detail

/// Quantizes N values, four to a dword, the first in the lowest byte.
template <QuantType kType, int N>
HK_FN Vec<u32, N / 4> quantize_packed(Vec<float, N> v) {
    static_assert(N % 4 == 0, "whole dwords");
    Vec<u32, N / 4> packed;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        packed[i] = detail::quantize_dword<kType>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    return packed;
}

/// Quantizes one value.
template <QuantType kType>
HK_FN u8 quantize_one(float v) {
    u32 dword = detail::quantize_dword<kType>(v, 0.0f, 0.0f, 0.0f);
    if constexpr (kOpaqueBytes) opaque(dword);
    return u8(dword);
}

/// Dequantizes without a scale, exactly.
template <QuantType kType, int W>
HK_FN Vec<float, 4 * W> dequantize_packed(Vec<u32, W> packed) {
    Vec<float, 4 * W> v;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        const Vec<float, 4> four = detail::dequantize_dword<kType>(packed[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[4 * i + j] = four[j];
    }
    return v;
}

/// Dequantizes one byte without a scale, exactly.
template <QuantType kType>
HK_FN float dequantize_one(u8 byte) {
    return detail::dequantize_dword<kType>(byte)[0];
}

/// Unsigned maximum: reduces FiniteMax::top and AbsMax::bits over lanes.
struct MaxBits {
    HK_FN u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

/// Running maximum of finite magnitudes.
struct FiniteMax {
    static constexpr u32 kZero = 0x01000000u;

    /// A key with the order of magnitudes: the bits without the sign, doubled, plus a constant by which NaN and infinities wrap
    /// around to below zero.
    u32 top = kZero;

    template <int N>
    HK_FN void add(Vec<float, N> v) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 key = (detail::bits_of(v[i]) << 1) + kZero;
            top = key > top ? key : top;
        }
    }

    /// The magnitude of a reduced `top`; 0 if no value is finite.
    HK_FN static float value(u32 top) { return __builtin_bit_cast(float, (top - kZero) >> 1); }
};

/// The scale of a row or tensor, amax / qmax. 1 for zeros; amax below 1e-30 counts as 1e-30, so that the reciprocal is finite.
HK_FN float linear_scale(float amax, float qmax) { return amax > 0.0f ? __builtin_fmaxf(amax, 1e-30f) / qmax : 1.0f; }

/// The scale of a group, amax / qmax; amax below 1e-10 counts as 1e-10.
HK_FN float group_scale(float amax, float qmax) { return __builtin_fmaxf(amax, 1e-10f) / qmax; }

/// Running maximum of magnitudes, as bits; at least kInfinity if a value is not finite.
struct AbsMax {
    static constexpr u32 kInfinity = 0x7f800000u;

    u32 bits = 0;

    template <int N>
    HK_FN void add(Vec<float, N> v) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (kHasMaxNan) {
                // One instruction; a NaN makes the largest one.
                const float magnitude = __builtin_fabsf(v[i]);
                bits = detail::bits_of(detail::max_nan(__builtin_bit_cast(float, bits), magnitude));
            } else {
                const u32 magnitude = detail::bits_of(v[i]) & 0x7fffffffu;
                bits = magnitude > bits ? magnitude : bits;
            }
        }
    }
};

/// The rounding of a block's power-of-two scale; made by `hk_core::quant::BlockRule::new`.
struct BlockRule {
    u32 round;  ///< added to the bits of amax: a carry out of the mantissa doubles the scale
    u32 drop;  ///< exponent of the element type's largest power of two
    u32 least;  ///< least e8m0 of a block that is not zero

    /// The e8m0 scale; 255 (NaN) if a value is not finite.
    HK_FN u32 code(u32 amax_bits) const {
        const u32 exponent = (amax_bits + round) >> 23;
        const u32 floor = amax_bits == 0 ? 0 : least;
        u32 code = exponent > drop ? exponent - drop : 0;
        code = code > floor ? code : floor;
        return amax_bits >= AbsMax::kInfinity ? 255u : code;
    }
};

/// The value of an e8m0 scale: 2^(code - 127); NaN for 255.
HK_FN float e8m0_value(u32 code) {
    const u32 bits = code == 0 ? 0x00400000u : code << 23;
    return __builtin_bit_cast(float, code == 255u ? 0x7fc00000u : bits);
}

/// An e8m0 scale as two factors with half the exponent each; NaN for 255. For two scales, w1 x2 and w2 x1 are powers within f32's
/// range, so a sum scaled by one and then the other neither overflows nor underflows before its result does.
HK_FN Vec<float, 2> e8m0_factors(u32 code) {
    const u32 low = code / 2 + 64, high = code - code / 2 + 63;
    return {__builtin_bit_cast(float, code == 255u ? 0x7fc00000u : low << 23), __builtin_bit_cast(float, high << 23)};
}

/// 2^(127 - code) for 0 to 254, exactly.
HK_FN float e8m0_inverse(u32 code) {
    const u32 bits = code >= 254u ? 0x00400000u : (254u - code) << 23;
    return __builtin_bit_cast(float, bits);
}

/// Quantizes eight values to fp4 e2m1, the first in the lowest four bits. NaN gives an unspecified value. Ties round to even, or
/// away from zero if kAway. Zero results keep their sign.
template <bool kAway>
HK_FN u32 quantize_fp4(Vec<float, 8> v) {
    if constexpr (kAway) {
        // A set last bit breaks ties and changes no other rounding.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float near = detail::clamp(v[i], 8.0f);
            v[i] = __builtin_bit_cast(float, detail::bits_of(near) | 1u);
        }
    }
    if constexpr (kHasCvtFp4) return detail::native_fp4(v);
    // Steps of the magnitude m are 1/2 up to 2, then 1, then 2: the fp4 bits are the least of 2 m, m + 2 and m / 2 + 4, rounded.
    // A sum with kRound rounds to an integer in its low bits; sums of one sign compare as their bits do.
    constexpr float kRound = 0x1.8p+23f;
    Vec<float, 8> m;
#pragma unroll
    for (int i = 0; i < 8; ++i) m[i] = __builtin_fminf(__builtin_fabsf(v[i]), 6.0f);
    const auto rounded = [&](float factor, float plus) {
        const auto sum = __builtin_elementwise_fma(m, Vec<float, 8>(factor), Vec<float, 8>(kRound + plus));
        return __builtin_bit_cast(Vec<u32, 8>, sum);
    };
    const auto up_to_4 = __builtin_elementwise_min(rounded(2.0f, 0.0f), rounded(1.0f, 2.0f));
    const auto bits = __builtin_elementwise_min(up_to_4, rounded(0.5f, 4.0f));
    u32 dword = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) dword = (dword << 4) + bits[i];
    constexpr u32 kAdded = 0x11111111u * __builtin_bit_cast(u32, kRound);  // by kRound to all of them
    // The sign of every other value is the highest bit of a byte.
    const u32 even = detail::high_bytes(v[0], v[2], v[4], v[6]), odd = detail::high_bytes(v[1], v[3], v[5], v[7]);
    return (dword - kAdded) | (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

/// Dequantizes eight fp4 without a scale, exactly.
HK_FN Vec<float, 8> dequantize_fp4(u32 dword) {
    Vec<float, 8> v;
    if constexpr (kHasCvtFp4) return detail::native_fp4_values(dword);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // Exponent and mantissa at the position of an f32's (subnormals included), then the bias.
        const u32 code = dword >> (4 * i);
        v[i] = __builtin_bit_cast(float, (code & 7u) << 22 | (code & 8u) << 28) * 0x1p+126f;
    }
    return v;
}

namespace detail {

/// bf16 of values that it holds exactly.
template <int N>
HK_FN Vec<bf16, N> exact_bf16(Vec<float, N> v) {
    Vec<u32, N / 2> packed;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) packed[i] = high_halves(bits_of(v[2 * i]), bits_of(v[2 * i + 1]));
    return __builtin_bit_cast(Vec<bf16, N>, packed);
}

/// Eight elements of a dword, even indices first: the order where any will do.
HK_FN Vec<float, 8> even_then_odd(Vec<float, 8> v) { return __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7); }

}  // namespace detail

/// Rounds to the nearest fp4 value, ties to even, saturating at 6: `dequantize_fp4` of `quantize_fp4`.
template <int N>
HK_FN Vec<float, N> round_to_fp4(Vec<float, N> v) {
    Vec<float, N> rounded;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        // The last place of the sum is the step of fp4: half the power of two below the magnitude, at least 1/2.
        const float magnitude = __builtin_fminf(__builtin_fabsf(v[i]), 6.0f);
        const float at_least_one = __builtin_fmaxf(magnitude, 1.0f);
        const float binade = __builtin_bit_cast(float, detail::bits_of(at_least_one) & 0xff800000u);
        const float round = binade * 0x1.8p+22f;
        rounded[i] = __builtin_copysignf((magnitude + round) - round, v[i]);
    }
    return rounded;
}

}  // namespace hk

#include HK_TARGET_HEADER(fp4_table.h)  // needs what is above

namespace hk {

/// Dequantizes a block of 32 fp4. Each eight in the order 0, 2, 4, 6, 1, 3, 5, 7.
HK_FN void dequantize_fp4_block(Vec<u32, 4> packed, float scale, Vec<bf16, 8> (&v)[4]) {
    const Fp4Table table(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = table.even_then_odd(packed[i]);
}

}  // namespace hk
