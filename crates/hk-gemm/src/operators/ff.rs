//! Feed-forward layers.

use super::{ACTIVATION, Row, act, activation, case, with_half};
use crate::element::sealed::Half as _;
use crate::kernels;
use crate::reference;
use crate::{FfKind, FfOptions, FfPath, ff_fused_workspace};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, Case, Described, DeviceCall, HostCall, HostTensorF64, Operator, Sample,
    Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream};

pub(super) const ROWS: &[Row] = &[Row::without_tiles(FF_FUSED_GATED), Row::without_tiles(FF_FUSED_UNGATED)];

const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const TOLERANCE: Tolerance = Tolerance::Sum { terms: 1.0 / (1u64 << 18) as f64 };

const X: ArgSpec = ArgSpec::input("x", HALVES, 2, "[M, K]");
/// Small, so that h is neither.
const UP_SAMPLE: Sample = Sample::Normal { mean: 0.0, deviation: 1.0 / 32.0 };
const W_DOWN: ArgSpec = ArgSpec::input("w_down", HALVES, 2, "[I, K]");
const Y: ArgSpec = ArgSpec::output("y", TOLERANCE, HALVES, 2, "[M, K]");

const PATH: ScalarSpec = ScalarSpec {
    name: "path",
    default: Scalar::Choice("auto"),
    choices: &["auto", "fused", "split", "tiles"],
    summary: "both GEMMs in one kernel, or one after the other",
};
const fn path(name: &'static str) -> (&'static str, Scalar) {
    ("path", Scalar::Choice(name))
}

/// Each entry point of a type: rows, slices of the intermediate columns, strips of columns, and what is left of them.
macro_rules! corners {
    ($name:ident: $times:literal) => {
        static $name: [Case; 14] = {
            const CASES: [[Case; 7]; 2] = [corners!(@ $times Bf16), corners!(@ $times F16)];
            let mut all = [CASES[0][0]; 14];
            let mut i = 0;
            while i < all.len() {
                all[i] = CASES[i / 7][i % 7];
                i += 1;
            }
            all
        };
    };
    (@ $times:literal $dtype:ident) => {
        [
            case!("16 rows", x: $dtype [13, 520], w_up: $dtype [{ $times * 40 }, 520], w_down: $dtype [40, 520]; path("fused"), act("silu")),
            case!("32 rows", x: $dtype [17, 136], w_up: $dtype [{ $times * 72 }, 136], w_down: $dtype [72, 136]; path("fused")),
            case!("64 rows", x: $dtype [63, 264], w_up: $dtype [{ $times * 24 }, 264], w_down: $dtype [24, 264]; path("fused"), act("gelu")),
            case!("16 rows, split", x: $dtype [9, 136], w_up: $dtype [{ $times * 520 }, 136], w_down: $dtype [520, 136]; path("split"), act("relu")),
            case!("32 rows, split", x: $dtype [32, 72], w_up: $dtype [{ $times * 264 }, 72], w_down: $dtype [264, 72]; path("split"), act("tanh")),
            case!("64 rows, split", x: $dtype [50, 72], w_up: $dtype [{ $times * 40 }, 72], w_down: $dtype [40, 72]; path("split"), act("gelu_tanh")),
            case!("tiles", x: $dtype [70, 35], w_up: $dtype [{ $times * 29 }, 35], w_down: $dtype [29, 35]; act("silu")),
        ]
    };
}
corners!(GATED_CORNERS: 2);
corners!(CORNERS: 1);

const FF_FUSED_GATED: Operator = Operator {
    name: "ff_fused_gated",
    family: "hk-gemm",
    summary: "y = (activation(x w_up[..I]^T) * (x w_up[I..]^T)) w_down",
    args: &[X, ArgSpec::input("w_up", HALVES, 2, "[2 I, K]").sampled(UP_SAMPLE), W_DOWN, Y],
    scalars: &[ACTIVATION, PATH],
    kernels: &[&kernels::FF, &kernels::A16W16, &kernels::A16W16_DECODE, &kernels::REDUCE, &kernels::GMM],
    cases: &[
        case!("Llama-3 8B of 8 GPUs, 1 token", x: Bf16 [1, 4096], w_up: Bf16 [3584, 4096], w_down: Bf16 [1792, 4096]; act("silu")),
        case!("Llama-3 8B of 8 GPUs, 16 tokens", x: Bf16 [16, 4096], w_up: Bf16 [3584, 4096], w_down: Bf16 [1792, 4096]; act("silu")),
        case!("DeepSeek-V3 shared expert of 8 GPUs, 128 tokens", x: Bf16 [128, 7168], w_up: Bf16 [512, 7168], w_down: Bf16 [256, 7168]; act("silu")),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x"], axis1: &[] },
    corners: &GATED_CORNERS,
    outputs: |call| {
        let x = call.get("x")?;
        Ok(vec![("y", TensorSpec::new(x.dtype(), x.shape()))])
    },
    run: |stream: &Stream, call: &mut DeviceCall| run(true, stream, call),
    reference: |call: &HostCall| feed_forward(true, call),
    traffic: Traffic::once,
};

const FF_FUSED_UNGATED: Operator = Operator {
    name: "ff_fused_ungated",
    summary: "y = activation(x w_up^T) w_down",
    args: &[X, ArgSpec::input("w_up", HALVES, 2, "[I, K]").sampled(UP_SAMPLE), W_DOWN, Y],
    cases: &[
        case!("Falcon 7B of 8 GPUs, 4 tokens", x: Bf16 [4, 4544], w_up: Bf16 [2272, 4544], w_down: Bf16 [2272, 4544]; act("gelu")),
        case!("hidden 2048, 64 tokens", x: F16 [64, 2048], w_up: F16 [2048, 2048], w_down: F16 [2048, 2048]; act("relu")),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x"], axis1: &[] },
    corners: &CORNERS,
    run: |stream: &Stream, call: &mut DeviceCall| run(false, stream, call),
    reference: |call: &HostCall| feed_forward(false, call),
    ..FF_FUSED_GATED
};

/// M, K and I.
fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 3]> {
    match (call.get("x")?.shape(), call.get("w_down")?.shape()) {
        (&[m, k], &[i, down_k]) if k == down_k => Ok([m, k, i]),
        (_, w) => Err(Error::shape(call.operator().name, "w_down", w, "[I, K], K that of x")),
    }
}

fn run(gated: bool, stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let path = match inputs.choice("path")? {
        "fused" => Some(FfPath::Fused),
        "split" => Some(FfPath::Split),
        "tiles" => Some(FfPath::Tiles),
        _ => None,
    };
    let options = FfOptions { activation: activation(&inputs), path };
    with_half!(inputs, "x", T => {
        let info = stream.device().info();
        let kind = if gated { FfKind::Gated } else { FfKind::Ungated };
        let len = ff_fused_workspace(info, T::PRECISION, sizes(&inputs)?, kind, options);
        let workspace = outputs.workspace(stream, len)?;
        let (x, w_up, w_down) = (inputs.view::<T>("x")?, inputs.view("w_up")?, inputs.view("w_down")?);
        let run = if gated { crate::ff_fused_gated } else { crate::ff_fused_ungated };
        run(stream, x, w_up, w_down, outputs.take("y")?, workspace, options)
    })
}

fn feed_forward(gated: bool, call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let [x, w_up, w_down] = [call.get("x")?, call.get("w_up")?, call.get("w_down")?];
    let (sizes, dtype) = (sizes(call)?, x.dtype());
    let [of_x, of_up, of_down] = [x, w_up, w_down].map(|t| t.to_f64());
    let sums = reference::feed_forward(&of_x, &of_up, &of_down, sizes, gated, activation(call), dtype);
    let shape = x.shape().to_vec();
    Ok(vec![("y", HostTensorF64::new(shape, sums.values).with_magnitudes(sums.magnitudes))])
}
