// reg.h: rows of a matrix spread over the registers of a group of lanes.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/types.h>

namespace hk {

/// One lane's share of a row that `Lanes` lanes hold together: chunk k of lane l is the N columns from
/// (k * Lanes + l) * N, so that the lanes' accesses to one chunk lie side by side.
template <class T, int Lanes, int N, int Chunks>
struct Row {
    using Element = T;
    static constexpr int kLanes = Lanes;
    static constexpr int kCols = Lanes * N * Chunks;

    Vec<T, N> chunk[Chunks];

    /// The same place in a row of another element type.
    template <class U>
    using With = Row<U, Lanes, N, Chunks>;

    /// Reads the lane's share of a row; `from` stands at its first chunk. Columns past the row are zero.
    template <class From>
    HK_FN static Row load(const From &from) {
        const From place = N * Chunks > From::template kLen<N> ? from.anew() : from;
        Row row;
#pragma unroll
        for (int k = 0; k < Chunks; ++k) row.chunk[k] = place.template load<N>(k * Lanes * N);
        return row;
    }

    /// Writes the lane's share to where `load` would read it.
    template <class To>
    HK_FN void store(const To &to) const {
        const To place = N * Chunks > To::template kLen<N> ? to.anew() : to;
#pragma unroll
        for (int k = 0; k < Chunks; ++k) place.template store<N>(chunk[k], k * Lanes * N);
    }
};

template <class T, int L, int N, int C>
HK_FN Row<float, L, N, C> widen(const Row<T, L, N, C> &row) {
    Row<float, L, N, C> out;
#pragma unroll
    for (int k = 0; k < C; ++k) out.chunk[k] = widen<T, N>(row.chunk[k]);
    return out;
}

/// One rounding to T, see `narrow` of a vector.
template <class T, int L, int N, int C>
HK_FN Row<T, L, N, C> narrow(const Row<float, L, N, C> &row) {
    Row<T, L, N, C> out;
#pragma unroll
    for (int k = 0; k < C; ++k) out.chunk[k] = narrow<T, N>(row.chunk[k]);
    return out;
}

template <int L, int N, int C>
HK_FN Row<float, L, N, C> operator+(Row<float, L, N, C> a, const Row<float, L, N, C> &b) {
#pragma unroll
    for (int k = 0; k < C; ++k) a.chunk[k] += b.chunk[k];
    return a;
}

template <int L, int N, int C>
HK_FN Row<float, L, N, C> operator*(Row<float, L, N, C> a, const Row<float, L, N, C> &b) {
#pragma unroll
    for (int k = 0; k < C; ++k) a.chunk[k] *= b.chunk[k];
    return a;
}

template <int L, int N, int C>
HK_FN Row<float, L, N, C> operator+(Row<float, L, N, C> a, float b) {
#pragma unroll
    for (int k = 0; k < C; ++k) a.chunk[k] += b;
    return a;
}

template <int L, int N, int C>
HK_FN Row<float, L, N, C> operator*(Row<float, L, N, C> a, float b) {
#pragma unroll
    for (int k = 0; k < C; ++k) a.chunk[k] *= b;
    return a;
}

/// a * b + c, rounded once
template <int L, int N, int C>
HK_FN Row<float, L, N, C> fma(Row<float, L, N, C> a, const Row<float, L, N, C> &b, const Row<float, L, N, C> &c) {
#pragma unroll
    for (int k = 0; k < C; ++k) a.chunk[k] = __builtin_elementwise_fma(a.chunk[k], b.chunk[k], c.chunk[k]);
    return a;
}

/// The largest element; of NaNs, quiet ones, none.
template <int L, int N, int C>
HK_FN float largest(const Row<float, L, N, C> &row) {
    float max = row.chunk[0][0];
#pragma unroll
    for (int k = 0; k < C; ++k) {
#pragma unroll
        for (int i = 0; i < N; i += 2) max = max3(max, row.chunk[k][i], row.chunk[k][i + 1]);
    }
    return max;
}

/// Running sum, apart for even and odd columns so that a pair takes one packed instruction.
struct SumOf {
    Vec<float, 2> acc = 0.0f;

    template <int L, int N, int C>
    HK_FN void add(const Row<float, L, N, C> &row) {
#pragma unroll
        for (int k = 0; k < C; ++k) {
#pragma unroll
            for (int i = 0; i < N; i += 2) acc += Vec<float, 2>{row.chunk[k][i], row.chunk[k][i + 1]};
        }
    }

    HK_FN float total() const { return acc[0] + acc[1]; }
};

/// Running sum of squares, apart for even and odd columns so that a pair takes one packed instruction.
struct SumSq {
    Vec<float, 2> acc = 0.0f;

    template <int L, int N, int C>
    HK_FN void add(const Row<float, L, N, C> &row) {
#pragma unroll
        for (int k = 0; k < C; ++k) {
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const Vec<float, 2> pair = {row.chunk[k][i], row.chunk[k][i + 1]};
                acc = __builtin_elementwise_fma(pair, pair, acc);
            }
        }
    }

    HK_FN float total() const { return acc[0] + acc[1]; }
};

}  // namespace hk
