// b16.h: bf16 and f16 GEMMs as tile types, for kernels that run them beside other work.
#pragma once

#include <gemm/gemm.h>
#include <gemm/operands/plain.h>

namespace gemm {
template <class T>
struct B16Tile {
    using Args = Params;
    using Lds = TileLds<T, hk::NoScales>;
    static constexpr int kThreads = T::kThreads;
    HK_FN static void run(const Args &p, const auto &site) { tile_gemm<T, false>(p, site); }
};

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes>
struct B16DecodeTile {
    using Args = Params;
    using Lds = DecodeLds<FragmentOperands<E, kMTiles, kNTiles, kBytes, Unscaled>, kWaves>;
    static constexpr int kThreads = kWaves * hk::kWaveSize;
    HK_FN static void run(const Args &p, const auto &site) {
        decode_gemm<E, kMTiles, kNTiles, kWaves, kBytes, false>(p, site);
    }
};

/// The tiles of a16w16.hip and a16w16_decode.hip.
template <class E>
struct B16Tiles {
    template <Access kAccess>
    using Small = B16Tile<Tile<E, kAccess, 64, 64, 2, 2, 5>>;
    using T256x256 = B16Tile<Tile<E, Access::Vectorized, 256, 256, 2, 4, 5>>;
    using T128x128 = B16Tile<Tile<E, Access::Vectorized, 128, 128, 2, 2, 5>>;
    using T64x64 = Small<Access::Vectorized>;
    using Scalar64x64 = Small<Access::Scalar>;
    using S16x16 = B16DecodeTile<E, 1, 1, kDecodeWaves, kLongStepBytes>;
    using S16x32 = B16DecodeTile<E, 1, 2, kDecodeWaves, kLongStepBytes>;
    using S32x32 = B16DecodeTile<E, 2, 2, kDecodeWaves, kShortStepBytes>;
    using S64x32 = B16DecodeTile<E, 4, 2, 4, kShortStepBytes>;
};

}  // namespace gemm
