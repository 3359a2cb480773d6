// mxfp.hip: MX blocks of 32 along any axis, and back
//   down  s = 2^(b - 127) of the block by hk::BlockRule, q = nearest element to x / s; see mx_quant.hip, which has the last axis
//   up    out = round_T(q * 2^(b - 127)), the product exact; b = 255 gives NaN
//   x, out  [outer, length, inner]       T = bf16 | f16                   any strides
//   q       [outer, length / 2, inner]   pairs of fp4 along the axis, even low  any strides
//           [outer, length, inner]       fp8 e4m3, e5m2 (OCP)
//   scale   [outer, blocks, inner]       e8m0                             any strides
// How the work is split: along other axes than the last a lane has a block of kCols neighbouring columns, 4 where all
// rows are on their alignment, else 1. Along the last one (`up` by rows) as in tiles.h.
// Floor: numel * (2 + 0.5 or 1 + 1/32) bytes.
#include <hk/entry.h>

#include "mx.h"
#include "tiles.h"

namespace {
using hk::Access;
using hk::GlobalPtr;
using hk::i64;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using hk::u8;

struct Strides {
    i64 outer, along, inner;
};

struct Params {  // same fields, same order as `Params` in src/mxfp.rs
    hk::Global x, q, scale;  // x is `out` of `up`
    Strides x_at, q_at, scale_at;
    hk::BlockRule rule;
    mx::Element element;
    u32 length, inner, blocks;
    u32 units;  // outer * blocks * (inner / kCols)
};

template <class T>
HK_FN GlobalPtr<T> at(const hk::Global &g, const Strides &s, u64 outer, u64 along, u64 inner) {
    return g.row<T>(0) + outer * u64(s.outer) + along * u64(s.along) + inner * u64(s.inner);
}

/// kCols neighbouring elements, N bytes on their alignment.
template <class T, int kCols>
HK_FN hk::Vec<T, kCols> load(GlobalPtr<T> from) {
    if constexpr (kCols == 1) return *from;
    return *reinterpret_cast<GlobalPtr<hk::Vec<T, kCols>>>(from);
}

template <class T, int kCols>
HK_FN void store(GlobalPtr<T> to, hk::Vec<T, kCols> v) {
    if constexpr (kCols == 1) {
        *to = v[0];
    } else {
        *reinterpret_cast<GlobalPtr<hk::Vec<T, kCols>>>(to) = v;
    }
}

/// A lane's place: `f(outer, block, first column, rows of the block)`.
template <int kCols, class F>
HK_FN void for_blocks(const Params &p, F f) {
    const u32 chunks = p.inner / kCols;
    for (u64 unit = u64(hk::block_x()) * hk::kWaveSize + hk::thread_x(); unit < p.units;
         unit += u64(hk::grid_x()) * hk::kWaveSize) {
        const u32 row = u32(unit) / chunks;
        const u32 left = p.length - row % p.blocks * mx::kBlock;
        f(row / p.blocks, row % p.blocks, u32(unit) % chunks * kCols, left < mx::kBlock ? left : mx::kBlock);
    }
}

template <class T, int kCols>
HK_FN void down(const Params &p) {
    for_blocks<kCols>(p, [&](u32 outer, u32 block, u32 column, u32 rows) {
        // Rows past a short block are its last ones again, by pairs if they are in pairs: they change no maximum, and are
        // written to where they came from. A test for each row would keep more masks than there are registers for.
        const auto place = [&](u32 count, u32 r) {
            const u32 last = r % 2 == 0 && count % 2 == 0 ? count - 2 : count - 1;
            return u64(block) * mx::kBlock + (r < last ? r : last);
        };
        hk::Vec<T, kCols> x[mx::kBlock];
#pragma unroll
        for (u32 r = 0; r < mx::kBlock; ++r) x[r] = load<T, kCols>(at<T>(p.x, p.x_at, outer, place(rows, r), column));
        hk::Vec<float, kCols> inverse;
        hk::Vec<u8, kCols> codes;
        u32 keep[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            hk::AbsMax max;
#pragma unroll
            for (u32 r = 0; r < mx::kBlock; ++r) max.add(hk::Vec<float, 1>(float(x[r][c])));
            const u32 code = p.rule.code(max.bits);
            codes[c] = u8(code);
            inverse[c] = hk::e8m0_inverse(code);
            keep[c] = code == 255u ? 0 : 0xffu;
        }
        store<u8, kCols>(at<u8>(p.scale, p.scale_at, outer, block, column), codes);

        mx::with_encoder(p.element, [&](auto encode) {
            constexpr bool kPairs = decltype(encode)::template kBytes<2> == 1;
            constexpr u32 kStep = kPairs ? 2 : 1;
            // Four columns at a time, or one padded to four: words hold neighbouring columns of a row, or of a pair.
            constexpr int kFour = kCols < 4 ? kCols : 4;
            u32 count = rows;
            hk::forget(count);  // places are computed anew, not kept
#pragma unroll
            for (u32 r = 0; r < mx::kBlock; r += kStep) {
                hk::Vec<u8, kCols> bytes;
#pragma unroll
                for (int c = 0; c < kCols; c += kFour) {
                    hk::Vec<float, 4 * int(kStep)> v = 0.0f;
#pragma unroll
                    for (int i = 0; i < kFour; ++i) {
#pragma unroll
                        for (u32 j = 0; j < kStep; ++j) {
                            v[i * int(kStep) + int(j)] = float(x[r + j][c + i]) * inverse[c + i];
                        }
                    }
                    const u32 word = encode(v)[0];
#pragma unroll
                    for (int i = 0; i < kFour; ++i) bytes[c + i] = u8((word >> (8 * i)) & keep[c + i]);
                }
                store<u8, kCols>(at<u8>(p.q, p.q_at, outer, place(count, r) / kStep, column), bytes);
            }
        });
    });
}

/// The values of the bytes of `Elements` elements.
template <int kElements>
HK_FN hk::Vec<float, kElements> decode(const Params &p, hk::Vec<u32, kElements / 8> pairs, hk::Vec<u32, kElements / 4> bytes) {
    if (p.element == mx::Element::Fp8) return hk::from_codes<hk::CodeKind::Fp8>(bytes);
    if (p.element == mx::Element::E5M2) return hk::from_codes<hk::CodeKind::Fp8E5M2>(bytes);
    hk::Vec<float, kElements> v;
#pragma unroll
    for (int i = 0; i < kElements / 8; ++i) {
        const auto eight = hk::from_fp4(pairs[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[8 * i + j] = eight[j];
    }
    return v;
}

template <class T, int kCols>
HK_FN void up(const Params &p) {
    for_blocks<kCols>(p, [&](u32 outer, u32 block, u32 column, u32 rows) {
        const auto codes = load<u8, kCols>(at<u8>(p.scale, p.scale_at, outer, block, column));
        hk::Vec<float, kCols> scale;
#pragma unroll
        for (int c = 0; c < kCols; ++c) scale[c] = hk::e8m0_value(codes[c]);
        const bool is_pairs = p.element == mx::Element::Fp4;
        // Pairs of rows, which pairs of fp4 are.
        for (u32 r = 0; r < rows; r += 2) {
            const u64 along = u64(block) * mx::kBlock + r;
            hk::Vec<float, kCols> v[2];
            const auto q = load<u8, kCols>(at<u8>(p.q, p.q_at, outer, is_pairs ? along / 2 : along, column));
            hk::Vec<u8, kCols> next = q;
            if (!is_pairs && r + 1 < rows) next = load<u8, kCols>(at<u8>(p.q, p.q_at, outer, along + 1, column));
#pragma unroll
            for (int c = 0; c < kCols; ++c) {
                const u32 pair = u32(q[c]), two = pair | u32(next[c]) << 8;
                const auto values = decode<8>(p, pair, hk::Vec<u32, 2>{two, 0});
                v[0][c] = values[0] * scale[c];
                v[1][c] = values[1] * scale[c];
            }
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                if (r + j < rows) {
                    store<T, kCols>(at<T>(p.x, p.x_at, outer, along + j, column), hk::narrow<T, kCols>(v[j]));
                }
            }
        }
    });
}

/// Along the last axis: rows of `length`, as many as x has.
template <Access kAccess, class T>
HK_FN void up_rows(const Params &p) {
    constexpr int kN = quant::kChunk<T>, kChunks = 2;
    using RowT = hk::Row<T, hk::kWaveSize, kN, kChunks>;
    const bool is_pairs = p.element == mx::Element::Fp4;
    quant::for_tiles<hk::kWaveSize, RowT::kCols>(
        p.x.rows(), p.length, hk::thread_x() * kN, 1, [&](const RowBatch &batch) {
            hk::Vec<u32, kN / 8> pairs[kChunks] = {};
            hk::Vec<u32, kN / 4> bytes[kChunks] = {};
            if (is_pairs) {
                const RowBatch there = {batch.first, 1, batch.column / 2, batch.cols / 2};
                const auto row = hk::Row<u8, hk::kWaveSize, kN / 2, kChunks>::load(there.at<u8, kAccess, true>(p.q, 0));
#pragma unroll
                for (int k = 0; k < kChunks; ++k) pairs[k] = __builtin_bit_cast(hk::Vec<u32, kN / 8>, row.chunk[k]);
            } else {
                const auto row = hk::Row<u8, hk::kWaveSize, kN, kChunks>::load(batch.at<u8, kAccess, true>(p.q, 0));
#pragma unroll
                for (int k = 0; k < kChunks; ++k) bytes[k] = __builtin_bit_cast(hk::Vec<u32, kN / 4>, row.chunk[k]);
            }
            float scale[kChunks];
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const u32 column = batch.column + k * hk::kWaveSize * kN;
                scale[k] = 0.0f;
                if (column < p.length) {
                    scale[k] = hk::e8m0_value(
                        p.scale.row<u8>(0)[batch.first * u64(p.scale_at.outer) + column / mx::kBlock * u64(p.scale_at.along)]);
                }
            }
            RowT out;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                out.chunk[k] = hk::narrow<T, kN>(decode<kN>(p, pairs[k], bytes[k]) * scale[k]);
            }
            out.store(batch.at<T, kAccess, true>(p.x, 0));
        });
}
}  // namespace

#define ENTRIES(T)                                                                                  \
    HK_ENTRY(mxfp_down_##T##_4, hk::kWaveSize, down<hk::T, 4>)                                      \
    HK_ENTRY(mxfp_down_##T##_1, hk::kWaveSize, down<hk::T, 1>)                                      \
    HK_ENTRY(mxfp_up_##T##_4, hk::kWaveSize, up<hk::T, 4>)                                          \
    HK_ENTRY(mxfp_up_##T##_1, hk::kWaveSize, up<hk::T, 1>)                                          \
    HK_ENTRY(mxfp_up_##T##_long, hk::kWaveSize, up_rows<Access::Vectors, hk::T>)                    \
    HK_ENTRY(mxfp_up_##T##_long_elements, hk::kWaveSize, up_rows<Access::Elements, hk::T>)

ENTRIES(bf16)
ENTRIES(f16)
