// mla.h: attention over latent rows, absorbed MLA: a key is a row of C + R columns, its value the first C of them.
//
//   s[i, j] = scale q[i] . row[j]  ->  p = softmax(s)  ->  out[i] = sum over j of p[i, j] row[j][: C]
//
// A tile's rows are (query, head), head fastest; all heads see the same keys. Keys go to LDS once and are read two ways: rows for S,
// columns for O. Waves are kWavesH x kWavesV: each has kDim rows and C / kWavesV columns of O. Waves of the same rows make a share of
// their S each, exchange it in f32 through LDS, and all do the softmax, so that P stays in registers. Where loads go straight to LDS
// there are two stages; elsewhere the next tile is in registers.
// Of 16 rows waves split the keys where these are bytes, and where values are transposed in registers (gfx942): each has keys of its own,
// in registers, and all columns of O. A key passes through LDS once, for the columns only, without a barrier; the waves meet at the end.
// Queries are then sums of terms of fp8 where keys are (SplitQuery in bytes.h).
// Scales of rows of 656 bytes are factors of the scores of 128 columns, and of probabilities; with 64 rows, which have more of these, of the
// elements, whose products are rounded.
// Queries are in registers; on sm_90, whose waves lack them, in LDS. On sm_90a 64 rows are multiplied by warpgroup instructions
// (mla_warpgroup.h) where rows are of 16-bit elements.
// Splits of the keys meet in global memory, in ascending order: in the last block of a tile to arrive (ticket.h), or in a second launch
// (merge.hip), with the same bits.
// Floor: keys are read once for a tile of 16 or 64 rows; where two tiles of 64 rows share them, the matrix units of gfx942 are as busy
// as its memory.
// Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
#pragma once

#include "bytes.h"
#include "keys.h"
#include "merge.h"
#include "outputs.h"
#include "problem.h"
#include "softmax.h"
#include "ticket.h"
#include "warpgroup_rows.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/quant.h>
#include <hk/shared.h>
#include <hk/wave_tile.h>

// Lambdas that more than one place calls are inlined, too.
#define HK_INLINE __attribute__((always_inline))

namespace mla {

using namespace attention;

struct Params {
    attention::Params attention;  // keys are those of the cache, values its first columns
    // Rotation of the last columns of queries and of a sequence's last key, one query to a sequence. cos_sin: [positions, rotary],
    // cosines then sines of the pairs; 0: none.
    u64 cos_sin;
    i64 cos_sin_row;  // bytes
    u64 positions;  // i32 [sequences]
    u64 k_pe_out;  // [sequences, R], or 0
    i64 k_pe_out_row;  // bytes
    u64 tickets;  // u32 [tiles], zero; 0: a second launch merges
    u32 n_positions, rotary, interleaved, table_is_f32;
    u32 slot_tokens, slot_inverse;  // an entry of the table is token e % slot_tokens of page e / slot_tokens
    u32 listed;  // keys of a row are the whole row of the table, -1 is none
    u32 pad;
};

/// How rows are stored.
enum class Rows {
    Vectors,  // the kernel's type, on 16 bytes
    Any,  // the kernel's type or fp8, at any address; queries at any address, too
    Fp8,  // on 16 bytes
    // Those of DeepSeek-V3.2, 656 bytes on 16: 512 columns of fp8, their f32 scales by 128 columns, 64 columns of bf16.
    Scaled,
};

/// Columns in parts of 64: kC of values, kPe more. kRows: rows of a block, 16 or 64.
template <class T_, int kC_, int kPe_, Rows kStored_, int kRows_>
struct Shape {
    using T = T_;
    static constexpr int kC = kC_, kPe = kPe_, kRows = kRows_;
    static constexpr Rows kStored = kStored_;
#if defined(HK_WARPGROUPS)
    static constexpr bool kWarpgroups = kRows == 64 && kStored == Rows::Vectors;
#else
    static constexpr bool kWarpgroups = false;
#endif
    static constexpr bool kQueriesInLds = hk::kRowsPerLane > 1;
    static constexpr int kDim = kRows == 16 || kQueriesInLds ? 16 : 32, kWavesH = kRows / kDim;
    static constexpr int kWaves = kWarpgroups ? 16 : kQueriesInLds && kRows > 16 ? 8 : 4;
    static constexpr int kWavesV = kWarpgroups ? 2 : kWaves / kWavesH;
    static constexpr int kThreads = kWaves * hk::kWaveSize;
    static constexpr int kParts = (kC + kPe) / 64;
    static constexpr bool kDirect = hk::kHasWideDma && kStored == Rows::Vectors;
    static constexpr bool kBytes = kStored == Rows::Fp8 || kStored == Rows::Scaled;
    // Waves split the keys.
    static constexpr bool kSplitKeys =
        kRows == 16 && (kBytes || (kStored == Rows::Vectors && !hk::kHasReadTr)) && !hk::kHasLdmatrix;
    // Of bytes, through registers: two stages of 32 keys take a barrier for each and fewer registers than one stage of 64.
    static constexpr int kStages = kDirect || (hk::kHasWideDma && kBytes) ? 2 : 1;
    // Two stages of ten parts leave no room for the states of 64 keys.
    static constexpr int kKeys =
        kSplitKeys ? (kBytes ? 32 : 16) : (kWarpgroups || (hk::kHasReadTr && kParts < 10 && !kBytes) ? 64 : 32);
    // Waves that share rows share their scores: each makes those of some tiles of keys, over some steps of the columns.
    static constexpr int kTiles = kKeys / kDim, kKeyShares = kSplitKeys ? 1 : kTiles < kWavesV ? kTiles : kWavesV;
    static constexpr int kColShares = kSplitKeys ? 1 : kWavesV / kKeyShares, kOwnTiles = kTiles / kKeyShares;
    static_assert(kWavesV % kKeyShares == 0 && kTiles % kKeyShares == 0, "equal shares");
    // Chunks of a lane that waves exchange, at once where LDS has room for them beside the stages.
    static constexpr int kChunks = kOwnTiles * kDim * kDim / hk::kWaveSize / 4;
    static constexpr int kStageBytes = kStages * kParts * kKeys * 128, kChunkBytes = kThreads * 16;
    static constexpr int kRounds = !kQueriesInLds && kStageBytes + kChunks * kChunkBytes + 1024 > hk::kLdsBytes ? 2 : 1;
    static_assert(kRounds == 1 || kChunks / 2 * kChunkBytes <= kKeys * 128,
                  "a part of a row has room for the second half");
};

inline constexpr u32 kMostParts = 128;  // splits that the last block of a tile merges

/// The keys [first, end) of the block's split: `splits.keys` of a sequence, or, if that is 0, an equal share of them.
struct Keys {
    u32 first, end;
    u32 parts;  // splits of the sequence that have keys, at least one

    HK_FN Keys(const attention::Params &p, const Work &work) : first(0), end(work.poison ? 0 : work.keys()), parts(1) {
        constexpr u32 kMultiple = 64;
        const u32 count = p.splits.count;
        if (count <= 1 || end == 0) return;
        u32 share = p.splits.keys;
        if (!share) share = (end + count * kMultiple - 1) / (count * kMultiple) * kMultiple;
        const u32 all = end, filled = (all + share - 1) / share;
        parts = filled < count ? filled : count;
        first = work.split < parts ? work.split * share : all;
        if (work.split + 1 < parts) end = first + share;
    }
};

/// The walk by warpgroup instructions, and what it has in LDS beside tiles: mla_warpgroup.h.
template <class D>
class WarpgroupWalk;
template <class S, bool = S::kWarpgroups>
struct WarpgroupLds {};

template <class S_>
class Decode {
    using S = S_;
    using T = typename S::T;
    static constexpr int kDim = S::kDim, kKeys = S::kKeys, kParts = S::kParts, kC = S::kC;
    static constexpr int kCols = kC / S::kWavesV;  // of O, of a wave
    static constexpr int kRowThreads = 8;  // threads that move a row
    static constexpr Rows kStored = S::kStored;
    static constexpr bool kBytes = S::kBytes;
    static constexpr bool kSplitKeys = S::kSplitKeys, kExchanges = !kSplitKeys && !S::kWarpgroups;
    static constexpr int kValueParts = kC / 64;
    // Waves that split the keys multiply and stage fp8 as it is.
    static constexpr bool kAsBytes = kSplitKeys && kBytes;
    static constexpr int kKeyTiles = kSplitKeys ? kKeys / kDim : 1;  // of a wave
    static constexpr int kTileParts = kAsBytes ? 2 : 1, kValueTiles = kValueParts / kTileParts;
    static constexpr int kSlots = kValueTiles - 1;  // of columns of values, in LDS of a wave
    using Terms = decode::SplitQuery<T, hk::kMmaFp8Type>;
    using TermMma = typename Terms::template Mma<128>;
    static constexpr int kTermFrags = kAsBytes ? kValueParts * Terms::kTerms : 0;
    // Of scores, each of 128 columns; products of columns without one are sums of their own.
    static constexpr int kScales = kStored == Rows::Scaled && S::kRows == 16 ? kValueParts / 2 : 0;
    static constexpr int kRowsAtOnce = S::kThreads / kRowThreads, kMoves = kSplitKeys ? 1 : kKeys / kRowsAtOnce;
    static constexpr int kFragBytes = hk::kFragBytesOf<kDim>, kSteps = kParts * 128 / kFragBytes;
    static constexpr int kPartSteps = 128 / kFragBytes;
    // Bytes of a stored element.
    static constexpr u32 kElement = S::kBytes ? 1 : sizeof(T), kElementOfPe = S::kStored == Rows::Fp8 ? 1 : sizeof(T);
    static constexpr int kColShares = S::kColShares, kOwnTiles = S::kOwnTiles, kOwnSteps = kSteps / kColShares;
    static constexpr int kOwn = hk::kRowsPerLane;  // rows of a lane
    static constexpr i32 kAbsent = -1;
    static constexpr bool kUnaligned = kStored == Rows::Any;
    static constexpr int kMergedRows = 16;  // at a time
    static constexpr u32 kMergeThreads = S::kWarpgroups ? 256 : S::kThreads;
    static_assert(kCols % 64 == 0 && kMoves > 0, "whole parts of columns");
    // Of rows of 656 bytes.
    static constexpr u32 kScalesAt = 512, kScaledPeAt = 528;
    using Mma = hk::FragMma<T, T, kDim>;
    using Tile = hk::SharedTile<kKeys, 128>;
    using Places = hk::AccLayout<kDim>;
    using Chunk = Vec<u32, 4>;
    struct TileParts {
        Tile part[kSplitKeys ? kSlots : kParts];
    };
#if defined(HK_WARPGROUPS)
    friend class WarpgroupWalk<Decode>;
    using Stage = decltype([] {
        if constexpr (S::kWarpgroups)
            return WarpgroupTile<kKeys, kParts * 64>();
        else
            return TileParts();
    }());
    using QueryTile = decltype([] {
        if constexpr (S::kWarpgroups)
            return hk::WarpgroupRows<S::kRows>();
        else
            return hk::SharedTile<S::kRows, 128>();
    }());
#else
    using Stage = TileParts;
    using QueryTile = hk::SharedTile<(S::kQueriesInLds ? S::kRows : 1), 128>;
#endif

  public:
    struct Lds : WarpgroupLds<S> {
        union {
            Stage rows[kSplitKeys ? S::kWaves : S::kStages];
            Vec<float, 2> parts[kMostParts][kMergedRows];
            Chunk sums_of_values[kSplitKeys ? S::kWaves - 1 : 1][kCols / kDim][hk::kWaveSize];
        };
        QueryTile queries[S::kQueriesInLds ? kParts : 1];
        Chunk scores[kExchanges ? S::kWaves : 1][kExchanges ? S::kChunks / S::kRounds : 1]
                    [kExchanges ? hk::kWaveSize : 1];
        alignas(16) T key[S::kPe];  // rotated columns of the last key
        float state[kSplitKeys ? S::kWaves : S::kStages]
                   [kKeys];  // added to the key's scores: 0; -inf: there is none; NaN: not in the pool
        Vec<float, 2> sums[kSplitKeys ? S::kWaves : 1][kSplitKeys ? kDim : 1];  // maxima and sums
        float scales[kSplitKeys ? S::kWaves : S::kStages][kScales][kScales > 0 ? kKeys + (kKeyTiles - 1) * kDim : 1];
        u32 last;
    };

  private:
    const Params &p_;
    const Work &work_;
    const Keys split_;  // by value: the compiler leaves what a reference is of in scratch
    Lds &lds_;
    struct Row {
        u32 query, head;
        bool there;
    };

    u32 wave_rows_, wave_cols_;  // indices of the wave
    u32 key_share_, col_share_;  // of the scores of its rows
    Row own_[kOwn];  // rows of the lane
    u32 visible_[kOwn];  // keys from first_ on that they see
    u32 first_, end_;  // keys of the block
    u32 wave_visible_;  // that all rows of the wave see
    u32 n_tiles_;
    bool scaled_;  // scores are scaled before the softmax
    float scale_;  // of scores in the softmax, in units of log2, above 0
    hk::Frag q_[S::kQueriesInLds ? 1 : kAsBytes ? kTermFrags + S::kPe / 64 * kPartSteps : kOwnSteps];
    float unit_ = 1.0f;  // of the terms of the lane's row
    hk::WaveTile<Mma, kCols, kDim> o_;
    OnlineSoftmax<kDim, T> softmax_;
    Vec<float, 2> met_[kOwn];  // maxima and sums of rows, of several waves
    i32 entry_[kMoves];  // of the table, of the next tile's rows that the thread moves

    /// What a thread moves of a row. Of T: chunk `piece()` of each part. Of bytes: 16 columns of each other part, from 16 piece() on;
    /// rows of 656 bytes: the scales of these columns, and 8 columns beside those of values.
    struct Part {
        Chunk chunk[!kBytes ? kParts : kStored == Rows::Scaled ? kC / 128 : (kParts + 1) / 2];
        Chunk scales, pe;
        float state;
        bool rotated;
    };
    struct Moved {
        Part part[kMoves];
    };
    struct Source {
        u64 row;  // 0: zeros
        float state;
        bool rotated;
    };

    /// Of eight neighbouring lanes those of bytes have four pieces of two rows, whose swizzles differ in the lowest bit: each writes even
    /// chunks without bank conflicts, then odd ones.
    HK_FN static u32 row_of_thread(int move) {
        const u32 thread = hk::thread_x();
        return (kBytes ? thread / 16 * 2 + thread / 4 % 2 : thread / kRowThreads) + move * kRowsAtOnce;
    }
    HK_FN static u32 piece() { return hk::thread_x() % (kBytes ? 4 : kRowThreads); }
    HK_FN static u32 half() { return hk::thread_x() / 8 % 2; }
    HK_FN static bool leads_row() { return piece() == 0 && (!kBytes || half() == 0); }

    /// In the loop parameters are reloaded: there are not enough SGPRs to keep them.
    HK_FN const attention::Params &params() const { return hk::reload_params(p_).attention; }

    HK_FN static hk::DivMod page_of(const attention::Params &p, u32 key) {
        return hk::DivMod(key, p.pages.tokens, p.pages.inverse);
    }
    HK_FN i32 entry_of(u32 key) const {
        const attention::Params &p = params();
        const auto *table = reinterpret_cast<GlobalPtr<const i32>>(p.pages.table) + work_.pages;
        return key < end_ ? table[page_of(p, key).quotient] : kAbsent;
    }
    HK_FN void load_entries(u32 tile) {
#pragma unroll
        for (int i = 0; i < kMoves; ++i) entry_[i] = entry_of(first_ + tile * kKeys + row_of_thread(i));
    }
    HK_FN Source source_of(u32 tile, int move) const {
        return source(first_ + tile * kKeys + row_of_thread(move), entry_[move]);
    }
    HK_FN Source source(u32 key, i32 entry) const {
        const Params &all = hk::reload_params(p_);
        const attention::Params &p = all.attention;
        const bool absent = key >= end_ || (all.listed && entry == kAbsent);
        const bool missing = u32(entry) >= p.pages.n_pages;
        if (absent) return {0, kMinusInf, false};
        if (missing) return {0, __builtin_nanf(""), false};
        const hk::DivMod slot(u32(entry), all.slot_tokens, all.slot_inverse);
        return {p.cache.k.row(slot.quotient, 0, slot.remainder + page_of(p, key).remainder), 0.0f,
                all.cos_sin && key + 1 == work_.keys()};
    }

    /// Column `col` of a row, of the rotated ones, counted from the first one.
    template <class Load>
    HK_FN float rotated(u32 col, u32 position, Load load) const {
        const float x = load(col);
        if (col >= p_.rotary) return x;
        const u32 half = p_.rotary / 2;
        const bool upper = p_.interleaved ? col % 2 != 0 : col >= half;
        const u32 pair = p_.interleaved ? col / 2 : upper ? col - half : col;
        const u32 other = p_.interleaved ? col ^ 1u : upper ? col - half : col + half;
        if (position >= p_.n_positions) return __builtin_nanf("");
        const u64 row = p_.cos_sin + u64(i64(position) * p_.cos_sin_row);
        const auto entry = [&](u32 i) -> float {
            if (p_.table_is_f32) return reinterpret_cast<GlobalPtr<const float>>(row)[i];
            return float(reinterpret_cast<GlobalPtr<const T>>(row)[i]);
        };
        const float sine = entry(half + pair), y = load(other);
        return __builtin_fmaf(x, entry(pair), upper ? y * sine : -(y * sine));
    }

    /// Rotates the last columns of the block's queries and of the sequence's last key into LDS, and writes those of the key out, once:
    /// by the block that has its first rows. Zeros behind R.
    HK_FN void rotate() {
        const attention::Params &p = params();
        const u32 width = p.dqk - kC, position = u32(index_at(p_.positions, work_.sequence));
        const auto element = [](u64 row, u32 col) {
            return float(reinterpret_cast<GlobalPtr<const T>>(row)[kC + col]);
        };
        const auto of_key = [&](u64 row, u32 col) {
            if (kStored == Rows::Scaled) return float(reinterpret_cast<GlobalPtr<const T>>(row + kScaledPeAt)[col]);
            if (kStored == Rows::Fp8 || (kStored == Rows::Any && p.cache.element == kFp8))
                return hk::dequantize_one<hk::kMmaFp8Type>(reinterpret_cast<GlobalPtr<const u8>>(row)[kC + col]);
            return element(row, col);
        };
        T *q = rotated_queries();
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < u32(S::kRows * S::kPe); i += S::kThreads) {
            const u32 row = work_.first + i / S::kPe, col = i % S::kPe;
            float v = 0.0f;
            if (row < p.heads && col < width) {
                const u64 from = p.q.data + u64(i64(work_.sequence) * p.q.batch + i64(row) * p.q.head);
                v = rotated(col, position, [&](u32 c) { return element(from, c); });
            }
            q[i] = hk::narrow<T, 1>(Vec<float, 1>{v})[0];
        }
        const u32 col = hk::thread_x(), last = work_.keys() - 1;
        if (end_ == last + 1 && col < u32(S::kPe)) {
            const auto *table = reinterpret_cast<GlobalPtr<const i32>>(p.pages.table) + work_.pages;
            const Source key = source(last, table[page_of(p, last).quotient]);
            float v = 0.0f;
            if (col < width) {
                v = __builtin_nanf("");
                if (key.row) v = rotated(col, position, [&](u32 c) { return of_key(key.row, c); });
            }
            const T rounded = hk::narrow<T, 1>(Vec<float, 1>{v})[0];
            lds_.key[col] = rounded;
            if (col < width)
                store_rotated(col, hk::narrow<T, 1>(Vec<float, 1>{float(rounded) * p.cache.k.scale(0, 0)})[0]);
        }
        hk::block_barrier();
    }
    HK_FN void store_rotated(u32 col, T v) const {
        if (!p_.k_pe_out || work_.first != 0) return;
        reinterpret_cast<GlobalPtr<T>>(p_.k_pe_out + u64(i64(work_.sequence) * p_.k_pe_out_row))[col] = v;
    }
    /// Before the loop, in the place of its tiles: [kRows, kPe].
    HK_FN T *rotated_queries() const { return reinterpret_cast<T *>(&lds_.rows[0]); }
    /// Eight columns of the last key, from `col` on.
    HK_FN Chunk rotated_key(u32 col) const { return *reinterpret_cast<const Chunk *>(&lds_.key[col]); }

    /// Eight columns of type E, as the kernel's type, from `col` on, of `cols`; zeros behind them.
    template <class E>
    HK_FN static Chunk load_chunk(u64 row, u32 col, u32 cols) {
        Chunk chunk = 0;
        if constexpr (kUnaligned) {
            using Eight = Vec<E, 8>;
            Eight v = E(0);
            const auto *from = reinterpret_cast<GlobalPtr<const E>>(row) + col;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                if (col + i < cols) v[i] = from[i];
            }
            if constexpr (sizeof(E) == 1)
                chunk = StoredFp8<T>::template widened<4>(__builtin_bit_cast(Vec<u32, 2>, v));
            else
                chunk = __builtin_bit_cast(Chunk, v);
        } else if (col < cols) {
            chunk = *reinterpret_cast<GlobalPtr<const Chunk>>(row + col * sizeof(E));
        }
        return chunk;
    }
    HK_FN static Chunk vector(u64 at) { return *reinterpret_cast<GlobalPtr<const Chunk>>(at); }

    HK_FN Moved load(u32 tile) {
        Moved moved;
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
            const Source from = source_of(tile, i);
            Part &part = moved.part[i];
            part.state = from.state, part.rotated = from.rotated;
#pragma unroll
            for (auto &chunk : part.chunk) chunk = 0;
            part.scales = part.pe = 0;
            if (from.row) load_row(from, part);
        }
        load_entries(tile + 1);
        return moved;
    }
    HK_FN void load_row(const Source &from, Part &part) const {
        const attention::Params &p = params();
        constexpr int kLast = sizeof(part.chunk) / sizeof(Chunk) - 1;
        if constexpr (kStored == Rows::Scaled) {
#pragma unroll
            for (int i = 0; i <= kLast; ++i) part.chunk[i] = vector(from.row + i * 128 + half() * 64 + piece() * 16);
            part.scales = vector(from.row + kScalesAt);
            part.pe = vector(from.row + kScaledPeAt + (piece() * 2 + half()) * 16);
        } else if constexpr (kStored == Rows::Fp8) {
#pragma unroll
            for (int i = 0; i <= kLast; ++i) {
                const u32 col = i * 128 + half() * 64 + piece() * 16;
                if (i < kLast || col < p.dqk) part.chunk[i] = vector(from.row + col);
            }
        } else if (kUnaligned && p.cache.element == kFp8) {
#pragma unroll
            for (int c = 0; c < kParts; ++c) {
                part.chunk[c] = load_chunk<u8>(from.row, c * 64 + piece() * 8, p.dqk);
                hk::sched_barrier();
            }
        } else {
#pragma unroll
            for (int c = 0; c < kParts; ++c) {
                const u32 col = c * 64 + piece() * 8;
                part.chunk[c] = load_chunk<T>(from.row, col, c * 64 < kC && !kUnaligned ? col + 8 : p.dqk);
                if constexpr (kUnaligned) hk::sched_barrier();
            }
        }
    }
    HK_FN void store(const Moved &moved, u32 stage) {
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
            const Part &part = moved.part[i];
            const u32 row = row_of_thread(i);
            const auto put = [&](u32 c, u32 chunk, Chunk v) {
                lds_.rows[stage].part[c].chunk[Tile::place(row, chunk)] = v;
            };
            if constexpr (kBytes) {
                constexpr int kPairs = kC / 128;
#pragma unroll
                for (int c = 0; c < kPairs; ++c) {
                    const Vec<u32, 8> v = widened(part.chunk[c], scale_of(part.scales, c));
                    put(2 * c + half(), 2 * piece(), v.lo);
                    put(2 * c + half(), 2 * piece() + 1, v.hi);
                }
                if constexpr (kStored == Rows::Scaled) {
                    const u32 chunk = 2 * piece() + half();
                    put(kParts - 1, chunk, part.rotated ? rotated_key(chunk * 8) : part.pe);
                } else if (half() == 0) {
                    const Vec<u32, 8> v = widened(part.chunk[kPairs]);
                    const u32 chunk = 2 * piece();
                    put(kParts - 1, chunk, part.rotated ? rotated_key(chunk * 8) : v.lo);
                    put(kParts - 1, chunk + 1, part.rotated ? rotated_key(chunk * 8 + 8) : v.hi);
                }
            } else {
#pragma unroll
                for (int c = 0; c < kParts; ++c) {
                    const bool rotated = c * 64 >= kC && part.rotated;
                    put(c, piece(), rotated ? rotated_key(c * 64 - kC + piece() * 8) : part.chunk[c]);
                }
            }
            if (leads_row()) {
                lds_.state[stage][row] = part.state;
#pragma unroll
                for (int of = 0; of < kScales; ++of) lds_.scales[stage][of][row] = finite(scale_of(part.scales, of));
            }
        }
    }
    /// The scale of 128 columns.
    HK_FN static float scale_of(const Chunk &scales, int of) { return __builtin_bit_cast(float, u32(scales[of])); }
    /// 16 columns of bytes. `scale`: of elements.
    HK_FN static Vec<u32, 8> widened(const Chunk &chunk, [[maybe_unused]] float scale = 1.0f) {
        if constexpr (kStored == Rows::Scaled && !kScales) {
            const auto v = hk::dequantize_packed<hk::kMmaFp8Type>(chunk) * scale;
            if constexpr (hk::kHasCvtBf16) return __builtin_bit_cast(Vec<u32, 8>, hk::narrow<T, 16>(v));
            return rounded(v);
        } else {
            return decode::BytesFp8<T>::template widened<8>(chunk);
        }
    }
    /// Rounds to the nearest bf16, ties to even; magnitudes from 2^112 on to NaN. 2^16 x - x is rounded where a bf16 of x ends.
    HK_FN static Vec<u32, 8> rounded(Vec<float, 16> v) {
        using Pair = Vec<float, 2>;
        constexpr Pair kLift = 0x1p16f;
        Vec<u32, 8> pairs;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Pair x = {v[2 * i], v[2 * i + 1]}, less = __builtin_elementwise_fma(x, kLift, -x);
            const Pair y = __builtin_elementwise_fma(x, kLift, -less);
            pairs[i] = hk::detail::high_halves(hk::detail::bits_of(y[0]), hk::detail::bits_of(y[1]));
        }
        return pairs;
    }

    /// Loads 16 bytes per lane straight to LDS, lane l's to `to + 16 l`. Inactive lanes leave theirs.
    HK_FN static void load_to_lds(void *to, u64 from) {
#if defined(HK_AMD)
        using Shared = __attribute__((address_space(3))) void *;
        const u32 address = hk::uniform(u32(reinterpret_cast<__UINTPTR_TYPE__>((Shared)to)));
        asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tglobal_load_lds_dwordx4 %1, off"
                     :
                     : "s"(address), "v"(from)
                     : "memory");
#else
        hk::Window(reinterpret_cast<GlobalPtr<const u8>>(from), 16).load_to_lds(to, 0, 0);
#endif
    }
    /// Copies a tile straight to LDS. Rows that are not there are zeros: what LDS held may be NaN.
    HK_FN void copy(u32 tile, u32 stage) {
        const u32 cols = params().dqk;
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
            const u32 row = row_of_thread(i), chunk = piece() ^ Tile::swizzle(row);
            const Source from = source_of(tile, i);
#pragma unroll
            for (int c = 0; c < kParts; ++c) {
                Tile &to = lds_.rows[stage].part[c];
                const u32 col = c * 64 + chunk * 8;
                const bool pe = c * 64 >= kC, rotated = pe && from.rotated;
                if (from.row && !rotated && !(pe && col >= cols)) {
                    load_to_lds(&to.chunk[hk::wave_id() * hk::kWaveSize + i * S::kThreads], from.row + col * 2);
                } else {
                    Chunk v = 0;
                    if (from.row && rotated) v = rotated_key(col - kC);
                    to.chunk[Tile::place(row, chunk)] = v;
                }
            }
            if (piece() == 0) lds_.state[stage][row] = from.state;
        }
        hk::commit_loads();
        load_entries(tile + 1);
    }

    HK_FN Row row_of(u32 index) const {
        const attention::Params &p = p_.attention;
        const u32 rows = work_.q_len * p.group;
        const hk::DivMod of(index < rows ? index : rows - 1, p.group, p.group_inverse);
        return {of.quotient, of.remainder, index < rows};
    }
    HK_FN u64 query_row(const Row &row) const {
        const attention::Params &p = p_.attention;
        return row_address(p.q, work_, p.sequences.q_starts != 0, row.query, row.head);
    }
    /// Eight columns of a row of the block at `row`, from `col` on. `pe`: they are beside those of values.
    HK_FN Chunk query_chunk(u32 of_block, u64 row, u32 col, bool pe) const {
        if (pe && p_.cos_sin)
            return *reinterpret_cast<const Chunk *>(rotated_queries() + of_block * S::kPe + (col - kC));
        return load_chunk<T>(row, col, pe || kUnaligned ? p_.attention.dqk : col + 8);
    }
    /// Rows that are not there are as the last one.
    HK_FN void load_queries() {
        if constexpr (S::kQueriesInLds) {
#pragma unroll 1
            for (u32 i = hk::thread_x(); i < u32(S::kRows * kParts * 8); i += S::kThreads) {
                const u32 of_block = i / (kParts * 8), chunk = i % (kParts * 8);
                auto &tile = lds_.queries[chunk / 8];
                tile.chunk[tile.place(of_block, chunk % 8)] =
                    query_chunk(of_block, query_row(row_of(work_.first + of_block)), chunk * 8, chunk * 8 >= kC);
            }
            hk::block_barrier();
        } else {
            const u64 row = query_row(own_[0]);
            const auto frag = [&](int s) {
                const Step step = own_step(s);
                const u32 col = step.part * 64 + chunk_of(step.part, step.of_part) * 8;
                return query_chunk(wave_rows_ * kDim + hk::lane_id() % kDim, row, col, col >= kC);
            };
            if constexpr (kAsBytes) {
                load_terms(frag);
            } else {
#pragma unroll
                for (int s = 0; s < kOwnSteps; ++s) q_[s] = frag(s);
            }
        }
    }
    /// Queries as terms of fp8, but for the columns beside those of values. `frag(s)`: two are the 16 columns that a lane has of a part.
    HK_FN void load_terms(auto frag) {
        Vec<float, 16> v[kValueParts];
        hk::AbsMax most;
#pragma unroll
        for (int part = 0; part < kValueParts; ++part) {
            const hk::Frag low = frag(2 * part), high = frag(2 * part + 1);
            v[part] = hk::widen<T, 16>(
                __builtin_bit_cast(Vec<T, 16>, __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7)));
            most.add(v[part]);
        }
        const Terms terms(hk::reduce_over_lane_groups<kDim>(most.bits, hk::MaxBits{}));
        unit_ = terms.unit;
#pragma unroll
        for (int part = 0; part < kValueParts; ++part) {
            Chunk of_part[Terms::kTerms];
            terms.split(v[part], of_part);
#pragma unroll
            for (int t = 0; t < Terms::kTerms; ++t) q_[term_at(part, t)] = of_part[t];
        }
#pragma unroll
        for (int i = 0; i < kOwnSteps - 2 * kValueParts; ++i) q_[kTermFrags + i] = frag(2 * kValueParts + i);
    }
    /// The index of a term of a part among queries: what an MFMA takes is consecutive.
    HK_FN static constexpr int term_at(int part, int term) {
        constexpr int kLoads = TermMma::kLoads;
        return (part / kLoads * Terms::kTerms + term) * kLoads + part % kLoads;
    }
    /// The chunk of a part's 64 columns that is the lane's fragment i: of bytes that a wave widens it has 16 neighbouring columns.
    HK_FN static u32 chunk_of(u32 part, u32 i) {
        const u32 group = hk::group_of_lane<kDim>(hk::lane_id());
        return kSplitKeys && is_widened(part) ? group * kPartSteps + i : i * hk::kLaneGroups<kDim> + group;
    }
    HK_FN static constexpr bool is_widened(u32 part) {
        return kStored == Rows::Fp8 || (kStored == Rows::Scaled && part < kValueParts);
    }
    /// A step of the columns: waves that share tiles of keys take them in turn, so that parts are constants.
    struct Step {
        u32 part, of_part;
        HK_FN u32 of_row() const { return part * kPartSteps + of_part; }
    };
    HK_FN Step own_step(int s) const {
        static_assert(kPartSteps % kColShares == 0 && kSteps % kColShares == 0, "as many steps of each part");
        constexpr int kOfPart = kPartSteps / kColShares;
        return {u32(s / kOfPart), s % kOfPart * kColShares + col_share_};
    }
    HK_FN hk::Frag query(int s) const {
        if constexpr (S::kQueriesInLds) {
            const Step step = own_step(s);
            return lds_.queries[step.part].template frag<kDim>(wave_rows_ * kDim, step.of_part);
        } else {
            return q_[s];
        }
    }

    using Scores = hk::WaveTile<Mma, kKeys, kDim>;

    /// The wave's share of the scores of its rows: tiles [0, kOwnTiles).
    HK_FN Scores own_scores(u32 stage) const {
        // Two chains where there is one tile: an MFMA waits for the one before it in its chain. Columns of a scale have their own.
        constexpr int kChains = kScales          ? kScales + 1
                                : kOwnTiles == 1 ? 2
                                                 : 1,
                      kFrags = kOwnSteps * kOwnTiles, kAtOnce = kDim == 16 ? 4 : 2;
        const Tile(&rows)[kParts] = lds_.rows[stage].part;
        struct KeyFrags {
            hk::Frag frag[kAtOnce];
        };
        typename Mma::Acc sum[kOwnTiles][kChains] = {};
        pipelined<(kFrags + kAtOnce - 1) / kAtOnce>(
            [&](int at) HK_INLINE {
                KeyFrags keys;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int n = at * kAtOnce + i;
                    if (n >= kFrags) break;
                    const Step step = own_step(n / kOwnTiles);
                    const u32 row = (key_share_ * kOwnTiles + n % kOwnTiles) * kDim;
                    keys.frag[i] = rows[step.part].template frag<kDim, true>(row, step.of_part);
                }
                return keys;
            },
            [&](int at, const KeyFrags &keys) HK_INLINE {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int n = at * kAtOnce + i;
                    if (n >= kFrags) break;
                    const hk::Frag q = query(n / kOwnTiles);
                    const int chain = kScales ? own_step(n / kOwnTiles).part / 2 : n / kOwnTiles % kChains;
                    auto &acc = sum[n % kOwnTiles][chain];
                    acc = Mma::mma(&keys.frag[i], &q, acc);
                }
            });
        Scores own;
#pragma unroll
        for (int chain = kChains - 1; chain >= 0; --chain) {
            Scores of_chain;
#pragma unroll
            for (int t = 0; t < kOwnTiles; ++t) of_chain.acc[0][t] = sum[t][chain];
            if (chain < kScales) scale(of_chain, lds_.scales[stage][chain] + key_share_ * kOwnTiles * kDim);
#pragma unroll
            for (int t = 0; t < kOwnTiles; ++t)
                own.acc[0][t] = chain == kChains - 1 ? of_chain.acc[0][t] : own.acc[0][t] + of_chain.acc[0][t];
        }
        return own;
    }
    /// All scores of the wave's rows, from its own ones and those of the waves that share its rows.
    HK_FN Scores exchanged(const Scores &own, u32 stage) {
        constexpr int kOfRound = S::kChunks / S::kRounds, kOfTile = Places::kElements / 4;
        Scores s;
#pragma unroll
        for (int round = 0; round < S::kRounds; ++round) {
            // Columns beside those of values have been read when all waves have met.
            Chunk *const to = round == 0 ? &lds_.scores[0][0][0] : lds_.rows[stage].part[kParts - 1].chunk;
            const auto place = [&](u32 wave, int i) { return (wave * kOfRound + i) * hk::kWaveSize + hk::lane_id(); };
            const auto part = [](auto &acc, int i) {
                return Vec<float, 4>{acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3]};
            };
#pragma unroll
            for (int i = 0; i < kOfRound; ++i) {
                const int at = round * kOfRound + i;
                to[place(hk::wave_id(), i)] = __builtin_bit_cast(Chunk, part(own.acc[0][at / kOfTile], at % kOfTile));
            }
            hk::block_barrier();
#pragma unroll
            for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
                for (int i = 0; i < kOfRound; ++i) {
                    const int at = round * kOfRound + i;
                    if (at / kOfTile != t % kOwnTiles) continue;
                    const u32 first = wave_rows_ * S::kWavesV + t / kOwnTiles;
                    Vec<float, 4> sum = 0.0f;
                    if constexpr (S::kKeyShares == 1 && kColShares == 2) {
                        sum = part(own.acc[0][t], at % kOfTile) +
                              __builtin_bit_cast(Vec<float, 4>, to[place(hk::wave_id() ^ 1u, i)]);
                    } else {
                        sum = __builtin_bit_cast(Vec<float, 4>, to[place(first, i)]);
#pragma unroll
                        for (int c = 1; c < kColShares; ++c)
                            sum += __builtin_bit_cast(Vec<float, 4>, to[place(first + c * S::kKeyShares, i)]);
                    }
#pragma unroll
                    for (int e = 0; e < 4; ++e) s.acc[0][t][at % kOfTile * 4 + e] = sum[e];
                }
            }
        }
        return s;
    }

    /// The tile in a stage.
    HK_FN void attend(u32 tile, u32 stage) {
        const Tile(&rows)[kParts] = lds_.rows[stage].part;
        Scores s = exchanged(own_scores(stage), stage);
        const auto &state = lds_.state[stage];
        mask(s, tile, state[hk::lane_id() % kKeys] != 0.0f, state);
        softmax_.update(s, o_, scale_);
        constexpr int kFragRows = 8 * hk::kLaneGroups<kDim>, kOperands = 64 / kDim, kColParts = kCols / 64;
        constexpr int kOwnScales = kScales ? kColParts / 2 : 1;
        typename Scores::template AsOperand<T> probabilities[kOwnScales];
#pragma unroll
        for (int of = 0; of < kOwnScales; ++of) {
            Scores p = s;
            if constexpr (kScales > 0) scale(p, lds_.scales[stage][wave_cols_ * kOwnScales + of]);
            probabilities[of] = p.template as_operand<T, true>(0);
        }
        struct ValueFrags {
            hk::Frag frag[kOperands];
        };
        pipelined<kKeys / kFragRows * kColParts>(
            [&](int at) HK_INLINE {
                ValueFrags values;
                rows[wave_cols_ * kColParts + at % kColParts].template column_frags<kDim, true>(
                    at / kColParts * kFragRows, values.frag);
                return values;
            },
            [&](int at, const ValueFrags &values) HK_INLINE {
                const auto &p = probabilities[at % kColParts * kOwnScales / kColParts];
#pragma unroll
                for (int j = 0; j < kOperands; ++j) {
                    auto &acc = o_.acc[0][at % kColParts * kOperands + j];
                    acc = Mma::mma(&values.frag[j], &p.frag[at / kColParts], acc);
                }
            });
    }
    /// Reads from LDS one step ahead of MFMAs, and not more: the compiler would fill all registers.
    template <int kSteps>
    HK_FN static void pipelined(auto read, auto multiply) {
        auto now = read(0);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            auto next = now;
            if (i + 1 < kSteps) next = read(i + 1);
            multiply(i, now);
            hk::sched_barrier();
            now = next;
        }
    }

    /// Scores of a tile of keys. `marked`: a state of the lane's keys is not 0.
    HK_FN void mask(Scores &s, u32 tile, bool marked, const float (&state)[kKeys]) const {
        const attention::Params &p = params();
        if (scaled_) {
            const float scale = p.scores.scale * p.cache.k.scale(0, 0), cap = p.scores.softcap;
            each_pair(s, [&](u32, u32, Vec<float, 2> pair) {
                pair *= scale;
                if (cap != 0.0f) pair = hk::tanh(pair * (1.0f / cap)) * cap;
                return pair;
            });
        }
        if (hk::ballot(marked) != 0) {
            each_pair(s, [&](u32, u32 n, Vec<float, 2> pair) { return pair + Vec<float, 2>{state[n], state[n + 1]}; });
        }
        if ((tile + 1) * kKeys > wave_visible_) {
            each_pair(s, [&](u32 r, u32 n, Vec<float, 2> pair) {
                const i32 left = i32(visible_[r]) - i32(tile * kKeys);
                return Vec<float, 2>{i32(n) < left ? pair[0] : kMinusInf, i32(n) + 1 < left ? pair[1] : kMinusInf};
            });
        }
    }
    /// Replaces scores by `f(r, n, pair)`: of the lane's row r, keys n and n + 1 of the tile.
    HK_FN static void each_pair(Scores &s, auto f) {
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            map_pairs(s, r, [&](int i, Vec<float, 2> pair) { return f(r, Places::n(hk::lane_id(), i), pair); });
        }
    }

    /// A scale; NaN, if it is not finite: its product with a sum could be -inf, as if there were no key.
    HK_FN static float finite(float scale) { return scale + (scale - scale); }
    /// Scores or probabilities times a scale of each key.
    HK_FN static void scale(Scores &s, const float *of_keys) {
        each_pair(s, [&](u32, u32 n, Vec<float, 2> pair) {
            return pair * *reinterpret_cast<const Vec<float, 2> *>(of_keys + n);
        });
    }

    HK_FN void count_tiles() { n_tiles_ = hk::uniform((end_ - first_ + kKeys - 1) / kKeys); }
    HK_FN void walk() {
        count_tiles();
        if constexpr (kSplitKeys) {
            walk_own_keys();
        } else if constexpr (S::kDirect) {
            load_entries(0);
            copy(0, 0);
            for (u32 tile = 0; tile < n_tiles_; ++tile) {
                // The wave's own loads of this tile; the barrier: those of all waves, which have left the other stage.
                hk::wait_loads<0, 0>();
                hk::block_barrier();
                if (tile + 1 < n_tiles_) copy(tile + 1, (tile + 1) % 2);
                attend(tile, tile % 2);
            }
        } else {
            load_entries(0);
            Moved next = load(0);
            for (u32 tile = 0; tile < n_tiles_; ++tile) {
                const u32 stage = tile % S::kStages;
                // With two stages all waves have left this one before the last barrier.
                if (S::kStages == 1) hk::block_barrier();
                store(next, stage);
                hk::block_barrier();
                next = load(tile + 1);
                attend(tile, stage);
            }
        }
    }

    // Waves that split the keys take tiles of them in turn. Lane l has row l % kDim of each kDim keys of a tile, and loads the fragments of S
    // from memory. 16 bits are fragments of T; fp8 is multiplied by queries that are sums of terms of fp8, and widened where its columns are
    // transposed. The columns beside those of values, which may be rotated, are always T.
    // LDS has room for all but 128 bytes of the columns of values of a row: the first ones are in registers before the last take their place.
    /// A lane's share of a row, as it is stored.
    struct OwnRow {
        Chunk part[kParts][kPartSteps];  // of bytes the first one
        float scale;  // that of columns 128 group_of_lane
    };
    /// Part `part` of a row; with the first one the scale. Of rows that are not there, and of columns behind the last one, zeros.
    HK_FN void load_part(OwnRow &to, int part, u64 row) const {
        const u32 group = hk::group_of_lane<kDim>(hk::lane_id()), of_lane = group * 16;
        if (kStored == Rows::Scaled && part == 0)
            to.scale = reinterpret_cast<GlobalPtr<const float>>(row + kScalesAt)[group];
        const u64 zeros = zero_row();
        const u32 pe = kStored == Rows::Scaled ? kScaledPeAt : kC * kElement, width = params().dqk - kC;
        const u32 first = part < kValueParts ? part * 64 * kElement : pe + (part - kValueParts) * 64 * kElementOfPe;
#pragma unroll
        for (int i = 0; i < (is_widened(part) ? 1 : kPartSteps); ++i) {
            const u32 byte = first + i * kFragBytes + of_lane;
            const bool there = kStored == Rows::Scaled || part < kValueParts || byte - pe < width * kElementOfPe;
            to.part[part][i] = vector((there ? row : zeros) + byte);
        }
    }
    /// Adds the products of the parts of an MFMA, `last` the last of them, and of all terms of the queries, in two chains.
    HK_FN void multiply_terms(typename Mma::Acc (&sum)[2], int last, const OwnRow &row) const {
        constexpr int kLoads = TermMma::kLoads;
        const int first = last + 1 - kLoads;
        Chunk bytes[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) bytes[i] = row.part[first + i][0];
#pragma unroll
        for (int t = 0; t < Terms::kTerms; ++t) sum[t % 2] = TermMma::mma(bytes, &q_[term_at(first, t)], sum[t % 2]);
    }
    HK_FN static u64 zero_row() {
        static __attribute__((constant)) const u8 zeros[kParts * 128] = {};
        return reinterpret_cast<u64>(&zeros[0]);
    }

    /// Where LDS has a chunk of a row of the t-th kDim keys: those of t = 1 are in the adjacent ones, so that transposed reads of both have
    /// no bank conflicts.
    HK_FN static u32 staged_at(u32 t, u32 row, u32 chunk) { return Tile::place(t * kDim + row, chunk ^ t); }
    /// Writes a chunk of a part's columns, of the lane's key, where `value_rows` reads it.
    HK_FN static void stage(Tile (&staged)[kSlots], int t, int part, u32 chunk, const Chunk &v) {
        const u32 of_tile = part % kTileParts * hk::kLaneGroups<kDim> + chunk;
        staged[part / kTileParts % kSlots].chunk[staged_at(t, hk::lane_id() % kDim, of_tile)] = v;
    }
    static constexpr bool kReadsTransposed = kAsBytes && hk::kHasReadTr;
    static constexpr int kAccs = 8 / (kAsBytes ? 1 : sizeof(T));  // of 128 bytes of columns
    /// What a lane reads of 128 bytes of columns, of the keys whose scores it has: 8 bytes, neighbouring columns, of each of 4 keys; or
    /// transposed, a column of each of kAccs operands, 8 keys.
    struct ValueRows {
        Vec<u32, 2> row[kReadsTransposed ? kAccs : kKeys / hk::kLaneGroups<kDim>];
    };
    /// ds_read_b64_tr_b8.
    HK_FN static Vec<u32, 2> read_transposed([[maybe_unused]] const Vec<int, 2> *at) {
#if defined(HK_AMD)
        return __builtin_bit_cast(
            Vec<u32, 2>, __builtin_amdgcn_ds_read_tr8_b64_v2i32((__attribute__((address_space(3))) Vec<int, 2> *)at));
#else
        return {};
#endif
    }
    HK_FN static ValueRows value_rows(const Tile &tile) {
        ValueRows rows;
        const u32 lane = hk::lane_id();
        if constexpr (kReadsTransposed) {
            // 16 lanes have addresses of 8 consecutive bytes, two in a row, of 8 rows; each gets a column.
            const u32 row = lane % kDim / 2;
#pragma unroll
            for (u32 j = 0; j < u32(kAccs); ++j) {
                const u32 at = staged_at(row / 4, Places::n(lane, row % 4), j);
                rows.row[j] = read_transposed(reinterpret_cast<const Vec<int, 2> *>(&tile.chunk[at]) + lane % 2);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < sizeof(rows.row) / sizeof(rows.row[0]); ++i) {
                const u32 at = staged_at(i / 4, Places::n(lane, i % 4), lane % kDim / 2);
                rows.row[i] = reinterpret_cast<const Vec<u32, 2> *>(&tile.chunk[at])[lane % 2];
            }
        }
        return rows;
    }
    using ValueFrag = Vec<u32, 2 * kKeyTiles>;
    HK_FN static void columns_of(const ValueRows &rows, ValueFrag (&operand)[kAccs]) {
#pragma unroll
        for (int j = 0; j < kAccs; ++j) {
            if constexpr (kReadsTransposed) {
                operand[j] = decode::BytesFp8<T>::template widened<2 * kKeyTiles>(rows.row[j]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2 * kKeyTiles; ++i) {
                const auto &first = rows.row[2 * i], &second = rows.row[2 * i + 1];
                if constexpr (kAsBytes) {
                    u32 pairs[2];
                    decode::BytesFp8<T>::across(first[j / 4], second[j / 4], j / 2 % 2, pairs);
                    operand[j][i] = pairs[j % 2];
                } else {
                    operand[j][i] = hk::detail::SelectHalf(j % 2 != 0)(first[j / 2], second[j / 2]);
                }
            }
        }
    }

    using AllColumns = hk::WaveTile<Mma, kC, kDim>;
    /// Probabilities as the operand over the keys.
    HK_FN static ValueFrag operand_of(const Scores &s) {
        ValueFrag frag;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const Vec<u32, 2> pairs = hk::pack_positive<T>(s.acc[0][t]);
            frag[2 * t] = pairs[0], frag[2 * t + 1] = pairs[1];
        }
        return frag;
    }

    HK_FN void walk_own_keys() {
        using Acc = typename Mma::Acc;
        constexpr int kTermSums = kScales ? kScales : 1;
        AllColumns o;
        OnlineSoftmax<kDim, T> softmax;  // the member would be in scratch
        const u32 lane = hk::lane_id(), wave = hk::wave_id();
        u32 tile = wave;
        // A lane finds row lane % kKeys of a tile; lanes that load parts of it ask that one.
        const auto key_of = [&](u32 of) { return first_ + of * kKeys + lane % kKeys; };
        const auto row_of_tile = [&](const Source &of, int t) {
            const u64 row = of.row ? of.row : zero_row();
            if constexpr (kKeyTiles == 1) return row;
            const u32 from = t * kDim + lane % kDim;
            return u64(hk::shuffle(u32(row >> 32), from)) << 32 | hk::shuffle(u32(row), from);
        };
        Tile(&staged)[kSlots] = lds_.rows[wave].part;
        Source from = source(key_of(tile), entry_of(key_of(tile)));
        i32 entry = entry_of(key_of(tile + S::kWaves));
        OwnRow own[kKeyTiles];
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const u64 row = row_of_tile(from, t);
#pragma unroll
            for (int part = 0; part < kParts; ++part) load_part(own[t], part, row);
        }
        for (; tile < n_tiles_; tile += S::kWaves) {
            const Source now = from;
            from = source(key_of(tile + S::kWaves), entry);
            entry = entry_of(key_of(tile + 2 * S::kWaves));
            lds_.state[wave][lane % kKeys] = now.state;
            u64 next[kKeyTiles];
#pragma unroll
            for (int t = 0; t < kKeyTiles; ++t) {
                next[t] = row_of_tile(from, t);
                if constexpr (kScales > 0)
                    lds_.scales[wave][hk::group_of_lane<kDim>(lane)][t * kDim + lane % kDim] = finite(own[t].scale);
            }
            Acc sum[kKeyTiles][2] = {}, of_terms[kKeyTiles][kTermSums][2] = {};
            ValueRows rows;
            // A part's fragments are multiplied, staged, and give their registers to those of the next tile.
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const bool terms = kAsBytes && part < kValueParts;
                if (part == kTileParts) rows = value_rows(staged[0]);
#pragma unroll
                for (int t = 0; t < kKeyTiles; ++t) {
                    if (terms) {
                        stage(staged, t, part, hk::group_of_lane<kDim>(lane), own[t].part[part][0]);
                        if ((part + 1) % TermMma::kLoads == 0)
                            multiply_terms(of_terms[t][part * kTermSums / kValueParts], part, own[t]);
                        continue;
                    }
                    auto &frags = own[t].part[part];
                    if (is_widened(part)) {
                        const Vec<u32, 8> v = widened(frags[0]);
                        frags[0] = v.lo, frags[1] = v.hi;
                    }
#pragma unroll
                    for (int i = 0; i < kPartSteps; ++i) {
                        const u32 chunk = chunk_of(part, i);
                        if (part >= kValueParts && hk::ballot(now.rotated) != 0) {
                            if (hk::shuffle(now.rotated, t * kDim + lane % kDim))
                                frags[i] = rotated_key((part - kValueParts) * 64 + chunk * 8);
                        }
                        if (part < kValueParts) stage(staged, t, part, chunk, frags[i]);
                        const int at = kAsBytes ? kTermFrags + (part - kValueParts) * kPartSteps : part * kPartSteps;
                        sum[t][i % 2] = Mma::mma(&frags[i], &q_[at + i], sum[t][i % 2]);
                    }
                }
                if (terms && (part + 1) % TermMma::kLoads != 0) continue;
                // Else the next fragments come before these are read, into registers of their own.
#if defined(HK_AMD)
#pragma unroll
                for (int t = 0; t < kKeyTiles; ++t) {
                    auto &chains = terms ? of_terms[t][part * kTermSums / kValueParts] : sum[t];
                    asm volatile("" : "+v"(chains[0]), "+v"(chains[1]));
                }
#endif
                const int loaded = terms ? TermMma::kLoads : 1;
#pragma unroll
                for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
                    for (int i = loaded - 1; i >= 0; --i) load_part(own[t], part - i, next[t]);
                }
                hk::sched_barrier();
            }
            Scores s;
#pragma unroll
            for (int t = 0; t < kKeyTiles; ++t) s.acc[0][t] = sum[t][0] + sum[t][1];
            if constexpr (kAsBytes) {
#pragma unroll
                for (int of = 0; of < kTermSums; ++of) {
                    Scores of_columns;
#pragma unroll
                    for (int t = 0; t < kKeyTiles; ++t) of_columns.acc[0][t] = of_terms[t][of][0] + of_terms[t][of][1];
                    if constexpr (kScales > 0) scale(of_columns, lds_.scales[wave][of]);
#pragma unroll
                    for (int t = 0; t < kKeyTiles; ++t) s.acc[0][t] += of_columns.acc[0][t] * unit_;
                }
            }
            mask(s, tile, now.state != 0.0f, lds_.state[wave]);
            softmax.update(s, o, scale_);
#pragma unroll
            for (int of = 0; of < kValueTiles; ++of) {
                ValueFrag columns[kAccs];
                columns_of(rows, columns);
                if (of + 1 < kValueTiles) rows = value_rows(staged[(of + 1) % kSlots]);
                Scores scaled = s;
                if constexpr (kScales > 0) scale(scaled, lds_.scales[wave][of]);
                const ValueFrag p = operand_of(scaled);
#pragma unroll
                for (int j = 0; j < kAccs; ++j) {
                    auto &acc = o.acc[0][of * kAccs + j];
                    if constexpr (kKeyTiles == 2)
                        acc = Mma::mma(&columns[j], &p, acc);
                    else
                        acc = hk::MmaInstruction<T, T, kDim, kDim>::mma(columns[j], p, acc);
                }
                hk::sched_barrier();
            }
        }
        meet(o, softmax.sums(0));
    }
    /// The sums of all waves, each wave those of its kCols columns: its own ones first, then the others' in ascending order.
    HK_FN void meet(const AllColumns &o, Vec<float, 2> own) {
        constexpr int kOwnAccs = kCols / kDim;
        const u32 lane = hk::lane_id(), wave = hk::wave_id(), row = lane % kDim;
        if (hk::group_of_lane<kDim>(lane) == 0) lds_.sums[wave][row] = own;
        hk::block_barrier();
        float base = kMinusInf, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < S::kWaves; ++w) base = __builtin_fmaxf(base, lds_.sums[w][row][0]);
#pragma unroll
        for (int w = 0; w < S::kWaves; ++w) {
            const Vec<float, 2> of = lds_.sums[w][row];
            sum = __builtin_fmaf(of[1], rescaled(of[0], base), sum);
        }
        met_[0] = {base, sum};
        const float factor = rescaled(own[0], base);
#pragma unroll
        for (u32 to = 0; to < u32(S::kWaves); ++to) {
            if (to > 0) hk::block_barrier();
            if (wave != to) {
#pragma unroll
                for (int i = 0; i < kOwnAccs; ++i)
                    lds_.sums_of_values[wave < to ? wave : wave - 1][i][lane] =
                        __builtin_bit_cast(Chunk, o.acc[0][to * kOwnAccs + i] * factor);
            }
            hk::block_barrier();
            if (wave == to) {
#pragma unroll
                for (int i = 0; i < kOwnAccs; ++i) {
                    auto all = o.acc[0][to * kOwnAccs + i] * factor;
#pragma unroll
                    for (int w = 0; w < S::kWaves - 1; ++w)
                        all += __builtin_bit_cast(typename Mma::Acc, lds_.sums_of_values[w][i][lane]);
                    o_.acc[0][i] = all;
                }
            }
        }
    }

    HK_FN Vec<float, 2> sums(u32 r) const { return kSplitKeys || S::kWarpgroups ? met_[r] : softmax_.sums(r); }

    HK_FN bool is_partial(const attention::Params &p) const {
        // Uniform: else the compiler selects between addresses, one of them in scratch.
        return p_.tickets ? hk::uniform(split_.parts) > 1 : p.splits.count > 1;
    }
    /// True: the outputs are partial ones.
    HK_FN bool store_outputs() const {
        const attention::Params &p = params();
        const bool packed = p.sequences.q_starts != 0;
        const bool once = wave_cols_ == 0 && hk::group_of_lane<kDim>(hk::lane_id()) == 0;
        const bool partial = is_partial(p);
        const float value_scale = p.cache.k.scale(0, 0);
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const Row &own = own_[r];
            if (partial) {
                const Vec<float, 2> of_row = sums(r);
                if (!own.there) continue;
                const Partial to = partial_of(p, work_, own.query, own.head);
                each_run(r, [&]<int N>(u32 col, Vec<float, N> y) { to.store<N>(col, y * value_scale); });
                if (once) to.store_sums(work_.poison ? Vec<float, 2>{0.0f, kNan} : of_row);
                continue;
            }
            auto [factor, lse] = finish_row(sums(r));
            if (work_.poison) factor = kNan, lse = kNan;
            if (!own.there) continue;
            const u64 row = row_address(p.out, work_, packed, own.query, own.head);
            // As merges do it, so that the bits are the same.
            each_run(r, [&]<int N>(u32 col, Vec<float, N> y) {
                store_run<N>(p, row, col, factor == 0.0f ? Vec<float, N>(0.0f) : y * value_scale * factor);
            });
            if (p.lse.data && once)
                *reinterpret_cast<GlobalPtr<float>>(row_address(p.lse, work_, packed, own.query, own.head)) = lse;
        }
        return partial;
    }
    /// The results of all splits of the tile, kMergedRows rows at a time, whose maxima and sums are in LDS.
    HK_FN void merge() const {
        constexpr u32 kPlaces = kMergeThreads / kMergedRows, kAhead = 8;
        constexpr int kRuns = kC / (kPlaces * 4);
        const attention::Params &p = params();
        const bool packed = p.sequences.q_starts != 0;
        const u32 rows = work_.q_len * p.group - work_.first, parts = split_.parts;
        const u32 place = hk::thread_x() % kPlaces;
        const bool merges = !S::kWarpgroups || hk::thread_x() < kMergeThreads;
        const auto partial = [&](u32 s, const Row &row) {
            Work of = work_;
            of.split = s;
            return partial_of(p, of, row.query, row.head);
        };
#pragma unroll 1
        for (u32 first = 0; first < u32(S::kRows) && first < rows; first += kMergedRows) {
            const Row of_sums = row_of(work_.first + first + hk::thread_x() % kMergedRows);
            copy_parts<kPlaces, kMostParts>(
                hk::thread_x() / kMergedRows, merges ? parts : 0, [&](u32 s) { return partial(s, of_sums).sums(); },
                [&](u32 s, Vec<float, 2> sums) { lds_.parts[s][hk::thread_x() % kMergedRows] = sums; });
            hk::block_barrier();
            const u32 at = hk::thread_x() / kPlaces;
            const Row own = row_of(work_.first + first + at);
            const auto sums = [&](u32 s) { return lds_.parts[s][at]; };
            const auto merged = MergedRow::of<kAhead>(parts, kMinusInf, sums);
            if (own.there && merges) {
                const u64 row = row_address(p.out, work_, packed, own.query, own.head);
                const auto column = [&](int run) { return (run * kPlaces + place) * 4; };
                const auto y = sum_of_parts<kRuns, 2>(
                    parts, sums, [&](Vec<float, 2> of) { return merged.factor(of); },
                    [&](u32 s, int run) { return partial(s, own).load(column(run)); });
#pragma unroll
                for (int run = 0; run < kRuns; ++run) store_run<4>(p, row, column(run), y.of[run]);
                if (p.lse.data && place == 0)
                    *reinterpret_cast<GlobalPtr<float>>(row_address(p.lse, work_, packed, own.query, own.head)) =
                        merged.lse();
            }
            hk::block_barrier();
        }
    }
    template <int N>
    HK_FN static void store_run(const attention::Params &p, u64 row, u32 col, Vec<float, N> y) {
        constexpr int kPart = N < 4 ? N : 4;
        const Vec<T, N> v = hk::narrow<T, N>(y);
#pragma unroll
        for (int i = 0; i < N; i += kPart) {
            auto *at = reinterpret_cast<GlobalPtr<T>>(row) + col + i;
            Vec<T, kPart> part;
#pragma unroll
            for (int e = 0; e < kPart; ++e) part[e] = v[i + e];
            if (p.out_vectorized) {
                *reinterpret_cast<GlobalPtr<Vec<T, kPart>>>(at) = part;
            } else {
#pragma unroll
                for (int e = 0; e < kPart; ++e) at[e] = part[e];
            }
        }
    }
    /// Calls `f(col, y)` for the runs of columns of the lane's row r.
    HK_FN void each_run(u32 r, auto f) const {
        if constexpr (kSplitKeys) {
            constexpr int kOwnAccs = kCols / kDim;
            if constexpr (kReadsTransposed) {
#pragma unroll
                for (int i = 0; i < kOwnAccs; ++i)
                    f.template operator()<4>((wave_cols_ * kOwnAccs + i) * kDim + Places::n(hk::lane_id(), 0),
                                             o_.acc[0][i]);
                return;
            }
            // A lane's accumulators of kAccs operands are neighbouring columns; with 256 columns of bytes a wave has half of them.
            constexpr int kRun = kAccs < kOwnAccs ? kAccs : kOwnAccs;
#pragma unroll
            for (int i = 0; i < kOwnAccs; i += kRun) {
                const u32 first = wave_cols_ * kOwnAccs + i;
#pragma unroll
                for (int n = 0; n < Places::kElements; ++n) {
                    Vec<float, kRun> y;
#pragma unroll
                    for (int e = 0; e < kRun; ++e) y[e] = o_.acc[0][i + e][n];
                    const u32 col =
                        first / kAccs * (kAccs * kDim) + Places::n(hk::lane_id(), n) * kAccs + first % kAccs;
                    f.template operator()<kRun>(col, y);
                }
            }
            return;
        }
        // Rows of operands that are neighbouring columns: all that a lane has of two or four tiles, or four or two of one.
        constexpr int kOperands = 64 / kDim, kInterleaved = hk::kHasReadTr || hk::kHasLdmatrix ? 1 : kOperands;
        constexpr int kRun = hk::kHasLdmatrix ? 2 : 4;
#pragma unroll
        for (int c = 0; c < kCols / 64; ++c) {
#pragma unroll
            for (int j = 0; j < kOperands; j += kInterleaved) {
#pragma unroll
                for (int i = 0; i < Places::kElements; i += kRun) {
                    if (u32(i) / hk::kMmaRows % kOwn != r) continue;
                    Vec<float, kRun * kInterleaved> y;
#pragma unroll
                    for (int e = 0; e < kRun * kInterleaved; ++e) {
                        y[e] = o_.acc[0][c * kOperands + j + e % kInterleaved][i + e / kInterleaved];
                    }
                    const u32 of_part = Tile::template column<kDim>(j * kDim + Places::n(hk::lane_id(), i));
                    f.template operator()<kRun * kInterleaved>(wave_cols_ * kCols + c * 64 + of_part, y);
                }
            }
        }
    }

  public:
    HK_FN Decode(const Params &p, const Work &work, const Keys &split, Lds &lds)
        : p_(p), work_(work), split_(split), lds_(lds) {
#pragma unroll
        for (auto &of_row : met_) of_row = {kMinusInf, 0.0f};
    }

    /// The lane's rows.
    HK_FN void find_rows() {
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r)
            own_[r] = row_of(work_.first + wave_rows_ * kDim + hk::row_of_lane<kDim>(hk::lane_id(), r));
    }
    /// Keys of the block that a row sees. No window: the keys of a query begin with the block's.
    HK_FN u32 seen(const Row &row) const {
        const i32 end = i32(row.query) + i32(work_.keys()) - i32(work_.q_len) + 1;
        const i32 most = i32(split_.end), least = i32(split_.first);
        return u32((end < least ? least : end < most ? end : most) - least);
    }
    /// Keys that the lane's rows see, and factors of scores.
    HK_FN void find_visible() {
        const attention::Params &p = p_.attention;
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) visible_[r] = seen(own_[r]);
        wave_visible_ = hk::uniform(seen(row_of(work_.first + wave_rows_ * kDim)));
        const float factor = p.scores.scale * p.cache.k.scale(0, 0);
        scaled_ = p.scores.softcap != 0.0f || !(factor > 0.0f);
        scale_ = kLog2E * (scaled_ ? 1.0f : factor);
    }

    /// `tile`: of the launch.
    HK_FN void run(u32 tile) {
        wave_rows_ = S::kWarpgroups ? hk::wave_id() % S::kWavesH : hk::wave_id() / S::kWavesV;
        wave_cols_ = S::kWarpgroups ? hk::wave_id() / S::kWavesH : hk::wave_id() % S::kWavesV;
        key_share_ = wave_cols_ % S::kKeyShares, col_share_ = kSplitKeys ? 0 : wave_cols_ / S::kKeyShares;
        if (!S::kWarpgroups) find_rows();
        bool keys = false;
        if (!work_.poison) {
            first_ = hk::uniform(split_.first), end_ = first_ + hk::uniform(seen(row_of(work_.first + S::kRows - 1)));
            if (!S::kWarpgroups) find_visible();
            keys = i32(end_) > i32(first_);
            if (keys) {
                if (p_.cos_sin) rotate();
                if constexpr (!S::kWarpgroups) {
                    load_queries();
                    if (p_.cos_sin) hk::block_barrier();
                    walk();
                }
            }
        }
        bool partial = false;
#if defined(HK_WARPGROUPS)
        if constexpr (S::kWarpgroups)
            partial = WarpgroupWalk<Decode>(*this).run(keys);
        else
#endif
            partial = store_outputs();
        if (!partial || !p_.tickets) return;
        const auto counter = reinterpret_cast<GlobalPtr<u32>>(p_.tickets) + hk::uniform(tile);
        if (last_to_arrive(counter, split_.parts, lds_.last)) merge();
    }
};

template <class S>
HK_FN void decode(const Params &p) {
    auto &lds = hk::block_lds<typename Decode<S>::Lds>();
    // Blocks of other heads read the same keys: they are on one XCD.
    const u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());
    Work work;
    if (!find_work<S::kRows>(p.attention, task, work)) return;
    if (p.listed) {
        work.cached = p.attention.pages.width, work.fresh = 0;
        work.pages = u64(i64(work.sequence) * p.attention.pages.row);
    } else {
        find_keys(p.attention, work);
    }
    const Keys split(p.attention, work);
    // A second launch reads the partial results of all splits.
    if (p.tickets && work.split >= split.parts) return;
    if constexpr (S::kWarpgroups) {
        if (hk::thread_x() == 0) lds.work = work;
        hk::block_barrier();
        Decode<S>(p, lds.work, split, lds).run(task / p.attention.splits.count);
    } else {
        Decode<S>(p, work, split, lds).run(task / p.attention.splits.count);
    }
}

}  // namespace mla

#include "mla_warpgroup.h"

// Entry points of 16 and of 64 rows. T, columns of values and beside them, how rows are stored.
#define HK_MLA(name, ...)                    \
    HK_MLA_ENTRY(name##_16, __VA_ARGS__, 16) \
    HK_MLA_ENTRY(name##_64, __VA_ARGS__, 64)
#define HK_MLA_ENTRY(name, ...)                                                                              \
    HK_ENTRY_WAVES_PER_SIMD(name, (mla::Shape<__VA_ARGS__>::kThreads), 1, (mla::Shape<__VA_ARGS__>::kWaves), \
                            mla::decode<mla::Shape<__VA_ARGS__>>)
