// fused_rmsnorm_fp8_quant_bf16.hip: the RMS norm of rows of bf16, quantized to int8 and fp8.
#include "fused_rmsnorm_fp8_quant.h"

NORM_QUANT_ENTRIES(fused_rmsnorm_fp8_quant, Quantizer, bf16)
