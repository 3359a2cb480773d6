// sage.h: quantized operands of SageAttention, in prefill_dense.h: int8 queries and keys with a factor for each block of rows, fp8 values
// with one for each column.
//
//   s[i, j] = q_scale[block of i] k_scale[block of j] (q[i] . k[j]) + q_shift[block of i, j]   in units of log2
//   out[i, c] = v_scale[c] sum of p[i, j] v[j, c]
//
// The scale of scores and log2(e) are in q_scale and q_shift.
// Source: Zhang et al. 2024, "SageAttention", sections 4.2 and 4.3.
#pragma once

#include "problem.h"

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/matrix.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace attention {

/// All tensors are contiguous f32.
struct SageParams {
    Params all;  // first: reloaded from where the parameters begin
    u64 q_scale;  // [batch, heads, q_blocks]
    u64 k_scale;  // [batch, key heads, k_blocks]
    u64 v_scale;  // [batch, key heads, v_columns]
    u64 lse_shift;  // [batch, heads, queries], added to LSE; 0: none
    u64 q_shift;  // of sage::SmoothTypes: [batch, heads, q_blocks, k_blocks * kKeysOfBlock]
    u32 q_blocks, k_blocks, v_columns;
    u32 pad;
};

/// A float of row `row` of `columns`.
HK_FN u64 float_at(u64 data, u32 row, u32 columns, u32 column) { return data + (u64(row) * columns + column) * 4; }

namespace sage {

inline constexpr u32 kQueriesOfBlock = 256, kKeysOfBlock = 128;

/// Element type of a kernel whose operands are these.
struct Types {
    using Key = hk::I8;
    /// Of P, too. Where bytes are not transposed, fp8 is widened.
    using Value = decltype([] {
        if constexpr (hk::kRowsPerLane == 1)
            return hk::Fp8{};
        else
            return hk::bf16{};
    }());
};

/// Those of queries less the mean of their block: q_shift is added to scores.
struct SmoothTypes : Types {};

/// Parameters of a kernel that gets `all` of them.
HK_FN const SageParams &params_of(const Params &all) { return reinterpret_cast<const SageParams &>(all); }

/// Factors of a head's blocks of keys. A lane has one.
class KeyScales {
    u64 first_;
    u32 blocks_, begin_;
    float of_lane_;

    HK_FN void load(u32 block) {
        begin_ = block;
        const u32 mine = block + hk::lane_id(), last = blocks_ - 1;
        of_lane_ = reinterpret_cast<GlobalPtr<const float>>(first_)[mine < last ? mine : last];
        // Waited for here, not by each tile.
        hk::opaque(of_lane_);
    }

  public:
    HK_FN KeyScales() : first_(0), blocks_(0), begin_(0), of_lane_(0.0f) {}
    /// From the block of key `key` on.
    HK_FN KeyScales(const SageParams &p, u32 row, u32 key)
        : first_(float_at(p.k_scale, row, p.k_blocks, 0)), blocks_(p.k_blocks) {
        load(key / kKeysOfBlock);
    }
    /// Keys of calls rise.
    HK_FN float of(u32 key) {
        const u32 block = key / kKeysOfBlock;
        if (block - begin_ >= u32(hk::kWaveSize)) load(block);
        return hk::broadcast(of_lane_, block - begin_);
    }
};

}  // namespace sage
}  // namespace attention
