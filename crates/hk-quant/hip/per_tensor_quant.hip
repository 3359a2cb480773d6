// per_tensor_quant.hip: one scale for a matrix.
//   static        q[r, c] = quantize(x[r, c] * (1 / scale))
//   static, exact q[r, c] = quantize(x[r, c] / scale)                downcast_to_static_fp8
//   dynamic       scale = max |x| / qmax, then as static; three launches: clear, scale, quant
//   x      [rows, cols]  T = bf16 | f16 | f32      unit stride on cols, rows any stride
//   q      [rows, cols]  i8 | fp8 e4m3, OCP or FNUZ  likewise
//   scale  [1]           f32
// How the work is split: tiles.h; several rows of up to 128 columns per wave; longer rows in tiles of 4 KiB, as one row where
// there are no gaps between them.
// Floor: rows * cols * (sizeof(T) + 1) bytes, dynamic rows * cols * (2 * sizeof(T) + 1).
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/math.h>
#include <hk/wave.h>

#include "tiles.h"

namespace {
using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u8;

struct Params {
    hk::Global x, q, scale;
    hk::QuantFormat format;
    u32 batch;  // rows that a block takes at a time
    u32 divide;  // divides by the scale rather than multiplying by its reciprocal
    u32 dynamic;  // 1: the scale is that of this call; 0 stands for 1, the scale of zeros
    u32 pad;
};

/// The bits of the scale of some values. Their maximum over the blocks is the scale of the tensor: the quotient is monotonic
/// in the dividend, and positive floats have the order of their bits.
HK_FN u32 gathered_scale(u32 top, float qmax) {
    const float amax = hk::FiniteMax::value(top);
    return amax > 0.0f ? __builtin_bit_cast(u32, hk::linear_scale(amax, qmax)) : 0;
}

/// Resets the scale.
HK_FN void clear(const Params &p) {
    if (hk::thread_x() == 0) *p.scale.row<u32>(0) = 0;
}

template <Access kAccess, class T, int Lanes, int Chunks, int Rows>
HK_FN void gather(const Params &p) {
    constexpr bool kSingleRow = Lanes == hk::kWaveSize;
    constexpr u32 kRowsPerBlock = kSingleRow ? 1 : hk::row_threads(Lanes) / Lanes;
    using RowT = hk::Row<T, Lanes, quant::kChunk<T>, Chunks>;
    const u32 side = hk::thread_x() / Lanes, column = hk::thread_x() % Lanes * quant::kChunk<T>;
    u32 top = hk::FiniteMax::kZero;
    quant::for_tiles<Lanes, RowT::kCols, true>(p.x.rows(), p.x.cols(), column, p.batch, [&](const RowBatch &batch) {
        RowT x[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r)
            x[r] = RowT::load(batch.at<T, kAccess, kSingleRow>(p.x, r * kRowsPerBlock + side));
#pragma unroll
        for (int r = 0; r < Rows; ++r) top = hk::MaxBits{}(top, quant::finite_max(hk::widen(x[r])));
    });
    top = hk::group_reduce<hk::kWaveSize>(top, hk::MaxBits{});
    if (hk::lane_id() == 0) hk::atomic_max(p.scale.row<u32>(0), gathered_scale(top, p.format.qmax));
}

template <Access kAccess, class T, int Lanes, int Chunks, int Rows>
HK_FN void encode(const Params &p) {
    constexpr bool kSingleRow = Lanes == hk::kWaveSize;
    constexpr u32 kRowsPerBlock = kSingleRow ? 1 : hk::row_threads(Lanes) / Lanes;
    using RowT = hk::Row<T, Lanes, quant::kChunk<T>, Chunks>;
    using RowF = typename RowT::template With<float>;
    const u32 side = hk::thread_x() / Lanes, column = hk::thread_x() % Lanes * quant::kChunk<T>;

    u32 bits = 0;
    if (hk::lane_id() == 0) bits = hk::atomic_load(p.scale.row<u32>(0));
    float scale = __builtin_bit_cast(float, hk::broadcast(bits, 0));
    if (p.dynamic && scale == 0.0f) {
        // Later blocks read 0 or 1: both mean 1.
        scale = 1.0f;
        if (hk::block_x() == 0 && hk::thread_x() == 0)
            hk::atomic_max(p.scale.row<u32>(0), __builtin_bit_cast(u32, scale));
    }
    const float inverse = 1.0f / scale;
    const hk::DivideBy quotient(scale);
    quant::for_tiles<Lanes, RowT::kCols>(p.x.rows(), p.x.cols(), column, p.batch, [&](const RowBatch &batch) {
        RowT x[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r)
            x[r] = RowT::load(batch.at<T, kAccess, kSingleRow>(p.x, r * kRowsPerBlock + side));
        RowF v[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            v[r] = hk::widen(x[r]);
#pragma unroll
            for (int k = 0; k < Chunks; ++k) {
                if (p.divide) {
                    v[r].chunk[k] = quotient(v[r].chunk[k]);
                } else {
                    v[r].chunk[k] *= inverse;
                }
            }
        }
        p.format.with_type([&](auto kind) {
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                quant::quantize<decltype(kind)::value>(v[r]).store(
                    batch.at<u8, kAccess, kSingleRow>(p.q, r * kRowsPerBlock + side));
            }
        });
    });
}
}  // namespace

// Entry points of one dtype, one per row of `variants` in src/launch_tiles.rs. Name = op, dtype, widest row,
// `_scalar` for the scalar path.
#define ENTRIES(op, body, T)                                                                                           \
    HK_ENTRY(op##_##T##_128, hk::row_threads(1), body<Access::Vectorized, hk::T, 128 / quant::kChunk<hk::T>, 1, 2>)    \
    HK_ENTRY(op##_##T##_long, hk::kWaveSize, body<Access::Vectorized, hk::T, hk::kWaveSize, 2, 1>)                     \
    HK_ENTRY(op##_##T##_128_scalar, hk::row_threads(1), body<Access::Scalar, hk::T, 128 / quant::kChunk<hk::T>, 1, 1>) \
    HK_ENTRY(op##_##T##_long_scalar, hk::kWaveSize, body<Access::Scalar, hk::T, hk::kWaveSize, 1, 1>)

HK_ENTRY(per_tensor_clear, hk::kWaveSize, clear)
ENTRIES(per_tensor_scale, gather, bf16)
ENTRIES(per_tensor_scale, gather, f16)
ENTRIES(per_tensor_scale, gather, f32)
ENTRIES(per_tensor_quant, encode, bf16)
ENTRIES(per_tensor_quant, encode, f16)
ENTRIES(per_tensor_quant, encode, f32)
