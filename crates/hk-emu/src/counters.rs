//! What a launch executed.

use std::ops::AddAssign;

/// Counts of one launch; add them up over launches with `+=`. Instructions are counted per wave: one executed
/// instruction of a 64-lane wave counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Workgroups run.
    pub workgroups: u64,
    /// Waves run.
    pub waves: u64,
    /// All instructions.
    pub instructions: u64,
    /// Vector-ALU instructions, matrix instructions excepted.
    pub valu: u64,
    /// Scalar-ALU instructions.
    pub salu: u64,
    /// Scalar memory instructions.
    pub smem: u64,
    /// Vector memory loads, atomics that return a value included.
    pub vmem_loads: u64,
    /// Vector memory stores, atomics without a result included.
    pub vmem_stores: u64,
    /// LDS instructions.
    pub lds: u64,
    /// Matrix instructions.
    pub mfma: u64,
    /// Branches, taken or not.
    pub branches: u64,
    /// Waits, barriers, no-ops, hints and program ends.
    pub other: u64,
    /// Bytes read from global memory by vector loads and atomics, summed over active lanes.
    pub global_read_bytes: u64,
    /// Bytes written to global memory by vector stores and atomics, summed over active lanes.
    pub global_written_bytes: u64,
    /// Different bytes of global memory read by vector instructions; with footprint counting only.
    pub distinct_read_bytes: Option<u64>,
    /// Different bytes of global memory written by vector instructions; with footprint counting only.
    pub distinct_written_bytes: Option<u64>,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Counters) {
        let add = |a: Option<u64>, b: Option<u64>| a.map_or(b, |a| Some(a + b.unwrap_or(0)));
        self.workgroups += other.workgroups;
        self.waves += other.waves;
        self.instructions += other.instructions;
        self.valu += other.valu;
        self.salu += other.salu;
        self.smem += other.smem;
        self.vmem_loads += other.vmem_loads;
        self.vmem_stores += other.vmem_stores;
        self.lds += other.lds;
        self.mfma += other.mfma;
        self.branches += other.branches;
        self.other += other.other;
        self.global_read_bytes += other.global_read_bytes;
        self.global_written_bytes += other.global_written_bytes;
        self.distinct_read_bytes = add(self.distinct_read_bytes, other.distinct_read_bytes);
        self.distinct_written_bytes = add(self.distinct_written_bytes, other.distinct_written_bytes);
    }
}

/// The counter an instruction belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Valu,
    Salu,
    Smem,
    VmemLoad,
    VmemStore,
    Lds,
    Mfma,
    Branch,
    Other,
}

impl Counters {
    pub(crate) fn add_class(&mut self, class: Class, n: u64) {
        self.instructions += n;
        *match class {
            Class::Valu => &mut self.valu,
            Class::Salu => &mut self.salu,
            Class::Smem => &mut self.smem,
            Class::VmemLoad => &mut self.vmem_loads,
            Class::VmemStore => &mut self.vmem_stores,
            Class::Lds => &mut self.lds,
            Class::Mfma => &mut self.mfma,
            Class::Branch => &mut self.branches,
            Class::Other => &mut self.other,
        } += n;
    }
}
