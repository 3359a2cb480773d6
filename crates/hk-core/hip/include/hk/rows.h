// rows.h: kernels that work row by row. The host's side, which picks the kernel and its grid, is hk_core::rowwise.
//   `Lanes` lanes hold a row, or a tile of it, in registers (reg.h). A wave works on kWaveSize / Lanes rows side by
//   side, `Rows` times over, so that its loads overlap; a row of more lanes than a wave is one block. Blocks step
//   through the matrix.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>

namespace hk {

/// Threads of a block whose rows have `lanes` lanes each.
constexpr int row_threads(int lanes) { return lanes > kWaveSize ? lanes : kWaveSize; }

/// The rows that a block has in hand, from `first` on, `count` of them; and this lane's first column.
struct RowBatch {
    u64 first;
    u32 count;
    u32 column;
    u32 cols;

    /// Cursor at row `index` of the batch, none of it if that is beyond `count`. A batch that can only be of
    /// one row, kAlone, leaves it to the window to end the row; else a lane counts its columns.
    template <class T, Access kAccess, bool kAlone>
    HK_FN Cursor<T, kAccess> at(const Global &g, u32 index) const {
        // Fits 32 bits: the host keeps a batch within 2 GiB.
        const u32 stride = u32(g.row_stride());
        const Window window(g.row<T>(first), ((count - 1) * stride + cols) * u32(sizeof(T)));
        const u32 offset = (index * stride + column) * u32(sizeof(T));
        i32 left = Cursor<T, kAccess>::kToEnd;
        if constexpr (!kAlone) left = i32(cols - column);
        // By vectors, the rows beyond `count` lie beyond the window. By elements, strides may be so large that
        // a batch is one row and the offsets of the others wrap.
        if constexpr (!kAlone && kAccess == Access::Elements) left = index < count ? left : 0;
        return {window, offset, left};
    }
};

/// Calls `f(batch)` for each batch of rows of this block: every grid_x()-th, `batch_rows` rows each; the last may have
/// fewer. `column` is this lane's first one. If kAlone, a batch is one row.
template <bool kAlone, class F>
HK_FN void for_row_batches(u32 rows, u32 cols, u32 column, u32 batch_rows, F f) {
    if constexpr (kAlone) batch_rows = 1;
    for (u64 first = u64(block_x()) * batch_rows; first < rows; first += u64(grid_x()) * batch_rows) {
        f(RowBatch{first, rows - first < batch_rows ? u32(rows - first) : batch_rows, column, cols});
    }
}

}  // namespace hk
