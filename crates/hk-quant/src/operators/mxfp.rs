//! `downcast_to_mxfp` and `upcast_from_mxfp`.

use crate::{kernels, reference};
use hk_core::quant::{BlockRule, BlockScale, MxElement};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensor, HostTensorF64,
    Named, Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E5M2, Result, Stream, bf16, f16};

/// A corner case of `downcast_to_mxfp`.
macro_rules! corner {
    ($label:literal, $dtype:ident, $shape:expr, $axis:literal, $element:literal, $mode:literal) => {
        Case {
            label: $label,
            tensors: &[("x", DType::$dtype, &$shape)],
            scalars: &[
                ("axis", Scalar::Int($axis)),
                ("element", Scalar::Choice($element)),
                ("mode", Scalar::Choice($mode)),
            ],
        }
    };
}

/// A corner case of `upcast_from_mxfp`.
macro_rules! up_corner {
    ($label:literal, $dtype:ident, $q:expr, $scale:expr, $axis:literal, $output:literal) => {
        Case {
            label: $label,
            tensors: &[("q", DType::$dtype, &$q), ("scale", DType::E8M0, &$scale)],
            scalars: &[("axis", Scalar::Int($axis)), ("output", Scalar::Choice($output))],
        }
    };
}

pub(crate) const DOWNCAST_TO_MXFP: Operator = Operator {
    name: "downcast_to_mxfp",
    family: "hk-quant",
    summary: "scale = 2^e per block of 32 along an axis, q = round(x / scale)",
    args: &[
        ArgSpec::input("x", HALVES, 2, "any").ranks(1, 4),
        ArgSpec::output("q", Tolerance::Exact, ELEMENTS, 2, "as x, half of axis if pairs").ranks(1, 4),
        ArgSpec::output("scale", Tolerance::Exact, &[DType::E8M0], 2, "as x, axis / 32").ranks(1, 4),
    ],
    scalars: &[
        AXIS,
        ScalarSpec {
            name: "element",
            default: Scalar::Choice("fp4"),
            choices: &["fp4", "fp8e4m3", "fp8e5m2"],
            summary: "type of the elements",
        },
        ScalarSpec {
            name: "mode",
            default: Scalar::Choice("round_up"),
            choices: &["round_up", "round_down"],
            summary: "rule of the scale from the largest magnitude",
        },
    ],
    kernels: &[&kernels::MX_QUANT, &kernels::MXFP],
    cases: &[
        Case {
            label: "GPT-OSS expert, 2880 x 720 of it, axis 0",
            tensors: &[("x", DType::Bf16, &[1, 2880, 720])],
            scalars: &[("axis", Scalar::Int(1))],
        },
        Case {
            label: "DeepSeek-V3 activations, fp8",
            tensors: &[("x", DType::Bf16, &[64, 7168])],
            scalars: &[("element", Scalar::Choice("fp8e4m3"))],
        },
    ],
    bench: BenchSizes::Rows {
        shapes: &[[61_440, 8192]],
        matrices: &["x"],
        vectors: &[],
        scalars: &[("element", Scalar::Choice("fp8e4m3"))],
    },
    corners: &[
        corner!("rows", Bf16, [40, 256], -1, "fp4", "round_up"),
        corner!("middle axis", Bf16, [3, 64, 272], 1, "fp4", "round_up"),
        corner!("middle axis, f16", F16, [3, 64, 272], 1, "fp8e4m3", "round_down"),
        corner!("middle axis, a short block", Bf16, [3, 70, 272], 1, "fp8e5m2", "round_up"),
        corner!("odd columns", Bf16, [66, 77], 0, "fp8e5m2", "round_up"),
        corner!("odd columns, f16", F16, [66, 77], 0, "fp4", "round_down"),
    ],
    outputs: outputs_down,
    run: run_down,
    reference: reference_down,
    traffic: Traffic::once,
};

pub(crate) const UPCAST_FROM_MXFP: Operator = Operator {
    name: "upcast_from_mxfp",
    family: "hk-quant",
    summary: "out = round(q * scale), a scale per block of 32 along an axis",
    args: &[
        ArgSpec::input("q", ELEMENTS, 2, "as out, half of axis if pairs").ranks(1, 4),
        ArgSpec::input("scale", &[DType::E8M0], 2, "as out, axis / 32")
            .ranks(1, 4)
            .sampled(Sample::Uniform { low: 0.01, high: 4.0 }),
        ArgSpec::output("out", Tolerance::Exact, HALVES, 2, "any").ranks(1, 4),
    ],
    scalars: &[
        AXIS,
        ScalarSpec {
            name: "output",
            default: Scalar::Choice("bf16"),
            choices: &["bf16", "f16"],
            summary: "type of the output",
        },
    ],
    kernels: &[&kernels::MXFP],
    cases: &[
        Case {
            label: "GPT-OSS expert, 2880 x 720 of it, axis 0",
            tensors: &[("q", DType::Fp4x2, &[1, 1440, 720]), ("scale", DType::E8M0, &[1, 90, 720])],
            scalars: &[("axis", Scalar::Int(1))],
        },
        Case {
            label: "DeepSeek-V3 activations",
            tensors: &[("q", DType::Fp4x2, &[64, 3584]), ("scale", DType::E8M0, &[64, 224])],
            scalars: &[],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "61440 x 8192",
        tensors: &[("q", DType::Fp4x2, &[61_440, 4096]), ("scale", DType::E8M0, &[61_440, 256])],
        scalars: &[],
    }]),
    corners: &[
        up_corner!("rows", Fp4x2, [40, 128], [40, 8], -1, "bf16"),
        up_corner!("rows, f16", Fp8E4M3, [40, 256], [40, 8], -1, "f16"),
        up_corner!("odd rows", Fp8E5M2, [40, 101], [40, 4], -1, "bf16"),
        up_corner!("odd rows, f16", Fp4x2, [40, 101], [40, 7], -1, "f16"),
        up_corner!("middle axis", Fp4x2, [3, 32, 272], [3, 2, 272], 1, "bf16"),
        up_corner!("middle axis, f16", Fp8E4M3, [3, 64, 272], [3, 2, 272], 1, "f16"),
        up_corner!("middle axis, a short block", Fp8E4M3, [3, 71, 272], [3, 3, 272], 1, "f16"),
        up_corner!("odd columns", Fp8E5M2, [66, 77], [3, 77], 0, "bf16"),
        up_corner!("odd columns, f16", Fp4x2, [33, 77], [3, 77], 0, "f16"),
    ],
    outputs: outputs_up,
    run: run_up,
    reference: reference_up,
    traffic: Traffic::once,
};

const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const ELEMENTS: &[DType] = &[DType::Fp4x2, DType::Fp8E4M3, DType::Fp8E5M2];
const AXIS: ScalarSpec = ScalarSpec {
    name: "axis",
    default: Scalar::Int(-1),
    choices: &[],
    summary: "axis of the blocks; negative: from the end",
};

/// Runs `$body` with `$e` as the type of the elements of a dtype.
macro_rules! with_mx {
    ($op:literal, $dtype:expr, $e:ident => $body:expr) => {
        match $dtype {
            DType::Fp4x2 => {
                type $e = Fp4x2;
                $body
            }
            DType::Fp8E4M3 => {
                type $e = Fp8E4M3;
                $body
            }
            DType::Fp8E5M2 => {
                type $e = Fp8E5M2;
                $body
            }
            other => Err(Error::dtype($op, "q", other, "fp4e2m1x2, fp8e4m3, fp8e5m2")),
        }
    };
}

fn element<V: Described>(call: &Call<V>) -> Result<DType> {
    Ok(match call.choice("element")? {
        "fp8e4m3" => DType::Fp8E4M3,
        "fp8e5m2" => DType::Fp8E5M2,
        _ => DType::Fp4x2,
    })
}

/// The axis of a tensor of that shape.
fn axis<V: Described>(call: &Call<V>, shape: &[usize]) -> Result<usize> {
    let axis = call.int("axis")?;
    let resolved = if axis < 0 { axis + shape.len() as i64 } else { axis };
    let found = usize::try_from(resolved).ok().filter(|&a| a < shape.len());
    found.ok_or_else(|| Error::argument(call.operator().name, "axis", axis, "an axis"))
}

/// Values per element.
fn per_element(dtype: DType) -> usize {
    if dtype == DType::Fp4x2 { 2 } else { 1 }
}

/// The shape with another length of `axis`.
fn with_axis(shape: &[usize], axis: usize, length: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[axis] = length;
    shape
}

/// `[outer, length, inner]`.
fn around(shape: &[usize], axis: usize) -> [usize; 3] {
    [shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product()]
}

fn outputs_down(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (shape, element) = (&call.get("x")?.shape, element(call)?);
    let axis = axis(call, shape)?;
    let q = with_axis(shape, axis, shape[axis] / per_element(element));
    let scale = with_axis(shape, axis, shape[axis].div_ceil(32));
    Ok(vec![("q", TensorSpec::new(element, q)), ("scale", TensorSpec::new(DType::E8M0, scale))])
}

fn mode<V: Described>(call: &Call<V>) -> Result<BlockScale> {
    Ok(if call.choice("mode")? == "round_down" { BlockScale::DivFloor } else { BlockScale::RoundUp })
}

fn run_down(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    const OP: &str = "downcast_to_mxfp";
    let (inputs, mut outputs) = call.split();
    let (axis, mode) = (inputs.int("axis")? as isize, mode(&inputs)?);
    let (x_type, element) = (inputs.get("x")?.dtype(), element(&inputs)?);
    with_mx!("downcast_to_mxfp", element, E => {
        let (q, scale) = (outputs.take::<E>("q")?, outputs.take("scale")?);
        match x_type {
            DType::Bf16 => crate::downcast_to_mxfp(stream, inputs.view::<bf16>("x")?, q, scale, axis, mode),
            DType::F16 => crate::downcast_to_mxfp(stream, inputs.view::<f16>("x")?, q, scale, axis, mode),
            other => Err(Error::dtype(OP, "x", other, "bf16, f16")),
        }
    })
}

/// Rounds a float to an element.
fn nearest(element: DType) -> impl Fn(f32) -> f64 {
    let fp4 = reference::fp4(Fp4Rounding::NearestAway);
    move |x| match element {
        DType::Fp4x2 => fp4(x),
        DType::Fp8E4M3 => f64::from(Fp8E4M3::from_f32_saturating(x).to_f32()),
        _ => f64::from(Fp8E5M2::from_f32_saturating(x).to_f32()),
    }
}

/// The values of a tensor, transposed so that the axis is last. Pairs of fp4 are unpacked along that axis.
fn values(tensor: &HostTensor, axis: usize) -> Vec<f64> {
    let [outer, length, inner] = around(tensor.shape(), axis);
    let all = tensor.to_f64();
    if tensor.dtype() != DType::Fp4x2 {
        return reference::axis_last(&all, [outer, length, inner]);
    }
    let [even, odd] = [0, 1].map(|half| {
        let half: Vec<f64> = all.iter().skip(half).step_by(2).copied().collect();
        reference::axis_last(&half, [outer, length, inner])
    });
    even.iter().zip(&odd).flat_map(|(a, b)| [*a, *b]).collect()
}

/// The inverse: values with the axis last, `per_element` per element, to a tensor of `shape` elements.
fn tensor(values: &[f64], shape: &[usize], axis: usize, per_element: usize) -> HostTensorF64 {
    let [outer, length, inner] = around(shape, axis);
    let back = [outer, inner, length];
    let parts: Vec<Vec<f64>> = (0..per_element)
        .map(|i| {
            let part: Vec<f64> = values.iter().skip(i).step_by(per_element).copied().collect();
            reference::axis_last(&part, back)
        })
        .collect();
    let values = (0..outer * length * inner).flat_map(|i| parts.iter().map(move |p| p[i])).collect();
    // Pairs lie along the last axis of the values.
    let last = shape.len() - 1;
    HostTensorF64::new(with_axis(shape, last, shape[last] * per_element), values)
}

fn reference_down(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (x, element) = (call.get("x")?, element(call)?);
    let axis = axis(call, x.shape())?;
    let (range, per) = with_mx!("downcast_to_mxfp", element, E => Ok((E::RANGE, E::PER_ELEMENT)))?;
    let rule = BlockRule::new(mode(call)?, range.0, range.1, 1);
    let length = x.shape()[axis];
    let out = reference::mx_quant(&values(x, axis), length, rule, nearest(element));
    let q = with_axis(x.shape(), axis, length / per);
    let scale = with_axis(x.shape(), axis, length.div_ceil(32));
    Ok(vec![("q", tensor(&out.q, &q, axis, per)), ("scale", tensor(&out.scale, &scale, axis, 1))])
}

fn outputs_up(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let q = call.get("q")?;
    let axis = axis(call, &q.shape)?;
    let shape = with_axis(&q.shape, axis, q.shape[axis] * per_element(q.dtype));
    Ok(vec![("out", TensorSpec::new(call.choice("output")?.parse()?, shape))])
}

fn run_up(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let axis = inputs.int("axis")? as isize;
    let is_bf16 = inputs.choice("output")? == "bf16";
    with_mx!("upcast_from_mxfp", inputs.get("q")?.dtype(), E => {
        let (q, scale) = (inputs.view::<E>("q")?, inputs.view("scale")?);
        if is_bf16 {
            crate::upcast_from_mxfp(stream, q, scale, outputs.take::<bf16>("out")?, axis)
        } else {
            crate::upcast_from_mxfp(stream, q, scale, outputs.take::<f16>("out")?, axis)
        }
    })
}

fn reference_up(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (q, scale) = (call.get("q")?, call.get("scale")?);
    let axis = axis(call, q.shape())?;
    let length = q.shape()[axis] * per_element(q.dtype());
    let all = reference::upcast_from_mxfp(&values(q, axis), &values(scale, axis), length);
    Ok(vec![("out", tensor(&all, &with_axis(q.shape(), axis, length), axis, 1))])
}
