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

/// What `load_vector` gives, plus a number, asked for before it is used: on targets that save registers it waits in the
/// rows' type till then, and where it is not of that type it is read when it is used.
template <Access kAccess, class RowT>
class HeldVector {
    using T = typename RowT::Element;
    using RowF = typename RowT::template With<float>;
    using RowOne = typename RowT::OneChunk;

    const Global &vector_;
    RowBatch one_;
    float absent_, plus_;
    bool is_f32_;
    RowT raw_;
    RowF wide_;

public:
    static constexpr bool kRaw = kWidensAgain && kAccess == Access::Vectors && sizeof(T) < sizeof(float);

    HK_FN HeldVector(const Global &vector, bool is_f32, float absent, float plus, u32 column, u32 cols)
        : vector_(vector), one_{0, 1, column, cols}, absent_(absent), plus_(plus), is_f32_(is_f32) {}

    /// Asks for it.
    HK_FN void begin() {
        if constexpr (!kRaw) {
            wide_ = load_vector<kAccess, RowT>(vector_, is_f32_, absent_, one_.column, one_.cols) + plus_;
        } else if (is_raw()) {
            raw_ = RowT::load(one_.template at<T, kAccess, true>(vector_, 0));
        }
    }

    HK_FN bool is_raw() const { return vector_.present() && !is_f32_; }

    /// Chunk k in f32; kIsRaw: is_raw() is true.
    template <bool kIsRaw>
    HK_FN auto chunk(int k) const {
        if constexpr (!kRaw) {
            return wide_.chunk[k];
        } else if constexpr (kIsRaw) {
            return widen<T, RowT::kLen>(raw_.chunk[k]) + plus_;
        } else {
            const u32 column = one_.column + u32(k * RowT::kLanes * RowT::kLen);
            return (load_vector<kAccess, RowOne>(vector_, is_f32_, absent_, column, one_.cols) + plus_).chunk[0];
        }
    }
};

/// Calls `f` with functions that give chunk k of held vectors in f32.
template <class F, class... Held>
HK_FN void with_vectors(F f, const Held &...held) {
    if constexpr ((Held::kRaw && ...)) {
        // One branch for all of them and what is made of them: else all would be in f32 at a time.
        if ((held.is_raw() && ...)) return f([&](int k) { return held.template chunk<true>(k); }...);
    }
    f([&](int k) { return held.template chunk<false>(k); }...);
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

    /// The same, asked for before they are used.
    template <Access kAccess, class RowT>
    HK_FN HeldVector<kAccess, RowT> held_weights(const Global &weight, u32 column, u32 cols) const {
        HeldVector<kAccess, RowT> held(weight, weight_is_f32 != 0, 1.0f, weight_offset, column, cols);
        held.begin();
        return held;
    }

    /// 1 / sqrt(mean of the squares + eps)
    HK_FN float rstd(float sum_sq) const { return rsqrt(__builtin_fmaf(sum_sq, inv_cols, eps)); }
};

}  // namespace hk
