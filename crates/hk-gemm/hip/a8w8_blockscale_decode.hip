// a8w8_blockscale_decode.hip: decode GEMM of int8 or fp8 with block scales; see gemm/operands/i8_fp8.h.
#include <hk/entry.h>

#include <gemm/operands/i8_fp8.h>

namespace {
using gemm::decode_blockscale_gemm;
using gemm::kDecodeWaves;
using gemm::kLongStepBytes;
using Params = gemm::BlockParams;
}  // namespace

// Entry points of one dtype. Arguments: M and N tiles, waves that share K, bytes of K per step.
#define A8W8_BLOCKSCALE(name, T)                                            \
    HK_ENTRY(gemm_##name##_block_16x16, kDecodeWaves *hk::kWaveSize,        \
             decode_blockscale_gemm<T, 1, 1, kDecodeWaves, kLongStepBytes>) \
    HK_ENTRY(gemm_##name##_block_16x32, kDecodeWaves *hk::kWaveSize,        \
             decode_blockscale_gemm<T, 1, 2, kDecodeWaves, kLongStepBytes>) \
    HK_ENTRY(gemm_##name##_block_32x32, kDecodeWaves *hk::kWaveSize,        \
             decode_blockscale_gemm<T, 2, 2, kDecodeWaves, 128>)            \
    HK_ENTRY(gemm_##name##_block_64x32, 4 * hk::kWaveSize, decode_blockscale_gemm<T, 4, 2, 4, 128>)

A8W8_BLOCKSCALE(i8, hk::I8)
A8W8_BLOCKSCALE(fp8, hk::Fp8)
