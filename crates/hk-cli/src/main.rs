//! The `hk` program; see the library.

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    match hk_cli::Cli::parse().execute() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}
