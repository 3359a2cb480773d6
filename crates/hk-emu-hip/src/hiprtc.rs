//! `hiprtc`: programs that are compiled while the host's program runs, by the clang that builds kernels here.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int};
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use hk_build::Search;

use crate::host::{get, long_string, put, string, write};
use crate::runtime::{Table, Tag, lock, runtime};

/// A code of `hiprtcResult` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RtcError(pub c_int);

pub(crate) type Result<T = ()> = std::result::Result<T, RtcError>;

macro_rules! codes {
    ($($constant:ident = $code:literal $name:literal,)*) => {
        #[allow(dead_code, reason = "the table is complete")]
        impl RtcError {
            $(pub const $constant: RtcError = RtcError($code);)*
        }

        const TABLE: &[(c_int, &std::ffi::CStr)] = &[$(($code, $name)),*];
    };
}

#[rustfmt::skip] // a table
codes! {
    OUT_OF_MEMORY = 1 c"HIPRTC_ERROR_OUT_OF_MEMORY",
    PROGRAM_CREATION_FAILURE = 2 c"HIPRTC_ERROR_PROGRAM_CREATION_FAILURE",
    INVALID_INPUT = 3 c"HIPRTC_ERROR_INVALID_INPUT",
    INVALID_PROGRAM = 4 c"HIPRTC_ERROR_INVALID_PROGRAM",
    INVALID_OPTION = 5 c"HIPRTC_ERROR_INVALID_OPTION",
    COMPILATION = 6 c"HIPRTC_ERROR_COMPILATION",
    BUILTIN_OPERATION_FAILURE = 7 c"HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8 c"HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    NO_LOWERED_NAMES_BEFORE_COMPILATION = 9 c"HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    NAME_EXPRESSION_NOT_VALID = 10 c"HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    INTERNAL_ERROR = 11 c"HIPRTC_ERROR_INTERNAL_ERROR",
    LINKING = 100 c"HIPRTC_ERROR_LINKING",
}

/// Unreadable, unwritable and null pointers.
impl From<crate::error::HipError> for RtcError {
    fn from(_: crate::error::HipError) -> RtcError {
        RtcError::INVALID_INPUT
    }
}

/// The version of hiprtc: that of HIP.
const VERSION: [c_int; 2] = [6, 4];
/// Bytes of a source or header.
const MAX_SOURCE: usize = 64 << 20;
/// Headers and options.
const MAX_LIST: c_int = 1 << 16;

/// A program: its source, and what became of it.
struct Program {
    source: String,
    name: String,
    /// Name in `#include`, and text.
    headers: Vec<(PathBuf, String)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// As they were added.
    expressions: Vec<String>,
    log: String,
    compiled: Option<Compiled>,
}

#[derive(Default)]
struct Compiled {
    code: Vec<u8>,
    bitcode: Vec<u8>,
    /// Symbols by name expression. Their addresses are given out.
    lowered: HashMap<String, CString>,
}

fn programs() -> &'static Table<Program> {
    static PROGRAMS: OnceLock<Table<Program>> = OnceLock::new();
    PROGRAMS.get_or_init(|| Table::new(Tag::Program))
}

fn program(handle: u64) -> Result<Arc<Program>> {
    programs().get(handle).ok_or(RtcError::INVALID_PROGRAM)
}

/// Reads a list of strings.
pub(crate) fn strings(list: *const u64, count: c_int, max: usize) -> Result<Vec<String>> {
    if !(0..=MAX_LIST).contains(&count) {
        return Err(RtcError::INVALID_INPUT);
    }
    let read = |i: c_int| Ok(long_string(get(list.wrapping_add(i as usize))? as *const c_char, max)?);
    (0..count).map(read).collect()
}

/// The file's last component, or a name of ours.
fn file_name(name: &str) -> String {
    let last = Path::new(name).file_name().map(|n| n.to_string_lossy().into_owned());
    last.unwrap_or_else(|| "CompileSource".into())
}

/// What the header and the program's own ones are compiled with if there is no ROCm.
const PRELUDE: &str = include_str!("../rtc/hip_runtime.h");
/// What stands before it if there is.
const ROCM_PRELUDE: &str = include_str!("../rtc/hip_runtime_rocm.h");

/// A ROCm with HIP's headers and device libraries, if `ROCM_PATH` names one.
fn rocm() -> Option<PathBuf> {
    let root = PathBuf::from(std::env::var_os("ROCM_PATH")?);
    let whole = root.join("include/hip/hip_runtime.h").is_file() && root.join("amdgcn/bitcode").is_dir();
    whole.then_some(root)
}

/// HIP's version as macros, which decide on device malloc in a header of clang's that does not include HIP's for hiprtc.
fn hip_version(root: &Path) -> Vec<String> {
    let header = std::fs::read_to_string(root.join("include/hip/hip_version.h")).unwrap_or_default();
    let macros = header.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let is = words.next() == Some("#define");
        let (name, number) = (words.next()?, words.next()?.parse::<u32>().ok()?);
        let part = matches!(name, "HIP_VERSION_MAJOR" | "HIP_VERSION_MINOR");
        (is && part).then(|| format!("-D{name}={number}"))
    });
    macros.collect()
}

/// Options of the program as clang has them.
fn options(given: &[String]) -> Vec<String> {
    let renamed = |option: &String| {
        let arch =
            ["--gpu-architecture=", "-arch=", "--gpu-name="].iter().find_map(|p| option.strip_prefix(p));
        arch.map_or_else(|| option.clone(), |arch| format!("--offload-arch={arch}"))
    };
    given.iter().map(renamed).collect()
}

/// The target without its features, from the options or the current device.
fn target(options: &[String]) -> Result<String> {
    let given = options.iter().rev().find_map(|option| option.strip_prefix("--offload-arch="));
    match given {
        Some(target) => Ok(target.to_owned()),
        None => {
            runtime().current().map(|device| device.arch.to_string()).map_err(|_| RtcError::INVALID_OPTION)
        }
    }
}

/// What stands before a variable that holds the address of name expression `i`.
const NAME: &str = "__hk_hiprtc_name_";

/// The source with a variable for each name expression, which instantiates templates.
fn with_names(source: &str, expressions: &[String]) -> String {
    let mut text = format!("{source}\n");
    for (i, expression) in expressions.iter().enumerate() {
        let plain = expression.trim().trim_start_matches('&');
        let address = if plain.starts_with('(') { plain.to_owned() } else { format!("&{plain}") };
        text += &format!("#line 1 \"name expression {i}\"\n");
        text +=
            &format!("__attribute__((device)) const void *{NAME}{i}[] = {{(const void *)({address})}};\n");
    }
    text
}

/// The symbols whose addresses those variables hold, by the assembly.
fn lowered(assembly: &str, expressions: &[String]) -> HashMap<String, CString> {
    let mut lines = assembly.lines().map(str::trim);
    let mut found = HashMap::new();
    while let Some(line) = lines.next() {
        let index =
            line.strip_prefix(NAME).and_then(|rest| rest.split_once(':')).and_then(|(i, _)| i.parse().ok());
        let Some(expression) = index.and_then(|i: usize| expressions.get(i)) else { continue };
        let symbol = lines.next().and_then(|line| line.strip_prefix(".quad"));
        let symbol = symbol.and_then(|symbol| CString::new(symbol.split_whitespace().next()?).ok());
        found.extend(symbol.map(|symbol| (expression.clone(), symbol)));
    }
    found
}

impl Program {
    fn compile(&self, given: &[String]) -> Result {
        let mut state = lock(&self.state);
        let mut log = String::new();
        let compiled = self.compiled(given, &state.expressions, &mut log);
        state.log = log;
        state.compiled = Some(compiled?);
        Ok(())
    }

    /// Runs clang twice: to assembly, which has the symbols of name expressions, and from there to the code object.
    fn compiled(&self, given: &[String], expressions: &[String], log: &mut String) -> Result<Compiled> {
        let clang = Search::from_env().find().map_err(|error| {
            *log = error.to_string();
            RtcError::COMPILATION
        })?;
        let options = options(given);
        let target = target(&options)?;
        let broken = |_| RtcError::INTERNAL_ERROR;
        let dir = tempfile::tempdir().map_err(broken)?;
        let path = |name: &str| dir.path().join(name);
        let put = |name: &Path, text: &str| {
            let to = dir.path().join(name);
            to.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(to, text)
        };
        let source = path("source").join(file_name(&self.name));
        put(
            &source,
            &with_names(&format!("#line 1 \"{}\"\n{}", file_name(&self.name), self.source), expressions),
        )
        .map_err(broken)?;
        for (name, text) in &self.headers {
            put(&Path::new("include").join(name), text).map_err(broken)?;
        }
        let bitcode = options.iter().any(|option| option == "-fgpu-rdc");
        let mut command = Command::new(&clang.path);
        // Objects that are linked differ in their id, which is a symbol.
        command.arg(if bitcode { "-fuse-cuid=hash" } else { "-fuse-cuid=none" });
        command.args(["-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-O3"]);
        command.args(["-D__HIPCC_RTC__=1", "-D__HIP_PLATFORM_AMD__=1"]);
        // The program's own headers stand before both of these.
        let prelude = match rocm() {
            Some(root) => {
                // Clang searches ROCm's headers last, behind those of another version that the system may have.
                command
                    .arg(format!("--rocm-path={}", root.display()))
                    .arg("-isystem")
                    .arg(root.join("include"));
                // Device libraries before ROCm 6.3 are for code objects up to version 5, and headers of that time use a macro that
                // clang no longer defines.
                if !root.join("amdgcn/bitcode/oclc_abi_version_600.bc").is_file() {
                    command.args(["-mcode-object-version=5", "-D__AMDGCN_WAVEFRONT_SIZE=64"]);
                    command.arg("-Wno-builtin-macro-redefined");
                }
                command.args(hip_version(&root));
                put(Path::new("prelude/hip_runtime_rocm.h"), ROCM_PRELUDE).map_err(broken)?;
                path("prelude/hip_runtime_rocm.h")
            }
            None => {
                put(Path::new("prelude/hip/hip_runtime.h"), PRELUDE).map_err(broken)?;
                command.args(["-nogpulib", "-nogpuinc", "-mprintf-kind=buffered"]);
                command.arg("-I").arg(path("prelude"));
                path("prelude/hip/hip_runtime.h")
            }
        };
        command.arg("-include").arg(prelude).arg("-I").arg(path("include"));
        if !options.iter().any(|option| option.starts_with("--offload-arch=")) {
            command.arg(format!("--offload-arch={target}"));
        }
        // With ROCm the compiler is in the program's process, so that what LLVM prints is the program's.
        let prints = options.iter().any(|option| option.starts_with("-print-"));
        let output = path(if bitcode { "program.bc" } else { "program.s" });
        command.args(options).args(if bitcode { &["-emit-llvm", "-c"][..] } else { &["-S"] });
        command.arg(&source).arg("-o").arg(&output);
        let prefixes = [path("source"), path("include"), path("prelude")];
        run(&mut command, &prefixes, log)?;
        if prints {
            eprint!("{log}");
        }
        if bitcode {
            return Ok(Compiled { bitcode: std::fs::read(output).map_err(broken)?, ..Compiled::default() });
        }
        let assembly = std::fs::read_to_string(&output).map_err(broken)?;
        let mut assemble = Command::new(&clang.path);
        assemble
            .args(["--target=amdgcn-amd-amdhsa", "-fuse-ld=lld", "-x", "assembler"])
            .arg(format!("-mcpu={target}"));
        assemble.arg(&output).arg("-o").arg(path("program.co"));
        run(&mut assemble, &prefixes, log)?;
        let code = std::fs::read(path("program.co")).map_err(broken)?;
        Ok(Compiled { code, bitcode: vec![], lowered: lowered(&assembly, expressions) })
    }
}

/// Runs clang; what it prints goes to the log, without the directories of ours.
fn run(command: &mut Command, prefixes: &[PathBuf], log: &mut String) -> Result {
    let output = command.output().map_err(|error| {
        log.push_str(&error.to_string());
        RtcError::COMPILATION
    })?;
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    for prefix in prefixes {
        text = text.replace(&format!("{}/", prefix.display()), "");
    }
    log.push_str(&text);
    output.status.success().then_some(()).ok_or(RtcError::COMPILATION)
}

/// The result of a compilation, which must have been.
fn of_compiled<T>(handle: u64, read: impl FnOnce(&Compiled) -> Result<T>) -> Result<T> {
    let program = program(handle)?;
    let state = lock(&program.state);
    read(state.compiled.as_ref().ok_or(RtcError::INVALID_PROGRAM)?)
}

/// What is asked for, which an empty one means is not there.
fn part(bytes: &[u8]) -> Result<&[u8]> {
    if bytes.is_empty() { Err(RtcError::INVALID_PROGRAM) } else { Ok(bytes) }
}

/// Defines exported functions that return a `hiprtcResult`, and the list of their names.
macro_rules! rtc_api {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                let body = || -> $crate::hiprtc::Result { $body };
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
                let result = result.unwrap_or(Err($crate::hiprtc::RtcError::INTERNAL_ERROR));
                result.err().map_or(0, |error| error.0)
            }
        )*

        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

pub(crate) use rtc_api;

rtc_api! {
    fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) {
        put(major, VERSION[0])?;
        Ok(put(minor, VERSION[1])?)
    }

    fn hiprtcCreateProgram(
        handle: *mut u64,
        source: *const c_char,
        name: *const c_char,
        header_count: c_int,
        headers: *const u64,
        include_names: *const u64,
    ) {
        put(handle, 0)?;
        let source = long_string(source, MAX_SOURCE)?;
        let name = if name.is_null() { String::new() } else { string(name)? };
        let texts = strings(headers, header_count, MAX_SOURCE)?;
        let names = strings(include_names, header_count, MAX_SOURCE)?;
        let inside = |name: &String| {
            let path = PathBuf::from(name);
            let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
            (plain && path.file_name().is_some()).then_some(path).ok_or(RtcError::INVALID_INPUT)
        };
        let names = names.iter().map(inside).collect::<Result<Vec<_>>>()?;
        let headers = names.into_iter().zip(texts).collect();
        let program = Program { source, name, headers, state: Mutex::default() };
        Ok(put(handle, programs().insert(|_| program))?)
    }

    fn hiprtcDestroyProgram(handle: *mut u64) {
        programs().remove(get(handle)?).ok_or(RtcError::INVALID_PROGRAM)?;
        Ok(put(handle, 0)?)
    }

    fn hiprtcAddNameExpression(handle: u64, expression: *const c_char) {
        let (program, expression) = (program(handle)?, string(expression)?);
        let mut state = lock(&program.state);
        if state.compiled.is_some() {
            return Err(RtcError::NO_NAME_EXPRESSIONS_AFTER_COMPILATION);
        }
        if expression.trim().is_empty() {
            return Err(RtcError::NAME_EXPRESSION_NOT_VALID);
        }
        state.expressions.push(expression);
        Ok(())
    }

    fn hiprtcCompileProgram(handle: u64, option_count: c_int, options: *const u64) {
        program(handle)?.compile(&strings(options, option_count, MAX_SOURCE)?)
    }

    fn hiprtcGetLoweredName(handle: u64, expression: *const c_char, lowered: *mut u64) {
        let (program, expression) = (program(handle)?, string(expression)?);
        put(lowered, 0)?;
        let state = lock(&program.state);
        let compiled = state.compiled.as_ref().ok_or(RtcError::NO_LOWERED_NAMES_BEFORE_COMPILATION)?;
        let name = compiled.lowered.get(&expression).ok_or(RtcError::NAME_EXPRESSION_NOT_VALID)?;
        Ok(put(lowered, name.as_ptr() as u64)?)
    }

    fn hiprtcGetProgramLogSize(handle: u64, bytes: *mut u64) {
        Ok(put(bytes, lock(&program(handle)?.state).log.len() as u64 + 1)?)
    }

    fn hiprtcGetProgramLog(handle: u64, log: *mut c_char) {
        let program = program(handle)?;
        let text = lock(&program.state).log.replace('\0', " ") + "\0";
        Ok(write(log as u64, text.as_bytes())?)
    }

    fn hiprtcGetCodeSize(handle: u64, bytes: *mut u64) {
        of_compiled(handle, |compiled| Ok(put(bytes, part(&compiled.code)?.len() as u64)?))
    }

    fn hiprtcGetCode(handle: u64, code: *mut c_char) {
        of_compiled(handle, |compiled| Ok(write(code as u64, part(&compiled.code)?)?))
    }

    fn hiprtcGetBitcodeSize(handle: u64, bytes: *mut u64) {
        if bytes.is_null() {
            return Err(RtcError::INVALID_INPUT);
        }
        of_compiled(handle, |compiled| Ok(put(bytes, part(&compiled.bitcode)?.len() as u64)?))
    }

    fn hiprtcGetBitcode(handle: u64, bitcode: *mut c_char) {
        if bitcode.is_null() {
            return Err(RtcError::INVALID_INPUT);
        }
        of_compiled(handle, |compiled| Ok(write(bitcode as u64, part(&compiled.bitcode)?)?))
    }
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcGetErrorString(code: c_int) -> *const c_char {
    let name = TABLE.iter().find(|(known, _)| *known == code).map(|(_, name)| *name);
    name.unwrap_or(if code == 0 { c"HIPRTC_SUCCESS" } else { c"HIPRTC_ERROR_UNKNOWN" }).as_ptr()
}

/// Exported functions whose result is no `hiprtcResult`.
pub(crate) const MORE_NAMES: &[&str] = &["hiprtcGetErrorString"];
