//! `cargo xtask build-all`

use std::fs;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use hk_build::{Arch, Builder, Built, Compiler, Error, ObjectEntry, Search, Unit};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::{Failure, Result, run};

/// Options of `build-all`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Targets, comma-separated: gfx942, gfx950, sm_90, sm_90a. Default: HK_TARGETS, or gfx942,gfx950.
    #[arg(long)]
    targets: Option<String>,
    /// Write the manifest as JSON to FILE, or to standard output in place of the table.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Compile everything even if the cache has it.
    #[arg(long)]
    cold: bool,
    /// Only check the sources, by the compiler's front end: no code is generated, and the cache does not matter.
    #[arg(long, conflicts_with = "json")]
    check: bool,
    /// Compilers to run at the same time. Default: one per core.
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// The workspace to build, if it is not this one.
    #[arg(long, hide = true)]
    root: Option<PathBuf>,
}

/// The manifest that `--json` writes.
#[derive(Serialize)]
struct Manifest {
    compiler: String,
    seconds: f64,
    objects: Vec<ObjectEntry>,
    failures: Vec<String>,
}

/// Finds the compiler and builds; a failure of any kernel is one of the command.
pub(crate) fn run(args: &Args) -> Result {
    let targets = match (&args.targets, std::env::var("HK_TARGETS")) {
        (Some(list), _) => hk_build::parse_targets(list)?,
        (None, Ok(list)) if !list.trim().is_empty() => hk_build::parse_targets(&list)?,
        _ => hk_build::DEFAULT_TARGETS.into(),
    };
    let compiler = Search::from_env().find()?;
    let root = args.root.clone().unwrap_or_else(run::workspace_root);
    let jobs = args.jobs.or_else(|| std::env::var("NUM_JOBS").ok()?.parse().ok());
    if args.check {
        return check(&root, compiler, &targets, jobs);
    }
    let built = build(&root, compiler, &targets, args.cold, jobs)?;
    match &args.json {
        Some(file) if file == Path::new("-") => writeln!(std::io::stdout(), "{}", built.json()?)?,
        file => {
            built.print();
            built.summary();
            if let Some(file) = file {
                let json = built.json()? + "\n";
                fs::write(file, json).map_err(|e| Failure(format!("{}: {e}", file.display())))?;
            }
        }
    }
    built.check()
}

/// `--check`.
fn check(root: &Path, compiler: Compiler, targets: &[Arch], jobs: Option<usize>) -> Result {
    let start = Instant::now();
    let units = discover(root, targets)?;
    let builder = builder(compiler, hk_build::cache_dir(&std::env::current_exe()?), jobs);
    let mut failures = Vec::new();
    for (unit, result) in units.iter().zip(builder.check_all(&units)) {
        match result {
            Ok(warnings) if warnings.is_empty() => {}
            Ok(warnings) => eprintln!("{} for {}:\n{warnings}", unit.label(), unit.arch),
            Err(e) => failures.push(e.to_string()),
        }
    }
    let (seconds, compiler) = (start.elapsed().as_secs_f64(), builder.compiler());
    match failures.len() {
        0 => println!("{} sources by targets are right, {seconds:.2} s, {compiler}", units.len()),
        n => return Err(Failure(format!("{n} of {} sources failed\n{}", units.len(), failures.join("\n")))),
    }
    Ok(())
}

fn builder(compiler: Compiler, cache: PathBuf, jobs: Option<usize>) -> Builder {
    let builder = Builder::new(compiler, cache);
    match jobs {
        Some(jobs) => builder.threads(jobs),
        None => builder,
    }
}

/// What was built.
pub(crate) struct Outcome {
    compiler: Compiler,
    seconds: f64,
    built: Vec<Built>,
    failures: Vec<String>,
}

/// Builds the kernels of every crate, showing progress on stderr.
pub(crate) fn build(
    root: &Path,
    compiler: Compiler,
    targets: &[Arch],
    cold: bool,
    jobs: Option<usize>,
) -> Result<Outcome> {
    let start = Instant::now();
    let units = discover(root, targets)?;
    let scratch = root.join("target/hk-cache-cold");
    let cache = match cold {
        true => {
            let _ = fs::remove_dir_all(&scratch);
            scratch.clone()
        }
        false => hk_build::cache_dir(&std::env::current_exe()?),
    };
    let builder = builder(compiler, cache, jobs);
    eprintln!("compiling {} objects with {}", units.len(), builder.compiler());
    let progress = Progress::new(units.len());
    let results = builder.compile_all(&units, |unit, result| progress.done(unit, result));
    progress.bar.finish_and_clear();
    if cold {
        let _ = fs::remove_dir_all(&scratch);
    }
    let (mut built, mut failures) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(b) => built.push(b),
            Err(e) => failures.push(e.to_string()),
        }
    }
    Ok(Outcome {
        compiler: builder.compiler().clone(),
        seconds: start.elapsed().as_secs_f64(),
        built,
        failures,
    })
}

/// Every `crates/*/hip/*.hip`, with the include directories that the package's build script has.
pub(crate) fn discover(root: &Path, targets: &[Arch]) -> Result<Vec<Unit>> {
    let crates = root.join("crates");
    let entries = fs::read_dir(&crates).map_err(|e| Failure(format!("{}: {e}", crates.display())))?;
    let mut packages: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.join("hip").is_dir()).collect();
    packages.sort();
    let mut units = Vec::new();
    for package in packages {
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        let includes = hk_build::package_includes(&package)?;
        units.extend(hk_build::package_units(&name, &package, "hip", &includes, targets)?);
    }
    if units.is_empty() {
        return Err(Failure(format!("no kernels: no crates/*/hip/*.hip in {}", root.display())));
    }
    Ok(units)
}

/// A bar on a terminal, a line per object elsewhere.
struct Progress {
    bar: ProgressBar,
    lines: bool,
}

impl Progress {
    fn new(n: usize) -> Progress {
        let bar = ProgressBar::new(n as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {msg}") {
            bar.set_style(style);
        }
        // A kernel file takes seconds: the time has to move in between.
        bar.enable_steady_tick(Duration::from_millis(200));
        Progress { bar, lines: !std::io::stderr().is_terminal() }
    }

    fn done(&self, unit: &Unit, result: &std::result::Result<Built, Error>) {
        self.bar.inc(1);
        let what = format!("{} for {}", unit.label(), unit.arch);
        if !self.lines {
            self.bar.set_message(what);
            return;
        }
        let how = match result {
            Ok(built) if built.cached => "cached".into(),
            Ok(built) => format!("{:.2} s", built.elapsed.as_secs_f64()),
            Err(_) => "FAILED".into(),
        };
        eprintln!("[{}/{}] {what}: {how}", self.bar.position(), self.bar.length().unwrap_or(0));
    }
}

impl Outcome {
    /// The table of kernels, on stdout.
    fn print(&self) {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        let header = [
            "source",
            "target",
            "kernel",
            "threads",
            "VGPR",
            "AGPR",
            "SGPR",
            "LDS B",
            "scratch B",
            "spills",
            "waves/SIMD",
        ];
        table.set_header(header);
        for column in 3..header.len() {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        for built in &self.built {
            let label = || vec![built.unit.label(), built.unit.arch.to_string()];
            for kernel in &built.kernels {
                let Some(r) = &kernel.resources else { continue };
                let spills = r.vgpr_spills + r.sgpr_spills;
                let numbers =
                    [r.max_threads, r.vgprs, r.agprs, r.sgprs, r.lds_bytes, r.scratch_bytes, spills];
                let mut row = label();
                row.push(kernel.name.clone());
                row.extend(numbers.iter().chain([&r.occupancy]).map(u32::to_string));
                table.add_row(row);
            }
            // Registers of PTX are allocated when it is loaded.
            if !built.unit.arch.is_amd() {
                let mut row = label();
                row.push(format!("({} kernels in {} B of PTX)", built.kernels.len(), built.bytes.len()));
                row.resize(header.len(), "-".into());
                table.add_row(row);
            }
        }
        println!("{table}");
    }

    /// What the compiler warned of, on stderr, and one line of totals on stdout.
    pub(crate) fn summary(&self) {
        for built in self.built.iter().filter(|b| !b.warnings.is_empty()) {
            eprintln!("{} for {}:\n{}", built.unit.label(), built.unit.arch, built.warnings);
        }
        let cached = self.built.iter().filter(|b| b.cached).count();
        let kernels: usize = self.built.iter().map(|b| b.kernels.len()).sum();
        let (objects, seconds, compiler) = (self.built.len(), self.seconds, &self.compiler);
        println!(
            "{objects} objects ({cached} from the cache), {kernels} kernels, {seconds:.2} s, {compiler}"
        );
    }

    fn json(&self) -> Result<String> {
        let manifest = Manifest {
            compiler: self.compiler.to_string(),
            seconds: self.seconds,
            objects: self.built.iter().map(Built::entry).collect(),
            failures: self.failures.clone(),
        };
        Ok(serde_json::to_string_pretty(&manifest)?)
    }

    /// Fails with the text of every failure.
    pub(crate) fn check(&self) -> Result {
        match self.failures.len() {
            0 => Ok(()),
            n => Err(Failure(format!(
                "{n} of {} objects failed\n{}",
                n + self.built.len(),
                self.failures.join("\n")
            ))),
        }
    }
}
