//! Rules of the device headers.

use std::fs;
use std::path::{Path, PathBuf};

const INCLUDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hip/include/hk");

fn headers(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { headers(&path) } else { vec![path] }).collect()
}

/// Code for one target lies in `hk/amd` and `hk/nvidia`; `hk/arch.h` chooses between them. The other headers ask for a capability
/// (`kHasWideDma`, `HK_MX_MMA`) or call a function that each directory has.
#[test]
fn only_arch_asks_for_the_target() {
    const TARGET: [&str; 8] =
        ["HK_AMD", "HK_NVIDIA", "__gfx", "__CUDA_ARCH__", "__builtin_amdgcn", "__amdgpu", "__nvvm", "asm("];
    let mut found = 0;
    for path in headers(Path::new(INCLUDE)) {
        let name = path.strip_prefix(INCLUDE).unwrap().to_str().unwrap().to_owned();
        if name == "arch.h" || name.starts_with("amd/") || name.starts_with("nvidia/") {
            found += 1;
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for (line, text) in text.lines().enumerate() {
            for word in TARGET {
                assert!(!text.contains(word), "{name}:{}: {word}: {text}", line + 1);
            }
        }
    }
    assert!(found > 2, "the headers of each target");
}
