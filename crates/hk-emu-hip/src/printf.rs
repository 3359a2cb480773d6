//! `printf` of kernels: formats with the arguments that device code stores, and the buffer of the buffered form.
//!
//! Sources: LLVM's `AMDGPUEmitPrintf`, which lays out the frames, and `ockl` of ROCm's device libraries.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_double, c_int, c_void};

use hk_emu::{Machine, MemoryError};

use crate::runtime::say;

/// `FILE` of the C library.
#[repr(C)]
struct File([u8; 0]);

unsafe extern "C" {
    static stdout: *mut File;
    static stderr: *mut File;
    fn fwrite(data: *const c_void, size: usize, count: usize, to: *mut File) -> usize;
    fn fflush(file: *mut File) -> c_int;
    fn snprintf(to: *mut c_char, size: usize, format: *const c_char, ...) -> c_int;
}

/// Where a kernel prints to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    Stdout,
    Stderr,
}

impl Output {
    fn file(self) -> *mut File {
        // SAFETY: the C library's own variables, which it sets before the program begins.
        unsafe {
            match self {
                Output::Stdout => stdout,
                Output::Stderr => stderr,
            }
        }
    }

    /// Prints through the C library, as the program does: the order of both is kept.
    pub fn print(self, text: &[u8]) {
        // SAFETY: a slice and its length, and an open file.
        unsafe { fwrite(text.as_ptr().cast(), 1, text.len(), self.file()) };
    }

    pub fn flush(self) {
        // SAFETY: an open file.
        unsafe { fflush(self.file()) };
    }
}

/// Flushes all files of the C library.
pub(crate) fn flush_all() {
    // SAFETY: null stands for all of them.
    unsafe { fflush(std::ptr::null_mut()) };
}

/// Characters that one conversion may make: the C library would allocate and print any width.
const MAX_FIELD: usize = 1 << 16;

/// One conversion: the specification without length modifiers and `*`s, these as numbers.
struct Spec {
    flags: String,
    stars: usize,
    length: String,
    conversion: char,
}

/// What ends a conversion specification.
const CONVERSIONS: &str = "diouxXcfFeEgGaAspn";

impl Spec {
    /// Parses what follows a `%`; gives the rest behind it.
    fn parse(text: &str) -> Option<(Spec, &str)> {
        let end = text.find(|c| CONVERSIONS.contains(c))?;
        let (body, rest) = text.split_at(end);
        let conversion = rest.chars().next()?;
        let at = body.find(|c: char| "hlqjztL".contains(c)).unwrap_or(body.len());
        let (flags, length) = body.split_at(at);
        let plain = flags.chars().all(|c| "-+ #0123456789.*'".contains(c));
        let plain = plain && length.chars().all(|c| "hlqjztL".contains(c));
        let (flags, length) = (flags.to_owned(), length.to_owned());
        let stars = flags.matches('*').count();
        plain.then_some((Spec { flags, stars, length, conversion }, &rest[1..]))
    }
}

/// The text of a message: a format and its arguments, a word each; strings lie in as many words as they need, with their zero.
/// Ends where arguments or the specification are missing.
pub(crate) fn format(format: &[u8], mut args: &[u64]) -> Vec<u8> {
    let format = String::from_utf8_lossy(format);
    let (mut rest, mut out) = (&*format, vec![]);
    while let Some(at) = rest.find('%') {
        out.extend(&rest.as_bytes()[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('%') {
            out.push(b'%');
            rest = after;
            continue;
        }
        let Some((spec, after)) = Spec::parse(rest) else { return out };
        rest = after;
        let Some(used) = convert(&spec, args, &mut out) else { return out };
        args = &args[used..];
    }
    out.extend(rest.as_bytes());
    out
}

/// Appends one conversion; the words it takes.
fn convert(spec: &Spec, args: &[u64], out: &mut Vec<u8>) -> Option<usize> {
    let mut flags = spec.flags.clone();
    for star in args.get(..spec.stars)? {
        flags = flags.replacen('*', &(*star as i32).to_string(), 1);
    }
    let values = &args[spec.stars..];
    let value = *values.first()?;
    // A precision that is negative counts as none.
    let flags = flags.split_once(".-").map_or(&*flags, |(width, _)| width);
    // Integers lie in 64 bits; the modifier says how many of them count.
    let text = match spec.conversion {
        'n' => return Some(spec.stars + 1),
        's' => {
            let bytes: Vec<u8> = values.iter().flat_map(|word| word.to_le_bytes()).collect();
            let text = CStr::from_bytes_until_nul(&bytes).ok()?;
            out.extend(c_format(&format!("%{flags}s"), text.count_bytes(), Value::Text(text))?);
            return Some(spec.stars + (text.count_bytes() + 1).div_ceil(8));
        }
        'p' => c_format(&format!("%{flags}p"), 0, Value::Word(value))?,
        c if "fFeEgGaA".contains(c) => {
            c_format(&format!("%{flags}{c}"), 0, Value::Double(f64::from_bits(value)))?
        }
        c => c_format(&format!("%{flags}{}{c}", spec.length), 0, Value::Word(value))?,
    };
    out.extend(text);
    Some(spec.stars + 1)
}

/// An argument of the C library's `snprintf`.
#[derive(Clone, Copy)]
enum Value<'a> {
    Word(u64),
    Double(c_double),
    Text(&'a CStr),
}

/// One conversion by the C library: `spec` has no `*`, and one conversion that takes this value. `None` if it would be longer
/// than [`MAX_FIELD`] and the text itself.
fn c_format(spec: &str, text_bytes: usize, value: Value<'_>) -> Option<Vec<u8>> {
    let mut out = vec![0u8; MAX_FIELD + text_bytes];
    let (to, size) = (out.as_mut_ptr().cast::<c_char>(), out.len());
    let spec = CString::new(spec).ok()?;
    // SAFETY: the buffer has `size` bytes; `format` made the specification for this type of argument.
    let length = unsafe {
        match value {
            Value::Word(word) => snprintf(to, size, spec.as_ptr(), word),
            Value::Double(double) => snprintf(to, size, spec.as_ptr(), double),
            Value::Text(text) => snprintf(to, size, spec.as_ptr(), text.as_ptr()),
        }
    };
    let length = usize::try_from(length).ok().filter(|length| *length < size)?;
    out.truncate(length);
    Some(out)
}

/// The buffer that kernels with `-mprintf-kind=buffered` append frames to: bytes used and bytes there are, then the frames.
const HEADER: u64 = 8;
/// Bytes of frames, as ROCm's limit of the printf FIFO is by default.
pub(crate) const BUFFER_BYTES: u64 = 4 << 20;

/// An empty buffer.
pub(crate) fn new_buffer(machine: &Machine) -> Result<u64, MemoryError> {
    let buffer = machine.alloc_zeroed(BUFFER_BYTES + HEADER, 256, "printf buffer")?;
    machine.write(buffer, &[0u32, BUFFER_BYTES as u32].map(u32::to_le_bytes).concat())?;
    Ok(buffer)
}

/// The formats of a code object by their hashes.
fn formats(notes: &[String]) -> HashMap<u64, &str> {
    let entry = |note: &'_ String| {
        let (hash, format) =
            note.splitn(3, ':').nth(2)?.split_once(',').map(|(h, f)| (h.to_owned(), f.len()))?;
        Some((u64::from_str_radix(&hash, 16).ok()?, format))
    };
    notes.iter().filter_map(|note| entry(note).map(|(hash, len)| (hash, &note[note.len() - len..]))).collect()
}

/// Prints what a launch left in the buffer, and empties it. True if some of it went to stderr.
pub(crate) fn drain(machine: &Machine, buffer: u64, notes: &[String]) -> Result<bool, MemoryError> {
    let mut used = [0; 4];
    machine.read(buffer, &mut used)?;
    let used = u64::from(u32::from_le_bytes(used)).min(BUFFER_BYTES);
    if used == 0 {
        return Ok(false);
    }
    let mut frames = vec![0; used as usize];
    machine.read(buffer + HEADER, &mut frames)?;
    machine.write(buffer, &[0; 4])?;
    let formats = formats(notes);
    let (mut rest, mut complained) = (&frames[..], false);
    while let Some((text, output, after)) = frame(rest, &formats) {
        output.print(&text);
        complained |= output == Output::Stderr;
        rest = after;
    }
    if !rest.is_empty() {
        say!("{} bytes of the printf buffer are no frame", rest.len());
    }
    Ok(complained)
}

/// The text of the first frame, where it goes, and the frames behind it.
///
/// A frame begins with a control word: bit 0 is set for stderr, bit 1 if the hash of the format follows and not the format
/// itself, and the others are the frame's bytes.
fn frame<'a>(frames: &'a [u8], formats: &HashMap<u64, &str>) -> Option<(Vec<u8>, Output, &'a [u8])> {
    let (control, _) = frames.split_first_chunk::<4>()?;
    let control = u32::from_le_bytes(*control);
    let (frame, rest) = frames.split_at_checked((control >> 2) as usize)?;
    let words = frame.get(4..)?.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let words: Vec<u64> = words.collect();
    let output = if control & 1 != 0 { Output::Stderr } else { Output::Stdout };
    let text = if control & 2 != 0 {
        let (hash, args) = words.split_first()?;
        format(formats.get(hash)?.as_bytes(), args)
    } else {
        message(&words)?
    };
    Some((text, output, rest))
}

/// The text of a format and the arguments behind it.
pub(crate) fn message(words: &[u64]) -> Option<Vec<u8>> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let text = CStr::from_bytes_until_nul(&bytes).ok()?;
    Some(format(text.to_bytes(), words.get((text.count_bytes() + 1).div_ceil(8)..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(spec: &str, args: &[u64]) -> String {
        String::from_utf8(format(spec.as_bytes(), args)).unwrap()
    }

    #[test]
    fn formats_are_those_of_c() {
        let word = |s: &[u8; 8]| u64::from_le_bytes(*s);
        assert_eq!(text("100%% of %d\n", &[u64::MAX]), "100% of -1\n");
        assert_eq!(text("%5.2f|%-6e|%g", &[2.5f64, 1.0, 0.1].map(f64::to_bits)), " 2.50|1.000000e+00|0.1");
        assert_eq!(text("%*d|%-*u|%.*f", &[4, 7, 3, 9, 1, 0.25f64.to_bits()]), "   7|9  |0.2");
        assert_eq!(text("%hhx %hd %lld %zu", &[0x1ff, 0x1_ffff, 1 << 40, 3]), "ff -1 1099511627776 3");
        assert_eq!(text("[%s] %c", &[word(b"lane\0\0\0\0"), 65]), "[lane] A");
        assert_eq!(text("[%.2s] %d", &[word(b"two word"), word(b"s\0\0\0\0\0\0\0"), 3]), "[tw] 3");
        assert_eq!(text("%p", &[0xabc0]), "0xabc0");
        assert_eq!(text("%Lf", &[1.5f64.to_bits()]), "1.500000");
    }

    #[test]
    fn damaged_messages_end() {
        assert_eq!(text("a %d b %d c", &[1]), "a 1 b ");
        assert_eq!(text("x %w", &[1]), "x ");
        assert_eq!(text("x %", &[1]), "x ");
        assert_eq!(text("%n%d", &[1, 2]), "2");
        assert_eq!(text("%999999999d!", &[1]), "");
        assert_eq!(text("%s", &[u64::MAX; 2]), "");
        assert!(message(&[u64::MAX]).is_none() && message(&[]).is_none());
        let formats = HashMap::new();
        for frames in
            [&[][..], &[1, 0, 0], &[0, 0, 0, 0], &[0xff; 64], &[66, 0, 0, 0], &[[50, 0, 0, 0]; 3].concat()]
        {
            assert!(frame(frames, &formats).is_none(), "{frames:?}");
        }
    }
}
