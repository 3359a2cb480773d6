// top1.hip: logits by a GEMM, and each token's best expert by their sigmoid (moe_routing_sigmoid_top1_fused)
//   x        [tokens, H] bf16 | f16     unit stride on H, any row stride
//   w        [H, experts] as x          unit stride on experts, any row stride
//   ids      [tokens, slots] i32        the expert of the largest sigmoid(x w), the lowest of equals; slot 1: experts
//   weights  [tokens, slots] f32        that sigmoid; slot 1: 1
// How the work is split
//   A block of 4 waves for 16 or 32 tokens and a slice of 512 of H, which its waves share (decode_loop of gemm/decode_gemm.h), 128
//   experts at a time (gemm/operands/across.h). A sum is that of the waves, then of the slices, in order. With few tokens each slice has
//   a block: f32 partial sums go to memory, and the last block of a tile to arrive (hk/arrive.h) adds them, with the same bits.
// Floor
//   x and w are read once from memory, w once by each tile from cache; 2 tokens H experts flops.

#include <gemm/decode_gemm.h>
#include <gemm/operands/across.h>
#include <gemm/operands/plain.h>

#include <hk/arrive.h>
#include <hk/entry.h>
#include <hk/math.h>

namespace top1 {
using hk::i64;
using hk::u32;
using hk::u64;

struct Params {
    u64 x, w, ids, weights;
    i64 x_row, w_row;  // strides, in bytes
    u64 partials;  // [tiles, slices, tokens of a tile, experts] f32; 0: a block has all slices
    u64 arrived;  // [tiles, slices] u64
    u64 mark;
    u32 tokens, width, experts, slots, slices, pad;
};
}  // namespace top1

namespace {
using namespace top1;
using gemm::kAcrossCols;
using gemm::kAcrossStep;
using hk::Frag;
using hk::GlobalPtr;
using hk::u16;
using hk::u8;
using hk::Vec;

#define HK_INLINE __attribute__((always_inline))

constexpr u32 kWaves = 4, kThreads = kWaves * hk::kWaveSize;
constexpr u32 kSlice = 512;  // SLICE in src/top1.rs
/// No bank conflicts between rows of partial sums.
constexpr u32 kPitch = kAcrossCols + 4;

HK_FN GlobalPtr<const u8> bytes_at(u64 data, i64 offset) {
    return reinterpret_cast<GlobalPtr<const u8>>(data) + offset;
}

/// 8 elements from `at` on, of which `left` exist.
HK_FN Vec<u32, 4> elements(GlobalPtr<const u8> at, u32 left) {
    Vec<u16, 8> v = u16(0);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        if (i < left) v[i] = reinterpret_cast<GlobalPtr<const u16>>(at)[i];
    }
    return __builtin_bit_cast(Vec<u32, 4>, v);
}

HK_FN u32 rest(u32 end, u32 at) { return at < end ? end - at : 0; }

/// Tokens by experts of any alignment.
template <int kM>
struct ElementOperands {
    GlobalPtr<const u8> x, w;
    i64 x_row, w_row;
    u32 tokens, rows, experts, n_tile;

    struct Stage {
        Frag x[kM];
        gemm::AcrossRows::Stage w;
    };
    HK_FN Stage load(u32 from) const {
        const u32 lane = hk::lane_id(), k = from + hk::group_of_lane(lane) * 8;
        Stage stage;
#pragma unroll
        for (u32 m = 0; m < kM; ++m) {
            stage.x[m] = hk::joined(hk::per_row([&](u32 i) {
                const u32 row = m * 16 + hk::row_of_lane(lane, i);
                return elements(x + row * x_row + i64(k) * 2, row < tokens ? rest(rows, k) : 0);
            }));
        }
#pragma unroll
        for (u32 i = 0; i < hk::kRowsPerLane; ++i) {
            const u32 col = n_tile * kAcrossCols + hk::row_of_lane(lane, i) * 8;
#pragma unroll
            for (u32 r = 0; r < 8; ++r) {
                stage.w.row[i][r] = elements(w + (k + r) * w_row + i64(col) * 2, k + r < rows ? rest(experts, col) : 0);
            }
        }
        return stage;
    }
};

/// The same in 16-byte loads.
template <int kM>
struct VectorOperands {
    gemm::FragmentRows<kM, 1> x;
    gemm::AcrossRows w;
    u32 n_tile;

    struct Stage {
        Frag x[kM];
        gemm::AcrossRows::Stage w;
    };
    HK_FN Stage load(u32 from) const {
        const auto rows = x.load(from * 2);
        Stage stage;
#pragma unroll
        for (u32 m = 0; m < kM; ++m) stage.x[m] = rows.frag[m][0];
        stage.w = w.load(from, n_tile);
        return stage;
    }
};

template <int kM, bool kVectorized>
HK_FN auto operands(const Params &p, u32 first_token, u32 slice, u32 n_tile) {
    const u32 first = slice * kSlice, rows = p.width - first < kSlice ? p.width - first : kSlice;
    const auto x = bytes_at(p.x, i64(first_token) * p.x_row + i64(first) * 2), w = bytes_at(p.w, i64(first) * p.w_row);
    const u32 tokens = p.tokens - first_token;
    if constexpr (kVectorized) {
        const gemm::FragmentRows<kM, 1> of_x(x, tokens, hk::RowLayout::by_rows(p.x_row), rows * 2,
                                             [](u32 row) { return row; });
        return VectorOperands<kM>{of_x, gemm::AcrossRows(w, u32(p.w_row), rows, p.experts), n_tile};
    } else {
        return ElementOperands<kM>{x, w, p.x_row, p.w_row, tokens, rows, p.experts, n_tile};
    }
}

/// A token's best expert so far. The key is the bits of a sigmoid: a NaN is above all numbers.
struct Best {
    static constexpr u32 kNan = 0x7fc00000u;
    u32 key = 0, expert = ~0u;

    /// Takes the better of a group of 16 threads that have 8 logits each, from expert `first` on.
    HK_FN void take(Vec<float, 8> logit, u32 first, u32 experts) {
        u32 mine = 0, at = ~0u;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const float x = logit[i], score = hk::sigmoid(x);
            const u32 bits = x == x ? __builtin_bit_cast(u32, score) : kNan;
            const bool better = first + i < experts && (bits > mine || at == ~0u);
            mine = better ? bits : mine;
            at = better ? first + i : at;
        }
        const u32 largest = hk::group_reduce<16>(mine, hk::Max{});
        at = hk::group_reduce<16>(mine == largest ? at : ~0u, hk::Min{});
        if (expert == ~0u || largest > key) {
            key = largest;
            expert = at;
        }
    }
};

template <class T, int kM, bool kVectorized>
HK_FN void best_experts(const Params &p) {
    // Of 16 tokens a thread has 8 experts of every kRows-th.
    constexpr u32 kTokens = 16 * kM, kParts = kAcrossCols / 8, kRows = kThreads / kParts, kRounds = kTokens / kRows;
    __shared__ alignas(16) float sums[kWaves][16 * kPitch];
    const bool split = p.partials != 0;
    const u32 tile = split ? hk::block_x() / p.slices : hk::block_x();
    const u32 first_slice = split ? hk::block_x() - tile * p.slices : 0, end_slice = split ? first_slice + 1 : p.slices;
    const u32 n_tiles = (p.experts + kAcrossCols - 1) / kAcrossCols;
    const u32 row = hk::thread_x() / kParts, col = hk::thread_x() % kParts * 8;
    const auto partial = [&](u32 slice, u32 round, u32 expert) {
        const u64 of_tile = u64(tile * p.slices + slice) * kTokens + round * kRows + row;
        return reinterpret_cast<GlobalPtr<float>>(p.partials) + of_tile * p.experts + expert;
    };
    Best best[kRounds];
#pragma unroll 1
    for (u32 n_tile = 0; n_tile < n_tiles; ++n_tile) {
        const u32 expert = n_tile * kAcrossCols + col;
        Vec<float, 8> total[kRounds] = {};
#pragma unroll 1
        for (u32 slice = first_slice; slice < end_slice; ++slice) {
            gemm::AcrossAcc<T, kM> acc;
            const auto from = operands<kM, kVectorized>(p, tile * kTokens, slice, n_tile);
            const u32 rows = p.width - slice * kSlice < kSlice ? p.width - slice * kSlice : kSlice;
            gemm::decode_loop(
                gemm::KSteps<kWaves * kAcrossStep>{hk::wave_id() * kAcrossStep, rows}, acc,
                [&](u32 at) HK_INLINE { return from.load(at); },
                [](auto &acc, const auto &stage, u32) HK_INLINE { acc.add(stage.w, stage.x); });
#pragma unroll
            for (u32 m = 0; m < kM; ++m) {
                hk::block_barrier();  // all waves have read the sums before
                acc.each(m, [&](u32 of_row, u32 of_col, Vec<float, 8> v) HK_INLINE {
                    auto *to = reinterpret_cast<Vec<float, 4> *>(sums[hk::wave_id()] + of_row * kPitch + of_col);
                    to[0] = v.lo;
                    to[1] = v.hi;
                });
                hk::block_barrier();
#pragma unroll
                for (u32 i = 0; i < 16 / kRows; ++i) {
                    Vec<float, 8> sum = 0.0f;
#pragma unroll
                    for (u32 wave = 0; wave < kWaves; ++wave) {
                        const auto *of_wave =
                            reinterpret_cast<const Vec<float, 4> *>(sums[wave] + (i * kRows + row) * kPitch + col);
                        sum += __builtin_shufflevector(of_wave[0], of_wave[1], 0, 1, 2, 3, 4, 5, 6, 7);
                    }
                    total[m * (16 / kRows) + i] += sum;
                }
            }
        }
#pragma unroll
        for (u32 round = 0; round < kRounds; ++round) {
            if (!split) {
                best[round].take(total[round], expert, p.experts);
                continue;
            }
            const auto to = partial(first_slice, round, expert);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                if (expert + j < p.experts) to[j] = total[round][j];
            }
        }
    }
    if (split) {
        const auto flags = reinterpret_cast<GlobalPtr<u64>>(p.arrived) + tile * p.slices;
        if (!hk::all_arrived(flags, first_slice, p.slices, p.mark)) return;
#pragma unroll 1
        for (u32 n_tile = 0; n_tile < n_tiles; ++n_tile) {
            const u32 expert = n_tile * kAcrossCols + col;
#pragma unroll
            for (u32 round = 0; round < kRounds; ++round) {
                Vec<float, 8> total = 0.0f;
                for (u32 slice = 0; slice < p.slices; ++slice) {
                    const auto of_slice = partial(slice, round, expert);
#pragma unroll
                    for (u32 j = 0; j < 8; ++j) total[j] += expert + j < p.experts ? of_slice[j] : 0.0f;
                }
                best[round].take(total, expert, p.experts);
            }
        }
        hk::clear_flags(flags, p.slices);
    }
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
        const u32 token = tile * kTokens + round * kRows + row, slot = col / 8;
        if (token >= p.tokens || slot >= p.slots) continue;
        const u64 at = u64(token) * p.slots + slot;
        reinterpret_cast<GlobalPtr<u32>>(p.ids)[at] = slot == 0 ? best[round].expert : p.experts;
        reinterpret_cast<GlobalPtr<float>>(p.weights)[at] =
            slot == 0 ? __builtin_bit_cast(float, best[round].key) : 1.0f;
    }
}
}  // namespace

// Entry points, as in src/top1.rs: tokens of a tile, or of any alignment.
HK_ENTRY(top1_bf16_16, kThreads, best_experts<hk::bf16, 1, true>)
HK_ENTRY(top1_bf16_32, kThreads, best_experts<hk::bf16, 2, true>)
HK_ENTRY(top1_bf16_scalar, kThreads, best_experts<hk::bf16, 1, false>)
HK_ENTRY(top1_f16_16, kThreads, best_experts<hk::f16, 1, true>)
HK_ENTRY(top1_f16_32, kThreads, best_experts<hk::f16, 2, true>)
HK_ENTRY(top1_f16_scalar, kThreads, best_experts<hk::f16, 1, false>)
