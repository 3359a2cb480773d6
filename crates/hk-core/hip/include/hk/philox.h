// philox.h: counter-based random numbers.
#pragma once

#include <hk/arch.h>
#include <hk/types.h>

namespace hk {

/// Philox4x32-10: four random words from a counter of 128 bits and a key of 64, low words first.
/// Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
HK_FN Vec<u32, 4> philox(Vec<u32, 4> counter, u64 key) {
    u32 low = u32(key);
    u32 high = u32(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 a = u64(counter[0]) * 0xD2511F53u;
        const u64 b = u64(counter[2]) * 0xCD9E8D57u;
        counter = {u32(b >> 32) ^ counter[1] ^ low, u32(b), u32(a >> 32) ^ counter[3] ^ high, u32(a)};
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return counter;
}

/// A random word as a number in (0, 1]: a multiple of 2^-24, exact in f32.
HK_FN float unit_interval(u32 word) { return float((word >> 8) + 1) * 0x1p-24f; }

}  // namespace hk
