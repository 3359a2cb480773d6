// dual_fp4_decode.hip: a decode GEMM of mxfp4 and one of 16-bit floats in one launch; see gemm/gemm_pair.h.
#include <hk/entry.h>

#include <gemm/gemm_pair.h>

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::MixedParams>;

// As in wfp4_decode.hip.
using S16x32 = gemm::MxFp4DecodeTile<1, 2, gemm::kDecodeWaves, 2 / hk::kRowsPerLane>;
using S32x32 = gemm::MxFp4DecodeTile<2, 2, gemm::kDecodeWaves, 2 / hk::kRowsPerLane>;
using S64x32 = gemm::MxFp4DecodeTile<4, 2, 4, 1>;
}  // namespace

#define DUAL_FP4_DECODE(T)                                                                                 \
    HK_ENTRY(gemm_fp4_and_##T##_16x32, S16x32::kThreads, dual_gemm<S16x32, gemm::B16Tiles<hk::T>::S16x32>) \
    HK_ENTRY(gemm_fp4_and_##T##_32x32, S32x32::kThreads, dual_gemm<S32x32, gemm::B16Tiles<hk::T>::S32x32>) \
    HK_ENTRY(gemm_fp4_and_##T##_64x32, S64x32::kThreads, dual_gemm<S64x32, gemm::B16Tiles<hk::T>::S64x32>)

DUAL_FP4_DECODE(bf16)
DUAL_FP4_DECODE(f16)
