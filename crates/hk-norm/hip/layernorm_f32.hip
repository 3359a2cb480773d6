// layernorm_f32.hip: the layer norm of rows of f32.
#include "layernorm.h"

LAYERNORM_ENTRIES(f32)
