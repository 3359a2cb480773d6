// reduce.hip: split-K reduction in slice order, then the epilogue: deterministic.
//   y[b, m, n] = epilogue(sum over s of partials[s, b, m, n]), f32. Partial sums of gated outputs have 2 N columns: gates, values.
//   gemm_zero: y = 0, before blocks add to it with atomics.
//   A lane has eight outputs of a row. Floor: bytes of the partial sums and of y.
#include <hk/entry.h>

#include <gemm/epilogue/epilogue.h>

namespace {
using gemm::Epilogue;
using gemm::kVecCols;
using gemm::TileCoord;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::Vec;

constexpr u32 kThreads = 256;

struct Params {
    Epilogue epilogue;
    gemm::Fusion fusion;
    u64 partials;
    i64 split, batch, row;  // strides of partial sums, in elements
    u32 splits;
    u32 parts;  // vectors of 8 outputs in a row of y
    u32 batches;
    u32 gated;
    u32 vectors;  // rows of partial sums are 16-byte aligned
    u32 pad;
};

/// Whether partial sums are 16-byte aligned from `at` on. Values are not if they follow a number of gates that 4 does not divide.
HK_FN bool can_vectorize(const Params &p, i64 at) { return p.vectors && (hk::kHasUnalignedVectors || at % 4 == 0); }

/// Adds at most `N` slices from `first` on, in ascending order, with the loads of all in flight. Past the last slice they repeat it.
template <u32 N>
HK_FN void add_slices(const Params &p, i64 at, u32 first, Vec<float, kVecCols> &sum) {
    Vec<float, kVecCols> slices[N];
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        const u32 s = first + i < p.splits ? first + i : p.splits - 1;
        slices[i] = gemm::load_floats<kVecCols>(p.partials, gemm::Float::F32, at + i64(s) * p.split, kVecCols, true);
    }
    hk::sched_barrier();
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        if (first + i < p.splits) sum += slices[i];
    }
}

/// The sum over the split-K slices in ascending order, columns from `at` on.
HK_FN Vec<float, kVecCols> total(const Params &p, i64 at, u32 left) {
    const bool vectors = can_vectorize(p, at) && left >= kVecCols;
    Vec<float, kVecCols> sum = -0.0f;  // x + -0 is x, even for -0
    u32 s = 0;
    if (vectors) {
        // More loads in flight would leave registers for fewer waves.
        for (; s + 2 < p.splits; s += 4) add_slices<4>(p, at, s, sum);
        for (; s < p.splits; s += 2) add_slices<2>(p, at, s, sum);
    }
    for (; s < p.splits; ++s) {
        sum += gemm::load_floats<kVecCols>(p.partials, gemm::Float::F32, at + i64(s) * p.split, left);
    }
    return sum;
}

template <bool kZero>
HK_FN void reduce(const Params &args) {
    const u64 count = u64(args.batches) * args.epilogue.rows * args.parts;
    for (u64 i = u64(hk::block_x()) * kThreads + hk::thread_x(); i < count; i += u64(hk::grid_x()) * kThreads) {
        const Params &p = hk::reload_params(args);
        const Epilogue &e = p.epilogue;
        const u64 row = i / p.parts;
        const u32 n = u32(i - row * p.parts) * kVecCols;
        const u32 batch = u32(row / e.rows), m = u32(row - u64(batch) * e.rows);
        const i64 at = i64(batch) * p.batch + i64(m) * p.row + n;
        const auto &groups = e.groups;
        const TileCoord coord(batch, groups.kind == gemm::Grouping::Rows ? u32(groups.list()[m]) : batch);
        if constexpr (kZero) {
            gemm::store_output<kVecCols>(e, coord, m, n, Vec<float, kVecCols>(0.0f));
            continue;
        }
        const Vec<float, kVecCols> sum = total(p, at, e.cols - n);
        if (p.gated) {
            gemm::run_gated_epilogue<kVecCols>(e, coord, m, n, sum, total(p, at + e.cols, e.cols - n));
        } else {
            gemm::run_epilogue<kVecCols>(p, coord, m, n, sum);
        }
    }
}
}  // namespace

HK_ENTRY(gemm_reduce, kThreads, reduce<false>)
HK_ENTRY(gemm_zero, kThreads, reduce<true>)
