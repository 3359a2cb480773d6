// mx_quant.hip: MX blocks of 32 adjacent columns, each with a power-of-two scale
//   s[r, i] = 2^(b - 127), b = hk::BlockRule of the largest magnitude of block i
//   q[r, c] = nearest element to x[r, c] / s[r, c / 32]; a block with NaN or infinity: b = 255, q = 0
//   x      [rows, cols]         T = bf16 | f16 | f32    unit stride on cols, rows any stride
//   q      [rows, cols / 2]     pairs of fp4 e2m1, even columns in the low nibble; ties to even, or away from zero
//          [rows, cols]         fp8 e4m3, e5m2 (OCP)    ties to even
//   scale  [rows, blocks]       e8m0                    any strides; or [n], shuffled
// How the work is split: tiles.h; a block per lane, so that stores of fp4 are 16 bytes. The last block may be short.
// Floor: rows * cols * (sizeof(T) + 0.5 or 1) + rows * blocks bytes. Source: OCP Microscaling Formats 1.0.
#include <hk/entry.h>

#include "mx.h"
#include "tiles.h"

namespace {
using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using hk::u8;

struct Params {
    hk::Global x, q, scale;
    hk::BlockRule rule;
    mx::Element element;
    u32 shuffled;  // 1: scales are in the order of mx::shuffled_index
    u32 batch;     // rows that a block takes at a time
};

template <Access kAccess, class T, int Lanes>
HK_FN void mx_quant(const Params &p) {
    constexpr int kN = mx::kBlock;
    constexpr bool kSingleRow = Lanes == hk::kWaveSize;
    using RowT = hk::Row<T, Lanes, kN, 1>;
    const u32 side = hk::thread_x() / Lanes, column = hk::thread_x() % Lanes * kN;
    const u32 blocks = (p.x.cols() + mx::kBlock - 1) / mx::kBlock;

    quant::for_tiles<Lanes, RowT::kCols>(p.x.rows(), p.x.cols(), column, p.batch, [&](const RowBatch &batch) {
        auto v = hk::widen(RowT::load(batch.at<T, kAccess, kSingleRow>(p.x, side)).chunk[0]);
        hk::AbsMax max;
        max.add(v);
        const u32 code = p.rule.code(max.bits);
        const u32 keep = code == 255u ? 0 : ~0u;
        v *= hk::e8m0_inverse(code);
        if (batch.column < batch.cols && side < batch.count) {
            const u64 row = batch.first + side;
            const u32 block = batch.column / mx::kBlock;
            const u64 place = p.shuffled ? mx::shuffled_index(row, block, blocks)
                                         : row * u64(p.scale.strides[2]) + block * u64(p.scale.strides[3]);
            p.scale.row<u8>(0)[place] = u8(code);
        }
        mx::with_encoder(p.element, [&](auto encode) {
            constexpr int kBytes = decltype(encode)::template kBytes<kN>;
            const RowBatch there = {batch.first, batch.count, batch.column / (kN / kBytes), batch.cols / (kN / kBytes)};
            const hk::Row<u8, Lanes, kBytes, 1> q = {{__builtin_bit_cast(hk::Vec<u8, kBytes>, encode(v) & keep)}};
            q.store(there.at<u8, kAccess, kSingleRow>(p.q, side));
        });
    });
    if (p.shuffled) {
        constexpr u64 kThreads = kSingleRow ? hk::kWaveSize : hk::row_threads(Lanes);
        mx::write_padding(p.scale.row<u8>(0), p.x.rows(), blocks, hk::block_x() * kThreads + hk::thread_x(),
                          hk::grid_x() * kThreads);
    }
}
}  // namespace

// Entry points of one dtype, one per row of `variants` in src/launch_tiles.rs. Name = op, dtype, widest row,
// `_scalar` for the scalar path.
#define ENTRIES(T)                                                                                             \
    HK_ENTRY(mx_quant_##T##_128, hk::row_threads(1), mx_quant<Access::Vectorized, hk::T, 128 / mx::kBlock>)    \
    HK_ENTRY(mx_quant_##T##_long, hk::kWaveSize, mx_quant<Access::Vectorized, hk::T, hk::kWaveSize>)           \
    HK_ENTRY(mx_quant_##T##_128_scalar, hk::row_threads(1), mx_quant<Access::Scalar, hk::T, 128 / mx::kBlock>) \
    HK_ENTRY(mx_quant_##T##_long_scalar, hk::kWaveSize, mx_quant<Access::Scalar, hk::T, hk::kWaveSize>)

ENTRIES(bf16)
ENTRIES(f16)
ENTRIES(f32)
