// mxfp8.h: both operands mxfp8, of the fp8 that the target has.
#pragma once

#include <gemm/operands/mx.h>

namespace gemm {
/// A block tile as `Tile` in gemm/gemm.h. Stages are 64 columns where loads take registers; loads straight to LDS multiply the two
/// stages of a packed scale per step.
template <Access kAccess, int kM, int kN, int kWavesM, int kWavesN, bool kPackedScales_>
struct MxFp8Tile : Tile<hk::Fp8, kAccess, kM, kN, kWavesM, kWavesN, 5, 2,
                        kLineBytes == 128 && hk::kHasWideDma && kAccess == Access::Vectorized && kPackedScales_> {
    struct Operand {
        static constexpr int kBytes = 128;  // of 128 columns
    };
    static constexpr int kARows = kM;
    static constexpr bool kPackedScales = kPackedScales_;
};

/// A wave's accumulators.
template <class T>
struct MxFp8Acc {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    hk::MmaAcc acc[kM][kN] = {};

    HK_FN explicit MxFp8Acc(const auto &) {}

    HK_FN void clear() { clear_acc(acc); }

    HK_FN void run(const auto &pipeline, u32 from, u32 count) { pipeline.run(from, count, *this); }

    template <int kPhase>
    HK_FN void multiply(const auto &step) {
        using hk::MxFp8;
        static_assert(!T::kDirectToLds || T::kStep * T::kBytes == 128, "straight to LDS, each turn is the first");
        constexpr int kOfStage = T::kBytes / hk::kFragBytes;
        const u32 lane = hk::lane_id();
#pragma unroll
        for (int k = 0; k < T::kStep * kOfStage; k += MxFp8::kFrags) {
            const auto load = [&](Frag(&quants)[MxFp8::kFrags], const auto &tiles, u32 row) {
#pragma unroll
                for (int f = 0; f < MxFp8::kFrags; ++f) {
                    quants[f] = hk::joined(tiles[(k + f) / kOfStage]->chunks(row, (k + f) % kOfStage));
                }
            };
            const auto &scales = *step.scales[k / kOfStage];
            // First of the fragments' blocks among the four of a packed scale; or the lane's own block.
            const u32 block = kPhase * (T::kStep * T::kBytes / 32) % 4 + k * (hk::kFragBytes / 32) % 4;
            const u32 shift = 8 * (hk::kHasMxMma ? hk::group_of_lane(lane) : block);
            MxFp8::W w[kN];
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const u32 row = T::wave_n() + 16 * n;
                load(w[n].quants, step.w, row);
                if constexpr (hk::kHasMxMma) {
                    w[n].scale = *scales.w(row + hk::row_of_lane(lane)) >> shift;
                } else {
                    using Scales = decltype(w[n].scale);
                    const u32 of_lane = row + hk::group_of_lane(lane) * hk::kMmaRows;
                    w[n].scale = *reinterpret_cast<const Scales *>(scales.w(of_lane)) >> shift;
                }
            }
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const u32 row = T::wave_m() + 16 * m;
                MxFp8::A a;
                load(a.quants, step.a, row);
                a.scale = hk::per_row([&](u32 i) { return scales.a(row + hk::row_of_lane(lane, i)) >> shift; });
#pragma unroll
                for (int n = 0; n < kN; ++n) acc[m][n] = MxFp8::mma(w[n], a, acc[m][n]);
            }
        }
    }
};

/// A lane's rows of one operand, kMxCols columns.
template <bool kOfW>
struct MxFp8Rows {
    using Part = decltype([] {
        if constexpr (kOfW)
            return hk::MxFp8::W();
        else
            return hk::MxFp8::A();
    }());
    static constexpr int kParts = 2 / hk::MxFp8::kFrags;
    Part part[kParts];

    /// `scale`: of the lane's blocks.
    HK_FN static MxFp8Rows of(const hk::PerRow<hk::Block<hk::Fp8, true>> &raw, const hk::PerRow<u32> &scale) {
        MxFp8Rows rows;
        const auto quants = [&](int c) { return hk::joined(hk::per_row([&](u32 r) { return raw.row[r].chunk[c]; })); };
        if constexpr (hk::kHasMxMma) {
            rows.part[0].quants[0] = quants(0), rows.part[0].quants[hk::MxFp8::kFrags - 1] = quants(1);
            if constexpr (kOfW)
                rows.part[0].scale = scale.row[0];
            else
                rows.part[0].scale = scale;
        } else {
            // A row's four scales, packed.
            const u32 group = hk::group_of_lane(hk::lane_id());
            const auto scales = hk::per_row([&](u32 r) {
                return hk::reduce_over_lane_groups(scale.row[r] << 8 * group, [](u32 a, u32 b) { return a | b; });
            });
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
                rows.part[p].quants[0] = quants(p);
                const u32 shift = 8 * p * hk::MxFp8::kBlocks;
                if constexpr (kOfW) {
#pragma unroll
                    for (u32 i = 0; i < hk::kMmaRows; ++i) {
                        const u32 word = scales.row[hk::part_of_row(i)];
                        rows.part[p].scale[i] = hk::shuffle(word, hk::lane_of_row(group * hk::kMmaRows + i)) >> shift;
                    }
                } else {
                    rows.part[p].scale = hk::per_row([&](u32 r) { return scales.row[r] >> shift; });
                }
            }
        }
        return rows;
    }
};

HK_FN hk::MmaAcc mma(const MxFp8Rows<true> &w, const MxFp8Rows<false> &a, hk::MmaAcc acc) {
#pragma unroll
    for (int i = 0; i < MxFp8Rows<true>::kParts; ++i) acc = hk::MxFp8::mma(w.part[i], a.part[i], acc);
    return acc;
}

struct MxFp8ByMxFp8 {
    using A = hk::Fp8;
    using W = hk::Fp8;
    using RawA = hk::Block<A, true>;
    using RawW = RawA;
    using BlockA = MxFp8Rows<false>;
    using BlockW = MxFp8Rows<true>;
    static constexpr bool kAScales = true, kWScales = true;
    static constexpr float kAccUnit = 1.0f;

    HK_FN static BlockA a(const hk::PerRow<RawA> &raw, const hk::PerRow<u32> &scale, const auto &) {
        return BlockA::of(raw, scale);
    }
    HK_FN static BlockW w(const hk::PerRow<RawW> &raw, const hk::PerRow<u32> &scale) { return BlockW::of(raw, scale); }
};

}  // namespace gemm
