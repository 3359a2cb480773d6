// dual_fp4.h: LDS tiles of a GEMM of mxfp4 and a GEMM of 16-bit floats in one launch, one source for each dtype of the latter.
#pragma once

#include <hk/entry.h>

#include <gemm/gemm_pair.h>

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::MixedParams>;
using hk::Access;
using hk::Fp4;

// As in wfp4.hip.
template <bool kPackedScales>
using T256x128 = gemm::MxFp4Tile<gemm::MxTile<Fp4, Access::Vectorized, 256, 128, 4, 2, 5, kPackedScales>>;
template <bool kPackedScales>
using T64x64 = gemm::MxFp4Tile<gemm::MxTile<Fp4, Access::Vectorized, 64, 64, 2, 2, 5, kPackedScales>>;
using Scalar64x64 = gemm::MxFp4Tile<gemm::MxTile<Fp4, Access::Scalar, 64, 64, 2, 2, 5, false>>;
}  // namespace

// Entry points of one dtype of 16-bit floats. The largest tiles differ in size, not in waves.
#define DUAL4(T)                                                          \
    HK_ENTRY(gemm_fp4_and_##T##_256x128_packed, T256x128<true>::kThreads, \
             dual_gemm<T256x128<true>, gemm::B16Tiles<hk::T>::T256x256>)  \
    HK_ENTRY(gemm_fp4_and_##T##_256x128, T256x128<false>::kThreads,       \
             dual_gemm<T256x128<false>, gemm::B16Tiles<hk::T>::T256x256>) \
    HK_ENTRY(gemm_fp4_and_##T##_64x64_packed, T64x64<true>::kThreads,     \
             dual_gemm<T64x64<true>, gemm::B16Tiles<hk::T>::T64x64>)      \
    HK_ENTRY(gemm_fp4_and_##T##_64x64, T64x64<false>::kThreads,           \
             dual_gemm<T64x64<false>, gemm::B16Tiles<hk::T>::T64x64>)     \
    HK_ENTRY(gemm_fp4_and_##T##_64x64_scalar, Scalar64x64::kThreads,      \
             dual_gemm<Scalar64x64, gemm::B16Tiles<hk::T>::Scalar64x64>)
