// a16w16_decode.hip: decode GEMM of bf16 or f16; see gemm/decode_gemm.h.
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

// Entry points of one dtype. Arguments: M and N tiles, waves that share K, bytes of K per step. Four waves per SIMD are two blocks of 16 x 32
// in a CU: left to itself the compiler takes two registers more than they leave the gated one.
#define A16W16_DECODE(T)                                                                               \
    HK_ENTRY(gemm_##T##_16x16, kDecodeWaves *hk::kWaveSize,                                            \
             decode_gemm<hk::T, 1, 1, kDecodeWaves, kLongStepBytes, false>)                            \
    HK_ENTRY(gemm_##T##_16x16_twice, kWideDecodeWaves *hk::kWaveSize,                                  \
             decode_gemm<hk::T, 1, 1, kWideDecodeWaves, kWideStepBytes, false>)                        \
    HK_ENTRY(gemm_##T##_16x32, kDecodeWaves *hk::kWaveSize,                                            \
             decode_gemm<hk::T, 1, 2, kDecodeWaves, kLongStepBytes, false>)                            \
    HK_ENTRY(gemm_##T##_32x32, kDecodeWaves *hk::kWaveSize,                                            \
             decode_gemm<hk::T, 2, 2, kDecodeWaves, kShortStepBytes, false>)                           \
    HK_ENTRY(gemm_##T##_64x32, 4 * hk::kWaveSize, decode_gemm<hk::T, 4, 2, 4, kShortStepBytes, false>) \
    HK_ENTRY_WAVES_PER_SIMD(gemm_##T##_16x32_gated, kDecodeWaves *hk::kWaveSize, 4, kDecodeWaves,      \
                            decode_gemm<hk::T, 1, 2, kDecodeWaves, kLongStepBytes, true>)              \
    HK_ENTRY(gemm_##T##_32x32_gated, kDecodeWaves *hk::kWaveSize,                                      \
             decode_gemm<hk::T, 2, 2, kDecodeWaves, kShortStepBytes, true>)                            \
    HK_ENTRY(gemm_##T##_64x32_gated, 4 * hk::kWaveSize, decode_gemm<hk::T, 4, 2, 4, kShortStepBytes, true>)

A16W16_DECODE(bf16)
A16W16_DECODE(f16)
