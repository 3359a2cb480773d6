//! The sources of a package and what they depend on.

use std::fs;
use std::path::{Path, PathBuf};

use hk_codeobj::Arch;

use crate::Error;

/// One HIP source for one target: what one run of the compiler makes.
#[derive(Debug, Clone)]
pub struct Unit {
    /// The package, such as `hk-norm`.
    pub package: String,
    /// The package's directory.
    pub root: PathBuf,
    /// The source, relative to `root`.
    pub source: PathBuf,
    /// Directories for `#include <...>`, absolute.
    pub includes: Vec<PathBuf>,
    /// The target.
    pub arch: Arch,
}

impl Unit {
    /// The source's name without its extension, such as `rmsnorm`.
    pub fn stem(&self) -> String {
        self.source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Package and source, for messages.
    pub fn label(&self) -> String {
        format!("{}/{}", self.package, self.source.display())
    }

    /// The name of the compiled file, such as `rmsnorm.gfx942.co`.
    pub fn object_name(&self) -> String {
        format!("{}.{}.{}", self.stem(), self.arch, if self.arch.is_amd() { "co" } else { "ptx" })
    }
}

/// The include directories that the build script of a package of this workspace has: those of the dependencies in its `Cargo.toml`, by
/// name, then its own.
///
/// # Errors
/// [`Error::Io`] if the manifest cannot be read.
pub fn package_includes(package: &Path) -> Result<Vec<PathBuf>, Error> {
    let manifest = package.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).map_err(Error::io(&manifest))?;
    let dependencies = text.lines().skip_while(|line| line.trim() != "[dependencies]").skip(1);
    let mut names: Vec<&str> = dependencies
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .filter(|name| name.starts_with("hk-"))
        .collect();
    names.sort_unstable();
    let of_others = names.into_iter().map(|name| package.with_file_name(name));
    let all = of_others.chain([package.into()]).map(|dir| dir.join("hip/include"));
    Ok(all.filter(|dir| dir.is_dir()).collect())
}

/// The units of a package: every `*.hip` directly in `dir` (relative to `root`), by name, for each target.
///
/// # Errors
/// [`Error::Io`] if the directory cannot be read.
pub fn package_units(
    package: &str,
    root: &Path,
    dir: &str,
    includes: &[PathBuf],
    targets: &[Arch],
) -> Result<Vec<Unit>, Error> {
    let folder = root.join(dir);
    let mut sources = Vec::new();
    for entry in fs::read_dir(&folder).map_err(Error::io(&folder))? {
        let path = entry.map_err(Error::io(&folder))?.path();
        if path.extension().is_some_and(|e| e == "hip") && path.is_file() {
            sources.extend(path.file_name().map(|name| Path::new(dir).join(name)));
        }
    }
    sources.sort();
    let unit = |source: &PathBuf, arch| Unit {
        package: package.into(),
        root: root.into(),
        source: source.clone(),
        includes: includes.into(),
        arch,
    };
    Ok(sources.iter().flat_map(|s| targets.iter().map(move |&arch| unit(s, arch))).collect())
}

/// Reads a comma-separated list of targets; each is listed once, in the order given.
///
/// # Errors
/// [`Error::Target`] names a word that is no target, [`Error::NoTargets`] an empty list.
pub fn parse_targets(list: &str) -> Result<Vec<Arch>, Error> {
    let mut targets = Vec::new();
    for name in list.split(',').map(str::trim).filter(|n| !n.is_empty()) {
        let arch = name.parse()?;
        if !targets.contains(&arch) {
            targets.push(arch);
        }
    }
    if targets.is_empty() { Err(Error::NoTargets) } else { Ok(targets) }
}

/// A stem as a Rust name in lower case: `rms-norm` is `rms_norm`.
pub(crate) fn identifier(stem: &str) -> String {
    let lower = stem.to_lowercase();
    let name: String = lower.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if name.starts_with(|c: char| c.is_ascii_digit()) { format!("_{name}") } else { name }
}

/// The files of a dependency list as make has it (`target: source header \\ ..`), without the target.
pub(crate) fn dependencies(list: &str) -> Vec<PathBuf> {
    let files = list.split_once(':').map_or("", |(_, files)| files).replace("\\\n", " ");
    // A blank in a name has a backslash.
    let files = files.replace("\\ ", "\0");
    files.split_whitespace().map(|file| file.replace('\0', " ").into()).collect()
}

/// A name of a file that `unit` includes that does not depend on where the package lies.
pub(crate) fn portable_file(unit: &Unit, file: &Path) -> String {
    for (i, dir) in unit.includes.iter().enumerate() {
        if let Ok(rest) = file.strip_prefix(dir) {
            return format!("include{i}/{}", rest.display());
        }
    }
    file.strip_prefix(&unit.root).unwrap_or(file).display().to_string()
}

/// How an include directory is called in debug information: the package that it belongs to, and the rest of its path.
pub(crate) fn portable_name(dir: &Path) -> String {
    for ancestor in dir.ancestors() {
        if ancestor.join("Cargo.toml").is_file() {
            let package = ancestor.file_name().unwrap_or_default().to_string_lossy();
            let rest = dir.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return Path::new(&*package).join(rest).display().to_string();
        }
    }
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependency_lists_are_read() {
        let list = "o: hip/a.hip hip/b.h \\\n  /with\\ blank/c.h \\\n d.h\n";
        let files = dependencies(list);
        assert_eq!(files, ["hip/a.hip", "hip/b.h", "/with blank/c.h", "d.h"].map(PathBuf::from));
    }

    #[test]
    fn targets_are_listed_once_in_order() {
        assert_eq!(parse_targets("gfx950, gfx942,gfx950,").unwrap(), [Arch::Gfx950, Arch::Gfx942]);
        assert_eq!(parse_targets("sm_90").unwrap(), [Arch::Sm90]);
        assert!(matches!(parse_targets(" ,"), Err(Error::NoTargets)));
        let error = parse_targets("gfx942,gfx90a").unwrap_err().to_string();
        assert_eq!(error, "targets: unknown target `gfx90a`: expected gfx942, gfx950, sm_90 or sm_90a");
    }
}
