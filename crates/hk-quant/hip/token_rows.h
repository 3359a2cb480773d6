// token_rows.h: a scale per row, shared by per_token_quant.hip and smoothquant.hip.
//   z[r, c] = x[r, c]                    per_token_quant
//           = x[r, c] * smooth[c]        smoothquant
//   s[r]    = max_c |z[r, c]| / qmax     over finite z; at most scale_ub / qmax; 1 for zeros
//   q[r, c] = quantize(z[r, c] * (1 / s[r]))
//
// How the work is split
//   `Lanes` lanes hold a row in registers, so it is read once: 32-byte chunks are dealt to the lanes round-robin. Rows map
//   to lanes as in hk/rows.h. A row too long for registers is read twice by one block. A maximum is the same in any order.
// Floor
//   Memory: rows * cols * (sizeof(T) + 1) + 4 * rows. VALU instructions per wave for 16 bf16: 16 to widen, 24 for the
//   maximum, 8 to scale, 48 to clamp and 8 to convert: about 104 for 3 KiB, which take 327 clocks at 6 TB/s over 304 CUs
//   of 2.1 GHz.
#pragma once

#include <hk/block.h>

#include "tiles.h"

namespace quant {

/// Scalars of both kernels, the tail of their `Params`.
struct TokenScalars {
    hk::QuantFormat format;
    u32 batch;  // rows that a block takes at a time
    u32 smooth_is_f32;  // smooth is f32 whatever T is
};

/// The factors of a lane's columns.
template <Access kAccess, class RowT, class Params>
HK_FN auto load_smooth(const Params &p, u32 column, u32 cols) {
    using T = typename RowT::Element;
    using RowF = typename RowT::template With<float>;
    const RowBatch one = {0, 1, column, cols};
    RowF w;
    if (p.scalars.smooth_is_f32) {
        w = RowF::load(one.at<float, kAccess, true>(p.smooth, 0));
    } else {
        w = hk::widen(RowT::load(one.at<T, kAccess, true>(p.smooth, 0)));
    }
    return w;
}

template <class Params>
HK_FN float scale_of(const Params &p, u32 top) {
    float amax = hk::FiniteMax::value(top);
    if constexpr (requires { p.scale_ub; }) {
        if (p.scale_ub.present()) {
            const float bound = *p.scale_ub.template row<float>(0);
            amax = bound > 0.0f && bound < amax ? bound : amax;
        }
    }
    return hk::linear_scale(amax, p.scalars.format.qmax);
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns; `Rows` rows per thread at a time.
template <Access kAccess, class T, int Lanes, int ColsPerLane, int Rows, class Params>
HK_FN void rows_in_registers(const Params &p) {
    constexpr bool kSmooth = requires { p.smooth; };
    constexpr u32 kRowsPerBlock = hk::row_threads(Lanes) / Lanes;
    constexpr bool kSingleRow = kRowsPerBlock * Rows == 1;
    using RowT = hk::Row<T, Lanes, kChunk<T>, ColsPerLane / kChunk<T>>;
    using RowF = typename RowT::template With<float>;

    const u32 side = hk::thread_x() / Lanes;  // index of the row in the block
    const u32 lane = hk::thread_x() % Lanes;  // index in the row
    const u32 cols = p.x.cols();
    RowF smooth;
    if constexpr (kSmooth && hk::kPersistentBlocks) smooth = load_smooth<kAccess, RowT>(p, lane * kChunk<T>, cols);
    hk::GroupReducer<hk::row_threads(Lanes), Lanes> group;

    hk::for_row_batches<kSingleRow>(p.x.rows(), cols, lane * kChunk<T>, p.scalars.batch, [&](const RowBatch &batch) {
        RowT x[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            x[r] = RowT::load(batch.at<T, kAccess, kSingleRow>(p.x, r * kRowsPerBlock + side));
        }
        if constexpr (kSmooth && !hk::kPersistentBlocks) smooth = load_smooth<kAccess, RowT>(p, lane * kChunk<T>, cols);
        RowF z[Rows];
        float scale[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            z[r] = hk::widen(x[r]);
            if constexpr (kSmooth) z[r] = z[r] * smooth;
            scale[r] = scale_of(p, group.reduce(finite_max(z[r]), hk::MaxBits{}));
        }
        p.scalars.format.with_type([&](auto kind) {
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                quantize<decltype(kind)::value>(z[r] * (1.0f / scale[r]))
                    .store(batch.at<u8, kAccess, kSingleRow>(p.q, r * kRowsPerBlock + side));
            }
        });
        if (lane == 0) {
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                const u32 index = r * kRowsPerBlock + side;
                if (index < batch.count) p.scale.template row<float>(0)[batch.first + index] = scale[r];
            }
        }
    });
}

/// Rows of any length, read twice by a block of Lanes threads in tiles of Lanes * ColsPerLane columns.
template <Access kAccess, class T, int Lanes, int ColsPerLane, class Params>
HK_FN void rows_in_tiles(const Params &p) {
    constexpr bool kSmooth = requires { p.smooth; };
    using RowT = hk::Row<T, Lanes, kChunk<T>, ColsPerLane / kChunk<T>>;

    const u32 cols = p.x.cols();
    const u32 column = hk::thread_x() * kChunk<T>;
    const auto load = [&](u64 row, u32 tile) {
        const RowBatch batch = {row, 1, tile + column, cols};
        auto z = hk::widen(RowT::load(batch.at<T, kAccess, true>(p.x, 0)));
        if constexpr (kSmooth) z = z * load_smooth<kAccess, RowT>(p, tile + column, cols);
        return z;
    };
    hk::GroupReducer<Lanes, Lanes> group;

    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        u32 top = hk::FiniteMax::kZero;
        for (u32 tile = 0; tile < cols; tile += RowT::kCols) top = hk::MaxBits{}(top, finite_max(load(row, tile)));
        const float scale = scale_of(p, group.reduce(top, hk::MaxBits{}));
        p.scalars.format.with_type([&](auto kind) {
            for (u32 tile = 0; tile < cols; tile += RowT::kCols) {
                const RowBatch batch = {row, 1, tile + column, cols};
                quantize<decltype(kind)::value>(load(row, tile) * (1.0f / scale))
                    .store(batch.at<u8, kAccess, true>(p.q, 0));
            }
        });
        if (hk::thread_x() == 0) p.scale.template row<float>(0)[row] = scale;
    }
}

}  // namespace quant

// Entry points of one dtype, one per row of `VARIANTS` in src/per_token.rs. Name = op, dtype, widest row,
// `_scalar` for the scalar path.
#define TOKEN_ROWS(name, access, T, widest, lanes, rows)              \
    HK_ENTRY(name, hk::row_threads(hk::lanes_per_row(lanes, widest)), \
             quant::rows_in_registers<hk::Access::access, hk::T, HK_LANES_AND_COLS(lanes, widest), rows>)

#define TOKEN_ENTRIES(op, T)                                                                                      \
    TOKEN_ROWS(op##_##T##_128, Vectorized, T, 128, 128 / quant::kChunk<hk::T>, 2)                                 \
    TOKEN_ROWS(op##_##T##_512, Vectorized, T, 512, 16, 1)                                                         \
    TOKEN_ROWS(op##_##T##_2048, Vectorized, T, 2048, 64, 1)                                                       \
    TOKEN_ROWS(op##_##T##_4096, Vectorized, T, 4096, 64, 1)                                                       \
    TOKEN_ROWS(op##_##T##_8192, Vectorized, T, 8192, 256, 1)                                                      \
    TOKEN_ROWS(op##_##T##_32768, Vectorized, T, 32768, 512, 1)                                                    \
    HK_ENTRY(op##_##T##_long, hk::row_threads(256), quant::rows_in_tiles<hk::Access::Vectorized, hk::T, 256, 16>) \
    TOKEN_ROWS(op##_##T##_512_scalar, Scalar, T, 512, 16, 1)                                                      \
    TOKEN_ROWS(op##_##T##_32768_scalar, Scalar, T, 32768, 512, 1)                                                 \
    HK_ENTRY(op##_##T##_long_scalar, hk::row_threads(256), quant::rows_in_tiles<hk::Access::Scalar, hk::T, 256, 16>)
