#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod fp8_convert;
mod fused_rmsnorm;
mod group;
mod launch_tiles;
mod moe;
mod mx_quant;
mod mxfp;
#[cfg(feature = "registry")]
mod operators;
mod per_tensor;
mod per_token;
#[cfg(feature = "registry")]
pub mod reference;
mod scales;

use hk_core::{Error, Result, TensorView};

pub use fp8_convert::{fp8_fnuz_to_ocp, fp8_ocp_to_fnuz};
pub use fused_rmsnorm::{
    Fp8Scale, NormMxfp4Options, NormRounding, NormRows, SecondRows, fused_rmsnorm_fp8_quant,
    fused_rmsnorm_mxfp4_quant,
};
pub use group::{GroupOptions, GroupScale, GroupScaleRule, group_quant};
pub use moe::{MoeOrder, moe_smoothquant};
pub use mx_quant::{MxOptions, dynamic_mxfp4_quant};
pub use mxfp::{downcast_to_mxfp, upcast_from_mxfp};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use per_tensor::{downcast_to_static_fp8, per_tensor_quant_dynamic, per_tensor_quant_static};
pub use per_token::{PerTokenOptions, Smooth, per_token_quant, smoothquant};
pub use scales::{shuffle_scales, unshuffle_scales};

/// Checks a scalar that lies on the device.
fn expect_one(op: &'static str, arg: &'static str, tensor: &TensorView<f32>) -> Result<()> {
    if tensor.shape() != [1] {
        return Err(Error::shape(op, arg, tensor.shape(), "[1]"));
    }
    tensor.expect_aligned(op, arg, 4)
}
