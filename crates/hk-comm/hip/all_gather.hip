// all_gather.hip: y[o, r, i] = x_r[o, i], on every rank; bytes, whatever they stand for
//   x  [rows, cols]         bytes; the packets form: on 16 bytes, cols a multiple of 16
//   y  [rows, world, cols]  likewise; x may be the own part of y
// Stage x, barrier, read all ranks' data. (world - 1) S bytes over the links of a rank, S = rows * cols.
// Block b reads what the others' block b has staged.
// Floor
//   Links: the bytes above at 64 GB/s for each of 7 links per direction (MI300X). Memory: (2 * world + 2) S.
#include <hk/entry.h>

#include "peers.h"

namespace {
struct Params {
    peers::Comm comm;
    hk::u64 x, y;
    hk::u64 units;  // of x in this launch: packets or bytes
    hk::u64 x_row;  // units between rows of x
    peers::Split split;  // of y
};

using hk::GlobalPtr;
using hk::u32;
using hk::u64;

template <class Unit, u32 kWorld>
HK_FN void all_gather(const Params &p) {
    __shared__ u32 failed;
    peers::Launch launch(p.comm, failed);

    const auto staging = [&](u32 rank) { return reinterpret_cast<GlobalPtr<Unit>>(launch.staging(rank)); };
    const auto x = reinterpret_cast<GlobalPtr<const Unit>>(p.x);
    const auto own = staging(p.comm.rank);
    peers::for_each(p.units, [&](u64 i) { own[i] = x[p.split.at(i, p.x_row)]; });
    if (!launch.barrier<kWorld>(0)) return;

    GlobalPtr<Unit> of[kWorld];
#pragma unroll
    for (u32 r = 0; r < kWorld; ++r) of[r] = staging(r);
    const auto y = reinterpret_cast<GlobalPtr<Unit>>(p.y);
    peers::for_each(p.units, [&](u64 i) {
        Unit unit[kWorld];
#pragma unroll
        for (u32 r = 0; r < kWorld; ++r) unit[r] = of[r][i];
        const u64 at = p.split.at(i, p.split.row);
#pragma unroll
        for (u32 r = 0; r < kWorld; ++r) y[r * p.split.part + at] = unit[r];
    });
    launch.end();
}
}  // namespace

#define ALL_GATHER_WORLDS(form, Unit)                                     \
    HK_ENTRY(all_gather_##form##_1, peers::kThreads, all_gather<Unit, 1>) \
    HK_ENTRY(all_gather_##form##_2, peers::kThreads, all_gather<Unit, 2>) \
    HK_ENTRY(all_gather_##form##_4, peers::kThreads, all_gather<Unit, 4>) \
    HK_ENTRY(all_gather_##form##_8, peers::kThreads, all_gather<Unit, 8>)

// Name = op, form, world.
ALL_GATHER_WORLDS(packets, peers::Packet)
ALL_GATHER_WORLDS(bytes, hk::u8)
