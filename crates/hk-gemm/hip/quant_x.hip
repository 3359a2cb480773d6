// quant_x.hip: GEMM of bf16 or f16, LDS tiles, and the MX quantization of its activations in one launch; see quant_x.h.
#include <hk/entry.h>

#include "quant_x.h"

namespace {
using Params = gemm::QuantXParams;
using gemm::B16Tiles;
using gemm::quant_x_gemm;
}  // namespace

// Entry points of one dtype, tiles as in a16w16.hip.
#define QUANT_X(T, Tile, end) \
    HK_ENTRY(gemm_##T##_##end, B16Tiles<hk::T>::Tile::kThreads, quant_x_gemm<hk::T, B16Tiles<hk::T>::Tile>)
#define TILES(T)                          \
    QUANT_X(T, T256x256, 256x256_quant_x) \
    QUANT_X(T, T128x128, 128x128_quant_x) \
    QUANT_X(T, T64x64, 64x64_quant_x)     \
    QUANT_X(T, Scalar64x64, 64x64_quant_x_scalar)

TILES(bf16)
TILES(f16)
