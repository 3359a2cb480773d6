// rows.h: rows of any element type, stride and alignment, and of pages, as operands of the kernel's type.
#pragma once

#include "problem.h"

#include <hk/block.h>
#include <hk/matrix.h>
#include <hk/quant.h>
#include <hk/types.h>

namespace attention {

/// N elements, `stride` bytes apart, of which the first `left` exist; the others are zero. One load at a time: the code is small.
template <class E, int N>
HK_FN Vec<E, N> load_elements(GlobalPtr<const u8> at, i64 stride, i32 left) {
    constexpr u32 kWords = sizeof(E) * N / 4, kShift = 8 * sizeof(E) % 32;
    Vec<u32, kWords> bits = 0;
#pragma unroll 1
    for (int i = N - 1; i >= 0; --i) {
#pragma unroll
        for (u32 w = kWords; w-- > 1;) {
            bits[w] = kShift == 0 ? bits[w - 1] : bits[w] << kShift | bits[w - 1] >> (32 - kShift) % 32;
        }
        bits[0] = kShift == 0 ? 0 : bits[0] << kShift;
        if (i < left) {
            const E element = *reinterpret_cast<GlobalPtr<const E>>(at + i * stride);
            if constexpr (sizeof(E) == 1)
                bits[0] |= __builtin_bit_cast(u8, element);
            else if constexpr (sizeof(E) == 2)
                bits[0] |= __builtin_bit_cast(u16, element);
            else
                bits[0] = __builtin_bit_cast(u32, element);
        }
    }
    return __builtin_bit_cast(Vec<E, N>, bits);
}

/// N elements of T, which has 2 or 4 bytes, from `at`, of type T or of bytes that T holds exactly. `vectorized`: contiguous and
/// aligned; else `stride` bytes apart, and only the first `left` exist.
template <class T, int N>
HK_FN Vec<T, N> load_row(GlobalPtr<const u8> at, u32 type, bool vectorized, i64 stride, i32 left) {
    if (type == kOwn) {
        if (vectorized) return *reinterpret_cast<GlobalPtr<const Vec<T, N>>>(at);
        return load_elements<T, N>(at, stride, left);
    }
    Vec<u8, N> bytes;
    if (vectorized)
        bytes = *reinterpret_cast<GlobalPtr<const Vec<u8, N>>>(at);
    else
        bytes = load_elements<u8, N>(at, stride, left);
    const auto packed = __builtin_bit_cast(Vec<u32, N / 4>, bytes);
    const auto values = type == kFp8 ? hk::dequantize_packed<hk::kMmaFp8Type>(packed)
                                     : hk::dequantize_packed<hk::QuantType::I8>(packed);
    return __builtin_convertvector(values, Vec<T, N>);
}

/// Which keys of a sequence a block walks through: first those of the cache, then fresh ones, `kKeys` at a time.
struct KeyTiles {
    u32 first[2], end[2];  // of the cached and of the fresh keys that a query sees
    u32 tiles[2];

    HK_FN KeyTiles(const Work &work, u32 from, u32 to, u32 keys) {
        const u32 cached = work.cached;
        first[0] = from < cached ? from : cached, end[0] = to < cached ? to : cached;
        first[1] = from > cached ? from : cached, end[1] = to > cached ? to : cached;
#pragma unroll
        for (int i = 0; i < 2; ++i) tiles[i] = end[i] > first[i] ? (end[i] - first[i] + keys - 1) / keys : 0;
    }
    HK_FN u32 count() const { return tiles[0] + tiles[1]; }
};

/// A tile of keys: keys [first, end) of the sequence, all cached or all fresh.
struct KeyTile {
    u32 first, end;
    bool fresh;

    HK_FN KeyTile(const KeyTiles &all, u32 index, u32 keys) {
        fresh = index >= all.tiles[0];
        first = fresh ? all.first[1] + (index - all.tiles[0]) * keys : all.first[0] + index * keys;
        end = fresh ? all.end[1] : all.end[0];
    }
};

/// The address of the row of K of a key whose page is not in the cache: its scores are NaN.
inline constexpr u64 kMissingRow = 1;

/// Addresses of the rows of a tile of keys, for one key head; 0: no such key.
template <int kKeys>
struct RowTable {
    u64 k[kKeys];

  private:
    // Eight words of 8 bytes behind 16 rows: reads of rows 0, 4, 16 and 20 by lanes that LDS serves together have other banks.
    HK_FN static constexpr u32 at(u32 row) { return row + row / 16 * 8; }
    u64 v_[kKeys + (kKeys - 1) / 16 * 8];

  public:
    HK_FN u64 v(u32 row) const { return v_[at(row)]; }

    /// Lanes of the first wave find a row each.
    HK_FN void fill(const Params &p, const Work &work, const KeyTile &tile, u32 head) {
        static_assert(kKeys <= hk::kWaveSize, "a lane for each key");
        const u32 lane = hk::thread_x(), key = tile.first + lane;
        if (lane < kKeys) {
            bool there = key < tile.end, missing = false;
            u64 batch = work.sequence;
            u32 token = key - work.cached + work.k_start;
            const KeysValues &kv = tile.fresh ? p.fresh : p.cache;
            if (!tile.fresh) {
                const hk::DivMod page(key, p.pages.tokens, p.pages.inverse);
                batch = 0;
                token = page.remainder;
                if (there) {
                    const i32 entry = reinterpret_cast<GlobalPtr<const i32>>(p.pages.table)[work.pages + page.quotient];
                    missing = u32(entry) >= p.pages.n_pages;
                    there = !missing;
                    batch = u64(entry);
                }
            } else if (p.sequences.k_starts || p.sequences.k_consecutive) {
                batch = 0;
            }
            k[lane] = there ? kv.k.row(batch, head, token) : missing ? kMissingRow : 0;
            v_[at(lane)] = there ? kv.v.row(batch, head, token) : 0;
        }
    }
};

}  // namespace attention
