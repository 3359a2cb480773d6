// mma.h: MMA of small tiles from fragments, independent of the target's instructions (hk/matrix.h).
//   d[n, m] += sum over k of w[n, k] x[m, k]      n, m < kDim, which is 16 or 32; sums in f32, or i32 of int8
// A fragment is a lane's share of kDim rows of w or of x: 16 bytes of each of its rows, row_of_lane<kDim>, from
// 16 group_of_lane<kDim> on. Which columns of a longer row these are does not matter as long as both operands agree. The lane's
// accumulators are runs of kMmaRows consecutive n of one m; see AccLayout<kDim>.
#pragma once

#include <hk/arch.h>
#include <hk/matrix.h>
#include <hk/quant.h>
#include <hk/types.h>

namespace hk {

/// A lane's fragment of kDim rows: four dwords of each of its rows.
using Frag = Vec<u32, 4 * kRowsPerLane>;
/// Bytes of a row that the lanes' fragments hold together.
template <int kDim>
inline constexpr int kFragBytesOf = kLaneGroups<kDim> * 16;
inline constexpr int kFragBytes = kFragBytesOf<16>;

/// Reduces over the lanes that hold the same rows of kDim; `op` is commutative.
template <int kDim = 16, class T, class Op>
HK_FN T reduce_over_lane_groups(T v, Op op) {
    static_assert(kDim == 16 || kRowsPerLane == 1, "sm_90 has operands of 16 rows");
    if constexpr (kDim == 32) {
        return reduce_over_halves(v, op);
    } else {
        constexpr int kNext = kRowsPerLane == 1 ? 16 : 1;
        v = op(v, shuffle_xor<kNext>(v));
        return op(v, shuffle_xor<2 * kNext>(v));
    }
}

/// A value for each of a lane's rows.
template <class V>
struct PerRow {
    V row[kRowsPerLane];
};

/// `part(i)` for each row i of the lane.
template <class F>
HK_FN auto per_row(F part) {
    PerRow<decltype(part(0u))> rows;
#pragma unroll
    for (u32 i = 0; i < kRowsPerLane; ++i) rows.row[i] = part(i);
    return rows;
}
/// The first and the second half of the elements of each row.
template <class T, int N>
HK_FN PerRow<Vec<T, N / 2>> lower(const PerRow<Vec<T, N>> &rows) {
    return per_row([&](u32 i) { return rows.row[i].lo; });
}
template <class T, int N>
HK_FN PerRow<Vec<T, N / 2>> upper(const PerRow<Vec<T, N>> &rows) {
    return per_row([&](u32 i) { return rows.row[i].hi; });
}
/// Concatenates the rows.
template <class T, int N>
HK_FN Vec<T, N * kRowsPerLane> joined(const PerRow<Vec<T, N>> &rows) {
    return __builtin_bit_cast(Vec<T, N * kRowsPerLane>, rows);
}

/// MMA of fragments with the fastest instruction, over the columns of `kFrags` fragments. An operand's fragments are consecutive
/// array elements.
template <class W, class X = W, int kDim_ = 16>
struct FragMma {
    static constexpr int kDim = kDim_;
    static constexpr int kBytes = kBitsOf<W> / 8;  // of an element
    static_assert(kBytes * 8 == kBitsOf<W> && kBitsOf<X> == kBitsOf<W>, "elements of as many whole bytes");

  private:
    using Fastest = MmaInstruction<W, X, kDim, kFastestCols<W, X, kDim>>;
    static constexpr int kWords = Fastest::W::kWords;

  public:
    using Acc = typename Fastest::Acc;
    static constexpr int kWordsPerFrag = 4 * kRowsPerLane;  // dwords
    static constexpr int kFrags = kWords > kWordsPerFrag ? kWords / kWordsPerFrag : 1;

    HK_FN static Acc mma(const Frag *w, const Frag *x, Acc acc) {
#pragma unroll
        for (int first = 0; first < kWordsPerFrag * kFrags; first += kWords) {
            Vec<u32, kWords> w_part, x_part;
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                w_part[i] = w[(first + i) / kWordsPerFrag][(first + i) % kWordsPerFrag];
                x_part[i] = x[(first + i) / kWordsPerFrag][(first + i) % kWordsPerFrag];
            }
            acc = Fastest::mma(w_part, x_part, acc);
        }
        return acc;
    }
};

using MmaAcc = FragMma<bf16>::Acc;

/// A value per m (one for each of the lane's rows), or per n, broadcast to the lane's accumulators.
HK_FN MmaAcc broadcast_m(Vec<float, kRowsPerLane> v) {
    if constexpr (kRowsPerLane == 1) return MmaAcc(v[0]);
    MmaAcc of;
#pragma unroll
    for (int i = 0; i < kRowsPerLane * kMmaRows; ++i) of[i] = v[i / kMmaRows];
    return of;
}
HK_FN MmaAcc broadcast_n(Vec<float, kMmaRows> v) {
    MmaAcc of;
#pragma unroll
    for (int i = 0; i < kRowsPerLane * kMmaRows; ++i) of[i] = v[i % kMmaRows];
    return of;
}

/// 16 x 16, bf16 or f16: 8 consecutive elements of a row.
template <class T>
HK_FN MmaAcc mma(const PerRow<Vec<T, 8>> &w, const PerRow<Vec<T, 8>> &x, MmaAcc acc) {
    const Frag ws = __builtin_bit_cast(Frag, w), xs = __builtin_bit_cast(Frag, x);
    return FragMma<T>::mma(&ws, &xs, acc);
}

/// 16 x 16, fp8 of kMmaFp8Type: 8 elements of a row, four to a dword.
HK_FN MmaAcc mma_fp8(const PerRow<Vec<u32, 2>> &w, const PerRow<Vec<u32, 2>> &x, MmaAcc acc) {
    return MmaInstruction<Fp8, Fp8, 16, kLaneGroups<16> * 8>::mma(joined(w), joined(x), acc);
}

/// Columns of an mxfp4 MMA.
inline constexpr int kMxCols = kLaneGroups<16> * 32;

/// A lane's mxfp4 fragment of a row: a block of 32 consecutive elements with one power-of-two scale, from column 32 group_of_lane of
/// kMxCols. Without MX MMA the values are dequantized to bf16, exactly: divided by 4, all are in its range.
struct MxBlock {
#if defined(HK_MX_MMA)
    Vec<u32, 4> codes;
    u32 scale;
#else
    static constexpr float kUnit = 0.25f;
    Vec<bf16, 8> values[4];
#endif

    /// From packed fp4, eight to a dword, and their e8m0 scale.
    HK_FN static MxBlock from_packed(Vec<u32, 4> codes, u32 scale) {
        MxBlock block;
#if defined(HK_MX_MMA)
        block.codes = codes;
        block.scale = scale;
#else
        dequantize_fp4_block(codes, e8m0_value(scale) * kUnit, block.values);
#endif
        return block;
    }

    /// Quantizes a block; a value that is not finite makes the whole block NaN.
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
            block.codes[i] = scale == 255u ? 0u : quantize_fp4<false>(part);
#else
            const Vec<float, 8> value = round_to_fp4(part) * (e8m0_value(scale) * kUnit);
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
inline constexpr float kMxAccUnit = 1.0f;
#else
/// The unit of the accumulators of an mxfp4 MMA.
inline constexpr float kMxAccUnit = 1.0f / (MxBlock::kUnit * MxBlock::kUnit);
#endif

/// mxfp4 MMA; accumulators are in units of kMxAccUnit. With kDim 32 the lane's block is of row lane % 32.
template <int kDim = 16>
HK_FN auto mma_mxfp4(const PerRow<MxBlock> &w, const PerRow<MxBlock> &x, typename FragMma<bf16, bf16, kDim>::Acc acc) {
#if defined(HK_MX_MMA)
    using Fp4Instruction = MmaInstruction<Fp4, Fp4, kDim, kFastestCols<Fp4, Fp4, kDim>>;
    return Fp4Instruction::template mma<0, 0>(w.row[0].codes, x.row[0].codes, acc, w.row[0].scale, x.row[0].scale);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](const PerRow<MxBlock> &of) {
            return __builtin_bit_cast(Frag, per_row([&](u32 r) { return of.row[r].values[i]; }));
        };
        const Frag ws = part(w), xs = part(x);
        acc = FragMma<bf16, bf16, kDim>::mma(&ws, &xs, acc);
    }
    return acc;
#endif
}

}  // namespace hk
