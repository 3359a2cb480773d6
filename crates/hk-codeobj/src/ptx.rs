//! PTX: the kernels of an assembly text for NVIDIA GPUs.

use std::collections::HashSet;

use crate::{Arch, CodeObject, Descriptor, Kernel, KernelArg, ParseError};

/// Threads of a block without `.maxntid`: the hardware's limit.
const MOST_THREADS: u32 = 1024;

fn wrong(reason: impl Into<String>) -> ParseError {
    ParseError::Ptx { reason: reason.into() }
}

/// Whether these bytes can be PTX: a text whose first word is a directive or a comment. A zero byte may end it.
pub(crate) fn is_ptx(bytes: &[u8]) -> bool {
    let text = bytes.trim_ascii_start();
    text.starts_with(b"//") || text.starts_with(b".version")
}

/// The first word of a `.pragma` in which our kernels say how many bytes of dynamic shared memory they want: `"hk_lds 81920"`.
const LDS: &str = "hk_lds";

/// Reads target, kernels, and what dynamic shared memory these want. Registers, static shared and local memory are zero:
/// the GPU's driver, which assembles the text, decides on them.
pub(crate) fn parse(bytes: &[u8]) -> Result<CodeObject, ParseError> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    let text = std::str::from_utf8(bytes).map_err(|e| wrong(e.to_string()))?;
    let mut arch = None;
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut names = HashSet::new();
    let mut words = Words::new(text);
    while let Some(word) = words.next() {
        match word {
            ".target" => arch = Some(read_target(words.need("a target")?)?),
            ".entry" => {
                let kernel = read_entry(&mut words)?;
                if !names.insert(kernel.name.clone()) {
                    return Err(wrong(format!("kernel `{}` is there twice", kernel.name)));
                }
                kernels.push(kernel);
            }
            LDS => {
                if let Some(kernel) = kernels.last_mut() {
                    kernel.lds_bytes = words.number("dynamic shared memory")?.max(kernel.lds_bytes);
                }
            }
            _ => {}
        }
    }
    let arch = arch.ok_or_else(|| wrong("no .target"))?;
    Ok(CodeObject {
        arch,
        abi_version: 0,
        kernels,
        segments: Vec::new(),
        relocations: Vec::new(),
        printf: Vec::new(),
    })
}

fn read_target(name: &str) -> Result<Arch, ParseError> {
    let known = name.parse().ok().filter(|arch: &Arch| !arch.is_amd());
    known.ok_or_else(|| wrong(format!("target `{name}`, expected sm_90 or sm_90a")))
}

/// What follows `.entry`, up to the body: a name, parameters in parentheses, directives.
fn read_entry(words: &mut Words<'_>) -> Result<Kernel, ParseError> {
    let name = words.need("a kernel's name")?.to_owned();
    let mut args = Vec::new();
    let mut end = 0u32;
    let mut align = 1;
    let mut max_threads = MOST_THREADS;
    let mut required = None;
    loop {
        match words.need(&name)? {
            ".param" => {
                let (arg, to) = read_param(words, end)?;
                end = arg.offset.checked_add(arg.size).ok_or_else(|| wrong(format!("{name}: parameters")))?;
                align = to.max(align);
                args.push(arg);
            }
            directive @ (".maxntid" | ".reqntid") => {
                let block = read_block(words)?;
                let threads = block.iter().try_fold(1u32, |a, n| a.checked_mul(*n));
                max_threads = threads.ok_or_else(|| wrong(format!("{name}: {directive} {block:?}")))?;
                required = (directive == ".reqntid").then_some(block);
            }
            "{" | ";" => break,
            _ => {}
        }
    }
    Ok(Kernel {
        symbol: name.clone(),
        name,
        descriptor: Descriptor::decode(&[0; Descriptor::SIZE]),
        descriptor_vaddr: 0,
        entry_vaddr: 0,
        kernarg_size: end,
        kernarg_align: align,
        args,
        explicit_arg_bytes: end,
        lds_bytes: 0,
        scratch_bytes: 0,
        vgprs: 0,
        agprs: 0,
        total_vgprs: 0,
        sgprs: 0,
        vgpr_spills: 0,
        sgpr_spills: 0,
        max_threads,
        reqd_workgroup_size: required,
        wave_size: Arch::Sm90.wave_size(),
        uses_dynamic_stack: false,
    })
}

/// `.align 8 .b8 name[248]` or `.u64 name`, at the next aligned offset. Gives the alignment, too.
fn read_param(words: &mut Words<'_>, end: u32) -> Result<(KernelArg, u32), ParseError> {
    let (mut align, mut element) = (None, 0);
    loop {
        match words.need("a parameter")? {
            ".align" => align = Some(words.number("an alignment")?),
            word if word.starts_with('.') => element = type_bytes(word).unwrap_or(element),
            name => {
                let size = if words.peek() == Some("[") {
                    words.next();
                    words.number("a parameter's size")?.checked_mul(element)
                } else {
                    Some(element)
                };
                let align = align.unwrap_or(element);
                let size =
                    size.filter(|s| *s > 0).ok_or_else(|| wrong(format!("size of parameter {name}")))?;
                let offset =
                    Some(align).filter(|a| a.is_power_of_two()).and_then(|a| end.checked_next_multiple_of(a));
                let offset = offset.ok_or_else(|| wrong(format!("alignment of parameter {name}")))?;
                let kind = "by_value".into();
                return Ok((KernelArg { name: Some(name.into()), kind, offset, size }, align));
            }
        }
    }
}

/// Bytes of `.b8`, `.u64` and the like.
fn type_bytes(word: &str) -> Option<u32> {
    let bits: u32 =
        word.strip_prefix('.')?.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse().ok()?;
    matches!(bits, 8 | 16 | 32 | 64 | 128).then_some(bits / 8)
}

/// One to three numbers with commas between.
fn read_block(words: &mut Words<'_>) -> Result<[u32; 3], ParseError> {
    let mut block = [words.number("a block")?, 1, 1];
    for n in &mut block[1..] {
        if words.peek() != Some(",") {
            break;
        }
        words.next();
        *n = words.number("a block")?;
    }
    Ok(block)
}

/// The words of a text: names with their leading dot, numbers, and other characters one by one; no comments.
struct Words<'a> {
    rest: &'a str,
}

impl<'a> Words<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: text }
    }

    fn peek(&self) -> Option<&'a str> {
        Words { rest: self.rest }.next()
    }

    fn need(&mut self, what: &str) -> Result<&'a str, ParseError> {
        self.next().ok_or_else(|| wrong(format!("the text ends in {what}")))
    }

    fn number(&mut self, what: &str) -> Result<u32, ParseError> {
        let word = self.need(what)?;
        word.parse().map_err(|_| wrong(format!("{what} is `{word}`, expected a number")))
    }
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        loop {
            self.rest = self.rest.trim_start();
            if let Some(comment) = self.rest.strip_prefix("//") {
                self.rest = comment.find('\n').map_or("", |end| &comment[end..]);
            } else if let Some(comment) = self.rest.strip_prefix("/*") {
                self.rest = comment.find("*/").map_or("", |end| &comment[end + 2..]);
            } else {
                break;
            }
        }
        let first = self.rest.chars().next()?;
        let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%');
        let len = if in_word(first) || first == '.' {
            let tail = &self.rest[1..];
            1 + tail.find(|c| !in_word(c)).unwrap_or(tail.len())
        } else {
            first.len_utf8()
        };
        let (word, rest) = self.rest.split_at(len);
        self.rest = rest;
        Some(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "//
// Generated
//
.version 8.3
.target sm_90
.address_size 64
.weak .shared .align 4 .b8 slots[16];
 // @scale
.visible .entry scale(
\t.param .align 8 .b8 scale_param_0[248]
)
.maxntid 64                             // @scale
{
\t.reg .b32 \t%r<3>;
\t.pragma \"nounroll\";
\t.pragma \"hk_lds 81920\";
\tret;
}
.entry two(.param .u32 n, /* a pointer */ .param .u64 x, .param .align 16 .b8 s[20]) .reqntid 8, 4 { ret; }
.func helper() { ret; }
";

    #[test]
    fn kernels_are_found() {
        let object = CodeObject::parse(TEXT.as_bytes()).unwrap();
        assert_eq!(object.arch, Arch::Sm90);
        assert_eq!(object.kernels.iter().map(|k| &*k.name).collect::<Vec<_>>(), ["scale", "two"]);
        let scale = object.kernel("scale").unwrap();
        assert_eq!((scale.explicit_arg_bytes, scale.kernarg_align, scale.max_threads), (248, 8, 64));
        assert_eq!((scale.args.len(), scale.wave_size, scale.reqd_workgroup_size), (1, 32, None));
        let two = object.kernel("two").unwrap();
        let places: Vec<_> = two.args.iter().map(|a| (a.offset, a.size)).collect();
        assert_eq!(places, [(0, 4), (8, 8), (16, 20)]);
        assert_eq!((two.max_threads, two.reqd_workgroup_size), (32, Some([8, 4, 1])));
        assert_eq!((scale.lds_bytes, two.lds_bytes), (81920, 0));
        // As embedded for the driver.
        assert!(CodeObject::parse(format!("{TEXT}\0").as_bytes()).is_ok());
    }

    #[test]
    fn broken_texts_are_refused() {
        let fails = |text: &str, part: &str| {
            let error = CodeObject::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        fails(".version 8.3\n", "no .target");
        fails(".version 8.3\n.target sm_80\n", "target `sm_80`, expected sm_90 or sm_90a");
        fails(".version 8.3\n.target gfx942\n", "target `gfx942`");
        let with = |entry: &str| format!(".version 8.3\n.target sm_90\n{entry}");
        fails(&with(".entry"), "ends in a kernel's name");
        fails(&with(".entry f("), "ends in f");
        fails(&with(".entry f(.param .align x .b8 p[4]) {"), "an alignment is `x`");
        fails(&with(".entry f(.param .align 3 .b8 p[4]) {"), "alignment of parameter p");
        fails(&with(".entry f(.param .align 4 .b8 p[4294967295], .param .b64 q) {"), "parameter");
        fails(&with(".entry f(.param .b8 p[0]) {"), "size of parameter p");
        fails(&with(".entry f() .maxntid 70000, 70000 {"), "f: .maxntid");
        fails(&with(".entry f() {} .entry f() {}"), "`f` is there twice");
        fails(&with(".entry f() { .pragma \"hk_lds all\"; }"), "dynamic shared memory is `all`");
        let no_text = CodeObject::parse(b".version \xff").unwrap_err();
        assert!(matches!(no_text, ParseError::Ptx { .. }), "{no_text}");
    }

    /// Every prefix of a text gives an answer.
    #[test]
    fn cut_texts_do_no_harm() {
        for end in 0..TEXT.len() {
            let _ = CodeObject::parse(&TEXT.as_bytes()[..end]);
        }
    }
}
