//! Random instances of every opcode and form, as words.

use hk_emu::isa::{Encoding, Op};
use proptest::prelude::{Rng, RngExt};
use proptest::test_runner::{RngAlgorithm, TestRng};

const VGPRS: [u32; 8] = [0, 1, 2, 40, 100, 222, 254, 255];
const INLINE: [u32; 14] = [128, 129, 192, 193, 208, 240, 241, 242, 243, 244, 245, 246, 247, 248];
const SCALARS: [u32; 14] = [0, 1, 2, 4, 8, 32, 64, 100, 101, 102, 106, 107, 124, 126];

/// Makes them, the same ones for the same seed.
pub struct Generator(pub TestRng);

impl Generator {
    pub fn new(seed: u8) -> Generator {
        Generator(TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]))
    }

    fn pick(&mut self, from: &[u32]) -> u32 {
        from[self.0.random_range(0..from.len())]
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.0.random_range(0..one_in) == 0
    }

    /// An eight-bit scalar source.
    fn scalar(&mut self) -> u32 {
        match self.0.random_range(0..8) {
            0..=3 => self.pick(&SCALARS),
            4..=5 => self.pick(&INLINE),
            6 => self.pick(&[235, 236, 237, 238, 251, 252, 253, 108, 112, 127]),
            _ => 255,
        }
    }

    /// A nine-bit source, without SDWA, DPP; literals only where `literal`.
    fn source(&mut self, literal: bool) -> u32 {
        if self.chance(2) {
            return 256 + self.pick(&VGPRS);
        }
        loop {
            let code = self.scalar();
            if literal || code != 255 {
                return code;
            }
        }
    }

    /// One instance of `op`; a literal follows in case the words ask for it.
    pub fn instance(&mut self, op: Op, promoted: bool) -> Vec<u32> {
        let info = op.info();
        let opcode = u32::from(info.opcode);
        let random = self.0.next_u32();
        let literal = match self.0.random_range(0..7) {
            0 | 1 => self.0.random_range(0..100),
            2 => self.pick(&[
                0,
                0x3F80_0000,
                0xC000_0000,
                0x3FE0_0000,
                0xC010_0000,
                0x3E22_F983,
                0x3118,
                0x3C00,
            ]),
            3 => !self.0.random_range(0..32),
            _ => self.0.next_u32(),
        };
        let vgpr = |g: &mut Self| g.pick(&VGPRS);
        match info.encoding {
            Encoding::Sop1 => {
                vec![0xBE80_0000 | self.pick(&SCALARS) << 16 | opcode << 8 | self.scalar(), literal]
            }
            Encoding::Sop2 => {
                let sources = self.scalar() | self.scalar() << 8;
                vec![0x8000_0000 | opcode << 23 | self.pick(&SCALARS) << 16 | sources, literal]
            }
            Encoding::Sopc => vec![0xBF00_0000 | opcode << 16 | self.scalar() << 8 | self.scalar(), literal],
            Encoding::Sopk => {
                vec![0xB000_0000 | opcode << 23 | self.pick(&SCALARS) << 16 | random & 0xFFFF, literal]
            }
            Encoding::Sopp => {
                let imm = if self.chance(2) { 0 } else { random & 0xFFFF };
                vec![0xBF80_0000 | opcode << 16 | imm]
            }
            Encoding::Smem => {
                let first = 0xC000_0000
                    | opcode << 18
                    | self.pick(&[0, 4, 24, 64, 96]) << 6
                    | self.pick(&[0, 2, 16, 32]);
                let glc = u32::from(self.chance(4)) << 16;
                match random % 4 {
                    0 => vec![first | glc, self.pick(&SCALARS)],
                    1 => vec![
                        first | glc | 3 << 14 | 1 << 17 ^ 1 << 15,
                        self.pick(&SCALARS) << 25 | random >> 12,
                    ],
                    2 => vec![0xC000_0000 | opcode << 18, 0],
                    _ => vec![first | glc | 1 << 17, random >> 11],
                }
            }
            Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc if promoted => {
                let base = match info.encoding {
                    Encoding::Vopc => 0,
                    Encoding::Vop2 => 0x100,
                    _ => 0x140,
                };
                self.vop3(op, base + opcode)
            }
            Encoding::Vop1 => {
                let word = 0x7E00_0000 | vgpr(self) << 17 | opcode << 9;
                self.with_modifier(op, word, literal)
            }
            Encoding::Vop2 => {
                let word = opcode << 25 | vgpr(self) << 17 | vgpr(self) << 9;
                self.with_modifier(op, word, literal)
            }
            Encoding::Vopc => {
                let word = 0x7C00_0000 | opcode << 17 | vgpr(self) << 9;
                self.with_modifier(op, word, literal)
            }
            Encoding::Vop3 => self.vop3(op, opcode),
            Encoding::Vop3p => self.vop3p(op, opcode),
            Encoding::Ds => {
                let acc = u32::from(self.chance(4)) << 25;
                let gds = u32::from(info.name.starts_with("DS_GWS")) << 16;
                let offset = if self.chance(3) { 0 } else { random & 0xFFFF };
                let mut fields = 0;
                for (i, width) in info.src.iter().enumerate() {
                    if *width != 0 {
                        fields |= vgpr(self) << (8 * i);
                    }
                }
                if info.dst != 0 {
                    fields |= vgpr(self) << 24;
                }
                vec![0xD800_0000 | opcode << 17 | acc | gds | offset, fields]
            }
            Encoding::Flat | Encoding::Global | Encoding::Scratch => {
                let segment = match info.encoding {
                    Encoding::Flat => 0,
                    Encoding::Scratch => 1,
                    _ => 2,
                };
                let offset =
                    if self.chance(3) { 0 } else { random & if segment == 0 { 0xFFF } else { 0x1FFF } };
                let flags = (random >> 20 & 3) << 16 | (random >> 22 & 1) << 25;
                let sve = if segment == 1 { (random >> 23 & 1) << 13 } else { 0 };
                let saddr = match segment {
                    0 => 0,
                    _ if self.chance(2) => 0x7F,
                    _ => self.pick(&[0, 2, 16, 64, 100]),
                };
                let mut fields = saddr << 16 | u32::from(self.chance(4)) << 23;
                if segment != 1 || sve != 0 {
                    fields |= vgpr(self);
                }
                if info.src[1] != 0 {
                    fields |= vgpr(self) << 8;
                }
                if info.dst != 0 || flags >> 16 & 1 != 0 {
                    fields |= vgpr(self) << 24;
                }
                vec![
                    0xDC00_0000 | opcode << 18 | segment << 14 | offset & 0x1FFF & !sve | sve | flags,
                    fields,
                ]
            }
            Encoding::Mubuf | Encoding::Mtbuf => {
                if matches!(op, Op::BUFFER_WBL2 | Op::BUFFER_INV) {
                    return vec![0xE000_0000 | opcode << 18 | random & 0x2_C000, 0];
                }
                let modes = random & 0x3000;
                let offset = if self.chance(3) { 0 } else { random >> 20 };
                let soffset = self.pick(&[0, 4, 100, 106, 124, 128, 129, 193, 240]);
                let mut fields = soffset << 24 | self.pick(&[0, 1, 2, 8, 24]) << 16 | vgpr(self) << 8;
                fields |= u32::from(self.chance(4)) << 23;
                if modes != 0 {
                    fields |= vgpr(self);
                }
                let sc0 = random >> 14 & 1;
                if info.encoding == Encoding::Mtbuf {
                    let format = self.0.random_range(0..128) << 19;
                    fields |= (random >> 15 & 3) << 21;
                    return vec![0xE800_0000 | opcode << 15 | modes | offset | sc0 << 14 | format, fields];
                }
                let lds = u32::from(info.name.contains("LOAD") && self.chance(4)) << 16;
                vec![0xE000_0000 | opcode << 18 | modes | offset | lds | random & 0x2_C000, fields]
            }
        }
    }

    fn with_modifier(&mut self, op: Op, word: u32, literal: u32) -> Vec<u32> {
        let random = self.0.next_u32();
        match self.0.random_range(0..6) {
            0 if !op.info().name.contains("F64") => {
                let ctrl = match self.0.random_range(0..4) {
                    0 => random & 0xFF,
                    1 => 0x101 + 0x10 * (random % 3) + (random >> 4) % 15,
                    2 => self.pick(&[0x130, 0x134, 0x138, 0x13C, 0x140, 0x141, 0x142, 0x143]),
                    _ => 0x150 + random % 16,
                };
                let high = if self.chance(2) { 0xFF00_0000 } else { random & 0xFFF8_0000 };
                vec![word | 250, high | ctrl << 8 | self.pick(&VGPRS)]
            }
            1 => {
                let selectors = (random % 7) << 16 | ((random >> 4) % 7) << 24;
                let rest = random & 0x3838_0000; // sext, neg, abs of both
                let dst = if op.is_cmp() {
                    0
                } else {
                    ((random >> 8) % 7) << 8 | ((random >> 12) % 3) << 11 | random & 0xE000
                };
                vec![word | 249, selectors | rest | dst | self.pick(&VGPRS)]
            }
            _ => vec![word | self.source(true), literal, literal],
        }
    }

    fn vop3(&mut self, op: Op, opcode: u32) -> Vec<u32> {
        let info = op.info();
        let random = self.0.next_u32();
        let mut first = 0xD000_0000 | opcode << 16;
        let dst = if op.is_cmp() || op == Op::V_READLANE_B32 {
            self.pick(&[0, 2, 64, 100, 106, 126])
        } else {
            self.pick(&VGPRS)
        };
        if info.dst != 0 || op.is_cmp() {
            first |= dst;
        }
        let mut second = 0;
        for i in 0..3 {
            if info.src[i] != 0 || i == 2 && op.reads_mask() {
                let lane = matches!(op, Op::V_READLANE_B32 | Op::V_WRITELANE_B32)
                    && (i == 1 || op == Op::V_WRITELANE_B32);
                let code = match i {
                    2 if op.reads_mask() => self.pick(&[0, 2, 64, 100, 106, 126]),
                    _ if lane => self.pick(&[0, 1, 101, 124, 128, 150, 192]),
                    _ => self.source(false),
                };
                second |= code << (9 * i);
            }
        }
        if op.writes_mask() {
            first |= self.pick(&[0, 2, 64, 100, 106]) << 8;
        } else if self.chance(2) {
            first |= random & 0x700;
        }
        if self.chance(3) {
            first |= 1 << 15;
        }
        if self.chance(3) {
            first |= random & 0x7800;
        }
        if self.chance(2) {
            second |= random & 0xF800_0000;
        }
        vec![first, second]
    }

    fn vop3p(&mut self, op: Op, opcode: u32) -> Vec<u32> {
        let info = op.info();
        let random = self.0.next_u32();
        let mut first = 0xD380_0000 | opcode << 16 | self.pick(&[0, 4, 32, 64, 100, 200]);
        if op.is_mfma() || matches!(op, Op::V_ACCVGPR_READ_B32 | Op::V_ACCVGPR_WRITE_B32) {
            let mut second = 0;
            for i in 0..3 {
                if info.src[i] != 0 {
                    let smfmac = info.name.contains("SMFMAC");
                    let constant = i == 2 && !smfmac && self.chance(4);
                    let code = if constant {
                        self.pick(&INLINE)
                    } else {
                        256 + self.pick(&[0, 4, 32, 64, 100, 200])
                    };
                    second |= code << (9 * i);
                }
            }
            if op.is_mfma() {
                first |= (random & 1) << 15;
                second |= random & 0x1800_0000;
                if self.chance(2) {
                    first |= random & 0x7F00;
                    second |= random & 0xE000_0000;
                }
                if info.name.ends_with("F8F6F4") && self.chance(2) {
                    let prefix = 0xD3AC_0000 | random & 0x1800;
                    let scales =
                        random & 0x1800_0000 | (256 + self.pick(&VGPRS)) | (256 + self.pick(&VGPRS)) << 9;
                    return vec![prefix, scales, first, second];
                }
            } else if op == Op::V_ACCVGPR_READ_B32 {
                second |= 1 << 27;
            }
            return vec![first, second];
        }
        let mut second = 0;
        for i in 0..3 {
            if info.src[i] != 0 {
                second |= self.source(false) << (9 * i);
            }
        }
        if self.chance(2) {
            first |= random & 0xF700;
        } else {
            first |= 1 << 14;
            second |= 3 << 27;
        }
        if info.src[2] != 0 || self.chance(2) {
            first |= random & 0x800;
        }
        if self.chance(2) {
            second |= random & 0xF800_0000;
        }
        vec![first, second]
    }
}
