// prefill_dense.h: attention of prompts, the fast kernel: fresh keys, 16-bit rows of whole vectors, one type
//
//   s = scale (q . k), -inf where masked;  out = softmax(s) v;  lse = log of the sum of exp(s)
//
// A block has Shape::kWaves waves of kDim queries each. Keys come by tiles of Shape::kKeys through LDS, from the first to the last one
// that a row of the block sees. S^T = K Q^T and O^T = V^T P^T: P stays in the lane that has its scores, rounded to 16 bits.
// Two waves per SIMD: one half of the block (PingPong), or another block, multiplies while the other is in LDS and softmax.
//   gfx942         tiles go through registers, V is transposed on the way to LDS
//   gfx950, sm_90  loads go straight to LDS, V is transposed as it is read
// Strides of keys are from 0 to 2^24 bytes; all other ones are free. Columns past dqk and dv, and keys that no row of the block sees, are
// not read.
// Floor: 2 (dqk + dv) flop for each visible pair of a query and a key.
// Source: Dao et al. 2022, "FlashAttention", algorithm 1; rescaling only where the maximum grows: softmax.h.
#pragma once

#include "keys.h"
#include "outputs.h"
#include "problem.h"
#include "softmax.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>
#include <hk/wave_tile.h>

// Lambdas that more than one place calls are inlined, too.
#define HK_INLINE __attribute__((always_inline))

namespace attention {
namespace dense {

/// Rows of a wave: queries, or pairs of a query and a head.
inline constexpr int kDim = hk::kRowsPerLane == 1 ? 32 : 16;
/// Tiles go straight to LDS and columns of V are read from its rows.
inline constexpr bool kDirect = hk::kHasReadTr || hk::kHasLdmatrix;

/// Waves of a block, keys of a tile, and its stages in LDS.
template <int kWaves_, int kKeys_, int kStages_, bool kPingPong_>
struct Shape {
    static constexpr int kWaves = kWaves_, kKeys = kKeys_, kStages = kStages_, kThreads = kWaves * hk::kWaveSize;
    static constexpr bool kPingPong = kPingPong_;
};

/// Shapes by columns of Q and K, and V. A tile through registers has one stage with ping-pong: a half of the block writes K where
/// both halves have read it, before they read V, and V before they read K again.
template <int kDqk, int kDv, bool kSmall>
consteval auto shape() {
    if constexpr (hk::kRowsPerLane > 1) {
        return Shape<kSmall ? 4 : 8, (kDv > 128 ? 32 : 64), 2, false>{};
    } else if constexpr (kDv > 128) {
        return Shape<4, 32, 2, false>{};
    } else {
        constexpr int kKeys = kDv <= 64 ? 128 : kDqk <= 128 ? 64 : 32;
        if constexpr (kSmall)
            return Shape<4, (kDv <= 64 ? 64 : 32), (kDirect ? 3 : kDqk > 128 ? 1 : 2), false>{};
        else
            return Shape<8, kKeys, kDirect ? 3 : 1, true>{};
    }
}

/// `W` is Work, or has a part of its keys by itself (lean.h).
template <class T, int kDqk, int kDv, class S, class W = Work>
class Dense {
    using Mma = hk::FragMma<T, T, kDim>;
    using Places = hk::AccLayout<kDim>;
    static constexpr int kKeys = S::kKeys, kStages = S::kStages;
    static constexpr int kOwn = hk::kRowsPerLane;  // rows of a lane
    static constexpr u32 kRows = S::kWaves * kDim;
    static constexpr int kSteps = kDqk * 2 / hk::kFragBytesOf<kDim>;  // fragments of a row of Q or K
    static constexpr int kOfPart = 128 / hk::kFragBytesOf<kDim>;  // of 128 bytes of it
    static constexpr int kFragKeys = 8 * hk::kLaneGroups<kDim>;  // of a fragment of P
    static constexpr int kFrags = kKeys / kFragKeys;

    using KMover = RowMover<kKeys, kDqk, S::kThreads>;
    HK_FN static auto v_mover() {
        if constexpr (kDirect)
            return RowMover<kKeys, kDv, S::kThreads>(0, 0);
        else
            return TransposingRows<kDim, kKeys, kDv, S::kThreads>(0, 0);
    }
    using VMover = decltype(v_mover());
    static constexpr int kLoads = KMover::kParts + VMover::kParts;

  public:
    struct Lds {
        typename KMover::Tile k[kStages];
        typename VMover::Tile v[kStages];
    };

  private:
    struct KFrags {
        hk::Frag frag[kKeys / kDim][kSteps];
    };
    struct VFrags {
        hk::Frag frag[kFrags][kDv / kDim];
    };
    using Scores = hk::WaveTile<Mma, kKeys, kDim>;
    using Probabilities = typename Scores::template AsOperand<T>;
    struct Operands {
        VFrags v;
        Probabilities p;
    };

    /// A row of the lane, and the keys that it sees.
    struct Row {
        u32 query, head;
        bool valid;
    };
    struct Keys {
        u32 first, n;  // from the block's first one on
    };

    const Params &p_;
    const W &work_;
    Lds &lds_;
    hk::Frag q_[kSteps];
    Scores s_;
    hk::WaveTile<Mma, kDv, kDim> o_;
    OnlineSoftmax<kDim> softmax_;
    float scale_;
    Keys visible_[kOwn];  // to the lane's rows
    // From the block's first key on:
    i32 inner_first_, inner_last_;  // keys that all rows of the wave see
    i32 outer_first_, outer_last_;  // keys that some row of the wave sees
    i32 at_ = 0;  // the tile's first key
    u32 tiles_;

    struct Range {
        i32 first, last;
    };
    HK_FN static Range visible(const Params &p, const W &work, u32 query) {
        constexpr i32 kUnbounded = 1 << 29;
        const i32 keys = i32(work.fresh), at = i32(query) + keys - i32(work.q_len);
        const i32 first = p.scores.left >= kUnbounded ? 0 : at - p.scores.left;
        const i32 last = p.scores.right >= kUnbounded ? keys - 1 : at + p.scores.right;
        Range range = {first < 0 ? 0 : first, last < keys - 1 ? last : keys - 1};
        clip_to_split(p, work, range.first, range.last);
        return range;
    }

    HK_FN Row row(u32 r) const {
        const u32 index = work_.first + hk::wave_id() * kDim + hk::row_of_lane<kDim>(lane_of(work_), r);
        const hk::DivMod at(index, p_.group, p_.group_inverse);
        return {at.quotient, work_.kv_head * p_.group + at.remainder, at.quotient < work_.q_len};
    }

    HK_FN u64 address(const HeadRows &of, u32 query, u32 head) const {
        return row_address(of, work_, p_.sequences.q_starts != 0, query, head);
    }

    HK_FN void load_queries() {
        const u32 group = hk::group_of_lane<kDim>(lane_of(work_));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) q_[step] = 0;
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const Row own = row(r);
            if (!own.valid) continue;
            const auto from = reinterpret_cast<GlobalPtr<const u8>>(address(p_.q, own.query, own.head));
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if constexpr (hk::kHasLdmatrix) {
                    // In the order of SharedTile::frag: a dword of each of four chunks.
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        const u32 col = (step * 4 + i) * 8;
                        if (col < p_.dqk)
                            q_[step][r * 4 + i] = reinterpret_cast<GlobalPtr<const u32>>(from + col * 2)[group];
                    }
                } else {
                    const u32 col = (step * hk::kLaneGroups<kDim> + group) * 8;
                    if (col < p_.dqk) q_[step] = *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(from + col * 2);
                }
            }
        }
    }

    template <int kStage>
    HK_FN KFrags read_keys() const {
        KFrags k;
#pragma unroll
        for (int i = 0; i < kKeys / kDim; ++i) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                k.frag[i][step] =
                    lds_.k[kStage].part[step / kOfPart].template frag<kDim, true>(i * kDim, step % kOfPart);
            }
        }
        return k;
    }
    HK_FN void multiply_keys(const KFrags &k) {
#pragma unroll
        for (int i = 0; i < kKeys / kDim; ++i) s_.acc[0][i] = typename Mma::Acc(0.0f);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kKeys / kDim; ++i) s_.acc[0][i] = Mma::mma(&k.frag[i][step], &q_[step], s_.acc[0][i]);
        }
    }

    template <int kStage>
    HK_FN VFrags read_values() const {
        VFrags v;
        const auto &tile = lds_.v[kStage];
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {
            if constexpr (kDirect) {
#pragma unroll
                for (int part = 0; part < kDv / 64; ++part) {
                    hk::Frag columns[64 / kDim];
                    tile.part[part].template column_frags<kDim, true, true>(f * kFragKeys, columns);
#pragma unroll
                    for (int j = 0; j < 64 / kDim; ++j) v.frag[f][part * (64 / kDim) + j] = columns[j];
                }
            } else {
                constexpr int kOfTile = VMover::Tile::kPartKeys / kFragKeys;
#pragma unroll
                for (int j = 0; j < kDv / kDim; ++j)
                    v.frag[f][j] = tile.part[f / kOfTile].template frag<kDim, true>(j * kDim, f % kOfTile);
            }
        }
        return v;
    }
    HK_FN void multiply_values(const VFrags &v, const Probabilities &p) {
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {
#pragma unroll
            for (int j = 0; j < kDv / kDim; ++j) o_.acc[0][j] = Mma::mma(&v.frag[f][j], &p.frag[f], o_.acc[0][j]);
        }
    }
    /// Column of the output of row `n` of V^T.
    HK_FN static u32 column(u32 n) {
        if constexpr (hk::kHasLdmatrix)
            return hk::SharedTile<kKeys, 128>::template column<kDim>(n);
        else
            return Places::wide(n);
    }
    static constexpr int kRun = hk::kHasLdmatrix ? 2 : Places::kWideRun;  // neighbouring columns of a lane

    /// Scores to probabilities. Masks only where a row of the wave does not see all keys of the tile.
    HK_FN Probabilities probabilities() {
        if (at_ < inner_first_ || at_ + kKeys - 1 > inner_last_) {
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const u32 of_lane = Places::n(hk::lane_id(), 0) + u32(at_) - visible_[r].first;
                map_pairs(s_, r, [&](int i, Vec<float, 2> pair) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        if (Places::n(0, i + j) + of_lane >= visible_[r].n) pair[j] = kMinusInf;
                    }
                    return pair;
                });
            }
        }
        softmax_.update(s_, o_, scale_);
        return s_.template as_operand<T, true>(0);
    }

    struct Walks {
        RowWalk k, v;
        KMover k_mover;
        VMover v_mover;

        HK_FN auto load_keys() { return k_mover.load(k.template next<kKeys>()); }
        HK_FN auto load_values() { return v_mover.load(v.template next<kKeys>()); }
    };
    /// Waits until at most the loads of `kBatches` tiles are in flight.
    template <int kBatches>
    HK_FN static void wait_tiles() {
        if (KMover::full())
            hk::wait_loads<kBatches, kLoads>();
        else
            hk::wait_loads<kBatches, kLoads - 1>();
    }
    HK_FN void copy_keys(Walks &walks, u32 stage) {
        walks.k_mover.copy(walks.k.template next<kKeys>(), lds_.k[stage]);
        hk::commit_loads();
    }
    HK_FN void copy_values(Walks &walks, u32 stage) {
        walks.v_mover.copy(walks.v.template next<kKeys>(), lds_.v[stage]);
        hk::commit_loads();
    }

    /// Calls `tile<stage>()` for `count` > 0 tiles, with the stages in turn.
    HK_FN void each_tile(u32 count, auto tile) {
        while (round<0>(count, tile)) {}
    }
    template <int kStage>
    HK_FN bool round(u32 &left, auto &tile) {
        tile.template operator()<kStage>();
        at_ += kKeys;
        if (--left == 0) return false;
        if constexpr (kStage + 1 < kStages)
            return round<kStage + 1>(left, tile);
        else
            return true;
    }

    /// Tiles up to the last one that a row of the wave sees, at least one.
    HK_FN u32 seen_tiles() const { return outer_last_ < kKeys ? 1 : u32(outer_last_) / kKeys + 1; }

    /// All tiles, with ping-pong. `values(stage)` and `keys(stage)` move later tiles to LDS, where all waves have read V of the last stage
    /// or K of this one; `landed` waits for what is read next.
    HK_FN void ping_pong(auto values, auto keys, auto landed) {
        const hk::PingPong halves;
        const u32 seen = seen_tiles();
        each_tile(seen, [&]<int kStage>() HK_INLINE {
            halves.step(
                [&] {
                    const KFrags k = read_keys<kStage>();
                    values(kStage);
                    landed();
                    return k;
                },
                [&](const KFrags &k) { multiply_keys(k); });
            halves.step(
                [&] {
                    Operands operands;
                    operands.v = read_values<kStage>();
                    keys(kStage);
                    operands.p = probabilities();
                    landed();
                    return operands;
                },
                [&](const Operands &of) { multiply_values(of.v, of.p); });
        });
        for (u32 tile = seen; tile < tiles_; ++tile) {
            const auto nothing = [](int) {};
            halves.step([&] { return values(tile % kStages), landed(), 0; }, nothing);
            halves.step([&] { return keys(tile % kStages), landed(), 0; }, nothing);
        }
        halves.end();
    }

    /// Ping-pong, loads straight to LDS: they land while other stages are multiplied.
    HK_FN void walk_direct(Walks &walks) {
        constexpr int kAhead = kStages - 1;
        copy_keys(walks, 0);
        copy_values(walks, 0);
        // Of the queries, too: the compiler would wait for them in the loop.
        hk::drain_register_loads();
#pragma unroll
        for (int i = 1; i < kStages; ++i) {
            copy_keys(walks, i);
            if (i < kAhead) copy_values(walks, i);
        }
        ping_pong([&](u32 stage) HK_INLINE { copy_values(walks, (stage + kAhead) % kStages); },
                  [&](u32 stage) HK_INLINE { copy_keys(walks, stage); }, []() HK_INLINE { wait_tiles<kAhead>(); });
        // Loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }

    /// Ping-pong, through registers and one stage in LDS.
    HK_FN void walk_registers(Walks &walks) {
        static_assert(kStages == 1);
        auto k = walks.load_keys();
        auto v = walks.load_values();
        KMover::store(k, lds_.k[0]);
        k = walks.load_keys();
        ping_pong(
            [&](u32) HK_INLINE {
                walks.v_mover.store(v, lds_.v[0]);
                v = walks.load_values();
            },
            [&](u32) HK_INLINE {
                KMover::store(k, lds_.k[0]);
                k = walks.load_keys();
            },
            []() HK_INLINE {});
    }

    HK_FN void copy_tile(Walks &walks, u32 stage) {
        walks.k_mover.copy(walks.k.template next<kKeys>(), lds_.k[stage]);
        walks.v_mover.copy(walks.v.template next<kKeys>(), lds_.v[stage]);
        hk::commit_loads();
    }
    template <int kStage>
    HK_FN void multiply_tile() {
        if (at_ > outer_last_ || at_ + kKeys <= outer_first_) return;
        multiply_keys(read_keys<kStage>());
        const Probabilities p = probabilities();
        multiply_values(read_values<kStage>(), p);
    }

    /// Few registers for fragments: they are read 64 columns at a time, while a wave of another block multiplies.
    template <int kStage>
    HK_FN void multiply_keys_by_parts() {
#pragma unroll
        for (int i = 0; i < kKeys / kDim; ++i) s_.acc[0][i] = typename Mma::Acc(0.0f);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const auto &part = lds_.k[kStage].part[step / kOfPart];
#pragma unroll
            for (int i = 0; i < kKeys / kDim; ++i) {
                const hk::Frag k = part.template frag<kDim, true>(i * kDim, step % kOfPart);
                s_.acc[0][i] = Mma::mma(&k, &q_[step], s_.acc[0][i]);
            }
            if (step % kOfPart == kOfPart - 1) hk::sched_barrier();
        }
    }
    template <int kStage>
    HK_FN void multiply_values_by_parts(const Probabilities &p) {
        constexpr int kColumns = 64 / kDim;
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {
#pragma unroll
            for (int part = 0; part < kDv / 64; ++part) {
                hk::Frag columns[kColumns];
                lds_.v[kStage].part[part].template column_frags<kDim, true, true>(f * kFragKeys, columns);
#pragma unroll
                for (int j = 0; j < kColumns; ++j) {
                    auto &acc = o_.acc[0][part * kColumns + j];
                    acc = Mma::mma(&columns[j], &p.frag[f], acc);
                }
                hk::sched_barrier();
            }
        }
    }

    /// Loads straight to LDS, two stages: K of the next tile is waited for while its V is in flight.
    HK_FN void walk_by_parts(Walks &walks) {
        constexpr int kParts = KMover::kParts;
        static_assert(kStages == 2 && VMover::kParts == kParts);
        copy_keys(walks, 0);
        hk::drain_register_loads();
        copy_values(walks, 0);
        const u32 seen = seen_tiles();
        each_tile(seen, [&]<int kStage>() HK_INLINE {
            hk::wait_loads<1, kParts>();
            hk::block_barrier();
            copy_keys(walks, 1 - kStage);
            copy_values(walks, 1 - kStage);
            multiply_keys_by_parts<kStage>();
            const Probabilities p = probabilities();
            hk::wait_loads<2, kParts>();
            hk::block_barrier();
            multiply_values_by_parts<kStage>(p);
        });
        for (u32 tile = seen; tile < tiles_; ++tile) {
            hk::wait_loads<1, kParts>();
            hk::block_barrier();
            copy_keys(walks, 1 - tile % 2);
            copy_values(walks, 1 - tile % 2);
            hk::wait_loads<2, kParts>();
            hk::block_barrier();
        }
        hk::wait_loads<0, 0>();
    }

    /// One barrier a tile: other blocks of the CU, or nothing, overlap with it.
    HK_FN void walk_plain(Walks &walks) {
        if constexpr (kDirect) {
            constexpr int kAhead = kStages - 1;
            copy_tile(walks, 0);
            hk::drain_register_loads();
#pragma unroll
            for (int i = 1; i < kAhead; ++i) copy_tile(walks, i);
            each_tile(tiles_, [&]<int kStage>() HK_INLINE {
                wait_tiles<kAhead - 1>();
                hk::block_barrier();
                copy_tile(walks, (kStage + kAhead) % kStages);
                multiply_tile<kStage>();
            });
            hk::wait_loads<0, 0>();
        } else {
            auto k = walks.load_keys();
            auto v = walks.load_values();
            each_tile(tiles_, [&]<int kStage>() HK_INLINE {
                // With two stages, all waves have left this one before the barrier of the last tile.
                if (kStages == 1) hk::block_barrier();
                KMover::store(k, lds_.k[kStage]);
                k = walks.load_keys();
                walks.v_mover.store(v, lds_.v[kStage]);
                v = walks.load_values();
                hk::block_barrier();
                multiply_tile<kStage>();
            });
        }
    }

    HK_FN void store_outputs() const {
        const bool first = hk::group_of_lane<kDim>(lane_of(work_)) == 0;
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const Row own = row(r);
            if (is_partial(p_, work_)) {
                Vec<float, 2> sums = softmax_.sums(r);
                if (work_.poison) sums = __builtin_nanf("");
                if (!own.valid) continue;
                const Partial partial = partial_of(p_, work_, own.query, own.head);
                each_run(r, [&](u32 col, auto y) { partial.store(p_, col, y); });
                if (first) partial.store_sums(p_, sums);
                continue;
            }
            float sink = kMinusInf;
            if (p_.scores.sink && own.valid) sink = reinterpret_cast<GlobalPtr<const float>>(p_.scores.sink)[own.head];
            float lse, factor = softmax_.finish(r, sink, lse);
            if (work_.poison) lse = factor = __builtin_nanf("");
            if (!own.valid) continue;
            const u64 out = address(p_.out, own.query, own.head);
            each_run(r, [&](u32 col, auto y) {
                // Rows are on 8 bytes.
                struct __attribute__((packed, aligned(kRun == 2 ? 4 : 8))) Columns {
                    Vec<T, kRun> y;
                };
                *reinterpret_cast<GlobalPtr<Columns>>(out + col * 2) = {hk::narrow<T, kRun>(y * factor)};
            });
            if (p_.lse.data && first) *reinterpret_cast<GlobalPtr<float>>(address(p_.lse, own.query, own.head)) = lse;
        }
    }
    /// Calls `f(col, y)` for the runs of columns of the lane's row r.
    HK_FN void each_run(u32 r, auto f) const {
#pragma unroll
        for (int j = 0; j < kDv / kDim; ++j) {
#pragma unroll
            for (int i = 0; i < Places::kElements; i += kRun) {
                if (u32(i) / hk::kMmaRows % kOwn != r) continue;
                const u32 col = j * kDim + column(Places::n(lane_of(work_), i));
                Vec<float, kRun> y;
#pragma unroll
                for (int e = 0; e < kRun; ++e) y[e] = o_.acc[0][j][i + e];
                if (col < p_.dv) f(col, y);
            }
        }
    }

  public:
    HK_FN Dense(const Params &p, const W &work, Lds &lds) : p_(p), work_(work), lds_(lds) {}

    HK_FN void run() {
        const Params &p = p_;
        const W &work = work_;
        scale_ = p.scores.scale * kLog2E;
        const auto uniform = [](i32 v) { return i32(hk::uniform(u32(v))); };
        const u32 last_row = work.q_len * p.group - 1;
        const auto query_of = [&](u32 row) {
            return hk::DivMod(row < last_row ? row : last_row, p.group, p.group_inverse).quotient;
        };
        const u32 first_row = work.first, wave_row = first_row + hk::wave_id() * kDim;
        const i32 first = visible(p, work, query_of(first_row)).first;
        const i32 last = visible(p, work, query_of(first_row + kRows - 1)).last;
        tiles_ = hk::uniform(work.poison || last < first ? 0 : u32(last - first) / kKeys + 1);
        const Range top = visible(p, work, query_of(wave_row));
        const Range bottom = visible(p, work, query_of(wave_row + kDim - 1));
        inner_first_ = uniform(bottom.first - first), inner_last_ = uniform(top.last - first);
        outer_first_ = uniform(top.first - first);
        outer_last_ = uniform(wave_row > last_row ? -1 : bottom.last - first);
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const Range keys = visible(p, work, row(r).query);
            visible_[r] = {u32(keys.first - first), keys.last < keys.first ? 0 : u32(keys.last - keys.first + 1)};
        }
        if (tiles_ != 0) {
            load_queries();
            const KeyRows &k = p.fresh.k, &v = p.fresh.v;
            const bool packed = p.sequences.k_starts || p.sequences.k_consecutive;
            const u32 batch = packed ? 0 : work.sequence, head = work.kv_head, token = work.k_start + u32(first);
            const auto walk = [&](const KeyRows &rows, u32 cols) {
                return RowWalk(rows.row(batch, head, token), rows.token, cols * 2, last - first + 1);
            };
            Walks walks = {walk(k, p.dqk), walk(v, p.dv), KMover(k.token, p.dqk), VMover(v.token, p.dv)};
            if constexpr (kDirect && kDv > 128)
                walk_by_parts(walks);
            else if constexpr (!S::kPingPong)
                walk_plain(walks);
            else if constexpr (kDirect)
                walk_direct(walks);
            else
                walk_registers(walks);
        }
        store_outputs();
    }
};

/// Entry points have HK_ENTRY's `p`.
template <class T, int kDqk, int kDv, bool kSmall>
struct Kernel {
    using S = decltype(shape<kDqk, kDv, kSmall>());
    static constexpr int kThreads = S::kThreads;
    static constexpr int kWavesPerSimd = kDv > 128 && !kDirect ? 1 : 2;

    HK_FN void operator()(const Params &p) const {
        using D = Dense<T, kDqk, kDv, S>;
        auto &lds = hk::block_lds<typename D::Lds>();
        const u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());
        constexpr u32 kRows = S::kWaves * kDim;
        Work work;
        if (!find_work<kRows>(p, task, work)) return;
        find_keys(p, work);
        D(p, work, lds).run();
    }
};

}  // namespace dense
}  // namespace attention

// An entry point and the one for few queries.
#define HK_PREFILL_DENSE(name, T, dqk, dv)        \
    HK_PREFILL_DENSE_ONE(name, T, dqk, dv, false) \
    HK_PREFILL_DENSE_ONE(name##_small, T, dqk, dv, true)
#define HK_PREFILL_DENSE_ONE(name, T, dqk, dv, small)                                                \
    HK_ENTRY_WAVES_PER_SIMD(name, (attention::dense::Kernel<T, dqk, dv, small>::kThreads),           \
                            (attention::dense::Kernel<T, dqk, dv, small>::kWavesPerSimd),            \
                            (attention::dense::Kernel<T, dqk, dv, small>::kThreads / hk::kWaveSize), \
                            attention::dense::Kernel<T, dqk, dv, small>{})
