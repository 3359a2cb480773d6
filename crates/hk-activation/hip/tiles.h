// tiles.h: elementwise kernels over rows. The host's side, which picks the tiles and the grid, is src/tiles.rs.
//   The units of a tensor (vectors of 16 bytes of the main input, or elements) are counted through all rows, and each wave
//   takes a run of them at a time: kGroups loads of 16 bytes a lane, neighbours side by side. So short rows share a wave
//   without gaps, and long ones are shared by waves. Waves step through the tensor; on NVIDIA GPUs several share a run.
//   A tensor without gaps is cut into rows that tiles divide; the last of these may be short.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/types.h>

namespace tiles {

using hk::Access;
using hk::Vec;
using hk::Window;
using hk::u32;
using hk::u64;

/// How an elementwise kernel walks: the tail of its `Params`, the same fields as `Shape` in src/tiles.rs.
struct Shape {
    u64 numel;        // elements of tensors without gaps, in whole units; 0: rows have their own strides
    u32 rows;         //
    u32 units;        // of a row
    u32 tile;         // units that a block takes at a time
    u32 step_rows;    // from a block's tile to its next
    u32 step_units;   //
    float inv_units;  // 1 / units
    u32 tail;         // elements of tensors without gaps that are behind the last whole unit
    u32 inverse;      // (2^32 - 1) / units, for hk::Quotient
};

/// Element types that are chosen at run time, `type_code` in src/tiles.rs.
enum class Type : u32 { Bf16 = 0, F16 = 1, F32 = 2 };

/// Calls `f` with a value of the type.
template <class F>
HK_FN void with_type(Type type, F f) {
    switch (type) {
        case Type::Bf16: return f(hk::bf16{});
        case Type::F16: return f(hk::f16{});
        case Type::F32: return f(hk::f32{});
    }
    __builtin_unreachable();
}

/// Groups of a tile for each lane of a wave, `GROUPS` in src/tiles.rs.
template <Access kAccess>
inline constexpr int kTileGroups = kAccess == Access::Vectors ? 4 : 1;

/// Those of a lane, where each is a load from up to `kInputs` tensors; other waves of the block have the others. Twice as many as
/// a lane has at least: what is done once for all of them would weigh beside a long formula.
template <Access kAccess, int kInputs>
inline constexpr int kGroups = [] {
    constexpr int kEnough = (2 * hk::kLaneLoads + kInputs - 1) / kInputs;
    return kEnough < kTileGroups<kAccess> ? kEnough : kTileGroups<kAccess>;
}();

/// Threads of a block, which takes a tile at a time.
template <Access kAccess, int kGroups>
inline constexpr int kThreads = hk::kWaveSize * kTileGroups<kAccess> / kGroups;

/// Those by vectors, with what each lane takes of them.
template <int kInputs>
inline constexpr int kVectorThreads = kThreads<Access::Vectors, kGroups<Access::Vectors, kInputs>>;

/// A lane's places in a tile: kGroups groups of M elements. By vectors a group is one place, by elements M.
template <Access kAccess, int M, int kGroups>
struct Tile {
    static constexpr int kUnit = kAccess == Access::Vectors ? M : 1;  // elements
    static constexpr int kPlaces = kGroups * M / kUnit;

    const Shape &shape;
    u64 row;             // the first one
    u32 down[kPlaces];   // rows below it
    u32 place[kPlaces];  // unit in its row

    template <class T>
    using Groups = Vec<T, M>[kGroups];

    HK_FN Tile(const Shape &shape, u64 row, u32 unit) : shape(shape), row(row) {
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) place[i] = unit + index(i);
        if (shape.units >= shape.tile) {
#pragma unroll
            for (int i = 0; i < kPlaces; ++i) down[i] = place[i] >= shape.units ? 1 : 0;
        } else {
            // Both numbers are below 1024: a half more, and the quotient is rounded down correctly.
#pragma unroll
            for (int i = 0; i < kPlaces; ++i) down[i] = u32((float(place[i]) + 0.5f) * shape.inv_units);
        }
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) place[i] -= product(down[i], shape.units);
    }

    /// Reads `tensor`, from `column` on.
    template <class T>
    HK_FN void load(const hk::Global &tensor, Groups<T> &out, u32 column = 0) const {
        const Window rows = window<T>(tensor);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            if constexpr (kAccess == Access::Vectors) {
                out[g] = at<T>(rows, offset<T>(tensor, g) + column * u32(sizeof(T))).template load<M>(0);
            } else {
#pragma unroll
                for (int i = 0; i < M; ++i) {
                    out[g][i] = rows.load<T>(offset<T>(tensor, g * M + i) + column * u32(sizeof(T)));
                }
            }
        }
    }

    /// Writes `tensor`, with one rounding.
    template <class T>
    HK_FN void store(const hk::Global &tensor, const Groups<float> &values) const {
        const Window rows = window<T>(tensor);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const Vec<T, M> narrow = hk::narrow<T, M>(values[g]);
            if constexpr (kAccess == Access::Vectors) {
                at<T>(rows, within(g, offset<T>(tensor, g))).template store<M>(narrow, 0);
            } else {
#pragma unroll
                for (int i = 0; i < M; ++i) {
                    rows.store(T(narrow[i]), within(g * M + i, offset<T>(tensor, g * M + i)));
                }
            }
        }
    }

private:
    HK_FN static u32 index(int i) { return hk::thread_x() + u32(i * kThreads<kAccess, kGroups>); }

    /// Of factors below 2^24.
    HK_FN static u32 product(u32 a, u32 b) { return (a & 0xffffffu) * (b & 0xffffffu); }

    HK_FN u64 stride(const hk::Global &tensor) const {
        return shape.numel ? u64(shape.units) * kUnit : u64(tensor.row_stride());
    }

    /// From the first row of the tile to the tensor's end.
    template <class T>
    HK_FN Window window(const hk::Global &tensor) const {
        constexpr u64 kMost = 0x7ffffff0;
        const u64 before = row * stride(tensor);
        const u64 span = shape.numel ? shape.numel : (shape.rows - 1) * stride(tensor) + tensor.cols();
        const u64 bytes = (span - before) * sizeof(T);
        const auto base = reinterpret_cast<hk::GlobalPtr<T>>(tensor.data) + before;
        return Window(base, u32(bytes < kMost ? bytes : kMost));
    }

    // Where a tile can have several rows, the host keeps strides below 2^24 bytes.
    template <class T>
    HK_FN u32 offset(const hk::Global &tensor, int i) const {
        return product(down[i], u32(stride(tensor) * sizeof(T))) + place[i] * u32(kUnit * sizeof(T));
    }

    HK_FN u32 within(int i, u32 offset) const { return index(i) < shape.tile ? offset : Window::kBeyond; }

    template <class T>
    HK_FN static hk::Cursor<T, kAccess> at(const Window &rows, u32 offset) {
        return {rows, offset, hk::Cursor<T, kAccess>::kToEnd};
    }
};

/// Calls `f(tile)` for each tile of this block.
template <Access kAccess, int M, int kGroups, class F>
HK_FN void for_tiles(const Shape &shape, F f) {
    const u32 first = hk::block_x() * shape.tile;
    const hk::Quotient rows(first, shape.units, shape.inverse);
    u64 row = rows.whole;
    u32 unit = rows.rest;
    while (row < shape.rows) {
        f(Tile<kAccess, M, kGroups>(shape, row, unit));
        if constexpr (!hk::kBlocksStay) return;  // there is a block for each tile
        row += shape.step_rows;
        unit += shape.step_units;
        if (unit >= shape.units) {
            unit -= shape.units;
            row += 1;
        }
    }
}

/// Calls `f(index)` in one lane for each element behind the last whole vector of tensors without gaps.
template <class F>
HK_FN void for_tail(const Shape &shape, F f) {
    if (hk::block_x() == 0 && hk::thread_x() < shape.tail) f(shape.numel + hk::thread_x());
}

}  // namespace tiles
