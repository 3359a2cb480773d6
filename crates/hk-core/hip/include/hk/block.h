// block.h: waves of a block talking to each other through LDS.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// The block's LDS, for a kernel that may need more of it than the 48 KiB that can be static on NVIDIA's GPUs; once in a kernel.
template <class T>
HK_FN T &block_lds() {
#if defined(HK_AMD)
    __shared__ T lds;
    return lds;
#else
    // The size, for who launches the kernel (hk-codeobj reads it).
    extern __shared__ Vec<u32, 4> dynamic_lds[];
    asm volatile(".pragma \"hk_lds %0\";" : : "n"(sizeof(T)));
    return *reinterpret_cast<T *>(dynamic_lds);
#endif
}

/// Waits for all waves of the block; LDS written before it is visible after it.
HK_FN void block_barrier() {
#if defined(HK_AMD)
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
    __nvvm_barrier_sync(0);
#endif
}

/// Adds to a number in LDS, as one operation among the lanes of the block. None of them reads it before the next barrier.
HK_FN void add_in_lds(u64 &cell, u64 value) {
    const auto add = [](auto *at, auto v) {
        return __scoped_atomic_fetch_add(at, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    };
#if defined(HK_AMD)
    add(&cell, value);
#else
    // There are atomic additions of words only; longer ones are loops that compare and swap. Each carry is added by the lane
    // that made it.
    auto *const words = reinterpret_cast<u32 *>(&cell);
    const u32 low = u32(value);
    const u32 carry = add(words, low) > ~low ? 1 : 0;
    const u32 high = u32(value >> 32) + carry;
    if (high != 0) add(words + 1, high);
#endif
}

/// Where a lane puts the next one of some words in LDS.
class Appender {
#if defined(HK_AMD)
    u32 *next_;

public:
    HK_FN Appender(u32 *first, u32 place) : next_(first + place) {}
#else
    u32 next_;

public:
    HK_FN Appender(u32 *first, u32 place)
        : next_(u32(reinterpret_cast<u64>((__attribute__((address_space(3))) u32 *)first)) + place * 4) {}
#endif

    /// Writes `v` and steps on, unless `mine` is 0.
    HK_FN void add(u32 mine, u32 v) {
#if defined(HK_AMD)
        if (mine != 0) *next_++ = v;
#else
        // The compiler would have a register for the place after each word.
        asm volatile("{\n\t.reg .pred mine;\n\tsetp.ne.u32 mine, %1, 0;\n\t@mine st.shared.u32 [%0], %2;\n\t"
                     "@mine add.u32 %0, %0, 4;\n\t}"
                     : "+r"(next_)
                     : "r"(mine), "r"(v)
                     : "memory");
#endif
    }
};

/// Reductions over aligned groups of Width threads of a block of Threads; every thread gets its group's
/// result, in a fixed order: butterfly in each wave, then waves in ascending order.
/// A group wider than a wave is the whole block, and all its threads must call together, on the one reducer
/// of its kind that the kernel makes: the slots in LDS belong to the type. kSums are reduced at a time, at most.
template <int Threads, int Width, int kSums = 1>
class GroupReducer {
    static_assert(Width <= kWaveSize || Width == Threads, "a group is within a wave or the whole block");
    static constexpr int kWaves = Width > kWaveSize ? Width / kWaveSize : 1;

    // Two sets of slots in turn: a wave can come back to a set only through the barrier of the other, which
    // it leaves when all waves have read the first. So one barrier a reduction is enough.
    u32 turn_ = 0;

    HK_FN static auto &slots() {
        __shared__ float lds[2 * kSums * kWaves];
        return lds;
    }

public:
    /// T is of 4 bytes.
    template <class T, class Op>
    HK_FN T reduce(T v, Op op) {
        v = group_reduce<(Width < kWaveSize ? Width : kWaveSize)>(v, op);
        if constexpr (kWaves > 1) {
            __shared__ u32 slots[2][kWaves];
            u32 *mine = slots[turn_];
            turn_ ^= 1;
            if (thread_x() % kWaveSize == 0) mine[thread_x() / kWaveSize] = __builtin_bit_cast(u32, v);
            block_barrier();
            v = __builtin_bit_cast(T, mine[0]);
#pragma unroll
            for (int wave = 1; wave < kWaves; ++wave) v = op(v, __builtin_bit_cast(T, mine[wave]));
        }
        return v;
    }

    HK_FN float sum(float v) { return reduce(v, Sum{}); }

    /// As `reduce` of each, but with one barrier for all.
    template <int N, class Op>
    HK_FN void reduce_each(float (&v)[N], Op op) {
        group_reduce_each<(Width < kWaveSize ? Width : kWaveSize)>(v, op);
        if constexpr (kWaves > 1) {
            static_assert(N <= kSums, "as many as there are slots for");
            float *mine = &slots()[turn_ * kSums * kWaves];
            turn_ ^= 1;
            if (thread_x() % kWaveSize == 0) {
#pragma unroll
                for (int i = 0; i < N; ++i) mine[i * kWaves + thread_x() / kWaveSize] = v[i];
            }
            block_barrier();
#pragma unroll
            for (int i = 0; i < N; ++i) {
                v[i] = mine[i * kWaves];
#pragma unroll
                for (int wave = 1; wave < kWaves; ++wave) v[i] = op(v[i], mine[i * kWaves + wave]);
            }
        }
    }

    /// As `sum` of each, but with one barrier for all.
    template <int N>
    HK_FN void sums(float (&v)[N]) {
        reduce_each(v, Sum{});
    }

    HK_FN float max(float v) { return reduce(v, Max{}); }
};

}  // namespace hk
