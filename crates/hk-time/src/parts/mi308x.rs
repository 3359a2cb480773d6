//! AMD Instinct MI308X.

use hk_codeobj::Arch;

use super::{Part, fact};
use crate::constants::C;

pub(super) const PART: Part = Part {
    name: "mi308x",
    arch: Arch::Gfx942,
    xcds: 4,
    cus_per_xcd: 20,
    peak_mhz: fact(1420.0, "trade press; fitted"),
    hbm: fact(5300.0, "ROCm Compute Profiler's table of GPUs"),
    mall: fact(17200.0, "as MI300X"),
    mall_bytes: fact(268_435_456.0, "AMD data sheet: 256 MB of Infinity Cache"),
    l2_clk: fact(2048.0, "CDNA3 white paper: 16 channels of 128 B/clk"),
    l2_bytes: fact(4_194_304.0, "CDNA3 white paper: 4 MB, 16 way"),
    clock: Some(C::ClockMi308x),
    duty: None,
    validated: true,
};
