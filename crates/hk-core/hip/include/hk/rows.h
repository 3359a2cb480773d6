// rows.h: row-wise kernels. The host's side, which picks the kernel and its grid, is hk_core::plan::rows.
//   `Lanes` lanes hold a row, or a tile of it, in registers (reg.h). A block of 64 threads works on 64 / Lanes rows at once, and
//   each thread on `Rows` rows, so that loads overlap; a row of 64 lanes or more takes the whole block. Blocks are persistent
//   (grid-stride loop); on NVIDIA GPUs there is one per batch of rows, and blocks can be larger, with fewer rows per thread.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/reg.h>
#include <hk/types.h>

namespace hk {

/// Threads of a block with `lanes` lanes per row: at least 64.
constexpr int row_threads(int lanes) { return lanes > 64 ? lanes : 64; }

/// Lanes per row of up to `widest` columns: `lanes`, or twice as many where a row is a block and a lane would hold more than
/// kMaxColsPerLane columns.
constexpr int lanes_per_row(int lanes, int widest) {
    return lanes >= 64 && widest / lanes > kMaxColsPerLane ? 2 * lanes : lanes;
}

/// Rows per thread, of the `rows` that the host plans with: where a wave has several rows, at most kLoadsPerLane; more waves take
/// the others.
constexpr int clamp_rows_per_thread(int lanes, int rows) {
    return lanes < 64 && rows > kLoadsPerLane ? kLoadsPerLane : rows;
}

/// Threads of a block with that many more waves.
constexpr int row_threads(int lanes, int rows) {
    return row_threads(lanes) * (rows / clamp_rows_per_thread(lanes, rows));
}

// Two template arguments of a kernel for rows of up to `widest` columns: lanes per row, columns per lane.
#define HK_LANES_AND_COLS(lanes, widest) hk::lanes_per_row(lanes, widest), widest / hk::lanes_per_row(lanes, widest)

/// Rows per thread, given `rows` for 2-byte types: wider types take as many bytes.
template <class T>
constexpr int rows_per_thread(int rows) {
    return sizeof(T) > 2 ? (rows + 1) / 2 : rows;
}

/// A lane's position in a row of any column stride, for scalar loads. It uses no window, so it reaches any address.
template <class T>
struct StridedCursor {
    GlobalPtr<const T> row;
    i64 stride;  // of columns, in elements
    u32 column;
    u32 cols;

    template <int N>
    static constexpr int kLen = 1;

    /// N columns, starting `ahead` columns on; those past the row are zero.
    template <int N>
    HK_FN Vec<T, N> load(int ahead) const {
        using Bits = decltype([] {
            if constexpr (sizeof(T) == 2)
                return u16(0);
            else
                return u32(0);
        }());
        Vec<T, N> v;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            // Past the row: loads the last column, and clears its bits by the sign of the remaining count. A compare for each element
            // would take too many SGPRs.
            u32 place = column + u32(ahead + i);
            opaque(place);
            const auto value = __builtin_bit_cast(Bits, row[i64(place < cols ? place : cols - 1) * stride]);
            v[i] = __builtin_bit_cast(T, Bits(value & Bits(i32(place - cols) >> 31)));
        }
        return v;
    }

    HK_FN StridedCursor reload() const {
        StridedCursor here = *this;
        opaque(here.column);
        return here;
    }
};

/// A block's batch of rows, `first` .. `first + count`; and this lane's first column.
struct RowBatch {
    u64 first;
    u32 count;
    u32 column;
    u32 cols;

    /// Cursor at row `index` of the batch; all out of bounds if `index >= count`. A batch of one row (kSingleRow) ends with its
    /// window; else a lane counts its columns.
    template <class T, Access kAccess, bool kSingleRow>
    HK_FN Cursor<T, kAccess> at(const Global &g, u32 index) const {
        // Fits 32 bits: the host keeps a batch within 2 GiB.
        const u32 stride = u32(g.row_stride());
        const Window window(g.row<T>(first), ((count - 1) * stride + cols) * u32(sizeof(T)));
        const u32 offset = (index * stride + column) * u32(sizeof(T));
        i32 left = Cursor<T, kAccess>::kToEnd;
        if constexpr (!kSingleRow) left = i32(cols - column);
        // Vectorized path: rows past `count` are out of the window. Scalar path: strides may be so large that a batch is one row
        // and the offsets of the others wrap.
        if constexpr (!kSingleRow && kAccess == Access::Scalar) left = index < count ? left : 0;
        return {window, offset, left};
    }

    /// As `at`, for a block-uniform index: the row has a window of its own.
    template <class T, Access kAccess>
    HK_FN Cursor<T, kAccess> at_uniform(const Global &g, u32 index) const {
        const Window window(g.row<T>(first + index), index < count ? cols * u32(sizeof(T)) : 0);
        return {window, column * u32(sizeof(T)), Cursor<T, kAccess>::kToEnd};
    }

    /// Cursor at row `index` of the batch, clamped to the last one, of a tensor of any column stride.
    template <class T>
    HK_FN StridedCursor<T> strided(const Global &g, u32 index) const {
        return {g.row<const T>(first + (index < count ? index : count - 1)), g.strides[3], column, cols};
    }
};

/// Grid-stride loop: calls `f(batch)` for every grid_x()-th batch of `batch_rows` rows; the last may have fewer. `column` is this
/// lane's first column. kSingleRow: a batch is one row. Unless kPersistent, the grid has a block for each batch.
template <bool kSingleRow, bool kPersistent = kPersistentBlocks, class F>
HK_FN void for_row_batches(u32 rows, u32 cols, u32 column, u32 batch_rows, F f) {
    if constexpr (kSingleRow) batch_rows = 1;
    for (u64 first = u64(block_x()) * batch_rows; first < rows; first += u64(grid_x()) * batch_rows) {
        f(RowBatch{first, rows - first < batch_rows ? u32(rows - first) : batch_rows, column, cols});
        if constexpr (!kPersistent) return;
    }
}

/// Rows of T in registers: `Lanes` lanes per row of up to Lanes * ColsPerLane columns, `Rows` rows per thread. This lane's position,
/// and its loads and stores.
template <Access kAccess, class T, int Lanes, int ColsPerLane, int Rows>
struct RowBlock {
    static constexpr Access kPath = kAccess;
    static constexpr int kThreads = row_threads(Lanes);
    static constexpr u32 kRowsPerBlock = kThreads / Lanes;
    static constexpr bool kSingleRow = kRowsPerBlock * Rows == 1;
    using RowT = Row<T, Lanes, kVecLen<T>, ColsPerLane / kVecLen<T>>;
    using RowF = typename RowT::template With<float>;

    const u32 side = kRowsPerBlock == 1 && !kSingleRow ? 0 : thread_x() / Lanes;  // which of the block's rows
    const u32 lane = thread_x() % Lanes;  // position in the row

    /// First column of this lane.
    HK_FN u32 column() const { return lane * kVecLen<T>; }
    /// Index of this lane's row `r` in its batch.
    HK_FN u32 index(int r) const { return u32(r) * kRowsPerBlock + side; }

    /// Cursor at this lane's row `r`.
    HK_FN Cursor<T, kAccess> at(const Global &g, const RowBatch &batch, int r) const {
        if constexpr (kRowsPerBlock == 1 && !kSingleRow)
            return batch.template at_uniform<T, kAccess>(g, index(r));
        else
            return batch.template at<T, kAccess, kSingleRow>(g, index(r));
    }

    /// Reads this lane's share of its rows.
    HK_FN void load(RowT (&x)[Rows], const Global &g, const RowBatch &batch) const {
#pragma unroll
        for (int r = 0; r < Rows; ++r) x[r] = RowT::load(at(g, batch, r));
    }

    /// As `load`, of a tensor whose columns may have any stride on the scalar path.
    HK_FN void load_strided(RowT (&x)[Rows], const Global &g, const RowBatch &batch) const {
        if constexpr (kAccess == Access::Scalar) {
            if (g.strides[3] != 1) {
#pragma unroll
                for (int r = 0; r < Rows; ++r) x[r] = RowT::load(batch.strided<T>(g, index(r)));
                return;
            }
        }
        load(x, g, batch);
    }

    /// Writes this lane's share of row `r`.
    HK_FN void store(const RowT &x, const Global &g, const RowBatch &batch, int r) const { x.store(at(g, batch, r)); }

    /// The same of the row whose chunks `make(k)` gives.
    template <class Make>
    HK_FN void store(Make make, const Global &g, const RowBatch &batch, int r) const {
        RowT::store(at(g, batch, r), make);
    }

    /// s = x + residual_in, rounded to T if `round`; if kStore, residual_out is the rounded sum.
    template <bool kStore>
    HK_FN void add(RowF (&s)[Rows], const RowT (&x)[Rows], const Global &residual_in, const Global &residual_out,
                   bool round, const RowBatch &batch) const {
        RowT residual[Rows];
        load(residual, residual_in, batch);
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            s[r] = widen(x[r]) + widen(residual[r]);
            if (kStore || round) {
                const RowT rounded = narrow<T>(s[r]);
                if constexpr (kStore) store(rounded, residual_out, batch, r);
                if (round) s[r] = widen(rounded);
            }
        }
    }

    /// Stores one value per row, from the row's first lane.
    HK_FN void store_per_row(const float (&value)[Rows], const Global &g, const RowBatch &batch) const {
        if (lane != 0) return;
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            if (index(r) < batch.count) g.row<float>(0)[batch.first + index(r)] = value[r];
        }
    }

    /// Stores +0 to the columns of g past those of the batch (padding).
    HK_FN void zero_pads(const Global &g, const RowBatch &batch) const {
        constexpr int kLen = kAccess == Access::Vectorized ? kVecLen<T> : 1;
        // Rare: computed here, so that it holds no registers elsewhere.
        u32 pad = batch.cols + lane * kLen;
        u32 zero = 0;
        opaque(pad);
        opaque(zero);
        for (; pad < g.cols(); pad += Lanes * kLen) {
            const RowBatch here = {batch.first, batch.count, pad, g.cols()};
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                const Vec<float, kLen> zeros = __builtin_bit_cast(float, zero);
                at(g, here, r).template store<kLen>(narrow<T>(zeros), 0);
            }
        }
    }
};

/// Calls `f(batch)` for each tile of `kCols` columns of a row that one block works on; `column` is this lane's first column of a
/// tile.
template <int kCols, class F>
HK_FN void for_tiles(u64 row, u32 cols, u32 column, F f) {
    for (u32 tile = 0; tile < cols; tile += kCols) f(RowBatch{row, 1, tile + column, cols});
}

}  // namespace hk
