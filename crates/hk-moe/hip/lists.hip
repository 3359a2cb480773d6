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
//   large     three launches: `count` counts the gates of each chunk (moe_routing counts as it chooses), `scan` sums the chunks before
//             each, a block for 64 experts, and `place` scans the experts, counts each wave's share of its chunk and places it.
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
    __shared__ u32 sums[kBlockWaves][kWaveSize];
    const u32 wave = hk::wave_id(), lane = hk::lane_id();
    const u32 e = hk::block_x() * kWaveSize + lane;
    // A wave has a slice of the chunks; its lanes have neighbouring experts, so that reads are coalesced.
    const Share<kBlockWaves> slice(0, p.chunks);
    const bool mine = e < p.experts;
    const auto partials = at<u32>(p.partials) + (mine ? e : 0);
    u32 sum = 0;
#pragma unroll 8
    for (u32 c = slice.first; c < slice.end; ++c) sum += mine ? partials[u64(c) * p.experts] : 0;
    sums[wave][lane] = sum;
    hk::block_barrier();
    u32 before = 0;
    for (u32 w = 0; w < wave; ++w) before += sums[w][lane];
    if (!mine) return;
#pragma unroll 8
    for (u32 c = slice.first; c < slice.end; ++c) {
        const u32 n = partials[u64(c) * p.experts];
        partials[u64(c) * p.experts] = before;
        before += n;
    }
    if (wave == kBlockWaves - 1) at<u32>(p.counts)[e] = before;
}

HK_FN void place(const Lists &p) {
    __shared__ ListLds<kChunkWaves> lds;
    constexpr u32 kThreads = kChunkWaves * kWaveSize;
    clear_ranks(p, lds);
    const auto counts = at<const u32>(p.counts);
    find_offsets<kChunkWaves>(p, lds, hk::block_x() == 0, [&](u32 e) { return counts[e]; });
    const u32 first = hk::block_x() * p.chunk;
    const u32 end = p.gates - first < p.chunk ? p.gates : first + p.chunk;
    const Share<kChunkWaves> share(first, end);
    u16 *next = lds.next[hk::wave_id()];
    rank_gates(p, next, share.first, share.end, [](u32, u32, u32) {});
    hk::block_barrier();
    const auto partials = at<const u32>(p.partials) + u64(hk::block_x()) * p.experts;
    for (u32 e = hk::thread_x(); e < p.experts; e += kThreads) {
        ranks_of_waves(lds, e);
        lds.base[e] += partials[e];
    }
    hk::block_barrier();
    rank_gates(p, next, share.first, share.end, [&](u32 g, u32 e, u32 rank) { place_gate(p, g, lds.base[e] + rank); });
    if (p.flags & kPadded) {
        fill_padding(p, lds.tiles, hk::block_x() * kChunkWaves + hk::wave_id(), p.chunks * kChunkWaves,
                     [&](u32 e) { return counts[e]; });
    }
    fill_tile_map(p, lds.tiles, hk::block_x() * kThreads + hk::thread_x(), p.chunks * kThreads);
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
HK_ENTRY(lists_count, (kChunkWaves * hk::kWaveSize), count)
HK_ENTRY(lists_scan, (kBlockWaves * hk::kWaveSize), scan)
HK_ENTRY(lists_place, (kChunkWaves * hk::kWaveSize), place)
HK_ENTRY(lists_offsets, (kBlockWaves * hk::kWaveSize), offsets)
