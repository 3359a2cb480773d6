// bytes.h: fp8 and int8 in memory. Values are widened to 16 bits in registers, exactly: two take two instructions, of fp8 on gfx950 one. Keys
// are multiplied as they are, by queries that are sums of terms of the same type.
#pragma once

#include <hk/arch.h>
#include <hk/matrix.h>
#include <hk/mma.h>
#include <hk/quant.h>
#include <hk/types.h>
#include <hk/wave_tile.h>

namespace attention::decode {

using hk::u32;
using hk::u8;
using hk::Vec;

/// Elements of kType, T in registers.
template <class T, hk::QuantType kType>
struct Bytes {
    static constexpr u32 kBytes = 1;
    static constexpr hk::QuantType kQuant = kType;

    /// N dwords of T from half as many.
    template <int N>
    HK_FN static Vec<u32, N> widened(Vec<u32, N / 2> v) {
        Vec<u32, N> pairs;
#pragma unroll
        for (int i = 0; i < N; ++i) pairs[i] = pair(v[i / 2], i % 2);
        return pairs;
    }
    /// Byte 2 half + i of `a` and of `b`.
    HK_FN static void across(u32 a, u32 b, int half, u32 (&pairs)[2]) {
#if defined(HK_AMD)
        if constexpr (kNative) {
            const u32 four = __builtin_amdgcn_perm(b, a, half ? 0x07030602u : 0x05010400u);
            pairs[0] = pair(four, 0), pairs[1] = pair(four, 1);
            return;
        }
#endif
        const auto x = hk::dequantize_packed<kType>(Vec<u32, 1>{a}), y = hk::dequantize_packed<kType>(Vec<u32, 1>{b});
#pragma unroll
        for (int i = 0; i < 2; ++i) pairs[i] = exact(x[2 * half + i], y[2 * half + i]);
    }

  private:
#if defined(HK_AMD)
    static constexpr bool kNative = hk::kHasCvtFp4 && kType == hk::kMmaFp8Type;
#else
    static constexpr bool kNative = false;
#endif

    /// Bytes 2 half and 2 half + 1.
    HK_FN static u32 pair(u32 dword, int half) {
#if defined(HK_AMD)
        if constexpr (kNative && __is_same(T, hk::bf16)) {
            return half ? __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(dword, 1.0f, true))
                        : __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(dword, 1.0f, false));
        } else if constexpr (kNative) {
            return half ? __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_f16_fp8(dword, 1.0f, true))
                        : __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_f16_fp8(dword, 1.0f, false));
        }
#endif
        const auto v = hk::dequantize_packed<kType>(Vec<u32, 1>{dword});
        return exact(v[2 * half], v[2 * half + 1]);
    }
    /// Two values that T holds.
    HK_FN static u32 exact(float a, float b) {
        if constexpr (__is_same(T, hk::bf16))
            return hk::detail::high_halves(hk::detail::bits_of(a), hk::detail::bits_of(b));
#if defined(HK_AMD)
        return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(a, b));
#else
        return __builtin_bit_cast(u32, hk::narrow<T, 2>(Vec<float, 2>{a, b}));
#endif
    }
};

template <class T>
using BytesFp8 = Bytes<T, hk::kMmaFp8Type>;
template <class T>
using BytesI8 = Bytes<T, hk::QuantType::I8>;

/// Probabilities of bytes that are subnormal numbers, lifted by a power of two.
template <class T>
struct Lifted {};
template <class T>
inline constexpr float kLiftOf = 64.0f;  // bf16: leaves factors of tokens 2^-45 to 2^55
template <>
inline constexpr float kLiftOf<hk::f16> =
    7.0f;  // up to 2^15 where OnlineSoftmax lets them grow to 2^8, down to 2^-31 of the base

/// int8 values as operands in T without a conversion: v + 128, unsigned, in the low byte is so many units of the smallest subnormal number.
/// (bf16: of 7 bits of significand, so from 128 on it is a normal number, of the same unit.) One v_perm takes two bytes. Matrix instructions
/// of CDNA3 and later keep subnormals. What 128 adds, one MFMA with kOffset takes away: it sums the probabilities as they were rounded.
template <class T>
struct OffsetValues {
    using Element = T;
    using Probability = Lifted<T>;
    static constexpr bool kBf16 = __is_same(T, hk::bf16);
    static constexpr u32 kOffset = 0x80808080u;  // two times -128 units, in both types
    // Values over outputs: units of 2^-133 or 2^-24, and the lift.
    static constexpr float kUnit = kBf16 ? 0x1p69f : 0x1p17f;

    static constexpr u32 kFlip = 0x80808080u;  // from v to v + 128

    /// Byte 2 half + i of `a` and of `b`, which are flipped.
    HK_FN static void across([[maybe_unused]] u32 a, [[maybe_unused]] u32 b, [[maybe_unused]] int half,
                             [[maybe_unused]] u32 (&pairs)[2]) {
#if defined(HK_AMD)
        constexpr u32 kOfB = 0x40000u;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) pairs[i] = __builtin_amdgcn_perm(b, a, kZeros + kOfB + (2 * half + i) * 0x10001u);
#endif
    }
    /// N dwords of T from half as many, not flipped.
    template <int N>
    HK_FN static Vec<u32, N> widened([[maybe_unused]] Vec<u32, N / 2> v) {
        Vec<u32, N> pairs;
#if defined(HK_AMD)
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 flipped = v[i / 2] ^ kFlip;
            pairs[i] = __builtin_amdgcn_perm(flipped, flipped, kZeros + (i % 2 ? 0x30002u : 0x10000u));
        }
#endif
        return pairs;
    }

  private:
    static constexpr u32 kZeros = 0x0c000c00u;  // of v_perm
};

template <bool kInts>
struct ElementOf {
    using Type = hk::Fp8;
};
template <>
struct ElementOf<true> {
    using Type = hk::I8;
};

/// Rows of queries as sums of terms of the cache's type, times the row's unit, a power of two: MFMAs take the bytes of keys as they are.
///
/// What T holds is the sum of terms, but for an error that is, of the row's largest magnitude, at most 2^-17 for fp8 (half of the type's
/// smallest value), 2^-22 for int8 and f16, 2^-15 for int8 and bf16 (there of values below 2^-7 of it; larger ones are exact).
/// A row with an infinity or a NaN has unit NaN.
template <class T, hk::QuantType kType>
struct SplitQuery {
    static constexpr bool kInts = kType == hk::QuantType::I8;
    static constexpr int kTerms = __is_same(T, hk::bf16) ? 2 : 3;
    // The largest magnitude is in 2^kLog2 to 2^(kLog2 + 1) units, but of two int8 at most 127 * 256 + 127, where the exponent is raised.
    static constexpr u32 kLog2 = kInts ? 14 : hk::kFp8IsFnuz ? 6 : 7, kRaise = kInts ? 0x10000 : 0;
    static constexpr float kThird = 128.0f;  // of int8: parts of a unit

    /// MFMAs over kLoads times 16 bytes a lane of rows of `columns`.
    template <int columns>
    struct Mma {
        using Element = typename ElementOf<kInts>::Type;
        static constexpr int kFastest = hk::kFastestCols<Element, Element, 16>,
                             kCols = kFastest <= columns ? kFastest : 32;
        using Unit = hk::MmaInstruction<Element, Element, 16, kCols>;
        using Acc = typename Unit::Acc;
        static constexpr int kWords = Unit::W::kWords, kLoads = kWords > 4 ? kWords / 4 : 1;

        HK_FN static Acc mma(const Vec<u32, 4> *w, const Vec<u32, 4> *x, Acc acc) {
#pragma unroll
            for (int first = 0; first < 4 * kLoads; first += kWords) {
                typename Unit::W::Words w_part, x_part;
#pragma unroll
                for (int i = 0; i < kWords; ++i) {
                    w_part[i] = w[(first + i) / 4][(first + i) % 4];
                    x_part[i] = x[(first + i) / 4][(first + i) % 4];
                }
                acc = Unit::mma(w_part, x_part, acc);
            }
            return acc;
        }
    };

    float unit = 1.0f;

    /// `bits`: of the row's largest magnitude.
    HK_FN explicit SplitQuery(u32 bits) {
        constexpr u32 kExponent = 0x7f800000u, kLeast = 0x10000000u;  // magnitudes below 2^-95 are not told from zero
        const u32 exponent = ((bits < kLeast ? kLeast : bits) + kRaise) & kExponent;
        unit = bits >= kExponent ? __builtin_nanf("") : __builtin_bit_cast(float, exponent - (kLog2 << 23));
    }
    /// 16 values to 16 bytes of each term.
    HK_FN void split(Vec<float, 16> v, Vec<u32, 4> (&terms)[kTerms]) const {
        const float inverse = 1.0f / unit;
        v *= inverse;
        if constexpr (kInts) {
            constexpr float kRound = 0x1.8p+23f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 of_term[3][4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float x = v[4 * i + j], whole = x + kRound;
                    of_term[1][j] = hk::detail::bits_of(whole);
                    of_term[0][j] = (of_term[1][j] + 128) >> 8;
                    if constexpr (kTerms > 2)
                        of_term[2][j] = hk::detail::bits_of((x - (whole - kRound)) * kThird + kRound);
                }
#pragma unroll
                for (int t = 0; t < kTerms; ++t)
                    terms[t][i] = hk::detail::low_bytes(of_term[t][0], of_term[t][1], of_term[t][2], of_term[t][3]);
            }
        } else {
#pragma unroll
            for (int t = 0; t < kTerms; ++t) {
                terms[t] = hk::quantize_packed<kType, 16>(v);
                if (t + 1 < kTerms) v -= hk::dequantize_packed<kType>(terms[t]);
            }
        }
    }
    /// `acc`, the sums of the products with terms so far, to what the next term is added to; `scores` after the last.
    template <class Acc, class Scores>
    HK_FN static void after(int term, Acc &acc, Scores &scores) {
        if constexpr (kInts) {
            if (term == 0)
                acc <<= 8;
            else if (term == 1)
                scores = __builtin_convertvector(acc, Scores), acc = Acc{};
            else
                scores += __builtin_convertvector(acc, Scores) * (1.0f / kThird);
        } else if (term + 1 == kTerms) {
            scores = acc;
        }
    }
};

}  // namespace attention::decode

namespace hk {
/// As if they lost so many bits more: sums() takes the lift back.
template <class T>
inline constexpr float kCutBits<attention::decode::Lifted<T>> = attention::decode::kLiftOf<T> + kCutBits<T>;
}  // namespace hk
