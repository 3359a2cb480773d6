// fence.h: order of accesses to memory that other blocks see.
#pragma once

#include <hk/arch.h>

namespace hk {

/// Blocks of the device see what the thread has stored before what it stores from here on.
HK_FN void release_to_device() {
#if defined(HK_AMD)
    __scoped_atomic_thread_fence(__ATOMIC_RELEASE, __MEMORY_SCOPE_DEVICE);
#else
    // clang 22 gives every fence the scope of the system, which a wave waits about twice as long for.
    asm volatile("fence.acq_rel.gpu;" : : : "memory");
#endif
}

/// The thread sees, from here on, what blocks of the device have released before what it has read of them.
HK_FN void acquire_from_device() {
#if defined(HK_AMD)
    __scoped_atomic_thread_fence(__ATOMIC_ACQUIRE, __MEMORY_SCOPE_DEVICE);
#else
    asm volatile("fence.acq_rel.gpu;" : : : "memory");
#endif
}

}  // namespace hk
