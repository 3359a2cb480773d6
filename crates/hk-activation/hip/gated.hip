// gated.hip: y[r, c] = f(x[r, c]) * x[r, d + c]; the first half of a row is activated, the second half multiplies
//   x  [rows, 2d]  T = bf16 | f16 | f32   unit stride on columns, rows any stride
//   y  [rows, d]   bf16 | f16 | f32       unit stride on columns, rows any stride
//   f = silu | gelu | gelu_tanh; silu may clamp its halves, a = min(a, limit) and b = clamp(b, -limit, limit);
//   swiglu_oai clamps them by 7, f(a) = a / (1 + exp(-1.702 a)), and multiplies by b + 1.
// All arithmetic is f32, with one rounding. The function is selected at run time, once per tile. How the work is split: tiles.h.
// Sources: Shazeer 2020, "GLU Variants Improve Transformer"; swiglu_oai: the model code of GPT-OSS.
// Floor
//   Memory: rows * d * (2 sizeof(x) + sizeof(y)). VALU instructions for 8 bf16 of a lane as in unary.hip, and 8 to widen and 4
//   to multiply; at 6 TB/s a CU moves the 3 KiB of a wave's 512 results in 327 clocks.
#include <hk/activate.h>
#include <hk/entry.h>

#include "tiles.h"

namespace {
/// The function; the same values as `Gate` in src/gated.rs.
enum class Gate : hk::u32 { Silu = 0, Gelu = 1, GeluTanh = 2, LimitedSilu = 3, SwigluOai = 4 };

struct Params {
    hk::Global x, y;
    tiles::Shape shape;
    Gate gate;
    tiles::Type y_type;
    float limit;  // of LimitedSilu and SwigluOai
    hk::u32 d;
};

/// min(v, limit), NaN of NaN.
template <class F>
HK_FN F at_most(F v, float limit) {
    return v > limit ? F(limit) : v;
}

/// v between -limit and limit, NaN of NaN.
template <class F>
HK_FN F within(F v, float limit) {
    return -at_most(-at_most(v, limit), limit);
}

template <class F>
HK_FN void with_gate(Gate gate, float limit, F f) {
    switch (gate) {
        case Gate::Silu:
            return f([](auto a, auto b) { return hk::silu(a) * b; });
        case Gate::Gelu:
            return f([](auto a, auto b) { return hk::gelu(a) * b; });
        case Gate::GeluTanh:
            return f([](auto a, auto b) { return hk::gelu_tanh(a) * b; });
        case Gate::LimitedSilu:
            return f([=](auto a, auto b) { return hk::silu(at_most(a, limit)) * within(b, limit); });
        case Gate::SwigluOai:
            return f([=](auto a, auto b) {
                a = at_most(a, limit);
                return a * hk::sigmoid(1.702f * a) * (within(b, limit) + 1.0f);
            });
    }
    __builtin_trap();  // not __builtin_unreachable: the compiler would hoist common code out of the switch, and spill
}

/// The two halves of x.
constexpr int kInputs = 2;

template <class T, hk::Access kAccess>
HK_FN void gated(const Params &p) {
    constexpr int kLen = hk::kVecLen<T>;
    constexpr int kGroups = tiles::kGroups<kAccess, kInputs>;
    using Tile = tiles::Tile<kAccess, kLen, kGroups>;

    tiles::for_tiles<kAccess, kLen, kGroups>(p.shape, [&](const Tile &tile) {
        typename Tile::template Groups<T> a, b;
        tile.load(p.x, a);
        tile.load(p.x, b, p.d);
        typename Tile::template Groups<float> y;
        with_gate(p.gate, p.limit, [&](auto f) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) y[g] = f(hk::widen<T, kLen>(a[g]), hk::widen<T, kLen>(b[g]));
        });
        tiles::with_type(p.y_type, [&](auto zero) { tile.template store<decltype(zero)>(p.y, y); });
    });
}
}  // namespace

// Entry points: op, dtype of x, access.
#define GATED_ENTRIES(T)                                                                      \
    HK_ENTRY(gated_##T, tiles::kVectorThreads<kInputs>, gated<hk::T, hk::Access::Vectorized>) \
    HK_ENTRY(gated_##T##_scalar, hk::kWaveSize, gated<hk::T, hk::Access::Scalar>)
GATED_ENTRIES(bf16)
GATED_ENTRIES(f16)
GATED_ENTRIES(f32)
