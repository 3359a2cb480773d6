// lean_f16.hip: stream-K attention in f16, rows in whole vectors (lean.h, prefill_dense.h).
#include "lean_dense.h"

namespace {
using attention::Params;
using attention::dense::Cache;
}  // namespace

HK_LEAN_DENSE(lean_f16_d64, hk::f16, 64, 64, Cache::None)
HK_LEAN_DENSE(lean_f16_d128, hk::f16, 128, 128, Cache::None)
HK_LEAN_DENSE(lean_f16_d192_128, hk::f16, 192, 128, Cache::None)
HK_PREFILL_KERNEL(lean_f16_d256, attention::lean::DenseKernel, hk::f16, 256, 256, Cache::None, false)
