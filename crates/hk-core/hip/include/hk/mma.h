// mma.h: products of small tiles in a wave's matrix unit.
//   d[n, m] += sum over k of w[n, k] x[m, k]      n, m < 16, k < kMmaCols; f32 sums
// A fragment is a lane's share of a tile [16, kMmaCols] of w or of x: 8 elements side by side of row lane % 16, from
// column 8 (lane / 16) on. Which columns of a longer row are called 0 .. kMmaCols does not matter as long as both
// operands agree, so a lane may as well take 16 bytes or more of a row at once. The accumulator of a lane is column
// m = lane % 16 of d: kMmaRows rows from n = kMmaRows (lane / 16) on.
#pragma once

#include <hk/arch.h>
#include <hk/quant.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Columns of the operands of one product.
inline constexpr int kMmaCols = kWaveSize / 16 * 8;
/// Rows of the result in a lane.
inline constexpr int kMmaRows = 16 * 16 / kWaveSize;

using MmaAcc = Vec<float, kMmaRows>;

/// The fp8 encoding that matrix products take.
inline constexpr CodeKind kMmaFp8 = kFp8IsFnuz ? CodeKind::Fp8Fnuz : CodeKind::Fp8;

namespace detail {

#if defined(HK_AMD)
template <int N, class T>
HK_FN auto as_operand(Vec<T, N> v) {
    // The builtins of 16 columns take bf16 as integers.
    if constexpr (__is_same(T, bf16)) {
        return __builtin_bit_cast(Vec<short, N>, v);
    } else {
        return v;
    }
}
#else
// For targets whose matrix unit spreads tiles in another way: lanes exchange what they need.
HK_FN float from_lane(float v, u32 lane) {
    const int bits = __builtin_bit_cast(int, v);
    return __builtin_bit_cast(float, __nvvm_shfl_sync_idx_i32(0xffffffffu, bits, int(lane), 0x1f));
}

HK_FN MmaAcc mma_by_exchange(Vec<float, 8> w, Vec<float, 8> x, MmaAcc acc) {
#pragma unroll 1
    for (u32 part = 0; part < kMmaCols / 8; ++part) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float other = from_lane(x[i], part * 16 + lane_id() % 16);
#pragma unroll
            for (u32 r = 0; r < kMmaRows; ++r) {
                acc[r] += from_lane(w[i], part * 16 + lane_id() / 16 * kMmaRows + r) * other;
            }
        }
    }
    return acc;
}

HK_FN Vec<int, kMmaRows> mma_i8_by_exchange(Vec<u32, 4> w, Vec<u32, 4> x, Vec<int, kMmaRows> acc) {
    const auto word_of = [](u32 v, u32 lane) { return __nvvm_shfl_sync_idx_i32(0xffffffffu, int(v), int(lane), 0x1f); };
#pragma unroll 1
    for (u32 part = 0; part < kWaveSize / 16; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int other = word_of(x[i], part * 16 + lane_id() % 16);
#pragma unroll
            for (u32 r = 0; r < kMmaRows; ++r) {
                const int mine = word_of(w[i], part * 16 + lane_id() / 16 * kMmaRows + r);
#pragma unroll
                for (int byte = 0; byte < 32; byte += 8) acc[r] += (mine << (24 - byte) >> 24) * (other << (24 - byte) >> 24);
            }
        }
    }
    return acc;
}
#endif

}  // namespace detail

/// Of bf16 or f16.
template <class T>
HK_FN MmaAcc mma(Vec<T, 8> w, Vec<T, 8> x, MmaAcc acc) {
#if defined(HK_AMD)
    if constexpr (kHasMma32) {
        if constexpr (__is_same(T, bf16)) {
            return __builtin_amdgcn_mfma_f32_16x16x32_bf16(w, x, acc, 0, 0, 0);
        } else {
            return __builtin_amdgcn_mfma_f32_16x16x32_f16(w, x, acc, 0, 0, 0);
        }
    } else {
        // Twice 16 columns: the first and the last four of each lane.
        const auto w_low = detail::as_operand<4, T>(w.lo), w_high = detail::as_operand<4, T>(w.hi);
        const auto x_low = detail::as_operand<4, T>(x.lo), x_high = detail::as_operand<4, T>(x.hi);
        if constexpr (__is_same(T, bf16)) {
            acc = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(w_low, x_low, acc, 0, 0, 0);
            return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(w_high, x_high, acc, 0, 0, 0);
        } else {
            acc = __builtin_amdgcn_mfma_f32_16x16x16f16(w_low, x_low, acc, 0, 0, 0);
            return __builtin_amdgcn_mfma_f32_16x16x16f16(w_high, x_high, acc, 0, 0, 0);
        }
    }
#else
    return detail::mma_by_exchange(widen<T, 8>(w), widen<T, 8>(x), acc);
#endif
}

/// Of fp8 codes of the kind kMmaFp8, four to a word.
HK_FN MmaAcc mma_fp8(Vec<u32, 2> w, Vec<u32, 2> x, MmaAcc acc) {
#if defined(HK_AMD)
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, w), __builtin_bit_cast(long, x), acc, 0, 0, 0);
#else
    return detail::mma_by_exchange(from_codes<kMmaFp8>(w), from_codes<kMmaFp8>(x), acc);
#endif
}

/// Columns of a product of mxfp4.
inline constexpr int kMxCols = kWaveSize / 16 * 32;

/// A fragment of mxfp4: 32 elements side by side of row lane % 16, a block with one power-of-two scale, of kMxCols columns
/// from 32 (lane / 16) on. Targets whose matrix unit does not take such blocks have their values in bf16, which holds all
/// of them exactly once they are divided by 4, since neither the largest nor the least is out of its range then.
struct MxBlock {
#if defined(HK_MX_MMA)
    Vec<u32, 4> codes;
    u32 scale;
#else
    static constexpr float kUnit = 0.25f;
    Vec<bf16, 8> values[4];
#endif

    /// Of fp4 codes, eight to a word, and the e8m0 code of their scale.
    HK_FN static MxBlock of_codes(Vec<u32, 4> codes, u32 scale) {
        MxBlock block;
#if defined(HK_MX_MMA)
        block.codes = codes;
        block.scale = scale;
#else
        from_fp4_block(codes, e8m0_value(scale) * kUnit, block.values);
#endif
        return block;
    }

    /// Quantizes; a value that is not finite makes all NaN.
    HK_FN static MxBlock quantized(Vec<float, 32> v, const BlockRule &rule) {
        AbsMax amax;
        amax.add(v);
        const u32 scale = rule.code(amax.bits);
        const float inverse = e8m0_inverse(scale);
        MxBlock block;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Vec<float, 8> part;
#pragma unroll
            for (int j = 0; j < 8; ++j) part[j] = v[8 * i + j] * inverse;
#if defined(HK_MX_MMA)
            block.codes[i] = scale == 255u ? 0u : to_fp4<false>(part);
#else
            const Vec<float, 8> value = rounded_to_fp4(part) * (e8m0_value(scale) * kUnit);
            block.values[i] = detail::exact_bf16<8>(detail::even_then_odd(value));
#endif
        }
#if defined(HK_MX_MMA)
        block.scale = scale;
#endif
        return block;
    }
};

#if defined(HK_MX_MMA)
inline constexpr float kMxSumUnit = 1.0f;
#else
/// What one in the sums of products of mxfp4 stands for.
inline constexpr float kMxSumUnit = 1.0f / (MxBlock::kUnit * MxBlock::kUnit);
#endif

/// Of mxfp4; sums are in units of kMxSumUnit.
HK_FN MmaAcc mma_mxfp4(const MxBlock &w, const MxBlock &x, MmaAcc acc) {
#if defined(HK_MX_MMA)
    constexpr int kFp4 = 4;
    const Vec<int, 8> a = {int(w.codes[0]), int(w.codes[1]), int(w.codes[2]), int(w.codes[3]), 0, 0, 0, 0};
    const Vec<int, 8> b = {int(x.codes[0]), int(x.codes[1]), int(x.codes[2]), int(x.codes[3]), 0, 0, 0, 0};
    return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, acc, kFp4, kFp4, 0, int(w.scale), 0, int(x.scale));
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) acc = mma<bf16>(w.values[i], x.values[i], acc);
    return acc;
#endif
}

/// What a lane has of 16 rows, 16 bytes of each: row lane % 16, bytes from 16 (lane / 16) on.
using Frag = Vec<u32, 4>;
/// Bytes of a row that the lanes of a fragment hold together.
inline constexpr int kFragBytes = kWaveSize / 16 * 16;

/// Element types of operands beside bf16 and f16.
struct Fp8 {};  ///< the fp8 that products take, kMmaFp8
struct I8 {};

/// Products by fragments: d[n, m] += sum over k of w[n, k] x[m, k], over the columns of `kFrags` fragments of a row.
template <class E>
struct Product {
    using Acc = MmaAcc;
    static constexpr int kBytes = sizeof(E);  // of an element
    static constexpr int kFrags = 1;

    HK_FN static Acc mma(const Frag *w, const Frag *x, Acc acc) {
        return hk::mma<E>(__builtin_bit_cast(Vec<E, 8>, w[0]), __builtin_bit_cast(Vec<E, 8>, x[0]), acc);
    }
};

template <>
struct Product<Fp8> {
    using Acc = MmaAcc;
    static constexpr int kBytes = 1;
    // Products of 128 columns are twice as fast as of 32, where there are any.
    static constexpr int kFrags = kHasMxMma ? 2 : 1;

    HK_FN static Acc mma(const Frag *w, const Frag *x, Acc acc) {
#if defined(HK_MX_MMA)
        const auto operand = [](const Frag *f) {
            return Vec<int, 8>{int(f[0][0]), int(f[0][1]), int(f[0][2]), int(f[0][3]),
                               int(f[1][0]), int(f[1][1]), int(f[1][2]), int(f[1][3])};
        };
        // Literal zeros for scales: the instruction without scales.
        return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(operand(w), operand(x), acc, 0, 0, 0, 0, 0, 0);
#else
        acc = mma_fp8(w[0].lo, x[0].lo, acc);
        return mma_fp8(w[0].hi, x[0].hi, acc);
#endif
    }
};

template <>
struct Product<I8> {
    using Acc = Vec<int, kMmaRows>;
    static constexpr int kBytes = 1;
    static constexpr int kFrags = 1;

    HK_FN static Acc mma(const Frag *w, const Frag *x, Acc acc) {
#if defined(HK_MX_MMA)
        return __builtin_amdgcn_mfma_i32_16x16x64_i8(__builtin_bit_cast(Vec<int, 4>, w[0]),
                                                     __builtin_bit_cast(Vec<int, 4>, x[0]), acc, 0, 0, 0);
#elif defined(HK_AMD)
        const auto half = [](Vec<u32, 2> v) { return __builtin_bit_cast(long, v); };
        acc = __builtin_amdgcn_mfma_i32_16x16x32_i8(half(w[0].lo), half(x[0].lo), acc, 0, 0, 0);
        return __builtin_amdgcn_mfma_i32_16x16x32_i8(half(w[0].hi), half(x[0].hi), acc, 0, 0, 0);
#else
        return detail::mma_i8_by_exchange(w[0], x[0], acc);
#endif
    }
};

}  // namespace hk
