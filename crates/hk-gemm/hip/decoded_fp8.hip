// decoded_fp8.hip: products of 16-bit floats by the fp8 that the target has, by tiles; see decoded.h.
#include "decoded8.h"

DECODED(bf16, wfp8, hk::Fp8)
DECODED(f16, wfp8, hk::Fp8)
