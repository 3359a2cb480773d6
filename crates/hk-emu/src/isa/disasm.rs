//! [`Inst`] to text, in LLVM's syntax.

use std::fmt;

use super::{ConstantKind as Kind, Encoding, Inst, Op, Operand, Sdwa};

/// Text of an instruction, as `llvm-objdump -d` prints it (branch targets stay numbers).
pub struct Display<'a>(&'a Inst);

/// Text of `inst`, as `llvm-objdump -d` prints it.
pub fn display(inst: &Inst) -> Display<'_> {
    Display(inst)
}

/// The inline floats 240..=248; 248 is 1/(2 pi).
const FLOATS: [f32; 9] = [0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494];
const FLOATS_F16: [u16; 9] = [0x3800, 0xB800, 0x3C00, 0xBC00, 0x4000, 0xC000, 0x4400, 0xC400, 0x3118];

/// Text of an inline constant.
fn inline(code: u8, width: u8, kind: Kind) -> String {
    let float = usize::from(code.saturating_sub(240));
    match (code, kind) {
        (128..=192, _) => (i32::from(code) - 128).to_string(),
        (193..=208, _) => (192 - i32::from(code)).to_string(),
        (_, Kind::I16) => format!("{:#x}", FLOATS_F16[float]),
        (_, Kind::I32) => format!("{:#x}", FLOATS[float].to_bits()),
        (248, _) if width == 2 => "0.15915494309189532".into(),
        (248, _) => "0.15915494".into(),
        _ => format!("{:.1}", FLOATS[float]),
    }
}

fn range(prefix: &str, first: u8, width: u8) -> String {
    match width {
        0 | 1 => format!("{prefix}{first}"),
        _ => format!("{prefix}[{first}:{}]", u32::from(first) + u32::from(width) - 1),
    }
}

fn scalar_register(code: u8, width: u8) -> String {
    // Pairs are even-aligned, larger operands on four registers: the low bits of the code are not looked at.
    let code = match width {
        0 | 1 => code,
        2 => code & !1,
        _ => code & !3,
    };
    let named = match code {
        102 | 103 => Some((102, "flat_scratch")),
        104 | 105 => Some((104, "xnack_mask")),
        106 | 107 => Some((106, "vcc")),
        126 | 127 => Some((126, "exec")),
        _ => None,
    };
    match named {
        Some((base, name)) if width < 2 => format!("{name}_{}", if code == base { "lo" } else { "hi" }),
        Some((_, name)) => name.into(),
        None if code == 124 => "m0".into(),
        None if code >= 108 => range("ttmp", code - 108, width),
        None => range("s", code, width),
    }
}

fn operand(operand: Operand, width: u8, kind: Kind) -> String {
    match operand {
        Operand::None => "off".into(),
        Operand::Vgpr(n) => range("v", n, width),
        Operand::Agpr(n) => range("a", n, width),
        Operand::Sgpr(code) => scalar_register(code, width),
        Operand::Inline(code) => inline(code, width, kind),
        Operand::Literal(value) => literal(value, width, kind),
        Operand::Special(code) => match code {
            235 => "src_shared_base",
            236 => "src_shared_limit",
            237 => "src_private_base",
            238 => "src_private_limit",
            239 => "src_pops_exiting_wave_id",
            251 => "src_vccz",
            252 => "src_execz",
            253 => "src_scc",
            _ => "src_lds_direct",
        }
        .into(),
        Operand::Imm(value) if value < 0 => format!("-{:#x}", value.unsigned_abs()),
        Operand::Imm(value) => format!("{value:#x}"),
    }
}

/// A literal; `lit()` marks one that an inline constant could have held.
fn literal(value: u32, width: u8, kind: Kind) -> String {
    let low = value as u16;
    let small = |int: i32| (-16..=64).contains(&int);
    let is_float = FLOATS.iter().any(|f| f.to_bits() == value);
    let has_inline = match kind {
        Kind::F64 => {
            return match FLOATS.iter().position(|f| f64::from(*f).to_bits() == u64::from(value) << 32) {
                _ if value == 0 => "0".into(),
                Some(float) => format!("{:.1}", FLOATS[float]),
                None => format!("{value:#x}"),
            };
        }
        Kind::F16 => small((low as i16).into()) || FLOATS_F16.contains(&low),
        Kind::Bf16 => {
            small((low as i16).into()) || FLOATS.iter().any(|f| f.to_bits() >> 16 == u32::from(low))
        }
        Kind::Packed => small(value as i32) || FLOATS_F16.iter().any(|f| u32::from(*f) == value),
        // A wide operand is the literal with zeros above it.
        Kind::I16 | Kind::I32 | Kind::B32 if width >= 2 => value <= 64,
        Kind::I16 | Kind::I32 | Kind::B32 => small(value as i32) || is_float,
    };
    match kind {
        _ if has_inline => format!("lit({value:#x})"),
        Kind::F16 | Kind::I16 => format!("{low:#x}"),
        _ => format!("{value:#x}"),
    }
}

/// The literal of `s_setreg_imm32_b32`: a number where an inline constant could have held it.
fn setreg_literal(value: u32) -> String {
    match (value as i32, FLOATS.iter().position(|f| f.to_bits() == value)) {
        (small @ -16..=64, _) => small.to_string(),
        (_, Some(8)) => "0.15915494".into(),
        (_, Some(float)) => format!("{:.1}", FLOATS[float]),
        _ => format!("{value:#x}"),
    }
}

/// `[a,b,c]` of the low `n` bits.
fn list(bits: u8, n: usize) -> String {
    let items: Vec<_> = (0..n).map(|i| (bits >> i & 1).to_string()).collect();
    format!("[{}]", items.join(","))
}

impl Inst {
    /// Number of register or constant sources.
    fn n_sources(&self) -> usize {
        self.src.iter().take(3).filter(|s| **s != Operand::None).count()
    }

    fn source(&self, index: usize) -> String {
        let info = self.op.info();
        let mask = index == 2 && self.op.reads_mask();
        let width = if mask { 2 } else { info.src.get(index).copied().unwrap_or(1) };
        match self.src[index] {
            // Packed 32-bit operations broadcast a 32-bit constant.
            Operand::Inline(code) if self.encoding == Encoding::Vop3p => {
                inline(code, 1, info.constant_kind(index))
            }
            Operand::Literal(value) if index > 0 && self.op.has_inner_literal() => format!("{value:#x}"),
            source => operand(source, width, info.constant_kind(index)),
        }
    }

    /// Source with negation, absolute value or sign extension around it.
    fn source_with_modifiers(&self, index: usize) -> String {
        let mut text = self.source(index);
        if self.sdwa.is_some_and(|s| index < 2 && s.sext[index]) {
            return format!("sext({text})");
        }
        let [neg, abs] = [self.neg, self.abs].map(|m| m >> index & 1 != 0);
        let constant = matches!(self.src[index], Operand::Inline(_) | Operand::Literal(_));
        if abs {
            text = format!("|{text}|");
        }
        match neg {
            true if constant && !abs => format!("neg({text})"),
            true => format!("-{text}"),
            false => text,
        }
    }

    fn is_packed(&self) -> bool {
        self.encoding == Encoding::Vop3p && !self.is_mix() && !self.op.is_mfma()
    }

    fn is_mix(&self) -> bool {
        matches!(self.op, Op::V_FMA_MIX_F32 | Op::V_FMA_MIXLO_F16 | Op::V_FMA_MIXHI_F16)
    }
}

impl fmt::Display for Display<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inst = self.0;
        match inst.encoding {
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopc | Encoding::Sopk | Encoding::Sopp => {
                scalar(inst, f)
            }
            Encoding::Smem => smem(inst, f),
            Encoding::Ds => ds(inst, f),
            Encoding::Flat | Encoding::Global | Encoding::Scratch => flat(inst, f),
            Encoding::Mubuf | Encoding::Mtbuf => buffer(inst, f),
            Encoding::Vop3p if inst.op.is_mfma() => mfma(inst, f),
            _ => vector(inst, f),
        }
    }
}

fn write_list(f: &mut fmt::Formatter<'_>, mnemonic: &str, operands: &[String]) -> fmt::Result {
    f.write_str(mnemonic)?;
    if !operands.is_empty() {
        write!(f, " {}", operands.join(", "))?;
    }
    Ok(())
}

fn hwreg(imm: i32) -> String {
    let (id, offset, size) = (imm & 0x3F, imm >> 6 & 0x1F, (imm >> 11 & 0x1F) + 1);
    let name = match id {
        1 => "HW_REG_MODE",
        2 => "HW_REG_STATUS",
        3 => "HW_REG_TRAPSTS",
        4 => "HW_REG_HW_ID",
        5 => "HW_REG_GPR_ALLOC",
        6 => "HW_REG_LDS_ALLOC",
        7 => "HW_REG_IB_STS",
        15 => "HW_REG_SH_MEM_BASES",
        16 => "HW_REG_TBA_LO",
        17 => "HW_REG_TBA_HI",
        18 => "HW_REG_TMA_LO",
        19 => "HW_REG_TMA_HI",
        20 => "HW_REG_XCC_ID",
        21 => "HW_REG_SQ_PERF_SNAPSHOT_DATA",
        22 => "HW_REG_SQ_PERF_SNAPSHOT_DATA1",
        23 => "HW_REG_SQ_PERF_SNAPSHOT_PC_LO",
        24 => "HW_REG_SQ_PERF_SNAPSHOT_PC_HI",
        _ => "",
    };
    let name = if name.is_empty() { id.to_string() } else { name.to_owned() };
    if offset == 0 && size == 32 {
        format!("hwreg({name})")
    } else {
        format!("hwreg({name}, {offset}, {size})")
    }
}

fn gpr_idx(imm: i32) -> String {
    if imm & !0xF != 0 {
        return format!("{imm:#x}");
    }
    let names: Vec<_> = ["SRC0", "SRC1", "SRC2", "DST"]
        .iter()
        .enumerate()
        .filter(|(i, _)| imm >> i & 1 != 0)
        .map(|(_, n)| *n)
        .collect();
    format!("gpr_idx({})", names.join(","))
}

fn sendmsg(imm: i32) -> String {
    let (id, operation, stream) = (imm & 0xF, imm >> 4 & 7, imm >> 8 & 3);
    let name = match id {
        1 => "MSG_INTERRUPT",
        2 => "MSG_GS",
        3 => "MSG_GS_DONE",
        4 => "MSG_SAVEWAVE",
        5 => "MSG_STALL_WAVE_GEN",
        6 => "MSG_HALT_WAVES",
        7 => "MSG_ORDERED_PS_DONE",
        8 => "MSG_EARLY_PRIM_DEALLOC",
        9 => "MSG_GS_ALLOC_REQ",
        10 => "MSG_GET_DOORBELL",
        15 => "MSG_SYSMSG",
        _ => "",
    };
    let plain = operation == 0 && stream == 0;
    match id {
        2 | 3 if !(id == 2 && operation == 0) && operation < 4 && (operation != 0 || stream == 0) => {
            let operation_name =
                ["GS_OP_NOP", "GS_OP_CUT", "GS_OP_EMIT", "GS_OP_EMIT_CUT"][operation as usize];
            let stream = if operation == 0 { String::new() } else { format!(", {stream}") };
            format!("sendmsg({name}, {operation_name}{stream})")
        }
        15 if matches!(operation, 1 | 2 | 4) && stream == 0 => {
            let names = ["ECC_ERR_INTERRUPT", "REG_RD", "", "TTRACE_PC"];
            format!("sendmsg({name}, SYSMSG_OP_{})", names[operation as usize - 1])
        }
        1 | 4..=10 if plain => format!("sendmsg({name})"),
        _ if imm & !0x37F != 0 => imm.to_string(),
        _ => format!("sendmsg({id}, {operation}, {stream})"),
    }
}

fn scalar(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let op = inst.op;
    let info = op.info();
    let mnemonic = op.mnemonic();
    let imm = inst.imm;
    if inst.encoding == Encoding::Sopp {
        f.write_str(&mnemonic)?;
        return match op {
            Op::S_WAITCNT => {
                let (vm, exp, lgkm) = (imm & 0xF | imm >> 10 & 0x30, imm >> 4 & 7, imm >> 8 & 0xF);
                let all = vm == 63 && exp == 7 && lgkm == 15;
                let fields = [("vmcnt", vm, 63), ("expcnt", exp, 7), ("lgkmcnt", lgkm, 15)];
                for (name, value, max) in fields {
                    if all || value != max {
                        write!(f, " {name}({value})")?;
                    }
                }
                Ok(())
            }
            Op::S_SENDMSG | Op::S_SENDMSGHALT => write!(f, " {}", sendmsg(imm)),
            Op::S_SET_GPR_IDX_MODE => write!(f, " {}", gpr_idx(imm)),
            Op::S_BARRIER
            | Op::S_WAKEUP
            | Op::S_ICACHE_INV
            | Op::S_TTRACEDATA
            | Op::S_ENDPGM_SAVED
            | Op::S_SET_GPR_IDX_OFF
            | Op::S_ENDPGM_ORDERED_PS_DONE => Ok(()),
            Op::S_ENDPGM if imm == 0 => Ok(()),
            _ if imm > 64 && !info.name.contains("BRANCH") && op != Op::S_ENDPGM => write!(f, " {imm:#x}"),
            _ => write!(f, " {imm}"),
        };
    }
    let mut operands = vec![];
    if inst.encoding == Encoding::Sopk {
        let register = |o| operand(o, info.dst, Kind::B32);
        match op {
            Op::S_GETREG_B32 => operands.extend([register(inst.dst), hwreg(imm)]),
            Op::S_SETREG_B32 => operands.extend([hwreg(imm), register(inst.src[0])]),
            Op::S_SETREG_IMM32_B32 => {
                let Operand::Literal(value) = inst.src[0] else {
                    unreachable!("the decoder made it a literal")
                };
                operands.extend([hwreg(imm), setreg_literal(value)]);
            }
            Op::S_CALL_B64 => operands.extend([register(inst.dst), imm.to_string()]),
            Op::S_CBRANCH_I_FORK => operands.extend([register(inst.src[0]), imm.to_string()]),
            _ => {
                let target = if inst.dst == Operand::None { inst.src[0] } else { inst.dst };
                operands.extend([register(target), format!("{imm:#x}")]);
            }
        }
        return write_list(f, &mnemonic, &operands);
    }
    if inst.dst != Operand::None {
        operands.push(operand(inst.dst, info.dst, Kind::B32));
    }
    for i in 0..2 {
        if inst.src[i] != Operand::None {
            operands.push(inst.source(i));
        }
    }
    if op == Op::S_SET_GPR_IDX_ON {
        operands.push(gpr_idx(imm));
    }
    write_list(f, &mnemonic, &operands)
}

fn smem(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let info = inst.op.info();
    let mut operands = vec![];
    if inst.src[2] != Operand::None {
        operands.push(match inst.src[2] {
            Operand::Imm(probe @ 0..=64) => probe.to_string(),
            data => operand(data, info.dst, Kind::B32),
        });
    } else if inst.dst != Operand::None {
        operands.push(operand(inst.dst, info.dst, Kind::B32));
    }
    if inst.src[0] != Operand::None {
        operands.push(inst.source(0));
        operands.push(operand(inst.src[1], 1, Kind::B32));
    }
    write_list(f, &inst.op.mnemonic(), &operands)?;
    if inst.flags.soffset {
        write!(f, " offset:{}", operand(Operand::Imm(inst.imm), 1, Kind::B32))?;
    }
    let has_glc = ["LOAD", "STORE", "ATOMIC"].iter().any(|kind| info.name.contains(kind));
    if inst.flags.sc0 && has_glc {
        f.write_str(" glc")?;
    }
    Ok(())
}

fn suffix(inst: &Inst) -> &'static str {
    use Op::*;
    if inst.dpp.is_some() {
        return "_dpp";
    }
    if inst.sdwa.is_some() {
        return "_sdwa";
    }
    let native = inst.op.info().encoding;
    match inst.encoding {
        _ if matches!(inst.op, V_NOP | V_CLREXCP | V_READFIRSTLANE_B32 | V_SWAP_B32 | V_ACCVGPR_MOV_B32)
            || inst.op.has_inner_literal() =>
        {
            ""
        }
        Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc => "_e32",
        Encoding::Vop3 if native != Encoding::Vop3 => "_e64",
        _ => "",
    }
}

fn vector(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let op = inst.op;
    let info = op.info();
    let mut operands = vec![];
    if inst.dst != Operand::None {
        let width = if op.is_cmp() { 2 } else { info.dst };
        operands.push(operand(inst.dst, width, Kind::B32));
    }
    if inst.sdst != Operand::None {
        operands.push(operand(inst.sdst, 2, Kind::B32));
    }
    let is_bitop = matches!(op, Op::V_BITOP3_B32 | Op::V_BITOP3_B16);
    for i in 0..3 {
        if inst.src[i] != Operand::None {
            let plain = inst.is_packed() || is_bitop;
            operands.push(if plain { inst.source(i) } else { inst.source_with_modifiers(i) });
        }
    }
    write_list(f, &format!("{}{}", op.mnemonic(), suffix(inst)), &operands)?;
    let n = inst.n_sources();
    if inst.is_packed() || inst.is_mix() {
        if inst.op_sel != 0 {
            write!(f, " op_sel:{}", list(inst.op_sel, n))?;
        }
        let default_hi = if inst.is_mix() { 0 } else { (1 << n) - 1 };
        if inst.op_sel_hi & ((1 << n) - 1) != default_hi && !info.op_sel_order().is_empty() {
            write!(f, " op_sel_hi:{}", list(inst.op_sel_hi, n))?;
        }
        if inst.is_packed() {
            for (name, bits) in [("neg_lo", inst.neg), ("neg_hi", inst.abs)] {
                if bits != 0 {
                    write!(f, " {name}:{}", list(bits, n))?;
                }
            }
        }
    } else if matches!(op, Op::V_PERMLANE16_SWAP_B32 | Op::V_PERMLANE32_SWAP_B32) && inst.op_sel != 0 {
        for (bit, name) in [(1, "bound_ctrl"), (0, "fi")] {
            if inst.op_sel >> bit & 1 != 0 {
                write!(f, " {name}:1")?;
            }
        }
    } else if is_bitop {
        let table = inst.neg | inst.abs << 3 | inst.omod << 6;
        match table {
            0 => {}
            1..=10 => write!(f, " bitop3:{table}")?,
            _ => write!(f, " bitop3:{table:#x}")?,
        }
        if inst.op_sel != 0 {
            write!(f, " op_sel:{}", list(inst.op_sel, 4))?;
        }
    } else if inst.op_sel != 0 {
        op_sel(inst, f)?;
    }
    if inst.clamp {
        f.write_str(" clamp")?;
    }
    if inst.omod != 0 && !is_bitop {
        f.write_str([" mul:2", " mul:4", " div:2"][usize::from(inst.omod - 1)])?;
    }
    if let Some(sdwa) = inst.sdwa {
        sdwa_selectors(inst, sdwa, f)?;
    }
    dpp_control(inst, f)
}

/// `op_sel` of a VOP3 instruction, in the order that the table gives.
fn op_sel(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let entry = |bit: u8| {
        if bit.is_ascii_digit() { (inst.op_sel >> (bit - b'0') & 1).to_string() } else { "0".into() }
    };
    let items: Vec<_> = inst.op.info().op_sel_order().bytes().map(entry).collect();
    write!(f, " op_sel:[{}]", items.join(","))
}

fn sdwa_selectors(inst: &Inst, sdwa: Sdwa, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use Op::*;
    const SELECT: [&str; 7] = ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"];
    const UNUSED: [&str; 3] = ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"];
    let source_only = matches!(inst.op, V_CVT_F32_FP8 | V_CVT_F32_BF8 | V_CVT_PK_F32_FP8 | V_CVT_PK_F32_BF8);
    if !inst.op.is_cmp() && !source_only {
        let (select, unused) = (SELECT[usize::from(sdwa.dst_sel)], UNUSED[usize::from(sdwa.dst_unused)]);
        write!(f, " dst_sel:{select} dst_unused:{unused}")?;
    }
    for i in 0..2 {
        if inst.src[i] != Operand::None {
            write!(f, " src{i}_sel:{}", SELECT[usize::from(sdwa.src_sel[i])])?;
        }
    }
    Ok(())
}

fn dpp_control(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Some(dpp) = inst.dpp else { return Ok(()) };
    let n = dpp.ctrl & 0xF;
    match dpp.ctrl {
        0..=0xFF => {
            let lanes: Vec<_> = (0..4).map(|i| (dpp.ctrl >> (2 * i) & 3).to_string()).collect();
            write!(f, " quad_perm:[{}]", lanes.join(","))?;
        }
        0x101..=0x10F => write!(f, " row_shl:{n}")?,
        0x111..=0x11F => write!(f, " row_shr:{n}")?,
        0x121..=0x12F => write!(f, " row_ror:{n}")?,
        0x130 => f.write_str(" wave_shl:1")?,
        0x134 => f.write_str(" wave_rol:1")?,
        0x138 => f.write_str(" wave_shr:1")?,
        0x13C => f.write_str(" wave_ror:1")?,
        0x140 => f.write_str(" row_mirror")?,
        0x141 => f.write_str(" row_half_mirror")?,
        0x142 => f.write_str(" row_bcast:15")?,
        0x143 => f.write_str(" row_bcast:31")?,
        _ => write!(f, " row_newbcast:{n}")?,
    }
    write!(f, " row_mask:{:#x} bank_mask:{:#x}", dpp.row_mask, dpp.bank_mask)?;
    if dpp.bound_ctrl {
        f.write_str(" bound_ctrl:1")?;
    }
    Ok(())
}

fn mfma(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use Op::*;
    let op = inst.op;
    let info = op.info();
    let is_f8f6f4 = matches!(op, V_MFMA_F32_16X16X128_F8F6F4 | V_MFMA_F32_32X32X64_F8F6F4);
    let is_f64 = info.name.starts_with("V_MFMA_F64");
    let format_width = |format: u8| match format {
        2 | 3 => 6,
        4 => 4,
        _ => 8,
    };
    let mut widths = info.src;
    if is_f8f6f4 {
        widths[0] = format_width(inst.cbsz);
        widths[1] = format_width(inst.blgp);
    }
    let mut operands = vec![operand(inst.dst, info.dst, Kind::B32)];
    for (i, width) in widths.into_iter().enumerate() {
        let width = if is_f64 && matches!(inst.src[i], Operand::Inline(_)) { 2 } else { width };
        operands.push(operand(inst.src[i], width, Kind::B32));
    }
    let mut mnemonic = op.mnemonic();
    if let Some(scale) = inst.scale {
        mnemonic = mnemonic.replace("v_mfma_", "v_mfma_scale_");
        operands.extend(scale.src.map(|s| operand(s, 1, Kind::B32)));
    }
    write_list(f, &mnemonic, &operands)?;
    if let Some(scale) = inst.scale {
        let half = |bit: u8| (scale.byte[0] >> bit & 1) | (scale.byte[1] >> bit & 1) << 1;
        if half(0) != 0 {
            write!(f, " op_sel:{}", list(half(0), 3))?;
        }
        write!(f, " op_sel_hi:{}", list(half(1), 3))?;
    }
    if inst.cbsz != 0 {
        write!(f, " cbsz:{}", inst.cbsz)?;
    }
    if inst.abid != 0 && !is_f8f6f4 {
        write!(f, " abid:{}", inst.abid)?;
    }
    match inst.blgp {
        0 => Ok(()),
        blgp if is_f64 => write!(f, " neg:{}", list(blgp, 3)),
        blgp => write!(f, " blgp:{blgp}"),
    }
}

fn swizzle(offset: i32) -> String {
    let group = |value: i32, n: u32| value & ((1 << n) - 1);
    match offset {
        0 => String::new(),
        0xE000.. => format!(" offset:swizzle(FFT,{})", group(offset, 5)),
        0xC000..=0xDFFF => {
            format!(" offset:swizzle(ROTATE,{},{})", offset >> 10 & 1, group(offset >> 5, 5))
        }
        0x8000..=0x80FF => {
            let lanes: Vec<_> = (0..4).map(|i| (offset >> (2 * i) & 3).to_string()).collect();
            format!(" offset:swizzle(QUAD_PERM,{})", lanes.join(","))
        }
        0x8100..=0xBFFF => format!(" offset:{offset}"),
        _ => bit_swizzle(offset),
    }
}

fn bit_swizzle(offset: i32) -> String {
    let (and, or, xor) = (offset & 0x1F, offset >> 5 & 0x1F, offset >> 10 & 0x1F);
    if and == 0x1F && or == 0 && xor.count_ones() == 1 {
        return format!(" offset:swizzle(SWAP,{xor})");
    }
    if and == 0x1F && or == 0 && xor > 0 && (xor + 1).count_ones() == 1 {
        return format!(" offset:swizzle(REVERSE,{})", xor + 1);
    }
    let group = 0x20 - and;
    if group.count_ones() == 1 && group > 1 && or < group && xor == 0 {
        return format!(" offset:swizzle(BROADCAST,{group},{or})");
    }
    let mask: String = (0..5)
        .rev()
        .map(|bit| match (and >> bit & 1, or >> bit & 1, xor >> bit & 1) {
            (0, 0, 0) => '0',
            (0, 0, 1) => '1',
            (0, 1, 0) => '1',
            (0, 1, 1) => '0',
            (1, 0, 0) => 'p',
            (1, 0, 1) => 'i',
            (1, 1, 0) => '1',
            _ => '0',
        })
        .collect();
    format!(" offset:swizzle(BITMASK_PERM,\"{mask}\")")
}

fn ds(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let info = inst.op.info();
    let mut operands = vec![];
    if inst.dst != Operand::None {
        operands.push(operand(inst.dst, info.dst, Kind::B32));
    }
    for i in 0..3 {
        if inst.src[i] != Operand::None {
            operands.push(inst.source(i));
        }
    }
    write_list(f, &inst.op.mnemonic(), &operands)?;
    let two_offsets =
        info.name.contains("READ2") || info.name.contains("WRITE2") || info.name.contains("WRXCHG2");
    if inst.op == Op::DS_SWIZZLE_B32 {
        f.write_str(&swizzle(inst.imm))?;
    } else if two_offsets {
        for (i, offset) in [inst.imm & 0xFF, inst.imm >> 8].into_iter().enumerate() {
            if offset != 0 {
                write!(f, " offset{i}:{offset}")?;
            }
        }
    } else if inst.imm != 0 {
        write!(f, " offset:{}", inst.imm)?;
    }
    if inst.flags.gds {
        f.write_str(" gds")?;
    }
    Ok(())
}

fn cache_flags(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (set, name) in [(inst.flags.sc0, " sc0"), (inst.flags.nt, " nt"), (inst.flags.sc1, " sc1")] {
        if set {
            f.write_str(name)?;
        }
    }
    Ok(())
}

fn flat(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let info = inst.op.info();
    let mut operands = vec![];
    if inst.dst != Operand::None {
        let width = if info.dst == 0 { atomic_width(inst) } else { info.dst };
        operands.push(operand(inst.dst, width, Kind::B32));
    }
    let has_saddr = inst.src[1] != Operand::None;
    let is_scratch = inst.encoding == Encoding::Scratch;
    let address_width = if has_saddr || is_scratch { 1 } else { 2 };
    operands.push(operand(inst.src[0], address_width, Kind::B32));
    if inst.src[2] != Operand::None {
        operands.push(operand(inst.src[2], info.src[1], Kind::B32));
    }
    if inst.encoding != Encoding::Flat {
        operands.push(operand(inst.src[1], if is_scratch { 1 } else { 2 }, Kind::B32));
    }
    write_list(f, &inst.op.mnemonic(), &operands)?;
    if inst.imm != 0 {
        write!(f, " offset:{}", inst.imm)?;
    }
    cache_flags(inst, f)
}

/// Width of the value an atomic returns: that of its data, half of it for compare-and-swap.
fn atomic_width(inst: &Inst) -> u8 {
    let info = inst.op.info();
    let data = if inst.encoding == Encoding::Mubuf { info.dst } else { info.src[1] };
    if info.name.contains("CMPSWAP") { data / 2 } else { data }
}

fn buffer(inst: &Inst, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let info = inst.op.info();
    if inst.src[1] == Operand::None {
        f.write_str(&inst.op.mnemonic())?;
        return cache_flags(inst, f);
    }
    let mut operands = vec![];
    if inst.src[3] != Operand::None {
        operands.push(operand(inst.src[3], info.dst, Kind::B32));
    } else if inst.dst != Operand::None {
        operands.push(operand(inst.dst, info.dst, Kind::B32));
    }
    let address_width = 1 + u8::from(inst.flags.offen && inst.flags.idxen);
    operands.push(operand(inst.src[0], address_width, Kind::B32));
    operands.push(operand(inst.src[1], 4, Kind::B32));
    operands.push(operand(inst.src[2], 1, Kind::B32));
    write_list(f, &inst.op.mnemonic(), &operands)?;
    if inst.encoding == Encoding::Mtbuf {
        f.write_str(&buffer_format(inst.flags.format))?;
    }
    for (set, name) in [(inst.flags.idxen, " idxen"), (inst.flags.offen, " offen")] {
        if set {
            f.write_str(name)?;
        }
    }
    if inst.imm != 0 {
        write!(f, " offset:{}", inst.imm)?;
    }
    cache_flags(inst, f)?;
    if inst.flags.lds {
        f.write_str(" lds")?;
    }
    Ok(())
}

fn buffer_format(format: u8) -> String {
    const DATA: [&str; 16] = [
        "INVALID",
        "8",
        "16",
        "8_8",
        "32",
        "16_16",
        "10_11_11",
        "11_11_10",
        "10_10_10_2",
        "2_10_10_10",
        "8_8_8_8",
        "32_32",
        "16_16_16_16",
        "32_32_32",
        "32_32_32_32",
        "RESERVED_15",
    ];
    const NUMBER: [&str; 8] = ["UNORM", "SNORM", "USCALED", "SSCALED", "UINT", "SINT", "RESERVED_6", "FLOAT"];
    let (data, number) = (usize::from(format & 0xF), usize::from(format >> 4 & 7));
    let parts: Vec<String> = [
        (data != 1).then(|| format!("BUF_DATA_FORMAT_{}", DATA[data])),
        (number != 0).then(|| format!("BUF_NUM_FORMAT_{}", NUMBER[number])),
    ]
    .into_iter()
    .flatten()
    .collect();
    if parts.is_empty() { String::new() } else { format!(" format:[{}]", parts.join(",")) }
}
