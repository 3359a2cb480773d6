// quant.h: codes of quantized values. The one place that knows int8, fp8, fp4 and power-of-two scales; the host's
// side is hk_core::quant, and the bytes are those of the host's conversions, on every target.
//   Every conversion rounds to nearest even and saturates; infinities saturate too.
//   The two encodings of fp8 e4m3 differ by a factor of two for the same byte, but for NaN, -0 and the largest
//   codes: one is the target's own, and serves for the other as well.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// What a byte of a quantized tensor is; same values as `hk_core::quant::CodeKind`.
enum class CodeKind : u32 {
    I8 = 0,       ///< -127..127; NaN gives 0
    Fp8 = 1,      ///< e4m3 of the OCP, up to 448; NaN gives 0x7f
    Fp8Fnuz = 2,  ///< e4m3 FNUZ, up to 240; NaN gives 0x80, -0 gives 0
    Fp8E5M2 = 3,  ///< e5m2 of the OCP, up to 57344; NaN gives 0x7f, infinities saturate
};

/// Largest value of a kind.
template <CodeKind kKind>
inline constexpr float kCodeMax = kKind == CodeKind::I8    ? 127.0f
                                  : kKind == CodeKind::Fp8 ? 448.0f
                                  : kKind == CodeKind::Fp8Fnuz ? 240.0f : 57344.0f;

/// A kind as a type, so that a generic lambda can have it as its argument.
template <CodeKind kKind>
struct CodeKindOf {
    static constexpr CodeKind value = kKind;
};

/// The codes that a call writes, chosen at run time. Same layout as `hk_core::quant::CodeFormat`.
struct CodeFormat {
    float qmax;  ///< kCodeMax of `kind`
    CodeKind kind;

    /// Calls `f` with the kind as a type: a branch for as much work as `f` does. int8 and both e4m3 only.
    template <class F>
    HK_FN void with_kind(F f) const {
        if (kind == CodeKind::I8) {
            f(CodeKindOf<CodeKind::I8>{});
        } else if (kind == CodeKind::Fp8) {
            f(CodeKindOf<CodeKind::Fp8>{});
        } else {
            f(CodeKindOf<CodeKind::Fp8Fnuz>{});
        }
    }
};
static_assert(sizeof(CodeFormat) == 8, "same layout as hk_core::quant::CodeFormat");

namespace detail {

HK_FN u32 bits_of(float v) { return __builtin_bit_cast(u32, v); }

/// NaN gives either bound.
HK_FN float clamp(float v, float limit) {
#if defined(HK_AMD)
    return __builtin_amdgcn_fmed3f(v, -limit, limit);
#else
    return __builtin_fminf(__builtin_fmaxf(v, -limit), limit);
#endif
}

/// [-limit, limit], and `nan` for NaN.
HK_FN float clamp_or(float v, float limit, float nan) {
    // Else the tests for NaN would be moved ahead of a branch on the kind, and keep a pair of scalar registers each.
    u32 bits = bits_of(v);
    forget(bits);
    v = __builtin_bit_cast(float, bits);
    const float clamped = clamp(v, limit);
    return v == v ? clamped : nan;
}

/// The low bytes of four words.
HK_FN u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
#if defined(HK_AMD)
    const u32 low = __builtin_amdgcn_perm(b, a, 0x0c0c0400u);
    const u32 high = __builtin_amdgcn_perm(d, c, 0x0c0c0400u);
    return __builtin_amdgcn_perm(high, low, 0x05040100u);
#else
    return (a & 0xffu) | (b & 0xffu) << 8 | (c & 0xffu) << 16 | d << 24;
#endif
}

/// Four words of four bytes each, transposed.
HK_FN Vec<u32, 4> transpose_bytes(Vec<u32, 4> w) {
#if defined(HK_AMD)
    const u32 p0 = __builtin_amdgcn_perm(w[1], w[0], 0x05010400u), p1 = __builtin_amdgcn_perm(w[1], w[0], 0x07030602u);
    const u32 q0 = __builtin_amdgcn_perm(w[3], w[2], 0x05010400u), q1 = __builtin_amdgcn_perm(w[3], w[2], 0x07030602u);
    return {__builtin_amdgcn_perm(q0, p0, 0x05040100u), __builtin_amdgcn_perm(q0, p0, 0x07060302u),
            __builtin_amdgcn_perm(q1, p1, 0x05040100u), __builtin_amdgcn_perm(q1, p1, 0x07060302u)};
#else
    Vec<u32, 4> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[i] = low_bytes(w[0] >> (8 * i), w[1] >> (8 * i), w[2] >> (8 * i), w[3] >> (8 * i));
    }
    return out;
#endif
}

/// The high bytes of four values.
HK_FN u32 high_bytes(float a, float b, float c, float d) {
#if defined(HK_AMD)
    const u32 low = __builtin_amdgcn_perm(bits_of(b), bits_of(a), 0x0c0c0703u);
    const u32 high = __builtin_amdgcn_perm(bits_of(d), bits_of(c), 0x0c0c0703u);
    return __builtin_amdgcn_perm(high, low, 0x05040100u);
#else
    const u32 low = __nvvm_prmt(bits_of(a), bits_of(b), 0x73);
    const u32 high = __nvvm_prmt(bits_of(c), bits_of(d), 0x73);
    return __nvvm_prmt(low, high, 0x5410);
#endif
}

/// Bit 7 of each byte: the signs of four values.
HK_FN u32 sign_bytes(float a, float b, float c, float d) { return high_bytes(a, b, c, d) & 0x80808080u; }

/// Four values to the target's own fp8; beyond its range the result is not defined, unless kFp8Saturates.
template <bool kE5M2>
HK_FN u32 native_fp8(float a, float b, float c, float d) {
#if defined(HK_AMD)
    if constexpr (kE5M2) {
        const int low = __builtin_amdgcn_cvt_pk_bf8_f32(a, b, 0, false);
        return u32(__builtin_amdgcn_cvt_pk_bf8_f32(c, d, low, true));
    } else {
        const int low = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false);
        return u32(__builtin_amdgcn_cvt_pk_fp8_f32(c, d, low, true));
    }
#else
    if constexpr (kE5M2) {
        return u32(u16(__nvvm_ff_to_e5m2x2_rn(b, a))) | u32(u16(__nvvm_ff_to_e5m2x2_rn(d, c))) << 16;
    } else {
        return u32(u16(__nvvm_ff_to_e4m3x2_rn(b, a))) | u32(u16(__nvvm_ff_to_e4m3x2_rn(d, c))) << 16;
    }
#endif
}

template <CodeKind kKind>
HK_FN u32 to_code_word(float a, float b, float c, float d) {
    constexpr float kMax = kCodeMax<kKind>;
    constexpr bool kE5M2 = kKind == CodeKind::Fp8E5M2;
    constexpr bool kFnuz = kKind == CodeKind::Fp8Fnuz;
    if constexpr (kKind == CodeKind::I8) {
        // The sum's last place is 1: it rounds to an integer, whose two's complement begins its bits.
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
        // FNUZ from OCP, of twice the value: 0x80, the NaN, is its -0, which nothing else may become; 0x7f, the
        // largest value, is its NaN: made of the code below.
        constexpr float kBelowHalfStep = 0x1p-10f, kBelowLargest = 448.0f;
        constexpr float kRoundsToLargest = 232.0f, kOne = 0x1p-9f;  // the value of code 1
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

template <CodeKind kKind>
HK_FN Vec<float, 4> from_code_word(u32 word) {
    Vec<float, 4> v;
    if constexpr (kKind == CodeKind::I8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = float(i32(word << (24 - 8 * i)) >> 24);
    } else if constexpr (kKind == CodeKind::Fp8E5M2) {
        // The upper byte of an f16.
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = float(__builtin_bit_cast(f16, u16(((word >> (8 * i)) & 0xffu) << 8)));
    } else {
        constexpr bool kFnuz = kKind == CodeKind::Fp8Fnuz;
#if defined(HK_AMD)
        if constexpr (kFnuz == kFp8IsFnuz) {
            const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(int(word), false);
            const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(int(word), true);
            return {low[0], low[1], high[0], high[1]};
        }
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 code = (word >> (8 * i)) & 0xffu;
            // Exponent and mantissa in the place of an f32's, subnormal where the code is; then the bias.
            const u32 placed = (code & 0x7fu) << 20 | (code & 0x80u) << 24;
            const float value = __builtin_bit_cast(float, placed) * (kFnuz ? 0x1p+119f : 0x1p+120f);
            const bool is_nan = kFnuz ? code == 0x80u : (code & 0x7fu) == 0x7fu;
            v[i] = is_nan ? __builtin_nanf("") : value;
        }
    }
    return v;
}

}  // namespace detail

/// Codes of N values, four to a word, the first in the lowest byte.
template <CodeKind kKind, int N>
HK_FN Vec<u32, N / 4> to_codes(Vec<float, N> v) {
    static_assert(N % 4 == 0, "whole words");
    Vec<u32, N / 4> words;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        words[i] = detail::to_code_word<kKind>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    return words;
}

/// The code of one value.
template <CodeKind kKind>
HK_FN u8 to_code(float v) {
    u32 word = detail::to_code_word<kKind>(v, 0.0f, 0.0f, 0.0f);
#if !defined(HK_AMD)
    // ptxas 12 makes a conversion to an integer of storing the low byte of a float's bits.
    forget(word);
#endif
    return u8(word);
}

/// The values of codes, exactly.
template <CodeKind kKind, int W>
HK_FN Vec<float, 4 * W> from_codes(Vec<u32, W> words) {
    Vec<float, 4 * W> v;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        const Vec<float, 4> four = detail::from_code_word<kKind>(words[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[4 * i + j] = four[j];
    }
    return v;
}

/// The value of one code, exactly.
template <CodeKind kKind>
HK_FN float from_code(u8 code) {
    return detail::from_code_word<kKind>(code)[0];
}

/// The larger of two words: reduces FiniteMax::top and AbsMax::bits over lanes.
struct MaxBits {
    HK_FN u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

/// The largest magnitude among the finite ones of some values.
struct FiniteMax {
    static constexpr u32 kZero = 0x01000000u;

    /// Ordered as magnitudes are: the bits without the sign, doubled, plus a constant that makes NaN and
    /// infinities wrap round to below zero.
    u32 top = kZero;

    template <int N>
    HK_FN void add(Vec<float, N> v) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 key = (detail::bits_of(v[i]) << 1) + kZero;
            top = key > top ? key : top;
        }
    }

    /// The magnitude behind a reduced `top`; 0 if no value is finite.
    HK_FN static float value(u32 top) { return __builtin_bit_cast(float, (top - kZero) >> 1); }
};

/// The scale of a row or tensor: the codes reach `qmax` where values reach `amax`. Zeros have the scale 1; below 1e-30 the
/// reciprocal would not be finite.
HK_FN float linear_scale(float amax, float qmax) {
    return amax > 0.0f ? __builtin_fmaxf(amax, 1e-30f) / qmax : 1.0f;
}

/// The scale of a group.
HK_FN float group_scale(float amax, float qmax) { return __builtin_fmaxf(amax, 1e-10f) / qmax; }

/// The bits of the largest magnitude of some values, which is at least kInfinity if one is not finite.
struct AbsMax {
    static constexpr u32 kInfinity = 0x7f800000u;

    u32 bits = 0;

    template <int N>
    HK_FN void add(Vec<float, N> v) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
#if defined(HK_AMD)
            const u32 magnitude = detail::bits_of(v[i]) & 0x7fffffffu;
            bits = magnitude > bits ? magnitude : bits;
#else
            // One instruction; a NaN makes the largest one.
            bits = detail::bits_of(__nvvm_fmax_nan_f(__builtin_bit_cast(float, bits), __builtin_fabsf(v[i])));
#endif
        }
    }
};

/// How a power-of-two scale follows from the largest magnitude; made by `hk_core::quant::BlockRule::new`.
struct BlockRule {
    u32 round;  ///< added to its bits: a carry out of the mantissa doubles the scale
    u32 drop;   ///< exponent of the largest power of two among the codes
    u32 least;  ///< least code of a block that is not zero

    /// The e8m0 code of the scale; 255 if a value is not finite.
    HK_FN u32 code(u32 amax_bits) const {
        const u32 exponent = (amax_bits + round) >> 23;
        const u32 floor = amax_bits == 0 ? 0 : least;
        u32 code = exponent > drop ? exponent - drop : 0;
        code = code > floor ? code : floor;
        return amax_bits >= AbsMax::kInfinity ? 255u : code;
    }
};

/// 2^(code - 127); NaN for 255.
HK_FN float e8m0_value(u32 code) {
    const u32 bits = code == 0 ? 0x00400000u : code << 23;
    return __builtin_bit_cast(float, code == 255u ? 0x7fc00000u : bits);
}

/// Two factors whose product is 2^(code - 127); NaN for 255. Their exponents are half of that, which is rounded to zero in the first
/// one: with another such pair, first times second and second times first are no powers out of f32's range, whatever the codes, and
/// as near to each other as can be. So a sum times one, times the other, has f32's range but for the result.
HK_FN Vec<float, 2> e8m0_factors(u32 code) {
    const u32 low = code / 2 + 64, high = code - code / 2 + 63;
    return {__builtin_bit_cast(float, code == 255u ? 0x7fc00000u : low << 23), __builtin_bit_cast(float, high << 23)};
}

/// 2^(127 - code) for codes up to 254, exactly.
HK_FN float e8m0_inverse(u32 code) {
    const u32 bits = code >= 254u ? 0x00400000u : (254u - code) << 23;
    return __builtin_bit_cast(float, bits);
}

/// fp4 e2m1 codes of eight values, the first in the lowest four bits. NaN has no code: the result is any. A tie goes to
/// the even code, or away from zero if kAway. The sign stays where the result is zero.
template <bool kAway>
HK_FN u32 to_fp4(Vec<float, 8> v) {
    if constexpr (kAway) {
        // What is not zero in the last place is not a tie, but has the neighbours that it had.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float near = detail::clamp(v[i], 8.0f);
            v[i] = __builtin_bit_cast(float, detail::bits_of(near) | 1u);
        }
    }
#if defined(HK_AMD)
    if constexpr (kHasCvtFp4) {
        u32 pairs = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(0, v[0], v[1], 1.0f, 0);
        pairs = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(pairs, v[2], v[3], 1.0f, 1);
        pairs = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(pairs, v[4], v[5], 1.0f, 2);
        return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(pairs, v[6], v[7], 1.0f, 3);
    }
#endif
    // Steps of the magnitude m are 1/2 up to 2, then 1, then 2: its code is the least of 2 m, m + 2 and m / 2 + 4,
    // rounded. A sum with kRound rounds to an integer, which ends its bits; sums of one sign are ordered as their bits
    // are.
    constexpr float kRound = 0x1.8p+23f;
    Vec<float, 8> m;
#pragma unroll
    for (int i = 0; i < 8; ++i) m[i] = __builtin_fminf(__builtin_fabsf(v[i]), 6.0f);
    const auto rounded = [&](float factor, float plus) {
        const auto sum = __builtin_elementwise_fma(m, Vec<float, 8>(factor), Vec<float, 8>(kRound + plus));
        return __builtin_bit_cast(Vec<u32, 8>, sum);
    };
    const auto up_to_4 = __builtin_elementwise_min(rounded(2.0f, 0.0f), rounded(1.0f, 2.0f));
    const auto codes = __builtin_elementwise_min(up_to_4, rounded(0.5f, 4.0f));
    u32 word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) word = (word << 4) + codes[i];
    constexpr u32 kAdded = 0x11111111u * __builtin_bit_cast(u32, kRound);  // by kRound to all of them
    // The sign of every other value is the highest bit of a byte.
    const u32 even = detail::high_bytes(v[0], v[2], v[4], v[6]), odd = detail::high_bytes(v[1], v[3], v[5], v[7]);
    return (word - kAdded) | (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

/// The values of eight fp4 codes, exactly.
HK_FN Vec<float, 8> from_fp4(u32 word) {
    Vec<float, 8> v;
#if defined(HK_AMD)
    if constexpr (kHasCvtFp4) {
        const auto a = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(word, 1.0f, 0);
        const auto b = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(word, 1.0f, 1);
        const auto c = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(word, 1.0f, 2);
        const auto d = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(word, 1.0f, 3);
        return {a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
    }
#endif
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // As bits of an f32: exponent and mantissa, subnormal where the code is; then the bias.
        const u32 code = word >> (4 * i);
        v[i] = __builtin_bit_cast(float, (code & 7u) << 22 | (code & 8u) << 28) * 0x1p+126f;
    }
    return v;
}

namespace detail {

/// bf16 of values that it holds exactly.
template <int N>
HK_FN Vec<bf16, N> exact_bf16(Vec<float, N> v) {
    Vec<u32, N / 2> words;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words[i] = high_halves(bits_of(v[2 * i]), bits_of(v[2 * i + 1]));
    return __builtin_bit_cast(Vec<bf16, N>, words);
}

/// The order in which a word's eight elements are taken where it does not matter: those of even, then of odd index.
HK_FN Vec<float, 8> even_then_odd(Vec<float, 8> v) { return __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7); }

}  // namespace detail

/// Values rounded to the nearest of fp4, ties to the even code, 6 beyond 6: what `from_fp4` makes of the codes of `to_fp4`.
template <int N>
HK_FN Vec<float, N> rounded_to_fp4(Vec<float, N> v) {
    Vec<float, N> rounded;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        // A sum's last place is the step between codes: half the power of two below the magnitude, but not less than 1/2.
        const float magnitude = __builtin_fminf(__builtin_fabsf(v[i]), 6.0f);
        const float at_least_one = __builtin_fmaxf(magnitude, 1.0f);
        const float binade = __builtin_bit_cast(float, detail::bits_of(at_least_one) & 0xff800000u);
        const float round = binade * 0x1.8p+22f;
        rounded[i] = __builtin_copysignf((magnitude + round) - round, v[i]);
    }
    return rounded;
}

/// The values of fp4 codes times a power of two, exactly, if bf16 has them.
class Fp4Table {
#if defined(HK_AMD)
    // The two bytes of the values of codes 0 .. 7, which a byte permutation looks four codes at a time up in.
    u32 low_[2], high_[2];

    /// Lower and upper bytes of the values of every other code, and how they come together.
    HK_FN void look_up(u32 codes, u32 &lower, u32 &upper) const {
        constexpr u32 kMagnitudes = 0x07070707u, kSigns = 0x80808080u;
        lower = __builtin_amdgcn_perm(low_[1], low_[0], codes & kMagnitudes);
        upper = __builtin_amdgcn_perm(high_[1], high_[0], codes & kMagnitudes) | (codes << 4 & kSigns);
    }
#else
    float scale_;
#endif

public:
    HK_FN explicit Fp4Table(float scale) {
#if defined(HK_AMD)
        const Vec<float, 8> values = from_fp4(0x76543210u) * scale;
        const Vec<u32, 4> halves = __builtin_bit_cast(Vec<u32, 4>, detail::exact_bf16<8>(values));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low_[i] = __builtin_amdgcn_perm(halves[2 * i + 1], halves[2 * i], 0x06040200u);
            high_[i] = __builtin_amdgcn_perm(halves[2 * i + 1], halves[2 * i], 0x07050301u);
        }
#else
        scale_ = scale;
#endif
    }

    /// Of a word's eight codes, in the order 0, 2, 4, 6, 1, 3, 5, 7.
    HK_FN Vec<bf16, 8> even_then_odd(u32 codes) const {
#if defined(HK_AMD)
        Vec<u32, 4> words;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            u32 lower, upper;
            look_up(codes >> (4 * odd), lower, upper);
            words[2 * odd] = __builtin_amdgcn_perm(upper, lower, 0x05010400u);
            words[2 * odd + 1] = __builtin_amdgcn_perm(upper, lower, 0x07030602u);
        }
        return __builtin_bit_cast(Vec<bf16, 8>, words);
#else
        return detail::exact_bf16<8>(detail::even_then_odd(from_fp4(codes) * scale_));
#endif
    }

    /// In order.
    HK_FN Vec<bf16, 8> in_order(u32 codes) const {
#if defined(HK_AMD)
        // The halves of words of even, then of odd codes.
        const Vec<u32, 4> words = __builtin_bit_cast(Vec<u32, 4>, even_then_odd(codes));
        Vec<u32, 4> pairs;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pairs[2 * i] = __builtin_amdgcn_perm(words[2 + i], words[i], 0x05040100u);
            pairs[2 * i + 1] = __builtin_amdgcn_perm(words[2 + i], words[i], 0x07060302u);
        }
        return __builtin_bit_cast(Vec<bf16, 8>, pairs);
#else
        return detail::exact_bf16<8>(from_fp4(codes) * scale_);
#endif
    }
};

/// Those of 32 codes. Each eight of them in the order 0, 2, 4, 6, 1, 3, 5, 7.
HK_FN void from_fp4_block(Vec<u32, 4> codes, float scale, Vec<bf16, 8> (&v)[4]) {
    const Fp4Table table(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = table.even_then_odd(codes[i]);
}

}  // namespace hk
