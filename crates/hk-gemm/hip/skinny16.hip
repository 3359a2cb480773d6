// skinny16.hip: products of few rows of bf16 and f16; see skinny.h.
#include <hk/entry.h>

#include "skinny.h"

namespace {
using gemm::Params;
using gemm::skinny_gemm;
}  // namespace

// Entry points of one type: tiles of M and N, waves that share K, bytes of a row in a stretch.
#define SKINNY16(T)                                                                                      \
    HK_ENTRY(gemm_##T##_16x16, 8 * hk::kWaveSize, skinny_gemm<hk::T, 1, 1, 8, 256, false>)                 \
    HK_ENTRY(gemm_##T##_16x32, 8 * hk::kWaveSize, skinny_gemm<hk::T, 1, 2, 8, 256, false>)                 \
    HK_ENTRY(gemm_##T##_32x32, 8 * hk::kWaveSize, skinny_gemm<hk::T, 2, 2, 8, 128, false>)                 \
    HK_ENTRY(gemm_##T##_64x32, 4 * hk::kWaveSize, skinny_gemm<hk::T, 4, 2, 4, 128, false>)                 \
    HK_ENTRY(gemm_##T##_16x32_gated, 8 * hk::kWaveSize, skinny_gemm<hk::T, 1, 2, 8, 256, true>)            \
    HK_ENTRY(gemm_##T##_32x32_gated, 8 * hk::kWaveSize, skinny_gemm<hk::T, 2, 2, 8, 128, true>)            \
    HK_ENTRY(gemm_##T##_64x32_gated, 4 * hk::kWaveSize, skinny_gemm<hk::T, 4, 2, 4, 128, true>)

SKINNY16(bf16)
SKINNY16(f16)
