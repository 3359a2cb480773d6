// tiles.h: how the quantizers map a matrix to lanes.
#pragma once

#include <hk/arch.h>
#include <hk/quant.h>
#include <hk/reg.h>
#include <hk/rows.h>

namespace quant {

using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using hk::u8;

/// Columns of a lane's chunk: 32 bytes of input, so that the quantized values of bf16 are stored 16 bytes at a time.
template <class T>
inline constexpr int kChunk = 32 / int(sizeof(T));

/// Rounds the scaled values of a row to the quantized type.
template <hk::QuantType kKind, int L, int N, int C>
HK_FN hk::Row<u8, L, N, C> quantize(const hk::Row<float, L, N, C> &row) {
    hk::Row<u8, L, N, C> out;
#pragma unroll
    for (int k = 0; k < C; ++k) {
        out.chunk[k] = __builtin_bit_cast(hk::Vec<u8, N>, hk::quantize_packed<kKind, N>(row.chunk[k]));
    }
    return out;
}

template <int L, int N, int C>
HK_FN u32 finite_max(const hk::Row<float, L, N, C> &row) {
    hk::FiniteMax max;
#pragma unroll
    for (int k = 0; k < C; ++k) max.add(row.chunk[k]);
    return max.top;
}

/// Calls `f(row, tile)` for every grid_x()-th tile of the matrix, `tiles` per row, from block_x() on.
template <class F>
HK_FN void for_row_tiles(u64 rows, u32 tiles, F f) {
    const u32 row_step = hk::grid_x() / tiles, tile_step = hk::grid_x() % tiles;
    u64 row = hk::block_x() / tiles;
    u32 tile = hk::block_x() % tiles;
    while (row < rows) {
        f(row, tile);
        row += row_step;
        tile += tile_step;
        if (tile >= tiles) tile -= tiles, ++row;
    }
}

/// Elementwise work. If Lanes is less than a wave, rows of up to Lanes * kChunk columns share a wave: `f` gets batches of
/// 64 / Lanes * Rows rows. Longer rows are cut into tiles of kTile columns, and each wave takes every grid_x()-th tile of the
/// matrix: `f` gets a batch of one row that begins at this lane's first column of the tile. Unless kStay, each tile has a
/// block.
template <int Lanes, int kTile, bool kStay = hk::kPersistentBlocks, class F>
HK_FN void for_tiles(u32 rows, u32 cols, u32 column, u32 batch_rows, F f) {
    if constexpr (Lanes < hk::kWaveSize) {
        hk::for_row_batches<false, kStay>(rows, cols, column, batch_rows, f);
    } else if constexpr (!kStay) {
        const u32 tiles = (cols + kTile - 1) / kTile, row = hk::block_x() / tiles;
        const u32 tile = hk::block_x() - row * tiles;
        if (row < rows) f(RowBatch{row, 1, tile * kTile + column, cols});
    } else {
        for_row_tiles(rows, (cols + kTile - 1) / kTile,
                      [&](u64 row, u32 tile) { f(RowBatch{row, 1, tile * kTile + column, cols}); });
    }
}

}  // namespace quant
