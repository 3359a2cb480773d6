// shuffle.hip: weights to the pre-shuffled layout of matrix instructions, and back.
//   In a block of 16 rows, 16-byte chunk c of row r is chunk 16 c + r (hk::RowLayout). Rows shorter than those of the shuffled tensor
//   are padded with zeros.
//   A lane has a chunk of the shuffled tensor. Floor: the bytes of both.
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/types.h>

namespace {
using hk::Access;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

constexpr u32 kThreads = 256, kChunk = 16, kRows = 16;

struct Params {
    u64 plain, shuffled;
    i64 batch, row;  // strides of the plain tensor, in bytes
    u32 chunks;  // 16-byte chunks in a row of the shuffled tensor
    u32 rows;
    u64 all;  // chunks of the shuffled tensor
    u32 bytes;  // bytes of a plain row
    u32 back;  // from shuffled to plain
};

template <Access kAccess>
HK_FN void shuffle(const Params &p) {
    for (u64 i = u64(hk::block_x()) * kThreads + hk::thread_x(); i < p.all; i += u64(hk::grid_x()) * kThreads) {
        const u64 of_block = u64(kRows) * p.chunks;
        const u64 block = i / of_block;
        const u32 in_block = u32(i - block * of_block);
        const u64 row = block * kRows + in_block % kRows;
        const u64 batch = row / p.rows;
        const u32 at = in_block / kRows * kChunk;
        const auto plain =
            reinterpret_cast<GlobalPtr<u8>>(p.plain) + i64(batch) * p.batch + i64(row - batch * p.rows) * p.row + at;
        const auto shuffled = reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(p.shuffled) + i;
        if constexpr (kAccess == Access::Vectorized) {
            const auto chunk = reinterpret_cast<GlobalPtr<Vec<u32, 4>>>(plain);
            if (!p.back) {
                *shuffled = at < p.bytes ? *chunk : Vec<u32, 4>(0u);
            } else if (at < p.bytes) {
                *chunk = *shuffled;
            }
        } else {
            Vec<u8, kChunk> v = u8(0);
            if (p.back) v = __builtin_bit_cast(Vec<u8, kChunk>, *shuffled);
#pragma unroll
            for (u32 j = 0; j < kChunk; ++j) {
                if (at + j >= p.bytes) continue;
                if (p.back)
                    plain[j] = v[j];
                else
                    v[j] = plain[j];
            }
            if (!p.back) *shuffled = __builtin_bit_cast(Vec<u32, 4>, v);
        }
    }
}
}  // namespace

HK_ENTRY(weights_shuffle, kThreads, shuffle<Access::Vectorized>)
HK_ENTRY(weights_shuffle_scalar, kThreads, shuffle<Access::Scalar>)
