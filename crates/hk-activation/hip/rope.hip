// rope.hip: out[b, t, h, :] = x[b, t, h, :] with its `rotary` columns rotated by the token's angles
//   x, out   [batches, tokens, heads, head_dim]   T = bf16 | f16 | f32      unit stride on head_dim, other strides free;
//                                                                           out may alias x
//   cos, sin [positions, rotary / 2 or rotary]    T | f32                   unit stride on the columns, rows any stride;
//                                                                           or one table of angles
//   positions, offsets                            i32 | i64, optional       any strides
// Up to three tensors in one launch: queries, keys, and values, which are copied. All arithmetic is f32, with one rounding.
// Pairs and tables: hk/rope.h. Heads on lanes, access and floor: hk/heads.h. Source: Su et al. 2021, section 3.2.2.
#include <hk/entry.h>
#include <hk/heads.h>

namespace {
using hk::RopeInput;

struct Params {
    hk::Rope rope;
    hk::HeadsParams parts[5];  // rotated and copied columns of queries and of keys; values
};
}  // namespace

// Entry points: dtype of x, kind of table, access.
#define ROPE_ENTRIES(T)                                                                                          \
    HK_ENTRY_WAVES_PER_SM(rope_##T##_shared, hk::kHeadsThreads, 32,                                              \
                          hk::walk_heads<hk::T, hk::kVecLen<hk::T>, RopeInput::Shared>)                          \
    HK_ENTRY(rope_##T##_tables, hk::kHeadsThreads, hk::walk_heads<hk::T, hk::kVecLen<hk::T>, RopeInput::Tables>) \
    HK_ENTRY(rope_##T##_tables_scalar, hk::kHeadsThreads, hk::walk_heads<hk::T, 1, RopeInput::Tables>)           \
    HK_ENTRY(rope_##T##_angles, hk::kHeadsThreads, hk::walk_heads<hk::T, hk::kVecLen<hk::T>, RopeInput::Angles>) \
    HK_ENTRY(rope_##T##_angles_scalar, hk::kHeadsThreads, hk::walk_heads<hk::T, 1, RopeInput::Angles>)

ROPE_ENTRIES(bf16)
ROPE_ENTRIES(f16)
ROPE_ENTRIES(f32)
