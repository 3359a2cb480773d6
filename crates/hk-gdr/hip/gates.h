// gates.h: the gates of the gated delta rule.
#pragma once

#include <hk/global.h>
#include <hk/math.h>
#include <hk/types.h>

namespace gdr {

/// Of the sum of squares of a normalised row.
constexpr float kNormEps = 1e-6f;

/// e^g of a logarithm, which is not positive; NaN of anything else.
HK_FN float decay_of(float g) {
    const float decay = hk::exp(g);
    return g <= 0.0f ? decay : __builtin_nanf("");
}

/// ln(1 + u) for u from 0 to 1, within 2 ulp or so: 2 artanh(u / (2 + u)), whose argument is at most 1/3.
HK_FN float log1p_unit(float u) {
    constexpr float kOdd[] = {2.0f, 2.0f / 3, 2.0f / 5, 2.0f / 7, 2.0f / 9, 2.0f / 11, 2.0f / 13, 2.0f / 15};
    const float s = hk::divide(u, 2.0f + u);
    return s * hk::detail::polynomial(s * s, kOdd);
}

/// ln(1 + e^(beta x)) / beta; x itself where beta x is above the threshold.
HK_FN float softplus(float x, float beta, float threshold) {
    const float y = beta * x;
    const float plus = hk::divide(log1p_unit(hk::exp(-__builtin_fabsf(y))) + (y > 0.0f ? y : 0.0f), beta);
    return y > threshold ? x : plus;
}

/// g = -e^a_log softplus(x)
HK_FN float log_decay(float x, float a_log, float beta, float threshold) {
    return -hk::exp(a_log) * softplus(x, beta, threshold);
}

}  // namespace gdr
