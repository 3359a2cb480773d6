// quant.hip: the conversions of hk/quant.h, each thread on a few values.
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/quant.h>

namespace {
struct Params {  // same fields, same order as `Params` in tests/quant.rs
    hk::Global x, y;
    hk::QuantFormat format;
    hk::BlockRule rule;
    hk::u32 pad;
};

using hk::u32;

HK_FN u32 thread() { return hk::block_x() * 64 + hk::thread_x(); }

template <class T, int N>
HK_FN hk::Vec<T, N> load(const Params &p) {
    hk::Vec<T, N> v;
    for (int i = 0; i < N; ++i) v[i] = p.x.row<T>(0)[thread() * N + i];
    return v;
}

template <class T, int N>
HK_FN void store(const Params &p, hk::Vec<T, N> v) {
    for (int i = 0; i < N; ++i) p.y.row<T>(0)[thread() * N + i] = v[i];
}

HK_FN void encode(const Params &p) {
    const auto v = load<float, 4>(p);
    if (p.format.quant_type == hk::QuantType::Fp8E5M2) {
        store(p, hk::quantize_packed<hk::QuantType::Fp8E5M2>(v));
    } else {
        p.format.with_type([&](auto kind) { store(p, hk::quantize_packed<decltype(kind)::value>(v)); });
    }
}

HK_FN void decode(const Params &p) {
    const auto words = load<u32, 1>(p);
    if (p.format.quant_type == hk::QuantType::Fp8E5M2) {
        store(p, hk::dequantize_packed<hk::QuantType::Fp8E5M2>(words));
    } else {
        p.format.with_type([&](auto kind) { store(p, hk::dequantize_packed<decltype(kind)::value>(words)); });
    }
}

template <bool kAway>
HK_FN void encode_fp4(const Params &p) {
    store(p, hk::Vec<u32, 1>(hk::quantize_fp4<kAway>(load<float, 8>(p))));
}

HK_FN void decode_fp4(const Params &p) { store(p, hk::dequantize_fp4(load<u32, 1>(p)[0])); }

HK_FN void round_fp4(const Params &p) { store(p, hk::round_to_fp4(load<float, 8>(p))); }

// Blocks of codes, with a scale of a quarter of the one that `rule.least` stands for, in their own order.
HK_FN void decode_fp4_block(const Params &p) {
    hk::Vec<hk::bf16, 8> v[4];
    hk::dequantize_fp4_block(load<u32, 4>(p), hk::e8m0_value(p.rule.least) * 0.25f, v);
    constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    hk::Vec<float, 32> values;
#pragma unroll
    for (int i = 0; i < 32; ++i) values[i / 8 * 8 + kOrder[i % 8]] = float(v[i / 8][i % 8]);
    store(p, values);
}

// Of each magnitude the code of its scale, of that the value and the reciprocal.
HK_FN void block_scale(const Params &p) {
    hk::AbsMax max;
    max.add(load<float, 1>(p));
    const u32 code = p.rule.code(max.bits);
    store(p, hk::Vec<float, 3>{float(code), hk::e8m0_value(code), hk::e8m0_inverse(code)});
}

// Of each pair the largest finite magnitude, and the scales of it.
HK_FN void linear_scale(const Params &p) {
    hk::FiniteMax max;
    max.add(load<float, 2>(p));
    const float amax = hk::FiniteMax::value(max.top);
    const float scale = hk::linear_scale(amax, p.format.qmax);
    store(p, hk::Vec<float, 4>{amax, scale, 1.0f / scale, hk::group_scale(amax, p.format.qmax)});
}
}  // namespace

HK_ENTRY(quant_encode, 64, encode)
HK_ENTRY(quant_decode, 64, decode)
HK_ENTRY(quant_encode_fp4_even, 64, encode_fp4<false>)
HK_ENTRY(quant_encode_fp4_away, 64, encode_fp4<true>)
HK_ENTRY(quant_decode_fp4, 64, decode_fp4)
HK_ENTRY(quant_round_fp4, 64, round_fp4)
HK_ENTRY(quant_decode_fp4_block, 64, decode_fp4_block)
HK_ENTRY(quant_block_scale, 64, block_scale)
HK_ENTRY(quant_linear_scale, 64, linear_scale)
