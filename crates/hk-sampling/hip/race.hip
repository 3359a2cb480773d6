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
// Floor
//   V * sizeof(T), once, and V * 4 where exponentials are given. Drawing them takes 10 rounds of two 32 by 32 bit
//   products and two logarithms, a quarter of the former for each token.
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

/// Column of element `e` of a lane whose first one is `column`.
template <class RowT>
HK_FN u32 column_of(u32 column, int e) {
    constexpr int kVec = hk::kVecLen<typename RowT::Element>;
    return column + u32(e / kVec * RowT::kLanes * kVec + e % kVec);
}

/// Negative infinities for what is beyond the row.
template <int L, int N, int C>
HK_FN void within(hk::Row<float, L, N, C> &x, u32 column, u32 cols) {
    i32 left = i32(cols - column);
    hk::forget(left);
#pragma unroll
    for (int k = 0; k < C; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) x.chunk[k][i] = k * L * N + i < left ? x.chunk[k][i] : -__builtin_inff();
    }
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
        return hk::widen(RowT::load(RowBatch{row, 1, column, cols}.at<T, kAccess, true>(p.x, 0)));
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
            RowF x = load(column);
            if (cols - tile < kTile) within(x, column, cols);
#pragma unroll
            for (auto &chunk : x.chunk) chunk = __builtin_elementwise_canonicalize(chunk);  // no maximum is a signalling NaN
            const float most = hk::largest(x);
            at = most > mine ? column : at;
            mine = hk::Max{}(mine, most);
        }
        const float most = block.max(mine);
        u32 index = kNone;
        if (mine == most && at != kNone) {
            RowF x = load(at);
            within(x, at, cols);
#pragma unroll
            for (int e = ColsPerLane - 1; e >= 0; --e) {
                index = x.chunk[e / kVec][e % kVec] == most ? column_of<RowT>(at, e) : index;
            }
        }
        return finish({most, block.reduce(index, hk::Min{})});
    }
    Best best;
    for (u32 tile = begin; tile < end; tile += kTile) {
        const u32 column = tile + thread * kVec;
        const RowF x = load(column);
        RowF e = {};
        if (p.exponentials.present()) {
            e = RowF::load(RowBatch{b, 1, column, cols}.at<float, kAccess, true>(p.exponentials, 0));
        }
#pragma unroll
        for (int k = 0; k < ColsPerLane / kVec; ++k) {
#pragma unroll
            for (int i = 0; i < kVec; i += 4) {
                const u32 first = column + u32(k * Threads * kVec + i);
                if (!p.exponentials.present()) {
                    const auto words = hk::philox({u32(p.offset), u32(p.offset >> 32), b, first / 4}, p.seed);
#pragma unroll
                    for (int j = 0; j < 4; ++j) e.chunk[k][i + j] = -hk::log(hk::unit_interval(words[j]));
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float handicap = -hk::log(e.chunk[k][i + j] + 1e-10f);
                    const u32 c = first + u32(j);
                    if (c < cols) best.take(__builtin_fmaf(x.chunk[k][i + j], scale, handicap), c);
                }
            }
        }
    }
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
