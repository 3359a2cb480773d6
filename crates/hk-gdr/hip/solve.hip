// solve.hip: solve_tril: X = (I + A)^-1 for the strictly lower triangular A of each chunk of C tokens and each head
//   a  [batch, T, heads, C]  f32                    row i of a chunk: A[i, :]; what is on and above the diagonal is not read
//   x  [batch, T, heads, C]  T = f32 | bf16 | f16   row i: X[i, :], zeros above the diagonal
// Contiguous; packed: one batch, sequence b from starts[b] to starts[b + 1]. A chunk begins with the first token of a sequence, the last of
// a sequence may be shorter: further rows are those of I, and are not stored.
// One wave for a chunk and head, C / 16 blocks of 16 rows:
//   X_ii by substitution, 16 lanes a block, a lane a column: X[i] = e_i - sum_j A[i, j] X[j], j < i
//   X_ij = -X_ii sum_k A_ik X_kj, j <= k < i, by 16x16x4 f32 matrix instructions: accumulators are the next product's operand, with
//   k = 4 group + r in instruction r, whose other operand then is a lane's 16 bytes of a row. The last product is made transposed, too: a lane
//   then has four neighbours of a row to store.
// Without such instructions (sm_90), substitution alone, a lane a column. All in f32, one rounding.
// Floor: T heads C (4 + sizeof(T)) bytes.
#include <hk/arch.h>
#include <hk/entry.h>
#include <hk/global.h>
#include <hk/matrix.h>
#include <hk/shared.h>
#include <hk/types.h>
#include <hk/wave.h>

#include "chunks.h"

namespace {
using hk::GlobalPtr;
using hk::i32;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::Vec;
using hk::Window;
using Four = Vec<float, 4>;

struct Params {
    u64 a, x, starts;  // starts may be 0
    u32 batch, tokens, heads;
    u32 sequences;
};

/// Whether there are matrix instructions of f32: mma.sync, of lanes with two rows, has none.
constexpr bool kHasF32Mma = hk::kRowsPerLane == 1;

/// A chunk of a head: `rows` of its C rows are there.
template <class T, int C>
struct Chunk {
    Window a, x;
    u32 a_row, x_row;  // bytes from a row to the next

    HK_FN Chunk(const Params &p, u64 first, u32 head, u32 rows) {
        const u64 at = (first * p.heads + head) * C;
        a_row = p.heads * C * 4;
        x_row = p.heads * C * u32(sizeof(T));
        a = Window(reinterpret_cast<GlobalPtr<const float>>(p.a) + at, (rows - 1) * a_row + C * 4);
        x = Window(reinterpret_cast<GlobalPtr<T>>(p.x) + at, (rows - 1) * x_row + C * u32(sizeof(T)));
    }

    /// Four columns of row `i`; zeros past the last row.
    HK_FN Four row(u32 i, u32 col) const { return a.load<Four>(i * a_row + col * 4); }
};

/// sum + W Y: rows of W as `Chunk::row` has them, Y and the result as accumulators.
template <class Unit = hk::detail::MatrixUnit<float, float, 16, 4>>
HK_FN Four product(Four w, Four y, Four sum) {
#pragma unroll
    for (int r = 0; r < 4; ++r) sum = Unit::mma(w[r], y[r], sum);
    return sum;
}

/// A diagonal block in LDS.
using Block = hk::SharedTile<16, 64>;

/// Four columns, `c` times four from the first, of row `i` of block `b`; rows of every second block are exchanged in pairs, which two blocks
/// have on different banks.
[[maybe_unused]] HK_FN Four &piece(Block (&blocks)[4], u32 b, u32 i, u32 c) {
    return reinterpret_cast<Four &>(blocks[b].chunk[Block::place(i ^ (b & 1), c)]);
}

/// Of `solve_columns`.
template <int C>
struct Lds {
    float out[16 * (C + 4)];
};

/// Stores 16 rows from LDS, from row `first` of the chunk on.
template <class T, int C>
HK_FN void store_rows(const Chunk<T, C> &chunk, const float *out, u32 first) {
    constexpr int V = hk::kVecLen<T>;
    constexpr u32 kLanes = C / V;  // of a row
    for (u32 i = hk::lane_id(); i < 16 * kLanes; i += hk::kWaveSize) {
        const u32 row = i / kLanes, col = i % kLanes * V;
        Vec<float, V> v;
#pragma unroll
        for (int j = 0; j < V; j += 4) {
            const Four part = *reinterpret_cast<const Four *>(out + row * (C + 4) + col + j);
#pragma unroll
            for (int e = 0; e < 4; ++e) v[j + e] = part[e];
        }
        chunk.x.store(hk::narrow<T, V>(v), (first + row) * chunk.x_row + col * u32(sizeof(T)));
    }
}

/// In blocks of 16.
template <class T, int C>
HK_FN void solve_blocks(const Chunk<T, C> &chunk, Block (&blocks)[4]) {
    constexpr int N = C / 16;
    const u32 lane = hk::lane_id(), group = lane / 16, m = lane % 16;
    // Blocks below the diagonal, rows as operands.
    Four below[N][N];
#pragma unroll
    for (int i = 1; i < N; ++i) {
#pragma unroll
        for (int k = 0; k < i; ++k) below[i][k] = chunk.row(16 * i + m, 16 * k + 4 * group);
    }
    // Diagonal blocks: lane m of group b has column m of block b; groups past the last block do what the first does, in their own.
    const u32 b = group < N ? group : 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) piece(blocks, group, m, c) = chunk.row(16 * b + m, 16 * b + 4 * c);
    hk::wave_barrier();
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = u32(i) == m ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            const Four a = piece(blocks, group, i, j / 4);
#pragma unroll
            for (int e = 0; e < 4 && j + e < i; ++e) x[i] = __builtin_fmaf(-a[e], x[j + e], x[i]);
        }
    }
    hk::wave_barrier();
#pragma unroll
    for (int i = 0; i < 16; ++i) reinterpret_cast<float *>(&piece(blocks, group, i, m / 4))[m % 4] = x[i];
    hk::wave_barrier();
    // Rows of X_ii and of I as operands. `sums[i][j]` is X_ij with i = n and j = m.
    Four sums[N][N], rows[N], one;
#pragma unroll
    for (int r = 0; r < 4; ++r) one[r] = 4 * group + r == m ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) rows[i] = piece(blocks, i, m, group);
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            // Transposed, a lane has four columns of row m.
            Four of_row(0.0f);
            if (j == i) {
                of_row = product(one, rows[i], Four(0.0f));
                if (i + 1 < N) sums[i][i] = product(rows[i], one, Four(0.0f));
            } else if (j < i) {
                Four s(0.0f);
#pragma unroll
                for (int k = j; k < i; ++k) s = product(below[i][k], sums[k][j], s);
                of_row = -product(s, rows[i], Four(0.0f));
                if (i + 1 < N) sums[i][j] = -product(rows[i], s, Four(0.0f));
            }
            chunk.x.store(hk::narrow<T, 4>(of_row), (16 * i + m) * chunk.x_row + (16 * j + 4 * group) * u32(sizeof(T)));
        }
    }
}

/// Without matrix instructions: a lane has columns c, c + kWaveSize, ..
template <class T, int C>
HK_FN void solve_columns(const Chunk<T, C> &chunk, Lds<C> &lds) {
    constexpr int kCols = (C + hk::kWaveSize - 1) / hk::kWaveSize;
    float x[C][kCols];
#pragma unroll
    for (int i = 0; i < C; ++i) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) x[i][c] = u32(i) == hk::lane_id() + c * hk::kWaveSize ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            const Four a = chunk.row(i, j);
#pragma unroll
            for (int e = 0; e < 4 && j + e < i; ++e) {
#pragma unroll
                for (int c = 0; c < kCols; ++c) x[i][c] = __builtin_fmaf(-a[e], x[j + e][c], x[i][c]);
            }
        }
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            const u32 col = hk::lane_id() + c * hk::kWaveSize;
            if (col < C) lds.out[i % 16 * (C + 4) + col] = x[i][c];
        }
        if (i % 16 == 15) {
            hk::wave_barrier();
            store_rows(chunk, lds.out, i - 15);
            hk::wave_barrier();
        }
    }
}

/// Wave `block`: the chunks of a head that begin among C tokens.
template <class T, int C>
HK_FN void solve(const Params &p) {
    const u32 head = hk::block_x() % p.heads, rest = hk::block_x() / p.heads;
    const u32 runs = (p.tokens + C - 1) / C;
    const u32 run = rest % runs, b = rest / runs;
    if (b >= p.batch) return;
    gdr::for_chunks(p.starts, p.sequences, p.tokens, C, run, [&](u32 first, u32 rows, bool in_range) {
        const Chunk<T, C> chunk(p, u64(b) * p.tokens + first, head, rows);
        if (!in_range) {
            for (u32 i = hk::lane_id(); i < rows * C; i += hk::kWaveSize) {
                chunk.x.store(T(__builtin_nanf("")), i / C * chunk.x_row + i % C * u32(sizeof(T)));
            }
        } else if constexpr (kHasF32Mma) {
            __shared__ Block blocks[4];
            solve_blocks(chunk, blocks);
        } else {
            __shared__ Lds<C> lds;
            solve_columns(chunk, lds);
        }
    });
}
}  // namespace

#define SOLVE_ENTRIES(T)                                      \
    HK_ENTRY(solve_##T##_16, hk::kWaveSize, solve<hk::T, 16>) \
    HK_ENTRY(solve_##T##_32, hk::kWaveSize, solve<hk::T, 32>) \
    HK_ENTRY(solve_##T##_64, hk::kWaveSize, solve<hk::T, 64>)
SOLVE_ENTRIES(f32)
SOLVE_ENTRIES(bf16)
SOLVE_ENTRIES(f16)
