// line_pipeline.h: pipelines whose stages are 128 bytes of each row: a line of L1.
//   A stage of 64 bytes asks for a line twice, and the blocks of a CU read more lines per stage than L1 has: each line would be
//   filled twice. The same holds for scales, 4 bytes of a row for a stage: they are loaded for many stages at once.
#pragma once

#include <gemm/args.h>

#include <hk/block.h>
#include <hk/global.h>
#include <hk/pipeline.h>
#include <hk/wave.h>

namespace gemm {
/// Loads the packed scales (4 bytes) of each row of a, then of w, in chunks of four, each for `kWordBytes` bytes of a row; `kChunks` chunks at
/// once. A wave's load is a chunk of 16 rows: lane l loads scale l / 16 of row l % 16. Loads of the same rows follow each other.
template <int kARows, int kWRows, int kThreads, u32 kWordBytes, u32 kChunks_>
class ChunkedScales {
    static constexpr u32 kWaves = kThreads / hk::kWaveSize, kGroups = (kARows + kWRows) / 16;
    static_assert(hk::kWaveSize == 64 && kARows % 16 == 0 && kWRows % 16 == 0, "a load has rows of one operand");
    static constexpr int kRowParts = (kGroups + kWaves - 1) / kWaves;

  public:
    static constexpr u32 kChunks = kChunks_, kWords = 4, kChunkBytes = kWords * kWordBytes;
    static constexpr int kParts = kRowParts * kChunks;  // loads of a wave
    static constexpr bool kDirectToLds = true;

    /// The scales of 16 rows; those of the next 16 rows are kWords tiles further on.
    struct Tile {
        u32 word[16];
        HK_FN u32 a(u32 row) const { return this[row / 16 * kWords].word[row % 16]; }
        HK_FN const u32 *w(u32 row) const { return this[(kARows + row) / 16 * kWords].word + row % 16; }
    };
    struct Chunk {
        Tile of[kGroups][kWords];

        /// The scales of the stage at byte `at` of the slice.
        HK_FN const Tile *stage(u32 at) const { return &of[0][at % kChunkBytes / kWordBytes]; }
    };
    struct PackedScales {
        u32 word[kRowParts][kChunks];
    };

  private:
    u32 end_;
    hk::Window window_[kRowParts];
    u32 offset_[kRowParts], step_[kRowParts], shift_[kRowParts];

    /// Waves that are left over load their first rows again.
    HK_FN static u32 group(u32 part) {
        const u32 at = hk::wave_id() + part * kWaves;
        return kGroups % kWaves == 0 || at < kGroups ? at : hk::wave_id();
    }
    /// Calls `f(part, chunk, window, offset, scalar)` for each load of the chunks at byte `from` of the rows.
    HK_FN void each(u32 from, auto f) const {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i) {
            const u32 first = from >> shift_[i];
#pragma unroll
            for (u32 j = 0; j < kChunks; ++j) {
                const u32 at = from + (kWords * j + hk::lane_id() / 16) * kWordBytes;
                const u32 past = (end_ - 1u - at) & hk::Window::kOutOfBounds;
                const u32 offset = offset_[i] + ((at >> shift_[i]) - first) * step_[i];
                f(i, j, window_[i], offset | past, first * step_[i]);
            }
        }
    }

  public:
    /// `place(row, of_w)` gives the ScalePlace of a row.
    template <class Place>
    HK_FN ChunkedScales(u32 end, Place place) : end_(end) {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i) {
            const u32 row = group(i) * 16 + hk::lane_id() % 16;
            const bool of_w = group(i) * 16 >= kARows;
            const hk::ScalePlace where = of_w ? place(row - kARows, true) : place(row, false);
            window_[i] = hk::Window(reinterpret_cast<GlobalPtr<const u8>>(where.data), hk::Window::kOutOfBounds - 1);
            offset_[i] = where.offset;
            step_[i] = hk::uniform(where.step);
            shift_[i] = hk::uniform(where.shift);
        }
    }

    HK_FN PackedScales load(u32 from) const {
        PackedScales packed;
        each(from, [&](u32 i, u32 j, const hk::Window &window, u32 offset, u32 scalar) {
            packed.word[i][j] = window.template load<u32>(offset, scalar);
        });
        return packed;
    }
    HK_FN static void store(const PackedScales &packed, Chunk (&chunks)[kChunks]) {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
            for (u32 j = 0; j < kChunks; ++j)
                chunks[j].of[group(i)][hk::lane_id() / 16].word[hk::lane_id() % 16] = packed.word[i][j];
        }
    }
    /// Asynchronous loads to the chunks of a ring from `first` on.
    template <u32 kRing>
    HK_FN void copy(u32 from, Chunk (&ring)[kRing], u32 first) const {
        each(from, [&](u32 i, u32 j, const hk::Window &window, u32 offset, u32 scalar) {
            const u32 at = first + j;
            window.load_dword_to_lds(&ring[at < kRing ? at : at - kRing].of[group(i)], offset, scalar);
        });
    }
};

namespace detail {
/// Whether scales are loaded for several stages at once, and whether with each stage.
template <class Scales>
inline constexpr bool kChunked = requires { typename Scales::Chunk; };
template <class Scales>
inline constexpr bool kOfEachStage = !kChunked<Scales> && Scales::kParts > 0;

/// Whether a wave reads all operands of a stage before it multiplies.
template <class Accum>
inline constexpr bool kReadsFirst = requires { requires Accum::kReadsFirst; };

/// The scales in LDS: of each stage; or chunks, `kKept` of which are in use while others are in flight.
template <class Scales, int kStages, u32 kKept>
struct ScaleStages {
    typename Scales::Tile stage[kStages];
};
template <class Scales, int kStages, u32 kKept>
    requires kChunked<Scales>
struct ScaleStages<Scales, kStages, kKept> {
    typename Scales::Chunk chunk[Scales::kChunks + kKept];
};
}  // namespace detail

/// LDS stages of two tiles and their scales.
template <class A, class W, class Scales, int kStages, int kAStages = kStages, u32 kKept = 0>
struct LineStages {
    typename A::Tile a[kAStages];
    typename W::Tile w[kStages];
    detail::ScaleStages<Scales, kStages, kKept> scales;
};

namespace detail {
/// At the first stage of the chunks in LDS, byte `from` of the rows and `at` of the slice: stores them, and loads the next.
template <class Scales>
HK_FN void refill(const Scales &from_memory, auto &packed, auto &chunks, u32 from, u32 at) {
    constexpr u32 kBytes = Scales::kChunks * Scales::kChunkBytes;
    if (at % kBytes != 0) return;
    from_memory.store(packed, chunks);
    packed = from_memory.load(from + kBytes);
}
}  // namespace detail

/// Through registers: LDS has one stage, and the next is in flight to registers while it is multiplied.
template <class A, class W, class Scales>
class RegisterLines {
    static constexpr bool kChunked = detail::kChunked<Scales>;
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
            if constexpr (kChunked)
                detail::refill(scales_, scales, stage_.scales.chunk, from, at);
            else
                scales_.store(scales, stage_.scales.stage[0]);
            from += A::kStageBytes;
            next = load(from);
            if constexpr (!kChunked) scales = scales_.load(from);
            hk::sched_barrier();
            hk::block_barrier();
            const auto *of_stage = [&] {
                if constexpr (kChunked)
                    return stage_.scales.chunk[at / Scales::kChunkBytes % Scales::kChunks].stage(at);
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
    static constexpr bool kChunked = detail::kChunked<Scales>;
    /// Of a stage.
    static constexpr int kLoads = A::kParts + W::kParts + (detail::kOfEachStage<Scales> ? Scales::kParts : 0);

    /// Stages of a chunk of scales.
    static constexpr u32 kOfChunk = [] {
        if constexpr (kChunked)
            return Scales::kChunkBytes / A::kStageBytes;
        else
            return 1u;
    }();
    /// Chunks of scales in use when others are asked for. These are behind a stage of loads, and have landed when that is multiplied; with two
    /// stages, when the next is.
    static constexpr u32 kKept = kChunked ? ((kCount > 2 ? kCount - 1 : 2) + kOfChunk - 1) / kOfChunk : 0;

  public:
    using Lds = LineStages<A, W, Scales, kCount, kACount, kKept>;

  private:
    const A &a_;
    const W &w_;
    const Scales &scales_;
    Lds &stages_;

    /// A stage in both rings.
    struct Place {
        u32 of_w = 0, ahead = 0;

        HK_FN u32 of_a() const { return kAhead == 0 ? of_w : ahead; }
        HK_FN void advance() {
            of_w = of_w + 1 == kCount ? 0 : of_w + 1;
            ahead = ahead + 1 == kACount ? 0 : ahead + 1;
        }
    };

    HK_FN static void copy_a(const A &a, u32 from, Lds &stages, u32 stage) { a.copy(from, stages.a[stage]); }
    HK_FN static void copy_w(const W &w, u32 from, Lds &stages, u32 stage) {
        w.copy(from / A::kStageBytes * W::kStageBytes, stages.w[stage]);
    }
    /// Scales of each stage are in the ring of w.
    HK_FN void copy_scales(u32 from, u32 stage) const {
        if constexpr (detail::kOfEachStage<Scales>) scales_.copy(from, stages_.scales.stage[stage]);
    }
    /// Loads the stages from the second on: `kStages` of w in all, and those of a that are in flight beside them.
    template <int kStages>
    HK_FN void begin_others(u32 from) const {
#pragma unroll
        for (int i = 1; i < kStages + kAhead; ++i) {
            if (i < kStages) {
                copy_w(w_, from + i * A::kStageBytes, stages_, i);
                copy_scales(from + i * A::kStageBytes, i);
            }
            copy_a(a_, from + i * A::kStageBytes, stages_, i);
            hk::commit_loads();
        }
    }
    /// Waits for all loads but those of the last `kStages` stages that are in flight, and `kOthers` among them, of all waves.
    template <int kStages, int kOthers = 0>
    HK_FN static void wait() {
        hk::wait_loads<1, kStages * kLoads + kAhead * A::kParts + kOthers>();
        hk::block_barrier();
    }
    /// Loads a stage of w, from byte `from` of its rows on, and one of a.
    HK_FN void load(u32 from, const Place &to) const {
        copy_w(w_, from, stages_, to.of_w);
        copy_scales(from, to.of_w);
        copy_a(a_, from + kAhead * A::kStageBytes, stages_, to.of_a());
        hk::commit_loads();
    }
    /// The stage at byte `at` of the slice, and its chunk of scales.
    HK_FN hk::Step<A, W, Scales, 1> step(const Place &now, u32 at = 0, u32 chunk = 0) const {
        const auto *of_stage = [&] {
            if constexpr (kChunked)
                return stages_.scales.chunk[chunk].stage(at);
            else
                return &stages_.scales.stage[now.of_w];
        }();
        return {{&stages_.a[now.of_a()]}, {&stages_.w[now.of_w]}, {of_stage}};
    }

  public:
    static constexpr bool kHalves = kCount == 2 || detail::kOfEachStage<Scales>;

    /// Loads the first stage; it is in flight while the caller makes `scales`.
    HK_FN static void begin(const A &a, const W &w, Lds &stages, u32 from) {
        copy_w(w, from, stages, 0);
        copy_a(a, from, stages, 0);
        hk::commit_loads();
    }
    /// After `begin`.
    HK_FN DirectLines(const A &a, const W &w, const Scales &scales, Lds &stages)
        : a_(a), w_(w), scales_(scales), stages_(stages) {}

    /// Calls `acc.multiply<0>(Step)`, or `acc.multiply(acc.read(Step))`, for `count` stages from byte `from` of the rows on; at least for one.
    template <class Accum>
    HK_FN void run(u32 from, u32 count, Accum &acc_tile) const {
        static_assert(!kChunked || requires { requires kKept <= Scales::kChunks; }, "there are as many at first");
        if constexpr (kChunked) scales_.copy(from, stages_.scales.chunk, 0);
        copy_scales(from, 0);
        begin_others<kCount - 1>(from);
        acc_tile.clear();
        Place now, free{kCount - 1, kACount - 1};
        u32 at = 0, chunk = 0, left = 0;  // chunks that are in use or in flight
        u32 among = 0;  // waits at which the last scales are among the loads in flight
        if constexpr (kChunked) left = Scales::kChunks;
        const auto load_next = [&] {
            load(from + (kCount - 1) * A::kStageBytes, free);
            // Behind the stage, whose addresses are there.
            if constexpr (kChunked) {
                if (at % Scales::kChunkBytes == 0 && left == kKept) {
                    constexpr u32 kRing = Scales::kChunks + kKept;
                    const u32 next = chunk + kKept;
                    scales_.copy(from + kKept * Scales::kChunkBytes, stages_.scales.chunk,
                                 next < kRing ? next : next - kRing);
                    left += Scales::kChunks;
                    among = kCount - 2;
                }
            }
        };
        do {
            if (kChunked && among > 0) {
                wait<kCount - 2, Scales::kParts>();
                --among;
            } else {
                wait<kCount - 2>();
            }
            if constexpr (detail::kReadsFirst<Accum>) {
                // Loads are issued while LDS is read.
                const auto operands = acc_tile.read(step(now, at, chunk));
                load_next();
                hk::sched_barrier();
                acc_tile.multiply(operands);
            } else {
                load_next();
                acc_tile.template multiply<0>(step(now, at, chunk));
            }
            from += A::kStageBytes;
            at += A::kStageBytes;
            free = now;
            now.advance();
            if constexpr (kChunked) {
                if (at % Scales::kChunkBytes == 0) {
                    chunk = chunk + 1 == Scales::kChunks + kKept ? 0 : chunk + 1;
                    --left;
                }
            }
        } while (at < count * A::kStageBytes);
        // Full drain: loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }

    /// The same by halves of a stage, `acc.multiply(acc.read<half>(Step))`: each is read from LDS while the one before it is
    /// multiplied. The barrier stands between the halves: all waves have a stage in registers then, and its LDS is free. Where nothing is ahead,
    /// the stage after the next is asked for there, so that loads are in flight when the next is waited for, in the middle of the second half.
    template <class Accum>
    HK_FN void run_halves(u32 from, u32 count, Accum &acc_tile) const {
        static_assert(!kChunked, "scales of each stage");
        copy_scales(from, 0);
        begin_others<kCount>(from);
        acc_tile.clear();
        Place now;
        wait<kCount - 1>();
        auto first = acc_tile.template read<0>(step(now));
        do {
            const auto second = acc_tile.template read<1>(step(now));
            hk::sched_barrier();
            acc_tile.multiply(first);
            hk::sched_barrier();
            if constexpr (kAhead > 0)
                wait<kCount - 2>();
            else
                hk::block_barrier();
            const Place freed = now;
            now.advance();
            if constexpr (kAhead > 0) {
                first = acc_tile.template read<0>(step(now));
                load(from + kCount * A::kStageBytes, freed);
                hk::sched_barrier();
                acc_tile.multiply(second);
            } else {
                load(from + kCount * A::kStageBytes, freed);
                hk::sched_barrier();
                acc_tile.template multiply_part<0>(second);
                hk::sched_barrier();
                wait<kCount - 1>();
                first = acc_tile.template read<0>(step(now));
                hk::sched_barrier();
                acc_tile.template multiply_part<1>(second);
            }
            from += A::kStageBytes;
            hk::sched_barrier();
        } while (int(--count) > 0);
        // Full drain: loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }
};

namespace detail {
/// Whether LDS has room for so many stages.
template <class A, class W, class Scales, int kCount, int kACount = kCount>
inline constexpr bool kFit = sizeof(typename DirectLines<A, W, Scales, kCount, kACount>::Lds) <= hk::kLdsBytes;

template <bool kDirectToLds, class A, class W, class Scales>
struct LinesOf {
    using Type = RegisterLines<A, W, Scales>;
};
template <class A, class W, class Scales>
struct LinesOf<true, A, W, Scales> {
    // With two, nothing is in flight between the wait for one and its place in the other's. A CU has three blocks of 64 x 64.
    static constexpr int kMost = A::Tile::kRows + W::Tile::kRows > 128 ? 4 : 3;
    static constexpr int kStages = kFit<A, W, Scales, kMost> ? kMost : kFit<A, W, Scales, 3> ? 3 : 2;
    // Nor where `run_halves` waits with a stage in flight.
    static constexpr bool kAhead = kStages == 2 && !kOfEachStage<Scales> && kFit<A, W, Scales, 2, 3>;
    using Type = DirectLines<A, W, Scales, kStages, kStages + kAhead>;
};
}  // namespace detail

/// DirectLines where target and rows allow it, else RegisterLines.
template <class A, class W, class Scales>
using LinePipeline =
    typename detail::LinesOf<A::kDirectToLds && W::kDirectToLds && Scales::kDirectToLds, A, W, Scales>::Type;

}  // namespace gemm
