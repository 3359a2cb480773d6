//! `per_token_quant` and `smoothquant`.

use super::{FLOATS, OUTPUT, Q, SCALE, X, round};
use crate::{PerTokenOptions, kernels, reference};
use hk_core::quant::Quantized;
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    PUBLISHED_ROWS, Sample, Scalar, TensorSpec, Traffic,
};
use hk_core::{DType, Result, Stream, with_float, with_quantized};

const I8: (&str, Scalar) = ("output", Scalar::Choice("i8"));
const FP8: (&str, Scalar) = ("output", Scalar::Choice("fp8e4m3"));
const FNUZ: (&str, Scalar) = ("output", Scalar::Choice("fp8e4m3fnuz"));

pub(crate) const PER_TOKEN_QUANT: Operator = Operator {
    name: "per_token_quant",
    family: "hk-quant",
    summary: "scale = max |x| / qmax per row, q = round(x / scale)",
    args: &[X, Q, SCALE, SCALE_UB],
    scalars: &[OUTPUT],
    kernels: &[&kernels::PER_TOKEN_QUANT],
    cases: &[
        Case {
            label: "Llama-3 8B, 128 tokens",
            tensors: &[("x", DType::Bf16, &[128, 4096])],
            scalars: &[FP8],
        },
        Case {
            label: "Qwen3 8B heads, 128 tokens of 32",
            tensors: &[("x", DType::Bf16, &[4096, 128])],
            scalars: &[I8],
        },
        Case {
            label: "DeepSeek-V3, 64 tokens",
            tensors: &[("x", DType::Bf16, &[64, 7168])],
            scalars: &[FNUZ],
        },
    ],
    bench: BenchSizes::Several(&[
        BenchSizes::Rows {
            shapes: PUBLISHED_ROWS,
            matrices: &["x"],
            vectors: &[],
            scalars: &[("output", Scalar::Choice("fp8e4m3"))],
        },
        BenchSizes::Rows {
            shapes: &[[4_194_304, 128], [51_200, 8192], [16_384, 32_768]],
            matrices: &["x"],
            vectors: &[],
            scalars: &[("output", Scalar::Choice("fp8e4m3"))],
        },
    ]),
    corners: &CORNERS,
    outputs,
    run: run_per_token,
    reference: reference_per_token,
    traffic: Traffic::once,
};

pub(crate) const SMOOTHQUANT: Operator = Operator {
    name: "smoothquant",
    family: "hk-quant",
    summary: "z = x * smooth, scale = max |z| / qmax per row, q = round(z / scale)",
    args: &[X, SMOOTH, Q, SCALE],
    scalars: &[OUTPUT],
    kernels: &[&kernels::SMOOTHQUANT],
    cases: &[
        Case {
            label: "Llama-3 8B, 128 tokens",
            tensors: &[("x", DType::Bf16, &[128, 4096]), ("smooth", DType::F32, &[4096])],
            scalars: &[I8],
        },
        Case {
            label: "DeepSeek-V3, 64 tokens",
            tensors: &[("x", DType::Bf16, &[64, 7168]), ("smooth", DType::F32, &[7168])],
            scalars: &[I8],
        },
    ],
    bench: BenchSizes::Rows {
        shapes: &[[4096, 4096], [51_200, 8192]],
        matrices: &["x"],
        vectors: &["smooth"],
        scalars: &[("output", Scalar::Choice("fp8e4m3"))],
    },
    corners: &CORNERS_SMOOTH,
    outputs,
    run: run_smooth,
    reference: reference_smooth,
    traffic: Traffic::once,
};

const SCALE_UB: ArgSpec = ArgSpec::input("scale_ub", &[DType::F32], 1, "[1]")
    .sampled(Sample::Uniform { low: 1.0, high: 2.0 })
    .optional();
const SMOOTH: ArgSpec =
    ArgSpec::input("smooth", FLOATS, 1, "[cols]").sampled(Sample::Uniform { low: 0.25, high: 4.0 });

/// Cases for each entry point: each dtype, each kind of row, enough that waves loop on one CU.
macro_rules! corners {
    ($name:ident, $more:ident: $($dtype:ident $factor:ident $output:ident),+) => {
        static $name: [Case; 30] = {
            const CASES: &[[Case; 10]] = &[$(corners!(@dtype $more $dtype $factor $output)),+];
            let mut all = [CASES[0][0]; 30];
            let mut i = 0;
            while i < 30 {
                all[i] = CASES[i / 10][i % 10];
                i += 1;
            }
            all
        };
    };
    (@dtype $more:ident $dtype:ident $factor:ident $output:ident) => {
        [corners!(@case $more $dtype $factor $output 260 128),
         corners!(@case $more $dtype $factor $output 70 512),
         corners!(@case $more $dtype $factor $output 15 2048),
         corners!(@case $more $dtype $factor $output 14 4000),
         corners!(@case $more $dtype $factor $output 4 7168),
         corners!(@case $more $dtype $factor $output 3 16384),
         corners!(@case $more $dtype $factor $output 5 33024),
         corners!(@case $more $dtype $factor $output 70 509),
         corners!(@case $more $dtype $factor $output 3 5001),
         corners!(@case $more $dtype $factor $output 3 33001)]
    };
    (@case bound $dtype:ident $factor:ident $output:ident $rows:literal $cols:literal) => {
        Case {
            label: concat!($rows, " rows of ", $cols),
            tensors: &[("x", DType::$dtype, &[$rows, $cols]), ("scale_ub", DType::F32, &[1])],
            scalars: &[$output],
        }
    };
    (@case smooth $dtype:ident $factor:ident $output:ident $rows:literal $cols:literal) => {
        Case {
            label: concat!($rows, " rows of ", $cols),
            tensors: &[("x", DType::$dtype, &[$rows, $cols]), ("smooth", DType::$factor, &[$cols])],
            scalars: &[$output],
        }
    };
}
corners!(CORNERS, bound: Bf16 F32 FP8, F16 F32 FNUZ, F32 F32 I8);
corners!(CORNERS_SMOOTH, smooth: Bf16 Bf16 I8, F16 F32 I8, F32 F32 FP8);

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let x = call.get("x")?;
    let rows = x.shape.iter().rev().skip(1).product::<usize>();
    let dtype = call.choice("output")?.parse()?;
    Ok(vec![("q", TensorSpec::new(dtype, x.shape())), ("scale", TensorSpec::new(DType::F32, [rows]))])
}

fn run_per_token(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let dtype = inputs.choice("output")?.parse()?;
    with_float!("per_token_quant", "x", inputs.get("x")?.dtype(), T => {
        with_quantized!("per_token_quant", "q", dtype, Q => {
            let (q, scale) = (outputs.take::<Q>("q")?, outputs.take("scale")?);
            let options = PerTokenOptions { scale_ub: inputs.optional_view("scale_ub")? };
            crate::per_token_quant(stream, inputs.view::<T>("x")?, q, scale, options)
        })
    })
}

fn run_smooth(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let dtype = inputs.choice("output")?.parse()?;
    let smooth_type = inputs.get("smooth")?.dtype();
    with_float!("smoothquant", "x", inputs.get("x")?.dtype(), T => {
        with_quantized!("smoothquant", "q", dtype, Q => {
            let (q, scale) = (outputs.take::<Q>("q")?, outputs.take("scale")?);
            let x = inputs.view::<T>("x")?;
            if smooth_type == DType::F32 {
                crate::smoothquant(stream, x, inputs.view::<f32>("smooth")?, q, scale)
            } else {
                crate::smoothquant(stream, x, inputs.view::<T>("smooth")?, q, scale)
            }
        })
    })
}

/// The outputs of a per-row quantizer, with their shapes.
fn named(shape: &[usize], out: reference::Quantization) -> Named<HostTensorF64> {
    let rows = out.scale.len();
    vec![("q", HostTensorF64::new(shape, out.q)), ("scale", HostTensorF64::new([rows], out.scale))]
}

fn reference_per_token(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let x = call.get("x")?;
    let cols = x.shape().last().copied().unwrap_or(1);
    let bound = call.optional("scale_ub").map(|b| b.to_f64()[0] as f32);
    with_quantized!("per_token_quant", "q", call.choice("output")?.parse()?, Q => {
        let out = reference::per_token_quant(&x.to_f64(), cols, bound, Q::FORMAT, round::<Q>);
        Ok(named(x.shape(), out))
    })
}

fn reference_smooth(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (x, smooth) = (call.get("x")?, call.get("smooth")?);
    with_quantized!("smoothquant", "q", call.choice("output")?.parse()?, Q => {
        let out = reference::smoothquant(&x.to_f64(), &smooth.to_f64(), Q::FORMAT, round::<Q>);
        Ok(named(x.shape(), out))
    })
}
