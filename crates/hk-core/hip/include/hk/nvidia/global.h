// hk/nvidia/global.h: global memory of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Loads from a wave-uniform address that the kernel does not write: a scalar load on AMD targets.
template <class T>
HK_FN T load_uniform(u64 address) {
    return *reinterpret_cast<GlobalPtr<const T>>(address);
}

/// Loads what no other wave reads: past L1 and, of 16 bytes, with 128 bytes to L2.
template <class V>
HK_FN V load_streaming(GlobalPtr<const V> at) {
    if constexpr (sizeof(V) == 16) {
        u32 a, b, c, d;
        asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
            : "l"(reinterpret_cast<u64>(at)));
        return __builtin_bit_cast(V, Vec<u32, 4>{a, b, c, d});
    } else {
        return __builtin_nontemporal_load(at);
    }
}

/// `*at`, of 16 bytes, if `there`, else unspecified. Predicated on NVIDIA GPUs: a branch would wait for earlier loads.
template <class V>
HK_FN V load_predicated(GlobalPtr<const V> at, bool there) {
    static_assert(sizeof(V) == 16, "a vector");
    // Zero at first: a register that may not be written would be taken for one that is in use all through the kernel.
    u32 a = 0, b = 0, c = 0, d = 0;
    asm volatile(
        "{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %5, 0;\n\t@there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
        : "l"(reinterpret_cast<u64>(at)), "r"(u32(there)));
    return __builtin_bit_cast(V, Vec<u32, 4>{a, b, c, d});
}

namespace detail {
/// Starts to load `bytes` of kBytes bytes, 16 or 4, to an address of LDS; the rest becomes zero.
template <int kBytes>
HK_FN void copy_to_lds(u32 to, u64 from, u32 bytes) {
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
    }
}
/// All 16 bytes.
HK_FN void copy_to_lds(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
}  // namespace detail

/// A bounds-checked, wave-uniform range of global memory (buffer resource): loads past the end give zero, stores past the end are
/// dropped, without a branch. Shorter than 2 GiB.
class Window {
    u64 base_;
    u32 bytes_;

  public:
    /// An offset with this bit is out of bounds of every window, with room for small additions.
    static constexpr u32 kOutOfBounds = 0x80000000u;

    Window() = default;

    template <class T>
    HK_FN Window(GlobalPtr<T> base, u32 bytes) {
        base_ = reinterpret_cast<u64>(base);
        bytes_ = bytes;
    }

    /// Loads 16 bytes per lane straight to LDS: lane l's to `to + 16 l`; `to` is uniform. The compiler does not track it: `wait_loads`
    /// waits.
    HK_FN void load_to_lds(void *to, u32 offset, u32 scalar) const { load_to_lds<16>(to, offset, scalar); }

    /// The same from `offset | past` to `to + ahead`.
    HK_FN void load_to_lds(void *to, u32 ahead, u32 offset, u32 past, u32 scalar) const {
        load_to_lds(static_cast<char *>(to) + ahead, offset | past, scalar);
    }

    /// Loads a dword per lane straight to LDS, lane l's to `to + 4 l`.
    HK_FN void load_dword_to_lds(void *to, u32 offset, u32 scalar) const { load_to_lds<4>(to, offset, scalar); }

    /// Loads 1, 2, 4, 8 or 16 bytes from `offset` + `ahead` (a constant) + `scalar` (wave-uniform, not bounds-checked); all are
    /// multiples of the size.
    template <class V>
    HK_FN V load(u32 offset, u32 scalar = 0, u32 ahead = 0) const {
        // Not an `if`: what is made of the value would be moved into it, and each load waited for before the next.
        const u64 from = base_ + offset + scalar + ahead;
        const u32 at = offset + ahead;
        if constexpr (sizeof(V) == 16) {
            u32 a = 0, b = 0, c = 0, d = 0;
            asm volatile(
                "{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %5, %6;\n\t"
                "@there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
                : "l"(from), "r"(at), "r"(bytes_)
                : "memory");
            return __builtin_bit_cast(V, Vec<u32, 4>{a, b, c, d});
        } else if constexpr (sizeof(V) == 8) {
            u32 a = 0, b = 0;
            asm volatile(
                "{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %3, %4;\n\t@there ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
                : "+r"(a), "+r"(b)
                : "l"(from), "r"(at), "r"(bytes_)
                : "memory");
            return __builtin_bit_cast(V, Vec<u32, 2>{a, b});
        } else if constexpr (sizeof(V) == 4) {
            u32 a = 0;
            asm volatile("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %2, %3;\n\t@there ld.global.u32 %0, [%1];\n\t}"
                         : "+r"(a)
                         : "l"(from), "r"(at), "r"(bytes_)
                         : "memory");
            return __builtin_bit_cast(V, a);
        } else if constexpr (sizeof(V) == 2) {
            u16 a = 0;
            asm volatile("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %2, %3;\n\t@there ld.global.u16 %0, [%1];\n\t}"
                         : "+h"(a)
                         : "l"(from), "r"(at), "r"(bytes_)
                         : "memory");
            return __builtin_bit_cast(V, a);
        } else {
            u16 a = 0;
            asm volatile("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %2, %3;\n\t@there ld.global.u8 %0, [%1];\n\t}"
                         : "+h"(a)
                         : "l"(from), "r"(at), "r"(bytes_)
                         : "memory");
            return __builtin_bit_cast(V, u8(a));
        }
    }

    /// Streaming load of 16 bytes that no other wave reads: on NVIDIA GPUs it bypasses L1 and prefetches 128 bytes to L2.
    HK_FN Vec<u32, 4> load_streaming(u32 offset, u32 scalar = 0) const {
        u32 a = 0, b = 0, c = 0, d = 0;
        asm("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %5, %6;\n\t"
            "@there ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
            : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
            : "l"(base_ + offset + scalar), "r"(offset), "r"(bytes_));
        return {a, b, c, d};
    }

    /// Stores 1, 2, 4, 8 or 16 bytes to `offset` + `ahead` (a constant), both multiples of the size.
    template <class V>
    HK_FN void store(V v, u32 offset, u32 ahead = 0) const {
        const u64 to = base_ + offset + ahead;
        const u32 at = offset + ahead;
        if constexpr (sizeof(V) == 16) {
            const Vec<u32, 4> w = __builtin_bit_cast(Vec<u32, 4>, v);
            asm volatile(
                "{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %1, %2;\n\t"
                "@there st.global.v4.u32 [%0], {%3, %4, %5, %6};\n\t}"
                :
                : "l"(to), "r"(at), "r"(bytes_), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                : "memory");
        } else if constexpr (sizeof(V) == 8) {
            const Vec<u32, 2> w = __builtin_bit_cast(Vec<u32, 2>, v);
            asm volatile(
                "{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %1, %2;\n\t@there st.global.v2.u32 [%0], {%3, %4};\n\t}"
                :
                : "l"(to), "r"(at), "r"(bytes_), "r"(w[0]), "r"(w[1])
                : "memory");
        } else {
            if (at < bytes_) *reinterpret_cast<GlobalPtr<V>>(to) = v;
        }
    }

  private:
    template <int kBytes>
    HK_FN void load_to_lds(void *to, u32 offset, u32 scalar) const {
        // What is beyond is read from the start, and zero bytes of it.
        const bool there = offset < bytes_;
        const u32 own = detail::lds_address(to) + kBytes * __nvvm_read_ptx_sreg_laneid();
        detail::copy_to_lds<kBytes>(own, base_ + (there ? u64(offset) + scalar : 0), there ? kBytes : 0);
    }
};

/// Commits a group of loads straight to LDS.
HK_FN void commit_loads() { asm volatile("cp.async.commit_group;" : : : "memory"); }

/// Waits until at most the last `kBatches` groups of `kLoads` loads of this wave are in flight.
template <int kBatches, int kLoads>
HK_FN void wait_loads() {
    asm volatile("cp.async.wait_group %0;" : : "n"(kBatches) : "memory");
}

/// Full drain of loads to registers, visible to the compiler.
HK_FN void drain_register_loads() {}

}  // namespace hk
