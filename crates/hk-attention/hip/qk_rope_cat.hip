// qk_rope_cat.hip: q_out[t, h, :] = (q_nope[t, h, :], rope(q_pe[t, h, :])), and the same for keys
//   q_nope, k_nope  [tokens, heads, cols]           T = bf16 | f16 | f32   unit stride on the columns, other strides free;
//   q_pe, k_pe      [tokens, heads, rotary]         T                      inputs may be broadcast
//   q_out, k_out    [tokens, heads, cols + rotary]  T
//   cos, sin        [positions, rotary / 2 or rotary]  T | f32             unit stride on the columns, rows any stride
//   positions, offsets                              i32 | i64, optional    any stride
// The columns of q_nope and k_nope are copied bit by bit; the others are rotated in f32, with one rounding. Pairs and tables:
// hk/rope.h. Heads on lanes, access and floor: hk/heads.h. Source: Su et al. 2021, section 3.2.2.
#include <hk/entry.h>
#include <hk/heads.h>

namespace {
struct Params {
    hk::Rope rope;
    hk::HeadsParams parts[4];  // q_nope, q_pe, k_nope, k_pe
};
}  // namespace

// Entry points: dtype, access.
#define QK_ROPE_CAT_ENTRIES(T)                                                              \
    HK_ENTRY_WAVES_PER_SM(qk_rope_cat_##T, hk::kHeadsThreads, 24,                           \
                          hk::walk_heads<hk::T, hk::kVecLen<hk::T>, hk::RopeInput::Tables>) \
    HK_ENTRY(qk_rope_cat_##T##_scalar, hk::kHeadsThreads, hk::walk_heads<hk::T, 1, hk::RopeInput::Tables>)

QK_ROPE_CAT_ENTRIES(bf16)
QK_ROPE_CAT_ENTRIES(f16)
QK_ROPE_CAT_ENTRIES(f32)
