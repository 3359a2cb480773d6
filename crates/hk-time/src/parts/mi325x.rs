//! AMD Instinct MI325X.

use hk_codeobj::Arch;

use super::{Part, fact};
use crate::constants::C;

pub(super) const PART: Part = Part {
    name: "mi325x",
    arch: Arch::Gfx942,
    xcds: 8,
    cus_per_xcd: 38,
    peak_mhz: fact(2100.0, "AMD data sheet"),
    hbm: fact(6000.0, "AMD data sheet"),
    mall: fact(17200.0, "CDNA3 white paper"),
    mall_bytes: fact(268_435_456.0, "AMD data sheet: 256 MB of Infinity Cache"),
    l2_clk: fact(2048.0, "CDNA3 white paper: 16 channels of 128 B/clk"),
    l2_bytes: fact(4_194_304.0, "CDNA3 white paper: 4 MB, 16 way"),
    clock: None,
    duty: Some(C::DutyMi325x),
    validated: true,
};
