//! The decoder and disassembler against `llvm-objdump` on every kernel of this workspace.

use crate::llvm;
use std::path::Path;

use hk_build::{Builder, Search, Unit, cache_dir, package_units};
use hk_codeobj::Arch;
use hk_emu::isa::{decode, display};

/// Every HIP source of every crate, for both AMD targets.
fn units() -> Vec<Unit> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates' directory");
    let includes = [crates.join("hk-core/hip/include")];
    let mut units = vec![];
    for entry in std::fs::read_dir(crates).expect("the crates' directory") {
        let root = entry.expect("an entry").path();
        let package = root.file_name().expect("a name").to_string_lossy().into_owned();
        if package != "hk-core" && root.join("hip").is_dir() {
            units.extend(package_units(&package, &root, "hip", &includes, &Arch::AMD).expect("sources"));
        }
    }
    units
}

#[test]
fn every_kernel_reads_as_llvm_objdump_prints_it() {
    let compiler = Search::from_env().find().unwrap_or_else(|e| panic!("{e}"));
    let target_dir = cache_dir(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let built = Builder::new(compiler, target_dir).compile_all(&units(), |_, _| {});
    assert!(!built.is_empty(), "no HIP sources found");
    for built in built {
        let built = built.unwrap_or_else(|e| panic!("{e}"));
        let file =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("objdump-{}", built.unit.object_name()));
        std::fs::write(&file, &built.bytes).expect("write the code object");
        let output = llvm::tool("llvm-objdump").arg("-d").arg(&file).output().expect("llvm-objdump runs");
        assert!(output.status.success(), "llvm-objdump fails on {}", file.display());
        let text = String::from_utf8(output.stdout).expect("LLVM prints UTF-8");
        let mut instructions = 0;
        for line in text.lines() {
            // "<tab>text // address: words <label>"
            let Some((theirs, rest)) = line.strip_prefix('\t').and_then(|l| l.split_once("//")) else {
                continue;
            };
            let Some((address, words)) = rest.split_once(':') else { continue };
            let words: Vec<u32> =
                words.split_whitespace().map_while(|w| u32::from_str_radix(w, 16).ok()).collect();
            let place = format!("{} at {}", built.unit.object_name(), address.trim());
            let inst = decode(built.unit.arch, &words).unwrap_or_else(|e| panic!("{place}: {theirs}: {e}"));
            assert_eq!(llvm::one_line(&display(&inst).to_string()), llvm::one_line(theirs), "{place}");
            assert_eq!(usize::from(inst.size), 4 * words.len(), "length of {theirs}, {place}");
            instructions += 1;
        }
        assert!(instructions > 100, "{}: only {instructions} instructions found", built.unit.label());
    }
}
