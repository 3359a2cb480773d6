// sage_quant.hip: queries, keys and values of SageAttention, quantized (sage.h).
//
//   k' = k - mean of k over the keys of its head, if smooth: softmax does not change
//   q' = q - mean of q over the queries of its block, if q_mean;  q_shift = scale log2(e) (mean . k')
//   q8 = round(scale log2(e) q' / q_scale), k8 = round(k' / k_scale), ties away from zero; scales are amax / 127 of a block of rows
//   v8 = fp8(v / v_scale), v_scale = amax / largest fp8 of a column
//   lse_shift = scale (q . mean): LSE of k, less that of k'
//   q, k, v     [batch, rows, heads, columns]  bf16 | f16 | f32   unit stride on the columns
//   q8, k8, v8  the same                        i8, fp8            rows on 16 bytes, columns rounded up to 16; those beyond are 0
// Three launches: sums of K and maxima of V by chunks of rows, then of all rows, then a block for each block of rows, which is read once.
// With q_mean two more: means of blocks of queries before, shifts after.
// A lane has 16 columns, eight lanes a row. Sums are in a fixed order.
// Source: Zhang et al. 2024, "SageAttention", sections 4.2 and 4.3.
#include "rows.h"
#include "sage.h"

#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/quant.h>
#include <hk/wave.h>

namespace sage_quant {
using attention::HeadRows;
using hk::u32;
using hk::u64;

/// Rows of f32 have kColumns columns, one row for each batch and key head.
struct Params {
    HeadRows q, k, v, q8, k8, v8;
    u64 q_scale, k_scale, v_scale, lse_shift;  // as in SageParams
    u64 partials;  // [rows, chunks, 2]: sums of K, maxima of V
    u64 mean;  // [rows]
    u64 q_mean;  // [batch, heads, q_blocks]; 0: none
    u64 q_shift;  // as in SageParams
    float scale;
    u32 smooth;
    u32 heads, kv_heads, group;
    u32 sq, sk, dqk, dv;
    u32 q_vectorized, k_vectorized, v_vectorized;  // rows in whole accesses of 16 bytes
    u32 q_blocks, k_blocks, v_columns, chunks;
    u32 of_q, of_k;  // blocks of q8, and those of k8 and as many of v8
};
}  // namespace sage_quant

namespace {
using namespace sage_quant;
using attention::float_at;
using attention::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::u8;
using hk::Vec;

constexpr u32 kColumns = 128, kRun = 16, kLanes = kColumns / kRun;
constexpr u32 kStatsThreads = 256, kThreads = 512;
constexpr u32 kStatsRows = kStatsThreads / kLanes, kRows = kThreads / kLanes;  // of a pass
constexpr u32 kChunk = 512;  // rows

using Run = Vec<float, kRun>;

HK_FN u32 column() { return hk::thread_x() % kLanes * kRun; }
HK_FN u64 address(const HeadRows &of, u32 batch, u32 row, u32 head) {
    return of.data + u64(i64(batch) * of.batch + i64(row) * of.row + i64(head) * of.head);
}

/// The lane's columns of a row; those from `cols` on are 0.
template <class T>
HK_FN Vec<T, kRun> load_run(u64 row, u32 cols, bool vectorized) {
    constexpr u32 kVec = 16 / sizeof(T);
    Vec<T, kRun> run = T(0);
#pragma unroll
    for (u32 i = 0; i < kRun; i += kVec) {
        const u32 col = column() + i;
        if (col >= cols) continue;
        const auto at = reinterpret_cast<GlobalPtr<const u8>>(row + col * sizeof(T));
        const auto part =
            attention::load_row<T, int(kVec)>(at, attention::kOwn, vectorized, sizeof(T), i32(cols - col));
#pragma unroll
        for (u32 j = 0; j < kVec; ++j) run[i + j] = part[j];
    }
    return run;
}
template <class T>
HK_FN Run floats(Vec<T, kRun> v) {
    return __builtin_convertvector(v, Run);
}
/// The lane's columns of a row of kColumns f32.
HK_FN Run load_floats(u64 data, u32 row) {
    const auto at = reinterpret_cast<GlobalPtr<const Vec<float, 4>>>(float_at(data, row, kColumns, column()));
    Run run;
#pragma unroll
    for (u32 i = 0; i < kRun; ++i) run[i] = at[i / 4][i % 4];
    return run;
}

/// The lanes' runs of the block's rows, four columns a chunk, in the order in which lanes write them together.
using StatsTile = Vec<float, 4>[kStatsRows][kColumns / 4];
HK_FN void put_run(StatsTile &tile, Run run) {
    const u32 lane = hk::thread_x() % kLanes, group = hk::thread_x() / kLanes;
#pragma unroll
    for (u32 j = 0; j < kRun / 4; ++j)
        tile[group][j * kLanes + lane] = Vec<float, 4>{run[4 * j], run[4 * j + 1], run[4 * j + 2], run[4 * j + 3]};
}
/// The column of float `at` of a row of it.
HK_FN u32 column_of(u32 at) { return at / 4 % kLanes * kRun + at / 4 / kLanes * 4 + at % 4; }

/// Sums and maxima of the columns of a chunk of rows.
template <class T>
HK_FN void stats(const Params &p) {
    __shared__ StatsTile lds[2];
    const u32 chunk = hk::block_x() % p.chunks, row = hk::block_x() / p.chunks;
    const u32 batch = row / p.kv_heads, head = row % p.kv_heads;
    Run sum = 0.0f, top = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < kChunk; i += kStatsRows) {
        const u32 key = chunk * kChunk + i + hk::thread_x() / kLanes;
        if (key >= p.sk) continue;
        if (p.smooth) sum += floats(load_run<T>(address(p.k, batch, key, head), p.dqk, p.k_vectorized));
        const Run v = floats(load_run<T>(address(p.v, batch, key, head), p.dv, p.v_vectorized));
        top = __builtin_elementwise_max(top, __builtin_elementwise_abs(v));
    }
    put_run(lds[0], sum), put_run(lds[1], top);
    hk::block_barrier();
    const u32 which = hk::thread_x() / kColumns, at = hk::thread_x() % kColumns;
    float of_column = 0.0f;
#pragma unroll
    for (u32 g = 0; g < kStatsRows; ++g) {
        const float part = reinterpret_cast<const float *>(&lds[which][g])[at];
        of_column = which == 0 ? of_column + part : __builtin_fmaxf(of_column, part);
    }
    const u64 to = float_at(p.partials, hk::block_x() * 2 + which, kColumns, column_of(at));
    *reinterpret_cast<GlobalPtr<float>>(to) = of_column;
}

/// The mean of a block of queries.
template <class T>
HK_FN void query_means(const Params &p) {
    __shared__ StatsTile lds;
    constexpr u32 kOfBlock = attention::sage::kQueriesOfBlock;
    const u32 row = hk::block_x() / p.q_blocks, first = hk::block_x() % p.q_blocks * kOfBlock;
    Run sum = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < kOfBlock; i += kStatsRows) {
        const u32 query = first + i + hk::thread_x() / kLanes;
        if (query >= p.sq) continue;
        sum += floats(load_run<T>(address(p.q, row / p.heads, query, row % p.heads), p.dqk, p.q_vectorized));
    }
    put_run(lds, sum);
    hk::block_barrier();
    const u32 at = hk::thread_x();
    if (at >= kColumns) return;
    float all = 0.0f;
#pragma unroll
    for (u32 g = 0; g < kStatsRows; ++g) all += reinterpret_cast<const float *>(&lds[g])[at];
    const u32 left = p.sq - first, queries = left < kOfBlock ? left : kOfBlock;
    const u64 to = float_at(p.q_mean, hk::block_x(), kColumns, column_of(at));
    *reinterpret_cast<GlobalPtr<float>>(to) = all / float(queries);
}

/// The mean of K and the factors of V of a head.
HK_FN void finish(const Params &p) {
    const u32 row = hk::block_x(), which = hk::thread_x() / kColumns, col = hk::thread_x() % kColumns;
    float all = 0.0f;
#pragma unroll 8
    for (u32 chunk = 0; chunk < p.chunks; ++chunk) {
        const u64 at = float_at(p.partials, (row * p.chunks + chunk) * 2 + which, kColumns, col);
        const float part = *reinterpret_cast<GlobalPtr<const float>>(at);
        all = which == 0 ? all + part : __builtin_fmaxf(all, part);
    }
    if (which == 0) {
        const float mean = p.sk == 0 ? 0.0f : all / float(p.sk);
        *reinterpret_cast<GlobalPtr<float>>(float_at(p.mean, row, kColumns, col)) = mean;
    } else if (col < p.v_columns) {
        const float scale = hk::linear_scale(all, hk::kQuantMax<hk::kMmaFp8Type>);
        *reinterpret_cast<GlobalPtr<float>>(float_at(p.v_scale, row, p.v_columns, col)) = scale;
    }
}

HK_FN void store_run(u64 row, u32 columns, Vec<u32, 4> packed) {
    if (column() < columns) *reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(row + column()) = packed;
}

/// Integers of [-127.5, 127.5], ties away from zero, four to a dword.
HK_FN Vec<u32, 4> rounded(Run v) {
    Vec<u32, 4> packed;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        // The last place of the sum is 1: the integer is in its low bits.
        const auto code = [&](u32 j) {
            const float x = v[4 * i + j];
            return hk::detail::bits_of(__builtin_truncf(x + __builtin_copysignf(0.5f, x)) + 0x1.8p+23f);
        };
        packed[i] = hk::detail::low_bytes(code(0), code(1), code(2), code(3));
    }
    return packed;
}

/// A block of rows of a head: from `first` on, kPasses * kRows of them, of which there are `rows`. `value`: of a row's columns.
template <class T, int kPasses>
HK_FN void quantize_rows(const HeadRows &from, const HeadRows &to, u32 batch, u32 head, u32 first, u32 rows, u32 cols,
                         bool vectorized, u64 scale_at, auto value, auto each) {
    hk::GroupReducer<kThreads, kThreads> block;
    Vec<T, kRun> run[kPasses];
    hk::AbsMax most;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const u32 row = first + i * kRows + hk::thread_x() / kLanes;
        run[i] = T(0);
        if (row < rows) run[i] = load_run<T>(address(from, batch, row, head), cols, vectorized);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const u32 row = first + i * kRows + hk::thread_x() / kLanes;
        const Run v = floats(run[i]);
        if (row < rows) most.add(value(v));
        each(row, v);
    }
    // Values that are not finite have no factor: all scores of the block are NaN.
    const u32 bits = block.reduce(most.bits, hk::MaxBits{});
    const float amax = __builtin_bit_cast(float, bits);
    const float scale = bits < hk::AbsMax::kInfinity ? hk::linear_scale(amax, 127.0f) : __builtin_nanf("");
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const u32 row = first + i * kRows + hk::thread_x() / kLanes;
        if (row < rows) {
            store_run(address(to, batch, row, head), (cols + 15) / 16 * 16, rounded(value(floats(run[i])) * inverse));
        }
    }
    if (hk::thread_x() == 0) *reinterpret_cast<GlobalPtr<float>>(scale_at) = scale;
}

template <class T, bool kSmooth>
HK_FN void quantize_queries(const Params &p, u32 index) {
    const u32 block = index % p.q_blocks, row = index / p.q_blocks;
    const u32 batch = row / p.heads, head = row % p.heads;
    const u32 keys = batch * p.kv_heads + head / p.group;
    const Run mean = p.lse_shift ? load_floats(p.mean, keys) : Run(0.0f);
    Run own_mean = 0.0f;
    if constexpr (kSmooth) own_mean = load_floats(p.q_mean, index);
    const float factor = p.scale * 0x1.715476p+0f;
    quantize_rows<T, attention::sage::kQueriesOfBlock / kRows>(
        p.q, p.q8, batch, head, block * attention::sage::kQueriesOfBlock, p.sq, p.dqk, p.q_vectorized,
        float_at(p.q_scale, row, p.q_blocks, block), [&](Run v) { return (kSmooth ? v - own_mean : v) * factor; },
        [&](u32 query, Run v) {
            if (!p.lse_shift) return;
            float dot = 0.0f;
#pragma unroll
            for (u32 i = 0; i < kRun; ++i) dot = __builtin_fmaf(v[i], mean[i], dot);
            dot = hk::group_reduce<int(kLanes)>(dot, hk::Sum{});
            if (query < p.sq && hk::thread_x() % kLanes == 0)
                *reinterpret_cast<GlobalPtr<float>>(float_at(p.lse_shift, row, p.sq, query)) = p.scale * dot;
        });
}

template <class T>
HK_FN void quantize_keys(const Params &p, u32 index) {
    const u32 block = index % p.k_blocks, row = index / p.k_blocks;
    const Run mean = load_floats(p.mean, row);
    quantize_rows<T, attention::sage::kKeysOfBlock / kRows>(
        p.k, p.k8, row / p.kv_heads, row % p.kv_heads, block * attention::sage::kKeysOfBlock, p.sk, p.dqk,
        p.k_vectorized, float_at(p.k_scale, row, p.k_blocks, block), [&](Run v) { return v - mean; }, [](u32, Run) {});
}

/// Means of the blocks of queries of a block of keys' heads, times its keys.
template <class T>
HK_FN void query_shifts(const Params &p) {
    constexpr u32 kOfBlock = attention::sage::kKeysOfBlock;
    const u32 block = hk::block_x() % p.k_blocks, row = hk::block_x() / p.k_blocks;
    const u32 batch = row / p.kv_heads, head = row % p.kv_heads;
    const Run mean = load_floats(p.mean, row);
    const float factor = p.scale * 0x1.715476p+0f;
#pragma unroll 1
    for (u32 i = 0; i < kOfBlock; i += kRows) {
        const u32 key = block * kOfBlock + i + hk::thread_x() / kLanes;
        Run v = 0.0f;
        if (key < p.sk) v = floats(load_run<T>(address(p.k, batch, key, head), p.dqk, p.k_vectorized)) - mean;
        const u32 first = (batch * p.heads + head * p.group) * p.q_blocks;
#pragma unroll 1
        for (u32 of = first; of < first + p.group * p.q_blocks; ++of) {
            const Run of_queries = load_floats(p.q_mean, of);
            float dot = 0.0f;
#pragma unroll
            for (u32 j = 0; j < kRun; ++j) dot = __builtin_fmaf(of_queries[j], v[j], dot);
            dot = hk::group_reduce<int(kLanes)>(dot, hk::Sum{});
            if (hk::thread_x() % kLanes == 0)
                *reinterpret_cast<GlobalPtr<float>>(float_at(p.q_shift, of, p.k_blocks * kOfBlock, key)) = factor * dot;
        }
    }
}

template <class T>
HK_FN void quantize_values(const Params &p, u32 index) {
    constexpr int kPasses = attention::sage::kKeysOfBlock / kRows;
    const u32 block = index % p.k_blocks, row = index / p.k_blocks;
    const u32 batch = row / p.kv_heads, head = row % p.kv_heads;
    Vec<T, kRun> run[kPasses];
    const u32 first = block * attention::sage::kKeysOfBlock + hk::thread_x() / kLanes;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        run[i] = T(0);
        if (first + i * kRows < p.sk)
            run[i] = load_run<T>(address(p.v, batch, first + i * kRows, head), p.dv, p.v_vectorized);
    }
    Run inverse = 1.0f;
    if (column() < p.v_columns) {
        const auto at =
            reinterpret_cast<GlobalPtr<const Vec<float, 4>>>(float_at(p.v_scale, row, p.v_columns, column()));
#pragma unroll
        for (u32 i = 0; i < kRun; ++i) inverse[i] = 1.0f / at[i / 4][i % 4];
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const u32 key = first + i * kRows;
        if (key >= p.sk) continue;
        const auto packed = hk::quantize_packed<hk::kMmaFp8Type, int(kRun)>(floats(run[i]) * inverse);
        store_run(address(p.v8, batch, key, head), p.v_columns, packed);
    }
}

template <class T, bool kSmooth>
HK_FN void quantize(const Params &p) {
    u32 index = hk::block_x();
    if (index < p.of_q) return quantize_queries<T, kSmooth>(p, index);
    index -= p.of_q;
    if (index < p.of_k) return quantize_keys<T>(p, index);
    quantize_values<T>(p, index - p.of_k);
}
}  // namespace

HK_ENTRY(sage_stats_bf16, kStatsThreads, stats<hk::bf16>)
HK_ENTRY(sage_stats_f16, kStatsThreads, stats<hk::f16>)
HK_ENTRY(sage_stats_f32, kStatsThreads, stats<float>)
HK_ENTRY(sage_finish, kStatsThreads, finish)
HK_ENTRY(sage_query_means_bf16, kStatsThreads, query_means<hk::bf16>)
HK_ENTRY(sage_query_means_f16, kStatsThreads, query_means<hk::f16>)
HK_ENTRY(sage_query_means_f32, kStatsThreads, query_means<float>)
HK_ENTRY(sage_quantize_bf16, kThreads, quantize<hk::bf16, false>)
HK_ENTRY(sage_quantize_f16, kThreads, quantize<hk::f16, false>)
HK_ENTRY(sage_quantize_f32, kThreads, quantize<float, false>)
HK_ENTRY(sage_quantize_smooth_bf16, kThreads, quantize<hk::bf16, true>)
HK_ENTRY(sage_quantize_smooth_f16, kThreads, quantize<hk::f16, true>)
HK_ENTRY(sage_quantize_smooth_f32, kThreads, quantize<float, true>)
HK_ENTRY(sage_query_shifts_bf16, kThreads, query_shifts<hk::bf16>)
HK_ENTRY(sage_query_shifts_f16, kThreads, query_shifts<hk::f16>)
HK_ENTRY(sage_query_shifts_f32, kThreads, query_shifts<float>)
