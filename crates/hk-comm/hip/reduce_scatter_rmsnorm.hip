// reduce_scatter_rmsnorm.hip: reduce-scatter of rows, residual add and RMSNorm of the own rows in one launch, with quantization on request
//   a[m, c] = round_T(sum over ranks r = 0, 1, .. of x_r[k, m, c]) on rank k; what follows it: norm_row.h
//   x  [world, rows, cols]  T = bf16 | f16   rows contiguous, on 16 bytes and of whole 16-byte packets
// Bytes over the links: reduce_scatter.hip. Block b takes rows b, b + grid, .. of each part.
#include "norm_row.h"

namespace {
using Params = peers::NormParams;

using hk::GlobalPtr;
using hk::u32;
using hk::u64;
using peers::Packet;

template <class T, u32 kWorld>
HK_FN void reduce_scatter_rmsnorm(const Params &p) {
    __shared__ u32 failed;
    peers::Launch launch(p.comm, failed);

    const auto x = reinterpret_cast<GlobalPtr<const Packet>>(p.x);
    const auto own = launch.staging(p.comm.rank);
    const u64 part = u64(p.rows) * p.packets;
    for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
        for (u32 column = hk::thread_x(); column < p.packets; column += peers::kThreads) {
            const u64 i = u64(row) * p.packets + column;
            Packet packet[kWorld];
#pragma unroll
            for (u32 r = 0; r < kWorld; ++r) packet[r] = x[r * p.x_part + row * p.x_row + column];
#pragma unroll
            for (u32 r = 0; r < kWorld; ++r) own[r * part + i] = packet[r];
        }
    }
    if (!launch.barrier<kWorld>(0)) return;

    GlobalPtr<Packet> of[kWorld];
#pragma unroll
    for (u32 r = 0; r < kWorld; ++r) of[r] = launch.staging(r) + p.comm.rank * part;
    peers::Reducer reducer;
    for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
        const u64 first = u64(row) * p.packets;
        peers::norm_row<T>(p, row, reducer, [&](u32 column) { return peers::sum<T, kWorld>(of, first + column); });
    }
    launch.end();
}
}  // namespace

#define RMSNORM_WORLDS(T)                                                                       \
    HK_ENTRY(reduce_scatter_rmsnorm_##T##_1, peers::kThreads, reduce_scatter_rmsnorm<hk::T, 1>) \
    HK_ENTRY(reduce_scatter_rmsnorm_##T##_2, peers::kThreads, reduce_scatter_rmsnorm<hk::T, 2>) \
    HK_ENTRY(reduce_scatter_rmsnorm_##T##_4, peers::kThreads, reduce_scatter_rmsnorm<hk::T, 4>) \
    HK_ENTRY(reduce_scatter_rmsnorm_##T##_8, peers::kThreads, reduce_scatter_rmsnorm<hk::T, 8>)

// Name = op, dtype, world.
RMSNORM_WORLDS(bf16)
RMSNORM_WORLDS(f16)
