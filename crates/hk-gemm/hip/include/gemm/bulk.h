// bulk.h: GEMM of block tiles through LDS whose loads are bulk tensor copies (Hopper's TMA).
//
//   a, w  --bulk tensor copies by one wave-->  stages in LDS  --wgmma by the others-->  accumulators
//
// One wave of a block copies; it waits for a stage to be free, the others for its data, each at barriers in LDS: no barrier of the block in
// the main loop, and no addresses. A block fills an SM's LDS. For one output, whole K, and N a multiple of 16.
// Source: PTX ISA 8.4, "cp.async.bulk.tensor".
#pragma once

#include <gemm/warpgroup.h>

#include <hk/tensor_map.h>

namespace gemm {

/// Arguments of a GEMM by bulk copies.
struct BulkParams {
    hk::TensorMap a;  // [M, K]
    hk::TensorMap w;  // [N / 16, 2, 4, 2, K], rows in the order of MMAs
    Params gemm;
    u64 pad[3];
};

#if defined(HK_WARPGROUPS)
template <class E, int kM_, int kN_>
struct BulkTile {
    static constexpr int kM = kM_, kN = kN_;
    static constexpr int kWaves = kM / 16, kThreads = (kWaves + 1) * hk::kWaveSize;
    static constexpr int kWaveM = 16, kWaveN = kN;
    using Mma = hk::FragMma<E>;
    static constexpr int kBytes = hk::WarpgroupRows<64>::kBytes;
    static constexpr int kReserved = 1024;  // for the barriers
    static constexpr int kStages = (hk::kLdsBytes - kReserved) / ((kM + kN) * kBytes);

    struct Stages {
        hk::WarpgroupRows<kM> a[kStages];
        hk::WarpgroupRows<kN> w[kStages];
        hk::SplitBarrier full[kStages], empty[kStages];
    };
    union Lds {
        Stages stages;
        StagedAcc<float, kN> staged[kWaves];
    };

    /// The row of a wave's 16 whose outputs AccLayout<16> has in row r: a's rows are in LDS in order, unlike those of WarpgroupMover. The
    /// inverse of WarpgroupRows::of_mma.
    HK_FN static u32 row_of_acc(u32 r) { return r / 4 * 2 + r % 4 / 2 * 8 + r % 2; }
};

template <class T>
struct BulkAcc : WaveTile<T> {
    static constexpr int kM = 1, kN = T::kN / 16;
};

/// The loop of the wave that copies, by one lane.
template <class T, class E>
HK_FN void copy_stages(const BulkParams &p, typename T::Stages &lds, u32 first_m, u32 first_n, u32 count) {
    u32 stage = 0, parity = 1;
    for (u32 i = 0; i < count; ++i) {
        if (i >= u32(T::kStages)) lds.empty[stage].wait(parity);
        lds.full[stage].expect((T::kM + T::kN) * T::kBytes);
        const u32 column = i * (T::kBytes / sizeof(E));
        lds.full[stage].copy_rows(lds.a[stage].chunk, p.a, column, first_m);
        lds.full[stage].copy_mma_rows(lds.w[stage].chunk, p.w, column, first_n);
        if (++stage == u32(T::kStages)) {
            stage = 0;
            parity ^= 1;
        }
    }
}

/// The main loop of the waves that multiply.
template <class T, class E>
HK_FN void multiply_stages(typename T::Stages &lds, BulkAcc<T> &acc_tile, u32 count) {
    float d[T::kN / 2] = {};
    const u32 row = hk::wave_id() / 4 * 64;
    u32 stage = 0, before = 0, parity = 0;
    for (u32 i = 0; i < count; ++i) {
        lds.full[stage].wait(parity);
        hk::detail::begin_wgmma();
#pragma unroll
        for (u32 byte = 0; byte < u32(T::kBytes); byte += 32)
            hk::detail::Wgmma<E, T::kN>::mma(d, lds.a[stage].descriptor(row, byte), lds.w[stage].descriptor(0, byte));
        hk::detail::commit_wgmma();
        // The MMAs of the stage before have ended.
        hk::detail::wait_wgmma<1>();
        if (i > 0) lds.empty[before].arrive();
        before = stage;
        if (++stage == u32(T::kStages)) {
            stage = 0;
            parity ^= 1;
        }
    }
    hk::detail::wait_wgmma<0>();
#pragma unroll
    for (int i = 0; i < T::kN / 2; ++i) acc_tile.acc[0][i / 8][hk::place_of_sum(i)] = d[i];
}

template <class E, int kM, int kN>
HK_FN void bulk_gemm(const BulkParams &p) {
    using T = BulkTile<E, kM, kN>;
    auto &lds = hk::block_lds<typename T::Lds>();
    const TileCoord coord(p.gemm.grid, hk::block_x());
    const u32 first_m = coord.m_tile * kM, first_n = coord.n_tile * kN;
    const u32 count = (p.gemm.grid.k_bytes + T::kBytes - 1) / T::kBytes;
    if (hk::thread_x() == 0) {
        for (u32 i = 0; i < u32(T::kStages); ++i) {
            lds.stages.full[i].init(1);
            lds.stages.empty[i].init(T::kWaves);
        }
        hk::SplitBarrier::publish();
    }
    hk::block_barrier();
    BulkAcc<T> acc_tile;
    if (hk::wave_id() < u32(T::kWaves))
        multiply_stages<T, E>(lds.stages, acc_tile, count);
    else if (hk::lane_id() == 0)
        copy_stages<T, E>(p, lds.stages, first_m, first_n, count);
    hk::block_barrier();
    if (hk::wave_id() == u32(T::kWaves)) return;
    for_each_vec<T, kN>(acc_tile, &lds, [&](u32 m, u32 n, const auto &staged, u32 row) {
        run_epilogue<kVecCols>(p.gemm, coord, first_m + hk::wave_id() * 16 + T::row_of_acc(m), first_n + n,
                               staged.get(row, n));
    });
}

/// bulk_gemm of the columns that the grid says: kN, or fewer.
template <class E, int kM, int kN>
HK_FN void bulk_gemm_of_width(const BulkParams &p) {
    if constexpr (kM == 128 && kN == 128) {
        if (p.gemm.grid.tile_n == 64) return bulk_gemm<E, kM, 64>(p);
        if (p.gemm.grid.tile_n == 96) return bulk_gemm<E, kM, 96>(p);
    }
    if constexpr (kN == 256) {
        if (p.gemm.grid.tile_n == 192) return bulk_gemm<E, kM, 192>(p);
        if (p.gemm.grid.tile_n == 224) return bulk_gemm<E, kM, 224>(p);
    }
    bulk_gemm<E, kM, kN>(p);
}
#endif

}  // namespace gemm
