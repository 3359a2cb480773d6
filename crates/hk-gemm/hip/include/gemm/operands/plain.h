// plain.h: decode GEMM of operands that the matrix unit takes as they lie in memory: bf16, f16, int8, fp8.
#pragma once

#include <gemm/decode_gemm.h>

#include <hk/global.h>
#include <hk/mma.h>
#include <hk/pipeline.h>

namespace gemm {
/// Loads 16 kTiles rows to registers, as fragments. `kStreamed`: no other wave reads these rows (non-temporal loads).
template <int kTiles, int kUnroll, bool kStreamed = false>
class FragmentRows {
    hk::Window window_;
    u32 end_;  // of a row, in bytes
    u32 chunk_shift_;
    u32 offset_[kTiles][hk::kRowsPerLane];

  public:
    struct Frags {
        Frag frag[kTiles][kUnroll];
    };

    /// Row r of the tiles is row `row_of(r)` from `first` on; rows from `rows` on read as zero.
    template <class RowOf>
    HK_FN FragmentRows(GlobalPtr<const u8> first, u32 rows, const hk::RowLayout &layout, u32 end, RowOf row_of)
        : window_(first, hk::Window::kOutOfBounds - 1), end_(end), chunk_shift_(layout.chunk_shift) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                const u32 row = row_of(16 * i + hk::row_of_lane(hk::lane_id(), r));
                offset_[i][r] =
                    row < rows ? layout.window_offset(row) + (lane_byte() << chunk_shift_) : hk::Window::kOutOfBounds;
            }
        }
    }

    HK_FN Frags load(u32 from) const {
        // Fragments of one line follow each other, so that it is filled once.
        constexpr u32 kOfLine = kUnroll > 1 && kLineBytes > hk::kFragBytes ? kLineBytes / hk::kFragBytes : 1;
        Frags frags;
#pragma unroll
        for (u32 first = 0; first < kUnroll; first += kOfLine) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (u32 u = first; u < first + kOfLine; ++u) {
                    // Past the row's end the sign bit moves the offset beyond the window: zeros are read.
                    const u32 at = from + u * hk::kFragBytes;
                    const u32 past = (end_ - 1u - (at + lane_byte())) & hk::Window::kOutOfBounds;
                    const auto chunk = [&](u32 r) {
                        if constexpr (kStreamed)
                            return window_.load_streaming(offset_[i][r] | past, at << chunk_shift_);
                        else
                            return window_.template load<Vec<u32, 4>>(offset_[i][r] | past, at << chunk_shift_);
                    };
                    frags.frag[i][u] = hk::joined(hk::per_row(chunk));
                }
            }
        }
        return frags;
    }

  private:
    /// First byte of the lane's share of a fragment.
    HK_FN static u32 lane_byte() { return hk::group_of_lane(hk::lane_id()) * 16; }
};

/// No scales.
struct Unscaled {
    static constexpr bool kScaled = false;
    struct Stage {};
    HK_FN Stage load(u32) const { return {}; }
};

/// A wave's operand loader: `kBytes` of each row per step, multiplied as they are.
template <class E, int kMTiles_, int kNTiles_, int kBytes, class Scales>
struct FragmentOperands {
    using Mma = hk::FragMma<E>;
    using Part = typename Mma::Acc;
    using Acc = decltype([] {
        if constexpr (Scales::kScaled)
            return hk::MmaAcc();
        else
            return Part();
    }());
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_;
    static constexpr u32 kStepBytes = kBytes;
    static constexpr int kUnroll = kBytes / hk::kFragBytes, kFrags = Mma::kFrags;
    using A = FragmentRows<kMTiles, kUnroll>;
    using W = FragmentRows<kNTiles, kUnroll, true>;

    A a;
    W w;
    Scales scales;

    struct Stage {
        typename W::Frags w;  // first: w comes from HBM, a mostly from L2
        typename A::Frags a;
        typename Scales::Stage scales;
    };
    HK_FN Stage load(u32 from) const { return {w.load(from), a.load(from), scales.load(from)}; }

    HK_FN static void multiply(Acc (&acc)[kMTiles][kNTiles], const Stage &stage) {
        // Fragments accumulated between two rescales.
        constexpr int kTogether = Scales::kScaled ? 128 / hk::kFragBytes : kUnroll;
#pragma unroll
        for (int first = 0; first < kUnroll; first += kTogether) {
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) {
                    Part part = {};
                    if constexpr (!Scales::kScaled) part = acc[m][n];
#pragma unroll
                    for (int u = first; u < first + kTogether; u += kFrags) {
                        part = Mma::mma(stage.w.frag[n] + u, stage.a.frag[m] + u, part);
                    }
                    if constexpr (Scales::kScaled) {
                        const Acc scale = hk::broadcast_m(stage.scales.a[m][first / kTogether] *
                                                          stage.scales.w[n][first / kTogether]);
                        acc[m][n] = __builtin_elementwise_fma(__builtin_convertvector(part, Acc), scale, acc[m][n]);
                    } else {
                        acc[m][n] = part;
                    }
                }
            }
        }
    }
};

/// The operand loader of a block's rows. A gated tile has half gate rows of w, then their value rows.
template <class Operands, bool kGated, class Params, class Scales>
HK_FN Operands fragment_operands(const Params &p, const TileCoord &coord, u32 first_m, u32 first_w, u32 end,
                                 const Scales &scales) {
    constexpr u32 kN = 16 * Operands::kNTiles;
    const auto row_of_w = [&](u32 row) { return kGated ? gated_row<kN>(row, first_w, p.w.rows) : row; };
    return {{p.a.at(coord.batch, first_m), p.a.rows - first_m, p.a.layout, end, [](u32 row) { return row; }},
            {p.w.at(coord.matrix, first_w), p.w.rows - first_w, p.w.layout, end, row_of_w},
            scales};
}

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes, bool kGated, class Site = SingleSite>
HK_FN void decode_gemm(const Params &args, const Site &site = {}) {
    using Operands = FragmentOperands<E, kMTiles, kNTiles, kBytes, Unscaled>;
    decode_gemm<Operands, kWaves, kGated>(
        args, site, [](const Params &p, const TileCoord &coord, u32 first_m, u32 first_w, u32 end) {
            return fragment_operands<Operands, kGated>(p, coord, first_m, first_w, end, Unscaled{});
        });
}

}  // namespace gemm
