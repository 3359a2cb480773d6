//! The ELF file and its kernels.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use ::object::elf;
use ::object::read::elf::{FileHeader, ProgramHeader, Rela, SectionHeader, Sym};
use ::object::{LittleEndian, read};

use crate::metadata::{self, Map};
use crate::{Arch, Descriptor, ParseError, occupancy, ptx};

type Header = elf::FileHeader64<LittleEndian>;
const LE: LittleEndian = LittleEndian;

/// e_machine of AMD GPUs.
const EM_AMDGPU: u16 = 224;
/// EI_OSABI of the HSA runtime.
const ELFOSABI_AMDGPU_HSA: u8 = 64;
/// n_type of the metadata note of the owner `AMDGPU`.
const NT_AMDGPU_METADATA: u32 = 32;
/// Dynamic relocations, as the User Guide for AMDGPU Backend numbers them. LLD makes ABS64 and RELATIVE64 alone; ROCm's loader
/// knows the 32-bit ones too.
const R_AMDGPU_NONE: u32 = 0;
const R_AMDGPU_ABS32_LO: u32 = 1;
const R_AMDGPU_ABS32_HI: u32 = 2;
const R_AMDGPU_ABS64: u32 = 3;
const R_AMDGPU_ABS32: u32 = 6;
const R_AMDGPU_RELATIVE64: u32 = 13;
/// Upper bound of the loaded image, so that a corrupt header cannot ask a loader for terabytes.
const MAX_IMAGE_BYTES: u64 = 1 << 30;
/// Linkers make five or so. Every symbol and relocation is looked up in them.
const MAX_SEGMENTS: usize = 64;
/// Upper bound of where an argument ends; the largest segments have a few kilobytes.
const MAX_ARGUMENT_BYTES: u32 = 1 << 20;

/// A parsed code object. Byte ranges refer to the bytes that were parsed.
#[derive(Debug, Clone)]
pub struct CodeObject {
    /// The target.
    pub arch: Arch,
    /// EI_ABIVERSION: 2, 3, 4 are code object version 4, 5, 6.
    pub abi_version: u8,
    /// The kernels, in the order of the metadata note.
    pub kernels: Vec<Kernel>,
    /// What to map, by ascending virtual address; none overlaps another.
    pub segments: Vec<Segment>,
    /// What to patch after mapping.
    pub relocations: Vec<Relocation>,
    /// Formats of the kernels' buffered `printf`, as the note has them: `0:0:HASH,FORMAT`.
    pub printf: Vec<String>,
}

/// A loadable segment. Memory past the file's bytes is zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Virtual address relative to the load address, in bytes.
    pub vaddr: u64,
    /// Size in memory, in bytes; at least as large as the file's part.
    pub mem_size: u64,
    /// The file's part: a range of the parsed bytes.
    pub file: Range<usize>,
    /// Holds instructions.
    pub executable: bool,
    /// Kernels may write to it.
    pub writable: bool,
}

/// Memory to patch once the load address is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relocation {
    /// Where: virtual address relative to the load address, in bytes.
    pub vaddr: u64,
    /// What to write.
    pub value: RelocationValue,
    /// How much of it.
    pub field: RelocationField,
}

/// The value of a relocation; symbols are resolved and addends added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelocationValue {
    /// An address in the object: the distance from the load address, in bytes.
    Relative(u64),
    /// The same wherever the object is loaded: an absolute symbol, or 0 for an undefined weak one.
    Absolute(u64),
}

/// The part of the value that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelocationField {
    /// All 64 bits.
    Word64,
    /// 32 bits, which have to hold the value.
    Word32,
    /// The lower 32 bits.
    Low32,
    /// The upper 32 bits.
    High32,
}

impl RelocationField {
    /// Bytes that are written.
    pub fn size(self) -> usize {
        if self == RelocationField::Word64 { 8 } else { 4 }
    }
}

impl Relocation {
    /// The bytes to write if the object is loaded at `base`; `None` if the field does not hold the value.
    pub fn bytes(&self, base: u64) -> Option<([u8; 8], usize)> {
        let value = match self.value {
            RelocationValue::Relative(offset) => base.wrapping_add(offset),
            RelocationValue::Absolute(value) => value,
        };
        let value = match self.field {
            RelocationField::Word32 if value > u32::MAX.into() => return None,
            RelocationField::High32 => value >> 32,
            _ => value,
        };
        Some((value.to_le_bytes(), self.field.size()))
    }
}

/// A kernel, as the metadata note and its descriptor state it.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The name it is launched by.
    pub name: String,
    /// The descriptor's symbol, usually the name followed by `.kd`.
    pub symbol: String,
    /// The hardware descriptor.
    pub descriptor: Descriptor,
    /// The descriptor's virtual address.
    pub descriptor_vaddr: u64,
    /// The first instruction's virtual address.
    pub entry_vaddr: u64,
    /// Argument segment, hidden arguments included, in bytes: as the note states it, or as far as the arguments reach.
    pub kernarg_size: u32,
    /// Alignment of the argument segment, in bytes.
    pub kernarg_align: u32,
    /// The arguments in the order of the note, hidden ones included.
    pub args: Vec<KernelArg>,
    /// End of the last argument that is not hidden, in bytes: the size of what a caller passes. Kernels whose note lists no
    /// arguments leave the whole segment to the caller.
    pub explicit_arg_bytes: u32,
    /// Static LDS, in bytes.
    pub lds_bytes: u32,
    /// Scratch of one lane, in bytes.
    pub scratch_bytes: u32,
    /// Architectural vector registers, rounded up to the border where accumulation registers start if there are any.
    pub vgprs: u32,
    /// Accumulation registers.
    pub agprs: u32,
    /// Architectural and accumulation registers together: what occupancy depends on.
    pub total_vgprs: u32,
    /// Scalar registers.
    pub sgprs: u32,
    /// Vector registers that the compiler had to store elsewhere.
    pub vgpr_spills: u32,
    /// Scalar registers that the compiler had to store elsewhere.
    pub sgpr_spills: u32,
    /// The largest workgroup that the kernel is compiled for, in threads.
    pub max_threads: u32,
    /// The only workgroup size that the kernel is compiled for, if there is one.
    pub reqd_workgroup_size: Option<[u32; 3]>,
    /// Lanes of a wave.
    pub wave_size: u32,
    /// The stack's size is not known when compiling.
    pub uses_dynamic_stack: bool,
}

impl Kernel {
    /// Waves per SIMD at the largest workgroup size with static LDS only; see [`occupancy`].
    pub fn occupancy(&self, arch: Arch) -> u32 {
        occupancy(arch, self.total_vgprs, self.lds_bytes, self.max_threads)
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelArg {
    /// Its name, where the compiler wrote it.
    pub name: Option<String>,
    /// The note's `.value_kind`, such as `by_value`, `global_buffer` or `hidden_block_count_x`.
    pub kind: String,
    /// Offset in the argument segment, in bytes.
    pub offset: u32,
    /// Size, in bytes.
    pub size: u32,
}

impl KernelArg {
    /// Whether the launcher fills it in and not the caller.
    pub fn hidden(&self) -> bool {
        self.kind.starts_with("hidden_")
    }
}

/// Names which structure the `object` crate could not read.
fn elf<T>(what: &'static str, result: read::Result<T>) -> Result<T, ParseError> {
    result.map_err(|e| ParseError::Elf { what, reason: e.to_string() })
}

impl CodeObject {
    /// Parses a linked AMDGPU code object of version 4, 5 or 6; or PTX, whose kernels have no registers, memory or
    /// descriptor yet.
    ///
    /// # Errors
    /// A [`ParseError`] that says what is missing, broken or contradictory.
    pub fn parse(bytes: &[u8]) -> Result<CodeObject, ParseError> {
        if ptx::is_ptx(bytes) {
            return ptx::parse(bytes);
        }
        let header = read_header(bytes)?;
        let ident = header.e_ident();
        let arch = read_arch(header)?;
        let segments = read_segments(header, bytes)?;
        let sections = elf("section table", header.sections(LE, bytes))?;
        let relocations = read_relocations(&sections, bytes, &segments)?;
        let note = metadata::decode(find_note(header, bytes)?)?;
        let note = Map::new("", &note)?;
        check_note(&note, arch)?;

        let listed = note.need_array("amdhsa.kernels")?;
        let mut symbols = HashMap::with_capacity(listed.len());
        let mut maps = Vec::with_capacity(listed.len());
        for (i, value) in listed.iter().enumerate() {
            let map = Map::new(format!("amdhsa.kernels[{i}]"), value)?;
            symbols.insert(map.need_str(".symbol")?, None);
            maps.push(map);
        }
        find_symbols(&sections, bytes, &mut symbols)?;
        let mut names = HashSet::with_capacity(maps.len());
        let mut kernels = Vec::with_capacity(maps.len());
        for map in &maps {
            let kernel = read_kernel(map, &symbols, &segments, bytes)?;
            if !names.insert(kernel.name.clone()) {
                return Err(ParseError::Metadata {
                    reason: format!("kernel `{}` is listed twice", kernel.name),
                });
            }
            kernels.push(kernel);
        }
        let printf = note.strings("amdhsa.printf")?;
        Ok(CodeObject { arch, abi_version: ident.abi_version, kernels, segments, relocations, printf })
    }

    /// The kernel of that name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name == name)
    }
}

fn read_header(bytes: &[u8]) -> Result<&Header, ParseError> {
    if !bytes.starts_with(&elf::ELFMAG) {
        let reason = if bytes.is_empty() {
            "the file is empty"
        } else if bytes.starts_with(b"__CLANG_OFFLOAD_BUNDLE__") || bytes.starts_with(b"CCOB") {
            "an offload bundle: compile with --no-gpu-bundle-output"
        } else {
            "no ELF signature"
        };
        return Err(ParseError::NotElf { reason });
    }
    let wrong = |field, found: u64, expected| ParseError::WrongFormat { field, found, expected };
    // The class and the byte order come first: `object` reports anything else as an unsupported header.
    match (bytes.get(4), bytes.get(5)) {
        (Some(2), Some(1)) => {}
        (Some(2), Some(&order)) => return Err(wrong("EI_DATA", order.into(), "1 (little endian)")),
        (Some(&class), _) => return Err(wrong("EI_CLASS", class.into(), "2 (64 bit)")),
        (None, _) => {
            return Err(ParseError::Elf { what: "file header", reason: "the file ends in it".into() });
        }
    }
    let header = elf("file header", Header::parse(bytes))?;
    if header.e_machine(LE).0 != EM_AMDGPU {
        return Err(wrong("e_machine", header.e_machine(LE).0.into(), "0xe0 (AMDGPU)"));
    }
    let ident = header.e_ident();
    if ident.os_abi.0 != ELFOSABI_AMDGPU_HSA {
        return Err(wrong("EI_OSABI", ident.os_abi.0.into(), "0x40 (HSA)"));
    }
    if !(2..=4).contains(&ident.abi_version) {
        return Err(wrong(
            "EI_ABIVERSION",
            ident.abi_version.into(),
            "2, 3 or 4 (code object version 4, 5 or 6)",
        ));
    }
    if header.e_type(LE) != elf::ET_DYN {
        return Err(wrong("e_type", header.e_type(LE).0.into(), "3 (a linked shared object)"));
    }
    Ok(header)
}

fn read_arch(header: &Header) -> Result<Arch, ParseError> {
    match header.e_flags(LE).0 as u8 {
        0x4C => Ok(Arch::Gfx942),
        0x4F => Ok(Arch::Gfx950),
        machine => Err(ParseError::WrongMachine { machine }),
    }
}

fn read_segments(header: &Header, bytes: &[u8]) -> Result<Vec<Segment>, ParseError> {
    let mut segments = Vec::new();
    for (index, p) in elf("program header table", header.program_headers(LE, bytes))?.iter().enumerate() {
        if p.p_type(LE) != elf::PT_LOAD {
            continue;
        }
        let error = |reason: String| ParseError::Segment { index, reason };
        let (offset, file_size) = p.file_range(LE);
        let (vaddr, mem_size) = (p.p_vaddr(LE), p.p_memsz(LE));
        let end = offset.checked_add(file_size).filter(|&end| end <= bytes.len() as u64);
        let Some(end) = end else {
            return Err(error(format!(
                "bytes {offset:#x} + {file_size:#x} are beyond the end of the file at {:#x}",
                bytes.len()
            )));
        };
        if file_size > mem_size {
            return Err(error(format!("{file_size:#x} bytes in the file, {mem_size:#x} in memory")));
        }
        if vaddr.checked_add(mem_size).is_none_or(|end| end > MAX_IMAGE_BYTES) {
            return Err(error(format!(
                "{mem_size:#x} bytes at {vaddr:#x} exceed an image of {MAX_IMAGE_BYTES:#x} bytes"
            )));
        }
        if mem_size == 0 {
            continue;
        }
        if segments.len() == MAX_SEGMENTS {
            return Err(error(format!("more than {MAX_SEGMENTS} loadable segments")));
        }
        let flags = p.p_flags(LE).0;
        segments.push((
            index,
            Segment {
                vaddr,
                mem_size,
                file: offset as usize..end as usize, // at most the length of the slice
                executable: flags & elf::PF_X.0 != 0,
                writable: flags & elf::PF_W.0 != 0,
            },
        ));
    }
    segments.sort_by_key(|(_, s)| s.vaddr);
    for pair in segments.windows(2) {
        let [(before, a), (index, b)] = pair else { continue };
        if a.vaddr + a.mem_size > b.vaddr {
            return Err(ParseError::Segment { index: *index, reason: format!("overlaps segment {before}") });
        }
    }
    Ok(segments.into_iter().map(|(_, s)| s).collect())
}

type Sections<'a> = read::elf::SectionTable<'a, Header>;

fn read_relocations(
    sections: &Sections<'_>,
    bytes: &[u8],
    segments: &[Segment],
) -> Result<Vec<Relocation>, ParseError> {
    let symbols = elf("symbol table", sections.symbols(LE, bytes, elf::SHT_DYNSYM))?;
    let mut relocations = Vec::new();
    for section in sections.iter() {
        // Relocations that are not loaded belong to debug sections and are the linker's.
        if section.sh_flags(LE).0 & elf::SHF_ALLOC.0 == 0 {
            continue;
        }
        let kind = section.sh_type(LE);
        if (kind == elf::SHT_REL || kind == elf::SHT_RELR) && section.sh_size(LE) != 0 {
            let reason = "relocations without addends are not supported".into();
            return Err(ParseError::Elf { what: "relocation section", reason });
        }
        let Some((entries, linked)) = elf("relocation section", section.rela(LE, bytes))? else { continue };
        // Many section headers can name the same bytes.
        if (relocations.len() + entries.len()) * size_of::<elf::Rela64<LittleEndian>>() > bytes.len() {
            let reason = "more relocations than the file has room for".into();
            return Err(ParseError::Elf { what: "relocation section", reason });
        }
        for entry in entries {
            let (vaddr, kind) = (entry.r_offset(LE), entry.r_type(LE, false).0);
            let field = match kind {
                R_AMDGPU_NONE => continue,
                R_AMDGPU_ABS64 | R_AMDGPU_RELATIVE64 => RelocationField::Word64,
                R_AMDGPU_ABS32 => RelocationField::Word32,
                R_AMDGPU_ABS32_LO => RelocationField::Low32,
                R_AMDGPU_ABS32_HI => RelocationField::High32,
                _ => return Err(ParseError::Relocation { kind, vaddr }),
            };
            if !segments.iter().any(|s| s.contains(vaddr, field.size() as u64)) {
                return Err(ParseError::RelocationOutside { vaddr });
            }
            let base = match entry.symbol(LE, false) {
                _ if kind == R_AMDGPU_RELATIVE64 => RelocationValue::Relative(0),
                None => RelocationValue::Absolute(0),
                Some(_) if linked != symbols.section() => {
                    let reason =
                        format!("its symbols are of section {linked}, which is not the dynamic table");
                    return Err(ParseError::Elf { what: "relocation section", reason });
                }
                Some(index) => resolve(&symbols, index, vaddr)?,
            };
            let addend = entry.r_addend(LE);
            let value = match base {
                RelocationValue::Relative(offset) => {
                    RelocationValue::Relative(offset.wrapping_add_signed(addend))
                }
                RelocationValue::Absolute(value) => {
                    RelocationValue::Absolute(value.wrapping_add_signed(addend))
                }
            };
            relocations.push(Relocation { vaddr, value, field });
        }
    }
    Ok(relocations)
}

/// The value of a dynamic symbol. Nothing but the object itself can define it.
fn resolve(
    symbols: &read::elf::SymbolTable<'_, Header>,
    index: read::SymbolIndex,
    vaddr: u64,
) -> Result<RelocationValue, ParseError> {
    let symbol = elf("symbol of a relocation", symbols.symbol(index))?;
    let value = symbol.st_value(LE);
    if symbol.is_absolute(LE) {
        return Ok(RelocationValue::Absolute(value));
    }
    if !symbol.is_undefined(LE) {
        return Ok(RelocationValue::Relative(value));
    }
    if symbol.is_weak() {
        return Ok(RelocationValue::Absolute(0));
    }
    let name = elf("symbol name", symbols.symbol_name(LE, symbol))?;
    Err(ParseError::UndefinedSymbol { symbol: String::from_utf8_lossy(name).into_owned(), vaddr })
}

impl Segment {
    /// Whether `size` bytes at `vaddr` are inside.
    fn contains(&self, vaddr: u64, size: u64) -> bool {
        vaddr >= self.vaddr
            && vaddr - self.vaddr <= self.mem_size
            && self.mem_size - (vaddr - self.vaddr) >= size
    }

    /// The file's bytes for `size` bytes at `vaddr`, if the file has them.
    fn slice<'a>(&self, bytes: &'a [u8], vaddr: u64, size: usize) -> Option<&'a [u8]> {
        let start = usize::try_from(vaddr.checked_sub(self.vaddr)?).ok()?;
        bytes.get(self.file.clone())?.get(start..start.checked_add(size)?)
    }
}

fn find_note<'a>(header: &Header, bytes: &'a [u8]) -> Result<&'a [u8], ParseError> {
    for p in elf("program header table", header.program_headers(LE, bytes))? {
        let Some(mut notes) = elf("note segment", p.notes(LE, bytes))? else { continue };
        while let Some(note) = elf("note segment", notes.next())? {
            if note.name() == b"AMDGPU" && note.n_type(LE).0 == NT_AMDGPU_METADATA {
                return Ok(note.desc());
            }
        }
    }
    Err(ParseError::Metadata { reason: "the file has no NT_AMDGPU_METADATA note".into() })
}

fn check_note(note: &Map<'_, '_>, arch: Arch) -> Result<(), ParseError> {
    let version = note.need_array("amdhsa.version")?;
    if version.first().and_then(|v| v.to_owned().as_u64()) != Some(1) {
        return Err(ParseError::Metadata { reason: format!("amdhsa.version is {version:?}, expected 1.x") });
    }
    // "amdgcn-amd-amdhsa--gfx942", with features such as ":xnack-" behind. Version 4 and later write it.
    if let Some(target) = note.str("amdhsa.target")? {
        let processor = target.rsplit('-').find(|part| part.starts_with("gfx")).unwrap_or(target);
        if processor.split(':').next() != Some(arch.name()) {
            return Err(ParseError::TargetMismatch { note: target.into(), header: arch });
        }
    }
    Ok(())
}

/// Fills in the addresses of the symbols asked for.
fn find_symbols(
    sections: &Sections<'_>,
    bytes: &[u8],
    wanted: &mut HashMap<&str, Option<u64>>,
) -> Result<(), ParseError> {
    for kind in [elf::SHT_DYNSYM, elf::SHT_SYMTAB] {
        let table = elf("symbol table", sections.symbols(LE, bytes, kind))?;
        for symbol in table.iter() {
            if symbol.is_undefined(LE) {
                continue;
            }
            let name = elf("symbol name", table.symbol_name(LE, symbol))?;
            let Ok(name) = std::str::from_utf8(name) else { continue };
            if let Some(slot) = wanted.get_mut(name) {
                slot.get_or_insert(symbol.st_value(LE));
            }
        }
    }
    Ok(())
}

fn read_kernel(
    map: &Map<'_, '_>,
    symbols: &HashMap<&str, Option<u64>>,
    segments: &[Segment],
    bytes: &[u8],
) -> Result<Kernel, ParseError> {
    let name = map.need_str(".name")?.to_owned();
    let symbol = map.need_str(".symbol")?.to_owned();
    let Some(descriptor_vaddr) = symbols.get(symbol.as_str()).copied().flatten() else {
        return Err(ParseError::MissingSymbol { kernel: name, symbol });
    };
    let outside =
        |what, vaddr, expected| ParseError::OutOfImage { kernel: name.clone(), what, vaddr, expected };
    let raw = segments.iter().find_map(|s| s.slice(bytes, descriptor_vaddr, Descriptor::SIZE));
    let raw: &[u8; Descriptor::SIZE] = raw
        .and_then(|raw| raw.try_into().ok())
        .ok_or_else(|| outside("descriptor", descriptor_vaddr, "the file's part of a segment"))?;
    let descriptor = Descriptor::decode(raw);
    let entry_vaddr = descriptor_vaddr.wrapping_add_signed(descriptor.entry_offset);
    let code = segments.iter().find(|s| s.executable && s.slice(bytes, entry_vaddr, 4).is_some());
    if code.is_none() || entry_vaddr % 4 != 0 {
        return Err(outside("entry point", entry_vaddr, "an executable segment, on 4 bytes"));
    }

    let contradiction = |reason: String| ParseError::Contradiction { kernel: name.clone(), reason };
    let stated = map.need_u32(".kernarg_segment_size")?;
    let (args, explicit_arg_bytes, kernarg_size) = read_args(map, &name, stated)?;
    let total_vgprs = map.need_u32(".vgpr_count")?;
    let agprs = match map.u32(".agpr_count")? {
        Some(agprs) => agprs,
        None => total_vgprs.saturating_sub(descriptor.accum_offset),
    };
    let Some(vgprs) = total_vgprs.checked_sub(agprs) else {
        return Err(contradiction(format!("{agprs} AGPRs of {total_vgprs} registers in total")));
    };
    let kernel = Kernel {
        kernarg_size,
        kernarg_align: map.u32(".kernarg_segment_align")?.unwrap_or(8),
        args,
        explicit_arg_bytes,
        lds_bytes: map.need_u32(".group_segment_fixed_size")?,
        scratch_bytes: map.need_u32(".private_segment_fixed_size")?,
        vgprs,
        agprs,
        total_vgprs,
        sgprs: map.need_u32(".sgpr_count")?,
        vgpr_spills: map.u32(".vgpr_spill_count")?.unwrap_or(0),
        sgpr_spills: map.u32(".sgpr_spill_count")?.unwrap_or(0),
        max_threads: map.need_u32(".max_flat_workgroup_size")?,
        reqd_workgroup_size: map.u32x3(".reqd_workgroup_size")?,
        wave_size: map.need_u32(".wavefront_size")?,
        uses_dynamic_stack: map.bool(".uses_dynamic_stack")?.unwrap_or(false) || descriptor.dynamic_stack,
        descriptor_vaddr,
        entry_vaddr,
        descriptor,
        symbol,
        name: name.clone(),
    };
    check_kernel(&kernel, stated).map_err(contradiction)?;
    Ok(kernel)
}

/// The arguments, the end of those that the caller passes, and the size of the segment: as stated, or as far as the arguments
/// reach. Hand-written kernels state less at times, and run.
fn read_args(map: &Map<'_, '_>, kernel: &str, stated: u32) -> Result<(Vec<KernelArg>, u32, u32), ParseError> {
    let mut args = Vec::new();
    let (mut explicit, mut size) = (0, stated);
    for (i, value) in map.array(".args")?.unwrap_or_default().iter().enumerate() {
        let map = Map::new(format!("{kernel}.args[{i}]"), value)?;
        let arg = KernelArg {
            name: map.str(".name")?.map(str::to_owned),
            kind: map.need_str(".value_kind")?.to_owned(),
            offset: map.need_u32(".offset")?,
            size: map.need_u32(".size")?,
        };
        let Some(end) = arg.offset.checked_add(arg.size).filter(|&end| end <= MAX_ARGUMENT_BYTES) else {
            let reason = format!("argument {i} has {} bytes at {}", arg.size, arg.offset);
            return Err(ParseError::Contradiction { kernel: kernel.into(), reason });
        };
        if !arg.hidden() {
            explicit = explicit.max(end);
        }
        size = size.max(end);
        args.push(arg);
    }
    if args.is_empty() {
        explicit = stated;
    }
    Ok((args, explicit, size))
}

/// What the note and the descriptor both say has to agree, and what they say has to be possible.
fn check_kernel(k: &Kernel, stated_arg_bytes: u32) -> Result<(), String> {
    let d = &k.descriptor;
    let agree = |what: &str, note: u32, descriptor: u32| {
        if note == descriptor {
            return Ok(());
        }
        Err(format!("{what}: {note} in the metadata note, {descriptor} in the descriptor"))
    };
    agree("LDS bytes", k.lds_bytes, d.lds_bytes)?;
    agree("scratch bytes", k.scratch_bytes, d.scratch_bytes)?;
    if d.kernarg_bytes != 0 {
        agree("argument bytes", stated_arg_bytes, d.kernarg_bytes)?;
    }
    if k.total_vgprs > d.allocated_vgprs {
        return Err(format!(
            "{} registers used, {} allocated by the descriptor",
            k.total_vgprs, d.allocated_vgprs
        ));
    }
    if d.accum_offset > d.allocated_vgprs {
        return Err(format!(
            "AGPRs start at {} of {} allocated registers",
            d.accum_offset, d.allocated_vgprs
        ));
    }
    if k.agprs > 0 && (k.vgprs > d.accum_offset || d.accum_offset + k.agprs > d.allocated_vgprs) {
        return Err(format!(
            "{} VGPRs and {} AGPRs, but AGPRs start at {} of {} allocated registers",
            k.vgprs, k.agprs, d.accum_offset, d.allocated_vgprs
        ));
    }
    if d.used_user_sgprs() > d.user_sgprs.into() {
        return Err(format!("{} user SGPRs are needed, {} are enabled", d.used_user_sgprs(), d.user_sgprs));
    }
    if !k.kernarg_align.is_power_of_two() {
        return Err(format!("argument segment aligned to {} bytes, not a power of two", k.kernarg_align));
    }
    if k.wave_size != 64 {
        return Err(format!("waves of {} lanes, the target has 64", k.wave_size));
    }
    if !(1..=1024).contains(&k.max_threads) {
        return Err(format!("workgroups of up to {} threads, the target allows 1 to 1024", k.max_threads));
    }
    if let Some(size) = k.reqd_workgroup_size {
        let threads = size.iter().try_fold(1u32, |n, &d| n.checked_mul(d));
        if threads.is_none_or(|n| n == 0 || n > k.max_threads) {
            return Err(format!(
                "workgroup size {size:?} is required, at most {} threads are allowed",
                k.max_threads
            ));
        }
    }
    Ok(())
}
