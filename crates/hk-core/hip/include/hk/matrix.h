// matrix.h: the matrix instructions, and the layout of operands and accumulators in lanes.
//   d[n, m] += sum over k of w[n, k] x[m, k]      n, m < kDim, which is 16 or 32; k < kCols
// AMD targets: the wave's lanes form groups of kDim; a lane holds one row of each operand, and accumulators of one m. sm_90: kDim is
// 16, the lanes form groups of 8; a lane holds two rows of each operand, and accumulators of two m.
#pragma once

#include <hk/arch.h>
#include <hk/quant.h>
#include <hk/types.h>
#include <hk/wave.h>

namespace hk {

/// Element types of operands beside float, bf16 and f16.
struct I8 {};
struct Fp8 {};  ///< e4m3 in the encoding of the matrix unit, kMmaFp8Type
struct Bf8 {};  ///< e5m2 in that encoding
struct Fp6 {};  ///< e2m3
struct Bf6 {};  ///< e3m2
struct Fp4 {};  ///< e2m1
struct Xf32 {};  ///< float, of which the matrix unit reads 10 bits of fraction

/// The fp8 encoding of the matrix unit.
inline constexpr QuantType kMmaFp8Type = kFp8IsFnuz ? QuantType::Fp8Fnuz : QuantType::Fp8;

namespace detail {
template <class T>
consteval int bits_of_type() {
    if constexpr (__is_same(T, float) || __is_same(T, Xf32))
        return 32;
    else if constexpr (__is_same(T, bf16) || __is_same(T, f16))
        return 16;
    else if constexpr (__is_same(T, Fp6) || __is_same(T, Bf6))
        return 6;
    else if constexpr (__is_same(T, Fp4))
        return 4;
    else
        return 8;
}
/// The format field of f8f6f4 instructions; -1 for other types.
template <class T>
inline constexpr int kFormat = __is_same(T, Fp8)   ? 0
                               : __is_same(T, Bf8) ? 1
                               : __is_same(T, Fp6) ? 2
                               : __is_same(T, Bf6) ? 3
                               : __is_same(T, Fp4) ? 4
                                                   : -1;
}  // namespace detail

template <class T>
inline constexpr int kBitsOf = detail::bits_of_type<T>();

/// Consecutive n of a lane's accumulators.
inline constexpr int kMmaRows = 4;

/// Groups of lanes that hold the same rows, and different columns.
template <int kDim>
inline constexpr int kLaneGroups = kWaveSize * kRowsPerLane / kDim;

/// A lane's group, and its rows i < kRowsPerLane.
template <int kDim = 16>
HK_FN constexpr u32 group_of_lane(u32 lane) {
    if constexpr (kRowsPerLane == 1) return lane / kDim;
    return lane % 4;
}
template <int kDim = 16>
HK_FN constexpr u32 row_of_lane(u32 lane, u32 i = 0) {
    if constexpr (kRowsPerLane == 1) return lane % kDim;
    // Two of each four rows, so that their accumulators are of four consecutive n (AccLayout).
    return lane / 8 * 4 + lane / 4 % 2 + 2 * i;
}

/// A lane that holds row `row` of 16, and which of its rows that is.
HK_FN constexpr u32 lane_of_row(u32 row) { return kRowsPerLane == 1 ? row : row / 4 * 8 + row % 2 * 4; }
HK_FN constexpr u32 part_of_row(u32 row) { return kRowsPerLane == 1 ? 0 : row / 2 % 2; }

/// Layout of an operand of kDim rows: a lane holds `kElements`, the i-th in bits [i kBits, (i + 1) kBits) of its dwords.
template <class T, int kDim, int kCols>
struct OperandLayout {
    static constexpr int kGroups = kLaneGroups<kDim>;
    static constexpr int kOfRow = kCols / kGroups;
    static constexpr int kElements = kRowsPerLane * kOfRow;
    static constexpr int kBits = kBitsOf<T>;
    static constexpr int kWords = kElements * kBits / 32;
    using Words = Vec<u32, kWords>;

    HK_FN static constexpr u32 row(u32 lane, u32 i = 0) { return row_of_lane<kDim>(lane, i / kOfRow); }

    /// The column k of element i. A group's elements are consecutive; an operand of eight dwords is two halves of the columns.
    HK_FN static constexpr u32 col(u32 lane, u32 i) {
        constexpr u32 kRun = kWords == 8 * kRowsPerLane ? kOfRow / 2 : kOfRow;
        i %= kOfRow;
        return i / kRun * (kGroups * kRun) + group_of_lane<kDim>(lane) * kRun + i % kRun;
    }
};

/// Layout of accumulators d[n, m]: a lane holds `kElements`, in runs of kMmaRows consecutive n of one m. Elements of further tiles,
/// n >= kDim, follow.
template <int kDim>
struct AccLayout {
    static constexpr int kGroups = kLaneGroups<kDim>;
    static constexpr int kElements = kDim * kDim / kWaveSize;

    HK_FN static constexpr u32 m(u32 lane, u32 i = 0) { return row_of_lane<kDim>(lane, i / kMmaRows % kRowsPerLane); }
    HK_FN static constexpr u32 n(u32 lane, u32 i) {
        return i / (kMmaRows * kRowsPerLane) * (kGroups * kMmaRows) + group_of_lane<kDim>(lane) * kMmaRows +
               i % kMmaRows;
    }

    /// If row n of w is column wide(n) of the result, a lane's accumulators are runs of kWideRun consecutive columns.
    static constexpr int kWideRun = kDim == 32 ? 8 : kMmaRows;
    HK_FN static constexpr u32 wide(u32 n) {
        if constexpr (kDim == 32) return (n & ~12u) | (n & 4) << 1 | (n & 8) >> 1;
        return n;
    }

    /// Converted to T (1 or 2 bytes), a lane's accumulators are its fragments of an operand over k = n, without exchange between
    /// lanes, if the other operand has column n at place(n) of each row.
    template <class T>
    HK_FN static constexpr u32 place(u32 n) {
        constexpr u32 kPart = 128 / kBitsOf<T>, kAll = kGroups * kMmaRows;
        const u32 i = n / kAll * kMmaRows + n % kMmaRows;
        return i / kPart * (kGroups * kPart) + n % kAll / kMmaRows * kPart + i % kPart;
    }
};

}  // namespace hk

#include HK_TARGET_HEADER(matrix.h)  // detail::MatrixUnit, for the types above

namespace hk {

/// One instruction. `kExists`: the target has it.
template <class W_, class X_, int kDim, int kCols>
struct MmaInstruction {
    using W = OperandLayout<W_, kDim, kCols>;
    using X = OperandLayout<X_, kDim, kCols>;
    using Acc = Vec<decltype([] {
                        if constexpr (__is_same(W_, I8))
                            return int();
                        else
                            return float();
                    }()),
                    AccLayout<kDim>::kElements>;

  private:
    using Unit = detail::MatrixUnit<W_, X_, kDim, kCols>;

  public:
    static constexpr bool kExists = Unit::kExists;

    HK_FN static Acc mma(typename W::Words w, typename X::Words x, Acc acc) {
        static_assert(kExists, "the target has no such instruction");
        return Unit::mma(w, x, acc);
    }

    /// Block-scaled MMA: an e8m0 scale per row and 32 columns. The lane gives the scale of row lane % kDim and block lane / kDim, in byte
    /// `kWByte` or `kXByte` of a dword. 255 makes NaN.
    template <int kWByte, int kXByte>
    HK_FN static Acc mma(typename W::Words w, typename X::Words x, Acc acc, u32 w_scale, u32 x_scale) {
        static_assert(kExists, "the target has no such instruction");
        return Unit::template scaled<kWByte, kXByte>(w, x, acc, w_scale, x_scale);
    }
};

namespace detail {
/// Elements of a row per lane in the fastest instruction.
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

/// Columns of the fastest instruction for these types.
template <class W, class X, int kDim>
inline constexpr int kFastestCols = kLaneGroups<kDim> * detail::fastest<W>();

}  // namespace hk
