// rope.hip: out[b, t, h, :] = x[b, t, h, :], of which the span of `rotary` columns is rotated by the token's angles
//   x, out   [batches, tokens, heads, head_dim]   T = bf16 | f16 | f32      unit stride on head_dim, the others free;
//                                                                           out may lie on x
//   cos, sin [positions, rotary / 2 or rotary]    T | f32                   unit stride on the columns, rows any stride;
//                                                                           or one table of angles
//   positions, offsets                            i32 | i64, optional       any strides
// Up to three tensors in one launch: queries, keys, and values, which are copied. All arithmetic is f32, with one rounding.
// Pairs and tables: hk/rope.h. Heads on lanes, access and floor: hk/heads.h. Source: Su et al. 2021, section 3.2.2.
#include <hk/entry.h>
#include <hk/heads.h>

namespace {
using hk::Turn;

struct Params {  // same fields, same order as `Params` in src/rope.rs
    hk::Rope rope;
    hk::HeadsPart parts[5];  // what is rotated of queries and what is not, the same of keys, values
};
}  // namespace

// One per dtype of x and kind of table, and if it goes by elements.
#define ROPE_ENTRIES(T)                                                                                                   \
    HK_ENTRY_FOR_WAVES(rope_##T##_shared, hk::kHeadsThreads, 32, hk::walk_heads<hk::T, hk::kVecLen<hk::T>, Turn::Shared>) \
    HK_ENTRY(rope_##T##_tables, hk::kHeadsThreads, hk::walk_heads<hk::T, hk::kVecLen<hk::T>, Turn::Tables>)               \
    HK_ENTRY(rope_##T##_tables_elements, hk::kHeadsThreads, hk::walk_heads<hk::T, 1, Turn::Tables>)                       \
    HK_ENTRY(rope_##T##_angles, hk::kHeadsThreads, hk::walk_heads<hk::T, hk::kVecLen<hk::T>, Turn::Angles>)               \
    HK_ENTRY(rope_##T##_angles_elements, hk::kHeadsThreads, hk::walk_heads<hk::T, 1, Turn::Angles>)

ROPE_ENTRIES(bf16)
ROPE_ENTRIES(f16)
ROPE_ENTRIES(f32)
