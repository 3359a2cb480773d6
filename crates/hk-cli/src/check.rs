//! `hk check`: a HIP program under the emulator's sanitizers.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use hk_emu::Checks;

use crate::{Failure, Result};

/// Options of `hk check`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "`cargo xtask hip-runtime --release` makes the library. The exit code is the program's, or that of \
                        --error-exitcode if anything was reported."
)]
pub struct Args {
    /// What is checked, beside accesses that are out of bounds, which always are.
    #[arg(long, value_enum, default_value = "all", conflicts_with = "checks")]
    tool: Tool,
    /// Checks by their names instead: uninit, lds, global, waits, hazards, barriers, streams; separated by commas.
    #[arg(long)]
    checks: Option<Checks>,
    /// Devices of the program, as in HK_EMU_ARCH: `gfx942`, `gfx950`, `gfx942*8`, ..
    #[arg(long)]
    device: Option<String>,
    /// Check only kernels of this name; `*` is any text. May be given again.
    #[arg(long, value_name = "PATTERN")]
    kernel_name: Vec<String>,
    /// Kernels that do not run under some checks: lines of CHECKS:PATTERN.
    #[arg(long, value_name = "FILE")]
    suppressions: Option<PathBuf>,
    /// Exit code if anything was reported.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    error_exitcode: Option<u8>,
    /// Report memory that is not freed at exit.
    #[arg(long, value_enum, default_value = "no")]
    leak_check: Leaks,
    /// Whether reports have the host's stack.
    #[arg(long, value_enum, default_value = "yes")]
    show_backtrace: Answer,
    /// Write reports to this file as well, a JSON object on each line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print what each kernel executed.
    #[arg(long)]
    stats: bool,
    /// Directory of libamdhip64.so; that of this build if it is not given.
    #[arg(long, value_name = "DIR")]
    library: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// The tools of compute-sanitizer, and all of them.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Tool {
    All,
    /// Out of bounds, use after free, misaligned: checked under every tool.
    Memcheck,
    /// Races in LDS, in global memory, and between streams.
    Racecheck,
    /// Values that were never written.
    Initcheck,
    /// Barriers and waits.
    Synccheck,
}

#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
enum Leaks {
    No,
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
enum Answer {
    No,
    Yes,
}

impl Tool {
    /// As `HK_SANITIZE`.
    fn checks(self) -> &'static str {
        match self {
            Tool::All => "all",
            Tool::Memcheck => "none",
            Tool::Racecheck => "lds,global,streams",
            Tool::Initcheck => "uninit",
            Tool::Synccheck => "barriers,waits,hazards",
        }
    }
}

/// The directory of the library: `hip/lib` beside the directory of this program.
fn library(given: Option<&Path>) -> Result<PathBuf> {
    let built = || Some(std::env::current_exe().ok()?.parent()?.parent()?.join("hip/lib"));
    let directory = given.map(Path::to_owned).or_else(built).unwrap_or_default();
    if directory.join("libamdhip64.so").is_file() {
        return Ok(directory);
    }
    Err(Failure::file(
        &directory,
        "no libamdhip64.so: `cargo xtask hip-runtime --release` makes one, --library names its directory",
    ))
}

impl Args {
    /// `HK_SANITIZE_OPTIONS`.
    fn options(&self) -> Result<String> {
        let file = |path: &Path| -> Result<String> {
            // The program may change its directory.
            let path = std::path::absolute(path)?;
            path.to_str().map(str::to_owned).ok_or_else(|| Failure::file(&path, "not UTF-8"))
        };
        let mut options: Vec<(&str, String)> =
            self.kernel_name.iter().map(|pattern| ("kernel-name", pattern.clone())).collect();
        if let Some(path) = &self.suppressions {
            options.push(("suppressions", file(path)?));
        }
        options.extend(self.error_exitcode.map(|code| ("error-exitcode", code.to_string())));
        if self.leak_check == Leaks::Full {
            options.push(("leak-check", "full".into()));
        }
        if self.show_backtrace == Answer::No {
            options.push(("backtrace", "no".into()));
        }
        if let Some(path) = &self.json {
            options.push(("json", file(path)?));
        }
        if let Some((key, value)) = options.iter().find(|(_, value)| value.contains(',')) {
            return Err(Failure::new(format!("{key}: `{value}` has a comma, which separates options")));
        }
        let text: Vec<String> = options.iter().map(|(key, value)| format!("{key}={value}")).collect();
        Ok(text.join(","))
    }

    fn command(&self) -> Result<Command> {
        let mut path = library(self.library.as_deref())?.into_os_string();
        if let Some(more) = std::env::var_os("LD_LIBRARY_PATH").filter(|more| !more.is_empty()) {
            path.push(":");
            path.push(more);
        }
        let (program, arguments) =
            self.program.split_first().ok_or_else(|| Failure::new("no program is given"))?;
        let checks = self.checks.map_or(self.tool.checks().to_owned(), |checks| checks.to_string());
        let mut command = Command::new(program);
        command.args(arguments).env("LD_LIBRARY_PATH", path).env("HK_SANITIZE", checks);
        command.env("HK_SANITIZE_OPTIONS", self.options()?);
        command.envs(self.device.as_ref().map(|device| ("HK_EMU_ARCH", device)));
        command.envs(self.stats.then_some(("HK_STATS", "1")));
        Ok(command)
    }
}

pub fn run(args: &Args) -> Result<()> {
    let mut command = args.command()?;
    let failed = |error: std::io::Error, program: &OsStr| Failure::file(Path::new(program), error);
    #[cfg(unix)]
    {
        // In the place of this process: its exit code, and its signals.
        let error = std::os::unix::process::CommandExt::exec(&mut command);
        Err(failed(error, command.get_program()))
    }
    #[cfg(not(unix))]
    {
        let status = command.status().map_err(|error| failed(error, command.get_program()))?;
        std::process::exit(status.code().unwrap_or(1))
    }
}
