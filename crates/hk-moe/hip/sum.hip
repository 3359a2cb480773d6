// sum.hip: y[t] = sum over j of x[place(t, j)] + x[gates + t] + residual[t], the sum of a token's gates (moe_sum)
//   x         [gates, cols] bf16 | f16 | f32   unit stride on cols, any row stride; of shared experts [gates + tokens, cols]
//   places    [tokens, k] i32                  row of a gate; without: t k + j. A place outside x: the gate is left out
//   ids       [tokens, k] i32                  optional: experts; gates of those outside the experts, or whose entry in expert_map
//                                              is negative, are left out
//   residual  [tokens, cols] as y              optional
//   y         [tokens, cols] as x | f32        unit stride on cols, any row stride
// How the work is split
//   A thread has some columns of a token, those of one 16-byte load of x; a block of 256 threads, blocks along the columns, then
//   tokens. Sums in f32, gates in ascending order, then shared experts and the residual; rounded
//   once.
// Floor
//   Each row of x is read once and each row of y written once.

#include <hk/entry.h>
#include <hk/global.h>
#include <hk/types.h>

namespace sum {
using hk::i32;
using hk::u32;
using hk::u64;

struct Params {
    hk::Global x, residual, y;
    u64 places;  // 0: none
    u64 ids, expert_map;  // 0: none
    u32 k, gates, cols;
    u32 blocks;  // of a token
    u32 blocks_inverse;  // (2^32 - 1) / blocks
    u32 experts;
    u32 shared;  // 1: rows of x from `gates` on are those of shared experts, one for each token
    u32 pad;
};
}  // namespace sum

namespace {
using namespace sum;

constexpr u32 kThreads = 256;

template <class T, class Y, bool kVectorized>
HK_FN void sum_gates(const Params &p) {
    constexpr int kLen = kVectorized ? hk::kVecLen<T> : 1;
    using Part = hk::Vec<T, kLen>;
    using Out = hk::Vec<Y, kLen>;
    const hk::DivMod at(hk::block_x(), p.blocks, p.blocks_inverse);
    const u32 token = at.quotient, col = (at.remainder * kThreads + hk::thread_x()) * kLen;
    if (col >= p.cols) return;
    const auto places = reinterpret_cast<hk::GlobalPtr<const u32>>(p.places);
    hk::Vec<float, kLen> total = 0.0f;
#pragma unroll 4
    for (u32 j = 0; j < p.k; ++j) {
        const u64 gate = u64(token) * p.k + j;
        const u64 row = places != nullptr ? places[gate] : gate;
        if (row >= p.gates) continue;
        if (p.ids != 0) {
            const u32 id = reinterpret_cast<hk::GlobalPtr<const u32>>(p.ids)[gate];
            if (id >= p.experts) continue;
            if (p.expert_map != 0 && reinterpret_cast<hk::GlobalPtr<const i32>>(p.expert_map)[id] < 0) continue;
        }
        const auto part = *reinterpret_cast<hk::GlobalPtr<const Part>>(p.x.template row<const T>(row) + col);
        total += __builtin_convertvector(part, hk::Vec<float, kLen>);
    }
    if (p.shared != 0) {
        const auto row = p.x.template row<const T>(u64(p.gates) + token);
        total += __builtin_convertvector(*reinterpret_cast<hk::GlobalPtr<const Part>>(row + col), hk::Vec<float, kLen>);
    }
    if (p.residual.present()) {
        const auto part = *reinterpret_cast<hk::GlobalPtr<const Out>>(p.residual.template row<const Y>(token) + col);
        total += __builtin_convertvector(part, hk::Vec<float, kLen>);
    }
    *reinterpret_cast<hk::GlobalPtr<Out>>(p.y.template row<Y>(token) + col) = hk::narrow<Y>(total);
}
}  // namespace

// Entry points, as in src/sum.rs: type of x, of y.
#define SUM(name, T, Y)                                   \
    HK_ENTRY(sum_##name, kThreads, sum_gates<T, Y, true>) \
    HK_ENTRY(sum_##name##_scalar, kThreads, sum_gates<T, Y, false>)
SUM(bf16_bf16, hk::bf16, hk::bf16)
SUM(bf16_f32, hk::bf16, float)
SUM(f16_f16, hk::f16, hk::f16)
SUM(f16_f32, hk::f16, float)
SUM(f32_f32, float, float)
