// a16w8_quant_decode.hip: decode GEMM of 16-bit floats, quantized on the fly, by int8 or the target's fp8; see
// gemm/operands/i8_fp8.h.
#include <hk/entry.h>

#include <gemm/operands/i8_fp8.h>

namespace {
using gemm::decode_group_gemm;
using gemm::kDecodeWaves;
using Params = gemm::MixedParams;
template <class T, class Q>
using Kind = gemm::QuantByteByByte<T, Q>;
}  // namespace

// Entry points of one pair of dtypes. Arguments: M and N tiles, waves that share K, times 128 columns per step.
#define A16W8_QUANT_DECODE(T, code, Q)                                   \
    HK_ENTRY(gemm_##T##_to_w##code##_16x32, kDecodeWaves *hk::kWaveSize, \
             decode_group_gemm<Kind<hk::T, Q>, 1, 2, kDecodeWaves, 1>)   \
    HK_ENTRY(gemm_##T##_to_w##code##_32x32, kDecodeWaves *hk::kWaveSize, \
             decode_group_gemm<Kind<hk::T, Q>, 2, 2, kDecodeWaves, 1>)

A16W8_QUANT_DECODE(bf16, i8, hk::I8)
A16W8_QUANT_DECODE(f16, i8, hk::I8)
A16W8_QUANT_DECODE(bf16, fp8, hk::Fp8)
A16W8_QUANT_DECODE(f16, fp8, hk::Fp8)
