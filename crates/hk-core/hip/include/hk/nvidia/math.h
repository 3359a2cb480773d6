// hk/nvidia/math.h: f32 instructions of NVIDIA's GPUs.
#pragma once

#include <hk/arch.h>

namespace hk {

namespace detail {

HK_FN float native_exp2(float v) { return __nvvm_ex2_approx_ftz_f(v); }

HK_FN float native_log2(float v) { return __nvvm_lg2_approx_ftz_f(v); }

HK_FN float native_rcp(float v) { return __nvvm_rcp_approx_ftz_f(v); }

/// v in [-limit, limit]; NaN gives either bound.
HK_FN float clamp(float v, float limit) { return __builtin_fminf(__builtin_fmaxf(v, -limit), limit); }

}  // namespace detail

/// The largest of three in one instruction. Of NaNs and numbers it may be either.
HK_FN float max3(float a, float b, float c) { return __builtin_fmaxf(a, __builtin_fmaxf(b, c)); }

/// 1 / sqrt(x), within 1 ulp on AMD and 2 ulp on sm_90. rsqrt(4^k x) = 2^-k rsqrt(x) exactly.
/// rsqrt(0) = inf, rsqrt(inf) = 0, rsqrt(x < 0) = NaN.
HK_FN float rsqrt(float x) { return __nvvm_rsqrt_approx_f(x); }

}  // namespace hk
