//! `fused_bmm_rope_kv_cache` as data.

use super::common::{
    ACTIVATIONS, COS, K_SCALE, NARROW, OFFSETS, POSITIONS, SIN, SLOT_MAPPING, SPAN, STYLE, TABLE,
    expect_dtypes, expect_scale, expect_shape, reciprocal, shape,
};
use super::mla::{
    GPT_J, HEAD_TOKENS, K_NOPE, K_PE, K_PE_OUT, KV_CACHE, NOPE_ZEROS, Q_OUT, Q_OUT_TYPE, Q_PE, Q_PE_HEAD,
    TERMS, mla_reference, outputs, run, traffic,
};
use crate::{kernels, reference};
use hk_core::quant::Quantized;
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, HostCall, HostTensorF64, Named, Operator, Role, Sample,
    Scalar, ScalarSpec, TensorSpec, Tolerance,
};
use hk_core::{DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result};

/// A case of `[tokens, q_heads, kv_heads, cols, nope, pe]`: names of the types of activations, weights and the cache, weights,
/// slots.
macro_rules! case {
    ($label:literal, [$tokens:literal, $q:literal, $kv:literal, $cols:literal, $nope:literal, $pe:literal], $t:ident,
        $w:ident, $c:ident, $w_cols:literal, $table:tt, [$slots:literal, $width:literal], [$($more:tt),*], $scalars:tt) => {
        Case {
            label: $label,
            tensors: &[
                ("q_nope", DType::$t, &[$q, $tokens, $cols]),
                ("w", DType::$w, &[$q, $nope, $w_cols]),
                ("q_pe", DType::$t, &[$tokens, $q, $pe]),
                ("k_nope", DType::$t, &[$tokens, $kv, $nope]),
                ("k_pe", DType::$t, &[$tokens, $kv, $pe]),
                ("cos", DType::F32, &$table),
                ("sin", DType::F32, &$table),
                ("positions", DType::I32, &[$tokens]),
                ("slot_mapping", DType::I64, &[$tokens]),
                ("kv_cache", DType::$c, &[$slots, $kv, $width]),
                $($more),*
            ],
            scalars: &$scalars,
        }
    };
}

/// Cases of weights for both types of activations: vectorized for few and for many tokens, and scalar.
macro_rules! corners {
    ($($t:ident),*) => {
        &[$(
            case!("bf16 or f16", [5, 2, 1, 128, 96, 16], $t, $t, $t, 128, [64, 8], [8, 112], [], [GPT_J]),
            case!("fp8 cache, the last columns, offsets", [5, 2, 1, 128, 96, 16], $t, $t, Fp8E4M3Fnuz, 128, [64, 4], [8, 112],
                [("k_scale", DType::F32, &[1]), ("offsets", DType::I32, &[5])],
                [("span", Scalar::Choice("last")), ("q_out_type", Scalar::Choice("cache"))]),
            case!("many tokens", [17, 38, 1, 16, 512, 16], $t, $t, $t, 16, [64, 8], [20, 528],
                [("q_pe_head", DType::$t, &[2, 38, 16]), ("nope_zeros", DType::$t, &[2, 38, 512])],
                [("head_tokens", Scalar::Int(2))]),
            case!("scalar", [3, 2, 2, 37, 21, 6], $t, $t, $t, 37, [64, 3], [8, 27], [], [GPT_J]),
            case!("fp8 fnuz", [5, 2, 1, 208, 96, 16], $t, Fp8E4M3Fnuz, $t, 208, [64, 8], [8, 112],
                [("w_scale", DType::F32, &[1])], []),
            case!("fp8 fnuz, many tokens", [37, 38, 1, 16, 512, 16], $t, Fp8E4M3Fnuz, $t, 16, [64, 8], [40, 528],
                [("w_scale", DType::F32, &[1])], []),
            case!("fp8 fnuz scalar", [3, 2, 2, 133, 21, 6], $t, Fp8E4M3Fnuz, $t, 133, [64, 3], [8, 27],
                [("w_scale", DType::F32, &[1])], [("group", Scalar::Int(64))]),
            case!("fp8", [5, 2, 1, 208, 96, 16], $t, Fp8E4M3, $t, 208, [64, 8], [8, 112],
                [("w_scale", DType::F32, &[1])], []),
            case!("fp8, many tokens", [37, 38, 1, 16, 512, 16], $t, Fp8E4M3, $t, 16, [64, 8], [40, 528],
                [("w_scale", DType::F32, &[1])], []),
            case!("fp8 scalar", [3, 2, 2, 133, 21, 6], $t, Fp8E4M3, $t, 133, [64, 3], [8, 27],
                [("w_scale", DType::F32, &[1])], [("group", Scalar::Int(64))]),
            case!("mxfp4", [5, 2, 1, 160, 96, 16], $t, Fp4x2, $t, 80, [64, 8], [8, 112],
                [("w_scales", DType::E8M0, &[2, 96, 5]), ("y_scale", DType::F32, &[1])], []),
            case!("mxfp4, many tokens", [37, 38, 1, 32, 512, 16], $t, Fp4x2, $t, 16, [64, 8], [40, 528],
                [("w_scales", DType::E8M0, &[38, 512, 1])], []),
            case!("mxfp4 scalar", [3, 2, 2, 96, 21, 6], $t, Fp4x2, $t, 48, [64, 3], [8, 27],
                [("w_scales", DType::E8M0, &[2, 21, 3])], []),
        )*]
    };
}

pub(super) const FUSED_BMM_ROPE_KV_CACHE: Operator = Operator {
    name: "fused_bmm_rope_kv_cache",
    family: "hk-attention",
    summary: "q_out = [q_nope w^T, rope(q_pe)], kv_cache[slot] = cast([k_nope, rope(k_pe)] / k_scale)",
    args: &[
        Q_NOPE,
        W,
        W_SCALE,
        W_SCALES,
        Y_SCALE,
        Q_PE,
        K_NOPE,
        K_PE,
        COS,
        SIN,
        POSITIONS,
        OFFSETS,
        SLOT_MAPPING,
        K_SCALE,
        Q_SUMS,
        K_PE_OUT,
        KV_CACHE,
        Q_PE_HEAD,
        NOPE_ZEROS,
    ],
    scalars: &[STYLE, TABLE, SPAN, Q_OUT_TYPE, HEAD_TOKENS, GROUP],
    kernels: &[&kernels::MLA_BMM, &kernels::KV_CACHE_ROWS],
    cases: &[
        case!(
            "DeepSeek-V3, 4 tokens of 8 ranks",
            [4, 16, 1, 128, 512, 64],
            Bf16,
            Bf16,
            Bf16,
            128,
            [64, 32],
            [64, 576],
            [],
            [GPT_J]
        ),
        case!(
            "DeepSeek-V3, 32 tokens of 8 ranks, fp8 cache",
            [32, 16, 1, 128, 512, 64],
            Bf16,
            Bf16,
            Fp8E4M3Fnuz,
            128,
            [64, 32],
            [64, 576],
            [("k_scale", DType::F32, &[1])],
            [GPT_J]
        ),
        case!(
            "DeepSeek-V3, 160 tokens of 8 ranks",
            [160, 16, 1, 128, 512, 64],
            Bf16,
            Bf16,
            Bf16,
            128,
            [64, 32],
            [160, 576],
            [],
            [GPT_J]
        ),
        case!(
            "DeepSeek-V3, 4 tokens of 8 ranks, mxfp4",
            [4, 16, 1, 128, 512, 64],
            Bf16,
            Fp4x2,
            Bf16,
            64,
            [64, 32],
            [64, 576],
            [("w_scales", DType::E8M0, &[16, 512, 4])],
            [GPT_J]
        ),
        case!(
            "DeepSeek-V3, 160 tokens of 8 ranks, mxfp4",
            [160, 16, 1, 128, 512, 64],
            Bf16,
            Fp4x2,
            Bf16,
            64,
            [64, 32],
            [160, 576],
            [("w_scales", DType::E8M0, &[16, 512, 4])],
            [GPT_J]
        ),
    ],
    bench: BenchSizes::Tokens {
        rows: 4096,
        axis0: &["q_pe", "k_nope", "k_pe", "positions", "slot_mapping", "kv_cache"],
        axis1: &["q_nope"],
    },
    corners: corners!(Bf16, F16),
    outputs: outputs_of,
    run,
    reference: reference_of,
    traffic,
};

const W_TYPES: &[DType] = &[DType::Bf16, DType::F16, DType::Fp8E4M3Fnuz, DType::Fp8E4M3, DType::Fp4x2];

const Q_NOPE: ArgSpec = ArgSpec::input("q_nope", ACTIVATIONS, 3, "[q_heads, tokens, cols]");
const W: ArgSpec = ArgSpec::input("w", W_TYPES, 3, "[q_heads, nope, cols], of fp4 pairs half as many");
const W_SCALE: ArgSpec = ArgSpec::input("w_scale", &[DType::F32], 1, "[1], of fp8")
    .sampled(Sample::Uniform { low: 0.5, high: 1.5 })
    .optional();
const W_SCALES: ArgSpec = ArgSpec::input("w_scales", &[DType::E8M0], 3, "[q_heads, nope, cols / 32], of fp4")
    .sampled(Sample::Uniform { low: 0.25, high: 2.0 })
    .optional();
const Y_SCALE: ArgSpec = ArgSpec { name: "y_scale", shape: "[1], of fp4", ..W_SCALE };
const Q_SUMS: ArgSpec = ArgSpec { role: Role::Out(Tolerance::Sum { terms: TERMS }), dtypes: NARROW, ..Q_OUT };

const GROUP: ScalarSpec = ScalarSpec {
    name: "group",
    default: Scalar::Count(128),
    choices: &[],
    summary: "columns of q_nope with one scale, beside fp8 weights",
};

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let outputs = outputs(call)?;
    let op = call.operator().name;
    let ([tokens, heads, _], [.., nope]) = (shape::<3, _>(call, "q_pe")?, shape::<3, _>(call, "k_nope")?);
    let [.., cols] = shape::<3, _>(call, "q_nope")?;
    expect_shape(call, "q_nope", &[heads, tokens, cols], "heads and tokens of q_pe")?;
    if cols == 0 {
        return Err(Error::empty(op, "q_nope", 2, &call.get("q_nope")?.shape));
    }
    let w = call.get("w")?.dtype;
    let (w_cols, own): (_, &[&str]) = match w {
        DType::Fp8E4M3 | DType::Fp8E4M3Fnuz => (cols, &["w_scale"]),
        DType::Fp4x2 => (cols / 2, &["w_scales", "y_scale"]),
        _ => (cols, &[]),
    };
    for name in ["w_scale", "w_scales", "y_scale"] {
        if call.optional(name).is_some() && !own.contains(&name) {
            let want = format!("nothing beside weights in {w}");
            return Err(Error::argument(op, name, "given", want));
        }
    }
    if own.is_empty() {
        expect_dtypes(call, "q_pe", &["w"])?;
    } else {
        call.get(own[0])?;
    }
    if w == DType::Fp4x2 && !cols.is_multiple_of(32) {
        return Err(Error::shape(op, "q_nope", [cols], "a multiple of 32 columns, beside mxfp4 weights"));
    }
    expect_shape(
        call,
        "w",
        &[heads, nope, w_cols],
        "heads, columns of k_nope, columns of q_nope (fp4: half)",
    )?;
    expect_shape(call, "w_scales", &[heads, nope, cols / 32], "heads, columns of k_nope, blocks of 32")?;
    expect_scale(call, "w_scale")?;
    expect_scale(call, "y_scale")?;
    let group = call.size("group")?;
    if own == ["w_scale"] && (!group.is_power_of_two() || group < 64) {
        return Err(Error::argument(op, "group", group, "a power of two from 64 columns on"));
    }
    Ok(outputs)
}

fn reference_of(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_of(&call.spec())?;
    let ([heads, tokens, cols], [_, nope, _]) = (shape::<3, _>(call, "q_nope")?, shape::<3, _>(call, "w")?);
    let (q, mut w) = (call.get("q_nope")?.to_f64(), call.get("w")?.to_f64());
    let group = call.size("group")?;
    let rows = q.chunks(cols.max(1));
    let q: Vec<f64> = match call.get("w")?.dtype() {
        DType::Fp8E4M3 => {
            let round = |x| Fp8E4M3::from_f32_saturating(x).to_f32();
            rows.flat_map(|row| reference::fp8_groups(row, group, Fp8E4M3::FORMAT, round)).collect()
        }
        DType::Fp8E4M3Fnuz => {
            let round = |x| Fp8E4M3Fnuz::from_f32_saturating(x).to_f32();
            rows.flat_map(|row| reference::fp8_groups(row, group, Fp8E4M3Fnuz::FORMAT, round)).collect()
        }
        DType::Fp4x2 => rows.flat_map(reference::mxfp4_blocks).collect(),
        _ => q,
    };
    if let Some(scale) = call.optional("w_scale") {
        let scale = scale.to_f64()[0];
        w.iter_mut().for_each(|w| *w *= scale);
    }
    if let Some(scales) = call.optional("w_scales") {
        w.chunks_mut(32).zip(scales.to_f64()).for_each(|(block, s)| block.iter_mut().for_each(|w| *w *= s));
    }
    let inverse = reciprocal(call, "y_scale");
    w.iter_mut().for_each(|w| *w *= inverse);
    let (sums, magnitudes) = reference::bmm(&q, &w, [heads, tokens, nope, cols]);
    mla_reference(call, &sums, &magnitudes)
}
