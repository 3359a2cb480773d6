// i8_fp8_group.h: int8 and fp8 whose scales change along K after fewer than 128 columns (any power of two).
//   Accumulators are rescaled after each stage. A stage has columns of one group: a part of it, or all of it, then zeros, if the
//   group is shorter than a stage (64 bytes of int8 and fp8, 32 columns of 16-bit floats). KRange and the scales count a short group
//   as a whole stage; only movers know that it has `kStageBytes >> stage_shift` bytes.
#pragma once

#include <gemm/operands/i8_fp8.h>

namespace gemm {
/// The first `bytes` bytes; the others become zero.
template <int N>
HK_FN Vec<u32, N> keep_first_bytes(Vec<u32, N> scales, u32 bytes) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        const u32 left = bytes > 4 * i ? bytes - 4 * i : 0;
        scales[i] &= left < 4 ? (1u << 8 * left) - 1u : ~0u;
    }
    return scales;
}

/// Loads groups to stages, as `Base` loads stages. On the vectorized path groups are whole 16-byte chunks.
template <class Base, Access kAccess>
class GroupMover : public Base {
    u32 stage_shift_;

    /// Bytes of a group in a stage.
    HK_FN static u32 bytes(u32 stage_shift) { return Base::kStageBytes >> stage_shift; }
    HK_FN static u32 real_end(u32 end, u32 stage_shift) {
        return (end / Base::kStageBytes * Base::kStageBytes >> stage_shift) + end % Base::kStageBytes;
    }

  public:
    /// Arguments as Base's. Threads whose chunk lies past the group load nothing.
    template <class Rest>
    HK_FN GroupMover(GlobalPtr<const u8> first, u32 rows, const hk::RowLayout &layout, u32 end, const Rest &rest)
        : Base(first, Base::lane_byte() < bytes(layout.stage_shift) ? rows : 0, layout,
               real_end(end, layout.stage_shift), rest),
          stage_shift_(layout.stage_shift) {}

    HK_FN auto load(u32 from) const {
        auto chunks = Base::load(from >> stage_shift_);
        if constexpr (kAccess == Access::Scalar) {
            // Bytes past the group belong to the next one.
            const u32 here = bytes(stage_shift_), left = Base::lane_byte() < here ? here - Base::lane_byte() : 0;
            if constexpr (requires { chunks.quants; }) {
                chunks.quants = keep_first_bytes(chunks.quants, left);
            } else {
#pragma unroll
                for (int i = 0; i < Base::kParts; ++i) chunks.part[i] = keep_first_bytes(chunks.part[i], left);
            }
        }
        return chunks;
    }
    HK_FN void copy(u32 from, typename Base::Tile &tile) const { Base::copy(from >> stage_shift_, tile); }
};

/// MFMA over the columns of one fragment, even where the fastest instruction spans more.
template <class E>
struct SingleFragMma {
    using Acc = typename hk::FragMma<E>::Acc;
    static constexpr int kBytes = hk::FragMma<E>::kBytes, kFrags = 1, kDim = 16;

    HK_FN static Acc mma(const Frag *w, const Frag *a, Acc acc) {
        if constexpr (hk::FragMma<E>::kFrags == 1) {
            return hk::FragMma<E>::mma(w, a, acc);
        } else {
            static_assert(__is_same(E, hk::Fp8), "the one type whose instructions can be of more columns");
            return hk::mma_fp8({w->hi}, {a->hi}, hk::mma_fp8({w->lo}, {a->lo}, acc));
        }
    }
};

/// A block tile of 64 x 64 as `Tile` in gemm/gemm.h, for int8 and fp8.
template <class E, Access kAccess>
struct GroupTile : Tile<E, kAccess, 64, 64, 2, 2, 5, 1, false> {
    using Base = Tile<E, kAccess, 64, 64, 2, 2, 5, 1, false>;
    using Mma = SingleFragMma<E>;
    static constexpr int kStep = 1;
    static constexpr bool kShort = true;
    using A = GroupMover<typename Base::A, kAccess>;
    using W = GroupMover<typename Base::W, kAccess>;
    template <class Scales>
    using Pipeline = hk::Pipeline<A, W, Scales, 5, kStep>;
};

/// A block tile of 64 x 64 as `DequantTile` in gemm/operands/dequant.h.
template <class T, class Q, Access kAccess>
struct DequantGroupTile : DequantBytesTile<T, Q, kAccess, 64, 64, 2, 2> {
    using Base = DequantBytesTile<T, Q, kAccess, 64, 64, 2, 2>;
    static constexpr bool kShort = true;
    using A = GroupMover<typename Base::A, kAccess>;
    using W = GroupMover<typename Base::W, kAccess>;
    template <class Scales>
    using Pipeline = hk::RegisterPipeline<A, W, Scales, Base::kStep>;
};

}  // namespace gemm
