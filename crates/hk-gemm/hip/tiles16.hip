// tiles16.hip: products of bf16 and f16 by tiles; see tiles.h.
#include <hk/entry.h>

#include "tiles.h"

namespace {
using gemm::Params;
using gemm::tile_gemm;
using hk::Access;

template <class T>
using Tile256x256 = gemm::Tile<T, Access::Vectors, 256, 256, 2, 4, 5>;
template <class T>
using Tile128x128 = gemm::Tile<T, Access::Vectors, 128, 128, 2, 2, 5>;
template <class T>
using Tile64x64 = gemm::Tile<T, Access::Vectors, 64, 64, 2, 2, 5>;
template <class T>
using Elements = gemm::Tile<T, Access::Elements, 64, 64, 2, 2, 5>;
}  // namespace

// Entry points of one type, as in `TILES` in src/config.rs.
#define TILES16(T)                                                                                                   \
    HK_ENTRY(gemm_##T##_256x256, Tile256x256<hk::T>::kThreads, tile_gemm<Tile256x256<hk::T>, false>)                 \
    HK_ENTRY(gemm_##T##_128x128, Tile128x128<hk::T>::kThreads, tile_gemm<Tile128x128<hk::T>, false>)                 \
    HK_ENTRY(gemm_##T##_64x64, Tile64x64<hk::T>::kThreads, tile_gemm<Tile64x64<hk::T>, false>)                       \
    HK_ENTRY(gemm_##T##_64x64_elements, Elements<hk::T>::kThreads, tile_gemm<Elements<hk::T>, false>)                \
    HK_ENTRY(gemm_##T##_256x256_gated, Tile256x256<hk::T>::kThreads, tile_gemm<Tile256x256<hk::T>, true>)            \
    HK_ENTRY(gemm_##T##_128x128_gated, Tile128x128<hk::T>::kThreads, tile_gemm<Tile128x128<hk::T>, true>)            \
    HK_ENTRY(gemm_##T##_64x64_gated, Tile64x64<hk::T>::kThreads, tile_gemm<Tile64x64<hk::T>, true>)                  \
    HK_ENTRY(gemm_##T##_64x64_gated_elements, Elements<hk::T>::kThreads, tile_gemm<Elements<hk::T>, true>)

TILES16(bf16)
TILES16(f16)
