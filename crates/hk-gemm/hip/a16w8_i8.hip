// a16w8_i8.hip: GEMM of 16-bit floats by int8, LDS tiles; see gemm/operands/i8_fp8.h.
#include "a16w8.h"

DECODED(bf16, wi8, hk::I8)
DECODED(f16, wi8, hk::I8)
