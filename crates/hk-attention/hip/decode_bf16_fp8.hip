// decode_bf16_fp8.hip: attention of few queries in bf16 over pages of fp8 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
using Cache = attention::decode::BytesFp8<hk::bf16>;
}  // namespace

HK_DECODE(decode_bf16_fp8, hk::bf16, Cache)
HK_DECODE(decode_bf16_fp8_pieces, hk::bf16, attention::decode::InPieces<Cache>)
HK_DECODE_PIECES_TALL(decode_bf16_fp8_pieces, hk::bf16, attention::decode::InPieces<Cache>)
HK_DECODE_TALL(decode_bf16_fp8, hk::bf16, Cache)
