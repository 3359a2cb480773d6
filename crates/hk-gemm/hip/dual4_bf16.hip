// dual4_bf16.hip: mxfp4, and bf16, two products in one launch, by tiles; see dual.h.
#include "dual4.h"

DUAL4(bf16)
