//! Registry entries of `mha` and `mha_varlen`.

use super::attention::{
    ALIBI, BIAS_ARG, CAUSAL as CAUSAL_SCALAR, DROPOUT_P, HostRows, K_DESCALE, KEYS_PER_SPLIT, LSE, OFFSET,
    OUT, Q_DESCALE, QKV, SCALARS, SCALE, SEED, SINK, SOFTCAP as SOFTCAP_SCALAR, Sequence, TILE, V_DESCALE,
    WINDOW_LEFT, WINDOW_RIGHT, attend, indices, keys_of, options, outputs, packed, tiling, transposed,
    workspace,
};
use super::common::{INDICES_32, LAYOUT, expect_dtypes, expect_shape, integers, layout, shape};
use super::paged::{
    BLOCK_TABLE, PagedSequence, attend_paged, cache_rows, cache_sizes, expect_heads, keys_in_pages,
    paged_sequences, paged_traffic,
};
use crate::{AttentionOutputs, AttentionProblem, Qkv, SequenceStarts, kernels, mha, mha_varlen};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{CodeObjects, DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};

/// The sources of the kernels that serve slots.
pub(super) const GENERAL: &[&CodeObjects] =
    &[&kernels::PREFILL_GENERAL_BF16, &kernels::PREFILL_GENERAL_F16, &kernels::PREFILL_GENERAL_F32];

/// The sources of the kernels that serve pages.
pub(super) const PAGED: &[&CodeObjects] = &joined::<7>(
    GENERAL,
    &[
        &kernels::PREFILL_PAGED_BF16,
        &kernels::PREFILL_PAGED_BF16_FP8,
        &kernels::PREFILL_PAGED_F16,
        &kernels::PREFILL_PAGED_F16_FP8,
    ],
);

/// The sources of the kernels that serve fresh keys.
pub(super) const PREFILL: &[&CodeObjects] = &joined::<7>(
    GENERAL,
    &[&kernels::MERGE, &kernels::PREFILL_BF16, &kernels::PREFILL_F16, &kernels::PREFILL_FP8],
);

/// The sources of the kernels that serve fresh keys, or pages of the queries' type.
const FRESH_OR_PAGED: &[&CodeObjects] =
    &joined::<9>(PREFILL, &[&kernels::PREFILL_PAGED_BF16, &kernels::PREFILL_PAGED_F16]);

/// Both lists, `N` sources in all.
pub(super) const fn joined<const N: usize>(
    first: &[&'static CodeObjects],
    second: &[&'static CodeObjects],
) -> [&'static CodeObjects; N] {
    let mut all = [first[0]; N];
    let mut i = 0;
    while i < N {
        all[i] = if i < first.len() { first[i] } else { second[i - first.len()] };
        i += 1;
    }
    assert!(N == first.len() + second.len());
    all
}

const CAUSAL: (&str, Scalar) = ("causal", Scalar::Bool(true));
pub(super) const TALL: (&str, Scalar) = ("tile", Scalar::Choice("tall"));
pub(super) const SHORT: (&str, Scalar) = ("tile", Scalar::Choice("short"));
const SPLIT: (&str, Scalar) = ("keys_per_split", Scalar::Count(64));
const SOFTCAP: (&str, Scalar) = ("softcap", Scalar::Float(30.0));

/// Queries, keys and values: type; sequences, queries, keys; heads; columns.
macro_rules! dense {
    ($dtype:ident $b:literal $sq:literal $sk:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal
     $(, $name:literal $other:ident $shape:expr)*) => {
        &[
            ("q", DType::$dtype, &[$b, $sq, $hq, $dqk]),
            ("k", DType::$dtype, &[$b, $sk, $hkv, $dqk]),
            ("v", DType::$dtype, &[$b, $sk, $hkv, $dv]),
            $(($name, DType::$other, &$shape),)*
        ]
    };
}

pub(super) use dense;

/// The same, packed: type; sequences, rows of all; heads; columns.
macro_rules! packed {
    ($dtype:ident $n:literal $tq:literal $tk:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal
     $(, $name:literal $other:ident $shape:expr)*) => {
        &[
            ("q", DType::$dtype, &[$tq, $hq, $dqk]),
            ("k", DType::$dtype, &[$tk, $hkv, $dqk]),
            ("v", DType::$dtype, &[$tk, $hkv, $dv]),
            ("cu_seqlens_q", DType::I32, &[$n + 1]),
            ("cu_seqlens_k", DType::I32, &[$n + 1]),
            $(($name, DType::$other, &$shape),)*
        ]
    };
}

/// Keys and values in a cache: type; sequences, rows of all; heads; columns; shapes; pages of a sequence.
macro_rules! paged {
    ($dtype:ident $n:literal $tq:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal, $k:expr, $v:expr, $pages:literal
     $(, $name:literal $other:ident $shape:expr)*) => {
        &[
            ("q", DType::$dtype, &[$tq, $hq, $dqk]),
            ("k", DType::$dtype, &$k),
            ("v", DType::$dtype, &$v),
            ("cu_seqlens_q", DType::I32, &[$n + 1]),
            ("cu_seqlens_k", DType::I32, &[$n + 1]),
            ("block_table", DType::I32, &[$n, $pages]),
            $(($name, DType::$other, &$shape),)*
        ]
    };
}

/// A corner of a dense kernel of fp8: type, columns, tile.
macro_rules! fp8 {
    ($dtype:ident $dqk:literal $dv:literal, $tile:ident) => {
        Case {
            label: concat!("dense fp8, columns of ", $dqk, " and ", $dv),
            tensors: dense!($dtype 2 70 150, 4 2, $dqk $dv,
                "q_descale" F32 [2, 4], "k_descale" F32 [2, 2], "v_descale" F32 [1], "sink" F32 [4], "lse" F32 [2, 4, 70]),
            scalars: &[$tile, CAUSAL],
        }
    };
}

/// A corner of a dense kernel of pages: type, columns, tile.
macro_rules! pages {
    ($dtype:ident $dqk:literal $dv:literal, $tile:ident) => {
        Case {
            label: concat!("dense pages, columns of ", $dqk, " and ", $dv),
            tensors: paged!($dtype 2 90, 4 2, $dqk $dv, [24, 16, 2, $dqk], [24, 16, 2, $dv], 9,
                "sink" F32 [4], "lse" F32 [90, 4]),
            scalars: &[$tile, CAUSAL, ("window_left", Scalar::Int(50))],
        }
    };
}

pub(crate) const MHA: Operator = Operator {
    name: "mha",
    family: "hk-attention",
    summary: "out = softmax(scale q k^T) v, with masks, GQA, softcap, ALiBi, bias, sink, dropout",
    args: &[
        ArgSpec::input("q", QKV, 4, "[B, Sq, Hq, Dqk]"),
        ArgSpec::input("k", QKV, 4, "[B, Sk, Hkv, Dqk]"),
        ArgSpec::input("v", QKV, 4, "[B, Sk, Hkv, Dv]"),
        ALIBI,
        BIAS_ARG,
        SINK,
        Q_DESCALE,
        K_DESCALE,
        V_DESCALE,
        ArgSpec::output("out", Tolerance::Attention, OUT, 4, "[B, Sq, Hq, Dv]"),
        ArgSpec::output("lse", LSE, &[DType::F32], 3, "[B, Hq, Sq]").optional(),
    ],
    scalars: SCALARS,
    kernels: PREFILL,
    cases: &[
        Case {
            label: "Llama-3 8B, 128 tokens",
            tensors: dense!(Bf16 1 128 128, 32 8, 128 128),
            scalars: &[CAUSAL],
        },
        Case {
            label: "GPT-OSS, window of 128 keys, 160 tokens",
            tensors: dense!(Bf16 1 160 160, 16 2, 64 64, "sink" F32 [16]),
            scalars: &[CAUSAL, ("window_left", Scalar::Int(127))],
        },
        Case {
            label: "DeepSeek-V3 heads, 96 tokens",
            tensors: dense!(Bf16 1 96 96, 8 8, 192 128),
            scalars: &[CAUSAL],
        },
    ],
    bench: BenchSizes::Cases(&[
        Case {
            label: "GQA 64/8, d128, 8192 tokens, causal",
            tensors: dense!(Bf16 1 8192 8192, 64 8, 128 128),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 16/16, d128, 16 x 2048 tokens",
            tensors: dense!(Bf16 16 2048 2048, 16 16, 128 128),
            scalars: &[],
        },
        Case {
            label: "MHA 16/16, d64, 16 x 2048 tokens, causal",
            tensors: dense!(Bf16 16 2048 2048, 16 16, 64 64),
            scalars: &[CAUSAL],
        },
        Case {
            label: "DeepSeek-V3, 16 of 128 heads, 4096 tokens, causal",
            tensors: dense!(Bf16 1 4096 4096, 16 16, 192 128),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 32/32, d64, 16 x 1024 tokens, causal",
            tensors: dense!(Bf16 16 1024 1024, 32 32, 64 64),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 32/32, d64, 4 x 4096 tokens, causal",
            tensors: dense!(Bf16 4 4096 4096, 32 32, 64 64),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 32/32, d64, 1 x 16384 tokens, causal",
            tensors: dense!(Bf16 1 16384 16384, 32 32, 64 64),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 32/32, d64, 16384 tokens",
            tensors: dense!(Bf16 1 16384 16384, 32 32, 64 64),
            scalars: &[],
        },
        Case {
            label: "MHA 16/16, d128, 16 x 1024 tokens, causal",
            tensors: dense!(Bf16 16 1024 1024, 16 16, 128 128),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 16/16, d128, 4 x 4096 tokens, causal",
            tensors: dense!(Bf16 4 4096 4096, 16 16, 128 128),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 16/16, d128, 1 x 16384 tokens, causal",
            tensors: dense!(Bf16 1 16384 16384, 16 16, 128 128),
            scalars: &[CAUSAL],
        },
        Case {
            label: "MHA 16/16, d128, 16384 tokens",
            tensors: dense!(Bf16 1 16384 16384, 16 16, 128 128),
            scalars: &[],
        },
        Case {
            label: "GQA 32/4, d64, 8192 tokens, causal",
            tensors: dense!(Bf16 1 8192 8192, 32 4, 64 64),
            scalars: &[CAUSAL],
        },
        Case {
            label: "DeepSeek-V3, 16 of 128 heads, 16384 tokens",
            tensors: dense!(Bf16 1 16384 16384, 16 16, 192 128),
            scalars: &[],
        },
    ]),
    corners: &[
        Case {
            label: "dense bf16, 64 columns, tall, causal",
            tensors: dense!(Bf16 2 150 200, 4 2, 64 64, "sink" F32 [4], "lse" F32 [2, 4, 150]),
            scalars: &[TALL, CAUSAL],
        },
        Case {
            label: "dense bf16, 64 columns, short, window",
            tensors: dense!(Bf16 1 65 190, 2 2, 40 64, "lse" F32 [1, 2, 65]),
            scalars: &[SHORT, ("window_left", Scalar::Int(70)), ("window_right", Scalar::Int(20))],
        },
        Case {
            label: "dense bf16, 128 columns, tall, causal",
            tensors: dense!(Bf16 1 100 190, 6 2, 128 128, "lse" F32 [1, 6, 100]),
            scalars: &[TALL, CAUSAL],
        },
        Case {
            label: "dense bf16, 128 columns, short, splits",
            tensors: dense!(Bf16 2 33 300, 2 1, 80 96, "sink" F32 [2], "lse" F32 [2, 2, 33]),
            scalars: &[SHORT, CAUSAL, SPLIT],
        },
        Case {
            label: "dense bf16, columns of 192 and 128, tall",
            tensors: dense!(Bf16 1 90 150, 2 1, 192 128, "lse" F32 [1, 2, 90]),
            scalars: &[TALL, CAUSAL],
        },
        Case {
            label: "dense bf16, columns of 192 and 128, short",
            tensors: dense!(Bf16 1 40 90, 2 1, 192 128),
            scalars: &[SHORT, ("window_left", Scalar::Int(9))],
        },
        Case {
            label: "dense bf16, 256 columns, tall",
            tensors: dense!(Bf16 1 90 100, 2 1, 256 256, "lse" F32 [1, 2, 90]),
            scalars: &[TALL, CAUSAL],
        },
        Case {
            label: "dense bf16, 256 columns, short",
            tensors: dense!(Bf16 1 20 100, 2 2, 200 160),
            scalars: &[SHORT],
        },
        Case {
            label: "dense f16, 64 columns, tall",
            tensors: dense!(F16 1 130 140, 4 2, 32 64, "lse" F32 [1, 4, 130]),
            scalars: &[TALL, ("window_left", Scalar::Int(0)), ("window_right", Scalar::Int(100))],
        },
        Case {
            label: "dense f16, 64 columns, short",
            tensors: dense!(F16 1 40 140, 2 2, 64 64, "sink" F32 [2]),
            scalars: &[SHORT, CAUSAL],
        },
        Case {
            label: "dense f16, 128 columns, tall, splits",
            tensors: dense!(F16 1 140 140, 2 1, 128 128, "lse" F32 [1, 2, 140]),
            scalars: &[TALL, CAUSAL, ("keys_per_split", Scalar::Count(128))],
        },
        Case {
            label: "dense f16, 128 columns, short",
            tensors: dense!(F16 1 50 90, 8 1, 128 104),
            scalars: &[SHORT, CAUSAL],
        },
        Case {
            label: "dense f16, columns of 192 and 128, tall",
            tensors: dense!(F16 1 90 100, 2 1, 192 128),
            scalars: &[TALL],
        },
        Case {
            label: "dense f16, columns of 192 and 128, short",
            tensors: dense!(F16 1 40 70, 2 1, 136 128, "lse" F32 [1, 2, 40]),
            scalars: &[SHORT, CAUSAL],
        },
        Case {
            label: "dense f16, 256 columns, tall",
            tensors: dense!(F16 1 40 70, 2 1, 256 256),
            scalars: &[TALL, CAUSAL],
        },
        Case {
            label: "dense f16, 256 columns, short",
            tensors: dense!(F16 1 40 70, 2 1, 256 256),
            scalars: &[SHORT],
        },
        Case {
            label: "bf16, causal, sink and LSE",
            tensors: dense!(Bf16 2 33 65, 4 2, 64 64, "sink" F32 [4], "lse" F32 [2, 4, 33]),
            scalars: &[CAUSAL],
        },
        Case {
            label: "f16, window, softcap, ALiBi",
            tensors: dense!(F16 1 65 40, 2 1, 128 128, "alibi" F32 [2], "lse" F32 [1, 2, 65]),
            scalars: &[
                ("window_left", Scalar::Int(5)),
                ("window_right", Scalar::Int(3)),
                ("softcap", Scalar::Float(20.0)),
            ],
        },
        Case {
            label: "f16, columns of 192 and 128, bias",
            tensors: dense!(F16 1 40 33, 2 2, 192 128, "bias" F32 [40, 33]),
            scalars: &[("scale", Scalar::Float(0.1))],
        },
        Case {
            label: "f16, 64 columns, dropout",
            tensors: dense!(F16 1 20 50, 2 2, 40 64),
            scalars: &[
                ("dropout_p", Scalar::Float(0.25)),
                ("seed", Scalar::Count(7)),
                ("offset", Scalar::Count(1 << 33)),
            ],
        },
        Case {
            label: "f16, 256 columns, bias by head",
            tensors: dense!(F16 1 10 36, 2 1, 256 256, "bias" F16 [1, 2, 10, 36]),
            scalars: &[],
        },
        Case { label: "bf16, odd columns", tensors: dense!(Bf16 1 19 35, 2 1, 18 13), scalars: &[CAUSAL] },
        Case {
            label: "bf16, 128 columns, softcap",
            tensors: dense!(Bf16 1 40 40, 2 2, 128 80),
            scalars: &[SOFTCAP],
        },
        Case {
            label: "bf16, splits of 64 keys, causal, sink",
            tensors: dense!(Bf16 2 70 200, 4 2, 63 80, "sink" F32 [4], "lse" F32 [2, 4, 70]),
            scalars: &[CAUSAL, SHORT, SPLIT],
        },
        Case {
            label: "f16, splits of 64 keys, window",
            tensors: dense!(F16 1 20 200, 2 2, 64 33, "lse" F32 [1, 2, 20]),
            scalars: &[("window_left", Scalar::Int(70)), SHORT, SPLIT],
        },
        Case {
            label: "f32, splits of 64 keys",
            tensors: dense!(F32 1 5 130, 2 2, 20 20),
            scalars: &[SHORT, SPLIT],
        },
        Case {
            label: "bf16, columns of 192 and 128, softcap",
            tensors: dense!(Bf16 1 17 40, 2 2, 192 128),
            scalars: &[SOFTCAP],
        },
        Case {
            label: "bf16, 256 columns, softcap",
            tensors: dense!(Bf16 1 17 40, 2 2, 200 256),
            scalars: &[SOFTCAP],
        },
        Case {
            label: "f32, 64 columns",
            tensors: dense!(F32 1 33 20, 2 1, 64 33, "lse" F32 [1, 2, 33]),
            scalars: &[CAUSAL],
        },
        Case { label: "f32, 128 columns", tensors: dense!(F32 1 17 40, 1 1, 128 128), scalars: &[] },
        Case {
            label: "f32, columns of 192 and 128",
            tensors: dense!(F32 1 9 33, 1 1, 192 128),
            scalars: &[],
        },
        Case { label: "f32, 256 columns", tensors: dense!(F32 1 9 33, 1 1, 256 256), scalars: &[] },
        Case {
            label: "fp8 of gfx950, descales",
            tensors: dense!(Fp8E4M3 2 17 40, 4 2, 64 64, "q_descale" F32 [2, 4], "k_descale" F32 [1], "v_descale" F32 [2, 2]),
            scalars: &[],
        },
        Case {
            label: "fp8 of gfx942, descales",
            tensors: dense!(Fp8E4M3Fnuz 2 17 40, 4 2, 64 64, "q_descale" F32 [1], "k_descale" F32 [2, 2], "v_descale" F32 [1]),
            scalars: &[],
        },
        fp8!(Fp8E4M3 128 128, TALL),
        fp8!(Fp8E4M3 128 128, SHORT),
        fp8!(Fp8E4M3 192 128, TALL),
        fp8!(Fp8E4M3 192 128, SHORT),
        fp8!(Fp8E4M3 256 256, TALL),
        fp8!(Fp8E4M3 256 256, SHORT),
        fp8!(Fp8E4M3Fnuz 128 128, TALL),
        fp8!(Fp8E4M3Fnuz 128 128, SHORT),
        fp8!(Fp8E4M3Fnuz 192 128, TALL),
        fp8!(Fp8E4M3Fnuz 192 128, SHORT),
        fp8!(Fp8E4M3Fnuz 256 256, TALL),
        fp8!(Fp8E4M3Fnuz 256 256, SHORT),
    ],
    outputs: outputs_dense,
    run: run_dense,
    reference: reference_dense,
    traffic: Traffic::once,
};

pub(crate) const MHA_VARLEN: Operator = Operator {
    name: "mha_varlen",
    summary: "mha of packed sequences of different lengths",
    args: &[
        ArgSpec::input("q", QKV, 3, "[total_q, Hq, Dqk]"),
        ArgSpec::input("k", QKV, 3, "[total_k, Hkv, Dqk], or a cache by layout").ranks(3, 5),
        ArgSpec::input("v", QKV, 3, "[total_k, Hkv, Dv], or a cache by layout").ranks(3, 5),
        ArgSpec::input("cu_seqlens_q", INDICES_32, 1, "[sequences + 1]").sampled(Sample::Steps { step: 40 }),
        ArgSpec::input("cu_seqlens_k", INDICES_32, 1, "[sequences + 1]").sampled(Sample::Steps { step: 48 }),
        BLOCK_TABLE.optional(),
        ALIBI,
        BIAS_ARG,
        SINK,
        Q_DESCALE,
        K_DESCALE,
        V_DESCALE,
        ArgSpec::output("out", Tolerance::Attention, OUT, 3, "[total_q, Hq, Dv]"),
        ArgSpec::output("lse", LSE, &[DType::F32], 2, "[total_q, Hq]").optional(),
    ],
    scalars: PACKED_SCALARS,
    kernels: FRESH_OR_PAGED,
    cases: &[Case {
        label: "Llama-3 8B, 3 prompts of 40 tokens, 8 cached",
        tensors: packed!(Bf16 3 120 144, 32 8, 128 128),
        scalars: &[CAUSAL],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "Llama-3 8B, 8 prompts of 4096 tokens, causal",
        tensors: packed!(Bf16 8 32768 32768, 32 8, 128 128),
        scalars: &[CAUSAL],
    }]),
    corners: &[
        Case {
            label: "bf16, causal, sink and LSE",
            tensors: packed!(Bf16 3 120 144, 4 2, 64 64, "sink" F32 [4], "lse" F32 [120, 4]),
            scalars: &[CAUSAL],
        },
        Case {
            label: "f16, every option",
            tensors: packed!(F16 2 80 96, 2 1, 40 40, "alibi" F32 [2, 2], "bias" F16 [80, 96]),
            scalars: &[
                ("window_left", Scalar::Int(30)),
                ("window_right", Scalar::Int(9)),
                ("softcap", Scalar::Float(10.0)),
                ("scale", Scalar::Float(0.3)),
                ("dropout_p", Scalar::Float(0.1)),
                ("seed", Scalar::Count(3)),
                ("offset", Scalar::Count(5)),
            ],
        },
        Case {
            label: "fp8 of gfx950, descales",
            tensors: packed!(Fp8E4M3 2 80 96, 4 2, 64 64, "q_descale" F32 [2, 4], "k_descale" F32 [1], "v_descale" F32 [2, 2]),
            scalars: &[],
        },
        Case {
            label: "fp8 of gfx942, descales",
            tensors: packed!(Fp8E4M3Fnuz 2 80 96, 4 2, 64 64, "q_descale" F32 [1], "k_descale" F32 [2, 2], "v_descale" F32 [1]),
            scalars: &[],
        },
        Case {
            label: "f16, pages, dropout and bias",
            tensors: paged!(F16 2 80, 4 2, 40 24, [16, 16, 2, 40], [16, 16, 2, 24], 4,
                "bias" F16 [80, 64], "sink" F32 [4], "lse" F32 [80, 4]),
            scalars: &[CAUSAL, ("dropout_p", Scalar::Float(0.1))],
        },
        Case {
            label: "bf16, shuffled pages, window",
            tensors: paged!(Bf16 2 80, 4 2, 64 64, [16, 2, 8, 16, 8], [16, 2, 2, 64, 8], 3),
            scalars: &[("layout", Scalar::Choice("paged_shuffled")), ("window_left", Scalar::Int(20))],
        },
        Case {
            label: "f32, pages of which the cache has most, window",
            tensors: paged!(F32 2 80, 2 1, 16 16, [12, 1, 16, 16], [12, 1, 16, 16], 3, "lse" F32 [80, 2]),
            scalars: &[CAUSAL, ("window_left", Scalar::Int(9)), ("layout", Scalar::Choice("hnd"))],
        },
        Case {
            label: "bf16, too few pages",
            tensors: paged!(Bf16 2 80, 2 1, 16 16, [16, 16, 1, 16], [16, 16, 1, 16], 2, "lse" F32 [80, 2]),
            scalars: &[],
        },
        Case {
            label: "starts that do not end with the rows",
            tensors: packed!(Bf16 2 90 96, 2 2, 64 64, "lse" F32 [90, 2]),
            scalars: &[],
        },
        Case {
            label: "splits of 64 keys",
            tensors: packed!(Bf16 2 80 96, 2 2, 64 64, "lse" F32 [80, 2]),
            scalars: &[SHORT, SPLIT],
        },
        Case {
            label: "splits, starts that do not end with the rows",
            tensors: packed!(Bf16 2 90 96, 2 2, 64 64, "lse" F32 [90, 2]),
            scalars: &[SHORT, SPLIT],
        },
        pages!(Bf16 64 64, TALL),
        pages!(Bf16 64 64, SHORT),
        pages!(Bf16 128 128, TALL),
        pages!(Bf16 128 128, SHORT),
        pages!(Bf16 192 128, TALL),
        pages!(Bf16 192 128, SHORT),
        pages!(Bf16 256 256, TALL),
        pages!(Bf16 256 256, SHORT),
        pages!(F16 64 64, TALL),
        pages!(F16 64 64, SHORT),
        pages!(F16 128 128, TALL),
        pages!(F16 128 128, SHORT),
        pages!(F16 192 128, TALL),
        pages!(F16 192 128, SHORT),
        pages!(F16 256 256, TALL),
        pages!(F16 256 256, SHORT),
        Case {
            label: "keys beyond the rows",
            tensors: packed!(Bf16 2 80 60, 2 2, 64 64, "lse" F32 [80, 2]),
            scalars: &[],
        },
    ],
    outputs: outputs_packed,
    run: run_packed,
    reference: reference_packed,
    traffic: traffic_packed,
    ..MHA
};

const PACKED_SCALARS: &[ScalarSpec] = &[
    SCALE,
    CAUSAL_SCALAR,
    WINDOW_LEFT,
    WINDOW_RIGHT,
    SOFTCAP_SCALAR,
    DROPOUT_P,
    SEED,
    OFFSET,
    TILE,
    KEYS_PER_SPLIT,
    LAYOUT,
];

fn traffic_packed(call: &HostCall) -> Traffic {
    if call.optional("block_table").is_none() {
        return Traffic::once(call);
    }
    match (cache_sizes(call, CACHE), host_sequences(call)) {
        (Ok(cache), Ok(sequences)) => paged_traffic(call, &sequences, [&CACHE, &[], &["block_table"]], cache),
        _ => Traffic::once(call),
    }
}

/// Heads, columns and types of a call; rows of `q` and of `k` as they are.
pub(super) struct Sizes<const N: usize> {
    pub q: [usize; N],
    pub k: [usize; N],
    pub dv: usize,
}

impl<const N: usize> Sizes<N> {
    pub fn heads(&self) -> [usize; 4] {
        [self.q[N - 2], self.k[N - 2], self.q[N - 1], self.dv]
    }
}

pub(super) fn sizes<const N: usize, V: Described>(call: &Call<V>) -> Result<Sizes<N>> {
    let op = call.operator().name;
    expect_dtypes(call, "q", &["k", "v"])?;
    let (q, k, v) = (shape::<N, V>(call, "q")?, shape::<N, V>(call, "k")?, shape::<N, V>(call, "v")?);
    let [heads, kv_heads, dqk, dv] = [q[N - 2], k[N - 2], q[N - 1], v[N - 1]];
    if k[N - 1] != dqk {
        return Err(Error::shape(op, "k", k, format!("{dqk} columns (of q)")));
    }
    if heads != 0 && (kv_heads == 0 || !heads.is_multiple_of(kv_heads)) {
        return Err(Error::shape(op, "q", q, format!("a multiple of {kv_heads} heads (of k)")));
    }
    let mut want = k.to_vec();
    want[N - 1] = dv;
    expect_shape(call, "v", &want, "rows and heads of k")?;
    for (name, shape, most) in [("q", &q, 256), ("v", &v, 256)] {
        if shape[N - 1] == 0 {
            return Err(Error::empty(op, name, N - 1, shape));
        }
        if shape[N - 1] > most {
            return Err(Error::shape(op, name, shape, format!("at most {most} columns")));
        }
    }
    Ok(Sizes { q, k, dv })
}

/// The type of outputs.
pub(super) fn out_type(q: DType) -> DType {
    if matches!(q, DType::Fp8E4M3 | DType::Fp8E4M3Fnuz) { DType::Bf16 } else { q }
}

/// Checks options that have the same shapes in all calls: by sequences, queries and keys.
pub(super) fn expect_options<V: Described>(
    call: &Call<V>,
    n: usize,
    heads: [usize; 4],
    rows: [usize; 2],
) -> Result<()> {
    tiling(call)?;
    let op = call.operator().name;
    let [heads, kv_heads, ..] = heads;
    let one_of = |name: &'static str, shapes: &[Vec<usize>]| match call.optional(name).map(V::shape) {
        Some(got) if !shapes.iter().any(|s| s == got) => {
            Err(Error::shape(op, name, got, format!("one of {shapes:?}")))
        }
        _ => Ok(()),
    };
    one_of("alibi", &[vec![heads], vec![n, heads]])?;
    one_of("sink", &[vec![heads]])?;
    one_of("q_descale", &[vec![1], vec![n, heads]])?;
    one_of("k_descale", &[vec![1], vec![n, kv_heads]])?;
    one_of("v_descale", &[vec![1], vec![n, kv_heads]])?;
    if let Some(bias) = call.optional("bias") {
        let q = call.get("q")?.dtype();
        if bias.dtype() != DType::F32 && bias.dtype() != q {
            return Err(Error::dtype(op, "bias", bias.dtype(), format!("f32 or {q} (of q)")));
        }
        let sizes = [n, heads, rows[0], rows[1]];
        let fits = match *bias.shape() {
            [r, c] => [r, c] == rows,
            _ if bias.shape().len() == 4 => {
                bias.shape().iter().zip(sizes).all(|(&got, want)| got == want || got == 1)
                    && bias.shape()[3] == rows[1]
            }
            _ => false,
        };
        if !fits {
            return Err(Error::shape(op, "bias", bias.shape(), format!("{rows:?} or {sizes:?}")));
        }
    }
    Ok(())
}

pub(super) fn specs<V: Described>(
    call: &Call<V>,
    out: Vec<usize>,
    lse: Vec<usize>,
) -> Result<Named<TensorSpec>> {
    let mut specs = vec![("out", TensorSpec::new(out_type(call.get("q")?.dtype()), out))];
    if call.wants("lse") {
        specs.push(("lse", TensorSpec::new(DType::F32, lse)));
    }
    Ok(specs)
}

fn outputs_dense(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let sizes = sizes::<4, _>(call)?;
    let [b, sq, hq, _] = sizes.q;
    if sizes.k[0] != b {
        return Err(Error::shape(call.operator().name, "k", sizes.k, format!("{b} sequences (of q)")));
    }
    expect_options(call, b, sizes.heads(), [sq, sizes.k[1]])?;
    specs(call, vec![b, sq, hq, sizes.dv], vec![b, hq, sq])
}

fn outputs_packed(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (sizes, op) = (packed_sizes(call)?, call.operator().name);
    let starts = call.get("cu_seqlens_q")?.shape();
    let Some(n) = starts[0].checked_sub(1) else {
        return Err(Error::shape(op, "cu_seqlens_q", starts, "[sequences + 1]"));
    };
    expect_shape(call, "cu_seqlens_k", &[n + 1], "shape of cu_seqlens_q")?;
    if let Some(table) = call.optional("block_table").map(Described::shape) {
        expect_shape(call, "block_table", &[n, table[1]], "sequences of cu_seqlens_q")?;
    }
    expect_options(call, n, sizes.heads(), [sizes.q[0], sizes.k[0]])?;
    specs(call, vec![sizes.q[0], sizes.q[1], sizes.dv], vec![sizes.q[0], sizes.q[1]])
}

/// Runs `$body` with `$t` as the type of queries and `$o` as that of outputs.
macro_rules! with_qkv {
    ($dtype:expr, $t:ident, $o:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $t = f16;
                type $o = f16;
                $body
            }
            DType::F32 => {
                type $t = f32;
                type $o = f32;
                $body
            }
            DType::Fp8E4M3 => {
                type $t = Fp8E4M3;
                type $o = bf16;
                $body
            }
            DType::Fp8E4M3Fnuz => {
                type $t = Fp8E4M3Fnuz;
                type $o = bf16;
                $body
            }
            _ => {
                type $t = bf16;
                type $o = bf16;
                $body
            }
        }
    };
}
pub(super) use with_qkv;

fn run_dense(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let sizes = sizes::<4, _>(&inputs)?;
    let ([sequences, sq, heads, _], [_, keys, kv_heads, _]) = (sizes.q, sizes.k);
    let problem =
        AttentionProblem { sequences, heads, kv_heads, queries: sequences * sq, keys, dv: sizes.dv };
    with_qkv!(inputs.get("q")?.dtype(), T, O => {
        let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
        let out = AttentionOutputs::<O> { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
        let options = options(&inputs)?;
        let workspace = workspace(stream, &mut outputs, problem, options.tiling)?;
        mha(stream, qkv, out, workspace, &options)
    })
}

fn run_packed(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let sizes = packed_sizes(&inputs)?;
    let ([queries, heads, _], [keys, kv_heads, _]) = (sizes.q, sizes.k);
    let sequences = inputs.get("cu_seqlens_q")?.shape()[0].saturating_sub(1);
    let problem = AttentionProblem { sequences, heads, kv_heads, queries, keys, dv: sizes.dv };
    let starts =
        SequenceStarts { q: indices(&inputs, "cu_seqlens_q")?, k: indices(&inputs, "cu_seqlens_k")? };
    with_qkv!(inputs.get("q")?.dtype(), T, O => {
        let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
        let out = AttentionOutputs::<O> { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
        let options = options(&inputs)?;
        let workspace = workspace(stream, &mut outputs, problem, options.tiling)?;
        mha_varlen(stream, qkv, starts, out, workspace, &options)
    })
}

/// As [`sizes`]; the tokens of a row of the block table stand for the rows of `k`.
fn packed_sizes<V: Described>(call: &Call<V>) -> Result<Sizes<3>> {
    let Some(table) = call.optional("block_table").map(Described::shape) else { return sizes::<3, _>(call) };
    expect_dtypes(call, "q", &["k", "v"])?;
    let cache = cache_sizes(call, CACHE)?;
    expect_heads(call, CACHE, cache, 256)?;
    let rows = table[1].saturating_mul(cache.tokens);
    Ok(Sizes { q: shape(call, "q")?, k: [rows, cache.heads, cache.dqk], dv: cache.dv })
}

/// Of `mha_varlen` over pages.
const CACHE: [&str; 2] = ["k", "v"];

fn host_sequences(call: &HostCall) -> Result<Vec<PagedSequence>> {
    let (cache, starts) = (cache_sizes(call, CACHE)?, integers(call.get("cu_seqlens_k")?));
    let total_q = call.get("q")?.shape()[0];
    paged_sequences(call, "cu_seqlens_q", total_q, |n, _| {
        keys_in_pages(call, cache, n, starts[n + 1] - starts[n])
    })
}

pub(super) fn host_rows(call: &HostCall) -> Result<HostRows> {
    Ok(HostRows { k: call.get("k")?.to_f64(), v: call.get("v")?.to_f64() })
}

fn reference_dense(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_dense(&call.spec())?;
    let sizes = sizes::<4, _>(call)?;
    let ([b, sq, hq, _], sk) = (sizes.q, sizes.k[1]);
    let sequence =
        |n: usize| Sequence { queries: n * sq..(n + 1) * sq, keys: Some((n * sk..(n + 1) * sk).collect()) };
    let sequences: Vec<_> = (0..b).map(sequence).collect();
    let q = call.get("q")?.to_f64();
    let (out, lse) = attend(call, sizes.heads(), &q, &host_rows(call)?, &sequences, [sq, sk])?;
    let lse = transposed(&lse, [b, sq, hq]);
    Ok(outputs(call, (vec![b, sq, hq, sizes.dv], out), (vec![b, hq, sq], lse)))
}

fn reference_packed(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_packed(&call.spec())?;
    let sizes = packed_sizes(call)?;
    let ([total_q, hq, _], [total_k, ..]) = (sizes.q, sizes.k);
    if call.optional("block_table").is_some() {
        let rows = cache_rows(call, CACHE, layout(call)?, cache_sizes(call, CACHE)?)?;
        let longest = [total_q, total_k];
        let (out, lse) = attend_paged(call, sizes.heads(), host_sequences(call)?, &rows, &rows, longest)?;
        return Ok(outputs(call, (vec![total_q, hq, sizes.dv], out), (vec![total_q, hq], lse)));
    }
    let (q_starts, k_starts) = (integers(call.get("cu_seqlens_q")?), integers(call.get("cu_seqlens_k")?));
    let sequences = match packed(&q_starts, total_q) {
        None => vec![Sequence { queries: 0..total_q, keys: None }],
        Some(rows) => (rows.into_iter().enumerate())
            .map(|(n, queries)| Sequence { queries, keys: keys_of(&k_starts, n, total_k) })
            .collect(),
    };
    let q = call.get("q")?.to_f64();
    let (out, lse) = attend(call, sizes.heads(), &q, &host_rows(call)?, &sequences, [total_q, total_k])?;
    Ok(outputs(call, (vec![total_q, hq, sizes.dv], out), (vec![total_q, hq], lse)))
}
