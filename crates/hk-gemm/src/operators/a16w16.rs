//! Products of 16-bit floats.

use super::{ACTIVATION, BIAS, FLOATS, HALVES, SPLITS, TERMS_16, TILE, Y_DTYPE, finished, options, workspace, y, y_spec};
use crate::{Half, Precision, kernels, reference};
use hk_core::registry::{
    ArgSpec, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator, Scalar, ScalarSpec,
    TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Result, Stream, bf16, f16, with_float};

const A: ArgSpec = ArgSpec::input("a", HALVES, 2, "[M, K]");
const W: ArgSpec = ArgSpec::input("w", HALVES, 2, "[N, K]");

macro_rules! case {
    ($label:expr, $dtype:ident, [$($m:literal),+] x [$($n:literal),+] $(, bias $bias:ident [$($b:literal),+])? $(; $($scalar:expr),+)?) => {
        Case {
            label: $label,
            tensors: &[("a", DType::$dtype, &[$($m),+]), ("w", DType::$dtype, &[$($n),+]) $(, ("bias", DType::$bias, &[$($b),+]))?],
            scalars: &[$($($scalar),+)?],
        }
    };
}

const fn tile(name: &'static str) -> (&'static str, Scalar) {
    ("tile", Scalar::Choice(name))
}
const fn splits(n: i64) -> (&'static str, Scalar) {
    ("splits", Scalar::Int(n))
}
const fn to(dtype: &'static str) -> (&'static str, Scalar) {
    ("y_dtype", Scalar::Choice(dtype))
}
const fn act(name: &'static str) -> (&'static str, Scalar) {
    ("activation", Scalar::Choice(name))
}

/// Each entry point of a type, over the ends of tiles.
macro_rules! corners {
    ($name:ident: $case:ident) => {
        static $name: [Case; 18] = {
            const CASES: [[Case; 9]; 2] = [corners!(@ $case Bf16), corners!(@ $case F16)];
            let mut all = [CASES[0][0]; 18];
            let mut i = 0;
            while i < all.len() {
                all[i] = CASES[i / 9][i % 9];
                i += 1;
            }
            all
        };
    };
    (@ plain $dtype:ident) => {
        [
            case!("256 x 256", $dtype, [270, 200] x [300, 200], bias $dtype [300]; tile("256x256"), act("gelu")),
            case!("128 x 128", $dtype, [130, 96] x [200, 96]; tile("128x128"), splits(2), to("f32")),
            case!("64 x 64", $dtype, [65, 264] x [70, 264], bias F32 [70]; tile("64x64"), splits(3), act("relu")),
            case!("elements", $dtype, [33, 77] x [50, 77], bias F16 [50]; tile("elements"), to("f16"), act("tanh")),
            case!("16 x 16", $dtype, [13, 1544] x [40, 1544], bias Bf16 [40]; tile("16x16"), act("silu")),
            case!("16 x 32", $dtype, [16, 2056] x [40, 2056]; tile("16x32"), splits(2), act("gelu_tanh")),
            case!("32 x 32", $dtype, [17, 520] x [40, 520]; tile("32x32")),
            case!("64 x 32", $dtype, [63, 344] x [40, 344]; tile("64x32"), to("f32")),
            case!("no columns of K", $dtype, [3, 0] x [5, 0], bias F32 [5]),
        ]
    };
    (@ atomic $dtype:ident) => {
        [
            case!("256 x 256", $dtype, [260, 64] x [257, 64], y [260, 257]; tile("256x256")),
            case!("128 x 128", $dtype, [130, 96] x [129, 96], y [130, 129]; tile("128x128"), splits(2)),
            case!("64 x 64", $dtype, [65, 264] x [70, 264], y [65, 70]; tile("64x64"), splits(3), keep()),
            case!("elements", $dtype, [33, 77] x [50, 77], y [33, 50]; tile("elements"), splits(2)),
            case!("16 x 16", $dtype, [13, 1544] x [40, 1544], y [13, 40]; tile("16x16"), keep()),
            case!("16 x 32", $dtype, [16, 2056] x [40, 2056], y [16, 40]; tile("16x32"), splits(2)),
            case!("32 x 32", $dtype, [17, 520] x [40, 520], y [17, 40]; tile("32x32")),
            case!("64 x 32", $dtype, [63, 344] x [40, 344], y [63, 40]; tile("64x32")),
            case!("no columns of K", $dtype, [3, 0] x [5, 0], y [3, 5]; keep()),
        ]
    };
    (@ gated $dtype:ident) => {
        [
            case!("256 x 256", $dtype, [257, 96] x [300, 96]; tile("256x256"), act("silu")),
            case!("128 x 128", $dtype, [130, 200] x [260, 200]; tile("128x128"), splits(2)),
            case!("64 x 64", $dtype, [65, 264] x [70, 264]; tile("64x64"), act("gelu"), to("f32")),
            case!("64 x 64, 3 splits", $dtype, [65, 264] x [70, 264]; tile("64x64"), splits(3), act("gelu_tanh")),
            case!("elements", $dtype, [33, 77] x [50, 77]; tile("elements"), to("f16")),
            case!("16 x 32", $dtype, [13, 2056] x [86, 2056]; tile("16x32"), act("silu")),
            case!("32 x 32", $dtype, [17, 520] x [80, 520]; tile("32x32"), splits(2)),
            case!("64 x 32", $dtype, [63, 344] x [80, 344]; tile("64x32")),
            case!("no columns of K", $dtype, [3, 0] x [6, 0]),
        ]
    };
}
corners!(CORNERS: plain);
corners!(ATOMIC_CORNERS: atomic);
corners!(GATED_CORNERS: gated);

pub(super) const GEMM_A16W16: Operator = Operator {
    name: "gemm_a16w16",
    family: "hk-gemm",
    summary: "y = activation(a w^T + bias)",
    args: &[A, W, BIAS, y(2, "[M, N]", TERMS_16)],
    scalars: &[Y_DTYPE, ACTIVATION, TILE, SPLITS],
    kernels: &[&kernels::TILES16, &kernels::SKINNY16, &kernels::REDUCE],
    cases: &[
        case!("Llama-3 8B q, k, v, 16 tokens", Bf16, [16, 4096] x [6144, 4096]),
        case!("GPT-OSS router, 128 tokens", Bf16, [128, 2880] x [128, 2880], bias Bf16 [128]),
        case!("512 x 512 x 512", Bf16, [512, 512] x [512, 512]),
    ],
    corners: &CORNERS,
    outputs: |call: &CallSpec| y_spec(call, false),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs, "gemm_a16w16")?;
        let bias = super::bias(&inputs)?;
        with_half!("gemm_a16w16", inputs.get("a")?.dtype(), T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, <T as Half>::PRECISION)?;
            let (a, w) = (inputs.view::<T>("a")?, inputs.view::<T>("w")?);
            with_float!("gemm_a16w16", "y", outputs.dtype("y")?, Y => {
                crate::gemm_a16w16(stream, a, w, bias, outputs.take::<Y>("y")?, space, options)
            })
        })
    },
    reference: |call: &HostCall| {
        let a = call.get("a")?;
        let k = a.shape().last().copied().unwrap_or(0);
        let sums = reference::product(&a.to_f64(), &call.get("w")?.to_f64(), [a.shape()[0], call.get("w")?.shape()[0], k]);
        let bias = call.optional("bias").map(|b| b.to_f64()).unwrap_or_default();
        Ok(vec![("y", finished(call, sums, &bias, y_spec(&call.spec(), false)?[0].1.shape.clone())?)])
    },
    traffic: Traffic::once,
};
