// prefill_sage.hip: attention of prompts by int8 products of queries and keys, and fp8 products of probabilities and values (sage.h,
// prefill_dense.h).
#include "prefill_dense.h"

namespace {
using Params = attention::SageParams;
using attention::dense::Cache;

template <int kD, bool kSmall>
struct Kernel : attention::dense::Kernel<attention::sage::Types, kD, kD, Cache::None, kSmall> {
    HK_FN void operator()(const Params &p) const {
        attention::dense::Kernel<attention::sage::Types, kD, kD, Cache::None, kSmall>::operator()(p.all);
    }
};
}  // namespace

HK_PREFILL_KERNEL(prefill_sage_d64, Kernel, 64, false)
HK_PREFILL_KERNEL(prefill_sage_d64_small, Kernel, 64, true)
HK_PREFILL_KERNEL(prefill_sage_d128, Kernel, 128, false)
HK_PREFILL_KERNEL(prefill_sage_d128_small, Kernel, 128, true)
