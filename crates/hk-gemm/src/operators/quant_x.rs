//! A product of 16-bit floats, and its activations quantized, in one launch.

use super::a16w16::{GEMM_A16W16, TERMS, product};
use super::quantized::{HALVES, joined};
use super::{
    ACTIVATION, BATCH_INVARIANT, BIAS, Row, SPLITS, TILE, W_SHUFFLED, Y_DTYPE, act, bias, case, choice,
    finished, options, sizes, splits, tile, to, w_shuffled, weight, with_half, workspace, y, y_dtype,
    y_outputs,
};
use crate::element::sealed::Half as _;
use crate::gemm::operands::MX_BLOCK;
use crate::gemm::table::Variant;
use crate::ops::fused_gemm_a16w16_quant_x::rule;
use crate::{QuantXOptions, QuantXOutputs, kernels};
use hk_core::quant::{BlockScale, MxElement};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Scalar, ScalarSpec, TensorSpec, Tolerance,
};
use hk_core::{DType, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E5M2, Result, Stream, with_float};
use hk_quant::reference::{self, Quantization, mx_quant};

pub(super) const ROWS: &[Row] =
    &[Row::new(FUSED_GEMM_A16W16_QUANT_X, |call| choice::plain(call, Variant::QuantX))];

const ELEMENTS: &[DType] = &[DType::Fp4x2, DType::Fp8E4M3, DType::Fp8E5M2];

const ELEMENT: ScalarSpec = ScalarSpec {
    name: "element",
    default: Scalar::Choice("fp8e4m3"),
    choices: &["fp8e4m3", "fp8e5m2", "fp4"],
    summary: "type of the elements of x_quant",
};
const MODE: ScalarSpec = ScalarSpec {
    name: "mode",
    default: Scalar::Choice("round_up"),
    choices: &["round_up", "even", "floor"],
    summary: "how a scale follows from the largest magnitude",
};
const fn of(element: &'static str) -> (&'static str, Scalar) {
    ("element", Scalar::Choice(element))
}
const fn by(mode: &'static str) -> (&'static str, Scalar) {
    ("mode", Scalar::Choice(mode))
}

/// Runs `$body` with `$e` as the type of the elements of a call.
macro_rules! with_element {
    ($call:expr, $e:ident => $body:expr) => {
        match $call.choice("element")? {
            "fp8e4m3" => {
                type $e = Fp8E4M3;
                $body
            }
            "fp8e5m2" => {
                type $e = Fp8E5M2;
                $body
            }
            _ => {
                type $e = Fp4x2;
                $body
            }
        }
    };
}

fn mode<V: Described>(call: &Call<V>) -> Result<BlockScale> {
    Ok(match call.choice("mode")? {
        "even" => BlockScale::Even,
        "floor" => BlockScale::Floor,
        _ => BlockScale::RoundUp,
    })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [_, m, _, k] = sizes(call)?;
    let mut specs = y_outputs(call)?;
    let (dtype, per) = with_element!(call, E => (<E as hk_core::Element>::DTYPE, E::PER_ELEMENT));
    specs.push(("x_quant", TensorSpec::new(dtype, [m, k / per])));
    specs.push(("x_scale", TensorSpec::new(DType::E8M0, [m, k.div_ceil(MX_BLOCK)])));
    Ok(specs)
}

/// Of the rows of x.
fn quantized(call: &HostCall) -> Result<Quantization> {
    let [_, _, _, k] = sizes(call)?;
    let x = call.get("x")?.to_f64();
    let rule = with_element!(call, E => rule::<E>(mode(call)?));
    // Without columns there are no blocks.
    let cols = k.max(1);
    Ok(match call.choice("element")? {
        "fp8e4m3" => mx_quant(&x, cols, rule, |v| Fp8E4M3::from_f32_saturating(v).to_f32().into()),
        "fp8e5m2" => mx_quant(&x, cols, rule, |v| Fp8E5M2::from_f32_saturating(v).to_f32().into()),
        _ => mx_quant(&x, cols, rule, reference::fp4(Fp4Rounding::NearestEven)),
    })
}

macro_rules! corners {
    ($name:ident: $h:ident) => {
        const $name: [Case; 9] = [
            case!("256 x 256", x: $h [20, 320], w: $h [260, 320], bias: $h [260]; tile("256x256")),
            case!("128 x 128, a short block", x: $h [30, 200], w: $h [40, 200]; tile("128x128"), of("fp4"), by("even")),
            case!("64 x 64, shuffled, 2 parts", x: $h [65, 288], w: $h [80, 288], bias: F32 [80]; tile("64x64"), splits(2), act("silu"), w_shuffled(), by("floor")),
            case!("elements", x: $h [33, 77], w: $h [50, 77]; tile("elements"), to("f16"), of("fp8e5m2")),
            case!("elements, pairs", x: $h [5, 70], w: $h [9, 70]; tile("elements"), of("fp4")),
            case!("16 x 16", x: $h [13, 1544], w: $h [40, 1544], bias: F16 [40]; tile("16x16"), to("f32")),
            case!("16 x 32", x: $h [16, 2080], w: $h [40, 2080]; tile("16x32"), splits(2)),
            case!("32 x 32", x: $h [17, 512], w: $h [40, 512]; tile("32x32"), of("fp4")),
            case!("64 x 32", x: $h [63, 352], w: $h [40, 352]; tile("64x32"), act("relu"), of("fp8e5m2"), by("even")),
        ];
    };
}
corners!(BF16: Bf16);
corners!(F16: F16);

const FUSED_GEMM_A16W16_QUANT_X: Operator = Operator {
    name: "fused_gemm_a16w16_quant_x",
    summary: "y = activation(x w^T + bias), and x as MX blocks of 32 columns, in one launch",
    args: &[
        ArgSpec::input("x", HALVES, 2, "[M, K]"),
        ArgSpec::input("w", HALVES, 2, "[N, K]"),
        BIAS,
        y(2, "[M, N]", TERMS),
        ArgSpec::output("x_quant", Tolerance::Exact, ELEMENTS, 2, "[M, K], half of K if pairs"),
        ArgSpec::output("x_scale", Tolerance::Exact, &[DType::E8M0], 2, "[M, ceil(K / 32)]"),
    ],
    scalars: &[Y_DTYPE, ACTIVATION, W_SHUFFLED, ELEMENT, MODE, TILE, SPLITS, BATCH_INVARIANT],
    kernels: &[&kernels::QUANT_X, &kernels::QUANT_X_DECODE, &kernels::REDUCE],
    cases: &[
        case!("DeepSeek-V3 router, 16 tokens", x: Bf16 [16, 7168], w: Bf16 [256, 7168]),
        case!("DeepSeek-V3 router, 256 tokens", x: Bf16 [256, 7168], w: Bf16 [256, 7168]),
        case!("GPT-OSS router, 128 tokens, fp4", x: Bf16 [128, 2880], w: Bf16 [128, 2880], bias: Bf16 [128]; of("fp4"), by("even")),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x", "x_scale", "b", "y"], axis1: &[] },
    corners: &joined::<18>(&[&BF16, &F16]),
    outputs,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (options, mode, bias) = (options(&inputs)?, mode(&inputs)?, bias(&inputs)?);
        let x_scale = outputs.take("x_scale")?;
        with_half!(inputs, "x", T => {
            let space = workspace(stream, &inputs, &mut outputs, &options, T::PRECISION)?;
            let (x, w) = (inputs.view::<T>("x")?, weight::<T>(&inputs)?);
            with_element!(inputs, E => {
                let x_quant = outputs.take::<E>("x_quant")?;
                with_float!("fused_gemm_a16w16_quant_x", "y", y_dtype(&inputs)?, Y => {
                    let y = outputs.take::<Y>("y")?;
                    let (outputs, options) = (QuantXOutputs { y, x_quant, x_scale }, QuantXOptions { mode, gemm: options });
                    crate::fused_gemm_a16w16_quant_x(stream, x, w, bias, outputs, space, options)
                })
            })
        })
    },
    reference: |call: &HostCall| {
        let [_, m, _, k] = sizes(call)?;
        let Quantization { q, scale } = quantized(call)?;
        let mut all = finished(call, product(call)?)?;
        all.push(("x_quant", HostTensorF64::new([m, k], q)));
        all.push(("x_scale", HostTensorF64::new([m, k.div_ceil(MX_BLOCK)], scale)));
        Ok(all)
    },
    ..GEMM_A16W16
};
