// mul_add.hip: y = a * x + b elementwise
//   x  T = bf16 | f16 | f32              contiguous
//   a, b  each a host scalar, a device scalar, or a contiguous tensor as long as x; bf16 | f16 | f32
//   y  bf16 | f16 | f32                  contiguous; may alias x, a or b of the same type
// One fused multiply-add in f32, one rounding to the type of y. The kinds of a and b are selected at run time, once per tile.
// How the work is split: tiles.h.
// Floor
//   Memory: numel * (sizeof(x) + sizeof(y) + those of a and b that are tensors).
#include <hk/entry.h>

#include "tiles.h"

namespace {
/// Kind of a and b, `Kind` in src/mul_add.rs.
enum class Kind : hk::u32 { Host = 0, Device = 1, Tensor = 2 };

struct Operand {
    Kind kind;
    tiles::Type type;
    float value;  // the host scalar
    hk::u32 pad;
};

struct Params {
    hk::Global x, a, b, y;
    tiles::Shape shape;
    Operand a_is, b_is;
    tiles::Type y_type;
    hk::u32 pad;
};

/// The scalar, or element `i` of the tensor.
HK_FN float element(const hk::Global &tensor, const Operand &is, hk::u64 i) {
    float value = is.value;
    if (is.kind != Kind::Host) {
        const hk::u64 at = is.kind == Kind::Tensor ? i : 0;
        tiles::with_type(is.type, [&](auto zero) { value = float(tensor.row<const decltype(zero)>(0)[at]); });
    }
    return value;
}

/// A tile of a tensor, or of a repeated scalar.
template <class Tile, class Groups>
HK_FN void load(const Tile &tile, const hk::Global &tensor, const Operand &is, float one, Groups &out) {
    constexpr int kGroups = sizeof(out) / sizeof(out[0]);
    constexpr int kLen = sizeof(out[0]) / sizeof(float);
    if (is.kind == Kind::Tensor) {
        tiles::with_type(is.type, [&](auto zero) {
            using E = decltype(zero);
            typename Tile::template Groups<E> narrow;
            tile.load(tensor, narrow);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) out[g] = hk::widen<E, kLen>(narrow[g]);
        });
    } else {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) out[g] = one;
    }
}

/// Tiles of x, a and b.
constexpr int kInputs = 3;

template <class T, hk::Access kAccess>
HK_FN void mul_add(const Params &p) {
    constexpr int kLen = hk::kVecLen<T>;
    constexpr int kGroups = tiles::kGroups<kAccess, kInputs>;
    using Tile = tiles::Tile<kAccess, kLen, kGroups>;

    // The first element of a tensor; there is one, or nothing is launched.
    const float one_a = element(p.a, p.a_is, 0);
    const float one_b = element(p.b, p.b_is, 0);

    tiles::for_tiles<kAccess, kLen, kGroups>(p.shape, [&](const Tile &tile) {
        typename Tile::template Groups<T> x;
        tile.load(p.x, x);
        typename Tile::template Groups<float> a, b;
        load(tile, p.a, p.a_is, one_a, a);
        load(tile, p.b, p.b_is, one_b, b);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) a[g] = __builtin_elementwise_fma(a[g], hk::widen<T, kLen>(x[g]), b[g]);
        tiles::with_type(p.y_type, [&](auto zero) { tile.template store<decltype(zero)>(p.y, a); });
    });
    tiles::for_tail(p.shape, [&](hk::u64 i) {
        const float x = float(p.x.row<const T>(0)[i]);
        const float y = __builtin_fmaf(element(p.a, p.a_is, i), x, element(p.b, p.b_is, i));
        tiles::with_type(p.y_type, [&](auto zero) { p.y.row<decltype(zero)>(0)[i] = decltype(zero)(y); });
    });
}
}  // namespace

// Entry points: op, dtype of x, access.
#define MUL_ADD_ENTRIES(T)                                                                        \
    HK_ENTRY(mul_add_##T, tiles::kVectorThreads<kInputs>, mul_add<hk::T, hk::Access::Vectorized>) \
    HK_ENTRY(mul_add_##T##_scalar, hk::kWaveSize, mul_add<hk::T, hk::Access::Scalar>)
MUL_ADD_ENTRIES(bf16)
MUL_ADD_ENTRIES(f16)
MUL_ADD_ENTRIES(f32)
