// skinny.h: products of few rows x, bound by reading w.
//   A block makes 16 kMTiles x 16 kNTiles sums. Its waves share K: wave i takes every kWaves-th stretch of kBytes of each row,
//   from global memory to registers, two stretches ahead of the products. So each weight is read once, by one wave, and a
//   wave has up to 32 (kMTiles + kNTiles) kBytes of loads on their way. The waves' sums meet in LDS, in their order.
#pragma once

#include <hk/block.h>
#include <hk/mma.h>
#include <hk/pipeline.h>

#include "epilogue.h"
#include "problem.h"

namespace gemm {
using hk::Frag;

/// What a wave reads of 16 kTiles rows.
template <int kTiles, int kUnroll>
class Rows {
    hk::Window window_;
    u32 end_;  // of a row, in bytes
    u32 spread_;
    u32 offset_[kTiles];

public:
    struct Frags {
        Frag frag[kTiles][kUnroll];
    };

    /// Row r of the tiles is row `row_of(r)` from `first` on; from `rows` on there is none.
    template <class RowOf>
    HK_FN Rows(GlobalPtr<const u8> first, u32 rows, const hk::RowLayout &layout, u32 end, RowOf row_of)
        : window_(first, hk::Window::kBeyond - 1), end_(end), spread_(layout.spread) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
            const u32 row = row_of(16 * i + hk::lane_id() % 16);
            const u32 ahead = hk::lane_id() / 16 * 16;
            offset_[i] = row < rows ? layout.window_offset(row) + (ahead << spread_) : hk::Window::kBeyond;
        }
    }

    HK_FN Frags load(u32 from) const {
        Frags frags;
#pragma unroll
        for (u32 u = 0; u < kUnroll; ++u) {
            // The sign of what is left of the row moves the offset beyond the window.
            const u32 at = from + u * hk::kFragBytes;
            const u32 past = (end_ - 1u - (at + hk::lane_id() / 16 * 16)) & hk::Window::kBeyond;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) frags.frag[i][u] = window_.load<Vec<u32, 4>>(offset_[i] | past, at << spread_);
        }
        return frags;
    }
};

/// What sums of products of 128 bytes of a row are multiplied by: nothing.
struct Unscaled {
    static constexpr bool kScaled = false;
    struct Set {};
    HK_FN Set load(u32) const { return {}; }
};

/// One scale for each 128 bytes of each row, or more of them (BlockScale); at least four rows of w have the same.
template <int kMTiles, int kNTiles, int kGroups>
class Scaled {
    hk::Window x_, w_;
    u32 x_offset_[kMTiles], w_offset_[kNTiles];
    u32 x_group_, w_group_, x_shift_, w_shift_, end_;

public:
    static constexpr bool kScaled = true;
    struct Set {
        float x[kMTiles][kGroups], w[kNTiles][kGroups];
    };

    HK_FN Scaled(const BlockParams &p, const Work &work, u32 first_m, u32 first_n, u32 end)
        : x_(p.x_scale.first(work.batch), hk::Window::kBeyond - 1), w_(p.w_scale.first(work.matrix), hk::Window::kBeyond - 1),
          x_group_(p.x_scale.group), w_group_(p.w_scale.group), x_shift_(p.x_scale.group_shift),
          w_shift_(p.w_scale.group_shift), end_(end) {
#pragma unroll
        for (u32 i = 0; i < kMTiles; ++i) x_offset_[i] = p.x_scale.offset(first_m + 16 * i + hk::lane_id() % 16, p.x.rows);
#pragma unroll
        for (u32 i = 0; i < kNTiles; ++i) {
            w_offset_[i] = p.w_scale.offset(first_n + 16 * i + hk::lane_id() / 16 * hk::kMmaRows, p.w.rows);
        }
    }

    HK_FN Set load(u32 from) const {
        Set set;
#pragma unroll
        for (u32 g = 0; g < kGroups; ++g) {
            const u32 at = from + 128 * g;
            const u32 past = (end_ - 1u - at) & hk::Window::kBeyond;
#pragma unroll
            for (int i = 0; i < kMTiles; ++i) {
                set.x[i][g] = __builtin_bit_cast(float, x_.load<u32>(x_offset_[i] | past, (at >> x_shift_) * x_group_));
            }
#pragma unroll
            for (int i = 0; i < kNTiles; ++i) {
                set.w[i][g] = __builtin_bit_cast(float, w_.load<u32>(w_offset_[i] | past, (at >> w_shift_) * w_group_));
            }
        }
        return set;
    }
};

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes, bool kGated, class Params, class MakeScales>
HK_FN void skinny_gemm(const Params &given, MakeScales make_scales) {
    using Scales = decltype(make_scales(Work(0, 0), 0u, 0u, 0u));
    using Product = hk::Product<E>;
    using Part = typename Product::Acc;
    using Acc = decltype([] {
        if constexpr (Scales::kScaled) return Vec<float, hk::kMmaRows>();
        else return Part();
    }());
    constexpr int kFrags = Product::kFrags;
    constexpr u32 kM = 16 * kMTiles, kN = 16 * kNTiles, kThreads = kWaves * hk::kWaveSize;
    constexpr int kUnroll = kBytes / hk::kFragBytes;
    constexpr u32 kStretch = kBytes;
    using Number = decltype(Acc{}[0] + 0);

    // Where sums meet: by wave, then by row, padded such that lanes that write together meet no bank twice.
    constexpr u32 kPitch = kN + 4;
    __shared__ Number planes[kWaves][kM * kPitch];

    Work work(given.grid, hk::block_x());
    if (!work.find_matrix<kM>(given.epilogue.groups, given.x.rows)) return;
    {
        const Params &p = given;
        const u32 first_m = work.m_tile * kM, first_n = work.n_tile * kN;
        const auto [begin, end] = Range(p.grid, work.split);
        const Rows<kMTiles, kUnroll> x(p.x.at(work.batch, first_m), p.x.rows - first_m, p.x.layout, end, [](u32 row) { return row; });
        // With gates and values, half of the tiles' rows are gates, then come their values.
        const u32 first_w = kGated ? first_n / 2 : first_n;
        const Rows<kNTiles, kUnroll> w(p.w.at(work.matrix, first_w), p.w.rows - first_w, p.w.layout, end, [&](u32 row) {
            return kGated ? gated_row<kN>(row, first_w, p.w.rows) : row;
        });

        Acc acc[kMTiles][kNTiles] = {};
        const Scales scales = make_scales(work, first_m, first_w, end);
        struct Set {
            typename Rows<kMTiles, kUnroll>::Frags x;
            typename Rows<kNTiles, kUnroll>::Frags w;
            typename Scales::Set scales;
        };
        const auto load = [&](u32 from) { return Set{x.load(from), w.load(from), scales.load(from)}; };
        const auto multiply = [&](const Set &set) {
            // Fragments whose products are summed before they are scaled.
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
                            part = Product::mma(set.w.frag[n] + u, set.x.frag[m] + u, part);
                        }
                        if constexpr (Scales::kScaled) {
                            const float scale = set.scales.x[m][first / kTogether] * set.scales.w[n][first / kTogether];
                            acc[m][n] = __builtin_elementwise_fma(__builtin_convertvector(part, Acc), Acc(scale), acc[m][n]);
                        } else {
                            acc[m][n] = part;
                        }
                    }
                }
            }
        };
        // Two sets in turn, each loaded again as soon as it is multiplied; what lies past the end is zero.
        u32 from = begin + hk::wave_id() * kStretch;
        Set even = load(from);
        hk::stay_in_order();
        Set odd = load(from + kWaves * kStretch);
        hk::stay_in_order();
        while (from < end) {
            from += 2 * kWaves * kStretch;
            multiply(even);
            even = load(from);
            hk::stay_in_order();
            multiply(odd);
            odd = load(from + kWaves * kStretch);
            hk::stay_in_order();
        }
#pragma unroll
        for (u32 m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (u32 n = 0; n < kNTiles; ++n) {
                const u32 at = (16 * m + hk::lane_id() % 16) * kPitch + 16 * n + hk::lane_id() / 16 * hk::kMmaRows;
                *reinterpret_cast<Acc *>(planes[hk::wave_id()] + at) = acc[m][n];
            }
        }
    }
    hk::block_barrier();

    constexpr u32 kPart = 8, kCols = kGated ? kN / 2 : kN, kParts = kCols / kPart;
    const auto total = [&](u32 row, u32 col) {
        using Four = Vec<Number, 4>;
        Vec<Number, kPart> sum = Number(0);
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
            const auto *from = reinterpret_cast<const Four *>(planes[wave] + row * kPitch + col);
            sum += __builtin_shufflevector(from[0], from[1], 0, 1, 2, 3, 4, 5, 6, 7);
        }
        return __builtin_convertvector(sum, Vec<float, kPart>);
    };
#pragma unroll 1
    for (u32 i = hk::thread_x(); i < kM * kParts; i += kThreads) {
        const Params &p = hk::read_anew(given);
        const u32 row = i / kParts, col = i % kParts * kPart;
        const u32 m = work.m_tile * kM + row, n = work.n_tile * kCols + col;
        if constexpr (kGated) {
            finish_gated<kPart>(p.epilogue, work, m, n, total(row, col), total(row, kCols + col));
        } else {
            finish<kPart>(p, work, m, n, total(row, col));
        }
    }
}

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes, bool kGated>
HK_FN void skinny_gemm(const Params &p) {
    skinny_gemm<E, kMTiles, kNTiles, kWaves, kBytes, kGated>(p, [](const Work &, u32, u32, u32) { return Unscaled{}; });
}

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes>
HK_FN void skinny_block_gemm(const BlockParams &p) {
    skinny_gemm<E, kMTiles, kNTiles, kWaves, kBytes, false>(p, [&](const Work &work, u32 first_m, u32 first_n, u32 end) {
        return Scaled<kMTiles, kNTiles, kBytes / 128>(p, work, first_m, first_n, end);
    });
}

}  // namespace gemm
