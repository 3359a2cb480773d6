// recurrent.hip: fused_recurrent, fused_sigmoid_gating_recurrent, fused_rearrange_sigmoid_gdr: the gated delta rule, token by token
//   S = S~ + k d^T,  d = beta (v - S~^T k),  o = scale S^T q,  S~ the state with its gates; recurrent.h
//   q, k [.., Hk, K], v, o [.., Hv, V]  T = bf16 | f16 | f32  any strides of tokens and heads, unit stride on K and V
//   states [slots, Hv, K, V] | [slots, Hv, V, K]  S = f32 | bf16  slots of any stride
// One wave for the columns v of one (sequence, value head) that eight lanes have side by side: 32 of f32, 64 of bf16 with rows of v,
// 32 with rows of k.
// Floor: bytes of the states, read and written; those of q, k, v, o are 1 % for K = V = 128.
// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", eq. 10.
#include <hk/entry.h>

#include "recurrent.h"

namespace {
using Params = gdr::Recurrent;
using gdr::Layout;
}  // namespace

// Entry points, as in src/recurrent.rs: element type, that of states, their layout, largest K.
#define RECURRENT(T, S, layout, name, K) \
    HK_ENTRY(recurrent_##T##_##S##_##name##_##K, hk::kWaveSize, gdr::recurrent<hk::T, hk::S, Layout::layout, K>)
#define RECURRENT_LAYOUTS(T, S)  \
    RECURRENT(T, S, Kv, kv, 128) \
    RECURRENT(T, S, Kv, kv, 256) \
    RECURRENT(T, S, Vk, vk, 128) \
    RECURRENT(T, S, Vk, vk, 256) \
    RECURRENT(T, S, Any, scalar, 256)
RECURRENT_LAYOUTS(bf16, f32)
RECURRENT_LAYOUTS(bf16, bf16)
RECURRENT_LAYOUTS(f16, f32)
RECURRENT_LAYOUTS(f16, bf16)
RECURRENT_LAYOUTS(f32, f32)
RECURRENT(f32, bf16, Any, scalar, 256)
