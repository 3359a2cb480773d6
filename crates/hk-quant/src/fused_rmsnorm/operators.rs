//! The operators of this module as data.

use super::{Fp8Scale, NormMxfp4Options, NormRounding, NormRows, SecondRows, reference};
use crate::operators::group::group_size;
use crate::operators::{FLOATS, OUTPUT, QUANTIZED, mx};
use crate::{GroupScaleRule, MxOptions, Smooth, kernels};
use hk_core::quant::{
    BlockRule, BlockScale, QuantFormat, Quantized, ScaleLayout, group_scale, linear_scale, shuffled_len,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Role, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{
    CodeObjects, DType, E8M0, Error, Float, Result, Stream, TensorView, with_float, with_quantized,
};

static FP8_KERNELS: [&CodeObjects; 3] = [
    &kernels::FUSED_RMSNORM_FP8_QUANT_BF16,
    &kernels::FUSED_RMSNORM_FP8_QUANT_F16,
    &kernels::FUSED_RMSNORM_FP8_QUANT_F32,
];
static MXFP4_KERNELS: [&CodeObjects; 3] = [
    &kernels::FUSED_RMSNORM_MXFP4_QUANT_BF16,
    &kernels::FUSED_RMSNORM_MXFP4_QUANT_F16,
    &kernels::FUSED_RMSNORM_MXFP4_QUANT_F32,
];

/// Sizes that are measured on GPUs, with a residual and without.
macro_rules! bench {
    ($scalars:expr) => {
        BenchSizes::Cases(&[
            bench!("4096 x 4096", 4096, 4096, [("residual_in", DType::Bf16, &[4096, 4096])], $scalars),
            bench!("32768 x 8192", 32_768, 8192, [("residual_in", DType::Bf16, &[32_768, 8192])], $scalars),
            bench!("51200 x 8192, no residual", 51_200, 8192, [], $scalars),
        ])
    };
    ($label:literal, $m:literal, $n:literal, [$($residual:expr)?], $scalars:expr) => {
        Case {
            label: $label,
            tensors: &[("x", DType::Bf16, &[$m, $n]), $($residual,)? ("weight", DType::Bf16, &[$n])],
            scalars: $scalars,
        }
    };
}

pub(crate) const FUSED_RMSNORM_FP8_QUANT: Operator = Operator {
    name: "fused_rmsnorm_fp8_quant",
    family: "hk-quant",
    summary: "y = rmsnorm(x + residual_in) * weight, q = round(y / scale) per tensor, token or group",
    args: &[
        X,
        RESIDUAL_IN,
        WEIGHT,
        X2,
        WEIGHT2,
        SMOOTH,
        STATIC_SCALE,
        ArgSpec { role: Role::Out(Tolerance::Neighbour), dtypes: QUANTIZED, name: "q", ..X },
        ArgSpec::output("scale", SCALE_TOLERANCE, &[DType::F32], 2, "[rows] or [rows, groups]").ranks(1, 2),
        RESIDUAL_OUT,
        OUT,
        OUT2,
    ],
    scalars: &[EPS, OUTPUT, MODE, GROUP, POW2, ROUND_NORM],
    kernels: &FP8_KERNELS,
    cases: &[
        Case {
            label: "Llama-3 8B, 128 tokens, per token",
            tensors: &[
                ("x", DType::Bf16, &[128, 4096]),
                ("residual_in", DType::Bf16, &[128, 4096]),
                ("weight", DType::Bf16, &[4096]),
            ],
            scalars: &[],
        },
        Case {
            label: "DeepSeek-V3, 64 tokens, groups of 128",
            tensors: &[
                ("x", DType::Bf16, &[64, 7168]),
                ("residual_in", DType::Bf16, &[64, 7168]),
                ("weight", DType::Bf16, &[7168]),
            ],
            scalars: &[("scaling", Scalar::Choice("group"))],
        },
        Case {
            label: "DeepSeek-V3 latents, 128 tokens, groups of 128",
            tensors: &[
                ("x", DType::Bf16, &[128, 1536]),
                ("weight", DType::Bf16, &[1536]),
                ("x2", DType::Bf16, &[128, 512]),
                ("weight2", DType::Bf16, &[512]),
            ],
            scalars: &[("scaling", Scalar::Choice("group"))],
        },
    ],
    bench: bench!(&[("output", Scalar::Choice("fp8e4m3")), ("scaling", Scalar::Choice("token"))]),
    corners: &CORNERS_FP8,
    outputs: outputs_fp8,
    run: run_fp8,
    reference: reference_fp8,
    traffic: Traffic::once,
};

pub(crate) const FUSED_RMSNORM_MXFP4_QUANT: Operator = Operator {
    name: "fused_rmsnorm_mxfp4_quant",
    family: "hk-quant",
    summary: "y = rmsnorm(x + residual_in) * weight, q = fp4(y / scale), a power of two for 32 columns",
    args: &[
        X,
        RESIDUAL_IN,
        WEIGHT,
        X2,
        WEIGHT2,
        ArgSpec::output("q", Tolerance::Neighbour, &[DType::Fp4x2], 2, "[rows, cols / 2]"),
        ArgSpec::output("scale", Tolerance::Neighbour, &[DType::E8M0], 2, "[rows, blocks] or shuffled")
            .ranks(1, 2),
        RESIDUAL_OUT,
        OUT,
        OUT2,
    ],
    scalars: &[EPS, mx::MODE, SHUFFLED, ROUND_NORM],
    kernels: &MXFP4_KERNELS,
    cases: &[
        Case {
            label: "Llama-3 8B, 128 tokens",
            tensors: &[
                ("x", DType::Bf16, &[128, 4096]),
                ("residual_in", DType::Bf16, &[128, 4096]),
                ("weight", DType::Bf16, &[4096]),
            ],
            scalars: &[],
        },
        Case {
            label: "DeepSeek-V3, 64 tokens, shuffled scales",
            tensors: &[
                ("x", DType::Bf16, &[64, 7168]),
                ("residual_in", DType::Bf16, &[64, 7168]),
                ("weight", DType::Bf16, &[7168]),
            ],
            scalars: &[("shuffled", Scalar::Bool(true))],
        },
    ],
    bench: bench!(&[]),
    corners: &CORNERS_MXFP4,
    outputs: outputs_mxfp4,
    run: run_mxfp4,
    reference: reference_mxfp4,
    traffic: Traffic::once,
};

/// Tolerance of a scale: a maximum of norms.
const SCALE_TOLERANCE: Tolerance = Tolerance::Within { rtol: 1e-5, atol: 0.0 };

const X: ArgSpec = ArgSpec::input("x", FLOATS, 2, "[rows, cols]");
const RESIDUAL_IN: ArgSpec = ArgSpec { name: "residual_in", ..X }.optional();
const X2: ArgSpec = ArgSpec { name: "x2", shape: "[rows, cols2]", ..X }.optional();
const WEIGHT: ArgSpec =
    ArgSpec::input("weight", FLOATS, 1, "[cols]").sampled(Sample::Normal { mean: 1.0, deviation: 0.25 });
const WEIGHT2: ArgSpec = ArgSpec { name: "weight2", shape: "[cols2]", ..WEIGHT }.optional();
const SMOOTH: ArgSpec = ArgSpec::input("smooth", &[DType::F32], 1, "[cols]")
    .sampled(Sample::Uniform { low: 0.25, high: 4.0 })
    .optional();
const STATIC_SCALE: ArgSpec = ArgSpec::input("static_scale", &[DType::F32], 1, "[1]")
    .sampled(Sample::Uniform { low: 0.01, high: 0.02 })
    .optional();
const OUT: ArgSpec = ArgSpec { role: Role::Out(Tolerance::Reduction), name: "out", ..X }.optional();
const OUT2: ArgSpec = ArgSpec { name: "out2", shape: "[rows, cols2]", ..OUT };
const RESIDUAL_OUT: ArgSpec =
    ArgSpec { role: Role::Out(Tolerance::Exact), name: "residual_out", ..X }.optional();

const EPS: ScalarSpec = ScalarSpec {
    name: "eps",
    default: Scalar::Float(1e-6),
    choices: &[],
    summary: "added to the mean square under the root",
};
const MODE: ScalarSpec = ScalarSpec {
    name: "scaling",
    default: Scalar::Choice("token"),
    choices: &["tensor", "token", "group"],
    summary: "granularity of the scales; tensor reads static_scale",
};
const GROUP: ScalarSpec = ScalarSpec {
    name: "group_size",
    default: Scalar::Int(128),
    choices: &[],
    summary: "columns per group: 32, 64, 128",
};
const POW2: ScalarSpec = ScalarSpec {
    name: "pow2_scale",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "scales of groups are powers of two",
};
const ROUND_NORM: ScalarSpec = ScalarSpec {
    name: "round_norm",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "rounds y to the type of x before it is quantized",
};
const SHUFFLED: ScalarSpec = ScalarSpec {
    name: "shuffled",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "scales in the order of gfx950's scaled MFMA",
};

const TOKEN: &[(&str, Scalar)] = &[("output", Scalar::Choice("i8"))];
const FNUZ: &[(&str, Scalar)] = &[("output", Scalar::Choice("fp8e4m3fnuz"))];
const GROUP_32: &[(&str, Scalar)] = &[("scaling", Scalar::Choice("group")), ("group_size", Scalar::Int(32))];
const GROUP_64: &[(&str, Scalar)] = &[
    ("scaling", Scalar::Choice("group")),
    ("group_size", Scalar::Int(64)),
    ("output", Scalar::Choice("fp8e4m3fnuz")),
];
const GROUP_128: &[(&str, Scalar)] = &[("scaling", Scalar::Choice("group"))];
const EVEN: &[(&str, Scalar)] = &[];
const ROUND_UP: &[(&str, Scalar)] = &[("mode", Scalar::Choice("round_up"))];
const FLOOR: &[(&str, Scalar)] = &[("mode", Scalar::Choice("floor")), ("shuffled", Scalar::Bool(true))];

const TWO_NORMS: Case = Case {
    label: "two norms",
    tensors: &[
        ("x", DType::Bf16, &[9, 128]),
        ("weight", DType::Bf16, &[128]),
        ("x2", DType::Bf16, &[9, 64]),
        ("weight2", DType::Bf16, &[64]),
    ],
    scalars: &[],
};
const FP8_INPUTS: [Case; 3] = [
    TWO_NORMS,
    Case {
        label: "smoothed",
        tensors: &[
            ("x", DType::Bf16, &[9, 100]),
            ("weight", DType::Bf16, &[100]),
            ("smooth", DType::F32, &[100]),
        ],
        scalars: TOKEN,
    },
    Case {
        label: "static scale",
        tensors: &[
            ("x", DType::Bf16, &[9, 100]),
            ("weight", DType::Bf16, &[100]),
            ("static_scale", DType::F32, &[1]),
        ],
        scalars: &[("scaling", Scalar::Choice("tensor"))],
    },
];

/// Cases for each entry point: each dtype, enough rows that waves loop on one CU. Then those with other inputs.
macro_rules! corners {
    ($name:ident: $($dtype:ident $weight:ident),+; $rows:tt; $others:expr) => {
        static $name: [Case; 48 + $others.len()] = {
            const CASES: [[Case; 16]; 3] = [$(corners!(@dtype $dtype $weight $rows)),+];
            let mut all = [CASES[0][0]; 48 + $others.len()];
            let mut i = 0;
            while i < all.len() {
                all[i] = if i < 48 { CASES[i / 16][i % 16] } else { $others[i - 48] };
                i += 1;
            }
            all
        };
    };
    (@dtype $dtype:ident $weight:ident [$(($rows:literal $cols:literal $scalars:ident)),+]) => {
        [$(Case {
            label: concat!($rows, " rows of ", $cols),
            tensors: &[
                ("x", DType::$dtype, &[$rows, $cols]),
                ("residual_in", DType::$dtype, &[$rows, $cols]),
                ("weight", DType::$weight, &[$cols]),
                ("out", DType::$dtype, &[$rows, $cols]),
            ],
            scalars: $scalars,
        }),+]
    };
}
corners!(CORNERS_FP8: Bf16 F32, F16 F16, F32 F32; [(150 64 GROUP_128), (70 512 GROUP_128), (9 2048 GROUP_64), (9 4000 TOKEN),
    (9 6144 GROUP_32), (9 7168 GROUP_128), (9 9216 FNUZ), (5 16512 TOKEN), (150 59 GROUP_64), (37 509 GROUP_32),
    (9 2001 GROUP_128), (9 4001 GROUP_64), (9 4603 GROUP_64), (9 7001 TOKEN), (5 9001 GROUP_32), (5 16403 GROUP_32)];
    FP8_INPUTS);
corners!(CORNERS_MXFP4: Bf16 F32, F16 F16, F32 F32; [(150 64 EVEN), (70 512 FLOOR), (9 2048 EVEN), (9 4000 ROUND_UP),
    (9 6144 FLOOR), (9 7168 FLOOR), (9 9216 EVEN), (5 16512 ROUND_UP), (150 58 FLOOR), (37 502 EVEN), (9 2002 FLOOR),
    (9 4002 EVEN), (9 4602 ROUND_UP), (9 7002 EVEN), (5 9002 FLOOR), (5 16402 FLOOR)]; [TWO_NORMS]);

/// `residual_out`, `out` and `out2`, as far as the call has them.
fn norm_outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let x = call.get("x")?;
    let mut outputs = Vec::new();
    if call.optional("residual_in").is_some() {
        outputs.push(("residual_out", x.clone()));
    }
    if call.wants("out") {
        outputs.push(("out", x.clone()));
    }
    if let Some(x2) = call.optional("x2") {
        outputs.push(("out2", x2.clone()));
    }
    Ok(outputs)
}

fn rows_and_cols<V: Described>(call: &Call<V>) -> Result<(usize, usize)> {
    let shape = call.get("x")?.shape();
    Ok((shape.first().copied().unwrap_or(0), shape.get(1).copied().unwrap_or(0)))
}

fn rounding<V: Described>(call: &Call<V>) -> Result<NormRounding> {
    Ok(if call.bool("round_norm")? { NormRounding::Input } else { NormRounding::F32 })
}

/// Refuses tensors and scalars that the operator would not use.
fn expect_used<V: Described>(call: &Call<V>) -> Result<()> {
    let op = call.operator().name;
    if call.optional("weight2").is_some() && call.optional("x2").is_none() {
        return Err(Error::argument(op, "weight2", "given", "nothing without x2"));
    }
    // fp4 has no such scalar.
    let Ok(scaling) = call.choice("scaling") else { return Ok(()) };
    let given = [
        ("smooth", "token", call.optional("smooth").is_some()),
        ("static_scale", "tensor", call.optional("static_scale").is_some()),
        ("pow2_scale", "group", call.bool("pow2_scale")?),
        ("group_size", "group", call.scalar("group_size")? != GROUP.default),
    ];
    match given.iter().find(|(_, with, given)| *given && *with != scaling) {
        Some((arg, with, _)) => {
            let want = format!("nothing with scaling={scaling}: it belongs to scaling={with}");
            Err(Error::argument(op, arg, "given", want))
        }
        None => Ok(()),
    }
}

fn outputs_fp8(call: &CallSpec) -> Result<Named<TensorSpec>> {
    expect_used(call)?;
    let (rows, cols) = rows_and_cols(call)?;
    let mut outputs = vec![("q", TensorSpec::new(call.choice("output")?.parse()?, [rows, cols]))];
    match call.choice("scaling")? {
        "tensor" => {}
        "token" => outputs.push(("scale", TensorSpec::new(DType::F32, [rows]))),
        _ => {
            let groups = cols.div_ceil(group_size(call, GROUP.name)?.columns());
            outputs.push(("scale", TensorSpec::new(DType::F32, [rows, groups])));
        }
    }
    outputs.extend(norm_outputs(call)?);
    Ok(outputs)
}

fn outputs_mxfp4(call: &CallSpec) -> Result<Named<TensorSpec>> {
    expect_used(call)?;
    let (rows, cols) = rows_and_cols(call)?;
    let blocks = cols.div_ceil(32);
    let scale = match call.bool("shuffled")? {
        true => TensorSpec::new(DType::E8M0, [shuffled_len(rows, blocks).unwrap_or(usize::MAX)]),
        false => TensorSpec::new(DType::E8M0, [rows, blocks]),
    };
    let mut outputs = vec![("q", TensorSpec::new(DType::Fp4x2, [rows, cols / 2])), ("scale", scale)];
    outputs.extend(norm_outputs(call)?);
    Ok(outputs)
}

type Norms<'a, T, W> = (NormRows<'a, T, W>, Option<SecondRows<'a, T, W>>);

/// Both norms of a call.
fn norms<'a, T: Float, W: Smooth<T>>(
    inputs: &Inputs<'a>,
    outputs: &mut Outputs<'a>,
) -> Result<Norms<'a, T, W>> {
    let eps = inputs.float("eps")? as f32;
    let residual_in: Option<TensorView<T>> = inputs.optional_view("residual_in")?;
    let residual_out = outputs.take_optional("residual_out")?;
    let norm = NormRows {
        x: inputs.view("x")?,
        weight: inputs.view("weight")?,
        eps,
        residual: residual_in.zip(residual_out),
        out: outputs.take_optional("out")?,
    };
    let second = match inputs.optional_view("x2")? {
        Some(x) => Some(SecondRows { x, weight: inputs.view("weight2")?, eps, out: outputs.take("out2")? }),
        None => None,
    };
    Ok((norm, second))
}

fn run_fp8(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let op = inputs.operator().name;
    let (x, weight) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    let dtype = inputs.choice("output")?.parse()?;
    with_float!(op, "x", x, T => with_quantized!(op, "q", dtype, Q => {
        if weight == DType::F32 {
            run_fp8_of::<T, f32, Q>(stream, call)
        } else {
            run_fp8_of::<T, T, Q>(stream, call)
        }
    }))
}

fn run_fp8_of<T: Float, W: Smooth<T>, Q: Quantized>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (norm, second) = norms::<T, W>(&inputs, &mut outputs)?;
    let scale = match inputs.choice("scaling")? {
        "tensor" => Fp8Scale::PerTensorStatic { scale: inputs.view("static_scale")? },
        "token" => {
            Fp8Scale::PerToken { scale: outputs.take("scale")?, smooth: inputs.optional_view("smooth")? }
        }
        _ => {
            let rule = match inputs.bool("pow2_scale")? {
                true => GroupScaleRule::PowerOfTwo,
                false => GroupScaleRule::Exact,
            };
            Fp8Scale::Group { size: group_size(&inputs, GROUP.name)?, scale: outputs.take("scale")?, rule }
        }
    };
    crate::fused_rmsnorm_fp8_quant(stream, norm, second, outputs.take::<Q>("q")?, scale, rounding(&inputs)?)
}

fn run_mxfp4(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let (x, weight) = (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype());
    with_float!(inputs.operator().name, "x", x, T => {
        if weight == DType::F32 {
            run_mxfp4_of::<T, f32>(stream, call)
        } else {
            run_mxfp4_of::<T, T>(stream, call)
        }
    })
}

fn run_mxfp4_of<T: Float, W: Smooth<T>>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (norm, second) = norms::<T, W>(&inputs, &mut outputs)?;
    let (q, scale) = (outputs.take("q")?, outputs.take("scale")?);
    let scale_layout =
        if inputs.bool("shuffled")? { ScaleLayout::Shuffled950 } else { ScaleLayout::RowMajor };
    let mx = MxOptions { mode: mx::mode(&inputs)?, scale_layout };
    let options = NormMxfp4Options { mx, rounding: rounding(&inputs)? };
    crate::fused_rmsnorm_mxfp4_quant(stream, norm, second, q, scale, options)
}

/// `y` before quantization, and the outputs of the norms.
fn reference_norms(call: &HostCall) -> Result<(Vec<f64>, Named<HostTensorF64>)> {
    expect_used(call)?;
    let x = call.get("x")?;
    let eps = call.float("eps")? as f32;
    let residual = call.optional("residual_in").map(|t| t.to_f64());
    let weight = call.get("weight")?.to_f64();
    with_float!(call.operator().name, "x", x.dtype(), T => {
        let normed = reference::normed_rows::<T>(&x.to_f64(), residual.as_deref(), &weight, eps);
        let mut outputs = Vec::new();
        let like = |shape: &[usize], values: &[f64]| HostTensorF64::new(shape, values.to_vec());
        if residual.is_some() {
            outputs.push(("residual_out", like(x.shape(), &normed.residual_out)));
        }
        if call.wants("out") {
            outputs.push(("out", like(x.shape(), &normed.y)));
        }
        if let Some(x2) = call.optional("x2") {
            let weight2 = call.get("weight2")?.to_f64();
            let second = reference::normed_rows::<T>(&x2.to_f64(), None, &weight2, eps);
            outputs.push(("out2", like(x2.shape(), &second.y)));
        }
        let rounded = call.bool("round_norm")?;
        let y = normed.y.iter().map(|&v| if rounded { T::from_f64(v).to_f64() } else { v }).collect();
        Ok((y, outputs))
    })
}

fn finite_max(values: &[f64]) -> f32 {
    values.iter().filter(|v| v.is_finite()).fold(0.0, |max, v| f64::max(max, v.abs())) as f32
}

fn reference_fp8(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (y, mut outputs) = reference_norms(call)?;
    let (rows, cols) = rows_and_cols(call)?;
    let format: QuantFormat =
        with_quantized!(call.operator().name, "q", call.choice("output")?.parse()?, Q => Ok(Q::FORMAT))?;
    let smooth = call.optional("smooth").map(|t| t.to_f64());
    let mode = call.choice("scaling")?;
    let (size, pow2) = (group_size(call, GROUP.name)?.columns(), call.bool("pow2_scale")?);
    let rule = BlockRule::codes(BlockScale::RoundUp, format, 0);
    let integers = call.choice("output")? == "i8";
    let fixed = match mode {
        "tensor" => call.get("static_scale")?.to_f64().first().copied(),
        _ => None,
    };
    let (mut q, mut scales) = (Vec::with_capacity(y.len()), Vec::new());
    for row in y.chunks_exact(cols) {
        let smoothed = row.iter().enumerate().map(|(c, v)| match (&smooth, mode) {
            (Some(smooth), "token") => v * smooth[c],
            _ => *v,
        });
        let z: Vec<f64> = smoothed.collect();
        for part in z.chunks(if mode == "group" { size } else { cols }) {
            let amax = finite_max(part);
            let scale = match mode {
                "tensor" => fixed.unwrap_or(1.0),
                "token" => f64::from(linear_scale(amax, format)),
                _ if pow2 => f64::from(rule.scale(amax.max(1e-10)).to_f32()),
                _ => f64::from(group_scale(amax, format)),
            };
            let limit = f64::from(format.qmax);
            let value = |v: &f64| match v / scale {
                nan if nan.is_nan() && integers => 0.0,
                value => value.clamp(-limit, limit),
            };
            q.extend(part.iter().map(value));
            scales.push(scale);
        }
    }
    outputs.push(("q", HostTensorF64::new(vec![rows, cols], q)));
    match mode {
        "tensor" => {}
        "token" => outputs.push(("scale", HostTensorF64::new(vec![rows], scales))),
        _ => {
            let shape = vec![rows, cols.div_ceil(size)];
            outputs.push(("scale", HostTensorF64::new(shape, scales)));
        }
    }
    Ok(outputs)
}

fn reference_mxfp4(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (y, mut outputs) = reference_norms(call)?;
    let (rows, cols) = rows_and_cols(call)?;
    let rule = BlockRule::fp4(mx::mode(call)?, 0);
    let blocks = cols.div_ceil(32);
    let (mut q, mut scales) = (Vec::with_capacity(y.len()), Vec::new());
    for row in y.chunks_exact(cols) {
        for block in row.chunks(32) {
            // A block with a NaN or an infinity has the scale NaN and zeros.
            let bad = block.iter().any(|v| !(*v as f32).is_finite());
            let scale = if bad { E8M0::NAN } else { rule.scale(finite_max(block)) };
            let value = |v: &f64| if bad { 0.0 } else { (v / f64::from(scale.to_f32())).clamp(-6.0, 6.0) };
            q.extend(block.iter().map(value));
            scales.push(f64::from(scale.to_f32()));
        }
    }
    outputs.push(("q", HostTensorF64::new(vec![rows, cols], q)));
    let scale = match shuffled_len(rows, blocks).filter(|_| call.bool("shuffled") == Ok(true)) {
        Some(len) => {
            let shuffled = crate::reference::shuffle_scales(&scales, rows, blocks);
            HostTensorF64::new(vec![len], shuffled)
        }
        None => HostTensorF64::new(vec![rows, blocks], scales),
    };
    outputs.push(("scale", scale));
    Ok(outputs)
}
