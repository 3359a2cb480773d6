// a8w8_decode.hip: decode GEMM of int8 or the target's fp8; see gemm/decode_gemm.h.
#include <hk/entry.h>

#include <gemm/operands/plain.h>

namespace {
using gemm::decode_gemm;
using gemm::kDecodeWaves;
using gemm::kLongStepBytes;
using gemm::kShortStepBytes;
using gemm::kWideDecodeWaves;
using gemm::kWideStepBytes;
using gemm::Params;
}  // namespace

// Entry points of one dtype. Arguments: M and N tiles, waves that share K, bytes of K per step.
#define A8W8_DECODE(name, T)                                                \
    HK_ENTRY(gemm_##name##_16x16, kDecodeWaves *hk::kWaveSize,              \
             decode_gemm<T, 1, 1, kDecodeWaves, kLongStepBytes, false>)     \
    HK_ENTRY(gemm_##name##_16x16_twice, kWideDecodeWaves *hk::kWaveSize,    \
             decode_gemm<T, 1, 1, kWideDecodeWaves, kWideStepBytes, false>) \
    HK_ENTRY(gemm_##name##_16x32, kDecodeWaves *hk::kWaveSize,              \
             decode_gemm<T, 1, 2, kDecodeWaves, kLongStepBytes, false>)     \
    HK_ENTRY(gemm_##name##_32x32, kDecodeWaves *hk::kWaveSize,              \
             decode_gemm<T, 2, 2, kDecodeWaves, kShortStepBytes, false>)    \
    HK_ENTRY(gemm_##name##_64x32, 4 * hk::kWaveSize, decode_gemm<T, 4, 2, 4, kShortStepBytes, false>)

A8W8_DECODE(i8, hk::I8)
A8W8_DECODE(fp8, hk::Fp8)
