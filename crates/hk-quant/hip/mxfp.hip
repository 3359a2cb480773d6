// mxfp.hip: MX blocks of 32 along any axis, and back
//   down  s = 2^(b - 127) of the block by hk::BlockRule, q = nearest element to x / s; the last axis is in mx_quant.hip
//   up    out = round_T(q * 2^(b - 127)), the product exact; b = 255 gives NaN
//   x, out  [outer, length, inner]       T = bf16 | f16                   any strides
//   q       [outer, length / 2, inner]   pairs of fp4 along the axis, even in the low nibble; any strides
//           [outer, length, inner]       fp8 e4m3, e5m2 (OCP)
//   scale   [outer, blocks, inner]       e8m0                             any strides
// How the work is split, along other axes than the last: where rows are 16-byte aligned and blocks are full, a lane has 8
// adjacent columns of a block, 16 bytes of each row of x, and two lanes exchange bytes so that accesses to q are 16 bytes
// too; else (`.._1`) a lane has one column of a block. Along the last axis (`up_rows`) as in tiles.h; lanes exchange bytes
// there as well: loads of q are 16 bytes, and stores of adjacent lanes are coalesced.
// Floor: numel * (2 + 0.5 or 1 + 1/32) bytes.
#include <hk/entry.h>
#include <hk/wave.h>

#include "mx.h"
#include "tiles.h"

namespace {
using hk::Access;
using hk::GlobalPtr;
using hk::i64;
using hk::RowBatch;
using hk::u16;
using hk::u32;
using hk::u64;
using hk::u8;

struct Strides {
    i64 outer, along, inner;
};

struct Params {
    hk::Global x, q, scale;  // x is `out` of `up`
    Strides x_at, q_at, scale_at;
    hk::BlockRule rule;
    mx::Element element;
    u32 length, inner, blocks;
    u32 units;  // outer * blocks * inner / columns per lane
};

template <class T>
HK_FN GlobalPtr<T> at(const hk::Global &g, const Strides &s, u64 outer, u64 along, u64 inner) {
    return g.row<T>(0) + outer * u64(s.outer) + along * u64(s.along) + inner * u64(s.inner);
}

/// Calls `f(outer, block, first column)` for each of this lane's blocks of kCols columns.
template <int kCols, class F>
HK_FN void for_blocks(const Params &p, F f) {
    const u32 chunks = p.inner / kCols;
    for (u64 unit = u64(hk::block_x()) * hk::kWaveSize + hk::thread_x(); unit < p.units;
         unit += u64(hk::grid_x()) * hk::kWaveSize) {
        const u32 row = u32(unit) / chunks;
        f(row / p.blocks, row % p.blocks, u32(unit) % chunks * kCols);
    }
}

constexpr int kCols = 8;
using Bytes16 = hk::Vec<u32, 4>;

/// Two adjacent lanes hold the bytes of two rows of 16 columns: either 8 columns of both rows each (dwords 0 and 1 of the
/// first, 2 and 3 of the second), or one row each, the even lane the first. Converts either form to the other.
HK_FN Bytes16 exchange(Bytes16 v) {
    u32 a[2] = {v[0], v[1]}, b[2] = {v[2], v[3]};
#pragma unroll
    for (int i = 0; i < 2; ++i) hk::transpose_lanes<1>(a[i], b[i]);
    return {a[0], a[1], b[0], b[1]};
}

/// Address of a lane's 16 bytes of q: its block at the first column of the lane pair, one row on for the odd lane.
template <int kStep>
HK_FN GlobalPtr<u8> exchanged_at(const Params &p, u32 outer, u32 block, u32 column) {
    const u32 odd = column / kCols % 2;
    return at<u8>(p.q, p.q_at, outer, u64(block) * (mx::kBlock / kStep) + odd, column - odd * kCols);
}

template <class T>
HK_FN void down(const Params &p) {
    for_blocks<kCols>(p, [&](u32 outer, u32 block, u32 column) {
        using Bits = hk::Vec<u16, kCols>;
        hk::Vec<T, kCols> x[mx::kBlock];
        GlobalPtr<T> from = at<T>(p.x, p.x_at, outer, u64(block) * mx::kBlock, column);
#pragma unroll
        for (u32 r = 0; r < mx::kBlock; ++r, from += p.x_at.along) {
            x[r] = *reinterpret_cast<GlobalPtr<hk::Vec<T, kCols>>>(from);
        }
        // Magnitudes have the order of their bits.
        Bits top = u16(0);
#pragma unroll
        for (u32 r = 0; r < mx::kBlock; ++r) {
            top = __builtin_elementwise_max(top, __builtin_bit_cast(Bits, x[r]) & u16(0x7fff));
        }
        const auto amax = hk::widen<T, kCols>(__builtin_bit_cast(hk::Vec<T, kCols>, top));
        hk::Vec<float, kCols> inverse;
        hk::Vec<u8, kCols> codes, keep;
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            const u32 code = p.rule.code(hk::detail::bits_of(amax[c]));
            codes[c] = u8(code);
            inverse[c] = hk::e8m0_inverse(code);
            keep[c] = code == 255u ? 0 : 0xff;
        }
        *reinterpret_cast<GlobalPtr<hk::Vec<u8, kCols>>>(at<u8>(p.scale, p.scale_at, outer, block, column)) = codes;
        const auto keep_words = __builtin_bit_cast(hk::Vec<u32, 2>, keep);

        mx::with_encoder(p.element, [&](auto encode) {
            constexpr int kStep = decltype(encode)::template kBytes<2> == 1 ? 2 : 1;  // rows per byte
            GlobalPtr<u8> to = exchanged_at<kStep>(p, outer, block, column);
#pragma unroll
            for (u32 r = 0; r < mx::kBlock; r += 2 * kStep, to += 2 * p.q_at.along) {
                Bytes16 bytes;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // A dword holds four adjacent columns of a row, or of a pair of rows.
                    const int row = int(r) + i / 2 * kStep, first = i % 2 * 4;
                    hk::Vec<float, 4 * kStep> v;
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
#pragma unroll
                        for (int j = 0; j < kStep; ++j)
                            v[c * kStep + j] = float(x[row + j][first + c]) * inverse[first + c];
                    }
                    bytes[i] = encode(v)[0] & keep_words[i % 2];
                }
                *reinterpret_cast<GlobalPtr<Bytes16>>(to) = exchange(bytes);
            }
        });
    });
}

template <class T>
HK_FN void down_column(const Params &p) {
    for_blocks<1>(p, [&](u32 outer, u32 block, u32 column) {
        const u32 left = p.length - block * mx::kBlock, rows = left < mx::kBlock ? left : mx::kBlock;
        // Rows past a short block repeat its last ones, in pairs if the block has an even length: they change no maximum,
        // and are stored where they came from. A predicate per row would need more masks than there are SGPRs.
        const auto place = [&](u32 count, u32 r) {
            const u32 last = r % 2 == 0 && count % 2 == 0 ? count - 2 : count - 1;
            return u64(block) * mx::kBlock + (r < last ? r : last);
        };
        hk::Vec<T, mx::kBlock> x;
#pragma unroll
        for (u32 r = 0; r < mx::kBlock; ++r) x[r] = *at<T>(p.x, p.x_at, outer, place(rows, r), column);
        auto v = hk::widen(x);
        hk::AbsMax max;
        max.add(v);
        const u32 code = p.rule.code(max.bits);
        const u32 keep = code == 255u ? 0 : ~0u;
        v *= hk::e8m0_inverse(code);
        *at<u8>(p.scale, p.scale_at, outer, block, column) = u8(code);

        mx::with_encoder(p.element, [&](auto encode) {
            constexpr int kBytes = decltype(encode)::template kBytes<mx::kBlock>;
            constexpr u32 kStep = mx::kBlock / kBytes;
            const auto bytes = __builtin_bit_cast(hk::Vec<u8, kBytes>, encode(v) & keep);
            u32 count = rows;
            hk::opaque(count);  // recomputes the addresses rather than keeping them
#pragma unroll
            for (u32 i = 0; i < kBytes; ++i) {
                *at<u8>(p.q, p.q_at, outer, place(count, i * kStep) / kStep, column) = bytes[i];
            }
        });
    });
}

template <class T>
HK_FN void up(const Params &p) {
    for_blocks<kCols>(p, [&](u32 outer, u32 block, u32 column) {
        const auto codes =
            *reinterpret_cast<GlobalPtr<hk::Vec<u8, kCols>>>(at<u8>(p.scale, p.scale_at, outer, block, column));
        mx::with_decoder(p.element, [&](auto decode) {
            constexpr int kStep = decltype(decode)::kPerByte;
            constexpr int kLoads = mx::kBlock / (2 * kStep);
            Bytes16 q[kLoads];
            GlobalPtr<u8> from = exchanged_at<kStep>(p, outer, block, column);
#pragma unroll
            for (int i = 0; i < kLoads; ++i, from += 2 * p.q_at.along)
                q[i] = *reinterpret_cast<GlobalPtr<Bytes16>>(from);
            hk::Vec<float, kCols> scale;
#pragma unroll
            for (int c = 0; c < kCols; ++c) scale[c] = hk::e8m0_value(codes[c]);
            GlobalPtr<T> to = at<T>(p.x, p.x_at, outer, u64(block) * mx::kBlock, column);
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const Bytes16 mine = exchange(q[i]);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const auto v = decode(hk::Vec<u32, 2>{mine[2 * row], mine[2 * row + 1]});
#pragma unroll
                    for (int j = 0; j < kStep; ++j, to += p.x_at.along) {
                        hk::Vec<float, kCols> out;
#pragma unroll
                        for (int c = 0; c < kCols; ++c) out[c] = v[c * kStep + j] * scale[c];
                        *reinterpret_cast<GlobalPtr<hk::Vec<T, kCols>>>(to) = hk::narrow<T, kCols>(out);
                    }
                }
            }
        });
    });
}

template <class T>
HK_FN void up_column(const Params &p) {
    for_blocks<1>(p, [&](u32 outer, u32 block, u32 column) {
        const u32 left = p.length - block * mx::kBlock, rows = left < mx::kBlock ? left : mx::kBlock;
        const float scale = hk::e8m0_value(*at<u8>(p.scale, p.scale_at, outer, block, column));
        mx::with_decoder(p.element, [&](auto decode) {
            constexpr u32 kStep = decltype(decode)::kPerByte;
            for (u32 r = 0; r < rows; r += kStep) {
                const u64 along = u64(block) * mx::kBlock + r;
                const u32 byte = *at<u8>(p.q, p.q_at, outer, along / kStep, column);
                const auto v = decode(hk::Vec<u32, 1>(byte));
#pragma unroll
                for (u32 j = 0; j < kStep; ++j) {
                    const hk::Vec<float, 2> out = {v[j] * scale, 0.0f};
                    *at<T>(p.x, p.x_at, outer, along + j, column) = hk::narrow<T, 2>(out)[0];
                }
            }
        });
    });
}

/// Along the last axis: rows of `length` columns in tiles of four chunks of 8 columns per lane.
template <Access kAccess, class T>
HK_FN void up_rows(const Params &p) {
    constexpr int kChunks = 4, kChunk = hk::kWaveSize * kCols;
    using RowT = hk::Row<T, hk::kWaveSize, kCols, kChunks>;
    const u32 lane = hk::thread_x();
    mx::with_decoder(p.element, [&](auto decode) {
        constexpr int kPer = decltype(decode)::kPerByte, kWords = kCols / kPer / 4;  // dwords per chunk
        quant::for_tiles<hk::kWaveSize, RowT::kCols>(p.x.rows(), p.length, lane * kCols, 1, [&](const RowBatch &batch) {
            const u32 tile = batch.column - lane * kCols;
            // Bytes of the row from column `first` on.
            const auto bytes_at = [&](u32 first) {
                return RowBatch{batch.first, 1, first / kPer, batch.cols / kPer}.at<u8, kAccess, true>(p.q, 0);
            };
            u32 q[kChunks][kWords];
            if constexpr (kAccess == Access::Vectorized) {
                // A lane loads 16 bytes of one of kSpan chunks, and kSpan lanes transpose them.
                constexpr int kSpan = 4 / kWords;
#pragma unroll
                for (int k = 0; k < kChunks; k += kSpan) {
                    const u32 first = tile + (k + lane % kSpan) * kChunk + lane / kSpan * (kSpan * kCols);
                    const auto sixteen = bytes_at(first).template load<16>(0);
                    const auto words = __builtin_bit_cast(Bytes16, sixteen);
#pragma unroll
                    for (int i = 0; i < 4; ++i) q[k + i / kWords][i % kWords] = words[i];
#pragma unroll
                    for (int w = 0; w < kWords; ++w) {
                        if constexpr (kSpan == 4) {
                            hk::transpose_lanes<2>(q[k][w], q[k + 2][w]);
                            hk::transpose_lanes<2>(q[k + 1][w], q[k + 3][w]);
                            hk::transpose_lanes<1>(q[k + 2][w], q[k + 3][w]);
                        }
                        hk::transpose_lanes<1>(q[k][w], q[k + 1][w]);
                    }
                }
            } else {
                constexpr int kBytes = 4 * kWords;
                const auto row = hk::Row<u8, hk::kWaveSize, kBytes, kChunks>::load(bytes_at(batch.column));
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    const auto words = __builtin_bit_cast(hk::Vec<u32, kWords>, row.chunk[k]);
#pragma unroll
                    for (int w = 0; w < kWords; ++w) q[k][w] = words[w];
                }
            }
            // Four lanes share a block in each chunk: each reads the scale of one chunk.
            const u32 mine = tile + lane % 4 * kChunk + lane / 4 * mx::kBlock;
            float scale = 0.0f;
            if (mine < p.length) {
                scale = hk::e8m0_value(p.scale.row<u8>(
                    0)[batch.first * u64(p.scale_at.outer) + mine / mx::kBlock * u64(p.scale_at.along)]);
            }
            const float scales[kChunks] = {hk::quad_broadcast<0>(scale), hk::quad_broadcast<1>(scale),
                                           hk::quad_broadcast<2>(scale), hk::quad_broadcast<3>(scale)};
            RowT out;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                hk::Vec<u32, kWords> words;
#pragma unroll
                for (int w = 0; w < kWords; ++w) words[w] = q[k][w];
                out.chunk[k] = hk::narrow<T, kCols>(decode(words) * scales[k]);
            }
            out.store(batch.at<T, kAccess, true>(p.x, 0));
        });
    });
}
}  // namespace

#define ENTRIES(T)                                                                  \
    HK_ENTRY(mxfp_down_##T##_8, hk::kWaveSize, down<hk::T>)                         \
    HK_ENTRY(mxfp_down_##T##_1, hk::kWaveSize, down_column<hk::T>)                  \
    HK_ENTRY(mxfp_up_##T##_8, hk::kWaveSize, up<hk::T>)                             \
    HK_ENTRY(mxfp_up_##T##_1, hk::kWaveSize, up_column<hk::T>)                      \
    HK_ENTRY(mxfp_up_##T##_long, hk::kWaveSize, up_rows<Access::Vectorized, hk::T>) \
    HK_ENTRY(mxfp_up_##T##_long_scalar, hk::kWaveSize, up_rows<Access::Scalar, hk::T>)

ENTRIES(bf16)
ENTRIES(f16)
