//! What instructions cost on each target: the one table behind counters, `hk facts` and whatever else prices them.

use hk_codeobj::Arch;
use serde::Serialize;

use crate::fault::Access;

/// Clocks of the units of a compute unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// Peak engine clock in MHz, of MI300X and MI350X.
    pub engine_mhz: u64,
    /// Clocks from one instruction of a wave to its next.
    pub issue_clocks: u64,
    /// Clocks of each unit of `s_sleep`.
    pub sleep_clocks: u64,
    /// SIMDs of a compute unit; each takes one vector or matrix instruction at a time.
    pub simds: u64,
    /// Clocks of a SIMD for the 64 lanes of a vector-ALU instruction.
    pub valu_clocks: u64,
    /// Clocks of a SIMD for an exponential, logarithm, reciprocal, root, sine or cosine.
    pub transcendental_clocks: u64,
    /// Clocks of a matrix unit for a pass.
    pub pass_clocks: u64,
    /// Passes of a 16x16 tile of f64.
    pub f64_16x16_passes: u64,
    /// Clocks of the address unit for the 64 lanes of a vector memory instruction.
    pub address_clocks: u64,
    /// Bytes that a compute unit exchanges with global memory in a clock.
    pub global_bytes_per_clock: u64,
    /// Reads of LDS of 8 and of 16 bytes a lane use 64 banks, else 32.
    wide_lds_reads: bool,
}

const GFX942: Costs = Costs {
    engine_mhz: 2100,
    issue_clocks: 4,
    sleep_clocks: 64,
    simds: 4,
    valu_clocks: 4,
    transcendental_clocks: 16,
    pass_clocks: 4,
    f64_16x16_passes: 8,
    address_clocks: 4,
    global_bytes_per_clock: 64,
    wide_lds_reads: false,
};

const GFX950: Costs = Costs {
    engine_mhz: 2200,
    transcendental_clocks: 8,
    f64_16x16_passes: 16,
    wide_lds_reads: true,
    ..GFX942
};

impl Costs {
    /// Those of an AMD target; of others those of gfx942.
    pub const fn of(arch: Arch) -> &'static Costs {
        if matches!(arch, Arch::Gfx950) { &GFX950 } else { &GFX942 }
    }

    /// The lanes that are served together, and over how many banks of a dword each. Two-address instructions
    /// (`ds_read2`) are two accesses; 96-bit writes and atomics go as writes of the next width.
    pub(crate) fn lds_phases(&self, access: Access, bytes: u32) -> (&'static [u64], usize) {
        let wide = self.wide_lds_reads;
        match (access, bytes) {
            (_, 0..=4) => (&HALVES, 32),
            (Access::Read, 5..=8) if wide => (&HALVES, 64),
            (_, 5..=8) => (&QUARTERS, 32),
            (Access::Read, 13..) if wide => (&WIDE_READ_GFX950, 64),
            (Access::Read, _) => (&WIDE_READ, 32),
            _ => (&EIGHTHS, 32),
        }
    }
}

/// Clocks that each unit of a compute unit is busy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Clocks {
    /// Matrix units.
    pub matrix: u64,
    /// Vector issue, matrix instructions included.
    pub vector: u64,
    /// Of these, exponentials and the like.
    pub transcendental: u64,
    /// Of these, packed f32 arithmetic.
    pub packed_f32: u64,
    /// LDS.
    pub lds: u64,
    /// Global memory: addresses or bytes, whichever takes longer.
    pub memory: u64,
}

impl Clocks {
    /// Those of the busiest unit: what the work takes at least.
    pub fn busiest(&self) -> u64 {
        self.matrix.max(self.vector).max(self.lds).max(self.memory)
    }

    /// Share of the matrix units' rate that is left where transcendental and packed f32 instructions of a SIMD never overlap with
    /// its matrix instructions.
    pub fn matrix_bound(&self) -> f64 {
        self.matrix as f64 / (self.matrix + self.transcendental + self.packed_f32).max(1) as f64
    }
}

/// Lanes as bits, from ranges with both ends.
const fn lanes(ranges: &[(u32, u32)]) -> u64 {
    let (mut mask, mut i) = (0, 0);
    while i < ranges.len() {
        let (first, last) = ranges[i];
        mask |= (!0 >> (63 - (last - first))) << first;
        i += 1;
    }
    mask
}

/// The same phases for the lower and the upper 32 lanes.
const fn twice<const N: usize, const TWICE: usize>(low: [u64; N]) -> [u64; TWICE] {
    let (mut phases, mut i) = ([0; TWICE], 0);
    while i < TWICE {
        phases[i] = low[i % N] << (32 * (i / N));
        i += 1;
    }
    phases
}

const HALVES: [u64; 2] = twice([lanes(&[(0, 31)])]);
const QUARTERS: [u64; 4] = twice([lanes(&[(0, 15)]), lanes(&[(16, 31)])]);
const EIGHTHS: [u64; 8] =
    twice([lanes(&[(0, 7)]), lanes(&[(8, 15)]), lanes(&[(16, 23)]), lanes(&[(24, 31)])]);
const WIDE_READ: [u64; 8] = twice([
    lanes(&[(0, 3), (20, 23)]),
    lanes(&[(4, 7), (16, 19)]),
    lanes(&[(8, 11), (28, 31)]),
    lanes(&[(12, 15), (24, 27)]),
]);
const WIDE_READ_GFX950: [u64; 4] =
    twice([lanes(&[(0, 3), (12, 15), (20, 27)]), lanes(&[(4, 11), (16, 19), (28, 31)])]);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counters;

    #[test]
    fn exponentials_run_at_a_quarter_and_at_half_of_the_rate() {
        let c = Counters {
            valu: 100,
            transcendental: 20,
            packed_f32: 8,
            mfma: 10,
            mfma_passes: 80,
            ..Counters::default()
        };
        for (arch, transcendental) in [(Arch::Gfx942, 80), (Arch::Gfx950, 40)] {
            let clocks = Costs::of(arch).clocks(&c);
            let want = Clocks {
                matrix: 80,
                vector: 90 + transcendental,
                transcendental,
                packed_f32: 8,
                lds: 0,
                memory: 0,
            };
            assert_eq!(clocks, want);
            assert_eq!(clocks.busiest(), 90 + transcendental);
            assert_eq!(clocks.matrix_bound(), 80.0 / (88 + transcendental) as f64);
        }
    }

    #[test]
    fn memory_costs_addresses_or_bytes() {
        for arch in Arch::AMD {
            let of = |bytes| Counters {
                vmem_loads: 7,
                vmem_stores: 3,
                global_read_bytes: bytes,
                ..Counters::default()
            };
            assert_eq!(Costs::of(arch).clocks(&of(64)).memory, 40, "four clocks an instruction");
            assert_eq!(Costs::of(arch).clocks(&of(10 * 1024)).memory, 160);
        }
    }
}
