// rmsnorm_f16.hip: the RMS norm of rows of f16.
#include "rmsnorm.h"

RMS_ENTRIES(rmsnorm, f16)
