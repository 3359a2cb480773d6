//! Running the compiler, and the cache that avoids it.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hk_codeobj::{Arch, CodeObject};
use serde::{Deserialize, Serialize};

use crate::interface::Interface;
use crate::manifest::{KernelEntry, ObjectEntry, Resources};
use crate::source::{self, Unit};
use crate::{Compiler, Error};

/// Changes when the meaning of a cache entry does.
const CACHE_FORMAT: &str = "hk-cache 2";

/// Huge pages for the compiler's heap: a seventh less time for a kernel of many instances (clang 22). Other C libraries ignore it.
const TUNABLES: &str = "GLIBC_TUNABLES";

/// Entries kept per source and target: enough to go back and forth between branches.
const KEPT: usize = 16;

/// The flags that decide what is generated: the same for every compiler, and free of paths.
///
/// Contraction of `a * b + c` is the same on all targets, so that results agree. Line tables name the source in the
/// emulator's reports; PTX, of which they are most, has none. No header but the compiler's own is reachable: kernels build alike on every machine.
pub fn compile_flags(arch: Arch) -> Vec<String> {
    let common = [
        "-std=c++20",
        "-O3",
        "-ffp-contract=fast-honor-pragmas",
        "-nostdinc++",
        "-nostdlibinc",
        "-Wall",
        "-Wextra",
    ];
    let amd = ["-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc"];
    let ptx = ["-x", "cuda", "--cuda-device-only", "-S", "-nocudainc", "-nocudalib", "--cuda-feature=+ptx84"];
    let mut flags: Vec<String> =
        if arch.is_amd() { amd.as_slice() } else { &ptx }.iter().map(|f| f.to_string()).collect();
    flags.extend(common.map(String::from));
    if arch.is_amd() {
        // Without it the object holds a hash of the source's absolute path.
        flags.extend([
            "-fuse-cuid=none".into(),
            format!("--offload-arch={arch}"),
            "-gline-tables-only".into(),
        ]);
    } else {
        flags.push(format!("--cuda-gpu-arch={arch}"));
    }
    flags
}

/// The cache of the target directory that `path` lies in (a build script's `OUT_DIR`, or a running program).
pub fn cache_dir(path: &Path) -> PathBuf {
    // cargo marks the target directories that it makes, and keeps what it knows of the compiler in all.
    let marks = ["CACHEDIR.TAG", ".rustc_info.json"];
    let target = path.ancestors().find(|dir| marks.iter().any(|mark| dir.join(mark).is_file()));
    // <target>/<profile>/build/<package>/out
    target.or_else(|| path.ancestors().nth(4)).unwrap_or(path).join("hk-cache")
}

/// A compiled unit.
#[derive(Debug, Clone)]
pub struct Built {
    /// What was compiled.
    pub unit: Unit,
    /// The code object, or PTX text.
    pub bytes: Vec<u8>,
    /// Its kernels.
    pub kernels: Vec<KernelEntry>,
    /// Its entry points and what they take.
    pub interface: Interface,
    /// The headers that it includes.
    pub headers: Vec<PathBuf>,
    /// What the compiler warned of.
    pub warnings: String,
    /// The compiler did not have to run.
    pub cached: bool,
    /// Time it took.
    pub elapsed: Duration,
}

impl Built {
    /// The row of the manifest.
    pub fn entry(&self) -> ObjectEntry {
        ObjectEntry {
            package: self.unit.package.clone(),
            source: self.unit.source.display().to_string(),
            target: self.unit.arch.to_string(),
            object_bytes: self.bytes.len(),
            kernels: self.kernels.clone(),
        }
    }
}

/// What a source includes, and what its kernels take.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Description {
    /// The headers, in the order of inclusion.
    pub headers: Vec<Header>,
    /// Its entry points and their parameters.
    pub interface: Interface,
}

/// A header that a source includes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Header {
    /// Its path; if it is relative, to the package.
    pub path: PathBuf,
    /// The hash of its content.
    pub hash: String,
}

fn header_hash(unit: &Unit, path: &Path) -> Result<String, Error> {
    let path = unit.root.join(path);
    let content = fs::read(&path).map_err(Error::io(&path))?;
    Ok(blake3::hash(&content).to_hex()[..32].into())
}

/// Compiles units with one compiler and one cache.
#[derive(Debug, Clone)]
pub struct Builder {
    compiler: Compiler,
    cache: PathBuf,
    threads: usize,
}

impl Builder {
    /// A builder that keeps its results in `cache` and runs as many compilers as the machine has cores.
    pub fn new(compiler: Compiler, cache: impl Into<PathBuf>) -> Builder {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Builder { compiler, cache: cache.into(), threads }
    }

    /// The compiler.
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// Runs at most `threads` compilers at the same time, at least one.
    pub fn threads(mut self, threads: usize) -> Builder {
        self.threads = threads.max(1);
        self
    }

    /// Compiles all units in parallel; the results have their order. `done` is called as each is finished, from any
    /// thread. An error of one does not stop the others.
    pub fn compile_all(
        &self,
        units: &[Unit],
        done: impl Fn(&Unit, &Result<Built, Error>) + Sync,
    ) -> Vec<Result<Built, Error>> {
        self.parallel(units, |unit| {
            let result = self.compile(unit);
            done(unit, &result);
            result
        })
    }

    /// Whether the compiler takes all units for their targets: its front end alone, which makes every instance of a template; no code is
    /// generated, nothing is cached. What it warned of, in the order of the units.
    pub fn check_all(&self, units: &[Unit]) -> Vec<Result<String, Error>> {
        self.parallel(units, |unit| {
            let output = self.output(
                unit,
                self.command(unit)
                    .args(["-fsyntax-only", "-Wno-unused-command-line-argument"])
                    .arg(&unit.source),
            )?;
            Ok(String::from_utf8_lossy(&output.stderr).trim_end().to_owned())
        })
    }

    /// The interface of a package, whose `units` these are, from their descriptions: no code is generated.
    ///
    /// # Errors
    /// The first error of a unit in their order, or [`Error::Interface`] if sources or targets contradict each other.
    pub fn interface(&self, units: &[Unit]) -> Result<Interface, Error> {
        let descriptions = self.parallel(units, |unit| self.describe(unit));
        let descriptions = descriptions.into_iter().collect::<Result<Vec<Description>, Error>>()?;
        Interface::of_package(units.iter().zip(descriptions.iter().map(|d| &d.interface)))
    }

    /// Calls `work` for each unit, on the builder's threads; the results have the order of the units.
    fn parallel<T: Send>(&self, units: &[Unit], work: impl Fn(&Unit) -> T + Sync) -> Vec<T> {
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::with_capacity(units.len()));
        std::thread::scope(|scope| {
            for _ in 0..self.threads.min(units.len()) {
                scope.spawn(|| {
                    while let Some((i, unit)) = Some(next.fetch_add(1, Ordering::Relaxed))
                        .and_then(|i| units.get(i).map(|unit| (i, unit)))
                    {
                        let result = work(unit);
                        results.lock().unwrap_or_else(|e| e.into_inner()).push((i, result));
                    }
                });
            }
        });
        let mut results = results.into_inner().unwrap_or_else(|e| e.into_inner());
        results.sort_by_key(|(i, _)| *i);
        results.into_iter().map(|(_, result)| result).collect()
    }

    /// Compiles one unit, or takes it from the cache, and checks what its kernels need.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's messages, [`Error::Resources`] with the kernel's name, [`Error::Interface`] with the
    /// struct's, [`Error::Object`], [`Error::Io`].
    pub fn compile(&self, unit: &Unit) -> Result<Built, Error> {
        let start = Instant::now();
        let Description { headers, interface } = self.describe(unit)?;
        let files = headers.iter().map(|file| unit.root.join(&file.path)).collect();
        let key = self.key(unit, &headers)?;
        let entry = self.cache.join(format!("{key}.{}", unit.object_name()));
        let log = entry.with_extension("log");
        // An entry that cannot be read back is made again.
        let cached = fs::read(&entry).ok().and_then(|bytes| Some((read_kernels(unit, &bytes).ok()?, bytes)));
        let (kernels, bytes, warnings, cached) = match cached {
            Some((kernels, bytes)) => (kernels, bytes, fs::read_to_string(&log).unwrap_or_default(), true),
            None => {
                let (bytes, warnings) = self.run(unit)?;
                let kernels = read_kernels(unit, &bytes)?;
                if !warnings.is_empty() {
                    self.store(&log, warnings.as_bytes())?;
                }
                self.store(&entry, &bytes)?;
                self.prune(unit);
                (kernels, bytes, warnings, false)
            }
        };
        let violations: Vec<String> = kernels
            .iter()
            .filter_map(|k| Some(k.resources.as_ref()?.violations(&k.name, unit.arch)))
            .flatten()
            .collect();
        if !violations.is_empty() {
            return Err(Error::Resources { file: unit.label(), arch: unit.arch, violations });
        }
        let (unit, elapsed) = (unit.clone(), start.elapsed());
        Ok(Built { unit, bytes, kernels, interface, headers: files, warnings, cached, elapsed })
    }

    /// What a source includes and what its kernels take: from the cache if no file that it included then has changed, or
    /// else from the compiler, which reads the source without generating code.
    ///
    /// # Errors
    /// [`Error::Compile`], [`Error::Interface`], [`Error::Io`].
    pub fn describe(&self, unit: &Unit) -> Result<Description, Error> {
        // Paths are part of the key: another checkout with the same cache has headers of its own.
        let place = [&unit.root].into_iter().chain(&unit.includes).map(|dir| dir.display().to_string());
        let key = format!("{}\n{}", self.key(unit, &[])?, place.collect::<Vec<_>>().join("\n"));
        let key = &blake3::hash(key.as_bytes()).to_hex()[..32];
        let entry = self.cache.join(format!("{key}.{}.json", unit.object_name()));
        let cached: Option<Description> =
            fs::read(&entry).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let unchanged =
            |header: &Header| header_hash(unit, &header.path).is_ok_and(|hash| hash == header.hash);
        if let Some(description) = cached.filter(|d| d.headers.iter().all(unchanged)) {
            return Ok(description);
        }
        let dir = tempfile::tempdir().map_err(Error::io(Path::new("temporary directory")))?;
        let list = dir.path().join("dependencies");
        let mut command = self.command(unit);
        command.args(["-w", "-fsyntax-only", "-DHK_DESCRIBE", "-Xclang", "-fdump-record-layouts-canonical"]);
        command.args(["-Xclang", "-dependency-file", "-Xclang"]).arg(&list);
        command.args(["-Xclang", "-MT", "-Xclang", "object"]);
        let output = self.output(unit, command.arg(&unit.source))?;
        let text = fs::read_to_string(&list).map_err(Error::io(&list))?;
        let headers = source::dependencies(&text).into_iter().filter(|file| *file != unit.source);
        let headers = headers
            .map(|path| Ok(Header { hash: header_hash(unit, &path)?, path }))
            .collect::<Result<Vec<Header>, Error>>()?;
        let interface = Interface::parse(&unit.stem(), &String::from_utf8_lossy(&output.stdout))
            .map_err(|text| Error::Interface(format!("{} for {}: {text}", unit.label(), unit.arch)))?;
        let description = Description { headers, interface };
        let json = serde_json::to_vec(&description).map_err(|e| Error::io(&entry)(e.into()))?;
        self.store(&entry, &json)?;
        Ok(description)
    }

    /// The hash of everything that an object depends on: compiler, flags, source, and these headers.
    fn key(&self, unit: &Unit, headers: &[Header]) -> Result<String, Error> {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        add(CACHE_FORMAT.as_bytes());
        add(self.compiler.version_text.as_bytes());
        add(unit.label().as_bytes());
        for flag in compile_flags(unit.arch) {
            add(flag.as_bytes());
        }
        for dir in &unit.includes {
            add(source::portable_name(dir).as_bytes());
        }
        let source = unit.root.join(&unit.source);
        add(&fs::read(&source).map_err(Error::io(&source))?);
        for header in headers {
            add(source::portable_file(unit, &header.path).as_bytes());
            add(header.hash.as_bytes());
        }
        Ok(hasher.finalize().to_hex()[..32].into())
    }

    /// The compiler, with the flags of the target and the include directories.
    fn command(&self, unit: &Unit) -> Command {
        let mut command = Command::new(&self.compiler.path);
        if std::env::var_os(TUNABLES).is_none() {
            command.env(TUNABLES, "glibc.malloc.hugetlb=1");
        }
        // Debug information names files by package: no path of this machine gets into the object.
        command.current_dir(&unit.root).args(compile_flags(unit.arch));
        command.arg(format!("-fdebug-compilation-dir={}", unit.package));
        command.arg(format!("-ffile-prefix-map={}={}", unit.root.display(), unit.package));
        for include in &unit.includes {
            command.arg(format!(
                "-ffile-prefix-map={}={}",
                include.display(),
                source::portable_name(include)
            ));
            command.arg("-I").arg(include);
        }
        command
    }

    fn output(&self, unit: &Unit, command: &mut Command) -> Result<Output, Error> {
        let output = command.output().map_err(Error::io(&self.compiler.path))?;
        if !output.status.success() {
            let output = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
            return Err(Error::Compile { file: unit.label(), arch: unit.arch, output });
        }
        Ok(output)
    }

    /// Runs the compiler: the object and what it warned of.
    fn run(&self, unit: &Unit) -> Result<(Vec<u8>, String), Error> {
        let dir = tempfile::tempdir().map_err(Error::io(Path::new("temporary directory")))?;
        let out = dir.path().join("object");
        let output = self.output(unit, self.command(unit).arg(&unit.source).arg("-o").arg(&out))?;
        let warnings = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        Ok((fs::read(&out).map_err(Error::io(&out))?, warnings))
    }

    /// Removes the oldest entries of a unit beyond [`KEPT`]. Whatever cannot be removed stays.
    fn prune(&self, unit: &Unit) {
        for end in ["", ".json"] {
            let suffix = format!(".{}{end}", unit.object_name());
            let mut entries: Vec<_> = fs::read_dir(&self.cache)
                .into_iter()
                .flatten()
                .flatten()
                .filter(|e| e.file_name().to_string_lossy().ends_with(&suffix))
                .filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path())))
                .collect();
            entries.sort();
            for (_, path) in entries.iter().rev().skip(KEPT) {
                let _ = fs::remove_file(path);
                let _ = fs::remove_file(path.with_extension("log"));
            }
        }
    }

    /// Writes a cache entry atomically.
    fn store(&self, entry: &Path, bytes: &[u8]) -> Result<(), Error> {
        fs::create_dir_all(&self.cache).map_err(Error::io(&self.cache))?;
        let mut file = tempfile::NamedTempFile::new_in(&self.cache).map_err(Error::io(&self.cache))?;
        file.write_all(bytes).map_err(Error::io(entry))?;
        file.persist(entry).map_err(|e| Error::io(entry)(e.error))?;
        Ok(())
    }
}

fn read_kernels(unit: &Unit, bytes: &[u8]) -> Result<Vec<KernelEntry>, Error> {
    if !unit.arch.is_amd() {
        return Ok(ptx_entries(&String::from_utf8_lossy(bytes)));
    }
    let object = CodeObject::parse(bytes)
        .and_then(|object| match object.arch == unit.arch {
            true => Ok(object),
            false => Err(hk_codeobj::ParseError::TargetMismatch {
                note: unit.arch.to_string(),
                header: object.arch,
            }),
        })
        .map_err(|source| Error::Object { file: unit.label(), arch: unit.arch, source })?;
    let entry = |k: &hk_codeobj::Kernel| KernelEntry {
        name: k.name.clone(),
        resources: Some(Resources::of(k, unit.arch)),
    };
    Ok(object.kernels.iter().map(entry).collect())
}

/// The names after `.visible .entry`.
fn ptx_entries(ptx: &str) -> Vec<KernelEntry> {
    ptx.lines()
        .filter_map(|line| line.trim_start().strip_prefix(".visible .entry "))
        .filter_map(|rest| rest.split('(').next())
        .map(|name| KernelEntry { name: name.trim().into(), resources: None })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether cargo made the target directory, or found it there: build scripts and tests share a cache.
    #[test]
    fn the_cache_is_in_the_target_directory() {
        for mark in ["CACHEDIR.TAG", ".rustc_info.json"] {
            let target = tempfile::tempdir().unwrap();
            std::fs::write(target.path().join(mark), "").unwrap();
            for below in ["debug/build/hk-norm-0123/out", "tmp", "debug/deps/tests-0123"] {
                assert_eq!(cache_dir(&target.path().join(below)), target.path().join("hk-cache"), "{mark}");
            }
        }
    }
}
