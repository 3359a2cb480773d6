// hk/nvidia/quant.h: conversions of quantized types of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

namespace detail {

HK_FN u32 bits_of(float v) { return __builtin_bit_cast(u32, v); }

/// The low bytes of four dwords, packed.
HK_FN u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __nvvm_prmt(__nvvm_prmt(a, b, 0x0040), __nvvm_prmt(c, d, 0x0040), 0x5410);
}

/// Transposes a 4 x 4 matrix of bytes, a dword per row.
HK_FN Vec<u32, 4> transpose_bytes(Vec<u32, 4> w) {
    const u32 first = __nvvm_prmt(w[0], w[1], 0x5140), second = __nvvm_prmt(w[2], w[3], 0x5140);
    const u32 third = __nvvm_prmt(w[0], w[1], 0x7362), fourth = __nvvm_prmt(w[2], w[3], 0x7362);
    return {__nvvm_prmt(first, second, 0x5410), __nvvm_prmt(first, second, 0x7632), __nvvm_prmt(third, fourth, 0x5410),
            __nvvm_prmt(third, fourth, 0x7632)};
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
HK_FN Vec<float, 4> native_fp8_values(u32 dword) {
    const auto low = __nvvm_e4m3x2_to_f16x2_rn(short(dword)), high = __nvvm_e4m3x2_to_f16x2_rn(short(dword >> 16));
    return {float(low[0]), float(low[1]), float(high[0]), float(high[1])};
}

/// Two fp8 of the target's own encoding as f16, exact.
HK_FN u32 native_fp8_as_f16(u32 pair) { return __builtin_bit_cast(u32, __nvvm_e4m3x2_to_f16x2_rn(short(pair))); }

/// fp4 of eight values, and the values of eight fp4, where kHasCvtFp4.
HK_FN u32 native_fp4(Vec<float, 8> v);
HK_FN Vec<float, 8> native_fp4_values(u32 dword);

/// The larger of two; NaN if one is NaN. Where kHasMaxNan.
HK_FN float max_nan(float a, float b) { return __nvvm_fmax_nan_f(a, b); }

}  // namespace detail

}  // namespace hk
