// mixed4.hip: products of few rows with mxfp4; see mixed.h.
#include <hk/entry.h>

#include "mixed.h"

namespace {
using gemm::kSharing;
using gemm::skinny_mx_gemm;
using Params = gemm::MixedParams;
}  // namespace

// Entry points of one kind: tiles of M and N, waves that share K, times kMxCols columns in a stretch.
#define MIXED4(name, Kind, count)                                                                        \
    HK_ENTRY(gemm_##name##_16x32, kSharing * hk::kWaveSize, skinny_mx_gemm<Kind, 1, 2, kSharing, count>) \
    HK_ENTRY(gemm_##name##_32x32, kSharing * hk::kWaveSize, skinny_mx_gemm<Kind, 2, 2, kSharing, count>) \
    HK_ENTRY(gemm_##name##_64x32, 4 * hk::kWaveSize, skinny_mx_gemm<Kind, 4, 2, 4, (count + 1) / 2>)

MIXED4(afp4wfp4, gemm::Fp4ByFp4, 2 / hk::kLaneRows)
MIXED4(a8wfp4, gemm::Fp8ByFp4, 2 / hk::kLaneRows)
MIXED4(bf16_wfp4, gemm::HalfByFp4<hk::bf16>, 1)
MIXED4(f16_wfp4, gemm::HalfByFp4<hk::f16>, 1)
