//! Matrix instructions, element by element: layouts by the published formulas, sums by plain loops and wide integers.

#![allow(clippy::needless_range_loop)] // registers and lanes are numbers here

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use hk_emu::isa::ALL_OPS;
use hk_emu::{Fault, Level, MatrixNumerics};

#[derive(Clone, Copy, PartialEq, Debug)]
enum Ty {
    F32,
    Xf32,
    F16,
    Bf16,
    I8,
    Fp8,
    Bf8,
    Fp6,
    Bf6,
    Fp4,
    F64,
}

use Ty::{Bf6, Bf8, Bf16, F16, F32, F64, Fp4, Fp6, Fp8, I8, Xf32};

impl Ty {
    fn bits(self) -> usize {
        match self {
            F64 => 64,
            F32 | Xf32 => 32,
            F16 | Bf16 => 16,
            I8 | Fp8 | Bf8 => 8,
            Fp6 | Bf6 => 6,
            Fp4 => 4,
        }
    }

    /// A random element that is no NaN and no infinity: its bits.
    fn random(self, r: &mut Random) -> u64 {
        match self {
            F64 => (f64::from(r.unit()) * 3.0).to_bits(),
            F32 | Xf32 => u64::from((r.unit() * 3.0).to_bits()),
            Bf16 => u64::from((r.unit() * 3.0).to_bits() >> 16),
            // From subnormals to 2, either sign.
            F16 => u64::from(r.next() & 0xBFFF),
            Fp8 | Bf8 => u64::from([r.next() & 0x7B, r.next() & 0x7B | 0x81][r.next() as usize % 2]),
            I8 | Fp6 | Bf6 | Fp4 => u64::from(r.next()) & ((1 << self.bits()) - 1),
        }
    }

    fn value(self, bits: u64, fnuz: bool) -> f64 {
        let small = |exponent: u32, fraction: u32, bias: i32| {
            let b = bits as u32;
            let (e, m) = (b >> fraction & ((1 << exponent) - 1), b & ((1 << fraction) - 1));
            let m = f64::from(m) / f64::from(1u32 << fraction);
            let v = if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e as i32 - bias) };
            if b >> (exponent + fraction) & 1 != 0 { -v } else { v }
        };
        match self {
            F64 => f64::from_bits(bits),
            F32 => f64::from(f32::from_bits(bits as u32)),
            Xf32 => f64::from(f32::from_bits(bits as u32 >> 13 << 13)),
            Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
            F16 => small(5, 10, 15),
            I8 => f64::from(bits as u8 as i8),
            Fp8 => small(4, 3, if fnuz { 8 } else { 7 }),
            Bf8 if bits == 0x7C && !fnuz => f64::INFINITY,
            Bf8 => small(5, 2, if fnuz { 16 } else { 15 }),
            Fp6 => small(2, 3, 1),
            Bf6 => small(3, 2, 3),
            Fp4 => small(2, 1, 1),
        }
    }

    /// A NaN's bits, if there is one.
    fn nan(self, fnuz: bool) -> Option<u64> {
        match self {
            F64 => Some(0x7FF0_0000_0000_0001),
            F32 | Xf32 => Some(0xFFC1_2345),
            F16 => Some(0xFE01),
            Bf16 => Some(0x7F81),
            Fp8 | Bf8 => Some(if fnuz { 0x80 } else { 0xFF }),
            I8 | Fp6 | Bf6 | Fp4 => None,
        }
    }
}

#[derive(Clone, Debug)]
struct Shape {
    name: &'static str,
    dim: usize,
    k: usize,
    blocks: usize,
    a: Ty,
    b: Ty,
}

const fn shape(name: &'static str, dim: usize, k: usize, blocks: usize, a: Ty, b: Ty) -> Shape {
    Shape { name, dim, k, blocks, a, b }
}

const BOTH: &[Shape] = &[
    shape("mfma_f32_32x32x1_2b_f32", 32, 1, 2, F32, F32),
    shape("mfma_f32_16x16x1_4b_f32", 16, 1, 4, F32, F32),
    shape("mfma_f32_4x4x1_16b_f32", 4, 1, 16, F32, F32),
    shape("mfma_f32_32x32x2_f32", 32, 2, 1, F32, F32),
    shape("mfma_f32_16x16x4_f32", 16, 4, 1, F32, F32),
    shape("mfma_f32_32x32x4_2b_f16", 32, 4, 2, F16, F16),
    shape("mfma_f32_16x16x4_4b_f16", 16, 4, 4, F16, F16),
    shape("mfma_f32_4x4x4_16b_f16", 4, 4, 16, F16, F16),
    shape("mfma_f32_32x32x8_f16", 32, 8, 1, F16, F16),
    shape("mfma_f32_16x16x16_f16", 16, 16, 1, F16, F16),
    shape("mfma_f32_32x32x4_2b_bf16", 32, 4, 2, Bf16, Bf16),
    shape("mfma_f32_16x16x4_4b_bf16", 16, 4, 4, Bf16, Bf16),
    shape("mfma_f32_4x4x4_16b_bf16", 4, 4, 16, Bf16, Bf16),
    shape("mfma_f32_32x32x8_bf16", 32, 8, 1, Bf16, Bf16),
    shape("mfma_f32_16x16x16_bf16", 16, 16, 1, Bf16, Bf16),
    shape("mfma_i32_32x32x4_2b_i8", 32, 4, 2, I8, I8),
    shape("mfma_i32_16x16x4_4b_i8", 16, 4, 4, I8, I8),
    shape("mfma_i32_4x4x4_16b_i8", 4, 4, 16, I8, I8),
    shape("mfma_i32_32x32x16_i8", 32, 16, 1, I8, I8),
    shape("mfma_i32_16x16x32_i8", 16, 32, 1, I8, I8),
    shape("mfma_f32_16x16x32_fp8_fp8", 16, 32, 1, Fp8, Fp8),
    shape("mfma_f32_16x16x32_fp8_bf8", 16, 32, 1, Fp8, Bf8),
    shape("mfma_f32_16x16x32_bf8_fp8", 16, 32, 1, Bf8, Fp8),
    shape("mfma_f32_16x16x32_bf8_bf8", 16, 32, 1, Bf8, Bf8),
    shape("mfma_f32_32x32x16_fp8_fp8", 32, 16, 1, Fp8, Fp8),
    shape("mfma_f32_32x32x16_fp8_bf8", 32, 16, 1, Fp8, Bf8),
    shape("mfma_f32_32x32x16_bf8_fp8", 32, 16, 1, Bf8, Fp8),
    shape("mfma_f32_32x32x16_bf8_bf8", 32, 16, 1, Bf8, Bf8),
    shape("mfma_f64_16x16x4_f64", 16, 4, 1, F64, F64),
    shape("mfma_f64_4x4x4_4b_f64", 4, 4, 4, F64, F64),
    shape("smfmac_f32_16x16x32_f16", 16, 32, 1, F16, F16),
    shape("smfmac_f32_32x32x16_f16", 32, 16, 1, F16, F16),
    shape("smfmac_f32_16x16x32_bf16", 16, 32, 1, Bf16, Bf16),
    shape("smfmac_f32_32x32x16_bf16", 32, 16, 1, Bf16, Bf16),
    shape("smfmac_i32_16x16x64_i8", 16, 64, 1, I8, I8),
    shape("smfmac_i32_32x32x32_i8", 32, 32, 1, I8, I8),
    shape("smfmac_f32_16x16x64_fp8_fp8", 16, 64, 1, Fp8, Fp8),
    shape("smfmac_f32_16x16x64_fp8_bf8", 16, 64, 1, Fp8, Bf8),
    shape("smfmac_f32_16x16x64_bf8_fp8", 16, 64, 1, Bf8, Fp8),
    shape("smfmac_f32_16x16x64_bf8_bf8", 16, 64, 1, Bf8, Bf8),
    shape("smfmac_f32_32x32x32_fp8_fp8", 32, 32, 1, Fp8, Fp8),
    shape("smfmac_f32_32x32x32_fp8_bf8", 32, 32, 1, Fp8, Bf8),
    shape("smfmac_f32_32x32x32_bf8_fp8", 32, 32, 1, Bf8, Fp8),
    shape("smfmac_f32_32x32x32_bf8_bf8", 32, 32, 1, Bf8, Bf8),
];

const GFX942: &[Shape] = &[
    shape("mfma_f32_16x16x8_xf32", 16, 8, 1, Xf32, Xf32),
    shape("mfma_f32_32x32x4_xf32", 32, 4, 1, Xf32, Xf32),
];

const GFX950: &[Shape] = &[
    shape("mfma_f32_32x32x16_f16", 32, 16, 1, F16, F16),
    shape("mfma_f32_16x16x32_f16", 16, 32, 1, F16, F16),
    shape("mfma_f32_32x32x16_bf16", 32, 16, 1, Bf16, Bf16),
    shape("mfma_f32_16x16x32_bf16", 16, 32, 1, Bf16, Bf16),
    shape("mfma_i32_32x32x32_i8", 32, 32, 1, I8, I8),
    shape("mfma_i32_16x16x64_i8", 16, 64, 1, I8, I8),
    shape("smfmac_f32_16x16x64_f16", 16, 64, 1, F16, F16),
    shape("smfmac_f32_32x32x32_f16", 32, 32, 1, F16, F16),
    shape("smfmac_f32_16x16x64_bf16", 16, 64, 1, Bf16, Bf16),
    shape("smfmac_f32_32x32x32_bf16", 32, 32, 1, Bf16, Bf16),
    shape("smfmac_i32_16x16x128_i8", 16, 128, 1, I8, I8),
    shape("smfmac_i32_32x32x64_i8", 32, 64, 1, I8, I8),
    shape("smfmac_f32_16x16x128_fp8_fp8", 16, 128, 1, Fp8, Fp8),
    shape("smfmac_f32_16x16x128_fp8_bf8", 16, 128, 1, Fp8, Bf8),
    shape("smfmac_f32_16x16x128_bf8_fp8", 16, 128, 1, Bf8, Fp8),
    shape("smfmac_f32_16x16x128_bf8_bf8", 16, 128, 1, Bf8, Bf8),
    shape("smfmac_f32_32x32x64_fp8_fp8", 32, 64, 1, Fp8, Fp8),
    shape("smfmac_f32_32x32x64_fp8_bf8", 32, 64, 1, Fp8, Bf8),
    shape("smfmac_f32_32x32x64_bf8_fp8", 32, 64, 1, Bf8, Fp8),
    shape("smfmac_f32_32x32x64_bf8_bf8", 32, 64, 1, Bf8, Bf8),
];

/// The formats of the f8f6f4 instructions in the order of their codes.
const CODED: [Ty; 5] = [Fp8, Bf8, Fp6, Bf6, Fp4];

fn f8f6f4(dim: usize, a: Ty, b: Ty) -> Shape {
    match dim {
        16 => shape("mfma_f32_16x16x128_f8f6f4", 16, 128, 1, a, b),
        _ => shape("mfma_f32_32x32x64_f8f6f4", 32, 64, 1, a, b),
    }
}

fn code(ty: Ty) -> usize {
    CODED.iter().position(|t| *t == ty).unwrap_or(0)
}

impl Shape {
    fn sparse(&self) -> bool {
        self.name.starts_with("smfmac")
    }

    fn coded(&self) -> bool {
        self.name.ends_with("f8f6f4")
    }

    /// Elements of A that are stored for each row.
    fn stored(&self) -> usize {
        if self.sparse() { self.k / 2 } else { self.k }
    }

    fn registers(&self, ty: Ty, k: usize) -> usize {
        k * self.dim * self.blocks * ty.bits() / 2048
    }

    fn results(&self) -> usize {
        self.dim * self.dim * self.blocks / 64 * if self.a == F64 { 2 } else { 1 }
    }

    /// Lane and element of A(i, k), or of B(k, i), of a block.
    fn place(&self, ty: Ty, k_total: usize, i: usize, k: usize, block: usize) -> (usize, usize) {
        let width = self.dim * self.blocks;
        let groups = 64 / width;
        let (group, element) = if self.registers(ty, k_total) == 8 {
            // 16 bytes at a time, dealt to the lane groups in turn.
            let chunk = 128 / ty.bits();
            (k / chunk % groups, k / chunk / groups * chunk + k % chunk)
        } else {
            let per_lane = k_total / groups;
            (k / per_lane, k % per_lane)
        };
        (group * width + block * self.dim + i, element)
    }

    /// Register (pair, for f64) and lane of D(i, j) of a block.
    fn result(&self, i: usize, j: usize, block: usize) -> (usize, usize) {
        let (n, r) = (self.dim, 64 / self.dim);
        if self.a == F64 {
            let p = 64usize.div_ceil(n * n);
            return (block * (n * n / 64) + i / r, (block % p) * n + i % r * p * n + j);
        }
        let p = 64usize.div_ceil(n * n / 4);
        (block * (n * n / 64) + i / (4 * r) * 4 + i % 4, (block % p) * n + i / 4 % r * p * n + j)
    }
}

/// Registers of a case: A, B, index or nothing, scales of A and B, C and D.
const A: usize = 0;
const B: usize = 8;
const INDEX: usize = 16;
const SCALE: usize = 17;
const C: usize = 19;
const ALL: usize = C + 32;

/// One execution of an instruction.
#[derive(Clone)]
struct Case {
    shape: Shape,
    /// Before it, with its inverse after it.
    around: [&'static str; 2],
    /// Controls: cbsz, abid, blgp.
    controls: [usize; 3],
    /// C as a constant and its value.
    constant: Option<(&'static str, f64)>,
    /// Bytes that hold the scales.
    scale: Option<[usize; 2]>,
    /// How many registers behind C D begins.
    behind: usize,
    registers: Vec<[u32; 64]>,
}

fn bits_at(registers: &[[u32; 64]], lane: usize, at: usize, n: usize) -> u64 {
    (0..n).map(|i| u64::from(registers[(at + i) / 32][lane] >> ((at + i) % 32) & 1) << i).sum()
}

fn put_bits(registers: &mut [[u32; 64]], lane: usize, at: usize, n: usize, value: u64) {
    for i in 0..n {
        let word = &mut registers[(at + i) / 32][lane];
        let bit = (at + i) % 32;
        *word = *word & !(1 << bit) | ((value >> i & 1) as u32) << bit;
    }
}

impl Case {
    fn new(shape: &Shape, random: &mut Random) -> Case {
        let mut registers = vec![[0u32; 64]; ALL];
        for (first, ty, k) in [(A, shape.a, shape.stored()), (B, shape.b, shape.k)] {
            let n = shape.registers(ty, k) * 32 / ty.bits();
            for lane in 0..64 {
                for e in 0..n {
                    put_bits(&mut registers[first..], lane, e * ty.bits(), ty.bits(), ty.random(random));
                }
            }
        }
        for lane in 0..64 {
            // Pairs of different numbers below four, the smaller first.
            for pair in 0..8 {
                let first = random.next() % 3;
                let second = first + 1 + random.next() % (3 - first);
                registers[INDEX][lane] |= (first | second << 2) << (4 * pair);
            }
            for operand in 0..2 {
                registers[SCALE + operand][lane] =
                    (0..4).map(|b| (117 + random.next() % 20) << (8 * b)).sum();
            }
            for r in 0..32 {
                registers[C + r][lane] = match shape.a {
                    I8 => [i32::MAX as u32, i32::MIN as u32, random.next()][random.next() as usize % 3],
                    _ => random.unit().to_bits(),
                };
            }
            if shape.a == F64 {
                for r in 0..4 {
                    let v = f64::from(random.unit()).to_bits();
                    registers[C + 2 * r][lane] = v as u32;
                    registers[C + 2 * r + 1][lane] = (v >> 32) as u32;
                }
            }
        }
        let controls = if shape.coded() { [code(shape.a), 0, code(shape.b)] } else { [0; 3] };
        Case {
            shape: shape.clone(),
            around: [""; 2],
            controls,
            constant: None,
            scale: None,
            behind: 0,
            registers,
        }
    }

    fn text(&self) -> String {
        let s = &self.shape;
        let range = |letter: char, first: usize, n: usize| {
            if n == 1 { format!("{letter}{first}") } else { format!("{letter}[{first}:{}]", first + n - 1) }
        };
        let a = range('v', 4 + A, s.registers(s.a, s.stored()));
        let b = range('v', 4 + B, s.registers(s.b, s.k));
        let d = range('a', self.behind, s.results());
        let c = match self.constant {
            _ if s.sparse() => format!("v{}", 4 + INDEX),
            Some((text, _)) => text.to_owned(),
            None => range('a', 0, s.results()),
        };
        let mut text = format!("v_{} {d}, {a}, {b}, {c}", s.name);
        if let Some([x, y]) = self.scale {
            text = text.replace("v_mfma_", "v_mfma_scale_");
            let (sa, sb) = (4 + SCALE, 5 + SCALE);
            text +=
                &format!(", v{sa}, v{sb} op_sel:[{},{},0] op_sel_hi:[{},{},0]", x & 1, y & 1, x >> 1, y >> 1);
        }
        let controls = ["cbsz", "abid", "blgp"].iter().zip(self.controls).filter(|(_, value)| *value != 0);
        let f64_signs = s.a == F64 && self.controls[2] != 0;
        if f64_signs {
            let bit = |n: usize| self.controls[2] >> n & 1;
            return format!("{text} neg:[{},{},{}]", bit(0), bit(1), bit(2));
        }
        text + &controls.map(|(name, value)| format!(" {name}:{value}")).collect::<String>()
    }

    /// The code of A(i, k) of a block; `k` counts stored elements.
    fn a(&self, i: usize, k: usize, block: usize) -> u64 {
        let s = &self.shape;
        let (lane, element) = s.place(s.a, s.stored(), i, k, block);
        let [cbsz, abid, _] = self.controls;
        let size = 64 >> cbsz;
        let lane = if s.coded() || s.sparse() || s.a == F64 { lane } else { lane % size + size * abid };
        bits_at(&self.registers[A..], lane, element * s.a.bits(), s.a.bits())
    }

    fn b(&self, k: usize, j: usize, block: usize) -> u64 {
        let s = &self.shape;
        let (lane, element) = s.place(s.b, s.k, j, k, block);
        let lane = match self.controls[2] {
            _ if s.coded() || s.a == F64 => lane,
            1 => lane % 32,
            2 => 32 + lane % 32,
            3 => (lane + 16) % 64,
            n @ 4.. => lane % 16 + 16 * (n - 4),
            _ => lane,
        };
        bits_at(&self.registers[B..], lane, element * s.b.bits(), s.b.bits())
    }

    fn decoded(&self, fnuz: bool) -> Decoded {
        let s = &self.shape;
        let sign = |bit: usize| if s.a == F64 && self.controls[2] >> bit & 1 != 0 { -1.0 } else { 1.0 };
        let all = |k: usize| {
            (0..s.blocks)
                .flat_map(move |block| (0..s.dim).flat_map(move |i| (0..k).map(move |k| (block, i, k))))
        };
        Decoded {
            a: all(s.stored()).map(|(block, i, k)| s.a.value(self.a(i, k, block), fnuz) * sign(0)).collect(),
            b: all(s.k).map(|(block, j, k)| s.b.value(self.b(k, j, block), fnuz) * sign(1)).collect(),
            k: all(s.stored()).map(|(_, i, k)| self.dense_k(i, k)).collect(),
        }
    }

    /// Which k the stored element of A belongs to.
    fn dense_k(&self, i: usize, k: usize) -> usize {
        let s = &self.shape;
        if !s.sparse() {
            return k;
        }
        let (lane, element) = s.place(s.a, s.stored(), i, k, 0);
        let bits = 2 * s.stored() * s.dim / 64;
        let [cbsz, abid, _] = self.controls;
        let set = if cbsz == 0 { abid % (32 / bits) } else { 0 };
        k / 2 * 4 + (self.registers[INDEX][lane] >> (set * bits + 2 * element) & 3) as usize
    }

    /// The exponent of the scales of an element's product; `None` is NaN.
    fn scale(&self, i: usize, j: usize, k: usize) -> Option<i32> {
        let Some(bytes) = self.scale else { return Some(0) };
        let byte = |operand: usize, at: usize| {
            let word = self.registers[SCALE + operand][k / 32 * self.shape.dim + at];
            let byte = (word >> (8 * bytes[operand]) & 0xFF) as i32;
            (byte != 255).then_some(byte - 127)
        };
        Some(byte(0, i)? + byte(1, j)?)
    }

    /// The products of D(i, j) with their scales, in ascending k.
    fn terms<'a>(
        &'a self,
        values: &'a Decoded,
        [block, i, j]: [usize; 3],
    ) -> impl Iterator<Item = (f64, f64, Option<i32>)> + 'a {
        let s = &self.shape;
        let (row, column) = (block * s.dim + i, block * s.dim + j);
        (0..s.stored()).map(move |n| {
            let at = row * s.stored() + n;
            let k = values.k[at];
            (values.a[at], values.b[column * s.k + k], self.scale(i, j, k))
        })
    }

    /// The bits of D(i, j), f64 excepted.
    fn want(&self, values: &Decoded, fnuz: bool, numerics: MatrixNumerics, at: [usize; 3]) -> u32 {
        let s = &self.shape;
        let (register, lane) = s.result(at[1], at[2], at[0]);
        let c = match self.constant {
            Some((_, value)) if s.a == I8 => value as i32 as u32,
            Some((_, value)) => (value as f32).to_bits(),
            None => self.registers[C + register][lane],
        };
        let terms = self.terms(values, at);
        if s.a == I8 {
            return terms.fold(c as i32, |acc, (x, y, _)| acc.wrapping_add((x * y) as i32)) as u32;
        }
        let c = f32::from_bits(c);
        let terms: Vec<(f64, f64)> =
            terms.map(|(x, y, scale)| (x * scale.map_or(f64::NAN, |n| 2f64.powi(n)), y)).collect();
        let value = if numerics == MatrixNumerics::Fma || matches!(s.a, F32) {
            terms.iter().fold(c, |acc, (x, y)| round_sum(acc, x * y))
        } else {
            exact(s, fnuz, &terms, c)
        };
        if value.is_nan() { 0x7FC0_0000 } else { value.to_bits() }
    }

    fn want64(&self, values: &Decoded, at: [usize; 3]) -> f64 {
        let (register, lane) = self.shape.result(at[1], at[2], at[0]);
        let word = |n: usize| u64::from(self.registers[C + 2 * register + n][lane]);
        let c = self.constant.map_or(f64::from_bits(word(0) | word(1) << 32), |(_, value)| value);
        let c = if self.controls[2] & 4 != 0 { -c } else { c };
        self.terms(values, at).fold(c, |acc, (x, y, _)| x.mul_add(y, acc))
    }
}

/// The values of A and B, a row or column after the other, and which k the elements of A belong to.
struct Decoded {
    a: Vec<f64>,
    b: Vec<f64>,
    k: Vec<usize>,
}

/// `acc + p` rounded once to f32, where a rounding by way of f64 would be a second one.
fn round_sum(acc: f32, p: f64) -> f32 {
    let a = f64::from(acc);
    let sum = a + p;
    let back = sum - a;
    let error = (a - (sum - back)) + (p - back);
    let near = sum as f32;
    if !near.is_finite() || f64::from(near) == sum || error == 0.0 {
        return near;
    }
    // Only a tie between two f32 is decided by what f64 lost.
    let other = if f64::from(near) < sum { near.next_up() } else { near.next_down() };
    let tie = (f64::from(near) - sum).abs() == (f64::from(other) - sum).abs();
    if tie && (error > 0.0) == (other > near) { other } else { near }
}

/// Numbers in units of 2^-90.
const UNIT: i32 = 90;

/// The published model of CDNA3 in fixed point: no significands, only multiples of powers of two.
fn exact(s: &Shape, fnuz: bool, terms: &[(f64, f64)], c: f32) -> f32 {
    let least = |ty: Ty| match ty {
        F16 => -14,
        Fp8 if fnuz => -7,
        Bf8 if fnuz => -15,
        Fp8 => -6,
        Bf8 => -14,
        Fp6 | Fp4 => 0,
        Bf6 => -2,
        _ => -126,
    };
    let exponent = |x: f64, least: i32| {
        if x == 0.0 { least } else { ((x.to_bits() >> 52 & 0x7FF) as i32 - 1023).max(least) }
    };
    let fixed = |x: f64| -> i128 {
        let e = (x.to_bits() >> 52 & 0x7FF) as i32 - 1075 + UNIT;
        let m = i128::from(x.to_bits() & ((1 << 52) - 1) | 1 << 52);
        let m = if x == 0.0 {
            0
        } else if e >= 0 {
            m << e
        } else {
            m >> -e
        };
        if x < 0.0 { -m } else { m }
    };
    let unit = |e: i32| if e + UNIT > 0 { 1i128 << (e + UNIT) } else { 1 };
    let floor = |x: i128, e: i32| x.div_euclid(unit(e)) * unit(e);
    let truncate = |x: i128, e: i32| x / unit(e) * unit(e);
    let sum = |terms: &[(f64, f64)]| {
        let e = |(x, y): &(f64, f64)| {
            if x * y == 0.0 { -126 } else { exponent(*x, least(s.a)) + exponent(*y, least(s.b)) }
        };
        let max = terms.iter().map(e).max().unwrap();
        (terms.iter().map(|(x, y)| truncate(fixed(x * y), max - 24)).sum::<i128>(), max)
    };
    let (group, eight) = match s.a.bits() {
        32 => (4, false),
        16 => (8, false),
        _ => (16, true),
    };
    terms.chunks(group).fold(c, |c, terms| {
        if terms.iter().any(|(x, y)| (x * y).is_nan()) || c.is_nan() {
            return f32::NAN;
        }
        let (total, e) = if eight {
            let half = |odd: usize| sum(&terms.iter().skip(odd).step_by(2).copied().collect::<Vec<_>>());
            let ((even, e0), (odd, e1)) = (half(0), half(1));
            let e = e0.max(e1);
            (floor(even, e - 24) + floor(odd, e - 24), e)
        } else {
            sum(terms)
        };
        let ec = exponent(f64::from(c), -126);
        let max = e.max(ec);
        let c = if eight && ec < max - 25 { 0 } else { floor(fixed(f64::from(c)), max - 24) };
        (floor(total, max - 31) + c) as f32 * 2f32.powi(-UNIT)
    })
}

/// Runs the cases in one kernel and returns the results' registers.
fn execute(cpu: &str, cases: &[Case], numerics: MatrixNumerics, level: Option<Level>) -> Vec<Vec<u32>> {
    let mut body = String::from(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v1, 2, v0\n  s_waitcnt lgkmcnt(0)\n  v_mov_b32 v2, v1\n",
    );
    for case in cases {
        body += "  v_mov_b32 v3, v2\n";
        for r in 0..ALL {
            let register = if r < C { format!("v{}", 4 + r) } else { format!("a{}", r - C) };
            body += &format!("  global_load_dword {register}, v2, s[4:5]\n  v_add_u32 v2, 0x100, v2\n");
        }
        // EXEC does not matter.
        body += &format!(
            "  s_waitcnt vmcnt(0)\n  s_mov_b64 s[6:7], exec\n  s_mov_b64 exec, 5\n  {}\n  {}\n  {}\n  s_mov_b64 exec, s[6:7]\n  s_nop 15\n  s_nop 3\n",
            case.around[0],
            case.text(),
            case.around[1]
        );
        body += &format!("  v_add_u32 v3, {}, v3\n", C * 256);
        for r in 0..32 {
            let r = r + case.behind;
            body += &format!("  global_store_dword v3, a{r}, s[4:5]\n  v_add_u32 v3, 0x100, v3\n");
        }
    }
    let image = assemble(&Assembly { cpu, body: &body, ..Assembly::default() });
    let rig = Rig::new(options(cpu).matrix_numerics(numerics).level(level).threads(Some(1)), &image);
    let data: Vec<u32> = cases.iter().flat_map(|case| case.registers.iter().flatten().copied()).collect();
    let buffer = rig.upload("registers", &data);
    let counters = rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap();
    let instructions = body.matches("mfma").count();
    assert_eq!(counters.mfma, instructions as u64, "{cpu}: every matrix instruction is counted as one");
    let out: Vec<u32> = rig.download(buffer, data.len());
    out.chunks(64 * ALL).map(|case| case[64 * C..].to_vec()).collect()
}

fn check(cpu: &str, cases: &[Case], numerics: MatrixNumerics) {
    let fnuz = cpu == "gfx942";
    let all: Vec<Decoded> = cases.iter().map(|case| case.decoded(fnuz)).collect();
    for level in [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|l| l.available()) {
        let results = execute(cpu, cases, numerics, Some(level));
        for ((case, values), out) in cases.iter().zip(&all).zip(results) {
            let s = &case.shape;
            for (block, i) in (0..s.blocks).flat_map(|b| (0..s.dim).map(move |i| (b, i))) {
                for j in 0..s.dim {
                    let (register, lane) = s.result(i, j, block);
                    let place =
                        || format!("{cpu} {level:?} {numerics} {} block {block} ({i}, {j})", case.text());
                    if s.a == F64 {
                        let word = |n: usize| u64::from(out[64 * (2 * register + n) + lane]);
                        let want = case.want64(values, [block, i, j]);
                        let got = f64::from_bits(word(0) | word(1) << 32);
                        assert!(got == want || got.is_nan() && want.is_nan(), "{}: {got} {want}", place());
                        continue;
                    }
                    let (got, want) =
                        (out[64 * register + lane], case.want(values, fnuz, numerics, [block, i, j]));
                    assert_eq!(got, want, "{}: {} {}", place(), f32::from_bits(got), f32::from_bits(want));
                }
            }
        }
    }
}

fn shapes(cpu: &str) -> impl Iterator<Item = &'static Shape> {
    BOTH.iter().chain(if cpu == "gfx942" { GFX942 } else { GFX950 })
}

const TARGETS: [&str; 2] = ["gfx942", "gfx950"];

#[test]
fn the_tables_name_every_instruction() {
    for cpu in TARGETS {
        let arch = cpu.parse().unwrap();
        let mut have: Vec<String> = ALL_OPS
            .iter()
            .filter(|op| op.is_mfma() && op.info().exists_on(arch))
            .map(|op| op.mnemonic())
            .collect();
        let mut want: Vec<String> = shapes(cpu).map(|s| format!("v_{}", s.name)).collect();
        if cpu == "gfx950" {
            want.extend([16, 32].map(|dim| format!("v_{}", f8f6f4(dim, Fp8, Fp8).name)));
        }
        have.sort();
        want.sort();
        assert_eq!(have, want, "{cpu}");
    }
}

#[test]
fn every_shape_has_the_published_layout() {
    let mut random = Random(1);
    for cpu in TARGETS {
        let cases: Vec<Case> = shapes(cpu).map(|s| Case::new(s, &mut random)).collect();
        check(cpu, &cases, MatrixNumerics::Fma);
    }
}

#[test]
fn all_pairs_of_narrow_formats() {
    let mut random = Random(2);
    let mut cases = vec![];
    for dim in [16, 32] {
        for (n, (a, b)) in CODED.iter().flat_map(|a| CODED.iter().map(move |b| (*a, *b))).enumerate() {
            let plain = Case::new(&f8f6f4(dim, a, b), &mut random);
            let scaled = Case { scale: Some([n % 4, n / 4 % 4]), ..plain.clone() };
            cases.extend([plain, scaled]);
        }
    }
    check("gfx950", &cases, MatrixNumerics::Fma);
}

#[test]
fn scales_reach_the_ends_of_their_range() {
    let mut random = Random(3);
    let mut cases = vec![];
    for dim in [16, 32] {
        for (a, b) in [(Fp8, Fp8), (Bf8, Fp4), (Fp6, Bf6)] {
            let mut case = Case::new(&f8f6f4(dim, a, b), &mut random);
            case.scale = Some([0, 3]);
            for lane in 0..64 {
                // 0 is 2^-127, not off; opposite ends meet, and so do equal ones.
                let ends = [0, 1, 26, 127, 228, 254];
                case.registers[SCALE][lane] = ends[random.next() as usize % 6];
                case.registers[SCALE + 1][lane] = ends[random.next() as usize % 6] << 24;
            }
            cases.push(case.clone());
            // 0xFF is NaN for its row or column, whatever the elements are.
            for lane in 0..64 {
                case.registers[SCALE][lane] = if lane == 5 { 0xFF } else { 127 };
                case.registers[SCALE + 1][lane] = if lane == 40 { 0xFF00_0000 } else { 128 << 24 };
            }
            cases.push(case);
        }
    }
    check("gfx950", &cases, MatrixNumerics::Fma);
}

/// Rows and columns of zeros are what pads a tile; their scales may be anything.
#[test]
fn zeros_and_infinities_are_the_same_at_any_scale() {
    let mut random = Random(5);
    let mut cases = vec![];
    for dim in [16, 32] {
        for (a, b) in [(Fp8, Fp8), (Bf8, Fp4), (Fp4, Bf8), (Fp6, Bf6)] {
            let mut case = Case::new(&f8f6f4(dim, a, b), &mut random);
            case.scale = Some([0, 0]);
            for (operand, (first, ty)) in [(A, a), (B, b)].into_iter().enumerate() {
                for lane in 0..64 {
                    let element = match lane % dim % 4 {
                        0 => 0,
                        1 if ty == Bf8 => 0x7C7C_7C7C,
                        _ => continue,
                    };
                    case.registers[first..first + 8].iter_mut().for_each(|r| r[lane] = element);
                    case.registers[SCALE + operand][lane] = [0, 1, 254][random.next() as usize % 3];
                }
            }
            cases.push(case);
        }
    }
    check("gfx950", &cases, MatrixNumerics::Fma);
}

#[test]
fn controls_move_lanes_and_choose_indices() {
    let mut random = Random(4);
    for cpu in TARGETS {
        let mut cases = vec![];
        for s in shapes(cpu) {
            let mut with = |controls: [usize; 3]| {
                let case = Case::new(s, &mut random);
                cases.push(Case { controls, ..case });
            };
            if s.a == F64 {
                (1..8).for_each(|signs| with([0, 0, signs]));
            } else if s.sparse() {
                (1..4).for_each(|set| with([0, set, 0]));
                with([1, 3, 0]);
            } else if s.blocks > 1 {
                for cbsz in 1..=s.blocks.ilog2() as usize {
                    with([cbsz, (1 << cbsz) - 1, cbsz % 8]);
                }
            } else if s.dim == 16 && matches!(s.a, Bf16 | I8) {
                (1..8).for_each(|pattern| with([0, 0, pattern]));
            }
        }
        check(cpu, &cases, MatrixNumerics::Fma);
    }
}

#[test]
fn nans_fill_their_row_and_column() {
    let mut random = Random(5);
    for cpu in TARGETS {
        let mut cases = vec![];
        for s in shapes(cpu).filter(|s| s.a.nan(false).is_some() && s.b.nan(false).is_some()) {
            let mut case = Case::new(s, &mut random);
            let fnuz = cpu == "gfx942";
            for (first, ty, lane) in [(A, s.a, 1), (B, s.b, 2)] {
                put_bits(&mut case.registers[first..], lane, 0, ty.bits(), ty.nan(fnuz).unwrap());
            }
            if s.sparse() {
                // The first element of A is multiplied by the B that it selects, NaN only if that is element 0.
                put_bits(&mut case.registers[A..], 1, 0, s.a.bits(), 0);
            }
            cases.push(case);
        }
        let results = execute(cpu, &cases, MatrixNumerics::Fma, None);
        for (case, out) in cases.iter().zip(&results) {
            let s = &case.shape;
            for (i, j) in (0..s.dim).flat_map(|i| (0..s.dim).map(move |j| (i, j))) {
                let (register, lane) = s.result(i, j, 0);
                let hit = if s.sparse() {
                    // B(0, 2) is NaN: rows that do not name k = 0 do not see it.
                    j == 2 && case.dense_k(i, 0) == 0
                } else {
                    i == 1 || j == 2
                };
                if s.a == F64 {
                    let high = out[64 * (2 * register + 1) + lane];
                    assert_eq!(high == 0x7FF8_0000, hit, "{cpu} {} ({i}, {j}): {high:#x}", case.text());
                } else {
                    let got = out[64 * register + lane];
                    assert_eq!(got == 0x7FC0_0000, hit, "{cpu} {} ({i}, {j}): {got:#x}", case.text());
                }
            }
        }
    }
}

#[test]
fn c_may_be_a_constant() {
    let mut random = Random(6);
    for cpu in TARGETS {
        let with = |s: &Shape, random: &mut Random| {
            let constant = Some(if s.a == I8 { ("-3", -3.0) } else { ("-4.0", -4.0) });
            Case { constant, ..Case::new(s, random) }
        };
        let cases: Vec<Case> = shapes(cpu).filter(|s| !s.sparse()).map(|s| with(s, &mut random)).collect();
        check(cpu, &cases, MatrixNumerics::Fma);
    }
}

/// Compilers let the two overlap where D has four registers.
#[test]
fn c_is_read_before_d_is_written() {
    let mut random = Random(7);
    for cpu in TARGETS {
        let dense = shapes(cpu).filter(|s| !s.sparse() && s.results() == 4);
        let cases: Vec<Case> = dense.map(|s| Case { behind: 2, ..Case::new(s, &mut random) }).collect();
        assert!(cases.iter().any(|case| case.shape.a == I8));
        check(cpu, &cases, MatrixNumerics::Fma);
    }
}

/// D over a part of C and over both scales: all of these are read before.
#[test]
fn scales_are_read_before_d_is_written() {
    const AGAIN: &str = "s_mov_b64 exec, s[6:7]\n  s_nop 15\n  v_accvgpr_read_b32 v40, a0\n  v_accvgpr_read_b32 v41, a1
  v_accvgpr_read_b32 v42, a2\n  v_accvgpr_read_b32 v43, a3\n  v_mov_b32 v44, v21\n  v_mov_b32 v45, v22\n  s_nop 4
  v_mfma_scale_f32_16x16x128_f8f6f4 v[42:45], v[4:7], v[12:15], v[40:43], v44, v45 op_sel_hi:[0,0,0] cbsz:4 blgp:4
  s_nop 15\n  v_accvgpr_write_b32 a8, v42\n  v_accvgpr_write_b32 a9, v43\n  v_accvgpr_write_b32 a10, v44
  v_accvgpr_write_b32 a11, v45";
    let mut random = Random(9);
    let case = Case::new(&f8f6f4(16, Fp4, Fp4), &mut random);
    let cases = [Case { scale: Some([0, 0]), behind: 4, around: ["", AGAIN], ..case }];
    let out = execute("gfx950", &cases, MatrixNumerics::Fma, None);
    let (apart, over) = (&out[0][..4 * 64], &out[0][4 * 64..8 * 64]);
    assert!(apart == over && apart.iter().any(|x| *x != 0));
}

/// A large D over A and B, as LLVM allocates kernels without C: the same bits as apart from them.
#[test]
fn a_and_b_are_read_before_d_is_written() {
    for (cpu, mnemonic, registers, modifiers) in [
        ("gfx942", "v_mfma_f32_32x32x8_f16", 2, ""),
        ("gfx942", "v_mfma_i32_32x32x16_i8", 2, ""),
        ("gfx950", "v_mfma_f32_32x32x16_bf16", 4, ""),
        ("gfx950", "v_mfma_f32_32x32x64_f8f6f4", 4, " cbsz:4 blgp:4"),
    ] {
        let mfma = |d: usize, a: usize, b: usize| {
            let part = |at| format!("v[{at}:{}]", at + registers - 1);
            format!("  {mnemonic} v[{d}:{}], {}, {}, 0{modifiers}\n", d + 15, part(a), part(b))
        };
        let mut body =
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v1, 2, v0\n  s_waitcnt lgkmcnt(0)\n"
                .to_owned();
        // A and B at v8 and v20, the first and the last registers of D, and again at v40 and v52.
        for r in 0..2 * registers {
            let at = if r < registers { r } else { 12 + r - registers };
            for first in [8, 40] {
                body += &format!("  global_load_dword v{}, v1, s[4:5] offset:{}\n", first + at, 256 * r);
            }
        }
        body += "  s_waitcnt vmcnt(0)\n";
        body += &(mfma(64, 40, 52) + &mfma(8, 8, 20));
        body += "  s_nop 15\n  s_nop 15\n";
        for (n, first) in [64, 8].into_iter().enumerate() {
            for r in 0..16 {
                body += &format!("  v_add_u32 v2, {}, v1\n", 4096 * (n + 1) + 256 * r);
                body += &format!("  global_store_dword v2, v{}, s[4:5]\n", first + r);
            }
        }
        let image = assemble(&Assembly { cpu, body: &body, accum_offset: 128, ..Assembly::default() });
        let rig = Rig::new(options(cpu), &image);
        let mut random = Random(11);
        // Small numbers in every format: no NaN, no sum that is lost.
        let data: Vec<u32> = (0..3 * 1024).map(|_| random.next() & 0x3333_3333).collect();
        let buffer = rig.upload("registers", &data);
        rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap();
        let out = rig.download::<u32>(buffer, data.len());
        let (apart, over) = (&out[1024..2048], &out[2048..]);
        assert!(apart == over && apart.iter().any(|x| *x != 0), "{cpu}: {mnemonic}");
    }
}

#[test]
fn the_exact_mode_is_the_published_model() {
    let mut random = Random(7);
    for cpu in TARGETS {
        let mut cases: Vec<Case> = shapes(cpu).map(|s| Case::new(s, &mut random)).collect();
        for n in 0..3 {
            for s in shapes(cpu).filter(|s| s.dim == 16 && s.blocks == 1 && s.a != F64 && s.a != I8) {
                // C far above, near and far below the products, and products that cancel.
                let mut case = Case::new(s, &mut random);
                for lane in 0..64 {
                    for r in 0..4 {
                        let c = random.unit() * 2f32.powi([20, 2, -24][n] + (random.next() % 8) as i32);
                        case.registers[C + r][lane] = c.to_bits();
                    }
                }
                cases.push(case);
            }
        }
        if cpu == "gfx950" {
            for (a, b) in [(Fp8, Fp8), (Bf8, Fp4), (Bf6, Fp6)] {
                let case = Case::new(&f8f6f4(16, a, b), &mut random);
                cases.push(case);
            }
        }
        check(cpu, &cases, MatrixNumerics::Cdna3Exact);
    }
}

/// One element of D: A's row 0 and B's column 0, the rest is zero.
fn one(
    cpu: &str,
    name: &str,
    a: &[f64],
    b: &[f64],
    c: f32,
    numerics: MatrixNumerics,
    around: [&'static str; 2],
) -> f32 {
    let s = shapes(cpu).find(|s| s.name == name).unwrap();
    let mut case = Case::new(s, &mut Random(0));
    case.registers.iter_mut().for_each(|r| *r = [0; 64]);
    case.around = around;
    for (first, ty, values) in [(A, s.a, a), (B, s.b, b)] {
        for (k, x) in values.iter().enumerate() {
            let code = (0..1u64 << ty.bits().min(16)).find(|code| {
                let bits = if ty.bits() == 32 { code << 16 } else { *code };
                ty.value(bits, cpu == "gfx942").to_bits() == x.to_bits()
            });
            let code = code.unwrap_or_else(|| panic!("{x} is no {ty:?}"));
            let bits = if ty.bits() == 32 { code << 16 } else { code };
            let (lane, element) = s.place(ty, s.k, 0, k, 0);
            put_bits(&mut case.registers[first..], lane, element * ty.bits(), ty.bits(), bits);
        }
    }
    case.registers[C][0] = c.to_bits();
    f32::from_bits(execute(cpu, &[case], numerics, None)[0][0])
}

#[test]
fn the_published_example_gives_the_published_results() {
    use MatrixNumerics::{Cdna3Exact, Fma};
    let (a, b, c) = ([-8192.0, -0.5, -0.25, -0.125], [1024.0, 1.0, 1.0, 1.0], 8_388_608.0);
    let run = |name, numerics| one("gfx942", name, &a, &b, c, numerics, [""; 2]);
    assert_eq!(run("mfma_f32_16x16x16_f16", Cdna3Exact), -0.5);
    assert_eq!(run("mfma_f32_16x16x16_bf16", Cdna3Exact), -0.5);
    assert_eq!(run("mfma_f32_16x16x32_bf8_bf8", Cdna3Exact), -1.0);
    assert_eq!(run("mfma_f32_16x16x4_f32", Cdna3Exact), -0.875);
    assert_eq!(run("mfma_f32_16x16x16_f16", Fma), -0.875);
    // Products of 2^128 are infinite before they meet their opposites.
    let big = 2f64.powi(100);
    assert_eq!(
        one("gfx942", "mfma_f32_16x16x16_bf16", &[big], &[2f64.powi(27)], 0.0, Cdna3Exact, [""; 2]),
        2f32.powi(127)
    );
    assert!(
        one("gfx942", "mfma_f32_16x16x16_bf16", &[big, -big], &[big, big], 0.0, Cdna3Exact, [""; 2]).is_nan()
    );
    // Denormal results.
    let tiny = one(
        "gfx942",
        "mfma_f32_16x16x16_bf16",
        &[2f64.powi(-80)],
        &[1.5 * 2f64.powi(-60)],
        0.0,
        Cdna3Exact,
        [""; 2],
    );
    assert_eq!(tiny, 1.5 * 2f32.powi(-140));
}

#[test]
fn denormals_follow_mode_only_as_f32_inputs() {
    use MatrixNumerics::{Cdna3Exact, Fma};
    let flush = [
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 0",
        "s_nop 0\n  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 15",
    ];
    let (tiny, huge) = (2f64.powi(-130), 2f64.powi(100));
    let f32s = |around| one("gfx942", "mfma_f32_16x16x4_f32", &[tiny], &[huge], 0.0, Fma, around);
    assert_eq!(f32s([""; 2]), 2f32.powi(-30));
    assert_eq!(f32s(flush), 0.0);
    for numerics in [Fma, Cdna3Exact] {
        let run = |name, a: &[f64], b: &[f64], c| one("gfx942", name, a, b, c, numerics, flush);
        assert_eq!(run("mfma_f32_16x16x16_bf16", &[tiny], &[huge], 0.0), 2f32.powi(-30));
        assert_eq!(run("mfma_f32_16x16x8_xf32", &[tiny], &[huge], 0.0), 2f32.powi(-30));
        assert_eq!(run("mfma_f32_16x16x16_f16", &[2f64.powi(-24)], &[2f64.powi(-24)], 0.0), 2f32.powi(-48));
        // C and D.
        assert_eq!(run("mfma_f32_16x16x4_f32", &[0.0], &[0.0], 2f32.powi(-140)), 2f32.powi(-140));
        assert_eq!(run("mfma_f32_16x16x16_f16", &[0.0], &[0.0], 2f32.powi(-149)), 2f32.powi(-149));
    }
}

#[test]
fn overflow_is_clamped_where_mode_says_so() {
    use MatrixNumerics::{Cdna3Exact, Fma};
    let clamp = [
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1",
        "s_nop 0\n  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0",
    ];
    let big = 2f64.powi(100);
    for numerics in [Fma, Cdna3Exact] {
        let run = |a: &[f64], around| {
            one("gfx942", "mfma_f32_16x16x16_bf16", a, &[big, big], 1.0, numerics, around)
        };
        assert_eq!(run(&[big], [""; 2]), f32::INFINITY);
        assert_eq!(run(&[big], clamp), f32::MAX);
        assert_eq!(run(&[-big], clamp), f32::MIN);
        // What was infinite stays so.
        assert_eq!(run(&[f64::NEG_INFINITY], clamp), f32::NEG_INFINITY);
    }
    let s = BOTH.iter().find(|s| s.name == "mfma_i32_16x16x32_i8").unwrap();
    let mut case = Case::new(s, &mut Random(8));
    case.around = clamp;
    let out = &execute("gfx942", std::slice::from_ref(&case), Fma, None)[0];
    let values = case.decoded(true);
    for (i, j) in (0..16).flat_map(|i| (0..16).map(move |j| (i, j))) {
        let (register, lane) = s.result(i, j, 0);
        let sum: i64 = case.terms(&values, [0, i, j]).map(|(x, y, _)| (x * y) as i64).sum();
        let want = (i64::from(case.registers[C + register][lane] as i32) + sum)
            .clamp(i32::MIN.into(), i32::MAX.into());
        assert_eq!(i64::from(out[64 * register + lane] as i32), want);
    }
}

/// The one thing that the kernel with this instruction cannot do.
fn refused(cpu: &str, instruction: &str) -> Option<String> {
    // As many registers as VGPRs: none beyond v63.
    let body = format!("  {instruction}");
    let image = assemble(&Assembly { cpu, body: &body, vgprs: 64, ..Assembly::default() });
    let rig = Rig::new(options(cpu), &image);
    match rig.launch("test", 1, 64, &Args::new().push(0u64)) {
        Ok(_) => None,
        Err(fault @ (Fault::Illegal { .. } | Fault::Register { .. })) => Some(fault.to_string()),
        Err(fault) => panic!("{instruction}: {fault}"),
    }
}

#[test]
fn illegal_operands_are_named() {
    // The assembler lets these through; the hardware's result would be anything.
    for (cpu, instruction, why) in [
        ("gfx942", "v_smfmac_f32_32x32x16_f16 v[0:15], v[20:21], v[24:27], v3", "overlaps the index"),
        (
            "gfx942",
            "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1",
            "blocks that there are not",
        ),
        (
            "gfx942",
            "v_mfma_f32_16x16x4_4b_f16 v[0:15], v[20:21], v[22:23], v[0:15] cbsz:1 abid:2",
            "blocks that there are not",
        ),
        // 6 registers reach one past the last of 64, 8 two.
        ("gfx950", "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[58:63], v[10:13], v[0:3] cbsz:2 blgp:4", ""),
        (
            "gfx950",
            "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[60:65], v[10:13], v[0:3] cbsz:2 blgp:4",
            "v[60:65] is out of range",
        ),
        (
            "gfx950",
            "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[10:13], v[58:65], v[0:3] cbsz:4",
            "v[58:65] is out of range",
        ),
        // Small results may overlap: the compiler makes use of it.
        ("gfx942", "v_mfma_f32_16x16x16_f16 v[0:3], v[0:1], v[2:3], v[0:3]", ""),
    ] {
        let got = refused(cpu, instruction);
        match (got, why) {
            (None, "") => {}
            (Some(text), why) if !why.is_empty() => assert!(text.contains(why), "{instruction}: {text}"),
            (got, _) => panic!("{instruction}: {got:?}"),
        }
    }
}
