// a16w8_fp8.hip: GEMM of 16-bit floats by the target's fp8, LDS tiles; see gemm/operands/i8_fp8.h.
#include "a16w8.h"

DECODED(bf16, wfp8, hk::Fp8)
DECODED(f16, wfp8, hk::Fp8)
