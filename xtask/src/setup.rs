//! Installs the compiler and the LLVM tools.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use hk_build::{Compiler, Search};

use crate::tools::{Finder, Need, TOOLS, Tool, VERSIONS};
use crate::{Failure, Result};

/// Options of every command that sets the machine up.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install nothing: fail, with the remedy, if something is missing.
    #[arg(long)]
    pub(crate) no_install: bool,
}

/// `cargo xtask setup`
pub(crate) fn run(args: &Args) -> Result {
    ready(args, Need::Tests)?;
    Ok(())
}

/// What the set-up found or installed.
pub(crate) struct Ready {
    /// The compiler of the kernels.
    pub(crate) compiler: Compiler,
    /// The value that `HK_LLVM_BIN` needs so that the tests find LLVM's tools, if they would not otherwise.
    pub(crate) llvm_bin: Option<PathBuf>,
}

/// Finds what building (`Need::Build`), or building and testing (`Need::Tests`), needs, and installs what is missing.
pub(crate) fn ready(args: &Args, need: Need) -> Result<Ready> {
    let search = Search::from_env();
    let text = match search.find() {
        // A wrong HK_CLANG is not mended by another package.
        Err(error) if error.explicit => return Err(Failure(error.to_string())),
        Err(error) => Some(error.to_string()),
        Ok(_) => missing_tools(need),
    };
    if let Some(text) = text {
        if args.no_install {
            return Err(Failure(format!("{text}\n  --no-install is given: nothing was installed")));
        }
        println!("{text}");
        install(&Machine::this()?, need)?;
        if let Some(text) = missing_tools(need) {
            return Err(Failure(format!("after the installation: {text}")));
        }
    }
    let compiler = search.find().map_err(|e| Failure(format!("after the installation: {e}")))?;
    println!("compiler: {compiler}");
    let llvm_tools = Finder::from_env().llvm_tools().filter(|tools| tools.exported);
    Ok(Ready { compiler, llvm_bin: llvm_tools.map(|tools| tools.directory) })
}

/// The LLVM programs that are missing for `need`, each with who runs it, and what installs them.
fn missing_tools(need: Need) -> Option<String> {
    let finder = Finder::from_env();
    let missing: Vec<&Tool> = llvm(need).filter(|tool| finder.find(tool).is_none()).collect();
    let lines: Vec<String> =
        missing.iter().map(|tool| format!("{} is missing, needed by {}", tool.name, tool.callers)).collect();
    let packages = packages(missing.into_iter(), |tool| finder.package(tool)).join(" ");
    (!lines.is_empty()).then(|| format!("{}\n  install: apt-get install {packages}", lines.join("\n")))
}

/// The programs from LLVM's packages that `need` asks for.
fn llvm(need: Need) -> impl Iterator<Item = &'static Tool> {
    let needed = move |tool: &&Tool| tool.need == Need::Build || tool.need == need;
    TOOLS.iter().filter(needed).filter(|tool| tool.package.contains("{}"))
}

/// The packages of `tools`, each once.
fn packages<'a>(tools: impl Iterator<Item = &'a Tool>, package: impl Fn(&Tool) -> String) -> Vec<String> {
    let mut packages = Vec::new();
    for package in tools.map(package) {
        if !packages.contains(&package) {
            packages.push(package);
        }
    }
    packages
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

/// Whether apt can install a package.
fn available(package: &str) -> bool {
    // A name that only other packages refer to has a policy, too, but no candidate.
    let policy = Command::new("apt-cache").args(["policy", package]).env("LC_ALL", "C").output();
    policy.is_ok_and(|o| {
        String::from_utf8_lossy(&o.stdout)
            .lines()
            .filter_map(|l| l.trim().strip_prefix("Candidate: "))
            .any(|candidate| candidate != "(none)")
    })
}

/// Installs the LLVM packages that `need` asks for and that are missing, after saying so.
fn install(machine: &Machine, need: Need) -> Result {
    if let Some(obstacle) = machine.obstacle() {
        return Err(Failure(obstacle));
    }
    // A fresh image has no package lists, and an old list names files that are gone.
    let update = machine.apt_get(&["update".into()]);
    println!("updating the package lists: {}", update.join(" "));
    let updated = execute(&update);
    let finder = Finder::from_env();
    let packages = if llvm(Need::Build).all(|tool| finder.find(tool).is_some()) {
        let missing = llvm(need).filter(|tool| finder.find(tool).is_none());
        Some(packages(missing, |tool| finder.package(tool))).filter(|p| p.iter().all(|p| available(p)))
    } else {
        // The newest version that has all of them.
        let of = |v: &u32| packages(llvm(need), |tool| tool.package.replace("{}", &v.to_string()));
        VERSIONS.iter().map(of).find(|packages| packages.iter().all(|p| available(p)))
    };
    let Some(packages) = packages else {
        updated?;
        return Err(Failure(foreign_source(&machine.codename)));
    };
    let mut args: Vec<String> = ["install", "-y", "--no-install-recommends"].map(String::from).into();
    args.extend(packages);
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
