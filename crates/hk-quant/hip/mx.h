// mx.h: elements and scales of MX blocks, chosen at run time.
#pragma once

#include <hk/arch.h>
#include <hk/quant.h>

namespace mx {

using hk::u32;
using hk::u64;

/// Elements that share a scale.
inline constexpr u32 kBlock = 32;

template <bool kAway>
struct EncodeFp4 {
    template <int N>
    static constexpr int kBytes = N / 2;

    template <int N>
    HK_FN hk::Vec<u32, N / 8> operator()(hk::Vec<float, N> v) const {
        hk::Vec<u32, N / 8> words;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            hk::Vec<float, 8> eight;
#pragma unroll
            for (int j = 0; j < 8; ++j) eight[j] = v[8 * i + j];
            words[i] = hk::to_fp4<kAway>(eight);
        }
        return words;
    }
};

template <hk::CodeKind kKind>
struct EncodeFp8 {
    template <int N>
    static constexpr int kBytes = N;

    template <int N>
    HK_FN hk::Vec<u32, N / 4> operator()(hk::Vec<float, N> v) const {
        return hk::to_codes<kKind, N>(v);
    }
};

/// What elements are; same values as `ElementKind` in src/mx_quant.rs.
enum class Element : u32 {
    Fp4 = 0,      ///< ties to even
    Fp4Away = 1,  ///< ties away from zero
    Fp8 = 2,      ///< e4m3
    E5M2 = 3,
};

/// Calls `f` with what encodes such elements.
template <class F>
HK_FN void with_encoder(Element element, F f) {
    if (element == Element::Fp4) {
        f(EncodeFp4<false>{});
    } else if (element == Element::Fp4Away) {
        f(EncodeFp4<true>{});
    } else if (element == Element::Fp8) {
        f(EncodeFp8<hk::CodeKind::Fp8>{});
    } else {
        f(EncodeFp8<hk::CodeKind::Fp8E5M2>{});
    }
}

/// Where gfx950's matrix instructions have the scale of a row's block; see `hk_core::quant::shuffled_index`.
HK_FN u64 shuffled_index(u64 row, u32 block, u32 blocks) {
    const u64 padded = (blocks + 7) / 8 * 8;
    return row / 32 * 32 * padded + block / 8 * 256 + block % 4 * 64 + row % 16 * 4 + block % 8 / 4 * 2 + row % 32 / 16;
}

}  // namespace mx
