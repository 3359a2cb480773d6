// warpgroup.h: block tiles of warpgroup instructions, where the target has them, in place of those of gemm.h.
#pragma once

#include <gemm/gemm.h>

#include <hk/warpgroup.h>
#if defined(HK_WARPGROUPS)
#include <hk/widened.h>
#endif

namespace gemm {

#if defined(HK_WARPGROUPS)
/// A block tile of kM / 64 warpgroups, each 64 rows of a by all rows of w. As Tile.
template <class E, int kM_, int kN_, int kStages>
struct WarpgroupTile {
    using Mma = hk::FragMma<E>;
    static constexpr int kM = kM_, kN = kN_;
    static constexpr int kThreads = kM / 16 * hk::kWaveSize;
    static constexpr int kBytes = 128;
    static constexpr int kWaveM = 16, kWaveN = kN;

    using A = hk::WarpgroupMover<kM, kThreads, Mma::kBytes>;
    using W = hk::WarpgroupMover<kN, kThreads, Mma::kBytes>;
    template <class Scales>
    using Pipeline = hk::WarpgroupPipeline<A, W, Scales, kStages>;

    HK_FN static u32 wave_m() { return hk::wave_id() * kWaveM; }
    HK_FN static u32 wave_n() { return 0; }
};

template <class E, int kTileM, int kTileN, int kStages>
struct TileAcc<WarpgroupTile<E, kTileM, kTileN, kStages>> : WaveTile<WarpgroupTile<E, kTileM, kTileN, kStages>> {
    static constexpr int kM = 1, kN = kTileN / 16;
    HK_FN explicit TileAcc(const auto &) {}
    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        pipeline.template multiply<E, kTileN>(from, count, this->acc);
    }
};

/// The same of fp8, widened to f16.
template <int kM, int kN>
struct WideningTile : WarpgroupTile<hk::Fp8, kM, kN, 0> {
    using Base = WarpgroupTile<hk::Fp8, kM, kN, 0>;
    using A = hk::WideningMover<kM, Base::kThreads>;
    using W = hk::WideningMover<kN, Base::kThreads>;
    template <class Scales>
    using Pipeline = hk::WideningPipeline<A, W, Scales>;
};

template <int kM, int kN>
struct TileAcc<WideningTile<kM, kN>> : TileAcc<typename WideningTile<kM, kN>::Base> {
    using TileAcc<typename WideningTile<kM, kN>::Base>::TileAcc;
};

namespace detail {
/// As many stages as fit LDS, of which each block has 1 KiB to itself: two blocks an SM of 64 rows, else one.
template <int kM, int kN>
inline constexpr int kWarpgroupStages = [] {
    constexpr int kBlocks = kM == 64 ? 2 : 1, kReserved = 1024;
    return ((hk::kLdsBytes + kReserved) / kBlocks - kReserved) / ((kM + kN) * hk::WarpgroupRows<64>::kBytes);
}();
}  // namespace detail
#endif

namespace detail {
template <class E, int kM, int kN, bool kWidened, class Plain>
struct LargeTileOf {
    using Type = Plain;
};
#if defined(HK_WARPGROUPS)
template <class E, int kM, int kN, bool kWidened, class Plain>
    requires(!__is_same(E, hk::Fp8))
struct LargeTileOf<E, kM, kN, kWidened, Plain> {
    using Type = WarpgroupTile<E, kM, kN, kWarpgroupStages<kM, kN>>;
};
template <int kM, int kN, class Plain>
struct LargeTileOf<hk::Fp8, kM, kN, true, Plain> {
    using Type = WideningTile<kM, kN>;
};
#endif
}  // namespace detail

/// Tile<E, Access::Vectorized, kM, kN, ..>, by warpgroups where the target has them; of fp8, see Wgmma, if it is widened for them.
template <class E, int kM, int kN, int kWavesM, int kWavesN, int kStages, bool kWidened = false>
using LargeTile =
    typename detail::LargeTileOf<E, kM, kN, kWidened,
                                 Tile<E, hk::Access::Vectorized, kM, kN, kWavesM, kWavesN, kStages>>::Type;

/// tile_gemm of 128 x 256, by warpgroups also of 192 or 224 columns, if the grid says so.
template <class E>
HK_FN void wide_tile_gemm(const Params &p) {
#if defined(HK_WARPGROUPS)
    if (p.grid.tile_n == 192) return tile_gemm<LargeTile<E, 128, 192, 2, 4, 5>, false>(p);
    if (p.grid.tile_n == 224) return tile_gemm<LargeTile<E, 128, 224, 2, 4, 5>, false>(p);
#endif
    tile_gemm<LargeTile<E, 128, 256, 2, 4, 5>, false>(p);
}

}  // namespace gemm
