// groups.h: products of codes whose scales change along K after less than 128 columns; see blockscale.h and decoded.h.
//   Sums are scaled after each stage. A stage has columns of one group: a part of it; or all of it, then zeros, where a group has
//   less than the stage (64 columns of bytes, 32 of 16-bit floats). So groups are any power of two. What counts along K (Range,
//   scales) counts a short group as a whole stage; only movers know that it has `>> less` bytes.
#pragma once

#include "blockscale.h"
#include "decoded.h"

namespace gemm {

/// The first bytes of some words, and zeros.
template <int N>
HK_FN Vec<u32, N> first_bytes(Vec<u32, N> words, u32 bytes) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        const u32 left = bytes > 4 * i ? bytes - 4 * i : 0;
        words[i] &= left < 4 ? (1u << 8 * left) - 1u : ~0u;
    }
    return words;
}

/// Brings groups to stages, as `Base` brings stages. By vectors, groups are of whole chunks.
template <class Base, Access kAccess>
class GroupMover : public Base {
    u32 less_;

    /// A group's bytes in a stage.
    HK_FN static u32 bytes(u32 less) { return Base::kStage >> less; }
    HK_FN static u32 real_end(u32 end, u32 less) { return (end / Base::kStage * Base::kStage >> less) + end % Base::kStage; }

public:
    /// As Base's; threads whose place is past the group have no rows.
    template <class Rest>
    HK_FN GroupMover(GlobalPtr<const u8> first, u32 rows, const hk::RowLayout &layout, u32 end, const Rest &rest)
        : Base(first, Base::ahead() < bytes(layout.less) ? rows : 0, layout, real_end(end, layout.less), rest),
          less_(layout.less) {}

    HK_FN auto load(u32 from) const {
        auto chunks = Base::load(from >> less_);
        if constexpr (kAccess == Access::Elements) {
            // What comes after a group belongs to the next one.
            const u32 here = bytes(less_), left = Base::ahead() < here ? here - Base::ahead() : 0;
            if constexpr (requires { chunks.codes; }) {
                chunks.codes = first_bytes(chunks.codes, left);
            } else {
#pragma unroll
                for (int i = 0; i < Base::kParts; ++i) chunks.part[i] = first_bytes(chunks.part[i], left);
            }
        }
        return chunks;
    }
    HK_FN void copy(u32 from, typename Base::Tile &tile) const { Base::copy(from >> less_, tile); }
};

/// Products over the columns of one fragment, whatever is fastest for more of them.
template <class E>
struct FragProduct {
    using Acc = typename hk::Product<E>::Acc;
    static constexpr int kBytes = hk::Product<E>::kBytes, kFrags = 1;

    HK_FN static Acc mma(const Frag *w, const Frag *x, Acc acc) {
        if constexpr (hk::Product<E>::kFrags == 1) {
            return hk::Product<E>::mma(w, x, acc);
        } else {
            static_assert(__is_same(E, hk::Fp8), "the one type whose instructions can be of more columns");
            return hk::mma_fp8({w->hi}, {x->hi}, hk::mma_fp8({w->lo}, {x->lo}, acc));
        }
    }
};

/// As `Tile`, of 64 x 64, for groups of bytes.
template <class E, Access kAccess>
struct GroupTile : Tile<E, kAccess, 64, 64, 2, 2, 5> {
    using Base = Tile<E, kAccess, 64, 64, 2, 2, 5>;
    using Product = FragProduct<E>;
    static constexpr int kStep = 1;
    static constexpr bool kShort = true;
    using X = GroupMover<typename Base::X, kAccess>;
    using W = GroupMover<typename Base::W, kAccess>;
    template <class Words>
    using Pipeline = hk::Pipeline<X, W, Words, 5, kStep>;
};

/// As `DecodedTile`, likewise.
template <class T, class Code, Access kAccess>
struct DecodedGroupTile : DecodedTile<T, Code, kAccess, 64, 64, 2, 2> {
    using Base = DecodedTile<T, Code, kAccess, 64, 64, 2, 2>;
    static constexpr bool kShort = true;
    using X = GroupMover<typename Base::X, kAccess>;
    using W = GroupMover<typename Base::W, kAccess>;
    template <class Words>
    using Pipeline = hk::RegisterPipeline<X, W, Words, Base::kStep>;
};

}  // namespace gemm
