// prefill_dense.h: attention of prompts, the fast kernel: rows of whole vectors of 16-bit elements, fp8, or int8 and fp8 (sage.h); keys are
// fresh ones, or those of pages and then fresh ones.
//
//   s = scale (q . k), -inf where masked;  out = softmax(s) v;  lse = log of the sum of exp(s)
//
// A block has Shape::kWaves waves of kDim queries each. Keys come by tiles of Shape::kKeys through LDS, from the first to the last one
// that a row of the block sees. S^T = K Q^T and O^T = V^T P^T: P stays in the lane that has its scores, rounded to 16 bits.
// Two waves per SIMD: one half of the block (PingPong), or another block, multiplies while the other is in LDS and softmax.
//   gfx942         tiles go through registers, V is transposed on the way to LDS
//   gfx950, sm_90  loads go straight to LDS, V is transposed as it is read
//   sm_90a         16-bit elements: the same by warpgroup instructions; one more warpgroup loads
// Keys are at least a row and at most 2^23 bytes apart, pages are multiples of kPageRows; all other strides are free. Columns past dqk and dv, and
// keys that no row of the block sees, are not read.
// Floor: 2 (dqk + dv) flop for each visible pair of a query and a key.
// Source: Dao et al. 2022, "FlashAttention", algorithm 1; rescaling only where the maximum grows: softmax.h.
#pragma once

#include "keys.h"
#include "outputs.h"
#include "problem.h"
#include "sage.h"
#include "softmax.h"
#include "warpgroup_rows.h"

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
/// Tiles go straight to LDS and columns of V are read from its rows: of 16-bit elements.
template <class T>
inline constexpr bool kDirect = hk::kBitsOf<T> == 16 && (hk::kHasReadTr || hk::kHasLdmatrix);

/// Types of Q and K, of P and V.
template <class T>
struct TypesOf {
    using Key = T;
    using Value = T;
};
template <>
struct TypesOf<sage::Types> : sage::Types {};
template <>
struct TypesOf<sage::SmoothTypes> : sage::SmoothTypes {};

/// The 16-bit type of outputs.
template <class T>
struct OutputType {
    using Type = T;
};
template <>
struct OutputType<hk::Fp8> {
    using Type = hk::bf16;
};
template <>
struct OutputType<sage::Types> : OutputType<hk::Fp8> {};
template <>
struct OutputType<sage::SmoothTypes> : OutputType<hk::Fp8> {};
template <class T>
using OutputOf = typename OutputType<T>::Type;

/// Waves of a block, keys of a tile, and its stages in LDS.
template <int kWaves_, int kKeys_, int kStages_, bool kPingPong_>
struct Shape {
    static constexpr int kWaves = kWaves_, kKeys = kKeys_, kStages = kStages_, kThreads = kWaves * hk::kWaveSize;
    static constexpr bool kPingPong = kPingPong_;
};

#if defined(HK_WARPGROUPS)
/// Warpgroups of 64 rows each, and one that copies keys and values to LDS. `kInTurn`: one multiplies while the other is in softmax; with short
/// tiles that costs more than it brings.
template <int kCount, int kKeys>
struct WarpgroupShape : Shape<4 * kCount, kKeys, 3, false> {
    static constexpr bool kWarpgroups = true, kInTurn = kKeys == 128;
    static constexpr int kCopyThreads = 128, kThreads = kCount * 128 + kCopyThreads;
    // Registers of a thread; the block begins with 65536 / kThreads.
    static constexpr int kOfRows = kCount == 2 ? 232 : 160, kOfCopies = kCount == 2 ? 40 : 32;
};
#endif

/// Shapes by columns of Q and K, and V. A tile through registers has one stage with ping-pong: a half of the block writes K where
/// both halves have read it, before they read V, and V before they read K again.
template <class T, int kDqk, int kDv, bool kSmall>
consteval auto shape() {
    using Value = typename TypesOf<T>::Value;
    if constexpr (hk::kBitsOf<Value> == 8) {
        if constexpr (kDv > 128)
            return Shape<4, 64, 1, false>{};
        else
            return Shape<kSmall ? 4 : 8, 64, (kSmall && kDqk <= 128 ? 2 : 1), !kSmall>{};
    } else if constexpr (hk::kRowsPerLane > 1) {
        return Shape<kSmall ? 4 : 8, (kDv > 128 ? 32 : 64), 2, false>{};
    } else if constexpr (kDv > 128) {
        return Shape<4, 32, 2, false>{};
    } else {
        constexpr int kKeys = kDv <= 64 ? 128 : kDqk <= 128 ? 64 : 32;
        if constexpr (kSmall)
            return Shape<4, (kDv <= 64 ? 64 : 32), (kDirect<Value> ? 3 : kDqk > 128 ? 1 : 2), false>{};
        else
            return Shape<8, kKeys, kDirect<Value> ? 3 : 1, true>{};
    }
}

/// Keys in pages, before fresh ones of the kernel's type.
enum class Cache { None, Own, Fp8 };

/// `W` is Work, or has a part of its keys by itself (lean.h).
template <class T, int kDqk, int kDv, class S, Cache kCache, class W = Work>
class Dense {
    static constexpr bool kWarpgroups = requires { S::kWarpgroups; };
    static constexpr bool kPaged = kCache != Cache::None;
    using Key = typename TypesOf<T>::Key;
    using Value = typename TypesOf<T>::Value;
    static constexpr bool kSmooth = __is_same(T, sage::SmoothTypes), kSage = kSmooth || __is_same(T, sage::Types);
    static constexpr bool kFp8 = hk::kBitsOf<Value> == 8;
    static constexpr bool kDirect = dense::kDirect<Value>;
    static constexpr int kBytes = hk::kBitsOf<Key> / 8;
    using Out = OutputOf<T>;
    using KeyMma = hk::FragMma<Key, Key, kDim>;
    using Mma = hk::FragMma<Value, Value, kDim>;
    using Places = hk::AccLayout<kDim>;
    static constexpr int kKeys = S::kKeys, kStages = S::kStages;
    static constexpr int kOwn = hk::kRowsPerLane;  // rows of a lane
    static constexpr u32 kRows = S::kWaves * kDim;
    static constexpr int kSteps = kDqk * kBytes / hk::kFragBytesOf<kDim>;  // fragments of a row of Q or K
    static constexpr int kOfPart = 128 / hk::kFragBytesOf<kDim>;  // of 128 bytes of it
    static constexpr int kVec = 128 / hk::kBitsOf<Value>;
    static constexpr int kFragKeys = kVec * hk::kLaneGroups<kDim>;  // of a fragment of P
    static constexpr int kFrags = kKeys / kFragKeys;

    /// Rows of LDS have at least 128 bytes; columns that are not there are not multiplied.
    static constexpr int kTileDqk = kDqk * kBytes < 128 ? 128 / kBytes : kDqk;
    static constexpr int kTileDv = kSage && kDv < 128 ? 128 : kDv;
    template <u32 kWindow, class From = Stored>
    using KMover = decltype([] {
#if defined(HK_WARPGROUPS)
        if constexpr (kWarpgroups)
            return WarpgroupRowMover<kKeys, kTileDqk, S::kCopyThreads, kWindow>(0, 0, 0);
        else
#endif
            return RowMover<kKeys, kTileDqk * kBytes / 2, S::kThreads, kWindow, From>(0, 0, 0);
    }());
    template <u32 kWindow, class From = Stored>
    using VMover = decltype([] {
#if defined(HK_WARPGROUPS)
        if constexpr (kWarpgroups)
            return WarpgroupRowMover<kKeys, kTileDv, S::kCopyThreads, kWindow>(0, 0, 0);
        else
#endif
            if constexpr (kDirect)
            return RowMover<kKeys, kTileDv, S::kThreads, kWindow, From>(0, 0, 0);
        else if constexpr (kFp8)
            return TransposingBytes<kDim, kKeys, kTileDv, S::kThreads, kWindow>(0, 0, 0);
        else
            return TransposingRows<kDim, kKeys, kTileDv, S::kThreads, kWindow, From>(0, 0, 0);
    }());
    using KTile = typename KMover<kKeys>::Tile;
    using VTile = typename VMover<kKeys>::Tile;
    static constexpr int kKParts = KMover<kKeys>::kParts, kVParts = VMover<kKeys>::kParts;
    static constexpr int kLoads = kKParts + kVParts;

  public:
    struct Lds : StageBarriers<kStages, kWarpgroups> {
        KTile k[kStages];
        VTile v[kStages];
    };

  private:
    struct KFrags {
        hk::Frag frag[kKeys / kDim][kSteps];
    };
    struct VFrags {
        hk::Frag frag[kDv / kDim][kFrags];
    };
    using Scores = hk::WaveTile<Mma, kKeys, kDim>;
    using Probabilities = typename Scores::template AsOperand<Value>;
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
        u32 first, n;  // from the block's first one, and the lane's first score, on
    };

    const Params &p_;
    const W &work_;
    Lds &lds_;
    hk::Frag q_[kSteps];
    Scores s_;
    hk::WaveTile<Mma, kDv, kDim> o_;
    OnlineSoftmax<kDim, Value> softmax_;
    float q_scale_[kOwn], scale_;  // of scores, in units of log2: without and with that of the walk's keys
    sage::KeyScales key_scales_;
    u64 q_shift_[kOwn];  // of kSmooth: the row's, of key 0
    u32 from_;  // the walk's first key
    Keys visible_[kOwn];  // to the lane's rows
    // From the block's first key on:
    i32 inner_first_, inner_last_;  // keys that all rows of the wave see
    i32 outer_first_, outer_last_;  // keys that some row of the wave sees
    i32 at_;  // the tile's first key
    u32 tiles_;
    bool poison_[kOwn];

    HK_FN Row row(const Params &p, u32 r) const {
        const u32 index = work_.first + hk::wave_id() * kDim + hk::row_of_lane<kDim>(lane_of(work_), r);
        const hk::DivMod at(index, p.group, p.group_inverse);
        return {at.quotient, work_.kv_head * p.group + at.remainder, at.quotient < work_.q_len};
    }

    HK_FN u64 address(const Params &p, const HeadRows &of, u32 query, u32 head) const {
        return row_address(of, work_, p.sequences.q_starts != 0, query, head);
    }

    HK_FN void load_queries() {
        const u32 group = hk::group_of_lane<kDim>(lane_of(work_));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) q_[step] = 0;
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const Row own = row(p_, r);
            if (!own.valid) continue;
            const auto from = reinterpret_cast<GlobalPtr<const u8>>(address(p_, p_.q, own.query, own.head));
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if constexpr (hk::kHasLdmatrix) {
                    // In the order of SharedTile::frag: a dword of each of four chunks.
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        const u32 col = (step * 4 + i) * (16 / kBytes);
                        if (col < p_.dqk)
                            q_[step][r * 4 + i] = reinterpret_cast<GlobalPtr<const u32>>(from + col * kBytes)[group];
                    }
                } else {
                    const u32 col = (step * hk::kLaneGroups<kDim> + group) * (16 / kBytes);
                    if (col < p_.dqk) q_[step] = *reinterpret_cast<GlobalPtr<const Vec<u32, 4>>>(from + col * kBytes);
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
    /// Sums of int8 begin with the bits of kBias, in registers of their own: as floats they are that and the sum, exactly. The softmax
    /// subtracts it; its offset is then rounded by less than a unit of these sums.
    static constexpr float kBias = kSage && !kSmooth && kOwn == 1 ? 0x1.8p+23f : 0.0f;
    static_assert(!kSage || 127 * 127 * kDqk < 1 << 22, "sums are within the power of two of the bias");

    HK_FN void multiply_keys(const KFrags &k) {
        typename KeyMma::Acc acc[kKeys / kDim];
#pragma unroll
        for (auto &sums : acc) sums = typename KeyMma::Acc(kBias != 0.0f ? __builtin_bit_cast(u32, kBias) : 0);
#pragma unroll
        for (int step = 0; step < kSteps; step += KeyMma::kFrags) {
#pragma unroll
            for (int i = 0; i < kKeys / kDim; ++i) acc[i] = KeyMma::mma(&k.frag[i][step], &q_[step], acc[i]);
        }
#pragma unroll
        for (int i = 0; i < kKeys / kDim; ++i) s_.acc[0][i] = __builtin_bit_cast(typename Mma::Acc, acc[i]);
        if constexpr (kFp8 && !kSage) settle(s_.acc[0][kKeys / kDim - 1]);
    }
    /// The factor of the sums of int8. Where a lane's two rows have a factor each, or sums have shifts, they are multiplied here.
    HK_FN void scale_scores() {
        const u32 first = hk::uniform(from_ + u32(at_));
        const float key_scale = key_scales_.of(first);
        // Small enough for the bias.
        [[maybe_unused]] constexpr float kMost = 0x1p+100f;
        if constexpr (kSmooth) {
            scale_ = 1.0f;
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                using Shifts = Vec<float, hk::kMmaRows>;
                const auto shift =
                    reinterpret_cast<GlobalPtr<const float>>(q_shift_[r]) + first + Places::n(lane_of(work_), 0);
                float scale = q_scale_[r] * key_scale;
                scale = scale >= 0.0f && scale <= kMost ? scale : __builtin_nanf("");
                Shifts run;
                map_pairs(s_, r, [&](int i, Vec<float, 2> pair) {
                    if (i % hk::kMmaRows == 0)
                        run = *reinterpret_cast<GlobalPtr<const Shifts>>(shift + Places::n(0, i));
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float bits = pair[j];
                        pair[j] =
                            __builtin_fmaf(float(__builtin_bit_cast(i32, bits)), scale, run[i % hk::kMmaRows + j]);
                    }
                    return pair;
                });
            }
        } else if constexpr (kOwn == 1) {
            // Above 0, so that masked scores stay -inf. The largest score is not that of a negative factor: NaN.
            constexpr float kLeast = 0x1p-126f;
            scale_ = q_scale_[0] * key_scale;
            scale_ = scale_ >= 0.0f && scale_ <= kMost ? __builtin_fmaxf(scale_, kLeast) : __builtin_nanf("");
        } else {
            scale_ = 1.0f;
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                map_pairs(s_, r, [&](int, Vec<float, 2> pair) {
                    const float low = pair[0], high = pair[1];
                    pair = {float(__builtin_bit_cast(i32, low)), float(__builtin_bit_cast(i32, high))};
                    return pair * (q_scale_[r] * key_scale);
                });
            }
        }
    }
    /// clang 22 inserts at most 19 wait states between an MFMA and an instruction that reads its result; one of 16 passes needs 20 on
    /// gfx950. It does not count those of inline assembly.
    HK_FN static void settle([[maybe_unused]] typename Mma::Acc &acc) {
#if defined(__gfx950__)
        asm volatile("s_nop 0" : "+v"(acc));
#endif
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
                    for (int j = 0; j < 64 / kDim; ++j) v.frag[part * (64 / kDim) + j][f] = columns[j];
                }
            } else {
                constexpr int kOfTile = VTile::kPartKeys / kFragKeys;
#pragma unroll
                for (int j = 0; j < kDv / kDim; ++j)
                    v.frag[j][f] = tile.part[f / kOfTile].template frag<kDim, true>(j * kDim, f % kOfTile);
            }
        }
        return v;
    }
    HK_FN void multiply_values(const VFrags &v, const Probabilities &p) {
#pragma unroll
        for (int f = 0; f < kFrags; f += Mma::kFrags) {
#pragma unroll
            for (int j = 0; j < kDv / kDim; ++j) o_.acc[0][j] = Mma::mma(&v.frag[j][f], &p.frag[f], o_.acc[0][j]);
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
    HK_FN Probabilities probabilities() { return probabilities(o_); }
    /// `o` is rescaled.
    HK_FN Probabilities probabilities(auto &o) {
        if constexpr (kSage) scale_scores();
        if (at_ < inner_first_ || at_ + kKeys - 1 > inner_last_) {
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const u32 of_lane = u32(at_) - visible_[r].first;
                map_pairs(s_, r, [&](int i, Vec<float, 2> pair) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        if (Places::n(0, i + j) + of_lane >= visible_[r].n) pair[j] = kMinusInf;
                    }
                    return pair;
                });
            }
        }
        softmax_.template update<kBias>(s_, o, scale_);
        if constexpr (kFp8)
            return as_fp8();
        else
            return s_.template as_operand<Value, true>(0);
    }
    /// Probabilities are in fp8's range: no clamp.
    HK_FN Probabilities as_fp8() const {
        Probabilities p;
#pragma unroll
        for (int i = 0; i < p.kFrags * kVec; i += 4) {
            const auto &acc = s_.acc[0][i / Places::kElements];
            const int at = i % Places::kElements;
            p.frag[i / kVec][i % kVec / 4] =
                hk::detail::native_fp8<false>(acc[at], acc[at + 1], acc[at + 2], acc[at + 3]);
        }
        return p;
    }

    /// Walk: RowWalk or PageWalk.
    template <template <class> class Walk, class From>
    struct Walks {
        using FromValue = decltype([] {
            if constexpr (kSage && !kFp8)
                return StoredFp8<Value>{};
            else
                return From{};
        }());
        using K = KMover<Walk<KMover<kKeys>>::kWindowRows, From>;
        using V = VMover<Walk<VMover<kKeys>>::kWindowRows, FromValue>;
        static constexpr bool kToLds = kDirect && __is_same(FromValue, Stored);
        Walk<K> k;
        Walk<V> v;
        K k_mover;
        V v_mover;
        u32 skip;  // of the first tile: keys that no row of the block sees

        HK_FN auto load_keys() { return k_mover.load(k.next()); }
        HK_FN auto load_values(u32 skip = 0) { return v_mover.load(v.next(), skip); }
        HK_FN void copy_keys(KTile &tile) { k_mover.copy(k.next(), tile); }
        HK_FN void copy_values(VTile &tile, u32 skip = 0) { v_mover.copy(v.next(), tile, skip); }
    };
    /// Waits until at most the loads of `kBatches` tiles are in flight.
    template <int kBatches>
    HK_FN static void wait_tiles() {
        if (KMover<kKeys>::full())
            hk::wait_loads<kBatches, kLoads>();
        else
            hk::wait_loads<kBatches, kLoads - 1>();
    }
    HK_FN void copy_keys(auto &walks, u32 stage) {
        walks.copy_keys(lds_.k[stage]);
        hk::commit_loads();
    }
    HK_FN void copy_values(auto &walks, u32 stage, u32 skip = 0) {
        walks.copy_values(lds_.v[stage], skip);
        hk::commit_loads();
    }

    /// Calls `tile<stage>()` for `count` > 0 tiles, with kUsed stages in turn.
    template <int kUsed = kStages>
    HK_FN void each_tile(u32 count, auto tile) {
        while (round<kUsed, 0>(count, tile)) {}
    }
    template <int kUsed, int kStage>
    HK_FN bool round(u32 &left, auto &tile) {
        tile.template operator()<kStage>();
        at_ += kKeys;
        if (--left == 0) return false;
        if constexpr (kStage + 1 < kUsed)
            return round<kUsed, kStage + 1>(left, tile);
        else
            return true;
    }

    /// Tiles up to the last one that a row of the wave sees, at least one.
    HK_FN u32 seen_tiles() const { return outer_last_ < kKeys ? 1 : u32(outer_last_) / kKeys + 1; }

    /// All tiles, with ping-pong. `values(stage)` and `keys(stage)` move later tiles to LDS, where all waves have read V of the last stage
    /// or K of this one; `landed` waits for what is read next.
    template <int kUsed>
    HK_FN void ping_pong(auto values, auto keys, auto landed) {
        const hk::PingPong halves;
        const u32 seen = seen_tiles();
        each_tile<kUsed>(seen, [&]<int kStage>() HK_INLINE {
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
            halves.step([&] { return values(tile % kUsed), landed(), 0; }, nothing);
            halves.step([&] { return keys(tile % kUsed), landed(), 0; }, nothing);
        }
        halves.end();
    }

    /// Ping-pong, loads straight to LDS: they land while other stages are multiplied.
    HK_FN void walk_direct(auto &walks) {
        constexpr int kAhead = kStages - 1;
        copy_keys(walks, 0);
        copy_values(walks, 0, walks.skip);
        // Of the queries, too: the compiler would wait for them in the loop.
        hk::drain_register_loads();
#pragma unroll
        for (int i = 1; i < kStages; ++i) {
            copy_keys(walks, i);
            if (i < kAhead) copy_values(walks, i);
        }
        ping_pong<kStages>([&](u32 stage) HK_INLINE { copy_values(walks, (stage + kAhead) % kStages); },
                           [&](u32 stage) HK_INLINE { copy_keys(walks, stage); },
                           []() HK_INLINE { wait_tiles<kAhead>(); });
        // Loads in flight must not land after the block has freed its LDS.
        hk::wait_loads<0, 0>();
    }

    /// Ping-pong, through registers and one stage in LDS.
    HK_FN void walk_registers(auto &walks) {
        auto k = walks.load_keys();
        auto v = walks.load_values(walks.skip);
        walks.k_mover.store(k, lds_.k[0]);
        k = walks.load_keys();
        ping_pong<1>(
            [&](u32) HK_INLINE {
                walks.v_mover.store(v, lds_.v[0]);
                v = walks.load_values();
            },
            [&](u32) HK_INLINE {
                walks.k_mover.store(k, lds_.k[0]);
                k = walks.load_keys();
            },
            []() HK_INLINE {});
    }

    HK_FN void copy_tile(auto &walks, u32 stage, u32 skip = 0) {
        walks.copy_keys(lds_.k[stage]);
        copy_values(walks, stage, skip);
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
    HK_FN void walk_by_parts(auto &walks) {
        constexpr int kParts = kKParts;
        static_assert(kStages == 2 && kVParts == kParts);
        copy_keys(walks, 0);
        hk::drain_register_loads();
        copy_values(walks, 0, walks.skip);
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
    template <class Of>
    HK_FN void walk_plain(Of &walks) {
        if constexpr (Of::kToLds) {
            constexpr int kAhead = kStages - 1;
            copy_tile(walks, 0, walks.skip);
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
            auto v = walks.load_values(walks.skip);
            each_tile(tiles_, [&]<int kStage>() HK_INLINE {
                // With two stages, all waves have left this one before the barrier of the last tile.
                if (kStages == 1) hk::block_barrier();
                walks.k_mover.store(k, lds_.k[kStage]);
                k = walks.load_keys();
                walks.v_mover.store(v, lds_.v[kStage]);
                v = walks.load_values();
                hk::block_barrier();
                multiply_tile<kStage>();
            });
        }
    }

#if defined(HK_WARPGROUPS)
    HK_FN static bool copies_keys() { return hk::wave_id() >= S::kWaves; }

    /// Copies all tiles, in three stages. `landed[i]`: V of a tile in stage i, and K of the next tile in the stage after it.
    HK_FN void copy_warpgroups(auto &walks) {
        walks.copy_keys(lds_.k[0]);
        hk::block_barrier();
        lds_.first_landed.arrive_when_copied();
        u32 stage = 0, parity = 1;  // of the tile three before: none, at first
        for (u32 tile = 0; tile < tiles_; ++tile) {
            const u32 after = stage == kStages - 1 ? 0 : stage + 1;
            lds_.v_left[stage].wait(parity);
            walks.copy_values(lds_.v[stage], tile == 0 ? walks.skip : 0);
            parity ^= after == 0;
            if (tile + 1 < tiles_) {
                lds_.k_left[after].wait(parity);
                walks.copy_keys(lds_.k[after]);
            }
            lds_.landed[stage].arrive_when_copied();
            stage = after;
        }
        // Full drain: loads in flight must not land after the block has freed its LDS.
        hk::commit_loads();
        hk::wait_loads<0, 0>();
    }

    /// A warpgroup's rows. While it makes P of the next tile, its product of P and V and both products of another warpgroup are in flight.
    HK_FN void multiply_warpgroups() {
        using namespace hk::detail;
        using OfValues = WgmmaStep<Value, kDv>;
        float s[kKeys / 2], o[kDv / 2] = {};
        const auto multiply_keys = [&](const KTile &k) HK_INLINE {
            const u32 at = uniform_address(k);
            begin_wgmma();
            multiply_frags<Key>(s, q_, [&](int step) { return KTile::keys(at, step); });
            commit_wgmma();
        };
        const auto multiply_values = [&](const Probabilities &p, const VTile &v) HK_INLINE {
            const u32 at = uniform_address(v);
            begin_wgmma();
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step)
                OfValues::template add<true>(o, p.frag[step / 2], step % 2, VTile::values(at, step));
            commit_wgmma();
        };
        // What O, which is in flight, is to be multiplied by.
        float factor[kOwn];
        const auto score = [&]() HK_INLINE {
#pragma unroll
            for (int i = 0; i < kKeys / 2; ++i) s_.acc[0][i / 8][hk::place_of_sum(i)] = s[i];
            hk::WaveTile<Mma, kDim, kDim> factors;
            factors.acc[0][0] = 1.0f;
            const Probabilities p = probabilities(factors);
#pragma unroll
            for (int r = 0; r < kOwn; ++r) factor[r] = factors.acc[0][0][r * hk::kMmaRows];
            return p;
        };
        hk::block_barrier();
        lds_.first_landed.wait(0);
        publish_to_wgmma();
        multiply_keys(lds_.k[0]);
        wait_wgmma<0>(s);
        lds_.k_left[0].arrive();
        Probabilities p = score();

        const hk::Turns<S::kInTurn ? S::kWaves / 4 : 1> turns(hk::wave_id() / 4);
        const u32 seen = seen_tiles();
        u32 stage = 0, parity = 0;
        for (u32 tile = 0; tile < tiles_; ++tile) {
            const u32 after = stage == kStages - 1 ? 0 : stage + 1;
            at_ += kKeys;
            lds_.landed[stage].wait(parity);
            publish_to_wgmma();
            turns.take();
            if (tile + 1 < seen) {
                multiply_keys(lds_.k[after]);
                multiply_values(p, lds_.v[stage]);
                turns.pass();
                wait_wgmma<1>(s);
                lds_.k_left[after].arrive();
                const Probabilities next = score();
                wait_wgmma<0>(o);
                keep_until_here(p.frag);
                p = next;
                if (hk::ballot(factor[0] != 1.0f || factor[1] != 1.0f) != 0) {
#pragma unroll
                    for (int i = 0; i < kDv / 2; ++i) o[i] *= factor[i % 4 / 2];
                }
            } else {
                if (tile + 1 == seen) {
                    multiply_values(p, lds_.v[stage]);
                    wait_wgmma<0>(o);
                }
                if (!turns.last() || tile + 1 < tiles_) turns.pass();
                lds_.k_left[after].arrive();
            }
            lds_.v_left[stage].arrive();
            stage = after;
            parity ^= after == 0;
        }
#pragma unroll
        for (int i = 0; i < kDv / 2; ++i) o_.acc[0][i / 8][hk::place_of_sum(i)] = o[i];
    }
#endif

    HK_FN void store_outputs() const {
        const Params &p = hk::reload_params(p_);
        const float out_factor = kFp8 && !kSage && p.out_scale ? 1.0f / hk::load_uniform<float>(p.out_scale) : 1.0f;
        const bool first = hk::group_of_lane<kDim>(lane_of(work_)) == 0;
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const Row own = row(p, r);
            if (is_partial(p, work_)) {
                Vec<float, 2> sums = softmax_.sums(r);
                if (poison_[r]) sums = __builtin_nanf("");
                if (!own.valid) continue;
                const Partial partial = partial_of(p, work_, own.query, own.head);
                each_run(p, r, [&](u32 col, auto y) { partial.store(col, y); });
                if (first) partial.store_sums(sums);
                continue;
            }
            float sink = kMinusInf;
            if (p.scores.sink && own.valid) sink = reinterpret_cast<GlobalPtr<const float>>(p.scores.sink)[own.head];
            auto [factor, lse] = attention::finish_row(softmax_.sums(r), sink);
            if constexpr (kFp8) factor *= out_factor;
            if (poison_[r]) lse = factor = __builtin_nanf("");
            if (!own.valid) continue;
            const u64 out = address(p, p.out, own.query, own.head);
            if constexpr (kSage) {
                store_sage(p, r, out, factor);
                if (const u64 shift = sage::params_of(p).lse_shift) {
                    const u32 row = work_.sequence * p.heads + own.head;
                    lse += *reinterpret_cast<GlobalPtr<const float>>(float_at(shift, row, p.sequences.sq, own.query));
                }
            } else if (!kFp8 || p.out_type == attention::kOwn) {
                each_run(p, r, [&](u32 col, auto y) {
                    // Rows are on 8 bytes.
                    struct __attribute__((packed, aligned(kRun == 2 ? 4 : 8))) Columns {
                        Vec<Out, kRun> y;
                    };
                    *reinterpret_cast<GlobalPtr<Columns>>(out + col * 2) = {hk::narrow<Out, kRun>(y * factor)};
                });
            } else if constexpr (kFp8) {
                each_run(p, r, [&](u32 col, auto y) {
                    store_columns<Out>(p, out, col, y.lo * factor);
                    store_columns<Out>(p, out, col + 4, y.hi * factor);
                });
            }
            if (p.lse.data && first) *reinterpret_cast<GlobalPtr<float>>(address(p, p.lse, own.query, own.head)) = lse;
        }
    }
    /// Columns have factors of their own. Runs of 8 columns are on 16 bytes, or columns are stored one by one.
    HK_FN void store_sage(const Params &p, u32 r, u64 out, float factor) const {
        const SageParams &of = sage::params_of(p);
        const u64 factors = float_at(of.v_scale, work_.sequence * p.kv_heads + work_.kv_head, of.v_columns, 0);
        const auto each = [&]<class E>(E) HK_INLINE {
            each_run(p, r, [&](u32 col, auto y) {
                struct __attribute__((packed, aligned(4))) Factors {
                    Vec<float, kRun> of;
                };
                y *= reinterpret_cast<GlobalPtr<const Factors>>(factors + col * 4)->of * factor;
                const auto e = hk::narrow<E, kRun>(y);
                auto *at = reinterpret_cast<GlobalPtr<E>>(out) + col;
                if (p.out_vectorized) {
                    *reinterpret_cast<GlobalPtr<Vec<E, kRun>>>(at) = e;
                } else {
#pragma unroll
                    for (u32 i = 0; i < kRun; ++i) {
                        if (col + i < p.dv) at[i] = e[i];
                    }
                }
            });
        };
        if (p.out_type == kF32)
            each(float{});
        else if (p.out_type == kF16)
            each(hk::f16{});
        else
            each(Out{});
    }
    /// Calls `f(col, y)` for the runs of columns of the lane's row r.
    HK_FN void each_run(const Params &p, u32 r, auto f) const {
#pragma unroll
        for (int j = 0; j < kDv / kDim; ++j) {
#pragma unroll
            for (int i = 0; i < Places::kElements; i += kRun) {
                if (u32(i) / hk::kMmaRows % kOwn != r) continue;
                const u32 col = j * kDim + column(Places::n(lane_of(work_), i));
                Vec<float, kRun> y;
#pragma unroll
                for (int e = 0; e < kRun; ++e) y[e] = o_.acc[0][j][i + e];
                if (col < p.dv) f(col, y);
            }
        }
    }

    HK_FN u32 query_of(u32 row) const { return hk::DivMod(row, p_.group, p_.group_inverse).quotient; }

    /// Walks through the keys of [begin, end) that rows of the block see.
    template <template <class> class Walk, class From = Stored>
    HK_FN void walk_keys(i32 begin, i32 end) {
        const Params &p = hk::reload_params(p_);
        const W &work = work_;
        constexpr bool kPages = __is_same(Walk<KMover<kKeys>>, PageWalk<KMover<kKeys>>);
        const auto seen = [&](u32 query) {
            const KeyRange range = key_range(p, work, query);
            return kPaged ? range.clipped(begin, end) : range;
        };
        const auto uniform = [](i32 v) { return i32(hk::uniform(u32(v))); };
        const u32 last_row = work.q_len * p.group - 1;
        const auto seen_by_row = [&](u32 row) { return seen(query_of(row < last_row ? row : last_row)); };
        // The rows that are multiplied together: of a wave, or of a warpgroup.
        constexpr u32 kTogether = kWarpgroups ? 64 : kDim;
        const u32 wave_row = work.first + hk::wave_id() * kDim / kTogether * kTogether;
        const i32 first = seen_by_row(work.first).first, last = seen_by_row(work.first + kRows - 1).last;
        if (last < first) return;
        // Tiles are within windows into pages, and within blocks of keys that have a factor.
        constexpr i32 kAligned = kPages ? i32(kPageRows) : kSage ? kKeys : 1;
        const i32 from = first / kAligned * kAligned;
        tiles_ = hk::uniform(u32(last - from) / kKeys + 1);
        const KeyRange top = seen_by_row(wave_row), bottom = seen_by_row(wave_row + kTogether - 1);
        inner_first_ = uniform(bottom.first - from), inner_last_ = uniform(top.last - from);
        outer_first_ = uniform(top.first - from);
        outer_last_ = uniform(wave_row > last_row ? -1 : bottom.last - from);
        at_ = 0;
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) {
            const KeyRange keys = seen(row(p, r).query);
            visible_[r] = {u32(keys.first - from) - Places::n(lane_of(work), 0),
                           keys.last < keys.first ? 0 : u32(keys.last - keys.first + 1)};
        }
        const KeyRows &k = kPages ? p.cache.k : p.fresh.k, &v = kPages ? p.cache.v : p.fresh.v;
        constexpr bool kScaled = !kSage && (kFp8 || !__is_same(From, Stored));
        constexpr u32 kStoredKey = kBytes == 1 ? 1 : From::kBytes, kStoredValue = kSage ? 1 : kStoredKey;
        if constexpr (kSage) {
            static_assert(sage::kKeysOfBlock % kKeys == 0, "a factor for a tile");
            from_ = u32(from);
            const u32 head = work.sequence * p.kv_heads + work.kv_head;
            key_scales_ = sage::KeyScales(sage::params_of(p), head, hk::uniform(from_));
        } else {
            scale_ = q_scale_[0];
        }
        if constexpr (kScaled) {
            // Above 0, so that masked scores stay -inf. The largest score is not that of a negative factor: NaN.
            constexpr float kLeast = 0x1p-126f;
            scale_ *= k.scale(work.sequence, work.kv_head);
            scale_ = scale_ >= 0.0f ? __builtin_fmaxf(scale_, kLeast) : __builtin_nanf("");
        }
        const bool packed = p.sequences.k_starts || p.sequences.k_consecutive;
        const i64 k_stride = kPages ? k.token_group : k.token, v_stride = kPages ? v.token_group : v.token;
        const auto walk = [&]<class Mover>(const KeyRows &rows, i64 stride, u32 row_bytes) {
            if constexpr (kPages) {
                return PageWalk<Mover>(p.pages, work.pages, rows.row(0, work.kv_head, 0), rows.batch, stride, row_bytes,
                                       u32(from), u32(last) + 1);
            } else {
                const u32 token = work.k_start + u32(from - begin);
                return RowWalk<Mover>(rows.row(packed ? 0 : work.sequence, work.kv_head, token), stride, row_bytes,
                                      last - from + 1);
            }
        };
        using Of = Walks<Walk, From>;
        u32 thread = hk::wave_id() * hk::kWaveSize + lane_of(work);
#if defined(HK_WARPGROUPS)
        if constexpr (kWarpgroups) thread %= S::kCopyThreads;
#endif
        Of walks = {walk.template operator()<typename Of::K>(k, k_stride, p.dqk * kStoredKey),
                    walk.template operator()<typename Of::V>(v, v_stride, p.dv * kStoredValue),
                    typename Of::K(k_stride, p.dqk * kBytes / 2, thread), typename Of::V(v_stride, p.dv, thread),
                    u32(first - from)};
#if defined(HK_WARPGROUPS)
        if constexpr (kWarpgroups) {
            if (copies_keys())
                copy_warpgroups(walks);
            else
                multiply_warpgroups();
        } else
#endif
            if constexpr (Of::kToLds && kDv > 128)
            walk_by_parts(walks);
        else if constexpr (!S::kPingPong)
            walk_plain(walks);
        else if constexpr (Of::kToLds)
            walk_direct(walks);
        else
            walk_registers(walks);
        if constexpr (kScaled) {
            const float value_scale = v.scale(work.sequence, work.kv_head);
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r)
                map_pairs(o_, r, [&](int, Vec<float, 2> pair) { return pair * value_scale; });
        }
    }

    /// Poisons the rows that see a key of a page that is not in the cache.
    HK_FN void poison_missing() {
        const Params &p = hk::reload_params(p_);
        const u32 last_row = work_.q_len * p.group - 1, block_last = work_.first + kRows - 1;
        const i32 cached = i32(work_.cached);
        const i32 first = key_range(p, work_, query_of(work_.first)).first;
        const i32 last =
            key_range(p, work_, query_of(block_last < last_row ? block_last : last_row)).clipped(0, cached).last;
        if (last < first) return;
        const u32 end_page = hk::DivMod(u32(last), p.pages.tokens, p.pages.inverse).quotient + 1;
        for (u32 page = hk::DivMod(u32(first), p.pages.tokens, p.pages.inverse).quotient; page < end_page;
             page += hk::kWaveSize) {
            const u32 mine = page + hk::lane_id();
            bool missing = false;
            if (mine < end_page) {
                const auto *table = reinterpret_cast<GlobalPtr<const i32>>(p.pages.table) + work_.pages;
                missing = u32(table[mine]) >= p.pages.n_pages;
            }
            for (u64 left = hk::ballot(missing); left != 0; left &= left - 1) {
                const i32 begin = i32((page + u32(__builtin_ctzll(left))) * p.pages.tokens);
                const i32 end = begin + i32(p.pages.tokens) < cached ? begin + i32(p.pages.tokens) : cached;
#pragma unroll
                for (u32 r = 0; r < kOwn; ++r) {
                    const KeyRange keys = key_range(p, work_, row(p, r).query).clipped(begin, end);
                    poison_[r] |= keys.first <= keys.last;
                }
            }
        }
    }

  public:
    HK_FN Dense(const Params &p, const W &work, Lds &lds) : p_(p), work_(work), lds_(lds) {}

    HK_FN void run() {
#if defined(HK_WARPGROUPS)
        if constexpr (kWarpgroups) {
            // Both kinds of warpgroups wait for that once their first loads are in flight.
            if (hk::thread_x() == 0) lds_.init(S::kCopyThreads, S::kWaves);
            if (copies_keys()) {
                hk::detail::give_registers<S::kOfCopies>();
                if (!work_.poison) walk_keys<RowWalk>(0, i32(work_.keys()));
                return;
            }
            hk::detail::take_registers<S::kOfRows>();
        }
#endif
        if constexpr (kSage) {
            const SageParams &of = sage::params_of(p_);
#pragma unroll
            for (u32 r = 0; r < kOwn; ++r) {
                const Row own = row(p_, r);
                const u32 block = own.query / sage::kQueriesOfBlock, head = work_.sequence * p_.heads + own.head;
                q_scale_[r] =
                    own.valid
                        ? *reinterpret_cast<GlobalPtr<const float>>(float_at(of.q_scale, head, of.q_blocks, block))
                        : 0.0f;
                if constexpr (kSmooth)
                    q_shift_[r] = float_at(of.q_shift, own.valid ? head * of.q_blocks + block : 0,
                                           of.k_blocks * sage::kKeysOfBlock, 0);
            }
        } else {
            q_scale_[0] = p_.scores.scale * kLog2E;
        }
        if constexpr (kFp8 && !kSage) {
            static_assert(kOwn == 1, "a row for a lane");
            if (p_.q_descale) {
                const i64 at = i64(work_.sequence) * p_.q_descale_batch + i64(row(p_, 0).head) * p_.q_descale_head;
                q_scale_[0] *= reinterpret_cast<GlobalPtr<const float>>(p_.q_descale)[at];
            }
        }
#pragma unroll
        for (u32 r = 0; r < kOwn; ++r) poison_[r] = work_.poison;
        if (!work_.poison) {
            load_queries();
            if constexpr (kPaged) {
                using From = decltype([] {
                    if constexpr (kCache == Cache::Fp8)
                        return StoredFp8<T>{};
                    else
                        return Stored{};
                }());
                walk_keys<PageWalk, From>(0, i32(work_.cached));
                hk::block_barrier();
            }
            walk_keys<RowWalk>(i32(work_.cached), i32(work_.keys()));
            if constexpr (kPaged) poison_missing();
        }
        store_outputs();
    }
};

/// Entry points have HK_ENTRY's `p`.
template <class T, int kDqk, int kDv, Cache kCache, bool kSmall>
struct Kernel {
    using S = decltype([] {
#if defined(HK_WARPGROUPS)
        if constexpr (kCache == Cache::None && !kSmall && hk::kBitsOf<T> == 16 && kDv <= 128)
            return WarpgroupShape<(kDqk <= 64 ? 3 : 2), (kDqk <= 64 || kDqk > 128 ? 64 : 128)>{};
        else
#endif
            return shape<T, kDqk, kDv, kSmall>();
    }());
    static constexpr int kThreads = S::kThreads;
    static constexpr int kWavesPerSimd =
        kDv > 128 && (!kDirect<typename TypesOf<T>::Value> || kCache == Cache::Fp8) ? 1 : 2;

    HK_FN void operator()(const Params &p) const {
        using D = Dense<T, kDqk, kDv, S, kCache>;
        auto &lds = hk::block_lds<typename D::Lds>();
        const u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());
        constexpr u32 kRows = S::kWaves * kDim;
        Work work;
        if (!find_work<kRows>(p, task, work)) return;
        if (kCache != Cache::None && p.skip_single && work.q_len == 1) return;
        find_keys(p, work);
        D(p, work, lds).run();
    }
};

}  // namespace dense
}  // namespace attention

// An entry point and the one for few queries. T, columns of Q and K, and of V; cache.
#define HK_PREFILL_DENSE(name, ...)                                       \
    HK_PREFILL_KERNEL(name, attention::dense::Kernel, __VA_ARGS__, false) \
    HK_PREFILL_KERNEL(name##_small, attention::dense::Kernel, __VA_ARGS__, true)
#define HK_PREFILL_KERNEL(name, Kernel, ...)                                                             \
    HK_ENTRY_WAVES_PER_SIMD(name, (Kernel<__VA_ARGS__>::kThreads), (Kernel<__VA_ARGS__>::kWavesPerSimd), \
                            (Kernel<__VA_ARGS__>::kThreads / hk::kWaveSize), Kernel<__VA_ARGS__>{})
