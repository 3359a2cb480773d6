// skinny.h: products of few rows x, bound by reading w.
//   A block makes 16 kMTiles x 16 kNTiles sums. Its waves share K: wave i takes every kWaves-th stretch of kBytes of each row,
//   from global memory to registers, two stretches ahead of the products. So each weight is read once, by one wave, and a
//   wave has up to 32 (kMTiles + kNTiles) kBytes of loads on their way. The waves' sums meet in LDS, in their order, as many
//   rows at a time as fit 16 KiB: LDS does not bound how many blocks a CU holds.
#pragma once

#include <hk/block.h>
#include <hk/mma.h>
#include <hk/pipeline.h>

#include "epilogue.h"
#include "problem.h"

namespace gemm {
using hk::Frag;

/// Waves of a block that share K, but of blocks of 64 rows, and bytes of a row in the stretch that a wave takes at a time, if its
/// block has 16 rows, or more. In a wave of half as many lanes, each needs twice the registers for a stretch. On an H200, 4 waves
/// and 128 bytes are the best for 16 rows; but of blocks so few that an SM has one or two, twice as many waves.
inline constexpr int kSharing = 8 / hk::kLaneRows, kTwiceSharing = 2 * kSharing;
inline constexpr int kLongStretch = 256 / hk::kLaneRows, kShortStretch = kLongStretch / 2, kTwiceStretch = 128;

/// What a wave reads of 16 kTiles rows. `kOnce`: no other wave reads them.
template <int kTiles, int kUnroll, bool kOnce = false>
class Rows {
    hk::Window window_;
    u32 end_;  // of a row, in bytes
    u32 spread_;
    u32 offset_[kTiles][hk::kLaneRows];

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
#pragma unroll
            for (u32 r = 0; r < hk::kLaneRows; ++r) {
                const u32 row = row_of(16 * i + hk::row_of_lane(hk::lane_id(), r));
                offset_[i][r] = row < rows ? layout.window_offset(row) + (ahead() << spread_) : hk::Window::kBeyond;
            }
        }
    }

    HK_FN Frags load(u32 from) const {
        Frags frags;
#pragma unroll
        for (u32 u = 0; u < kUnroll; ++u) {
            // The sign of what is left of the row moves the offset beyond the window.
            const u32 at = from + u * hk::kFragBytes;
            const u32 past = (end_ - 1u - (at + ahead())) & hk::Window::kBeyond;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const auto chunk = [&](u32 r) {
                    if constexpr (kOnce) return window_.load_once(offset_[i][r] | past, at << spread_);
                    else return window_.template load<Vec<u32, 4>>(offset_[i][r] | past, at << spread_);
                };
                frags.frag[i][u] = hk::joined(hk::of_rows(chunk));
            }
        }
        return frags;
    }

private:
    /// Where the lane's bytes of a fragment begin.
    HK_FN static u32 ahead() { return hk::group_of_lane(hk::lane_id()) * 16; }
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
    u32 x_offset_[kMTiles][hk::kLaneRows], w_offset_[kNTiles];
    u32 x_group_, w_group_, x_shift_, w_shift_, end_;

public:
    static constexpr bool kScaled = true;
    struct Set {
        Vec<float, hk::kLaneRows> x[kMTiles][kGroups];
        float w[kNTiles][kGroups];
    };

    HK_FN Scaled(const BlockParams &p, const Work &work, u32 first_m, u32 first_n, u32 end)
        : x_(p.x_scale.first(work.batch), hk::Window::kBeyond - 1), w_(p.w_scale.first(work.matrix), hk::Window::kBeyond - 1),
          x_group_(p.x_scale.group), w_group_(p.w_scale.group), x_shift_(p.x_scale.group_shift),
          w_shift_(p.w_scale.group_shift), end_(end) {
#pragma unroll
        for (u32 i = 0; i < kMTiles; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kLaneRows; ++r) {
                x_offset_[i][r] = p.x_scale.offset(first_m + 16 * i + hk::row_of_lane(hk::lane_id(), r), p.x.rows);
            }
        }
#pragma unroll
        for (u32 i = 0; i < kNTiles; ++i) {
            w_offset_[i] = p.w_scale.offset(first_n + 16 * i + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows, p.w.rows);
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
#pragma unroll
                for (u32 r = 0; r < hk::kLaneRows; ++r) {
                    set.x[i][g][r] = __builtin_bit_cast(float, x_.load<u32>(x_offset_[i][r] | past, (at >> x_shift_) * x_group_));
                }
            }
#pragma unroll
            for (int i = 0; i < kNTiles; ++i) {
                set.w[i][g] = __builtin_bit_cast(float, w_.load<u32>(w_offset_[i] | past, (at >> w_shift_) * w_group_));
            }
        }
        return set;
    }
};

/// What a wave loads of a stretch of K, `kBytes` of each row of x, and how it multiplies it: operands as they are.
template <class E, int kMTiles_, int kNTiles_, int kBytes, class Scales>
struct PlainSource {
    using Product = hk::Product<E>;
    using Part = typename Product::Acc;
    using Acc = decltype([] {
        if constexpr (Scales::kScaled) return hk::MmaAcc();
        else return Part();
    }());
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_;
    static constexpr u32 kStretch = kBytes;
    static constexpr int kUnroll = kBytes / hk::kFragBytes, kFrags = Product::kFrags;
    using X = Rows<kMTiles, kUnroll>;
    using W = Rows<kNTiles, kUnroll, true>;

    X x;
    W w;
    Scales scales;

    struct Set {
        typename W::Frags w;  // first, as it is the farthest
        typename X::Frags x;
        typename Scales::Set scales;
    };
    HK_FN Set load(u32 from) const { return {w.load(from), x.load(from), scales.load(from)}; }

    HK_FN static void multiply(Acc (&acc)[kMTiles][kNTiles], const Set &set) {
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
                        const Acc scale = hk::by_m(set.scales.x[m][first / kTogether] * set.scales.w[n][first / kTogether]);
                        acc[m][n] = __builtin_elementwise_fma(__builtin_convertvector(part, Acc), scale, acc[m][n]);
                    } else {
                        acc[m][n] = part;
                    }
                }
            }
        }
    }
};

/// Where sums of kWaves waves meet, of some tiles of M at a time.
template <class Source, int kWaves>
struct SkinnyLds {
    using Number = decltype(typename Source::Acc{}[0] + 0);
    static constexpr u32 kTogether = kWaves < 8 && Source::kMTiles > 1 ? 2 : 1;
    static_assert(Source::kMTiles % kTogether == 0, "all rounds alike");
    Strip<Number, 16 * Source::kNTiles, 16 * kTogether> strips[kWaves];
};

/// Sums of the block, one source for each wave: `make_source(p, work, first_m, first_w, end)`, w's rows from `first_w` on, x's
/// rows ending with byte `end`.
template <class Source, int kWaves, bool kGated, class Params, class Site, class MakeSource>
HK_FN void skinny_gemm(const Params &given, const Site &site, MakeSource make_source) {
    using Acc = typename Source::Acc;
    constexpr int kMTiles = Source::kMTiles, kNTiles = Source::kNTiles;
    constexpr u32 kM = 16 * kMTiles, kN = 16 * kNTiles, kThreads = kWaves * hk::kWaveSize;
    constexpr u32 kStretch = Source::kStretch;
    using Lds = SkinnyLds<Source, kWaves>;
    using Number = typename Lds::Number;
    constexpr u32 kTogether = Lds::kTogether;
    auto &strips = site.template lds<Lds>().strips;

    Work work(given.grid, site.block());
    if (!work.find_matrix<kM>(given.epilogue.groups, given.x.rows)) return;
    Acc acc[kMTiles][kNTiles] = {};
    {
        const auto [begin, end] = Range(given.grid, work.split);
        // With gates and values, half of the tiles' rows are gates, then come their values.
        const u32 first_n = work.n_tile * kN;
        const Source source = make_source(given, work, work.m_tile * kM, kGated ? first_n / 2 : first_n, end);
        // Two sets in turn, each loaded again as soon as it is multiplied; what lies past the end is zero.
        u32 from = begin + hk::wave_id() * kStretch;
        typename Source::Set even = source.load(from);
        hk::stay_in_order();
        typename Source::Set odd = source.load(from + kWaves * kStretch);
        hk::stay_in_order();
        while (from < end) {
            from += 2 * kWaves * kStretch;
            source.multiply(acc, even);
            even = source.load(from);
            hk::stay_in_order();
            source.multiply(acc, odd);
            odd = source.load(from + kWaves * kStretch);
            hk::stay_in_order();
        }
        if constexpr (requires { Source::kSumUnit; }) in_units(acc, Source::kSumUnit);
    }

    constexpr u32 kCols = kGated ? kN / 2 : kN, kParts = kCols / kPart;
    const auto total = [&](u32 row, u32 col) {
        Vec<Number, kPart> sum = Number(0);
#pragma unroll 8
        for (int wave = 0; wave < kWaves; ++wave) sum += strips[wave].get(row, col);
        return __builtin_convertvector(sum, Vec<float, kPart>);
    };
#pragma unroll 1
    for (u32 first = 0; first < kMTiles; first += kTogether) {
        if (first > 0) hk::block_barrier();
#pragma unroll
        for (u32 m = 0; m < kMTiles; ++m) {
            // One copy of what follows, whatever the tiles.
            if (m / kTogether * kTogether == first) strips[hk::wave_id()].put(m % kTogether * 16, acc[m]);
        }
        hk::block_barrier();
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < 16 * kTogether * kParts; i += kThreads) {
            const Params &p = site.anew(given);
            const u32 row = i / kParts, col = i % kParts * kPart;
            const u32 m = work.m_tile * kM + 16 * first + row, n = work.n_tile * kCols + col;
            if constexpr (kGated) {
                finish_gated<kPart>(p.epilogue, work, m, n, total(row, col), total(row, kCols + col));
            } else {
                finish<kPart>(p, work, m, n, total(row, col));
            }
        }
    }
}

/// The rows of x and w that a block has, in order; of w, with gates, half of them, then their values.
template <class Source, bool kGated, class Params, class Scales>
HK_FN Source plain_source(const Params &p, const Work &work, u32 first_m, u32 first_w, u32 end, const Scales &scales) {
    constexpr u32 kN = 16 * Source::kNTiles;
    const auto row_of_w = [&](u32 row) { return kGated ? gated_row<kN>(row, first_w, p.w.rows) : row; };
    return {{p.x.at(work.batch, first_m), p.x.rows - first_m, p.x.layout, end, [](u32 row) { return row; }},
            {p.w.at(work.matrix, first_w), p.w.rows - first_w, p.w.layout, end, row_of_w},
            scales};
}

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes, bool kGated, class Site = Alone>
HK_FN void skinny_gemm(const Params &given, const Site &site = {}) {
    using Source = PlainSource<E, kMTiles, kNTiles, kBytes, Unscaled>;
    skinny_gemm<Source, kWaves, kGated>(given, site, [](const Params &p, const Work &work, u32 first_m, u32 first_w, u32 end) {
        return plain_source<Source, kGated>(p, work, first_m, first_w, end, Unscaled{});
    });
}

/// A source of products with scales of blocks.
template <class E, int kMTiles, int kNTiles, int kBytes>
using BlockSource = PlainSource<E, kMTiles, kNTiles, kBytes, Scaled<kMTiles, kNTiles, kBytes / 128>>;

template <class E, int kMTiles, int kNTiles, int kWaves, int kBytes, class Site = Alone>
HK_FN void skinny_block_gemm(const BlockParams &given, const Site &site = {}) {
    using Source = BlockSource<E, kMTiles, kNTiles, kBytes>;
    using Scales = decltype(Source::scales);
    const auto make = [](const BlockParams &p, const Work &work, u32 first_m, u32 first_w, u32 end) {
        return plain_source<Source, false>(p, work, first_m, first_w, end, Scales(p, work, first_m, first_w, end));
    };
    skinny_gemm<Source, kWaves, false>(given, site, make);
}

}  // namespace gemm
