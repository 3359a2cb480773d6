// hk/amd/row_broadcast.h: a lane's numbers for all lanes of its row of 16, of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

// Of a type that is a template argument, since the builtin takes that of its operands.
template <int kLane, class Bits>
HK_FN Bits row_newbcast(Bits v) {
    return __builtin_amdgcn_update_dpp(Bits(0), v, 0x150 + kLane, 0xf, 0xf, true);
}

}  // namespace detail

/// What lane `kLane` of each row of 16 lanes has, in all lanes of that row: one instruction (row_newbcast). All lanes take part.
template <int kLane>
HK_FN Vec<float, 2> row_broadcast(Vec<float, 2> v) {
    static_assert(0 <= kLane && kLane < 16);
    return __builtin_bit_cast(Vec<float, 2>, detail::row_newbcast<kLane>(__builtin_bit_cast(u64, v)));
}

}  // namespace hk
