// decode_bf16_i8.hip: attention of few queries in bf16 over pages of int8 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
using Cache = attention::decode::BytesI8<hk::bf16>;
}  // namespace

HK_DECODE(decode_bf16_i8, hk::bf16, Cache)
HK_DECODE(decode_bf16_i8_pieces, hk::bf16, attention::decode::InPieces<Cache>)
HK_DECODE_PIECES_TALL(decode_bf16_i8_pieces, hk::bf16, attention::decode::InPieces<Cache>)
HK_DECODE_TALL(decode_bf16_i8, hk::bf16, Cache)
