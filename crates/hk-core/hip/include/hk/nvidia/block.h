// hk/nvidia/block.h: LDS and barriers of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// The block's LDS, for a kernel that may need more than the 48 KiB of static shared memory of NVIDIA GPUs. One call per kernel.
template <class T>
HK_FN T &block_lds() {
    // Records the size for the launch (hk-codeobj reads it).
    extern __shared__ Vec<u32, 4> dynamic_lds[];
    asm volatile(".pragma \"hk_lds %0\";" : : "n"(sizeof(T)));
    return *reinterpret_cast<T *>(dynamic_lds);
}

/// Barrier of all waves of the block. LDS writes before it are visible after it.
HK_FN void block_barrier() { __nvvm_barrier_sync(0); }

/// Atomic add to LDS. No lane of the block reads the value before the next barrier.
HK_FN void lds_atomic_add(u64 &cell, u64 value) {
    const auto add = [](auto *at, auto v) {
        return __scoped_atomic_fetch_add(at, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    };
    // Native atomic adds have 32 bits; 64 bits would be a compare-and-swap loop. The lane that makes a carry adds it.
    auto *const words = reinterpret_cast<u32 *>(&cell);
    const u32 low = u32(value);
    const u32 carry = add(words, low) > ~low ? 1 : 0;
    const u32 high = u32(value >> 32) + carry;
    if (high != 0) add(words + 1, high);
}

/// A lane's cursor for appending dwords to a list in LDS.
class Appender {
    u32 next_;

  public:
    HK_FN Appender(u32 *first, u32 place)
        : next_(u32(reinterpret_cast<u64>((__attribute__((address_space(3))) u32 *)first)) + place * 4) {}

    /// Appends `v` unless `mine` is 0.
    HK_FN void add(u32 mine, u32 v) {
        // The compiler would keep the address after each dword in a register of its own.
        asm volatile(
            "{\n\t.reg .pred mine;\n\tsetp.ne.u32 mine, %1, 0;\n\t@mine st.shared.u32 [%0], %2;\n\t"
            "@mine add.u32 %0, %0, 4;\n\t}"
            : "+r"(next_)
            : "r"(mine), "r"(v)
            : "memory");
    }
};

}  // namespace hk
