// a16w8.h: LDS tiles of 16-bit floats by int8 or fp8, one source for each dtype of w.
#pragma once

#include <hk/entry.h>

#include <gemm/operands/i8_fp8.h>

namespace {
using gemm::dequant_gemm;
using Params = gemm::MixedParams;
using hk::Access;

template <class T, class Q>
using Tile128x128 = gemm::DequantBytesTile<T, Q, Access::Vectorized, 128, 128, 2, 2>;
template <class T, class Q>
using Tile64x64 = gemm::DequantBytesTile<T, Q, Access::Vectorized, 64, 64, 2, 2>;
template <class T, class Q>
using Scalar64x64 = gemm::DequantBytesTile<T, Q, Access::Scalar, 64, 64, 2, 2>;
}  // namespace

// Entry points of one pair of dtypes.
#define DECODED(T, name, Q)                                                                                         \
    HK_ENTRY(gemm_##T##_##name##_128x128, (Tile128x128<hk::T, Q>::kThreads), (dequant_gemm<Tile128x128<hk::T, Q>>)) \
    HK_ENTRY(gemm_##T##_##name##_64x64, (Tile64x64<hk::T, Q>::kThreads), (dequant_gemm<Tile64x64<hk::T, Q>>))       \
    HK_ENTRY(gemm_##T##_##name##_64x64_scalar, (Scalar64x64<hk::T, Q>::kThreads), (dequant_gemm<Scalar64x64<hk::T, Q>>))
