// afp8wfp8.hip: GEMM of mxfp8, LDS tiles and decode tiles; see gemm/operands/mxfp8.h.
#include <hk/entry.h>

#include <gemm/operands/mxfp8.h>

namespace {
using gemm::decode_mx_gemm;
using gemm::kDecodeWaves;
using gemm::mx_gemm;
using gemm::MxFp8Acc;
using gemm::MxFp8Tile;
using hk::Access;
using Kind = gemm::MxFp8ByMxFp8;
using Params = gemm::MixedParams;

template <bool kPackedScales>
using Large = MxFp8Tile<Access::Vectorized, 256, 128, 4, 2, kPackedScales>;
template <bool kPackedScales>
using Small = MxFp8Tile<Access::Vectorized, 64, 64, 2, 2, kPackedScales>;
using Scalar64x64 = MxFp8Tile<Access::Scalar, 64, 64, 2, 2, false>;
}  // namespace

// `_packed`: the scales of 128 columns are 32-bit loads.
#define MX_TILE(name, ...) HK_ENTRY(name, (__VA_ARGS__::kThreads), (mx_gemm<__VA_ARGS__, MxFp8Acc>))

MX_TILE(gemm_afp8wfp8_256x128_packed, Large<true>)
MX_TILE(gemm_afp8wfp8_256x128, Large<false>)
MX_TILE(gemm_afp8wfp8_64x64_packed, Small<true>)
MX_TILE(gemm_afp8wfp8_64x64, Small<false>)
MX_TILE(gemm_afp8wfp8_64x64_scalar, Scalar64x64)

// Decode tiles. Arguments: M and N tiles, waves that share K, times kMxCols columns per step.
HK_ENTRY(gemm_afp8wfp8_16x32, kDecodeWaves *hk::kWaveSize,
         decode_mx_gemm<Kind, 1, 2, kDecodeWaves, 2 / hk::kRowsPerLane>)
HK_ENTRY(gemm_afp8wfp8_32x32, kDecodeWaves *hk::kWaveSize, decode_mx_gemm<Kind, 2, 2, kDecodeWaves, 1>)
HK_ENTRY(gemm_afp8wfp8_64x32, 4 * hk::kWaveSize, decode_mx_gemm<Kind, 4, 2, 4, 1>)
