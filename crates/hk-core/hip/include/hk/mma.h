// mma.h: products of small tiles, by fragments of rows, whatever the target's instructions are (hk/matrix.h).
//   d[n, m] += sum over k of w[n, k] x[m, k]      n, m < kDim, which is 16 or 32; sums in f32, or i32 of int8
// A fragment is a lane's share of kDim rows of w or of x: 16 bytes of each of its rows, row_of_lane<kDim>, from
// 16 group_of_lane<kDim> on. Which columns of a longer row these are does not matter as long as both operands agree. The lane's
// sums are runs of kMmaRows neighbouring n of one m; see Sums<kDim>.
#pragma once

#include <hk/arch.h>
#include <hk/matrix.h>
#include <hk/quant.h>
#include <hk/types.h>

namespace hk {

/// What a lane has of kDim rows: four words of each of its rows.
using Frag = Vec<u32, 4 * kLaneRows>;
/// Bytes of a row that the lanes of a fragment hold together.
template <int kDim>
inline constexpr int kFragBytesOf = kLaneGroups<kDim> * 16;
inline constexpr int kFragBytes = kFragBytesOf<16>;

/// Reduces over the lanes that have the same rows; `op` is commutative.
template <class T, class Op>
HK_FN T reduce_over_groups(T v, Op op) {
    constexpr int kNext = kLaneRows == 1 ? 16 : 1;
    v = op(v, exchange<kNext>(v));
    return op(v, exchange<2 * kNext>(v));
}

/// What a lane has of each of its rows.
template <class V>
struct OfRows {
    V row[kLaneRows];
};

/// What `part(i)` gives of the lane's row i.
template <class F>
HK_FN auto of_rows(F part) {
    OfRows<decltype(part(0u))> rows;
#pragma unroll
    for (u32 i = 0; i < kLaneRows; ++i) rows.row[i] = part(i);
    return rows;
}
/// The first and the second halves of all rows.
template <class T, int N>
HK_FN OfRows<Vec<T, N / 2>> lower(const OfRows<Vec<T, N>> &rows) {
    return of_rows([&](u32 i) { return rows.row[i].lo; });
}
template <class T, int N>
HK_FN OfRows<Vec<T, N / 2>> upper(const OfRows<Vec<T, N>> &rows) {
    return of_rows([&](u32 i) { return rows.row[i].hi; });
}
/// As one vector, row after row.
template <class T, int N>
HK_FN Vec<T, N * kLaneRows> joined(const OfRows<Vec<T, N>> &rows) {
    return __builtin_bit_cast(Vec<T, N * kLaneRows>, rows);
}

/// Products by fragments, over the columns of `kFrags` fragments of a row. An operand's other fragments in turn are in
/// neighbouring elements.
template <class W, class X = W, int kDim_ = 16>
struct Product {
    static constexpr int kDim = kDim_;
    static constexpr int kBytes = kBitsOf<W> / 8;  // of an element
    static_assert(kBytes * 8 == kBitsOf<W> && kBitsOf<X> == kBitsOf<W>, "elements of as many whole bytes");

private:
    using Fastest = Instruction<W, X, kDim, kFastestCols<W, X, kDim>>;
    static constexpr int kWords = Fastest::W::kWords;

public:
    using Acc = typename Fastest::Acc;
    static constexpr int kOfFrag = 4 * kLaneRows;  // words
    static constexpr int kFrags = kWords > kOfFrag ? kWords / kOfFrag : 1;

    HK_FN static Acc mma(const Frag *w, const Frag *x, Acc acc) {
#pragma unroll
        for (int first = 0; first < kOfFrag * kFrags; first += kWords) {
            Vec<u32, kWords> w_part, x_part;
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                w_part[i] = w[(first + i) / kOfFrag][(first + i) % kOfFrag];
                x_part[i] = x[(first + i) / kOfFrag][(first + i) % kOfFrag];
            }
            acc = Fastest::mma(w_part, x_part, acc);
        }
        return acc;
    }
};

using MmaAcc = Product<bf16>::Acc;

/// For each sum of a lane: what belongs to its m, one value for each of the lane's rows; what belongs to its n.
HK_FN MmaAcc by_m(Vec<float, kLaneRows> v) {
    if constexpr (kLaneRows == 1) return MmaAcc(v[0]);
    MmaAcc of;
#pragma unroll
    for (int i = 0; i < kLaneRows * kMmaRows; ++i) of[i] = v[i / kMmaRows];
    return of;
}
HK_FN MmaAcc by_n(Vec<float, kMmaRows> v) {
    MmaAcc of;
#pragma unroll
    for (int i = 0; i < kLaneRows * kMmaRows; ++i) of[i] = v[i % kMmaRows];
    return of;
}

/// Of 16 x 16, of bf16 or f16: 8 elements of a row, side by side.
template <class T>
HK_FN MmaAcc mma(const OfRows<Vec<T, 8>> &w, const OfRows<Vec<T, 8>> &x, MmaAcc acc) {
    const Frag ws = __builtin_bit_cast(Frag, w), xs = __builtin_bit_cast(Frag, x);
    return Product<T>::mma(&ws, &xs, acc);
}

/// Of 16 x 16, of 8 fp8 codes of the kind kMmaFp8 of a row, four to a word.
HK_FN MmaAcc mma_fp8(const OfRows<Vec<u32, 2>> &w, const OfRows<Vec<u32, 2>> &x, MmaAcc acc) {
    return Instruction<Fp8, Fp8, 16, kLaneGroups<16> * 8>::mma(joined(w), joined(x), acc);
}

/// Columns of a product of mxfp4.
inline constexpr int kMxCols = kLaneGroups<16> * 32;

/// A row's part of a fragment of mxfp4: 32 elements side by side, a block with one power-of-two scale, of kMxCols columns from
/// 32 group_of_lane on. Targets whose matrix unit does not take such blocks have their values in bf16, which holds all
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

/// Of mxfp4; sums are in units of kMxSumUnit. Of 32 x 32, the lane's block is of row lane % 32.
template <int kDim = 16>
HK_FN auto mma_mxfp4(const OfRows<MxBlock> &w, const OfRows<MxBlock> &x, typename Product<bf16, bf16, kDim>::Acc acc) {
#if defined(HK_MX_MMA)
    using Fp4Instruction = Instruction<Fp4, Fp4, kDim, kFastestCols<Fp4, Fp4, kDim>>;
    return Fp4Instruction::template mma<0, 0>(w.row[0].codes, x.row[0].codes, acc, w.row[0].scale, x.row[0].scale);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](const OfRows<MxBlock> &of) {
            return __builtin_bit_cast(Frag, of_rows([&](u32 r) { return of.row[r].values[i]; }));
        };
        const Frag ws = part(w), xs = part(x);
        acc = Product<bf16, bf16, kDim>::mma(&ws, &xs, acc);
    }
    return acc;
#endif
}

}  // namespace hk
