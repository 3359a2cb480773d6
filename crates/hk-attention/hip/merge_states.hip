// merge_states.hip: merges the attention of two disjoint sets of keys.
//   M = max(lse_a, lse_b);  w = exp(lse - M);  out = (w_a a + w_b b) / (w_a + w_b);  lse = M + ln(w_a + w_b)
//   a, b, out          [tokens, heads, columns]  any strides but that of the columns
//   lse_a, lse_b, lse  [tokens, heads]           f32, any strides
// A set without keys, lse -inf, weighs nothing, whatever its values are. Sums in f32, rounded once.
// A lane has 16 bytes of a row. Floor: bytes of both inputs and the output.
#include "outputs.h"

#include <hk/block.h>
#include <hk/entry.h>
#include <hk/math.h>

namespace {
using attention::HeadRows, attention::kLn2, attention::kLog2E, attention::kMinusInf;
using hk::GlobalPtr, hk::i64, hk::u32, hk::u64, hk::Vec;

struct Params {
    HeadRows a, b, out, lse_a, lse_b, lse;
    u32 tokens, heads;
    u32 columns, vectors;  // accesses of a row
    u32 vectorized;  // rows are whole vectors
    u32 pad;
};

constexpr u32 kThreads = 256;

HK_FN u64 address(const HeadRows &of, u32 token, u32 head) {
    return of.data + u64(i64(token) * of.row + i64(head) * of.head);
}

template <class T>
HK_FN void merge_states(const Params &p) {
    constexpr int kVec = hk::kVecLen<T>;
    const u64 at = u64(hk::block_x()) * kThreads + hk::thread_x(), row = at / p.vectors;
    const u32 col = u32(at - row * p.vectors) * kVec, token = u32(row / p.heads), head = u32(row) - token * p.heads;
    if (token >= p.tokens) return;
    const auto lse = [&](const HeadRows &of) {
        return *reinterpret_cast<GlobalPtr<const float>>(address(of, token, head));
    };
    const float a = lse(p.lse_a), b = lse(p.lse_b), most = __builtin_fmaxf(a, b);
    const float base = most == kMinusInf ? 0.0f : most;
    // A NaN is a weight of NaN. The difference comes first: that of the larger one is 0 exactly.
    const float of_a = hk::exp2_fast((a - base) * kLog2E), of_b = hk::exp2_fast((b - base) * kLog2E);
    const float total = of_a + of_b;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const auto each = [&]<int N>(u32 first) {
        const auto load = [&](const HeadRows &of, float weight) {
            const auto from = reinterpret_cast<GlobalPtr<const T>>(address(of, token, head)) + first;
            const Vec<float, N> x = hk::widen<T, N>(*reinterpret_cast<GlobalPtr<const Vec<T, N>>>(from));
            return weight == 0.0f ? Vec<float, N>(0.0f) : x * weight;
        };
        const Vec<float, N> y = load(p.a, of_a * inverse) + load(p.b, of_b * inverse);
        const auto to = reinterpret_cast<GlobalPtr<T>>(address(p.out, token, head)) + first;
        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(to) = hk::narrow<T, N>(y);
    };
    if (p.vectorized) {
        each.template operator()<kVec>(col);
    } else {
        for (u32 i = 0; i < kVec && col + i < p.columns; ++i) each.template operator()<1>(col + i);
    }
    if (col == 0 && p.lse.data) {
        const float merged = total == 0.0f ? kMinusInf : base + hk::log2_fast(total) * kLn2;
        *reinterpret_cast<GlobalPtr<float>>(address(p.lse, token, head)) = merged;
    }
}
}  // namespace

HK_ENTRY(merge_states_bf16, kThreads, merge_states<hk::bf16>)
HK_ENTRY(merge_states_f16, kThreads, merge_states<hk::f16>)
HK_ENTRY(merge_states_f32, kThreads, merge_states<float>)
