// dual4_f16.hip: mxfp4, and f16, two products in one launch, by tiles; see dual.h.
#include "dual4.h"

DUAL4(f16)
