//! Code objects that are read from a folder when they are used.
//!
//! A builder may be at work in the folder: it holds a lock on the file `lock`, compiles what it finds as `X.wanted` first,
//! and writes `X.co`, or `X.failed` with the reason.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hk_codeobj::Arch;

/// The code object of a source for `arch` from the folder `HK_KERNELS`, read once per process; or what to do about it.
pub(crate) fn image(package: &str, name: &str, arch: Arch) -> Result<&'static [u8], String> {
    static READ: Mutex<Option<HashMap<PathBuf, &'static [u8]>>> = Mutex::new(None);
    let Some(folder) = std::env::var_os("HK_KERNELS") else {
        return Err("it was built with HK_EMBED=0: HK_KERNELS names the folder of its code objects".into());
    };
    let extension = if arch.is_amd() { "co" } else { "ptx" };
    let path = Path::new(&folder).join(format!("{package}.{name}.{arch}.{extension}"));
    let read = || READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(image) = read().get_or_insert_default().get(&path) {
        return Ok(image);
    }
    // Not under the lock: others wait for theirs meanwhile.
    let bytes = wait_for(&path)?;
    Ok(read().get_or_insert_default().entry(path).or_insert_with(|| bytes.leak()))
}

/// Reads a file of the folder; waits for it as long as a builder is at work.
fn wait_for(path: &Path) -> Result<Vec<u8>, String> {
    let lock = path.with_file_name("lock");
    let mut asked = false;
    loop {
        // Asked before the file is looked for: what a builder wrote last is then found.
        let building = File::open(&lock).is_ok_and(|lock| lock.try_lock_shared().is_err());
        match fs::read(path) {
            Ok(bytes) => return Ok(bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
        if let Ok(reason) = fs::read_to_string(path.with_extension("failed")) {
            return Err(reason);
        }
        if !building {
            return Err(format!("{} does not exist, and nothing builds it", path.display()));
        }
        if !asked {
            let wanted = path.with_extension("wanted");
            fs::write(&wanted, "").map_err(|e| format!("{}: {e}", wanted.display()))?;
            asked = true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_waited_for_while_a_builder_is_at_work() {
        let folder = std::env::temp_dir().join(format!("hk-external-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let folder = &folder;
        let path = |name: &str| folder.join(name);
        let absent = wait_for(&path("a.co")).unwrap_err();
        assert!(absent.ends_with("a.co does not exist, and nothing builds it"), "{absent}");

        let lock = File::create(path("lock")).unwrap();
        lock.lock().unwrap();
        std::thread::scope(|scope| {
            let waits = ["a.co", "b.co", "c.co"]
                .map(|name| (name, scope.spawn(move || wait_for(&folder.join(name)))));
            while !["a.wanted", "b.wanted", "c.wanted"].iter().all(|name| path(name).exists()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            fs::write(path("partial"), "object").unwrap();
            fs::rename(path("partial"), path("a.co")).unwrap();
            fs::write(path("partial"), "no such register").unwrap();
            fs::rename(path("partial"), path("b.failed")).unwrap();
            let mut results = Vec::new();
            for (name, wait) in waits {
                if name == "c.co" {
                    lock.unlock().unwrap(); // the builder ends without it
                }
                results.push(wait.join().unwrap());
            }
            assert_eq!(results[0].as_deref(), Ok(b"object".as_slice()));
            assert_eq!(results[1].as_deref(), Err(&"no such register".to_owned()));
            assert!(results[2].as_ref().unwrap_err().contains("nothing builds it"));
        });
        fs::remove_dir_all(folder).unwrap();
    }
}
