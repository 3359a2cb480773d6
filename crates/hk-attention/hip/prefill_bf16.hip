// prefill_bf16.hip: attention of prompts in bf16, fresh keys in whole vectors (prefill_dense.h).
#include "prefill_dense.h"

namespace {
using attention::Params;
}

HK_PREFILL_DENSE(prefill_bf16_d64, hk::bf16, 64, 64, false)
HK_PREFILL_DENSE(prefill_bf16_d128, hk::bf16, 128, 128, false)
HK_PREFILL_DENSE(prefill_bf16_d192_128, hk::bf16, 192, 128, false)
HK_PREFILL_DENSE(prefill_bf16_d256, hk::bf16, 256, 256, false)
