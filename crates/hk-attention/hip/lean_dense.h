// lean_dense.h: stream-K with the blocks of prefill_dense.h.
#pragma once

#include "lean.h"
#include "prefill_dense.h"

namespace attention {
namespace lean {

template <class T, int kDqk, int kDv, bool kSmall>
struct DenseKernel : dense::Kernel<T, kDqk, kDv, kSmall> {
    HK_FN void operator()(const Params &p) const {
        using S = decltype(dense::shape<kDqk, kDv, kSmall>());
        using D = dense::Dense<T, kDqk, kDv, S, Segment>;
        auto &lds = hk::block_lds<typename D::Lds>();
        each_segment<S::kWaves * dense::kDim, S::kKeys>(
            p, [&](const Params &now, const Segment &segment) HK_INLINE { D(now, segment, lds).run(); });
    }
};

}  // namespace lean
}  // namespace attention

// An entry point and the one for few queries.
#define HK_LEAN_DENSE(name, T, dqk, dv)        \
    HK_LEAN_DENSE_ONE(name, T, dqk, dv, false) \
    HK_LEAN_DENSE_ONE(name##_small, T, dqk, dv, true)
#define HK_LEAN_DENSE_ONE(name, T, dqk, dv, small)                                                       \
    HK_ENTRY_WAVES_PER_SIMD(name, (attention::lean::DenseKernel<T, dqk, dv, small>::kThreads),           \
                            (attention::lean::DenseKernel<T, dqk, dv, small>::kWavesPerSimd),            \
                            (attention::lean::DenseKernel<T, dqk, dv, small>::kThreads / hk::kWaveSize), \
                            attention::lean::DenseKernel<T, dqk, dv, small>{})
