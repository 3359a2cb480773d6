// mx.h: elements and scales of MX blocks, chosen at run time.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/quant.h>

namespace mx {

using hk::u32;
using hk::u64;

/// Elements per scale.
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
            words[i] = hk::quantize_fp4<kAway>(eight);
        }
        return words;
    }
};

template <hk::QuantType kKind>
struct EncodeFp8 {
    template <int N>
    static constexpr int kBytes = N;

    template <int N>
    HK_FN hk::Vec<u32, N / 4> operator()(hk::Vec<float, N> v) const {
        return hk::quantize_packed<kKind, N>(v);
    }
};

/// Type of the elements; same values as `element_kind` in src/mxfp.rs gives.
enum class Element : u32 {
    Fp4 = 0,      ///< ties to even
    Fp4Away = 1,  ///< ties away from zero
    Fp8 = 2,      ///< e4m3
    E5M2 = 3,
};

/// Calls `f` with the encoder of `element`.
template <class F>
HK_FN void with_encoder(Element element, F f) {
    if (element == Element::Fp4) {
        f(EncodeFp4<false>{});
    } else if (element == Element::Fp4Away) {
        f(EncodeFp4<true>{});
    } else if (element == Element::Fp8) {
        f(EncodeFp8<hk::QuantType::Fp8>{});
    } else {
        f(EncodeFp8<hk::QuantType::Fp8E5M2>{});
    }
}

/// Decodes fp4, two values per byte.
struct DecodeFp4 {
    static constexpr int kPerByte = 2;

    template <int W>
    HK_FN hk::Vec<float, 8 * W> operator()(hk::Vec<u32, W> words) const {
        hk::Vec<float, 8 * W> v;
#pragma unroll
        for (int i = 0; i < W; ++i) {
            const auto eight = hk::dequantize_fp4(words[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[8 * i + j] = eight[j];
        }
        return v;
    }
};

template <hk::QuantType kKind>
struct DecodeFp8 {
    static constexpr int kPerByte = 1;

    template <int W>
    HK_FN hk::Vec<float, 4 * W> operator()(hk::Vec<u32, W> words) const {
        return hk::dequantize_packed<kKind, W>(words);
    }
};

/// Calls `f` with the decoder of `element`.
template <class F>
HK_FN void with_decoder(Element element, F f) {
    if (element == Element::Fp8) {
        f(DecodeFp8<hk::QuantType::Fp8>{});
    } else if (element == Element::E5M2) {
        f(DecodeFp8<hk::QuantType::Fp8E5M2>{});
    } else {
        f(DecodeFp4{});
    }
}

/// Index of a scale in the order of gfx950's scaled MFMA; as `hk_core::quant::shuffled_index`.
HK_FN u64 shuffled_index(u64 row, u32 block, u32 blocks) {
    const u64 padded = (blocks + 7) / 8 * 8;
    return row / 32 * 32 * padded + block / 8 * 256 + block % 4 * 64 + row % 16 * 4 + block % 8 / 4 * 2 + row % 32 / 16;
}

/// Writes the padding of shuffled scales, as thread `thread` of `threads`.
HK_FN void write_padding(hk::GlobalPtr<hk::u8> shuffled, u64 rows, u32 blocks, u64 thread, u64 threads) {
    constexpr hk::u8 kOne = 127;
    const u32 padded = (blocks + 7) / 8 * 8;
    const u64 strips_end = (rows + 31) / 32 * 32, padded_rows = (rows + 255) / 256 * 256;
    // At most seven blocks after each row: one thread per row.
    for (u64 row = thread; row < rows; row += threads) {
        for (u32 block = blocks; block < padded; ++block) shuffled[shuffled_index(row, block, blocks)] = kOne;
    }
    // At most 31 rows of the last strip that holds data.
    for (u64 row = rows; row < strips_end; ++row) {
        for (u64 block = thread; block < padded; block += threads) {
            shuffled[shuffled_index(row, u32(block), blocks)] = kOne;
        }
    }
    // Strips of padding are contiguous.
    const auto fill = [&]<class V>(V ones) {
        for (u64 at = strips_end * padded + thread * sizeof(V); at < padded_rows * padded; at += threads * sizeof(V)) {
            *reinterpret_cast<hk::GlobalPtr<V>>(shuffled + at) = ones;
        }
    };
    if (reinterpret_cast<u64>(shuffled) % hk::kVecBytes == 0) {
        fill(hk::Vec<u32, 4>(kOne * 0x01010101u));
    } else {
        fill(kOne);
    }
}

}  // namespace mx
