// norm_rows.h: the RMS norm of rows with a quantizing epilogue, shared by fused_rmsnorm_fp8_quant.h and
// fused_rmsnorm_mxfp4_quant.h, which define the epilogue `Quantizer`.
//   s[r, c]            = x[r, c] + residual_in[r, c]      in f32, not rounded; or x
//   residual_out[r, c] = round_T(s[r, c])
//   y[r, c]            = s[r, c] * rsqrt(mean(s[r, :]^2) + eps) * w[c]
//   out[r, c]          = round_T(y[r, c])                 optional
// Quantized is y, or round_T(y) if `round_norm`. All arithmetic is f32, and y is bitwise identical to the RMS norm of
// hk-norm. Source: Zhang & Sennrich 2019, eq. 4.
//
// How the work is split
//   As in hk-norm, so that reductions have the same order: `Lanes` lanes hold a row in registers, so it is read once; 16-byte
//   chunks are dealt to the lanes round-robin. Rows map to lanes as in hk/rows.h. Blocks loop over the matrix and keep the
//   weights in registers. A row too long for registers is read twice by one block, three times with a scale per token.
//   A lane's 8 bf16 become 8 bytes of fp8: the stores of a wave are coalesced.
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

/// Tensors and scalars of the norm, the head of both kernels' parameters.
struct NormParams {
    hk::Global x, residual_in, weight;  // residual_in, residual_out: both or neither
    hk::Global residual_out, out;  // out: optional
    hk::RmsScalars norm;
    u32 round_norm;  // 1: y is rounded to T before it is quantized
    u32 batch;  // rows that a block takes at a time
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

/// Rounds y if `round_norm`; if kStore, stores it to `out`.
template <bool kStore, class Block, class RowF>
HK_FN void finish(const Block &block, RowF (&y)[1], const NormParams &p, const RowBatch &batch) {
    using T = typename Block::RowT::Element;
    if (p.round_norm || (kStore && p.out.present())) {
        const auto rounded = hk::narrow<T>(y[0]);
        if (kStore && p.out.present()) block.store(rounded, p.out, batch, 0);
        if (p.round_norm) y[0] = hk::widen(rounded);
    }
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns. For each batch of rows, `Quantizer::observe` reduces,
/// `settle` stores scales per row, and `write` stores q and the other scales.
template <template <class, class> class Quantizer, Access kAccess, class T, int Lanes, int ColsPerLane, class Params>
HK_FN void rows_in_registers(const Params &params) {
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, 1>;
    using RowT = typename Block::RowT;
    using RowF = typename Block::RowF;

    const NormParams &p = params.head;
    const Block block;
    const u32 cols = p.x.cols();
    // Weights of more columns would leave registers for one wave per SIMD; they are reloaded for each row.
    constexpr bool kKeepWeights = ColsPerLane <= 32;
    const auto weights = [&] {
        return p.norm.template prefetch_weights<kAccess, RowT>(p.weight, block.column(), cols);
    };
    struct None {};
    const auto kept = [&] {
        if constexpr (kKeepWeights)
            return weights();
        else
            return None{};
    }();
    hk::GroupReducer<Block::kThreads, Lanes> group;
    Quantizer<Block, Params> quantizer(params, block);

    hk::for_row_batches<Block::kSingleRow>(p.x.rows(), cols, block.column(), p.batch, [&](const RowBatch &batch) {
        const Params &params_now = hk::reload_params(params);
        const NormParams &p = params_now.head;
        RowF y[1];
        load_sums<true>(block, y, p, batch);
        hk::RunningSumSq sum_sq;
        sum_sq.add(y[0]);
        // Same order as hk-norm: first rstd, then the weight.
        const float rstd = p.norm.rstd(group.sum(sum_sq.total()));
        const auto scale = [&](const auto &held) {
            hk::with_prefetched(
                [&](auto weight) {
                    RowF w;
#pragma unroll
                    for (int k = 0; k < RowF::kChunks; ++k) w.chunk[k] = weight(k);
                    y[0] = y[0] * rstd * w;
                },
                held);
        };
        if constexpr (kKeepWeights)
            scale(kept);
        else
            scale(weights());
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
                const Params &now = hk::reload_params(params);
                RowF s[1];
                load_sums<kStore>(block, s, now.head, tile);
                f(now, s, tile);
            });
        };
        hk::RunningSumSq sum_sq;
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
        // Outputs may alias inputs: a lane stores only what it has just loaded.
        for_norms.template operator()<true>([&](const Params &now, const RowF &y, const RowBatch &tile) {
            if (now.q.present()) quantizer.write(now, y, tile);
        });
    }
    quantizer.end(params);
}

}  // namespace norm_quant

// Entry points of one dtype, one per row of `VARIANTS` in src/fused_rmsnorm/mod.rs, named as those of hk-norm.
#define NORM_QUANT_ROWS(name, Quantizer, access, T, widest, lanes)                    \
    HK_ENTRY_WAVES_PER_SM(                                                            \
        name, hk::row_threads(hk::lanes_per_row(lanes, widest)),                      \
        hk::Access::access == hk::Access::Vectorized ? 24 : 12, /* of an NVIDIA SM */ \
        norm_quant::rows_in_registers<Quantizer, hk::Access::access, hk::T, HK_LANES_AND_COLS(lanes, widest)>)

#define NORM_QUANT_ENTRIES(op, Quantizer, T)                                               \
    NORM_QUANT_ROWS(op##_##T##_64, Quantizer, Vectorized, T, 64, 8)                        \
    NORM_QUANT_ROWS(op##_##T##_512, Quantizer, Vectorized, T, 512, 16)                     \
    NORM_QUANT_ROWS(op##_##T##_2048, Quantizer, Vectorized, T, 2048, 64)                   \
    NORM_QUANT_ROWS(op##_##T##_4096, Quantizer, Vectorized, T, 4096, 64)                   \
    NORM_QUANT_ROWS(op##_##T##_6144, Quantizer, Vectorized, T, 6144, 128)                  \
    NORM_QUANT_ROWS(op##_##T##_8192, Quantizer, Vectorized, T, 8192, 256)                  \
    NORM_QUANT_ROWS(op##_##T##_16384, Quantizer, Vectorized, T, 16384, 256)                \
    HK_ENTRY(op##_##T##_long, hk::row_threads(256),                                        \
             norm_quant::rows_in_tiles<Quantizer, hk::Access::Vectorized, hk::T, 256, 16>) \
    NORM_QUANT_ROWS(op##_##T##_64_scalar, Quantizer, Scalar, T, 64, 8)                     \
    NORM_QUANT_ROWS(op##_##T##_512_scalar, Quantizer, Scalar, T, 512, 16)                  \
    NORM_QUANT_ROWS(op##_##T##_2048_scalar, Quantizer, Scalar, T, 2048, 64)                \
    NORM_QUANT_ROWS(op##_##T##_4096_scalar, Quantizer, Scalar, T, 4096, 64)                \
    NORM_QUANT_ROWS(op##_##T##_6144_scalar, Quantizer, Scalar, T, 6144, 128)               \
    NORM_QUANT_ROWS(op##_##T##_8192_scalar, Quantizer, Scalar, T, 8192, 256)               \
    NORM_QUANT_ROWS(op##_##T##_16384_scalar, Quantizer, Scalar, T, 16384, 256)             \
    HK_ENTRY(op##_##T##_long_scalar, hk::row_threads(256),                                 \
             norm_quant::rows_in_tiles<Quantizer, hk::Access::Scalar, hk::T, 256, 16>)
