// mla_bmm.hip: batched GEMM of multi-head latent attention: queries by the weights absorbed from the latent cache
//   out[b, h, n] = cast(sum_p q[h, b, p] w[h, n, p])                               w bf16 | f16, as q
//   out[b, h, n] = cast(w_scale sum_groups s sum_{p in group} fp8(q[h, b, p] / s) w[h, n, p])        w fp8
//   out[b, h, n] = cast((1 / y_scale) sum_p dq(mxfp4(q[h, b, p])) dq(w[h, n, p]))  w mxfp4: fp4, a scale per 32 columns
//   q  [heads, tokens, P]  T = bf16 | f16    unit stride on P, others free
//   w  [heads, N, P]       T, or the target's fp8     unit stride on P, others free
//   s = max(max |q| over the group, 1e-10) / the largest fp8, for each head, token and group of columns
// f32 accumulation in the order of p, groups in ascending order; one rounding at the end. Rows of tokens whose position is
// outside the rope tables are NaN. `zeros`, if given, is filled with zeros for its tokens.
//
// Work split
//   A wave computes 64 outputs n of 16 tokens of a head, or of 64 tokens if that leaves no CU idle. All operands come from
//   global memory to registers, 16 or 32 bytes of a row per lane and step. Weights are read once for 64 tokens of a prompt,
//   then from L2: waves with the same weights are neighbours on one XCD.
//   Weights are the first MFMA operand, their rows permuted so that a lane has 8 neighbouring outputs of a token.
//   mxfp4 uses block-scaled MFMA where the target has it, else bf16, which holds all dequantized values exactly.
// Floor
//   2 tokens heads N P flop; bytes of w, q and out. DeepSeek-V3's 16.8 MB of bf16 weights are 2.8 us at 6 TB/s: with up
//   to some hundred tokens memory is what bounds it.
#include <hk/entry.h>
#include <hk/mma.h>

#include "kv_cache.h"

namespace {
using cache::Common;
using cache::Target;
using hk::Access;
using hk::GlobalPtr;
using hk::i64;
using hk::MmaAcc;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// Columns of P per step, of a lane and of a wave.
constexpr u32 kLaneCols = 16;
constexpr u32 kStep = hk::kLaneGroups<16> * kLaneCols;
/// N tiles of 16 outputs per wave.
constexpr int kTiles = 4;

struct Params {
    Common common;
    hk::Global q;  // (1, heads, tokens, P)
    hk::Global w;  // (1, heads, N, P), of mxfp4 P / 2 bytes
    hk::Global w_scales;  // (1, heads, N, P / 32), of mxfp4
    Target out;  // (tokens, heads, N)
    Target zeros;  // the first tokens; data = 0: none
    u64 w_scale;  // f32[1], for fp8
    u64 y_scale;  // f32[1] to divide by, for mxfp4; 0: none
    u32 group;  // columns of a scale, for fp8: a multiple of kStep
    u32 m_tiles, n_tiles;
    u32 tasks;
    hk::BlockRule rule;  // scales of q, for mxfp4
    u32 pad;
};

/// Loads a lane's rows of an operand, one in each of kCount tiles. Past the ends it reads zeros.
template <class E, int kCount, Access kAccess>
class RowLoader;

/// Vectorized: the rows of a task are within 2 GiB.
template <class E, int kCount>
class RowLoader<E, kCount, Access::Vectorized> {
    hk::Window window_;
    u32 offsets_[kCount][hk::kRowsPerLane];

  public:
    /// `first` is the task's first row, `row_of(i, r)` the lane's row r of tile i.
    template <class F>
    HK_FN RowLoader(const hk::Global &g, u32 head, u32 first, F row_of)
        : window_(g.row<const E>(first) + i64(head) * g.strides[1], hk::Window::kOutOfBounds) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r)
                offsets_[i][r] = (row_of(i, r) - first) * u32(g.strides[2]) * u32(sizeof(E));
        }
    }

    /// N elements of the lane's rows of tile i from `col` on, of rows of `cols`.
    template <int N>
    HK_FN hk::PerRow<Vec<E, N>> load(int i, u32 col, u32 cols) const {
        return hk::per_row([&](u32 r) {
            const hk::Cursor<E, Access::Vectorized> at = {window_, offsets_[i][r] + col * u32(sizeof(E)),
                                                          hk::i32(cols - col)};
            return at.template load<N>(0);
        });
    }
};

/// Scalar path: rows are anywhere.
template <class E, int kCount>
class RowLoader<E, kCount, Access::Scalar> {
    GlobalPtr<const E> rows_[kCount][hk::kRowsPerLane];

  public:
    template <class F>
    HK_FN RowLoader(const hk::Global &g, u32 head, u32, F row_of) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r)
                rows_[i][r] = g.row<const E>(row_of(i, r)) + i64(head) * g.strides[1];
        }
    }

    template <int N>
    HK_FN hk::PerRow<Vec<E, N>> load(int i, u32 col, u32 cols) const {
        hk::opaque(col);  // else the masks of all columns stay in scalar registers
        return hk::per_row([&](u32 r) {
            Vec<E, N> v = E(0);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (col + j < cols) v[j] = rows_[i][r][col + j];
            }
            return v;
        });
    }
};

/// Coordinates of a task: head, tokens, outputs.
struct Tile {
    u32 head, first_token, first_output;
    u32 lane;  // opaque: values derived from it are recomputed for each task, not kept in registers

    /// The task of this wave, which has kTokenTiles of the block's kWaves * kTokenTiles token tiles.
    template <int kTokenTiles, int kWaves>
    HK_FN static Tile of(const Params &p, u32 index) {
        const u32 task = hk::xcd_remap(index, p.tasks);
        const u32 wave = kWaves > 1 ? hk::wave_id() : 0;
        Tile tile;
        tile.lane = hk::lane_id();
        hk::opaque(tile.lane);
        const u32 head_tile = task / p.m_tiles;
        tile.first_token = ((task - head_tile * p.m_tiles) * kWaves + wave) * 16 * kTokenTiles;
        tile.head = head_tile / p.n_tiles;
        tile.first_output = (head_tile - tile.head * p.n_tiles) * 16 * kTiles;
        return tile;
    }

    /// The token of row `row` of tile `m`, clamped to the last one.
    HK_FN u32 token_row(const Params &p, int m, u32 row) const {
        const u32 token = first_token + 16 * m + row;
        return token < p.q.shape[2] ? token : p.q.shape[2] - 1;
    }

    /// The output of row `row` of tile `n`, clamped to the last one. Two tiles are 32 outputs: a lane's accumulators of the
    /// first and the second tile are neighbours.
    HK_FN u32 weight_row(const Params &p, int n, u32 row) const {
        const u32 at = row / hk::kMmaRows * 2 * hk::kMmaRows + n % 2 * hk::kMmaRows + row % hk::kMmaRows;
        const u32 output = first_output + n / 2 * 32 + at;
        return output < p.w.shape[2] ? output : p.w.shape[2] - 1;
    }

    /// Loader of the lane's rows of the queries.
    template <class T, int kTokenTiles, Access kAccess>
    HK_FN RowLoader<T, kTokenTiles, kAccess> queries(const Params &p) const {
        return {p.q, head, first_token, [&](int m, u32 r) { return token_row(p, m, hk::row_of_lane(lane, r)); }};
    }

    /// Loader of the lane's rows of the weights or of their scales.
    template <class W, Access kAccess>
    HK_FN RowLoader<W, kTiles, kAccess> weights(const Params &p, const hk::Global &w) const {
        return {w, head, first_output, [&](int n, u32 r) { return weight_row(p, n, hk::row_of_lane(lane, r)); }};
    }
};

/// Quantizes 16 values to the fp8 of MFMA.
HK_FN Vec<u32, 4> quantize(Vec<float, kLaneCols> v) { return hk::quantize_packed<hk::kMmaFp8Type, kLaneCols>(v); }

/// Rounds and stores a wave's outputs.
template <class T, int kTokenTiles, Access kAccess>
HK_FN void write(const Params &p, const MmaAcc (&acc)[kTokenTiles][kTiles], const Tile &tile, float unit) {
    constexpr int kSide = 2 * hk::kMmaRows;  // neighbouring outputs of a token
    constexpr int kPart = kAccess == Access::Vectorized ? 8 : 1;
    float scale = 1.0f;
    if (p.w_scale) scale = hk::load_uniform<float>(p.w_scale);
    if (p.y_scale) scale = 1.0f / hk::load_uniform<float>(p.y_scale);
    const u32 outputs = p.w.shape[2];
#pragma unroll
    for (int i = 0; i < kTokenTiles * hk::kRowsPerLane; ++i) {
        const u32 m = i / hk::kRowsPerLane, r = i % hk::kRowsPerLane;
        const u32 token = tile.first_token + 16 * m + hk::row_of_lane(tile.lane, r);
        if (token >= p.q.shape[2]) continue;
        const bool poison = cache::place_of(p.common, token, false).poison;
        const i64 to = p.out.row(token, 0) + i64(tile.head) * p.out.head;
        const i64 to_zeros = p.zeros.row(token, 0) + i64(tile.head) * p.zeros.head;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            const u32 first = tile.first_output + n / 2 * 32 + hk::group_of_lane(tile.lane) * kSide;
            Vec<float, kSide> y;
#pragma unroll
            for (int i = 0; i < kSide; ++i) {
                const float sum = acc[m][n + i / hk::kMmaRows][r * hk::kMmaRows + i % hk::kMmaRows] * unit;
                y[i] = sum * scale;
            }
#pragma unroll
            for (int i = 0; i < kSide; i += kPart) {
                const u32 output = first + i;
                if (output >= outputs) continue;
                Vec<float, kPart> v;
#pragma unroll
                for (int j = 0; j < kPart; ++j) v[j] = y[i + j];
                cache::write<T, kPart>(p.out, p.out.data, to + output, v, poison);
                if (token < p.zeros.tokens) cache::write<T, kPart>(p.zeros, p.zeros.data, to_zeros + output, v, poison);
            }
        }
    }
}

template <class T, class W, int kTokenTiles, int kWaves, Access kAccess>
HK_FN void bmm(const Params &args) {
    constexpr bool kFp8 = !__is_same(T, W);
    for (u32 task = hk::block_x(); task < args.tasks; task += hk::grid_x()) {
        const Params &p = hk::reload_params(args);
        const u32 cols = p.q.shape[3];
        const Tile tile = Tile::of<kTokenTiles, kWaves>(p, task);
        if (tile.first_token >= p.q.shape[2]) continue;
        const u32 lane_group = hk::group_of_lane(tile.lane);
        const auto q = tile.queries<T, kTokenTiles, kAccess>(p);
        const auto w = tile.weights<W, kAccess>(p, p.w);

        MmaAcc acc[kTokenTiles][kTiles] = {};
        if constexpr (kFp8) {
            for (u32 group = 0; group < cols; group += p.group) {
                const u32 end = group + p.group < cols ? group + p.group : cols;
                hk::FiniteMax amax[kTokenTiles][hk::kRowsPerLane];
                for (u32 k = group; k < end; k += kStep) {
#pragma unroll
                    for (int m = 0; m < kTokenTiles; ++m) {
                        const auto x = q.template load<kLaneCols>(m, k + lane_group * kLaneCols, end);
#pragma unroll
                        for (int r = 0; r < hk::kRowsPerLane; ++r) amax[m][r].add(hk::widen<T, kLaneCols>(x.row[r]));
                    }
                }
                Vec<float, hk::kRowsPerLane> scale[kTokenTiles], inverse[kTokenTiles];
#pragma unroll
                for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
                    for (int r = 0; r < hk::kRowsPerLane; ++r) {
                        const u32 top = hk::reduce_over_lane_groups(amax[m][r].top, hk::Max{});
                        scale[m][r] = hk::group_scale(hk::FiniteMax::value(top), hk::kQuantMax<hk::kMmaFp8Type>);
                        inverse[m][r] = 1.0f / scale[m][r];
                    }
                }
                MmaAcc part[kTokenTiles][kTiles] = {};
                for (u32 k = group; k < end; k += kStep) {
                    const u32 col = k + lane_group * kLaneCols;
                    hk::PerRow<Vec<u8, kLaneCols>> weights[kTiles];
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) weights[n] = w.template load<kLaneCols>(n, col, end);
#pragma unroll
                    for (int m = 0; m < kTokenTiles; ++m) {
                        const auto x = q.template load<kLaneCols>(m, col, end);
                        if (m == 0) hk::sched_barrier();  // all loads are issued before the first MFMA
                        const auto quantized = hk::per_row(
                            [&](u32 r) { return quantize(hk::widen<T, kLaneCols>(x.row[r]) * inverse[m][r]); });
#pragma unroll
                        for (int n = 0; n < kTiles; ++n) {
                            const auto values = __builtin_bit_cast(hk::PerRow<Vec<u32, 4>>, weights[n]);
                            part[m][n] = hk::mma_fp8(hk::lower(values), hk::lower(quantized), part[m][n]);
                            part[m][n] = hk::mma_fp8(hk::upper(values), hk::upper(quantized), part[m][n]);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) acc[m][n] += part[m][n] * hk::broadcast_m(scale[m]);
                }
            }
        } else {
            for (u32 k = 0; k < cols; k += kStep) {
                const u32 col = k + lane_group * kLaneCols;
                hk::PerRow<Vec<T, kLaneCols>> weights[kTiles];
#pragma unroll
                for (int n = 0; n < kTiles; ++n) weights[n] = w.template load<kLaneCols>(n, col, cols);
#pragma unroll
                for (int m = 0; m < kTokenTiles; ++m) {
                    const auto x = q.template load<kLaneCols>(m, col, cols);
                    if (m == 0) hk::sched_barrier();  // all loads are issued before the first MFMA
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) {
                        acc[m][n] = hk::mma(hk::lower(weights[n]), hk::lower(x), acc[m][n]);
                        acc[m][n] = hk::mma(hk::upper(weights[n]), hk::upper(x), acc[m][n]);
                    }
                }
            }
        }

        write<T, kTokenTiles, kAccess>(hk::reload_params(args), acc, tile, 1.0f);
    }
}

/// Weights in mxfp4: a scale for each block of 32 columns. A lane has a block of a row per step.
template <class T, int kTokenTiles, int kWaves, Access kAccess>
HK_FN void bmm_mxfp4(const Params &args) {
    for (u32 task = hk::block_x(); task < args.tasks; task += hk::grid_x()) {
        const Params &p = hk::reload_params(args);
        const u32 cols = p.q.shape[3];
        const Tile tile = Tile::of<kTokenTiles, kWaves>(p, task);
        if (tile.first_token >= p.q.shape[2]) continue;
        const u32 lane_group = hk::group_of_lane(tile.lane);
        const auto q = tile.queries<T, kTokenTiles, kAccess>(p);
        const auto w = tile.weights<u8, kAccess>(p, p.w);
        const auto w_scales = tile.weights<u8, kAccess>(p, p.w_scales);
        MmaAcc acc[kTokenTiles][kTiles] = {};
        for (u32 k = 0; k < cols; k += hk::kMxCols) {
            const u32 col = k + lane_group * 32;
            hk::PerRow<hk::MxBlock> blocks[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const auto values = w.template load<16>(n, col / 2, cols / 2);
                const auto scale = w_scales.template load<1>(n, col / 32, cols / 32);
                blocks[n] = hk::per_row([&](u32 r) {
                    return hk::MxBlock::from_packed(__builtin_bit_cast(Vec<u32, 4>, values.row[r]), scale.row[r][0]);
                });
            }
#pragma unroll
            for (int m = 0; m < kTokenTiles; ++m) {
                const auto x = q.template load<32>(m, col, cols);
                const auto block =
                    hk::per_row([&](u32 r) { return hk::MxBlock::quantized(hk::widen<T, 32>(x.row[r]), p.rule); });
#pragma unroll
                for (int n = 0; n < kTiles; ++n) acc[m][n] = hk::mma_mxfp4(blocks[n], block, acc[m][n]);
            }
        }
        write<T, kTokenTiles, kAccess>(hk::reload_params(args), acc, tile, hk::kMxAccUnit);
    }
}
}  // namespace

// Entry points, see `Form` in src/kv_cache/fused_bmm_rope_kv_cache.rs. Name = dtype of q and out, weights, tokens of a block,
// _scalar on the scalar path.
#define MLA_BMM_FORM(T, name, tiles, waves, body, ...)                                                       \
    HK_ENTRY(mla_bmm_##T##_##name##_16, hk::kWaveSize, body<hk::T, ##__VA_ARGS__, 1, 1, Access::Vectorized>) \
    HK_ENTRY(mla_bmm_##T##_##name##_64, waves *hk::kWaveSize,                                                \
             body<hk::T, ##__VA_ARGS__, tiles, waves, Access::Vectorized>)                                   \
    HK_ENTRY(mla_bmm_##T##_##name##_16_scalar, hk::kWaveSize, body<hk::T, ##__VA_ARGS__, 1, 1, Access::Scalar>)
#define MLA_BMM_ENTRIES(T)                  \
    MLA_BMM_FORM(T, same, 4, 1, bmm, hk::T) \
    MLA_BMM_FORM(T, fp8, 2, 2, bmm, hk::u8) \
    MLA_BMM_FORM(T, mxfp4, 2, 2, bmm_mxfp4)
MLA_BMM_ENTRIES(bf16)
MLA_BMM_ENTRIES(f16)
