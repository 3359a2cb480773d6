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

/// The same, loaded before it is used. Blocks that stay widen it once; in others it keeps T until then, which takes half the
/// registers.
template <Access kAccess, class RowT>
class RowVector {
    using RowF = typename RowT::template With<float>;
    struct Narrow {
        const Global *vector;
        bool is_f32;
        float absent;
        u32 column, cols;
        RowT values;
    };
    struct Wide {
        RowF values;
    };
    float add_;
    decltype([] {
        if constexpr (kBlocksStay) return Wide{};
        else return Narrow{};
    }()) held_;

public:
    /// `add` is added to each.
    HK_FN RowVector(const Global &vector, bool is_f32, float absent, u32 column, u32 cols, float add = -0.0f) : add_(add) {
        if constexpr (kBlocksStay) {
            held_.values = load_vector<kAccess, RowT>(vector, is_f32, absent, column, cols) + add;
        } else {
            held_ = {&vector, is_f32, absent, column, cols, {}};
            if (vector.present() && !is_f32) {
                held_.values = RowT::load(RowBatch{0, 1, column, cols}.at<typename RowT::Element, kAccess, true>(vector, 0));
            }
        }
    }

    HK_FN RowF get() const {
        if constexpr (kBlocksStay) {
            return held_.values;
        } else {
            const Global &vector = *held_.vector;
            if (vector.present() && !held_.is_f32) return widen(held_.values) + add_;
            return load_vector<kAccess, RowT>(vector, true, held_.absent, held_.column, held_.cols) + add_;
        }
    }
};

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

    /// The same, loaded before they are used.
    template <Access kAccess, class RowT>
    HK_FN auto row_weights(const Global &weight, u32 column, u32 cols) const {
        return RowVector<kAccess, RowT>(weight, weight_is_f32, 1.0f, column, cols, weight_offset);
    }

    /// 1 / sqrt(mean of the squares + eps)
    HK_FN float rstd(float sum_sq) const { return rsqrt(__builtin_fmaf(sum_sq, inv_cols, eps)); }
};

}  // namespace hk
