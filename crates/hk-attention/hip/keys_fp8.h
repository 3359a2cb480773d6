// keys_fp8.h: tiles of rows of fp8 keys and values, widened to T in LDS, in accesses of 16 bytes. Before prefill_dense.h.
#pragma once

#include "keys.h"

#include <hk/wave.h>

#if defined(HK_AMD)
namespace attention {

/// Moves tiles of rows, 16 bytes of memory and two chunks of LDS per lane and part. Eight lanes have four chunks of one parity of two rows,
/// whose swizzles differ in parity: writes have no bank conflicts.
template <int kRows_, int kCols, int kThreads, u32 kWindow, class T>
class RowMover<kRows_, kCols, kThreads, kWindow, StoredFp8<T>> {
    using From = StoredFp8<T>;
    using Part = typename RowTile<kRows_, kCols>::Part;
    static constexpr u32 kOfRow = Part::kChunks / 2;  // pairs of chunks of a row of a part
    static constexpr int kPairs = kRows_ * kCols / 16;
    static_assert(kPairs % hk::kWaveSize == 0, "whole waves");

  public:
    using Tile = RowTile<kRows_, kCols>;
    static constexpr int kRows = kRows_;
    static constexpr int kParts = (kPairs + kThreads - 1) / kThreads;
    struct Chunks {
        Vec<u32, 4> part[kParts];
    };

  private:
    u32 offset_[kParts];

    /// The wave takes part in part `i`.
    HK_FN static bool takes(int i) {
        return (i + 1) * kThreads <= kPairs || hk::wave_id() < u32(kPairs - i * kThreads) / hk::kWaveSize;
    }
    HK_FN static u32 row_of(u32 pair) { return pair % (kRows * kOfRow) / kOfRow; }

  public:
    /// The first row of the window of the wave's part `i`.
    HK_FN static u32 first_row(int i) {
        return row_of(hk::wave_id() * hk::kWaveSize + i * kThreads) / kWindow * kWindow;
    }

    /// Rows `stride` bytes apart; columns from `cols` on, a multiple of 16, read as zero. `thread`: hk::thread_x().
    HK_FN RowMover(i64 stride, u32 cols, u32 thread) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 at = thread + i * kThreads, row = row_of(at);
            const u32 col = at / (kRows * kOfRow) * 64 + at % kOfRow * 16;
            offset_[i] = col < cols && takes(i) ? row % kWindow * u32(stride) + col : hk::Window::kOutOfBounds;
        }
    }

    /// The first `skip` rows are zero.
    HK_FN Chunks load(const auto &rows, u32 skip = 0) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 offset = row_of(hk::thread_x() + i * kThreads) < skip ? hk::Window::kOutOfBounds : offset_[i];
            chunks.part[i] = rows.of_part(i).template load<Vec<u32, 4>>(offset);
        }
        return chunks;
    }
    HK_FN static void store(const Chunks &chunks, Tile &tile) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            // All waves load as much, else the compiler would wait for all loads.
            if (!takes(i)) continue;
            const u32 at = hk::thread_x() + i * kThreads, row = row_of(at);
            const u32 first = Part::place(row, at % kOfRow * 2);
            auto *chunk = tile.part[at / (kRows * kOfRow)].chunk;
            chunk[first] = From::template widened<4>(chunks.part[i].lo);
            chunk[first ^ 1] = From::template widened<4>(chunks.part[i].hi);
        }
    }
};

/// As StoredFp8, a dword of each key at a time.
template <class T>
struct DwordsOfFp8 : StoredFp8<T> {};

/// Moves tiles of values as the form of DwordsOfFp8 does, whose lanes have 4 keys by 4 columns. Four neighbouring lanes have 4 keys by 16
/// columns: each loads a key's, and they transpose dwords.
template <int kDim, int kKeys, int kCols, int kThreads, u32 kWindow, class T>
class TransposingRows<kDim, kKeys, kCols, kThreads, kWindow, StoredFp8<T>>
    : public TransposingRows<kDim, kKeys, kCols, kThreads, kWindow, DwordsOfFp8<T>> {
    using Base = TransposingRows<kDim, kKeys, kCols, kThreads, kWindow, DwordsOfFp8<T>>;
    static constexpr u32 kColumnsOfWave = 64;
    static_assert(kKeys * kCols / 16 % kThreads == 0, "all waves have as much");
    u32 offset_[Base::kParts];

    HK_FN static u32 unit(int i) { return hk::wave_id() + i * kThreads / hk::kWaveSize; }
    HK_FN static u32 key_of(int i, u32 lane) {
        return unit(i) / (kCols / kColumnsOfWave) * 16 + lane / 4 % 2 * 8 + lane / 8 % 2 * 4 + lane % 4;
    }

  public:
    using Base::kParts;
    struct Chunks {
        Vec<u32, 4> part[kParts];
    };

    /// Rows `stride` bytes apart; columns from `cols` on, a multiple of 16, read as zero.
    HK_FN TransposingRows(i64 stride, u32 cols, u32 thread) : Base(stride, cols, thread) {
        const u32 lane = thread % hk::kWaveSize;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 col = unit(i) % (kCols / kColumnsOfWave) * kColumnsOfWave + lane / 16 * 16;
            offset_[i] = col < cols ? key_of(i, lane) % kWindow * u32(stride) + col : hk::Window::kOutOfBounds;
        }
    }

    /// The first `skip` rows are zero.
    HK_FN Chunks load(const auto &rows, u32 skip = 0) const {
        Chunks chunks;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const u32 offset = key_of(i, hk::lane_id()) < skip ? hk::Window::kOutOfBounds : offset_[i];
            chunks.part[i] = rows.of_part(i).template load<Vec<u32, 4>>(offset);
        }
        return chunks;
    }

    HK_FN void store(const Chunks &chunks, typename Base::Tile &tile) const {
        typename Base::Chunks quads;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            Vec<u32, 4> v = chunks.part[i];
            u32 key[4] = {v[0], v[1], v[2], v[3]};
            hk::transpose_lanes<1>(key[0], key[1]), hk::transpose_lanes<1>(key[2], key[3]);
            hk::transpose_lanes<2>(key[0], key[2]), hk::transpose_lanes<2>(key[1], key[3]);
#pragma unroll
            for (int r = 0; r < 4; ++r) quads.part[i][r] = key[r];
        }
        Base::store(quads, tile);
    }
};

}  // namespace attention
#endif
