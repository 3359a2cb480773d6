//! A kernel as it is executed: lowered instructions, and what their handlers can reach.

use std::collections::HashMap;
use std::sync::OnceLock;

use hk_codeobj::{Arch, Kernel};

use crate::counters::Counters;
use crate::effects::Effects;
use crate::fault::Problem;
use crate::isa::{self, DecodeError, Inst};
use crate::memory::View;
use crate::mutate::Mutation;
use crate::tables::{Fixup, Matrix, Scaled};
use crate::wave::{AGPR, CONSTANTS, GroupInfo, Lanes, VCC, Wave};

/// What the wave does after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Ctl {
    /// Goes on with the next instruction.
    Next,
    /// The handler has set the program counter.
    Jump,
    /// Waits for the workgroup; the program counter is the next instruction's.
    Barrier,
    /// Lets others run.
    Sleep,
    /// The handler has changed a mode that decides how instructions run.
    Mode,
    /// Has ended.
    End,
    /// `Env::problem` says what is wrong.
    Fault,
}

/// A handler. Unsafe to call because it may be compiled for host features: it must come from the tables of a level
/// that the host has.
pub(crate) type Handler = unsafe fn(&mut Wave, &mut Env<'_>, &Uop) -> Ctl;

/// The other waves of the workgroup: accesses to LDS, and all that [`TO_GROUPS`] has.
pub(crate) const TO_WAVES: u8 = 1;
/// Other workgroups: global atomics, and accesses at agent scope.
pub(crate) const TO_GROUPS: u8 = 2;

/// A lowered instruction.
#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Uop {
    pub run: Handler,
    /// The handler behind `run` when `run` prepares operands first.
    pub inner: Handler,
    /// Destination: vector slot, or scalar register code.
    pub d: u16,
    /// Sources: vector slots, or scalar operand codes (below 128 a register, else a constant).
    pub a: u16,
    pub b: u16,
    pub c: u16,
    /// Scalar register of a mask that is written.
    pub mask_out: u16,
    /// Scalar operand of a mask that is read.
    pub mask_in: u16,
    /// Sources of the high half of packed f32.
    pub hi: [u16; 3],
    /// Immediate, memory offset, or branch target as an index.
    pub imm: i32,
    /// Index of the instruction in its program.
    pub index: u32,
    /// Meaning by handler.
    pub extra: u32,
    /// Who may see what it does, or whose accesses it may see: [`TO_WAVES`], [`TO_GROUPS`].
    pub visible: u8,
    /// Clocks of the wave until its next instruction.
    pub clocks: u16,
    /// Index of the operand fix-ups that `run` applies around `inner`.
    pub fixup: u32,
    /// The same where they are scalar registers: which, and the vector slots that have them in every lane.
    pub splats: [[u16; 2]; 2],
}

/// What a handler can reach besides its wave: the workgroup and the launch.
pub(crate) struct Env<'a> {
    pub program: &'a Program,
    pub memory: &'a View<'a>,
    /// LDS of the workgroup.
    pub lds: &'a mut Vec<u8>,
    pub group: &'a GroupInfo,
    /// What an interrupt of the host does.
    pub interrupt: Option<&'a (dyn Fn() + Sync)>,
    /// Per instruction, and one behind the last: by how much it was executed more often than the one before it.
    pub rises: &'a mut [i64],
    /// Per instruction: the allocation it touched last.
    pub hints: &'a mut [u32],
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub problem: Option<Box<Problem>>,
}

impl Env<'_> {
    #[cold]
    pub fn fault(&mut self, problem: Problem) -> Ctl {
        self.problem = Some(Box::new(problem));
        Ctl::Fault
    }

    /// A 32-bit scalar operand.
    #[inline(always)]
    pub fn s32(&self, w: &Wave, code: u16) -> u32 {
        if code < 128 { w.s[code as usize & 127] } else { self.constant(w, code) }
    }

    /// A 64-bit scalar operand.
    #[inline(always)]
    pub fn s64(&self, w: &Wave, code: u16) -> u64 {
        if code < 128 {
            w.s64(code as usize)
        } else {
            u64::from(self.constant(w, code)) | u64::from(self.constant(w, code + 1)) << 32
        }
    }

    /// An operand code that names no register.
    #[inline(always)]
    fn constant(&self, w: &Wave, code: u16) -> u32 {
        match self.program.scalar(code) {
            Some(value) => value,
            None => special_scalar(w, code),
        }
    }
}

/// The operand codes of VCCZ, EXECZ and SCC; each has a zero as its high half.
pub(crate) const SPECIAL: u16 = 0xFFE0;

#[cold]
fn special_scalar(w: &Wave, code: u16) -> u32 {
    u32::from(match code.wrapping_sub(SPECIAL) {
        0 => w.s64(VCC) == 0,
        2 => w.exec() == 0,
        4 => w.scc,
        _ => false,
    })
}

/// Vector registers that a kernel may use, and where they are. VGPRs have the slots from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Registers {
    pub vgprs: u32,
    pub agprs: u32,
    /// The slot of a0.
    pub first_agpr: u32,
}

impl Registers {
    /// The registers that the kernel allocates: VGPRs up to where AGPRs start, each in slots of their own.
    pub fn of(kernel: &Kernel) -> Registers {
        let d = &kernel.descriptor;
        let vgprs = d.accum_offset.min(d.allocated_vgprs).min(256);
        let agprs = d.allocated_vgprs.saturating_sub(d.accum_offset).min(256);
        Registers { vgprs, agprs, first_agpr: AGPR.into() }
    }

    /// The file as the hardware has it: VGPRs may extend into the AGPRs and name the same registers there.
    pub fn one_file(self) -> Registers {
        let allocated = self.vgprs + self.agprs;
        Registers { vgprs: allocated.min(256), first_agpr: self.vgprs, ..self }
    }

    /// The slots of all.
    pub fn slots(self) -> impl Iterator<Item = u16> {
        (0..self.vgprs).chain(self.first_agpr..self.first_agpr + self.agprs).map(|slot| slot as u16)
    }
}

/// A lowered kernel.
pub(crate) struct Program {
    /// Differs between programs; never 0.
    pub id: u64,
    pub uops: Vec<Uop>,
    /// For each instruction the next one, or the end, that others may see: what lies between runs without a look at others.
    pub run_ends: Vec<u32>,
    pub arch: Arch,
    pub fixups: Vec<Fixup>,
    pub matrices: Vec<Matrix>,
    pub conversions: Vec<Scaled>,
    /// FNUZ 8-bit floats (gfx942), else OCP.
    pub fnuz: bool,
    /// Its result may depend on the order of workgroups: through atomics that do not commute, or loads at agent scope.
    pub communicates: bool,
    pub registers: Registers,
    pub entry: u32,
    /// Decoded instructions, or why not, and their virtual addresses.
    pub insts: Vec<Result<Inst, DecodeError>>,
    pub addresses: Vec<u64>,
    pub index: HashMap<u64, u32>,
    pub base: u64,
    pub scalars: Vec<u32>,
    pub vectors: Vec<u32>,
    /// Instructions that report when they are reached.
    pub problems: HashMap<u32, Problem>,
    /// Made at the first observed launch.
    pub effects: OnceLock<Vec<Effects>>,
    /// What one execution of an instruction counts, whatever its operands hold: each sort once, and which one each instruction is.
    pub units: Vec<Counters>,
    pub unit_of: Vec<u32>,
}

impl Program {
    /// The instruction, if it decodes.
    pub fn inst(&self, index: u32) -> Option<&Inst> {
        self.insts.get(index as usize)?.as_ref().ok()
    }

    /// What one execution of an instruction counts.
    pub fn unit(&self, index: u32) -> &Counters {
        &self.units[self.unit_of[index as usize] as usize]
    }

    /// The registers that an instruction reads and writes.
    pub fn effects(&self, index: u32) -> &Effects {
        static NONE: Effects = Effects::NONE;
        let all = self.effects.get_or_init(|| {
            let slots = |inst| Effects::of(inst).with_agprs_at(self.registers.first_agpr as u16);
            self.insts.iter().map(|inst| inst.as_ref().map_or(NONE, slots)).collect()
        });
        all.get(index as usize).unwrap_or(&NONE)
    }

    pub fn entry(&self) -> u32 {
        self.entry
    }

    #[inline(always)]
    pub fn scalar(&self, code: u16) -> Option<u32> {
        self.scalars.get(usize::from(code).wrapping_sub(128)).copied()
    }

    /// Registers that the kernel may use.
    pub fn registers(&self) -> Registers {
        self.registers
    }

    /// Device address of an instruction.
    pub fn device_address(&self, index: u32) -> u64 {
        self.base.wrapping_add(self.address(index))
    }

    /// The instruction at a device address.
    pub fn index_of(&self, address: u64) -> Option<u32> {
        self.index.get(&address.wrapping_sub(self.base)).copied()
    }

    /// The device address after an instruction.
    pub fn next_address(&self, index: u32) -> u64 {
        let i = index as usize;
        let size = self.insts[i].as_ref().map_or(4, |inst| u64::from(inst.size));
        self.base.wrapping_add(self.addresses[i]).wrapping_add(size)
    }

    /// Virtual address of an instruction in the code object.
    pub fn address(&self, index: u32) -> u64 {
        self.addresses.get(index as usize).copied().unwrap_or(0)
    }

    pub fn mnemonic(&self, index: u32) -> String {
        match self.insts.get(index as usize) {
            Some(Ok(inst)) => inst.op.mnemonic(),
            _ => "?".to_owned(),
        }
    }

    /// The instruction as LLVM prints it.
    pub fn text(&self, index: u32) -> String {
        match self.insts.get(index as usize) {
            Some(Ok(inst)) => isa::display(inst).to_string(),
            Some(Err(error)) => error.to_string(),
            None => "?".to_owned(),
        }
    }

    /// What can be broken in it: virtual address, change, text.
    pub fn mutations(&self) -> Vec<(u64, Mutation, String)> {
        let insts = self.insts.iter().zip(0..).filter_map(|(inst, i)| Some((inst.as_ref().ok()?, i)));
        insts.filter_map(|(inst, i)| Some((self.address(i), Mutation::of(inst)?, self.text(i)))).collect()
    }

    /// The instructions that would end a launch that reaches them, and why.
    pub fn unsupported(&self) -> Vec<(u64, String, String)> {
        let mut list: Vec<_> = self
            .problems
            .iter()
            .map(|(index, problem)| (self.address(*index), self.text(*index), problem.to_string()))
            .collect();
        list.sort();
        list
    }

    /// Puts the program's constants into the slots of a wave.
    pub fn place_constants(&self, w: &mut Wave) {
        if w.constants_of != self.id {
            for (i, value) in self.vectors.iter().enumerate() {
                *w.v_mut(CONSTANTS + i as u16) = Lanes::splat(*value);
            }
            w.constants_of = self.id;
        }
    }
}
