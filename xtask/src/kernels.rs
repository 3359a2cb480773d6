//! Kernels for a program that is built and started before they are compiled: it waits for what it needs.
//!
//! The other side is `crates/hk-core/src/external.rs`.

use std::collections::{HashSet, VecDeque};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hk_build::{Builder, Unit};

use crate::{Failure, Result};

/// Compiles units into a folder: those that the program asks for, and before it asks for any, in order.
pub(crate) struct Server<'a> {
    builder: &'a Builder,
    folder: PathBuf,
    /// Locked as long as units are compiled.
    lock: File,
    queue: Mutex<VecDeque<Unit>>,
    /// What may be asked for: [`wish`] of every unit.
    known: HashSet<PathBuf>,
    /// Compilers that may run at the same time for what nobody waits for.
    limit: usize,
    asked: AtomicBool,
    running: AtomicUsize,
    stopped: AtomicBool,
    compiled: AtomicUsize,
}

/// The file of a unit's object.
fn object(folder: &Path, unit: &Unit) -> PathBuf {
    folder.join(format!("{}.{}", unit.package, unit.object_name()))
}

/// The file by which the program asks for it.
fn wish(folder: &Path, unit: &Unit) -> PathBuf {
    object(folder, unit).with_extension("wanted")
}

impl<'a> Server<'a> {
    /// Empties the folder and takes it.
    pub(crate) fn new(
        builder: &'a Builder,
        folder: &Path,
        units: Vec<Unit>,
        limit: usize,
    ) -> Result<Server<'a>> {
        let error = |e: std::io::Error| Failure(format!("{}: {e}", folder.display()));
        fs::create_dir_all(folder).map_err(error)?;
        let lock = File::create(folder.join("lock")).map_err(error)?;
        lock.try_lock()
            .map_err(|e| Failure(format!("{}: {e}: another demo is running", folder.display())))?;
        for entry in fs::read_dir(folder).map_err(error)? {
            let path = entry.map_err(error)?.path();
            if !path.ends_with("lock") {
                fs::remove_file(path).map_err(error)?;
            }
        }
        Ok(Server {
            builder,
            folder: folder.into(),
            lock,
            known: units.iter().map(|unit| wish(folder, unit)).collect(),
            queue: Mutex::new(units.into()),
            limit,
            asked: false.into(),
            running: 0.into(),
            stopped: false.into(),
            compiled: 0.into(),
        })
    }

    /// Ends the work after the units that are being compiled.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// The number of units that were compiled or found in the cache, and of those left.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let left = self.queue.lock().unwrap_or_else(PoisonError::into_inner).len();
        (self.compiled.load(Ordering::Relaxed), left)
    }

    /// The work of one thread.
    pub(crate) fn work(&self) {
        while !self.stopped.load(Ordering::Relaxed) {
            let Some(unit) = self.next() else {
                // Nothing to do now: another thread is at work, or the limit is reached.
                if self.counts().1 == 0 && self.running.load(Ordering::Relaxed) == 0 {
                    // Whoever waits for what is not there learns so.
                    let _ = self.lock.unlock();
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            let path = object(&self.folder, &unit);
            match self.builder.compile(&unit) {
                Ok(built) => write(&path, &built.bytes),
                Err(error) => write(&path.with_extension("failed"), error.to_string().as_bytes()),
            }
            self.compiled.fetch_add(1, Ordering::Relaxed);
            self.running.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The next unit, counted as running: one that is asked for, or else the first.
    fn next(&self) -> Option<Unit> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let wishes = self.wishes();
        if !wishes.is_empty() {
            self.asked.store(true, Ordering::Relaxed);
        }
        for unknown in wishes.difference(&self.known) {
            write(&unknown.with_extension("failed"), b"no source has this name");
        }
        let at = match queue.iter().position(|unit| wishes.contains(&wish(&self.folder, unit))) {
            // The program knows what it needs: cores are for that, and for itself.
            None if self.asked.load(Ordering::Relaxed) => return None,
            None if self.running.load(Ordering::Relaxed) >= self.limit => return None,
            at => at.unwrap_or(0),
        };
        let unit = queue.remove(at)?;
        self.running.fetch_add(1, Ordering::Relaxed);
        Some(unit)
    }

    /// What was asked for so far.
    fn wishes(&self) -> HashSet<PathBuf> {
        let files = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|file| file.path());
        files.filter(|path| path.extension().is_some_and(|e| e == "wanted")).collect()
    }
}

/// Writes a file of which nobody reads a part.
fn write(path: &Path, bytes: &[u8]) {
    let partial = path.with_extension("partial");
    if let Err(error) = fs::write(&partial, bytes).and_then(|()| fs::rename(&partial, path)) {
        eprintln!("{}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_build::{Arch, Search};

    #[test]
    fn what_is_asked_for_comes_first_and_a_failure_has_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("hk-one");
        fs::create_dir_all(root.join("hip")).unwrap();
        let kernel = "extern \"C\" __attribute__((global)) void NAME(int *x) { x[0] = 1; }";
        for name in ["a", "b", "c"] {
            fs::write(root.join(format!("hip/{name}.hip")), kernel.replace("NAME", name)).unwrap();
        }
        fs::write(root.join("hip/d.hip"), "?").unwrap();
        let units = hk_build::package_units("hk-one", &root, "hip", &[], &[Arch::Gfx942]).unwrap();
        let builder = Builder::new(Search::from_env().find().unwrap(), dir.path().join("cache"));
        let folder = dir.path().join("kernels");
        let server = Server::new(&builder, &folder, units.clone(), 1).unwrap();
        assert!(Server::new(&builder, &folder, units, 1).is_err(), "the folder is taken");
        assert_eq!(server.next().unwrap().stem(), "a");
        assert!(server.next().is_none(), "one at a time");
        server.running.store(0, Ordering::Relaxed);
        for name in ["c.gfx942", "d.gfx942", "c.gfx950"] {
            fs::write(folder.join(format!("hk-one.{name}.wanted")), "").unwrap();
        }
        let path = |name: &str| folder.join(format!("hk-one.{name}"));
        std::thread::scope(|scope| {
            scope.spawn(|| server.work());
            scope.spawn(|| server.work());
            while !["c.gfx942.co", "d.gfx942.failed", "c.gfx950.failed"]
                .iter()
                .all(|name| path(name).exists())
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            server.stop();
        });
        assert_eq!(server.counts(), (2, 1), "nobody asked for b");
        assert_eq!(fs::read_to_string(path("c.gfx950.failed")).unwrap(), "no source has this name");
        let reason = fs::read_to_string(path("d.gfx942.failed")).unwrap();
        assert!(reason.contains("d.hip for gfx942: the compiler failed"), "{reason}");
    }
}
