// slots.h: the states of a slot.
#pragma once

#include "tokens.h"

namespace gdr::states {
/// The state of a head of a slot.
template <class S>
HK_FN Window state(const Prefill &p, u64 states, i64 slot_stride, i64 slot, u32 head) {
    const u32 size = p.k_dim * p.v_dim;
    return Window(reinterpret_cast<GlobalPtr<S>>(states) + slot * slot_stride + i64(head) * size,
                  size * u32(sizeof(S)));
}
}  // namespace gdr::states
