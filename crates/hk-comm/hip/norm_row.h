// norm_row.h: what follows the sum over ranks of a row: residual add, RMS norm, quantization
//   z = a + residual, in f32; residual_out = round_T(z)
//   y = z * rsqrt(mean_c z^2 + eps) * (weight + weight_offset), of the unrounded z
//   out = round_T(y), optional; and at most one of
//   PerToken  s[m] = max_c |y| / fp8_max, 1 for zeros           q = fp8(y * (1 / s))   scale [rows]
//   Groups    s[m, j] = max(max |y|, 1e-10) / fp8_max of group j of 8, 16, .. 512 columns   scale [rows, groups]
//   Mxfp4     s = 2^(b - 127), b of hk::BlockRule of a block of 32 columns; q = fp4(y / s)   scale [rows, blocks] e8m0
// Rules and conversions are those of hk/quant.h, as in hk-quant: for the same y the same bytes. Maxima of fp8 are over finite values.
//   x, residual, residual_out, out  [rows, cols]  T = bf16 | f16   contiguous, on 16 bytes, rows of whole 16-byte packets
//   weight [cols] T;  q [rows, cols] fp8 of the target, or [rows, cols / 2] bytes of two fp4;  scale: any strides
// A block holds a row: thread t has packets t, t + kThreads, .., at most kHeld of them, so the lanes of a group are neighbours in a wave.
#pragma once

#include <hk/entry.h>
#include <hk/norm.h>
#include <hk/quant.h>

#include "peers.h"

namespace peers {

enum class Quantized : u32 { None = 0, PerToken = 1, Groups = 2, Mxfp4 = 3 };

/// Parameters of the kernels that normalize rows.
struct NormParams {
    Comm comm;
    u64 x;
    u64 x_row;  // packets between rows of x
    u64 x_part;  // packets between the parts of x, of which each rank gets one: reduce-scatter only
    u64 residual, weight, residual_out;  // residual_out may be residual
    u64 out;  // 0: none; may be x
    u64 q, scale;
    hk::i64 scale_row, scale_group;  // strides in elements
    Quantized quantized;
    u32 group_shift;  // log2 of the lanes of a group
    hk::BlockRule rule;  // of the scales of Mxfp4
    hk::RmsScalars norm;
    u32 rows;
    u32 packets;  // 16-byte packets of a row
    u32 unused;
};

inline constexpr int kHeld = 4;
using Reducer = hk::GroupReducer<kThreads, kThreads>;

/// The packets of a row that a thread holds, in f32; zeros past the row.
template <class T>
using HeldRow = Vec<float, hk::kVecLen<T>>[kHeld];

/// Calls f(held, column) for the thread's packets of a row.
template <class F>
HK_FN void for_held(u32 packets, F f) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
        const u32 column = u32(k) * kThreads + hk::thread_x();
        if (column < packets) f(k, column);
    }
}

/// Calls f(held, column) while any thread of the block has a packet: lanes exchange values in it.
template <class F>
HK_FN void for_held_by_block(u32 packets, F f) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
        if (u32(k) * kThreads < packets) f(k, u32(k) * kThreads + hk::thread_x());
    }
}

/// The largest over each aligned group of `lanes` lanes, a power of two within the wave and the same for all. All lanes take part.
template <u32 kLanes = 1>
HK_FN u32 max_over_lanes(u32 top, u32 lanes) {
    if constexpr (kLanes < hk::kWaveSize) {
        if (lanes > kLanes) {
            // Groups of kLanes lanes agree: the mirrored lane does as well as the one that differs in a bit, at less cost.
            top = hk::MaxBits{}(top, hk::shuffle_xor<2 * kLanes - 1>(top));
            top = max_over_lanes<2 * kLanes>(top, lanes);
        }
    }
    return top;
}

template <class T>
HK_FN void quantize_row(const NormParams &params, u32 row, Reducer &reducer, const HeldRow<T> &y) {
    const NormParams &p = hk::reload_params(params);
    constexpr int kLen = hk::kVecLen<T>;
    constexpr auto kFp8 = hk::kFp8IsFnuz ? hk::QuantType::Fp8Fnuz : hk::QuantType::Fp8;
    constexpr float kMax = hk::kQuantMax<kFp8>;
    const u64 first = u64(row) * p.packets;
    const auto fp8 = reinterpret_cast<GlobalPtr<Vec<u32, kLen / 4>>>(p.q) + first;
    const auto scale_at = [&](u32 group) { return hk::i64(row) * p.scale_row + hk::i64(group) * p.scale_group; };

    if (p.quantized == Quantized::PerToken) {
        hk::FiniteMax max;
#pragma unroll
        for (int k = 0; k < kHeld; ++k) max.add(y[k]);
        const float scale = hk::linear_scale(hk::FiniteMax::value(reducer.reduce(max.top, hk::MaxBits{})), kMax);
        if (hk::thread_x() == 0) reinterpret_cast<GlobalPtr<float>>(p.scale)[scale_at(0)] = scale;
        const float inverse = 1.0f / scale;
        for_held(p.packets, [&](int k, u32 column) { fp8[column] = hk::quantize_packed<kFp8, kLen>(y[k] * inverse); });
    } else if (p.quantized == Quantized::Groups) {
        const u32 lanes = 1u << p.group_shift;
        for_held_by_block(p.packets, [&](int k, u32 column) {
            hk::FiniteMax max;
            max.add(y[k]);
            const u32 top = max_over_lanes(max.top, lanes);
            if (column >= p.packets) return;
            const float scale = hk::group_scale(hk::FiniteMax::value(top), kMax);
            if (column % lanes == 0)
                reinterpret_cast<GlobalPtr<float>>(p.scale)[scale_at(column >> p.group_shift)] = scale;
            fp8[column] = hk::quantize_packed<kFp8, kLen>(y[k] * (1.0f / scale));
        });
    } else {
        constexpr u32 kLanes = 32 / kLen;
        const auto fp4 = reinterpret_cast<GlobalPtr<u32>>(p.q) + first;
        for_held_by_block(p.packets, [&](int k, u32 column) {
            hk::AbsMax max;
            max.add(y[k]);
            const u32 code = p.rule.code(hk::group_reduce<kLanes>(max.bits, hk::MaxBits{}));
            if (column >= p.packets) return;
            if (column % kLanes == 0) reinterpret_cast<GlobalPtr<u8>>(p.scale)[scale_at(column / kLanes)] = u8(code);
            fp4[column] = code == 255u ? 0u : hk::quantize_fp4<false>(y[k] * hk::e8m0_inverse(code));
        });
    }
}

/// From the sums of a row, `sum(column)` a packet of them, to the outputs.
template <class T, class Sum>
HK_FN void norm_row(const NormParams &params, u32 row, Reducer &reducer, Sum sum) {
    const NormParams &p = hk::reload_params(params);  // they would take too many SGPRs from row to row
    constexpr int kLen = hk::kVecLen<T>;
    static_assert(kLen == 8, "a lane has eight columns: one dword of fp4");
    const u64 first = u64(row) * p.packets;
    const auto residual = reinterpret_cast<GlobalPtr<const Packet>>(p.residual) + first;
    const auto residual_out = reinterpret_cast<GlobalPtr<Packet>>(p.residual_out) + first;
    const auto weight = reinterpret_cast<GlobalPtr<const Packet>>(p.weight);

    HeldRow<T> z = {};
    float squares = 0.0f;
    // All loads of a row are in flight before the first store: residual_out may be residual.
    for_held(p.packets, [&](int k, u32 column) { z[k] = widen<T>(sum(column)) + widen<T>(residual[column]); });
    for_held(p.packets, [&](int k, u32 column) {
        residual_out[column] = narrow<T>(z[k]);
#pragma unroll
        for (int i = 0; i < kLen; ++i) squares = __builtin_fmaf(z[k][i], z[k][i], squares);
    });
    const float rstd = p.norm.rstd(reducer.sum(squares));
    for_held(p.packets, [&](int k, u32 column) {
        z[k] = z[k] * rstd * (widen<T>(weight[column]) + p.norm.weight_offset);
        if (p.out) reinterpret_cast<GlobalPtr<Packet>>(p.out)[first + column] = narrow<T>(z[k]);
    });
    if (p.quantized != Quantized::None) quantize_row<T>(params, row, reducer, z);
}

}  // namespace peers
