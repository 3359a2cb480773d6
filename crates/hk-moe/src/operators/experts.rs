//! The expert GEMMs.

use super::{FLOATS, I32};
use crate::experts::ExpertEpilogue;
use crate::moe_op::{plain, silu_fused};
use crate::reference::{self, EXPERT_TERMS, ExpertProblem};
use crate::{
    BlockShape, ExpertInputs, ExpertScales, ExpertTile, FloatView, GemmWeight, SortedRows, TileLists,
    kernels, moe_align_len, moe_align_workspace,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Element, Error, Float, Result, Stream, TensorViewMut, with_float};

const OPERANDS: &[DType] = &[DType::Bf16, DType::F16, DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
const SCALE: Sample = Sample::Uniform { low: 0.001, high: 0.02 };
const VALUES: Sample = Sample::Normal { mean: 0.0, deviation: 1.0 };

const A: ArgSpec = ArgSpec::input("a", OPERANDS, 2, "[T, K] or [T k, K]").sampled(VALUES);
const W: ArgSpec = ArgSpec::input("w", OPERANDS, 3, "[E, N, K]").sampled(VALUES);
const A_SCALE: ArgSpec =
    ArgSpec::input("a_scale", &[DType::F32], 1, "[rows of a], [1] or [rows of a, groups of K]")
        .ranks(1, 2)
        .optional()
        .sampled(SCALE);
const W_SCALE: ArgSpec =
    ArgSpec::input("w_scale", &[DType::F32], 1, "[E, N], [E], [1] or [E, groups of N, groups of K]")
        .ranks(1, 3)
        .optional()
        .sampled(SCALE);
const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 2, "[E, N]").optional();
const WEIGHTS: ArgSpec = ArgSpec::input("topk_weights", FLOATS, 2, "[T, k]").optional();
const IDS: ArgSpec = ArgSpec::input("topk_ids", I32, 2, "[T, k]").sampled(Sample::RowsOf("w"));
const Y: ArgSpec = ArgSpec::output("y", Tolerance::Sum { terms: EXPERT_TERMS }, FLOATS, 2, "[T k, N]");

const fn scalar(name: &'static str, default: u64, summary: &'static str) -> ScalarSpec {
    ScalarSpec { name, default: Scalar::Count(default), choices: &[], summary }
}
const BLOCK: ScalarSpec = scalar("block_size", 64, "rows of a list tile: 16, 32, 64, 128 or 256");
const GROUP_N: ScalarSpec = scalar("group_n", 128, "rows of w with one scale, a power of two");
const GROUP_K: ScalarSpec = scalar("group_k", 128, "columns with one scale, a power of two");
const Y_DTYPE: ScalarSpec = ScalarSpec {
    name: "y_dtype",
    default: Scalar::Choice("bf16"),
    choices: &["bf16", "f16", "f32"],
    summary: "type of y",
};
const TILE_NAMES: [&str; 1 + ExpertTile::ALL.len()] = {
    let mut names = ["auto"; 1 + ExpertTile::ALL.len()];
    let mut i = 0;
    while i < ExpertTile::ALL.len() {
        names[i + 1] = ExpertTile::ALL[i].name();
        i += 1;
    }
    names
};
const TILE: ScalarSpec = ScalarSpec {
    name: "tile",
    default: Scalar::Choice("auto"),
    choices: &TILE_NAMES,
    summary: "outputs of a block",
};
const GELU: ScalarSpec = ScalarSpec {
    name: "gelu",
    default: Scalar::Choice("auto"),
    choices: &["auto", "yes", "no"],
    summary: "whether GELU is applied; auto: only without topk_weights",
};
const W_SHUFFLED: ScalarSpec = ScalarSpec {
    name: "w_shuffled",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "w is in the order of shuffle_weight",
};

/// Scalars of a case.
const fn block(rows: u64) -> (&'static str, Scalar) {
    ("block_size", Scalar::Count(rows))
}
const fn tile(name: &'static str) -> (&'static str, Scalar) {
    ("tile", Scalar::Choice(name))
}
const fn to(dtype: &'static str) -> (&'static str, Scalar) {
    ("y_dtype", Scalar::Choice(dtype))
}
const fn shuffled() -> (&'static str, Scalar) {
    ("w_shuffled", Scalar::Bool(true))
}

macro_rules! case {
    ($label:expr, $($name:ident: $dtype:ident [$($n:expr),+]),+ $(; $($scalar:expr),+)?) => {
        Case {
            label: $label,
            tensors: &[$((stringify!($name), DType::$dtype, &[$($n),+])),+],
            scalars: &[$($($scalar),+)?],
        }
    };
}

/// Runs `$body` with the types of the operands.
macro_rules! with_operands {
    ($call:ident, $a:ident, $w:ident => $body:expr) => {
        match ($call.get("a")?.dtype(), $call.get("w")?.dtype()) {
            (DType::Bf16, DType::Bf16) => with_operands!(@ hk_core::bf16, hk_core::bf16, $a, $w, $body),
            (DType::F16, DType::F16) => with_operands!(@ hk_core::f16, hk_core::f16, $a, $w, $body),
            (DType::I8, DType::I8) => with_operands!(@ i8, i8, $a, $w, $body),
            (DType::Fp8E4M3, DType::Fp8E4M3) => {
                with_operands!(@ hk_core::Fp8E4M3, hk_core::Fp8E4M3, $a, $w, $body)
            }
            (DType::Fp8E4M3Fnuz, DType::Fp8E4M3Fnuz) => {
                with_operands!(@ hk_core::Fp8E4M3Fnuz, hk_core::Fp8E4M3Fnuz, $a, $w, $body)
            }
            (a, w) => {
                Err(Error::unsupported($call.operator().name, format!("{a} by {w}"), "no kernel has these operands"))
            }
        }
    };
    (@ $ta:ty, $tw:ty, $a:ident, $w:ident, $body:expr) => {{
        type $a = $ta;
        type $w = $tw;
        $body
    }};
}

pub(crate) const MOE_OP: Operator = Operator {
    name: "moe_op",
    family: "hk-moe",
    summary: "y[g] = topk_weights[g] a[token of g] w[expert of g]^T, each gate by its expert; lists included",
    args: &[A, W, A_SCALE, W_SCALE, BIAS, WEIGHTS, IDS, Y],
    scalars: &[BLOCK, GROUP_N, GROUP_K, Y_DTYPE, W_SHUFFLED, TILE],
    kernels: &[&kernels::EXPERTS, &kernels::EXPERTS_A8W8, &kernels::LISTS],
    cases: &[
        case!("Qwen3 30B up, 64 tokens of 16 experts", a: Bf16 [64, 2048], w: Bf16 [16, 256, 2048], topk_ids: I32 [64, 4]),
        case!("8 experts, 512 tokens", a: Bf16 [512, 1024], w: Bf16 [8, 512, 1024], topk_ids: I32 [512, 2]; block(128)),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3 235B up, EP8, 64 tokens", a: Bf16 [64, 4096], w: Bf16 [16, 3072, 4096], topk_ids: I32 [64, 8]; block(16)),
        case!("Qwen3 235B up, EP8, 1024 tokens", a: Bf16 [1024, 4096], w: Bf16 [16, 3072, 4096], topk_ids: I32 [1024, 8]; block(128)),
        case!("Qwen3 235B up, EP8, 16384 tokens", a: Bf16 [16384, 4096], w: Bf16 [16, 3072, 4096], topk_ids: I32 [16384, 8]; block(256)),
        case!("DeepSeek-V3 up, EP8, 1024 tokens", a: Bf16 [1024, 7168], w: Bf16 [32, 4096, 7168], topk_ids: I32 [1024, 8]; block(128)),
    ]),
    corners: &[
        case!("bf16, 256 x 256", a: Bf16 [150, 200], w: Bf16 [3, 270, 200], topk_weights: F32 [150, 2], topk_ids: I32 [150, 2]; block(256)),
        case!("bf16, 128 x 128", a: Bf16 [70, 136], w: Bf16 [3, 140, 136], bias: Bf16 [3, 140], topk_ids: I32 [70, 2]; block(128), to("f32")),
        case!("bf16, 64 x 64", a: Bf16 [33, 72], w: Bf16 [4, 70, 72], topk_ids: I32 [11, 3]; to("f16")),
        case!("bf16, 16 x 32", a: Bf16 [7, 3080], w: Bf16 [4, 40, 3080], topk_weights: Bf16 [7, 2], topk_ids: I32 [7, 2]; block(16), to("f32")),
        case!("f16, 256 x 256", a: F16 [130, 64], w: F16 [2, 258, 64], topk_ids: I32 [130, 2]; block(256), to("f16")),
        case!("f16, 128 x 128, shuffled", a: F16 [70, 96], w: F16 [3, 144, 96], topk_ids: I32 [70, 2]; block(128), shuffled()),
        case!("f16, 64 x 64", a: F16 [65, 520], w: F16 [3, 66, 520], bias: F32 [3, 66], topk_ids: I32 [65, 1]; tile("64x64"), block(128)),
        case!("f16, 16 x 32, shuffled", a: F16 [9, 1056], w: F16 [5, 48, 1056], topk_ids: I32 [3, 3]; block(32), shuffled(), to("f32")),
        case!("i8, 256 x 256", a: I8 [150, 208], w: I8 [3, 270, 208], a_scale: F32 [150], w_scale: F32 [3, 270], topk_ids: I32 [150, 2]; block(256)),
        case!("i8, 128 x 128", a: I8 [70, 144], w: I8 [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; block(128)),
        case!("i8, 64 x 64", a: I8 [33, 80], w: I8 [4, 70, 80], a_scale: F32 [33], w_scale: F32 [4, 70], topk_weights: F16 [11, 3], topk_ids: I32 [11, 3]),
        case!("i8, 16 x 32", a: I8 [7, 3088], w: I8 [4, 40, 3088], a_scale: F32 [7], w_scale: F32 [1], topk_ids: I32 [7, 2]; block(16)),
        case!("fp8, 256 x 256", a: Fp8E4M3Fnuz [150, 208], w: Fp8E4M3Fnuz [3, 270, 208], a_scale: F32 [150], w_scale: F32 [3, 270], topk_ids: I32 [150, 2]; block(256)),
        case!("fp8, 256 x 256 (OCP)", a: Fp8E4M3 [150, 208], w: Fp8E4M3 [3, 270, 208], a_scale: F32 [150], w_scale: F32 [3, 270], topk_ids: I32 [150, 2]; block(256)),
        case!("fp8, 128 x 128", a: Fp8E4M3Fnuz [70, 144], w: Fp8E4M3Fnuz [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; block(128)),
        case!("fp8, 128 x 128 (OCP)", a: Fp8E4M3 [70, 144], w: Fp8E4M3 [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; block(128)),
        case!("fp8, 64 x 64", a: Fp8E4M3Fnuz [33, 80], w: Fp8E4M3Fnuz [4, 70, 80], a_scale: F32 [33], w_scale: F32 [4, 70], topk_ids: I32 [11, 3]),
        case!("fp8, 64 x 64 (OCP)", a: Fp8E4M3 [33, 80], w: Fp8E4M3 [4, 70, 80], a_scale: F32 [33], w_scale: F32 [4, 70], topk_ids: I32 [11, 3]),
        case!("fp8, 16 x 32", a: Fp8E4M3Fnuz [7, 3088], w: Fp8E4M3Fnuz [4, 40, 3088], a_scale: F32 [7], w_scale: F32 [1], topk_ids: I32 [7, 2]; block(16)),
        case!("fp8, 16 x 32 (OCP)", a: Fp8E4M3 [7, 3088], w: Fp8E4M3 [4, 40, 3088], a_scale: F32 [7], w_scale: F32 [1], topk_ids: I32 [7, 2]; block(16)),
        case!("i8 blocks, 128 x 256", a: I8 [90, 400], w: I8 [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; block(128)),
        case!("i8 blocks, 64 x 64", a: I8 [33, 160], w: I8 [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 9, 2], topk_ids: I32 [11, 3]; ("group_n", Scalar::Count(16))),
        case!("i8 blocks, 16 x 32", a: I8 [7, 2320], w: I8 [4, 40, 2320], a_scale: F32 [7, 10], w_scale: F32 [4, 1, 10], topk_ids: I32 [7, 2]; block(16), ("group_k", Scalar::Count(256))),
        case!("fp8 blocks, 128 x 256", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; block(128)),
        case!("fp8 blocks, 128 x 256 (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; block(128)),
        case!("fp8 blocks, 64 x 64", a: Fp8E4M3Fnuz [33, 160], w: Fp8E4M3Fnuz [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 2, 2], topk_ids: I32 [11, 3]),
        case!("fp8 blocks, 64 x 64 (OCP)", a: Fp8E4M3 [33, 160], w: Fp8E4M3 [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 2, 2], topk_ids: I32 [11, 3]),
        case!("fp8 blocks, 16 x 32", a: Fp8E4M3Fnuz [7, 2320], w: Fp8E4M3Fnuz [4, 40, 2320], a_scale: F32 [7, 19], w_scale: F32 [4, 1, 19], topk_ids: I32 [7, 2]; block(16)),
        case!("fp8 blocks, 16 x 32 (OCP)", a: Fp8E4M3 [7, 2320], w: Fp8E4M3 [4, 40, 2320], a_scale: F32 [7, 19], w_scale: F32 [4, 1, 19], topk_ids: I32 [7, 2]; block(16)),
    ],
    outputs,
    run,
    reference: reference_sorted,
    traffic: Traffic::once,
};

pub(crate) const MOE_OP_GELU: Operator = Operator {
    name: "moe_op_gelu",
    summary: "moe_op, then tanh's GELU unless gates are weighted",
    scalars: &[BLOCK, GROUP_N, GROUP_K, Y_DTYPE, W_SHUFFLED, TILE, GELU],
    cases: &[
        case!("8 experts, 128 tokens", a: Bf16 [128, 1024], w: Bf16 [8, 512, 1024], topk_ids: I32 [128, 2]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Mixtral 8x7B up, 1024 tokens", a: Bf16 [1024, 4096], w: Bf16 [8, 14336, 4096], topk_ids: I32 [1024, 2]; block(256)),
    ]),
    corners: &[
        case!("bf16", a: Bf16 [70, 136], w: Bf16 [3, 140, 136], bias: Bf16 [3, 140], topk_ids: I32 [70, 2]; block(128)),
        case!("f16, weighted", a: F16 [33, 72], w: F16 [4, 70, 72], topk_weights: F32 [11, 3], topk_ids: I32 [11, 3]; to("f32")),
        case!("f16, weighted, with GELU", a: F16 [9, 3088], w: F16 [4, 48, 3088], topk_weights: F32 [3, 3], topk_ids: I32 [3, 3]; block(16), to("f32"), ("gelu", Scalar::Choice("yes"))),
        case!("f16, shuffled", a: F16 [70, 96], w: F16 [3, 144, 96], topk_ids: I32 [70, 2]; block(128), shuffled()),
        case!("i8 blocks", a: I8 [33, 160], w: I8 [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 2, 2], topk_ids: I32 [11, 3]),
    ],
    ..MOE_OP
};

pub(crate) const MOE_OP_SILU_FUSED: Operator = Operator {
    name: "moe_op_silu_fused",
    summary: "y[g] = silu(gate) * value, of moe_op's sums for the first and the second half of the rows of w",
    args: &[A, W, A_SCALE, W_SCALE, BIAS, WEIGHTS, IDS, ArgSpec { shape: "[T k, N / 2]", ..Y }],
    cases: &[
        case!("8 experts, 128 tokens", a: Bf16 [128, 1024], w: Bf16 [8, 512, 1024], topk_ids: I32 [128, 2]),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3 up, EP8, 64 tokens", a: Bf16 [64, 7168], w: Bf16 [32, 4096, 7168], topk_ids: I32 [64, 8]; block(16)),
        case!("DeepSeek-V3 up, EP8, 4096 tokens", a: Bf16 [4096, 7168], w: Bf16 [32, 4096, 7168], topk_ids: I32 [4096, 8]; block(128)),
    ]),
    corners: &[
        case!("bf16, 256 x 256", a: Bf16 [150, 200], w: Bf16 [3, 540, 200], topk_weights: F32 [150, 2], topk_ids: I32 [150, 2]; block(256)),
        case!("bf16, 64 x 64", a: Bf16 [33, 72], w: Bf16 [4, 140, 72], bias: Bf16 [4, 140], topk_ids: I32 [11, 3]; to("f16")),
        case!("bf16, 16 x 32", a: Bf16 [7, 3080], w: Bf16 [4, 72, 3080], topk_weights: F32 [7, 2], topk_ids: I32 [7, 2]; block(16), to("f32")),
        case!("f16, 128 x 128, shuffled", a: F16 [70, 96], w: F16 [3, 288, 96], topk_ids: I32 [70, 2]; block(128), shuffled()),
        case!("fp8, rows", a: Fp8E4M3Fnuz [33, 80], w: Fp8E4M3Fnuz [4, 140, 80], a_scale: F32 [33], w_scale: F32 [4, 140], topk_ids: I32 [11, 3]),
        case!("fp8, rows (OCP)", a: Fp8E4M3 [33, 80], w: Fp8E4M3 [4, 140, 80], a_scale: F32 [33], w_scale: F32 [4, 140], topk_ids: I32 [11, 3]),
        case!("fp8 blocks, 128 x 256", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 540, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; block(128)),
        case!("fp8 blocks, 128 x 256 (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 540, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; block(128)),
        case!("i8 blocks, 16 x 32", a: I8 [7, 2320], w: I8 [4, 64, 2320], a_scale: F32 [7, 10], w_scale: F32 [4, 4, 10], topk_ids: I32 [7, 2]; block(16), ("group_k", Scalar::Count(256)), ("group_n", Scalar::Count(16))),
    ],
    ..MOE_OP
};

/// Sizes of a call.
struct Sizes {
    tokens: usize,
    choices: usize,
    a_rows: usize,
    experts: usize,
    w_rows: usize,
    k: usize,
}

fn packed(dtype: DType) -> usize {
    if dtype == DType::Fp4x2 { 2 } else { 1 }
}

fn sizes<V: Described>(call: &Call<V>) -> Result<Sizes> {
    let (op, a, w) = (call.operator().name, call.get("a")?, call.get("w")?);
    let ids = call.get("topk_ids")?.shape();
    let (tokens, choices) = (ids[0], ids[1]);
    let (a_rows, k) = (a.shape()[0], a.shape()[1] * packed(a.dtype()));
    let (experts, w_rows) = (w.shape()[0], w.shape()[1]);
    let element = w.dtype().size_bytes();
    if w.shape()[2] * packed(w.dtype()) != k || k == 0 || !(w.shape()[2] * element).is_multiple_of(16) {
        return Err(Error::shape(
            op,
            "w",
            w.shape(),
            format!("[E, N, {k}] (K of a), rows of 16-byte chunks"),
        ));
    }
    if !(1..=1024).contains(&experts) || gated(op) && w_rows % 2 != 0 {
        return Err(Error::shape(op, "w", w.shape(), "1 to 1024 experts, an even number of rows if gated"));
    }
    if !(1..=32).contains(&choices) {
        return Err(Error::argument(op, "topk_ids", format!("k = {choices}"), "k from 1 to 32"));
    }
    if a_rows != tokens && a_rows != tokens * choices {
        let want = format!("[{tokens}, K] or [{}, K]", tokens * choices);
        return Err(Error::shape(op, "a", a.shape(), want));
    }
    let block = call.size("block_size")?;
    if !(16..=256).contains(&block) || !block.is_power_of_two() {
        return Err(Error::argument(op, "block_size", block, "16, 32, 64, 128 or 256"));
    }
    let bad_shape = |arg, got: &V, want: String| Err(Error::shape(op, arg, got.shape(), want));
    if let Some(bias) = call.optional("bias")
        && bias.shape() != [experts, w_rows]
    {
        return bad_shape("bias", bias, format!("[{experts}, {w_rows}]"));
    }
    if let Some(weights) = call.optional("topk_weights")
        && weights.shape() != ids
    {
        return bad_shape("topk_weights", weights, format!("[{tokens}, {choices}]"));
    }
    scale_kind(call, [a_rows, experts, w_rows, k])?;
    Ok(Sizes { tokens, choices, a_rows, experts, w_rows, k })
}

#[derive(PartialEq)]
enum ScaleKind {
    None,
    Rows,
    Blocks,
}

fn scale_kind<V: Described>(call: &Call<V>, [a_rows, experts, w_rows, k]: [usize; 4]) -> Result<ScaleKind> {
    let op = call.operator().name;
    let floats = |dtype| matches!(dtype, DType::Bf16 | DType::F16);
    let (a, w) = (call.get("a")?.dtype(), call.get("w")?.dtype());
    let (a_scale, w_scale) = (call.optional("a_scale"), call.optional("w_scale"));
    let refuse = |what: &str| Err(Error::argument(op, "scales", what, "scales of quantized operands alone"));
    if a_scale.is_some() == floats(a) || w_scale.is_some() == floats(w) {
        return refuse("scales that do not fit the types");
    }
    let (Some(of_w), a_scale) = (w_scale, a_scale) else { return Ok(ScaleKind::None) };
    if a_scale.is_some_and(|s| s.shape().len() == 2) {
        let (n, group) = (call.size("group_n")?, call.size("group_k")?);
        if !n.is_power_of_two() || n < 16 || !group.is_power_of_two() || group < 128 {
            return Err(Error::argument(
                op,
                "group_n",
                format!("{n} x {group}"),
                "powers of two, 16 x 128 or more",
            ));
        }
        let groups = k.div_ceil(group);
        let of_a = a_scale.is_some_and(|s| s.shape() == [a_rows, groups]);
        if !of_a || of_w.shape() != [experts, w_rows.div_ceil(n), groups] {
            return refuse("scales of other blocks");
        }
        return Ok(ScaleKind::Blocks);
    }
    let of_a = a_scale.is_none_or(|s| s.shape() == [1] || s.shape() == [a_rows]);
    let shape = of_w.shape();
    if !of_a || !(shape == [experts, w_rows] || shape == [experts] || shape == [1]) {
        return refuse("scales of other rows");
    }
    Ok(ScaleKind::Rows)
}

fn gated(op: &str) -> bool {
    op.contains("silu_fused")
}

fn epilogue<V: Described>(call: &Call<V>) -> Result<ExpertEpilogue> {
    let op = call.operator().name;
    if gated(op) {
        return Ok(silu_fused(y_dtype(call)?));
    }
    let gelu = match call.choice("gelu").unwrap_or("no") {
        "auto" => call.optional("topk_weights").is_none(),
        gelu => gelu == "yes",
    };
    Ok(plain(gelu))
}

fn y_dtype<V: Described>(call: &Call<V>) -> Result<DType> {
    call.choice("y_dtype")?.parse()
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let sizes = sizes(call)?;
    let cols = if gated(call.operator().name) { sizes.w_rows / 2 } else { sizes.w_rows };
    Ok(vec![("y", TensorSpec::new(y_dtype(call)?, [sizes.tokens * sizes.choices, cols]))])
}

fn tile_of<V: Described>(call: &Call<V>) -> Result<Option<ExpertTile>> {
    let name = call.choice("tile")?;
    Ok(ExpertTile::ALL.into_iter().find(|tile| tile.name() == name))
}

fn float<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<FloatView<'a>>> {
    let Some(tensor) = inputs.optional(name) else { return Ok(None) };
    Ok(Some(match tensor.dtype() {
        DType::Bf16 => FloatView::Bf16(inputs.view(name)?),
        DType::F16 => FloatView::F16(inputs.view(name)?),
        _ => FloatView::F32(inputs.view(name)?),
    }))
}

fn operands<'a, A: Element, W: Element>(
    inputs: &Inputs<'a>,
    sizes: &Sizes,
) -> Result<ExpertInputs<'a, A, W>> {
    let w = inputs.view::<W>("w")?;
    let w = if inputs.bool("w_shuffled")? { GemmWeight::Shuffled(w) } else { GemmWeight::Rows(w) };
    let kind = scale_kind(inputs, [sizes.a_rows, sizes.experts, sizes.w_rows, sizes.k])?;
    let scales = match kind {
        ScaleKind::None => ExpertScales::None,
        ScaleKind::Rows => {
            ExpertScales::Rows { a: inputs.optional_view("a_scale")?, w: inputs.view("w_scale")? }
        }
        ScaleKind::Blocks => ExpertScales::Blocks {
            a: inputs.view("a_scale")?,
            a_rows: 1,
            w: inputs.view("w_scale")?,
            group: BlockShape { n: inputs.size("group_n")?, k: inputs.size("group_k")? },
        },
    };
    let (bias, weights) = (float(inputs, "bias")?, float(inputs, "topk_weights")?);
    Ok(ExpertInputs { a: inputs.view("a")?, w, scales, bias, weights })
}

/// Sorts the gates of `topk_ids`.
fn lists<'o>(
    stream: &Stream,
    inputs: &Inputs<'o>,
    outputs: &mut Outputs<'o>,
    sizes: &Sizes,
) -> Result<SortedRows<'o>> {
    let &Sizes { tokens, choices, experts, .. } = sizes;
    let block_size = inputs.size("block_size")?;
    let topk_ids = inputs.view::<i32>("topk_ids")?;
    let len = moe_align_len(tokens, choices, experts, block_size);
    let tiles = len.div_ceil(block_size);
    let scratch = moe_align_workspace(tokens, choices, experts);
    let all: TensorViewMut<'o, i32> = outputs.workspace(stream, len + tiles + 1 + scratch)?;
    let (sorted, rest) = all.split_at(0, len)?;
    let (expert_ids, rest) = rest.split_at(0, tiles)?;
    let (padded, workspace) = rest.split_at(0, 1)?;
    let views = (sorted.alias(), expert_ids.alias(), padded.alias());
    let out = TileLists { sorted_token_ids: sorted, expert_ids, num_tokens_post_padded: padded };
    crate::moe_align_block_size(stream, topk_ids, None, out, workspace, experts, block_size)?;
    Ok(SortedRows {
        sorted_token_ids: views.0,
        expert_ids: views.1,
        num_tokens_post_padded: views.2,
        block_size,
        topk_ids: Some((topk_ids, experts)),
    })
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let y = y_dtype(&inputs)?;
    with_operands!(inputs, A, W => with_float!("moe_op", "y", y, Y => run_as::<A, W, Y>(stream, call)))
}

fn run_as<A: Element, W: Element, Y: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let sizes = sizes(&inputs)?;
    let tile = tile_of(&inputs)?;
    let all = operands::<A, W>(&inputs, &sizes)?;
    let rows = lists(stream, &inputs, &mut outputs, &sizes)?;
    let y = outputs.take::<Y>("y")?;
    match inputs.operator().name {
        "moe_op" => crate::moe_op(stream, all, rows, y, tile),
        "moe_op_silu_fused" => crate::moe_op_silu_fused(stream, all, rows, y, tile),
        _ => {
            let gelu = match inputs.choice("gelu")? {
                "auto" => None,
                gelu => Some(gelu == "yes"),
            };
            crate::moe_op_gelu(stream, all, rows, y, gelu, tile)
        }
    }
}

/// What the quantized values of rows of `k` stand for, by their scales: one for `rows` rows and `columns` columns.
fn scaled(values: Vec<f64>, k: usize, scales: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    let groups = k.div_ceil(columns);
    let at = |i: usize| scales[i / k / rows * groups + i % k / columns];
    values.into_iter().enumerate().map(|(i, x)| x * at(i)).collect()
}

fn values(call: &HostCall, sizes: &Sizes) -> Result<[Vec<f64>; 2]> {
    let &Sizes { a_rows, experts, w_rows, k, .. } = sizes;
    let (a, w) = (call.get("a")?.to_f64(), call.get("w")?);
    let element = w.dtype().size_bytes();
    let w = if call.bool("w_shuffled")? {
        if !w_rows.is_multiple_of(16) || !w.shape()[2].is_multiple_of(32) {
            return Err(Error::shape(
                call.operator().name,
                "w",
                w.shape(),
                "N a multiple of 16, K of 32 (shuffled)",
            ));
        }
        hk_gemm::reference::unshuffled(&w.to_f64(), k, 16 / element * packed(w.dtype()))
    } else {
        w.to_f64()
    };
    let of = |name| call.optional(name).map(|t| t.to_f64()).unwrap_or_default();
    let (a_scale, w_scale) = (of("a_scale"), of("w_scale"));
    Ok(match scale_kind(call, [a_rows, experts, w_rows, k])? {
        ScaleKind::None => [a, w],
        ScaleKind::Rows => {
            let a = if a_scale.is_empty() {
                a
            } else {
                scaled(a, k, &a_scale, [a_rows.div_ceil(a_scale.len().max(1)).max(1), k])
            };
            let per = (experts * w_rows).div_ceil(w_scale.len().max(1)).max(1);
            [a, scaled(w, k, &w_scale, [per, k])]
        }
        ScaleKind::Blocks => {
            let (n, group) = (call.size("group_n")?, call.size("group_k")?);
            let a = scaled(a, k, &a_scale, [1, group]);
            let each = w_rows.div_ceil(n) * k.div_ceil(group);
            let w = w
                .chunks(w_rows * k)
                .zip(w_scale.chunks(each))
                .flat_map(|(w, scales)| scaled(w.to_vec(), k, scales, [n, group]))
                .collect();
            [a, w]
        }
    })
}

fn reference_sorted(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let sizes = sizes(call)?;
    let &Sizes { choices, a_rows, experts, w_rows, k, .. } = &sizes;
    let ids = call.get("topk_ids")?.elements::<i32>()?;
    let [a, w] = values(call, &sizes)?;
    let (bias, weights) =
        (call.optional("bias").map(|t| t.to_f64()), call.optional("topk_weights").map(|t| t.to_f64()));
    let per_token = if a_rows == ids.len() { 1 } else { choices };
    let rows: Vec<_> = ids
        .iter()
        .enumerate()
        .map(|(gate, &id)| (0..experts as i32).contains(&id).then_some((gate / per_token, id as usize)))
        .collect();
    let epilogue = epilogue(call)?;
    let problem = ExpertProblem {
        a: &a,
        w: &w,
        k,
        w_rows,
        bias: bias.as_deref(),
        weights: weights.as_deref(),
        weight_first: epilogue.weight_first,
        gate: epilogue.gate,
        activation: epilogue.activation,
        round: epilogue.round,
    };
    let (y, magnitudes) = reference::expert_gemm(&problem, &rows);
    let cols = y.len() / ids.len().max(1);
    Ok(vec![("y", HostTensorF64::new([ids.len(), cols], y).with_magnitudes(magnitudes))])
}
