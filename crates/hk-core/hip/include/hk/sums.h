// sums.h: what a wave sums up, from tiles in LDS to memory, or on to the next product.
#pragma once

#include <hk/arch.h>
#include <hk/mma.h>
#include <hk/quant.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Values in the type of an operand, as words. One rounding.
template <class T, int N>
HK_FN Vec<u32, N * kBitsOf<T> / 32> to_words(Vec<float, N> v) {
    if constexpr (__is_same(T, Fp8)) {
        return to_codes<kMmaFp8, N>(v);
    } else if constexpr (__is_same(T, float)) {
        return __builtin_bit_cast(Vec<u32, N>, v);
    } else {
        return __builtin_bit_cast(Vec<u32, N / 2>, narrow<T, N>(v));
    }
}

/// Adds the products P of `kSteps` fragments of rows to sums: those of the n-th tile of rows of w with the m-th of x to
/// acc[m][n]. `from.w(n, step)` and `from.x(m, step)` give the fragments.
template <class P, int kSteps, int kM, int kN>
HK_FN void add_products(typename P::Acc (&acc)[kM][kN], const auto &from) {
    constexpr int kFrags = P::kFrags;
    static_assert(kSteps % kFrags == 0, "whole products");
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
            Frag x[kFrags];
#pragma unroll
            for (int f = 0; f < kFrags; ++f) x[f] = from.x(m, step + f);
#pragma unroll
            for (int n = 0; n < kN; ++n) acc[m][n] = P::mma(w[n], x, acc[m][n]);
        }
    }
}

/// A wave's sums d[n, m], n < kN, m < kM, of products P.
template <class P, int kN, int kM>
struct WaveSums {
    static constexpr int kDim = P::kDim;
    static_assert(kN % kDim == 0 && kM % kDim == 0, "whole tiles of products");

private:
    using Places = Sums<kDim>;

public:
    typename P::Acc acc[kM / kDim][kN / kDim] = {};

    /// Adds the products of rows [n, n + kN) of `w` with rows [m, m + kM) of `x`, over all their columns.
    template <class WTile, class XTile>
    HK_FN void multiply(const WTile &w, u32 n, const XTile &x, u32 m) {
        static_assert(XTile::kBytes == WTile::kBytes, "rows of one length");
        struct {
            const WTile &of_w;
            const XTile &of_x;
            u32 first_n, first_m;
            HK_FN Frag w(int i, int step) const { return of_w.template frag<kDim, true>(first_n + i * kDim, step); }
            HK_FN Frag x(int j, int step) const { return of_x.template frag<kDim>(first_m + j * kDim, step); }
        } const from{w, x, n, m};
        add_products<P, WTile::kBytes / kFragBytesOf<kDim>>(acc, from);
    }

    /// Calls `f(n, m, d)` for the lane's sums, in f32, kMmaRows at a time: d[i] is that of (n + i, m).
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

    /// The sums of columns m from kDim j on, in the type T, as an operand over k = n of the next product: the lane's fragments.
    /// The other operand's rows have column n at Places<T>(n).
    template <class T>
    struct AsOperand {
        static constexpr int kPart = 128 / kBitsOf<T>;
        static constexpr int kFrags = kN / kDim * Places::kElements / kPart;
        static_assert(kFrags * kPart * kWaveSize == kN * kDim, "whole fragments");
        Frag frag[kFrags];
    };
    template <class T>
    HK_FN AsOperand<T> as_operand(int j) const {
        AsOperand<T> operand;
#pragma unroll
        for (int f = 0; f < operand.kFrags; ++f) operand.frag[f] = to_words<T>(run<operand.kPart>(j, f * operand.kPart));
        return operand;
    }

    /// Writes the sums, in the type T, to LDS: that of (n, m) to row `row + m` and column `col + n`.
    template <class T, class Tile>
    HK_FN void put(Tile &tile, u32 row, u32 col) const {
        each([&](u32 n, u32 m, Vec<float, kMmaRows> d) { tile.put(row + m, (col + n) * kBitsOf<T> / 8, to_words<T>(d)); });
    }

private:
    /// The lane's sums from the i-th on of column j.
    template <int kLen>
    HK_FN Vec<float, kLen> run(int j, int i) const {
        Vec<float, kLen> v;
#pragma unroll
        for (int k = 0; k < kLen; ++k) v[k] = float(acc[j][(i + k) / Places::kElements][(i + k) % Places::kElements]);
        return v;
    }
};

}  // namespace hk
