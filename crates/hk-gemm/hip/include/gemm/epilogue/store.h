// store.h: loads and stores of epilogues, and the scales and activation that all outputs share.
#pragma once

#include <gemm/tile_coord.h>

#include <hk/activate.h>
#include <hk/global.h>

namespace gemm {
/// Output columns that a lane stores at a time.
inline constexpr int kVecCols = 8;

/// N values of dtype `type` from element `at` on; past `left` they are zero. `vectors`: 16-byte aligned.
template <int N>
HK_FN Vec<float, N> load_floats(u64 data, Float type, i64 at, u32 left, bool vectors = false) {
    Vec<float, N> v = 0.0f;
    const auto fill = [&]<class T>(T) {
        const auto from = reinterpret_cast<GlobalPtr<const T>>(data) + at;
        if (vectors && left >= N) {
            constexpr int kVecCols = N < hk::kVecLen<T> ? N : hk::kVecLen<T>;
#pragma unroll
            for (int i = 0; i < N; i += kVecCols) {
                const auto part = *reinterpret_cast<GlobalPtr<const Vec<T, kVecCols>>>(from + i);
#pragma unroll
                for (int j = 0; j < kVecCols; ++j) v[i + j] = float(part[j]);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < N; ++i) {
                if (i < left) v[i] = float(from[i]);
            }
        }
    };
    if (type == Float::Bf16)
        fill(hk::bf16{});
    else if (type == Float::F16)
        fill(hk::f16{});
    else
        fill(0.0f);
    return v;
}

template <class T, int N>
HK_FN void store_floats(u64 data, i64 at, Vec<float, N> v, u32 left, bool vectors) {
    const Vec<T, N> y = hk::narrow<T, N>(v);
    const auto to = reinterpret_cast<GlobalPtr<T>>(data) + at;
    if (vectors && left >= N) {
        constexpr int kVecCols = N < hk::kVecLen<T> ? N : hk::kVecLen<T>;
#pragma unroll
        for (int i = 0; i < N; i += kVecCols) {
            Vec<T, kVecCols> part;
#pragma unroll
            for (int j = 0; j < kVecCols; ++j) part[j] = y[i + j];
            *reinterpret_cast<GlobalPtr<Vec<T, kVecCols>>>(to + i) = part;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < left) to[i] = y[i];
        }
    }
}

/// Calls `f` with a value of the dtype.
template <class F>
HK_FN void with_type(Float type, F f) {
    if (type == Float::Bf16)
        f(hk::bf16{});
    else if (type == Float::F16)
        f(hk::f16{});
    else
        f(0.0f);
}

/// Applies an activation in f32; kNone: identity.
template <int N>
HK_FN Vec<float, N> activate(u32 which, Vec<float, N> v) {
    if (which == Epilogue::kNone) return v;
    if (which == Epilogue::kRelu6) {
        v = hk::relu(v);
        return v > 6.0f ? Vec<float, N>(6.0f) : v;
    }
    hk::with_activation(hk::Activation(which), [&](auto f) { v = f(v); });
    return v;
}

/// Stores outputs or partial sums as `e.store` says.
template <int N>
HK_FN void store_output(const Epilogue &e, const TileCoord &coord, u32 m, u32 n, Vec<float, N> y) {
    const u32 left = e.cols - n;
    const i64 at = i64(coord.batch) * e.y_batch + i64(m) * e.y_row + n;
    if (e.store == StoreMode::Partial) {
        store_floats<float, N>(e.y, at + i64(coord.split) * e.y_split, y, left, e.vectors);
    } else if (e.store == StoreMode::Add) {
        const auto to = reinterpret_cast<GlobalPtr<float>>(e.y) + at;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < left) hk::atomic_add(to + i, y[i]);
        }
    } else {
        with_type(e.y_type, [&]<class T>(T) { store_floats<T, N>(e.y, at, y, left, e.vectors); });
    }
}

/// Applies the scales of row m of a and columns n .. n + N of w.
template <int N>
HK_FN Vec<float, N> apply_scales(const Epilogue &e, const TileCoord &coord, u32 m, u32 n, Vec<float, N> sum) {
    if (!(e.a_scale | e.w_scale)) return sum;
    Vec<float, N> scale = 1.0f;
    if (e.w_scale) {
        const i64 at = i64(coord.matrix) * e.w_scale_batch;
        if (e.w_scale_step) {
            scale = load_floats<N>(e.w_scale, Float::F32, at + n, e.cols - n);
        } else {
            scale = reinterpret_cast<GlobalPtr<const float>>(e.w_scale)[at];
        }
    }
    if (e.a_scale) {
        const auto a_scale = reinterpret_cast<GlobalPtr<const float>>(e.a_scale) + i64(coord.batch) * e.a_scale_batch;
        scale *= a_scale[i64(m) * e.a_scale_step];
    }
    return sum * scale;
}

/// Multiplies accumulators whose operands were prescaled.
template <int kM, int kN>
HK_FN void scale_acc(hk::MmaAcc (&acc)[kM][kN], float unit) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) acc[m][n] *= unit;
    }
}

}  // namespace gemm
