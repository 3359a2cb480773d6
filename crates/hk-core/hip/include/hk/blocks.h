// blocks.h: products of operands of different types, and of codes with scales: blocks of 32 columns a lane.
//   A lane has 32 elements side by side of each of its rows, among kMxCols columns from 32 group_of_lane on. What the matrix unit
//   does not take as it is becomes bf16 or f16, eight elements at a time, exactly.
#pragma once

#include <hk/mma.h>

namespace hk {

/// Codes of bytes.
template <class E>
inline constexpr CodeKind kCodeKind = __is_same(E, I8) ? CodeKind::I8 : kMmaFp8;

/// A lane's block of a row as it lies in memory. Its chunks of 16 bytes are kStep bytes apart in the row, those of the next
/// group of lanes kLaneStep bytes. If `kStriped`, chunks of all lanes come before the lanes' next ones: the way in which the
/// matrix unit takes bytes.
template <class E, bool kStriped = false>
struct Block {
    static constexpr int kChunks = kBitsOf<E> / 4;
    static constexpr u32 kLaneStep = kStriped ? 16 : 16 * kChunks;
    static constexpr u32 kStep = kStriped ? kFragBytes : 16;
    Vec<u32, 4> chunk[kChunks];
};

/// A row's block of 16-bit floats, in order.
template <class T>
struct Halves {
    Vec<T, 8> part[4];

    HK_FN static Halves of(const Block<T> &block) {
        Halves halves;
#pragma unroll
        for (int i = 0; i < 4; ++i) halves.part[i] = __builtin_bit_cast(Vec<T, 8>, block.chunk[i]);
        return halves;
    }
};

/// Eight values that T holds exactly.
template <class T>
HK_FN Vec<T, 8> exact_halves(Vec<float, 8> v) {
    if constexpr (__is_same(T, bf16)) {
        return detail::exact_bf16<8>(v);
    } else {
        return __builtin_convertvector(v, Vec<T, 8>);
    }
}

/// Eight codes of bytes.
template <class E, class T>
HK_FN Vec<T, 8> decoded(Vec<u32, 2> codes) {
    return exact_halves<T>(from_codes<kCodeKind<E>>(codes));
}

/// What values of fp4 with their scales are multiplied by in bf16, so that it holds all of them exactly: neither the largest nor
/// the least is out of its range then.
inline constexpr float kFp4Unit = 0.25f;

/// The values of fp4 codes of one block, times their scale and kFp4Unit: kWords words of eight.
template <int kWords>
HK_FN void decoded_fp4(Vec<u32, kWords> codes, u32 scale, Vec<bf16, 8> (&v)[kWords]) {
    const float unit = e8m0_value(scale) * kFp4Unit;
    if constexpr (kHasCvtFp4) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) v[i] = detail::exact_bf16<8>(from_fp4(codes[i]) * unit);
    } else {
        const Fp4Table table(unit);
#pragma unroll
        for (int i = 0; i < kWords; ++i) v[i] = table.in_order(codes[i]);
    }
}

/// Of bf16 by f16, which is the sum of two bf16.
HK_FN MmaAcc mma(const OfRows<Vec<bf16, 8>> &w, const OfRows<Vec<f16, 8>> &x, MmaAcc acc) {
    const auto all = of_rows([&](u32 r) { return widen<f16, 8>(x.row[r]); });
    acc = mma(w, of_rows([&](u32 r) { return detail::exact_bf16<8>(all.row[r]); }), acc);
    const auto rest = [&](u32 r) {
        Vec<float, 8> rest;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float v = all.row[r][i], high = __builtin_bit_cast(float, detail::bits_of(v) & 0xffff0000u);
            // An infinity has no rest.
            rest[i] = __builtin_fabsf(high) < __builtin_inff() ? v - high : 0.0f;
        }
        return detail::exact_bf16<8>(rest);
    };
    return mma(w, of_rows(rest), acc);
}

template <class W, class X>
HK_FN MmaAcc mma(const OfRows<Halves<W>> &w, const OfRows<Halves<X>> &x, MmaAcc acc) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](const auto &of) { return of_rows([&](u32 r) { return of.row[r].part[i]; }); };
        acc = mma(part(w), part(x), acc);
    }
    return acc;
}

/// A row's block of fp8 to be multiplied by one of mxfp4.
struct Fp8Block {
#if defined(HK_MX_MMA)
    using Raw = Block<Fp8, true>;
    Frag codes[2];
#else
    using Raw = Block<Fp8>;
    Vec<bf16, 8> values[4];
#endif

    HK_FN static Fp8Block of(const Raw &raw) {
        Fp8Block block;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#if defined(HK_MX_MMA)
            block.codes[i] = raw.chunk[i];
#else
            // In the order of MxBlock.
            const auto in_order = [](Vec<u32, 2> codes) { return detail::even_then_odd(from_codes<kMmaFp8>(codes)); };
            block.values[2 * i] = detail::exact_bf16<8>(in_order(raw.chunk[i].lo));
            block.values[2 * i + 1] = detail::exact_bf16<8>(in_order(raw.chunk[i].hi));
#endif
        }
        return block;
    }
};

/// What one stands for in sums of products of mxfp4 by fp8.
#if defined(HK_MX_MMA)
inline constexpr float kMxFp8SumUnit = 1.0f;
#else
inline constexpr float kMxFp8SumUnit = 1.0f / MxBlock::kUnit;
#endif

/// Products of fp8 in blocks of 32 columns, each with a power-of-two scale, over the columns of `kFrags` fragments of rows.
struct MxFp8 {
#if defined(HK_MX_MMA)
    static constexpr int kFrags = 2;
#else
    static constexpr int kFrags = 1;
#endif
    /// Blocks of a row in these.
    static constexpr int kBlocks = kFrags * kFragBytes / 32;

    /// Fragments of the lane's rows, and e8m0 codes, in the lowest byte the first: of the lane's block, its group's; or where the
    /// matrix unit takes no such blocks, of all of them.
    struct X {
        Frag codes[kFrags];
        OfRows<u32> scale;
    };
    /// The same; where the matrix unit takes no such blocks, the scales are of the rows whose sums the lane has.
    struct W {
        Frag codes[kFrags];
#if defined(HK_MX_MMA)
        u32 scale;
#else
        Vec<u32, kMmaRows> scale;
#endif
    };

    HK_FN static MmaAcc mma(const W &w, const X &x, MmaAcc acc) {
#if defined(HK_MX_MMA)
        const auto all = [](const Frag (&codes)[kFrags]) { return __builtin_shufflevector(codes[0], codes[1], 0, 1, 2, 3, 4, 5, 6, 7); };
        return Instruction<Fp8, Fp8, 16, kMxCols>::mma<0, 0>(all(w.codes), all(x.codes), acc, w.scale, x.scale.row[0]);
#else
        // Sums of a block are those of the lanes that have it.
#pragma unroll
        for (u32 b = 0; b < kBlocks; ++b) {
            const Frag codes = group_of_lane(lane_id()) / 2 == b ? w.codes[0] : Frag(0);
            const MmaAcc sum = Product<Fp8>::mma(&codes, x.codes, MmaAcc(0.0f));
            Vec<float, kMmaRows> w_first, w_second;
#pragma unroll
            for (int i = 0; i < kMmaRows; ++i) {
                const Vec<float, 2> factors = e8m0_factors(w.scale[i] >> 8 * b & 0xffu);
                w_first[i] = factors[0], w_second[i] = factors[1];
            }
            Vec<float, kLaneRows> x_first, x_second;
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
                const Vec<float, 2> factors = e8m0_factors(x.scale.row[i] >> 8 * b & 0xffu);
                x_first[i] = factors[0], x_second[i] = factors[1];
            }
            acc = __builtin_elementwise_fma(sum * (by_n(w_second) * by_m(x_first)), by_n(w_first) * by_m(x_second), acc);
        }
        return acc;
#endif
    }
};

/// Of mxfp4 by fp8; sums are in units of kMxFp8SumUnit.
HK_FN MmaAcc mma(const OfRows<MxBlock> &w, const OfRows<Fp8Block> &x, MmaAcc acc) {
#if defined(HK_MX_MMA)
    constexpr u32 kOne = 127;
    const auto &[codes] = x.row[0];
    const auto all = __builtin_shufflevector(codes[0], codes[1], 0, 1, 2, 3, 4, 5, 6, 7);
    return Instruction<Fp4, Fp8, 16, kMxCols>::mma<0, 0>(w.row[0].codes, all, acc, w.row[0].scale, kOne);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](const auto &of) { return of_rows([&](u32 r) { return of.row[r].values[i]; }); };
        acc = mma(part(w), part(x), acc);
    }
    return acc;
#endif
}
HK_FN MmaAcc mma(const OfRows<MxBlock> &w, const OfRows<MxBlock> &x, MmaAcc acc) { return mma_mxfp4(w, x, acc); }

}  // namespace hk
