// ticket.h: the last of some blocks to arrive.
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/fence.h>
#include <hk/global.h>

namespace attention {

/// True for the last of `blocks` blocks that call it with this counter: that block sees what the others have written to global
/// memory before. Nobody waits. The counter is zero before the first block comes and after the last one. All threads call it; `last` is in
/// LDS.
HK_FN bool last_to_arrive(GlobalPtr<u32> counter, u32 blocks, u32 &last) {
    // Each wave's stores are visible to the device before the barrier, and so before the atomic operation.
    hk::release_to_device();
    hk::block_barrier();
    if (hk::thread_x() == 0) {
        const u32 before = __scoped_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
        last = before + 1 == blocks ? 1 : 0;
        if (last) __scoped_atomic_store_n(counter, 0u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    }
    hk::block_barrier();
    const bool is_last = last != 0;
    if (is_last) hk::acquire_from_device();
    return is_last;
}

}  // namespace attention
