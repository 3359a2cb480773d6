// mul_add.h: y = a g + b or y = a b + g, g the GEMM's output.
#pragma once

#include <gemm/epilogue/store.h>

namespace gemm {
/// A term for outputs (m, n .. n + N).
template <int N>
HK_FN Vec<float, N> load_term(const Term &t, u32 m, u32 n, u32 left) {
    if (!t.data) return t.value;
    if (!t.step) return load_floats<1>(t.data, t.type, 0, 1)[0];
    return load_floats<N>(t.data, t.type, i64(m) * t.row + n, left, t.vectors);
}

}  // namespace gemm
