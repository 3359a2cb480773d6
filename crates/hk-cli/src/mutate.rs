//! `hk mutate`: breaks kernels on purpose and counts who notices.

use crate::out::{self, Table};
use crate::{Failure, Result, run};
use hk_core::registry::{HostCall, HostTensor, Operator};
use hk_core::{Arch, Device, Error};
use hk_emu::{Candidate, Fault, Machine, MachineOptions, Mutant, Mutation};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

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
    /// Write every mutant and what became of it to a JSON file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Who noticed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// A sanitizer, by its name.
    Sanitizer(String),
    /// A memory fault or another report of every launch.
    Fault,
    /// An output has other bits.
    WrongResult,
    /// Nobody.
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

/// What one looks for in an instruction that is broken.
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
    let wanted = |name: &str, filter: &Option<String>| filter.as_ref().is_none_or(|text| name.contains(text));
    let targets =
        [Arch::Gfx942, Arch::Gfx950].into_iter().filter(|arch| args.target.is_none_or(|t| t == *arch));
    let mut rows = vec![];
    for arch in targets {
        for op in operators.iter().filter(|op| wanted(op.name, &args.op)) {
            rows.extend(operator(op, arch, |kernel| wanted(kernel, &args.kernel))?);
        }
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_vec_pretty(&rows).map_err(|e| Failure::new(e.to_string()))?;
        std::fs::write(path, text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
    }
    print(&rows)
}

/// A corner case, and what it gives.
struct Run {
    call: HostCall,
    outputs: Vec<(&'static str, HostTensor)>,
}

/// Every mutant of the kernels that an operator's corner cases launch.
fn operator(op: &'static Operator, arch: Arch, wanted: impl Fn(&str) -> bool) -> Result<Vec<Row>> {
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
        let outputs = outputs
            .map_err(|e| Failure::new(format!("{} ({}) on {arch}, unbroken: {e}", op.name, case.label)))?;
        if let Some(bad) = run::comparisons(op, &call, &outputs)?.iter().find(|c| !c.passed()) {
            return Err(Failure::new(format!("{} ({}) on {arch}, unbroken: {bad}", op.name, case.label)));
        }
        for kernel in device.loaded_kernels() {
            kernels.entry(kernel.name().to_owned()).or_default().push(runs.len());
        }
        runs.push(Run { call, outputs });
    }
    let mut rows = vec![];
    for (kernel, cases) in kernels.iter().filter(|(kernel, _)| wanted(kernel)) {
        let found = candidates(op, arch, kernel)?;
        rows.par_extend(found.par_iter().filter_map(|candidate| {
            let rows = cases.iter().filter_map(|case| mutant(op, arch, &runs[*case], candidate));
            // Who notices in any case.
            rows.reduce(|a, b| if a.verdict == Verdict::Survived { b } else { a })
        }));
    }
    Ok(rows)
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

/// What becomes of one mutant; `None` if the run does not reach the instruction.
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
