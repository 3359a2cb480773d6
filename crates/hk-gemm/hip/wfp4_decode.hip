// wfp4_decode.hip: decode GEMM of mxfp4, fp8 or 16-bit floats by mxfp4; see gemm/operands/mxfp4.h.
#include <hk/entry.h>

#include <gemm/operands/mxfp4.h>

namespace {
using gemm::decode_mx_gemm;
using gemm::kDecodeWaves;
using Params = gemm::MixedParams;
}  // namespace

// Entry points of one kind of operands. Arguments: M and N tiles, waves that share K, times kMxCols columns per step.
#define WFP4_DECODE(name, Kind, count)                                                                          \
    HK_ENTRY(gemm_##name##_16x32, kDecodeWaves *hk::kWaveSize, decode_mx_gemm<Kind, 1, 2, kDecodeWaves, count>) \
    HK_ENTRY(gemm_##name##_32x32, kDecodeWaves *hk::kWaveSize, decode_mx_gemm<Kind, 2, 2, kDecodeWaves, count>) \
    HK_ENTRY(gemm_##name##_64x32, 4 * hk::kWaveSize, decode_mx_gemm<Kind, 4, 2, 4, (count + 1) / 2>)

WFP4_DECODE(afp4wfp4, gemm::Fp4ByFp4, 2 / hk::kRowsPerLane)
WFP4_DECODE(a8wfp4, gemm::Fp8ByFp4, 2 / hk::kRowsPerLane)
WFP4_DECODE(bf16_wfp4, gemm::B16ByFp4<hk::bf16>, 1)
WFP4_DECODE(f16_wfp4, gemm::B16ByFp4<hk::f16>, 1)
