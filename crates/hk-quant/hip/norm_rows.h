// norm_rows.h: rows that are normalised and then quantized, shared by fused_rmsnorm_fp8_quant.h and
// fused_rmsnorm_mxfp4_quant.h, which say how.
//   s[r, c]            = x[r, c] + residual_in[r, c]      in f32, not rounded; or x
//   residual_out[r, c] = round_T(s[r, c])
//   y[r, c]            = s[r, c] * rsqrt(mean(s[r, :]^2) + eps) * w[c]
//   out[r, c]          = round_T(y[r, c])                 where asked for
// What is quantized is y, or round_T(y) if `round_norm`. All arithmetic is f32, and y has the bits of the RMS norm of
// hk-norm. Source: Zhang & Sennrich 2019, eq. 4.
//
// How the work is split
//   As in hk-norm, so that sums have the same order: `Lanes` lanes hold a row in registers, so it is read once; chunks of 16
//   bytes go round the lanes in turn. Rows on lanes as hk/rows.h has it. Blocks step through the matrix with the weights kept in registers. A row too long for registers is walked
//   twice by one block, three times where its scale is not known before.
//   A lane's 8 bf16 become 8 bytes of fp8: those of a wave lie side by side.
#pragma once

#include <hk/block.h>
#include <hk/entry.h>
#include <hk/norm.h>
#include <hk/quant.h>
#include <hk/reg.h>
#include <hk/rows.h>

namespace norm_quant {

using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using hk::u8;

/// The norm's tensors and scalars, the head of both kernels' `Params`; the same fields as `NormParams` in src/fused_rmsnorm/mod.rs.
struct NormParams {
    hk::Global x, residual_in, weight;  // residual_in, residual_out: both or neither
    hk::Global residual_out, out;       // out: optional
    hk::RmsScalars norm;
    u32 round_norm;  // what is quantized is rounded to T
    u32 batch;       // rows that a block takes at a time
};

/// s of a batch of rows; if kStore, rounded sums go to residual_out.
template <bool kStore, class Block, class RowF>
HK_FN void load_sums(const Block &block, RowF (&s)[1], const NormParams &p, const RowBatch &batch) {
    typename Block::RowT x[1];
    block.load(x, p.x, batch);
    if (p.residual_in.present()) {
        block.template add<kStore>(s, x, p.residual_in, p.residual_out, false, batch);
    } else {
        s[0] = hk::widen(x[0]);
    }
}

/// y as it is quantized; if kStore, also to `out`.
template <bool kStore, class Block, class RowF>
HK_FN void finish(const Block &block, RowF (&y)[1], const NormParams &p, const RowBatch &batch) {
    using T = typename Block::RowT::Element;
    if (p.round_norm || (kStore && p.out.present())) {
        const auto rounded = hk::narrow<T>(y[0]);
        if (kStore && p.out.present()) block.store(rounded, p.out, batch, 0);
        if (p.round_norm) y[0] = hk::widen(rounded);
    }
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns. `Quantizer` is made once; its `quantize(block, y, batch)`
/// writes the codes and scales of a batch of rows.
template <template <class, class> class Quantizer, Access kAccess, class T, int Lanes, int ColsPerLane, class Params>
HK_FN void rows_in_registers(const Params &params) {
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, 1>;
    using RowT = typename Block::RowT;
    using RowF = typename Block::RowF;

    const NormParams &p = params.head;
    const Block block;
    const u32 cols = p.x.cols();
    // Of more columns the weights would leave room for one wave a SIMD; they come from the cache for each row.
    constexpr bool kKeepWeights = ColsPerLane <= 32;
    const auto weights = [&] { return p.norm.template held_weights<kAccess, RowT>(p.weight, block.column(), cols); };
    struct None {};
    const auto kept = [&] {
        if constexpr (kKeepWeights) return weights();
        else return None{};
    }();
    hk::GroupReducer<Block::kThreads, Lanes> group;
    Quantizer<Block, Params> quantizer(params, block);

    hk::for_row_batches<Block::kAlone>(p.x.rows(), cols, block.column(), p.batch, [&](const RowBatch &batch) {
        const Params &params_now = hk::read_anew(params);
        const NormParams &p = params_now.head;
        RowF y[1];
        load_sums<true>(block, y, p, batch);
        hk::SumSq sum_sq;
        sum_sq.add(y[0]);
        // As hk-norm multiplies: first by the root, then by the weight.
        const float rstd = p.norm.rstd(group.sum(sum_sq.total()));
        const auto scale = [&](const auto &held) {
            hk::with_vectors([&](auto weight) {
                RowF w;
#pragma unroll
                for (int k = 0; k < RowF::kChunks; ++k) w.chunk[k] = weight(k);
                y[0] = y[0] * rstd * w;
            }, held);
        };
        if constexpr (kKeepWeights) scale(kept);
        else scale(weights());
        finish<true>(block, y, p, batch);
        if (params_now.q.present()) {
            quantizer.observe(params_now, y[0], batch);
            quantizer.settle(params_now, batch);
            quantizer.write(params_now, y[0], batch);
        }
    });
    quantizer.end(params);
}

/// Rows of any length, in tiles of Lanes * ColsPerLane columns, by a block of Lanes threads.
template <template <class, class> class Quantizer, Access kAccess, class T, int Lanes, int ColsPerLane, class Params>
HK_FN void rows_in_tiles(const Params &params) {
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, 1>;
    using RowT = typename Block::RowT;
    using RowF = typename Block::RowF;

    const NormParams &p = params.head;
    const Block block;
    const u32 cols = p.x.cols();
    hk::GroupReducer<Lanes, Lanes> group;
    Quantizer<Block, Params> quantizer(params, block);

    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        // `f(params, s, tile)` for each tile.
        const auto for_sums = [&]<bool kStore>(auto f) {
            hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const RowBatch &tile) {
                const Params &now = hk::read_anew(params);
                RowF s[1];
                load_sums<kStore>(block, s, now.head, tile);
                f(now, s, tile);
            });
        };
        hk::SumSq sum_sq;
        for_sums.template operator()<false>([&](const Params &, RowF(&s)[1], const RowBatch &) { sum_sq.add(s[0]); });
        const float rstd = p.norm.rstd(group.sum(sum_sq.total()));
        const auto for_norms = [&]<bool kStore>(auto f) {
            for_sums.template operator()<kStore>([&](const Params &now, RowF(&y)[1], const RowBatch &tile) {
                const NormParams &p = now.head;
                y[0] = y[0] * rstd * p.norm.template weights<kAccess, RowT>(p.weight, tile.column, cols);
                finish<kStore>(block, y, p, tile);
                f(now, y[0], tile);
            });
        };
        if (quantizer.observes_rows(params)) {
            for_norms.template operator()<false>(
                [&](const Params &now, const RowF &y, const RowBatch &tile) { quantizer.observe(now, y, tile); });
            quantizer.settle(params, {row, 1, block.column(), cols});
        }
        // Outputs may lie on inputs: they are written only here, where this very lane has just read.
        for_norms.template operator()<true>([&](const Params &now, const RowF &y, const RowBatch &tile) {
            if (now.q.present()) quantizer.write(now, y, tile);
        });
    }
    quantizer.end(params);
}

}  // namespace norm_quant

// Entry points of one dtype, one per row of `VARIANTS` in src/fused_rmsnorm/mod.rs, named as those of hk-norm.
#define NORM_QUANT_ROWS(name, Quantizer, access, T, widest, lanes)                             \
    HK_ENTRY_FOR_WAVES(name, hk::row_threads(hk::row_lanes(lanes, widest)),                    \
                       hk::Access::access == hk::Access::Vectors ? 24 : 12, /* of an NVIDIA SM */ \
                       norm_quant::rows_in_registers<Quantizer, hk::Access::access, hk::T, HK_LANES_AND_COLS(lanes, widest)>)

#define NORM_QUANT_ENTRIES(op, Quantizer, T)                                               \
    NORM_QUANT_ROWS(op##_##T##_64, Quantizer, Vectors, T, 64, 8)                           \
    NORM_QUANT_ROWS(op##_##T##_512, Quantizer, Vectors, T, 512, 16)                        \
    NORM_QUANT_ROWS(op##_##T##_2048, Quantizer, Vectors, T, 2048, 64)                      \
    NORM_QUANT_ROWS(op##_##T##_4096, Quantizer, Vectors, T, 4096, 64)                      \
    NORM_QUANT_ROWS(op##_##T##_6144, Quantizer, Vectors, T, 6144, 128)                     \
    NORM_QUANT_ROWS(op##_##T##_8192, Quantizer, Vectors, T, 8192, 256)                     \
    NORM_QUANT_ROWS(op##_##T##_16384, Quantizer, Vectors, T, 16384, 256)                   \
    HK_ENTRY(op##_##T##_long, hk::row_threads(256),                                        \
             norm_quant::rows_in_tiles<Quantizer, hk::Access::Vectors, hk::T, 256, 16>)    \
    NORM_QUANT_ROWS(op##_##T##_64_elements, Quantizer, Elements, T, 64, 8)                 \
    NORM_QUANT_ROWS(op##_##T##_512_elements, Quantizer, Elements, T, 512, 16)              \
    NORM_QUANT_ROWS(op##_##T##_2048_elements, Quantizer, Elements, T, 2048, 64)            \
    NORM_QUANT_ROWS(op##_##T##_4096_elements, Quantizer, Elements, T, 4096, 64)            \
    NORM_QUANT_ROWS(op##_##T##_6144_elements, Quantizer, Elements, T, 6144, 128)           \
    NORM_QUANT_ROWS(op##_##T##_8192_elements, Quantizer, Elements, T, 8192, 256)           \
    NORM_QUANT_ROWS(op##_##T##_16384_elements, Quantizer, Elements, T, 16384, 256)         \
    HK_ENTRY(op##_##T##_long_elements, hk::row_threads(256),                               \
             norm_quant::rows_in_tiles<Quantizer, hk::Access::Elements, hk::T, 256, 16>)
