// layernorm_f16.hip: the layer norm of rows of f16.
#include "layernorm.h"

LAYERNORM_ENTRIES(f16)
