//! Which instructions the emulator decodes: found out on an instance of each.

// Bits are written as the ISA manuals write them.
#![allow(clippy::precedence)]

use hk_codeobj::Arch;

use super::{Encoding, Op, decode};

/// The words of a plain instance of `op`: registers as operands, no modifiers, zero offsets. A literal follows in case
/// the instruction has one; [`decode`] says how many words belong to it.
pub fn instance(op: Op) -> [u32; 3] {
    let info = op.info();
    let code = u32::from(info.opcode);
    // Registers that suit every width: scalars at multiples of 4, vectors 32 apart where matrices need it.
    let (d, a, b) = (20, 4, 8);
    let [vd, va, vb, vc] = [0, 64, 96, 128].map(|n: u32| n);
    let words = match info.encoding {
        Encoding::Sop2 => [0x8000_0000 | code << 23 | d << 16 | b << 8 | a, 0],
        // hwreg(HW_REG_MODE) for those that name a hardware register.
        Encoding::Sopk => [0xB000_0000 | code << 23 | d << 16 | 0xF801, 0],
        Encoding::Sop1 => [0xBE80_0000 | d << 16 | code << 8 | a, 0],
        Encoding::Sopc => [0xBF00_0000 | code << 16 | b << 8 | a, 0],
        Encoding::Sopp => [0xBF80_0000 | code << 16, 0],
        Encoding::Smem => [0xC002_0000 | code << 18 | d << 6 | a / 2, 0],
        Encoding::Vop2 => [code << 25 | vd << 17 | vb << 9 | 256 + va, 0],
        Encoding::Vop1 => [0x7E00_0000 | vd << 17 | code << 9 | 256 + va, 0],
        Encoding::Vopc => [0x7C00_0000 | code << 17 | vb << 9 | 256 + va, 0],
        Encoding::Vop3 => {
            let mask = if op.writes_mask() { 106 << 8 } else { 0 };
            let sources = match op {
                Op::V_READLANE_B32 => 256 + va | a << 9,
                Op::V_WRITELANE_B32 => a | b << 9,
                _ => 256 + va | (256 + vb) << 9 | (256 + vc) << 18,
            };
            [0xD000_0000 | code << 16 | mask | vd, sources]
        }
        Encoding::Vop3p => {
            let sources = 256 + va | (256 + vb) << 9 | (256 + vc) << 18;
            // The defaults of op_sel_hi, whose bits mean something else in matrix instructions.
            let [hi, low] = if op.is_mfma() { [0, 0] } else { [1 << 14, 3 << 27] };
            [0xD380_0000 | code << 16 | hi | vd, low | sources]
        }
        Encoding::Ds => {
            let gds = u32::from(info.name.starts_with("DS_GWS"));
            [0xD800_0000 | code << 17 | gds << 16, vd << 24 | vc << 16 | vb << 8 | va]
        }
        Encoding::Flat => [0xDC00_0000 | code << 18, vd << 24 | vb << 8 | va],
        Encoding::Scratch => [0xDC00_6000 | code << 18, vd << 24 | 0x7F << 16 | vb << 8 | va],
        Encoding::Global => [0xDC00_8000 | code << 18, vd << 24 | 0x7F << 16 | vb << 8 | va],
        Encoding::Mubuf => [0xE000_1000 | code << 18, 128 << 24 | (b / 4) << 16 | vb << 8 | va],
        // dfmt 32_32_32_32, nfmt float.
        Encoding::Mtbuf => {
            [0xE800_1000 | code << 15 | 14 << 19 | 7 << 23, 128 << 24 | (b / 4) << 16 | vb << 8 | va]
        }
    };
    let [first, second] = words;
    // What follows one-word encodings is their literal.
    [first, second, 0]
}

/// Whether the emulator decodes `op` on `arch`.
pub fn decodes(op: Op, arch: Arch) -> bool {
    decode(arch, &instance(op)).is_ok_and(|inst| inst.op == op)
}
