// split_cat.h: output columns split between two tensors, and columns of a third tensor appended to the first.
#pragma once

#include <gemm/epilogue/store.h>

namespace gemm {
/// Rounds and stores rows of heads of `head + tail` columns: the first `head` to y, the rest to `rest`. The lane that has a head's
/// first column copies `extra` columns of `cat` after it in y.
template <class T, int N>
HK_FN void store_split_cat(const Epilogue &e, const Fusion &f, u32 m, u32 n, Vec<float, N> y) {
    const u32 width = f.head + f.tail, left = e.cols - n;
    const auto place = [&](u32 d, u32 at) {
        const i64 head = i64(m) * e.y_row + i64(d) * f.y_head, rest = i64(m) * f.rest_row + i64(d) * f.rest_head;
        return at < f.head ? e.y + u64(head + at) * sizeof(T) : f.rest + u64(rest + at - f.head) * sizeof(T);
    };
    if (f.whole) {
        store_floats<T, N>(place(n / width, n % width), 0, y, left, true);
    } else {
        const Vec<T, N> rounded = hk::narrow<T, N>(y);
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < left) *reinterpret_cast<GlobalPtr<T>>(place((n + i) / width, (n + i) % width)) = rounded[i];
        }
    }
    // Heads whose first column is among these N.
#pragma unroll 1
    for (u32 d = (n + width - 1) / width; d * width < n + N && d * width < e.cols; ++d) {
        const i64 from = i64(m) * f.cat_row + i64(d) * f.cat_head;
        const u64 to = e.y + u64(i64(m) * e.y_row + i64(d) * f.y_head + f.head) * sizeof(T);
#pragma unroll 1
        for (u32 i = 0; i < f.extra; i += N) {
            const Vec<float, N> v = load_floats<N>(f.cat, f.cat_type, from + i, f.extra - i, f.whole);
            store_floats<T, N>(to, i, v, f.extra - i, f.whole);
        }
    }
}

}  // namespace gemm
