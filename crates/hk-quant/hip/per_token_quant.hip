// per_token_quant.hip: s[r] = max_c |x[r, c]| / qmax; q[r, c] = code(x[r, c] / s[r])
//   x         [rows, cols]  T = bf16 | f16 | f32      unit stride on cols, rows any stride
//   q         [rows, cols]  i8 | fp8 e4m3, OCP or FNUZ  likewise
//   scale     [rows]        f32                       contiguous
//   scale_ub  [1]           f32, optional             the maximum counts as at most this, if positive
// Rows on lanes and floor: token_rows.h.
#include <hk/entry.h>

#include "token_rows.h"

namespace {
struct Params {  // same fields, same order as `TokenParams` in src/per_token.rs
    hk::Global x, q, scale, scale_ub;
    quant::TokenScalars scalars;
};
}  // namespace

TOKEN_ENTRIES(per_token_quant, bf16)
TOKEN_ENTRIES(per_token_quant, f16)
TOKEN_ENTRIES(per_token_quant, f32)
