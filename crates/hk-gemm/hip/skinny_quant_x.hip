// skinny_quant_x.hip: products of few rows of bf16 and f16, beside the quantization of x; see quant_x.h.
#include <hk/entry.h>

#include "quant_x.h"

namespace {
using Params = gemm::QuantXParams;
using gemm::HalfTiles;
using gemm::quant_x_gemm;
}  // namespace

// Entry points of one type, as in `SKINNY16`.
#define QUANT_X(T, Tile, end) \
    HK_ENTRY(gemm_##T##_##end, HalfTiles<hk::T>::Tile::kThreads, quant_x_gemm<hk::T, HalfTiles<hk::T>::Tile>)
#define TILES(T)                      \
    QUANT_X(T, S16x16, 16x16_quant_x) \
    QUANT_X(T, S16x32, 16x32_quant_x) \
    QUANT_X(T, S32x32, 32x32_quant_x) \
    QUANT_X(T, S64x32, 64x32_quant_x)

TILES(bf16)
TILES(f16)
