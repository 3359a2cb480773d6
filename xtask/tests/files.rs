//! The text of the workspace.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The directory of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A text file, by its path in the workspace.
pub struct File {
    pub path: String,
    pub text: String,
}

impl File {
    /// The package that the file belongs to: `hk-norm`, `xtask`, or the first part of its path.
    pub fn package(&self) -> &str {
        self.path.strip_prefix("crates/").unwrap_or(&self.path).split('/').next().unwrap_or("")
    }

    /// The file's extension.
    pub fn extension(&self) -> &str {
        Path::new(&self.path).extension().and_then(|e| e.to_str()).unwrap_or("")
    }
}

/// All text files of the workspace but `target` and hidden directories other than `.ci`, in order.
pub fn all() -> Vec<File> {
    let mut files = Vec::new();
    walk(&root(), "", &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(files.len() > 200, "{} files", files.len());
    files
}

fn walk(dir: &Path, prefix: &str, files: &mut Vec<File>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        let hidden = name.starts_with('.') && name != ".ci";
        if entry.file_type().unwrap().is_dir() {
            if !hidden && path != "target" && name != "__pycache__" {
                walk(&entry.path(), &format!("{path}/"), files);
            }
        } else if !hidden && let Ok(text) = fs::read_to_string(entry.path()) {
            files.push(File { path, text });
        }
    }
}

/// The lines of comments in a source: number from 1, and text. Rust and C++ (`//`), Python, shell and TOML (`#`), and
/// every line of a Markdown file outside of code blocks.
pub fn comments(file: &File) -> Vec<(usize, &str)> {
    let lines = file.text.lines().enumerate().map(|(n, line)| (n + 1, line));
    match file.extension() {
        "rs" | "h" | "hip" | "c" | "cu" => lines.filter_map(|(n, l)| Some((n, slashes(l)?))).collect(),
        "py" | "sh" | "toml" => lines.filter_map(|(n, l)| Some((n, l.split_once('#')?.1))).collect(),
        "md" => {
            let mut code = false;
            let prose = |line: &&str| {
                code ^= line.trim_start().starts_with("```");
                !code
            };
            let mut prose = prose;
            lines.filter(|(_, line)| prose(line)).collect()
        }
        _ => Vec::new(),
    }
}

/// What follows `//`, unless it is part of an address.
fn slashes(line: &str) -> Option<&str> {
    let at = line.match_indices("//").map(|(at, _)| at).find(|&at| !line[..at].ends_with(':'))?;
    Some(line[at + 2..].trim_start_matches(['/', '!']))
}

/// Fails with the findings of each package.
pub fn assert_none(found: &BTreeMap<String, Vec<String>>) {
    let all: Vec<_> = found.values().flatten().map(String::as_str).collect();
    assert!(all.is_empty(), "\n{}", all.join("\n"));
}
