// norm.h: shared parts of normalisation kernels.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/reg.h>
#include <hk/rows.h>

namespace hk {

/// A lane's columns, from `column` on, of a weight or bias vector in f32. The vector is of T or, if `is_f32`, of f32; without one,
/// `absent` everywhere.
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

/// `load_vector` plus a constant, prefetched. On targets that save registers it stays in the rows' type until it is used; a vector
/// of another type is then loaded at its use.
template <Access kAccess, class RowT>
class PrefetchedVector {
    using T = typename RowT::Element;
    using RowF = typename RowT::template With<float>;
    using RowOne = typename RowT::OneChunk;

    const Global &vector_;
    RowBatch one_;
    float absent_, plus_;
    bool is_f32_;
    RowT narrow_;
    RowF wide_;

  public:
    static constexpr bool kNarrow = kKeepsRowsNarrow && kAccess == Access::Vectorized && sizeof(T) < sizeof(float);

    HK_FN PrefetchedVector(const Global &vector, bool is_f32, float absent, float plus, u32 column, u32 cols)
        : vector_(vector), one_{0, 1, column, cols}, absent_(absent), plus_(plus), is_f32_(is_f32) {}

    /// Issues the loads.
    HK_FN void prefetch() {
        if constexpr (!kNarrow) {
            wide_ = load_vector<kAccess, RowT>(vector_, is_f32_, absent_, one_.column, one_.cols) + plus_;
        } else if (is_narrow()) {
            narrow_ = RowT::load(one_.template at<T, kAccess, true>(vector_, 0));
        }
    }

    HK_FN bool is_narrow() const { return vector_.present() && !is_f32_; }

    /// Chunk k in f32; kIsNarrow: is_narrow() is true.
    template <bool kIsNarrow>
    HK_FN auto chunk(int k) const {
        if constexpr (!kNarrow) {
            return wide_.chunk[k];
        } else if constexpr (kIsNarrow) {
            return widen<T, RowT::kLen>(narrow_.chunk[k]) + plus_;
        } else {
            const u32 column = one_.column + u32(k * RowT::kLanes * RowT::kLen);
            return (load_vector<kAccess, RowOne>(vector_, is_f32_, absent_, column, one_.cols) + plus_).chunk[0];
        }
    }
};

/// Calls `f` with functions that give chunk k of prefetched vectors in f32.
template <class F, class... Held>
HK_FN void with_prefetched(F f, const Held &...held) {
    if constexpr ((Held::kNarrow && ...)) {
        // One branch for all vectors and their uses: else all would be live in f32 at once.
        if ((held.is_narrow() && ...)) return f([&](int k) { return held.template chunk<true>(k); }...);
    }
    f([&](int k) { return held.template chunk<false>(k); }...);
}

/// Scalars of the RMS norm; the host fills it in, crates/hk-norm/src/rms.rs.
struct RmsScalars {
    float eps;  // added to the mean, inside the root
    float inv_cols;  // 1 / cols
    float weight_offset;  // 1, or -0 which leaves every weight as it is
    u32 weight_is_f32;  // w is f32 whatever T is

    /// A lane's weights plus their offset; 1 without weights.
    template <Access kAccess, class RowT>
    HK_FN auto weights(const Global &weight, u32 column, u32 cols) const {
        return load_vector<kAccess, RowT>(weight, weight_is_f32, 1.0f, column, cols) + weight_offset;
    }

    /// The same, prefetched.
    template <Access kAccess, class RowT>
    HK_FN PrefetchedVector<kAccess, RowT> prefetch_weights(const Global &weight, u32 column, u32 cols) const {
        PrefetchedVector<kAccess, RowT> held(weight, weight_is_f32 != 0, 1.0f, weight_offset, column, cols);
        held.prefetch();
        return held;
    }

    /// 1 / sqrt(mean of the squares + eps)
    HK_FN float rstd(float sum_sq) const { return rsqrt(__builtin_fmaf(sum_sq, inv_cols, eps)); }
};

}  // namespace hk
