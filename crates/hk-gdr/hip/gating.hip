// gating.hip: fused_gdn_gating_prefill
//   g[t, h] = -exp(a_log[h]) softplus(a[t, h] + dt_bias[h]),  beta[t, h] = 1 / (1 + exp(-b[t, h]))
//   a, b     [T, heads]  E = bf16 | f16 | f32   contiguous
//   a_log    [heads]     f32                    contiguous
//   dt_bias  [heads]     E | f32                contiguous
//   g, beta  [T, heads]  f32                    contiguous
// A lane has 16 bytes of a and of b (scalar path: one element). Floor: T heads (2 sizeof(E) + 8) bytes.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/types.h>

#include "gates.h"

namespace {
using hk::Access;
using hk::GlobalPtr;
using hk::u32;
using hk::u64;
using hk::Vec;

struct Params {
    u64 a_log, a, b, dt_bias, g, beta;
    u32 n;  // elements
    u32 heads, inverse;  // hk::DivMod
    u32 f32_bias;
    float softplus_beta, softplus_threshold;
};

constexpr u32 kThreads = 256;

/// V elements from `index` on, 16 bytes at a time.
template <class E, int V>
HK_FN void load(float (&v)[V], u64 data, u32 index) {
    const auto from = reinterpret_cast<GlobalPtr<const E>>(data) + index;
    constexpr int kPart = V < hk::kVecLen<E> ? V : hk::kVecLen<E>;
#pragma unroll
    for (int i = 0; i < V; i += kPart) {
        if constexpr (kPart == 1) {
            v[i] = float(from[i]);
        } else {
            const auto part = *reinterpret_cast<GlobalPtr<const Vec<E, kPart>>>(from + i);
#pragma unroll
            for (int j = 0; j < kPart; ++j) v[i + j] = float(part[j]);
        }
    }
}

template <int V>
HK_FN void store(u64 data, u32 index, const float (&v)[V]) {
    const auto to = reinterpret_cast<GlobalPtr<float>>(data) + index;
    if constexpr (V == 1) {
        to[0] = v[0];
    } else {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            *reinterpret_cast<GlobalPtr<Vec<float, 4>>>(to + i) = Vec<float, 4>{v[i], v[i + 1], v[i + 2], v[i + 3]};
        }
    }
}

template <class E, Access kAccess>
HK_FN void gating(const Params &p) {
    constexpr int V = kAccess == Access::Vectorized ? hk::kVecLen<E> : 1;
    const u32 i = (hk::block_x() * kThreads + hk::thread_x()) * V;
    if (i >= p.n) return;
    const u32 head = hk::DivMod(i, p.heads, p.inverse).remainder;
    float a[V], b[V], bias[V], rate[V], g[V], beta[V];
    load<E>(a, p.a, i);
    load<E>(b, p.b, i);
    load<float>(rate, p.a_log, head);
    if (p.f32_bias) {
        load<float>(bias, p.dt_bias, head);
    } else {
        load<E>(bias, p.dt_bias, head);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
        g[j] = gdr::log_decay(a[j] + bias[j], rate[j], p.softplus_beta, p.softplus_threshold);
        beta[j] = hk::sigmoid(b[j]);
    }
    store(p.g, i, g);
    store(p.beta, i, beta);
}
}  // namespace

#define GATING_ENTRIES(E)                                             \
    HK_ENTRY(gating_##E, kThreads, gating<hk::E, Access::Vectorized>) \
    HK_ENTRY(gating_##E##_scalar, kThreads, gating<hk::E, Access::Scalar>)
GATING_ENTRIES(bf16)
GATING_ENTRIES(f16)
GATING_ENTRIES(f32)
