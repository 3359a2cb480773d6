//! What a launch executed: in total, by instruction, by source line.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use hk_codeobj::Arch;
use serde::Serialize;

use crate::costs::{Clocks, Costs};
use crate::isa::{Encoding, Inst, Op, Operand};

/// Defines a struct of counts that add up.
macro_rules! counts {
    (
        $(#[$doc:meta])* pub struct $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }
        $(optional $(#[$part_doc:meta])* $part:ident: $Part:ty)?
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
            $($(#[$part_doc])* pub $part: Option<$Part>,)?
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                self.add_times(&other, 1);
                $(match (&mut self.$part, other.$part) {
                    (Some(sum), Some(other)) => *sum += other,
                    (sum, other) => *sum = sum.or(other),
                })?
            }
        }

        impl $name {
            /// Adds the plain counts of `other`, `n` times.
            pub(crate) fn add_times(&mut self, other: &$name, n: u64) {
                $(self.$field += n * other.$field;)*
            }
        }
    };
}

counts! {
    /// Counts of one launch; add them up over launches with `+=`. Instructions are counted per wave: one executed
    /// instruction of a 64-lane wave counts once.
    pub struct Counters {
        /// Workgroups run.
        workgroups,
        /// Waves run.
        waves,
        /// All instructions.
        instructions,
        /// Vector-ALU instructions, matrix instructions excepted.
        valu,
        /// Scalar-ALU instructions.
        salu,
        /// Scalar memory instructions.
        smem,
        /// Vector memory loads, atomics that return a value included.
        vmem_loads,
        /// Vector memory stores, atomics without a result included.
        vmem_stores,
        /// LDS instructions.
        lds,
        /// Matrix instructions.
        mfma,
        /// Branches, taken or not.
        branches,
        /// Waits, barriers, no-ops, hints and program ends.
        other,
        /// Of the vector-ALU instructions, those of the slower unit for exponentials, logarithms, reciprocals, roots,
        /// sine and cosine.
        transcendental,
        /// Of the vector-ALU instructions, those of two f32 a lane.
        packed_f32,
        /// Passes of matrix instructions, of four clocks each.
        mfma_passes,
        /// Operations of matrix instructions: two for each product and its sum, whatever the element type. Of sparse
        /// ones, those that are done.
        matrix_flops,
        /// Arrivals of waves at barriers.
        barriers,
        /// Waits for outstanding memory instructions (`s_waitcnt`).
        waits,
        /// Bytes that scalar loads ask for.
        smem_bytes,
        /// Bytes read from global memory by vector loads and atomics, summed over active lanes.
        global_read_bytes,
        /// Bytes written to global memory by vector stores and atomics, summed over active lanes.
        global_written_bytes,
    }
    optional
    /// What depends on the addresses of each access; counted on request only.
    details: Details
}

counts! {
    /// Counts that depend on the addresses of each access of vector memory instructions and LDS.
    ///
    /// A line is 128 aligned bytes. LDS clocks follow the phases in which a wave's lanes are served: a phase takes as
    /// many clocks as the fullest bank has different dwords to give or take, and none without an active lane.
    pub struct Details {
        /// Different lines that the active lanes of a load read, summed over loads: what coalescing leaves.
        global_read_lines,
        /// Different lines that the active lanes of a store write, summed over stores.
        global_written_lines,
        /// Atomic operations on global memory, one for each active lane: they do not coalesce.
        global_atomics,
        /// Different bytes of global memory that the launch reads. Of whole launches only.
        distinct_read_bytes,
        /// Different bytes of global memory that the launch writes. Of whole launches only.
        distinct_written_bytes,
        /// Different lines that the launch reads. Of whole launches only.
        distinct_read_lines,
        /// Different lines that the launch writes. Of whole launches only.
        distinct_written_lines,
        /// The most lines that loads of a wave have outstanding at a time, summed over waves: those that it has asked for
        /// and that no `s_waitcnt` has waited for. Of whole launches only.
        lines_in_flight,
        /// Waits between matrix instructions of a wave that leave none of its loads in flight: memory is idle until
        /// it asks again.
        drains,
        /// Bytes of global memory that lanes read or write 16 at a time.
        wide_bytes,
        /// Bytes that active lanes read from the memory of other devices, atomics included: over links.
        peer_read_bytes,
        /// Bytes that active lanes write to the memory of other devices, atomics included.
        peer_written_bytes,
        /// Bytes of both that lanes access 16 at a time.
        peer_wide_bytes,
        /// Bytes read from LDS by active lanes, atomics included.
        lds_read_bytes,
        /// Bytes written to LDS by active lanes, atomics and loads to LDS included.
        lds_written_bytes,
        /// Atomic operations on LDS, one for each active lane.
        lds_atomics,
        /// Clocks of LDS accesses.
        lds_clocks,
        /// Of these, clocks beyond the first of each phase: those that bank conflicts cost.
        lds_conflict_clocks,
        /// Bytes of private memory that active lanes read or write.
        scratch_bytes,
    }
}

/// What a kernel has allocated in a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// Threads of a workgroup.
    pub threads: u32,
    /// Vector registers.
    pub vgprs: u32,
    /// Accumulation registers.
    pub agprs: u32,
    /// Scalar registers.
    pub sgprs: u32,
    /// LDS of a workgroup in bytes.
    pub lds_bytes: u32,
    /// Private memory of a lane in bytes.
    pub scratch_bytes: u32,
    /// Waves that a SIMD can hold at a time.
    pub waves_per_simd: u32,
    /// Workgroups that a compute unit can hold at a time.
    pub blocks_per_cu: u32,
}

/// What launches of one kernel executed, by source line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Profile {
    /// The kernel.
    pub kernel: String,
    /// Launches.
    pub launches: u64,
    /// Of the last launch.
    pub resources: Resources,
    /// In total.
    pub counters: Counters,
    /// By line, ordered by file and number. They add up to `counters`, but for workgroups, waves and distinct bytes and
    /// lines, which belong to no line.
    pub lines: Vec<LineCounters>,
    /// By workgroup in the order of dispatch, launch by launch; empty unless the machine counts them. They add up to `counters`, but
    /// for distinct bytes and lines: those of a workgroup are what it touches, whatever others do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Counters>,
}

/// What the instructions of one source line executed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LineCounters {
    /// The file, as the code object's line table names it; `None` for instructions without a line.
    pub file: Option<String>,
    /// The line, from 1; 0 without a file.
    pub line: u32,
    /// The counts.
    pub counters: Counters,
}

impl AddAssign for Profile {
    /// Adds launches of the same kernel.
    fn add_assign(&mut self, other: Profile) {
        self.launches += other.launches;
        self.resources = other.resources;
        self.counters += other.counters;
        let mut lines = Lines::default();
        for of in [std::mem::take(&mut self.lines), other.lines] {
            of.into_iter().for_each(|l| lines.add((l.file, l.line), l.counters));
        }
        self.lines = lines.list();
        self.blocks.extend(other.blocks);
    }
}

/// Counters by file and line.
#[derive(Default)]
pub(crate) struct Lines(BTreeMap<(Option<String>, u32), Counters>);

impl Lines {
    pub fn add(&mut self, at: (Option<String>, u32), counters: Counters) {
        *self.0.entry(at).or_default() += counters;
    }

    pub fn list(self) -> Vec<LineCounters> {
        let lines = self.0.into_iter();
        lines.map(|((file, line), counters)| LineCounters { file, line, counters }).collect()
    }
}

impl Counters {
    /// What one execution of an instruction counts, whatever its operands hold.
    pub(crate) fn of(inst: &Inst, arch: Arch) -> Counters {
        let mut c = Counters { instructions: 1, ..Counters::default() };
        let name = inst.op.info().name;
        match inst.encoding {
            Encoding::Sopp if name.contains("BRANCH") => c.branches = 1,
            Encoding::Sopp => {
                c.other = 1;
                c.barriers = u64::from(inst.op == Op::S_BARRIER);
                c.waits = u64::from(inst.op == Op::S_WAITCNT);
            }
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopk | Encoding::Sopc => match inst.op {
                Op::S_SETPC_B64 | Op::S_SWAPPC_B64 | Op::S_CALL_B64 => c.branches = 1,
                _ => c.salu = 1,
            },
            Encoding::Smem => {
                c.smem = 1;
                c.smem_bytes = if name.contains("_LOAD") { 4 * u64::from(inst.op.info().dst) } else { 0 };
            }
            Encoding::Ds => c.lds = 1,
            Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p => {
                match Matrix::of(inst) {
                    Some(matrix) => {
                        c.mfma = 1;
                        c.mfma_passes = matrix.passes(arch);
                        c.matrix_flops = matrix.flops();
                    }
                    None => {
                        c.valu = 1;
                        c.transcendental = is_transcendental(name).into();
                        c.packed_f32 = (name.starts_with("V_PK_") && name.ends_with("_F32")).into();
                    }
                }
            }
            Encoding::Flat | Encoding::Global | Encoding::Scratch | Encoding::Mubuf | Encoding::Mtbuf => {
                if matches!(inst.op, Op::BUFFER_WBL2 | Op::BUFFER_INV) {
                    c.other = 1;
                } else if name.contains("_LOAD") || inst.dst != Operand::None {
                    c.vmem_loads = 1;
                } else {
                    c.vmem_stores = 1;
                }
            }
        }
        c
    }

    /// Clocks of a wave from the instruction, of which these are the counts, to its next: as if the wave had its SIMD to itself
    /// and memory answered at once.
    pub(crate) fn wave_clocks(&self, inst: &Inst, arch: Arch) -> u64 {
        let costs = Costs::of(arch);
        let units = inst.imm as u64 & 0x7F;
        match inst.op {
            Op::S_SLEEP => costs.issue_clocks + costs.sleep_clocks * units,
            Op::S_NOP => costs.issue_clocks * (1 + (units & 0xF)),
            _ => {
                let vector = self.valu * costs.valu_clocks + self.mfma_passes * costs.pass_clocks;
                vector.max(self.transcendental * costs.transcendental_clocks).max(costs.issue_clocks)
            }
        }
    }
}

fn is_transcendental(name: &str) -> bool {
    ["V_EXP_", "V_LOG_", "V_RCP_", "V_RSQ_", "V_SQRT_", "V_SIN_", "V_COS_"]
        .iter()
        .any(|p| name.starts_with(p))
}

/// The size of a matrix instruction.
struct Matrix {
    /// Rows and columns of a block of the result.
    dim: u64,
    k: u64,
    blocks: u64,
    /// Half of A is zeros that are not multiplied.
    sparse: bool,
    input: Input,
}

/// What the rate of a matrix instruction depends on.
#[derive(PartialEq)]
enum Input {
    F32,
    F64,
    /// f8f6f4 with an 8-bit operand.
    Byte,
    Other,
}

impl Matrix {
    /// From a name such as `V_MFMA_F32_32X32X4_2B_F16`.
    fn of(inst: &Inst) -> Option<Matrix> {
        let name = inst.op.info().name;
        if !inst.op.is_mfma() {
            return None;
        }
        let mut parts = name.split('_').skip(3);
        let mut size = parts.next()?.split('X').map_while(|n| n.parse().ok());
        let (dim, _, k) = (size.next()?, size.next()?, size.next()?);
        let blocks = parts.next().and_then(|part| part.strip_suffix('B')?.parse().ok()).unwrap_or(1);
        let byte = inst.cbsz < 2 || inst.blgp < 2;
        let input = match name.rsplit('_').next()? {
            "F32" => Input::F32,
            "F64" => Input::F64,
            "F8F6F4" if byte => Input::Byte,
            _ => Input::Other,
        };
        Some(Matrix { dim, k, blocks, sparse: name.starts_with("V_SMFMAC"), input })
    }

    fn flops(&self) -> u64 {
        2 * self.dim * self.dim * self.k * self.blocks / if self.sparse { 2 } else { 1 }
    }

    /// A tile has its passes at the full rate of its type; slower types and the forms of several blocks take more.
    fn passes(&self, arch: Arch) -> u64 {
        let full = match self.dim {
            4 => 2,
            16 => 4,
            _ => 8,
        };
        match self.input {
            Input::F64 if self.dim == 16 => Costs::of(arch).f64_16x16_passes,
            Input::F64 | Input::Byte => 2 * full,
            Input::F32 if self.dim > 4 => 2 * full,
            _ if self.dim > 4 && self.blocks > 1 => 2 * full,
            _ => full,
        }
    }
}

impl Costs {
    /// Clocks of a compute unit, whose SIMDs share the instructions evenly, by unit. LDS has some only of counters with details.
    pub fn clocks(&self, c: &Counters) -> Clocks {
        let of_simds = |instructions: u64, clocks: u64| instructions * clocks / self.simds;
        let transcendental = of_simds(c.transcendental, self.transcendental_clocks);
        let bytes = c.global_read_bytes + c.global_written_bytes;
        Clocks {
            matrix: of_simds(c.mfma_passes, self.pass_clocks),
            vector: of_simds(c.valu - c.transcendental + c.mfma, self.valu_clocks) + transcendental,
            transcendental,
            packed_f32: of_simds(c.packed_f32, self.valu_clocks),
            lds: c.details.map_or(0, |d| d.lds_clocks),
            memory: ((c.vmem_loads + c.vmem_stores) * self.address_clocks)
                .max(bytes / self.global_bytes_per_clock),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Op::*;

    fn passes(op: Op, arch: Arch, formats: [u8; 2]) -> (u64, u64) {
        let mut inst = Inst::new(op, Encoding::Vop3p, 8);
        [inst.cbsz, inst.blgp] = formats;
        let c = Counters::of(&inst, arch);
        assert_eq!(c.mfma, 1);
        (c.mfma_passes, c.matrix_flops)
    }

    #[test]
    fn passes_are_those_of_the_tables() {
        let [old, new] = [Arch::Gfx942, Arch::Gfx950];
        let table: &[(Op, Option<u64>, Option<u64>)] = &[
            (V_MFMA_F32_4X4X4_16B_F16, Some(2), Some(2)),
            (V_MFMA_F32_4X4X4_16B_BF16, Some(2), Some(2)),
            (V_MFMA_F32_4X4X1_16B_F32, Some(2), Some(2)),
            (V_MFMA_I32_4X4X4_16B_I8, Some(2), Some(2)),
            (V_MFMA_F64_4X4X4_4B_F64, Some(4), Some(4)),
            (V_MFMA_F32_16X16X16_BF16, Some(4), Some(4)),
            (V_MFMA_F32_16X16X32_FP8_BF8, Some(4), Some(4)),
            (V_MFMA_I32_16X16X32_I8, Some(4), Some(4)),
            (V_MFMA_F32_16X16X8_XF32, Some(4), None),
            (V_MFMA_F32_16X16X32_F16, None, Some(4)),
            (V_MFMA_I32_16X16X64_I8, None, Some(4)),
            (V_MFMA_F32_32X32X8_F16, Some(8), Some(8)),
            (V_MFMA_F32_32X32X16_FP8_FP8, Some(8), Some(8)),
            (V_MFMA_F32_32X32X4_XF32, Some(8), None),
            (V_MFMA_F32_32X32X16_BF16, None, Some(8)),
            (V_MFMA_I32_32X32X32_I8, None, Some(8)),
            (V_MFMA_F32_16X16X4_F32, Some(8), Some(8)),
            (V_MFMA_F32_16X16X4_4B_F16, Some(8), Some(8)),
            (V_MFMA_F64_16X16X4_F64, Some(8), Some(16)),
            (V_MFMA_F32_32X32X2_F32, Some(16), Some(16)),
            (V_MFMA_F32_32X32X1_2B_F32, Some(16), Some(16)),
            (V_MFMA_F32_32X32X4_2B_F16, Some(16), Some(16)),
            (V_SMFMAC_F32_16X16X32_BF16, Some(4), Some(4)),
            (V_SMFMAC_I32_32X32X32_I8, Some(8), Some(8)),
        ];
        for &(op, gfx942, gfx950) in table {
            for (arch, want) in [(old, gfx942), (new, gfx950)] {
                assert_eq!(op.info().exists_on(arch), want.is_some(), "{op:?} on {arch}");
                if let Some(want) = want {
                    assert_eq!(passes(op, arch, [0, 0]).0, want, "{op:?} on {arch}");
                }
            }
        }
        // Formats: 0 and 1 have 8 bits, 2 and 3 six, 4 four.
        for a in 0..5 {
            for b in 0..5 {
                let double = if a < 2 || b < 2 { 2 } else { 1 };
                assert_eq!(passes(V_MFMA_F32_16X16X128_F8F6F4, new, [a, b]).0, 4 * double);
                assert_eq!(passes(V_MFMA_F32_32X32X64_F8F6F4, new, [a, b]).0, 8 * double);
            }
        }
    }

    /// The best instruction of each type reaches the published peak of its part, and no other exceeds it.
    #[test]
    fn peaks_are_reached() {
        let peaks: [(Arch, &[(&str, u64)]); 2] = [
            (
                Arch::Gfx942,
                &[("_BF16", 2048), ("_F16", 2048), ("8", 4096), ("XF32", 1024), ("_F32", 256), ("F64", 256)],
            ),
            (
                Arch::Gfx950,
                &[("_BF16", 4096), ("_F16", 4096), ("_I8", 8192), ("F4", 16384), ("_F32", 256), ("F64", 128)],
            ),
        ];
        for (arch, types) in peaks {
            for (end, peak) in types {
                let dense = crate::isa::ALL_OPS.iter().filter(|op| {
                    let name = op.info().name;
                    name.starts_with("V_MFMA") && name.ends_with(end) && op.info().exists_on(arch)
                });
                let best = dense.map(|op| {
                    let (passes, flops) = passes(*op, arch, [4, 4]);
                    // Four SIMDs, four clocks a pass.
                    flops / passes
                });
                assert_eq!(best.max(), Some(*peak), "{end} on {arch}");
            }
        }
    }
}
