// gmm.hip: grouped GEMM: each group of rows has its own matrix.
//   out[m, n] = sum over k of lhs[m, k] rhs[g, k, n] + bias[g, n]       for the rows m of group g
//   lhs [M, K], rhs [G, K, N] with K or N contiguous, bias [G, N], out [M, N]: bf16 or f16; sizes of groups: i32 or i64.
// A tile has rows of one group. Blocks are persistent. Tiles of a group that are in flight together share rows of rhs
// and of lhs in L2. Sums are f32, with one rounding. Rows of no group are not written.
// Without sizes there is one group: a plain GEMM with rhs.
// Floor: bytes of lhs and out, and of rhs of groups that have rows; 2 M K N flops.
#include <hk/entry.h>

#include <gemm/grouped_gemm.h>

namespace {
using Params = gemm::GroupedParams;
using gemm::GroupedTile;
using gemm::OperandLayout;
using hk::i64;
using hk::u32;

template <class T>
HK_FN void gmm(const Params &args) {
    using E = typename T::Element;
    auto &lds = hk::block_lds<gemm::GroupedLds<T>>();
    gemm::GroupWalk walk(args.groups, T::kM);
    for (u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());; task += hk::grid_x()) {
        const Params &p = hk::reload_params(args);
        u32 first_tile = task / p.n_tiles;
        const gemm::Group group = walk.find_tile(p.groups, first_tile);
        if (group.index == p.groups.count) break;
        gemm::TileCoord coord(group.index, 0);
        coord.place(task - first_tile * p.n_tiles, (group.size + T::kM - 1) / T::kM, p.n_tiles, p.span);
        const u32 m = coord.m_tile * T::kM, n = coord.n_tile * T::kN;

        gemm::TileAcc<T> acc_tile;
        gemm::accumulate_tile<T>(p, group.index, group.first + m, group.size - m, n, 0, p.columns, lds, acc_tile);
        gemm::for_each_vec<T, T::kWaveN>(acc_tile, &lds, [&](u32 row, u32 col, const auto &staged, u32 r) {
            const Params &p = hk::reload_params(args);
            const u32 at_m = m + T::wave_m() + row, at_n = n + T::wave_n() + col;
            if (at_m >= group.size || at_n >= p.cols) return;
            auto y = staged.get(r, col);
            const u32 left = p.cols - at_n;
            if (p.bias) y += gemm::load_part<E>(p.bias, i64(group.index) * p.cols + at_n, left, false);
            gemm::store_floats<E, 8>(p.y, i64(group.first + at_m) * p.y_row + at_n, y, left, p.vectors);
        });
        // All waves have read the staged accumulators before the next tile's loads overwrite them.
        hk::block_barrier();
    }
}
}  // namespace

// Entry points of one dtype, as in `GMM` in src/ops/gmm.rs: rhs with K contiguous, with N contiguous, with neither.
#define GMM_TILE(T, m, n, waves_m, waves_n)                                                             \
    HK_ENTRY(gmm_##T##_##m##x##n##_nk, waves_m * waves_n * hk::kWaveSize,                               \
             gmm<GroupedTile<hk::T, m, n, waves_m, waves_n, OperandLayout::Rows, OperandLayout::Rows>>) \
    HK_ENTRY(gmm_##T##_##m##x##n##_kn, waves_m * waves_n * hk::kWaveSize,                               \
             gmm<GroupedTile<hk::T, m, n, waves_m, waves_n, OperandLayout::Rows, OperandLayout::Across>>)
#define GMM(T)                                    \
    GMM_TILE(T, 256, 256, 2, 4)                   \
    GMM_TILE(T, 128, 128, 2, 2)                   \
    GMM_TILE(T, 64, 64, 2, 2)                     \
    GMM_TILE(T, 32, 128, 1, 2)                    \
    HK_ENTRY(gmm_##T##_scalar, 4 * hk::kWaveSize, \
             gmm<GroupedTile<hk::T, 64, 64, 2, 2, OperandLayout::Any, OperandLayout::Any>>)

GMM(bf16)
GMM(f16)
