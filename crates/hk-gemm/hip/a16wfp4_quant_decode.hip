// a16wfp4_quant_decode.hip: decode GEMM of 16-bit floats, quantized on the fly to mxfp4, by mxfp4; see gemm/operands/mxfp4.h.
#include <hk/entry.h>

#include <gemm/operands/mxfp4.h>

namespace {
using gemm::decode_mx_gemm;
using gemm::kDecodeWaves;
using Params = gemm::MixedParams;
}  // namespace

// Entry points of one dtype of a.
#define A16WFP4_QUANT_DECODE(T)                                                 \
    HK_ENTRY(gemm_##T##_to_fp4_wfp4_16x32, kDecodeWaves *hk::kWaveSize,         \
             decode_mx_gemm<gemm::QuantFp4ByFp4<hk::T>, 1, 2, kDecodeWaves, 1>) \
    HK_ENTRY(gemm_##T##_to_fp4_wfp4_32x32, kDecodeWaves *hk::kWaveSize,         \
             decode_mx_gemm<gemm::QuantFp4ByFp4<hk::T>, 2, 2, kDecodeWaves, 1>)

A16WFP4_QUANT_DECODE(bf16)
A16WFP4_QUANT_DECODE(f16)
