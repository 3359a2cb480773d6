//! Registry entry of `merge_attn_states`.

use super::attention::{F32, LSE, OUT};
use super::common::{expect_dtypes, expect_shape, shape};
use crate::reference::attention::merge;
use crate::{AttentionOutputs, AttentionState, kernels, merge_attn_states};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Result, Stream, with_float};

/// Type; tokens, heads, columns.
macro_rules! case {
    ($label:literal, $dtype:ident $tokens:literal $heads:literal $columns:literal $(, $lse:literal)?) => {
        Case {
            label: $label,
            tensors: &[
                ("out_a", DType::$dtype, &[$tokens, $heads, $columns]),
                ("lse_a", DType::F32, &[$tokens, $heads]),
                ("out_b", DType::$dtype, &[$tokens, $heads, $columns]),
                ("lse_b", DType::F32, &[$tokens, $heads]),
                $(($lse, DType::F32, &[$tokens, $heads]),)?
            ],
            scalars: &[],
        }
    };
}

pub(super) const MERGE_ATTN_STATES: Operator = Operator {
    name: "merge_attn_states",
    family: "hk-attention",
    summary: "attention over two disjoint sets of keys, from that over each",
    args: &[
        ArgSpec::input("out_a", OUT, 3, "[tokens, heads, columns]"),
        ArgSpec::input("lse_a", F32, 2, "[tokens, heads]"),
        ArgSpec::input("out_b", OUT, 3, "[tokens, heads, columns]"),
        ArgSpec::input("lse_b", F32, 2, "[tokens, heads]"),
        ArgSpec::output("out", Tolerance::Attention, OUT, 3, "[tokens, heads, columns]"),
        ArgSpec::output("lse", LSE, F32, 2, "[tokens, heads]").optional(),
    ],
    scalars: &[],
    kernels: &[&kernels::MERGE_STATES],
    cases: &[case!("Llama-3 8B, 64 tokens, a shared prefix", Bf16 64 32 128)],
    bench: BenchSizes::Cases(&[case!("Llama-3 8B, 4096 tokens", Bf16 4096 32 128, "lse")]),
    corners: &[
        case!("bf16", Bf16 9 3 40, "lse"),
        case!("f16, one head", F16 7 1 128, "lse"),
        case!("f32", F32 5 2 20, "lse"),
        case!("bf16, scalar path", Bf16 9 3 33),
        case!("f32, scalar path", F32 9 2 7),
    ],
    outputs: specs,
    run,
    reference,
    traffic: Traffic::once,
};

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let of @ [tokens, heads, columns] = shape(call, "out_a")?;
    expect_dtypes(call, "out_a", &["out_b"])?;
    expect_shape(call, "out_b", &of, "shape of out_a")?;
    for name in ["lse_a", "lse_b"] {
        expect_shape(call, name, &[tokens, heads], "tokens and heads of out_a")?;
    }
    if columns == 0 {
        return Err(hk_core::Error::empty(call.operator().name, "out_a", 2, &of));
    }
    let mut specs = vec![("out", TensorSpec::new(call.get("out_a")?.dtype, of))];
    if call.wants("lse") {
        specs.push(("lse", TensorSpec::new(DType::F32, [tokens, heads])));
    }
    Ok(specs)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    with_float!("merge_attn_states", "out_a", inputs.get("out_a")?.dtype(), T => {
        let state = |out, lse| -> Result<AttentionState<T>> {
            Ok(AttentionState { out: inputs.view(out)?, lse: inputs.view(lse)? })
        };
        let to = AttentionOutputs { out: outputs.take::<T>("out")?, lse: outputs.take_optional("lse")? };
        merge_attn_states(stream, state("out_a", "lse_a")?, state("out_b", "lse_b")?, to)
    })
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    specs(&call.spec())?;
    let of @ [tokens, heads, columns] = shape(call, "out_a")?;
    let part =
        |out, lse| -> Result<(Vec<f64>, Vec<f64>)> { Ok((call.get(out)?.to_f64(), call.get(lse)?.to_f64())) };
    let (out, lse) = merge(&[part("out_a", "lse_a")?, part("out_b", "lse_b")?], columns);
    let mut outputs = vec![("out", HostTensorF64::new(of.to_vec(), out))];
    if call.wants("lse") {
        outputs.push(("lse", HostTensorF64::new(vec![tokens, heads], lse)));
    }
    Ok(outputs)
}
