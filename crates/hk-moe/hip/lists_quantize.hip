// lists_quantize.hip: lists_place of lists.hip, and rows of activations quantized by further blocks (fused_moe)
//   The lists and the quantized activations are all that the first GEMM of a layer needs: one launch has both.

#include <hk/entry.h>

#include "lists.h"
#include "quantize_rows.h"

namespace {
using namespace route;

struct Params {
    Lists lists;
    QuantizeRows rows;
};

/// Places by a block for each chunk, then a row by each wave.
template <class Quantize>
HK_FN void place_and(const Params &p, Quantize quantize) {
    if (hk::block_x() < p.lists.chunks) return place_chunk(p.lists);
    const u32 row = (hk::block_x() - p.lists.chunks) * kChunkWaves + hk::wave_id();
    if (row < p.rows.x.rows()) quantize(p.rows, row);
}

template <class T>
HK_FN void rows(const Params &p) {
    place_and(p, quantize_row<T>);
}
template <class T>
HK_FN void blocks(const Params &p) {
    place_and(p, quantize_blocks<T>);
}
template <class T>
HK_FN void mxfp4(const Params &p) {
    place_and(p, quantize_mxfp4<T>);
}
}  // namespace

// Entry points, as in src/lists.rs: type of the activations, what has a scale.
#define LISTS_QUANTIZE(T)                                                               \
    HK_ENTRY(lists_quantize_##T##_rows, (kChunkWaves * hk::kWaveSize), rows<hk::T>)     \
    HK_ENTRY(lists_quantize_##T##_blocks, (kChunkWaves * hk::kWaveSize), blocks<hk::T>) \
    HK_ENTRY(lists_quantize_##T##_mxfp4, (kChunkWaves * hk::kWaveSize), mxfp4<hk::T>)
LISTS_QUANTIZE(bf16)
LISTS_QUANTIZE(f16)
