// backward_delta.hip: what gradients of attention need of each row, delta[i] = dout[i] . out[i], and the gradients of sinks:
//   dsink[head] = - sum over rows i of exp(sink[head] - lse[i]) delta[i]
// Delta: four lanes a row, of 32 columns at a time each has 8. Sinks: a block for each head, rows in a fixed order.
#include "outputs.h"
#include "problem.h"
#include "rows.h"

#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/math.h>
#include <hk/wave.h>

namespace delta {
using attention::HeadRows;
using hk::u32;
using hk::u64;

struct Params {
    HeadRows out, dout, lse;
    u64 delta;  // f32 [rows, heads]
    u64 sink, dsink;  // f32 [heads]
    u32 rows, of_sequence, of_sequence_inverse;  // rows of all sequences, of one
    u32 heads, heads_inverse;
    u32 dv, vectorized;
    u32 zeros_count;
    u64 zeros;  // 16 bytes each, that begin as zero: sums and turns of backward.h
};
}  // namespace delta

namespace {
using namespace delta;
using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::u8;
using hk::Vec;

constexpr u32 kThreads = 256, kLanes = 4;

HK_FN u64 address(const Params &p, const HeadRows &rows, u32 row, u32 head) {
    const hk::DivMod at(row, p.of_sequence, p.of_sequence_inverse);
    return rows.data + u64(i64(at.quotient) * rows.batch + i64(at.remainder) * rows.row + i64(head) * rows.head);
}

template <class T>
HK_FN void rows_of_block(const Params &p) {
    constexpr u32 kCols = 8, kVec = 16 / sizeof(T);
    const u32 index = hk::block_x() * (kThreads / kLanes) + hk::thread_x() / kLanes, lane = hk::thread_x() % kLanes;
    const hk::DivMod at(index, p.heads, p.heads_inverse);
    const u32 row = at.quotient, head = at.remainder;
    const bool there = row < p.rows;
    const u64 y_row = address(p, p.out, row, head), dy_row = address(p, p.dout, row, head);
    float sum = 0.0f;
#pragma unroll 2
    for (u32 first = lane * kCols; there && first < p.dv; first += kLanes * kCols) {
#pragma unroll
        for (u32 i = 0; i < kCols; i += kVec) {
            const u32 col = first + i;
            if (i > 0 && col >= p.dv) continue;
            const auto load = [&](u64 row) {
                const auto at = reinterpret_cast<GlobalPtr<const u8>>(row + col * sizeof(T));
                return __builtin_convertvector(
                    (attention::load_row<T, int(kVec)>(at, attention::kOwn, p.vectorized, sizeof(T), i32(p.dv - col))),
                    Vec<float, kVec>);
            };
            const Vec<float, kVec> y = load(y_row), dy = load(dy_row);
#pragma unroll
            for (u32 j = 0; j < kVec; ++j) sum = __builtin_fmaf(y[j], dy[j], sum);
        }
    }
    sum = hk::group_reduce<kLanes>(sum, hk::Sum{});
    if (there && lane == 0) reinterpret_cast<GlobalPtr<float>>(p.delta)[index] = sum;
}

HK_FN void clear(const Params &p) {
    const u64 all = p.zeros_count, of_grid = u64(hk::grid_x()) * kThreads;
    const u32 own = hk::thread_x();
    const auto put = [&](u64 first) {
        reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(p.zeros + first * 16)[own] = Vec<u32, 4>(0u);
    };
    u64 first = u64(hk::block_x()) * kThreads;
    for (; first + kThreads <= all; first += of_grid) put(first);
    if (first + own < all) put(first);
}

template <class T>
HK_FN void deltas(const Params &p) {
    clear(p);
    rows_of_block<T>(p);
}

HK_FN void sinks(const Params &p) {
    hk::GroupReducer<kThreads, kThreads> block;
    const u32 head = hk::block_x();
    const float sink = hk::load_uniform<float>(p.sink + u64(head) * 4) * attention::kLog2E;
    float sum = 0.0f;
    for (u32 row = hk::thread_x(); row < p.rows; row += kThreads) {
        const float lse = *reinterpret_cast<GlobalPtr<const float>>(address(p, p.lse, row, head)) * attention::kLog2E;
        const float of_row = reinterpret_cast<GlobalPtr<const float>>(p.delta)[u64(row) * p.heads + head];
        // A row whose sink is -inf has no part in it.
        if (sink != attention::kMinusInf) sum = __builtin_fmaf(hk::exp2_fast(sink - lse), of_row, sum);
    }
    sum = block.sum(sum);
    if (hk::thread_x() == 0) reinterpret_cast<GlobalPtr<float>>(p.dsink)[head] = -sum;
}
}  // namespace

HK_ENTRY(backward_delta_bf16, kThreads, deltas<hk::bf16>)
HK_ENTRY(backward_delta_f16, kThreads, deltas<hk::f16>)
HK_ENTRY(backward_delta_f32, kThreads, deltas<float>)
HK_ENTRY(backward_sinks, kThreads, sinks)
