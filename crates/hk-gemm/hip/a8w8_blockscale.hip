// a8w8_blockscale.hip: GEMM of int8 or fp8 with block scales, LDS tiles; see gemm/operands/i8_fp8.h.
#include <hk/entry.h>

#include <gemm/operands/i8_fp8_streamed.h>

namespace {
using gemm::blockscale_gemm;
using Params = gemm::BlockParams;
using hk::Access;

template <class T>
using Tile256x128 = gemm::Tile<T, Access::Vectorized, 256, 128, 4, 2, 5, 2>;
// As many threads on all targets.
template <class T>
using Tile128x128 =
    gemm::StreamedOr<gemm::Tile<T, Access::Vectorized, 128, 128, 2, 2 * hk::kRowsPerLane, 5, 2>, T, 128>;
template <class T>
using Tile96x128 = gemm::StreamedOr<gemm::Tile<T, Access::Vectorized, 96, 128, 2, 2, 5, 2>, T, 96>;
template <class T>
using Tile64x128 = gemm::Tile<T, Access::Vectorized, 64, 128, 2, 2, 5, 2>;
template <class T>
using Tile64x64 = gemm::Tile<T, Access::Vectorized, 64, 64, 2, 2, 5, 2>;
template <class T>
using Scalar64x64 = gemm::Tile<T, Access::Scalar, 64, 64, 2, 2, 5>;
}  // namespace

#define A8W8_BLOCKSCALE(name, T)                                                                     \
    HK_ENTRY(gemm_##name##_block_256x128, Tile256x128<T>::kThreads, blockscale_gemm<Tile256x128<T>>) \
    HK_ENTRY(gemm_##name##_block_128x128, Tile128x128<T>::kThreads, blockscale_gemm<Tile128x128<T>>) \
    HK_ENTRY(gemm_##name##_block_96x128, Tile96x128<T>::kThreads, blockscale_gemm<Tile96x128<T>>)    \
    HK_ENTRY(gemm_##name##_block_64x128, Tile64x128<T>::kThreads, blockscale_gemm<Tile64x128<T>>)    \
    HK_ENTRY(gemm_##name##_block_64x64, Tile64x64<T>::kThreads, blockscale_gemm<Tile64x64<T>>)       \
    HK_ENTRY(gemm_##name##_block_64x64_scalar, Scalar64x64<T>::kThreads, blockscale_gemm<Scalar64x64<T>>)

A8W8_BLOCKSCALE(i8, hk::I8)
A8W8_BLOCKSCALE(fp8, hk::Fp8)
