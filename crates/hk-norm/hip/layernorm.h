// layernorm.h: y[r, c] = round_T((s[r, c] - mean[r]) * rstd[r] * weight[c] + bias[c])
//   s = x                                          layernorm
//     = round_T(x + residual_in)                   fused_add_layernorm; also written to residual_out
//       in both with round_T(x + x_bias) for x if there is an x_bias
//   mean[r] = sum_c s[r, c] / cols,   rstd[r] = rsqrt(sum_c (s[r, c] - mean[r])^2 / cols + eps)
//   x, residual_in, residual_out, y  [rows, cols]  T = bf16 | f16 | f32   unit stride on cols, rows any stride
//   weight, bias                     [cols]        T | f32, optional      contiguous
//   x_bias                           [cols]        T, optional            contiguous
//   mean, rstd                       [rows]        f32, optional          contiguous
// y and residual_out may each alias x or residual_in, but not both the same one. All arithmetic is f32.
//
// The mean of the deviations corrects the first mean: it is exact for a constant row, and accurate for a row far from zero.
// The variance is the mean square of the deviations, never E[s^2] - mean^2.
//
// How the work is split
//   As rms_rows.h: `Lanes` lanes hold a row in registers, rows on lanes as in hk/rows.h, blocks step through the matrix
//   with weights and biases kept in registers. Those want twice the registers, so a lane has at most 32 columns. A row
//   too long for registers is read three times by one block, each tile summed by itself first. The order of a
//   reduction depends on the row's length alone.
// Floor
//   Memory: rows * cols * 2 * sizeof(T) + 2 * cols * sizeof(w), with a residual twice that. In VALU instructions a 16-byte
//   chunk of 8 bf16 costs a wave, at 64 lanes: 8 to widen, 4 for each of two sums, 4 for the sum of squares, 4 + 4 to
//   take off both means, 4 + 4 to scale, and to round 4 on gfx950 and 36 on gfx942: 40 and 72, of the 218 clocks
//   that memory takes (rms_rows.h).
#pragma once

#include <hk/block.h>
#include <hk/entry.h>
#include <hk/norm.h>
#include <hk/reg.h>
#include <hk/rows.h>

namespace layernorm {

struct Params {
    hk::Global x, x_bias, residual_in, weight, bias, y, residual_out, mean, rstd;
    float eps;
    float cols;  // as a number
    float inv_cols;  // 1 / cols
    hk::u32 weight_is_f32;  // whatever T is
    hk::u32 bias_is_f32;
    hk::u32 batch;  // rows that a block takes at a time
};

}  // namespace layernorm

namespace {

using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using layernorm::Params;

/// Waves that share an SM of NVIDIA's GPUs, at least, since a row waits for two sums, one after the other: four of the longest
/// rows, else three; fewer where more registers are needed than for 32 columns a lane, `InHand`, that wait in the rows' type.
template <Access kAccess, class T, int Lanes, int InHand>
constexpr int kWavesOfSm = kAccess != Access::Vectorized || sizeof(T) > 2 || InHand > 32 ? 12
                           : Lanes >= 256                                                ? 32
                                                                                         : 24;

/// Waves that share a SIMD of AMD's, where the compiler would take one or two registers too many.
template <class T, int Lanes, int ColsPerLane, int Rows>
constexpr int kWavesOfSimd = [] {
    if (sizeof(T) == 4) return Lanes > 64 && ColsPerLane == 32 ? 3 : 1;
    if (Rows == 4) return 5;
    return ColsPerLane == 24 ? 4 : 1;
}();

/// sum / cols, correctly rounded unless it is subnormal: a row of one value has that value as its mean.
HK_FN float mean_of(float sum, const Params &p) {
    const float quotient = sum * p.inv_cols;
    const float better = __builtin_fmaf(__builtin_fmaf(-quotient, p.cols, sum), p.inv_cols, quotient);
    return __builtin_fabsf(quotient) < __builtin_inff() ? better : quotient;
}

/// s of a batch of rows, and x, which becomes s in its own type; if kStore, sums go to residual_out.
template <bool kStore, Access kAccess, class Block, class RowT, class RowF, int Rows>
HK_FN void load_sums(const Block &block, RowT (&x)[Rows], RowF (&s)[Rows], const Params &p, const RowBatch &batch) {
    using T = typename RowT::Element;
    block.load(x, p.x, batch);
    if (p.x_bias.present()) {
        const RowF x_bias = hk::load_vector<kAccess, RowT>(p.x_bias, false, 0.0f, batch.column, batch.cols);
#pragma unroll
        for (int r = 0; r < Rows; ++r) x[r] = hk::narrow<T>(hk::widen(x[r]) + x_bias);
    }
    if (p.residual_in.present()) {
        block.template add<kStore>(s, x, p.residual_in, p.residual_out, true, batch);
        if constexpr (hk::kKeepsRowsNarrow) {
#pragma unroll
            for (int r = 0; r < Rows; ++r) x[r] = hk::narrow<T>(s[r]);
        }
    } else {
#pragma unroll
        for (int r = 0; r < Rows; ++r) s[r] = hk::widen(x[r]);
    }
}

/// s - mean; past the end of the row, where s is zero, zero.
template <Access kAccess>
class Distances {
    int left_;
    float mean_;

    // Compares of single elements would fill the scalar registers: masks from the sign of what is left do not.
    HK_FN float inside(int column) const {
        return __builtin_bit_cast(float, __builtin_bit_cast(int, mean_) & ((column - left_) >> 31));
    }

  public:
    HK_FN Distances(float mean, const RowBatch &batch) : left_(int(batch.cols - batch.column)), mean_(mean) {
        hk::opaque(left_);
    }

    /// Of chunk k of a row.
    template <class RowF>
    HK_FN auto of(const RowF &s, int k) const {
        auto chunk = s.chunk[k];
        const int first = k * RowF::kLanes * RowF::kLen;
        if constexpr (kAccess == Access::Vectorized) {  // the row ends with a chunk
            chunk -= inside(first);
        } else {
#pragma unroll
            for (int i = 0; i < RowF::kLen; ++i) chunk[i] -= inside(first + i);
        }
        return chunk;
    }

    /// Puts them in the place of s; the sums of them and of their squares.
    template <class RowF>
    HK_FN void sum(RowF &s, float (&sums)[2]) const {
        hk::RunningSum sum;
        hk::RunningSumSq squares;
#pragma unroll
        for (int k = 0; k < RowF::kChunks; ++k) {
            s.chunk[k] = of(s, k);
            sum.add(s.chunk[k]);
            squares.add(s.chunk[k]);
        }
        sums[0] = sum.total();
        sums[1] = squares.total();
    }
};

/// rstd from the sums of the distances from a first mean and of their squares. `correction` is what that mean lacks.
HK_FN float rstd_of(float sum_sq, float correction, const Params &p) {
    const float variance = __builtin_fmaf(-correction, correction, sum_sq * p.inv_cols);
    // By rounding it may be below zero. A NaN stays.
    return hk::rsqrt((variance < 0.0f ? 0.0f : variance) + p.eps);
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns; `RowsOfHalves` rows per thread of a 16-bit type
/// at a time.
template <Access kAccess, class T, int Lanes, int ColsPerLane, int RowsOfHalves>
HK_FN void rows_in_registers(const Params &p) {
    constexpr int Rows = hk::rows_per_thread<T>(RowsOfHalves);
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, Rows>;
    using RowT = typename Block::RowT;
    using RowF = typename Block::RowF;

    const Block block;
    const u32 cols = p.x.cols();
    hk::PrefetchedVector<kAccess, RowT> w(p.weight, p.weight_is_f32, 1.0f, -0.0f, block.column(), cols);
    hk::PrefetchedVector<kAccess, RowT> b(p.bias, p.bias_is_f32, -0.0f, -0.0f, block.column(), cols);
    // At once; or where registers are few and rows many or long, before the last sums, so that they come with those; of the
    // longest rows the biases after them.
    constexpr bool kAtOnce = !hk::kKeepsRowsNarrow || (Rows <= 2 && ColsPerLane <= 16);
    constexpr bool kBiasLast = Lanes >= 256;
    if constexpr (kAtOnce) {
        w.prefetch();
        b.prefetch();
    }
    hk::GroupReducer<Block::kThreads, Lanes, 2 * Rows> group;
    constexpr bool kAnew = hk::kKeepsRowsNarrow && sizeof(T) < sizeof(float);  // the distances

    hk::for_row_batches<Block::kSingleRow>(p.x.rows(), cols, block.column(), p.batch, [&](const RowBatch &batch) {
        RowT x[Rows];
        RowF s[Rows];
        load_sums<true, kAccess>(block, x, s, p, batch);
        // All rows take each step together, so that they wait for it together.
        float total[Rows], sums[Rows][2], first_mean[Rows], correction[Rows], mean[Rows], rstd[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            hk::RunningSum sum;
            sum.add(s[r]);
            total[r] = sum.total();
        }
        group.sums(total);
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            first_mean[r] = mean_of(total[r], p);
            s[r] = hk::rematerialize(s[r], x[r]);
            Distances<kAccess>(first_mean[r], batch).sum(s[r], sums[r]);
        }
        if constexpr (!kAtOnce) {
            w.prefetch();
            if constexpr (!kBiasLast) b.prefetch();
        }
        group.sums(reinterpret_cast<float (&)[2 * Rows]>(sums));
        if constexpr (!kAtOnce && kBiasLast) b.prefetch();
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            correction[r] = mean_of(sums[r][0], p);
            mean[r] = first_mean[r] + correction[r];
            rstd[r] = rstd_of(sums[r][1], correction[r], p);
        }
        hk::with_prefetched(
            [&](auto weight, auto bias) {
#pragma unroll
                for (int r = 0; r < Rows; ++r) {
                    if constexpr (kAnew) s[r] = hk::rematerialize(s[r], x[r]);
                    const Distances<kAccess> distances(first_mean[r], batch);
                    const auto y = [&](int k) {
                        auto chunk = kAnew ? distances.of(s[r], k) : s[r].chunk[k];
                        chunk = (chunk + -correction[r]) * rstd[r];
                        return hk::narrow<T, RowT::kLen>(__builtin_elementwise_fma(chunk, weight(k), bias(k)));
                    };
                    block.store(y, p.y, batch, r);
                }
            },
            w, b);
        if (p.mean.present()) block.store_per_row(mean, p.mean, batch);
        if (p.rstd.present()) block.store_per_row(rstd, p.rstd, batch);
    });
}

/// Rows of any length, read three times by a block of Lanes threads in tiles of Lanes * ColsPerLane columns.
template <Access kAccess, class T, int Lanes, int ColsPerLane>
HK_FN void rows_in_tiles(const Params &p) {
    using Block = hk::RowBlock<kAccess, T, Lanes, ColsPerLane, 1>;
    using RowT = typename Block::RowT;
    using RowF = typename Block::RowF;

    const Block block;
    const u32 cols = p.x.cols();
    hk::GroupReducer<Lanes, Lanes, 2> group;

    for (u64 row = hk::block_x(); row < p.x.rows(); row += hk::grid_x()) {
        float total[1] = {};
        hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const RowBatch &tile) {
            RowT x[1];
            RowF s[1];
            load_sums<false, kAccess>(block, x, s, p, tile);
            hk::RunningSum sum;
            sum.add(s[0]);
            total[0] += sum.total();
        });
        group.sums(total);
        const float first_mean = mean_of(total[0], p);

        float totals[2] = {};
        hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const RowBatch &tile) {
            RowT x[1];
            RowF s[1];
            load_sums<false, kAccess>(block, x, s, p, tile);
            float sums[2];
            Distances<kAccess>(first_mean, tile).sum(s[0], sums);
            totals[0] += sums[0];
            totals[1] += sums[1];
        });
        group.sums(totals);
        const float correction = mean_of(totals[0], p);
        const float rstd[1] = {rstd_of(totals[1], correction, p)};
        const float mean[1] = {first_mean + correction};

        // Outputs may alias inputs: each lane writes only what it has just read.
        hk::for_tiles<RowT::kCols>(row, cols, block.column(), [&](const RowBatch &tile) {
            RowT x[1];
            RowF s[1];
            load_sums<true, kAccess>(block, x, s, p, tile);
            s[0] = ((s[0] + -first_mean) + -correction) * rstd[0];
            const RowF w = hk::load_vector<kAccess, RowT>(p.weight, p.weight_is_f32, 1.0f, tile.column, cols);
            const RowF b = hk::load_vector<kAccess, RowT>(p.bias, p.bias_is_f32, -0.0f, tile.column, cols);
            block.store(hk::narrow<T>(hk::fma(s[0], w, b)), p.y, tile, 0);
        });
        const RowBatch whole = {row, 1, block.column(), cols};
        if (p.mean.present()) block.store_per_row(mean, p.mean, whole);
        if (p.rstd.present()) block.store_per_row(rstd, p.rstd, whole);
    }
}

}  // namespace

// Entry points of one dtype, one per row of `KERNELS` in src/layernorm.rs, named as those of rms_rows.h.
#define LAYERNORM_ROWS(name, access, T, widest, lanes, rows)                                                  \
    HK_ENTRY_WAVES_PER_SIMD(name, hk::row_threads(lanes), (kWavesOfSimd<hk::T, lanes, widest / lanes, rows>), \
                            (kWavesOfSm<Access::access, hk::T, lanes, widest / lanes * rows>),                \
                            rows_in_registers<Access::access, hk::T, lanes, widest / lanes, rows>)

#define LAYERNORM_ENTRIES(T)                                                                                \
    LAYERNORM_ROWS(layernorm_##T##_64, Vectorized, T, 64, 8, 4)                                             \
    LAYERNORM_ROWS(layernorm_##T##_128, Vectorized, T, 128, 16, 4)                                          \
    LAYERNORM_ROWS(layernorm_##T##_256, Vectorized, T, 256, 16, 2)                                          \
    LAYERNORM_ROWS(layernorm_##T##_512, Vectorized, T, 512, 16, 1)                                          \
    LAYERNORM_ROWS(layernorm_##T##_1024, Vectorized, T, 1024, 64, 2)                                        \
    LAYERNORM_ROWS(layernorm_##T##_1536, Vectorized, T, 1536, 64, 2)                                        \
    LAYERNORM_ROWS(layernorm_##T##_2048, Vectorized, T, 2048, 64, 1)                                        \
    LAYERNORM_ROWS(layernorm_##T##_4096, Vectorized, T, 4096, 128, 1)                                       \
    LAYERNORM_ROWS(layernorm_##T##_8192, Vectorized, T, 8192, 256, 1)                                       \
    LAYERNORM_ROWS(layernorm_##T##_16384, Vectorized, T, 16384, 512, 1)                                     \
    HK_ENTRY(layernorm_##T##_long, hk::row_threads(512), rows_in_tiles<Access::Vectorized, hk::T, 512, 16>) \
    LAYERNORM_ROWS(layernorm_##T##_64_scalar, Scalar, T, 64, 8, 1)                                          \
    LAYERNORM_ROWS(layernorm_##T##_512_scalar, Scalar, T, 512, 16, 1)                                       \
    LAYERNORM_ROWS(layernorm_##T##_2048_scalar, Scalar, T, 2048, 64, 1)                                     \
    LAYERNORM_ROWS(layernorm_##T##_4096_scalar, Scalar, T, 4096, 128, 1)                                    \
    LAYERNORM_ROWS(layernorm_##T##_8192_scalar, Scalar, T, 8192, 256, 1)                                    \
    LAYERNORM_ROWS(layernorm_##T##_16384_scalar, Scalar, T, 16384, 512, 1)                                  \
    HK_ENTRY(layernorm_##T##_long_scalar, hk::row_threads(512), rows_in_tiles<Access::Scalar, hk::T, 512, 16>)
