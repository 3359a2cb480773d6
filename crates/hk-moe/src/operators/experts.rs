//! The expert GEMMs.

use super::{FLOATS, I32};
use crate::experts::{ExpertEpilogue, ExpertGemm};
use crate::moe_gemm;
use crate::moe_op::{NAMES, plain, silu_fused};
use crate::reference::{self, EXPERT_TERMS, ExpertProblem};
use crate::{
    BlockShape, ExpertGate, ExpertInputs, ExpertRows, ExpertScales, ExpertTile, ExptData, FloatView,
    GateOrder, GemmWeight, MxScaleView, RaggedRows, Routing, RoutingOptions, SortedRows, TileLists,
    TopkOptions, kernels, moe_align_len, moe_align_workspace, moe_block_m, moe_max_tiles,
    moe_routing_workspace,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, E8M0, Element, Error, Float, Result, Stream, TensorViewMut, quant, with_float};

const OPERANDS: &[DType] = &[DType::Bf16, DType::F16, DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
const WEIGHTS_OF: &[DType] =
    &[DType::Bf16, DType::F16, DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3, DType::U8];
const CODES: &[DType] = &[DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
const FP8: &[DType] = &[DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
const FP4: &[DType] = &[DType::Fp4x2];
const BY_FP4: &[DType] = &[DType::Bf16, DType::F16, DType::Fp8E4M3Fnuz, DType::Fp8E4M3, DType::Fp4x2];
const MX_SCALE: Sample = Sample::Uniform { low: 0.05, high: 2.0 };
const SCALE: Sample = Sample::Uniform { low: 0.001, high: 0.02 };
const VALUES: Sample = Sample::Normal { mean: 0.0, deviation: 1.0 };

const A: ArgSpec = ArgSpec::input("a", OPERANDS, 2, "[T, K] or [T k, K]").sampled(VALUES);
const W: ArgSpec = ArgSpec::input("w", WEIGHTS_OF, 3, "[E, N, K], int4 [E, N, K / 2]").sampled(VALUES);
const A_SCALE: ArgSpec =
    ArgSpec::input("a_scale", &[DType::F32], 1, "[rows of a], [1] or [rows of a, groups of K]")
        .ranks(1, 2)
        .optional()
        .sampled(SCALE);
const W_SCALE: ArgSpec = ArgSpec::input(
    "w_scale",
    FLOATS,
    1,
    "[E, N], [E], [1], [E, groups of N, groups of K] or [E, N, groups of K]",
)
.ranks(1, 3)
.optional()
.sampled(SCALE);
const W_ZERO: ArgSpec =
    ArgSpec::input("w_zero", &[DType::U8], 3, "[E, N, groups of K], int4 [E, N / 2, groups of K]")
        .optional()
        .sampled(Sample::Integers { low: 0, high: 256 });
const A_MX: ArgSpec = ArgSpec::input("a_mx", &[DType::E8M0], 1, "[rows of a, K / 32], or shuffled")
    .ranks(1, 2)
    .optional()
    .sampled(MX_SCALE);
const W_MX: ArgSpec =
    ArgSpec::input("w_mx", &[DType::E8M0], 2, "[E, N, K / 32], or shuffled").ranks(2, 3).sampled(MX_SCALE);
const W4: ArgSpec = ArgSpec::input("w", FP4, 3, "[E, N, K / 2]");
const LOGITS: ArgSpec = ArgSpec::input("logits", &[DType::F32], 2, "[T, E]");
const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 2, "[E, N]").optional();
const WEIGHTS: ArgSpec = ArgSpec::input("topk_weights", FLOATS, 2, "[T, k]").optional();
const IDS: ArgSpec = ArgSpec::input("topk_ids", I32, 2, "[T, k]").sampled(Sample::RowsOf("w"));
const Y: ArgSpec = ArgSpec::output("y", Tolerance::Sum { terms: EXPERT_TERMS }, FLOATS, 2, "[T k, N]");

const fn scalar(name: &'static str, default: u64, summary: &'static str) -> ScalarSpec {
    ScalarSpec { name, default: Scalar::Count(default), choices: &[], summary }
}
pub(super) const BLOCK: ScalarSpec = scalar("block_size", 64, "rows of a list tile: 16, 32, 64, 128 or 256");
const GROUP_N: ScalarSpec = scalar("group_n", 128, "rows of w with one scale, a power of two");
const GROUP_K: ScalarSpec = scalar("group_k", 128, "columns with one scale, a power of two");
pub(super) const Y_DTYPE: ScalarSpec = ScalarSpec {
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
const SCALES_SHUFFLED: ScalarSpec = ScalarSpec {
    name: "scales_shuffled",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "e8m0 scales are in the order of shuffle_scales",
};
const GATE: ScalarSpec = ScalarSpec {
    name: "gate",
    default: Scalar::Choice("none"),
    choices: &["none", "silu", "swiglu_oai"],
    summary: "gated outputs, a gate and its value in neighbouring rows of w",
};
const WEIGHTED: ScalarSpec = ScalarSpec {
    name: "weighted",
    default: Scalar::Bool(true),
    choices: &[],
    summary: "rows of y are times the weights of their gates",
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
const fn scales_shuffled() -> (&'static str, Scalar) {
    ("scales_shuffled", Scalar::Bool(true))
}
const fn chosen(k: u64) -> (&'static str, Scalar) {
    ("k", Scalar::Count(k))
}
const fn block_m(rows: u64) -> (&'static str, Scalar) {
    ("block_m", Scalar::Count(rows))
}
pub(super) const fn gate(name: &'static str) -> (&'static str, Scalar) {
    ("gate", Scalar::Choice(name))
}
const fn unweighted() -> (&'static str, Scalar) {
    ("weighted", Scalar::Bool(false))
}
const fn shuffled() -> (&'static str, Scalar) {
    ("w_shuffled", Scalar::Bool(true))
}

/// A case: label, tensors, scalars.
macro_rules! case {
    ($label:expr, $($name:ident: $dtype:ident [$($n:expr),+]),+ $(; $($scalar:expr),+)?) => {
        Case {
            label: $label,
            tensors: &[$((stringify!($name), DType::$dtype, &[$($n),+])),+],
            scalars: &[$($($scalar),+)?],
        }
    };
}
pub(super) use case;

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
            (DType::Bf16, DType::I8) => with_operands!(@ hk_core::bf16, i8, $a, $w, $body),
            (DType::F16, DType::I8) => with_operands!(@ hk_core::f16, i8, $a, $w, $body),
            (DType::Bf16, DType::U8) => with_operands!(@ hk_core::bf16, u8, $a, $w, $body),
            (DType::F16, DType::U8) => with_operands!(@ hk_core::f16, u8, $a, $w, $body),
            (DType::Bf16, DType::Fp4x2) => with_operands!(@ hk_core::bf16, hk_core::Fp4x2, $a, $w, $body),
            (DType::F16, DType::Fp4x2) => with_operands!(@ hk_core::f16, hk_core::Fp4x2, $a, $w, $body),
            (DType::Fp8E4M3, DType::Fp4x2) => with_operands!(@ hk_core::Fp8E4M3, hk_core::Fp4x2, $a, $w, $body),
            (DType::Fp8E4M3Fnuz, DType::Fp4x2) => {
                with_operands!(@ hk_core::Fp8E4M3Fnuz, hk_core::Fp4x2, $a, $w, $body)
            }
            (DType::Fp4x2, DType::Fp4x2) => with_operands!(@ hk_core::Fp4x2, hk_core::Fp4x2, $a, $w, $body),
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
    args: &[A, W, A_SCALE, W_SCALE, W_ZERO, BIAS, WEIGHTS, IDS, Y],
    scalars: &[BLOCK, GROUP_N, GROUP_K, Y_DTYPE, W_SHUFFLED, TILE],
    kernels: &[&kernels::EXPERTS, &kernels::EXPERTS_A8W8, &kernels::EXPERTS_A16W8, &kernels::LISTS],
    cases: &[
        case!("Qwen3 30B up, 64 tokens of 16 experts", a: Bf16 [64, 2048], w: Bf16 [16, 256, 2048], topk_ids: I32 [64, 4]),
        case!("8 experts, 512 tokens", a: Bf16 [512, 1024], w: Bf16 [8, 512, 1024], topk_ids: I32 [512, 2]; block(128)),
        case!("2 experts, 768 tokens, 256 rows", a: Bf16 [768, 1024], w: Bf16 [2, 512, 1024], topk_ids: I32 [768, 1]; block(256)),
        case!("2 experts, 512 tokens, int8", a: I8 [512, 2048], w: I8 [2, 512, 2048], a_scale: F32 [512], w_scale: F32 [2, 512], topk_ids: I32 [512, 1]; block(256)),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3 235B up, EP8, 64 tokens", a: Bf16 [64, 4096], w: Bf16 [16, 3072, 4096], topk_ids: I32 [64, 8]; block(16)),
        case!("Qwen3 235B up, EP8, 1024 tokens", a: Bf16 [1024, 4096], w: Bf16 [16, 3072, 4096], topk_ids: I32 [1024, 8]; block(128)),
        case!("Qwen3 235B up, EP8, 16384 tokens", a: Bf16 [16384, 4096], w: Bf16 [16, 3072, 4096], topk_ids: I32 [16384, 8]; block(256)),
        case!("DeepSeek-V3 up, EP8, 1024 tokens", a: Bf16 [1024, 7168], w: Bf16 [32, 4096, 7168], topk_ids: I32 [1024, 8]; block(128)),
    ]),
    corners: &[
        case!("bf16, 256 x 256", a: Bf16 [150, 200], w: Bf16 [3, 270, 200], topk_weights: F32 [150, 2], topk_ids: I32 [150, 2]; tile("256x256"), block(256)),
        case!("bf16, 128 x 128", a: Bf16 [70, 136], w: Bf16 [3, 140, 136], bias: Bf16 [3, 140], topk_ids: I32 [70, 2]; tile("128x128"), block(128), to("f32")),
        case!("bf16, 128 x 256", a: Bf16 [70, 136], w: Bf16 [3, 270, 136], bias: Bf16 [3, 270], topk_ids: I32 [70, 2]; block(128), to("f32")),
        case!("bf16, 64 x 64", a: Bf16 [33, 72], w: Bf16 [4, 70, 72], topk_ids: I32 [11, 3]; to("f16")),
        case!("bf16, 16 x 32", a: Bf16 [7, 3080], w: Bf16 [4, 40, 3080], topk_weights: Bf16 [7, 2], topk_ids: I32 [7, 2]; block(16), to("f32")),
        case!("f16, 256 x 256", a: F16 [130, 64], w: F16 [2, 258, 64], topk_ids: I32 [130, 2]; tile("256x256"), block(256), to("f16")),
        case!("f16, 128 x 128, shuffled", a: F16 [70, 96], w: F16 [3, 144, 96], topk_ids: I32 [70, 2]; tile("128x128"), block(128), shuffled()),
        case!("f16, 128 x 256, shuffled", a: F16 [70, 96], w: F16 [3, 272, 96], topk_ids: I32 [70, 2]; block(128), shuffled()),
        case!("f16, 64 x 64", a: F16 [65, 520], w: F16 [3, 66, 520], bias: F32 [3, 66], topk_ids: I32 [65, 1]; tile("64x64"), block(128)),
        case!("f16, 16 x 32, shuffled", a: F16 [9, 1056], w: F16 [5, 48, 1056], topk_ids: I32 [3, 3]; block(32), shuffled(), to("f32")),
        case!("i8, 256 x 256", a: I8 [150, 208], w: I8 [3, 270, 208], a_scale: F32 [150], w_scale: F32 [3, 270], topk_ids: I32 [150, 2]; tile("256x256"), block(256)),
        case!("i8, 128 x 128", a: I8 [70, 144], w: I8 [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; tile("128x128"), block(128)),
        case!("i8, 128 x 256", a: I8 [70, 144], w: I8 [3, 270, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; block(128)),
        case!("i8, 64 x 64", a: I8 [33, 80], w: I8 [4, 70, 80], a_scale: F32 [33], w_scale: F32 [4, 70], topk_weights: F16 [11, 3], topk_ids: I32 [11, 3]),
        case!("i8, 16 x 32", a: I8 [7, 3088], w: I8 [4, 40, 3088], a_scale: F32 [7], w_scale: F32 [1], topk_ids: I32 [7, 2]; block(16)),
        case!("fp8, 256 x 256", a: Fp8E4M3Fnuz [150, 208], w: Fp8E4M3Fnuz [3, 270, 208], a_scale: F32 [150], w_scale: F32 [3, 270], topk_ids: I32 [150, 2]; tile("256x256"), block(256)),
        case!("fp8, 256 x 256 (OCP)", a: Fp8E4M3 [150, 208], w: Fp8E4M3 [3, 270, 208], a_scale: F32 [150], w_scale: F32 [3, 270], topk_ids: I32 [150, 2]; tile("256x256"), block(256)),
        case!("fp8, 128 x 128", a: Fp8E4M3Fnuz [70, 144], w: Fp8E4M3Fnuz [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; tile("128x128"), block(128)),
        case!("fp8, 128 x 256", a: Fp8E4M3Fnuz [70, 144], w: Fp8E4M3Fnuz [3, 270, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; block(128)),
        case!("fp8, 128 x 128 (OCP)", a: Fp8E4M3 [70, 144], w: Fp8E4M3 [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; tile("128x128"), block(128)),
        case!("fp8, 128 x 256 (OCP)", a: Fp8E4M3 [70, 144], w: Fp8E4M3 [3, 270, 144], a_scale: F32 [1], w_scale: F32 [3], topk_ids: I32 [70, 2]; block(128)),
        case!("fp8, 64 x 64", a: Fp8E4M3Fnuz [33, 80], w: Fp8E4M3Fnuz [4, 70, 80], a_scale: F32 [33], w_scale: F32 [4, 70], topk_ids: I32 [11, 3]),
        case!("fp8, 64 x 64 (OCP)", a: Fp8E4M3 [33, 80], w: Fp8E4M3 [4, 70, 80], a_scale: F32 [33], w_scale: F32 [4, 70], topk_ids: I32 [11, 3]),
        case!("fp8, 16 x 32", a: Fp8E4M3Fnuz [7, 3088], w: Fp8E4M3Fnuz [4, 40, 3088], a_scale: F32 [7], w_scale: F32 [1], topk_ids: I32 [7, 2]; block(16)),
        case!("fp8, 16 x 32 (OCP)", a: Fp8E4M3 [7, 3088], w: Fp8E4M3 [4, 40, 3088], a_scale: F32 [7], w_scale: F32 [1], topk_ids: I32 [7, 2]; block(16)),
        case!("i8 blocks, 128 x 256", a: I8 [90, 400], w: I8 [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; tile("128x256"), block(128)),
        case!("i8 blocks, 64 x 64", a: I8 [33, 160], w: I8 [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 9, 2], topk_ids: I32 [11, 3]; ("group_n", Scalar::Count(16))),
        case!("i8 blocks, 16 x 32", a: I8 [7, 2320], w: I8 [4, 40, 2320], a_scale: F32 [7, 10], w_scale: F32 [4, 1, 10], topk_ids: I32 [7, 2]; block(16), ("group_k", Scalar::Count(256))),
        case!("fp8 blocks, 128 x 256", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; tile("128x256"), block(128)),
        case!("fp8 blocks, 128 x 128", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; tile("128x128"), block(128)),
        case!("fp8 blocks, 128 x 256 (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; tile("128x256"), block(128)),
        case!("fp8 blocks, 128 x 128 (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 270, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 3, 4], topk_ids: I32 [90, 2]; tile("128x128"), block(128)),
        case!("fp8 blocks, 64 x 64", a: Fp8E4M3Fnuz [33, 160], w: Fp8E4M3Fnuz [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 2, 2], topk_ids: I32 [11, 3]),
        case!("fp8 blocks, 64 x 64 (OCP)", a: Fp8E4M3 [33, 160], w: Fp8E4M3 [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 2, 2], topk_ids: I32 [11, 3]),
        case!("fp8 blocks, 16 x 32", a: Fp8E4M3Fnuz [7, 2320], w: Fp8E4M3Fnuz [4, 40, 2320], a_scale: F32 [7, 19], w_scale: F32 [4, 1, 19], topk_ids: I32 [7, 2]; block(16)),
        case!("fp8 blocks, 16 x 32 (OCP)", a: Fp8E4M3 [7, 2320], w: Fp8E4M3 [4, 40, 2320], a_scale: F32 [7, 19], w_scale: F32 [4, 1, 19], topk_ids: I32 [7, 2]; block(16)),
        case!("bf16 by i8, 128 x 128", a: Bf16 [70, 144], w: I8 [3, 140, 144], w_scale: F32 [3, 140], topk_ids: I32 [70, 2]; block(128)),
        case!("bf16 by i8, 64 x 64", a: Bf16 [33, 80], w: I8 [4, 70, 80], w_scale: F32 [4], topk_ids: I32 [11, 3]),
        case!("f16 by i8, 128 x 128", a: F16 [70, 144], w: I8 [3, 140, 144], w_scale: F32 [3, 140], topk_ids: I32 [70, 2]; block(128)),
        case!("f16 by i8, 64 x 64, shuffled", a: F16 [33, 96], w: I8 [4, 80, 96], w_scale: F32 [4, 80], topk_ids: I32 [11, 3]; shuffled()),
        case!("bf16 by groups of u8, 128 x 128", a: Bf16 [70, 256], w: U8 [3, 140, 256], w_scale: F32 [3, 140, 2], w_zero: U8 [3, 140, 2], topk_ids: I32 [70, 2]; block(128)),
        case!("bf16 by groups of u8, 64 x 64", a: Bf16 [33, 160], w: U8 [4, 70, 160], w_scale: Bf16 [4, 70, 5], topk_ids: I32 [11, 3]; ("group_k", Scalar::Count(32))),
        case!("f16 by groups of u8, 128 x 128", a: F16 [70, 128], w: U8 [3, 140, 128], w_scale: F16 [3, 140, 2], topk_ids: I32 [70, 2]; block(128), ("group_k", Scalar::Count(64))),
        case!("f16 by groups of u8, 64 x 64", a: F16 [33, 128], w: U8 [4, 70, 128], w_scale: F32 [4, 70, 1], w_zero: U8 [4, 70, 1], topk_ids: I32 [11, 3]),
        case!("bf16 by groups of u4, 128 x 128", a: Bf16 [70, 256], w: U8 [3, 140, 128], w_scale: F32 [3, 140, 2], w_zero: U8 [3, 70, 2], topk_ids: I32 [70, 2]; block(128)),
        case!("bf16 by groups of u4, 64 x 64", a: Bf16 [33, 160], w: U8 [4, 70, 80], w_scale: Bf16 [4, 70, 5], topk_ids: I32 [11, 3]; ("group_k", Scalar::Count(32))),
        case!("f16 by groups of u4, 128 x 128, shuffled", a: F16 [70, 128], w: U8 [3, 144, 64], w_scale: F16 [3, 144, 2], w_zero: U8 [3, 72, 2], topk_ids: I32 [70, 2]; block(128), ("group_k", Scalar::Count(64)), shuffled()),
        case!("f16 by groups of u4, 64 x 64", a: F16 [33, 128], w: U8 [4, 70, 64], w_scale: F32 [4, 70, 1], topk_ids: I32 [11, 3]),
        case!("bf16, two launches of lists", a: Bf16 [257, 64], w: Bf16 [3, 32, 64], topk_ids: I32 [257, 1]),
        case!("bf16 by i8, 16 x 32", a: Bf16 [7, 1168], w: I8 [4, 40, 1168], w_scale: F32 [4, 40], topk_ids: I32 [7, 2]; block(16)),
        case!("f16 by i8, 16 x 32, shuffled", a: F16 [9, 1056], w: I8 [4, 48, 1056], w_scale: F32 [1], topk_ids: I32 [3, 3]; block(16), shuffled(), to("f32")),
        case!("bf16 by groups of u8, 16 x 32", a: Bf16 [7, 1216], w: U8 [4, 40, 1216], w_scale: Bf16 [4, 40, 38], w_zero: U8 [4, 40, 38], topk_ids: I32 [7, 2]; block(16), ("group_k", Scalar::Count(32))),
        case!("f16 by groups of u8, 16 x 32", a: F16 [7, 1152], w: U8 [4, 40, 1152], w_scale: F32 [4, 40, 9], topk_ids: I32 [7, 2]; block(16), to("f32")),
        case!("bf16 by groups of u4, 16 x 32", a: Bf16 [7, 1216], w: U8 [4, 40, 608], w_scale: F32 [4, 40, 38], w_zero: U8 [4, 20, 38], topk_ids: I32 [7, 2]; block(16), ("group_k", Scalar::Count(32)), to("f32")),
        case!("f16 by groups of u4, 16 x 32, shuffled", a: F16 [7, 1152], w: U8 [4, 48, 576], w_scale: F16 [4, 48, 9], w_zero: U8 [4, 24, 9], topk_ids: I32 [7, 2]; block(16), shuffled()),
    ],
    outputs,
    run,
    reference: reference_of,
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
        case!("bf16 by groups of u8", a: Bf16 [33, 128], w: U8 [4, 70, 128], w_scale: F32 [4, 70, 1], w_zero: U8 [4, 70, 1], topk_ids: I32 [11, 3]),
    ],
    ..MOE_OP
};

pub(crate) const MOE_OP_SILU_FUSED: Operator = Operator {
    name: "moe_op_silu_fused",
    summary: "y[g] = silu(gate) * value, of moe_op's sums for the first and the second half of the rows of w",
    args: &[A, W, A_SCALE, W_SCALE, W_ZERO, BIAS, WEIGHTS, IDS, ArgSpec { shape: "[T k, N / 2]", ..Y }],
    cases: &[
        case!("DeepSeek-V3 up, 2 experts, 256 tokens, fp8 blocks", a: Fp8E4M3Fnuz [256, 7168], w: Fp8E4M3Fnuz [2, 512, 7168], a_scale: F32 [256, 56], w_scale: F32 [2, 4, 56], topk_ids: I32 [256, 1]; block(128)),
        case!("DeepSeek-V3 up, 2 experts, 256 tokens, fp8 blocks (OCP)", a: Fp8E4M3 [256, 7168], w: Fp8E4M3 [2, 512, 7168], a_scale: F32 [256, 56], w_scale: F32 [2, 4, 56], topk_ids: I32 [256, 1]; block(128)),
        case!("8 experts, 128 tokens", a: Bf16 [128, 1024], w: Bf16 [8, 512, 1024], topk_ids: I32 [128, 2]),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3 up, EP8, 64 tokens", a: Bf16 [64, 7168], w: Bf16 [32, 4096, 7168], topk_ids: I32 [64, 8]; block(16)),
        case!("DeepSeek-V3 up, EP8, 4096 tokens", a: Bf16 [4096, 7168], w: Bf16 [32, 4096, 7168], topk_ids: I32 [4096, 8]; block(128)),
    ]),
    corners: &[
        case!("bf16, 256 x 256", a: Bf16 [150, 200], w: Bf16 [3, 540, 200], topk_weights: F32 [150, 2], topk_ids: I32 [150, 2]; tile("256x256"), block(256)),
        case!("bf16, 64 x 64", a: Bf16 [33, 72], w: Bf16 [4, 140, 72], bias: Bf16 [4, 140], topk_ids: I32 [11, 3]; to("f16")),
        case!("bf16, 16 x 32", a: Bf16 [7, 3080], w: Bf16 [4, 72, 3080], topk_weights: F32 [7, 2], topk_ids: I32 [7, 2]; block(16), to("f32")),
        case!("f16, 128 x 128, shuffled", a: F16 [70, 96], w: F16 [3, 288, 96], topk_ids: I32 [70, 2]; tile("128x128"), block(128), shuffled()),
        case!("f16, 128 x 256, shuffled", a: F16 [70, 96], w: F16 [3, 288, 96], topk_ids: I32 [70, 2]; block(128), shuffled()),
        case!("fp8, rows", a: Fp8E4M3Fnuz [33, 80], w: Fp8E4M3Fnuz [4, 140, 80], a_scale: F32 [33], w_scale: F32 [4, 140], topk_ids: I32 [11, 3]),
        case!("fp8, rows (OCP)", a: Fp8E4M3 [33, 80], w: Fp8E4M3 [4, 140, 80], a_scale: F32 [33], w_scale: F32 [4, 140], topk_ids: I32 [11, 3]),
        case!("fp8 blocks, 128 x 256, whole strips", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 576, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x256"), block(128)),
        case!("fp8 blocks, 128 x 128, whole strips", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 576, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x128"), block(128)),
        case!("fp8 blocks, 128 x 256, whole strips (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 576, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x256"), block(128)),
        case!("fp8 blocks, 128 x 128, whole strips (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 576, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x128"), block(128)),
        case!("i8 blocks, 64 x 64, whole strips", a: I8 [33, 160], w: I8 [4, 160, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 10, 2], topk_ids: I32 [11, 3]; ("group_n", Scalar::Count(16))),
        case!("fp8 blocks, 128 x 256", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 540, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x256"), block(128)),
        case!("fp8 blocks, 128 x 128", a: Fp8E4M3Fnuz [90, 400], w: Fp8E4M3Fnuz [3, 540, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x128"), block(128)),
        case!("fp8 blocks, 128 x 256 (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 540, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x256"), block(128)),
        case!("fp8 blocks, 128 x 128 (OCP)", a: Fp8E4M3 [90, 400], w: Fp8E4M3 [3, 540, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], topk_ids: I32 [90, 2]; tile("128x128"), block(128)),
        case!("bf16 by groups of u4", a: Bf16 [33, 256], w: U8 [4, 140, 128], w_scale: F32 [4, 140, 2], w_zero: U8 [4, 70, 2], topk_ids: I32 [11, 3]),
        case!("i8 blocks, 16 x 32", a: I8 [7, 2320], w: I8 [4, 64, 2320], a_scale: F32 [7, 10], w_scale: F32 [4, 4, 10], topk_ids: I32 [7, 2]; block(16), ("group_k", Scalar::Count(256)), ("group_n", Scalar::Count(16))),
    ],
    ..MOE_OP
};

macro_rules! mx_corners {
    ($($scalars:expr),*) => {
        [
            case!("fp4, 128 x 256, packed", a: Fp4x2 [90, 128], w: Fp4x2 [3, 270, 128], a_mx: E8M0 [90, 8], w_mx: E8M0 [3, 270, 8], topk_ids: I32 [90, 2]; block(128) $(, $scalars)*),
            case!("fp4, 128 x 256, shuffled scales", a: Fp4x2 [90, 96], w: Fp4x2 [3, 272, 96], a_mx: E8M0 [768], w_mx: E8M0 [3, 2304], topk_ids: I32 [90, 2]; block(128), scales_shuffled(), shuffled() $(, $scalars)*),
            case!("fp4, 64 x 64", a: Fp4x2 [33, 80], w: Fp4x2 [4, 70, 80], a_mx: E8M0 [33, 5], w_mx: E8M0 [4, 70, 5], a_scale: F32 [33], w_scale: F32 [4], topk_weights: F32 [11, 3], topk_ids: I32 [11, 3]; to("f32") $(, $scalars)*),
            case!("fp4, 16 x 32", a: Fp4x2 [7, 1040], w: Fp4x2 [4, 40, 1040], a_mx: E8M0 [7, 65], w_mx: E8M0 [4, 40, 65], a_scale: F32 [1], w_scale: F32 [4], topk_ids: I32 [7, 2]; block(16) $(, $scalars)*),
            case!("fp8, 128 x 128, packed", a: Fp8E4M3Fnuz [70, 256], w: Fp4x2 [3, 140, 128], w_mx: E8M0 [3, 140, 8], a_scale: F32 [70], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("fp8, 128 x 128, packed (OCP)", a: Fp8E4M3 [70, 256], w: Fp4x2 [3, 140, 128], w_mx: E8M0 [3, 140, 8], a_scale: F32 [70], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("fp8, 128 x 128", a: Fp8E4M3Fnuz [70, 160], w: Fp4x2 [3, 140, 80], w_mx: E8M0 [3, 140, 5], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("fp8, 128 x 128 (OCP)", a: Fp8E4M3 [70, 160], w: Fp4x2 [3, 140, 80], w_mx: E8M0 [3, 140, 5], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("fp8, 64 x 64", a: Fp8E4M3Fnuz [33, 160], w: Fp4x2 [4, 70, 80], w_mx: E8M0 [4, 70, 5], bias: F32 [4, 70], topk_ids: I32 [11, 3] $(; $scalars)*),
            case!("fp8, 64 x 64 (OCP)", a: Fp8E4M3 [33, 160], w: Fp4x2 [4, 70, 80], w_mx: E8M0 [4, 70, 5], bias: F32 [4, 70], topk_ids: I32 [11, 3] $(; $scalars)*),
            case!("fp8, 16 x 32", a: Fp8E4M3Fnuz [7, 2080], w: Fp4x2 [4, 40, 1040], w_mx: E8M0 [4, 40, 65], topk_ids: I32 [7, 2]; block(16) $(, $scalars)*),
            case!("fp8, 16 x 32 (OCP)", a: Fp8E4M3 [7, 2080], w: Fp4x2 [4, 40, 1040], w_mx: E8M0 [4, 40, 65], topk_ids: I32 [7, 2]; block(16) $(, $scalars)*),
            case!("mxfp8, 128 x 128", a: Fp8E4M3Fnuz [70, 160], w: Fp4x2 [3, 140, 80], a_mx: E8M0 [70, 5], w_mx: E8M0 [3, 140, 5], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("mxfp8, 128 x 128 (OCP)", a: Fp8E4M3 [70, 160], w: Fp4x2 [3, 140, 80], a_mx: E8M0 [70, 5], w_mx: E8M0 [3, 140, 5], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("mxfp8, 64 x 64", a: Fp8E4M3Fnuz [33, 256], w: Fp4x2 [4, 70, 128], a_mx: E8M0 [33, 8], w_mx: E8M0 [4, 70, 8], topk_ids: I32 [11, 3] $(; $scalars)*),
            case!("mxfp8, 64 x 64 (OCP)", a: Fp8E4M3 [33, 256], w: Fp4x2 [4, 70, 128], a_mx: E8M0 [33, 8], w_mx: E8M0 [4, 70, 8], topk_ids: I32 [11, 3] $(; $scalars)*),
            case!("mxfp8, 16 x 32", a: Fp8E4M3Fnuz [7, 2080], w: Fp4x2 [4, 40, 1040], a_mx: E8M0 [7, 65], w_mx: E8M0 [4, 40, 65], topk_ids: I32 [7, 2]; block(16) $(, $scalars)*),
            case!("mxfp8, 16 x 32 (OCP)", a: Fp8E4M3 [7, 2080], w: Fp4x2 [4, 40, 1040], a_mx: E8M0 [7, 65], w_mx: E8M0 [4, 40, 65], topk_ids: I32 [7, 2]; block(16) $(, $scalars)*),
            case!("bf16, 128 x 128", a: Bf16 [70, 160], w: Fp4x2 [3, 140, 80], w_mx: E8M0 [3, 140, 5], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("bf16, 64 x 64, shuffled", a: Bf16 [33, 192], w: Fp4x2 [4, 80, 96], w_mx: E8M0 [4, 80, 6], topk_ids: I32 [11, 3]; shuffled() $(, $scalars)*),
            case!("bf16, 16 x 32", a: Bf16 [7, 1056], w: Fp4x2 [4, 40, 528], w_mx: E8M0 [4, 40, 33], bias: Bf16 [4, 40], topk_ids: I32 [7, 2]; block(16), to("f32") $(, $scalars)*),
            case!("f16, 128 x 128", a: F16 [70, 160], w: Fp4x2 [3, 140, 80], w_mx: E8M0 [3, 140, 5], topk_ids: I32 [70, 2]; block(128) $(, $scalars)*),
            case!("f16, 64 x 64", a: F16 [33, 160], w: Fp4x2 [4, 70, 80], w_mx: E8M0 [4, 70, 5], topk_ids: I32 [11, 3]; to("f16") $(, $scalars)*),
            case!("f16, 16 x 32", a: F16 [7, 1056], w: Fp4x2 [4, 40, 528], w_mx: E8M0 [4, 40, 33], topk_ids: I32 [7, 2]; block(16), to("f32") $(, $scalars)*),
        ]
    };
}

pub(crate) const MOE_OP_MXFP4: Operator = Operator {
    name: "moe_op_mxfp4",
    summary: "moe_op by mxfp4 weights, of mxfp4, fp8 or 16-bit floats",
    args: &[
        ArgSpec { dtypes: BY_FP4, shape: "[T, K] or [T k, K], mxfp4 [.., K / 2]", ..A },
        W4,
        A_MX,
        W_MX,
        A_SCALE,
        W_SCALE,
        BIAS,
        WEIGHTS,
        IDS,
        Y,
    ],
    scalars: &[BLOCK, Y_DTYPE, W_SHUFFLED, SCALES_SHUFFLED, TILE],
    kernels: &[&kernels::EXPERTS_FP4, &kernels::LISTS],
    cases: &[
        case!("8 experts, 128 tokens", a: Fp4x2 [128, 512], w: Fp4x2 [8, 512, 512], a_mx: E8M0 [128, 32], w_mx: E8M0 [8, 512, 32], topk_ids: I32 [128, 2]; block(128)),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3 up, EP8, 4096 tokens", a: Fp4x2 [4096, 3584], w: Fp4x2 [32, 4096, 3584], a_mx: E8M0 [4096, 224], w_mx: E8M0 [32, 4096, 224], topk_ids: I32 [4096, 8]; block(128)),
    ]),
    corners: &mx_corners!(),
    ..MOE_OP
};

pub(crate) const MOE_OP_MXFP4_SILU_FUSED: Operator = Operator {
    name: "moe_op_mxfp4_silu_fused",
    summary: "moe_op_silu_fused by mxfp4 weights, of mxfp4, fp8 or 16-bit floats",
    args: &[
        ArgSpec { dtypes: BY_FP4, shape: "[T, K] or [T k, K], mxfp4 [.., K / 2]", ..A },
        W4,
        A_MX,
        W_MX,
        A_SCALE,
        W_SCALE,
        BIAS,
        WEIGHTS,
        IDS,
        ArgSpec { shape: "[T k, N / 2]", ..Y },
    ],
    ..MOE_OP_MXFP4
};

const RAGGED_SCALARS: &[ScalarSpec] = &[
    scalar("k", 2, "experts of a token"),
    scalar("block_m", 0, "rows of a list tile: 16, 32, 64, 128 or 256; 0: by the mean of an expert"),
    GATE,
    WEIGHTED,
    Y_DTYPE,
    W_SHUFFLED,
    TILE,
];
const RAGGED_Y: ArgSpec = ArgSpec { shape: "[T k, N], gated [T k, N / 2]", ..Y };

pub(crate) const MOE_OP_GEMM_A8W8: Operator = Operator {
    name: "moe_op_gemm_a8w8",
    summary: "y[p] = gammas[p] gate(scales (a[token of p] w[expert of p]^T) + bias), gates by expert; routing included",
    args: &[
        ArgSpec { dtypes: CODES, ..A },
        ArgSpec { dtypes: CODES, shape: "[E, N, K]", ..W },
        A_SCALE.ranks(1, 1),
        W_SCALE.ranks(1, 2),
        A_MX,
        ArgSpec { optional: true, ..W_MX },
        BIAS,
        LOGITS,
        RAGGED_Y,
    ],
    scalars: &[
        RAGGED_SCALARS[0],
        RAGGED_SCALARS[1],
        GATE,
        WEIGHTED,
        Y_DTYPE,
        W_SHUFFLED,
        SCALES_SHUFFLED,
        TILE,
    ],
    kernels: &[&kernels::EXPERTS_A8W8, &kernels::EXPERTS_FP4, &kernels::ROUTING, &kernels::LISTS],
    cases: &[
        case!("8 experts, 128 tokens", a: I8 [128, 1024], w: I8 [8, 512, 1024], a_scale: F32 [128], w_scale: F32 [8, 512], logits: F32 [128, 8]; gate("silu")),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3 235B up, EP8, 4096 tokens", a: Fp8E4M3 [4096, 4096], w: Fp8E4M3 [16, 3072, 4096], a_scale: F32 [4096], w_scale: F32 [16, 3072], logits: F32 [4096, 16]; gate("silu"), chosen(8)),
    ]),
    corners: &[
        case!("mxfp8, 128 x 256, packed", a: Fp8E4M3Fnuz [90, 256], w: Fp8E4M3Fnuz [3, 270, 256], a_mx: E8M0 [90, 8], w_mx: E8M0 [3, 270, 8], logits: F32 [90, 3]; block_m(128)),
        case!("mxfp8, 128 x 256, packed (OCP)", a: Fp8E4M3 [90, 256], w: Fp8E4M3 [3, 270, 256], a_mx: E8M0 [90, 8], w_mx: E8M0 [3, 270, 8], logits: F32 [90, 3]; block_m(128)),
        case!("mxfp8, 128 x 256, shuffled", a: Fp8E4M3Fnuz [90, 160], w: Fp8E4M3Fnuz [3, 272, 160], a_mx: E8M0 [768], w_mx: E8M0 [3, 2304], logits: F32 [90, 3]; block_m(128), scales_shuffled(), shuffled()),
        case!("mxfp8, 128 x 256, shuffled (OCP)", a: Fp8E4M3 [90, 160], w: Fp8E4M3 [3, 272, 160], a_mx: E8M0 [768], w_mx: E8M0 [3, 2304], logits: F32 [90, 3]; block_m(128), scales_shuffled(), shuffled()),
        case!("mxfp8, 64 x 64", a: Fp8E4M3Fnuz [33, 160], w: Fp8E4M3Fnuz [4, 70, 160], a_mx: E8M0 [33, 5], w_mx: E8M0 [4, 70, 5], logits: F32 [33, 4]; block_m(64), gate("silu")),
        case!("mxfp8, 64 x 64 (OCP)", a: Fp8E4M3 [33, 160], w: Fp8E4M3 [4, 70, 160], a_mx: E8M0 [33, 5], w_mx: E8M0 [4, 70, 5], logits: F32 [33, 4]; block_m(64), gate("silu")),
        case!("mxfp8, 16 x 32", a: Fp8E4M3Fnuz [9, 2080], w: Fp8E4M3Fnuz [6, 72, 2080], a_mx: E8M0 [9, 65], w_mx: E8M0 [6, 72, 65], logits: F32 [9, 6]; chosen(3), to("f32")),
        case!("mxfp8, 16 x 32 (OCP)", a: Fp8E4M3 [9, 2080], w: Fp8E4M3 [6, 72, 2080], a_mx: E8M0 [9, 65], w_mx: E8M0 [6, 72, 65], logits: F32 [9, 6]; chosen(3), to("f32")),
        case!("i8, pairs", a: I8 [50, 208], w: I8 [3, 140, 208], a_scale: F32 [50], w_scale: F32 [3, 140], bias: F32 [3, 140], logits: F32 [50, 3]; block_m(64), gate("swiglu_oai")),
        case!("fp8", a: Fp8E4M3Fnuz [70, 144], w: Fp8E4M3Fnuz [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], logits: F32 [70, 3]; block_m(128), to("f32")),
        case!("fp8 (OCP)", a: Fp8E4M3 [70, 144], w: Fp8E4M3 [3, 140, 144], a_scale: F32 [1], w_scale: F32 [3], logits: F32 [70, 3]; block_m(128), to("f32")),
        case!("gathered before, shuffled", a: I8 [140, 160], w: I8 [3, 144, 160], a_scale: F32 [140], w_scale: F32 [3], logits: F32 [70, 3]; block_m(32), unweighted(), shuffled()),
        case!("16 x 32", a: I8 [9, 3088], w: I8 [6, 72, 3088], a_scale: F32 [9], w_scale: F32 [6, 72], logits: F32 [9, 6]; chosen(3), gate("silu"), to("f32")),
    ],
    ..MOE_OP
};

pub(crate) const MOE_OP_GEMM_A8W8_BLOCKSCALE: Operator = Operator {
    name: "moe_op_gemm_a8w8_blockscale",
    summary: "moe_op_gemm_a8w8 with f32 scales of blocks",
    args: &[
        ArgSpec { dtypes: CODES, ..A },
        ArgSpec { dtypes: CODES, shape: "[E, N, K]", ..W },
        ArgSpec { shape: "[rows of a, groups of K]", ..A_SCALE }.ranks(2, 2),
        ArgSpec { shape: "[E, groups of N, groups of K]", ..W_SCALE }.ranks(3, 3),
        BIAS,
        LOGITS,
        RAGGED_Y,
    ],
    scalars: &[
        RAGGED_SCALARS[0],
        RAGGED_SCALARS[1],
        GATE,
        WEIGHTED,
        Y_DTYPE,
        W_SHUFFLED,
        TILE,
        GROUP_N,
        GROUP_K,
    ],
    cases: &[
        case!("8 experts, 128 tokens", a: I8 [128, 1024], w: I8 [8, 512, 1024], a_scale: F32 [128, 8], w_scale: F32 [8, 4, 8], logits: F32 [128, 8]; gate("silu")),
        case!("DeepSeek-V3 up, 2 experts, 256 tokens", a: Fp8E4M3Fnuz [256, 7168], w: Fp8E4M3Fnuz [2, 512, 7168], a_scale: F32 [256, 56], w_scale: F32 [2, 4, 56], logits: F32 [256, 2]; gate("silu"), chosen(1), block_m(128)),
        case!("DeepSeek-V3 up, 2 experts, 256 tokens (OCP)", a: Fp8E4M3 [256, 7168], w: Fp8E4M3 [2, 512, 7168], a_scale: F32 [256, 56], w_scale: F32 [2, 4, 56], logits: F32 [256, 2]; gate("silu"), chosen(1), block_m(128)),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3 up, EP8, 4096 tokens", a: Fp8E4M3 [4096, 7168], w: Fp8E4M3 [32, 4096, 7168], a_scale: F32 [4096, 56], w_scale: F32 [32, 32, 56], logits: F32 [4096, 32]; gate("silu"), chosen(8)),
    ]),
    corners: &[
        case!("i8, pairs", a: I8 [90, 400], w: I8 [3, 540, 400], a_scale: F32 [90, 4], w_scale: F32 [3, 5, 4], bias: Bf16 [3, 540], logits: F32 [90, 3]; block_m(128), gate("swiglu_oai")),
        case!("fp8", a: Fp8E4M3Fnuz [33, 160], w: Fp8E4M3Fnuz [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 2, 2], logits: F32 [33, 4]; block_m(64), unweighted()),
        case!("fp8 (OCP)", a: Fp8E4M3 [33, 160], w: Fp8E4M3 [4, 140, 160], a_scale: F32 [33, 2], w_scale: F32 [4, 2, 2], logits: F32 [33, 4]; block_m(64), unweighted()),
        case!("16 x 32, pairs", a: I8 [9, 2320], w: I8 [6, 64, 2320], a_scale: F32 [9, 10], w_scale: F32 [6, 4, 10], logits: F32 [9, 6]; chosen(3), gate("silu"), to("f32"), ("group_n", Scalar::Count(16)), ("group_k", Scalar::Count(256))),
        case!("gathered before, shuffled", a: I8 [140, 160], w: I8 [3, 144, 160], a_scale: F32 [140, 2], w_scale: F32 [3, 2, 2], logits: F32 [70, 3]; block_m(32), shuffled()),
    ],
    ..MOE_OP_GEMM_A8W8
};

pub(crate) const MOE_OP_GEMM_A8W4: Operator = Operator {
    name: "moe_op_gemm_a8w4",
    summary: "moe_op_gemm_a8w8 of fp8 by mxfp4",
    args: &[
        ArgSpec { dtypes: FP8, ..A },
        W4,
        A_MX,
        W_MX,
        A_SCALE.ranks(1, 1),
        W_SCALE.ranks(1, 2),
        BIAS,
        LOGITS,
        RAGGED_Y,
    ],
    scalars: &[
        RAGGED_SCALARS[0],
        RAGGED_SCALARS[1],
        GATE,
        WEIGHTED,
        Y_DTYPE,
        W_SHUFFLED,
        SCALES_SHUFFLED,
        TILE,
    ],
    kernels: &[&kernels::EXPERTS_FP4, &kernels::ROUTING, &kernels::LISTS],
    cases: &[
        case!("GPT-OSS up, 16 experts, 64 tokens", a: Fp8E4M3Fnuz [64, 2880], w: Fp4x2 [16, 256, 1440], w_mx: E8M0 [16, 256, 90], bias: F32 [16, 256], logits: F32 [64, 16]; gate("swiglu_oai"), chosen(4)),
        case!("GPT-OSS up, 16 experts, 64 tokens (OCP)", a: Fp8E4M3 [64, 2880], w: Fp4x2 [16, 256, 1440], w_mx: E8M0 [16, 256, 90], bias: F32 [16, 256], logits: F32 [64, 16]; gate("swiglu_oai"), chosen(4)),
    ],
    bench: BenchSizes::Cases(&[
        case!("GPT-OSS 120B up, 1024 tokens", a: Fp8E4M3 [1024, 2880], w: Fp4x2 [128, 5760, 1440], w_mx: E8M0 [128, 5760, 90], bias: F32 [128, 5760], logits: F32 [1024, 128]; gate("swiglu_oai"), chosen(4)),
    ]),
    corners: &[
        case!("e8m0 of w", a: Fp8E4M3Fnuz [33, 160], w: Fp4x2 [4, 140, 80], w_mx: E8M0 [4, 140, 5], a_scale: F32 [33], bias: F32 [4, 140], logits: F32 [33, 4]; block_m(64), gate("swiglu_oai")),
        case!("e8m0 of w (OCP)", a: Fp8E4M3 [33, 160], w: Fp4x2 [4, 140, 80], w_mx: E8M0 [4, 140, 5], a_scale: F32 [33], bias: F32 [4, 140], logits: F32 [33, 4]; block_m(64), gate("swiglu_oai")),
        case!("e8m0 of both, shuffled", a: Fp8E4M3Fnuz [70, 192], w: Fp4x2 [3, 144, 96], a_mx: E8M0 [768], w_mx: E8M0 [3, 1280], w_scale: F32 [3], logits: F32 [70, 3]; block_m(128), scales_shuffled(), shuffled(), unweighted()),
        case!("e8m0 of both, shuffled (OCP)", a: Fp8E4M3 [70, 192], w: Fp4x2 [3, 144, 96], a_mx: E8M0 [768], w_mx: E8M0 [3, 1280], w_scale: F32 [3], logits: F32 [70, 3]; block_m(128), scales_shuffled(), shuffled(), unweighted()),
        case!("16 x 32", a: Fp8E4M3Fnuz [9, 2080], w: Fp4x2 [6, 72, 1040], a_mx: E8M0 [9, 65], w_mx: E8M0 [6, 72, 65], logits: F32 [9, 6]; chosen(3), gate("silu"), to("f32")),
        case!("16 x 32 (OCP)", a: Fp8E4M3 [9, 2080], w: Fp4x2 [6, 72, 1040], a_mx: E8M0 [9, 65], w_mx: E8M0 [6, 72, 65], logits: F32 [9, 6]; chosen(3), gate("silu"), to("f32")),
    ],
    ..MOE_OP_GEMM_A8W8
};

pub(crate) const MOE_OP_GEMM_A4W4: Operator = Operator {
    name: "moe_op_gemm_a4w4",
    summary: "moe_op_gemm_a8w8 of mxfp4 by mxfp4",
    args: &[
        ArgSpec { dtypes: FP4, shape: "[T, K / 2] or [T k, K / 2]", ..A },
        W4,
        ArgSpec { optional: false, ..A_MX },
        W_MX,
        A_SCALE.ranks(1, 1),
        W_SCALE.ranks(1, 2),
        BIAS,
        LOGITS,
        RAGGED_Y,
    ],
    cases: &[
        case!("8 experts, 128 tokens", a: Fp4x2 [128, 512], w: Fp4x2 [8, 512, 512], a_mx: E8M0 [128, 32], w_mx: E8M0 [8, 512, 32], logits: F32 [128, 8]; gate("silu")),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3 up, EP8, 4096 tokens", a: Fp4x2 [4096, 3584], w: Fp4x2 [32, 4096, 3584], a_mx: E8M0 [4096, 224], w_mx: E8M0 [32, 4096, 224], logits: F32 [4096, 32]; gate("silu"), chosen(8)),
    ]),
    corners: &[
        case!("pairs", a: Fp4x2 [90, 128], w: Fp4x2 [3, 540, 128], a_mx: E8M0 [90, 8], w_mx: E8M0 [3, 540, 8], bias: F32 [3, 540], logits: F32 [90, 3]; block_m(128), gate("swiglu_oai")),
        case!("shuffled", a: Fp4x2 [70, 96], w: Fp4x2 [3, 144, 96], a_mx: E8M0 [768], w_mx: E8M0 [3, 1280], w_scale: F32 [3], a_scale: F32 [1], logits: F32 [70, 3]; block_m(64), scales_shuffled(), shuffled(), unweighted()),
        case!("16 x 32", a: Fp4x2 [9, 1040], w: Fp4x2 [6, 72, 1040], a_mx: E8M0 [9, 65], w_mx: E8M0 [6, 72, 65], logits: F32 [9, 6]; chosen(3), gate("silu"), to("f32")),
    ],
    ..MOE_OP_GEMM_A8W4
};

/// Sizes of a call.
#[derive(Clone, Copy)]
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
    let (experts, w_rows) = (w.shape()[0], w.shape()[1]);
    let (tokens, choices) = match call.optional("logits") {
        Some(logits) => {
            let choices = call.size("k")?;
            if !(1..=experts.min(32)).contains(&choices) {
                return Err(Error::argument(op, "k", choices, format!("1 to {}", experts.min(32))));
            }
            if logits.shape()[1] != experts {
                return Err(Error::shape(op, "logits", logits.shape(), format!("[T, {experts}]")));
            }
            (logits.shape()[0], choices)
        }
        None => {
            let ids = call.get("topk_ids")?.shape();
            (ids[0], ids[1])
        }
    };
    let (a_rows, k) = (a.shape()[0], a.shape()[1] * packed(a.dtype()));
    let w_packed = w_packed(call, k)?;
    if w.shape()[2] * w_packed != k
        || k == 0
        || !(w.shape()[2] * w.dtype().size_bytes()).is_multiple_of(16)
        || !(a.shape()[1] * a.dtype().size_bytes()).is_multiple_of(16)
    {
        return Err(Error::shape(
            op,
            "w",
            w.shape(),
            format!("[E, N, {k}] (K of a), rows of 16-byte chunks"),
        ));
    }
    if !(1..=1024).contains(&experts) || gate_of(call)?.is_some() && w_rows % 2 != 0 {
        return Err(Error::shape(op, "w", w.shape(), "1 to 1024 experts, an even number of rows if gated"));
    }
    if !(1..=32).contains(&choices) {
        return Err(Error::argument(op, "topk_ids", format!("k = {choices}"), "k from 1 to 32"));
    }
    if a_rows != tokens && a_rows != tokens * choices {
        let want = format!("[{tokens}, K] or [{}, K]", tokens * choices);
        return Err(Error::shape(op, "a", a.shape(), want));
    }
    let all = Sizes { tokens, choices, a_rows, experts, w_rows, k };
    block_of(call, &all)?;
    let bad_shape = |arg, got: &V, want: String| Err(Error::shape(op, arg, got.shape(), want));
    if let Some(bias) = call.optional("bias")
        && bias.shape() != [experts, w_rows]
    {
        return bad_shape("bias", bias, format!("[{experts}, {w_rows}]"));
    }
    if let Some(weights) = call.optional("topk_weights")
        && weights.shape() != [tokens, choices]
    {
        return bad_shape("topk_weights", weights, format!("[{tokens}, {choices}]"));
    }
    scale_kind(call, &all)?;
    Ok(all)
}

/// Rows of a list tile.
fn block_of<V: Described>(call: &Call<V>, sizes: &Sizes) -> Result<usize> {
    let name = if call.optional("logits").is_some() { "block_m" } else { "block_size" };
    match call.size(name)? {
        0 if name == "block_m" => Ok(moe_block_m(sizes.tokens, sizes.choices, sizes.experts)),
        block if (16..=256).contains(&block) && block.is_power_of_two() => Ok(block),
        block => Err(Error::argument(call.operator().name, name, block, "16, 32, 64, 128 or 256")),
    }
}

/// Columns of K in an element of w: int4 weights are those whose rows are half as long.
fn w_packed<V: Described>(call: &Call<V>, k: usize) -> Result<usize> {
    let w = call.get("w")?;
    Ok(if w.dtype() == DType::U8 && w.shape()[2] * 2 == k { 2 } else { packed(w.dtype()) })
}

#[derive(Clone, Copy, PartialEq)]
enum ScaleKind {
    None,
    Rows,
    Blocks,
    Groups,
    Mx,
}

fn scale_kind<V: Described>(call: &Call<V>, sizes: &Sizes) -> Result<ScaleKind> {
    let op = call.operator().name;
    let &Sizes { a_rows, experts, w_rows, k, .. } = sizes;
    let half = |dtype| matches!(dtype, DType::Bf16 | DType::F16);
    let (a, w) = (call.get("a")?.dtype(), call.get("w")?.dtype());
    let (a_scale, w_scale) = (call.optional("a_scale"), call.optional("w_scale"));
    let refuse =
        |what: &str| Err(Error::argument(op, "scales", what, "scales that fit the types and shapes"));
    let of_rows = || {
        let of_a = a_scale.is_none_or(|s| s.shape() == [1] || s.shape() == [a_rows]);
        let f32s = w_scale.is_none_or(|s| s.dtype() == DType::F32);
        let of_w = w_scale.is_none_or(|s| {
            let shape = s.shape();
            shape == [experts, w_rows] || shape == [experts] || shape == [1]
        });
        of_a && of_w && f32s
    };
    if call.optional("w_zero").is_some() && w != DType::U8 {
        return refuse("zero points");
    }
    let groups =
        |call: &Call<V>| -> Result<[usize; 2]> { Ok([call.size("group_n")?, call.size("group_k")?]) };
    match w {
        w if w == DType::Fp4x2 || call.optional("w_mx").is_some() => {
            let a_mx = call.optional("a_mx");
            let fits = match (a, w) {
                (DType::Fp4x2, DType::Fp4x2) => a_mx.is_some(),
                (a, DType::Fp4x2) => !half(a) || a_mx.is_none(),
                (a, w) => a == w && a_mx.is_some() && FP8.contains(&w),
            };
            let shuffled = call.bool("scales_shuffled")?;
            let blocks = k / 32;
            let strip = |rows: usize| rows.div_ceil(32) * 32 * blocks.next_multiple_of(8);
            let of = |scale: &V, lead: &[usize], rows: usize| match (shuffled, scale.shape()) {
                (false, shape) => shape == [lead, &[rows, blocks]].concat(),
                (true, [first @ .., n]) => first == lead && *n >= strip(rows),
                (true, []) => false,
            };
            let w_mx = call.get("w_mx")?;
            if !k.is_multiple_of(32)
                || !fits
                || !of_rows()
                || !of(w_mx, &[experts], w_rows)
                || a_mx.is_some_and(|s| !of(s, &[], a_rows))
            {
                return refuse("e8m0 scales of other shapes");
            }
            Ok(ScaleKind::Mx)
        }
        DType::U8 => {
            let [_, group] = groups(call)?;
            let Some(scale) = w_scale else { return refuse("none") };
            if a_scale.is_some()
                || !group.is_power_of_two()
                || group < 32
                || !k.is_multiple_of(group)
                || !half(a)
            {
                return refuse("groups that do not fit K");
            }
            let nibbles = w_packed(call, k)? == 2;
            let rows = if nibbles { w_rows / 2 } else { w_rows };
            let zero = call.optional("w_zero");
            if scale.shape() != [experts, w_rows, k / group]
                || scale.dtype() != DType::F32 && scale.dtype() != a
                || zero.is_some_and(|z| z.shape() != [experts, rows, k / group] || nibbles && w_rows % 2 != 0)
            {
                return refuse("scales of other groups");
            }
            Ok(ScaleKind::Groups)
        }
        w if half(w) => {
            if a_scale.is_some() || w_scale.is_some() {
                refuse("given")
            } else {
                Ok(ScaleKind::None)
            }
        }
        _ => {
            if a_scale.is_some() == half(a) || w_scale.is_none() {
                return refuse("scales that do not fit the types");
            }
            if w_scale.is_some_and(|s| s.shape().len() == 3) {
                let [n, group] = groups(call)?;
                if !n.is_power_of_two() || n < 16 || !group.is_power_of_two() || group < 128 {
                    let got = format!("{n} x {group}");
                    return Err(Error::argument(op, "group_n", got, "powers of two, 16 x 128 or more"));
                }
                let groups = k.div_ceil(group);
                let of_a = a_scale.is_some_and(|s| s.shape() == [a_rows, groups]);
                let of_w = w_scale.is_some_and(|s| s.shape() == [experts, w_rows.div_ceil(n), groups]);
                if !of_a || !of_w || w_scale.is_some_and(|s| s.dtype() != DType::F32) {
                    return refuse("scales of other blocks");
                }
                return Ok(ScaleKind::Blocks);
            }
            if of_rows() { Ok(ScaleKind::Rows) } else { refuse("scales of other rows") }
        }
    }
}

fn gate_of<V: Described>(call: &Call<V>) -> Result<Option<ExpertGate>> {
    if call.operator().name.ends_with("silu_fused") {
        return Ok(Some(ExpertGate::silu(GateOrder::Halves)));
    }
    Ok(match call.choice("gate").unwrap_or("none") {
        "silu" => Some(ExpertGate::silu(GateOrder::Pairs)),
        "swiglu_oai" => Some(ExpertGate::swiglu_oai()),
        _ => None,
    })
}

fn epilogue<V: Described>(call: &Call<V>) -> Result<ExpertEpilogue> {
    if call.optional("logits").is_some() {
        return Ok(moe_gemm::gated(gate_of(call)?));
    }
    if gate_of(call)?.is_some() {
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
    let cols = if gate_of(call)?.is_some() { sizes.w_rows / 2 } else { sizes.w_rows };
    Ok(vec![("y", TensorSpec::new(y_dtype(call)?, [sizes.tokens * sizes.choices, cols]))])
}

fn tile_of<V: Described>(call: &Call<V>) -> Result<Option<ExpertTile>> {
    let name = call.choice("tile")?;
    Ok(ExpertTile::ALL.into_iter().find(|tile| tile.name() == name))
}

pub(super) fn float<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<FloatView<'a>>> {
    let Some(tensor) = inputs.optional(name) else { return Ok(None) };
    Ok(Some(match tensor.dtype() {
        DType::Bf16 => FloatView::Bf16(inputs.view(name)?),
        DType::F16 => FloatView::F16(inputs.view(name)?),
        _ => FloatView::F32(inputs.view(name)?),
    }))
}

fn mx<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<MxScaleView<'a>>> {
    let Some(view) = inputs.optional_view::<E8M0>(name)? else { return Ok(None) };
    Ok(Some(if inputs.bool("scales_shuffled")? {
        MxScaleView::Shuffled(view)
    } else {
        MxScaleView::Rows(view)
    }))
}

fn operands<'a, A: Element, W: Element>(
    inputs: &Inputs<'a>,
    sizes: &Sizes,
) -> Result<ExpertInputs<'a, A, W>> {
    let w = inputs.view::<W>("w")?;
    let w = if inputs.bool("w_shuffled")? { GemmWeight::Shuffled(w) } else { GemmWeight::Rows(w) };
    let scales = match scale_kind(inputs, sizes)? {
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
        ScaleKind::Groups => ExpertScales::Groups {
            bits: 8 / w_packed(inputs, sizes.k)? as u32,
            group: inputs.size("group_k")?,
            scale: float(inputs, "w_scale")?.ok_or_else(|| missing(inputs, "w_scale"))?,
            zero: inputs.optional_view("w_zero")?,
        },
        ScaleKind::Mx => ExpertScales::Mx {
            a: mx(inputs, "a_mx")?,
            w: mx(inputs, "w_mx")?.ok_or_else(|| missing(inputs, "w_mx"))?,
            a_rows: inputs.optional_view("a_scale")?,
            w_rows: inputs.optional_view("w_scale")?,
        },
    };
    let (bias, weights) = (float(inputs, "bias")?, float(inputs, "topk_weights")?);
    Ok(ExpertInputs { a: inputs.view("a")?, w, scales, bias, weights })
}

fn missing(inputs: &Inputs, arg: &'static str) -> Error {
    Error::argument(inputs.operator().name, arg, "none", "given")
}

fn lists<'o>(
    stream: &Stream,
    inputs: &Inputs<'o>,
    outputs: &mut Outputs<'o>,
    sizes: &Sizes,
) -> Result<SortedRows<'o>> {
    let &Sizes { tokens, choices, experts, .. } = sizes;
    let of = [tokens, choices, experts, block_of(inputs, sizes)?];
    let workspace = outputs.workspace(stream, sorted_len(of))?;
    sorted(stream, inputs, workspace, of)
}

/// Elements of the lists of [`sorted`], and of its workspace.
pub(super) fn sorted_len([tokens, choices, experts, block_size]: [usize; 4]) -> usize {
    let len = moe_align_len(tokens, choices, experts, block_size);
    len + len.div_ceil(block_size) + 1 + moe_align_workspace(tokens, choices, experts)
}

/// Sorts the gates of `topk_ids`.
pub(super) fn sorted<'o>(
    stream: &Stream,
    inputs: &Inputs<'o>,
    all: TensorViewMut<'o, i32>,
    [tokens, choices, experts, block_size]: [usize; 4],
) -> Result<SortedRows<'o>> {
    let topk_ids = inputs.view::<i32>("topk_ids")?;
    let len = moe_align_len(tokens, choices, experts, block_size);
    let tiles = len.div_ceil(block_size);
    // First, on 8 bytes.
    let (workspace, rest) = all.split_at(0, moe_align_workspace(tokens, choices, experts))?;
    let (sorted, rest) = rest.split_at(0, len)?;
    let (expert_ids, rest) = rest.split_at(0, tiles)?;
    let (padded, _) = rest.split_at(0, 1)?;
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

/// Routes by `logits`, and gives the rows and the weights of the places.
fn routed<'o>(
    stream: &Stream,
    inputs: &Inputs<'o>,
    outputs: &mut Outputs<'o>,
    sizes: &Sizes,
) -> Result<(RaggedRows<'o>, FloatView<'o>)> {
    let &Sizes { tokens, choices, experts, a_rows, .. } = sizes;
    let (gates, block_m) = (tokens * choices, block_of(inputs, sizes)?);
    let tiles = moe_max_tiles(gates, experts, block_m);
    let scratch = moe_routing_workspace(tokens, choices, experts);
    let all: TensorViewMut<'o, i32> =
        outputs.workspace(stream, 3 * gates + 3 * experts + 2 + tiles + scratch)?;
    let (workspace, rest) = all.split_at(0, scratch)?;
    let (gather_indx, rest) = rest.split_at(0, gates)?;
    let (scatter_indx, rest) = rest.split_at(0, gates)?;
    let (gate_scal, rest) = rest.split_at(0, gates)?;
    let (expt_hist, rest) = rest.split_at(0, experts)?;
    let (token_offs_raw, rest) = rest.split_at(0, experts + 1)?;
    let (token_offs_pad, block_pid_map) = rest.split_at(0, experts + 1)?;
    let gate_scal = gate_scal.cast::<f32>("moe_routing", "gate_scal")?;
    let (gather, offsets, map, weights) =
        (gather_indx.alias(), token_offs_raw.alias(), block_pid_map.alias(), gate_scal.alias());
    let expt_data = ExptData { token_offs_raw, token_offs_pad, block_pid_map };
    let out = Routing { gather_indx, scatter_indx, gate_scal, expt_hist, expt_data };
    let options = RoutingOptions { k: choices, block_m, topk: TopkOptions::default() };
    crate::moe_routing(stream, inputs.view::<f32>("logits")?, None, out, workspace, &options)?;
    let gather_indx = (a_rows == tokens).then_some(gather);
    Ok((
        RaggedRows { gather_indx, token_offs_raw: offsets, block_pid_map: map, block_m, expert_map: None },
        weights.into(),
    ))
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let y = y_dtype(&inputs)?;
    with_operands!(inputs, A, W => with_float!("moe_op", "y", y, Y => run_as::<A, W, Y>(stream, call)))
}

fn run_as<A: Element, W: Element, Y: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let sizes = sizes(&inputs)?;
    let (op, tile, epilogue) = (inputs.operator().name, tile_of(&inputs)?, epilogue(&inputs)?);
    let mut all = operands::<A, W>(&inputs, &sizes)?;
    // The functions of the operators are this, with their types.
    let (names, rows) = if inputs.optional("logits").is_some() {
        let (rows, weights) = routed(stream, &inputs, &mut outputs, &sizes)?;
        all.weights = inputs.bool("weighted")?.then_some(weights);
        (["a", "w", "gammas", "y"], ExpertRows::Ragged(rows))
    } else {
        (NAMES, ExpertRows::Sorted(lists(stream, &inputs, &mut outputs, &sizes)?))
    };
    let y = outputs.take::<Y>("y")?;
    ExpertGemm { op, names, inputs: all, rows, epilogue, tile, keep: false }.run(stream, y)
}

/// What the quantized values of rows of `k` stand for, by their scales: one for `rows` rows and `columns` columns.
fn scaled(values: Vec<f64>, k: usize, scales: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    let groups = k.div_ceil(columns);
    let at = |i: usize| scales[i / k / rows * groups + i % k / columns];
    values.into_iter().enumerate().map(|(i, x)| x * at(i)).collect()
}

/// Values of rows of `k` with e8m0 scales, `rows` of them in each of `batches`.
fn mx_scaled(
    call: &HostCall,
    values: Vec<f64>,
    name: &'static str,
    [batches, rows, k]: [usize; 3],
) -> Result<Vec<f64>> {
    let Some(scales) = call.optional(name) else { return Ok(values) };
    let (scales, blocks) = (scales.to_f64(), k / 32);
    let of_batch = scales.len() / batches.max(1);
    let shuffled = call.bool("scales_shuffled")?;
    let at = |i: usize| {
        let (row, block) = (i / k, i % k / 32);
        if shuffled {
            row / rows * of_batch + quant::shuffled_index(row % rows, block, blocks)
        } else {
            row * blocks + block
        }
    };
    Ok(values.into_iter().enumerate().map(|(i, v)| v * scales[at(i)]).collect())
}

/// Scales of rows, if there are any.
fn row_scaled(call: &HostCall, values: Vec<f64>, name: &str, k: usize) -> Vec<f64> {
    let Some(scales) = call.optional(name) else { return values };
    let scales = scales.to_f64();
    let per = (values.len() / k).div_ceil(scales.len().max(1)).max(1);
    scaled(values, k, &scales, [per, k])
}

fn values(call: &HostCall, sizes: &Sizes) -> Result<[Vec<f64>; 2]> {
    let &Sizes { a_rows, experts, w_rows, k, .. } = sizes;
    let (a, tensor) = (call.get("a")?.to_f64(), call.get("w")?);
    let (element, w_packed) = (tensor.dtype().size_bytes(), w_packed(call, k)?);
    let mut w = tensor.to_f64();
    if tensor.dtype() == DType::U8 && w_packed == 2 {
        w = w.into_iter().flat_map(|byte| [byte % 16.0, (byte / 16.0).floor()]).collect();
    }
    if call.bool("w_shuffled")? {
        if !w_rows.is_multiple_of(16) || !tensor.shape()[2].is_multiple_of(32) {
            let want = "N a multiple of 16, K of 32 (shuffled)";
            return Err(Error::shape(call.operator().name, "w", tensor.shape(), want));
        }
        w = hk_gemm::reference::unshuffled(&w, k, 16 / element * w_packed);
    }
    let scales = |name| call.optional(name).map(|t| t.to_f64()).unwrap_or_default();
    Ok(match scale_kind(call, sizes)? {
        ScaleKind::None => [a, w],
        ScaleKind::Rows => [row_scaled(call, a, "a_scale", k), row_scaled(call, w, "w_scale", k)],
        ScaleKind::Blocks => {
            let (n, group) = (call.size("group_n")?, call.size("group_k")?);
            let a = scaled(a, k, &scales("a_scale"), [1, group]);
            let each = w_rows.div_ceil(n) * k.div_ceil(group);
            let w = w
                .chunks(w_rows * k)
                .zip(scales("w_scale").chunks(each))
                .flat_map(|(w, scales)| scaled(w.to_vec(), k, scales, [n, group]))
                .collect();
            [a, w]
        }
        ScaleKind::Groups => {
            let group = call.size("group_k")?;
            let groups = k / group;
            let (scale, zero) = (scales("w_scale"), scales("w_zero"));
            let half = call.get("a")?.dtype();
            let middle = if w_packed == 2 { 8.0 } else { 128.0 };
            let zero_of = |row: usize, g: usize| match (zero.is_empty(), w_packed) {
                (true, _) => middle,
                (false, 2) => {
                    let byte = zero[row / 2 * groups + g];
                    if row.is_multiple_of(2) { byte % 16.0 } else { (byte / 16.0).floor() }
                }
                _ => zero[row * groups + g],
            };
            let dequantized = |i: usize, q: f64| {
                let (row, g) = (i / k, i % k / group);
                // As in f32, then rounded to the type of a.
                let v = (q - zero_of(row, g)) as f32 * scale[row * groups + g] as f32;
                match half {
                    DType::F16 => <hk_core::f16 as Float>::from_f32(v).to_f64(),
                    _ => <hk_core::bf16 as Float>::from_f32(v).to_f64(),
                }
            };
            let w = w.into_iter().enumerate().map(|(i, q)| dequantized(i, q)).collect();
            [a, w]
        }
        ScaleKind::Mx => {
            let a = mx_scaled(call, a, "a_mx", [1, a_rows, k])?;
            let w = mx_scaled(call, w, "w_mx", [experts, w_rows, k])?;
            [row_scaled(call, a, "a_scale", k), row_scaled(call, w, "w_scale", k)]
        }
    })
}

fn reference_of(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let sizes = sizes(call)?;
    let &Sizes { tokens, choices, a_rows, experts, w_rows, k, .. } = &sizes;
    let [a, w] = values(call, &sizes)?;
    let gates = tokens * choices;
    let per_token = if a_rows == gates { 1 } else { choices };
    let (rows, weights): (Vec<_>, _) = if let Some(logits) = call.optional("logits") {
        let chosen =
            reference::moe_topk(&logits.to_f64(), experts, None, choices, &TopkOptions::default(), 0.0);
        let sorted = reference::moe_sort(&chosen, experts);
        let rows = sorted.gather_indx.iter().enumerate().map(|(place, &gate)| {
            let source = if a_rows == gates && choices > 1 { place } else { gate as usize / per_token };
            Some((source, chosen.ids[gate as usize] as usize))
        });
        (rows.collect(), call.bool("weighted")?.then_some(sorted.gate_scal))
    } else {
        let ids = call.get("topk_ids")?.elements::<i32>()?;
        let row = |(gate, &id): (usize, &i32)| {
            (0..experts as i32).contains(&id).then_some((gate / per_token, id as usize))
        };
        (ids.iter().enumerate().map(row).collect(), call.optional("topk_weights").map(|t| t.to_f64()))
    };
    let bias = call.optional("bias").map(|t| t.to_f64());
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
    let cols = if epilogue.gate.is_some() { w_rows / 2 } else { w_rows };
    Ok(vec![("y", HostTensorF64::new([gates, cols], y).with_magnitudes(magnitudes))])
}
