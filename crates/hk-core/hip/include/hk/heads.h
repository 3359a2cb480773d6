// heads.h: kernels that work head by head: rotate columns of heads, copy columns of heads. The host's side is
// hk_core::heads.
//   out[b, t, h, c] = in[b, t, h, c], rotated or not, for each part of a launch; all tokens are the same for all parts
//
// How the work is split
//   A part is a range of columns of the heads of one tensor: what is rotated of queries, what is not, the same of keys,
//   values. A block works on one part. A head takes a lane for each slot of its columns (rope.h): two vectors of 16 bytes,
//   or two elements. As many lanes as there are slots are a group, and a block has as many groups as it has room for, each
//   with a token of its own. It keeps one chunk of the tokens' heads and walks over tokens. So everything but tokens and
//   columns is the same for all lanes, a token's factors are found once for all heads of the chunk, and no lane talks to
//   another. Loads of two heads are in flight at a time, four of 16 bytes a lane.
// Floor
//   Memory: every column is read and written once; tables are expected in cache. In VALU instructions a slot of 2 x 8
//   columns of bf16 takes 16 to widen, 16 to multiply and add, and to round 8 on gfx950 and 72 on gfx942; at 6 TB/s over
//   304 CUs of 2.1 GHz the 4 KiB that a wave moves for it take a CU 436 clocks, of which it issues one instruction each.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/rope.h>
#include <hk/types.h>

namespace hk {

/// Threads of a block of `walk_heads`.
inline constexpr int kHeadsThreads = 256;

/// A part of a launch; the same layout as `hk_core::heads::HeadsPart`.
struct HeadsPart {
    enum Action : u32 {
        kCopies = 0,
        kRotates = 1,
        kLeaves = 2,  ///< in place: there is nothing to do but to poison
    };

    Global in, out;    // [batches, tokens, heads, columns], unit stride on the columns
    u32 action;
    u32 poisons;       // heads of tokens without a table row are filled with NaN
    u32 blocks;        // of the grid
    u32 groups;        // of a block
    u32 lanes;         // of a group: a head's slots, but no more than a block has
    u32 chunk;         // heads of a chunk, at most
    u32 chunks;        // of a token's heads; `blocks` is a multiple of it
    u32 batch_step;    // from a group's token to its next, in batches
    u32 token_step;    // and in tokens, less than a batch has
    u32 pad;
};
static_assert(sizeof(HeadsPart) == 2 * sizeof(Global) + 40, "same layout as hk_core::heads::HeadsPart");

namespace detail {

// A lane's place: the first vector of its slot, and how many elements behind it the second is.
template <class T>
struct HeadsPlace {
    GlobalPtr<const T> in;
    GlobalPtr<T> out;
    u32 gap;
};

/// Moves heads, two at a time. What `prepare` returns rotates the two vectors of a slot, or does nothing; it is called
/// when the first heads have been asked for.
template <int N, class T, class Prepare>
HK_FN void move_heads(HeadsPlace<T> at, u32 heads, i64 in_stride, i64 out_stride, Prepare prepare) {
    using V = Vec<T, N>;
    using Raw = decltype([] {
        if constexpr (sizeof(V) == kVecBytes) return Vec<u32, 4>{};  // words, whose halves do not take registers of their own
        else return V{};
    }());
    constexpr u32 kMost = 2;
    Raw x[kMost][2];
    const auto load = [&] {
#pragma unroll
        for (u32 i = 0; i < kMost; ++i) {
            if (i >= heads) break;
            x[i][0] = *reinterpret_cast<GlobalPtr<const Raw>>(at.in);
            x[i][1] = *reinterpret_cast<GlobalPtr<const Raw>>(at.in + at.gap);
            at.in += in_stride;
        }
    };
    load();
    auto turn = prepare();
    while (true) {
#pragma unroll
        for (u32 i = 0; i < kMost; ++i) {
            if (i >= heads) break;
            if constexpr (sizeof(V) == kVecBytes) {
                for (auto &part : x[i]) {
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        u32 word = part[w];
                        forget(word);
                        part[w] = word;
                    }
                }
            }
            V v[2] = {__builtin_bit_cast(V, x[i][0]), __builtin_bit_cast(V, x[i][1])};
            turn(v);
            *reinterpret_cast<GlobalPtr<V>>(at.out) = v[0];
            *reinterpret_cast<GlobalPtr<V>>(at.out + at.gap) = v[1];
            at.out += out_stride;
        }
        if (heads <= kMost) break;
        heads -= kMost;
        load();
    }
}

}  // namespace detail

/// All the work of a launch, by vectors of N columns of T (16 bytes), or by elements, N = 1. `Params` has an array `parts`
/// of HeadsPart, and if something is rotated a Rope `rope`, whose tables are angles if kAngles.
template <class T, int N, bool kAngles, class Params>
HK_FN void walk_heads(const Params &p) {
    constexpr bool kHasRope = requires { p.rope; };
    u32 block = block_x();
    u32 index = 0;
    while (block >= p.parts[index].blocks) block -= p.parts[index++].blocks;
    const HeadsPart &part = p.parts[index];

    const u32 group = thread_x() / part.lanes;
    if (group >= part.groups) return;
    const u32 walker = block / part.chunks;
    const u32 head = (block - walker * part.chunks) * part.chunk;
    const u32 left = part.out.shape[2] - head;
    const u32 heads = left < part.chunk ? left : part.chunk;
    const u32 batches = part.out.shape[0];
    const u32 tokens = part.out.shape[1];
    const bool rotates = kHasRope && part.action == HeadsPart::kRotates;

    const u32 slots = slots_of<N>(part.out.cols());
    for (u32 slot = thread_x() - group * part.lanes; slot < slots; slot += part.lanes) {
        u32 column = slot * N;
        u32 gap = slots * N;
        if constexpr (kHasRope) {
            if (rotates) {
                column = p.rope.template column<N>(slot, 0);
                gap = p.rope.template column<N>(slot, 1) - column;
            }
        }
        // The last of an odd number of vectors is alone, and moved twice.
        if (column + gap >= part.out.cols()) gap = 0;

        const u32 first = walker * part.groups + group;
        u32 batch = first / tokens;
        u32 token = first - batch * tokens;
        while (batch < batches) {
            const Params &now = read_anew(p);
            const HeadsPart &part = now.parts[index];
            const auto at = [&](const Global &g) {
                const i64 element = batch * g.strides[0] + token * g.strides[1] + head * g.strides[2] + column;
                return reinterpret_cast<GlobalPtr<T>>(g.data) + element;
            };
            const detail::HeadsPlace<T> place = {at(part.in), at(part.out), gap};
            const auto move_all = [&](auto prepare) {
                detail::move_heads<N>(place, heads, part.in.strides[2], part.out.strides[2], prepare);
            };
            const auto copy = [] { return [](Vec<T, N>(&)[2]) {}; };
            if constexpr (kHasRope) {
                const u32 row = part.poisons ? now.rope.table_row(batch, token) : 0;
                if (row == Rope::kNoRow) {
                    GlobalPtr<T> out = place.out;
                    for (u32 i = 0; i < heads; ++i, out += part.out.strides[2]) {
                        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(out) = Rope::poison<T, N>();
                        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(out + gap) = Rope::poison<T, N>();
                    }
                } else if (rotates) {
                    const auto rotate_all = [&](auto find) {
                        move_all([&] {
                            return [&now, factors = find()](Vec<T, N>(&x)[2]) {
                                Vec<float, N> wide[2] = {widen<T, N>(x[0]), widen<T, N>(x[1])};
                                now.rope.rotate(wide, factors);
                                x[0] = narrow<T, N>(wide[0]);
                                x[1] = narrow<T, N>(wide[1]);
                            };
                        });
                    };
                    if constexpr (kAngles) {
                        rotate_all([&] { return now.rope.template factors_of_angles<T, N>(row, slot); });
                    } else if (now.rope.template shared<N>()) {  // half the registers
                        rotate_all([&] { return now.rope.template shared_factors<T, N>(row, slot); });
                    } else {
                        rotate_all([&] { return now.rope.template factors<T, N>(row, slot); });
                    }
                } else if (part.action == HeadsPart::kCopies) {
                    move_all(copy);
                }
            } else {
                move_all(copy);
            }
            token += part.token_step;
            batch += part.batch_step;
            if (token >= tokens) {
                token -= tokens;
                ++batch;
            }
        }
    }
}

}  // namespace hk
