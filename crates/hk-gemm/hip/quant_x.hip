// quant_x.hip: products of bf16 and f16 by tiles, beside the quantization of x; see quant_x.h.
#include <hk/entry.h>

#include "quant_x.h"

namespace {
using Params = gemm::QuantXParams;
using gemm::HalfTiles;
using gemm::quant_x_gemm;
}  // namespace

// Entry points of one type, as in `TILES16`.
#define QUANT_X(T, Tile, end) \
    HK_ENTRY(gemm_##T##_##end, HalfTiles<hk::T>::Tile::kThreads, quant_x_gemm<hk::T, HalfTiles<hk::T>::Tile>)
#define TILES(T)                                 \
    QUANT_X(T, T256x256, 256x256_quant_x)        \
    QUANT_X(T, T128x128, 128x128_quant_x)        \
    QUANT_X(T, T64x64, 64x64_quant_x)            \
    QUANT_X(T, Elements, 64x64_quant_x_elements)

TILES(bf16)
TILES(f16)
