// hk/nvidia/matrix.h: the matrix unit of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

/// Two mma.sync m16n8. The instruction takes rows lane / 4 and lane / 4 + 8: the lane's two rows. Any columns will do where both
/// operands agree.
template <class W, class X, int kDim, int kCols>
struct MatrixUnit {
    static constexpr bool kExists = false;
};

#define HK_MATRIX_UNIT(T, shape, types, Number, constraint)                                            \
    template <int kCols>                                                                               \
    struct MatrixUnit<T, T, 16, kCols> {                                                               \
        static constexpr bool kExists = true;                                                          \
        template <int kWords, class Acc>                                                               \
        HK_FN static Acc mma(Vec<u32, kWords> w, Vec<u32, kWords> x, Acc acc) {                        \
            constexpr int kOfRow = kWords / 2;                                                         \
            static_assert(kOfRow % 2 == 0, "eight bytes of a row");                                    \
            _Pragma("unroll") for (int i = 0; i < kOfRow; i += 2) {                                    \
                _Pragma("unroll") for (int n = 0; n < 2; ++n) {                                        \
                    Number a = acc[2 * n], b = acc[2 * n + 1], c = acc[2 * n + 4], d = acc[2 * n + 5]; \
                    asm("mma.sync.aligned." shape ".row.col." types                                    \
                        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                              \
                        "{%0, %1, %2, %3};"                                                            \
                        : "+" constraint(a), "+" constraint(b), "+" constraint(c), "+" constraint(d)   \
                        : "r"(x[i]), "r"(x[kOfRow + i]), "r"(x[i + 1]), "r"(x[kOfRow + i + 1]),        \
                          "r"(w[kOfRow * n + i]), "r"(w[kOfRow * n + i + 1]));                         \
                    acc[2 * n] = a, acc[2 * n + 1] = b, acc[2 * n + 4] = c, acc[2 * n + 5] = d;        \
                }                                                                                      \
            }                                                                                          \
            return acc;                                                                                \
        }                                                                                              \
    };
HK_MATRIX_UNIT(bf16, "m16n8k16", "f32.bf16.bf16.f32", float, "f")
HK_MATRIX_UNIT(f16, "m16n8k16", "f32.f16.f16.f32", float, "f")
HK_MATRIX_UNIT(I8, "m16n8k32", "s32.s8.s8.s32", int, "r")
HK_MATRIX_UNIT(Fp8, "m16n8k32", "f32.e4m3.e4m3.f32", float, "f")
#undef HK_MATRIX_UNIT

}  // namespace detail

}  // namespace hk
