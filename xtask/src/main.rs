//! `cargo xtask`: build, test, demo and report commands of the workspace.
//!
//! This program depends on `hk-build` but on no crate that embeds kernels. The kernels are embedded when such a crate is
//! compiled; were it a dependency, a fresh machine would compile it before this program could install the compiler that
//! it needs. So commands that run kernels set the machine up first and then have cargo build and run the rest: `hk` for
//! `demo` and `status`, the test runner for `test`. A build script that found no compiler runs again by itself.

mod build_all;
mod demo;
mod doctor;
mod hip;
mod interface;
mod isa;
mod kernels;
mod run;
mod setup;
mod timing;
mod tools;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build, test, demo and report commands of the workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Say what this machine has, and how to get what is missing.
    Doctor,
    /// Get the compiler: find it, or install it with apt (as root or through sudo).
    Setup(setup::Args),
    /// Compile all kernels of all crates for all targets, and list what each needs.
    BuildAll(build_all::Args),
    /// Compare the committed interface files of the kernels (hip/kernels.json) with their sources, or write them.
    Interface(interface::Args),
    /// Set up, build all kernels, and run every operator on the emulated GPUs.
    Demo(demo::DemoArgs),
    /// Set up, and run all tests and documentation examples.
    Test(run::TestArgs),
    /// Build the HIP runtime on the emulator, and lay out a directory to link and run HIP programs with.
    HipRuntime(hip::RuntimeArgs),
    /// Run the kernels' tests through the HIP driver on that runtime: no AMD GPU or library is needed.
    TestHip(hip::TestArgs),
    /// Measure the operators on a device: a table, CSV, a plot.
    Bench(run::BenchArgs),
    /// Break every kernel in every place, one at a time, and count what the sanitizers find (takes minutes).
    Mutate(demo::MutateArgs),
    /// Fit the constants of the timing model to measured launches, and print its held-out error (takes minutes).
    FitTiming(timing::Args),
    /// List every operator: compiled for, tested, benchmarked; or every instruction of the emulator.
    Status(demo::StatusArgs),
}

/// Why a command did not succeed; printed to stderr, exit status 1.
#[derive(Debug)]
struct Failure(String);

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure(error.to_string())
    }
}

type Result<T = ()> = std::result::Result<T, Failure>;

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Doctor => doctor::run(),
        Task::Setup(args) => setup::run(&args),
        Task::BuildAll(args) => build_all::run(&args),
        Task::Interface(args) => interface::run(&args),
        Task::Demo(args) => demo::demo(&args),
        Task::Test(args) => run::test(&args),
        Task::HipRuntime(args) => hip::runtime(&args),
        Task::TestHip(args) => hip::test(&args),
        Task::Bench(args) => run::bench(&args),
        Task::Mutate(args) => demo::mutate(&args),
        Task::FitTiming(args) => timing::fit(&args),
        Task::Status(args) => demo::status(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure(text)) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}
