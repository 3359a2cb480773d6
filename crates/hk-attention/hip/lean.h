// lean.h: attention by stream-K: blocks have equal parts of one list of work.
//
// A unit is a tile of keys of a tile of query rows, in the order (key head, sequence, tile of rows, keys). Of P blocks, or programs, each
// has a P-th of the list: at most one unit more or less than another. A tile whose units are all in one program is written as it is.
// Of others, programs write partial results, which lean_merge (merge.hip) adds in ascending order of keys. Nobody waits for another block.
//
// Sequences have as many queries each. Lengths of keys are on the device: each block counts the units, lanes a sequence each. Keys are
// rows, or whole pages, of one sequence after the other.
// Source: Sanovar et al. 2024, "Lean Attention"; Osama et al. 2023, "Stream-K".
#pragma once

#include "outputs.h"
#include "problem.h"

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/global.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace attention {
namespace lean {

/// The first unit of program i. Splits::count is the number of programs.
HK_FN u32 first_unit(const Params &p, u32 units, u32 i) {
    const u32 each = units / p.splits.count, more = units % p.splits.count;
    return i * each + (i < more ? i : more);
}

/// The tile in which a program begins, for the merge. A tile has two slots of each program for partial results, of Splits::rows rows:
/// 2 i of its part without the tile's first keys, 2 i + 1 of that with them.
struct alignas(16) Start {
    u32 sequence, first, kv_head;  // as in Work
    u32 tile, end;  // units of the tile: [tile, end)
    u32 unit;  // the program's first one; `tile`: nothing to merge
    u32 units;  // of the list
    u32 pad;

    HK_FN static GlobalPtr<Start> of(const Params &p, u32 program) {
        const u64 rows = u64(p.splits.count) * 2 * p.splits.rows;
        return reinterpret_cast<GlobalPtr<Start>>(p.splits.sums + rows * sizeof(Vec<float, 2>)) + program;
    }
};

/// A part of a tile of query rows: its keys [begin, end).
struct Segment : Work {
    u32 begin, end;
    bool partial;
    u32 slot;
    u32 lane;
};

HK_FN KeyRange keys_of(const Params &, const Segment &segment) {
    return KeyRange{i32(segment.begin), i32(segment.end) - 1}.clipped(0, i32(segment.keys()));
}
HK_FN u32 lane_of(const Segment &segment) { return segment.lane; }
HK_FN bool is_partial(const Params &, const Segment &segment) { return segment.partial; }
HK_FN Partial partial_of(const Params &p, const Segment &segment, u32 query, u32 head) {
    return {p, segment.slot, (query - segment.kv_head) * p.group + head - segment.first};
}

/// The units of a head: tiles of kRows rows of queries by heads of the group, and of kKeys keys. A tile whose queries see no key has one.
template <u32 kRows, u32 kKeys>
class Units {
    const Params &p_;

    /// A lane's sequence, its first row or page, and its units [first, end).
    struct Lane {
        u32 sequence, keys, start;
        bool poison;
        u32 first, end;
    };

    HK_FN u32 of_tile(u32 keys, u32 tile) const {
        const Sequences &s = p_.sequences;
        if (p_.scores.right == 0) {
            // Keys up to the place of the tile's last query.
            const u32 rows = (tile + 1) * kRows, all = s.sq * p_.group;
            const u32 last = hk::DivMod((rows < all ? rows : all) - 1, p_.group, p_.group_inverse).quotient;
            const i32 seen = i32(keys) + i32(last + 1) - i32(s.sq);
            keys = seen < 0 ? 0 : u32(seen);
        }
        const u32 units = (keys + kKeys - 1) / kKeys;
        return units == 0 ? 1 : units;
    }
    HK_FN u32 of_sequence(u32 keys) const {
        const u32 tiles = p_.sequences.tiles_of_one;
        if (p_.scores.right != 0) return tiles * of_tile(keys, 0);
        u32 units = 0;
#pragma unroll 1
        for (u32 tile = 0; tile < tiles; ++tile) units += of_tile(keys, tile);
        return units;
    }

    HK_FN bool paged() const { return p_.pages.table != 0; }

    /// Rows or pages of so many keys.
    HK_FN u32 places_of(u32 keys) const {
        const Pages &pages = p_.pages;
        if (!paged()) return keys;
        return keys >= 1u << 30 ? ~0u : hk::DivMod(keys + pages.tokens - 1, pages.tokens, pages.inverse).quotient;
    }

    /// Calls `visit(lane)` for a sequence of each lane at a time, until it is true. Poisoned are the first sequence whose keys are not all
    /// there, and those after it. Returns the units of the sequences before the last ones visited, or of all.
    HK_FN u32 scan(auto visit) const {
        const Sequences &s = p_.sequences;
        const u32 room = paged() ? p_.pages.width : s.total_k;
        u64 places_before = 0;
        u32 units_before = 0;
        for (u32 base = 0; base < s.n; base += hk::kWaveSize) {
            const u32 n = base + hk::lane_id();
            // A negative length is more than there are keys, too.
            const u32 length = n < s.n ? reinterpret_cast<GlobalPtr<const u32>>(s.k_lens)[n] : 0;
            const u32 places = places_of(length);
            const u64 upto = places_before + hk::wave_scan(u64(places));
            Lane lane = {n, length, u32(upto) - places, upto > room, 0, 0};
            if (lane.poison) lane.keys = lane.start = 0;
            const u32 units = n < s.n ? of_sequence(lane.keys) : 0;
            lane.end = units_before + hk::wave_scan(units);
            lane.first = lane.end - units;
            if (visit(lane)) break;
            places_before = hk::last_lane(upto);
            units_before = hk::last_lane(lane.end);
        }
        return units_before;
    }

  public:
    HK_FN explicit Units(const Params &p) : p_(p) {}

    HK_FN u32 count() const {
        return scan([](const Lane &) { return false; });
    }

    /// The place of a unit among the units of its tile of rows.
    struct Place {
        u32 at, of;
    };
    /// Finds a unit's tile of rows.
    HK_FN Place find(u32 unit, Work &work) const {
        Place place = {0, 1};
        scan([&](const Lane &of) {
            const u64 mine = hk::ballot(unit >= of.first && unit < of.end);
            if (mine == 0) return false;
            const u32 lane = u32(__builtin_ctzll(mine));
            work.sequence = hk::broadcast(of.sequence, lane);
            const u32 keys = hk::broadcast(of.keys, lane), start = hk::broadcast(of.start, lane);
            if (paged())
                work.cached = keys, work.pages = u64(i64(start) + i64(work.kv_head) * p_.pages.head);
            else
                work.fresh = keys, work.k_start = start;
            work.poison = hk::broadcast(u32(of.poison), lane) != 0;
            unit -= hk::broadcast(of.first, lane);
            return true;
        });
        const u32 tiles = p_.sequences.tiles_of_one;
        u32 before = 0;
        for (u32 base = 0; base < tiles; base += hk::kWaveSize) {
            const u32 tile = base + hk::lane_id(), units = tile < tiles ? of_tile(work.keys(), tile) : 0;
            const u32 upto = before + hk::wave_scan(units);
            const u64 mine = hk::ballot(upto > unit && upto - units <= unit);
            if (mine != 0) {
                const u32 lane = u32(__builtin_ctzll(mine));
                work.first = (base + lane) * kRows;
                place = {unit - hk::broadcast(upto - units, lane), hk::broadcast(units, lane)};
                break;
            }
            before = hk::last_lane(upto);
        }
        return place;
    }
};

/// Calls `run(p, segment)` for the segments of the block's program.
template <u32 kRows, u32 kKeys>
HK_FN void each_segment(const Params &args, auto run) {
    using Units = Units<kRows, kKeys>;
    const u32 of_head = hk::uniform(Units(args).count()), units = of_head * args.kv_heads;
    const u32 program = hk::xcd_remap(hk::block_x(), args.splits.count);
    const u32 first = hk::uniform(first_unit(args, units, program));
    const u32 end = hk::uniform(first_unit(args, units, program + 1));
    const auto begins = [&](const Params &p, const Start &start) {
        if (p.splits.count > 1 && hk::thread_x() == 0) *Start::of(p, program) = start;
    };
    if (first == end) begins(args, {0, 0, 0, first, first, first, units, 0});
    for (u32 unit = first; unit < end;) {
        const Params &p = hk::reload_params(args);
        Segment segment = {};
        segment.kv_head = hk::uniform(unit / of_head);
        segment.q_len = p.sequences.sq;
        const auto [at, of_tile] = Units(p).find(unit - segment.kv_head * of_head, segment);
        const u32 left = of_tile - at, count = left < end - unit ? left : end - unit;
        segment.begin = at * kKeys;
        segment.end = segment.begin + count * kKeys;
        segment.partial = count != of_tile;
        segment.slot = 2 * program + (at == 0 ? 1 : 0);
        if (unit == first) {
            const u32 tile = unit - at;
            begins(p, {segment.sequence, segment.first, segment.kv_head, tile, tile + of_tile, unit, units, 0});
        }
        // The compiler does not see that this is the same for all segments: else the lane's addresses stay in registers between them.
        u32 same = unit;
        hk::opaque(same);
        segment.lane = (hk::lane_id() + same - unit) % hk::kWaveSize;
        unit += count;
        run(args, segment);
        // Other waves may be in LDS still.
        hk::block_barrier();
    }
}

}  // namespace lean
}  // namespace attention
