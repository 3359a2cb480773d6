// mixed_mma.h: MFMA of operands of different dtypes, and of quantized blocks with scales.
//   A lane has 32 neighbouring elements of each of its rows: columns 32 group_of_lane .. + 31 of kMxCols. What the matrix unit does
//   not take is dequantized to bf16 or f16, eight elements at a time, exactly.
#pragma once

#include <hk/mma.h>

namespace hk {

/// The conversion of int8 or fp8.
template <class E>
inline constexpr QuantType kQuantType = __is_same(E, I8) ? QuantType::I8 : kMmaFp8Type;

/// A lane's block of a row as it lies in memory. Chunks of 16 bytes are kStep bytes apart in the row; the next lane group begins
/// kLaneStep bytes on. `kStriped`: chunk 0 of all lane groups comes before chunk 1, as the matrix unit takes bytes.
template <class E, bool kStriped = false>
struct Block {
    static constexpr int kChunks = kBitsOf<E> / 4;
    static constexpr u32 kLaneStep = kStriped ? 16 : 16 * kChunks;
    static constexpr u32 kStep = kStriped ? kFragBytes : 16;
    Vec<u32, 4> chunk[kChunks];
};

/// A row's block of 16-bit floats, in order.
template <class T>
struct Float16Block {
    Vec<T, 8> part[4];

    HK_FN static Float16Block of(const Block<T> &block) {
        Float16Block floats;
#pragma unroll
        for (int i = 0; i < 4; ++i) floats.part[i] = __builtin_bit_cast(Vec<T, 8>, block.chunk[i]);
        return floats;
    }
};

/// Converts eight values that T holds exactly.
template <class T>
HK_FN Vec<T, 8> exact_float16(Vec<float, 8> v) {
    if constexpr (__is_same(T, bf16)) {
        return detail::exact_bf16<8>(v);
    } else {
        return __builtin_convertvector(v, Vec<T, 8>);
    }
}

/// Dequantizes eight int8 or fp8 values.
template <class E, class T>
HK_FN Vec<T, 8> dequantize_bytes(Vec<u32, 2> quants) {
    return exact_float16<T>(dequantize_packed<kQuantType<E>>(quants));
}

/// Prescale of fp4 values times their scale in bf16: the largest and the smallest stay in range, so all are exact.
inline constexpr float kFp4Prescale = 0.25f;

/// Dequantizes the fp4 values of one block, times their scale and kFp4Prescale; eight values in each of kWords registers.
template <int kWords>
HK_FN void dequantize_fp4_scaled(Vec<u32, kWords> quants, u32 scale, Vec<bf16, 8> (&v)[kWords]) {
    const float unit = e8m0_value(scale) * kFp4Prescale;
    if constexpr (kHasCvtFp4) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) v[i] = detail::exact_bf16<8>(dequantize_fp4(quants[i]) * unit);
    } else {
        const Fp4Table table(unit);
#pragma unroll
        for (int i = 0; i < kWords; ++i) v[i] = table.in_order(quants[i]);
    }
}

/// bf16 by f16: f16 is split exactly into two bf16.
HK_FN MmaAcc mma(const PerRow<Vec<bf16, 8>> &w, const PerRow<Vec<f16, 8>> &a, MmaAcc acc) {
    const auto all = per_row([&](u32 r) { return widen<f16, 8>(a.row[r]); });
    acc = mma(w, per_row([&](u32 r) { return detail::exact_bf16<8>(all.row[r]); }), acc);
    const auto rest = [&](u32 r) {
        Vec<float, 8> rest;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float v = all.row[r][i], high = __builtin_bit_cast(float, detail::bits_of(v) & 0xffff0000u);
            // An infinity has no remainder.
            rest[i] = __builtin_fabsf(high) < __builtin_inff() ? v - high : 0.0f;
        }
        return detail::exact_bf16<8>(rest);
    };
    return mma(w, per_row(rest), acc);
}

template <class W, class A>
HK_FN MmaAcc mma(const PerRow<Float16Block<W>> &w, const PerRow<Float16Block<A>> &a, MmaAcc acc) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](const auto &of) { return per_row([&](u32 r) { return of.row[r].part[i]; }); };
        acc = mma(part(w), part(a), acc);
    }
    return acc;
}

/// A row's block of fp8 to be multiplied by one of mxfp4.
struct Fp8Block {
#if defined(HK_MX_MMA)
    using Raw = Block<Fp8, true>;
    Frag quants[2];
#else
    using Raw = Block<Fp8>;
    Vec<bf16, 8> values[4];
#endif

    HK_FN static Fp8Block of(const Raw &raw) {
        Fp8Block block;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#if defined(HK_MX_MMA)
            block.quants[i] = raw.chunk[i];
#else
            // In the order of MxBlock.
            const auto in_order = [](Vec<u32, 2> quants) {
                return detail::even_then_odd(dequantize_packed<kMmaFp8Type>(quants));
            };
            block.values[2 * i] = detail::exact_bf16<8>(in_order(raw.chunk[i].lo));
            block.values[2 * i + 1] = detail::exact_bf16<8>(in_order(raw.chunk[i].hi));
#endif
        }
        return block;
    }
};

/// Scale of accumulators of mxfp4 by fp8.
#if defined(HK_MX_MMA)
inline constexpr float kMxFp8AccUnit = 1.0f;
#else
inline constexpr float kMxFp8AccUnit = 1.0f / MxBlock::kUnit;
#endif

/// fp8 by fp8 in blocks of 32 columns with power-of-two scales, over the columns of `kFrags` fragments.
struct MxFp8 {
#if defined(HK_MX_MMA)
    static constexpr int kFrags = 2;
#else
    static constexpr int kFrags = 1;
#endif
    /// Blocks of a row in these.
    static constexpr int kBlocks = kFrags * kFragBytes / 32;

    /// Fragments of the lane's rows and their e8m0 scales. With block-scaled MFMA the lowest byte is the scale of the lane's own block;
    /// else the bytes are the scales of all kBlocks blocks.
    struct A {
        Frag quants[kFrags];
        PerRow<u32> scale;
    };
    /// The same for w. Without block-scaled MFMA the scales belong to the rows of the lane's accumulators.
    struct W {
        Frag quants[kFrags];
#if defined(HK_MX_MMA)
        u32 scale;
#else
        Vec<u32, kMmaRows> scale;
#endif
    };

    HK_FN static MmaAcc mma(const W &w, const A &a, MmaAcc acc) {
#if defined(HK_MX_MMA)
        const auto all = [](const Frag(&quants)[kFrags]) {
            return __builtin_shufflevector(quants[0], quants[1], 0, 1, 2, 3, 4, 5, 6, 7);
        };
        return MmaInstruction<Fp8, Fp8, 16, kMxCols>::mma<0, 0>(all(w.quants), all(a.quants), acc, w.scale,
                                                                a.scale.row[0]);
#else
        // A block's sum takes the values of the lanes that hold it; the other lanes contribute zeros.
#pragma unroll
        for (u32 b = 0; b < kBlocks; ++b) {
            const Frag quants = group_of_lane(lane_id()) / 2 == b ? w.quants[0] : Frag(0);
            const MmaAcc sum = FragMma<Fp8>::mma(&quants, a.quants, MmaAcc(0.0f));
            Vec<float, kMmaRows> w_first, w_second;
#pragma unroll
            for (int i = 0; i < kMmaRows; ++i) {
                const Vec<float, 2> factors = e8m0_factors(w.scale[i] >> 8 * b & 0xffu);
                w_first[i] = factors[0], w_second[i] = factors[1];
            }
            Vec<float, kRowsPerLane> a_first, a_second;
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                const Vec<float, 2> factors = e8m0_factors(a.scale.row[i] >> 8 * b & 0xffu);
                a_first[i] = factors[0], a_second[i] = factors[1];
            }
            acc = __builtin_elementwise_fma(sum * (broadcast_n(w_second) * broadcast_m(a_first)),
                                            broadcast_n(w_first) * broadcast_m(a_second), acc);
        }
        return acc;
#endif
    }
};

/// mxfp4 by fp8; accumulators are in units of kMxFp8AccUnit.
HK_FN MmaAcc mma(const PerRow<MxBlock> &w, const PerRow<Fp8Block> &a, MmaAcc acc) {
#if defined(HK_MX_MMA)
    constexpr u32 kOne = 127;
    const auto &[quants] = a.row[0];
    const auto all = __builtin_shufflevector(quants[0], quants[1], 0, 1, 2, 3, 4, 5, 6, 7);
    return MmaInstruction<Fp4, Fp8, 16, kMxCols>::mma<0, 0>(w.row[0].codes, all, acc, w.row[0].scale, kOne);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](const auto &of) { return per_row([&](u32 r) { return of.row[r].values[i]; }); };
        acc = mma(part(w), part(a), acc);
    }
    return acc;
#endif
}
HK_FN MmaAcc mma(const PerRow<MxBlock> &w, const PerRow<MxBlock> &a, MmaAcc acc) { return mma_mxfp4(w, a, acc); }

}  // namespace hk
