// all_reduce_rmsnorm.hip: all-reduce, residual add and RMSNorm of rows in one launch, with per-token fp8 on request
//   a[m, c] = round_T(sum over ranks r = 0, 1, .. of x_r[m, c])
//   z = a + residual, in f32; residual_out = round_T(z)
//   y = z * rsqrt(mean_c z^2 + eps) * (weight + weight_offset), of the unrounded z
//   out = round_T(y), optional
//   scale[m] = amax_c |y| / fp8_max, 1 if amax is 0; q = fp8(y / scale); optional
//   x, residual, residual_out, out  [rows, cols]  T = bf16 | f16   contiguous, on 16 bytes, rows of whole 16-byte packets
//   weight [cols] T;  q [rows, cols] fp8 of the target;  scale [rows] f32
// residual_out may be residual, and out may be x. Sums, forms and bytes over the links: all_reduce.hip. A row is a tile: rank r
// sums packets [r, r + 1) * ceil(packets / world) of it in the two-shot form. Block b takes rows b, b + grid, ..
// A thread holds kHeld packets of z in f32 registers, so rows have at most kThreads * kHeld packets.
#include <hk/entry.h>
#include <hk/math.h>
#include <hk/quant.h>

#include "peers.h"

namespace {
struct Params {
    peers::Comm comm;
    hk::u64 x, residual, weight, residual_out;
    hk::u64 out;  // 0: none
    hk::u64 q, scale;  // 0: none
    hk::u32 rows;
    hk::u32 packets;  // 16-byte packets of a row
    float cols, eps, weight_offset;
    hk::u32 unused;
};

using hk::GlobalPtr;
using hk::u32;
using hk::u64;
using hk::Vec;
using peers::Packet;

inline constexpr int kHeld = 4;
using Reducer = hk::GroupReducer<peers::kThreads, peers::kThreads>;

/// Calls f(held, column) for the thread's packets of a row.
template <class F>
HK_FN void for_held(u32 packets, F f) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
        const u32 column = u32(k) * peers::kThreads + hk::thread_x();
        if (column < packets) f(k, column);
    }
}

/// From the sums a of a row, a packet at a time, to the outputs.
template <class T, class Sum>
HK_FN void norm_row(const Params &p, u32 row, Reducer &reducer, Sum sum) {
    constexpr int kLen = hk::kVecLen<T>;
    constexpr auto kQuant = hk::kFp8IsFnuz ? hk::QuantType::Fp8Fnuz : hk::QuantType::Fp8;
    const u64 first = u64(row) * p.packets;
    const auto residual = reinterpret_cast<GlobalPtr<const Packet>>(p.residual) + first;
    const auto residual_out = reinterpret_cast<GlobalPtr<Packet>>(p.residual_out) + first;
    const auto weight = reinterpret_cast<GlobalPtr<const Packet>>(p.weight);

    Vec<float, kLen> z[kHeld];
    float squares = 0.0f;
    for_held(p.packets, [&](int k, u32 column) {
        z[k] = peers::widen<T>(sum(column)) + peers::widen<T>(residual[column]);
        residual_out[column] = peers::narrow<T>(z[k]);
#pragma unroll
        for (int i = 0; i < kLen; ++i) squares = __builtin_fmaf(z[k][i], z[k][i], squares);
    });
    const float rstd = 1.0f / __builtin_elementwise_sqrt(reducer.sum(squares) / p.cols + p.eps);
    float amax = 0.0f;
    for_held(p.packets, [&](int k, u32 column) {
        z[k] = z[k] * rstd * (peers::widen<T>(weight[column]) + p.weight_offset);
#pragma unroll
        for (int i = 0; i < kLen; ++i) amax = __builtin_fmaxf(amax, __builtin_fabsf(z[k][i]));
        if (p.out) reinterpret_cast<GlobalPtr<Packet>>(p.out)[first + column] = peers::narrow<T>(z[k]);
    });
    if (!p.q) return;
    const float scale = hk::linear_scale(reducer.max(amax), hk::kQuantMax<kQuant>);
    if (hk::thread_x() == 0) reinterpret_cast<GlobalPtr<float>>(p.scale)[row] = scale;
    const hk::DivideBy by_scale(scale);
    const auto q = reinterpret_cast<GlobalPtr<Vec<u32, kLen / 4>>>(p.q) + first;
    for_held(p.packets, [&](int k, u32 column) { q[column] = hk::quantize_packed<kQuant, kLen>(by_scale(z[k])); });
}

template <class T, u32 kWorld, bool kTwoShot>
HK_FN void all_reduce_rmsnorm(const Params &p) {
    __shared__ u32 failed;
    peers::Launch launch(p.comm, failed);

    const auto x = reinterpret_cast<GlobalPtr<const Packet>>(p.x);
    const auto own = launch.staging(p.comm.rank);
    for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
        const u64 first = u64(row) * p.packets;
        for (u32 column = hk::thread_x(); column < p.packets; column += peers::kThreads)
            own[first + column] = x[first + column];
    }
    if (!launch.barrier<kWorld>(0)) return;

    GlobalPtr<Packet> of[kWorld];
#pragma unroll
    for (u32 r = 0; r < kWorld; ++r) of[r] = launch.staging(r);
    Reducer reducer;
    if constexpr (!kTwoShot) {
        for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
            const u64 first = u64(row) * p.packets;
            norm_row<T>(p, row, reducer, [&](u32 column) { return peers::sum<T, kWorld>(of, first + column); });
        }
    } else {
        const u32 part = (p.packets + kWorld - 1) / kWorld;
        const u32 begin = p.comm.rank * part;
        const u32 end = begin + part < p.packets ? begin + part : p.packets;
        const auto sums = launch.sums(p.comm.rank);
        for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
            const u64 first = u64(row) * p.packets;
            for (u32 column = begin + hk::thread_x(); column < end; column += peers::kThreads)
                sums[first + column] = peers::sum<T, kWorld>(of, first + column);
        }
        if (!launch.barrier<kWorld>(1)) return;
        for (u32 row = hk::block_x(); row < p.rows; row += hk::grid_x()) {
            const u64 first = u64(row) * p.packets;
            norm_row<T>(p, row, reducer, [&](u32 column) { return launch.sums(column / part)[first + column]; });
        }
    }
    launch.end();
}
}  // namespace

#define RMSNORM_WORLDS(T, form, kTwoShot)                                                                \
    HK_ENTRY(all_reduce_rmsnorm_##T##_1_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 1, kTwoShot>) \
    HK_ENTRY(all_reduce_rmsnorm_##T##_2_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 2, kTwoShot>) \
    HK_ENTRY(all_reduce_rmsnorm_##T##_4_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 4, kTwoShot>) \
    HK_ENTRY(all_reduce_rmsnorm_##T##_8_##form, peers::kThreads, all_reduce_rmsnorm<hk::T, 8, kTwoShot>)

// Name = op, dtype, world, form.
RMSNORM_WORLDS(bf16, one_shot, false)
RMSNORM_WORLDS(bf16, two_shot, true)
RMSNORM_WORLDS(f16, one_shot, false)
RMSNORM_WORLDS(f16, two_shot, true)
