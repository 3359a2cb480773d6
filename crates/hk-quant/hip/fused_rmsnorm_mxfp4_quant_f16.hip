// fused_rmsnorm_mxfp4_quant_f16.hip: the RMS norm of rows of f16, quantized to MX blocks of fp4.
#include "fused_rmsnorm_mxfp4_quant.h"

NORM_QUANT_ENTRIES(fused_rmsnorm_mxfp4_quant, Quantizer, f16)
