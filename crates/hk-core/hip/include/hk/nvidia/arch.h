// hk/nvidia/arch.h: capabilities of NVIDIA's GPUs, and what is one instruction there. Included by arch.h.
#pragma once

// See HK_ENTRY in entry.h.
#define HK_LAUNCH_BOUNDS(threads, ...) __attribute__((launch_bounds(threads __VA_OPT__(, ) __VA_ARGS__)))
#define HK_WAVES_PER_SIMD(waves)
// Parameters with a runtime index are read in place, not copied to local memory by each thread.
#define HK_PARAMS __attribute__((grid_constant))

namespace hk {

inline constexpr int kWaveSize = 32;
inline constexpr bool kHasUnalignedVectors = false;
inline constexpr int kRowsPerLane = 2;
inline constexpr bool kHasPingPong = false;  // measured on an H200, bf16: 300 TFLOP/s with, 426 without
inline constexpr bool kHasLdmatrix = true;
inline constexpr int kXcds = 1;
inline constexpr bool kPersistentBlocks = false;
// Registers bound occupancy, and with it the loads in flight: a wave holds little and finishes soon.
inline constexpr int kMaxColsPerLane = 32;
inline constexpr int kLoadsPerLane = 2;
inline constexpr bool kHasCvtFromFp8 = true;  // cvt.rn.f16x2.e4m3x2, exact
inline constexpr bool kHasMaxNan = true;  // maximum that propagates NaN
inline constexpr bool kOpaqueBytes =
    true;  // ptxas 12 takes the store of a low byte of f32 bits for a conversion to an integer
inline constexpr bool kFp8Saturates = true;
inline constexpr bool kKeepsRowsNarrow = true;  // saves registers, too
inline constexpr int kLdsBytes = 227 * 1024;
inline constexpr bool kHasWideDma = true;
inline constexpr bool kHasCvtBf16 = true;  // cvt.rn.bf16x2.f32
inline constexpr bool kFp8IsFnuz = false;
inline constexpr bool kHasCvtFp4 = false;
inline constexpr bool kHasMma32 = false;
inline constexpr bool kHasMxMma = false;
inline constexpr bool kHasReadTr = false;
inline constexpr bool kMmaBlocksPackedF32 = false;

/// Hides from the compiler how `v` was computed: values derived from `v` are recomputed at each use instead of kept live in
/// registers.
template <class T>
HK_FN void opaque(T &v) {
    static_assert(sizeof(T) == 4, "one register");
    asm("" : "+r"(v));
}

/// Scheduling barrier: the compiler moves no instruction across it.
HK_FN void sched_barrier() {}

/// Pins a value to a register on AMD targets.
template <class V>
HK_FN void pin(V &) {}

/// The wave's issue priority among the waves of its SIMD: 0 (the initial one) to 3.
template <int kPriority>
HK_FN void set_wave_priority() {}

/// Asks for all lines of the kernel's parameters at once, on AMD targets.
template <class Params>
HK_FN void fetch_params() {}

/// The kernel's parameters, reloaded from the scalar cache. Fields that are read once stay live in SGPRs all through a loop; a
/// loop short of SGPRs reads them through this in each iteration.
template <class Params>
HK_FN const Params &reload_params([[maybe_unused]] const Params &p) {
    return p;
}

/// Index of this block in the grid.
HK_FN u32 block_x() { return __nvvm_read_ptx_sreg_ctaid_x(); }

/// Number of blocks in the grid.
HK_FN u32 grid_x() { return __nvvm_read_ptx_sreg_nctaid_x(); }

/// Tells the compiler the block size.
HK_FN void assume_threads([[maybe_unused]] u32 threads) {
    __builtin_assume(u32(__nvvm_read_ptx_sreg_tid_x()) < threads);
}

/// Index of this thread in its block.
HK_FN u32 thread_x() { return __nvvm_read_ptx_sreg_tid_x(); }

}  // namespace hk
