// per_token_quant.hip: s[r] = max_c |x[r, c]| / qmax; q[r, c] = quantize(x[r, c] / s[r])
//   x         [rows, cols]  T = bf16 | f16 | f32      unit stride on cols, rows any stride
//   q         [rows, cols]  i8 | fp8 e4m3, OCP or FNUZ  likewise
//   scale     [rows]        f32                       contiguous
//   scale_ub  [1]           f32, optional             upper bound of the maximum, if positive
// How the work is split, floor: token_rows.h.
#include <hk/entry.h>

#include "token_rows.h"

namespace {
struct Params {
    hk::Global x, q, scale, scale_ub;
    quant::TokenScalars scalars;
};
}  // namespace

TOKEN_ENTRIES(per_token_quant, bf16)
TOKEN_ENTRIES(per_token_quant, f16)
TOKEN_ENTRIES(per_token_quant, f32)
