// prepare_warpgroup.h: prepare.h by warpgroup instructions (hk/warpgroup.h), of 16-bit elements without gates of channels.
// Four waves for a chunk of a value head. k and v are in LDS; each wave has 16 rows of A, then of X, u and w, in its accumulators.
//   X_ii by substitution, a wave a block, a lane a column
//   X_ij = -Z X_jj,  Z = sum_k X_ik A_kj, j < k <= i, by f32 MMA, by the wave of i: blocks of A and X_jj come from LDS, the rest is its own
// X times weights of its columns is the operand in registers of v and k. LDS holds A transposed, then rows of u or w that are to be stored.
// In flight: k and v while gates are summed, v until u is made.
// Floor: bytes of k, v, w, u.
#pragma once

#include "tokens_warpgroup.h"

#if defined(HK_WARPGROUPS)

namespace gdr::warpgroup {

struct PrepareLds {
    using Tokens = hk::WarpgroupRows<kMostTokens>;
    static constexpr u32 kCols = 128;
    /// Floats of a row of A^T, and 16-byte chunks of a row of u or w: 16 bytes more than they have, against bank conflicts.
    static constexpr u32 kStride = kMostTokens + 4, kChunks = kCols / 8 + 1;
    Tokens k[2], v[2];
    union {
        float a[kMostTokens][kStride];  // A^T; diagonal blocks, once they are solved, of X^T
        Vec<u32, 4> out[kMostTokens][kChunks];
    };
    float gates[kMostTokens], betas[kMostTokens], norms[kMostTokens];
    float of_v[kMostTokens], of_k[kMostTokens];  // weights of columns of X
};

/// Gates and weights of a chunk's first `tokens` tokens, by one wave.
struct Gates {
    static constexpr u32 kOfLane = kMostTokens / hk::kWaveSize;
    float gates[kOfLane], betas[kOfLane];

    HK_FN Gates(const Prefill &p, const Chunk &chunk, u32 head, u32 tokens) {
#pragma unroll
        for (u32 i = 0; i < kOfLane; ++i) {
            const u32 t = token(i);
            const u64 at = (chunk.row(p) + (t < tokens ? t : 0)) * p.v_heads + head;
            gates[i] = p.g && t < tokens ? reinterpret_cast<GlobalPtr<const float>>(p.g)[at] : 0.0f;
            betas[i] = t < tokens ? reinterpret_cast<GlobalPtr<const float>>(p.beta)[at] : 0.0f;
        }
    }
    HK_FN static u32 token(u32 i) { return i * hk::kWaveSize + hk::lane_id(); }

    /// To LDS, with norms 1; sums instead of the gates, which go to memory, too.
    HK_FN void put(const Prefill &p, const Chunk &chunk, u32 head, PrepareLds &lds) {
        GateSums sums;
#pragma unroll
        for (u32 i = 0; i < kOfLane; ++i) {
            const u32 t = token(i);
            const float sum = sums.add(gates[i]);
            if (p.sums && t < chunk.tokens)
                reinterpret_cast<GlobalPtr<float>>(p.sums)[(chunk.row(p) + t) * p.v_heads + head] = sum;
            lds.gates[t] = sum, lds.betas[t] = betas[i], lds.norms[t] = 1.0f;
        }
    }
};

/// Starts to load 128 columns from `col` on.
template <class R>
HK_FN void copy_columns(const R &of, u32 col, PrepareLds::Tokens (&to)[2]) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) copy(of, 0, col + 64 * i, to[i]);
    hk::commit_loads();
}

/// to = X f(of), with the weights f in the operand `x`. `there`: the first 128 columns are in flight, or have landed.
template <class T, class R>
HK_FN void multiply_rows(const Frag (&x)[2], const R &of, const R &to, bool there, PrepareLds::Tokens (&columns)[2],
                         PrepareLds &lds) {
    constexpr u32 kCols = PrepareLds::kCols;
    const u32 wave = hk::wave_id(), lane = hk::lane_id();
    for (u32 col = 0; col < of.cols; col += kCols) {
        if (!there || col) {
            hk::block_barrier();
            copy_columns(of, col, columns);
        }
        // Behind it, all waves have solved: rows take the place of A.
        wait_for_operands<0>();
        float out[kCols / 2] = {};
        hk::detail::begin_wgmma();
#pragma unroll
        for (u32 i = 0; i < kMostTokens / 16; ++i)
            hk::detail::WgmmaStep<T, kCols>::template add<true>(
                out, x[i / 2], i % 2, columns[0].template descriptor<int(sizeof(columns[0]))>(16 * i, 0));
        hk::detail::commit_wgmma();
        hk::detail::wait_wgmma<0>(out);
        hk::detail::keep_until_here(x);
#pragma unroll
        for (u32 i = 0; i < kCols / 16; ++i) {
            u32 words[4];
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const u32 first = 4 * (2 * i + e / 2) + e % 2 * 2;
                words[e] = __builtin_bit_cast(u32, hk::narrow<T, 2>(Vec<float, 2>{out[first], out[first + 1]}));
            }
            hk::detail::stmatrix_x4(words, &lds.out[16 * wave + lane % 16][2 * i + lane / 16]);
        }
        hk::wave_barrier();
#pragma unroll
        for (u32 i = 0; i < kCols / 16; ++i) {
            const u32 row = 16 * wave + 2 * i + lane / 16, c = lane % 16;
            to.put(lds.out[row][c], row, col + 8 * c);
        }
        hk::wave_barrier();
    }
}

template <class T>
HK_FN void warpgroup_prepare(const Prefill &p) {
    using R = Rows<T, Access::Vectorized>;
    using Pair = Vec<float, 2>;
    constexpr u32 kCols = PrepareLds::kCols, kOfTokens = kMostTokens / 8;
    auto &lds = hk::block_lds<PrepareLds>();
    const u32 head = hk::block_x() % p.v_heads, k_head = head / p.group;
    const Chunk chunk(p, hk::block_x() / p.v_heads);
    const u32 rows = chunk.tokens;
    if (rows == 0) return;
    const R k(p.k, chunk.batch, chunk.first, k_head, rows, p.k_dim);
    const R v(p.v, chunk.batch, chunk.first, head, rows, p.v_dim);
    const R w(p.w, chunk.batch, chunk.first, head, rows, p.k_dim);
    const R u(p.u, chunk.batch, chunk.first, head, rows, p.v_dim);
    const u32 thread = hk::thread_x(), wave = hk::wave_id(), lane = hk::lane_id();
    Gates gates(p, chunk, head, wave == 0 ? rows : 0);  // in front of what takes longer
    copy_columns(k, 0, lds.k);
    copy_columns(v, 0, lds.v);
    if (wave == 0) gates.put(p, chunk, head, lds);

    // The lane has rows i = own, own + 8, of columns j = 8 n + pair and the next one.
    const u32 own = 16 * wave + lane / 4, pair = 2 * (lane % 4);
    float s[4 * kOfTokens] = {};
    wait_for_operands<1>();
    for (u32 col = 0;;) {
        hk::detail::begin_wgmma();
#pragma unroll
        for (u32 i = 0; i < kCols / 16; ++i) {
            const u64 of = lds.k[i / 4].descriptor(0, i % 4 * 32);
            hk::detail::Wgmma<T, kMostTokens>::mma(s, of, of);
        }
        hk::detail::commit_wgmma();
        hk::detail::wait_wgmma<0>(s);
        col += kCols;
        if (col >= p.k_dim) break;
        hk::block_barrier();
        copy_columns(k, col, lds.k);
        wait_for_operands<0>();
    }
    if (p.l2norm) {
        // Sums of selects: assignments would become an access to `s` in memory.
        float squares[2] = {};
#pragma unroll
        for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
            for (u32 e = 0; e < 4; ++e)
                squares[e / 2] += wave == t && lane / 4 == pair + e % 2 ? s[4 * (2 * t + e / 2) + e] : 0.0f;
        }
        if (lane / 4 - lane / 4 % 2 == pair) {
#pragma unroll
            for (u32 r = 0; r < 2; ++r) lds.norms[own + 8 * r] = 1.0f / __builtin_sqrtf(squares[r] + 1e-6f);
        }
        hk::block_barrier();
        if (p.norms && head % p.group == 0 && thread < rows)
            reinterpret_cast<GlobalPtr<float>>(p.norms)[(chunk.row(p) + thread) * p.k_heads + k_head] =
                lds.norms[thread];
    }
    const auto two = [&](const float *of, u32 i) { return *reinterpret_cast<const Pair *>(&of[8 * i + pair]); };
    {
        const float factor = chunk.in_range ? 1.0f : __builtin_nanf("");
        const u32 t = thread % kMostTokens;
        const float beta = lds.betas[t] * factor;
        if (thread < kMostTokens) {
            lds.of_v[t] = beta;
        } else {
            lds.of_k[t] = beta * lds.norms[t] * decay(lds.gates[t], kLog2E);
        }
    }
    float gate[2], weight[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        gate[r] = lds.gates[own + 8 * r];
        weight[r] = lds.betas[own + 8 * r] * lds.norms[own + 8 * r];
    }
#pragma unroll
    for (u32 j = 0; j < kOfTokens; ++j) {
        if (j / 2 > wave) continue;
        const Pair of_j = two(lds.gates, j), norms = two(lds.norms, j);
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const u32 m = 8 * j + pair + e;
                const float of = weight[r] * norms[e] * decay(gate[r] - of_j[e], kLog2E) * s[4 * j + 2 * r + e];
                lds.a[m][own + 8 * r] = m >= own + 8 * r ? 0.0f : of;
            }
        }
    }
    hk::wave_barrier();
    // The wave's block on the diagonal. Lanes from 16 on do what the others do.
    {
        const u32 m = lane % 16, first = 16 * wave;
        float column[16];
#pragma unroll
        for (u32 i = 0; i < 16; ++i) column[i] = i == m ? 1.0f : 0.0f;
#pragma unroll
        for (u32 j = 0; j < 15; ++j) {
#pragma unroll
            for (u32 c = (j + 1) / 4; c < 4; ++c) {
                const Four of = *reinterpret_cast<const Four *>(&lds.a[first + j][first + 4 * c]);
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    if (4 * c + e > j) column[4 * c + e] = __builtin_fmaf(-of[e], column[j], column[4 * c + e]);
                }
            }
            if (j % 4 == 3) hk::wave_barrier();  // else the loads of all columns would be in flight
        }
        hk::wave_barrier();
        if (lane < 16) {
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                *reinterpret_cast<Four *>(&lds.a[first + m][first + 4 * c]) =
                    Four{column[4 * c], column[4 * c + 1], column[4 * c + 2], column[4 * c + 3]};
            }
        }
    }
    hk::block_barrier();
    // Element 4 r + 2 h + e of x[t] is of row own + 8 r and column 16 t + 8 h + pair + e.
    MmaAcc x[kTiles];
    // Block (k, j) of A, or (j, j) of X, as operand: columns in rows.
    const auto block = [&](u32 k, u32 j) {
        MmaAcc of;
#pragma unroll
        for (u32 n = 0; n < 2; ++n) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const Pair part =
                    *reinterpret_cast<const Pair *>(&lds.a[16 * j + 8 * n + lane / 4][16 * k + 8 * h + pair]);
                of[4 * n + 2 * h] = part[0], of[4 * n + 2 * h + 1] = part[1];
            }
        }
        return of;
    };
#pragma unroll
    for (int j = kTiles - 1; j >= 0; --j) {
        x[j] = MmaAcc(0.0f);
        if (u32(j) == wave) {
#pragma unroll
            for (u32 e = 0; e < 8; ++e) x[j][e] = lds.a[16 * j + e / 2 % 2 * 8 + pair + e % 2][own + e / 4 * 8];
        } else if (u32(j) < wave) {
            MmaAcc z(0.0f);
#pragma unroll
            for (int i = j + 1; i < kTiles; ++i) {
                if (u32(i) <= wave) z = product(block(i, j), x[i], z);
            }
            x[j] = -product(block(j, j), z, MmaAcc(0.0f));
        }
    }

    Frag of_v[2], of_k[2];
#pragma unroll
    for (u32 j = 0; j < kOfTokens; ++j) {
        const Pair for_v = two(lds.of_v, j), for_k = two(lds.of_k, j);
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 e = 4 * r + j % 2 * 2;
            const Pair of{x[j / 2][e], x[j / 2][e + 1]};
            of_v[j / 4][r * 4 + j % 4] = __builtin_bit_cast(u32, hk::narrow<T, 2>(of * for_v));
            of_k[j / 4][r * 4 + j % 4] = __builtin_bit_cast(u32, hk::narrow<T, 2>(of * for_k));
        }
    }
    multiply_rows<T>(of_v, v, u, true, lds.v, lds);
    multiply_rows<T>(of_k, k, w, p.k_dim <= kCols, lds.k, lds);
}
}  // namespace gdr::warpgroup

#endif
