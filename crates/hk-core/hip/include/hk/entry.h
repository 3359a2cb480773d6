// entry.h: kernel entry points.
#pragma once

#include <hk/arch.h>

// HK_ENTRY(name, threads, body): the kernel `name`, launched with exactly `threads` threads a block, calls
// `body(p)`. `Params`, visible where the macro stands, is the kernel's one argument, passed by value: the
// host packs one plain struct and checks its size against the code object.
// `body` may hold commas (template arguments).
#if defined(HK_AMD)
#define HK_LAUNCH_BOUNDS(threads, ...) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define HK_SIMD_WAVES(waves) __attribute__((amdgpu_waves_per_eu(waves)))
#define HK_PARAMS
#else
#define HK_LAUNCH_BOUNDS(threads, ...) __attribute__((launch_bounds(threads __VA_OPT__(, ) __VA_ARGS__)))
#define HK_SIMD_WAVES(waves)
// Parameters that are found by an index, too, are read where they are, not copied by each thread.
#define HK_PARAMS __attribute__((grid_constant))
#endif

#define HK_ENTRY(name, threads, ...) HK_ENTRY_BOUNDED(name, threads, HK_LAUNCH_BOUNDS(threads), __VA_ARGS__)

// The same, with registers for `waves` waves to share an SM of NVIDIA's GPUs. On AMD targets they are as many as the
// body needs.
#define HK_ENTRY_FOR_WAVES(name, threads, waves, ...) \
    HK_ENTRY_BOUNDED(name, threads, HK_LAUNCH_BOUNDS(threads, (waves) * hk::kWaveSize / (threads)), __VA_ARGS__)

// And for `simd` waves to share a SIMD of AMD's: 1 for as many as the body needs.
#define HK_ENTRY_FOR_SIMD(name, threads, simd, waves, ...)                                                                  \
    HK_ENTRY_BOUNDED(name, threads, HK_SIMD_WAVES(simd) HK_LAUNCH_BOUNDS(threads, (waves) * hk::kWaveSize / (threads)), \
                     __VA_ARGS__)

#define HK_ENTRY_BOUNDED(name, threads, bounds, ...)                                          \
    extern "C" __global__ bounds void name(HK_PARAMS const Params p) {                        \
        static_assert(threads > 0 && threads % hk::kWaveSize == 0, "a block is whole waves"); \
        static_assert(threads <= 1024, "a block has at most 1024 threads");                   \
        hk::assume_threads(threads);                                                          \
        __VA_ARGS__(p);                                                                       \
    }
