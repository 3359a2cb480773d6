// skinny8.hip: products of few rows of int8 and of the fp8 that the target has; see skinny.h.
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
#define SKINNY8(name, T)                                                                                          \
    HK_ENTRY(gemm_##name##_16x16, kSharing * hk::kWaveSize, skinny_gemm<T, 1, 1, kSharing, kLongStretch, false>)  \
    HK_ENTRY(gemm_##name##_16x16_twice, kTwiceSharing * hk::kWaveSize,                                            \
             skinny_gemm<T, 1, 1, kTwiceSharing, kTwiceStretch, false>)                                           \
    HK_ENTRY(gemm_##name##_16x32, kSharing * hk::kWaveSize, skinny_gemm<T, 1, 2, kSharing, kLongStretch, false>)  \
    HK_ENTRY(gemm_##name##_32x32, kSharing * hk::kWaveSize, skinny_gemm<T, 2, 2, kSharing, kShortStretch, false>) \
    HK_ENTRY(gemm_##name##_64x32, 4 * hk::kWaveSize, skinny_gemm<T, 4, 2, 4, kShortStretch, false>)

SKINNY8(i8, hk::I8)
SKINNY8(fp8, hk::Fp8)
