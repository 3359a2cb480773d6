// tokens_warpgroup.h: tokens of a chunk in LDS as operands of warpgroup instructions (hk/warpgroup.h).
#pragma once

#include <hk/shared.h>
#include <hk/warpgroup.h>

#include "tokens.h"

#if defined(HK_WARPGROUPS)

namespace gdr::warpgroup {

/// Threads of a block.
inline constexpr u32 kWarpgroupThreads = 128;

/// Starts to load rows from `row` on, 64 columns from `col` on.
template <class R, int kRows>
HK_FN void copy(const R &of, u32 row, u32 col, hk::WarpgroupRows<kRows> &to) {
    constexpr u32 kChunks = hk::WarpgroupRows<kRows>::kChunks, kAtOnce = kWarpgroupThreads / kChunks;
    const u32 place = hk::thread_x() / kChunks;
    const u32 first = of.at(row + place, col + (hk::thread_x() % kChunks ^ to.swizzle(place)) * R::V);
#pragma unroll
    for (u32 i = 0; i < kRows / kAtOnce; ++i)
        of.window.load_to_lds(&to.chunk[i * kWarpgroupThreads + hk::wave_id() * hk::kWaveSize],
                              first + i * kAtOnce * of.row_bytes, 0);
}

/// All threads' loads but the last `kGroups` groups are operands.
template <int kGroups>
HK_FN void wait_for_operands() {
    hk::wait_loads<kGroups, 1>();
    hk::detail::publish_to_wgmma();
    hk::block_barrier();
}

}  // namespace gdr::warpgroup

#endif
