// lean_paged_bf16.hip: stream-K attention in bf16 of few queries, keys in pages, rows in whole vectors (lean.h, prefill_dense.h).
#include "lean_dense.h"

namespace {
using attention::Params;
using attention::dense::Cache;
}  // namespace

#define LEAN(name, columns, small) \
    HK_PREFILL_KERNEL(name, attention::lean::DenseKernel, hk::bf16, columns, columns, Cache::Own, small)

LEAN(lean_paged_bf16_d64_small, 64, true)
LEAN(lean_paged_bf16_d128_small, 128, true)
LEAN(lean_paged_bf16_d256, 256, false)
