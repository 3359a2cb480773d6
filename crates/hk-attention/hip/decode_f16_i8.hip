// decode_f16_i8.hip: attention of few queries in f16 over pages of int8 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
using Cache = attention::decode::BytesI8<hk::f16>;
}  // namespace

HK_DECODE(decode_f16_i8, hk::f16, Cache)
HK_DECODE(decode_f16_i8_pieces, hk::f16, attention::decode::InPieces<Cache>)
HK_DECODE_PIECES_TALL(decode_f16_i8_pieces, hk::f16, attention::decode::InPieces<Cache>)
HK_DECODE_TALL(decode_f16_i8, hk::f16, Cache)
