// index.hip: what packed sequences have to be known by: lengths, starts, positions, numbers of sequences, chunks
//   cu, lens, and results  I = i32 | i64   contiguous
// Results of sequences are made by one block, which scans 1024 at a time; those of tokens by a lane each, which searches cu.
// Values on the device are not trusted: a length below zero counts as zero, and nothing beyond the results is written.
#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace {
using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::kWaveSize;
using hk::u32;
using hk::u64;

/// What the one block makes.
enum class Make : u32 { Lens = 0, Starts = 1, ChunkOffsets = 2, ChunkIndices = 3, MaxSplits = 4 };

struct Params {
    u64 input;  // cu [n + 1], or lens [n] for Starts
    u64 output;
    u64 count;  // i32 [1], of ChunkIndices: rows; or 0
    u32 n;  // sequences
    u32 chunk;
    u32 capacity;  // rows of ChunkIndices
    u32 tokens;  // of positions and numbers of sequences
    Make make;
    u32 pad;
};

constexpr u32 kThreads = 1024;
constexpr u32 kWaves = kThreads / kWaveSize;

/// Length of sequence `n`.
template <class I>
HK_FN i64 length(const Params &p, u32 n) {
    const auto in = reinterpret_cast<GlobalPtr<const I>>(p.input);
    const i64 v = p.make == Make::Starts ? i64(in[n]) : i64(in[n + 1]) - i64(in[n]);
    return v;
}

template <class I>
HK_FN void sequences(const Params &p) {
    __shared__ u64 totals[2][kWaves], upto[kThreads];
    const auto out = reinterpret_cast<GlobalPtr<I>>(p.output);
    const bool splits = p.make == Make::ChunkOffsets || p.make == Make::ChunkIndices || p.make == Make::MaxSplits;
    u64 before = 0, most = 0;
    for (u32 first = 0; first < p.n; first += kThreads) {
        const u32 n = first + hk::thread_x();
        const i64 len = n < p.n ? length<I>(p, n) : 0;
        if (p.make == Make::Lens) {
            if (n < p.n) out[n] = I(len);
            continue;
        }
        const u64 count = len < 0 ? 0 : splits ? (u64(len) + p.chunk - 1) / p.chunk : u64(len);
        most = count > most ? count : most;
        // The sum of this and those before it.
        u64 sum = hk::wave_scan(count);
        const u32 turn = first / kThreads % 2;
        if (hk::lane_id() == kWaveSize - 1) totals[turn][hk::wave_id()] = sum;
        hk::block_barrier();
        u64 all = 0;
        for (u32 w = 0; w < kWaves; ++w) {
            if (w < hk::wave_id()) sum += totals[turn][w];
            all += totals[turn][w];
        }
        sum += before;
        before += all;
        if (n < p.n) {
            if (p.make == Make::Starts || p.make == Make::ChunkOffsets) out[n + 1] = I(sum);
        }
        if (p.make == Make::ChunkIndices) {
            // A thread a row: it searches the sums of these sequences.
            upto[hk::thread_x()] = sum;
            hk::block_barrier();
            for (u64 row = before - all + hk::thread_x(); row < before && row < p.capacity; row += kThreads) {
                u32 low = 0, high = kThreads;  // the first sequence with more chunks up to it
                while (low < high) {
                    const u32 middle = (low + high) / 2;
                    if (upto[middle] > row) {
                        high = middle;
                    } else {
                        low = middle + 1;
                    }
                }
                out[2 * row] = I(first + low);
                out[2 * row + 1] = I(row - (low > 0 ? upto[low - 1] : before - all));
            }
            hk::block_barrier();
        }
    }
    if (p.make == Make::Starts || p.make == Make::ChunkOffsets) {
        if (hk::thread_x() == 0) out[0] = 0;
    } else if (p.make == Make::ChunkIndices) {
        for (u64 row = before + hk::thread_x(); row < p.capacity; row += kThreads) {
            out[2 * row] = I(-1);
            out[2 * row + 1] = I(-1);
        }
        if (hk::thread_x() == 0 && p.count) {
            reinterpret_cast<GlobalPtr<i32>>(p.count)[0] = before <= p.capacity ? i32(before) : -1;
        }
    } else if (p.make == Make::MaxSplits) {
        upto[hk::thread_x()] = most;
        for (u32 half = kThreads / 2; half > 0; half /= 2) {
            hk::block_barrier();
            if (hk::thread_x() < half) {
                const u64 other = upto[hk::thread_x() + half];
                most = other > most ? other : most;
                upto[hk::thread_x()] = most;
            }
        }
        if (hk::thread_x() == 0) {
            out[0] = I(most);
        }
    }
}

/// Number of the sequence of a token, and with `kPosition` the token's number in it.
template <class I, bool kPosition>
HK_FN void tokens(const Params &p) {
    const u32 t = hk::block_x() * 256 + hk::thread_x();
    if (t >= p.tokens) return;
    const auto cu = reinterpret_cast<GlobalPtr<const I>>(p.input);
    // The last sequence that begins at or before it.
    u32 low = 0, high = p.n;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (i64(cu[middle]) <= i64(t)) {
            low = middle;
        } else {
            high = middle;
        }
    }
    reinterpret_cast<GlobalPtr<I>>(p.output)[t] = kPosition ? I(i64(t) - i64(cu[low])) : I(low);
}
}  // namespace

#define INDEX_ENTRIES(I)                                         \
    HK_ENTRY(index_##I##_sequences, kThreads, sequences<hk::I>)  \
    HK_ENTRY(index_##I##_position_ids, 256, tokens<hk::I, true>) \
    HK_ENTRY(index_##I##_sequence_ids, 256, tokens<hk::I, false>)
INDEX_ENTRIES(i32)
INDEX_ENTRIES(i64)
