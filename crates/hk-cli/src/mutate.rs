//! `hk mutate`: mutation test of the kernels' sanitizers and results.

use crate::out::{self, Table};
use crate::{Failure, Result, run};
use hk_core::registry::{HostCall, HostTensor, Operator};
use hk_core::{Arch, Device, Error};
use hk_emu::{Candidate, Fault, Machine, MachineOptions, Mutant, Mutation};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Options of `hk mutate`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Each wait and barrier of a kernel is deleted, and each memory access moved by one element, \
    one at a time. The broken kernel runs on the operator's corner cases with every sanitizer on. It is found if a \
    sanitizer or a memory fault reports it, or if any bit of an output changes. What the run does not reach is not \
    counted."
)]
pub struct Args {
    /// Only operators whose name contains this.
    #[arg(long, value_name = "TEXT")]
    op: Option<String>,
    /// Only kernels whose name contains this.
    #[arg(long, value_name = "TEXT")]
    kernel: Option<String>,
    /// Only this target.
    #[arg(long, value_name = "ARCH")]
    target: Option<Arch>,
    /// Only this many mutants: the same ones each time.
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Write every mutant and its verdict to a JSON file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What noticed the mutant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// A sanitizer, by its name.
    Sanitizer(String),
    /// A memory fault or another report of every launch.
    Fault,
    /// An output has other bits.
    WrongResult,
    /// Nothing.
    Survived,
}

#[derive(Debug, Serialize)]
struct Row {
    target: String,
    mutant: String,
    instruction: String,
    source: Option<String>,
    verdict: Verdict,
    /// What was reported.
    report: Option<String>,
}

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Wait,
    Barrier,
    Address,
}

impl Kind {
    fn of(row: &Row) -> Kind {
        match row.instruction.split(' ').next() {
            Some("s_waitcnt") => Kind::Wait,
            Some("s_barrier") => Kind::Barrier,
            _ => Kind::Address,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Wait => "waits deleted",
            Kind::Barrier => "barriers deleted",
            Kind::Address => "addresses moved",
        }
    }
}

pub fn run(args: &Args, operators: &[&'static Operator]) -> Result<()> {
    let rows = rows(args, operators, &Progress::new(std::io::stderr()))?;
    if let Some(path) = &args.json {
        let text = serde_json::to_vec_pretty(&rows).map_err(|e| Failure::new(e.to_string()))?;
        std::fs::write(path, text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
    }
    print(&rows)
}

fn rows(args: &Args, operators: &[&'static Operator], progress: &Progress) -> Result<Vec<Row>> {
    let wanted = |name: &str, filter: &Option<String>| filter.as_ref().is_none_or(|text| name.contains(text));
    let targets = Arch::AMD.into_iter().filter(|arch| args.target.is_none_or(|t| t == *arch));
    let mut all = vec![];
    for arch in targets {
        for op in operators.iter().filter(|op| wanted(op.name, &args.op)) {
            all.push(Broken::new(op, arch, |kernel| wanted(kernel, &args.kernel))?);
            progress.tick(|| format!("{} on {arch}: corner cases", op.name));
        }
    }
    if let Some(n) = args.sample {
        let candidates = all.iter_mut().flat_map(|broken| {
            let arch = broken.arch;
            broken.kernels.iter_mut().map(move |kernel| (arch, &mut kernel.candidates))
        });
        sample(candidates, n);
    }
    let total: usize =
        all.iter().flat_map(|broken| &broken.kernels).map(|kernel| kernel.candidates.len()).sum();
    let done = AtomicUsize::new(0);
    let mut rows: Vec<Row> = vec![];
    for broken in &all {
        for kernel in broken.kernels.iter().filter(|kernel| !kernel.candidates.is_empty()) {
            let first = rows.len();
            rows.par_extend(kernel.candidates.par_iter().filter_map(|candidate| {
                let cases = kernel.cases.iter();
                let rows =
                    cases.filter_map(|case| mutant(broken.op, broken.arch, &broken.runs[*case], candidate));
                // Who notices in any case.
                let row = rows.reduce(|a, b| if a.verdict == Verdict::Survived { b } else { a });
                let done = done.fetch_add(1, Relaxed) + 1;
                progress.tick(|| format!("{done} of {total} mutants"));
                row
            }));
            let survived = rows[first..].iter().filter(|row| row.verdict == Verdict::Survived).count();
            progress.line(&format!(
                "{} of {total} mutants; {} on {}: {} run, {survived} survived",
                done.load(Relaxed),
                kernel.name,
                broken.arch,
                rows.len() - first,
            ));
        }
    }
    Ok(rows)
}

/// Lines on the state of the work, to a terminal or a pipe.
struct Progress {
    start: Instant,
    /// Where to, and when the last line was written.
    to: Mutex<(Box<dyn Write + Send>, Instant)>,
}

/// Between lines within a kernel.
const PERIOD: Duration = Duration::from_secs(5);

impl Progress {
    fn new(to: impl Write + Send + 'static) -> Progress {
        let start = Instant::now();
        Progress { start, to: Mutex::new((Box::new(to), start)) }
    }

    fn line(&self, text: &str) {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        self.write(&mut to, text);
    }

    /// A line if the last one is some seconds old.
    fn tick(&self, text: impl FnOnce() -> String) {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        if to.1.elapsed() > PERIOD {
            self.write(&mut to, &text());
        }
    }

    /// A reader that is gone is no reason to stop.
    fn write(&self, to: &mut (Box<dyn Write + Send>, Instant), text: &str) {
        let _ = writeln!(to.0, "{:6.1} s  {text}", self.start.elapsed().as_secs_f64());
        to.1 = Instant::now();
    }
}

/// Keeps `n` of the candidates: those whose names hash lowest, so that a sample stays as it is while other kernels change.
fn sample<'a>(kernels: impl Iterator<Item = (Arch, &'a mut Vec<Candidate>)>, n: usize) {
    let hash = |arch: Arch, candidate: &Candidate| {
        // FNV-1a.
        let name = format!("{arch} {}", candidate.mutant);
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        // The finalizer of SplitMix64: the high bits of FNV-1a hardly depend on the last characters.
        let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (hash ^ (hash >> 31), name)
    };
    let mut kernels: Vec<_> = kernels.collect();
    let hashes = kernels.iter().flat_map(|(arch, list)| list.iter().map(|candidate| hash(*arch, candidate)));
    let mut hashes: Vec<_> = hashes.collect();
    if n >= hashes.len() {
        return;
    }
    hashes.sort_unstable();
    for (arch, list) in &mut kernels {
        list.retain(|candidate| hash(*arch, candidate) < hashes[n]);
    }
}

/// A corner case, and what it gives.
struct Run {
    call: HostCall,
    outputs: Vec<(&'static str, HostTensor)>,
}

/// A kernel that corner cases launch.
struct Kernel {
    name: String,
    /// Of the operator's runs.
    cases: Vec<usize>,
    candidates: Vec<Candidate>,
}

/// What there is to break of an operator on a target.
struct Broken {
    op: &'static Operator,
    arch: Arch,
    runs: Vec<Run>,
    kernels: Vec<Kernel>,
}

impl Broken {
    /// The kernels that an operator's corner cases launch.
    fn new(op: &'static Operator, arch: Arch, wanted: impl Fn(&str) -> bool) -> Result<Broken> {
        let mut runs = vec![];
        let mut kernels: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for case in op.corners {
            let call = op.example(case, 1)?;
            let device = device(arch, None, true)?;
            let outputs = match execute(op, &device, &call) {
                // A case for other targets.
                Err(Error::Unsupported { .. }) => continue,
                outputs => outputs,
            };
            let outputs = outputs.map_err(|e| {
                Failure::new(format!("{} ({}) on {arch}, unbroken: {e}", op.name, case.label))
            })?;
            if let Some(bad) = run::comparisons(op, &call, &outputs)?.iter().find(|c| !c.passed()) {
                return Err(Failure::new(format!("{} ({}) on {arch}, unbroken: {bad}", op.name, case.label)));
            }
            for kernel in device.loaded_kernels() {
                kernels.entry(kernel.name().to_owned()).or_default().push(runs.len());
            }
            runs.push(Run { call, outputs });
        }
        let wanted = kernels.into_iter().filter(|(kernel, _)| wanted(kernel));
        let kernels = wanted.map(|(name, cases)| {
            let candidates = candidates(op, arch, &name)?;
            Ok(Kernel { name, cases, candidates })
        });
        let kernels = kernels.collect::<Result<Vec<Kernel>>>()?;
        Ok(Broken { op, arch, runs, kernels })
    }
}

fn candidates(op: &Operator, arch: Arch, kernel: &str) -> Result<Vec<Candidate>> {
    let machine = Machine::new(MachineOptions::default().arch(arch));
    for objects in op.kernels {
        let module = machine.load(objects.image(arch)?).map_err(|e| Failure::new(e.to_string()))?;
        if let Some(found) = machine.candidates(&module, kernel) {
            return Ok(found);
        }
    }
    Err(Failure::new(format!("{}: no code object has the kernel {kernel}", op.name)))
}

/// Runs one mutant; `None` if the run does not reach the instruction.
fn mutant(op: &'static Operator, arch: Arch, case: &Run, candidate: &Candidate) -> Option<Row> {
    let run = |mutation, sanitize| {
        let mutant = Mutant { mutation, ..candidate.mutant.clone() };
        execute(op, &device(arch, Some(&mutant), sanitize)?, &case.call)
    };
    run(Mutation::Trap, false).err()?;
    let (verdict, report) = match run(candidate.mutant.mutation, true) {
        Err(error @ Error::Emulator { .. }) => {
            let verdict = match &error {
                Error::Emulator { fault: Some(fault), .. } => match &**fault {
                    Fault::Sanitizer { check, .. } => Verdict::Sanitizer(check.name().to_owned()),
                    _ => Verdict::Fault,
                },
                _ => Verdict::Fault,
            };
            (verdict, Some(error.to_string()))
        }
        Err(error) => (Verdict::Fault, Some(error.to_string())),
        Ok(outputs) => {
            let differs = case.outputs.iter().zip(&outputs).find(|((_, a), (_, b))| a.bytes() != b.bytes());
            match differs {
                Some(((name, _), _)) => (Verdict::WrongResult, Some(format!("output `{name}` differs"))),
                None => (Verdict::Survived, None),
            }
        }
    };
    Some(Row {
        target: arch.to_string(),
        mutant: candidate.mutant.to_string(),
        instruction: candidate.instruction.clone(),
        source: candidate.source.clone(),
        verdict,
        report,
    })
}

/// A device with a single compute unit: kernels that loop over rows have to do so.
fn device(arch: Arch, mutant: Option<&Mutant>, sanitize: bool) -> std::result::Result<Device, Error> {
    let checks = if sanitize { "all" } else { "none" };
    let mutant = mutant.map_or(String::new(), |mutant| format!("&mutant={mutant}"));
    Device::open(&format!("emu:{arch}?threads=1&cus=1&budget=100000000&sanitize={checks}{mutant}"))
}

fn execute(
    op: &Operator,
    device: &Device,
    call: &HostCall,
) -> std::result::Result<Vec<(&'static str, HostTensor)>, Error> {
    op.execute(&device.create_stream()?, call)
}

fn print(rows: &[Row]) -> Result<()> {
    let mut table =
        Table::new(["mutants", ">run", ">sanitizer", ">fault", ">wrong result", ">survived", ">found"]);
    for kind in [Kind::Wait, Kind::Barrier, Kind::Address] {
        let of = |test: &dyn Fn(&Verdict) -> bool| {
            rows.iter().filter(|r| Kind::of(r) == kind && test(&r.verdict)).count()
        };
        let (all, survived) = (of(&|_| true), of(&|v| *v == Verdict::Survived));
        table.row([
            kind.name().into(),
            all.to_string(),
            of(&|v| matches!(v, Verdict::Sanitizer(_))).to_string(),
            of(&|v| *v == Verdict::Fault).to_string(),
            of(&|v| *v == Verdict::WrongResult).to_string(),
            survived.to_string(),
            if all == 0 {
                "-".into()
            } else {
                format!("{:.1} %", 100.0 * (all - survived) as f64 / all as f64)
            },
        ]);
    }
    table.print()?;
    let mut by_check: BTreeMap<&Verdict, usize> = BTreeMap::new();
    for row in rows {
        *by_check.entry(&row.verdict).or_default() += 1;
    }
    for (verdict, n) in &by_check {
        if let Verdict::Sanitizer(name) = verdict {
            out::print(format_args!("found by {name}: {n}"))?;
        }
    }
    for row in rows.iter().filter(|r| r.verdict == Verdict::Survived) {
        let source = row.source.as_deref().unwrap_or("no line");
        out::print(format_args!("survived: {} {}: {} ({source})", row.target, row.mutant, row.instruction))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn candidates(kernel: &str, n: u64) -> Vec<Candidate> {
        let candidate = |i| Candidate {
            mutant: format!("{kernel}@{:#x}:delete", 256 + 4 * i).parse().unwrap(),
            instruction: String::new(),
            source: None,
        };
        (0..n).map(candidate).collect()
    }

    fn sampled(kernels: &[(&str, u64)], n: usize) -> Vec<String> {
        let mut lists: Vec<_> = kernels.iter().map(|(name, n)| candidates(name, *n)).collect();
        sample(lists.iter_mut().map(|list| (Arch::Gfx942, list)), n);
        lists.into_iter().flatten().map(|candidate| candidate.mutant.to_string()).collect()
    }

    #[test]
    fn a_sample_is_the_same_each_time_and_grows() {
        let kernels = [("first", 50), ("second", 150)];
        let mut previous = vec![];
        for n in 0..=200 {
            let names = sampled(&kernels, n);
            assert_eq!(names.len(), n);
            assert_eq!(names, sampled(&kernels, n));
            assert!(previous.iter().all(|name| names.contains(name)), "{n}");
            previous = names;
        }
        assert_eq!(sampled(&kernels, 1000).len(), 200);
        // Of both kernels, about as many as they have.
        let first = sampled(&kernels, 80).iter().filter(|name| name.starts_with("first")).count();
        assert!((10..=30).contains(&first), "{first} of 80");
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_sample_runs_and_says_how_far_it_is() {
        let args = Args { op: None, kernel: None, target: Some(Arch::Gfx942), sample: Some(6), json: None };
        let op = crate::operator("rmsnorm").unwrap();
        let run = || {
            let lines = Lines::default();
            let rows = rows(&args, &[op], &Progress::new(lines.clone())).unwrap();
            let lines = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
            (rows.into_iter().map(|row| (row.mutant, row.verdict)).collect::<Vec<_>>(), lines)
        };
        let (first, lines) = run();
        assert!(first.len() <= 6 && !first.is_empty(), "{first:?}");
        assert!(lines.trim_end().lines().last().unwrap().contains("6 of 6 mutants"), "{lines}");
        assert_eq!(run().0, first);
    }
}
