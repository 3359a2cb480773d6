// dual.h: two products of one M and K that have nothing else in common, in one launch.
//   y1 [M, N1] = epilogue(codes x1 by codes w1), as in blockscale.h, mx.h and mixed.h;
//   y2 [M, N2] = epilogue(16-bit floats x2 by w2), as in tiles.h and skinny.h
//   The first blocks make tiles of y1, the others of y2, with as many threads, in one piece of LDS. Floor: bytes and flops of
//   both.
#pragma once

#include "blockscale.h"
#include "half_tiles.h"
#include "mixed.h"
#include "mx.h"

namespace gemm {

/// Same layout as `BlockAndPlain` and `MixedAndPlain` in src/params.rs.
template <class First>
struct DualParams {
    First first;
    Params second;
};

/// Where a block of one of the products finds itself, see Alone. `kSecond`: which of them.
template <bool kSecond, class First, class Lds>
struct Beside {
    const DualParams<First> &all;
    Lds &shared;

    HK_FN u32 block() const {
        const u32 block = hk::block_x();
        return kSecond ? block - all.first.grid.blocks : block;
    }
    template <class Own>
    HK_FN Own &lds() const {
        if constexpr (kSecond) return shared.second;
        else return shared.first;
    }
    /// The products' parameters stand side by side: the kernel's are read anew, not those of a product.
    template <class Own>
    HK_FN const Own &anew(const Own &) const {
        const DualParams<First> &again = hk::read_anew(all);
        if constexpr (kSecond) return again.second;
        else return again.first;
    }
};

// Tiles of a product, each with its kernel's parameters, LDS and code.

template <class T>
struct BlockTile {
    using Given = BlockParams;
    using Lds = TileLds<T, BlockWords<T>>;
    static constexpr int kThreads = T::kThreads;
    HK_FN static void run(const Given &p, const auto &site) { block_gemm<T>(p, site); }
};

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes>
struct SkinnyBlockTile {
    using Given = BlockParams;
    using Lds = SkinnyLds<BlockSource<E, kMTiles, kNTiles, kBytes>, kWaves>;
    static constexpr int kThreads = kWaves * hk::kWaveSize;
    HK_FN static void run(const Given &p, const auto &site) { skinny_block_gemm<E, kMTiles, kNTiles, kWaves, kBytes>(p, site); }
};

template <class T>
struct Fp4Tile {
    using Given = MixedParams;
    using Lds = TileLds<T, MxWords<T>>;
    static constexpr int kThreads = T::kThreads;
    HK_FN static void run(const Given &p, const auto &site) { mx_gemm<T>(p, site); }
};

template <int kMTiles, int kNTiles, int kWaves, int kCount>
struct SkinnyFp4Tile {
    using Given = MixedParams;
    using Lds = SkinnyLds<MxSource<Fp4ByFp4, kMTiles, kNTiles, kCount>, kWaves>;
    static constexpr int kThreads = kWaves * hk::kWaveSize;
    HK_FN static void run(const Given &p, const auto &site) { skinny_mx_gemm<Fp4ByFp4, kMTiles, kNTiles, kWaves, kCount>(p, site); }
};

/// A tile of one of the products.
template <class First, class Second>
HK_FN void dual_gemm(const DualParams<typename First::Given> &p) {
    static_assert(First::kThreads == Second::kThreads, "one block makes either");
    union Lds {
        typename First::Lds first;
        typename Second::Lds second;
    };
    auto &lds = hk::block_lds<Lds>();
    if (hk::block_x() < p.first.grid.blocks) {
        First::run(p.first, Beside<false, typename First::Given, Lds>{p, lds});
    } else {
        Second::run(p.second, Beside<true, typename First::Given, Lds>{p, lds});
    }
}

}  // namespace gemm
