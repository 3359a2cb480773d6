// hk/nvidia/row_broadcast.h: NVIDIA's GPUs have no such instruction.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// What lane `kLane` of each row of 16 lanes has, in all lanes of that row. Where waves have 64 lanes.
template <int kLane>
HK_FN Vec<float, 2> row_broadcast(Vec<float, 2> v);

}  // namespace hk
