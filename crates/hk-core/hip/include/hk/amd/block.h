// hk/amd/block.h: LDS and barriers of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// The block's LDS, for a kernel that may need more than the 48 KiB of static shared memory of NVIDIA GPUs. One call per kernel.
template <class T>
HK_FN T &block_lds() {
    __shared__ T lds;
    return lds;
}

/// Barrier of all waves of the block. LDS writes before it are visible after it.
HK_FN void block_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

/// Atomic add to LDS. No lane of the block reads the value before the next barrier.
HK_FN void lds_atomic_add(u64 &cell, u64 value) {
    const auto add = [](auto *at, auto v) {
        return __scoped_atomic_fetch_add(at, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    };
    add(&cell, value);
}

/// A lane's cursor for appending dwords to a list in LDS.
class Appender {
    u32 *next_;

  public:
    HK_FN Appender(u32 *first, u32 place) : next_(first + place) {}

    /// Appends `v` unless `mine` is 0.
    HK_FN void add(u32 mine, u32 v) {
        if (mine != 0) *next_++ = v;
    }
};

}  // namespace hk
