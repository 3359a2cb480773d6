// prefill_f16.hip: attention of prompts in f16, fresh keys in whole vectors (prefill_dense.h).
#include "prefill_dense.h"

namespace {
using attention::Params;
using attention::dense::Cache;
}  // namespace

HK_PREFILL_DENSE(prefill_f16_d64, hk::f16, 64, 64, Cache::None)
HK_PREFILL_DENSE(prefill_f16_d128, hk::f16, 128, 128, Cache::None)
HK_PREFILL_DENSE(prefill_f16_d192_128, hk::f16, 192, 128, Cache::None)
HK_PREFILL_DENSE(prefill_f16_d256, hk::f16, 256, 256, Cache::None)
