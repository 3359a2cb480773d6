// backward_hstu.hip: gradients of hstu_attn; see backward.h.
#include "backward.h"

namespace {
using backward::Params;
}  // namespace

// Entry points: type, columns.
#define BACKWARD(type, columns)                                                         \
    HK_ENTRY_WAVES_PER_SIMD(backward_hstu_##type##_##columns, backward::kThreads, 1, 8, \
                            backward::backward<hk::type, columns, columns, true>)
#define BACKWARD_TYPE(type) \
    BACKWARD(type, 64)      \
    BACKWARD(type, 128)     \
    BACKWARD(type, 256)

BACKWARD_TYPE(bf16)
BACKWARD_TYPE(f16)
BACKWARD_TYPE(f32)
