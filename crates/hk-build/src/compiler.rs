//! Finding a compiler that can build the kernels.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest clang that knows gfx950.
pub const MIN_VERSION: u32 = 20;

/// How to get a compiler, for error texts.
pub const INSTALL: &str = "apt-get install clang-22 lld-22 llvm-22";

/// The version of clang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// First number: what decides whether a compiler is new enough.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// Finds clang's version in what `--version` prints: by LLVM, a distribution, AMD's clang or hipcc. Apple numbers its
    /// clang otherwise and has no AMD target, so its text gives `None`.
    pub fn parse(text: &str) -> Option<Version> {
        let line = text.lines().find(|l| l.contains("clang version "))?;
        if line.contains("Apple") {
            return None;
        }
        let (_, rest) = line.split_once("clang version ")?;
        let number: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let mut parts = number.split('.').filter(|p| !p.is_empty()).map(str::parse);
        let mut next = || parts.next().and_then(Result::ok);
        Some(Version { major: next()?, minor: next().unwrap_or(0), patch: next().unwrap_or(0) })
    }
}

/// What kind of driver a compiler is. Both take the same flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompilerKind {
    /// clang++ of LLVM, a distribution or ROCm.
    Clang,
    /// ROCm's driver script around its clang.
    Hipcc,
}

/// A compiler that was found and is new enough.
#[derive(Debug, Clone)]
pub struct Compiler {
    /// The program.
    pub path: PathBuf,
    /// Which driver it is.
    pub kind: CompilerKind,
    /// Its version of clang.
    pub version: Version,
    /// What `--version` prints, without the directory it is installed in: part of the cache key.
    pub version_text: String,
    /// The linker it uses.
    pub lld: PathBuf,
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            CompilerKind::Clang => "clang",
            CompilerKind::Hipcc => "hipcc, clang",
        };
        write!(f, "{} ({kind} {})", self.path.display(), self.version)
    }
}

/// What became of a program that was tried.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// It is used, or would be if no other came first.
    Usable(Compiler),
    /// A clang older than [`MIN_VERSION`].
    TooOld(Version),
    /// Not a clang that is known: the first line that it printed.
    Unknown(String),
    /// New enough, but without lld beside it.
    NoLinker(Version),
    /// It could not be run.
    Broken(String),
}

/// A program that was tried.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The program.
    pub path: PathBuf,
    /// What became of it.
    pub verdict: Verdict,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.verdict {
            Verdict::Usable(compiler) => write!(f, "clang {}", compiler.version),
            Verdict::TooOld(version) => {
                write!(f, "clang {version} is too old, {MIN_VERSION} or newer is needed")
            }
            Verdict::Unknown(line) => write!(f, "unknown compiler: `{line}`"),
            Verdict::NoLinker(version) => {
                write!(f, "clang {version} finds no lld: apt-get install lld-{}", version.major)
            }
            Verdict::Broken(reason) => write!(f, "cannot be run: {reason}"),
        }
    }
}

/// No usable compiler: what was found instead and what to install.
#[derive(Debug, Clone)]
pub struct SearchError {
    /// What was found and why it is of no use, in the order of the search.
    pub found: Vec<Candidate>,
    /// `HK_CLANG` is set, so that nothing else was tried.
    pub explicit: bool,
}

impl std::error::Error for SearchError {}

impl fmt::Display for SearchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no usable compiler for the kernels: clang >= {MIN_VERSION} with lld, or ROCm's hipcc of that version"
        )?;
        if self.found.is_empty() {
            write!(f, "\n  none found: tried HK_CLANG, ROCM_PATH, hipcc, clang++-22 to clang++-20, clang++")?;
        }
        for candidate in &self.found {
            write!(f, "\n  {}{candidate}", if self.explicit { "HK_CLANG=" } else { "found " })?;
        }
        write!(f, "\n  install one: {INSTALL}")?;
        if self.explicit {
            write!(f, ", or correct HK_CLANG")
        } else {
            write!(f, ", or set HK_CLANG to a clang++")
        }
    }
}

/// Where to look for a compiler. [`Search::from_env`] is the usual one.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// `HK_CLANG`: if set, nothing else is tried.
    pub hk_clang: Option<OsString>,
    /// `ROCM_PATH`, or where ROCm is installed by default.
    pub rocm: Option<PathBuf>,
    /// The directories of `PATH`.
    pub path: Vec<PathBuf>,
}

impl Search {
    /// Reads `HK_CLANG`, `ROCM_PATH` (default `/opt/rocm`) and `PATH`.
    pub fn from_env() -> Search {
        let set = |name| env::var_os(name).filter(|v| !v.is_empty());
        Search {
            hk_clang: set("HK_CLANG"),
            rocm: Some(set("ROCM_PATH").map_or_else(|| "/opt/rocm".into(), PathBuf::from)),
            path: env::var_os("PATH").map(|p| env::split_paths(&p).collect()).unwrap_or_default(),
        }
    }

    /// Programs to try, best first; those that exist, and `HK_CLANG` even if it does not.
    fn programs(&self) -> Vec<PathBuf> {
        if let Some(clang) = &self.hk_clang {
            let clang = PathBuf::from(clang);
            let named = clang.components().count() == 1;
            return vec![if named { self.on_path(&clang).unwrap_or(clang) } else { clang }];
        }
        let rocm = self.rocm.iter().flat_map(|r| [r.join("llvm/bin/clang++"), r.join("bin/hipcc")]);
        let mut programs: Vec<PathBuf> = rocm.filter(|p| p.is_file()).collect();
        for name in ["hipcc", "clang++-22", "clang++-21", "clang++-20", "clang++"] {
            programs.extend(self.on_path(Path::new(name)).filter(|p| !programs.contains(p)));
        }
        programs
    }

    fn on_path(&self, name: &Path) -> Option<PathBuf> {
        self.path.iter().map(|dir| dir.join(name)).find(|p| p.is_file())
    }

    /// Tries every program and says what became of it.
    pub fn candidates(&self) -> Vec<Candidate> {
        self.programs().into_iter().map(probe).collect()
    }

    /// The first usable compiler.
    ///
    /// # Errors
    /// [`SearchError`] lists what was found and says what to install.
    pub fn find(&self) -> Result<Compiler, SearchError> {
        let mut found = Vec::new();
        for program in self.programs() {
            let candidate = probe(program);
            if let Verdict::Usable(compiler) = candidate.verdict {
                return Ok(compiler);
            }
            found.push(candidate);
        }
        Err(SearchError { found, explicit: self.hk_clang.is_some() })
    }
}

/// Runs a program to see what it is.
fn probe(path: PathBuf) -> Candidate {
    let verdict = match Command::new(&path).arg("--version").output() {
        Err(e) => Verdict::Broken(e.to_string()),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            match Version::parse(&text) {
                None => {
                    let all = text + &String::from_utf8_lossy(&output.stderr);
                    Verdict::Unknown(all.lines().find(|l| !l.trim().is_empty()).unwrap_or("").trim().into())
                }
                Some(version) if version.major < MIN_VERSION => Verdict::TooOld(version),
                Some(version) => match find_lld(&path) {
                    None => Verdict::NoLinker(version),
                    Some(lld) => Verdict::Usable(Compiler {
                        kind: if text.contains("HIP version") {
                            CompilerKind::Hipcc
                        } else {
                            CompilerKind::Clang
                        },
                        version,
                        version_text: text.lines().filter(|l| !l.starts_with("InstalledDir")).collect(),
                        lld,
                        path: path.clone(),
                    }),
                },
            }
        }
    };
    Candidate { path, verdict }
}

/// The lld that clang runs to link a code object. clang looks beside itself, then on `PATH`, and prints the bare name
/// when it finds none.
fn find_lld(clang: &Path) -> Option<PathBuf> {
    let output = Command::new(clang).arg("-print-prog-name=lld").output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    (path.components().count() > 1 && path.is_file()).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_known_compilers_parse() {
        let parse = |text| Version::parse(text).map(|v| (v.major, v.minor, v.patch));
        assert_eq!(
            parse("Debian clang version 22.1.8 (1~deb12u1)\nTarget: x86_64-pc-linux-gnu"),
            Some((22, 1, 8))
        );
        assert_eq!(parse("Ubuntu clang version 20.1.2 (0ubuntu1)"), Some((20, 1, 2)));
        assert_eq!(
            parse("clang version 21.0.0git (https://github.com/llvm/llvm-project 1234)"),
            Some((21, 0, 0))
        );
        let amd =
            "AMD clang version 20.0.0git (https://github.com/RadeonOpenCompute/llvm-project roc-7.0.0 25314)";
        assert_eq!(parse(amd), Some((20, 0, 0)));
        let hipcc = format!("HIP version: 7.0.51831-a3e329ad8\n{amd}");
        assert_eq!(parse(&hipcc), Some((20, 0, 0)));
        assert_eq!(parse("clang version 23"), Some((23, 0, 0)));
        assert_eq!(parse("Apple clang version 21.0.0 (clang-2100.1.1)"), None);
        assert_eq!(parse("g++ (Debian 12.2.0) 12.2.0"), None);
        assert_eq!(parse("clang version unknown"), None);
        assert_eq!(parse("clang version 99999999999999999999"), None);
        assert_eq!(parse(""), None);
    }
}
