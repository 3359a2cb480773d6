// hk/nvidia/types.h: conversions of NVIDIA's GPUs.
#pragma once

namespace hk {

/// Exact: f32 holds every bf16 and f16, subnormals, infinities and NaNs included.
template <class T, int N>
HK_FN Vec<float, N> widen(Vec<T, N> v) {
    // From dwords: separate 16-bit values would take a register each while live, and an instruction more.
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        const auto pairs = __builtin_bit_cast(Vec<u32, N / 2>, v);
        Vec<float, N> out;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            float low, high;
            if constexpr (__is_same(T, bf16)) {
                low = __builtin_bit_cast(float, pairs[i] << 16);
                high = __builtin_bit_cast(float, pairs[i] & 0xffff0000u);
            } else {
                asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, "
                    "high;\n\t}"
                    : "=f"(low), "=f"(high)
                    : "r"(pairs[i]));
            }
            out[2 * i] = low;
            out[2 * i + 1] = high;
        }
        return out;
    }
    return __builtin_convertvector(v, Vec<float, N>);
}

namespace detail {

/// Where something is in LDS, as PTX asks for it.
HK_FN u32 lds_address(const void *at) {
    return u32(reinterpret_cast<__UINTPTR_TYPE__>((__attribute__((address_space(3))) const void *)at));
}

// Packs the high 16 bits of two dwords.
HK_FN u32 high_halves(u32 low, u32 high) { return __nvvm_prmt(low, high, 0x7632u); }

/// Packs the low, or the high, 16 bits of two dwords.
struct SelectHalf {
    u32 selector;
    HK_FN explicit SelectHalf(bool high) : selector(high ? 0x7632u : 0x5410u) {}
    HK_FN u32 operator()(u32 first, u32 second) const { return __nvvm_prmt(first, second, selector); }
};

}  // namespace detail

/// The largest element; of NaNs and numbers, a number.
template <class T, int N>
HK_FN float largest(Vec<T, N> v) {
    // Two 16-bit elements per instruction. Signalling NaNs are ignored, too.
    if constexpr (sizeof(T) == 2) {
        Vec<T, 2> most = {v[0], v[1]};
#pragma unroll
        for (int i = 2; i < N; i += 2) most = __builtin_elementwise_max(most, Vec<T, 2>{v[i], v[i + 1]});
        const auto wide = widen<T, 2>(most);
        return __builtin_fmaxf(wide[0], wide[1]);
    } else {
        return __builtin_reduce_max(v);
    }
}

/// Values as `narrow` converts them to T.
template <class T, int N>
HK_FN Vec<float, N> before_narrow(Vec<float, N> v) {
    return v;
}

}  // namespace hk
