// mixed.h: products of few rows with codes, bound by reading w; see skinny.h.
//   A wave's stretch is some times kMxCols columns; a lane has 32 of them, of 16 rows, in one piece (hk/blocks.h), decodes what
//   the matrix unit does not take, and quantizes what it is to take as codes. An operator's kind says how:
//
//   kind         x                        w              sums are scaled
//   Fp4ByFp4     mxfp4                    mxfp4          by the operands
//   Fp8ByFp4     fp8                      mxfp4          by w
//   MxFp8ByMxFp8 mxfp8                    mxfp8          by the operands
//   HalfByFp4    bf16, f16                mxfp4          by w
//   ToFp4ByFp4   bf16, f16, to mxfp4      mxfp4          by the operands
//   HalfByByte   bf16, f16                int8, fp8      after 128 columns, by w
//   ToByteByByte bf16, f16, to w's type   int8, fp8      after 128 columns, by both
#pragma once

#include <hk/blocks.h>

#include "mx.h"
#include "skinny.h"

namespace gemm {

/// What a wave reads of 16 kTiles rows: blocks of a type, of kCount times kMxCols columns. `from` is in bytes of x, with XBits bits
/// for a column.
template <class Raw, int kBits, int kXBits, int kTiles, int kCount>
class BlockRows {
    hk::Window window_;
    u32 end_;  // of a row, in bytes
    u32 spread_;
    u32 offset_[kTiles];

public:
    static constexpr u32 kBytes = hk::kMxCols * kBits / 8;

    template <class Given>
    HK_FN BlockRows(GlobalPtr<const u8> first, const Given &given, u32 first_row, u32 end)
        : window_(first, hk::Window::kBeyond - 1), end_(u32(u64(end) * kBits / kXBits)), spread_(given.layout.spread) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
            const u32 row = 16 * i + hk::lane_id() % 16, ahead = hk::lane_id() / 16 * Raw::kLaneStep;
            const bool there = row < given.rows - first_row;
            offset_[i] = there ? given.layout.window_offset(row) + (ahead << spread_) : hk::Window::kBeyond;
        }
    }

    HK_FN void load(Raw (&blocks)[kTiles][kCount], u32 from) const {
        const u32 bytes = u32(u64(from) * kBits / kXBits);
#pragma unroll
        for (u32 b = 0; b < kCount; ++b) {
#pragma unroll
            for (u32 c = 0; c < Raw::kChunks; ++c) {
                // The sign of what is left of the row moves the offset beyond the window.
                const u32 at = bytes + b * kBytes + c * Raw::kStep;
                const u32 past = (end_ - 1u - (at + hk::lane_id() / 16 * Raw::kLaneStep)) & hk::Window::kBeyond;
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    blocks[i][b].chunk[c] = window_.load<Vec<u32, 4>>(offset_[i] | past, at << spread_);
                }
            }
        }
    }
};

/// The scales of blocks of 16 kTiles rows.
template <int kXBits, int kTiles, int kCount>
class ScaleRows {
    hk::Window window_;
    u32 columns_;
    u32 block_[3], offset_[kTiles];

public:
    HK_FN ScaleRows(const MxScale &s, u32 index, u32 first_row, u32 rows, u32 end)
        : window_(s.first(index), hk::Window::kBeyond - 1), columns_(u32(u64(end) * 8 / kXBits)) {
#pragma unroll
        for (int i = 0; i < 3; ++i) block_[i] = s.block[i];
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
            const u32 offset = s.offset(first_row + 16 * i + hk::lane_id() % 16, rows);
            offset_[i] = offset == hk::Window::kBeyond ? offset : offset + hk::lane_id() / 16 * block_[0];
        }
    }

    HK_FN void load(u32 (&codes)[kTiles][kCount], u32 from) const {
        const u32 column = u32(u64(from) * 8 / kXBits);
#pragma unroll
        for (u32 b = 0; b < kCount; ++b) {
            const u32 at = column + b * hk::kMxCols;
            const u32 past = (columns_ - 1u - (at + hk::lane_id() / 16 * 32)) & hk::Window::kBeyond;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                codes[i][b] = window_.load<u8>(offset_[i] | past, MxScale::of_block(at / 32, block_));
            }
        }
    }
};

/// No scales of blocks.
struct NoScaleRows {
    template <int kTiles, int kCount>
    HK_FN void load(u32 (&)[kTiles][kCount], u32) const {}
};

struct Fp4ByFp4 {
    using X = hk::Fp4;
    using W = hk::Fp4;
    using RawX = hk::Block<X>;
    using RawW = hk::Block<W>;
    using BlockX = hk::MxBlock;
    using BlockW = hk::MxBlock;
    static constexpr bool kXScales = true, kWScales = true;
    static constexpr float kSumUnit = hk::kMxSumUnit;

    HK_FN static BlockX x(const RawX &raw, u32 scale, const MixedParams &) { return BlockX::of_codes(raw.chunk[0], scale); }
    HK_FN static BlockW w(const RawW &raw, u32 scale) { return BlockW::of_codes(raw.chunk[0], scale); }
};

struct Fp8ByFp4 : Fp4ByFp4 {
    using X = hk::Fp8;
    using BlockX = hk::Fp8Block;
    using RawX = BlockX::Raw;
    static constexpr bool kXScales = false;
    static constexpr float kSumUnit = hk::kMxFp8SumUnit;

    HK_FN static BlockX x(const RawX &raw, u32, const MixedParams &) { return BlockX::of(raw); }
};

/// One operand of mxfp8: what a lane has of a row, kMxCols columns.
template <bool kOfW>
struct MxFp8Row {
    using Part = decltype([] {
        if constexpr (kOfW) return hk::MxFp8::W();
        else return hk::MxFp8::X();
    }());
    static constexpr int kParts = 2 / hk::MxFp8::kFrags;
    Part part[kParts];

    /// `scale`: of block lane / 16.
    HK_FN static MxFp8Row of(const hk::Block<hk::Fp8, true> &raw, u32 scale) {
        MxFp8Row row;
        if constexpr (hk::kHasMxMma) {
            row.part[0].codes[0] = raw.chunk[0], row.part[0].codes[hk::MxFp8::kFrags - 1] = raw.chunk[1];
            row.part[0].scale = scale;
        } else {
            // The row's codes in one word.
            u32 word = scale << 8 * (hk::lane_id() / 16);
            word |= hk::exchange<16>(word);
            if constexpr (hk::kWaveSize > 32) word |= hk::exchange<hk::kWaveSize / 2>(word);
            decltype(row.part[0].scale) words = word;
            if constexpr (kOfW) {
#pragma unroll
                for (u32 i = 0; i < hk::kMmaRows; ++i) words[i] = hk::from_lane(word, hk::lane_id() / 16 * hk::kMmaRows + i);
            }
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
                row.part[i].codes[0] = raw.chunk[i];
                row.part[i].scale = words >> 8 * i * hk::MxFp8::kBlocks;
            }
        }
        return row;
    }
};

HK_FN hk::MmaAcc mma(const MxFp8Row<true> &w, const MxFp8Row<false> &x, hk::MmaAcc acc) {
#pragma unroll
    for (int i = 0; i < MxFp8Row<true>::kParts; ++i) acc = hk::MxFp8::mma(w.part[i], x.part[i], acc);
    return acc;
}

struct MxFp8ByMxFp8 {
    using X = hk::Fp8;
    using W = hk::Fp8;
    using RawX = hk::Block<X, true>;
    using RawW = RawX;
    using BlockX = MxFp8Row<false>;
    using BlockW = MxFp8Row<true>;
    static constexpr bool kXScales = true, kWScales = true;
    static constexpr float kSumUnit = 1.0f;

    HK_FN static BlockX x(const RawX &raw, u32 scale, const MixedParams &) { return BlockX::of(raw, scale); }
    HK_FN static BlockW w(const RawW &raw, u32 scale) { return BlockW::of(raw, scale); }
};

template <class T>
struct HalfByFp4 : Fp4ByFp4 {
    using X = T;
    using RawX = hk::Block<X>;
    using BlockX = hk::Halves<T>;
    using BlockW = hk::Halves<hk::bf16>;
    static constexpr bool kXScales = false;
    static constexpr float kSumUnit = 1.0f / hk::kFp4Unit;

    HK_FN static BlockX x(const RawX &raw, u32, const MixedParams &) { return BlockX::of(raw); }
    HK_FN static BlockW w(const RawW &raw, u32 scale) {
        BlockW block;
        hk::decoded_fp4<4>(raw.chunk[0], scale, block.part);
        return block;
    }
};

template <class T>
struct ToFp4ByFp4 : Fp4ByFp4 {
    using X = T;
    using RawX = hk::Block<X>;
    static constexpr bool kXScales = false;

    HK_FN static BlockX x(const RawX &raw, u32, const MixedParams &p) {
        Vec<float, 32> v;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const Vec<float, 8> part = hk::widen<T, 8>(__builtin_bit_cast(Vec<T, 8>, raw.chunk[c]));
#pragma unroll
            for (int i = 0; i < 8; ++i) v[8 * c + i] = part[i];
        }
        return BlockX::quantized(v, p.rule);
    }
};

/// A source of skinny_gemm for codes with scales of 32 columns.
template <class Kind, int kMTiles_, int kNTiles_, int kCount>
struct MxSource {
    using Acc = hk::MmaAcc;
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_;
    static constexpr int kXBits = hk::kBitsOf<typename Kind::X>;
    static constexpr u32 kStretch = kCount * hk::kMxCols * kXBits / 8;
    static constexpr float kSumUnit = Kind::kSumUnit;
    template <bool kScales, int kTiles>
    using Scales = decltype([] {
        if constexpr (kScales) return (ScaleRows<kXBits, kTiles, kCount> *)nullptr;
        else return (NoScaleRows *)nullptr;
    }());

    const MixedParams &p;
    BlockRows<typename Kind::RawX, kXBits, kXBits, kMTiles, kCount> x;
    BlockRows<typename Kind::RawW, hk::kBitsOf<typename Kind::W>, kXBits, kNTiles, kCount> w;
    __remove_pointer(Scales<Kind::kXScales, kMTiles>) x_scales;
    __remove_pointer(Scales<Kind::kWScales, kNTiles>) w_scales;

    struct Set {
        typename Kind::RawX x[kMTiles][kCount];
        typename Kind::RawW w[kNTiles][kCount];
        u32 x_scales[kMTiles][kCount], w_scales[kNTiles][kCount];
    };
    HK_FN Set load(u32 from) const {
        Set set;
        x.load(set.x, from);
        w.load(set.w, from);
        x_scales.load(set.x_scales, from);
        w_scales.load(set.w_scales, from);
        return set;
    }

    HK_FN void multiply(Acc (&acc)[kMTiles][kNTiles], const Set &set) const {
#pragma unroll
        for (int b = 0; b < kCount; ++b) {
            typename Kind::BlockW ws[kNTiles];
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) ws[n] = Kind::w(set.w[n][b], set.w_scales[n][b]);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                const auto x_block = Kind::x(set.x[m][b], set.x_scales[m][b], p);
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) acc[m][n] = mma(ws[n], x_block, acc[m][n]);
            }
        }
    }
};

template <class Kind, int kMTiles, int kNTiles, int kWaves, int kCount, class Site = Alone>
HK_FN void skinny_mx_gemm(const MixedParams &given, const Site &site = {}) {
    using Source = MxSource<Kind, kMTiles, kNTiles, kCount>;
    const auto make = [](const MixedParams &p, const Work &work, u32 first_m, u32 first_n, u32 end) {
        const auto scales = [&]<class Scales>(Scales *, const MxScale &s, u32 index, u32 first, u32 rows) {
            if constexpr (__is_same(Scales, NoScaleRows)) return Scales{};
            else return Scales(s, index, first, rows, end);
        };
        return Source{p,
                      {p.x.at(work.batch, first_m), p.x, first_m, end},
                      {p.w.at(work.matrix, first_n), p.w, first_n, end},
                      scales(typename Source::template Scales<Kind::kXScales, kMTiles>(), p.x_mx, work.batch, first_m, p.x.rows),
                      scales(typename Source::template Scales<Kind::kWScales, kNTiles>(), p.w_mx, work.matrix, first_n, p.w.rows)};
    };
    skinny_gemm<Source, kWaves, false>(given, site, make);
}

/// Scales of w for columns of a group of 128 or more, at least four rows with the same; see BlockScale.
template <int kTiles, int kGroups>
class GroupRows {
    hk::Window window_;
    u32 offset_[kTiles];
    u32 step_, shift_, end_;

public:
    HK_FN GroupRows(const BlockScale &s, u32 index, u32 first_row, u32 rows, u32 end)
        : window_(s.first(index), hk::Window::kBeyond - 1), step_(s.group), shift_(s.group_shift), end_(end) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) offset_[i] = s.offset(first_row + 16 * i + hk::lane_id() / 16 * hk::kMmaRows, rows);
    }

    /// Of groups of `kBytes` bytes of x, from `from` on.
    template <u32 kBytes>
    HK_FN void load(float (&scales)[kTiles][kGroups], u32 from) const {
#pragma unroll
        for (u32 g = 0; g < kGroups; ++g) {
            const u32 at = from + g * kBytes, past = (end_ - 1u - at) & hk::Window::kBeyond;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                scales[i][g] = __builtin_bit_cast(float, window_.load<u32>(offset_[i] | past, (at >> shift_) * step_));
            }
        }
    }
};

/// Times kMxCols columns that are 128.
inline constexpr int kGroupBlocks = 128 / hk::kMxCols;

/// Columns of 16-bit floats as they are, and codes of bytes as the same.
template <class T, class Code>
struct HalfByByte {
    using X = T;
    using W = Code;
    using Part = hk::MmaAcc;
    struct GroupX {
        hk::Halves<T> block[kGroupBlocks];
        float scale;
    };
    struct GroupW {
        hk::Halves<T> block[kGroupBlocks];
    };

    HK_FN static GroupX x(const hk::Block<T> *raw) {
        GroupX group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) group.block[b] = hk::Halves<T>::of(raw[b]);
        group.scale = 1.0f;
        return group;
    }
    HK_FN static GroupW w(const hk::Block<Code> *raw) {
        GroupW group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                group.block[b].part[2 * c] = hk::decoded<Code, T>(raw[b].chunk[c].lo);
                group.block[b].part[2 * c + 1] = hk::decoded<Code, T>(raw[b].chunk[c].hi);
            }
        }
        return group;
    }
    HK_FN static Part mma(const GroupW &w, const GroupX &x, Part part) {
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) part = hk::mma(w.block[b], x.block[b], part);
        return part;
    }
};

/// 16-bit floats quantized to the codes that w has, a scale for each 128 columns of a row.
template <class T, class Code>
struct ToByteByByte {
    using X = T;
    using W = Code;
    using Product = hk::Product<Code>;
    using Part = typename Product::Acc;
    struct GroupX {
        Frag codes[kGroupBlocks][2];
        float scale;
    };
    struct GroupW {
        Frag codes[kGroupBlocks][2];
    };

    HK_FN static GroupX x(const hk::Block<T> *raw) {
        constexpr auto kKind = hk::kCodeKind<Code>;
        Vec<float, 8> v[kGroupBlocks][4];
        hk::FiniteMax max;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                v[b][c] = hk::widen<T, 8>(__builtin_bit_cast(Vec<T, 8>, raw[b].chunk[c]));
                max.add(v[b][c]);
            }
        }
        // Of the lanes that have the row.
        u32 top = hk::MaxBits{}(max.top, hk::exchange<16>(max.top));
        if constexpr (hk::kWaveSize > 32) top = hk::MaxBits{}(top, hk::exchange<hk::kWaveSize / 2>(top));
        GroupX group;
        group.scale = hk::group_scale(hk::FiniteMax::value(top), hk::kCodeMax<kKind>);
        const float inverse = 1.0f / group.scale;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const auto low = hk::to_codes<kKind>(v[b][2 * c] * inverse);
                const auto high = hk::to_codes<kKind>(v[b][2 * c + 1] * inverse);
                group.codes[b][c] = {low[0], low[1], high[0], high[1]};
                // All tests for NaN at once would fill the scalar registers.
                hk::stay_in_order();
            }
        }
        return group;
    }
    HK_FN static GroupW w(const hk::Block<Code> *raw) {
        GroupW group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 2; ++c) group.codes[b][c] = raw[b].chunk[c];
        }
        return group;
    }
    HK_FN static Part mma(const GroupW &w, const GroupX &x, Part part) {
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int f = 0; f < 2; f += Product::kFrags) part = Product::mma(w.codes[b] + f, x.codes[b] + f, part);
        }
        return part;
    }
};

/// A source of skinny_gemm whose sums are scaled after 128 columns; a stretch is kGroups times as many.
template <class Kind, int kMTiles_, int kNTiles_, int kGroups>
struct GroupSource {
    using T = typename Kind::X;
    using Code = typename Kind::W;
    using Acc = Vec<float, hk::kMmaRows>;
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_, kCount = kGroups * kGroupBlocks;
    static constexpr u32 kGroupBytes = 128 * sizeof(T), kStretch = kGroups * kGroupBytes;

    BlockRows<hk::Block<T>, hk::kBitsOf<T>, hk::kBitsOf<T>, kMTiles, kCount> x;
    BlockRows<hk::Block<Code>, hk::kBitsOf<Code>, hk::kBitsOf<T>, kNTiles, kCount> w;
    GroupRows<kNTiles, kGroups> scales;

    struct Set {
        hk::Block<T> x[kMTiles][kCount];
        hk::Block<Code> w[kNTiles][kCount];
        float scales[kNTiles][kGroups];
    };
    HK_FN Set load(u32 from) const {
        Set set;
        x.load(set.x, from);
        w.load(set.w, from);
        scales.template load<kGroupBytes>(set.scales, from);
        return set;
    }

    HK_FN void multiply(Acc (&acc)[kMTiles][kNTiles], const Set &set) const {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            typename Kind::GroupW ws[kNTiles];
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) ws[n] = Kind::w(set.w[n] + g * kGroupBlocks);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                const auto xs = Kind::x(set.x[m] + g * kGroupBlocks);
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) {
                    const auto part = Kind::mma(ws[n], xs, typename Kind::Part(0));
                    const float scale = xs.scale * set.scales[n][g];
                    acc[m][n] = __builtin_elementwise_fma(__builtin_convertvector(part, Acc), Acc(scale), acc[m][n]);
                }
            }
        }
    }
};

template <class Kind, int kMTiles, int kNTiles, int kWaves, int kGroups>
HK_FN void skinny_group_gemm(const MixedParams &given) {
    using Source = GroupSource<Kind, kMTiles, kNTiles, kGroups>;
    skinny_gemm<Source, kWaves, false>(given, Alone{}, [](const MixedParams &p, const Work &work, u32 first_m, u32 first_n, u32 end) {
        return Source{{p.x.at(work.batch, first_m), p.x, first_m, end},
                      {p.w.at(work.matrix, first_n), p.w, first_n, end},
                      {p.w_scale, work.matrix, first_n, p.w.rows, end}};
    });
}

}  // namespace gemm
