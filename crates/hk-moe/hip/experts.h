// experts.h: grouped GEMM of experts on the tiles of hk-gemm.
//   y[row(i)] = weight(i) epilogue(sum over k of a[source(i), k] w[expert(i), n, k])      for the rows i that routing lists
//   RowMap says where a tile finds its expert and rows. Rows of a are gathered as they are loaded and those of y scattered as they are
//   stored: a row's bits do not depend on either. Rows that are in no list are neither read nor written.
//   Gated outputs have two rows of w each, gate and value: halves of w, or neighbours (`pairs`).
// Floor: bytes of w of experts that have rows, of a and y; 2 M N K flops of listed rows.
#pragma once

#include <hk/activate.h>
#include <hk/entry.h>

#include <gemm/gemm.h>
#include <gemm/operands/plain.h>

namespace experts {
using gemm::Float;
using gemm::TileCoord;
using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// Where a tile's expert and rows come from. A place is an index in the list.
enum class RowMap : u32 {
    Sorted = 0,  ///< moe_align_block_size: each expert's gates padded to list tiles; y has a row for each gate
    Ragged = 1,  ///< moe_routing: gates by expert without padding; y has a row for each place
    Masked = 2,  ///< a and y have as many rows for each expert, the first counts[expert] of which, or all, are computed
};

constexpr u32 kNone = ~0u;

struct Rows {
    u64 list;  // i32 gates by place. Ragged: 0: a has the order of the places
    u64 tiles;  // i32. Sorted: expert of each list tile; Ragged: number in the expert << 16 | expert; Masked: rows of each expert, 0: all
    u64 ends;  // i32. Sorted: [1] places of all tiles; Ragged: [experts + 1] offsets of experts
    u64 ids;  // i32 [gates]. Sorted: rows of y whose expert is outside the experts become zero; 0: they are left as they are
    u64 weights;  // of gates (Sorted), of places (Ragged); 0: none
    u64 expert_map;  // i32 [all_experts]. Ragged: matrix of each expert, none if negative; 0: its own
    RowMap map;
    Float weight_type;
    u32 experts;  // matrices of w
    u32 all_experts;  // ids from here on have no expert
    u32 gates;  // Masked: rows of an expert
    u32 per_token, per_token_inverse;  // gates of a row of a
    u32 tile_log2;  // places of a list tile
    u32 list_tiles;
    u32 tiles_of_expert;  // Masked: tiles of kM rows
    u32 keep;  // Sorted: rows of y of tiles without an expert are left as they are
    u32 pad;
};

/// Order of the rows of w.
enum class WOrder : u32 {
    Plain = 0,
    Halves = 1,  ///< gates, then values
    Pairs = 2,  ///< gate 0, value 0, gate 1, ..
};

struct Output {
    u64 y;
    i64 y_batch, y_row;  // strides in elements; y_batch: of an expert (Masked)
    u64 bias;  // [experts, rows of w]; 0: none
    u64 a_rows, w_rows;  // f32 scales of rows of a, of w; 0: none
    i64 bias_batch, w_rows_batch;
    u32 a_rows_step, w_rows_step;  // 0: one scale for all, or for an expert
    Float y_type, bias_type;
    u32 cols;
    WOrder order;
    u32 activation;  // hk::Activation, or gemm::Epilogue::kNone
    float alpha, limit, value_add;  // gated: silu(alpha g) / alpha (v + value_add), |v| and g up to `limit`
    u32 weight_first;  // before scales and activation
    Float round_type;  // of gate and value ahead of the activation; F32: no rounding
    u32 vectors;  // rows of y are 16-byte aligned
    u32 pad;
};

/// Groups along K of weights that are dequantized ahead of the product: (q - zero) scale.
struct Groups {
    u64 scale;  // [experts, rows of w, groups]; 0: none
    u64 zero;  // u8, likewise; int4: two rows of w a byte, the even one low. 0: `middle`
    i64 scale_batch, zero_batch;  // in elements
    u32 scale_row, zero_row;  // of a group of all rows: [.., groups]
    Float scale_type;
    u32 shift;  // a group is 2^shift bytes of w
    u32 middle;
    u32 pad;
};

struct Params {
    gemm::Operand a, w;
    gemm::Grid grid;
    Rows rows;
    Output out;
    gemm::BlockScale a_scale, w_scale;
    gemm::MxScale a_mx, w_mx;
    Groups groups;
};

template <class T>
HK_FN T load_list(u64 data, u32 at) {
    return reinterpret_cast<GlobalPtr<const T>>(data)[at];
}

/// The same at a wave-uniform place: a scalar load.
template <class T>
HK_FN T load_uniform(u64 data, u32 at) {
    return hk::load_uniform<T>(data + u64(at) * sizeof(T));
}

/// The expert and the places of a block's tile.
struct ExpertTile {
    u32 expert = kNone;  // from `experts` on: rows of y become zero
    u32 first = 0, count = 0;  // places

    /// Tile `tile` of kM rows.
    template <u32 kM>
    HK_FN static ExpertTile find(const Rows &p, u32 tile) {
        ExpertTile t;
        if (p.map == RowMap::Masked) {
            t.expert = tile / p.tiles_of_expert;
            t.first = (tile - t.expert * p.tiles_of_expert) * kM;
            const i32 n = p.tiles ? load_uniform<i32>(p.tiles, t.expert) : i32(p.gates);
            const u32 rows = n < 0 ? 0 : u32(n) < p.gates ? u32(n) : p.gates;
            t.count = rows > t.first ? rows - t.first : 0;
        } else {
            const u32 place = tile * kM, of_list = place >> p.tile_log2;
            if (of_list >= p.list_tiles) return t;
            const u32 word = load_uniform<u32>(p.tiles, of_list);
            if (p.map == RowMap::Sorted) {
                t.expert = word;
                t.first = place;
                t.count = place < load_uniform<u32>(p.ends, 0) ? kM : 0;
            } else {
                const u32 expert = word & 0xffffu;
                if (expert >= p.all_experts) return t;
                t.expert = p.expert_map ? load_uniform<u32>(p.expert_map, expert) : expert;
                if (t.expert >= p.experts) return t;
                const u32 begin = load_uniform<u32>(p.ends, expert), end = load_uniform<u32>(p.ends, expert + 1);
                t.first = begin + ((word >> 16) << p.tile_log2) + (place & ((1u << p.tile_log2) - 1));
                const u32 last = end < p.gates ? end : p.gates;
                t.count = begin <= last && t.first >= begin && t.first < last ? last - t.first : 0;
            }
        }
        t.count = t.count < kM ? t.count : kM;
        t.expert = hk::uniform(t.expert);
        t.first = hk::uniform(t.first);
        t.count = hk::uniform(t.count);
        return t;
    }

    /// Whether no later tile has rows, either.
    template <u32 kM>
    HK_FN static bool past_end(const Rows &p, u32 tile) {
        if (p.map == RowMap::Masked || p.ids) return false;
        const u32 place = tile * kM, of_list = place >> p.tile_log2;
        if (of_list >= p.list_tiles) return true;
        return p.map == RowMap::Sorted ? place >= load_uniform<u32>(p.ends, 0)
                                       : load_uniform<u32>(p.tiles, of_list) == kNone;
    }

    /// Row of y of the tile's row r; kNone: none.
    HK_FN u32 output(const Rows &p, u32 r) const {
        if (r >= count) return kNone;
        if (p.map != RowMap::Sorted) return first + r;
        const u32 gate = load_list<u32>(p.list, first + r);
        return gate < p.gates ? gate : kNone;
    }

    /// Row of a.
    HK_FN u32 source(const Rows &p, u32 r) const {
        if (r >= count) return kNone;
        u32 row = first + r;
        if (p.map == RowMap::Masked || !p.list) return row;
        row = load_list<u32>(p.list, row);
        return row < p.gates ? hk::DivMod(row, p.per_token, p.per_token_inverse).quotient : kNone;
    }

    /// Index of the batch of a and of y.
    HK_FN u32 batch(const Rows &p) const { return p.map == RowMap::Masked ? expert : 0; }
};

/// Row of w for row `row` of a tile whose first output column is `first`; each kStrip rows of a gated tile are kStrip / 2 gates,
/// then their values. `cols` outputs.
template <u32 kStrip>
HK_FN u32 w_row(const Output &p, u32 first, u32 row) {
    if (p.order == WOrder::Plain) return first + row < p.cols ? first + row : kNone;
    constexpr u32 kGates = kStrip / 2;
    const u32 gate = first + row / kStrip * kGates + row % kGates;
    const bool value = row % kStrip >= kGates;
    if (gate >= p.cols) return kNone;
    return p.order == WOrder::Halves ? gate + (value ? p.cols : 0) : 2 * gate + (value ? 1 : 0);
}

/// The tile of a block. Each round of blocks, about as many as a device has CUs, is shared among the XCDs (hk::xcd_remap): tiles
/// without rows, of experts of other ranks or past the last one, lie together, and would be all that an XCD has.
HK_FN u32 tile_of_block(u32 block, u32 blocks) {
    constexpr u32 kRound = 256;
    const u32 first = block / kRound * kRound;
    return first + hk::xcd_remap(block - first, blocks - first < kRound ? blocks - first : kRound);
}

/// What the epilogue needs of a row of the tile.
struct alignas(16) OutputRow {
    u32 row;
    float before, after;  // factors of the sum, and of the result

    HK_FN static OutputRow of(const Params &p, const ExpertTile &tile, u32 r) {
        OutputRow all{tile.output(p.rows, r), 1.0f, 1.0f};
        if (all.row == kNone) return all;
        const Output &o = p.out;
        if (p.rows.weights) {
            const float weight = gemm::load_floats<1>(p.rows.weights, p.rows.weight_type, all.row, 1)[0];
            (o.weight_first ? all.before : all.after) = weight;
        }
        if (o.a_rows) {
            const u32 source = tile.batch(p.rows) * p.a.rows + tile.source(p.rows, r);
            all.before *= reinterpret_cast<GlobalPtr<const float>>(o.a_rows)[u64(source) * o.a_rows_step];
        }
        return all;
    }
};

/// Values for `columns` n .. n + N of w, one for each of its rows `step` apart from row `at` on.
template <int N>
HK_FN Vec<float, N> load_columns(u64 data, Float type, i64 at, u32 step, u32 left) {
    if (step == 1) return gemm::load_floats<N>(data, type, at, left);
    Vec<float, N> v = 0.0f;
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        if (i < left) v[i] = gemm::load_floats<1>(data, type, at + i * step, 1)[0];
    }
    return v;
}

/// Scales and bias of sums of the rows of w from `row` on, `step` apart.
template <int N>
HK_FN Vec<float, N> scaled(const Output &p, u32 expert, float before, u32 row, u32 step, u32 left, Vec<float, N> sum) {
    sum *= before;
    if (p.w_rows) {
        const i64 at = i64(expert) * p.w_rows_batch;
        sum *= p.w_rows_step ? load_columns<N>(p.w_rows, Float::F32, at + row, step, left)
                             : Vec<float, N>(reinterpret_cast<GlobalPtr<const float>>(p.w_rows)[at]);
    }
    if (p.bias) sum += load_columns<N>(p.bias, p.bias_type, i64(expert) * p.bias_batch + row, step, left);
    return sum;
}

template <int N>
HK_FN Vec<float, N> rounded(Float type, Vec<float, N> v) {
    if (type == Float::Bf16) return __builtin_convertvector(hk::narrow<hk::bf16>(v), Vec<float, N>);
    if (type == Float::F16) return __builtin_convertvector(hk::narrow<hk::f16>(v), Vec<float, N>);
    return v;
}

/// The gate's function times its value. NaN stays NaN.
template <int N>
HK_FN Vec<float, N> gate(const Output &p, Vec<float, N> g, Vec<float, N> v) {
    g = rounded(p.round_type, g);
    v = rounded(p.round_type, v);
    g = g > p.limit ? Vec<float, N>(p.limit) : g;
    v = v > p.limit ? Vec<float, N>(p.limit) : v < -p.limit ? Vec<float, N>(-p.limit) : v;
    const Vec<float, N> activated =
        p.activation == u32(hk::Activation::Silu) ? g * hk::sigmoid(p.alpha * g) : gemm::activate<N>(p.activation, g);
    return activated * (v + p.value_add);
}

template <int N>
HK_FN void store_columns(const Output &p, u32 batch, u32 row, u32 n, Vec<float, N> y) {
    const i64 at = i64(batch) * p.y_batch + i64(row) * p.y_row + n;
    gemm::with_type(p.y_type, [&]<class T>(T) { gemm::store_floats<T, N>(p.y, at, y, p.cols - n, p.vectors); });
}

/// Outputs (row, n .. n + 8) from their sums; `values`: those of the values of gated outputs.
template <class Values>
HK_FN void run_epilogue(const Params &p, const ExpertTile &tile, const OutputRow &row, u32 n, Vec<float, 8> sum,
                        Values values) {
    const Output &o = p.out;
    if (row.row == kNone || n >= o.cols) return;
    const u32 left = o.cols - n;
    Vec<float, 8> y;
    if (o.order == WOrder::Plain) {
        y = gemm::activate<8>(o.activation, scaled<8>(o, tile.expert, row.before, n, 1, left, sum));
    } else {
        const bool pairs = o.order == WOrder::Pairs;
        const u32 step = pairs ? 2 : 1;
        const auto g = scaled<8>(o, tile.expert, row.before, n * step, step, left, sum);
        const auto v = scaled<8>(o, tile.expert, row.before, pairs ? 2 * n + 1 : o.cols + n, step, left, values());
        y = gate<8>(o, g, v);
    }
    store_columns<8>(o, tile.batch(p.rows), row.row, n, y * row.after);
}

/// Zeros in columns n .. n + cols of the rows `row_of(r)`, r < rows.
template <u32 kThreads, class RowOf>
HK_FN void zero_rows(const Params &p, u32 rows, u32 n, u32 cols, RowOf row_of) {
    const u32 parts = cols / 8;
    for (u32 i = hk::thread_x(); i < rows * parts; i += kThreads) {
        const u32 r = i / parts, at = n + i % parts * 8, row = row_of(r);
        if (row != kNone && at < p.out.cols) store_columns<8>(p.out, 0, row, at, Vec<float, 8>(0.0f));
    }
}

/// Finds a block's tile, and zeroes rows that no expert computes; false: nothing is to be computed.
template <u32 kM, u32 kN, u32 kThreads>
HK_FN bool begin_tile(const Params &p, const TileCoord &coord, ExpertTile &tile, u32 &first_n) {
    const u32 cols = p.out.order == WOrder::Plain ? kN : kN / 2;
    first_n = coord.n_tile * cols;
    tile = ExpertTile::find<kM>(p.rows, coord.m_tile);
    if (p.rows.ids) {
        zero_rows<kThreads>(p, kM, first_n, cols, [&](u32 r) {
            const u32 gate = coord.m_tile * kM + r;
            return gate < p.rows.gates && load_list<u32>(p.rows.ids, gate) >= p.rows.all_experts ? gate : kNone;
        });
    }
    if (tile.count == 0) return false;
    if (tile.expert < p.rows.experts) return true;
    if (p.rows.map == RowMap::Sorted && !p.rows.keep) {
        zero_rows<kThreads>(p, tile.count, first_n, cols, [&](u32 r) { return tile.output(p.rows, r); });
    }
    return false;
}

/// What dequantizes a tile's rows of w, and which they are.
template <class Dequant, class RowOf>
struct DequantOf {
    Dequant dequant;
    RowOf row_of;
};

/// LDS of a block tile: the pipeline's stages, then the staged accumulators and what their rows need.
template <class T, class Scales>
union TileLds {
    gemm::TileLds<T, Scales> tile;
    struct {
        gemm::StagedAcc<float, T::kWaveN> staged[T::kThreads / hk::kWaveSize];
        OutputRow rows[T::kM];
    } end;
};

/// One block tile of a grouped GEMM. `make_scales(p, coord, end, source, w_row)` makes the loader of packed scales.
template <class T, template <class> class Accum, class MakeScales>
HK_FN void expert_gemm(const Params &p, MakeScales make_scales) {
    TileCoord coord(0, 0);
    coord.place(tile_of_block(hk::block_x(), p.grid.blocks), p.grid.m_tiles, p.grid.n_tiles, p.grid.group);
    ExpertTile tile;
    u32 first_n;
    if (!begin_tile<T::kM, T::kN, T::kThreads>(p, coord, tile, first_n)) return;
    coord.batch = tile.batch(p.rows);
    coord.matrix = tile.expert;
    const auto source = [&](u32 row) { return tile.source(p.rows, row); };
    const auto row_of_w = [&](u32 row) { return w_row<T::kWaveN>(p.out, first_n, row); };

    const u32 end = p.grid.k_bytes;
    const typename T::A a(p.a.at(coord.batch, 0), p.a.rows, p.a.layout, end, source);
    const auto w_rows = [&] {
        if constexpr (requires { typename T::Dequant; })
            return DequantOf<typename T::Dequant, decltype(row_of_w)>{typename T::Dequant(p, coord), row_of_w};
        else
            return row_of_w;
    }();
    const typename T::W w(p.w.at(coord.matrix, 0), p.w.rows, p.w.layout, gemm::w_bytes<T>(end), w_rows);
    const auto scales = [&] { return make_scales(p, coord, end, source, row_of_w); };
    auto &lds = hk::block_lds<TileLds<T, decltype(scales())>>();
    Accum<T> acc_tile(p);
    gemm::accumulate<T>(acc_tile, a, w, scales, lds.tile.stages, 0, end);
    hk::block_barrier();
    static_assert(T::kM <= T::kThreads, "a thread has one row");
    const Params &fresh = hk::reload_params(p);
    if (hk::thread_x() < T::kM) lds.end.rows[hk::thread_x()] = OutputRow::of(fresh, tile, hk::thread_x());
    hk::block_barrier();
    const auto store = [&](u32 cols, u32 m, u32 n, auto sum, auto values) {
        const Params &again = hk::reload_params(p);
        run_epilogue(again, tile, lds.end.rows[T::wave_m() + m], first_n + T::wave_n() / T::kWaveN * cols + n, sum,
                     values);
    };
    if (p.out.order == WOrder::Plain) {
        gemm::for_each_vec<T, T::kWaveN>(acc_tile, &lds, [&](u32 m, u32 n, const auto &staged, u32 row) {
            store(T::kWaveN, m, n, staged.get(row, n), [] { return Vec<float, 8>(0.0f); });
        });
    } else {
        gemm::for_each_vec<T, T::kWaveN / 2>(acc_tile, &lds, [&](u32 m, u32 n, const auto &staged, u32 row) {
            store(T::kWaveN / 2, m, n, staged.get(row, n), [&] { return staged.get(row, T::kWaveN / 2 + n); });
        });
    }
}

struct MakeNoScales {
    HK_FN hk::NoScales operator()(const auto &...) const { return {}; }
};

template <class T>
HK_FN void expert_gemm(const Params &p) {
    expert_gemm<T, gemm::TileAcc>(p, MakeNoScales{});
}
/// One tile of a grouped decode GEMM, see gemm/decode_gemm.h. `make_operands(p, coord, end, source, w_row)` makes each wave's operand
/// loader.
template <class Operands, int kWaves, class MakeOperands>
HK_FN void expert_decode_gemm(const Params &args, MakeOperands make_operands) {
    using Acc = typename Operands::Acc;
    using Lds = gemm::DecodeLds<Operands, kWaves>;
    using Number = typename Lds::Number;
    constexpr int kMTiles = Operands::kMTiles, kNTiles = Operands::kNTiles;
    constexpr u32 kM = 16 * kMTiles, kN = 16 * kNTiles, kThreads = kWaves * hk::kWaveSize;
    constexpr u32 kStepBytes = Operands::kStepBytes, kTogether = Lds::kTogether;
    struct All {
        Lds sums;
        OutputRow rows[kM];
    };
    auto &lds = hk::block_lds<All>();

    // Blocks are persistent, and end with the last tile that has rows: the host knows only a bound.
    for (u32 task = hk::block_x();; task += hk::grid_x()) {
        const Params &p = hk::reload_params(args);
        if (task >= p.grid.blocks) return;
        TileCoord coord(0, 0);
        coord.m_tile = task / p.grid.n_tiles;
        coord.n_tile = task - coord.m_tile * p.grid.n_tiles;
        if (ExpertTile::past_end<kM>(p.rows, coord.m_tile)) return;
        ExpertTile tile;
        u32 first_n;
        if (!begin_tile<kM, kN, kThreads>(p, coord, tile, first_n)) continue;
        coord.batch = tile.batch(p.rows);
        coord.matrix = tile.expert;
        if (hk::thread_x() < kM) lds.rows[hk::thread_x()] = OutputRow::of(p, tile, hk::thread_x());
        Acc acc[kMTiles][kNTiles] = {};
        {
            const u32 end = p.grid.k_bytes;
            const Operands operands = make_operands(
                p, coord, end, [&](u32 row) { return tile.source(p.rows, row); },
                [&](u32 row) { return w_row<kN>(p.out, first_n, row); });
            const gemm::KSteps<kWaves * kStepBytes> steps{hk::wave_id() * kStepBytes, end};
            if (steps.next().valid()) {
                for (gemm::DecodeStages stages(operands, steps); stages.at.valid();) stages.multiply(operands, acc);
            } else if (steps.valid()) {
                // A wave's only step: the loop would load three more past the end, and multiply one of them.
                const auto stage = operands.load(*steps);
                if constexpr (requires { operands.multiply(acc, stage, *steps); })
                    operands.multiply(acc, stage, *steps);
                else
                    operands.multiply(acc, stage);
            }
            if constexpr (requires { Operands::kAccUnit; }) gemm::scale_acc(acc, Operands::kAccUnit);
        }

        const u32 cols = p.out.order == WOrder::Plain ? kN : kN / 2, parts = cols / 8;
        const auto total = [&](u32 row, u32 col) {
            Vec<Number, 8> sum = Number(0);
#pragma unroll 8
            for (int wave = 0; wave < kWaves; ++wave) sum += lds.sums.staged[wave].get(row, col);
            return __builtin_convertvector(sum, Vec<float, 8>);
        };
#pragma unroll 1
        for (u32 first = 0; first < kMTiles; first += kTogether) {
            if (first > 0) hk::block_barrier();
#pragma unroll
            for (u32 m = 0; m < kMTiles; ++m) {
                // One copy of the epilogue's code for all tiles.
                if (m / kTogether * kTogether == first) lds.sums.staged[hk::wave_id()].put(m % kTogether * 16, acc[m]);
            }
            hk::block_barrier();
#pragma unroll 1
            for (u32 i = hk::thread_x(); i < 16 * kTogether * parts; i += kThreads) {
                const Params &again = hk::reload_params(args);
                const u32 row = i / parts, col = i % parts * 8;
                run_epilogue(again, tile, lds.rows[16 * first + row], first_n + col, total(row, col),
                             [&] { return total(row, kN / 2 + col); });
            }
        }
        // All waves have read the sums before the next tile's overwrite them.
        hk::block_barrier();
    }
}

/// Operands that the matrix unit takes as they lie in memory.
template <class E, int kMTiles, int kNTiles, int kBytes>
HK_FN void expert_decode_gemm(const Params &args) {
    using Operands = gemm::FragmentOperands<E, kMTiles, kNTiles, kBytes, gemm::Unscaled>;
    expert_decode_gemm<Operands, gemm::kDecodeWaves>(
        args, [](const Params &p, const TileCoord &coord, u32 end, auto source, auto row_of_w) {
            return Operands{{p.a.at(coord.batch, 0), p.a.rows, p.a.layout, end, source},
                            {p.w.at(coord.matrix, 0), p.w.rows, p.w.layout, end, row_of_w},
                            {}};
        });
}
}  // namespace experts
