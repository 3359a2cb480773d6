// hk/nvidia/fence.h: fences of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>

namespace hk {

// clang 22 gives every fence the scope of the system, which a wave waits about twice as long for.
HK_FN void release_to_device() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }
HK_FN void acquire_from_device() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }

}  // namespace hk
