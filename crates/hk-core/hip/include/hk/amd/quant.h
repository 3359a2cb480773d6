// hk/amd/quant.h: conversions of quantized types of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

HK_FN u32 bits_of(float v) { return __builtin_bit_cast(u32, v); }

/// The low bytes of four dwords, packed.
HK_FN u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    const u32 low = __builtin_amdgcn_perm(b, a, 0x0c0c0400u);
    const u32 high = __builtin_amdgcn_perm(d, c, 0x0c0c0400u);
    return __builtin_amdgcn_perm(high, low, 0x05040100u);
}

/// Transposes a 4 x 4 matrix of bytes, a dword per row.
HK_FN Vec<u32, 4> transpose_bytes(Vec<u32, 4> w) {
    const u32 p0 = __builtin_amdgcn_perm(w[1], w[0], 0x05010400u), p1 = __builtin_amdgcn_perm(w[1], w[0], 0x07030602u);
    const u32 q0 = __builtin_amdgcn_perm(w[3], w[2], 0x05010400u), q1 = __builtin_amdgcn_perm(w[3], w[2], 0x07030602u);
    return {__builtin_amdgcn_perm(q0, p0, 0x05040100u), __builtin_amdgcn_perm(q0, p0, 0x07060302u),
            __builtin_amdgcn_perm(q1, p1, 0x05040100u), __builtin_amdgcn_perm(q1, p1, 0x07060302u)};
}

/// The high bytes of four floats, packed.
HK_FN u32 high_bytes(float a, float b, float c, float d) {
    const u32 low = __builtin_amdgcn_perm(bits_of(b), bits_of(a), 0x0c0c0703u);
    const u32 high = __builtin_amdgcn_perm(bits_of(d), bits_of(c), 0x0c0c0703u);
    return __builtin_amdgcn_perm(high, low, 0x05040100u);
}

/// Converts four values to the target's own fp8. Out of range: undefined, unless kFp8Saturates.
template <bool kE5M2>
HK_FN u32 native_fp8(float a, float b, float c, float d) {
    if constexpr (kE5M2) {
        const int low = __builtin_amdgcn_cvt_pk_bf8_f32(a, b, 0, false);
        return u32(__builtin_amdgcn_cvt_pk_bf8_f32(c, d, low, true));
    } else {
        const int low = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false);
        return u32(__builtin_amdgcn_cvt_pk_fp8_f32(c, d, low, true));
    }
}

/// The values of the four fp8 of a dword, in the target's own encoding, where kHasCvtFromFp8.
HK_FN Vec<float, 4> native_fp8_values(u32 dword) {
    const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(int(dword), false);
    const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(int(dword), true);
    return {low[0], low[1], high[0], high[1]};
}

/// fp4 of eight values, and the values of eight fp4, where kHasCvtFp4.
HK_FN u32 native_fp4(Vec<float, 8> v) {
    u32 pairs = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(0, v[0], v[1], 1.0f, 0);
    pairs = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(pairs, v[2], v[3], 1.0f, 1);
    pairs = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(pairs, v[4], v[5], 1.0f, 2);
    return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(pairs, v[6], v[7], 1.0f, 3);
}
HK_FN Vec<float, 8> native_fp4_values(u32 dword) {
    const auto a = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(dword, 1.0f, 0);
    const auto b = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(dword, 1.0f, 1);
    const auto c = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(dword, 1.0f, 2);
    const auto d = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(dword, 1.0f, 3);
    return {a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
}

/// The larger of two; NaN if one is NaN. Where kHasMaxNan.
HK_FN float max_nan(float a, float b);

}  // namespace detail

}  // namespace hk
