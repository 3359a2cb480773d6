// decode.h: attention of few queries over a cache in pages: keys go from memory to registers.
//
//   s = scale (q . k);  s = softcap tanh(s / softcap);  s -= slope |i + off - j|;  masked: -inf
//   out = sum of softmax(s) v
//
// A block has 16 rows, (query, head of the group of a key head), and a split of the keys. Each of its four waves takes every fourth step of
// 32 keys: no wave waits for another, nothing is in LDS. S^T = K Q^T and O^T = V^T P^T: P stays in the lane that has its scores. K is
// loaded as fragments; a lane has 8 keys of V and some columns of them, which v_perm transposes. Two steps of a wave are in flight in turn.
// The waves' results meet in LDS at the end, in the order of waves. Splits meet in global memory, in ascending order: in the last block
// of a tile to arrive, or in a second launch (merge.hip), with the same bits.
//
// Pages are rows of columns, of a multiple of 16 tokens, or one for each sequence; or those of vLLM (columns.h). Floor: the bytes of the keys that the queries see.
// Source: Dao et al. 2023, "Flash-Decoding"; Milakov and Gimelshein 2018, algorithm 3.
#pragma once

#include "bytes.h"
#include "columns.h"
#include "keys.h"
#include "merge.h"
#include "outputs.h"
#include "problem.h"
#include "rows.h"
#include "softmax.h"
#include "ticket.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/types.h>
#include <hk/wave.h>
#include <hk/wave_tile.h>

namespace attention {

/// Splits of a sequence's keys, at most `all.splits.count`, of `all.splits.keys` each; 0: as many as there are, of equally many keys.
struct DecodeParams {
    Params all;
    u64 tickets;  // u32 [tiles of all key heads], zero; 0: a second launch merges
    u32 only_single;  // packed queries: of the sequences of one query; partial results are by sequence
    u32 by_sequence;  // a sequence has one page, of its own index: the table is not read
};

namespace decode {

inline constexpr int kWaves = 4;
inline constexpr int kThreads = kWaves * hk::kWaveSize;
inline constexpr int kDim = 16;  // rows of a tile
inline constexpr int kKeys = 32;  // of a step of a wave
inline constexpr u32 kKeysOfBlock = kWaves * kKeys;
inline constexpr u32 kMostParts = 128;  // splits that the last block of a tile merges

/// Elements with a factor for each token and key head, f32: KeyRows::descale is [pages, key heads, tokens], its strides are those of pages
/// and heads, and rows of a step are on 16 bytes.
template <class From>
struct TokenScaled : From {
    static constexpr bool kOfTokens = true;
};
template <class From>
inline constexpr bool kTokenScales = requires { From::kOfTokens; };

/// A tile of rows and its split of the keys: keys [begin, end) of the sequence.
struct Split : Work {
    u32 tile;  // of the launch
    i32 begin, end;
    u32 parts;  // splits of the tile that have keys, at least one
};
HK_FN KeyRange keys_of(const Params &, const Split &split) { return {split.begin, split.end - 1}; }

/// Rows of a part of a step, in a window: those that are not there read as zero.
struct WindowRows {
    static constexpr bool kZeroes = true;
    hk::Window window;
    HK_FN WindowRows() = default;
    HK_FN WindowRows(u64 at, u32 stride, u32 after, u32 bytes, bool there)
        : window(reinterpret_cast<GlobalPtr<const u8>>(at), there ? after * stride + bytes : 0) {}
    template <class E>
    HK_FN E load(u32 offset) const {
        return window.load<E>(offset);
    }
    HK_FN const WindowRows &row(u32) const { return *this; }  // offsets are from the first row on
};

/// The same by address, for sm_90, where a check of bounds and zeros in case that it fails are instructions of each load: the last row that is
/// there is read in place of those after it.
struct ClampedRows {
    static constexpr bool kZeroes = false;
    struct Row {
        u64 at;
        template <class E>
        HK_FN E load(u32 offset) const {
            // L1 has what registers do not hold.
            return hk::load_streaming(reinterpret_cast<GlobalPtr<const E>>(at + offset));
        }
    };
    u64 at;
    u32 stride, after;
    HK_FN ClampedRows() = default;
    HK_FN ClampedRows(u64 at, u32 stride, u32 after, u32, bool) : at(at), stride(stride), after(after) {}
    HK_FN Row row(u32 index) const { return {at + u64(index < after ? index : after) * stride}; }
};

template <int kRowsPerLane>
struct RowsOf {
    using Type = WindowRows;
};
template <>
struct RowsOf<2> {
    using Type = ClampedRows;
};

/// Walks along a wave's steps of the keys of a sequence in pages. The rows of a step are in two parts; those of pages that are not
/// in the cache are some of page 0, or read as zero.
class StepWalk {
    static constexpr int kParts = kKeys / kPageRows;
    using PartRows = typename RowsOf<hk::kRowsPerLane>::Type;
    /// `after` + 1 rows of a page from a token on, if they are there.
    struct Part {
        u32 page, token, after;
        bool there;
    };
    struct Rows {
        u64 page_0;
        i64 page_stride;
        u32 stride, bytes;  // of a token's row
        HK_FN Rows(const KeyRows &of, u32 page, u32 head, u32 bytes)
            : page_0(detail::uniform_address(of.row(page, head, 0))), page_stride(of.batch),
              stride(u32(of.token_group)), bytes(bytes) {}
        /// The factors of tokens.
        HK_FN Rows(const KeyRows &of, u32 head)
            : page_0(detail::uniform_address(of.descale + u64(i64(head) * of.descale_head) * 4)),
              page_stride(of.descale_batch * 4), stride(4), bytes(4) {}
        template <class To>
        HK_FN To of(const Part &part) const {
            const u64 at = page_0 + u64(i64(part.page) * page_stride) + u64(part.token) * stride;
            return {at, stride, part.after, bytes, part.there};
        }
    };
    Rows k_, v_;
    u64 table_;  // of the sequence; 0: its only page is the first one
    u32 n_pages_, tokens_, inverse_;
    u32 row_, end_;
    u32 entry_[kParts];  // of the next step: table entries are loaded a step ahead

  public:
    struct Windows {
        PartRows k[kParts], v[kParts];
        Part part[kParts];
        u32 missing;  // bit i + 1: rows of part i are of a page that is not in the cache (bit 0 is made in vector registers)
    };

    HK_FN StepWalk(const DecodeParams &d, const Split &split, u32 k_bytes, u32 v_bytes)
        : k_(d.all.cache.k, d.by_sequence ? split.sequence : 0, split.kv_head, k_bytes),
          v_(d.all.cache.v, d.by_sequence ? split.sequence : 0, split.kv_head, v_bytes) {
        const Pages &pages = d.all.pages;
        table_ = d.by_sequence ? 0 : detail::uniform_address(pages.table + split.pages * 4);
        n_pages_ = pages.n_pages, tokens_ = pages.tokens, inverse_ = pages.inverse;
        row_ = hk::uniform(u32(split.begin)) + hk::wave_id() * kKeys;
        end_ = hk::uniform(u32(split.end));
        look_up();
    }

    HK_FN Windows next() {
        Windows windows;
        windows.missing = 0;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            // No saturating subtraction: there is no scalar one.
            const u32 row = row_ + i * kPageRows, last = end_ - 1, most = kPageRows - 1;
            const bool inside = row < end_, there = entry_[i] < n_pages_;
            const u32 first = PartRows::kZeroes || inside ? row : last, after = last - first;
            const u32 token = hk::DivMod(first, tokens_, inverse_).remainder, rows = after < most ? after : most;
            windows.part[i] = {PartRows::kZeroes || there ? entry_[i] : 0, token, rows, inside && there};
            windows.k[i] = k_.of<PartRows>(windows.part[i]);
            windows.v[i] = v_.of<PartRows>(windows.part[i]);
            windows.missing |= (u32(!there) & u32(inside)) << (i + 1);
        }
        row_ += kKeysOfBlock;
        look_up();
        return windows;
    }
    /// The factors of tokens of a part, for keys or values.
    HK_FN static hk::Window factors(const KeyRows &of, u32 head, const Part &part) {
        return Rows(of, head).of<WindowRows>(part).window;
    }

  private:
    HK_FN void look_up() {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 row = row_ + i * kPageRows, last = end_ - 1;
            const u32 page = hk::DivMod(row < last ? row : last, tokens_, inverse_).quotient;
            entry_[i] = table_ ? u32(index_at(table_, page)) : 0;
        }
    }
};

/// Where a kernel's parameters have those of decode: they are all of them.
struct Alone {
    using Kernel = DecodeParams;
    HK_FN static const DecodeParams &of(const Kernel &p) { return p; }
};

/// Elements in pieces of 16 bytes: K of columns, V of tokens.
template <class From>
struct InPieces : From {
    static constexpr bool kPieces = true;
};
template <class From>
inline constexpr bool kOfPieces = requires { From::kPieces; };

/// How queries are multiplied by bytes of keys. kTerms = 0: keys are widened. sm_90's sums of fp8 products have few bits; three terms
/// beside steps of 64 keys in pieces are more registers than there are.
struct NoSplit {
    static constexpr int kTerms = 0;
};
template <class From, class T>
struct QuerySplitOf {
    using Type = NoSplit;
};
template <class From, class T>
    requires(hk::kRowsPerLane == 1 && requires { From::kQuant; } &&
             (!kOfPieces<From> || SplitQuery<T, From::kQuant>::kTerms == 2))
struct QuerySplitOf<From, T> {
    using Type = SplitQuery<T, From::kQuant>;
};

/// Which operands values are: int8 as OffsetValues. Factors of tokens are a part of the probabilities: they may take these out of the range of
/// f16. Several tiles of rows, and pieces of 256 columns in f16, have no registers for the sum of what is to be taken away.
template <class From, class T, int kD, int kM>
struct ValuesOf : From {
    using Element = T;
    using Probability = T;
};
template <class From, class T, int kD>
    requires(hk::kRowsPerLane == 1 &&
             (__is_same(T, hk::bf16) || !(kTokenScales<From> || (kOfPieces<From> && kD > 128))) &&
             requires { requires From::kQuant == hk::QuantType::I8; })
struct ValuesOf<From, T, kD, 1> : OffsetValues<T> {};

/// Registers of sm_90 hold one tile of rows.
template <int kTiles>
inline constexpr int kTilesOfTarget = hk::kRowsPerLane == 1 ? kTiles : 1;

/// T: type of products; From: the cache; kD: columns, at most; kM: tiles of rows, which share the keys that a wave loads; In: as Alone.
template <class T, class From, int kD, int kM = 1, class In = Alone>
class Decode {
    static constexpr u32 kRows = kM * kDim;
    static constexpr bool kPieces = kOfPieces<From>;
    static constexpr bool kClamps = !kPieces && !RowsOf<hk::kRowsPerLane>::Type::kZeroes;
    static constexpr int kOwn = hk::kRowsPerLane;
    static constexpr int kBytes = From::kBytes;
    using Mma = hk::FragMma<T, T, kDim>;
    using Values = ValuesOf<From, T, kD, kM>;
    using MmaOfValues = hk::FragMma<typename Values::Element, typename Values::Element, kDim>;
    static constexpr bool kOffset = requires { Values::kOffset; };
    using QuerySplit = typename QuerySplitOf<From, T>::Type;
    using Places = hk::AccLayout<kDim>;
    using Run = Runs<kBytes, kDim>;
    static constexpr int kStep = kPieces ? int(Run::kKeys) : kKeys;  // keys
    static constexpr u32 kStride = kWaves * kStep;
    static constexpr int kTilesOfStep = kStep / kDim;
    static constexpr int kSteps = kD / 32;  // fragments of a row of Q or K
    static constexpr int kKLoads = kD * kBytes / 64;  // of a row of K
    static constexpr int kCols = kD / kDim;  // columns of V^T, one for each MFMA
    // Rows of V that are too short for the accesses of 16 lanes: lanes of 8 load half of the keys, and exchange halves.
    static constexpr int kShare = !kPieces && kCols * kBytes < 16 ? 2 : 1;
    static constexpr int kVBytes = kCols * kBytes * kShare;  // of a key
    static constexpr int kVAccess = kVBytes < 16 ? kVBytes : 16;
    static constexpr int kVParts = kVBytes / kVAccess;
    static constexpr int kVKeys = 4 / kShare;  // of a tile
    // sm_90 has registers for one.
    static constexpr int kSets = kOwn == 1 ? 2 : 1;
    static constexpr bool kSplit = QuerySplit::kTerms != 0;
    static constexpr int kQFrags = kSplit ? QuerySplit::kTerms * kKLoads : kSteps;  // of a row of Q
    // Queries of many rows are in LDS.
    static constexpr bool kQueriesInLds = kOwn > 1 ? kSteps >= 4 : kM > 1;

    struct K {
        Vec<u32, 4> row[kTilesOfStep][kOwn][kKLoads];
    };
    struct RowsOfV {
        Vec<u32, kVAccess / 4> key[kTilesOfStep][kOwn][kVKeys][kVParts];
    };
    struct ColumnsOfV {
        Vec<u32, 4> column[kOwn][kCols];
    };
    template <bool, class A, class B>
    struct Either {
        using Type = A;
    };
    template <class A, class B>
    struct Either<false, A, B> {
        using Type = B;
    };
    using V = typename Either<kPieces, ColumnsOfV, RowsOfV>::Type;
    static constexpr bool kScales = kTokenScales<From>;
    using Walk = typename Either<kPieces, RunWalk<Run, kOwn, kStride>, StepWalk>::Type;
    using Windows = typename Walk::Windows;
    /// Factors of the lane's keys of a step: runs of neighbouring ones.
    static constexpr int kRuns = Places::kElements / (hk::kMmaRows * kOwn);
    struct Scales {
        Vec<float, hk::kMmaRows> k[kTilesOfStep][kRuns], v[kTilesOfStep][kRuns];
    };
    struct Row {
        u32 query, head;
        bool valid;
    };
    struct Keys {
        u32 first, n;  // from key 0, less the lane's first score, on
    };
    static constexpr u64 kNoRow = 0;

  public:
    struct Lds {
        Vec<float, 2> sums[kWaves][kRows];
        union {
            struct {
                Vec<u32, 4> q[kQueriesInLds ? kM * kQFrags : 1][kOwn][kQueriesInLds ? hk::kWaveSize : 1];
                float unit[kQueriesInLds ? kRows : 1];
            };
            Vec<float, 4> o[kWaves][kDim][kDim];
            Vec<float, 2> parts[kMostParts][kDim + 1];  // one more: lanes of a row read parts of different banks
        };
        u32 last;
    };

  private:
    const typename In::Kernel &kernel_;
    const DecodeParams &d_;
    const Split &split_;
    Lds &lds_;
    hk::Frag q_[kQueriesInLds ? 1 : kM][kQFrags];
    float unit_[kM];  // kSplit: of the lane's row of each tile
    hk::WaveTile<Mma, kStep, kDim> s_[kM];
    hk::WaveTile<MmaOfValues, kD + (kOffset ? kDim : 0), kDim> o_[kM];  // kOffset: at last, what is to be added to all
    OnlineSoftmax<kDim, typename Values::Probability> softmax_[kM];
    float scale_;  // of products, beside the unit; in units of log2, unless scores are made one by one
    bool one_by_one_;
    // Of the lane's rows. Those of many tiles are computed where they are needed: in edge steps, and scores made one by one.
    static constexpr bool kKeepsRows = kM == 1 && kOwn == 1;
    struct Factors {
        float row_scale, slope;
    };
    Factors factors_[kKeepsRows ? kOwn : 1];
    Keys visible_[kKeepsRows ? kOwn : 1];
    i32 inner_first_, inner_last_;  // keys that all rows see
    u32 k_offset_[kOwn][kKLoads], v_offset_[kOwn][kPieces ? kCols : kVParts];
    u32 v_stride_;
    bool k_tail_;  // kPieces: K has no whole number of loads
    i32 first_;  // kPieces: keys before it are not seen

    HK_FN const Params &params() const { return In::of(hk::reload_params(kernel_)).all; }

    HK_FN Row row(const Params &p, u32 index) const {
        const hk::DivMod at(split_.first + index, p.group, p.group_inverse);
        return {at.quotient, split_.kv_head * p.group + at.remainder, at.quotient < split_.q_len};
    }
    HK_FN Row own_row(const Params &p, u32 m, u32 r) const {
        return row(p, m * kDim + hk::row_of_lane<kDim>(lane_of_rows(), r));
    }
    /// The lane, where rows are computed again and again: of many tiles they would be moved out of the loop, into registers of their own.
    HK_FN static u32 lane_of_rows() {
        u32 lane = hk::lane_id();
#if defined(HK_AMD)
        if constexpr (!kKeepsRows) asm volatile("" : "+v"(lane));
#endif
        return lane;
    }
    /// Rows of the block's tiles that are there.
    HK_FN u32 rows_used(const Params &p) const {
        const u32 left = split_.q_len * p.group - split_.first;
        return left < kRows ? left : kRows;
    }

    /// Column of Q and K of a lane's first element of fragment `step`.
    HK_FN static u32 key_column(int step, u32 group) {
        constexpr int kOfAccess = 16 / kBytes;
        const u32 at = step * 8;
        return at / kOfAccess * kOfAccess * 4 + group * kOfAccess + at % kOfAccess;
    }
    /// Key of a step of the lane's i-th score, those of each of its rows counted alone.
    HK_FN static constexpr u32 key_of(u32 lane, u32 i) {
        const u32 n = Places::n(lane, i);
        return kPieces ? Run::key_of_row(n) : n;
    }
    /// Column of the output of row n of the j-th fragment of V^T.
    HK_FN static u32 value_column(u32 n, u32 j) {
        if constexpr (kShare == 2) return n % 8 * 2 * kCols + n / 8 * kCols + j;
        constexpr u32 kOfAccess = kPieces ? 4 : kCols / kVParts;
        return j / kOfAccess * kOfAccess * kDim + n * kOfAccess + j % kOfAccess;
    }

    HK_FN void load_queries() {
        const Params &p = params();
        const u32 group = hk::group_of_lane<kDim>(hk::lane_id());
        const auto of_tile = [&](u32 m, hk::Frag(&to)[kQFrags], float &unit) __attribute__((always_inline)) {
            hk::Frag q[kSteps];
            hk::PerRow<u64> at;
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const Row own = own_row(p, m, r);
                at.row[r] =
                    own.valid ? row_address(p.q, split_, p.sequences.q_starts != 0, own.query, own.head) : kNoRow;
            }
            // Inlined twice: else `this` would be in memory on sm_90, and accumulators with it.
            const auto load = [&](auto part) __attribute__((always_inline)) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const u32 col = key_column(step, group);
                    q[step] = hk::joined(hk::per_row([&](u32 r) {
                        Vec<u32, 4> v = 0;
                        if (at.row[r] != kNoRow && col < p.dqk) v = part(at.row[r], col);
                        return v;
                    }));
                }
            };
            // All loads of vectors are in flight at once.
            if (p.q_type == attention::kOwn && p.q_vectorized) {
                load([](u64 row, u32 col) { return *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(row + col * 2); });
            } else {
                const u32 element = p.q_type == attention::kOwn ? sizeof(T) : 1;
                load([&](u64 row, u32 col) {
                    const auto from = reinterpret_cast<GlobalPtr<const u8>>(row + col * element);
                    return __builtin_bit_cast(
                        Vec<u32, 4>, load_row<T, 8>(from, p.q_type, p.q_vectorized, element, i32(p.dqk - col)));
                });
            }
            if constexpr (kSplit) {
                unit = split_queries(q, to);
            } else {
#pragma unroll
                for (int step = 0; step < kSteps; ++step) to[step] = q[step];
            }
        };
        if constexpr (kQueriesInLds) {
            // Waves have tiles in turn. A fragment is read as it is written: without bank conflicts.
#pragma unroll 1
            for (u32 m = hk::wave_id(); m < kM; m += kWaves) {
                hk::Frag q[kQFrags];
                float unit = 1.0f;
                of_tile(m, q, unit);
#pragma unroll
                for (int i = 0; i < kQFrags; ++i) {
                    auto &to = lds_.q[m * kQFrags + i];
                    if constexpr (kOwn == 1)
                        to[0][hk::lane_id()] = q[i];
                    else
                        to[0][hk::lane_id()] = __builtin_shufflevector(q[i], q[i], 0, 4, 1, 5),
                        to[1][hk::lane_id()] = __builtin_shufflevector(q[i], q[i], 2, 6, 3, 7);
                }
                if (kSplit && group == 0) lds_.unit[m * kDim + hk::row_of_lane<kDim>(hk::lane_id())] = unit;
            }
            hk::block_barrier();
            if constexpr (kSplit) {
#pragma unroll
                for (int m = 0; m < kM; ++m) unit_[m] = lds_.unit[m * kDim + hk::row_of_lane<kDim>(hk::lane_id())];
            }
        } else {
#pragma unroll
            for (int m = 0; m < kM; ++m) of_tile(m, q_[m], unit_[m]);
        }
    }
    /// A lane's columns of its row to those of terms, and the row's unit.
    HK_FN static float split_queries(const hk::Frag (&q)[kSteps], hk::Frag (&terms)[kQFrags]) {
        Vec<float, 16> v[kKLoads];
        hk::AbsMax most;
#pragma unroll
        for (int i = 0; i < kKLoads; ++i) {
            const auto both = __builtin_shufflevector(q[2 * i], q[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7);
            v[i] = hk::widen<T, 16>(__builtin_bit_cast(Vec<T, 16>, both));
            most.add(v[i]);
        }
        const QuerySplit split(hk::reduce_over_lane_groups<kDim>(most.bits, hk::MaxBits{}));
#pragma unroll
        for (int i = 0; i < kKLoads; ++i) {
            Vec<u32, 4> parts[QuerySplit::kTerms];
            split.split(v[i], parts);
#pragma unroll
            for (int t = 0; t < QuerySplit::kTerms; ++t) terms[t * kKLoads + i] = parts[t];
        }
        return split.unit;
    }
    HK_FN hk::Frag query_frag(int m, int i) const {
        if constexpr (!kQueriesInLds) {
            return q_[m][i];
        } else {
            const auto &from = lds_.q[m * kQFrags + i];
            // In the order of mma.sync's operand: rows alternate.
            if constexpr (kOwn == 1)
                return from[0][hk::lane_id()];
            else
                return __builtin_shufflevector(from[0][hk::lane_id()], from[1][hk::lane_id()], 0, 2, 4, 6, 1, 3, 5, 7);
        }
    }

    HK_FN float cache_scale(const KeyRows &rows) const {
        return kScales ? 1.0f : rows.scale(split_.sequence, split_.kv_head);
    }

    /// Key of a tile of a lane's first values.
    HK_FN static u32 value_key(u32 n, u32 group) { return group * 4 + (kShare == 2 ? n / 8 * 2 : 0); }

    HK_FN void set_up() {
        const Params &p = params();
        const u32 lane = hk::lane_id(), group = hk::group_of_lane<kDim>(lane);
        v_stride_ = u32(p.cache.v.token_group);
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const u32 n = hk::row_of_lane<kDim>(lane, r);
            if constexpr (kPieces) {
                const u32 pieces = p.dqk * kBytes / 16, last = p.dv - 1;
                k_tail_ = hk::uniform(p.dqk * kBytes) != kKLoads * 64;
#pragma unroll
                for (u32 i = 0; i < kKLoads; ++i) {
                    const u32 piece = i * 4 + group;
                    k_offset_[r][i] = n % Run::kRows * 16 + (piece < pieces ? piece : 0) * u32(p.cache.k.column_group);
                }
#pragma unroll
                for (u32 j = 0; j < kCols; ++j) {
                    const u32 col = value_column(n, j);
                    v_offset_[r][j] = (col < last ? col : last) * u32(p.cache.v.column);
                }
                continue;
            }
            // Beside the last column Q is zero, and outputs are not stored.
            const auto offset = [](u32 byte, u32 bytes, u32 row) __attribute__((always_inline)) {
                if (kClamps) return byte < bytes ? byte : 0;
                return byte < bytes ? row + byte : hk::Window::kOutOfBounds;
            };
#pragma unroll
            for (int i = 0; i < kKLoads; ++i)
                k_offset_[r][i] = offset(i * 64 + group * 16, p.dqk * kBytes, n * u32(p.cache.k.token_group));
#pragma unroll
            for (int i = 0; i < kVParts; ++i) {
                const u32 byte = (i * kDim + (kShare == 2 ? n % 8 : n)) * kVAccess;
                v_offset_[r][i] = offset(byte, p.dv * kBytes, value_key(n, group) * v_stride_);
            }
        }

        const Scores &of = p.scores;
        scale_ = of.scale * cache_scale(p.cache.k);
        // A factor that is not above 0 does not leave masked scores at -inf.
        one_by_one_ = of.softcap != 0.0f || of.alibi || p.q_descale || !(scale_ > 0.0f);
        if (!one_by_one_) scale_ *= kLog2E;
        const KeyRange top = key_range(p, split_, row(p, 0).query);
        const KeyRange bottom = key_range(p, split_, row(p, rows_used(p) - 1).query);
        inner_first_ = i32(hk::uniform(u32(bottom.first))), inner_last_ = i32(hk::uniform(u32(top.last)));
        if constexpr (kKeepsRows) {
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                visible_[r] = find_visible(p, 0, r);
                factors_[r] = one_by_one_ ? find_factors(p, 0, r) : Factors{1.0f, 0.0f};
            }
        }
    }
    HK_FN Keys find_visible(const Params &p, u32 m, u32 r) const {
        const Row own = own_row(p, m, r);
        const KeyRange keys = key_range(p, split_, own.query);
        return {u32(keys.first) - key_of(lane_of_rows(), 0),
                own.valid && keys.first <= keys.last ? u32(keys.last - keys.first + 1) : 0};
    }
    HK_FN Factors find_factors(const Params &p, u32 m, u32 r) const {
        const Row own = own_row(p, m, r);
        Factors of = {1.0f, 0.0f};
        if (!own.valid) return of;
        if (p.q_descale)
            of.row_scale = reinterpret_cast<GlobalPtr<const float>>(
                p.q_descale)[i64(split_.sequence) * p.q_descale_batch + i64(own.head) * p.q_descale_head];
        if (p.scores.alibi)
            of.slope = reinterpret_cast<GlobalPtr<const float>>(
                p.scores.alibi)[i64(split_.sequence) * p.scores.alibi_batch + own.head];
        return of;
    }
    HK_FN Keys visible(u32 m, u32 r) const {
        if constexpr (kKeepsRows)
            return visible_[r];
        else
            return find_visible(params(), m, r);
    }
    HK_FN Factors factors(u32 m, u32 r) const {
        if constexpr (kKeepsRows)
            return factors_[r];
        else
            return find_factors(params(), m, r);
    }

    HK_FN static Vec<u32, 4> piece_at(u64 at) { return *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(at); }
    HK_FN K load_keys(const Windows &windows) const {
        K k;
        if constexpr (kPieces) {
#pragma unroll
            for (int r = 0; r < kOwn; ++r) {
#pragma unroll
                for (int i = 0; i < kKLoads; ++i) {
                    const u64 at = windows.k[r] + k_offset_[r][i];
#pragma unroll
                    for (u32 t = 0; t < kTilesOfStep; ++t) k.row[t][r][i] = piece_at(at + t * Run::kRows * 16);
                }
            }
            return k;
        } else {
#pragma unroll
            for (int t = 0; t < kTilesOfStep; ++t) {
#pragma unroll
                for (int r = 0; r < kOwn; ++r) {
                    const auto row = windows.k[t].row(hk::row_of_lane<kDim>(hk::lane_id(), r));
#pragma unroll
                    for (int i = 0; i < kKLoads; ++i)
                        k.row[t][r][i] = row.template load<Vec<u32, 4>>(k_offset_[kClamps ? 0 : r][i]);
                }
            }
            return k;
        }
    }
    /// The first `skip` rows are zero.
    HK_FN V load_values(const Windows &windows, [[maybe_unused]] u32 skip = 0) const {
        V v;
        if constexpr (kPieces) {
#pragma unroll
            for (int r = 0; r < kOwn; ++r) {
#pragma unroll
                for (int j = 0; j < kCols; ++j) v.column[r][j] = piece_at(windows.v + v_offset_[r][j]);
            }
            return v;
        } else {
#pragma unroll
            for (int t = 0; t < kTilesOfStep; ++t) {
#pragma unroll
                for (int r = 0; r < kOwn; ++r) {
                    const u32 n = hk::row_of_lane<kDim>(hk::lane_id(), r);
                    const u32 key = value_key(n, hk::group_of_lane<kDim>(hk::lane_id()));
#pragma unroll
                    for (u32 i = 0; i < kVKeys; ++i) {
                        const bool seen = t * kDim + key + i >= skip;
                        const auto row = windows.v[t].row(seen ? key + i : skip);
#pragma unroll
                        for (int part = 0; part < kVParts; ++part) {
                            using Access = Vec<u32, kVAccess / 4>;
                            const u32 offset = v_offset_[r][part];
                            if constexpr (kClamps)
                                v.key[t][r][i][part] = row.template load<Access>(offset);
                            else
                                v.key[t][r][i][part] = row.template load<Access>(
                                    (seen ? offset : hk::Window::kOutOfBounds) + i * v_stride_);
                        }
                    }
                }
            }
            return v;
        }
    }
    /// In place: of pieces, zeros beside the columns of K, and for values that no query sees; of rows, for values of pages that are not there.
    HK_FN void clean([[maybe_unused]] K &k, V &v, u32 missing, [[maybe_unused]] i32 at) const {
        if constexpr (kClamps) {
            if (missing == 0) return;
#pragma unroll
            for (int t = 0; t < kTilesOfStep; ++t) {
                const u32 keep = missing >> (t + 1) & 1 ? 0 : ~0u;
#pragma unroll
                for (auto &rows : v.key[t]) {
#pragma unroll
                    for (auto &row : rows) {
#pragma unroll
                        for (auto &part : row) part &= keep;
                    }
                }
            }
        }
        if constexpr (kPieces) {
            const u32 group = hk::group_of_lane<kDim>(hk::lane_id());
            if (k_tail_) {
                const u32 pieces = params().dqk * kBytes / 16;
#pragma unroll
                for (int i = 0; i < kKLoads; ++i) {
                    const u32 keep = i * 4 + group < pieces ? ~0u : 0;
#pragma unroll
                    for (int t = 0; t < kTilesOfStep; ++t) {
#pragma unroll
                        for (int r = 0; r < kOwn; ++r) k.row[t][r][i] &= keep;
                    }
                }
            }
            const i32 end = i32(hk::uniform(u32(split_.end)));
            // Any int8 is a number.
            if (!kOffset && (missing != 0 || at < first_ || at + kStep > end)) {
                const i32 run = at + i32(group * Run::kRun);
                const auto mask = run_mask<kBytes>(first_ - run, missing >> group & 1 ? 0 : end - run);
#pragma unroll
                for (int r = 0; r < kOwn; ++r) {
#pragma unroll
                    for (int j = 0; j < kCols; ++j) v.column[r][j] &= mask;
                }
            }
        }
    }

    /// Those of the first `skip` values are zero.
    HK_FN Scales load_scales([[maybe_unused]] const Windows &windows, [[maybe_unused]] u32 skip = 0) const {
        Scales scales;
        if constexpr (kScales) {
            // Windows of factors are made when those of values are not needed any more, of parameters that are loaded again: else SGPRs are
            // spilled.
            hk::sched_barrier();
            const KeysValues &cache = params().cache;
#pragma unroll
            for (int t = 0; t < kTilesOfStep; ++t) {
                const hk::Window k = Walk::factors(cache.k, split_.kv_head, windows.part[t]);
                const hk::Window v = Walk::factors(cache.v, split_.kv_head, windows.part[t]);
#pragma unroll
                for (int run = 0; run < kRuns; ++run) {
                    using Run = Vec<float, hk::kMmaRows>;
                    const u32 offset = Places::n(hk::lane_id(), run * hk::kMmaRows * kOwn) * 4;
                    scales.k[t][run] = k.template load<Run>(offset);
                    scales.v[t][run] = v.template load<Run>(offset);
                    if (skip != 0) {
#pragma unroll
                        for (u32 i = 0; i < hk::kMmaRows; ++i) {
                            if (t * kDim + offset / 4 + i < skip) scales.v[t][run][i] = 0.0f;
                        }
                    }
                    if constexpr (kOwn > 1) {
                        // There a window has the whole of a load or nothing.
#pragma unroll
                        for (u32 i = 0; i < hk::kMmaRows; ++i) {
                            if (offset / 4 + i > windows.part[t].after) scales.v[t][run][i] = 0.0f;
                        }
                    }
                }
            }
        }
        return scales;
    }
    /// Scores or probabilities of keys, each times its factor.
    HK_FN void scale_keys(int m, const auto &scales) {
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            map_pairs(s_[m], r, [&](int i, Vec<float, 2> pair) {
                constexpr int kOfRun = hk::kMmaRows * kOwn;
                const auto &run = scales[i / Places::kElements][i % Places::kElements / kOfRun];
                return pair * Vec<float, 2>{run[i % hk::kMmaRows], run[i % hk::kMmaRows + 1]};
            });
        }
    }

    HK_FN hk::Frag key_frag(const K &k, int t, int step) const {
        return hk::joined(hk::per_row([&](u32 r) {
            constexpr int kOfLoad = 2 / kBytes;  // fragments
            const Vec<u32, 4> raw = k.row[t][r][step / (kBytes == 1 ? 2 : 1)];
            if constexpr (kOfLoad == 1)
                return raw;
            else
                return step % 2 ? From::template widened<4>(raw.hi) : From::template widened<4>(raw.lo);
        }));
    }

    /// A lane's columns of a row of V^T, by keys in the order of accumulators: as they are stored.
    static constexpr int kRaw = kCols * kBytes / 4;
    struct Columns {
        Vec<u32, kRaw> key[kTilesOfStep * 4];
    };
    HK_FN Columns columns_of(const V &v, int r) const {
        Columns columns;
#pragma unroll
        for (int t = 0; t < kTilesOfStep; ++t) {
            auto *raw = columns.key + t * 4;
#pragma unroll
            for (int i = 0; i < kVKeys; ++i) {
                const auto &key = v.key[t][r][i];
#pragma unroll
                for (int w = 0; w < kRaw; ++w) {
                    if constexpr (kShare == 1) {
                        raw[i][w] = key[w / 4][w % 4];
                        if constexpr (kOffset) raw[i][w] ^= Values::kFlip;
                    } else {
                        u32 low = key[0][w], high = key[0][w + kRaw];
                        exchange_halves(low, high);
                        raw[i][w] = low, raw[i + kVKeys][w] = high;
                    }
                }
            }
        }
        return columns;
    }
    /// Of lanes whose rows of MFMAs differ by 8: the lower one gets the other's `low` as `high`, and gives its `high` for it.
    HK_FN static void exchange_halves(u32 &low, u32 &high) {
#if defined(HK_AMD)
        constexpr int kRotateRow8 = 0x128, kUpperBanks = 0xc, kLowerBanks = 0x3;
        const u32 own = low;
        if constexpr (kOffset) {
            // Flipped with what they keep: the exclusive or that adds the other lane's half is the move's.
            u32 upper = hk::lane_id() & 8 ? ~0u : 0;
            asm("" : "+v"(upper));  // bits: selects are an instruction more
            const u32 from_high = u32(__builtin_amdgcn_update_dpp(0, int(high), kRotateRow8, 0xf, kUpperBanks, false));
            const u32 from_low = u32(__builtin_amdgcn_update_dpp(0, int(own), kRotateRow8, 0xf, kLowerBanks, false));
            u32 kept_low = (own & ~upper) ^ Values::kFlip, kept_high = (high & upper) ^ Values::kFlip;
            asm(""
                : "+v"(kept_low), "+v"(kept_high));  // else its operation takes the exclusive or, and the move is alone
            low = from_high ^ kept_low, high = from_low ^ kept_high;
            return;
        }
        low = u32(__builtin_amdgcn_update_dpp(int(low), int(high), kRotateRow8, 0xf, kUpperBanks, false));
        high = u32(__builtin_amdgcn_update_dpp(int(high), int(own), kRotateRow8, 0xf, kLowerBanks, false));
#else
        hk::transpose_lanes<16>(low, high);
#endif
    }
    /// Columns j and j + 1, j even, of eight keys. Bytes are widened in pairs of columns, and packed in pairs of keys.
    HK_FN static void value_frags(const Columns &columns, u32 j, Vec<u32, 4> (&column)[2]) {
        if constexpr (kBytes == 2) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const hk::detail::SelectHalf half(e != 0);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    column[e][i] = half(columns.key[2 * i][j / 2], columns.key[2 * i + 1][j / 2]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 pairs[2];
                Values::across(columns.key[2 * i][j / 4], columns.key[2 * i + 1][j / 4], j % 4 / 2, pairs);
                column[0][i] = pairs[0], column[1][i] = pairs[1];
            }
        }
    }

    HK_FN void multiply_keys(const K &k, u32 missing) {
        if constexpr (kSplit) {
            multiply_bytes(k);
        } else {
#pragma unroll
            for (int t = 0; t < kTilesOfStep; ++t) {
#pragma unroll
                for (int m = 0; m < kM; ++m) s_[m].acc[0][t] = typename Mma::Acc(0.0f);
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const hk::Frag w = key_frag(k, t, step);
#pragma unroll
                    for (int m = 0; m < kM; ++m) {
                        const hk::Frag q = query_frag(m, step);
                        s_[m].acc[0][t] = Mma::mma(&w, &q, s_[m].acc[0][t]);
                    }
                }
            }
        }
        if (missing != 0) {
            // Kept a branch: selects would be in each step. Sums, which wait for the MFMAs that they read.
            asm volatile("");
            const u32 group = hk::group_of_lane<kDim>(hk::lane_id());
#pragma unroll
            for (int i = 0; i < kM * kTilesOfStep; ++i) {
                const int m = i / kTilesOfStep, t = i % kTilesOfStep;
                s_[m].acc[0][t] += missing >> (kPieces ? group : t + 1) & 1 ? __builtin_nanf("") : 0.0f;
            }
        }
    }

    /// Keys as they are, by each term of the queries.
    HK_FN void multiply_bytes(const K &k) {
        // Operands of eight registers are too many beside pieces of 256 columns.
        using Bytes = typename QuerySplit::template Mma<(kPieces && kD > 128 ? 64 : kD)>;
        // A tile of keys after the other, unless it is to save reads of queries from LDS.
        constexpr int kAtOnce = kQueriesInLds ? kTilesOfStep : 1;
#pragma unroll
        for (int first = 0; first < kTilesOfStep; first += kAtOnce) {
            typename Bytes::Acc acc[kM][kAtOnce] = {};
#pragma unroll
            for (int term = 0; term < QuerySplit::kTerms; ++term) {
#pragma unroll
                for (int i = 0; i < kKLoads; i += Bytes::kLoads) {
#pragma unroll
                    for (int m = 0; m < kM; ++m) {
                        hk::Frag q[Bytes::kLoads];
#pragma unroll
                        for (int j = 0; j < Bytes::kLoads; ++j) q[j] = query_frag(m, term * kKLoads + i + j);
#pragma unroll
                        for (int t = 0; t < kAtOnce; ++t) acc[m][t] = Bytes::mma(&k.row[first + t][0][i], q, acc[m][t]);
                    }
                }
#pragma unroll
                for (int m = 0; m < kM; ++m) {
#pragma unroll
                    for (int t = 0; t < kAtOnce; ++t) QuerySplit::after(term, acc[m][t], s_[m].acc[0][first + t]);
                }
            }
        }
    }

    /// Products of the step at key `at` to probabilities.
    HK_FN void score(i32 at, const Scales &scales) {
#pragma unroll
        for (int m = 0; m < kM; ++m) score(m, at, scales);
    }
    HK_FN void score(int m, i32 at, [[maybe_unused]] const Scales &scales) {
        if constexpr (kScales) scale_keys(m, scales.k);
        float scale = scale_of(m);
        if (one_by_one_) {
            make_scores(m, at);
            scale = 1.0f;
        }
        if (at < inner_first_ || at + kStep - 1 > inner_last_) {
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const Keys keys = visible(m, r);
                const u32 of_lane = u32(at) - keys.first;
                map_pairs(s_[m], r, [&](int i, Vec<float, 2> pair) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        if (key_of(0, i + j) + of_lane >= keys.n) pair[j] = kMinusInf;
                    }
                    return pair;
                });
            }
        }
        softmax_[m].update(s_[m], o_[m], scale);
        if constexpr (kScales) scale_keys(m, scales.v);
    }
    HK_FN float scale_of([[maybe_unused]] int m) const {
        if constexpr (kSplit) return scale_ * unit_[m];
        return scale_;
    }
    HK_FN void make_scores(int m, i32 at) {
        const Params &p = params();
        const float softcap = p.scores.softcap, inverse = 1.0f / softcap;
        const i32 off = i32(split_.keys()) - i32(split_.q_len);
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const auto [row_scale, slope] = factors(m, r);
            float factor = scale_of(m) * row_scale;
            const i32 place = i32(own_row(p, m, r).query) + off - at - i32(key_of(lane_of_rows(), 0));
            if (softcap != 0.0f) {
                map_pairs(s_[m], r, [&](int, Vec<float, 2> pair) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) pair[j] = softcap * hk::tanh(pair[j] * factor * inverse);
                    return pair;
                });
                factor = 1.0f;
            }
            map_pairs(s_[m], r, [&](int i, Vec<float, 2> pair) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float away = __builtin_fabsf(float(place - i32(key_of(0, i + j))));
                    pair[j] = (pair[j] * factor - slope * away) * kLog2E;
                }
                return pair;
            });
        }
    }

    HK_FN void multiply_values(const V &v) {
        using Element = typename Values::Element;
        decltype(s_[0].template as_operand<Element, true>(0)) p[kM];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            p[m] = s_[m].template as_operand<Element, true>(0);
            if constexpr (kOffset) {
                const hk::Frag offset = Values::kOffset;
#pragma unroll
                for (const auto &frag : p[m].frag)
                    o_[m].acc[0][kCols] = MmaOfValues::mma(&offset, &frag, o_[m].acc[0][kCols]);
            }
        }
        if constexpr (kPieces) {
#pragma unroll
            for (int half = 0; half < kBytes % 2 + 1; ++half) {
#pragma unroll
                for (int j = 0; j < kCols; ++j) {
                    const hk::Frag w = hk::joined(hk::per_row([&](u32 r) {
                        const Vec<u32, 4> raw = v.column[r][j];
                        if constexpr (kBytes == 2)
                            return raw;
                        else
                            return Values::template widened<4>(half ? raw.hi : raw.lo);
                    }));
#pragma unroll
                    for (int m = 0; m < kM; ++m)
                        o_[m].acc[0][j] = MmaOfValues::mma(&w, &p[m].frag[half], o_[m].acc[0][j]);
                }
            }
            return;
        } else {
            Columns columns[kOwn];
#pragma unroll
            for (int r = 0; r < kOwn; ++r) columns[r] = columns_of(v, r);
#pragma unroll
            for (u32 j = 0; j < kCols; j += 2) {
                Vec<u32, 4> column[kOwn][2];
#pragma unroll
                for (int r = 0; r < kOwn; ++r) value_frags(columns[r], j, column[r]);
#pragma unroll
                for (u32 e = 0; e < 2; ++e) {
                    const hk::Frag w = hk::joined(hk::per_row([&](u32 r) { return column[r][e]; }));
#pragma unroll
                    for (int m = 0; m < kM; ++m)
                        o_[m].acc[0][j + e] = MmaOfValues::mma(&w, &p[m].frag[0], o_[m].acc[0][j + e]);
                }
            }
        }
    }

    HK_FN Walk walk_from([[maybe_unused]] i32 at, [[maybe_unused]] i32 end) const {
        const Params &p = params();
        if constexpr (kPieces)
            return {p, split_, u32(at), u32(end)};
        else
            return {d_, split_, p.dqk * kBytes, p.dv * kBytes};
    }

    HK_FN void walk(u32 skip) {
        i32 at = split_.begin + i32(hk::wave_id()) * kStep;
        const i32 end = i32(hk::uniform(u32(split_.end)));
        at = i32(hk::uniform(u32(at)));
        if (kSets == 2 && at >= end) return;
        Walk steps = walk_from(at, end);
        if constexpr (kPieces) first_ = i32(hk::uniform(u32(split_.begin) + skip));
        // Only the first wave of the first split has rows that no query sees.
        if (hk::wave_id() != 0) skip = 0;
        if constexpr (kSets == 2) {
            struct Set {
                K k;
                V v;
                Scales scales;
                u32 missing;
            };
            const auto load = [&](u32 skip) __attribute__((always_inline)) {
                const Windows windows = steps.next();
                K k = load_keys(windows);
                if constexpr (kScales) hk::sched_barrier();
                Set set = {k, load_values(windows, skip), load_scales(windows, skip), windows.missing};
                hk::sched_barrier();
                return set;
            };
            const auto take = [&](Set &set) __attribute__((always_inline)) {
                clean(set.k, set.v, set.missing, at);
                multiply_keys(set.k, set.missing);
                score(at, set.scales);
                multiply_values(set.v);
                at += i32(kStride);
            };
            Set even = load(skip), odd = load(0);
            // One way out, so that the compiler knows which loads are in flight. Steps past the end are masked, and load nothing.
            if constexpr (kScales && kM > 1 && kD > 128) {
                // Factors are loaded to AGPRs, and the compiler moves them at the end of a round, behind a full drain: where a round ends
                // with those of the set that was loaded first, they are there.
                take(even);
                while (at < end) {
                    even = load(0);
                    take(odd);
                    odd = load(0);
                    take(even);
                }
            } else {
                do {
                    take(even);
                    even = load(0);
                    take(odd);
                    odd = load(0);
                } while (at < end);
            }
        } else {
            // Queries, for which waves meet, while keys are in flight. A wave without keys has a masked step of the last one.
            Windows windows = steps.next();
            K k = load_keys(windows);
            V v = load_values(windows, skip);
            Scales scales = load_scales(windows, skip);
            u32 missing = windows.missing;
            load_queries();
            for (;;) {
                clean(k, v, missing, at);
                multiply_keys(k, missing);
                windows = steps.next();
                k = load_keys(windows);
                missing = windows.missing;
                score(at, scales);
                multiply_values(v);
                at += i32(kStride);
                if (at >= end) break;
                v = load_values(windows);
                scales = load_scales(windows);
            }
        }
    }

    static constexpr int kPasses = kCols / 4;
    static constexpr int kRowsOfThread = kDim * kDim / kThreads;
    /// A thread's columns of a row of a tile: value_column(place, 4 pass) and three more for each pass.
    HK_FN static u32 thread_row(u32 i) { return (hk::thread_x() + i * kThreads) / kDim; }
    HK_FN static u32 thread_place() { return hk::thread_x() % kDim; }

    HK_FN float base_of(u32 row) const {
        float base = lds_.sums[0][row][0];
#pragma unroll
        for (int w = 1; w < kWaves; ++w) base = __builtin_fmaxf(base, lds_.sums[w][row][0]);
        return base;
    }
    /// Gives the other waves the wave's maxima and sums.
    HK_FN void put_sums() {
        const u32 lane = hk::lane_id();
#pragma unroll
        for (u32 i = 0; i < kM * kOwn; ++i) {
            const u32 m = i / kOwn, r = i % kOwn;
            const Vec<float, 2> own = softmax_[m].sums(r);
            if (hk::group_of_lane<kDim>(lane) == 0)
                lds_.sums[hk::wave_id()][m * kDim + hk::row_of_lane<kDim>(lane, r)] = own;
        }
        hk::block_barrier();
#pragma unroll
        for (u32 i = 0; i < kM * kOwn; ++i) {
            const u32 m = i / kOwn, r = i % kOwn, row = m * kDim + hk::row_of_lane<kDim>(lane, r);
            const float factor = rescaled(lds_.sums[hk::wave_id()][row][0], base_of(row));
            if constexpr (kOffset) {
#pragma unroll
                for (int j = 0; j < kCols; ++j) o_[m].acc[0][j] += o_[m].acc[0][kCols];
            }
            map_pairs(o_[m], r, [&](int, Vec<float, 2> pair) { return pair * factor; });
        }
    }

    /// The results of the waves for a tile of rows, in their order.
    struct Together {
        Vec<float, 2> sums[kRowsOfThread];
        Vec<float, 4> o[kRowsOfThread][kPasses];
    };
    HK_FN Together meet(u32 tile) {
        const u32 lane = hk::lane_id();
        Together all;
#pragma unroll
        for (u32 i = 0; i < kRowsOfThread; ++i) {
            const u32 row = tile * kDim + thread_row(i);
            const float base = base_of(row);
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kWaves; ++w) {
                const Vec<float, 2> of = lds_.sums[w][row];
                sum = __builtin_fmaf(of[1], rescaled(of[0], base), sum);
            }
            all.sums[i] = {base, sum};
        }
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            if (pass > 0 || tile > 0) hk::block_barrier();
#pragma unroll
            for (u32 of = 0; of < kM; ++of) {
                if (of != tile) continue;
#pragma unroll
                for (int i = 0; i < Places::kElements; ++i) {
                    const u32 m = Places::m(lane, i), n = Places::n(lane, i);
                    const auto &acc = o_[of].acc[0];
                    lds_.o[hk::wave_id()][m][n ^ m] = {acc[pass * 4][i], acc[pass * 4 + 1][i], acc[pass * 4 + 2][i],
                                                       acc[pass * 4 + 3][i]};
                }
            }
            hk::block_barrier();
#pragma unroll
            for (u32 i = 0; i < kRowsOfThread; ++i) {
                const u32 row = thread_row(i), at = thread_place() ^ row;
                Vec<float, 4> sum = lds_.o[0][row][at];
#pragma unroll
                for (int w = 1; w < kWaves; ++w) sum += lds_.o[w][row][at];
                all.o[i][pass] = sum;
            }
        }
        return all;
    }

    /// The row of partial results of the sequence's first query and head.
    HK_FN u64 first_partial(const Params &p) const {
        const bool packed = p.sequences.q_starts != 0 && !In::of(hk::reload_params(kernel_)).only_single;
        return (packed ? split_.q_start : u64(split_.sequence) * p.sequences.sq) * p.heads;
    }
    HK_FN Partial partial(const Params &p, u32 split, const Row &row) const {
        return {p, split, first_partial(p) + (row.query * p.heads + row.head)};
    }

    HK_FN u64 out_row(const Params &p, const HeadRows &out, const Row &row) const {
        return row_address(out, split_, p.sequences.q_starts != 0, row.query, row.head);
    }
    /// Stores four columns of a row's output.
    HK_FN void store_run(const Params &p, const Row &row, u32 col, Vec<float, 4> y) const {
        const float inverse = p.out_scale ? 1.0f / hk::load_uniform<float>(p.out_scale) : 1.0f;
        store_columns<T>(p, out_row(p, p.out, row), col, y * inverse);
    }
    HK_FN void store_lse(const Params &p, const Row &row, float lse) const {
        if (p.lse.data) *reinterpret_cast<GlobalPtr<float>>(out_row(p, p.lse, row)) = lse;
    }
    HK_FN static void each_run(const Params &p, auto f) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const u32 col = value_column(thread_place(), pass * 4);
            if (col < p.dv) f(col, pass);
        }
    }

  public:
    HK_FN Decode(const typename In::Kernel &kernel, const Split &split, Lds &lds)
        : kernel_(kernel), d_(In::of(kernel)), split_(split), lds_(lds) {}

    /// `skip`: keys at the split's beginning that no row sees.
    HK_FN void run(u32 skip) {
        if (!split_.poison && split_.begin < split_.end) {
            if constexpr (kSets == 2) load_queries();
            set_up();
            walk(skip);
        }
        put_sums();
        const Params &p = params();
        float value_scale = cache_scale(p.cache.v);
        if constexpr (kOffset) value_scale *= Values::kUnit;
        // hk::uniform: else the compiler selects one of two addresses, and the split is in memory.
        const bool merges = d_.tickets != 0, alone = (merges ? hk::uniform(split_.parts) : p.splits.count) == 1;
        const u32 tiles = kM == 1 ? 1 : hk::uniform((rows_used(p) + kDim - 1) / kDim);
#pragma unroll 1
        for (u32 tile = 0; tile < tiles; ++tile) {
            Together all = meet(tile);
#pragma unroll
            for (u32 i = 0; i < kRowsOfThread; ++i) {
                const Row of = row(p, tile * kDim + thread_row(i));
                if (split_.poison) all.sums[i] = __builtin_nanf("");
#pragma unroll
                for (int pass = 0; pass < kPasses; ++pass) all.o[i][pass] *= value_scale;
                if (!of.valid) continue;
                if (alone) {
                    const auto sums = [&](u32) { return all.sums[i]; };
                    const auto one = MergedRow::of<1>(1, sink_of(p, of.head), sums);
                    const auto merged = sum_of_parts<kPasses, 1>(
                        1, sums, [&](Vec<float, 2> sums) { return one.factor(sums); },
                        [&](u32, int pass) { return all.o[i][pass]; });
                    each_run(p, [&](u32 col, int pass) { store_run(p, of, col, merged.of[pass]); });
                    if (thread_place() == 0) store_lse(p, of, one.lse());
                } else {
                    const Partial to = partial(p, split_.split, of);
                    each_run(p, [&](u32 col, int pass) { to.store(col, all.o[i][pass]); });
                    if (thread_place() == 0) to.store_sums(all.sums[i]);
                }
            }
        }
        if (alone || !merges) return;
        const auto counter = reinterpret_cast<GlobalPtr<u32>>(d_.tickets) + hk::uniform(split_.tile);
        if (!last_to_arrive(counter, split_.parts, lds_.last)) return;
#pragma unroll 1
        for (u32 tile = 0; tile < tiles; ++tile) {
            if (tile > 0) hk::block_barrier();
            merge_parts(p, tile * kDim);
        }
    }

  private:
    /// The results of all splits for the rows of a tile: maxima and sums go to LDS, and factors in their place.
    HK_FN void merge_parts(const Params &p, u32 first_row) const {
        const u32 own = hk::thread_x() % kDim, parts = hk::uniform(split_.parts), place = thread_place();
        const u32 left = rows_used(p) - first_row, rows = left < kDim ? left : kDim;
        // Threads without a row have another of the tile: what other tiles leave may not be there yet.
        const Row of_sums = row(p, first_row + (own < rows ? own : 0));
        copy_parts<kThreads / kDim, kMostParts>(
            hk::thread_x() / kDim, parts, [&](u32 s) { return partial(p, s, of_sums).sums(); },
            [&](u32 s, Vec<float, 2> sums) { lds_.parts[s][own] = sums; });
        hk::block_barrier();
#pragma unroll 1
        for (u32 i = 0; i * (kThreads / kDim) < rows; ++i) {
            const u32 at = thread_row(i);
            const Row of = row(p, first_row + at);
            const float sink = of.valid ? sink_of(p, of.head) : kMinusInf;
            const auto merged = MergedRow::together<kDim>(parts, sink, place,
                                                          [&](u32 s) -> Vec<float, 2> & { return lds_.parts[s][at]; });
            if (of.valid && place == 0) store_lse(p, of, merged.lse());
        }
        hk::block_barrier();
        // All threads have columns, however few rows there are.
        constexpr u32 kRuns = kPasses * kDim, kAhead = 16;
        const u64 stride = Partial::acc_bytes(p, p.splits.rows);
        const u64 first = detail::uniform_address(p.splits.acc + Partial::acc_bytes(p, first_partial(p)));
#pragma unroll 1
        for (u32 at = hk::thread_x(); at < rows * kRuns; at += kThreads) {
            const u32 r = at / kRuns, col = at % kRuns * 4;
            const Row of = row(p, first_row + r);
            if (!of.valid || col >= p.dv) continue;
            const u32 offset = u32(Partial::acc_bytes(p, of.query * p.heads + of.head)) + col * 4;
            u64 part = first;
            Vec<float, 4> sum = 0.0f;
            for (u32 s = 0; s < parts; s += kAhead) {
                Vec<float, 4> acc[kAhead];
                float factor[kAhead];
#pragma unroll
                for (u32 i = 0; i < kAhead; ++i) {
                    factor[i] = lds_.parts[s + i][r][0];
                    acc[i] = *reinterpret_cast<GlobalPtr<const Vec<float, 4>>>(part + offset);
                    part += s + i + 1 < parts ? stride : 0;
                }
                hk::sched_barrier();
#pragma unroll
                for (u32 i = 0; i < kAhead; ++i) add_part(sum, acc[i], factor[i]);
            }
            store_run(p, of, col, sum);
        }
    }
};

/// The block's split of the keys that the rows of its tile see. False: it has nothing to do. `skip`: keys at its beginning that no row
/// sees.
template <int kRows>
HK_FN bool find_split(const DecodeParams &d, Split &split, u32 &skip) {
    const Params &p = d.all;
    skip = 0;
    split.parts = 1;
    split.begin = 0, split.end = i32(split.keys());
    if (!split.poison) {
        const u32 last_row = split.q_len * p.group - 1, last = split.first + kRows - 1;
        const auto query_of = [&](u32 row) { return hk::DivMod(row, p.group, p.group_inverse).quotient; };
        const i32 first = key_range(p, split, query_of(split.first)).first;
        i32 end = key_range(p, split, query_of(last < last_row ? last : last_row)).last + 1;
        i32 begin = first;
        if (begin < end) {
            begin = first / i32(kPageRows) * i32(kPageRows);
            const u32 keys = u32(end - begin), count = p.splits.count;
            u32 each = p.splits.keys;
            if (each == 0) each = ((keys + count - 1) / count + kKeysOfBlock - 1) / kKeysOfBlock * kKeysOfBlock;
            const u32 parts = (keys + each - 1) / each;
            split.parts = parts < count ? parts : count;
            if (split.split == 0) skip = u32(first - begin);
            begin += i32(split.split * each);
            if (split.split + 1 < split.parts) end = begin + i32(each);
            if (split.split >= split.parts) end = begin;
        }
        split.begin = begin, split.end = end;
    }
    // A second launch reads the partial results of all splits.
    return split.split < split.parts || (!d.tickets && p.splits.count > 1);
}

/// The tasks of find_work with the tiles of a sequence next to each other, split by split: they read the same keys, which are in the L2 of
/// their XCD then.
HK_FN u32 tiles_together(const DecodeParams &d, u32 task) {
    const u32 tiles = d.all.sequences.tiles_of_one, splits = d.all.splits.count;
    if (tiles <= 1) return task;
    const u32 of_sequence = tiles * splits, first = task / of_sequence * of_sequence, at = task - first;
    return first + at % tiles * splits + at / tiles;
}

template <class T, class From, int kD, int kM = 1, class In = Alone>
HK_FN void decode(const typename In::Kernel &kernel, u32 task, typename Decode<T, From, kD, kM, In>::Lds &lds) {
    constexpr int kRows = kM * kDim;
    const DecodeParams &d = In::of(kernel);
    task = tiles_together(d, task);
    Split split;
    if (!find_work<kRows>(d.all, task, split)) return;
    split.tile = task / d.all.splits.count;
    if (d.only_single) {
        // Of starts that are no partition other launches poison all outputs.
        const u64 starts = d.all.sequences.q_starts;
        if (u32(index_at(starts, split.sequence + 1)) - u32(index_at(starts, split.sequence)) != 1) return;
    }
    find_keys(d.all, split);
    u32 skip;
    if (!find_split<kRows>(d, split, skip)) return;
    // Rows are read whether their page is there or not.
    if constexpr (hk::kRowsPerLane > 1) split.poison |= d.all.pages.n_pages == 0 && split.begin < split.end;
    Decode<T, From, kD, kM, In>(kernel, split, lds).run(skip);
}
template <class T, class From, int kD, int kTiles>
HK_FN void decode(const DecodeParams &d) {
    constexpr int kM = kTilesOfTarget<kTiles>;
    auto &lds = hk::block_lds<typename Decode<T, From, kD, kM>::Lds>();
    decode<T, From, kD, kM>(d, hk::xcd_remap(hk::block_x(), hk::grid_x()), lds);
}

/// Waves that share a SIMD: two where registers hold what each needs. Three terms of queries beside factors of tokens are a register too many.
template <class T, class From, int kD, int kTiles>
inline constexpr int kWavesPerSimd =
    kTilesOfTarget<kTiles> == 1 ? (kD > 128 ? 1 : 2)
                                : (kD > 64 || (kTokenScales<From> && QuerySplitOf<From, T>::Type::kTerms == 3) ? 1 : 2);

}  // namespace decode
}  // namespace attention

// Entry points of a type of products and of caches, by columns; those of more than 16 rows a block are named after them, as in
// rows_of_tall of src/decode/splits.rs.
#define HK_DECODE(name, T, From)                    \
    HK_DECODE_COLUMNS(name##_d64, T, From, 64, 1)   \
    HK_DECODE_COLUMNS(name##_d128, T, From, 128, 1) \
    HK_DECODE_COLUMNS(name##_d256, T, From, 256, 1)
#define HK_DECODE_TALL(name, T, From)                      \
    HK_DECODE_COLUMNS(name##_d64_rows64, T, From, 64, 4)   \
    HK_DECODE_COLUMNS(name##_d128_rows64, T, From, 128, 4) \
    HK_DECODE_COLUMNS(name##_d256_rows32, T, From, 256, 2)
#define HK_DECODE_PIECES_TALL(name, T, From)             \
    HK_DECODE_COLUMNS(name##_d64_rows32, T, From, 64, 2) \
    HK_DECODE_COLUMNS(name##_d128_rows32, T, From, 128, 2)
#define HK_DECODE_COLUMNS(name, T, From, columns, tiles)                                    \
    HK_ENTRY_WAVES_PER_SIMD(name, attention::decode::kThreads,                              \
                            (attention::decode::kWavesPerSimd<T, From, columns, tiles>), 8, \
                            (attention::decode::decode<T, From, columns, tiles>))
