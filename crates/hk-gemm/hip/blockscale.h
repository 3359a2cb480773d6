// blockscale.h: products of codes whose scales change along K.
//   y[m, n] = epilogue(sum over groups g of K of x_scale[m, g] w_scale[n / N', g] sum over k in g of x[m, k] w[n, k])
//   Groups of K are 128 columns or a power of two of them; of less, see groups.h. The sum over each 128 columns is in sums of its
//   own (i32 for int8), then scaled into f32. Scales come with the stages, a word for each row of both tiles.
#pragma once

#include "tiles.h"

namespace gemm {

/// A wave's sums, and those of the last 128 columns. x has scales unless T::kXScaled is false.
template <class T>
struct BlockSums {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    /// Of short groups, see groups.h.
    static constexpr bool kShort = requires { T::kShort; };
    /// That are scaled together: of 128 columns.
    static constexpr int kSteps = kShort ? 1 : 128 * T::Product::kBytes / (T::kBytes * T::kStep);
    static constexpr bool kXScaled = [] {
        if constexpr (requires { T::kXScaled; }) return T::kXScaled;
        else return true;
    }();
    using Part = typename T::Product::Acc;
    using Acc = hk::MmaAcc;
    using Rows = Vec<float, hk::kLaneRows>;
    Acc acc[kM][kN] = {};
    Part part[kM][kN] = {};
    bool one_w_scale;  // for all rows of w that the wave has

    HK_FN explicit BlockSums(const auto &p) : one_w_scale(T::kWaveN >> p.w_scale.row_shift <= 1) {}

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        // Two loops: a branch in one of them would keep two copies of all sums.
        if (!kShort && one_w_scale) {
            Turns<true> turns{*this};
            pipeline.run(from, count, turns);
        } else {
            Turns<false> turns{*this};
            pipeline.run(from, count, turns);
            // The last loads are of nothing. Else the compiler waits for them in the other loop, which it lays out to come next.
            hk::wait_known_loads();
        }
    }

    template <bool kOneWScale>
    struct Turns {
        static constexpr int kTurns = kSteps > 2 ? kSteps : 2;
        BlockSums &sums;

        template <int kTurn>
        HK_FN void multiply(const auto &step) const {
            static_assert(!T::kDirect || kSteps == 1, "straight to LDS, each turn is the first");
            gemm::multiply<T>(sums.part, step);
            if constexpr ((kTurn + 1) % kSteps == 0) scale(step);
        }

        /// By the scales of the step's columns.
        HK_FN void scale(const auto &step) const {
            const auto &words = *step.words[0];
            Rows x_scale[kM];
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                x_scale[m] = Rows(1.0f);
                if constexpr (kXScaled) {
#pragma unroll
                    for (u32 r = 0; r < hk::kLaneRows; ++r) {
                        const u32 row = T::wave_m() + 16 * m + hk::row_of_lane(hk::lane_id(), r);
                        x_scale[m][r] = __builtin_bit_cast(float, words.x(row));
                    }
                }
                if constexpr (kOneWScale) x_scale[m] *= __builtin_bit_cast(float, *words.w(T::wave_n()));
            }
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                Acc w_scale = Acc(1.0f);
                if constexpr (!kOneWScale) {
                    const u32 row = T::wave_n() + 16 * n + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows;
                    w_scale = hk::by_n(*reinterpret_cast<const Vec<float, hk::kMmaRows> *>(words.w(row)));
                }
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    const Acc sum = __builtin_convertvector(sums.part[m][n], Acc);
                    sums.acc[m][n] = __builtin_elementwise_fma(sum, w_scale * hk::by_m(x_scale[m]), sums.acc[m][n]);
                    sums.part[m][n] = Part(0);
                }
            }
        }
    };
};

/// The end of scales: the last stages that are scaled together have theirs whichever of them lie past the rows' end.
template <class T>
HK_FN u32 scales_end(const Range &range) {
    constexpr u32 kBytes = BlockSums<T>::kSteps * T::kStep * T::kBytes;
    return (range.to + kBytes - 1) / kBytes * kBytes;
}

/// Scales of both operands.
template <class T>
using BlockWords = hk::WordMover<T::kM, T::kN, T::kThreads>;

template <class T, class Site = Alone>
HK_FN void block_gemm(const BlockParams &p, const Site &site = {}) {
    tile_gemm<T, BlockSums, false>(p, site, [&](const Work &work, const Range &range) {
        return BlockWords<T>(scales_end<T>(range), [&](u32 row, bool of_w) {
            return of_w ? p.w_scale.place(work.matrix, work.n_tile * T::kN + row, p.w.rows)
                        : p.x_scale.place(work.batch, work.m_tile * T::kM + row, p.x.rows);
        });
    });
}

}  // namespace gemm
