// decode_bf16_fp8_scaled.hip: attention of few queries in bf16 over pages of fp8 with factors of tokens (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
using Cache = attention::decode::TokenScaled<attention::decode::BytesFp8<hk::bf16>>;
}  // namespace

HK_DECODE(decode_bf16_fp8_scaled, hk::bf16, Cache)
HK_DECODE_TALL(decode_bf16_fp8_scaled, hk::bf16, Cache)
