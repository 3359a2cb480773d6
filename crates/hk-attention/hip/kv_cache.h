// kv_cache.h: tokens, their slots in a cache, and stores of row fragments.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/quant.h>
#include <hk/rope.h>
#include <hk/types.h>

namespace cache {

using hk::GlobalPtr;
using hk::i64;
using hk::u16;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// Element format of a target. Same values as in src/kv_cache/cache.rs.
enum Format : u32 {
    kAsInput = 0,
    kFp8Fnuz = 1,
    kFp8Ocp = 2,
    kZeros = 3,  // zeros, in the type of the input
};

/// Destination of rows: strides of block, token within the block, head and column, in elements. Tokens of a block and columns of
/// a row can be in contiguous pieces of 2^shift elements, with the stride from piece to piece.
/// An output is a target with one token per block.
struct Target {
    static constexpr u32 kSlots = 0xffffffffu;

    u64 data;
    u64 scale;  // f32[1], or [sequences, scale_heads], to divide by; 0: none
    i64 block, head, within, col;
    u32 within_shift, col_shift;
    u32 format;
    u32 tokens;  // tokens that are stored, from the first on; kSlots: a cache, which takes tokens with a slot
    u32 grouped;  // a column-major cache is aligned for 16 bytes of tokens
    u32 scale_heads;  // 0: one factor

    /// Offset of head 0 of a token.
    HK_FN i64 row(u64 block_index, u32 token) const {
        return i64(block_index) * block + piece(token, within_shift, within);
    }
    HK_FN i64 column(u32 c) const { return piece(c, col_shift, col); }

    template <class T>
    HK_FN u32 element_bytes() const {
        return format == kFp8Fnuz || format == kFp8Ocp ? 1 : sizeof(T);
    }

    /// It holds the bits of the input.
    HK_FN bool is_copy() const { return format == kAsInput && scale == 0; }

  private:
    HK_FN static i64 piece(u32 i, u32 shift, i64 stride) {
        return i64(i >> shift) * stride + i64(i & ((1u << shift) - 1u));
    }
};

/// Slots and angles of tokens.
struct Common {
    hk::Rope rope;
    hk::Global slots;  // (1, 1, 1, n) of i32 or i64
    u64 n_slots;
    u32 slots_are_i64;
    u32 block_tokens;
    u32 rotated_tokens;  // tokens that have a position; those beyond are copied
    u32 cached_tokens;  // tokens that have a slot
};

/// Table row and slot of a token.
struct Place {
    u64 slot;
    u32 row;  // of the tables
    bool rotate;  // it has a position, in the tables
    bool poison;  // it has one that the tables do not
    bool cached;  // it has a slot, in the cache
};

/// Slots are checked on the device: a negative one is a large number.
HK_FN u64 slot_of(const Common &c, u32 token) {
    const i64 at = i64(token) * c.slots.strides[3];
    if (c.slots_are_i64) return u64(c.slots.row<const i64>(0)[at]);
    return u64(i64(c.slots.row<const hk::i32>(0)[at]));
}

/// `slots`: whether the slot is needed.
HK_FN Place place_of(const Common &c, u32 token, bool slots) {
    Place place = {};
    if (token < c.rotated_tokens) {
        place.row = c.rope.table_row(0, token);
        place.poison = place.row == hk::Rope::kNoRow;
        place.rotate = !place.poison;
    }
    if (slots && token < c.cached_tokens) {
        place.slot = slot_of(c, token);
        place.cached = place.slot < c.n_slots && !place.poison;
    }
    return place;
}

template <class T, int N>
HK_FN Vec<T, N> load(GlobalPtr<const T> from) {
    constexpr int kPart = N < hk::kVecLen<T> ? N : hk::kVecLen<T>;
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < N; i += kPart) {
        if constexpr (kPart == 1) {
            v[i] = from[i];
        } else {
            const auto part = *reinterpret_cast<GlobalPtr<const Vec<T, kPart>>>(from + i);
#pragma unroll
            for (int j = 0; j < kPart; ++j) v[i + j] = part[j];
        }
    }
    return v;
}

/// N contiguous elements, at most 16 bytes per access.
template <class T, int N>
HK_FN void store(GlobalPtr<T> to, Vec<T, N> v) {
    if constexpr (N == 1) {
        *to = v[0];
    } else if constexpr (N > hk::kVecLen<T>) {
        store<T, N / 2>(to, v.lo);
        store<T, N / 2>(to + N / 2, v.hi);
    } else {
        *reinterpret_cast<GlobalPtr<Vec<T, N>>>(to) = v;
    }
}

HK_FN float scale_of(const Target &t) { return t.scale ? 1.0f / hk::load_uniform<float>(t.scale) : 1.0f; }

/// N values quantized to an fp8 format.
template <hk::QuantType kKind, int N>
HK_FN Vec<u8, N> quantize(Vec<float, N> v) {
    if constexpr (N == 1) {
        return hk::quantize_one<kKind>(v[0]);
    } else {
        return __builtin_bit_cast(Vec<u8, N>, hk::quantize_packed<kKind, N>(v));
    }
}
template <int N>
HK_FN Vec<u8, N> to_fp8(Vec<float, N> v, u32 format) {
    if (format == kFp8Fnuz) return quantize<hk::QuantType::Fp8Fnuz, N>(v);
    return quantize<hk::QuantType::Fp8, N>(v);
}

/// Rounds and stores N contiguous columns, `at` elements from `data`; if `poison` NaN instead, with the same bits on every
/// target.
template <class T, int N>
HK_FN void write(const Target &to, u64 data, i64 at, Vec<float, N> v, bool poison) {
    if (to.format == kFp8Fnuz || to.format == kFp8Ocp) {
        if (poison) v = Vec<float, N>(__builtin_nanf(""));
        store<u8, N>(reinterpret_cast<GlobalPtr<u8>>(data) + at, to_fp8<N>(v, to.format));
    } else if (to.format == kZeros) {
        store<T, N>(reinterpret_cast<GlobalPtr<T>>(data) + at, Vec<T, N>(T(0.0f)));
    } else {
        store<T, N>(reinterpret_cast<GlobalPtr<T>>(data) + at, poison ? hk::Rope::poison<T, N>() : hk::narrow<T, N>(v));
    }
}

}  // namespace cache
