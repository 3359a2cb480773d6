// math.h: f32 functions with stated error bounds. None flushes subnormals.
#pragma once

#include <hk/arch.h>

namespace hk {

/// 1 / sqrt(x), within 1 ulp on AMD and 2 ulp on sm_90. rsqrt(4^k x) = 2^-k rsqrt(x) exactly.
/// rsqrt(0) = inf, rsqrt(inf) = 0, rsqrt(x < 0) = NaN.
HK_FN float rsqrt(float x) {
#if defined(HK_AMD)
    // v_rsq_f32 takes subnormals for zero: scale them by an even power of two, exactly, and back.
    const bool subnormal = x < 0x1p-126f;
    const float root = __builtin_amdgcn_rsqf(x * (subnormal ? 0x1p+24f : 1.0f));
    return root * (subnormal ? 0x1p+12f : 1.0f);
#else
    return __nvvm_rsqrt_approx_f(x);
#endif
}

}  // namespace hk
