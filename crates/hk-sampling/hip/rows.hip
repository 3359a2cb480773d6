// rows.hip: filters and draws of rows that stay in the registers of one block
//   x            [R, V]  T = bf16 | f16 | f32   unit stride on V, rows any stride; probabilities or logits
//   ids, mass    [B]     i32, f32               contiguous; the drawn token, the kept mass
//   count        [B]     i32                    contiguous; the number of kept tokens
//   y            [R, V]  T                      unit stride on V, rows any stride; may alias x
// Formulas and radix select: filter.h. Logits become probabilities by softmax(x / temperature) in f32; at a temperature of
// zero the first of the largest logits has probability 1. y = P / max(mass, 1e-8) where P is kept, else 0.
//
// How the work is split
//   V up to 1024: a wave per row, 16 columns per lane; up to 8192: 256 threads per row, 32 columns per lane. Longer rows:
//   segments.hip. One output per block: its thousands of instructions outweigh the launch of a block.
// Floor
//   The row is read once, V * sizeof(T) bytes, and y written once. A histogram costs an 8-byte LDS atomic per token. A block
//   has 2 KiB (one wave) or 16 KiB of cells in LDS, 8 bytes per bin.
#include <hk/entry.h>

#include "filter.h"

namespace {
using namespace sampling;

/// Softmax of a row in registers.
template <class RowF, class Reducer>
HK_FN void softmax(const Params &p, u64 row, RowF &v, u32 column, Reducer &block) {
    const u32 cols = p.x.cols();
    const float t = temperature_of(p, row);
    float max = -__builtin_inff();
    for_each(v, column, [&](float &x, u32 c) { max = hk::Max{}(max, c < cols ? x : -__builtin_inff()); });
    Softmax s = {block.max(max), t == 0.0f ? 0.0f : 0x1.715476p+0f / t, 1.0f, kNone};
    if (t == 0.0f) {
        u32 first = kNone;
        for_each(v, column, [&](float &x, u32 c) { first = c < first && c < cols && x == s.max ? c : first; });
        s.greedy = block.reduce(first, hk::Min{});
        // A row without a finite maximum has no token to draw.
        if (!(__builtin_fabsf(s.max) < __builtin_inff())) s.greedy = kNoToken;
    } else {
        float sum = 0.0f;
        for_each(v, column, [&](float &x, u32 c) { sum += hk::Max{}(c < cols ? s.exponential(x) : 0.0f, 0.0f); });
        s.inverse_sum = 1.0f / block.sum(sum);
    }
    apply(s, v, column, cols);
}

template <Access kAccess, class T, int Threads, int ColsPerLane, int DigitBits>
HK_FN void row_in_registers(const Params &p) {
    constexpr int kBins = 1 << DigitBits;
    constexpr int kChunks = ColsPerLane / hk::kVecLen<T>;
    using RowT = hk::Row<T, Threads, hk::kVecLen<T>, kChunks>;
    using RowF = typename RowT::template With<float>;
    __shared__ u64 cells[kBins];
    __shared__ StepScratch<Threads> step_scratch;
    __shared__ DrawScratch<Threads, kChunks> draw_scratch;
    hk::GroupReducer<Threads, Threads> block;

    const u32 thread = hk::thread_x();
    const u32 column = thread * hk::kVecLen<T>;
    const u32 cols = p.x.cols();
    const u64 b = hk::block_x();
    const u64 row = row_of(p, b);
    if (row == kNoRow) {
        if (thread == 0) write_output(p, b, 0, __builtin_nanf(""), 0);
        return;
    }
    const RowBatch batch = {row, 1, column, cols};
    RowF v = hk::widen(RowT::load(batch.at<T, kAccess, true>(p.x, 0)));
    if (p.logits) softmax(p, row, v, column, block);

    const u32 max_key = block.reduce(clean(v), hk::Max{});
    const bool degenerate = max_key == 0 || max_key == kInfinity;

    Search search;
    u32 threshold = kNone;  // NaN: nothing is kept
    if (!degenerate) {
        const auto find = [&](Filters f, u32 active) {
            Search s;
            s.active = active;
            for (u32 top = 31; top > 0;) {
                const Digit digit = Digit::below(top, DigitBits);
                for (u32 i = thread; i < u32(kBins); i += Threads) cells[i] = 0;
                hk::block_barrier();
                const Followers followers(s.prefix, top);
                for_each(v, column, [&](float &x, u32) {
                    const u32 key = key_of(x);
                    if (followers.contain(key)) lds_atomic_add(cells[digit.of(key)], digit.token(key));
                });
                hk::block_barrier();
                step<Threads, kBins>(s, f, digit, block, step_scratch, [&](u32 i) { return Cell(cells[i]).bin(); });
                if (s.done()) break;
                top = digit.shift;
            }
            return s;
        };
        u32 active;
        Filters f = filters_of(p, row, max_key, active);
        // First without top-p: p is a share of the mass that the others keep.
        bool again = p.top_k_first && (active & Search::kP);
        u32 now = again ? active & ~Search::kP : active;
        for (;;) {
            search = find(f, now);
            if (!again) break;
            again = false;
            f.p *= search.kept_mass();
            now = active;
        }
        threshold = search.prefix > 1 ? search.prefix : 1;
    }

    if (p.y.present()) {
        const float mass = float(search.kept_mass());
        const float scale = 1.0f / hk::Max{}(mass, 1e-8f);
        RowF y = v;
        for_each(y, column, [&](float &x, u32) { x = x >= value_of(threshold) ? x * scale : 0.0f; });
        hk::narrow<T>(y).store(batch.at<T, kAccess, true>(p.y, 0));
    }
    u32 id = 0;
    if (p.ids.present() && !degenerate) {
        const double target = double(uniform_of(p, b)) * search.kept_mass();
        const Drawn drawn = draw(v, column, threshold, 0.0, target, block, draw_scratch);
        id = drawn.first != kNone ? drawn.first : drawn.past_last - 1;
    }
    if (thread == 0) write_output(p, b, id, float(search.kept_mass()), search.kept_count());
}
}  // namespace

// Entry points of one dtype, as `ROWS` in src/sample.rs. Name = op, dtype, longest row, `_scalar` for the scalar path.
#define SAMPLE_ROWS(T)                                                                                  \
    HK_ENTRY(sample_rows_##T##_1024, 64, row_in_registers<hk::Access::Vectorized, hk::T, 64, 16, 8>)    \
    HK_ENTRY(sample_rows_##T##_8192, 256, row_in_registers<hk::Access::Vectorized, hk::T, 256, 32, 11>) \
    HK_ENTRY(sample_rows_##T##_1024_scalar, 64, row_in_registers<hk::Access::Scalar, hk::T, 64, 16, 8>) \
    HK_ENTRY(sample_rows_##T##_8192_scalar, 256, row_in_registers<hk::Access::Scalar, hk::T, 256, 32, 11>)

SAMPLE_ROWS(bf16)
SAMPLE_ROWS(f16)
SAMPLE_ROWS(f32)
