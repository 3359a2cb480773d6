// entry.h: kernel entry points.
#pragma once

#include <hk/arch.h>

// HK_ENTRY(name, threads, body): the kernel `name`, launched with exactly `threads` threads a block, calls
// `body(p)`. `Params`, visible where the macro stands, is the kernel's one argument, passed by value: the
// host packs one plain struct and checks its size against the code object.
// `body` may hold commas (template arguments).
#define HK_ENTRY(name, threads, ...) HK_ENTRY_BOUNDED(name, threads, HK_LAUNCH_BOUNDS(threads), __VA_ARGS__)

// As HK_ENTRY, with the register budget of `waves` waves per SM on NVIDIA GPUs. On AMD targets occupancy is what the body needs.
#define HK_ENTRY_WAVES_PER_SM(name, threads, waves, ...) \
    HK_ENTRY_BOUNDED(name, threads, HK_LAUNCH_BOUNDS(threads, (waves) * hk::kWaveSize / (threads)), __VA_ARGS__)

// As above, and with the register budget of `simd` waves per SIMD on AMD targets; 1: what the body needs.
#define HK_ENTRY_WAVES_PER_SIMD(name, threads, simd, waves, ...)                                             \
    HK_ENTRY_BOUNDED(name, threads,                                                                          \
                     HK_WAVES_PER_SIMD(simd) HK_LAUNCH_BOUNDS(threads, (waves) * hk::kWaveSize / (threads)), \
                     __VA_ARGS__)

#if defined(HK_DESCRIBE)
// hk-build's look at a source: not code, only which entry points there are and the fields of the struct that each takes.
#define HK_ENTRY_BOUNDED(name, threads, bounds, ...) \
    struct hk_entry_##name {                         \
        Params params;                               \
    };                                               \
    static_assert(sizeof(hk_entry_##name) == sizeof(Params));
#else
#define HK_ENTRY_BOUNDED(name, threads, bounds, ...)                                          \
    extern "C" __global__ bounds void name(HK_PARAMS const Params p) {                        \
        static_assert(threads > 0 && threads % hk::kWaveSize == 0, "a block is whole waves"); \
        static_assert(threads <= 1024, "a block has at most 1024 threads");                   \
        hk::assume_threads(threads);                                                          \
        hk::fetch_params<Params>();                                                           \
        __VA_ARGS__(p);                                                                       \
    }
#endif
