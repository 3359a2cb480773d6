// rmsnorm_rows.hip: residual add and RMSNorm of rows that a library has summed, with quantization on request: norm_row.h
//   x  [rows, cols]  T = bf16 | f16   the sums; rows on 16 bytes and of whole 16-byte packets
// Block b takes rows b, b + grid, .. Nothing waits for other ranks.
// Floor
//   Memory: x and the residual read, the residual and each output written, once.
#include "norm_row.h"

namespace {
using Params = peers::NormParams;

using hk::GlobalPtr;
using hk::u32;
using peers::Packet;

template <class T>
HK_FN void rmsnorm_rows(const Params &p) {
    const auto x = reinterpret_cast<GlobalPtr<const Packet>>(p.x);
    peers::Reducer reducer;
    for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x())
        peers::norm_row<T>(p, row, reducer, [&](u32 column) { return x[row * p.x_row + column]; });
}
}  // namespace

// Name = op, dtype.
HK_ENTRY(rmsnorm_rows_bf16, peers::kThreads, rmsnorm_rows<hk::bf16>)
HK_ENTRY(rmsnorm_rows_f16, peers::kThreads, rmsnorm_rows<hk::f16>)
