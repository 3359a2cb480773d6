// route.h: parameters of the routing kernels.
#pragma once

#include <hk/global.h>
#include <hk/types.h>

namespace route {

using hk::i32;
using hk::u16;
using hk::u32;
using hk::u64;

/// Experts at most.
constexpr u32 kExperts = 1024;
/// Experts of a token at most.
constexpr u32 kChoices = 32;

/// What scores and weights are, the same numbers as `Score` in src/topk.rs.
enum Score : u32 { kLogits = 0, kSoftmaxChosen = 1, kSoftmax = 2, kSigmoid = 3, kSqrtSoftplus = 4 };

/// Bits of `Params::flags`.
enum Flag : u32 {
    kRenormalize = 1,
    kWeightsF32 = 2,  // rather than as the logits
    kLowTies = 4,  // equals: the lower expert is preferred
    kByPreference = 8,  // slots of a token in descending order rather than by expert
    kVectorized = 16,  // 16-byte loads
    kPadded = 32,  // lists are padded to whole tiles (family A)
};

/// A gate is a pair of a token and one of its experts: gate g is of token g / k.
struct Params {
    hk::Global x;  // [tokens, experts] T
    u64 bias;  // [experts] f32, or 0
    u64 weights;  // [tokens, k] T | f32
    u64 ids;  // [tokens, k] i32
    u64 bitmatrix;  // [words, tokens rounded up to 32] u32, or 0
    u64 expert_map;  // [experts] i32, or 0
    u64 sorted;  // [sorted_len] i32: gates by expert
    u64 places;  // [gates] i32: place of a gate in `sorted`, or 0
    u64 sorted_weights;  // [gates] as weights, or 0
    u64 tile_map;  // [tile_map_len] i32
    u64 padded_len;  // [1] i32, or 0
    u64 counts;  // [experts] i32: gates of an expert
    u64 offsets;  // [experts + 1] i32: their exclusive sums
    u64 tile_offsets;  // [experts + 1] i32: exclusive sums of their tiles
    u64 partials;  // [chunks, experts] i32: gates of an expert in a chunk, then in the chunks before it; or 0
    float scaling;
    u32 tokens, k, experts;
    u32 score, flags;
    u32 groups, kept_groups, group_size;  // of experts; groups = 0: none
    u32 gates;
    u32 chunk, chunks;  // gates of a chunk
    u32 tile_log2;  // gates of a tile
    u32 sorted_len, tile_map_len;
    u32 pad;
};

template <class T>
HK_FN hk::GlobalPtr<T> at(u64 address) {
    return reinterpret_cast<hk::GlobalPtr<T>>(address);
}

}  // namespace route
