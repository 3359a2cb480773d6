// decoded8.h: tiles of products of 16-bit floats by codes of a byte, one source for each type of codes.
#pragma once

#include <hk/entry.h>

#include "decoded.h"

namespace {
using gemm::decoded_gemm;
using Params = gemm::MixedParams;
using hk::Access;

template <class T, class Code>
using Tile128x128 = gemm::DecodedTile<T, Code, Access::Vectors, 128, 128, 2, 2>;
template <class T, class Code>
using Tile64x64 = gemm::DecodedTile<T, Code, Access::Vectors, 64, 64, 2, 2>;
template <class T, class Code>
using Elements = gemm::DecodedTile<T, Code, Access::Elements, 64, 64, 2, 2>;
}  // namespace

// Entry points of one type of floats by one of codes.
#define DECODED(T, name, Code)                                                                                             \
    HK_ENTRY(gemm_##T##_##name##_128x128, (Tile128x128<hk::T, Code>::kThreads), (decoded_gemm<Tile128x128<hk::T, Code>>))  \
    HK_ENTRY(gemm_##T##_##name##_64x64, (Tile64x64<hk::T, Code>::kThreads), (decoded_gemm<Tile64x64<hk::T, Code>>))        \
    HK_ENTRY(gemm_##T##_##name##_64x64_elements, (Elements<hk::T, Code>::kThreads), (decoded_gemm<Elements<hk::T, Code>>))
