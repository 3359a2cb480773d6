// mxfp4.h: mxfp4 weights, with activations in mxfp4, fp8 (no block scales) or 16-bit floats (as they are, or quantized to mxfp4).
#pragma once

#include <gemm/operands/dequant.h>
#include <gemm/operands/mx.h>

namespace gemm {
/// An operand's fragments in LDS, as blocks of 32 columns.
template <class E>
struct MxFrag;

template <>
struct MxFrag<hk::Fp4> {
    using Block = hk::MxBlock;
    static constexpr int kBytes = 64;  // of 128 columns
    static constexpr bool kHasScales = true;
    static constexpr float kAccUnit = hk::kMxAccUnit;

    template <class Tile>
    HK_FN static hk::PerRow<Block> load(const Tile &tile, u32 row, u32 k, const hk::PerRow<u32> &scale) {
        const auto chunks = tile.chunks(row, k);
        return hk::per_row([&](u32 i) { return Block::from_packed(chunks.row[i], scale.row[i]); });
    }
};

template <>
struct MxFrag<hk::Fp8> {
    using Block = hk::Fp8Block;
    static constexpr int kBytes = 128;
    static constexpr bool kHasScales = false;
    static constexpr float kAccUnit = hk::kMxFp8AccUnit;

    template <class Tile>
    HK_FN static hk::PerRow<Block> load(const Tile &tile, u32 row, u32 k, const hk::PerRow<u32> &) {
        const u32 lane = hk::lane_id();
        return hk::per_row([&](u32 i) {
            typename Block::Raw raw;
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const u32 in_block = (c * Block::Raw::kStep + hk::group_of_lane(lane) * Block::Raw::kLaneStep) / 16;
                raw.chunk[c] =
                    tile.chunk[Tile::place(row + hk::row_of_lane(lane, i), 2 * hk::kLaneGroups<16> * k + in_block)];
            }
            return Block::of(raw);
        });
    }
};

/// A block tile as `Tile` in gemm/gemm.h, for a of type E. `kPackedScales`: the scales of 128 columns are 32-bit loads. `kShuffledScales`: scales
/// are in the pre-shuffled order, of whole stages.
template <class E, Access kAccess, int kM_, int kN_, int kWavesM, int kWavesN, int kStages, bool kPackedScales_,
          bool kShuffledScales_ = false>
struct MxTile {
    using Operand = MxFrag<E>;
    static constexpr int kM = kM_, kN = kN_;
    static constexpr int kThreads = kWavesM * kWavesN * hk::kWaveSize;
    static constexpr int kWaveM = kM / kWavesM, kWaveN = kN / kWavesN;
    static constexpr int kARows = Operand::kHasScales ? kM : 0;  // rows with scales
    static constexpr bool kPackedScales = kPackedScales_, kShuffledScales = kShuffledScales_;

    /// Stages of 256 columns, a line of each row. Rows of fp8 are a line of 128 columns.
    static constexpr bool kLines = kLineBytes == 128 && kAccess == Access::Vectorized && Operand::kBytes == 64;
    /// 256 x 256 fills LDS: on gfx950 by two stages, on gfx942 by one of 128 columns.
    static constexpr bool kFills = kM + kN == 512;
    static constexpr int kBytes = kLines && (hk::kHasWideDma || !kFills) ? 128 : 64;
    /// As Tile's.
    static constexpr bool kReadsFirst =
        (kM + kN > 128) && kLines && hk::kHasWideDma && kPackedScales && kThreads == hk::kSimdsPerCu * hk::kWaveSize;

    /// Halves of a stage are read from LDS ahead.
    static constexpr bool kHalves = kShuffledScales && kLines && kBytes == 128;

    using A = hk::Mover<hk::SharedTile<kM, kLines ? kBytes : Operand::kBytes>, kThreads, kAccess, 1>;
    using W = hk::Mover<hk::SharedTile<kN, kBytes>, kThreads, kAccess, 1>;
    template <class Scales>
    using Pipeline = typename detail::TilePipeline<kLines, A, W, Scales, kStages, 1>::Type;

    HK_FN static u32 wave_m() { return hk::wave_id() / kWavesN * kWaveM; }
    HK_FN static u32 wave_n() { return hk::wave_id() % kWavesN * kWaveN; }
};

/// A wave's accumulators, in units of Operand::kAccUnit until the end.
template <class T>
struct MxAcc {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    hk::MmaAcc acc[kM][kN] = {};

    HK_FN explicit MxAcc(const auto &) {
        if constexpr (kShuffledScales<T>) {
            using Scales = typename MxScales<T>::Tile;
            const u32 row = hk::row_of_lane(hk::lane_id(), 0), chunk = hk::group_of_lane(hk::lane_id());
            at_ = {T::A::Tile::place(T::wave_m() + row, chunk), T::W::Tile::place(T::wave_n() + row, chunk),
                   Scales::place(T::wave_m(), false), Scales::place(T::wave_n(), true)};
            // So that what follows is a constant from there.
            hk::pin(at_.a), hk::pin(at_.w), hk::pin(at_.a_scale), hk::pin(at_.w_scale);
        }
    }

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        if constexpr (kByHalves<T, decltype(pipeline)>)
            pipeline.run_halves(from, count, *this);
        else
            pipeline.run(from, count, *this);
        scale_acc(acc, T::Operand::kAccUnit);
    }

    static constexpr bool kReadsFirst = detail::kReadsFirst<T>;
    HK_FN void clear() { clear_acc(acc); }

  private:
    /// Where the lane's operands of the first fragments are in their tiles, and their scales, if these are pre-shuffled.
    struct {
        u32 a, w, a_scale, w_scale;
    } at_;

  public:
    /// Fragments of 128 columns, and those of a row of a stage.
    static constexpr int kOfScale = 64 / hk::kFragBytes, kFrags = T::kBytes / hk::kFragBytes;

    /// The blocks of one fragment of each row; a lane has one block of its row.
    struct Operands {
        hk::PerRow<hk::MxBlock> w[kN];
        hk::PerRow<typename T::Operand::Block> a[kM];
    };
    /// Reads one operand's blocks of the k-th fragments of a step from LDS.
    HK_FN static auto quants(int k, u32 row, auto word) {
        const u32 lane = hk::lane_id(), shift = 8 * (k % kOfScale * hk::kLaneGroups<16> + hk::group_of_lane(lane));
        return hk::per_row([&](u32 i) { return word(row + hk::row_of_lane(lane, i)) >> shift & 0xffu; });
    }
    HK_FN static const auto &scales_of(const auto &step, int k) {
        if constexpr (requires { step.scales[0]->half; })
            return step.scales[0]->half[k / kOfScale];
        else
            return step.scales[0][k / kOfScale];
    }
    /// The same where scales are pre-shuffled, of the i-th rows from those at `place` on.
    HK_FN static auto read_shuffled(const auto &tile, const auto &scales, u32 place, u32 scale_place, int i, int k) {
        const auto *const at = tile.chunk + (place ^ u32(hk::kLaneGroups<16> * k));
        return hk::per_row(
            [&](u32) { return hk::MxBlock::from_packed(at[16 * tile.kChunks * i], scales.get(scale_place, i, k)); });
    }
    HK_FN auto read_w(const auto &step, int n, int k) const {
        if constexpr (kShuffledScales<T>) {
            return read_shuffled(*step.w[0], *step.scales[0], at_.w, at_.w_scale, n, k);
        } else {
            const u32 row = T::wave_n() + 16 * n;
            const auto scale = quants(k, row, [&](u32 r) { return *scales_of(step, k).w(r); });
            return MxFrag<hk::Fp4>::load(*step.w[0], row, k, scale);
        }
    }
    HK_FN auto read_a(const auto &step, int m, int k) const {
        if constexpr (kShuffledScales<T>) {
            return read_shuffled(*step.a[0], *step.scales[0], at_.a, at_.a_scale, m, k);
        } else {
            const u32 row = T::wave_m() + 16 * m;
            hk::PerRow<u32> scale = {};
            if constexpr (T::Operand::kHasScales)
                scale = quants(k, row, [&](u32 r) { return scales_of(step, k).a(r); });
            return T::Operand::load(*step.a[0], row, k, scale);
        }
    }

    struct Stage {
        Operands of[kFrags];
    };
    template <int k>
    HK_FN Operands read(const auto &step) const {
        Operands operands;
#pragma unroll
        for (int n = 0; n < kN; ++n) operands.w[n] = read_w(step, n, k);
#pragma unroll
        for (int m = 0; m < kM; ++m) operands.a[m] = read_a(step, m, k);
        return operands;
    }
    HK_FN Stage read(const auto &step) const {
        static_assert(kFrags == 2);
        return {read<0>(step), read<1>(step)};
    }
    template <int kFrom = 0, int kTo = kM>
    HK_FN void multiply(const Operands &operands) {
#pragma unroll
        for (int m = kFrom; m < kTo; ++m) {
#pragma unroll
            for (int n = 0; n < kN; ++n) acc[m][n] = hk::mma(operands.w[n], operands.a[m], acc[m][n]);
        }
    }
    template <int kHalf>
    HK_FN void multiply_part(const Operands &operands) {
        multiply<kHalf *(kM / 2), kHalf == 0 ? kM / 2 : kM>(operands);
    }
    HK_FN void multiply(const Stage &stage) {
#pragma unroll
        for (int k = 0; k < kFrags; ++k) multiply(stage.of[k]);
    }

    template <int>
    HK_FN void multiply(const auto &step) {
#pragma unroll
        for (int k = 0; k < kFrags; ++k) {
            hk::PerRow<hk::MxBlock> w[kN];
#pragma unroll
            for (int n = 0; n < kN; ++n) w[n] = read_w(step, n, k);
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const auto a = read_a(step, m, k);
#pragma unroll
                for (int n = 0; n < kN; ++n) acc[m][n] = hk::mma(w[n], a, acc[m][n]);
            }
        }
    }
};

/// Dequantizes fp4, with the scales of 32 columns, to bf16, which holds both exactly.
class DequantFp4 {
  public:
    using Q = hk::Fp4;
    using Out = hk::bf16;

  private:
    hk::Window scales_;
    const MxScale &scale_;
    u32 first_, rows_, offset_ = 0;

  public:
    using Extra = u32;

    HK_FN DequantFp4(const MixedParams &p, const TileCoord &coord, u32 first_row)
        : scales_(p.w_mx.first(coord.matrix), hk::Window::kOutOfBounds - 1), scale_(p.w_mx), first_(first_row),
          rows_(p.w.rows) {}

    HK_FN void of_row(u32 row) { offset_ = scale_.offset(first_ + row, rows_); }
    HK_FN Extra load(u32 from, u32 end) const {
        constexpr u32 kBlock = 16;  // bytes
        const u32 past = (end - 1u - from) & hk::Window::kOutOfBounds;
        return scales_.load<u8>(offset_ | past, MxScale::of_block(from / kBlock, scale_.block));
    }
    template <int kChunks>
    HK_FN static void decode(Vec<u32, kChunks> quants, Extra scale, Vec<u32, 4> (&floats)[kChunks]) {
        Vec<hk::bf16, 8> values[kChunks];
        hk::dequantize_fp4_scaled<kChunks>(quants, scale, values);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) floats[i] = __builtin_bit_cast(Vec<u32, 4>, values[i]);
    }
};

/// Accumulators of weights that are prescaled by kFp4Prescale.
template <class T>
struct DequantFp4Acc : TileAcc<T> {
    using TileAcc<T>::TileAcc;

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        TileAcc<T>::run(pipeline, from, count);
        scale_acc(this->acc, 1.0f / hk::kFp4Prescale);
    }
};

template <class T, Access kAccess, int kM, int kN, int kWavesM, int kWavesN>
using DequantFp4Tile = DequantTile<T, DequantFp4, kAccess, kM, kN, kWavesM, kWavesN>;

template <class T>
HK_FN void dequant_fp4_gemm(const MixedParams &p) {
    tile_gemm<T, DequantFp4Acc, false>(p, SingleSite{},
                                       [](const TileCoord &, const KRange &) { return hk::NoScales{}; });
}

struct Fp4ByFp4 {
    using A = hk::Fp4;
    using W = hk::Fp4;
    using RawA = hk::Block<A>;
    using RawW = hk::Block<W>;
    using BlockA = hk::MxBlock;
    using BlockW = hk::MxBlock;
    static constexpr bool kAScales = true, kWScales = true;
    static constexpr float kAccUnit = hk::kMxAccUnit;

    HK_FN static BlockA a(const RawA &raw, u32 scale, const auto &) { return BlockA::from_packed(raw.chunk[0], scale); }
    HK_FN static BlockW w(const RawW &raw, u32 scale) { return BlockW::from_packed(raw.chunk[0], scale); }
};

struct Fp8ByFp4 : Fp4ByFp4 {
    using A = hk::Fp8;
    using BlockA = hk::Fp8Block;
    using RawA = BlockA::Raw;
    static constexpr bool kAScales = false;
    static constexpr float kAccUnit = hk::kMxFp8AccUnit;

    HK_FN static BlockA a(const RawA &raw, u32, const auto &) { return BlockA::of(raw); }
};

template <class T>
struct B16ByFp4 : Fp4ByFp4 {
    using A = T;
    using RawA = hk::Block<A>;
    using BlockA = hk::Float16Block<T>;
    using BlockW = hk::Float16Block<hk::bf16>;
    static constexpr bool kAScales = false;
    static constexpr float kAccUnit = 1.0f / hk::kFp4Prescale;

    HK_FN static BlockA a(const RawA &raw, u32, const auto &) { return BlockA::of(raw); }
    HK_FN static BlockW w(const RawW &raw, u32 scale) {
        BlockW block;
        hk::dequantize_fp4_scaled<4>(raw.chunk[0], scale, block.part);
        return block;
    }
};

template <class T>
struct QuantFp4ByFp4 : Fp4ByFp4 {
    using A = T;
    using RawA = hk::Block<A>;
    static constexpr bool kAScales = false;

    HK_FN static BlockA a(const RawA &raw, u32, const MixedParams &p) {
        Vec<float, 32> v;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const Vec<float, 8> part = hk::widen<T, 8>(__builtin_bit_cast(Vec<T, 8>, raw.chunk[c]));
#pragma unroll
            for (int i = 0; i < 8; ++i) v[8 * c + i] = part[i];
        }
        return BlockA::quantized(v, p.rule);
    }
};

}  // namespace gemm
