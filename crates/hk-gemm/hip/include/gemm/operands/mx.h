// mx.h: operands in blocks of 32 columns that share a power-of-two (e8m0) scale: what mxfp4 and mxfp8 have in common.
//   y[m, n] = epilogue(sum over k of 2^(a_scale[m, k / 32] - 127) a[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])
//   LDS holds quantized values, and the four scales of 128 columns packed in 32 bits for each row. Where the matrix unit has no
//   block-scaled MFMA, waves dequantize their fp4 fragments to bf16, and rescale accumulators of 32 columns of fp8 (hk/mixed_mma.h).
#pragma once

#include <gemm/decode_gemm.h>
#include <gemm/gemm.h>
#include <gemm/operands/block_rows.h>

#include <hk/mixed_mma.h>

namespace gemm {
/// Loads the packed scales of 128 columns of each row of a (if it has any), then of w, one e8m0 byte at a time from any layout.
/// A byte of a has `kColumns` columns.
template <int kARows, int kWRows, int kThreads, u32 kColumns>
class MxScaleMover {
    /// A wave has rows of one tile.
    static constexpr int kW = (kARows + hk::kWaveSize - 1) / hk::kWaveSize * hk::kWaveSize;

  public:
    static constexpr int kParts = (kW + kWRows + kThreads - 1) / kThreads;
    static constexpr bool kDirectToLds = false;
    using Tile = typename hk::ScaleMover<kW, kWRows, kThreads>::Tile;
    struct PackedScales {
        u32 scale[kParts][4];
    };

  private:
    hk::Window window_[kParts];
    u32 offset_[kParts], block_[kParts][3];
    u32 end_;

  public:
    HK_FN MxScaleMover(const MixedParams &p, const TileCoord &coord, u32 end, u32 first_m, u32 first_n)
        : MxScaleMover(p, coord, end, [=](u32 row) { return first_m + row; }, [=](u32 row) { return first_n + row; }) {}

    /// Rows of the tiles are rows `a_row(r)` and `w_row(r)` of the operands.
    template <class Params, class ARow, class WRow>
    HK_FN MxScaleMover(const Params &p, const TileCoord &coord, u32 end, ARow a_row, WRow w_row) : end_(end) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 row = hk::thread_x() + i * kThreads;
            const bool of_w = hk::wave_id() * hk::kWaveSize + i * kThreads >= kW;
            window_[i] =
                hk::Window(of_w ? p.w_mx.first(coord.matrix) : p.a_mx.first(coord.batch), hk::Window::kOutOfBounds - 1);
            offset_[i] = of_w ? p.w_mx.offset(w_row(row - kW), row < kW + kWRows ? p.w.rows : 0)
                              : p.a_mx.offset(a_row(row), p.a.rows);
#pragma unroll
            for (int j = 0; j < 3; ++j) block_[i][j] = of_w ? p.w_mx.block[j] : p.a_mx.block[j];
        }
    }

    HK_FN PackedScales load(u32 from) const {
        PackedScales packed;
        constexpr u32 kBytes = 32 / kColumns;  // bytes of a in a block
        from -= from % (4 * kBytes);  // a stage can have fewer than 128 columns
        const u32 block = from / kBytes;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
#pragma unroll
            for (u32 b = 0; b < 4; ++b) {
                // Blocks past the end read as zero.
                const u32 past = (end_ - 1u - (from + b * kBytes)) & hk::Window::kOutOfBounds;
                packed.scale[i][b] =
                    window_[i].template load<u8>(offset_[i] | past, MxScale::of_block(block + b, block_[i]));
            }
        }
        return packed;
    }
    HK_FN static void store(const PackedScales &packed, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const auto &s = packed.scale[i];
            tile.word[hk::thread_x() + i * kThreads] = s[0] | s[1] << 8 | s[2] << 16 | s[3] << 24;
        }
    }
    HK_FN void copy(u32, Tile &) const {}
};

/// Scales of a stage of 256 columns: those of either half, of `kBytes` bytes of a row.
template <class Scales, u32 kBytes>
class TwoScales {
    Scales scales_;

  public:
    static constexpr int kParts = 2 * Scales::kParts;
    static constexpr bool kDirectToLds = Scales::kDirectToLds;
    struct Tile {
        typename Scales::Tile half[2];
    };
    struct PackedScales {
        typename Scales::PackedScales half[2];
    };

    template <class... Args>
    HK_FN explicit TwoScales(const Args &...args) : scales_(args...) {}

    HK_FN PackedScales load(u32 from) const { return {scales_.load(from), scales_.load(from + kBytes)}; }
    HK_FN static void store(const PackedScales &packed, Tile &tile) {
        Scales::store(packed.half[0], tile.half[0]);
        Scales::store(packed.half[1], tile.half[1]);
    }
    HK_FN void copy(u32 from, Tile &tile) const {
        scales_.copy(from, tile.half[0]);
        scales_.copy(from + kBytes, tile.half[1]);
    }
};

/// Loads the scales of a stage of 256 columns of each row of a, then of w, from the pre-shuffled order: 256 bytes of 32 rows. They stay in it:
/// a lane's dword has the scales of its row in two M or N tiles, and of its block in both halves of the stage.
template <int kARows, int kWRows, int kThreads>
class ShuffledScales {
    static constexpr u32 kRows = 32, kWaves = kThreads / hk::kWaveSize, kGroups = (kARows + kWRows) / kRows;
    static_assert(kARows % kRows == 0 && kWRows % kRows == 0, "a load has rows of one operand");

  public:
    static constexpr int kParts = (kGroups + kWaves - 1) / kWaves;
    static constexpr bool kDirectToLds = true;
    struct Tile {
        u32 dword[kGroups][hk::kWaveSize];

        /// Where the lane's scales of the rows from `row` on are, a multiple of 32.
        HK_FN static u32 place(u32 row, bool of_w) {
            return (of_w ? kARows + row : row) / kRows * hk::kWaveSize + hk::lane_id();
        }
        /// The scale of the lane's block in the k-th 128 columns of its row among the i-th 16, of those at `place`.
        HK_FN u32 get(u32 place, int i, int k) const {
            const u32 scale = (&dword[0][0] + place)[i / 2 * hk::kWaveSize] >> 8 * (2 * k + i % 2);
            return hk::kHasMxMma ? scale : scale & 0xffu;  // the matrix unit reads a byte
        }
    };
    struct PackedScales {
        u32 dword[kParts];
    };

  private:
    hk::Window window_[kParts];
    u32 offset_[kParts], end_;

    /// Waves that are left over load their first rows again.
    HK_FN static u32 group(u32 part) {
        const u32 at = hk::wave_id() + part * kWaves;
        return at < kGroups ? at : hk::wave_id();
    }
    HK_FN u32 at(int part, u32 from) const { return offset_[part] | ((end_ - 1u - from) & hk::Window::kOutOfBounds); }
    /// Of a stage, in a strip of 32 rows.
    HK_FN static u32 of_stage(u32 from) { return from / 128 * 256; }

  public:
    HK_FN ShuffledScales(const MixedParams &p, const TileCoord &coord, u32 end, u32 first_m, u32 first_n) : end_(end) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 row = group(i) * kRows;
            const bool of_w = row >= kARows;
            const MxScale &scale = of_w ? p.w_mx : p.a_mx;
            window_[i] =
                hk::Window(of_w ? p.w_mx.first(coord.matrix) : p.a_mx.first(coord.batch), hk::Window::kOutOfBounds - 1);
            const u32 first =
                of_w ? scale.offset(first_n + row - kARows, p.w.rows) : scale.offset(first_m + row, p.a.rows);
            offset_[i] = first + 4 * hk::lane_id();
        }
    }

    HK_FN PackedScales load(u32 from) const {
        PackedScales scales;
#pragma unroll
        for (int i = 0; i < kParts; ++i) scales.dword[i] = window_[i].template load<u32>(at(i, from), of_stage(from));
        return scales;
    }
    HK_FN static void store(const PackedScales &scales, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) tile.dword[group(i)][hk::lane_id()] = scales.dword[i];
    }
    HK_FN void copy(u32 from, Tile &tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            window_[i].load_dword_to_lds(&tile.dword[hk::uniform(group(i))], at(i, from), of_stage(from));
    }
};

/// Whether a tile's scales are in the pre-shuffled order and stay in it.
template <class T>
inline constexpr bool kShuffledScales = requires { requires T::kShuffledScales && T::kLines && T::kBytes == 128; };

/// The loader of scales. A byte of a has 128 / kBytes columns.
template <class T>
using MxScales = __remove_pointer(decltype([] {
    using Bytes = MxScaleMover<T::kARows, T::kN, T::kThreads, 128 / T::Operand::kBytes>;
    if constexpr (kShuffledScales<T>)
        return (ShuffledScales<T::kARows, T::kN, T::kThreads> *)nullptr;
    else if constexpr (T::kPackedScales)
        return (PackedScaleMover<T, T::kARows, T::Operand::kBytes> *)nullptr;
    else if constexpr (T::A::kStageBytes > T::Operand::kBytes)
        return (TwoScales<Bytes, T::Operand::kBytes> *)nullptr;
    else
        return (Bytes *)nullptr;
}()));

template <class T, template <class> class Accum, class Site = SingleSite>
HK_FN void mx_gemm(const MixedParams &p, const Site &site = {}) {
    tile_gemm<T, Accum, false>(p, site, [&](const TileCoord &coord, const KRange &range) {
        const u32 first_m = coord.m_tile * T::kM, first_n = coord.n_tile * T::kN;
        if constexpr (T::kPackedScales) {
            return MxScales<T>(range.to, [&](u32 row, bool of_w) {
                const u32 offset =
                    of_w ? p.w_mx.offset(first_n + row, p.w.rows) : p.a_mx.offset(first_m + row, p.a.rows);
                const auto first = of_w ? p.w_mx.first(coord.matrix) : p.a_mx.first(coord.batch);
                return hk::ScalePlace{reinterpret_cast<u64>(first), offset, 4, __builtin_ctz(T::Operand::kBytes)};
            });
        } else {
            return MxScales<T>(p, coord, range.to, first_m, first_n);
        }
    });
}

/// Decode GEMM's scales of 16 kTiles rows.
template <int kABits, int kTiles, int kCount>
class ScaleRows {
    hk::Window window_;
    u32 columns_;
    u32 block_[3], offset_[kTiles][hk::kRowsPerLane];

  public:
    /// Row r of the tiles is row `row_of(r)` from `first_row` on.
    template <class RowOf = InOrder>
    HK_FN ScaleRows(const MxScale &s, u32 index, u32 first_row, u32 rows, u32 end, RowOf row_of = {})
        : window_(s.first(index), hk::Window::kOutOfBounds - 1), columns_(u32(u64(end) * 8 / kABits)) {
#pragma unroll
        for (int i = 0; i < 3; ++i) block_[i] = s.block[i];
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                const u32 offset = s.offset(first_row + row_of(16 * i + hk::row_of_lane(hk::lane_id(), r)), rows);
                offset_[i][r] =
                    offset == hk::Window::kOutOfBounds ? offset : offset + hk::group_of_lane(hk::lane_id()) * block_[0];
            }
        }
    }

    HK_FN void load(hk::PerRow<u32> (&quants)[kTiles][kCount], u32 from) const {
        const u32 column = u32(u64(from) * 8 / kABits);
#pragma unroll
        for (u32 b = 0; b < kCount; ++b) {
            const u32 at = column + b * hk::kMxCols;
            const u32 past = (columns_ - 1u - (at + hk::group_of_lane(hk::lane_id()) * 32)) & hk::Window::kOutOfBounds;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                quants[i][b] = hk::per_row([&](u32 r) {
                    return u32(window_.load<u8>(offset_[i][r] | past, MxScale::of_block(at / 32, block_)));
                });
            }
        }
    }
};

/// An operand without MX scales.
struct NoScaleRows {
    template <int kTiles, int kCount>
    HK_FN void load(hk::PerRow<u32> (&)[kTiles][kCount], u32) const {}
};

/// Decode GEMM's operands with MX scales. `Kind` makes MFMA operands of raw blocks and scales:
///
///   kind          a                          w        accumulators are scaled
///   Fp4ByFp4      mxfp4                      mxfp4    by the MFMA operands
///   Fp8ByFp4      fp8                        mxfp4    by w
///   B16ByFp4      bf16, f16                  mxfp4    by w
///   QuantFp4ByFp4 bf16, f16, quantized       mxfp4    by the MFMA operands
///   MxFp8ByMxFp8  mxfp8                      mxfp8    by the MFMA operands
template <class Kind, int kMTiles_, int kNTiles_, int kCount, class Params = MixedParams>
struct MxOperands {
    using Acc = hk::MmaAcc;
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_;
    static constexpr int kABits = hk::kBitsOf<typename Kind::A>;
    static constexpr u32 kStepBytes = kCount * hk::kMxCols * kABits / 8;
    static constexpr float kAccUnit = Kind::kAccUnit;
    template <bool kScales, int kTiles>
    using Scales = decltype([] {
        if constexpr (kScales)
            return (ScaleRows<kABits, kTiles, kCount> *)nullptr;
        else
            return (NoScaleRows *)nullptr;
    }());

    const Params &p;
    BlockRows<typename Kind::RawA, kABits, kABits, kMTiles, kCount, false> a;
    BlockRows<typename Kind::RawW, hk::kBitsOf<typename Kind::W>, kABits, kNTiles, kCount, true> w;
    __remove_pointer(Scales<Kind::kAScales, kMTiles>) a_scales;
    __remove_pointer(Scales<Kind::kWScales, kNTiles>) w_scales;

    struct Stage {
        hk::PerRow<typename Kind::RawA> a[kMTiles][kCount];
        hk::PerRow<typename Kind::RawW> w[kNTiles][kCount];
        hk::PerRow<u32> a_scales[kMTiles][kCount], w_scales[kNTiles][kCount];
    };
    HK_FN Stage load(u32 from) const {
        Stage stage;
        a.load(stage.a, from);  // first: with w first gemm_afp4wfp4_16x32 needs 130 registers on gfx942, not 128
        w.load(stage.w, from);
        a_scales.load(stage.a_scales, from);
        w_scales.load(stage.w_scales, from);
        return stage;
    }

    /// MFMA operands; the kind makes them of all rows at once or row by row.
    HK_FN static auto w_block(const Stage &stage, int n, int b) {
        const auto &raw = stage.w[n][b];
        const auto &scale = stage.w_scales[n][b];
        if constexpr (requires { Kind::w(raw, scale); })
            return Kind::w(raw, scale);
        else
            return hk::per_row([&](u32 r) { return Kind::w(raw.row[r], scale.row[r]); });
    }
    HK_FN auto a_block(const Stage &stage, int m, int b) const {
        const auto &raw = stage.a[m][b];
        const auto &scale = stage.a_scales[m][b];
        if constexpr (requires { Kind::a(raw, scale, p); })
            return Kind::a(raw, scale, p);
        else
            return hk::per_row([&](u32 r) { return Kind::a(raw.row[r], scale.row[r], p); });
    }

    HK_FN void multiply(Acc (&acc)[kMTiles][kNTiles], const Stage &stage) const {
#pragma unroll
        for (int b = 0; b < kCount; ++b) {
            decltype(w_block(stage, 0, 0)) w_frag[kNTiles];
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) w_frag[n] = w_block(stage, n, b);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                const auto a = a_block(stage, m, b);
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) acc[m][n] = mma(w_frag[n], a, acc[m][n]);
            }
        }
    }
};

template <class Kind, int kMTiles, int kNTiles, int kWaves, int kCount, class Site = SingleSite>
HK_FN void decode_mx_gemm(const MixedParams &args, const Site &site = {}) {
    using Operands = MxOperands<Kind, kMTiles, kNTiles, kCount>;
    const auto make = [](const MixedParams &p, const TileCoord &coord, u32 first_m, u32 first_n, u32 end) {
        const auto scales = [&]<class Scales>(Scales *, const MxScale &s, u32 index, u32 first, u32 rows) {
            if constexpr (__is_same(Scales, NoScaleRows))
                return Scales{};
            else
                return Scales(s, index, first, rows, end);
        };
        return Operands{p,
                        {p.a.at(coord.batch, first_m), p.a, first_m, end},
                        {p.w.at(coord.matrix, first_n), p.w, first_n, end},
                        scales(typename Operands::template Scales<Kind::kAScales, kMTiles>(), p.a_mx, coord.batch,
                               first_m, p.a.rows),
                        scales(typename Operands::template Scales<Kind::kWScales, kNTiles>(), p.w_mx, coord.matrix,
                               first_n, p.w.rows)};
    };
    decode_gemm<Operands, kWaves, false>(args, site, make);
}

}  // namespace gemm
