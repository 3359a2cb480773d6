//! Operators as data.
//!
//! A family crate describes each of its operators once, in an [`Operator`]; the `hk` program, the demo, the status
//! table and the documentation are made from that. Tensors travel by name and without a static type here:
//! [`HostTensor`] on the host, [`DynTensor`] on a device. The names are those of the safe function's arguments.
mod bench;
mod call;
mod device_call;
mod operator;
mod reference;
mod samples;
mod tensor;
mod tolerance;
mod traffic;

pub use bench::{BenchSizes, PUBLISHED_ROWS};
pub use call::{Call, CallSpec, HostCall};
pub use device_call::{DeviceCall, Inputs, Outputs};
pub use operator::{ArgSpec, Case, Choice, Choices, Operator, Role, Scalar, ScalarSpec};
pub use reference::{axpy, dot, philox, ranked, scale_groups};
pub use samples::Sample;
pub use tensor::{Described, DynTensor, HostTensor, HostTensorF64, POISON, TensorSpec};
pub use tolerance::Tolerance;
pub use traffic::Traffic;

/// Values by argument name, in order.
pub type Named<T> = Vec<(&'static str, T)>;
