// rms_rows.h: the root-mean-square norm of rows, shared by rmsnorm.hip and fused_add_rmsnorm.hip.
//   s[r, c] = x[r, c]                                    rmsnorm
//           = round_T(x[r, c] + residual_in[r, c])       fused_add_rmsnorm; also written to residual_out
//   rstd[r] = rsqrt(sum_c s[r, c]^2 / cols + eps)
//   y[r, c] = round_T(s[r, c] * rstd[r] * (w[c] + weight_offset))
// All arithmetic is f32. Source: Zhang & Sennrich 2019, eq. 4.
//
// How the work is split
//   `Lanes` lanes hold a row in registers, so it is read once: chunks of 16 bytes go round the lanes in turn. A
//   wave works on kWaveSize / Lanes rows side by side, `Rows` times over, so that its loads overlap; a row of
//   more lanes than a wave is one block. Blocks step through the matrix with the weights kept in registers.
//   A row too long for registers is walked twice by one block.
//   The order of a row's sum depends on its length alone: neither the number of rows, nor the place of a row,
//   nor how it is accessed (vectors or elements) changes a bit of the result.
// Floor
//   Memory: rows * cols * 2 * sizeof(T) + cols * sizeof(w), twice that for fused_add_rmsnorm. In VALU instructions
//   a 16-byte chunk of 8 bf16 costs a wave, at 64 lanes: 8 to widen, 4 to square and add, 4 + 4 to scale,
//   and to round 4 on gfx950 and 36 on gfx942, which has no conversion: 24 and 56. A CU issues one a clock,
//   while at 6 TB/s over 304 CUs of 2.1 GHz the 2 KiB that the chunk moves take it 218 clocks.
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/math.h>
#include <hk/reg.h>
#include <hk/rows.h>
#include <hk/types.h>

namespace rms {

using hk::Access;
using hk::RowBatch;
using hk::row_threads;
using hk::u32;
using hk::u64;

/// Scalars of both kernels, the tail of their `Params`; the same fields as `Scalars` in src/rms.rs.
struct Scalars {
    float eps;            // added to the mean, inside the root
    float inv_cols;       // 1 / cols
    float weight_offset;  // 1, or -0 which leaves every weight as it is
    u32 weight_is_f32;    // w is f32 whatever T is
    u32 model_sensitive;  // rounds s * rstd to T before the weight
    u32 batch;            // rows that a block takes at a time
};

/// The weights of a lane's columns, from `batch.column` on, as they multiply.
template <Access kAccess, class RowT>
HK_FN auto load_weights(const hk::Global &weight, const Scalars &scalars, u32 column, u32 cols) {
    using T = typename RowT::Element;
    using RowF = typename RowT::template With<float>;
    const RowBatch one = {0, 1, column, cols};
    RowF w;
    if (scalars.weight_is_f32) {
        w = RowF::load(one.at<float, kAccess, true>(weight, 0));
    } else {
        w = hk::widen(RowT::load(one.at<T, kAccess, true>(weight, 0)));
    }
    return w + scalars.weight_offset;
}

HK_FN float rstd_of(float sum_sq, const Scalars &scalars) {
    return hk::rsqrt(__builtin_fmaf(sum_sq, scalars.inv_cols, scalars.eps));
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns; a lane has `Rows` rows in hand at a time.
template <Access kAccess, class T, int Lanes, int ColsPerLane, int Rows, class Params>
HK_FN void rows_in_registers(const Params &p) {
    constexpr bool kAdd = requires { p.residual_in; };
    constexpr u32 kAbreast = row_threads(Lanes) / Lanes;
    constexpr u32 kBatch = kAbreast * Rows;
    constexpr bool kAlone = kBatch == 1;
    using RowT = hk::Row<T, Lanes, hk::kVecLen<T>, ColsPerLane / hk::kVecLen<T>>;
    using RowF = typename RowT::template With<float>;

    const u32 side = hk::thread_x() / Lanes;  // place among the rows abreast
    const u32 lane = hk::thread_x() % Lanes;  // place in the row
    const u32 rows = p.x.rows();
    const u32 cols = p.x.cols();
    const RowF w = load_weights<kAccess, RowT>(p.weight, p.scalars, lane * hk::kVecLen<T>, cols);
    hk::GroupReducer<row_threads(Lanes), Lanes> group;

    hk::for_row_batches<kAlone>(rows, cols, lane * hk::kVecLen<T>, p.scalars.batch, [&](const RowBatch &batch) {
        RowT s[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            s[r] = RowT::load(batch.at<T, kAccess, kAlone>(p.x, r * kAbreast + side));
        }
        if constexpr (kAdd) {
            RowT residual[Rows];
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                residual[r] = RowT::load(batch.at<T, kAccess, kAlone>(p.residual_in, r * kAbreast + side));
            }
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                s[r] = hk::narrow<T>(hk::widen(s[r]) + hk::widen(residual[r]));
                s[r].store(batch.at<T, kAccess, kAlone>(p.residual_out, r * kAbreast + side));
            }
        }

        RowF y[Rows];
        float rstd[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            y[r] = hk::widen(s[r]);
            hk::SumSq sum_sq;
            sum_sq.add(y[r]);
            rstd[r] = rstd_of(group.sum(sum_sq.total()), p.scalars);
            y[r] = y[r] * rstd[r];
        }
        if (p.scalars.model_sensitive) {
#pragma unroll
            for (int r = 0; r < Rows; ++r) y[r] = hk::widen(hk::narrow<T>(y[r]));
        }
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            hk::narrow<T>(y[r] * w).store(batch.at<T, kAccess, kAlone>(p.y, r * kAbreast + side));
        }
        if (p.rstd.present() && lane == 0) {
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                const u32 index = r * kAbreast + side;
                if (index < batch.count) p.rstd.template row<float>(0)[batch.first + index] = rstd[r];
            }
        }
    });
}

/// Rows of any length, read twice by a block of Lanes threads in tiles of Lanes * ColsPerLane columns.
template <Access kAccess, class T, int Lanes, int ColsPerLane, class Params>
HK_FN void rows_in_tiles(const Params &p) {
    constexpr bool kAdd = requires { p.residual_in; };
    using RowT = hk::Row<T, Lanes, hk::kVecLen<T>, ColsPerLane / hk::kVecLen<T>>;

    const u32 cols = p.x.cols();
    const u32 column = hk::thread_x() * hk::kVecLen<T>;
    hk::GroupReducer<Lanes, Lanes> group;

    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        hk::SumSq sum_sq;
        for (u32 tile = 0; tile < cols; tile += RowT::kCols) {
            const RowBatch batch = {row, 1, tile + column, cols};
            RowT s = RowT::load(batch.at<T, kAccess, true>(p.x, 0));
            if constexpr (kAdd) {
                const RowT residual = RowT::load(batch.at<T, kAccess, true>(p.residual_in, 0));
                s = hk::narrow<T>(hk::widen(s) + hk::widen(residual));
                s.store(batch.at<T, kAccess, true>(p.residual_out, 0));
            }
            sum_sq.add(hk::widen(s));
        }
        const float rstd = rstd_of(group.sum(sum_sq.total()), p.scalars);

        // A sum is read back from where this very lane wrote it, so y may lie on x or on residual_in.
        const hk::Global *input = &p.x;
        if constexpr (kAdd) input = &p.residual_out;
        for (u32 tile = 0; tile < cols; tile += RowT::kCols) {
            const RowBatch batch = {row, 1, tile + column, cols};
            auto y = hk::widen(RowT::load(batch.at<T, kAccess, true>(*input, 0))) * rstd;
            if (p.scalars.model_sensitive) y = hk::widen(hk::narrow<T>(y));
            const auto w = load_weights<kAccess, RowT>(p.weight, p.scalars, tile + column, cols);
            hk::narrow<T>(y * w).store(batch.at<T, kAccess, true>(p.y, 0));
        }
        if (p.rstd.present() && hk::thread_x() == 0) p.rstd.template row<float>(0)[row] = rstd;
    }
}

}  // namespace rms

// Entry points of one dtype, one per row of `VARIANTS` in src/rms.rs. Name = op, dtype, widest row, access if it
// is by elements. A lane holds at most 64 columns: more would leave room for one wave a SIMD. Narrower rows
// have variants of fewer columns a lane, so that a lane's share is not mostly past the end.
#define RMS_ENTRIES(op, T)                                                                                                  \
    HK_ENTRY(op##_##T##_128, hk::row_threads(16), rms::rows_in_registers<hk::Access::Vectors, hk::T, 16, 8, 4>)                \
    HK_ENTRY(op##_##T##_512, hk::row_threads(16), rms::rows_in_registers<hk::Access::Vectors, hk::T, 16, 32, 1>)               \
    HK_ENTRY(op##_##T##_1024, hk::row_threads(64), rms::rows_in_registers<hk::Access::Vectors, hk::T, 64, 16, 1>)              \
    HK_ENTRY(op##_##T##_2048, hk::row_threads(64), rms::rows_in_registers<hk::Access::Vectors, hk::T, 64, 32, 1>)              \
    HK_ENTRY(op##_##T##_4096, hk::row_threads(64), rms::rows_in_registers<hk::Access::Vectors, hk::T, 64, 64, 1>)              \
    HK_ENTRY(op##_##T##_8192, hk::row_threads(256), rms::rows_in_registers<hk::Access::Vectors, hk::T, 256, 32, 1>)            \
    HK_ENTRY(op##_##T##_16384, hk::row_threads(256), rms::rows_in_registers<hk::Access::Vectors, hk::T, 256, 64, 1>)           \
    HK_ENTRY(op##_##T##_long, hk::row_threads(256), rms::rows_in_tiles<hk::Access::Vectors, hk::T, 256, 16>)                   \
    HK_ENTRY(op##_##T##_512_elements, hk::row_threads(16), rms::rows_in_registers<hk::Access::Elements, hk::T, 16, 32, 1>)     \
    HK_ENTRY(op##_##T##_4096_elements, hk::row_threads(64), rms::rows_in_registers<hk::Access::Elements, hk::T, 64, 64, 1>)    \
    HK_ENTRY(op##_##T##_16384_elements, hk::row_threads(256), rms::rows_in_registers<hk::Access::Elements, hk::T, 256, 64, 1>) \
    HK_ENTRY(op##_##T##_long_elements, hk::row_threads(256), rms::rows_in_tiles<hk::Access::Elements, hk::T, 256, 16>)
