// moe_smoothquant.hip: smoothquant of each token for each of its experts
//   z = x[t, :] * smooth[ids[t, j], :]; s = max |z| / qmax; q = quantize(z / s)          t token, j choice
//   x       [tokens, cols]            T = bf16 | f16 | f32   unit stride on cols, rows any stride
//           [tokens * topk, cols]     if each choice has its own row
//   smooth  [experts, cols]           T | f32                likewise
//   ids     [tokens, topk]            i32                    rows any stride
//   q       [tokens * topk, cols]     i8 | fp8 e4m3          unit stride on cols, rows any stride
//   scale   [tokens * topk]           f32                    contiguous
// Output rows are t * topk + j, or j * tokens + t. A negative id leaves its row untouched; an id beyond the experts makes the
// scale NaN and q 0.
// How the work is split: Lanes lanes hold a token in registers and loop over its choices, so that x is read once; a token
// too long for registers is read twice for each choice.
// Floor: tokens * cols * sizeof(T) + tokens * topk * cols bytes + the factors of the chosen experts.
#include <hk/block.h>
#include <hk/entry.h>

#include "tiles.h"

namespace {
using hk::Access;
using hk::i32;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using hk::u8;

struct Params {
    hk::Global x, smooth, ids, q, scale;
    hk::QuantFormat format;
    u32 smooth_is_f32;  // smooth is f32 whatever T is
    u32 choice_major;  // output rows are j * tokens + t
    u32 x_by_choice;  // x has a row per choice
    u32 pad;
};

/// A tile is Lanes * ColsPerLane columns; kLong: rows of more than a tile, read twice.
template <Access kAccess, class T, int Lanes, int ColsPerLane, bool kLong>
HK_FN void moe_smoothquant(const Params &p) {
    using RowT = hk::Row<T, Lanes, quant::kChunk<T>, ColsPerLane / quant::kChunk<T>>;
    using RowF = typename RowT::template With<float>;
    const u32 tokens = p.ids.rows(), topk = p.ids.cols(), cols = p.x.cols(), experts = p.smooth.rows();
    const u32 column = hk::thread_x() * quant::kChunk<T>;
    const u32 end = kLong ? cols : 1;  // one tile
    hk::GroupReducer<Lanes, Lanes> group;

    for (u64 token = hk::block_x(); token < tokens; token += hk::grid_x()) {
        RowT x;
        if constexpr (!kLong) {
            if (!p.x_by_choice) x = RowT::load(RowBatch{token, 1, column, cols}.at<T, kAccess, true>(p.x, 0));
        }
        for (u32 choice = 0; choice < topk; ++choice) {
            const i32 id = p.ids.row<i32>(token)[choice];
            if (id < 0) continue;
            const u64 place = token * topk + choice;
            const u64 row = p.choice_major ? u64(choice) * tokens + token : place;
            const bool known = u32(id) < experts;

            const auto load = [&](u32 tile) {
                const RowBatch factors = {known ? u64(id) : 0, 1, tile + column, cols};
                if (kLong || p.x_by_choice) {
                    const RowBatch here = {p.x_by_choice ? place : token, 1, tile + column, cols};
                    x = RowT::load(here.at<T, kAccess, true>(p.x, 0));
                }
                RowF w;
                if (p.smooth_is_f32) {
                    w = RowF::load(factors.at<float, kAccess, true>(p.smooth, 0));
                } else {
                    w = hk::widen(RowT::load(factors.at<T, kAccess, true>(p.smooth, 0)));
                }
                return hk::widen(x) * w;
            };
            const auto store = [&](u32 tile, const RowF &z, float factor) {
                p.format.with_type([&](auto kind) {
                    quant::quantize<decltype(kind)::value>(z * factor)
                        .store(RowBatch{row, 1, tile + column, cols}.at<u8, kAccess, true>(p.q, 0));
                });
            };

            float scale = __builtin_nanf("");
            if (!known) {
                const RowF zeros = {};
                for (u32 tile = 0; tile < end; tile += RowT::kCols) store(tile, zeros, 1.0f);
            } else {
                u32 top = hk::FiniteMax::kZero;
                RowF z;
                for (u32 tile = 0; tile < end; tile += RowT::kCols) {
                    z = load(tile);
                    top = hk::MaxBits{}(top, quant::finite_max(z));
                }
                top = group.reduce(top, hk::MaxBits{});
                scale = hk::linear_scale(hk::FiniteMax::value(top), p.format.qmax);
                for (u32 tile = 0; tile < end; tile += RowT::kCols) {
                    if constexpr (kLong) z = load(tile);
                    store(tile, z, 1.0f / scale);
                }
            }
            if (hk::thread_x() == 0) p.scale.row<float>(0)[row] = scale;
        }
    }
}
}  // namespace

// Entry points of one dtype, one per row of `VARIANTS` in src/moe.rs. Name = op, dtype, widest row,
// `_scalar` for the scalar path.
#define ENTRIES(T)                                                                                         \
    HK_ENTRY(moe_smoothquant_##T##_2048, 64, moe_smoothquant<Access::Vectorized, hk::T, 64, 32, false>)    \
    HK_ENTRY(moe_smoothquant_##T##_8192, 256, moe_smoothquant<Access::Vectorized, hk::T, 256, 32, false>)  \
    HK_ENTRY(moe_smoothquant_##T##_long, 256, moe_smoothquant<Access::Vectorized, hk::T, 256, 16, true>)   \
    HK_ENTRY(moe_smoothquant_##T##_2048_scalar, 64, moe_smoothquant<Access::Scalar, hk::T, 64, 32, false>) \
    HK_ENTRY(moe_smoothquant_##T##_long_scalar, 256, moe_smoothquant<Access::Scalar, hk::T, 256, 16, true>)

ENTRIES(bf16)
ENTRIES(f16)
ENTRIES(f32)
