// hk/nvidia/quant.h: conversions of quantized types of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

HK_FN u32 bits_of(float v) { return __builtin_bit_cast(u32, v); }

/// The low bytes of four dwords, packed.
HK_FN u32 low_bytes(u32 a, u32 b, u32 c, u32 d) { return (a & 0xffu) | (b & 0xffu) << 8 | (c & 0xffu) << 16 | d << 24; }

/// Transposes a 4 x 4 matrix of bytes, a dword per row.
HK_FN Vec<u32, 4> transpose_bytes(Vec<u32, 4> w) {
    Vec<u32, 4> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[i] = low_bytes(w[0] >> (8 * i), w[1] >> (8 * i), w[2] >> (8 * i), w[3] >> (8 * i));
    }
    return out;
}

/// The high bytes of four floats, packed.
HK_FN u32 high_bytes(float a, float b, float c, float d) {
    const u32 low = __nvvm_prmt(bits_of(a), bits_of(b), 0x73);
    const u32 high = __nvvm_prmt(bits_of(c), bits_of(d), 0x73);
    return __nvvm_prmt(low, high, 0x5410);
}

/// Converts four values to the target's own fp8. Out of range: undefined, unless kFp8Saturates.
template <bool kE5M2>
HK_FN u32 native_fp8(float a, float b, float c, float d) {
    if constexpr (kE5M2) {
        return u32(u16(__nvvm_ff_to_e5m2x2_rn(b, a))) | u32(u16(__nvvm_ff_to_e5m2x2_rn(d, c))) << 16;
    } else {
        return u32(u16(__nvvm_ff_to_e4m3x2_rn(b, a))) | u32(u16(__nvvm_ff_to_e4m3x2_rn(d, c))) << 16;
    }
}

/// The values of the four fp8 of a dword, in the target's own encoding, where kHasCvtFromFp8.
HK_FN Vec<float, 4> native_fp8_values(u32 dword);

/// fp4 of eight values, and the values of eight fp4, where kHasCvtFp4.
HK_FN u32 native_fp4(Vec<float, 8> v);
HK_FN Vec<float, 8> native_fp4_values(u32 dword);

/// The larger of two; NaN if one is NaN. Where kHasMaxNan.
HK_FN float max_nan(float a, float b) { return __nvvm_fmax_nan_f(a, b); }

}  // namespace detail

}  // namespace hk
