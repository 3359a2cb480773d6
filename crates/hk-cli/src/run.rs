//! `hk run`.

use crate::out::{self, Table};
use crate::{Failure, Result, hot, tensors};
use hk_core::registry::{Call, Described as _, HostCall, HostTensor, Operator};
use hk_core::{Checks, Counters, DType, Device, Error, Fault, Profile};
use hk_testkit::compare::{Comparison, compare_outputs};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `hk run`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Tensors go by the names of the operator's arguments, which `hk inspect OP` lists. A \
    tensor that the operator updates in place is given as an input and comes back as an output of the same name."
)]
pub struct Args {
    /// The operator.
    #[arg(value_name = "OP")]
    operator: String,
    /// The safetensors file with the inputs.
    #[arg(long = "in", value_name = "FILE")]
    input: PathBuf,
    /// The safetensors file for the outputs. May be left out with --check.
    #[arg(long = "out", value_name = "FILE", required_unless_present = "check")]
    output: Option<PathBuf>,
    /// Set a parameter.
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parameter)]
    params: Vec<(String, String)>,
    /// Ask for an optional output.
    #[arg(long, value_name = "NAME")]
    want: Vec<String>,
    /// The device, such as emu:gfx942 or hip:0. Default: HK_DEVICE, else an AMD GPU, else emu:gfx942.
    #[arg(long, value_name = "SPEC")]
    device: Option<String>,
    /// Compare the outputs with the operator's f64 reference; fail if one is out of tolerance.
    #[arg(long)]
    check: bool,
    /// Print what was executed (emulator only).
    #[arg(long)]
    stats: bool,
    /// Print the source lines that executed most (emulator only); sorted by instructions, or by another column.
    #[arg(long, value_name = "COLUMN", num_args = 0..=1, require_equals = true, default_missing_value = "instructions")]
    hot: Option<hot::Column>,
    /// Run with the checks that are not always on (emulator only): all, or those named, with commas between.
    ///
    /// On the emulator these checks are always on: out-of-bounds, misaligned and use-after-free accesses, unknown
    /// instructions, deadlocks, endless loops, and the part's limits. This option adds the emulator's sanitizers (uninit,
    /// lds, global, waits, hazards, barriers, streams) and two checks of the outputs. Elements that are never written are
    /// a failure. The operator runs again on a single host thread, and outputs that differ in any bit, a race between
    /// workgroups, are a failure.
    #[arg(long, value_name = "NAMES", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    sanitize: Option<Checks>,
    /// Print JSON instead of tables: what was executed, and the report of a failure with its fields.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    operator: &'static str,
    device: String,
    /// Everything that was asked for is right.
    passed: bool,
    /// What went wrong, if so.
    error: Option<String>,
    /// The emulator's report, if a kernel is at fault.
    fault: Option<Box<Fault>>,
    /// What was executed, if the emulator executed it.
    counters: Option<Counters>,
    /// The same by kernel and source line.
    kernels: Vec<Profile>,
}

fn parameter(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("expected NAME=VALUE".into()),
    }
}

type Outputs = Vec<(&'static str, HostTensor)>;

pub fn run(args: &Args) -> Result<()> {
    let op = crate::operator(&args.operator)?;
    let call = call(op, args)?;
    let mut device = match &args.device {
        Some(spec) => Device::open(spec)?,
        None => Device::open_default()?,
    };
    if args.stats || args.hot.is_some() || args.sanitize.is_some() {
        expect_emulator(&device)?;
    }
    let emulated = device.info().driver == "emu";
    if let Some(checks) = args.sanitize {
        device = with_option(&device, &format!("sanitize={checks}"))?;
    }
    if args.stats || args.hot.is_some() || args.json && emulated {
        device = with_option(&device, "details=true")?;
    }
    let mut report = Report {
        operator: op.name,
        device: device.spec().into(),
        passed: false,
        error: None,
        fault: None,
        counters: None,
        kernels: Vec::new(),
    };
    let result = run_on(op, &device, &call, args, &mut report);
    if args.json {
        report.passed = result.is_ok();
        report.error = result.as_ref().err().map(Failure::to_string);
        out::json(&report)?;
    }
    result
}

fn run_on(op: &Operator, device: &Device, call: &HostCall, args: &Args, report: &mut Report) -> Result<()> {
    let outputs = execute(op, device, call, report)?;
    if args.sanitize.is_some() {
        expect_written(call, &outputs)?;
        let serial = with_option(device, "threads=1")?;
        let (counters, kernels) = (report.counters, std::mem::take(&mut report.kernels));
        expect_same(&outputs, &execute(op, &serial, call, report)?, device.spec(), serial.spec())?;
        (report.counters, report.kernels) = (counters, kernels);
    }
    if let Some(path) = &args.output {
        let about = [("format", "pt"), ("operator", op.name), ("device", device.spec())];
        tensors::write(path, &outputs, &about)?;
    }
    if let (true, false, Some(counters)) = (args.stats, args.json, &report.counters) {
        print_stats(op, call, &report.kernels, counters)?;
    }
    if let (Some(column), false) = (args.hot, args.json) {
        hot::print(&report.kernels, column, usize::MAX)?;
    }
    if args.check { check(op, call, &outputs, args.json) } else { Ok(()) }
}

/// The call that the command line describes.
fn call(op: &'static Operator, args: &Args) -> Result<HostCall> {
    let mut call: HostCall = Call::new(op);
    for (name, value) in &args.params {
        call.parse_scalar(name, value)?;
    }
    for name in &args.want {
        call.want(name)?;
    }
    for (name, tensor) in tensors::read(&args.input, op)? {
        call.set(&name, tensor)?;
    }
    call.check_complete()?;
    Ok(call)
}

fn expect_emulator(device: &Device) -> Result<()> {
    if device.info().driver == "emu" {
        return Ok(());
    }
    let text = "only the emulator counts and checks; choose it with --device emu:gfx942 or emu:gfx950";
    Err(Failure::new(format!("{}: {text}", device.spec())))
}

/// An emulated device with one more option.
fn with_option(device: &Device, option: &str) -> Result<Device> {
    let spec = device.spec();
    let separator = if spec.contains('?') { '&' } else { '?' };
    Ok(Device::open(&format!("{spec}{separator}{option}"))?)
}

/// Runs the operator; notes what was executed, or which kernel is at fault.
fn execute(op: &Operator, device: &Device, call: &HostCall, report: &mut Report) -> Result<Outputs> {
    let stream = device.create_stream()?;
    let outputs = op.execute(&stream, call).inspect_err(|error| {
        if let Error::Emulator { fault, .. } = error {
            report.fault = fault.clone();
        }
    })?;
    report.counters = stream.take_counters()?;
    report.kernels = stream.take_profiles()?;
    Ok(outputs)
}

/// Fails if a floating-point output has an element with the bits that it had before the run: all ones, a NaN that
/// arithmetic does not make. It can pass through from an input, so nothing is said if an input has one.
fn expect_written(call: &HostCall, outputs: &Outputs) -> Result<()> {
    let is_float = |t: &HostTensor| matches!(t.dtype(), DType::F32 | DType::F16 | DType::Bf16);
    let poisoned = |t: &HostTensor| {
        let mut elements = t.bytes().chunks_exact(t.dtype().size_bytes());
        elements.position(|bytes| bytes.iter().all(|b| *b == 0xff)).filter(|_| is_float(t))
    };
    if call.tensors().any(|(_, t)| poisoned(t).is_some()) {
        return Ok(());
    }
    match outputs.iter().find_map(|(name, t)| Some((name, poisoned(t)?))) {
        Some((name, i)) => Err(Failure::new(format!("output `{name}`: element {i} was not written"))),
        None => Ok(()),
    }
}

/// Fails if any bit differs.
fn expect_same(a: &Outputs, b: &Outputs, a_on: &str, b_on: &str) -> Result<()> {
    for ((name, x), (_, y)) in a.iter().zip(b) {
        if let Some(i) = x.bytes().iter().zip(y.bytes()).position(|(x, y)| x != y) {
            let element = i / x.dtype().size_bytes();
            let text =
                format!("output `{name}` depends on the order of workgroups: element {element} differs");
            return Err(Failure::new(format!("{text} between {a_on} and {b_on}")));
        }
    }
    Ok(())
}

/// Compares each output with the reference.
pub fn comparisons(op: &Operator, call: &HostCall, outputs: &Outputs) -> Result<Vec<Comparison>> {
    Ok(compare_outputs(op, call, outputs)?)
}

fn check(op: &Operator, call: &HostCall, outputs: &Outputs, quiet: bool) -> Result<()> {
    let all = comparisons(op, call, outputs)?;
    let mut table =
        Table::new(["output", "shape", ">worst error", ">of tolerance", ">correctly rounded", ""]);
    for c in &all {
        table.row([
            format!("{} {}", c.label, c.dtype),
            format!("{:?}", c.shape),
            c.worst.map_or("-".into(), |w| format!("{:.2e}", w.error)),
            c.worst.map_or("-".into(), |w| format!("{:.0} %", 100.0 * w.share())),
            format!("{:.2} %", 100.0 * c.rounded_share()),
            if c.passed() { "ok".into() } else { format!("{} of {} bad", c.bad, c.elements) },
        ]);
    }
    if !quiet {
        table.print()?;
    }
    let bad: Vec<_> = all.iter().filter(|c| !c.passed()).map(|c| c.to_string()).collect();
    if bad.is_empty() { Ok(()) } else { Err(Failure::new(bad.join("\n"))) }
}

fn print_stats(op: &Operator, call: &HostCall, kernels: &[Profile], c: &Counters) -> Result<()> {
    for Profile { kernel, launches, resources: r, .. } in kernels {
        let times = if *launches == 1 { String::new() } else { format!("{launches} launches, ") };
        out::print(format_args!(
            "{kernel}: {times}{} threads, {} VGPRs, {} AGPRs, {} SGPRs, {} of LDS, {} of scratch, {} waves per SIMD",
            r.threads,
            r.vgprs,
            r.agprs,
            r.sgprs,
            out::bytes(r.lds_bytes.into()),
            out::bytes(r.scratch_bytes.into()),
            r.waves_per_simd
        ))?;
    }
    out::executed(c).print()?;
    let d = c.details.unwrap_or_default();
    let floor = (op.traffic)(call);
    let mut table = Table::new([
        "global memory, bytes",
        ">by all lanes",
        ">distinct",
        ">floor",
        ">128 B lines of all instructions",
        ">distinct lines",
    ]);
    let (read, written) = (c.global_read_bytes, c.global_written_bytes);
    let rows = [
        ("read", [read, d.distinct_read_bytes, floor.read, d.global_read_lines, d.distinct_read_lines]),
        (
            "written",
            [
                written,
                d.distinct_written_bytes,
                floor.written,
                d.global_written_lines,
                d.distinct_written_lines,
            ],
        ),
    ];
    for (what, numbers) in rows {
        let [all, distinct, floor, lines, distinct_lines] = numbers.map(|n| n.to_string());
        table.row([what.into(), all, distinct, floor, lines, distinct_lines]);
    }
    table.print()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::bf16;

    fn y(values: [f32; 3]) -> Outputs {
        vec![("y", HostTensor::new([3], &values.map(bf16::from_f32)).unwrap())]
    }

    fn poison() -> HostTensor {
        HostTensor::new([3], &[bf16::ONE, bf16::ONE, bf16::from_bits(0xffff)]).unwrap()
    }

    #[test]
    fn outputs_that_differ_are_a_race() {
        assert!(expect_same(&y([1.0, 2.0, 3.0]), &y([1.0, 2.0, 3.0]), "a", "b").is_ok());
        let failure = expect_same(&y([1.0, 0.0, 3.0]), &y([1.0, -0.0, 3.0]), "a", "b").unwrap_err();
        let want = "output `y` depends on the order of workgroups: element 1 differs between a and b";
        assert_eq!(failure.to_string(), want);
    }

    #[test]
    fn elements_that_are_not_written_are_found() {
        let mut call: HostCall = Call::new(crate::operator("rmsnorm").unwrap());
        assert!(expect_written(&call, &y([1.0, f32::NAN, 3.0])).is_ok());
        let failure = expect_written(&call, &vec![("y", poison())]).unwrap_err();
        assert_eq!(failure.to_string(), "output `y`: element 2 was not written");
        // It may have come from there.
        call.set("x", poison()).unwrap();
        assert!(expect_written(&call, &vec![("y", poison())]).is_ok());
    }

    #[test]
    fn a_result_out_of_tolerance_fails_the_check() {
        let op = crate::operator("rmsnorm").unwrap();
        let call = op.example(&op.cases[1], 1).unwrap();
        let (_, want) = (op.reference)(&call).unwrap().remove(0);
        let mut values: Vec<bf16> = want.values.iter().map(|&x| hk_core::Float::from_f64(x)).collect();
        let outputs = |v: &[bf16]| vec![("y", HostTensor::new(&*want.shape, v).unwrap())];
        assert!(comparisons(op, &call, &outputs(&values)).unwrap().iter().all(Comparison::passed));
        values[77] = bf16::from_f32(values[77].to_f32() + 1.0);
        assert_eq!(comparisons(op, &call, &outputs(&values)).unwrap()[0].bad, 1);
        assert!(comparisons(op, &call, &Vec::new()).is_err());
        let short = vec![("y", HostTensor::new([3], &values[..3]).unwrap())];
        assert!(comparisons(op, &call, &short).is_err());
    }
}
