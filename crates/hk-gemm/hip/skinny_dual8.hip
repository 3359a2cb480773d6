// skinny_dual8.hip: few rows of fp8 with scales of blocks, and of 16-bit floats, two products in one launch; see dual.h.
#include <hk/entry.h>

#include "dual.h"

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::BlockParams>;

// As in blockscale.hip.
using S16x32 = gemm::SkinnyBlockTile<hk::Fp8, 1, 2, gemm::kSharing, gemm::kLongStretch>;
using S32x32 = gemm::SkinnyBlockTile<hk::Fp8, 2, 2, gemm::kSharing, 128>;
using S64x32 = gemm::SkinnyBlockTile<hk::Fp8, 4, 2, 4, 128>;
}  // namespace

#define SKINNY_DUAL8(T)                                                                                                       \
    HK_ENTRY(gemm_fp8_block_and_##T##_16x32, S16x32::kThreads, dual_gemm<S16x32, gemm::HalfTiles<hk::T>::S16x32>)             \
    HK_ENTRY(gemm_fp8_block_and_##T##_32x32, S32x32::kThreads, dual_gemm<S32x32, gemm::HalfTiles<hk::T>::S32x32>)             \
    HK_ENTRY(gemm_fp8_block_and_##T##_64x32, S64x32::kThreads, dual_gemm<S64x32, gemm::HalfTiles<hk::T>::S64x32>)

SKINNY_DUAL8(bf16)
SKINNY_DUAL8(f16)
