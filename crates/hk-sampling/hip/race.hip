// race.hip: ids[b] = argmax_i score_i of row row_index[b]; ties go to the smallest i, NaN scores are skipped
//   greedy  score_i = x_i
//   random  score_i = x_i / T - ln(E_i + 1e-10), the logarithm of softmax(x / T)_i / (E_i + 1e-10) up to a constant
//   mixed   greedy where T is zero, else random
//   x             [R, V]  T = bf16 | f16 | f32   unit stride on V, rows any stride
//   exponentials  [B, V]  f32, optional          unit stride on V, rows any stride; E_i, finite and not negative
//   temperature   [R]     f32, optional          contiguous; below 1e-5 acts as 1e-5
//   ids           [B]     i32                    contiguous
// Without `exponentials`, E_i = -ln(u) with u of word i % 4 of philox(counter = (offset, b, i / 4), key = seed). With E_i
// independent of rate one, i wins with probability softmax(x / T)_i: an exponential race.
//
// How the work is split
//   V up to 1024: a wave per row; up to 8192: a block of 256 threads, in tiles of 4096 tokens, 16 per lane. Longer rows: such
//   blocks take segments of 4096 tokens, or of a multiple of that for more than 128 segments and for many rows; their winners
//   go to the workspace, and a second launch, `merge`, finds the winner of each row. An argmax with a tie rule is the same in
//   any order.
// Tokens that cannot win
//   -ln(E + 1e-10) grows with u. So the largest logit and the largest random word of some tokens bound their scores; if the
//   bound is below a score that the block has seen, the tokens are skipped. The first tile of a block is scored in full, later
//   ones ever less.
// Floor
//   V * sizeof(T), and V * 4 for `exponentials`. Drawing takes 10 Philox rounds of two 32 x 32 bit multiplications per four
//   tokens (4 of the 20 depend on the shared part of the counter alone and are hoisted), and two logarithms per token that
//   could win. On an H200 the multiplications take 19 scheduler cycles per 32 tokens, as long as reading them as bf16 at 85 %
//   of the copy rate.
#include <hk/entry.h>

#include <hk/block.h>
#include <hk/math.h>
#include <hk/philox.h>
#include <hk/reg.h>
#include <hk/rows.h>
#include <hk/wave.h>

namespace {
using hk::Access;
using hk::i32;
using hk::RowBatch;
using hk::u32;
using hk::u64;

constexpr u32 kNone = 0xffffffffu;
constexpr int kMergeThreads = 64;

/// Source of the exponentials: the tensor `exponentials`, or Philox.
struct FromTensor {
    static constexpr bool kDrawn = false;
};
struct FromPhilox {
    static constexpr bool kDrawn = true;
};

/// Tokens per lane and bound: with fewer, bounds cost more than scores; with more, too few bounds are low enough.
constexpr int kTokensPerBound = 8;
/// Above the error by which `log_fast` may break the monotonicity of `handicap`. (On an H200 it does not, for any of the 2^24
/// uniform numbers.)
constexpr float kMargin = 0x1p-10f;

enum Mode : u32 { kGreedy = 0, kRandom = 1, kMixed = 2 };

struct Params {
    hk::Global x, row_index, temperature, exponentials, ids, workspace;
    u64 seed, offset;
    float temperature_value;
    u32 mode;
    u32 segments;  // per row
    u32 segment;  // tokens per segment
};

/// The best token of a part of a row.
struct Best {
    float score = -__builtin_inff();
    u32 index = kNone;

    HK_FN void take(float other, u32 i) {
        if (other > score) {
            score = other;
            index = i;
        }
    }

    template <class Reduce>
    HK_FN Best over(Reduce reduce) const {
        const float most = reduce(score, hk::Max{});
        return {most, reduce(score == most ? index : kNone, hk::Min{})};
    }
};

/// -ln(u) of a random word.
HK_FN float exponential(u32 word) { return -hk::log_fast(hk::unit_interval(word)); }

/// The random term of a score, -ln(e + 1e-10).
HK_FN float handicap(float e) {
    // No contraction: a drawn exponential rounds before the sum, as one from a tensor does.
#pragma clang fp contract(off)
    return -hk::log_fast(e + 1e-10f);
}

/// Column of element `e` of a lane whose first column is `column`.
template <class RowT>
HK_FN u32 column_of(u32 column, int e) {
    constexpr int kVec = hk::kVecLen<typename RowT::Element>;
    return column + u32(e / kVec * RowT::kLanes * kVec + e % kVec);
}

template <Access kAccess, class T, int Threads, int ColsPerLane>
HK_FN void race(const Params &p) {
    constexpr int kVec = hk::kVecLen<T>;
    constexpr u32 kTile = Threads * ColsPerLane;
    using RowT = hk::Row<T, Threads, kVec, ColsPerLane / kVec>;
    using RowF = typename RowT::template With<float>;

    const u32 thread = hk::thread_x();
    const u32 b = hk::block_x() / p.segments;
    const u32 s = hk::block_x() % p.segments;
    const u32 cols = p.x.cols();
    u64 row = b;
    if (p.row_index.present()) {
        const i32 index = p.row_index.row<i32>(0)[b];
        if (u32(index) >= p.x.rows()) {
            if (thread == 0 && s == 0) p.ids.row<i32>(0)[b] = 0;
            return;
        }
        row = u64(index);
    }
    const float t = p.temperature.present() ? p.temperature.row<float>(0)[row] : p.temperature_value;
    const bool greedy = p.mode == kGreedy || (p.mode == kMixed && t == 0.0f);
    const float scale = 1.0f / hk::Max{}(t, 1e-5f);

    const u32 begin = s * p.segment;
    const u32 end = cols - begin < p.segment ? cols : begin + p.segment;
    const auto load = [&](u32 column) {
        return RowT::load(RowBatch{row, 1, column, cols}.at<T, kAccess, true>(p.x, 0));
    };
    hk::GroupReducer<Threads, Threads> block;
    // Stores the block's best.
    const auto finish = [&](const Best &best) {
        if (thread != 0) return;
        if (p.segments == 1) {
            p.ids.row<i32>(0)[b] = best.index == kNone ? 0 : i32(best.index);
        } else {
            const auto winner = p.workspace.row<u32>(0) + u64(hk::block_x()) * 2;
            winner[0] = __builtin_bit_cast(u32, best.score);
            winner[1] = best.index;
        }
    };
    if (greedy) {
        // The maximum of each lane first; lanes that have the block's maximum reload its tile and look for the column.
        float mine = -__builtin_inff();
        u32 at = kNone;
        for (u32 tile = begin; tile < end; tile += kTile) {
            const u32 column = tile + thread * kVec;
            RowF x = hk::widen(load(column));
            if (cols - tile < kTile) hk::mask_tail<kAccess>(x, i32(cols - column));
#pragma unroll
            for (auto &chunk : x.chunk) chunk = __builtin_elementwise_canonicalize(chunk);  // quiets signalling NaNs
            const float most = hk::largest(x);
            at = most > mine ? column : at;
            mine = hk::Max{}(mine, most);
        }
        const float most = block.max(mine);
        u32 index = kNone;
        if (mine == most && at != kNone) {
            RowF x = hk::widen(load(at));
            hk::mask_tail<kAccess>(x, i32(cols - at));
#pragma unroll
            for (int e = ColsPerLane - 1; e >= 0; --e) {
                index = x.chunk[e / kVec][e % kVec] == most ? column_of<RowT>(at, e) : index;
            }
        }
        return finish({most, block.reduce(index, hk::Min{})});
    }
    Best best;
    const auto run = [&](auto source) {
        constexpr bool kDrawn = decltype(source)::kDrawn;
        float bound = -__builtin_inff();  // a score of this block: lower ones do not win
        for (u32 tile = begin, next = begin + kTile; tile < end; tile += kTile) {
            const u32 column = tile + thread * kVec;
            const RowT x = load(column);
            RowF given;
            if constexpr (!kDrawn)
                given = RowF::load(RowBatch{b, 1, column, cols}.at<float, kAccess, true>(p.exponentials, 0));
#pragma unroll
            for (int first = 0; first < ColsPerLane; first += kTokensPerBound) {
                hk::Vec<T, kTokensPerBound> logits;
                hk::Vec<float, kTokensPerBound> e;
                hk::Vec<u32, kTokensPerBound> words;
#pragma unroll
                for (int j = 0; j < kTokensPerBound; ++j) {
                    logits[j] = x.chunk[(first + j) / kVec][(first + j) % kVec];
                    if constexpr (!kDrawn) e[j] = given.chunk[(first + j) / kVec][(first + j) % kVec];
                }
                if constexpr (kDrawn) {
#pragma unroll
                    for (int j = 0; j < kTokensPerBound; j += 4) {
                        const u32 counter = column_of<RowT>(column, first + j) / 4;
                        const auto four = hk::philox({u32(p.offset), u32(p.offset >> 32), b, counter}, p.seed);
#pragma unroll
                        for (int i = 0; i < 4; ++i) words[j + i] = four[i];
                    }
                }
                if (bound > -__builtin_inff()) {
                    float least;
                    if constexpr (kDrawn)
                        least = exponential(__builtin_reduce_max(words));
                    else
                        least = -hk::largest(-e);
                    const bool below = __builtin_fmaf(hk::largest(logits), scale, handicap(least) + kMargin) < bound;
                    if (hk::ballot(!below) == 0) continue;
                }
                auto wide = hk::widen(logits);
                if (cols - tile < kTile) {
#pragma unroll
                    for (int j = 0; j < kTokensPerBound; ++j) {
                        wide[j] = column_of<RowT>(column, first + j) < cols ? wide[j] : -__builtin_inff();
                    }
                }
#pragma unroll
                for (int j = 0; j < kTokensPerBound; ++j) {
                    if constexpr (kDrawn) e[j] = exponential(words[j]);
                    best.take(__builtin_fmaf(wide[j], scale, handicap(e[j])), column_of<RowT>(column, first + j));
                }
            }
            if (tile + kTile == next && next < end) {  // after one tile, two, four ..
                bound = block.max(best.score);
                next += next - begin;
            }
        }
    };
    if (p.exponentials.present())
        run(FromTensor{});
    else
        run(FromPhilox{});
    finish(best.over([&](auto v, auto op) { return block.reduce(v, op); }));
}

/// The best of the segments of a row.
HK_FN void merge(const Params &p) {
    const u32 b = hk::block_x();
    if (p.row_index.present() && u32(p.row_index.row<i32>(0)[b]) >= p.x.rows()) return;
    Best best;
    const auto winners = p.workspace.row<u32>(0) + u64(b) * p.segments * 2;
    for (u32 s = hk::thread_x(); s < p.segments; s += kMergeThreads) {
        best.take(__builtin_bit_cast(float, winners[2 * s]), winners[2 * s + 1]);
    }
    hk::GroupReducer<kMergeThreads, kMergeThreads> block;
    best = best.over([&](auto v, auto op) { return block.reduce(v, op); });
    if (hk::thread_x() == 0) p.ids.row<i32>(0)[b] = best.index == kNone ? 0 : i32(best.index);
}
}  // namespace

// Entry points of one dtype, as `KERNELS` in src/race.rs. Name = op, dtype, tokens per tile, `_scalar` for the scalar path.
#define RACE(T)                                                                   \
    HK_ENTRY(race_##T##_1024, 64, race<hk::Access::Vectorized, hk::T, 64, 16>)    \
    HK_ENTRY(race_##T##_4096, 256, race<hk::Access::Vectorized, hk::T, 256, 16>)  \
    HK_ENTRY(race_##T##_1024_scalar, 64, race<hk::Access::Scalar, hk::T, 64, 16>) \
    HK_ENTRY(race_##T##_4096_scalar, 256, race<hk::Access::Scalar, hk::T, 256, 16>)

RACE(bf16)
RACE(f16)
RACE(f32)
HK_ENTRY(race_merge, kMergeThreads, merge)
