//! What kernels need, for tables and for JSON.

use hk_codeobj::{Arch, Kernel};
use serde::{Deserialize, Serialize};

/// The resources of one kernel on one AMD target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Architectural vector registers.
    pub vgprs: u32,
    /// Accumulation registers.
    pub agprs: u32,
    /// Scalar registers.
    pub sgprs: u32,
    /// Static LDS of a workgroup, in bytes.
    pub lds_bytes: u32,
    /// Scratch memory of a lane, in bytes.
    pub scratch_bytes: u32,
    /// Vector registers spilled.
    pub vgpr_spills: u32,
    /// Scalar registers spilled.
    pub sgpr_spills: u32,
    /// Threads of the largest workgroup.
    pub max_threads: u32,
    /// Waves per SIMD at that size; see [`hk_codeobj::occupancy`].
    pub occupancy: u32,
    /// Size of the arguments that a caller passes, in bytes.
    pub arg_bytes: u32,
}

impl Resources {
    /// The resources of a kernel of a code object.
    pub fn of(kernel: &Kernel, arch: Arch) -> Resources {
        Resources {
            vgprs: kernel.vgprs,
            agprs: kernel.agprs,
            sgprs: kernel.sgprs,
            lds_bytes: kernel.lds_bytes,
            scratch_bytes: kernel.scratch_bytes,
            vgpr_spills: kernel.vgpr_spills,
            sgpr_spills: kernel.sgpr_spills,
            max_threads: kernel.max_threads,
            occupancy: kernel.occupancy(arch),
            arg_bytes: kernel.explicit_arg_bytes,
        }
    }

    /// What the kernel must not need, as texts: scratch memory, LDS beyond the part's. Spills that stay in registers (vector
    /// registers in accumulation registers, scalar ones in lanes) are reported in tables, not refused.
    pub fn violations(&self, kernel: &str, arch: Arch) -> Vec<String> {
        let mut texts = Vec::new();
        if self.scratch_bytes > 0 {
            texts.push(format!(
                "kernel `{kernel}` uses {} bytes of scratch memory per lane ({} vector and {} scalar registers spilled)",
                self.scratch_bytes, self.vgpr_spills, self.sgpr_spills
            ));
        }
        if self.lds_bytes > arch.lds_bytes() {
            texts.push(format!(
                "kernel `{kernel}` needs {} bytes of LDS, {arch} has {}",
                self.lds_bytes,
                arch.lds_bytes()
            ));
        }
        if self.occupancy == 0 {
            texts.push(format!(
                "kernel `{kernel}` cannot run: {} threads do not fit a compute unit",
                self.max_threads
            ));
        }
        texts
    }
}

/// A kernel of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelEntry {
    /// Its name.
    pub name: String,
    /// What it needs; unknown for PTX, whose registers are allocated when it is loaded.
    pub resources: Option<Resources>,
}

/// A compiled object: one source for one target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectEntry {
    /// The package.
    pub package: String,
    /// The source, relative to the package.
    pub source: String,
    /// The target.
    pub target: String,
    /// Size of the object, in bytes.
    pub object_bytes: usize,
    /// Its kernels.
    pub kernels: Vec<KernelEntry>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_that_move_to_other_registers_are_no_violation() {
        let moved = Resources {
            vgprs: 128,
            agprs: 32,
            sgprs: 104,
            lds_bytes: 65536,
            scratch_bytes: 0,
            vgpr_spills: 9,
            sgpr_spills: 2,
            max_threads: 256,
            occupancy: 2,
            arg_bytes: 64,
        };
        assert!(moved.violations("k", Arch::Gfx942).is_empty());
        let spilled = Resources { scratch_bytes: 36, ..moved };
        let text =
            "kernel `k` uses 36 bytes of scratch memory per lane (9 vector and 2 scalar registers spilled)";
        assert_eq!(spilled.violations("k", Arch::Gfx942), [text]);
    }
}
