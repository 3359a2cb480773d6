// outputs.h: outputs of attention, and partial results of splits of the keys.
#pragma once

#include "problem.h"

#include <hk/global.h>
#include <hk/matrix.h>
#include <hk/quant.h>
#include <hk/types.h>

namespace attention {

inline constexpr float kLog2E = 0x1.715476p+0f, kLn2 = 0x1.62e43p-1f;
inline constexpr float kMinusInf = -__builtin_inff();

/// Where an element of an output or of LSE is.
HK_FN u64 row_address(const HeadRows &rows, const Work &work, bool packed, u32 query, u32 head) {
    const i64 row = i64(work.q_start) + query;
    return rows.data + u64((packed ? 0 : i64(work.sequence) * rows.batch) + row * rows.row + i64(head) * rows.head);
}

/// Stores four columns from `col` on, rounded once.
template <class T>
HK_FN void store_columns(const Params &p, u64 row, u32 col, Vec<float, 4> y) {
    const auto store = [&]<class E>(Vec<E, 4> v) {
        auto *at = reinterpret_cast<GlobalPtr<E>>(row) + col;
        if (p.out_vectorized) {
            *reinterpret_cast<GlobalPtr<Vec<E, 4>>>(at) = v;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if (col + i < p.dv) at[i] = v[i];
            }
        }
    };
    if (p.out_type == kFp8) {
        store(__builtin_bit_cast(Vec<u8, 4>, hk::quantize_packed<hk::kMmaFp8Type, 4>(y)));
    } else if (p.out_type == kF16) {
        store(hk::narrow<hk::f16, 4>(y));
    } else if (p.out_type == kF32) {
        store(y);
    } else {
        store(hk::narrow<T, 4>(y));
    }
}

/// A row's part of a split.
class Partial {
    using Sums = Vec<float, 2>;
    u64 acc_, sums_;

  public:
    // Bytes to a split are apart from those to a row: where the split is uniform they are scalar.
    HK_FN Partial(const Params &p, u32 split, u64 row)
        : acc_(p.splits.acc + acc_bytes(p, row) + split * acc_bytes(p, p.splits.rows)),
          sums_(p.splits.sums + row * sizeof(Sums) + split * (u64(p.splits.rows) * sizeof(Sums))) {}

    /// Bytes of the sums of values of so many rows.
    HK_FN static u64 acc_bytes(const Params &p, u64 rows) { return rows * ((p.dv + 3) / 4 * 4 * sizeof(float)); }

    HK_FN Vec<float, 4> load(u32 col) const { return *reinterpret_cast<GlobalPtr<const Vec<float, 4>>>(acc(col)); }
    /// N columns from `col` on, a multiple of N.
    template <int N>
    HK_FN void store(u32 col, Vec<float, N> y) const {
        constexpr int kPart = N < 4 ? N : 4;
#pragma unroll
        for (int i = 0; i < N; i += kPart) {
            Vec<float, kPart> part;
#pragma unroll
            for (int j = 0; j < kPart; ++j) part[j] = y[i + j];
            *reinterpret_cast<GlobalPtr<Vec<float, kPart>>>(acc(col + i)) = part;
        }
    }
    HK_FN Vec<float, 2> sums() const { return *reinterpret_cast<GlobalPtr<const Sums>>(sums_); }
    HK_FN void store_sums(Vec<float, 2> sums) const { *reinterpret_cast<GlobalPtr<Sums>>(sums_) = sums; }

  private:
    HK_FN u64 acc(u32 col) const { return acc_ + col * sizeof(float); }
};

/// The keys are split, and the results of a block are partial ones.
HK_FN bool is_partial(const Params &p, const Work &) { return p.splits.count > 1; }
HK_FN Partial partial_of(const Params &p, const Work &work, u32 query, u32 head) {
    const u64 first = p.sequences.q_starts ? work.q_start : u64(work.sequence) * p.sequences.sq;
    return {p, work.split, (first + query) * p.heads + head};
}

}  // namespace attention
