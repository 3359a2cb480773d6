// rows.h: rows of any element type, stride and alignment, and of pages, as operands of the kernel's type.
#pragma once

#include "problem.h"

#include <hk/block.h>
#include <hk/matrix.h>
#include <hk/quant.h>
#include <hk/types.h>

namespace attention {

/// N elements of T, which has 2 or 4 bytes, from `at`, of type T or of bytes that T holds exactly. `vectorized`: contiguous and
/// aligned; else `stride` bytes apart, and only the first `left` exist.
template <class T, int N>
HK_FN Vec<T, N> load_row(GlobalPtr<const u8> at, u32 type, bool vectorized, i64 stride, i32 left) {
    const auto of_bytes = [&]<hk::QuantType kType>(hk::QuantTypeConstant<kType>) {
        Vec<u8, N> bytes = u8(0);
        if (vectorized) {
            bytes = *reinterpret_cast<GlobalPtr<const Vec<u8, N>>>(at);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i < left) bytes[i] = at[i * stride];
            }
        }
        const auto values = hk::dequantize_packed<kType>(__builtin_bit_cast(Vec<u32, N / 4>, bytes));
        return __builtin_convertvector(values, Vec<T, N>);
    };
    if (type == kFp8) return of_bytes(hk::QuantTypeConstant<hk::kMmaFp8Type>{});
    if (type == kI8) return of_bytes(hk::QuantTypeConstant<hk::QuantType::I8>{});
    if (vectorized) return *reinterpret_cast<GlobalPtr<const Vec<T, N>>>(at);
    Vec<T, N> v = T(0);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (i < left) v[i] = *reinterpret_cast<GlobalPtr<const T>>(at + i * stride);
    }
    return v;
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

/// Addresses of the rows of a tile of keys, for one key head; 0: no such key.
template <int kKeys>
struct RowTable {
    u64 k[kKeys], v[kKeys];

    /// Lanes of the first wave find a row each. True: a page is not in the cache.
    HK_FN bool fill(const Params &p, const Work &work, const KeyTile &tile, u32 head) {
        static_assert(kKeys <= hk::kWaveSize, "a lane for each key");
        const u32 lane = hk::thread_x(), key = tile.first + lane;
        bool missing = false;
        if (lane < kKeys) {
            bool there = key < tile.end;
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
            k[lane] = there ? kv.k.row(batch, head, token) : 0;
            v[lane] = there ? kv.v.row(batch, head, token) : 0;
        }
        return missing;
    }
};

}  // namespace attention
