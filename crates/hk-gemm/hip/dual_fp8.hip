// dual_fp8.hip: a GEMM of fp8 with block scales and a GEMM of 16-bit floats in one launch, LDS tiles; see gemm/gemm_pair.h.
#include <hk/entry.h>

#include <gemm/gemm_pair.h>

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::BlockParams>;
using hk::Access;

// As in a8w8_blockscale.hip.
using E = hk::Fp8;
using T256x128 = gemm::BlockScaleTile<gemm::Tile<E, Access::Vectorized, 256, 128, 4, 2, 5, 2>>;
using T64x64 = gemm::BlockScaleTile<gemm::Tile<E, Access::Vectorized, 64, 64, 2, 2, 5, 2>>;
using Scalar64x64 = gemm::BlockScaleTile<gemm::Tile<E, Access::Scalar, 64, 64, 2, 2, 5>>;
}  // namespace

// Entry points of one dtype of 16-bit floats. The largest tiles differ in size, not in waves.
#define DUAL_FP8(T)                                                                                              \
    HK_ENTRY(gemm_fp8_block_and_##T##_256x128, T256x128::kThreads,                                               \
             dual_gemm<T256x128, gemm::B16Tiles<hk::T>::T256x256>)                                               \
    HK_ENTRY(gemm_fp8_block_and_##T##_64x64, T64x64::kThreads, dual_gemm<T64x64, gemm::B16Tiles<hk::T>::T64x64>) \
    HK_ENTRY(gemm_fp8_block_and_##T##_64x64_scalar, Scalar64x64::kThreads,                                       \
             dual_gemm<Scalar64x64, gemm::B16Tiles<hk::T>::Scalar64x64>)

DUAL_FP8(bf16)
DUAL_FP8(f16)
