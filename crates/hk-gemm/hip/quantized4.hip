// quantized4.hip: products of few rows, quantized to mxfp4 on their way, with mxfp4; see mixed.h.
#include <hk/entry.h>

#include "mixed.h"

namespace {
using gemm::kSharing;
using gemm::skinny_mx_gemm;
using Params = gemm::MixedParams;
}  // namespace

// Entry points of one type of x.
#define QUANTIZED4(T)                                                                                                            \
    HK_ENTRY(gemm_##T##_to_fp4_wfp4_16x32, kSharing * hk::kWaveSize, skinny_mx_gemm<gemm::ToFp4ByFp4<hk::T>, 1, 2, kSharing, 1>) \
    HK_ENTRY(gemm_##T##_to_fp4_wfp4_32x32, kSharing * hk::kWaveSize, skinny_mx_gemm<gemm::ToFp4ByFp4<hk::T>, 2, 2, kSharing, 1>)

QUANTIZED4(bf16)
QUANTIZED4(f16)
