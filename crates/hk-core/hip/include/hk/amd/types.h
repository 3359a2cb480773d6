// hk/amd/types.h: conversions of AMD targets.
#pragma once

namespace hk {

/// Exact: f32 holds every bf16 and f16, subnormals, infinities and NaNs included.
template <class T, int N>
HK_FN Vec<float, N> widen(Vec<T, N> v) {
    return __builtin_convertvector(v, Vec<float, N>);
}

namespace detail {

// Packs the high 16 bits of two dwords.
HK_FN u32 high_halves(u32 low, u32 high) { return __builtin_amdgcn_perm(high, low, 0x07060302u); }

/// Packs the low, or the high, 16 bits of two dwords.
struct SelectHalf {
    u32 selector;
    HK_FN explicit SelectHalf(bool high) : selector(high ? 0x07060302u : 0x05040100u) {}
    HK_FN u32 operator()(u32 first, u32 second) const { return __builtin_amdgcn_perm(second, first, selector); }
};

}  // namespace detail

/// The largest element; of NaNs and numbers, a number.
template <class T, int N>
HK_FN float largest(Vec<T, N> v) {
    // No maximum is a signalling NaN.
    return __builtin_reduce_max(__builtin_elementwise_canonicalize(widen<T, N>(v)));
}

/// Values as `narrow` converts them to T.
template <class T, int N>
HK_FN Vec<float, N> before_narrow(Vec<float, N> v) {
    // LLVM 22 merges a product and its rounding to f16 into one instruction that adds 0, which loses the sign of a zero: it must
    // not see the product.
    if constexpr (__is_same(T, f16)) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float element = v[i];
            opaque(element);
            v[i] = element;
        }
    }
    return v;
}

}  // namespace hk
