// global.h: tensors in global memory.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Pointer to global memory: accesses are global_*, not flat_*.
template <class T>
using GlobalPtr = T __attribute__((address_space(1))) *;

}  // namespace hk

#include HK_TARGET_HEADER(global.h)

namespace hk {

/// Atomic maximum, device scope.
HK_FN void atomic_max(GlobalPtr<u32> at, u32 v) {
    __scoped_atomic_fetch_max(at, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

/// Atomic add, device scope.
HK_FN void atomic_add(GlobalPtr<float> at, float v) {
    __scoped_atomic_fetch_add(at, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

/// Atomic load, device scope.
HK_FN u32 atomic_load(GlobalPtr<u32> at) { return __scoped_atomic_load_n(at, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE); }

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

/// The width of accesses to the rows of a tensor.
enum class Access : u32 {
    Scalar = 0,  ///< one element: any element-aligned address, any row length
    Vectorized = 1,  ///< 16 bytes: addresses and row lengths are multiples of 16 bytes
};

/// A lane's position in a row of a window, and the columns that remain of the row (zero or less: none). Accesses past the row are
/// masked: loads give zero, stores are dropped.
template <class T, Access kAccess>
struct Cursor {
    Window window;
    u32 offset;  // in the window, in bytes
    i32 left;  // kToEnd where the row ends with its window

    static constexpr i32 kToEnd = 0x7fffffff;
    /// Elements per access of N columns: up to 16 bytes if vectorized.
    template <int N>
    static constexpr int kLen = kAccess == Access::Vectorized ? (N < kVecLen<T> ? N : kVecLen<T>) : 1;

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

    /// The same position, with offsets recomputed: kept from row to row, or from loads to stores, they would take registers, while
    /// most fit the immediate field of an access.
    HK_FN Cursor reload() const {
        Cursor here = *this;
        opaque(here.offset);
        if (!__builtin_constant_p(left)) opaque(here.left);
        return here;
    }

  private:
    // The sign of the remaining count moves the offset out of the window. Not a select: compares take a pair of SGPRs for each
    // access, and there are too few.
    HK_FN u32 place(int ahead) const {
        const u32 past_end = u32(left) - 1u - u32(ahead);
        return offset | (past_end & Window::kOutOfBounds);
    }

    HK_FN static u32 bytes(int columns) { return u32(columns) * u32(sizeof(T)); }
};

}  // namespace hk
