// experts_a8w8.hip: grouped GEMM of experts, int8 or the target's fp8, with scales of rows or of blocks; see experts.h.
#include "experts.h"

#include <gemm/operands/i8_fp8.h>
#include <gemm/warpgroup.h>

namespace {
using experts::expert_decode_gemm;
using experts::expert_gemm;
using experts::Params;
using experts::WOrder;
using gemm::TileCoord;
using hk::Access;
using hk::u32;

template <class T>
using Tile256x256 = gemm::Tile<T, Access::Vectorized, 256, 256, 2, 4, 5>;
template <class T>
using Tile128x256 = gemm::LargeTile<T, 128, 256, 2, 4, 5>;
template <class T>
using Tile128x128 = gemm::LargeTile<T, 128, 128, 2, 2, 5>;
template <class T>
using Tile64x64 = gemm::LargeTile<T, 64, 64, 2, 2, 5>;
template <class T>
using Block128x256 = gemm::Tile<T, Access::Vectorized, 128, 256, 2, 4, 5, 2>;
template <class T>
using Block128x128 = gemm::Tile<T, Access::Vectorized, 128, 128, 2, 2 * hk::kRowsPerLane, 5, 2>;
template <class T>
using Block64x64 = gemm::Tile<T, Access::Vectorized, 64, 64, 2, 2, 5, 2>;

/// Accumulators. A wave's gates have one scale of w and its values another where they are halves of w; neighbours share one.
template <class T>
struct BlockAcc : gemm::BlockScaledAcc<T> {
    using Base = gemm::BlockScaledAcc<T>;
    static constexpr int kM = Base::kM, kN = Base::kN;
    bool two_w_scales = false;

    HK_FN explicit BlockAcc(const Params &p) : Base(p) {
        if (p.out.order != WOrder::Halves) return;
        constexpr u32 kGates = T::kWaveN / 2;
        this->one_w_scale = false;
        two_w_scales = kGates >> p.w_scale.row_shift <= 1 && p.out.cols % kGates == 0;
    }

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        if (!two_w_scales) return Base::run(pipeline, from, count);
        Halves turns{*this};
        pipeline.run(from, count, turns);
        // As in Base::run.
        hk::drain_register_loads();
    }

    /// As Base::Phases, with two scales of w.
    struct Halves {
        static constexpr int kPhases = Base::kSteps > 2 ? Base::kSteps : 2;
        BlockAcc &acc_tile;

        HK_FN void clear() const { gemm::clear_acc(acc_tile.acc); }

        template <int kPhase>
        HK_FN void multiply(const auto &step) const {
            acc_tile.part.template multiply_fragments<gemm::kStepFrags<T>>(
                gemm::LdsFragments<T, __remove_cvref(decltype(step))>{step});
            if constexpr ((kPhase + 1) % Base::kSteps == 0) scale(*step.scales[0]);
        }

        HK_FN void scale(const auto &scales) const {
            using Acc = typename Base::Acc;
            float of_w[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                of_w[half] = __builtin_bit_cast(float, *scales.w(T::wave_n() + half * T::kWaveN / 2));
            }
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                typename Base::Rows of_a;
#pragma unroll
                for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                    const u32 row = T::wave_m() + 16 * m + hk::row_of_lane(hk::lane_id(), r);
                    of_a[r] = __builtin_bit_cast(float, scales.a(row));
                }
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    const Acc sum = __builtin_convertvector(acc_tile.part.acc[m][n], Acc);
                    const Acc scale = hk::broadcast_m(of_a * of_w[2 * n / kN]);
                    acc_tile.acc[m][n] = __builtin_elementwise_fma(sum, scale, acc_tile.acc[m][n]);
                    acc_tile.part.acc[m][n] = typename Base::Part(0);
                }
            }
        }
    };
};

template <class T>
HK_FN void block_gemm(const Params &args) {
    expert_gemm<T, BlockAcc>(args, [](const Params &p, const TileCoord &coord, u32, auto source, auto row_of_w) {
        return gemm::BlockScales<T>(gemm::scales_end<T>(gemm::KRange(p.grid, 0)), [&](u32 row, bool of_w) {
            return of_w ? p.w_scale.place(coord.matrix, row_of_w(row), p.w.rows)
                        : p.a_scale.place(coord.batch, source(row), p.a.rows);
        });
    });
}

template <class E, int kMTiles, int kNTiles, int kBytes>
HK_FN void block_decode_gemm(const Params &args) {
    using Operands = gemm::BlockScaledOperands<E, kMTiles, kNTiles, kBytes>;
    expert_decode_gemm<Operands, gemm::kDecodeWaves>(
        args, [](const Params &p, const TileCoord &coord, u32 end, auto source, auto row_of_w) {
            return Operands{{p.a.at(coord.batch, 0), p.a.rows, p.a.layout, end, source},
                            {p.w.at(coord.matrix, 0), p.w.rows, p.w.layout, end, row_of_w},
                            {p, coord, end, source, row_of_w}};
        });
}
}  // namespace

// Entry points of one dtype, as in src/experts/table.rs.
#define EXPERTS(name, T)                                                                             \
    HK_ENTRY(experts_##name##_256x256, Tile256x256<T>::kThreads, expert_gemm<Tile256x256<T>>)        \
    HK_ENTRY(experts_##name##_128x256, Tile128x256<T>::kThreads, expert_gemm<Tile128x256<T>>)        \
    HK_ENTRY(experts_##name##_128x128, Tile128x128<T>::kThreads, expert_gemm<Tile128x128<T>>)        \
    HK_ENTRY(experts_##name##_64x64, Tile64x64<T>::kThreads, expert_gemm<Tile64x64<T>>)              \
    HK_ENTRY(experts_##name##_16x32, gemm::kDecodeWaves *hk::kWaveSize,                              \
             expert_decode_gemm<T, 1, 2, gemm::kLongStepBytes>)                                      \
    HK_ENTRY(experts_##name##_block_128x256, Block128x256<T>::kThreads, block_gemm<Block128x256<T>>) \
    HK_ENTRY(experts_##name##_block_64x64, Block64x64<T>::kThreads, block_gemm<Block64x64<T>>)       \
    HK_ENTRY(experts_##name##_block_16x32, gemm::kDecodeWaves *hk::kWaveSize,                        \
             block_decode_gemm<T, 1, 2, gemm::kLongStepBytes>)

EXPERTS(i8, hk::I8)
EXPERTS(fp8, hk::Fp8)
// For sm_90, where 128 x 256 with scales spills.
HK_ENTRY(experts_fp8_block_128x128, Block128x128<hk::Fp8>::kThreads, block_gemm<Block128x128<hk::Fp8>>)
