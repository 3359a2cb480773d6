//! Linking by `hiprtc`: bitcode that was compiled apart (`-fgpu-rdc`) becomes a code object, by clang and lld.

use std::ffi::{c_char, c_int};
use std::fs::File;
use std::io::Read;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use hk_build::Search;
use hk_codeobj::Arch;

use crate::hiprtc::{Result, RtcError, rtc_api, strings};
use crate::host::{get, put, read, string};
use crate::image;
use crate::runtime::{Table, Tag, lock, runtime, say};

/// `hiprtcJIT_option`: options of the compiler behind the linker, and how many they are.
const OPTIONS: c_int = 10000;
const OPTION_COUNT: c_int = 10001;
const MAX_OPTIONS: u32 = 1 << 10;

/// `hiprtcJITInputType` of what can be linked. CUDA's are errors, and so are archives of bundles.
const BITCODE: c_int = 100;
const BUNDLED_BITCODE: c_int = 101;

/// Bytes of an input, and of an option.
const MAX_INPUT: u64 = 1 << 30;
const MAX_OPTION: usize = 1 << 12;

struct Link {
    arch: Arch,
    options: Vec<String>,
    inputs: Mutex<Vec<Vec<u8>>>,
    /// The code object, whose address is given out.
    linked: OnceLock<Vec<u8>>,
}

fn links() -> &'static Table<Link> {
    static LINKS: OnceLock<Table<Link>> = OnceLock::new();
    LINKS.get_or_init(|| Table::new(Tag::Link))
}

fn link(handle: u64) -> Result<Arc<Link>> {
    links().get(handle).ok_or(RtcError::INVALID_INPUT)
}

/// The compiler's options among those of the linker.
fn compiler_options(count: u32, names: *const c_int, values: *const u64) -> Result<Vec<String>> {
    if count > MAX_OPTIONS {
        return Err(RtcError::INVALID_INPUT);
    }
    let (mut list, mut length) = (0, 0);
    for i in 0..count as usize {
        let value = get(values.wrapping_add(i))?;
        match get(names.wrapping_add(i))? {
            OPTIONS => list = value,
            OPTION_COUNT => length = value,
            _ => {} // logs and CUDA's
        }
    }
    let length = c_int::try_from(length).map_err(|_| RtcError::INVALID_INPUT)?;
    strings(list as *const u64, length, MAX_OPTION)
}

fn expect_bitcode(kind: c_int) -> Result {
    if matches!(kind, BITCODE | BUNDLED_BITCODE) { Ok(()) } else { Err(RtcError::INVALID_INPUT) }
}

impl Link {
    fn add(&self, kind: c_int, bytes: Vec<u8>) -> Result {
        let bitcode = match kind {
            BUNDLED_BITCODE => image::in_bytes(&bytes, self.arch)?,
            _ => bytes,
        };
        lock(&self.inputs).push(bitcode);
        Ok(())
    }

    fn link(&self) -> Result<Vec<u8>> {
        let failed = |why: &dyn std::fmt::Display| {
            say!("hiprtcLinkComplete: {why}");
            RtcError::LINKING
        };
        let clang = Search::from_env().find().map_err(|error| failed(&error))?;
        let dir = tempfile::tempdir().map_err(|error| failed(&error))?;
        let output = dir.path().join("linked.co");
        let mut command = Command::new(&clang.path);
        command.args(["--target=amdgcn-amd-amdhsa", "-fuse-ld=lld", "-flto", "-O3"]);
        command.arg(format!("-mcpu={}", self.arch));
        let mut before = "";
        for option in &self.options {
            // LLVM is in the linker here: it gets `-mllvm` and what stands behind it.
            command.args((option == "-mllvm" || before == "-mllvm").then_some("-Xlinker")).arg(option);
            before = option;
        }
        for (i, bitcode) in lock(&self.inputs).iter().enumerate() {
            // By its name an input of the linker, which compiles all of them as one.
            let input = dir.path().join(format!("{i}.o"));
            std::fs::write(&input, bitcode).map_err(|error| failed(&error))?;
            command.arg(input);
        }
        let done = command.arg("-o").arg(&output).output().map_err(|error| failed(&error))?;
        if !done.status.success() {
            return Err(failed(&String::from_utf8_lossy(&done.stderr)));
        }
        std::fs::read(output).map_err(|error| failed(&error))
    }
}

rtc_api! {
    fn hiprtcLinkCreate(count: u32, options: *const c_int, values: *const u64, handle: *mut u64) {
        put(handle, 0)?;
        let options = compiler_options(count, options, values)?;
        let arch = runtime().current().map_err(|_| RtcError::INVALID_INPUT)?.arch;
        let link = Link { arch, options, inputs: Mutex::default(), linked: OnceLock::new() };
        Ok(put(handle, links().insert(|_| link))?)
    }

    fn hiprtcLinkAddData(
        handle: u64,
        kind: c_int,
        image: u64,
        bytes: u64,
        _name: *const c_char,
        _option_count: u32,
        _options: *const c_int,
        _values: *const u64,
    ) {
        let link = link(handle)?;
        expect_bitcode(kind)?;
        if image == 0 || !(1..=MAX_INPUT).contains(&bytes) {
            return Err(RtcError::INVALID_INPUT);
        }
        let mut data = vec![0; bytes as usize];
        read(image, &mut data)?;
        link.add(kind, data)
    }

    fn hiprtcLinkAddFile(
        handle: u64,
        kind: c_int,
        path: *const c_char,
        _option_count: u32,
        _options: *const c_int,
        _values: *const u64,
    ) {
        let link = link(handle)?;
        expect_bitcode(kind)?;
        let path = string(path)?;
        let mut data = vec![];
        let done = File::open(&path).and_then(|file| file.take(MAX_INPUT + 1).read_to_end(&mut data));
        done.map_err(|error| {
            say!("hiprtcLinkAddFile: {path}: {error}");
            RtcError::PROGRAM_CREATION_FAILURE
        })?;
        if data.len() as u64 > MAX_INPUT { Err(RtcError::INVALID_INPUT) } else { link.add(kind, data) }
    }

    fn hiprtcLinkComplete(handle: u64, code: *mut u64, bytes: *mut u64) {
        let link = link(handle)?;
        put(code, 0)?;
        put(bytes, 0)?;
        let linked = match link.linked.get() {
            Some(linked) => linked,
            None => {
                let new = link.link()?;
                link.linked.get_or_init(|| new)
            }
        };
        put(code, linked.as_ptr() as u64)?;
        Ok(put(bytes, linked.len() as u64)?)
    }

    fn hiprtcLinkDestroy(handle: u64) {
        links().remove(handle).map(drop).ok_or(RtcError::INVALID_INPUT)
    }
}
