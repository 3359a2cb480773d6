// dual_fp8_decode.hip: a decode GEMM of fp8 with block scales and one of 16-bit floats in one launch; see gemm/gemm_pair.h.
#include <hk/entry.h>

#include <gemm/gemm_pair.h>

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::BlockParams>;

// As in a8w8_blockscale_decode.hip.
using S16x32 = gemm::BlockScaleDecodeTile<hk::Fp8, 1, 2, gemm::kDecodeWaves, gemm::kLongStepBytes>;
using S32x32 = gemm::BlockScaleDecodeTile<hk::Fp8, 2, 2, gemm::kDecodeWaves, 128>;
using S64x32 = gemm::BlockScaleDecodeTile<hk::Fp8, 4, 2, 4, 128>;
}  // namespace

#define DUAL_FP8_DECODE(T)                                                                                       \
    HK_ENTRY(gemm_fp8_block_and_##T##_16x32, S16x32::kThreads, dual_gemm<S16x32, gemm::B16Tiles<hk::T>::S16x32>) \
    HK_ENTRY(gemm_fp8_block_and_##T##_32x32, S32x32::kThreads, dual_gemm<S32x32, gemm::B16Tiles<hk::T>::S32x32>) \
    HK_ENTRY(gemm_fp8_block_and_##T##_64x32, S64x32::kThreads, dual_gemm<S64x32, gemm::B16Tiles<hk::T>::S64x32>)

DUAL_FP8_DECODE(bf16)
DUAL_FP8_DECODE(f16)
