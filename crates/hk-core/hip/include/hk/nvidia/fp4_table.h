// hk/nvidia/fp4_table.h: a table of fp4 values of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Dequantizes fp4 to bf16, times a power of two: exact if the results are in bf16's range.
class Fp4Table {
    float scale_;

  public:
    HK_FN explicit Fp4Table(float scale) { scale_ = scale; }

    /// Dequantizes eight fp4 to the order 0, 2, 4, 6, 1, 3, 5, 7.
    HK_FN Vec<bf16, 8> even_then_odd(u32 packed) const {
        return detail::exact_bf16<8>(detail::even_then_odd(dequantize_fp4(packed) * scale_));
    }

    /// Dequantizes eight fp4, in order.
    HK_FN Vec<bf16, 8> in_order(u32 packed) const { return detail::exact_bf16<8>(dequantize_fp4(packed) * scale_); }
};

}  // namespace hk
