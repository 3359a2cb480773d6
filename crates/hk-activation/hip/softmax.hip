// softmax.hip: y[r, c] = exp(x[r, c] - m[r]) / sum_c exp(x[r, c] - m[r]),  m[r] = max_c x[r, c]
//   x      [rows, cols]               T = bf16 | f16 | f32   unit stride on cols, rows any stride
//   y      [rows, cols]               T | f32                unit stride on cols, rows any stride; may alias x
//   parts  [rows, segments, 2]        f32                    rows longer than 32768: maximum and sum of each segment
// All arithmetic is f32, exponentials are powers of two, one rounding. A NaN, positive infinity, or a row of negative infinities
// makes x - m or the sum NaN, and so the row.
//
// How the work is split
//   Up to 32768 columns, `Lanes` lanes hold a row in registers, so it is read once; lanes of rows: hk/rows.h.
//   Longer rows are split into segments of 4096 columns, one per block: `parts` computes the maximum of a segment and the sum
//   relative to it; `apply` combines the partial results of the row in a fixed order and reads the segment again.
//   The order of sums depends on the row length alone (batch-invariant).
// Floor
//   Memory: rows * cols * (sizeof(T) + sizeof(y)), plus sizeof(T) for long rows. VALU instructions for a 16-byte
//   chunk of 8 bf16: 8 to widen, 4 for the maximum, 16 and 8 exponentials for the terms, 4 + 4 to sum and scale, and 4 on
//   gfx950 or 36 on gfx942 to round.
#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/math.h>
#include <hk/reg.h>
#include <hk/rows.h>

namespace {
using hk::Access;
using hk::row_threads;
using hk::RowBatch;
using hk::u32;
using hk::u64;

struct Params {
    hk::Global x, y;
    u64 parts;
    u32 y_is_f32;
    u32 batch;  // rows per block and step
    u32 segments;  // of a row
    u32 pad;
};

constexpr float kLowest = -__builtin_inff();
constexpr float kLog2E = 0x1.715476p+0f;

/// A lane's elements in f32; those beyond the row are -inf, which adds nothing. `left`: columns from the lane's first on.
template <Access kAccess, class RowT>
HK_FN auto widen_within(const RowT &x, hk::i32 left, bool full) {
    auto out = hk::widen(x);
    if (!full) hk::mask_tail<kAccess>(out, left);
    return out;
}

/// exp(x - max) in place; returns the sum.
template <int L, int N, int C>
HK_FN float exponentials(hk::Row<float, L, N, C> &row, float max) {
    hk::Vec<float, 2> sum;
#pragma unroll
    for (int k = 0; k < C; ++k) {
        // Subtract first: scaling large numbers before would lose their difference.
        row.chunk[k] = hk::exp2_fast((row.chunk[k] - max) * kLog2E);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const hk::Vec<float, 2> pair = {row.chunk[k][i], row.chunk[k][i + 1]};
            sum = k + i == 0 ? pair : sum + pair;
        }
    }
    return sum[0] + sum[1];
}

/// Writes rows `index`, `index + step`, .., each times its scale.
template <Access kAccess, class T, bool kSingleRow, class RowF, int Rows>
HK_FN void store(const Params &p, const RowBatch &batch, u32 index, u32 step, const RowF (&y)[Rows],
                 const float (&scale)[Rows]) {
    if (p.y_is_f32) {
#pragma unroll
        for (int r = 0; r < Rows; ++r)
            (y[r] * scale[r]).store(batch.at<float, kAccess, kSingleRow>(p.y, index + u32(r) * step));
    } else {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            hk::narrow<T>(y[r] * scale[r]).store(batch.at<T, kAccess, kSingleRow>(p.y, index + u32(r) * step));
        }
    }
}

/// Rows that stay in registers, up to Lanes * ColsPerLane columns; a thread has `HostRows` rows in registers, or fewer
/// in longer blocks (`clamp_rows_per_thread`).
template <Access kAccess, class T, int Lanes, int ColsPerLane, int HostRows>
HK_FN void rows(const Params &p) {
    constexpr int kThreads = row_threads(Lanes, HostRows), Rows = hk::clamp_rows_per_thread(Lanes, HostRows);
    constexpr u32 kRowsPerBlock = kThreads / Lanes;
    constexpr bool kSingleRow = kRowsPerBlock * Rows == 1;
    using RowT = hk::Row<T, Lanes, hk::kVecLen<T>, ColsPerLane / hk::kVecLen<T>>;
    using RowF = typename RowT::template With<float>;
    const u32 side = hk::thread_x() / Lanes;
    const u32 column = hk::thread_x() % Lanes * hk::kVecLen<T>;
    const u32 cols = p.x.cols();
    hk::GroupReducer<kThreads, Lanes, Rows> group;

    hk::for_row_batches<kSingleRow>(p.x.rows(), cols, column, p.batch, [&](const RowBatch &batch) {
        RowT x[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r)
            x[r] = RowT::load(batch.at<T, kAccess, kSingleRow>(p.x, r * kRowsPerBlock + side));
        // All rows take each step together, to share its latency.
        RowF y[Rows];
        float largest[Rows], sum[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) y[r] = hk::widen(x[r]);
        if (cols != u32(RowT::kCols)) {
#pragma unroll
            for (int r = 0; r < Rows; ++r) hk::mask_tail<kAccess>(y[r], hk::i32(cols - column));
        }
#pragma unroll
        for (int r = 0; r < Rows; ++r) largest[r] = hk::largest(y[r]);
        group.reduce_each(largest, hk::Max{});
#pragma unroll
        for (int r = 0; r < Rows; ++r) sum[r] = exponentials(y[r], largest[r]);
        group.reduce_each(sum, hk::Sum{});
#pragma unroll
        for (int r = 0; r < Rows; ++r) sum[r] = hk::reciprocal(sum[r]);
        store<kAccess, T, kSingleRow>(p, batch, side, kRowsPerBlock, y, sum);
    });
}

constexpr int kThreads = 256;
constexpr int kSegmentCols = 16;  // of a lane

/// Calls `f(row, segment, x, batch, full)` for each segment of this block.
template <Access kAccess, class T, class F>
HK_FN void for_segments(const Params &p, F f) {
    using RowT = hk::Row<T, kThreads, hk::kVecLen<T>, kSegmentCols / hk::kVecLen<T>>;
    const u32 cols = p.x.cols();
    const u64 units = u64(p.x.rows()) * p.segments;
    for (u64 unit = hk::block_x(); unit < units; unit += hk::grid_x()) {
        const u64 row = unit / p.segments;
        const u32 segment = u32(unit - row * p.segments);
        const RowBatch batch = {row, 1, segment * RowT::kCols + hk::thread_x() * hk::kVecLen<T>, cols};
        const RowT x = RowT::load(batch.at<T, kAccess, true>(p.x, 0));
        const bool full = (segment + 1) * RowT::kCols <= cols;
        f(row, segment, widen_within<kAccess>(x, hk::i32(cols - batch.column), full), batch);
    }
}

/// The maximum of each segment, and the sum relative to it.
template <Access kAccess, class T>
HK_FN void parts(const Params &p) {
    hk::GroupReducer<kThreads, kThreads> group;
    for_segments<kAccess, T>(p, [&](u64 row, u32 segment, auto y, const RowBatch &) {
        const float max = group.max(hk::largest(y));
        // A segment of negative infinities adds 0.
        const float sum = group.sum(exponentials(y, max == kLowest ? 0.0f : max));
        const auto out = reinterpret_cast<hk::GlobalPtr<hk::Vec<float, 2>>>(p.parts);
        if (hk::thread_x() == 0) out[row * p.segments + segment] = hk::Vec<float, 2>{max, sum};
    });
}

/// The results of the segments, from the partial results of the row.
template <Access kAccess, class T>
HK_FN void apply(const Params &p) {
    for_segments<kAccess, T>(p, [&](u64 row, u32, auto y, const RowBatch &batch) {
        // Each wave on its own: lanes stride over the partial results, then reduce.
        const auto parts = reinterpret_cast<hk::GlobalPtr<const hk::Vec<float, 2>>>(p.parts) + row * p.segments;
        float max = kLowest;
        for (u32 i = hk::lane_id(); i < p.segments; i += hk::kWaveSize) max = hk::max3(max, max, parts[i][0]);
        max = hk::group_reduce<hk::kWaveSize>(max, hk::Max{});
        float sum = 0.0f;
        for (u32 i = hk::lane_id(); i < p.segments; i += hk::kWaveSize) {
            const hk::Vec<float, 2> part = parts[i];
            sum = __builtin_fmaf(hk::exp2_fast((part[0] - max) * kLog2E), part[1], sum);
        }
        sum = hk::group_reduce<hk::kWaveSize>(sum, hk::Sum{});
        exponentials(y, max);
        const decltype(y) rows[] = {y};
        const float scales[] = {hk::reciprocal(sum)};
        store<kAccess, T, true>(p, batch, 0, 1, rows, scales);
    });
}

/// Waves per SIMD for rows of 4096 elements on AMD, where the compiler would use three registers too many.
template <class T>
constexpr int kWavesOfSimd = sizeof(T) == 4 ? 5 : 1;
}  // namespace

// Entry points of one dtype, one per row of `VARIANTS` in src/softmax.rs, and those of long rows.
#define SOFTMAX_ROWS(name, access, T, widest, lanes)              \
    HK_ENTRY(name, row_threads(hk::lanes_per_row(lanes, widest)), \
             rows<Access::access, hk::T, HK_LANES_AND_COLS(lanes, widest), 1>)

#define SOFTMAX_ENTRIES(T)                                                                                            \
    HK_ENTRY_WAVES_PER_SIMD(softmax_##T##_128, row_threads(16, 4), 1, 48, rows<Access::Vectorized, hk::T, 16, 8, 4>)  \
    SOFTMAX_ROWS(softmax_##T##_512, Vectorized, T, 512, 16)                                                           \
    SOFTMAX_ROWS(softmax_##T##_1024, Vectorized, T, 1024, 64)                                                         \
    SOFTMAX_ROWS(softmax_##T##_2048, Vectorized, T, 2048, 64)                                                         \
    SOFTMAX_ROWS(softmax_##T##_4096, Vectorized, T, 4096, 64)                                                         \
    SOFTMAX_ROWS(softmax_##T##_8192, Vectorized, T, 8192, 256)                                                        \
    SOFTMAX_ROWS(softmax_##T##_16384, Vectorized, T, 16384, 256)                                                      \
    SOFTMAX_ROWS(softmax_##T##_32768, Vectorized, T, 32768, 512)                                                      \
    HK_ENTRY(softmax_##T##_parts, kThreads, parts<Access::Vectorized, hk::T>)                                         \
    HK_ENTRY(softmax_##T##_apply, kThreads, apply<Access::Vectorized, hk::T>)                                         \
    SOFTMAX_ROWS(softmax_##T##_512_scalar, Scalar, T, 512, 16)                                                        \
    SOFTMAX_ROWS(softmax_##T##_2048_scalar, Scalar, T, 2048, 64)                                                      \
    HK_ENTRY_WAVES_PER_SIMD(softmax_##T##_4096_scalar, row_threads(hk::lanes_per_row(64, 4096)), kWavesOfSimd<hk::T>, \
                            16, rows<Access::Scalar, hk::T, HK_LANES_AND_COLS(64, 4096), 1>)                          \
    SOFTMAX_ROWS(softmax_##T##_8192_scalar, Scalar, T, 8192, 256)                                                     \
    SOFTMAX_ROWS(softmax_##T##_16384_scalar, Scalar, T, 16384, 256)                                                   \
    SOFTMAX_ROWS(softmax_##T##_32768_scalar, Scalar, T, 32768, 512)                                                   \
    HK_ENTRY(softmax_##T##_parts_scalar, kThreads, parts<Access::Scalar, hk::T>)                                      \
    HK_ENTRY(softmax_##T##_apply_scalar, kThreads, apply<Access::Scalar, hk::T>)

SOFTMAX_ENTRIES(bf16)
SOFTMAX_ENTRIES(f16)
SOFTMAX_ENTRIES(f32)
