// quantized8.hip: products of few rows, quantized to int8 or fp8 on their way, with the same; see mixed.h.
#include <hk/entry.h>

#include "mixed.h"

namespace {
using gemm::kSharing;
using gemm::skinny_group_gemm;
using Params = gemm::MixedParams;
template <class T, class Code>
using Kind = gemm::ToByteByByte<T, Code>;
}  // namespace

// Entry points of one type of x and of w: tiles of M and N, waves that share K, times 128 columns in a stretch.
#define QUANTIZED8(T, code, Code)                                                                                              \
    HK_ENTRY(gemm_##T##_to_w##code##_16x32, kSharing * hk::kWaveSize, skinny_group_gemm<Kind<hk::T, Code>, 1, 2, kSharing, 1>) \
    HK_ENTRY(gemm_##T##_to_w##code##_32x32, kSharing * hk::kWaveSize, skinny_group_gemm<Kind<hk::T, Code>, 2, 2, kSharing, 1>)

QUANTIZED8(bf16, i8, hk::I8)
QUANTIZED8(f16, i8, hk::I8)
QUANTIZED8(bf16, fp8, hk::Fp8)
QUANTIZED8(f16, fp8, hk::Fp8)
