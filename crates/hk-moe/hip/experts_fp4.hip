// experts_fp4.hip: grouped GEMM of experts by mxfp4: of mxfp4, of fp8 with and without e8m0 scales, of 16-bit floats; and of mxfp8 by
// itself. See experts.h, gemm/operands/mxfp4.h, gemm/operands/mxfp8.h.
#include "experts_dequant.h"

#include <hk/mixed_mma.h>

namespace hk {
/// fp8 with an e8m0 scale for 32 columns, to be multiplied by mxfp4.
struct MxFp8Block {
    Fp8Block quants;
    u32 scale;

    HK_FN static MxFp8Block of(Fp8Block block, u32 scale) {
        if constexpr (!kHasMxMma) {
            // The values are bf16 there, which has the exponents of the scale.
            const float factor = e8m0_value(scale);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                auto &part = reinterpret_cast<Vec<bf16, 8> *>(&block)[i];
                part = narrow<bf16, 8>(widen<bf16, 8>(part) * factor);
            }
        }
        return {block, scale};
    }
};

HK_FN MmaAcc mma(const PerRow<MxBlock> &w, const PerRow<MxFp8Block> &a, MmaAcc acc) {
    if constexpr (kHasMxMma) {
#if defined(HK_MX_MMA)
        const auto &quants = a.row[0].quants.quants;
        const auto all = __builtin_shufflevector(quants[0], quants[1], 0, 1, 2, 3, 4, 5, 6, 7);
        return MmaInstruction<Fp4, Fp8, 16, kMxCols>::mma<0, 0>(w.row[0].codes, all, acc, w.row[0].scale,
                                                                a.row[0].scale);
#endif
    }
    return mma(w, per_row([&](u32 r) { return a.row[r].quants; }), acc);
}

}  // namespace hk

// After it: gemm::MxAcc finds `mma` of such blocks.
#include <gemm/operands/mxfp4.h>
#include <gemm/operands/mxfp8.h>

namespace experts {
/// fp8 fragments with their scales, as gemm::MxFrag.
struct MxFp8Frag : gemm::MxFrag<hk::Fp8> {
    using Block = hk::MxFp8Block;
    static constexpr bool kHasScales = true;

    template <class Tile>
    HK_FN static hk::PerRow<Block> load(const Tile &tile, u32 row, u32 k, const hk::PerRow<u32> &scale) {
        const auto quants = gemm::MxFrag<hk::Fp8>::load(tile, row, k, scale);
        return hk::per_row([&](u32 i) { return Block::of(quants.row[i], scale.row[i]); });
    }
};

/// A tile of fp8 with e8m0 scales.
template <int kM, int kN, int kWavesM, int kWavesN>
struct MxFp8ByFp4Tile : gemm::MxTile<hk::Fp8, hk::Access::Vectorized, kM, kN, kWavesM, kWavesN, 5, false> {
    using Operand = MxFp8Frag;
    static constexpr int kARows = kM;
};

/// For decode GEMM, as gemm::Fp8ByFp4.
struct MxFp8ByFp4 : gemm::Fp8ByFp4 {
    using BlockA = hk::MxFp8Block;
    static constexpr bool kAScales = true;

    HK_FN static BlockA a(const RawA &raw, u32 scale, const auto &) { return BlockA::of(hk::Fp8Block::of(raw), scale); }
};
}  // namespace experts

namespace {
using experts::expert_decode_gemm;
using experts::expert_gemm;
using experts::ExpertDequantTile;
using experts::Params;
using gemm::MxTile;
using gemm::TileCoord;
using hk::Access;
using hk::Fp4;
using hk::Fp8;
using hk::u32;
using hk::u8;
using hk::Vec;

template <class T, template <class> class Accum = gemm::MxAcc>
HK_FN void mx_gemm(const Params &args) {
    expert_gemm<T, Accum>(args, [](const Params &p, const TileCoord &coord, u32 end, auto source, auto row_of_w) {
        if constexpr (T::kPackedScales) {
            return gemm::MxScales<T>(end, [&](u32 row, bool of_w) {
                const u32 offset = of_w ? p.w_mx.offset(row_of_w(row), p.w.rows) : p.a_mx.offset(source(row), p.a.rows);
                const auto first = of_w ? p.w_mx.first(coord.matrix) : p.a_mx.first(coord.batch);
                return hk::ScalePlace{reinterpret_cast<hk::u64>(first), offset, 4,
                                      u32(__builtin_ctz(T::Operand::kBytes))};
            });
        } else {
            // A choice between two parts of `p` would move it to scratch memory.
            return gemm::MxScales<T>(hk::reload_params(p), coord, end, source, row_of_w);
        }
    });
}

template <class Kind, int kMTiles, int kNTiles, int kCount>
HK_FN void mx_decode_gemm(const Params &args) {
    using Operands = gemm::MxOperands<Kind, kMTiles, kNTiles, kCount, Params>;
    expert_decode_gemm<Operands, gemm::kDecodeWaves>(
        args, [](const Params &p, const TileCoord &coord, u32 end, auto source, auto row_of_w) {
            const auto scales = [&]<class Scales>(Scales *, const gemm::MxScale &s, u32 index, u32 rows, auto row_of) {
                if constexpr (__is_same(Scales, gemm::NoScaleRows))
                    return Scales{};
                else
                    return Scales(s, index, 0, rows, end, row_of);
            };
            return Operands{p,
                            {p.a.at(coord.batch, 0), p.a, 0, end, source},
                            {p.w.at(coord.matrix, 0), p.w, 0, end, row_of_w},
                            scales(typename Operands::template Scales<Kind::kAScales, kMTiles>(), p.a_mx, coord.batch,
                                   p.a.rows, source),
                            scales(typename Operands::template Scales<Kind::kWScales, kNTiles>(), p.w_mx, coord.matrix,
                                   p.w.rows, row_of_w)};
        });
}

/// Dequantizes fp4 with the scales of 32 columns to bf16, as gemm::DequantFp4.
class DequantFp4 {
    hk::Window scales_;
    gemm::MxScale scale_;
    u32 offset_ = 0;

  public:
    using Q = Fp4;
    using Out = hk::bf16;
    using Extra = u32;

    HK_FN DequantFp4(const Params &p, const TileCoord &coord)
        : scales_(p.w_mx.first(coord.matrix), hk::Window::kOutOfBounds - 1), scale_(p.w_mx) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            // As the shift in DequantRows.
            hk::opaque(scale_.block[i]);
            scale_.block[i] = hk::uniform(scale_.block[i]);
        }
    }

    HK_FN void of_row(u32 row, u32 rows) { offset_ = scale_.offset(row, rows); }
    HK_FN Extra load(u32 from, u32 end) const {
        constexpr u32 kBlock = 16;  // bytes
        const u32 past = (end - 1u - from) & hk::Window::kOutOfBounds;
        return scales_.load<u8>(offset_ | past, gemm::MxScale::of_block(from / kBlock, scale_.block));
    }
    template <int kChunks>
    HK_FN static void decode(Vec<u32, kChunks> quants, Extra scale, Vec<u32, 4> (&floats)[kChunks]) {
        Vec<hk::bf16, 8> values[kChunks];
        hk::dequantize_fp4_scaled<kChunks>(quants, scale, values);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) floats[i] = __builtin_bit_cast(Vec<u32, 4>, values[i]);
    }
};

template <class T>
HK_FN void dequant_gemm(const Params &args) {
    expert_gemm<T, gemm::DequantFp4Acc>(args, experts::MakeNoScales{});
}

template <bool kPackedScales>
using Fp4Large = MxTile<Fp4, Access::Vectorized, 128, 256, 2, 4, 5, kPackedScales>;
using Fp4Small = MxTile<Fp4, Access::Vectorized, 64, 64, 2, 2, 5, false>;
template <bool kPackedScales>
using Fp8Large = MxTile<Fp8, Access::Vectorized, 128, 128, 2, 4, 5, kPackedScales>;
using Fp8Small = MxTile<Fp8, Access::Vectorized, 64, 64, 2, 2, 5, false>;
template <bool kPackedScales>
using Fp8ByFp8Large = gemm::MxFp8Tile<Access::Vectorized, 128, 256, 2, 4, kPackedScales>;
using Fp8ByFp8Small = gemm::MxFp8Tile<Access::Vectorized, 64, 64, 2, 2, false>;
using MxFp8Large = experts::MxFp8ByFp4Tile<128, 128, 2, 4>;
using MxFp8Small = experts::MxFp8ByFp4Tile<64, 64, 2, 2>;
template <class T>
using Tile128x128 = ExpertDequantTile<T, DequantFp4, 4, 128, 128, 2, 2>;
template <class T>
using Tile64x64 = ExpertDequantTile<T, DequantFp4, 4, 64, 64, 2, 2>;
}  // namespace

// Entry points, as in src/experts/table.rs. `_packed`: the scales of 128 columns are 32-bit loads.
#define MX_TILE(name, ...) HK_ENTRY(name, (__VA_ARGS__::kThreads), (mx_gemm<__VA_ARGS__>))
#define MX_DECODE(name, Kind, count) \
    HK_ENTRY(name, gemm::kDecodeWaves *hk::kWaveSize, (mx_decode_gemm<Kind, 1, 2, count>))

MX_TILE(experts_fp4_wfp4_128x256_packed, Fp4Large<true>)
MX_TILE(experts_fp4_wfp4_128x256, Fp4Large<false>)
MX_TILE(experts_fp4_wfp4_64x64, Fp4Small)
MX_DECODE(experts_fp4_wfp4_16x32, gemm::Fp4ByFp4, 2 / hk::kRowsPerLane)
MX_TILE(experts_fp8_wfp4_128x128_packed, Fp8Large<true>)
MX_TILE(experts_fp8_wfp4_128x128, Fp8Large<false>)
MX_TILE(experts_fp8_wfp4_64x64, Fp8Small)
MX_DECODE(experts_fp8_wfp4_16x32, gemm::Fp8ByFp4, 2 / hk::kRowsPerLane)
MX_TILE(experts_mxfp8_wfp4_128x128, MxFp8Large)
MX_TILE(experts_mxfp8_wfp4_64x64, MxFp8Small)
MX_DECODE(experts_mxfp8_wfp4_16x32, experts::MxFp8ByFp4, 2 / hk::kRowsPerLane)

#define MXFP8_TILE(name, ...) HK_ENTRY(name, (__VA_ARGS__::kThreads), (mx_gemm<__VA_ARGS__, gemm::MxFp8Acc>))

MXFP8_TILE(experts_mxfp8_128x256_packed, Fp8ByFp8Large<true>)
MXFP8_TILE(experts_mxfp8_128x256, Fp8ByFp8Large<false>)
MXFP8_TILE(experts_mxfp8_64x64, Fp8ByFp8Small)
MX_DECODE(experts_mxfp8_16x32, gemm::MxFp8ByMxFp8, 2 / hk::kRowsPerLane)

#define A16WFP4(T)                                                                                       \
    HK_ENTRY(experts_##T##_wfp4_128x128, Tile128x128<hk::T>::kThreads, dequant_gemm<Tile128x128<hk::T>>) \
    HK_ENTRY(experts_##T##_wfp4_64x64, Tile64x64<hk::T>::kThreads, dequant_gemm<Tile64x64<hk::T>>)       \
    MX_DECODE(experts_##T##_wfp4_16x32, gemm::B16ByFp4<hk::T>, 1)

A16WFP4(bf16)
A16WFP4(f16)
