// tiles.h: elementwise kernels over rows. The host's side, which picks the tiles and the grid, is src/tiles.rs.
//   The units of a tensor (16-byte vectors of the main input, or elements on the scalar path) are numbered across rows. A wave
//   takes a tile of them at a time: kGroups coalesced loads of 16 bytes a lane. Short rows share a wave, long rows are split
//   over waves. Waves loop over the tensor (grid stride); on NVIDIA GPUs several waves share a tile.
//   A contiguous tensor is split into rows that tiles divide; the last row may be short.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/types.h>

namespace tiles {

using hk::Access;
using hk::u32;
using hk::u64;
using hk::Vec;
using hk::Window;

/// How an elementwise kernel walks over its tensors.
struct Shape {
    u64 numel;  // elements of contiguous tensors, in whole units; 0: strided rows
    u32 rows;
    u32 units;  // of a row
    u32 tile;  // units that a block takes at a time
    u32 step_rows;  // from a block's tile to its next
    u32 step_units;
    float inv_units;  // 1 / units
    u32 tail;  // elements of contiguous tensors after the last whole unit
    u32 inverse;  // (2^32 - 1) / units, for hk::DivMod
};

/// Element types chosen at run time: the index that `float_index` of hk-core gives.
enum class Type : u32 { Bf16 = 0, F16 = 1, F32 = 2 };

/// Calls `f` with a value of the type.
template <class F>
HK_FN void with_type(Type type, F f) {
    switch (type) {
        case Type::Bf16:
            return f(hk::bf16{});
        case Type::F16:
            return f(hk::f16{});
        case Type::F32:
            return f(hk::f32{});
    }
    __builtin_unreachable();
}

/// Groups of a tile for each lane of a wave, `GROUPS` in src/tiles.rs.
template <Access kAccess>
inline constexpr int kTileGroups = kAccess == Access::Vectorized ? 4 : 1;

/// Groups of a lane, each a load from up to `kInputs` tensors; other waves of the block have the others. At least two per lane,
/// to amortize the work of a tile over a long formula.
template <Access kAccess, int kInputs>
inline constexpr int kGroups = [] {
    constexpr int kEnough = (2 * hk::kLoadsPerLane + kInputs - 1) / kInputs;
    return kEnough < kTileGroups<kAccess> ? kEnough : kTileGroups<kAccess>;
}();

/// Threads of a block, which processes one tile at a time.
template <Access kAccess, int kGroups>
inline constexpr int kThreads = hk::kWaveSize * kTileGroups<kAccess> / kGroups;

/// Vectorized tiles, and a lane's share of them.
template <int kInputs>
inline constexpr int kVectorThreads = kThreads<Access::Vectorized, kGroups<Access::Vectorized, kInputs>>;

/// A lane's places in a tile: kGroups groups of M elements. A group is one place on the vectorized path, M on the scalar path.
template <Access kAccess, int M, int kGroups>
struct Tile {
    static constexpr int kUnit = kAccess == Access::Vectorized ? M : 1;  // elements
    static constexpr int kPlaces = kGroups * M / kUnit;

    const Shape &shape;
    u64 row;  // the first row
    u32 down[kPlaces];  // rows below it
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
            // Both numbers are below 1024: adding a half makes the truncated quotient exact.
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
            if constexpr (kAccess == Access::Vectorized) {
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
            if constexpr (kAccess == Access::Vectorized) {
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

    /// Product of factors below 2^24.
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

    HK_FN u32 within(int i, u32 offset) const { return index(i) < shape.tile ? offset : Window::kOutOfBounds; }

    template <class T>
    HK_FN static hk::Cursor<T, kAccess> at(const Window &rows, u32 offset) {
        return {rows, offset, hk::Cursor<T, kAccess>::kToEnd};
    }
};

/// Calls `f(tile)` for each tile of this block.
template <Access kAccess, int M, int kGroups, class F>
HK_FN void for_tiles(const Shape &shape, F f) {
    const u32 first = hk::block_x() * shape.tile;
    const hk::DivMod rows(first, shape.units, shape.inverse);
    u64 row = rows.quotient;
    u32 unit = rows.remainder;
    while (row < shape.rows) {
        f(Tile<kAccess, M, kGroups>(shape, row, unit));
        if constexpr (!hk::kPersistentBlocks) return;  // one block per tile
        row += shape.step_rows;
        unit += shape.step_units;
        if (unit >= shape.units) {
            unit -= shape.units;
            row += 1;
        }
    }
}

/// Calls `f(index)` in one lane for each element after the last whole vector of contiguous tensors.
template <class F>
HK_FN void for_tail(const Shape &shape, F f) {
    if (hk::block_x() == 0 && hk::thread_x() < shape.tail) f(shape.numel + hk::thread_x());
}

}  // namespace tiles
