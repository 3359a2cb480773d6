//! One launch with its modelled time: what bounds it, what each source line waits for, and its waves over time.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use hk_emu::{Dispatch, Machine, Module};
use serde_json::{Value, json};

use crate::constants::Values;
use crate::cu::{Record, STALLS, Spent, UNITS};
use crate::model::{Buffer, Options, Prediction, TimeError, Traced, trace};
use crate::parts::Part;

/// A launch that has been modelled.
pub struct Launch {
    /// The kernel.
    pub kernel: String,
    /// Workgroups.
    pub grid: [u32; 3],
    /// Threads of each.
    pub block: [u32; 3],
    /// Its time.
    pub prediction: Prediction,
    module: Arc<Module>,
    traced: Traced,
    /// Made when they are first asked for: a replay of their own.
    records: OnceLock<Vec<(f64, Record)>>,
}

/// What a source line, or an instruction without one, costs the waves.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// `file:line`; the address and the text of an instruction where the code object has no line table.
    pub name: String,
    /// Clocks of all waves that were replayed: issuing, then by [`STALLS`].
    pub spent: Spent,
}

impl Launch {
    /// Models a launch on `part`. Memory is left as it was, and nothing but the sampled workgroups runs.
    ///
    /// # Errors
    /// [`TimeError`].
    pub fn new(
        part: &'static Part,
        machine: &Machine,
        module: &Arc<Module>,
        kernel: &str,
        dispatch: &Dispatch<'_>,
        options: Options,
    ) -> Result<Launch, TimeError> {
        let buffer = |(base, bytes)| Buffer { base, bytes };
        let buffers: Vec<Buffer> = machine.allocations().into_iter().map(buffer).collect();
        let trace = |uneven| {
            let options = Options { uneven, ..options };
            trace(part, machine, module, kernel, dispatch, &buffers, options)
        };
        // Workgroups that wait for others of their tile do not run without them.
        let traced = match trace(true) {
            Err(TimeError::Fault(_)) if dispatch.grid[2] > 1 => trace(false)?,
            traced => traced?,
        };
        let prediction = traced.time(Values::fitted());
        let &Dispatch { grid, block, .. } = dispatch;
        let (kernel, module, records) = (kernel.to_owned(), module.clone(), OnceLock::new());
        Ok(Launch { kernel, grid, block, prediction, module, traced, records })
    }

    /// The part.
    pub fn part(&self) -> &'static Part {
        self.traced.part()
    }

    /// Workgroups that were replayed.
    pub fn sampled(&self) -> usize {
        self.traced.sampled
    }

    fn records(&self) -> &[(f64, Record)] {
        self.records.get_or_init(|| self.traced.records(Values::fitted(), &self.prediction))
    }

    /// Wave clocks by source line, the most expensive first.
    pub fn lines(&self) -> Vec<Line> {
        let mut all: Vec<Spent> = vec![];
        for (times, record) in self.records() {
            all.resize(all.len().max(record.spent.len()), Spent::default());
            for (sum, spent) in all.iter_mut().zip(&record.spent) {
                sum.iter_mut().zip(spent).for_each(|(sum, clocks)| *sum += clocks * times);
            }
        }
        let program = self.traced.program();
        let executed: Vec<usize> = (0..all.len()).filter(|i| all[*i].iter().sum::<f64>() > 0.0).collect();
        let addresses: Vec<u64> = executed.iter().map(|i| program.instructions[*i].address).collect();
        let mut lines: BTreeMap<String, Spent> = BTreeMap::new();
        for (i, source) in executed.into_iter().zip(self.module.source_lines(&addresses)) {
            let name = match source {
                Some((file, line)) => format!("{file}:{line}"),
                None => format!("{:#x} {}", program.instructions[i].address, program.text(i as u32)),
            };
            let sum = lines.entry(name).or_default();
            sum.iter_mut().zip(all[i]).for_each(|(sum, clocks)| *sum += clocks);
        }
        let mut lines: Vec<Line> = lines.into_iter().map(|(name, spent)| Line { name, spent }).collect();
        let total = |line: &Line| line.spent.iter().sum::<f64>();
        lines.sort_by(|a, b| total(b).total_cmp(&total(a)));
        lines
    }

    /// Counters by the names of rocprofv3, of the whole launch: of instructions and LDS as the sampled workgroup executes them,
    /// times the workgroups; of time as it is modelled. `SQ_WAVE_CYCLES` and `SQ_WAIT_INST_ANY` are in quad-cycles.
    pub fn counters(&self) -> Vec<(&'static str, f64)> {
        let mut all = self.traced.counts();
        let wave_clocks = |reasons: std::ops::Range<usize>| -> f64 {
            let of = |record: &Record| {
                record.spent.iter().map(|s| s[reasons.clone()].iter().sum::<f64>()).sum::<f64>()
            };
            self.records().iter().map(|(times, record)| times * of(record)).sum::<f64>() / 4.0
        };
        let cus = f64::from(self.part().cus()).min(self.traced.workgroups() as f64);
        all.push(("SQ_WAVE_CYCLES", cus * wave_clocks(0..1 + STALLS.len())));
        all.push(("SQ_WAIT_INST_ANY", cus * wave_clocks(1..1 + STALLS.len())));
        all.push(("GRBM_GUI_ACTIVE", self.prediction.us * self.prediction.mhz));
        all
    }

    /// The first round of workgroups of a compute unit in the trace format of Chrome and Perfetto: waves as rows,
    /// instructions and stalls as slices, busy units as graphs. Iterations that were not replayed are not in it.
    pub fn chrome(&self, process: usize) -> Vec<Value> {
        let us = |clocks: f64| clocks / self.prediction.mhz;
        let part = self.part();
        let name = format!("{}, {}, {}", self.kernel, part.name, part.error());
        let mut events =
            vec![json!({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})];
        let Some((_, record)) = self.records().first() else { return events };
        let mut texts: BTreeMap<u32, String> = BTreeMap::new();
        for slice in &record.slices {
            let text = texts.entry(slice.step).or_insert_with(|| self.traced.program().text(slice.step));
            let (name, kind) = match slice.stall {
                Some(reason) => (format!("wait: {}", STALLS[reason]), "stall"),
                None => (text.clone(), "issue"),
            };
            let (ts, dur) = (us(slice.start), us(slice.end - slice.start));
            let mut event = json!({"ph": "X", "name": name, "cat": kind, "pid": process, "tid": slice.wave, "ts": ts, "dur": dur});
            if slice.stall.is_some() {
                event["args"] = json!({"instruction": text});
            }
            events.push(event);
        }
        for pair in record.units.windows(2) {
            let [(start, before), (end, after)] = [pair[0], pair[1]];
            let share = |i: usize| (after[i] - before[i]) / (end - start).max(1.0);
            let args: BTreeMap<&str, f64> =
                UNITS.iter().enumerate().map(|(i, unit)| (*unit, share(i))).collect();
            events.push(json!({"ph": "C", "name": "busy", "pid": process, "ts": us(start), "args": args}));
        }
        events
    }
}
