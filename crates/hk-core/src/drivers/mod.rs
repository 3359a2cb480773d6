//! The drivers, and device strings.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "emu")]
mod emu;
#[cfg(any(feature = "cuda", feature = "hip"))]
mod gpu;
#[cfg(feature = "hip")]
mod hip;

use crate::driver::Driver;
use crate::error::{Error, Result};

const OP: &str = "Device::open";
const WANT: &str = "emu:gfx942, emu:gfx950, hip:N or cuda:N";

/// Opens what a device string names.
pub(crate) fn open(spec: &str) -> Result<Box<dyn Driver>> {
    match spec.split_once(':') {
        Some(("emu", rest)) => open_emu(spec, rest),
        Some(("hip", ordinal)) => open_hip(spec, number(spec, ordinal)?),
        Some(("cuda", ordinal)) => open_cuda(spec, number(spec, ordinal)?),
        _ => Err(Error::argument(OP, "spec", format!("`{spec}`"), WANT)),
    }
}

/// Digits as they are printed, so that a device has one string.
fn number(spec: &str, digits: &str) -> Result<u32> {
    let canonical = digits.parse::<u32>().ok().filter(|n| n.to_string() == digits);
    canonical.ok_or_else(|| Error::argument(OP, "spec", format!("`{spec}`"), WANT))
}

/// The strings of the devices there may be: what `Device::available` tries.
pub(crate) fn specs() -> Vec<String> {
    let emulated = crate::Arch::AMD.iter().map(|a| format!("emu:{a}"));
    let gpus = (0..gpu_count().max(1)).map(|i| format!("hip:{i}"));
    // Not of the library's targets, so nothing is said where there are none.
    let others = (0..cuda_count()).map(|i| format!("cuda:{i}"));
    emulated.chain(gpus).chain(others).collect()
}

#[cfg(feature = "emu")]
fn open_emu(spec: &str, rest: &str) -> Result<Box<dyn Driver>> {
    Ok(Box::new(emu::Emu::open(spec, rest)?))
}

#[cfg(not(feature = "emu"))]
fn open_emu(spec: &str, _: &str) -> Result<Box<dyn Driver>> {
    Err(not_built(spec, "emu"))
}

#[cfg(feature = "hip")]
fn open_hip(spec: &str, ordinal: u32) -> Result<Box<dyn Driver>> {
    Ok(Box::new(hip::Hip::open(spec, ordinal)?))
}

#[cfg(not(feature = "hip"))]
fn open_hip(spec: &str, _: u32) -> Result<Box<dyn Driver>> {
    Err(not_built(spec, "hip"))
}

#[cfg(feature = "cuda")]
fn open_cuda(spec: &str, ordinal: u32) -> Result<Box<dyn Driver>> {
    Ok(Box::new(cuda::Cuda::open(spec, ordinal)?))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(spec: &str, _: u32) -> Result<Box<dyn Driver>> {
    Err(not_built(spec, "cuda"))
}

#[cfg(feature = "cuda")]
fn cuda_count() -> u32 {
    cuda::device_count().unwrap_or(0)
}

#[cfg(not(feature = "cuda"))]
fn cuda_count() -> u32 {
    0
}

#[cfg(feature = "hip")]
fn gpu_count() -> u32 {
    hip::device_count().unwrap_or(0)
}

#[cfg(not(feature = "hip"))]
fn gpu_count() -> u32 {
    0
}

#[cfg(not(all(feature = "emu", feature = "hip", feature = "cuda")))]
fn not_built(spec: &str, feature: &str) -> Error {
    let reason = format!("its driver is not built in; enable the feature `{feature}` of hk-core");
    Error::NoDevice { spec: spec.into(), reason }
}
