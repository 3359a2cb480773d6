//! `cargo xtask doctor`

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use hk_build::{Search, Verdict};

use crate::tools::{Finder, TOOLS};
use crate::{Failure, Result};

/// Prints what this machine has; fails if the kernels cannot be compiled.
pub(crate) fn run() -> Result {
    let search = Search::from_env();
    let found = search.find();
    match &found {
        Ok(compiler) => {
            line(true, "compiler", &compiler.to_string());
            line(true, "lld", &compiler.lld.display().to_string());
        }
        Err(error) => line(false, "compiler", &error.to_string()),
    }
    let used = found.as_ref().ok().map(|c| &c.path);
    for other in search.candidates() {
        if used.is_some_and(|used| *used != other.path) {
            let not_used = if matches!(other.verdict, Verdict::Usable(_)) { ", not used" } else { "" };
            line(true, "  also found", &format!("{other}{not_used}"));
        }
    }
    let finder = Finder::from_env();
    for tool in TOOLS {
        let (good, text) = match finder.find(tool).map(|path| (finder.version(tool, &path), path)) {
            Some((Ok(version), path)) => (true, format!("{}  {version}", path.display())),
            Some((Err(error), path)) => (false, format!("{}: {error}", path.display())),
            None => (false, format!("run by {}; get it: {}", tool.callers, finder.package(tool))),
        };
        line(good, tool.name, &format!("{:<9}{text}", tool.need.name()));
    }
    let rocm = search.rocm.unwrap_or_default();
    match rocm_library(&rocm) {
        Some(library) => {
            let version = fs::read_to_string(rocm.join(".info/version")).unwrap_or_default();
            line(true, "ROCm", format!("{} {}", library.display(), version.trim()).trim_end());
        }
        None => {
            line(false, "ROCm", "no libamdhip64.so: needed for hip:N devices only; https://rocm.docs.amd.com")
        }
    }
    match amd_gpus(Path::new("/sys/class/kfd/kfd/topology/nodes")) {
        gpus if gpus.is_empty() => {
            line(false, "AMD GPU", "none: emu:gfx942 and emu:gfx950 run on any machine")
        }
        gpus => line(true, "AMD GPU", &gpus.join(", ")),
    }
    match found {
        Ok(_) => Ok(()),
        Err(_) => {
            Err(Failure("the kernels cannot be compiled here: `cargo xtask setup` gets the compiler".into()))
        }
    }
}

fn line(good: bool, what: &str, text: &str) {
    println!(
        "{} {what:<22}{}",
        if good { "ok     " } else { "missing" },
        text.replace('\n', "\n                              ")
    );
}

fn rocm_library(rocm: &Path) -> Option<PathBuf> {
    let system = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(PathBuf::from);
    let listed: Vec<_> =
        env::var_os("LD_LIBRARY_PATH").map(|p| env::split_paths(&p).collect()).unwrap_or_default();
    let dirs = [rocm.join("lib")].into_iter().chain(listed).chain(system);
    dirs.map(|dir| dir.join("libamdhip64.so")).find(|p| p.exists())
}

/// The targets of the GPUs that the kernel driver lists. Processors are nodes, too, with version 0.
fn amd_gpus(nodes: &Path) -> Vec<String> {
    let mut gpus = Vec::new();
    for node in fs::read_dir(nodes).into_iter().flatten().flatten() {
        let properties = fs::read_to_string(node.path().join("properties")).unwrap_or_default();
        let version = properties.lines().find_map(|l| l.strip_prefix("gfx_target_version "));
        if let Some(version) = version.and_then(|v| v.trim().parse::<u32>().ok()).filter(|&v| v != 0) {
            // Decimal: major, two digits of minor, two of stepping, which the target's name has in hexadecimal.
            gpus.push(format!("gfx{}{}{:x}", version / 10000, version / 100 % 100, version % 100));
        }
    }
    gpus.sort();
    gpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_read_from_the_driver() {
        let dir = tempfile::tempdir().unwrap();
        for (node, version) in [("0", 0), ("1", 90402), ("2", 90500), ("3", 90010)] {
            fs::create_dir(dir.path().join(node)).unwrap();
            let text = format!("cpu_cores_count 0\ngfx_target_version {version}\nsimd_count 1216\n");
            fs::write(dir.path().join(node).join("properties"), text).unwrap();
        }
        assert_eq!(amd_gpus(dir.path()), ["gfx90a", "gfx942", "gfx950"]);
        assert!(amd_gpus(&dir.path().join("absent")).is_empty());
    }
}
