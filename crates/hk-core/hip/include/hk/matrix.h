// matrix.h: the instructions of the matrix unit, and which lane holds what.
//   d[n, m] += sum over k of w[n, k] x[m, k]      n, m < kDim, which is 16 or 32; k < kCols
// On AMD targets the wave's lanes stand in groups of kDim; a lane has elements of one row of each operand, and sums of one m. On
// others, kDim is 16 and the lanes stand in groups of 8; a lane has elements of two rows, and sums of two m.
#pragma once

#include <hk/arch.h>
#include <hk/quant.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Element types of operands beside float, bf16 and f16.
struct I8 {};
struct Fp8 {};   ///< e4m3 in the encoding that products take, kMmaFp8
struct Bf8 {};   ///< e5m2 in that encoding
struct Fp6 {};   ///< e2m3
struct Bf6 {};   ///< e3m2
struct Fp4 {};   ///< e2m1
struct Xf32 {};  ///< float, of which products see 10 bits of fraction

/// The fp8 encoding that matrix products take.
inline constexpr CodeKind kMmaFp8 = kFp8IsFnuz ? CodeKind::Fp8Fnuz : CodeKind::Fp8;

namespace detail {
template <class T>
consteval int bits_of_type() {
    if constexpr (__is_same(T, float) || __is_same(T, Xf32)) return 32;
    else if constexpr (__is_same(T, bf16) || __is_same(T, f16)) return 16;
    else if constexpr (__is_same(T, Fp6) || __is_same(T, Bf6)) return 6;
    else if constexpr (__is_same(T, Fp4)) return 4;
    else return 8;
}
/// Types of the instructions that take any two of them: their numbers there; -1 for others.
template <class T>
inline constexpr int kFormat = __is_same(T, Fp8)   ? 0
                               : __is_same(T, Bf8) ? 1
                               : __is_same(T, Fp6) ? 2
                               : __is_same(T, Bf6) ? 3
                               : __is_same(T, Fp4) ? 4 : -1;
}  // namespace detail

template <class T>
inline constexpr int kBitsOf = detail::bits_of_type<T>();

/// The neighbouring n of sums that a lane has.
inline constexpr int kMmaRows = 4;

/// Groups of lanes with the same rows, which have different columns.
template <int kDim>
inline constexpr int kLaneGroups = kWaveSize * kLaneRows / kDim;

/// Which group a lane is in, and its rows: `i` counts up to kLaneRows.
template <int kDim = 16>
HK_FN constexpr u32 group_of_lane(u32 lane) {
    if constexpr (kLaneRows == 1) return lane / kDim;
    return lane % 4;
}
template <int kDim = 16>
HK_FN constexpr u32 row_of_lane(u32 lane, u32 i = 0) {
    if constexpr (kLaneRows == 1) return lane % kDim;
    // The two of each group of four rows: their sums are of four neighbouring n, see Sums.
    return lane / 8 * 4 + lane / 4 % 2 + 2 * i;
}

/// A lane that has row `row` of 16, and as which of its rows.
HK_FN constexpr u32 lane_of_row(u32 row) { return kLaneRows == 1 ? row : row / 4 * 8 + row % 2 * 4; }
HK_FN constexpr u32 part_of_row(u32 row) { return kLaneRows == 1 ? 0 : row / 2 % 2; }

/// Where the elements of an operand of kDim rows are: a lane has `kElements`, the i-th in bits [i kBits, (i + 1) kBits) of its
/// words.
template <class T, int kDim, int kCols>
struct Operand {
    static constexpr int kGroups = kLaneGroups<kDim>;
    static constexpr int kOfRow = kCols / kGroups;
    static constexpr int kElements = kLaneRows * kOfRow;
    static constexpr int kBits = kBitsOf<T>;
    static constexpr int kWords = kElements * kBits / 32;
    using Words = Vec<u32, kWords>;

    HK_FN static constexpr u32 row(u32 lane, u32 i = 0) { return row_of_lane<kDim>(lane, i / kOfRow); }

    /// The column k of element i. A group's elements are neighbours; but operands of eight words of a row are in two halves, each
    /// with one half of the columns.
    HK_FN static constexpr u32 col(u32 lane, u32 i) {
        constexpr u32 kRun = kWords == 8 * kLaneRows ? kOfRow / 2 : kOfRow;
        i %= kOfRow;
        return i / kRun * (kGroups * kRun) + group_of_lane<kDim>(lane) * kRun + i % kRun;
    }
};

/// Where sums d[n, m] are: a lane has `kElements`, in runs of kMmaRows neighbouring n of one m. Those of further tiles, on from
/// n = kDim, are counted on.
template <int kDim>
struct Sums {
    static constexpr int kGroups = kLaneGroups<kDim>;
    static constexpr int kElements = kDim * kDim / kWaveSize;

    HK_FN static constexpr u32 m(u32 lane, u32 i = 0) { return row_of_lane<kDim>(lane, i / kMmaRows % kLaneRows); }
    HK_FN static constexpr u32 n(u32 lane, u32 i) {
        return i / (kMmaRows * kLaneRows) * (kGroups * kMmaRows) + group_of_lane<kDim>(lane) * kMmaRows + i % kMmaRows;
    }

    /// Cast to T, a lane's sums are its fragments of an operand over k = n: that operand needs no exchange between lanes, if the
    /// other one, row by row, has column n at place(n). `T` is a type of 2 bytes or of 1, a fragment 16 bytes.
    template <class T>
    HK_FN static constexpr u32 place(u32 n) {
        constexpr u32 kPart = 128 / kBitsOf<T>, kAll = kGroups * kMmaRows;
        const u32 i = n / kAll * kMmaRows + n % kMmaRows;
        return i / kPart * (kGroups * kPart) + n % kAll / kMmaRows * kPart + i % kPart;
    }
};

namespace detail {

#if defined(HK_AMD)
/// What the target has: `mma(w, x, acc)`.
template <class W, class X, int kDim, int kCols>
struct MatrixUnit {
    static constexpr bool kExists = false;
};

using F32x2 = Vec<float, 2>;
using F16x4 = Vec<f16, 4>;
using I16x4 = Vec<short, 4>;
using I32x4 = Vec<int, 4>;
using F16x8 = Vec<f16, 8>;
using Bf16x8 = Vec<bf16, 8>;

// `Type`: what the builtin takes operands as.
#define HK_MATRIX_UNIT(W, X, kDim, kCols, Type, builtin)                                                              \
    template <>                                                                                                       \
    struct MatrixUnit<W, X, kDim, kCols> {                                                                            \
        static constexpr bool kExists = true;                                                                         \
        template <class Words, class Acc>                                                                             \
        HK_FN static Acc mma(Words w, Words x, Acc acc) {                                                             \
            return __builtin_amdgcn_mfma_##builtin(__builtin_bit_cast(Type, w), __builtin_bit_cast(Type, x), acc, 0, 0, 0); \
        }                                                                                                             \
    };

HK_MATRIX_UNIT(float, float, 16, 4, float, f32_16x16x4f32)
HK_MATRIX_UNIT(float, float, 32, 2, float, f32_32x32x2f32)
HK_MATRIX_UNIT(f16, f16, 16, 16, F16x4, f32_16x16x16f16)
HK_MATRIX_UNIT(f16, f16, 32, 8, F16x4, f32_32x32x8f16)
HK_MATRIX_UNIT(bf16, bf16, 16, 16, I16x4, f32_16x16x16bf16_1k)
HK_MATRIX_UNIT(bf16, bf16, 32, 8, I16x4, f32_32x32x8bf16_1k)
HK_MATRIX_UNIT(I8, I8, 16, 32, long, i32_16x16x32_i8)
HK_MATRIX_UNIT(I8, I8, 32, 16, long, i32_32x32x16_i8)
HK_MATRIX_UNIT(Fp8, Fp8, 16, 32, long, f32_16x16x32_fp8_fp8)
HK_MATRIX_UNIT(Fp8, Bf8, 16, 32, long, f32_16x16x32_fp8_bf8)
HK_MATRIX_UNIT(Bf8, Fp8, 16, 32, long, f32_16x16x32_bf8_fp8)
HK_MATRIX_UNIT(Bf8, Bf8, 16, 32, long, f32_16x16x32_bf8_bf8)
HK_MATRIX_UNIT(Fp8, Fp8, 32, 16, long, f32_32x32x16_fp8_fp8)
HK_MATRIX_UNIT(Fp8, Bf8, 32, 16, long, f32_32x32x16_fp8_bf8)
HK_MATRIX_UNIT(Bf8, Fp8, 32, 16, long, f32_32x32x16_bf8_fp8)
HK_MATRIX_UNIT(Bf8, Bf8, 32, 16, long, f32_32x32x16_bf8_bf8)
#if defined(HK_MX_MMA)
HK_MATRIX_UNIT(f16, f16, 16, 32, F16x8, f32_16x16x32_f16)
HK_MATRIX_UNIT(f16, f16, 32, 16, F16x8, f32_32x32x16_f16)
HK_MATRIX_UNIT(bf16, bf16, 16, 32, Bf16x8, f32_16x16x32_bf16)
HK_MATRIX_UNIT(bf16, bf16, 32, 16, Bf16x8, f32_32x32x16_bf16)
HK_MATRIX_UNIT(I8, I8, 16, 64, I32x4, i32_16x16x64_i8)
HK_MATRIX_UNIT(I8, I8, 32, 32, I32x4, i32_32x32x32_i8)

/// Those that take any two formats, with scales.
template <class W, class X, int kDim, int kCols>
    requires(kFormat<W> >= 0 && kFormat<X> >= 0 && kDim * kCols == 16 * 128)
struct MatrixUnit<W, X, kDim, kCols> {
    static constexpr bool kExists = true;

    template <int kWords>
    HK_FN static Vec<int, 8> operand(Vec<u32, kWords> words) {
        Vec<int, 8> v = 0;
#pragma unroll
        for (int i = 0; i < kWords; ++i) v[i] = int(words[i]);
        return v;
    }

    template <int kWByte, int kXByte, class WWords, class XWords, class Acc>
    HK_FN static Acc scaled(WWords w, XWords x, Acc acc, u32 w_scale, u32 x_scale) {
        const auto a = operand(w), b = operand(x);
        if constexpr (kDim == 16) {
            return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, acc, kFormat<W>, kFormat<X>, kWByte, int(w_scale),
                                                                    kXByte, int(x_scale));
        } else {
            return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, acc, kFormat<W>, kFormat<X>, kWByte, int(w_scale),
                                                                   kXByte, int(x_scale));
        }
    }

    /// Literal zeros for scales: the instruction without scales.
    template <class WWords, class XWords, class Acc>
    HK_FN static Acc mma(WWords w, XWords x, Acc acc) {
        return scaled<0, 0>(w, x, acc, 0, 0);
    }
};
#else
HK_MATRIX_UNIT(Xf32, Xf32, 16, 8, F32x2, f32_16x16x8_xf32)
HK_MATRIX_UNIT(Xf32, Xf32, 32, 4, F32x2, f32_32x32x4_xf32)
#endif
#undef HK_MATRIX_UNIT
#else
/// Made of products of 16 rows m by 8 rows n. Those take elements of rows lane / 4 and lane / 4 + 8, which are the two rows that
/// a lane has; and since both operands are alike, any columns of it will do.
template <class W, class X, int kDim, int kCols>
struct MatrixUnit {
    static constexpr bool kExists = false;
};

#define HK_MATRIX_UNIT(T, shape, types, Number, constraint)                                                           \
    template <int kCols>                                                                                              \
    struct MatrixUnit<T, T, 16, kCols> {                                                                              \
        static constexpr bool kExists = true;                                                                         \
        template <int kWords, class Acc>                                                                              \
        HK_FN static Acc mma(Vec<u32, kWords> w, Vec<u32, kWords> x, Acc acc) {                                       \
            constexpr int kOfRow = kWords / 2;                                                                        \
            static_assert(kOfRow % 2 == 0, "eight bytes of a row");                                                   \
            _Pragma("unroll") for (int i = 0; i < kOfRow; i += 2) {                                                   \
                _Pragma("unroll") for (int n = 0; n < 2; ++n) {                                                       \
                    Number a = acc[2 * n], b = acc[2 * n + 1], c = acc[2 * n + 4], d = acc[2 * n + 5];                \
                    asm("mma.sync.aligned." shape ".row.col." types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
                        "{%0, %1, %2, %3};"                                                                           \
                        : "+" constraint(a), "+" constraint(b), "+" constraint(c), "+" constraint(d)                  \
                        : "r"(x[i]), "r"(x[kOfRow + i]), "r"(x[i + 1]), "r"(x[kOfRow + i + 1]),                       \
                          "r"(w[kOfRow * n + i]), "r"(w[kOfRow * n + i + 1]));                                        \
                    acc[2 * n] = a, acc[2 * n + 1] = b, acc[2 * n + 4] = c, acc[2 * n + 5] = d;                       \
                }                                                                                                     \
            }                                                                                                         \
            return acc;                                                                                               \
        }                                                                                                             \
    };
HK_MATRIX_UNIT(bf16, "m16n8k16", "f32.bf16.bf16.f32", float, "f")
HK_MATRIX_UNIT(f16, "m16n8k16", "f32.f16.f16.f32", float, "f")
HK_MATRIX_UNIT(I8, "m16n8k32", "s32.s8.s8.s32", int, "r")
HK_MATRIX_UNIT(Fp8, "m16n8k32", "f32.e4m3.e4m3.f32", float, "f")
#undef HK_MATRIX_UNIT
#endif

}  // namespace detail

/// One instruction. `kExists`: the target has it.
template <class W_, class X_, int kDim, int kCols>
struct Instruction {
    using W = Operand<W_, kDim, kCols>;
    using X = Operand<X_, kDim, kCols>;
    using Acc = Vec<decltype([] {
                        if constexpr (__is_same(W_, I8)) return int();
                        else return float();
                    }()),
                    Sums<kDim>::kElements>;

private:
    using Unit = detail::MatrixUnit<W_, X_, kDim, kCols>;

public:
    static constexpr bool kExists = Unit::kExists;

    HK_FN static Acc mma(typename W::Words w, typename X::Words x, Acc acc) {
        static_assert(kExists, "the target has no such instruction");
        return Unit::mma(w, x, acc);
    }

    /// With a power of two for each row of an operand and 32 columns of it: the lane gives that of row lane % kDim and of block
    /// lane / kDim, as the e8m0 code in the byte `kWByte` or `kXByte` of a word. The code 255 makes NaN.
    template <int kWByte, int kXByte>
    HK_FN static Acc mma(typename W::Words w, typename X::Words x, Acc acc, u32 w_scale, u32 x_scale) {
        static_assert(kExists, "the target has no such instruction");
        return Unit::template scaled<kWByte, kXByte>(w, x, acc, w_scale, x_scale);
    }
};

namespace detail {
/// Elements of a row that a lane has in the fastest instruction.
template <class T>
consteval int fastest() {
    if constexpr (kWaveSize != 64) return 128 / kBitsOf<T>;
    if constexpr (__is_same(T, float)) return 1;
    if constexpr (__is_same(T, Xf32)) return 2;
    if constexpr (kBitsOf<T> == 16) return kHasMma32 ? 8 : 4;
    if constexpr (__is_same(T, I8)) return kHasMma32 ? 16 : 8;
    return kHasMxMma ? 32 : 8;
}
}  // namespace detail

/// Columns of the fastest instruction of operands of these types.
template <class W, class X, int kDim>
inline constexpr int kFastestCols = kLaneGroups<kDim> * detail::fastest<W>();

}  // namespace hk
