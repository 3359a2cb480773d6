// merge.hip: merges the partial results of splits of the keys, in ascending order: the same bits each time.
//   M = max over s of m[s];  w[s] = 2^(m[s] - M);  total = sum of w l + 2^(sink - M)
//   out = sum of (w / total) acc;  lse = ln 2 (M + log2 total)
// Of one split that has keys the bits are those of a launch without splits.
// A lane has four columns of a row. Floor: bytes of the partial results and of the output.
#include "outputs.h"

#include <hk/entry.h>
#include <hk/math.h>

namespace {
using namespace attention;

constexpr u32 kThreads = 256;

template <class T>
HK_FN void merge(const Params &args) {
    // A block has whole rows: `vectors` is at most 128.
    const u32 vectors = (args.dv + 3) / 4, rows = kThreads / vectors;
    const u32 of_block = hk::thread_x() / vectors, row = hk::block_x() * rows + of_block;
    if (of_block >= rows || row >= args.splits.rows) return;
    const Params &p = hk::reload_params(args);
    const u32 col = (hk::thread_x() - of_block * vectors) * 4, query = row / p.heads, head = row - query * p.heads;

    const float sink =
        p.scores.sink ? reinterpret_cast<GlobalPtr<const float>>(p.scores.sink)[head] * kLog2E : kMinusInf;
    float most = sink;
    for (u32 s = 0; s < p.splits.count; ++s) most = __builtin_fmaxf(most, Partial(p, s, row).sums(p)[0]);
    const float base = most == kMinusInf ? 0.0f : most;
    float total = hk::exp2_fast(sink - base);
    for (u32 s = 0; s < p.splits.count; ++s) {
        const auto sums = Partial(p, s, row).sums(p);
        total = __builtin_fmaf(sums[1], hk::exp2_fast(sums[0] - base), total);
    }
    Vec<float, 4> sum = 0.0f;
    for (u32 s = 0; s < p.splits.count; ++s) {
        const Partial partial(p, s, row);
        const float weight = hk::exp2_fast(partial.sums(p)[0] - base);
        // Splits without a visible key have no sums of values. One whose scores are NaN weighs nothing, and makes the total NaN.
        if (weight != 0.0f || total != total) sum += partial.load(p, col) * (weight / total);
    }

    Work work = {};
    const bool packed = p.sequences.q_starts != 0;
    work.sequence = packed ? 0 : query / p.sequences.sq;
    const u32 of_sequence = query - work.sequence * p.sequences.sq * (packed ? 0 : 1);
    const float inverse = p.out_scale ? 1.0f / hk::load_uniform<float>(p.out_scale) : 1.0f;
    store_columns<T>(p, row_address(p.out, work, packed, of_sequence, head), col, sum * inverse);
    if (p.lse.data && col == 0) {
        *reinterpret_cast<GlobalPtr<float>>(row_address(p.lse, work, packed, of_sequence, head)) =
            total == 0.0f ? kMinusInf : (base + hk::log2_fast(total)) * kLn2;
    }
}
}  // namespace

HK_ENTRY(attention_merge_bf16, kThreads, merge<hk::bf16>)
HK_ENTRY(attention_merge_f16, kThreads, merge<hk::f16>)
HK_ENTRY(attention_merge_f32, kThreads, merge<float>)
