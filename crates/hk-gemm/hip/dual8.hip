// dual8.hip: fp8 with scales of blocks, and 16-bit floats, two products in one launch, by tiles; see dual.h.
#include <hk/entry.h>

#include "dual.h"

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::BlockParams>;
using hk::Access;

// As in blockscale.hip.
using E = hk::Fp8;
using T256x128 = gemm::BlockTile<gemm::Tile<E, Access::Vectors, 256, 128, 4, 2, 5, 2>>;
using T64x64 = gemm::BlockTile<gemm::Tile<E, Access::Vectors, 64, 64, 2, 2, 5, 2>>;
using Elements = gemm::BlockTile<gemm::Tile<E, Access::Elements, 64, 64, 2, 2, 5>>;
}  // namespace

// Entry points with one type of floats. The largest tiles are not of one size, but of as many waves.
#define DUAL8(T)                                                                                                              \
    HK_ENTRY(gemm_fp8_block_and_##T##_256x128, T256x128::kThreads, dual_gemm<T256x128, gemm::HalfTiles<hk::T>::T256x256>)     \
    HK_ENTRY(gemm_fp8_block_and_##T##_64x64, T64x64::kThreads, dual_gemm<T64x64, gemm::HalfTiles<hk::T>::T64x64>)             \
    HK_ENTRY(gemm_fp8_block_and_##T##_64x64_elements, Elements::kThreads, dual_gemm<Elements, gemm::HalfTiles<hk::T>::Elements>)

DUAL8(bf16)
DUAL8(f16)
