// i8_fp8.h: int8 and fp8 weights with f32 scales.
//   same type:   y[m, n] = epilogue(sum over groups g of K of a_scale[m, g] w_scale[n / N', g] sum over k in g of a[m, k] w[n, k])
//   16-bit a:    the same without a_scale; w is dequantized to a's type
//   quantized a: 16-bit a is quantized to w's type in registers, one scale for 128 columns of a row
// A group is 128 columns or a power of two times as many; smaller groups are in i8_fp8_group.h. The sum over each 128 columns has
// its own accumulators (i32 for int8), then is scaled into f32.
#pragma once

#include <gemm/decode_gemm.h>
#include <gemm/gemm.h>
#include <gemm/operands/block_rows.h>
#include <gemm/operands/dequant.h>
#include <gemm/operands/plain.h>

#include <hk/mixed_mma.h>
#include <hk/quant.h>

namespace gemm {
/// A wave's f32 accumulators, and those of the last 128 columns. a has scales unless T::kAScaled is false.
template <class T>
struct BlockScaledAcc {
    static constexpr int kM = T::kWaveM / 16, kN = T::kWaveN / 16;
    /// Groups of fewer than 128 columns, see i8_fp8_group.h.
    static constexpr bool kShort = requires { T::kShort; };
    /// Pipeline steps between two rescales: 128 columns.
    static constexpr int kSteps = kShort ? 1 : 128 * T::Mma::kBytes / (T::kBytes * T::kStep);
    static constexpr bool kAScaled = [] {
        if constexpr (requires { T::kAScaled; })
            return T::kAScaled;
        else
            return true;
    }();
    using Part = typename T::Mma::Acc;
    using Acc = hk::MmaAcc;
    using Rows = Vec<float, hk::kRowsPerLane>;
    Acc acc[kM][kN] = {};
    WaveTile<T> part;
    bool one_w_scale;  // one scale for all the wave's rows of w

    HK_FN explicit BlockScaledAcc(const auto &p) : one_w_scale(T::kWaveN >> p.w_scale.row_shift <= 1) {}

    HK_FN void run(const auto &pipeline, u32 from, u32 count) {
        // Two loops: a branch in one loop would keep two copies of all accumulators.
        if (!kShort && one_w_scale) {
            Phases<true> turns{*this};
            pipeline.run(from, count, turns);
        } else {
            Phases<false> turns{*this};
            pipeline.run(from, count, turns);
            // The last loads are of nothing. Without this wait the compiler waits for them in the other loop, which it lays out next.
            hk::drain_register_loads();
        }
    }

    template <bool kOneWScale>
    struct Phases {
        static constexpr int kPhases = kSteps > 2 ? kSteps : 2;
        BlockScaledAcc &acc_tile;

        static constexpr bool kReadsFirst = detail::kReadsFirst<T>;
        /// `part` is zero at each first MFMA, which takes no register for it.
        HK_FN void clear() const { clear_acc(acc_tile.acc); }

        /// The scales of a step's columns. Those of a are times that of w, if it has one.
        struct Scales {
            Rows a[kM];
            Acc w[kOneWScale ? 1 : kN];
        };
        HK_FN static Scales read_scales(const auto &step) {
            const auto &scales = *step.scales[0];
            Scales of;
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                of.a[m] = Rows(1.0f);
                if constexpr (kAScaled) {
#pragma unroll
                    for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                        const u32 row = T::wave_m() + 16 * m + hk::row_of_lane(hk::lane_id(), r);
                        of.a[m][r] = __builtin_bit_cast(float, scales.a(row));
                    }
                }
                if constexpr (kOneWScale) of.a[m] *= __builtin_bit_cast(float, *scales.w(T::wave_n()));
            }
            if constexpr (!kOneWScale) {
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    const u32 row = T::wave_n() + 16 * n + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows;
                    of.w[n] = hk::broadcast_n(*reinterpret_cast<const Vec<float, hk::kMmaRows> *>(scales.w(row)));
                }
            }
            return of;
        }
        HK_FN void scale(const Scales &of) const {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const Acc w_scale = [&] {
                    if constexpr (kOneWScale)
                        return Acc(1.0f);
                    else
                        return of.w[n];
                }();
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    const Acc sum = __builtin_convertvector(acc_tile.part.acc[m][n], Acc);
                    acc_tile.acc[m][n] =
                        __builtin_elementwise_fma(sum, w_scale * hk::broadcast_m(of.a[m]), acc_tile.acc[m][n]);
                    acc_tile.part.acc[m][n] = Part(0);
                }
            }
        }

        template <int kPhase>
        HK_FN void multiply(const auto &step) const {
            static_assert(!T::kDirectToLds || kSteps == 1, "straight to LDS, each turn is the first");
            acc_tile.part.template multiply_fragments<kStepFrags<T>>(
                LdsFragments<T, __remove_cvref(decltype(step))>{step});
            if constexpr ((kPhase + 1) % kSteps == 0) scale(read_scales(step));
        }

        struct Stage {
            RegisterFragments<T> fragments;
            Scales scales;
        };
        HK_FN Stage read(const auto &step) const {
            return {RegisterFragments<T>(LdsFragments<T, __remove_cvref(decltype(step))>{step}), read_scales(step)};
        }
        HK_FN void multiply(const Stage &stage) const {
            static_assert(kSteps == 1, "a stage has its own scales");
            acc_tile.part.template multiply_fragments<kStepFrags<T>>(stage.fragments);
            scale(stage.scales);
        }
    };
};

/// End of the scales' range: the last rescale finds its scale even if some of its stages lie past the rows' end.
template <class T>
HK_FN u32 scales_end(const KRange &range) {
    constexpr u32 kBytes = BlockScaledAcc<T>::kSteps * T::kStep * T::kBytes;
    return (range.to + kBytes - 1) / kBytes * kBytes;
}

/// The loader of both operands' scales.
template <class T>
using BlockScales = PackedScaleMover<T, T::kM, 128>;

template <class T, class Site = SingleSite>
HK_FN void blockscale_gemm(const BlockParams &p, const Site &site = {}) {
    tile_gemm<T, BlockScaledAcc, false>(p, site, [&](const TileCoord &coord, const KRange &range) {
        return BlockScales<T>(scales_end<T>(range), [&](u32 row, bool of_w) {
            return of_w ? p.w_scale.place(coord.matrix, coord.n_tile * T::kN + row, p.w.rows)
                        : p.a_scale.place(coord.batch, coord.m_tile * T::kM + row, p.a.rows);
        });
    });
}

/// Decode GEMM's scales: one for each 128 bytes of each row, or for more of them (BlockScale). At least four rows of w share one.
template <int kMTiles, int kNTiles, int kGroups>
class BlockScaleRows {
    hk::Window a_, w_;
    u32 a_offset_[kMTiles][hk::kRowsPerLane], w_offset_[kNTiles];
    u32 a_group_, w_group_, a_shift_, w_shift_, end_;

  public:
    static constexpr bool kScaled = true;
    struct Stage {
        Vec<float, hk::kRowsPerLane> a[kMTiles][kGroups];
        float w[kNTiles][kGroups];
    };

    HK_FN BlockScaleRows(const BlockParams &p, const TileCoord &coord, u32 first_m, u32 first_n, u32 end)
        : BlockScaleRows(
              p, coord, end, [=](u32 row) { return first_m + row; }, [=](u32 row) { return first_n + row; }) {}

    /// Rows of the tiles are rows `a_row(r)` and `w_row(r)` of the operands.
    template <class Params, class ARow, class WRow>
    HK_FN BlockScaleRows(const Params &p, const TileCoord &coord, u32 end, ARow a_row, WRow w_row)
        : a_(p.a_scale.first(coord.batch), hk::Window::kOutOfBounds - 1),
          w_(p.w_scale.first(coord.matrix), hk::Window::kOutOfBounds - 1), a_group_(p.a_scale.group),
          w_group_(p.w_scale.group), a_shift_(p.a_scale.group_shift), w_shift_(p.w_scale.group_shift), end_(end) {
#pragma unroll
        for (u32 i = 0; i < kMTiles; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                a_offset_[i][r] = p.a_scale.offset(a_row(16 * i + hk::row_of_lane(hk::lane_id(), r)), p.a.rows);
            }
        }
#pragma unroll
        for (u32 i = 0; i < kNTiles; ++i) {
            w_offset_[i] = p.w_scale.offset(w_row(16 * i + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows), p.w.rows);
        }
    }

    HK_FN Stage load(u32 from) const {
        Stage stage;
#pragma unroll
        for (u32 g = 0; g < kGroups; ++g) {
            const u32 at = from + 128 * g;
            const u32 past = (end_ - 1u - at) & hk::Window::kOutOfBounds;
#pragma unroll
            for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
                for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                    stage.a[i][g][r] =
                        __builtin_bit_cast(float, a_.load<u32>(a_offset_[i][r] | past, (at >> a_shift_) * a_group_));
                }
            }
#pragma unroll
            for (int i = 0; i < kNTiles; ++i) {
                stage.w[i][g] =
                    __builtin_bit_cast(float, w_.load<u32>(w_offset_[i] | past, (at >> w_shift_) * w_group_));
            }
        }
        return stage;
    }
};

/// Decode GEMM's operands of one type with block scales.
template <class E, int kMTiles, int kNTiles, int kBytes>
using BlockScaledOperands =
    FragmentOperands<E, kMTiles, kNTiles, kBytes, BlockScaleRows<kMTiles, kNTiles, kBytes / 128>>;

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes, class Site = SingleSite>
HK_FN void decode_blockscale_gemm(const BlockParams &args, const Site &site = {}) {
    using Operands = BlockScaledOperands<E, kMTiles, kNTiles, kBytes>;
    using Scales = decltype(Operands::scales);
    const auto make = [](const BlockParams &p, const TileCoord &coord, u32 first_m, u32 first_w, u32 end) {
        return fragment_operands<Operands, false>(p, coord, first_m, first_w, end,
                                                  Scales(p, coord, first_m, first_w, end));
    };
    decode_gemm<Operands, kWaves, false>(args, site, make);
}

/// Dequantizes int8 or fp8 to T.
template <class Q_, class T>
struct DequantBytes {
    using Q = Q_;
    using Out = T;
    struct Extra {};

    HK_FN DequantBytes(const MixedParams &, const TileCoord &, u32) {}
    HK_FN void of_row(u32) {}
    HK_FN Extra load(u32, u32) const { return {}; }
    template <int kWords>
    HK_FN static void decode(Vec<u32, kWords> quants, Extra, Vec<u32, 4> (&floats)[kWords / 2]) {
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) {
            floats[i] = __builtin_bit_cast(Vec<u32, 4>,
                                           hk::dequantize_bytes<Q, T>(Vec<u32, 2>{quants[2 * i], quants[2 * i + 1]}));
        }
    }
};

template <class T, class Q, Access kAccess, int kM, int kN, int kWavesM, int kWavesN>
using DequantBytesTile = DequantTile<T, DequantBytes<Q, T>, kAccess, kM, kN, kWavesM, kWavesN>;

template <class T>
HK_FN void dequant_gemm(const MixedParams &p) {
    tile_gemm<T, BlockScaledAcc, false>(p, SingleSite{}, [&](const TileCoord &coord, const KRange &range) {
        return hk::ScaleMover<0, T::kN, T::kThreads>(scales_end<T>(range), [&](u32 row, bool) {
            return p.w_scale.place(coord.matrix, coord.n_tile * T::kN + row, p.w.rows);
        });
    });
}

/// Decode GEMM's scales of w for groups of 128 or more columns. At least four rows share one; see BlockScale in gemm/args.h.
template <int kTiles, int kGroups>
class GroupScaleRows {
    hk::Window window_;
    u32 offset_[kTiles];
    u32 step_, shift_, end_;

  public:
    HK_FN GroupScaleRows(const BlockScale &s, u32 index, u32 first_row, u32 rows, u32 end)
        : window_(s.first(index), hk::Window::kOutOfBounds - 1), step_(s.group), shift_(s.group_shift), end_(end) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
            offset_[i] = s.offset(first_row + 16 * i + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows, rows);
        }
    }

    /// Scales of groups of `kBytes` bytes of a, from `from` on.
    template <u32 kBytes>
    HK_FN void load(float (&scales)[kTiles][kGroups], u32 from) const {
#pragma unroll
        for (u32 g = 0; g < kGroups; ++g) {
            const u32 at = from + g * kBytes, past = (end_ - 1u - at) & hk::Window::kOutOfBounds;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                scales[i][g] = __builtin_bit_cast(float, window_.load<u32>(offset_[i] | past, (at >> shift_) * step_));
            }
        }
    }
};

/// Blocks of kMxCols columns in 128 columns.
inline constexpr int kGroupBlocks = 128 / hk::kMxCols;

/// 16-bit a, and w dequantized to a's type.
template <class T, class Q>
struct B16ByByte {
    using A = T;
    using W = Q;
    using Part = hk::MmaAcc;
    struct GroupA {
        hk::PerRow<hk::Float16Block<T>> block[kGroupBlocks];
        Vec<float, hk::kRowsPerLane> scale;
    };
    struct GroupW {
        hk::PerRow<hk::Float16Block<T>> block[kGroupBlocks];
    };

    HK_FN static GroupA a(const hk::PerRow<hk::Block<T>> *raw) {
        GroupA group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
            group.block[b] = hk::per_row([&](u32 r) { return hk::Float16Block<T>::of(raw[b].row[r]); });
        }
        group.scale = 1.0f;
        return group;
    }
    HK_FN static GroupW w(const hk::PerRow<hk::Block<Q>> *raw) {
        GroupW group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
            group.block[b] = hk::per_row([&](u32 r) {
                hk::Float16Block<T> floats;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    floats.part[2 * c] = hk::dequantize_bytes<Q, T>(raw[b].row[r].chunk[c].lo);
                    floats.part[2 * c + 1] = hk::dequantize_bytes<Q, T>(raw[b].row[r].chunk[c].hi);
                }
                return floats;
            });
        }
        return group;
    }
    HK_FN static Part mma(const GroupW &w, const GroupA &a, Part part) {
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) part = hk::mma(w.block[b], a.block[b], part);
        return part;
    }
};

/// 16-bit a quantized to w's type, one scale for 128 columns of a row.
template <class T, class Q>
struct QuantByteByByte {
    using A = T;
    using W = Q;
    using Mma = hk::FragMma<Q>;
    using Part = typename Mma::Acc;
    struct GroupA {
        Frag quants[kGroupBlocks][2];
        Vec<float, hk::kRowsPerLane> scale;
    };
    struct GroupW {
        Frag quants[kGroupBlocks][2];
    };

    HK_FN static GroupA a(const hk::PerRow<hk::Block<T>> *raw) {
        constexpr auto kKind = hk::kQuantType<Q>;
        GroupA group;
        hk::PerRow<Vec<u32, 4>> quants[kGroupBlocks][2];
#pragma unroll
        for (int r = 0; r < hk::kRowsPerLane; ++r) {
            Vec<float, 8> v[kGroupBlocks][4];
            hk::FiniteMax max;
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    v[b][c] = hk::widen<T, 8>(__builtin_bit_cast(Vec<T, 8>, raw[b].row[r].chunk[c]));
                    max.add(v[b][c]);
                }
            }
            const u32 top = hk::reduce_over_lane_groups(max.top, hk::MaxBits{});
            group.scale[r] = hk::group_scale(hk::FiniteMax::value(top), hk::kQuantMax<kKind>);
            const float inverse = 1.0f / group.scale[r];
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const auto low = hk::quantize_packed<kKind>(v[b][2 * c] * inverse);
                    const auto high = hk::quantize_packed<kKind>(v[b][2 * c + 1] * inverse);
                    quants[b][c].row[r] = {low[0], low[1], high[0], high[1]};
                    // All NaN tests at once would exhaust the scalar registers.
                    hk::sched_barrier();
                }
            }
        }
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 2; ++c) group.quants[b][c] = hk::joined(quants[b][c]);
        }
        return group;
    }
    HK_FN static GroupW w(const hk::PerRow<hk::Block<Q>> *raw) {
        GroupW group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                group.quants[b][c] = hk::joined(hk::per_row([&](u32 r) { return raw[b].row[r].chunk[c]; }));
            }
        }
        return group;
    }
    HK_FN static Part mma(const GroupW &w, const GroupA &a, Part part) {
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int f = 0; f < 2; f += Mma::kFrags) part = Mma::mma(w.quants[b] + f, a.quants[b] + f, part);
        }
        return part;
    }
};

/// Decode GEMM's operands with a rescale after each 128 columns; a step has kGroups times 128.
template <class Kind, int kMTiles_, int kNTiles_, int kGroups>
struct GroupScaledOperands {
    using T = typename Kind::A;
    using Q = typename Kind::W;
    using Acc = hk::MmaAcc;
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_, kCount = kGroups * kGroupBlocks;
    static constexpr u32 kGroupBytes = 128 * sizeof(T), kStepBytes = kGroups * kGroupBytes;

    BlockRows<hk::Block<T>, hk::kBitsOf<T>, hk::kBitsOf<T>, kMTiles, kCount, false> a;
    BlockRows<hk::Block<Q>, hk::kBitsOf<Q>, hk::kBitsOf<T>, kNTiles, kCount, true> w;
    GroupScaleRows<kNTiles, kGroups> scales;

    struct Stage {
        hk::PerRow<hk::Block<T>> a[kMTiles][kCount];
        hk::PerRow<hk::Block<Q>> w[kNTiles][kCount];
        float scales[kNTiles][kGroups];
    };
    HK_FN Stage load(u32 from) const {
        Stage stage;
        a.load(stage.a, from);
        w.load(stage.w, from);
        scales.template load<kGroupBytes>(stage.scales, from);
        return stage;
    }

    HK_FN void multiply(Acc (&acc)[kMTiles][kNTiles], const Stage &stage) const {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            typename Kind::GroupW w_frag[kNTiles];
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) w_frag[n] = Kind::w(stage.w[n] + g * kGroupBlocks);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                const auto a_frag = Kind::a(stage.a[m] + g * kGroupBlocks);
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) {
                    const auto part = Kind::mma(w_frag[n], a_frag, typename Kind::Part(0));
                    const Acc scale = hk::broadcast_m(a_frag.scale * stage.scales[n][g]);
                    acc[m][n] = __builtin_elementwise_fma(__builtin_convertvector(part, Acc), scale, acc[m][n]);
                }
            }
        }
    }
};

template <class Kind, int kMTiles, int kNTiles, int kWaves, int kGroups>
HK_FN void decode_group_gemm(const MixedParams &args) {
    using Operands = GroupScaledOperands<Kind, kMTiles, kNTiles, kGroups>;
    decode_gemm<Operands, kWaves, false>(
        args, SingleSite{}, [](const MixedParams &p, const TileCoord &coord, u32 first_m, u32 first_n, u32 end) {
            return Operands{{p.a.at(coord.batch, first_m), p.a, first_m, end},
                            {p.w.at(coord.matrix, first_n), p.w, first_n, end},
                            {p.w_scale, coord.matrix, first_n, p.w.rows, end}};
        });
}

}  // namespace gemm
