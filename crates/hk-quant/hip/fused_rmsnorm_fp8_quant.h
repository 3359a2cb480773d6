// fused_rmsnorm_fp8_quant.h: the RMS norm of a row, quantized to int8 or fp8
//   z = y, per token y * smooth[c] if there is one; y, its inputs and other outputs: norm_rows.h
//   tensor  s = scale[0], given
//   token   s[r] = max_c |z[r, c]| / qmax, 1 for zeros
//   group   s[r, j] = max(max |z[r, c]|, 1e-10) / qmax over c / g = j; with `pow2` the least power of two that is not below
//   q[r, c] = code(z[r, c] * (1 / s))             maxima over finite values; qmax = 127 | 240 | 448
//   q      [rows, cols]   i8 | fp8 e4m3 | fp8 e4m3 FNUZ   unit stride on cols, rows any stride; absent: only `out` is written
//   scale  [1] | [rows] | [rows, ceil(cols / g)]   f32    any strides with groups; g = 32 | 64 | 128
//   smooth [cols]                                  f32    optional, contiguous
// Floor
//   Memory: rows * cols * (sizeof(T) + 1), with a residual 2 * sizeof(T) more, with `out` sizeof(T) more; and scales.
//   VALU instructions per wave for 8 bf16: 8 to widen, 4 for the sum, 4 + 4 to scale, 16 for the maximum, 4 to divide and
//   28 to clamp and convert: about 70, within the 163 clocks (rms_rows.h of hk-norm) that their 1.5 KiB take.
#pragma once

#include "norm_rows.h"

namespace norm_quant {

struct Fp8Params {
    NormParams head;
    hk::Global smooth, q, scale;
    hk::QuantFormat format;
    hk::BlockRule rule;  // of scales that are powers of two
    u32 mode;
    u32 group;  // columns of a group, a power of two
    u32 pow2;  // 1: scales are powers of two
};

}  // namespace norm_quant

namespace {

using namespace norm_quant;

enum class Mode : u32 { Tensor = 0, Token = 1, Group = 2 };

using Params = Fp8Params;

template <class Block, class P>
class Quantizer {
    using RowF = typename Block::RowF;
    using RowT = typename Block::RowT;
    static constexpr int kLen = hk::kVecLen<typename RowT::Element>;
    static constexpr int kChunks = sizeof(RowF) / sizeof(hk::Vec<float, kLen>);
    static constexpr int kLanes = RowF::kCols / (kLen * kChunks);

    const Block &block_;
    hk::GroupReducer<Block::kThreads, kLanes> reducer_;
    u32 top_ = hk::FiniteMax::kZero;  // running maximum of the row
    float inverse_ = 1.0f;  // 1 / scale of the row or the tensor

    HK_FN static bool is(const P &p, Mode mode) { return p.mode == u32(mode); }

    /// y times the smoothing factors, if there are any.
    HK_FN RowF smoothed(const P &p, const RowF &y, const RowBatch &batch) const {
        if (!p.smooth.present()) return y;
        return y * hk::load_vector<Block::kPath, RowT>(p.smooth, true, 1.0f, batch.column, batch.cols);
    }

    /// Reduces the maxima of a lane's chunks to those of their groups of kGroup columns.
    template <int kGroup>
    HK_FN static void share(u32 (&top)[kChunks]) {
        constexpr int kSpan = kGroup / kLen < kLanes ? kGroup / kLen : kLanes;  // lanes per group,
        constexpr int kWhole = kGroup / (kLen * kSpan);  // chunks per lane and group;
        constexpr int kPer = kWhole < kChunks ? kWhole : kChunks;  // a short row is one group
        static_assert(kChunks % kPer == 0, "whole groups");
#pragma unroll
        for (int k = 0; k < kChunks; k += kPer) {
            u32 most = top[k];
#pragma unroll
            for (int i = 1; i < kPer; ++i) most = hk::MaxBits{}(most, top[k + i]);
            most = hk::group_reduce<kSpan>(most, hk::MaxBits{});
#pragma unroll
            for (int i = 0; i < kPer; ++i) top[k + i] = most;
        }
    }

    /// Stores the scales of groups; gives 1 / scale of each of the lane's chunks.
    HK_FN void group_scales(const P &p, float (&inverse)[kChunks], const RowF &y, const RowBatch &batch) const {
        u32 top[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            hk::FiniteMax max;
            max.add(y.chunk[k]);
            top[k] = max.top;
        }
        if (p.group == 32) {
            share<32>(top);
        } else if (p.group == 64) {
            share<64>(top);
        } else {
            share<128>(top);
        }
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const float amax = hk::FiniteMax::value(top[k]);
            float scale = hk::group_scale(amax, p.format.qmax);
            if (p.pow2) {
                scale = hk::e8m0_value(p.rule.code(hk::detail::bits_of(__builtin_fmaxf(amax, 1e-10f))));
            }
            inverse[k] = 1.0f / scale;
            u32 column = batch.column + u32(k * kLanes * kLen);
            hk::opaque(column);  // keeps the compiler from holding its compare masks in SGPRs across rows
            if ((column & (p.group - 1)) == 0 && column < batch.cols && block_.index(0) < batch.count) {
                const u32 j = column >> __builtin_ctz(p.group);
                p.scale.template row<float>(batch.first + block_.index(0))[hk::i64(j) * p.scale.strides[3]] = scale;
            }
        }
    }

  public:
    HK_FN Quantizer(const P &p, const Block &block) : block_(block) {
        // A static scale; absent where only `out` is written.
        if (p.q.present() && is(p, Mode::Tensor)) inverse_ = 1.0f / *p.scale.template row<float>(0);
    }

    /// Whether a row is reduced before its first element is quantized.
    HK_FN bool observes_rows(const P &p) const { return p.q.present() && is(p, Mode::Token); }

    HK_FN void observe(const P &p, const RowF &y, const RowBatch &batch) {
        if (!is(p, Mode::Token)) return;
        const RowF z = smoothed(p, y, batch);
        hk::FiniteMax max;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) max.add(z.chunk[k]);
        top_ = hk::MaxBits{}(top_, max.top);
    }

    HK_FN void settle(const P &p, const RowBatch &batch) {
        if (!is(p, Mode::Token)) return;
        const float amax = hk::FiniteMax::value(reducer_.reduce(top_, hk::MaxBits{}));
        top_ = hk::FiniteMax::kZero;
        const float scale[1] = {hk::linear_scale(amax, p.format.qmax)};
        inverse_ = 1.0f / scale[0];
        block_.store_per_row(scale, p.scale, batch);
    }

    HK_FN void write(const P &p, const RowF &y, const RowBatch &batch) {
        RowF z = smoothed(p, y, batch);
        float inverse[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) inverse[k] = inverse_;
        if (is(p, Mode::Group)) group_scales(p, inverse, z, batch);
        p.format.with_type([&](auto kind) {
            using Bytes = hk::Vec<u8, kLen>;
            typename RowF::template With<u8> q;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                q.chunk[k] = __builtin_bit_cast(
                    Bytes, hk::quantize_packed<decltype(kind)::value, kLen>(z.chunk[k] * inverse[k]));
            }
            q.store(batch.at<u8, Block::kPath, Block::kSingleRow>(p.q, block_.index(0)));
        });
    }

    HK_FN void end(const P &) const {}
};

}  // namespace
