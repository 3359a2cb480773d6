// qk_cat.hip: q_out[t, h, :] = (q1[t, h, :], q2[t, h, :]), the same of keys
//   q1, k1        [tokens, heads, cols1]          any type of 1, 2 or 4 bytes, of which the bits are copied; unit stride on
//   q2, k2        [tokens, heads, cols2]          the columns, other strides free, of inputs also 0
//   q_out, k_out  [tokens, heads, cols1 + cols2]
// Heads on lanes, access and floor: hk/heads.h.
#include <hk/entry.h>
#include <hk/heads.h>

namespace {
struct Params {  // same fields, same order as `CatParams` in src/qk_concat.rs
    hk::HeadsPart parts[4];  // q1, q2, k1, k2
};
}  // namespace

// One per size of elements, and if it goes by elements.
#define QK_CAT_ENTRIES(bits)                                                                                \
    HK_ENTRY(qk_cat_##bits, hk::kHeadsThreads, hk::walk_heads<hk::u##bits, hk::kVecLen<hk::u##bits>, hk::Turn::Tables>) \
    HK_ENTRY(qk_cat_##bits##_elements, hk::kHeadsThreads, hk::walk_heads<hk::u##bits, 1, hk::Turn::Tables>)

QK_CAT_ENTRIES(8)
QK_CAT_ENTRIES(16)
QK_CAT_ENTRIES(32)
