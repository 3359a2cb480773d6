// decode_f16.hip: attention of few queries in f16, over pages of f16, of fp8 and of int8 (decode.h).
#include "decode.h"

namespace {
using Params = attention::DecodeParams;
}  // namespace

HK_DECODE(decode_f16, hk::f16, attention::Stored)
HK_DECODE(decode_f16_fp8, hk::f16, attention::decode::BytesFp8<hk::f16>)
HK_DECODE(decode_f16_i8, hk::f16, attention::decode::BytesI8<hk::f16>)
HK_DECODE(decode_f16_fp8_scaled, hk::f16, attention::decode::TokenScaled<attention::decode::BytesFp8<hk::f16>>)
HK_DECODE(decode_f16_i8_scaled, hk::f16, attention::decode::TokenScaled<attention::decode::BytesI8<hk::f16>>)
HK_DECODE(decode_f16_pieces, hk::f16, attention::decode::InPieces<attention::Stored>)
HK_DECODE(decode_f16_fp8_pieces, hk::f16, attention::decode::InPieces<attention::decode::BytesFp8<hk::f16>>)
HK_DECODE(decode_f16_i8_pieces, hk::f16, attention::decode::InPieces<attention::decode::BytesI8<hk::f16>>)
HK_DECODE_TALL(decode_f16, hk::f16, attention::Stored)
HK_DECODE_TALL(decode_f16_fp8, hk::f16, attention::decode::BytesFp8<hk::f16>)
HK_DECODE_TALL(decode_f16_i8, hk::f16, attention::decode::BytesI8<hk::f16>)
