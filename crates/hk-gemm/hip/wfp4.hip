// wfp4.hip: GEMM of mxfp4 or fp8 by mxfp4, LDS tiles; see gemm/operands/mxfp4.h. a16wfp4.hip has the tiles for 16-bit floats.
#include <hk/entry.h>

#include <gemm/operands/mxfp4.h>

namespace {
using gemm::mx_gemm;
using Params = gemm::MixedParams;
using hk::Access;

using hk::Fp4;
using hk::Fp8;

template <bool kPackedScales>
using Fp4Largest = gemm::MxTile<Fp4, Access::Vectorized, 256, 256, 2, 4, 5, kPackedScales>;
template <bool kPackedScales>
using Fp4Large = gemm::MxTile<Fp4, Access::Vectorized, 256, 128, 4, 2, 5, kPackedScales>;
template <bool kPackedScales>
using Fp8Large = gemm::MxTile<Fp8, Access::Vectorized, 128, 128, 2, 4, 5, kPackedScales>;
template <bool kPackedScales>
using Fp4Square = gemm::MxTile<Fp4, Access::Vectorized, 128, 128, 2, 2, 5, kPackedScales>;
template <bool kPackedScales>
using Fp4Wide = gemm::MxTile<Fp4, Access::Vectorized, 64, 128, 2, 2, 5, kPackedScales>;
template <class A, bool kPackedScales>
using Small = gemm::MxTile<A, Access::Vectorized, 64, 64, 2, 2, 5, kPackedScales>;
template <class A>
using Scalar64x64 = gemm::MxTile<A, Access::Scalar, 64, 64, 2, 2, 5, false>;
}  // namespace

// `_packed`: the scales of 128 columns are 32-bit loads.
#define MX_TILE(name, ...) HK_ENTRY(name, (__VA_ARGS__::kThreads), (mx_gemm<__VA_ARGS__, gemm::MxAcc>))

MX_TILE(gemm_afp4wfp4_256x256_packed, Fp4Largest<true>)
MX_TILE(gemm_afp4wfp4_256x256, Fp4Largest<false>)
MX_TILE(gemm_afp4wfp4_256x128_packed, Fp4Large<true>)
MX_TILE(gemm_afp4wfp4_256x128, Fp4Large<false>)
MX_TILE(gemm_afp4wfp4_128x128_packed, Fp4Square<true>)
MX_TILE(gemm_afp4wfp4_128x128, Fp4Square<false>)
MX_TILE(gemm_afp4wfp4_64x128_packed, Fp4Wide<true>)
MX_TILE(gemm_afp4wfp4_64x128, Fp4Wide<false>)
MX_TILE(gemm_afp4wfp4_64x64_packed, Small<Fp4, true>)
MX_TILE(gemm_afp4wfp4_64x64, Small<Fp4, false>)
MX_TILE(gemm_afp4wfp4_64x64_scalar, Scalar64x64<Fp4>)
MX_TILE(gemm_a8wfp4_128x128_packed, Fp8Large<true>)
MX_TILE(gemm_a8wfp4_128x128, Fp8Large<false>)
MX_TILE(gemm_a8wfp4_64x64_packed, Small<Fp8, true>)
MX_TILE(gemm_a8wfp4_64x64, Small<Fp8, false>)
MX_TILE(gemm_a8wfp4_64x64_scalar, Scalar64x64<Fp8>)
