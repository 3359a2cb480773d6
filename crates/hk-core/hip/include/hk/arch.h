// arch.h: facts of the target this translation unit is compiled for.
// The only header that asks which target it is; everything else asks for a fact by name.
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
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HK_NVIDIA 1
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
/// SIMD units of a CU, on which the waves of a block are placed in turn.
inline constexpr u32 kSimds = 4;

#if defined(HK_AMD)
inline constexpr int kWaveSize = 64;
inline constexpr bool kAnyAddress = true;  // vectors in global memory can begin on any of their elements
inline constexpr int kLaneRows = 1;  // of the 16 rows of an operand of matrix products, those that a lane has
inline constexpr bool kPingPongs = true;  // waves of a SIMD take turns by barriers (PingPong in hk/pipeline.h), or by themselves
inline constexpr int kXcds = 8;  // parts with an L2 of their own, to which blocks go in turn
inline constexpr bool kBlocksStay = true;  // blocks for rows are as many as keep memory busy, and take rows in turn; else one a batch
inline constexpr int kMostLaneCols = 64;   // columns of a row that a lane has in registers
inline constexpr int kLaneLoads = 64;      // loads of 16 bytes that a lane asks for at a time, where other waves can take some
inline constexpr bool kWidensAgain = false;  // what waits in registers for a sum does so in its own type rather than in f32
inline constexpr bool kFp8Saturates = false;  // conversions to fp8 saturate by themselves, and keep NaN
#if defined(__gfx950__)
#define HK_MX_MMA 1  // kHasMxMma, for types that differ
inline constexpr int kLdsBytes = 160 * 1024;
inline constexpr bool kHasWideDma = true;  // 16 bytes a lane from global memory to LDS; else 4
inline constexpr bool kHasCvtBf16 = true;  // v_cvt_pk_bf16_f32
inline constexpr bool kFp8IsFnuz = false;  // the fp8 of its conversions and matrix products
inline constexpr bool kHasCvtFp4 = true;   // v_cvt_scalef32_pk_fp4_f32
inline constexpr bool kHasMma32 = true;    // v_mfma_f32_16x16x32 of bf16 and f16; else 16x16x16
inline constexpr bool kHasMxMma = true;    // v_mfma_scale_f32_16x16x128_f8f6f4
inline constexpr bool kHasReadTr = true;   // ds_read_b64_tr_b16
#else
inline constexpr int kLdsBytes = 64 * 1024;
inline constexpr bool kHasWideDma = false;
inline constexpr bool kHasCvtBf16 = false;
inline constexpr bool kFp8IsFnuz = true;
inline constexpr bool kHasCvtFp4 = false;
inline constexpr bool kHasMma32 = false;
inline constexpr bool kHasMxMma = false;
inline constexpr bool kHasReadTr = false;
#endif
#else
inline constexpr int kWaveSize = 32;
inline constexpr bool kAnyAddress = false;
inline constexpr int kLaneRows = 2;
inline constexpr bool kPingPongs = false;  // an H200 makes 300 TFLOP/s of bf16 with it, 426 without
inline constexpr int kXcds = 1;
inline constexpr bool kBlocksStay = false;
inline constexpr int kMostLaneCols = 32;     // registers bound how many warps, so how many loads, share an SM:
inline constexpr int kLaneLoads = 2;         // what a wave has less of is done sooner
inline constexpr bool kFp8Saturates = true;
inline constexpr bool kWidensAgain = true;   // for the same reason
inline constexpr int kLdsBytes = 227 * 1024;
inline constexpr bool kHasWideDma = true;
inline constexpr bool kHasCvtBf16 = true;  // cvt.rn.bf16x2.f32
inline constexpr bool kFp8IsFnuz = false;
inline constexpr bool kHasCvtFp4 = false;
inline constexpr bool kHasMma32 = false;
inline constexpr bool kHasMxMma = false;
inline constexpr bool kHasReadTr = false;
#endif

/// Makes the compiler forget where `v` comes from: what is derived from it is computed anew where it is used,
/// instead of being kept in registers from an earlier use.
template <class T>
HK_FN void forget(T &v) {
    static_assert(sizeof(T) == 4, "one register");
#if defined(HK_AMD)
    asm("" : "+v"(v));
#else
    asm("" : "+r"(v));
#endif
}

/// No instruction is moved past this place: what comes before it is issued before what comes after it.
HK_FN void stay_in_order() {
#if defined(HK_AMD)
    __builtin_amdgcn_sched_barrier(0);
#endif
}

/// How eager the wave is to issue when several of its SIMD could: 0, as it begins, up to 3.
template <int kPriority>
HK_FN void set_priority() {
#if defined(HK_AMD)
    __builtin_amdgcn_s_setprio(kPriority);
#endif
}

/// The kernel's parameters, to be read anew. What is read of them stays in scalar registers for as long as it is of use,
/// all through a loop; where there are too few of those, a loop reads through this in each turn, from the scalar cache.
template <class Params>
HK_FN const Params &read_anew([[maybe_unused]] const Params &p) {
#if defined(HK_AMD)
    // The kernel's one argument is at the start of its arguments.
    auto fresh = (const __attribute__((address_space(4))) Params *)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(fresh));
    return *(const Params *)fresh;
#else
    return p;
#endif
}

/// Index of this block in the grid.
HK_FN u32 block_x() {
#if defined(HK_AMD)
    return __builtin_amdgcn_workgroup_id_x();
#else
    return __nvvm_read_ptx_sreg_ctaid_x();
#endif
}

/// A permutation of 0 .. n - 1 by which the tasks of blocks of one XCD, where block i has task i, are neighbours: what they
/// read in common comes to one L2. For tasks beyond the first grid too if the grid is a multiple of kXcds.
HK_FN u32 by_xcd(u32 task, u32 n) {
    const u32 xcd = task % kXcds;
    const u32 longer = n % kXcds;  // XCDs that have one task more
    return task / kXcds + xcd * (n / kXcds) + (xcd < longer ? xcd : longer);
}

/// Number of blocks in the grid.
HK_FN u32 grid_x() {
#if defined(HK_AMD)
    // First field of the implicit arguments since code object version 5.
    return ((const __attribute__((address_space(4))) u32 *)__builtin_amdgcn_implicitarg_ptr())[0];
#else
    return __nvvm_read_ptx_sreg_nctaid_x();
#endif
}

/// Tells the compiler that a block has this many threads: AMD's know it from the launch bounds.
HK_FN void assume_threads([[maybe_unused]] u32 threads) {
#if !defined(HK_AMD)
    __builtin_assume(u32(__nvvm_read_ptx_sreg_tid_x()) < threads);
#endif
}

/// Index of this thread in its block.
HK_FN u32 thread_x() {
#if defined(HK_AMD)
    return __builtin_amdgcn_workitem_id_x();
#else
    return __nvvm_read_ptx_sreg_tid_x();
#endif
}

}  // namespace hk
