//! The tests of hk-core: one program.

#[cfg_attr(not(any(feature = "emu", feature = "hip")), expect(dead_code, reason = "no device is built in"))]
mod common;

mod dtypes;
mod graphs;
mod headers;
mod hip_driver;
mod kernels;
mod layout;
mod math;
mod peers;
mod quant;
mod registry;
mod streams;
mod tile;
mod views;
