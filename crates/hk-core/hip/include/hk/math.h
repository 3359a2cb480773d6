// math.h: f32 functions with stated error bounds. None flushes subnormals, of arguments or results, but those whose
// names end in _fast.
//
// Each takes a float or a Vec<float, N>; on vectors, all but special functions are packed instructions of two
// elements each. Bounds are in ulp of the result. The first holds for special functions (v_exp_f32, v_log_f32, v_rcp_f32,
// v_rsq_f32) within 1 ulp, as the hardware's are; the one in parentheses is measured with these rounded correctly, as the
// emulator's are (crates/hk-core/tests/math.rs). `n + m`: n VALU instructions for a float and m special functions, which
// take four times as long on gfx942 and twice as long on gfx950. On sm_90 special functions err by up to 2 ulp.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>
#include HK_TARGET_HEADER(math.h)

namespace hk {

namespace detail {

/// `f` of a float, or of each element of a vector.
template <class F, class Op>
HK_FN F each(F v, Op op) {
    if constexpr (__is_same(F, float)) {
        return op(v);
    } else {
        F out;
#pragma unroll
        for (unsigned i = 0; i < sizeof(F) / sizeof(float); ++i) out[i] = op(float(v[i]));
        return out;
    }
}

template <class F>
HK_FN F fma(F a, F b, F c) {
    return __builtin_elementwise_fma(a, b, c);
}

/// c[0] + c[1] x + c[2] x^2 + ..
template <class F, unsigned long N>
HK_FN F polynomial(F x, const float (&c)[N]) {
    F sum = F(c[N - 1]);
#pragma unroll
    for (int i = int(N) - 2; i >= 0; --i) sum = fma(sum, x, F(c[i]));
    return sum;
}

}  // namespace detail

/// 2^x in one instruction, within 1 ulp; exact at integers. Results below 2^-126 are 0.
template <class F>
HK_FN F exp2_fast(F x) {
    return detail::each(x, [](float v) { return detail::native_exp2(v); });
}

/// log2(x) in one instruction, within 1 ulp. Subnormals are 0.
template <class F>
HK_FN F log2_fast(F x) {
    return detail::each(x, [](float v) { return detail::native_log2(v); });
}

/// 1 / x in one instruction, within 1 ulp. Subnormals, and results that are, are 0. rcp_fast(0) = inf.
template <class F>
HK_FN F rcp_fast(F x) {
    return detail::each(x, [](float v) { return detail::native_rcp(v); });
}

/// 1 / x for x from 2^-100 to 2^100, and NaN of NaN: within 2^-22 ulp of a tie it may be rounded either way. 2 + 1.
HK_FN float reciprocal(float x) {
    const float first = rcp_fast(x);
    return __builtin_fmaf(first, __builtin_fmaf(-x, first, 1.0f), first);
}

/// a / b, correctly rounded: 10 + 1.
template <class F>
HK_FN F divide(F a, F b) {
    return a / b;
}

/// Division of many values by one number. Quotients are rounded correctly; but if they are beyond 2^24 or below 2^-20
/// in magnitude, only that range and their sign are certain. 7 for each value, where `/` takes 10 + 1.
class DivideBy {
    float divisor_, inverse_;
    bool near_;  // so that no product below leaves the range in which it is exact

  public:
    HK_FN explicit DivideBy(float divisor)
        : divisor_(divisor), inverse_(1.0f / divisor), near_(divisor >= 0x1p-80f && divisor <= 0x1p+80f) {}

    template <int N>
    HK_FN Vec<float, N> operator()(Vec<float, N> v) const {
        if (!near_) return v / divisor_;
        Vec<float, N> out;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const Vec<float, 2> two = near(Vec<float, 2>{v[i], v[i + 1]});
#pragma unroll
            for (int j = 0; j < 2; ++j) out[i + j] = two[j];
            sched_barrier();  // else the temporaries of all elements would be live at once
        }
        return out;
    }

  private:
    template <int N>
    HK_FN Vec<float, N> near(Vec<float, N> v) const {
        using F = Vec<float, N>;
        // Remainders are exact. The first quotient errs by less than 2 ulp, the second is within 1 ulp of the exact
        // quotient, the third is its rounding (Markstein 1990). The order of operands keeps the sign of a zero.
        const F first = v * inverse_;
        const auto better = [&](F quotient) {
            return detail::fma(-detail::fma(quotient, F(divisor_), -v), F(inverse_), quotient);
        };
        const F last = better(better(first));
        F out;
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = __builtin_fabsf(first[i]) < 0x1p+24f ? last[i] : first[i];
        return out;
    }
};

/// 2^x, within 1.5 ulp (0.75); exact at integers. 5 + 1.
template <class F>
HK_FN F exp2(F x) {
    return detail::each(x, [](float v) {
        const bool small = v < -126.0f;
        return exp2_fast(v + (small ? 64.0f : 0.0f)) * (small ? 0x1p-64f : 1.0f);
    });
}

namespace detail {

/// x with NaN and what lies beyond 2^-15 replaced by something within.
template <class F>
HK_FN F as_correction(F x) {
    return each(x, [](float v) { return clamp(v, 0x1p-15f); });
}

/// exp(x) as root * (root * factor), which is in range where root alone would be subnormal: the root is
/// 2^(x log2(e) / 2), and the factor, close to 1, makes up for the rounding of that exponent.
template <class F>
struct Exp {
    F root, factor;

    HK_FN explicit Exp(F x) : Exp(x, F(-0.0f)) {}

    /// exp(x + rest) for a rest within rounding of x.
    HK_FN Exp(F x, F rest) {
        const F half = x * 0x1.715476p-1f;  // log2(e) / 2
        // Less 2 ln(2) half, in two parts. NaN for an infinite x.
        const F off = fma(half, F(0x1.05c61p-28f), fma(half, F(-0x1.62e43p+0f), x) + rest);
        factor = as_correction(off) + 1.0f;
        root = exp2_fast(half);
    }
};

}  // namespace detail

/// e^x, within 6 ulp (3.5). 7 + 1.
template <class F>
HK_FN F exp(F x) {
    const detail::Exp<F> e(x);
    return e.root * (e.root * e.factor);
}

/// log2(x), within 1.5 ulp (0.75). log2(0) = -inf, log2(x < 0) = NaN. 5 + 1.
template <class F>
HK_FN F log2(F x) {
    return detail::each(x, [](float v) {
        const bool subnormal = v < 0x1p-126f;
        return log2_fast(v * (subnormal ? 0x1p+32f : 1.0f)) - (subnormal ? 32.0f : 0.0f);
    });
}

/// ln(x), within 3 ulp (2). log(0) = -inf, log(x < 0) = NaN. 6 + 1.
template <class F>
HK_FN F log(F x) {
    return log2(x) * 0x1.62e43p-1f;
}

/// ln(x), within 3 ulp (2), as `log`, but subnormals are 0. 1 + 1.
template <class F>
HK_FN F log_fast(F x) {
    return log2_fast(x) * 0x1.62e43p-1f;
}

/// 1 / (1 + e^-x), within 8 ulp (4.5); 0 below 2^-150. 9 + 2.
template <class F>
HK_FN F sigmoid(F x) {
    // Scaled by 2^-24, the denominator is finite until the result is zero.
    const detail::Exp<F> e(-x);
    const F denominator = detail::fma(e.root * e.factor, e.root * 0x1p-24f, F(0x1p-24f));
    return rcp_fast(denominator) * 0x1p-24f;
}

/// Within 4 ulp (2). tanh(-x) = -tanh(x) exactly. 12 + 2.
template <class F>
HK_FN F tanh(F x) {
    // Where 1 minus something would leave little, x + x^3 P(x^2), relatively within 2^-24.7.
    constexpr float kSmall[] = {-0.3333294664f, 0.1332072508f, -0.05267181464f, 0.01643758275f};
    const F sq = x * x;
    const F small = detail::fma(x * sq, detail::polynomial(sq, kSmall), x);
    const F a = __builtin_elementwise_abs(x);
    const F large = detail::fma(F(-2.0f), rcp_fast(exp2_fast(a * 0x1.715476p+1f) + 1.0f), F(1.0f));
    return __builtin_elementwise_copysign(a < 0.55f ? small : large, x);
}

namespace detail {

/// erfc(|z|) where minus * x = -z^2 and scale * |x| = 31/64 |z|; relatively accurate however small it is.
template <class F>
HK_FN F erfc_of_abs(F minus, F x, float scale) {
    // t P(t) with t = 1 / (1 + 31/64 z) is exp(z^2) erfc(z), relatively within 2^-25.
    constexpr float kScaled[] = {0.273245449193f,  0.274103565549f,   0.232700938523f,
                                 0.226105614019f,  -0.0796924506077f, 0.38557396f,
                                 -0.541008752651f, 0.283085681054f,   -0.0541139774281f};
    const F sq = minus * x;
    const Exp<F> e(sq, fma(minus, x, -sq));
    const F t = rcp_fast(fma(__builtin_elementwise_abs(x), F(scale), F(1.0f)));
    return (e.root * e.factor) * (e.root * (t * polynomial(t, kScaled)));
}

}  // namespace detail

/// 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x, within 4 ulp (2). erf(-x) = -erf(x) exactly. 30 + 2.
template <class F>
HK_FN F erf(F x) {
    constexpr float kSmall[] = {0.1283791538f,   -0.3761252327f, 0.112821408f,
                                -0.02677890841f, 0.00501196214f, -0.0006090356768f};
    const F small = detail::fma(x, detail::polynomial(x * x, kSmall), x);  // relatively within 2^-26
    const F a = __builtin_elementwise_abs(x);
    const F large = 1.0f - detail::erfc_of_abs(-x, x, 0x1.fp-2f);
    return __builtin_elementwise_copysign(a < 0.9f ? small : large, x);
}

/// 1 - erf(x), within 11 ulp (7.5): relatively accurate however small it is. 23 + 2.
template <class F>
HK_FN F erfc(F x) {
    const F tail = detail::erfc_of_abs(-x, x, 0x1.fp-2f);
    return x < 0.0f ? 2.0f - tail : tail;
}

/// The normal distribution's share below x, erfc(-x / sqrt(2)) / 2, within 11 ulp (7.5): relatively accurate however
/// small it is. 24 + 2.
template <class F>
HK_FN F normal_cdf(F x) {
    const F tail = detail::erfc_of_abs(-0.5f * x, x, 0x1.5eb998p-2f);  // 31/64 / sqrt(2)
    return x < 0.0f ? 0.5f * tail : detail::fma(F(-0.5f), tail, F(1.0f));
}

}  // namespace hk
