// i8_fp8_streamed.h: accumulators of i8_fp8.h's streamed tiles.
#pragma once

#include <gemm/operands/i8_fp8.h>
#include <gemm/streamed.h>

namespace gemm {
/// The sums of an M tile are scaled while the next one is multiplied.
template <class E, int kRows>
struct BlockScaledAcc<StreamedTile<E, kRows>> {
    using T = StreamedTile<E, kRows>;
    static constexpr int kM = kRows / 16, kN = T::kWaveTiles, kSteps = 1;
    static_assert(T::Mma::kBytes == 1, "a line is 128 columns");
    using Part = typename T::Acc;
    using Acc = hk::MmaAcc;
    Acc acc[kM][kN] = {};
    bool one_w_scale;  // one scale for all the wave's rows of w

    HK_FN explicit BlockScaledAcc(const auto &p) : one_w_scale(T::kWaveN >> p.w_scale.row_shift <= 1) {}

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        // Two loops: a branch in one loop would keep two copies of all accumulators.
        if (one_w_scale) {
            Scaled<true> scaled{acc};
            pipeline.run(from, count, scaled);
            scaled.scale_last(kM - 1);
        } else {
            Scaled<false> scaled{acc};
            pipeline.run(from, count, scaled);
            scaled.scale_last(kM - 1);
            // The last loads are of nothing. Without this wait the compiler waits for them in the other loop, which it lays out next.
            hk::drain_register_loads();
        }
    }

    template <bool kOneWScale>
    struct Scaled {
        static constexpr int kVector = 2, kScales = kOneWScale ? 1 : kN;
        using Rows = Vec<float, hk::kRowsPerLane>;
        struct StageScales {
            Rows a[kM];
            Acc w[kScales];
        };
        Acc (&acc)[kM][kN];
        Part part[kN] = {};  // of the last M tile
        Acc scale[kScales] = {};

        HK_FN static void read_a(StageScales &scales, int m, const auto &tile) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                scales.a[m][r] = __builtin_bit_cast(float, tile.a(16 * m + hk::row_of_lane(hk::lane_id(), r)));
            }
        }
        HK_FN static void read_w(StageScales &scales, const auto &tile) {
            if constexpr (kOneWScale) {
                scales.w[0] = Acc(__builtin_bit_cast(float, *tile.w(T::wave_n())));
            } else {
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    const u32 row = T::wave_n() + 16 * n + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows;
                    scales.w[n] = hk::broadcast_n(*reinterpret_cast<const Vec<float, hk::kMmaRows> *>(tile.w(row)));
                }
            }
        }
        HK_FN void multiply_rows(int m, const Frag *a, const typename T::W::Frags &w, const StageScales &scales) {
            Part now[kN] = {};
            T::mma(now, a, w);
            scale_last(m > 0 ? m - 1 : kM - 1);
#pragma unroll
            for (int n = 0; n < kN; ++n) part[n] = now[n];
#pragma unroll
            for (int n = 0; n < kScales; ++n) scale[n] = scales.w[n] * hk::broadcast_m(scales.a[m]);
        }
        HK_FN void scale_last(int m) const {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                acc[m][n] = __builtin_elementwise_fma(__builtin_convertvector(part[n], Acc), scale[kOneWScale ? 0 : n],
                                                      acc[m][n]);
            }
        }
    };
};

}  // namespace gemm
