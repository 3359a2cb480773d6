// mx.h: products of codes in blocks of 32 columns, each with a power-of-two scale (mxfp4, mxfp8), by tiles.
//   y[m, n] = epilogue(sum over k of 2^(x_scale[m, k / 32] - 127) x[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])
//   w is fp4 and x fp4, or fp8 without scales of blocks; or both are fp8. They stand in LDS as codes, and scales of 128 columns as a
//   word for each row. Where the matrix unit takes no such blocks, each wave makes bf16 of its fragments of fp4, and scales sums of 32
//   columns of fp8 by fp8 (hk/blocks.h).
#pragma once

#include <hk/blocks.h>

#include "tiles.h"

namespace gemm {

/// Scales of an operand, e8m0, one for 32 columns; same layout as `MxScale` in src/params.rs. The one of row r and block b is at
///   row[0] (r % 16) + row[1] (r / 16 % 2) + row[2] (r / 32) + block[0] (b % 4) + block[1] (b / 4 % 2) + block[2] (b / 8)
/// which covers rows of scales, and the order in which matrix instructions take them.
struct MxScale {
    u64 data;
    i64 batch;  // strides, in bytes
    u32 row[3], block[3];

    HK_FN GlobalPtr<const u8> first(u32 index) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(index) * batch;
    }
    /// Of a row; beyond every window if the operand has no such row.
    HK_FN u32 offset(u32 r, u32 rows) const {
        return r < rows ? r % 16 * row[0] + r / 16 % 2 * row[1] + r / 32 * row[2] : hk::Window::kBeyond;
    }
    /// Of a block in its row, given `block`.
    HK_FN static u32 of_block(u32 b, const u32 (&block)[3]) {
        return b % 4 * block[0] + b / 4 % 2 * block[1] + b / 8 * block[2];
    }
};
static_assert(sizeof(MxScale) == 40, "same layout as in Rust");

/// Products of codes with other types; same layout as `MixedParams` in src/params.rs.
struct MixedParams {
    Operand x, w;
    Grid grid;
    Epilogue epilogue;
    MxScale x_mx, w_mx;
    BlockScale w_scale;  // f32, of groups of columns
    hk::BlockRule rule;  // of x that is quantized to mxfp4
    u32 pad;
    Fusion fusion;
};

/// The four scales of each row's 128 columns of a stage, as a word: those of x, if it has any, then those of w. By words, or
/// scale by scale, wherever they are. A byte of x is of `kColumns` columns.
template <int kXRows, int kWRows, int kThreads, u32 kColumns>
class MxWordMover {
    static_assert(kXRows % hk::kWaveSize == 0, "a wave has rows of one tile");

public:
    static constexpr int kParts = (kXRows + kWRows + kThreads - 1) / kThreads;
    static constexpr bool kDirect = false;
    using Tile = typename hk::WordMover<kXRows, kWRows, kThreads>::Tile;
    struct Words {
        u32 scale[kParts][4];
    };

private:
    hk::Window window_[kParts];
    u32 offset_[kParts], block_[kParts][3];
    u32 end_;

public:
    HK_FN MxWordMover(const MixedParams &p, const Work &work, u32 end, u32 first_m, u32 first_n) : end_(end) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 row = hk::thread_x() + i * kThreads;
            const bool of_w = hk::wave_id() * hk::kWaveSize + i * kThreads >= kXRows;
            window_[i] = hk::Window(of_w ? p.w_mx.first(work.matrix) : p.x_mx.first(work.batch), hk::Window::kBeyond - 1);
            offset_[i] = of_w ? p.w_mx.offset(first_n + row - kXRows, row < kXRows + kWRows ? p.w.rows : 0)
                              : p.x_mx.offset(first_m + row, p.x.rows);
#pragma unroll
            for (int j = 0; j < 3; ++j) block_[i][j] = of_w ? p.w_mx.block[j] : p.x_mx.block[j];
        }
    }

    HK_FN Words load(u32 from) const {
        Words words;
        constexpr u32 kBytes = 32 / kColumns;  // of a block in x
        from -= from % (4 * kBytes);           // stages can have less than a word's columns
        const u32 block = from / kBytes;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
#pragma unroll
            for (u32 b = 0; b < 4; ++b) {
                // A block past the end has no scale.
                const u32 past = (end_ - 1u - (from + b * kBytes)) & hk::Window::kBeyond;
                words.scale[i][b] = window_[i].template load<u8>(offset_[i] | past, MxScale::of_block(block + b, block_[i]));
            }
        }
        return words;
    }
    HK_FN static void store(const Words &words, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const auto &s = words.scale[i];
            tile.word[hk::thread_x() + i * kThreads] = s[0] | s[1] << 8 | s[2] << 16 | s[3] << 24;
        }
    }
    HK_FN void copy(u32, Tile &) const {}
};

/// An operand in LDS, blocks of 32 columns of its fragments.
template <class E>
struct MxFrag;

template <>
struct MxFrag<hk::Fp4> {
    using Block = hk::MxBlock;
    static constexpr int kBytes = 64;  // of 128 columns
    static constexpr bool kHasScales = true;
    static constexpr float kSumUnit = hk::kMxSumUnit;

    template <class Tile>
    HK_FN static hk::OfRows<Block> load(const Tile &tile, u32 row, u32 k, const hk::OfRows<u32> &scale) {
        const auto chunks = tile.chunks(row, k);
        return hk::of_rows([&](u32 i) { return Block::of_codes(chunks.row[i], scale.row[i]); });
    }
};

template <>
struct MxFrag<hk::Fp8> {
    using Block = hk::Fp8Block;
    static constexpr int kBytes = 128;
    static constexpr bool kHasScales = false;
    static constexpr float kSumUnit = hk::kMxFp8SumUnit;

    template <class Tile>
    HK_FN static hk::OfRows<Block> load(const Tile &tile, u32 row, u32 k, const hk::OfRows<u32> &) {
        const u32 lane = hk::lane_id();
        return hk::of_rows([&](u32 i) {
            typename Block::Raw raw;
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const u32 in_block = (c * Block::Raw::kStep + hk::group_of_lane(lane) * Block::Raw::kLaneStep) / 16;
                raw.chunk[c] = tile.chunk[Tile::place(row + hk::row_of_lane(lane, i), 2 * hk::kLaneGroups<16> * k + in_block)];
            }
            return Block::of(raw);
        });
    }
};

/// As `Tile`, for x of type E. `kWords`: scales come in words.
template <class E, Access kAccess, int kM_, int kN_, int kWavesM, int kWavesN, int kStages, bool kWords_>
struct MxTile {
    using Operand = MxFrag<E>;
    static constexpr int kM = kM_, kN = kN_;
    static constexpr int kThreads = kWavesM * kWavesN * hk::kWaveSize;
    static constexpr int kWaveM = kM / kWavesM, kWaveN = kN / kWavesN;
    static constexpr int kXRows = Operand::kHasScales ? kM : 0;  // of scales
    static constexpr bool kWords = kWords_;

    using X = hk::Mover<hk::SharedTile<kM, Operand::kBytes>, kThreads, kAccess, 1>;
    using W = hk::Mover<hk::SharedTile<kN, 64>, kThreads, kAccess, 1>;
    template <class Words>
    using Pipeline = hk::Pipeline<X, W, Words, kStages, 1>;

    HK_FN static u32 wave_m() { return hk::wave_id() / kWavesN * kWaveM; }
    HK_FN static u32 wave_n() { return hk::wave_id() % kWavesN * kWaveN; }
};

/// A wave's sums, in units of their operand's until the end.
template <class T>
struct MxSums {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    hk::MmaAcc acc[kM][kN] = {};

    HK_FN explicit MxSums(const auto &) {}

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        pipeline.run(from, count, *this);
        in_units(acc, T::Operand::kSumUnit);
    }

    template <int>
    HK_FN void multiply(const auto &step) {
        constexpr int kOfStage = 64 / hk::kFragBytes;
#pragma unroll
        for (int k = 0; k < kOfStage; ++k) {
            // A lane has a block of its row.
            const u32 lane = hk::lane_id(), shift = 8 * (k * hk::kLaneGroups<16> + hk::group_of_lane(lane));
            const auto codes = [&](u32 row, auto word) {
                return hk::of_rows([&](u32 i) { return word(row + hk::row_of_lane(lane, i)) >> shift & 0xffu; });
            };
            hk::OfRows<hk::MxBlock> w[kN];
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const u32 row = T::wave_n() + 16 * n;
                const auto scale = codes(row, [&](u32 r) { return *step.words[0]->w(r); });
                w[n] = MxFrag<hk::Fp4>::load(*step.w[0], row, k, scale);
            }
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const u32 row = T::wave_m() + 16 * m;
                hk::OfRows<u32> scale = {};
                if constexpr (T::Operand::kHasScales) scale = codes(row, [&](u32 r) { return step.words[0]->x(r); });
                const auto x = T::Operand::load(*step.x[0], row, k, scale);
#pragma unroll
                for (int n = 0; n < kN; ++n) acc[m][n] = hk::mma(w[n], x, acc[m][n]);
            }
        }
    }

};

/// As `Tile`, of fp8 by fp8, likewise. A stage is 64 columns; straight to LDS, those of a word of
/// scales are multiplied at a time.
template <Access kAccess, int kM, int kN, int kWavesM, int kWavesN, bool kWords_>
struct MxFp8Tile : Tile<hk::Fp8, kAccess, kM, kN, kWavesM, kWavesN, 5, 2> {
    struct Operand {
        static constexpr int kBytes = 128;  // of 128 columns
    };
    static constexpr int kXRows = kM;
    static constexpr bool kWords = kWords_;
};

/// A wave's sums of fp8 by fp8.
template <class T>
struct MxFp8Sums {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    hk::MmaAcc acc[kM][kN] = {};

    HK_FN explicit MxFp8Sums(const auto &) {}

    HK_FN void run(const auto &pipeline, u32 from, u32 count) { pipeline.run(from, count, *this); }

    template <int kTurn>
    HK_FN void multiply(const auto &step) {
        using hk::MxFp8;
        static_assert(!T::kDirect || T::kStep * T::kBytes == 128, "straight to LDS, each turn is the first");
        constexpr int kOfStage = T::kBytes / hk::kFragBytes;
        const u32 lane = hk::lane_id();
#pragma unroll
        for (int k = 0; k < T::kStep * kOfStage; k += MxFp8::kFrags) {
            const auto load = [&](Frag (&codes)[MxFp8::kFrags], const auto &tiles, u32 row) {
#pragma unroll
                for (int f = 0; f < MxFp8::kFrags; ++f) {
                    codes[f] = hk::joined(tiles[(k + f) / kOfStage]->chunks(row, (k + f) % kOfStage));
                }
            };
            const auto &words = *step.words[k / kOfStage];
            // The first of the fragments' blocks, of four in a word; or the lane's own.
            const u32 block = kTurn * (T::kStep * T::kBytes / 32) % 4 + k * (hk::kFragBytes / 32) % 4;
            const u32 shift = 8 * (hk::kHasMxMma ? hk::group_of_lane(lane) : block);
            MxFp8::W w[kN];
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const u32 row = T::wave_n() + 16 * n;
                load(w[n].codes, step.w, row);
                if constexpr (hk::kHasMxMma) {
                    w[n].scale = *words.w(row + hk::row_of_lane(lane)) >> shift;
                } else {
                    using Scales = decltype(w[n].scale);
                    const u32 of_lane = row + hk::group_of_lane(lane) * hk::kMmaRows;
                    w[n].scale = *reinterpret_cast<const Scales *>(words.w(of_lane)) >> shift;
                }
            }
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const u32 row = T::wave_m() + 16 * m;
                MxFp8::X x;
                load(x.codes, step.x, row);
                x.scale = hk::of_rows([&](u32 i) { return words.x(row + hk::row_of_lane(lane, i)) >> shift; });
#pragma unroll
                for (int n = 0; n < kN; ++n) acc[m][n] = MxFp8::mma(w[n], x, acc[m][n]);
            }
        }
    }
};

/// Scales of the operands that have some. A byte of x is of 128 / kBytes columns.
template <class T>
using MxWords = __remove_pointer(decltype([] {
    if constexpr (T::kWords) return (hk::WordMover<T::kXRows, T::kN, T::kThreads> *)nullptr;
    else return (MxWordMover<T::kXRows, T::kN, T::kThreads, 128 / T::Operand::kBytes> *)nullptr;
}()));

template <class T, template <class> class SumsOf = MxSums, class Site = Alone>
HK_FN void mx_gemm(const MixedParams &p, const Site &site = {}) {
    tile_gemm<T, SumsOf, false>(p, site, [&](const Work &work, const Range &range) {
        const u32 first_m = work.m_tile * T::kM, first_n = work.n_tile * T::kN;
        if constexpr (T::kWords) {
            return MxWords<T>(range.to, [&](u32 row, bool of_w) {
                const u32 offset = of_w ? p.w_mx.offset(first_n + row, p.w.rows) : p.x_mx.offset(first_m + row, p.x.rows);
                const auto first = of_w ? p.w_mx.first(work.matrix) : p.x_mx.first(work.batch);
                return hk::WordPlace{reinterpret_cast<u64>(first), offset, 4, __builtin_ctz(T::Operand::kBytes)};
            });
        } else {
            return MxWords<T>(p, work, range.to, first_m, first_n);
        }
    });
}

}  // namespace gemm
