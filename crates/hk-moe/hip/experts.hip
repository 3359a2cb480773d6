// experts.hip: grouped GEMM of experts, 16-bit floats; see experts.h.
#include "experts.h"

#include <gemm/warpgroup.h>

namespace {
using experts::expert_decode_gemm;
using experts::expert_gemm;
using experts::Params;
using hk::Access;

template <class T>
using Tile256x256 = gemm::Tile<T, Access::Vectorized, 256, 256, 2, 4, 5>;
template <class T>
using Tile128x256 = gemm::LargeTile<T, 128, 256, 2, 4, 5>;
template <class T>
using Tile128x128 = gemm::LargeTile<T, 128, 128, 2, 2, 5>;
template <class T>
using Tile64x64 = gemm::LargeTile<T, 64, 64, 2, 2, 5>;
}  // namespace

// Entry points of one dtype, as in src/experts/table.rs.
#define EXPERTS(T)                                                                                 \
    HK_ENTRY(experts_##T##_256x256, Tile256x256<hk::T>::kThreads, expert_gemm<Tile256x256<hk::T>>) \
    HK_ENTRY(experts_##T##_128x256, Tile128x256<hk::T>::kThreads, expert_gemm<Tile128x256<hk::T>>) \
    HK_ENTRY(experts_##T##_128x128, Tile128x128<hk::T>::kThreads, expert_gemm<Tile128x128<hk::T>>) \
    HK_ENTRY(experts_##T##_64x64, Tile64x64<hk::T>::kThreads, expert_gemm<Tile64x64<hk::T>>)       \
    HK_ENTRY(experts_##T##_16x32, gemm::kDecodeWaves *hk::kWaveSize,                               \
             expert_decode_gemm<hk::T, 1, 2, gemm::kLongStepBytes>)

EXPERTS(bf16)
EXPERTS(f16)
