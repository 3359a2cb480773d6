// group_quant.hip: quantizes 16-bit floats, one scale for each group of neighbouring columns of a row, of any length.
//   s[r, i] = max(max_c |x[r, c]|, 1e-10) / qmax over the finite x of group i;  q[r, c] = quantized(x[r, c] * (1 / s[r, i]))
//   x      [rows, cols]    bf16 | f16              unit stride on cols, rows any stride
//   q      [rows, cols]    i8 | fp8, OCP or FNUZ   contiguous
//   scale  [rows, groups]  f32                     contiguous
// A wave has a group at a time and reads it twice. Floor: rows * cols * 3 + rows * groups * 4 bytes.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/quant.h>
#include <hk/wave.h>

namespace {
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

constexpr u32 kWaves = 4;

struct Params {
    u64 x, q, scale;
    i64 x_row;  // stride, in elements
    u64 rows;
    u32 cols, groups, group;
    hk::QuantFormat format;
    u32 pad;
};

template <class T>
HK_FN void group_quant(const Params &p) {
    const u64 tasks = p.rows * p.groups;
    for (u64 task = u64(hk::block_x()) * kWaves + hk::wave_id(); task < tasks; task += u64(hk::grid_x()) * kWaves) {
        const u64 row = task / p.groups;
        const u32 from = u32(task - row * p.groups) * p.group;
        const u32 count = p.cols - from < p.group ? p.cols - from : p.group;
        const auto x = reinterpret_cast<GlobalPtr<const T>>(p.x) + i64(row) * p.x_row + from;
        const auto q = reinterpret_cast<GlobalPtr<u8>>(p.q) + row * p.cols + from;

        hk::FiniteMax max;
        for (u32 i = hk::lane_id(); i < count; i += hk::kWaveSize) max.add(Vec<float, 1>(float(x[i])));
        const u32 top = hk::group_reduce<hk::kWaveSize>(max.top, hk::MaxBits{});
        const float scale = hk::group_scale(hk::FiniteMax::value(top), p.format.qmax), inverse = 1.0f / scale;
        if (hk::lane_id() == 0) reinterpret_cast<GlobalPtr<float>>(p.scale)[task] = scale;
        p.format.with_type([&](auto kind) {
            for (u32 i = hk::lane_id(); i < count; i += hk::kWaveSize) {
                q[i] = hk::quantize_one<decltype(kind)::value>(float(x[i]) * inverse);
            }
        });
    }
}
}  // namespace

HK_ENTRY(gemm_group_quant_bf16, kWaves *hk::kWaveSize, group_quant<hk::bf16>)
HK_ENTRY(gemm_group_quant_f16, kWaves *hk::kWaveSize, group_quant<hk::f16>)
