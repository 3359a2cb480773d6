// outputs_warpgroup.h: outputs.hip by warpgroup instructions (hk/warpgroup.h), of 16-bit elements and up to 128 rows of H.
//   o = scale (exp(G) Q H + P D)     P = Q K^T with the decays between tokens, on and below the diagonal
// Four waves for a chunk of a value head and 128 columns v. Q and P are operands in registers, k, H and D in LDS.
// In flight: H and D during Q K^T, D during Q H, which is in flight while P is made.
// Floor: bytes of q, k, D, H, o.
#pragma once

#include "tokens_warpgroup.h"

#if defined(HK_WARPGROUPS)

namespace gdr::warpgroup {

/// Columns of a block, and most columns k.
inline constexpr u32 kWarpgroupCols = 128;

struct WarpgroupLds {
    using Tokens = hk::WarpgroupRows<kMostTokens>;
    using State = hk::WarpgroupRows<kWarpgroupCols>;
    Tokens q[2], k[2], d[2];  // of q, then o
    State h[2];  // rows v, or k
    float gates[kMostTokens], norms[kMostTokens];
};

template <class T>
HK_FN void warpgroup_outputs(const Prefill &p) {
    using R = Rows<T, Access::Vectorized>;
    using Pair = Vec<float, 2>;
    constexpr int kSteps = 128 / 16, kOfTokens = kMostTokens / 8;
    auto &lds = hk::block_lds<WarpgroupLds>();
    const u32 slices = (p.v_dim + kWarpgroupCols - 1) / kWarpgroupCols;
    const u32 v0 = hk::block_x() % slices * kWarpgroupCols, rest = hk::block_x() / slices;
    const u32 head = rest % p.v_heads, number = rest / p.v_heads, k_head = head / p.group;
    const Chunk chunk(p, number);
    const u32 rows = chunk.tokens;
    if (rows == 0) return;
    const R q(p.q, chunk.batch, chunk.first, k_head, rows, p.k_dim);
    const R k(p.k, chunk.batch, chunk.first, k_head, rows, p.k_dim);
    const R d(p.d, chunk.batch, chunk.first, head, rows, p.v_dim);
    const R o(p.o, chunk.batch, chunk.first, head, rows, p.v_dim);
    const auto state = reinterpret_cast<GlobalPtr<T>>(p.h) + (u64(number) * p.v_heads + head) * (p.k_dim * p.v_dim);
    const R h = p.h_vk ? R(state, p.v_dim, p.k_dim, p.k_dim) : R(state, p.k_dim, p.v_dim, p.v_dim);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        copy(q, 0, 64 * i, lds.q[i]);
        copy(k, 0, 64 * i, lds.k[i]);
    }
    hk::commit_loads();
#pragma unroll
    for (u32 i = 0; i < 2; ++i) copy(h, p.h_vk ? v0 : 0, 64 * i + (p.h_vk ? 0 : v0), lds.h[i]);
    hk::commit_loads();
#pragma unroll
    for (u32 i = 0; i < 2; ++i) copy(d, 0, v0 + 64 * i, lds.d[i]);
    hk::commit_loads();
    const u32 thread = hk::thread_x(), wave = hk::wave_id(), lane = hk::lane_id();
    if (thread < kMostTokens) {
        const u64 at = chunk.row(p) + (thread < rows ? thread : rows - 1);
        lds.gates[thread] = p.g ? reinterpret_cast<GlobalPtr<const float>>(p.g)[at * p.v_heads + head] : 0.0f;
        lds.norms[thread] = p.norms ? reinterpret_cast<GlobalPtr<const float>>(p.norms)[at * p.k_heads + k_head] : 1.0f;
    }

    wait_for_operands<2>();
    // The lane has tokens i = own, own + 8, of columns j or v 8 n + pair and the next one.
    const u32 own = 16 * wave + lane / 4, pair = 2 * (lane % 4);
    const u32 row_of_tile = 16 * wave + lane % 16;
    const auto chunk_of = [&](WarpgroupLds::Tokens(&of)[2], u32 c) -> Vec<u32, 4> * {
        return &of[c / 8].chunk[row_of_tile * 8 + (c % 8 ^ of[0].swizzle(row_of_tile))];
    };
    Frag of_q[kSteps / 2];
    float squares[2] = {};
#pragma unroll
    for (u32 i = 0; i < kSteps; ++i) {
        u32 words[4];
        hk::detail::ldmatrix_x4(words, chunk_of(lds.q, 2 * i + lane / 16));
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const Pair two = hk::widen<T, 2>(__builtin_bit_cast(Vec<T, 2>, words[e]));
            squares[e % 2] = __builtin_fmaf(two[0], two[0], __builtin_fmaf(two[1], two[1], squares[e % 2]));
            of_q[i / 2][i % 2 * 2 + e / 2 + e % 2 * 4] = words[e];
        }
    }
    float s[4 * kOfTokens], out[64];
    hk::detail::begin_wgmma();
    hk::detail::multiply_frags<T>(s, of_q, [&](int i) { return lds.k[i / 4].descriptor(0, i % 4 * 32); });
    hk::detail::commit_wgmma();
    wait_for_operands<1>();
    if (p.h_vk) {
        hk::detail::multiply_frags<T>(out, of_q, [&](int i) { return lds.h[i / 4].descriptor(0, i % 4 * 32); });
    } else {
#pragma unroll
        for (float &e : out) e = 0.0f;
        hk::detail::begin_wgmma();
#pragma unroll
        for (u32 i = 0; i < kSteps; ++i)
            hk::detail::WgmmaStep<T, 128>::template add<true>(
                out, of_q[i / 2], i % 2, lds.h[0].template descriptor<int(sizeof(lds.h[0]))>(16 * i, 0));
    }
    hk::detail::commit_wgmma();
    hk::detail::wait_wgmma<1>(s);

    const float unit = p.base_2 ? 1.0f : kLog2E;
    const auto two = [&](const float *of, u32 i) { return *reinterpret_cast<const Pair *>(&of[8 * i + pair]); };
    float gate[2], of_state[2], factor[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        gate[r] = lds.gates[own + 8 * r];
        of_state[r] = decay(gate[r], unit);
        float sum = squares[r];
        sum += hk::shuffle_xor<1>(sum);
        sum += hk::shuffle_xor<2>(sum);
        factor[r] = p.l2norm ? p.scale / __builtin_sqrtf(sum + 1e-6f) : p.scale;
        if (!chunk.in_range) factor[r] = __builtin_nanf("");
    }
    Frag of_p[kOfTokens / 4];
#pragma unroll
    for (u32 j = 0; j < kOfTokens; ++j) {
        const Pair gates = two(lds.gates, j), norms = two(lds.norms, j);
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            Pair value;
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const bool later = 8 * j + pair + e > own + 8 * r;
                // Of later tokens the exponent may be any.
                const float of = later ? 0.0f : decay(gate[r] - gates[e], unit) * norms[e];
                value[e] = later ? 0.0f : s[4 * j + 2 * r + e] * of;
            }
            of_p[j / 4][r * 4 + j % 4] = __builtin_bit_cast(u32, hk::narrow<T, 2>(value));
        }
    }
    wait_for_operands<0>();
    hk::detail::wait_wgmma<0>(out);
    hk::detail::keep_until_here(of_q);
#pragma unroll
    for (u32 i = 0; i < 64; ++i) out[i] *= of_state[i % 4 / 2];
    hk::detail::begin_wgmma();
#pragma unroll
    for (u32 i = 0; i < kMostTokens / 16; ++i)
        hk::detail::WgmmaStep<T, 128>::template add<true>(
            out, of_p[i / 2], i % 2, lds.d[0].template descriptor<int(sizeof(lds.d[0]))>(16 * i, 0));
    hk::detail::commit_wgmma();
    hk::detail::wait_wgmma<0>(out);
    hk::detail::keep_until_here(of_p);

    // The wave's rows take the place of its rows of q.
#pragma unroll
    for (u32 i = 0; i < kSteps; ++i) {
        u32 words[4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const u32 first = 4 * (2 * i + e / 2) + e % 2 * 2;
            words[e] = __builtin_bit_cast(
                u32, hk::narrow<T, 2>(Pair{out[first] * factor[e % 2], out[first + 1] * factor[e % 2]}));
        }
        hk::detail::stmatrix_x4(words, chunk_of(lds.q, 2 * i + lane / 16));
    }
    hk::wave_barrier();
#pragma unroll
    for (u32 i = 0; i < kSteps; ++i) {
        const u32 row = 16 * wave + i % 4 * 4 + lane / 8, c = lane % 8;
        auto &part = lds.q[i / 4];
        o.put(part.chunk[row * 8 + (c ^ part.swizzle(row))], row, v0 + i / 4 * 64 + c * 8);
    }
}
}  // namespace gdr::warpgroup

#endif
