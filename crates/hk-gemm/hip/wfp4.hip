// wfp4.hip: GEMM of mxfp4 or fp8 by mxfp4, LDS tiles; see gemm/operands/mxfp4.h. a16wfp4.hip has the tiles for 16-bit floats.
#include <hk/entry.h>

#include <gemm/operands/mxfp4.h>

namespace {
using gemm::mx_gemm;
using Params = gemm::MixedParams;
using hk::Access;

using hk::Fp4;
using hk::Fp8;

template <int kM, int kN, int kWavesM, int kWavesN, bool kPackedScales, bool kShuffledScales = false>
using Fp4Tile = gemm::MxTile<Fp4, Access::Vectorized, kM, kN, kWavesM, kWavesN, 5, kPackedScales, kShuffledScales>;
template <bool kPackedScales>
using Fp8Large = gemm::MxTile<Fp8, Access::Vectorized, 128, 128, 2, 4, 5, kPackedScales>;
template <bool kPackedScales>
using Fp8Small = gemm::MxTile<Fp8, Access::Vectorized, 64, 64, 2, 2, 5, kPackedScales>;
template <class A>
using Scalar64x64 = gemm::MxTile<A, Access::Scalar, 64, 64, 2, 2, 5, false>;
// Of 256 x 256 four waves have registers for two halves of a stage; where stages are shorter, accumulators take them.
constexpr int kWavesOfLargest = hk::kHasWideDma ? 2 : 4;
}  // namespace

// `_packed`: the scales of 128 columns are 32-bit loads. `_shuffled`: scales are in the pre-shuffled order.
#define MX_TILE(name, ...) HK_ENTRY(name, (__VA_ARGS__::kThreads), (mx_gemm<__VA_ARGS__, gemm::MxAcc>))
#define FP4_TILE(size, ...)                                            \
    MX_TILE(gemm_afp4wfp4_##size##_packed, Fp4Tile<__VA_ARGS__, true>) \
    MX_TILE(gemm_afp4wfp4_##size, Fp4Tile<__VA_ARGS__, false>)
#define FP4_SHUFFLED(size, ...) MX_TILE(gemm_afp4wfp4_##size##_shuffled, Fp4Tile<__VA_ARGS__, false, true>)

FP4_TILE(256x256, 256, 256, 2, 4)
FP4_SHUFFLED(256x256, 256, 256, 2, kWavesOfLargest)
FP4_TILE(160x256, 160, 256, 1, 4)
FP4_SHUFFLED(160x256, 160, 256, 1, 4)
FP4_TILE(96x256, 96, 256, 1, 4)
FP4_SHUFFLED(96x256, 96, 256, 1, 4)
FP4_TILE(256x128, 256, 128, 4, 2)
FP4_SHUFFLED(256x128, 256, 128, 4, 2)
FP4_TILE(128x128, 128, 128, 2, 2)
FP4_SHUFFLED(128x128, 128, 128, 2, 2)
FP4_TILE(64x128, 64, 128, 2, 2)
FP4_SHUFFLED(64x128, 64, 128, 2, 2)
FP4_TILE(64x64, 64, 64, 2, 2)
FP4_SHUFFLED(64x64, 64, 64, 2, 2)
MX_TILE(gemm_afp4wfp4_64x64_scalar, Scalar64x64<Fp4>)
MX_TILE(gemm_a8wfp4_128x128_packed, Fp8Large<true>)
MX_TILE(gemm_a8wfp4_128x128, Fp8Large<false>)
MX_TILE(gemm_a8wfp4_64x64_packed, Fp8Small<true>)
MX_TILE(gemm_a8wfp4_64x64, Fp8Small<false>)
MX_TILE(gemm_a8wfp4_64x64_scalar, Scalar64x64<Fp8>)
