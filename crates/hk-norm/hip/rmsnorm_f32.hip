// rmsnorm_f32.hip: the RMS norm of rows of f32.
#include "rmsnorm.h"

RMS_ENTRIES(rmsnorm, f32)
