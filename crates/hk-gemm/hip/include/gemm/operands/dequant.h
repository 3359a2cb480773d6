// dequant.h: tiles whose w is dequantized to 16-bit floats between global memory and LDS.
//   A block dequantizes w once; LDS and MFMA see 16-bit floats.
#pragma once

#include <gemm/gemm.h>

#include <hk/mixed_mma.h>

namespace gemm {
/// A block tile as `Tile` in gemm/gemm.h, for a of type T. `Dequant` makes Dequant::Out of w's Dequant::Q.
template <class T, class Dequant_, Access kAccess, int kM_, int kN_, int kWavesM, int kWavesN>
struct DequantTile {
    using Dequant = Dequant_;
    struct Mma {
        using Acc = hk::MmaAcc;
        static constexpr int kBytes = 2, kFrags = 1, kDim = 16;

        HK_FN static Acc mma(const Frag *w, const Frag *a, Acc acc) {
            using Weights = hk::PerRow<Vec<typename Dequant::Out, 8>>;
            using Floats = hk::PerRow<Vec<T, 8>>;
            return hk::mma(__builtin_bit_cast(Weights, w[0]), __builtin_bit_cast(Floats, a[0]), acc);
        }
    };
    static constexpr int kM = kM_, kN = kN_, kBytes = 64, kStep = 1;
    static constexpr int kThreads = kWavesM * kWavesN * hk::kWaveSize;
    static constexpr int kWaveM = kM / kWavesM, kWaveN = kN / kWavesN;
    static constexpr bool kDirectToLds = false, kAScaled = false, kPingPong = false;

    using A = hk::Mover<hk::SharedTile<kM, kBytes>, kThreads, kAccess, sizeof(T)>;
    using W =
        hk::DequantMover<hk::SharedTile<kN, kBytes>, kThreads, kAccess, hk::kBitsOf<typename Dequant::Q>, Dequant>;
    template <class Scales>
    using Pipeline = hk::RegisterPipeline<A, W, Scales, kStep>;

    HK_FN static u32 wave_m() { return hk::wave_id() / kWavesN * kWaveM; }
    HK_FN static u32 wave_n() { return hk::wave_id() % kWavesN * kWaveN; }
};

}  // namespace gemm
