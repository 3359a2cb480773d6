// arrive.h: blocks whose last one goes on with what all have written.
//   Each block has a flag, and sets it to a number that no other launch has. The block that then finds all flags set goes on. Two that
//   arrive together may both do: what they write is the same. Flags need no initial value, and are zero afterwards, so that a captured
//   graph can be launched again.
#pragma once

#include <hk/block.h>
#include <hk/fence.h>
#include <hk/global.h>
#include <hk/wave.h>

namespace hk {

/// Whether all `blocks` blocks have arrived, this one, `index`, included. What they have written before is visible then. At least one
/// of them gets true. `all` is in LDS, and free again behind a barrier.
HK_FN bool all_arrived(GlobalPtr<u64> flags, u32 index, u32 blocks, u64 mark, u32 &all) {
    release_to_device();
    block_barrier();
    if (wave_id() == 0) {
        // In one order for all blocks: of two, one sees the other's flag.
        if (lane_id() == 0) __scoped_atomic_exchange_n(flags + index, mark, __ATOMIC_SEQ_CST, __MEMORY_SCOPE_DEVICE);
        wave_barrier();
        bool here = true;
        for (u32 i = lane_id(); i < blocks; i += kWaveSize) {
            here &= __scoped_atomic_load_n(flags + i, __ATOMIC_SEQ_CST, __MEMORY_SCOPE_DEVICE) == mark;
        }
        const bool found = ballot(!here) == 0;
        if (lane_id() == 0) all = found;
    }
    block_barrier();
    if (all == 0) return false;
    acquire_from_device();
    return true;
}

/// The same, with LDS of its own.
HK_FN bool all_arrived(GlobalPtr<u64> flags, u32 index, u32 blocks, u64 mark) {
    __shared__ u32 all;
    return all_arrived(flags, index, blocks, mark, all);
}

/// After `all_arrived`.
HK_FN void clear_flags(GlobalPtr<u64> flags, u32 blocks) {
    if (wave_id() != 0) return;
    for (u32 i = lane_id(); i < blocks; i += kWaveSize) {
        __scoped_atomic_store_n(flags + i, 0, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    }
}

}  // namespace hk
