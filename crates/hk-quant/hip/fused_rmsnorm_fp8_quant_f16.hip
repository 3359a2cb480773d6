// fused_rmsnorm_fp8_quant_f16.hip: the RMS norm of rows of f16, quantized to int8 and fp8.
#include "fused_rmsnorm_fp8_quant.h"

NORM_QUANT_ENTRIES(fused_rmsnorm_fp8_quant, Quantizer, f16)
