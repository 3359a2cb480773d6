// backward_f16.hip: gradients of attention in f16; see backward.h.
#include "backward.h"

namespace {
using backward::Params;
using hk::f16;
}  // namespace

// Entry points: columns of queries and keys, of values.
#define BACKWARD(name, ...) \
    HK_ENTRY_WAVES_PER_SIMD(backward_f16_##name, backward::kThreads, 1, 8, backward::backward<f16, __VA_ARGS__>)

BACKWARD(64, 64, 64)
BACKWARD(128, 128, 128)
BACKWARD(192_128, 192, 128)
BACKWARD(256, 256, 256)
