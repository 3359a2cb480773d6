//! The `hk` program: lists, runs and inspects the operators of every family, all from their registries; and
//! executes the kernels of other code objects.
//!
//! | command | does |
//! |---|---|
//! | `hk devices` | what there is to run on |
//! | `hk list` | the operators |
//! | `hk run` | an operator on tensors from a safetensors file |
//! | `hk inspect` | arguments, registers, LDS, occupancy, disassembly and hot lines of an operator's kernels; configurations |
//! | `hk exec` | a kernel of any code object, with arguments from the command line |
//! | `hk mutate` | broken kernels, to see which mistakes the sanitizers and results show |
//! | `hk facts` | what the emulator counts of every operator at the sizes of real models |
//! | `hk bench` | time of the operators on a device, against its copy rate and other implementations |
//! | `hk time` | modelled time of an operator, or of launches of AITER's code objects: what bounds it, what its lines wait for |
//! | `hk demo` | every operator at the sizes of real models, against its f64 reference |
//!
//! Exit status: 0, 1 if something failed, 2 if the command line is wrong.

mod bench;
mod check;
mod demo;
mod devices;
mod exec;
mod facts;
mod failure;
mod hot;
mod inspect;
mod layer;
mod list;
mod mutate;
mod out;
mod run;
mod status;
mod tensors;
mod time;

pub use failure::{Failure, Result};
#[doc(hidden)]
pub use out::discard as discard_output;

use hk_core::registry::{Choices, Operator};

/// The operators of each family: the one place that a new family is added to.
pub const FAMILIES: &[&[Operator]] = &[
    hk_norm::OPERATORS,
    hk_activation::OPERATORS,
    hk_quant::OPERATORS,
    hk_gemm::OPERATORS,
    hk_sampling::OPERATORS,
    hk_attention::OPERATORS,
    hk_moe::OPERATORS,
    hk_gdr::OPERATORS,
];

/// Families that have more than one way to make what a call asks for, and which they take.
pub const CHOICES: &[(&str, Choices)] = &[("hk-gemm", hk_gemm::choices)];

/// Every operator of every family, by crate.
pub fn operators() -> Vec<&'static Operator> {
    FAMILIES.iter().flat_map(|family| family.iter()).collect()
}

/// `docs/operators.md`, as `hk list --markdown` prints it.
pub fn document() -> String {
    list::markdown(&operators())
}

/// The operator of that name.
///
/// # Errors
/// A [`Failure`] that lists the names.
pub fn operator(name: &str) -> Result<&'static Operator> {
    operators().into_iter().find(|op| op.name == name).ok_or_else(|| {
        let names: Vec<_> = operators().iter().map(|op| op.name).collect();
        Failure::new(format!("no operator `{name}`, expected one of {}", names.join(", ")))
    })
}

/// List, run and inspect the kernels.
#[derive(Debug, clap::Parser)]
#[command(name = "hk", version)]
pub struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// List the devices: emulated targets and AMD GPUs.
    Devices(devices::Args),
    /// List the operators.
    List(list::Args),
    /// Run an operator on tensors from a safetensors file.
    Run(run::Args),
    /// Show an operator: arguments, parameters, and what its kernels need on each target.
    Inspect(inspect::Args),
    /// Execute a kernel of any code object for gfx942 or gfx950 on the emulator.
    Exec(exec::Args),
    /// Run a HIP program on the emulator under its sanitizers, with the options of compute-sanitizer.
    Check(check::Args),
    /// Break every kernel in every place, one at a time, and count what the sanitizers find (takes minutes).
    Mutate(mutate::Args),
    /// Measure the operators on a device, and compare with its rates and with other implementations.
    Bench(bench::Args),
    /// Run every operator at the sizes of real models and compare it with its f64 reference.
    Demo(demo::DemoArgs),
    /// Count what every operator executes and moves at the sizes of real models.
    Facts(facts::Args),
    /// Model the time of an operator on a part, or of launches of AITER's code objects, row by row.
    Time(time::Args),
    /// Print what the registry knows of every operator, or what the emulator does of every instruction, as JSON.
    #[command(hide = true)]
    Status(status::Args),
}

impl Cli {
    /// Does what the command line says.
    ///
    /// # Errors
    /// A [`Failure`] with the text for the user.
    pub fn execute(&self) -> Result<()> {
        match &self.task {
            Task::Devices(args) => devices::run(args),
            Task::List(args) => list::run(args),
            Task::Run(args) => run::run(args),
            Task::Inspect(args) => inspect::run(args),
            Task::Exec(args) => exec::run(args),
            Task::Check(args) => check::run(args),
            Task::Mutate(args) => mutate::run(args, &operators()),
            Task::Bench(args) => bench::run(args),
            Task::Demo(args) => demo::run(args, &operators()),
            Task::Facts(args) => facts::run(args),
            Task::Time(args) => time::run(args),
            Task::Status(args) => status::run(args, &operators()),
        }
    }
}

// The examples of the top-level README are compiled and run as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
