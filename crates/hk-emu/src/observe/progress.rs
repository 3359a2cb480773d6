//! Which memory operations of a wave an `s_waitcnt` has proven complete, as far as races need to know.

use super::waits;
use crate::effects::Kind;
use crate::isa::Inst;

/// One memory operation of a wave: what proves it complete, and its number among those of its kind.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    /// Vector memory, LDS DMA: in order, by vmcnt.
    Vector(u64),
    /// LDS: in order among each other, by lgkmcnt.
    Lds(u64),
    /// FLAT: either memory, so by both counters at 0.
    Flat(u64),
}

/// What a wave has issued and waited for. Operations are numbered from 1.
#[derive(Clone, Default)]
pub(crate) struct Progress {
    vector: Line,
    lds: Line,
    flat_issued: u64,
    flat_by_vmcnt: u64,
    flat_by_lgkmcnt: u64,
}

#[derive(Clone, Default)]
struct Line {
    issued: u64,
    done: u64,
}

impl Line {
    fn issue(&mut self) -> u64 {
        self.issued += 1;
        self.issued
    }

    /// At most `n` are outstanding. Others on the same counter only make the proof stronger: an operation that is not
    /// complete keeps all later ones of its kind from completing, so the counter is above their number.
    fn wait(&mut self, n: u64) {
        self.done = self.done.max(self.issued.saturating_sub(n));
    }
}

impl Progress {
    /// Takes note of an instruction; a token if it is a memory operation of interest.
    pub fn note(&mut self, inst: &Inst) -> Option<Token> {
        match Kind::of(inst) {
            Kind::Vector => Some(Token::Vector(self.vector.issue())),
            Kind::Lds => Some(Token::Lds(self.lds.issue())),
            Kind::Flat => {
                self.vector.issue();
                self.flat_issued += 1;
                Some(Token::Flat(self.flat_issued))
            }
            Kind::Wait => {
                let [vmcnt, lgkmcnt] = waits::counts(inst.imm).map(|n| n as u64);
                self.wait(vmcnt, lgkmcnt);
                None
            }
            Kind::Scalar | Kind::None => None,
        }
    }

    fn wait(&mut self, vmcnt: u64, lgkmcnt: u64) {
        // The largest value of a counter is no wait.
        if vmcnt != 63 {
            self.vector.wait(vmcnt);
        }
        if lgkmcnt != 15 {
            self.lds.wait(lgkmcnt);
        }
        if vmcnt == 0 {
            self.flat_by_vmcnt = self.flat_issued;
        }
        if lgkmcnt == 0 {
            self.flat_by_lgkmcnt = self.flat_issued;
        }
    }

    /// Whether a wait has proven the operation complete.
    pub fn complete(&self, token: Token) -> bool {
        match token {
            Token::Vector(n) => n <= self.vector.done,
            Token::Lds(n) => n <= self.lds.done,
            Token::Flat(n) => n <= self.flat_by_vmcnt.min(self.flat_by_lgkmcnt),
        }
    }
}

impl Token {
    /// The wait that proves it.
    pub fn wait(self) -> &'static str {
        match self {
            Token::Vector(_) => "s_waitcnt vmcnt",
            Token::Lds(_) => "s_waitcnt lgkmcnt",
            Token::Flat(_) => "s_waitcnt vmcnt(0) lgkmcnt(0)",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Encoding, Op};

    #[test]
    fn later_operations_of_the_kind_count_and_others_do_not() {
        let mut wave = Progress::default();
        let inst = |op, encoding| Inst::new(op, encoding, 8);
        let lds = inst(Op::DS_READ_B32, Encoding::Ds);
        let (first, second) = (wave.note(&lds).unwrap(), wave.note(&lds).unwrap());
        let load = wave.note(&inst(Op::GLOBAL_LOAD_DWORD, Encoding::Global)).unwrap();
        wave.wait(63, 1);
        assert!(wave.complete(first) && !wave.complete(second) && !wave.complete(load));
        let flat = wave.note(&inst(Op::FLAT_LOAD_DWORD, Encoding::Flat)).unwrap();
        wave.wait(1, 15);
        assert!(wave.complete(load) && !wave.complete(second));
        wave.wait(0, 15);
        assert!(!wave.complete(flat));
        wave.wait(63, 0);
        assert!(wave.complete(flat) && wave.complete(second));
    }
}
