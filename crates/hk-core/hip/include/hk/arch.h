// arch.h: the target this translation unit is compiled for. It chooses between hk/amd and hk/nvidia, which have the same
// functions and constants. Other headers ask for a capability (`if constexpr (kHasWideDma)`), not for the target.
#pragma once

#ifndef __device__
#define __device__ __attribute__((device))
#endif
#ifndef __global__
#define __global__ __attribute__((global))
#endif
#ifndef __shared__
#define __shared__ __attribute__((shared))
#endif

// Device helpers are always inlined: a call on AMD targets would need a stack in scratch memory.
#define HK_FN __device__ inline __attribute__((always_inline))

#if defined(__HIP_DEVICE_COMPILE__) && (defined(__gfx942__) || defined(__gfx950__))
#define HK_AMD 1
#define HK_TARGET_HEADER(name) <hk/amd/name>
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HK_NVIDIA 1
#define HK_TARGET_HEADER(name) <hk/nvidia/name>
#else
#error "hk: compile for gfx942 or gfx950 (-x hip) or sm_90 (-x cuda), device side only"
#endif

namespace hk {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

/// Widest access of one lane to global memory, in bytes.
inline constexpr int kVecBytes = 16;
/// SIMDs of a CU. The waves of a block are placed on them round-robin.
inline constexpr u32 kSimdsPerCu = 4;

}  // namespace hk

#include HK_TARGET_HEADER(arch.h)

namespace hk {

/// XCD remapping: a permutation of the tasks 0 .. n - 1 that gives the blocks of one XCD adjacent tasks, so that they share
/// one L2. It also holds for tasks past the first grid if the grid is a multiple of kXcds.
HK_FN u32 xcd_remap(u32 task, u32 n) {
    const u32 xcd = task % kXcds;
    const u32 longer = n % kXcds;  // XCDs with one task more
    return task / kXcds + xcd * (n / kXcds) + (xcd < longer ? xcd : longer);
}

/// Index of this lane in its wave. A block is one-dimensional.
HK_FN u32 lane_id() { return thread_x() % kWaveSize; }

}  // namespace hk
