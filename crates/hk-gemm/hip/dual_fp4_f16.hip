// dual_fp4_f16.hip: a GEMM of mxfp4 and a GEMM of f16 in one launch, LDS tiles; see gemm/gemm_pair.h.
#include "dual_fp4.h"

DUAL4(f16)
