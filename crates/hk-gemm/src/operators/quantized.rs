//! GEMMs of quantized operands: int8 and fp8 weights of 16-bit activations, mxfp4, mxfp8, and their fused epilogues.

use super::{
    ACTIVATION, BATCH_INVARIANT, BATCHED_BIAS, GROUP_K, GROUP_N, Row, SPLITS, TILE, W_SHUFFLED, Y_DTYPE,
    accumulate, act, asked_slices, bias, block_shape, case, choice, finished, of_k, of_n, optional_f64,
    options, prequant, sizes, splits, tile, to, w_shuffled, weight, weights, with_codes, with_half,
    workspace, y, y_dtype, y_outputs,
};
use crate::element::sealed::Int8OrFp8 as _;
use crate::reference::{self, Sums};
use crate::{
    A8WFp4Inputs, A16W8Inputs, A16WFp4Inputs, Addend, FloatView, FuseType, FusedBlockInputs, FusedMxInputs,
    GemmProblem, MulAdd, MxInputs, MxScaleView, Precision, PtgqInputs, SplitCatOutputs, gemm_workspace,
    kernels,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named, Operator,
    Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, E8M0, Error, Fp4x2, Result, Stream, TensorViewMut, quant, with_float};

pub(super) const ROWS: &[Row] = &[
    Row::new(GEMM_A16W8_BLOCKSCALE, |call| choice::half_by_byte(call, call.bool("prequant")?)),
    Row::new(BATCHED_GEMM_A8W8_PTGQ, |call| choice::half_by_byte(call, true)),
    Row::new(GEMM_A16WFP4, choice::half_by_fp4),
    Row::new(GEMM_A16WFP4_ATOMIC, |call| choice::atomic(choice::half_by_fp4(call)?)),
    Row::new(BATCHED_GEMM_A16WFP4, choice::half_by_fp4),
    Row::new(GEMM_A8WFP4, choice::mx),
    Row::new(GEMM_AFP4WFP4, choice::mx),
    Row::new(GEMM_AFP8WFP8, choice::mx),
    Row::new(BATCHED_GEMM_AFP4WFP4, choice::mx),
    Row::new(FUSED_GEMM_A8W8_BLOCKSCALE_MUL_ADD, choice::block),
    Row::new(FUSED_GEMM_A8W8_BLOCKSCALE_SPLIT_CAT, choice::block),
    Row::new(FUSED_GEMM_AFP4WFP4_MUL_ADD, choice::mx),
    Row::new(FUSED_GEMM_AFP4WFP4_SPLIT_CAT, choice::mx),
];

pub(super) const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const CODES: &[DType] = &[DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
pub(super) const FP8: &[DType] = &[DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

/// Error of a sum in f32, in its magnitude.
const TERMS: f64 = 1.0 / (1u64 << 16) as f64;

const CODE: Sample = Sample::Uniform { low: -100.0, high: 100.0 };
const SCALE: Sample = Sample::Uniform { low: 0.001, high: 0.02 };
const MX_SCALE: Sample = Sample::Uniform { low: 0.05, high: 2.0 };

pub(super) const fn fp4(name: &'static str, rank: usize, shape: &'static str) -> ArgSpec {
    ArgSpec::input(name, &[DType::Fp4x2], rank, shape)
}
pub(super) const fn mx(name: &'static str, fewest: usize, most: usize, shape: &'static str) -> ArgSpec {
    ArgSpec::input(name, &[DType::E8M0], fewest, shape).ranks(fewest, most).sampled(MX_SCALE)
}
pub(super) const fn f32s(name: &'static str, fewest: usize, most: usize, shape: &'static str) -> ArgSpec {
    ArgSpec::input(name, &[DType::F32], fewest, shape).ranks(fewest, most).sampled(SCALE)
}
const A: ArgSpec = ArgSpec::input("a", HALVES, 2, "[M, K]");
const BATCHED_A: ArgSpec = ArgSpec::input("a", HALVES, 3, "[batch, M, K]");
const W4: ArgSpec = fp4("w", 2, "[N, K / 2]");
const W4_SCALE: ArgSpec = mx("w_scale", 1, 2, "[N, K / 32], or shuffled");
const W8: ArgSpec = ArgSpec::input("w", CODES, 2, "[N, K]").sampled(CODE);
const W8_SCALE: ArgSpec = f32s("w_scale", 2, 2, "[groups of N, groups of K]");

const fn flag(name: &'static str, default: bool, summary: &'static str) -> ScalarSpec {
    ScalarSpec { name, default: Scalar::Bool(default), choices: &[], summary }
}
const PREQUANT: ScalarSpec = flag("prequant", true, "quantize a to the type of w");
pub(super) const SHUFFLED: ScalarSpec =
    flag("scales_shuffled", false, "scales are in the order of shuffle_scales");
const ACCUMULATE: ScalarSpec = flag("accumulate", false, "add to y, rather than to zero");
const FUSE: ScalarSpec = ScalarSpec {
    name: "fuse_type",
    default: Scalar::Int(0),
    choices: &[],
    summary: "0: a * product + b, 1: a * b + product",
};
const fn plain() -> (&'static str, Scalar) {
    ("prequant", Scalar::Bool(false))
}
const fn quantized() -> (&'static str, Scalar) {
    ("prequant", Scalar::Bool(true))
}
pub(super) const fn scales_shuffled() -> (&'static str, Scalar) {
    ("scales_shuffled", Scalar::Bool(true))
}
const fn keep() -> (&'static str, Scalar) {
    ("accumulate", Scalar::Bool(true))
}
const fn add_product() -> (&'static str, Scalar) {
    ("fuse_type", Scalar::Int(1))
}

/// All of some lists.
pub(super) const fn joined<const N: usize>(lists: &[&[Case]]) -> [Case; N] {
    let mut all = [lists[0][0]; N];
    let (mut list, mut i, mut n) = (0, 0, 0);
    while n < N {
        if i == lists[list].len() {
            (list, i) = (list + 1, 0);
        }
        all[n] = lists[list][i];
        (i, n) = (i + 1, n + 1);
    }
    all
}

/// The scales of an operand.
pub(super) fn mx_scale<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<MxScaleView<'a>> {
    let view = inputs.view::<E8M0>(name)?;
    Ok(if inputs.bool("scales_shuffled")? { MxScaleView::Shuffled(view) } else { view.into() })
}

/// The values of an operand with its scales, `rows` rows of `k` in each of `batch`.
pub(super) fn mx_values(
    call: &HostCall,
    values: Vec<f64>,
    scale: &'static str,
    [batch, rows, k]: [usize; 3],
) -> Result<Vec<f64>> {
    let (scales, blocks) = (call.get(scale)?.to_f64(), k / 32);
    let of_batch = scales.len() / batch.max(1);
    let shuffled = call.bool("scales_shuffled")?;
    let at = |i: usize| {
        let (row, block) = (i / k, i % k / 32);
        let (b, r) = (row / rows, row % rows);
        if shuffled { b * of_batch + quant::shuffled_index(r, block, blocks) } else { row * blocks + block }
    };
    Ok(values.into_iter().enumerate().map(|(i, v)| v * scales[at(i)]).collect())
}

/// A workspace of `len`, and of the split-K slices that the call asks for.
fn space<'a>(
    stream: &Stream,
    inputs: &Inputs,
    outputs: &mut Outputs<'a>,
    len: usize,
) -> Result<Option<TensorViewMut<'a, f32>>> {
    let [batch, m, n, _] = sizes(inputs)?;
    let slices = asked_slices(stream, inputs, &options(inputs)?, [batch, m, n], None)?;
    let len = len.saturating_add(slices);
    if len == 0 { Ok(None) } else { outputs.workspace(stream, len).map(Some) }
}

macro_rules! fp4_corners {
    ($name:ident: $t:ident) => {
        const $name: [Case; 10] = [
            case!("128 x 128", a: $t [130, 160], w: Fp4x2 [140, 80], w_scale: E8M0 [140, 5]; plain(), tile("128x128"), splits(2), to("f32")),
            case!("64 x 64", a: $t [65, 288], w: Fp4x2 [70, 144], w_scale: E8M0 [70, 9]; plain(), tile("64x64"), act("relu")),
            case!("64 x 64, shuffled", a: $t [65, 256], w: Fp4x2 [64, 128], w_scale: E8M0 [2048]; plain(), tile("64x64"), scales_shuffled(), w_shuffled()),
            case!("elements", a: $t [33, 96], w: Fp4x2 [50, 48], w_scale: E8M0 [50, 3]; plain(), tile("elements"), to("f16")),
            case!("16 x 32", a: $t [13, 1568], w: Fp4x2 [40, 784], w_scale: E8M0 [40, 49]; plain(), tile("16x32"), splits(2)),
            case!("32 x 32", a: $t [17, 544], w: Fp4x2 [64, 272], w_scale: E8M0 [64, 17]; plain(), tile("32x32")),
            case!("64 x 32", a: $t [63, 352], w: Fp4x2 [40, 176], w_scale: E8M0 [40, 11]; plain(), tile("64x32"), to("f32")),
            case!("quantized, 16 x 32", a: $t [13, 1568], w: Fp4x2 [40, 784], w_scale: E8M0 [40, 49]; tile("16x32"), act("silu")),
            case!("quantized, 32 x 32", a: $t [33, 512], w: Fp4x2 [64, 256], w_scale: E8M0 [1024]; tile("32x32"), scales_shuffled(), w_shuffled(), splits(2)),
            case!("quantized before", a: $t [70, 160], w: Fp4x2 [70, 80], w_scale: E8M0 [70, 5]; tile("64x64"), splits(2), to("f32")),
        ];
    };
}
fp4_corners!(FP4_BF16: Bf16);
fp4_corners!(FP4_F16: F16);

fn a16wfp4(call: &HostCall) -> Result<Sums> {
    let [batch, m, n, k] = sizes(call)?;
    let a = call.get("a")?.to_f64();
    let a = if call.bool("prequant")? { reference::mx_quantized(&a, k) } else { a };
    let w = mx_values(call, weights(call)?, "w_scale", [batch, n, k])?;
    Ok(reference::product(&a, &w, [batch, m, n, k]))
}

fn a16wfp4_space<'a>(
    stream: &Stream,
    inputs: &Inputs,
    outputs: &mut Outputs<'a>,
) -> Result<Option<TensorViewMut<'a, f32>>> {
    let [batch, m, n, k] = sizes(inputs)?;
    let problem = GemmProblem::new(Precision::HalfByFp4, m, n, k).batched(batch).prequantized(32);
    let len = gemm_workspace(stream.device().info(), &problem);
    space(stream, inputs, outputs, len)
}

pub(super) const GEMM_A16WFP4: Operator = Operator {
    name: "gemm_a16wfp4",
    family: "hk-gemm",
    summary: "y = activation(a w^T), w of mxfp4, a quantized to it or not",
    args: &[A, W4, W4_SCALE, y(2, "[M, N]", TERMS)],
    scalars: &[Y_DTYPE, ACTIVATION, PREQUANT, SHUFFLED, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[
        &kernels::A16WFP4,
        &kernels::WFP4_DECODE,
        &kernels::A16WFP4_QUANT_DECODE,
        &kernels::WFP4,
        &kernels::REDUCE,
    ],
    cases: &[
        case!("Llama-3 8B o, 16 tokens", a: Bf16 [16, 4096], w: Fp4x2 [4096, 2048], w_scale: E8M0 [4096, 128]),
        case!("Llama-3 8B o, 16 tokens, weights alone", a: Bf16 [16, 4096], w: Fp4x2 [4096, 2048], w_scale: E8M0 [4096, 128]; plain()),
        case!("GPT-OSS q, k, v, 128 tokens", a: Bf16 [128, 2880], w: Fp4x2 [640, 1440], w_scale: E8M0 [640, 90]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &joined::<20>(&[&FP4_BF16, &FP4_F16]),
    outputs: y_outputs,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, prequant) = (options(&inputs)?, prequant(&inputs)?);
        let space = a16wfp4_space(stream, &inputs, &mut outputs)?;
        let (w, w_scale) = (weight::<Fp4x2>(&inputs)?, mx_scale(&inputs, "w_scale")?);
        with_half!(inputs, "a", T => with_float!("gemm_a16wfp4", "y", y_dtype(&inputs)?, Y => {
            let y = outputs.take::<Y>("y")?;
            let inputs = A16WFp4Inputs { a: inputs.view::<T>("a")?, w, w_scale };
            crate::gemm_a16wfp4(stream, inputs, prequant, y, space, options)
        }))
    },
    reference: |call: &HostCall| finished(call, a16wfp4(call)?),
    traffic: Traffic::once,
};

const GEMM_A16WFP4_ATOMIC: Operator = Operator {
    name: "gemm_a16wfp4_atomic",
    summary: "y = a w^T, or y += a w^T, w of mxfp4, split-K slices added by atomics",
    args: &[
        A,
        W4,
        W4_SCALE,
        ArgSpec::updated("y", Tolerance::Sum { terms: TERMS }, &[DType::F32], 2, "[M, N]"),
    ],
    scalars: &[PREQUANT, ACCUMULATE, SHUFFLED, W_SHUFFLED, TILE, SPLITS],
    cases: &[
        case!("Llama-3 70B k, v of 8 GPUs, 16 tokens", a: Bf16 [16, 8192], w: Fp4x2 [256, 4096], w_scale: E8M0 [256, 256], y: F32 [16, 256]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &[
        case!("as they are", a: Bf16 [13, 1568], w: Fp4x2 [40, 784], w_scale: E8M0 [40, 49], y: F32 [13, 40]; plain(), splits(2), tile("16x32")),
        case!("added to", a: F16 [33, 96], w: Fp4x2 [50, 48], w_scale: E8M0 [50, 3], y: F32 [33, 50]; plain(), keep(), tile("elements")),
        case!("quantized", a: Bf16 [33, 512], w: Fp4x2 [64, 256], w_scale: E8M0 [64, 16], y: F32 [33, 64]; keep(), splits(2), tile("32x32")),
        case!("quantized before", a: F16 [70, 160], w: Fp4x2 [70, 80], w_scale: E8M0 [70, 5], y: F32 [70, 70]; splits(2), tile("64x64")),
    ],
    outputs: |_| Ok(vec![]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, prequant, accumulate) = (options(&inputs)?, prequant(&inputs)?, accumulate(&inputs)?);
        let space = a16wfp4_space(stream, &inputs, &mut outputs)?;
        let (w, w_scale) = (weight::<Fp4x2>(&inputs)?, mx_scale(&inputs, "w_scale")?);
        with_half!(inputs, "a", T => {
            let (a, y) = (inputs.view::<T>("a")?, outputs.take::<f32>("y")?);
            let inputs = A16WFp4Inputs { a, w, w_scale };
            crate::gemm_a16wfp4_atomic(stream, inputs, prequant, y, accumulate, space, options)
        })
    },
    reference: |call: &HostCall| {
        let mut sums = a16wfp4(call)?;
        if call.bool("accumulate")? {
            sums = sums.with_terms(FuseType::ScaleAdd, &[1.0], &optional_f64(call, "y"));
        }
        let [_, _, n, _] = sizes(call)?;
        super::as_y(call, sums, n)
    },
    ..GEMM_A16WFP4
};

const BATCHED_GEMM_A16WFP4: Operator = Operator {
    name: "batched_gemm_a16wfp4",
    summary: "y = activation(a w^T) / y_scale for each batch, w of mxfp4",
    args: &[
        BATCHED_A,
        fp4("w", 3, "[batch, N, K / 2]"),
        mx("w_scale", 2, 3, "[batch, N, K / 32], or shuffled"),
        f32s("y_scale", 1, 1, "[1]").sampled(Sample::Uniform { low: 0.5, high: 2.0 }).optional(),
        y(3, "[batch, M, N]", TERMS),
    ],
    cases: &[
        case!("DeepSeek-V3 k up-projection of 16 heads, 16 tokens", a: Bf16 [16, 16, 128], w: Fp4x2 [16, 512, 64], w_scale: E8M0 [16, 512, 4]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &[], axis1: &["a", "a_scale"] },
    corners: &[
        case!("64 x 64", a: Bf16 [2, 65, 288], w: Fp4x2 [2, 70, 144], w_scale: E8M0 [2, 70, 9], y_scale: F32 [1]; plain(), tile("64x64"), splits(2)),
        case!("elements", a: F16 [2, 33, 96], w: Fp4x2 [2, 50, 48], w_scale: E8M0 [2, 50, 3]; plain(), tile("elements")),
        case!("64 x 32, shuffled", a: Bf16 [3, 63, 256], w: Fp4x2 [3, 48, 128], w_scale: E8M0 [3, 512]; plain(), tile("64x32"), scales_shuffled(), w_shuffled()),
        case!("quantized", a: Bf16 [3, 20, 256], w: Fp4x2 [3, 64, 128], w_scale: E8M0 [3, 64, 8], y_scale: F32 [1]; tile("32x32")),
        case!("quantized before", a: F16 [3, 70, 160], w: Fp4x2 [3, 70, 80], w_scale: E8M0 [3, 70, 5], y_scale: F32 [1]; tile("64x64")),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, prequant) = (options(&inputs)?, prequant(&inputs)?);
        let space = a16wfp4_space(stream, &inputs, &mut outputs)?;
        let (w, w_scale, y_scale) =
            (weight::<Fp4x2>(&inputs)?, mx_scale(&inputs, "w_scale")?, inputs.optional_view("y_scale")?);
        with_half!(inputs, "a", T => with_float!("batched_gemm_a16wfp4", "y", y_dtype(&inputs)?, Y => {
            let (a, y) = (inputs.view::<T>("a")?, outputs.take::<Y>("y")?);
            let inputs = A16WFp4Inputs { a, w, w_scale };
            crate::batched_gemm_a16wfp4(stream, inputs, prequant, y_scale, y, space, options)
        }))
    },
    reference: |call: &HostCall| {
        let by = optional_f64(call, "y_scale").first().copied().unwrap_or(1.0);
        let [_, _, n, _] = sizes(call)?;
        super::as_y(call, a16wfp4(call)?.activated(super::activation(call)).divided(by), n)
    },
    ..GEMM_A16WFP4
};

macro_rules! a8wfp4_corners {
    ($name:ident: $t:ident) => {
        const $name: [Case; 8] = [
            case!("128 x 128, words", a: $t [130, 256], w: Fp4x2 [140, 128], a_scale: F32 [130], w_scale: E8M0 [140, 8]; tile("128x128"), splits(2), to("f32")),
            case!("128 x 128", a: $t [130, 160], w: Fp4x2 [140, 80], a_scale: F32 [130, 1], w_scale: E8M0 [140, 5]; tile("128x128")),
            case!("64 x 64, words", a: $t [65, 256], w: Fp4x2 [70, 128], a_scale: F32 [65], w_scale: E8M0 [70, 8]; tile("64x64"), act("relu")),
            case!("64 x 64, shuffled", a: $t [65, 256], w: Fp4x2 [64, 128], a_scale: F32 [1], w_scale: E8M0 [512]; tile("64x64"), splits(2), scales_shuffled(), w_shuffled()),
            case!("elements", a: $t [33, 96], w: Fp4x2 [50, 48], a_scale: F32 [33], w_scale: E8M0 [50, 3]; tile("elements"), to("f16")),
            case!("16 x 32", a: $t [13, 3104], w: Fp4x2 [40, 1552], a_scale: F32 [13], w_scale: E8M0 [40, 97]; tile("16x32"), splits(2)),
            case!("32 x 32", a: $t [17, 544], w: Fp4x2 [64, 272], a_scale: F32 [17], w_scale: E8M0 [64, 17]; tile("32x32")),
            case!("64 x 32", a: $t [63, 352], w: Fp4x2 [40, 176], a_scale: F32 [63], w_scale: E8M0 [40, 11]; tile("64x32"), to("f32")),
        ];
    };
}
a8wfp4_corners!(A8WFP4_FNUZ: Fp8E4M3Fnuz);
a8wfp4_corners!(A8WFP4_OCP: Fp8E4M3);

const GEMM_A8WFP4: Operator = Operator {
    name: "gemm_a8wfp4",
    summary: "y = activation(a_scale (a w^T)), a of fp8, w of mxfp4",
    args: &[
        ArgSpec::input("a", FP8, 2, "[M, K]").sampled(CODE),
        W4,
        f32s("a_scale", 1, 2, "[M] or [1]"),
        W4_SCALE,
        y(2, "[M, N]", TERMS),
    ],
    scalars: &[Y_DTYPE, ACTIVATION, SHUFFLED, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[&kernels::WFP4, &kernels::WFP4_DECODE, &kernels::REDUCE],
    cases: &[
        case!("Llama-3 8B o, 16 tokens", a: Fp8E4M3Fnuz [16, 4096], w: Fp4x2 [4096, 2048], a_scale: F32 [16], w_scale: E8M0 [4096, 128]),
        case!("Llama-3 8B o, 16 tokens (OCP)", a: Fp8E4M3 [16, 4096], w: Fp4x2 [4096, 2048], a_scale: F32 [16], w_scale: E8M0 [4096, 128]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &joined::<16>(&[&A8WFP4_FNUZ, &A8WFP4_OCP]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        let space = workspace(stream, &inputs, &mut outputs, &options, Precision::Fp8ByFp4)?;
        let (w, a_scale, w_scale) =
            (weight::<Fp4x2>(&inputs)?, inputs.view("a_scale")?, mx_scale(&inputs, "w_scale")?);
        with_codes!(inputs, "a", T => with_float!("gemm_a8wfp4", "y", y_dtype(&inputs)?, Y => {
            let (a, y) = (inputs.view::<T>("a")?, outputs.take::<Y>("y")?);
            crate::gemm_a8wfp4(stream, A8WFp4Inputs { a, w, a_scale, w_scale }, y, space, options)
        }))
    },
    reference: |call: &HostCall| {
        let [batch, m, n, k] = sizes(call)?;
        let w = mx_values(call, weights(call)?, "w_scale", [batch, n, k])?;
        let sums = reference::product(&call.get("a")?.to_f64(), &w, [batch, m, n, k]);
        finished(call, sums.scaled(&call.get("a_scale")?.to_f64(), &[1.0], [m, n]))
    },
    ..GEMM_A16WFP4
};

const AFP4_CORNERS: [Case; 33] = [
    case!("256 x 256, words", a: Fp4x2 [257, 128], w: Fp4x2 [264, 128], a_scale: E8M0 [257, 8], w_scale: E8M0 [264, 8]; tile("256x256"), splits(2), to("f32")),
    case!("256 x 256", a: Fp4x2 [100, 80], w: Fp4x2 [140, 80], a_scale: E8M0 [100, 5], w_scale: E8M0 [140, 5]; tile("256x256")),
    case!("160 x 256, words", a: Fp4x2 [170, 448], w: Fp4x2 [264, 448], a_scale: E8M0 [170, 28], w_scale: E8M0 [264, 28]; tile("160x256"), splits(2), to("f32")),
    case!("160 x 256", a: Fp4x2 [90, 80], w: Fp4x2 [140, 80], a_scale: E8M0 [90, 5], w_scale: E8M0 [140, 5]; tile("160x256")),
    case!("160 x 256, rings of scales", a: Fp4x2 [18, 2176], w: Fp4x2 [37, 2176], a_scale: E8M0 [18, 136], w_scale: E8M0 [37, 136]; tile("160x256")),
    case!("96 x 256, words", a: Fp4x2 [100, 448], w: Fp4x2 [264, 448], a_scale: E8M0 [100, 28], w_scale: E8M0 [264, 28]; tile("96x256"), splits(2), to("f32")),
    case!("96 x 256", a: Fp4x2 [90, 80], w: Fp4x2 [140, 80], a_scale: E8M0 [90, 5], w_scale: E8M0 [140, 5]; tile("96x256")),
    case!("96 x 256, rings of scales", a: Fp4x2 [18, 2176], w: Fp4x2 [37, 2176], a_scale: E8M0 [18, 136], w_scale: E8M0 [37, 136]; tile("96x256")),
    case!("256 x 128, words", a: Fp4x2 [257, 128], w: Fp4x2 [136, 128], a_scale: E8M0 [257, 8], w_scale: E8M0 [136, 8]; tile("256x128"), splits(2), to("f32")),
    case!("256 x 128", a: Fp4x2 [100, 80], w: Fp4x2 [140, 80], a_scale: E8M0 [100, 5], w_scale: E8M0 [140, 5]; tile("256x128")),
    case!("128 x 128, words", a: Fp4x2 [130, 448], w: Fp4x2 [140, 448], a_scale: E8M0 [130, 28], w_scale: E8M0 [140, 28]; tile("128x128"), splits(2)),
    case!("128 x 128", a: Fp4x2 [130, 80], w: Fp4x2 [140, 80], a_scale: E8M0 [130, 5], w_scale: E8M0 [140, 5]; tile("128x128"), act("gelu")),
    case!("64 x 128, words", a: Fp4x2 [70, 832], w: Fp4x2 [140, 832], a_scale: E8M0 [70, 52], w_scale: E8M0 [140, 52]; tile("64x128"), splits(2), to("f32")),
    case!("64 x 128", a: Fp4x2 [66, 208], w: Fp4x2 [130, 208], a_scale: E8M0 [66, 13], w_scale: E8M0 [130, 13]; tile("64x128")),
    case!("64 x 64, words", a: Fp4x2 [65, 192], w: Fp4x2 [70, 192], a_scale: E8M0 [65, 12], w_scale: E8M0 [70, 12]; tile("64x64"), act("relu")),
    case!("256 x 256, shuffled", a: Fp4x2 [258, 640], w: Fp4x2 [272, 640], a_scale: E8M0 [11520], w_scale: E8M0 [11520]; tile("256x256"), splits(2), scales_shuffled(), w_shuffled()),
    case!("160 x 256, shuffled", a: Fp4x2 [170, 640], w: Fp4x2 [272, 640], a_scale: E8M0 [7680], w_scale: E8M0 [11520]; tile("160x256"), scales_shuffled(), w_shuffled(), act("silu")),
    case!("96 x 256, shuffled", a: Fp4x2 [100, 640], w: Fp4x2 [272, 640], a_scale: E8M0 [5120], w_scale: E8M0 [11520]; tile("96x256"), splits(2), scales_shuffled(), w_shuffled()),
    case!("256 x 128, shuffled", a: Fp4x2 [258, 640], w: Fp4x2 [144, 640], a_scale: E8M0 [11520], w_scale: E8M0 [6400]; tile("256x128"), scales_shuffled(), w_shuffled()),
    case!("128 x 128, shuffled", a: Fp4x2 [130, 896], w: Fp4x2 [144, 896], a_scale: E8M0 [8960], w_scale: E8M0 [8960]; tile("128x128"), splits(2), scales_shuffled(), w_shuffled()),
    case!("64 x 128, shuffled", a: Fp4x2 [70, 896], w: Fp4x2 [144, 896], a_scale: E8M0 [5376], w_scale: E8M0 [8960]; tile("64x128"), splits(2), scales_shuffled(), w_shuffled(), to("f32")),
    case!("160 x 256, shuffled, a part of a group", a: Fp4x2 [40, 160], w: Fp4x2 [48, 160], a_scale: E8M0 [1024], w_scale: E8M0 [1024]; tile("160x256"), scales_shuffled(), w_shuffled()),
    case!("64 x 64, shuffled", a: Fp4x2 [65, 128], w: Fp4x2 [64, 128], a_scale: E8M0 [768], w_scale: E8M0 [512]; tile("64x64"), splits(2), scales_shuffled(), w_shuffled()),
    case!("256 x 256, rings of scales", a: Fp4x2 [18, 2176], w: Fp4x2 [37, 2176], a_scale: E8M0 [18, 136], w_scale: E8M0 [37, 136]; tile("256x256")),
    case!("256 x 128, rings of scales", a: Fp4x2 [18, 2176], w: Fp4x2 [37, 2176], a_scale: E8M0 [18, 136], w_scale: E8M0 [37, 136]; tile("256x128")),
    case!("128 x 128, rings of scales", a: Fp4x2 [18, 2176], w: Fp4x2 [37, 2176], a_scale: E8M0 [18, 136], w_scale: E8M0 [37, 136]; tile("128x128")),
    case!("64 x 128, rings of scales", a: Fp4x2 [18, 2176], w: Fp4x2 [37, 2176], a_scale: E8M0 [18, 136], w_scale: E8M0 [37, 136]; tile("64x128")),
    case!("64 x 64, rings of scales", a: Fp4x2 [18, 2176], w: Fp4x2 [37, 2176], a_scale: E8M0 [18, 136], w_scale: E8M0 [37, 136]; tile("64x64")),
    case!("elements", a: Fp4x2 [33, 48], w: Fp4x2 [50, 48], a_scale: E8M0 [33, 3], w_scale: E8M0 [50, 3]; tile("elements"), to("f16")),
    case!("16 x 32", a: Fp4x2 [13, 2576], w: Fp4x2 [40, 2576], a_scale: E8M0 [13, 161], w_scale: E8M0 [40, 161]; tile("16x32"), splits(2)),
    case!("32 x 32", a: Fp4x2 [17, 272], w: Fp4x2 [64, 272], a_scale: E8M0 [17, 17], w_scale: E8M0 [64, 17]; tile("32x32")),
    case!("32 x 32, shuffled", a: Fp4x2 [17, 128], w: Fp4x2 [64, 128], a_scale: E8M0 [256], w_scale: E8M0 [512]; tile("32x32"), scales_shuffled(), w_shuffled()),
    case!("64 x 32", a: Fp4x2 [63, 176], w: Fp4x2 [40, 176], a_scale: E8M0 [63, 11], w_scale: E8M0 [40, 11]; tile("64x32"), to("f32")),
];

fn afp4wfp4(call: &HostCall) -> Result<Sums> {
    let [batch, m, n, k] = sizes(call)?;
    let (a, scale) = match call.optional("x") {
        Some(x) => (x, "x_scale"),
        None => (call.get("a")?, "a_scale"),
    };
    let a = mx_values(call, a.to_f64(), scale, [batch, m, k])?;
    let w = mx_values(call, weights(call)?, "w_scale", [batch, n, k])?;
    Ok(reference::product(&a, &w, [batch, m, n, k]))
}

const GEMM_AFP4WFP4: Operator = Operator {
    name: "gemm_afp4wfp4",
    summary: "y = activation(a w^T), both of mxfp4",
    args: &[
        fp4("a", 2, "[M, K / 2]"),
        W4,
        mx("a_scale", 1, 2, "[M, K / 32], or shuffled"),
        W4_SCALE,
        y(2, "[M, N]", TERMS),
    ],
    scalars: &[Y_DTYPE, ACTIVATION, SHUFFLED, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[&kernels::WFP4, &kernels::WFP4_DECODE, &kernels::REDUCE],
    cases: &[
        case!("Llama-3 8B o, 16 tokens", a: Fp4x2 [16, 2048], w: Fp4x2 [4096, 2048], a_scale: E8M0 [16, 128], w_scale: E8M0 [4096, 128]),
        case!("DeepSeek-V3 down of a shared expert, 128 tokens", a: Fp4x2 [128, 1024], w: Fp4x2 [1024, 1024], a_scale: E8M0 [128, 64], w_scale: E8M0 [1024, 64]),
        case!("512 x 512 x 1024", a: Fp4x2 [512, 512], w: Fp4x2 [512, 512], a_scale: E8M0 [512, 32], w_scale: E8M0 [512, 32]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &AFP4_CORNERS,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        let space = workspace(stream, &inputs, &mut outputs, &options, Precision::Fp4)?;
        let (a, w) = (inputs.view("a")?, weight::<Fp4x2>(&inputs)?);
        let (a_scale, w_scale) = (mx_scale(&inputs, "a_scale")?, mx_scale(&inputs, "w_scale")?);
        with_float!("gemm_afp4wfp4", "y", y_dtype(&inputs)?, Y => {
            let inputs = MxInputs { a, w, a_scale, w_scale };
            crate::gemm_afp4wfp4(stream, inputs, outputs.take::<Y>("y")?, space, options)
        })
    },
    reference: |call: &HostCall| finished(call, afp4wfp4(call)?),
    ..GEMM_A16WFP4
};

macro_rules! mxfp8_corners {
    ($name:ident: $t:ident) => {
        const $name: [Case; 9] = [
            case!("256 x 128, words", a: $t [257, 256], w: $t [140, 256], a_scale: E8M0 [257, 8], w_scale: E8M0 [140, 8]; tile("256x128"), splits(2), to("f32")),
            case!("256 x 128", a: $t [100, 160], w: $t [140, 160], a_scale: E8M0 [100, 5], w_scale: E8M0 [140, 5]; tile("256x128")),
            case!("64 x 64, words", a: $t [65, 384], w: $t [70, 384], a_scale: E8M0 [65, 12], w_scale: E8M0 [70, 12]; tile("64x64"), act("relu")),
            case!("64 x 64, shuffled", a: $t [65, 256], w: $t [64, 256], a_scale: E8M0 [768], w_scale: E8M0 [512]; tile("64x64"), splits(2), scales_shuffled(), w_shuffled()),
            case!("elements", a: $t [33, 96], w: $t [50, 96], a_scale: E8M0 [33, 3], w_scale: E8M0 [50, 3]; tile("elements"), to("f16")),
            case!("16 x 32", a: $t [13, 3104], w: $t [40, 3104], a_scale: E8M0 [13, 97], w_scale: E8M0 [40, 97]; tile("16x32"), splits(2)),
            case!("32 x 32", a: $t [17, 544], w: $t [64, 544], a_scale: E8M0 [17, 17], w_scale: E8M0 [64, 17]; tile("32x32")),
            case!("32 x 32, shuffled", a: $t [17, 256], w: $t [64, 256], a_scale: E8M0 [256], w_scale: E8M0 [512]; tile("32x32"), scales_shuffled(), w_shuffled()),
            case!("64 x 32", a: $t [63, 352], w: $t [40, 352], a_scale: E8M0 [63, 11], w_scale: E8M0 [40, 11]; tile("64x32"), to("f32")),
        ];
    };
}
mxfp8_corners!(MXFP8_FNUZ: Fp8E4M3Fnuz);
mxfp8_corners!(MXFP8_OCP: Fp8E4M3);

const GEMM_AFP8WFP8: Operator = Operator {
    name: "gemm_afp8wfp8",
    summary: "y = activation(a w^T), both of mxfp8",
    args: &[
        ArgSpec::input("a", FP8, 2, "[M, K]").sampled(CODE),
        ArgSpec::input("w", FP8, 2, "[N, K]").sampled(CODE),
        mx("a_scale", 1, 2, "[M, K / 32], or shuffled"),
        W4_SCALE,
        y(2, "[M, N]", TERMS),
    ],
    kernels: &[&kernels::AFP8WFP8, &kernels::REDUCE],
    cases: &[
        case!("Llama-3 8B o, 16 tokens", a: Fp8E4M3Fnuz [16, 4096], w: Fp8E4M3Fnuz [4096, 4096], a_scale: E8M0 [16, 128], w_scale: E8M0 [4096, 128]),
        case!("Llama-3 8B o, 16 tokens (OCP)", a: Fp8E4M3 [16, 4096], w: Fp8E4M3 [4096, 4096], a_scale: E8M0 [16, 128], w_scale: E8M0 [4096, 128]),
        case!("a block of 4096 x 4096 x 4096", a: Fp8E4M3Fnuz [256, 4096], w: Fp8E4M3Fnuz [128, 4096], a_scale: E8M0 [256, 128], w_scale: E8M0 [128, 128]; tile("256x128")),
        case!("a block of 4096 x 4096 x 4096 (OCP)", a: Fp8E4M3 [256, 4096], w: Fp8E4M3 [128, 4096], a_scale: E8M0 [256, 128], w_scale: E8M0 [128, 128]; tile("256x128")),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &joined::<18>(&[&MXFP8_FNUZ, &MXFP8_OCP]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        let space = workspace(stream, &inputs, &mut outputs, &options, Precision::Fp8)?;
        let (a_scale, w_scale) = (mx_scale(&inputs, "a_scale")?, mx_scale(&inputs, "w_scale")?);
        with_codes!(inputs, "a", T => with_float!("gemm_afp8wfp8", "y", y_dtype(&inputs)?, Y => {
            let (a, w, y) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?, outputs.take::<Y>("y")?);
            crate::gemm_afp8wfp8(stream, MxInputs { a, w, a_scale, w_scale }, y, space, options)
        }))
    },
    ..GEMM_AFP4WFP4
};

const BATCHED_GEMM_AFP4WFP4: Operator = Operator {
    name: "batched_gemm_afp4wfp4",
    summary: "y = activation(a w^T) for each batch, both of mxfp4",
    args: &[
        fp4("a", 3, "[batch, M, K / 2]"),
        fp4("w", 3, "[batch, N, K / 2]"),
        mx("a_scale", 2, 3, "[batch, M, K / 32], or shuffled"),
        mx("w_scale", 2, 3, "[batch, N, K / 32], or shuffled"),
        y(3, "[batch, M, N]", TERMS),
    ],
    cases: &[
        case!("DeepSeek-V3 v up-projection of 16 heads, 64 tokens", a: Fp4x2 [16, 64, 256], w: Fp4x2 [16, 128, 256], a_scale: E8M0 [16, 64, 16], w_scale: E8M0 [16, 128, 16]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &[], axis1: &["a", "a_scale"] },
    corners: &[
        case!("256 x 128", a: Fp4x2 [2, 20, 80], w: Fp4x2 [2, 140, 80], a_scale: E8M0 [2, 20, 5], w_scale: E8M0 [2, 140, 5]; tile("256x128")),
        case!("64 x 64", a: Fp4x2 [2, 65, 128], w: Fp4x2 [2, 70, 128], a_scale: E8M0 [2, 65, 8], w_scale: E8M0 [2, 70, 8]; tile("64x64"), splits(2)),
        case!("elements", a: Fp4x2 [2, 33, 48], w: Fp4x2 [2, 50, 48], a_scale: E8M0 [2, 33, 3], w_scale: E8M0 [2, 50, 3]; tile("elements")),
        case!("32 x 32, shuffled", a: Fp4x2 [3, 17, 128], w: Fp4x2 [3, 64, 128], a_scale: E8M0 [3, 256], w_scale: E8M0 [3, 512]; tile("32x32"), scales_shuffled(), w_shuffled()),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        let space = workspace(stream, &inputs, &mut outputs, &options, Precision::Fp4)?;
        let (a, w) = (inputs.view("a")?, weight::<Fp4x2>(&inputs)?);
        let (a_scale, w_scale) = (mx_scale(&inputs, "a_scale")?, mx_scale(&inputs, "w_scale")?);
        with_float!("batched_gemm_afp4wfp4", "y", y_dtype(&inputs)?, Y => {
            let inputs = MxInputs { a, w, a_scale, w_scale };
            crate::batched_gemm_afp4wfp4(stream, inputs, outputs.take::<Y>("y")?, space, options)
        })
    },
    ..GEMM_AFP4WFP4
};

macro_rules! a16w8_corners {
    ($name:ident: $t:ident, $c:ident) => {
        const $name: [Case; 12] = [
            case!("128 x 128", a: $t [130, 272], w: $c [140, 272], w_scale: F32 [2, 3]; plain(), tile("128x128"), splits(2), to("f32")),
            case!("64 x 64", a: $t [65, 272], w: $c [70, 272], w_scale: F32 [35, 2]; plain(), tile("64x64"), act("relu"), of_n(2), of_k(256)),
            case!("64 x 64, shuffled", a: $t [65, 256], w: $c [80, 256], w_scale: F32 [1, 2]; plain(), tile("64x64"), w_shuffled()),
            case!("elements", a: $t [33, 77], w: $c [50, 77], w_scale: F32 [50, 1]; plain(), tile("elements"), of_n(1), to("f16")),
            case!("16 x 32", a: $t [13, 2064], w: $c [40, 2064], w_scale: F32 [10, 9]; plain(), tile("16x32"), splits(2), of_n(4), of_k(256)),
            case!("32 x 32", a: $t [17, 544], w: $c [48, 544], w_scale: F32 [1, 5]; plain(), tile("32x32"), w_shuffled()),
            case!("64 x 32", a: $t [63, 352], w: $c [40, 352], w_scale: F32 [1, 3]; plain(), tile("64x32"), to("f32")),
            case!("quantized, 16 x 32", a: $t [13, 2064], w: $c [40, 2064], w_scale: F32 [1, 17]; quantized(), tile("16x32"), act("silu"), splits(2)),
            case!("quantized, 32 x 32", a: $t [33, 528], w: $c [40, 528], w_scale: F32 [5, 5]; quantized(), tile("32x32"), of_n(8)),
            case!("groups of 64", a: $t [65, 336], w: $c [70, 336], w_scale: F32 [35, 6]; plain(), tile("64x64"), splits(2), of_n(2), of_k(64)),
            case!("groups of 16, shuffled", a: $t [20, 160], w: $c [48, 160], w_scale: F32 [1, 10]; plain(), of_k(16), w_shuffled()),
            case!("groups of 4, by elements", a: $t [33, 77], w: $c [50, 77], w_scale: F32 [7, 20]; plain(), tile("elements"), of_n(8), of_k(4), to("f16")),
        ];
    };
}
a16w8_corners!(BF16_I8: Bf16, I8);
a16w8_corners!(F16_I8: F16, I8);
a16w8_corners!(BF16_FNUZ: Bf16, Fp8E4M3Fnuz);
a16w8_corners!(F16_FNUZ: F16, Fp8E4M3Fnuz);
a16w8_corners!(BF16_OCP: Bf16, Fp8E4M3);
a16w8_corners!(F16_OCP: F16, Fp8E4M3);
const BEFORE: [Case; 6] = [
    case!("quantized before", a: Bf16 [70, 272], w: I8 [70, 272], w_scale: F32 [1, 3]; quantized(), tile("64x64"), splits(2), to("f32")),
    case!("quantized before, fp8", a: F16 [70, 272], w: Fp8E4M3Fnuz [70, 272], w_scale: F32 [1, 3]; quantized(), tile("64x64")),
    case!("quantized before, groups of 32", a: Bf16 [20, 272], w: Fp8E4M3Fnuz [70, 272], w_scale: F32 [1, 9]; quantized(), of_k(32)),
    case!("quantized before, groups of 16", a: F16 [20, 160], w: Fp8E4M3 [70, 160], w_scale: F32 [9, 10]; quantized(), of_n(8), of_k(16)),
    case!("quantized before, groups of 256", a: Bf16 [20, 544], w: I8 [70, 544], w_scale: F32 [1, 3]; quantized(), of_k(256)),
    case!("quantized before, by elements", a: Bf16 [20, 77], w: Fp8E4M3 [70, 77], w_scale: F32 [1, 1]; quantized(), tile("elements")),
];

fn a16w8(call: &HostCall, w: Vec<f64>, prequant: bool) -> Result<Sums> {
    let ([batch, m, n, k], columns) = (sizes(call)?, group_k(call)?);
    let a = call.get("a")?.to_f64();
    let a = if prequant {
        with_codes!(call, "w", C => Ok(reference::group_quantized::<C>(&a, k, columns)))?
    } else {
        a
    };
    Ok(reference::product(&a, &w, [batch, m, n, k]))
}

/// Columns of a group; any number is refused later.
fn group_k<V: Described>(call: &Call<V>) -> Result<usize> {
    Ok(call.int("group_k")?.max(1) as usize)
}

fn a16w8_space<'a>(
    stream: &Stream,
    inputs: &Inputs,
    outputs: &mut Outputs<'a>,
) -> Result<Option<TensorViewMut<'a, f32>>> {
    let ([batch, m, n, k], group) = (sizes(inputs)?, group_k(inputs)?);
    let problem = GemmProblem::new(Precision::HalfByByte, m, n, k).batched(batch).prequantized(group);
    let len = gemm_workspace(stream.device().info(), &problem);
    space(stream, inputs, outputs, len)
}

const GEMM_A16W8_BLOCKSCALE: Operator = Operator {
    name: "gemm_a16w8_blockscale",
    summary: "y = activation(sum over groups of w_scale (a w^T of a group)), a quantized to the type of w or not",
    args: &[A, W8, W8_SCALE, y(2, "[M, N]", TERMS)],
    scalars: &[
        Y_DTYPE,
        ACTIVATION,
        ScalarSpec { default: Scalar::Bool(false), ..PREQUANT },
        GROUP_N,
        GROUP_K,
        W_SHUFFLED,
        TILE,
        SPLITS,
        BATCH_INVARIANT,
    ],
    kernels: &[
        &kernels::A16W8_I8,
        &kernels::A16W8_FP8,
        &kernels::A16W8_DECODE,
        &kernels::A16W8_QUANT_DECODE,
        &kernels::A8W8_BLOCKSCALE,
        &kernels::A8W8_BLOCKSCALE_DECODE,
        &kernels::A16W8_GROUPSCALE,
        &kernels::A8W8_GROUPSCALE,
        &kernels::GROUP_QUANT,
        &kernels::REDUCE,
    ],
    cases: &[
        case!("DeepSeek-V3 down of a shared expert, 16 tokens", a: Bf16 [16, 2048], w: Fp8E4M3Fnuz [7168, 2048], w_scale: F32 [56, 16]),
        case!("DeepSeek-V3 down of a shared expert, 16 tokens (OCP)", a: Bf16 [16, 2048], w: Fp8E4M3 [7168, 2048], w_scale: F32 [56, 16]),
        case!("the same, quantized", a: Bf16 [16, 2048], w: Fp8E4M3Fnuz [7168, 2048], w_scale: F32 [56, 16]; quantized()),
        case!("the same, quantized (OCP)", a: Bf16 [16, 2048], w: Fp8E4M3 [7168, 2048], w_scale: F32 [56, 16]; quantized()),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &joined::<78>(&[&BF16_I8, &F16_I8, &BF16_FNUZ, &F16_FNUZ, &BF16_OCP, &F16_OCP, &BEFORE]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, prequant) = (options(&inputs)?, prequant(&inputs)?);
        let group = block_shape(&inputs)?;
        let space = a16w8_space(stream, &inputs, &mut outputs)?;
        let w_scale = inputs.view("w_scale")?;
        with_half!(inputs, "a", T => with_codes!(inputs, "w", C => {
            let (a, w) = (inputs.view::<T>("a")?, weight::<C>(&inputs)?);
            with_float!("gemm_a16w8_blockscale", "y", y_dtype(&inputs)?, Y => {
                let y = outputs.take::<Y>("y")?;
                let inputs = A16W8Inputs { a, w, w_scale, group };
                crate::gemm_a16w8_blockscale(stream, inputs, prequant, y, space, options)
            })
        }))
    },
    reference: |call: &HostCall| {
        let (group, [_, _, _, k]) = (block_shape(call)?, sizes(call)?);
        let w = reference::scaled(&weights(call)?, k, &call.get("w_scale")?.to_f64(), [group.n, group.k]);
        finished(call, a16w8(call, w, call.bool("prequant")?)?)
    },
    ..GEMM_A16WFP4
};
const BATCHED_GEMM_A8W8_PTGQ: Operator = Operator {
    name: "batched_gemm_a8w8_ptgq",
    summary: "y = activation(w_scale sum over groups of s (q(a) w^T of a group) + bias) for each batch",
    args: &[
        BATCHED_A,
        ArgSpec::input("w", CODES, 3, "[batch, N, K]").sampled(CODE),
        f32s("w_scale", 1, 1, "[1]"),
        BATCHED_BIAS,
        y(3, "[batch, M, N]", TERMS),
    ],
    scalars: &[Y_DTYPE, ACTIVATION, GROUP_K, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[
        &kernels::A16W8_QUANT_DECODE,
        &kernels::A8W8_BLOCKSCALE,
        &kernels::A8W8_BLOCKSCALE_DECODE,
        &kernels::A8W8_GROUPSCALE,
        &kernels::GROUP_QUANT,
        &kernels::REDUCE,
    ],
    cases: &[
        case!("DeepSeek-V3 k up-projection of 16 heads, 16 tokens", a: Bf16 [16, 16, 128], w: Fp8E4M3Fnuz [16, 512, 128], w_scale: F32 [1]),
        case!("DeepSeek-V3 k up-projection of 16 heads, 16 tokens (OCP)", a: Bf16 [16, 16, 128], w: Fp8E4M3 [16, 512, 128], w_scale: F32 [1]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &[], axis1: &["a", "a_scale"] },
    corners: &[
        case!("16 x 32", a: Bf16 [2, 13, 528], w: I8 [2, 40, 528], w_scale: F32 [1], bias: F32 [2, 40]; tile("16x32"), act("relu")),
        case!("32 x 32", a: F16 [3, 20, 272], w: Fp8E4M3Fnuz [3, 40, 272], w_scale: F32 [1], bias: Bf16 [3, 1, 40]; tile("32x32"), splits(2)),
        case!("32 x 32, shuffled", a: Bf16 [2, 33, 256], w: Fp8E4M3 [2, 48, 256], w_scale: F32 [1]; tile("32x32"), w_shuffled()),
        case!("before", a: Bf16 [3, 70, 272], w: I8 [3, 70, 272], w_scale: F32 [1], bias: F16 [3, 70]; tile("64x64")),
        case!("before, by elements", a: F16 [2, 20, 77], w: Fp8E4M3Fnuz [2, 70, 77], w_scale: F32 [1]; tile("elements"), to("f32")),
        case!("groups of 64", a: Bf16 [2, 20, 272], w: Fp8E4M3Fnuz [2, 70, 272], w_scale: F32 [1], bias: F32 [2, 70]; of_k(64)),
        case!("groups of 2, by elements", a: F16 [2, 20, 30], w: I8 [2, 70, 30], w_scale: F32 [1]; of_k(2)),
        case!("groups of 512", a: F16 [2, 20, 1040], w: Fp8E4M3 [2, 40, 1040], w_scale: F32 [1]; of_k(512)),
        case!("before, one part", a: F16 [2, 20, 77], w: Fp8E4M3 [2, 70, 77], w_scale: F32 [1]; to("f32")),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        // A negative number becomes a large one, which is refused.
        let (options, bias, group) = (options(&inputs)?, bias(&inputs)?, inputs.int("group_k")? as usize);
        let space = a16w8_space(stream, &inputs, &mut outputs)?;
        let w_scale = inputs.view("w_scale")?;
        with_half!(inputs, "a", T => with_codes!(inputs, "w", C => {
            let (a, w) = (inputs.view::<T>("a")?, weight::<C>(&inputs)?);
            with_float!("batched_gemm_a8w8_ptgq", "y", y_dtype(&inputs)?, Y => {
                let y = outputs.take::<Y>("y")?;
                let inputs = PtgqInputs { a, group, w, w_scale };
                crate::batched_gemm_a8w8_ptgq(stream, inputs, bias, y, space, options)
            })
        }))
    },
    reference: |call: &HostCall| {
        let [_, m, n, _] = sizes(call)?;
        let scale = call.get("w_scale")?.to_f64();
        finished(call, a16w8(call, weights(call)?, true)?.scaled(&[1.0], &scale, [m, n]))
    },
    ..GEMM_A16WFP4
};

const X8: ArgSpec = ArgSpec::input("x", CODES, 2, "[M, K]").sampled(CODE);
const X8_SCALE: ArgSpec = f32s("x_scale", 2, 2, "[M, groups of K]");
const X4: ArgSpec = fp4("x", 2, "[M, K / 2]");
const X4_SCALE: ArgSpec = mx("x_scale", 1, 2, "[M, K / 32], or shuffled");
const TERM_A: ArgSpec = ArgSpec::input("a", FLOATS, 1, "[M, N] or [1]").ranks(1, 2);
const TERM_B: ArgSpec = ArgSpec { name: "b", ..TERM_A };

/// A tensor of any float type.
pub(super) fn floats<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<FloatView<'a>> {
    Ok(match inputs.get(name)?.dtype() {
        DType::Bf16 => FloatView::Bf16(inputs.view(name)?),
        DType::F16 => FloatView::F16(inputs.view(name)?),
        _ => FloatView::F32(inputs.view(name)?),
    })
}

fn fuse_type<V: Described>(call: &Call<V>) -> Result<FuseType> {
    match call.int("fuse_type")? {
        0 => Ok(FuseType::ScaleAdd),
        1 => Ok(FuseType::AddProduct),
        other => Err(Error::argument(call.operator().name, "fuse_type", other, "0 or 1")),
    }
}

fn blocks(call: &HostCall) -> Result<Sums> {
    let [batch, m, n, k] = sizes(call)?;
    let group = block_shape(call)?;
    let x = reference::scaled(&call.get("x")?.to_f64(), k, &call.get("x_scale")?.to_f64(), [1, group.k]);
    let w = reference::scaled(&weights(call)?, k, &call.get("w_scale")?.to_f64(), [group.n, group.k]);
    Ok(reference::product(&x, &w, [batch, m, n, k]))
}

fn with_terms(call: &HostCall, sums: Sums) -> Result<Named<HostTensorF64>> {
    let [_, _, n, _] = sizes(call)?;
    let (a, b) = (call.get("a")?.to_f64(), call.get("b")?.to_f64());
    super::as_y(call, sums.with_terms(fuse_type(call)?, &a, &b), n)
}

const FUSED_GEMM_A8W8_BLOCKSCALE_MUL_ADD: Operator = Operator {
    name: "fused_gemm_a8w8_blockscale_mul_add",
    summary: "y = a * g + b or a * b + g, g of gemm_a8w8_blockscale",
    args: &[X8, W8, X8_SCALE, W8_SCALE, TERM_A, TERM_B, y(2, "[M, N]", TERMS)],
    scalars: &[Y_DTYPE, FUSE, GROUP_N, GROUP_K, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[
        &kernels::A8W8_BLOCKSCALE,
        &kernels::A8W8_BLOCKSCALE_DECODE,
        &kernels::A8W8_GROUPSCALE,
        &kernels::REDUCE,
    ],
    cases: &[
        case!("DeepSeek-V3 down of a shared expert, 16 tokens", x: Fp8E4M3Fnuz [16, 2048], w: Fp8E4M3Fnuz [7168, 2048], x_scale: F32 [16, 16], w_scale: F32 [56, 16], a: F32 [1], b: Bf16 [16, 7168]),
        case!("DeepSeek-V3 down of a shared expert, 16 tokens (OCP)", x: Fp8E4M3 [16, 2048], w: Fp8E4M3 [7168, 2048], x_scale: F32 [16, 16], w_scale: F32 [56, 16], a: F32 [1], b: Bf16 [16, 7168]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x", "x_scale", "b", "y"], axis1: &[] },
    corners: &[
        case!("256 x 128", x: I8 [70, 272], w: I8 [150, 272], x_scale: F32 [70, 3], w_scale: F32 [2, 3], a: F32 [70, 150], b: F16 [1]; tile("256x128")),
        case!("64 x 64, 2 parts", x: Fp8E4M3Fnuz [65, 272], w: Fp8E4M3Fnuz [70, 272], x_scale: F32 [65, 3], w_scale: F32 [1, 3], a: Bf16 [1], b: F32 [65, 70]; tile("64x64"), splits(2), add_product()),
        case!("elements", x: Fp8E4M3 [33, 77], w: Fp8E4M3 [50, 77], x_scale: F32 [33, 1], w_scale: F32 [1, 1], a: F16 [33, 50], b: Bf16 [33, 50]; tile("elements"), add_product(), to("f32")),
        case!("groups of 32", x: Fp8E4M3Fnuz [20, 272], w: Fp8E4M3Fnuz [70, 272], x_scale: F32 [20, 9], w_scale: F32 [1, 9], a: Bf16 [1], b: F32 [20, 70]; of_k(32), add_product()),
        case!("16 x 32", x: I8 [13, 2064], w: I8 [48, 2064], x_scale: F32 [13, 17], w_scale: F32 [1, 17], a: Bf16 [13, 48], b: F32 [1]; tile("16x32"), to("f16")),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, group, fuse) = (options(&inputs)?, block_shape(&inputs)?, fuse_type(&inputs)?);
        let (x_scale, w_scale) = (inputs.view("x_scale")?, inputs.view("w_scale")?);
        let (a, b) = (Addend::Tensor(floats(&inputs, "a")?), Addend::Tensor(floats(&inputs, "b")?));
        with_codes!(inputs, "x", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (x, w) = (inputs.view::<T>("x")?, weight::<T>(&inputs)?);
            with_float!("fused_gemm_a8w8_blockscale_mul_add", "y", y_dtype(&inputs)?, Y => {
                let y = outputs.take::<Y>("y")?;
                let inputs = FusedBlockInputs { x, w, x_scale, w_scale, group };
                crate::fused_gemm_a8w8_blockscale_mul_add(stream, inputs, MulAdd { a, b, fuse }, y, space, options)
            })
        })
    },
    reference: |call: &HostCall| with_terms(call, blocks(call)?),
    ..GEMM_A16WFP4
};

const FUSED_GEMM_AFP4WFP4_MUL_ADD: Operator = Operator {
    name: "fused_gemm_afp4wfp4_mul_add",
    summary: "y = a * g + b or a * b + g, g of gemm_afp4wfp4",
    args: &[X4, W4, X4_SCALE, W4_SCALE, TERM_A, TERM_B, y(2, "[M, N]", TERMS)],
    scalars: &[Y_DTYPE, FUSE, SHUFFLED, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[&kernels::WFP4, &kernels::WFP4_DECODE, &kernels::REDUCE],
    cases: &[
        case!("Llama-3 8B o, 16 tokens", x: Fp4x2 [16, 2048], w: Fp4x2 [4096, 2048], x_scale: E8M0 [16, 128], w_scale: E8M0 [4096, 128], a: F32 [1], b: Bf16 [16, 4096]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x", "x_scale", "b", "y"], axis1: &[] },
    corners: &[
        case!("256 x 128", x: Fp4x2 [100, 80], w: Fp4x2 [140, 80], x_scale: E8M0 [100, 5], w_scale: E8M0 [140, 5], a: F32 [100, 140], b: F16 [1]; tile("256x128")),
        case!("64 x 64, 2 parts", x: Fp4x2 [65, 192], w: Fp4x2 [70, 192], x_scale: E8M0 [65, 12], w_scale: E8M0 [70, 12], a: Bf16 [1], b: F32 [65, 70]; tile("64x64"), splits(2), add_product()),
        case!("32 x 32, shuffled", x: Fp4x2 [17, 128], w: Fp4x2 [64, 128], x_scale: E8M0 [256], w_scale: E8M0 [512], a: Bf16 [17, 64], b: F32 [1]; tile("32x32"), scales_shuffled(), w_shuffled(), to("f16")),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, fuse) = (options(&inputs)?, fuse_type(&inputs)?);
        let (a, b) = (Addend::Tensor(floats(&inputs, "a")?), Addend::Tensor(floats(&inputs, "b")?));
        let space = workspace(stream, &inputs, &mut outputs, &options, Precision::Fp4)?;
        let (x, w) = (inputs.view("x")?, weight::<Fp4x2>(&inputs)?);
        let (x_scale, w_scale) = (mx_scale(&inputs, "x_scale")?, mx_scale(&inputs, "w_scale")?);
        with_float!("fused_gemm_afp4wfp4_mul_add", "y", y_dtype(&inputs)?, Y => {
            let y = outputs.take::<Y>("y")?;
            let inputs = FusedMxInputs { x, w, x_scale, w_scale };
            crate::fused_gemm_afp4wfp4_mul_add(stream, inputs, MulAdd { a, b, fuse }, y, space, options)
        })
    },
    reference: |call: &HostCall| with_terms(call, afp4wfp4(call)?),
    ..GEMM_A16WFP4
};

const CAT: ArgSpec = ArgSpec::input("y", FLOATS, 3, "[M, D, S3]");
const C1: ArgSpec = ArgSpec::output("c1", Tolerance::Sum { terms: TERMS }, FLOATS, 3, "[M, D, S1 + S3]");
const C2: ArgSpec = ArgSpec { name: "c2", shape: "[M, D, S2]", ..C1 };
const S1: ScalarSpec = ScalarSpec {
    name: "s1",
    default: Scalar::Int(128),
    choices: &[],
    summary: "columns of each D that go to c1",
};
const fn s1(columns: i64) -> (&'static str, Scalar) {
    ("s1", Scalar::Int(columns))
}

/// D, S1, S2 and S3 of a call.
fn split_sizes<V: Described>(call: &Call<V>) -> Result<[usize; 4]> {
    let [_, _, n, _] = sizes(call)?;
    let y = call.get("y")?.shape();
    let (op, s1) = (call.operator().name, usize::try_from(call.int("s1")?).unwrap_or(usize::MAX));
    match y {
        &[_, d, s3] if d > 0 && n % d == 0 && s1 <= n / d => Ok([d, s1, n / d - s1, s3]),
        _ => Err(Error::shape(
            op,
            "y",
            y,
            format!("[M, D, S3], {n} rows of w a multiple of D, no less than D S1"),
        )),
    }
}

fn split_specs<V: Described>(call: &Call<V>) -> Result<Named<TensorSpec>> {
    let ([_, m, _, _], [d, s1, s2, s3]) = (sizes(call)?, split_sizes(call)?);
    let spec = |columns| Ok::<_, Error>(TensorSpec::new(y_dtype(call)?, [m, d, columns]));
    Ok(vec![("c1", spec(s1 + s3)?), ("c2", spec(s2)?)])
}

fn split(call: &HostCall, sums: Sums) -> Result<Named<HostTensorF64>> {
    let ([_, m, _, _], [d, s1, s2, s3]) = (sizes(call)?, split_sizes(call)?);
    let y = call.get("y")?.to_f64();
    let of = |values: &[f64], cat: &[f64]| {
        let (mut c1, mut c2) = (Vec::new(), Vec::new());
        for i in 0..m * d {
            let row = &values[i * (s1 + s2)..][..s1 + s2];
            c1.extend_from_slice(&row[..s1]);
            c1.extend_from_slice(&cat[i * s3..][..s3]);
            c2.extend_from_slice(&row[s1..]);
        }
        (c1, c2)
    };
    let magnitudes: Vec<f64> = y.iter().map(|y| y.abs()).collect();
    let ((c1, c2), (of_c1, of_c2)) = (of(&sums.values, &y), of(&sums.magnitudes, &magnitudes));
    let tensor = |columns: usize, values, magnitudes| {
        HostTensorF64::new([m, d, columns], values).with_magnitudes(magnitudes)
    };
    Ok(vec![("c1", tensor(s1 + s3, c1, of_c1)), ("c2", tensor(s2, c2, of_c2))])
}

const FUSED_GEMM_A8W8_BLOCKSCALE_SPLIT_CAT: Operator = Operator {
    name: "fused_gemm_a8w8_blockscale_split_cat",
    summary: "c1 = [C[.., ..S1], y], c2 = C[.., S1..], C of gemm_a8w8_blockscale",
    args: &[X8, W8, X8_SCALE, W8_SCALE, CAT, C1, C2],
    scalars: &[Y_DTYPE, S1, GROUP_N, GROUP_K, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[
        &kernels::A8W8_BLOCKSCALE,
        &kernels::A8W8_BLOCKSCALE_DECODE,
        &kernels::A8W8_GROUPSCALE,
        &kernels::REDUCE,
    ],
    cases: &[
        case!("DeepSeek-V3 k, v up-projection of 16 heads, 64 tokens", x: Fp8E4M3Fnuz [64, 512], w: Fp8E4M3Fnuz [4096, 512], x_scale: F32 [64, 4], w_scale: F32 [32, 4], y: Bf16 [64, 16, 64]),
        case!("DeepSeek-V3 k, v up-projection of 16 heads, 64 tokens (OCP)", x: Fp8E4M3 [64, 512], w: Fp8E4M3 [4096, 512], x_scale: F32 [64, 4], w_scale: F32 [32, 4], y: Bf16 [64, 16, 64]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x", "x_scale", "b", "y"], axis1: &[] },
    corners: &[
        case!("eights", x: I8 [70, 272], w: I8 [120, 272], x_scale: F32 [70, 3], w_scale: F32 [1, 3], y: Bf16 [70, 5, 32]; tile("256x128"), s1(16)),
        case!("2 parts", x: Fp8E4M3Fnuz [65, 272], w: Fp8E4M3Fnuz [72, 272], x_scale: F32 [65, 3], w_scale: F32 [1, 3], y: F32 [65, 9, 8]; tile("64x64"), splits(2), s1(0), to("f32")),
        case!("elements", x: Fp8E4M3 [33, 77], w: Fp8E4M3 [51, 77], x_scale: F32 [33, 1], w_scale: F32 [1, 1], y: F16 [33, 17, 5]; tile("elements"), s1(1)),
        case!("groups of 16", x: Fp8E4M3 [20, 160], w: Fp8E4M3 [72, 160], x_scale: F32 [20, 10], w_scale: F32 [9, 10], y: F32 [20, 9, 8]; s1(0), of_n(8), of_k(16)),
        case!("nothing to add", x: I8 [13, 2064], w: I8 [39, 2064], x_scale: F32 [13, 17], w_scale: F32 [1, 17], y: Bf16 [13, 3, 0]; tile("16x32"), s1(13), to("f16")),
    ],
    outputs: |call| split_specs(call),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, group, cat) = (options(&inputs)?, block_shape(&inputs)?, floats(&inputs, "y")?);
        let (x_scale, w_scale) = (inputs.view("x_scale")?, inputs.view("w_scale")?);
        with_codes!(inputs, "x", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (x, w) = (inputs.view::<T>("x")?, weight::<T>(&inputs)?);
            with_float!("fused_gemm_a8w8_blockscale_split_cat", "c1", y_dtype(&inputs)?, Y => {
                let (c1, c2) = (outputs.take::<Y>("c1")?, outputs.take::<Y>("c2")?);
                let inputs = FusedBlockInputs { x, w, x_scale, w_scale, group };
                let outputs = SplitCatOutputs { c1, c2 };
                crate::fused_gemm_a8w8_blockscale_split_cat(stream, inputs, cat, outputs, space, options)
            })
        })
    },
    reference: |call: &HostCall| split(call, blocks(call)?),
    ..GEMM_A16WFP4
};

const FUSED_GEMM_AFP4WFP4_SPLIT_CAT: Operator = Operator {
    name: "fused_gemm_afp4wfp4_split_cat",
    summary: "c1 = [C[.., ..S1], y], c2 = C[.., S1..], C of gemm_afp4wfp4",
    args: &[X4, W4, X4_SCALE, W4_SCALE, CAT, C1, C2],
    scalars: &[Y_DTYPE, S1, SHUFFLED, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[&kernels::WFP4, &kernels::WFP4_DECODE, &kernels::REDUCE],
    cases: &[
        case!("DeepSeek-V3 k, v up-projection of 16 heads, 64 tokens", x: Fp4x2 [64, 256], w: Fp4x2 [4096, 256], x_scale: E8M0 [64, 16], w_scale: E8M0 [4096, 16], y: Bf16 [64, 16, 64]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x", "x_scale", "b", "y"], axis1: &[] },
    corners: &[
        case!("eights", x: Fp4x2 [70, 80], w: Fp4x2 [120, 80], x_scale: E8M0 [70, 5], w_scale: E8M0 [120, 5], y: F16 [70, 5, 16]; tile("256x128"), s1(16)),
        case!("2 parts", x: Fp4x2 [65, 192], w: Fp4x2 [70, 192], x_scale: E8M0 [65, 12], w_scale: E8M0 [70, 12], y: F32 [65, 7, 3]; tile("64x64"), splits(2), s1(3), to("f32")),
        case!("32 x 32", x: Fp4x2 [17, 48], w: Fp4x2 [64, 48], x_scale: E8M0 [17, 3], w_scale: E8M0 [64, 3], y: Bf16 [17, 2, 24]; tile("32x32"), s1(32)),
    ],
    outputs: |call| split_specs(call),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, cat) = (options(&inputs)?, floats(&inputs, "y")?);
        let space = workspace(stream, &inputs, &mut outputs, &options, Precision::Fp4)?;
        let (x, w) = (inputs.view("x")?, weight::<Fp4x2>(&inputs)?);
        let (x_scale, w_scale) = (mx_scale(&inputs, "x_scale")?, mx_scale(&inputs, "w_scale")?);
        with_float!("fused_gemm_afp4wfp4_split_cat", "c1", y_dtype(&inputs)?, Y => {
            let (c1, c2) = (outputs.take::<Y>("c1")?, outputs.take::<Y>("c2")?);
            let inputs = FusedMxInputs { x, w, x_scale, w_scale };
            let outputs = SplitCatOutputs { c1, c2 };
            crate::fused_gemm_afp4wfp4_split_cat(stream, inputs, cat, outputs, space, options)
        })
    },
    reference: |call: &HostCall| split(call, afp4wfp4(call)?),
    ..GEMM_A16WFP4
};
