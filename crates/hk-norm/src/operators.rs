//! The operators as data, for the `hk` program, the demo and the documentation.

use crate::{RmsNormOptions, RoundMode, WeightOffset, kernels, reference};
use hk_core::registry::{
    ArgSpec, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Operator, Role, Sample,
    Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream, with_float};

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    Operator {
        name: "rmsnorm",
        family: "hk-norm",
        summary: "y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)",
        args: &[X, WEIGHT, Y, RSTD],
        scalars: SCALARS,
        kernels: &[&kernels::RMSNORM],
        cases: &[
            Case {
                label: "Llama-3 8B, 128 tokens",
                tensors: &[("x", DType::Bf16, &[128, 4096]), ("weight", DType::Bf16, &[4096])],
                scalars: &[("eps", Scalar::Float(1e-5))],
            },
            Case {
                label: "Qwen3 8B q norm, 128 tokens of 32 heads",
                tensors: &[("x", DType::Bf16, &[4096, 128]), ("weight", DType::Bf16, &[128])],
                scalars: &[],
            },
            Case {
                label: "DeepSeek-V3, 64 tokens",
                tensors: &[("x", DType::Bf16, &[64, 7168]), ("weight", DType::Bf16, &[7168])],
                scalars: &[],
            },
        ],
        corners: &CORNERS_RMSNORM,
        outputs,
        run: run_rmsnorm,
        reference: reference_rmsnorm,
        traffic: Traffic::once,
    },
    Operator {
        name: "fused_add_rmsnorm",
        family: "hk-norm",
        summary: "residual_out = round(x + residual_in), y = rmsnorm(residual_out)",
        args: &[X, RESIDUAL_IN, WEIGHT, Y, RESIDUAL_OUT, RSTD],
        scalars: SCALARS,
        kernels: &[&kernels::FUSED_ADD_RMSNORM],
        cases: &[
            Case {
                label: "Llama-3 8B, 128 tokens",
                tensors: &[
                    ("x", DType::Bf16, &[128, 4096]),
                    ("residual_in", DType::Bf16, &[128, 4096]),
                    ("weight", DType::Bf16, &[4096]),
                ],
                scalars: &[("eps", Scalar::Float(1e-5))],
            },
            Case {
                label: "4096 rows of 128",
                tensors: &[
                    ("x", DType::Bf16, &[4096, 128]),
                    ("residual_in", DType::Bf16, &[4096, 128]),
                    ("weight", DType::Bf16, &[128]),
                ],
                scalars: &[],
            },
            Case {
                label: "DeepSeek-V3, 64 tokens",
                tensors: &[
                    ("x", DType::Bf16, &[64, 7168]),
                    ("residual_in", DType::Bf16, &[64, 7168]),
                    ("weight", DType::Bf16, &[7168]),
                ],
                scalars: &[],
            },
        ],
        corners: &CORNERS_FUSED,
        outputs,
        run: run_fused_add_rmsnorm,
        reference: reference_fused_add_rmsnorm,
        traffic: Traffic::once,
    },
];

/// Cases for each entry point: each dtype and dtype of weights, each kind of row, enough of them that waves loop on one compute unit. Rows
/// of odd length go by elements.
macro_rules! corners {
    ($name:ident, $tensors:tt: $($dtype:ident $weight:ident),+) => {
        static $name: [Case; 60] = {
            const CASES: &[[Case; 12]] = &[$(corners!(@dtype $tensors $dtype $weight)),+];
            let mut all = [CASES[0][0]; 60];
            let mut i = 0;
            while i < 60 {
                all[i] = CASES[i / 12][i % 12];
                i += 1;
            }
            all
        };
    };
    (@dtype $tensors:tt $dtype:ident $weight:ident) => {
        corners!(@rows $tensors $dtype $weight: 300 128, 100 512, 40 1024, 20 2048, 30 4096, 5 8192, 5 16384, 9 20480, 100 509,
            20 4001, 5 16001, 5 20001)
    };
    (@rows $tensors:tt $dtype:ident $weight:ident: $($rows:literal $cols:literal),+) => {
        [$(corners!(@case $tensors $dtype $weight $rows $cols)),+]
    };
    (@case [$($tensor:literal),+] $dtype:ident $weight:ident $rows:literal $cols:literal) => {
        Case {
            label: concat!($rows, " rows of ", $cols),
            tensors: &[
                $(($tensor, DType::$dtype, &[$rows, $cols]),)+
                ("weight", DType::$weight, &[$cols]),
                ("rstd", DType::F32, &[$rows]),
            ],
            scalars: &[],
        }
    };
}
corners!(CORNERS_RMSNORM, ["x"]: Bf16 Bf16, F16 F16, F32 F32, Bf16 F32, F16 F32);
corners!(CORNERS_FUSED, ["x", "residual_in"]: Bf16 Bf16, F16 F16, F32 F32, Bf16 F32, F16 F32);

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

const X: ArgSpec = ArgSpec::input("x", FLOATS, 2, "[.., cols]").ranks(1, 5);
const RESIDUAL_IN: ArgSpec = ArgSpec { name: "residual_in", ..X };
const Y: ArgSpec = ArgSpec { name: "y", role: Role::Out(Tolerance::Reduction), ..X };
const RESIDUAL_OUT: ArgSpec = ArgSpec { name: "residual_out", role: Role::Out(Tolerance::Exact), ..X };
const WEIGHT: ArgSpec =
    ArgSpec::input("weight", FLOATS, 1, "[cols]").sampled(Sample::Normal { mean: 1.0, deviation: 0.25 });
const RSTD: ArgSpec = ArgSpec::output("rstd", Tolerance::Reduction, &[DType::F32], 1, "[rows]").optional();

const SCALARS: &[ScalarSpec] = &[
    ScalarSpec {
        name: "eps",
        default: Scalar::Float(1e-6),
        choices: &[],
        summary: "added to the mean of the squares",
    },
    ScalarSpec {
        name: "weight_offset",
        default: Scalar::Int(0),
        choices: &[],
        summary: "added to each weight: 0, or 1 as Gemma does",
    },
    ScalarSpec {
        name: "round_mode",
        default: Scalar::Choice("f32"),
        choices: &["f32", "model_sensitive"],
        summary: "one rounding at the end, or also before the weight",
    },
];

fn options<V: Described>(call: &Call<V>) -> Result<RmsNormOptions> {
    let weight_offset = match call.int("weight_offset")? {
        0 => WeightOffset::Zero,
        1 => WeightOffset::One,
        other => return Err(Error::argument(call.operator().name, "weight_offset", other, "0 or 1")),
    };
    let round_mode = match call.choice("round_mode")? {
        "model_sensitive" => RoundMode::ModelSensitive,
        _ => RoundMode::F32,
    };
    Ok(RmsNormOptions { eps: call.float("eps")? as f32, weight_offset, round_mode })
}

/// `y`, `residual_out` where there is one, `rstd` where it is asked for.
fn outputs(call: &CallSpec) -> Result<Vec<(&'static str, TensorSpec)>> {
    options(call)?;
    let x = call.get("x")?;
    let mut outputs = vec![("y", x.clone())];
    if call.operator().arg("residual_out").is_some() {
        outputs.push(("residual_out", x.clone()));
    }
    if call.wants("rstd") {
        let rows = x.shape.iter().rev().skip(1).product::<usize>();
        outputs.push(("rstd", TensorSpec::new(DType::F32, [rows])));
    }
    Ok(outputs)
}

fn run_rmsnorm(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = options(&inputs)?;
    let (x_type, weight_type) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    with_float!("rmsnorm", "x", x_type, T => {
        let x = inputs.view::<T>("x")?;
        let (y, rstd) = (outputs.take::<T>("y")?, outputs.take_optional("rstd")?);
        if weight_type == DType::F32 {
            crate::rmsnorm(stream, x, inputs.view::<f32>("weight")?, y, rstd, options)
        } else {
            crate::rmsnorm(stream, x, inputs.view::<T>("weight")?, y, rstd, options)
        }
    })
}

fn run_fused_add_rmsnorm(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = options(&inputs)?;
    let (x_type, weight_type) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    with_float!("fused_add_rmsnorm", "x", x_type, T => {
        let (x, residual_in) = (inputs.view::<T>("x")?, inputs.view::<T>("residual_in")?);
        let (y, residual_out) = (outputs.take::<T>("y")?, outputs.take::<T>("residual_out")?);
        let rstd = outputs.take_optional("rstd")?;
        if weight_type == DType::F32 {
            let weight = inputs.view::<f32>("weight")?;
            crate::fused_add_rmsnorm(stream, x, residual_in, weight, y, residual_out, rstd, options)
        } else {
            let weight = inputs.view::<T>("weight")?;
            crate::fused_add_rmsnorm(stream, x, residual_in, weight, y, residual_out, rstd, options)
        }
    })
}

fn reference_rmsnorm(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let (x, weight) = (call.get("x")?, call.get("weight")?);
    let options = options(call)?;
    let result = with_float!("rmsnorm", "x", x.dtype(), T => {
        Ok(reference::rmsnorm::<T>(&x.to_f64(), &weight.to_f64(), options))
    })?;
    Ok(named(call, x.shape(), result.y, None, result.rstd))
}

fn reference_fused_add_rmsnorm(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let (x, residual_in, weight) = (call.get("x")?, call.get("residual_in")?, call.get("weight")?);
    let options = options(call)?;
    let result = with_float!("fused_add_rmsnorm", "x", x.dtype(), T => {
        let (x, residual_in) = (x.to_f64(), residual_in.to_f64());
        Ok(reference::fused_add_rmsnorm::<T>(&x, &residual_in, &weight.to_f64(), options))
    })?;
    Ok(named(call, x.shape(), result.y, Some(result.residual_out), result.rstd))
}

fn named(
    call: &HostCall,
    shape: &[usize],
    y: Vec<f64>,
    residual_out: Option<Vec<f64>>,
    rstd: Vec<f64>,
) -> Vec<(&'static str, HostTensorF64)> {
    let mut outputs = vec![("y", HostTensorF64 { shape: shape.to_vec(), values: y })];
    if let Some(values) = residual_out {
        outputs.push(("residual_out", HostTensorF64 { shape: shape.to_vec(), values }));
    }
    if call.wants("rstd") {
        outputs.push(("rstd", HostTensorF64 { shape: vec![rstd.len()], values: rstd }));
    }
    outputs
}
