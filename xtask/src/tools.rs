//! Every program that the commands and tests of this workspace run: what for, who runs it, which package has it.
//!
//! `doctor` runs each of them, `setup` installs those that are missing, and a test compares this list with the sources.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hk_build::{Compiler, Search};

/// LLVM versions, best first. The oldest knows gfx950.
pub(crate) const VERSIONS: [u32; 3] = [22, 21, 20];

/// What a program is needed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Compiling: `cargo xtask demo` and everything else.
    Build,
    /// `cargo xtask test`.
    Tests,
    /// `.ci/run`, which installs its own.
    Ci,
    /// Installing what is missing.
    Install,
    /// Nothing: it is used where it is there.
    Option,
}

impl Need {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Need::Build => "build",
            Need::Tests => "tests",
            Need::Ci => "CI",
            Need::Install => "install",
            Need::Option => "optional",
        }
    }
}

/// A program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tool {
    /// Its name without a version.
    pub(crate) name: &'static str,
    /// How to get it: a Debian package with `{}` for LLVM's version, or a command.
    pub(crate) package: &'static str,
    pub(crate) need: Need,
    /// Who runs it.
    pub(crate) callers: &'static str,
}

const fn tool(name: &'static str, package: &'static str, need: Need, callers: &'static str) -> Tool {
    Tool { name, package, need, callers }
}

/// All programs, by what they are needed for.
pub(crate) const TOOLS: &[Tool] = &[
    tool("cargo", "https://rustup.rs", Need::Build, "xtask"),
    tool("rustc", "https://rustup.rs", Need::Build, "cargo, hk-build's tests"),
    tool("cc", "build-essential", Need::Build, "rustc as linker, tests of hk-core, hk-emu-rccl"),
    tool("clang++", "clang-{}", Need::Build, "hk-build, tests of hk-emu, hk-emu-hip, hk-codeobj, hk-cli"),
    tool("lld", "lld-{}", Need::Build, "clang++"),
    tool("llvm-mc", "llvm-{}", Need::Tests, "hk-emu's tests"),
    tool("llvm-objdump", "llvm-{}", Need::Tests, "hk-emu's tests"),
    tool("clang-offload-bundler", "clang-tools-{}", Need::Tests, "clang++ in hk-emu-hip's tests"),
    tool("rustfmt", "rustup component add rustfmt", Need::Ci, ".ci/run"),
    tool("cargo-clippy", "rustup component add clippy", Need::Ci, ".ci/run"),
    tool("clang-format", "clang-format-{}", Need::Ci, ".ci/run"),
    tool("python3", "python3", Need::Ci, ".ci/run, benches/peers, hk-cli's and hk-emu's validation"),
    tool("apt-get", "apt", Need::Install, "xtask setup, .ci/run"),
    tool("apt-cache", "apt", Need::Install, "xtask setup"),
    tool("sudo", "sudo", Need::Install, "xtask setup, .ci/run"),
    tool("env", "coreutils", Need::Install, "xtask setup, .ci/run"),
    tool("rustup", "https://rustup.rs", Need::Install, ".ci/run"),
    tool("cargo-nextest", "cargo install --locked cargo-nextest", Need::Option, "xtask test"),
];

/// Where the programs of this machine are.
pub(crate) struct Finder {
    search: Search,
    compiler: Option<Compiler>,
}

impl Finder {
    /// Searches as the callers of the programs do.
    pub(crate) fn from_env() -> Finder {
        let search = Search::from_env();
        let compiler = search.find().ok();
        Finder { search, compiler }
    }

    /// The file of a program.
    pub(crate) fn find(&self, tool: &Tool) -> Option<PathBuf> {
        match tool.name {
            "clang++" => self.compiler.as_ref().map(|c| c.path.clone()),
            "lld" => self.compiler.as_ref().map(|c| c.lld.clone()),
            "llvm-mc" | "llvm-objdump" => Some(self.llvm_tools()?.directory.join(self.llvm_name(tool.name)?)),
            "clang-offload-bundler" => self.beside_compiler(tool.name),
            "cargo" => env::var_os("CARGO").map(PathBuf::from).or_else(|| self.on_path(tool.name)),
            "clang-format" => VERSIONS
                .iter()
                .find_map(|v| self.on_path(&format!("{}-{v}", tool.name)))
                .or_else(|| self.on_path(tool.name)),
            name => self.on_path(name),
        }
    }

    /// The package that has a program for the compiler of this machine.
    pub(crate) fn package(&self, tool: &Tool) -> String {
        let version = self.compiler.as_ref().map_or(VERSIONS[0], |c| c.version.major);
        // hk-emu's tests compare with one version of LLVM, the newest.
        let version = if tool.name.starts_with("llvm-") { VERSIONS[0] } else { version };
        tool.package.replace("{}", &version.to_string())
    }

    /// What a program says of its version, on one line; the error if it does not run.
    pub(crate) fn version(&self, tool: &Tool, path: &Path) -> Result<String, String> {
        let mut command = Command::new(path);
        // lld chooses its kind by its name.
        command.args(
            (tool.name == "lld")
                .then_some("-flavor")
                .into_iter()
                .chain((tool.name == "lld").then_some("gnu")),
        );
        let output = command.arg("--version").output().map_err(|e| e.to_string())?;
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let line = text.lines().map(str::trim).find(|l| l.contains(|c: char| c.is_ascii_digit()));
        match output.status.success() {
            true => Ok(line.unwrap_or_default().to_owned()),
            false => Err(format!("{}: {}", output.status, text.trim_end())),
        }
    }

    /// LLVM's assembler and disassembler: in `HK_LLVM_BIN`, on `PATH` as the tests look for them, then beside the
    /// compiler.
    pub(crate) fn llvm_tools(&self) -> Option<LlvmTools> {
        let both = |dir: &Path, suffix: &str| {
            ["llvm-mc", "llvm-objdump"].iter().all(|tool| dir.join(format!("{tool}{suffix}")).is_file())
        };
        let tools = |dir: &Path, suffix: &str, exported| {
            both(dir, suffix).then(|| LlvmTools { directory: dir.into(), suffix: suffix.into(), exported })
        };
        if let Some(dir) = env::var_os("HK_LLVM_BIN") {
            return tools(Path::new(&dir), "", false);
        }
        let suffixes = VERSIONS.map(|v| format!("-{v}")).into_iter().chain([String::new()]);
        for suffix in suffixes {
            if let Some(found) = self.search.path.iter().find_map(|dir| tools(dir, &suffix, false)) {
                return Some(found);
            }
        }
        tools(self.compiler.as_ref()?.lld.parent()?, "", true)
    }

    fn llvm_name(&self, name: &str) -> Option<String> {
        Some(format!("{name}{}", self.llvm_tools()?.suffix))
    }

    /// What the compiler runs under this name: it looks beside itself, then on `PATH`, and prints the bare name when
    /// it finds none.
    fn beside_compiler(&self, name: &str) -> Option<PathBuf> {
        let clang = &self.compiler.as_ref()?.path;
        let output = Command::new(clang).arg(format!("-print-prog-name={name}")).output().ok()?;
        let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
        (path.components().count() > 1 && path.is_file()).then_some(path)
    }

    fn on_path(&self, name: &str) -> Option<PathBuf> {
        self.search.path.iter().map(|dir| dir.join(name)).find(|p| fs::metadata(p).is_ok_and(|m| m.is_file()))
    }
}

/// Where LLVM's assembler and disassembler are.
pub(crate) struct LlvmTools {
    pub(crate) directory: PathBuf,
    /// `-22`, or nothing.
    suffix: String,
    /// The tests find them through `HK_LLVM_BIN` only.
    pub(crate) exported: bool,
}
