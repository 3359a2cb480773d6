// backward_f32.hip: gradients of attention in f32; see backward.h.
#include "backward.h"

namespace {
using backward::Params;
}  // namespace

// Entry points: columns of queries and keys, of values.
#define BACKWARD(name, ...) \
    HK_ENTRY_WAVES_PER_SIMD(backward_f32_##name, backward::kThreads, 1, 8, backward::backward<float, __VA_ARGS__>)

BACKWARD(64, 64, 64)
BACKWARD(128, 128, 128)
BACKWARD(256, 256, 256)
