// decoded_i8.hip: products of 16-bit floats by int8, by tiles; see decoded.h.
#include "decoded8.h"

DECODED(bf16, wi8, hk::I8)
DECODED(f16, wi8, hk::I8)
