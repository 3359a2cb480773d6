// half_tiles.h: tiles of products of 16-bit floats, for kernels that make them beside something else.
#pragma once

#include "skinny.h"
#include "tiles.h"

namespace gemm {

// Each with its kernel's parameters, LDS and code.

template <class T>
struct HalfTile {
    using Given = Params;
    using Lds = TileLds<T, hk::NoWords>;
    static constexpr int kThreads = T::kThreads;
    HK_FN static void run(const Given &p, const auto &site) { tile_gemm<T, false>(p, site); }
};

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes>
struct SkinnyHalfTile {
    using Given = Params;
    using Lds = SkinnyLds<PlainSource<E, kMTiles, kNTiles, kBytes, Unscaled>, kWaves>;
    static constexpr int kThreads = kWaves * hk::kWaveSize;
    HK_FN static void run(const Given &p, const auto &site) {
        skinny_gemm<E, kMTiles, kNTiles, kWaves, kBytes, false>(p, site);
    }
};

/// Those of `TILES16` and `SKINNY16`.
template <class E>
struct HalfTiles {
    template <Access kAccess>
    using Small = HalfTile<Tile<E, kAccess, 64, 64, 2, 2, 5>>;
    using T256x256 = HalfTile<Tile<E, Access::Vectors, 256, 256, 2, 4, 5>>;
    using T128x128 = HalfTile<Tile<E, Access::Vectors, 128, 128, 2, 2, 5>>;
    using T64x64 = Small<Access::Vectors>;
    using Elements = Small<Access::Elements>;
    using S16x16 = SkinnyHalfTile<E, 1, 1, kSharing, kLongStretch>;
    using S16x32 = SkinnyHalfTile<E, 1, 2, kSharing, kLongStretch>;
    using S32x32 = SkinnyHalfTile<E, 2, 2, kSharing, kShortStretch>;
    using S64x32 = SkinnyHalfTile<E, 4, 2, 4, kShortStretch>;
};

}  // namespace gemm
