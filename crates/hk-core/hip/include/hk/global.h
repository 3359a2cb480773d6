// global.h: tensors in global memory.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Pointer known to be to global memory, so that no access has to find out where it points.
template <class T>
using GlobalPtr = T __attribute__((address_space(1))) *;

/// A value at an address that is the same for all lanes of a wave, and that the kernel writes nothing to: a scalar load.
template <class T>
HK_FN T load_uniform(u64 address) {
#if defined(HK_AMD)
    return *reinterpret_cast<const T __attribute__((address_space(4))) *>(address);
#else
    return *reinterpret_cast<GlobalPtr<const T>>(address);
#endif
}

/// `*at`, of 16 bytes, if `there`, else of no use. On NVIDIA's GPUs without a branch, behind which it would wait for what is asked
/// for before.
template <class V>
HK_FN V load_if(GlobalPtr<const V> at, bool there) {
    static_assert(sizeof(V) == 16, "a vector");
#if defined(HK_AMD)
    Vec<u32, 4> v;
    asm("" : "=v"(v));
    if (there) v = *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(at);
    return __builtin_bit_cast(V, v);
#else
    // Zero at first: a register that may not be written would be taken for one that is in use all through the kernel.
    u32 a = 0, b = 0, c = 0, d = 0;
    asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %5, 0;\n\t@there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
                 : "l"(reinterpret_cast<u64>(at)), "r"(u32(there)));
    return __builtin_bit_cast(V, Vec<u32, 4>{a, b, c, d});
#endif
}

/// Raises `*at` to `v`, as one operation among all blocks.
HK_FN void atomic_max(GlobalPtr<u32> at, u32 v) {
    __scoped_atomic_fetch_max(at, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

/// Adds `v` to `*at`, as one operation among all blocks.
HK_FN void atomic_add(GlobalPtr<float> at, float v) {
    __scoped_atomic_fetch_add(at, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

/// Reads what atomic operations of other blocks may be writing.
HK_FN u32 atomic_load(GlobalPtr<u32> at) {
    return __scoped_atomic_load_n(at, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

/// A tensor as the host describes it: (batch, depth, rows, cols), strides in elements.
/// Same layout as `hk_core::GlobalLayout`. An absent optional tensor has data = 0.
struct Global {
    u64 data;
    u32 shape[4];
    i64 strides[4];

    HK_FN bool present() const { return data != 0; }
    HK_FN u32 rows() const { return shape[2]; }
    HK_FN u32 cols() const { return shape[3]; }
    HK_FN i64 row_stride() const { return strides[2]; }

    /// Start of a row of batch 0, depth 0.
    template <class T>
    HK_FN GlobalPtr<T> row(u64 index) const {
        return reinterpret_cast<GlobalPtr<T>>(data) + i64(index) * row_stride();
    }
};
static_assert(sizeof(Global) == 56, "same layout as hk_core::GlobalLayout");

/// How the rows of a tensor may be touched.
enum class Access : u32 {
    Elements = 0,  ///< one element at a time: any element-aligned address, any row length
    Vectors = 1,   ///< 16 bytes at a time: addresses and row lengths are multiples of 16 bytes
};

/// A stretch of global memory, the same for all lanes of a wave, that is safe at its end: reads from beyond
/// give zero, writes to beyond vanish, and neither costs a branch. Shorter than 2 GiB.
class Window {
#if defined(HK_AMD)
    __amdgpu_buffer_rsrc_t resource_;
#else
    u64 base_;
    u32 bytes_;
#endif

public:
    /// An offset with this bit set is beyond the end of every window, with room for small additions.
    static constexpr u32 kBeyond = 0x80000000u;

    Window() = default;

    template <class T>
    HK_FN Window(GlobalPtr<T> base, u32 bytes) {
#if defined(HK_AMD)
        constexpr int kRaw = 0x00027000;  // bounds in bytes, no stride, no format
        resource_ = __builtin_amdgcn_make_buffer_rsrc((void *)(T *)base, 0, int(bytes), kRaw);
#else
        base_ = reinterpret_cast<u64>(base);
        bytes_ = bytes;
#endif
    }

    /// 16 bytes of each lane, straight to LDS: lane l's go to `to + 16 l`, `to` being the same for all. The compiler does not know:
    /// `wait_loads` waits for it.
    HK_FN void load_to_lds(void *to, u32 offset, u32 scalar) const { load_to_lds<16>(to, offset, scalar); }

    /// A word of each lane, likewise, to `to + 4 l`.
    HK_FN void load_word_to_lds(void *to, u32 offset, u32 scalar) const { load_to_lds<4>(to, offset, scalar); }

    /// A value of 1, 2, 4, 8 or 16 bytes from `offset` plus `ahead`, which is known when compiling, plus `scalar`,
    /// which is the same for all lanes and does not count for what is beyond the end; all are multiples of its size.
    template <class V>
    HK_FN V load(u32 offset, u32 scalar = 0, u32 ahead = 0) const {
#if defined(HK_AMD)
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
#else
        // Not an `if`: what is made of the value would be moved into it, and each load waited for before the next.
        const u64 from = base_ + offset + scalar + ahead;
        const u32 at = offset + ahead;
        if constexpr (sizeof(V) == 16) {
            u32 a = 0, b = 0, c = 0, d = 0;
            asm volatile("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %5, %6;\n\t"
                         "@there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                         : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
                         : "l"(from), "r"(at), "r"(bytes_)
                         : "memory");
            return __builtin_bit_cast(V, Vec<u32, 4>{a, b, c, d});
        } else if constexpr (sizeof(V) == 8) {
            u32 a = 0, b = 0;
            asm volatile("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %3, %4;\n\t@there ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
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
#endif
    }

    /// 16 bytes that no other wave reads, of rows that are read in order: on NVIDIA's GPUs past L1, and 128 bytes at a time to L2.
    HK_FN Vec<u32, 4> load_once(u32 offset, u32 scalar = 0) const {
#if defined(HK_AMD)
        return load<Vec<u32, 4>>(offset, scalar);
#else
        u32 a = 0, b = 0, c = 0, d = 0;
        asm("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %5, %6;\n\t"
            "@there ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
            : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
            : "l"(base_ + offset + scalar), "r"(offset), "r"(bytes_));
        return {a, b, c, d};
#endif
    }

    /// A value of 1, 2, 4, 8 or 16 bytes to `offset` plus `ahead`, which is known when compiling, both multiples of its
    /// size.
    template <class V>
    HK_FN void store(V v, u32 offset, u32 ahead = 0) const {
#if defined(HK_AMD)
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
#else
        const u64 to = base_ + offset + ahead;
        const u32 at = offset + ahead;
        if constexpr (sizeof(V) == 16) {
            const Vec<u32, 4> w = __builtin_bit_cast(Vec<u32, 4>, v);
            asm volatile("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %1, %2;\n\t"
                         "@there st.global.v4.u32 [%0], {%3, %4, %5, %6};\n\t}"
                         :
                         : "l"(to), "r"(at), "r"(bytes_), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                         : "memory");
        } else if constexpr (sizeof(V) == 8) {
            const Vec<u32, 2> w = __builtin_bit_cast(Vec<u32, 2>, v);
            asm volatile("{\n\t.reg .pred there;\n\tsetp.lt.u32 there, %1, %2;\n\t@there st.global.v2.u32 [%0], {%3, %4};\n\t}"
                         :
                         : "l"(to), "r"(at), "r"(bytes_), "r"(w[0]), "r"(w[1])
                         : "memory");
        } else {
            if (at < bytes_) *reinterpret_cast<GlobalPtr<V>>(to) = v;
        }
#endif
    }

private:
    template <int kBytes>
    HK_FN void load_to_lds(void *to, u32 offset, u32 scalar) const {
        using Lds = __attribute__((address_space(3))) void *;
        const u32 address = u32(reinterpret_cast<__UINTPTR_TYPE__>((Lds)to));
#if defined(HK_AMD)
        // M0 says where to, and takes a state to be read.
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
#else
        // What is beyond is read from the start, and zero bytes of it.
        const bool there = offset < bytes_;
        const u32 own = address + kBytes * __nvvm_read_ptx_sreg_laneid();
        const u64 from = base_ + (there ? u64(offset) + scalar : 0);
        const u32 bytes = there ? kBytes : 0;
        if constexpr (kBytes == 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(own), "l"(from), "r"(bytes) : "memory");
        } else {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(own), "l"(from), "r"(bytes) : "memory");
        }
#endif
    }
};

/// A lane's place in a row of a window, and how many columns the row has from there on (none: zero or less).
/// Nothing beyond the row is touched: reads from there give zero, writes to there vanish.
template <class T, Access kAccess>
struct Cursor {
    Window window;
    u32 offset;  // of the place in the window, in bytes
    i32 left;    // kToEnd where the row ends with its window

    static constexpr i32 kToEnd = 0x7fffffff;
    /// Elements of one access to N columns: by vectors up to 16 bytes.
    template <int N>
    static constexpr int kLen = kAccess == Access::Vectors ? (N < kVecLen<T> ? N : kVecLen<T>) : 1;

    /// N columns, starting `ahead` columns on.
    template <int N>
    HK_FN Vec<T, N> load(int ahead) const {
        constexpr int kPart = kLen<N>;
        static_assert(N % kPart == 0, "whole accesses");
        Vec<T, N> v;
#pragma unroll
        for (int i = 0; i < N; i += kPart) {
            if constexpr (kPart == 1) {
                v[i] = window.load<T>(place(ahead + i), 0, bytes(ahead + i));
            } else {
                const auto part = window.load<Vec<T, kPart>>(place(ahead + i), 0, bytes(ahead + i));
#pragma unroll
                for (int j = 0; j < kPart; ++j) v[i + j] = part[j];
            }
        }
        return v;
    }

    template <int N>
    HK_FN void store(Vec<T, N> v, int ahead) const {
        constexpr int kPart = kLen<N>;
        static_assert(N % kPart == 0, "whole accesses");
#pragma unroll
        for (int i = 0; i < N; i += kPart) {
            if constexpr (kPart == 1) {
                window.store(T(v[i]), place(ahead + i), bytes(ahead + i));
            } else {
                Vec<T, kPart> part;
#pragma unroll
                for (int j = 0; j < kPart; ++j) part[j] = v[i + j];
                window.store(part, place(ahead + i), bytes(ahead + i));
            }
        }
    }

    /// The same place, but offsets from it are computed anew: those of many accesses would fill registers if
    /// they were kept from row to row, or from loads to stores, while most fit an access's immediate field.
    HK_FN Cursor anew() const {
        Cursor here = *this;
        forget(here.offset);
        if (!__builtin_constant_p(left)) forget(here.left);
        return here;
    }

private:
    // The sign of what is left past `ahead` moves the offset beyond the window. Not a select: a compare keeps a
    // pair of scalar registers for each access, of which there are not enough.
    HK_FN u32 place(int ahead) const {
        const u32 past_end = u32(left) - 1u - u32(ahead);
        return offset | (past_end & Window::kBeyond);
    }

    HK_FN static u32 bytes(int columns) { return u32(columns) * u32(sizeof(T)); }
};

}  // namespace hk
