// reg.h: rows of a matrix in the registers of a group of lanes.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/types.h>

namespace hk {

/// A lane's fragment of a row that `Lanes` lanes hold: chunk k of lane l is the N columns from (k * Lanes + l) * N, so that accesses
/// to one chunk are coalesced.
template <class T, int Lanes, int N, int Chunks>
struct Row {
    using Element = T;
    static constexpr int kLanes = Lanes;
    static constexpr int kLen = N;
    static constexpr int kChunks = Chunks;
    static constexpr int kCols = Lanes * N * Chunks;

    Vec<T, N> chunk[Chunks];

    /// The same fragment of another element type.
    template <class U>
    using With = Row<U, Lanes, N, Chunks>;
    using OneChunk = Row<T, Lanes, N, 1>;

    /// Loads the lane's fragment; `from` is at its first chunk. Columns past the row are zero.
    template <class From>
    HK_FN static Row load(const From &from) {
        const From place = N * Chunks > From::template kLen<N> ? from.reload() : from;
        Row row;
#pragma unroll
        for (int k = 0; k < Chunks; ++k) row.chunk[k] = place.template load<N>(k * Lanes * N);
        return row;
    }

    /// Stores the lane's fragment to where `load` would read it.
    template <class To>
    HK_FN void store(const To &to) const {
        store(to, [&](int k) { return chunk[k]; });
    }

    /// The same of chunks that `make(k)` computes; on targets that save registers, one at a time.
    template <class To, class Make>
    HK_FN static void store(const To &to, Make make) {
        Row made;
        if constexpr (!kKeepsRowsNarrow) {
#pragma unroll
            for (int k = 0; k < Chunks; ++k) made.chunk[k] = make(k);
        }
        const To place = N * Chunks > To::template kLen<N> ? to.reload() : to;
#pragma unroll
        for (int k = 0; k < Chunks; ++k)
            place.template store<N>(kKeepsRowsNarrow ? make(k) : made.chunk[k], k * Lanes * N);
    }
};

template <class T, int L, int N, int C>
HK_FN Row<float, L, N, C> widen(const Row<T, L, N, C> &row) {
    Row<float, L, N, C> out;
#pragma unroll
    for (int k = 0; k < C; ++k) out.chunk[k] = widen<T, N>(row.chunk[k]);
    return out;
}

/// `v`, which is `row` in f32, for a later use: on targets that save registers it is rematerialized from `row`.
template <class T, int L, int N, int C>
HK_FN Row<float, L, N, C> rematerialize(const Row<float, L, N, C> &v, const Row<T, L, N, C> &row) {
    if constexpr (!kKeepsRowsNarrow || sizeof(T) == sizeof(float)) {
        return v;
    } else {
        Row<float, L, N, C> out;
#pragma unroll
        for (int k = 0; k < C; ++k) {
            auto words = __builtin_bit_cast(Vec<u32, N *int(sizeof(T)) / 4>, row.chunk[k]);
#pragma unroll
            for (int i = 0; i < N * int(sizeof(T)) / 4; ++i) {
                u32 word = words[i];
                opaque(word);
                words[i] = word;
            }
            out.chunk[k] = widen<T, N>(__builtin_bit_cast(Vec<T, N>, words));
        }
        return out;
    }
}

/// One rounding to T: `narrow` of each chunk.
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

/// The largest element; quiet NaNs are ignored.
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

/// Replaces columns past the row by -inf; `left` columns of the row remain from the lane's first one.
template <Access kAccess, int L, int N, int C>
HK_FN void mask_tail(Row<float, L, N, C> &row, i32 left) {
    opaque(left);  // else the comparisons would be kept in SGPRs from row to row
#pragma unroll
    for (int k = 0; k < C; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            // Vectorized: a whole chunk is within the row or past it.
            const bool within = k * L * N + (kAccess == Access::Vectorized ? 0 : i) < left;
            row.chunk[k][i] = within ? row.chunk[k][i] : -__builtin_inff();
        }
    }
}

/// Running sum, separate for even and odd columns: a pair takes one packed instruction.
struct RunningSum {
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

/// Running sum of squares, separate for even and odd columns: a pair takes one packed instruction.
struct RunningSumSq {
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
