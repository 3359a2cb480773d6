// decode_f16.hip: attention of few queries in f16 over pages of f16 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
}  // namespace

HK_DECODE(decode_f16, hk::f16, attention::Stored)
HK_DECODE(decode_f16_pieces, hk::f16, attention::decode::InPieces<attention::Stored>)
HK_DECODE_PIECES_TALL(decode_f16_pieces, hk::f16, attention::decode::InPieces<attention::Stored>)
HK_DECODE_TALL(decode_f16, hk::f16, attention::Stored)
