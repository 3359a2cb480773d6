// prefill_fp8.hip: attention of prompts in fp8, fresh keys in whole vectors (prefill_dense.h). On sm_90 it is widened to bf16
// (prefill_general.h): ldmatrix transposes no bytes.
#include "prefill_dense.h"
#include "prefill_general.h"

namespace {
using attention::Params;
using attention::dense::Cache;

template <class T, int kDqk, int kDv, Cache, bool>
struct Widened {
    static constexpr int kThreads = attention::general::kThreads, kWavesPerSimd = 1;
    HK_FN void operator()(const Params &p) const { attention::general::prefill<hk::bf16, kDqk, kDv, false>(p); }
};

template <class T, int kDqk, int kDv, Cache kCache, bool kSmall>
using Kernel = decltype([] {
    if constexpr (hk::kRowsPerLane > 1)
        return Widened<T, kDqk, kDv, kCache, kSmall>{};
    else
        return attention::dense::Kernel<T, kDqk, kDv, kCache, kSmall>{};
}());
}  // namespace

#define PREFILL(name, ...)                              \
    HK_PREFILL_KERNEL(name, Kernel, __VA_ARGS__, false) \
    HK_PREFILL_KERNEL(name##_small, Kernel, __VA_ARGS__, true)

PREFILL(prefill_fp8_d128, hk::Fp8, 128, 128, Cache::None)
PREFILL(prefill_fp8_d256_128, hk::Fp8, 256, 128, Cache::None)
PREFILL(prefill_fp8_d256, hk::Fp8, 256, 256, Cache::None)
