// hk/nvidia/wave.h: operations across lanes of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>

namespace hk {

namespace detail {

template <class T>
HK_FN T swap_lanes(T v, int mask) {
    const int bits = __builtin_bit_cast(int, v);
    return __builtin_bit_cast(T, __nvvm_shfl_sync_bfly_i32(0xffffffffu, bits, mask, 0x1f));
}

HK_FN u32 lane_below_or_zero(u32 v, int n) {
    const u32 below = u32(__nvvm_shfl_sync_up_i32(0xffffffffu, int(v), n, 0));
    return int(thread_x() % kWaveSize) >= n ? below : 0;
}
HK_FN u64 lane_below_or_zero(u64 v, int n) {
    return u64(lane_below_or_zero(u32(v >> 32), n)) << 32 | lane_below_or_zero(u32(v), n);
}
HK_FN double lane_below_or_zero(double v, int n) {
    return __builtin_bit_cast(double, lane_below_or_zero(__builtin_bit_cast(u64, v), n));
}

}  // namespace detail

/// The lanes of the wave for which `mine` is true, lane 0 the lowest bit. All lanes take part.
HK_FN u64 ballot(bool mine) { return u32(__nvvm_vote_ballot_sync(0xffffffffu, mine)); }

/// The number of lanes of a ballot below this one (mbcnt).
HK_FN u32 lanes_below(u64 ballot) {
    return u32(__builtin_popcount(u32(ballot) & ((1u << thread_x() % kWaveSize) - 1)));
}

/// A wave-uniform value, moved to a scalar register.
HK_FN u32 uniform(u32 v) { return v; }

/// Makes LDS writes of this wave visible to its other lanes. Costs no instruction on AMD targets, whose lanes run in lockstep.
HK_FN void wave_barrier() { __nvvm_bar_warp_sync(0xffffffffu); }

/// The value of lane `lane`, which is wave-uniform. T has 4 or 8 bytes.
template <class T>
HK_FN T broadcast(T v, u32 lane) {
    if constexpr (sizeof(T) == 8) {
        const u64 bits = __builtin_bit_cast(u64, v);
        const u64 high = broadcast(u32(bits >> 32), lane);
        return __builtin_bit_cast(T, high << 32 | broadcast(u32(bits), lane));
    } else {
        const int bits = __builtin_bit_cast(int, v);
        return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(0xffffffffu, bits, int(lane), 0x1f));
    }
}

/// The value of lane `lane`, which may differ between lanes. All lanes take part.
HK_FN u32 shuffle(u32 v, u32 lane) { return u32(__nvvm_shfl_sync_idx_i32(0xffffffffu, int(v), int(lane), 0x1f)); }

/// The value of the lane below; lane 0 gets `first`. All lanes take part. T has 4 bytes.
template <class T>
HK_FN T shuffle_up(T v, T first) {
    static_assert(sizeof(T) == 4, "one register");
    const int below = __nvvm_shfl_sync_up_i32(0xffffffffu, __builtin_bit_cast(int, v), 1, 0);
    return lane_id() == 0 ? first : __builtin_bit_cast(T, below);
}

/// The value of lane `lane ^ Mask`. T has 4 or 8 bytes. All lanes take part. Cost per dword on AMD targets: masks 1, 2, 3, 7, 8
/// and 15 one DPP instruction, 4 two; others below 32 ds_swizzle, 32 and above ds_bpermute.
template <int Mask, class T>
HK_FN T shuffle_xor(T v) {
    static_assert(Mask > 0 && Mask < kWaveSize, "another lane of the wave");
    if constexpr (sizeof(T) == 8) {
        const u64 bits = __builtin_bit_cast(u64, v);
        const u64 high = shuffle_xor<Mask>(u32(bits >> 32));
        return __builtin_bit_cast(T, high << 32 | shuffle_xor<Mask>(u32(bits)));
    } else {
        return detail::swap_lanes(v, Mask);
    }
}

/// The value of lane `kLane` of each four lanes. All lanes take part.
template <int kLane, class T>
HK_FN T quad_broadcast(T v) {
    static_assert(kLane >= 0 && kLane < 4 && sizeof(T) == 4, "one of four lanes, one register");
    const int bits = __builtin_bit_cast(int, v);
    return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(0xffffffffu, bits, kLane, 0x1c1f));
}

/// Reduces over each aligned group of Width lanes; every lane gets its group's result. Butterfly order, lane ^ 1 first, on every
/// target, so results are bitwise identical; `op` is commutative. All lanes take part. T has 4 bytes.
template <int Width, class T, class Op>
HK_FN T group_reduce(T v, Op op) {
    static_assert(Width >= 1 && Width <= kWaveSize && (Width & (Width - 1)) == 0, "a power of two within the wave");
#pragma unroll
    for (int mask = 1; mask < Width; mask *= 2) v = op(v, detail::swap_lanes(v, mask));
    return v;
}

/// As `group_reduce` of several values, step by step together.
template <int Width, class T, int N, class Op>
HK_FN void group_reduce_each(T (&v)[N], Op op) {
#pragma unroll
    for (int mask = 1; mask < Width; mask *= 2) {
        T other[N];
#pragma unroll
        for (int i = 0; i < N; ++i) other[i] = detail::swap_lanes(v[i], mask);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = op(v[i], other[i]);
    }
}

/// Inclusive prefix sum over the wave, in a fixed order. All lanes take part. T is u32, u64 or double.
template <class T>
HK_FN T wave_scan(T v) {
#pragma unroll
    for (int n = 1; n < kWaveSize; n *= 2) v += detail::lane_below_or_zero(v, n);
    return v;
}

}  // namespace hk
