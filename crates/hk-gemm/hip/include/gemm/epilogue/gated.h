// gated.h: gated outputs, y = activation(gate) * value, where w holds the gate rows, then as many value rows.
#pragma once

#include <gemm/epilogue/store.h>

namespace gemm {
/// Row of w, from `first` on, for row `row` of a tile: each `kStrip` rows of the tile are kStrip / 2 gates, then their values.
/// w has `rows` rows; a result of `rows` means none.
template <u32 kStrip>
HK_FN u32 gated_row(u32 row, u32 first, u32 rows) {
    constexpr u32 kGates = kStrip / 2;
    const u32 gate = row / kStrip * kGates + row % kGates;
    if (first + gate >= rows / 2) return rows;
    return row % kStrip < kGates ? gate : gate + rows / 2;
}

/// Gated outputs (m, n .. n + N). Partial sums store the gates in the first e.cols columns, then the values; the split-K reduction
/// applies the activation.
template <int N>
HK_FN void run_gated_epilogue(const Epilogue &e, const TileCoord &coord, u32 m, u32 n, Vec<float, N> gate,
                              Vec<float, N> value) {
    if (m >= e.rows || n >= e.cols) return;
    if (e.store == StoreMode::Partial) {
        const i64 at = i64(coord.split) * e.y_split + i64(coord.batch) * e.y_batch + i64(m) * e.y_row + n;
        store_floats<float, N>(e.y, at, gate, e.cols - n, e.vectors);
        store_floats<float, N>(e.y, at + e.cols, value, e.cols - n, e.vectors && e.cols % 4 == 0);
        return;
    }
    store_output<N>(e, coord, m, n, activate<N>(e.activation, gate) * value);
}

}  // namespace gemm
