//! The build script of a family crate.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use hk_codeobj::Arch;

use crate::compile::{Builder, Built, cache_dir};
use crate::source::{Unit, package_units, parse_targets};
use crate::{Compiler, DEFAULT_TARGETS, Error, Search, SearchError};

/// Compiles every `*.hip` of `dir` (relative to the package) and embeds the objects: the whole of a `build.rs`.
///
/// Ends the process with status 1 and the compiler's words on stderr if a kernel cannot be built.
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
        // hk-core's own kernels use the headers that it publishes to all others.
        let includes = match env::var_os("DEP_HK_CORE_INCLUDE").map(PathBuf::from) {
            Some(dir) if dir.is_dir() => vec![dir],
            Some(path) => {
                let what = "the headers of hk-core are not there: cargo clean -p hk-core";
                return Err(Error::Io {
                    path,
                    source: std::io::Error::new(std::io::ErrorKind::NotFound, what),
                });
            }
            None => Some(root.join("hip/include")).filter(|dir| dir.is_dir()).into_iter().collect(),
        };
        Ok(Embed {
            package: var("CARGO_PKG_NAME")?,
            dir: dir.into(),
            cache: cache_dir(&out_dir),
            includes,
            targets: match env::var("HK_TARGETS") {
                Ok(list) if !list.trim().is_empty() => parse_targets(&list)?,
                _ => DEFAULT_TARGETS.into(),
            },
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
        let mut directives: Vec<String> = ["HK_CLANG", "HK_TARGETS", "ROCM_PATH"]
            .iter()
            .map(|name| format!("rerun-if-env-changed={name}"))
            .chain([format!("rerun-if-changed={}", self.root.join(&self.dir).display())])
            .chain(self.includes.iter().map(|dir| format!("rerun-if-changed={}", dir.display())))
            .collect();
        let units = package_units(&self.package, &self.root, &self.dir, &self.includes, &self.targets)?;
        check_names(&units)?;
        let objects = match self.search.find() {
            Ok(compiler) => {
                directives.push(format!("rerun-if-changed={}", compiler.path.display()));
                self.compile(compiler, &units, &mut directives)?
            }
            Err(error) if error.explicit => return Err(error.into()),
            Err(error) => {
                directives.extend(missing_directives(self, &error));
                self.write("kernels.rs", missing_source(&units, &error).as_bytes())?;
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
        self.write("kernels.rs", embedded_source(units).as_bytes())?;
        let manifest: Vec<_> = objects.iter().map(Built::entry).collect();
        let json = serde_json::to_vec_pretty(&manifest).map_err(|e| Error::io(&self.out_dir)(e.into()))?;
        self.write("kernels.json", &json)?;
        Ok(objects)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.out_dir.join(name);
        fs::write(&path, bytes).map_err(Error::io(&path))
    }
}

/// The Rust name of a source's objects: `rms-norm.hip` is `RMS_NORM`.
fn static_name(unit: &Unit) -> String {
    let upper = unit.stem().to_uppercase();
    let name: String = upper.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if name.starts_with(|c: char| c.is_ascii_digit()) { format!("_{name}") } else { name }
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
