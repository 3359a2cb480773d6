// quant_x.h: a GEMM of 16-bit floats and the quantization of its activations to MX blocks of 32 columns, in one launch.
//   y[m, n] = epilogue(sum over k of a[m, k] w[n, k])
//   s[m, i] = 2^(b - 127), b from the largest magnitude of a[m, 32 i .. 32 i + 32] (hk::BlockRule)
//   q[m, k] = nearest element to a[m, k] / s[m, k / 32], ties to even; a block with NaN or infinity: b = 255, q = 0
//   a  [M, K]       T = bf16 | f16                     as of the GEMM
//   q  [M, K]       fp8 e4m3, e5m2 (OCP)               unit stride on K, any row stride
//      [M, K / 2]   pairs of fp4 e2m1, even columns low
//   s  [M, blocks]  e8m0                               any strides
// The first blocks compute tiles of y, the others quantize: a thread has one MX block, the last of a row may be short. Floor: bytes
// and flops of the GEMM, and M K / 32 more bytes for each bit of an element and 8 of a scale.
#pragma once

#include <hk/quant.h>
#include <hk/rows.h>

#include <gemm/operands/b16.h>

namespace gemm {

/// Columns that share a scale.
inline constexpr u32 kMxBlock = 32;

/// Element dtype; values of `element` in src/ops/fused_gemm_a16w16_quant_x.rs.
enum class MxElement : u32 { Fp4 = 0, Fp8 = 1, E5M2 = 2 };

struct QuantXParams {
    Params args;  // first: hk::reload_params reads the kernel's argument from its beginning
    u64 q, scale;
    i64 q_row, scale_row, scale_block;  // strides, in bytes
    u32 cols, blocks;  // K, MX blocks of a row
    hk::BlockRule rule;
    MxElement element;
    u32 vectors;  // rows of a and q are 16-byte aligned
    u32 pad;
};

/// Writes the quantized values of a block, but those of columns past `left`.
template <u32 kWords>
HK_FN void store_block(GlobalPtr<u8> to, Vec<u32, kWords> quants, u32 left, bool whole) {
    constexpr u32 kPerByte = 8 * kMxBlock / (32 * kWords);
    if (whole) {
        *reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(to) = __builtin_shufflevector(quants, quants, 0, 1, 2, 3);
        if constexpr (kWords == 8) {
            *reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(to + 16) = __builtin_shufflevector(quants, quants, 4, 5, 6, 7);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < 4 * kWords; ++i) {
            if (i * kPerByte < left) to[i] = u8(quants[i / 4] >> 8 * (i % 4));
        }
    }
}

/// Quantizes MX block `unit` of all rows of a.
template <class T>
HK_FN void quantize(const QuantXParams &p, u32 unit) {
    constexpr int kN = kMxBlock;
    const u32 row = unit / p.blocks, block = unit % p.blocks;
    if (row >= p.args.a.rows) return;
    const u32 column = block * kMxBlock, left = p.cols - column;
    const bool whole = p.vectors && left >= kMxBlock;

    const auto from = reinterpret_cast<GlobalPtr<const T>>(p.args.a.at(0, row));
    Vec<T, kN> a;
    if (whole) {
        constexpr int kVecCols = hk::kVecLen<T>;
#pragma unroll
        for (int i = 0; i < kN; i += kVecCols) {
            const auto part = *reinterpret_cast<GlobalPtr<const Vec<T, kVecCols>>>(from + column + i);
#pragma unroll
            for (int j = 0; j < kVecCols; ++j) a[i + j] = part[j];
        }
    } else {
        a = hk::StridedCursor<T>{from, 1, column, p.cols}.template load<kN>(0);
    }
    auto v = hk::widen<T, kN>(a);
    hk::AbsMax max;
    max.add(v);
    const u32 code = p.rule.code(max.bits);
    const u32 keep = code == 255u ? 0 : ~0u;
    v *= hk::e8m0_inverse(code);
    reinterpret_cast<GlobalPtr<u8>>(p.scale)[i64(row) * p.scale_row + i64(block) * p.scale_block] = u8(code);

    const GlobalPtr<u8> q = reinterpret_cast<GlobalPtr<u8>>(p.q) + i64(row) * p.q_row;
    if (p.element == MxElement::Fp4) {
        Vec<u32, kN / 8> quants;
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) {
            Vec<float, 8> eight;
#pragma unroll
            for (int j = 0; j < 8; ++j) eight[j] = v[8 * i + j];
            quants[i] = hk::quantize_fp4<false>(eight);
        }
        store_block<kN / 8>(q + column / 2, quants & keep, left, whole);
    } else if (p.element == MxElement::Fp8) {
        store_block<kN / 4>(q + column, hk::quantize_packed<hk::QuantType::Fp8, kN>(v) & keep, left, whole);
    } else {
        store_block<kN / 4>(q + column, hk::quantize_packed<hk::QuantType::Fp8E5M2, kN>(v) & keep, left, whole);
    }
}

/// A tile of the GEMM, or as many MX blocks as there are threads.
template <class T, class Tile>
HK_FN void quant_x_gemm(const QuantXParams &p) {
    const u32 tiles = p.args.grid.blocks;
    if (hk::block_x() < tiles) {
        Tile::run(p.args, SingleSite{});
    } else {
        quantize<T>(p, (hk::block_x() - tiles) * Tile::kThreads + hk::thread_x());
    }
}

}  // namespace gemm
