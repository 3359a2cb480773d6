// race.hip: ids[b] = argmax_i score_i of row row_index[b]; ties go to the smallest i, scores that are NaN are left out
//   greedy  score_i = x_i
//   random  score_i = x_i / T - ln(E_i + 1e-10), the logarithm of softmax(x / T)_i / (E_i + 1e-10) but for what all i share
//   mixed   greedy where T is zero, else random
//   x             [R, V]  T = bf16 | f16 | f32   unit stride on V, rows any stride
//   exponentials  [B, V]  f32, optional          unit stride on V, rows any stride; E_i, finite and not negative
//   temperature   [R]     f32, optional          contiguous; below 1e-5 acts as 1e-5
//   ids           [B]     i32                    contiguous
// Without `exponentials`, E_i = -ln(u) with u of word i % 4 of philox(counter = (offset, b, i / 4), key = seed). With E_i
// independent of rate one, i wins with probability softmax(x / T)_i: an exponential race.
//
// How the work is split
//   V up to 1024: a wave takes a row; up to 8192: a block of 256 threads does, 4096 tokens at a time, 16 a lane. Longer rows:
//   such blocks take segments of 4096 tokens, or a multiple of that beyond 128 segments and where rows are many; their
//   winners go to the workspace, where a second launch, `merge`, finds the winner of each row. An argmax with a rule for
//   ties is the same in any order.
// Tokens that cannot win
//   -ln(E + 1e-10) grows with u. So with the largest logit of some tokens and the largest of their words comes a bound of
//   all their scores; if that is below a score that the block has seen, none of them wins, and nothing more is made of
//   them. Of the tiles of a block, the first is looked at in full, and of the others ever fewer tokens.
// Floor
//   V * sizeof(T), once, and V * 4 where exponentials are given. Drawing them takes 10 rounds of two 32 by 32 bit
//   products for four tokens, of which those of the parts of the counter that all tokens share, 4 of 20, are made once;
//   and two logarithms for each token that could win. On an H200 the products take 19 cycles of a scheduler for 32 tokens,
//   as long as it takes to read them as bf16 at 85 % of the copy rate.
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

/// Where a race has its exponentials from.
struct Given {
    static constexpr bool kDrawn = false;
};
struct Drawn {
    static constexpr bool kDrawn = true;
};

/// Tokens of a lane that are bounded together: of fewer, bounds take longer than scores; of more, too many are too high.
constexpr int kTogether = 8;
/// More than what special functions err can raise the handicap of an exponential above that of a smaller one. (An H200's
/// do not at all: of the 2^24 numbers that there are, none.)
constexpr float kMargin = 0x1p-10f;

enum Mode : u32 { kGreedy = 0, kRandom = 1, kMixed = 2 };

struct Params {  // same fields, same order as `Params` in src/race.rs
    hk::Global x, row_index, temperature, exponentials, ids, workspace;
    u64 seed, offset;
    float temperature_value;
    u32 mode;
    u32 segments;  // of a row
    u32 segment;   // tokens of a segment
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

/// -ln(u) of the number that a word makes.
HK_FN float exponential(u32 word) { return -hk::log_fast(hk::unit_interval(word)); }

/// What a score has beside its logit, of an exponential that is not negative.
HK_FN float handicap(float e) {
    // Rounded before the sum, as one that is given.
#pragma clang fp contract(off)
    return -hk::log_fast(e + 1e-10f);
}

/// Column of element `e` of a lane whose first one is `column`.
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
    // `best` of the block.
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
        // First the largest of each lane; then its place, in the lanes that have the largest of all, from memory once more.
        float mine = -__builtin_inff();
        u32 at = kNone;
        for (u32 tile = begin; tile < end; tile += kTile) {
            const u32 column = tile + thread * kVec;
            RowF x = hk::widen(load(column));
            if (cols - tile < kTile) hk::lowest_beyond<kAccess>(x, i32(cols - column));
#pragma unroll
            for (auto &chunk : x.chunk) chunk = __builtin_elementwise_canonicalize(chunk);  // no maximum is a signalling NaN
            const float most = hk::largest(x);
            at = most > mine ? column : at;
            mine = hk::Max{}(mine, most);
        }
        const float most = block.max(mine);
        u32 index = kNone;
        if (mine == most && at != kNone) {
            RowF x = hk::widen(load(at));
            hk::lowest_beyond<kAccess>(x, i32(cols - at));
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
        float bound = -__builtin_inff();  // a score that this block has: what is less does not win
        for (u32 tile = begin, next = begin + kTile; tile < end; tile += kTile) {
            const u32 column = tile + thread * kVec;
            const RowT x = load(column);
            RowF given;
            if constexpr (!kDrawn) given = RowF::load(RowBatch{b, 1, column, cols}.at<float, kAccess, true>(p.exponentials, 0));
#pragma unroll
            for (int first = 0; first < ColsPerLane; first += kTogether) {
                hk::Vec<T, kTogether> logits;
                hk::Vec<float, kTogether> e;
                hk::Vec<u32, kTogether> words;
#pragma unroll
                for (int j = 0; j < kTogether; ++j) {
                    logits[j] = x.chunk[(first + j) / kVec][(first + j) % kVec];
                    if constexpr (!kDrawn) e[j] = given.chunk[(first + j) / kVec][(first + j) % kVec];
                }
                if constexpr (kDrawn) {
#pragma unroll
                    for (int j = 0; j < kTogether; j += 4) {
                        const u32 counter = column_of<RowT>(column, first + j) / 4;
                        const auto four = hk::philox({u32(p.offset), u32(p.offset >> 32), b, counter}, p.seed);
#pragma unroll
                        for (int i = 0; i < 4; ++i) words[j + i] = four[i];
                    }
                }
                if (bound > -__builtin_inff()) {
                    float least;
                    if constexpr (kDrawn) least = exponential(__builtin_reduce_max(words));
                    else least = -hk::largest(-e);
                    const bool below = __builtin_fmaf(hk::largest(logits), scale, handicap(least) + kMargin) < bound;
                    if (hk::ballot(!below) == 0) continue;
                }
                auto wide = hk::widen(logits);
                if (cols - tile < kTile) {
#pragma unroll
                    for (int j = 0; j < kTogether; ++j) {
                        wide[j] = column_of<RowT>(column, first + j) < cols ? wide[j] : -__builtin_inff();
                    }
                }
#pragma unroll
                for (int j = 0; j < kTogether; ++j) {
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
    if (p.exponentials.present()) run(Given{});
    else run(Drawn{});
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

// Entry points of one dtype: name = op, dtype, tokens at a time, access if it is by elements. As `KERNELS` in
// src/race.rs.
#define RACE(T)                                                                                        \
    HK_ENTRY(race_##T##_1024, 64, race<hk::Access::Vectors, hk::T, 64, 16>)                            \
    HK_ENTRY(race_##T##_4096, 256, race<hk::Access::Vectors, hk::T, 256, 16>)                          \
    HK_ENTRY(race_##T##_1024_elements, 64, race<hk::Access::Elements, hk::T, 64, 16>)                  \
    HK_ENTRY(race_##T##_4096_elements, 256, race<hk::Access::Elements, hk::T, 256, 16>)

RACE(bf16)
RACE(f16)
RACE(f32)
HK_ENTRY(race_merge, kMergeThreads, merge)
