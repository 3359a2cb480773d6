// entry.h: kernel entry points.
#pragma once

#include <hk/arch.h>

// HK_ENTRY(name, threads, body): the kernel `name`, launched with exactly `threads` threads a block, calls
// `body(p)`. `Params`, visible where the macro stands, is the kernel's one argument, passed by value: the
// host packs one plain struct and checks its size against the code object.
// `body` may hold commas (template arguments).
// HK_ENTRY_WITHIN(registers, name, threads, body): as HK_ENTRY; on NVIDIA's GPUs in so many registers of a thread at most,
// where the compiler would take more, and fewer blocks would fit an SM than the kernel needs to hide its waits.
#if defined(HK_AMD)
#define HK_LAUNCH_BOUNDS(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define HK_LAUNCH_WITHIN(registers, threads) HK_LAUNCH_BOUNDS(threads)
#else
#define HK_LAUNCH_BOUNDS(threads) __attribute__((launch_bounds(threads)))
#define HK_LAUNCH_WITHIN(registers, threads) __attribute__((launch_bounds(threads, 65536 / ((registers) * (threads)))))
#endif

#define HK_ENTRY(name, threads, ...) HK_DEFINE_ENTRY(HK_LAUNCH_BOUNDS(threads), name, threads, __VA_ARGS__)
#define HK_ENTRY_WITHIN(registers, name, threads, ...) \
    HK_DEFINE_ENTRY(HK_LAUNCH_WITHIN(registers, threads), name, threads, __VA_ARGS__)

#define HK_DEFINE_ENTRY(bounds, name, threads, ...)                                           \
    extern "C" __global__ bounds void name(const Params p) {                                  \
        static_assert(threads > 0 && threads % hk::kWaveSize == 0, "a block is whole waves"); \
        static_assert(threads <= 1024, "a block has at most 1024 threads");                   \
        __VA_ARGS__(p);                                                                       \
    }
