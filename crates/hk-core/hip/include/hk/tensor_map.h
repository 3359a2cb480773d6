// hk/tensor_map.h: what bulk tensor copies of Hopper know of a tensor. Filled in by `Launch::tensor_map` of hk-core.
#pragma once

#include <hk/arch.h>

namespace hk {

/// A CUtensorMap, in kernel arguments.
struct alignas(64) TensorMap {
    u64 word[16];
};

}  // namespace hk
