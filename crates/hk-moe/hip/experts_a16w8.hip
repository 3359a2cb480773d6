// experts_a16w8.hip: grouped GEMM of experts, 16-bit floats by int8 with scales of rows, or by int4 and int8 with scales and zero
// points of groups of K; see experts_dequant.h.
//   Groups: (q - zero[e, n, g]) scale[e, n, g], q unsigned, rounded to the type of a. int4 has the even column in the low half of a
//   byte, and its zero points the even row.
#include "experts_dequant.h"

#include <gemm/operands/block_rows.h>

#include <hk/mixed_mma.h>

namespace {
using experts::expert_decode_gemm;
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

    DequantI8() = default;
    HK_FN DequantI8(const Params &, const TileCoord &) {}
    HK_FN void of_row(u32, u32) {}
    HK_FN Extra load(u32, u32) const { return {}; }
    HK_FN Extra load_lane(u32, u32) const { return {}; }
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

    DequantGroups() = default;
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
    /// Of byte `from` of the row, the same in all lanes.
    HK_FN Extra load(u32 from, u32 end) const { return load_group(0, from >> p_.shift, from, end); }
    /// Of each lane's byte.
    HK_FN Extra load_lane(u32 from, u32 end) const { return load_group(from >> p_.shift, 0, from, end); }
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
    HK_FN Extra load_group(u32 of_lane, u32 uniform, u32 from, u32 end) const {
        const u32 past = (end - 1u - from) & hk::Window::kOutOfBounds;
        Extra extra;
        if (p_.scale_type == Float::F32) {
            const u32 bits = scale_.load<u32>((scale_at_ + of_lane * 4) | past, uniform * 4);
            extra.scale = __builtin_bit_cast(float, bits);
        } else {
            const u16 bits = scale_.load<u16>((scale_at_ + of_lane * 2) | past, uniform * 2);
            extra.scale = float(__builtin_bit_cast(T, bits));
        }
        extra.zero = float(p_.middle);
        if (p_.zero) {
            const u32 zero = zero_.load<u8>((zero_at_ + of_lane) | past, uniform) >> zero_shift_;
            extra.zero = float(kBits == 4 ? zero & 15u : zero);
        }
        return extra;
    }
    HK_FN static u32 scale_bytes(const Groups &p) { return p.scale_type == Float::F32 ? 4 : 2; }
    HK_FN static GlobalPtr<const u8> first(u64 data, i64 offset) {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + offset;
    }
};

/// Decode GEMM's operands: a lane dequantizes 32 columns of each of its rows, which lie in one group.
template <class T, class Dequant, int kBits>
struct DequantOperands {
    using Acc = hk::MmaAcc;
    using RawA = hk::Block<T>;
    using RawW = hk::Block<decltype([] {
        if constexpr (kBits == 4)
            return hk::Fp4();
        else
            return hk::I8();
    }())>;
    static constexpr int kMTiles = 1, kNTiles = 2;
    static constexpr u32 kStepBytes = hk::kMxCols * sizeof(T);

    gemm::BlockRows<RawA, 16, 16, kMTiles, 1, false> a;
    gemm::BlockRows<RawW, kBits, 16, kNTiles, 1, true> w;
    hk::PerRow<Dequant> dequant[kNTiles];
    u32 end;  // of a row of w

    struct Stage {
        hk::PerRow<RawW> w[kNTiles][1];  // first: w comes from HBM, a mostly from L2
        hk::PerRow<RawA> a[kMTiles][1];
        hk::PerRow<typename Dequant::Extra> extra[kNTiles];
    };
    HK_FN Stage load(u32 from) const {
        Stage stage;
        w.load(stage.w, from);
        const u32 at = (from / sizeof(T) + hk::group_of_lane(hk::lane_id()) * 32) * kBits / 8;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) stage.extra[n].row[r] = dequant[n].row[r].load_lane(at, end);
        }
        a.load(stage.a, from);
        return stage;
    }

    HK_FN static void multiply(Acc (&acc)[kMTiles][kNTiles], const Stage &stage) {
        const auto of_a = hk::per_row([&](u32 r) { return hk::Float16Block<T>::of(stage.a[0][0].row[r]); });
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
            const auto of_w =
                hk::per_row([&](u32 r) { return dequantized(stage.w[n][0].row[r], stage.extra[n].row[r]); });
            acc[0][n] = mma(of_w, of_a, acc[0][n]);
        }
    }

  private:
    HK_FN static hk::Float16Block<T> dequantized(const RawW &raw, const typename Dequant::Extra &extra) {
        Vec<u32, kBits> quants;
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const u32 word = raw.chunk[i / 4][i % 4];
            quants[i] = word;
        }
        Vec<u32, 4> floats[4];
        Dequant::decode(quants, extra, floats);
        hk::Float16Block<T> block;
#pragma unroll
        for (int i = 0; i < 4; ++i) block.part[i] = __builtin_bit_cast(Vec<T, 8>, floats[i]);
        return block;
    }
};

template <class T, class Dequant, int kBits>
HK_FN void dequant_decode_gemm(const Params &args) {
    using Operands = DequantOperands<T, Dequant, kBits>;
    expert_decode_gemm<Operands, gemm::kDecodeWaves>(
        args, [](const Params &p, const TileCoord &coord, u32 end, auto source, auto row_of_w) {
            Operands operands{{p.a.at(coord.batch, 0), p.a, 0, end, source},
                              {p.w.at(coord.matrix, 0), p.w, 0, end, row_of_w},
                              {},
                              end / 16 * kBits};
#pragma unroll
            for (u32 n = 0; n < Operands::kNTiles; ++n) {
                operands.dequant[n] = hk::per_row([&](u32 r) {
                    Dequant of(p, coord);
                    of.of_row(row_of_w(16 * n + hk::row_of_lane(hk::lane_id(), r)), p.w.rows);
                    return of;
                });
            }
            return operands;
        });
}

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
             (expert_gemm<Tile64x64<hk::T, Dequant, bits>>))                                \
    HK_ENTRY(experts_##T##_##name##_16x32, (gemm::kDecodeWaves * hk::kWaveSize),            \
             (dequant_decode_gemm<hk::T, Dequant, bits>))
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
