// hk/amd/wave.h: operations across lanes of AMD targets.
#pragma once

#include <hk/arch.h>

namespace hk {

namespace detail {

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

// `v` of another lane, as a scan adds it: zero where the DPP control has no source lane or the row is not in `Rows`.
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

}  // namespace detail

/// The lanes of the wave for which `mine` is true, lane 0 the lowest bit. All lanes take part.
HK_FN u64 ballot(bool mine) { return __builtin_amdgcn_ballot_w64(mine); }

/// The number of lanes of a ballot below this one (mbcnt).
HK_FN u32 lanes_below(u64 ballot) {
    return __builtin_amdgcn_mbcnt_hi(u32(ballot >> 32), __builtin_amdgcn_mbcnt_lo(u32(ballot), 0));
}

/// A wave-uniform value, moved to a scalar register.
HK_FN u32 uniform(u32 v) { return u32(__builtin_amdgcn_readfirstlane(int(v))); }

/// Makes LDS writes of this wave visible to its other lanes. Costs no instruction on AMD targets, whose lanes run in lockstep.
HK_FN void wave_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
}

/// The value of lane `lane`, which is wave-uniform. T has 4 or 8 bytes.
template <class T>
HK_FN T broadcast(T v, u32 lane) {
    if constexpr (sizeof(T) == 8) {
        const u64 bits = __builtin_bit_cast(u64, v);
        const u64 high = broadcast(u32(bits >> 32), lane);
        return __builtin_bit_cast(T, high << 32 | broadcast(u32(bits), lane));
    } else {
        const int bits = __builtin_bit_cast(int, v);
        return __builtin_bit_cast(T, __builtin_amdgcn_readlane(bits, int(lane)));
    }
}

/// The value of lane `lane`, which may differ between lanes. All lanes take part.
HK_FN u32 shuffle(u32 v, u32 lane) { return u32(__builtin_amdgcn_ds_bpermute(int(lane * 4), int(v))); }

/// The value of the lane below; lane 0 gets `first`. All lanes take part. T has 4 bytes.
template <class T>
HK_FN T shuffle_up(T v, T first) {
    static_assert(sizeof(T) == 4, "one register");
    const int bits = __builtin_bit_cast(int, v), lowest = __builtin_bit_cast(int, first);
    return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(lowest, bits, detail::kDppWaveShift1, 0xf, 0xf, false));
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
    }
}

/// Reduces over lanes l and l ^ 32; `op` is commutative. All lanes take part. T has 4 bytes.
template <class T, class Op>
HK_FN T reduce_over_halves(T v, Op op) {
    if constexpr (kHasPermlaneSwap) {
        const int bits = __builtin_bit_cast(int, v);
        const auto both = __builtin_amdgcn_permlane32_swap(bits, bits, false, false);
        const int low = both[0], high = both[1];  // bit casts of elements take the first one
        return op(__builtin_bit_cast(T, low), __builtin_bit_cast(T, high));
    } else {
        return op(v, shuffle_xor<32>(v));
    }
}

/// The value of lane `kLane` of each four lanes. All lanes take part.
template <int kLane, class T>
HK_FN T quad_broadcast(T v) {
    static_assert(kLane >= 0 && kLane < 4 && sizeof(T) == 4, "one of four lanes, one register");
    return detail::dpp<kLane * 0x55>(v);  // quad_perm, the same lane four times
}

/// Reduces over each aligned group of Width lanes; every lane gets its group's result. Butterfly order, lane ^ 1 first, on every
/// target, so results are bitwise identical; `op` is commutative. All lanes take part. T has 4 bytes.
template <int Width, class T, class Op>
HK_FN T group_reduce(T v, Op op) {
    static_assert(Width >= 1 && Width <= kWaveSize && (Width & (Width - 1)) == 0, "a power of two within the wave");
    if constexpr (Width >= 2) v = op(v, detail::dpp<detail::kDppQuadSwap1>(v));
    if constexpr (Width >= 4) v = op(v, detail::dpp<detail::kDppQuadSwap2>(v));
    if constexpr (Width >= 8) v = op(v, detail::dpp<detail::kDppHalfMirror>(v));
    if constexpr (Width >= 16) v = op(v, detail::dpp<detail::kDppMirror>(v));
    if constexpr (Width == 32) {
        constexpr int kSwap16 = (16 << 10) | 0x1f;  // ds_swizzle, bit mode: lane ^ 16 within 32
        v = op(v, __builtin_bit_cast(T, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int, v), kSwap16)));
    }
    if constexpr (Width == 64) {
        // Rows of 16 agree. Rows 1 and 3 add rows 0 and 2, then row 3 adds row 1; the other rows are not used. The last lane's
        // value goes to a scalar register, so all lanes get the same.
        v = op(v, detail::dpp<detail::kDppBroadcast15>(v));
        v = op(v, detail::dpp<detail::kDppBroadcast31>(v));
        v = __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int, v), kWaveSize - 1));
    }
    return v;
}

/// As `group_reduce` of several values, step by step together.
template <int Width, class T, int N, class Op>
HK_FN void group_reduce_each(T (&v)[N], Op op) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = group_reduce<Width>(v[i], op);
}

/// Inclusive prefix sum over the wave, in a fixed order. All lanes take part. T is u32, u64 or double.
template <class T>
HK_FN T wave_scan(T v) {
    // Within rows of 16 by doubling; then rows 1 and 3 add the last lane of the row before, then the upper two rows that of row 1.
    v += detail::dpp_or_zero<detail::kDppShift + 1>(v);
    v += detail::dpp_or_zero<detail::kDppShift + 2>(v);
    v += detail::dpp_or_zero<detail::kDppShift + 4>(v);
    v += detail::dpp_or_zero<detail::kDppShift + 8>(v);
    v += detail::dpp_or_zero<detail::kDppBroadcast15, 0xa>(v);
    v += detail::dpp_or_zero<detail::kDppBroadcast31, 0xc>(v);
    return v;
}

}  // namespace hk
