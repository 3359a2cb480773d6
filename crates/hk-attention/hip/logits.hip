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
    i64 q_row, q_head, k_row, weights_row, out_row;  // bytes; k_row: of keys, at most 2^23, or of pages
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
constexpr int kDim = hk::kRowsPerLane == 1 ? 32 : 16, kHeads = 64, kOwn = hk::kRowsPerLane;  // kOwn: keys of a lane
constexpr float kMinusInf = -__builtin_inff();

/// max(x, 0), 0 of NaN. `inf` is that, which the compiler does not know: it would quiet x before it takes a maximum.
HK_FN float relu(float x, [[maybe_unused]] float inf) {
#if defined(__AMDGCN__)
    return __builtin_amdgcn_fmed3f(x, 0.0f, inf);
#else
    return __builtin_fmaxf(x, 0.0f);
#endif
}

/// Runs of a row that begins on 4 bytes: pages of tokens with their scales, weights.
template <class T>
struct __attribute__((packed, aligned(4))) Unaligned {
    T v;
};

/// Where keys are: rows of a tensor, pages of whole tiles, or pages of any number of tokens.
enum class Place { Rows, Tiles, Tokens };

template <int kD, int kQueries, Place kPlace>
class Logits {
    static constexpr bool kPaged = kPlace != Place::Rows;
    using Mma = hk::FragMma<hk::Fp8, hk::Fp8, kDim>;
    using Places = hk::AccLayout<kDim>;
    using Acc = typename Mma::Acc;
    using Pair = Vec<float, 2>;
    static constexpr int kSteps = kD / hk::kFragBytesOf<kDim>, kTiles = kHeads / kDim;
    static constexpr int kOfTile = Places::kElements / kOwn, kOfLane = kTiles * kOfTile;  // heads of a lane
    static_assert(kQueries <= hk::kLaneGroups<kDim>, "a group of lanes stores a query");

    struct Keys {
        Frag frag[kSteps];
        Vec<float, kOwn> scale;
    };
    struct Heads {
        Frag frag[kTiles][kSteps];
        float weight[kOfLane];
    };
    using Sums = Pair[kOwn];

    const Params &p_;
    u32 query_, queries_;  // the first one of the wave, and behind the last one that there is
    u32 begin_, end_;  // tiles
    u32 column_[kSteps];  // of a row, of the lane's fragments
    u32 key_[kOwn][kSteps],
        scale_[kOwn];  // bytes from a tile's first key to the lane's fragments, and to its keys' factors
    // Of the query that the lane stores:
    u64 out_;
    u32 first_, seen_;  // keys that it sees, from the lane's first row of a tile on
    u32 stored_first_, stored_;  // those that have a cell to write
    float inf_;
    // Of pages:
    u64 table_;
    u32 first_entry_, page_[kPlace == Place::Tiles ? 1 : kOwn];

  public:
    /// Queries from `query` on, up to `queries`; tiles [begin, end).
    HK_FN Logits(const Params &p, u32 sequence, u32 query, u32 queries, u32 begin, u32 end)
        : p_(p), query_(query), queries_(queries), begin_(begin), end_(end) {
        const u32 group = hk::group_of_lane<kDim>(hk::lane_id());
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            // Columns behind the last one are 0 in the queries: any of the key will do.
            const u32 column = (step * hk::kLaneGroups<kDim> + group) * 16;
            column_[step] = column < p.columns ? column : 0;
        }
        if constexpr (kPlace != Place::Tokens) {
            // Strides of keys are below 2^24 bytes. Of keys behind the last one: that.
            const u32 key_stride = u32(kPaged ? p.k_token : p.k_row) & 0xffffff;
            const u32 scale_stride = kPaged ? u32(p.scale_token) & 0xffffff : 4;
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const u32 row = hk::row_of_lane<kDim>(hk::lane_id(), r),
                          own = kPaged || row < p.keys ? row : p.keys - 1;
                scale_[r] = own * scale_stride;
#pragma unroll
                for (int step = 0; step < kSteps; ++step) key_[r][step] = own * key_stride + column_[step];
            }
        }
        first_ = seen_ = stored_first_ = stored_ = 0, out_ = 0;
        inf_ = __builtin_inff();
        hk::opaque(inf_);
        inner_first_ = 0, inner_end_ = query + kQueries > queries ? 0 : ~0u;
        i32 lowest = i32(p.keys), highest = 0;
#pragma unroll
        for (u32 i = 0; i < kQueries; ++i) {
            if (query + i >= queries) continue;
            i32 first = 0, last;
            if constexpr (kPaged) {
                const i32 keys = index_at(p.lens, sequence);
                last = keys < 0 ? 0 : keys - i32(p.of_sequence) + i32((query + i) % p.of_sequence) + 1;
            } else {
                first = index_at(p.starts, query + i), last = index_at(p.ends, query + i);
            }
            first = first < 0 ? 0 : first, last = last < i32(p.keys) ? last : i32(p.keys);
            const bool any = first < last;
            // Nothing if a query sees nothing.
            inner_first_ = u32(first) > inner_first_ ? u32(first) : inner_first_;
            inner_end_ = !any ? 0 : u32(last) < inner_end_ ? u32(last) : inner_end_;
            if (any && first < lowest) lowest = first;
            if (any && last > highest) highest = last;
            if (group != i) continue;
            const u32 row = hk::row_of_lane<kDim>(hk::lane_id());
            first_ = u32(first) - row, seen_ = any ? u32(last - first) : 0;
            stored_first_ = p.clean ? 0 - row : first_, stored_ = p.clean ? p.keys : seen_;
            out_ = p.out + u64(i64(query + i) * p.out_row) + row * 4;
        }
        lowest_ = u32(lowest) / kDim, highest_ = (u32(highest) + kDim - 1) / kDim;
        if constexpr (kPaged) {
            table_ = p.table, first_entry_ = 0;
            if (p.table_starts)
                first_entry_ = u32(index_at(p.table_starts, sequence));
            else
                table_ += u64(i64(sequence) * p.table_row) * 4;
        }
    }

    HK_FN void run() {
        const u32 begin = lowest_ > begin_ ? (lowest_ < end_ ? lowest_ : end_) : begin_;
        const u32 end = highest_ < begin ? begin : highest_ < end_ ? highest_ : end_;
        if (p_.clean) {
            fill(begin_, begin, 0.0f);
            fill(end, end_, 0.0f);
        }
        if (begin == end) return;
        if (kPaged && p_.n_pages == 0) return fill(begin, end, __builtin_nanf(""));
        if (p_.heads <= kHeads)
            walk(begin, end);
        else
            walk_by_groups(begin, end);
    }

  private:
    u32 lowest_, highest_;  // tiles with a key that some query sees
    u32 inner_first_, inner_end_;  // keys that all queries see

    /// All heads are in registers.
    HK_FN void walk(u32 begin, u32 end) {
        Heads heads[kQueries];
        if (p_.heads == 0) {
            for (auto &of : heads) of = {};
        } else {
            load_heads(heads, 0);
        }
        const auto ahead = [&](u32 tile) { return tile < end ? tile : end - 1; };
        find_pages(begin);
        Keys keys = load_keys(begin);
        find_pages(ahead(begin + 1));
        Keys next = load_keys(ahead(begin + 1));
        find_pages(ahead(begin + 2));
        Acc acc[2];
        acc[0] = product(heads[0].frag[0], keys);
        // The first heads of the next tile are multiplied while the last ones of this tile are weighted.
        const auto step = [&](Keys &now, const Keys &after, u32 tile) __attribute__((always_inline)) {
            constexpr int kLast = kQueries * kTiles - 1;
            Sums sums[kQueries] = {};
            weigh_all_but_last(sums, acc, heads, now);
            const Vec<float, kOwn> scale = now.scale;
            now = load_keys(ahead(tile + 2));
            find_pages(ahead(tile + 3));
            const float *weights = &heads[kQueries - 1].weight[kOfLane - kOfTile];
            if (tile + 1 < end)
                multiply_and_weigh(acc[0], heads[0].frag[0], after, sums[kQueries - 1], weights, acc[kLast % 2]);
            else
                weigh<0, kOfTile>(sums[kQueries - 1], weights, acc[kLast % 2]);
            put(tile, sums, scale);
        };
        static_assert(kQueries * kTiles % 2 == 0, "accumulators take turns");
#pragma unroll 1
        for (u32 tile = begin; tile < end; tile += 2) {
            step(keys, next, tile);
            if (tile + 1 == end) break;
            step(next, keys, tile + 1);
        }
    }
    /// More heads than are in registers.
    HK_FN void walk_by_groups(u32 begin, u32 end) {
#pragma unroll 1
        for (u32 tile = begin; tile < end; ++tile) {
            find_pages(tile);
            const Keys keys = load_keys(tile);
            Sums sums[kQueries] = {};
#pragma unroll 1
            for (u32 group = 0; group * kHeads < p_.heads; ++group) {
                Heads heads[kQueries];
                load_heads(heads, group);
                Acc acc[2];
                acc[0] = product(heads[0].frag[0], keys);
                weigh_all_but_last(sums, acc, heads, keys);
                weigh<0, kOfTile>(sums[kQueries - 1], &heads[kQueries - 1].weight[kOfLane - kOfTile], acc[1]);
            }
            put(tile, sums, keys.scale);
        }
    }

    /// All tiles [begin, end) have this score.
    HK_FN void fill(u32 begin, u32 end, float score) const {
#pragma unroll 1
        for (u32 tile = begin; tile < end; ++tile) put(tile, Vec<float, kOwn>(score));
    }

    /// The first of the keys that are multiplied as a tile: rows end with the last tile.
    HK_FN u32 first_key(u32 tile) const {
        const u32 first = tile * kDim, last = p_.keys < kDim ? 0 : p_.keys - kDim;
        return kPaged || first < last ? first : last;
    }

    /// Stores scores of the lane's keys.
    HK_FN void put(u32 tile, Vec<float, kOwn> scores) const {
        const u32 first = first_key(tile), begin = tile * kDim;
        const auto out = reinterpret_cast<GlobalPtr<float>>(out_ + u64(first) * 4);
        const bool all = first == begin && first >= inner_first_ && first + kDim <= inner_end_;
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const u32 row = hk::row_of_lane<kDim>(0, r);
            if (all) {
                if (kQueries == hk::kLaneGroups<kDim> || stored_ > 0) out[row] = scores[r];
            } else if (first + hk::row_of_lane<kDim>(hk::lane_id(), r) >= begin &&
                       first + row - stored_first_ < stored_) {
                out[row] = first + row - first_ < seen_ ? scores[r] : kMinusInf;
            }
        }
    }

    HK_FN void put(u32 tile, const Sums (&sums)[kQueries], Vec<float, kOwn> scale) const {
        Vec<float, kOwn> scores;
#pragma unroll
        for (int r = 0; r < kOwn; ++r) scores[r] = of_all_heads(sums, r) * scale[r];
        put(tile, scores);
    }

    HK_FN void load_heads(Heads (&to)[kQueries], u32 group) const {
        const Params &p = hk::reload_params(p_);
        const u32 lane = hk::lane_id(), last = p.heads - group * kHeads - 1;
#pragma unroll
        for (u32 i = 0; i < kQueries; ++i) {
            const u32 query = query_ + i < queries_ ? query_ + i : queries_ - 1;
            const u64 row = p.q + u64(i64(query) * p.q_row + i64(group * kHeads) * p.q_head);
            const u64 weights = p.weights + u64(i64(query) * p.weights_row) + group * kHeads * 4;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    to[i].frag[t][step] = hk::joined(hk::per_row([&](u32 r) {
                        // Heads that there are not have a weight of 0.
                        const u32 head = t * kDim + hk::row_of_lane<kDim>(lane, r);
                        const u64 at = row + u64(i64(head < last ? head : last) * p.q_head);
                        return *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(at + column_[step]);
                    }));
                }
            }
            const auto weight = reinterpret_cast<GlobalPtr<const float>>(weights);
            if (last + 1 >= kHeads) {
#pragma unroll
                for (int e = 0; e < kOfLane; e += hk::kMmaRows) {
                    const auto run =
                        *reinterpret_cast<GlobalPtr<const Unaligned<Vec<float, hk::kMmaRows>>>>(weight + head_of(e));
#pragma unroll
                    for (int j = 0; j < hk::kMmaRows; ++j) to[i].weight[e + j] = run.v[j];
                }
            } else {
#pragma unroll
                for (int e = 0; e < kOfLane; ++e) {
                    const u32 head = head_of(e);
                    const float v = weight[head < last ? head : last];
                    to[i].weight[e] = head <= last ? v : 0.0f;
                }
            }
        }
        if (p.columns == kD) return;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const bool there = (step * hk::kLaneGroups<kDim> + hk::group_of_lane<kDim>(lane)) * 16 < p.columns;
#pragma unroll
            for (Heads &heads : to) {
#pragma unroll
                for (auto &tile : heads.frag) tile[step] = there ? tile[step] : Frag(0);
            }
        }
    }
    /// The head of a lane's e-th accumulator of each of its rows.
    HK_FN static u32 head_of(int e) {
        const int i = e % kOfTile / hk::kMmaRows * hk::kMmaRows * kOwn + e % hk::kMmaRows;
        return e / kOfTile * kDim + Places::n(hk::lane_id(), i);
    }

    /// The pages of the tile that load_keys is called for next.
    HK_FN void find_pages(u32 tile) {
        const Params &p = p_;
        const auto find = [&](u32 key, auto entry_of) {
            const u32 entry = first_entry_ + hk::DivMod(key, p.page_tokens, p.page_inverse).quotient;
            return entry < p.table_width ? u32(entry_of(table_, entry)) : ~0u;
        };
        if constexpr (kPlace == Place::Tiles) {
            page_[0] = find(tile * kDim, index_at);
        } else if constexpr (kPlace == Place::Tokens) {
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const auto entry_of = [](u64 table, u32 entry) {
                    return reinterpret_cast<GlobalPtr<const i32>>(table)[entry];
                };
                page_[r] = find(tile * kDim + hk::row_of_lane<kDim>(hk::lane_id(), r), entry_of);
            }
        }
    }
    /// Of a page that is not there: those of the first one, with a factor of NaN.
    HK_FN Keys load_keys(u32 tile) {
        const Params &p = p_;
        Keys keys;
        if constexpr (kPlace == Place::Tokens) {
            u64 rows[kOwn];
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const u32 key = tile * kDim + hk::row_of_lane<kDim>(hk::lane_id(), r);
                const hk::DivMod at(key, p.page_tokens, p.page_inverse);
                const bool there = page_[r] < p.n_pages;
                const i64 page = there ? page_[r] : 0;
                rows[r] = p.k + u64(page * p.k_row + i64(at.remainder) * p.k_token);
                const u64 scale = p.k_scale + u64(page * p.scale_page + i64(at.remainder) * p.scale_token);
                keys.scale[r] = *reinterpret_cast<GlobalPtr<const float>>(scale);
                if (!there) keys.scale[r] = __builtin_nanf("");
            }
            load_fragments(keys, [&](u32 r, int step) { return rows[r] + column_[step]; });
        } else {
            u64 base, scales;
            bool there = true;
            if constexpr (kPaged) {
                const u32 first = tile * kDim;
                const hk::DivMod at(first, p.page_tokens, p.page_inverse);
                there = page_[0] < p.n_pages;
                const i64 page = there ? page_[0] : 0;
                base = p.k + u64(page * p.k_row + i64(at.remainder) * p.k_token);
                scales = p.k_scale + u64(page * p.scale_page + i64(at.remainder) * p.scale_token);
            } else {
                const u32 first = first_key(tile);
                base = p.k + u64(i64(first) * p.k_row), scales = p.k_scale + u64(first) * 4;
            }
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                hk::opaque(scale_[r]);
                const auto scale = reinterpret_cast<GlobalPtr<const u8>>(scales) + scale_[r];
                keys.scale[r] = *reinterpret_cast<GlobalPtr<const float>>(scale);
                if (!there) keys.scale[r] = __builtin_nanf("");
            }
            load_fragments(keys, [&](u32 r, int step) {
                hk::opaque(
                    key_[r][step]);  // else it would be extended outside of the loop, and added by an instruction
                return base + key_[r][step];
            });
        }
        return keys;
    }
    HK_FN void load_fragments(Keys &keys, auto address) const {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            keys.frag[step] = hk::joined(hk::per_row([&](u32 r) {
                using Run = decltype([] {
                    if constexpr (kPaged)
                        return Unaligned<Vec<u32, 4>>{};
                    else
                        return Vec<u32, 4>{};
                }());
                const Run run = *reinterpret_cast<GlobalPtr<const Run>>(address(r, step));
                if constexpr (kPaged)
                    return run.v;
                else
                    return run;
            }));
        }
    }

    /// The sum of all lanes with a key, of the query that the lane stores.
    HK_FN static float of_all_heads(const Sums (&sums)[kQueries], int r) {
        const u32 group = hk::group_of_lane<kDim>(hk::lane_id());
        const float first = sums[0][r][0] + sums[0][r][1], last = sums[kQueries - 1][r][0] + sums[kQueries - 1][r][1];
        if constexpr (kQueries == 2 && hk::kLaneGroups<kDim> == 2) {
            const float own = group == 0 ? first : last, other = group == 0 ? last : first;
            return own + hk::shuffle_xor<kDim>(other);
        } else {
            const float all = hk::reduce_over_lane_groups<kDim>(first, hk::Sum{});
            if constexpr (kQueries == 1) return all;
            // All lanes take part in both.
            const float all_of_last = hk::reduce_over_lane_groups<kDim>(last, hk::Sum{});
            return group == 0 ? all : all_of_last;
        }
    }

    HK_FN Acc product(const Frag (&heads)[kSteps], const Keys &keys) const {
        Acc acc = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; step += Mma::kFrags) acc = Mma::mma(&heads[step], &keys.frag[step], acc);
        return acc;
    }
    /// Adds the scores of heads [kBegin, kEnd) of the lane's in a tile, weighted.
    template <int kBegin, int kEnd>
    HK_FN void weigh(Sums &sums, const float *weights, const Acc &acc) const {
#pragma unroll
        for (int e = kBegin; e < kEnd; e += 2) {
            const int first = e / hk::kMmaRows * hk::kMmaRows * kOwn + e % hk::kMmaRows;
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const int at = first + r * hk::kMmaRows;
                const Pair x = {relu(acc[at], inf_), relu(acc[at + 1], inf_)};
                if constexpr (hk::kMmaBlocksPackedF32) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float sum = __builtin_fmaf(x[j], weights[e + j], sums[r][0]);
                        hk::opaque(sum);  // else those of two queries would be packed
                        sums[r][0] = sum;
                    }
                } else {
                    sums[r] = __builtin_elementwise_fma(x, Pair{weights[e], weights[e + 1]}, sums[r]);
                }
            }
        }
        // Here, not behind later MMAs.
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            float even = sums[r][0], odd = sums[r][1];
            hk::opaque(even), hk::opaque(odd);
            sums[r] = {even, odd};
        }
    }
    /// `to` = the product of heads and keys, while the scores `of` are weighted: some of them after each MMA.
    template <int kStep = 0>
    HK_FN void multiply_and_weigh(Acc &to, const Frag (&heads)[kSteps], const Keys &keys, Sums &sums,
                                  const float *weights, const Acc &of) const {
        constexpr int kPairs = kOfTile / 2, kNext = kStep + Mma::kFrags;
        if constexpr (kStep == 0) to = 0.0f;
        to = Mma::mma(&heads[kStep], &keys.frag[kStep], to);
        weigh<kPairs * kStep / kSteps * 2, kPairs * kNext / kSteps * 2>(sums, weights, of);
        hk::sched_barrier();
        if constexpr (kNext < kSteps) multiply_and_weigh<kNext>(to, heads, keys, sums, weights, of);
    }
    /// Tiles of heads take turns in the accumulators: of the first one, acc[0] has the product, and in the end acc[1] that of the last one.
    HK_FN void weigh_all_but_last(Sums (&sums)[kQueries], Acc (&acc)[2], const Heads (&heads)[kQueries],
                                  const Keys &keys) const {
#pragma unroll
        for (int i = 0; i + 1 < kQueries * kTiles; ++i) {
            const int of = i / kTiles, next = i + 1;
            multiply_and_weigh(acc[next % 2], heads[next / kTiles].frag[next % kTiles], keys, sums[of],
                               &heads[of].weight[i % kTiles * kOfTile], acc[i % 2]);
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
    Logits<kD, kQueries, Place::Rows>(p, 0, query, p.queries, tile, end).run();
}

template <int kD, Place kPlace>
HK_FN void paged(const Params &p) {
    const u32 sequence = hk::block_x() / p.chunks, chunk = hk::block_x() - sequence * p.chunks;
    const u32 tiles = (p.keys + kDim - 1) / kDim, tile = (chunk * kWaves + hk::wave_id()) * p.tiles_of_chunk;
    const u32 end = tile + p.tiles_of_chunk < tiles ? tile + p.tiles_of_chunk : tiles;
    if (tile >= end) return;
    const u32 first = sequence * p.of_sequence, queries = first + p.of_sequence;
#pragma unroll 1
    for (u32 query = first; query < queries; ++query)
        Logits<kD, 1, kPlace>(p, sequence, query, queries, tile, end).run();
}
}  // namespace

// Entry points, as in src/logits.rs: by columns; of pages of whole tiles, and of any number of tokens.
#define DENSE(columns, queries) HK_ENTRY_WAVES_PER_SIMD(mqa_logits_##columns, kThreads, 2, 8, dense<columns, queries>)
#define PAGED(columns, waves)                                                                             \
    HK_ENTRY_WAVES_PER_SIMD(mqa_logits_paged_##columns, kThreads, waves, 8, paged<columns, Place::Tiles>) \
    HK_ENTRY_WAVES_PER_SIMD(mqa_logits_tokens_##columns, kThreads, waves, 8, paged<columns, Place::Tokens>)

DENSE(64, 2)
DENSE(128, 2)
DENSE(256, 1)
PAGED(64, 2)
PAGED(128, 2)
PAGED(256, 1)
