// wave.h: lanes of a wave talking to each other through registers.
#pragma once

#include <hk/arch.h>

namespace hk {

struct Sum {
    HK_FN float operator()(float a, float b) const {
        // An addend that is a product must not be fused in: lanes that add the same two values in either
        // order would round differently.
#pragma clang fp contract(off)
        return a + b;
    }
};

/// The smaller.
struct Min {
    HK_FN u32 operator()(u32 a, u32 b) const { return a < b ? a : b; }
};

/// The larger; of a NaN and a number, the number.
struct Max {
    HK_FN float operator()(float a, float b) const { return __builtin_fmaxf(a, b); }
    HK_FN u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

namespace detail {

#if defined(HK_AMD)
// Controls of the data-parallel-primitive (DPP) operand modifier.
enum : int {
    kDppQuadSwap1 = 0xB1,     // quad_perm [1,0,3,2]: lane ^ 1
    kDppQuadSwap2 = 0x4E,     // quad_perm [2,3,0,1]: lane ^ 2
    kDppHalfMirror = 0x141,   // 7 - lane within 8: as lane ^ 4 once quads agree
    kDppMirror = 0x140,       // 15 - lane within 16: as lane ^ 8 once eights agree
    kDppRotate8 = 0x128,      // lane ^ 8
    kDppQuadReverse = 0x1B,   // quad_perm [3,2,1,0]: lane ^ 3
    kDppShift = 0x110,        // plus n: from n lanes below, within 16
    kDppWaveShift1 = 0x138,   // from the lane below
    kDppBroadcast15 = 0x142,  // lane 15 of each row of 16 to the next row
    kDppBroadcast31 = 0x143,  // lane 31 to the upper two rows
};

// What `v` of another lane adds to a scan: zero where the control finds no lane, or a row is not in `Rows`.
template <int Control, int Rows = 0xf>
HK_FN u32 dpp_or_zero(u32 v) {
    return u32(__builtin_amdgcn_update_dpp(0, int(v), Control, Rows, 0xf, false));
}
template <int Control, int Rows = 0xf>
HK_FN u64 dpp_or_zero(u64 v) {
    return u64(dpp_or_zero<Control, Rows>(u32(v >> 32))) << 32 | dpp_or_zero<Control, Rows>(u32(v));
}
template <int Control, int Rows = 0xf>
HK_FN double dpp_or_zero(double v) {
    return __builtin_bit_cast(double, dpp_or_zero<Control, Rows>(__builtin_bit_cast(u64, v)));
}

template <int Control, class T>
HK_FN T dpp(T v) {
    const int bits = __builtin_bit_cast(int, v);
    return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(0, bits, Control, 0xf, 0xf, true));
}
#else
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
#endif

}  // namespace detail

/// The lanes of the wave for which `mine` is true, lane 0 the lowest bit. All lanes take part.
HK_FN u64 ballot(bool mine) {
#if defined(HK_AMD)
    return __builtin_amdgcn_ballot_w64(mine);
#else
    return u32(__nvvm_vote_ballot_sync(0xffffffffu, mine));
#endif
}

/// The number of lanes below this one in a ballot.
HK_FN u32 lanes_before(u64 ballot) {
#if defined(HK_AMD)
    return __builtin_amdgcn_mbcnt_hi(u32(ballot >> 32), __builtin_amdgcn_mbcnt_lo(u32(ballot), 0));
#else
    return u32(__builtin_popcount(u32(ballot) & ((1u << thread_x() % kWaveSize) - 1)));
#endif
}

/// Index of this lane in its wave. A block is one-dimensional.
HK_FN u32 lane_id() { return thread_x() % kWaveSize; }

/// A value that all lanes have, in a scalar register.
HK_FN u32 uniform(u32 v) {
#if defined(HK_AMD)
    return u32(__builtin_amdgcn_readfirstlane(int(v)));
#else
    return v;
#endif
}

/// Index of this wave in its block, known to be the same for its lanes. A block is one-dimensional.
HK_FN u32 wave_id() { return uniform(thread_x() / kWaveSize); }

/// Makes what lanes of this wave have written to LDS visible to its other lanes: they run in step, so it costs no
/// instruction on AMD targets.
HK_FN void wave_barrier() {
#if defined(HK_AMD)
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
#else
    __nvvm_bar_warp_sync(0xffffffffu);
#endif
}

/// The value that lane `lane`, the same for all, has, of 4 or 8 bytes.
template <class T>
HK_FN T broadcast(T v, u32 lane) {
    if constexpr (sizeof(T) == 8) {
        const u64 bits = __builtin_bit_cast(u64, v);
        const u64 high = broadcast(u32(bits >> 32), lane);
        return __builtin_bit_cast(T, high << 32 | broadcast(u32(bits), lane));
    } else {
        const int bits = __builtin_bit_cast(int, v);
#if defined(HK_AMD)
        return __builtin_bit_cast(T, __builtin_amdgcn_readlane(bits, int(lane)));
#else
        return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(0xffffffffu, bits, int(lane), 0x1f));
#endif
    }
}

/// The value that lane `lane` has, which may differ between lanes. All lanes take part.
HK_FN u32 from_lane(u32 v, u32 lane) {
#if defined(HK_AMD)
    return u32(__builtin_amdgcn_ds_bpermute(int(lane * 4), int(v)));
#else
    return u32(__nvvm_shfl_sync_idx_i32(0xffffffffu, int(v), int(lane), 0x1f));
#endif
}

/// The value that the lane below has, in lane 0 `first`. All lanes take part. T is of 4 bytes.
template <class T>
HK_FN T from_lane_below(T v, T first) {
    static_assert(sizeof(T) == 4, "one register");
#if defined(HK_AMD)
    const int bits = __builtin_bit_cast(int, v), lowest = __builtin_bit_cast(int, first);
    return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(lowest, bits, detail::kDppWaveShift1, 0xf, 0xf, false));
#else
    const int below = __nvvm_shfl_sync_up_i32(0xffffffffu, __builtin_bit_cast(int, v), 1, 0);
    return lane_id() == 0 ? first : __builtin_bit_cast(T, below);
#endif
}

/// The value that lane `lane ^ Mask` has, of 4 or 8 bytes. All lanes take part. On AMD targets masks 1, 2, 3, 7, 8 and 15
/// take one instruction a word, 4 takes two, others below 32 go through the LDS crossbar, 32 and above with an address.
template <int Mask, class T>
HK_FN T exchange(T v) {
    static_assert(Mask > 0 && Mask < kWaveSize, "another lane of the wave");
    if constexpr (sizeof(T) == 8) {
        const u64 bits = __builtin_bit_cast(u64, v);
        const u64 high = exchange<Mask>(u32(bits >> 32));
        return __builtin_bit_cast(T, high << 32 | exchange<Mask>(u32(bits)));
    } else {
#if defined(HK_AMD)
        if constexpr (Mask == 1) return detail::dpp<detail::kDppQuadSwap1>(v);
        if constexpr (Mask == 2) return detail::dpp<detail::kDppQuadSwap2>(v);
        if constexpr (Mask == 3) return detail::dpp<detail::kDppQuadReverse>(v);
        if constexpr (Mask == 4) return detail::dpp<detail::kDppQuadReverse>(detail::dpp<detail::kDppHalfMirror>(v));
        if constexpr (Mask == 7) return detail::dpp<detail::kDppHalfMirror>(v);
        if constexpr (Mask == 8) return detail::dpp<detail::kDppRotate8>(v);
        if constexpr (Mask == 15) return detail::dpp<detail::kDppMirror>(v);
        const int bits = __builtin_bit_cast(int, v);
        if constexpr (Mask < 32) {
            return __builtin_bit_cast(T, __builtin_amdgcn_ds_swizzle(bits, Mask << 10 | 0x1f));  // bit mode: xor
        } else {
            return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(int((lane_id() ^ Mask) * 4), bits));
        }
#else
        return detail::swap_lanes(v, Mask);
#endif
    }
}

/// The value that lane `kLane` of each four has. All lanes take part.
template <int kLane, class T>
HK_FN T quad_broadcast(T v) {
    static_assert(kLane >= 0 && kLane < 4 && sizeof(T) == 4, "one of four lanes, one register");
#if defined(HK_AMD)
    return detail::dpp<kLane * 0x55>(v);  // quad_perm, the same lane four times
#else
    const int bits = __builtin_bit_cast(int, v);
    return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(0xffffffffu, bits, kLane, 0x1c1f));
#endif
}

/// Transposes the 2 x 2 matrices whose rows two lanes have that differ in the bit `Mask`, the upper lane the second row; `a` and `b`
/// are the columns. All lanes take part.
template <int Mask, class T>
HK_FN void transpose_lanes(T &a, T &b) {
    static_assert((Mask & (Mask - 1)) == 0, "one bit");
    const bool upper = lane_id() & Mask;
    const T from_b = exchange<Mask>(b), from_a = exchange<Mask>(a);
    a = upper ? from_b : a;
    b = upper ? b : from_a;
}

/// Reduces over each aligned group of Width lanes and gives every lane its group's result. The order is that
/// of a butterfly, lane ^ 1 first, on every target; `op` must be commutative. All lanes take part. T is of 4 bytes.
template <int Width, class T, class Op>
HK_FN T group_reduce(T v, Op op) {
    static_assert(Width >= 1 && Width <= kWaveSize && (Width & (Width - 1)) == 0, "a power of two within the wave");
#if defined(HK_AMD)
    if constexpr (Width >= 2) v = op(v, detail::dpp<detail::kDppQuadSwap1>(v));
    if constexpr (Width >= 4) v = op(v, detail::dpp<detail::kDppQuadSwap2>(v));
    if constexpr (Width >= 8) v = op(v, detail::dpp<detail::kDppHalfMirror>(v));
    if constexpr (Width >= 16) v = op(v, detail::dpp<detail::kDppMirror>(v));
    if constexpr (Width == 32) {
        constexpr int kSwap16 = (16 << 10) | 0x1f;  // ds_swizzle, bit mode: lane ^ 16 within 32
        v = op(v, __builtin_bit_cast(T, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int, v), kSwap16)));
    }
    if constexpr (Width == 64) {
        // Rows of 16 agree. Rows 1 and 3 take in rows 0 and 2, then row 3 takes in row 1; the rest is not
        // used. The last lane's value goes to a scalar register: no lane is different from another.
        v = op(v, detail::dpp<detail::kDppBroadcast15>(v));
        v = op(v, detail::dpp<detail::kDppBroadcast31>(v));
        v = __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int, v), kWaveSize - 1));
    }
#else
#pragma unroll
    for (int mask = 1; mask < Width; mask *= 2) v = op(v, detail::swap_lanes(v, mask));
#endif
    return v;
}

/// The same of several values, all of which take each step together.
template <int Width, class T, int N, class Op>
HK_FN void group_reduce_each(T (&v)[N], Op op) {
#if defined(HK_AMD)
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = group_reduce<Width>(v[i], op);
#else
#pragma unroll
    for (int mask = 1; mask < Width; mask *= 2) {
        T other[N];
#pragma unroll
        for (int i = 0; i < N; ++i) other[i] = detail::swap_lanes(v[i], mask);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = op(v[i], other[i]);
    }
#endif
}

/// Sum of the lanes up to this one, itself included. The order of a lane's sum is fixed. All lanes take part.
/// T is u32, u64 or double.
template <class T>
HK_FN T wave_scan(T v) {
#if defined(HK_AMD)
    // Within rows of 16 by doubling; then rows 1 and 3 take in the last lane of the row before, then the upper two rows
    // that of row 1.
    v += detail::dpp_or_zero<detail::kDppShift + 1>(v);
    v += detail::dpp_or_zero<detail::kDppShift + 2>(v);
    v += detail::dpp_or_zero<detail::kDppShift + 4>(v);
    v += detail::dpp_or_zero<detail::kDppShift + 8>(v);
    v += detail::dpp_or_zero<detail::kDppBroadcast15, 0xa>(v);
    v += detail::dpp_or_zero<detail::kDppBroadcast31, 0xc>(v);
#else
#pragma unroll
    for (int n = 1; n < kWaveSize; n *= 2) v += detail::lane_below_or_zero(v, n);
#endif
    return v;
}

/// The value of the last lane, in all lanes: after a scan, its total. T is of 4 or 8 bytes.
template <class T>
HK_FN T last_lane(T v) {
    return broadcast(v, kWaveSize - 1);
}

}  // namespace hk
