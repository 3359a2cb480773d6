// backward_bf16.hip: gradients of attention in bf16; see backward.h.
#include "backward.h"

namespace {
using backward::Params;
using hk::bf16;
}  // namespace

// Entry points: columns of queries and keys, of values.
#define BACKWARD(name, ...) \
    HK_ENTRY_WAVES_PER_SIMD(backward_bf16_##name, backward::kThreads, 1, 8, backward::backward<bf16, __VA_ARGS__>)

BACKWARD(64, 64, 64)
BACKWARD(128, 128, 128)
BACKWARD(192_128, 192, 128)
BACKWARD(256, 256, 256)
