// hk/amd/global.h: global memory of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Loads from a wave-uniform address that the kernel does not write: a scalar load on AMD targets.
template <class T>
HK_FN T load_uniform(u64 address) {
    return *reinterpret_cast<const T __attribute__((address_space(4))) *>(address);
}

/// Loads what no other wave reads.
template <class V>
HK_FN V load_streaming(GlobalPtr<const V> at) {
    return *at;
}

/// `*at`, of 16 bytes, if `there`, else unspecified. Predicated on NVIDIA GPUs: a branch would wait for earlier loads.
template <class V>
HK_FN V load_predicated(GlobalPtr<const V> at, bool there) {
    static_assert(sizeof(V) == 16, "a vector");
    Vec<u32, 4> v;
    asm("" : "=v"(v));
    if (there) v = *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(at);
    return __builtin_bit_cast(V, v);
}

/// A bounds-checked, wave-uniform range of global memory (buffer resource): loads past the end give zero, stores past the end are
/// dropped, without a branch. Shorter than 2 GiB.
class Window {
    __amdgpu_buffer_rsrc_t resource_;

  public:
    /// An offset with this bit is out of bounds of every window, with room for small additions.
    static constexpr u32 kOutOfBounds = 0x80000000u;

    Window() = default;

    template <class T>
    HK_FN Window(GlobalPtr<T> base, u32 bytes) {
        constexpr int kRaw = 0x00027000;  // bounds in bytes, no stride, no format
        resource_ = __builtin_amdgcn_make_buffer_rsrc((void *)(T *)base, 0, int(bytes), kRaw);
    }

    /// Loads 16 bytes per lane straight to LDS: lane l's to `to + 16 l`; `to` is uniform. The compiler does not track it: `wait_loads`
    /// waits.
    HK_FN void load_to_lds(void *to, u32 offset, u32 scalar) const { load_to_lds<16>(to, offset, scalar); }

    /// The same from `offset | past` to `to + ahead`, a constant, in as few instructions as there are.
    HK_FN void load_to_lds(void *to, u32 ahead, u32 offset, u32 past, u32 scalar) const {
        u32 at;
        // M0 says where to, and takes a state to be read.
        asm volatile("s_add_u32 m0, %1, %2\n\tv_or_b32 %0, %3, %4\n\tbuffer_load_dwordx4 %0, %5, %6 offen lds"
                     : "=&v"(at)
                     : "s"(lds_address(to)), "i"(ahead), "v"(offset), "v"(past), "s"(resource_), "s"(scalar)
                     : "memory", "scc");
    }

    /// Loads a dword per lane straight to LDS, lane l's to `to + 4 l`.
    HK_FN void load_dword_to_lds(void *to, u32 offset, u32 scalar) const { load_to_lds<4>(to, offset, scalar); }

    /// Loads 1, 2, 4, 8 or 16 bytes from `offset` + `ahead` (a constant) + `scalar` (wave-uniform, not bounds-checked); all are
    /// multiples of the size.
    template <class V>
    HK_FN V load(u32 offset, u32 scalar = 0, u32 ahead = 0) const {
        offset += ahead;
        if constexpr (sizeof(V) == 16) {
            return __builtin_bit_cast(V, __builtin_amdgcn_raw_buffer_load_b128(resource_, int(offset), int(scalar), 0));
        } else if constexpr (sizeof(V) == 8) {
            return __builtin_bit_cast(V, __builtin_amdgcn_raw_buffer_load_b64(resource_, int(offset), int(scalar), 0));
        } else if constexpr (sizeof(V) == 4) {
            return __builtin_bit_cast(V, __builtin_amdgcn_raw_buffer_load_b32(resource_, int(offset), int(scalar), 0));
        } else if constexpr (sizeof(V) == 2) {
            return __builtin_bit_cast(V, __builtin_amdgcn_raw_buffer_load_b16(resource_, int(offset), int(scalar), 0));
        } else {
            return __builtin_bit_cast(V, __builtin_amdgcn_raw_buffer_load_b8(resource_, int(offset), int(scalar), 0));
        }
    }

    /// Streaming load of 16 bytes that no other wave reads: on NVIDIA GPUs it bypasses L1 and prefetches 128 bytes to L2.
    HK_FN Vec<u32, 4> load_streaming(u32 offset, u32 scalar = 0) const { return load<Vec<u32, 4>>(offset, scalar); }

    /// Stores 1, 2, 4, 8 or 16 bytes to `offset` + `ahead` (a constant), both multiples of the size.
    template <class V>
    HK_FN void store(V v, u32 offset, u32 ahead = 0) const {
        offset += ahead;
        if constexpr (sizeof(V) == 16) {
            __builtin_amdgcn_raw_buffer_store_b128(__builtin_bit_cast(Vec<u32, 4>, v), resource_, int(offset), 0, 0);
        } else if constexpr (sizeof(V) == 8) {
            __builtin_amdgcn_raw_buffer_store_b64(__builtin_bit_cast(Vec<u32, 2>, v), resource_, int(offset), 0, 0);
        } else if constexpr (sizeof(V) == 4) {
            __builtin_amdgcn_raw_buffer_store_b32(__builtin_bit_cast(u32, v), resource_, int(offset), 0, 0);
        } else if constexpr (sizeof(V) == 2) {
            __builtin_amdgcn_raw_buffer_store_b16(__builtin_bit_cast(u16, v), resource_, int(offset), 0, 0);
        } else {
            __builtin_amdgcn_raw_buffer_store_b8(__builtin_bit_cast(u8, v), resource_, int(offset), 0, 0);
        }
    }

  private:
    HK_FN static u32 lds_address(void *to) {
        using Lds = __attribute__((address_space(3))) void *;
        return u32(reinterpret_cast<__UINTPTR_TYPE__>((Lds)to));
    }

    template <int kBytes>
    HK_FN void load_to_lds(void *to, u32 offset, u32 scalar) const {
        const u32 address = lds_address(to);
        if constexpr (kBytes == 16) {
            asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dwordx4 %1, %2, %3 offen lds"
                         :
                         : "s"(address), "v"(offset), "s"(resource_), "s"(scalar)
                         : "memory");
        } else {
            asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dword %1, %2, %3 offen lds"
                         :
                         : "s"(address), "v"(offset), "s"(resource_), "s"(scalar)
                         : "memory");
        }
    }
};

/// Commits a group of loads straight to LDS.
HK_FN void commit_loads() {}

/// Waits until at most the last `kBatches` groups of `kLoads` loads of this wave are in flight.
template <int kBatches, int kLoads>
HK_FN void wait_loads() {
    static_assert(kBatches * kLoads < 64, "what the counter holds");
    asm volatile("s_waitcnt vmcnt(%0)" : : "n"(kBatches * kLoads) : "memory");
}

/// Full drain of loads to registers, visible to the compiler.
HK_FN void drain_register_loads() {
    constexpr int kNoLoads = 0x0f70;  // vmcnt(0), any number of other operations
    __builtin_amdgcn_s_waitcnt(kNoLoads);
}

}  // namespace hk
