// activate.h: activation functions of f32, floats or vectors of them. NaN gives NaN. Bounds and instruction counts of
// what they are made of: math.h.
#pragma once

#include <hk/math.h>

namespace hk {

/// Which function; the same values as the enumerations of the host.
enum class Activation : u32 { Silu = 0, Gelu = 1, GeluTanh = 2, Relu = 3, Tanh = 4 };

/// x / (1 + e^-x), relatively accurate down to the smallest normal result. -inf gives NaN.
template <class F>
HK_FN F silu(F x) {
    return x * sigmoid(x);
}

/// x times the normal distribution's share below x, relatively accurate down to the smallest normal result.
/// -inf gives NaN.
template <class F>
HK_FN F gelu(F x) {
    return x * normal_cdf(x);
}

/// x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh(u)) / 2 without its cancellation.
/// -inf gives NaN.
template <class F>
HK_FN F gelu_tanh(F x) {
    constexpr float kLinear = 1.5957691216f;  // 2 sqrt(2 / pi)
    return x * sigmoid(x * detail::fma(x * x, F(kLinear * 0.044715f), F(kLinear)));
}

/// max(x, 0).
template <class F>
HK_FN F relu(F x) {
    return x < 0.0f ? F(0.0f) : x;
}

/// Calls `f` with the function.
template <class F>
HK_FN void with_activation(Activation which, F f) {
    switch (which) {
        case Activation::Silu:
            return f([](auto x) { return silu(x); });
        case Activation::Gelu:
            return f([](auto x) { return gelu(x); });
        case Activation::GeluTanh:
            return f([](auto x) { return gelu_tanh(x); });
        case Activation::Relu:
            return f([](auto x) { return relu(x); });
        case Activation::Tanh:
            return f([](auto x) { return tanh(x); });
    }
    __builtin_unreachable();
}

}  // namespace hk
