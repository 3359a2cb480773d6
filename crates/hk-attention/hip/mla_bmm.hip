// mla_bmm.hip: queries of multi-head latent attention times the weights that the latent cache absorbs
//   out[b, h, n] = cast(sum_p q[h, b, p] w[h, n, p])                               w bf16 | f16, as q
//   out[b, h, n] = cast(w_scale sum_groups s sum_{p in group} fp8(q[h, b, p] / s) w[h, n, p])        w fp8
//   q  [heads, tokens, P]  T = bf16 | f16    unit stride on P, others free
//   w  [heads, N, P]       T, or the fp8 of the target's products      unit stride on P, others free
//   out[b, h, n] = cast(sum_p dq(mxfp4(q[h, b, p])) dq(w[h, n, p]))                w mxfp4: fp4, a scale for 32 columns
//   s = max(max |q| over the group, 1e-10) / the largest fp8, for each head, token and group of columns
// Products are summed in f32 in the order of p, groups in ascending order; one rounding at the end. Rows of tokens whose
// position the tables do not have are NaN. `zeros`, if it is there, is filled with zeros for its tokens.
//
// How the work is split
//   A wave takes 64 outputs n of 16 to 64 tokens of a head, and walks along P once. All operands come from global memory
//   to registers, 32 or 16 bytes of a row a lane at a time: for few tokens each weight is read once, by one wave; waves
//   of the same weights and other tokens follow each other. Weights are the first operand, their rows in such an order
//   that a lane has 8 outputs of a token side by side.
// Floor
//   2 tokens heads N P flop; bytes of w, q and out. DeepSeek-V3's 16.8 MB of bf16 weights are 2.8 us at 6 TB/s: with up
//   to some hundred tokens memory is what bounds it.
#include <hk/entry.h>
#include <hk/mma.h>

#include "cache.h"

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

/// Columns of P that a lane takes of a row at a time, and that a wave does.
constexpr u32 kLaneCols = 16;
constexpr u32 kStep = hk::kWaveSize / 16 * kLaneCols;
/// Tiles of 16 outputs of a wave.
constexpr int kTiles = 4;

struct Params {  // same fields, same order as `Params` in src/fused_bmm_rope_kv_cache.rs
    Common common;
    hk::Global q;         // (1, heads, tokens, P)
    hk::Global w;         // (1, heads, N, P), of mxfp4 P / 2 bytes
    hk::Global w_scales;  // (1, heads, N, P / 32), of mxfp4
    Target out;    // (tokens, heads, N)
    Target zeros;  // the same, its first tokens; data = 0: there is none
    u64 w_scale;   // f32[1], for fp8
    u32 group;     // columns of a scale, for fp8: a multiple of kStep
    u32 m_tiles, n_tiles;
    u32 tasks;
    hk::BlockRule rule;  // scales of q, for mxfp4
    u32 pad;
};

/// The head, tokens and outputs of a task.
struct Tile {
    u32 head, first_token, first_output;

    HK_FN Tile(const Params &p, u32 task, int token_tiles) {
        const u32 head_tile = task / p.m_tiles;
        first_token = (task - head_tile * p.m_tiles) * 16 * token_tiles;
        head = head_tile / p.n_tiles;
        first_output = (head_tile - head * p.n_tiles) * 16 * kTiles;
    }

    /// The token of row `row` of tile `m`; past the end the last one once more, to no end.
    HK_FN u32 token_row(const Params &p, int m, u32 row) const {
        const u32 token = first_token + 16 * m + row;
        return token < p.q.shape[2] ? token : p.q.shape[2] - 1;
    }

    /// The output of row `row` of tile `n`. Two tiles together are 32 outputs: a lane's accumulators of the first, then of
    /// the second, side by side.
    HK_FN u32 weight_row(const Params &p, int n, u32 row) const {
        const u32 at = row / hk::kMmaRows * 2 * hk::kMmaRows + n % 2 * hk::kMmaRows + row % hk::kMmaRows;
        const u32 output = first_output + n / 2 * 32 + at;
        return output < p.w.shape[2] ? output : p.w.shape[2] - 1;
    }
};

/// kLaneCols elements of a row of `cols` from `col` on, zero beyond its end.
template <class E, Access kAccess>
HK_FN Vec<E, kLaneCols> load_cols(GlobalPtr<const E> row, u32 col, u32 cols) {
    constexpr int kPart = kAccess == Access::Vectors ? hk::kVecLen<E> : 1;
    if constexpr (kPart == 1) hk::forget(col);  // not one mask for each column, kept for all rows
    Vec<E, kLaneCols> v = E(0);
#pragma unroll
    for (u32 i = 0; i < kLaneCols; i += kPart) {
        if (col + i < cols) {
            const auto part = cache::load<E, kPart>(row + col + i);
#pragma unroll
            for (int j = 0; j < kPart; ++j) v[i + j] = part[j];
        }
    }
    return v;
}

/// 16 values as codes of an operand of products.
HK_FN Vec<u32, 4> quantize(Vec<float, kLaneCols> v) { return hk::to_codes<hk::kMmaFp8, kLaneCols>(v); }

/// Rounds and stores a wave's outputs.
template <class T, int kTokenTiles, Access kAccess>
HK_FN void write(const Params &p, const MmaAcc (&acc)[kTokenTiles][kTiles], u32 head, u32 first_token, u32 first_output) {
    constexpr int kSide = 2 * hk::kMmaRows;  // outputs of a token side by side
    constexpr int kPart = kAccess == Access::Vectors ? 8 : 1;
    const float w_scale = p.w_scale ? *reinterpret_cast<GlobalPtr<const float>>(p.w_scale) : 1.0f;
    const u32 outputs = p.w.shape[2];
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
        const u32 token = first_token + 16 * m + hk::lane_id() % 16;
        if (token >= p.q.shape[2]) continue;
        const bool poison = cache::place_of(p.common, token).poison;
        const i64 to = p.out.row(token, 0) + i64(head) * p.out.head;
        const i64 to_zeros = p.zeros.row(token, 0) + i64(head) * p.zeros.head;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            const u32 first = first_output + n / 2 * 32 + hk::lane_id() / 16 * kSide;
            Vec<float, kSide> y;
#pragma unroll
            for (int i = 0; i < kSide; ++i) {
                const float sum = acc[m][n + i / hk::kMmaRows][i % hk::kMmaRows];
                y[i] = poison ? __builtin_nanf("") : sum * w_scale;
            }
#pragma unroll
            for (int i = 0; i < kSide; i += kPart) {
                const u32 output = first + i;
                if (output >= outputs) continue;
                Vec<float, kPart> v;
#pragma unroll
                for (int j = 0; j < kPart; ++j) v[j] = y[i + j];
                cache::write<T, kPart>(p.out, p.out.data, to + output, v);
                if (token < p.zeros.tokens) cache::write<T, kPart>(p.zeros, p.zeros.data, to_zeros + output, v);
            }
        }
    }
}

template <class T, class W, int kTokenTiles, Access kAccess>
HK_FN void product(const Params &given) {
    constexpr bool kFp8 = !__is_same(T, W);
    const u32 row = hk::lane_id() % 16, quarter = hk::lane_id() / 16;

    for (u32 task = hk::block_x(); task < given.tasks; task += hk::grid_x()) {
        const Params &p = hk::read_anew(given);
        const u32 cols = p.q.shape[3];
        const Tile tile(p, task, kTokenTiles);
        GlobalPtr<const T> q[kTokenTiles];
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
            q[m] = p.q.row<const T>(0) + i64(tile.head) * p.q.strides[1] + i64(tile.token_row(p, m, row)) * p.q.strides[2];
        }
        GlobalPtr<const W> w[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            w[n] = p.w.row<const W>(0) + i64(tile.head) * p.w.strides[1] + i64(tile.weight_row(p, n, row)) * p.w.strides[2];
        }

        MmaAcc acc[kTokenTiles][kTiles] = {};
        if constexpr (kFp8) {
            for (u32 group = 0; group < cols; group += p.group) {
                const u32 end = group + p.group < cols ? group + p.group : cols;
                float scale[kTokenTiles], inverse[kTokenTiles];
#pragma unroll
                for (int m = 0; m < kTokenTiles; ++m) {
                    hk::FiniteMax amax;
                    for (u32 k = group; k < end; k += kStep) {
                        const auto x = load_cols<T, kAccess>(q[m], k + quarter * kLaneCols, end);
                        amax.add(hk::widen<T, kLaneCols>(x));
                    }
                    u32 top = amax.top;
#pragma unroll
                    for (u32 other = 16; other < hk::kWaveSize; other *= 2) {
                        const u32 theirs = other == 16 ? hk::exchange<16>(top) : hk::exchange<hk::kWaveSize / 2>(top);
                        top = theirs > top ? theirs : top;
                    }
                    scale[m] = hk::group_scale(hk::FiniteMax::value(top), hk::kCodeMax<hk::kMmaFp8>);
                    inverse[m] = 1.0f / scale[m];
                }
                MmaAcc part[kTokenTiles][kTiles] = {};
                for (u32 k = group; k < end; k += kStep) {
                    const u32 col = k + quarter * kLaneCols;
                    Vec<u32, 4> codes[kTiles];
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) codes[n] = __builtin_bit_cast(Vec<u32, 4>, load_cols<u8, kAccess>(w[n], col, end));
#pragma unroll
                    for (int m = 0; m < kTokenTiles; ++m) {
                        const auto x = load_cols<T, kAccess>(q[m], col, end);
                        const Vec<u32, 4> mine = quantize(hk::widen<T, kLaneCols>(x) * inverse[m]);
#pragma unroll
                        for (int n = 0; n < kTiles; ++n) {
                            part[m][n] = hk::mma_fp8(codes[n].lo, mine.lo, part[m][n]);
                            part[m][n] = hk::mma_fp8(codes[n].hi, mine.hi, part[m][n]);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) acc[m][n] += part[m][n] * scale[m];
                }
            }
        } else {
            for (u32 k = 0; k < cols; k += kStep) {
                const u32 col = k + quarter * kLaneCols;
                Vec<T, kLaneCols> weights[kTiles];
#pragma unroll
                for (int n = 0; n < kTiles; ++n) weights[n] = load_cols<T, kAccess>(w[n], col, cols);
#pragma unroll
                for (int m = 0; m < kTokenTiles; ++m) {
                    const auto x = load_cols<T, kAccess>(q[m], col, cols);
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) {
                        acc[m][n] = hk::mma<T>(weights[n].lo, x.lo, acc[m][n]);
                        acc[m][n] = hk::mma<T>(weights[n].hi, x.hi, acc[m][n]);
                    }
                }
            }
        }

        write<T, kTokenTiles, kAccess>(hk::read_anew(given), acc, tile.head, tile.first_token, tile.first_output);
    }
}

#if defined(HK_MX_MMA)
/// 32 elements of a row of `cols`, a multiple of 32, from `col` on; zeros beyond its end.
template <class T, Access kAccess>
HK_FN Vec<T, 32> load_block(GlobalPtr<const T> row, u32 col, u32 cols) {
    return __builtin_shufflevector(load_cols<T, kAccess>(row, col, cols), load_cols<T, kAccess>(row, col + 16, cols),
                                   0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                   16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

/// A block's fp4 codes and the code of its scale.
struct Block {
    Vec<u32, 4> codes;
    u32 scale;

    HK_FN static Block of(Vec<float, 32> v, const hk::BlockRule &rule) {
        hk::AbsMax amax;
        amax.add(v);
        Block block;
        block.scale = rule.code(amax.bits);
        const float inverse = hk::e8m0_inverse(block.scale);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Vec<float, 8> part;
#pragma unroll
            for (int j = 0; j < 8; ++j) part[j] = v[8 * i + j] * inverse;
            block.codes[i] = block.scale == 255u ? 0u : hk::to_fp4<false>(part);
        }
        return block;
    }
};

/// With weights in fp4 and a scale for each block of 32 columns. A lane has a block of a row at a time.
template <class T, int kTokenTiles, Access kAccess>
HK_FN void product_mxfp4(const Params &given) {
    const u32 row = hk::lane_id() % 16, quarter = hk::lane_id() / 16;
    for (u32 task = hk::block_x(); task < given.tasks; task += hk::grid_x()) {
        const Params &p = hk::read_anew(given);
        const u32 cols = p.q.shape[3];
        const Tile tile(p, task, kTokenTiles);
        MmaAcc acc[kTokenTiles][kTiles] = {};
        for (u32 k = 0; k < cols; k += 128) {
            const u32 col = k + quarter * 32;
            Block w[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const u64 output = tile.weight_row(p, n, row);
                const auto codes = p.w.row<const u8>(0) + i64(tile.head) * p.w.strides[1] + i64(output) * p.w.strides[2];
                const auto scales = p.w_scales.row<const u8>(0) + i64(tile.head) * p.w_scales.strides[1] + i64(output) * p.w_scales.strides[2];
                w[n].codes = __builtin_bit_cast(Vec<u32, 4>, load_cols<u8, kAccess>(codes, col / 2, cols / 2));
                w[n].scale = col < cols ? u32(scales[col / 32]) : 127u;
            }
#pragma unroll
            for (int m = 0; m < kTokenTiles; ++m) {
                const auto q = p.q.row<const T>(0) + i64(tile.head) * p.q.strides[1] + i64(tile.token_row(p, m, row)) * p.q.strides[2];
                const Block x = Block::of(hk::widen<T, 32>(load_block<T, kAccess>(q, col, cols)), p.rule);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) acc[m][n] = hk::mma_mxfp4(w[n].codes, w[n].scale, x.codes, x.scale, acc[m][n]);
            }
        }
        write<T, kTokenTiles, kAccess>(hk::read_anew(given), acc, tile.head, tile.first_token, tile.first_output);
    }
}
#endif
}  // namespace

// Entry points, see `KERNELS` in src/fused_bmm_rope_kv_cache.rs. Name = dtype of q and out, weights, tokens of a wave,
// access if it is by elements.
#define MLA_BMM_ENTRIES(T, name, W, wide)                                                              \
    HK_ENTRY(mla_bmm_##T##_##name##_16, hk::kWaveSize, product<hk::T, W, 1, Access::Vectors>)          \
    HK_ENTRY(mla_bmm_##T##_##name##_##wide, hk::kWaveSize, product<hk::T, W, wide / 16, Access::Vectors>) \
    HK_ENTRY(mla_bmm_##T##_##name##_16_elements, hk::kWaveSize, product<hk::T, W, 1, Access::Elements>)
MLA_BMM_ENTRIES(bf16, same, hk::bf16, 64)
MLA_BMM_ENTRIES(f16, same, hk::f16, 64)
MLA_BMM_ENTRIES(bf16, fp8, hk::u8, 32)
MLA_BMM_ENTRIES(f16, fp8, hk::u8, 32)
#define MLA_BMM_MX_ENTRIES(T)                                                                          \
    HK_ENTRY(mla_bmm_##T##_mxfp4_16, hk::kWaveSize, product_mxfp4<hk::T, 1, Access::Vectors>)          \
    HK_ENTRY(mla_bmm_##T##_mxfp4_32, hk::kWaveSize, product_mxfp4<hk::T, 2, Access::Vectors>)          \
    HK_ENTRY(mla_bmm_##T##_mxfp4_16_elements, hk::kWaveSize, product_mxfp4<hk::T, 1, Access::Elements>)
HK_IF_MX_MMA(MLA_BMM_MX_ENTRIES(bf16))
HK_IF_MX_MMA(MLA_BMM_MX_ENTRIES(f16))
