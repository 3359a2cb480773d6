// segments.hip: filters and draws for long rows, spread over blocks
//   Arguments as in rows.hip; formulas and search in filter.h. Each row is cut into segments of a length that V alone
//   fixes. In order, one launch each:
//   guess   looks at 4096 tokens of each row and says where its threshold may be: among the keys in [from, to) or, where
//           those are no more than some hundreds, from `top` on
//   walk    reads the row. Of each segment it lists the keys of these two ranges, and adds up what lies between them
//   finish  finds the threshold among the listed keys, one block a row, sums the segments, and draws in one of them. If the
//           threshold turns out to be elsewhere, it looks for it in the row itself
//   renorm  (where y is wanted) writes y from the threshold and the kept mass
//
// Logits
//   What is drawn from is exp((x - reference) / temperature), whose sum p is multiplied with and the mass divided by: it need
//   not be one. The reference is the largest that `guess` has seen, which is close enough to the largest of all; should a
//   number become infinite, `finish` begins again with that.
//
// How the work is split
//   A segment is 4096 tokens, or for rows beyond 128 times that a multiple of them: 128,256 tokens are 32 segments. In
//   `walk` a block of 128 threads has 4096 tokens in registers, 32 a lane, and the next 4096 on their way; where rows are many,
//   it takes several segments in turn. The blocks of `finish` have 8 waves, and up to 2048 listed keys in LDS: most of what
//   it does waits for its other waves or for memory.
// Guesses
//   A guess that fails costs time, five walks of one block over the row, and changes no result: masses are sums of f64 and
//   of whole numbers, within 2^-45 of themselves, and a list has the order of the tokens' places in registers, whatever is
//   listed. It errs by the sample's deviation, of which it allows three to four; for min-p it fails where 4096 tokens do not
//   have one of a sixteenth of the largest. For top-p it has to know the mass of the row: of probabilities one; of logits what
//   the sample has, which is little to go by where few tokens have most of it. Then more are listed: of the range, which may be
//   all below a few, the upper 640 of the sample, and in any case its largest 64.
// Floor
//   V * sizeof(T) from memory for `walk`, and 4096 tokens before. Listed keys are 4 bytes, written and read: some 500 a row for
//   top-k and min-p, a twentieth of the tokens of a flat row for top-p. `finish` reads again the segment that it draws in,
//   `renorm` the row.
#include <hk/entry.h>

#include "filter.h"

namespace {
using namespace sampling;

constexpr int kThreads = 256;
constexpr int kGuessThreads = 512;
constexpr int kWalkThreads = 128;
constexpr int kFinishThreads = 8 * kWaveSize;
constexpr u32 kTile = 4096;  // tokens that a block has in registers
constexpr u32 kMostSegments = 128;
constexpr u32 kDigitBits = 10;
constexpr u32 kBins = 1 << kDigitBits;
constexpr u32 kGuessBins = 512;   // of a sixteenth of an octave, from the largest key down
constexpr u32 kGuessShift = 19;   // keys below it: the same bin
constexpr u32 kCopies = 4;        // of a bin, for every fourth lane each: equal keys take turns
constexpr u32 kFewListed = 256;   // tokens of 4096 that are all listed, rather than some between
constexpr u32 kTopListed = 16;    // those that are listed in any case
constexpr u32 kMostListed = 640;  // those between, and
constexpr u32 kTopOfTotal = 64;   // in any case, where top-p is of a mass that the sample has to tell
constexpr u32 kFewChunks = 512;   // of four listed keys of a row, that `finish` has in LDS
constexpr u32 kStaged = 1024;     // keys of a tile that go to their list by way of LDS; more of them would take turns there

/// Where the threshold of a row may be.
struct Guess {
    float reference;  // logit that has a weight of one
    u32 from, to;     // keys that are listed, one past the last; none if they are equal
    u32 top;          // all keys from here on are listed, too; kNone: there is no guess
};

/// What is known of a row.
struct RowState {
    Guess guess;
    double kept_mass;
    u32 threshold;  // kNone: nothing is kept
    u32 unused;
};

/// What is known of a segment.
struct Segment {
    Amount between;  // keys from `to` to below `top`
    double mass;     // of all, where a filter asks for it
    u32 listed;
    u32 unused;
};
static_assert(sizeof(RowState) == 32 && sizeof(Segment) == 32, "as in src/sample.rs");

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
    HK_FN hk::GlobalPtr<u32> list(u64 b, u64 s) const {
        const u64 at = base + rows * (sizeof(RowState) + segments * sizeof(Segment));
        return reinterpret_cast<hk::GlobalPtr<u32>>(at) + (b * segments + s) * segment;
    }
};

/// What a token of a row weighs: its probability, or the exponential of its logit relative to another.
struct Measure {
    float log2_scale = 0.0f;  // log2(e) / temperature; of probabilities 0
    float reference = 0.0f;

    /// At an infinite temperature all logits weigh the same, but infinite ones.
    HK_FN Measure(const Params &p, u64 row) {
        if (p.logits) log2_scale = __builtin_fmaxf(0x1.715476p+0f / temperature_of(p, row), 0x1p-126f);
        hk::forget(log2_scale);  // rather than what it was made from, in scalar registers
    }

    /// That of a lane's share of a tile from `column` on; nothing beyond the row.
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

/// The sum of a wave's lanes, in all of them.
HK_FN double wave_sum(double v) { return hk::last_lane(hk::wave_scan(v)); }

/// Calls `add(1)` in each lane of which `mine` is true; where the keys of all these are the same, `add` of how many they are
/// in one of them: they would take turns at an address in LDS. All lanes of the wave call it.
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
    static_assert(kGuessThreads == kGuessBins, "a bin for each thread");
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

    // Lines of 128 bytes, as far from each other as the row allows.
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

    // How many there are of each bin, and their mass.
    const u32 first = max_key >> kGuessShift;
    float squares = 0.0f;
    for_each(v, 0, [&](float &x, u32) {
        const u32 key = key_of(x);
        const u32 bin = hk::Min{}(first - (key >> kGuessShift), kGuessBins - 1);
        const Digit digit = {kGuessShift, 0};
        add_together(key != 0, key, [&](u32 tokens) {
            add_in_lds(cells[bin * kCopies + thread % kCopies], tokens * digit.token(key));
        });
        squares = __builtin_fmaf(x, x, squares);
    });
    squares = block.sum(squares);  // and a barrier
    u64 bits = 0;
#pragma unroll
    for (u32 copy = 0; copy < kCopies; ++copy) bits += cells[thread * kCopies + (copy + thread / 8) % kCopies];
    const Bin bin = Cell(bits).bin();
    const u32 key = thread <= first ? (first - thread) << kGuessShift : 0;  // the least of the bin
    Amount so_far = {bin.count, bin.mass(key)}, all = {};
    block_scan(so_far, all, scan);

    // Each filter's threshold lies above those keys that leave it more than enough, and below those that leave it too little.
    const float seen = float(kTile) / float(cols);
    const float k = float(f.k) * seen;
    const float k_error = 4.0f * __builtin_sqrtf(k);
    const bool of_total = (active & Search::kP) && (p.logits || p.top_k_first);
    const float total = of_total ? float(all.mass) : seen;
    const float error = of_total ? 3.0f * __builtin_sqrtf(squares) : 0.0f;
    const float left = __builtin_fmaxf(1.0f - float(f.p), 0.0f);  // what top-p leaves
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
    // The first bin with enough, one past the last with too few, and the first down to which the largest are.
    const auto first_of = [&](bool mine) {
        const u64 found = hk::ballot(mine);
        return found != 0 ? thread - hk::lane_id() + u32(__builtin_ctzll(found)) : kNone;
    };
    const auto past_last_of = [&](bool mine) {
        const u64 found = hk::ballot(mine);
        return found != 0 ? thread - hk::lane_id() + 64 - u32(__builtin_clzll(found)) : 0;
    };
    Places bins = {first_of(enough), past_last_of(too_few), first_of(so_far.count >= (of_total ? kTopOfTotal : kTopListed))};
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
        // Where few tokens have most of the mass, the sample tells little of it: then the upper part of a wide range, since a
        // sample rather has too little of that mass than too much.
        if (thread + 1 == bins.to) listed = so_far.count;
        hk::block_barrier();
        const u32 above = bins.to == 0 ? 0 : listed;
        const u32 last = past_last_of(thread >= bins.to && so_far.count - above <= kMostListed);
        if (hk::lane_id() == 0) places[hk::wave_id()].to = last;
        hk::block_barrier();
        const u32 past_most = all_waves().to;
        if (past_most != 0) bins.from = hk::Min{}(bins.from, past_most - 1);
    }
    // Known to the thread of the bin, or to the last.
    if (thread == hk::Min{}(bins.from, kGuessBins - 1)) listed = so_far.count;
    hk::block_barrier();
    const auto key_from = [&](u32 bin) { return bin <= first ? (first - bin) << kGuessShift : 0; };
    Guess g = {measure.reference, 1, 0, 0};
    if (bins.from != kNone) g.from = hk::Max{}(key_from(bins.from), 1);
    // Top-p after the others asks for the mass of what they keep: all of that is listed.
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

/// What a lane finds in its share of a tile.
struct Share {
    u32 listed = 0;  // a bit for each token, from the highest down
    u32 high = 0;    // likewise: what lies between the lists
    double between = 0.0;
    double mass = 0.0;
};

/// Sums of tokens: of probabilities in f64; of exponentials, which are rounded themselves, four in f32 first.
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
    // The sign of a difference tells which key is less: all are positive.
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
    // Of each wave, in two turns: a wave comes back to one only through the barrier of the other.
    struct Lds {
        double between[kWaves], mass[kWaves];
        u32 counts[kWaves];  // between, and from bit 16 on listed
    };
    __shared__ Lds lds[2];
    __shared__ alignas(16) u32 staged[kStaged];
    const u32 blocks = (p.segments + p.share - 1) / p.share;  // of a row
    const u32 b = hk::block_x() / blocks;                     // among the rows of the launch
    const u32 begin = hk::block_x() % blocks * p.share;       // first segment of this block
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
    u32 turn = 0;
    u32 n_before = 0;  // listed of the segment's earlier tiles
    const auto load = [&](u32 tile) {
        const RowBatch batch = {row, 1, tile + thread * kLen, cols};
        return RowT::load(batch.at<T, kAccess, true>(p.x, 0));
    };
    const u32 last = cols / p.segment < end ? cols : end * p.segment;
    RowT x = load(begin * p.segment);
    for (u32 tile = begin * p.segment; tile < last; tile += kTile) {
        auto v = hk::widen(x);
        // The next tile is on its way meanwhile.
        if (tile + kTile < last) x = load(tile + kTile);
        measure.apply(v, tile + thread * kLen, cols);
        const Share share = p.logits ? look<false>(v, g, wants_between, wants_mass) : look<true>(v, g, wants_between, wants_mass);
        const u32 counts = u32(__builtin_popcount(share.high)) | u32(__builtin_popcount(share.listed)) << 16;
        const u32 up_to = hk::wave_scan(counts);
        const double wave_between = wants_between ? hk::wave_scan(share.between) : 0.0;
        const double wave_mass = wants_mass ? hk::wave_scan(share.mass) : 0.0;
        Lds &now = lds[turn];
        turn ^= 1;
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
            // Zeros behind the last key are not to meet keys of a next tile.
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
    double masses[kMostSegments];   // kept
    u32 listed[kMostSegments];
    u32 chunks[kMostSegments + 1];  // of four listed keys, of the segments before this one
    hk::Vec<u32, 4> keys[kFewChunks];
    Amount between;                // of all segments
    double mass;
    u32 chosen;
    double before;
};

using FinishReducer = hk::GroupReducer<kFinishThreads, kFinishThreads>;

/// Counts a key in the bin of its digit. All lanes of the wave call it, `mine` tells which of them have one.
HK_FN void count_key(FinishLds &lds, const Search &search, Digit digit, bool mine, u32 key) {
    add_together(mine, key, [&](u32 tokens) {
        const u32 bin = (key - search.prefix) >> digit.shift;
        __scoped_atomic_fetch_add(&lds.counts[bin], tokens, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
        add_in_lds(lds.rests[bin], u64(tokens) * digit.rest(key));
    });
}

/// Looks for the threshold among the keys from `from` to `to`. `for_keys(use)` calls `use(key)` in whole waves for keys
/// that may be among them; `search` has what is above them. False if the filters keep them all: then that has them, too.
/// `all` is what there is down to `from`.
template <class ForKeys>
HK_FN bool search_range(Search &search, Amount &all, Filters &f, u32 from, u32 to, FinishReducer &block, FinishLds &lds,
                        ForKeys for_keys) {
    const u32 active = search.active;
    if (f.min_key < from) search.active &= ~Search::kMin;
    // As many bits as there are bins for, wherever the first of them begins.
    const u32 width_bits = 32 - u32(__builtin_clz((to - from) | 1));
    u32 shift = width_bits > kDigitBits ? width_bits - kDigitBits : 0;
    if ((to >> shift) - (from >> shift) >= kBins) ++shift;
    search.prefix = from >> shift << shift;
    u32 least = from, most = to;
    for (bool first = true;; first = false) {
        const Digit digit = {shift, kBins - 1};
        u32 begin = hk::thread_x();
        hk::forget(begin);
        for (u32 i = begin; i < kBins; i += kFinishThreads) {
            lds.rests[i] = 0;
            lds.counts[i] = 0;
        }
        hk::block_barrier();
        for_keys([&](u32 key) { count_key(lds, search, digit, key - least <= most - least, key); });
        hk::block_barrier();
        step<kFinishThreads, kBins>(search, f, digit, block, lds.step, [&](u32 i) { return Bin{lds.counts[i], lds.rests[i]}; });
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

/// What the filters keep of a row.
struct Found {
    u32 threshold;
    Amount kept;
    double total;    // mass of the row, if it is of logits
    u32 id = kNone;  // the only token, at a temperature of zero
};

/// Looks for the threshold with all filters; top-p second, of what the others keep, where that is asked for. `find(f, active)`
/// looks for that of some.
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

/// The listed keys of a row: where `walk` wrote them, and if they are few, in LDS, in chunks of four with zeros behind the last
/// key of a segment.
struct Lists {
    static constexpr u32 kOfChunk = 4;
    using Keys = hk::Vec<u32, kOfChunk>;

    hk::GlobalPtr<u32> first;
    u32 segment;   // tokens, as many as there is room for
    u32 segments;

    HK_FN Lists(const Params &p, u32 at) : first(Workspace(p).list(at, 0)), segment(p.segment), segments(p.segments) {}

    /// Brings them to LDS if they are few; the numbers of chunks and of keys are there. A thread has whatever chunk: it waits
    /// for its keys once, however many segments there are.
    HK_FN void bring(FinishLds &lds) const {
        const u32 chunks = hk::uniform(lds.chunks[segments]);
        if (chunks > kFewChunks) return;
        for (u32 c = hk::thread_x(); c < chunks; c += kFinishThreads) {
            u32 s = 0;  // the last that begins at or before this chunk
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

    /// Calls `use(key)` for what is listed of segment `s`, in whole waves: there is none where the key is 0.
    template <class Use>
    HK_FN void each_of(const FinishLds &lds, u32 s, Use use) const {
        if (hk::uniform(lds.chunks[segments]) <= kFewChunks) {
            return each_in_lds(lds, lds.chunks[s], lds.chunks[s + 1], 0, kWaveSize, use);
        }
        constexpr u32 kAhead = 2, kStep = kOfChunk * kWaveSize;
        const u32 listed = hk::uniform(lds.listed[s]);
        for (u32 step = 0; step < listed; step += kAhead * kStep) {
            const u32 place = step + hk::lane_id() * kOfChunk;
            Keys keys[kAhead];
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                if (step + i * kStep < listed) keys[i] = load(s, place + i * kStep < listed ? place + i * kStep : 0);
            }
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                if (step + i * kStep >= listed) break;
#pragma unroll
                for (u32 j = 0; j < kOfChunk; ++j) use(place + i * kStep + j < listed ? keys[i][j] : 0);
            }
        }
    }

    /// The same of all segments. Where they are, a wave takes every so many-th of the segments.
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

    /// Of the keys in chunks `begin` to `end`, every `step` as many as a wave has lanes, from `from` on.
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

/// Finds what is kept from what `walk` has found; false if the threshold is not among the listed keys.
HK_FN bool find_in_lists(const Params &p, u32 at, u64 row, const Guess &g, Found &found, FinishReducer &block, FinishLds &lds) {
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
    Lists(hk::read_anew(p), at).bring(lds);
    hk::block_barrier();
    u32 max_key = 0;
    Amount top = {}, all_top = {};
    Lists(hk::read_anew(p), at).each(lds, [&](u32 key) {
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
    // Without one of the largest in the list, what the largest is is not known.
    if (max_key < g.top) return false;
    return find_in_order(p, filters, active, found, [&](Filters f, u32 active) __attribute__((always_inline)) {
        if (f.p_of_total) {
            f.p *= found.total;
            f.p_of_total = false;
        }
        Search search;
        search.active = active;
        // The upper range, or the lower one if all of the upper is kept.
        const bool in_top = ((active & Search::kK) && all_top.count >= f.k) || ((active & Search::kP) && all_top.mass >= f.p) ||
                            ((active & Search::kMin) && f.min_key >= g.top);
        u32 from = g.top, to = max_key;
        hk::forget(from);  // what is derived from it would be kept in scalar registers
        for (bool look = in_top || from == g.from;; look = true) {
            Amount down_to_from;
            bool there = false;
            if (look) {
                there = search_range(search, down_to_from, f, from, to, block, lds, [&](auto use) {
                    Lists(hk::read_anew(p), at).each(lds, use);
                });
            } else {
                search.above = all_top;
            }
            found.threshold = there ? hk::Max{}(search.prefix, from) : 1;
            found.kept = {search.kept_count(), search.kept_mass()};
            if (there) return true;
            // If all that is listed is kept, the threshold is below it, if there is anything below.
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

/// Neighbouring tokens in each lane.
template <class T>
using FinishTile = hk::Row<T, kFinishThreads, int(kTile) / kFinishThreads, 1>;

/// Calls `f(its column, share)` for this lane's share of each tile of a segment.
template <Access kAccess, class T, class F>
HK_FN void for_row_tiles(const Params &p, u64 row, u32 s, F f) {
    for_tiles(p, s, [&](u32 tile) {
        const u32 column = tile + hk::thread_x() * FinishTile<T>::kLen;
        auto v = load_tile<kAccess, FinishTile<T>>(p, row, column);
        f(column, v);
    });
}

/// Finds what is kept from the row itself, by one block; `measure` gets the right reference.
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
            const Params &q = hk::read_anew(p);
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

/// Mass that is kept of each segment.
template <Access kAccess, class T>
HK_FN void segment_masses(const Params &p, u32 at, u64 row, const Guess &g, bool from_lists, const Measure &measure, u32 threshold,
                          FinishLds &lds) {
    if (from_lists) {
        const Lists lists(p, at);
        for (u32 s = hk::wave_id(); s < p.segments; s += kFinishThreads / kWaveSize) {
            double mass = 0.0;
            lists.each_of(lds, s, [&](u32 key) {
                mass += key >= threshold ? double(value_of(key)) : 0.0;
            });
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

/// The segment in which the sum of what is kept reaches the target, and what is kept before it; if rounding keeps it below,
/// the last that keeps a token.
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
    // Read anew, as all that is read of the parameters would be kept in scalar registers, of which there are too few.
    const auto output = [&] { return u64(hk::read_anew(p).first) + at; };
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
    const bool from_lists = g.top != kNone && find_in_lists(hk::read_anew(p), at, row, g, found, block, lds);
    row = row_of(hk::read_anew(p), output());
    if (!from_lists) find_in_row<kAccess, T>(hk::read_anew(p), row, measure, found, block, lds);
    if (thread == 0) {
        state->threshold = found.kept.count != 0 ? found.threshold : kNone;
        state->kept_mass = found.kept.mass;
    }
    const Params &q = hk::read_anew(p);
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

// Entry points of one dtype: name = launch, dtype, access if it is by elements. As `SEGMENTS` in src/sample.rs.
#define SAMPLE_SEGMENTS(T, access, suffix)                                                               \
    HK_ENTRY(sample_guess_##T##suffix, kGuessThreads, guess<hk::Access::access, hk::T>)                       \
    HK_ENTRY_FOR_WAVES(sample_walk_##T##suffix, kWalkThreads, 20, walk<hk::Access::access, hk::T>)           \
    HK_ENTRY_FOR_WAVES(sample_finish_##T##suffix, kFinishThreads, 16, finish<hk::Access::access, hk::T>) \
    HK_ENTRY(sample_renorm_##T##suffix, kThreads, renorm<hk::Access::access, hk::T>)

SAMPLE_SEGMENTS(bf16, Vectors, )
SAMPLE_SEGMENTS(f16, Vectors, )
SAMPLE_SEGMENTS(f32, Vectors, )
SAMPLE_SEGMENTS(bf16, Elements, _elements)
SAMPLE_SEGMENTS(f16, Elements, _elements)
SAMPLE_SEGMENTS(f32, Elements, _elements)
