//! Lists what the emulator cannot execute of the kernels in code objects: `coverage [FILE | FOLDER]...`.

use hk_codeobj::{CodeObject, ParseError};
use hk_emu::{Machine, MachineOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A file, or every file in a folder and below.
fn files(path: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if !path.is_dir() {
        found.push(path.into());
        return Ok(());
    }
    for entry in std::fs::read_dir(path)? {
        files(&entry?.path(), found)?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut paths = vec![];
    for path in std::env::args().skip(1) {
        files(Path::new(&path), &mut paths)?;
    }
    let (mut objects, mut kernels, mut complete) = (0, 0, 0);
    // By target and mnemonic with the reason: the kernels that lack it.
    let mut missing: BTreeMap<(&str, String), BTreeSet<String>> = BTreeMap::new();
    for path in paths {
        let image = std::fs::read(&path)?;
        let arch = match CodeObject::parse(&image) {
            Ok(object) => object.arch,
            Err(ParseError::NotElf { .. } | ParseError::WrongMachine { .. }) => continue,
            Err(error) => return Err(format!("{}: {error}", path.display()).into()),
        };
        objects += 1;
        let machine = Machine::new(MachineOptions::default().arch(arch));
        let module = machine.load(&image)?;
        for kernel in &module.code_object().kernels {
            let all = machine.unsupported(&module, &kernel.name).unwrap_or_default();
            kernels += 1;
            complete += u32::from(all.is_empty());
            for (_, text, reason) in all {
                let mnemonic = text.split_whitespace().next().unwrap_or_default();
                let entry = missing.entry((arch.name(), format!("{mnemonic}: {reason}"))).or_default();
                entry.insert(format!("{}: {}", path.display(), kernel.name));
            }
        }
    }
    println!("{objects} code objects, {kernels} kernels, {complete} of them executable in full");
    for ((arch, what), kernels) in missing {
        println!("{arch}: {what}: {} kernels, such as {}", kernels.len(), kernels.first().map_or("", |k| k));
    }
    Ok(())
}
