//! Dense matrix instructions, element by element, against the published layouts and a plain triple loop.

#![allow(clippy::needless_range_loop)] // registers and lanes are numbers here

mod common;

use common::{Args, Assembly, Random, Rig, assemble, options};
use hk_emu::Level;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Ty {
    F32,
    Xf32,
    F16,
    Bf16,
    I8,
    Fp8,
    Bf8,
    F64,
}

impl Ty {
    fn bits(self) -> usize {
        match self {
            Ty::F64 => 64,
            Ty::F32 | Ty::Xf32 => 32,
            Ty::F16 | Ty::Bf16 => 16,
            Ty::I8 | Ty::Fp8 | Ty::Bf8 => 8,
        }
    }

    /// A random element that is no NaN and no infinity: its bits.
    fn random(self, r: &mut Random) -> u64 {
        match self {
            Ty::F64 => (f64::from(r.unit()) * 3.0).to_bits(),
            Ty::F32 | Ty::Xf32 => u64::from((r.unit() * 3.0).to_bits()),
            Ty::Bf16 => u64::from((r.unit() * 3.0).to_bits() >> 16),
            // From subnormals to 2, either sign.
            Ty::F16 => u64::from(r.next() & 0xBFFF),
            Ty::I8 => u64::from(r.next() & 0xFF),
            Ty::Fp8 | Ty::Bf8 => u64::from([r.next() & 0x7B, r.next() & 0x7B | 0x81][r.next() as usize % 2]),
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
            Ty::F64 => f64::from_bits(bits),
            Ty::F32 => f64::from(f32::from_bits(bits as u32)),
            Ty::Xf32 => f64::from(f32::from_bits(bits as u32 >> 13 << 13)),
            Ty::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
            Ty::F16 => small(5, 10, 15),
            Ty::I8 => f64::from(bits as u8 as i8),
            Ty::Fp8 => small(4, 3, if fnuz { 8 } else { 7 }),
            Ty::Bf8 => small(5, 2, if fnuz { 16 } else { 15 }),
        }
    }
}

struct Shape {
    name: &'static str,
    m: usize,
    n: usize,
    k: usize,
    blocks: usize,
    a: Ty,
    b: Ty,
}

const fn shape(name: &'static str, m: usize, n: usize, k: usize, blocks: usize, a: Ty, b: Ty) -> Shape {
    Shape { name, m, n, k, blocks, a, b }
}

const BOTH: &[Shape] = &[
    shape("f32_32x32x1_2b_f32", 32, 32, 1, 2, Ty::F32, Ty::F32),
    shape("f32_16x16x1_4b_f32", 16, 16, 1, 4, Ty::F32, Ty::F32),
    shape("f32_4x4x1_16b_f32", 4, 4, 1, 16, Ty::F32, Ty::F32),
    shape("f32_32x32x2_f32", 32, 32, 2, 1, Ty::F32, Ty::F32),
    shape("f32_16x16x4_f32", 16, 16, 4, 1, Ty::F32, Ty::F32),
    shape("f32_32x32x4_2b_f16", 32, 32, 4, 2, Ty::F16, Ty::F16),
    shape("f32_16x16x4_4b_f16", 16, 16, 4, 4, Ty::F16, Ty::F16),
    shape("f32_4x4x4_16b_f16", 4, 4, 4, 16, Ty::F16, Ty::F16),
    shape("f32_32x32x8_f16", 32, 32, 8, 1, Ty::F16, Ty::F16),
    shape("f32_16x16x16_f16", 16, 16, 16, 1, Ty::F16, Ty::F16),
    shape("f32_32x32x4_2b_bf16", 32, 32, 4, 2, Ty::Bf16, Ty::Bf16),
    shape("f32_16x16x4_4b_bf16", 16, 16, 4, 4, Ty::Bf16, Ty::Bf16),
    shape("f32_4x4x4_16b_bf16", 4, 4, 4, 16, Ty::Bf16, Ty::Bf16),
    shape("f32_32x32x8_bf16", 32, 32, 8, 1, Ty::Bf16, Ty::Bf16),
    shape("f32_16x16x16_bf16", 16, 16, 16, 1, Ty::Bf16, Ty::Bf16),
    shape("i32_32x32x4_2b_i8", 32, 32, 4, 2, Ty::I8, Ty::I8),
    shape("i32_16x16x4_4b_i8", 16, 16, 4, 4, Ty::I8, Ty::I8),
    shape("i32_4x4x4_16b_i8", 4, 4, 4, 16, Ty::I8, Ty::I8),
    shape("i32_32x32x16_i8", 32, 32, 16, 1, Ty::I8, Ty::I8),
    shape("i32_16x16x32_i8", 16, 16, 32, 1, Ty::I8, Ty::I8),
    shape("f32_16x16x32_fp8_fp8", 16, 16, 32, 1, Ty::Fp8, Ty::Fp8),
    shape("f32_16x16x32_fp8_bf8", 16, 16, 32, 1, Ty::Fp8, Ty::Bf8),
    shape("f32_16x16x32_bf8_fp8", 16, 16, 32, 1, Ty::Bf8, Ty::Fp8),
    shape("f32_16x16x32_bf8_bf8", 16, 16, 32, 1, Ty::Bf8, Ty::Bf8),
    shape("f32_32x32x16_fp8_fp8", 32, 32, 16, 1, Ty::Fp8, Ty::Fp8),
    shape("f32_32x32x16_fp8_bf8", 32, 32, 16, 1, Ty::Fp8, Ty::Bf8),
    shape("f32_32x32x16_bf8_fp8", 32, 32, 16, 1, Ty::Bf8, Ty::Fp8),
    shape("f32_32x32x16_bf8_bf8", 32, 32, 16, 1, Ty::Bf8, Ty::Bf8),
    shape("f64_16x16x4_f64", 16, 16, 4, 1, Ty::F64, Ty::F64),
    shape("f64_4x4x4_4b_f64", 4, 4, 4, 4, Ty::F64, Ty::F64),
];

const GFX942: &[Shape] = &[
    shape("f32_16x16x8_xf32", 16, 16, 8, 1, Ty::Xf32, Ty::Xf32),
    shape("f32_32x32x4_xf32", 32, 32, 4, 1, Ty::Xf32, Ty::Xf32),
];

const GFX950: &[Shape] = &[
    shape("f32_32x32x16_f16", 32, 32, 16, 1, Ty::F16, Ty::F16),
    shape("f32_16x16x32_f16", 16, 16, 32, 1, Ty::F16, Ty::F16),
    shape("f32_32x32x16_bf16", 32, 32, 16, 1, Ty::Bf16, Ty::Bf16),
    shape("f32_16x16x32_bf16", 16, 16, 32, 1, Ty::Bf16, Ty::Bf16),
    shape("i32_32x32x32_i8", 32, 32, 32, 1, Ty::I8, Ty::I8),
    shape("i32_16x16x64_i8", 16, 16, 64, 1, Ty::I8, Ty::I8),
];

/// Lane and element of A(i, k) or B(k, i) of a block.
fn input_place(
    dim: usize,
    k_total: usize,
    blocks: usize,
    i: usize,
    k: usize,
    block: usize,
) -> (usize, usize) {
    let per_lane = k_total / (64 / (dim * blocks));
    (block * dim + k / per_lane * dim * blocks + i, k % per_lane)
}

/// Register (pair, for f64) and lane of D(i, j) of a block.
fn output_place(s: &Shape, i: usize, j: usize, block: usize) -> (usize, usize) {
    let r = 64 / s.n;
    if s.a == Ty::F64 {
        let p = 64usize.div_ceil(s.m * s.n);
        return (block * (s.m * s.n / 64) + i / r, (block % p) * s.n + i % r * p * s.n + j);
    }
    let p = 64usize.div_ceil(s.m * s.n / 4);
    (block * (s.m * s.n / 64) + i / (4 * r) * 4 + i % 4, (block % p) * s.n + i / 4 % r * p * s.n + j)
}

fn put(registers: &mut [[u32; 64]], bits: usize, lane: usize, element: usize, value: u64) {
    if bits == 64 {
        registers[2 * element][lane] = value as u32;
        registers[2 * element + 1][lane] = (value >> 32) as u32;
    } else {
        let per = 32 / bits;
        registers[element / per][lane] |= (value as u32) << (bits * (element % per));
    }
}

fn check(cpu: &str, s: &Shape, constant_c: bool) {
    let mut random = Random(s.m as u64 * 1000 + s.k as u64);
    let fnuz = cpu == "gfx942";
    let words = |dim: usize, ty: Ty| dim * s.k * s.blocks * ty.bits() / 2048;
    let (na, nb) = (words(s.m, s.a), words(s.n, s.b));
    let wide = if s.a == Ty::F64 { 2 } else { 1 };
    let nd = s.m * s.n * s.blocks / 64 * wide;
    let mut registers = vec![[0u32; 64]; na + nb + nd];
    let mut a = vec![0.0; s.blocks * s.m * s.k];
    let mut b = vec![0.0; s.blocks * s.k * s.n];
    for block in 0..s.blocks {
        for k in 0..s.k {
            for i in 0..s.m {
                let bits = s.a.random(&mut random);
                let (lane, element) = input_place(s.m, s.k, s.blocks, i, k, block);
                put(&mut registers[..na], s.a.bits(), lane, element, bits);
                a[(block * s.m + i) * s.k + k] = s.a.value(bits, fnuz);
            }
            for j in 0..s.n {
                let bits = s.b.random(&mut random);
                let (lane, element) = input_place(s.n, s.k, s.blocks, j, k, block);
                put(&mut registers[na..na + nb], s.b.bits(), lane, element, bits);
                b[(block * s.k + k) * s.n + j] = s.b.value(bits, fnuz);
            }
        }
    }
    for r in 0..nd / wide {
        for lane in 0..64 {
            let at = na + nb + r * wide;
            match s.a {
                Ty::F64 => {
                    let v = f64::from(random.unit()).to_bits();
                    (registers[at][lane], registers[at + 1][lane]) = (v as u32, (v >> 32) as u32);
                }
                Ty::I8 => registers[at][lane] = random.next(),
                _ => registers[at][lane] = random.unit().to_bits(),
            }
        }
    }
    // Registers come from memory one by one; D goes where C was.
    let mut body = String::from(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v1, 2, v0\n  v_mov_b32 v2, v1\n  s_waitcnt lgkmcnt(0)\n",
    );
    let (va, vb) = (4, 4 + 16);
    let slot = |i: usize| {
        if i < na {
            format!("v{}", va + i)
        } else if i < na + nb {
            format!("v{}", vb + i - na)
        } else {
            format!("a{}", i - na - nb)
        }
    };
    for i in 0..na + nb + nd {
        body += &format!("  global_load_dword {}, v2, s[4:5]\n  v_add_u32 v2, 0x100, v2\n", slot(i));
    }
    let range = |letter: char, first: usize, n: usize| {
        if n == 1 { format!("{letter}{first}") } else { format!("{letter}[{first}:{}]", first + n - 1) }
    };
    let d = range('a', 0, nd);
    let c = if constant_c { "1.0".to_owned() } else { d.clone() };
    let c = if constant_c && s.a == Ty::I8 { "-3".to_owned() } else { c };
    body += &format!(
        "  s_waitcnt vmcnt(0)\n  v_mfma_{} {d}, {}, {}, {c}\n  s_nop 15\n  s_nop 15\n  v_mov_b32 v2, v1\n",
        s.name,
        range('v', va, na),
        range('v', vb, nb)
    );
    for i in 0..nd {
        body += &format!("  global_store_dword v2, a{i}, s[4:5]\n  v_add_u32 v2, 0x100, v2\n");
    }
    let image = assemble(&Assembly { cpu, body: &body, ..Assembly::default() });
    let data: Vec<u32> = registers.iter().flatten().copied().collect();
    for level in [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|l| l.available()) {
        let rig = Rig::new(options(cpu).level(Some(level)), &image);
        let buffer = rig.upload("registers", &data);
        rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap();
        let out: Vec<u32> = rig.download(buffer, 64 * nd);
        for block in 0..s.blocks {
            for i in 0..s.m {
                for j in 0..s.n {
                    let (register, lane) = output_place(s, i, j, block);
                    let word = |r: usize| registers[na + nb + r][lane];
                    let x = |k: usize| a[(block * s.m + i) * s.k + k];
                    let y = |k: usize| b[(block * s.k + k) * s.n + j];
                    let place = format!("{cpu} {level:?} {} block {block} ({i}, {j})", s.name);
                    match s.a {
                        Ty::F64 => {
                            let c = u64::from(word(2 * register)) | u64::from(word(2 * register + 1)) << 32;
                            let c = if constant_c { 1.0 } else { f64::from_bits(c) };
                            let want = (0..s.k).fold(c, |acc, k| x(k).mul_add(y(k), acc));
                            let got = u64::from(out[64 * 2 * register + lane])
                                | u64::from(out[64 * (2 * register + 1) + lane]) << 32;
                            assert_eq!(f64::from_bits(got), want, "{place}");
                        }
                        Ty::I8 => {
                            let c = if constant_c { -3 } else { word(register) as i32 };
                            let want = (0..s.k).fold(c, |acc, k| acc.wrapping_add((x(k) * y(k)) as i32));
                            assert_eq!(out[64 * register + lane] as i32, want, "{place}");
                        }
                        _ => {
                            let c = if constant_c { 1.0 } else { f32::from_bits(word(register)) };
                            let want = (0..s.k).fold(c, |acc, k| (x(k) as f32).mul_add(y(k) as f32, acc));
                            assert_eq!(f32::from_bits(out[64 * register + lane]), want, "{place}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_dense_shape_has_the_published_layout() {
    for (cpu, own) in [("gfx942", GFX942), ("gfx950", GFX950)] {
        for s in BOTH.iter().chain(own) {
            check(cpu, s, false);
        }
    }
}

#[test]
fn c_may_be_a_constant() {
    for s in BOTH.iter().filter(|s| s.m == 16 && s.k == 16 || s.a == Ty::F64 || s.name == "i32_16x16x32_i8") {
        check("gfx942", s, true);
    }
}
