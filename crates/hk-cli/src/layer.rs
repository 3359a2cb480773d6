//! The row-wise operators of one decoder layer of Llama-3 8B and of sampling, in order: each works on what the one before
//! it gave. What lies between them, matrix products and attention, is replaced by example data.

use crate::demo::{Row, measure};
use crate::{Result, operator};
use hk_core::DType::{self, Bf16, F32, I64};
use hk_core::registry::{Call, HostCall, HostTensor, Scalar, TensorSpec};
use std::collections::HashMap;

/// Tokens: a batch of sequences that decode.
const TOKENS: usize = 16;
const HIDDEN: usize = 4096;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const FFN: usize = 14336;
const VOCAB: usize = 128_256;
/// Positions of the tables, and slots of the cache.
const CONTEXT: usize = 256;
const BLOCK: usize = 16;

/// Where an input comes from.
enum From {
    /// Example data as the operator describes it.
    Sample(DType, &'static [usize]),
    /// An output of an earlier step, by the name that the step gave it.
    Step(&'static str),
}

/// One operator.
struct Step {
    label: &'static str,
    operator: &'static str,
    inputs: &'static [(&'static str, From)],
    scalars: &'static [(&'static str, Scalar)],
    /// Outputs that later steps use: their argument, and the name they get.
    keep: &'static [(&'static str, &'static str)],
}

const STEPS: &[Step] = &[
    Step {
        label: "norm before attention",
        operator: "fused_add_rmsnorm",
        inputs: &[
            ("x", From::Sample(Bf16, &[TOKENS, HIDDEN])),
            ("residual_in", From::Sample(Bf16, &[TOKENS, HIDDEN])),
            ("weight", From::Sample(Bf16, &[HIDDEN])),
        ],
        scalars: &[("eps", Scalar::Float(1e-5))],
        keep: &[("residual_out", "residual")],
    },
    Step {
        label: "split of q, k, v; rotation",
        operator: "fused_qkv_split_qk_rope",
        inputs: &[
            ("qkv", From::Sample(Bf16, &[TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM])),
            ("cos", From::Sample(F32, &[CONTEXT, HEAD_DIM / 2])),
            ("sin", From::Sample(F32, &[CONTEXT, HEAD_DIM / 2])),
            ("positions", From::Sample(I64, &[TOKENS])),
        ],
        scalars: &[("rotary", Scalar::Int(HEAD_DIM as i64))],
        keep: &[("k", "k"), ("v", "v")],
    },
    Step {
        // No query: keys come rotated from the step before, and are only stored.
        label: "write to the paged cache",
        operator: "rope_reshape_and_cache",
        inputs: &[
            ("q", From::Sample(Bf16, &[0, HEADS, HEAD_DIM])),
            ("k", From::Step("k")),
            ("v", From::Step("v")),
            ("cos", From::Sample(F32, &[CONTEXT, HEAD_DIM / 2])),
            ("sin", From::Sample(F32, &[CONTEXT, HEAD_DIM / 2])),
            ("positions", From::Sample(I64, &[0])),
            ("slot_mapping", From::Sample(I64, &[TOKENS])),
            ("key_cache", From::Sample(Bf16, &[CONTEXT / BLOCK, BLOCK, KV_HEADS, HEAD_DIM])),
            ("value_cache", From::Sample(Bf16, &[CONTEXT / BLOCK, BLOCK, KV_HEADS, HEAD_DIM])),
        ],
        scalars: &[],
        keep: &[],
    },
    Step {
        label: "norm before the feed-forward part",
        operator: "fused_add_rmsnorm",
        inputs: &[
            ("x", From::Sample(Bf16, &[TOKENS, HIDDEN])),
            ("residual_in", From::Step("residual")),
            ("weight", From::Sample(Bf16, &[HIDDEN])),
        ],
        scalars: &[("eps", Scalar::Float(1e-5))],
        keep: &[],
    },
    Step {
        label: "gate",
        operator: "silu_and_mul",
        inputs: &[("x", From::Sample(Bf16, &[TOKENS, 2 * FFN]))],
        scalars: &[],
        keep: &[("y", "gated")],
    },
    Step {
        label: "quantization for the down projection",
        operator: "per_token_quant",
        inputs: &[("x", From::Step("gated"))],
        scalars: &[],
        keep: &[],
    },
    Step {
        label: "softmax of the logits",
        operator: "softmax",
        inputs: &[("x", From::Sample(F32, &[TOKENS, VOCAB]))],
        scalars: &[],
        keep: &[("y", "probs")],
    },
    Step {
        label: "top-p sampling",
        operator: "top_p_sampling_from_probs",
        inputs: &[("probs", From::Step("probs"))],
        scalars: &[("p", Scalar::Float(0.9)), ("seed", Scalar::Int(42))],
        keep: &[],
    },
];

/// Runs the steps on each device; a step after one that failed on that device is left out.
///
/// # Errors
/// If a step is not a call of its operator.
pub fn run(devices: &[String]) -> Result<Vec<Row>> {
    let mut kept: Vec<Option<HashMap<&str, HostTensor>>> =
        devices.iter().map(|_| Some(HashMap::new())).collect();
    let mut rows = vec![];
    for (i, step) in STEPS.iter().enumerate() {
        for (device, kept) in devices.iter().zip(&mut kept) {
            let Some(tensors) = kept else { continue };
            let call = call(step, i as u64, tensors)?;
            let (row, outputs) = measure(&call, step.label, device);
            for (argument, name) in step.keep {
                let output = outputs.iter().find(|(n, _)| n == argument);
                tensors.extend(output.map(|(_, tensor)| (*name, tensor.clone())));
            }
            if outputs.is_empty() {
                *kept = None;
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

fn call(step: &Step, number: u64, kept: &HashMap<&str, HostTensor>) -> Result<HostCall> {
    let operator = operator(step.operator)?;
    let mut call = Call::new(operator);
    for (i, (name, from)) in step.inputs.iter().enumerate() {
        let tensor = match from {
            From::Sample(dtype, shape) => {
                let spec = TensorSpec::new(*dtype, *shape);
                let sample = operator.arg(name).map(|arg| arg.sample);
                let missing = || format!("{}: no argument `{name}`", step.operator);
                HostTensor::sample(
                    spec,
                    sample.ok_or_else(|| crate::Failure::new(missing()))?,
                    number << 8 | i as u64,
                )?
            }
            From::Step(name) => {
                let missing = || crate::Failure::new(format!("{}: no step gives `{name}`", step.operator));
                kept.get(name).cloned().ok_or_else(missing)?
            }
        };
        call.set(name, tensor)?;
    }
    for (name, value) in step.scalars {
        call.set_scalar(name, *value)?;
    }
    Ok(call)
}
