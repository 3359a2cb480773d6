// decode_bf16.hip: attention of few queries in bf16 over pages of bf16 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
}  // namespace

HK_DECODE(decode_bf16, hk::bf16, attention::Stored)
HK_DECODE(decode_bf16_pieces, hk::bf16, attention::decode::InPieces<attention::Stored>)
HK_DECODE_PIECES_TALL(decode_bf16_pieces, hk::bf16, attention::decode::InPieces<attention::Stored>)
HK_DECODE_TALL(decode_bf16, hk::bf16, attention::Stored)
