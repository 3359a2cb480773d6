//! `bf16_to_float`, `float_to_bf16`, `abs_diff`, `squared_diff`, `sum_reduce`, `max_reduce`.

use super::recurrent::case;
use crate::{kernels, reduce_workspace};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    TensorSpec, Tolerance, Traffic,
};
use hk_core::{CodeObjects, DType, Error, Float, Result, Stream, with_float};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const F32: &[DType] = &[DType::F32];
const BF16: &[DType] = &[DType::Bf16];
const SOURCES: &[&CodeObjects] = &[&kernels::UTILS];

const X: ArgSpec = ArgSpec::input("x", FLOATS, 1, "[n]");
const Y: ArgSpec = ArgSpec { name: "y", ..X };

/// An operator of this family.
const fn utility(
    name: &'static str,
    summary: &'static str,
    args: &'static [ArgSpec],
    [cases, bench, corners]: [&'static [Case]; 3],
) -> Operator {
    Operator {
        name,
        family: "hk-gdr",
        summary,
        args,
        scalars: &[],
        kernels: SOURCES,
        cases,
        bench: BenchSizes::Cases(bench),
        corners,
        outputs,
        run,
        reference: reference_of,
        traffic: Traffic::once,
    }
}

pub(crate) const BF16_TO_FLOAT: Operator = utility(
    "bf16_to_float",
    "y = x",
    &[ArgSpec { dtypes: BF16, ..X }, ArgSpec::output("y", Tolerance::Exact, F32, 1, "[n]")],
    [
        &[case!("a million"; ; x Bf16 [1_048_576])],
        &[case!("16 million"; ; x Bf16 [16_777_216])],
        &[case!("vectors and a rest"; ; x Bf16 [4099])],
    ],
);

pub(crate) const FLOAT_TO_BF16: Operator = utility(
    "float_to_bf16",
    "y = x, to nearest even",
    &[ArgSpec { dtypes: F32, ..X }, ArgSpec::output("y", Tolerance::Exact, BF16, 1, "[n]")],
    [
        &[case!("a million"; ; x F32 [1_048_576])],
        &[case!("16 million"; ; x F32 [16_777_216])],
        &[case!("vectors and a rest"; ; x F32 [4099])],
    ],
);

const DIFF: [&[Case]; 3] = [
    &[case!("a million"; ; x Bf16 [1_048_576] y Bf16 [1_048_576])],
    &[case!("16 million"; ; x Bf16 [16_777_216] y Bf16 [16_777_216])],
    &[
        case!("vectors and a rest"; ; x Bf16 [4099] y Bf16 [4099]),
        case!("vectors and a rest"; ; x F16 [2050] y F16 [2050]),
        case!("vectors and a rest"; ; x F32 [71] y F32 [71]),
    ],
];
const DIFF_ARGS: &[ArgSpec] = &[X, Y, ArgSpec::output("diff", Tolerance::Elementwise, F32, 1, "[n]")];

pub(crate) const ABS_DIFF: Operator = utility("abs_diff", "diff = |x - y|", DIFF_ARGS, DIFF);
pub(crate) const SQUARED_DIFF: Operator = utility("squared_diff", "diff = (x - y)^2", DIFF_ARGS, DIFF);

const REDUCE: [&[Case]; 3] = [
    &[case!("a million"; ; x Bf16 [1_048_576])],
    &[case!("16 million"; ; x Bf16 [16_777_216])],
    &[
        case!("several parts"; ; x Bf16 [40_003]),
        case!("one part"; ; x F16 [1023]),
        case!("one part"; ; x F32 [65]),
        case!("nothing"; ; x F32 [0]),
    ],
];

pub(crate) const SUM_REDUCE: Operator = utility(
    "sum_reduce",
    "y = sum x",
    &[X, ArgSpec::output("y", Tolerance::Sum { terms: 1e-6 }, F32, 1, "[1]")],
    REDUCE,
);
pub(crate) const MAX_REDUCE: Operator =
    utility("max_reduce", "y = max x", &[X, ArgSpec::output("y", Tolerance::Exact, F32, 1, "[1]")], REDUCE);

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let op = call.operator();
    let x = call.get("x")?;
    let n = x.shape[0];
    if op.arg("diff").is_some() {
        let y = call.get("y")?;
        if y.dtype != x.dtype {
            return Err(Error::dtype(op.name, "y", y.dtype, format!("{} (dtype of x)", x.dtype)));
        }
        if y.shape != x.shape {
            return Err(Error::shape(op.name, "y", &y.shape, format!("{:?}", x.shape)));
        }
        return Ok(vec![("diff", TensorSpec::new(DType::F32, [n]))]);
    }
    let (dtype, len) = match op.name {
        "float_to_bf16" => (DType::Bf16, n),
        "bf16_to_float" => (DType::F32, n),
        _ => (DType::F32, 1),
    };
    Ok(vec![("y", TensorSpec::new(dtype, [len]))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let name = call.operator().name;
    match name {
        "bf16_to_float" => {
            let (inputs, mut outputs) = call.split();
            return crate::bf16_to_float(stream, inputs.view("x")?, outputs.take("y")?);
        }
        "float_to_bf16" => {
            let (inputs, mut outputs) = call.split();
            return crate::float_to_bf16(stream, inputs.view("x")?, outputs.take("y")?);
        }
        _ => {}
    }
    let dtype = call.split().0.get("x")?.dtype();
    with_float!(name, "x", dtype, T => typed::<T>(stream, call))
}

fn typed<T: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let name = call.operator().name;
    let (inputs, mut outputs) = call.split();
    let x = inputs.view::<T>("x")?;
    if name.ends_with("diff") {
        let (y, diff) = (inputs.view::<T>("y")?, outputs.take("diff")?);
        return match name {
            "abs_diff" => crate::abs_diff(stream, x, y, diff),
            _ => crate::squared_diff(stream, x, y, diff),
        };
    }
    let workspace = outputs.workspace(stream, reduce_workspace(x.numel()))?;
    let y = outputs.take("y")?;
    match name {
        "sum_reduce" => crate::sum_reduce(stream, x, y, workspace),
        _ => crate::max_reduce(stream, x, y, workspace),
    }
}

fn reference_of(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (name, spec) = outputs(&call.spec())?.swap_remove(0);
    let x = call.get("x")?.to_f64();
    let values: Vec<f64> = match call.operator().name {
        "bf16_to_float" => x,
        "float_to_bf16" => x.iter().map(|x| <hk_core::bf16 as Float>::from_f64(*x).to_f64()).collect(),
        "abs_diff" => x.iter().zip(call.get("y")?.to_f64()).map(|(x, y)| (x - y).abs()).collect(),
        "squared_diff" => x.iter().zip(call.get("y")?.to_f64()).map(|(x, y)| (x - y).powi(2)).collect(),
        "sum_reduce" => {
            let size = x.iter().map(|x| x.abs()).sum();
            let sum = HostTensorF64::new([1], vec![x.iter().sum()]).with_magnitudes(vec![size]);
            return Ok(vec![("y", sum)]);
        }
        _ => {
            let larger = |a: f64, b: &f64| if a.is_nan() || a > *b { a } else { *b };
            vec![x.iter().fold(f64::NEG_INFINITY, larger)]
        }
    };
    Ok(vec![(name, HostTensorF64::new(spec.shape, values))])
}
