// fused_add_rmsnorm_bf16.hip: the residual is added, then the RMS norm, for rows of bf16.
#include "fused_add_rmsnorm.h"

RMS_ENTRIES(fused_add_rmsnorm, bf16)
