//! Mutants: kernels with one instruction broken on purpose, to measure what checks and tests find.

use std::fmt;
use std::str::FromStr;

use crate::isa::{Encoding, Inst, Op, Operand};

/// What is done to the instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mutation {
    /// It does nothing.
    Delete,
    /// Its memory address grows by so many bytes.
    Shift(u8),
    /// It traps: tells whether a run reaches it.
    Trap,
}

/// One instruction of a kernel, changed when the kernel is prepared for execution. The code object stays as it is.
///
/// Prints and parses as `KERNEL@0xADDRESS:delete`, `:shift4`, `:trap`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mutant {
    /// The kernel.
    pub kernel: String,
    /// Virtual address of the instruction, as in a disassembly.
    pub address: u64,
    /// The change.
    pub mutation: Mutation,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{:#x}:", self.kernel, self.address)?;
        match self.mutation {
            Mutation::Delete => f.write_str("delete"),
            Mutation::Shift(bytes) => write!(f, "shift{bytes}"),
            Mutation::Trap => f.write_str("trap"),
        }
    }
}

/// Text that is no mutant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no mutant: expected KERNEL@0xADDRESS:delete, :shiftBYTES or :trap")]
pub struct MutantError {
    /// The text.
    pub text: String,
}

impl FromStr for Mutant {
    type Err = MutantError;

    fn from_str(text: &str) -> Result<Mutant, MutantError> {
        let parse = || {
            let (kernel, rest) = text.rsplit_once('@')?;
            let (address, mutation) = rest.split_once(':')?;
            let address = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
            let mutation = match mutation {
                "delete" => Mutation::Delete,
                "trap" => Mutation::Trap,
                shift => Mutation::Shift(shift.strip_prefix("shift")?.parse().ok()?),
            };
            Some(Mutant { kernel: kernel.to_owned(), address, mutation })
        };
        parse().ok_or_else(|| MutantError { text: text.to_owned() })
    }
}

/// A place at which a kernel can be broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The change.
    pub mutant: Mutant,
    /// The instruction as LLVM prints it.
    pub instruction: String,
    /// `file:line`, with line tables in the code object.
    pub source: Option<String>,
}

impl Mutation {
    /// What one can break about an instruction: a wait or a barrier can be missing, an address be off by one element.
    pub(crate) fn of(inst: &Inst) -> Option<Mutation> {
        match inst.encoding {
            Encoding::Sopp => matches!(inst.op, Op::S_WAITCNT | Op::S_BARRIER).then_some(Mutation::Delete),
            Encoding::Smem
            | Encoding::Ds
            | Encoding::Flat
            | Encoding::Global
            | Encoding::Scratch
            | Encoding::Mubuf => {
                let changed = Mutation::Shift(1).apply(inst);
                let bytes = inst.element_bytes()?;
                (changed != *inst).then_some(Mutation::Shift(bytes))
            }
            _ => None,
        }
    }

    /// The changed instruction.
    pub(crate) fn apply(self, inst: &Inst) -> Inst {
        let mut changed = *inst;
        match self {
            Mutation::Delete => changed = Inst::new(Op::S_NOP, Encoding::Sopp, inst.size),
            Mutation::Trap => changed = Inst::new(Op::S_TRAP, Encoding::Sopp, inst.size),
            Mutation::Shift(bytes) => match (inst.encoding, &mut changed.src[1]) {
                (Encoding::Smem, Operand::Imm(offset)) => *offset += i32::from(bytes),
                (Encoding::Smem, _) if inst.flags.soffset => changed.imm += i32::from(bytes),
                (Encoding::Smem, _) => {}
                // Two offsets in units of the element.
                (Encoding::Ds, _) if inst.op.has_two_offsets() => {
                    let [a, b] = [inst.imm & 0xFF, inst.imm >> 8 & 0xFF].map(|x| (x + 1).min(255));
                    changed.imm = a | b << 8;
                }
                _ => changed.imm += i32::from(bytes),
            },
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutants_parse_as_they_print() {
        for mutation in [Mutation::Delete, Mutation::Shift(16), Mutation::Trap] {
            let mutant = Mutant { kernel: "a@b".into(), address: 0x1A40, mutation };
            assert_eq!(mutant.to_string().parse(), Ok(mutant));
        }
        for text in ["", "k", "k@12:delete", "k@0x12", "k@0x12:shift", "k@0xz:trap"] {
            assert!(text.parse::<Mutant>().is_err(), "{text}");
        }
    }
}
