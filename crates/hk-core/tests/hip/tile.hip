// tile.hip: tiles in LDS: fragments, accumulators as an operand of the next MMA, movers, pipelines.
#include <hk/arch.h>
#include <hk/block.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/pipeline.h>
#include <hk/shared.h>
#include <hk/transpose.h>
#include <hk/wave_tile.h>

namespace {
using hk::Access;
using hk::Frag;
using hk::GlobalPtr;
using hk::SharedTile;
using hk::u32;
using hk::u8;

struct Params {  // same fields, same order as `Params` in tests/tile/lds.rs
    hk::Global x, w, y;
    hk::RowLayout layout;     // of x's rows
    u32 rows, end, from;      // of x's rows; bytes of a row; the stage's first byte
    u32 factor;               // row r of the tile is row `factor * r` of x
    u32 read;                 // the tile is read at last; 2: in all ways
    u32 count;                // of stages
};

HK_FN GlobalPtr<const u8> bytes(const hk::Global &t) { return t.row<const u8>(0); }
template <class V>
HK_FN V load(const hk::Global &t, u32 i) {
    return reinterpret_cast<GlobalPtr<const V>>(bytes(t))[i];
}
template <class V>
HK_FN void store(const hk::Global &t, u32 i, V v) {
    reinterpret_cast<GlobalPtr<V>>(t.row<u8>(0))[i] = v;
}

/// The block's threads from the last to the first, so that a wave reads what another has brought.
HK_FN u32 thread_from_last(u32 threads) { return threads - 1 - hk::thread_x(); }

/// A tile's rows, one after the other, to y from byte `to` on.
template <class Tile>
HK_FN void write_rows(const hk::Global &y, u32 to, const Tile &tile, u32 threads) {
    for (u32 i = thread_from_last(threads); i < Tile::kRows * Tile::kChunks; i += threads) {
        store(y, to / 16 + i, tile.template get<Frag>(i / Tile::kChunks, i % Tile::kChunks * 16));
    }
}

/// x's 64 rows to LDS, lanes side by side there, and back fragment by fragment. kSwizzled false: as a tile without a swizzle.
template <int kBytes, int kDim, bool kSwizzled>
HK_FN void fragments(const Params &p) {
    using Tile = SharedTile<64, kBytes>;
    constexpr u32 kGroups = hk::kWaveSize / kDim, kSteps = kBytes / hk::kFragBytesOf<kDim>;
    __shared__ Tile tile;
    const u32 lane = hk::lane_id();
    for (u32 i = lane; i < Tile::kRows * Tile::kChunks; i += hk::kWaveSize) {
        const u32 row = i / Tile::kChunks, at = kSwizzled ? Tile::place(row, i % Tile::kChunks) : i;
        tile.chunk[i] = load<Frag>(p.x, at);
    }
    hk::block_barrier();
    if (p.read == 0) return;
    for (u32 row = 0; row < Tile::kRows; row += kDim) {
        for (u32 step = 0; step < kSteps; ++step) {
            const u32 plain = (row + lane % kDim) * Tile::kChunks + step * kGroups + lane / kDim;
            const Frag frag = kSwizzled ? tile.template frag<kDim>(row, step) : tile.chunk[plain];
            store(p.y, (row / kDim * kSteps + step) * hk::kWaveSize + lane, frag);
        }
    }
}

/// x's fragments to rows of a tile, and back.
template <int kBytes, int kDim>
HK_FN void fragment_writes(const Params &p) {
    using Tile = SharedTile<64, kBytes>;
    constexpr u32 kGroups = hk::kWaveSize / kDim, kSteps = kBytes / hk::kFragBytesOf<kDim>;
    __shared__ Tile tile;
    const u32 lane = hk::lane_id();
    for (u32 row = 0; row < Tile::kRows; row += kDim) {
        for (u32 step = 0; step < kSteps; ++step) {
            const Frag frag = load<Frag>(p.x, (row / kDim * kSteps + step) * hk::kWaveSize + lane);
            tile.put(row + lane % kDim, (step * kGroups + lane / kDim) * 16, frag);
        }
    }
    hk::block_barrier();
    if (p.read != 0) write_rows(p.y, 0, tile, hk::kWaveSize);
}

/// 64 rows of 64 columns to LDS, and their fragments by columns to y; then which column each row of the operands is.
template <int kDim, bool kOfSums>
HK_FN void columns(const Params &p) {
    using Tile = SharedTile<64, 128>;
    constexpr u32 kOperands = 64 / kDim, kRows = 8 * hk::kWaveSize / kDim;
    __shared__ Tile tile;
    const u32 lane = hk::lane_id();
    for (u32 i = lane; i < Tile::kRows * Tile::kChunks; i += hk::kWaveSize) {
        tile.chunk[i] = load<Frag>(p.x, Tile::place(i / Tile::kChunks, i % Tile::kChunks));
    }
    hk::block_barrier();
    if (p.read == 0) return;
    for (u32 row = 0; row < Tile::kRows; row += kRows) {
        Frag frags[kOperands];
        tile.template column_frags<kDim, kOfSums>(row, frags);
        for (u32 j = 0; j < kOperands; ++j) store(p.y, (row / kRows * kOperands + j) * hk::kWaveSize + lane, frags[j]);
    }
    store(p.y, Tile::kRows * Tile::kBytes / 4 + lane, Tile::template column<kDim>(lane));
}

/// y[0, m, i] = sum over n of v[i, n] T(d[n, m]), d = w x^T: the sums as an operand as they are. y[1]: by LDS. y[2], of types
/// of 2 bytes: as y[0], with v by columns of a tile that has rows n.
///   x [64, kBytes], then w [kN, kBytes], then v [64, kN]; rows of kBytes, of T
template <class T, int kDim, int kBytes>
HK_FN void chain(const Params &p) {
    using Product = hk::FragMma<T, T, kDim>;
    constexpr int kM = 64, kN = kBytes * 8 / hk::kBitsOf<T>, kV = 64;
    using Bits = hk::Vec<u8, hk::kBitsOf<T> / 8>;
    __shared__ SharedTile<kM, kBytes> x;
    __shared__ SharedTile<kN, kBytes> w;
    __shared__ SharedTile<kV, kBytes> v, placed;
    const u32 lane = hk::lane_id();
    const auto fill = [&](auto &tile, u32 from) {
        for (u32 i = lane; i < tile.kRows * tile.kChunks; i += hk::kWaveSize) {
            tile.put(i / tile.kChunks, i % tile.kChunks * 16, load<Frag>(p.x, from / 16 + i));
        }
    };
    fill(x, 0);
    fill(w, kM * kBytes);
    fill(v, (kM + kN) * kBytes);
    for (u32 i = lane; i < kV * kN; i += hk::kWaveSize) {
        const u32 row = i / kN, n = i % kN;
        placed.put(row, hk::AccLayout<kDim>::template place<T>(n) * sizeof(Bits), load<Bits>(p.x, (kM + kN) * kN + i));
    }
    hk::block_barrier();

    hk::WaveTile<Product, kN, kM> d;
    d.multiply(w, 0, x, 0);
    hk::WaveTile<Product, kV, kM> y;
#pragma unroll
    for (int j = 0; j < kM / kDim; ++j) {
        const auto operand = d.template as_operand<T>(j);
#pragma unroll
        for (int f = 0; f < operand.kFrags; f += Product::kFrags) {
#pragma unroll
            for (int i = 0; i < kV / kDim; ++i) {
                Frag of_v[Product::kFrags];
                for (int part = 0; part < Product::kFrags; ++part)
                    of_v[part] = placed.template frag<kDim>(i * kDim, f + part);
                y.acc[j][i] = Product::mma(of_v, operand.frag + f, y.acc[j][i]);
            }
        }
    }
    const auto write = [&](u32 from, const auto &sums) {
        sums.each([&](u32 n, u32 m, hk::Vec<float, hk::kMmaRows> run) {
            store(p.y, (from + m * kV + n) / hk::kMmaRows, run);
        });
    };
    write(0, y);
    hk::block_barrier();
    if (p.read == 0) return;
    d.template put<T>(x, 0, 0);
    hk::block_barrier();
    hk::WaveTile<Product, kV, kM> by_lds;
    by_lds.multiply(v, 0, x, 0);
    write(kM * kV, by_lds);
    if (p.read == 1) return;

    if constexpr (sizeof(Bits) == 2) {
        constexpr int kRows = 8 * hk::kWaveSize / kDim;  // of a fragment
        using Columns = SharedTile<kN, 128>;
        __shared__ Columns by_columns;
        for (u32 i = lane; i < kV * kN; i += hk::kWaveSize) {
            by_columns.put(i % kN, i / kN * 2, load<Bits>(p.x, (kM + kN) * kN + i));
        }
        hk::block_barrier();
        hk::WaveTile<Product, kV, kM> sums;
#pragma unroll
        for (int f = 0; f < kN / kRows; ++f) {
            Frag of_v[kV / kDim];
            by_columns.template column_frags<kDim, true>(f * kRows, of_v);
#pragma unroll
            for (int j = 0; j < kM / kDim; ++j) {
                const auto operand = d.template as_operand<T>(j);
#pragma unroll
                for (int i = 0; i < kV / kDim; ++i)
                    sums.acc[j][i] = Product::mma(of_v + i, operand.frag + f, sums.acc[j][i]);
            }
        }
        sums.each([&](u32 n, u32 m, hk::Vec<float, hk::kMmaRows> run) {
            for (u32 i = 0; i < hk::kMmaRows; ++i) {
                const float sum = run[i];
                store(p.y, 2 * kM * kV + m * kV + Columns::template column<kDim>(n + i), sum);
            }
        });
    }
}

constexpr int kThreads = 4 * hk::kWaveSize;

/// A stage of x's rows to y: by registers and, from the tile's size on, straight to LDS where that is possible.
template <int kBytes, Access kAccess, int kElement>
HK_FN void move(const Params &p) {
    using Tile = SharedTile<128, kBytes>;
    using Mover = hk::Mover<Tile, kThreads, kAccess, kElement>;
    __shared__ Tile tile;
    const Mover mover(bytes(p.x), p.rows, p.layout, p.end, [&](u32 row) { return row * p.factor; });
    Mover::store(mover.load(p.from), tile);
    hk::block_barrier();
    if (p.read != 0) write_rows(p.y, 0, tile, kThreads);
    if constexpr (Mover::kDirectToLds) {
        if (p.count == 0) return;
        hk::block_barrier();
        mover.copy(p.from, tile);
        hk::wait_loads<0, 0>();
        hk::block_barrier();
        if (p.read != 0) write_rows(p.y, sizeof(Tile), tile, kThreads);
    }
}

/// A stage that a mover brings by registers.
template <class Mover>
HK_FN void bring(const Params &p, const Mover &mover) {
    __shared__ typename Mover::Tile tile;
    mover.store(mover.load(p.from), tile);
    hk::block_barrier();
    if (p.read != 0) write_rows(p.y, 0, tile, kThreads);
}

/// Of a matrix whose columns are contiguous, `layout.row` bytes apart.
template <int kRows>
HK_FN void transposed(const Params &p) {
    bring(p, hk::TransposingMover<SharedTile<kRows, 64>, kThreads>(bytes(p.x), p.rows, u32(p.layout.row), p.end));
}

/// The same, from byte `factor` of the rows on.
HK_FN void transposed_part(const Params &p) {
    using Mover = hk::TransposingMover<SharedTile<128, 64>, kThreads, true>;
    bring(p, Mover(bytes(p.x), p.rows, u32(p.layout.row), p.end, p.factor));
}

/// Of rows `layout.row` bytes apart, from byte `factor` on.
HK_FN void ragged(const Params &p) {
    bring(p, hk::RaggedMover<SharedTile<128, 64>, kThreads>(bytes(p.x), p.rows, u32(p.layout.row), p.end, p.factor));
}

/// Of a matrix with rows `layout.row` and columns `layout.block` bytes apart.
HK_FN void strided(const Params &p) {
    bring(p, hk::StridedMover<SharedTile<128, 64>, kThreads>(bytes(p.x), p.rows, p.layout.row, p.layout.block, p.end));
}

/// Bytes, decoded to 16-bit floats of the same value, plus a number for each row and stage.
struct Widen {
    struct Extra {
        u32 more;
    };
    u32 row = 0;

    HK_FN void of_row(u32 of) { row = of; }
    HK_FN Extra load(u32 from, u32) const { return {row * 256 + from}; }
    template <int kWords, int kChunks>
    HK_FN void decode(hk::Vec<u32, kWords> codes, Extra extra, hk::Vec<u32, 4> (&halves)[kChunks]) const {
#pragma unroll
        for (int i = 0; i < 4 * kChunks; ++i) {
            const auto half = [&](int k) { return ((codes[k / 4] >> (k % 4 * 8)) & 0xffu) + extra.more; };
            halves[i / 4][i % 4] = (half(2 * i + 1) << 16) | (half(2 * i) & 0xffffu);
        }
    }
};

template <Access kAccess>
HK_FN void decoded(const Params &p) {
    using Mover = hk::DequantMover<SharedTile<128, 64>, kThreads, kAccess, 8, Widen>;
    bring(p, Mover(bytes(p.x), p.rows, p.layout, p.end, Widen{}));
}

constexpr int kWordThreads = 2 * hk::kWaveSize;

/// Words beside rows: those of x in ascending order, those of w `factor` apart; of `rows` rows each.
template <int kXRows, int kWRows>
HK_FN auto words_of(const Params &p) {
    return hk::ScaleMover<kXRows, kWRows, kWordThreads>(p.end, [&](u32 row, bool of_w) {
        const u32 apart = of_w ? p.factor : 1;
        const u32 offset = row < p.rows ? row * apart * 4 : hk::Window::kOutOfBounds;
        return hk::ScalePlace{(of_w ? p.w : p.x).data, offset, p.rows * apart * 4, of_w ? 7u : 6u};
    });
}

HK_FN void words_to_lds(const Params &p) {
    const auto words = words_of<128, 70>(p);
    using Words = __remove_cvref(decltype(words));
    __shared__ typename Words::Tile tile;
    Words::store(words.load(p.from), tile);
    hk::block_barrier();
    const auto write = [&](u32 to) {
        for (u32 i = thread_from_last(kWordThreads); i < 128; i += kWordThreads) store(p.y, to + i, tile.a(i));
        for (u32 i = thread_from_last(kWordThreads); i < 70; i += kWordThreads) store(p.y, to + 128 + i, *tile.w(i));
    };
    write(0);
    hk::block_barrier();
    words.copy(p.from, tile);
    hk::wait_loads<0, 0>();
    hk::block_barrier();
    write(198);
}

/// What the pipeline gives, in order: y has, for each stage, x's rows, w's rows, their words, and whose turn it was.
template <class X, class W, class Words, int kPhases_>
struct Record {
    static constexpr int kPhases = kPhases_;
    const hk::Global &y;
    u32 stage = 0;

    static constexpr u32 kX = sizeof(typename X::Tile), kW = sizeof(typename W::Tile);
    static constexpr u32 kWords = X::Tile::kRows + W::Tile::kRows, kStage = kX + kW + kWords * 4 + 16;

    template <int kPhase>
    HK_FN void multiply(const auto &step) {
        for (u32 s = 0; s < sizeof(step.a) / sizeof(step.a[0]); ++s, ++stage) {
            write_rows(y, stage * kStage, *step.a[s], kWordThreads);
            write_rows(y, stage * kStage + kX, *step.w[s], kWordThreads);
            const u32 words = (stage * kStage + kX + kW) / 4;
            for (u32 i = thread_from_last(kWordThreads); i < kWords; i += kWordThreads) {
                store(y, words + i, i < X::Tile::kRows ? step.scales[s]->a(i) : *step.scales[s]->w(i - X::Tile::kRows));
            }
            if (hk::thread_x() == 0) store(y, words + kWords, u32(kPhase));
        }
    }
};

using Rows64 = hk::Mover<SharedTile<64, 64>, kWordThreads, Access::Vectorized, 1>;
using Rows32 = hk::Mover<SharedTile<32, 64>, kWordThreads, Access::Vectorized, 1>;
using Words96 = hk::ScaleMover<64, 32, kWordThreads>;

template <class Pipeline, int kPhases = 2>
HK_FN void pipeline(const Params &p) {
    const auto same = [](u32 row) { return row; };
    const Rows64 x(bytes(p.x), p.rows, p.layout, p.end, same);
    const Rows32 w(bytes(p.x) + p.layout.offset(64), p.rows, p.layout, p.end, same);
    const Words96 words(p.end, [&](u32 row, bool of_w) {
        const u32 of_all = of_w ? 64 + row : row;
        return hk::ScalePlace{p.w.data, of_all * 4, 96 * 4, 6};
    });
    __shared__ typename Pipeline::Lds stages;
    Record<Rows64, Rows32, Words96, kPhases> record{p.y};
    Pipeline(x, w, words, stages).run(p.from, p.count, record);
}
template <int kStep>
using ByRegisters = hk::RegisterPipeline<Rows64, Rows32, Words96, kStep>;
/// The target's own: of kCount stages where loads go straight to LDS.
template <int kCount, int kStep>
using OfTarget = hk::Pipeline<Rows64, Rows32, Words96, kCount, kStep>;

constexpr int kPairs = 2 * hk::kSimdsPerCu * hk::kWaveSize;  // threads: two waves on each SIMD

/// What ping-pong gives to each half of the block: y has, for each stage, all rows as one half has read them, in order, their
/// words, and when it has read and multiplied its step; then the same of the other half. At the end, what counts the times.
template <int kStep>
struct RecordHalves {
    static constexpr u32 kRows = 256, kHalf = kPairs / 2, kChunks = kRows * 4, kWords = kChunks * 4 + kRows + 4;
    const hk::Global &y;
    u32 count;  // stages
    u32 stage = 0;

    struct Operands {
        Frag chunk[kStep][kChunks / kHalf];
        u32 word[kStep][kRows / kHalf];
        u32 time;
    };

    /// One wave of each half has the time.
    HK_FN u32 time() const {
        if (hk::wave_id() % hk::kSimdsPerCu != 0 || hk::lane_id() != 0) return 0;
        u32 *clock = reinterpret_cast<u32 *>(y.data) + 2 * count * kWords;
        return __scoped_atomic_fetch_add(clock, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    }

    /// Of what other threads have moved.
    HK_FN static u32 first() { return (kPairs - 1 - hk::thread_x()) % kHalf; }

    HK_FN Operands read(const auto &step) const {
        Operands of;
#pragma unroll
        for (int s = 0; s < kStep; ++s) {
#pragma unroll
            for (u32 i = 0; i < kChunks / kHalf; ++i) {
                const u32 at = first() + i * kHalf, row = at / 4 % 128;
                of.chunk[s][i] = (at < kChunks / 2 ? step.a[s] : step.w[s])->template get<Frag>(row, at % 4 * 16);
            }
#pragma unroll
            for (u32 i = 0; i < kRows / kHalf; ++i) {
                const u32 row = first() + i * kHalf;
                of.word[s][i] = row < kRows / 2 ? step.scales[s]->a(row) : *step.scales[s]->w(row - kRows / 2);
            }
        }
        // Long enough for the other half to come first if nothing kept it from that.
        if (hk::wave_id() == 0) {
#pragma unroll 1
            for (u32 i = 0; i < 40000; ++i) asm volatile("" : : : "memory");
        }
        of.time = time();
        return of;
    }
    HK_FN void multiply(const Operands &of) {
        const u32 half = hk::thread_x() / kHalf, now = time();
#pragma unroll
        for (int s = 0; s < kStep; ++s, ++stage) {
            const u32 to = (2 * stage + half) * kWords;
#pragma unroll
            for (u32 i = 0; i < kChunks / kHalf; ++i) store(y, to / 4 + first() + i * kHalf, of.chunk[s][i]);
#pragma unroll
            for (u32 i = 0; i < kRows / kHalf; ++i) store(y, to + kChunks * 4 + first() + i * kHalf, of.word[s][i]);
            if (hk::thread_x() % kHalf == 0) {
                store(y, to + kChunks * 4 + kRows, of.time);
                store(y, to + kChunks * 4 + kRows + 1, now);
            }
        }
    }
};

using Rows128 = hk::Mover<SharedTile<128, 64>, kPairs, Access::Vectorized, 1>;
using Words256 = hk::ScaleMover<128, 128, kPairs>;

template <class Pipeline, int kStep>
HK_FN void ping_pong(const Params &p) {
    const auto same = [](u32 row) { return row; };
    const Rows128 x(bytes(p.x), p.rows, p.layout, p.end, same);
    const Rows128 w(bytes(p.x) + p.layout.offset(128), p.rows, p.layout, p.end, same);
    const Words256 words(
        p.end, [&](u32 row, bool of_w) { return hk::ScalePlace{p.w.data, (of_w ? 128 + row : row) * 4, 256 * 4, 6}; });
    __shared__ typename Pipeline::Lds stages;
    RecordHalves<kStep> record{p.y, p.factor};
    Pipeline(x, w, words, stages).ping_pong(p.from, p.count, record);
}
template <int kStep>
using PairsByRegisters = hk::RegisterPipeline<Rows128, Rows128, Words256, kStep>;
template <int kCount, int kStep>
using PairsOfTarget = hk::Pipeline<Rows128, Rows128, Words256, kCount, kStep>;
constexpr int kTwo = hk::kHasWideDma ? 2 : 1;  // by registers, there is no room for four stages in LDS

/// y[n - 1, i] = xcd_remap(i, n) for all n up to `rows`.
HK_FN void tasks(const Params &p) {
    const u32 n = hk::block_x() + 1;
    for (u32 i = hk::thread_x(); i < n; i += hk::kWaveSize) store(p.y, hk::block_x() * p.rows + i, hk::xcd_remap(i, n));
}
}  // namespace

#define SHAPES(bytes, dim)                                                                      \
    HK_ENTRY(fragments_##bytes##_##dim, hk::kWaveSize, fragments<bytes, dim, true>)             \
    HK_ENTRY(fragments_unswizzled_##bytes##_##dim, hk::kWaveSize, fragments<bytes, dim, false>) \
    HK_ENTRY(fragment_writes_##bytes##_##dim, hk::kWaveSize, fragment_writes<bytes, dim>)
SHAPES(64, 16)
SHAPES(64, 32)
SHAPES(128, 16)
SHAPES(128, 32)

HK_ENTRY(columns_16, hk::kWaveSize, columns<16, false>)
HK_ENTRY(columns_32, hk::kWaveSize, columns<32, false>)
HK_ENTRY(columns_16_of_sums, hk::kWaveSize, columns<16, true>)
HK_ENTRY(columns_32_of_sums, hk::kWaveSize, columns<32, true>)

HK_ENTRY(chain_bf16_16, hk::kWaveSize, chain<hk::bf16, 16, 128>)
HK_ENTRY(chain_bf16_32, hk::kWaveSize, chain<hk::bf16, 32, 128>)
HK_ENTRY(chain_f16_16, hk::kWaveSize, chain<hk::f16, 16, 64>)
HK_ENTRY(chain_f16_32, hk::kWaveSize, chain<hk::f16, 32, 64>)
HK_ENTRY(chain_fp8_16, hk::kWaveSize, chain<hk::Fp8, 16, 128>)
HK_ENTRY(chain_fp8_32, hk::kWaveSize, chain<hk::Fp8, 32, 64>)

#define MOVERS(bytes)                                                            \
    HK_ENTRY(move_vectors_##bytes, kThreads, move<bytes, Access::Vectorized, 1>) \
    HK_ENTRY(move_elements1_##bytes, kThreads, move<bytes, Access::Scalar, 1>)   \
    HK_ENTRY(move_elements2_##bytes, kThreads, move<bytes, Access::Scalar, 2>)
MOVERS(64)
MOVERS(128)
HK_ENTRY(move_transposed_64, kThreads, transposed<64>)
HK_ENTRY(move_transposed_128, kThreads, transposed<128>)
HK_ENTRY(move_transposed_part, kThreads, transposed_part)
HK_ENTRY(move_ragged, kThreads, ragged)
HK_ENTRY(move_strided, kThreads, strided)
HK_ENTRY(move_decoded_vectors, kThreads, decoded<Access::Vectorized>)
HK_ENTRY(move_decoded_elements, kThreads, decoded<Access::Scalar>)
HK_ENTRY(move_words, kWordThreads, words_to_lds)

HK_ENTRY(pipeline_registers_1, kWordThreads, pipeline<ByRegisters<1>>)
HK_ENTRY(pipeline_registers_2, kWordThreads, pipeline<ByRegisters<2>>)
HK_ENTRY(pipeline_registers_1_in_4, kWordThreads, pipeline<ByRegisters<1>, 4>)
HK_ENTRY(pipeline_registers_2_in_4, kWordThreads, pipeline<ByRegisters<2>, 4>)
HK_ENTRY(pipeline_target_3_1, kWordThreads, pipeline<OfTarget<3, 1>>)
HK_ENTRY(pipeline_target_5_2, kWordThreads, pipeline<OfTarget<5, 2>>)

HK_ENTRY(ping_pong_registers_1, kPairs, ping_pong<PairsByRegisters<1>, 1>)
HK_ENTRY(ping_pong_target_3_1, kPairs, ping_pong<PairsOfTarget<3, 1>, 1>)
HK_ENTRY(ping_pong_target_5_1, kPairs, ping_pong<PairsOfTarget<5, 1>, 1>)
HK_ENTRY(ping_pong_target_6_2, kPairs, ping_pong<PairsOfTarget<6, kTwo>, kTwo>)

HK_ENTRY(tasks_by_xcd, hk::kWaveSize, tasks)
