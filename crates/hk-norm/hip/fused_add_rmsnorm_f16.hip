// fused_add_rmsnorm_f16.hip: the residual is added, then the RMS norm, for rows of f16.
#include "fused_add_rmsnorm.h"

RMS_ENTRIES(fused_add_rmsnorm, f16)
