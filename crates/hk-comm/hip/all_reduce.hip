// all_reduce.hip: y[i] = round_T(sum over ranks r = 0, 1, .. of x_r[i]), in f32; the same bits on all ranks and from both forms
//   x, y  [n]  T = bf16 | f16 | f32   contiguous, on 16 bytes, whole 16-byte packets; y may be x
// One-shot: stage x, barrier, sum all ranks' packets. (world - 1) S bytes over the links of a rank, S = n * sizeof(T).
// Two-shot: stage x, barrier, sum a part of 1 / world, barrier, gather the parts. 2 (world - 1) / world S bytes.
// How the work is split
//   A tile is a packet per thread or, in the two-shot form, world chunks of that, of which rank r sums chunk r. Block b takes tiles
//   b, b + grid, ..: what it reads of other ranks is written by their block b, which it meets at the barrier.
// Floor
//   Links: the bytes above at 64 GB/s for each of 7 links per direction (MI300X). Memory: 4 S (two-shot: 4 S + 4 S / world).
#include <hk/entry.h>

#include "peers.h"

namespace {
struct Params {
    peers::Comm comm;
    hk::u64 x, y;
    hk::u64 packets;  // of 16 bytes
};

using hk::GlobalPtr;
using hk::u32;
using hk::u64;
using peers::Packet;

/// Tiles of kWorld chunks: from(index, chunk), then to(index, packet). All loads of a tile are in flight before the first store, which may be to the
/// same memory.
template <u32 kWorld, class From, class To>
HK_FN void move_tiles(u64 packets, From from, To to) {
    constexpr u64 kTile = u64(kWorld) * peers::kThreads;
    for (u64 tile = hk::block_x() * kTile; tile < packets; tile += hk::grid_x() * kTile) {
        Packet packet[kWorld];
        const auto for_chunks = [&](auto f) {
#pragma unroll
            for (u32 chunk = 0; chunk < kWorld; ++chunk) {
                const u64 index = tile + chunk * peers::kThreads + hk::thread_x();
                if (index < packets) f(index, chunk);
            }
        };
        for_chunks([&](u64 i, u32 chunk) { packet[chunk] = from(i, chunk); });
        for_chunks([&](u64 i, u32 chunk) { to(i, packet[chunk]); });
    }
}

template <class T, u32 kWorld, bool kTwoShot>
HK_FN void all_reduce(const Params &p) {
    __shared__ u32 failed;
    peers::Launch launch(p.comm, failed);

    const auto x = reinterpret_cast<GlobalPtr<const Packet>>(p.x);
    const auto y = reinterpret_cast<GlobalPtr<Packet>>(p.y);
    const auto own = launch.staging(p.comm.rank);
    // One-shot: the packets of a thread.
    const u64 first = u64(hk::block_x()) * peers::kThreads + hk::thread_x();
    const u64 step = u64(hk::grid_x()) * peers::kThreads;
    const auto to_own = [&](u64 i, Packet packet) { own[i] = packet; };
    const auto to_y = [&](u64 i, Packet packet) { y[i] = packet; };
    if constexpr (kTwoShot)
        move_tiles<kWorld>(p.packets, [&](u64 i, u32) { return x[i]; }, to_own);
    else
        peers::move_strided<4>(first, step, p.packets, [&](u64 i) { return x[i]; }, to_own);
    if (!launch.barrier<kWorld>(0)) return;

    GlobalPtr<Packet> of[kWorld];
#pragma unroll
    for (u32 r = 0; r < kWorld; ++r) of[r] = launch.staging(r);
    const auto sum = [&](u64 i) { return peers::sum<T, kWorld>(of, i); };
    if constexpr (!kTwoShot) {
        peers::move_strided<8 / kWorld>(first, step, p.packets, sum, to_y);
    } else {
        const auto sums = launch.sums(p.comm.rank);
        peers::move_strided<8 / kWorld>(u64(hk::block_x() * kWorld + p.comm.rank) * peers::kThreads + hk::thread_x(),
                                        kWorld * step, p.packets, sum, [&](u64 i, Packet packet) { sums[i] = packet; });
        if (!launch.barrier<kWorld>(1)) return;
#pragma unroll
        for (u32 r = 0; r < kWorld; ++r) of[r] = launch.sums(r);
        move_tiles<kWorld>(p.packets, [&](u64 i, u32 owner) { return of[owner][i]; }, to_y);
    }
    launch.end();
}
}  // namespace

#define ALL_REDUCE_WORLDS(T, form, kTwoShot)                                             \
    HK_ENTRY(all_reduce_##T##_1_##form, peers::kThreads, all_reduce<hk::T, 1, kTwoShot>) \
    HK_ENTRY(all_reduce_##T##_2_##form, peers::kThreads, all_reduce<hk::T, 2, kTwoShot>) \
    HK_ENTRY(all_reduce_##T##_4_##form, peers::kThreads, all_reduce<hk::T, 4, kTwoShot>) \
    HK_ENTRY(all_reduce_##T##_8_##form, peers::kThreads, all_reduce<hk::T, 8, kTwoShot>)

// Name = op, dtype, world, form.
ALL_REDUCE_WORLDS(bf16, one_shot, false)
ALL_REDUCE_WORLDS(bf16, two_shot, true)
ALL_REDUCE_WORLDS(f16, one_shot, false)
ALL_REDUCE_WORLDS(f16, two_shot, true)
ALL_REDUCE_WORLDS(f32, one_shot, false)
ALL_REDUCE_WORLDS(f32, two_shot, true)
