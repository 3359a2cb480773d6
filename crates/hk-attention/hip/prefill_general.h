// prefill_general.h: attention of prompts with every option, for rows of any type, stride and alignment, fresh or in pages.
//
//   s = scale (q . k);  s = softcap tanh(s / softcap);  s -= slope |i + off - j|;  s += bias;  masked: -inf
//   out = sum of softmax(s) v
//
// A block has kWaves waves of kDim queries. Keys come by tiles of kKeys: K as rows, V transposed with its columns in the order of
// accumulators, both through registers; the next tile is loaded while this one is multiplied. S^T = K Q^T and O^T = V^T P^T: P stays in
// the lane that has its scores. The fast kernels are in prefill_dense.h.
// Source: Dao et al. 2022, "FlashAttention", algorithm 1; Milakov and Gimelshein 2018, algorithm 3.
#pragma once

#include "outputs.h"
#include "problem.h"
#include "rows.h"
#include "softmax.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/philox.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>
#include <hk/wave_tile.h>

namespace attention {

namespace general {

inline constexpr int kThreads = 256;
inline constexpr int kWaves = kThreads / hk::kWaveSize;
inline constexpr int kKeys = 32;  // of a tile
/// Rows of the accumulators that a lane has.
inline constexpr int kLaneRows = hk::kRowsPerLane;
/// Queries of a wave: half as many where the accumulators of their outputs would take all registers.
template <int kDv>
inline constexpr int kQueries = hk::kRowsPerLane == 1 && kDv <= 256 ? 32 : 16;

/// Tiles of K and of V^T, in one place if LDS has no room for both.
template <class K, class V, bool kShared>
struct Tiles {
    K k;
    V v;
};
template <class K, class V>
struct Tiles<K, V, true> {
    union {
        K k;
        V v;
    };
};

template <class T, int kDqk, int kDv>
struct Lds {
    static constexpr int kKTiles = kDqk * int(sizeof(T)) / 128;  // of 128 bytes of the rows
    struct KTile {
        hk::SharedTile<kKeys, 128> part[kKTiles];
    };
    using VTile = hk::SharedTile<kDv, kKeys *int(sizeof(T))>;
    using Table = RowTable<kKeys>;
    static constexpr bool kShared = sizeof(KTile) + sizeof(VTile) + 2 * sizeof(Table) > hk::kLdsBytes;

    Tiles<KTile, VTile, kShared> tiles;
    Table rows[2];
};

/// A query of the lane.
struct Query {
    u32 index, head;
    bool valid;
    KeyRange keys;  // that it sees by causality and window
    float factor;  // of its products
};

/// `W` is Work, or has a part of its keys by itself (lean.h).
template <class T, int kDqk, int kDv, bool kHstu, class W = Work>
class Prefill {
    static constexpr int kDim = kQueries<kDv>;
    using Places = hk::AccLayout<kDim>;
    using Mma = hk::FragMma<T, T, kDim>;
    using L = Lds<T, kDqk, kDv>;
    static constexpr int kVec = 16 / int(sizeof(T));
    static constexpr int kSteps = kDqk * int(sizeof(T)) / hk::kFragBytesOf<kDim>;
    static constexpr int kStepsOfTile = 128 / hk::kFragBytesOf<kDim>;
    static constexpr int kUnits = kKeys / 4 * (kDv / 4);  // of V: four keys by four columns
    static constexpr int kVParts = (kUnits + kThreads - 1) / kThreads;
    static constexpr u32 kRows = kWaves * kDim;
    static_assert(kSteps % Mma::kFrags == 0, "whole MMAs");

    struct KChunks {
        Vec<T, kVec> part[L::kKTiles];
    };
    struct VChunks {
        Vec<T, 4> part[kVParts][4];
    };

    const Params &p_;
    const W &work_;
    L &lds_;
    bool packed_;
    Query queries_[kLaneRows];
    hk::Frag q_[kSteps];
    hk::WaveTile<Mma, kKeys, kDim> s_;
    hk::WaveTile<Mma, kDv, kDim> o_;
    OnlineSoftmax<kDim, float> softmax_;
    float key_scale_[2], value_scale_[2];

  public:
    HK_FN Prefill(const Params &p, const W &work, L &lds)
        : p_(p), work_(work), lds_(lds), packed_(p.sequences.q_starts != 0) {}

    HK_FN void run() {
        const Params &p = hk::reload_params(p_);
        const u32 group = hk::group_of_lane<kDim>(lane_of(work_));
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const u32 row = work_.first + hk::wave_id() * kDim + hk::row_of_lane<kDim>(lane_of(work_), r);
            const hk::DivMod at(row, p.group, p.group_inverse);
            Query &query = queries_[r];
            query = {at.quotient, work_.kv_head * p.group + at.remainder, at.quotient < work_.q_len,
                     key_range(p, work_, at.quotient), p.scores.scale};
            if (p.q_descale && query.valid) {
                query.factor *= reinterpret_cast<GlobalPtr<const float>>(
                    p.q_descale)[i64(work_.sequence) * p.q_descale_batch + i64(query.head) * p.q_descale_head];
            }
        }
        const u32 element = p.q_type == kOwn ? sizeof(T) : 1;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const u32 col = (step * hk::kLaneGroups<kDim> + group) * kVec;
            q_[step] = hk::joined(hk::per_row([&](u32 r) {
                const Query &query = queries_[r];
                Vec<T, kVec> v = T(0);
                if (query.valid && col < p.dqk) {
                    const u64 row = row_address(p.q, work_, packed_, query.index, query.head);
                    v = load_row<T, kVec>(reinterpret_cast<GlobalPtr<const u8>>(row + col * element), p.q_type,
                                          p.q_vectorized, element, i32(p.dqk - col));
                }
                return __builtin_bit_cast(Vec<u32, 4>, v);
            }));
        }
        key_scale_[0] = p.cache.k.scale(work_.sequence, work_.kv_head);
        key_scale_[1] = p.fresh.k.scale(work_.sequence, work_.kv_head);
        value_scale_[0] = p.cache.v.scale(work_.sequence, work_.kv_head);
        value_scale_[1] = p.fresh.v.scale(work_.sequence, work_.kv_head);

        const u32 last_row = work_.q_len * p.group - 1;
        const u32 last = work_.first + kRows - 1 < last_row ? work_.first + kRows - 1 : last_row;
        const u32 first_query = hk::DivMod(work_.first, p.group, p.group_inverse).quotient;
        const u32 last_query = hk::DivMod(last, p.group, p.group_inverse).quotient;
        i32 from = key_range(p, work_, first_query).first, to = key_range(p, work_, last_query).last + 1;
        if constexpr (kHstu) {
            const Hstu &hstu = p.hstu;
            from = 0, to = hstu.causal && first_query >= hstu.contextual ? i32(last_query) + 1 : i32(work_.keys());
        }
        if (to < from) to = from;
        const KeyTiles tiles(work_, hk::uniform(u32(from)), hk::uniform(u32(to)), kKeys);
        walk(tiles);
        finish();
    }

  private:
    HK_FN KeyTile tile(const KeyTiles &tiles, u32 t) const { return {tiles, t, kKeys}; }

    HK_FN void fill(const KeyTiles &tiles, u32 t) {
        const Params &p = hk::reload_params(p_);
        if (t >= tiles.count()) return;
        lds_.rows[t % 2].fill(p, work_, tile(tiles, t), work_.kv_head);
    }

    HK_FN void walk(const KeyTiles &tiles) {
        const Params &p = hk::reload_params(p_);
        const u32 n = work_.poison ? 0 : tiles.count();
        if (n == 0) return;
        fill(tiles, 0);
        hk::block_barrier();
        KChunks k = load_keys(tile(tiles, 0), lds_.rows[0]);
        VChunks v = load_values(tile(tiles, 0), lds_.rows[0]);
        fill(tiles, 1);
        for (u32 t = 0; t < n; ++t) {
            const bool more = t + 1 < n;
            const KeyTile now = tile(tiles, t), next = tile(tiles, more ? t + 1 : t);
            // All waves have left K of the last tile before its second barrier, V before the first one below.
            if (L::kShared) hk::block_barrier();
            store(k);
            hk::block_barrier();
            if (more) k = load_keys(next, lds_.rows[(t + 1) % 2]);
            multiply_keys();
            if constexpr (kHstu) {
                activate(now);
            } else {
                score(now);
                softmax_.update(s_, o_, 1.0f);
            }
            if (p.scores.dropout) drop(now);
            scale_values(now);
            if (L::kShared) hk::block_barrier();
            store(v);
            hk::block_barrier();
            if (more) v = load_values(next, lds_.rows[(t + 1) % 2]);
            // The table of this tile was last read before the barrier at its top.
            fill(tiles, t + 2);
            multiply_values();
        }
    }

    HK_FN KChunks load_keys(const KeyTile &tile, const RowTable<kKeys> &rows) const {
        const Params &p = hk::reload_params(p_);
        const KeysValues &kv = tile.fresh ? p.fresh : p.cache;
        const u64 row = rows.k[hk::thread_x() / 8];
        KChunks k;
#pragma unroll
        for (int i = 0; i < L::kKTiles; ++i) {
            const u32 col = (i * 8 + hk::thread_x() % 8) * kVec;
            k.part[i] = T(row == kMissingRow ? __builtin_nanf("") : 0.0f);
            if (row > kMissingRow && col < p.dqk) {
                const auto at = reinterpret_cast<GlobalPtr<const u8>>(row + u64(kv.k.column_offset(col)));
                k.part[i] = load_row<T, kVec>(at, kv.element, kv.vectorized, kv.k.column, i32(p.dqk - col));
            }
        }
        return k;
    }
    HK_FN void store(const KChunks &k) {
        const u32 row = hk::thread_x() / 8, chunk = hk::thread_x() % 8;
#pragma unroll
        for (int i = 0; i < L::kKTiles; ++i) {
            auto &part = lds_.tiles.k.part[i];
            part.chunk[part.place(row, chunk)] = __builtin_bit_cast(Vec<u32, 4>, k.part[i]);
        }
    }

    /// V^T of 16-bit elements is written without bank conflicts: as by TransposingRows (keys.h), for 32 keys. Of 16 queries, quads q and
    /// q + 4 of keys are the halves of a chunk.
    static constexpr bool kInQuads = kLaneRows == 1 && sizeof(T) == 2;
    struct Unit {
        u32 quad, col;
        bool there;
        HK_FN explicit Unit(int part) {
            const u32 unit = hk::thread_x() + part * kThreads;
            quad = unit / (kDv / 4), col = unit % (kDv / 4) * 4;
            if constexpr (kInQuads) {
                constexpr u32 kColumnsOfWave = 64, kWavesOfRow = kDv / kColumnsOfWave;
                const u32 lane = hk::lane_id(), wave = unit / hk::kWaveSize;
                constexpr u32 kOtherHalf = kDim == 32 ? 2 : 4;
                quad = wave / kWavesOfRow * (8 / kOtherHalf) + lane / 4 % 2 * kOtherHalf + lane / 8 % 2;
                col = wave % kWavesOfRow * kColumnsOfWave + lane / 16 * 16 + lane % 4 * 4;
            }
            there = kUnits % kThreads == 0 || unit < kUnits;
        }
    };
    HK_FN VChunks load_values(const KeyTile &tile, const RowTable<kKeys> &rows) const {
        const Params &p = hk::reload_params(p_);
        const KeysValues &kv = tile.fresh ? p.fresh : p.cache;
        const i64 element = kv.element == kOwn ? sizeof(T) : 1;
        const bool by_rows = kv.v.column == element;
        VChunks v;
#pragma unroll
        for (int i = 0; i < kVParts; ++i) {
            const Unit unit(i);
            if (!by_rows && unit.there && load_columns(kv, unit, rows, v.part[i])) continue;
#pragma unroll
            for (u32 r = 0; r < 4; ++r) {
                v.part[i][r] = T(0);
                const u64 row = unit.there ? rows.v(unit.quad * 4 + r) : 0;
                if (row != 0 && unit.col < p.dv) {
                    const auto at = reinterpret_cast<GlobalPtr<const u8>>(row + u64(kv.v.column_offset(unit.col)));
                    v.part[i][r] =
                        load_row<T, 4>(at, kv.element, by_rows && kv.vectorized, kv.v.column, i32(p.dv - unit.col));
                }
            }
        }
        return v;
    }
    /// Loads a unit by columns, where its four tokens are neighbours in memory. False: they are not.
    HK_FN bool load_columns(const KeysValues &kv, const Unit &unit, const RowTable<kKeys> &rows,
                            Vec<T, 4> (&v)[4]) const {
        const u32 dv = hk::reload_params(p_).dv;
        const u64 element = kv.element == kOwn ? sizeof(T) : 1;
        const u64 first = rows.v(unit.quad * 4);
        bool neighbours = (first | u64(kv.v.column)) % (4 * element) == 0;
#pragma unroll
        for (u32 r = 1; r < 4; ++r) neighbours = neighbours && rows.v(unit.quad * 4 + r) == first + r * element;
        if (!neighbours) return false;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            Vec<T, 4> tokens = T(0);
            if (unit.col + j < dv) {
                const auto at = reinterpret_cast<GlobalPtr<const u8>>(first + u64(kv.v.column_offset(unit.col + j)));
                tokens = load_row<T, 4>(at, kv.element, true, 0, 4);
            }
#pragma unroll
            for (u32 r = 0; r < 4; ++r) v[r][j] = tokens[r];
        }
        return true;
    }
    HK_FN void store(const VChunks &v) {
#pragma unroll
        for (int i = 0; i < kVParts; ++i) {
            const Unit unit(i);
            if (!unit.there) continue;
            const u32 byte = Places::template place<T>(unit.quad * 4) * sizeof(T);
            const auto &part = v.part[i];
            if constexpr (kInQuads) {
                const u32 odd = unit.quad % 2;
                Vec<u32, 2> rows[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) rows[r] = __builtin_bit_cast(Vec<u32, 2>, part[r]);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    const hk::detail::SelectHalf half((j ^ odd) % 2 != 0);
                    lds_.tiles.v.put(
                        unit.col + (j ^ odd), byte,
                        Vec<u32, 2>{half(rows[0][j / 2], rows[1][j / 2]), half(rows[2][j / 2], rows[3][j / 2])});
                }
            } else {
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    lds_.tiles.v.put(unit.col + j, byte, Vec<T, 4>{part[0][j], part[1][j], part[2][j], part[3][j]});
            }
        }
    }

    HK_FN void multiply_keys() {
#pragma unroll
        for (auto &acc : s_.acc[0]) acc = typename Mma::Acc(0.0f);
        struct {
            const Prefill &of;
            HK_FN hk::Frag w(int i, int step) const {
                const auto &part = of.lds_.tiles.k.part[step / kStepsOfTile];
                return hk::joined(part.template chunks<kDim>(i * kDim, step % kStepsOfTile));
            }
            HK_FN hk::Frag a(int, int step) const { return of.q_[step]; }
        } const from{*this};
        s_.template multiply_fragments<kSteps>(from);
    }
    HK_FN void multiply_values() {
        struct {
            const Prefill &of;
            typename hk::WaveTile<Mma, kKeys, kDim>::template AsOperand<T> p;
            HK_FN hk::Frag w(int i, int step) const {
                return hk::joined(of.lds_.tiles.v.template chunks<kDim>(i * kDim, step));
            }
            HK_FN hk::Frag a(int, int step) const { return p.frag[step]; }
        } const from{*this, s_.template as_operand<T>(0)};
        o_.template multiply_fragments<from.p.kFrags>(from);
    }

    /// Calls `f(acc, r, key)` for the lane's scores: row r of the lane, key of the sequence.
    HK_FN void each(const KeyTile &tile, auto f) {
        constexpr int kAll = kKeys / kDim * Places::kElements;
#pragma unroll
        for (int i = 0; i < kAll; ++i) {
            float acc = s_.acc[0][i / Places::kElements][i % Places::kElements];
            acc = f(acc, i / hk::kMmaRows % kLaneRows, tile.first + Places::n(hk::lane_id(), i));
            s_.acc[0][i / Places::kElements][i % Places::kElements] = acc;
        }
    }

    /// Products to scores in units of log2.
    HK_FN void score(const KeyTile &tile) {
        const Params &p = hk::reload_params(p_);
        const Scores &of = p.scores;
        const float key_scale = key_scale_[tile.fresh];
        each(tile, [&](float s, int r, u32) { return s * (queries_[r].factor * key_scale); });
        if (of.softcap != 0.0f) {
            const float inverse = 1.0f / of.softcap;
            each(tile, [&](float s, int, u32) { return of.softcap * hk::tanh(s * inverse); });
        }
        const i32 off = i32(work_.keys()) - i32(work_.q_len);
        if (of.alibi) {
            float slope[kLaneRows];
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                slope[r] = queries_[r].valid ? reinterpret_cast<GlobalPtr<const float>>(
                                                   of.alibi)[i64(work_.sequence) * of.alibi_batch + queries_[r].head]
                                             : 0.0f;
            }
            each(tile, [&](float s, int r, u32 key) {
                const float away = float(i32(queries_[r].index) + off - i32(key));
                return s - slope[r] * __builtin_fabsf(away);
            });
        }
        if (of.bias.data) add_bias(tile);
        each(tile, [&](float s, int r, u32 key) {
            const Query &query = queries_[r];
            const bool visible = key < tile.end && i32(key) >= query.keys.first && i32(key) <= query.keys.last;
            return visible ? s * kLog2E : kMinusInf;
        });
        if (of.mask) apply_mask(tile);
    }

    HK_FN void add_bias(const KeyTile &tile) {
        const Params &p = hk::reload_params(p_);
        const Scores &of = p.scores;
        const i32 before = of.bias_fresh ? i32(work_.keys()) - i32(work_.q_len) : 0;
        each(tile, [&](float s, int r, u32 key) {
            const Query &query = queries_[r];
            const i32 col = i32(key) - before;
            if (!query.valid || key >= tile.end || col < 0) return s;
            if (query.index >= of.bias_rows || u32(col) >= of.bias_cols) return __builtin_nanf("");
            const u64 row = of.bias.data + u64(i64(work_.sequence) * of.bias.batch + i64(query.head) * of.bias.head +
                                               i64(query.index) * of.bias.row);
            if (of.bias_type == kF32) return s + reinterpret_cast<GlobalPtr<const float>>(row)[col];
            return s + float(reinterpret_cast<GlobalPtr<const T>>(row)[col]);
        });
    }

    HK_FN void apply_mask(const KeyTile &tile) {
        const Params &p = hk::reload_params(p_);
        const Scores &of = p.scores;
        if (!tile.fresh && of.mask_fresh_only) return;
        const i64 start = index_at(of.mask_starts, work_.sequence);
        const u64 bytes = u64(work_.q_len) * work_.keys();
        const bool there = start >= 0 && u64(start) <= of.mask_bytes && bytes <= of.mask_bytes - u64(start);
        each(tile, [&](float s, int r, u32 key) {
            const Query &query = queries_[r];
            if (!query.valid || key >= tile.end) return s;
            if (!there) return __builtin_nanf("");
            const u64 at = of.mask + u64(start) + u64(query.index) * work_.keys() + key;
            return *reinterpret_cast<GlobalPtr<const u8>>(at) != 0 ? s : kMinusInf;
        });
    }

    /// Products to activations: silu(scale s), 0 where masked. The sums are divided, so that f16 holds them.
    HK_FN void activate(const KeyTile &tile) {
        const Params &p = hk::reload_params(p_);
        const HstuMask mask(p.hstu, work_);
        each(tile, [&](float s, int r, u32 key) {
            const bool visible = key < tile.end && mask.sees(i32(queries_[r].index), i32(key));
            const float x = s * queries_[r].factor;
            return visible ? x * hk::sigmoid(x) : 0.0f;
        });
    }

    /// Drops probabilities by random words that depend on indices alone: a counter serves four neighbouring keys.
    HK_FN void drop(const KeyTile &tile) {
        const Params &p = hk::reload_params(p_);
        const Scores &of = p.scores;
        u64 counter[kLaneRows];
        const u32 of_row = (of.longest_k + 3) / 4;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const u64 row = (u64(work_.sequence) * p.heads + queries_[r].head) * of.longest_q + queries_[r].index;
            counter[r] = of.offset + row * of_row;
        }
        const auto words = [&](int r, u32 key) {
            const u64 at = counter[r] + key / 4;
            return hk::philox({u32(at), u32(at >> 32), 0, 0}, of.seed);
        };
        constexpr int kAll = kKeys / kDim * Places::kElements;
        const u32 misaligned = tile.first % 4;
#pragma unroll
        for (int i = 0; i < kAll; i += hk::kMmaRows) {
            const int r = i / hk::kMmaRows % kLaneRows;
            const u32 key = tile.first + Places::n(hk::lane_id(), i);
            const auto first = words(r, key);
            u32 eight[8] = {first[0], first[1], first[2], first[3]};
            if (misaligned != 0) {
                const auto second = words(r, key + 4);
#pragma unroll
                for (int j = 0; j < 4; ++j) eight[4 + j] = second[j];
            }
#pragma unroll
            for (int j = 0; j < hk::kMmaRows; ++j) {
                u32 word = eight[j];
#pragma unroll
                for (int by = 1; by < 4; ++by) word = misaligned == u32(by) ? eight[j + by] : word;
                auto &acc = s_.acc[0][(i + j) / Places::kElements];
                float &e = reinterpret_cast<float *>(&acc)[(i + j) % Places::kElements];
                e = word >> 8 >= of.dropout ? e * of.kept : 0.0f;
            }
        }
    }

    HK_FN void scale_values(const KeyTile &tile) {
        const float scale = value_scale_[tile.fresh];
        if (scale != 1.0f) each(tile, [&](float s, int, u32) { return s * scale; });
    }

    HK_FN void finish() {
        const Params &p = hk::reload_params(p_);
        const bool poison = work_.poison;
        const bool first = hk::group_of_lane<kDim>(lane_of(work_)) == 0;
        float inverse = p.out_scale ? 1.0f / hk::load_uniform<float>(p.out_scale) : 1.0f;
        if constexpr (kHstu) inverse = p.hstu.inverse_longest;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const Query &query = queries_[r];
            if (is_partial(p, work_)) {
                Vec<float, 2> sums = softmax_.sums(r);
                if (poison) sums = __builtin_nanf("");
                if (!query.valid) continue;
                const Partial partial = partial_of(p, work_, query.index, query.head);
                each_column(r, [&](u32 col, Vec<float, 4> y) { partial.store(col, y); });
                if (first) partial.store_sums(sums);
                continue;
            }
            attention::FinishedRow finished = {1.0f, 0.0f};
            if constexpr (!kHstu) {
                float sink = kMinusInf;
                if (p.scores.sink && query.valid)
                    sink = reinterpret_cast<GlobalPtr<const float>>(p.scores.sink)[query.head];
                finished = attention::finish_row(softmax_.sums(r), sink);
            }
            auto [factor, lse] = finished;
            if (poison) lse = factor = __builtin_nanf("");
            if (!query.valid) continue;
            const u64 row = row_address(p.out, work_, packed_, query.index, query.head);
            each_column(r, [&](u32 col, Vec<float, 4> y) { store_columns<T>(p, row, col, y * factor * inverse); });
            if (p.lse.data && first) {
                const u64 at = row_address(p.lse, work_, packed_, query.index, query.head);
                *reinterpret_cast<GlobalPtr<float>>(at) = lse;
            }
        }
    }

    /// Calls `f(col, values)` for four columns at a time of the lane's row r.
    HK_FN void each_column(int r, auto f) const {
        const u32 dv = hk::reload_params(p_).dv;
#pragma unroll
        for (int i = 0; i < kDv / kDim * Places::kElements; i += hk::kMmaRows) {
            if (i / hk::kMmaRows % kLaneRows != r) continue;
            const u32 col = Places::n(lane_of(work_), i);
            Vec<float, 4> y;
#pragma unroll
            for (int j = 0; j < 4; ++j) y[j] = o_.acc[0][(i + j) / Places::kElements][(i + j) % Places::kElements];
            if (col < dv) f(col, y);
        }
    }
};

template <class T, int kDqk, int kDv, bool kHstu>
HK_FN void prefill(const Params &p) {
    auto &lds = hk::block_lds<Lds<T, kDqk, kDv>>();
    const u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());
    Work work;
    if (!find_work<kWaves * kQueries<kDv>>(p, task, work)) return;
    if (p.skip_single && work.q_len == 1) return;
    find_keys(p, work);
    if (kHstu) work.poison |= !targets_fit(p.hstu, work);
    Prefill<T, kDqk, kDv, kHstu>(p, work, lds).run();
}

}  // namespace general
}  // namespace attention
