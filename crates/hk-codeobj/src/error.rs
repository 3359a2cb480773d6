use crate::Arch;

/// Why bytes are not a code object that can be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The file does not start as an ELF file.
    #[error("not an ELF file: {reason}")]
    NotElf {
        /// What the bytes look like instead.
        reason: &'static str,
    },
    /// A PTX text that is not what a launcher can use.
    #[error("PTX: {reason}")]
    Ptx {
        /// What is missing or wrong.
        reason: String,
    },
    /// The ELF structure is broken or ends early.
    #[error("truncated or malformed ELF: {what}: {reason}")]
    Elf {
        /// The table or structure that was read.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// An ELF file, but not a linked AMDGPU code object for HSA.
    #[error("not an AMDGPU code object: {field} is {found:#x}, expected {expected}")]
    WrongFormat {
        /// The header field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What a code object has there.
        expected: &'static str,
    },
    /// A code object for a target that is not supported.
    #[error(
        "code object for an unsupported target: machine code {machine:#x}, expected 0x4c (gfx942) or 0x4f (gfx950)"
    )]
    WrongMachine {
        /// The target's code in the ELF flags.
        machine: u8,
    },
    /// A segment lies outside of the file, is too large, or overlaps another.
    #[error("segment {index}: {reason}")]
    Segment {
        /// Position in the program header table.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The metadata note is missing or is not what it should be.
    #[error("metadata note: {reason}")]
    Metadata {
        /// What is missing or wrong, with its path in the note.
        reason: String,
    },
    /// The note describes another target than the ELF header.
    #[error("metadata note says target `{note}`, the ELF header says {header}")]
    TargetMismatch {
        /// The note's target.
        note: String,
        /// The ELF header's.
        header: Arch,
    },
    /// A kernel's descriptor symbol is missing.
    #[error("kernel `{kernel}`: symbol `{symbol}` not found")]
    MissingSymbol {
        /// The kernel.
        kernel: String,
        /// The symbol that the note names.
        symbol: String,
    },
    /// A kernel's descriptor or entry point is not inside of the file's segments.
    #[error("kernel `{kernel}`: {what} at {vaddr:#x} is not in {expected}")]
    OutOfImage {
        /// The kernel.
        kernel: String,
        /// The descriptor or the entry point.
        what: &'static str,
        /// Its virtual address.
        vaddr: u64,
        /// Where it has to be.
        expected: &'static str,
    },
    /// The note and the descriptor contradict each other, or one of them itself.
    #[error("kernel `{kernel}`: {reason}")]
    Contradiction {
        /// The kernel.
        kernel: String,
        /// The two facts.
        reason: String,
    },
    /// A dynamic relocation that a loader of kernels cannot apply.
    #[error(
        "relocation of type {kind} at {vaddr:#x} is not supported: only R_AMDGPU_RELATIVE64 (13), ABS64 (3), ABS32 (6), \
         ABS32_LO (1) and ABS32_HI (2) are"
    )]
    Relocation {
        /// The relocation's type.
        kind: u32,
        /// The address it applies to.
        vaddr: u64,
    },
    /// A relocation to a symbol that the object leaves undefined and that is not weak.
    #[error("symbol `{symbol}` is undefined, and the relocation at {vaddr:#x} refers to it")]
    UndefinedSymbol {
        /// The symbol.
        symbol: String,
        /// The address it applies to.
        vaddr: u64,
    },
    /// A relocation that applies to an address outside of the segments.
    #[error("relocation at {vaddr:#x} is outside of the file's segments")]
    RelocationOutside {
        /// The address it applies to.
        vaddr: u64,
    },
}
