//! How far the ranks of a host are. A library of collectives knows that a rank is missing, and not which: the ranks tell each other how many
//! collectives they have called, in a file in memory.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers of all ranks: those of this host are at least 1, and one more for each collective.
#[derive(Debug)]
pub(super) struct Progress {
    rank: usize,
    world: usize,
    /// Without it, nothing is known.
    file: Option<File>,
    path: PathBuf,
    called: AtomicU64,
    published: AtomicU64,
}

const FOLDER: &str = "/dev/shm";

impl Progress {
    /// Of a rank of the communicator of that name, before it joins.
    pub fn new(name: &str, rank: usize, world: usize) -> Self {
        let path = PathBuf::from(format!("{FOLDER}/hk-comm-{name}"));
        let open = || File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let (called, published) = (AtomicU64::new(0), AtomicU64::new(0));
        let own = Self { rank, world, file: open().ok(), path, called, published };
        own.write(1);
        own
    }

    /// All ranks of the communicator have the file open.
    pub fn joined(&self) {
        // The last of them need not be the first to remove it.
        let _ = std::fs::remove_file(&self.path);
    }

    /// This rank calls so many collectives. Whoever looks after them publishes it.
    pub fn call(&self, count: usize) {
        self.called.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Tells the others.
    pub fn publish(&self) {
        let called = self.called.load(Ordering::Relaxed);
        if self.published.swap(called, Ordering::Relaxed) != called {
            self.write(1 + called);
        }
    }

    /// The first rank of this host that has called fewer collectives than this one.
    pub fn missing(&self) -> Option<usize> {
        let own = 1 + self.called.load(Ordering::Relaxed);
        let behind = |rank: &usize| self.read(*rank).is_some_and(|number| (1..own).contains(&number));
        (0..self.world).filter(|rank| *rank != self.rank).find(behind)
    }

    #[cfg(unix)]
    fn write(&self, number: u64) {
        use std::os::unix::fs::FileExt;
        // Whoever cannot write is not known to the others.
        let _ = self.file.as_ref().map(|file| file.write_all_at(&number.to_le_bytes(), 8 * self.rank as u64));
    }

    #[cfg(unix)]
    fn read(&self, rank: usize) -> Option<u64> {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0; 8];
        self.file.as_ref()?.read_exact_at(&mut bytes, 8 * rank as u64).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    #[cfg(not(unix))]
    fn write(&self, _: u64) {}

    #[cfg(not(unix))]
    fn read(&self, _: usize) -> Option<u64> {
        None
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.joined();
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_is_behind_is_named() {
        let name = format!("test-{}", std::process::id());
        // Rank 3 is on another host.
        let ranks = [0, 1, 2].map(|rank| Progress::new(&name, rank, 4));
        ranks.iter().for_each(Progress::joined);
        assert!(!ranks[0].path.exists());
        assert_eq!(ranks[0].missing(), None);
        let call = |rank: usize, count| {
            ranks[rank].call(count);
            ranks[rank].publish();
        };
        call(0, 2);
        call(1, 1);
        assert_eq!(ranks[0].missing(), Some(1));
        assert_eq!(ranks[1].missing(), Some(2));
        assert_eq!(ranks[2].missing(), None);
        call(1, 1);
        assert_eq!(ranks[0].missing(), Some(2));
        call(2, 2);
        assert!(ranks.iter().all(|rank| rank.missing().is_none()));
        // A communicator of the same name that comes later.
        let again = Progress::new(&name, 1, 4);
        again.call(1);
        again.publish();
        assert_eq!(again.missing(), None);
    }
}
