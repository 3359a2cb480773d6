//! `hk demo`: layers of real models, then operators at their sizes, on emulated GPUs, against the f64 references.

use crate::layer::{self, LAYERS, Layer};
use crate::out::{self, Table};
use crate::{Failure, Result, run};
use hk_core::registry::{Case, Described as _, HostCall, HostTensor, Operator};
use hk_core::{Arch, Counters, Device};
use hk_testkit::compare::Comparison;
use hk_testkit::measure::flops;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// Options of `hk demo`.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoArgs {
    /// Only operators whose name contains this, and no layer.
    #[arg(long)]
    op: Option<String>,
    /// Only layers whose title contains this, and no operator.
    #[arg(long, value_name = "TITLE", conflicts_with = "op")]
    layer: Option<String>,
    /// Every case of every operator, on every device. Default: the large layer on one device, and one case of each operator, on
    /// one device, as many as fit the time.
    #[arg(long)]
    all: bool,
    /// At most so many operators of each family, those of the least work. Default: as many as fit the time.
    #[arg(long, value_name = "N", conflicts_with_all = ["op", "all"])]
    per_family: Option<usize>,
    /// Devices to run on. Default: the emulated GPUs.
    #[arg(long = "device", value_name = "SPEC")]
    devices: Vec<String>,
    /// Also write the results as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
}

/// The result of one operator at one size on one device.
#[derive(Debug, Serialize)]
pub struct Row {
    operator: &'static str,
    family: &'static str,
    case: &'static str,
    /// Shapes of the inputs.
    shapes: String,
    device: String,
    /// It ran and is within tolerance.
    passed: bool,
    /// What went wrong, if so; everything below is then empty.
    error: Option<String>,
    worst: Option<Worst>,
    kernels: Vec<KernelUse>,
    /// What was executed; emulator only.
    counters: Option<Counters>,
    /// Bytes that any implementation has to move.
    floor_bytes: u64,
    /// Host time of the emulation, not of a GPU.
    host_seconds: f64,
    /// The case is one of other devices.
    #[serde(skip)]
    unserved: bool,
}

/// A kernel that ran.
#[derive(Debug, Serialize)]
struct KernelUse {
    name: String,
    vgprs: u32,
    agprs: u32,
    /// Waves per SIMD.
    occupancy: u32,
}

/// The element of all outputs that is furthest from the reference, by its tolerance.
#[derive(Debug, Serialize)]
struct Worst {
    /// The output's name.
    output: String,
    /// Row-major index of the element.
    index: usize,
    /// The result.
    got: f64,
    /// The reference.
    want: f64,
    /// `|got - want|`
    error: f64,
    /// The error over what the tolerance allows; more than 1 is a failure.
    of_tolerance: f64,
    /// Share of the elements of that output that equal the correctly rounded reference.
    correctly_rounded: f64,
}

/// Runs the demo. Success means that every operator ran on every device and is within its tolerance.
pub fn run(args: &DemoArgs, operators: &[&'static Operator]) -> Result<()> {
    let chosen = |o: &&&'static Operator| {
        args.layer.is_none() && args.op.as_ref().is_none_or(|part| o.name.contains(part))
    };
    let operators: Vec<&'static Operator> = operators.iter().filter(chosen).copied().collect();
    let titled = |layer: &&'static Layer| {
        args.op.is_none() && args.layer.as_ref().is_none_or(|part| layer.title.contains(part))
    };
    let layers: Vec<&'static Layer> = LAYERS.iter().filter(titled).collect();
    let devices = match args.devices.as_slice() {
        // Distinct bytes are what a cache of any size cannot avoid.
        [] => Arch::AMD.map(|arch| format!("emu:{arch}?details=true")).into(),
        devices => devices.to_vec(),
    };
    if layers.is_empty() && operators.iter().all(|o| o.cases.is_empty()) {
        let (what, part) = match &args.layer {
            Some(part) => ("layer", part.as_str()),
            None => ("operator", args.op.as_deref().unwrap_or("")),
        };
        return Err(Failure::new(format!("no {what} matches `{part}`")));
    }
    // What a user names is run whole.
    let whole = args.all || args.op.is_some() || args.layer.is_some();
    let Choice { runs, left_out } = if whole {
        let each = operators.iter().flat_map(|op| op.cases.iter().map(|case| (*op, case)));
        Choice {
            runs: each.map(|(op, case)| Run { op, case, devices: devices.clone() }).collect(),
            left_out: vec![],
        }
    } else {
        choose(&operators, &devices, WORK, args.per_family.unwrap_or(usize::MAX))
    };
    let most = if whole { devices.len() } else { 1 };
    let of_layer = |layer: &Layer| if whole || !layer.large { &devices[..] } else { &devices[..1] };
    let of_layers = layers.iter().map(|&layer| Job::Layer(layer, of_layer(layer)));
    let jobs: Vec<Job> = of_layers.chain(runs.iter().map(|run| Job::Case(run, most))).collect();
    let (mut rows, mut of_cases) = (vec![], vec![]);
    // Cases of `--all` are as large as models have them.
    execute(&jobs, if whole { 2 } else { AT_ONCE }, |job, of_job| {
        if let Job::Layer(layer, _) = job {
            out::print(format_args!(
                "{} Each operator works on what the ones before it gave:\n",
                layer.title
            ))?;
            print(&of_job)?;
            out::print("")?;
            rows.extend(of_job);
        } else {
            of_cases.extend(of_job);
        }
        Ok(())
    })?;
    if !layers.is_empty() && !operators.is_empty() {
        out::print("Operators at the sizes of real models:\n")?;
    }
    if !operators.is_empty() {
        print(&of_cases)?;
    }
    rows.extend(of_cases);
    if !whole {
        let all: usize = operators.iter().map(|op| op.cases.len()).sum();
        let also = if left_out.is_empty() { String::new() } else { format!(", and {}", left_out.join(", ")) };
        out::print(format_args!(
            "{} of {all} cases, each on one of the targets. `hk demo --all` runs the others{also}.",
            runs.len()
        ))?;
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows)? + "\n";
        std::fs::write(path, text).map_err(|e| Failure::file(path, e))?;
    }
    match rows.iter().filter(|row| !row.passed).count() {
        0 => Ok(()),
        failed => Err(Failure::new(format!("{failed} of {} runs failed", rows.len()))),
    }
}

/// Jobs at a time by default: some wait for a kernel that is being compiled, or for a reference that has one thread.
const AT_ONCE: usize = 4;

/// What is run on its own.
enum Job<'a> {
    /// A layer, on each of the devices.
    Layer(&'static Layer, &'a [String]),
    /// A case, on the first so many of its devices that serve it.
    Case(&'a Run, usize),
}

impl Job<'_> {
    /// Runs it and shows each row as soon as it is there.
    fn run(&self, show: impl Fn(&Row)) -> Result<Vec<Row>> {
        let (run, most) = match self {
            Self::Layer(layer, devices) => return layer::run(layer.steps, devices, show),
            Self::Case(run, most) => (run, *most),
        };
        let call = run.op.example(run.case, 0);
        let served = run.devices.iter().map(|device| match &call {
            Ok(call) => measure(call, run.case.label, device).0,
            Err(error) => Row { error: Some(error.to_string()), ..Row::new(run.op, run.case.label, device) },
        });
        Ok(served.filter(|row| !row.unserved).inspect(show).take(most).collect())
    }

    /// Rows that it gives at most.
    fn rows(&self) -> usize {
        match self {
            Self::Layer(layer, devices) => layer.steps.iter().copied().flatten().count() * devices.len(),
            Self::Case(_, most) => *most,
        }
    }
}

/// Runs the jobs, so many at a time, and hands over the rows of each in order.
fn execute(jobs: &[Job], at_once: usize, mut done: impl FnMut(&Job, Vec<Row>) -> Result<()>) -> Result<()> {
    let (next, shown) = (&AtomicUsize::new(0), &AtomicUsize::new(0));
    let total: usize = jobs.iter().map(Job::rows).sum();
    let show = move |row: &Row| progress(shown.fetch_add(1, Ordering::Relaxed) + 1, total, row);
    let (send, results) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..at_once {
            let send = send.clone();
            scope.spawn(move || {
                let mut sent = Ok(());
                while let (Ok(()), i) = (&sent, next.fetch_add(1, Ordering::Relaxed))
                    && let Some(job) = jobs.get(i)
                {
                    // Nobody receives after an error.
                    sent = send.send((i, job.run(show)));
                }
            });
        }
        drop(send);
        let (mut early, mut at) = (BTreeMap::new(), 0);
        for (i, rows) in results {
            early.insert(i, rows);
            while let Some(rows) = early.remove(&at) {
                done(&jobs[at], rows?)?;
                at += 1;
            }
        }
        Ok(())
    })
}

/// A case to be run, on the devices in order of preference.
struct Run {
    op: &'static Operator,
    case: &'static Case,
    devices: Vec<String>,
}

/// What the demo runs by default.
struct Choice {
    runs: Vec<Run>,
    /// Operators of which no case fits the time.
    left_out: Vec<&'static str>,
}

/// Work of a demo by default, in units of [`work`]: about half a minute of emulation on two cores, and a minute of references.
const WORK: u64 = 60_000_000_000;

/// How long a case takes, roughly: operations, and bytes, which take the emulator and the reference as long as so many operations.
fn work(op: &'static Operator, case: &Case) -> u64 {
    let Ok(call) = op.spec(case) else { return 0 };
    let outputs = (op.outputs)(&call).unwrap_or_default();
    let tensors = call.tensors().map(|(_, spec)| spec).chain(outputs.iter().map(|(_, spec)| spec));
    let bytes: u64 = tensors.map(|spec| spec.bytes().unwrap_or(0) as u64).sum();
    flops(&call).unwrap_or(0) + 64 * bytes
}

/// Of each operator the case of the least work, in turn over the families, while the work lasts, at most `per_family` of each. Targets
/// alternate; one that does not serve a case leaves it to the others.
fn choose(operators: &[&'static Operator], devices: &[String], most: u64, per_family: usize) -> Choice {
    let cheapest = |op: &&'static Operator| {
        let cases = op.cases.iter().map(|case| (work(op, case), case));
        cases.min_by_key(|(work, _)| *work).map(|(work, case)| (work, *op, case))
    };
    // In each family the cheap ones first, so that a family that joins costs the dear ones of all.
    let mut by_family: Vec<Vec<_>> = vec![];
    for family in operators.chunk_by(|a, b| a.family == b.family) {
        let mut all: Vec<_> = family.iter().filter_map(cheapest).collect();
        all.sort_by_key(|(work, ..)| *work);
        all.truncate(per_family);
        by_family.push(all);
    }
    let longest = by_family.iter().map(Vec::len).max().unwrap_or(0);
    let in_turn = (0..longest).flat_map(|i| by_family.iter().filter_map(move |family| family.get(i)));
    let mut left = most;
    let chosen: Vec<&str> = in_turn
        .filter(|(work, ..)| {
            let fits = *work <= left;
            left -= if fits { *work } else { 0 };
            fits
        })
        .map(|(_, op, _)| op.name)
        .collect();
    let mut choice = Choice { runs: vec![], left_out: vec![] };
    for (i, op) in operators.iter().enumerate() {
        match cheapest(op) {
            Some((_, op, case)) if chosen.contains(&op.name) => {
                let mut devices = devices.to_vec();
                let first = i % devices.len().max(1);
                devices.rotate_left(first);
                choice.runs.push(Run { op, case, devices });
            }
            _ => choice.left_out.push(op.name),
        }
    }
    choice
}

/// Runs a call on a device, and compares what it gives with the reference. Gives the outputs, too, if it ran.
pub fn measure(call: &HostCall, label: &'static str, device: &str) -> (Row, Vec<(&'static str, HostTensor)>) {
    let mut row = Row { shapes: shapes(call), ..Row::new(call.operator(), label, device) };
    let (result, outputs) = match run_on(call, device, &mut row) {
        Ok(outputs) => (compare(call, &outputs, &mut row), outputs),
        Err(failure) => (Err(failure), vec![]),
    };
    row.error = result.err().map(|e| e.to_string());
    // No element to compare means that nothing was shown.
    row.passed = row.error.is_none() && row.worst.is_some();
    (row, outputs)
}

fn run_on(call: &HostCall, spec: &str, row: &mut Row) -> Result<Vec<(&'static str, HostTensor)>> {
    // It lists the kernels of this run only.
    let device = Device::open_apart(spec)?;
    let stream = device.create_stream()?;
    let start = Instant::now();
    let outputs = call.operator().execute(&stream, call);
    row.unserved = matches!(outputs, Err(hk_core::Error::Unsupported { .. }));
    let outputs = outputs?;
    row.host_seconds = start.elapsed().as_secs_f64();
    row.counters = stream.take_counters()?;
    let traffic = (call.operator().traffic)(call);
    row.floor_bytes = traffic.read + traffic.written;
    row.kernels = device
        .loaded_kernels()
        .iter()
        .map(|kernel| KernelUse {
            name: kernel.name().into(),
            vgprs: kernel.info().vgprs,
            agprs: kernel.info().agprs,
            occupancy: kernel.info().occupancy(device.arch()),
        })
        .collect();
    Ok(outputs)
}

fn compare(call: &HostCall, outputs: &Vec<(&'static str, HostTensor)>, row: &mut Row) -> Result<()> {
    let comparisons = run::comparisons(call.operator(), call, outputs)?;
    row.worst = comparisons.iter().filter_map(worst).max_by(|a, b| a.of_tolerance.total_cmp(&b.of_tolerance));
    match comparisons.iter().find(|c| !c.passed()) {
        Some(bad) => Err(Failure::new(bad.to_string())),
        None => Ok(()),
    }
}

fn worst(c: &Comparison) -> Option<Worst> {
    c.worst.map(|w| Worst {
        output: c.label.clone(),
        index: w.index,
        got: w.got,
        want: w.want,
        error: w.error,
        of_tolerance: w.share(),
        correctly_rounded: c.rounded_share(),
    })
}

/// `x 128x4096 bf16, w 4096 bf16`
fn shapes(call: &HostCall) -> String {
    let tensor = |(name, tensor): (&str, &HostTensor)| {
        let sizes: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
        format!("{name} {} {}", sizes.join("x"), tensor.dtype().name())
    };
    call.tensors().map(|(name, t)| tensor((name, t))).collect::<Vec<_>>().join(", ")
}

impl Row {
    /// Nothing is known yet.
    fn new(operator: &Operator, case: &'static str, device: &str) -> Self {
        Self {
            operator: operator.name,
            family: operator.family,
            case,
            shapes: String::new(),
            device: device.split('?').next().unwrap_or(device).into(),
            passed: false,
            error: None,
            worst: None,
            kernels: Vec::new(),
            counters: None,
            floor_bytes: 0,
            host_seconds: 0.0,
            unserved: false,
        }
    }

    fn verdict(&self) -> &'static str {
        if self.passed { "ok" } else { "FAILED" }
    }
}

fn progress(n: usize, total: usize, row: &Row) {
    let line = format!("[{n}/{total}] {} {} on {}: {}", row.operator, row.case, row.device, row.verdict());
    if std::io::stderr().is_terminal() {
        // One line that is written over, cleared after the last.
        eprint!("\r\x1b[2K{}", if n == total { "" } else { &line });
    } else {
        eprintln!("{line}");
    }
}

fn print(rows: &[Row]) -> Result<()> {
    let mut table = Table::new([
        "operator",
        "model",
        "shape",
        "device",
        ">worst error",
        ">of tolerance",
        ">instructions",
        ">per wave",
        ">VGPR",
        ">waves/SIMD",
        ">floor",
        ">moved",
        ">distinct",
        "",
    ]);
    for row in rows {
        let none = || "-".to_owned();
        let kernel = |f: fn(&KernelUse) -> String| match row.kernels.as_slice() {
            [] => none(),
            kernels => kernels.iter().map(f).collect::<Vec<_>>().join("\n"),
        };
        let counted = |f: fn(&Counters) -> Option<u64>| row.counters.as_ref().and_then(f);
        let text = |n: Option<u64>| n.map_or_else(none, |n| n.to_string());
        let moved = counted(|c| Some(c.global_read_bytes + c.global_written_bytes));
        let distinct = counted(|c| c.details.map(|d| d.distinct_read_bytes + d.distinct_written_bytes));
        let of_floor = |bytes: Option<u64>| match bytes {
            Some(bytes) if row.floor_bytes > 0 => format!("{:.2}x", bytes as f64 / row.floor_bytes as f64),
            _ => none(),
        };
        let worst = |f: fn(&Worst) -> String| row.worst.as_ref().map_or_else(none, f);
        table.row([
            row.operator.into(),
            row.case.into(),
            row.shapes.split(", ").next().unwrap_or_default().into(),
            row.device.clone(),
            worst(|w| format!("{:.1e}", w.error)),
            worst(|w| format!("{:.0} %", 100.0 * w.of_tolerance)),
            text(counted(|c| Some(c.instructions))),
            text(counted(|c| c.instructions.checked_div(c.waves))),
            kernel(|k| if k.agprs > 0 { format!("{}+{}", k.vgprs, k.agprs) } else { k.vgprs.to_string() }),
            kernel(|k| k.occupancy.to_string()),
            out::bytes(row.floor_bytes),
            of_floor(moved),
            of_floor(distinct),
            row.verdict().into(),
        ]);
    }
    table.print()?;
    for (row, error) in rows.iter().filter_map(|row| Some((row, row.error.as_ref()?))) {
        out::print(format_args!("{} {} on {}:\n{error}", row.operator, row.case, row.device))?;
    }
    let good = rows.iter().filter(|row| row.passed).count();
    let seconds: f64 = rows.iter().map(|row| row.host_seconds).sum();
    out::print(format_args!(
        "{good} of {} runs are within tolerance of the f64 reference; {seconds:.2} s on the host.\n\
         Instructions and bytes are the emulator's counts, not a GPU's. Floor: each input read and each output written \
         once.\nMoved: all lanes' accesses over the floor. Distinct: each byte counted once, over the floor.",
        rows.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator_is_in_the_demo_while_the_work_lasts() {
        let (operators, devices) = (crate::operators(), ["a".to_owned(), "b".to_owned()]);
        let choice = choose(&operators, &devices, u64::MAX, usize::MAX);
        let names: Vec<_> = choice.runs.iter().map(|run| run.op.name).collect();
        assert_eq!(names, operators.iter().map(|op| op.name).collect::<Vec<_>>());
        assert!(choice.left_out.is_empty());
        let first = |run: &Run| run.devices[0].clone();
        assert_ne!(first(&choice.runs[0]), first(&choice.runs[1]));

        let choice = choose(&operators, &devices, WORK, usize::MAX);
        let sum: u64 = choice.runs.iter().map(|run| work(run.op, run.case)).sum();
        assert!(sum <= WORK && choice.runs.len() + choice.left_out.len() == operators.len());
        // Each family is shown.
        for family in crate::FAMILIES {
            assert!(choice.runs.iter().any(|run| run.op.family == family[0].family), "{}", family[0].family);
        }
        assert!(choose(&operators, &devices, 0, usize::MAX).runs.is_empty());
        assert_eq!(choose(&operators, &devices, u64::MAX, 1).runs.len(), crate::FAMILIES.len());
    }
}
