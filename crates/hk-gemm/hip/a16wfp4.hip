// a16wfp4.hip: GEMM of 16-bit floats by mxfp4, LDS tiles; see gemm/operands/mxfp4.h. Decode tiles are in wfp4_decode.hip.
#include <gemm/operands/mxfp4.h>
#include <hk/entry.h>

namespace {
using gemm::dequant_fp4_gemm;
using Params = gemm::MixedParams;
using hk::Access;

template <class T>
using Tile128x128 = gemm::DequantFp4Tile<T, Access::Vectorized, 128, 128, 2, 2>;
template <class T>
using Tile64x64 = gemm::DequantFp4Tile<T, Access::Vectorized, 64, 64, 2, 2>;
template <class T>
using Scalar64x64 = gemm::DequantFp4Tile<T, Access::Scalar, 64, 64, 2, 2>;
}  // namespace

#define A16WFP4(T)                                                                                        \
    HK_ENTRY(gemm_##T##_wfp4_128x128, Tile128x128<hk::T>::kThreads, dequant_fp4_gemm<Tile128x128<hk::T>>) \
    HK_ENTRY(gemm_##T##_wfp4_64x64, Tile64x64<hk::T>::kThreads, dequant_fp4_gemm<Tile64x64<hk::T>>)       \
    HK_ENTRY(gemm_##T##_wfp4_64x64_scalar, Scalar64x64<hk::T>::kThreads, dequant_fp4_gemm<Scalar64x64<hk::T>>)

A16WFP4(bf16)
A16WFP4(f16)
