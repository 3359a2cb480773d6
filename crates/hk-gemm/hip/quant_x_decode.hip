// quant_x_decode.hip: decode GEMM of bf16 or f16 and the MX quantization of its activations in one launch; see quant_x.h.
#include <hk/entry.h>

#include "quant_x.h"

namespace {
using Params = gemm::QuantXParams;
using gemm::B16Tiles;
using gemm::quant_x_gemm;
}  // namespace

// Entry points of one dtype, tiles as in a16w16_decode.hip.
#define QUANT_X(T, Tile, end) \
    HK_ENTRY(gemm_##T##_##end, B16Tiles<hk::T>::Tile::kThreads, quant_x_gemm<hk::T, B16Tiles<hk::T>::Tile>)
#define TILES(T)                      \
    QUANT_X(T, S16x16, 16x16_quant_x) \
    QUANT_X(T, S16x32, 16x32_quant_x) \
    QUANT_X(T, S32x32, 32x32_quant_x) \
    QUANT_X(T, S64x32, 64x32_quant_x)

TILES(bf16)
TILES(f16)
