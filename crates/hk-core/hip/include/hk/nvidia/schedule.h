// hk/nvidia/schedule.h: ptxas orders instructions by itself.
#pragma once

#include <hk/types.h>

namespace hk {

template <Issue kKind, int kCount>
HK_FN void sched_group() {}

}  // namespace hk
