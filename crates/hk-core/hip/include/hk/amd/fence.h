// hk/amd/fence.h: fences of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>

namespace hk {

HK_FN void release_to_device() {
    __scoped_atomic_thread_fence(__ATOMIC_RELEASE, __MEMORY_SCOPE_DEVICE);
    // clang 22 leaves out the wait for buffer_wbl2 where it knows of no other access in flight (llvm/llvm-project#178316).
    drain_register_loads();
}
HK_FN void acquire_from_device() { __scoped_atomic_thread_fence(__ATOMIC_ACQUIRE, __MEMORY_SCOPE_DEVICE); }

}  // namespace hk
