//! The operators as data, for the `hk` program, the demo and the documentation.

mod race;
mod sample;

use crate::reference;
use crate::{FilterOrder, PerRow};
use hk_core::registry::{
    ArgSpec, Call, Described, HostCall, HostTensor, Inputs, Operator, Sample, Scalar, ScalarSpec, Tolerance,
};
use hk_core::{DType, Element, Error, Result};

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    race::GREEDY_SAMPLE,
    race::RANDOM_SAMPLE,
    race::MIXED_SAMPLE,
    sample::TOP_K_RENORM_PROBS,
    sample::TOP_P_SAMPLING_FROM_PROBS,
    sample::TOP_K_SAMPLING_FROM_PROBS,
    sample::MIN_P_SAMPLING_FROM_PROBS,
    sample::TOP_K_TOP_P_SAMPLING_FROM_PROBS,
    sample::SAMPLE_FROM_LOGITS,
];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

const PROBS: ArgSpec = ArgSpec::input("probs", FLOATS, 2, "[R, V]").sampled(Sample::Probabilities);
const LOGITS: ArgSpec =
    ArgSpec::input("logits", FLOATS, 2, "[R, V]").sampled(Sample::Normal { mean: 0.0, deviation: 3.0 });
/// From -1, which is out of range, to beyond the rows of small cases.
const ROW_INDEX: ArgSpec = ArgSpec::input("row_index", &[DType::I32], 1, "[B]")
    .optional()
    .sampled(Sample::Integers { low: -1, high: 6 });
const TEMPERATURE: ArgSpec = ArgSpec::input("temperature", &[DType::F32], 1, "[R]")
    .optional()
    .sampled(Sample::Uniform { low: 0.5, high: 1.5 });
const IDS: ArgSpec = ArgSpec::output("ids", Tolerance::Exact, &[DType::I32], 1, "[B]");

const TEMPERATURE_SCALAR: ScalarSpec = ScalarSpec {
    name: "temperature",
    default: Scalar::Float(1.0),
    choices: &[],
    summary: "divides the logits of all rows, unless there is a tensor; 0: greedy",
};
const SEED: ScalarSpec = ScalarSpec {
    name: "seed",
    default: Scalar::Count(0),
    choices: &[],
    summary: "key of the random numbers",
};
const OFFSET: ScalarSpec = ScalarSpec {
    name: "offset",
    default: Scalar::Count(0),
    choices: &[],
    summary: "low half of the generator's counter; step it by one per call",
};

/// The tensor of a parameter if there is one, else the scalar.
fn per_row<'a, T: Element>(
    inputs: &Inputs<'a>,
    name: &'static str,
    scalar: impl FnOnce() -> Result<T>,
) -> Result<PerRow<'a, T>> {
    inputs.optional_view(name)?.map_or_else(|| scalar().map(PerRow::All), |rows| Ok(PerRow::Rows(rows)))
}

/// The number of outputs of a call on `[R, V]`.
fn outputs_of<V: Described>(call: &Call<V>, x: &impl Described) -> usize {
    call.optional("row_index").map_or(x.shape()[0], |index| index.shape()[0])
}

/// The parameter of a row, on the host.
fn of_row(call: &HostCall, name: &'static str, row: usize, scalar: f64) -> Result<f64> {
    let Some(tensor) = call.optional(name) else { return Ok(scalar) };
    let wrong = || Error::shape(call.operator().name, name, tensor.shape(), "one for each row");
    tensor.to_f64().get(row).copied().ok_or_else(wrong)
}

/// The row of each output of a call; `None` if its index is out of range.
fn rows_of(call: &HostCall, x: &HostTensor) -> Vec<Option<usize>> {
    let rows = x.shape()[0];
    match call.optional("row_index") {
        None => (0..rows).map(Some).collect(),
        Some(index) => {
            let in_range = |i: &f64| *i >= 0.0 && *i < rows as f64;
            index.to_f64().into_iter().map(|i| Some(i).filter(in_range).map(|i| i as usize)).collect()
        }
    }
}

/// A tensor's rows.
fn rows(x: &HostTensor) -> Vec<Vec<f64>> {
    x.to_f64().chunks(x.shape()[1].max(1)).map(<[f64]>::to_vec).collect()
}

fn seed(call: &Call<impl Described>) -> Result<(u64, u64)> {
    Ok((call.count("seed")?, call.count("offset")?))
}

const ORDER: ScalarSpec = ScalarSpec {
    name: "order",
    default: Scalar::Choice("joint"),
    choices: &["joint", "top_k_first"],
    summary: "mass that p is compared with: the given one, or that of the tokens that top-k and min-p keep",
};

fn order(call: &Call<impl Described>) -> Result<FilterOrder> {
    Ok(match call.choice("order")? {
        "top_k_first" => FilterOrder::TopKFirst,
        _ => FilterOrder::Joint,
    })
}
