// prefill_sage.hip: attention of prompts by int8 products of queries and keys, and fp8 products of probabilities and values (sage.h,
// prefill_dense.h).
#include "prefill_dense.h"

namespace {
using Params = attention::SageParams;
using attention::dense::Cache;

template <class Types, int kD, bool kSmall>
struct Kernel : attention::dense::Kernel<Types, kD, kD, Cache::None, kSmall> {
    HK_FN void operator()(const Params &p) const {
        attention::dense::Kernel<Types, kD, kD, Cache::None, kSmall>::operator()(p.all);
    }
};
}  // namespace

#define SAGE(name, ...)                                                \
    HK_PREFILL_KERNEL(prefill_sage_##name, Kernel, __VA_ARGS__, false) \
    HK_PREFILL_KERNEL(prefill_sage_##name##_small, Kernel, __VA_ARGS__, true)

SAGE(d64, attention::sage::Types, 64)
SAGE(d128, attention::sage::Types, 128)
SAGE(smooth_d64, attention::sage::SmoothTypes, 64)
SAGE(smooth_d128, attention::sage::SmoothTypes, 128)
