//! `moe_sum`.

use super::{FLOATS, I32};
use crate::{kernels, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, with_float};

const OP: &str = "moe_sum";

macro_rules! case {
    ($label:literal, $dtype:ident $tokens:literal x $k:literal $cols:literal $(, $y:literal)?) => {
        Case {
            label: $label,
            tensors: &[("x", DType::$dtype, &[$tokens * $k, $cols])],
            scalars: &[("k", Scalar::Count($k)) $(, ("y_dtype", Scalar::Choice($y)))?],
        }
    };
}

pub(crate) const MOE_SUM: Operator = Operator {
    name: OP,
    family: "hk-moe",
    summary: "y[t] = sum over j of x[places[t, j]] + residual[t], the gates of each token",
    args: &[
        ArgSpec::input("x", FLOATS, 2, "[G, H]"),
        ArgSpec::input("places", I32, 2, "[T, k]").optional().sampled(Sample::Integers { low: -1, high: 40 }),
        ArgSpec::input("residual", FLOATS, 2, "[T, H]").optional(),
        ArgSpec::output("y", Tolerance::Sum { terms: 4e-6 }, FLOATS, 2, "[T, H]"),
    ],
    scalars: &[
        ScalarSpec {
            name: "k",
            default: Scalar::Count(8),
            choices: &[],
            summary: "gates of a token, without places",
        },
        ScalarSpec {
            name: "y_dtype",
            default: Scalar::Choice("as_x"),
            choices: &["as_x", "f32"],
            summary: "type of y",
        },
    ],
    kernels: &[&kernels::SUM],
    cases: &[
        case!("DeepSeek-V3, 64 tokens", Bf16 64 x 8 7168),
        case!("Qwen3 235B, 64 tokens", Bf16 64 x 8 4096),
        case!("GPT-OSS 120B, 32 tokens", Bf16 32 x 4 2880),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3, 128 tokens", Bf16 128 x 8 7168),
        case!("DeepSeek-V3, 4096 tokens", Bf16 4096 x 8 7168),
        case!("Qwen3 235B, 4096 tokens", Bf16 4096 x 8 4096),
        case!("GPT-OSS 120B, 4096 tokens", Bf16 4096 x 4 2880),
    ]),
    corners: &[
        case!("bf16", Bf16 5 x 3 264),
        case!("bf16, scalar", Bf16 3 x 4 131),
        case!("bf16 to f32", Bf16 5 x 2 72, "f32"),
        case!("bf16 to f32, scalar", Bf16 3 x 2 9, "f32"),
        case!("f16", F16 4 x 8 2056),
        case!("f16, scalar", F16 3 x 4 300),
        case!("f16 to f32", F16 5 x 2 72, "f32"),
        case!("f16 to f32, scalar", F16 3 x 2 9, "f32"),
        case!("f32", F32 3 x 2 1028),
        case!("f32, scalar", F32 3 x 2 257),
        Case {
            label: "places and residual",
            tensors: &[
                ("x", DType::Bf16, &[37, 48]),
                ("places", DType::I32, &[9, 4]),
                ("residual", DType::Bf16, &[9, 48]),
            ],
            scalars: &[],
        },
        Case {
            label: "residual, f32, scalar",
            tensors: &[("x", DType::F16, &[12, 33]), ("residual", DType::F32, &[3, 33])],
            scalars: &[("y_dtype", Scalar::Choice("f32")), ("k", Scalar::Count(4))],
        },
    ],
    outputs,
    run,
    reference: reference_sum,
    traffic: Traffic::once,
};

/// Tokens and k.
fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 2]> {
    let x = call.get("x")?.shape();
    let (gates, cols) = (x[0], x[1]);
    let [tokens, k] = match call.optional("places") {
        Some(places) => [places.shape()[0], places.shape()[1]],
        None => {
            let k = call.size("k")?;
            if k == 0 || !gates.is_multiple_of(k) {
                return Err(Error::argument(OP, "k", k, format!("a divisor of {gates} (rows of x)")));
            }
            [gates / k, k]
        }
    };
    if let Some(residual) = call.optional("residual")
        && (residual.shape() != [tokens, cols] || residual.dtype() != y_dtype(call)?)
    {
        let want = format!("[{tokens}, {cols}] as y");
        return Err(Error::shape(OP, "residual", residual.shape(), want));
    }
    Ok([tokens, k])
}

fn y_dtype<V: Described>(call: &Call<V>) -> Result<DType> {
    Ok(if call.choice("y_dtype")? == "f32" { DType::F32 } else { call.get("x")?.dtype() })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [tokens, _] = sizes(call)?;
    Ok(vec![("y", TensorSpec::new(y_dtype(call)?, [tokens, call.get("x")?.shape()[1]]))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    sizes(&inputs)?;
    let (dtype, y) = (inputs.get("x")?.dtype(), y_dtype(&inputs)?);
    with_float!(OP, "x", dtype, T => match y {
        DType::F32 => run_as::<T, f32>(stream, call),
        _ => run_as::<T, T>(stream, call),
    })
}

fn run_as<T: Float, Y: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (places, residual) = (inputs.optional_view("places")?, inputs.optional_view::<Y>("residual")?);
    crate::moe_sum(stream, inputs.view::<T>("x")?, places, residual, outputs.take::<Y>("y")?)
}

fn reference_sum(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [tokens, k] = sizes(call)?;
    let x = call.get("x")?;
    let cols = x.shape()[1];
    let places = match call.optional("places") {
        Some(places) => places.elements::<i32>()?,
        None => (0..(tokens * k) as i32).collect(),
    };
    let residual = call.optional("residual").map(|r| r.to_f64());
    let (y, magnitudes) = reference::moe_sum(&x.to_f64(), cols, &places, k, residual.as_deref());
    Ok(vec![("y", HostTensorF64::new([tokens, cols], y).with_magnitudes(magnitudes))])
}
