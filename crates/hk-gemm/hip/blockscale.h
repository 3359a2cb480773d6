// blockscale.h: products of codes whose scales change along K.
//   y[m, n] = epilogue(sum over groups g of K of x_scale[m, g] w_scale[n / N', g] sum over k in g of x[m, k] w[n, k])
//   Groups of K are 128 columns or a power of two of them. The sum over each 128 columns is in sums of its own (i32 for int8),
//   then scaled into f32. Scales come with the stages, a word for each row of both tiles.
#pragma once

#include "tiles.h"

namespace gemm {

/// A wave's sums, and those of the last 128 columns. x has scales unless T::kXScaled is false.
template <class T>
struct BlockSums {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    static constexpr int kSteps = 128 * T::Product::kBytes / (T::kBytes * T::kStep);  // of 128 columns
    static constexpr int kTurns = kSteps > 2 ? kSteps : 2;
    static constexpr bool kXScaled = [] {
        if constexpr (requires { T::kXScaled; }) return T::kXScaled;
        else return true;
    }();
    using Part = typename T::Product::Acc;
    using Acc = Vec<float, hk::kMmaRows>;
    Acc acc[kM][kN] = {};
    Part part[kM][kN] = {};
    float x_scale[kM];
    Acc w_scale[kN];

    template <int kTurn>
    HK_FN void multiply(const auto &step) {
        gemm::multiply<T>(part, step);
        if constexpr (kTurn % kSteps == 0) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                x_scale[m] = 1.0f;
                if constexpr (kXScaled) {
                    x_scale[m] = __builtin_bit_cast(float, step.words[0]->x(T::wave_m() + 16 * m + hk::lane_id() % 16));
                }
            }
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const u32 row = T::wave_n() + 16 * n + hk::lane_id() / 16 * hk::kMmaRows;
                w_scale[n] = *reinterpret_cast<const Acc *>(step.words[0]->w(row));
            }
        }
        if constexpr ((kTurn + 1) % kSteps == 0) scale();
    }

    template <int kLast>
    HK_FN void finish() {
        if constexpr (kLast % kSteps != 0) scale();
    }

    HK_FN void scale() {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const Acc sum = __builtin_convertvector(part[m][n], Acc);
                acc[m][n] = __builtin_elementwise_fma(sum, w_scale[n] * x_scale[m], acc[m][n]);
                part[m][n] = Part(0);
            }
        }
    }
};

template <class T>
HK_FN void block_gemm(const BlockParams &p) {
    tile_gemm<T, BlockSums, false>(p, [&](const Work &work, const Range &range) {
        return hk::WordMover<T::kM, T::kN, T::kThreads>(range.to, [&](u32 row, bool of_w) {
            return of_w ? p.w_scale.place(work.matrix, work.n_tile * T::kN + row, p.w.rows)
                        : p.x_scale.place(work.batch, work.m_tile * T::kM + row, p.x.rows);
        });
    });
}

}  // namespace gemm
