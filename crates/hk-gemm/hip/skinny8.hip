// skinny8.hip: products of few rows of int8 and of the fp8 that the target has; see skinny.h.
#include <hk/entry.h>

#include "skinny.h"

namespace {
using gemm::Params;
using gemm::skinny_gemm;
}  // namespace

// Entry points of one type: tiles of M and N, waves that share K, bytes of a row in a stretch.
#define SKINNY8(name, T)                                                                                      \
    HK_ENTRY(gemm_##name##_16x16, 8 * hk::kWaveSize, skinny_gemm<T, 1, 1, 8, 256, false>)                 \
    HK_ENTRY(gemm_##name##_16x32, 8 * hk::kWaveSize, skinny_gemm<T, 1, 2, 8, 256, false>)                 \
    HK_ENTRY(gemm_##name##_32x32, 8 * hk::kWaveSize, skinny_gemm<T, 2, 2, 8, 128, false>)                 \
    HK_ENTRY(gemm_##name##_64x32, 4 * hk::kWaveSize, skinny_gemm<T, 4, 2, 4, 128, false>)

SKINNY8(i8, hk::I8)
SKINNY8(fp8, hk::Fp8)
