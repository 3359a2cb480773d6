// a16w8_groupscale.hip: GEMM of 16-bit floats by int8 or the target's fp8, scales for groups of fewer than 128 columns; see
// gemm/operands/i8_fp8_group.h.
#include <hk/entry.h>

#include <gemm/operands/i8_fp8_group.h>

namespace {
using gemm::dequant_gemm;
using gemm::DequantGroupTile;
using Params = gemm::MixedParams;
using hk::Access;

template <class T, class Q>
using Vector64x64 = DequantGroupTile<T, Q, Access::Vectorized>;
template <class T, class Q>
using Scalar64x64 = DequantGroupTile<T, Q, Access::Scalar>;
}  // namespace

#define GROUPS(T, name, Q)                                                              \
    HK_ENTRY(gemm_##T##_##name##_group_64x64, (Vector64x64<hk::T, Q>::kThreads),        \
             (dequant_gemm<Vector64x64<hk::T, Q>>))                                     \
    HK_ENTRY(gemm_##T##_##name##_group_64x64_scalar, (Scalar64x64<hk::T, Q>::kThreads), \
             (dequant_gemm<Scalar64x64<hk::T, Q>>))

GROUPS(bf16, wi8, hk::I8)
GROUPS(f16, wi8, hk::I8)
GROUPS(bf16, wfp8, hk::Fp8)
GROUPS(f16, wfp8, hk::Fp8)
