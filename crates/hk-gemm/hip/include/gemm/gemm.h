// gemm.h: GEMM through LDS, for large M.
#pragma once

#include <gemm/epilogue/epilogue.h>
#include <gemm/epilogue/plain_store.h>
#include <gemm/epilogue/staged_acc.h>
#include <gemm/launch_site.h>
#include <gemm/line_pipeline.h>
#include <gemm/split_k.h>
#include <gemm/tile_coord.h>

#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/shared.h>
#include <hk/wave_tile.h>

namespace gemm {
/// Zeroes accumulators at this place, not where the compiler has a use for them.
template <class Acc, int kM, int kN>
HK_FN void clear_acc(Acc (&acc)[kM][kN]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
            acc[m][n] = Acc(0);
            hk::pin(acc[m][n]);
        }
    }
}

namespace detail {
template <bool kLines, class A, class W, class Scales, int kStages, int kStep>
struct TilePipeline {
    using Type = hk::Pipeline<A, W, Scales, kStages, kStep>;
};
template <class A, class W, class Scales, int kStages, int kStep>
struct TilePipeline<true, A, W, Scales, kStages, kStep> {
    using Type = LinePipeline<A, W, Scales>;
};
}  // namespace detail

/// A block tile and its LDS pipeline: stages of a line of each row, or of 64 bytes. Of the latter, loads straight to LDS have a ring of
/// `kStages`, of which at least `kDirectStep` are multiplied per step.
template <class E, Access kAccess, int kM_, int kN_, int kWavesM, int kWavesN, int kStages, int kDirectStep = 1,
          bool kLines_ = kLineBytes == 128 && kAccess == Access::Vectorized>
struct Tile {
    static constexpr bool kLines = kLines_;
    using Mma = hk::FragMma<E>;
    static constexpr int kM = kM_, kN = kN_;
    static constexpr int kThreads = kWavesM * kWavesN * hk::kWaveSize;
    static constexpr int kBytes = kLines ? kLineBytes : 64;
    /// Rows of a wave's tile.
    static constexpr int kWaveM = kM / kWavesM, kWaveN = kN / kWavesN;
    /// Stages per step: two if an MFMA spans more columns than a stage.
    static constexpr bool kDirectToLds = hk::kHasWideDma && kAccess == Access::Vectorized;
    static constexpr int kStep = hk::kFragBytes * Mma::kFrags > kBytes ? 2 : kDirectToLds && !kLines ? kDirectStep : 1;
    /// Ping-pong where the block has two waves per SIMD and the ring prefetches far enough. Waves of different blocks alternate
    /// without it.
    static constexpr bool kPingPong = !kLines && hk::kHasPingPong && kThreads == 2 * hk::kSimdsPerCu * hk::kWaveSize &&
                                      (!kDirectToLds || kStages >= 3 * kStep);
    /// All of a stage is read from LDS first, where a wave has a SIMD's registers to itself. 64 x 64 waits for its loads: they come first.
    static constexpr bool kReadsFirst =
        (kM + kN > 128) && kLines && kDirectToLds && kThreads == hk::kSimdsPerCu * hk::kWaveSize;
    /// Halves of a stage are read from LDS ahead.
    static constexpr bool kHalves = kLines && kDirectToLds && kBytes == 2 * hk::kFragBytes * Mma::kFrags;

    template <int kRows>
    using Mover = hk::Mover<hk::SharedTile<kRows, kBytes>, kThreads, kAccess, Mma::kBytes>;
    using A = Mover<kM>;
    using W = Mover<kN>;
    template <class Scales>
    using Pipeline = typename detail::TilePipeline<kLines, A, W, Scales, kStages, kStep>::Type;

    /// First row of the wave's tile in the block tile.
    HK_FN static u32 wave_m() { return hk::wave_id() / kWavesN * kWaveM; }
    HK_FN static u32 wave_n() { return hk::wave_id() % kWavesN * kWaveN; }
};

/// Chunks of four packed scales of a row that a tile of `kRows` rows of a and w loads at once, of the 32 scales that a line has: whoever loads
/// fewer loads the line again. As many as LDS has room for beside the stages; of 64 x 64 a CU has three blocks.
template <int kRows>
inline constexpr u32 kScaleChunks = !hk::kHasWideDma               ? 1
                                    : kRows == 512                 ? 2
                                    : kRows == 128 || kRows == 384 ? 1
                                                                   : 4;

/// The loader of packed scales of a block tile: of `kARows` rows of a and all of w, 4 bytes for `kWordBytes` bytes of a row.
template <class T, int kARows, u32 kWordBytes>
using PackedScaleMover = __remove_pointer(decltype([] {
    if constexpr (requires { requires T::kLines; })
        return (ChunkedScales<kARows, T::kN, T::kThreads, kWordBytes, kScaleChunks<T::kM + T::kN>> *)nullptr;
    else
        return (hk::ScaleMover<kARows, T::kN, T::kThreads> *)nullptr;
}()));

/// A wave's fragments of the current step, read from LDS on use.
template <class T, class Step>
struct LdsFragments {
    static constexpr int kOfStage = T::kBytes / hk::kFragBytes;
    const Step &step;

    HK_FN Frag w(int n, int k) const {
        return step.w[k / kOfStage]->template frag<16, true>(T::wave_n() + 16 * n, k % kOfStage);
    }
    HK_FN Frag a(int m, int k) const { return step.a[k / kOfStage]->frag(T::wave_m() + 16 * m, k % kOfStage); }
};

/// A wave's fragments of the current step, in registers: `kK` of each row.
template <class T, int kK = T::kStep * T::kBytes / hk::kFragBytes>
struct RegisterFragments {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    Frag w_[kN][kK], a_[kM][kK];

    HK_FN explicit RegisterFragments(const auto &from, int first = 0) {
#pragma unroll
        for (int k = 0; k < kK; ++k) {
#pragma unroll
            for (int n = 0; n < kN; ++n) w_[n][k] = from.w(n, first + k);
#pragma unroll
            for (int m = 0; m < kM; ++m) a_[m][k] = from.a(m, first + k);
        }
    }
    HK_FN Frag w(int n, int k) const { return w_[n][k]; }
    HK_FN Frag a(int m, int k) const { return a_[m][k]; }
};

/// The accumulators of a wave, of MFMAs without scales.
template <class T>
using WaveTile = hk::WaveTile<typename T::Mma, T::kWaveN, T::kWaveM>;
namespace detail {
template <class T, class Pipeline>
inline constexpr bool kHaveHalves = requires {
    requires T::kHalves;
    requires Pipeline::kHalves;
};
}  // namespace detail

/// Whether halves of a stage are read from LDS ahead: where the tile has them and the pipeline gains by it.
template <class T, class Pipeline>
inline constexpr bool kByHalves = detail::kHaveHalves<T, __remove_cvref(Pipeline)>;

/// Fragments of a row per step.
template <class T>
inline constexpr int kStepFrags = T::kStep * T::kBytes / hk::kFragBytes;

/// A wave's accumulators, and the main loop.
template <class T>
struct TileAcc : WaveTile<T> {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    static constexpr bool kReadsFirst = detail::kReadsFirst<T>;

    HK_FN TileAcc() {}
    HK_FN explicit TileAcc(const auto &) {}  // arguments that accumulators with scales need

    /// Zeroes here, while loads are in flight.
    HK_FN void clear() { clear_acc(this->acc); }

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        if constexpr (T::kPingPong)
            pipeline.ping_pong(from, count, *this);
        else if constexpr (kByHalves<T, decltype(pipeline)>)
            pipeline.run_halves(from, count, *this);
        else
            pipeline.run(from, count, *this);
    }

    template <int, class Step>
    HK_FN void multiply(const Step &step) {
        this->template multiply_fragments<kStepFrags<T>>(LdsFragments<T, Step>{step});
    }

    // The two halves of a ping-pong step.
    template <class Step>
    HK_FN RegisterFragments<T> read(const Step &step) const {
        return RegisterFragments<T>(LdsFragments<T, Step>{step});
    }
    template <int kHalf, class Step>
    HK_FN RegisterFragments<T, kStepFrags<T> / 2> read(const Step &step) const {
        return RegisterFragments<T, kStepFrags<T> / 2>(LdsFragments<T, Step>{step}, kHalf * kStepFrags<T> / 2);
    }
    template <int kFrags>
    HK_FN void multiply(const RegisterFragments<T, kFrags> &operands) {
        this->template multiply_fragments<kFrags>(operands);
    }
};

/// Passes a wave's accumulators through LDS, free by then: calls `part(row, col, staged, r)` for each kVecCols outputs of a row,
/// of `kCols` columns. Their accumulators are in row `r` of `staged`.
template <class T, u32 kCols, class Accum, class F>
HK_FN void for_each_vec(const Accum &acc_tile, void *lds, F part) {
    constexpr u32 kLanes = kCols / kVecCols;
    auto &staged = static_cast<StagedAcc<float, T::kWaveN> *>(lds)[hk::wave_id()];
#pragma unroll 1
    for (u32 m = 0; m < Accum::kM; ++m) {
        hk::wave_barrier();
        // One copy of the epilogue's code for all M tiles.
#pragma unroll
        for (int i = 0; i < Accum::kM; ++i) {
            if (u32(i) == m) staged.put(0, acc_tile.acc[i]);
        }
        hk::wave_barrier();
#pragma unroll 1
        for (u32 i = hk::lane_id(); i < 16 * kLanes; i += hk::kWaveSize) {
            const u32 row = i / kLanes, col = i % kLanes * kVecCols;
            part(16 * m + row, col, staged, row);
        }
    }
}

/// Accumulates bytes [from, to) of the rows of `a` and `w`. `make_scales()` makes the loader of packed scales.
template <class T, class Accum, class MakeScales, class Lds>
HK_FN void accumulate(Accum &acc_tile, const typename T::A &a, const typename T::W &w, MakeScales make_scales,
                      Lds &stages, u32 from, u32 to) {
    using Pipeline = typename T::template Pipeline<decltype(make_scales())>;
    if constexpr (requires { Pipeline::begin(a, w, stages, from); }) Pipeline::begin(a, w, stages, from);
    const auto scales = make_scales();
    acc_tile.run(Pipeline(a, w, scales, stages), from, (to - from + T::A::kStageBytes - 1) / T::A::kStageBytes);
}

/// Runs the epilogue of a wave's tile.
template <class T, bool kGated, class Params, class Accum, class Site>
HK_FN void store_tile(const Params &p, const Site &site, const TileCoord &coord, const Accum &acc_tile, void *lds) {
    constexpr u32 kCols = kGated ? T::kWaveN / 2 : T::kWaveN;
    const u32 first_m = coord.m_tile * T::kM + T::wave_m();
    const u32 first_n = (coord.n_tile * T::kN + T::wave_n()) / (kGated ? 2 : 1);
    if constexpr (!kGated) {
        if (store_plainly<kCols, false>(site.reload(p), coord, first_m, first_n, acc_tile, lds)) return;
    }
    for_each_vec<T, kCols>(acc_tile, lds, [&](u32 m, u32 n, const auto &staged, u32 row) {
        const Params &again = site.reload(p);
        if constexpr (kGated) {
            run_gated_epilogue<kVecCols>(again.epilogue, coord, first_m + m, first_n + n, staged.get(row, n),
                                         staged.get(row, kCols + n));
        } else {
            run_epilogue<kVecCols>(again, coord, first_m + m, first_n + n, staged.get(row, n));
        }
    });
}

/// Bytes of w for the columns that `bytes` of a have.
template <class T>
HK_FN u32 w_bytes(u32 bytes) {
    constexpr u32 kA = T::A::kStageBytes, kW = T::W::kStageBytes;
    return kW > kA ? bytes * (kW / kA) : bytes / (kA / kW);
}

/// LDS of a block tile: the pipeline's stages, then the staged accumulators.
template <class T, class Scales>
union TileLds {
    typename T::template Pipeline<Scales>::Lds stages;
    StagedAcc<float, T::kWaveN> staged[T::kThreads / hk::kWaveSize];
};

/// One block tile, or its split-K slice. `make_scales(coord, range)` makes the loader of packed scales.
template <class T, template <class> class Accum, bool kGated, class Params, class Site, class MakeWords>
HK_FN void tile_gemm(const Params &p, const Site &site, MakeWords make_scales) {
    TileCoord coord(p.grid, site.block());
    if (!coord.find_matrix<T::kM>(p.epilogue.groups, p.a.rows)) return;
    const KRange range(p.grid, coord.split);
    const u32 first_m = coord.m_tile * T::kM, first_n = coord.n_tile * T::kN;

    const typename T::A a(p.a.at(coord.batch, first_m), p.a.rows - first_m, p.a.layout, range.to,
                          [](u32 row) { return row; });
    // Each wave of a gated tile has kWaveN / 2 gate rows of w, then their value rows.
    const u32 first_w = kGated ? first_n / 2 : first_n;
    const auto rows_of_w = [&] {
        if constexpr (requires { typename T::Dequant; }) {
            return typename T::Dequant(p, coord, first_w);
        } else {
            return [&](u32 row) { return kGated ? gated_row<T::kWaveN>(row, first_w, p.w.rows) : row; };
        }
    }();
    const u32 w_end = w_bytes<T>(range.to);
    const typename T::W w(p.w.at(coord.matrix, first_w), p.w.rows - first_w, p.w.layout, w_end, rows_of_w);
    const auto scales = [&] { return make_scales(coord, range); };
    auto &lds = site.template lds<TileLds<T, decltype(scales())>>();
    Accum<T> acc_tile(p);
    accumulate<T>(acc_tile, a, w, scales, lds.stages, range.from, range.to);
    hk::block_barrier();
    if (!sum_slices<T>(site.reload(p), coord, acc_tile.acc, &lds)) return;
    store_tile<T, kGated>(p, site, coord, acc_tile, &lds);
}

template <class T, bool kGated, class Site = SingleSite>
HK_FN void tile_gemm(const Params &p, const Site &site = {}) {
    tile_gemm<T, TileAcc, kGated>(p, site, [](const TileCoord &, const KRange &) { return hk::NoScales{}; });
}

}  // namespace gemm
