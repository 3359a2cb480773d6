// hstu.hip: out[i] = sum over j of mask[i, j] silu(scale q[i] . k[j]) / longest v[j]; see prefill_general.h.
// Source: Zhai et al. 2024, "Actions Speak Louder than Words" (HSTU), equation 2.
#include "prefill_general.h"

namespace {
using attention::Params;
}  // namespace

// Entry points: type, columns.
#define HSTU(type, columns)                                                              \
    HK_ENTRY_WAVES_PER_SIMD(hstu_##type##_##columns, attention::general::kThreads, 1, 8, \
                            attention::general::prefill<hk::type, columns, columns, true>)
#define HSTU_TYPE(type) \
    HSTU(type, 64)      \
    HSTU(type, 128)     \
    HSTU(type, 256)

HSTU_TYPE(bf16)
HSTU_TYPE(f16)
HSTU_TYPE(f32)
