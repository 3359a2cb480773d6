// dual_fp8_groupscale.hip: a GEMM of fp8 with scales for groups of fewer than 128 columns and a GEMM of 16-bit floats in one
// launch, LDS tiles; see gemm/gemm_pair.h and gemm/operands/i8_fp8_group.h.
#include <hk/entry.h>

#include <gemm/gemm_pair.h>
#include <gemm/operands/i8_fp8_group.h>

namespace {
using gemm::B16Tiles;
using gemm::dual_gemm;
using Params = gemm::DualParams<gemm::BlockParams>;
using hk::Access;

// As in a8w8_groupscale.hip.
using T64x64 = gemm::BlockScaleTile<gemm::GroupTile<hk::Fp8, Access::Vectorized>>;
using Scalar64x64 = gemm::BlockScaleTile<gemm::GroupTile<hk::Fp8, Access::Scalar>>;
}  // namespace

// Entry points of one dtype of 16-bit floats.
#define DUAL_FP8_GROUPSCALE(T)                                                                             \
    HK_ENTRY(gemm_fp8_group_and_##T##_64x64, T64x64::kThreads, dual_gemm<T64x64, B16Tiles<hk::T>::T64x64>) \
    HK_ENTRY(gemm_fp8_group_and_##T##_64x64_scalar, Scalar64x64::kThreads,                                 \
             dual_gemm<Scalar64x64, B16Tiles<hk::T>::Scalar64x64>)

DUAL_FP8_GROUPSCALE(bf16)
DUAL_FP8_GROUPSCALE(f16)
