// decode_f16_fp8_scaled.hip: attention of few queries in f16 over pages of fp8 with factors of tokens (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
using Cache = attention::decode::TokenScaled<attention::decode::BytesFp8<hk::f16>>;
}  // namespace

HK_DECODE(decode_f16_fp8_scaled, hk::f16, Cache)
HK_DECODE_TALL(decode_f16_fp8_scaled, hk::f16, Cache)
