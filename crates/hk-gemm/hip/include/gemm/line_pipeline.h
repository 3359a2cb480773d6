// line_pipeline.h: pipelines whose stages are 128 bytes of each row: a line of L1.
//   A stage of 64 bytes asks for a line twice, and the blocks of a CU read more lines per stage than L1 has: each line would be
//   filled twice. The same holds for scales, 4 bytes of a row for a stage: they are loaded for several stages at once.
#pragma once

#include <gemm/args.h>

#include <hk/block.h>
#include <hk/global.h>
#include <hk/pipeline.h>
#include <hk/wave.h>

namespace gemm {
/// Loads the packed scales (4 bytes) of each row of a, then of w, for `kWords` times `kWordBytes` bytes of a row at once. A wave's
/// load is of 16 rows: lane l loads scale l / 16 of row l % 16.
template <int kARows, int kWRows, int kThreads, u32 kWordBytes>
class BatchedScales {
    static constexpr u32 kWaves = kThreads / hk::kWaveSize, kSlots = (kARows + kWRows) / 16;
    static_assert(hk::kWaveSize == 64 && kARows % 16 == 0 && kWRows % 16 == 0, "a load has rows of one tile");

  public:
    static constexpr u32 kWords = 4, kBytes = kWords * kWordBytes;
    static constexpr int kParts = (kSlots + kWaves - 1) / kWaves;
    static constexpr bool kDirectToLds = true;

    /// The scales of 16 rows; those of the next 16 rows are kWords tiles further on.
    struct Tile {
        u32 word[16];
        HK_FN u32 a(u32 row) const { return this[row / 16 * kWords].word[row % 16]; }
        HK_FN const u32 *w(u32 row) const { return this[(kARows + row) / 16 * kWords].word + row % 16; }
    };
    struct Batch {
        Tile of[kParts * kWaves][kWords];  // all waves load as many
    };
    struct PackedScales {
        u32 word[kParts];
    };

  private:
    u32 end_;
    hk::Window window_[kParts];
    u32 offset_[kParts], step_[kParts], shift_[kParts];

    HK_FN static u32 slot(u32 part) { return hk::wave_id() + part * kWaves; }
    /// Calls `f(part, offset, scalar)` for each load of the batch at byte `from` of the rows.
    HK_FN void each(u32 from, auto f) const {
        const u32 at = from + hk::lane_id() / 16 * kWordBytes;
        const u32 past = (end_ - 1u - at) & hk::Window::kOutOfBounds;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 first = from >> shift_[i];
            f(i, (offset_[i] + ((at >> shift_[i]) - first) * step_[i]) | (offset_[i] & hk::Window::kOutOfBounds) | past,
              first * step_[i]);
        }
    }

  public:
    /// `place(row, of_w)` gives the ScalePlace of a row.
    template <class Place>
    HK_FN BatchedScales(u32 end, Place place) : end_(end) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 row = slot(i) * 16 + hk::lane_id() % 16;
            const bool of_w = slot(i) * 16 >= kARows;
            const hk::ScalePlace where = of_w ? place(row - kARows, true) : place(row, false);
            window_[i] = hk::Window(reinterpret_cast<GlobalPtr<const u8>>(where.data), hk::Window::kOutOfBounds - 1);
            offset_[i] = row < kARows + kWRows ? where.offset : hk::Window::kOutOfBounds;
            step_[i] = hk::uniform(where.step);
            shift_[i] = hk::uniform(where.shift);
        }
    }

    HK_FN PackedScales load(u32 from) const {
        PackedScales packed;
        each(from,
             [&](int i, u32 offset, u32 scalar) { packed.word[i] = window_[i].template load<u32>(offset, scalar); });
        return packed;
    }
    HK_FN static void store(const PackedScales &packed, Batch &batch) {
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            batch.of[slot(i)][hk::lane_id() / 16].word[hk::lane_id() % 16] = packed.word[i];
    }
    HK_FN void copy(u32 from, Batch &batch) const {
        each(from,
             [&](int i, u32 offset, u32 scalar) { window_[i].load_dword_to_lds(&batch.of[slot(i)], offset, scalar); });
    }
};

namespace detail {
/// Whether scales are loaded for several stages at once.
template <class Scales>
inline constexpr bool kBatched = requires { typename Scales::Batch; };

/// The scales in LDS: of each stage, or two batches.
template <class Scales, int kStages>
struct ScaleStages {
    typename Scales::Tile stage[kStages];
};
template <class Scales, int kStages>
    requires kBatched<Scales>
struct ScaleStages<Scales, kStages> {
    typename Scales::Batch batch[kStages > 1 ? 2 : 1];
};
}  // namespace detail

/// LDS stages of two tiles and their scales.
template <class A, class W, class Scales, int kStages>
struct LineStages {
    typename A::Tile a[kStages];
    typename W::Tile w[kStages];
    detail::ScaleStages<Scales, kStages> scales;
};

/// Through registers: LDS has one stage, and the next is in flight to registers while it is multiplied.
template <class A, class W, class Scales>
class RegisterLines {
    static constexpr bool kBatched = detail::kBatched<Scales>;
    const A &a_;
    const W &w_;
    const Scales &scales_;
    LineStages<A, W, Scales, 1> &stage_;

    struct Stage {
        typename A::Chunks a;
        typename W::Chunks w;
    };

    HK_FN Stage load(u32 from) const { return {a_.load(from), w_.load(from / A::kStageBytes * W::kStageBytes)}; }

  public:
    using Lds = LineStages<A, W, Scales, 1>;

    HK_FN RegisterLines(const A &a, const W &w, const Scales &scales, Lds &stage)
        : a_(a), w_(w), scales_(scales), stage_(stage) {}

    /// Calls `acc.multiply<0>(Step)` for `count` stages from byte `from` of the rows on.
    template <class Accum>
    HK_FN void run(u32 from, u32 count, Accum &acc_tile) const {
        Stage next = load(from);
        auto scales = scales_.load(from);
        for (u32 at = 0; count > 0; --count) {
            hk::block_barrier();  // all waves have read the stage before
            a_.store(next.a, stage_.a[0]);
            w_.store(next.w, stage_.w[0]);
            if constexpr (!kBatched) scales_.store(scales, stage_.scales.stage[0]);
            if constexpr (kBatched) {
                if (at % Scales::kBytes == 0) {
                    scales_.store(scales, stage_.scales.batch[0]);
                    scales = scales_.load(from + Scales::kBytes);
                }
            }
            from += A::kStageBytes;
            next = load(from);
            if constexpr (!kBatched) scales = scales_.load(from);
            hk::sched_barrier();
            hk::block_barrier();
            const auto *of_stage = [&] {
                if constexpr (kBatched)
                    return &stage_.scales.batch[0].of[0][at % Scales::kBytes / (Scales::kBytes / Scales::kWords)];
                else
                    return &stage_.scales.stage[0];
            }();
            acc_tile.template multiply<0>(hk::Step<A, W, Scales, 1>{{stage_.a}, {stage_.w}, {of_stage}});
            hk::sched_barrier();
            at += A::kStageBytes;
        }
    }
};

/// Straight to LDS: a ring of `kCount` stages, one multiplied, the others in flight. One barrier per stage, as in
/// hk::DirectPipeline.
template <class A, class W, class Scales, int kCount>
class DirectLines {
    static_assert(kCount >= 2, "one stage is multiplied while another is in flight");
    static constexpr bool kBatched = detail::kBatched<Scales>;
    static constexpr int kLoads = A::kParts + W::kParts;
    const A &a_;
    const W &w_;
    const Scales &scales_;
    LineStages<A, W, Scales, kCount> &stages_;

    HK_FN void copy(u32 from, u32 stage) const {
        a_.copy(from, stages_.a[stage]);
        w_.copy(from / A::kStageBytes * W::kStageBytes, stages_.w[stage]);
        hk::commit_loads();
    }

  public:
    using Lds = LineStages<A, W, Scales, kCount>;

    HK_FN DirectLines(const A &a, const W &w, const Scales &scales, Lds &stages)
        : a_(a), w_(w), scales_(scales), stages_(stages) {}

    /// Calls `acc.multiply<0>(Step)` for `count` stages from byte `from` of the rows on.
    template <class Accum>
    HK_FN void run(u32 from, u32 count, Accum &acc_tile) const {
        if constexpr (kBatched) scales_.copy(from, stages_.scales.batch[0]);
#pragma unroll
        for (int i = 0; i + 1 < kCount; ++i, from += A::kStageBytes) copy(from, i);
        u32 now = 0, next = kCount - 1, at = 0;
        for (; count > 0; --count) {
            hk::wait_loads<kCount - 2, kLoads>();
            hk::block_barrier();
            // Ahead of the stage's loads, so that the wait for a later stage is for these, too.
            if constexpr (kBatched) {
                const u32 batch = at / Scales::kBytes;
                if (at % Scales::kBytes == 0) {
                    scales_.copy(from - (kCount - 1) * A::kStageBytes + Scales::kBytes,
                                 stages_.scales.batch[(batch + 1) % 2]);
                }
            }
            copy(from, next);
            from += A::kStageBytes;
            const auto *of_stage = [&] {
                if constexpr (kBatched)
                    return &stages_.scales.batch[at / Scales::kBytes % 2]
                                .of[0][at % Scales::kBytes / (Scales::kBytes / Scales::kWords)];
                else
                    return &stages_.scales.stage[now];
            }();
            acc_tile.template multiply<0>(hk::Step<A, W, Scales, 1>{{&stages_.a[now]}, {&stages_.w[now]}, {of_stage}});
            next = now;
            now = now + 1 == kCount ? 0 : now + 1;
            at += A::kStageBytes;
        }
        // Full drain: loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }
};

namespace detail {
/// Three stages where LDS has room.
template <class A, class W, class Scales>
inline constexpr int kLineStages = sizeof(LineStages<A, W, Scales, 3>) <= hk::kLdsBytes ? 3 : 2;

template <bool kDirectToLds, class A, class W, class Scales>
struct LinesOf {
    using Type = RegisterLines<A, W, Scales>;
};
template <class A, class W, class Scales>
struct LinesOf<true, A, W, Scales> {
    using Type = DirectLines<A, W, Scales, kLineStages<A, W, Scales>>;
};
}  // namespace detail

/// DirectLines where target and rows allow it, else RegisterLines.
template <class A, class W, class Scales>
using LinePipeline =
    typename detail::LinesOf<A::kDirectToLds && W::kDirectToLds && Scales::kDirectToLds, A, W, Scales>::Type;

}  // namespace gemm
