// ff.hip: feed-forward layers of up to 64 rows.
//   h[m, i] = act(sum over k of x[m, k] w_up[i, k]) * sum over k of x[m, k] w_up[I + i, k]     rounded to the type of x
//           act(sum over k of x[m, k] w_up[i, k])                                          ungated
//   y[m, k] = sum over i of h[m, i] w_down[i, k]
//   x [M, K], w_up [2 I, K] or [I, K], w_down [I, K]: bf16 or f16. M up to 64.
//
// ff: both GEMMs in one launch. A block computes a slice of the columns of h into LDS, its waves sharing K (decode_loop of
// gemm/decode_gemm.h); then its waves take n tiles of 128 columns of y one after the other. A block's part of y is an f32 partial sum;
// gemm_reduce adds them in the order of the slices.
// ff_down: only the second GEMM. A block has an n tile of 128 columns of y and a slice of I, which its waves share. Their partial
// sums meet in LDS and go to the slice's partial sum of y, or to y if there is one slice.
//
// The K axis of the second GEMM is the row index of w_down: see gemm/operands/across.h.
// Each weight is read once. Floor: bytes of w_up and w_down; 6 M I K flops, or 4.
#include <gemm/operands/across.h>
#include <gemm/operands/plain.h>
#include <hk/entry.h>
#include <hk/wave_tile.h>

namespace {
using gemm::FragmentRows;
using hk::Frag;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

struct Params {
    u64 x, w_up, w_down;
    u64 h;  // ff_down only
    u64 y;  // f32 partial sums, or y
    i64 x_row, up_row, down_row, h_row;  // strides, in bytes
    i64 y_row, y_split;  // in elements
    u32 rows, width, columns;  // M, K, I
    u32 slice;  // columns of h per block
    u32 n_tiles;  // of 128 columns of y
    u32 activation;
    gemm::Float y_type;
    u32 vectors;  // rows of y are 16-byte aligned
};

using DownRows = gemm::AcrossRows;
template <class T, int kMTiles>
using DownAcc = gemm::AcrossAcc<T, kMTiles>;
/// Columns of y in an n tile, and rows of w_down per step.
constexpr u32 kTileCols = gemm::kAcrossCols, kStep = gemm::kAcrossStep;

/// Columns of h by rows of w_down, of an n tile.
template <class T, int kMTiles>
struct DownOperands {
    FragmentRows<kMTiles, 1> h;
    DownRows w;
    u32 n_tile;

    struct Stage {
        typename FragmentRows<kMTiles, 1>::Frags h;  // first: fewer registers
        DownRows::Stage w;
    };
    HK_FN Stage load(u32 from) const { return {h.load(from * 2), w.load(from, n_tile)}; }
    HK_FN static void multiply(DownAcc<T, kMTiles> &down, const Stage &stage) {
        Frag h[kMTiles];
#pragma unroll
        for (u32 m = 0; m < kMTiles; ++m) h[m] = stage.h.frag[m][0];
        down.add(stage.w, h);
    }
};

HK_FN GlobalPtr<const u8> bytes_at(u64 data, i64 offset) {
    return reinterpret_cast<GlobalPtr<const u8>>(data) + offset;
}

template <class T, int kMTiles, int kWaves, int kBytes, bool kGated>
HK_FN void ff(const Params &args) {
    constexpr u32 kM = 16 * kMTiles, kNTiles = 2, kN = 16 * kNTiles, kThreads = kWaves * hk::kWaveSize;
    constexpr int kUnroll = kBytes / hk::kFragBytes;
    constexpr u32 kChunk = kGated ? kN / 2 : kN;  // columns of h per pass
    constexpr u32 kSlice = 192;  // of a block, at most
    constexpr u32 kPitch = kN + 4;  // no bank conflicts between rows of partial sums
    constexpr u32 kHPitch = kSlice + 8;  // no bank conflicts between a fragment's rows
    struct Lds {
        alignas(16) float sums[kWaves][kM * kPitch];
        alignas(16) T h[kM * kHPitch];
    };
    auto &lds = hk::block_lds<Lds>();

    const u32 first = hk::block_x() * args.slice;
    const u32 left = args.columns - first;
    const u32 count = left < args.slice ? left : args.slice;
    const u32 steps = (count + kStep - 1) / kStep;

#pragma unroll 1
    for (u32 c = 0; c < count; c += kChunk) {
        {
            const Params &p = hk::reload_params(args);
            const u32 end = p.width * 2;
            const u32 first_w = first + c, rows = kGated ? 2 * p.columns : p.columns;
            const auto row_of_w = [&](u32 row) { return kGated ? gemm::gated_row<kN>(row, first_w, rows) : row; };
            const FragmentRows<kMTiles, kUnroll> x(bytes_at(p.x, 0), p.rows, hk::RowLayout::by_rows(p.x_row), end,
                                                   [](u32 row) { return row; });
            const FragmentRows<kNTiles, kUnroll> w(bytes_at(p.w_up, first_w * p.up_row), rows - first_w,
                                                   hk::RowLayout::by_rows(p.up_row), end, row_of_w);
            struct Stage {
                typename FragmentRows<kMTiles, kUnroll>::Frags of_x;
                typename FragmentRows<kNTiles, kUnroll>::Frags of_w;

                HK_FN Frag a(int m, int step) const { return of_x.frag[m][step]; }
                HK_FN Frag w(int n, int step) const { return of_w.frag[n][step]; }
            };
            hk::MmaAcc acc[kMTiles][kNTiles] = {};
            using Steps = gemm::KSteps<kWaves * kBytes>;
            gemm::decode_loop(
                Steps{hk::wave_id() * kBytes, end}, acc,
                // x first: fewer registers.
                [&](u32 at) { return Stage{x.load(at), w.load(at)}; },
                [](auto &acc, const Stage &stage, u32) { hk::mma_fragments<hk::FragMma<T>, kUnroll>(acc, stage); });
#pragma unroll
            for (u32 m = 0; m < kMTiles; ++m) {
#pragma unroll
                for (u32 n = 0; n < kNTiles; ++n) {
                    using Run = Vec<float, hk::kMmaRows>;
#pragma unroll
                    for (u32 i = 0; i < hk::kRowsPerLane; ++i) {
                        const u32 row = 16 * m + hk::row_of_lane(hk::lane_id(), i);
                        const u32 col = 16 * n + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows;
                        *reinterpret_cast<Run *>(lds.sums[hk::wave_id()] + row * kPitch + col) =
                            reinterpret_cast<const Run *>(&acc[m][n])[i];
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
        const u32 activation = hk::reload_params(args).activation;
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < kM * (kChunk / 8); i += kThreads) {
            const u32 row = i / (kChunk / 8), col = i % (kChunk / 8) * 8;
            Vec<float, 8> v = gemm::activate<8>(activation, total(row, col));
            if constexpr (kGated) v *= total(row, kChunk + col);
            *reinterpret_cast<Vec<T, 8> *>(lds.h + row * kHPitch + c + col) = hk::narrow<T, 8>(v);
        }
        hk::block_barrier();
    }
    // Columns of h past the slice, up to a whole step, are zero.
    for (u32 i = hk::thread_x(); i < kM; i += kThreads) {
        for (u32 col = (count + kChunk - 1) / kChunk * kChunk; col < steps * kStep; col += 8) {
            *reinterpret_cast<Vec<T, 8> *>(lds.h + i * kHPitch + col) = T(0.0f);
        }
    }
    hk::block_barrier();

    const Params &p = hk::reload_params(args);
    const DownRows w(bytes_at(p.w_down, first * p.down_row), u32(p.down_row), count, p.width);
    // A wave's n tiles, step by step.
    struct Cursor {
        u32 n_tile, step, steps, n_tiles;

        HK_FN bool valid() const { return n_tile < n_tiles; }
        HK_FN Cursor operator*() const { return *this; }
        HK_FN Cursor next() const {
            return step + 1 < steps ? Cursor{n_tile, step + 1, steps, n_tiles}
                                    : Cursor{n_tile + kWaves, 0, steps, n_tiles};
        }
    };
    DownAcc<T, kMTiles> down;
    const auto multiply = [&](auto &down, const DownRows::Stage &stage, const Cursor &at) {
        Frag h[kMTiles];
#pragma unroll
        for (u32 m = 0; m < kMTiles; ++m) {
            h[m] = hk::joined(hk::per_row([&](u32 i) {
                const T *row = lds.h + (16 * m + hk::row_of_lane(hk::lane_id(), i)) * kHPitch;
                return *reinterpret_cast<const Vec<u32, 4> *>(row + at.step * kStep +
                                                              hk::group_of_lane(hk::lane_id()) * 8);
            }));
        }
        down.add(stage, h);
        if (at.step + 1 < steps) return;
        const Params &p = hk::reload_params(args);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const i64 split = i64(hk::block_x()) * p.y_split;
            down.each(m, [&](u32 of_tile, u32 col, Vec<float, 8> part) {
                const u32 row = 16 * m + of_tile;
                col += at.n_tile * kTileCols;
                if (row >= p.rows || col >= p.width) return;
                gemm::store_floats<float, 8>(p.y, split + i64(row) * p.y_row + col, part, 8, true);
            });
        }
        down = {};
    };
    gemm::decode_loop(
        Cursor{hk::wave_id(), 0, steps, args.n_tiles}, down,
        [&](const Cursor &at) { return w.load(at.step * kStep, at.n_tile); }, multiply);
}

template <class T, int kMTiles, int kWaves>
HK_FN void ff_down(const Params &args) {
    constexpr u32 kThreads = kWaves * hk::kWaveSize, kPitch = kTileCols + 4;
    __shared__ alignas(16) float partials[kWaves][16 * kPitch];

    const u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());
    const u32 part = task / args.n_tiles, n_tile = task - part * args.n_tiles;
    DownAcc<T, kMTiles> down;
    {
        const Params &p = args;
        const u32 first = part * p.slice, left = p.columns - first;
        const u32 count = left < p.slice ? left : p.slice;
        const FragmentRows<kMTiles, 1> h(bytes_at(p.h, i64(first) * 2), p.rows, hk::RowLayout::by_rows(p.h_row),
                                         count * 2, [](u32 row) { return row; });
        const DownRows w(bytes_at(p.w_down, first * p.down_row), u32(p.down_row), count, p.width);
        const DownOperands<T, kMTiles> operands{h, w, n_tile};
        const gemm::KSteps<kWaves * kStep> steps{hk::wave_id() * kStep, count};
        for (gemm::DecodeStages stages(operands, steps); stages.at.valid();) stages.multiply(operands, down);
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        // All waves have read the previous M tile.
        hk::block_barrier();
        down.each(m, [&](u32 row, u32 col, Vec<float, 8> v) {
            auto *to = reinterpret_cast<Vec<float, 4> *>(partials[hk::wave_id()] + row * kPitch + col);
            to[0] = v.lo;
            to[1] = v.hi;
        });
        hk::block_barrier();
#pragma unroll 1
        for (u32 i = hk::thread_x(); i < 16 * kTileCols / 8; i += kThreads) {
            const Params &p = hk::reload_params(args);
            const u32 row = 16 * m + i / (kTileCols / 8), col = i % (kTileCols / 8) * 8, at = n_tile * kTileCols + col;
            if (row >= p.rows || at >= p.width) continue;
            Vec<float, 8> sum = 0.0f;
#pragma unroll
            for (int wave = 0; wave < kWaves; ++wave) {
                const auto *from =
                    reinterpret_cast<const Vec<float, 4> *>(partials[wave] + i / (kTileCols / 8) * kPitch + col);
                sum += __builtin_shufflevector(from[0], from[1], 0, 1, 2, 3, 4, 5, 6, 7);
            }
            const i64 to = i64(part) * p.y_split + i64(row) * p.y_row + at;
            const u32 left = p.width - at;
            if (p.y_type == gemm::Float::F32)
                gemm::store_floats<float, 8>(p.y, to, sum, left, p.vectors);
            else
                gemm::store_floats<T, 8>(p.y, to, sum, left, p.vectors);
        }
    }
}
}  // namespace

// Entry points of one dtype: rows up to 16, 32, 64; waves, bytes of K per step.
#define FF_ROWS(T, rows, tiles, waves, bytes)                                                     \
    HK_ENTRY(ff_##T##_##rows##_gated, waves *hk::kWaveSize, ff<hk::T, tiles, waves, bytes, true>) \
    HK_ENTRY(ff_##T##_##rows, waves *hk::kWaveSize, ff<hk::T, tiles, waves, bytes, false>)        \
    HK_ENTRY(ff_down_##T##_##rows, 4 * hk::kWaveSize, ff_down<hk::T, tiles, 4>)
#define FF(T)                 \
    FF_ROWS(T, 16, 1, 8, 256) \
    FF_ROWS(T, 32, 2, 8, 128) \
    FF_ROWS(T, 64, 4, 4, 128)

FF(bf16)
FF(f16)
