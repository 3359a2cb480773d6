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

/// Where the rows of an operand are, in bytes from the first one. Row after row, or shuffled: blocks of 16 rows, in which a chunk
/// of 16 bytes of each row is beside that of the next, so that a wave reads all of them as one stretch.
struct RowLayout {
    i64 row, block;  ///< from a row to the next among 16; from 16 rows to the next 16
    u32 spread;      ///< chunks of a row are 16 << spread bytes apart
    u32 less;        ///< for movers that bring less than stages: a stage has kStage >> less bytes of a row

    /// Row after row.
    HK_FN static RowLayout by_rows(i64 stride) { return {stride, 16 * stride, 0, 0}; }
    /// Of a row.
    HK_FN i64 offset(u32 of_row) const { return i64(of_row / 16) * block + i64(of_row % 16) * row; }
    /// The same within a window.
    HK_FN u32 window_offset(u32 of_row) const { return of_row / 16 * u32(block) + of_row % 16 * u32(row); }
};

/// A thread's chunks of a tile, 16 bytes each: side by side with those of its neighbours in LDS, all at one place of their rows
/// there.
template <class Tile_, int kThreads>
class ThreadChunks {
public:
    using Tile = Tile_;
    static constexpr int kParts = Tile::kRows * Tile::kChunks / kThreads;
    static_assert(kParts * kThreads == Tile::kRows * Tile::kChunks, "every thread has as many chunks");
    static_assert(kThreads / Tile::kChunks % 16 == 0, "all chunks of a thread are at one place of their rows");

    struct Chunks {
        Vec<u32, 4> part[kParts];
    };

    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) tile.chunk[thread_x() + i * kThreads] = chunks.part[i];
    }

    /// Where the thread's chunks are in their rows' part of a stage.
    HK_FN static u32 ahead() { return chunk() * 16; }

protected:
    /// The row of a part.
    HK_FN static u32 row(int part) { return thread_x() / Tile::kChunks + part * (kThreads / Tile::kChunks); }
    /// Which chunk of its row each part is.
    HK_FN static u32 chunk() { return thread_x() % Tile::kChunks ^ Tile::swizzle(row(0)); }
};

/// How the threads of a block bring a tile's rows to LDS: 16 bytes at a time, lanes side by side in LDS, each with the chunk
/// that belongs at its place. By vectors, rows begin on 16 bytes and end with a whole chunk, and the tile's rows lie within
/// 2 GiB; by elements of `kElement` bytes any rows will do.
template <class Tile, int kThreads, Access kAccess, int kElement>
class Mover;

template <class Tile, int kThreads, int kElement>
class Mover<Tile, kThreads, Access::Vectors, kElement> : public ThreadChunks<Tile, kThreads> {
    using Base = ThreadChunks<Tile, kThreads>;

public:
    using Base::kParts, typename Base::Chunks;
    static constexpr u32 kStage = Tile::kBytes;  // of a row in memory
    static constexpr bool kDirect = kHasWideDma;

private:
    Window window_;
    u32 end_;            // of a row, in bytes
    u32 ahead_;          // of the thread's chunks in their rows
    u32 spread_;
    u32 offset_[kParts];  // of the chunks in the window; beyond it for rows past the last

    HK_FN u32 at(int part, u32 from) const {
        // The sign of what is left of the row moves the offset beyond the window.
        const u32 left = end_ - 1u - (from + ahead_);
        return offset_[part] | (left & Window::kBeyond);
    }

public:
    /// Rows of `end` bytes. Row r of the tile is row `row_of(r)` of them; from `rows` on there is none.
    template <class RowOf>
    HK_FN Mover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, RowOf row_of)
        : window_(first, Window::kBeyond - 1), end_(end), ahead_(Base::ahead()), spread_(layout.spread) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = row_of(Base::row(i));
            offset_[i] = from < rows ? layout.window_offset(from) + (ahead_ << spread_) : Window::kBeyond;
        }
    }

    /// The thread's chunks of the stage that begins `from` bytes into the rows.
    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) chunks.part[i] = window_.load<Vec<u32, 4>>(at(i, from), from << spread_);
        return chunks;
    }

    /// `load` and `store` in one, past the registers: `kParts` loads, which `wait_loads` waits for.
    HK_FN void copy(u32 from, Tile &tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            window_.load_to_lds(&tile.chunk[wave_id() * kWaveSize + i * kThreads], at(i, from), from << spread_);
        }
    }
};

template <class Tile, int kThreads, int kElement>
class Mover<Tile, kThreads, Access::Elements, kElement> : public ThreadChunks<Tile, kThreads> {
    using Base = ThreadChunks<Tile, kThreads>;
    using Bits = decltype([] {
        if constexpr (kElement == 2) return u16(0);
        else return u8(0);
    }());

public:
    using Base::kParts, typename Base::Chunks;
    static constexpr u32 kStage = Tile::kBytes;  // of a row in memory
    static constexpr bool kDirect = false;

private:
    u32 end_, ahead_, spread_;
    GlobalPtr<const u8> row_[kParts];
    bool there_[kParts];

public:
    template <class RowOf>
    HK_FN Mover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, RowOf row_of)
        : end_(end), ahead_(Base::ahead()), spread_(layout.spread) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = row_of(Base::row(i));
            there_[i] = from < rows;
            row_[i] = first + layout.offset(there_[i] ? from : 0);
        }
    }

    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            Vec<Bits, 16 / kElement> v = Bits(0);
            // A stage can begin within a chunk, if no more than that chunk's rest is of use.
            const GlobalPtr<const u8> chunk = row_[i] + (u64((from & ~15u) + ahead_) << spread_) + (from & 15u);
#pragma unroll
            for (u32 j = 0; j < 16; j += kElement) {
                const bool there = there_[i] && from + ahead_ + j < end_;
                if (there) v[j / kElement] = *reinterpret_cast<GlobalPtr<const Bits>>(chunk + j);
            }
            chunks.part[i] = __builtin_bit_cast(Vec<u32, 4>, v);
        }
        return chunks;
    }
};

/// Brings rows of codes to a tile of what they stand for, 16-bit floats: `kBits` bits in memory for each. Threads side by side
/// have parts of a row. `Decode::load(row, from)` gives what else a part needs, `decode(codes, that, halves)` makes chunks.
template <class Tile_, int kThreads, Access kAccess, int kBits, class Decode>
class DecodingMover {
public:
    using Tile = Tile_;
    static constexpr u32 kStage = Tile::kBytes / 2 * kBits / 8;
    static constexpr bool kDirect = false;

private:
    static constexpr int kOfThread = Tile::kRows * Tile::kChunks / kThreads;  // chunks
    static constexpr int kPerRow = Tile::kChunks / kOfThread;                 // threads
    static constexpr int kBytes = kOfThread * kBits;                          // of codes, 8 elements a chunk
    static_assert(kOfThread * kPerRow == Tile::kChunks && kThreads / kPerRow == Tile::kRows, "every thread has as much");

    Window window_;
    GlobalPtr<const u8> row_;
    Decode decode_;
    u32 end_, ahead_, spread_, offset_;

public:
    struct Chunks {
        Vec<u32, kBytes / 4> codes;
        typename Decode::Extra extra;
    };

    /// Where the thread's codes are in their rows' part of a stage.
    HK_FN static u32 ahead() { return thread_x() % kPerRow * kBytes; }

    /// As Mover's; `decode` knows the same rows.
    HK_FN DecodingMover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, const Decode &decode)
        : window_(first, Window::kBeyond - 1), decode_(decode), end_(end), spread_(layout.spread) {
        const u32 row = thread_x() / kPerRow;
        ahead_ = ahead();
        decode_.of_row(row);
        if constexpr (kAccess == Access::Vectors) {
            offset_ = row < rows ? layout.window_offset(row) + in_row(ahead_) : Window::kBeyond;
        } else {
            row_ = first + layout.offset(row < rows ? row : 0);
            if (row >= rows) end_ = 0;
        }
    }

    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
        if constexpr (kAccess == Access::Vectors) {
            if constexpr (kBytes <= 16) {
                const u32 past = (end_ - 1u - (from + ahead_)) & Window::kBeyond;
                chunks.codes = window_.load<Vec<u32, kBytes / 4>>(offset_ | past, from << spread_);
            } else {
                // Chunks of a row need not be side by side, nor all there.
#pragma unroll
                for (u32 i = 0; i < kBytes / 4; i += 4) {
                    const u32 past = (end_ - 1u - (from + ahead_ + 4 * i)) & Window::kBeyond;
                    const auto chunk = window_.load<Vec<u32, 4>>(offset_ | past, (from + 4 * i) << spread_);
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) chunks.codes[i + j] = chunk[j];
                }
            }
        } else {
            Vec<u8, kBytes> bytes = u8(0);
#pragma unroll
            for (u32 i = 0; i < kBytes; ++i) {
                const u32 at = from + ahead_ + i;
                if (at < end_) bytes[i] = row_[in_row(at)];
            }
            chunks.codes = __builtin_bit_cast(decltype(chunks.codes), bytes);
        }
        chunks.extra = decode_.load(from, end_);
        return chunks;
    }

    HK_FN void store(const Chunks &chunks, Tile &tile) const {
        Vec<u32, 4> halves[kOfThread];
        decode_.decode(chunks.codes, chunks.extra, halves);
        const u32 row = thread_x() / kPerRow, first = thread_x() % kPerRow * kOfThread;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) tile.chunk[Tile::place(row, first + i)] = halves[i];
    }

private:
    /// Where a byte of a row is.
    HK_FN u32 in_row(u32 at) const { return (at & ~15u) << spread_ | (at & 15u); }
};

/// Ends a batch of loads straight to LDS.
HK_FN void end_loads() {
#if !defined(HK_AMD)
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

/// Waits until no more than `kBatches` batches of `kLoads` loads of this wave are on their way, the last ones.
template <int kBatches, int kLoads>
HK_FN void wait_loads() {
#if defined(HK_AMD)
    static_assert(kBatches * kLoads < 64, "what the counter holds");
    asm volatile("s_waitcnt vmcnt(%0)" : : "n"(kBatches * kLoads) : "memory");
#else
    asm volatile("cp.async.wait_group %0;" : : "n"(kBatches) : "memory");
#endif
}

/// Waits for all loads to registers, as the compiler sees.
HK_FN void wait_known_loads() {
#if defined(HK_AMD)
    constexpr int kNoLoads = 0x0f70;  // vmcnt(0), any number of other operations
    __builtin_amdgcn_s_waitcnt(kNoLoads);
#endif
}

/// Nothing beside the tiles.
struct NoWords {
    struct Tile {
        u32 none[0];  // takes no room
    };
    struct Words {};
    static constexpr int kParts = 0;
    static constexpr bool kDirect = true;
    HK_FN Words load(u32) const { return {}; }
    HK_FN static void store(Words, Tile &) {}
    HK_FN void copy(u32, Tile &) const {}
};

/// Where a thread finds the word that goes with its row in a stage, such as a scale.
struct WordPlace {
    u64 data;        ///< of row 0
    u32 offset;      ///< of the row, in bytes; Window::kBeyond: there is none, zero
    u32 step;        ///< bytes from a word to the next one of its row; the same for all lanes
    u32 shift;       ///< one word for 2^shift bytes of a row
};

/// A word of 4 bytes for each row of both tiles, with each stage: those of x, then those of w.
template <int kXRows, int kWRows, int kThreads>
class WordMover {
public:
    static constexpr int kParts = (kXRows + kWRows + kThreads - 1) / kThreads;
    static constexpr bool kDirect = true;

    struct Tile {
        u32 word[kParts * kThreads];  // all threads load as much
        HK_FN u32 x(u32 row) const { return word[row]; }
        HK_FN const u32 *w(u32 row) const { return word + kXRows + row; }
    };
    struct Words {
        u32 word[kParts];
    };

private:
    static_assert(kXRows % kWaveSize == 0, "a wave has rows of one tile");

    u32 end_;
    Window window_[kParts];
    u32 offset_[kParts], step_[kParts], shift_[kParts];

    HK_FN u32 at(int part, u32 from) const { return offset_[part] | ((end_ - 1u - from) & Window::kBeyond); }
    HK_FN u32 scalar(int part, u32 from) const { return (from >> shift_[part]) * step_[part]; }

public:
    /// `place(row, of_w)` tells where the words of a row are.
    template <class Place>
    HK_FN WordMover(u32 end, Place place) : end_(end) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 row = thread_x() + i * kThreads;
            const bool of_w = wave_id() * kWaveSize + i * kThreads >= kXRows;
            const WordPlace where = of_w ? place(row - kXRows, true) : place(row, false);
            window_[i] = Window(reinterpret_cast<GlobalPtr<const u8>>(where.data), Window::kBeyond - 1);
            offset_[i] = row < kXRows + kWRows ? where.offset : Window::kBeyond;
            step_[i] = uniform(where.step);
            shift_[i] = uniform(where.shift);
        }
    }

    HK_FN Words load(u32 from) const {
        Words words;
#pragma unroll
        for (int i = 0; i < kParts; ++i) words.word[i] = window_[i].template load<u32>(at(i, from), scalar(i, from));
        return words;
    }
    HK_FN static void store(const Words &words, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) tile.word[thread_x() + i * kThreads] = words.word[i];
    }
    HK_FN void copy(u32 from, Tile &tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            window_[i].load_word_to_lds(&tile.word[wave_id() * kWaveSize + i * kThreads], at(i, from), scalar(i, from));
        }
    }
};

/// Stages of two tiles in LDS, and the words that go with them.
template <class X, class W, class Words, int kStages>
struct Stages {
    typename X::Tile x[kStages];
    typename W::Tile w[kStages];
    typename Words::Tile words[kStages];
};

/// The stages that are multiplied at a time.
template <class X, class W, class Words, int kStages>
struct Step {
    const typename X::Tile *x[kStages];
    const typename W::Tile *w[kStages];
    const typename Words::Tile *words[kStages];
};

namespace detail {
template <class Sums>
inline constexpr int kTurns = [] {
    if constexpr (requires { Sums::kTurns; }) return Sums::kTurns;
    else return 2;
}();
}  // namespace detail

/// The ping-pong of a block's waves, of which every SIMD has two: while one reads from LDS and moves the stages to come, the
/// other multiplies what it has in registers, and then they change places. One half of the block is a barrier behind the
/// other.
class PingPong {
    bool behind_;

public:
    /// The first step's stages are in LDS.
    HK_FN PingPong() : behind_(wave_id() / kSimds % 2 != 0) {
        block_barrier();
        if (behind_) block_barrier();
    }

    /// A step of one half: `multiply(read())`, and then what `read` has read from LDS may be overwritten, and what the wave has
    /// waited for in it is there for all.
    HK_FN void step(auto read, auto multiply) const {
        const auto operands = read();
        change();
        set_priority<1>();
        multiply(operands);
        set_priority<0>();
        change();
    }

    /// Both halves have met as many barriers.
    HK_FN void end() const {
        if (!behind_) block_barrier();
    }

private:
    HK_FN static void change() {
        stay_in_order();
        block_barrier();
        stay_in_order();
    }
};

/// By registers: while `kStep` stages are multiplied, those after them are in registers or on their way there, and the ones
/// after these are being loaded. Twice as many stages in LDS, one barrier a step: a block writes stages that all its waves
/// have left before the last barrier.
template <class X, class W, class Words, int kStep>
class RegisterPipeline {
    const X &x_;
    const W &w_;
    const Words &words_;
    Stages<X, W, Words, 2 * kStep> &stages_;

    struct Set {
        typename X::Chunks x[kStep];
        typename W::Chunks w[kStep];
        typename Words::Words words[kStep];
    };

    HK_FN Set load(u32 from) const {
        Set set;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            const u32 at = from + i * X::kStage;
            set.x[i] = x_.load(at);
            set.w[i] = w_.load(at / X::kStage * W::kStage);
            set.words[i] = words_.load(at);
        }
        return set;
    }
    HK_FN void store(const Set &set, int half) const {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            x_.store(set.x[i], stages_.x[half * kStep + i]);
            w_.store(set.w[i], stages_.w[half * kStep + i]);
            words_.store(set.words[i], stages_.words[half * kStep + i]);
        }
    }
    HK_FN Step<X, W, Words, kStep> step(int half) const {
        Step<X, W, Words, kStep> now;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            now.x[i] = &stages_.x[half * kStep + i];
            now.w[i] = &stages_.w[half * kStep + i];
            now.words[i] = &stages_.words[half * kStep + i];
        }
        return now;
    }

public:
    using Lds = Stages<X, W, Words, 2 * kStep>;

    HK_FN RegisterPipeline(const X &x, const W &w, const Words &words, Lds &stages)
        : x_(x), w_(w), words_(words), stages_(stages) {}

    /// Calls `sums.multiply<i>(Step)` for `count` stages from byte `from` of the rows of x on, `kStep` at a time; i counts up to
    /// Sums::kTurns, 2 (if it does not say) or 4, begins anew, and is the last one at the end: the last stages may lie past the
    /// rows' end.
    template <class Sums>
    HK_FN void run(u32 from, u32 count, Sums &sums) const {
        constexpr u32 kBytes = kStep * X::kStage, kTurns = detail::kTurns<Sums>;
        static_assert(kTurns == 2 || kTurns == 4, "halves of LDS in turn");
        Set even = load(from);
        Set odd = load(from + kBytes);
        store(even, 0);
        const auto two_steps = [&]<int kTurn>(Turn<kTurn>) {
            from += 2 * kBytes;
            block_barrier();
            even = load(from);
            stay_in_order();
            sums.template multiply<kTurn>(step(0));
            stay_in_order();
            store(odd, 1);
            block_barrier();
            odd = load(from + kBytes);
            stay_in_order();
            sums.template multiply<kTurn + 1>(step(1));
            stay_in_order();
            store(even, 0);
        };
        for (u32 rounds = (count + kTurns * kStep - 1) / (kTurns * kStep); rounds > 0; --rounds) {
            two_steps(Turn<0>{});
            if constexpr (kTurns > 2) two_steps(Turn<2>{});
        }
    }

    /// The same by ping-pong: `sums.multiply(sums.read(Step))`.
    template <class Sums>
    HK_FN void ping_pong(u32 from, u32 count, Sums &sums) const {
        constexpr u32 kBytes = kStep * X::kStage;
        Set even = load(from);
        Set odd = load(from + kBytes);
        store(even, 0);
        even = load(from + 2 * kBytes);
        from += 3 * kBytes;
        const PingPong halves;
        const auto turn = [&](Set &next, int half) {
            halves.step(
                [&] {
                    const auto operands = sums.read(step(half));
                    store(next, 1 - half);
                    next = load(from);
                    from += kBytes;
                    return operands;
                },
                [&](const auto &operands) { sums.multiply(operands); });
        };
        for (u32 rounds = (count + 2 * kStep - 1) / (2 * kStep); rounds > 0; --rounds) {
            turn(odd, 0);
            turn(even, 1);
        }
        halves.end();
    }

private:
    template <int kTurn>
    struct Turn {};
};

/// Straight to LDS: `kCount` stages in a ring, of which `kStep` are multiplied at a time, and all others but those that the
/// last step has left are on their way. One barrier a step: a wave passes it when its own loads for this step have landed,
/// and then all waves have left what the next loads overwrite.
template <class X, class W, class Words, int kCount, int kStep>
class DirectPipeline {
    static constexpr int kAhead = kCount - kStep;  // stages loaded before they are multiplied
    static constexpr int kLoads = X::kParts + W::kParts + Words::kParts;
    static_assert(kAhead > kStep, "the loads for a step are not the last ones on their way");

    const X &x_;
    const W &w_;
    const Words &words_;
    Stages<X, W, Words, kCount> &stages_;

    HK_FN void copy(u32 from, u32 stage) const {
        x_.copy(from, stages_.x[stage]);
        w_.copy(from / X::kStage * W::kStage, stages_.w[stage]);
        words_.copy(from, stages_.words[stage]);
        end_loads();
    }

    /// Where the next step is in the ring.
    struct Place {
        u32 from;       // bytes of the rows, of the next stage to load
        u32 next;       // where that goes
        u32 first = 0;  // the next stage to multiply
    };
    static constexpr u32 after(u32 stage) { return stage + 1 == kCount ? 0 : stage + 1; }

    /// Loads all stages but those of a step.
    HK_FN Place begin(u32 from) const {
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) copy(from + i * X::kStage, i);
        return {from + kAhead * X::kStage, kAhead % kCount};
    }
    /// Begins to load the next stages; returns those to multiply.
    HK_FN Step<X, W, Words, kStep> go_on(Place &place) const {
        Step<X, W, Words, kStep> step;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            copy(place.from, place.next);
            place.from += X::kStage;
            place.next = after(place.next);
            step.x[i] = &stages_.x[place.first];
            step.w[i] = &stages_.w[place.first];
            step.words[i] = &stages_.words[place.first];
            place.first = after(place.first);
        }
        return step;
    }
    /// Until the wave's part of the next step has landed.
    HK_FN static void wait_step() { wait_loads<kAhead - kStep, kLoads>(); }

public:
    using Lds = Stages<X, W, Words, kCount>;

    HK_FN DirectPipeline(const X &x, const W &w, const Words &words, Lds &stages)
        : x_(x), w_(w), words_(words), stages_(stages) {}

    /// Calls `sums.multiply<0>(Step)` for `count` stages from byte `from` of the rows on, `kStep` at a time.
    template <class Sums>
    HK_FN void run(u32 from, u32 count, Sums &sums) const {
        Place place = begin(from);
        for (u32 done = 0; done < count; done += kStep) {
            wait_step();
            block_barrier();
            sums.template multiply<0>(go_on(place));
        }
        // A block gives its LDS back when it ends.
        wait_loads<0, 0>();
    }

    /// The same by ping-pong: `sums.multiply(sums.read(Step))`.
    template <class Sums>
    HK_FN void ping_pong(u32 from, u32 count, Sums &sums) const {
        static_assert(kAhead >= 2 * kStep, "what the wave waits for has been on its way for a step");
        Place place = begin(from);
        wait_step();
        const PingPong halves;
        for (u32 done = 0; done < count; done += kStep) {
            halves.step(
                [&] {
                    const auto operands = sums.read(go_on(place));
                    wait_step();
                    return operands;
                },
                [&](const auto &operands) { sums.multiply(operands); });
        }
        halves.end();
        wait_loads<0, 0>();
    }
};

namespace detail {
template <class Stage, int kMost>
inline constexpr int kRoom = int(sizeof(Stage)) * kMost <= kLdsBytes ? kMost : kLdsBytes / int(sizeof(Stage));

template <bool kDirect, class X, class W, class Words, int kCount, int kStep>
struct PipelineOf {
    using Type = RegisterPipeline<X, W, Words, kStep>;
};
template <class X, class W, class Words, int kCount, int kStep>
struct PipelineOf<true, X, W, Words, kCount, kStep> {
    using Type = DirectPipeline<X, W, Words, kCount, kStep>;
};
}  // namespace detail

/// Straight to LDS where the target and the rows allow it, with a ring of up to `kCount` stages, as there is room for; else by
/// registers.
template <class X, class W, class Words, int kCount, int kStep>
using Pipeline = typename detail::PipelineOf<X::kDirect && W::kDirect && Words::kDirect, X, W, Words,
                                             detail::kRoom<Stages<X, W, Words, 1>, kCount>, kStep>::Type;

}  // namespace hk
