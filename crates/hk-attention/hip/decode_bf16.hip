// decode_bf16.hip: attention of few queries in bf16, over pages of bf16 and of fp8 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
}  // namespace

HK_DECODE(decode_bf16, hk::bf16, attention::Stored)
HK_DECODE(decode_bf16_fp8, hk::bf16, attention::StoredFp8<hk::bf16>)
