// experts_a16w8.hip: grouped GEMM of experts, 16-bit floats by int8 with scales of rows, or by int4 and int8 with scales and zero
// points of groups of K; see experts_dequant.h.
//   Groups: (q - zero[e, n, g]) scale[e, n, g], q unsigned, rounded to the type of a. int4 has the even column in the low half of a
//   byte, and its zero points the even row.
#include "experts_dequant.h"

#include <hk/mixed_mma.h>

namespace {
using experts::expert_gemm;
using experts::ExpertDequantTile;
using experts::Float;
using experts::Groups;
using experts::Params;
using gemm::TileCoord;
using hk::GlobalPtr;
using hk::i64;
using hk::u16;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// int8, as it is: its scales are the epilogue's.
template <class T>
struct DequantI8 {
    using Q = hk::I8;
    using Out = T;
    struct Extra {};

    HK_FN DequantI8(const Params &, const TileCoord &) {}
    HK_FN Extra load(u32, u32) const { return {}; }
    template <int kWords>
    HK_FN static void decode(Vec<u32, kWords> quants, Extra, Vec<u32, 4> (&floats)[kWords / 2]) {
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) {
            floats[i] = __builtin_bit_cast(
                Vec<u32, 4>, hk::dequantize_bytes<hk::I8, T>(Vec<u32, 2>{quants[2 * i], quants[2 * i + 1]}));
        }
    }
};

/// Unsigned values of kBits with a scale and a zero point for a group. A stage lies in one group.
template <class T, int kBits>
class DequantGroups {
    hk::Window scale_, zero_;
    u32 scale_at_ = hk::Window::kOutOfBounds, zero_at_ = hk::Window::kOutOfBounds;
    u32 zero_shift_ = 0;  // of the row's zero point in its byte
    Groups p_;

  public:
    using Q = hk::I8;
    using Out = T;
    struct Extra {
        float scale, zero;
    };

    HK_FN DequantGroups(const Params &p, const TileCoord &coord)
        : scale_(first(p.groups.scale, i64(coord.matrix) * p.groups.scale_batch * scale_bytes(p.groups)),
                 hk::Window::kOutOfBounds - 1),
          zero_(first(p.groups.zero, i64(coord.matrix) * p.groups.zero_batch), hk::Window::kOutOfBounds - 1),
          p_(p.groups) {}

    HK_FN void of_row(u32 row, u32 rows) {
        if (row >= rows) return;
        scale_at_ = row * p_.scale_row * scale_bytes(p_);
        zero_at_ = (kBits == 4 ? row / 2 : row) * p_.zero_row;
        zero_shift_ = kBits == 4 ? row % 2 * 4 : 0;
    }
    HK_FN Extra load(u32 from, u32 end) const {
        const u32 past = (end - 1u - from) & hk::Window::kOutOfBounds, group = from >> p_.shift;
        Extra extra;
        if (p_.scale_type == Float::F32) {
            extra.scale = __builtin_bit_cast(float, scale_.load<u32>(scale_at_ | past, group * 4));
        } else {
            extra.scale = float(__builtin_bit_cast(T, scale_.load<u16>(scale_at_ | past, group * 2)));
        }
        extra.zero = float(p_.middle);
        if (p_.zero) {
            const u32 zero = zero_.load<u8>(zero_at_ | past, group) >> zero_shift_;
            extra.zero = float(kBits == 4 ? zero & 15u : zero);
        }
        return extra;
    }
    template <int kWords, int kChunks>
    HK_FN static void decode(Vec<u32, kWords> quants, const Extra &extra, Vec<u32, 4> (&floats)[kChunks]) {
        constexpr int kOfChunk = kWords / kChunks;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            Vec<float, 8> v;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 word = quants[c * kOfChunk + i * kBits / 32];
                v[i] = float(word >> i * kBits % 32 & ((1u << kBits) - 1u));
            }
            floats[c] = __builtin_bit_cast(Vec<u32, 4>, hk::narrow<T, 8>((v - extra.zero) * extra.scale));
        }
    }

  private:
    HK_FN static u32 scale_bytes(const Groups &p) { return p.scale_type == Float::F32 ? 4 : 2; }
    HK_FN static GlobalPtr<const u8> first(u64 data, i64 offset) {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + offset;
    }
};

template <class T, class Dequant, int kBits>
using Tile128x128 = ExpertDequantTile<T, Dequant, kBits, 128, 128, 2, 2>;
template <class T, class Dequant, int kBits>
using Tile64x64 = ExpertDequantTile<T, Dequant, kBits, 64, 64, 2, 2>;
}  // namespace

// Entry points of one dtype, as in src/experts/table.rs.
#define TILES(T, name, Dequant, bits)                                                       \
    HK_ENTRY(experts_##T##_##name##_128x128, (Tile128x128<hk::T, Dequant, bits>::kThreads), \
             (expert_gemm<Tile128x128<hk::T, Dequant, bits>>))                              \
    HK_ENTRY(experts_##T##_##name##_64x64, (Tile64x64<hk::T, Dequant, bits>::kThreads),     \
             (expert_gemm<Tile64x64<hk::T, Dequant, bits>>))
using I8Bf16 = DequantI8<hk::bf16>;
using I8F16 = DequantI8<hk::f16>;
using U8Bf16 = DequantGroups<hk::bf16, 8>;
using U8F16 = DequantGroups<hk::f16, 8>;
using U4Bf16 = DequantGroups<hk::bf16, 4>;
using U4F16 = DequantGroups<hk::f16, 4>;

TILES(bf16, wi8, I8Bf16, 8)
TILES(f16, wi8, I8F16, 8)
TILES(bf16, wu8, U8Bf16, 8)
TILES(f16, wu8, U8F16, 8)
TILES(bf16, wu4, U4Bf16, 4)
TILES(f16, wu4, U4F16, 4)
