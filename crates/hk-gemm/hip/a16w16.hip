// a16w16.hip: GEMM of bf16 or f16, LDS tiles; see gemm/gemm.h, and gemm/bulk.h for those by bulk tensor copies, on sm_90a alone.
#include <hk/entry.h>

#include <gemm/bulk.h>
#include <gemm/gemm.h>
#include <gemm/streamed.h>
#include <gemm/warpgroup.h>

namespace {
using gemm::Params;
using gemm::tile_gemm;
using gemm::wide_tile_gemm;
using hk::Access;

template <class T>
using Tile256x256 = gemm::Tile<T, Access::Vectorized, 256, 256, 2, 4, 5>;
template <class T>
using Tile128x256 = gemm::LargeTile<T, 128, 256, 2, 4, 5>;
template <class T>
using Tile128x128 = gemm::StreamedOr<gemm::LargeTile<T, 128, 128, 2, 2, 5>, T, 128>;
template <class T>
using Tile64x128 = gemm::LargeTile<T, 64, 128, 2, 2, 5>;
template <class T>
using Tile64x64 = gemm::LargeTile<T, 64, 64, 2, 2, 5>;
template <class T>
using Scalar64x64 = gemm::Tile<T, Access::Scalar, 64, 64, 2, 2, 5>;
}  // namespace

// Entry points of one dtype.
#define A16W16(T)                                                                                         \
    HK_ENTRY(gemm_##T##_256x256, Tile256x256<hk::T>::kThreads, tile_gemm<Tile256x256<hk::T>, false>)      \
    HK_ENTRY(gemm_##T##_128x256, Tile128x256<hk::T>::kThreads, wide_tile_gemm<hk::T>)                     \
    HK_ENTRY(gemm_##T##_128x128, Tile128x128<hk::T>::kThreads, tile_gemm<Tile128x128<hk::T>, false>)      \
    HK_ENTRY(gemm_##T##_64x128, Tile64x128<hk::T>::kThreads, tile_gemm<Tile64x128<hk::T>, false>)         \
    HK_ENTRY(gemm_##T##_64x64, Tile64x64<hk::T>::kThreads, tile_gemm<Tile64x64<hk::T>, false>)            \
    HK_ENTRY(gemm_##T##_64x64_scalar, Scalar64x64<hk::T>::kThreads, tile_gemm<Scalar64x64<hk::T>, false>) \
    HK_ENTRY(gemm_##T##_256x256_gated, Tile256x256<hk::T>::kThreads, tile_gemm<Tile256x256<hk::T>, true>) \
    HK_ENTRY(gemm_##T##_128x256_gated, Tile128x256<hk::T>::kThreads, tile_gemm<Tile128x256<hk::T>, true>) \
    HK_ENTRY(gemm_##T##_128x128_gated, Tile128x128<hk::T>::kThreads, tile_gemm<Tile128x128<hk::T>, true>) \
    HK_ENTRY(gemm_##T##_64x64_gated, Tile64x64<hk::T>::kThreads, tile_gemm<Tile64x64<hk::T>, true>)       \
    HK_ENTRY(gemm_##T##_64x64_gated_scalar, Scalar64x64<hk::T>::kThreads, tile_gemm<Scalar64x64<hk::T>, true>)

A16W16(bf16)
A16W16(f16)

#if defined(HK_WARPGROUPS) || defined(HK_DESCRIBE)
#define A16W16_BULK(T)                                                                              \
    HK_ENTRY(gemm_##T##_64x64_bulk, 5 * hk::kWaveSize, gemm::bulk_gemm<hk::T, 64, 64>)              \
    HK_ENTRY(gemm_##T##_128x128_bulk, 9 * hk::kWaveSize, gemm::bulk_gemm_of_width<hk::T, 128, 128>) \
    HK_ENTRY(gemm_##T##_128x256_bulk, 9 * hk::kWaveSize, gemm::bulk_gemm_of_width<hk::T, 128, 256>)

namespace bulk {
using Params = gemm::BulkParams;
A16W16_BULK(bf16)
A16W16_BULK(f16)
}  // namespace bulk
#endif
