// decoded.h: products of 16-bit floats by codes, by tiles.
//   fp4:   y[m, n] = epilogue(sum over k of x[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])
//   bytes: y[m, n] = epilogue(sum over groups g of K of w_scale[n / N', g] sum over k in g of x[m, k] w[n, k])
//   The codes are decoded once by a block, on their way to LDS; from there on they are 16-bit floats: fp4 with its scale as bf16,
//   which holds both, bytes as the type of x.
#pragma once

#include <hk/blocks.h>

#include "blockscale.h"
#include "mx.h"

namespace gemm {

/// Decodes fp4 codes with scales of 32 columns, those of a stage.
class Fp4Decode {
public:
    using Half = hk::bf16;  // what codes become

private:
    hk::Window scales_;
    const MxScale &scale_;
    u32 first_, rows_, offset_ = 0;

public:
    using Extra = u32;

    HK_FN Fp4Decode(const MixedParams &p, const Work &work, u32 first_row)
        : scales_(p.w_mx.first(work.matrix), hk::Window::kBeyond - 1), scale_(p.w_mx), first_(first_row), rows_(p.w.rows) {}

    HK_FN void of_row(u32 row) { offset_ = scale_.offset(first_ + row, rows_); }
    HK_FN Extra load(u32 from, u32 end) const {
        constexpr u32 kBlock = 16;  // bytes
        const u32 past = (end - 1u - from) & hk::Window::kBeyond;
        return scales_.load<u8>(offset_ | past, MxScale::of_block(from / kBlock, scale_.block));
    }
    template <int kChunks>
    HK_FN static void decode(Vec<u32, kChunks> codes, Extra scale, Vec<u32, 4> (&halves)[kChunks]) {
        Vec<hk::bf16, 8> values[kChunks];
        hk::decoded_fp4<kChunks>(codes, scale, values);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) halves[i] = __builtin_bit_cast(Vec<u32, 4>, values[i]);
    }
};

/// Decodes codes of bytes to T.
template <class Code, class T>
struct ByteDecode {
    using Half = T;
    struct Extra {};

    HK_FN ByteDecode(const MixedParams &, const Work &, u32) {}
    HK_FN void of_row(u32) {}
    HK_FN Extra load(u32, u32) const { return {}; }
    template <int kWords>
    HK_FN static void decode(Vec<u32, kWords> codes, Extra, Vec<u32, 4> (&halves)[kWords / 2]) {
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) {
            halves[i] = __builtin_bit_cast(Vec<u32, 4>, hk::decoded<Code, T>(Vec<u32, 2>{codes[2 * i], codes[2 * i + 1]}));
        }
    }
};

template <class Code, class T>
struct DecodeOf {
    using Type = ByteDecode<Code, T>;
};
template <class T>
struct DecodeOf<hk::Fp4, T> {
    using Type = Fp4Decode;
};

/// As `Tile`, for x of type T and w of type Code.
template <class T, class Code, Access kAccess, int kM_, int kN_, int kWavesM, int kWavesN>
struct DecodedTile {
    static constexpr bool kFp4 = __is_same(Code, hk::Fp4);
    using Decode = typename DecodeOf<Code, T>::Type;
    struct Product {
        using Acc = hk::MmaAcc;
        static constexpr int kBytes = 2, kFrags = 1;

        HK_FN static Acc mma(const Frag *w, const Frag *x, Acc acc) {
            using Weights = hk::OfRows<Vec<typename Decode::Half, 8>>;
            using Floats = hk::OfRows<Vec<T, 8>>;
            return hk::mma(__builtin_bit_cast(Weights, w[0]), __builtin_bit_cast(Floats, x[0]), acc);
        }
    };
    static constexpr int kM = kM_, kN = kN_, kBytes = 64, kStep = 1;
    static constexpr int kThreads = kWavesM * kWavesN * hk::kWaveSize;
    static constexpr int kWaveM = kM / kWavesM, kWaveN = kN / kWavesN;
    static constexpr bool kDirect = false, kXScaled = false, kPingPong = false;

    using X = hk::Mover<hk::SharedTile<kM, kBytes>, kThreads, kAccess, sizeof(T)>;
    using W = hk::DecodingMover<hk::SharedTile<kN, kBytes>, kThreads, kAccess, hk::kBitsOf<Code>, Decode>;
    template <class Words>
    using Pipeline = hk::RegisterPipeline<X, W, Words, kStep>;

    HK_FN static u32 wave_m() { return hk::wave_id() / kWavesN * kWaveM; }
    HK_FN static u32 wave_n() { return hk::wave_id() % kWavesN * kWaveN; }
};

/// Sums with weights that are kFp4Unit times what they stand for.
template <class T>
struct Fp4Sums : Sums<T> {
    using Sums<T>::Sums;

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        Sums<T>::run(pipeline, from, count);
        in_units(this->acc, 1.0f / hk::kFp4Unit);
    }
};

template <class T>
HK_FN void decoded_gemm(const MixedParams &p) {
    if constexpr (T::kFp4) {
        tile_gemm<T, Fp4Sums, false>(p, Alone{}, [](const Work &, const Range &) { return hk::NoWords{}; });
    } else {
        tile_gemm<T, BlockSums, false>(p, Alone{}, [&](const Work &work, const Range &range) {
            return hk::WordMover<0, T::kN, T::kThreads>(scales_end<T>(range), [&](u32 row, bool) {
                return p.w_scale.place(work.matrix, work.n_tile * T::kN + row, p.w.rows);
            });
        });
    }
}

}  // namespace gemm
