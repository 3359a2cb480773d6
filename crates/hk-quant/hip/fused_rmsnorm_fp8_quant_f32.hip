// fused_rmsnorm_fp8_quant_f32.hip: the RMS norm of rows of f32, quantized to int8 and fp8.
#include "fused_rmsnorm_fp8_quant.h"

NORM_QUANT_ENTRIES(fused_rmsnorm_fp8_quant, Quantizer, f32)
