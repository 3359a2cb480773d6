// dual_fp4_bf16.hip: a GEMM of mxfp4 and a GEMM of bf16 in one launch, LDS tiles; see gemm/gemm_pair.h.
#include "dual_fp4.h"

DUAL4(bf16)
