// mma.hip: single matrix instructions on the dwords of lanes: d = w x^T + c, one wave a block.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/matrix.h>
#include <hk/mma.h>
#include <hk/wave.h>

namespace {
using hk::u32;

struct Params {  // same fields, same order as `Params` in tests/tile/mma.rs; words of 32 bits, lane after lane
    hk::Global w, x, c, d, w_scale, x_scale;
    hk::Global places;
};

template <class V>
HK_FN V load(const hk::Global &t, u32 lane) {
    constexpr int kWords = __builtin_vectorelements(V);
    V v;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        v[i] = __builtin_bit_cast(__remove_cvref(decltype(v[i])), t.row<const u32>(0)[lane * kWords + i]);
    }
    return v;
}

template <class V>
HK_FN void store(const hk::Global &t, u32 lane, V v) {
    constexpr int kWords = __builtin_vectorelements(V);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        const auto element = v[i];
        t.row<u32>(0)[lane * kWords + i] = __builtin_bit_cast(u32, element);
    }
}

/// For each lane: row and column of its elements of w and x, n and m of its sums.
template <class Op, int kDim>
HK_FN void write_places(hk::GlobalPtr<u32> to) {
    using W = typename Op::W;
    using X = typename Op::X;
    using Sums = hk::AccLayout<kDim>;
    const u32 lane = hk::lane_id();
    const auto put = [&](u32 a, u32 b) { *to++ = a << 16 | b; };
    to += lane * (W::kElements + X::kElements + Sums::kElements);
    for (u32 i = 0; i < W::kElements; ++i) put(W::row(lane, i), W::col(lane, i));
    for (u32 i = 0; i < X::kElements; ++i) put(X::row(lane, i), X::col(lane, i));
    for (u32 i = 0; i < Sums::kElements; ++i) put(Sums::n(lane, i), Sums::m(lane, i));
}

template <class W, class X, int kDim, int kCols>
HK_FN void plain(const Params &p) {
    using Op = hk::MmaInstruction<W, X, kDim, kCols>;
    if constexpr (Op::kExists) {
        const u32 lane = hk::block_x() * hk::kWaveSize + hk::lane_id();
        const auto w = load<typename Op::W::Words>(p.w, lane);
        const auto x = load<typename Op::X::Words>(p.x, lane);
        store(p.d, lane, Op::mma(w, x, load<typename Op::Acc>(p.c, lane)));
        if (hk::block_x() == 0 && p.places.cols() > 1) write_places<Op, kDim>(p.places.row<u32>(0));
    }
}

/// With scales: byte 1 of w's scale dwords and byte 2 of x's.
template <class W, class X, int kDim, int kCols>
HK_FN void scaled(const Params &p) {
    using Op = hk::MmaInstruction<W, X, kDim, kCols>;
    if constexpr (Op::kExists) {
        const u32 lane = hk::block_x() * hk::kWaveSize + hk::lane_id();
        const auto w = load<typename Op::W::Words>(p.w, lane);
        const auto x = load<typename Op::X::Words>(p.x, lane);
        const u32 w_scale = p.w_scale.row<const u32>(0)[lane], x_scale = p.x_scale.row<const u32>(0)[lane];
        store(p.d, lane, Op::template mma<1, 2>(w, x, load<typename Op::Acc>(p.c, lane), w_scale, x_scale));
    }
}

/// Each byte of one word with each of the other, from `kPair` on: 16 results.
template <int kDim, int kPair = 0>
HK_FN void scale_bytes(const Params &p) {
    using Op = hk::MmaInstruction<hk::Fp4, hk::Fp4, kDim, 2048 / kDim>;
    if constexpr (Op::kExists && kPair < 16) {
        const u32 lane = hk::lane_id();
        const auto w = load<typename Op::W::Words>(p.w, lane);
        const auto x = load<typename Op::X::Words>(p.x, lane);
        const auto c = load<typename Op::Acc>(p.c, lane);
        const u32 w_scale = p.w_scale.row<const u32>(0)[lane], x_scale = p.x_scale.row<const u32>(0)[lane];
        const auto d = Op::template mma<kPair / 4, kPair % 4>(w, x, c, w_scale, x_scale);
        store(p.d, kPair * hk::kWaveSize + lane, d);
        scale_bytes<kDim, kPair + 1>(p);
    }
}

/// Products of mxfp4, by what the target has: d in units of one.
template <int kDim>
HK_FN void mxfp4(const Params &p) {
    using Acc = typename hk::FragMma<hk::bf16, hk::bf16, kDim>::Acc;
    const u32 lane = hk::block_x() * hk::kWaveSize + hk::lane_id();
    const auto block = [&](const hk::Global &codes, const hk::Global &scale) {
        return hk::per_row([&](u32 i) {
            const u32 row = lane * hk::kRowsPerLane + i;
            return hk::MxBlock::from_packed(load<hk::Vec<u32, 4>>(codes, row), scale.row<const u32>(0)[row]);
        });
    };
    const Acc c = load<Acc>(p.c, lane) / hk::kMxAccUnit;
    store(p.d, lane, hk::mma_mxfp4<kDim>(block(p.w, p.w_scale), block(p.x, p.x_scale), c) * hk::kMxAccUnit);
}

/// Products by fragments: `kFrags` of 16 bytes each.
template <class W, class X, int kDim>
HK_FN void by_fragments(const Params &p) {
    using Product = hk::FragMma<W, X, kDim>;
    const u32 lane = hk::block_x() * hk::kWaveSize + hk::lane_id();
    hk::Frag w[Product::kFrags], x[Product::kFrags];
    for (int i = 0; i < Product::kFrags; ++i) {
        w[i] = load<hk::Frag>(p.w, lane * Product::kFrags + i);
        x[i] = load<hk::Frag>(p.x, lane * Product::kFrags + i);
    }
    store(p.d, lane, Product::mma(w, x, load<typename Product::Acc>(p.c, lane)));
}
}  // namespace

#define PLAIN(W, X, dim, cols) HK_ENTRY(mma_##W##_##X##_##dim##x##cols, hk::kWaveSize, plain<hk::W, hk::X, dim, cols>)
#define BOTH_SHAPES(T, cols16, cols32) PLAIN(T, T, 16, cols16) PLAIN(T, T, 32, cols32)
BOTH_SHAPES(f32, 4, 2)
BOTH_SHAPES(Xf32, 8, 4)
BOTH_SHAPES(f16, 16, 8)
BOTH_SHAPES(f16, 32, 16)
BOTH_SHAPES(bf16, 16, 8)
BOTH_SHAPES(bf16, 32, 16)
BOTH_SHAPES(I8, 32, 16)
BOTH_SHAPES(I8, 64, 32)

#define FP8_PAIR(W, X) PLAIN(W, X, 16, 32) PLAIN(W, X, 32, 16)
FP8_PAIR(Fp8, Fp8)
FP8_PAIR(Fp8, Bf8)
FP8_PAIR(Bf8, Fp8)
FP8_PAIR(Bf8, Bf8)

// Any two formats.
#define SCALED(W, X, dim, cols) \
    PLAIN(W, X, dim, cols) HK_ENTRY(scaled_##W##_##X##_##dim##x##cols, hk::kWaveSize, scaled<hk::W, hk::X, dim, cols>)
#define WITH(W, X) SCALED(W, X, 16, 128) SCALED(W, X, 32, 64)
#define WITH_ALL(W) WITH(W, Fp8) WITH(W, Bf8) WITH(W, Fp6) WITH(W, Bf6) WITH(W, Fp4)
WITH_ALL(Fp8)
WITH_ALL(Bf8)
WITH_ALL(Fp6)
WITH_ALL(Bf6)
WITH_ALL(Fp4)
HK_ENTRY(scale_bytes_16, hk::kWaveSize, scale_bytes<16>)
HK_ENTRY(scale_bytes_32, hk::kWaveSize, scale_bytes<32>)

HK_ENTRY(mxfp4_16, hk::kWaveSize, mxfp4<16>)
HK_ENTRY(mxfp4_32, hk::kWaveSize, mxfp4<32>)

#define FRAGMENTS(W, X)                                                               \
    HK_ENTRY(fragments_##W##_##X##_16, hk::kWaveSize, by_fragments<hk::W, hk::X, 16>) \
    HK_ENTRY(fragments_##W##_##X##_32, hk::kWaveSize, by_fragments<hk::W, hk::X, 32>)
FRAGMENTS(f32, f32)
FRAGMENTS(f16, f16)
FRAGMENTS(bf16, bf16)
FRAGMENTS(I8, I8)
FRAGMENTS(Fp8, Fp8)
FRAGMENTS(Fp8, Bf8)
FRAGMENTS(Bf8, Fp8)
FRAGMENTS(Bf8, Bf8)
