// prefill_paged_f16.hip: attention of prompts in f16, keys in pages and fresh ones, in whole vectors (prefill_dense.h).
#include "prefill_dense.h"

namespace {
using attention::Params;
using attention::dense::Cache;
}  // namespace

HK_PREFILL_DENSE(prefill_paged_f16_d64, hk::f16, 64, 64, Cache::Own)
HK_PREFILL_DENSE(prefill_paged_f16_d128, hk::f16, 128, 128, Cache::Own)
HK_PREFILL_DENSE(prefill_paged_f16_d192_128, hk::f16, 192, 128, Cache::Own)
HK_PREFILL_DENSE(prefill_paged_f16_d256, hk::f16, 256, 256, Cache::Own)
