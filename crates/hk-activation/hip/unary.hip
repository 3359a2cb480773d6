// unary.hip: y = f(x) elementwise, f = silu | gelu | gelu_tanh | relu | tanh
//   x  T = bf16 | f16 | f32   contiguous, or rows with any stride; y may alias x
//   y  T | f32                shape of x, its own strides
// All arithmetic is f32, with one rounding. The function is selected at run time, once per tile. How the work is split: tiles.h.
// Floor
//   Memory: numel * (sizeof(x) + sizeof(y)). VALU instructions for 8 bf16 of a lane, a special function counted as four: 8 to
//   widen, 4 on gfx950 or 36 on gfx942 to round, and the function, of which silu is 9 + 2 (hk/math.h), two elements an
//   instruction but for 4. A CU issues one a clock, and at 6 TB/s over 304 CUs of 2.1 GHz moves 2 KiB in 218 clocks.
#include <hk/activate.h>
#include <hk/entry.h>

#include "tiles.h"

namespace {
struct Params {
    hk::Global x, y;
    tiles::Shape shape;
    hk::Activation activation;
    tiles::Type y_type;
};

constexpr int kInputs = 1;

template <class T, hk::Access kAccess>
HK_FN void unary(const Params &p) {
    constexpr int kLen = hk::kVecLen<T>;
    constexpr int kGroups = tiles::kGroups<kAccess, kInputs>;
    using Tile = tiles::Tile<kAccess, kLen, kGroups>;

    tiles::for_tiles<kAccess, kLen, kGroups>(p.shape, [&](const Tile &tile) {
        typename Tile::template Groups<T> x;
        tile.load(p.x, x);
        typename Tile::template Groups<float> y;
        hk::with_activation(p.activation, [&](auto f) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) y[g] = f(hk::widen<T, kLen>(x[g]));
        });
        if (p.y_type == tiles::Type::F32) {
            tile.template store<float>(p.y, y);
        } else {
            tile.template store<T>(p.y, y);
        }
    });
    tiles::for_tail(p.shape, [&](hk::u64 i) {
        const float x = float(p.x.row<const T>(0)[i]);
        hk::with_activation(p.activation, [&](auto f) {
            if (p.y_type == tiles::Type::F32) {
                p.y.row<float>(0)[i] = f(x);
            } else {
                p.y.row<T>(0)[i] = T(f(x));
            }
        });
    });
}
}  // namespace

// Entry points: op, dtype of x, access.
#define UNARY_ENTRIES(T)                                                                      \
    HK_ENTRY(unary_##T, tiles::kVectorThreads<kInputs>, unary<hk::T, hk::Access::Vectorized>) \
    HK_ENTRY(unary_##T##_scalar, hk::kWaveSize, unary<hk::T, hk::Access::Scalar>)
UNARY_ENTRIES(bf16)
UNARY_ENTRIES(f16)
UNARY_ENTRIES(f32)
