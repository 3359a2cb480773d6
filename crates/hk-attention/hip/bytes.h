// bytes.h: fp8 and int8 in memory, 16 bits in registers, exactly. Two values take two instructions, of fp8 on gfx950 one.
#pragma once

#include <hk/arch.h>
#include <hk/matrix.h>
#include <hk/quant.h>
#include <hk/types.h>

namespace attention::decode {

using hk::u32;
using hk::u8;
using hk::Vec;

/// Elements of kType, T in registers.
template <class T, hk::QuantType kType>
struct Bytes {
    static constexpr u32 kBytes = 1;

    /// N dwords of T from half as many.
    template <int N>
    HK_FN static Vec<u32, N> widened(Vec<u32, N / 2> v) {
        Vec<u32, N> pairs;
#pragma unroll
        for (int i = 0; i < N; ++i) pairs[i] = pair(v[i / 2], i % 2);
        return pairs;
    }
    /// Byte 2 half + i of `a` and of `b`.
    HK_FN static void across(u32 a, u32 b, int half, u32 (&pairs)[2]) {
#if defined(HK_AMD)
        if constexpr (kNative) {
            const u32 four = __builtin_amdgcn_perm(b, a, half ? 0x07030602u : 0x05010400u);
            pairs[0] = pair(four, 0), pairs[1] = pair(four, 1);
            return;
        }
#endif
        const auto x = hk::dequantize_packed<kType>(Vec<u32, 1>{a}), y = hk::dequantize_packed<kType>(Vec<u32, 1>{b});
#pragma unroll
        for (int i = 0; i < 2; ++i) pairs[i] = exact(x[2 * half + i], y[2 * half + i]);
    }

  private:
#if defined(HK_AMD)
    static constexpr bool kNative = hk::kHasCvtFp4 && kType == hk::kMmaFp8Type;
#else
    static constexpr bool kNative = false;
#endif

    /// Bytes 2 half and 2 half + 1.
    HK_FN static u32 pair(u32 dword, int half) {
#if defined(HK_AMD)
        if constexpr (kNative && __is_same(T, hk::bf16)) {
            return half ? __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(dword, 1.0f, true))
                        : __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(dword, 1.0f, false));
        } else if constexpr (kNative) {
            return half ? __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_f16_fp8(dword, 1.0f, true))
                        : __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_f16_fp8(dword, 1.0f, false));
        }
#endif
        const auto v = hk::dequantize_packed<kType>(Vec<u32, 1>{dword});
        return exact(v[2 * half], v[2 * half + 1]);
    }
    /// Two values that T holds.
    HK_FN static u32 exact(float a, float b) {
        if constexpr (__is_same(T, hk::bf16))
            return hk::detail::high_halves(hk::detail::bits_of(a), hk::detail::bits_of(b));
#if defined(HK_AMD)
        return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(a, b));
#else
        return __builtin_bit_cast(u32, hk::narrow<T, 2>(Vec<float, 2>{a, b}));
#endif
    }
};

template <class T>
using BytesFp8 = Bytes<T, hk::kMmaFp8Type>;
template <class T>
using BytesI8 = Bytes<T, hk::QuantType::I8>;

}  // namespace attention::decode
