// streamed.h: LDS tiles whose waves stream their own rows of w to registers, as fragments; only a, which all waves need, goes through LDS.
//   For targets whose loads go through registers: there are half as many stores to LDS, and a block takes so little of it that a CU has
//   two. While the waves of one wait at a barrier or for LDS, those of the other multiply.
#pragma once

#include <gemm/gemm.h>
#include <gemm/operands/plain.h>

#include <hk/schedule.h>

namespace gemm {
/// A stage in LDS.
template <class A, class Scales>
struct StreamedStage {
    A a;
    typename Scales::Tile scales;
};
template <class A, class Scales>
    requires detail::kChunked<Scales>
struct StreamedStage<A, Scales> {
    A a;
    typename Scales::Chunk scales[Scales::kChunks];
};

/// A block of four waves: each has all rows of a and 32 of w. As Tile.
template <class E, int kM_>
struct StreamedTile {
    static constexpr bool kLines = true, kStreamed = true, kDirectToLds = false;
    using Mma = hk::FragMma<E>;
    static constexpr int kM = kM_, kN = 128, kThreads = 4 * hk::kWaveSize, kBytes = kLineBytes, kStep = 1;
    static constexpr int kWaveM = kM, kWaveN = 32, kWaveTiles = kWaveN / 16, kFrags = kBytes / hk::kFragBytes;

    HK_FN static u32 wave_m() { return 0; }
    HK_FN static u32 wave_n() { return hk::wave_id() * kWaveN; }

    using A = hk::Mover<hk::SharedTile<kM, kBytes>, kThreads, Access::Vectorized, Mma::kBytes>;

    /// The loader of the wave's rows of w.
    class W {
        using Rows = FragmentRows<1, kFrags>;
        Rows first_, second_;

      public:
        static constexpr u32 kStageBytes = kBytes;
        struct Frags {
            typename Rows::Frags tile[kWaveTiles];
        };

        HK_FN W(GlobalPtr<const u8> first, u32 rows, const hk::RowLayout &layout, u32 end, auto row_of)
            : first_(first, rows, layout, end, [&](u32 row) { return row_of(wave_n() + row); }),
              second_(first, rows, layout, end, [&](u32 row) { return row_of(wave_n() + 16 + row); }) {}

        HK_FN Frags load(u32 from) const {
            Frags frags;
            // Loads of a line follow each other, so that it is filled once.
            frags.tile[0] = first_.load(from);
            hk::sched_barrier();
            frags.tile[1] = second_.load(from);
            hk::sched_barrier();
            return frags;
        }
    };
    template <class Scales>
    class Pipeline;

  private:
    using Unit = hk::MmaInstruction<E, E, 16, hk::kFastestCols<E, E, 16>>;
    static constexpr int kWords = Unit::W::kWords;

  public:
    using Acc = typename Mma::Acc;
    static constexpr int kMfmas = 4 * kFrags / kWords * kWaveTiles;

    /// Adds the products of 16 rows of a and the wave's rows of w, over a line. MFMAs of the two sums take turns.
    HK_FN static void mma(Acc (&sums)[kWaveTiles], const Frag *a, const typename W::Frags &w) {
#pragma unroll
        for (int first = 0; first < 4 * kFrags; first += kWords) {
#pragma unroll
            for (int n = 0; n < kWaveTiles; ++n) {
                Vec<u32, kWords> w_part, a_part;
#pragma unroll
                for (int i = 0; i < kWords; ++i) {
                    w_part[i] = w.tile[n].frag[0][(first + i) / 4][(first + i) % 4];
                    a_part[i] = a[(first + i) / 4][(first + i) % 4];
                }
                sums[n] = Unit::mma(w_part, a_part, sums[n]);
            }
        }
    }
};

template <class E, int kM_>
template <class Scales>
class StreamedTile<E, kM_>::Pipeline {
    static constexpr bool kChunked = detail::kChunked<Scales>;
    static constexpr int kRowTiles = kM / 16;
    /// M tiles whose fragments are read ahead.
    static constexpr int kAhead = 2;

  public:
    using Lds = StreamedStage<typename A::Tile, Scales>;

  private:
    const A &a_;
    const W &w_;
    const Scales &scales_;
    Lds &lds_;

    /// In registers.
    struct Loads {
        u32 from, at = 0;  // of the stage that is multiplied, bytes of the rows and of the slice
        typename A::Chunks a;
        typename W::Frags w[2];
        typename Scales::PackedScales scales;
    };

    /// Stores the stage's a and, if it begins a batch, scales to LDS, and loads those of the next. Returns the stage's scales.
    HK_FN const auto &advance(Loads &loads, int next) const {
        const u32 at = loads.at;
        a_.store(loads.a, lds_.a);
        if constexpr (kChunked) detail::refill(scales_, loads.scales, lds_.scales, loads.from, at);
        loads.from += kBytes;
        loads.at += kBytes;
        loads.w[next] = w_.load(loads.from);
        loads.a = a_.load(loads.from);
        if constexpr (kChunked)
            return *lds_.scales[at / Scales::kChunkBytes % Scales::kChunks].stage(at);
        else
            return lds_.scales;
    }

    /// Of the MFMAs of an M tile and what is between them: reads of LDS come first, vector instructions behind the first MFMA of each
    /// sum, for whose predecessors they wait.
    template <int kVector, int kReads>
    HK_FN static void interleave() {
        if constexpr (kReads > 0) hk::sched_group<hk::Issue::LdsRead, kReads>();
#pragma unroll
        for (int i = 0; i < kMfmas; ++i) {
            hk::sched_group<hk::Issue::Matrix, 1>();
            if constexpr (kVector > 0) {
                if (i >= kWaveTiles) hk::sched_group<hk::Issue::Vector, kVector>();
            }
        }
    }

    template <int kNow, class Accum>
    HK_FN void multiply(Loads &loads, Accum &acc_tile) const {
        hk::block_barrier();  // all waves have read the stage before
        const auto &scales = advance(loads, 1 - kNow);
        hk::sched_barrier();
        hk::block_barrier();
        typename Accum::StageScales of_stage;
        Accum::read_w(of_stage, scales);
        Frag a[kRowTiles][kFrags];
        const auto read = [&](int m) {
#pragma unroll
            for (int f = 0; f < kFrags; ++f) a[m][f] = lds_.a.frag(16 * m, f);
            Accum::read_a(of_stage, m, scales);
        };
#pragma unroll
        for (int m = 0; m < kAhead; ++m) read(m);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            if (m + kAhead < kRowTiles) read(m + kAhead);
            acc_tile.multiply_rows(m, a[m], loads.w[kNow], of_stage);
            interleave<Accum::kVector, kFrags + Accum::kVector / 2>();
            hk::sched_barrier();
        }
    }

  public:
    HK_FN Pipeline(const A &a, const W &w, const Scales &scales, Lds &lds) : a_(a), w_(w), scales_(scales), lds_(lds) {}

    /// Calls `acc.multiply_rows` for each M tile of `count` stages from byte `from` of the rows on.
    template <class Accum>
    HK_FN void run(u32 from, u32 count, Accum &acc_tile) const {
        count = count > 0 ? count : 1;  // where K is 0, a stage of zeros
        Loads loads;
        loads.from = from;
        loads.w[0] = w_.load(from);
        loads.a = a_.load(from);
        loads.scales = scales_.load(from);
        while (true) {
            multiply<0>(loads, acc_tile);
            if (--count == 0) break;
            multiply<1>(loads, acc_tile);
            if (--count == 0) break;
        }
    }
};

template <class E, int kRows>
struct TileAcc<StreamedTile<E, kRows>> : WaveTile<StreamedTile<E, kRows>> {
    using T = StreamedTile<E, kRows>;
    static constexpr int kM = kRows / 16, kN = T::kWaveTiles, kVector = 0;
    struct StageScales {};

    HK_FN explicit TileAcc(const auto &) {}
    HK_FN void run(const auto &pipeline, u32 from, u32 count) { pipeline.run(from, count, *this); }

    HK_FN static void read_a(StageScales, int, const auto &) {}
    HK_FN static void read_w(StageScales, const auto &) {}
    HK_FN void multiply_rows(int m, const Frag *a, const typename T::W::Frags &w, StageScales) {
        T::mma(this->acc[m], a, w);
    }
};

template <class T>
struct ScaledSums {
    static constexpr int kM = T::kM / 16;
    hk::MmaAcc acc[kM][T::kWaveTiles];
};

/// Applies the scales of a's and w's rows as apply_scales does, to accumulators: their loads are in flight together.
template <class T>
HK_FN void scale_sums(hk::MmaAcc (&acc)[T::kM / 16][T::kWaveTiles], const Epilogue &e, const TileCoord &coord) {
    if (!(e.a_scale | e.w_scale)) return;
    constexpr int kM = T::kM / 16, kN = T::kWaveTiles;
    const u32 lane = hk::lane_id(), last_m = e.rows - 1, last_n = e.cols - 1;
    hk::MmaAcc w[kN];
    Vec<float, hk::kRowsPerLane> a[kM];
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
        w[n] = 1.0f;
        if (!e.w_scale) continue;
        const auto from = reinterpret_cast<GlobalPtr<const float>>(e.w_scale) + i64(coord.matrix) * e.w_scale_batch;
        const u32 first = coord.n_tile * T::kN + T::wave_n() + 16 * n + hk::group_of_lane(lane) * hk::kMmaRows;
        Vec<float, hk::kMmaRows> of_rows;
#pragma unroll
        for (u32 i = 0; i < hk::kMmaRows; ++i) {
            of_rows[i] = from[i64(first + i < last_n ? first + i : last_n) * e.w_scale_step];
        }
        w[n] = hk::broadcast_n(of_rows);
    }
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
        a[m] = 1.0f;
        if (!e.a_scale) continue;
        const auto from = reinterpret_cast<GlobalPtr<const float>>(e.a_scale) + i64(coord.batch) * e.a_scale_batch;
#pragma unroll
        for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
            const u32 row = coord.m_tile * T::kM + 16 * m + hk::row_of_lane(lane, r);
            a[m][r] = from[i64(row < last_m ? row : last_m) * e.a_scale_step];
        }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) acc[m][n] *= w[n] * hk::broadcast_m(a[m]);
    }
}

/// store_tile of streamed tiles.
template <class T, bool kGated, class Params, class Site>
    requires(T::kStreamed && !kGated)
HK_FN void store_tile(const Params &p, const Site &site, const TileCoord &coord, const TileAcc<T> &acc_tile,
                      void *lds) {
    ScaledSums<T> scaled;
#pragma unroll
    for (int m = 0; m < scaled.kM; ++m) {
#pragma unroll
        for (int n = 0; n < T::kWaveTiles; ++n)
            scaled.acc[m][n] = __builtin_convertvector(acc_tile.acc[m][n], hk::MmaAcc);
    }
    scale_sums<T>(scaled.acc, site.reload(p).epilogue, coord);
    if (store_plainly<T::kWaveN, true>(site.reload(p), coord, coord.m_tile * T::kM, coord.n_tile * T::kN + T::wave_n(),
                                       scaled, lds))
        return;
    for_each_vec<T, T::kWaveN>(scaled, lds, [&](u32 m, u32 n, const auto &staged, u32 row) {
        Params rest = site.reload(p);
        rest.epilogue.a_scale = rest.epilogue.w_scale = 0;
        run_epilogue<kVecCols>(rest, coord, coord.m_tile * T::kM + m, coord.n_tile * T::kN + T::wave_n() + n,
                               staged.get(row, n));
    });
}

namespace detail {
template <bool kStreams, class Other, class E, int kM>
struct StreamedOrOther {
    using Type = Other;
};
template <class Other, class E, int kM>
struct StreamedOrOther<true, Other, E, kM> {
    using Type = StreamedTile<E, kM>;
};
}  // namespace detail

/// A tile of kM x 128: StreamedTile where loads to LDS go through registers, else `Other`.
template <class Other, class E, int kM>
using StreamedOr = typename detail::StreamedOrOther<!hk::kHasWideDma, Other, E, kM>::Type;

}  // namespace gemm
