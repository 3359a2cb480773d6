// mx8.hip: products of mxfp8, of the fp8 that the target has; see mx.h, and mixed.h for few rows.
#include <hk/entry.h>

#include "mixed.h"
#include "mx.h"

namespace {
using gemm::mx_gemm;
using gemm::MxFp8Sums;
using gemm::MxFp8Tile;
using gemm::kSharing;
using gemm::skinny_mx_gemm;
using hk::Access;
using Kind = gemm::MxFp8ByMxFp8;
using Params = gemm::MixedParams;

template <bool kWords>
using Large = MxFp8Tile<Access::Vectors, 256, 128, 4, 2, kWords>;
template <bool kWords>
using Small = MxFp8Tile<Access::Vectors, 64, 64, 2, 2, kWords>;
using Elements = MxFp8Tile<Access::Elements, 64, 64, 2, 2, false>;
}  // namespace

// `_words`: the scales of 128 columns are words.
#define MX_TILE(name, ...) HK_ENTRY(name, (__VA_ARGS__::kThreads), (mx_gemm<__VA_ARGS__, MxFp8Sums>))

MX_TILE(gemm_afp8wfp8_256x128_words, Large<true>)
MX_TILE(gemm_afp8wfp8_256x128, Large<false>)
MX_TILE(gemm_afp8wfp8_64x64_words, Small<true>)
MX_TILE(gemm_afp8wfp8_64x64, Small<false>)
MX_TILE(gemm_afp8wfp8_64x64_elements, Elements)

// Tiles of M and N, waves that share K, times kMxCols columns in a stretch.
HK_ENTRY(gemm_afp8wfp8_16x32, kSharing * hk::kWaveSize, skinny_mx_gemm<Kind, 1, 2, kSharing, 2 / hk::kLaneRows>)
HK_ENTRY(gemm_afp8wfp8_32x32, kSharing * hk::kWaveSize, skinny_mx_gemm<Kind, 2, 2, kSharing, 1>)
HK_ENTRY(gemm_afp8wfp8_64x32, 4 * hk::kWaveSize, skinny_mx_gemm<Kind, 4, 2, 4, 1>)
