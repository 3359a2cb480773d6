// peers.hip: a wait for a flag that another device sets.
#include <hk/entry.h>
#include <hk/global.h>

namespace {
struct Params {
    hk::u64 mine, theirs;  // i32 flags
    hk::u64 wait;
};

// Sets the first flag, and waits for the second one if asked to.
__device__ void exchange(const Params &p) {
    if (hk::thread_x() != 0) return;
    const auto flag = [](hk::u64 at) { return reinterpret_cast<hk::GlobalPtr<hk::u32>>(at); };
    __scoped_atomic_store_n(flag(p.theirs), 1u, __ATOMIC_RELEASE, __MEMORY_SCOPE_SYSTEM);
    if (!p.wait) return;
    while (__scoped_atomic_load_n(flag(p.mine), __ATOMIC_ACQUIRE, __MEMORY_SCOPE_SYSTEM) == 0)
        __builtin_amdgcn_s_sleep(1);
}
}  // namespace

HK_ENTRY(meet, 64, exchange)
