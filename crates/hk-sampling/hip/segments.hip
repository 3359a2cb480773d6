// segments.hip: filters and draws for long rows, spread over blocks
//   Arguments as in rows.hip; formulas and search in filter.h. Each row is cut into segments of a length that V alone
//   fixes. In order, one launch each:
//   histogram  of each segment, over the upper 9 bits of its keys, and a list of those keys where the threshold may be
//   draw       adds up the histograms of a row to find these bits of the threshold. Where a segment's list is of others,
//              lists its tokens that have them. Of a row's blocks, the last to come here finds the lower bits in the lists,
//              sums the segments, and draws in one of them
//   renorm     (where y is wanted) writes y from the threshold and the kept mass
// Where p is a share of what top-k and min-p keep, draw runs twice: stage 1 without top-p, then stage 2.
//
// Logits
//   What is drawn from is 2^(t - top) with t = x log2(e) / temperature, whose sum p is multiplied with and the mass divided
//   by: it need not be one. `top`, the whole number next to the largest t of the segment, takes the place of the largest
//   logit of the row, which a segment does not know. Segments then differ by powers of two: a shift of their exponents makes
//   keys of the row of them, the same for equal logits wherever they are. So one walk over the logits is enough.
//
// How the work is split
//   A segment is 4096 tokens, or for rows beyond 128 times that a multiple of them: 128,256 tokens are 32 segments. In
//   `histogram` a block of 256 threads has one in registers at a time, 16 tokens a lane; of probabilities, where rows are
//   many, it takes several in turn, and what it lists of the first it lists of the others. In `draw` a block of 16 waves has
//   the charge of four or more. Results do not depend on the segments nor on the blocks: what is added over blocks are whole
//   numbers, or numbers whose order the segments' order fixes.
// LDS
//   Atomics on one address take turns, and so do lanes on one bank. A histogram has 16 copies of each bin, and a lane takes
//   that of its place among 16: there is no turn to wait for, whatever the data. That is for keys from 2^-59 to 2; if a
//   segment has others, all bins there are have 2 copies. Either leaves room for four blocks in 64 KiB.
// Floor
//   V * sizeof(T) from memory for `histogram`. Besides, 8 bytes for each bin in use, some 80 in a segment of probabilities
//   over ten orders of magnitude, are written and read, and a list of some 512 keys (1024 around a guess for top-p), 4
//   bytes each: for top-k, k and what ties with it. `draw` reads of x the segment that it draws in, and those whose list
//   does not have the threshold's bin: some of a flat row with top-p, or a k of many thousands. `renorm` reads x again.
#include <hk/entry.h>

#include "filter.h"

namespace {
using namespace sampling;

constexpr int kThreads = 256;
constexpr int kDrawThreads = 16 * kWaveSize;
constexpr u32 kTile = 4096;  // tokens that 256 threads have in registers
constexpr u32 kMostSegments = 128;
constexpr u32 kAbreast = kDrawThreads / kThreads;  // segments that a block of `draw` lists at a time
constexpr u32 kHighShift = 22;                   // keys above it: the first digit
constexpr u32 kHighBins = 512;
constexpr u32 kLowBins = 2048;  // of the two digits below
constexpr u32 kFirstNear = 136;  // bins of keys from 2^-59 to 2: they have more copies
constexpr u32 kNearBins = 120;
constexpr u32 kNearCopiesLog2 = 4;
constexpr u32 kCopiesLog2 = 1;
constexpr u32 kCells = (1 + kNearBins) << kNearCopiesLog2;  // of a segment's histogram in LDS; one bin takes zeros
constexpr u32 kNoExponent = kHighBins / 2;
constexpr u32 kMostListed = 512;
constexpr u32 kMostGuessed = 1024;
static_assert(kHighShift == 2 * 11 && kLowBins == 1 << 11, "three digits");
static_assert(kHighBins << kCopiesLog2 <= kCells, "room for all bins");
static_assert(kFirstNear % 2 == 0 && kNearBins % 2 == 0, "both bins of an exponent");

/// What is known of a segment.
struct Segment {
    float max;      // of logits
    u32 first;      // token that has it first, at a temperature of zero
    u32 max_key;    // kInfinity if there is one
    u32 low, high;  // exponents in use, first and last; kNoExponent and 0 if there are none
    u32 listed_from, listed_to;  // bins that are wholly in the list, first and one past the last; none from kHighBins on
    u32 listed;
};

/// What is known of a row.
struct RowState {
    double first_mass;  // what stage 1 keeps
    double kept_mass;
    u32 threshold;  // kNone: nothing is kept
    u32 arrivals;   // of blocks of `draw`
    u32 unused[2];
};
static_assert(sizeof(Segment) == 32 && sizeof(RowState) == 32, "as in src/sample.rs");

/// Two bins of one exponent.
using Pair = hk::Vec<u64, 2>;

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
    HK_FN hk::GlobalPtr<Pair> cells(u64 b, u64 s) const {
        const u64 at = base + rows * (sizeof(RowState) + segments * sizeof(Segment));
        return reinterpret_cast<hk::GlobalPtr<Pair>>(at + (b * segments + s) * kHighBins * sizeof(u64));
    }
    HK_FN hk::GlobalPtr<u32> list(u64 b, u64 s) const {
        const u64 at = base + rows * (sizeof(RowState) + segments * (sizeof(Segment) + kHighBins * sizeof(u64)));
        return reinterpret_cast<hk::GlobalPtr<u32>>(at) + (b * segments + s) * segment;
    }
};

/// The exponentials of logits, relative to a power of two.
struct Powers {
    double log2_scale;  // log2(e) / temperature
    double top;         // whole: the exponent of what is 1

    HK_FN Powers(float temperature, float max_logit)
        : log2_scale(0x1.71547652b82fep+0 / double(temperature)), top(__builtin_rint(double(max_logit) * log2_scale)) {}

    /// 0 for what is not finite, or below 2^-126. Logits t apart by whole numbers give the same mantissa.
    HK_FN float operator()(float logit) const {
        // The product is exact. Of a NaN and a number, fmax takes the number.
        const double t = __builtin_fmax(double(logit) * log2_scale, -0x1p200);
        const double whole = __builtin_rint(t);
        const float part = hk::exp2_fast(float(t - whole));
        const i32 key = __builtin_bit_cast(i32, part) + (i32(__builtin_fmax(whole - top, -200.0)) << 23);
        return __builtin_bit_cast(float, key < 0x00800000 ? 0 : key);
    }

    /// Makes exponentials of a lane's share of a row. There is nothing beyond the row.
    template <class RowF>
    HK_FN void apply(RowF &row, u32 column, u32 cols) const {
        for_each(row, column, [&](float &v, u32 c) { v = c < cols ? (*this)(v) : 0.0f; });
    }
};

/// How keys of a segment become keys of the row: their exponent is less by `by`, and what has none left is 0.
struct Shift {
    u32 by;
    bool flush;  // subnormals are 0

    HK_FN u32 key(u32 of_segment) const {
        const u32 exponent = of_segment >> 23;
        return exponent >= by + (flush ? 1 : 0) ? of_segment - (by << 23) : 0;
    }
};

template <class T, int Lanes>
using Tile = hk::Row<T, Lanes, hk::kVecLen<T>, int(kTile) / Lanes / hk::kVecLen<T>>;

/// A lane's share of a tile of row `row`, from `column` on.
template <Access kAccess, class RowT>
HK_FN auto load_tile(const Params &p, u64 row, u32 column) {
    using T = typename RowT::Element;
    const RowBatch batch = {row, 1, column, p.x.cols()};
    return hk::widen(RowT::load(batch.at<T, kAccess, true>(p.x, 0)));
}

/// Calls `f(first token of the tile)` for each tile of a segment.
template <class F>
HK_FN void for_tiles(const Params &p, u32 s, F f) {
    const u32 cols = p.x.cols();
    const u32 begin = s * p.segment;
    const u32 end = cols - begin < p.segment ? cols : begin + p.segment;
    for (u32 tile = begin; tile < end; tile += kTile) f(tile);
}

/// Adds a wave's keys that are among `keys` to a list, at places that it takes as it comes: what is made of a list does not
/// depend on its order.
template <class RowF, class Keys>
HK_FN void add_to_list(hk::GlobalPtr<u32> list, u32 &next, RowF &v, const Keys &keys) {
    u32 count = 0;
    for_each(v, 0, [&](float &x, u32) { count += keys.contain(key_of(x)) ? 1 : 0; });
    const u32 up_to = hk::wave_scan(count);
    const u32 all = hk::last_lane(up_to);
    if (all == 0) return;
    u32 place = 0;
    if (hk::lane_id() == 0) place = __scoped_atomic_fetch_add(&next, all, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    place = hk::broadcast(place, 0) + up_to - count;
    for_each(v, 0, [&](float &x, u32) {
        const bool listed = keys.contain(key_of(x));
        if (listed) list[place] = key_of(x);
        place += listed ? 1 : 0;
    });
}

/// A segment's histogram in LDS, all zeros between one segment and the next, by 256 threads.
struct Cells {
    alignas(16) u64 all[kCells];

    HK_FN Pair *pairs() { return reinterpret_cast<Pair *>(all); }

    HK_FN void clear() {
#pragma unroll
        for (u32 i = hk::thread_x(); i < kCells / 2; i += kThreads) pairs()[i] = {0, 0};
    }

    /// Counts a lane's share of a tile of clean probabilities; if `near`, all of them that are not 0 are near.
    template <class RowF>
    HK_FN void count(RowF &row, bool near) {
        if (near) {
            const hk::Tally tally;
            constexpr u32 kBinBytesLog2 = 3 + kNearCopiesLog2;
            const u32 copy = hk::lane_id() % (1u << kNearCopiesLog2);
            auto *const bin_0 = reinterpret_cast<char *>(all + copy) - ((kFirstNear - 1) << kBinBytesLog2);
            for_each(row, 0, [&](float &e, u32) {
                // Zeros go to the bin before the first.
                const u32 bin = hk::Max{}(key_of(e), (kFirstNear << kHighShift) - 1) >> kHighShift;
                tally.add(*reinterpret_cast<u64 *>(bin_0 + (bin << kBinBytesLog2)), key_of(e));
            });
        } else {
            const u32 copy = hk::lane_id() % (1u << kCopiesLog2);
            for_each(row, 0, [&](float &e, u32) {
                const u32 key = key_of(e);
                add_in_lds(all[(key >> kHighShift << kCopiesLog2) + copy], Cell::tokens(key != 0 ? 1 : 0, key & ((1u << kHighShift) - 1)));
            });
        }
    }

    /// Both bins of an exponent, and whether this thread has one, all copies added. Leaves zeros.
    struct Sums {
        u64 bits[2];
        u32 exponent;
        bool has;
        u32 counts[2];
    };
    HK_FN Sums take(bool near) {
        u32 thread = hk::thread_x();
        hk::forget(thread);  // addresses are made anew in each turn of a loop
        Sums sums = {{0, 0}, thread, true, {0, 0}};
        // A thread has eight of one bin, whose others the next thread has, or all of two bins.
        if (near) {
            u64 sum = 0;
            if (thread < 2 * kNearBins) {
                Pair *const own = pairs() + (1u << kNearCopiesLog2) / 2 + thread * 4;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    // Turned by the lane, so that the lanes' cells lie in different banks.
                    Pair &pair = own[(i + thread / 2) % 4];
                    sum += pair[0] + pair[1];
                    pair = {0, 0};
                }
            } else {
                pairs()[thread % 8] = {0, 0};
            }
            // The exponent's two bins, in the first of the four threads that have them.
            sums.bits[0] = hk::Tally::total(sum + hk::exchange<1>(sum));
            sums.bits[1] = hk::exchange<2>(sums.bits[0]);
            sums.exponent = (kFirstNear + thread / 2) / 2;
            sums.has = thread % 4 == 0 && thread < 2 * kNearBins;
        } else {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                Pair &pair = pairs()[thread * 2 + i];
                sums.bits[i] = pair[0] + pair[1];
                pair = {0, 0};
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i) sums.counts[i] = sums.has ? Cell(sums.bits[i]).bin().count : 0;
        return sums;
    }
};

/// Bins that are listed, first and one past the last.
struct Listed {
    u32 from = kHighBins;
    u32 to = kHighBins;

    HK_FN bool any() const { return from < kHighBins; }
    HK_FN bool contain(u32 key) const {
        const u32 least = hk::Max{}(from << kHighShift, 1);
        return key - least < (to << kHighShift) - least;
    }
};

/// One less than the least key of a lane's share of a clean tile that is not 0.
template <class RowF>
HK_FN u32 below_least(RowF &row) {
    u32 below = kNone;
    for_each(row, 0, [&](float &e, u32) { below = hk::Min{}(below, key_of(e) - 1); });
    return below;
}

/// Whether the keys of a segment are near: the ends are known to all.
HK_FN bool are_near(u32 below, u32 max_key) {
    return hk::uniform(below) >= (kFirstNear << kHighShift) - 1 &&
           hk::uniform(max_key) < (kFirstNear + kNearBins) << kHighShift;
}

/// Writes a segment's histogram, and what is known of it.
HK_FN void write_segment(hk::GlobalPtr<Segment> segment, hk::GlobalPtr<Pair> cells, const Cells::Sums &sums, float max_logit,
                         u32 max_key, u32 below, const Listed &listed, u32 n_listed) {
    const u32 low = below == kNone ? kNoExponent : (below + 1) >> 23;
    const u32 high = max_key >> 23;
    if (sums.has && sums.exponent >= low && sums.exponent <= high) cells[sums.exponent] = {sums.bits[0], sums.bits[1]};
    if (hk::thread_x() == 0) {
        segment->max = max_logit;
        segment->max_key = max_key;
        segment->low = low;
        segment->high = high;
        segment->listed_from = listed.from;
        segment->listed_to = listed.to;
        segment->listed = n_listed;
    }
}

template <Access kAccess, class T>
HK_FN void histogram(const Params &p) {
    using RowT = Tile<T, kThreads>;
    __shared__ Cells cells;
    __shared__ u32 wave_counts[kThreads / kWaveSize];
    __shared__ double wave_masses[kThreads / kWaveSize];
    __shared__ u32 next[2];  // free place in the list, of one segment and the next in turn
    const u32 blocks = (p.segments + p.share - 1) / p.share;  // of a row
    const u32 b = hk::block_x() / blocks;                     // among the rows of the launch
    const u32 begin = hk::block_x() % blocks * p.share;       // first segment of this block
    const u64 row = row_of(p, u64(p.first) + b);
    if (row == kNoRow) return;
    const Workspace w(p);
    const u32 cols = p.x.cols();
    const u32 thread = hk::thread_x();
    const u32 lane_column = thread * hk::kVecLen<T>;
    const bool one_tile = p.segment == kTile;
    hk::GroupReducer<kThreads, kThreads> block;
    if (thread == 0) {
        next[0] = next[1] = 0;
        if (begin == 0) w.row(b)->arrivals = 0;
    }
    cells.clear();

    Listed window;
    {
        const u32 s = begin;
        const hk::GlobalPtr<Segment> segment = w.segment_of(b) + s;
        auto v = load_tile<kAccess, RowT>(p, row, s * p.segment + lane_column);
        const float t = temperature_of(p, row);
        float max_logit = -__builtin_inff();
        if (p.logits) {
            const auto max_of = [&](auto &x, u32 column) {
                for_each(x, column, [&](float &l, u32 c) { max_logit = hk::Max{}(max_logit, c < cols ? l : -__builtin_inff()); });
            };
            max_of(v, s * p.segment + lane_column);
            if (!one_tile) {
                for_tiles(p, s, [&](u32 tile) {
                    auto x = load_tile<kAccess, RowT>(p, row, tile + lane_column);
                    max_of(x, tile + lane_column);
                });
            }
            max_logit = block.max(max_logit);
            u32 first = kNone;
            if (t == 0.0f) {
                for_tiles(p, s, [&](u32 tile) {
                    auto x = load_tile<kAccess, RowT>(p, row, tile + lane_column);
                    for_each(x, tile + lane_column, [&](float &l, u32 c) {
                        first = c < first && c < cols && l == max_logit ? c : first;
                    });
                });
                first = block.reduce(first, hk::Min{});
            }
            const bool infinite = max_logit == __builtin_inff();
            if (t == 0.0f || infinite || max_logit == -__builtin_inff()) {
                if (thread == 0) {
                    segment->max = max_logit;
                    segment->first = first;
                    segment->max_key = infinite ? kInfinity : 0;
                    segment->low = kNoExponent;
                    segment->high = 0;
                    segment->listed_from = segment->listed_to = kHighBins;
                    segment->listed = 0;
                }
                return;
            }
        }
        const Powers powers(t == 0.0f ? 1.0f : t, p.logits ? max_logit : 0.0f);
        const auto prepare = [&](auto &x, u32 column) {
            if (p.logits) powers.apply(x, column, cols);
            return clean(x);
        };
        u32 max_key = prepare(v, s * p.segment + lane_column);
        u32 below = below_least(v);
        bool near = false;
        if (one_tile) {
            block.reduce(max_key, hk::Max{}, below, hk::Min{});
            near = are_near(below, max_key);
        } else {
            hk::block_barrier();
        }
        cells.count(v, near);
        if (!one_tile) {
            for_tiles(p, s, [&](u32 tile) {
                if (tile == s * p.segment) return;
                auto x = load_tile<kAccess, RowT>(p, row, tile + lane_column);
                max_key = hk::Max{}(max_key, prepare(x, tile + lane_column));
                below = hk::Min{}(below, below_least(x));
                cells.count(x, false);
            });
            block.reduce(max_key, hk::Max{}, below, hk::Min{});
        }
        hk::block_barrier();
        const Cells::Sums sums = cells.take(near);
        const u32 exponent = sums.exponent;

        // What the filters can still reach: in the row, k and min-p keep no more than they do in this segment alone.
        u32 active;
        const Filters f = filters_of(p, row, max_key, active);
        u32 listed = 0;
        if (active != 0 && one_tile) {
            const u32 own = sums.counts[0] + sums.counts[1];
            const u32 up_to = hk::wave_scan(own);
            if (hk::lane_id() == kWaveSize - 1) wave_counts[hk::wave_id()] = up_to;
            hk::block_barrier();
            u32 from[2] = {own - up_to, sums.counts[1] - up_to};  // tokens from these bins on
#pragma unroll
            for (u32 i = 0; i < kThreads / kWaveSize; ++i) {
                const u32 in_wave = i < hk::wave_id() ? 0 : wave_counts[i];
                from[0] += in_wave;
                from[1] += in_wave;
            }
            u32 room = kHighBins;  // least bin down to which the list has room for all
            u32 reached = 0;       // greatest bin down to which there are k
            if (sums.has) {
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    if (room == kHighBins && from[i] <= kMostListed) room = exponent * 2 + i;
                    if (from[i] >= f.k) reached = exponent * 2 + i;
                }
            }
            room = block.reduce(room, hk::Min{});
            // Tokens from a bin on.
            const auto tokens_from = [&](u32 bin) {
                return block.reduce(sums.has && exponent == bin / 2 ? (bin % 2 == 0 ? from[0] : from[1]) : 0, hk::Max{});
            };
            window.from = 0;
            if (active & Search::kK) window.from = block.reduce(reached, hk::Max{});
            if (active & Search::kMin) window.from = hk::Max{}(window.from, f.min_key >> kHighShift);
            if (window.from < room) {
                window.from = room;
                if ((active & Search::kP) && !p.top_k_first) {
                    // Top-p may reach further down than there is room for. A guess: all segments leave their share of the
                    // rest, and probabilities sum to one. If that is below, what is around that bin is listed instead.
                    const double masses[2] = {Cell(sums.bits[0]).bin().mass(exponent << 23),
                                              Cell(sums.bits[1]).bin().mass((2 * exponent + 1) << kHighShift)};
                    const double own_mass = sums.has ? masses[0] + masses[1] : 0.0;
                    double up_to_mass = hk::wave_scan(own_mass);
                    if (hk::lane_id() == kWaveSize - 1) wave_masses[hk::wave_id()] = up_to_mass;
                    hk::block_barrier();
                    double all = 0.0;
                    for (u32 i = 0; i < kThreads / kWaveSize; ++i) {
                        up_to_mass += i < hk::wave_id() ? wave_masses[i] : 0.0;
                        all += wave_masses[i];
                    }
                    const double rest = (1.0 - f.p) * (p.logits ? all : double(p.segment) / double(cols));
                    // Its bin, and whether in the upper half of that.
                    const double upper = up_to_mass - masses[1];
                    const u32 bin = upper > rest ? 0 : 1;
                    const u32 half = (upper > rest ? upper : up_to_mass) - 0.5 * masses[bin] > rest ? 0 : 1;
                    const u32 place = 4 * exponent + 2 * bin + half;
                    const u32 guess = block.reduce(sums.has && up_to_mass > rest ? place : kNone, hk::Min{});
                    const Listed around = {(guess - 1) / 2, (guess - 1) / 2 + 2};
                    if (around.from < room && around.from >= (near ? kFirstNear : 0)) {
                        listed = tokens_from(around.from) - tokens_from(around.to);
                        if (listed <= kMostGuessed) window = around;
                    }
                }
            }
            if (window.to == kHighBins) listed = tokens_from(window.from);
        }
        window = {hk::uniform(window.from), hk::uniform(window.to)};
        if (listed != 0) add_to_list(w.list(b, s), next[s % 2], v, window);
        write_segment(segment, w.cells(b, s), sums, max_logit, max_key, below, window, listed);
    }

    // Of probabilities, the block's other segments: the bins to list are those of the first. For top-k and min-p they are no
    // fewer than what can be kept; a guess is as good as it was.
    const u32 end = p.segments - begin < p.share ? p.segments : begin + p.share;
    for (u32 s = begin + 1; s < end; ++s) {
        auto v = load_tile<kAccess, RowT>(p, row, s * kTile + lane_column);
        u32 max_key = clean(v);
        if (window.any()) add_to_list(w.list(b, s), next[s % 2], v, window);
        u32 below = below_least(v);
        block.reduce(max_key, hk::Max{}, below, hk::Min{});
        const bool near = are_near(below, max_key);
        cells.count(v, near);
        if (thread == 0) next[(s + 1) % 2] = 0;
        hk::block_barrier();
        write_segment(w.segment_of(b) + s, w.cells(b, s), cells.take(near), 0.0f, max_key, below, window, next[s % 2]);
    }
}

/// LDS of `draw`.
struct DrawLds {
    u64 cells[kLowBins];
    u32 counts[kHighBins];
    StepScratch<kDrawThreads> step;
    DrawScratch<kDrawThreads, 1> draw;
    double masses[kMostSegments];
    u32 lows[kMostSegments], highs[kMostSegments], shifts[kMostSegments];
    u32 listed[kMostSegments];   // of those without, how many tokens of the threshold's bin this block lists
    u32 without[kMostSegments];  // segments of this block whose list is of other bins
    u32 n_without;
    u32 chosen;
    double before;
};

using DrawReducer = hk::GroupReducer<kDrawThreads, kDrawThreads>;

/// The end of `draw`, in the last block of a row: what is left of the search, and the draw.
template <Access kAccess, class T>
HK_FN void finish(const Params &p, u32 at, u64 row, Search search, Filters f, const Powers &powers, DrawReducer &block,
                  DrawLds &lds) {
    constexpr u32 kWaves = kDrawThreads / kWaveSize;
    constexpr int kEach = int(kTile) / kDrawThreads;
    using DrawT = hk::Row<T, kDrawThreads, kEach, 1>;
    const u32 thread = hk::thread_x();
    const u32 wave = hk::wave_id();
    const u32 lane = hk::lane_id();
    const u64 b = u64(p.first) + at;
    const Workspace w(p);
    const hk::GlobalPtr<RowState> state = w.row(at);
    const hk::GlobalPtr<Segment> segments = w.segment_of(at);
    const u32 digit = search.prefix >> kHighShift;
    const bool settled = search.done();
    const bool flush = p.logits != 0;

    // Calls `use(key)` for what is listed, in whole waves: there is none where the key is 0. A wave takes every kWaves-th
    // segment.
    const auto for_listed = [&](u32 s, auto use) {
        constexpr u32 kEachLane = 4, kAhead = 2;
        constexpr u32 kStep = kEachLane * kWaveSize;
        using Keys = hk::Vec<u32, kEachLane>;
        const auto list = reinterpret_cast<hk::GlobalPtr<const Keys>>(w.list(at, s));
        const u32 listed = segments[s].listed;
        const Shift shift = {lds.shifts[s], flush};
        for (u32 first = 0; first < listed; first += kAhead * kStep) {
            const u32 place = first + lane * kEachLane;
            Keys keys[kAhead];
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                if (first + i * kStep < listed) keys[i] = list[place + i * kStep < listed ? (place + i * kStep) / kEachLane : 0];
            }
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                if (first + i * kStep >= listed) break;
#pragma unroll
                for (u32 j = 0; j < kEachLane; ++j) use(place + i * kStep + j < listed ? shift.key(keys[i][j]) : 0);
            }
        }
    };
    for (u32 top = kHighShift; top > 0 && !search.done();) {
        const Digit low_digit = Digit::below(top, 11);
        const Followers followers(search.prefix, top);
        for (u32 i = thread; i < kLowBins; i += kDrawThreads) lds.cells[i] = 0;
        hk::block_barrier();
        for (u32 s = wave; s < p.segments; s += kWaves) {
            for_listed(s, [&](u32 key) {
                const bool mine = followers.contain(key);
                const u64 found = hk::ballot(mine);
                if (found == 0) return;
                // Where all keys are the same, one lane adds them: they do not take turns.
                const u32 leader = u32(__builtin_ctzll(found));
                const u32 first = hk::broadcast(key, leader);
                const bool alike = hk::ballot(mine && key != first) == 0;
                const u32 tokens = alike ? u32(__builtin_popcountll(found)) : 1;
                if (alike ? lane == leader : mine) {
                    add_in_lds(lds.cells[low_digit.of(key)], Cell::tokens(tokens, tokens * low_digit.rest(key)));
                }
            });
        }
        hk::block_barrier();
        step<kDrawThreads, kLowBins>(search, f, low_digit, block, lds.step, [&](u32 i) { return Cell(lds.cells[i]).bin(); });
        top = low_digit.shift;
    }
    const u32 threshold = search.prefix > 1 ? search.prefix : 1;
    if (thread == 0) {
        state->arrivals = 0;
        state->threshold = threshold;
        state->kept_mass = search.kept_mass();
        if (p.stage == 1) state->first_mass = search.kept_mass();
    }
    if (p.stage == 1) return;
    u32 id = 0;
    if (p.ids.present()) {
        // Of each segment, what is kept: whole bins, and of the threshold's bin what is listed.
        const u32 least_above = settled ? digit : digit + 1;
        for (u32 s = wave; s < p.segments; s += kWaves) {
            double mass = 0.0;
            for (u32 e = lds.lows[s] + lane; e <= lds.highs[s]; e += kWaveSize) {
                const Pair pair = w.cells(at, s)[e];
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    const u32 bin = 2 * (e - lds.shifts[s]) + j;
                    if (bin >= least_above) mass += Cell(pair[j]).bin().mass(bin << kHighShift);
                }
            }
            if (!settled) {
                Bin kept = {0, 0};
                for_listed(s, [&](u32 key) {
                    if (key < threshold || key >> kHighShift != digit) return;
                    kept.count += 1;
                    kept.rest += key & ((1u << kHighShift) - 1);
                });
                mass += kept.mass(digit << kHighShift);
            }
            mass = hk::last_lane(hk::wave_scan(mass));
            if (lane == 0) lds.masses[s] = mass;
        }
        hk::block_barrier();
        // The segment in which the sum reaches the target; if rounding keeps it below, the last that keeps a token.
        const double target = double(uniform_of(p, b)) * search.kept_mass();
        if (wave == 0) {
            constexpr u32 kOfLane = kMostSegments / kWaveSize;
            double own[kOfLane];
            double sum = 0.0;
#pragma unroll
            for (u32 i = 0; i < kOfLane; ++i) {
                own[i] = lane * kOfLane + i < p.segments ? lds.masses[lane * kOfLane + i] : 0.0;
                sum += own[i];
            }
            const double up_to = hk::wave_scan(sum);
            const u64 reach = hk::ballot(sum > 0.0 && up_to >= target);
            const u64 keep = hk::ballot(sum > 0.0);
            const u32 who = u32(reach != 0 ? __builtin_ctzll(reach) : 63 - __builtin_clzll(keep));
            if (lane == who) {
                double so_far = up_to - sum;
                for (u32 i = 0; i < kOfLane; ++i) {
                    if (own[i] <= 0.0) continue;
                    lds.chosen = lane * kOfLane + i;
                    lds.before = so_far;
                    so_far += own[i];
                    if (so_far >= target) break;
                }
            }
        }
        hk::block_barrier();
        Drawn drawn = {kNone, 0, lds.before};
        u32 past_last = 0;
        for_tiles(p, lds.chosen, [&](u32 tile) {
            if (drawn.first != kNone) return;
            const u32 column = tile + thread * kEach;
            auto v = load_tile<kAccess, DrawT>(p, row, column);
            if (p.logits) powers.apply(v, column, p.x.cols());
            clean(v);
            drawn = sampling::draw(v, column, threshold, drawn.sum, target, block, lds.draw);
            past_last = hk::Max{}(past_last, drawn.past_last);
        });
        id = drawn.first != kNone ? drawn.first : past_last - 1;
    }
    const double mass = p.logits ? search.kept_mass() / search.total : search.kept_mass();
    if (thread == 0) write_output(p, b, id, float(mass), search.kept_count());
}

template <Access kAccess, class T>
HK_FN void draw(const Params &p) {
    constexpr u32 kWaves = kDrawThreads / kWaveSize;
    __shared__ DrawLds lds;
    const u32 thread = hk::thread_x();
    const u32 wave = hk::wave_id();
    const u32 lane = hk::lane_id();
    const u32 blocks = (p.segments + p.share - 1) / p.share;  // of a row
    const u32 at = hk::block_x() / blocks;                    // among the rows of the launch
    const u32 begin = hk::block_x() % blocks * p.share;       // first segment of this block
    const u64 b = u64(p.first) + at;
    const u64 row = row_of(p, b);
    const bool speaks = begin == 0 && thread == 0;
    if (row == kNoRow) {
        if (speaks) write_output(p, b, 0, __builtin_nanf(""), 0);
        return;
    }
    const Workspace w(p);
    const hk::GlobalPtr<RowState> state = w.row(at);
    const hk::GlobalPtr<Segment> segments = w.segment_of(at);
    DrawReducer block;

    // The largest token, and what the segments' keys are of the row.
    float max_logit = -__builtin_inff();
    if (thread < p.segments) max_logit = segments[thread].max;
    const float own_max = max_logit;
    max_logit = block.max(max_logit);
    const float t = temperature_of(p, row);
    if (p.logits && t == 0.0f) {
        u32 first = kNone;
        if (thread < p.segments && own_max == max_logit) first = segments[thread].first;
        first = block.reduce(first, hk::Min{});
        const bool any = __builtin_fabsf(max_logit) < __builtin_inff();
        if (speaks) write_output(p, b, any ? first : 0, any ? 1.0f : 0.0f, any ? 1 : 0);
        return;
    }
    const Powers powers(t == 0.0f ? 1.0f : t, p.logits ? max_logit : 0.0f);
    u32 max_key = 0;
    u32 low = kNone;
    const bool flush = p.logits != 0;
    if (thread < p.segments) {
        Shift shift = {0, flush};
        if (p.logits) {
            const double below = powers.top - Powers(t, own_max).top;
            shift.by = below < double(kNoExponent) ? u32(below) : kNoExponent;
        }
        max_key = segments[thread].max_key;
        if (max_key != kInfinity) max_key = shift.key(max_key);
        // Exponents that are left.
        const u32 high = segments[thread].high;
        const u32 least = hk::Max{}(segments[thread].low, shift.by + (flush ? 1 : 0));
        lds.lows[thread] = least;
        lds.highs[thread] = high;
        lds.shifts[thread] = shift.by;
        if (least <= high) low = least - shift.by;
    }
    max_key = block.reduce(max_key, hk::Max{});
    low = block.reduce(low, hk::Min{});
    if (max_key == 0 || max_key == kInfinity) {
        if (speaks) {
            write_output(p, b, 0, 0.0f, 0);
            state->threshold = kNone;
            state->kept_mass = 0.0;
            state->first_mass = 0.0;
        }
        return;
    }

    // The histogram of the row: a wave adds up every kWaves-th segment, a lane an exponent of them.
    if (thread < kHighBins) {
        lds.cells[thread] = 0;
        lds.counts[thread] = 0;
    }
    if (thread == 0) lds.n_without = 0;
    hk::block_barrier();
    for (u32 e = low + lane; e <= max_key >> 23; e += kWaveSize) {
        Bin bins[2] = {};
        for (u32 s = wave; s < p.segments; s += kWaves) {
            const u32 exponent = e + lds.shifts[s];
            if (exponent < lds.lows[s] || exponent > lds.highs[s]) continue;
            const Pair pair = w.cells(at, s)[exponent];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const Bin bin = Cell(pair[j]).bin();
                bins[j].count += bin.count;
                bins[j].rest += bin.rest;
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (bins[j].count == 0) continue;
            __scoped_atomic_fetch_add(&lds.counts[2 * e + j], bins[j].count, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
            add_in_lds(lds.cells[2 * e + j], bins[j].rest);
        }
    }
    hk::block_barrier();

    Search search;
    Filters f = filters_of(p, row, max_key, search.active);
    if (p.stage == 1) search.active &= ~Search::kP;
    if (p.stage == 2) f.p *= state->first_mass;
    f.p_of_total = p.logits && p.stage != 2;
    step<kDrawThreads, kHighBins>(search, f, Digit{kHighShift, kHighBins - 1}, block, lds.step,
                                  [&](u32 i) { return Bin{lds.counts[i], lds.cells[i]}; });
    const u32 digit = search.prefix >> kHighShift;
    const bool settled = search.done();

    // Lists the tokens of the threshold's bin in this block's segments, where they are not listed. A quarter of the block
    // has a segment.
    if (!settled) {
        const auto bin_of = [&](u32 s) { return digit + 2 * lds.shifts[s]; };
        const u32 s = begin + thread;
        if (thread < p.share && s < p.segments) {
            const u32 exponent = bin_of(s) / 2;
            if (exponent >= lds.lows[s] && exponent <= lds.highs[s] &&
                (bin_of(s) < segments[s].listed_from || bin_of(s) >= segments[s].listed_to) &&
                Cell(w.cells(at, s)[exponent][digit % 2]).bin().count != 0) {
                const u32 i = __scoped_atomic_fetch_add(&lds.n_without, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
                lds.without[i] = s;
                lds.listed[i] = 0;
            }
        }
        hk::block_barrier();
        const u32 n = lds.n_without;
        for (u32 i = wave / (kThreads / kWaveSize); i < n; i += kAbreast) {
            const u32 s = hk::uniform(lds.without[i]);
            const u32 lane_column = thread % kThreads * hk::kVecLen<T>;
            const Followers followers(bin_of(s) << kHighShift, kHighShift);
            const Powers of_segment(t == 0.0f ? 1.0f : t, p.logits ? segments[s].max : 0.0f);
            for_tiles(p, s, [&](u32 tile) {
                auto v = load_tile<kAccess, Tile<T, kThreads>>(p, row, tile + lane_column);
                if (p.logits) of_segment.apply(v, tile + lane_column, p.x.cols());
                clean(v);
                add_to_list(w.list(at, s), lds.listed[i], v, followers);
            });
        }
        if (n != 0) {
            hk::block_barrier();
            if (thread < n) {
                segments[lds.without[thread]].listed = lds.listed[thread];
                segments[lds.without[thread]].listed_from = kHighBins;  // another stage may look for another bin
            }
        }
    }
    if (!hk::last_to_arrive(&state->arrivals, blocks)) return;
    // Scalar registers do not suffice for what has been read of the parameters.
    finish<kAccess, T>(hk::read_anew(p), at, row, search, f, powers, block, lds);
}

template <Access kAccess, class T>
HK_FN void renorm(const Params &p) {
    const u32 b = hk::block_x() / p.segments;
    const u32 s = hk::block_x() % p.segments;
    const u64 row = u64(p.first) + b;
    const hk::GlobalPtr<RowState> state = Workspace(p).row(b);
    const u32 threshold = state->threshold;
    const float scale = 1.0f / hk::Max{}(float(state->kept_mass), 1e-8f);
    for_tiles(p, s, [&](u32 tile) {
        const u32 column = tile + hk::thread_x() * hk::kVecLen<T>;
        auto y = load_tile<kAccess, Tile<T, kThreads>>(p, row, column);
        clean(y);
        for_each(y, column, [&](float &x, u32) { x = x >= value_of(threshold) ? x * scale : 0.0f; });
        const RowBatch batch = {row, 1, column, p.x.cols()};
        hk::narrow<T>(y).store(batch.at<T, kAccess, true>(p.y, 0));
    });
}
}  // namespace

// Entry points of one dtype: name = launch, dtype, access if it is by elements. As `SEGMENTS` in src/sample.rs.
#define SAMPLE_SEGMENTS(T, access, suffix)                                                                       \
    HK_ENTRY_FOR_WAVES(sample_histogram_##T##suffix, kThreads, 32, histogram<hk::Access::access, hk::T>)         \
    HK_ENTRY_FOR_WAVES(sample_draw_##T##suffix, kDrawThreads, 32, draw<hk::Access::access, hk::T>)               \
    HK_ENTRY(sample_renorm_##T##suffix, kThreads, renorm<hk::Access::access, hk::T>)

SAMPLE_SEGMENTS(bf16, Vectors, )
SAMPLE_SEGMENTS(f16, Vectors, )
SAMPLE_SEGMENTS(f32, Vectors, )
SAMPLE_SEGMENTS(bf16, Elements, _elements)
SAMPLE_SEGMENTS(f16, Elements, _elements)
SAMPLE_SEGMENTS(f32, Elements, _elements)
