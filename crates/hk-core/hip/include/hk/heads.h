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
    u32 inverse_lanes;   // (2^32 - 1) / lanes,
    u32 inverse_chunks;  // of chunks
    u32 inverse_tokens;  // and of the tokens of a batch
};
static_assert(sizeof(HeadsPart) == 2 * sizeof(Global) + 48, "same layout as hk_core::heads::HeadsPart");

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
            const auto first = reinterpret_cast<GlobalPtr<const Raw>>(at.in);
            const auto second = reinterpret_cast<GlobalPtr<const Raw>>(at.in + at.gap);
            if constexpr (kBlocksStay || sizeof(Raw) < kVecBytes) {
                if (i >= heads) break;
                x[i][0] = *first;
                x[i][1] = *second;
            } else {  // all, and those of tables, before the first of them is waited for
                x[i][0] = load_if<Raw>(first, i < heads);
                x[i][1] = load_if<Raw>(second, i < heads);
            }
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

/// What a launch rotates by: tables of which both vectors of a slot have the same entries (`Rope::shared`), which takes half
/// the registers; any tables; or angles.
enum class Turn { Shared, Tables, Angles };

/// All the work of a launch, by vectors of N columns of T (16 bytes), or by elements, N = 1. `Params` has an array `parts`
/// of HeadsPart, and if something is rotated a Rope `rope`.
template <class T, int N, Turn kTurn, class Params>
HK_FN void walk_heads(const Params &p) {
    constexpr bool kHasRope = requires { p.rope; };
    u32 block = block_x();
    u32 index = 0;
    while (block >= p.parts[index].blocks) block -= p.parts[index++].blocks;
    const HeadsPart &part = p.parts[index];

    const auto [group, lane] = Quotient(thread_x(), part.lanes, part.inverse_lanes);
    if (group >= part.groups) return;
    const auto [walker, chunk] = Quotient(block, part.chunks, part.inverse_chunks);
    const u32 head = chunk * part.chunk;
    const u32 left = part.out.shape[2] - head;
    const u32 heads = left < part.chunk ? left : part.chunk;
    const u32 batches = part.out.shape[0];
    const u32 tokens = part.out.shape[1];
    const bool rotates = kHasRope && part.action == HeadsPart::kRotates;

    const u32 slots = slots_of<N>(part.out.cols());
    for (u32 slot = lane; slot < slots; slot += part.lanes) {
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

        auto [batch, token] = Quotient(walker * part.groups + group, tokens, part.inverse_tokens);
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
#pragma nounroll
                    for (u32 i = 0; i < heads; ++i, out += part.out.strides[2]) {
                        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(out) = Rope::poison<T, N>();
                        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(out + gap) = Rope::poison<T, N>();
                    }
                } else if (rotates) {
                    const auto rotate_all = [&](auto find) {
                        move_all([&] {
                            return [&now, factors = find()](Vec<T, N>(&x)[2]) {
                                now.rope.rotate(x, factors);
                            };
                        });
                    };
                    if constexpr (kTurn == Turn::Angles) {
                        rotate_all([&] { return now.rope.template factors_of_angles<T, N>(row, slot); });
                    } else if (kTurn == Turn::Shared || now.rope.template shared<N>()) {
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
            if constexpr (!kBlocksStay) break;  // there is a block for each turn
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
