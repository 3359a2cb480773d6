//! `cargo xtask fit-timing`: the fit of the timing model's constants, from AITER's code objects.

use std::path::PathBuf;

use crate::run::{cargo, execute};
use crate::{Failure, Result};

/// Options of `fit-timing`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The directory of code objects, as `<co_rev>/<co_path>`: `crates/hk-time/validation/extract.py` makes it.
    #[arg(long, value_name = "DIR")]
    objects: PathBuf,
    /// Launches with measured times. Default: `crates/hk-time/data/calibration.csv`.
    #[arg(long, value_name = "FILE")]
    rows: Option<PathBuf>,
    /// Folds of the cross-validation.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(2..))]
    folds: Option<u16>,
    /// Iterations of each fit.
    #[arg(long, value_name = "N")]
    iterations: Option<u16>,
    /// Write each launch with its held-out prediction as CSV.
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Write `data/fitted.csv` and `data/errors.csv` of hk-time and `docs/timing.svg`.
    #[arg(long)]
    update: bool,
}

/// Has hk-time's `fit-timing` fit the constants and print the held-out error.
pub(crate) fn fit(args: &Args) -> Result {
    if !args.objects.is_dir() {
        let dir = args.objects.display();
        return Err(Failure(format!(
            "--objects: no directory {dir}; `crates/hk-time/validation/extract.py` makes one"
        )));
    }
    let mut command = cargo(&["run", "--package", "hk-time", "--bin", "fit-timing", "--"]);
    let files = [("--objects", Some(&args.objects)), ("--rows", args.rows.as_ref())];
    for (option, file) in files.into_iter().chain([("--cases", args.cases.as_ref())]) {
        if let Some(file) = file {
            // cargo runs it in the workspace's directory.
            command.arg(option).arg(std::path::absolute(file)?);
        }
    }
    for (option, number) in [("--folds", args.folds), ("--iterations", args.iterations)] {
        command.args(number.iter().flat_map(|n| [option.to_owned(), n.to_string()]));
    }
    execute(command.args(args.update.then_some("--update")))
}
