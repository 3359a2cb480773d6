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
/// load is of four of 16 rows: lane l loads scale l / 16 of row l % 16. Loads of the same rows follow each other.
template <int kARows, int kWRows, int kThreads, u32 kWordBytes, u32 kWords_ = 4>
class BatchedScales {
    static constexpr u32 kWaves = kThreads / hk::kWaveSize, kSlots = (kARows + kWRows) / 16;
    static_assert(hk::kWaveSize == 64 && kARows % 16 == 0 && kWRows % 16 == 0, "a load has rows of one tile");
    static_assert(kWords_ % 4 == 0, "whole loads");
    static constexpr u32 kFours = kWords_ / 4;
    static constexpr int kRowParts = (kSlots + kWaves - 1) / kWaves;

  public:
    static constexpr u32 kWords = kWords_, kBytes = kWords * kWordBytes;
    static constexpr int kParts = kRowParts * kFours;  // loads of a wave
    static constexpr bool kDirectToLds = true;

    /// The scales of 16 rows; those of the next 16 rows are kWords tiles further on.
    struct Tile {
        u32 word[16];
        HK_FN u32 a(u32 row) const { return this[row / 16 * kWords].word[row % 16]; }
        HK_FN const u32 *w(u32 row) const { return this[(kARows + row) / 16 * kWords].word + row % 16; }
    };
    struct Batch {
        Tile of[kRowParts * kWaves][kWords];  // all waves load as many
    };
    struct PackedScales {
        u32 word[kParts];
    };

  private:
    u32 end_;
    hk::Window window_[kRowParts];
    u32 offset_[kRowParts], step_[kRowParts], shift_[kRowParts];

    HK_FN static u32 slot(u32 part) { return hk::wave_id() + part * kWaves; }
    /// Calls `f(part, four, window, offset, scalar)` for each load of the batch at byte `from` of the rows.
    HK_FN void each(u32 from, auto f) const {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i) {
            const u32 first = from >> shift_[i];
#pragma unroll
            for (u32 j = 0; j < kFours; ++j) {
                const u32 at = from + (4 * j + hk::lane_id() / 16) * kWordBytes;
                const u32 past = (end_ - 1u - at) & hk::Window::kOutOfBounds;
                const u32 offset = offset_[i] + ((at >> shift_[i]) - first) * step_[i];
                f(i, j, window_[i], offset | (offset_[i] & hk::Window::kOutOfBounds) | past, first * step_[i]);
            }
        }
    }

  public:
    /// `place(row, of_w)` gives the ScalePlace of a row.
    template <class Place>
    HK_FN BatchedScales(u32 end, Place place) : end_(end) {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i) {
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
        each(from, [&](u32 i, u32 j, const hk::Window &window, u32 offset, u32 scalar) {
            packed.word[i * kFours + j] = window.template load<u32>(offset, scalar);
        });
        return packed;
    }
    HK_FN static void store(const PackedScales &packed, Batch &batch) {
#pragma unroll
        for (u32 i = 0; i < kParts; ++i)
            batch.of[slot(i / kFours)][i % kFours * 4 + hk::lane_id() / 16].word[hk::lane_id() % 16] = packed.word[i];
    }
    HK_FN void copy(u32 from, Batch &batch) const {
        each(from, [&](u32 i, u32 j, const hk::Window &window, u32 offset, u32 scalar) {
            window.load_dword_to_lds(&batch.of[slot(i)][4 * j], offset, scalar);
        });
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
template <class A, class W, class Scales, int kStages, int kAStages = kStages>
struct LineStages {
    typename A::Tile a[kAStages];
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

/// Straight to LDS: rings of `kCount` stages of w and `kACount` of a, as many or one more: one is multiplied, the others are in flight.
/// One barrier per stage, as in hk::DirectPipeline.
template <class A, class W, class Scales, int kCount, int kACount>
class DirectLines {
    static constexpr int kAhead = kACount - kCount;
    static_assert(kCount >= 2, "one stage is multiplied while another is in flight");
    static_assert(kAhead == 0 || kAhead == 1);
    static constexpr bool kBatched = detail::kBatched<Scales>;
    static constexpr int kLoads = A::kParts + W::kParts;
    const A &a_;
    const W &w_;
    const Scales &scales_;
    LineStages<A, W, Scales, kCount, kACount> &stages_;

    /// The stage to multiply, in both rings.
    struct Place {
        u32 a = 0, w = 0;
        u32 at = 0;  // byte of the slice

        HK_FN void advance() {
            a = a + 1 == kACount ? 0 : a + 1;
            w = w + 1 == kCount ? 0 : w + 1;
            at += A::kStageBytes;
        }
    };

    HK_FN void copy_a(u32 from, u32 stage) const { a_.copy(from, stages_.a[stage]); }
    HK_FN void copy_w(u32 from, u32 stage) const { w_.copy(from / A::kStageBytes * W::kStageBytes, stages_.w[stage]); }
    /// Loads the first `kStages` stages of w, and those of a that are in flight beside them.
    template <int kStages>
    HK_FN void begin(u32 from) const {
        if constexpr (kBatched) scales_.copy(from, stages_.scales.batch[0]);
#pragma unroll
        for (int i = 0; i < kStages + kAhead; ++i) {
            if (i < kStages) copy_w(from + i * A::kStageBytes, i);
            copy_a(from + i * A::kStageBytes, i);
            hk::commit_loads();
        }
    }
    /// Waits until all waves have loaded all but the last `kStages` stages that are in flight, and the scales that were asked for behind
    /// them, if the stage before the one at byte `at` was the first of its batch.
    template <int kStages>
    HK_FN static void wait(u32 at = 0) {
        constexpr int kBehind = kStages * kLoads + kAhead * A::kParts;
        if constexpr (kBatched) {
            static_assert(Scales::kBytes > A::kStageBytes, "a batch is of several stages");
            if (at % Scales::kBytes == A::kStageBytes)
                hk::wait_loads<1, kBehind + Scales::kParts>();
            else
                hk::wait_loads<1, kBehind>();
        } else {
            hk::wait_loads<1, kBehind>();
        }
        hk::block_barrier();
    }
    /// Loads stage `w` of w, from byte `from` of its rows on, and stage `a` of a.
    HK_FN void copy(u32 from, u32 w, u32 a) const {
        copy_w(from, w);
        copy_a(from + kAhead * A::kStageBytes, a);
        hk::commit_loads();
    }
    /// Loads the scales behind those of the stage at byte `from` of the rows, if it is the first of its batch.
    HK_FN void copy_batch(u32 from, u32 at) const {
        if constexpr (kBatched) {
            if (at % Scales::kBytes == 0)
                scales_.copy(from + Scales::kBytes, stages_.scales.batch[(at / Scales::kBytes + 1) % 2]);
        }
    }
    HK_FN hk::Step<A, W, Scales, 1> step(const Place &now) const {
        const auto *of_stage = [&] {
            if constexpr (kBatched)
                return &stages_.scales.batch[now.at / Scales::kBytes % 2]
                            .of[0][now.at % Scales::kBytes / (Scales::kBytes / Scales::kWords)];
            else
                return &stages_.scales.stage[now.w];
        }();
        return {{&stages_.a[now.a]}, {&stages_.w[now.w]}, {of_stage}};
    }

  public:
    using Lds = LineStages<A, W, Scales, kCount, kACount>;
    static constexpr bool kHalves = kCount == 2;

    HK_FN DirectLines(const A &a, const W &w, const Scales &scales, Lds &stages)
        : a_(a), w_(w), scales_(scales), stages_(stages) {}

    /// Calls `acc.multiply<0>(Step)` for `count` stages from byte `from` of the rows on.
    template <class Accum>
    HK_FN void run(u32 from, u32 count, Accum &acc_tile) const {
        begin<kCount - 1>(from);
        Place now;
        u32 w = kCount - 1, a = kACount - 1;  // stages of LDS that are free
        for (; count > 0; --count) {
            wait<kCount - 2>(now.at);
            copy(from + (kCount - 1) * A::kStageBytes, w, a);
            copy_batch(from, now.at);
            from += A::kStageBytes;
            acc_tile.template multiply<0>(step(now));
            w = now.w, a = now.a;
            now.advance();
        }
        // Full drain: loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }

    /// The same by halves of a stage, `acc.multiply(acc.read<half>(Step))`: each is read from LDS while the one before it is
    /// multiplied. The barrier stands between the halves: all waves have a stage in registers then, and its LDS is free.
    template <class Accum>
    HK_FN void run_halves(u32 from, u32 count, Accum &acc_tile) const {
        static_assert(!kBatched && Scales::kParts == 0, "halves have no scales");
        begin<kCount>(from);
        Place now;
        wait<kCount - 1>();
        auto first = acc_tile.template read<0>(step(now));
        for (; count > 0; --count) {
            const auto second = acc_tile.template read<1>(step(now));
            hk::sched_barrier();
            acc_tile.multiply(first);
            hk::sched_barrier();
            wait<kCount - 2>();
            const Place freed = now;
            now.advance();
            first = acc_tile.template read<0>(step(now));
            copy(from + kCount * A::kStageBytes, freed.w, freed.a);
            from += A::kStageBytes;
            hk::sched_barrier();
            acc_tile.multiply(second);
            hk::sched_barrier();
        }
        // Full drain: loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }
};

namespace detail {
/// Whether LDS has room for so many stages.
template <class A, class W, class Scales, int kCount, int kACount = kCount>
inline constexpr bool kFit = sizeof(LineStages<A, W, Scales, kCount, kACount>) <= hk::kLdsBytes;

template <bool kDirectToLds, class A, class W, class Scales>
struct LinesOf {
    using Type = RegisterLines<A, W, Scales>;
};
template <class A, class W, class Scales>
struct LinesOf<true, A, W, Scales> {
    // Three where LDS has room. With two, nothing would be in flight between the wait for one and its place in the other's.
    static constexpr int kStages = kFit<A, W, Scales, 3> ? 3 : 2;
    static constexpr bool kAhead = kStages == 2 && kFit<A, W, Scales, 2, 3>;
    using Type = DirectLines<A, W, Scales, kStages, kStages + kAhead>;
};
}  // namespace detail

/// DirectLines where target and rows allow it, else RegisterLines.
template <class A, class W, class Scales>
using LinePipeline =
    typename detail::LinesOf<A::kDirectToLds && W::kDirectToLds && Scales::kDirectToLds, A, W, Scales>::Type;

}  // namespace gemm
