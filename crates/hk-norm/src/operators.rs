//! The operators as data, for the `hk` program, the demo and the documentation.

use crate::rmsnorm_pad::padded;
use crate::{
    FusedAddLayerNormOutputs, FusedAddRmsNormOutputs, FusedAddRmsNormPadOutputs, LayerNormOptions,
    LayerNormOutputs, LayerNormWeights, RmsNormOptions, RmsNormOutputs, RmsNormPadOptions, RoundMode,
    WeightOffset, kernels, reference,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Operator,
    PUBLISHED_ROWS, Role, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, TensorView, with_float};

/// The operators of this crate.
pub static OPERATORS: &[Operator] =
    &[RMSNORM, FUSED_ADD_RMSNORM, LAYERNORM, FUSED_ADD_LAYERNORM, RMSNORM_PAD, FUSED_ADD_RMSNORM_PAD];

const RMSNORM: Operator = Operator {
    name: "rmsnorm",
    family: "hk-norm",
    summary: "y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)",
    args: &[X, WEIGHT, Y, RSTD],
    scalars: SCALARS,
    kernels: &[&kernels::RMSNORM_BF16, &kernels::RMSNORM_F16, &kernels::RMSNORM_F32],
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
    bench: BenchSizes::Several(&[
        BenchSizes::rows(PUBLISHED_ROWS, &["x"], &["weight"]),
        BenchSizes::rows(&[[2_097_152, 128], [40_960, 8192]], &["x"], &["weight"]),
    ]),
    corners: &CORNERS_RMSNORM,
    outputs,
    run: run_rmsnorm,
    reference: reference_rmsnorm,
    traffic: Traffic::once,
};

const FUSED_ADD_RMSNORM: Operator = Operator {
    name: "fused_add_rmsnorm",
    family: "hk-norm",
    summary: "residual_out = round(x + residual_in), y = rmsnorm(residual_out)",
    args: &[X, RESIDUAL_IN, WEIGHT, Y, RESIDUAL_OUT, RSTD],
    scalars: SCALARS,
    kernels: &[
        &kernels::FUSED_ADD_RMSNORM_BF16,
        &kernels::FUSED_ADD_RMSNORM_F16,
        &kernels::FUSED_ADD_RMSNORM_F32,
    ],
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
    bench: BenchSizes::Several(&[
        BenchSizes::rows(PUBLISHED_ROWS, &["x", "residual_in"], &["weight"]),
        BenchSizes::rows(&[[1_048_576, 128], [20_480, 8192]], &["x", "residual_in"], &["weight"]),
    ]),
    corners: &CORNERS_FUSED,
    outputs,
    run: run_fused_add_rmsnorm,
    reference: reference_fused_add_rmsnorm,
    traffic: Traffic::once,
};

const LAYERNORM: Operator = Operator {
    name: "layernorm",
    family: "hk-norm",
    summary: "y = (x - mean) * rsqrt(var + eps) * weight + bias",
    args: &[X, WEIGHT.optional(), BIAS, X_BIAS, Y, MEAN, RSTD],
    scalars: LAYERNORM_SCALARS,
    kernels: &[&kernels::LAYERNORM_BF16, &kernels::LAYERNORM_F16, &kernels::LAYERNORM_F32],
    cases: &[
        Case {
            label: "Whisper large-v3, 256 frames",
            tensors: &[
                ("x", DType::Bf16, &[256, 1280]),
                ("weight", DType::Bf16, &[1280]),
                ("bias", DType::Bf16, &[1280]),
            ],
            scalars: &[],
        },
        Case {
            label: "4096 rows of 128",
            tensors: &[
                ("x", DType::Bf16, &[4096, 128]),
                ("weight", DType::Bf16, &[128]),
                ("bias", DType::Bf16, &[128]),
            ],
            scalars: &[],
        },
        Case {
            label: "64 tokens of 8192",
            tensors: &[
                ("x", DType::Bf16, &[64, 8192]),
                ("weight", DType::Bf16, &[8192]),
                ("bias", DType::Bf16, &[8192]),
            ],
            scalars: &[],
        },
    ],
    bench: BenchSizes::Several(&[
        BenchSizes::rows(PUBLISHED_ROWS, &["x"], &["weight", "bias"]),
        BenchSizes::rows(&[[2_097_152, 128], [40_960, 8192]], &["x"], &["weight", "bias"]),
    ]),
    corners: &CORNERS_LAYERNORM,
    outputs,
    run: run_layernorm,
    reference: reference_layernorm,
    traffic: Traffic::once,
};

const FUSED_ADD_LAYERNORM: Operator = Operator {
    name: "fused_add_layernorm",
    summary: "residual_out = round(x + residual_in), y = layernorm(residual_out)",
    args: &[X, RESIDUAL_IN, WEIGHT.optional(), BIAS, X_BIAS, Y, RESIDUAL_OUT, MEAN, RSTD],
    cases: &[
        Case {
            label: "Whisper large-v3, 256 frames",
            tensors: &[
                ("x", DType::Bf16, &[256, 1280]),
                ("residual_in", DType::Bf16, &[256, 1280]),
                ("weight", DType::Bf16, &[1280]),
                ("bias", DType::Bf16, &[1280]),
            ],
            scalars: &[],
        },
        Case {
            label: "64 tokens of 8192",
            tensors: &[
                ("x", DType::Bf16, &[64, 8192]),
                ("residual_in", DType::Bf16, &[64, 8192]),
                ("weight", DType::Bf16, &[8192]),
                ("bias", DType::Bf16, &[8192]),
            ],
            scalars: &[],
        },
    ],
    bench: BenchSizes::rows(&[[4096, 8192], [20_480, 8192]], &["x", "residual_in"], &["weight", "bias"]),
    corners: &CORNERS_FUSED_LAYERNORM,
    ..LAYERNORM
};

const RMSNORM_PAD: Operator = Operator {
    name: "rmsnorm_pad",
    summary: "y[:, ..cols] = rmsnorm(x), y[:, cols..] = 0 up to a multiple of pad_multiple",
    args: &[ArgSpec { rank: (2, 2), ..X }, WEIGHT, PADDED_Y],
    scalars: PAD_SCALARS,
    cases: &[Case {
        label: "GPT-OSS, 128 tokens",
        tensors: &[("x", DType::Bf16, &[128, 2880]), ("weight", DType::Bf16, &[2880])],
        scalars: &[("eps", Scalar::Float(1e-5)), ("pad_multiple", Scalar::Int(256))],
    }],
    bench: BenchSizes::rows(&[[131_072, 2880]], &["x"], &["weight"]),
    corners: &CORNERS_PAD,
    outputs: outputs_pad,
    run: run_rmsnorm_pad,
    reference: reference_rmsnorm_pad,
    ..RMSNORM
};

const FUSED_ADD_RMSNORM_PAD: Operator = Operator {
    name: "fused_add_rmsnorm_pad",
    summary: "residual_out = round(x + residual_in), y = rmsnorm_pad(x + residual_in)",
    args: &[
        ArgSpec { rank: (2, 2), ..X },
        ArgSpec { rank: (2, 2), ..RESIDUAL_IN },
        WEIGHT,
        PADDED_Y,
        ArgSpec { rank: (2, 2), ..RESIDUAL_OUT },
    ],
    scalars: PAD_SCALARS,
    cases: &[Case {
        label: "GPT-OSS, 128 tokens",
        tensors: &[
            ("x", DType::Bf16, &[128, 2880]),
            ("residual_in", DType::Bf16, &[128, 2880]),
            ("weight", DType::Bf16, &[2880]),
        ],
        scalars: &[("eps", Scalar::Float(1e-5)), ("pad_multiple", Scalar::Int(256))],
    }],
    bench: BenchSizes::rows(&[[65_536, 2880]], &["x", "residual_in"], &["weight"]),
    corners: &CORNERS_FUSED_PAD,
    outputs: outputs_pad,
    run: run_fused_add_rmsnorm_pad,
    reference: reference_fused_add_rmsnorm_pad,
    ..FUSED_ADD_RMSNORM
};

/// Cases for each dtype and dtype of weights: shapes, further tensors of `[rows, cols]`, those of `[cols]` in the dtype of `x`,
/// weights of `[cols]`, and tensors of `[rows]`; scalars.
macro_rules! corners {
    ($name:ident, $n:literal rows of: $shapes:tt, $more:tt, $scalars:expr, $types:tt) => {
        static $name: [Case; 5 * $n] = {
            const CASES: [[Case; $n]; 5] = corners!(@types $types $shapes $more $scalars);
            let mut all = [CASES[0][0]; 5 * $n];
            let mut i = 0;
            while i < all.len() {
                all[i] = CASES[i / $n][i % $n];
                i += 1;
            }
            all
        };
    };
    (@types [$($type:tt),+] $shapes:tt $more:tt $scalars:expr) => {
        [$(corners!(@shapes $type $shapes $more $scalars)),+]
    };
    (@shapes $type:tt [$($shape:tt),+] $more:tt $scalars:expr) => {
        [$(corners!(@case $type $shape $more $scalars)),+]
    };
    (@case ($dtype:ident $weight:ident) ($rows:literal $cols:literal)
        ([$($matrix:literal),*] [$($bias:literal),*] [$($vector:literal),*] [$($value:literal),*]) $scalars:expr) => {
        Case {
            label: concat!($rows, " rows of ", $cols),
            tensors: &[
                $(($matrix, DType::$dtype, &[$rows, $cols]),)*
                $(($bias, DType::$dtype, &[$cols]),)*
                $(($vector, DType::$weight, &[$cols]),)*
                $(($value, DType::F32, &[$rows]),)*
            ],
            scalars: $scalars,
        }
    };
}

/// Corners of the RMS norms: one for each entry point, with enough rows that waves loop on one CU. Rows of odd
/// length take the scalar path.
macro_rules! rms_corners {
    ($name:ident, $matrices:tt, $values:tt) => {
        corners!($name, 21 rows of: [(600 64), (300 128), (150 256), (100 512), (40 1024), (40 1536), (20 2048), (20 3072),
            (30 4096), (10 6144), (5 8192), (5 16384), (9 20480), (150 61), (100 509), (20 2001), (20 4001), (10 6001),
            (10 8001), (5 16001), (5 20001)], ($matrices [] ["weight"] $values), &[],
            [(Bf16 Bf16), (F16 F16), (F32 F32), (Bf16 F32), (F16 F32)]);
    };
}
rms_corners!(CORNERS_RMSNORM, ["x"], ["rstd"]);
rms_corners!(CORNERS_FUSED, ["x", "residual_in"], ["rstd"]);

corners!(CORNERS_LAYERNORM, 18 rows of: [(600 64), (300 128), (150 256), (100 512), (70 1024), (40 1536), (20 2048), (20 4096),
    (10 8192), (5 16384), (5 20480), (150 61), (100 509), (20 2001), (10 4001), (10 8001), (5 16001), (5 20001)],
    (["x"] ["x_bias"] ["weight", "bias"] ["mean", "rstd"]), &[], [(Bf16 Bf16), (F16 F16), (F32 F32), (Bf16 F32), (F16 F32)]);

/// Corners of operators that share the entry points of others.
macro_rules! some_corners {
    ($name:ident, $more:tt, $scalars:expr) => {
        corners!($name, 5 rows of: [(70 120), (9 1000), (4 2880), (3 130), (2 16400)], $more, $scalars,
            [(Bf16 Bf16), (F16 F16), (F32 F32), (Bf16 F32), (F16 F32)]);
    };
}
some_corners!(
    CORNERS_FUSED_LAYERNORM,
    (["x", "residual_in"] ["x_bias"] ["weight", "bias"] ["mean", "rstd"]),
    &[]
);
some_corners!(CORNERS_PAD, (["x"] [] ["weight"] []), &[("pad_multiple", Scalar::Int(96))]);
some_corners!(CORNERS_FUSED_PAD, (["x", "residual_in"] [] ["weight"] []), &[("pad_multiple", Scalar::Int(96))]);

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

const X: ArgSpec = ArgSpec::input("x", FLOATS, 2, "[.., cols]").ranks(1, 5);
const RESIDUAL_IN: ArgSpec = ArgSpec { name: "residual_in", ..X };
const Y: ArgSpec = ArgSpec { name: "y", role: Role::Out(Tolerance::Reduction), ..X };
const RESIDUAL_OUT: ArgSpec = ArgSpec { name: "residual_out", role: Role::Out(Tolerance::Exact), ..X };
const WEIGHT: ArgSpec =
    ArgSpec::input("weight", FLOATS, 1, "[cols]").sampled(Sample::Normal { mean: 1.0, deviation: 0.25 });
const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 1, "[cols]").optional();
const X_BIAS: ArgSpec = ArgSpec { name: "x_bias", ..BIAS };
const PADDED_Y: ArgSpec = ArgSpec { rank: (2, 2), shape: "[rows, padded]", ..Y };
const MEAN: ArgSpec = ArgSpec { name: "mean", ..RSTD };
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

const LAYERNORM_SCALARS: &[ScalarSpec] = &[ScalarSpec {
    name: "eps",
    default: Scalar::Float(1e-5),
    choices: &[],
    summary: "added to the variance",
}];

const PAD_SCALARS: &[ScalarSpec] = &[
    SCALARS[0],
    ScalarSpec {
        name: "pad_multiple",
        default: Scalar::Count(0),
        choices: &[],
        summary: "y has a multiple of this many columns; 0: no padding",
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

/// `y`, `residual_out` if the operator has one, `mean` and `rstd` if the call wants them.
fn outputs(call: &CallSpec) -> Result<Vec<(&'static str, TensorSpec)>> {
    let x = call.get("x")?;
    let mut outputs = vec![("y", x.clone())];
    if call.operator().arg("residual_out").is_some() {
        outputs.push(("residual_out", x.clone()));
    }
    let rows = x.shape.iter().rev().skip(1).product::<usize>();
    for name in ["mean", "rstd"] {
        if call.wants(name) {
            outputs.push((name, TensorSpec::new(DType::F32, [rows])));
        }
    }
    Ok(outputs)
}

/// `y`, and `residual_out` if the operator has one.
fn outputs_pad(call: &CallSpec) -> Result<Vec<(&'static str, TensorSpec)>> {
    let x = call.get("x")?;
    let cols = x.shape.get(1).copied().unwrap_or(0);
    let padded = padded(call.operator().name, cols, pad_options(call)?.pad_multiple)?;
    let rows = x.shape.first().copied().unwrap_or(0);
    let mut outputs = vec![("y", TensorSpec::new(x.dtype, [rows, padded]))];
    if call.operator().arg("residual_out").is_some() {
        outputs.push(("residual_out", x.clone()));
    }
    Ok(outputs)
}

fn pad_options<V: Described>(call: &Call<V>) -> Result<RmsNormPadOptions> {
    Ok(RmsNormPadOptions { eps: call.float("eps")? as f32, pad_multiple: call.size("pad_multiple")? })
}

fn run_rmsnorm(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = options(&inputs)?;
    let (x_type, weight_type) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    with_float!("rmsnorm", "x", x_type, T => {
        let x = inputs.view::<T>("x")?;
        let outputs = RmsNormOutputs { y: outputs.take::<T>("y")?, rstd: outputs.take_optional("rstd")? };
        if weight_type == DType::F32 {
            crate::rmsnorm(stream, x, inputs.view::<f32>("weight")?, outputs, options)
        } else {
            crate::rmsnorm(stream, x, inputs.view::<T>("weight")?, outputs, options)
        }
    })
}

fn run_fused_add_rmsnorm(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = options(&inputs)?;
    let (x_type, weight_type) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    with_float!("fused_add_rmsnorm", "x", x_type, T => {
        let (x, residual_in) = (inputs.view::<T>("x")?, inputs.view::<T>("residual_in")?);
        let outputs = FusedAddRmsNormOutputs {
            y: outputs.take::<T>("y")?,
            residual_out: outputs.take("residual_out")?,
            rstd: outputs.take_optional("rstd")?,
        };
        if weight_type == DType::F32 {
            crate::fused_add_rmsnorm(stream, x, residual_in, inputs.view::<f32>("weight")?, outputs, options)
        } else {
            crate::fused_add_rmsnorm(stream, x, residual_in, inputs.view::<T>("weight")?, outputs, options)
        }
    })
}

fn run_layernorm(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let op = inputs.operator().name;
    let x = inputs.get("x")?.dtype();
    let is_f32 = |name: &str| inputs.optional(name).is_some_and(|t| t.dtype() == DType::F32);
    let (weight, bias) = (is_f32("weight"), is_f32("bias"));
    with_float!(op, "x", x, T => match (weight, bias) {
        (false, false) => run_layernorm_of::<T, T, T>(stream, call),
        (false, true) => run_layernorm_of::<T, T, f32>(stream, call),
        (true, false) => run_layernorm_of::<T, f32, T>(stream, call),
        (true, true) => run_layernorm_of::<T, f32, f32>(stream, call),
    })
}

fn run_layernorm_of<T: Float, W: crate::Weight<T>, B: crate::Weight<T>>(
    stream: &Stream,
    call: &mut DeviceCall,
) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = LayerNormOptions { eps: inputs.float("eps")? as f32 };
    let x: TensorView<T> = inputs.view("x")?;
    let weights = LayerNormWeights::<T, W, B> {
        weight: inputs.optional_view("weight")?,
        bias: inputs.optional_view("bias")?,
        x_bias: inputs.optional_view("x_bias")?,
    };
    let y = outputs.take("y")?;
    let (mean, rstd) = (outputs.take_optional("mean")?, outputs.take_optional("rstd")?);
    match inputs.optional_view::<T>("residual_in")? {
        Some(residual_in) => {
            let residual_out = outputs.take("residual_out")?;
            let outputs = FusedAddLayerNormOutputs { y, residual_out, mean, rstd };
            crate::fused_add_layernorm(stream, x, residual_in, weights, outputs, options)
        }
        None => crate::layernorm(stream, x, weights, LayerNormOutputs { y, mean, rstd }, options),
    }
}

fn run_rmsnorm_pad(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = pad_options(&inputs)?;
    let (x_type, weight_type) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    with_float!("rmsnorm_pad", "x", x_type, T => {
        let (x, y) = (inputs.view::<T>("x")?, outputs.take::<T>("y")?);
        if weight_type == DType::F32 {
            crate::rmsnorm_pad(stream, x, inputs.view::<f32>("weight")?, y, options)
        } else {
            crate::rmsnorm_pad(stream, x, inputs.view::<T>("weight")?, y, options)
        }
    })
}

fn run_fused_add_rmsnorm_pad(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = pad_options(&inputs)?;
    let (x_type, weight_type) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    with_float!("fused_add_rmsnorm_pad", "x", x_type, T => {
        let (x, residual_in) = (inputs.view::<T>("x")?, inputs.view::<T>("residual_in")?);
        let (y, residual_out) = (outputs.take::<T>("y")?, outputs.take("residual_out")?);
        let outputs = FusedAddRmsNormPadOutputs { y, residual_out };
        if weight_type == DType::F32 {
            let weight = inputs.view::<f32>("weight")?;
            crate::fused_add_rmsnorm_pad(stream, x, residual_in, weight, outputs, options)
        } else {
            let weight = inputs.view::<T>("weight")?;
            crate::fused_add_rmsnorm_pad(stream, x, residual_in, weight, outputs, options)
        }
    })
}

fn reference_rmsnorm(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let (x, weight) = (call.get("x")?, call.get("weight")?);
    let options = options(call)?;
    let result = with_float!("rmsnorm", "x", x.dtype(), T => {
        Ok(reference::rmsnorm::<T>(&x.to_f64(), &weight.to_f64(), options))
    })?;
    Ok(named(call, x.shape(), vec![("y", result.y), ("rstd", result.rstd)]))
}

fn reference_fused_add_rmsnorm(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let (x, residual_in, weight) = (call.get("x")?, call.get("residual_in")?, call.get("weight")?);
    let options = options(call)?;
    let result = with_float!("fused_add_rmsnorm", "x", x.dtype(), T => {
        let (x, residual_in) = (x.to_f64(), residual_in.to_f64());
        Ok(reference::fused_add_rmsnorm::<T>(&x, &residual_in, &weight.to_f64(), options))
    })?;
    let outputs = vec![("y", result.y), ("residual_out", result.residual_out), ("rstd", result.rstd)];
    Ok(named(call, x.shape(), outputs))
}

fn reference_layernorm(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let x = call.get("x")?;
    let cols = x.shape().last().copied().unwrap_or(0);
    let of = |name: &str| call.optional(name).map(|t| t.to_f64());
    let (weight, bias, x_bias) = (of("weight"), of("bias"), of("x_bias"));
    let weights = reference::LayerNormWeights {
        weight: weight.as_deref(),
        bias: bias.as_deref(),
        x_bias: x_bias.as_deref(),
    };
    let eps = f64::from(call.float("eps")? as f32);
    with_float!(call.operator().name, "x", x.dtype(), T => Ok(match of("residual_in") {
        Some(residual_in) => {
            let (norm, residual_out) =
                reference::fused_add_layernorm::<T>(&x.to_f64(), &residual_in, cols, weights, eps);
            let outputs =
                vec![("y", norm.y), ("residual_out", residual_out), ("mean", norm.mean), ("rstd", norm.rstd)];
            named(call, x.shape(), outputs)
        }
        None => {
            let norm = reference::layernorm::<T>(&x.to_f64(), cols, weights, eps);
            named(call, x.shape(), vec![("y", norm.y), ("mean", norm.mean), ("rstd", norm.rstd)])
        }
    }))
}

fn reference_rmsnorm_pad(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let (x, weight) = (call.get("x")?, call.get("weight")?.to_f64());
    let RmsNormPadOptions { eps, pad_multiple } = pad_options(call)?;
    let padded = padded(call.operator().name, weight.len(), pad_multiple)?;
    let values = reference::rmsnorm_pad(&x.to_f64(), &weight, padded, eps);
    let shape = vec![x.shape().first().copied().unwrap_or(0), padded];
    Ok(vec![("y", HostTensorF64::new(shape, values))])
}

fn reference_fused_add_rmsnorm_pad(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let (x, residual_in, weight) =
        (call.get("x")?, call.get("residual_in")?.to_f64(), call.get("weight")?.to_f64());
    let RmsNormPadOptions { eps, pad_multiple } = pad_options(call)?;
    let padded = padded(call.operator().name, weight.len(), pad_multiple)?;
    with_float!("fused_add_rmsnorm_pad", "x", x.dtype(), T => {
        let (y, residual_out) =
            reference::fused_add_rmsnorm_pad::<T>(&x.to_f64(), &residual_in, &weight, padded, eps);
        let shape = vec![x.shape().first().copied().unwrap_or(0), padded];
        Ok(vec![
            ("y", HostTensorF64::new(shape, y)),
            ("residual_out", HostTensorF64::new(x.shape(), residual_out)),
        ])
    })
}

/// Outputs of the shape of `x`; those of one value per row only if the call wants them.
fn named(
    call: &HostCall,
    shape: &[usize],
    outputs: Vec<(&'static str, Vec<f64>)>,
) -> Vec<(&'static str, HostTensorF64)> {
    let asked = |name: &str| !matches!(name, "mean" | "rstd") || call.wants(name);
    let shaped = |(name, values): (&'static str, Vec<f64>)| {
        let shape = if matches!(name, "mean" | "rstd") { vec![values.len()] } else { shape.to_vec() };
        (name, HostTensorF64::new(shape, values))
    };
    outputs.into_iter().filter(|(name, _)| asked(name)).map(shaped).collect()
}
