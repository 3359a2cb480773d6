// reduce_scatter.hip: on rank k, y[o, i] = round_T(sum over ranks r = 0, 1, .. of x_r[o, k, i]), in f32: a part of what all_reduce.hip gives
//   x  [rows, world, cols]  T = bf16 | f16 | f32   contiguous, on 16 bytes, cols of whole 16-byte packets
//   y  [rows, cols]                                likewise
// Stage x, barrier, sum the own part of all ranks' packets. (world - 1) / world S bytes over the links of a rank, S = rows * world * cols *
// sizeof(T). Block b stages the same packets of each part, and sums those of its own: what it reads is written by block b of the others.
// Floor
//   Links: the bytes above at 64 GB/s for each of 7 links per direction (MI300X). Memory: 3 S + S / world.
#include <hk/entry.h>

#include "peers.h"

namespace {
struct Params {
    peers::Comm comm;
    hk::u64 x, y;
    hk::u64 packets;  // of y in this launch
    peers::Split split;  // of x
};

using hk::GlobalPtr;
using hk::u32;
using hk::u64;
using peers::Packet;

template <class T, u32 kWorld>
HK_FN void reduce_scatter(const Params &p) {
    __shared__ u32 failed;
    peers::Launch launch(p.comm, failed);

    const auto x = reinterpret_cast<GlobalPtr<const Packet>>(p.x);
    const auto own = launch.staging(p.comm.rank);
    peers::for_each(p.packets, [&](u64 i) {
        const u64 at = p.split.at(i, p.split.row);
        Packet packet[kWorld];
#pragma unroll
        for (u32 r = 0; r < kWorld; ++r) packet[r] = x[r * p.split.part + at];
#pragma unroll
        for (u32 r = 0; r < kWorld; ++r) own[r * p.packets + i] = packet[r];
    });
    if (!launch.barrier<kWorld>(0)) return;

    GlobalPtr<Packet> of[kWorld];
#pragma unroll
    for (u32 r = 0; r < kWorld; ++r) of[r] = launch.staging(r) + p.comm.rank * p.packets;
    const auto y = reinterpret_cast<GlobalPtr<Packet>>(p.y);
    peers::for_each(p.packets, [&](u64 i) { y[i] = peers::sum<T, kWorld>(of, i); });
    launch.end();
}
}  // namespace

#define REDUCE_SCATTER_WORLDS(T)                                                \
    HK_ENTRY(reduce_scatter_##T##_1, peers::kThreads, reduce_scatter<hk::T, 1>) \
    HK_ENTRY(reduce_scatter_##T##_2, peers::kThreads, reduce_scatter<hk::T, 2>) \
    HK_ENTRY(reduce_scatter_##T##_4, peers::kThreads, reduce_scatter<hk::T, 4>) \
    HK_ENTRY(reduce_scatter_##T##_8, peers::kThreads, reduce_scatter<hk::T, 8>)

// Name = op, dtype, world.
REDUCE_SCATTER_WORLDS(bf16)
REDUCE_SCATTER_WORLDS(f16)
REDUCE_SCATTER_WORLDS(f32)
