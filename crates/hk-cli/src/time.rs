//! `hk time`: modelled time of launches of code objects, row by row.

use std::fs;
use std::path::PathBuf;

use hk_time::predict::predict;
use hk_time::rows::{COLUMNS, Rows};

use crate::{Failure, Result};

/// Options of `hk time`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Modelled times, never measured: docs/timing.md has their error. A row that cannot be modelled keeps an \
    empty predicted_us and the reason in note; the exit status is then 1."
)]
pub struct Args {
    /// Launches as CSV: id, gpu, co_path, co_rev, kernel_symbol, family, M, N, K, tile, params, grid, block, kernarg_bytes,
    /// extra_fill_bytes. Other columns are passed through.
    #[arg(long, value_name = "FILE")]
    rows: PathBuf,
    /// Directory of the code objects, as <co_rev>/<co_path>: crates/hk-time/validation/extract.py makes it.
    #[arg(long, value_name = "DIR")]
    objects: PathBuf,
    /// Where the rows go, with predicted_us, bound and note.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replay every iteration of every loop.
    #[arg(long)]
    exact: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let text = fs::read_to_string(&args.rows).map_err(|e| Failure::file(&args.rows, e))?;
    let rows = Rows::parse(&text)
        .map_err(|e| Failure::file(&args.rows, format!("{e}; expected {}", COLUMNS.join(", "))))?;
    if !args.objects.is_dir() {
        return Err(Failure::file(&args.objects, "no directory of code objects"));
    }
    let (bytes, failed) = predict(&rows, &args.objects, args.exact)?;
    fs::write(&args.out, bytes).map_err(|e| Failure::file(&args.out, e))?;
    if failed == 0 {
        return Ok(());
    }
    let all = rows.rows.len();
    Err(Failure::file(
        &args.out,
        format!("{failed} of {all} rows are not modelled; the column note says why"),
    ))
}
