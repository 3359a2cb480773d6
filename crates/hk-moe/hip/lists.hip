// lists.hip: gates sorted by expert: lists padded to tiles (moe_align_block_size)
//   ids       [gates] i32         an id outside 0..experts: the gate is in no list
//   sorted    [sorted_len] i32    the gates of expert 0 in ascending order, then those of expert 1, ..; each expert starts at a whole
//                                 tile, and what no gate is in has the number of gates
//   tile_map  [tile_map_len] i32  the expert of each tile
// How the work is split
//   small     one block of 16 waves: a wave counts its share of the gates, experts are scanned, waves place their shares.
//   large     three launches: `count` counts the gates of each chunk, `scan` (one block) sums over chunks, then over experts, and
//             `place` counts each wave's share of its chunk and places it. Padding and tiles are filled by all of its blocks.
//   Every place follows from counts alone: the lists are the same for any cut into chunks.
// Floor
//   4 bytes of ids read twice (the second time from cache), 4 bytes written for each slot and tile.

#include <hk/entry.h>

#include "lists.h"

namespace {
using namespace route;

using Params = Lists;

/// Waves of a block that has all gates, and of one that has a chunk.
constexpr int kBlockWaves = 16, kChunkWaves = 4;

HK_FN void small(const Lists &p) {
    __shared__ Lds<kBlockWaves> lds;
    clear_ranks(lds);
    const Share<kBlockWaves> share(0, p.gates);
    rank_gates(p, lds.next[hk::wave_id()], share.first, share.end, [](u32, u32, u32) {});
    sort_in_block(p, lds, share);
}

HK_FN void count(const Lists &p) {
    __shared__ u32 counts[kExperts];
    constexpr u32 kThreads = kChunkWaves * kWaveSize;
    for (u32 e = hk::thread_x(); e < p.experts; e += kThreads) counts[e] = 0;
    hk::block_barrier();
    const u32 first = hk::block_x() * p.chunk;
    const u32 end = p.gates - first < p.chunk ? p.gates : first + p.chunk;
    const auto ids = at<const i32>(p.ids);
    for (u32 g = first + hk::thread_x(); g < end; g += kThreads) {
        const u32 id = u32(ids[g]);
        if (id < p.experts) __scoped_atomic_fetch_add(&counts[id], 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    }
    hk::block_barrier();
    const auto partials = at<u32>(p.partials) + u64(hk::block_x()) * p.experts;
    for (u32 e = hk::thread_x(); e < p.experts; e += kThreads) partials[e] = counts[e];
}

HK_FN void scan(const Lists &p) {
    constexpr u32 kThreads = kBlockWaves * kWaveSize;
    __shared__ u32 counts[kExperts];
    __shared__ u32 sums[kThreads];
    __shared__ u32 totals[kBlockWaves];
    // A row of threads has neighbouring experts, so that reads are coalesced; each row sums a slice of the chunks.
    u32 row = kWaveSize;
    while (row < p.experts && row < kThreads) row *= 2;
    const u32 slices = kThreads / row;
    const u32 each = (p.chunks + slices - 1) / slices;
    const u32 slice = hk::thread_x() / row;
    const u32 from = slice * each < p.chunks ? slice * each : p.chunks;
    const u32 to = p.chunks - from < each ? p.chunks : from + each;
    const auto partials = at<u32>(p.partials);
    for (u32 e0 = 0; e0 < p.experts; e0 += row) {
        const u32 e = e0 + hk::thread_x() % row;
        const bool mine = e < p.experts;
        u32 sum = 0;
#pragma unroll 8
        for (u32 c = from; c < to; ++c) sum += mine ? partials[u64(c) * p.experts + e] : 0;
        sums[hk::thread_x()] = sum;
        hk::block_barrier();
        u32 before = 0;
        for (u32 s = 0; s < slice; ++s) before += sums[s * row + hk::thread_x() % row];
#pragma unroll 8
        for (u32 c = from; c < to; ++c) {
            if (!mine) break;
            const u32 n = partials[u64(c) * p.experts + e];
            partials[u64(c) * p.experts + e] = before;
            before += n;
        }
        if (mine && slice == slices - 1) counts[e] = before;
        hk::block_barrier();
    }
    const u32 total = scan_experts<kBlockWaves>(
        p, totals, [&](u32 e) { return counts[e]; },
        [&](u32 e, u32 tiles_before, u32 n) {
            at<u32>(p.counts)[e] = n;
            at<u32>(p.tile_offsets)[e] = tiles_before;
        });
    write_total(p, total);
}

HK_FN void place(const Lists &p) {
    __shared__ Lds<kChunkWaves> lds;
    constexpr u32 kThreads = kChunkWaves * kWaveSize;
    clear_ranks(lds);
    const auto partials = at<const u32>(p.partials) + u64(hk::block_x()) * p.experts;
    const auto tile_offsets = at<const u32>(p.tile_offsets);
    for (u32 e = hk::thread_x(); e < p.experts; e += kThreads) {
        const u32 tiles = tile_offsets[e];
        lds.tiles[e] = tiles;
        lds.base[e] = (tiles << p.tile_log2) + partials[e];
    }
    if (hk::thread_x() == 0) lds.tiles[p.experts] = tile_offsets[p.experts];
    const u32 first = hk::block_x() * p.chunk;
    const u32 end = p.gates - first < p.chunk ? p.gates : first + p.chunk;
    const Share<kChunkWaves> share(first, end);
    u16 *next = lds.next[hk::wave_id()];
    rank_gates(p, next, share.first, share.end, [](u32, u32, u32) {});
    hk::block_barrier();
    for (u32 e = hk::thread_x(); e < p.experts; e += kThreads) ranks_of_waves(lds, e);
    hk::block_barrier();
    rank_gates(p, next, share.first, share.end,
               [&](u32 g, u32 e, u32 rank) { at<u32>(p.sorted)[lds.base[e] + rank] = g; });
    const auto counts = at<const u32>(p.counts);
    fill_padding(p, lds.tiles, hk::block_x() * kChunkWaves + hk::wave_id(), p.chunks * kChunkWaves,
                 [&](u32 e) { return counts[e]; });
    fill_tile_map(p, lds.tiles, hk::block_x() * kThreads + hk::thread_x(), p.chunks * kThreads);
}
}  // namespace

// Entry points, as in src/lists.rs.
HK_ENTRY(lists_small, (kBlockWaves * hk::kWaveSize), small)
HK_ENTRY(lists_count, (kChunkWaves * hk::kWaveSize), count)
HK_ENTRY(lists_scan, (kBlockWaves * hk::kWaveSize), scan)
HK_ENTRY(lists_place, (kChunkWaves * hk::kWaveSize), place)
