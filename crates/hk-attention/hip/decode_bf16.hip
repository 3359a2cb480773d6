// decode_bf16.hip: attention of few queries in bf16, over pages of bf16, of fp8 and of int8 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
}  // namespace

HK_DECODE(decode_bf16, hk::bf16, attention::Stored)
HK_DECODE(decode_bf16_fp8, hk::bf16, attention::decode::BytesFp8<hk::bf16>)
HK_DECODE(decode_bf16_i8, hk::bf16, attention::decode::BytesI8<hk::bf16>)
HK_DECODE(decode_bf16_fp8_scaled, hk::bf16, attention::decode::TokenScaled<attention::decode::BytesFp8<hk::bf16>>)
HK_DECODE(decode_bf16_i8_scaled, hk::bf16, attention::decode::TokenScaled<attention::decode::BytesI8<hk::bf16>>)
HK_DECODE(decode_bf16_pieces, hk::bf16, attention::decode::InPieces<attention::Stored>)
HK_DECODE(decode_bf16_fp8_pieces, hk::bf16, attention::decode::InPieces<attention::decode::BytesFp8<hk::bf16>>)
HK_DECODE(decode_bf16_i8_pieces, hk::bf16, attention::decode::InPieces<attention::decode::BytesI8<hk::bf16>>)
HK_DECODE_TALL(decode_bf16, hk::bf16, attention::Stored)
HK_DECODE_TALL(decode_bf16_fp8, hk::bf16, attention::decode::BytesFp8<hk::bf16>)
HK_DECODE_TALL(decode_bf16_i8, hk::bf16, attention::decode::BytesI8<hk::bf16>)
