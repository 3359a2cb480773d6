// backward_fused_f16.hip: gradients of attention in f16, of five products; see backward.h.
#include "backward.h"

namespace {
using backward::Params;
using hk::f16;
}  // namespace

// Entry points: columns of queries and keys, of values.
#define FUSED(name, ...)                                                         \
    HK_ENTRY_WAVES_PER_SIMD(backward_fused_f16_##name, backward::kThreads, 1, 8, \
                            backward::backward_fused<f16, __VA_ARGS__>)

FUSED(64, 64, 64)
FUSED(128, 128, 128)
FUSED(192_128, 192, 128)
FUSED(256, 256, 256)

// Rows of a tile of queries.
HK_ENTRY(backward_dq_f16_64, backward::kThreads, backward::round_queries<f16, 64>)
HK_ENTRY(backward_dq_f16_32, backward::kThreads, backward::round_queries<f16, 32>)
