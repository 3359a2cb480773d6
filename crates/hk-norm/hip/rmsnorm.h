// rmsnorm.h: y[r, c] = round_T(x[r, c] * rsqrt(mean(x[r, :]^2) + eps) * (weight[c] + weight_offset))
//   x, y    [rows, cols]  T = bf16 | f16 | f32   unit stride on cols, rows any stride; y may lie on x
//   weight  [cols]        T | f32                contiguous
//   rstd    [rows]        f32, optional          contiguous; the reciprocal root of each row
// The model-sensitive mode rounds x * rstd to T before the weight. All else in f32.
// Rows on lanes, order of sums, access and floor: rms_rows.h. Source: Zhang & Sennrich 2019, eq. 4.
#pragma once

#include <hk/entry.h>

#include "rms_rows.h"

namespace rmsnorm {
struct Params {
    hk::Global x, weight, y, rstd;
    rms::Scalars scalars;
};
}  // namespace rmsnorm

using rmsnorm::Params;
