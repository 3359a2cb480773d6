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
    static constexpr int kLen = N;
    static constexpr int kChunks = Chunks;
    static constexpr int kCols = Lanes * N * Chunks;

    Vec<T, N> chunk[Chunks];

    /// The same place in a row of another element type.
    template <class U>
    using With = Row<U, Lanes, N, Chunks>;
    using OneChunk = Row<T, Lanes, N, 1>;

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
        store(to, [&](int k) { return chunk[k]; });
    }

    /// The same of the row whose chunks `make(k)` gives, one after the other on targets that save registers.
    template <class To, class Make>
    HK_FN static void store(const To &to, Make make) {
        Row made;
        if constexpr (!kWidensAgain) {
#pragma unroll
            for (int k = 0; k < Chunks; ++k) made.chunk[k] = make(k);
        }
        const To place = N * Chunks > To::template kLen<N> ? to.anew() : to;
#pragma unroll
        for (int k = 0; k < Chunks; ++k) place.template store<N>(kWidensAgain ? make(k) : made.chunk[k], k * Lanes * N);
    }
};

template <class T, int L, int N, int C>
HK_FN Row<float, L, N, C> widen(const Row<T, L, N, C> &row) {
    Row<float, L, N, C> out;
#pragma unroll
    for (int k = 0; k < C; ++k) out.chunk[k] = widen<T, N>(row.chunk[k]);
    return out;
}

/// `v`, which is `row` in f32, where it is used again after a while: on targets that save registers it is made anew
/// from `row`.
template <class T, int L, int N, int C>
HK_FN Row<float, L, N, C> widen_again(const Row<float, L, N, C> &v, const Row<T, L, N, C> &row) {
    if constexpr (!kWidensAgain || sizeof(T) == sizeof(float)) {
        return v;
    } else {
        Row<float, L, N, C> out;
#pragma unroll
        for (int k = 0; k < C; ++k) {
            auto words = __builtin_bit_cast(Vec<u32, N * int(sizeof(T)) / 4>, row.chunk[k]);
#pragma unroll
            for (int i = 0; i < N * int(sizeof(T)) / 4; ++i) {
                u32 word = words[i];
                forget(word);
                words[i] = word;
            }
            out.chunk[k] = widen<T, N>(__builtin_bit_cast(Vec<T, N>, words));
        }
        return out;
    }
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

/// Negative infinity in place of columns past the row, of which `left` are from the lane's first one on.
template <Access kAccess, int L, int N, int C>
HK_FN void lowest_beyond(Row<float, L, N, C> &row, i32 left) {
    forget(left);  // the results of the comparisons would fill scalar registers if they were kept from row to row
#pragma unroll
    for (int k = 0; k < C; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            // By vectors a chunk is within the row or not.
            const bool within = k * L * N + (kAccess == Access::Vectors ? 0 : i) < left;
            row.chunk[k][i] = within ? row.chunk[k][i] : -__builtin_inff();
        }
    }
}

/// Running sum, apart for even and odd columns so that a pair takes one packed instruction.
struct SumOf {
    Vec<float, 2> acc = 0.0f;

    template <int N>
    HK_FN void add(Vec<float, N> v) {
#pragma unroll
        for (int i = 0; i < N; i += 2) acc += Vec<float, 2>{v[i], v[i + 1]};
    }

    template <int L, int N, int C>
    HK_FN void add(const Row<float, L, N, C> &row) {
#pragma unroll
        for (int k = 0; k < C; ++k) add(row.chunk[k]);
    }

    HK_FN float total() const { return acc[0] + acc[1]; }
};

/// Running sum of squares, apart for even and odd columns so that a pair takes one packed instruction.
struct SumSq {
    Vec<float, 2> acc = 0.0f;

    template <int N>
    HK_FN void add(Vec<float, N> v) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const Vec<float, 2> pair = {v[i], v[i + 1]};
            acc = __builtin_elementwise_fma(pair, pair, acc);
        }
    }

    template <int L, int N, int C>
    HK_FN void add(const Row<float, L, N, C> &row) {
#pragma unroll
        for (int k = 0; k < C; ++k) add(row.chunk[k]);
    }

    HK_FN float total() const { return acc[0] + acc[1]; }
};

}  // namespace hk
