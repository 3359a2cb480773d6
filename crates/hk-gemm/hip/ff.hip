// ff.hip: feed-forward layers of few rows.
//   h[m, i] = act(sum over k of x[m, k] w_up[i, k]) * sum over k of x[m, k] w_up[I + i, k]     rounded to the type of x
//             act(sum over k of x[m, k] w_up[i, k])                                          without gates
//   y[m, k] = sum over i of h[m, i] w_down[i, k]
//   x [M, K], w_up [2 I, K] or [I, K], w_down [I, K]: bf16 or f16. M up to 64.
//
// ff: both products. A block has a slice of the columns of h, which stays in LDS: first as in skinny.h, its waves sharing K; then
// the waves take strips of 128 columns of y. Each block writes its part of y as an f32 plane; gemm_reduce sums them, in the
// order of the slices.
// ff_down: the second product alone. A block has a strip of 128 columns of y and a part of I, which its waves share; their sums
// meet in LDS, and go to the plane of the part, or if there is one part, to y.
//
// Rows of w_down are the axis that is summed over, and are not contiguous along it: a lane loads 8 columns of 8 rows, and
// transposes them in registers to fragments of 8 columns (hk::column_of), whose sums are 8 neighbouring outputs again.
// Each weight is read once. Floor: bytes of w_up and w_down; 6 M I K flops, or 4.
#include <hk/entry.h>
#include <hk/transpose.h>

#include "skinny.h"

namespace {
using gemm::Rows;
using hk::Frag;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

struct Params {  // same layout as `Params` in src/ff.rs
    u64 x, w_up, w_down;
    u64 h;                               // of ff_down
    u64 y;                               // f32 planes, or y
    i64 x_row, up_row, down_row, h_row;  // strides, in bytes
    i64 y_row, y_plane;                  // in elements
    u32 rows, width, columns;            // M, K, I
    u32 slice;                           // columns of h of a block
    u32 strips;                          // of 128 columns of y
    u32 activation;
    gemm::Float y_type;
    u32 vectors;  // rows of y begin on 16 bytes
};

/// Columns of y in a strip, and rows of w_down in a step.
constexpr u32 kStrip = 128, kStep = hk::kFragBytes / 2;
/// Columns of y that a lane has sums of: 8 for each row of an accumulator.
constexpr u32 kColumns = 8;

/// Rows of w_down.
class DownRows {
    hk::Window window_;
    u32 stride_, end_, bytes_, offset_[hk::kLaneRows];

    /// The first of the lane's 8 rows of a step, and its bytes of strip 0 for each row of a fragment.
    HK_FN static u32 row() { return hk::group_of_lane(hk::lane_id()) * 8; }
    HK_FN static u32 byte(u32 i) { return hk::row_of_lane(hk::lane_id(), i) * 16; }

public:
    struct Set {
        Vec<u32, 4> row[hk::kLaneRows][8];
    };

    /// `end` rows from `first` on, of `width` columns.
    HK_FN DownRows(GlobalPtr<const u8> first, u32 stride, u32 end, u32 width)
        : window_(first, hk::Window::kBeyond - 1), stride_(stride), end_(end), bytes_(width * 2) {
#pragma unroll
        for (u32 i = 0; i < hk::kLaneRows; ++i) offset_[i] = row() * stride + byte(i);
    }

    /// The lane's columns of strip `strip`, 8 and 8, of 8 of the kStep rows from `from` on.
    HK_FN Set load(u32 from, u32 strip) const {
        const u32 at = strip * (kStrip * 2);
        // The sign of what is left moves the offset beyond the window.
        const u32 rows_left = end_ - 1u - (from + row());
        Set set;
#pragma unroll
        for (u32 i = 0; i < hk::kLaneRows; ++i) {
            const u32 bytes_left = bytes_ - 1u - (at + byte(i));
            const u32 past = (rows_left | bytes_left) & hk::Window::kBeyond;
#pragma unroll
            for (u32 r = 0; r < 8; ++r) set.row[i][r] = window_.load<Vec<u32, 4>>(offset_[i] | past, (from + r) * stride_ + at);
        }
        return set;
    }
};

/// A wave's sums of a strip: fragment j has columns j, 8 + j, 16 + j ..
template <class T, int kMTiles>
struct StripSums {
    hk::MmaAcc acc[kMTiles][kColumns] = {};

    HK_FN void add(const DownRows::Set &set, const Frag (&h)[kMTiles]) {
#pragma unroll
        for (u32 j = 0; j < kColumns; ++j) {
            const Frag w = hk::joined(hk::of_rows([&](u32 i) { return hk::column_of(set.row[i], j); }));
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) acc[m][j] = hk::Product<T>::mma(&w, &h[m], acc[m][j]);
        }
    }

    /// Calls `part(row, col, sums)` for each 8 columns that the lane has of a row of a tile of 16.
    template <class F>
    HK_FN void each(int tile, F part) const {
        const u32 lane = hk::lane_id();
#pragma unroll
        for (u32 i = 0; i < hk::kLaneRows * hk::kMmaRows; ++i) {
            Vec<float, 8> sums;
#pragma unroll
            for (u32 j = 0; j < kColumns; ++j) sums[j] = acc[tile][j][i];
            part(hk::Sums<16>::m(lane, i), hk::Sums<16>::n(lane, i) * kColumns, sums);
        }
    }
};

HK_FN GlobalPtr<const u8> bytes_at(u64 data, i64 offset) { return reinterpret_cast<GlobalPtr<const u8>>(data) + offset; }

template <class T, int kMTiles, int kWaves, int kBytes, bool kGated>
HK_FN void ff(const Params &given) {
    constexpr u32 kM = 16 * kMTiles, kNTiles = 2, kN = 16 * kNTiles, kThreads = kWaves * hk::kWaveSize;
    constexpr int kUnroll = kBytes / hk::kFragBytes;
    constexpr u32 kChunk = kGated ? kN / 2 : kN;      // columns of h that are made at a time
    constexpr u32 kSlice = 192;                       // of a block, at most
    constexpr u32 kPitch = kN + 4, kHPitch = kSlice + 8;  // rows of a fragment are on different banks
    struct Lds {
        float sums[kWaves][kM * kPitch];
        alignas(16) T h[kM * kHPitch];
    };
    auto &lds = hk::block_lds<Lds>();

    const u32 first = hk::block_x() * given.slice;
    const u32 left = given.columns - first;
    const u32 count = left < given.slice ? left : given.slice;
    const u32 steps = (count + kStep - 1) / kStep;

#pragma unroll 1
    for (u32 c = 0; c < count; c += kChunk) {
        {
            const Params &p = hk::read_anew(given);
            const u32 end = p.width * 2;
            const Rows<kMTiles, kUnroll> x(bytes_at(p.x, 0), p.rows, hk::RowLayout::by_rows(p.x_row), end, [](u32 row) { return row; });
            const u32 first_w = first + c, rows = kGated ? 2 * p.columns : p.columns;
            const Rows<kNTiles, kUnroll> w(bytes_at(p.w_up, first_w * p.up_row), rows - first_w, hk::RowLayout::by_rows(p.up_row), end,
                                           [&](u32 row) { return kGated ? gemm::gated_row<kN>(row, first_w, rows) : row; });
            hk::MmaAcc acc[kMTiles][kNTiles] = {};
            struct Set {
                typename Rows<kMTiles, kUnroll>::Frags x;
                typename Rows<kNTiles, kUnroll>::Frags w;
            };
            const auto load = [&](u32 from) { return Set{x.load(from), w.load(from)}; };
            const auto multiply = [&](const Set &set) {
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
                    for (u32 m = 0; m < kMTiles; ++m) {
#pragma unroll
                        for (u32 n = 0; n < kNTiles; ++n) {
                            acc[m][n] = hk::Product<T>::mma(set.w.frag[n] + u, set.x.frag[m] + u, acc[m][n]);
                        }
                    }
                }
            };
            // Two sets in turn, each loaded again as soon as it is multiplied; what lies past the end is zero.
            u32 from = hk::wave_id() * kBytes;
            Set even = load(from);
            hk::stay_in_order();
            Set odd = load(from + kWaves * kBytes);
            hk::stay_in_order();
            while (from < end) {
                from += 2 * kWaves * kBytes;
                multiply(even);
                even = load(from);
                hk::stay_in_order();
                multiply(odd);
                odd = load(from + kWaves * kBytes);
                hk::stay_in_order();
            }
#pragma unroll
            for (u32 m = 0; m < kMTiles; ++m) {
#pragma unroll
                for (u32 n = 0; n < kNTiles; ++n) {
                    using Run = Vec<float, hk::kMmaRows>;
#pragma unroll
                    for (u32 i = 0; i < hk::kLaneRows; ++i) {
                        const u32 row = 16 * m + hk::row_of_lane(hk::lane_id(), i);
                        const u32 col = 16 * n + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows;
                        *reinterpret_cast<Run *>(lds.sums[hk::wave_id()] + row * kPitch + col) = reinterpret_cast<const Run *>(&acc[m][n])[i];
                    }
                }
            }
        }
        hk::block_barrier();
        const auto total = [&](u32 row, u32 col) {
            Vec<float, 8> sum = 0.0f;
#pragma unroll
            for (int wave = 0; wave < kWaves; ++wave) {
                const auto *from = reinterpret_cast<const Vec<float, 4> *>(lds.sums[wave] + row * kPitch + col);
                sum += __builtin_shufflevector(from[0], from[1], 0, 1, 2, 3, 4, 5, 6, 7);
            }
            return sum;
        };
        const u32 activation = hk::read_anew(given).activation;
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < kM * (kChunk / 8); i += kThreads) {
            const u32 row = i / (kChunk / 8), col = i % (kChunk / 8) * 8;
            Vec<float, 8> v = gemm::activate<8>(activation, total(row, col));
            if constexpr (kGated) v *= total(row, kChunk + col);
            *reinterpret_cast<Vec<T, 8> *>(lds.h + row * kHPitch + c + col) = hk::narrow<T, 8>(v);
        }
        hk::block_barrier();
    }
    // The columns that fill the last step meet rows of zeros.
    for (u32 i = hk::thread_x(); i < kM; i += kThreads) {
        for (u32 col = (count + kChunk - 1) / kChunk * kChunk; col < steps * kStep; col += 8) {
            *reinterpret_cast<Vec<T, 8> *>(lds.h + i * kHPitch + col) = T(0.0f);
        }
    }
    hk::block_barrier();

    const Params &p = hk::read_anew(given);
    const DownRows w(bytes_at(p.w_down, first * p.down_row), u32(p.down_row), count, p.width);
    // A wave's strips, step by step, two sets of rows in turn.
    struct Place {
        u32 strip, step;
    };
    const auto after = [&](Place at) {
        return at.step + 1 < steps ? Place{at.strip, at.step + 1} : Place{at.strip + kWaves, 0};
    };
    StripSums<T, kMTiles> sums;
    const auto take = [&](const DownRows::Set &set, Place at) {
        Frag h[kMTiles];
#pragma unroll
        for (u32 m = 0; m < kMTiles; ++m) {
            h[m] = hk::joined(hk::of_rows([&](u32 i) {
                const T *row = lds.h + (16 * m + hk::row_of_lane(hk::lane_id(), i)) * kHPitch;
                return *reinterpret_cast<const Vec<u32, 4> *>(row + at.step * kStep + hk::group_of_lane(hk::lane_id()) * 8);
            }));
        }
        sums.add(set, h);
        if (at.step + 1 < steps) return;
        const Params &p = hk::read_anew(given);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const i64 plane = i64(hk::block_x()) * p.y_plane;
            sums.each(m, [&](u32 of_tile, u32 col, Vec<float, 8> part) {
                const u32 row = 16 * m + of_tile;
                col += at.strip * kStrip;
                if (row >= p.rows || col >= p.width) return;
                gemm::store_floats<float, 8>(p.y, plane + i64(row) * p.y_row + col, part, 8, true);
            });
        }
        sums = {};
    };
    Place now{hk::wave_id(), 0}, next = after(now);
    DownRows::Set even = w.load(now.step * kStep, now.strip);
    hk::stay_in_order();
    DownRows::Set odd = w.load(next.step * kStep, next.strip);
    hk::stay_in_order();
    while (now.strip < given.strips) {
        take(even, now);
        now = after(next);
        even = w.load(now.step * kStep, now.strip);
        hk::stay_in_order();
        take(odd, next);
        next = after(now);
        odd = w.load(next.step * kStep, next.strip);
        hk::stay_in_order();
    }
}

template <class T, int kMTiles, int kWaves>
HK_FN void ff_down(const Params &given) {
    constexpr u32 kThreads = kWaves * hk::kWaveSize, kPitch = kStrip + 4;
    __shared__ float planes[kWaves][16 * kPitch];

    const u32 task = hk::by_xcd(hk::block_x(), hk::grid_x());
    const u32 part = task / given.strips, strip = task - part * given.strips;
    StripSums<T, kMTiles> sums;
    {
        const Params &p = given;
        const u32 first = part * p.slice, left = p.columns - first;
        const u32 count = left < p.slice ? left : p.slice;
        const Rows<kMTiles, 1> h(bytes_at(p.h, i64(first) * 2), p.rows, hk::RowLayout::by_rows(p.h_row), count * 2, [](u32 row) { return row; });
        const DownRows w(bytes_at(p.w_down, first * p.down_row), u32(p.down_row), count, p.width);
        struct Set {
            typename Rows<kMTiles, 1>::Frags h;
            DownRows::Set w;
        };
        const auto load = [&](u32 row) { return Set{h.load(row * 2), w.load(row, strip)}; };
        const auto multiply = [&](const Set &set) {
            Frag h[kMTiles];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) h[m] = set.h.frag[m][0];
            sums.add(set.w, h);
        };
        u32 row = hk::wave_id() * kStep;
        Set even = load(row);
        hk::stay_in_order();
        Set odd = load(row + kWaves * kStep);
        hk::stay_in_order();
        while (row < count) {
            row += 2 * kWaves * kStep;
            multiply(even);
            even = load(row);
            hk::stay_in_order();
            multiply(odd);
            odd = load(row + kWaves * kStep);
            hk::stay_in_order();
        }
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        // What was read of the tile before is no longer needed.
        hk::block_barrier();
        sums.each(m, [&](u32 row, u32 col, Vec<float, 8> v) {
            auto *to = reinterpret_cast<Vec<float, 4> *>(planes[hk::wave_id()] + row * kPitch + col);
            to[0] = v.lo;
            to[1] = v.hi;
        });
        hk::block_barrier();
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < 16 * kStrip / 8; i += kThreads) {
            const Params &p = hk::read_anew(given);
            const u32 row = 16 * m + i / (kStrip / 8), col = i % (kStrip / 8) * 8, at = strip * kStrip + col;
            if (row >= p.rows || at >= p.width) continue;
            Vec<float, 8> sum = 0.0f;
#pragma unroll
            for (int wave = 0; wave < kWaves; ++wave) {
                const auto *from = reinterpret_cast<const Vec<float, 4> *>(planes[wave] + i / (kStrip / 8) * kPitch + col);
                sum += __builtin_shufflevector(from[0], from[1], 0, 1, 2, 3, 4, 5, 6, 7);
            }
            const i64 to = i64(part) * p.y_plane + i64(row) * p.y_row + at;
            const u32 left = p.width - at;
            if (p.y_type == gemm::Float::F32) gemm::store_floats<float, 8>(p.y, to, sum, left, p.vectors);
            else gemm::store_floats<T, 8>(p.y, to, sum, left, p.vectors);
        }
    }
}
}  // namespace

// Entry points of one type: rows up to 16, 32, 64; waves, bytes of a row of K in a stretch.
#define FF_ROWS(T, rows, tiles, waves, bytes)                                                     \
    HK_ENTRY(ff_##T##_##rows##_gated, waves * hk::kWaveSize, ff<hk::T, tiles, waves, bytes, true>)  \
    HK_ENTRY(ff_##T##_##rows, waves * hk::kWaveSize, ff<hk::T, tiles, waves, bytes, false>)         \
    HK_ENTRY(ff_down_##T##_##rows, 4 * hk::kWaveSize, ff_down<hk::T, tiles, 4>)
#define FF(T)                    \
    FF_ROWS(T, 16, 1, 8, 256)    \
    FF_ROWS(T, 32, 2, 8, 128)    \
    FF_ROWS(T, 64, 4, 4, 128)

FF(bf16)
FF(f16)
