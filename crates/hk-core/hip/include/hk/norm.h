// norm.h: what kernels that normalise rows share.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/reg.h>
#include <hk/rows.h>

namespace hk {

/// A lane's columns, from `column` on, of a vector as long as the rows: weights, biases. T, or f32 whatever T is; `absent`
/// everywhere if there is none.
template <Access kAccess, class RowT>
HK_FN auto load_vector(const Global &vector, bool is_f32, float absent, u32 column, u32 cols) {
    using T = typename RowT::Element;
    using RowF = typename RowT::template With<float>;
    const RowBatch one = {0, 1, column, cols};
    RowF v;
    if (!vector.present()) {
#pragma unroll
        for (auto &chunk : v.chunk) chunk = absent;
    } else if (is_f32) {
        v = RowF::load(one.at<float, kAccess, true>(vector, 0));
    } else {
        v = widen(RowT::load(one.at<T, kAccess, true>(vector, 0)));
    }
    return v;
}

/// Scalars of the RMS norm; the same fields as `hk_core::norm::RmsScalars`.
struct RmsScalars {
    float eps;            // added to the mean, inside the root
    float inv_cols;       // 1 / cols
    float weight_offset;  // 1, or -0 which leaves every weight as it is
    u32 weight_is_f32;    // w is f32 whatever T is

    /// A lane's weights as they multiply, 1 if there are none.
    template <Access kAccess, class RowT>
    HK_FN auto weights(const Global &weight, u32 column, u32 cols) const {
        return load_vector<kAccess, RowT>(weight, weight_is_f32, 1.0f, column, cols) + weight_offset;
    }

    /// 1 / sqrt(mean of the squares + eps)
    HK_FN float rstd(float sum_sq) const { return rsqrt(__builtin_fmaf(sum_sq, inv_cols, eps)); }
};

}  // namespace hk
