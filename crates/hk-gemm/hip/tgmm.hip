// tgmm.hip: products over the rows of each group.
//   out[g, k, n] = sum over the rows m of group g of lhs[k, m] rhs[m, n]                      (+= with `accumulate`)
//   row_sums[g, k] = sum over the rows m of group g of lhs[k, m]
//   lhs [K, M], rhs [M, N], out [G, K, N]: bf16 or f16; row_sums f32; sizes of groups: i32 or i64.
// By vectors rhs has N contiguous, not the reduced axis, and is transposed on its way to LDS (hk/transpose.h); so is lhs if it has
// K contiguous. With M contiguous, a group's columns begin and end within chunks of 16 bytes. A task is a tile of a group's output, over all of its rows; blocks take tasks in turn, whatever their
// number: one block for each task gives the same bits. Sums are f32, with one rounding, after the addition to what was there.
// Sums of rows are products with ones, made where a block has the first tile of N.
// Floor: bytes of lhs, rhs and out; 2 M K N flops.
#include <hk/entry.h>

#include "grouped.h"

namespace {
using Params = gemm::GroupedParams;
using gemm::GroupedTile;
using gemm::Way;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;

/// A wave's sums, and those of the rows of x.
template <class T>
struct RowSums : gemm::Sums<T> {
    bool rows_too;
    typename T::Product::Acc of_rows[RowSums::kM] = {};

    HK_FN explicit RowSums(bool rows_too) : rows_too(rows_too) {}

    HK_FN void run(const auto &pipeline, u32 from, u32 count) { pipeline.run(from, count, *this); }

    template <int>
    HK_FN void multiply(const auto &step) {
        // First, so that no product ends before a branch: LLVM 22 leaves too few states from there to what overwrites its sums.
        if (rows_too) {
            using Ones = hk::Vec<typename T::Element, 8 * hk::kLaneRows>;
            const auto ones = __builtin_bit_cast(hk::Frag, Ones(typename T::Element(1.0f)));
#pragma unroll
            for (int k = 0; k < T::kBytes / hk::kFragBytes; ++k) {
#pragma unroll
                for (int m = 0; m < RowSums::kM; ++m) {
                    const hk::Frag x = step.x[0]->frag(T::wave_m() + 16 * m, k);
                    of_rows[m] = T::Product::mma(&ones, &x, of_rows[m]);
                }
            }
        }
        gemm::multiply<T>(this->acc, step);
    }
};

template <class T>
HK_FN void tgmm(const Params &given) {
    using E = typename T::Element;
    auto &lds = hk::block_lds<gemm::GroupedLds<T>>();
    gemm::Walk walk(given.groups, T::kM);
    for (u32 task = hk::by_xcd(hk::block_x(), hk::grid_x());; task += hk::grid_x()) {
        const Params &p = hk::read_anew(given);
        const u32 m_tiles = (p.rows + T::kM - 1) / T::kM, tiles = m_tiles * p.n_tiles;
        gemm::Work work(task / tiles, 0);
        if (work.batch >= p.groups.count) break;
        const gemm::Group group = walk.find(p.groups, work.batch);
        work.place(task - work.batch * tiles, m_tiles, p.n_tiles, p.span);
        const u32 m = work.m_tile * T::kM, n = work.n_tile * T::kN;

        RowSums<T> sums(p.row_sums && work.n_tile == 0 && T::wave_n() == 0);
        gemm::add_products<T>(p, 0, m, p.rows - m, n, group.first, group.size, lds, sums);
        if (sums.rows_too && hk::group_of_lane(hk::lane_id()) == 0) {
            const auto to = reinterpret_cast<GlobalPtr<float>>(p.row_sums) + i64(work.batch) * p.rows;
#pragma unroll
            for (u32 i = 0; i < RowSums<T>::kM; ++i) {
#pragma unroll
                for (u32 r = 0; r < hk::kLaneRows; ++r) {
                    const u32 row = m + T::wave_m() + 16 * i + hk::row_of_lane(hk::lane_id(), r);
                    if (row < p.rows) to[row] = sums.of_rows[i][r * hk::kMmaRows];
                }
            }
        }
        gemm::each_part<T, T::kWaveN>(sums, &lds, [&](u32 row, u32 col, const auto &strip, u32 r) {
            const Params &p = hk::read_anew(given);
            const u32 at_m = m + T::wave_m() + row, at_n = n + T::wave_n() + col;
            if (at_m >= p.rows || at_n >= p.cols) return;
            // What nothing is added to stays as it is, bit by bit.
            if (p.accumulate && group.size == 0) return;
            auto y = strip.get(r, col);
            const u32 left = p.cols - at_n;
            const i64 at = i64(work.batch) * p.y_group + i64(at_m) * p.y_row + at_n;
            if (p.accumulate) y += gemm::load_part<E>(p.y, at, left, p.vectors);
            gemm::store_floats<E, 8>(p.y, at, y, left, p.vectors);
        });
        // Waves still read what the next tile's stages overwrite.
        hk::block_barrier();
    }
}
}  // namespace

// Entry points of one type, as in `tgmm_names` in src/gmm.rs: lhs as [M, K], as [K, M].
#define TGMM_TILE(name, T, m, n, waves_m, waves_n, lhs)            \
    HK_ENTRY(tgmm_##T##_##m##x##n##_##name, waves_m * waves_n * hk::kWaveSize, \
             tgmm<GroupedTile<hk::T, m, n, waves_m, waves_n, Way::lhs, Way::Across>>)
#define TGMM(T)                                          \
    TGMM_TILE(mk, T, 256, 256, 2, 4, Across)             \
    TGMM_TILE(mk, T, 128, 128, 2, 2, Across)             \
    TGMM_TILE(mk, T, 64, 64, 2, 2, Across)               \
    TGMM_TILE(km, T, 128, 128, 2, 2, Ragged)             \
    TGMM_TILE(km, T, 64, 64, 2, 2, Ragged)               \
    HK_ENTRY(tgmm_##T##_elements, 4 * hk::kWaveSize, tgmm<GroupedTile<hk::T, 64, 64, 2, 2, Way::Any, Way::Any>>)

TGMM(bf16)
TGMM(f16)
