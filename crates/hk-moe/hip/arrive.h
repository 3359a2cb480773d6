// arrive.h: blocks whose last one goes on with what all have written.
//   Each block has a flag, and sets it to a number that no other launch has. The block that then finds all flags set goes on. Two that
//   arrive together may both do: what they write is the same. Flags need no initial value, and are zero afterwards, so that a captured
//   graph can be launched again.
#pragma once

#include <hk/block.h>
#include <hk/global.h>
#include <hk/wave.h>

namespace route {

/// Whether all `blocks` blocks have arrived, this one, `index`, included. What they have written before is visible then. At least one
/// of them gets true.
HK_FN bool all_arrived(hk::GlobalPtr<hk::u64> flags, hk::u32 index, hk::u32 blocks, hk::u64 mark) {
    __shared__ hk::u32 all;
    __scoped_atomic_thread_fence(__ATOMIC_RELEASE, __MEMORY_SCOPE_DEVICE);
    hk::block_barrier();
    if (hk::wave_id() == 0) {
        // In one order for all blocks: of two, one sees the other's flag.
        if (hk::lane_id() == 0)
            __scoped_atomic_exchange_n(flags + index, mark, __ATOMIC_SEQ_CST, __MEMORY_SCOPE_DEVICE);
        hk::wave_barrier();
        bool here = true;
        for (hk::u32 i = hk::lane_id(); i < blocks; i += hk::kWaveSize) {
            here &= __scoped_atomic_load_n(flags + i, __ATOMIC_SEQ_CST, __MEMORY_SCOPE_DEVICE) == mark;
        }
        const bool found = hk::ballot(!here) == 0;
        if (hk::lane_id() == 0) all = found;
    }
    hk::block_barrier();
    if (all == 0) return false;
    __scoped_atomic_thread_fence(__ATOMIC_ACQUIRE, __MEMORY_SCOPE_DEVICE);
    return true;
}

/// After `all_arrived`.
HK_FN void clear_flags(hk::GlobalPtr<hk::u64> flags, hk::u32 blocks) {
    if (hk::wave_id() != 0) return;
    for (hk::u32 i = hk::lane_id(); i < blocks; i += hk::kWaveSize) {
        __scoped_atomic_store_n(flags + i, 0, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    }
}

}  // namespace route
