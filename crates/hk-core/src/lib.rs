#![doc = include_str!("../README.md")]

mod buffer;
mod device;
#[cfg_attr(
    not(any(feature = "cuda", feature = "emu", feature = "hip")),
    expect(dead_code, reason = "no driver is built in")
)]
mod driver;
mod drivers;
mod dtype;
mod error;
mod event;
mod external;
mod global;
mod graph;
mod host;
mod index;
mod launch;
mod layout;
mod module;
mod once;
pub mod params;
pub mod plan;
pub mod quant;
#[cfg(feature = "registry")]
pub mod registry;
mod shared;
mod stream;
mod tensor;

pub use buffer::DeviceBuffer;
pub use device::{Device, DeviceInfo};
pub use dtype::{
    DType, E8M0, Element, Float, Fp4, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Fp8E5M2Fnuz, bf16,
    f16,
};
pub use error::{Error, Result};
pub use event::Event;
pub use global::GlobalLayout;
pub use graph::Graph;
pub use hk_codeobj::{Arch, Kernel as KernelInfo};
#[cfg(feature = "emu")]
pub use hk_emu::{Check, Checks, Counters, Details, Fault, LineCounters, Profile, Resources};
#[cfg(feature = "time")]
pub use hk_time::launch::Launch as ModelledLaunch;
pub use host::HostBuffer;
pub use index::IndexView;
#[cfg(feature = "emu")]
pub use launch::{HostAccess, HostWork};
pub use launch::{Launch, LaunchConfig, TensorMap};
pub use layout::{Layout, Rows};
pub use module::{CodeObjects, Kernel, LoadedKernel};
pub use params::KernelRef;
pub use shared::SharedHandle;
pub use stream::Stream;
pub use tensor::{Aliasing, NamedOperand, Operand, TensorView, TensorViewMut, check_aliases, check_overlap};

/// A launch with its modelled time, or its kernel and why it has none.
#[cfg(feature = "time")]
pub type Modelled = std::result::Result<ModelledLaunch, String>;

/// Includes what the build script of a family crate has compiled: a private module `kernels` with one
/// [`CodeObjects`] per HIP source, and a module per namespace of parameter structs. For `crates/hk-norm/hip/rmsnorm_bf16.hip`
/// these are `kernels::RMSNORM_BF16` and `kernels::rmsnorm::Params`, whose `Params::kernel("rmsnorm_bf16_64")` is a [`KernelRef`].
#[macro_export]
macro_rules! include_kernels {
    () => {
        #[allow(dead_code, reason = "generated: not every struct and entry point is named")]
        mod kernels {
            include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
        }
    };
}
