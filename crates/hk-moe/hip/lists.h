// lists.h: gates sorted by expert, stable: counts of each chunk, offsets of experts, places.
//   A wave takes 64 gates at a time: ballots over the bits of the id find the lanes with the same expert, so that a lane's rank
//   is the number of such lanes below it, plus the expert's gates so far, which LDS has. No atomic decides a place.
#pragma once

#include <hk/arrive.h>

namespace route {

using hk::i32;
using hk::kWaveSize;
using hk::u16;
using hk::u32;
using hk::u64;

/// Experts at most.
constexpr u32 kExperts = 1024;
/// Waves of a block that has all gates, and of one that has a chunk.
constexpr int kBlockWaves = 16, kChunkWaves = 4;

/// Bits of `Lists::flags`.
enum ListFlag : u32 {
    kPadded = 1,  // lists of experts start at whole tiles
    kWideWeights = 2,  // of 4 bytes rather than 2
    kLocalTiles = 4,  // experts that expert_map lacks have places, but no tiles
};

/// A gate is a pair of a token and one of its experts: gate g is of token g / k. 0: an optional tensor is left out.
struct Lists {
    u64 ids;  // [gates] i32
    u64 weights;  // [gates], 0
    u64 expert_map;  // [experts] i32, 0
    u64 sorted;  // [sorted_len] i32: gates by expert
    u64 places;  // [gates] i32: place of a gate in `sorted`, 0
    u64 sorted_weights;  // [gates]: weights in the order of `sorted`, 0
    u64 tile_map;  // [tile_map_len] i32
    u64 padded_len;  // [1] i32, 0
    u64 counts;  // [experts] i32: gates of an expert, 0
    u64 offsets;  // [experts + 1] i32: their exclusive sums, 0
    u64 tile_offsets;  // [experts + 1] i32: exclusive sums of their tiles, 0
    u64 partials;  // [chunks, experts] i32: gates of an expert in a chunk; 0
    u64 before;  // [chunks, experts] i32: in the chunks before it; 0
    u64 arrived;  // [blocks] u64: flags of blocks, hk/arrive.h
    u64 mark;
    u32 experts, flags;
    u32 gates;
    u32 chunk, chunks;  // gates of a chunk
    u32 tile_log2;  // gates of a tile
    u32 sorted_len, tile_map_len;
};

template <class T>
HK_FN hk::GlobalPtr<T> at(u64 address) {
    return reinterpret_cast<hk::GlobalPtr<T>>(address);
}

/// LDS of a block that sorts gates.
template <int kWaves>
struct ListLds {
    u16 next[kWaves][kExperts];  // of a wave: rank of an expert's next gate in the chunk
    u32 base[kExperts];  // place of an expert's first gate, of the chunk
    u32 tiles[kExperts + 1];  // exclusive sums of the experts' tiles
    u64 totals[kWaves];
};

/// The lanes whose key is this lane's, of `bits` bits.
HK_FN u64 lanes_like(u32 key, u32 bits) {
    u64 same = hk::ballot(true);
    for (u32 b = 0; b < bits; ++b) {
        const bool set = key >> b & 1;
        const u64 with = hk::ballot(set);
        same &= set ? with : ~with;
    }
    return same;
}

/// Calls `f(g, e, rank)` for the gates from `first` to `end` that have an expert, 64 at a time in ascending order; the ranks go on
/// from those in `next`, and are left there.
template <class F>
HK_FN void rank_gates(const Lists &p, u16 *next, u32 first, u32 end, F f) {
    const auto ids = at<const i32>(p.ids);
    const u32 bits = 32 - u32(__builtin_clz(p.experts));
    const u32 none = (1u << bits) - 1;
    for (u32 from = first; from < end; from += kWaveSize) {
        const u32 g = from + hk::lane_id();
        const u32 id = g < end ? u32(ids[g]) : ~0u;
        const bool counts = id < p.experts;
        const u64 same = lanes_like(counts ? id : none, bits);
        const u32 before = hk::lanes_below(same);
        const u32 rank = counts ? next[id] + before : 0;
        hk::wave_barrier();
        if (counts && before == 0) next[id] = u16(rank + u32(__builtin_popcountll(same)));
        hk::wave_barrier();
        if (counts) f(g, id, rank);
    }
}

/// This wave's share of the gates from `first` to `end`.
template <int kWaves>
struct Share {
    u32 first, end;

    HK_FN Share(u32 from, u32 to) {
        const u32 each = (to - from + kWaves - 1) / kWaves;
        first = from + hk::wave_id() * each;
        first = first < to ? first : to;
        end = to - first < each ? to : first + each;
    }
};

/// Ranks start at zero.
template <int kWaves>
HK_FN void clear_ranks(const Lists &p, ListLds<kWaves> &lds) {
    u16 *next = lds.next[hk::wave_id()];
    for (u32 e = hk::lane_id(); e < p.experts; e += kWaveSize) next[e] = 0;
    hk::wave_barrier();
}

/// Exclusive prefix sum over the threads of a block; `total` is that of all.
template <int kWaves>
HK_FN u64 block_scan(u64 v, u64 (&totals)[kWaves], u64 &total) {
    const u64 upto = hk::wave_scan(v);
    if (hk::lane_id() == kWaveSize - 1) totals[hk::wave_id()] = upto;
    hk::block_barrier();
    u64 before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
        before += w < int(hk::wave_id()) ? totals[w] : 0;
        total += totals[w];
    }
    return before + upto - v;
}

/// From the counts of experts their offsets, in gates and in tiles: `count(e)` for every expert, `put(e, before, tiles_before)`
/// with the exclusive sums. Returns the sums, gates in the upper half. Experts past the last have no gates.
template <int kWaves, class Count, class Put>
HK_FN u64 scan_experts(const Lists &p, u64 (&totals)[kWaves], Count count, Put put) {
    constexpr u32 kThreads = kWaves * kWaveSize;
    constexpr u32 kEach = (kExperts + kThreads - 1) / kThreads;
    const u32 first = hk::thread_x() * kEach;
    u64 mine[kEach], sum = 0;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
        const u32 e = first + i;
        const u32 n = e < p.experts ? count(e) : 0;
        u32 tiles = (n >> p.tile_log2) + ((n & ((1u << p.tile_log2) - 1)) != 0);
        if (p.flags & kLocalTiles && e < p.experts && at<const i32>(p.expert_map)[e] < 0) tiles = 0;
        mine[i] = u64(n) << 32 | tiles;
        sum += mine[i];
    }
    u64 total;
    u64 before = block_scan<kWaves>(sum, totals, total);
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
        if (first + i < p.experts) put(first + i, u32(before >> 32), u32(before));
        before += mine[i];
    }
    return total;
}

/// Offsets of experts to LDS, from `count(e)` of every expert; one block writes them out.
template <int kWaves, class Count>
HK_FN void find_offsets(const Lists &p, ListLds<kWaves> &lds, bool writes, Count count) {
    const u64 total = scan_experts<kWaves>(p, lds.totals, count, [&](u32 e, u32 before, u32 tiles_before) {
        lds.base[e] = p.flags & kPadded ? tiles_before << p.tile_log2 : before;
        lds.tiles[e] = tiles_before;
        if (!writes) return;
        if (p.offsets != 0) at<u32>(p.offsets)[e] = before;
        if (p.tile_offsets != 0) at<u32>(p.tile_offsets)[e] = tiles_before;
    });
    if (hk::thread_x() == 0) {
        lds.tiles[p.experts] = u32(total);
        if (writes) {
            if (p.offsets != 0) at<u32>(p.offsets)[p.experts] = u32(total >> 32);
            if (p.tile_offsets != 0) at<u32>(p.tile_offsets)[p.experts] = u32(total);
            if (p.padded_len != 0) at<u32>(p.padded_len)[0] = u32(total) << p.tile_log2;
        }
    }
    hk::block_barrier();
}

/// From the gates of each wave those of the waves before it, in each expert; returns the expert's.
template <int kWaves>
HK_FN u32 ranks_of_waves(ListLds<kWaves> &lds, u32 e) {
    u32 sum = 0;
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
        const u32 n = lds.next[w][e];
        lds.next[w][e] = u16(sum);
        sum += n;
    }
    return sum;
}

/// Sums over the chunks before each chunk, and over all: by the last block to arrive, of a block for each chunk that has written its
/// counts. A wave has a slice of the chunks; its lanes have neighbouring experts, so that accesses are coalesced.
template <int kWaves>
HK_FN void scan_chunks(const Lists &p, u32 (&sums)[kWaves][kWaveSize]) {
    if (!hk::all_arrived(at<u64>(p.arrived), hk::block_x(), p.chunks, p.mark)) return;
    const u32 wave = hk::wave_id(), lane = hk::lane_id();
    const Share<kWaves> slice(0, p.chunks);
    for (u32 first = 0; first < p.experts; first += kWaveSize) {
        const u32 e = first + lane;
        const bool mine = e < p.experts;
        const auto partials = at<const u32>(p.partials) + (mine ? e : 0);
        u32 sum = 0;
#pragma unroll 8
        for (u32 c = slice.first; c < slice.end; ++c) sum += partials[u64(c) * p.experts];
        sums[wave][lane] = sum;
        hk::block_barrier();
        u32 before = 0;
        for (u32 w = 0; w < wave; ++w) before += sums[w][lane];
        hk::block_barrier();
        if (!mine) continue;
        // Not in place: two blocks may both be the last.
        const auto out = at<u32>(p.before) + e;
#pragma unroll 8
        for (u32 c = slice.first; c < slice.end; ++c) {
            const u32 n = partials[u64(c) * p.experts];
            out[u64(c) * p.experts] = before;
            before += n;
        }
        if (wave == kWaves - 1) at<u32>(p.counts)[e] = before;
    }
    hk::clear_flags(at<u64>(p.arrived), p.chunks);
}

/// Writes a gate at its place.
HK_FN void place_gate(const Lists &p, u32 g, u32 place) {
    at<u32>(p.sorted)[place] = g;
    if (p.places != 0) at<u32>(p.places)[g] = place;
    if (p.sorted_weights != 0) {
        if (p.flags & kWideWeights)
            at<u32>(p.sorted_weights)[place] = at<const u32>(p.weights)[g];
        else
            at<u16>(p.sorted_weights)[place] = at<const u16>(p.weights)[g];
    }
}

/// Fills what no gate is in: the ends of the experts' last tiles, and the rest of the list. `wave` of `waves` of the grid.
template <class Count>
HK_FN void fill_padding(const Lists &p, const u32 *tiles, u32 wave, u32 waves, Count count) {
    const auto sorted = at<u32>(p.sorted);
    for (u32 e = wave; e < p.experts; e += waves) {
        const u32 end = tiles[e + 1] << p.tile_log2;
        for (u32 i = (tiles[e] << p.tile_log2) + count(e) + hk::lane_id(); i < end; i += kWaveSize) sorted[i] = p.gates;
    }
    const u32 stride = waves * kWaveSize;
    for (u32 i = (tiles[p.experts] << p.tile_log2) + wave * kWaveSize + hk::lane_id(); i < p.sorted_len; i += stride)
        sorted[i] = p.gates;
}

/// What each tile is of: of padded lists its expert, by the map if there is one; else its number in the expert << 16 | expert. -1
/// past the last tile.
HK_FN void fill_tile_map(const Lists &p, const u32 *tiles, u32 thread, u32 threads) {
    for (u32 i = thread; i < p.tile_map_len; i += threads) {
        u32 word = ~0u;
        if (i < tiles[p.experts]) {
            u32 low = 0, high = p.experts;  // tiles[low] <= i < tiles[high]
            while (high - low > 1) {
                const u32 mid = (low + high) / 2;
                if (tiles[mid] <= i)
                    low = mid;
                else
                    high = mid;
            }
            word = (i - tiles[low]) << 16 | low;
            if (p.flags & kPadded) {
                const i32 local = p.expert_map != 0 ? at<const i32>(p.expert_map)[low] : i32(low);
                word = local < 0 ? ~0u : u32(local);
            }
        }
        at<u32>(p.tile_map)[i] = word;
    }
}

/// Sorts all gates, by one block.
template <int kWaves>
HK_FN void sort_gates(const Lists &p, ListLds<kWaves> &lds) {
    clear_ranks(p, lds);
    const Share<kWaves> share(0, p.gates);
    u16 *next = lds.next[hk::wave_id()];
    rank_gates(p, next, share.first, share.end, [](u32, u32, u32) {});
    hk::block_barrier();
    find_offsets<kWaves>(p, lds, true, [&](u32 e) {
        const u32 count = ranks_of_waves(lds, e);
        if (p.counts != 0) at<u32>(p.counts)[e] = count;
        return count;
    });
    rank_gates(p, next, share.first, share.end, [&](u32 g, u32 e, u32 rank) { place_gate(p, g, lds.base[e] + rank); });
    hk::block_barrier();
    if (p.flags & kPadded) {
        // The last wave's next rank is the expert's count.
        fill_padding(p, lds.tiles, hk::wave_id(), kWaves, [&](u32 e) { return u32(lds.next[kWaves - 1][e]); });
    }
    fill_tile_map(p, lds.tiles, hk::thread_x(), kWaves * kWaveSize);
}

/// Sorts the gates of a chunk, and has a share of padding and tiles.
HK_FN void place_chunk(const Lists &p) {
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
    const auto chunks_before = at<const u32>(p.before) + u64(hk::block_x()) * p.experts;
    for (u32 e = hk::thread_x(); e < p.experts; e += kThreads) {
        ranks_of_waves(lds, e);
        lds.base[e] += chunks_before[e];
    }
    hk::block_barrier();
    rank_gates(p, next, share.first, share.end, [&](u32 g, u32 e, u32 rank) { place_gate(p, g, lds.base[e] + rank); });
    if (p.flags & kPadded) {
        fill_padding(p, lds.tiles, hk::block_x() * kChunkWaves + hk::wave_id(), p.chunks * kChunkWaves,
                     [&](u32 e) { return counts[e]; });
    }
    fill_tile_map(p, lds.tiles, hk::block_x() * kThreads + hk::thread_x(), p.chunks * kThreads);
}

}  // namespace route
