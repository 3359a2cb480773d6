// rms_rows.h: the root-mean-square norm of rows, shared by rmsnorm.hip and fused_add_rmsnorm.hip.
//   s[r, c] = x[r, c]                                    rmsnorm
//           = x[r, c] + residual_in[r, c]                fused_add_rmsnorm; rounded to T it goes to residual_out, and,
//                                                        but for the padded form, the norm is that of the rounded sum
//   rstd[r] = rsqrt(sum_c s[r, c]^2 / cols + eps)
//   y[r, c] = round_T(s[r, c] * rstd[r] * (w[c] + weight_offset))     c < cols
//           = 0                                                       where y is wider than x: the padded forms
// All arithmetic is f32. Source: Zhang & Sennrich 2019, eq. 4.
//
// How the work is split
//   `Lanes` lanes hold a row in registers, so it is read once: 16-byte chunks are dealt to the lanes round-robin. Rows
//   map to lanes as in hk/rows.h. Each lane has at least four loads in flight before it waits. Blocks loop over the
//   matrix and keep the weights in registers.
//   A row too long for registers is read twice by one block.
//   Batch-invariant: the order of a row's reduction depends on its length alone, not on the number of rows, the position
//   of the row or the access path (vectorized, scalar, strided columns).
// Floor
//   Memory: rows * cols * 2 * sizeof(T) + cols * sizeof(w), twice that for fused_add_rmsnorm. In VALU instructions
//   a 16-byte chunk of 8 bf16 costs a wave, at 64 lanes: 8 to widen, 4 to square and add, 4 + 4 to scale,
//   and to round 4 on gfx950 and 36 on gfx942, which has no conversion: 24 and 56. A CU issues one a clock,
//   while at 6 TB/s over 304 CUs of 2.1 GHz the 2 KiB that the chunk moves take it 218 clocks.
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/norm.h>
#include <hk/reg.h>
#include <hk/rows.h>
#include <hk/types.h>

namespace rms {

using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u64;

/// Scalars of both kernels, the tail of their `Params`.
struct Scalars {
    hk::RmsScalars norm;
    u32 rounding;  // which of these values are rounded to T
    u32 batch;  // rows that a block takes at a time
};
enum Rounding : u32 {
    kRoundSum = 1,  // s
    kRoundNormalised = 2,  // s * rstd, before the weight: the model-sensitive mode
};

/// x and s of a batch of rows; if kStore, sums go to residual_out.
template <bool kStore, class Block, class RowT, class RowF, int Rows, class Params>
HK_FN void load_sums(const Block &block, RowT (&x)[Rows], RowF (&s)[Rows], const Params &p, const RowBatch &batch) {
    using T = typename RowT::Element;
    block.load_strided(x, p.x, batch);
    if constexpr (requires { p.residual_in; }) {
        block.template add<kStore>(s, x, p.residual_in, p.residual_out, p.scalars.rounding & kRoundSum, batch);
    } else {
        // Without the barrier the first of several rows is waited for before the others are loaded.
        if constexpr (Rows > 1 && RowF::kCols > RowF::kLanes * hk::kVecLen<T>) hk::sched_barrier();
#pragma unroll
        for (int r = 0; r < Rows; ++r) s[r] = hk::widen(x[r]);
    }
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns; `RowsOfHalves` rows per thread of a 16-bit type
/// at a time.
template <Access kAccess, class T, int Lanes, int ColsPerLane, int RowsOfHalves, class Params>
HK_FN void rows_in_registers(const Params &p) {
    constexpr int Rows = hk::rows_per_thread<T>(RowsOfHalves);
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, Rows>;
    using RowT = typename Block::RowT;
    using RowF = typename Block::RowF;

    const Block block;
    const u32 cols = p.x.cols();
    const auto held = p.scalars.norm.template prefetch_weights<kAccess, RowT>(p.weight, block.column(), cols);
    hk::GroupReducer<Block::kThreads, Lanes, Rows> group;

    hk::for_row_batches<Block::kSingleRow>(
        p.x.rows(), cols, block.column(), p.scalars.batch, [&](const RowBatch &batch) {
            RowT x[Rows];
            RowF s[Rows];
            load_sums<true>(block, x, s, p, batch);
            float rstd[Rows];
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                hk::RunningSumSq sum_sq;
                sum_sq.add(s[r]);
                rstd[r] = sum_sq.total();
            }
            group.sums(rstd);
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                rstd[r] = p.scalars.norm.rstd(rstd[r]);
                if constexpr (!requires { p.residual_in; }) s[r] = hk::rematerialize(s[r], x[r]);
                s[r] = s[r] * rstd[r];
            }
            if (p.scalars.rounding & kRoundNormalised) {
#pragma unroll
                for (int r = 0; r < Rows; ++r) s[r] = hk::widen(hk::narrow<T>(s[r]));
            }
            hk::with_prefetched(
                [&](auto weight) {
#pragma unroll
                    for (int r = 0; r < Rows; ++r) {
                        const auto y = [&](int k) { return hk::narrow<T, RowT::kLen>(s[r].chunk[k] * weight(k)); };
                        block.store(y, p.y, batch, r);
                    }
                },
                held);
            if (p.y.cols() > cols) block.zero_pads(p.y, batch);
            if (p.rstd.present()) block.store_per_row(rstd, p.rstd, batch);
        });
}

/// Rows of any length, read twice by a block of Lanes threads in tiles of Lanes * ColsPerLane columns.
template <Access kAccess, class T, int Lanes, int ColsPerLane, class Params>
HK_FN void rows_in_tiles(const Params &p) {
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, 1>;
    using RowT = typename Block::RowT;
    using RowF = typename Block::RowF;

    const Block block;
    const u32 cols = p.x.cols();
    hk::GroupReducer<Lanes, Lanes> group;

    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        hk::RunningSumSq sum_sq;
        hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const RowBatch &tile) {
            RowT x[1];
            RowF s[1];
            load_sums<false>(block, x, s, p, tile);
            sum_sq.add(s[0]);
        });
        const float rstd[1] = {p.scalars.norm.rstd(group.sum(sum_sq.total()))};

        // Outputs may alias inputs: each lane writes only what it has just read.
        hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const RowBatch &tile) {
            RowT x[1];
            RowF s[1];
            load_sums<true>(block, x, s, p, tile);
            s[0] = s[0] * rstd[0];
            if (p.scalars.rounding & kRoundNormalised) s[0] = hk::widen(hk::narrow<T>(s[0]));
            const RowF w = p.scalars.norm.template weights<kAccess, RowT>(p.weight, tile.column, cols);
            block.store(hk::narrow<T>(s[0] * w), p.y, tile, 0);
        });
        const RowBatch whole = {row, 1, block.column(), cols};
        block.zero_pads(p.y, whole);
        if (p.rstd.present()) block.store_per_row(rstd, p.rstd, whole);
    }
}

}  // namespace rms

// Entry points of one dtype, one per row of `kernel_table` in src/rms.rs. Name = op, dtype, widest row, `_scalar`
// for the scalar path. A lane holds at most kMaxColsPerLane columns: more would leave registers for one wave per SIMD. Narrower
// rows have variants with fewer columns per lane, so that few lanes are past the end, and with fewer than four loads per
// row several rows per thread, unless eight waves fit a SIMD.
#define RMS_ROWS(name, access, T, widest, lanes, rows)                \
    HK_ENTRY(name, hk::row_threads(hk::lanes_per_row(lanes, widest)), \
             rms::rows_in_registers<hk::Access::access, hk::T, HK_LANES_AND_COLS(lanes, widest), rows>)

#define RMS_ENTRIES(op, T)                                                                                      \
    RMS_ROWS(op##_##T##_64, Vectorized, T, 64, 8, 4)                                                            \
    RMS_ROWS(op##_##T##_128, Vectorized, T, 128, 16, 4)                                                         \
    RMS_ROWS(op##_##T##_256, Vectorized, T, 256, 16, 2)                                                         \
    RMS_ROWS(op##_##T##_512, Vectorized, T, 512, 16, 1)                                                         \
    RMS_ROWS(op##_##T##_1024, Vectorized, T, 1024, 64, 1)                                                       \
    RMS_ROWS(op##_##T##_1536, Vectorized, T, 1536, 64, 2)                                                       \
    RMS_ROWS(op##_##T##_2048, Vectorized, T, 2048, 64, 1)                                                       \
    RMS_ROWS(op##_##T##_3072, Vectorized, T, 3072, 64, 1)                                                       \
    RMS_ROWS(op##_##T##_4096, Vectorized, T, 4096, 64, 1)                                                       \
    RMS_ROWS(op##_##T##_6144, Vectorized, T, 6144, 128, 1)                                                      \
    RMS_ROWS(op##_##T##_8192, Vectorized, T, 8192, 256, 1)                                                      \
    RMS_ROWS(op##_##T##_16384, Vectorized, T, 16384, 256, 1)                                                    \
    HK_ENTRY(op##_##T##_long, hk::row_threads(256), rms::rows_in_tiles<hk::Access::Vectorized, hk::T, 256, 16>) \
    RMS_ROWS(op##_##T##_64_scalar, Scalar, T, 64, 8, 1)                                                         \
    RMS_ROWS(op##_##T##_512_scalar, Scalar, T, 512, 16, 1)                                                      \
    RMS_ROWS(op##_##T##_2048_scalar, Scalar, T, 2048, 64, 1)                                                    \
    RMS_ROWS(op##_##T##_4096_scalar, Scalar, T, 4096, 64, 1)                                                    \
    RMS_ROWS(op##_##T##_6144_scalar, Scalar, T, 6144, 128, 1)                                                   \
    RMS_ROWS(op##_##T##_8192_scalar, Scalar, T, 8192, 256, 1)                                                   \
    RMS_ROWS(op##_##T##_16384_scalar, Scalar, T, 16384, 256, 1)                                                 \
    HK_ENTRY(op##_##T##_long_scalar, hk::row_threads(256), rms::rows_in_tiles<hk::Access::Scalar, hk::T, 256, 16>)
