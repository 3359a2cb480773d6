// tgmm.hip: grouped GEMM that reduces over the rows of each group (weight gradients).
//   out[g, k, n] = sum over the rows m of group g of lhs[k, m] rhs[m, n]                      (+= with `accumulate`)
//   row_sums[g, k] = sum over the rows m of group g of lhs[k, m]
//   lhs [K, M], rhs [M, N], out [G, K, N]: bf16 or f16; row_sums f32; sizes of groups: i32 or i64.
// On the vectorized path rhs has N contiguous, not the reduced axis, and is transposed between global memory and LDS
// (hk/transpose.h); so is lhs if it has K contiguous. With M contiguous, a group's columns begin and end within 16-byte chunks.
// A task is a tile of a group's output, over all of its rows. Blocks are persistent; the result does not depend on
// their number. Sums are f32, with one rounding, after the addition to what was there.
// Row sums are MFMAs with ones, in the blocks that have the first N tile.
// Floor: bytes of lhs, rhs and out; 2 M K N flops.
#include <hk/entry.h>

#include <gemm/grouped_gemm.h>

namespace {
using Params = gemm::GroupedParams;
using gemm::GroupedTile;
using gemm::OperandLayout;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;

/// A wave's accumulators, and row sums of a.
template <class T>
struct RowSums : gemm::TileAcc<T> {
    bool rows_too;
    typename T::Mma::Acc row_acc[RowSums::kM] = {};

    HK_FN explicit RowSums(bool rows_too) : rows_too(rows_too) {}

    HK_FN void run(const auto &pipeline, u32 from, u32 count) { pipeline.run(from, count, *this); }

    template <int kPhase>
    HK_FN void multiply(const auto &step) {
        // First, so that no MFMA ends before a branch: LLVM 22 leaves too few wait states from there to what overwrites its accumulators.
        if (rows_too) {
            using Ones = hk::Vec<typename T::Element, 8 * hk::kRowsPerLane>;
            const auto ones = __builtin_bit_cast(hk::Frag, Ones(typename T::Element(1.0f)));
#pragma unroll
            for (int k = 0; k < T::kBytes / hk::kFragBytes; ++k) {
#pragma unroll
                for (int m = 0; m < RowSums::kM; ++m) {
                    const hk::Frag a = step.a[0]->frag(T::wave_m() + 16 * m, k);
                    row_acc[m] = T::Mma::mma(&ones, &a, row_acc[m]);
                }
            }
        }
        gemm::TileAcc<T>::template multiply<kPhase>(step);
    }
};

template <class T>
HK_FN void tgmm(const Params &args) {
    using E = typename T::Element;
    auto &lds = hk::block_lds<gemm::GroupedLds<T>>();
    gemm::GroupWalk walk(args.groups, T::kM);
    for (u32 task = hk::xcd_remap(hk::block_x(), hk::grid_x());; task += hk::grid_x()) {
        const Params &p = hk::reload_params(args);
        const u32 m_tiles = (p.rows + T::kM - 1) / T::kM, tiles = m_tiles * p.n_tiles;
        gemm::TileCoord coord(task / tiles, 0);
        if (coord.batch >= p.groups.count) break;
        const gemm::Group group = walk.find(p.groups, coord.batch);
        coord.place(task - coord.batch * tiles, m_tiles, p.n_tiles, p.span);
        const u32 m = coord.m_tile * T::kM, n = coord.n_tile * T::kN;

        RowSums<T> acc_tile(p.row_sums && coord.n_tile == 0 && T::wave_n() == 0);
        gemm::accumulate_tile<T>(p, 0, m, p.rows - m, n, group.first, group.size, lds, acc_tile);
        if (acc_tile.rows_too && hk::group_of_lane(hk::lane_id()) == 0) {
            const auto to = reinterpret_cast<GlobalPtr<float>>(p.row_sums) + i64(coord.batch) * p.rows;
#pragma unroll
            for (u32 i = 0; i < RowSums<T>::kM; ++i) {
#pragma unroll
                for (u32 r = 0; r < hk::kRowsPerLane; ++r) {
                    const u32 row = m + T::wave_m() + 16 * i + hk::row_of_lane(hk::lane_id(), r);
                    if (row < p.rows) to[row] = acc_tile.row_acc[i][r * hk::kMmaRows];
                }
            }
        }
        gemm::for_each_vec<T, T::kWaveN>(acc_tile, &lds, [&](u32 row, u32 col, const auto &staged, u32 r) {
            const Params &p = hk::reload_params(args);
            const u32 at_m = m + T::wave_m() + row, at_n = n + T::wave_n() + col;
            if (at_m >= p.rows || at_n >= p.cols) return;
            // With `accumulate`, outputs of empty groups keep their bits.
            if (p.accumulate && group.size == 0) return;
            auto y = staged.get(r, col);
            const u32 left = p.cols - at_n;
            const i64 at = i64(coord.batch) * p.y_group + i64(at_m) * p.y_row + at_n;
            if (p.accumulate) y += gemm::load_part<E>(p.y, at, left, p.vectors);
            gemm::store_floats<E, 8>(p.y, at, y, left, p.vectors);
        });
        // All waves have read the staged accumulators before the next tile's loads overwrite them.
        hk::block_barrier();
    }
}
}  // namespace

// Entry points of one dtype, as in `TGMM` in src/ops/gmm.rs: lhs as [M, K], as [K, M].
#define TGMM_TILE(name, T, m, n, waves_m, waves_n, lhs)                        \
    HK_ENTRY(tgmm_##T##_##m##x##n##_##name, waves_m * waves_n * hk::kWaveSize, \
             tgmm<GroupedTile<hk::T, m, n, waves_m, waves_n, OperandLayout::lhs, OperandLayout::Across>>)
#define TGMM(T)                                    \
    TGMM_TILE(mk, T, 256, 256, 2, 4, Across)       \
    TGMM_TILE(mk, T, 128, 128, 2, 2, Across)       \
    TGMM_TILE(mk, T, 64, 64, 2, 2, Across)         \
    TGMM_TILE(km, T, 128, 128, 2, 2, Ragged)       \
    TGMM_TILE(km, T, 64, 64, 2, 2, Ragged)         \
    HK_ENTRY(tgmm_##T##_scalar, 4 * hk::kWaveSize, \
             tgmm<GroupedTile<hk::T, 64, 64, 2, 2, OperandLayout::Any, OperandLayout::Any>>)

TGMM(bf16)
TGMM(f16)
