// tiles.h: products of large tiles through LDS.
//   A block makes kM x kN sums, each of its kWavesM x kWavesN waves a part of them, and walks along K in stages of 64 bytes of
//   a row (hk/pipeline.h). In the end each wave passes its sums through LDS, so that its lanes write whole lines.
#pragma once

#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/shared.h>
#include <hk/sums.h>

#include "epilogue.h"
#include "problem.h"

namespace gemm {
using hk::Access;
using hk::Frag;

/// A tile's shape, and its way through LDS. Where loads go straight to LDS: `kStages`, of which `kDirectStep` or more are
/// multiplied at a time.
template <class E, Access kAccess, int kM_, int kN_, int kWavesM, int kWavesN, int kStages, int kDirectStep = 1>
struct Tile {
    using Product = hk::Product<E>;
    static constexpr int kM = kM_, kN = kN_;
    static constexpr int kThreads = kWavesM * kWavesN * hk::kWaveSize;
    static constexpr int kBytes = 64;
    /// Of a wave.
    static constexpr int kWaveM = kM / kWavesM, kWaveN = kN / kWavesN;
    /// Stages that are multiplied at a time, as products with longer rows need.
    static constexpr bool kDirect = hk::kHasWideDma && kAccess == Access::Vectors;
    static constexpr int kStep = hk::kFragBytes * Product::kFrags > kBytes ? 2 : kDirect ? kDirectStep : 1;
    /// Where a block has two waves on each SIMD, and its stages are loaded early enough. Waves of several blocks find their turns
    /// by themselves.
    static constexpr bool kPingPong =
        hk::kPingPongs && kThreads == 2 * hk::kSimds * hk::kWaveSize && (!kDirect || kStages >= 3 * kStep);

    template <int kRows>
    using Mover = hk::Mover<hk::SharedTile<kRows, kBytes>, kThreads, kAccess, Product::kBytes>;
    using X = Mover<kM>;
    using W = Mover<kN>;
    template <class Words>
    using Pipeline = hk::Pipeline<X, W, Words, kStages, kStep>;

    /// A wave's place in the tile.
    HK_FN static u32 wave_m() { return hk::wave_id() / kWavesN * kWaveM; }
    HK_FN static u32 wave_n() { return hk::wave_id() % kWavesN * kWaveN; }
};

/// A wave's fragments of some stages, in LDS.
template <class T, class Step>
struct InLds {
    static constexpr int kOfStage = T::kBytes / hk::kFragBytes;
    const Step &step;

    HK_FN Frag w(int n, int k) const {
        return step.w[k / kOfStage]->template frag<16, true>(T::wave_n() + 16 * n, k % kOfStage);
    }
    HK_FN Frag x(int m, int k) const { return step.x[k / kOfStage]->frag(T::wave_m() + 16 * m, k % kOfStage); }
};

/// The same in registers.
template <class T>
struct InRegisters {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16, kK = T::kStep * T::kBytes / hk::kFragBytes;
    Frag w_[kN][kK], x_[kM][kK];

    HK_FN explicit InRegisters(const auto &from) {
#pragma unroll
        for (int k = 0; k < kK; ++k) {
#pragma unroll
            for (int n = 0; n < kN; ++n) w_[n][k] = from.w(n, k);
#pragma unroll
            for (int m = 0; m < kM; ++m) x_[m][k] = from.x(m, k);
        }
    }
    HK_FN Frag w(int n, int k) const { return w_[n][k]; }
    HK_FN Frag x(int m, int k) const { return x_[m][k]; }
};

/// Adds the products of all columns of some stages to a wave's sums.
template <class T, class Acc, int kM, int kN>
HK_FN void multiply_fragments(Acc (&acc)[kM][kN], const auto &from) {
    hk::add_products<typename T::Product, T::kStep * T::kBytes / hk::kFragBytes>(acc, from);
}
template <class T, class Acc, int kM, int kN, class Step>
HK_FN void multiply(Acc (&acc)[kM][kN], const Step &step) {
    multiply_fragments<T>(acc, InLds<T, Step>{step});
}

/// A wave's sums.
template <class T>
struct Sums {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    typename T::Product::Acc acc[kM][kN] = {};

    HK_FN Sums() {}
    HK_FN explicit Sums(const auto &) {}  // parameters of sums with scales

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        if constexpr (T::kPingPong) pipeline.ping_pong(from, count, *this);
        else pipeline.run(from, count, *this);
    }

    template <int>
    HK_FN void multiply(const auto &step) {
        gemm::multiply<T>(acc, step);
    }

    // By ping-pong.
    template <class Step>
    HK_FN InRegisters<T> read(const Step &step) const {
        return InRegisters<T>(InLds<T, Step>{step});
    }
    HK_FN void multiply(const InRegisters<T> &operands) { multiply_fragments<T>(acc, operands); }
};

/// Passes a wave's sums through LDS, which holds nothing that any wave needs: calls `part(row, col, strip, r)` for each part of a
/// row of the wave's outputs, `kCols` in all. The part's sums are in row `r` of the strip.
template <class T, u32 kCols, class SumsOf, class F>
HK_FN void each_part(const SumsOf &sums, void *lds, F part) {
    constexpr u32 kLanes = kCols / kPart;
    auto &strip = static_cast<Strip<float, T::kWaveN> *>(lds)[hk::wave_id()];
#pragma unroll 1
    for (u32 m = 0; m < SumsOf::kM; ++m) {
        hk::wave_barrier();
        // One copy of what follows, whatever the strip.
#pragma unroll
        for (int i = 0; i < SumsOf::kM; ++i) {
            if (u32(i) == m) strip.put(0, sums.acc[i]);
        }
        hk::wave_barrier();
#pragma unroll 1
        for (u32 i = hk::lane_id(); i < 16 * kLanes; i += hk::kWaveSize) {
            const u32 row = i / kLanes, col = i % kLanes * kPart;
            part(16 * m + row, col, strip, row);
        }
    }
}

/// Writes a wave's outputs.
template <class T, bool kGated, class Params, class SumsOf, class Site>
HK_FN void write_tile(const Params &p, const Site &site, const Work &work, const SumsOf &sums, void *lds) {
    constexpr u32 kCols = kGated ? T::kWaveN / 2 : T::kWaveN;
    const u32 first_m = work.m_tile * T::kM + T::wave_m();
    const u32 first_n = (work.n_tile * T::kN + T::wave_n()) / (kGated ? 2 : 1);
    each_part<T, kCols>(sums, lds, [&](u32 m, u32 n, const auto &strip, u32 row) {
        const Params &again = site.anew(p);
        if constexpr (kGated) {
            finish_gated<kPart>(again.epilogue, work, first_m + m, first_n + n, strip.get(row, n), strip.get(row, kCols + n));
        } else {
            finish<kPart>(again, work, first_m + m, first_n + n, strip.get(row, n));
        }
    });
}

/// As many columns of w as `bytes` of x have, in bytes.
template <class T>
HK_FN u32 bytes_of_w(u32 bytes) {
    constexpr u32 kX = T::X::kStage, kW = T::W::kStage;
    return kW > kX ? bytes * (kW / kX) : bytes / (kX / kW);
}

/// LDS of a tile: first stages, then sums.
template <class T, class Words>
union TileLds {
    typename T::template Pipeline<Words>::Lds stages;
    Strip<float, T::kWaveN> strips[T::kThreads / hk::kWaveSize];
};

/// One tile of outputs, or of a split's part of them. `make_words(work, range)`: what moves the words that go with rows.
template <class T, template <class> class SumsOf, bool kGated, class Params, class Site, class MakeWords>
HK_FN void tile_gemm(const Params &p, const Site &site, MakeWords make_words) {
    Work work(p.grid, site.block());
    if (!work.find_matrix<T::kM>(p.epilogue.groups, p.x.rows)) return;
    const Range range(p.grid, work.split);
    const u32 first_m = work.m_tile * T::kM, first_n = work.n_tile * T::kN;

    const typename T::X x(p.x.at(work.batch, first_m), p.x.rows - first_m, p.x.layout, range.to, [](u32 row) { return row; });
    // With gates and values, a wave has a strip of both: its rows of W's tile are first gates, then their values.
    const u32 first_w = kGated ? first_n / 2 : first_n;
    const auto rows_of_w = [&] {
        if constexpr (requires { typename T::Decode; }) {
            return typename T::Decode(p, work, first_w);
        } else {
            return [&](u32 row) { return kGated ? gated_row<T::kWaveN>(row, first_w, p.w.rows) : row; };
        }
    }();
    const u32 w_end = bytes_of_w<T>(range.to);
    const typename T::W w(p.w.at(work.matrix, first_w), p.w.rows - first_w, p.w.layout, w_end, rows_of_w);
    const auto words = make_words(work, range);

    using Words = __remove_cvref(decltype(words));
    using Pipeline = typename T::template Pipeline<Words>;
    auto &lds = site.template lds<TileLds<T, Words>>();
    SumsOf<T> sums(p);
    sums.run(Pipeline(x, w, words, lds.stages), range.from, (range.to - range.from + T::X::kStage - 1) / T::X::kStage);
    hk::block_barrier();
    write_tile<T, kGated>(p, site, work, sums, &lds);
}

template <class T, bool kGated, class Site = Alone>
HK_FN void tile_gemm(const Params &p, const Site &site = {}) {
    tile_gemm<T, Sums, kGated>(p, site, [](const Work &, const Range &) { return hk::NoWords{}; });
}

}  // namespace gemm
