// gemm_pair.h: two GEMMs of one M and K in one launch.
#pragma once

#include <gemm/launch_site.h>
#include <gemm/operands/b16.h>
#include <gemm/operands/i8_fp8.h>
#include <gemm/operands/mxfp4.h>

namespace gemm {
template <class T>
struct BlockScaleTile {
    using Args = BlockParams;
    using Lds = TileLds<T, BlockScales<T>>;
    static constexpr int kThreads = T::kThreads;
    HK_FN static void run(const Args &p, const auto &site) { blockscale_gemm<T>(p, site); }
};

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes>
struct BlockScaleDecodeTile {
    using Args = BlockParams;
    using Lds = DecodeLds<BlockScaledOperands<E, kMTiles, kNTiles, kBytes>, kWaves>;
    static constexpr int kThreads = kWaves * hk::kWaveSize;
    HK_FN static void run(const Args &p, const auto &site) {
        decode_blockscale_gemm<E, kMTiles, kNTiles, kWaves, kBytes>(p, site);
    }
};

template <class T>
struct MxFp4Tile {
    using Args = MixedParams;
    using Lds = TileLds<T, MxScales<T>>;
    static constexpr int kThreads = T::kThreads;
    HK_FN static void run(const Args &p, const auto &site) { mx_gemm<T, MxAcc>(p, site); }
};

template <int kMTiles, int kNTiles, int kWaves, int kCount>
struct MxFp4DecodeTile {
    using Args = MixedParams;
    using Lds = DecodeLds<MxOperands<Fp4ByFp4, kMTiles, kNTiles, kCount>, kWaves>;
    static constexpr int kThreads = kWaves * hk::kWaveSize;
    HK_FN static void run(const Args &p, const auto &site) {
        decode_mx_gemm<Fp4ByFp4, kMTiles, kNTiles, kWaves, kCount>(p, site);
    }
};

/// One tile of either GEMM.
template <class First, class Second>
HK_FN void dual_gemm(const DualParams<typename First::Args> &p) {
    static_assert(First::kThreads == Second::kThreads, "one block makes either");
    union Lds {
        typename First::Lds first;
        typename Second::Lds second;
    };
    auto &lds = hk::block_lds<Lds>();
    if (hk::block_x() < p.first.grid.blocks) {
        First::run(p.first, PairSite<false, typename First::Args, Lds>{p, lds});
    } else {
        Second::run(p.second, PairSite<true, typename First::Args, Lds>{p, lds});
    }
}

}  // namespace gemm
