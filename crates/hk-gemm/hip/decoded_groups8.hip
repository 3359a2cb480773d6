// decoded_groups8.hip: products of 16-bit floats by int8 and by the fp8 that the target has, with scales of groups of K of less than
// 128; see groups.h.
#include <hk/entry.h>

#include "groups.h"

namespace {
using gemm::decoded_gemm;
using gemm::DecodedGroupTile;
using Params = gemm::MixedParams;
using hk::Access;

template <class T, class Code>
using Vectors = DecodedGroupTile<T, Code, Access::Vectors>;
template <class T, class Code>
using Elements = DecodedGroupTile<T, Code, Access::Elements>;
}  // namespace

#define GROUPS(T, name, Code)                                                                                            \
    HK_ENTRY(gemm_##T##_##name##_group_64x64, (Vectors<hk::T, Code>::kThreads), (decoded_gemm<Vectors<hk::T, Code>>))    \
    HK_ENTRY(gemm_##T##_##name##_group_64x64_elements, (Elements<hk::T, Code>::kThreads), (decoded_gemm<Elements<hk::T, Code>>))

GROUPS(bf16, wi8, hk::I8)
GROUPS(f16, wi8, hk::I8)
GROUPS(bf16, wfp8, hk::Fp8)
GROUPS(f16, wfp8, hk::Fp8)
