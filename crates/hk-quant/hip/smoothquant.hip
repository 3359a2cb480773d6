// smoothquant.hip: z = x * smooth; s[r] = max_c |z[r, c]| / qmax; q[r, c] = quantize(z[r, c] / s[r])
//   x       [rows, cols]  T = bf16 | f16 | f32      unit stride on cols, rows any stride
//   smooth  [cols]        T | f32                   contiguous
//   q       [rows, cols]  i8 | fp8 e4m3, OCP or FNUZ  unit stride on cols, rows any stride
//   scale   [rows]        f32                       contiguous
// How the work is split, floor: token_rows.h. Source: Xiao et al. 2023, "SmoothQuant".
#include <hk/entry.h>

#include "token_rows.h"

namespace {
struct Params {
    hk::Global x, smooth, q, scale;
    quant::TokenScalars scalars;
};
}  // namespace

TOKEN_ENTRIES(smoothquant, bf16)
TOKEN_ENTRIES(smoothquant, f16)
TOKEN_ENTRIES(smoothquant, f32)
