// pipeline.h: software-pipelined loads of two operand tiles, global memory -> LDS -> fragments.
//
//   rows of a, of w  --Mover-->  stages in LDS  --fragments-->  MFMA
//
// A stage is kBytes of each row of both tiles. Bytes past `end` and rows past the last one read as zero: tails cost nothing in
// the main loop.
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/global.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Where the rows of an operand are, in bytes from the first one. Row-major, or shuffled in blocks of 16 rows: chunks of 16 bytes of
/// all 16 rows are neighbours, so that a wave's loads are contiguous.
struct RowLayout {
    i64 row, block;  ///< from a row to the next among 16; from 16 rows to the next 16
    u32 chunk_shift;  ///< chunks of a row are 16 << chunk_shift bytes apart
    u32 stage_shift;  ///< movers that fill a stage in part: kStageBytes >> stage_shift bytes of a row

    /// Row-major.
    HK_FN static RowLayout by_rows(i64 stride) { return {stride, 16 * stride, 0, 0}; }
    /// Byte offset of a row.
    HK_FN i64 offset(u32 of_row) const { return i64(of_row / 16) * block + i64(of_row % 16) * row; }
    /// The same, within a window.
    HK_FN u32 window_offset(u32 of_row) const { return of_row / 16 * u32(block) + of_row % 16 * u32(row); }
};

/// A thread's 16-byte chunks of a tile. Neighbouring threads have neighbouring chunks in LDS; a thread's chunks have one column
/// offset.
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

    /// Byte offset of the thread's chunks in the stage's rows.
    HK_FN static u32 lane_byte() { return chunk() * 16; }

  protected:
    /// Row of the thread's i-th chunk.
    HK_FN static u32 row(int part) { return thread_x() / Tile::kChunks + part * (kThreads / Tile::kChunks); }
    /// Chunk index in the row, the same for all the thread's chunks.
    HK_FN static u32 chunk() { return thread_x() % Tile::kChunks ^ Tile::swizzle(row(0)); }
};

/// Loads a tile's rows to LDS, 16 bytes per lane, in the order of the tile's swizzle. The vectorized path needs rows that begin on
/// 16 bytes, end with a whole chunk and lie within 2 GiB. The scalar path takes any rows, `kElement` bytes at a time.
template <class Tile, int kThreads, Access kAccess, int kElement>
class Mover;

template <class Tile, int kThreads, int kElement>
class Mover<Tile, kThreads, Access::Vectorized, kElement> : public ThreadChunks<Tile, kThreads> {
    using Base = ThreadChunks<Tile, kThreads>;

  public:
    using Base::kParts, typename Base::Chunks;
    static constexpr u32 kStageBytes = Tile::kBytes;  // of a row in memory
    static constexpr bool kDirectToLds = kHasWideDma;

  private:
    Window window_;
    u32 end_;  // of a row, in bytes
    u32 lane_byte_;  // byte offset of the thread's chunks in a stage
    u32 chunk_shift_;
    u32 first_;  // of the wave's chunks; wave_id in a loop would stay there
    u32 offset_[kParts];  // of the chunks in the window; beyond it for rows past the last

    /// Past the row's end the sign bit moves an offset beyond the window: zeros are read.
    HK_FN u32 past(u32 from) const { return (end_ - 1u - (from + lane_byte_)) & Window::kOutOfBounds; }

  public:
    /// Rows of `end` bytes. Row r of the tile is their row `row_of(r)`; rows from `rows` on read as zero.
    template <class RowOf>
    HK_FN Mover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, RowOf row_of)
        : window_(first, Window::kOutOfBounds - 1), end_(end), lane_byte_(Base::lane_byte()),
          chunk_shift_(layout.chunk_shift), first_(wave_id() * kWaveSize) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            // Outside of the condition: in it, the strides would be loaded in branches.
            const u32 from = row_of(Base::row(i)), at = layout.window_offset(from) + (lane_byte_ << chunk_shift_);
            offset_[i] = from < rows ? at : Window::kOutOfBounds;
        }
    }

    /// Loads the thread's chunks of the stage at byte `from` of the rows.
    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            chunks.part[i] = window_.load<Vec<u32, 4>>(offset_[i] | past(from), from << chunk_shift_);
        return chunks;
    }

    /// Copies the thread's chunks straight to LDS: `kParts` asynchronous loads, which `wait_loads` waits for.
    HK_FN void copy(u32 from, Tile &tile) const {
#pragma unroll
        for (u32 i = 0; i < kParts; ++i) {
            window_.load_to_lds(&tile.chunk[first_], i * kThreads * 16, offset_[i], past(from), from << chunk_shift_);
        }
    }
};

template <class Tile, int kThreads, int kElement>
class Mover<Tile, kThreads, Access::Scalar, kElement> : public ThreadChunks<Tile, kThreads> {
    using Base = ThreadChunks<Tile, kThreads>;
    using Bits = decltype([] {
        if constexpr (kElement == 2)
            return u16(0);
        else
            return u8(0);
    }());

  public:
    using Base::kParts, typename Base::Chunks;
    static constexpr u32 kStageBytes = Tile::kBytes;  // of a row in memory
    static constexpr bool kDirectToLds = false;

  private:
    u32 end_, lane_byte_, chunk_shift_;
    GlobalPtr<const u8> row_[kParts];
    bool valid_[kParts];

  public:
    template <class RowOf>
    HK_FN Mover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, RowOf row_of)
        : end_(end), lane_byte_(Base::lane_byte()), chunk_shift_(layout.chunk_shift) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = row_of(Base::row(i));
            valid_[i] = from < rows;
            row_[i] = first + layout.offset(valid_[i] ? from : 0);
        }
    }

    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            Vec<Bits, 16 / kElement> v = Bits(0);
            // A stage can begin within a chunk if only the rest of that chunk is read.
            const GlobalPtr<const u8> chunk =
                row_[i] + (u64((from & ~15u) + lane_byte_) << chunk_shift_) + (from & 15u);
#pragma unroll
            for (u32 j = 0; j < 16; j += kElement) {
                const bool valid = valid_[i] && from + lane_byte_ + j < end_;
                if (valid) v[j / kElement] = *reinterpret_cast<GlobalPtr<const Bits>>(chunk + j);
            }
            chunks.part[i] = __builtin_bit_cast(Vec<u32, 4>, v);
        }
        return chunks;
    }
};

/// Loads rows of quantized values (`kBits` bits each) and stores them to LDS as 16-bit floats. Neighbouring threads have parts of one
/// row. `Dequant::load(row, from)` loads the scale of a part, `decode(values, scale, floats)` dequantizes it.
template <class Tile_, int kThreads, Access kAccess, int kBits, class Dequant>
class DequantMover {
  public:
    using Tile = Tile_;
    static constexpr u32 kStageBytes = Tile::kBytes / 2 * kBits / 8;
    static constexpr bool kDirectToLds = false;

  private:
    static constexpr int kOfThread = Tile::kRows * Tile::kChunks / kThreads;  // chunks per thread
    static constexpr int kPerRow = Tile::kChunks / kOfThread;  // threads per row
    static constexpr int kBytes = kOfThread * kBits;  // bytes of quantized values per thread, 8 values a chunk
    static_assert(kOfThread * kPerRow == Tile::kChunks && kThreads / kPerRow == Tile::kRows,
                  "every thread has as much");

    Window window_;
    GlobalPtr<const u8> row_;
    Dequant dequant_;
    u32 end_, lane_byte_, chunk_shift_, offset_;

  public:
    struct Chunks {
        Vec<u32, kBytes / 4> quants;
        typename Dequant::Extra extra;
    };

    /// Byte offset of the thread's values in the stage's rows.
    HK_FN static u32 lane_byte() { return thread_x() % kPerRow * kBytes; }

    /// Arguments as Mover's.
    HK_FN DequantMover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, const Dequant &decode)
        : window_(first, Window::kOutOfBounds - 1), dequant_(decode), end_(end), chunk_shift_(layout.chunk_shift) {
        const u32 row = thread_x() / kPerRow;
        lane_byte_ = lane_byte();
        dequant_.of_row(row);
        if constexpr (kAccess == Access::Vectorized) {
            offset_ = row < rows ? layout.window_offset(row) + in_row(lane_byte_) : Window::kOutOfBounds;
        } else {
            row_ = first + layout.offset(row < rows ? row : 0);
            if (row >= rows) end_ = 0;
        }
    }

    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
        if constexpr (kAccess == Access::Vectorized) {
            if constexpr (kBytes <= 16) {
                const u32 past = (end_ - 1u - (from + lane_byte_)) & Window::kOutOfBounds;
                chunks.quants = window_.load<Vec<u32, kBytes / 4>>(offset_ | past, from << chunk_shift_);
            } else {
                // Chunks of a row need not be contiguous, and some can lie past the end.
#pragma unroll
                for (u32 i = 0; i < kBytes / 4; i += 4) {
                    const u32 past = (end_ - 1u - (from + lane_byte_ + 4 * i)) & Window::kOutOfBounds;
                    const auto chunk = window_.load<Vec<u32, 4>>(offset_ | past, (from + 4 * i) << chunk_shift_);
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) chunks.quants[i + j] = chunk[j];
                }
            }
        } else {
            Vec<u8, kBytes> bytes = u8(0);
#pragma unroll
            for (u32 i = 0; i < kBytes; ++i) {
                const u32 at = from + lane_byte_ + i;
                if (at < end_) bytes[i] = row_[in_row(at)];
            }
            chunks.quants = __builtin_bit_cast(decltype(chunks.quants), bytes);
        }
        chunks.extra = dequant_.load(from, end_);
        return chunks;
    }

    HK_FN void store(const Chunks &chunks, Tile &tile) const {
        Vec<u32, 4> floats[kOfThread];
        dequant_.decode(chunks.quants, chunks.extra, floats);
        const u32 row = thread_x() / kPerRow, first = thread_x() % kPerRow * kOfThread;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) tile.chunk[Tile::place(row, first + i)] = floats[i];
    }

  private:
    /// Byte offset within a row's layout.
    HK_FN u32 in_row(u32 at) const { return (at & ~15u) << chunk_shift_ | (at & 15u); }
};

/// A pipeline without packed scales.
struct NoScales {
    struct Tile {
        u32 none[0];  // takes no LDS
    };
    struct PackedScales {};
    static constexpr int kParts = 0;
    static constexpr bool kDirectToLds = true;
    HK_FN PackedScales load(u32) const { return {}; }
    HK_FN static void store(PackedScales, Tile &) {}
    HK_FN void copy(u32, Tile &) const {}
};

/// Where a thread finds the packed scale (4 bytes) of its row in a stage.
struct ScalePlace {
    u64 data;  ///< address, for row 0
    u32 offset;  ///< of the row, in bytes; Window::kOutOfBounds: no such row, read as zero
    u32 step;  ///< bytes from a packed scale to the next one of its row; wave-uniform
    u32 shift;  ///< one packed scale for 2^shift bytes of a row
};

/// Loads 4 bytes of scales for each row of both tiles with each stage: the rows of a, then those of w.
template <int kARows, int kWRows, int kThreads>
class ScaleMover {
  public:
    static constexpr int kParts = (kARows + kWRows + kThreads - 1) / kThreads;
    static constexpr bool kDirectToLds = true;

    struct Tile {
        u32 word[kParts * kThreads];  // all threads load as many
        HK_FN u32 a(u32 row) const { return word[row]; }
        HK_FN const u32 *w(u32 row) const { return word + kARows + row; }
    };
    struct PackedScales {
        u32 word[kParts];
    };

  private:
    static_assert(kARows % kWaveSize == 0, "a wave has rows of one tile");

    u32 end_;
    Window window_[kParts];
    u32 offset_[kParts], step_[kParts], shift_[kParts];

    HK_FN u32 at(int part, u32 from) const { return offset_[part] | ((end_ - 1u - from) & Window::kOutOfBounds); }
    HK_FN u32 scalar(int part, u32 from) const { return (from >> shift_[part]) * step_[part]; }

  public:
    /// `place(row, of_w)` gives the ScalePlace of a row.
    template <class Place>
    HK_FN ScaleMover(u32 end, Place place) : end_(end) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 row = thread_x() + i * kThreads;
            const bool of_w = wave_id() * kWaveSize + i * kThreads >= kARows;
            const ScalePlace where = of_w ? place(row - kARows, true) : place(row, false);
            window_[i] = Window(reinterpret_cast<GlobalPtr<const u8>>(where.data), Window::kOutOfBounds - 1);
            offset_[i] = row < kARows + kWRows ? where.offset : Window::kOutOfBounds;
            step_[i] = uniform(where.step);
            shift_[i] = uniform(where.shift);
        }
    }

    HK_FN PackedScales load(u32 from) const {
        PackedScales packed;
#pragma unroll
        for (int i = 0; i < kParts; ++i) packed.word[i] = window_[i].template load<u32>(at(i, from), scalar(i, from));
        return packed;
    }
    HK_FN static void store(const PackedScales &packed, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) tile.word[thread_x() + i * kThreads] = packed.word[i];
    }
    HK_FN void copy(u32 from, Tile &tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            window_[i].load_dword_to_lds(&tile.word[wave_id() * kWaveSize + i * kThreads], at(i, from),
                                         scalar(i, from));
        }
    }
};

/// LDS stages of two tiles and their packed scales.
template <class A, class W, class Scales, int kStages>
struct Stages {
    typename A::Tile a[kStages];
    typename W::Tile w[kStages];
    typename Scales::Tile scales[kStages];
};

/// The stages that one step multiplies.
template <class A, class W, class Scales, int kStages>
struct Step {
    const typename A::Tile *a[kStages];
    const typename W::Tile *w[kStages];
    const typename Scales::Tile *scales[kStages];
};

namespace detail {
template <class Accum>
inline constexpr int kPhases = [] {
    if constexpr (requires { Accum::kPhases; })
        return Accum::kPhases;
    else
        return 2;
}();
}  // namespace detail

/// Ping-pong of a block with two waves per SIMD: one half of the waves reads LDS and prefetches while the other runs MFMAs from
/// registers, then they swap. One half runs a barrier behind the other.
class PingPong {
    bool behind_;

  public:
    /// The first step's stages must be in LDS.
    HK_FN PingPong() : behind_(wave_id() / kSimdsPerCu % 2 != 0) {
        block_barrier();
        if (behind_) block_barrier();
    }

    /// One step of one half: `multiply(read())`. After it, the LDS that `read` has read may be overwritten, and loads that `read` has
    /// waited for are visible to all waves.
    HK_FN void step(auto read, auto multiply) const {
        const auto operands = read();
        change();
        set_wave_priority<1>();
        multiply(operands);
        set_wave_priority<0>();
        change();
    }

    /// Equalizes the barriers that both halves have met.
    HK_FN void end() const {
        if (!behind_) block_barrier();
    }

  private:
    HK_FN static void change() {
        sched_barrier();
        block_barrier();
        sched_barrier();
    }
};

/// Double-buffered through registers: while `kStep` stages are multiplied, the next are in registers and the ones after them are in
/// flight. LDS has two buffers of `kStep` stages; one barrier per step: a block writes a buffer that all waves left before the last
/// barrier.
template <class A, class W, class Scales, int kStep>
class RegisterPipeline {
    const A &a_;
    const W &w_;
    const Scales &scales_;
    Stages<A, W, Scales, 2 * kStep> &stages_;

    struct Stage {
        typename A::Chunks a[kStep];
        typename W::Chunks w[kStep];
        typename Scales::PackedScales scales[kStep];
    };

    HK_FN Stage load(u32 from) const {
        Stage stage;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            const u32 at = from + i * A::kStageBytes;
            stage.a[i] = a_.load(at);
            stage.w[i] = w_.load(at / A::kStageBytes * W::kStageBytes);
            stage.scales[i] = scales_.load(at);
        }
        return stage;
    }
    HK_FN void store(const Stage &stage, int half) const {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            a_.store(stage.a[i], stages_.a[half * kStep + i]);
            w_.store(stage.w[i], stages_.w[half * kStep + i]);
            scales_.store(stage.scales[i], stages_.scales[half * kStep + i]);
        }
    }
    HK_FN Step<A, W, Scales, kStep> step(int half) const {
        Step<A, W, Scales, kStep> now;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            now.a[i] = &stages_.a[half * kStep + i];
            now.w[i] = &stages_.w[half * kStep + i];
            now.scales[i] = &stages_.scales[half * kStep + i];
        }
        return now;
    }

  public:
    using Lds = Stages<A, W, Scales, 2 * kStep>;

    HK_FN RegisterPipeline(const A &a, const W &w, const Scales &scales, Lds &stages)
        : a_(a), w_(w), scales_(scales), stages_(stages) {}

    /// Calls `acc.multiply<i>(Step)` for `count` stages from byte `from` of the rows of a on, `kStep` at a time. i cycles through
    /// 0 .. Accum::kPhases - 1 (2 by default, or 4) and ends with the last value: the last stages may lie past the rows' end.
    template <class Accum>
    HK_FN void run(u32 from, u32 count, Accum &acc_tile) const {
        constexpr u32 kBytes = kStep * A::kStageBytes, kPhases = detail::kPhases<Accum>;
        static_assert(kPhases == 2 || kPhases == 4, "LDS has two buffers");
        Stage even = load(from);
        Stage odd = load(from + kBytes);
        store(even, 0);
        const auto two_steps = [&]<int kPhase>(Phase<kPhase>) {
            from += 2 * kBytes;
            block_barrier();
            even = load(from);
            sched_barrier();
            acc_tile.template multiply<kPhase>(step(0));
            sched_barrier();
            store(odd, 1);
            block_barrier();
            odd = load(from + kBytes);
            sched_barrier();
            acc_tile.template multiply<kPhase + 1>(step(1));
            sched_barrier();
            store(even, 0);
        };
        for (u32 rounds = (count + kPhases * kStep - 1) / (kPhases * kStep); rounds > 0; --rounds) {
            two_steps(Phase<0>{});
            if constexpr (kPhases > 2) two_steps(Phase<2>{});
        }
    }

    /// The same with ping-pong: `acc.multiply(acc.read(Step))`.
    template <class Accum>
    HK_FN void ping_pong(u32 from, u32 count, Accum &acc_tile) const {
        constexpr u32 kBytes = kStep * A::kStageBytes;
        Stage even = load(from);
        Stage odd = load(from + kBytes);
        store(even, 0);
        even = load(from + 2 * kBytes);
        from += 3 * kBytes;
        const PingPong ping_pong;
        const auto turn = [&](Stage &next, int half) {
            ping_pong.step(
                [&] {
                    const auto operands = acc_tile.read(step(half));
                    store(next, 1 - half);
                    next = load(from);
                    from += kBytes;
                    return operands;
                },
                [&](const auto &operands) { acc_tile.multiply(operands); });
        };
        for (u32 rounds = (count + 2 * kStep - 1) / (2 * kStep); rounds > 0; --rounds) {
            turn(odd, 0);
            turn(even, 1);
        }
        ping_pong.end();
    }

  private:
    template <int kPhase>
    struct Phase {};
};

/// Multi-stage pipeline of asynchronous loads to LDS: a ring of `kCount` stages, `kStep` of them multiplied at a time, the others in
/// flight. One barrier per step: a wave passes it when its own loads of this step have landed; then all waves have left the stages
/// that the next loads overwrite.
template <class A, class W, class Scales, int kCount, int kStep>
class DirectPipeline {
    static constexpr int kPrefetched = kCount - kStep;  // stages in flight ahead of the step
    static constexpr int kLoads = A::kParts + W::kParts + Scales::kParts;
    static_assert(kPrefetched > kStep, "other loads are in flight behind those of the step");

    const A &a_;
    const W &w_;
    const Scales &scales_;
    Stages<A, W, Scales, kCount> &stages_;

    HK_FN void copy(u32 from, u32 stage) const {
        a_.copy(from, stages_.a[stage]);
        w_.copy(from / A::kStageBytes * W::kStageBytes, stages_.w[stage]);
        scales_.copy(from, stages_.scales[stage]);
        commit_loads();
    }

    /// Position in the ring.
    struct Place {
        u32 from;  // byte of the rows, of the next stage to load
        u32 next;  // its stage
        u32 first = 0;  // the next stage to multiply
    };
    static constexpr u32 after(u32 stage) { return stage + 1 == kCount ? 0 : stage + 1; }

    /// Prologue: loads all stages but those of one step.
    HK_FN Place begin(u32 from) const {
#pragma unroll
        for (u32 i = 0; i < kPrefetched; ++i) copy(from + i * A::kStageBytes, i);
        return {from + kPrefetched * A::kStageBytes, kPrefetched % kCount};
    }
    /// Issues the loads of the next stages; returns those to multiply.
    HK_FN Step<A, W, Scales, kStep> advance(Place &place) const {
        Step<A, W, Scales, kStep> step;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            copy(place.from, place.next);
            place.from += A::kStageBytes;
            place.next = after(place.next);
            step.a[i] = &stages_.a[place.first];
            step.w[i] = &stages_.w[place.first];
            step.scales[i] = &stages_.scales[place.first];
            place.first = after(place.first);
        }
        return step;
    }
    /// Waits for the wave's own loads of the next step.
    HK_FN static void wait_step() { wait_loads<kPrefetched - kStep, kLoads>(); }

  public:
    using Lds = Stages<A, W, Scales, kCount>;

    HK_FN DirectPipeline(const A &a, const W &w, const Scales &scales, Lds &stages)
        : a_(a), w_(w), scales_(scales), stages_(stages) {}

    /// Calls `acc.multiply<0>(Step)` for `count` stages from byte `from` of the rows on, `kStep` at a time.
    template <class Accum>
    HK_FN void run(u32 from, u32 count, Accum &acc_tile) const {
        Place place = begin(from);
        for (u32 done = 0; done < count; done += kStep) {
            wait_step();
            block_barrier();
            acc_tile.template multiply<0>(advance(place));
        }
        // Full drain: loads in flight must not land after the block has freed its LDS.
        wait_loads<0, 0>();
    }

    /// The same with ping-pong: `acc.multiply(acc.read(Step))`.
    template <class Accum>
    HK_FN void ping_pong(u32 from, u32 count, Accum &acc_tile) const {
        static_assert(kPrefetched >= 2 * kStep, "loads have a step to land before the wave waits for them");
        Place place = begin(from);
        wait_step();
        const PingPong ping_pong;
        for (u32 done = 0; done < count; done += kStep) {
            ping_pong.step(
                [&] {
                    const auto operands = acc_tile.read(advance(place));
                    wait_step();
                    return operands;
                },
                [&](const auto &operands) { acc_tile.multiply(operands); });
        }
        ping_pong.end();
        wait_loads<0, 0>();
    }
};

namespace detail {
template <class Stage, int kMost>
inline constexpr int kRoom = int(sizeof(Stage)) * kMost <= kLdsBytes ? kMost : kLdsBytes / int(sizeof(Stage));

template <bool kDirectToLds, class A, class W, class Scales, int kCount, int kStep>
struct PipelineOf {
    using Type = RegisterPipeline<A, W, Scales, kStep>;
};
template <class A, class W, class Scales, int kCount, int kStep>
struct PipelineOf<true, A, W, Scales, kCount, kStep> {
    using Type = DirectPipeline<A, W, Scales, kCount, kStep>;
};
}  // namespace detail

/// DirectPipeline where target and rows allow it, with a ring of up to `kCount` stages that fit LDS; else RegisterPipeline.
template <class A, class W, class Scales, int kCount, int kStep>
using Pipeline = typename detail::PipelineOf<A::kDirectToLds && W::kDirectToLds && Scales::kDirectToLds, A, W, Scales,
                                             detail::kRoom<Stages<A, W, Scales, 1>, kCount>, kStep>::Type;

}  // namespace hk
