//! `hk run`.

use crate::out::{self, Table};
use crate::{Failure, Result, hot, tensors};
use hk_core::registry::{Call, Described, HostCall, HostTensor, HostTensorF64, Operator, POISON, Scalar};
use hk_core::{Arch, Checks, Counters, DType, Device, Error, Fault, Profile};
use hk_emu::{Clocks, Costs};
use hk_testkit::compare::{Comparison, compare_outputs};
use serde::Serialize;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::Once;

/// Options of `hk run`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Tensors go by the names of the operator's arguments, which `hk inspect OP` lists. A \
    tensor that the operator updates in place is given as an input and comes back as an output of the same name. \
    A parameter that chooses between fp8e4m3 and fp8e4m3fnuz is by default the fp8 of the device. The output file is \
    written last, and only if nothing failed."
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
    /// Clocks that this keeps the units of a compute unit busy.
    clocks: Option<Clocks>,
    /// The same by kernel and source line.
    kernels: Vec<Profile>,
}

/// `NAME=VALUE`.
pub fn parameter(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("expected NAME=VALUE".into()),
    }
}

type Outputs = Vec<(&'static str, HostTensor)>;

pub fn run(args: &Args) -> Result<()> {
    let op = crate::operator(&args.operator)?;
    let mut call = call(op, args)?;
    let mut device = match &args.device {
        Some(spec) => Device::open(spec)?,
        None => Device::open_default()?,
    };
    for (name, value) in fp8_of(device.arch(), op, &args.params) {
        call.set_scalar(name, Scalar::Choice(value))?;
        eprintln!("{name}={value}, the fp8 of {} (--param {name}=.. chooses another)", device.arch());
    }
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
        clocks: None,
        kernels: Vec::new(),
    };
    let result = run_on(op, &device, &call, args, &mut report);
    if args.json {
        report.passed = result.is_ok();
        report.clocks = report.counters.map(|c| Costs::of(device.arch()).clocks(&c));
        report.error = result.as_ref().err().map(Failure::to_string);
        out::json(&report)?;
    }
    result
}

fn run_on(op: &Operator, device: &Device, call: &HostCall, args: &Args, report: &mut Report) -> Result<()> {
    let outputs = execute(op, device, call, POISON, report)?;
    if args.sanitize.is_some() {
        let serial = with_option(device, "threads=1")?;
        let (counters, kernels) = (report.counters, std::mem::take(&mut report.kernels));
        let again = execute(op, &serial, call, OTHER_POISON, report)?;
        expect_written_and_same(call, &outputs, &again, [device.spec(), serial.spec()])?;
        (report.counters, report.kernels) = (counters, kernels);
    }
    if let (true, false, Some(counters)) = (args.stats, args.json, &report.counters) {
        print_stats(op, call, &report.kernels, counters)?;
    }
    if let (Some(column), false) = (args.hot, args.json) {
        hot::print(&report.kernels, column, usize::MAX)?;
    }
    if args.check {
        check(op, call, &outputs, args.json)?;
    }
    if let Some(path) = &args.output {
        let about = [("format", "pt"), ("operator", op.name), ("device", device.spec())];
        tensors::write(path, &outputs, &about)?;
    }
    Ok(())
}

/// Another fill than [`POISON`], of which no byte has the same bits.
const OTHER_POISON: u8 = !POISON;

/// For each parameter that the command line leaves open and that chooses between both encodings of fp8: that of the target.
pub fn fp8_of(arch: Arch, op: &Operator, params: &[(String, String)]) -> Vec<(&'static str, &'static str)> {
    let own = DType::fp8_of(arch).name();
    let both = [DType::Fp8E4M3, DType::Fp8E4M3Fnuz].map(DType::name);
    let by_default = |default: Scalar| matches!(default, Scalar::Choice(c) if both.contains(&c));
    op.scalars
        .iter()
        .filter(|s| by_default(s.default) && both.iter().all(|name| s.choices.contains(name)))
        .filter(|s| params.iter().all(|(name, _)| name != s.name))
        .map(|s| (s.name, own))
        .collect()
}

/// The call that the command line describes.
fn call(op: &'static Operator, args: &Args) -> Result<HostCall> {
    let mut call: HostCall = Call::new(op);
    set_scalars(&mut call, &args.params)?;
    for name in &args.want {
        call.want(name)?;
    }
    for (name, tensor) in tensors::read(&args.input, op)? {
        call.set(&name, tensor)?;
    }
    call.check_complete()?;
    Ok(call)
}

/// Sets the parameters of a command line, each at most once.
pub fn set_scalars<V: Described>(call: &mut Call<V>, params: &[(String, String)]) -> Result<()> {
    for (i, (name, value)) in params.iter().enumerate() {
        if params[..i].iter().any(|(other, _)| other == name) {
            return Err(Failure::new(format!("--param {name}: given twice")));
        }
        call.parse_scalar(name, value)?;
    }
    Ok(())
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
fn execute(
    op: &Operator,
    device: &Device,
    call: &HostCall,
    fill: u8,
    report: &mut Report,
) -> Result<Outputs> {
    let stream = device.create_stream()?;
    let outputs = op.execute_filled(&stream, call, fill).inspect_err(|error| {
        if let Error::Emulator { fault, .. } = error {
            report.fault = fault.clone();
        }
    })?;
    report.counters = stream.take_counters()?;
    report.kernels = stream.take_profiles()?;
    Ok(outputs)
}

/// Compares a run over [`POISON`] with one over [`OTHER_POISON`]. Fails if an element has the bits of the poison in both, unless
/// the reference says that the operator leaves it untouched, and if any other bit differs.
fn expect_written_and_same(call: &HostCall, a: &Outputs, b: &Outputs, on: [&str; 2]) -> Result<()> {
    let all = |bytes: &[u8], poison: u8| bytes.iter().all(|b| *b == poison);
    let mut reference = None;
    for ((name, x), (_, y)) in a.iter().zip(b) {
        let size = x.dtype().size_bytes();
        for (i, (p, q)) in x.bytes().chunks_exact(size).zip(y.bytes().chunks_exact(size)).enumerate() {
            if p == q {
                continue;
            }
            if !(all(p, POISON) && all(q, OTHER_POISON)) {
                let what = format!("output `{name}` depends on the order of workgroups: element {i} differs");
                return Err(Failure::new(format!("{what} between {} and {}", on[0], on[1])));
            }
            if reference.is_none() {
                reference = Some(guarded(|| (call.operator().reference)(call))?);
            }
            let want = reference.iter().flatten().find(|(n, _)| n == name).map(|(_, want)| want);
            // Pairs of fp4 are two values.
            let value = |want: &HostTensorF64| {
                want.values.get(i * want.values.len() / (x.bytes().len() / size)).copied()
            };
            if !want.and_then(value).is_some_and(HostTensorF64::is_untouched) {
                return Err(Failure::new(format!("output `{name}`: element {i} was not written")));
            }
        }
    }
    Ok(())
}

thread_local! {
    /// A reference is at work on this thread: its panics are answers.
    static IN_REFERENCE: Cell<bool> = const { Cell::new(false) };
}

/// What a reference answers; a panic of it, which should not be, is a failure, too.
fn guarded<T>(reference: impl FnOnce() -> hk_core::Result<T>) -> Result<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IN_REFERENCE.get() {
                hook(info);
            }
        }));
    });
    IN_REFERENCE.set(true);
    let answer = panic::catch_unwind(AssertUnwindSafe(reference));
    IN_REFERENCE.set(false);
    match answer {
        Ok(answer) => Ok(answer?),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            Err(Failure::new(format!("the f64 reference cannot be computed for these values: {text}")))
        }
    }
}

/// Compares each output with the reference.
pub fn comparisons(op: &Operator, call: &HostCall, outputs: &Outputs) -> Result<Vec<Comparison>> {
    guarded(|| compare_outputs(op, call, outputs))
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

    /// Of `rmsnorm` on three columns: `y` after a run over each poison.
    fn runs(a: [u16; 3], b: [u16; 3]) -> Result<()> {
        let op = crate::operator("rmsnorm").unwrap();
        let mut call: HostCall = Call::new(op);
        call.set("x", HostTensor::new([1, 3], &[bf16::ONE; 3]).unwrap()).unwrap();
        call.set("weight", HostTensor::new([3], &[bf16::ONE; 3]).unwrap()).unwrap();
        let [a, b] = [a, b].map(|y| vec![("y", HostTensor::new([1, 3], &y.map(bf16::from_bits)).unwrap())]);
        expect_written_and_same(&call, &a, &b, ["a", "b"])
    }

    #[test]
    fn outputs_that_differ_are_a_race() {
        assert!(runs([1, 2, 3], [1, 2, 3]).is_ok());
        let want = "output `y` depends on the order of workgroups: element 1 differs between a and b";
        assert_eq!(runs([1, 0, 3], [1, 0x8000, 3]).unwrap_err().to_string(), want);
        assert_eq!(runs([1, 0xffff, 3], [1, 0xff00, 3]).unwrap_err().to_string(), want);
    }

    #[test]
    fn elements_that_are_not_written_are_found() {
        let failure = runs([1, 2, 0xffff], [1, 2, 0]).unwrap_err();
        assert_eq!(failure.to_string(), "output `y`: element 2 was not written");
        // A NaN of the poison's bits that is written, such as a signalling one made quiet.
        assert!(runs([1, 2, 0xffff], [1, 2, 0xffff]).is_ok());
        assert!(runs([1, 2, 0], [1, 2, 0]).is_ok());
    }

    #[test]
    fn a_panic_of_a_reference_is_a_failure() {
        let failure = guarded::<()>(|| panic!("index {} out of range", 7)).unwrap_err().to_string();
        assert!(failure.ends_with("for these values: index 7 out of range"), "{failure}");
        assert!(guarded(|| Ok(1)).is_ok());
    }

    #[test]
    fn fp8_is_that_of_the_device_unless_it_is_chosen() {
        let op = crate::operator("per_token_quant").unwrap();
        let chosen = [("output".to_owned(), "i8".to_owned())];
        assert_eq!(fp8_of(Arch::Gfx942, op, &[]), [("output", "fp8e4m3fnuz")]);
        assert_eq!(fp8_of(Arch::Gfx950, op, &[]), [("output", "fp8e4m3")]);
        assert!(fp8_of(Arch::Gfx942, op, &chosen).is_empty());
        assert!(fp8_of(Arch::Gfx942, crate::operator("rmsnorm").unwrap(), &[]).is_empty());
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
