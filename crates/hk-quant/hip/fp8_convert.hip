// fp8_convert.hip: fp8 e4m3 from one encoding to the other, with its scales
//   to FNUZ: the same byte, half the value; 0x80 (-0) -> 0; 0x7f, 0xff (NaN) -> 0x80; scales doubled
//   to OCP:  the same byte, twice the value; 0x80 (NaN) -> 0x7f; 0x7f, 0xff (240) -> 0x7e, 0xfe; scales halved
//   q, out            [rows, cols]  bytes  unit stride on cols, rows any stride
//   scale, scale_out  any shape     f32    contiguous; scale_out may alias scale
// How the work is split: tiles.h, 64 bytes per lane; rows without gaps between them are one row.
// Floor: 2 * rows * cols + 8 * n bytes.
#include <hk/entry.h>

#include "tiles.h"

namespace {
using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using hk::u8;

struct Params {
    hk::Global q, scale, out, scale_out;
    u64 scales;  // number of scales
    u32 to_fnuz;
    u32 pad;
};

/// 0x01 in each byte of `word` that is zero. A byte less than 0x80 does not carry when 0x7f is added.
HK_FN u32 zero_bytes(u32 word) {
    const u32 low = (word & 0x7f7f7f7fu) + 0x7f7f7f7fu;
    return (~(low | word) >> 7) & 0x01010101u;
}

HK_FN u32 to_fnuz(u32 word) {
    const u32 zero = zero_bytes(word ^ 0x80808080u);                     // -0
    const u32 nan = zero_bytes((word & 0x7f7f7f7fu) ^ 0x7f7f7f7fu);      // both NaNs
    return (word & ~(zero * 0xffu) & ~(nan * 0xffu)) | nan * 0x80u;
}

HK_FN u32 to_ocp(u32 word) {
    const u32 nan = zero_bytes(word ^ 0x80808080u);
    const u32 largest = zero_bytes((word & 0x7f7f7f7fu) ^ 0x7f7f7f7fu);
    return (word ^ nan * 0xffu) - largest;  // 0x80 -> 0x7f; 0x7f -> 0x7e
}

template <Access kAccess>
HK_FN void fp8_convert(const Params &p) {
    using RowT = hk::Row<u8, hk::kWaveSize, 16, 4>;
    quant::for_tiles<hk::kWaveSize, RowT::kCols>(
        p.q.rows(), p.q.cols(), hk::thread_x() * 16, 1, [&](const RowBatch &batch) {
            RowT row = RowT::load(batch.at<u8, kAccess, true>(p.q, 0));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                auto words = __builtin_bit_cast(hk::Vec<u32, 4>, row.chunk[k]);
#pragma unroll
                for (int i = 0; i < 4; ++i) words[i] = p.to_fnuz ? to_fnuz(words[i]) : to_ocp(words[i]);
                row.chunk[k] = __builtin_bit_cast(hk::Vec<u8, 16>, words);
            }
            row.store(batch.at<u8, kAccess, true>(p.out, 0));
        });
    const float factor = p.to_fnuz ? 2.0f : 0.5f;
    for (u64 i = u64(hk::block_x()) * hk::kWaveSize + hk::thread_x(); i < p.scales;
         i += u64(hk::grid_x()) * hk::kWaveSize) {
        p.scale_out.row<float>(0)[i] = p.scale.row<float>(0)[i] * factor;
    }
}
}  // namespace

HK_ENTRY(fp8_convert_bytes, hk::kWaveSize, fp8_convert<Access::Vectorized>)
HK_ENTRY(fp8_convert_scalar, hk::kWaveSize, fp8_convert<Access::Scalar>)
