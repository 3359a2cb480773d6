//! `silu_and_mul`, `gelu_and_mul`, `gelu_tanh_and_mul`, `swiglu_oai_and_mul`.

use super::{FLOATS, Y_DTYPE, expect_columns, y_dtype};
use crate::{kernels, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream, with_float};

macro_rules! case {
    ($dtype:ident $y:literal $($n:literal)+) => {
        case!(concat!($($n, " ",)+ stringify!($dtype), " to ", $y); $dtype $y $($n)+)
    };
    ($label:expr; $dtype:ident $y:literal $($n:literal)+) => {
        Case {
            label: $label,
            tensors: &[("x", DType::$dtype, &[$($n),+])],
            scalars: &[("y_dtype", Scalar::Choice($y))],
        }
    };
}

/// The operator `$name`, which takes `$limit` besides the tensors.
macro_rules! operator {
    ($const:ident, $name:ident, $summary:literal, $scalars:expr, $($limit:ident)?) => {
        pub(crate) const $const: Operator = Operator {
            name: stringify!($name),
            family: "hk-activation",
            summary: $summary,
            args: &[X, Y],
            scalars: $scalars,
            kernels: &[&kernels::GATED],
            cases: CASES,
            bench: BENCH,
            corners: CORNERS,
            outputs,
            run: |stream: &Stream, call: &mut DeviceCall| {
                let (inputs, mut outputs) = call.split();
                $(let $limit = inputs.float("limit")? as f32;)?
                with_float!(stringify!($name), "x", inputs.get("x")?.dtype(), T => {
                    with_float!(stringify!($name), "y", y_dtype(&inputs)?, O => {
                        crate::$name(stream, inputs.view::<T>("x")?, outputs.take::<O>("y")?, $($limit)?)
                    })
                })
            },
            reference: |call: &HostCall| {
                outputs(&call.spec())?;
                let x = call.get("x")?;
                let d = x.shape().last().map_or(0, |n| n / 2);
                $(let $limit = call.float("limit")?;
                if $limit.is_nan() || $limit < 0.0 {
                    let want = "a number that is not negative; 0 for no limit";
                    return Err(Error::argument(stringify!($name), "limit", $limit as f32, want));
                })?
                result(x.shape(), reference::$name(&x.to_f64(), d, $($limit)?))
            },
            traffic: Traffic::once,
        };
    };
}

operator!(SILU_AND_MUL, silu_and_mul, "y = silu(x[.., :d]) * x[.., d:]", &[Y_DTYPE, LIMIT], limit);
operator!(GELU_AND_MUL, gelu_and_mul, "y = gelu(x[.., :d]) * x[.., d:]", &[Y_DTYPE],);
operator!(GELU_TANH_AND_MUL, gelu_tanh_and_mul, "y = gelu_tanh(x[.., :d]) * x[.., d:]", &[Y_DTYPE],);
operator!(
    SWIGLU_OAI_AND_MUL,
    swiglu_oai_and_mul,
    "y = a / (1 + exp(-1.702 * a)) * (b + 1), a = min(x[.., :d], 7), b = clamp(x[.., d:], -7, 7)",
    &[Y_DTYPE],
);

const X: ArgSpec = ArgSpec::input("x", FLOATS, 2, "[.., 2d]")
    .ranks(1, 5)
    .sampled(Sample::Normal { mean: 0.0, deviation: 3.0 });
const Y: ArgSpec = ArgSpec::output("y", Tolerance::Elementwise, FLOATS, 2, "[.., d]").ranks(1, 5);

const LIMIT: ScalarSpec = ScalarSpec {
    name: "limit",
    default: Scalar::Float(0.0),
    choices: &[],
    summary: "both halves at most so much, the second one at least the negative; 0: no limit",
};

const CASES: &[Case] = &[
    case!("Llama-3 8B, 32 tokens"; Bf16 "as_x" 32 28672),
    case!("GPT-OSS, 128 tokens"; Bf16 "as_x" 128 5760),
    case!("8192 rows of 256"; Bf16 "as_x" 8192 256),
];

/// Published tables; Llama-3 8B: a token, prefill, more than a GiB.
const BENCH: BenchSizes = BenchSizes::rows(
    &[
        [4096, 256],
        [16_384, 256],
        [65_536, 256],
        [131_072, 256],
        [4096, 8192],
        [4096, 16_384],
        [1, 28_672],
        [4096, 28_672],
        [16_384, 28_672],
    ],
    &["x"],
    &[],
);

/// Each entry point with so many rows that waves loop on one compute unit, rows that tiles cross, each type of the result.
const CORNERS: &[Case] = &[
    case!(Bf16 "as_x" 300 256),
    case!(F16 "as_x" 120 640),
    case!(F32 "as_x" 90 512),
    case!(Bf16 "f32" 9 4640),
    case!(F16 "bf16" 3 16),
    case!(F32 "f16" 1 1 3 2 24),
    case!(Bf16 "f16" 90 258),
    case!(F16 "f32" 50 402),
    case!(F32 "bf16" 30 514),
    case!(Bf16 "as_x" 2),
];

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let x = call.get("x")?;
    let mut shape = x.shape.clone();
    match shape.last_mut() {
        Some(cols) if cols.is_multiple_of(2) => *cols /= 2,
        _ => return Err(Error::shape(call.operator().name, "x", &x.shape, "an even last axis, two halves")),
    }
    expect_columns(call.operator().name, &shape, shape.last().copied().unwrap_or(0))?;
    Ok(vec![("y", TensorSpec::new(y_dtype(call)?, shape))])
}

fn result(x: &[usize], values: Vec<f64>) -> Result<Named<HostTensorF64>> {
    let mut shape = x.to_vec();
    if let Some(cols) = shape.last_mut() {
        *cols /= 2;
    }
    Ok(vec![("y", HostTensorF64::new(shape, values))])
}
