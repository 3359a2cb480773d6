// group_quant.hip: a scale for each group of g neighbouring columns of a row, g = 32, 64 or 128
//   s[r, i] = max(max_c |x[r, c]|, 1e-10) / qmax over the finite x of group i; or the least power of two that is not below
//   q[r, c] = quantize(x[r, c] * (1 / s[r, c / g]))
//   x      [rows, cols]    T = bf16 | f16 | f32        unit stride on cols, rows any stride
//   q      [rows, cols]    i8 | fp8 e4m3, OCP or FNUZ  likewise
//   scale  [rows, groups]  f32 | e8m0                  any strides: row-major or column-major
// How the work is split: tiles.h; adjacent lanes share a group. The last group may be short.
// Floor: rows * cols * (sizeof(T) + 1) + rows * groups * sizeof(scale) bytes.
#include <hk/entry.h>
#include <hk/wave.h>

#include "tiles.h"

namespace {
using hk::Access;
using hk::RowBatch;
using hk::u32;
using hk::u64;
using hk::u8;

struct Params {
    hk::Global x, q, scale;
    hk::QuantFormat format;
    hk::BlockRule pow2;  // rule of powers of two
    u32 power_of_two;  // 1: scales are powers of two
    u32 scale_is_e8m0;  // 1: stored as e8m0
    u32 group;  // columns of a group
    u32 batch;  // rows that a block takes at a time
    u32 pad;
};

struct Scale {
    float value;
    u32 e8m0;
};

HK_FN Scale scale_of(const Params &p, u32 top) {
    const float amax = hk::FiniteMax::value(top);
    if (p.power_of_two) {
        const u32 code = p.pow2.code(__builtin_bit_cast(u32, __builtin_fmaxf(amax, 1e-10f)));
        return {hk::e8m0_value(code), code};
    }
    return {hk::group_scale(amax, p.format.qmax), 0};
}

template <Access kAccess, class T, int Lanes, int Chunks, int Rows>
HK_FN void group_quant(const Params &p) {
    constexpr int kN = quant::kChunk<T>;
    constexpr bool kSingleRow = Lanes == hk::kWaveSize;
    constexpr u32 kRowsPerBlock = kSingleRow ? 1 : hk::row_threads(Lanes) / Lanes;
    using RowT = hk::Row<T, Lanes, kN, Chunks>;
    const u32 side = hk::thread_x() / Lanes, column = hk::thread_x() % Lanes * kN;

    quant::for_tiles<Lanes, RowT::kCols>(p.x.rows(), p.x.cols(), column, p.batch, [&](const RowBatch &batch) {
        RowT x[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r)
            x[r] = RowT::load(batch.at<T, kAccess, kSingleRow>(p.x, r * kRowsPerBlock + side));
        typename RowT::template With<float> v[Rows];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            v[r] = hk::widen(x[r]);
#pragma unroll
            for (int k = 0; k < Chunks; ++k) {
                hk::FiniteMax max;
                max.add(v[r].chunk[k]);
                u32 top = hk::group_reduce<32 / kN>(max.top, hk::MaxBits{});
                if (p.group >= 64) top = hk::group_reduce<64 / kN>(max.top, hk::MaxBits{});
                if (p.group >= 128) top = hk::group_reduce<128 / kN>(max.top, hk::MaxBits{});
                const Scale scale = scale_of(p, top);
                v[r].chunk[k] *= 1.0f / scale.value;

                const u32 index = r * kRowsPerBlock + side, at = batch.column + k * Lanes * kN;
                if (at < batch.cols && at % p.group == 0 && index < batch.count) {
                    const u64 element =
                        (batch.first + index) * u64(p.scale.strides[2]) + at / p.group * u64(p.scale.strides[3]);
                    if (p.scale_is_e8m0) {
                        p.scale.row<u8>(0)[element] = u8(scale.e8m0);
                    } else {
                        p.scale.row<float>(0)[element] = scale.value;
                    }
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
#define ENTRIES(T)                                                                                               \
    HK_ENTRY(group_quant_##T##_128, hk::row_threads(1),                                                          \
             group_quant<Access::Vectorized, hk::T, 128 / quant::kChunk<hk::T>, 1, 2>)                           \
    HK_ENTRY(group_quant_##T##_long, hk::kWaveSize, group_quant<Access::Vectorized, hk::T, hk::kWaveSize, 2, 1>) \
    HK_ENTRY(group_quant_##T##_128_scalar, hk::row_threads(1),                                                   \
             group_quant<Access::Scalar, hk::T, 128 / quant::kChunk<hk::T>, 1, 1>)                               \
    HK_ENTRY(group_quant_##T##_long_scalar, hk::kWaveSize, group_quant<Access::Scalar, hk::T, hk::kWaveSize, 1, 1>)

ENTRIES(bf16)
ENTRIES(f16)
ENTRIES(f32)
