// a8w8.hip: GEMM of int8 or the target's fp8, LDS tiles; see gemm/gemm.h.
#include <hk/entry.h>

#include <gemm/gemm.h>
#include <gemm/streamed.h>
#include <gemm/warpgroup.h>

namespace {
using gemm::Params;
using gemm::tile_gemm;
using hk::Access;

template <class T>
using Tile256x256 = gemm::Tile<T, Access::Vectorized, 256, 256, 2, 4, 5>;
template <class T>
using Tile128x256 = gemm::LargeTile<T, 128, 256, 2, 4, 5, true>;
template <class T>
using Tile128x128 = gemm::StreamedOr<gemm::LargeTile<T, 128, 128, 2, 2, 5, true>, T, 128>;
template <class T>
using Tile64x128 = gemm::LargeTile<T, 64, 128, 2, 2, 5, true>;
template <class T>
using Tile64x64 = gemm::LargeTile<T, 64, 64, 2, 2, 5, true>;
template <class T>
using Scalar64x64 = gemm::Tile<T, Access::Scalar, 64, 64, 2, 2, 5>;
}  // namespace

// Entry points of one dtype.
#define A8W8(name, T)                                                                           \
    HK_ENTRY(gemm_##name##_256x256, Tile256x256<T>::kThreads, tile_gemm<Tile256x256<T>, false>) \
    HK_ENTRY(gemm_##name##_128x256, Tile128x256<T>::kThreads, tile_gemm<Tile128x256<T>, false>) \
    HK_ENTRY(gemm_##name##_128x128, Tile128x128<T>::kThreads, tile_gemm<Tile128x128<T>, false>) \
    HK_ENTRY(gemm_##name##_64x128, Tile64x128<T>::kThreads, tile_gemm<Tile64x128<T>, false>)    \
    HK_ENTRY(gemm_##name##_64x64, Tile64x64<T>::kThreads, tile_gemm<Tile64x64<T>, false>)       \
    HK_ENTRY(gemm_##name##_64x64_scalar, Scalar64x64<T>::kThreads, tile_gemm<Scalar64x64<T>, false>)

A8W8(i8, hk::I8)
A8W8(fp8, hk::Fp8)
