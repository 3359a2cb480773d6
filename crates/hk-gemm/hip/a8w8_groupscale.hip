// a8w8_groupscale.hip: GEMM of int8 or fp8, scales for groups of fewer than 128 columns; see gemm/operands/i8_fp8_group.h.
#include <hk/entry.h>

#include <gemm/operands/i8_fp8_group.h>

namespace {
using gemm::blockscale_gemm;
using gemm::GroupTile;
using hk::Access;

template <class E>
using Vector64x64 = GroupTile<E, Access::Vectorized>;
template <class E>
using Scalar64x64 = GroupTile<E, Access::Scalar>;
using Params = gemm::BlockParams;
}  // namespace

#define GROUPS(name, T)                                                                            \
    HK_ENTRY(gemm_##name##_group_64x64, Vector64x64<T>::kThreads, blockscale_gemm<Vector64x64<T>>) \
    HK_ENTRY(gemm_##name##_group_64x64_scalar, Scalar64x64<T>::kThreads, blockscale_gemm<Scalar64x64<T>>)

GROUPS(i8, hk::I8)
GROUPS(fp8, hk::Fp8)
