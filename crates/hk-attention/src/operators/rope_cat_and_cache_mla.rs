//! `rope_cat_and_cache_mla` as data.

use super::common::{
    ACTIVATIONS, COS, K_SCALE, OFFSETS, POSITIONS, SIN, SLOT_MAPPING, SPAN, STYLE, TABLE, expect_shape, shape,
};
use super::mla::{
    GPT_J, HEAD_TOKENS, K_NOPE, K_PE, K_PE_OUT, KV_CACHE, NOPE_ZEROS, Q_OUT, Q_OUT_TYPE, Q_PE, Q_PE_HEAD,
    mla_reference, outputs, run, traffic,
};
use crate::kernels;
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, HostCall, HostTensorF64, Named, Operator, Scalar, TensorSpec,
};
use hk_core::{DType, Result};

/// A case of `[tokens, q_heads, kv_heads, nope, pe]`: names of the types of activations, tables and the cache, shape of the
/// tables, slots.
macro_rules! case {
    ($label:literal, [$tokens:literal, $q:literal, $kv:literal, $nope:literal, $pe:literal], $t:ident, $r:ident, $c:ident,
        $table:tt, [$slots:literal, $width:literal], [$($more:tt),*], $scalars:tt) => {
        Case {
            label: $label,
            tensors: &[
                ("q_nope", DType::$t, &[$tokens, $q, $nope]),
                ("q_pe", DType::$t, &[$tokens, $q, $pe]),
                ("k_nope", DType::$t, &[$tokens, $kv, $nope]),
                ("k_pe", DType::$t, &[$tokens, $kv, $pe]),
                ("cos", DType::$r, &$table),
                ("sin", DType::$r, &$table),
                ("positions", DType::I64, &[$tokens]),
                ("slot_mapping", DType::I32, &[$tokens]),
                ("kv_cache", DType::$c, &[$slots, $kv, $width]),
                $($more),*
            ],
            scalars: &$scalars,
        }
    };
}

pub(super) const ROPE_CAT_AND_CACHE_MLA: Operator = Operator {
    name: "rope_cat_and_cache_mla",
    family: "hk-attention",
    summary: "q_out = [q_nope, rope(q_pe)], kv_cache[slot] = cast([k_nope, rope(k_pe)] / k_scale)",
    args: &[
        Q_NOPE,
        Q_PE,
        K_NOPE,
        K_PE,
        COS,
        SIN,
        POSITIONS,
        OFFSETS,
        SLOT_MAPPING,
        K_SCALE,
        Q_OUT,
        K_PE_OUT,
        KV_CACHE,
        Q_PE_HEAD,
        NOPE_ZEROS,
    ],
    scalars: &[STYLE, TABLE, SPAN, Q_OUT_TYPE, HEAD_TOKENS],
    kernels: &[&kernels::KV_CACHE_ROWS],
    cases: &[
        case!(
            "DeepSeek-V3, 16 tokens",
            [16, 128, 1, 512, 64],
            Bf16,
            Bf16,
            Bf16,
            [64, 32],
            [64, 576],
            [],
            [GPT_J]
        ),
        case!(
            "DeepSeek-V3, 16 tokens of 8 ranks, fp8",
            [16, 16, 1, 512, 64],
            Bf16,
            Bf16,
            Fp8E4M3Fnuz,
            [64, 32],
            [64, 576],
            [("k_scale", DType::F32, &[1])],
            [GPT_J, ("q_out_type", Scalar::Choice("cache"))]
        ),
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "DeepSeek-V3, 8192 tokens",
        tensors: &[
            ("q_nope", DType::Bf16, &[8192, 128, 512]),
            ("q_pe", DType::Bf16, &[8192, 128, 64]),
            ("k_nope", DType::Bf16, &[8192, 1, 512]),
            ("k_pe", DType::Bf16, &[8192, 1, 64]),
            ("cos", DType::Bf16, &[8192, 32]),
            ("sin", DType::Bf16, &[8192, 32]),
            ("positions", DType::I64, &[8192]),
            ("slot_mapping", DType::I32, &[8192]),
            ("kv_cache", DType::Bf16, &[8192, 1, 576]),
        ],
        scalars: &[],
    }]),
    corners: &[
        case!(
            "bf16",
            [9, 4, 1, 128, 64],
            Bf16,
            Bf16,
            Bf16,
            [64, 32],
            [16, 192],
            [("q_pe_head", DType::Bf16, &[4, 4, 64]), ("nope_zeros", DType::Bf16, &[4, 4, 128])],
            [GPT_J, ("head_tokens", Scalar::Int(4))]
        ),
        case!(
            "f16 to fp8",
            [7, 4, 2, 64, 64],
            F16,
            F32,
            Fp8E4M3,
            [64, 64],
            [8, 128],
            [("k_scale", DType::F32, &[1])],
            [("table", Scalar::Choice("full")), ("q_out_type", Scalar::Choice("cache"))]
        ),
        case!(
            "bf16 scalar",
            [5, 2, 1, 127, 2],
            Bf16,
            Bf16,
            Bf16,
            [64, 1],
            [8, 129],
            [("q_pe_head", DType::Bf16, &[5, 2, 2]), ("nope_zeros", DType::Bf16, &[5, 2, 127])],
            [("head_tokens", Scalar::Int(5))]
        ),
        case!(
            "f16 scalar to fp8",
            [5, 2, 2, 31, 6],
            F16,
            F32,
            Fp8E4M3Fnuz,
            [64, 3],
            [4, 37],
            [("k_scale", DType::F32, &[1])],
            [GPT_J]
        ),
        case!(
            "the last columns, offsets",
            [5, 2, 1, 32, 16],
            Bf16,
            Bf16,
            Bf16,
            [64, 4],
            [8, 48],
            [("offsets", DType::I64, &[5])],
            [("span", Scalar::Choice("last"))]
        ),
    ],
    outputs: outputs_of,
    run,
    reference,
    traffic,
};

const Q_NOPE: ArgSpec = ArgSpec::input("q_nope", ACTIVATIONS, 3, "[tokens, q_heads, nope]");

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let outputs = outputs(call)?;
    let ([tokens, heads, _], [.., nope]) = (shape::<3, _>(call, "q_pe")?, shape::<3, _>(call, "k_nope")?);
    let why = "tokens and heads of q_pe, columns of k_nope";
    expect_shape(call, "q_nope", &[tokens, heads, nope], why)?;
    Ok(outputs)
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_of(&call.spec())?;
    mla_reference(call, &call.get("q_nope")?.to_f64(), &[])
}
