//! `cargo xtask interface`

use std::collections::BTreeMap;
use std::path::PathBuf;

use hk_build::{Builder, DEFAULT_TARGETS, INTERFACE_FILE, Interface, Search, Unit};

use crate::{Failure, Result, build_all, run};

/// Options of `interface`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the files that are stale.
    #[arg(long)]
    update: bool,
    /// The workspace, if it is not this one.
    #[arg(long, hide = true)]
    root: Option<PathBuf>,
}

/// Names every package whose file is stale. The compiler reads the sources and generates no code.
pub(crate) fn run(args: &Args) -> Result {
    let root = args.root.clone().unwrap_or_else(run::workspace_root);
    let builder = Builder::new(Search::from_env().find()?, hk_build::cache_dir(&std::env::current_exe()?));
    let mut packages: BTreeMap<PathBuf, Vec<Unit>> = BTreeMap::new();
    for unit in build_all::discover(&root, &DEFAULT_TARGETS)? {
        packages.entry(unit.root.join("hip")).or_default().push(unit);
    }
    let mut stale = Vec::new();
    for (dir, units) in packages {
        let interface = builder.interface(&units)?;
        let name = units.first().map_or("", |unit| &unit.package);
        // A file that cannot be read is stale, too.
        let differences = Interface::read(&dir)
            .map_or_else(|error| vec![error.to_string()], |committed| interface.differences(&committed));
        let file = format!("crates/{name}/hip/{INTERFACE_FILE}");
        if differences.is_empty() {
            continue;
        }
        if args.update {
            interface.write(&dir)?;
            println!("wrote {file}");
        } else {
            let (n, shown) = (differences.len(), &differences[..differences.len().min(5)]);
            stale.push(format!("{name}: {file} is stale in {n} places: {}", shown.join(", ")));
        }
    }
    match stale.is_empty() {
        true => Ok(()),
        false => Err(Failure(format!("{}\nwrite them: cargo xtask interface --update", stale.join("\n")))),
    }
}
