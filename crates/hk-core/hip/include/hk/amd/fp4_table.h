// hk/amd/fp4_table.h: a table of fp4 values of AMD targets.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Dequantizes fp4 to bf16, times a power of two: exact if the results are in bf16's range.
class Fp4Table {
    // Low and high bytes of the eight magnitudes: v_perm_b32 looks up four fp4 at a time.
    u32 low_[2], high_[2];

    /// Low and high bytes of the values of every other fp4.
    HK_FN void look_up(u32 packed, u32 &lower, u32 &upper) const {
        constexpr u32 kMagnitudes = 0x07070707u, kSigns = 0x80808080u;
        lower = __builtin_amdgcn_perm(low_[1], low_[0], packed & kMagnitudes);
        upper = __builtin_amdgcn_perm(high_[1], high_[0], packed & kMagnitudes) | (packed << 4 & kSigns);
    }

  public:
    HK_FN explicit Fp4Table(float scale) {
        const Vec<float, 8> values = dequantize_fp4(0x76543210u) * scale;
        const Vec<u32, 4> pairs = __builtin_bit_cast(Vec<u32, 4>, detail::exact_bf16<8>(values));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low_[i] = __builtin_amdgcn_perm(pairs[2 * i + 1], pairs[2 * i], 0x06040200u);
            high_[i] = __builtin_amdgcn_perm(pairs[2 * i + 1], pairs[2 * i], 0x07050301u);
        }
    }

    /// Dequantizes eight fp4 to the order 0, 2, 4, 6, 1, 3, 5, 7.
    HK_FN Vec<bf16, 8> even_then_odd(u32 packed) const {
        Vec<u32, 4> pairs;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            u32 lower, upper;
            look_up(packed >> (4 * odd), lower, upper);
            pairs[2 * odd] = __builtin_amdgcn_perm(upper, lower, 0x05010400u);
            pairs[2 * odd + 1] = __builtin_amdgcn_perm(upper, lower, 0x07030602u);
        }
        return __builtin_bit_cast(Vec<bf16, 8>, pairs);
    }

    /// Dequantizes eight fp4, in order.
    HK_FN Vec<bf16, 8> in_order(u32 packed) const {
        // Elements of even, then of odd index.
        const Vec<u32, 4> split = __builtin_bit_cast(Vec<u32, 4>, even_then_odd(packed));
        Vec<u32, 4> pairs;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pairs[2 * i] = __builtin_amdgcn_perm(split[2 + i], split[i], 0x05040100u);
            pairs[2 * i + 1] = __builtin_amdgcn_perm(split[2 + i], split[i], 0x07060302u);
        }
        return __builtin_bit_cast(Vec<bf16, 8>, pairs);
    }
};

}  // namespace hk
