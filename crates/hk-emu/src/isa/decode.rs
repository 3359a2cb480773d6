//! Machine words to [`Inst`].

use std::sync::LazyLock;

use hk_codeobj::Arch;

use super::{ALL_OPS, Dpp, Encoding, Flags, Inst, MfmaScale, Op, Operand, Sdwa};

/// Why words are not an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The code ends inside the instruction.
    #[error("the code ends inside an instruction")]
    Truncated,
    /// No such opcode on this target.
    #[error("no instruction of {arch} has the encoding {word:#010x}")]
    Unknown {
        /// Target.
        arch: Arch,
        /// First word.
        word: u32,
    },
    /// A field holds a value that the instruction does not allow.
    #[error("{}: {field} holds an illegal value", op.mnemonic())]
    Field {
        /// Instruction.
        op: Op,
        /// Field.
        field: &'static str,
    },
}

/// Opcode to instruction, one table per encoding.
struct Tables([Vec<Option<Op>>; 17]);

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    let mut tables: [Vec<Option<Op>>; 17] = Default::default();
    for &op in ALL_OPS {
        let info = op.info();
        let table = &mut tables[info.encoding as usize];
        let index = usize::from(info.opcode);
        if table.len() <= index {
            table.resize(index + 1, None);
        }
        table[index] = Some(op);
    }
    Tables(tables)
});

fn lookup(arch: Arch, encoding: Encoding, opcode: u32, word: u32) -> Result<Op, DecodeError> {
    let op = TABLES.0[encoding as usize].get(opcode as usize).copied().flatten();
    op.filter(|op| op.info().exists_on(arch)).ok_or(DecodeError::Unknown { arch, word })
}

/// Bits `lo..lo + n` of `word`.
fn bits(word: u32, lo: u32, n: u32) -> u32 {
    word >> lo & ((1 << n) - 1)
}

fn bit(word: u32, n: u32) -> bool {
    word >> n & 1 != 0
}

fn sign_extend(value: u32, n: u32) -> i32 {
    (value << (32 - n)) as i32 >> (32 - n)
}

const SDWA: u32 = 249;
const DPP: u32 = 250;
const LITERAL: u32 = 255;

/// The words of one instruction, with the literal that a source may ask for.
struct Words<'a> {
    arch: Arch,
    words: &'a [u32],
    /// Words that belong to the instruction so far.
    taken: usize,
    /// The one literal; two sources that ask for one share it.
    literal: Option<u32>,
}

impl Words<'_> {
    fn next(&mut self) -> Result<u32, DecodeError> {
        let word = *self.words.get(self.taken).ok_or(DecodeError::Truncated)?;
        self.taken += 1;
        Ok(word)
    }

    fn literal(&mut self) -> Result<u32, DecodeError> {
        match self.literal {
            Some(value) => Ok(value),
            None => {
                let value = self.next()?;
                self.literal = Some(value);
                Ok(value)
            }
        }
    }

    fn unknown(&self) -> DecodeError {
        DecodeError::Unknown { arch: self.arch, word: self.words[0] }
    }

    /// An eight-bit scalar source.
    fn scalar(&mut self, code: u32) -> Result<Operand, DecodeError> {
        Ok(match code {
            0..=124 | 126 | 127 => Operand::Sgpr(code as u8),
            128..=208 | 240..=248 => Operand::Inline(code as u8),
            235..=239 | 251..=254 => Operand::Special(code as u8),
            LITERAL => Operand::Literal(self.literal()?),
            _ => return Err(self.unknown()),
        })
    }

    /// A nine-bit source: a scalar one, or a vector register.
    fn source(&mut self, code: u32) -> Result<Operand, DecodeError> {
        if code >= 256 { Ok(Operand::Vgpr(code as u8)) } else { self.scalar(code) }
    }

    /// A nine-bit source of VOP3 and VOP3P, which take no literal.
    fn source_no_literal(&mut self, code: u32) -> Result<Operand, DecodeError> {
        if matches!(code, SDWA | DPP | LITERAL) {
            return Err(self.unknown());
        }
        self.source(code)
    }

    /// A seven-bit scalar destination.
    fn scalar_dst(&self, code: u32) -> Result<Operand, DecodeError> {
        if code == 125 { Err(self.unknown()) } else { Ok(Operand::Sgpr(code as u8)) }
    }
}

const VCC: Operand = Operand::Sgpr(106);

fn vgpr(code: u32) -> Operand {
    Operand::Vgpr(code as u8)
}

fn vector(code: u32, accumulation: bool) -> Operand {
    if accumulation { Operand::Agpr(code as u8) } else { Operand::Vgpr(code as u8) }
}

/// Decodes the instruction at the start of `words`; later words are not read.
///
/// # Errors
/// [`DecodeError`]: never a panic, whatever the words.
pub fn decode(arch: Arch, words: &[u32]) -> Result<Inst, DecodeError> {
    let mut w = Words { arch, words, taken: 0, literal: None };
    let word = w.next()?;
    let mut inst = if word >> 31 == 0 {
        match word >> 25 {
            0x3F => vop1(&mut w, word)?,
            0x3E => vopc(&mut w, word)?,
            _ => vop2(&mut w, word)?,
        }
    } else {
        match word >> 26 {
            0x20..=0x2F => scalar_alu(&mut w, word)?,
            0x30 => smem(&mut w, word)?,
            0x34 if bits(word, 23, 3) == 7 => vop3p(&mut w, word)?,
            0x34 => vop3(&mut w, word)?,
            0x36 => ds(&mut w, word)?,
            0x37 => flat(&mut w, word)?,
            0x38 => mubuf(&mut w, word)?,
            0x3A => mtbuf(&mut w, word)?,
            _ => return Err(w.unknown()),
        }
    };
    inst.size = 4 * w.taken as u8;
    Ok(inst)
}

fn scalar_alu(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let dst = bits(word, 16, 7);
    let [s0, s1] = [bits(word, 0, 8), bits(word, 8, 8)];
    match bits(word, 23, 9) {
        0x17D => {
            let op = lookup(w.arch, Encoding::Sop1, s1, word)?;
            let mut inst = Inst::new(op, Encoding::Sop1, 4);
            if op.info().dst != 0 {
                inst.dst = w.scalar_dst(dst)?;
            }
            if op.info().src[0] != 0 || op == Op::S_CBRANCH_JOIN {
                inst.src[0] = w.scalar(s0)?;
            }
            Ok(inst)
        }
        0x17E => {
            let op = lookup(w.arch, Encoding::Sopc, dst, word)?;
            let mut inst = Inst::new(op, Encoding::Sopc, 4);
            inst.src[0] = w.scalar(s0)?;
            if op == Op::S_SET_GPR_IDX_ON {
                inst.imm = s1 as i32; // four enable bits, not a source
            } else {
                inst.src[1] = w.scalar(s1)?;
            }
            Ok(inst)
        }
        0x17F => {
            let op = lookup(w.arch, Encoding::Sopp, dst, word)?;
            let mut inst = Inst::new(op, Encoding::Sopp, 4);
            inst.imm = bits(word, 0, 16) as i32;
            Ok(inst)
        }
        0x160..=0x17C => {
            let op = lookup(w.arch, Encoding::Sopk, bits(word, 23, 5), word)?;
            let mut inst = Inst::new(op, Encoding::Sopk, 4);
            inst.imm = bits(word, 0, 16) as i32;
            match op {
                Op::S_SETREG_B32 => inst.src[0] = w.scalar_dst(dst)?,
                Op::S_SETREG_IMM32_B32 => inst.src[0] = Operand::Literal(w.literal()?),
                _ if op.info().name.starts_with("S_CMPK") || op == Op::S_CBRANCH_I_FORK => {
                    inst.src[0] = w.scalar_dst(dst)?;
                }
                _ => inst.dst = w.scalar_dst(dst)?,
            }
            Ok(inst)
        }
        code => {
            let op = lookup(w.arch, Encoding::Sop2, code & 0x7F, word)?;
            let mut inst = Inst::new(op, Encoding::Sop2, 4);
            if op.info().dst != 0 {
                inst.dst = w.scalar_dst(dst)?;
            }
            inst.src[0] = w.scalar(s0)?;
            inst.src[1] = w.scalar(s1)?;
            Ok(inst)
        }
    }
}

fn smem(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let op = lookup(w.arch, Encoding::Smem, bits(word, 18, 8), word)?;
    let second = w.next()?;
    let info = op.info();
    let mut inst = Inst::new(op, Encoding::Smem, 8);
    let data = bits(word, 6, 7);
    inst.flags.sc0 = bit(word, 16);
    inst.flags.nv = bit(word, 15);
    let is_probe = matches!(op, Op::S_ATC_PROBE | Op::S_ATC_PROBE_BUFFER);
    let reads_data = info.name.contains("STORE") || info.name.contains("ATOMIC");
    if is_probe {
        inst.src[2] = Operand::Imm(data as i32);
    } else if info.dst != 0 {
        let operand = w.scalar_dst(data)?;
        if reads_data {
            inst.src[2] = operand;
        }
        if !reads_data || inst.flags.sc0 && info.name.contains("ATOMIC") {
            inst.dst = operand;
        }
    }
    if info.src[0] != 0 {
        inst.src[0] = Operand::Sgpr((bits(word, 0, 6) * 2) as u8);
        let immediate = sign_extend(bits(second, 0, 21), 21);
        let register = bits(second, 25, 7);
        match (bit(word, 17), bit(word, 14)) {
            (true, true) => {
                inst.src[1] = w.scalar_dst(register)?;
                inst.imm = immediate;
                inst.flags.soffset = true;
            }
            (true, false) => inst.src[1] = Operand::Imm(immediate),
            (false, true) => inst.src[1] = w.scalar_dst(register)?,
            (false, false) => inst.src[1] = w.scalar_dst(bits(second, 0, 7))?,
        }
    }
    Ok(inst)
}

/// The DPP or SDWA word of a VOP1, VOP2 or VOPC instruction.
fn modifier_word(w: &mut Words, inst: &mut Inst, code: u32, src1: Option<u32>) -> Result<(), DecodeError> {
    let word = w.next()?;
    let src0 = bits(word, 0, 8);
    if code == DPP {
        inst.src[0] = vgpr(src0);
        if let Some(code) = src1 {
            inst.src[1] = vgpr(code);
        }
        inst.neg = (bits(word, 20, 1) | bits(word, 22, 1) << 1) as u8;
        inst.abs = (bits(word, 21, 1) | bits(word, 23, 1) << 1) as u8;
        inst.neg &= inst.op.info().negatable();
        inst.abs &= inst.op.info().negatable();
        let ctrl = bits(word, 8, 9) as u16;
        let legal = matches!(ctrl, 0..=0xFF | 0x101..=0x10F | 0x111..=0x11F | 0x121..=0x12F | 0x130 | 0x134 | 0x138 | 0x13C | 0x140..=0x143 | 0x150..=0x15F);
        if !legal {
            return Err(DecodeError::Field { op: inst.op, field: "dpp_ctrl" });
        }
        inst.dpp = Some(Dpp {
            ctrl,
            row_mask: bits(word, 28, 4) as u8,
            bank_mask: bits(word, 24, 4) as u8,
            bound_ctrl: bit(word, 19),
        });
        return Ok(());
    }
    let source = |w: &mut Words, code: u32, scalar: bool| -> Result<Operand, DecodeError> {
        if scalar { w.source_no_literal(code) } else { Ok(vgpr(code)) }
    };
    inst.src[0] = source(w, src0, bit(word, 23))?;
    if let Some(code) = src1 {
        inst.src[1] = source(w, code, bit(word, 31))?;
    }
    inst.neg = (bits(word, 20, 1) | bits(word, 28, 1) << 1) as u8;
    inst.abs = (bits(word, 21, 1) | bits(word, 29, 1) << 1) as u8;
    let negatable = if inst.op == Op::V_PK_FMAC_F16 { 0 } else { inst.op.info().negatable() };
    inst.neg &= negatable;
    inst.abs &= negatable;
    let mut sdwa = Sdwa {
        dst_sel: 6,
        dst_unused: 0,
        src_sel: [bits(word, 16, 3) as u8, bits(word, 24, 3) as u8],
        sext: [bit(word, 19), bit(word, 27)],
    };
    if inst.op.is_cmp() {
        inst.dst = if bit(word, 15) { w.scalar_dst(bits(word, 8, 7))? } else { VCC };
    } else {
        sdwa.dst_sel = bits(word, 8, 3) as u8;
        sdwa.dst_unused = bits(word, 11, 2) as u8;
        inst.clamp = bit(word, 13);
        inst.omod = bits(word, 14, 2) as u8;
    }
    if sdwa.dst_unused == 3 || sdwa.dst_sel == 7 || sdwa.src_sel.contains(&7) {
        return Err(DecodeError::Field { op: inst.op, field: "sdwa selector" });
    }
    inst.sdwa = Some(sdwa);
    Ok(())
}

fn vop1(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let op = lookup(w.arch, Encoding::Vop1, bits(word, 9, 8), word)?;
    let mut inst = Inst::new(op, Encoding::Vop1, 4);
    if op.info().dst == 0 {
        return Ok(inst);
    }
    let dst = bits(word, 17, 8);
    inst.dst = match op {
        Op::V_READFIRSTLANE_B32 if dst < 128 => w.scalar_dst(dst)?,
        Op::V_READFIRSTLANE_B32 => return Err(w.unknown()),
        Op::V_ACCVGPR_MOV_B32 => Operand::Agpr(dst as u8),
        _ => vgpr(dst),
    };
    match bits(word, 0, 9) {
        code @ (SDWA | DPP) => modifier_word(w, &mut inst, code, None)?,
        code => inst.src[0] = w.source(code)?,
    }
    if op == Op::V_ACCVGPR_MOV_B32 {
        match inst.src[0] {
            Operand::Vgpr(n) => inst.src[0] = Operand::Agpr(n),
            _ => return Err(w.unknown()),
        }
    }
    Ok(inst)
}

fn vop2(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let op = lookup(w.arch, Encoding::Vop2, bits(word, 25, 6), word)?;
    let mut inst = Inst::new(op, Encoding::Vop2, 4);
    inst.dst = vgpr(bits(word, 17, 8));
    let src1 = bits(word, 9, 8);
    match bits(word, 0, 9) {
        code @ (SDWA | DPP) if !op.has_inner_literal() => modifier_word(w, &mut inst, code, Some(src1))?,
        code => {
            // The literal of fmamk and fmaak comes first: a source that asks for a literal shares it.
            let inner = if op.has_inner_literal() { Some(Operand::Literal(w.literal()?)) } else { None };
            inst.src[0] = w.source(code)?;
            inst.src[1] = vgpr(src1);
            match (inner, op) {
                (Some(k), Op::V_FMAMK_F32 | Op::V_MADMK_F16) => {
                    inst.src[2] = inst.src[1];
                    inst.src[1] = k;
                }
                (Some(k), _) => inst.src[2] = k,
                (None, _) => {}
            }
        }
    }
    if op.writes_mask() {
        inst.sdst = VCC;
    }
    if op.reads_mask() {
        inst.src[2] = VCC;
    }
    Ok(inst)
}

fn vopc(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let op = lookup(w.arch, Encoding::Vopc, bits(word, 17, 8), word)?;
    let mut inst = Inst::new(op, Encoding::Vopc, 4);
    inst.dst = VCC;
    let src1 = bits(word, 9, 8);
    match bits(word, 0, 9) {
        code @ (SDWA | DPP) => modifier_word(w, &mut inst, code, Some(src1))?,
        code => {
            inst.src[0] = w.source(code)?;
            inst.src[1] = vgpr(src1);
        }
    }
    Ok(inst)
}

/// Instructions whose VOP2 or VOP1 form cannot be promoted to VOP3.
fn not_promoted(op: Op) -> bool {
    use Op::*;
    op.has_inner_literal() || matches!(op, V_READFIRSTLANE_B32 | V_SWAP_B32 | V_ACCVGPR_MOV_B32)
}

fn vop3(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let opcode = bits(word, 16, 10);
    let op = match opcode {
        0..=0xFF => lookup(w.arch, Encoding::Vopc, opcode, word)?,
        0x100..=0x13F => lookup(w.arch, Encoding::Vop2, opcode - 0x100, word)?,
        0x140..=0x1BF => lookup(w.arch, Encoding::Vop1, opcode - 0x140, word)?,
        _ => lookup(w.arch, Encoding::Vop3, opcode, word)?,
    };
    if not_promoted(op) {
        return Err(w.unknown());
    }
    let second = w.next()?;
    let info = op.info();
    let mut inst = Inst::new(op, Encoding::Vop3, 8);
    inst.clamp = bit(word, 15);
    inst.omod = bits(second, 27, 2) as u8;
    inst.neg = bits(second, 29, 3) as u8;
    let dst = bits(word, 0, 8);
    if op.is_cmp() {
        inst.dst = Operand::Sgpr(dst as u8 & 0x7F);
    } else if op == Op::V_READLANE_B32 {
        inst.dst = w.scalar_dst(dst & 0x7F)?;
    } else if info.dst != 0 {
        inst.dst = vgpr(dst);
    }
    if op.writes_mask() {
        inst.sdst = w.scalar_dst(bits(word, 8, 7))?;
    } else {
        inst.abs = bits(word, 8, 3) as u8;
        let swap = matches!(op, Op::V_PERMLANE16_SWAP_B32 | Op::V_PERMLANE32_SWAP_B32);
        inst.op_sel = bits(word, 11, 4) as u8 & if swap { 3 } else { info.op_sel_mask() };
    }
    if !matches!(op, Op::V_BITOP3_B32 | Op::V_BITOP3_B16) {
        inst.neg &= info.negatable();
        inst.abs &= info.negatable();
    }
    for i in 0..3 {
        let mask = i == 2 && op.reads_mask();
        if info.src[i] != 0 || mask {
            inst.src[i] = w.source_no_literal(bits(second, 9 * i as u32, 9))?;
        }
    }
    Ok(inst)
}

fn vop3p(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let opcode = bits(word, 16, 7);
    if opcode == 0x2C && w.arch == Arch::Gfx950 {
        return scaled_mfma(w, word);
    }
    let op = lookup(w.arch, Encoding::Vop3p, opcode, word)?;
    let second = w.next()?;
    if op.is_mfma() {
        return mfma(op, word, second);
    }
    let info = op.info();
    let mut inst = Inst::new(op, Encoding::Vop3p, 8);
    let codes = [0, 9, 18].map(|lo| bits(second, lo, 9));
    match op {
        Op::V_ACCVGPR_READ_B32 => {
            inst.dst = vgpr(bits(word, 0, 8));
            if codes[0] < 256 {
                return Err(w.unknown());
            }
            inst.src[0] = Operand::Agpr(codes[0] as u8);
            return Ok(inst);
        }
        Op::V_ACCVGPR_WRITE_B32 => {
            inst.dst = Operand::Agpr(bits(word, 0, 8) as u8);
            inst.src[0] = w.source_no_literal(codes[0])?;
            return Ok(inst);
        }
        _ => {}
    }
    inst.dst = vgpr(bits(word, 0, 8));
    inst.clamp = bit(word, 15);
    inst.abs = bits(word, 8, 3) as u8; // neg_hi; absolute value for the mixed-precision fma
    inst.op_sel = bits(word, 11, 3) as u8;
    inst.op_sel_hi = (bits(second, 27, 2) | bits(word, 14, 1) << 2) as u8;
    inst.neg = bits(second, 29, 3) as u8;
    for (i, code) in codes.into_iter().enumerate() {
        if info.src[i] != 0 {
            inst.src[i] = w.source_no_literal(code)?;
        }
    }
    Ok(inst)
}

fn mfma(op: Op, word: u32, second: u32) -> Result<Inst, DecodeError> {
    let mut inst = Inst::new(op, Encoding::Vop3p, 8);
    let accumulation = bit(word, 15);
    inst.dst = vector(bits(word, 0, 8), accumulation);
    inst.cbsz = bits(word, 8, 3) as u8;
    inst.abid = bits(word, 11, 4) as u8;
    inst.blgp = bits(second, 29, 3) as u8;
    for i in 0..2 {
        let code = bits(second, 9 * i, 9);
        if code < 256 {
            return Err(DecodeError::Field { op, field: "a matrix source" });
        }
        inst.src[i as usize] = vector(code & 0xFF, bit(second, 27 + i));
    }
    inst.src[2] = match bits(second, 18, 9) {
        code @ 256.. if op.info().name.starts_with("V_SMFMAC") => vgpr(code & 0xFF),
        code @ 256.. => vector(code & 0xFF, accumulation),
        code @ (128..=208 | 240..=248) if !op.info().name.starts_with("V_SMFMAC") => {
            Operand::Inline(code as u8)
        }
        _ => return Err(DecodeError::Field { op, field: "src2" }),
    };
    Ok(inst)
}

fn scaled_mfma(w: &mut Words, prefix: u32) -> Result<Inst, DecodeError> {
    let scales = w.next()?;
    let word = w.next()?;
    if word >> 23 != 0x1A7 {
        return Err(w.unknown());
    }
    let op = lookup(w.arch, Encoding::Vop3p, bits(word, 16, 7), prefix)?;
    if !matches!(op, Op::V_MFMA_F32_16X16X128_F8F6F4 | Op::V_MFMA_F32_32X32X64_F8F6F4) {
        return Err(w.unknown());
    }
    let second = w.next()?;
    let mut inst = mfma(op, word, second)?;
    let byte = |i: u32| (bits(prefix, 11 + i, 1) | bits(scales, 27 + i, 1) << 1) as u8;
    inst.scale = Some(MfmaScale {
        src: [w.source_no_literal(bits(scales, 0, 9))?, w.source_no_literal(bits(scales, 9, 9))?],
        byte: [byte(0), byte(1)],
    });
    Ok(inst)
}

fn ds(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let op = lookup(w.arch, Encoding::Ds, bits(word, 17, 8), word)?;
    let second = w.next()?;
    let info = op.info();
    let mut inst = Inst::new(op, Encoding::Ds, 8);
    let accumulation = bit(word, 25);
    inst.imm = bits(word, 0, 16) as i32;
    inst.flags.gds = bit(word, 16);
    if info.dst != 0 {
        inst.dst = vector(bits(second, 24, 8), accumulation);
    }
    if info.src[0] != 0 {
        inst.src[0] = vgpr(bits(second, 0, 8));
    }
    for i in 1..3 {
        if info.src[i] != 0 {
            inst.src[i] = vector(bits(second, 8 * i as u32, 8), accumulation);
        }
    }
    if info.name.starts_with("DS_GWS") {
        inst.src[0] = if info.src[0] != 0 { vector(bits(second, 0, 8), accumulation) } else { Operand::None };
    }
    Ok(inst)
}

fn flat(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let encoding = match bits(word, 14, 2) {
        0 => Encoding::Flat,
        1 => Encoding::Scratch,
        2 => Encoding::Global,
        _ => return Err(w.unknown()),
    };
    let op = lookup(w.arch, encoding, bits(word, 18, 7), word)?;
    let second = w.next()?;
    let info = op.info();
    let mut inst = Inst::new(op, encoding, 8);
    inst.flags = Flags { sc0: bit(word, 16), nt: bit(word, 17), sc1: bit(word, 25), ..Flags::default() };
    let accumulation = bit(second, 23);
    let saddr = bits(second, 16, 7);
    let has_saddr = saddr != 0x7F && encoding != Encoding::Flat;
    inst.imm = match encoding {
        Encoding::Flat => bits(word, 0, 12) as i32,
        _ => sign_extend(bits(word, 0, 13), 13),
    };
    let has_vaddr = encoding != Encoding::Scratch || bit(word, 13);
    if has_vaddr {
        inst.src[0] = vgpr(bits(second, 0, 8));
    }
    if has_saddr {
        inst.src[1] = w.scalar_dst(saddr)?;
    }
    let is_atomic = info.name.contains("ATOMIC");
    if info.src[1] != 0 {
        inst.src[2] = vector(bits(second, 8, 8), accumulation);
    }
    if info.dst != 0 || is_atomic && inst.flags.sc0 {
        inst.dst = vector(bits(second, 24, 8), accumulation);
    }
    Ok(inst)
}

fn buffer_operands(w: &mut Words, inst: &mut Inst, word: u32, second: u32) -> Result<(), DecodeError> {
    let name = inst.op.info().name;
    inst.imm = bits(word, 0, 12) as i32;
    inst.flags.offen = bit(word, 12);
    inst.flags.idxen = bit(word, 13);
    inst.flags.sc0 = bit(word, 14);
    let accumulation = bit(second, 23);
    if inst.flags.offen || inst.flags.idxen {
        inst.src[0] = vgpr(bits(second, 0, 8));
    }
    inst.src[1] = Operand::Sgpr((bits(second, 16, 5) * 4) as u8);
    inst.src[2] = w.source_no_literal(bits(second, 24, 8))?;
    let data = vector(bits(second, 8, 8), accumulation);
    let is_load = name.contains("LOAD");
    if !is_load {
        inst.src[3] = data;
    }
    if is_load && !inst.flags.lds || name.contains("ATOMIC") && inst.flags.sc0 {
        inst.dst = data;
    }
    Ok(())
}

fn mubuf(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let op = lookup(w.arch, Encoding::Mubuf, bits(word, 18, 7), word)?;
    let second = w.next()?;
    let mut inst = Inst::new(op, Encoding::Mubuf, 8);
    inst.flags.sc1 = bit(word, 15);
    inst.flags.lds = bit(word, 16);
    inst.flags.nt = bit(word, 17);
    if matches!(op, Op::BUFFER_WBL2 | Op::BUFFER_INV) {
        inst.flags.sc0 = bit(word, 14);
        inst.flags.nt = false;
        return Ok(inst);
    }
    buffer_operands(w, &mut inst, word, second)?;
    Ok(inst)
}

fn mtbuf(w: &mut Words, word: u32) -> Result<Inst, DecodeError> {
    let op = lookup(w.arch, Encoding::Mtbuf, bits(word, 15, 4), word)?;
    let second = w.next()?;
    let mut inst = Inst::new(op, Encoding::Mtbuf, 8);
    inst.flags.format = bits(word, 19, 7) as u8;
    inst.flags.sc1 = bit(second, 21);
    inst.flags.nt = bit(second, 22);
    buffer_operands(w, &mut inst, word, second)?;
    Ok(inst)
}
