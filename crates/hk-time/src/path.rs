//! Traces as the simulator replays them: the middle of long loops is left out and multiplied.

use std::ops::Range;

use hk_emu::{BlockTrace, Instruction, Traffic, Unit, WaveTrace};

/// Iterations of a loop that are replayed before the steady ones, steady ones that are timed, and the last ones.
const BEFORE: usize = 3;
const TIMED: usize = 4;
const AFTER: usize = 2;

/// The facts of an instruction that the simulator asks for.
#[derive(Debug, Clone)]
pub struct Step {
    /// What it is.
    pub facts: Instruction,
    /// Registers that it reads and that a matrix instruction does not also write: those that it accumulates into are
    /// forwarded.
    pub plain_reads: Vec<Range<u16>>,
    /// Registers that a matrix instruction accumulates into.
    pub accumulates: Vec<Range<u16>>,
}

impl Step {
    /// Of one instruction.
    pub fn new(facts: &Instruction) -> Step {
        let matrix = facts.unit == Unit::Matrix;
        let written =
            |r: &Range<u16>| matrix && facts.writes.iter().any(|w| w.start <= r.start && r.end <= w.end);
        let (accumulates, plain_reads) = facts.reads.iter().cloned().partition(written);
        Step { facts: facts.clone(), plain_reads, accumulates }
    }
}

/// Where a loop is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cut {
    /// Steps at which the timed iterations begin and end.
    pub timed: [usize; 2],
    /// How often the time between them passes in the part that is left out.
    pub times: f64,
}

/// A wave's path.
#[derive(Debug, Clone)]
pub struct WavePath {
    /// What it executes.
    pub trace: WaveTrace,
    /// What of it is left out.
    pub cut: Option<Cut>,
}

/// The iterations of a wave's longest loop: where each begins, and where the last one ends.
fn iterations(trace: &WaveTrace, instructions: &[Instruction]) -> Vec<usize> {
    let mut ends: std::collections::HashMap<u32, Vec<usize>> = std::collections::HashMap::new();
    for (i, pair) in trace.steps.windows(2).enumerate() {
        if pair[1] <= pair[0] && instructions[pair[0] as usize].unit == Unit::Branch {
            ends.entry(pair[1]).or_default().push(i + 1);
        }
    }
    let span = |ends: &Vec<usize>| ends.last().zip(ends.first()).map_or(0, |(last, first)| last - first);
    let longest = ends.into_iter().max_by_key(|(target, ends)| (span(ends), *target));
    longest.map_or(vec![], |(_, ends)| ends)
}

/// The paths of a workgroup. With `exact` nothing is left out.
pub fn paths(block: BlockTrace, instructions: &[Instruction], exact: bool) -> Vec<WavePath> {
    let loops: Vec<Vec<usize>> = block.waves.iter().map(|w| iterations(w, instructions)).collect();
    let count = loops.iter().map(|l| l.len()).min().unwrap_or(0);
    let keep = BEFORE + TIMED + AFTER;
    // Waves that meet at barriers leave out the same iterations; iterations that differ are not left out.
    let regular = |l: &Vec<usize>| {
        let middle = &l[BEFORE..l.len() - AFTER];
        let length = middle[1] - middle[0];
        l.len() == count && middle.windows(2).all(|w| w[1] - w[0] == length)
    };
    let cut = !exact && count > keep + 2 && loops.iter().all(regular);
    let waves = block.waves.into_iter().zip(loops);
    waves
        .map(|(trace, ends)| {
            if !cut {
                return WavePath { trace, cut: None };
            }
            let resume = ends[count - AFTER];
            let stop = ends[BEFORE + TIMED];
            let left_out = (count - AFTER) - (BEFORE + TIMED);
            let memory =
                |steps: &[u32]| steps.iter().filter(|i| instructions[**i as usize].unit.is_memory()).count();
            let (before, until) = (memory(&trace.steps[..stop]), memory(&trace.steps[..resume]));
            let mut kept = WaveTrace::default();
            kept.steps.extend_from_slice(&trace.steps[..stop]);
            kept.steps.extend_from_slice(&trace.steps[resume..]);
            for traffic in trace.traffic[..before].iter().chain(&trace.traffic[until..]) {
                let start = kept.lines.len() as u32;
                kept.lines.extend_from_slice(trace.lines_of(traffic));
                kept.traffic.push(Traffic { lines: start..kept.lines.len() as u32, ..traffic.clone() });
            }
            let times = left_out as f64 / TIMED as f64;
            WavePath { trace: kept, cut: Some(Cut { timed: [ends[BEFORE], stop], times }) }
        })
        .collect()
}
