// trig.h: sine and cosine of angles in radians.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Sine and cosine of each angle, both within 9.4e-8 of the true value up to 1e5 radians and within 1.2e-7 up to 2^30
/// (1.07e9); NaN beyond, for infinities and for NaN. The bounds are measured over all floats.
template <int N>
HK_FN void sincos(Vec<float, N> x, Vec<float, N> &sine, Vec<float, N> &cosine) {
    constexpr double kPiHalf = 0x1.921fb54442d18p+0;     // pi / 2, 6.1e-17 below it
    constexpr double kPerRadian = 0x1.45f306dc9c883p-1;  // 2 / pi
    constexpr double kRound = 0x1.8p+52;  // a sum with it is rounded to an integer, in its lowest bits
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const bool in_domain = __builtin_fabsf(x[i]) <= 0x1p+30f;
        const double wide = in_domain ? x[i] : 0.0f;
        // x = turns * pi / 2 + r with |r| <= pi / 4: the product is exact within the fma, and f64 costs what f32 does.
        const double shifted = __builtin_fma(wide, kPerRadian, kRound);
        const double turns = shifted - kRound;
        const u32 quadrant = u32(__builtin_bit_cast(u64, shifted));
        const float r = in_domain ? float(__builtin_fma(-turns, kPiHalf, wide)) : __builtin_nanf("");
        // Minimax polynomials on [-pi / 4, pi / 4]: sin r within 1.8e-9, cos r within 1e-10 before rounding.
        const float z = r * r;
        const float s = __builtin_fmaf(
            r * z, __builtin_fmaf(z, __builtin_fmaf(z, -0x1.98d8cap-13f, 0x1.1105aep-7f), -0x1.55554p-3f), r);
        const float c = __builtin_fmaf(
            z * z, __builtin_fmaf(z, __builtin_fmaf(z, 0x1.9a00fep-16f, -0x1.6c0c88p-10f), 0x1.55554ap-5f),
            __builtin_fmaf(-0.5f, z, 1.0f));
        const bool swap = quadrant & 1;
        sine[i] = __builtin_bit_cast(float, __builtin_bit_cast(u32, swap ? c : s) ^ ((quadrant & 2) << 30));
        cosine[i] = __builtin_bit_cast(float, __builtin_bit_cast(u32, swap ? s : c) ^ (((quadrant + 1) & 2) << 30));
    }
}

}  // namespace hk
