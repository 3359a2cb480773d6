// hk/amd/arch.h: capabilities of AMD targets, and what is one instruction there. Included by arch.h.
#pragma once

// See HK_ENTRY in entry.h.
#define HK_LAUNCH_BOUNDS(threads, ...) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define HK_WAVES_PER_SIMD(waves) __attribute__((amdgpu_waves_per_eu(waves)))
#define HK_PARAMS

namespace hk {

inline constexpr int kWaveSize = 64;
inline constexpr bool kHasUnalignedVectors = true;  // vector loads and stores need only element alignment
inline constexpr int kRowsPerLane = 1;  // rows of an MMA operand that a lane holds
inline constexpr bool kHasPingPong = true;  // two waves per SIMD alternate by barriers (PingPong in hk/pipeline.h)
inline constexpr bool kHasLdmatrix = false;
inline constexpr int kXcds = 8;  // chiplets, each with its own L2; blocks go to them round-robin
inline constexpr bool kPersistentBlocks =
    true;  // row kernels launch enough blocks to saturate memory, each with a grid-stride
                                                 // loop over batches of rows; else one block per batch
inline constexpr int kMaxColsPerLane = 64;  // columns of a row in a lane's registers
inline constexpr int kLoadsPerLane = 64;  // 16-byte loads that a lane has in flight, where more waves can share them
inline constexpr bool kKeepsRowsNarrow =
    false;  // a row in registers stays in its own type across a reduction, and is widened again
inline constexpr bool kHasCvtFromFp8 = true;  // v_cvt_pk_f32_fp8, of the own encoding
inline constexpr bool kHasMaxNan = false;  // maximum that propagates NaN
inline constexpr bool kOpaqueBytes = false;
inline constexpr bool kFp8Saturates = false;  // conversions to fp8 saturate and keep NaN
#if defined(__gfx950__)
#define HK_MX_MMA 1  // kHasMxMma, for types that depend on it
inline constexpr int kLdsBytes = 160 * 1024;
inline constexpr bool kHasWideDma = true;  // loads straight to LDS move 16 bytes per lane; else 4
inline constexpr bool kHasCvtBf16 = true;  // v_cvt_pk_bf16_f32
inline constexpr bool kFp8IsFnuz = false;  // the fp8 encoding of conversions and MFMA
inline constexpr bool kHasCvtFp4 = true;  // v_cvt_scalef32_pk_fp4_f32
inline constexpr bool kHasMma32 = true;  // v_mfma_f32_16x16x32 of bf16 and f16; else 16x16x16
inline constexpr bool kHasMxMma = true;  // v_mfma_scale_f32_16x16x128_f8f6f4
inline constexpr bool kHasReadTr = true;  // ds_read_b64_tr_b16
inline constexpr bool kHasPermlaneSwap = true;  // v_permlane32_swap
inline constexpr bool kMmaBlocksPackedF32 = false;  // not documented
#else
inline constexpr int kLdsBytes = 64 * 1024;
inline constexpr bool kHasWideDma = false;
inline constexpr bool kHasCvtBf16 = false;
inline constexpr bool kFp8IsFnuz = true;
inline constexpr bool kHasCvtFp4 = false;
inline constexpr bool kHasMma32 = false;
inline constexpr bool kHasMxMma = false;
inline constexpr bool kHasReadTr = false;
inline constexpr bool kHasPermlaneSwap = false;
inline constexpr bool kMmaBlocksPackedF32 = true;  // v_pk_fma_f32 waits for MFMAs of other waves
#endif

/// Hides from the compiler how `v` was computed: values derived from `v` are recomputed at each use instead of kept live in
/// registers.
template <class T>
HK_FN void opaque(T &v) {
    static_assert(sizeof(T) == 4, "one register");
    asm("" : "+v"(v));
}

/// Scheduling barrier: the compiler moves no instruction across it.
HK_FN void sched_barrier() { __builtin_amdgcn_sched_barrier(0); }

/// Pins a value of up to 16 bytes to a register here: it is computed before, and not moved to its first use.
template <class V>
HK_FN void pin(V &v) {
    asm volatile("" : "+v"(v));
}

/// The wave's issue priority among the waves of its SIMD: 0 (the initial one) to 3.
template <int kPriority>
HK_FN void set_wave_priority() {
    __builtin_amdgcn_s_setprio(kPriority);
}

/// Asks for the lines of the kernel's parameters at once, the first 21 of them. Each that is first read behind a wait, a branch or a loop would
/// take the latency of memory there.
template <class Params>
HK_FN void fetch_params() {
    constexpr u32 kLine = 64, kBehind = (sizeof(Params) - 1) / kLine,
                  kLines = kBehind < 20 ? kBehind : 20;  // a register each
    if constexpr (kLines > 0) {
        asm volatile(
            ".set hk_line, 0\n\t.rept %c2\n\t.set hk_line, hk_line + 1\n\ts_load_dword s[35 + hk_line], %0, hk_line * "
            "%c1\n\t.endr\n\t"
            "s_waitcnt lgkmcnt(0)"
            :
            : "s"(__builtin_amdgcn_kernarg_segment_ptr()), "n"(kLine), "n"(kLines)
            : "s36", "s37", "s38", "s39", "s40", "s41", "s42", "s43", "s44", "s45", "s46", "s47", "s48", "s49", "s50",
              "s51", "s52", "s53", "s54", "s55");
        sched_barrier();  // nothing is waited for before
    }
}

/// The kernel's parameters, reloaded from the scalar cache. Fields that are read once stay live in SGPRs all through a loop; a
/// loop short of SGPRs reads them through this in each iteration.
template <class Params>
HK_FN const Params &reload_params([[maybe_unused]] const Params &p) {
    // The parameter struct is at the start of the kernarg segment.
    auto fresh = (const __attribute__((address_space(4))) Params *)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(fresh));
    return *(const Params *)fresh;
}

/// Index of this block in the grid.
HK_FN u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }

/// Number of blocks in the grid.
HK_FN u32 grid_x() {
    // First field of the implicit arguments since code object version 5.
    return ((const __attribute__((address_space(4))) u32 *)__builtin_amdgcn_implicitarg_ptr())[0];
}

/// Tells the compiler the block size. AMD targets know it from the launch bounds.
HK_FN void assume_threads([[maybe_unused]] u32 threads) {}

/// Index of this thread in its block.
HK_FN u32 thread_x() { return __builtin_amdgcn_workitem_id_x(); }

}  // namespace hk
