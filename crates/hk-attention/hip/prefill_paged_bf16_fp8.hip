// prefill_paged_bf16_fp8.hip: attention of prompts in bf16, keys in pages of fp8 and fresh ones, in whole vectors (prefill_dense.h).
#include "keys_fp8.h"
#include "prefill_dense.h"

namespace {
using attention::Params;
using attention::dense::Cache;
}  // namespace

HK_PREFILL_DENSE(prefill_paged_bf16_fp8_d64, hk::bf16, 64, 64, Cache::Fp8)
HK_PREFILL_DENSE(prefill_paged_bf16_fp8_d128, hk::bf16, 128, 128, Cache::Fp8)
HK_PREFILL_DENSE(prefill_paged_bf16_fp8_d256, hk::bf16, 256, 256, Cache::Fp8)
