// cumsum.hip: sums along the tokens of each chunk
//   y[t, c] = scale sum x[s, c],  s from the first token of t's chunk to t; or from t to the last one, in reverse
//   x, y  [batch, T, cols]  f32   any strides; packed: one batch, sequence b from starts[b] to starts[b + 1]
// Chunks of C tokens begin with the first token of a sequence; the last of a sequence may be shorter.
// A lane walks the chunks of one column, and takes those that begin among C tokens. Lanes go along columns, or, if these are few,
// along chunks. Sums are compensated (Kahan): within 2^-23 of the sum of absolute values.
// Floor: 8 bytes an element.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/types.h>

namespace {
using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::u32;
using hk::u64;

struct Params {
    u64 x, y, starts;  // starts may be 0
    i64 x_batch, x_token, x_head, x_inner, y_batch, y_token, y_head, y_inner;  // strides, in elements
    u32 batch, tokens, heads, inner;
    u32 sequences;  // packed ones
    u32 chunk;
    u32 reverse;
    float scale;
};

constexpr u32 kThreads = 256;
constexpr u32 kAhead = 8;  // tokens in flight

struct Column {
    GlobalPtr<const float> x;
    GlobalPtr<float> y;
    i64 x_token, y_token;
    float scale;

    /// The chunk of `n` tokens from `first` on, in order `step`: 1 or -1 from its last one.
    HK_FN void walk(u32 first, u32 n, bool reverse, bool poison) const {
        float sum = 0.0f, lost = 0.0f;
        const auto token = [&](u32 i) { return i64(first) + (reverse ? n - 1 - i : i); };
        for (u32 i = 0; i < n; i += kAhead) {
            float v[kAhead];
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) v[j] = i + j < n ? x[token(i + j) * x_token] : 0.0f;
#pragma unroll
            for (u32 j = 0; j < kAhead; ++j) {
                const float term = v[j] - lost, next = sum + term;
                // Infinities would make what is lost NaN.
                const float kept = next - sum - term;
                lost = __builtin_fabsf(next) < __builtin_inff() ? kept : 0.0f;
                sum = next;
                if (i + j < n) y[token(i + j) * y_token] = poison ? __builtin_nanf("") : sum * scale;
            }
        }
    }
};

/// The last sequence that begins at or before token `t`, or the first.
HK_FN u32 sequence_of(const Params &p, u32 t) {
    const auto starts = reinterpret_cast<GlobalPtr<const i32>>(p.starts);
    u32 low = 0, high = p.sequences;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (starts[middle] <= i32(t)) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

HK_FN void cumsum(const Params &p) {
    const u64 task = u64(hk::block_x()) * kThreads + hk::thread_x();
    const u32 cols = p.heads * p.inner;
    const u32 runs = (p.tokens + p.chunk - 1) / p.chunk;
    // Neighbouring lanes have neighbouring columns.
    const u32 col = u32(task % cols);
    const u64 rest = task / cols;
    const u32 run = u32(rest % runs);
    const u64 b = rest / runs;
    if (b >= p.batch) return;
    const i64 head = col / p.inner, inner = col % p.inner;
    const Column column = {
        reinterpret_cast<GlobalPtr<const float>>(p.x) + i64(b) * p.x_batch + head * p.x_head + inner * p.x_inner,
        reinterpret_cast<GlobalPtr<float>>(p.y) + i64(b) * p.y_batch + head * p.y_head + inner * p.y_inner, p.x_token,
        p.y_token, p.scale};
    const u32 from = run * p.chunk;
    const u32 to = p.tokens - from < p.chunk ? p.tokens : from + p.chunk;
    if (!p.starts) return column.walk(from, to - from, p.reverse, false);

    const auto starts = reinterpret_cast<GlobalPtr<const i32>>(p.starts);
    for (u32 n = sequence_of(p, from); n < p.sequences; ++n) {
        const i32 begin = starts[n], end = starts[n + 1], all = i32(p.tokens);
        const bool poison = begin < 0 || end < begin || end > all;
        const u32 low = u32(begin < 0 ? 0 : begin < all ? begin : all);
        const u32 high = end < i32(low) ? low : u32(end < all ? end : all);
        if (low >= to) break;
        // The chunk that begins in this run.
        const u32 first = low >= from ? low : low + (from - low + p.chunk - 1) / p.chunk * p.chunk;
        if (first < to && first < high)
            column.walk(first, high - first < p.chunk ? high - first : p.chunk, p.reverse, poison);
    }
}
}  // namespace

HK_ENTRY(cumsum_f32, kThreads, cumsum)
