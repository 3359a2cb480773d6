// qk_rope_cat.hip: q_out[t, h, :] = (q_nope[t, h, :], rotation of q_pe[t, h, :]), the same of keys
//   q_nope, k_nope  [tokens, heads, cols]           T = bf16 | f16 | f32   unit stride on the columns, other strides free,
//   q_pe, k_pe      [tokens, heads, rotary]         T                      of inputs also 0
//   q_out, k_out    [tokens, heads, cols + rotary]  T
//   cos, sin        [positions, rotary / 2 or rotary]  T | f32             unit stride on the columns, rows any stride
//   positions, offsets                              i32 | i64, optional    any stride
// Columns without position are copied bit by bit; the others are rotated in f32, with one rounding. Pairs and tables:
// hk/rope.h. Heads on lanes, access and floor: hk/heads.h. Source: Su et al. 2021, section 3.2.2.
#include <hk/entry.h>
#include <hk/heads.h>

namespace {
struct Params {  // same fields, same order as `RopeCatParams` in src/qk_concat.rs
    hk::Rope rope;
    hk::HeadsPart parts[4];  // q_nope, q_pe, k_nope, k_pe
};
}  // namespace

// One per dtype, and if it goes by elements.
#define QK_ROPE_CAT_ENTRIES(T)                                                                          \
    HK_ENTRY_FOR_WAVES(qk_rope_cat_##T, hk::kHeadsThreads, 24, hk::walk_heads<hk::T, hk::kVecLen<hk::T>, hk::Turn::Tables>) \
    HK_ENTRY(qk_rope_cat_##T##_elements, hk::kHeadsThreads, hk::walk_heads<hk::T, 1, hk::Turn::Tables>)

QK_ROPE_CAT_ENTRIES(bf16)
QK_ROPE_CAT_ENTRIES(f16)
QK_ROPE_CAT_ENTRIES(f32)
