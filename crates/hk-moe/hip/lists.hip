// lists.hip: gates sorted by expert: lists padded to tiles (moe_align_block_size), or without padding (moe_routing)
//   ids             [gates] i32         an id outside 0..experts: the gate is in no list
//   sorted          [sorted_len] i32    the gates of expert 0 in ascending order, then those of expert 1, ..; padded: each expert
//                                       starts at a whole tile, and what no gate is in has the number of gates
//   tile_map        [tile_map_len] i32  padded: the expert of each tile; else its number in the expert << 16 | expert
//   places          [gates] i32         place of a gate in sorted
//   sorted_weights  [gates]             weights in the order of sorted
//   counts [experts], offsets [experts + 1], tile_offsets [experts + 1] i32
// How the work is split
//   small     one block of 16 waves: a wave counts its share of the gates, experts are scanned, waves place their shares.
//   large     two launches: `count` counts the gates of each chunk (moe_routing counts as it chooses), and its last block to arrive
//             (hk/arrive.h) sums the chunks before each; `place` scans the experts, counts each wave's share of its chunk and places it.
//             Padding and tiles are filled by all of its blocks.
//   offsets   one block: offsets and tiles from counts (moe_expt_data).
//   Every place follows from counts alone: the lists are the same for any cut into chunks.
// Floor
//   4 bytes of ids read twice (the second time from cache), 4 bytes written for each slot and tile.

#include <hk/entry.h>

#include "lists.h"

namespace {
using namespace route;

using Params = Lists;

HK_FN void small(const Lists &p) {
    __shared__ ListLds<kBlockWaves> lds;
    sort_gates(p, lds);
}

HK_FN void count(const Lists &p) {
    __shared__ u32 counts[kExperts];
    __shared__ u32 sums[kBlockWaves][kWaveSize];
    constexpr u32 kThreads = kBlockWaves * kWaveSize;
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
    scan_chunks(p, sums);
}

HK_FN void offsets(const Lists &p) {
    __shared__ ListLds<kBlockWaves> lds;
    const auto counts = at<const u32>(p.counts);
    // Counts on the device are not trusted: negative ones are more than all gates.
    find_offsets<kBlockWaves>(p, lds, true, [&](u32 e) { return counts[e] < p.gates ? counts[e] : p.gates; });
    fill_tile_map(p, lds.tiles, hk::thread_x(), kBlockWaves * kWaveSize);
}
}  // namespace

// Entry points, as in src/lists.rs.
HK_ENTRY(lists_small, (kBlockWaves * hk::kWaveSize), small)
HK_ENTRY(lists_count, (kBlockWaves * hk::kWaveSize), count)
HK_ENTRY(lists_place, (kChunkWaves * hk::kWaveSize), place_chunk)
HK_ENTRY(lists_offsets, (kBlockWaves * hk::kWaveSize), offsets)
