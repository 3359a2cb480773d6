// layernorm_bf16.hip: the layer norm of rows of bf16.
#include "layernorm.h"

LAYERNORM_ENTRIES(bf16)
