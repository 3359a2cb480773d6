// pipeline.h: tiles on their way from global memory through LDS to a block's waves, ahead of their use.
//
//   rows of X, of W  --Mover-->  stages in LDS  --fragments-->  products
//
// A stage is kBytes of each row of both tiles. What lies past the rows' end, `end`, is zero, and so are rows past the
// last one: a tail costs nothing in the loop.
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/global.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// How the threads of a block bring a tile's rows to LDS: 16 bytes at a time, lanes side by side in LDS, each with the chunk
/// that belongs at its place. By vectors, rows begin on 16 bytes and end with a whole chunk, and the tile's rows lie within
/// 2 GiB; by elements of `kElement` bytes any rows will do.
template <class Tile_, int kThreads, Access kAccess, int kElement>
class Mover;

template <class Tile_, int kThreads, int kElement>
class Mover<Tile_, kThreads, Access::Vectors, kElement> {
public:
    using Tile = Tile_;
    static constexpr int kParts = Tile::kRows * Tile::kChunks / kThreads;
    static_assert(kParts * kThreads == Tile::kRows * Tile::kChunks, "every thread has as many chunks");
    static_assert(kThreads / Tile::kChunks % 16 == 0, "all chunks of a thread are at one place of their rows");

    /// What a thread has of a tile.
    struct Chunks {
        Vec<u32, 4> part[kParts];
    };

private:
    Window window_;
    u32 end_;            // of a row, in bytes
    u32 ahead_;          // of the thread's chunks in their rows
    u32 offset_[kParts];  // of the chunks in the window; beyond it for rows past the last

    HK_FN u32 at(int part, u32 from) const {
        // The sign of what is left of the row moves the offset beyond the window.
        const u32 left = end_ - 1u - (from + ahead_);
        return offset_[part] | (left & Window::kBeyond);
    }

public:
    static constexpr bool kDirect = kHasWideDma;

    /// Rows of `end` bytes, `stride` bytes apart. Row r of the tile is row `row_of(r)` of them; from `rows` on there is none.
    template <class RowOf>
    HK_FN Mover(GlobalPtr<const u8> first, u32 rows, i64 stride, u32 end, RowOf row_of)
        : window_(first, Window::kBeyond - 1), end_(end) {
        const u32 row = thread_x() / Tile::kChunks;
        ahead_ = (thread_x() % Tile::kChunks ^ Tile::swizzle(row)) * 16;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = row_of(row + i * (kThreads / Tile::kChunks));
            offset_[i] = from < rows ? from * u32(stride) + ahead_ : Window::kBeyond;
        }
    }

    /// The thread's chunks of the stage that begins `from` bytes into the rows.
    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) chunks.part[i] = window_.load_chunk(at(i, from), from);
        return chunks;
    }

    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) tile.chunk[thread_x() + i * kThreads] = chunks.part[i];
    }

#if defined(HK_AMD)
    /// `load` and `store` in one, past the registers: `kParts` loads, which `wait_loads` waits for.
    HK_FN void copy(u32 from, Tile &tile) const {
        using Lds = __attribute__((address_space(3))) void *;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            window_.load_to_lds((Lds)&tile.chunk[wave_id() * kWaveSize + i * kThreads], at(i, from), from);
        }
    }
#endif
};

template <class Tile_, int kThreads, int kElement>
class Mover<Tile_, kThreads, Access::Elements, kElement> {
public:
    using Tile = Tile_;
    static constexpr int kParts = Tile::kRows * Tile::kChunks / kThreads;
    static_assert(kThreads / Tile::kChunks % 16 == 0, "all chunks of a thread are at one place of their rows");
    static constexpr bool kDirect = false;

    struct Chunks {
        Vec<u32, 4> part[kParts];
    };

private:
    using Bits = decltype([] {
        if constexpr (kElement == 2) return u16(0);
        else return u8(0);
    }());

    u32 end_, ahead_;
    GlobalPtr<const u8> row_[kParts];
    bool there_[kParts];

public:
    template <class RowOf>
    HK_FN Mover(GlobalPtr<const u8> first, u32 rows, i64 stride, u32 end, RowOf row_of) : end_(end) {
        const u32 row = thread_x() / Tile::kChunks;
        ahead_ = (thread_x() % Tile::kChunks ^ Tile::swizzle(row)) * 16;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = row_of(row + i * (kThreads / Tile::kChunks));
            there_[i] = from < rows;
            row_[i] = first + (there_[i] ? from : 0) * stride;
        }
    }

    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            Vec<Bits, 16 / kElement> v = Bits(0);
#pragma unroll
            for (u32 j = 0; j < 16; j += kElement) {
                const u32 at = from + ahead_ + j;
                if (there_[i] && at < end_) v[j / kElement] = *reinterpret_cast<GlobalPtr<const Bits>>(row_[i] + at);
            }
            chunks.part[i] = __builtin_bit_cast(Vec<u32, 4>, v);
        }
        return chunks;
    }

    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) tile.chunk[thread_x() + i * kThreads] = chunks.part[i];
    }
};

/// Instructions do not pass this point: the compiler would delay loads to where they are used, and hasten writes to LDS,
/// which wait for loads.
HK_FN void keep_order() {
#if defined(HK_AMD)
    __builtin_amdgcn_sched_barrier(0);
#endif
}

#if defined(HK_AMD)
/// Waits until no more than `kLeft` loads of this wave are on their way, the last ones.
template <int kLeft>
HK_FN void wait_loads() {
    static_assert(kLeft < 64, "what the counter holds");
    asm volatile("s_waitcnt vmcnt(%0)" : : "n"(kLeft) : "memory");
}
#endif

/// Stages of two tiles in LDS.
template <class X, class W, int kStages>
struct Stages {
    typename X::Tile x[kStages];
    typename W::Tile w[kStages];
};

/// The stages that are multiplied at a time.
template <class X, class W, int kStages>
struct Step {
    const typename X::Tile *x[kStages];
    const typename W::Tile *w[kStages];
};

/// By registers: while `kStep` stages are multiplied, those after them are in registers or on their way there, and the ones
/// after these are being loaded. Twice as many stages in LDS, one barrier a step: a block writes stages that all its waves
/// have left before the last barrier.
template <class X, class W, int kStep>
class RegisterPipeline {
    const X &x_;
    const W &w_;
    Stages<X, W, 2 * kStep> &stages_;

    struct Set {
        typename X::Chunks x[kStep];
        typename W::Chunks w[kStep];
    };

    HK_FN Set load(u32 from) const {
        Set set;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            set.x[i] = x_.load(from + i * X::Tile::kBytes);
            set.w[i] = w_.load(from + i * X::Tile::kBytes);
        }
        return set;
    }
    HK_FN void store(const Set &set, int half) const {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            X::store(set.x[i], stages_.x[half * kStep + i]);
            W::store(set.w[i], stages_.w[half * kStep + i]);
        }
    }
    HK_FN Step<X, W, kStep> step(int half) const {
        Step<X, W, kStep> now;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            now.x[i] = &stages_.x[half * kStep + i];
            now.w[i] = &stages_.w[half * kStep + i];
        }
        return now;
    }

public:
    using Lds = Stages<X, W, 2 * kStep>;

    HK_FN RegisterPipeline(const X &x, const W &w, Lds &stages) : x_(x), w_(w), stages_(stages) {}

    /// Calls `multiply(Step)` for `count` stages from byte `from` of the rows on, `kStep` at a time.
    template <class F>
    HK_FN void run(u32 from, u32 count, F multiply) const {
        constexpr u32 kBytes = kStep * X::Tile::kBytes;
        const u32 steps = (count + kStep - 1) / kStep;
        Set even = load(from);
        Set odd = load(from + kBytes);
        store(even, 0);
        for (u32 pairs = steps / 2; pairs > 0; --pairs) {
            from += 2 * kBytes;
            block_barrier();
            even = load(from);
            keep_order();
            multiply(step(0));
            keep_order();
            store(odd, 1);
            block_barrier();
            odd = load(from + kBytes);
            keep_order();
            multiply(step(1));
            keep_order();
            store(even, 0);
        }
        if (steps % 2 != 0) {
            block_barrier();
            multiply(step(0));
        }
    }
};

#if defined(HK_AMD)
/// Straight to LDS: `kCount` stages in a ring, of which `kStep` are multiplied at a time, and all others but those that the
/// last step has left are on their way. One barrier a step: a wave passes it when its own loads for this step have landed,
/// and then all waves have left what the next loads overwrite.
template <class X, class W, int kCount, int kStep>
class DirectPipeline {
    static constexpr int kAhead = kCount - kStep;  // stages loaded before they are multiplied
    static constexpr int kLoads = X::kParts + W::kParts;
    static_assert(kAhead > kStep, "the loads for a step are not the last ones on their way");

    const X &x_;
    const W &w_;
    Stages<X, W, kCount> &stages_;

    HK_FN void copy(u32 from, u32 stage) const {
        x_.copy(from, stages_.x[stage]);
        w_.copy(from, stages_.w[stage]);
    }

public:
    using Lds = Stages<X, W, kCount>;

    HK_FN DirectPipeline(const X &x, const W &w, Lds &stages) : x_(x), w_(w), stages_(stages) {}

    /// Calls `multiply(Step)` for `count` stages from byte `from` of the rows on, `kStep` at a time.
    template <class F>
    HK_FN void run(u32 from, u32 count, F multiply) const {
        constexpr u32 kBytes = X::Tile::kBytes;
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) copy(from + i * kBytes, i);
        from += kAhead * kBytes;
        // The next stage to multiply, and the next to load.
        u32 first = 0, next = kAhead % kCount;
        const auto after = [](u32 stage) { return stage + 1 == kCount ? 0 : stage + 1; };
        for (u32 done = 0; done < count; done += kStep) {
            wait_loads<(kAhead - kStep) * kLoads>();
            block_barrier();
            Step<X, W, kStep> step;
#pragma unroll
            for (int i = 0; i < kStep; ++i) {
                copy(from, next);
                from += kBytes;
                next = after(next);
                step.x[i] = &stages_.x[first];
                step.w[i] = &stages_.w[first];
                first = after(first);
            }
            multiply(step);
        }
        // A block gives its LDS back when it ends.
        wait_loads<0>();
    }
};
#endif

namespace detail {
template <bool kDirect, class X, class W, int kCount, int kStep>
struct PipelineOf {
    using Type = RegisterPipeline<X, W, kStep>;
};
#if defined(HK_AMD)
template <class X, class W, int kCount, int kStep>
struct PipelineOf<true, X, W, kCount, kStep> {
    using Type = DirectPipeline<X, W, kCount, kStep>;
};
#endif
}  // namespace detail

/// Straight to LDS where the target and the rows allow it, with a ring of `kCount` stages; else by registers.
template <class X, class W, int kCount, int kStep>
using Pipeline = typename detail::PipelineOf<X::kDirect && W::kDirect, X, W, kCount, kStep>::Type;

}  // namespace hk
