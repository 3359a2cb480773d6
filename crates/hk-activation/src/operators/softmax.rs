//! `softmax`.

use super::{FLOATS, Y_DTYPE_OR_F32, expect_columns, y_as_x, y_dtype};
use crate::softmax::WIDEST;
use crate::{kernels, reference, softmax_workspace};
use hk_core::registry::{
    ArgSpec, BenchSizes, Case, Described, DeviceCall, HostCall, HostTensorF64, Operator, PUBLISHED_ROWS,
    Role, Scalar, Tolerance, Traffic,
};
use hk_core::{DType, Stream, with_float};

const X: ArgSpec = ArgSpec::input("x", FLOATS, 2, "[.., cols]").ranks(1, 5);

macro_rules! case {
    ($dtype:ident $y:literal $rows:literal $cols:literal) => {
        case!(concat!($rows, " rows of ", $cols, ", to ", $y), $dtype $y $rows $cols)
    };
    ($label:expr, $dtype:ident $y:literal $rows:literal $cols:literal) => {
        Case {
            label: $label,
            tensors: &[("x", DType::$dtype, &[$rows, $cols])],
            scalars: &[("y_dtype", Scalar::Choice($y))],
        }
    };
}

/// Each entry point, with enough rows that blocks loop on one compute unit. Rows of odd length take the scalar path.
macro_rules! corners {
    ($dtype:ident) => {
        [
            case!($dtype "as_x" 300 128),
            case!($dtype "f32" 150 120),
            case!($dtype "as_x" 100 512),
            case!($dtype "f32" 40 1024),
            case!($dtype "as_x" 20 2048),
            case!($dtype "as_x" 30 4096),
            case!($dtype "as_x" 5 8192),
            case!($dtype "f32" 5 16384),
            case!($dtype "as_x" 4 32760),
            case!($dtype "as_x" 2 32776),
            case!($dtype "f32" 100 509),
            case!($dtype "as_x" 20 2001),
            case!($dtype "as_x" 20 4001),
            case!($dtype "f32" 10 8001),
            case!($dtype "as_x" 5 16001),
            case!($dtype "f32" 4 32001),
            case!($dtype "as_x" 2 32769),
        ]
    };
}

pub(crate) const SOFTMAX: Operator = Operator {
    name: "softmax",
    family: "hk-activation",
    summary: "y = exp(x - max(x)) / sum(exp(x - max(x)))",
    args: &[X, ArgSpec { name: "y", role: Role::Out(Tolerance::Elementwise), ..X }],
    scalars: &[Y_DTYPE_OR_F32],
    kernels: &[&kernels::SOFTMAX],
    cases: &[
        case!("4096 rows of 128", Bf16 "as_x" 4096 128),
        case!("attention scores, 128 rows of 4096", Bf16 "as_x" 128 4096),
        case!("Llama-3 logits, batch 4", Bf16 "f32" 4 128_256),
        case!("GPT-OSS logits, batch 1", F32 "as_x" 1 201_088),
    ],
    bench: BenchSizes::Several(&[
        BenchSizes::rows(PUBLISHED_ROWS, &["x"], &[]),
        BenchSizes::rows(&[[64, 128_256], [2_097_152, 128], [40_960, 8192], [16_384, 32_768]], &["x"], &[]),
    ]),
    corners: &CORNERS,
    outputs: y_as_x,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let f32_out = y_dtype(&inputs)? == DType::F32;
        let x = inputs.get("x")?;
        let cols = x.shape().last().copied().unwrap_or(0);
        let len = softmax_workspace(stream.device().info(), x.shape().iter().rev().skip(1).product(), cols);
        let workspace = if len == 0 { None } else { Some(outputs.workspace(stream, len)?) };
        with_float!("softmax", "x", x.dtype(), T => {
            if f32_out {
                crate::softmax(stream, inputs.view::<T>("x")?, outputs.take::<f32>("y")?, workspace)
            } else {
                crate::softmax(stream, inputs.view::<T>("x")?, outputs.take::<T>("y")?, workspace)
            }
        })
    },
    reference: |call: &HostCall| {
        let x = call.get("x")?;
        let cols = x.shape().last().copied().unwrap_or(0);
        expect_columns("softmax", x.shape(), cols)?;
        let values = reference::softmax(&x.to_f64(), cols);
        Ok(vec![("y", HostTensorF64::new(x.shape(), values))])
    },
    traffic: |call: &HostCall| {
        // Rows that do not fit registers are read twice.
        let Traffic { read, written } = Traffic::once(call);
        let cols = call.get("x").ok().and_then(|x| x.shape().last().copied());
        let reads = if cols.is_some_and(|cols| cols > WIDEST) { 2 } else { 1 };
        Traffic { read: reads * read, written }
    },
};

static CORNERS: [Case; 51] = {
    const CASES: [[Case; 17]; 3] = [corners!(Bf16), corners!(F16), corners!(F32)];
    let mut all = [CASES[0][0]; 51];
    let mut i = 0;
    while i < all.len() {
        all[i] = CASES[i / 17][i % 17];
        i += 1;
    }
    all
};
