// hk/amd/matrix.h: the matrix unit of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

/// One matrix instruction, if the target has it: `mma(w, x, acc)`.
template <class W, class X, int kDim, int kCols>
struct MatrixUnit {
    static constexpr bool kExists = false;
};

using F32x2 = Vec<float, 2>;
using F16x4 = Vec<f16, 4>;
using I16x4 = Vec<short, 4>;
using I32x4 = Vec<int, 4>;
using F16x8 = Vec<f16, 8>;
using Bf16x8 = Vec<bf16, 8>;

// `Type`: what the builtin takes operands as.
#define HK_MATRIX_UNIT(W, X, kDim, kCols, Type, builtin)                                                             \
    template <>                                                                                                      \
    struct MatrixUnit<W, X, kDim, kCols> {                                                                           \
        static constexpr bool kExists = true;                                                                        \
        template <class Words, class Acc>                                                                            \
        HK_FN static Acc mma(Words w, Words x, Acc acc) {                                                            \
            return __builtin_amdgcn_mfma_##builtin(__builtin_bit_cast(Type, w), __builtin_bit_cast(Type, x), acc, 0, \
                                                   0, 0);                                                            \
        }                                                                                                            \
    };

HK_MATRIX_UNIT(float, float, 16, 4, float, f32_16x16x4f32)
HK_MATRIX_UNIT(float, float, 32, 2, float, f32_32x32x2f32)
HK_MATRIX_UNIT(f16, f16, 16, 16, F16x4, f32_16x16x16f16)
HK_MATRIX_UNIT(f16, f16, 32, 8, F16x4, f32_32x32x8f16)
HK_MATRIX_UNIT(bf16, bf16, 16, 16, I16x4, f32_16x16x16bf16_1k)
HK_MATRIX_UNIT(bf16, bf16, 32, 8, I16x4, f32_32x32x8bf16_1k)
HK_MATRIX_UNIT(I8, I8, 16, 32, long, i32_16x16x32_i8)
HK_MATRIX_UNIT(I8, I8, 32, 16, long, i32_32x32x16_i8)
HK_MATRIX_UNIT(Fp8, Fp8, 16, 32, long, f32_16x16x32_fp8_fp8)
HK_MATRIX_UNIT(Fp8, Bf8, 16, 32, long, f32_16x16x32_fp8_bf8)
HK_MATRIX_UNIT(Bf8, Fp8, 16, 32, long, f32_16x16x32_bf8_fp8)
HK_MATRIX_UNIT(Bf8, Bf8, 16, 32, long, f32_16x16x32_bf8_bf8)
HK_MATRIX_UNIT(Fp8, Fp8, 32, 16, long, f32_32x32x16_fp8_fp8)
HK_MATRIX_UNIT(Fp8, Bf8, 32, 16, long, f32_32x32x16_fp8_bf8)
HK_MATRIX_UNIT(Bf8, Fp8, 32, 16, long, f32_32x32x16_bf8_fp8)
HK_MATRIX_UNIT(Bf8, Bf8, 32, 16, long, f32_32x32x16_bf8_bf8)
#if defined(HK_MX_MMA)
HK_MATRIX_UNIT(f16, f16, 16, 32, F16x8, f32_16x16x32_f16)
HK_MATRIX_UNIT(f16, f16, 32, 16, F16x8, f32_32x32x16_f16)
HK_MATRIX_UNIT(bf16, bf16, 16, 32, Bf16x8, f32_16x16x32_bf16)
HK_MATRIX_UNIT(bf16, bf16, 32, 16, Bf16x8, f32_32x32x16_bf16)
HK_MATRIX_UNIT(I8, I8, 16, 64, I32x4, i32_16x16x64_i8)
HK_MATRIX_UNIT(I8, I8, 32, 32, I32x4, i32_32x32x32_i8)

/// f8f6f4 instructions: any two formats, block-scaled.
template <class W, class X, int kDim, int kCols>
    requires(kFormat<W> >= 0 && kFormat<X> >= 0 && kDim * kCols == 16 * 128)
struct MatrixUnit<W, X, kDim, kCols> {
    static constexpr bool kExists = true;

    template <int kWords>
    HK_FN static Vec<int, 8> operand(Vec<u32, kWords> words) {
        Vec<int, 8> v = 0;
#pragma unroll
        for (int i = 0; i < kWords; ++i) v[i] = int(words[i]);
        return v;
    }

    template <int kWByte, int kXByte, class WWords, class XWords, class Acc>
    HK_FN static Acc scaled(WWords w, XWords x, Acc acc, u32 w_scale, u32 x_scale) {
        const auto a = operand(w), b = operand(x);
        if constexpr (kDim == 16) {
            return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, acc, kFormat<W>, kFormat<X>, kWByte,
                                                                    int(w_scale), kXByte, int(x_scale));
        } else {
            return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, acc, kFormat<W>, kFormat<X>, kWByte,
                                                                   int(w_scale), kXByte, int(x_scale));
        }
    }

    /// Literal zeros for scales: the instruction without scales.
    template <class WWords, class XWords, class Acc>
    HK_FN static Acc mma(WWords w, XWords x, Acc acc) {
        return scaled<0, 0>(w, x, acc, 0, 0);
    }
};
#else
HK_MATRIX_UNIT(Xf32, Xf32, 16, 8, F32x2, f32_16x16x8_xf32)
HK_MATRIX_UNIT(Xf32, Xf32, 32, 4, F32x2, f32_32x32x4_xf32)
#endif
#undef HK_MATRIX_UNIT

}  // namespace detail

}  // namespace hk
