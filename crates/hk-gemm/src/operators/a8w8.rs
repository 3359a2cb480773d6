//! GEMMs of int8 and fp8.

use super::{
    ACTIVATION, BATCH_INVARIANT, BATCHED_BIAS, BIAS, GROUP_K, GROUP_N, Row, SPLITS, TILE, W_SHUFFLED,
    Y_DTYPE, act, bias, block_shape, case, choice, finished, large, of_k, of_n, options, sizes, splits, tile,
    to, w_shuffled, weight, weights, with_codes, workspace, y, y_dtype, y_outputs,
};
use crate::element::sealed::Int8OrFp8 as _;
use crate::gemm::table::Variant;
use crate::kernels;
use crate::reference;
use crate::{BlockScaledInputs, ScaledInputs};
use hk_core::registry::{ArgSpec, BenchSizes, Case, DeviceCall, HostCall, Operator, Sample, Traffic};
use hk_core::{DType, Stream, with_float};

pub(super) const ROWS: &[Row] = &[
    Row::new(GEMM_A8W8, |call| choice::plain(call, Variant::Plain)),
    Row::new(GEMM_A8W8_PER_TOKEN_SCALE, |call| choice::plain(call, Variant::Plain)),
    Row::new(GEMM_A8W8_BLOCKSCALE, choice::block),
    Row::new(BATCHED_GEMM_A8W8, |call| choice::plain(call, Variant::Plain)),
];

const CODES: &[DType] = &[DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3];

const fn codes(name: &'static str, rank: usize, shape: &'static str) -> ArgSpec {
    ArgSpec::input(name, CODES, rank, shape).sampled(Sample::Uniform { low: -100.0, high: 100.0 })
}
const fn scale(name: &'static str, fewest: usize, most: usize, shape: &'static str) -> ArgSpec {
    let sample = Sample::Uniform { low: 0.001, high: 0.02 };
    ArgSpec::input(name, &[DType::F32], fewest, shape).ranks(fewest, most).sampled(sample)
}
const A: ArgSpec = codes("a", 2, "[M, K]");
const W: ArgSpec = codes("w", 2, "[N, K]");
const A_SCALE: ArgSpec = scale("a_scale", 1, 2, "[M] or [1]");
const W_SCALE: ArgSpec = scale("w_scale", 1, 2, "[N] or [1]");

/// Error of a sum of fp8 in f32, in its magnitude. (That of int8 is smaller: its property tests say so.)
const TERMS: f64 = 1.0 / (1u64 << 16) as f64;

/// Each entry point of a type, over the ends of tiles; for int8 and both fp8.
macro_rules! corners {
    ($name:ident: $case:ident) => {
        corners!($name: $case, 8, 24);
    };
    ($name:ident: $case:ident, $each:literal, $all:literal) => {
        static $name: [Case; $all] = {
            const CASES: [[Case; $each]; 3] =
                [corners!(@ $case I8), corners!(@ $case Fp8E4M3Fnuz), corners!(@ $case Fp8E4M3)];
            let mut all = [CASES[0][0]; $all];
            let mut i = 0;
            while i < all.len() {
                all[i] = CASES[i / $each][i % $each];
                i += 1;
            }
            all
        };
    };
    (@ plain $t:ident) => {
        [
            case!("256 x 256", a: $t [257, 208], w: $t [300, 208], a_scale: F32 [257], w_scale: F32 [300, 1], bias: Bf16 [300]; tile("256x256"), act("gelu")),
            case!("128 x 256", a: $t [140, 208], w: $t [300, 208], a_scale: F32 [140], w_scale: F32 [300, 1], bias: Bf16 [300]; tile("128x256"), splits(2), act("gelu")),
            case!("128 x 128", a: $t [130, 144], w: $t [200, 144], a_scale: F32 [130, 1], w_scale: F32 [1, 200]; tile("128x128"), splits(2), to("f32")),
            case!("64 x 128, shuffled", a: $t [70, 416], w: $t [144, 416], a_scale: F32 [70], w_scale: F32 [144]; tile("64x128"), splits(2), w_shuffled()),
            case!("64 x 64", a: $t [65, 272], w: $t [70, 272], a_scale: F32 [1], w_scale: F32 [70], bias: F32 [70]; tile("64x64"), splits(3), act("relu")),
            case!("elements", a: $t [33, 77], w: $t [50, 77], a_scale: F32 [33], w_scale: F32 [1], bias: F16 [50]; tile("elements"), to("f16")),
            case!("16 x 16", a: $t [13, 3088], w: $t [40, 3088], a_scale: F32 [13], w_scale: F32 [40]; tile("16x16"), act("silu")),
            case!("16 x 16, twice the waves", a: $t [9, 2064], w: $t [24, 2064], a_scale: F32 [9], w_scale: F32 [24]; tile("16x16-twice")),
            case!("16 x 32", a: $t [16, 4112], w: $t [40, 4112], a_scale: F32 [16], w_scale: F32 [40]; tile("16x32"), splits(2)),
            case!("32 x 32, shuffled", a: $t [17, 1056], w: $t [48, 1056], a_scale: F32 [17], w_scale: F32 [48]; tile("32x32"), w_shuffled()),
            case!("64 x 32", a: $t [63, 688], w: $t [40, 688], a_scale: F32 [63], w_scale: F32 [40]; tile("64x32"), to("f32")),
        ]
    };
    (@ per_token $t:ident) => {
        [
            case!("256 x 256", a: $t [100, 64], w: $t [257, 64], a_scale: F32 [100], w_scale: F32 [257]; tile("256x256")),
            case!("128 x 128", a: $t [130, 144], w: $t [40, 144], a_scale: F32 [130], w_scale: F32 [40]; tile("128x128"), splits(2)),
            case!("64 x 64", a: $t [65, 272], w: $t [70, 272], a_scale: F32 [65], w_scale: F32 [70]; tile("64x64"), to("f32")),
            case!("elements", a: $t [33, 77], w: $t [50, 77], a_scale: F32 [33], w_scale: F32 [50]; tile("elements"), to("f16")),
            case!("16 x 16", a: $t [5, 272], w: $t [40, 272], a_scale: F32 [5], w_scale: F32 [40]; tile("16x16")),
            case!("16 x 32", a: $t [16, 272], w: $t [40, 272], a_scale: F32 [16], w_scale: F32 [40]; tile("16x32")),
            case!("32 x 32", a: $t [17, 272], w: $t [40, 272], a_scale: F32 [17], w_scale: F32 [40]; tile("32x32")),
            case!("64 x 32", a: $t [63, 272], w: $t [40, 272], a_scale: F32 [63], w_scale: F32 [40]; tile("64x32")),
        ]
    };
    (@ block $t:ident) => {
        [
            case!("256 x 128", a: $t [257, 400], w: $t [150, 400], a_scale: F32 [257, 4], w_scale: F32 [2, 4], bias: Bf16 [150]; tile("256x128"), act("gelu")),
            case!("256 x 128, 2 splits", a: $t [70, 1040], w: $t [130, 1040], a_scale: F32 [70, 5], w_scale: F32 [65, 5]; tile("256x128"), splits(2), of_n(2), of_k(256), to("f32")),
            case!("96 x 128", a: $t [100, 1296], w: $t [150, 1296], a_scale: F32 [100, 11], w_scale: F32 [2, 11]; tile("96x128"), splits(2), act("gelu")),
            case!("96 x 128, rings of scales", a: $t [18, 4352], w: $t [37, 4352], a_scale: F32 [18, 34], w_scale: F32 [10, 34]; tile("96x128"), of_n(4)),
            case!("128 x 128", a: $t [129, 1296], w: $t [150, 1296], a_scale: F32 [129, 11], w_scale: F32 [38, 11], bias: F32 [150]; tile("128x128"), of_n(4)),
            case!("64 x 128", a: $t [70, 784], w: $t [132, 784], a_scale: F32 [70, 7], w_scale: F32 [2, 7], bias: Bf16 [132]; tile("64x128"), splits(2), act("silu")),
            case!("64 x 64", a: $t [65, 272], w: $t [70, 272], a_scale: F32 [65, 3], w_scale: F32 [70, 3], bias: F32 [70]; tile("64x64"), splits(3), of_n(1)),
            case!("256 x 128, rings of scales", a: $t [18, 4352], w: $t [37, 4352], a_scale: F32 [18, 34], w_scale: F32 [1, 34]; tile("256x128")),
            case!("128 x 128, rings of scales", a: $t [18, 4352], w: $t [37, 4352], a_scale: F32 [18, 34], w_scale: F32 [1, 34]; tile("128x128")),
            case!("64 x 128, rings of scales", a: $t [18, 4352], w: $t [37, 4352], a_scale: F32 [18, 34], w_scale: F32 [1, 34]; tile("64x128")),
            case!("64 x 64, rings of scales", a: $t [18, 4352], w: $t [37, 4352], a_scale: F32 [18, 34], w_scale: F32 [1, 34]; tile("64x64")),
            case!("elements", a: $t [33, 277], w: $t [50, 277], a_scale: F32 [33, 3], w_scale: F32 [7, 3], bias: F16 [50]; tile("elements"), of_n(8), to("f16")),
            case!("16 x 16", a: $t [13, 2064], w: $t [40, 2064], a_scale: F32 [13, 17], w_scale: F32 [1, 17]; tile("16x16"), act("silu")),
            case!("16 x 32", a: $t [16, 4112], w: $t [40, 4112], a_scale: F32 [16, 17], w_scale: F32 [10, 17]; tile("16x32"), splits(2), of_n(4), of_k(256)),
            case!("32 x 32", a: $t [17, 1040], w: $t [40, 1040], a_scale: F32 [17, 9], w_scale: F32 [3, 9]; tile("32x32"), of_n(16)),
            case!("64 x 32, shuffled", a: $t [63, 672], w: $t [48, 672], a_scale: F32 [63, 6], w_scale: F32 [1, 6]; tile("64x32"), splits(2), to("f32"), w_shuffled()),
            case!("groups of 64", a: $t [65, 336], w: $t [70, 336], a_scale: F32 [65, 6], w_scale: F32 [2, 6], bias: F32 [70]; tile("64x64"), splits(2), of_n(64), of_k(64)),
            case!("groups of 32", a: $t [17, 272], w: $t [70, 272], a_scale: F32 [17, 9], w_scale: F32 [35, 9]; of_n(2), of_k(32), act("relu")),
            case!("groups of 16, shuffled", a: $t [20, 160], w: $t [48, 160], a_scale: F32 [20, 10], w_scale: F32 [1, 10]; tile("64x64"), of_k(16), w_shuffled()),
            case!("groups of 8, by elements", a: $t [20, 141], w: $t [70, 141], a_scale: F32 [20, 18], w_scale: F32 [70, 18]; tile("elements"), splits(2), of_n(1), of_k(8)),
            case!("groups of 1", a: $t [5, 19], w: $t [9, 19], a_scale: F32 [5, 19], w_scale: F32 [1, 19]; of_k(1), to("f32")),
        ]
    };
    (@ batched $t:ident) => {
        [
            case!("256 x 256", a: $t [2, 20, 80], w: $t [2, 257, 80], a_scale: F32 [2, 20], w_scale: F32 [2, 257, 1], bias: Bf16 [2, 257]; tile("256x256")),
            case!("128 x 128", a: $t [3, 130, 144], w: $t [3, 40, 144], a_scale: F32 [3, 130, 1], w_scale: F32 [3, 1, 40]; tile("128x128"), splits(2), to("f32")),
            case!("64 x 64", a: $t [2, 65, 272], w: $t [2, 70, 272], a_scale: F32 [1], w_scale: F32 [2, 70], bias: F32 [2, 1, 70]; tile("64x64"), splits(3), act("relu")),
            case!("elements", a: $t [2, 33, 77], w: $t [2, 50, 77], a_scale: F32 [2, 33], w_scale: F32 [1, 1], bias: F16 [2, 50]; tile("elements"), to("f16")),
            case!("16 x 16", a: $t [4, 13, 528], w: $t [4, 40, 528], a_scale: F32 [4, 13], w_scale: F32 [4, 40]; tile("16x16")),
            case!("16 x 32", a: $t [2, 16, 4112], w: $t [2, 40, 4112], a_scale: F32 [2, 16], w_scale: F32 [2, 40]; tile("16x32"), splits(2)),
            case!("32 x 32", a: $t [2, 17, 528], w: $t [2, 40, 528], a_scale: F32 [2, 17], w_scale: F32 [2, 40]; tile("32x32")),
            case!("no columns of K", a: $t [2, 3, 0], w: $t [2, 5, 0], a_scale: F32 [2, 3], w_scale: F32 [2, 5], bias: F32 [2, 5]),
        ]
    };
}
corners!(CORNERS: plain, 11, 33);
corners!(PER_TOKEN_CORNERS: per_token);
corners!(BLOCK_CORNERS: block, 21, 63);
corners!(BATCHED_CORNERS: batched);

/// Calls a safe function that takes a bias.
macro_rules! run {
    ($name:ident) => {
        |stream: &Stream, call: &mut DeviceCall| {
            let (inputs, mut outputs) = call.split();
            let (options, bias) = (options(&inputs)?, bias(&inputs)?);
            let (a_scale, w_scale) = (inputs.view("a_scale")?, inputs.view("w_scale")?);
            with_codes!(inputs, "a", T => {
                let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
                let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
                with_float!(stringify!($name), "y", y_dtype(&inputs)?, Y => {
                    let y = outputs.take::<Y>("y")?;
                    let inputs = ScaledInputs { a, w, a_scale, w_scale };
                    crate::$name(stream, inputs, bias, y, space, options)
                })
            })
        }
    };
}

const GEMM_A8W8: Operator = Operator {
    name: "gemm_a8w8",
    family: "hk-gemm",
    summary: "y = activation(a_scale w_scale (a w^T) + bias)",
    args: &[A, W, A_SCALE, W_SCALE, BIAS, y(2, "[M, N]", TERMS)],
    scalars: &[Y_DTYPE, ACTIVATION, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[&kernels::A8W8, &kernels::A8W8_DECODE, &kernels::REDUCE],
    cases: &[
        case!("Llama-3 8B o, 16 tokens, int8", a: I8 [16, 4096], w: I8 [4096, 4096], a_scale: F32 [16], w_scale: F32 [4096]),
        case!("Llama-3 8B o, 16 tokens, fp8", a: Fp8E4M3Fnuz [16, 4096], w: Fp8E4M3Fnuz [4096, 4096], a_scale: F32 [16], w_scale: F32 [4096]),
        case!("Llama-3 8B o, 16 tokens, fp8 (OCP)", a: Fp8E4M3 [16, 4096], w: Fp8E4M3 [4096, 4096], a_scale: F32 [16], w_scale: F32 [4096]),
        case!("512 x 512 x 1024, int8", a: I8 [512, 1024], w: I8 [512, 1024], a_scale: F32 [512], w_scale: F32 [512]),
        case!("a block of 4096 x 4096 x 4096, int8", a: I8 [256, 4096], w: I8 [256, 4096], a_scale: F32 [256], w_scale: F32 [256]; tile("256x256")),
        case!("a block of 4096 x 4096 x 4096, fp8", a: Fp8E4M3Fnuz [256, 4096], w: Fp8E4M3Fnuz [256, 4096], a_scale: F32 [256], w_scale: F32 [256]; tile("256x256")),
        case!("a block of 4096 x 4096 x 4096, fp8 (OCP)", a: Fp8E4M3 [256, 4096], w: Fp8E4M3 [256, 4096], a_scale: F32 [256], w_scale: F32 [256]; tile("256x256")),
        case!("a block of 8192 x 8192 x 8192, int8", a: I8 [256, 8192], w: I8 [256, 8192], a_scale: F32 [256], w_scale: F32 [256]; tile("256x256")),
        case!("a block of 8192 x 8192 x 8192, fp8", a: Fp8E4M3Fnuz [256, 8192], w: Fp8E4M3Fnuz [256, 8192], a_scale: F32 [256], w_scale: F32 [256]; tile("256x256")),
        case!("a block of 8192 x 8192 x 8192, fp8 (OCP)", a: Fp8E4M3 [256, 8192], w: Fp8E4M3 [256, 8192], a_scale: F32 [256], w_scale: F32 [256]; tile("256x256")),
    ],
    bench: BenchSizes::Cases(&large!(Fp8E4M3, a_scale, w_scale)),
    corners: &CORNERS,
    outputs: y_outputs,
    run: run!(gemm_a8w8),
    reference: |call: &HostCall| {
        let [batch, m, n, k] = sizes(call)?;
        let (a, w) = (call.get("a")?.to_f64(), weights(call)?);
        let (a_scale, w_scale) = (call.get("a_scale")?.to_f64(), call.get("w_scale")?.to_f64());
        finished(call, reference::product(&a, &w, [batch, m, n, k]).scaled(&a_scale, &w_scale, [m, n]))
    },
    traffic: Traffic::once,
};

const GEMM_A8W8_PER_TOKEN_SCALE: Operator = Operator {
    name: "gemm_a8w8_per_token_scale",
    summary: "y = activation(a_scale w_scale (a w^T))",
    args: &[A, W, A_SCALE, W_SCALE, y(2, "[M, N]", TERMS)],
    cases: &[
        case!("DeepSeek-V3 q, kv, 16 tokens, fp8", a: Fp8E4M3Fnuz [16, 7168], w: Fp8E4M3Fnuz [2112, 7168], a_scale: F32 [16, 1], w_scale: F32 [2112, 1]),
        case!("DeepSeek-V3 q, kv, 16 tokens, fp8 (OCP)", a: Fp8E4M3 [16, 7168], w: Fp8E4M3 [2112, 7168], a_scale: F32 [16, 1], w_scale: F32 [2112, 1]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &PER_TOKEN_CORNERS,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        let (a_scale, w_scale) = (inputs.view("a_scale")?, inputs.view("w_scale")?);
        with_codes!(inputs, "a", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_float!("gemm_a8w8_per_token_scale", "y", y_dtype(&inputs)?, Y => {
                let y = outputs.take::<Y>("y")?;
                let inputs = ScaledInputs { a, w, a_scale, w_scale };
                crate::gemm_a8w8_per_token_scale(stream, inputs, y, space, options)
            })
        })
    },
    ..GEMM_A8W8
};

const BATCHED_GEMM_A8W8: Operator = Operator {
    name: "batched_gemm_a8w8",
    summary: "y = activation(a_scale w_scale (a w^T) + bias) for each batch",
    args: &[
        codes("a", 3, "[batch, M, K]"),
        codes("w", 3, "[batch, N, K]"),
        scale("a_scale", 1, 3, "[batch, M] or [1]"),
        scale("w_scale", 1, 3, "[batch, N] or [1]"),
        BATCHED_BIAS,
        y(3, "[batch, M, N]", TERMS),
    ],
    cases: &[
        case!("DeepSeek-V3 v up-projection of 16 heads, 64 tokens, fp8", a: Fp8E4M3Fnuz [16, 64, 512], w: Fp8E4M3Fnuz [16, 128, 512], a_scale: F32 [16, 64], w_scale: F32 [16, 128]),
        case!("DeepSeek-V3 v up-projection of 16 heads, 64 tokens, fp8 (OCP)", a: Fp8E4M3 [16, 64, 512], w: Fp8E4M3 [16, 128, 512], a_scale: F32 [16, 64], w_scale: F32 [16, 128]),
        case!("8 of 32 x 256 x 1024, int8", a: I8 [8, 32, 1024], w: I8 [8, 256, 1024], a_scale: F32 [8, 32], w_scale: F32 [8, 256]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &[], axis1: &["a", "a_scale"] },
    corners: &BATCHED_CORNERS,
    run: run!(batched_gemm_a8w8),
    ..GEMM_A8W8
};

const GEMM_A8W8_BLOCKSCALE: Operator = Operator {
    name: "gemm_a8w8_blockscale",
    summary: "y = activation(sum over groups of a_scale w_scale (a w^T of a group) + bias)",
    args: &[
        A,
        W,
        scale("a_scale", 2, 2, "[M, groups of K]"),
        scale("w_scale", 2, 2, "[groups of N, groups of K]"),
        BIAS,
        y(2, "[M, N]", TERMS),
    ],
    scalars: &[Y_DTYPE, ACTIVATION, GROUP_N, GROUP_K, W_SHUFFLED, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[
        &kernels::A8W8_BLOCKSCALE,
        &kernels::A8W8_BLOCKSCALE_DECODE,
        &kernels::A8W8_GROUPSCALE,
        &kernels::REDUCE,
    ],
    cases: &[
        case!("DeepSeek-V3 down of a shared expert, 16 tokens", a: Fp8E4M3Fnuz [16, 2048], w: Fp8E4M3Fnuz [7168, 2048], a_scale: F32 [16, 16], w_scale: F32 [56, 16]),
        case!("DeepSeek-V3 down of a shared expert, 16 tokens (OCP)", a: Fp8E4M3 [16, 2048], w: Fp8E4M3 [7168, 2048], a_scale: F32 [16, 16], w_scale: F32 [56, 16]),
        case!("the same, groups of 32", a: Fp8E4M3Fnuz [16, 2048], w: Fp8E4M3Fnuz [7168, 2048], a_scale: F32 [16, 64], w_scale: F32 [56, 64]; of_k(32)),
        case!("the same, groups of 32 (OCP)", a: Fp8E4M3 [16, 2048], w: Fp8E4M3 [7168, 2048], a_scale: F32 [16, 64], w_scale: F32 [56, 64]; of_k(32)),
        case!("512 x 512 x 1024", a: Fp8E4M3Fnuz [512, 1024], w: Fp8E4M3Fnuz [512, 1024], a_scale: F32 [512, 8], w_scale: F32 [4, 8]),
        case!("512 x 512 x 1024 (OCP)", a: Fp8E4M3 [512, 1024], w: Fp8E4M3 [512, 1024], a_scale: F32 [512, 8], w_scale: F32 [4, 8]),
        case!("a block of 4096 x 4096 x 4096, int8", a: I8 [256, 4096], w: I8 [128, 4096], a_scale: F32 [256, 32], w_scale: F32 [1, 32]; tile("256x128")),
        case!("a block of 4096 x 4096 x 4096, fp8", a: Fp8E4M3Fnuz [256, 4096], w: Fp8E4M3Fnuz [128, 4096], a_scale: F32 [256, 32], w_scale: F32 [1, 32]; tile("256x128")),
        case!("a block of 4096 x 4096 x 4096, fp8 (OCP)", a: Fp8E4M3 [256, 4096], w: Fp8E4M3 [128, 4096], a_scale: F32 [256, 32], w_scale: F32 [1, 32]; tile("256x128")),
        case!("a block of 8192 x 8192 x 8192, int8", a: I8 [256, 8192], w: I8 [128, 8192], a_scale: F32 [256, 64], w_scale: F32 [1, 64]; tile("256x128")),
        case!("a block of 8192 x 8192 x 8192, fp8", a: Fp8E4M3Fnuz [256, 8192], w: Fp8E4M3Fnuz [128, 8192], a_scale: F32 [256, 64], w_scale: F32 [1, 64]; tile("256x128")),
        case!("a block of 8192 x 8192 x 8192, fp8 (OCP)", a: Fp8E4M3 [256, 8192], w: Fp8E4M3 [128, 8192], a_scale: F32 [256, 64], w_scale: F32 [1, 64]; tile("256x128")),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "y"], axis1: &[] },
    corners: &BLOCK_CORNERS,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, bias) = (options(&inputs)?, bias(&inputs)?);
        let (a_scale, w_scale) = (inputs.view("a_scale")?, inputs.view("w_scale")?);
        let group = block_shape(&inputs)?;
        with_codes!(inputs, "a", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_float!("gemm_a8w8_blockscale", "y", y_dtype(&inputs)?, Y => {
                let y = outputs.take::<Y>("y")?;
                let inputs = BlockScaledInputs { a, w, a_scale, w_scale, group };
                crate::gemm_a8w8_blockscale(stream, inputs, bias, y, space, options)
            })
        })
    },
    reference: |call: &HostCall| {
        let [batch, m, n, k] = sizes(call)?;
        let (a, w) = (call.get("a")?.to_f64(), weights(call)?);
        let (a_scale, w_scale) = (call.get("a_scale")?.to_f64(), call.get("w_scale")?.to_f64());
        let group = block_shape(call)?;
        let a = reference::scaled(&a, k, &a_scale, [1, group.k]);
        let w = reference::scaled(&w, k, &w_scale, [group.n, group.k]);
        finished(call, reference::product(&a, &w, [batch, m, n, k]))
    },
    ..GEMM_A8W8
};
