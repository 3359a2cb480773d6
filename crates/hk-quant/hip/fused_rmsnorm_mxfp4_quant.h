// fused_rmsnorm_mxfp4_quant.h: the RMS norm of a row, quantized to MX blocks of fp4
//   b[r, j] = e8m0 byte of the scale s = 2^(b - 127) of block j, columns 32 j .. 32 j + 31: hk::BlockRule of the largest
//             magnitude of its y; 255 if one is not finite
//   q[r, c] = fp4(y[r, c] / s), to nearest even; 0 in a block whose b is 255. y, its inputs and other outputs: norm_rows.h
//   q      [rows, cols / 2]             two values per byte, the first in the low nibble; unit stride, rows any stride;
//                                       absent: only `out` is written
//   scale  [rows, ceil(cols / 32)]      e8m0, any strides; or shuffled as gfx950's scaled MFMA reads them
//                                       (hk_core::quant::shuffled_index), with every byte of padding 127
// Floor
//   Memory: rows * cols * (sizeof(T) + 1/2 + 1/32), with a residual 2 * sizeof(T) more, with `out` sizeof(T) more.
//   VALU instructions per wave for 8 bf16: 8 to widen, 4 for the sum, 4 + 4 to scale, 16 for the maximum, 8 to scale, and
//   4 to convert on gfx950, 45 on gfx942: 50 and 95, within the 135 clocks (rms_rows.h of hk-norm) that their 1.3 KiB take.
#pragma once

#include "mx.h"
#include "norm_rows.h"

namespace norm_quant {

struct Mxfp4Params {
    NormParams head;
    hk::Global q, scale;
    hk::BlockRule rule;
    u32 blocks;  // per row
    u32 shuffled;  // 1: scales are in the order of mx::shuffled_index
    u32 _pad;
};

}  // namespace norm_quant

namespace {

using namespace norm_quant;

using Params = Mxfp4Params;

template <class Block, class P>
class Quantizer {
    using RowF = typename Block::RowF;
    static constexpr int kLen = hk::kVecLen<typename Block::RowT::Element>;
    static constexpr int kChunks = sizeof(RowF) / sizeof(hk::Vec<float, kLen>);
    static constexpr int kLanes = RowF::kCols / (kLen * kChunks);
    static constexpr int kSpan = int(mx::kBlock) / kLen;  // lanes per block

    const Block &block_;

  public:
    HK_FN Quantizer(const P &, const Block &block) : block_(block) {}

    HK_FN bool observes_rows(const P &) const { return false; }
    HK_FN void observe(const P &, const RowF &, const RowBatch &) const {}
    HK_FN void settle(const P &, const RowBatch &) const {}

    HK_FN void write(const P &p, const RowF &y, const RowBatch &batch) const {
        using Bytes = hk::Vec<u8, kLen / 2>;
        hk::Row<u8, kLanes, kLen / 2, kChunks> q;
        const u64 row = batch.first + block_.index(0);
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            hk::AbsMax max;
            max.add(y.chunk[k]);
            const u32 code = p.rule.code(hk::group_reduce<kSpan>(max.bits, hk::MaxBits{}));
            const float inverse = hk::e8m0_inverse(code);
            hk::Vec<float, 8> v = 0.0f;
#pragma unroll
            for (int i = 0; i < kLen; ++i) v[i] = y.chunk[k][i] * inverse;
            const u32 word = code == 255u ? 0u : hk::quantize_fp4<false>(v);
            if constexpr (kLen == 8) {
                q.chunk[k] = __builtin_bit_cast(Bytes, word);
            } else {
                q.chunk[k] = __builtin_bit_cast(Bytes, hk::u16(word));
            }

            u32 column = batch.column + u32(k * kLanes * kLen);
            hk::opaque(column);  // keeps the compiler from holding its compare masks in SGPRs across rows
            if (block_.lane % kSpan == 0 && column < batch.cols && block_.index(0) < batch.count) {
                const u32 n = column / mx::kBlock;
                if (p.shuffled) {
                    p.scale.template row<u8>(0)[mx::shuffled_index(row, n, p.blocks)] = u8(code);
                } else {
                    p.scale.template row<u8>(row)[hk::i64(n) * p.scale.strides[3]] = u8(code);
                }
            }
        }
        const RowBatch bytes = {batch.first, batch.count, batch.column / 2, batch.cols / 2};
        q.store(bytes.template at<u8, Block::kPath, Block::kSingleRow>(p.q, block_.index(0)));
    }

    /// Pads shuffled scales.
    HK_FN void end(const P &p) const {
        if (!p.q.present() || !p.shuffled) return;
        mx::write_padding(p.scale.template row<u8>(0), p.head.x.rows(), p.blocks,
                          u64(hk::block_x()) * Block::kThreads + hk::thread_x(), u64(hk::grid_x()) * Block::kThreads);
    }
};

}  // namespace
