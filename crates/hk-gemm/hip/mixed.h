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
/// for a column. `kOnce`: no other wave reads them.
template <class Raw, int kBits, int kXBits, int kTiles, int kCount, bool kOnce>
class BlockRows {
    hk::Window window_;
    u32 end_;  // of a row, in bytes
    u32 spread_;
    u32 offset_[kTiles][hk::kLaneRows];

    HK_FN static u32 ahead() { return hk::group_of_lane(hk::lane_id()) * Raw::kLaneStep; }

public:
    static constexpr u32 kBytes = hk::kMxCols * kBits / 8;

    template <class Given>
    HK_FN BlockRows(GlobalPtr<const u8> first, const Given &given, u32 first_row, u32 end)
        : window_(first, hk::Window::kBeyond - 1), end_(u32(u64(end) * kBits / kXBits)), spread_(given.layout.spread) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kLaneRows; ++r) {
                const u32 row = 16 * i + hk::row_of_lane(hk::lane_id(), r);
                const bool there = row < given.rows - first_row;
                offset_[i][r] = there ? given.layout.window_offset(row) + (ahead() << spread_) : hk::Window::kBeyond;
            }
        }
    }

    HK_FN void load(hk::OfRows<Raw> (&blocks)[kTiles][kCount], u32 from) const {
        const u32 bytes = u32(u64(from) * kBits / kXBits);
#pragma unroll
        for (u32 b = 0; b < kCount; ++b) {
#pragma unroll
            for (u32 c = 0; c < Raw::kChunks; ++c) {
                // The sign of what is left of the row moves the offset beyond the window.
                const u32 at = bytes + b * kBytes + c * Raw::kStep;
                const u32 past = (end_ - 1u - (at + ahead())) & hk::Window::kBeyond;
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                    for (u32 r = 0; r < hk::kLaneRows; ++r) {
                        auto &chunk = blocks[i][b].row[r].chunk[c];
                        if constexpr (kOnce) chunk = window_.load_once(offset_[i][r] | past, at << spread_);
                        else chunk = window_.template load<Vec<u32, 4>>(offset_[i][r] | past, at << spread_);
                    }
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
    u32 block_[3], offset_[kTiles][hk::kLaneRows];

public:
    HK_FN ScaleRows(const MxScale &s, u32 index, u32 first_row, u32 rows, u32 end)
        : window_(s.first(index), hk::Window::kBeyond - 1), columns_(u32(u64(end) * 8 / kXBits)) {
#pragma unroll
        for (int i = 0; i < 3; ++i) block_[i] = s.block[i];
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
            for (u32 r = 0; r < hk::kLaneRows; ++r) {
                const u32 offset = s.offset(first_row + 16 * i + hk::row_of_lane(hk::lane_id(), r), rows);
                offset_[i][r] = offset == hk::Window::kBeyond ? offset : offset + hk::group_of_lane(hk::lane_id()) * block_[0];
            }
        }
    }

    HK_FN void load(hk::OfRows<u32> (&codes)[kTiles][kCount], u32 from) const {
        const u32 column = u32(u64(from) * 8 / kXBits);
#pragma unroll
        for (u32 b = 0; b < kCount; ++b) {
            const u32 at = column + b * hk::kMxCols;
            const u32 past = (columns_ - 1u - (at + hk::group_of_lane(hk::lane_id()) * 32)) & hk::Window::kBeyond;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                codes[i][b] = hk::of_rows([&](u32 r) {
                    return u32(window_.load<u8>(offset_[i][r] | past, MxScale::of_block(at / 32, block_)));
                });
            }
        }
    }
};

/// No scales of blocks.
struct NoScaleRows {
    template <int kTiles, int kCount>
    HK_FN void load(hk::OfRows<u32> (&)[kTiles][kCount], u32) const {}
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

/// One operand of mxfp8: what a lane has of its rows, kMxCols columns.
template <bool kOfW>
struct MxFp8Rows {
    using Part = decltype([] {
        if constexpr (kOfW) return hk::MxFp8::W();
        else return hk::MxFp8::X();
    }());
    static constexpr int kParts = 2 / hk::MxFp8::kFrags;
    Part part[kParts];

    /// `scale`: of the lane's blocks.
    HK_FN static MxFp8Rows of(const hk::OfRows<hk::Block<hk::Fp8, true>> &raw, const hk::OfRows<u32> &scale) {
        MxFp8Rows rows;
        const auto codes = [&](int c) { return hk::joined(hk::of_rows([&](u32 r) { return raw.row[r].chunk[c]; })); };
        if constexpr (hk::kHasMxMma) {
            rows.part[0].codes[0] = codes(0), rows.part[0].codes[hk::MxFp8::kFrags - 1] = codes(1);
            if constexpr (kOfW) rows.part[0].scale = scale.row[0];
            else rows.part[0].scale = scale;
        } else {
            // A row's scales in one word.
            const u32 group = hk::group_of_lane(hk::lane_id());
            const auto words = hk::of_rows([&](u32 r) {
                return hk::reduce_over_groups(scale.row[r] << 8 * group, [](u32 a, u32 b) { return a | b; });
            });
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
                rows.part[p].codes[0] = codes(p);
                const u32 shift = 8 * p * hk::MxFp8::kBlocks;
                if constexpr (kOfW) {
#pragma unroll
                    for (u32 i = 0; i < hk::kMmaRows; ++i) {
                        const u32 word = words.row[hk::part_of_row(i)];
                        rows.part[p].scale[i] = hk::from_lane(word, hk::lane_of_row(group * hk::kMmaRows + i)) >> shift;
                    }
                } else {
                    rows.part[p].scale = hk::of_rows([&](u32 r) { return words.row[r] >> shift; });
                }
            }
        }
        return rows;
    }
};

HK_FN hk::MmaAcc mma(const MxFp8Rows<true> &w, const MxFp8Rows<false> &x, hk::MmaAcc acc) {
#pragma unroll
    for (int i = 0; i < MxFp8Rows<true>::kParts; ++i) acc = hk::MxFp8::mma(w.part[i], x.part[i], acc);
    return acc;
}

struct MxFp8ByMxFp8 {
    using X = hk::Fp8;
    using W = hk::Fp8;
    using RawX = hk::Block<X, true>;
    using RawW = RawX;
    using BlockX = MxFp8Rows<false>;
    using BlockW = MxFp8Rows<true>;
    static constexpr bool kXScales = true, kWScales = true;
    static constexpr float kSumUnit = 1.0f;

    HK_FN static BlockX x(const hk::OfRows<RawX> &raw, const hk::OfRows<u32> &scale, const MixedParams &) {
        return BlockX::of(raw, scale);
    }
    HK_FN static BlockW w(const hk::OfRows<RawW> &raw, const hk::OfRows<u32> &scale) { return BlockW::of(raw, scale); }
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
    BlockRows<typename Kind::RawX, kXBits, kXBits, kMTiles, kCount, false> x;
    BlockRows<typename Kind::RawW, hk::kBitsOf<typename Kind::W>, kXBits, kNTiles, kCount, true> w;
    __remove_pointer(Scales<Kind::kXScales, kMTiles>) x_scales;
    __remove_pointer(Scales<Kind::kWScales, kNTiles>) w_scales;

    struct Set {
        hk::OfRows<typename Kind::RawX> x[kMTiles][kCount];
        hk::OfRows<typename Kind::RawW> w[kNTiles][kCount];
        hk::OfRows<u32> x_scales[kMTiles][kCount], w_scales[kNTiles][kCount];
    };
    HK_FN Set load(u32 from) const {
        Set set;
        x.load(set.x, from);
        w.load(set.w, from);
        x_scales.load(set.x_scales, from);
        w_scales.load(set.w_scales, from);
        return set;
    }

    /// Operands of products, row by row if the kind makes them so.
    HK_FN static auto w_block(const Set &set, int n, int b) {
        const auto &raw = set.w[n][b];
        const auto &scale = set.w_scales[n][b];
        if constexpr (requires { Kind::w(raw, scale); }) return Kind::w(raw, scale);
        else return hk::of_rows([&](u32 r) { return Kind::w(raw.row[r], scale.row[r]); });
    }
    HK_FN auto x_block(const Set &set, int m, int b) const {
        const auto &raw = set.x[m][b];
        const auto &scale = set.x_scales[m][b];
        if constexpr (requires { Kind::x(raw, scale, p); }) return Kind::x(raw, scale, p);
        else return hk::of_rows([&](u32 r) { return Kind::x(raw.row[r], scale.row[r], p); });
    }

    HK_FN void multiply(Acc (&acc)[kMTiles][kNTiles], const Set &set) const {
#pragma unroll
        for (int b = 0; b < kCount; ++b) {
            decltype(w_block(set, 0, 0)) ws[kNTiles];
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) ws[n] = w_block(set, n, b);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                const auto x = x_block(set, m, b);
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) acc[m][n] = mma(ws[n], x, acc[m][n]);
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
        for (u32 i = 0; i < kTiles; ++i) {
            offset_[i] = s.offset(first_row + 16 * i + hk::group_of_lane(hk::lane_id()) * hk::kMmaRows, rows);
        }
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
        hk::OfRows<hk::Halves<T>> block[kGroupBlocks];
        Vec<float, hk::kLaneRows> scale;
    };
    struct GroupW {
        hk::OfRows<hk::Halves<T>> block[kGroupBlocks];
    };

    HK_FN static GroupX x(const hk::OfRows<hk::Block<T>> *raw) {
        GroupX group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
            group.block[b] = hk::of_rows([&](u32 r) { return hk::Halves<T>::of(raw[b].row[r]); });
        }
        group.scale = 1.0f;
        return group;
    }
    HK_FN static GroupW w(const hk::OfRows<hk::Block<Code>> *raw) {
        GroupW group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
            group.block[b] = hk::of_rows([&](u32 r) {
                hk::Halves<T> halves;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    halves.part[2 * c] = hk::decoded<Code, T>(raw[b].row[r].chunk[c].lo);
                    halves.part[2 * c + 1] = hk::decoded<Code, T>(raw[b].row[r].chunk[c].hi);
                }
                return halves;
            });
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
        Vec<float, hk::kLaneRows> scale;
    };
    struct GroupW {
        Frag codes[kGroupBlocks][2];
    };

    HK_FN static GroupX x(const hk::OfRows<hk::Block<T>> *raw) {
        constexpr auto kKind = hk::kCodeKind<Code>;
        GroupX group;
        hk::OfRows<Vec<u32, 4>> codes[kGroupBlocks][2];
#pragma unroll
        for (int r = 0; r < hk::kLaneRows; ++r) {
            Vec<float, 8> v[kGroupBlocks][4];
            hk::FiniteMax max;
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    v[b][c] = hk::widen<T, 8>(__builtin_bit_cast(Vec<T, 8>, raw[b].row[r].chunk[c]));
                    max.add(v[b][c]);
                }
            }
            const u32 top = hk::reduce_over_groups(max.top, hk::MaxBits{});
            group.scale[r] = hk::group_scale(hk::FiniteMax::value(top), hk::kCodeMax<kKind>);
            const float inverse = 1.0f / group.scale[r];
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const auto low = hk::to_codes<kKind>(v[b][2 * c] * inverse);
                    const auto high = hk::to_codes<kKind>(v[b][2 * c + 1] * inverse);
                    codes[b][c].row[r] = {low[0], low[1], high[0], high[1]};
                    // All tests for NaN at once would fill the scalar registers.
                    hk::stay_in_order();
                }
            }
        }
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 2; ++c) group.codes[b][c] = hk::joined(codes[b][c]);
        }
        return group;
    }
    HK_FN static GroupW w(const hk::OfRows<hk::Block<Code>> *raw) {
        GroupW group;
#pragma unroll
        for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                group.codes[b][c] = hk::joined(hk::of_rows([&](u32 r) { return raw[b].row[r].chunk[c]; }));
            }
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
    using Acc = hk::MmaAcc;
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_, kCount = kGroups * kGroupBlocks;
    static constexpr u32 kGroupBytes = 128 * sizeof(T), kStretch = kGroups * kGroupBytes;

    BlockRows<hk::Block<T>, hk::kBitsOf<T>, hk::kBitsOf<T>, kMTiles, kCount, false> x;
    BlockRows<hk::Block<Code>, hk::kBitsOf<Code>, hk::kBitsOf<T>, kNTiles, kCount, true> w;
    GroupRows<kNTiles, kGroups> scales;

    struct Set {
        hk::OfRows<hk::Block<T>> x[kMTiles][kCount];
        hk::OfRows<hk::Block<Code>> w[kNTiles][kCount];
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
                    const Acc scale = hk::by_m(xs.scale * set.scales[n][g]);
                    acc[m][n] = __builtin_elementwise_fma(__builtin_convertvector(part, Acc), scale, acc[m][n]);
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
