// skinny_dual4.hip: few rows of mxfp4, and of 16-bit floats, two products in one launch; see dual.h.
#include <hk/entry.h>

#include "dual.h"

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::MixedParams>;

// As in mixed4.hip.
using S16x32 = gemm::SkinnyFp4Tile<1, 2, gemm::kSharing, 2 / hk::kLaneRows>;
using S32x32 = gemm::SkinnyFp4Tile<2, 2, gemm::kSharing, 2 / hk::kLaneRows>;
using S64x32 = gemm::SkinnyFp4Tile<4, 2, 4, 1>;
}  // namespace

#define SKINNY_DUAL4(T)                                                                                                       \
    HK_ENTRY(gemm_fp4_and_##T##_16x32, S16x32::kThreads, dual_gemm<S16x32, gemm::HalfTiles<hk::T>::S16x32>)                   \
    HK_ENTRY(gemm_fp4_and_##T##_32x32, S32x32::kThreads, dual_gemm<S32x32, gemm::HalfTiles<hk::T>::S32x32>)                   \
    HK_ENTRY(gemm_fp4_and_##T##_64x32, S64x32::kThreads, dual_gemm<S64x32, gemm::HalfTiles<hk::T>::S64x32>)

SKINNY_DUAL4(bf16)
SKINNY_DUAL4(f16)
