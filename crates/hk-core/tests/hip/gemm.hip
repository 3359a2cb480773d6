// gemm.hip: y[m, n] = sum over k of x[m, k] w[n, k]      bf16, f32 sums, one rounding
//   x [M, K], w [N, K], y [M, N]  rows on 16 bytes, unit stride on their elements; K and N multiples of 8, any M
// A block of 2 x 2 waves makes a tile of 128 x 128 of y. It walks along K in stages of 32 columns of x's rows and of w's, which
// are prefetched to LDS; past the last row or column they are zero. A wave's sums, 64 x 64, are in its registers.
// Floor: 2 M N K operations; (M K + N K + M N) 2 bytes.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/shared.h>
#include <hk/wave_tile.h>

namespace {
using hk::bf16;
using hk::u32;

struct Params {  // same fields, same order as `Params` in tests/tile/gemm.rs
    hk::Global x, w, y;
};

constexpr int kTile = 128, kWave = 64, kBytes = 64;
constexpr int kThreads = 4 * hk::kWaveSize;
using Tile = hk::SharedTile<kTile, kBytes>;
using Mover = hk::Mover<Tile, kThreads, hk::Access::Vectorized, sizeof(bf16)>;
// On the target whose loads go straight to LDS, five stages; else two, and two in registers.
using Pipeline = hk::Pipeline<Mover, Mover, hk::NoScales, 5, 1>;

struct Sums {
    u32 wave_m, wave_n;  // the wave's place in the tile
    hk::WaveTile<hk::FragMma<bf16>, kWave, kWave> d;

    template <int>
    HK_FN void multiply(const auto &step) {
        d.multiply(*step.w[0], wave_n, *step.a[0], wave_m);
    }
};

HK_FN Mover rows_of(const hk::Global &t, u32 first) {
    const auto rows = reinterpret_cast<hk::GlobalPtr<const hk::u8>>(t.row<const bf16>(first));
    const auto layout = hk::RowLayout::by_rows(t.row_stride() * sizeof(bf16));
    return Mover(rows, t.rows() - first, layout, t.cols() * sizeof(bf16), [](u32 row) { return row; });
}

HK_FN void gemm(const Params &p) {
    // Tiles of neighbouring rows of w are on one XCD: x comes to its L2 once.
    const u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());
    const u32 n_tiles = (p.y.cols() + kTile - 1) / kTile;
    const u32 m = task / n_tiles * kTile, n = task % n_tiles * kTile;

    __shared__ Pipeline::Lds stages;
    const Mover x = rows_of(p.x, m), w = rows_of(p.w, n);
    Sums sums = {hk::wave_id() / 2 * kWave, hk::wave_id() % 2 * kWave};
    Pipeline(x, w, hk::NoScales{}, stages).run(0, (p.x.cols() * sizeof(bf16) + kBytes - 1) / kBytes, sums);

    sums.d.each([&](u32 at_n, u32 at_m, hk::Vec<float, hk::kMmaRows> d) {
        const u32 row = m + sums.wave_m + at_m, col = n + sums.wave_n + at_n;
        if (row >= p.y.rows() || col >= p.y.cols()) return;
        using Run = hk::Vec<bf16, hk::kMmaRows>;
        *reinterpret_cast<hk::GlobalPtr<Run>>(p.y.row<bf16>(row) + col) = hk::narrow<bf16>(d);
    });
}
}  // namespace

HK_ENTRY(gemm_bf16, kThreads, gemm)
