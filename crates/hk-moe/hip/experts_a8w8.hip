// experts_a8w8.hip: grouped GEMM of experts, int8 or the target's fp8, with scales of rows or of blocks; see experts.h.
#include "experts.h"

#include <gemm/operands/i8_fp8.h>

namespace {
using experts::expert_decode_gemm;
using experts::expert_gemm;
using experts::Params;
using experts::WOrder;
using gemm::TileCoord;
using hk::Access;
using hk::u32;

template <class T>
using Tile256x256 = gemm::Tile<T, Access::Vectorized, 256, 256, 2, 4, 5>;
template <class T>
using Tile128x128 = gemm::Tile<T, Access::Vectorized, 128, 128, 2, 2, 5>;
template <class T>
using Tile64x64 = gemm::Tile<T, Access::Vectorized, 64, 64, 2, 2, 5>;
template <class T>
using Block128x256 = gemm::Tile<T, Access::Vectorized, 128, 256, 2, 4, 5, 2>;
template <class T>
using Block64x64 = gemm::Tile<T, Access::Vectorized, 64, 64, 2, 2, 5, 2>;

/// Accumulators; a wave's gates and values have scales of their own.
template <class T>
struct BlockAcc : gemm::BlockScaledAcc<T> {
    HK_FN explicit BlockAcc(const Params &p) : gemm::BlockScaledAcc<T>(p) {
        if (p.out.order != WOrder::Plain) this->one_w_scale = false;
    }
};

template <class T>
HK_FN void block_gemm(const Params &args) {
    expert_gemm<T, BlockAcc>(args, [](const Params &p, const TileCoord &coord, u32, auto source, auto row_of_w) {
        return gemm::BlockScales<T>(gemm::scales_end<T>(gemm::KRange(p.grid, 0)), [&](u32 row, bool of_w) {
            return of_w ? p.w_scale.place(coord.matrix, row_of_w(row), p.w.rows)
                        : p.a_scale.place(coord.batch, source(row), p.a.rows);
        });
    });
}

template <class E, int kMTiles, int kNTiles, int kBytes>
HK_FN void block_decode_gemm(const Params &args) {
    using Operands = gemm::BlockScaledOperands<E, kMTiles, kNTiles, kBytes>;
    expert_decode_gemm<Operands, gemm::kDecodeWaves>(
        args, [](const Params &p, const TileCoord &coord, u32 end, auto source, auto row_of_w) {
            return Operands{{p.a.at(coord.batch, 0), p.a.rows, p.a.layout, end, source},
                            {p.w.at(coord.matrix, 0), p.w.rows, p.w.layout, end, row_of_w},
                            {p, coord, end, source, row_of_w}};
        });
}
}  // namespace

// Entry points of one dtype, as in src/experts/table.rs.
#define EXPERTS(name, T)                                                                             \
    HK_ENTRY(experts_##name##_256x256, Tile256x256<T>::kThreads, expert_gemm<Tile256x256<T>>)        \
    HK_ENTRY(experts_##name##_128x128, Tile128x128<T>::kThreads, expert_gemm<Tile128x128<T>>)        \
    HK_ENTRY(experts_##name##_64x64, Tile64x64<T>::kThreads, expert_gemm<Tile64x64<T>>)              \
    HK_ENTRY(experts_##name##_16x32, gemm::kDecodeWaves *hk::kWaveSize,                              \
             expert_decode_gemm<T, 1, 2, gemm::kLongStepBytes>)                                      \
    HK_ENTRY(experts_##name##_block_128x256, Block128x256<T>::kThreads, block_gemm<Block128x256<T>>) \
    HK_ENTRY(experts_##name##_block_64x64, Block64x64<T>::kThreads, block_gemm<Block64x64<T>>)       \
    HK_ENTRY(experts_##name##_block_16x32, gemm::kDecodeWaves *hk::kWaveSize,                        \
             block_decode_gemm<T, 1, 2, gemm::kLongStepBytes>)

EXPERTS(i8, hk::I8)
EXPERTS(fp8, hk::Fp8)
