//! Conversions to and from the narrow formats of gfx950, against their definitions in f64 arithmetic.

#![allow(clippy::needless_range_loop)] // registers and lanes are numbers here

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use hk_emu::isa::{ALL_OPS, Op};

/// A format: bits of exponent and fraction, bias, and what its top codes are.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Format {
    name: &'static str,
    bits: u32,
    fraction: u32,
    bias: i32,
    /// Largest finite value; 0 for f32, which only ever rounds as the host does.
    max: f64,
}

const FORMATS: [Format; 8] = [
    Format { name: "f32", bits: 32, fraction: 23, bias: 127, max: f32::MAX as f64 },
    Format { name: "f16", bits: 16, fraction: 10, bias: 15, max: 65504.0 },
    Format { name: "bf16", bits: 16, fraction: 7, bias: 127, max: 3.389_531_389_251_535_5e38 },
    Format { name: "fp8", bits: 8, fraction: 3, bias: 7, max: 448.0 },
    Format { name: "bf8", bits: 8, fraction: 2, bias: 15, max: 57344.0 },
    Format { name: "fp6", bits: 6, fraction: 3, bias: 1, max: 7.5 },
    Format { name: "bf6", bits: 6, fraction: 2, bias: 3, max: 28.0 },
    Format { name: "fp4", bits: 4, fraction: 1, bias: 1, max: 6.0 },
];

fn format(name: &str) -> Format {
    *FORMATS.iter().find(|f| f.name == name).unwrap_or_else(|| panic!("no format {name}"))
}

impl Format {
    fn has_infinity(self) -> bool {
        matches!(self.name, "f32" | "f16" | "bf16" | "bf8")
    }

    fn value(self, code: u32) -> f64 {
        let m = code & ((1 << (self.bits - 1)) - 1);
        let (e, fraction) = ((m >> self.fraction) as i32, f64::from(m & ((1 << self.fraction) - 1)));
        let one = f64::from(1u32 << self.fraction);
        let all_ones = (1 << (self.bits - 1 - self.fraction)) - 1;
        let v = if self.has_infinity() && e == all_ones {
            if fraction == 0.0 { f64::INFINITY } else { f64::NAN }
        } else if self.name == "fp8" && m == 0x7F {
            f64::NAN
        } else if e == 0 {
            fraction / one * 2f64.powi(1 - self.bias)
        } else {
            (1.0 + fraction / one) * 2f64.powi(e - self.bias)
        };
        if code >> (self.bits - 1) & 1 != 0 { -v } else { v }
    }

    /// The nearest value, or with a random number the one that it chooses of the two around; then its code.
    fn code(self, x: f64, random: Option<u32>, clamps: bool) -> u32 {
        let sign = u32::from(x.is_sign_negative()) << (self.bits - 1);
        let top = match self.name {
            "fp8" => 0x7F,
            "bf8" => 0x7C,
            "f16" => 0x7C00,
            "bf16" => 0x7F80,
            "f32" => 0x7F80_0000,
            _ => 0,
        };
        let saturates = self.bits < 8 || clamps && (self.bits == 8 || self.name == "f16" && x.is_finite());
        if x.is_nan() {
            return match self.name {
                "fp8" | "bf8" => sign | 0x7F,
                "f32" => 0x7FC0_0000,
                "f16" | "bf16" => sign | top | 1 << (self.fraction - 1),
                _ => sign | self.code(self.max, None, false),
            };
        }
        let magnitude = x.abs();
        let exponent = if magnitude == 0.0 { -10000 } else { (magnitude.to_bits() >> 52) as i32 - 1023 };
        let unit = 2f64.powi(exponent.max(1 - self.bias) - self.fraction as i32);
        let value = match random {
            None => (magnitude / unit).round_ties_even() * unit,
            Some(r) => (magnitude / unit + f64::from(r) / 4_294_967_296.0).floor() * unit,
        };
        if value > self.max {
            return if saturates { sign | self.code(self.max, None, false) } else { sign | top };
        }
        let exponent = (value.to_bits() >> 52) as i32 - 1023;
        let least = 2f64.powi(1 - self.bias - self.fraction as i32);
        if value < least * f64::from(1u32 << self.fraction) {
            return sign | (value / least) as u32;
        }
        let fraction = (value / 2f64.powi(exponent) - 1.0) * f64::from(1u32 << self.fraction);
        sign | ((exponent + self.bias) as u32) << self.fraction | fraction as u32
    }
}

/// Registers of a case: three sources and the destination.
const SRC: [usize; 3] = [0, 32, 48];
const DST: usize = 50;
const ALL: usize = DST + 32;
const EXEC: u64 = 0xFFFF_FFFF_F7FF_FFFE;

struct Case {
    op: Op,
    op_sel: u32,
    /// Sign changes of the first two sources.
    neg: u32,
    abs: u32,
    clamps: bool,
    /// A source that is written as the constant 0.5; its register has the same bits.
    constant: Option<usize>,
    registers: Vec<[u32; 64]>,
}

/// `(to, from, elements, interleaved, stochastic)` of a scaled conversion.
fn scaled(op: Op) -> Option<(Format, Format, usize, bool, bool)> {
    let name = op.mnemonic();
    let rest = name.strip_prefix("v_cvt_scalef32_")?;
    let parts: Vec<&str> = rest.split('_').collect();
    let [.., to, from] = parts[..] else { return None };
    let has = |part: &str| parts.contains(&part);
    let n = if has("pk32") || has("2xpk16") {
        32
    } else if has("pk") {
        2
    } else {
        1
    };
    Some((format(to), format(from), n, has("2xpk16"), has("sr")))
}

impl Case {
    fn text(&self) -> String {
        let info = self.op.info();
        let range = |first: usize, n: u8| match n {
            1 => format!("v{first}"),
            n => format!("v[{first}:{}]", first + usize::from(n) - 1),
        };
        let mut text = format!("{} {}", self.op.mnemonic(), range(4 + DST, info.dst));
        for (i, n) in info.src.into_iter().enumerate().filter(|(_, n)| *n != 0) {
            let mut source = if self.constant == Some(i) { "0.5".to_owned() } else { range(4 + SRC[i], n) };
            if self.abs >> i & 1 != 0 {
                source = format!("|{source}|");
            }
            if self.neg >> i & 1 != 0 {
                source = format!("-{source}");
            }
            text += &format!(", {source}");
        }
        if self.op_sel != 0 {
            let bits: Vec<String> =
                info.op_sel_order().bytes().map(|b| (self.op_sel >> (b - b'0') & 1).to_string()).collect();
            text += &format!(" op_sel:[{}]", bits.join(","));
        }
        text
    }

    fn source(&self, i: usize, lane: usize, at: usize, bits: u32) -> u32 {
        let bit = |n: usize| self.registers[SRC[i] + n / 32][lane] >> (n % 32) & 1;
        (0..bits as usize).map(|n| bit(at + n) << n).sum()
    }

    /// The destination's registers of a lane.
    fn want(&self, lane: usize) -> Vec<u32> {
        let mut out: Vec<u32> = (0..32).map(|r| self.registers[DST + r][lane]).collect();
        if EXEC >> lane & 1 == 0 {
            return out;
        }
        let mut put = |at: usize, bits: u32, value: u32| {
            for n in 0..bits as usize {
                let (word, bit) = ((at + n) / 32, (at + n) % 32);
                out[word] = out[word] & !(1 << bit) | (value >> n & 1) << bit;
            }
        };
        let word = |i: usize| self.registers[SRC[i]][lane];
        let float = |i: usize| f64::from(f32::from_bits(word(i)));
        let (high, byte) = (16 * (self.op_sel >> 3 & 1) as usize, 8 * (self.op_sel >> 2 & 3) as usize);
        match self.op {
            Op::V_PRNG_B32 => put(0, 32, word(0) << 1 ^ if word(0) >> 31 == 1 { 0xC5 } else { 0 }),
            Op::V_ASHR_PK_I8_I32 | Op::V_ASHR_PK_U8_I32 => {
                let (low, top) = if self.op == Op::V_ASHR_PK_I8_I32 { (-128, 127) } else { (0, 255) };
                for i in 0..2 {
                    let shifted = i64::from(word(i) as i32).div_euclid(1 << (word(2) % 32));
                    put(high + 8 * i, 8, shifted.clamp(low, top) as u32 & 0xFF);
                }
            }
            Op::V_CVT_SR_F16_F32 => put(high, 16, format("f16").code(float(0), Some(word(1)), self.clamps)),
            Op::V_CVT_SR_BF16_F32 => put(high, 16, format("bf16").code(float(0), Some(word(1)), self.clamps)),
            Op::V_CVT_SR_FP8_F32 => put(byte, 8, format("fp8").code(float(0), Some(word(1)), self.clamps)),
            Op::V_CVT_SR_BF8_F32 => put(byte, 8, format("bf8").code(float(0), Some(word(1)), self.clamps)),
            op => {
                let (to, from, n, interleaved, stochastic) = scaled(op).unwrap();
                let narrows = to.bits < from.bits;
                let apart = interleaved || narrows && n == 2 && from.name == "f32" && !stochastic;
                let scale = if stochastic || apart { word(2) } else { word(1) } >> 23 & 0xFF;
                let scale = if scale == 255 { f64::NAN } else { 2f64.powi(scale as i32 - 127) };
                let mut seed = word(1);
                // Where the fields begin that op_sel names.
                let whole = |f: Format| n * f.bits as usize >= 32;
                let first = if narrows || whole(from) {
                    0
                } else {
                    8 * (self.op_sel & 3) as usize * if n as u32 * from.bits == 16 { 2 } else { 1 }
                };
                let target = match n * to.bits as usize {
                    8 => byte,
                    16 => high,
                    _ => 0,
                };
                for i in 0..n {
                    let (source, at) = if apart { (i % 2, i / 2) } else { (0, i) };
                    let code = self.source(source, lane, first + at * from.bits as usize, from.bits);
                    let mut x = from.value(code);
                    if self.abs >> source & 1 != 0 {
                        x = x.abs();
                    }
                    if self.neg >> source & 1 != 0 {
                        x = -x;
                    }
                    let x = if narrows { x / scale } else { x * scale };
                    let code = to.code(x, stochastic.then_some(seed), self.clamps);
                    seed = seed << 1 ^ if seed >> 31 == 1 { 0xC5 } else { 0 };
                    put(target + i * to.bits as usize, to.bits, code);
                }
            }
        }
        out
    }
}

/// Registers of random words, but floats near 1, some of them ties, and most scales near 1, some at the ends.
fn case(op: Op, op_sel: u32, random: &mut Random) -> Case {
    let mut registers = vec![[0u32; 64]; ALL];
    for register in &mut registers {
        *register = std::array::from_fn(|_| random.next());
    }
    let from = scaled(op).map(|(_, from, ..)| from.name);
    let stochastic = op.mnemonic().contains("_sr_");
    let near = |random: &mut Random, bias: u32, fraction: u32| {
        let exponent = bias - 6 + random.next() % 13;
        (random.next() & 1) << 15 | exponent << fraction | random.next() & ((1 << fraction) - 1)
    };
    for lane in 0..64 {
        for (i, first) in SRC.into_iter().enumerate() {
            for r in first..SRC.get(i + 1).copied().unwrap_or(DST) {
                let float = (123 + random.next() % 9) << 23 | random.next() & 0x807F_FFFF;
                let tie = float & 0xFFF0_0000 | (random.next() & 1) << 19;
                let end = [0, 1, 254, 255][random.next() as usize % 4] << 23 | random.next() & 0x807F_FFFF;
                let scale = if random.next().is_multiple_of(16) { end } else { float };
                let wide = [registers[r][lane], tie, tie, float][random.next() as usize % 4];
                let word = &mut registers[r][lane];
                *word = match (i, from) {
                    (1, _) if stochastic => *word,
                    (2, Some(_)) => scale,
                    (_, Some("f32")) => wide,
                    (0, Some("f16")) => near(random, 15, 10) | near(random, 15, 10) << 16,
                    (0, Some("bf16")) => near(random, 127, 7) | near(random, 127, 7) << 16,
                    (1, Some(_)) => scale,
                    (0, None) if op.mnemonic().ends_with("_f32") => wide,
                    _ => *word,
                };
            }
        }
        if matches!(op, Op::V_ASHR_PK_I8_I32 | Op::V_ASHR_PK_U8_I32) {
            registers[SRC[0]][lane] = (random.next() as i32 >> (random.next() % 32)) as u32;
        }
    }
    Case { op, op_sel, neg: 0, abs: 0, clamps: false, constant: None, registers }
}

fn check(cases: &[Case]) {
    let mut body = String::from(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v1, 2, v0\n  s_waitcnt lgkmcnt(0)\n  v_mov_b32 v2, v1\n",
    );
    body += &format!("  s_mov_b32 s8, {:#x}\n  s_mov_b32 s9, {:#x}\n", EXEC as u32, EXEC >> 32);
    for case in cases {
        body += "  v_mov_b32 v3, v2\n";
        for r in 0..ALL {
            body += &format!("  global_load_dword v{}, v2, s[4:5]\n  v_add_u32 v2, 0x100, v2\n", 4 + r);
        }
        body += &format!(
            "  s_waitcnt vmcnt(0)\n  s_mov_b64 s[6:7], exec\n  s_mov_b64 exec, s[8:9]\n  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {}\n  {}\n  s_mov_b64 exec, s[6:7]\n",
            u32::from(case.clamps),
            case.text()
        );
        body += &format!("  v_add_u32 v3, {:#x}, v3\n", DST * 256);
        for r in 0..32 {
            body +=
                &format!("  global_store_dword v3, v{}, s[4:5]\n  v_add_u32 v3, 0x100, v3\n", 4 + DST + r);
        }
    }
    let image = assemble(&Assembly { cpu: "gfx950", body: &body, accum_offset: 128, ..Assembly::default() });
    let rig = Rig::new(options("gfx950"), &image);
    let data: Vec<u32> = cases.iter().flat_map(|case| case.registers.iter().flatten().copied()).collect();
    let buffer = rig.upload("registers", &data);
    rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap();
    let out: Vec<u32> = rig.download(buffer, data.len());
    for (case, out) in cases.iter().zip(out.chunks(64 * ALL)) {
        for lane in 0..64 {
            let got: Vec<u32> = (0..32).map(|r| out[64 * (DST + r) + lane]).collect();
            let sources: Vec<String> =
                SRC.iter().map(|r| format!("{:#x}", case.registers[*r][lane])).collect();
            assert_eq!(
                got,
                case.want(lane),
                "{} lane {lane} clamps {} {sources:?}",
                case.text(),
                case.clamps
            );
        }
    }
}

fn conversions() -> impl Iterator<Item = Op> {
    use Op::*;
    let others = [
        V_PRNG_B32,
        V_ASHR_PK_I8_I32,
        V_ASHR_PK_U8_I32,
        V_CVT_SR_F16_F32,
        V_CVT_SR_BF16_F32,
        V_CVT_SR_FP8_F32,
        V_CVT_SR_BF8_F32,
    ];
    ALL_OPS.iter().copied().filter(|op| scaled(*op).is_some()).chain(others)
}

#[test]
fn every_conversion_follows_its_definition() {
    let mut random = Random(11);
    let mut cases = vec![];
    assert_eq!(conversions().count(), 56);
    for op in conversions() {
        // What op_sel chooses: a byte or word of the source in bits 1:0, of the destination in bits 3:2.
        let choices: &[u32] = match scaled(op) {
            Some((to, from, n, ..)) => match (n as u32 * from.bits, n as u32 * to.bits) {
                (_, 8) => &[0, 4, 8, 12],
                (8, 16) => &[0, 1, 2, 3, 8, 11],
                (8, _) => &[0, 1, 2, 3],
                (_, 16) => &[0, 8],
                (16, _) => &[0, 1],
                _ => &[0],
            },
            None if matches!(op, Op::V_CVT_SR_FP8_F32 | Op::V_CVT_SR_BF8_F32) => &[0, 8, 12],
            None if op == Op::V_PRNG_B32 => &[0],
            None => &[0, 8],
        };
        for op_sel in choices {
            for clamps in [false, true] {
                cases.push(Case { clamps, ..case(op, *op_sel, &mut random) });
            }
        }
    }
    check(&cases);
}

#[test]
fn signs_change_before_scaled_conversions() {
    let mut random = Random(12);
    let mut cases = vec![];
    for op in ALL_OPS.iter().copied().filter(|op| scaled(*op).is_some()) {
        let signs = u32::from(op.info().negatable()) & 3;
        // The second source is data only where two f32 come apart.
        for (neg, abs) in [(1, 0), (0, 1), (1, 1), (2, 0), (1, 2)] {
            if (neg | abs) & !signs == 0 && signs != 0 {
                cases.push(Case { neg, abs, ..case(op, 0, &mut random) });
            }
        }
    }
    assert!(cases.len() > 30);
    check(&cases);
}

#[test]
fn inline_constants_have_the_type_of_what_is_converted() {
    let mut random = Random(13);
    let mut cases = vec![];
    for op in ALL_OPS.iter().copied() {
        let Some((_, from, ..)) = scaled(op) else { continue };
        for i in (0..3).filter(|i| op.info().src[*i] == 1) {
            let mut case = Case { constant: Some(i), ..case(op, 0, &mut random) };
            let half = match from.name {
                "f16" if i == 0 => 0x3800,
                "bf16" if i == 0 => 0x3F00,
                _ => 0x3F00_0000,
            };
            case.registers[SRC[i]] = [half; 64];
            cases.push(case);
        }
    }
    assert!(cases.len() > 60, "{}", cases.len());
    check(&cases);
}
