// swap_axes.hip: y[b, a, c] = x[a, b, c]; bytes, whatever they stand for
//   x  [rows, parts, cols]  bytes, contiguous; the packets form: on 16 bytes, cols a multiple of 16
//   y  [parts, rows, cols]  likewise, not x
// Between the parts of ranks, one after the other, and an axis that is split into them: what a library's all-gather and reduce-scatter lack.
// Lanes read consecutive units; a row of cols is written as it is read.
// Floor
//   Memory: 2 S, S = rows * parts * cols.
#include <hk/entry.h>

#include "peers.h"

namespace {
struct Params {
    hk::u64 x, y;
    hk::u32 units;  // of x: packets or bytes
    hk::u32 rows, parts, cols;
    hk::u32 parts_inverse, cols_inverse;  // see hk::DivMod
};

using hk::GlobalPtr;
using hk::u32;

template <class Unit>
HK_FN void swap_axes(const Params &p) {
    const auto x = reinterpret_cast<GlobalPtr<const Unit>>(p.x);
    const auto y = reinterpret_cast<GlobalPtr<Unit>>(p.y);
    const auto to = [&](u32 i, Unit unit) {
        const hk::DivMod row(i, p.cols, p.cols_inverse);
        const hk::DivMod part(row.quotient, p.parts, p.parts_inverse);
        y[(part.remainder * p.rows + part.quotient) * p.cols + row.remainder] = unit;
    };
    peers::move_strided<4>(
        hk::block_x() * u32(peers::kThreads) + hk::thread_x(), hk::grid_x() * u32(peers::kThreads), p.units,
        [&](u32 i) { return x[i]; }, to);
}
}  // namespace

// Name = op, form.
HK_ENTRY(swap_axes_packets, peers::kThreads, swap_axes<peers::Packet>)
HK_ENTRY(swap_axes_bytes, peers::kThreads, swap_axes<hk::u8>)
