// tile_coord.h: which output tile and which slice of K a block computes.
#pragma once

#include <gemm/args.h>

#include <hk/block.h>
#include <hk/wave.h>

namespace gemm {
/// Coordinates of a block's tile. Blocks of one XCD share an L2 and get neighbouring tiles (hk::xcd_remap). `group` M tiles share one N
/// tile before the next: they read its rows of w once, and their rows of a stay in L2.
struct TileCoord {
    u32 batch = 0, split = 0, m_tile = 0, n_tile = 0;
    u32 matrix = 0;  // index of w

    HK_FN TileCoord(u32 of_batch, u32 of_matrix) : batch(of_batch), matrix(of_matrix) {}

    HK_FN TileCoord(const Grid &g, u32 block) {
        u32 tile = hk::xcd_remap(block, g.blocks);
        const u32 of_split = g.m_tiles * g.n_tiles;
        // A division is some 15 instructions before the first load; most launches need none.
        if (of_split != g.blocks) {
            const u32 slice = tile / of_split;
            tile -= slice * of_split;
            batch = slice / g.splits;
            split = slice - batch * g.splits;
            matrix = batch;
        }
        place(tile, g.m_tiles, g.n_tiles, g.group);
    }

    /// Coordinates of tile `tile` of an output, `group` M tiles at a time.
    HK_FN void place(u32 tile, u32 m_tiles, u32 n_tiles, u32 group) {
        u32 first = 0, height = m_tiles;
        if (group < m_tiles) {
            const u32 of_group = group * n_tiles;
            const u32 index = tile / of_group;
            first = index * group;
            height = m_tiles - first < group ? m_tiles - first : group;
            tile -= index * of_group;
        }
        n_tile = height == 1 ? tile : tile / height;
        m_tile = first + tile - n_tile * height;
    }

    /// Finds the matrix of a tile of `kM` rows among `rows`; false if none of its rows is computed.
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

/// The bytes [from, to) of each row of K that a split-K slice covers.
struct KRange {
    u32 from, to;

    HK_FN KRange(const Grid &g, u32 split) {
        // Trailing slices can be empty.
        const u64 first = u64(split) * g.split_bytes;
        from = first < g.k_bytes ? u32(first) : g.k_bytes;
        to = g.k_bytes - from < g.split_bytes ? g.k_bytes : from + g.split_bytes;
    }
};

}  // namespace gemm
