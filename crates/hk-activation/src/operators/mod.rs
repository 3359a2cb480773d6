//! The operators as data, for the `hk` program, the demo and the documentation.

mod causal_conv1d;
mod gated;
mod mul_add;
mod qkv;
mod rope;
mod softmax;
mod topk;
pub(crate) mod unary;

use hk_core::registry::{Call, CallSpec, Described, Named, Operator, Scalar, ScalarSpec, TensorSpec};
use hk_core::{DType, Error, Result};

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    unary::SILU,
    unary::GELU,
    unary::GELU_TANH,
    unary::RELU,
    unary::TANH,
    gated::SILU_AND_MUL,
    gated::GELU_AND_MUL,
    gated::GELU_TANH_AND_MUL,
    gated::SWIGLU_OAI_AND_MUL,
    mul_add::FUSED_MUL_ADD,
    causal_conv1d::CAUSAL_CONV1D_FWD,
    causal_conv1d::CAUSAL_CONV1D_UPDATE,
    rope::ROPE_CACHED,
    rope::ROPE_FREQS,
    rope::ROPE_QK,
    qkv::FUSED_QKV_SPLIT_QK_ROPE,
    softmax::SOFTMAX,
    topk::TOPK,
];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

/// The type of `y`: that of `x`, or any.
const Y_DTYPE: ScalarSpec = ScalarSpec {
    name: "y_dtype",
    default: Scalar::Choice("as_x"),
    choices: &["as_x", "bf16", "f16", "f32"],
    summary: "type of y",
};
/// The type of `y`: that of `x`, or `f32`.
const Y_DTYPE_OR_F32: ScalarSpec = ScalarSpec { choices: &["as_x", "f32"], ..Y_DTYPE };

/// What a call says with either.
fn y_dtype<V: Described>(call: &Call<V>) -> Result<DType> {
    match call.choice("y_dtype")? {
        "as_x" => Ok(call.get("x")?.dtype()),
        name => name.parse(),
    }
}

/// `y`, of the shape of `x`.
fn y_as_x(call: &CallSpec) -> Result<Named<TensorSpec>> {
    Ok(vec![("y", TensorSpec::new(y_dtype(call)?, call.get("x")?.shape.clone()))])
}

/// Checks that the rows of `x` have columns.
fn expect_columns(op: &'static str, x: &[usize], cols: usize) -> Result<()> {
    if cols > 0 {
        return Ok(());
    }
    let rows = x.iter().rev().skip(1).product();
    Err(Error::empty(op, "x", 1, &[rows, cols]))
}
