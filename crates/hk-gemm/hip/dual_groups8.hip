// dual_groups8.hip: fp8 with scales of groups of K of less than 128, and 16-bit floats, two products in one launch, by tiles; see
// dual.h and groups.h.
#include <hk/entry.h>

#include "dual.h"
#include "groups.h"

namespace {
using gemm::dual_gemm;
using gemm::HalfTiles;
using Params = gemm::DualParams<gemm::BlockParams>;
using hk::Access;

// As in groups8.hip.
using T64x64 = gemm::BlockTile<gemm::GroupTile<hk::Fp8, Access::Vectors>>;
using Elements = gemm::BlockTile<gemm::GroupTile<hk::Fp8, Access::Elements>>;
}  // namespace

// Entry points with one type of floats.
#define DUAL_GROUPS8(T)                                                                                       \
    HK_ENTRY(gemm_fp8_group_and_##T##_64x64, T64x64::kThreads, dual_gemm<T64x64, HalfTiles<hk::T>::T64x64>)   \
    HK_ENTRY(gemm_fp8_group_and_##T##_64x64_elements, Elements::kThreads, dual_gemm<Elements, HalfTiles<hk::T>::Elements>)

DUAL_GROUPS8(bf16)
DUAL_GROUPS8(f16)
