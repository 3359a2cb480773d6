// peers.h: ranks of one node that access each other's memory: staging buffers, a barrier, sums in rank order.
//   Every rank launches the same kernel on the same grid. Rank r stages its input in its own shared memory, meets the others at a
//   barrier, and reads theirs over the links: 16-byte accesses, a wave's on consecutive addresses.
// Barrier
//   Block b of a rank meets block b of each other rank. Rank r stores the epoch to word (b, r) of every rank's flag page and waits
//   until its own page holds the epoch of each rank. Epochs only grow, by kEpochs per launch whatever its grid, and the last one is
//   in memory: a launch takes no number from the host, so a graph can replay it.
//   What a rank has written before is visible to the others behind it: release and acquire at system scope.
// Reuse of shared memory
//   Staging is double-buffered by launches. A rank that writes buffer k again has ended a launch in between, in which it met all
//   others after they had ended the launch that read it. So one barrier is enough, and none is needed at the end.
// Timeout
//   A rank that waits longer than `timeout` ticks of the constant counter writes 1 + the rank that is missing to its error word,
//   and the launch ends. Later launches find it and do nothing.
#pragma once

#include <hk/arch.h>
#include <hk/block.h>
#include <hk/global.h>
#include <hk/types.h>

namespace peers {

using hk::GlobalPtr;
using hk::i32;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// Ranks, at most; blocks of a grid, at most. Same as in src/p2p.rs.
inline constexpr u32 kMaxRanks = 8;
inline constexpr u32 kMaxBlocks = 128;
/// Epochs that a launch takes: its barriers, at most.
inline constexpr u32 kEpochs = 2;

/// Threads of a block.
inline constexpr int kThreads = 512;

/// An address of each rank.
struct Addresses {
    u64 rank[kMaxRanks];
};

/// The communicator, the head of each kernel's `Params`.
struct Comm {
    Addresses flags;  // u32 [kMaxBlocks][kMaxRanks] of each rank
    Addresses staging;  // of each rank: two buffers, then the sums of the two-shot form
    u64 epochs;  // u32 [kMaxBlocks], own
    u64 error;  // u32, own: 0, or 1 + the rank that did not arrive
    u64 buffer_bytes;  // of a staging buffer
    u64 timeout;  // ticks of the constant counter
    u32 rank;
    u32 unused;
};

/// 16 bytes.
using Packet = Vec<u32, 4>;

HK_FN GlobalPtr<u32> word(u64 base, u32 index) { return reinterpret_cast<GlobalPtr<u32>>(base) + index; }

/// A launch's place in the order of launches.
class Launch {
    const Comm &comm_;
    u32 epoch_;
    u32 error_ = 0;  // in thread 0: a rank did not arrive before
    u32 &failed_;  // in LDS

    /// Whether each wave has the fences of a barrier, or the threads that store and load flags. AMD: a wave's stores are written back by the wave,
    /// and by a fence of its own: clang 22 drops the wait between the write-back of a release store and the store where the wave has
    /// none in flight. PTX: release and acquire are cumulative over the block's barrier; fences of all threads took 4 us on an H100.
#if HK_AMD
    static constexpr bool kFenceOfWaves = true;
#else
    static constexpr bool kFenceOfWaves = false;
#endif

  public:
    HK_FN Launch(const Comm &comm, u32 &failed) : comm_(comm), failed_(failed) {
        epoch_ = *word(comm.epochs, hk::block_x());
        if (hk::thread_x() == 0)
            error_ = __scoped_atomic_load_n(word(comm.error, 0), __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
    }

    /// Packets of this rank's staging buffer, or of another one's.
    HK_FN GlobalPtr<Packet> staging(u32 rank) const {
        return packets(comm_.staging.rank[rank] + (epoch_ / kEpochs % 2) * comm_.buffer_bytes);
    }

    /// Packets of sums.
    HK_FN GlobalPtr<Packet> sums(u32 rank) const { return packets(comm_.staging.rank[rank] + 2 * comm_.buffer_bytes); }

    /// Waits for all ranks, number `index` of the launch. False if one is missing, or was in a launch before: then the kernel ends.
    template <u32 kWorld>
    HK_FN bool barrier(u32 index) {
        const u32 epoch = epoch_ + 1 + index;
        constexpr int kRelease = kFenceOfWaves ? __ATOMIC_RELAXED : __ATOMIC_RELEASE;
        constexpr int kAcquire = kFenceOfWaves ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE;
        if constexpr (kFenceOfWaves) __scoped_atomic_thread_fence(__ATOMIC_RELEASE, __MEMORY_SCOPE_SYSTEM);
        if (index == 0 && hk::thread_x() == 0) failed_ = error_;
        hk::block_barrier();
        const u32 peer = hk::thread_x();
        if (peer < kWorld && failed_ == 0) {
            const u32 row = hk::block_x() * kMaxRanks;
            const auto theirs = word(comm_.flags.rank[peer], row + comm_.rank);
            __scoped_atomic_store_n(theirs, epoch, kRelease, __MEMORY_SCOPE_SYSTEM);
            const auto own = word(comm_.flags.rank[comm_.rank], row + peer);
            const u64 start = __builtin_readsteadycounter();
            // Epochs wrap around.
            while (i32(__scoped_atomic_load_n(own, kAcquire, __MEMORY_SCOPE_SYSTEM) - epoch) < 0) {
                if (__builtin_readsteadycounter() - start > comm_.timeout) {
                    failed_ = 1;
                    __scoped_atomic_store_n(word(comm_.error, 0), 1 + peer, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
                    break;
                }
                pause();
            }
        }
        if constexpr (kFenceOfWaves) __scoped_atomic_thread_fence(__ATOMIC_ACQUIRE, __MEMORY_SCOPE_SYSTEM);
        hk::block_barrier();
        return failed_ == 0;
    }

    /// The last thing of a launch. Blocks of larger grids count it, too: the epochs of all blocks are the same between launches.
    HK_FN void end() const {
        const u32 block = hk::block_x() + hk::thread_x() * hk::grid_x();
        if (block < kMaxBlocks) *word(comm_.epochs, block) = epoch_ + kEpochs;
    }

  private:
    HK_FN static GlobalPtr<Packet> packets(u64 address) { return reinterpret_cast<GlobalPtr<Packet>>(address); }

    /// Leaves the SIMD to other waves for a while.
    HK_FN static void pause() {
#if HK_AMD
        __builtin_amdgcn_s_sleep(2);
#endif
    }
};

/// Calls f(i) for the thread's share of 0 .. n: block b has the same share on every rank.
template <class F>
HK_FN void for_each(u64 n, F f) {
    const u64 step = u64(hk::grid_x()) * kThreads;
    for (u64 i = u64(hk::block_x()) * kThreads + hk::thread_x(); i < n; i += step) f(i);
}

/// The units of rows that are split into a part for each rank, [rows, world, cols]: those of a launch, of each part, from unit `first` of a row on.
struct Split {
    u32 first;
    u32 cols;
    u32 inverse;  // of cols, see hk::DivMod
    u32 unused;
    u64 part;  // between the parts of a row
    u64 row;  // between rows

    /// Unit i of part 0, in a tensor with so many units between its rows.
    HK_FN u64 at(u64 i, u64 between_rows) const {
        const hk::DivMod at(first + u32(i), cols, inverse);
        return at.quotient * between_rows + at.remainder;
    }
};

/// from(i), then to(i, value) for i = first, first + step, .. below n. kBatch loads are in flight before the first store, which may be to the same
/// memory.
template <int kBatch, class Index, class From, class To>
HK_FN void move_strided(Index first, Index step, Index n, From from, To to) {
    for (; first < n; first += kBatch * step) {
        decltype(from(first)) value[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
            if (first + Index(k) * step < n) value[k] = from(first + Index(k) * step);
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
            if (first + Index(k) * step < n) to(first + Index(k) * step, value[k]);
    }
}

template <class T>
HK_FN auto widen(Packet packet) {
    return hk::widen<T, hk::kVecLen<T>>(__builtin_bit_cast(Vec<T, hk::kVecLen<T>>, packet));
}

template <class T>
HK_FN Packet narrow(Vec<float, hk::kVecLen<T>> v) {
    return __builtin_bit_cast(Packet, hk::narrow<T, hk::kVecLen<T>>(v));
}

/// The sum over ranks 0, 1, .. of packet `index`, in f32, rounded once to T. All loads are in flight before the first addition.
template <class T, u32 kWorld>
HK_FN Packet sum(const GlobalPtr<Packet> (&of)[kWorld], u64 index) {
    Packet packet[kWorld];
#pragma unroll
    for (u32 r = 0; r < kWorld; ++r) packet[r] = of[r][index];
    auto total = widen<T>(packet[0]);
#pragma unroll
    for (u32 r = 1; r < kWorld; ++r) total += widen<T>(packet[r]);
    return narrow<T>(total);
}

}  // namespace peers
