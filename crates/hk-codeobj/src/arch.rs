//! Targets and their limits.

use std::fmt;
use std::str::FromStr;

/// A target that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// AMD CDNA3: Instinct MI300X, MI325X.
    Gfx942,
    /// AMD CDNA4: Instinct MI350X, MI355X.
    Gfx950,
    /// NVIDIA Hopper and later. Compiled to PTX, for measurements only.
    Sm90,
    /// NVIDIA Hopper alone, H100 and H200: with warpgroup instructions. Likewise.
    Sm90a,
}

impl Arch {
    /// Every target.
    pub const ALL: [Arch; 4] = [Arch::Gfx942, Arch::Gfx950, Arch::Sm90, Arch::Sm90a];
    /// The AMD targets.
    pub const AMD: [Arch; 2] = [Arch::Gfx942, Arch::Gfx950];

    /// The name that the compiler takes, such as `gfx942`.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Gfx942 => "gfx942",
            Arch::Gfx950 => "gfx950",
            Arch::Sm90 => "sm_90",
            Arch::Sm90a => "sm_90a",
        }
    }

    /// Whether this is an AMD target, compiled to an AMDGPU code object.
    pub const fn is_amd(self) -> bool {
        !matches!(self, Arch::Sm90 | Arch::Sm90a)
    }

    /// Lanes of a wave (of a warp on `sm_90`).
    pub const fn wave_size(self) -> u32 {
        if self.is_amd() { 64 } else { 32 }
    }

    /// The most LDS (shared memory on `sm_90`) that one workgroup can have, in bytes.
    pub const fn lds_bytes(self) -> u32 {
        match self {
            Arch::Gfx942 => 64 << 10,
            Arch::Gfx950 => 160 << 10,
            Arch::Sm90 | Arch::Sm90a => 227 << 10,
        }
    }

    /// The granule of LDS allocation, in bytes.
    pub const fn lds_granule(self) -> u32 {
        match self {
            Arch::Gfx942 => 512,
            Arch::Gfx950 => 1280,
            Arch::Sm90 | Arch::Sm90a => 128,
        }
    }

    /// The most threads of one workgroup.
    pub const fn max_workgroup_threads(self) -> u32 {
        1024
    }

    /// Compute units of a part: MI300X, MI350X, H100 SXM.
    pub const fn compute_units(self) -> u32 {
        match self {
            Arch::Gfx942 => 304,
            Arch::Gfx950 => 256,
            Arch::Sm90 | Arch::Sm90a => 132,
        }
    }

    /// SIMDs of a compute unit (sub-partitions of an SM on `sm_90`).
    pub const fn simds(self) -> u32 {
        4
    }

    /// Wave slots of one SIMD.
    pub const fn wave_slots(self) -> u32 {
        if self.is_amd() { 8 } else { 16 }
    }

    /// 32-bit vector registers per lane of one SIMD, shared by its resident waves.
    pub const fn simd_registers(self) -> u32 {
        512
    }

    /// The granule of vector register allocation.
    pub const fn register_granule(self) -> u32 {
        8
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A target name that is none of [`Arch::ALL`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown target `{0}`: expected gfx942, gfx950, sm_90 or sm_90a")]
pub struct UnknownArch(
    /// The name that came.
    pub String,
);

impl FromStr for Arch {
    type Err = UnknownArch;

    fn from_str(s: &str) -> Result<Arch, UnknownArch> {
        Arch::ALL.into_iter().find(|a| a.name() == s).ok_or_else(|| UnknownArch(s.into()))
    }
}

/// Waves per SIMD that can be resident when the grid is large: the least of what the registers, the LDS and the wave
/// slots of a compute unit allow, counted in whole workgroups and rounded up over its four SIMDs.
///
/// - registers: `min(8, 512 / round_up(total_vgprs, 8))` waves per SIMD, architectural and accumulation registers
///   together;
/// - LDS: `lds_bytes(arch) / round_up(lds_bytes, granule)` workgroups per compute unit;
/// - slots: 8 waves per SIMD, 32 per compute unit.
///
/// `lds_bytes` is what one workgroup has, static and dynamic; `threads` is the size of a workgroup. The result is 0
/// when not even one workgroup fits. On `sm_90` the same rule holds with that part's constants: 16 slots, and 1 KiB of
/// each workgroup's shared memory kept by the system.
pub fn occupancy(arch: Arch, total_vgprs: u32, lds_bytes: u32, threads: u32) -> u32 {
    let waves_per_group = threads.max(1).div_ceil(arch.wave_size());
    (workgroups_per_cu(arch, total_vgprs, lds_bytes, threads) * waves_per_group).div_ceil(arch.simds())
}

/// Whole workgroups that can be resident on a compute unit: what [`occupancy`] is made of.
pub fn workgroups_per_cu(arch: Arch, total_vgprs: u32, lds_bytes: u32, threads: u32) -> u32 {
    let registers = total_vgprs.max(1).next_multiple_of(arch.register_granule());
    let by_registers = arch.wave_slots().min(arch.simd_registers() / registers);
    let waves_per_group = threads.max(1).div_ceil(arch.wave_size());
    let reserved = if arch.is_amd() { 0 } else { 1024 };
    let lds = u64::from(lds_bytes).next_multiple_of(arch.lds_granule().into()) + reserved;
    let groups_by_lds = match (u64::from(arch.lds_bytes()) + reserved).checked_div(lds) {
        Some(groups) => groups.min(u64::from(u32::MAX)) as u32,
        None => u32::MAX,
    };
    (by_registers * arch.simds() / waves_per_group).min(groups_by_lds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for arch in Arch::ALL {
            assert_eq!(arch.to_string().parse(), Ok(arch));
        }
        let error = "gfx90a".parse::<Arch>().unwrap_err();
        assert_eq!(error.to_string(), "unknown target `gfx90a`: expected gfx942, gfx950, sm_90 or sm_90a");
    }

    #[test]
    fn registers_limit_occupancy() {
        // Borders of 512 / round8(n).
        let want = [(1, 8), (64, 8), (65, 7), (72, 7), (73, 6), (80, 6), (81, 5), (96, 5), (97, 4), (128, 4)];
        for (vgprs, waves) in
            want.into_iter().chain([(129, 3), (168, 3), (169, 2), (256, 2), (257, 1), (512, 1)])
        {
            assert_eq!(occupancy(Arch::Gfx942, vgprs, 0, 256), waves, "{vgprs} VGPRs");
        }
        assert_eq!(occupancy(Arch::Gfx942, 513, 0, 256), 0);
    }

    #[test]
    fn lds_limits_occupancy_by_granule() {
        assert_eq!(occupancy(Arch::Gfx942, 32, 32 << 10, 256), 2);
        assert_eq!(occupancy(Arch::Gfx942, 32, (32 << 10) + 1, 256), 1);
        assert_eq!(occupancy(Arch::Gfx942, 32, (64 << 10) + 1, 256), 0);
        // 160 KiB is 128 granules of 1280 bytes.
        assert_eq!(occupancy(Arch::Gfx950, 32, 16 * 1280, 256), 8);
        assert_eq!(occupancy(Arch::Gfx950, 32, 16 * 1280 + 1, 256), 7);
        assert_eq!(occupancy(Arch::Gfx950, 32, 160 << 10, 1024), 4);
    }

    #[test]
    fn whole_workgroups_count() {
        // 5 waves per SIMD by registers are 20 per compute unit: one workgroup of 16 waves fits, two do not.
        assert_eq!(occupancy(Arch::Gfx942, 96, 0, 1024), 4);
        assert_eq!(occupancy(Arch::Gfx942, 64, 0, 1024), 8);
        assert_eq!(occupancy(Arch::Gfx942, 129, 0, 1024), 0);
        assert_eq!(occupancy(Arch::Gfx942, 32, 0, 64), 8);
        // One wave of 64 lanes with half of the LDS: two waves over four SIMDs.
        assert_eq!(occupancy(Arch::Gfx942, 32, 32 << 10, 64), 1);
        assert_eq!(occupancy(Arch::Gfx942, u32::MAX - 7, u32::MAX, u32::MAX), 0);
    }
}
