// epilogue.h: from sums to outputs: scales, bias, activation, one rounding.
#pragma once

#include <hk/activate.h>
#include <hk/arch.h>
#include <hk/global.h>
#include <hk/pipeline.h>
#include <hk/types.h>

#include "problem.h"

namespace gemm {
using hk::Vec;

/// Types of outputs and biases; same values as `float_index` in hk_core.
enum class Float : u32 { Bf16 = 0, F16 = 1, F32 = 2 };

/// What becomes of a sum.
enum class Store : u32 {
    Round = 0,   ///< scales, bias, activation, one rounding to the type of y
    Plane = 1,   ///< scales, then f32 to the plane of the split
    Add = 2,     ///< added to f32 in memory, by one operation among all blocks
};

/// Same layout as `Epilogue` in src/problem.rs.
struct Epilogue {
    u64 y;
    i64 y_batch, y_row, y_split;  // strides, in elements
    u64 bias;                     // [batch, N]; 0: none
    i64 bias_batch;
    u64 x_scale, w_scale;         // f32 [batch, M], [batch, N]; 0: none
    i64 x_scale_batch, w_scale_batch;
    u32 x_scale_step, w_scale_step;  // 0: one for all
    u32 rows, cols;                  // M, N
    Float y_type, bias_type;
    Store store;
    u32 activation;  // hk::Activation; kNone: none
    u32 vectors;     // rows of y begin on 16 bytes
    u32 pad;
    static constexpr u32 kNone = 255;
};

struct Params {  // same layout as `Params` in src/problem.rs
    Operand x, w;
    Grid grid;
    Epilogue epilogue;
};

/// Scales of an operand, f32; same layout as `BlockScale` in src/problem.rs.
struct BlockScale {
    u64 data;
    i64 batch;          // strides, in bytes
    u32 row, group;
    u32 row_shift;      // one row of scales for 2^row_shift rows of the operand
    u32 group_shift;    // one scale for 2^group_shift bytes of a row

    HK_FN GlobalPtr<const u8> first(const Work &work) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(work.batch) * batch;
    }
    /// Of the scales of a row of the operand; beyond every window if it has no such row.
    HK_FN u32 offset(u32 of_row, u32 rows) const {
        return of_row < rows ? (of_row >> row_shift) * row : hk::Window::kBeyond;
    }
    HK_FN hk::WordPlace place(const Work &work, u32 of_row, u32 rows) const {
        return {reinterpret_cast<u64>(first(work)), offset(of_row, rows), group, group_shift};
    }
};
static_assert(sizeof(BlockScale) == 32, "same layout as in Rust");

struct BlockParams {  // same layout as `BlockParams` in src/problem.rs
    Operand x, w;
    Grid grid;
    Epilogue epilogue;
    BlockScale x_scale, w_scale;
};

/// N values of a type from `at` elements on, those past `left` zero.
template <int N>
HK_FN Vec<float, N> load_floats(u64 data, Float type, i64 at, u32 left) {
    Vec<float, N> v = 0.0f;
    const auto fill = [&]<class T>(T) {
        const auto from = reinterpret_cast<GlobalPtr<const T>>(data) + at;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < left) v[i] = float(from[i]);
        }
    };
    if (type == Float::Bf16) fill(hk::bf16{});
    else if (type == Float::F16) fill(hk::f16{});
    else fill(0.0f);
    return v;
}

template <class T, int N>
HK_FN void store_floats(u64 data, i64 at, Vec<float, N> v, u32 left, bool vectors) {
    const Vec<T, N> y = hk::narrow<T, N>(v);
    const auto to = reinterpret_cast<GlobalPtr<T>>(data) + at;
    if (vectors && left >= N) {
        constexpr int kPart = N < hk::kVecLen<T> ? N : hk::kVecLen<T>;
#pragma unroll
        for (int i = 0; i < N; i += kPart) {
            Vec<T, kPart> part;
#pragma unroll
            for (int j = 0; j < kPart; ++j) part[j] = y[i + j];
            *reinterpret_cast<GlobalPtr<Vec<T, kPart>>>(to + i) = part;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < left) to[i] = y[i];
        }
    }
}

/// The function of an activation, in f32, or none.
template <int N>
HK_FN Vec<float, N> activate(u32 which, Vec<float, N> v) {
    if (which == Epilogue::kNone) return v;
    hk::with_activation(hk::Activation(which), [&](auto f) { v = f(v); });
    return v;
}

/// The rounded output, or a part of it that still has to meet others.
template <int N>
HK_FN void write(const Epilogue &e, const Work &work, u32 m, u32 n, Vec<float, N> y) {
    const u32 left = e.cols - n;
    const i64 at = i64(work.batch) * e.y_batch + i64(m) * e.y_row + n;
    if (e.store == Store::Plane) {
        store_floats<float, N>(e.y, at + i64(work.split) * e.y_split, y, left, e.vectors);
    } else if (e.store == Store::Add) {
        const auto to = reinterpret_cast<GlobalPtr<float>>(e.y) + at;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < left) hk::atomic_add(to + i, y[i]);
        }
    } else if (e.y_type == Float::Bf16) {
        store_floats<hk::bf16, N>(e.y, at, y, left, e.vectors);
    } else if (e.y_type == Float::F16) {
        store_floats<hk::f16, N>(e.y, at, y, left, e.vectors);
    } else {
        store_floats<float, N>(e.y, at, y, left, e.vectors);
    }
}

/// A sum with its scales.
template <int N>
HK_FN Vec<float, N> scaled(const Epilogue &e, const Work &work, u32 m, u32 n, Vec<float, N> sum) {
    if (!e.x_scale) return sum;
    const auto x_scale = reinterpret_cast<GlobalPtr<const float>>(e.x_scale) + i64(work.batch) * e.x_scale_batch;
    const i64 at = i64(work.batch) * e.w_scale_batch;
    Vec<float, N> w_scale;
    if (e.w_scale_step) {
        w_scale = load_floats<N>(e.w_scale, Float::F32, at + n, e.cols - n);
    } else {
        w_scale = reinterpret_cast<GlobalPtr<const float>>(e.w_scale)[at];
    }
    return sum * (w_scale * x_scale[i64(m) * e.x_scale_step]);
}

/// Outputs (m, n .. n + N), given their sums.
template <int N>
HK_FN void finish(const Epilogue &e, const Work &work, u32 m, u32 n, Vec<float, N> sum) {
    if (m >= e.rows || n >= e.cols) return;
    sum = scaled<N>(e, work, m, n, sum);
    if (e.store == Store::Round) {
        if (e.bias) sum += load_floats<N>(e.bias, e.bias_type, i64(work.batch) * e.bias_batch + n, e.cols - n);
        sum = activate<N>(e.activation, sum);
    }
    write<N>(e, work, m, n, sum);
}

/// Outputs whose sums are of a gate and of a value: their product, the activation for the gate alone. Planes have the gates
/// in their first e.cols columns, then the values.
template <int N>
HK_FN void finish_gated(const Epilogue &e, const Work &work, u32 m, u32 n, Vec<float, N> gate, Vec<float, N> value) {
    if (m >= e.rows || n >= e.cols) return;
    if (e.store == Store::Plane) {
        const i64 at = i64(work.split) * e.y_split + i64(work.batch) * e.y_batch + i64(m) * e.y_row + n;
        store_floats<float, N>(e.y, at, gate, e.cols - n, e.vectors);
        store_floats<float, N>(e.y, at + e.cols, value, e.cols - n, e.vectors && e.cols % 4 == 0);
        return;
    }
    write<N>(e, work, m, n, activate<N>(e.activation, gate) * value);
}

/// Outputs of a lane at a time.
inline constexpr int kPart = 8;

/// Rows of sums in LDS, `kCols` to a row, for lanes that have tiles of 16 x 16 of them to exchange for parts of rows. Chunks of
/// four columns are permuted in a row such that neither meets a bank twice: lanes that put a tile together, nor lanes that get
/// parts of neighbouring rows, or of the halves of rows, gates and values, together.
template <class Number, int kCols, int kRows = 16>
struct Strip {
    static constexpr u32 kChunks = kCols / 4;
    static_assert(kChunks == 4 || kChunks == 8 || kChunks == 16, "rows of 16, 32 or 64 columns");
    using Chunk = Vec<Number, 4>;
    Chunk chunk[kRows * kChunks];

    HK_FN static u32 place(u32 row, u32 c) {
        const u32 r = row % 16;
        const u32 swizzle = kChunks == 4 ? r / 2 ^ r / 4 : r ^ r / 2 ^ r / 8 ^ r * 8;
        return row * kChunks + (c ^ swizzle % kChunks);
    }

    /// The 16 rows from `first` on, of which a lane has column lane % 16, kMmaRows neighbours.
    template <class Acc, int kN>
    HK_FN void put(u32 first, const Acc (&acc)[kN]) {
        static_assert(16 * kN == kCols, "whole rows");
#pragma unroll
        for (u32 n = 0; n < kN; ++n) {
            const auto sums = __builtin_convertvector(acc[n], Vec<Number, hk::kMmaRows>);
#pragma unroll
            for (u32 i = 0; i < hk::kMmaRows / 4; ++i) {
                const u32 c = 4 * n + hk::lane_id() / 16 * (hk::kMmaRows / 4) + i;
                chunk[place(first + hk::lane_id() % 16, c)] = reinterpret_cast<const Chunk *>(&sums)[i];
            }
        }
    }

    HK_FN Vec<Number, kPart> get(u32 row, u32 col) const {
        return __builtin_shufflevector(chunk[place(row, col / 4)], chunk[place(row, col / 4 + 1)], 0, 1, 2, 3, 4, 5, 6, 7);
    }
};

}  // namespace gemm
