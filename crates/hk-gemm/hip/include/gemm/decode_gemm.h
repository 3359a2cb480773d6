// decode_gemm.h: decode GEMM (skinny M, up to 64 rows), bound by reading w.
//   A block computes 16 kMTiles x 16 kNTiles outputs. Its waves share K: wave i takes every kWaves-th step of kStepBytes of each row,
//   from global memory to registers, double-buffered. So one wave reads each weight, once, and has up to
//   32 (kMTiles + kNTiles) kStepBytes of loads in flight. The waves' partial sums meet in LDS, in wave order, as many rows at a
//   time as fit 16 KiB: LDS does not bound how many blocks a CU holds.
//   Operands (gemm/operands) say what a step loads and how it is multiplied.
#pragma once

#include <gemm/epilogue/epilogue.h>
#include <gemm/epilogue/staged_acc.h>
#include <gemm/launch_site.h>
#include <gemm/split_k.h>

#include <hk/block.h>
#include <hk/mma.h>

namespace gemm {
/// Waves per block that share K (blocks of 64 rows have 4), and bytes of K that a wave takes per step: kLongStepBytes for 16 rows,
/// kShortStepBytes for more. A wave of 32 lanes needs twice the registers per step. On an H200, 4 waves and 128 bytes are best
/// for 16 rows; if the grid gives an SM one or two blocks, twice as many waves are.
inline constexpr int kDecodeWaves = 8 / hk::kRowsPerLane, kWideDecodeWaves = 2 * kDecodeWaves;
inline constexpr int kLongStepBytes = 256 / hk::kRowsPerLane, kShortStepBytes = kLongStepBytes / 2,
                     kWideStepBytes = 128;

/// Steps of kStride bytes along K: where the main loop is in an output tile.
template <u32 kStride>
struct KSteps {
    u32 from, end;

    HK_FN bool valid() const { return from < end; }
    HK_FN u32 operator*() const { return from; }
    HK_FN KSteps next() const { return {from + kStride, end}; }
};

/// The main loop of decode GEMM: two register stages, each loaded again as soon as it is multiplied.
///   for (DecodeStages stages(operands, steps); stages.at.valid();) stages.multiply(operands, acc);
/// `operands.load(*at)` loads a stage; `operands.multiply(acc, stage)`, or `multiply(acc, stage, *at)`, accumulates it. Past the
/// last step `load` reads zeros: up to three steps are loaded past it, and one is multiplied.
/// The `for` stands at the caller: in a function, the main loop of some kernels takes more registers.
template <class Operands, class Steps>
class DecodeStages {
    typename Operands::Stage even_, odd_;

  public:
    Steps at;

    HK_FN DecodeStages(const Operands &operands, Steps first) : at(first) {
        even_ = operands.load(*at);
        hk::sched_barrier();
        odd_ = operands.load(*at.next());
        hk::sched_barrier();
    }

    /// Two steps.
    HK_FN void multiply(const Operands &operands, auto &acc) {
        const Steps first = at, second = at.next();
        at = second.next();
        multiply(operands, acc, even_, first);
        even_ = operands.load(*at);
        hk::sched_barrier();
        multiply(operands, acc, odd_, second);
        odd_ = operands.load(*at.next());
        hk::sched_barrier();
    }

  private:
    HK_FN static void multiply(const Operands &operands, auto &acc, const auto &stage, const Steps &at) {
        if constexpr (requires { operands.multiply(acc, stage, *at); })
            operands.multiply(acc, stage, *at);
        else
            operands.multiply(acc, stage);
    }
};

/// The main loop of functions: `load(*at)` and `multiply(acc, stage, *at)`.
template <class Steps, class Load, class Multiply>
HK_FN void decode_loop(Steps at, auto &acc, Load load, Multiply multiply) {
    struct Operands {
        using Stage = decltype(load(*at));
        Load load;
        Multiply multiply;
    };
    const Operands operands{load, multiply};
    for (DecodeStages stages(operands, at); stages.at.valid();) stages.multiply(operands, acc);
}

/// LDS in which the partial sums of kWaves waves meet, kTogether M tiles at a time.
template <class Operands, int kWaves>
struct DecodeLds {
    using Number = decltype(typename Operands::Acc{}[0] + 0);
    static constexpr u32 kTogether = kWaves < 8 && Operands::kMTiles > 1 ? 2 : 1;
    static_assert(Operands::kMTiles % kTogether == 0, "all rounds alike");
    StagedAcc<Number, 16 * Operands::kNTiles, 16 * kTogether> staged[kWaves];
};

/// Decode GEMM of a block. `make_operands(p, coord, first_m, first_w, end)` makes each wave's operand loader: rows of a from
/// `first_m` on, rows of w from `first_w` on, both ending with byte `end`.
template <class Operands, int kWaves, bool kGated, class Params, class Site, class MakeOperands>
HK_FN void decode_gemm(const Params &args, const Site &site, MakeOperands make_operands) {
    using Acc = typename Operands::Acc;
    constexpr int kMTiles = Operands::kMTiles, kNTiles = Operands::kNTiles;
    constexpr u32 kM = 16 * kMTiles, kN = 16 * kNTiles, kThreads = kWaves * hk::kWaveSize;
    constexpr u32 kStepBytes = Operands::kStepBytes;
    using Lds = DecodeLds<Operands, kWaves>;
    using Number = typename Lds::Number;
    constexpr u32 kTogether = Lds::kTogether;
    auto &staged = site.template lds<Lds>().staged;

    TileCoord coord(args.grid, site.block());
    if (!coord.find_matrix<kM>(args.epilogue.groups, args.a.rows)) return;
    Acc acc[kMTiles][kNTiles] = {};
    {
        const auto [begin, end] = KRange(args.grid, coord.split);
        // A gated tile has kN / 2 gate rows of w, then their value rows.
        const u32 first_n = coord.n_tile * kN;
        const Operands operands = make_operands(args, coord, coord.m_tile * kM, kGated ? first_n / 2 : first_n, end);
        const KSteps<kWaves * kStepBytes> steps{begin + hk::wave_id() * kStepBytes, end};
        for (DecodeStages stages(operands, steps); stages.at.valid();) stages.multiply(operands, acc);
        if constexpr (requires { Operands::kAccUnit; }) scale_acc(acc, Operands::kAccUnit);
    }

    constexpr u32 kCols = kGated ? kN / 2 : kN, kParts = kCols / kVecCols;
    using Sum = Vec<Number, kVecCols>;
    const auto total = [&](u32 row, u32 col) {
        Sum sum = Number(0);
#pragma unroll 8
        for (int wave = 0; wave < kWaves; ++wave) sum += staged[wave].get(row, col);
        return sum;
    };
    // Outputs of a row of the tile. `sum(col)`: of columns from `col` on.
    const auto finish = [&](const Params &p, u32 row, u32 col, auto sum) {
        const u32 m = coord.m_tile * kM + row, n = coord.n_tile * kCols + col;
        const auto widened = [&](u32 at) { return __builtin_convertvector(sum(at), Vec<float, kVecCols>); };
        if constexpr (kGated) {
            run_gated_epilogue<kVecCols>(p.epilogue, coord, m, n, widened(col), widened(kCols + col));
        } else {
            run_epilogue<kVecCols>(p, coord, m, n, widened(col));
        }
    };
    const bool meet = kSlicesMeet && site.reload(args).split_k.partials;
#pragma unroll 1
    for (u32 first = 0; first < kMTiles; first += kTogether) {
        if (first > 0) hk::block_barrier();
#pragma unroll
        for (u32 m = 0; m < kMTiles; ++m) {
            // One copy of the epilogue's code for all tiles.
            if (m / kTogether * kTogether == first) staged[hk::wave_id()].put(m % kTogether * 16, acc[m]);
        }
        hk::block_barrier();
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < 16 * kTogether * kParts; i += kThreads) {
            const Params &p = site.reload(args);
            const u32 row = i / kParts, col = i % kParts * kVecCols;
            if (meet) {
                store_slice<kM, kN, kGated>(p, coord, 16 * first + row, col, [&](u32 at) { return total(row, at); });
            } else {
                finish(p, 16 * first + row, col, [&](u32 at) { return total(row, at); });
            }
        }
    }
    if constexpr (kSlicesMeet) {
        if (!meet) return;
        const TileSlices<kM, kN> slices(site.reload(args), coord);
        if (!slices.last_to_arrive(&staged)) return;
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < 16 * slices.groups * kParts; i += kThreads) {
            const u32 row = i / kParts;
            finish(site.reload(args), row, i % kParts * kVecCols,
                   [&](u32 at) { return sum_of_slices<Number>(slices, row, at); });
        }
        slices.clear();
    }
}

}  // namespace gemm
