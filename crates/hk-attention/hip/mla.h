// mla.h: attention over latent rows, absorbed MLA: a key is a row of C + R columns, its value the first C of them.
//
//   s[i, j] = scale q[i] . row[j]  ->  p = softmax(s)  ->  out[i] = sum over j of p[i, j] row[j][: C]
//
// A tile's rows are (query, head), head fastest; all heads see the same keys. Keys go to LDS once and are read two ways: rows for S,
// columns for O. Waves are kWavesH x kWavesV: each has kDim rows and C / kWavesV columns of O, and computes the S of its rows, so
// that P stays in registers. Where loads go straight to LDS there are two stages; elsewhere one, and the next tile in registers.
// Floor: keys are read once for a tile of 16 or 64 rows; with 64 rows gfx942 is bound by the matrix unit.
// Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
#pragma once

#include "outputs.h"
#include "problem.h"
#include "softmax.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/shared.h>
#include <hk/wave_tile.h>

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
    u32 n_positions, rotary, interleaved, table_is_f32;
    u32 slot_tokens, slot_inverse;  // an entry of the table is token e % slot_tokens of page e / slot_tokens
    u32 listed;  // keys of a row are the whole row of the table, -1 is none
    u32 pad;
};

/// Columns in parts of 64: kC of values, kPe more. kRows: rows of a block, 16 or 64. kUnaligned: rows that are not on 16 bytes,
/// or that end within a chunk of 16 bytes.
template <class T_, int kC_, int kPe_, bool kRope_, int kRows_, bool kUnaligned_>
struct Shape {
    using T = T_;
    static constexpr int kC = kC_, kPe = kPe_, kRows = kRows_;
    static constexpr bool kUnaligned = kUnaligned_, kRope = kRope_;
    static constexpr int kDim = kRows == 16 ? 16 : 32, kWavesH = kRows / kDim, kWavesV = 4 / kWavesH;
    static constexpr int kThreads = 4 * hk::kWaveSize;
    static constexpr int kParts = (kC + kPe) / 64;
    static constexpr bool kDirect = hk::kHasWideDma && !kUnaligned;
    static constexpr int kStages = kDirect ? 2 : 1;
    // Two stages of ten parts leave no room for the states of 64 keys.
    static constexpr int kKeys = hk::kHasWideDma && kParts < 10 ? 64 : 32;
};

template <class S>
class Decode {
    using T = typename S::T;
    static constexpr int kDim = S::kDim, kKeys = S::kKeys, kParts = S::kParts, kC = S::kC;
    static constexpr int kCols = kC / S::kWavesV;  // of O, of a wave
    static constexpr int kRowThreads = 8;  // threads that move a row
    static constexpr int kRowsAtOnce = S::kThreads / kRowThreads, kMoves = kKeys / kRowsAtOnce;
    static constexpr int kFragBytes = hk::kFragBytesOf<kDim>, kSteps = kParts * 128 / kFragBytes;
    static constexpr int kPartSteps = 128 / kFragBytes;
    static constexpr i32 kAbsent = -1;
    static_assert(hk::kRowsPerLane == 1 && kCols % 64 == 0 && kMoves > 0, "whole parts of columns, one row for a lane");
    using Mma = hk::FragMma<T, T, kDim>;
    using Tile = hk::SharedTile<kKeys, 128>;
    using Places = hk::AccLayout<kDim>;
    using Chunk = Vec<u32, 4>;

  public:
    struct Lds {
        Tile rows[S::kStages][kParts];
        alignas(16) T key[S::kRope ? S::kPe : 8];  // rotated columns of the last key
        float state[S::kStages][kKeys];  // added to the key's scores: 0; -inf: there is none; NaN: not in the pool
    };

  private:
    const Params &p_;
    const Work &work_;
    Lds &lds_;
    u32 wave_rows_, wave_cols_;  // indices of the wave
    u32 query_, head_;  // of the lane's row
    bool there_;  // the lane's row
    u32 first_, end_;  // keys of the block
    u32 visible_;  // keys from first_ on that the lane's row sees
    u32 wave_visible_;  // that all rows of the wave see
    u32 n_tiles_;
    hk::Frag q_[kSteps];
    hk::WaveTile<Mma, kCols, kDim> o_;
    OnlineSoftmax<kDim> softmax_;
    i32 entry_[kMoves];  // of the table, of the next tile's rows that the thread moves

    /// What a thread moves of a row.
    struct Part {
        Chunk chunk[kParts];
        float state;
    };
    struct Moved {
        Part part[kMoves];
    };
    struct Source {
        u64 row;  // 0: zeros
        float state;
        bool rotated;
    };

    HK_FN static u32 row_of_thread(int move) { return hk::thread_x() / kRowThreads + move * kRowsAtOnce; }
    HK_FN static u32 piece() { return hk::thread_x() % kRowThreads; }

    /// In the loop parameters are reloaded: there are not enough SGPRs to keep them.
    HK_FN const attention::Params &params() const { return hk::reload_params(p_).attention; }

    HK_FN static hk::DivMod page_of(const attention::Params &p, u32 key) {
        return hk::DivMod(key, p.pages.tokens, p.pages.inverse);
    }
    HK_FN void load_entries(u32 tile) {
        const attention::Params &p = params();
        const auto *table = reinterpret_cast<GlobalPtr<const i32>>(p.pages.table) + work_.pages;
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
            const u32 key = first_ + tile * kKeys + row_of_thread(i);
            entry_[i] = key < end_ ? table[page_of(p, key).quotient] : kAbsent;
        }
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
                S::kRope && key + 1 == work_.keys()};
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
                if (key.row) v = rotated(col, position, [&](u32 c) { return element(key.row, c); });
            }
            const T rounded = hk::narrow<T, 1>(Vec<float, 1>{v})[0];
            lds_.key[col] = rounded;
            if (col < width) store_rotated(col, rounded);
        }
        hk::block_barrier();
    }
    HK_FN void store_rotated(u32 col, T v) const {
        if (!p_.k_pe_out || work_.first != 0) return;
        reinterpret_cast<GlobalPtr<T>>(p_.k_pe_out + u64(i64(work_.sequence) * p_.k_pe_out_row))[col] = v;
    }
    /// Before the loop, in the place of its tiles: [kRows, kPe].
    HK_FN T *rotated_queries() const { return reinterpret_cast<T *>(&lds_.rows[0][0]); }
    /// Eight columns of the last key, from `col` on.
    HK_FN Chunk rotated_key(u32 col) const { return *reinterpret_cast<const Chunk *>(&lds_.key[col]); }

    /// A chunk of eight columns of the kernel's type from `col` on, of `cols`; zeros behind them.
    HK_FN static Chunk load_chunk(u64 row, u32 col, u32 cols) {
        Chunk chunk = 0;
        if constexpr (S::kUnaligned) {
            Vec<T, 8> v = T(0);
            const auto *from = reinterpret_cast<GlobalPtr<const T>>(row) + col;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                if (col + i < cols) v[i] = from[i];
            }
            chunk = __builtin_bit_cast(Chunk, v);
        } else if (col < cols) {
            chunk = *reinterpret_cast<GlobalPtr<const Chunk>>(row + col * 2);
        }
        return chunk;
    }

    HK_FN Moved load(u32 tile) {
        Moved moved;
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
            const Source from = source_of(tile, i);
            Part &part = moved.part[i];
            part.state = from.state;
#pragma unroll
            for (int c = 0; c < kParts; ++c) part.chunk[c] = 0;
            if (from.row) load_row(from, part);
        }
        load_entries(tile + 1);
        return moved;
    }
    HK_FN void load_row(const Source &from, Part &part) const {
        const u32 cols = params().dqk;
#pragma unroll
        for (int c = 0; c < kParts; ++c) {
            const u32 col = c * 64 + piece() * 8;
            if (S::kRope && c * 64 >= kC && from.rotated) {
                part.chunk[c] = rotated_key(col - kC);
            } else {
                part.chunk[c] = load_chunk(from.row, col, cols);
            }
        }
    }
    HK_FN void store(const Moved &moved) {
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
            const u32 row = row_of_thread(i);
#pragma unroll
            for (int c = 0; c < kParts; ++c) lds_.rows[0][c].chunk[Tile::place(row, piece())] = moved.part[i].chunk[c];
            if (piece() == 0) lds_.state[0][row] = moved.part[i].state;
        }
    }

    /// Loads 16 bytes per lane straight to LDS, lane l's to `to + 16 l`. Inactive lanes leave theirs.
    HK_FN static void load_to_lds(void *to, u64 from) {
        using Shared = __attribute__((address_space(3))) void *;
        const u32 address = hk::uniform(u32(reinterpret_cast<__UINTPTR_TYPE__>((Shared)to)));
        asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tglobal_load_lds_dwordx4 %1, off"
                     :
                     : "s"(address), "v"(from)
                     : "memory");
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
                Tile &to = lds_.rows[stage][c];
                const u32 col = c * 64 + chunk * 8;
                const bool pe = c * 64 >= kC, rotated = S::kRope && pe && from.rotated;
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
        load_entries(tile + 1);
    }

    HK_FN void load_queries() {
        const attention::Params &p = p_.attention;
        const u64 row = p.q.data + u64((p.sequences.q_starts ? 0 : i64(work_.sequence) * p.q.batch) +
                                       (i64(work_.q_start) + query_) * p.q.row + i64(head_) * p.q.head);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const u32 col = (s * kFragBytes + hk::lane_id() / kDim * 16) / 2;
            q_[s] = 0;
            if (!there_) continue;
            if (S::kRope && s * kFragBytes / 2 >= kC) {
                const u32 of_block = wave_rows_ * kDim + hk::lane_id() % kDim;
                q_[s] = *reinterpret_cast<const Chunk *>(rotated_queries() + of_block * S::kPe + (col - kC));
            } else {
                q_[s] = load_chunk(row, col, p.dqk);
            }
        }
    }

    /// The tile in a stage.
    HK_FN void attend(u32 tile, u32 stage) {
        const Tile(&rows)[kParts] = lds_.rows[stage];
        hk::WaveTile<Mma, kKeys, kDim> s;
#pragma unroll
        for (int i = 0; i < kKeys / kDim; ++i) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const hk::Frag keys = rows[step / kPartSteps].template frag<kDim, true>(i * kDim, step % kPartSteps);
                s.acc[0][i] = Mma::mma(&keys, &q_[step], s.acc[0][i]);
            }
        }
        mask(s, tile, stage);
        softmax_.update(s, o_, scale_);
        const auto probabilities = s.template as_operand<T, true>(0);
        constexpr int kFragRows = 8 * hk::kWaveSize / kDim, kOperands = 64 / kDim;
#pragma unroll
        for (int f = 0; f < kKeys / kFragRows; ++f) {
#pragma unroll
            for (int c = 0; c < kCols / 64; ++c) {
                hk::Frag values[kOperands];
                rows[wave_cols_ * (kCols / 64) + c].template column_frags<kDim, true>(f * kFragRows, values);
#pragma unroll
                for (int j = 0; j < kOperands; ++j) {
                    auto &acc = o_.acc[0][c * kOperands + j];
                    acc = Mma::mma(&values[j], &probabilities.frag[f], acc);
                }
            }
        }
    }
    float scale_;  // of scores, in units of log2, above 0

    HK_FN void mask(hk::WaveTile<Mma, kKeys, kDim> &s, u32 tile, u32 stage) const {
        const attention::Params &p = params();
        if (p.scores.softcap != 0.0f || p.scores.scale < 0.0f) {
            const float scale = p.scores.scale * p.cache.k.scale(0, 0), cap = p.scores.softcap;
            map_pairs(s, 0, [&](int, Vec<float, 2> pair) {
                pair *= scale;
                if (cap != 0.0f) pair = hk::tanh(pair * (1.0f / cap)) * cap;
                return pair;
            });
        }
        const u32 lane = hk::lane_id();
        const float mine = lds_.state[stage][lane % kKeys];
        if (hk::ballot(mine != 0.0f) != 0) {
            map_pairs(s, 0, [&](int i, Vec<float, 2> pair) {
                const u32 n = i / Places::kElements * kDim + Places::n(lane, i % Places::kElements);
                return pair + Vec<float, 2>{lds_.state[stage][n], lds_.state[stage][n + 1]};
            });
        }
        if ((tile + 1) * kKeys > wave_visible_) {
            const i32 left = i32(visible_) - i32(tile * kKeys);
            map_pairs(s, 0, [&](int i, Vec<float, 2> pair) {
                const i32 n = i32(i / Places::kElements * kDim + Places::n(lane, i % Places::kElements));
                return Vec<float, 2>{n < left ? pair[0] : kMinusInf, n + 1 < left ? pair[1] : kMinusInf};
            });
        }
    }

    HK_FN void walk() {
        n_tiles_ = hk::uniform((end_ - first_ + kKeys - 1) / kKeys);
        load_entries(0);
        if constexpr (S::kDirect) {
            copy(0, 0);
            for (u32 tile = 0; tile < n_tiles_; ++tile) {
                // The wave's own loads of this tile; the barrier: those of all waves, which have left the other stage.
                hk::wait_loads<0, 0>();
                hk::block_barrier();
                if (tile + 1 < n_tiles_) copy(tile + 1, (tile + 1) % 2);
                attend(tile, tile % 2);
            }
        } else {
            Moved next = load(0);
            for (u32 tile = 0; tile < n_tiles_; ++tile) {
                hk::block_barrier();
                store(next);
                hk::block_barrier();
                next = load(tile + 1);
                attend(tile, 0);
            }
        }
    }

    HK_FN void store_outputs() const {
        const attention::Params &p = params();
        if (!there_) return;
        const bool packed = p.sequences.q_starts != 0, once = wave_cols_ == 0 && hk::lane_id() < kDim;
        const float nan = __builtin_nanf(""), value_scale = p.cache.k.scale(0, 0);
        if (p.splits.count > 1) {
            const Partial partial(p, work_, query_, head_);
            each_run([&]<int N>(u32 col, Vec<float, N> y) { partial.store<N>(p, col, y * value_scale); });
            // All lanes that have a row sum it.
            const Vec<float, 2> sums = softmax_.sums(0);
            if (once) partial.store_sums(p, work_.poison ? Vec<float, 2>{0.0f, nan} : sums);
            return;
        }
        float lse;
        float factor = softmax_.finish(0, kMinusInf, lse);
        if (work_.poison) factor = nan, lse = nan;
        const u64 row = row_address(p.out, work_, packed, query_, head_);
        each_run([&]<int N>(u32 col, Vec<float, N> y) {
            y *= factor * value_scale;
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                store_columns<T>(p, row, col + i, Vec<float, 4>{y[i], y[i + 1], y[i + 2], y[i + 3]});
            }
        });
        if (p.lse.data && once) {
            *reinterpret_cast<GlobalPtr<float>>(row_address(p.lse, work_, packed, query_, head_)) = lse;
        }
    }
    /// Calls `f(col, y)` for the runs of columns of the lane's row.
    HK_FN void each_run(auto f) const {
        constexpr int kOperands = 64 / kDim, kInterleaved = hk::kHasReadTr ? 1 : kOperands;
#pragma unroll
        for (int c = 0; c < kCols / 64; ++c) {
#pragma unroll
            for (int j = 0; j < kOperands; j += kInterleaved) {
#pragma unroll
                for (int i = 0; i < Places::kElements; i += 4) {
                    Vec<float, 4 * kInterleaved> y;
#pragma unroll
                    for (int e = 0; e < 4 * kInterleaved; ++e) {
                        y[e] = o_.acc[0][c * kOperands + j + e % kInterleaved][i + e / kInterleaved];
                    }
                    const u32 of_part = Tile::template column<kDim>(j * kDim + Places::n(hk::lane_id(), i));
                    f.template operator()<4 * kInterleaved>(wave_cols_ * kCols + c * 64 + of_part, y);
                }
            }
        }
    }

  public:
    HK_FN Decode(const Params &p, const Work &work, Lds &lds) : p_(p), work_(work), lds_(lds) {}

    HK_FN void run() {
        const attention::Params &p = p_.attention;
        wave_rows_ = hk::wave_id() / S::kWavesV, wave_cols_ = hk::wave_id() % S::kWavesV;
        const u32 rows = work_.q_len * p.group, first_row = work_.first + wave_rows_ * kDim;
        const u32 row = first_row + hk::lane_id() % kDim;
        const auto query_of = [&](u32 row) {
            return hk::DivMod(row < rows ? row : rows - 1, p.group, p.group_inverse);
        };
        there_ = row < rows;
        query_ = query_of(row).quotient, head_ = query_of(row).remainder;
        if (!work_.poison) {
            // No window: the keys of a query begin with the block's.
            const auto end = [&](u32 row) { return key_range(p, work_, query_of(row).quotient).last + 1; };
            const KeyRange range = key_range(p, work_, query_of(work_.first + S::kRows - 1).quotient);
            first_ = hk::uniform(u32(range.first)), end_ = hk::uniform(u32(range.last + 1));
            const auto seen = [&](u32 row) { return end(row) > i32(first_) ? u32(end(row)) - first_ : 0; };
            visible_ = seen(row), wave_visible_ = hk::uniform(seen(first_row));
            const bool general = p.scores.softcap != 0.0f || p.scores.scale < 0.0f;
            scale_ = kLog2E * (general ? 1.0f : p.scores.scale * p.cache.k.scale(0, 0));
            if (i32(end_) > i32(first_)) {
                if constexpr (S::kRope) rotate();
                load_queries();
                if constexpr (S::kRope) hk::block_barrier();
                walk();
            }
        }
        store_outputs();
    }
};

template <class S>
HK_FN void decode(const Params &p) {
    auto &lds = hk::block_lds<typename Decode<S>::Lds>();
    Work work;
    if (!find_work<S::kRows>(p.attention, hk::block_x(), work)) return;
    if (p.listed) {
        work.cached = p.attention.pages.width, work.fresh = 0;
        work.pages = u64(i64(work.sequence) * p.attention.pages.row);
    } else {
        find_keys(p.attention, work);
    }
    Decode<S>(p, work, lds).run();
}

}  // namespace mla

// Entry points of 16 and of 64 rows. T, columns of values and beside them, whether it rotates; `unaligned`, see Shape.
#define HK_MLA(name, unaligned, ...)                                                                   \
    HK_ENTRY_WAVES_PER_SIMD(name##_16, 256, 1, 4, mla::decode<mla::Shape<__VA_ARGS__, 16, unaligned>>) \
    HK_ENTRY_WAVES_PER_SIMD(name##_64, 256, 1, 4, mla::decode<mla::Shape<__VA_ARGS__, 64, unaligned>>)
