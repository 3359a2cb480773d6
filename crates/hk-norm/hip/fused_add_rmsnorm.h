// fused_add_rmsnorm.h: s = round_T(x + residual_in); residual_out = s; y = rmsnorm of the rounded s
//   x, residual_in, residual_out, y  [rows, cols]  T = bf16 | f16 | f32   unit stride on cols, rows any stride
//   weight                           [cols]        T | f32                contiguous
//   rstd                             [rows]        f32, optional          contiguous
// Bitwise identical to adding, storing and calling rmsnorm. residual_out may alias x or residual_in, and
// so may y, but not both the same one. Rows on lanes, order of sums, access and floor: rms_rows.h.
#pragma once

#include <hk/entry.h>

#include "rms_rows.h"

namespace fused_add_rmsnorm {
struct Params {
    hk::Global x, residual_in, weight, y, residual_out, rstd;
    rms::Scalars scalars;
};
}  // namespace fused_add_rmsnorm

using fused_add_rmsnorm::Params;
