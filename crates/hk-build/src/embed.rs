//! The build script of a family crate.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use hk_codeobj::Arch;

use crate::compile::{Builder, Built, cache_dir};
use crate::interface::Interface;
use crate::source::{Unit, identifier, package_units, parse_targets};
use crate::{Compiler, DEFAULT_TARGETS, Error, Search, SearchError};

/// Compiles every `*.hip` of `dir` (relative to the package) and embeds the objects: the whole of a `build.rs`.
///
/// Ends the process with status 1 and the compiler's messages on stderr if a kernel cannot be built.
pub fn compile_kernels(dir: &str) {
    match Embed::from_env(dir).and_then(|embed| embed.run()) {
        Ok(embedded) => embedded.directives.iter().for_each(|d| println!("cargo::{d}")),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

/// What a build script works with. [`Embed::from_env`] takes it from cargo's variables.
#[derive(Debug, Clone)]
pub struct Embed {
    /// The package's name.
    pub package: String,
    /// The package's directory.
    pub root: PathBuf,
    /// The directory of the sources, relative to `root`.
    pub dir: String,
    /// Where generated files go.
    pub out_dir: PathBuf,
    /// Where compiled objects are kept.
    pub cache: PathBuf,
    /// Directories for `#include <...>`.
    pub includes: Vec<PathBuf>,
    /// The targets.
    pub targets: Vec<Arch>,
    /// Whether the program holds its code objects. If `HK_EMBED` is 0 it reads them from a folder when it runs.
    pub embed: bool,
    /// Where to look for a compiler.
    pub search: Search,
    /// Compilers to run at the same time.
    pub threads: usize,
}

/// What a build script did.
#[derive(Debug, Clone)]
pub struct Embedded {
    /// What to tell cargo, without the leading `cargo::`.
    pub directives: Vec<String>,
    /// The compiled objects; empty if there is no compiler.
    pub objects: Vec<Built>,
}

impl Embed {
    /// Reads what cargo tells a build script, and `HK_TARGETS`.
    ///
    /// # Errors
    /// [`Error::Target`] or [`Error::NoTargets`] if `HK_TARGETS` is wrong, [`Error::Io`] outside of a build script.
    pub fn from_env(dir: &str) -> Result<Embed, Error> {
        let var = |name: &str| {
            env::var(name).map_err(|_| Error::Io {
                path: name.into(),
                source: std::io::Error::other("not set: this runs in a build script only"),
            })
        };
        let root = PathBuf::from(var("CARGO_MANIFEST_DIR")?);
        let out_dir = PathBuf::from(var("OUT_DIR")?);
        let includes = include_dirs(&root, dir, env::vars_os())?;
        Ok(Embed {
            package: var("CARGO_PKG_NAME")?,
            dir: dir.into(),
            cache: cache_dir(&out_dir),
            includes,
            targets: match env::var("HK_TARGETS") {
                Ok(list) if !list.trim().is_empty() => parse_targets(&list)?,
                _ => DEFAULT_TARGETS.into(),
            },
            embed: env::var("HK_EMBED").map_or(true, |value| value != "0"),
            search: Search::from_env(),
            threads: env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1),
            root,
            out_dir,
        })
    }

    /// Compiles and writes `kernels.rs`, `kernels.json` and the objects to `out_dir`.
    ///
    /// # Errors
    /// The first error of a source, or [`Error::Compiler`] if `HK_CLANG` is set to something useless. A machine without
    /// a compiler is not an error: the objects are then `missing`.
    pub fn run(&self) -> Result<Embedded, Error> {
        let mut directives: Vec<String> = ["HK_CLANG", "HK_EMBED", "HK_TARGETS", "ROCM_PATH"]
            .iter()
            .map(|name| format!("rerun-if-env-changed={name}"))
            .chain([format!("rerun-if-changed={}", self.root.join(&self.dir).display())])
            .collect();
        let units = package_units(&self.package, &self.root, &self.dir, &self.includes, &self.targets)?;
        check_names(&units)?;
        if !self.embed {
            let source = external_source(&units) + &self.committed()?.rust();
            self.write("kernels.rs", source.as_bytes())?;
            self.write("kernels.json", b"[]")?;
            return Ok(Embedded { directives, objects: Vec::new() });
        }
        let objects = match self.search.find() {
            Ok(compiler) => {
                directives.push(format!("rerun-if-changed={}", compiler.path.display()));
                self.compile(compiler, &units, &mut directives)?
            }
            Err(error) if error.explicit => return Err(error.into()),
            Err(error) => {
                directives.extend(missing_directives(self, &error));
                let source = missing_source(&units, &error) + &self.committed()?.rust();
                self.write("kernels.rs", source.as_bytes())?;
                self.write("kernels.json", b"[]")?;
                Vec::new()
            }
        };
        Ok(Embedded { directives, objects })
    }

    fn compile(
        &self,
        compiler: Compiler,
        units: &[Unit],
        directives: &mut Vec<String>,
    ) -> Result<Vec<Built>, Error> {
        let builder = Builder::new(compiler, &self.cache).threads(self.threads);
        let results = builder.compile_all(units, |_, _| ());
        let objects = results.into_iter().collect::<Result<Vec<Built>, Error>>()?;
        for object in &objects {
            self.write(&object.unit.object_name(), &object.bytes)?;
            directives.extend(object.warnings.lines().map(|line| format!("warning={line}")));
        }
        // A header that no source includes triggers no rebuild.
        let headers: BTreeSet<&PathBuf> = objects.iter().flat_map(|object| &object.headers).collect();
        directives.extend(headers.iter().map(|header| format!("rerun-if-changed={}", header.display())));
        let interface =
            Interface::of_package(objects.iter().map(|object| (&object.unit, &object.interface)))?;
        let source = embedded_source(units) + &interface.rust();
        self.write("kernels.rs", source.as_bytes())?;
        let manifest: Vec<_> = objects.iter().map(Built::entry).collect();
        let json = serde_json::to_vec_pretty(&manifest).map_err(|e| Error::io(&self.out_dir)(e.into()))?;
        self.write("kernels.json", &json)?;
        Ok(objects)
    }

    /// The committed interface.
    fn committed(&self) -> Result<Interface, Error> {
        Interface::read(&self.root.join(&self.dir))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.out_dir.join(name);
        fs::write(&path, bytes).map_err(Error::io(&path))
    }
}

/// The directories of device headers: those that dependencies publish (`links = "hk_core"` and
/// `cargo::metadata=include=..` give `DEP_HK_CORE_INCLUDE`), by name, then the package's own `include` beside its sources.
fn include_dirs(
    root: &Path,
    dir: &str,
    vars: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Vec<PathBuf>, Error> {
    let mut published = BTreeMap::new();
    for (name, path) in vars {
        let name = name.to_string_lossy().into_owned();
        let Some(links) = name.strip_prefix("DEP_HK_").and_then(|rest| rest.strip_suffix("_INCLUDE")) else {
            continue;
        };
        let path = PathBuf::from(path);
        if !path.is_dir() {
            let package = format!("hk-{}", links.to_lowercase().replace('_', "-"));
            let what = format!("the headers of {package} are not there: cargo clean -p {package}");
            let source = std::io::Error::new(std::io::ErrorKind::NotFound, what);
            return Err(Error::Io { path, source });
        }
        published.insert(name, path);
    }
    let own = Some(root.join(dir).join("include")).filter(|dir| dir.is_dir());
    Ok(published.into_values().chain(own).collect())
}

/// The Rust name of a source's objects: `rms-norm.hip` is `RMS_NORM`.
fn static_name(unit: &Unit) -> String {
    identifier(&unit.stem()).to_uppercase()
}

fn check_names(units: &[Unit]) -> Result<(), Error> {
    let mut names = BTreeMap::new();
    for unit in units {
        match names.insert(static_name(unit), unit) {
            Some(other) if other.source != unit.source => {
                return Err(Error::SameName(other.label(), unit.label(), static_name(unit)));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The units by source, in order.
fn by_source(units: &[Unit]) -> BTreeMap<String, Vec<&Unit>> {
    let mut map: BTreeMap<String, Vec<&Unit>> = BTreeMap::new();
    for unit in units {
        map.entry(static_name(unit)).or_default().push(unit);
    }
    map
}

fn rust_arch(arch: Arch) -> &'static str {
    match arch {
        Arch::Gfx942 => "Gfx942",
        Arch::Gfx950 => "Gfx950",
        Arch::Sm90 => "Sm90",
        Arch::Sm90a => "Sm90a",
    }
}

fn embedded_source(units: &[Unit]) -> String {
    let mut text = String::new();
    for (name, units) in by_source(units) {
        let Some(first) = units.first() else { continue };
        let _ = writeln!(text, "/// The code objects of `{}`.", first.source.display());
        let _ = writeln!(text, "pub static {name}: hk_core::CodeObjects =");
        let _ = writeln!(text, "    hk_core::CodeObjects::embedded({:?}, &[", first.stem());
        for unit in units {
            let (arch, object) = (rust_arch(unit.arch), format!("/{}", unit.object_name()));
            let bytes = format!("include_bytes!(concat!(env!(\"OUT_DIR\"), {object:?})).as_slice()");
            let _ = writeln!(text, "        (hk_core::Arch::{arch}, {bytes}),");
        }
        let _ = writeln!(text, "    ]);");
    }
    text
}

fn external_source(units: &[Unit]) -> String {
    let mut text = String::new();
    for (name, units) in by_source(units) {
        let Some(first) = units.first() else { continue };
        let _ = writeln!(text, "/// The code objects of `{}`, read at run time.", first.source.display());
        let _ = writeln!(text, "pub static {name}: hk_core::CodeObjects =");
        let _ =
            writeln!(text, "    hk_core::CodeObjects::external({:?}, {:?});", first.package, first.stem());
    }
    text
}

fn missing_source(units: &[Unit], error: &SearchError) -> String {
    let mut text = String::new();
    for (name, units) in by_source(units) {
        let Some(first) = units.first() else { continue };
        let _ = writeln!(text, "/// The code objects of `{}`, not built.", first.source.display());
        let _ = writeln!(text, "pub static {name}: hk_core::CodeObjects =");
        let _ =
            writeln!(text, "    hk_core::CodeObjects::missing({:?}, {:?});", first.stem(), error.to_string());
    }
    text
}

/// Warns, and has cargo run the build script again with the next build: a file that does not exist always counts as
/// changed. So the kernels are built as soon as a compiler is there, wherever it appears.
fn missing_directives(embed: &Embed, error: &SearchError) -> Vec<String> {
    let mut directives = vec![format!("rerun-if-changed={}", embed.out_dir.join("no-compiler").display())];
    directives.push(format!("warning=the kernels of {} are not built", embed.package));
    directives.extend(error.to_string().lines().map(|line| format!("warning={line}")));
    directives
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_all_dependencies_and_the_packages_own() {
        let dir = tempfile::tempdir().unwrap();
        let [core, gemm, own] = ["core", "gemm", "moe/hip/include"].map(|name| dir.path().join(name));
        for path in [&core, &gemm, &own] {
            fs::create_dir_all(path).unwrap();
        }
        let var = |name: &str, path: &Path| (OsString::from(name), path.as_os_str().to_owned());
        let vars = [
            var("DEP_HK_GEMM_INCLUDE", &gemm),
            var("DEP_Z_INCLUDE", Path::new("/none")),
            var("DEP_HK_CORE_INCLUDE", &core),
        ];
        let root = dir.path().join("moe");
        assert_eq!(include_dirs(&root, "hip", vars.into_iter()).unwrap(), [core, gemm, own]);
        let gone = [var("DEP_HK_GEMM_INCLUDE", Path::new("/none"))];
        let error = include_dirs(&root, "hip", gone.into_iter()).unwrap_err().to_string();
        assert!(error.contains("cargo clean -p hk-gemm"), "{error}");
    }
}
