//! The parts: what differs between GPUs of one target. One file each.

mod mi300x;
mod mi308x;
mod mi325x;
mod mi350x;
mod mi355x;

use hk_codeobj::Arch;

use crate::constants::{C, Values};

/// A number with its source.
#[derive(Debug, Clone, Copy)]
pub struct Fact {
    /// The number, in the unit of its field.
    pub value: f64,
    /// Where it is published.
    pub source: &'static str,
}

const fn fact(value: f64, source: &'static str) -> Fact {
    Fact { value, source }
}

/// A GPU.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Lower case: `mi325x`.
    pub name: &'static str,
    /// Its target.
    pub arch: Arch,
    /// Accelerator dies, each with an L2.
    pub xcds: u32,
    /// Compute units of each.
    pub cus_per_xcd: u32,
    /// Highest engine clock, MHz.
    pub peak_mhz: Fact,
    /// Rate of HBM, GB/s.
    pub hbm: Fact,
    /// Rate of the memory-side cache, GB/s.
    pub mall: Fact,
    /// Size of the memory-side cache, bytes.
    pub mall_bytes: Fact,
    /// Rate of the L2 of an XCD, bytes per clock.
    pub l2_clk: Fact,
    /// Size of the L2 of an XCD, bytes.
    pub l2_bytes: Fact,
    /// The constant that replaces `peak_mhz`, if it is fitted.
    pub clock: Option<C>,
    /// Clock at full matrix duty, MHz; `None` if it holds the peak.
    pub duty: Option<C>,
    /// Launches of it were in the calibration: what is printed for others says "part not validated".
    pub validated: bool,
}

/// Every part.
pub const PARTS: [&Part; 5] = [&mi300x::PART, &mi308x::PART, &mi325x::PART, &mi350x::PART, &mi355x::PART];

impl Part {
    /// The part of that name, in any case. `MI355X*`, a GPU inferred from its 256 compute units, is the MI355X.
    pub fn named(name: &str) -> Option<&'static Part> {
        let name = name.trim_end_matches('*').to_ascii_lowercase();
        PARTS.into_iter().find(|part| part.name == name)
    }

    /// The part of a target by its name, as it is written.
    ///
    /// # Errors
    /// The names of the target's parts.
    pub fn of_target(name: &str, arch: Arch) -> Result<&'static Part, String> {
        PARTS.into_iter().find(|part| part.arch == arch && part.name == name).ok_or_else(|| Part::names(arch))
    }

    /// The names of a target's parts, with commas between.
    pub fn names(arch: Arch) -> String {
        PARTS.iter().filter(|part| part.arch == arch).map(|part| part.name).collect::<Vec<_>>().join(", ")
    }

    /// The part that a target stands for if none is named.
    pub fn of(arch: Arch) -> Option<&'static Part> {
        match arch {
            Arch::Gfx942 => Some(&mi325x::PART),
            Arch::Gfx950 => Some(&mi355x::PART),
            _ => None,
        }
    }

    /// Compute units.
    pub fn cus(&self) -> u32 {
        self.xcds * self.cus_per_xcd
    }

    /// Rate of HBM that streams reach, GB/s.
    pub fn hbm_reached(&self, values: &Values) -> f64 {
        let reach = if self.arch == Arch::Gfx950 { C::HbmGfx950 } else { C::HbmGfx942 };
        self.hbm.value * values.get(reach)
    }

    /// Microseconds of a fill or a copy on the device that moves so many bytes.
    pub fn stream_us(&self, bytes: f64, values: &Values) -> f64 {
        values.get(C::Launch) + bytes / (self.hbm_reached(values) * 1e3)
    }

    /// Engine clock without matrix duty, MHz.
    pub fn clock_mhz(&self, values: &Values) -> f64 {
        self.clock.map_or(self.peak_mhz.value, |c| values.get(c))
    }

    /// Engine clock at a matrix duty from 0 to 1, MHz: the power that matrix instructions take is that of full duty at
    /// the clock of [`Part::duty`].
    pub fn clock_at(&self, duty: f64, values: &Values) -> f64 {
        let peak = self.clock_mhz(values);
        match self.duty {
            Some(c) => peak.min(values.get(c) / duty.max(1e-9)),
            None => peak,
        }
    }
}
