// hk/amd/fence.h: fences of AMD targets.
#pragma once

#include <hk/arch.h>

namespace hk {

HK_FN void release_to_device() { __scoped_atomic_thread_fence(__ATOMIC_RELEASE, __MEMORY_SCOPE_DEVICE); }
HK_FN void acquire_from_device() { __scoped_atomic_thread_fence(__ATOMIC_ACQUIRE, __MEMORY_SCOPE_DEVICE); }

}  // namespace hk
