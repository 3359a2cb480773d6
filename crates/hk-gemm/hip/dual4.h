// dual4.h: tiles of mxfp4, and of 16-bit floats, two products in one launch, one source for each type of floats; see dual.h.
#pragma once

#include <hk/entry.h>

#include "dual.h"

namespace {
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::MixedParams>;
using hk::Access;
using hk::Fp4;

// As in mx.hip. `kWords`: the scales of 128 columns are words.
template <bool kWords>
using T256x128 = gemm::Fp4Tile<gemm::MxTile<Fp4, Access::Vectors, 256, 128, 4, 2, 5, kWords>>;
template <bool kWords>
using T64x64 = gemm::Fp4Tile<gemm::MxTile<Fp4, Access::Vectors, 64, 64, 2, 2, 5, kWords>>;
using Elements = gemm::Fp4Tile<gemm::MxTile<Fp4, Access::Elements, 64, 64, 2, 2, 5, false>>;
}  // namespace

// Entry points with one type of floats. The largest tiles are not of one size, but of as many waves.
#define DUAL4(T)                                                                                                              \
    HK_ENTRY(gemm_fp4_and_##T##_256x128_words, T256x128<true>::kThreads,                                                      \
             dual_gemm<T256x128<true>, gemm::HalfTiles<hk::T>::T256x256>)                                                     \
    HK_ENTRY(gemm_fp4_and_##T##_256x128, T256x128<false>::kThreads,                                                           \
             dual_gemm<T256x128<false>, gemm::HalfTiles<hk::T>::T256x256>)                                                    \
    HK_ENTRY(gemm_fp4_and_##T##_64x64_words, T64x64<true>::kThreads, dual_gemm<T64x64<true>, gemm::HalfTiles<hk::T>::T64x64>) \
    HK_ENTRY(gemm_fp4_and_##T##_64x64, T64x64<false>::kThreads, dual_gemm<T64x64<false>, gemm::HalfTiles<hk::T>::T64x64>)     \
    HK_ENTRY(gemm_fp4_and_##T##_64x64_elements, Elements::kThreads, dual_gemm<Elements, gemm::HalfTiles<hk::T>::Elements>)
