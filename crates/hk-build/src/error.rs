use std::path::{Path, PathBuf};

use hk_codeobj::{Arch, ParseError, UnknownArch};

use crate::SearchError;

/// Why kernels could not be compiled or embedded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable compiler.
    #[error(transparent)]
    Compiler(#[from] SearchError),
    /// `HK_TARGETS` or `--targets` has a name that is no target.
    #[error("targets: {0}")]
    Target(#[from] UnknownArch),
    /// The list of targets is empty.
    #[error("targets: the list is empty: expected some of gfx942, gfx950, sm_90, sm_90a")]
    NoTargets,
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What went wrong.
        source: std::io::Error,
    },
    /// The compiler rejected a source.
    #[error("{file} for {arch}: the compiler failed\n{output}")]
    Compile {
        /// Package and source file.
        file: String,
        /// The target.
        arch: Arch,
        /// What the compiler printed.
        output: String,
    },
    /// The compiler's output is not a code object.
    #[error("{file} for {arch}: unreadable code object: {source}")]
    Object {
        /// Package and source file.
        file: String,
        /// The target.
        arch: Arch,
        /// Why.
        source: ParseError,
    },
    /// Kernels need what they must not: a spill, scratch memory, or more LDS than the part has.
    #[error("{file} for {arch}: {}", violations.join("; "))]
    Resources {
        /// Package and source file.
        file: String,
        /// The target.
        arch: Arch,
        /// One text for each kernel and resource.
        violations: Vec<String>,
    },
    /// Parameters of kernels cannot be declared in Rust: padding, or two structs of one name.
    #[error("{0}")]
    Interface(String),
    /// Two sources would get the same Rust name.
    #[error("{0} and {1} both give the static {2}: rename one")]
    SameName(String, String, String),
}

impl Error {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    }
}
