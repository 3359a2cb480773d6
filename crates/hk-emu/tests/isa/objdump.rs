//! The decoder and disassembler against `llvm-objdump`: on every kernel of this workspace, and on any folder.

use crate::isa::llvm;
use std::collections::HashSet;
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};

use hk_build::{Builder, Search, Unit, cache_dir, package_includes, package_units};
use hk_codeobj::{Arch, CodeObject, ParseError};
use hk_emu::isa::{decode, display};
use object::{Object as _, ObjectSymbol as _};
use rayon::prelude::*;

/// Every HIP source of every crate, for both AMD targets.
fn units() -> Vec<Unit> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates' directory");
    let mut units = vec![];
    for entry in std::fs::read_dir(crates).expect("the crates' directory") {
        let root = entry.expect("an entry").path();
        let package = root.file_name().expect("a name").to_string_lossy().into_owned();
        if package != "hk-core" && root.join("hip").is_dir() {
            let includes = package_includes(&root).expect("a manifest");
            units.extend(package_units(&package, &root, "hip", &includes, &Arch::AMD).expect("sources"));
        }
    }
    units
}

/// Reads a code object as `llvm-objdump` does. How many instructions agree, and what does not.
fn compare(arch: Arch, file: &Path) -> (usize, Vec<String>) {
    // To a file: it writes a few characters at a time, and each would wake a reader of its pipe.
    let mut listing = tempfile::tempfile().expect("a temporary file");
    let stdout = listing.try_clone().expect("a second handle");
    let status = llvm::tool("llvm-objdump").arg("-d").arg(file).stdout(stdout).status();
    assert!(status.expect("llvm-objdump runs").success(), "llvm-objdump fails on {}", file.display());
    let mut text = String::new();
    listing.rewind().expect("a file that can be read again");
    listing.read_to_string(&mut text).expect("LLVM prints UTF-8");
    let image = std::fs::read(file).expect("the code object");
    let elf = object::File::parse(&*image).expect("an ELF file");
    let labels: HashSet<(u64, &str)> =
        elf.symbols().filter_map(|s| Some((s.address(), s.name().ok()?))).collect();
    let (mut same, mut different) = (0, vec![]);
    for line in text.lines() {
        // "<tab>text // address: words <label>"
        let Some((theirs, rest)) = line.strip_prefix('\t').and_then(|l| l.split_once("//")) else { continue };
        let Some((address, words)) = rest.split_once(':') else { continue };
        let words: Vec<u32> =
            words.split_whitespace().map_while(|w| u32::from_str_radix(w, 16).ok()).collect();
        // What LLVM does not know as an instruction it prints as data, and a branch to a label by the label's name.
        let theirs = match llvm::one_line(theirs) {
            data if data.starts_with(".long") => None,
            instruction => Some((
                distance(&instruction, words[0], address, &labels).unwrap_or(instruction),
                4 * words.len(),
            )),
        };
        let ours =
            decode(arch, &words).ok().map(|i| (llvm::one_line(&display(&i).to_string()), i.size.into()));
        if ours == theirs {
            same += 1;
        } else {
            let place = format!("{} at {}", file.display(), address.trim());
            different.push(format!("{place}: {ours:?}, llvm-objdump: {theirs:?}"));
        }
    }
    (same, different)
}

/// A branch to a label as a branch over the distance to it, in words from the next instruction.
fn distance(instruction: &str, word: u32, address: &str, labels: &HashSet<(u64, &str)>) -> Option<String> {
    let (mnemonic, label) = instruction.split_once(' ')?;
    let (address, words) = (u64::from_str_radix(address.trim(), 16).ok()?, word as u16);
    let target = address.wrapping_add_signed(4 + 4 * i64::from(words as i16));
    labels.contains(&(target, label)).then(|| format!("{mnemonic} {words}"))
}

#[test]
fn every_kernel_reads_as_llvm_objdump_prints_it() {
    let compiler = Search::from_env().find().unwrap_or_else(|e| panic!("{e}"));
    let target_dir = cache_dir(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let built = Builder::new(compiler, target_dir).compile_all(&units(), |_, _| {});
    assert!(!built.is_empty(), "no HIP sources found");
    built.into_par_iter().for_each(|built| {
        let built = built.unwrap_or_else(|e| panic!("{e}"));
        let name = format!("objdump-{}-{}", built.unit.package, built.unit.object_name());
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&file, &built.bytes).expect("write the code object");
        let (same, different) = compare(built.unit.arch, &file);
        assert!(different.is_empty(), "{}", different.join("\n"));
        assert!(same > 100, "{}: only {same} instructions found", built.unit.label());
    });
}

/// The code objects for gfx942 and gfx950 in a folder and below.
fn corpus(folder: &Path) -> Vec<(Arch, PathBuf)> {
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(corpus(&path));
            continue;
        }
        match CodeObject::parse(&std::fs::read(&path).expect("a file")) {
            Ok(object) => found.push((object.arch, path)),
            Err(ParseError::NotElf { .. } | ParseError::WrongMachine { .. }) => {}
            Err(error) => panic!("{}: {error}", path.display()),
        }
    }
    found
}

#[test]
#[ignore = "HK_CORPUS has to name a folder of code objects"]
fn every_code_object_of_a_folder_reads_as_llvm_objdump_prints_it() {
    let folder = std::env::var_os("HK_CORPUS").expect("HK_CORPUS names a folder of code objects");
    let files = corpus(Path::new(&folder));
    let (same, different) = files
        .par_iter()
        .map(|(arch, file)| compare(*arch, file))
        .reduce(Default::default, |a, b| (a.0 + b.0, [a.1, b.1].concat()));
    println!("{} files, {same} instructions agree, {} do not", files.len(), different.len());
    assert!(!files.is_empty() && different.is_empty(), "{}", different.join("\n"));
}
