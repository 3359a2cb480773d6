// blockscale.hip: products of int8 and fp8 with scales of blocks, by tiles; see blockscale.h.
#include <hk/entry.h>

#include "blockscale.h"

namespace {
using gemm::block_gemm;
using Params = gemm::BlockParams;
using hk::Access;

template <class T>
using Tile256x128 = gemm::Tile<T, Access::Vectors, 256, 128, 4, 2, 5, 2>;
template <class T>
using Tile64x64 = gemm::Tile<T, Access::Vectors, 64, 64, 2, 2, 5, 2>;
template <class T>
using Elements = gemm::Tile<T, Access::Elements, 64, 64, 2, 2, 5>;
}  // namespace

#define BLOCKSCALE(name, T)                                                                      \
    HK_ENTRY(gemm_##name##_block_256x128, Tile256x128<T>::kThreads, block_gemm<Tile256x128<T>>)  \
    HK_ENTRY(gemm_##name##_block_64x64, Tile64x64<T>::kThreads, block_gemm<Tile64x64<T>>)        \
    HK_ENTRY(gemm_##name##_block_64x64_elements, Elements<T>::kThreads, block_gemm<Elements<T>>)

BLOCKSCALE(i8, hk::I8)
BLOCKSCALE(fp8, hk::Fp8)
