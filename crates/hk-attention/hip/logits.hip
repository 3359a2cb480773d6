// logits.hip: scores of an indexer, fp8_mqa_logits and pa_mqa_logits
//   out[i, j] = k_scale[j] sum over h of w[i, h] max(q[i, h] . k[j], 0)      keys j that query i sees; others: -inf
// A wave has one or two queries with all their heads, and walks through keys, kDim at a time. Keys go from memory to registers, a tile
// ahead: no LDS. Heads are the rows of the first operand, keys those of the second one: a lane has a key, and half of its heads.
//   fp8_mqa_logits: the waves of a block have queries of their own and the same keys, which the first one brings to the cache.
//   pa_mqa_logits: the waves of a block have keys of their own of one sequence; further queries of it find them in the cache.
// Floor: D + 4 bytes of each key that a sequence has; 2 H D flops for each query and key.
// Source: DeepSeek-V3.2 technical report (2025), lightning indexer.
#include "problem.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/mma.h>
#include <hk/types.h>
#include <hk/wave.h>
#include <hk/wave_tile.h>

namespace logits {
using hk::i64;
using hk::u32;
using hk::u64;

struct Params {
    u64 q, k, k_scale, weights, out;
    i64 q_row, q_head, k_row, weights_row, out_row;  // bytes; k_row: of keys or pages
    i64 k_token, scale_page, scale_token;  // bytes, of pages
    u64 starts, ends;  // i32 [queries]; of pages: 0
    u64 lens;  // i32 [sequences]
    u64 table, table_starts;  // i32; starts: 0, or those of sequences in the table
    i64 table_row;  // entries
    u32 table_width, n_pages, page_tokens, page_inverse;
    u32 queries, of_sequence, heads, columns;
    u32 keys;  // columns of out
    u32 chunks, tiles_of_chunk;
    u32 clean;
};
}  // namespace logits

namespace {
using namespace logits;
using attention::index_at;
using hk::Frag;
using hk::GlobalPtr;
using hk::i32;
using hk::u8;
using hk::Vec;

constexpr u32 kThreads = 256, kWaves = kThreads / hk::kWaveSize;
constexpr int kDim = hk::kRowsPerLane == 1 ? 32 : 16, kHeads = 64;
constexpr float kMinusInf = -__builtin_inff();

template <int kD, int kQueries, bool kPaged>
class Logits {
    using Mma = hk::FragMma<hk::Fp8, hk::Fp8, kDim>;
    using Places = hk::AccLayout<kDim>;
    static constexpr int kSteps = kD / hk::kFragBytesOf<kDim>, kTiles = kHeads / kDim;
    static constexpr int kOfLane = kTiles * Places::kElements / hk::kRowsPerLane;  // heads of a lane
    static constexpr u32 kNone = ~0u;

    struct Keys {
        Frag frag[kSteps];
        float scale[hk::kRowsPerLane];
    };
    struct Heads {
        Frag frag[kTiles][kSteps];
        float weight[kOfLane];
    };

    const Params &p_;
    u32 sequence_, query_, tile_, end_tile_;
    Heads heads_[kQueries];
    i32 first_[kQueries], end_[kQueries];  // keys that a query sees

  public:
    /// Queries from `query` on, up to `queries`; tiles [tile, end).
    HK_FN Logits(const Params &p, u32 sequence, u32 query, u32 queries, u32 tile, u32 end)
        : p_(p), sequence_(sequence), query_(query), tile_(tile), end_tile_(end) {
#pragma unroll
        for (u32 i = 0; i < kQueries; ++i) {
            first_[i] = end_[i] = 0;
            if (query + i >= queries) continue;
            i32 first = 0, last;
            if constexpr (kPaged) {
                const i32 keys = index_at(p.lens, sequence);
                last = keys < 0 ? 0 : keys - i32(p.of_sequence) + i32((query + i) % p.of_sequence) + 1;
            } else {
                first = index_at(p.starts, query + i), last = index_at(p.ends, query + i);
            }
            first_[i] = first < 0 ? 0 : first;
            end_[i] = last < i32(p.keys) ? last : i32(p.keys);
        }
    }

    HK_FN void run(u32 queries) {
        const Params &p = hk::reload_params(p_);
        const u32 groups = (p.heads + kHeads - 1) / kHeads;
        if (groups == 1) load_heads(0);
        u32 tile = next(tile_, queries);
        if (tile >= end_tile_) return;
        Keys keys = load_keys(tile);
#pragma unroll 1
        while (tile < end_tile_) {
            const u32 after = next(tile + 1, queries);
            const Keys now = keys;
            if (after < end_tile_) keys = load_keys(after);
            Vec<float, hk::kRowsPerLane> sums[kQueries] = {};
#pragma unroll 1
            for (u32 group = 0; group < groups; ++group) {
                if (groups > 1) load_heads(group);
#pragma unroll
                for (int i = 0; i < kQueries; ++i) add(sums[i], heads_[i], now);
            }
#pragma unroll
            for (u32 i = 0; i < kQueries; ++i) {
                if (query_ + i >= queries) continue;
#pragma unroll
                for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                    const float sum = hk::reduce_over_lane_groups<kDim>(sums[i][r], hk::Sum{});
                    put(i, tile * kDim + hk::row_of_lane<kDim>(hk::lane_id(), r), sum * now.scale[r]);
                }
            }
            tile = after;
        }
    }

  private:
    /// The next tile that a query sees a key of; those before it are cleaned.
    HK_FN u32 next(u32 tile, u32 queries) const {
        const Params &p = hk::reload_params(p_);
        for (; tile < end_tile_; ++tile) {
            const i32 first = i32(tile * kDim), end = first + kDim;
            bool seen = false;
#pragma unroll
            for (int i = 0; i < kQueries; ++i) seen |= first_[i] < end && end_[i] > first && first_[i] < end_[i];
            if (seen) break;
            if (!p.clean) continue;
#pragma unroll
            for (u32 i = 0; i < kQueries; ++i) {
                if (query_ + i >= queries) continue;
#pragma unroll
                for (u32 r = 0; r < hk::kRowsPerLane; ++r)
                    put(i, u32(first) + hk::row_of_lane<kDim>(hk::lane_id(), r), 0.0f);
            }
        }
        return tile;
    }

    HK_FN void put(u32 i, u32 key, float value) const {
        const Params &p = hk::reload_params(p_);
        const bool seen = i32(key) >= first_[i] && i32(key) < end_[i];
        if (hk::group_of_lane<kDim>(hk::lane_id()) != 0 || key >= p.keys || !(seen || p.clean)) return;
        const auto row = reinterpret_cast<GlobalPtr<float>>(p.out + u64(i64(query_ + i) * p.out_row));
        row[key] = seen ? value : kMinusInf;
    }

    HK_FN void load_heads(u32 group) {
        const Params &p = hk::reload_params(p_);
        const u32 lane = hk::lane_id();
#pragma unroll
        for (u32 i = 0; i < kQueries; ++i) {
            const u32 query = query_ + i < p.queries ? query_ + i : p.queries - 1;
            const u64 row = p.q + u64(i64(query) * p.q_row), weights = p.weights + u64(i64(query) * p.weights_row);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const u32 col = (step * hk::kLaneGroups<kDim> + hk::group_of_lane<kDim>(lane)) * 16;
                    heads_[i].frag[t][step] = hk::joined(hk::per_row([&](u32 r) {
                        const u32 head = group * kHeads + t * kDim + hk::row_of_lane<kDim>(lane, r);
                        Vec<u32, 4> v = 0;
                        if (head < p.heads && col < p.columns)
                            v = *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(row + u64(i64(head) * p.q_head) + col);
                        return v;
                    }));
                }
            }
#pragma unroll
            for (int e = 0; e < kOfLane; ++e) {
                const u32 head = group * kHeads + head_of(e);
                heads_[i].weight[e] = head < p.heads ? reinterpret_cast<GlobalPtr<const float>>(weights)[head] : 0.0f;
            }
        }
    }
    /// The head of a lane's e-th accumulator of each of its rows.
    HK_FN static u32 head_of(int e) {
        constexpr int kOfTile = kOfLane / kTiles;
        const int i = e % kOfTile / hk::kMmaRows * hk::kMmaRows * hk::kRowsPerLane + e % hk::kMmaRows;
        return e / kOfTile * kDim + Places::n(hk::lane_id(), i);
    }

    HK_FN Keys load_keys(u32 tile) const {
        const Params &p = hk::reload_params(p_);
        const u32 lane = hk::lane_id();
        u64 rows[hk::kRowsPerLane];
        Keys keys;
#pragma unroll
        for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
            const u32 key = tile * kDim + hk::row_of_lane<kDim>(lane, r);
            rows[r] = 0, keys.scale[r] = __builtin_nanf("");
            if (key >= p.keys) continue;
            if constexpr (kPaged) {
                const hk::DivMod at(key, p.page_tokens, p.page_inverse);
                i64 entry = i64(sequence_) * p.table_row + at.quotient, end = entry - at.quotient + p.table_width;
                if (p.table_starts) entry = i64(index_at(p.table_starts, sequence_)) + at.quotient, end = p.table_width;
                if (entry < 0 || entry >= end) continue;
                const u32 page = u32(reinterpret_cast<GlobalPtr<const i32>>(p.table)[entry]);
                if (page >= p.n_pages) continue;
                rows[r] = p.k + u64(i64(page) * p.k_row + i64(at.remainder) * p.k_token);
                keys.scale[r] = *reinterpret_cast<GlobalPtr<const float>>(
                    p.k_scale + u64(i64(page) * p.scale_page + i64(at.remainder) * p.scale_token));
            } else {
                rows[r] = p.k + u64(i64(key) * p.k_row);
                keys.scale[r] = reinterpret_cast<GlobalPtr<const float>>(p.k_scale)[key];
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const u32 col = (step * hk::kLaneGroups<kDim> + hk::group_of_lane<kDim>(lane)) * 16;
            keys.frag[step] = hk::joined(hk::per_row([&](u32 r) {
                // Tokens of a page with their scales are on 4 bytes.
                struct __attribute__((packed, aligned(kPaged ? 4 : 16))) Chunk {
                    Vec<u32, 4> v;
                };
                Vec<u32, 4> v = 0;
                if (rows[r] != 0 && col < p.columns) v = reinterpret_cast<GlobalPtr<const Chunk>>(rows[r] + col)->v;
                return v;
            }));
        }
        return keys;
    }

    HK_FN static void add(Vec<float, hk::kRowsPerLane> &sums, const Heads &heads, const Keys &keys) {
        hk::WaveTile<Mma, kHeads, kDim> products;
        struct {
            const Heads &heads;
            const Keys &keys;
            HK_FN Frag w(int i, int step) const { return heads.frag[i][step]; }
            HK_FN Frag a(int, int step) const { return keys.frag[step]; }
        } const from{heads, keys};
        products.template multiply_fragments<kSteps>(from);
#pragma unroll
        for (int e = 0; e < kOfLane; ++e) {
            constexpr int kOfTile = kOfLane / kTiles;
            const int first = e % kOfTile / hk::kMmaRows * hk::kMmaRows * hk::kRowsPerLane + e % hk::kMmaRows;
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                const float x = products.acc[0][e / kOfTile][first + r * hk::kMmaRows];
                sums[r] = __builtin_fmaf(__builtin_fmaxf(x, 0.0f), heads.weight[e], sums[r]);
            }
        }
    }
};

template <int kD, int kQueries>
HK_FN void dense(const Params &p) {
    const u32 group = hk::block_x() / p.chunks, chunk = hk::block_x() - group * p.chunks;
    const u32 query = (group * kWaves + hk::wave_id()) * kQueries;
    if (query >= p.queries) return;
    const u32 tiles = (p.keys + kDim - 1) / kDim, tile = chunk * p.tiles_of_chunk;
    const u32 end = tile + p.tiles_of_chunk < tiles ? tile + p.tiles_of_chunk : tiles;
    Logits<kD, kQueries, false>(p, 0, query, p.queries, tile, end).run(p.queries);
}

template <int kD, int kQueries>
HK_FN void paged(const Params &p) {
    const u32 sequence = hk::block_x() / p.chunks, chunk = hk::block_x() - sequence * p.chunks;
    const u32 tiles = (p.keys + kDim - 1) / kDim, tile = (chunk * kWaves + hk::wave_id()) * p.tiles_of_chunk;
    const u32 end = tile + p.tiles_of_chunk < tiles ? tile + p.tiles_of_chunk : tiles;
    const u32 first = sequence * p.of_sequence, queries = first + p.of_sequence;
#pragma unroll 1
    for (u32 query = first; query < queries; query += kQueries)
        Logits<kD, kQueries, true>(p, sequence, query, queries, tile, end).run(queries);
}
}  // namespace

// Entry points, as in src/logits.rs.
#define DENSE(columns, queries, waves) \
    HK_ENTRY_WAVES_PER_SIMD(mqa_logits_##columns, kThreads, waves, 8, dense<columns, queries>)
#define PAGED(columns) HK_ENTRY_WAVES_PER_SIMD(mqa_logits_paged_##columns, kThreads, 2, 8, paged<columns, 1>)

DENSE(64, 2, 2)
DENSE(128, 2, 1)
DENSE(256, 1, 2)
PAGED(64)
PAGED(128)
PAGED(256)
