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

/// A float as two tf32, within 2^-22 of it.
struct SplitTf32 {
    u32 high, low;
    HK_FN explicit SplitTf32(u32 bits) : high(bits & 0xffffe000u) {
        low = __builtin_bit_cast(u32, __builtin_bit_cast(float, bits) - __builtin_bit_cast(float, high));
    }
};

/// f32 by three products of tf32; that of the two low parts is below the rounding of the sums.
template <int kCols>
struct MatrixUnit<float, float, 16, kCols> {
    static constexpr bool kExists = true;

    template <int kWords, class Acc>
    HK_FN static Acc mma(Vec<u32, kWords> w, Vec<u32, kWords> x, Acc acc) {
        constexpr int kOfRow = kWords / 2;
        static_assert(kOfRow % 2 == 0, "eight bytes of a row");
#pragma unroll
        for (int i = 0; i < kOfRow; i += 2) {
            const SplitTf32 x0(x[i]), x1(x[kOfRow + i]), x2(x[i + 1]), x3(x[kOfRow + i + 1]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const SplitTf32 w0(w[kOfRow * n + i]), w1(w[kOfRow * n + i + 1]);
                Vec<float, 4> d = {acc[2 * n], acc[2 * n + 1], acc[2 * n + 4], acc[2 * n + 5]};
                d = product(d, {x0.low, x1.low, x2.low, x3.low}, {w0.high, w1.high});
                d = product(d, {x0.high, x1.high, x2.high, x3.high}, {w0.low, w1.low});
                d = product(d, {x0.high, x1.high, x2.high, x3.high}, {w0.high, w1.high});
                acc[2 * n] = d[0], acc[2 * n + 1] = d[1], acc[2 * n + 4] = d[2], acc[2 * n + 5] = d[3];
            }
        }
        return acc;
    }

  private:
    HK_FN static Vec<float, 4> product(Vec<float, 4> acc, Vec<u32, 4> x, Vec<u32, 2> w) {
        float a = acc[0], b = acc[1], c = acc[2], d = acc[3];
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(a), "+f"(b), "+f"(c), "+f"(d)
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(w[0]), "r"(w[1]));
        return {a, b, c, d};
    }
};

}  // namespace detail

}  // namespace hk
