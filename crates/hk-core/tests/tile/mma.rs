//! Products through `hk/matrix.h` and `hk/mma.h`: every instruction, every pair of types, against products in f64 and
//! the places of elements that are written here.
use super::{Random, streams};
use crate::common;
use bytemuck::{Pod, Zeroable};
use hk_core::{
    Arch, CodeObjects, E8M0, Fp4, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Fp8E5M2Fnuz, GlobalLayout, KernelRef,
    LaunchConfig, Stream, bf16, f16,
};
use std::sync::LazyLock;

static MMA: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("mma"));

/// The parameters of the kernels in `tests/hip/mma.hip`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    w: GlobalLayout,
    x: GlobalLayout,
    c: GlobalLayout,
    d: GlobalLayout,
    w_scale: GlobalLayout,
    x_scale: GlobalLayout,
    places: GlobalLayout,
}

/// The type of an operand.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Type {
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
}
use Type::{Bf6, Bf8, Bf16, F16, F32, Fp4 as F4, Fp6, Fp8, I8, Xf32};

const FORMATS: [Type; 5] = [Fp8, Bf8, Fp6, Bf6, F4];

impl Type {
    /// As in the names of kernels.
    fn name(self) -> &'static str {
        match self {
            F32 => "f32",
            Xf32 => "Xf32",
            F16 => "f16",
            Bf16 => "bf16",
            I8 => "I8",
            Fp8 => "Fp8",
            Bf8 => "Bf8",
            Fp6 => "Fp6",
            Bf6 => "Bf6",
            F4 => "Fp4",
        }
    }

    fn bits(self) -> usize {
        match self {
            F32 | Xf32 => 32,
            F16 | Bf16 => 16,
            I8 | Fp8 | Bf8 => 8,
            Fp6 | Bf6 => 6,
            F4 => 4,
        }
    }

    /// What a product takes the code for.
    fn value(self, code: u32, arch: Arch) -> f64 {
        // Exponent and mantissa, then the bias; subnormal without an exponent.
        let small = |bits: u32, mantissa: u32, bias: i32| {
            let (sign, rest) = (code >> (bits - 1), code & ((1 << (bits - 1)) - 1));
            let (exponent, fraction) = ((rest >> mantissa) as i32, rest & ((1 << mantissa) - 1));
            let unit = 2f64.powi(exponent.max(1) - bias - mantissa as i32);
            let whole = f64::from(fraction + if exponent > 0 { 1 << mantissa } else { 0 });
            if sign == 1 { -whole * unit } else { whole * unit }
        };
        let fnuz = arch == Arch::Gfx942;
        match self {
            F32 => f32::from_bits(code).into(),
            Xf32 => f32::from_bits(code & !0x1fff).into(),
            F16 => f16::from_bits(code as u16).into(),
            Bf16 => bf16::from_bits(code as u16).into(),
            I8 => f64::from(code as u8 as i8),
            Fp8 if fnuz => Fp8E4M3Fnuz(code as u8).to_f32().into(),
            Fp8 => Fp8E4M3(code as u8).to_f32().into(),
            Bf8 if fnuz => Fp8E5M2Fnuz(code as u8).to_f32().into(),
            Bf8 => Fp8E5M2(code as u8).to_f32().into(),
            Fp6 => small(6, 3, 1),
            Bf6 => small(6, 2, 3),
            F4 => Fp4::from_bits(code as u8).to_f32().into(),
        }
    }

    /// The code of a value that the type has.
    fn code(self, value: f64, arch: Arch) -> u32 {
        match self {
            F32 | Xf32 => (value as f32).to_bits(),
            F16 => f16::from_f64(value).to_bits().into(),
            Bf16 => bf16::from_f64(value).to_bits().into(),
            _ => (0..1 << self.bits()).find(|&c| self.value(c, arch) == value).unwrap(),
        }
    }

    /// Codes of small values, whose sums of products are exact.
    fn exact(self, arch: Arch) -> Vec<u32> {
        match self {
            F32 | Xf32 | F16 | Bf16 => (-8..=8).map(|v| self.code(v.into(), arch)).collect(),
            _ => {
                let small = |v: f64| v.abs() <= 8.0 && (2.0 * v).fract() == 0.0;
                (0..1 << self.bits()).filter(|&c| small(self.value(c, arch))).collect()
            }
        }
    }

    /// Any finite code, of types of two bytes and more between 2^-12 and 2^12.
    fn any(self, random: &mut Random, arch: Arch) -> u32 {
        let exponent = random.below(24) as i32 - 12;
        let value =
            (1.0 + random.unit()) * 2f64.powi(exponent) * if random.below(2) == 0 { 1.0 } else { -1.0 };
        match self {
            F32 | Xf32 => (value as f32).to_bits(),
            F16 | Bf16 => self.code(value, arch),
            _ => loop {
                let code = random.below(1 << self.bits()) as u32;
                if self.value(code, arch).is_finite() {
                    return code;
                }
            },
        }
    }
}

/// An operand's or a result's elements in lanes.
fn lanes(dim: usize) -> usize {
    64 / dim
}

/// Row and column of element `i` of a lane's operand.
fn operand_place(bits: usize, dim: usize, cols: usize, lane: usize, i: usize) -> (usize, usize) {
    let (group, each) = (lane / dim, cols / lanes(dim));
    // Operands of 32 bytes are in two halves.
    let run = if each * bits == 256 { each / 2 } else { each };
    (lane % dim, i / run * (run * lanes(dim)) + group * run + i % run)
}

/// n and m of a lane's sum `i`.
fn sum_place(dim: usize, lane: usize, i: usize) -> (usize, usize) {
    match dim {
        16 => (4 * (lane / 16) + i, lane % 16),
        _ => (8 * (i / 4) + 4 * (lane / 32) + i % 4, lane % 32),
    }
}

/// Matrices of codes, w and x [dim, cols], and c [dim, dim] as values; with powers of two for each row and 32 columns.
struct Case {
    w: Vec<u32>,
    x: Vec<u32>,
    c: Vec<f64>,
    scales: Option<[Vec<u8>; 2]>,
}

/// The product of an instruction.
#[derive(Clone, Copy)]
struct Shape {
    w: Type,
    x: Type,
    dim: usize,
    cols: usize,
}

impl Shape {
    fn new(w: Type, x: Type, dim: usize, cols: usize) -> Shape {
        Shape { w, x, dim, cols }
    }

    fn kernel(self, kind: &str) -> String {
        format!("{kind}_{}_{}_{}x{}", self.w.name(), self.x.name(), self.dim, self.cols)
    }

    /// Matrices of codes from `w` and `x`.
    fn case(self, w: impl FnMut() -> u32, x: impl FnMut() -> u32) -> Case {
        let codes = self.dim * self.cols;
        Case {
            w: std::iter::repeat_with(w).take(codes).collect(),
            x: std::iter::repeat_with(x).take(codes).collect(),
            c: (0..self.dim * self.dim).map(|i| i as f64 - 100.0).collect(),
            scales: None,
        }
    }

    /// Small multiples of 1/2, whose sums are exact; then a single 1 in each column of w, and of x.
    fn exact_cases(self, random: &mut Random, arch: Arch) -> Vec<Case> {
        let (ws, xs) = (self.w.exact(arch), self.x.exact(arch));
        let [(w_one, w_zero), (x_one, x_zero)] =
            [self.w, self.x].map(|t| (t.code(1.0, arch), t.code(0.0, arch)));
        let mut cases: Vec<Case> = vec![];
        for _ in 0..2 {
            let w: Vec<u32> = (0..self.dim * self.cols).map(|_| ws[random.below(ws.len())]).collect();
            let mut w = w.into_iter();
            cases.push(self.case(|| w.next().unwrap(), || xs[random.below(xs.len())]));
        }
        for k in 0..self.cols {
            let at = (7 * k + 3) % self.dim * self.cols + k;
            let mut of_w = self.case(|| w_zero, || xs[random.below(xs.len())]);
            of_w.w[at] = w_one;
            let mut of_x = self.case(|| ws[random.below(ws.len())], || x_zero);
            of_x.x[at] = x_one;
            cases.extend([of_w, of_x]);
        }
        cases
    }

    /// Any values.
    fn any_cases(self, random: &mut Random, arch: Arch) -> Vec<Case> {
        let mut any = |of: Type| (0..self.dim * self.cols).map(|_| of.any(random, arch)).collect::<Vec<_>>();
        (0..2).map(|_| Case { w: any(self.w), x: any(self.x), ..self.case(|| 0, || 0) }).collect()
    }

    fn any_scales(self, random: &mut Random, around: usize) -> [Vec<u8>; 2] {
        [0, 1]
            .map(|_| (0..self.dim * self.cols / 32).map(|_| (around + random.below(16) - 8) as u8).collect())
    }

    /// The result, and the sum of all magnitudes.
    fn reference(self, case: &Case, arch: Arch) -> Vec<(f64, f64)> {
        let Shape { w, x, dim, cols } = self;
        let scale = |of: usize, row: usize, k: usize| match &case.scales {
            Some(s) => f64::from(E8M0(s[of][row * (cols / 32) + k / 32]).to_f32()),
            None => 1.0,
        };
        let values = |t: Type, codes: &[u32], of: usize| {
            let all = codes.iter().enumerate();
            all.map(|(i, &c)| t.value(c, arch) * scale(of, i / cols, i % cols)).collect::<Vec<_>>()
        };
        let (ws, xs) = (values(w, &case.w, 0), values(x, &case.x, 1));
        let mut d: Vec<_> = case.c.iter().map(|&c| (c, c.abs())).collect();
        for k in 0..cols {
            // Most are zero in some cases.
            let there = |v: &[f64]| (0..dim).filter(|r| v[r * cols + k] != 0.0).collect::<Vec<_>>();
            let of_x = there(&xs);
            for n in there(&ws) {
                for m in &of_x {
                    let product = ws[n * cols + k] * xs[m * cols + k];
                    let sum = &mut d[n * dim + m];
                    *sum = (sum.0 + product, sum.1 + product.abs());
                }
            }
        }
        d
    }

    fn words(self, of: Type) -> usize {
        self.cols / lanes(self.dim) * of.bits() / 32
    }

    /// A matrix of quantized values, packed in the dwords of lanes.
    fn packed(self, of: Type, codes: &[u32]) -> Vec<u32> {
        let words = self.words(of);
        let mut packed = vec![0u32; 64 * words];
        for lane in 0..64 {
            for i in 0..self.cols / lanes(self.dim) {
                let (row, col) = operand_place(of.bits(), self.dim, self.cols, lane, i);
                let wide = u64::from(codes[row * self.cols + col]) << (i * of.bits() % 32);
                let at = lane * words + i * of.bits() / 32;
                packed[at] |= wide as u32;
                if wide >> 32 != 0 {
                    packed[at + 1] |= (wide >> 32) as u32;
                }
            }
        }
        packed
    }

    /// What lanes have of a matrix [dim, dim].
    fn spread<T: Copy>(self, of: &[T]) -> Vec<T> {
        let each = self.dim * self.dim / 64;
        let places = (0..64 * each).map(|i| sum_place(self.dim, i / each, i % each));
        places.map(|(n, m)| of[n * self.dim + m]).collect()
    }

    /// Runs a kernel, one block for each case; the result as matrices [dim, dim].
    fn run(self, stream: &Stream, kernel: &str, cases: &[Case], bytes: [usize; 2]) -> Vec<Vec<f64>> {
        let integer = self.w == I8;
        let bits = |v: f64| if integer { v as i32 as u32 } else { (v as f32).to_bits() };
        let w: Vec<u32> = cases.iter().flat_map(|c| self.packed(self.w, &c.w)).collect();
        let x: Vec<u32> = cases.iter().flat_map(|c| self.packed(self.x, &c.x)).collect();
        let c: Vec<u32> = cases.iter().flat_map(|c| self.spread(&c.c)).map(bits).collect();
        // Lane l has that of row l % dim and block l / dim. Where a byte of a word is taken, others have what must not count.
        let scales = |of: usize| {
            let word = |case: &Case, lane: usize| match &case.scales {
                Some(s) => {
                    let scale = s[of][lane % self.dim * (self.cols / 32) + lane / self.dim];
                    let other = if bytes[of] == 0 { 0 } else { 0x6869_6a6b & !(0xff << (8 * bytes[of])) };
                    other | u32::from(scale) << (8 * bytes[of])
                }
                None => 0,
            };
            cases.iter().flat_map(|case| (0..64).map(move |lane| word(case, lane))).collect::<Vec<u32>>()
        };
        let [w_scale, x_scale] = [scales(0), scales(1)];
        let d = launch(stream, kernel, [&w, &x, &c, &w_scale, &x_scale], c.len(), 1, cases.len()).0;
        let value = |d: u32| if integer { f64::from(d as i32) } else { f64::from(f32::from_bits(d)) };
        let each = self.dim * self.dim / 64;
        let matrix = |d: &[u32]| {
            let mut matrix = vec![f64::NAN; self.dim * self.dim];
            for (i, d) in d.iter().enumerate() {
                let (n, m) = sum_place(self.dim, i / each, i % each);
                matrix[n * self.dim + m] = value(*d);
            }
            matrix
        };
        d.chunks(64 * each).map(matrix).collect()
    }

    fn check(self, stream: &Stream, kernel: &str, cases: &[Case], bytes: [usize; 2], exact: bool) {
        let arch = stream.device().info().arch;
        for (i, (case, got)) in cases.iter().zip(self.run(stream, kernel, cases, bytes)).enumerate() {
            for (at, (got, (want, magnitude))) in got.iter().zip(self.reference(case, arch)).enumerate() {
                let bound = if exact { 0.0 } else { magnitude * self.cols as f64 * 2f64.powi(-23) };
                let (n, m) = (at / self.dim, at % self.dim);
                assert!(
                    (got - want).abs() <= bound || (got.is_nan() && want.is_nan()),
                    "{kernel} on {arch}, case {i}: d[{n}, {m}] is {got}, not {want}"
                );
            }
        }
    }
}

/// Results and places.
fn launch(
    stream: &Stream,
    kernel: &str,
    inputs: [&[u32]; 5],
    results: usize,
    places: usize,
    blocks: usize,
) -> (Vec<u32>, Vec<u32>) {
    let buffers = inputs.map(|i| stream.upload(i).unwrap());
    let mut d = stream.alloc_zeroed::<u32>(results).unwrap();
    let mut at = stream.alloc_zeroed::<u32>(places.max(1)).unwrap();
    let kernel = stream.kernel(KernelRef::new(*MMA, common::leak(kernel.to_owned()))).unwrap();
    let mut launch = stream.launch("mma");
    let mut names = ["w", "x", "c", "w_scale", "x_scale"].into_iter().zip(&buffers).zip(inputs);
    let mut next = || {
        let ((name, buffer), input) = names.next().unwrap();
        launch.input(name, &buffer.view([input.len()]).unwrap()).unwrap()
    };
    let [w, x, c, w_scale, x_scale] = std::array::from_fn(|_| next());
    let params = Params {
        w,
        x,
        c,
        d: launch.output("d", &mut d.view_mut([results]).unwrap()).unwrap(),
        w_scale,
        x_scale,
        places: launch.output("places", &mut at.view_mut([places.max(1)]).unwrap()).unwrap(),
    };
    // SAFETY: the parameters are the kernel's, and each tensor has what its lanes access.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }.unwrap();
    (stream.download(&d).unwrap(), stream.download(&at).unwrap())
}

/// The instructions of one type that a target has, by their columns with 16 rows and with 32.
fn of_one_type(arch: Arch) -> Vec<(Type, usize, usize)> {
    let mut all = vec![(F32, 4, 2), (F16, 16, 8), (Bf16, 16, 8), (I8, 32, 16), (Fp8, 32, 16), (Bf8, 32, 16)];
    match arch {
        Arch::Gfx942 => all.push((Xf32, 8, 4)),
        _ => all.extend([(F16, 32, 16), (Bf16, 32, 16), (I8, 64, 32)]),
    }
    all
}

/// All but those with formats.
fn plain_shapes(arch: Arch) -> Vec<Shape> {
    let one = of_one_type(arch).into_iter();
    let one = one.flat_map(|(t, of_16, of_32)| [Shape::new(t, t, 16, of_16), Shape::new(t, t, 32, of_32)]);
    let mixed = [(Fp8, Bf8), (Bf8, Fp8)].into_iter();
    let mixed = mixed.flat_map(|(w, x)| [Shape::new(w, x, 16, 32), Shape::new(w, x, 32, 16)]);
    one.chain(mixed).collect()
}

/// Those of any two formats.
fn format_shapes() -> impl Iterator<Item = Shape> {
    let pairs = FORMATS.iter().flat_map(|w| FORMATS.iter().map(move |x| (*w, *x)));
    pairs.flat_map(|(w, x)| [Shape::new(w, x, 16, 128), Shape::new(w, x, 32, 64)])
}

#[test]
fn instructions_multiply() {
    for stream in streams() {
        let arch = stream.device().info().arch;
        let mut random = Random(1);
        for shape in plain_shapes(arch) {
            let kernel = shape.kernel("mma");
            shape.check(&stream, &kernel, &shape.exact_cases(&mut random, arch), [0, 0], true);
            let integer = shape.w == I8;
            shape.check(&stream, &kernel, &shape.any_cases(&mut random, arch), [0, 0], integer);
        }
    }
}

#[test]
fn instructions_multiply_any_two_formats() {
    let stream = streams().last().unwrap();
    let arch = stream.device().info().arch;
    assert_eq!(arch, Arch::Gfx950);
    let mut random = Random(2);
    for shape in format_shapes() {
        let kernel = shape.kernel("mma");
        shape.check(&stream, &kernel, &shape.exact_cases(&mut random, arch), [0, 0], true);
        shape.check(&stream, &kernel, &shape.any_cases(&mut random, arch), [0, 0], false);
    }
}

/// A scale belongs to a row and 32 columns; the kernels take byte 1 of w's, and byte 2 of x's.
#[test]
fn scales_are_of_rows_and_blocks() {
    let stream = streams().last().unwrap();
    let arch = stream.device().info().arch;
    let mut random = Random(3);
    for shape in format_shapes() {
        let mut cases = shape.any_cases(&mut random, arch);
        cases[0].scales = Some(shape.any_scales(&mut random, 127));
        // NaN in a row of either.
        let mut scales = shape.any_scales(&mut random, 120);
        (scales[0][5], scales[1][7]) = (255, 255);
        cases[1].scales = Some(scales);
        shape.check(&stream, &shape.kernel("scaled"), &cases, [1, 2], false);
        // The least and the largest scales cancel.
        let mut exact = shape.exact_cases(&mut random, arch);
        exact.truncate(2);
        for (case, scale) in exact.iter_mut().zip([0u8, 254]) {
            let all = vec![scale; shape.dim * shape.cols / 32];
            case.scales = Some([all.clone(), all.iter().map(|s| 254 - s).collect()]);
        }
        shape.check(&stream, &shape.kernel("scaled"), &exact, [1, 2], true);
    }
}

#[test]
fn scales_are_of_any_byte() {
    let stream = streams().last().unwrap();
    let mut random = Random(4);
    for shape in [Shape::new(F4, F4, 16, 128), Shape::new(F4, F4, 32, 64)] {
        let arch = stream.device().info().arch;
        let case = &shape.any_cases(&mut random, arch)[0];
        let mut word = || (0..4).map(|b| (119 + random.below(16) as u32) << (8 * b)).sum();
        let [w_scale, x_scale]: [Vec<u32>; 2] = [0, 1].map(|_| (0..64).map(|_| word()).collect());
        let (w, x) = (shape.packed(F4, &case.w), shape.packed(F4, &case.x));
        let c: Vec<u32> = shape.spread(&case.c).iter().map(|&c| (c as f32).to_bits()).collect();
        let kernel = format!("scale_bytes_{}", shape.dim);
        let (all, _) = launch(&stream, &kernel, [&w, &x, &c, &w_scale, &x_scale], 16 * c.len(), 0, 1);
        for (i, got) in all.chunks(c.len()).enumerate() {
            let of_byte = |words: &[u32], byte: usize| {
                let at = |i: usize| (i % (shape.cols / 32) * shape.dim) + i / (shape.cols / 32);
                (0..64).map(|i| (words[at(i)] >> (8 * byte)) as u8).collect::<Vec<u8>>()
            };
            let scales = Some([of_byte(&w_scale, i / 4), of_byte(&x_scale, i % 4)]);
            let case = Case { w: case.w.clone(), x: case.x.clone(), c: case.c.clone(), scales };
            for (got, (want, magnitude)) in got.iter().zip(shape.spread(&shape.reference(&case, arch))) {
                let got = f64::from(f32::from_bits(*got));
                assert!(
                    (got - want).abs() <= magnitude * 2f64.powi(-17),
                    "{kernel}, bytes {i}: {got}, not {want}"
                );
            }
        }
    }
}

/// On both targets, by the instruction or by bf16.
#[test]
fn mxfp4_multiplies() {
    for stream in streams() {
        let arch = stream.device().info().arch;
        let mut random = Random(5);
        for shape in [Shape::new(F4, F4, 16, 128), Shape::new(F4, F4, 32, 64)] {
            let mut cases = shape.exact_cases(&mut random, arch);
            for case in &mut cases[..2] {
                case.scales = Some(shape.any_scales(&mut random, 127));
            }
            cases.truncate(2);
            let ones = vec![127; shape.dim * shape.cols / 32];
            let mut one_hot = shape.exact_cases(&mut random, arch);
            one_hot.iter_mut().for_each(|c| c.scales = Some([ones.clone(), ones.clone()]));
            let kernel = format!("mxfp4_{}", shape.dim);
            shape.check(&stream, &kernel, &one_hot, [0, 0], true);
            shape.check(&stream, &kernel, &cases, [0, 0], false);
        }
    }
}

#[test]
fn fragments_multiply() {
    for stream in streams() {
        let arch = stream.device().info().arch;
        let mut random = Random(6);
        for (w, x) in
            [(F32, F32), (F16, F16), (Bf16, Bf16), (I8, I8), (Fp8, Fp8), (Fp8, Bf8), (Bf8, Fp8), (Bf8, Bf8)]
        {
            for dim in [16, 32] {
                let frags = if arch == Arch::Gfx950 && w.bits() == 8 && w != I8 { 2 } else { 1 };
                let shape = Shape::new(w, x, dim, frags * 128 / w.bits() * lanes(dim));
                let kernel = format!("fragments_{}_{}_{dim}", w.name(), x.name());
                shape.check(&stream, &kernel, &shape.exact_cases(&mut random, arch), [0, 0], true);
            }
        }
    }
}

/// What the header says of the places of elements.
#[test]
fn places_are_those_of_the_formulas() {
    for stream in streams() {
        let arch = stream.device().info().arch;
        let formats = (arch == Arch::Gfx950).then(format_shapes).into_iter().flatten();
        for shape in plain_shapes(arch).into_iter().chain(formats) {
            let Shape { w, x, dim, cols } = shape;
            let (each, sums) = (cols / lanes(dim), dim * dim / 64);
            let zeros = |words: usize| vec![0; 64 * words];
            let (codes, results) = ([zeros(shape.words(w)), zeros(shape.words(x))], zeros(sums));
            let inputs = [&codes[0][..], &codes[1], &results, &[0], &[0]];
            let (_, places) =
                launch(&stream, &shape.kernel("mma"), inputs, results.len(), 64 * (2 * each + sums), 1);
            for (lane, places) in places.chunks(2 * each + sums).enumerate() {
                let operand = |of: Type, i| operand_place(of.bits(), dim, cols, lane, i);
                let want = (0..each).map(|i| operand(w, i)).chain((0..each).map(|i| operand(x, i)));
                let want = want.chain((0..sums).map(|i| sum_place(dim, lane, i)));
                for (i, (got, (row, col))) in places.iter().zip(want).enumerate() {
                    let got = (*got as usize >> 16, *got as usize & 0xffff);
                    assert_eq!(got, (row, col), "{} on {arch}, lane {lane}, {i}", shape.kernel("places"));
                }
            }
        }
    }
}
