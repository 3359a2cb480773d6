// reduce.hip: sums of the splits of K, in their order, and what comes after a sum.
//   y[b, m, n] = epilogue(sum over s of planes[s, b, m, n]), planes f32; with gates and values planes have twice N columns.
//   gemm_zero: y = 0, where blocks will add to it.
//   A lane has eight outputs of a row. Floor: bytes of the planes and of y.
#include <hk/entry.h>

#include "epilogue.h"

namespace {
using gemm::Epilogue;
using gemm::kPart;
using gemm::Work;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::Vec;

constexpr u32 kThreads = 256;

struct Params {  // same layout as `ReduceParams` in src/problem.rs
    Epilogue epilogue;
    gemm::Fusion fusion;
    u64 planes;
    i64 split, batch, row;  // strides of planes, in elements
    u32 splits;
    u32 parts;    // of a row of y
    u32 batches;
    u32 gated;
    u32 vectors;  // rows of planes begin on 16 bytes
    u32 pad;
};

/// Whether planes are on 16 bytes from `at` on, as values are not that follow a number of gates which 4 does not divide.
HK_FN bool by_vectors(const Params &p, i64 at) { return p.vectors && (hk::kAnyAddress || at % 4 == 0); }

/// The sum over the splits, of columns `at` on.
HK_FN Vec<float, kPart> total(const Params &p, i64 at, u32 left) {
    constexpr auto kF32 = gemm::Float::F32;
    Vec<float, kPart> sum = gemm::load_floats<kPart>(p.planes, kF32, at, left, by_vectors(p, at));
    for (u32 s = 1; s < p.splits; ++s) {
        sum += gemm::load_floats<kPart>(p.planes, kF32, at + i64(s) * p.split, left, by_vectors(p, at));
    }
    return sum;
}

template <bool kZero>
HK_FN void reduce(const Params &given) {
    const u64 count = u64(given.batches) * given.epilogue.rows * given.parts;
    for (u64 i = u64(hk::block_x()) * kThreads + hk::thread_x(); i < count; i += u64(hk::grid_x()) * kThreads) {
        const Params &p = hk::read_anew(given);
        const Epilogue &e = p.epilogue;
        const u64 row = i / p.parts;
        const u32 n = u32(i - row * p.parts) * kPart;
        const u32 batch = u32(row / e.rows), m = u32(row - u64(batch) * e.rows);
        const i64 at = i64(batch) * p.batch + i64(m) * p.row + n;
        const auto &groups = e.groups;
        const Work work(batch, groups.kind == gemm::Grouping::Rows ? u32(groups.list()[m]) : batch);
        if constexpr (kZero) {
            gemm::write<kPart>(e, work, m, n, Vec<float, kPart>(0.0f));
            continue;
        }
        const Vec<float, kPart> sum = total(p, at, e.cols - n);
        if (p.gated) {
            gemm::finish_gated<kPart>(e, work, m, n, sum, total(p, at + e.cols, e.cols - n));
        } else {
            gemm::finish<kPart>(p, work, m, n, sum);
        }
    }
}
}  // namespace

HK_ENTRY(gemm_reduce, kThreads, reduce<false>)
HK_ENTRY(gemm_zero, kThreads, reduce<true>)
