// l2norm.hip: rows over their 2-norm, and its gradient
//   l2norm      rstd[r] = 1 / sqrt(sum_c x[r, c]^2 + eps),  y[r, c] = x[r, c] rstd[r]
//   l2norm_bwd  dx[r, c] = rstd[r] (dy[r, c] - y[r, c] sum_c dy[r, c] y[r, c])
//   x, y, dy, dx  [rows, cols]  T = bf16 | f16 | f32   unit stride on cols, rows any stride
//   rstd          [rows]        f32                    contiguous; l2norm: optional
// All arithmetic is f32, one rounding. Lanes of rows: hk/rows.h. Rows of more than 8192 columns are read twice by one block.
// Batch-invariant: the order of sums depends on the length of a row alone.
// Floor: 2 rows cols sizeof(T), l2norm_bwd 3 rows cols sizeof(T).
#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/math.h>
#include <hk/reg.h>
#include <hk/rows.h>

namespace {
using hk::Access;
using hk::u32;
using hk::u64;

struct Params {
    hk::Global x;  // x; l2norm_bwd: y
    hk::Global dy;  // absent; l2norm_bwd: dy
    hk::Global out;  // y; l2norm_bwd: dx
    hk::Global rstd;
    float eps;
    u32 batch;  // rows of a block at a time
};

/// What is summed up over a lane's columns.
template <bool kBackward, class RowF>
HK_FN float share(const RowF &x, const RowF &dy) {
    if constexpr (kBackward) {
        hk::RunningSum sum;
        sum.add(x * dy);
        return sum.total();
    } else {
        hk::RunningSumSq sum;
        sum.add(x);
        return sum.total();
    }
}

template <bool kBackward, class RowF>
HK_FN RowF result(const RowF &x, const RowF &dy, float sum, float rstd) {
    if constexpr (kBackward) {
        return (dy + x * -sum) * rstd;
    } else {
        return x * rstd;
    }
}

/// Reciprocal root of a row: made, or given.
template <bool kBackward>
HK_FN float root(const Params &p, float sum, u64 row) {
    if constexpr (kBackward) {
        return p.rstd.row<const float>(0)[row];
    } else {
        return hk::rsqrt(sum + p.eps);
    }
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns; `RowsOfHalves` rows per thread of a 16-bit type at a time.
template <bool kBackward, Access kAccess, class T, int Lanes, int ColsPerLane, int RowsOfHalves>
HK_FN void rows(const Params &p) {
    constexpr int Rows = hk::rows_per_thread<T>(RowsOfHalves);
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, Rows>;
    using RowT = typename Block::RowT;
    const Block block;
    hk::GroupReducer<Block::kThreads, Lanes, Rows> group;
    hk::for_row_batches<Block::kSingleRow>(
        p.x.rows(), p.x.cols(), block.column(), p.batch, [&](const hk::RowBatch &batch) {
            RowT x[Rows], dy[Rows] = {};
            block.load(x, p.x, batch);
            if constexpr (kBackward) block.load(dy, p.dy, batch);
            float sums[Rows], rstd[Rows];
#pragma unroll
            for (int r = 0; r < Rows; ++r) sums[r] = share<kBackward>(hk::widen(x[r]), hk::widen(dy[r]));
            group.sums(sums);
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                const u32 index = block.index(r);
                rstd[r] = root<kBackward>(p, sums[r], batch.first + (index < batch.count ? index : 0));
                const auto y = result<kBackward>(hk::widen(x[r]), hk::widen(dy[r]), sums[r], rstd[r]);
                block.store(hk::narrow<T>(y), p.out, batch, r);
            }
            if (!kBackward && p.rstd.present()) block.store_per_row(rstd, p.rstd, batch);
        });
}

/// Rows of any length, read twice by a block, in tiles of Lanes * ColsPerLane columns.
template <bool kBackward, Access kAccess, class T, int Lanes, int ColsPerLane>
HK_FN void tiles(const Params &p) {
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, 1>;
    using RowT = typename Block::RowT;
    const Block block;
    hk::GroupReducer<Lanes, Lanes> group;
    const u32 cols = p.x.cols();
    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        const auto load = [&](RowT(&x)[1], RowT(&dy)[1], const hk::RowBatch &tile) {
            block.load(x, p.x, tile);
            if constexpr (kBackward) block.load(dy, p.dy, tile);
        };
        float sum = 0.0f;
        hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const hk::RowBatch &tile) {
            RowT x[1], dy[1] = {};
            load(x, dy, tile);
            sum += share<kBackward>(hk::widen(x[0]), hk::widen(dy[0]));
        });
        sum = group.sum(sum);
        const float rstd[1] = {root<kBackward>(p, sum, row)};
        hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const hk::RowBatch &tile) {
            RowT x[1], dy[1] = {};
            load(x, dy, tile);
            const auto y = result<kBackward>(hk::widen(x[0]), hk::widen(dy[0]), sum, rstd[0]);
            block.store(hk::narrow<T>(y), p.out, tile, 0);
        });
        if (!kBackward && p.rstd.present())
            block.store_per_row(rstd, p.rstd, hk::RowBatch{row, 1, block.column(), cols});
    }
}
}  // namespace

// Entry points, one per row of `VARIANTS` in src/l2norm.rs.
#define L2_ROWS(name, backward, access, T, widest, lanes, rows_)      \
    HK_ENTRY(name, hk::row_threads(hk::lanes_per_row(lanes, widest)), \
             rows<backward, Access::access, hk::T, HK_LANES_AND_COLS(lanes, widest), rows_>)
#define L2_ENTRIES(op, backward, T)                                                                      \
    L2_ROWS(op##_##T##_128, backward, Vectorized, T, 128, 16, 4)                                         \
    L2_ROWS(op##_##T##_512, backward, Vectorized, T, 512, 16, 1)                                         \
    L2_ROWS(op##_##T##_8192, backward, Vectorized, T, 8192, 256, 1)                                      \
    HK_ENTRY(op##_##T##_long, hk::row_threads(256), tiles<backward, Access::Vectorized, hk::T, 256, 16>) \
    L2_ROWS(op##_##T##_512_scalar, backward, Scalar, T, 512, 16, 1)                                      \
    HK_ENTRY(op##_##T##_long_scalar, hk::row_threads(256), tiles<backward, Access::Scalar, hk::T, 256, 16>)
L2_ENTRIES(l2norm, false, bf16)
L2_ENTRIES(l2norm, false, f16)
L2_ENTRIES(l2norm, false, f32)
L2_ENTRIES(l2norm_bwd, true, bf16)
L2_ENTRIES(l2norm_bwd, true, f16)
L2_ENTRIES(l2norm_bwd, true, f32)
