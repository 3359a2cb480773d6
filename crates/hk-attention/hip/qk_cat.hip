// qk_cat.hip: q_out[t, h, :] = (q1[t, h, :], q2[t, h, :]), and the same for keys
//   q1, k1        [tokens, heads, cols1]          any type of 1, 2 or 4 bytes, copied bit by bit; unit stride on the
//   q2, k2        [tokens, heads, cols2]          columns, other strides free; inputs may be broadcast
//   q_out, k_out  [tokens, heads, cols1 + cols2]
// Heads on lanes, access and floor: hk/heads.h.
#include <hk/entry.h>
#include <hk/heads.h>

namespace {
struct Params {
    hk::HeadsParams parts[4];  // q1, q2, k1, k2
};
}  // namespace

// Entry points: bits of an element, access.
#define QK_CAT_ENTRIES(bits)                                                               \
    HK_ENTRY(qk_cat_##bits, hk::kHeadsThreads,                                             \
             hk::walk_heads<hk::u##bits, hk::kVecLen<hk::u##bits>, hk::RopeInput::Tables>) \
    HK_ENTRY(qk_cat_##bits##_scalar, hk::kHeadsThreads, hk::walk_heads<hk::u##bits, 1, hk::RopeInput::Tables>)

QK_CAT_ENTRIES(8)
QK_CAT_ENTRIES(16)
QK_CAT_ENTRIES(32)
