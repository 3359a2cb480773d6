//! Two GEMMs in one launch.

use super::quantized::{
    FP8, GEMM_A16WFP4, HALVES, SHUFFLED, f32s, floats, fp4, joined, mx, mx_scale, mx_values, scales_shuffled,
};
use super::{
    BATCH_INVARIANT, BIAS, GROUP_K, GROUP_N, Row, SPLITS, TILE, W_SHUFFLED, Y_DTYPE, asked_slices,
    block_shape, case, choice, of_k, of_n, optional_f64, options, packed, splits, tile, to, w_shuffled,
    weight_of, weights_of, with_codes, with_half, y, y_dtype,
};
use crate::reference::{self, Sums};
use crate::{
    DualFp4Inputs, DualFp8Inputs, DualOutputs, FloatView, GemmProblem, Precision, gemm_workspace, kernels,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, TensorSpec,
};
use hk_core::{Error, Fp4x2, Result, Stream, TensorViewMut, with_float};

pub(super) const ROWS: &[Row] = &[
    Row::new(FUSED_GEMM_A8W8_BLOCKSCALE_A16W16, choice::two),
    Row::new(FUSED_GEMM_AFP4WFP4_A16W16, choice::two),
];

/// Error of a sum in f32, in its magnitude.
const TERMS: f64 = 1.0 / (1u64 << 16) as f64;

const CODE: Sample = Sample::Uniform { low: -100.0, high: 100.0 };
const X8: ArgSpec = ArgSpec::input("x_fp8", FP8, 2, "[M, K]").sampled(CODE);
const W8: ArgSpec = ArgSpec::input("w_fp8", FP8, 2, "[N1, K]").sampled(CODE);
const X16: ArgSpec = ArgSpec::input("x_bf16", HALVES, 2, "[M, K]");
const W16: ArgSpec = ArgSpec::input("w_bf16", HALVES, 2, "[N2, K]");
const BIAS1: ArgSpec = ArgSpec { name: "bias1", shape: "[N1]", ..BIAS };
const BIAS2: ArgSpec = ArgSpec { name: "bias2", shape: "[N2]", ..BIAS };
const Y1: ArgSpec = ArgSpec { name: "y1", ..y(2, "[M, N1]", TERMS) };
const Y2: ArgSpec = ArgSpec { name: "y2", shape: "[M, N2]", ..Y1 };

/// M, N1, N2 and K of a call.
pub(super) fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 4]> {
    let fp8 = call.optional("x_fp8").is_some();
    let (x, w, of) =
        if fp8 { ("x_fp8", "w_fp8", call.get("w_fp8")?) } else { ("x_fp4", "w_fp4", call.get("w_fp4")?) };
    let (x, w2) = (call.get(x)?, call.get("w_bf16")?);
    let columns = |tensor: &V| tensor.shape().last().map_or(0, |n| n * packed(tensor));
    // Shuffled weights may be padded.
    let (k, padded) = (columns(x), call.bool("w_shuffled").unwrap_or(false));
    let same_k = |w: &V| columns(w) == k || padded && columns(w) > k;
    match (x.shape(), of.shape(), w2.shape()) {
        (&[m, _], &[n1, _], &[n2, _]) if same_k(of) && same_k(w2) => Ok([m, n1, n2, k]),
        (_, of, _) => Err(Error::shape(call.operator().name, w, of, "K of all operands")),
    }
}

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [m, n1, n2, _] = sizes(call)?;
    let spec = |n| Ok::<_, Error>(TensorSpec::new(y_dtype(call)?, [m, n]));
    Ok(vec![("y1", spec(n1)?), ("y2", spec(n2)?)])
}

fn space<'a>(
    stream: &Stream,
    inputs: &Inputs,
    outputs: &mut Outputs<'a>,
    precision: Precision,
) -> Result<Option<TensorViewMut<'a, f32>>> {
    let [m, n1, n2, k] = sizes(inputs)?;
    let options = options(inputs)?;
    let len = match options.config {
        Some(_) => asked_slices(stream, inputs, &options, [1, m, n1], Some(n2))?,
        None => {
            let problem = GemmProblem::new(precision, m, n1, k).beside(n2);
            gemm_workspace(stream.device().info(), &problem)
        }
    };
    if len == 0 { Ok(None) } else { outputs.workspace(stream, len).map(Some) }
}

fn bias<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<FloatView<'a>>> {
    inputs.optional(name).map(|_| floats(inputs, name)).transpose()
}

/// Both outputs, given the first one's sums.
fn finished(call: &HostCall, first: Sums) -> Result<Named<HostTensorF64>> {
    let [m, n1, n2, k] = sizes(call)?;
    let second =
        reference::product(&call.get("x_bf16")?.to_f64(), &weights_of(call, "w_bf16")?, [1, m, n2, k]);
    let tensor = |sums: Sums, bias: &str, n: usize| {
        let Sums { values, magnitudes } = sums.biased(&optional_f64(call, bias), [m, n]);
        HostTensorF64::new([m, n], values).with_magnitudes(magnitudes)
    };
    Ok(vec![("y1", tensor(first, "bias1", n1)), ("y2", tensor(second, "bias2", n2))])
}

macro_rules! fp8_corners {
    ($name:ident: $c:ident, $h:ident) => {
        const $name: [Case; 9] = [
            case!("256 x 128", x_fp8: $c [20, 272], w_fp8: $c [140, 272], x_scale: F32 [20, 3], w_scale: F32 [2, 3], x_bf16: $h [20, 272], w_bf16: $h [40, 272], bias1: Bf16 [140]; tile("256x128")),
            case!("64 x 64, 2 parts", x_fp8: $c [65, 272], w_fp8: $c [70, 272], x_scale: F32 [65, 3], w_scale: F32 [1, 3], x_bf16: $h [65, 272], w_bf16: $h [66, 272], bias1: F32 [70], bias2: F16 [66]; tile("64x64"), splits(2), to("f32")),
            case!("64 x 64, shuffled", x_fp8: $c [33, 128], w_fp8: $c [80, 128], x_scale: F32 [33, 1], w_scale: F32 [40, 1], x_bf16: $h [33, 128], w_bf16: $h [16, 128]; tile("64x64"), w_shuffled(), of_n(2)),
            case!("elements", x_fp8: $c [33, 77], w_fp8: $c [50, 77], x_scale: F32 [33, 1], w_scale: F32 [50, 1], x_bf16: $h [33, 77], w_bf16: $h [3, 77], bias2: Bf16 [3]; tile("elements"), to("f16"), of_n(1)),
            case!("16 x 32", x_fp8: $c [13, 2064], w_fp8: $c [40, 2064], x_scale: F32 [13, 17], w_scale: F32 [1, 17], x_bf16: $h [13, 2064], w_bf16: $h [33, 2064]; tile("16x32"), splits(2)),
            case!("32 x 32", x_fp8: $c [17, 272], w_fp8: $c [40, 272], x_scale: F32 [17, 3], w_scale: F32 [10, 3], x_bf16: $h [17, 272], w_bf16: $h [8, 272], bias1: F32 [40], bias2: F32 [8]; tile("32x32"), of_n(4)),
            case!("64 x 32", x_fp8: $c [63, 352], w_fp8: $c [40, 352], x_scale: F32 [63, 3], w_scale: F32 [1, 3], x_bf16: $h [63, 352], w_bf16: $h [33, 352]; tile("64x32"), to("f32")),
            case!("groups of 32", x_fp8: $c [20, 272], w_fp8: $c [70, 272], x_scale: F32 [20, 9], w_scale: F32 [9, 9], x_bf16: $h [20, 272], w_bf16: $h [33, 272]; tile("64x64"), splits(2), of_n(8), of_k(32)),
            case!("groups of 8", x_fp8: $c [20, 77], w_fp8: $c [50, 77], x_scale: F32 [20, 10], w_scale: F32 [1, 10], x_bf16: $h [20, 77], w_bf16: $h [3, 77]; of_k(8)),
        ];
    };
}
fp8_corners!(FNUZ_BF16: Fp8E4M3Fnuz, Bf16);
fp8_corners!(FNUZ_F16: Fp8E4M3Fnuz, F16);
fp8_corners!(OCP_BF16: Fp8E4M3, Bf16);
fp8_corners!(OCP_F16: Fp8E4M3, F16);

const FUSED_GEMM_A8W8_BLOCKSCALE_A16W16: Operator = Operator {
    name: "fused_gemm_a8w8_blockscale_a16w16",
    family: "hk-gemm",
    summary: "y1 of gemm_a8w8_blockscale, y2 of gemm_a16w16, in one launch",
    args: &[
        X8,
        W8,
        f32s("x_scale", 2, 2, "[M, groups of K]"),
        f32s("w_scale", 2, 2, "[groups of N1, groups of K]"),
        X16,
        W16,
        BIAS1,
        BIAS2,
        Y1,
        Y2,
    ],
    scalars: &[Y_DTYPE, GROUP_N, GROUP_K, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[
        &kernels::DUAL_FP8,
        &kernels::DUAL_FP8_GROUPSCALE,
        &kernels::DUAL_FP8_DECODE,
        &kernels::REDUCE,
    ],
    cases: &[
        case!("DeepSeek-V3 gate and up of a shared expert of 8 GPUs, and router, 16 tokens", x_fp8: Fp8E4M3Fnuz [16, 7168], w_fp8: Fp8E4M3Fnuz [512, 7168], x_scale: F32 [16, 56], w_scale: F32 [4, 56], x_bf16: Bf16 [16, 7168], w_bf16: Bf16 [256, 7168]),
        case!("DeepSeek-V3 gate and up of a shared expert of 8 GPUs, and router, 16 tokens (OCP)", x_fp8: Fp8E4M3 [16, 7168], w_fp8: Fp8E4M3 [512, 7168], x_scale: F32 [16, 56], w_scale: F32 [4, 56], x_bf16: Bf16 [16, 7168], w_bf16: Bf16 [256, 7168]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x_fp8", "x_fp4", "x_scale", "x_bf16"], axis1: &[] },
    corners: &joined::<36>(&[&FNUZ_BF16, &FNUZ_F16, &OCP_BF16, &OCP_F16]),
    outputs: specs,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, group) = (options(&inputs)?, block_shape(&inputs)?);
        let space = space(stream, &inputs, &mut outputs, Precision::Fp8)?;
        let (x_scale, w_scale) = (inputs.view("x_scale")?, inputs.view("w_scale")?);
        let (bias1, bias2) = (bias(&inputs, "bias1")?, bias(&inputs, "bias2")?);
        with_codes!(inputs, "x_fp8", T => with_half!(inputs, "x_bf16", H => {
            let (x_fp8, w_fp8) = (inputs.view::<T>("x_fp8")?, weight_of::<T>(&inputs, "w_fp8")?);
            let (x_bf16, w_bf16) = (inputs.view::<H>("x_bf16")?, weight_of::<H>(&inputs, "w_bf16")?);
            with_float!("fused_gemm_a8w8_blockscale_a16w16", "y1", y_dtype(&inputs)?, Y => {
                let (y1, y2) = (outputs.take::<Y>("y1")?, outputs.take::<Y>("y2")?);
                let inputs =
                    DualFp8Inputs { x_fp8, w_fp8, x_scale, w_scale, group, x_bf16, w_bf16, bias1, bias2 };
                let outputs = DualOutputs { y1, y2 };
                crate::fused_gemm_a8w8_blockscale_a16w16(stream, inputs, outputs, space, options)
            })
        }))
    },
    reference: |call: &HostCall| {
        let ([m, n1, _, k], group) = (sizes(call)?, block_shape(call)?);
        let scale = |name| Ok::<_, Error>(call.get(name)?.to_f64());
        let x = reference::scaled(&call.get("x_fp8")?.to_f64(), k, &scale("x_scale")?, [1, group.k]);
        let w = reference::scaled(&weights_of(call, "w_fp8")?, k, &scale("w_scale")?, [group.n, group.k]);
        finished(call, reference::product(&x, &w, [1, m, n1, k]))
    },
    ..GEMM_A16WFP4
};

macro_rules! fp4_corners {
    ($name:ident: $h:ident) => {
        const $name: [Case; 9] = [
            case!("256 x 128, words", x_fp4: Fp4x2 [20, 128], w_fp4: Fp4x2 [140, 128], x_scale: E8M0 [20, 8], w_scale: E8M0 [140, 8], x_bf16: $h [20, 256], w_bf16: $h [40, 256], bias1: F16 [140]; tile("256x128")),
            case!("256 x 128", x_fp4: Fp4x2 [20, 80], w_fp4: Fp4x2 [140, 80], x_scale: E8M0 [20, 5], w_scale: E8M0 [140, 5], x_bf16: $h [20, 160], w_bf16: $h [40, 160], bias2: F32 [40]; tile("256x128"), to("f16")),
            case!("64 x 64, words", x_fp4: Fp4x2 [65, 192], w_fp4: Fp4x2 [70, 192], x_scale: E8M0 [65, 12], w_scale: E8M0 [70, 12], x_bf16: $h [65, 384], w_bf16: $h [66, 384], bias1: F32 [70], bias2: Bf16 [66]; tile("64x64"), splits(2), to("f32")),
            case!("64 x 64, shuffled", x_fp4: Fp4x2 [65, 128], w_fp4: Fp4x2 [64, 128], x_scale: E8M0 [768], w_scale: E8M0 [512], x_bf16: $h [65, 256], w_bf16: $h [16, 256]; tile("64x64"), scales_shuffled(), w_shuffled()),
            case!("elements", x_fp4: Fp4x2 [33, 48], w_fp4: Fp4x2 [50, 48], x_scale: E8M0 [33, 3], w_scale: E8M0 [50, 3], x_bf16: $h [33, 96], w_bf16: $h [3, 96]; tile("elements"), to("f16")),
            case!("16 x 32", x_fp4: Fp4x2 [13, 1040], w_fp4: Fp4x2 [40, 1040], x_scale: E8M0 [13, 65], w_scale: E8M0 [40, 65], x_bf16: $h [13, 2080], w_bf16: $h [33, 2080], bias1: F32 [40]; tile("16x32"), splits(2)),
            case!("32 x 32", x_fp4: Fp4x2 [17, 272], w_fp4: Fp4x2 [64, 272], x_scale: E8M0 [17, 17], w_scale: E8M0 [64, 17], x_bf16: $h [17, 544], w_bf16: $h [8, 544]; tile("32x32")),
            case!("32 x 32, shuffled", x_fp4: Fp4x2 [17, 128], w_fp4: Fp4x2 [64, 128], x_scale: E8M0 [256], w_scale: E8M0 [512], x_bf16: $h [17, 256], w_bf16: $h [48, 256]; tile("32x32"), scales_shuffled(), w_shuffled()),
            case!("64 x 32", x_fp4: Fp4x2 [63, 176], w_fp4: Fp4x2 [40, 176], x_scale: E8M0 [63, 11], w_scale: E8M0 [40, 11], x_bf16: $h [63, 352], w_bf16: $h [33, 352], bias2: F32 [33]; tile("64x32"), to("f32")),
        ];
    };
}
fp4_corners!(FP4_BF16: Bf16);
fp4_corners!(FP4_F16: F16);

const FUSED_GEMM_AFP4WFP4_A16W16: Operator = Operator {
    name: "fused_gemm_afp4wfp4_a16w16",
    summary: "y1 of gemm_afp4wfp4, y2 of gemm_a16w16, in one launch",
    args: &[
        fp4("x_fp4", 2, "[M, K / 2]"),
        fp4("w_fp4", 2, "[N1, K / 2]"),
        mx("x_scale", 1, 2, "[M, K / 32], or shuffled"),
        mx("w_scale", 1, 2, "[N1, K / 32], or shuffled"),
        X16,
        W16,
        BIAS1,
        BIAS2,
        Y1,
        Y2,
    ],
    scalars: &[Y_DTYPE, SHUFFLED, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[&kernels::DUAL_FP4_BF16, &kernels::DUAL_FP4_F16, &kernels::DUAL_FP4_DECODE, &kernels::REDUCE],
    cases: &[
        case!("DeepSeek-V3 gate and up of a shared expert of 8 GPUs, and router, 16 tokens", x_fp4: Fp4x2 [16, 3584], w_fp4: Fp4x2 [512, 3584], x_scale: E8M0 [16, 224], w_scale: E8M0 [512, 224], x_bf16: Bf16 [16, 7168], w_bf16: Bf16 [256, 7168]),
        case!("the same, 64 tokens", x_fp4: Fp4x2 [64, 3584], w_fp4: Fp4x2 [512, 3584], x_scale: E8M0 [64, 224], w_scale: E8M0 [512, 224], x_bf16: Bf16 [64, 7168], w_bf16: Bf16 [256, 7168]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x_fp8", "x_fp4", "x_scale", "x_bf16"], axis1: &[] },
    corners: &joined::<18>(&[&FP4_BF16, &FP4_F16]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        let space = space(stream, &inputs, &mut outputs, Precision::Fp4)?;
        let (x_fp4, w_fp4) = (inputs.view("x_fp4")?, weight_of::<Fp4x2>(&inputs, "w_fp4")?);
        let (x_scale, w_scale) = (mx_scale(&inputs, "x_scale")?, mx_scale(&inputs, "w_scale")?);
        let (bias1, bias2) = (bias(&inputs, "bias1")?, bias(&inputs, "bias2")?);
        with_half!(inputs, "x_bf16", H => {
            let (x_bf16, w_bf16) = (inputs.view::<H>("x_bf16")?, weight_of::<H>(&inputs, "w_bf16")?);
            with_float!("fused_gemm_afp4wfp4_a16w16", "y1", y_dtype(&inputs)?, Y => {
                let (y1, y2) = (outputs.take::<Y>("y1")?, outputs.take::<Y>("y2")?);
                let inputs = DualFp4Inputs { x_fp4, w_fp4, x_scale, w_scale, x_bf16, w_bf16, bias1, bias2 };
                let outputs = DualOutputs { y1, y2 };
                crate::fused_gemm_afp4wfp4_a16w16(stream, inputs, outputs, space, options)
            })
        })
    },
    reference: |call: &HostCall| {
        let [m, n1, _, k] = sizes(call)?;
        let x = mx_values(call, call.get("x_fp4")?.to_f64(), "x_scale", [1, m, k])?;
        let w = mx_values(call, weights_of(call, "w_fp4")?, "w_scale", [1, n1, k])?;
        finished(call, reference::product(&x, &w, [1, m, n1, k]))
    },
    ..FUSED_GEMM_A8W8_BLOCKSCALE_A16W16
};
