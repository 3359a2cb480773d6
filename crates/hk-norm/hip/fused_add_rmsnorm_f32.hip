// fused_add_rmsnorm_f32.hip: the residual is added, then the RMS norm, for rows of f32.
#include "fused_add_rmsnorm.h"

RMS_ENTRIES(fused_add_rmsnorm, f32)
