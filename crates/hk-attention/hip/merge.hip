// merge.hip: merges the partial results of parts of the keys (merge.h).
// A lane has four columns of a row. Floor: bytes of the partial results and of the output.
#include "lean.h"
#include "merge.h"
#include "outputs.h"

#include <hk/entry.h>

namespace {
using namespace attention;

constexpr u32 kThreads = 256;

/// Where a thread is: `vectors` of four columns of a row, at most 128, are in one block.
struct Thread {
    u32 rows, row, col;  // rows of a block; the thread's; `rows`: none

    HK_FN explicit Thread(const Params &p) {
        const u32 vectors = (p.dv + 3) / 4;
        rows = kThreads / vectors;
        row = hk::thread_x() / vectors;
        col = (hk::thread_x() - row * vectors) * 4;
    }
};

/// Merges `count` partial results of a row, `part(s)`, and stores columns from `col` on.
template <class T>
HK_FN void merge_row(const Params &p, u32 count, auto part, const Work &work, bool packed, u32 query, u32 head,
                     u32 col) {
    constexpr int kAhead = 4;
    const auto sums = [&](u32 s) { return part(s).sums(); };
    const auto row = MergedRow::of<kAhead>(count, sink_of(p, head), sums);
    const float inverse = p.out_scale ? 1.0f / hk::load_uniform<float>(p.out_scale) : 1.0f;
    const auto y = sum_of_parts<1, kAhead>(
        count, sums, [&](Vec<float, 2> of) { return row.factor(of); }, [&](u32 s, int) { return part(s).load(col); });
    store_columns<T>(p, row_address(p.out, work, packed, query, head), col, y.of[0] * inverse);
    if (p.lse.data && col == 0)
        *reinterpret_cast<GlobalPtr<float>>(row_address(p.lse, work, packed, query, head)) = row.lse();
}

/// Of splits of the keys.
template <class T>
HK_FN void merge(const Params &args) {
    const Thread at(args);
    const u32 row = hk::block_x() * at.rows + at.row;
    if (at.row >= at.rows || row >= args.splits.rows) return;
    const Params &p = hk::reload_params(args);
    const u32 query = row / p.heads, head = row - query * p.heads;
    Work work = {};
    const bool packed = p.sequences.q_starts != 0;
    work.sequence = packed ? 0 : query / p.sequences.sq;
    const u32 of_sequence = query - work.sequence * p.sequences.sq * (packed ? 0 : 1);
    const auto part = [&](u32 s) { return Partial(p, s, row); };
    merge_row<T>(p, p.splits.count, part, work, packed, of_sequence, head, at.col);
}

/// Of stream-K (lean.h): tiles of more than one program. Blocks have a program and some rows of the tile in which it begins.
template <class T>
HK_FN void lean_merge(const Params &args) {
    const Thread at(args);
    const u32 chunks = (args.splits.rows + at.rows - 1) / at.rows, program = 1 + hk::block_x() / chunks;
    const lean::Start start = *lean::Start::of(args, program);
    // The first program that begins within a tile has it; the one before has the tile's first keys.
    const u32 before = lean::first_unit(args, start.units, program - 1);
    if (start.unit == start.tile || before > start.tile) return;
    const u32 row = hk::block_x() % chunks * at.rows + at.row;
    const hk::DivMod of_group(start.first + row, args.group, args.group_inverse);
    if (at.row >= at.rows || row >= args.splits.rows || of_group.quotient >= args.sequences.sq) return;
    u32 count = 1;
    for (u32 i = program; i < args.splits.count && lean::first_unit(args, start.units, i) < start.end; ++i) ++count;
    const Params &p = hk::reload_params(args);
    Work work = {};
    work.sequence = start.sequence;
    const auto part = [&](u32 s) { return Partial(p, 2 * (program - 1 + s) + (s == 0 ? 1 : 0), row); };
    const u32 head = start.kv_head * p.group + of_group.remainder;
    merge_row<T>(p, count, part, work, false, of_group.quotient, head, at.col);
}
}  // namespace

HK_ENTRY(attention_merge_bf16, kThreads, merge<hk::bf16>)
HK_ENTRY(attention_merge_f16, kThreads, merge<hk::f16>)
HK_ENTRY(attention_merge_f32, kThreads, merge<float>)
HK_ENTRY(lean_merge_bf16, kThreads, lean_merge<hk::bf16>)
HK_ENTRY(lean_merge_f16, kThreads, lean_merge<hk::f16>)
HK_ENTRY(lean_merge_f32, kThreads, lean_merge<float>)
