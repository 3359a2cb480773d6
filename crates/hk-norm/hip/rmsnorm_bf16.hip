// rmsnorm_bf16.hip: the RMS norm of rows of bf16.
#include "rmsnorm.h"

RMS_ENTRIES(rmsnorm, bf16)
