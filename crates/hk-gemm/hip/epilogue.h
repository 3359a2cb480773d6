// epilogue.h: from sums to outputs: scales, bias, activation, one rounding.
#pragma once

#include <hk/activate.h>
#include <hk/arch.h>
#include <hk/global.h>
#include <hk/mma.h>
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
    u64 bias;                     // [matrices, N]; 0: none
    i64 bias_batch;
    u64 x_scale, w_scale;         // f32 [batch, M], [matrices, N]; 0: none
    i64 x_scale_batch, w_scale_batch;
    u32 x_scale_step, w_scale_step;  // 0: one for all
    u32 rows, cols;                  // M, N
    Float y_type, bias_type;
    Store store;
    u32 activation;  // hk::Activation, kRelu6 or kNone
    u32 vectors;     // rows of y begin on 16 bytes
    u32 pad;
    Groups groups;
    static constexpr u32 kRelu6 = 5, kNone = 255;
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

    HK_FN GlobalPtr<const u8> first(u32 index) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(index) * batch;
    }
    /// Of the scales of a row of the operand; beyond every window if it has no such row.
    HK_FN u32 offset(u32 of_row, u32 rows) const {
        return of_row < rows ? (of_row >> row_shift) * row : hk::Window::kBeyond;
    }
    HK_FN hk::WordPlace place(u32 index, u32 of_row, u32 rows) const {
        return {reinterpret_cast<u64>(first(index)), offset(of_row, rows), group, group_shift};
    }
};
static_assert(sizeof(BlockScale) == 32, "same layout as in Rust");

/// A number for each output, [M, N], or one for all; same layout as `Term` in src/problem.rs.
struct Term {
    u64 data;     // 0: `value`
    i64 row;      // stride, in elements
    float value;
    Float type;
    u32 step;     // 0: one for all
    u32 vectors;  // rows begin on 16 bytes
};

/// What comes after a product; same layout as `Fusion` in src/problem.rs.
struct Fusion {
    enum class Kind : u32 {
        None = 0,
        ScaleAdd = 1,    ///< y = a g + b, g the product
        AddProduct = 2,  ///< y = a b + g
        SplitCat = 3,    ///< see write_split
    };
    u64 divisor;  // f32, of the product, before all else; 0: none
    Term a, b;
    // Of SplitCat: y[m, d, :head] and rest[m, d, :tail] are the columns of d, and y[m, d, head:] is cat[m, d, :].
    u64 rest;
    i64 y_head, rest_row, rest_head, cat_row, cat_head;  // strides, in elements
    u64 cat;
    u32 head, tail, extra;
    Float cat_type;
    Kind kind;
    u32 whole;  // parts of eight columns are in one of y and rest, on 16 bytes
};

struct BlockParams {  // same layout as `BlockParams` in src/problem.rs
    Operand x, w;
    Grid grid;
    Epilogue epilogue;
    BlockScale x_scale, w_scale;
    Fusion fusion;
};

/// N values of a type from `at` elements on, those past `left` zero. `vectors`: they are on 16 bytes.
template <int N>
HK_FN Vec<float, N> load_floats(u64 data, Float type, i64 at, u32 left, bool vectors = false) {
    Vec<float, N> v = 0.0f;
    const auto fill = [&]<class T>(T) {
        const auto from = reinterpret_cast<GlobalPtr<const T>>(data) + at;
        if (vectors && left >= N) {
            constexpr int kPart = N < hk::kVecLen<T> ? N : hk::kVecLen<T>;
#pragma unroll
            for (int i = 0; i < N; i += kPart) {
                const auto part = *reinterpret_cast<GlobalPtr<const Vec<T, kPart>>>(from + i);
#pragma unroll
                for (int j = 0; j < kPart; ++j) v[i + j] = float(part[j]);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < N; ++i) {
                if (i < left) v[i] = float(from[i]);
            }
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
    if (which == Epilogue::kRelu6) {
        v = hk::relu(v);
        return v > 6.0f ? Vec<float, N>(6.0f) : v;
    }
    hk::with_activation(hk::Activation(which), [&](auto f) { v = f(v); });
    return v;
}

/// Calls `f` with a value of the type.
template <class F>
HK_FN void with_type(Float type, F f) {
    if (type == Float::Bf16) f(hk::bf16{});
    else if (type == Float::F16) f(hk::f16{});
    else f(0.0f);
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
    } else {
        with_type(e.y_type, [&]<class T>(T) { store_floats<T, N>(e.y, at, y, left, e.vectors); });
    }
}

/// The rounded output as rows of `head + tail` columns, whose heads y has, followed by `extra` columns of another tensor, and
/// whose tails `rest` has. The lane that has a row's first column brings the others, too.
template <class T, int N>
HK_FN void write_split(const Epilogue &e, const Fusion &f, u32 m, u32 n, Vec<float, N> y) {
    const u32 width = f.head + f.tail, left = e.cols - n;
    const auto place = [&](u32 d, u32 at) {
        const i64 head = i64(m) * e.y_row + i64(d) * f.y_head, rest = i64(m) * f.rest_row + i64(d) * f.rest_head;
        return at < f.head ? e.y + u64(head + at) * sizeof(T) : f.rest + u64(rest + at - f.head) * sizeof(T);
    };
    if (f.whole) {
        store_floats<T, N>(place(n / width, n % width), 0, y, left, true);
    } else {
        const Vec<T, N> rounded = hk::narrow<T, N>(y);
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < left) *reinterpret_cast<GlobalPtr<T>>(place((n + i) / width, (n + i) % width)) = rounded[i];
        }
    }
    // Rows that begin among these columns.
#pragma unroll 1
    for (u32 d = (n + width - 1) / width; d * width < n + N && d * width < e.cols; ++d) {
        const i64 from = i64(m) * f.cat_row + i64(d) * f.cat_head;
        const u64 to = e.y + u64(i64(m) * e.y_row + i64(d) * f.y_head + f.head) * sizeof(T);
#pragma unroll 1
        for (u32 i = 0; i < f.extra; i += N) {
            const Vec<float, N> v = load_floats<N>(f.cat, f.cat_type, from + i, f.extra - i, f.whole);
            store_floats<T, N>(to, i, v, f.extra - i, f.whole);
        }
    }
}

/// A term of some outputs.
template <int N>
HK_FN Vec<float, N> load_term(const Term &t, u32 m, u32 n, u32 left) {
    if (!t.data) return t.value;
    if (!t.step) return load_floats<1>(t.data, t.type, 0, 1)[0];
    return load_floats<N>(t.data, t.type, i64(m) * t.row + n, left, t.vectors);
}

/// A sum with its scales, as far as there are any.
template <int N>
HK_FN Vec<float, N> scaled(const Epilogue &e, const Work &work, u32 m, u32 n, Vec<float, N> sum) {
    if (!(e.x_scale | e.w_scale)) return sum;
    Vec<float, N> scale = 1.0f;
    if (e.w_scale) {
        const i64 at = i64(work.matrix) * e.w_scale_batch;
        if (e.w_scale_step) {
            scale = load_floats<N>(e.w_scale, Float::F32, at + n, e.cols - n);
        } else {
            scale = reinterpret_cast<GlobalPtr<const float>>(e.w_scale)[at];
        }
    }
    if (e.x_scale) {
        const auto x_scale = reinterpret_cast<GlobalPtr<const float>>(e.x_scale) + i64(work.batch) * e.x_scale_batch;
        scale *= x_scale[i64(m) * e.x_scale_step];
    }
    return sum * scale;
}

/// Outputs (m, n .. n + N), given their sums.
template <int N, class Params>
HK_FN void finish(const Params &p, const Work &work, u32 m, u32 n, Vec<float, N> sum) {
    const Epilogue &e = p.epilogue;
    if (m >= e.rows || n >= e.cols || !e.groups.has(work.batch, m)) return;
    sum = scaled<N>(e, work, m, n, sum);
    // Planes that are to be seen have the bias in the first one.
    if (e.bias && (e.store == Store::Round || work.split == 0)) {
        sum += load_floats<N>(e.bias, e.bias_type, i64(work.matrix) * e.bias_batch + n, e.cols - n);
    }
    if (e.store == Store::Round) {
        sum = activate<N>(e.activation, sum);
        if constexpr (requires { p.fusion; }) {
            const Fusion &f = p.fusion;
            if (f.divisor) sum = sum / hk::load_uniform<float>(f.divisor);
            if (f.kind == Fusion::Kind::SplitCat) {
                with_type(e.y_type, [&]<class T>(T) { write_split<T, N>(e, f, m, n, sum); });
                return;
            }
            if (f.kind != Fusion::Kind::None) {
                const Vec<float, N> a = load_term<N>(f.a, m, n, e.cols - n), b = load_term<N>(f.b, m, n, e.cols - n);
                sum = f.kind == Fusion::Kind::ScaleAdd ? a * sum + b : a * b + sum;
            }
        }
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

/// Sums that are in units of something.
template <int kM, int kN>
HK_FN void in_units(hk::MmaAcc (&acc)[kM][kN], float unit) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) acc[m][n] *= unit;
    }
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

    /// The 16 rows from `first` on, as a lane has sums of them.
    template <class Acc, int kN>
    HK_FN void put(u32 first, const Acc (&acc)[kN]) {
        static_assert(16 * kN == kCols, "whole rows");
#pragma unroll
        for (u32 n = 0; n < kN; ++n) {
            const auto sums = __builtin_convertvector(acc[n], Vec<Number, hk::kLaneRows * hk::kMmaRows>);
            const u32 lane = hk::lane_id(), c = 4 * n + hk::group_of_lane(lane);
#pragma unroll
            for (u32 i = 0; i < hk::kLaneRows; ++i) {
                chunk[place(first + hk::row_of_lane(lane, i), c)] = reinterpret_cast<const Chunk *>(&sums)[i];
            }
        }
    }

    HK_FN Vec<Number, kPart> get(u32 row, u32 col) const {
        return __builtin_shufflevector(chunk[place(row, col / 4)], chunk[place(row, col / 4 + 1)], 0, 1, 2, 3, 4, 5, 6, 7);
    }
};

}  // namespace gemm
