// quant_x.h: a product of 16-bit floats, and its activations quantized to MX blocks of 32 columns, in one launch.
//   y[m, n] = epilogue(sum over k of x[m, k] w[n, k]), as in tiles.h and skinny.h
//   s[m, i] = 2^(b - 127), b from the largest magnitude of x[m, 32 i .. 32 i + 32] (hk::BlockRule)
//   q[m, k] = nearest element to x[m, k] / s[m, k / 32], ties to even; a block with NaN or infinity: b = 255, q = 0
//   x  [M, K]       T = bf16 | f16                     as of the product
//   q  [M, K]       fp8 e4m3, e5m2 (OCP)               unit stride on K, any row stride
//      [M, K / 2]   pairs of fp4 e2m1, even columns low
//   s  [M, blocks]  e8m0                               any strides
// The first blocks make tiles of y, the others quantize: a thread has one MX block, the last of a row may be short. Floor: bytes
// and flops of the product, and M K / 32 more bytes for each bit of an element and 8 of a scale.
#pragma once

#include <hk/quant.h>
#include <hk/rows.h>

#include "half_tiles.h"

namespace gemm {

/// Elements that share a scale.
inline constexpr u32 kMxBlock = 32;

/// What elements are; same values as `element` in src/quant_x.rs.
enum class MxElement : u32 { Fp4 = 0, Fp8 = 1, E5M2 = 2 };

struct QuantXParams {  // same layout as `QuantXParams` in src/params.rs
    Params product;    // first: it is read anew as a kernel's own
    u64 q, scale;
    i64 q_row, scale_row, scale_block;  // strides, in bytes
    u32 cols, blocks;                   // K, MX blocks of a row
    hk::BlockRule rule;
    MxElement element;
    u32 vectors;  // rows of x and q begin on 16 bytes
    u32 pad;
};

/// Writes codes of a block, those of columns past `left` excepted.
template <u32 kWords>
HK_FN void store_block(GlobalPtr<u8> to, Vec<u32, kWords> codes, u32 left, bool whole) {
    constexpr u32 kPerByte = 8 * kMxBlock / (32 * kWords);
    if (whole) {
        *reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(to) = __builtin_shufflevector(codes, codes, 0, 1, 2, 3);
        if constexpr (kWords == 8) {
            *reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(to + 16) = __builtin_shufflevector(codes, codes, 4, 5, 6, 7);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < 4 * kWords; ++i) {
            if (i * kPerByte < left) to[i] = u8(codes[i / 4] >> 8 * (i % 4));
        }
    }
}

/// Quantizes MX block `unit` of all rows of x.
template <class T>
HK_FN void quantize(const QuantXParams &p, u32 unit) {
    constexpr int kN = kMxBlock;
    const u32 row = unit / p.blocks, block = unit % p.blocks;
    if (row >= p.product.x.rows) return;
    const u32 column = block * kMxBlock, left = p.cols - column;
    const bool whole = p.vectors && left >= kMxBlock;

    const auto from = reinterpret_cast<GlobalPtr<const T>>(p.product.x.at(0, row));
    Vec<T, kN> x;
    if (whole) {
        constexpr int kPart = hk::kVecLen<T>;
#pragma unroll
        for (int i = 0; i < kN; i += kPart) {
            const auto part = *reinterpret_cast<GlobalPtr<const Vec<T, kPart>>>(from + column + i);
#pragma unroll
            for (int j = 0; j < kPart; ++j) x[i + j] = part[j];
        }
    } else {
        x = hk::StridedCursor<T>{from, 1, column, p.cols}.template load<kN>(0);
    }
    auto v = hk::widen<T, kN>(x);
    hk::AbsMax max;
    max.add(v);
    const u32 code = p.rule.code(max.bits);
    const u32 keep = code == 255u ? 0 : ~0u;
    v *= hk::e8m0_inverse(code);
    reinterpret_cast<GlobalPtr<u8>>(p.scale)[i64(row) * p.scale_row + i64(block) * p.scale_block] = u8(code);

    const GlobalPtr<u8> q = reinterpret_cast<GlobalPtr<u8>>(p.q) + i64(row) * p.q_row;
    if (p.element == MxElement::Fp4) {
        Vec<u32, kN / 8> codes;
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) {
            Vec<float, 8> eight;
#pragma unroll
            for (int j = 0; j < 8; ++j) eight[j] = v[8 * i + j];
            codes[i] = hk::to_fp4<false>(eight);
        }
        store_block<kN / 8>(q + column / 2, codes & keep, left, whole);
    } else if (p.element == MxElement::Fp8) {
        store_block<kN / 4>(q + column, hk::to_codes<hk::CodeKind::Fp8, kN>(v) & keep, left, whole);
    } else {
        store_block<kN / 4>(q + column, hk::to_codes<hk::CodeKind::Fp8E5M2, kN>(v) & keep, left, whole);
    }
}

/// A tile of the product, or as many MX blocks as there are threads.
template <class T, class Tile>
HK_FN void quant_x_gemm(const QuantXParams &p) {
    const u32 tiles = p.product.grid.blocks;
    if (hk::block_x() < tiles) {
        Tile::run(p.product, Alone{});
    } else {
        quantize<T>(p, (hk::block_x() - tiles) * Tile::kThreads + hk::thread_x());
    }
}

}  // namespace gemm
