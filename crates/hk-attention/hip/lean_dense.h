// lean_dense.h: stream-K with the blocks of prefill_dense.h.
#pragma once

#include "lean.h"
#include "prefill_dense.h"

namespace attention {
namespace lean {

template <class T, int kDqk, int kDv, dense::Cache kCache, bool kSmall>
struct DenseKernel : dense::Kernel<T, kDqk, kDv, kCache, kSmall> {
    using S = decltype(dense::shape<T, kDqk, kDv, kSmall>());
    static constexpr int kThreads = S::kThreads;
    // Pages of 256 columns take more than 256 registers.
    static constexpr int kWavesPerSimd =
        kDv > 128 && kCache != dense::Cache::None ? 1 : dense::Kernel<T, kDqk, kDv, kCache, kSmall>::kWavesPerSimd;

    HK_FN void operator()(const Params &p) const {
        using D = dense::Dense<T, kDqk, kDv, S, kCache, Segment>;
        auto &lds = hk::block_lds<typename D::Lds>();
        each_segment<S::kWaves * dense::kDim, S::kKeys>(
            p, [&](const Params &now, const Segment &segment) HK_INLINE { D(now, segment, lds).run(); });
    }
};

}  // namespace lean
}  // namespace attention

// An entry point and the one for few queries.
#define HK_LEAN_DENSE(name, ...)                                              \
    HK_PREFILL_KERNEL(name, attention::lean::DenseKernel, __VA_ARGS__, false) \
    HK_PREFILL_KERNEL(name##_small, attention::lean::DenseKernel, __VA_ARGS__, true)
