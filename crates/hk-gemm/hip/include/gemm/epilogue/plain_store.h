// plain_store.h: the epilogue without bias, activation or fused operation: accumulators are scaled, rounded and stored.
//   run_epilogue asks for each vector of outputs what to apply to it: some 90 instructions and ten scalar loads, 0.4 us of a wave by
//   hk-time. Here the host has asked.
#pragma once

#include <gemm/epilogue/staged_acc.h>

#include <hk/global.h>

namespace gemm {
/// Whether a target has the path: on AMD targets. On sm_90 it was not measured.
inline constexpr bool kHasPlainStores = hk::kXcds > 1;

namespace detail {
/// A wave's tile of kM times 16 rows, and the rows and columns of a lane: kVecCols columns of one row of each kRows.
template <int kM, u32 kCols>
struct StoredTile {
    static constexpr u32 kLanes = kCols / kVecCols;  // of a row
    static constexpr u32 kRows = hk::kWaveSize / kLanes;  // at a time
    static constexpr u32 kParts = 16 / kRows;
    static_assert(kRows <= 16 && kParts * kRows == 16, "a wave stores whole rows of 16");
    const Epilogue &e;
    u32 split, batch, matrix, first_m, first_n;

    HK_FN static u32 lane_row() { return hk::lane_id() / kLanes; }
    HK_FN static u32 lane_col() { return hk::lane_id() % kLanes * kVecCols; }

    /// Factors of a lane's columns and rows. Of rows and columns past the last they are any.
    struct Scales {
        Vec<float, kVecCols> of_w;
        float of_a[kM * kParts];
    };
    HK_FN Scales scales() const {
        Scales s;
        s.of_w = 1.0f;
        const u32 col = first_n + lane_col();
        if (e.w_scale) {
            const i64 at = i64(matrix) * e.w_scale_batch;
            if (e.w_scale_step)
                s.of_w = load_floats<kVecCols>(e.w_scale, Float::F32, at + col, col < e.cols ? e.cols - col : 0);
            else
                s.of_w = reinterpret_cast<GlobalPtr<const float>>(e.w_scale)[at];
        }
        const auto a_scale = reinterpret_cast<GlobalPtr<const float>>(e.a_scale) + i64(batch) * e.a_scale_batch;
#pragma unroll
        for (u32 i = 0; i < kM * kParts; ++i) {
            const u32 row = first_m + i * kRows + lane_row();
            s.of_a[i] = e.a_scale ? a_scale[i64(row < e.rows ? row : e.rows - 1) * e.a_scale_step] : 1.0f;
        }
        return s;
    }

    /// Stores the tile as T. The accumulators of 16 rows are read from LDS, then those of the next 16 are put there, while the former
    /// are rounded. `scale(i, sums)` scales part i of the tile.
    template <class T, class Accum, class Scale>
    HK_FN void store(const Accum &acc_tile, StagedAcc<float, int(kCols)> &staged, Scale scale) const {
        constexpr int kLen = hk::kVecLen<T>;
        const u32 stride = u32(e.y_row) * u32(sizeof(T));
        const i64 at = i64(batch) * e.y_batch + i64(split) * e.y_split + i64(first_m) * e.y_row + first_n;
        const hk::Window y(reinterpret_cast<GlobalPtr<T>>(e.y) + at, hk::Window::kOutOfBounds - 1);
        // The sign bit moves what is past the last row or column beyond the window.
        const u32 rows = e.rows - first_m - 1u - lane_row(), past = e.cols - first_n - 1u - lane_col();
        const u32 lane = lane_row() * stride + lane_col() * u32(sizeof(T));
        staged.put(0, acc_tile.acc[0]);
#pragma unroll
        for (u32 m = 0; m < kM; ++m) {
            hk::wave_barrier();
            Vec<float, kVecCols> sums[kParts];
#pragma unroll
            for (u32 i = 0; i < kParts; ++i) sums[i] = staged.get(lane_row() + i * kRows, lane_col());
            hk::wave_barrier();
            if (m + 1 < kM) staged.put(0, acc_tile.acc[m + 1]);
#pragma unroll
            for (u32 i = 0; i < kParts; ++i) {
                const u32 row = 16 * m + i * kRows;
                const u32 offset = (lane + row * stride) | ((rows - row | past) & hk::Window::kOutOfBounds);
                const Vec<T, kVecCols> v = hk::narrow<T, kVecCols>(scale(m * kParts + i, sums[i]));
#pragma unroll
                for (int j = 0; j < kVecCols; j += kLen) {
                    Vec<T, kLen> part;
#pragma unroll
                    for (int c = 0; c < kLen; ++c) part[c] = v[j + c];
                    y.store(part, offset, j * u32(sizeof(T)));
                }
            }
        }
    }
};
}  // namespace detail

/// Stores a wave's tile if nothing but scales is to be applied to its accumulators; false: it has not been stored. `kScaled`: they are
/// scaled. `lds` is free.
template <u32 kCols, bool kScaled, class Params, class Accum>
HK_FN bool store_plainly(const Params &p, const TileCoord &coord, u32 first_m, u32 first_n, const Accum &acc_tile,
                         void *lds) {
    if constexpr (!kHasPlainStores) {
        return false;
    } else {
        const Epilogue &e = p.epilogue;
        if (!e.plain) return false;
        auto &staged = static_cast<StagedAcc<float, int(kCols)> *>(lds)[hk::wave_id()];
        const bool partial = e.store == StoreMode::Partial;
        const detail::StoredTile<Accum::kM, kCols> tile{
            e, partial ? coord.split : 0, coord.batch, coord.matrix, first_m, first_n};
        const auto store = [&](auto scale) {
            with_type(partial ? Float::F32 : e.y_type,
                      [&]<class T>(T) { tile.template store<T>(acc_tile, staged, scale); });
        };
        if (kScaled || !(e.a_scale | e.w_scale)) {
            store([](u32, const auto &sums) { return sums; });
        } else {
            const auto scales = tile.scales();
            store([&](u32 i, const auto &sums) { return sums * (scales.of_w * scales.of_a[i]); });
        }
        return true;
    }
}

}  // namespace gemm
