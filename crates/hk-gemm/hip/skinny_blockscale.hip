// skinny_blockscale.hip: products of few rows of int8 and fp8 with scales of blocks; see skinny.h.
#include <hk/entry.h>

#include "skinny.h"

namespace {
using gemm::kLongStretch;
using gemm::kSharing;
using gemm::skinny_block_gemm;
using Params = gemm::BlockParams;
}  // namespace

// Entry points of one type, as in `SKINNY8`.
#define BLOCKSCALE(name, T)                                                                                           \
    HK_ENTRY(gemm_##name##_block_16x16, kSharing * hk::kWaveSize, skinny_block_gemm<T, 1, 1, kSharing, kLongStretch>) \
    HK_ENTRY(gemm_##name##_block_16x32, kSharing * hk::kWaveSize, skinny_block_gemm<T, 1, 2, kSharing, kLongStretch>) \
    HK_ENTRY(gemm_##name##_block_32x32, kSharing * hk::kWaveSize, skinny_block_gemm<T, 2, 2, kSharing, 128>)          \
    HK_ENTRY(gemm_##name##_block_64x32, 4 * hk::kWaveSize, skinny_block_gemm<T, 4, 2, 4, 128>)

BLOCKSCALE(i8, hk::I8)
BLOCKSCALE(fp8, hk::Fp8)
