//! Registry entries of attention over latent rows: `mla_decode_rope` and `unified_attn_sparse_mla`.

use super::attention::{LSE, QUERY_TILE, SCALE, SOFTCAP, float, indices, outputs, packed, query_tile, scale};
use super::common::{
    ACTIVATIONS, INDICES_32, STYLE, expect_dtype_of, expect_dtypes, expect_shape, integers, rope_of_pairs,
    rope_style, rounded, shape, with_activation, with_narrow,
};
use super::decode::{KEYS_PER_SPLIT, NSPLIT, splits, with_workspace};
use super::paged::sequences;
use crate::kernels;
use crate::mla::{check_columns, rows_of_block};
use crate::reference::mla::Latent;
use crate::{
    AttentionOutputs, AttentionProblem, CosSin, LatentElement, LatentKeys, LatentPool, MlaDecodeInputs,
    MlaDecodeOutputs, MlaOptions, MlaRope, PACKED_LATENT_BYTES, SparseMlaInputs, mla_decode_rope,
    mla_workspace, unified_attn_sparse_mla,
};
use hk_core::plan::rope::reference::rotate;
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{CodeObjects, DType, Error, Result, Stream, bf16};
use std::collections::BTreeSet;

const Q: ArgSpec = ArgSpec::input("q", ACTIVATIONS, 3, "[total_q, Hq, C + R]");
const POOL: &[DType] = &[DType::Bf16, DType::F16, DType::Fp8E4M3, DType::Fp8E4M3Fnuz];
const KV_POOL: ArgSpec = ArgSpec::input("kv_pool", POOL, 4, "[pages, tokens, 1, C + R]");
const KV_SCALE: ArgSpec = ArgSpec::input("kv_scale", &[DType::F32], 1, "[1]")
    .sampled(Sample::Uniform { low: 0.5, high: 2.0 })
    .optional();
const OUT: ArgSpec = ArgSpec::output("out", Tolerance::Attention, ACTIVATIONS, 3, "[total_q, Hq, C]");
const LSE_OUT: ArgSpec = ArgSpec::output("lse", LSE, &[DType::F32], 2, "[total_q, Hq]").optional();

/// Columns of values.
const COLUMNS: ScalarSpec = ScalarSpec {
    name: "columns",
    default: Scalar::Count(512),
    choices: &[],
    summary: "C: columns of values, the first of a row",
};
const SCALARS: &[ScalarSpec] = &[SCALE, SOFTCAP, COLUMNS, QUERY_TILE, NSPLIT, KEYS_PER_SPLIT];

/// Type; queries, heads, columns; pool; others.
macro_rules! case {
    ($label:literal, $dtype:ident $tq:literal $hq:literal $d:literal, $pool:literal $pages:literal $tokens:literal,
     [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$tq, $hq, $d]),
                ($pool, DType::$dtype, &[$pages, $tokens, 1, $d]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

/// The same of pools of another type: type; queries, heads, columns; pool, its type and columns; others.
macro_rules! pool_case {
    ($label:literal, $dtype:ident $tq:literal $hq:literal $d:literal,
     $pool:literal $of:ident $pages:literal $tokens:literal $columns:literal,
     [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$tq, $hq, $d]),
                ($pool, DType::$of, &[$pages, $tokens, 1, $columns]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

const C256: (&str, Scalar) = ("columns", Scalar::Count(256));
const INTERLEAVED: (&str, Scalar) = ("style", Scalar::Choice("interleaved"));
const SHORT: (&str, Scalar) = ("tile", Scalar::Choice("short"));
const TALL: (&str, Scalar) = ("tile", Scalar::Choice("tall"));
/// For samples of packed rows, whose `f32` factors are random bytes, up to 2^33: scores that are rounded by less than the exponents that
/// overflow.
const SMALL: (&str, Scalar) = ("scale", Scalar::Float(1e-3));
const SPLITS_OF_64: (&str, Scalar) = ("keys_per_split", Scalar::Count(64));

pub(super) const MLA_DECODE_ROPE: Operator = Operator {
    name: "mla_decode_rope",
    family: "hk-attention",
    summary: "out = softmax(scale q rows^T) rows[:, :C], causal, over latent rows in slots or pages",
    args: &[
        Q,
        KV_POOL,
        KV_SCALE,
        ArgSpec::input("kv_indptr", INDICES_32, 1, "[sequences + 1]")
            .sampled(Sample::StartsOf("kv_indices"))
            .optional(),
        ArgSpec::input("kv_indices", INDICES_32, 1, "[entries]")
            .sampled(Sample::Distinct { below: 256 })
            .optional(),
        ArgSpec::input("block_table", INDICES_32, 2, "[sequences, pages]")
            .sampled(Sample::Distinct { below: 16 })
            .optional(),
        ArgSpec::input("seq_lens", INDICES_32, 1, "[sequences]")
            .sampled(Sample::LengthsIn { table: "block_table", page: 16 })
            .optional(),
        ArgSpec::input("cu_seqlens_q", INDICES_32, 1, "[sequences + 1]")
            .sampled(Sample::StartsOf("q"))
            .optional(),
        ArgSpec::input("cos_sin", &[DType::Bf16, DType::F16, DType::F32], 2, "[positions, rotary]")
            .sampled(Sample::Uniform { low: -1.0, high: 1.0 })
            .optional(),
        ArgSpec::input("positions", INDICES_32, 1, "[total_q]")
            .sampled(Sample::Integers { low: 0, high: 64 })
            .optional(),
        OUT,
        LSE_OUT,
        ArgSpec::output("k_pe_out", Tolerance::Elementwise, ACTIVATIONS, 2, "[total_q, R]").optional(),
    ],
    scalars: &[SCALE, SOFTCAP, COLUMNS, STYLE, QUERY_TILE, NSPLIT, KEYS_PER_SPLIT],
    kernels: KERNELS,
    cases: &[
        case!("DeepSeek-V3 TP8, 2 x 100 keys", Bf16 2 16 576, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [200]], []),
        case!("DeepSeek-V3, pages of 16, two queries each", Bf16 4 128 576, "kv_pool" 16 16,
            ["block_table" I32 [2, 4], "seq_lens" I32 [2], "cu_seqlens_q" I32 [3]], []),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3 TP8, 64 x 8192 keys, 16 heads", Bf16 64 16 576, "kv_pool" 524288 1,
            ["kv_indptr" I32 [65], "kv_indices" I32 [524288]], []),
        case!("DeepSeek-V3, 64 x 8192 keys, 128 heads", Bf16 64 128 576, "kv_pool" 524288 1,
            ["kv_indptr" I32 [65], "kv_indices" I32 [524288]], []),
        case!("DeepSeek-V3 TP8, 1 x 131072 keys, 16 heads", Bf16 1 16 576, "kv_pool" 131072 1,
            ["kv_indptr" I32 [2], "kv_indices" I32 [131072]], []),
        case!("DeepSeek-V3 TP8, 1 x 8192 keys, 16 heads", Bf16 1 16 576, "kv_pool" 8192 1,
            ["kv_indptr" I32 [2], "kv_indices" I32 [8192]], []),
        case!("DeepSeek-V3 TP8, 16 x 131072 keys, 16 heads", Bf16 16 16 576, "kv_pool" 2097152 1,
            ["kv_indptr" I32 [17], "kv_indices" I32 [2097152]], []),
        case!("DeepSeek-V3, 1 x 8192 keys, 128 heads", Bf16 1 128 576, "kv_pool" 8192 1,
            ["kv_indptr" I32 [2], "kv_indices" I32 [8192]], []),
        case!("DeepSeek-V3, 256 x 1024 keys, 128 heads", Bf16 256 128 576, "kv_pool" 262144 1,
            ["kv_indptr" I32 [257], "kv_indices" I32 [262144]], []),
        pool_case!("DeepSeek-V3 TP8, 64 x 8192 keys of fp8, 16 heads", Bf16 64 16 576, "kv_pool" Fp8E4M3 524288 1 576,
            ["kv_scale" F32 [1], "kv_indptr" I32 [65], "kv_indices" I32 [524288]], []),
        pool_case!("DeepSeek-V3.2, 64 x 8192 keys of 656 bytes, 128 heads", Bf16 64 128 576, "kv_pool" Fp8E4M3 524288 1 656,
            ["kv_indptr" I32 [65], "kv_indices" I32 [524288]], []),
    ]),
    corners: &[
        case!("bf16, 16 heads, splits of 64 keys", Bf16 2 16 576, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [256], "lse" F32 [2, 16]], [SHORT, SPLITS_OF_64]),
        case!("bf16, 70 heads, splits of 64 keys, softcap", Bf16 1 70 576, "kv_pool" 256 1,
            ["kv_indptr" I32 [2], "kv_indices" I32 [200], "lse" F32 [1, 70]],
            [TALL, SPLITS_OF_64, ("softcap", Scalar::Float(2.0))]),
        case!("f16, three queries, pages of 16, R = 0", F16 6 5 512, "kv_pool" 16 16,
            ["block_table" I32 [2, 3], "seq_lens" I32 [2], "cu_seqlens_q" I32 [3], "lse" F32 [6, 5]], []),
        case!("f16, 20 heads, negative scale", F16 2 20 576, "kv_pool" 300 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "lse" F32 [2, 20]], [("scale", Scalar::Float(-0.1))]),
        case!("bf16, C = 512, R = 127", Bf16 2 3 639, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [80], "lse" F32 [2, 3]], []),
        case!("bf16, C = 512, R = 128, 20 heads", Bf16 2 20 640, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [80]], []),
        case!("bf16, C = 256, R = 64", Bf16 2 16 320, "kv_pool" 16 16,
            ["block_table" I32 [2, 6], "seq_lens" I32 [2], "lse" F32 [2, 16]], [C256]),
        case!("f16, C = 256, R = 64, 33 heads", F16 2 33 320, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [150]], [C256]),
        case!("f16, C = 256, R = 7", F16 2 16 263, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [80]], [C256]),
        case!("bf16, C = 256, R = 100, 20 heads", Bf16 2 20 356, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [80]], [C256]),
        case!("bf16, rotated, splits of 64 keys", Bf16 3 16 576, "kv_pool" 256 1,
            ["kv_indptr" I32 [4], "kv_indices" I32 [220], "cos_sin" F32 [64, 64], "positions" I32 [3],
             "lse" F32 [3, 16], "k_pe_out" Bf16 [3, 64]], [SHORT, SPLITS_OF_64]),
        case!("f16, 70 heads, rotated in pairs in part", F16 2 70 576, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F16 [64, 48], "positions" I32 [2],
             "k_pe_out" F16 [2, 64]], [INTERLEAVED]),
        case!("bf16, R = 127, rotated", Bf16 2 20 639, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" Bf16 [64, 126], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 127]], []),
        case!("bf16, C = 256, pages, rotated", Bf16 2 16 320, "kv_pool" 16 16,
            ["block_table" I32 [2, 3], "seq_lens" I32 [2], "cos_sin" F32 [64, 64], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 64]], [C256]),
        case!("f16, C = 256, R = 7, rotated", F16 2 40 263, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F16 [64, 6], "positions" I32 [2]],
            [C256, INTERLEAVED]),
        case!("bf16, C = 256, R = 64, 17 heads", Bf16 2 17 320, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [67], "lse" F32 [2, 17]], [C256]),
        case!("bf16, C = 256, R = 7, 3 heads", Bf16 2 3 263, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [67], "lse" F32 [2, 3]], [C256]),
        case!("f16, C = 256, R = 64, 3 heads, cosines in f32", F16 2 3 320, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [67], "cos_sin" F32 [64, 64], "positions" I32 [2], "k_pe_out" F16 [2, 64]], [C256]),
        case!("bf16, C = 256, R = 8, two queries, pages of 16", Bf16 4 2 264, "kv_pool" 16 16,
            ["block_table" I32 [2, 3], "seq_lens" I32 [2], "cu_seqlens_q" I32 [3], "lse" F32 [4, 2]], [C256]),
        case!("f16, C = 512, R = 7, 3 heads", F16 2 3 519, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [67], "lse" F32 [2, 3]], []),
        case!("f16, C = 512, R = 7, 17 heads", F16 2 17 519, "kv_pool" 256 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [67], "lse" F32 [2, 17]], []),
        pool_case!("bf16, 16 heads, splits of 64 keys, fp8 of gfx942", Bf16 2 16 576, "kv_pool" Fp8E4M3Fnuz 256 1 576,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [230], "lse" F32 [2, 16]], [SHORT, SPLITS_OF_64]),
        pool_case!("bf16, 40 heads, softcap, rotated, fp8 of gfx942", Bf16 2 40 576, "kv_pool" Fp8E4M3Fnuz 256 1 576,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F32 [64, 64], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 64]], [("softcap", Scalar::Float(2.0))]),
        pool_case!("f16, two queries, pages of 16, fp8 of gfx942", F16 4 5 576, "kv_pool" Fp8E4M3Fnuz 16 16 576,
            ["block_table" I32 [2, 3], "seq_lens" I32 [2], "cu_seqlens_q" I32 [3], "lse" F32 [4, 5]], []),
        pool_case!("f16, 33 heads, fp8 of gfx942", F16 2 33 544, "kv_pool" Fp8E4M3Fnuz 256 1 544,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70]], []),
        pool_case!("bf16, C = 256, R = 64, fp8 of gfx942", Bf16 2 3 320, "kv_pool" Fp8E4M3Fnuz 256 1 320,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70]], [C256]),
        pool_case!("bf16, C = 256, R = 16, 17 heads, fp8 of gfx942", Bf16 2 17 272, "kv_pool" Fp8E4M3Fnuz 256 1 272,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "lse" F32 [2, 17]], [C256]),
        pool_case!("f16, C = 256, R = 64, rotated, fp8 of gfx942", F16 2 3 320, "kv_pool" Fp8E4M3Fnuz 256 1 320,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F16 [64, 32], "positions" I32 [2],
             "k_pe_out" F16 [2, 64]], [C256, INTERLEAVED]),
        pool_case!("f16, C = 256, R = 0, 17 heads, fp8 of gfx942", F16 2 17 256, "kv_pool" Fp8E4M3Fnuz 256 1 256,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70]], [C256]),
        pool_case!("bf16, R = 127, 20 heads, rotated, fp8 of gfx942", Bf16 2 20 639, "kv_pool" Fp8E4M3Fnuz 256 1 639,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" Bf16 [64, 126], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 127]], []),
        pool_case!("rows of 656 bytes, splits of 64 keys, fp8 of gfx942", Bf16 2 16 576, "kv_pool" Fp8E4M3Fnuz 256 1 656,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [230], "lse" F32 [2, 16]], [SHORT, SPLITS_OF_64, SMALL]),
        pool_case!("rows of 656 bytes, 40 heads, rotated, fp8 of gfx942", Bf16 2 40 576, "kv_pool" Fp8E4M3Fnuz 256 1 656,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F32 [64, 64], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 64]], [SMALL]),
        pool_case!("bf16, 16 heads, splits of 64 keys, fp8 of gfx950", Bf16 2 16 576, "kv_pool" Fp8E4M3 256 1 576,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [230], "lse" F32 [2, 16]], [SHORT, SPLITS_OF_64]),
        pool_case!("bf16, 40 heads, softcap, rotated, fp8 of gfx950", Bf16 2 40 576, "kv_pool" Fp8E4M3 256 1 576,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F32 [64, 64], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 64]], [("softcap", Scalar::Float(2.0))]),
        pool_case!("f16, two queries, pages of 16, fp8 of gfx950", F16 4 5 576, "kv_pool" Fp8E4M3 16 16 576,
            ["block_table" I32 [2, 3], "seq_lens" I32 [2], "cu_seqlens_q" I32 [3], "lse" F32 [4, 5]], []),
        pool_case!("f16, 33 heads, fp8 of gfx950", F16 2 33 544, "kv_pool" Fp8E4M3 256 1 544,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70]], []),
        pool_case!("bf16, C = 256, R = 64, fp8 of gfx950", Bf16 2 3 320, "kv_pool" Fp8E4M3 256 1 320,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70]], [C256]),
        pool_case!("bf16, C = 256, R = 16, 17 heads, fp8 of gfx950", Bf16 2 17 272, "kv_pool" Fp8E4M3 256 1 272,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "lse" F32 [2, 17]], [C256]),
        pool_case!("f16, C = 256, R = 64, rotated, fp8 of gfx950", F16 2 3 320, "kv_pool" Fp8E4M3 256 1 320,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F16 [64, 32], "positions" I32 [2],
             "k_pe_out" F16 [2, 64]], [C256, INTERLEAVED]),
        pool_case!("f16, C = 256, R = 0, 17 heads, fp8 of gfx950", F16 2 17 256, "kv_pool" Fp8E4M3 256 1 256,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70]], [C256]),
        pool_case!("bf16, R = 127, 20 heads, rotated, fp8 of gfx950", Bf16 2 20 639, "kv_pool" Fp8E4M3 256 1 639,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" Bf16 [64, 126], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 127]], []),
        pool_case!("rows of 656 bytes, splits of 64 keys, fp8 of gfx950", Bf16 2 16 576, "kv_pool" Fp8E4M3 256 1 656,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [230], "lse" F32 [2, 16]], [SHORT, SPLITS_OF_64, SMALL]),
        pool_case!("rows of 656 bytes, 40 heads, rotated, fp8 of gfx950", Bf16 2 40 576, "kv_pool" Fp8E4M3 256 1 656,
            ["kv_indptr" I32 [3], "kv_indices" I32 [70], "cos_sin" F32 [64, 64], "positions" I32 [2],
             "k_pe_out" Bf16 [2, 64]], [SMALL]),
        case!("bf16, C = 256, R = 0, three queries", Bf16 6 2 256, "kv_pool" 256 1,
            ["kv_scale" F32 [1], "kv_indptr" I32 [3], "kv_indices" I32 [40], "cu_seqlens_q" I32 [3], "lse" F32 [6, 2]], [C256]),
        case!("bf16, three splits", Bf16 2 16 576, "kv_pool" 512 1,
            ["kv_indptr" I32 [3], "kv_indices" I32 [500], "lse" F32 [2, 16]], [("nsplit", Scalar::Count(3))]),
        case!("bf16, C = 512, R = 8, slots that the pool lacks", Bf16 3 16 520, "kv_pool" 250 1,
            ["kv_indptr" I32 [4], "kv_indices" I32 [256], "lse" F32 [3, 16]], []),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

pub(super) const UNIFIED_ATTN_SPARSE_MLA: Operator = Operator {
    name: "unified_attn_sparse_mla",
    family: "hk-attention",
    summary: "out = softmax(scale q rows^T) rows[:, :C] over the latent rows that each query lists",
    args: &[
        Q,
        ArgSpec { name: "kv_cache", ..KV_POOL },
        KV_SCALE,
        ArgSpec::input("topk_indices", INDICES_32, 2, "[total_q, topk]")
            .sampled(Sample::Integers { low: -1, high: 256 }),
        OUT,
        LSE_OUT,
    ],
    scalars: SCALARS,
    kernels: KERNELS,
    cases: &[case!("DeepSeek-V3.2, 3 queries, 78 keys each", Bf16 3 128 576, "kv_cache" 4 64,
            ["topk_indices" I32 [3, 78]], [])],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3.2, 64 queries, 2048 keys each", Bf16 64 128 576, "kv_cache" 2048 64,
            ["topk_indices" I32 [64, 2048]], []),
    ]),
    corners: &[
        case!("bf16, 16 heads, pages of 16, splits of 64 keys", Bf16 3 16 576, "kv_cache" 16 16,
            ["topk_indices" I32 [3, 130], "lse" F32 [3, 16]], [SHORT, SPLITS_OF_64]),
        case!("f16, C = 256, 8 heads, 64 keys", F16 5 8 320, "kv_cache" 16 16,
            ["kv_scale" F32 [1], "topk_indices" I32 [5, 64], "lse" F32 [5, 8]], [C256]),
        case!("f16, C = 256, 32 heads, slots that the cache lacks", F16 5 32 320, "kv_cache" 15 17,
            ["topk_indices" I32 [5, 70], "lse" F32 [5, 32]], [C256]),
        pool_case!("bf16, C = 256, R = 0, fp8 of gfx942", Bf16 2 3 256, "kv_cache" Fp8E4M3Fnuz 16 16 256,
            ["kv_scale" F32 [1], "topk_indices" I32 [2, 12], "lse" F32 [2, 3]], [C256]),
        pool_case!("bf16, C = 256, R = 0, fp8 of gfx950", Bf16 2 3 256, "kv_cache" Fp8E4M3 16 16 256,
            ["kv_scale" F32 [1], "topk_indices" I32 [2, 12], "lse" F32 [2, 3]], [C256]),
        pool_case!("rows of 656 bytes, slots that the cache lacks, fp8 of gfx942", Bf16 3 20 576, "kv_cache" Fp8E4M3Fnuz 4 60 656,
            ["topk_indices" I32 [3, 70], "lse" F32 [3, 20]], [SMALL]),
        pool_case!("rows of 656 bytes, slots that the cache lacks, fp8 of gfx950", Bf16 3 20 576, "kv_cache" Fp8E4M3 4 60 656,
            ["topk_indices" I32 [3, 70], "lse" F32 [3, 20]], [SMALL]),
        case!("f16, C = 256, 20 heads, two splits", F16 3 20 320, "kv_cache" 16 16,
            ["topk_indices" I32 [3, 200], "lse" F32 [3, 20]], [C256, ("nsplit", Scalar::Count(2))]),
        case!("bf16, R = 36, lists without entries", Bf16 2 4 548, "kv_cache" 4 64,
            ["topk_indices" I32 [2, 0], "lse" F32 [2, 4]], []),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

const KERNELS: &[&CodeObjects] = &[&kernels::MERGE, &kernels::MLA_BF16, &kernels::MLA_F16];

fn pool<V: Described>(call: &Call<V>) -> &'static str {
    if call.operator().name == MLA_DECODE_ROPE.name { "kv_pool" } else { "kv_cache" }
}

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (op, pool) = (call.operator().name, pool(call));
    let [total_q, heads, _] = shape(call, "q")?;
    let dv = call.size("columns")?;
    let rows = call.get(pool)?;
    if ACTIVATIONS.contains(&rows.dtype()) {
        expect_dtypes(call, "q", &[pool])?;
    }
    let q = call.get("q")?;
    check_columns(op, q.shape(), (pool, rows.shape(), q.dtype(), rows.dtype()), dv)?;
    expect_shape(call, "kv_scale", &[1], "a factor")?;
    splits(call)?;
    if pool == "kv_cache" {
        let topk = call.get("topk_indices")?.shape()[1];
        expect_shape(call, "topk_indices", &[total_q, topk], "rows of q")?;
    } else {
        let n = sequences_of(call, total_q)?;
        if let Some(table) = call.optional("block_table") {
            for name in ["kv_indptr", "kv_indices"] {
                if call.optional(name).is_some() {
                    return Err(Error::argument(op, name, "given", "nothing beside block_table"));
                }
            }
            let width = table.shape()[1];
            expect_shape(call, "block_table", &[n, width], "sequences")?;
            call.get("seq_lens")?;
            expect_shape(call, "seq_lens", &[n], "sequences")?;
        } else {
            if call.optional("seq_lens").is_some() {
                return Err(Error::argument(op, "seq_lens", "given", "nothing without block_table"));
            }
            call.get("kv_indptr")?;
            call.get("kv_indices")?;
            expect_shape(call, "kv_indptr", &[n + 1], "sequences + 1")?;
        }
    }
    let rotates = pool == "kv_pool" && call.optional("cos_sin").is_some();
    if rotates {
        expect_rotation(call, dv)?;
    } else if call.optional("positions").is_some() {
        return Err(Error::argument(op, "positions", "given", "nothing without cos_sin"));
    } else if pool == "kv_pool" && call.wants("k_pe_out") {
        return Err(Error::argument(op, "k_pe_out", "given", "nothing without a rotation"));
    }
    let dtype = call.get("q")?.dtype();
    let mut specs = vec![("out", TensorSpec::new(dtype, [total_q, heads, dv]))];
    if call.wants("lse") {
        specs.push(("lse", TensorSpec::new(DType::F32, [total_q, heads])));
    }
    if rotates && call.wants("k_pe_out") {
        let columns = call.get("q")?.shape()[2] - dv;
        specs.push(("k_pe_out", TensorSpec::new(dtype, [total_q, columns])));
    }
    Ok(specs)
}

fn expect_rotation(call: &CallSpec, dv: usize) -> Result<()> {
    let op = call.operator().name;
    let [total_q, _, dqk] = shape(call, "q")?;
    if call.optional("cu_seqlens_q").is_some() {
        return Err(Error::argument(op, "cu_seqlens_q", "given", "nothing beside a rotation"));
    }
    call.get("positions")?;
    expect_shape(call, "positions", &[total_q], "rows of q")?;
    expect_dtype_of(call, "cos_sin", "q", &[DType::F32])?;
    let [_, rotary] = shape(call, "cos_sin")?;
    if rotary > dqk - dv || rotary % 2 != 0 {
        let want = format!("an even number of columns, at most {}", dqk - dv);
        return Err(Error::shape(op, "cos_sin", call.get("cos_sin")?.shape(), want));
    }
    Ok(())
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, outputs) = call.split();
    let dtype = inputs.get("q")?.dtype();
    let rows = inputs.get(pool(&inputs))?.dtype();
    with_activation!(inputs.operator().name, "q", dtype, T => with_narrow!(rows, T, C => {
        run_typed::<T, C>(stream, &inputs, outputs)
    }))
}

fn run_typed<T: LatentElement, C: LatentPool<T>>(
    stream: &Stream,
    inputs: &Inputs,
    mut outputs: Outputs,
) -> Result<()> {
    let q = inputs.view::<T>("q")?;
    let [queries, heads, _] = q.dims(inputs.operator().name, "q")?;
    let options = MlaOptions {
        scale: scale(inputs)?,
        softcap: float(inputs, "softcap")?,
        longest: None,
        tile: query_tile(inputs)?,
        splits: splits(inputs)?,
    };
    let dv = inputs.size("columns")?;
    let kv_scale = inputs.optional_view("kv_scale")?;
    let elements = |sequences, keys| {
        let problem = AttentionProblem { sequences, heads, kv_heads: 1, queries, keys, dv };
        mla_workspace(stream.device().info(), &problem, &options)
    };
    if pool(inputs) == "kv_cache" {
        let topk_indices = indices(inputs, "topk_indices")?;
        let keys = topk_indices.shape()[1];
        let workspace = with_workspace(stream, &mut outputs, elements(queries, keys))?;
        let tensors =
            SparseMlaInputs::<T, C> { q, kv_cache: inputs.view("kv_cache")?, kv_scale, topk_indices };
        let outputs = AttentionOutputs { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
        return unified_attn_sparse_mla(stream, tensors, outputs, workspace, &options);
    }
    let kv_pool = inputs.view::<C>("kv_pool")?;
    let cu_seqlens_q = inputs.optional_view("cu_seqlens_q")?;
    let (keys, longest) = match inputs.optional_view("block_table")? {
        Some(block_table) => {
            let longest = block_table.shape()[1] * kv_pool.shape()[1];
            (LatentKeys::Pages { block_table, seq_lens: indices(inputs, "seq_lens")? }, longest)
        }
        None => {
            let kv_indices = indices(inputs, "kv_indices")?;
            let longest = kv_indices.numel();
            (LatentKeys::Slots { kv_indptr: indices(inputs, "kv_indptr")?, kv_indices }, longest)
        }
    };
    let sequences = cu_seqlens_q
        .as_ref()
        .map_or(queries, |starts: &hk_core::TensorView<i32>| starts.shape()[0].saturating_sub(1));
    let workspace = with_workspace(stream, &mut outputs, elements(sequences, longest))?;
    let cos_sin = match inputs.optional("cos_sin").map(Described::dtype) {
        None => None,
        Some(DType::F32) => Some(CosSin::F32(inputs.view("cos_sin")?)),
        Some(_) => Some(CosSin::Own(inputs.view::<T>("cos_sin")?)),
    };
    let style = rope_style(inputs)?;
    let rope = match cos_sin {
        None => None,
        Some(cos_sin) => Some(MlaRope { cos_sin, positions: indices(inputs, "positions")?, style }),
    };
    let tensors = MlaDecodeInputs { q, kv_pool, kv_scale, keys, cu_seqlens_q, rope };
    let outputs = MlaDecodeOutputs {
        out: outputs.take("out")?,
        lse: outputs.take_optional("lse")?,
        k_pe_out: outputs.take_optional("k_pe_out")?,
    };
    mla_decode_rope(stream, tensors, outputs, workspace, &options)
}

/// The slots that each query sees, as the tables have them; `None`: its outputs are NaN whatever they say.
fn seen(call: &HostCall) -> Result<Vec<Option<Vec<i64>>>> {
    let total_q = call.get("q")?.shape()[0];
    if let Some(lists) = call.optional("topk_indices") {
        let (topk, slots) = (lists.shape()[1], integers(lists));
        let list = |i: usize| slots[i * topk..][..topk].iter().copied().filter(|slot| *slot != -1).collect();
        return Ok((0..total_q).map(|i| Some(list(i))).collect());
    }
    let starts = call.optional("cu_seqlens_q").map(integers);
    let starts = starts.unwrap_or_else(|| (0..=total_q as i64).collect());
    let Some(rows) = packed(&starts, total_q) else { return Ok(vec![None; total_q]) };
    let mut all = Vec::new();
    for (n, queries) in rows.into_iter().enumerate() {
        let slots = slots_of(call, n)?;
        all.extend(queries.clone().map(|i| {
            let slots = slots.as_ref()?;
            let visible = (slots.len() + i + 1).saturating_sub(queries.end);
            Some(slots[..visible].to_vec())
        }));
    }
    Ok(all)
}

/// The slots of a sequence; `None`: its lengths are wrong.
fn slots_of(call: &HostCall, n: usize) -> Result<Option<Vec<i64>>> {
    if let Some(table) = call.optional("block_table") {
        let (width, tokens) = (table.shape()[1], call.get("kv_pool")?.shape()[1]);
        let pages = &integers(table)[n * width..][..width];
        let len = integers(call.get("seq_lens")?)[n];
        let len = usize::try_from(len).ok().filter(|len| *len <= width * tokens);
        let slot = |j: usize| match pages[j / tokens] {
            page if page < 0 => -1,
            page => page * tokens as i64 + (j % tokens) as i64,
        };
        return Ok(len.map(|len| (0..len).map(slot).collect()));
    }
    let (starts, entries) = (integers(call.get("kv_indptr")?), integers(call.get("kv_indices")?));
    let [from, to] = [starts[n], starts[n + 1]].map(|i| usize::try_from(i).ok());
    Ok(from.zip(to).and_then(|(from, to)| entries.get(from..to)).map(<[i64]>::to_vec))
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    specs(&call.spec())?;
    let ([total_q, heads, dqk], dv) = (shape(call, "q")?, call.size("columns")?);
    // Of all elements of the rows, after the rotation.
    let factor = call.optional("kv_scale").map_or(1.0, |scale| scale.to_f64()[0]);
    let latent = Latent {
        heads,
        dqk,
        dv,
        scale: scale(call)?.map_or(1.0 / (dqk as f64).sqrt(), f64::from) * factor,
        softcap: float(call, "softcap")?.into(),
    };
    let (q, pool) = (call.get("q")?.to_f64(), host_rows(call)?);
    let rows: Vec<&[f64]> = pool.chunks(dqk).collect();
    let row = |slot: &i64| usize::try_from(*slot).ok().and_then(|slot| rows.get(slot)).copied();
    let rotate = rotation(call, dv)?;
    let (mut out, mut lse, mut k_pe) = ([vec![], vec![]], vec![], vec![]);
    for (i, slots) in seen(call)?.into_iter().enumerate() {
        let last = slots.as_ref().and_then(|slots| slots.last().copied());
        let mut seen: Option<Vec<&[f64]>> = slots.and_then(|slots| slots.iter().map(row).collect());
        let mut q = q[i * heads * dqk..][..heads * dqk].to_vec();
        let mut key = last.map(|slot| row(&slot).map_or(vec![f64::NAN; dqk], <[f64]>::to_vec));
        if let Some(rotate) = &rotate {
            q.chunks_mut(dqk).for_each(|head| rotate(i, head));
            key.iter_mut().for_each(|key| rotate(i, key));
            if let (Some(key), Some(seen)) = (&key, seen.as_mut().and_then(|seen| seen.last_mut())) {
                *seen = key;
            }
        }
        let (y, sums) = latent.run(&q, seen.as_deref());
        // Without a visible key outputs are 0 whatever the factor is.
        let of_out = if seen.as_ref().is_some_and(Vec::is_empty) { 0.0 } else { factor };
        for (out, y) in out.iter_mut().zip(y) {
            out.extend(y.into_iter().map(|y| y * of_out));
        }
        lse.extend(sums);
        let beside = |key: Vec<f64>| key[dv..].iter().map(|x| x * factor).collect();
        k_pe.extend(key.map_or(vec![HostTensorF64::UNTOUCHED; dqk - dv], beside));
    }
    let k_pe = HostTensorF64::new(vec![total_q, dqk - dv], k_pe);
    let wants_k_pe = rotate.is_some() && call.wants("k_pe_out");
    let mut outputs = outputs(call, (vec![total_q, heads, dv], out), (vec![total_q, heads], lse));
    if wants_k_pe {
        outputs.push(("k_pe_out", k_pe));
    }
    Ok(outputs)
}

/// The number of sequences: without starts each query is one.
fn sequences_of<V: Described>(call: &Call<V>, total_q: usize) -> Result<usize> {
    match call.optional("cu_seqlens_q") {
        Some(_) => sequences(call, "cu_seqlens_q"),
        None => Ok(total_q),
    }
}

/// All latent rows, without `kv_scale`. Elements of packed ones are rounded where the kernel has blocks of 64 rows.
fn host_rows(call: &HostCall) -> Result<Vec<f64>> {
    let [total_q, heads, _] = shape(call, "q")?;
    let rounded = rows_of_block(query_tile(call)?, total_q * heads, sequences_of(call, total_q)?) == 64;
    let pool = call.get(pool(call))?;
    Ok(if pool.shape()[3] == PACKED_LATENT_BYTES && pool.dtype().size_bytes() == 1 {
        let elements = pool.to_f64();
        let rows = pool.bytes().chunks(PACKED_LATENT_BYTES).zip(elements.chunks(PACKED_LATENT_BYTES));
        rows.flat_map(|(bytes, elements)| unpacked(bytes, elements, rounded)).collect()
    } else {
        pool.to_f64()
    })
}

/// The columns of a packed row; all its bytes are also given as elements of fp8.
fn unpacked(bytes: &[u8], elements: &[f64], rounded: bool) -> Vec<f64> {
    let scales: [f32; 4] =
        std::array::from_fn(|i| f32::from_le_bytes(std::array::from_fn(|b| bytes[512 + 4 * i + b])));
    let pe = bytes[528..].chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64());
    let scaled = |(i, x): (usize, &f64)| match scales[i / 128] {
        scale if rounded => bf16::from_f32(*x as f32 * scale).to_f64(),
        scale if scale.is_finite() => x * f64::from(scale),
        _ => f64::NAN,
    };
    elements[..512].iter().enumerate().map(scaled).chain(pe).collect()
}

/// Rotates the last columns of a row by the position of a query and rounds them to its type.
type Rotate = Box<dyn Fn(usize, &mut [f64])>;

fn rotation(call: &HostCall, dv: usize) -> Result<Option<Rotate>> {
    let (Some(table), Some(positions)) = (call.optional("cos_sin"), call.optional("positions")) else {
        return Ok(None);
    };
    let (dtype, rotary) = (call.get("q")?.dtype(), table.shape()[1]);
    let (table, positions) = (table.to_f64(), integers(positions));
    let rope = rope_of_pairs(rope_style(call)?, rotary);
    Ok(Some(Box::new(move |i, row| {
        let half = rotary / 2;
        let position = usize::try_from(positions[i]).ok().filter(|p| (p + 1) * rotary <= table.len());
        let rotated = position.map_or(vec![f64::NAN; rotary], |p| {
            let (cos, sin) = table[p * rotary..][..rotary].split_at(half);
            rotate(&row[dv..dv + rotary], cos, sin, &rope)
        });
        row[dv..dv + rotary].copy_from_slice(&rotated);
        row[dv..].iter_mut().for_each(|x| *x = rounded(dtype, *x));
    })))
}

/// Rows are read once each, other tensors whole.
fn traffic(call: &HostCall) -> Traffic {
    let (Ok(pool), Ok(seen)) = (call.get(pool(call)), seen(call)) else { return Traffic::once(call) };
    let slots: usize = pool.shape()[..2].iter().product();
    let rows = seen.into_iter().flatten().flatten().filter(|slot| (0..slots as i64).contains(slot));
    let rows = rows.collect::<BTreeSet<_>>().len();
    let unread = pool.bytes().len() as u64 / slots.max(1) as u64 * (slots - rows) as u64;
    let all = Traffic::once(call);
    Traffic { read: all.read - unread, ..all }
}
