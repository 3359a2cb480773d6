// states_warpgroup.h: states.h by warpgroup instructions (hk/warpgroup.h), of 16-bit elements and up to 128 rows of H.
//   D^T = U^T - H^T W^T,  H^T = exp(G_last) H^T + D'^T K     D' = D with the decays from its tokens to the last one
// One warpgroup for 64 columns v of a value head of a sequence. Its accumulators are H^T, 64 rows v of all k. H^T and D'^T are operands in
// registers, as accumulators hold them; w and k are operands in LDS, tokens in rows. u becomes D in LDS, transposed by ldmatrix and stmatrix.
// In flight: the next kAhead chunks; the first product while H is decayed and its snapshot stored; the second one while D is stored.
// Floor: bytes of w, k, u, D and snapshots; the latency of a chunk, which is of two products in a row, is half of that with 64 blocks.
#pragma once

#include <hk/shared.h>
#include <hk/warpgroup.h>

#include "tokens.h"

#if defined(HK_WARPGROUPS)

namespace gdr::states {

/// Columns of H of a block, and rows of H.
inline constexpr u32 kWarpgroupCols = 64, kWarpgroupRows = 128;

/// A chunk in LDS.
struct WarpgroupStage {
    using Half = hk::WarpgroupRows<kMostTokens>;
    Half w[kWarpgroupRows / 64], k[kWarpgroupRows / 64], u;  // of u, then D, the block's columns
    float gates[kMostTokens], norms[kMostTokens], of_channels[kWarpgroupRows];

    /// Elements of u, or D, of the wave's 16 columns and 16 tokens from `first` on: where the lane's row is of four transposed matrices,
    /// which are a fragment of its accumulators.
    HK_FN Vec<u32, 4> *transposed(u32 first) {
        const u32 lane = hk::lane_id(), row = first + lane / 16 * 8 + lane % 8;
        return &u.chunk[row * Half::kChunks + ((2 * hk::wave_id() + lane / 8 % 2) ^ Half::swizzle(row))];
    }
};

struct WarpgroupLds {
    static constexpr u32 kAhead = 3, kStages = kAhead + 1;
    WarpgroupStage stages[kStages];
    hk::WarpgroupRows<kWarpgroupCols> snapshot[kWarpgroupRows / 64];
};

/// The thread's 16-byte chunks of 64 rows, 128 bytes of each.
template <class R>
struct WarpgroupCopy {
    static constexpr u32 kRowsAtOnce = 16, kThreads = 128;
    using Half = WarpgroupStage::Half;

    /// Starts to load columns from `col` on.
    HK_FN static void copy(const R &of, u32 col, Half &to) {
        const u32 thread = hk::thread_x(), place = thread / Half::kChunks;
        const u32 first = of.at(place, col + (thread % Half::kChunks ^ Half::swizzle(place)) * R::V);
#pragma unroll
        for (u32 i = 0; i < kMostTokens / kRowsAtOnce; ++i)
            of.window.load_to_lds(&to.chunk[i * kThreads + hk::wave_id() * hk::kWaveSize],
                                  first + i * kRowsAtOnce * of.row_bytes, 0);
    }
};

/// Two values as 16-bit floats.
template <class T>
HK_FN u32 packed(float a, float b) {
    return __builtin_bit_cast(u32, hk::narrow<T, 2>(Vec<float, 2>{a, b}));
}

template <class T, bool kChannels = false>
HK_FN void warpgroup_states(const Prefill &p) {
    using R = Rows<T, Access::Vectorized>;
    using Pair = Vec<float, 2>;
    constexpr u32 kAhead = WarpgroupLds::kAhead;
    constexpr int kOfK = kWarpgroupRows / 8, kOfTokens = kMostTokens / 8;  // groups of 8 columns of accumulators
    auto &lds = hk::block_lds<WarpgroupLds>();
    const u32 slices = (p.v_dim + kWarpgroupCols - 1) / kWarpgroupCols;
    const u32 first_col = hk::block_x() % slices * kWarpgroupCols, rest = hk::block_x() / slices;
    const u32 head = rest % p.v_heads, n = rest / p.v_heads;
    if (n >= p.sequences) return;
    const Sequence sequence(p, n);
    const u32 k_head = head / p.group;
    const u32 wave = hk::wave_id(), lane = hk::lane_id();
    // The lane has columns k, or tokens, 8 j + pair and the next one of rows v, v + 8.
    const u32 pair = 2 * (lane % 4), v = first_col + 16 * wave + lane / 4;

    const i32 slot = p.slots ? hk::load_uniform<i32>(p.slots + 4 * u64(n)) : i32(n);
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

    const auto rows_at = [&](u32 at) { return sequence.tokens - at < p.chunk ? sequence.tokens - at : p.chunk; };
    const auto copy = [&](u32 at, WarpgroupStage &to) __attribute__((always_inline)) {
        if (at < sequence.tokens) {
            const u32 rows = rows_at(at), token = sequence.first + at;
            const R w(p.w, sequence.batch, token, head, rows, p.k_dim);
            const R k(p.k, sequence.batch, token, k_head, rows, p.k_dim);
#pragma unroll
            for (u32 i = 0; i < kWarpgroupRows / 64; ++i) {
                WarpgroupCopy<R>::copy(w, 64 * i, to.w[i]);
                WarpgroupCopy<R>::copy(k, 64 * i, to.k[i]);
            }
            WarpgroupCopy<R>::copy(R(p.u, sequence.batch, token, head, rows, p.v_dim), first_col, to.u);
            const u64 row = u64(sequence.batch) * p.tokens + token;
            const auto floats = [&](u64 data, u64 first, u32 stride, u32 count, float *to, u32 i)
                                    __attribute__((always_inline)) {
                const Window from(reinterpret_cast<GlobalPtr<const float>>(data) + first,
                                  data ? ((count - 1) * stride + 1) * 4 : 0);
                from.load_dword_to_lds(to, i * stride * 4, 0);
            };
            const u32 part = wave % 2 * hk::kWaveSize;
            if (wave < 2) {
                floats(p.g, row * p.v_heads + head, p.v_heads, rows, to.gates + part, part + lane);
            } else {
                floats(p.norms, row * p.k_heads + k_head, p.k_heads, rows, to.norms + part, part + lane);
            }
            if constexpr (kChannels) {
                floats(p.gk, ((row + rows - 1) * p.v_heads + head) * p.k_dim, 1, p.k_dim,
                       to.of_channels + wave * hk::kWaveSize, hk::thread_x());
            }
        }
        hk::commit_loads();
    };
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i) copy(i * p.chunk, lds.stages[i]);

    const float unit = p.base_2 ? 1.0f : kLog2E;
    u32 now = 0, next = kAhead;
    for (u32 at = 0; at < sequence.tokens; at += p.chunk) {
        const u32 rows = rows_at(at), token = sequence.first + at;
        auto &stage = lds.stages[now];
        Frag of_h[kOfK / 4];
#pragma unroll
        for (int i = 0; i < 2 * kOfK; ++i) of_h[i / 8][i % 2 * 4 + i % 8 / 2] = packed<T>(h[2 * i], h[2 * i + 1]);

        hk::wait_loads<kAhead - 1, 1>();
        hk::detail::publish_to_wgmma();
        hk::block_barrier();  // all waves have read the stage that `next` overwrites
        float d[4 * kOfTokens];
        hk::detail::begin_wgmma();
#pragma unroll
        for (int i = 0; i < kOfK / 2; ++i) {
            const u64 of_w = stage.w[i / 4].descriptor(0, i % 4 * 32);
            if (i == 0) {
                hk::detail::WgmmaFrag<T, kMostTokens>::set(d, of_h[0], 0, of_w);
            } else {
                hk::detail::WgmmaFrag<T, kMostTokens>::add(d, of_h[i / 2], i % 2, of_w);
            }
        }
        hk::detail::commit_wgmma();

        copy(at + kAhead * p.chunk, lds.stages[next]);
        if (p.h) {
            const u64 number = sequence.chunk + at / p.chunk;
            const auto to_chunk =
                reinterpret_cast<GlobalPtr<T>>(p.h) + (number * p.v_heads + head) * (p.k_dim * p.v_dim);
            if (p.h_vk) {
                const R to(to_chunk, p.v_dim, p.k_dim, p.k_dim);
                hk::wave_barrier();  // all lanes have read the snapshot before
#pragma unroll
                for (u32 i = 0; i < kOfK / 2; ++i) {
                    const u32 row = 16 * wave + lane % 16, chunk = 2 * i + lane / 16;
                    auto &part = lds.snapshot[chunk / 8];
                    const u32 words[4] = {of_h[i / 2][i % 2 * 2], of_h[i / 2][i % 2 * 2 + 4],
                                          of_h[i / 2][i % 2 * 2 + 1], of_h[i / 2][i % 2 * 2 + 5]};
                    hk::detail::stmatrix_x4(words, &part.chunk[row * 8 + (chunk % 8 ^ part.swizzle(row))]);
                }
                hk::wave_barrier();
#pragma unroll
                for (u32 i = 0; i < kOfK / 2; ++i) {
                    const u32 row = 16 * wave + i % 4 * 4 + lane / 8, chunk = lane % 8;
                    auto &part = lds.snapshot[i / 4];
                    to.put(part.chunk[row * 8 + (chunk ^ part.swizzle(row))], first_col + row, i / 4 * 64 + chunk * 8);
                }
            } else {
                const R to(to_chunk, p.k_dim, p.v_dim, p.v_dim);
#pragma unroll
                for (u32 i = 0; i < 2 * kOfK; ++i) {
                    const auto two = __builtin_bit_cast(Vec<T, 2>, u32(of_h[i / 8][i % 2 * 4 + i % 8 / 2]));
#pragma unroll
                    for (u32 e = 0; e < 2; ++e) to.window.store(two[e], to.at(i / 2 * 8 + pair + e, v + i % 2 * 8));
                }
            }
        }
        const auto two = [&](const float *of, u32 i) { return *reinterpret_cast<const Pair *>(&of[8 * i + pair]); };
        const float last = stage.gates[rows - 1];
        Pair factor[kOfTokens];
#pragma unroll
        for (u32 i = 0; i < kOfTokens; ++i) {
            const Pair gates = two(stage.gates, i), norms = p.norms ? two(stage.norms, i) : Pair(1.0f);
#pragma unroll
            for (u32 e = 0; e < 2; ++e) factor[i][e] = decay(last - gates[e], unit) * norms[e];
        }
        if constexpr (kChannels) {
            // Of each row k.
#pragma unroll
            for (u32 i = 0; i < kOfK; ++i) {
                const Pair gates = two(stage.of_channels, i);
#pragma unroll
                for (u32 e = 0; e < 2; ++e) {
                    const float of_last = decay(gates[e], kLog2E);
                    h[4 * i + e] *= of_last, h[4 * i + 2 + e] *= of_last;
                }
            }
        } else {
            const float of_last = decay(last, unit);
#pragma unroll
            for (int i = 0; i < 4 * kOfK; ++i) h[i] *= of_last;
        }
        hk::detail::wait_wgmma<0>(d);
        hk::detail::keep_until_here(of_h);

        Frag of_d[kOfTokens / 4];
#pragma unroll
        for (u32 i = 0; i < kOfTokens / 2; ++i) {
            u32 words[4];
            auto *transposed = stage.transposed(16 * i);
            hk::detail::ldmatrix_x4_trans(words, transposed);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                // Rows v, v + 8 of tokens 8 * group on.
                const u32 group = 2 * i + j / 2, first = 4 * group + j % 2 * 2;
                const Pair u = hk::widen<T, 2>(__builtin_bit_cast(Vec<T, 2>, words[j]));
                const float a = u[0] - d[first], b = u[1] - d[first + 1];
                words[j] = packed<T>(a, b);
                of_d[group / 4][j % 2 * 4 + group % 4] = packed<T>(a * factor[group][0], b * factor[group][1]);
            }
            if (p.d.data) hk::detail::stmatrix_x4_trans(words, transposed);
        }
        hk::detail::begin_wgmma();
#pragma unroll
        for (int i = 0; i < kOfTokens / 2; ++i) {
            const u64 of_k = stage.k[0].template descriptor<int(sizeof(stage.k[0]))>(16 * i, 0);
            hk::detail::WgmmaFrag<T, kWarpgroupRows>::add_columns(h, of_d[i / 2], i % 2, of_k);
        }
        hk::detail::commit_wgmma();
        if (p.d.data) {
            const R to(p.d, sequence.batch, token, head, rows, p.v_dim);
            hk::wave_barrier();
#pragma unroll
            for (u32 i = 0; i < kOfTokens / 2; ++i)
                to.put(*stage.transposed(16 * i), 16 * i + lane / 16 * 8 + lane % 8,
                       first_col + 16 * wave + lane / 8 % 2 * 8);
        }
        hk::detail::wait_wgmma<0>(h);
        hk::detail::keep_until_here(of_d);
        now = now == kAhead ? 0 : now + 1;
        next = next == kAhead ? 0 : next + 1;
    }
    hk::wait_loads<0, 0>();

    if (!p.to || poison || slot < 0 || (p.slots && sequence.tokens == 0)) return;
    if (p.bf16_states) {
        const Window to = state<hk::bf16>(p, p.to, p.to_slot, slot, head);
        each([&](float h, u32 k, u32 v) { to.store(hk::bf16(h), place(k, v, 2)); });
    } else {
        const Window to = state<float>(p, p.to, p.to_slot, slot, head);
        each([&](float h, u32 k, u32 v) { to.store(h, place(k, v, 4)); });
    }
}
}  // namespace gdr::states

#endif
