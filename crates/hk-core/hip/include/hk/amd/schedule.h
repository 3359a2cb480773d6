// hk/amd/schedule.h: scheduling groups of AMD targets.
#pragma once

#include <hk/types.h>

namespace hk {

/// The next kCount instructions of a kind follow those of the calls before, since the last scheduling barrier.
template <Issue kKind, int kCount>
HK_FN void sched_group() {
    __builtin_amdgcn_sched_group_barrier(int(kKind), kCount, 0);
}

}  // namespace hk
