// backward_fused_f32.hip: gradients of attention in f32, of five products; see backward.h.
#include "backward.h"

namespace {
using backward::Params;
}  // namespace

// Entry points: columns of queries and keys, of values.
#define FUSED(name, ...)                                                         \
    HK_ENTRY_WAVES_PER_SIMD(backward_fused_f32_##name, backward::kThreads, 1, 8, \
                            backward::backward_fused<float, __VA_ARGS__>)

FUSED(64, 64, 64)
FUSED(128, 128, 128)
FUSED(256, 256, 256)

// Rows of a tile of queries.
HK_ENTRY(backward_dq_f32_32, backward::kThreads, backward::round_queries<float, 32>)
HK_ENTRY(backward_dq_f32_16, backward::kThreads, backward::round_queries<float, 16>)
