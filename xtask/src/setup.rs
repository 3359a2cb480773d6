//! Getting the compiler and the LLVM tools onto this machine.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hk_build::{Compiler, Search};

use crate::{Failure, Result};

/// Options of every command that sets the machine up.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install nothing: fail, with the remedy, if something is missing.
    #[arg(long)]
    pub(crate) no_install: bool,
}

/// LLVM versions to install, best first. The oldest knows gfx950.
const VERSIONS: [u32; 3] = [22, 21, 20];

/// `cargo xtask setup`
pub(crate) fn run(args: &Args) -> Result {
    compiler(args)?;
    llvm_tools(args)?;
    Ok(())
}

/// Finds the compiler, or installs it.
pub(crate) fn compiler(args: &Args) -> Result<Compiler> {
    let search = Search::from_env();
    let error = match search.find() {
        Ok(compiler) => {
            println!("compiler: {compiler}");
            return Ok(compiler);
        }
        Err(error) => error,
    };
    // A wrong HK_CLANG is not mended by another package.
    if error.explicit || args.no_install {
        return Err(refusal(error.to_string(), args.no_install && !error.explicit));
    }
    println!("{error}");
    install(&Machine::this()?)?;
    let compiler = search.find().map_err(|e| Failure(format!("after the installation: {e}")))?;
    println!("compiler: {compiler}");
    Ok(compiler)
}

/// The directory of llvm-mc and llvm-objdump if they are not on `PATH`; installs them if they are nowhere.
pub(crate) fn llvm_tools(args: &Args) -> Result<Option<PathBuf>> {
    let search = Search::from_env();
    if let Some(tools) = find_llvm_tools(&search) {
        return Ok(tools.dir);
    }
    let text = "llvm-mc and llvm-objdump are missing, which the tests of the emulator compare with\n  install them: \
                apt-get install llvm-22";
    if args.no_install {
        return Err(refusal(text.into(), true));
    }
    println!("{text}");
    install(&Machine::this()?)?;
    match find_llvm_tools(&search) {
        Some(tools) => Ok(tools.dir),
        None => Err(Failure(format!("after the installation: {text}"))),
    }
}

fn refusal(text: String, no_install: bool) -> Failure {
    Failure(if no_install { format!("{text}\n  --no-install is given: nothing was installed") } else { text })
}

/// LLVM's assembler and disassembler.
pub(crate) struct LlvmTools {
    /// llvm-mc itself.
    pub(crate) llvm_mc: PathBuf,
    /// The value that `HK_LLVM_BIN` needs so that the tests find them, if they would not otherwise.
    pub(crate) dir: Option<PathBuf>,
}

/// Looks in `HK_LLVM_BIN`, on `PATH` as the tests do, then beside the compiler.
pub(crate) fn find_llvm_tools(search: &Search) -> Option<LlvmTools> {
    let both = |dir: &Path, suffix: &str| {
        let tools = ["llvm-mc", "llvm-objdump"].map(|tool| dir.join(format!("{tool}{suffix}")));
        tools.iter().all(|t| t.is_file()).then(|| tools[0].clone())
    };
    if let Some(dir) = env::var_os("HK_LLVM_BIN") {
        return both(Path::new(&dir), "").map(|llvm_mc| LlvmTools { llvm_mc, dir: None });
    }
    let suffixes = VERSIONS.map(|v| format!("-{v}")).into_iter().chain([String::new()]);
    for suffix in suffixes {
        if let Some(llvm_mc) = search.path.iter().find_map(|dir| both(dir, &suffix)) {
            return Some(LlvmTools { llvm_mc, dir: None });
        }
    }
    let dir = search.find().ok()?.lld.parent()?.to_owned();
    both(&dir, "").map(|llvm_mc| LlvmTools { llvm_mc, dir: Some(dir) })
}

/// What decides how packages are installed here.
pub(crate) struct Machine {
    root: bool,
    apt: bool,
    sudo: bool,
    /// Version code name, such as `bookworm`.
    codename: String,
}

impl Machine {
    /// This machine.
    pub(crate) fn this() -> Result<Machine> {
        let path = env::var_os("PATH").unwrap_or_default();
        let has = |name: &str| env::split_paths(&path).any(|dir| dir.join(name).is_file());
        let os = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let codename = os.lines().find_map(|l| l.strip_prefix("VERSION_CODENAME=")).unwrap_or("<codename>");
        Ok(Machine {
            root: fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0),
            apt: has("apt-get") && has("apt-cache"),
            sudo: has("sudo"),
            codename: codename.trim_matches('"').into(),
        })
    }

    /// A command of apt-get, as root.
    fn apt_get(&self, args: &[String]) -> Vec<String> {
        let prefix: &[&str] = if self.root { &["env"] } else { &["sudo", "env"] };
        let noninteractive = ["DEBIAN_FRONTEND=noninteractive", "apt-get"];
        prefix.iter().chain(&noninteractive).map(|s| s.to_string()).chain(args.iter().cloned()).collect()
    }

    /// Why nothing can be installed here, if so.
    fn obstacle(&self) -> Option<String> {
        let line = format!("install clang >= 20 and its lld, such as: {}", hk_build::INSTALL);
        if !self.apt {
            return Some(format!("this machine has no apt: {line}, and set HK_CLANG to its clang++"));
        }
        (!self.root && !self.sudo).then(|| format!("neither root nor sudo: as root, {line}"))
    }
}

fn packages(version: u32) -> [String; 3] {
    ["clang", "lld", "llvm"].map(|tool| format!("{tool}-{version}"))
}

/// The newest version that apt can install all packages of.
fn available() -> Option<u32> {
    VERSIONS.into_iter().find(|&v| {
        packages(v).iter().all(|package| {
            // A name that only other packages refer to has a policy, too, but no candidate.
            let policy = Command::new("apt-cache").args(["policy", package]).env("LC_ALL", "C").output();
            policy.is_ok_and(|o| {
                String::from_utf8_lossy(&o.stdout)
                    .lines()
                    .filter_map(|l| l.trim().strip_prefix("Candidate: "))
                    .any(|candidate| candidate != "(none)")
            })
        })
    })
}

/// Installs clang, lld and the LLVM tools after saying so.
fn install(machine: &Machine) -> Result {
    if let Some(obstacle) = machine.obstacle() {
        return Err(Failure(obstacle));
    }
    // A fresh image has no package lists, and an old list names files that are gone.
    let update = machine.apt_get(&["update".into()]);
    println!("updating the package lists: {}", update.join(" "));
    let updated = execute(&update);
    let Some(version) = available() else {
        updated?;
        return Err(Failure(foreign_source(&machine.codename)));
    };
    let mut args: Vec<String> = ["install", "-y", "--no-install-recommends"].map(String::from).into();
    args.extend(packages(version));
    let command = machine.apt_get(&args);
    println!("installing: {}", command.join(" "));
    execute(&command)
}

/// What to do where the distribution has no new enough clang. A foreign package source is the user's decision.
fn foreign_source(codename: &str) -> String {
    format!(
        "apt has none of clang-22, clang-21, clang-20. The LLVM project publishes packages for Debian and Ubuntu: add \
         its source llvm-toolchain-{codename}-22 as its web page on apt says, then: {}",
        hk_build::INSTALL
    )
}

fn execute(command: &[String]) -> Result {
    let [program, args @ ..] = command else { return Ok(()) };
    // apt-get's pages of output are of no use unless it fails; sudo asks on the terminal itself.
    let output = Command::new(program).args(args).stdin(Stdio::inherit()).output();
    let output = output.map_err(|e| Failure(format!("{program}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Err(Failure(format!("`{}` failed ({}):\n{}", command.join(" "), output.status, text.trim_end())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(root: bool, apt: bool, sudo: bool) -> Machine {
        Machine { root, apt, sudo, codename: "bookworm".into() }
    }

    #[test]
    fn root_needs_no_sudo_and_others_do() {
        let args: Vec<String> = ["install".into(), "-y".into()].into();
        let line = |m: Machine| m.apt_get(&args).join(" ");
        assert_eq!(line(machine(true, true, true)), "env DEBIAN_FRONTEND=noninteractive apt-get install -y");
        assert_eq!(
            line(machine(false, true, true)),
            "sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y"
        );
        assert!(machine(true, true, false).obstacle().is_none());
        assert!(machine(false, true, true).obstacle().is_none());
        assert!(machine(false, true, false).obstacle().unwrap().contains("neither root nor sudo"));
        assert!(machine(true, false, true).obstacle().unwrap().contains("no apt"));
    }

    #[test]
    fn the_foreign_source_is_for_this_release() {
        assert!(foreign_source("noble").contains("llvm-toolchain-noble-22"));
    }
}
