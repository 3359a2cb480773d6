//! The operators as data, for the `hk` program, the demo and the documentation.

/// Cases for each entry point of a tiled kernel: per dtype, with its scalars.
macro_rules! tile_corners {
    ($name:ident, $more:tt: $($dtype:ident $scalars:tt),+) => {
        static $name: &[hk_core::registry::Case] = &[$(
            tile_corners!(@case $more $dtype $scalars 400 128),
            tile_corners!(@case $more $dtype $scalars 9 2880),
            tile_corners!(@case $more $dtype $scalars 150 102),
            tile_corners!(@case $more $dtype $scalars 11 1498)
        ),+];
    };
    (@case [$($more:tt)*] $dtype:ident [$($scalars:tt)*] $rows:literal $cols:literal) => {
        hk_core::registry::Case {
            label: concat!($rows, " rows of ", $cols),
            tensors: &[("x", DType::$dtype, &[$rows, $cols]), $($more)*],
            scalars: &[$($scalars)*],
        }
    };
}

mod fp8_convert;
pub(crate) mod group;
mod moe;
pub(crate) mod mx;
mod mxfp;
mod per_tensor;
mod per_token;

use hk_core::DType;
use hk_core::quant::Quantized;
use hk_core::registry::{ArgSpec, Operator, Role, Scalar, ScalarSpec, Tolerance};

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    per_token::PER_TOKEN_QUANT,
    per_token::SMOOTHQUANT,
    moe::MOE_SMOOTHQUANT,
    per_tensor::PER_TENSOR_QUANT_STATIC,
    per_tensor::PER_TENSOR_QUANT_DYNAMIC,
    per_tensor::DOWNCAST_TO_STATIC_FP8,
    group::GROUP_QUANT,
    mx::DYNAMIC_MXFP4_QUANT,
    mxfp::DOWNCAST_TO_MXFP,
    mxfp::UPCAST_FROM_MXFP,
    mx::SHUFFLE_SCALES,
    mx::UNSHUFFLE_SCALES,
    fp8_convert::FP8_OCP_TO_FNUZ,
    fp8_convert::FP8_FNUZ_TO_OCP,
    crate::fused_rmsnorm::operators::FUSED_RMSNORM_FP8_QUANT,
    crate::fused_rmsnorm::operators::FUSED_RMSNORM_MXFP4_QUANT,
];

pub(crate) const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
pub(crate) const QUANTIZED: &[DType] = &[DType::I8, DType::Fp8E4M3, DType::Fp8E4M3Fnuz];

const X: ArgSpec = ArgSpec::input("x", FLOATS, 2, "[.., cols]").ranks(1, 5);
const Q: ArgSpec = ArgSpec { role: Role::Out(Tolerance::Neighbour), dtypes: QUANTIZED, name: "q", ..X };
/// Scales are defined bitwise.
const SCALE: ArgSpec = ArgSpec::output("scale", Tolerance::Exact, &[DType::F32], 1, "[rows]");

/// The type of `q`, which does not follow from the inputs.
pub(crate) const OUTPUT: ScalarSpec = ScalarSpec {
    name: "output",
    default: Scalar::Choice("fp8e4m3"),
    choices: &["i8", "fp8e4m3", "fp8e4m3fnuz"],
    summary: "type of q",
};

/// Rounds a float to a quantized type.
fn round<Q: Quantized>(x: f32) -> f64 {
    f64::from(Q::from_f32(x).to_f32())
}
