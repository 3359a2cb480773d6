// mx.hip: products of mxfp4 by tiles; see mx.h.
#include <hk/entry.h>

#include "mx.h"

namespace {
using gemm::mx_gemm;
using Params = gemm::MixedParams;
using hk::Access;

using hk::Fp4;
using hk::Fp8;

template <bool kWords>
using Fp4Large = gemm::MxTile<Fp4, Access::Vectors, 256, 128, 4, 2, 5, kWords>;
template <bool kWords>
using Fp8Large = gemm::MxTile<Fp8, Access::Vectors, 128, 128, 2, 4, 5, kWords>;
template <class X, bool kWords>
using Small = gemm::MxTile<X, Access::Vectors, 64, 64, 2, 2, 5, kWords>;
template <class X>
using Elements = gemm::MxTile<X, Access::Elements, 64, 64, 2, 2, 5, false>;
}  // namespace

// `_words`: the scales of 128 columns are words.
#define MX_TILE(name, ...) HK_ENTRY(name, (__VA_ARGS__::kThreads), (mx_gemm<__VA_ARGS__>))

MX_TILE(gemm_afp4wfp4_256x128_words, Fp4Large<true>)
MX_TILE(gemm_afp4wfp4_256x128, Fp4Large<false>)
MX_TILE(gemm_afp4wfp4_64x64_words, Small<Fp4, true>)
MX_TILE(gemm_afp4wfp4_64x64, Small<Fp4, false>)
MX_TILE(gemm_afp4wfp4_64x64_elements, Elements<Fp4>)
MX_TILE(gemm_a8wfp4_128x128_words, Fp8Large<true>)
MX_TILE(gemm_a8wfp4_128x128, Fp8Large<false>)
MX_TILE(gemm_a8wfp4_64x64_words, Small<Fp8, true>)
MX_TILE(gemm_a8wfp4_64x64, Small<Fp8, false>)
MX_TILE(gemm_a8wfp4_64x64_elements, Elements<Fp8>)
