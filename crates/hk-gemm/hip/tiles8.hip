// tiles8.hip: products of int8 and of the fp8 that the target has by tiles; see tiles.h.
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
#define TILES8(name, T)                                                                                                   \
    HK_ENTRY(gemm_##name##_256x256, Tile256x256<T>::kThreads, tile_gemm<Tile256x256<T>, false>)                 \
    HK_ENTRY(gemm_##name##_128x128, Tile128x128<T>::kThreads, tile_gemm<Tile128x128<T>, false>)                 \
    HK_ENTRY(gemm_##name##_64x64, Tile64x64<T>::kThreads, tile_gemm<Tile64x64<T>, false>)                       \
    HK_ENTRY(gemm_##name##_64x64_elements, Elements<T>::kThreads, tile_gemm<Elements<T>, false>)

TILES8(i8, hk::I8)
TILES8(fp8, hk::Fp8)
