//! Test kit for kernels.
//!
//! A property test of an operator makes a random case, runs it on every device, and compares each element with an
//! f64 reference:
//!
//! ```no_run
//! use hk_testkit::{self as kit, Tolerance, proptest::prelude::*};
//! # use hk_core::{Stream, TensorView, TensorViewMut, Result, bf16, Float};
//! # fn double(_: &Stream, _: TensorView<bf16>, _: TensorViewMut<bf16>) -> Result<()> { Ok(()) }
//!
//! proptest! {
//!     #![proptest_config(kit::config())]
//!     #[test]
//!     fn matches_f64_reference(c in kit::row_case::<bf16>(1..5, 1..=16384)) {
//!         for gpu in kit::devices() {
//!             let x = gpu.upload(&c.x, c.place(0)); // random row stride and alignment
//!             let mut y = gpu.poisoned(c.place(1)); // NaN, so that an element that is not written fails
//!             double(gpu.stream(), x.view(), y.view_mut()).unwrap();
//!             let want: Vec<f64> = c.x.iter().map(|x| 2.0 * x.to_f64()).collect();
//!             kit::assert_close(&gpu.download(&y), &want, Tolerance::Elementwise);
//!             gpu.assert_guards(&y); // padding between rows and around the tensor is untouched
//!         }
//!     }
//! }
//! ```
//!
//! - [`devices`], [`devices_where`], [`sanitized_devices`], [`config`] and [`full`]: where tests run, how often, and how large.
//! - [`Gpu`], [`Tensor`], [`Place`]: tensors inside larger, poisoned allocations.
//! - [`compare`](mod@compare), [`assert_close`] and the like: comparison, and the report of a failure.
//! - [`measure`](mod@measure): time of an operator on a device.
//! - [`assert_error`], [`kind!`], [`widen`], [`floats`]: helpers.
//! - [`Refusals`]: tables of invalid calls and their errors.
//! - [`host_call`], [`check_call`]: a call of a registered operator, compared with its reference.
//! - [`corner_tests!`]: tests of every operator of a registry.
//! - [`rope`](mod@rope): cases of rotary embedding.
//! - [`row_case`], [`size`], [`finite`] and the like: strategies biased towards the borders of kernels.
//!
//! Functions of this crate panic on failure, as assertions do.

#[cfg(feature = "bench")]
pub mod bench;
mod calls;
mod checks;
pub mod compare;
#[cfg(feature = "strategies")]
mod damage;
#[cfg(feature = "strategies")]
mod errors;
mod gpu;
pub mod measure;
#[cfg(feature = "strategies")]
mod registry;
#[cfg(feature = "strategies")]
pub mod rope;
#[cfg(feature = "strategies")]
mod strategies;

pub use calls::{check_call, host_call};
pub use checks::{assert_error, devices_where, floats, widen};
pub use compare::{
    Array, assert_bits, assert_close, assert_near, assert_rounded, assert_within_ulps, ulp_distance,
};
#[cfg(feature = "strategies")]
pub use damage::assert_references_refuse_alike;
#[cfg(feature = "strategies")]
pub use errors::{AnyView, AnyViewMut, Call, CallElement, Refusals, Tensors};
pub use gpu::{Gpu, Place, Tensor, devices, sanitized_devices};
#[doc(hidden)]
pub use hk_core;
pub use hk_core::registry::{HostTensorF64, Tolerance};
#[cfg(feature = "strategies")]
pub use proptest;
#[cfg(feature = "strategies")]
pub use registry::{assert_every_kernel_runs, assert_every_operator_is_checked, check_corners};
#[cfg(feature = "strategies")]
pub use strategies::{
    Fill, RowCase, any_value, config, finite, full, on_grid, row_case, row_stride, size, special,
    special_values,
};
