// rows.h: kernels that work row by row. The host's side, which picks the kernel and its grid, is hk_core::rowwise.
//   `Lanes` lanes hold a row, or a tile of it, in registers (reg.h). A block of 64 threads works on 64 / Lanes rows side by
//   side, `Rows` times over, so that its loads overlap; a row of 64 lanes or more is one block. Blocks step through the
//   matrix; on NVIDIA GPUs there are as many as it has batches of rows, and they can be longer, with fewer rows for a lane.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/reg.h>
#include <hk/types.h>

namespace hk {

/// Threads of a block whose rows have `lanes` lanes each: at least 64, which take several rows side by side.
constexpr int row_threads(int lanes) { return lanes > 64 ? lanes : 64; }

/// Lanes of a row of up to `widest` columns: `lanes`; twice as many, if they are a block, where a lane would have more
/// than kMostLaneCols.
constexpr int row_lanes(int lanes, int widest) { return lanes >= 64 && widest / lanes > kMostLaneCols ? 2 * lanes : lanes; }

/// Rows that a lane has in hand of the `rows` that the host counts with, where a wave has several rows: others are of other waves.
constexpr int lane_rows(int lanes, int rows) { return lanes < 64 && rows > kLaneLoads ? kLaneLoads : rows; }

/// Threads of a block with as many waves as that takes.
constexpr int row_threads(int lanes, int rows) { return row_threads(lanes) * (rows / lane_rows(lanes, rows)); }

// Two template arguments of a kernel for rows of up to `widest` columns: the lanes of a row, and the columns of a lane.
#define HK_LANES_AND_COLS(lanes, widest) hk::row_lanes(lanes, widest), widest / hk::row_lanes(lanes, widest)

/// Rows that a lane has in hand at a time where it has `rows` of a type of two bytes: as many bytes of wider types.
template <class T>
constexpr int rows_in_hand(int rows) { return sizeof(T) > 2 ? (rows + 1) / 2 : rows; }

/// A lane's place in a row of any column stride, to read it by elements. It asks for no window, and so reaches any address.
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
            if constexpr (sizeof(T) == 2) return u16(0);
            else return u32(0);
        }());
        Vec<T, N> v;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            // The last column in place of one past the row, and its bits cleared by the sign of what is left: a compare for
            // each element would fill the scalar registers.
            u32 place = column + u32(ahead + i);
            forget(place);
            const auto value = __builtin_bit_cast(Bits, row[i64(place < cols ? place : cols - 1) * stride]);
            v[i] = __builtin_bit_cast(T, Bits(value & Bits(i32(place - cols) >> 31)));
        }
        return v;
    }

    HK_FN StridedCursor anew() const {
        StridedCursor here = *this;
        forget(here.column);
        return here;
    }
};

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

    /// As `at`, for an index that is the same for all lanes of the block: the row ends with a window of its own.
    template <class T, Access kAccess>
    HK_FN Cursor<T, kAccess> alone_at(const Global &g, u32 index) const {
        const Window window(g.row<T>(first + index), index < count ? cols * u32(sizeof(T)) : 0);
        return {window, column * u32(sizeof(T)), Cursor<T, kAccess>::kToEnd};
    }

    /// Cursor at row `index` of the batch, the last one's if that is beyond `count`, of a tensor of any column stride.
    template <class T>
    HK_FN StridedCursor<T> strided(const Global &g, u32 index) const {
        return {g.row<const T>(first + (index < count ? index : count - 1)), g.strides[3], column, cols};
    }
};

/// Calls `f(batch)` for each batch of rows of this block: every grid_x()-th, `batch_rows` rows each; the last may have
/// fewer. `column` is this lane's first one. If kAlone, a batch is one row. Unless kStay, there is a block for each.
template <bool kAlone, bool kStay = kBlocksStay, class F>
HK_FN void for_row_batches(u32 rows, u32 cols, u32 column, u32 batch_rows, F f) {
    if constexpr (kAlone) batch_rows = 1;
    for (u64 first = u64(block_x()) * batch_rows; first < rows; first += u64(grid_x()) * batch_rows) {
        f(RowBatch{first, rows - first < batch_rows ? u32(rows - first) : batch_rows, column, cols});
        if constexpr (!kStay) return;
    }
}

/// Rows of T in registers: `Lanes` lanes hold a row, up to Lanes * ColsPerLane columns, and have `Rows` rows in hand at a
/// time. This lane's place among them, and what it moves.
template <Access kAccess, class T, int Lanes, int ColsPerLane, int Rows>
struct RowBlock {
    static constexpr Access kPath = kAccess;
    static constexpr int kThreads = row_threads(Lanes);
    static constexpr u32 kAbreast = kThreads / Lanes;
    static constexpr bool kAlone = kAbreast * Rows == 1;
    using RowT = Row<T, Lanes, kVecLen<T>, ColsPerLane / kVecLen<T>>;
    using RowF = typename RowT::template With<float>;

    const u32 side = kAbreast == 1 && !kAlone ? 0 : thread_x() / Lanes;  // place among the rows abreast
    const u32 lane = thread_x() % Lanes;  // place in the row

    /// First column of this lane.
    HK_FN u32 column() const { return lane * kVecLen<T>; }
    /// Place of row `r` of this lane in its batch.
    HK_FN u32 index(int r) const { return u32(r) * kAbreast + side; }

    /// Cursor at this lane's row `r`.
    HK_FN Cursor<T, kAccess> at(const Global &g, const RowBatch &batch, int r) const {
        if constexpr (kAbreast == 1 && !kAlone) return batch.template alone_at<T, kAccess>(g, index(r));
        else return batch.template at<T, kAccess, kAlone>(g, index(r));
    }

    /// Reads this lane's share of its rows.
    HK_FN void load(RowT (&x)[Rows], const Global &g, const RowBatch &batch) const {
#pragma unroll
        for (int r = 0; r < Rows; ++r) x[r] = RowT::load(at(g, batch, r));
    }

    /// As `load`, of a tensor whose columns may have any stride if access is by elements.
    HK_FN void load_strided(RowT (&x)[Rows], const Global &g, const RowBatch &batch) const {
        if constexpr (kAccess == Access::Elements) {
            if (g.strides[3] != 1) {
#pragma unroll
                for (int r = 0; r < Rows; ++r) x[r] = RowT::load(batch.strided<T>(g, index(r)));
                return;
            }
        }
        load(x, g, batch);
    }

    /// Writes this lane's share of row `r`.
    HK_FN void store(const RowT &x, const Global &g, const RowBatch &batch, int r) const {
        x.store(at(g, batch, r));
    }

    /// The same of the row whose chunks `make(k)` gives.
    template <class Make>
    HK_FN void store(Make make, const Global &g, const RowBatch &batch, int r) const {
        RowT::store(at(g, batch, r), make);
    }

    /// s = x + residual_in, rounded to T if `round`; if kStore, residual_out gets the rounded sum.
    template <bool kStore>
    HK_FN void add(RowF (&s)[Rows], const RowT (&x)[Rows], const Global &residual_in, const Global &residual_out, bool round,
                   const RowBatch &batch) const {
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

    /// One value per row, from the row's first lane.
    HK_FN void store_per_row(const float (&value)[Rows], const Global &g, const RowBatch &batch) const {
        if (lane != 0) return;
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            if (index(r) < batch.count) g.row<float>(0)[batch.first + index(r)] = value[r];
        }
    }

    /// Writes +0 to the columns of g past those of the batch.
    HK_FN void zero_pads(const Global &g, const RowBatch &batch) const {
        constexpr int kLen = kAccess == Access::Vectors ? kVecLen<T> : 1;
        // Made here: this is rare, and is not to hold registers where it does not happen.
        u32 pad = batch.cols + lane * kLen;
        u32 zero = 0;
        forget(pad);
        forget(zero);
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

/// Calls `f(batch)` for each tile of `kCols` columns of a row that one block works on alone; `column` is this lane's first one
/// in a tile.
template <int kCols, class F>
HK_FN void for_tiles(u64 row, u32 cols, u32 column, F f) {
    for (u32 tile = 0; tile < cols; tile += kCols) f(RowBatch{row, 1, tile + column, cols});
}

}  // namespace hk
