// prefill_general_f16.hip: attention of prompts with every option; see prefill_general.h.
#include "prefill_general.h"

namespace {
using attention::Params;
using hk::f16;
}  // namespace

// Entry points: columns of queries and keys, of values.
#define PREFILL(name, ...)                                                                  \
    HK_ENTRY_WAVES_PER_SIMD(prefill_general_f16_##name, attention::general::kThreads, 1, 8, \
                            attention::general::prefill<f16, __VA_ARGS__, false>)

PREFILL(64, 64, 64)
PREFILL(128, 128, 128)
PREFILL(192_128, 192, 128)
PREFILL(256, 256, 256)
PREFILL(320_256, 320, 256)
PREFILL(512, 512, 512)
PREFILL(576_512, 576, 512)
