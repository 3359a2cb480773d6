//! Code objects in device memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use hk_codeobj::{Arch, CodeObject, ParseError};

use crate::lower::{Code, Text, Way, lower};
use crate::memory::{Allocation, Memory, MemoryError};
use crate::program::{Program, Registers};

/// Why a code object cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It is no valid code object.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// It is for another target.
    #[error("the code object is for {object}, the device is {device}")]
    Arch {
        /// Target of the code object.
        object: Arch,
        /// Target of the machine.
        device: Arch,
    },
    /// A segment or relocation that cannot be placed.
    #[error("the code object cannot be mapped: {0}")]
    Map(String),
    /// No memory for its segments.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Largest span of addresses that the segments of one object may cover.
const MAX_SPAN: u64 = 1 << 32;
/// How much more memory the segments may take than the file has bytes.
const MAX_ZEROS: u64 = 256 << 20;

/// By entry and registers, because kernels may share code; each is lowered once.
type Programs = HashMap<(u64, Registers), Arc<OnceLock<Arc<Program>>>>;

/// A loaded code object. Its memory is freed with the last reference.
pub struct Module {
    pub(crate) object: CodeObject,
    pub(crate) text: Text,
    memory: Arc<Memory>,
    segments: Vec<u64>,
    /// The file, for line tables.
    image: Vec<u8>,
    programs: Mutex<Programs>,
}

impl Module {
    pub(crate) fn load(memory: &Arc<Memory>, arch: Arch, image: &[u8]) -> Result<Module, LoadError> {
        let object = CodeObject::parse(image)?;
        if object.arch != arch {
            return Err(LoadError::Arch { object: object.arch, device: arch });
        }
        let map_error = |what: String| LoadError::Map(what);
        let span = object
            .segments
            .iter()
            .map(|s| s.vaddr.checked_add(s.mem_size))
            .try_fold(0, |span, end| end.map(|end: u64| span.max(end)))
            .filter(|span| *span <= MAX_SPAN)
            .ok_or_else(|| map_error("its segments span more than 4 GiB".to_owned()))?;
        let bytes = object.segments.iter().map(|s| s.mem_size).sum::<u64>();
        if bytes > image.len() as u64 + MAX_ZEROS {
            return Err(map_error(format!(
                "its segments take {bytes} bytes, 256 MiB more than the file has"
            )));
        }
        // One reservation keeps the distances between segments; each segment is an allocation of its own in it.
        let base = memory.reserve_span(span.max(1), 4096)?;
        let mut allocations: Vec<Arc<Allocation>> = vec![];
        let mut text = Text { base, segments: vec![] };
        for segment in &object.segments {
            let bytes = image
                .get(segment.file.clone())
                .filter(|bytes| bytes.len() as u64 <= segment.mem_size)
                .ok_or_else(|| map_error(format!("segment at {:#x} has no such bytes", segment.vaddr)))?;
            let label = if segment.executable { "code" } else { "constants and globals" };
            let allocation = memory.place(base + segment.vaddr, segment.mem_size, label, segment.writable)?;
            allocation.zero();
            allocation.write_bytes(0, bytes);
            allocations.push(allocation);
        }
        for relocation in &object.relocations {
            let vaddr = relocation.vaddr;
            let (value, size) = relocation
                .bytes(base)
                .ok_or_else(|| map_error(format!("the address at {vaddr:#x} does not fit into 32 bits")))?;
            let address = base.wrapping_add(vaddr);
            let target = allocations.iter().find_map(|a| Some((a, a.offset(address, size as u64)?)));
            let (allocation, offset) =
                target.ok_or_else(|| map_error(format!("relocation at {vaddr:#x} is in no segment")))?;
            allocation.write_bytes(offset, &value[..size]);
        }
        for (segment, allocation) in object.segments.iter().zip(&allocations) {
            if segment.executable {
                let mut bytes = vec![0; segment.file.len() & !3];
                allocation.read_bytes(0, &mut bytes);
                let words = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
                text.segments.push(Code { vaddr: segment.vaddr, words });
            }
        }
        let segments = allocations.iter().map(|a| a.base).collect();
        for allocation in allocations {
            memory.insert(allocation);
        }
        Ok(Module {
            object,
            text,
            memory: memory.clone(),
            segments,
            image: image.to_vec(),
            programs: Mutex::default(),
        })
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// What the code object says about its kernels.
    pub fn code_object(&self) -> &CodeObject {
        &self.object
    }

    /// Device address and size of a variable that the code object exports.
    pub fn global(&self, name: &str) -> Option<(u64, u64)> {
        self.find_globals(|n| n == name).pop().map(|(_, address, size)| (address, size))
    }

    /// Name, device address and size of every variable that the code object exports.
    pub fn globals(&self) -> Vec<(String, u64, u64)> {
        self.find_globals(|_| true)
    }

    fn find_globals(&self, wanted: impl Fn(&str) -> bool) -> Vec<(String, u64, u64)> {
        use object::{Object, ObjectSymbol, SymbolKind};
        let Ok(file) = object::File::parse(&*self.image) else { return vec![] };
        let global = |s: object::Symbol<'_, '_>| {
            let name = s.name().ok().filter(|name| wanted(name))?;
            let holds = |segment: &hk_codeobj::Segment| {
                let offset = s.address().checked_sub(segment.vaddr);
                let room = |o| o <= segment.mem_size && s.size() <= segment.mem_size - o;
                !segment.executable && offset.is_some_and(room)
            };
            let variable = s.kind() == SymbolKind::Data && s.is_definition();
            let inside = variable && self.object.segments.iter().any(holds);
            inside.then(|| (name.to_owned(), self.text.base + s.address(), s.size()))
        };
        file.dynamic_symbols().filter_map(global).collect()
    }

    /// The program at an entry point, lowered at the first request.
    pub(crate) fn program(&self, way: &Way, entry: u64, registers: Registers) -> Arc<Program> {
        let cell = {
            let mut programs = self.programs.lock().unwrap_or_else(|e| e.into_inner());
            programs.entry((entry, registers)).or_default().clone()
        };
        cell.get_or_init(|| Arc::new(lower(&self.text, self.object.arch, way, entry, registers))).clone()
    }

    /// `file:line` of a virtual address of the code object, from its line table.
    pub(crate) fn source_line(&self, vaddr: u64) -> Option<String> {
        let (file, line) = self.source_lines(&[vaddr]).pop().flatten()?;
        Some(format!("{file}:{line}"))
    }

    /// File and line of each virtual address of the code object, from its line table.
    pub fn source_lines(&self, vaddrs: &[u64]) -> Vec<Option<(String, u32)>> {
        let table = self.line_table();
        let find = |vaddr: &u64| {
            let location = table.as_ref()?.find_location(*vaddr).ok()??;
            Some((location.file?.to_owned(), location.line?))
        };
        vaddrs.iter().map(find).collect()
    }

    fn line_table(&self) -> Option<addr2line::Context<gimli::EndianArcSlice<gimli::LittleEndian>>> {
        use object::{Object, ObjectSection};
        let file = object::File::parse(&*self.image).ok()?;
        let load =
            |id: gimli::SectionId| -> Result<gimli::EndianArcSlice<gimli::LittleEndian>, gimli::Error> {
                let data = file.section_by_name(id.name()).and_then(|s| s.data().ok()).unwrap_or(&[]);
                Ok(gimli::EndianArcSlice::new(Arc::from(data), gimli::LittleEndian))
            };
        let dwarf = gimli::Dwarf::load(load).ok()?;
        addr2line::Context::from_dwarf(dwarf).ok()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        for base in &self.segments {
            // Each was inserted once and is freed here alone.
            let _ = self.memory.free(*base);
        }
    }
}
