// heads.h: per-head kernels: rotate (RoPE) or copy columns of heads. The host's side is
// hk_core::plan::heads.
//   out[b, t, h, c] = in[b, t, h, c], rotated or not, for each part of a launch; all parts have the same tokens
//
// How the work is split
//   A part is a range of columns of the heads of one tensor: the rotated columns of queries, their other columns, those of keys, and
//   values. A block works on one part. A head takes one lane per slot of its columns (rope.h): two vectors of 16 bytes, or two
//   elements. The lanes of a head are a group; a block has as many groups as fit, each with its own token. A group loops over
//   tokens with a fixed chunk of heads, so a token's factors are loaded once for all heads of the chunk, and no lane exchanges
//   data with another. Loads of two heads are in flight, four of 16 bytes per lane.
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

/// A part of a launch; `HeadsParams` of hk-core's Rust, which the build compares field by field.
struct HeadsParams {
    enum Action : u32 {
        kCopies = 0,
        kRotates = 1,
        kLeaves = 2,  ///< in place: only NaN fill
    };

    Global from, to;  // [batches, tokens, heads, columns], unit stride on the columns
    u32 action;
    u32 poisons;  // heads of tokens without a table row are filled with NaN
    u32 blocks;  // of the grid
    u32 groups;  // per block
    u32 lanes;  // per group: a head's slots, at most the block
    u32 chunk;  // heads per chunk, at most
    u32 chunks;  // per token; `blocks` is a multiple of it
    u32 batch_step;  // from a group's token to its next, in batches
    u32 token_step;  // and in tokens, less than a batch has
    u32 inverse_lanes;  // (2^32 - 1) / lanes,
    u32 inverse_chunks;  // of chunks
    u32 inverse_tokens;  // and of the tokens of a batch
};

namespace detail {

// A lane's pointers: the first vector of its slot, and the distance to the second in elements.
template <class T>
struct HeadPointers {
    GlobalPtr<const T> in;
    GlobalPtr<T> out;
    u32 gap;
};

/// Moves heads, two at a time. `prepare` returns the function that rotates the two vectors of a slot, or does nothing; it is called
/// when the first loads are in flight.
template <int N, class T, class Prepare>
HK_FN void move_heads(HeadPointers<T> at, u32 heads, i64 in_stride, i64 out_stride, Prepare prepare) {
    using V = Vec<T, N>;
    using Raw = decltype([] {
        if constexpr (sizeof(V) == kVecBytes)
            return Vec<u32, 4>{};  // dwords: 16-bit elements would take a register each
        else
            return V{};
    }());
    constexpr u32 kMost = 2;
    Raw x[kMost][2];
    const auto load = [&] {
#pragma unroll
        for (u32 i = 0; i < kMost; ++i) {
            const auto first = reinterpret_cast<GlobalPtr<const Raw>>(at.in);
            const auto second = reinterpret_cast<GlobalPtr<const Raw>>(at.in + at.gap);
            if constexpr (kPersistentBlocks || sizeof(Raw) < kVecBytes) {
                if (i >= heads) break;
                x[i][0] = *first;
                x[i][1] = *second;
            } else {  // all loads, the tables' too, are issued before the first wait
                x[i][0] = load_predicated<Raw>(first, i < heads);
                x[i][1] = load_predicated<Raw>(second, i < heads);
            }
            at.in += in_stride;
        }
    };
    load();
    auto rotate = prepare();
    while (true) {
#pragma unroll
        for (u32 i = 0; i < kMost; ++i) {
            if (i >= heads) break;
            if constexpr (sizeof(V) == kVecBytes) {
                for (auto &part : x[i]) {
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        u32 word = part[w];
                        opaque(word);
                        part[w] = word;
                    }
                }
            }
            V v[2] = {__builtin_bit_cast(V, x[i][0]), __builtin_bit_cast(V, x[i][1])};
            rotate(v);
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

/// What a launch rotates by: tables whose entries both vectors of a slot share (`Rope::shared`; half the registers), any tables, or
/// angles.
enum class RopeInput { Shared, Tables, Angles };

/// The kernel: vectorized with N columns of T (16 bytes), or scalar with N = 1. `Params` has an array `parts` of HeadsParams and,
/// if something is rotated, a Rope `rope`.
template <class T, int N, RopeInput kInput, class Params>
HK_FN void walk_heads(const Params &p) {
    constexpr bool kHasRope = requires { p.rope; };
    u32 block = block_x();
    u32 index = 0;
    while (block >= p.parts[index].blocks) block -= p.parts[index++].blocks;
    const HeadsParams &part = p.parts[index];

    const auto [group, lane] = DivMod(thread_x(), part.lanes, part.inverse_lanes);
    if (group >= part.groups) return;
    const auto [walker, chunk] = DivMod(block, part.chunks, part.inverse_chunks);
    const u32 head = chunk * part.chunk;
    const u32 left = part.to.shape[2] - head;
    const u32 heads = left < part.chunk ? left : part.chunk;
    const u32 batches = part.to.shape[0];
    const u32 tokens = part.to.shape[1];
    const bool rotates = kHasRope && part.action == HeadsParams::kRotates;

    const u32 slots = slots_of<N>(part.to.cols());
    for (u32 slot = lane; slot < slots; slot += part.lanes) {
        u32 column = slot * N;
        u32 gap = slots * N;
        if constexpr (kHasRope) {
            if (rotates) {
                column = p.rope.template column<N>(slot, 0);
                gap = p.rope.template column<N>(slot, 1) - column;
            }
        }
        // The last of an odd number of vectors is moved twice.
        if (column + gap >= part.to.cols()) gap = 0;

        auto [batch, token] = DivMod(walker * part.groups + group, tokens, part.inverse_tokens);
        while (batch < batches) {
            const Params &now = reload_params(p);
            const HeadsParams &part = now.parts[index];
            const auto at = [&](const Global &g) {
                const i64 element = batch * g.strides[0] + token * g.strides[1] + head * g.strides[2] + column;
                return reinterpret_cast<GlobalPtr<T>>(g.data) + element;
            };
            const detail::HeadPointers<T> place = {at(part.from), at(part.to), gap};
            const auto move_all = [&](auto prepare) {
                detail::move_heads<N>(place, heads, part.from.strides[2], part.to.strides[2], prepare);
            };
            const auto copy = [] { return [](Vec<T, N>(&)[2]) {}; };
            if constexpr (kHasRope) {
                const u32 row = part.poisons ? now.rope.table_row(batch, token) : 0;
                if (row == Rope::kNoRow) {
                    GlobalPtr<T> out = place.out;
#pragma nounroll
                    for (u32 i = 0; i < heads; ++i, out += part.to.strides[2]) {
                        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(out) = Rope::poison<T, N>();
                        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(out + gap) = Rope::poison<T, N>();
                    }
                } else if (rotates) {
                    const auto rotate_all = [&](auto find) {
                        move_all([&] {
                            return [&now, factors = find()](Vec<T, N>(&x)[2]) { now.rope.rotate(x, factors); };
                        });
                    };
                    if constexpr (kInput == RopeInput::Angles) {
                        rotate_all([&] { return now.rope.template factors_of_angles<T, N>(row, slot); });
                    } else if (kInput == RopeInput::Shared || now.rope.template shared<N>()) {
                        rotate_all([&] { return now.rope.template shared_factors<T, N>(row, slot); });
                    } else {
                        rotate_all([&] { return now.rope.template factors<T, N>(row, slot); });
                    }
                } else if (part.action == HeadsParams::kCopies) {
                    move_all(copy);
                }
            } else {
                move_all(copy);
            }
            if constexpr (!kPersistentBlocks) break;  // one block per iteration
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
