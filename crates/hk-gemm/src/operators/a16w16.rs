//! GEMMs of 16-bit floats.

use super::{
    ACTIVATION, BATCH_INVARIANT, BATCHED_BIAS, BIAS, Row, SKIP_REDUCE, SPLITS, TILE, W_SHUFFLED, Y_DTYPE,
    accumulate, act, activation, activations, as_y, bias, case, choice, finished, large, optional_f64,
    options, sizes, splits, tile, to, w_shuffled, weight, weights, with_half, workspace, y, y_dtype,
    y_outputs, y_spec,
};
use crate::element::sealed::Half as _;
use crate::gemm::table::Variant;
use crate::kernels;
use crate::reference::{self, Sums};
use crate::{GemmConfig, GemmTile, Precision};
use hk_core::registry::{
    ArgSpec, BenchSizes, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator, Scalar,
    ScalarSpec, Tolerance, Traffic,
};
use hk_core::{Arch, DType, Result, Stream, with_float};

pub(super) const ROWS: &[Row] = &[
    Row::new(GEMM_A16W16, |call| choice::plain(call, Variant::Plain)),
    Row::new(GEMM_A16W16_ATOMIC, |call| choice::atomic(choice::plain(call, Variant::Plain)?)),
    Row::new(GEMM_A16W16_GATED, |call| choice::plain(call, Variant::Gated)),
    Row::new(BATCHED_GEMM_BF16, |call| choice::plain(call, Variant::Plain)),
];

const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const A: ArgSpec = ArgSpec::input("a", HALVES, 2, "[M, K]");
const W: ArgSpec = ArgSpec::input("w", HALVES, 2, "[N, K]");

/// Error of a sum in f32, in its magnitude.
pub(super) const TERMS: f64 = 1.0 / (1u64 << 18) as f64;

const ACCUMULATE: ScalarSpec = ScalarSpec {
    name: "accumulate",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "add to y, rather than to zero",
};
const fn keep() -> (&'static str, Scalar) {
    ("accumulate", Scalar::Bool(true))
}

/// Each entry point of a type, over the ends of tiles.
macro_rules! corners {
    ($name:ident: $case:ident, $each:literal) => {
        static $name: [Case; 2 * $each] = {
            const CASES: [[Case; $each]; 2] = [corners!(@ $case Bf16), corners!(@ $case F16)];
            let mut all = [CASES[0][0]; 2 * $each];
            let mut i = 0;
            while i < all.len() {
                all[i] = CASES[i / $each][i % $each];
                i += 1;
            }
            all
        };
    };
    (@ plain $dtype:ident) => {
        [
            case!("256 x 256", a: $dtype [270, 200], w: $dtype [300, 200], bias: $dtype [300]; tile("256x256"), act("gelu")),
            case!("128 x 256", a: $dtype [140, 200], w: $dtype [300, 200], bias: $dtype [300]; tile("128x256"), splits(2), act("silu")),
            case!("128 x 128", a: $dtype [130, 96], w: $dtype [200, 96]; tile("128x128"), splits(2), to("f32")),
            case!("64 x 128", a: $dtype [70, 296], w: $dtype [132, 296], bias: $dtype [132]; tile("64x128"), splits(2), act("gelu")),
            case!("64 x 64, shuffled", a: $dtype [65, 288], w: $dtype [80, 288], bias: F32 [80]; tile("64x64"), splits(3), act("relu6"), w_shuffled()),
            case!("elements", a: $dtype [33, 77], w: $dtype [50, 77], bias: F16 [50]; tile("elements"), to("f16"), act("tanh")),
            case!("16 x 16", a: $dtype [13, 1544], w: $dtype [40, 1544], bias: Bf16 [40]; tile("16x16"), act("silu")),
            case!("16 x 16, twice the waves", a: $dtype [9, 1032], w: $dtype [24, 1032]; tile("16x16-twice")),
            case!("16 x 32", a: $dtype [16, 2056], w: $dtype [40, 2056]; tile("16x32"), splits(2), act("gelu_tanh")),
            case!("32 x 32", a: $dtype [17, 520], w: $dtype [40, 520]; tile("32x32")),
            case!("64 x 32", a: $dtype [63, 344], w: $dtype [40, 344]; tile("64x32"), to("f32")),
            case!("no columns of K", a: $dtype [3, 0], w: $dtype [5, 0], bias: F32 [5]),
            case!("split-K slices unsummed", a: $dtype [17, 1000], w: $dtype [40, 1000], bias: F32 [40]; tile("32x32"), splits(2), to("f32"), ("skip_reduce", Scalar::Bool(true))),
            case!("batch-invariant", a: $dtype [17, 520], w: $dtype [40, 520], bias: $dtype [40]; ("batch_invariant", Scalar::Bool(true))),
        ]
    };
    (@ batched $dtype:ident) => {
        [
            case!("256 x 256", a: $dtype [2, 20, 96], w: $dtype [2, 257, 96], bias: $dtype [2, 257]; tile("256x256")),
            case!("128 x 128", a: $dtype [3, 130, 96], w: $dtype [3, 40, 96]; tile("128x128"), splits(2), to("f32")),
            case!("64 x 64", a: $dtype [2, 65, 264], w: $dtype [2, 70, 264], bias: F32 [2, 1, 70]; tile("64x64"), splits(3), act("relu")),
            case!("elements", a: $dtype [2, 33, 77], w: $dtype [2, 50, 77], bias: F16 [2, 50]; tile("elements"), to("f16")),
            case!("16 x 16", a: $dtype [4, 13, 520], w: $dtype [4, 40, 520], bias: Bf16 [4, 40]; tile("16x16")),
            case!("16 x 32", a: $dtype [2, 16, 2056], w: $dtype [2, 40, 2056]; tile("16x32"), splits(2)),
            case!("32 x 32", a: $dtype [2, 17, 520], w: $dtype [2, 40, 520]; tile("32x32")),
            case!("64 x 32", a: $dtype [3, 63, 128], w: $dtype [3, 40, 128]; tile("64x32"), to("f32")),
            case!("no columns of K", a: $dtype [2, 3, 0], w: $dtype [2, 5, 0], bias: F32 [2, 5]),
        ]
    };
    (@ atomic $dtype:ident) => {
        [
            case!("256 x 256", a: $dtype [260, 64], w: $dtype [257, 64], y: F32 [260, 257]; tile("256x256")),
            case!("128 x 128", a: $dtype [130, 96], w: $dtype [129, 96], y: F32 [130, 129]; tile("128x128"), splits(2)),
            case!("64 x 64", a: $dtype [65, 264], w: $dtype [70, 264], y: F32 [65, 70]; tile("64x64"), splits(3), keep()),
            case!("elements", a: $dtype [33, 77], w: $dtype [50, 77], y: F32 [33, 50]; tile("elements"), splits(2)),
            case!("16 x 16", a: $dtype [13, 1544], w: $dtype [40, 1544], y: F32 [13, 40]; tile("16x16"), keep()),
            case!("16 x 32", a: $dtype [16, 2056], w: $dtype [40, 2056], y: F32 [16, 40]; tile("16x32"), splits(2)),
            case!("32 x 32", a: $dtype [17, 520], w: $dtype [40, 520], y: F32 [17, 40]; tile("32x32")),
            case!("64 x 32", a: $dtype [63, 344], w: $dtype [40, 344], y: F32 [63, 40]; tile("64x32")),
            case!("no columns of K", a: $dtype [3, 0], w: $dtype [5, 0], y: F32 [3, 5]; keep()),
        ]
    };
    (@ gated $dtype:ident) => {
        [
            case!("256 x 256", a: $dtype [257, 96], w: $dtype [300, 96]; tile("256x256"), act("silu")),
            case!("128 x 256", a: $dtype [140, 104], w: $dtype [540, 104]; tile("128x256"), act("gelu")),
            case!("128 x 128", a: $dtype [130, 200], w: $dtype [260, 200]; tile("128x128"), splits(2)),
            case!("64 x 64", a: $dtype [65, 264], w: $dtype [70, 264]; tile("64x64"), act("gelu"), to("f32")),
            case!("64 x 64, 3 splits", a: $dtype [65, 264], w: $dtype [70, 264]; tile("64x64"), splits(3), act("gelu_tanh")),
            case!("elements", a: $dtype [33, 77], w: $dtype [50, 77]; tile("elements"), to("f16")),
            case!("16 x 32", a: $dtype [13, 2056], w: $dtype [86, 2056]; tile("16x32"), act("silu")),
            case!("32 x 32", a: $dtype [17, 520], w: $dtype [80, 520]; tile("32x32"), splits(2)),
            case!("64 x 32", a: $dtype [63, 344], w: $dtype [80, 344]; tile("64x32")),
            case!("no columns of K", a: $dtype [3, 0], w: $dtype [6, 0]),
        ]
    };
}
corners!(CORNERS: plain, 14);
corners!(ATOMIC_CORNERS: atomic, 9);
corners!(GATED_CORNERS: gated, 10);
corners!(BATCHED_CORNERS: batched, 9);

pub(super) const GEMM_A16W16: Operator = Operator {
    name: "gemm_a16w16",
    family: "hk-gemm",
    summary: "y = activation(a w^T + bias)",
    args: &[A, W, BIAS, y(2, "[M, N], or [splits, M, N]", TERMS).ranks(2, 3)],
    scalars: &[Y_DTYPE, ACTIVATION, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT, SKIP_REDUCE],
    kernels: &[&kernels::A16W16, &kernels::A16W16_DECODE, &kernels::REDUCE],
    cases: &[
        case!("Llama-3 8B q, k, v, 16 tokens", a: Bf16 [16, 4096], w: Bf16 [6144, 4096]),
        case!("GPT-OSS router, 128 tokens", a: Bf16 [128, 2880], w: Bf16 [128, 2880], bias: Bf16 [128]),
        case!("512 x 512 x 512", a: Bf16 [512, 512], w: Bf16 [512, 512]),
        case!("a block of 4096 x 4096 x 4096", a: Bf16 [256, 4096], w: Bf16 [256, 4096]; tile("256x256")),
        case!("a block of 8192 x 8192 x 8192", a: Bf16 [256, 8192], w: Bf16 [256, 8192]; tile("256x256")),
    ],
    bench: BenchSizes::Cases(&large!(Bf16)),
    corners: &CORNERS,
    outputs: y_outputs,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, bias) = (options(&inputs)?, bias(&inputs)?);
        with_half!(inputs, "a", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_float!("gemm_a16w16", "y", y_dtype(&inputs)?, Y => {
                crate::gemm_a16w16(stream, a, w, bias, outputs.take::<Y>("y")?, space, options)
            })
        })
    },
    reference: |call: &HostCall| {
        if call.bool("skip_reduce").unwrap_or(false) {
            partial_sums(call)
        } else {
            finished(call, product(call)?)
        }
    },
    traffic: Traffic::once,
};

/// The partial sums of split-K slices as AMD targets have them; the bias is part of the first. Slices of other targets may end at other
/// columns: the corner case has a K whose slices are the same on all.
fn partial_sums(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let ([_, m, n, k], options) = (sizes(call)?, options(call)?);
    let precision = if activations(call)?.dtype() == DType::F16 { Precision::F16 } else { Precision::Bf16 };
    let config = options.config.unwrap_or(GemmConfig { tile: GemmTile::T64x64, splits: 1, group: 1 });
    let (each, _) = config.slices(Arch::Gfx942, k, precision, 1);
    let (a, w) = (activations(call)?.to_f64(), weights(call)?);
    let mut y = HostTensorF64::new([config.splits, m, n], Vec::new());
    for slice in 0..config.splits {
        let columns = (slice * each).min(k)..((slice + 1) * each).min(k);
        let of = |rows: &[f64]| -> Vec<f64> {
            rows.chunks(k.max(1)).flat_map(|row| &row[columns.clone()]).copied().collect()
        };
        let mut sums = reference::product(&of(&a), &of(&w), [1, m, n, columns.len()]);
        if slice == 0 {
            sums = sums.biased(&optional_f64(call, "bias"), [m, n]);
        }
        y.values.extend(sums.values);
        y.magnitudes.extend(sums.magnitudes);
    }
    Ok(vec![("y", y)])
}

const BATCHED_GEMM_BF16: Operator = Operator {
    name: "batched_gemm_bf16",
    scalars: &[Y_DTYPE, ACTIVATION, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    summary: "y = activation(a w^T + bias) for each batch",
    args: &[
        ArgSpec::input("a", HALVES, 3, "[batch, M, K]"),
        ArgSpec::input("w", HALVES, 3, "[batch, N, K]"),
        BATCHED_BIAS,
        y(3, "[batch, M, N]", TERMS),
    ],
    cases: &[
        case!("DeepSeek-V3 k up-projection of 16 heads, 16 tokens", a: Bf16 [16, 16, 128], w: Bf16 [16, 512, 128]),
        case!("DeepSeek-V3 v up-projection of 16 heads, 64 tokens", a: Bf16 [16, 64, 512], w: Bf16 [16, 128, 512]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &[], axis1: &["a", "a_scale"] },
    corners: &BATCHED_CORNERS,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, bias) = (options(&inputs)?, bias(&inputs)?);
        with_half!(inputs, "a", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_float!("batched_gemm_bf16", "y", y_dtype(&inputs)?, Y => {
                crate::batched_gemm_bf16(stream, a, w, bias, outputs.take::<Y>("y")?, space, options)
            })
        })
    },
    ..GEMM_A16W16
};

const GEMM_A16W16_ATOMIC: Operator = Operator {
    name: "gemm_a16w16_atomic",
    summary: "y = a w^T, or y += a w^T, split-K slices added by atomics",
    args: &[A, W, ArgSpec::updated("y", Tolerance::Sum { terms: TERMS }, &[DType::F32], 2, "[M, N]")],
    scalars: &[ACCUMULATE, W_SHUFFLED, TILE, SPLITS],
    cases: &[
        case!("Llama-3 70B k, v of 8 GPUs, 16 tokens", a: Bf16 [16, 8192], w: Bf16 [256, 8192], y: F32 [16, 256]),
        case!("DeepSeek-V3 router, 64 tokens", a: Bf16 [64, 7168], w: Bf16 [256, 7168], y: F32 [64, 256]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &ATOMIC_CORNERS,
    outputs: |_| Ok(vec![]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, accumulate) = (options(&inputs)?, accumulate(&inputs)?);
        with_half!(inputs, "a", T => {
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            crate::gemm_a16w16_atomic(stream, a, w, outputs.take("y")?, accumulate, options)
        })
    },
    reference: |call: &HostCall| {
        let mut sums = product(call)?;
        if call.bool("accumulate")? {
            let terms = sums.values.iter_mut().zip(&mut sums.magnitudes);
            for (y, (value, magnitude)) in optional_f64(call, "y").into_iter().zip(terms) {
                *value += y;
                *magnitude += y.abs();
            }
        }
        let [_, _, n, _] = sizes(call)?;
        as_y(call, sums, n)
    },
    ..GEMM_A16W16
};

const GEMM_A16W16_GATED: Operator = Operator {
    name: "gemm_a16w16_gated",
    scalars: &[Y_DTYPE, ACTIVATION, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    summary: "y = activation(a w[..N]^T) * (a w[N..]^T)",
    args: &[A, ArgSpec::input("w", HALVES, 2, "[2 N, K]"), y(2, "[M, N]", TERMS)],
    cases: &[
        case!("Llama-3 70B gate and up of 8 GPUs, 16 tokens", a: Bf16 [16, 2048], w: Bf16 [7168, 2048]; act("silu")),
        case!("DeepSeek-V3 shared expert of 8 GPUs, 64 tokens", a: Bf16 [64, 7168], w: Bf16 [512, 7168]; act("silu")),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &GATED_CORNERS,
    outputs: |call| y_spec(call, true),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        with_half!(inputs, "a", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_float!("gemm_a16w16_gated", "y", y_dtype(&inputs)?, Y => {
                crate::gemm_a16w16_gated(stream, a, w, outputs.take::<Y>("y")?, space, options)
            })
        })
    },
    reference: |call: &HostCall| {
        let [_, _, rows, _] = sizes(call)?;
        as_y(call, product(call)?.gated(activation(call), rows / 2, TERMS), rows / 2)
    },
    ..GEMM_A16W16
};

pub(super) fn product(call: &HostCall) -> Result<Sums> {
    Ok(reference::product(&activations(call)?.to_f64(), &weights(call)?, sizes(call)?))
}
