//! `hk time`: modelled time of operators, and of launches of AITER's code objects row by row.

use std::fs;
use std::path::{Path, PathBuf};

use hk_core::registry::{Operator, Scalar};
use hk_core::{Arch, Device, Modelled};
use hk_time::cu::{STALLS, UNITS};
use hk_time::parts::{PARTS, Part};
use hk_time::predict::predict;
use hk_time::rows::{COLUMNS, Rows};

use crate::bench::cases::{self, Case, Set};
use crate::inspect::{self, Tensor};
use crate::out::{self, Table};
use crate::{Failure, Result, run};

/// Options of `hk time`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Modelled times, never measured: docs/timing.md says how. With an operator, each launch of the call is \
    traced from sampled workgroups and replayed on the part; operands are cold. A launch that cannot be modelled says why, and \
    the exit status is 1. With --rows, such a row keeps an empty predicted_us and the reason in note."
)]
pub struct Args {
    /// The operator.
    #[arg(value_name = "OP", required_unless_present = "rows", conflicts_with = "rows")]
    operator: Option<String>,
    /// The case, by a part of its name. Default: the first.
    #[arg(long, value_name = "TEXT", conflicts_with = "tensors")]
    case: Option<String>,
    /// The sizes among which the case is. Default: those of the registry first, then the large ones.
    #[arg(long)]
    set: Option<Set>,
    /// A tensor of the call, instead of a case.
    #[arg(long = "tensor", value_name = "NAME=TYPE[SIZES]")]
    tensors: Vec<Tensor>,
    /// A parameter of the call, in place of the case's.
    #[arg(long = "param", value_name = "NAME=VALUE", conflicts_with = "rows", value_parser = run::parameter)]
    params: Vec<(String, String)>,
    /// Execute each launch after it is modelled, so that later ones see what it writes: for calls whose launches depend on data.
    /// Without it only sampled workgroups run, and a launch of any size takes seconds.
    #[arg(long)]
    execute: bool,
    #[command(flatten)]
    shown: Shown,
    /// Launches as CSV: id, gpu, co_path, co_rev, kernel_symbol, family, M, N, K, tile, params, grid, block, kernarg_bytes,
    /// extra_fill_bytes. Other columns are passed through.
    #[arg(long, value_name = "FILE", requires_all = ["objects", "out"])]
    rows: Option<PathBuf>,
    /// Directory of the code objects, as <co_rev>/<co_path>: crates/hk-time/validation/extract.py makes it.
    #[arg(long, value_name = "DIR", requires = "rows")]
    objects: Option<PathBuf>,
    /// Where the rows go, with predicted_us, bound and note.
    #[arg(long, value_name = "FILE", requires = "rows")]
    out: Option<PathBuf>,
    /// With --rows: replay every iteration of every loop.
    #[arg(long, requires = "rows")]
    exact: bool,
}

/// Which part, and what is shown of its launches.
#[derive(Debug, clap::Args)]
pub struct Shown {
    /// The part: mi300x, mi308x, mi325x, mi350x or mi355x. Default: mi325x; for gfx950 code objects mi355x.
    #[arg(long, value_name = "NAME")]
    part: Option<String>,
    /// Print the source lines that cost the waves most, with what they wait for.
    #[arg(long, value_name = "LINES", num_args = 0..=1, require_equals = true, default_missing_value = "20")]
    stalls: Option<usize>,
    /// Print counters by the names of rocprofv3 as CSV instead of tables.
    #[arg(long)]
    counters: bool,
    /// Write the waves of a compute unit over time, for Perfetto or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl Shown {
    /// The part that is named, or else that of the target.
    pub fn part_of(&self, arch: Arch) -> Result<&'static Part> {
        let Some(name) = &self.part else {
            return Part::of(arch).ok_or_else(|| Failure::new(format!("no part has the target {arch}")));
        };
        let names = || PARTS.map(|part| part.name).join(", ");
        Part::named(name)
            .ok_or_else(|| Failure::new(format!("--part: no part `{name}`, expected one of {}", names())))
    }

    /// Fails if there is anything to show.
    pub fn expect_none(&self) -> Result<()> {
        if self.part.is_some() || self.stalls.is_some() || self.counters || self.trace.is_some() {
            return Err(Failure::new("--part, --stalls, --counters and --trace need --time"));
        }
        Ok(())
    }

    /// Prints launches, and fails if one is not modelled.
    pub fn print(&self, part: &Part, launches: &[Modelled]) -> Result<()> {
        if self.counters {
            out::print("Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value")?;
            for (i, launch) in launches.iter().enumerate() {
                for (name, value) in launch.iter().flat_map(|launch| launch.counters()) {
                    out::print(format_args!(
                        "{},{},{name},{value:.0}",
                        i + 1,
                        launch.as_ref().map_or("", |l| &l.kernel)
                    ))?;
                }
            }
        } else {
            self.tables(part, launches)?;
        }
        if let Some(path) = &self.trace {
            let events: Vec<_> =
                launches.iter().flatten().enumerate().flat_map(|(i, launch)| launch.chrome(i)).collect();
            let text = serde_json::to_string(&serde_json::json!({"traceEvents": events}))?;
            fs::write(path, text).map_err(|e| Failure::file(path, e))?;
        }
        let failed: Vec<&str> = launches.iter().filter_map(|l| l.as_ref().err()).map(|why| &**why).collect();
        if failed.is_empty() { Ok(()) } else { Err(Failure::new(failed.join("\n"))) }
    }

    fn tables(&self, part: &Part, launches: &[Modelled]) -> Result<()> {
        out::print(format_args!("{}: {}\n", part.name, part.error()))?;
        let units = UNITS.map(|unit| format!(">{unit}"));
        let header = ["kernel", ">workgroups", ">modelled us", "bound by", ">MHz"];
        let mut table = Table::new(header.into_iter().chain(units.iter().map(|unit| &**unit)));
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let mut total = 0.0;
        for launch in launches.iter().flatten() {
            let p = &launch.prediction;
            total += p.us;
            let workgroups: u64 = launch.grid.iter().map(|n| u64::from(*n)).product();
            let cells = [
                launch.kernel.clone(),
                workgroups.to_string(),
                format!("{:.2}", p.us),
                p.bound.into(),
                format!("{:.0}", p.mhz),
            ];
            table.row(cells.into_iter().chain(p.busy.map(percent)));
        }
        table.print()?;
        if launches.len() > 1 {
            out::print(format_args!("\n{} launches: {total:.2} modelled us", launches.len()))?;
        }
        let Some(top) = self.stalls else { return Ok(()) };
        for launch in launches.iter().flatten() {
            out::print(format_args!("\n{}: wave clocks by source line\n", launch.kernel))?;
            let stalls = STALLS.map(|reason| format!(">{reason}"));
            let mut table =
                Table::new(["line", ">share", ">issue"].into_iter().chain(stalls.iter().map(|s| &**s)));
            let lines = launch.lines();
            let all: f64 = lines.iter().flat_map(|line| line.spent).sum();
            for line in lines.iter().take(top) {
                let sum: f64 = line.spent.iter().sum();
                let shares = line.spent.map(|clocks| percent(clocks / all.max(1.0)));
                table.row([line.name.clone(), percent(sum / all.max(1.0))].into_iter().chain(shares));
            }
            table.print()?;
        }
        Ok(())
    }
}

pub fn run(args: &Args) -> Result<()> {
    match (&args.operator, &args.rows, &args.objects, &args.out) {
        (Some(operator), ..) => operator_time(crate::operator(operator)?, args),
        (None, Some(rows), Some(objects), Some(out)) => rows_time(rows, objects, out, args.exact),
        _ => Err(Failure::new("an operator, or --rows, --objects and --out are needed")),
    }
}

/// The call of the command line.
fn chosen(op: &'static Operator, args: &Args) -> Result<Case> {
    if !args.tensors.is_empty() {
        let call = inspect::described(op, &args.tensors, &args.params)?;
        return Ok(Case { label: "as given".into(), call });
    }
    let part = args.case.as_deref().unwrap_or("");
    let mut all = cases::of(op, args.set.unwrap_or(Set::All))?;
    let labels: Vec<_> = all.iter().map(|case| format!("`{}`", case.label)).collect();
    match all.iter().position(|case| case.label.contains(part)) {
        Some(i) => {
            let mut case = all.swap_remove(i);
            run::set_scalars(&mut case.call, &args.params)?;
            Ok(case)
        }
        None => Err(Failure::new(format!(
            "{}: no case `{part}`, expected a part of {}",
            op.name,
            labels.join(", ")
        ))),
    }
}

fn operator_time(op: &'static Operator, args: &Args) -> Result<()> {
    let part = args.shown.part_of(Arch::Gfx942)?;
    let case = chosen(op, args)?;
    let mut call = cases::with_even_routing(case.call.sample(1)?)?;
    for (name, value) in run::fp8_of(part.arch, op, &args.params) {
        call.set_scalar(name, Scalar::Choice(value))?;
    }
    call.check_complete()?;
    let sampled = if args.execute { "" } else { "&sampled=true" };
    // Grids and choices of kernels follow from the device's CUs.
    let (arch, name, cus) = (part.arch, part.name, part.cus());
    let spec = format!("emu:{arch}?details=true&time={name}&cus={cus}{sampled}");
    let stream = Device::open(&spec)?.create_stream()?;
    op.execute(&stream, &call)?;
    let launches = stream.take_launches()?;
    if !args.shown.counters {
        out::print(format_args!("{}, {}", op.name, case.label))?;
    }
    args.shown.print(part, &launches)
}

fn rows_time(rows: &Path, objects: &Path, out: &Path, exact: bool) -> Result<()> {
    let text = fs::read_to_string(rows).map_err(|e| Failure::file(rows, e))?;
    let rows = Rows::parse(&text)
        .map_err(|e| Failure::file(rows, format!("{e}; expected {}", COLUMNS.join(", "))))?;
    if !objects.is_dir() {
        return Err(Failure::file(objects, "no directory of code objects"));
    }
    let (bytes, failed) = predict(&rows, objects, exact)?;
    fs::write(out, bytes).map_err(|e| Failure::file(out, e))?;
    if failed == 0 {
        return Ok(());
    }
    let all = rows.rows.len();
    Err(Failure::file(out, format!("{failed} of {all} rows are not modelled; the column note says why")))
}
