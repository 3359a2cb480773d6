//! What `HK_SANITIZE_OPTIONS` says about reports of wrong kernels: which kernels are checked, what is suppressed, where reports go,
//! and how the program exits. Which checks there are, `HK_SANITIZE` says.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::ffi::c_int;
use std::fmt::Write as _;
use std::fs::{File, read_to_string};
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, OnceLock};

use hk_emu::{Check, Checks, Fault};
use serde::Serialize;

use crate::memory;
use crate::printf::flush_all;
use crate::runtime::{Device, lock, say};
use crate::stats;

/// The variable, for messages.
const VARIABLE: &str = "HK_SANITIZE_OPTIONS";
const WANT: &str = "expected some of kernel-name=PATTERN, suppressions=FILE, error-exitcode=N, json=FILE, leak-check=yes, \
                    backtrace=no";

/// The options, and what was found.
#[derive(Default)]
pub(crate) struct Sanitize {
    /// Kernels that are checked; all if there are none.
    kernels: Vec<String>,
    suppressions: Vec<Suppression>,
    exit_code: Option<c_int>,
    json: Option<Mutex<File>>,
    leaks: bool,
    backtraces: bool,
    found: AtomicU64,
    /// Where live memory was allocated, with leak check and backtraces.
    allocations: Mutex<HashMap<u64, Vec<String>>>,
}

/// Checks that kernels of this name do not run under.
#[derive(Debug, PartialEq)]
struct Suppression {
    checks: Checks,
    kernel: String,
}

impl Suppression {
    /// `CHECKS:PATTERN`; nothing for empty lines and comments.
    fn parse(line: &str) -> Result<Option<Suppression>, String> {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            return Ok(None);
        }
        let (checks, kernel) =
            line.split_once(':').ok_or_else(|| format!("`{line}` is not CHECKS:KERNEL"))?;
        let checks = checks.trim().parse().map_err(|error| format!("`{line}`: {error}"))?;
        Ok(Some(Suppression { checks, kernel: kernel.trim().to_owned() }))
    }
}

/// Whether a name is the pattern's, in which `*` is any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, rest)) => name.strip_prefix(head).is_some_and(|tail| {
            (0..=tail.len()).any(|i| tail.is_char_boundary(i) && matches(rest, &tail[i..]))
        }),
    }
}

fn yes(value: &str) -> Result<bool, String> {
    match value {
        "yes" | "full" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("`{value}` is neither yes nor no")),
    }
}

impl Sanitize {
    /// `OPTION=VALUE[,..]`
    fn parse(text: &str) -> Result<Sanitize, String> {
        let mut all = Sanitize { backtraces: true, ..Sanitize::default() };
        for option in text.split(',').map(str::trim).filter(|option| !option.is_empty()) {
            let (key, value) = option.split_once('=').ok_or_else(|| format!("`{option}`, {WANT}"))?;
            let file = |error: std::io::Error| format!("{key}: {value}: {error}");
            match key {
                "kernel-name" => all.kernels.push(value.to_owned()),
                "suppressions" => {
                    for line in read_to_string(value).map_err(file)?.lines() {
                        all.suppressions.extend(Suppression::parse(line)?);
                    }
                }
                "error-exitcode" => {
                    let code = value.parse().ok().filter(|code| (1..256).contains(code));
                    all.exit_code = Some(code.ok_or_else(|| format!("`{option}`, expected 1 to 255"))?);
                }
                "json" => all.json = Some(Mutex::new(File::create(value).map_err(file)?)),
                "leak-check" => all.leaks = yes(value)?,
                "backtrace" => all.backtraces = yes(value)?,
                _ => return Err(format!("`{option}`, {WANT}")),
            }
        }
        Ok(all)
    }

    /// The checks of a kernel, of those that `HK_SANITIZE` names.
    pub fn checks(&self, kernel: &str) -> Checks {
        if !self.kernels.is_empty() && !self.kernels.iter().any(|pattern| matches(pattern, kernel)) {
            return Checks::NONE;
        }
        let suppressed = self.suppressions.iter().filter(|rule| matches(&rule.kernel, kernel));
        let off = suppressed.fold(Checks::NONE, |off, rule| off | rule.checks);
        Check::ALL.into_iter().filter(|check| !off.has(*check)).fold(Checks::NONE, |on, check| on | check)
    }

    /// The stack of a launch, for what its kernel does wrong later. Only where reports are asked for: it takes longer than a launch.
    pub fn launched(&self) -> Option<Backtrace> {
        static ASKED: LazyLock<bool> =
            LazyLock::new(|| ["HK_SANITIZE", VARIABLE].iter().any(|name| std::env::var_os(name).is_some()));
        (self.backtraces && *ASKED).then(Backtrace::force_capture)
    }

    /// Reports what a kernel did wrong, and where it was launched.
    pub fn report(&self, device: &Device, stream: u64, fault: &Fault, launched: Option<&Backtrace>) {
        let frames = launched.map_or(vec![], host_frames);
        let at = format!("device {} ({}), stream {stream}", device.ordinal, device.arch);
        say!("{at}: {fault}{}", listed("launched", &frames));
        self.keep(&Report {
            device: device.ordinal,
            stream: Some(stream),
            fault: Some(fault),
            leak: None,
            frames,
        });
    }

    /// Counts a finding and writes it to the file of reports.
    fn keep(&self, report: &Report<'_>) {
        self.found.fetch_add(1, Relaxed);
        let Some(json) = &self.json else { return };
        let written = serde_json::to_string(report).map_err(std::io::Error::from);
        if let Err(error) = written.and_then(|line| writeln!(lock(json), "{line}")) {
            say!("{VARIABLE}: json: {error}");
        }
    }

    /// Remembers where memory was allocated.
    pub fn allocated(&self, addr: u64) {
        if self.leaks && self.backtraces {
            lock(&self.allocations).insert(addr, host_frames(&Backtrace::force_capture()));
        }
    }

    /// At the end of the program.
    fn end(&self) {
        if self.leaks {
            for leak in memory::live() {
                let frames = lock(&self.allocations).remove(&leak.address).unwrap_or_default();
                let Leak { address, bytes, kind, device } = leak;
                let at = listed("allocated", &frames);
                say!("leak of {bytes} bytes at {address:#x} of device {device}, {kind}{at}");
                self.keep(&Report { device, stream: None, fault: None, leak: Some(leak), frames });
            }
        }
        self.exit();
    }

    /// Ends the program with the code for errors, if there is one and there were any.
    fn exit(&self) {
        let (found, Some(code)) = (self.found.load(Relaxed), self.exit_code) else { return };
        if found != 0 {
            say!("{found} errors: exit code {code}");
            flush_all();
            // SAFETY: ends the process, which is ending.
            unsafe { _exit(code) };
        }
    }
}

unsafe extern "C" {
    fn _exit(code: c_int) -> !;
}

/// Memory that nobody freed.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Leak {
    pub address: u64,
    pub bytes: u64,
    /// The function that allocates such memory.
    pub kind: &'static str,
    #[serde(skip)]
    pub device: usize,
}

/// A line of the file of reports.
#[derive(Serialize)]
struct Report<'a> {
    device: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<&'a Fault>,
    #[serde(skip_serializing_if = "Option::is_none")]
    leak: Option<Leak>,
    #[serde(rename = "backtrace", skip_serializing_if = "Vec::is_empty")]
    frames: Vec<String>,
}

/// The functions of the program that led to a call of this library, innermost first: from the exported function on.
fn host_frames(stack: &Backtrace) -> Vec<String> {
    let text = stack.to_string();
    let mut frames: Vec<String> = vec![];
    for line in text.lines().map(str::trim) {
        match line.strip_prefix("at ") {
            Some(place) => {
                if let Some(frame) = frames.last_mut() {
                    let _ = write!(frame, " ({place})");
                }
            }
            None => {
                let function = line.split_once(": ").map_or(line, |(_, function)| function);
                frames.push(function.to_owned());
            }
        }
    }
    let exported = |frame: &String| frame.starts_with("hip") || frame.starts_with("__hip");
    let first = frames.iter().rposition(exported).unwrap_or(0);
    frames.drain(..first);
    // Of the exported function, its name alone.
    if let Some(frame) = frames.first_mut() {
        frame.truncate(frame.find(" (").unwrap_or(frame.len()));
    }
    let last = frames
        .iter()
        .position(|frame| frame == "main" || frame.starts_with("main ("))
        .map_or(frames.len(), |i| i + 1);
    frames.truncate(last);
    frames
}

/// Frames of a report on stderr: interpreters have many more.
const SHOWN: usize = 12;

/// The first frames, a line for each.
fn listed(verb: &str, frames: &[String]) -> String {
    let mut text = String::new();
    for (i, frame) in frames.iter().take(SHOWN).enumerate() {
        let _ = write!(text, "\n  {} {frame}", if i == 0 { format!("{verb} by") } else { "from".into() });
    }
    if let Some(more @ 1..) = frames.len().checked_sub(SHOWN) {
        let _ = write!(text, "\n  and {more} more");
    }
    text
}

static OPTIONS: OnceLock<Result<Sanitize, String>> = OnceLock::new();

/// The options of the environment.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn from_environment() -> Result<&'static Sanitize, String> {
    let options = OPTIONS.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        Sanitize::parse(&text).map_err(|error| format!("{VARIABLE}: {error}"))
    });
    options.as_ref().map_err(Clone::clone)
}

/// The options; where they are wrong there are no devices, and these do not matter.
pub(crate) fn options() -> &'static Sanitize {
    static NONE: OnceLock<Sanitize> = OnceLock::new();
    from_environment().unwrap_or_else(|_| NONE.get_or_init(Sanitize::default))
}

/// Ends the program because of what a kernel has done, with what is told at an end.
pub(crate) fn abort() -> ! {
    stats::end();
    options().exit();
    flush_all();
    std::process::abort()
}

/// Runs when the library ends, behind all that the program does at its exit.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn end() {
    stats::end();
    if let Some(Ok(options)) = OPTIONS.get() {
        options.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, want) in [
            ("add", "add", true),
            ("add", "adder", false),
            ("*add", "_Z3add", true),
            ("_Z*add*i", "_Z3addPKii", true),
            ("_Z*add*f", "_Z3addPKii", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, name), want, "{pattern} {name}");
        }
    }

    #[test]
    fn options_choose_checks() {
        let mut options =
            Sanitize::parse("kernel-name=add*, kernel-name=mul,error-exitcode=9,leak-check=full").unwrap();
        options.suppressions.extend(Suppression::parse("lds,uninit : add_racy # known").unwrap());
        assert_eq!((options.exit_code, options.leaks, options.backtraces), (Some(9), true, true));
        assert_eq!(options.checks("sub"), Checks::NONE);
        assert_eq!(options.checks("mul"), Checks::all());
        let racy = options.checks("add_racy");
        assert!(!racy.has(Check::Lds) && !racy.has(Check::Uninit) && racy.has(Check::Global));
        assert_eq!(Sanitize::parse("").unwrap().checks("any"), Checks::all());
    }

    #[test]
    fn wrong_options_are_named() {
        for text in [
            "kernel",
            "kernels=x",
            "error-exitcode=0",
            "error-exitcode=x",
            "leak-check=maybe",
            "suppressions=/none/x",
        ] {
            assert!(Sanitize::parse(text).is_err(), "{text}");
        }
        assert_eq!(Suppression::parse(" # only a comment"), Ok(None));
        assert!(Suppression::parse("lds").is_err() && Suppression::parse("race:x").is_err());
    }
}
