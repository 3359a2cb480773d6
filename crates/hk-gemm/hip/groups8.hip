// groups8.hip: products of int8 and fp8 with scales of groups of K of less than 128; see groups.h.
#include <hk/entry.h>

#include "groups.h"

namespace {
using gemm::block_gemm;
using gemm::GroupTile;
using hk::Access;

template <class E>
using Vectors = GroupTile<E, Access::Vectors>;
template <class E>
using Elements = GroupTile<E, Access::Elements>;
using Params = gemm::BlockParams;
}  // namespace

#define GROUPS(name, T)                                                                  \
    HK_ENTRY(gemm_##name##_group_64x64, Vectors<T>::kThreads, block_gemm<Vectors<T>>)    \
    HK_ENTRY(gemm_##name##_group_64x64_elements, Elements<T>::kThreads, block_gemm<Elements<T>>)

GROUPS(i8, hk::I8)
GROUPS(fp8, hk::Fp8)
