// segments.hip: filters and draws for long rows, spread over blocks
//   Arguments as in rows.hip; formulas and radix select in filter.h. Each row is cut into segments of a length that depends on
//   V alone. One launch each, in order:
//   guess   samples 4096 tokens of each row and estimates its threshold: among the keys in [from, to), or from `top` on if
//           those are at most some hundreds
//   walk    reads the row; lists the keys of these two ranges per segment, and sums the keys between them
//   finish  one block per row: finds the threshold among the listed keys, sums the segments, and draws in one of them. If the
//           threshold is not listed, falls back to a radix select over the row
//   renorm  (if there is y) writes y from the threshold and the kept mass
//
// Logits
//   Weights are exp((x - reference) / temperature), not normalized: p is multiplied with their sum, and the mass divided by
//   it. The reference is the largest logit of the sample, which is close enough to the largest of the row; if a weight
//   overflows, `finish` falls back with the largest of the row.
//
// How the work is split
//   A segment is 4096 tokens, or a multiple of 4096 for rows of more than 128 of them: 128,256 tokens are 32 segments. A block
//   of `walk` has 128 threads; it holds 4096 tokens in registers, 32 per lane, while the next 4096 are in flight; with many
//   rows it loops over several segments. A block of `finish` has 8 waves, and up to 2048 listed keys in LDS: it is bound by
//   latency.
// Guesses
//   A wrong guess costs time, five passes of one block over the row, and changes no result: masses are sums in f64 and in
//   integers, with a relative error of at most 2^-45, and a list has the order of the tokens in registers, whatever is listed.
//   The range allows three to four standard deviations of the sample; for min-p the guess is wrong if none of 4096 tokens has a
//   sixteenth of the largest. For top-p the mass of the row is assumed: one for probabilities; the sample's for logits, which
//   is inaccurate if few tokens have most of the mass. Then more is listed: the upper 640 of the sample's range, and in any case
//   its largest 64.
// Floor
//   `walk` reads V * sizeof(T), `guess` 4096 tokens. Listed keys are 4 bytes, written and read: about 500 per row for top-k and
//   min-p, a twentieth of the tokens of a flat row for top-p. `finish` reads the segment that it draws in once more, `renorm`
//   the row.
#include <hk/entry.h>

#include "filter.h"

namespace {
using namespace sampling;

constexpr int kThreads = 256;
constexpr int kGuessThreads = 512;
constexpr int kWalkThreads = 128;
constexpr int kFinishThreads = 8 * kWaveSize;
constexpr u32 kTile = 4096;  // tokens per block in registers
constexpr u32 kMostSegments = 128;
constexpr u32 kDigitBits = 10;
constexpr u32 kBins = 1 << kDigitBits;
constexpr u32 kGuessBins = 512;  // each a sixteenth of an octave, from the largest key down
constexpr u32 kGuessShift = 19;  // bits of a key within a bin
constexpr u32 kCopies = 4;  // of a bin, one per lane % 4: equal keys conflict less
constexpr u32 kFewListed = 256;  // up to as many sampled tokens, all are listed, with no sum between
constexpr u32 kTopListed = 16;  // always listed
constexpr u32 kMostListed = 640;  // in the range, and
constexpr u32 kTopOfTotal = 64;  // always listed, if the mass for top-p is estimated from the sample
constexpr u32 kFewChunks = 512;  // of four listed keys per row that fit the LDS of `finish`
constexpr u32 kStaged = 1024;  // listed keys of a tile that are staged through LDS

/// The estimate of a row's threshold.
struct Guess {
    float reference;  // logit with a weight of one
    u32 from, to;  // keys in [from, to) are listed
    u32 top;  // keys from `top` on are listed too; kNone: there is no guess
};

/// State of a row between launches.
struct RowState {
    Guess guess;
    double kept_mass;
    u32 threshold;  // kNone: nothing is kept
    u32 unused;
};

/// State of a segment between launches.
struct Segment {
    Amount between;  // keys from `to` to below `top`
    double mass;  // of all keys, if a filter needs it
    u32 listed;
    u32 unused;
};
static_assert(sizeof(RowState) == 32 && sizeof(Segment) == 32, "as in src/sample.rs");

/// The workspace: row states, segment states, lists, each for all rows of the launch.
struct Workspace {
    u64 base;
    u64 rows;
    u64 segments;  // per row
    u64 segment;  // tokens per segment

    HK_FN explicit Workspace(const Params &p)
        : base(p.workspace.data), rows(p.outputs), segments(p.segments), segment(p.segment) {}

    HK_FN hk::GlobalPtr<RowState> row(u64 b) const { return reinterpret_cast<hk::GlobalPtr<RowState>>(base) + b; }
    /// Segment 0 of row b.
    HK_FN hk::GlobalPtr<Segment> segment_of(u64 b) const {
        return reinterpret_cast<hk::GlobalPtr<Segment>>(base + rows * sizeof(RowState)) + b * segments;
    }
    HK_FN hk::GlobalPtr<u32> list(u64 b, u64 s) const {
        const u64 at = base + rows * (sizeof(RowState) + segments * sizeof(Segment));
        return reinterpret_cast<hk::GlobalPtr<u32>>(at) + (b * segments + s) * segment;
    }
};

/// The weight of a token: its probability, or the exponential of its logit relative to the reference.
struct Measure {
    float log2_scale = 0.0f;  // log2(e) / temperature; 0 for probabilities
    float reference = 0.0f;

    /// At an infinite temperature all finite logits have the same weight.
    HK_FN Measure(const Params &p, u64 row) {
        if (p.logits) log2_scale = __builtin_fmaxf(0x1.715476p+0f / temperature_of(p, row), 0x1p-126f);
        hk::opaque(log2_scale);  // keeps its inputs out of SGPRs
    }

    /// Weights of a lane's share of a tile from `column` on; 0 beyond the row.
    template <class RowF>
    HK_FN void apply(RowF &row, u32 column, u32 cols) const {
        if (log2_scale != 0.0f) {
            for_each(row, 0, [&](float &v, u32) { v = hk::exp2_fast((v - reference) * log2_scale); });
            if (column - column % kTile + kTile > cols) {
                for_each(row, column, [&](float &v, u32 c) { v = c < cols ? v : 0.0f; });
            }
        }
        clean(row);
    }

    /// The key of one number.
    HK_FN u32 key(float v) const {
        hk::Row<float, 1, 1, 1> row = {{v}};
        apply(row, 0, kTile);
        return key_of(row.chunk[0][0]);
    }
};

template <class T, int Lanes>
using Tile = hk::Row<T, Lanes, hk::kVecLen<T>, int(kTile) / Lanes / hk::kVecLen<T>>;

/// Loads a lane's share of a tile of row `row`, from `column` on.
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

/// Sum over the wave, in all lanes.
HK_FN double wave_sum(double v) { return hk::last_lane(hk::wave_scan(v)); }

/// Calls `add(1)` in each lane with `mine`; if all their keys are equal, `add(count)` in one of them, since their LDS atomics
/// would conflict. All lanes of the wave call it.
template <class Add>
HK_FN void add_together(bool mine, u32 key, Add add) {
    const u64 found = hk::ballot(mine);
    if (found == 0) return;
    const u32 leader = u32(__builtin_ctzll(found));
    const u32 first = hk::broadcast(key, leader);
    const bool alike = hk::ballot(mine && key != first) == 0;
    if (alike ? hk::lane_id() == leader : mine) add(alike ? u32(__builtin_popcountll(found)) : 1);
}

template <Access kAccess, class T>
HK_FN void guess(const Params &p) {
    constexpr u32 kWaves = kGuessThreads / kWaveSize;
    static_assert(kGuessThreads == kGuessBins, "a bin per thread");
    using RowT = Tile<T, kGuessThreads>;
    __shared__ u64 cells[kGuessBins * kCopies];
    __shared__ ScanScratch<kGuessThreads> scan;
    struct Places {
        u32 from, to, top;
    };
    __shared__ Places places[kWaves];
    __shared__ u32 listed;
    hk::GroupReducer<kGuessThreads, kGuessThreads> block;
    const u32 b = hk::block_x();
    const u32 thread = hk::thread_x();
    const u64 row = row_of(p, u64(p.first) + b);
    if (row == kNoRow) return;
    const hk::GlobalPtr<RowState> state = Workspace(p).row(b);
    const u32 cols = p.x.cols();
    const auto write = [&](const Guess &g) {
        if (thread == 0) state->guess = g;
    };
    const Guess none = {0.0f, kNone, kNone, kNone};
    if (p.logits && temperature_of(p, row) == 0.0f) return write(none);

    // 128-byte lines, spread evenly over the row.
    constexpr u32 kLine = 128 / sizeof(T);
    constexpr u32 kLines = kTile / kLine;
    constexpr u32 kLineLanes = kLine / hk::kVecLen<T>;
    RowT sample;
#pragma unroll
    for (u32 k = 0; k < u32(RowT::kChunks); ++k) {
        const u32 piece = k * kGuessThreads + thread;
        const u32 line = piece / kLineLanes * (cols / kLine) / kLines;
        const RowBatch batch = {row, 1, line * kLine + piece % kLineLanes * hk::kVecLen<T>, cols};
        sample.chunk[k] = batch.at<T, kAccess, true>(p.x, 0).template load<hk::kVecLen<T>>(0);
    }
#pragma unroll
    for (u32 i = 0; i < kGuessBins * kCopies; i += kGuessThreads) cells[i + thread] = 0;
    auto v = hk::widen(sample);
    Measure measure(p, row);
    const float max = block.max(hk::largest(v));  // and a barrier
    if (!(__builtin_fabsf(max) < __builtin_inff()) || (!p.logits && max <= 0.0f)) return write(none);
    if (p.logits) measure.reference = max;
    measure.apply(v, 0, cols);
    const u32 max_key = measure.key(max);
    u32 active;
    const Filters f = filters_of(p, row, max_key, active);
    if (active == 0) return write({measure.reference, 1, 1, kInfinity});

    // Histogram: count and mass per bin.
    const u32 first = max_key >> kGuessShift;
    float squares = 0.0f;
    for_each(v, 0, [&](float &x, u32) {
        const u32 key = key_of(x);
        const u32 bin = hk::Min{}(first - (key >> kGuessShift), kGuessBins - 1);
        const Digit digit = {kGuessShift, 0};
        add_together(key != 0, key, [&](u32 tokens) {
            lds_atomic_add(cells[bin * kCopies + thread % kCopies], tokens * digit.token(key));
        });
        squares = __builtin_fmaf(x, x, squares);
    });
    squares = block.sum(squares);  // and a barrier
    u64 bits = 0;
#pragma unroll
    for (u32 copy = 0; copy < kCopies; ++copy) bits += cells[thread * kCopies + (copy + thread / 8) % kCopies];
    const Bin bin = Cell(bits).bin();
    const u32 key = thread <= first ? (first - thread) << kGuessShift : 0;  // least key of the bin
    Amount so_far = {bin.count, bin.mass(key)}, all = {};
    block_scan(so_far, all, scan);

    // A filter's threshold is above keys that leave clearly enough, and below keys that leave clearly too little.
    const float seen = float(kTile) / float(cols);
    const float k = float(f.k) * seen;
    const float k_error = 4.0f * __builtin_sqrtf(k);
    const bool of_total = (active & Search::kP) && (p.logits || p.top_k_first);
    const float total = of_total ? float(all.mass) : seen;
    const float error = of_total ? 3.0f * __builtin_sqrtf(squares) : 0.0f;
    const float left = __builtin_fmaxf(1.0f - float(f.p), 0.0f);  // mass below the threshold of top-p
    const float n = float(so_far.count);
    const float below = __builtin_fmaxf(float(all.mass - so_far.mass), 0.0f);
    const float least = value_of(key);
    const float below_error = 3.0f * __builtin_sqrtf(below * least) + least;
    const bool enough = ((active & Search::kK) && n >= k + k_error + 6.0f) ||
                        ((active & Search::kP) && below + below_error <= left * (total - error)) ||
                        ((active & Search::kMin) && key <= f.min_key);
    const bool too_few = (!(active & Search::kK) || n <= k - k_error - 2.0f) &&
                         (!(active & Search::kP) || below - below_error >= left * (total + error)) &&
                         (!(active & Search::kMin) || least > 16.0f * value_of(f.min_key));
    // The first bin with enough, one past the last with too few, and the first that covers the keys to list in any case.
    const auto first_of = [&](bool mine) {
        const u64 found = hk::ballot(mine);
        return found != 0 ? thread - hk::lane_id() + u32(__builtin_ctzll(found)) : kNone;
    };
    const auto past_last_of = [&](bool mine) {
        const u64 found = hk::ballot(mine);
        return found != 0 ? thread - hk::lane_id() + 64 - u32(__builtin_clzll(found)) : 0;
    };
    Places bins = {first_of(enough), past_last_of(too_few),
                   first_of(so_far.count >= (of_total ? kTopOfTotal : kTopListed))};
    if (hk::lane_id() == 0) places[hk::wave_id()] = bins;
    hk::block_barrier();
    const auto all_waves = [&] {
        Places all = places[0];
#pragma unroll
        for (u32 i = 1; i < kWaves; ++i) {
            all.from = hk::Min{}(all.from, places[i].from);
            all.to = hk::Max{}(all.to, places[i].to);
            all.top = hk::Min{}(all.top, places[i].top);
        }
        return all;
    };
    bins = all_waves();
    if (of_total) {
        // If few tokens have most of the mass, the sample estimates it badly, more often too low than too high: list the upper
        // part of the range.
        if (thread + 1 == bins.to) listed = so_far.count;
        hk::block_barrier();
        const u32 above = bins.to == 0 ? 0 : listed;
        const u32 last = past_last_of(thread >= bins.to && so_far.count - above <= kMostListed);
        if (hk::lane_id() == 0) places[hk::wave_id()].to = last;
        hk::block_barrier();
        const u32 past_most = all_waves().to;
        if (past_most != 0) bins.from = hk::Min{}(bins.from, past_most - 1);
    }
    // Written by the thread of the bin, or by the last.
    if (thread == hk::Min{}(bins.from, kGuessBins - 1)) listed = so_far.count;
    hk::block_barrier();
    const auto key_from = [&](u32 bin) { return bin <= first ? (first - bin) << kGuessShift : 0; };
    Guess g = {measure.reference, 1, 0, 0};
    if (bins.from != kNone) g.from = hk::Max{}(key_from(bins.from), 1);
    // Top-p after the others needs the mass that they keep: list all of it.
    const bool both = p.top_k_first && (active & Search::kP) && active != Search::kP;
    if (listed <= kFewListed || bins.to == 0 || bins.to - 1 <= bins.top || both) {
        g.top = g.from;
    } else {
        g.to = key_from(bins.to - 1);
        g.top = key_from(bins.top);
    }
    g.to = hk::Max{}(g.from, g.to);
    write(g);
}

/// A lane's share of a tile: what is listed, and sums.
struct Share {
    u32 listed = 0;  // one bit per token, from the highest down
    u32 high = 0;  // likewise: keys between the two lists
    double between = 0.0;
    double mass = 0.0;
};

/// Sums of tokens: probabilities in f64; exponentials, which are rounded already, in f32 by fours, then in f64.
template <bool kExact>
class TokenSum {
    double sum_ = 0.0;
    float four_ = 0.0f;
    int n_ = 0;

  public:
    HK_FN void add(float v) {
        if constexpr (kExact) {
            sum_ += double(v);
        } else {
            four_ = n_ % 4 == 0 ? v : four_ + v;
            if (++n_ % 4 == 0) sum_ += double(four_);
        }
    }
    HK_FN double sum() const { return sum_; }
};

template <bool kExact, class RowF>
HK_FN Share look(RowF &v, const Guess &g, bool wants_between, bool wants_mass) {
    // Keys are positive: the sign of a difference compares them.
    Share share;
    const auto add_bit = [](u32 &bits, u32 sign) { bits = bits << 1 | sign >> 31; };
    if (wants_between) {
        TokenSum<kExact> between;
        for_each(v, 0, [&](float &x, u32) {
            const u32 key = key_of(x);
            const u32 below_from = key - g.from, below_to = key - g.to, below_top = key - g.top;
            const u32 high = ~below_to & below_top;
            add_bit(share.listed, (~below_from & below_to) | ~below_top);
            add_bit(share.high, high);
            between.add(value_of(key & u32(i32(high) >> 31)));
        });
        share.between = between.sum();
    } else {
        for_each(v, 0, [&](float &x, u32) { add_bit(share.listed, ~(key_of(x) - g.top)); });
    }
    if (wants_mass) {
        TokenSum<kExact> mass;
        for_each(v, 0, [&](float &x, u32) { mass.add(x); });
        share.mass = mass.sum();
    }
    return share;
}

template <Access kAccess, class T>
HK_FN void walk(const Params &p) {
    using RowT = Tile<T, kWalkThreads>;
    constexpr u32 kWaves = kWalkThreads / kWaveSize;
    constexpr u32 kLen = RowT::kLen;
    constexpr u32 kShare = kTile / kWalkThreads;
    static_assert(kShare == 32, "bits of a share");
    // Per wave, double-buffered: the barrier of one buffer protects the other.
    struct Lds {
        double between[kWaves], mass[kWaves];
        u32 counts[kWaves];  // low half: between; high half: listed
    };
    __shared__ Lds lds[2];
    __shared__ alignas(16) u32 staged[kStaged];
    const u32 blocks = (p.segments + p.share - 1) / p.share;  // per row
    const u32 b = hk::block_x() / blocks;  // row of the launch
    const u32 begin = hk::block_x() % blocks * p.share;  // first segment of this block
    const u32 end = p.segments - begin < p.share ? p.segments : begin + p.share;
    const u64 row = row_of(p, u64(p.first) + b);
    if (row == kNoRow) return;
    const Workspace w(p);
    const Guess g = w.row(b)->guess;
    if (g.top == kNone) return;
    Measure measure(p, row);
    measure.reference = g.reference;
    const bool wants_mass = p.logits || p.top_k_first;
    const bool wants_between = g.to < g.top;
    const u32 cols = p.x.cols();
    const u32 thread = hk::thread_x();
    const u32 wave = hk::wave_id();
    u32 buffer = 0;
    u32 n_before = 0;  // listed in the segment's earlier tiles
    const auto load = [&](u32 tile) {
        const RowBatch batch = {row, 1, tile + thread * kLen, cols};
        return RowT::load(batch.at<T, kAccess, true>(p.x, 0));
    };
    const u32 last = cols / p.segment < end ? cols : end * p.segment;
    RowT x = load(begin * p.segment);
    for (u32 tile = begin * p.segment; tile < last; tile += kTile) {
        auto v = hk::widen(x);
        // Prefetches the next tile.
        if (tile + kTile < last) x = load(tile + kTile);
        measure.apply(v, tile + thread * kLen, cols);
        const Share share =
            p.logits ? look<false>(v, g, wants_between, wants_mass) : look<true>(v, g, wants_between, wants_mass);
        const u32 counts = u32(__builtin_popcount(share.high)) | u32(__builtin_popcount(share.listed)) << 16;
        const u32 up_to = hk::wave_scan(counts);
        const double wave_between = wants_between ? hk::wave_scan(share.between) : 0.0;
        const double wave_mass = wants_mass ? hk::wave_scan(share.mass) : 0.0;
        Lds &now = lds[buffer];
        buffer ^= 1;
        if (thread % kWaveSize == kWaveSize - 1) {
            now.between[wave] = wave_between;
            now.mass[wave] = wave_mass;
            now.counts[wave] = up_to;
        }
        hk::block_barrier();
        u32 place = (up_to - counts) >> 16;
        u32 n = 0;
#pragma unroll
        for (u32 i = 0; i < kWaves; ++i) {
            place += i < wave ? now.counts[i] >> 16 : 0;
            n += now.counts[i] >> 16;
        }
        n = hk::uniform(n);
        const u32 s = tile / p.segment;
        if (tile % p.segment == 0) n_before = 0;
        if (n != 0) {
            const hk::GlobalPtr<u32> list = w.list(b, s) + n_before;
            const auto each = [&](auto use) __attribute__((always_inline)) {
#pragma unroll
                for (u32 k = 0; k < u32(RowT::kChunks); ++k) {
                    const u32 bits = share.listed >> (kShare - (k + 1) * kLen);
                    if (hk::ballot((bits & ((1u << kLen) - 1)) != 0) == 0) continue;
#pragma unroll
                    for (u32 i = 0; i < kLen; ++i) use(bits & 1u << (kLen - 1 - i), key_of(v.chunk[k][i]));
                }
            };
            // Staged stores pad the list with zeros, so only a segment of one tile is staged.
            if (n <= kStaged && p.segment == kTile) {
                hk::Appender appender(staged, place);
                each([&](u32 mine, u32 key) { appender.add(mine, key); });
                hk::block_barrier();
                using Keys = hk::Vec<u32, 4>;
#pragma unroll 1
                for (u32 i = thread * 4; i < n; i += kWalkThreads * 4) {
                    Keys keys = *reinterpret_cast<const Keys *>(staged + i);
#pragma unroll
                    for (u32 j = 1; j < 4; ++j) keys[j] = i + j < n ? keys[j] : 0;
                    *reinterpret_cast<hk::GlobalPtr<Keys>>(list + i) = keys;
                }
            } else {
                each([&](u32 mine, u32 key) {
                    if (mine != 0) list[place++] = key;
                });
            }
        }
        n_before += n;
        if (thread == 0) {
            Amount between = {};
            double mass = 0.0;
            const hk::GlobalPtr<Segment> segment = w.segment_of(b) + s;
            if (tile % p.segment != 0) {
                between = segment->between;
                mass = segment->mass;
            }
#pragma unroll
            for (u32 i = 0; i < kWaves; ++i) {
                between += {now.counts[i] & 0xffffu, now.between[i]};
                mass += now.mass[i];
            }
            segment->between = between;
            segment->mass = mass;
            segment->listed = n_before;
        }
    }
}

/// LDS of `finish`.
struct FinishLds {
    u64 rests[kBins];
    u32 counts[kBins];
    StepScratch<kFinishThreads> step;
    DrawScratch<kFinishThreads, 1> draw;
    ScanScratch<kFinishThreads> scan;
    Segment segments[kMostSegments];
    double masses[kMostSegments];  // kept mass
    u32 listed[kMostSegments];
    u32 chunks[kMostSegments + 1];  // chunks of four listed keys in the segments before
    hk::Vec<u32, 4> keys[kFewChunks];
    Amount between;  // over all segments
    double mass;
    u32 chosen;
    double before;
};

using FinishReducer = hk::GroupReducer<kFinishThreads, kFinishThreads>;

/// Counts a key in the bin of its digit, in lanes with `mine`. All lanes of the wave call it.
HK_FN void count_key(FinishLds &lds, const Search &search, Digit digit, bool mine, u32 key) {
    add_together(mine, key, [&](u32 tokens) {
        const u32 bin = (key - search.prefix) >> digit.shift;
        __scoped_atomic_fetch_add(&lds.counts[bin], tokens, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
        lds_atomic_add(lds.rests[bin], u64(tokens) * digit.rest(key));
    });
}

/// Radix select of the threshold among the keys from `from` to `to`. `for_keys(use)` calls `use(key)`, in full waves, for a
/// superset of them; `search.above` holds the tokens above them. False if the filters keep them all; `search.above` then
/// includes them. `all` becomes the tokens down to `from`.
template <class ForKeys>
HK_FN bool search_range(Search &search, Amount &all, Filters &f, u32 from, u32 to, FinishReducer &block, FinishLds &lds,
                        ForKeys for_keys) {
    const u32 active = search.active;
    if (f.min_key < from) search.active &= ~Search::kMin;
    // The widest digit whose bins cover the range.
    const u32 width_bits = 32 - u32(__builtin_clz((to - from) | 1));
    u32 shift = width_bits > kDigitBits ? width_bits - kDigitBits : 0;
    if ((to >> shift) - (from >> shift) >= kBins) ++shift;
    search.prefix = from >> shift << shift;
    u32 least = from, most = to;
    for (bool first = true;; first = false) {
        const Digit digit = {shift, kBins - 1};
        u32 begin = hk::thread_x();
        hk::opaque(begin);
        for (u32 i = begin; i < kBins; i += kFinishThreads) {
            lds.rests[i] = 0;
            lds.counts[i] = 0;
        }
        hk::block_barrier();
        for_keys([&](u32 key) { count_key(lds, search, digit, key - least <= most - least, key); });
        hk::block_barrier();
        step<kFinishThreads, kBins>(search, f, digit, block, lds.step,
                                    [&](u32 i) { return Bin{lds.counts[i], lds.rests[i]}; });
        if (first) all = search.all;
        if (first && search.active == 0) {
            search.above = all;
            search.in = {};
            search.active = active;
            return false;
        }
        if (search.done() || shift == 0) return true;
        least = hk::Max{}(search.prefix, from);
        most = search.prefix + ((1u << shift) - 1);
        shift = shift > kDigitBits ? shift - kDigitBits : 0;
    }
}

/// The result of the filters on a row.
struct Found {
    u32 threshold;
    Amount kept;
    double total;  // mass of the row, for logits
    u32 id = kNone;  // the token at a temperature of zero
};

/// Finds the threshold of all filters; with `top_k_first`, top-p after the others, on the mass that they keep. `find(f, active)`
/// finds the threshold of the active ones.
template <class Find>
HK_FN bool find_in_order(const Params &p, Filters f, u32 active, Found &found, Find find) {
    const u32 others = active & ~Search::kP;
    bool again = p.top_k_first && others != 0 && others != active;
    f.p_of_total = !again && (p.logits || p.top_k_first);
    for (u32 now = again ? others : active;; now = active) {
        if (!find(f, now)) return false;
        if (!again) return true;
        again = false;
        f.p *= found.kept.mass;
    }
}

/// The listed keys of a row: in the workspace, and in LDS if they are few, in chunks of four, padded with zeros per segment.
struct Lists {
    static constexpr u32 kOfChunk = 4;
    using Keys = hk::Vec<u32, kOfChunk>;

    hk::GlobalPtr<u32> first;
    u32 segment;  // tokens per segment: the capacity of a list
    u32 segments;

    HK_FN Lists(const Params &p, u32 at) : first(Workspace(p).list(at, 0)), segment(p.segment), segments(p.segments) {}

    /// Loads them to LDS if they are few; `lds` has the numbers of chunks and keys. Threads take chunks across segments, so that
    /// all loads are in flight at once.
    HK_FN void to_lds(FinishLds &lds) const {
        const u32 chunks = hk::uniform(lds.chunks[segments]);
        if (chunks > kFewChunks) return;
        for (u32 c = hk::thread_x(); c < chunks; c += kFinishThreads) {
            u32 s = 0;  // the segment of this chunk
#pragma unroll
            for (u32 step = kMostSegments / 2; step != 0; step /= 2) {
                if (s + step < segments && lds.chunks[s + step] <= c) s += step;
            }
            const u32 place = (c - lds.chunks[s]) * kOfChunk, listed = lds.listed[s];
            Keys keys = load(s, place);
#pragma unroll
            for (u32 j = 0; j < kOfChunk; ++j) keys[j] = place + j < listed ? keys[j] : 0;
            lds.keys[c] = keys;
        }
    }

    /// Calls `use(key)` for the listed keys of segment `s`, in full waves; key 0 is padding.
    template <class Use>
    HK_FN void each_of(const FinishLds &lds, u32 s, Use use) const {
        if (hk::uniform(lds.chunks[segments]) <= kFewChunks) {
            return each_in_lds(lds, lds.chunks[s], lds.chunks[s + 1], 0, kWaveSize, use);
        }
        constexpr u32 kPrefetch = 2, kStep = kOfChunk * kWaveSize;
        const u32 listed = hk::uniform(lds.listed[s]);
        for (u32 step = 0; step < listed; step += kPrefetch * kStep) {
            const u32 place = step + hk::lane_id() * kOfChunk;
            Keys keys[kPrefetch];
#pragma unroll
            for (u32 i = 0; i < kPrefetch; ++i) {
                if (step + i * kStep < listed) keys[i] = load(s, place + i * kStep < listed ? place + i * kStep : 0);
            }
#pragma unroll
            for (u32 i = 0; i < kPrefetch; ++i) {
                if (step + i * kStep >= listed) break;
#pragma unroll
                for (u32 j = 0; j < kOfChunk; ++j) use(place + i * kStep + j < listed ? keys[i][j] : 0);
            }
        }
    }

    /// The same for all segments. Outside LDS, waves take segments round-robin.
    template <class Use>
    HK_FN void each(const FinishLds &lds, Use use) const {
        const u32 wave = hk::wave_id(), chunks = hk::uniform(lds.chunks[segments]);
        if (chunks <= kFewChunks) return each_in_lds(lds, 0, chunks, wave * kWaveSize, kFinishThreads, use);
        for (u32 s = wave; s < segments; s += kFinishThreads / kWaveSize) each_of(lds, s, use);
    }

  private:
    HK_FN Keys load(u32 s, u32 place) const {
        return *reinterpret_cast<hk::GlobalPtr<const Keys>>(first + u64(s) * segment + place);
    }

    /// Keys of chunks `begin` to `end`: a wave's worth at `from`, then every `step` keys.
    template <class Use>
    HK_FN static void each_in_lds(const FinishLds &lds, u32 begin, u32 end, u32 from, u32 step, Use use) {
        const u32 *const keys = reinterpret_cast<const u32 *>(lds.keys);
        const u32 last = hk::uniform(end * kOfChunk);
        for (u32 i = hk::uniform(begin * kOfChunk) + from; i < last; i += step) {
            const u32 mine = i + hk::lane_id();
            use(mine < last ? keys[mine] : 0);
        }
    }
};

/// Finds the threshold in the lists of `walk`; false if it is not listed.
HK_FN bool find_in_lists(const Params &p, u32 at, u64 row, const Guess &g, Found &found, FinishReducer &block,
                         FinishLds &lds) {
    const u32 thread = hk::thread_x();
    if (thread < p.segments) lds.segments[thread] = Workspace(p).segment_of(at)[thread];
    hk::block_barrier();
    if (hk::wave_id() == 0) {
        Amount between = {};
        double mass = 0.0;
        for (u32 s = thread; s < p.segments; s += kWaveSize) {
            between += lds.segments[s].between;
            mass += lds.segments[s].mass;
        }
        between = {hk::wave_scan(between.count), hk::wave_scan(between.mass)};
        mass = hk::wave_scan(mass);
        if (thread == kWaveSize - 1) {
            lds.between = between;
            lds.mass = mass;
        }
        u32 chunks = 0;
        for (u32 first = 0; first < p.segments; first += kWaveSize) {
            const u32 s = first + thread;
            const u32 listed = s < p.segments ? lds.segments[s].listed : 0;
            const u32 own = (listed + Lists::kOfChunk - 1) / Lists::kOfChunk;
            const u32 before = chunks + hk::wave_scan(own) - own;
            if (s < p.segments) {
                lds.listed[s] = listed;
                lds.chunks[s] = before;
            }
            chunks = hk::last_lane(before + own);
        }
        if (thread == 0) lds.chunks[p.segments] = chunks;
    }
    hk::block_barrier();
    Lists(hk::reload_params(p), at).to_lds(lds);
    hk::block_barrier();
    u32 max_key = 0;
    Amount top = {}, all_top = {};
    Lists(hk::reload_params(p), at).each(lds, [&](u32 key) {
        max_key = hk::Max{}(max_key, key);
        const bool in_top = key >= g.top;
        top += {in_top ? 1u : 0u, in_top ? double(value_of(key)) : 0.0};
    });
    max_key = block.reduce(max_key, hk::Max{});  // and a barrier
    block_scan(top, all_top, lds.scan);
    const Amount all_between = lds.between;
    if (max_key == kInfinity) return false;
    found.total = lds.mass;
    u32 active;
    const Filters filters = filters_of(p, row, max_key, active);
    found.threshold = 1;
    found.kept = all_between;
    if (active == 0) return true;
    // The largest key is not listed: min-p is unknown.
    if (max_key < g.top) return false;
    return find_in_order(p, filters, active, found, [&](Filters f, u32 active) __attribute__((always_inline)) {
        if (f.p_of_total) {
            f.p *= found.total;
            f.p_of_total = false;
        }
        Search search;
        search.active = active;
        // The upper range, or the lower one if the upper is kept as a whole.
        const bool in_top = ((active & Search::kK) && all_top.count >= f.k) ||
                            ((active & Search::kP) && all_top.mass >= f.p) ||
                            ((active & Search::kMin) && f.min_key >= g.top);
        u32 from = g.top, to = max_key;
        hk::opaque(from);  // keeps values derived from it out of SGPRs
        for (bool look = in_top || from == g.from;; look = true) {
            Amount down_to_from;
            bool there = false;
            if (look) {
                there = search_range(search, down_to_from, f, from, to, block, lds,
                                     [&](auto use) { Lists(hk::reload_params(p), at).each(lds, use); });
            } else {
                search.above = all_top;
            }
            found.threshold = there ? hk::Max{}(search.prefix, from) : 1;
            found.kept = {search.kept_count(), search.kept_mass()};
            if (there) return true;
            // All listed keys are kept: the threshold is below them, if there are keys below.
            if (from == g.from) return from <= 1;
            if ((active & Search::kMin) && f.min_key >= g.to) return false;
            search.above += all_between;
            if (all_between.count != 0) {
                if ((active & Search::kK) && search.above.count >= f.k) return false;
                if ((active & Search::kP) && search.above.mass >= f.p) return false;
            }
            from = g.from;
            to = g.to - 1;
        }
    });
}

/// A tile with adjacent tokens in each lane.
template <class T>
using FinishTile = hk::Row<T, kFinishThreads, int(kTile) / kFinishThreads, 1>;

/// Calls `f(column, share)` for this lane's share of each tile of a segment.
template <Access kAccess, class T, class F>
HK_FN void for_row_tiles(const Params &p, u64 row, u32 s, F f) {
    for_tiles(p, s, [&](u32 tile) {
        const u32 column = tile + hk::thread_x() * FinishTile<T>::kLen;
        auto v = load_tile<kAccess, FinishTile<T>>(p, row, column);
        f(column, v);
    });
}

/// Fallback: finds the threshold by radix select over the row, in one block. Sets the reference of `measure`.
template <Access kAccess, class T>
HK_FN void find_in_row(const Params &p, u64 row, Measure &measure, Found &found, FinishReducer &block, FinishLds &lds) {
    const u32 cols = p.x.cols();
    float max = -__builtin_inff();
    u32 first = kNone;
    for (u32 s = 0; s < p.segments; ++s) {
        for_row_tiles<kAccess, T>(p, row, s, [&](u32 column, auto &v) {
            for_each(v, column, [&](float &x, u32 c) {
                const bool more = c < cols && x > max;
                max = more ? x : max;
                first = more ? c : first;
            });
        });
    }
    const float own = max;
    max = block.max(max);
    found = {kNone, {}, 1.0};
    if (!(__builtin_fabsf(max) < __builtin_inff()) || (!p.logits && max <= 0.0f)) return;
    if (p.logits && temperature_of(p, row) == 0.0f) {
        found.kept = {1, 1.0};
        found.id = block.reduce(own == max ? first : kNone, hk::Min{});
        return;
    }
    if (p.logits) measure.reference = max;
    const u32 max_key = measure.key(max);
    u32 active;
    const Filters filters = filters_of(p, row, max_key, active);
    find_in_order(p, filters, active, found, [&](Filters f, u32 active) __attribute__((always_inline)) {
        Search search;
        search.active = active;
        Amount all;
        const bool there = search_range(search, all, f, 1, max_key, block, lds, [&](auto use) {
            const Params &q = hk::reload_params(p);
            for (u32 s = 0; s < q.segments; ++s) {
                for_row_tiles<kAccess, T>(q, row, s, [&](u32 column, auto &v) {
                    measure.apply(v, column, q.x.cols());
                    for_each(v, 0, [&](float &x, u32) { use(key_of(x)); });
                });
            }
        });
        found.threshold = there ? hk::Max{}(search.prefix, 1) : 1;
        found.kept = {search.kept_count(), search.kept_mass()};
        found.total = all.mass;
        return true;
    });
}

/// Kept mass per segment.
template <Access kAccess, class T>
HK_FN void segment_masses(const Params &p, u32 at, u64 row, const Guess &g, bool from_lists, const Measure &measure,
                          u32 threshold, FinishLds &lds) {
    if (from_lists) {
        const Lists lists(p, at);
        for (u32 s = hk::wave_id(); s < p.segments; s += kFinishThreads / kWaveSize) {
            double mass = 0.0;
            lists.each_of(lds, s, [&](u32 key) { mass += key >= threshold ? double(value_of(key)) : 0.0; });
            mass = wave_sum(mass);
            if (hk::lane_id() == 0) lds.masses[s] = mass + (threshold <= g.to ? lds.segments[s].between.mass : 0.0);
        }
    } else {
        for (u32 s = 0; s < p.segments; ++s) {
            Amount own = {}, all = {};
            for_row_tiles<kAccess, T>(p, row, s, [&](u32 column, auto &v) {
                measure.apply(v, column, p.x.cols());
                for_each(v, 0, [&](float &x, u32) { own.mass += x >= value_of(threshold) ? double(x) : 0.0; });
            });
            block_scan(own, all, lds.scan);
            if (hk::thread_x() == 0) lds.masses[s] = all.mass;
            hk::block_barrier();
        }
    }
    hk::block_barrier();
}

/// Chooses the segment in which the prefix sum of the kept mass reaches the target, and the mass before it; if rounding keeps
/// the sum below the target, the last segment that keeps a token.
HK_FN void choose_segment(u32 segments, double target, FinishLds &lds) {
    if (hk::wave_id() == 0) {
        constexpr u32 kOfLane = kMostSegments / kWaveSize;
        const u32 lane = hk::lane_id();
        double own[kOfLane];
        double sum = 0.0;
#pragma unroll
        for (u32 i = 0; i < kOfLane; ++i) {
            own[i] = lane * kOfLane + i < segments ? lds.masses[lane * kOfLane + i] : 0.0;
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
}

template <Access kAccess, class T>
HK_FN void finish(const Params &p) {
    __shared__ FinishLds lds;
    FinishReducer block;
    const u32 thread = hk::thread_x();
    const u32 at = hk::block_x();
    // Reloads the parameters: there are too few SGPRs to keep them.
    const auto output = [&] { return u64(hk::reload_params(p).first) + at; };
    u64 row = row_of(p, output());
    if (row == kNoRow) {
        if (thread == 0) write_output(p, output(), 0, __builtin_nanf(""), 0);
        return;
    }
    const hk::GlobalPtr<RowState> state = Workspace(p).row(at);
    const Guess g = state->guess;
    Measure measure(p, row);
    measure.reference = g.reference;
    Found found = {};
    const bool from_lists = g.top != kNone && find_in_lists(hk::reload_params(p), at, row, g, found, block, lds);
    row = row_of(hk::reload_params(p), output());
    if (!from_lists) find_in_row<kAccess, T>(hk::reload_params(p), row, measure, found, block, lds);
    if (thread == 0) {
        state->threshold = found.kept.count != 0 ? found.threshold : kNone;
        state->kept_mass = found.kept.mass;
    }
    const Params &q = hk::reload_params(p);
    u32 id = found.id != kNone ? found.id : 0;
    if (q.ids.present() && found.kept.count != 0 && found.id == kNone) {
        segment_masses<kAccess, T>(q, at, row, g, from_lists, measure, found.threshold, lds);
        const double target = double(uniform_of(q, output())) * found.kept.mass;
        choose_segment(q.segments, target, lds);
        Drawn drawn = {kNone, 0, lds.before};
        u32 past_last = 0;
        for_row_tiles<kAccess, T>(q, row, lds.chosen, [&](u32 column, auto &v) {
            if (drawn.first != kNone) return;
            measure.apply(v, column, q.x.cols());
            drawn = draw(v, column, found.threshold, drawn.sum, target, block, lds.draw);
            past_last = hk::Max{}(past_last, drawn.past_last);
        });
        id = drawn.first != kNone ? drawn.first : past_last - 1;
    }
    const double mass = q.logits ? found.kept.mass / found.total : found.kept.mass;
    if (thread == 0) write_output(q, output(), id, float(mass), found.kept.count);
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

// Entry points of one dtype, as `SEGMENTS` in src/sample.rs. Name = launch, dtype, `_scalar` for the scalar path.
#define SAMPLE_SEGMENTS(T, access, suffix)                                                                  \
    HK_ENTRY(sample_guess_##T##suffix, kGuessThreads, guess<hk::Access::access, hk::T>)                     \
    HK_ENTRY_WAVES_PER_SM(sample_walk_##T##suffix, kWalkThreads, 20, walk<hk::Access::access, hk::T>)       \
    HK_ENTRY_WAVES_PER_SM(sample_finish_##T##suffix, kFinishThreads, 16, finish<hk::Access::access, hk::T>) \
    HK_ENTRY(sample_renorm_##T##suffix, kThreads, renorm<hk::Access::access, hk::T>)

SAMPLE_SEGMENTS(bf16, Vectorized, )
SAMPLE_SEGMENTS(f16, Vectorized, )
SAMPLE_SEGMENTS(f32, Vectorized, )
SAMPLE_SEGMENTS(bf16, Scalar, _scalar)
SAMPLE_SEGMENTS(f16, Scalar, _scalar)
SAMPLE_SEGMENTS(f32, Scalar, _scalar)
