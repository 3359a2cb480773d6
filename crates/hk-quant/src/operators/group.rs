//! `group_quant`.

use super::{OUTPUT, Q, SCALE, X, round};
use crate::{GroupOptions, GroupScaleRule, kernels, reference};
use hk_core::quant::{GroupSize, Quantized};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Scalar, ScalarSpec, TensorSpec, Traffic,
};
use hk_core::{DType, E8M0, Error, Result, Stream, TensorViewMut, with_float, with_quantized};

pub(crate) const GROUP_QUANT: Operator = Operator {
    name: "group_quant",
    family: "hk-quant",
    summary: "scale = max |x| / qmax per group of columns, q = round(x / scale)",
    args: &[
        X,
        Q,
        ArgSpec {
            dtypes: &[DType::F32, DType::E8M0],
            rank: (2, 2),
            shape: "[rows, groups], column-major [groups, rows]",
            ..SCALE
        },
    ],
    scalars: &[
        OUTPUT,
        ScalarSpec {
            name: "group",
            default: Scalar::Int(128),
            choices: &[],
            summary: "columns per scale: 32, 64, 128",
        },
        ScalarSpec {
            name: "scale",
            default: Scalar::Choice("f32"),
            choices: &["f32", "pow2", "e8m0"],
            summary: "scales: f32, powers of two in f32, or e8m0",
        },
        ScalarSpec {
            name: "col_major",
            default: Scalar::Bool(false),
            choices: &[],
            summary: "scales are column-major",
        },
    ],
    kernels: &[&kernels::GROUP_QUANT],
    cases: &[
        Case { label: "DeepSeek-V3, 64 tokens", tensors: &[("x", DType::Bf16, &[64, 7168])], scalars: &[] },
        Case {
            label: "DeepSeek-V3 experts, 128 tokens, column-major",
            tensors: &[("x", DType::Bf16, &[128, 2048])],
            scalars: &[("col_major", Scalar::Bool(true))],
        },
    ],
    bench: BenchSizes::Rows {
        shapes: &[[4096, 7168], [51_200, 8192]],
        matrices: &["x"],
        vectors: &[],
        scalars: &[("output", Scalar::Choice("fp8e4m3"))],
    },
    corners: CORNERS,
    outputs,
    run,
    reference: reference_group,
    traffic: Traffic::once,
};

tile_corners!(CORNERS, []:
    Bf16 [("group", Scalar::Int(128))],
    F16 [("group", Scalar::Int(64)), ("output", Scalar::Choice("fp8e4m3fnuz")), ("scale", Scalar::Choice("pow2"))],
    F32 [("group", Scalar::Int(32)), ("output", Scalar::Choice("i8")), ("scale", Scalar::Choice("e8m0")),
        ("col_major", Scalar::Bool(true))]);

/// Columns per group, from the scalar `name`.
pub(crate) fn group_size<V: Described>(call: &Call<V>, name: &'static str) -> Result<GroupSize> {
    match call.int(name)? {
        32 => Ok(GroupSize::G32),
        64 => Ok(GroupSize::G64),
        128 => Ok(GroupSize::G128),
        other => Err(Error::argument(call.operator().name, name, other, "32, 64 or 128")),
    }
}

fn options<V: Described>(call: &Call<V>) -> Result<GroupOptions> {
    let group = group_size(call, "group")?;
    let scale_rule = match call.choice("scale")? {
        "f32" => GroupScaleRule::Exact,
        _ => GroupScaleRule::PowerOfTwo,
    };
    Ok(GroupOptions { group, scale_rule })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let x = call.get("x")?;
    let rows = x.shape.iter().rev().skip(1).product::<usize>();
    let groups = x.shape.last().copied().unwrap_or(1).div_ceil(options(call)?.group.columns());
    let shape = if call.bool("col_major")? { [groups, rows] } else { [rows, groups] };
    let scales = if call.choice("scale")? == "e8m0" { DType::E8M0 } else { DType::F32 };
    let dtype = call.choice("output")?.parse()?;
    Ok(vec![("q", TensorSpec::new(dtype, x.shape())), ("scale", TensorSpec::new(scales, shape))])
}

/// The scales as `[rows, groups]`.
pub(super) fn as_rows<T: hk_core::Element>(
    scale: TensorViewMut<T>,
    col_major: bool,
) -> Result<TensorViewMut<T>> {
    if col_major { scale.transpose(0, 1) } else { Ok(scale) }
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = options(&inputs)?;
    let dtype = inputs.choice("output")?.parse()?;
    let col_major = inputs.bool("col_major")?;
    with_float!("group_quant", "x", inputs.get("x")?.dtype(), T => {
        with_quantized!("group_quant", "q", dtype, Q => {
            let (x, q) = (inputs.view::<T>("x")?, outputs.take::<Q>("q")?);
            if inputs.choice("scale")? == "e8m0" {
                let scale = as_rows(outputs.take::<E8M0>("scale")?, col_major)?;
                crate::group_quant(stream, x, q, scale, options)
            } else {
                let scale = as_rows(outputs.take::<f32>("scale")?, col_major)?;
                crate::group_quant(stream, x, q, scale, options)
            }
        })
    })
}

/// The matrix, transposed for column-major scales.
pub(super) fn turned(values: Vec<f64>, rows: usize, col_major: bool) -> HostTensorF64 {
    let cols = values.len() / rows.max(1);
    if !col_major {
        return HostTensorF64::new([rows, cols], values);
    }
    let turned = (0..values.len()).map(|i| values[i % rows * cols + i / rows]).collect();
    HostTensorF64::new([cols, rows], turned)
}

fn reference_group(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let x = call.get("x")?;
    let cols = x.shape().last().copied().unwrap_or(1);
    let rows = x.shape().iter().rev().skip(1).product::<usize>();
    let options = options(call)?;
    with_quantized!("group_quant", "q", call.choice("output")?.parse()?, Q => {
        let group = options.group.columns();
        let out = reference::group_quant(&x.to_f64(), cols, group, options.scale_rule, Q::FORMAT, round::<Q>);
        let scale = turned(out.scale, rows, call.bool("col_major")?);
        Ok(vec![("q", HostTensorF64::new(x.shape(), out.q)), ("scale", scale)])
    })
}
