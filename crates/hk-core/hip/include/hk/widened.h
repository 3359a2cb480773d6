// hk/widened.h: GEMM of fp8 by the warpgroup instructions of 16-bit floats, which sum in f32: those of fp8 keep some 14 bits of a sum.
//
//   rows of x, of w  --loads-->  registers  --f16, exact-->  two stages in LDS  --wgmma-->  accumulators
//
// Only where HK_WARPGROUPS is defined.
#pragma once

#include <hk/pipeline.h>
#include <hk/quant.h>
#include <hk/warpgroup.h>

#if defined(HK_WARPGROUPS)
namespace hk {

/// A stage of `kRows` rows: 128 columns, in two tiles of 64.
template <int kRows_>
struct WidenedRows {
    static constexpr int kRows = kRows_;
    WarpgroupRows<kRows> half[2];
};

/// Loads 128 fp8 of each row, in the order of MMAs, to registers, and stores them as f16.
template <int kRows, int kThreads>
class WideningMover {
  public:
    using Tile = WidenedRows<kRows>;
    static constexpr u32 kStageBytes = 128;  // of a row in memory
    static constexpr int kParts = kRows * 8 / kThreads;
    static_assert(kParts * kThreads == kRows * 8, "every thread has as many chunks");

    struct Chunks {
        Vec<u32, 4> part[kParts];
    };

  private:
    Window window_;
    u32 end_, chunk_shift_;
    u32 offset_[kParts];

    // Of eight lanes, four have chunks of a row and four those of the next: they store to all banks.
    HK_FN static u32 row(int part) { return thread_x() / 16 * 2 + thread_x() % 8 / 4 + part * (kThreads / 8); }
    HK_FN static u32 chunk() { return thread_x() / 8 % 2 * 4 + thread_x() % 4; }

  public:
    /// As hk::Mover.
    template <class RowOf>
    HK_FN WideningMover(GlobalPtr<const u8> first, u32 rows, const RowLayout &layout, u32 end, RowOf row_of)
        : window_(first, Window::kOutOfBounds - 1), end_(end), chunk_shift_(layout.chunk_shift) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 from = row_of(WarpgroupRows<kRows>::of_mma(row(i)));
            const u32 at = layout.window_offset(from) + (16 * chunk() << chunk_shift_);
            offset_[i] = from < rows ? at : Window::kOutOfBounds;
        }
    }

    HK_FN Chunks load(u32 from) const {
        Chunks chunks;
        const u32 past = (end_ - 1u - (from + 16 * chunk())) & Window::kOutOfBounds;
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            chunks.part[i] = window_.load<Vec<u32, 4>>(offset_[i] | past, from << chunk_shift_);
        return chunks;
    }

    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            Vec<u32, 4> wide[2];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const u32 pair = chunks.part[i][j / 2] >> 16 * (j % 2);
                wide[j / 4][j % 4] = detail::native_fp8_as_f16(pair);
            }
            const u32 r = row(i);
            auto *to = tile.half[chunk() / 4].chunk + r * WarpgroupRows<kRows>::kChunks;
#pragma unroll
            for (u32 j = 0; j < 2; ++j) to[(2 * (chunk() % 4) + j) ^ WarpgroupRows<kRows>::swizzle(r)] = wide[j];
        }
    }
};

/// One of two stages is multiplied while the next one, in registers, is widened to the other; one or two are in flight behind it.
template <class A, class W, class Scales>
class WideningPipeline {
    static_assert(Scales::kParts == 0, "plain rows");
    /// Two where registers have room for them beside the accumulators.
    static constexpr int kInFlight = W::Tile::kRows / 2 + 8 * (A::kParts + W::kParts) <= 160 ? 2 : 1;

    const A &a_;
    const W &w_;
    Stages<A, W, Scales, 2> &stages_;

    struct Registers {
        typename A::Chunks a[kInFlight];
        typename W::Chunks w[kInFlight];
    };

    HK_FN void load(Registers &loads, u32 of, u32 from) const {
        loads.a[of] = a_.load(from);
        loads.w[of] = w_.load(from);
    }
    /// Widens the stage at byte `from` of the rows to LDS, and loads another to its registers.
    template <u32 kTo>
    HK_FN void widen(Registers &loads, u32 from) const {
        constexpr u32 kOf = kTo % kInFlight;
        a_.store(loads.a[kOf], stages_.a[kTo]);
        w_.store(loads.w[kOf], stages_.w[kTo]);
        load(loads, kOf, from + kInFlight * A::kStageBytes);
    }
    /// Multiplies the stage at byte `from`, while the next one is widened.
    template <u32 kNow, int kCount>
    HK_FN void step(float (&d)[kCount], Registers &loads, u32 from) const {
        const u32 row = wave_id() / 4 * 64;
        detail::publish_to_wgmma();
        // All waves have waited for the MMAs of the stage before, whose LDS is free.
        block_barrier();
        detail::begin_wgmma();
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
            for (u32 byte = 0; byte < WarpgroupRows<64>::kBytes; byte += 32)
                detail::Wgmma<f16, 2 * kCount>::mma(d, stages_.a[kNow].half[half].descriptor(row, byte),
                                                    stages_.w[kNow].half[half].descriptor(0, byte));
        }
        detail::commit_wgmma();
        widen<1 - kNow>(loads, from + A::kStageBytes);
        detail::wait_wgmma<0>(d);
    }

  public:
    using Lds = Stages<A, W, Scales, 2>;

    HK_FN WideningPipeline(const A &a, const W &w, const Scales &, Lds &stages) : a_(a), w_(w), stages_(stages) {}

    /// As WarpgroupPipeline.
    template <class, int kN, class Acc>
    HK_FN void multiply(u32 from, u32 count, Acc (&acc)[1][kN / 16]) const {
        float d[kN / 2] = {};
        Registers loads;
#pragma unroll
        for (u32 i = 0; i < kInFlight; ++i) load(loads, i, from + i * A::kStageBytes);
        widen<0>(loads, from);
        while (count > 0) {
            step<0>(d, loads, from);
            if (count == 1) break;
            step<1>(d, loads, from + A::kStageBytes);
            count -= 2;
            from += 2 * A::kStageBytes;
        }
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) acc[0][i / 8][place_of_sum(i)] = d[i];
    }
};

}  // namespace hk
#endif
