//! `hk demo`: a decoder layer, then operators at the sizes of real models, on emulated GPUs, against the f64 references.

use crate::out::{self, Table};
use crate::{Failure, Result, layer, run};
use hk_core::registry::{Case, Described as _, HostCall, HostTensor, Operator};
use hk_core::{Arch, Counters, Device};
use hk_testkit::compare::Comparison;
use hk_testkit::measure::flops;
use serde::Serialize;
use std::io::IsTerminal as _;
use std::time::Instant;

/// Options of `hk demo`.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoArgs {
    /// Only operators whose name contains this, and no layer.
    #[arg(long)]
    op: Option<String>,
    /// Every case of every operator, on every device, and the layer on every device. Default: one case of each operator, on one
    /// device, as many as fit the time, and the layer on one device.
    #[arg(long)]
    all: bool,
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
    let chosen = |o: &&&'static Operator| args.op.as_ref().is_none_or(|part| o.name.contains(part));
    let operators: Vec<&'static Operator> = operators.iter().filter(chosen).copied().collect();
    let devices = match args.devices.as_slice() {
        // Distinct bytes are what a cache of any size cannot avoid.
        [] => Arch::AMD.map(|arch| format!("emu:{arch}?details=true")).into(),
        devices => devices.to_vec(),
    };
    if operators.iter().all(|o| o.cases.is_empty()) {
        let part = args.op.as_deref().unwrap_or("");
        return Err(Failure::new(format!("no operator matches `{part}`")));
    }
    // What a user names is run whole.
    let whole = args.all || args.op.is_some();
    let mut rows = Vec::new();
    if args.op.is_none() {
        let devices_of_all = &devices[..];
        let devices = if whole { devices_of_all } else { &devices[..1] };
        let show = |row: &Row| eprintln!("layer: {} on {}: {}", row.case, row.device, row.verdict());
        rows = layer::run(&[layer::LAYER], devices, show)?;
        out::print(
            "A Llama-3 8B decoder layer, a prompt of 128 tokens, its GEMMs in bf16 and in fp8; the layer on a token of 8 \
             sequences over a paged cache of 1024 each; sampling; latent attention of DeepSeek-V3 on a token of 4 sequences. Each operator works on what the ones before it gave:\n",
        )?;
        print(&rows)?;
        out::print(
            "\nA linear-attention layer of Qwen3-Next, the heads of one of eight ranks: a prompt of 256 tokens, then 8 tokens one by one. \
             Each operator works on what the ones before it gave:\n",
        )?;
        let linear = layer::run(layer::LINEAR, devices_of_all, show)?;
        print(&linear)?;
        rows.extend(linear);
        out::print("\nOperators at the sizes of real models:\n")?;
    }
    let layer_rows = rows.len();
    let Choice { runs, left_out } = if whole {
        let each = operators.iter().flat_map(|op| op.cases.iter().map(|case| (*op, case)));
        Choice {
            runs: each.map(|(op, case)| Run { op, case, devices: devices.clone() }).collect(),
            left_out: vec![],
        }
    } else {
        choose(&operators, &devices, WORK)
    };
    let most = if whole { devices.len() } else { 1 };
    let (mut total, mut n) = (runs.len() * most, 0);
    for Run { op, case, devices } in &runs {
        let call = op.example(case, 0);
        let mut served = 0;
        for device in devices {
            if served == most {
                break;
            }
            let row = match &call {
                Ok(call) => measure(call, case.label, device).0,
                Err(error) => Row { error: Some(error.to_string()), ..Row::new(op, case.label, device) },
            };
            if !row.unserved {
                (served, n) = (served + 1, n + 1);
                progress(n, total, &row);
                rows.push(row);
            }
        }
        total -= most - served;
    }
    print(&rows[layer_rows..])?;
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

/// Of each operator the case of the least work, in turn over the families, while the work lasts. Targets alternate; one that
/// does not serve a case leaves it to the others.
fn choose(operators: &[&'static Operator], devices: &[String], most: u64) -> Choice {
    let cheapest = |op: &&'static Operator| {
        let cases = op.cases.iter().map(|case| (work(op, case), case));
        cases.min_by_key(|(work, _)| *work).map(|(work, case)| (work, *op, case))
    };
    // In each family the cheap ones first, so that a family that joins costs the dear ones of all.
    let mut by_family: Vec<Vec<_>> = vec![];
    for family in operators.chunk_by(|a, b| a.family == b.family) {
        let mut all: Vec<_> = family.iter().filter_map(cheapest).collect();
        all.sort_by_key(|(work, ..)| *work);
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
    // A device of its own: it lists the kernels of this run only.
    let device = Device::open(spec)?;
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
        let choice = choose(&operators, &devices, u64::MAX);
        let names: Vec<_> = choice.runs.iter().map(|run| run.op.name).collect();
        assert_eq!(names, operators.iter().map(|op| op.name).collect::<Vec<_>>());
        assert!(choice.left_out.is_empty());
        let first = |run: &Run| run.devices[0].clone();
        assert_ne!(first(&choice.runs[0]), first(&choice.runs[1]));

        let choice = choose(&operators, &devices, WORK);
        let sum: u64 = choice.runs.iter().map(|run| work(run.op, run.case)).sum();
        assert!(sum <= WORK && choice.runs.len() + choice.left_out.len() == operators.len());
        // Each family is shown.
        for family in crate::FAMILIES {
            assert!(choice.runs.iter().any(|run| run.op.family == family[0].family), "{}", family[0].family);
        }
        assert!(choose(&operators, &devices, 0).runs.is_empty());
    }
}
