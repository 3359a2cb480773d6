// all_reduce_rmsnorm.hip: all-reduce, residual add and RMSNorm of rows in one launch, with quantization on request
//   a[m, c] = round_T(sum over ranks r = 0, 1, .. of x_r[m, c]); what follows it: norm_row.h
//   x  [rows, cols]  T = bf16 | f16   rows contiguous, on 16 bytes and of whole 16-byte packets
// Sums, forms and bytes over the links: all_reduce.hip. A row is a tile: rank r sums packets [r, r + 1) * ceil(packets / world) of it
// in the two-shot form. Block b takes rows b, b + grid, ..
#include "norm_row.h"

namespace {
using Params = peers::NormParams;

using hk::GlobalPtr;
using hk::u32;
using hk::u64;
using peers::Packet;

template <class T, u32 kWorld, bool kTwoShot>
HK_FN void all_reduce_rmsnorm(const Params &p) {
    __shared__ u32 failed;
    peers::Launch launch(p.comm, failed);

    const auto x = reinterpret_cast<GlobalPtr<const Packet>>(p.x);
    const auto own = launch.staging(p.comm.rank);
    for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
        const u64 first = u64(row) * p.packets;
        Packet packet[peers::kHeld];
        peers::for_held(p.packets, [&](int k, u32 column) { packet[k] = x[row * p.x_row + column]; });
        peers::for_held(p.packets, [&](int k, u32 column) { own[first + column] = packet[k]; });
    }
    if (!launch.barrier<kWorld>(0)) return;

    GlobalPtr<Packet> of[kWorld];
#pragma unroll
    for (u32 r = 0; r < kWorld; ++r) of[r] = launch.staging(r);
    peers::Reducer reducer;
    if constexpr (!kTwoShot) {
        for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
            const u64 first = u64(row) * p.packets;
            peers::norm_row<T>(p, row, reducer, [&](u32 column) { return peers::sum<T, kWorld>(of, first + column); });
        }
    } else {
        const u32 part = (p.packets + kWorld - 1) / kWorld;
        const u32 begin = p.comm.rank * part;
        const u32 width = begin < p.packets ? (begin + part < p.packets ? part : p.packets - begin) : 0;
        const u32 rows = (p.rows - hk::block_x() + hk::grid_x() - 1) / hk::grid_x();
        const auto sums = launch.sums(p.comm.rank);
        const auto at = [&](u32 i) {
            return u64(hk::block_x() + i / width * hk::grid_x()) * p.packets + begin + i % width;
        };
        // The packets of all rows of the block, one after the other: rows are short for so many threads.
        peers::move_strided<8 / kWorld>(
            hk::thread_x(), u32(peers::kThreads), rows * width, [&](u32 i) { return peers::sum<T, kWorld>(of, at(i)); },
            [&](u32 i, Packet packet) { sums[at(i)] = packet; });
        if (!launch.barrier<kWorld>(1)) return;
        for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
            const u64 first = u64(row) * p.packets;
            peers::norm_row<T>(p, row, reducer, [&](u32 column) { return launch.sums(column / part)[first + column]; });
        }
    }
    launch.end();
}
}  // namespace

#define RMSNORM_WORLDS(T, form, kTwoShot)                                                                \
    HK_ENTRY(all_reduce_rmsnorm_##T##_1_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 1, kTwoShot>) \
    HK_ENTRY(all_reduce_rmsnorm_##T##_2_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 2, kTwoShot>) \
    HK_ENTRY(all_reduce_rmsnorm_##T##_4_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 4, kTwoShot>) \
    HK_ENTRY(all_reduce_rmsnorm_##T##_8_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 8, kTwoShot>)

// Name = op, dtype, world, form.
RMSNORM_WORLDS(bf16, one_shot, false)
RMSNORM_WORLDS(bf16, two_shot, true)
RMSNORM_WORLDS(f16, one_shot, false)
RMSNORM_WORLDS(f16, two_shot, true)
