// block.h: barriers, reductions and LDS of a block.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/types.h>
#include <hk/wave.h>
#include HK_TARGET_HEADER(block.h)

namespace hk {

/// Reductions over aligned groups of Width threads of a block of Threads. Every thread gets its group's result, in a fixed order:
/// butterfly in each wave, then waves in ascending order. A group wider than a wave is the whole block; then all threads call
/// together, on the kernel's only reducer of this type, since the LDS slots belong to the type. At most kSums values at a time.
template <int Threads, int Width, int kSums = 1>
class GroupReducer {
    static_assert(Width <= kWaveSize || Width == Threads, "a group is within a wave or the whole block");
    static constexpr int kWaves = Width > kWaveSize ? Width / kWaveSize : 1;

    // Double-buffered slots: a wave reuses a set only after the barrier of the other one, by which time all waves have read the
    // first. So one barrier per reduction is enough.
    u32 turn_ = 0;

    HK_FN static auto &slots() {
        __shared__ float lds[2 * kSums * kWaves];
        return lds;
    }

  public:
    /// T has 4 bytes.
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
            static_assert(N <= kSums, "no more values than slots");
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
