// problem.h: what a GEMM is given, and which part of it a block makes.
//   y[b, m, n] = epilogue(sum over k of x[b, m, k] w[b, n, k])
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/global.h>
#include <hk/pipeline.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace gemm {
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;

/// An operand of a product, rows of K; same layout as `Operand` in src/problem.rs.
struct Operand {
    u64 data;
    i64 batch;  // stride, in bytes
    hk::RowLayout layout;
    u32 rows;

    /// A row whose index is a multiple of 16.
    HK_FN GlobalPtr<const u8> at(u32 batch_index, u32 row_index) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(batch_index) * batch + layout.offset(row_index);
    }
};
static_assert(sizeof(Operand) == 48, "same layout as in Rust");

/// How the tiles of an output are shared out; same layout as `Grid` in src/problem.rs.
struct Grid {
    u32 m_tiles, n_tiles;  // of an output
    u32 group;             // tiles of M that are walked together, see `Work`
    u32 splits;            // of K
    u32 split_bytes;       // of a row of K, one split
    u32 k_bytes;           // of a row
    u32 blocks;            // batches * splits * m_tiles * n_tiles
    u32 pad;
};

/// How rows of x choose among the matrices w, on the device.
enum class Grouping : u32 {
    None = 0,    ///< batch b has matrix b
    Masked = 1,  ///< likewise, for its first groups[b] rows; outputs of the others are left as they are
    Rows = 2,    ///< row m has matrix groups[m], the same for all rows of a tile that have one; -1: none, its outputs are left
};

/// Same layout as `Groups` in src/problem.rs.
struct Groups {
    u64 data;  // i32
    Grouping kind;
    u32 matrices;

    HK_FN GlobalPtr<const int> list() const { return reinterpret_cast<GlobalPtr<const int>>(data); }

    /// Whether row m of a batch has outputs.
    HK_FN bool has(u32 batch, u32 m) const {
        if (kind == Grouping::None) return true;
        return kind == Grouping::Masked ? int(m) < list()[batch] : u32(list()[m]) < matrices;
    }
};
static_assert(sizeof(Groups) == 16, "same layout as in Rust");

/// Where a block finds itself in a kernel of one product: its index, its LDS, and the product's parameters, to be read anew
/// (hk::read_anew).
struct Alone {
    HK_FN static u32 block() { return hk::block_x(); }
    template <class Lds>
    HK_FN static Lds &lds() {
        return hk::block_lds<Lds>();
    }
    template <class Params>
    HK_FN static const Params &anew(const Params &p) {
        return hk::read_anew(p);
    }
};

/// A block's tile. Blocks of one XCD, which share an L2, have neighbouring tiles (hk::by_xcd). In that order, `group` tiles of
/// M are taken with one tile of N after the other: they share its rows of w while their own rows of x stay in L2.
struct Work {
    u32 batch = 0, split = 0, m_tile = 0, n_tile = 0;
    u32 matrix = 0;  // of w

    HK_FN Work(u32 of_batch, u32 of_matrix) : batch(of_batch), matrix(of_matrix) {}

    HK_FN Work(const Grid &g, u32 block) {
        u32 tile = hk::by_xcd(block, g.blocks);
        const u32 of_split = g.m_tiles * g.n_tiles;
        const u32 plane = tile / of_split;
        tile -= plane * of_split;
        batch = plane / g.splits;
        split = plane - batch * g.splits;
        matrix = batch;

        place(tile, g.m_tiles, g.n_tiles, g.group);
    }

    /// Tile `tile` of an output, with `group` tiles of M walked together.
    HK_FN void place(u32 tile, u32 m_tiles, u32 n_tiles, u32 group) {
        const u32 of_group = group * n_tiles;
        const u32 index = tile / of_group;
        const u32 first = index * group;
        const u32 height = m_tiles - first < group ? m_tiles - first : group;
        tile -= index * of_group;
        n_tile = tile / height;
        m_tile = first + tile - n_tile * height;
    }

    /// Finds the matrix of a tile of `kM` rows among `rows`; false if no row of it has outputs.
    template <u32 kM>
    HK_FN bool find_matrix(const Groups &groups, u32 rows) {
        const u32 first = m_tile * kM;
        if (groups.kind == Grouping::Masked) return int(first) < groups.list()[batch];
        if (groups.kind == Grouping::Rows) {
            int found = -1;
            for (u32 i = hk::lane_id(); i < kM && first + i < rows; i += hk::kWaveSize) {
                const int of_row = groups.list()[first + i];
                if (u32(of_row) < groups.matrices) found = of_row;
            }
            found = hk::group_reduce<hk::kWaveSize>(found, [](int a, int b) { return a > b ? a : b; });
            matrix = u32(found);
            return matrix < groups.matrices;
        }
        return true;
    }
};

/// What a block reads of K: bytes [from, to) of each row.
struct Range {
    u32 from, to;

    HK_FN Range(const Grid &g, u32 split) {
        // Of more parts than there is K for, the last ones are empty.
        const u64 first = u64(split) * g.split_bytes;
        from = first < g.k_bytes ? u32(first) : g.k_bytes;
        to = g.k_bytes - from < g.split_bytes ? g.k_bytes : from + g.split_bytes;
    }
};

/// Which of the rows of w from `first` on row `row` of a tile is, if they are gates, then as many values: a strip of `kStrip`
/// rows of the tile is half gates, then their values. `rows` of w in all; a row past these is none.
template <u32 kStrip>
HK_FN u32 gated_row(u32 row, u32 first, u32 rows) {
    constexpr u32 kGates = kStrip / 2;
    const u32 gate = row / kStrip * kGates + row % kGates;
    if (first + gate >= rows / 2) return rows;
    return row % kStrip < kGates ? gate : gate + rows / 2;
}

}  // namespace gemm
