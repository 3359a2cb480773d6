// hk/amd/math.h: f32 instructions of AMD targets.
#pragma once

#include <hk/arch.h>

namespace hk {

namespace detail {

HK_FN float native_exp2(float v) { return __builtin_amdgcn_exp2f(v); }

HK_FN float native_log2(float v) { return __builtin_amdgcn_logf(v); }

HK_FN float native_rcp(float v) { return __builtin_amdgcn_rcpf(v); }

/// v in [-limit, limit]; NaN gives either bound.
HK_FN float clamp(float v, float limit) { return __builtin_amdgcn_fmed3f(v, -limit, limit); }

}  // namespace detail

/// The largest of three in one instruction. Of NaNs and numbers it may be either. No operand is the result of an MFMA that no other
/// instruction has read: the compiler adds no wait states before inline assembly.
HK_FN float max3(float a, float b, float c) {
    float out;
    // Not a builtin: that would quiet each operand first.
    asm("v_max3_f32 %0, %1, %2, %3" : "=v"(out) : "v"(a), "v"(b), "v"(c));
    return out;
}

/// 1 / sqrt(x), within 1 ulp on AMD and 2 ulp on sm_90. rsqrt(4^k x) = 2^-k rsqrt(x) exactly.
/// rsqrt(0) = inf, rsqrt(inf) = 0, rsqrt(x < 0) = NaN.
HK_FN float rsqrt(float x) {
    // v_rsq_f32 takes subnormals for zero: scale them by an even power of two, exactly, and back.
    const bool subnormal = x < 0x1p-126f;
    const float root = __builtin_amdgcn_rsqf(x * (subnormal ? 0x1p+24f : 1.0f));
    return root * (subnormal ? 0x1p+12f : 1.0f);
}

}  // namespace hk
