// quantize_rows.h: rows of 16-bit floats to int8, fp8 or mxfp4, as per_token_quant, group_quant and dynamic_mxfp4_quant of hk-quant
// do with their default options, bit for bit.
//   rows    s[r] = linear_scale(max_c |x[r, c]|)          q[r, c] = quantize(x[r, c] (1 / s[r]))
//   blocks  s[r, i] = group_scale(max of 128 columns)     likewise
//   mxfp4   s[r, i] = e8m0 of the largest of 32 columns   likewise
// How the work is split
//   A wave for each row. Up to 8192 columns stay in registers; with a scale for the row, columns beyond are read twice.
// Floor
//   Memory: 2 bytes of x, 1 or 1/2 of q a column, and the scales.
#pragma once

#include <hk/quant.h>
#include <hk/reg.h>
#include <hk/rows.h>
#include <hk/wave.h>

namespace route {

struct QuantizeRows {
    hk::Global x, q,
        scale;  // [rows, cols], in bytes of q [rows, cols] or [rows, cols / 2], scales contiguous; rows on 16 bytes
    hk::QuantFormat format;
    hk::BlockRule rule;  // of mxfp4
    hk::u32 pad;
};

/// Columns of a row as a wave holds them, kCols a lane and chunk.
template <class T, int kCols>
struct RowOfWave {
    using Part = hk::Row<T, hk::kWaveSize, kCols, 128 / kCols>;
    static constexpr hk::u32 kTile = Part::kCols;
    const QuantizeRows &p;
    hk::u32 row;

    /// This lane's first column of a chunk of the tile that begins at column `tile`.
    HK_FN hk::u32 column(hk::u32 tile, int chunk) const {
        return tile + (hk::u32(chunk) * hk::kWaveSize + hk::lane_id()) * kCols;
    }

    HK_FN Part load(hk::u32 tile) const {
        const hk::RowBatch batch{row, 1, column(tile, 0), p.x.cols()};
        return Part::load(batch.at<T, hk::Access::Vectorized, true>(p.x, 0));
    }

    /// Quantized values of the columns from `column` on.
    template <int kWords>
    HK_FN void store(hk::u32 column, hk::Vec<hk::u32, kWords> q) const {
        constexpr int kBytes = 4 * kWords;
        const hk::RowBatch batch{row, 1, column / kCols * kBytes, p.q.cols()};
        const hk::Row<hk::u8, hk::kWaveSize, kBytes, 1> bytes{{__builtin_bit_cast(hk::Vec<hk::u8, kBytes>, q)}};
        bytes.store(batch.at<hk::u8, hk::Access::Vectorized, true>(p.q, 0));
    }
};

/// A scale for the row.
template <class T>
HK_FN void quantize_row(const QuantizeRows &p, hk::u32 row) {
    using Of = RowOfWave<T, 16>;
    const Of of{p, row};
    const hk::u32 cols = p.x.cols();
    const auto first = of.load(0);
    hk::FiniteMax max;
    const auto add = [&](const auto &part) {
#pragma unroll
        for (int k = 0; k < Of::Part::kChunks; ++k) max.add(hk::widen<T, 16>(part.chunk[k]));
    };
    add(first);
#pragma unroll 1
    for (hk::u32 tile = Of::kTile; tile < cols; tile += Of::kTile) add(of.load(tile));
    const hk::u32 top = hk::group_reduce<hk::kWaveSize>(max.top, hk::MaxBits{});
    const float scale = hk::linear_scale(hk::FiniteMax::value(top), p.format.qmax), inverse = 1.0f / scale;
    if (hk::lane_id() == 0) p.scale.row<float>(0)[row] = scale;
    p.format.with_type([&](auto type) {
        const auto store = [&](hk::u32 tile, const auto &part) {
#pragma unroll
            for (int k = 0; k < Of::Part::kChunks; ++k) {
                // Widened again: f32 of all chunks would take twice the registers.
                auto words = __builtin_bit_cast(hk::Vec<hk::u32, 8>, part.chunk[k]);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    hk::u32 word = words[i];
                    hk::opaque(word);
                    words[i] = word;
                }
                const auto v = hk::widen<T, 16>(__builtin_bit_cast(hk::Vec<T, 16>, words)) * inverse;
                of.store(of.column(tile, k), hk::quantize_packed<decltype(type)::value, 16>(v));
            }
        };
        store(0, first);
#pragma unroll 1
        for (hk::u32 tile = Of::kTile; tile < cols; tile += Of::kTile) {
            store(tile, of.load(tile));
        }
    });
}

/// A scale for 128 columns.
template <class T>
HK_FN void quantize_blocks(const QuantizeRows &p, hk::u32 row) {
    using Of = RowOfWave<T, 16>;
    constexpr hk::u32 kGroup = 128;
    const Of of{p, row};
    const hk::u32 cols = p.x.cols(), groups = (cols + kGroup - 1) / kGroup;
    const auto scales = p.scale.row<float>(0) + hk::u64(row) * groups;
    p.format.with_type([&](auto type) {
#pragma unroll 1
        for (hk::u32 tile = 0; tile < cols; tile += Of::kTile) {
            const auto part = of.load(tile);
#pragma unroll
            for (int k = 0; k < Of::Part::kChunks; ++k) {
                const auto v = hk::widen<T, 16>(part.chunk[k]);
                hk::FiniteMax max;
                max.add(v);
                const hk::u32 top = hk::group_reduce<kGroup / 16>(max.top, hk::MaxBits{}), at = of.column(tile, k);
                const float scale = hk::group_scale(hk::FiniteMax::value(top), p.format.qmax);
                if (at < cols && at % kGroup == 0) scales[at / kGroup] = scale;
                of.store(at, hk::quantize_packed<decltype(type)::value, 16>(v * (1.0f / scale)));
            }
        }
    });
}

/// An e8m0 scale for 32 columns, which a lane has.
template <class T>
HK_FN void quantize_mxfp4(const QuantizeRows &p, hk::u32 row) {
    constexpr int kBlock = 32;
    using Of = RowOfWave<T, kBlock>;
    const Of of{p, row};
    const hk::u32 cols = p.x.cols(), blocks = cols / kBlock;
    const auto scales = p.scale.row<hk::u8>(0) + hk::u64(row) * blocks;
#pragma unroll 1
    for (hk::u32 tile = 0; tile < cols; tile += Of::kTile) {
        const auto part = of.load(tile);
#pragma unroll
        for (int k = 0; k < Of::Part::kChunks; ++k) {
            auto v = hk::widen<T, kBlock>(part.chunk[k]);
            hk::AbsMax max;
            max.add(v);
            const hk::u32 code = p.rule.code(max.bits), keep = code == 255u ? 0 : ~0u, at = of.column(tile, k);
            v *= hk::e8m0_inverse(code);
            hk::Vec<hk::u32, kBlock / 8> q;
#pragma unroll
            for (int i = 0; i < kBlock / 8; ++i) {
                hk::Vec<float, 8> eight;
#pragma unroll
                for (int j = 0; j < 8; ++j) eight[j] = v[8 * i + j];
                q[i] = hk::quantize_fp4<false>(eight) & keep;
            }
            if (at < cols) scales[at / kBlock] = hk::u8(code);
            of.store(at, q);
        }
    }
}

}  // namespace route
