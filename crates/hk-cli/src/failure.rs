//! Why a command fails.

use std::fmt;
use std::path::Path;

/// `Result` with a [`Failure`].
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a command fails, in words for the user.
#[derive(Debug)]
pub struct Failure(String);

impl Failure {
    /// With this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// What went wrong with a file.
    pub fn file(path: &Path, what: impl fmt::Display) -> Self {
        Self(format!("{}: {what}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}
