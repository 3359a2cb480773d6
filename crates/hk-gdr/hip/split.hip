// split.hip: fused_qkvzba_split: q, k, v, z and b, a of projections that have them by key head
//   qkvz  [T, Hk (2K + 2rV)]  by key head: q (K), k (K), v (r V), z (r V); r = Hv / Hk
//   ba    [T, Hk 2r]          by key head: b (r), a (r)
//   qkv   [T, 2 Hk K + Hv V]  all heads of q, then of k, then of v
//   z     [T, Hv, V]          b, a  [T, Hv]
// Elements of 2 or 4 bytes, all contiguous but for the rows of qkvz and ba, which have any stride. Bit for bit.
// A lane copies 16 bytes (or an element) of qkv or z, or an element of b or a. Floor: twice the bytes of the inputs.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/types.h>

namespace {
using hk::GlobalPtr;
using hk::i64;
using hk::u16;
using hk::u32;
using hk::u64;
using hk::Vec;

struct Params {
    u64 qkvz, ba, qkv, z, b, a;
    i64 qkvz_row, ba_row;  // strides, in pieces and in elements
    u64 pieces;  // of qkv and z together, of all tokens
    u64 gates;  // of b and a together
    u32 k_heads, group;
    u32 k_dim, v_dim;  // in pieces
};

constexpr u32 kThreads = 256;

/// `Piece`: what a lane copies of qkv and z.
template <class Piece, class Element>
HK_FN void split(const Params &p) {
    const u64 task = u64(hk::block_x()) * kThreads + hk::thread_x();
    const u32 v_heads = p.k_heads * p.group;
    const u32 keys = p.k_heads * p.k_dim, values = v_heads * p.v_dim;
    if (task < p.pieces) {
        const u32 row = 2 * keys + 2 * values;
        const u64 t = task / row;
        const u32 i = u32(task - t * row);
        const u32 of_head = 2 * p.k_dim + 2 * p.group * p.v_dim;
        u32 from;
        if (i < 2 * keys) {
            const u32 which = i >= keys;
            const u32 j = i - which * keys;
            from = j / p.k_dim * of_head + which * p.k_dim + j % p.k_dim;
        } else {
            const u32 which = i >= 2 * keys + values;
            const u32 j = i - 2 * keys - which * values;
            const u32 of_group = p.group * p.v_dim;
            from = j / of_group * of_head + 2 * p.k_dim + which * of_group + j % of_group;
        }
        const Piece v = reinterpret_cast<GlobalPtr<const Piece>>(p.qkvz)[i64(t) * p.qkvz_row + from];
        const u32 wide = 2 * keys + values;
        if (i < wide) {
            reinterpret_cast<GlobalPtr<Piece>>(p.qkv)[t * wide + i] = v;
        } else {
            reinterpret_cast<GlobalPtr<Piece>>(p.z)[t * values + i - wide] = v;
        }
    } else if (task - p.pieces < p.gates) {
        const u64 i = task - p.pieces;
        const u64 t = i / (2 * v_heads);
        const u32 j = u32(i - t * 2 * v_heads);
        const u32 which = j >= v_heads, head = j - which * v_heads;
        const u32 from = head / p.group * 2 * p.group + which * p.group + head % p.group;
        const Element v = reinterpret_cast<GlobalPtr<const Element>>(p.ba)[i64(t) * p.ba_row + from];
        reinterpret_cast<GlobalPtr<Element>>(which ? p.a : p.b)[t * v_heads + head] = v;
    }
}
}  // namespace

HK_ENTRY(split_16, kThreads, split<Vec<u32, 4>, u16>)
HK_ENTRY(split_16_scalar, kThreads, split<u16, u16>)
HK_ENTRY(split_32, kThreads, split<Vec<u32, 4>, u32>)
HK_ENTRY(split_32_scalar, kThreads, split<u32, u32>)
