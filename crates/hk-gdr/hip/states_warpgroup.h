// states_warpgroup.h: states.h by warpgroup instructions (hk/warpgroup.h), of 16-bit elements and up to 128 rows of H.
//   D^T = U^T - H^T W^T,  H^T = exp(G_last) H^T + D'^T K     D' = D with the decays from its tokens to the last one
// A block has 64 columns v of a value head of a sequence. Four waves multiply: their accumulators are H^T, 64 rows v of all k. H^T and D'^T
// are operands in registers, as accumulators hold them; w and k are operands in LDS, tokens in rows. u is transposed by ldmatrix, D by
// stmatrix. Two waves load chunks, kAhead in flight, and make their decays; two store snapshots and D from LDS: a third of the
// instructions of a chunk is left to the waves that multiply, whose latency bounds the kernel where blocks are few.
// In flight: the first product while u is transposed and the snapshot goes to LDS, the second one while D does.
// Floor: bytes of w, k, u, D and snapshots.
#pragma once

#include <hk/shared.h>
#include <hk/warpgroup.h>

#include "slots.h"
#include "tokens.h"

#if defined(HK_WARPGROUPS)

namespace gdr::states {

/// Columns of H of a block, and rows of H.
inline constexpr u32 kWarpgroupCols = 64, kWarpgroupRows = 128;
/// Threads that multiply, that load and that store.
inline constexpr u32 kMultiplyThreads = 128, kLoadThreads = 64, kStoreThreads = 64;
inline constexpr u32 kStatesThreads = kMultiplyThreads + kLoadThreads + kStoreThreads;

/// A chunk in LDS.
struct WarpgroupStage {
    using Half = hk::WarpgroupRows<kMostTokens>;
    Half w[kWarpgroupRows / 64], k[kWarpgroupRows / 64], u;  // of u the block's columns
    float gates[kMostTokens], norms[kMostTokens], channels[kWarpgroupRows];
    float factors[kMostTokens];  // of a token's D' over D
    float of_rows[kWarpgroupRows];  // decays of rows k of H; without gates of channels, of all: the first
};

/// Rows by stmatrix, apart by 16 bytes more than they have: without bank conflicts.
template <u32 kRows, u32 kCols>
struct StoredRows {
    static constexpr u32 kChunks = kCols / 8 + 1;
    Vec<u32, 4> chunk[kRows * kChunks];
    HK_FN Vec<u32, 4> *at(u32 row, u32 c) { return &chunk[row * kChunks + c]; }
};

struct WarpgroupLds {
    static constexpr u32 kStages = 4, kAhead = kStages - 1;
    WarpgroupStage stages[kStages];
    StoredRows<kWarpgroupCols, kWarpgroupRows> snapshot[2];
    StoredRows<kMostTokens, kWarpgroupCols> d[2];
    // A stage: has landed, has been multiplied. Of two chunks in turn: its snapshot, its D are in LDS; both have left it.
    hk::SplitBarrier landed[kStages], multiplied[kStages], snapshot_there[2], d_there[2], left[2];

    HK_FN void init() {
        constexpr u32 kMultiply = kMultiplyThreads / hk::kWaveSize, kLoad = kLoadThreads / hk::kWaveSize,
                      kStore = kStoreThreads / hk::kWaveSize;
        for (auto &barrier : landed) barrier.init(kLoad);
        for (auto &barrier : multiplied) barrier.init(kMultiply);
        for (u32 i = 0; i < 2; ++i) snapshot_there[i].init(kMultiply), d_there[i].init(kMultiply), left[i].init(kStore);
    }
};

using hk::detail::copy_to_lds, hk::detail::lds_address;

namespace detail {
/// Barrier of the waves that load.
HK_FN void loaders_barrier() { asm volatile("bar.sync 1, %0;" : : "n"(kLoadThreads) : "memory"); }
/// Two values as 16-bit floats.
template <class T>
HK_FN u32 packed(float a, float b) {
    return __builtin_bit_cast(u32, hk::narrow<T, 2>(Vec<float, 2>{a, b}));
}
}  // namespace detail

/// A block's columns, and the chunks of its sequence.
struct WarpgroupWork {
    u32 first_col, head, k_head, n;
    Sequence sequence;

    HK_FN explicit WarpgroupWork(const Prefill &p)
        : first_col(0), head(0), k_head(0), n(block(p) / p.v_heads), sequence(p, n < p.sequences ? n : 0) {
        first_col = hk::block_x() % slices(p) * kWarpgroupCols;
        head = block(p) % p.v_heads, k_head = head / p.group;
    }
    HK_FN static u32 slices(const Prefill &p) { return (p.v_dim + kWarpgroupCols - 1) / kWarpgroupCols; }
    HK_FN static u32 block(const Prefill &p) { return hk::block_x() / slices(p); }
    HK_FN u32 chunks(const Prefill &p) const { return (sequence.tokens + p.chunk - 1) / p.chunk; }
    HK_FN u32 rows(const Prefill &p, u32 c) const {
        const u32 left = sequence.tokens - c * p.chunk;
        return left < p.chunk ? left : p.chunk;
    }
};

/// Rows of a tensor as a thread copies them to LDS: a 16-byte chunk of every kApart-th token, of 64 columns and of 64 more.
template <class T>
struct LoadedRows {
    using Half = WarpgroupStage::Half;
    static constexpr u32 kApart = kLoadThreads / Half::kChunks;
    u64 at;
    u32 row_bytes, offset, bytes[2];

    HK_FN LoadedRows(const Heads &of, const Sequence &sequence, u32 head, u32 first_col, u32 cols, u32 thread)
        : at(of.data), row_bytes(u32(of.token) * u32(sizeof(T))) {
        const u32 place = thread / Half::kChunks, col = first_col + (thread % Half::kChunks ^ Half::swizzle(place)) * 8;
        bytes[0] = col < cols ? 16 : 0, bytes[1] = col + 64 < cols ? 16 : 0;
        offset = place * row_bytes + (bytes[0] ? col : 0) * u32(sizeof(T));
        const i64 first = i64(sequence.batch) * of.batch + i64(u64(sequence.first)) * of.token + i64(head) * of.head;
        at += u64(first) * sizeof(T);
    }
    /// Starts to load a chunk of `rows` tokens from `from` on, to `to[0]`, `to[1]`. `kWhole`: all 64, and all columns.
    template <bool kWhole, u32 kHalves>
    HK_FN void copy(u64 from, u32 rows, Half *to, u32 thread) const {
#pragma unroll
        for (u32 i = 0; i < kMostTokens / kApart; ++i) {
            const u32 row = thread / Half::kChunks + i * kApart;
            const bool there = kWhole || row < rows;
            const u64 of_row = from + (there ? offset + i * kApart * row_bytes : 0);
#pragma unroll
            for (u32 half = 0; half < kHalves; ++half) {
                const u32 place = lds_address(&to[half].chunk[i * kLoadThreads + thread]);
                if constexpr (kWhole) {
                    copy_to_lds(place, of_row + half * 128);
                } else {
                    const u32 size = there ? bytes[half] : 0;
                    copy_to_lds<16>(place, size ? of_row + half * 128 : from, size);
                }
            }
        }
    }
};

/// Loads chunks and makes their decays.
template <class T, bool kChannels>
HK_FN void load_chunks(const Prefill &p, const WarpgroupWork &work, WarpgroupLds &lds) {
    constexpr u32 kStages = WarpgroupLds::kStages, kAhead = WarpgroupLds::kAhead, kHalves = kWarpgroupRows / 64;
    const u32 thread = hk::thread_x() - kMultiplyThreads, chunks = work.chunks(p);
    const LoadedRows<T> w(p.w, work.sequence, work.head, 0, p.k_dim, thread);
    const LoadedRows<T> k(p.k, work.sequence, work.k_head, 0, p.k_dim, thread);
    const LoadedRows<T> u(p.u, work.sequence, work.head, work.first_col, p.v_dim, thread);
    const u64 first_row = u64(work.sequence.batch) * p.tokens + work.sequence.first;
    const bool all_columns = p.k_dim == kWarpgroupRows && p.v_dim - work.first_col >= kWarpgroupCols;

    const auto copy = [&](u32 c) __attribute__((always_inline)) {
        if (c < chunks) {
            auto &to = lds.stages[c % kStages];
            const u32 rows = work.rows(p, c);
            const u64 before = u64(c) * p.chunk;
            const u64 from_w = w.at + before * w.row_bytes, from_k = k.at + before * k.row_bytes,
                      from_u = u.at + before * u.row_bytes;
            if (rows == kMostTokens && all_columns) {
                w.template copy<true, kHalves>(from_w, rows, to.w, thread);
                k.template copy<true, kHalves>(from_k, rows, to.k, thread);
                u.template copy<true, 1>(from_u, rows, &to.u, thread);
            } else {
                w.template copy<false, kHalves>(from_w, rows, to.w, thread);
                k.template copy<false, kHalves>(from_k, rows, to.k, thread);
                u.template copy<false, 1>(from_u, rows, &to.u, thread);
            }
            const u64 row = first_row + before;
            const u32 there = thread < rows ? thread : rows - 1;
            if (p.g)
                copy_to_lds<4>(lds_address(&to.gates[thread]), p.g + ((row + there) * p.v_heads + work.head) * 4, 4);
            if (p.norms) {
                const u64 at = (row + there) * p.k_heads + work.k_head;
                copy_to_lds<4>(lds_address(&to.norms[thread]), p.norms + at * 4, 4);
            }
            if constexpr (kChannels) {
                const u64 at = ((row + rows - 1) * p.v_heads + work.head) * p.k_dim;
#pragma unroll
                for (u32 i = 0; i < kHalves; ++i) {
                    const u32 channel = 64 * i + thread;
                    const bool there = channel < p.k_dim;
                    copy_to_lds<4>(lds_address(&to.channels[channel]), p.gk + (at + (there ? channel : 0)) * 4,
                                   there ? 4 : 0);
                }
            }
        }
        hk::commit_loads();
    };

    const float unit = p.base_2 ? 1.0f : kLog2E;
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i) copy(i);
    for (u32 c = 0; c < chunks; ++c) {
        hk::wait_loads<kAhead - 1, 1>();
        detail::loaders_barrier();
        auto &stage = lds.stages[c % kStages];
        const float last = p.g ? stage.gates[work.rows(p, c) - 1] : 0.0f;
        const float gate = p.g ? stage.gates[thread] : 0.0f, norm = p.norms ? stage.norms[thread] : 1.0f;
        stage.factors[thread] = decay(last - gate, unit) * norm;
        if constexpr (kChannels) {
#pragma unroll
            for (u32 i = 0; i < kHalves; ++i)
                stage.of_rows[64 * i + thread] = decay(stage.channels[64 * i + thread], kLog2E);
        } else {
            if (thread == 0) stage.of_rows[0] = decay(last, unit);
        }
        hk::detail::publish_to_wgmma();
        lds.landed[c % kStages].arrive();
        if (c > 0) lds.multiplied[(c - 1) % kStages].wait((c - 1) / kStages % 2);
        copy(c + kAhead);
    }
    hk::wait_loads<0, 0>();
}

/// Stores snapshots and D.
template <class T>
HK_FN void store_chunks(const Prefill &p, const WarpgroupWork &work, WarpgroupLds &lds) {
    const u32 thread = hk::thread_x() - kMultiplyThreads - kLoadThreads, chunks = work.chunks(p);
    // The thread's 16-byte chunks of every 4th row v of a snapshot, of every 8th token of D.
    constexpr u32 kOfRow = kWarpgroupRows / 8, kOfToken = kWarpgroupCols / 8;
    constexpr u32 kRows = kStoreThreads / kOfRow, kTokens = kStoreThreads / kOfToken;
    constexpr u32 kPartsOfH = kWarpgroupCols / kRows, kPartsOfD = kMostTokens / kTokens;
    const u32 row_h = thread / kOfRow, col_h = thread % kOfRow, row_d = thread / kOfToken, col_d = thread % kOfToken;
    const u32 cols = p.v_dim - work.first_col, size = p.k_dim * p.v_dim;
    const bool has_h = p.h && p.h_vk && col_h * 8 < p.k_dim, has_d = p.d.data && col_d * 8 < cols;
    auto to_h = reinterpret_cast<GlobalPtr<T>>(p.h) + (u64(work.sequence.chunk) * p.v_heads + work.head) * size +
                (work.first_col + row_h) * p.k_dim + col_h * 8;
    auto to_d = reinterpret_cast<GlobalPtr<T>>(p.d.data) + i64(work.sequence.batch) * p.d.batch +
                i64(work.head) * p.d.head + i64(u64(work.sequence.first + row_d)) * p.d.token + work.first_col +
                col_d * 8;
    for (u32 c = 0; c < chunks; ++c) {
        const u32 turn = c % 2, parity = c / 2 % 2;
        Vec<u32, 4> of_h[kPartsOfH], of_d[kPartsOfD];
        lds.snapshot_there[turn].wait(parity);
#pragma unroll
        for (u32 i = 0; i < kPartsOfH; ++i) of_h[i] = *lds.snapshot[turn].at(row_h + kRows * i, col_h);
#pragma unroll
        for (u32 i = 0; i < kPartsOfH; ++i) {
            if (has_h && row_h + kRows * i < cols)
                *reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(to_h + kRows * i * p.k_dim) = of_h[i];
        }
        to_h += u64(p.v_heads) * size;
        lds.d_there[turn].wait(parity);
#pragma unroll
        for (u32 i = 0; i < kPartsOfD; ++i) of_d[i] = *lds.d[turn].at(row_d + kTokens * i, col_d);
        lds.left[turn].arrive();
        const u32 rows = work.rows(p, c);
#pragma unroll
        for (u32 i = 0; i < kPartsOfD; ++i) {
            if (has_d && row_d + kTokens * i < rows)
                *reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(to_d + i64(kTokens * i) * p.d.token) = of_d[i];
        }
        to_d += i64(p.chunk) * p.d.token;
    }
}

/// Both products, and the states.
template <class T, bool kChannels>
HK_FN void multiply_states(const Prefill &p, const WarpgroupWork &work, WarpgroupLds &lds) {
    using Pair = Vec<float, 2>;
    using R = Rows<T, Access::Vectorized>;
    constexpr u32 kStages = WarpgroupLds::kStages;
    constexpr int kOfK = kWarpgroupRows / 8, kOfTokens = kMostTokens / 8;  // groups of 8 columns of accumulators
    const auto &sequence = work.sequence;
    const u32 head = work.head, chunks = work.chunks(p), wave = hk::wave_id(), lane = hk::lane_id();
    // The lane has columns k, or tokens, 8 j + pair and the next one of rows v, v + 8.
    const u32 pair = 2 * (lane % 4), v = work.first_col + 16 * wave + lane / 4;

    const i32 slot = p.slots ? hk::load_uniform<i32>(p.slots + 4 * u64(work.n)) : i32(work.n);
    const bool poison = !sequence.in_range || (p.slots && slot >= i32(p.n_slots));
    float h[4 * kOfK];
    const auto each = [&](auto f) __attribute__((always_inline)) {
#pragma unroll
        for (u32 i = 0; i < 4 * kOfK; ++i) f(h[i], i / 4 * 8 + pair + i % 2, v + i % 4 / 2 * 8);
    };
    const auto place = [&](u32 k, u32 v, u32 size) {
        const u32 past = (p.k_dim - 1 - k) | (p.v_dim - 1 - v);
        return (k * p.k_stride + v * p.v_stride) * size | (past & Window::kOutOfBounds);
    };
    if (p.from && !poison && slot >= 0) {
        if (p.bf16_states) {
            const Window from = state<hk::bf16>(p, p.from, p.from_slot, slot, head);
            each([&](float &h, u32 k, u32 v) { h = float(from.load<hk::bf16>(place(k, v, 2))); });
        } else {
            const Window from = state<float>(p, p.from, p.from_slot, slot, head);
            each([&](float &h, u32 k, u32 v) { h = from.load<float>(place(k, v, 4)); });
        }
    } else {
        each([&](float &h, u32, u32) { h = poison ? __builtin_nanf("") : 0.0f; });
    }

    // The lane's row of the four matrices of ldmatrix and stmatrix: rows v of the second and fourth are 8 further on.
    const u32 of_v = 2 * wave + lane / 8 % 2, of_token = lane / 16 * 8 + lane % 8;
    for (u32 c = 0; c < chunks; ++c) {
        const u32 turn = c % 2;
        auto &stage = lds.stages[c % kStages];
        Frag of_h[kOfK / 4];
#pragma unroll
        for (int i = 0; i < 2 * kOfK; ++i)
            of_h[i / 8][i % 2 * 4 + i % 8 / 2] = detail::packed<T>(h[2 * i], h[2 * i + 1]);

        if (p.h && !p.h_vk) {
            const u64 number = sequence.chunk + c;
            const auto to_chunk =
                reinterpret_cast<GlobalPtr<T>>(p.h) + (number * p.v_heads + head) * (p.k_dim * p.v_dim);
            const R to(to_chunk, p.k_dim, p.v_dim, p.v_dim);
#pragma unroll
            for (u32 i = 0; i < 2 * kOfK; ++i) {
                const auto values = __builtin_bit_cast(Vec<T, 2>, u32(of_h[i / 8][i % 2 * 4 + i % 8 / 2]));
#pragma unroll
                for (u32 e = 0; e < 2; ++e) to.window.store(values[e], to.at(i / 2 * 8 + pair + e, v + i % 2 * 8));
            }
        }

        lds.left[turn].wait((c / 2 + 1) % 2);
        lds.landed[c % kStages].wait(c / kStages % 2);
        const auto two = [&](const float *of, u32 i) { return *reinterpret_cast<const Pair *>(&of[8 * i + pair]); };
        if constexpr (kChannels) {
#pragma unroll
            for (u32 i = 0; i < kOfK; ++i) {
                const Pair of_rows = two(stage.of_rows, i);
#pragma unroll
                for (u32 e = 0; e < 2; ++e) h[4 * i + e] *= of_rows[e], h[4 * i + 2 + e] *= of_rows[e];
            }
        } else {
            const float of_last = stage.of_rows[0];
#pragma unroll
            for (int i = 0; i < 4 * kOfK; ++i) h[i] *= of_last;
        }
        // No branches from here on: around them the compiler would wait for MMAs.
        float d[4 * kOfTokens];
        hk::detail::begin_wgmma();
        hk::detail::multiply_frags<T>(d, of_h, [&](int i) { return stage.w[i / 4].descriptor(0, i % 4 * 32); });
        hk::detail::commit_wgmma();

        u32 us[kOfTokens / 2][4];
#pragma unroll
        for (u32 i = 0; i < kOfTokens / 2; ++i) {
            const u32 row = 16 * i + of_token;
            hk::detail::ldmatrix_x4_trans(us[i], &stage.u.chunk[row * 8 + (of_v ^ stage.u.swizzle(row))]);
        }
        Pair factor[kOfTokens];
#pragma unroll
        for (u32 i = 0; i < kOfTokens; ++i) factor[i] = two(stage.factors, i);
#pragma unroll
        for (u32 i = 0; i < kOfK / 2; ++i) {
            const u32 words[4] = {of_h[i / 2][i % 2 * 2], of_h[i / 2][i % 2 * 2 + 4], of_h[i / 2][i % 2 * 2 + 1],
                                  of_h[i / 2][i % 2 * 2 + 5]};
            hk::detail::stmatrix_x4(words, lds.snapshot[turn].at(16 * wave + lane % 16, 2 * i + lane / 16));
        }
        lds.snapshot_there[turn].arrive();
        hk::detail::wait_wgmma<0>(d);
        hk::detail::keep_until_here(of_h);

        Frag of_d[kOfTokens / 4];
#pragma unroll
        for (u32 i = 0; i < kOfTokens / 2; ++i) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                // Rows v, v + 8 of tokens 8 * group on.
                const u32 group = 2 * i + j / 2, first = 4 * group + j % 2 * 2;
                const Pair u = hk::widen<T, 2>(__builtin_bit_cast(Vec<T, 2>, us[i][j]));
                const float a = u[0] - d[first], b = u[1] - d[first + 1];
                us[i][j] = detail::packed<T>(a, b);
                of_d[group / 4][j % 2 * 4 + group % 4] = detail::packed<T>(a * factor[group][0], b * factor[group][1]);
            }
        }
        hk::detail::begin_wgmma();
#pragma unroll
        for (int i = 0; i < kOfTokens / 2; ++i) {
            const u64 of_k = stage.k[0].template descriptor<int(sizeof(stage.k[0]))>(16 * i, 0);
            hk::detail::WgmmaStep<T, kWarpgroupRows>::template add<true>(h, of_d[i / 2], i % 2, of_k);
        }
        hk::detail::commit_wgmma();
#pragma unroll
        for (u32 i = 0; i < kOfTokens / 2; ++i)
            hk::detail::stmatrix_x4_trans(us[i], lds.d[turn].at(16 * i + of_token, of_v));
        lds.d_there[turn].arrive();
        hk::detail::wait_wgmma<0>(h);
        hk::detail::keep_until_here(of_d);
        lds.multiplied[c % kStages].arrive();
    }

    if (!p.to || poison || slot < 0 || (p.slots && sequence.tokens == 0)) return;
    if (p.bf16_states) {
        const Window to = state<hk::bf16>(p, p.to, p.to_slot, slot, head);
        each([&](float h, u32 k, u32 v) { to.store(hk::bf16(h), place(k, v, 2)); });
    } else {
        const Window to = state<float>(p, p.to, p.to_slot, slot, head);
        each([&](float h, u32 k, u32 v) { to.store(h, place(k, v, 4)); });
    }
}

template <class T, bool kChannels = false>
HK_FN void warpgroup_states(const Prefill &p) {
    auto &lds = hk::block_lds<WarpgroupLds>();
    const WarpgroupWork work(p);
    if (work.n >= p.sequences) return;
    if (hk::thread_x() == 0) lds.init();
    hk::block_barrier();
    // The same in all lanes: else the compiler would wait for each MMA.
    const u32 role = hk::shuffle(hk::thread_x() / 64, 0);
    if (role < kMultiplyThreads / 64) {
        multiply_states<T, kChannels>(p, work, lds);
    } else if (role == kMultiplyThreads / 64) {
        load_chunks<T, kChannels>(p, work, lds);
    } else {
        store_chunks<T>(p, work, lds);
    }
}
}  // namespace gdr::states

#endif
