// prefill_paged_bf16.hip: attention of prompts in bf16, keys in pages and fresh ones, in whole vectors (prefill_dense.h).
#include "prefill_dense.h"

namespace {
using attention::Params;
using attention::dense::Cache;
}  // namespace

HK_PREFILL_DENSE(prefill_paged_bf16_d64, hk::bf16, 64, 64, Cache::Own)
HK_PREFILL_DENSE(prefill_paged_bf16_d128, hk::bf16, 128, 128, Cache::Own)
HK_PREFILL_DENSE(prefill_paged_bf16_d192_128, hk::bf16, 192, 128, Cache::Own)
HK_PREFILL_DENSE(prefill_paged_bf16_d256, hk::bf16, 256, 256, Cache::Own)
