// skinny16.hip: products of few rows of bf16 and f16; see skinny.h.
#include <hk/entry.h>

#include "skinny.h"

namespace {
using gemm::kLongStretch;
using gemm::kSharing;
using gemm::kShortStretch;
using gemm::kTwiceSharing;
using gemm::kTwiceStretch;
using gemm::Params;
using gemm::skinny_gemm;
}  // namespace

// Entry points of one type: tiles of M and N, waves that share K, bytes of a row in a stretch.
#define SKINNY16(T)                                                                                                     \
    HK_ENTRY(gemm_##T##_16x16, kSharing * hk::kWaveSize, skinny_gemm<hk::T, 1, 1, kSharing, kLongStretch, false>)       \
    HK_ENTRY(gemm_##T##_16x16_twice, kTwiceSharing * hk::kWaveSize,                                                     \
             skinny_gemm<hk::T, 1, 1, kTwiceSharing, kTwiceStretch, false>)                                             \
    HK_ENTRY(gemm_##T##_16x32, kSharing * hk::kWaveSize, skinny_gemm<hk::T, 1, 2, kSharing, kLongStretch, false>)       \
    HK_ENTRY(gemm_##T##_32x32, kSharing * hk::kWaveSize, skinny_gemm<hk::T, 2, 2, kSharing, kShortStretch, false>)      \
    HK_ENTRY(gemm_##T##_64x32, 4 * hk::kWaveSize, skinny_gemm<hk::T, 4, 2, 4, kShortStretch, false>)                    \
    HK_ENTRY(gemm_##T##_16x32_gated, kSharing * hk::kWaveSize, skinny_gemm<hk::T, 1, 2, kSharing, kLongStretch, true>)  \
    HK_ENTRY(gemm_##T##_32x32_gated, kSharing * hk::kWaveSize, skinny_gemm<hk::T, 2, 2, kSharing, kShortStretch, true>) \
    HK_ENTRY(gemm_##T##_64x32_gated, 4 * hk::kWaveSize, skinny_gemm<hk::T, 4, 2, 4, kShortStretch, true>)

SKINNY16(bf16)
SKINNY16(f16)
