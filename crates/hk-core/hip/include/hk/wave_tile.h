// wave_tile.h: a wave's tile of a GEMM: MFMAs over fragments, accumulators, and their way to LDS or to the next MFMA.
#pragma once

#include <hk/arch.h>
#include <hk/mma.h>
#include <hk/quant.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Rounds values to the dtype of an operand, packed in 32-bit registers.
template <class T, int N>
HK_FN Vec<u32, N * kBitsOf<T> / 32> pack(Vec<float, N> v) {
    if constexpr (__is_same(T, Fp8)) {
        return quantize_packed<kMmaFp8Type, N>(v);
    } else if constexpr (__is_same(T, float)) {
        return __builtin_bit_cast(Vec<u32, N>, v);
    } else {
        return __builtin_bit_cast(Vec<u32, N / 2>, narrow<T, N>(v));
    }
}

/// pack_positive drops the low bits: results are, on average, smaller by a factor of 2^-kCutBits<T>. 0: it rounds to nearest.
/// Source: of values whose logarithms are evenly spread, a sum loses 2^-8 ln 2 of itself in bf16.
template <class T>
inline constexpr float kCutBits = __is_same(T, bf16) && !kHasCvtBf16 ? 0x1.0059p-8f : 0.0f;

/// The same for values above zero, far below T's largest, that are no products. NaN stays NaN.
template <class T, int N>
HK_FN Vec<u32, N * kBitsOf<T> / 32> pack_positive(Vec<float, N> v) {
    if constexpr (kCutBits<T> != 0.0f) {
        Vec<u32, N / 2> packed;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float low = v[2 * i], high = v[2 * i + 1];
            packed[i] = detail::high_halves(__builtin_bit_cast(u32, low), __builtin_bit_cast(u32, high));
        }
        return packed;
    } else if constexpr (kBitsOf<T> == 16) {
        return __builtin_bit_cast(Vec<u32, N / 2>, __builtin_convertvector(v, Vec<T, N>));
    } else {
        return pack<T>(v);
    }
}

/// Accumulates `kSteps` fragments of rows with MFMA P: acc[m][n] += (n-th 16 or 32 rows of w) x (m-th rows of a).
/// `from.w(n, step)` and `from.a(m, step)` give the fragments.
template <class P, int kSteps, int kM, int kN>
HK_FN void mma_fragments(typename P::Acc (&acc)[kM][kN], const auto &from) {
    constexpr int kFrags = P::kFrags;
    static_assert(kSteps % kFrags == 0, "whole MFMAs");
#pragma unroll
    for (int step = 0; step < kSteps; step += kFrags) {
        Frag w[kN][kFrags];
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int f = 0; f < kFrags; ++f) w[n][f] = from.w(n, step + f);
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            Frag a[kFrags];
#pragma unroll
            for (int f = 0; f < kFrags; ++f) a[f] = from.a(m, step + f);
#pragma unroll
            for (int n = 0; n < kN; ++n) acc[m][n] = P::mma(w[n], a, acc[m][n]);
        }
    }
}

/// A wave's accumulators d[n, m], n < kN, m < kM, of MFMA P.
template <class P, int kN, int kM>
struct WaveTile {
    static constexpr int kDim = P::kDim;
    static_assert(kN % kDim == 0 && kM % kDim == 0, "whole MFMA tiles");

  private:
    using Places = AccLayout<kDim>;

  public:
    typename P::Acc acc[kM / kDim][kN / kDim] = {};

    /// Accumulates kSteps fragments of each row: `from` as for mma_fragments.
    template <int kSteps>
    HK_FN void multiply_fragments(const auto &from) {
        mma_fragments<P, kSteps>(acc, from);
    }

    /// Accumulates rows [n, n + kN) of `w` by rows [m, m + kM) of `a`, over all columns of the tiles.
    template <class WTile, class ATile>
    HK_FN void multiply(const WTile &w, u32 n, const ATile &a, u32 m) {
        static_assert(ATile::kBytes == WTile::kBytes, "rows of one length");
        struct {
            const WTile &of_w;
            const ATile &of_a;
            u32 first_n, first_m;
            HK_FN Frag w(int i, int step) const { return of_w.template frag<kDim, true>(first_n + i * kDim, step); }
            HK_FN Frag a(int j, int step) const { return of_a.template frag<kDim>(first_m + j * kDim, step); }
        } const from{w, a, n, m};
        multiply_fragments<WTile::kBytes / kFragBytesOf<kDim>>(from);
    }

    /// Calls `f(n, m, d)` for the lane's accumulators, in f32, kMmaRows at a time: d[i] is that of (n + i, m).
    template <class F>
    HK_FN void each(F f) const {
#pragma unroll
        for (int j = 0; j < kM / kDim; ++j) {
#pragma unroll
            for (int i = 0; i < kN / kDim * Places::kElements; i += kMmaRows) {
                f(Places::n(lane_id(), i), j * kDim + Places::m(lane_id(), i), run<kMmaRows>(j, i));
            }
        }
    }

    /// The accumulators of columns m from kDim j on as the a operand, over k = n, of the next MFMA, in dtype T: the lane's fragments.
    /// The other operand's rows have column n at Places<T>(n).
    template <class T>
    struct AsOperand {
        static constexpr int kFragElements = 128 / kBitsOf<T>;  // of a row
        static constexpr int kFrags = kN / kDim * Places::kElements / kRowsPerLane / kFragElements;
        static_assert(kFrags * kFragElements * kWaveSize * kRowsPerLane == kN * kDim, "whole fragments");
        Frag frag[kFrags];
    };
    /// `kPositive`: rounded by pack_positive.
    template <class T, bool kPositive = false>
    HK_FN AsOperand<T> as_operand(int j) const {
        AsOperand<T> operand;
#pragma unroll
        for (int f = 0; f < operand.kFrags; ++f) {
            operand.frag[f] = joined(per_row([&](u32 r) {
                Vec<float, operand.kFragElements> v;
#pragma unroll
                for (int i = 0; i < operand.kFragElements; ++i) {
                    const int of_row = f * operand.kFragElements + i;
                    const int at = of_row / kMmaRows * kMmaRows * kRowsPerLane + int(r) * kMmaRows + of_row % kMmaRows;
                    v[i] = float(acc[j][at / Places::kElements][at % Places::kElements]);
                }
                if constexpr (kPositive)
                    return pack_positive<T>(v);
                else
                    return pack<T>(v);
            }));
        }
        return operand;
    }

    /// Stores the accumulators, in dtype T, to LDS: (n, m) to row `row + m` and column `col + n`.
    template <class T, class Tile>
    HK_FN void put(Tile &tile, u32 row, u32 col) const {
        each([&](u32 n, u32 m, Vec<float, kMmaRows> d) { tile.put(row + m, (col + n) * kBitsOf<T> / 8, pack<T>(d)); });
    }

  private:
    /// The lane's kLen accumulators from the i-th on, of column tile j.
    template <int kLen>
    HK_FN Vec<float, kLen> run(int j, int i) const {
        Vec<float, kLen> v;
#pragma unroll
        for (int k = 0; k < kLen; ++k) v[k] = float(acc[j][(i + k) / Places::kElements][(i + k) % Places::kElements]);
        return v;
    }
};

}  // namespace hk
