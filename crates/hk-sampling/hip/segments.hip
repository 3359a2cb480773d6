// segments.hip: filters and draws for long rows, spread over blocks
//   Arguments as in rows.hip; formulas and search in filter.h. Each row is cut into segments of a length that V alone
//   fixes. In order, one launch each:
//   softmax     (logits only) of each segment, the maximum and the sum of the exponentials
//   histogram   of each segment, over the upper 11 bits of its keys, to the workspace
//   candidates  adds up the histograms of the row to find these bits of the threshold, and lists the tokens of the
//               segment that have them, if there are any, by their lower 20 bits
//   draw        one block a row: finds the lower bits in the lists, sums the segments, draws in one of them
//   renorm      (where y is wanted) writes y from the threshold and the kept mass
// Where p is a share of what top-k and min-p keep, candidates and draw run twice: stage 1 without top-p, then stage 2.
//
// How the work is split
//   A segment is 8192 tokens, or for rows beyond 64 times that a multiple of them; a block of 256 threads has 8192 in
//   registers, 32 a lane. `draw` has 1024 threads. Results do not depend on the segments: what is added over blocks are
//   whole numbers, or numbers whose order the segments' order fixes.
// Floor
//   V * sizeof(T) from memory for `histogram` (for `softmax`, if there is one), the same through cache for each launch
//   after it but `draw`, which reads one segment. A histogram is stored from its lowest to its highest bin in use, 8
//   bytes a bin: some 2 KiB for probabilities over ten orders of magnitude, 16 KiB at most; each `candidates` block reads
//   those of its row. A list has 4 bytes a token, usually a few hundred of them. Atomics on one LDS address take turns: a
//   row of equal tokens takes 64 an instruction, the slowest case there is.
#include <hk/entry.h>

#include "filter.h"

namespace {
using namespace sampling;

constexpr int kThreads = 256;
constexpr int kDrawThreads = 1024;
constexpr u32 kTile = 8192;      // tokens that a block has in registers
constexpr u32 kMostSegments = 64;
constexpr u32 kHighShift = 20;   // keys above it: the first digit
constexpr u32 kHighBins = 2048;
constexpr u32 kLowBins = 1024;   // the two digits below
static_assert(kThreads * 32 == kTile && kDrawThreads * 8 == kTile, "a tile is in registers");

/// What is known of a segment.
struct Segment {
    double above;  // mass above the first digit of the threshold; of all that is kept if that digit settles it
    float max;     // of logits
    float sum;     // of their exponentials relative to it
    u32 greedy;    // first token that has it
    u32 max_key;   // kInfinity if there is one
    u32 low, high;  // pairs of bins in use, first and last; low > high if there are none
    u32 listed;
    u32 unused[7];
};

/// What is known of a row.
struct RowState {
    double mass, in_mass;  // of `Search`
    double p;
    double first_mass;  // what stage 1 keeps
    double kept_mass;
    u32 prefix, active, count, in_count;
    u32 k, min_key;
    u32 max_key;    // 0 or kInfinity: degenerate
    u32 threshold;  // kNone: nothing is kept
    u32 unused[6];
};
static_assert(sizeof(Segment) == 64 && sizeof(RowState) == 96, "as in src/sample.rs");

/// The workspace: its parts one after the other, each for all rows of the launch.
struct Workspace {
    u64 base;
    u64 rows;
    u64 segments;  // of a row
    u64 segment;   // tokens

    HK_FN explicit Workspace(const Params &p)
        : base(p.workspace.data), rows(p.outputs), segments(p.segments), segment(p.segment) {}

    HK_FN hk::GlobalPtr<RowState> row(u64 b) const {
        return reinterpret_cast<hk::GlobalPtr<RowState>>(base) + b;
    }
    /// Segment 0 of row b.
    HK_FN hk::GlobalPtr<Segment> segment_of(u64 b) const {
        return reinterpret_cast<hk::GlobalPtr<Segment>>(base + rows * sizeof(RowState)) + b * segments;
    }
    HK_FN hk::GlobalPtr<hk::Vec<u64, 2>> cells(u64 b, u64 s) const {
        const u64 at = base + rows * (sizeof(RowState) + segments * sizeof(Segment));
        return reinterpret_cast<hk::GlobalPtr<hk::Vec<u64, 2>>>(at + (b * segments + s) * kHighBins * sizeof(u64));
    }
    HK_FN hk::GlobalPtr<u32> list(u64 b, u64 s) const {
        const u64 at = base + rows * (sizeof(RowState) + segments * (sizeof(Segment) + kHighBins * sizeof(u64)));
        return reinterpret_cast<hk::GlobalPtr<u32>>(at) + (b * segments + s) * segment;
    }
};

/// The segment of a block.
struct Place {
    u32 b;  // among the rows of the launch
    u32 s;
    u64 row;  // kNoRow: there is nothing to do

    HK_FN explicit Place(const Params &p)
        : b(hk::block_x() / p.segments), s(hk::block_x() % p.segments), row(row_of(p, u64(p.first) + b)) {}
};

template <class T, int Threads>
using Tile = hk::Row<T, Threads, hk::kVecLen<T>, int(kTile) / Threads / hk::kVecLen<T>>;

/// Calls `f(first token of the tile)` for each tile of a segment.
template <class F>
HK_FN void for_tiles(const Params &p, u32 s, F f) {
    const u32 cols = p.x.cols();
    const u32 begin = s * p.segment;
    const u32 end = cols - begin < p.segment ? cols : begin + p.segment;
    for (u32 tile = begin; tile < end; tile += kTile) f(tile);
}

/// The softmax of a row from those of its segments.
HK_FN Softmax row_softmax(const Params &p, const Workspace &w, u32 b, u64 row) {
    const float t = temperature_of(p, row);
    const hk::GlobalPtr<Segment> segments = w.segment_of(b);
    const u32 lane = hk::lane_id();
    float max = -__builtin_inff();
    for (u32 s = lane; s < p.segments; s += kWaveSize) max = hk::Max{}(max, segments[s].max);
    Softmax softmax = {hk::group_reduce<kWaveSize>(max, hk::Max{}), t == 0.0f ? 0.0f : 0x1.715476p+0f / t, 1.0f, kNone};
    float sum = 0.0f;
    u32 first = kNone;
    for (u32 s = lane; s < p.segments; s += kWaveSize) {
        // Without a finite maximum this is NaN or zero, and so are all probabilities.
        sum += segments[s].sum * softmax.exponential(segments[s].max);
        if (segments[s].max == softmax.max) first = hk::Min{}(first, segments[s].greedy);
    }
    if (t == 0.0f) {
        first = hk::group_reduce<kWaveSize>(first, hk::Min{});
        softmax.greedy = __builtin_fabsf(softmax.max) < __builtin_inff() ? first : kNoToken;
    } else {
        softmax.inverse_sum = 1.0f / hk::group_reduce<kWaveSize>(sum, hk::Sum{});
    }
    return softmax;
}

/// Probabilities of a tile, not yet clean.
template <Access kAccess, class T, int Threads>
HK_FN auto load_tile(const Params &p, u64 row, u32 column, const Softmax &softmax) {
    const RowBatch batch = {row, 1, column, p.x.cols()};
    auto v = hk::widen(Tile<T, Threads>::load(batch.at<T, kAccess, true>(p.x, 0)));
    if (p.logits) apply(softmax, v, column, p.x.cols());
    return v;
}

template <Access kAccess, class T>
HK_FN void softmax(const Params &p) {
    const Place at(p);
    if (at.row == kNoRow) return;
    const u32 lane_column = hk::thread_x() * hk::kVecLen<T>;
    const u32 cols = p.x.cols();
    const float t = temperature_of(p, at.row);
    Softmax softmax = {-__builtin_inff(), t == 0.0f ? 0.0f : 0x1.715476p+0f / t, 1.0f, kNone};
    float sum = 0.0f;
    u32 first = kNone;
    hk::GroupReducer<kThreads, kThreads> block;
    for_tiles(p, at.s, [&](u32 tile) {
        const u32 column = tile + lane_column;
        const RowBatch batch = {at.row, 1, column, cols};
        auto v = hk::widen(Tile<T, kThreads>::load(batch.at<T, kAccess, true>(p.x, 0)));
        float max = -__builtin_inff();
        for_each(v, column, [&](float &x, u32 c) { max = hk::Max{}(max, c < cols ? x : -__builtin_inff()); });
        max = block.max(max);
        if (max > softmax.max) {
            const float before = softmax.max;
            softmax.max = max;
            sum *= hk::Max{}(softmax.exponential(before), 0.0f);
            first = kNone;
        }
        if (t == 0.0f) {
            for_each(v, column, [&](float &x, u32 c) { first = c < first && c < cols && x == softmax.max ? c : first; });
        } else {
            for_each(v, column, [&](float &x, u32 c) {
                sum += hk::Max{}(c < cols ? softmax.exponential(x) : 0.0f, 0.0f);
            });
        }
    });
    sum = block.sum(sum);
    first = block.reduce(first, hk::Min{});
    if (hk::thread_x() == 0) {
        const hk::GlobalPtr<Segment> segment = Workspace(p).segment_of(at.b) + at.s;
        segment->max = softmax.max;
        segment->sum = sum;
        segment->greedy = first;
    }
}

template <Access kAccess, class T>
HK_FN void histogram(const Params &p) {
    __shared__ alignas(16) u64 cells[kHighBins];
    const Place at(p);
    if (at.row == kNoRow) return;
    const Workspace w(p);
    const u32 thread = hk::thread_x();
    for (u32 i = thread; i < kHighBins; i += kThreads) cells[i] = 0;
    hk::block_barrier();

    const Softmax softmax = p.logits ? row_softmax(p, w, at.b, at.row) : Softmax{};
    u32 max_key = 0;
    for_tiles(p, at.s, [&](u32 tile) {
        const u32 column = tile + thread * hk::kVecLen<T>;
        auto v = load_tile<kAccess, T, kThreads>(p, at.row, column, softmax);
        max_key = hk::Max{}(max_key, clean(v));
        for_each(v, column, [&](float &x, u32) {
            const u32 key = key_of(x);
            if (key != 0) add_in_lds(cells[key >> kHighShift], Digit{kHighShift, kHighBins - 1}.token(key));
        });
    });
    hk::GroupReducer<kThreads, kThreads> block;
    max_key = block.reduce(max_key, hk::Max{});
    hk::block_barrier();

    u32 low = kNone;
#pragma unroll
    for (u32 i = 0; i < kHighBins / 2 / kThreads; ++i) {
        const u32 pair = i * kThreads + thread;
        if ((cells[2 * pair] | cells[2 * pair + 1]) != 0) low = hk::Min{}(low, pair);
    }
    low = block.reduce(low, hk::Min{});
    const u32 high = max_key >> kHighShift >> 1;
    const hk::GlobalPtr<hk::Vec<u64, 2>> out = w.cells(at.b, at.s);
    for (u32 i = thread; i <= high; i += kThreads) {
        if (i >= low) out[i] = {cells[2 * i], cells[2 * i + 1]};
    }
    if (thread == 0) {
        const hk::GlobalPtr<Segment> segment = w.segment_of(at.b) + at.s;
        segment->max_key = max_key;
        segment->low = low;
        segment->high = high;
    }
}

template <Access kAccess, class T>
HK_FN void candidates(const Params &p) {
    __shared__ u32 counts[kHighBins];
    __shared__ u64 rests[kHighBins];
    __shared__ u32 lows[kMostSegments], highs[kMostSegments];
    __shared__ StepScratch<kThreads> scratch;
    __shared__ u32 next;  // free place in the list
    __shared__ double wave_masses[kThreads / kWaveSize];
    const Place at(p);
    if (at.row == kNoRow) return;
    const Workspace w(p);
    const u32 thread = hk::thread_x();
    hk::GroupReducer<kThreads, kThreads> block;

    // The histogram of the row.
    const hk::GlobalPtr<Segment> segments = w.segment_of(at.b);
    u32 max_key = 0;
    u32 low = kNone;
    if (thread < p.segments) {
        max_key = segments[thread].max_key;
        lows[thread] = segments[thread].low;
        highs[thread] = segments[thread].high;
        low = lows[thread];
    }
    max_key = block.reduce(max_key, hk::Max{});
    low = block.reduce(low, hk::Min{});
    const hk::GlobalPtr<RowState> state = w.row(at.b);
    if (max_key == 0 || max_key == kInfinity) {
        if (at.s == 0 && thread == 0) state->max_key = max_key;
        return;
    }
    hk::block_barrier();
    const u32 high = max_key >> kHighShift >> 1;
    for (u32 i = low + thread; i <= high; i += kThreads) {
        Bin bins[2] = {};
        for (u32 s = 0; s < p.segments; ++s) {
            if (i < lows[s] || i > highs[s]) continue;
            const hk::Vec<u64, 2> cells = w.cells(at.b, s)[i];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const Bin bin = Cell(cells[j]).bin();
                bins[j].count += bin.count;
                bins[j].rest += bin.rest;
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            counts[2 * i + j] = bins[j].count;
            rests[2 * i + j] = bins[j].rest;
        }
    }
    hk::block_barrier();

    Search search;
    Filters f = filters_of(p, at.row, max_key, search.active);
    if (p.stage == 1) search.active &= ~Search::kP;
    if (p.stage == 2) f.p *= state->first_mass;
    step<kThreads, kHighBins>(search, f, Digit{kHighShift, kHighBins - 1}, block, scratch, [&](u32 i) {
        return i / 2 >= low && i / 2 <= high ? Bin{counts[i], rests[i]} : Bin{0, 0};
    });
    const bool done = search.done();
    if (at.s == 0 && thread == 0) {
        state->mass = search.mass;
        state->in_mass = search.in_mass;
        state->p = f.p;
        state->prefix = search.prefix;
        state->active = search.active;
        state->count = search.count;
        state->in_count = search.in_count;
        state->k = f.k;
        state->min_key = f.min_key;
        state->max_key = max_key;
    }

    // Of this segment, what is kept above, and how many there are to list: its histogram has both.
    const u32 digit = search.prefix >> kHighShift;
    const u32 least_above = done ? digit : digit + 1;
    const hk::GlobalPtr<hk::Vec<u64, 2>> own = w.cells(at.b, at.s);
    double above = 0.0;
    for (u32 i = least_above / 2 + thread; i <= highs[at.s]; i += kThreads) {
        if (i < lows[at.s]) continue;
        const hk::Vec<u64, 2> cells = own[i];
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            if (2 * i + j >= least_above) above += Cell(cells[j]).bin().mass((2 * i + j) << kHighShift);
        }
    }
    above = hk::last_lane(hk::wave_scan(above));
    if (hk::lane_id() == 0) wave_masses[hk::wave_id()] = above;
    u32 listed = 0;
    if (!done && digit / 2 >= lows[at.s] && digit / 2 <= highs[at.s]) {
        listed = Cell(own[digit / 2][digit % 2]).bin().count;
    }
    if (thread == 0) next = 0;
    hk::block_barrier();
    if (thread == 0) {
        above = 0.0;
        for (int i = 0; i < kThreads / kWaveSize; ++i) above += wave_masses[i];
        segments[at.s].above = above;
        segments[at.s].listed = listed;
    }
    if (listed == 0) return;

    // Waves take places as they come: what is made of a list does not depend on its order.
    const Softmax softmax = p.logits ? row_softmax(p, w, at.b, at.row) : Softmax{};
    const hk::GlobalPtr<u32> list = w.list(at.b, at.s);
    const Followers followers(search.prefix, kHighShift);
    for_tiles(p, at.s, [&](u32 tile) {
        const u32 column = tile + thread * hk::kVecLen<T>;
        auto v = load_tile<kAccess, T, kThreads>(p, at.row, column, softmax);
        clean(v);
        u32 count = 0;
        for_each(v, column, [&](float &x, u32) {
            count += u32(__builtin_popcountll(hk::ballot(followers.contain(key_of(x)))));
        });
        if (count == 0) return;
        u32 place = 0;
        if (hk::lane_id() == 0) place = __scoped_atomic_fetch_add(&next, count, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
        place = hk::broadcast(place, 0);
        for_each(v, column, [&](float &x, u32) {
            const u32 key = key_of(x);
            const u64 found = hk::ballot(followers.contain(key));
            if (followers.contain(key)) list[place + hk::lanes_before(found)] = key & ((1u << kHighShift) - 1);
            place += u32(__builtin_popcountll(found));
        });
    });
}

template <Access kAccess, class T>
HK_FN void draw(const Params &p) {
    constexpr u32 kWaves = kDrawThreads / kWaveSize;
    using RowT = Tile<T, kDrawThreads>;
    __shared__ u64 cells[kLowBins];
    __shared__ StepScratch<kDrawThreads> scratch;
    __shared__ DrawScratch<kDrawThreads, RowT::kCols / kDrawThreads / hk::kVecLen<T>> draw_scratch;
    __shared__ double masses[kMostSegments];
    const u32 thread = hk::thread_x();
    const u32 wave = hk::wave_id();
    const u64 b = u64(p.first) + hk::block_x();
    const u64 row = row_of(p, b);
    if (row == kNoRow) {
        if (thread == 0) write_output(p, b, 0, __builtin_nanf(""), 0);
        return;
    }
    const Workspace w(p);
    const hk::GlobalPtr<RowState> state = w.row(hk::block_x());
    if (state->max_key == 0 || state->max_key == kInfinity) {
        if (thread == 0) {
            write_output(p, b, 0, 0.0f, 0);
            state->threshold = kNone;
            state->kept_mass = 0.0;
            state->first_mass = 0.0;
        }
        return;
    }
    const hk::GlobalPtr<Segment> segments = w.segment_of(hk::block_x());
    hk::GroupReducer<kDrawThreads, kDrawThreads> block;

    Search search;
    search.prefix = state->prefix;
    search.active = state->active;
    search.count = state->count;
    search.mass = state->mass;
    search.in_count = state->in_count;
    search.in_mass = state->in_mass;
    const Filters f = {state->k, state->p, state->min_key};
    const u32 high = search.prefix;
    // A wave takes every kWaves-th segment, and has several loads in flight.
    const auto for_listed = [&](u32 s, auto use) {
        constexpr u32 kAhead = 8;
        const hk::GlobalPtr<u32> list = w.list(hk::block_x(), s);
        const u32 listed = segments[s].listed;
        for (u32 i = hk::lane_id(); i < listed; i += kAhead * kWaveSize) {
            u32 keys[kAhead];
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) {
                const u32 at = i + j * kWaveSize;
                keys[j] = list[at < listed ? at : i];
            }
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) {
                if (i + j * kWaveSize < listed) use(high | keys[j]);
            }
        }
    };
    for (u32 top = kHighShift; top > 0 && !search.done();) {
        const Digit digit = Digit::below(top, 10);
        const Followers followers(search.prefix, top);
        cells[thread] = 0;
        hk::block_barrier();
        for (u32 s = wave; s < p.segments; s += kWaves) {
            for_listed(s, [&](u32 key) {
                if (followers.contain(key)) add_in_lds(cells[digit.of(key)], digit.token(key));
            });
        }
        hk::block_barrier();
        step<kDrawThreads, kLowBins>(search, f, digit, block, scratch, [&](u32 i) { return Cell(cells[i]).bin(); });
        top = digit.shift;
    }
    const u32 threshold = search.prefix > 1 ? search.prefix : 1;
    if (thread == 0) {
        state->threshold = threshold;
        state->kept_mass = search.kept_mass();
        if (p.stage == 1) state->first_mass = search.kept_mass();
    }
    if (p.stage == 1) return;
    u32 id = 0;
    if (p.ids.present()) {
        for (u32 s = wave; s < p.segments; s += kWaves) {
            u64 sum = 0;
            for_listed(s, [&](u32 key) {
                if (key >= threshold) sum += Cell::token(key & ((1u << kHighShift) - 1));
            });
            sum = hk::last_lane(hk::wave_scan(sum));
            const u32 least = high >> kHighShift << kHighShift;
            if (hk::lane_id() == 0) masses[s] = segments[s].above + Cell(sum).bin().mass(least);
        }
        hk::block_barrier();
        // The segment in which the sum reaches the target; if rounding keeps it below, the last that keeps a token.
        const double target = double(uniform_of(p, b)) * search.kept_mass();
        u32 chosen = 0;
        double before = 0.0;
        double sum = 0.0;
        for (u32 s = 0; s < p.segments; ++s) {
            if (masses[s] <= 0.0) continue;
            chosen = s;
            before = sum;
            sum += masses[s];
            if (sum >= target) break;
        }
        const Softmax softmax = p.logits ? row_softmax(p, w, hk::block_x(), row) : Softmax{};
        Drawn drawn = {kNone, 0, before};
        u32 past_last = 0;
        for_tiles(p, chosen, [&](u32 tile) {
            if (drawn.first != kNone) return;
            const u32 column = tile + thread * hk::kVecLen<T>;
            auto v = load_tile<kAccess, T, kDrawThreads>(p, row, column, softmax);
            clean(v);
            drawn = sampling::draw(v, column, threshold, drawn.sum, target, block, draw_scratch);
            past_last = hk::Max{}(past_last, drawn.past_last);
        });
        id = drawn.first != kNone ? drawn.first : past_last - 1;
    }
    if (thread == 0) write_output(p, b, id, float(search.kept_mass()), search.kept_count());
}

template <Access kAccess, class T>
HK_FN void renorm(const Params &p) {
    const Place at(p);
    const hk::GlobalPtr<RowState> state = Workspace(p).row(at.b);
    const u32 threshold = state->threshold;
    const float scale = 1.0f / hk::Max{}(float(state->kept_mass), 1e-8f);
    for_tiles(p, at.s, [&](u32 tile) {
        const u32 column = tile + hk::thread_x() * hk::kVecLen<T>;
        auto y = load_tile<kAccess, T, kThreads>(p, at.row, column, Softmax{});
        clean(y);
        for_each(y, column, [&](float &x, u32) { x = x >= value_of(threshold) ? x * scale : 0.0f; });
        const RowBatch batch = {at.row, 1, column, p.x.cols()};
        hk::narrow<T>(y).store(batch.at<T, kAccess, true>(p.y, 0));
    });
}
}  // namespace

// Entry points of one dtype: name = launch, dtype, access if it is by elements. As `Launches` in src/sample.rs.
#define SAMPLE_SEGMENTS(T, access, suffix)                                                                       \
    HK_ENTRY(sample_softmax_##T##suffix, kThreads, softmax<hk::Access::access, hk::T>)                           \
    HK_ENTRY(sample_histogram_##T##suffix, kThreads, histogram<hk::Access::access, hk::T>)                       \
    HK_ENTRY(sample_candidates_##T##suffix, kThreads, candidates<hk::Access::access, hk::T>)                     \
    HK_ENTRY(sample_draw_##T##suffix, kDrawThreads, draw<hk::Access::access, hk::T>)                             \
    HK_ENTRY(sample_renorm_##T##suffix, kThreads, renorm<hk::Access::access, hk::T>)

SAMPLE_SEGMENTS(bf16, Vectors, )
SAMPLE_SEGMENTS(f16, Vectors, )
SAMPLE_SEGMENTS(f32, Vectors, )
SAMPLE_SEGMENTS(bf16, Elements, _elements)
SAMPLE_SEGMENTS(f16, Elements, _elements)
SAMPLE_SEGMENTS(f32, Elements, _elements)
