// args.h: kernel arguments of GEMMs.
//   y[b, m, n] = epilogue(sum over k of a[b, m, k] w[b, n, k])
// The Rust structs are generated from these.
#pragma once

#include <hk/arch.h>
#include <hk/global.h>
#include <hk/mma.h>
#include <hk/pipeline.h>
#include <hk/quant.h>
#include <hk/types.h>

namespace gemm {
using hk::Access;
using hk::Frag;
using hk::GlobalPtr;
using hk::i64;
using hk::u32;
using hk::u64;
using hk::u8;
using hk::Vec;

/// Bytes that L1 fills at a time. sm_90 fills sectors of 32 bytes of its lines.
inline constexpr u32 kLineBytes = hk::kXcds > 1 ? 128 : 32;

/// An operand: rows along K.
struct Operand {
    u64 data;
    i64 batch;  // stride, in bytes
    hk::RowLayout layout;
    u32 rows;
    u32 pad;

    /// Address of a row whose index is a multiple of 16.
    HK_FN GlobalPtr<const u8> at(u32 batch_index, u32 row_index) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(batch_index) * batch + layout.offset(row_index);
    }
};

/// Tiling of the output.
struct Grid {
    u32 m_tiles, n_tiles;  // tiles of one output
    u32 group;             // M tiles that share an N tile before the next one, see `TileCoord`
    u32 splits;            // split-K slices
    u32 split_bytes;       // bytes of a row of K in one split-K slice
    u32 k_bytes;           // bytes of a row of K
    u32 blocks;            // batches * splits * m_tiles * n_tiles
    u32 tile_n;            // columns of a tile, for kernels that have several; 0: the most
};

/// How rows of a choose their weight matrix, on the device.
enum class Grouping : u32 {
    None = 0,    ///< batch b uses matrix b
    Masked = 1,  ///< batch b uses matrix b; only its first groups[b] rows are computed and written
    Rows = 2,    ///< row m uses matrix groups[m], the same for all valid rows of a tile; -1: the row is not written
};

///
struct Groups {
    u64 data;  // i32 list
    Grouping kind;
    u32 matrices;

    HK_FN GlobalPtr<const int> list() const { return reinterpret_cast<GlobalPtr<const int>>(data); }

    /// Whether row m of a batch is computed.
    HK_FN bool has(u32 batch, u32 m) const {
        if (kind == Grouping::None) return true;
        return kind == Grouping::Masked ? int(m) < list()[batch] : u32(list()[m]) < matrices;
    }
};

/// Dtypes of outputs and biases. Values are those of `float_index` in crates/hk-core/src/plan/rows.rs.
enum class Float : u32 { Bf16 = 0, F16 = 1, F32 = 2 };

/// Store mode of the epilogue.
enum class StoreMode : u32 {
    Round = 0,  ///< scales, bias, activation, one rounding to the dtype of y
    Partial = 1,  ///< scales, then the f32 partial sum of this split-K slice
    Add = 2,  ///< f32 atomic add to y
};

/// Arguments of the epilogue.
struct Epilogue {
    u64 y;
    i64 y_batch, y_row, y_split;  // strides, in elements; y_split: between split-K partial sums
    u64 bias;  // [matrices, N]; 0: none
    i64 bias_batch;
    u64 a_scale, w_scale;  // f32 [batch, M] and [matrices, N]; 0: none
    i64 a_scale_batch, w_scale_batch;
    u32 a_scale_step, w_scale_step;  // 0: one scale for all
    u32 rows, cols;  // M, N
    Float y_type, bias_type;
    StoreMode store;
    u32 activation;  // hk::Activation, kRelu6 or kNone
    u32 vectors;  // rows of y are 16-byte aligned
    u32 plain;  // epilogue/plain_store.h serves it
    Groups groups;
    static constexpr u32 kRelu6 = 5, kNone = 255;
};

/// Split-K slices that meet in the last block of their tile to arrive: gemm/split_k.h.
struct SplitK {
    u64 partials;  // accumulators of the slices, on 16 bytes; 0: slices do not meet in this launch
    i64 stride;    // between slices, in bytes
    u64 flags;     // u64 [batches, m_tiles, n_tiles, splits], hk/arrive.h
    u64 mark;      // a number that no other launch has
};

struct Params {
    Operand a, w;
    Grid grid;
    Epilogue epilogue;
    SplitK split_k;
};

/// f32 block scales of an operand.
struct BlockScale {
    u64 data;
    i64 batch;  // strides, in bytes
    u32 row, group;
    u32 row_shift;  // one row of scales for 2^row_shift rows of the operand
    u32 group_shift;  // one scale for 2^group_shift bytes of a row

    HK_FN GlobalPtr<const u8> first(u32 index) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(index) * batch;
    }
    /// Byte offset of the scales of an operand's row; Window::kOutOfBounds past the last row.
    HK_FN u32 offset(u32 of_row, u32 rows) const {
        const u32 at = (of_row >> row_shift) * row;
        return of_row < rows ? at : hk::Window::kOutOfBounds;
    }
    HK_FN hk::ScalePlace place(u32 index, u32 of_row, u32 rows) const {
        return {reinterpret_cast<u64>(first(index)), offset(of_row, rows), group, group_shift};
    }
};

/// e8m0 scales of an operand, one for 32 columns. The scale of row r and block b is at
///   row[0] (r % 16) + row[1] (r / 16 % 2) + row[2] (r / 32) + block[0] (b % 4) + block[1] (b / 4 % 2) + block[2] (b / 8)
/// This covers rows of scales and the pre-shuffled order of matrix instructions.
struct MxScale {
    u64 data;
    i64 batch;  // strides, in bytes
    u32 row[3], block[3];

    HK_FN GlobalPtr<const u8> first(u32 index) const {
        return reinterpret_cast<GlobalPtr<const u8>>(data) + i64(index) * batch;
    }
    /// Byte offset of a row's scales; Window::kOutOfBounds past the last row.
    HK_FN u32 offset(u32 r, u32 rows) const {
        // Outside of the condition: in it, the strides would be loaded one after the other, in branches.
        const u32 at = r % 16 * row[0] + r / 16 % 2 * row[1] + r / 32 * row[2];
        return r < rows ? at : hk::Window::kOutOfBounds;
    }
    /// Byte offset of block b in its row, given `block`.
    HK_FN static u32 of_block(u32 b, const u32 (&block)[3]) {
        return b % 4 * block[0] + b / 4 % 2 * block[1] + b / 8 * block[2];
    }
};

/// An addend or factor, [M, N] or a scalar.
struct Term {
    u64 data;  // 0: `value`
    i64 row;  // stride, in elements
    float value;
    Float type;
    u32 step;  // 0: one value for all outputs
    u32 vectors;  // rows are 16-byte aligned
};

/// Operation fused after the GEMM.
struct Fusion {
    enum class Kind : u32 {
        None = 0,
        ScaleAdd = 1,  ///< y = a g + b, g the GEMM's output
        AddProduct = 2,  ///< y = a b + g
        SplitCat = 3,  ///< see store_split_cat
    };
    u64 divisor;  // f32 scalar that divides the GEMM's output first; 0: none
    Term a, b;
    // SplitCat: y[m, d, :head] and rest[m, d, :tail] are the columns of head d; y[m, d, head:] is cat[m, d, :].
    u64 rest;
    i64 y_head, rest_row, rest_head, cat_row, cat_head;  // strides, in elements
    u64 cat;
    u32 head, tail, extra;
    Float cat_type;
    Kind kind;
    u32 whole;  // every run of eight columns lies in y or in rest, 16-byte aligned
};

struct BlockParams {
    Operand a, w;
    Grid grid;
    Epilogue epilogue;
    BlockScale a_scale, w_scale;
    Fusion fusion;
    SplitK split_k;
};

/// GEMMs of mixed dtypes or with MX operands.
struct MixedParams {
    Operand a, w;
    Grid grid;
    Epilogue epilogue;
    MxScale a_mx, w_mx;
    BlockScale w_scale;  // f32, one for a group of columns
    hk::BlockRule rule;  // mxfp4 quantization of a
    u32 pad;
    Fusion fusion;
    SplitK split_k;
};

}  // namespace gemm
