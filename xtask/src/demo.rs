//! `cargo xtask demo` and `cargo xtask status`: both run `hk`, which holds the operators.

use hk_build::DEFAULT_TARGETS;

use crate::{Result, build_all, run, setup};

/// Options of `demo`.
#[derive(clap::Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    setup: setup::Args,
    /// Only operators whose name contains this.
    #[arg(long)]
    op: Option<String>,
}

/// Options of `status`.
#[derive(clap::Args)]
pub(crate) struct StatusArgs {
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Sets up, builds all kernels, then has `hk demo` run every operator.
pub(crate) fn demo(args: &DemoArgs) -> Result {
    let compiler = setup::compiler(&args.setup)?;
    let built = build_all::build(&run::workspace_root(), compiler, &DEFAULT_TARGETS, false, None)?;
    built.print();
    built.check()?;
    let mut command = run::cargo(&["run", "--package", "hk-cli", "--bin", "hk", "--", "demo"]);
    // The targets of the demo are compiled in, whatever the caller builds otherwise.
    command.env_remove("HK_TARGETS");
    if let Some(op) = &args.op {
        command.args(["--op", op]);
    }
    run::execute(&mut command)
}

/// Has `hk status` print the table of operators.
pub(crate) fn status(args: &StatusArgs) -> Result {
    let mut command = run::cargo(&["run", "--quiet", "--package", "hk-cli", "--bin", "hk", "--", "status"]);
    if args.json {
        command.arg("--json");
    }
    run::execute(&mut command)
}
