//! Quantized attention beside that of bf16: what a prompt keeps busy, its quantization included.

use super::{both, profiles, ratio};
use crate::out::Table;
use crate::{Failure, Result};
use hk_core::registry::{Call, CallSpec, Scalar, TensorSpec};
use hk_core::{Arch, DType, Profile};
use hk_emu::Costs;

const TOKENS: usize = 8192;
const COLUMNS: usize = 128;
/// Query heads of the key head: as many heads, and the group of Llama-3 8B.
const GROUPS: [usize; 2] = [1, 4];

pub const TITLE: &str = "## A prompt of 8192 tokens, quantized\n\n\
    Query heads of one key head, d = 128, without a mask, tall tiles: `mha` in bf16, and `sage_attention`, whose first three launches quantize.\n\
    Clocks of a compute unit in thousands, by unit, of all blocks; `memory`: those in which it brings the distinct bytes of a launch, at a\n\
    compute unit's share of 8.3 bytes a clock (gfx942) or 13 (gfx950). `busiest`: the sum over launches of the unit that has most to do.\n\
    `bound`: the same where matrix, transcendental and packed f32 clocks, which never overlap within a SIMD of gfx942, are one unit.\n\
    `of bf16`: those of `mha` over it, `busiest` and `bound`.";

const HEADER: [&str; 12] = [
    ">query heads",
    "launches",
    ">VGPRs",
    ">scratch",
    ">matrix",
    ">vector",
    ">exp",
    ">LDS",
    ">memory",
    ">busiest",
    ">bound",
    ">of bf16",
];

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    for heads in GROUPS {
        let [a, b] = Arch::AMD.map(|arch| rows(arch, heads));
        for (a, b) in a?.into_iter().zip(b?) {
            let (label, a, b) = (a.0, Some(a.1), Some(b.1));
            let first = [heads.to_string(), label.to_string()];
            table.row(first.into_iter().chain((0..HEADER.len() - 2).map(|i| both(&a, &b, i))));
        }
    }
    Ok(table)
}

/// The rows of a target: launches, and the cells.
fn rows(arch: Arch, heads: usize) -> Result<[(&'static str, [String; HEADER.len() - 2]); 4]> {
    let (exact, sage) = (counted(arch, "mha", heads)?, counted(arch, "sage_attention", heads)?);
    let (attention, quantization) =
        sage.split_last().ok_or_else(|| Failure::new("sage_attention: no launch"))?;
    let of = |launches: &[Profile]| Sum::of(arch, launches);
    let exact = of(&exact);
    Ok([
        ("`mha`, bf16", exact.cells(&exact)),
        ("quantization", of(quantization).cells(&exact)),
        ("attention", of(std::slice::from_ref(attention)).cells(&exact)),
        ("`sage_attention`", of(&sage).cells(&exact)),
    ])
}

fn counted(arch: Arch, name: &'static str, heads: usize) -> Result<Vec<Profile>> {
    let mut call: CallSpec = Call::new(crate::operator(name)?);
    for (name, heads) in [("q", heads), ("k", 1), ("v", 1)] {
        call.set(name, TensorSpec::new(DType::Bf16, [1, TOKENS, heads, COLUMNS]))?;
    }
    call.set_scalar("tile", Scalar::Choice("tall"))?;
    let served = profiles(&call.sample(0)?, "a prompt", &format!("emu:{arch}?details=true"))?;
    served.ok_or_else(|| Failure::new(format!("{name}: nothing ran on {arch}")))
}

/// Clocks of launches one after the other.
#[derive(Default)]
struct Sum {
    vgprs: Vec<String>,
    scratch: u32,
    units: [u64; 5],
    busiest: u64,
    bound: u64,
}

impl Sum {
    fn of(arch: Arch, launches: &[Profile]) -> Self {
        let mut sum = Self::default();
        for launch in launches {
            let c = Costs::of(arch).clocks(&launch.counters);
            let d = launch.counters.details.unwrap_or_default();
            let per_clock = if arch == Arch::Gfx942 { 8.3 } else { 13.0 };
            let memory = ((d.distinct_read_bytes + d.distinct_written_bytes) as f64 / per_clock) as u64;
            let busiest = c.busiest().max(memory);
            sum.vgprs.push((launch.resources.vgprs + launch.resources.agprs).to_string());
            sum.scratch += launch.resources.scratch_bytes;
            let units = [c.matrix, c.vector, c.transcendental, c.lds, memory];
            sum.units.iter_mut().zip(units).for_each(|(sum, clocks)| *sum += clocks);
            sum.busiest += busiest;
            sum.bound += busiest.max(c.matrix + c.transcendental + c.packed_f32);
        }
        sum
    }

    fn cells(&self, exact: &Self) -> [String; HEADER.len() - 2] {
        let thousands = |clocks: u64| ratio(clocks, 1000, 0);
        let [matrix, vector, exp, lds, memory] = self.units.map(thousands);
        let of_exact =
            format!("{}, {}", ratio(exact.busiest, self.busiest, 2), ratio(exact.bound, self.bound, 2));
        [
            self.vgprs.join(", "),
            self.scratch.to_string(),
            matrix,
            vector,
            exp,
            lds,
            memory,
            thousands(self.busiest),
            thousands(self.bound),
            of_exact,
        ]
    }
}
