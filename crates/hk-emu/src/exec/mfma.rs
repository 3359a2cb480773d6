//! Matrix instructions, dense and sparse: one algorithm, driven by the layout formulas of the register tiles.
//!
//! Operands are unpacked to f32, which holds every format exactly, as rows of one k each; then whole chunks of columns
//! are multiplied. Sums of 8-bit integers are exact in f32 too.
//!
//! Denormals of C and D are kept; f32 inputs follow MODE. A NaN result is the default NaN. EXEC is ignored.

use super::float;
use super::lanes::Modes;
use super::narrow::{Narrow, e8m0};
use super::{Ctl, Env, Handler, Host, Level, Portable, Uop, levels};
use crate::isa::{Inst, Operand};
use crate::tables::{Element, Index, Matrix, MatrixNumerics, Packed};
use crate::wave::{CHUNK, Lanes, MAX_ELEMENTS, Operands, Wave, mode};

impl Element {
    fn of(name: &str, fnuz: bool) -> Option<Element> {
        Some(match (name, fnuz) {
            ("F64", _) => Element::F64,
            ("F32", _) => Element::F32,
            ("XF32", _) => Element::Xf32,
            ("I8", _) => Element::I8,
            ("F16", _) => Element::Float(Narrow::F16),
            ("BF16", _) => Element::Float(Narrow::BF16),
            ("FP8", false) => Element::Float(Narrow::E4M3),
            ("FP8", true) => Element::Float(Narrow::E4M3_FNUZ),
            ("BF8", false) => Element::Float(Narrow::E5M2),
            ("BF8", true) => Element::Float(Narrow::E5M2_FNUZ),
            _ => return None,
        })
    }

    /// The formats of the f8f6f4 instructions, by `cbsz` or `blgp`.
    fn coded(code: u8) -> Option<Element> {
        let formats = [Narrow::E4M3, Narrow::E5M2, Narrow::E2M3, Narrow::E3M2, Narrow::E2M1];
        formats.get(usize::from(code)).copied().map(Element::Float)
    }

    fn bits(self) -> usize {
        match self {
            Element::F64 => 64,
            Element::F32 | Element::Xf32 => 32,
            Element::I8 => 8,
            Element::Float(f) => f.bits as usize,
        }
    }
}

/// The places of an operand's elements in k.
///
/// Lanes come in groups of one element for each row or column; a lane's elements are consecutive in k, group after
/// group. Operands of eight registers are the exception: each half of the registers covers one half of k in that way.
///
/// That exception, which only shows where A and B differ in it or scales differ, is not verified by ourselves. It is
/// what the CDNA4 manual prints for 8-bit f8f6f4 operands (7.1.5.1) and for B of the sparse instructions (7.5.1.3), what
/// Triton's linear layouts of gfx950 say, and what others found by probing MI350 with random data and scales, for both
/// kinds of instructions and for mixed 8-bit and narrower operands. Narrower operands are plain by the same sources.
fn k_of(group: usize, element: usize, per_lane: usize, groups: usize, registers: usize) -> usize {
    if registers == 8 {
        let half = per_lane / 2;
        element / half * (groups * half) + group * half + element % half
    } else {
        group * per_lane + element
    }
}

impl Packed {
    fn new(element: Element, width: usize, k: usize) -> Packed {
        let groups = 64 / width;
        let mut packed = Packed { element, width, k, per_lane: k / groups, places: [[0; 32]; 4] };
        let registers = packed.registers();
        for (group, places) in packed.places.iter_mut().enumerate().take(groups) {
            for (element, place) in places.iter_mut().enumerate().take(packed.per_lane) {
                *place = k_of(group, element, packed.per_lane, groups, registers) as u8;
            }
        }
        packed
    }

    fn registers(&self) -> usize {
        self.per_lane * self.element.bits() / 32
    }
}

impl Matrix {
    /// The instruction, or what is illegal about it.
    pub fn of(inst: &Inst, fnuz: bool, numerics: MatrixNumerics) -> Result<Matrix, &'static str> {
        let name = inst.op.info().name;
        Self::parse(name, inst, fnuz, numerics).unwrap_or(Err("an unknown shape"))
    }

    /// `V_MFMA_F32_16X16X4_4B_F16`: result, shape, blocks where there are several, types of A and B (one for both).
    fn parse(
        name: &str,
        inst: &Inst,
        fnuz: bool,
        numerics: MatrixNumerics,
    ) -> Option<Result<Matrix, &'static str>> {
        let (sparse, name) = match name.strip_prefix("V_SMFMAC_") {
            Some(rest) => (true, rest),
            None => (false, name.strip_prefix("V_MFMA_")?),
        };
        let mut parts = name.split('_').skip(1);
        let mut dims = parts.next()?.split('X').map(str::parse::<usize>);
        let (dim, k) = (dims.next()?.ok()?, dims.nth(1)?.ok()?);
        let mut types: Vec<&str> = parts.collect();
        let blocks = match types.first()?.strip_suffix('B') {
            Some(n) => {
                types.remove(0);
                n.parse().ok()?
            }
            None => 1,
        };
        let f8f6f4 = types == ["F8F6F4"];
        let (a, b) = if f8f6f4 {
            match (Element::coded(inst.cbsz), Element::coded(inst.blgp)) {
                (Some(a), Some(b)) => (a, b),
                _ => return Some(Err("a format code above 4")),
            }
        } else {
            (Element::of(types.first()?, fnuz)?, Element::of(types.last()?, fnuz)?)
        };
        let width = dim * blocks;
        let mut matrix = Matrix {
            dim,
            blocks,
            a: Packed::new(a, width, if sparse { k / 2 } else { k }),
            b: Packed::new(b, width, k),
            numerics,
            sparse: None,
            broadcast: None,
            pattern: 0,
            constant_c: matches!(inst.src[2], Operand::Inline(_)),
            scale: None,
        };
        let (cbsz, abid) = (usize::from(inst.cbsz), usize::from(inst.abid));
        if f8f6f4 {
            // Without this bit all scales are 1.
            if abid & 1 != 0 {
                let Some(scale) = &inst.scale else { return Some(Err("scales without a scale prefix")) };
                matrix.scale = Some(scale.byte.map(|byte| (0, byte)));
            }
        } else if sparse {
            // Two bits for each of a lane's elements; the register holds as many sets as fit.
            let bits = 2 * matrix.a.per_lane;
            let set = if cbsz & 3 != 0 { 0 } else { abid % (32 / bits) };
            matrix.sparse = Some(Index { shift: set * bits });
        } else {
            if a != Element::F64 && cbsz != 0 {
                if 1 << cbsz > blocks || abid >> cbsz != 0 {
                    return Some(Err("a broadcast of blocks that there are not"));
                }
                let lanes = 64 >> cbsz;
                matrix.broadcast = Some((lanes, lanes * abid));
            }
            matrix.pattern = inst.blgp;
        }
        Some(Ok(matrix))
    }

    pub fn sparse(&self) -> bool {
        self.sparse.is_some()
    }

    /// Registers of A and B.
    pub fn operand_registers(&self) -> [u32; 2] {
        [self.a, self.b].map(|operand| operand.registers() as u32)
    }

    /// The slot of the scales of A (0) or B (1).
    pub fn set_scale(&mut self, operand: usize, slot: u16) {
        if let Some((to, _)) = self.scale.as_mut().and_then(|scale| scale.get_mut(operand)) {
            *to = slot;
        }
    }

    pub fn handler(&self, level: Level) -> Handler {
        if self.a.element == Element::F64 { double } else { matrix_handler(level) }
    }

    fn integer(&self) -> bool {
        self.a.element == Element::I8
    }
}

/// A constant as a register of scales: the exponent of a float, else the bytes as they are (unverified).
pub(crate) fn scale_constant(value: u32, float: bool) -> u32 {
    if float { (value >> 23 & 0xFF) * 0x0101_0101 } else { value }
}

/// The registers of an operand with its lanes moved by the broadcast controls.
#[cold]
#[inline(never)]
fn moved(registers: &[Lanes], from: impl Fn(usize) -> usize) -> [Lanes; 8] {
    let mut out = [Lanes::ZERO; 8];
    for (out, register) in out.iter_mut().zip(registers) {
        for lane in 0..64 {
            out.set(lane, register.get(from(lane)));
        }
    }
    out
}

/// The lane whose B a lane gets.
fn pattern(lane: usize, blgp: u8) -> usize {
    match blgp {
        1 => lane % 32,
        2 => lane % 32 + 32,
        3 => (lane + 16) % 64,
        4..=7 => lane % 16 + 16 * (usize::from(blgp) - 4),
        _ => lane,
    }
}

/// Unpacks elements of `BITS` bits.
#[inline(always)]
fn spread<const BITS: usize>(
    registers: &[Lanes],
    packed: &Packed,
    out: &mut [f32; MAX_ELEMENTS],
    widen: impl Fn(u32) -> f32,
) {
    for c in 0..4 {
        // Widths are 16, 32 and 64.
        let (group, column) = (16 * c / packed.width, 16 * c % packed.width);
        let Some(places) = packed.places.get(group) else { return };
        for (element, place) in places.iter().enumerate().take(packed.per_lane) {
            let (r, shift) = (element * BITS / 32, element * BITS % 32);
            let start = usize::from(*place) * packed.width + column;
            let target = out.get_mut(start..).and_then(|out| out.first_chunk_mut::<CHUNK>());
            let (Some(target), Some(low)) = (target, registers.get(r)) else { return };
            if shift + BITS > 32 {
                let Some(high) = registers.get(r + 1) else { return };
                for l in 0..CHUNK {
                    target[l] = widen(low.0[c][l] >> shift | high.0[c][l] << (32 - shift));
                }
            } else {
                for l in 0..CHUNK {
                    target[l] = widen(low.0[c][l] >> shift);
                }
            }
        }
    }
}

#[inline(always)]
fn unpack(registers: &[Lanes], packed: &Packed, flush: bool, out: &mut [f32; MAX_ELEMENTS]) {
    match packed.element {
        Element::F64 => {}
        Element::F32 if flush => {
            spread::<32>(registers, packed, out, |x| f32::from_bits(float::flush32(x)));
        }
        Element::F32 => spread::<32>(registers, packed, out, f32::from_bits),
        Element::Xf32 => spread::<32>(registers, packed, out, |x| {
            f32::from_bits(if float::is_nan32(x) { float::NAN32 } else { x & 0xFFFF_E000 })
        }),
        Element::I8 => {
            spread::<8>(registers, packed, out, |x| (x << 24) as i32 as f32 * (1.0 / 16_777_216.0))
        }
        Element::Float(Narrow::BF16) => {
            spread::<16>(registers, packed, out, |x| f32::from_bits(x << 16));
        }
        Element::Float(Narrow::F16) => spread::<16>(registers, packed, out, |x| Narrow::F16.decode(x)),
        Element::Float(Narrow::E4M3) => spread::<8>(registers, packed, out, |x| Narrow::E4M3.decode(x)),
        Element::Float(Narrow::E5M2) => spread::<8>(registers, packed, out, |x| Narrow::E5M2.decode(x)),
        Element::Float(Narrow::E4M3_FNUZ) => {
            spread::<8>(registers, packed, out, |x| Narrow::E4M3_FNUZ.decode(x));
        }
        Element::Float(Narrow::E5M2_FNUZ) => {
            spread::<8>(registers, packed, out, |x| Narrow::E5M2_FNUZ.decode(x));
        }
        Element::Float(Narrow::E2M3) => spread::<6>(registers, packed, out, |x| Narrow::E2M3.decode(x)),
        Element::Float(Narrow::E3M2) => spread::<6>(registers, packed, out, |x| Narrow::E3M2.decode(x)),
        Element::Float(_) => spread::<4>(registers, packed, out, |x| Narrow::E2M1.decode(x)),
    }
}

/// Register and first lane of row `i` of a block of 32-bit results.
fn output(dim: usize, i: usize, block: usize) -> (usize, usize) {
    let rows = 64 / dim;
    let p = 64usize.div_ceil(dim * dim / 4);
    let register = block * (dim * dim / 64) + i / (4 * rows) * 4 + i % 4;
    (register, (block % p) * dim + i / 4 % rows * p * dim)
}

/// What sums start from and how they end.
#[derive(Clone, Copy)]
struct Ends {
    d: u16,
    c: u16,
    c_step: u16,
    integer: bool,
    /// Results that overflow become the largest finite value.
    clamps: bool,
}

impl Ends {
    #[inline(always)]
    fn start(&self, w: &Wave, register: usize, chunk: usize) -> [f32; CHUNK] {
        if self.integer {
            [0.0; CHUNK]
        } else {
            w.chunk(self.c + self.c_step * register as u16, chunk).map(f32::from_bits)
        }
    }

    /// Writes a chunk of results; `inputs` says whether anything that went into an element of it was infinite.
    #[inline(always)]
    fn finish(
        &self,
        w: &mut Wave,
        register: usize,
        chunk: usize,
        acc: [f32; CHUNK],
        infinite: impl Fn(usize) -> bool,
    ) {
        let mut out = [0; CHUNK];
        if self.integer {
            let c = w.chunk(self.c + self.c_step * register as u16, chunk);
            for l in 0..CHUNK {
                // An integer of at most 22 bits: at this offset a unit is the last place.
                let sum = (acc[l] + 12_582_912.0).to_bits().wrapping_sub(0x4B40_0000) as i32;
                out[l] = if self.clamps {
                    (c[l] as i32).saturating_add(sum) as u32
                } else {
                    c[l].wrapping_add(sum as u32)
                };
            }
        } else {
            for l in 0..CHUNK {
                out[l] = if acc[l].is_nan() { float::NAN32 } else { acc[l].to_bits() };
            }
            if self.clamps {
                let c = self.start(w, register, chunk);
                for l in 0..CHUNK {
                    if acc[l].is_infinite() && !c[l].is_infinite() && !infinite(l) {
                        out[l] = acc[l].signum().to_bits() & 0x8000_0000 | f32::MAX.to_bits();
                    }
                }
            }
        }
        w.set_chunk(self.d + register as u16, chunk, 0xFFFF, out);
    }
}

/// Whether row `i` of A or column `j` of B, given as indices into rows of `width`, holds an infinity.
#[cold]
#[inline(never)]
fn any_infinite(a: &[f32], b: &[f32], width: usize, i: usize, j: usize) -> bool {
    let infinite = |x: &[f32], at: usize| x.iter().skip(at).step_by(width).any(|x| x.is_infinite());
    infinite(a, i) || infinite(b, j)
}

/// Blocks of 16 or 32 rows: `R` rows (four or eight) and 16 columns at a time. `W` is `DIM * blocks`.
#[inline(always)]
fn multiply<H: Host, const DIM: usize, const W: usize, const R: usize>(
    w: &mut Wave,
    ends: Ends,
    blocks: usize,
    a: &[f32],
    b: &[f32],
) {
    let (a_rows, b_rows) = (a.as_chunks::<W>().0, b.as_chunks::<W>().0);
    for block in 0..blocks {
        for first in (0..DIM).step_by(R) {
            let row = block * DIM + first;
            for part in 0..DIM / 16 {
                let column = block * DIM + 16 * part;
                // Four rows are four registers over the same lanes.
                let place = |i: usize| {
                    let (register, lane) = output(DIM, first + i, block);
                    (register, lane / 16 + part)
                };
                let mut acc = [H::load(&[0.0; CHUNK]); R];
                for (i, acc) in acc.iter_mut().enumerate() {
                    let (register, chunk) = place(i);
                    *acc = H::load(&ends.start(w, register, chunk));
                }
                for (x, y) in a_rows.iter().zip(b_rows) {
                    let (Some(x), Some(y)) =
                        (x[row..].first_chunk::<R>(), y[column..].first_chunk::<CHUNK>())
                    else {
                        continue;
                    };
                    let y = H::load(y);
                    for i in 0..R {
                        acc[i] = H::fma_chunk(x[i], y, acc[i]);
                    }
                }
                for (i, acc) in acc.iter().enumerate() {
                    let (register, chunk) = place(i);
                    let infinite = |l| any_infinite(a, b, W, row + i, column + l);
                    ends.finish(w, register, chunk, H::store(*acc), infinite);
                }
            }
        }
    }
}

/// The same with as many rows as suit the host.
#[inline(always)]
fn blocks<H: Host, const DIM: usize, const W: usize>(
    w: &mut Wave,
    ends: Ends,
    n: usize,
    a: &[f32],
    b: &[f32],
) {
    if H::SUMS == 8 {
        multiply::<H, DIM, W, 8>(w, ends, n, a, b);
    } else {
        multiply::<H, DIM, W, 4>(w, ends, n, a, b);
    }
}

/// 16 blocks of 4 rows: the lane is the column of B, the register the row of A within the lane's block.
#[inline(always)]
fn multiply4<H: Host>(w: &mut Wave, ends: Ends, a: &[f32], b: &[f32]) {
    for r in 0..4 {
        for c in 0..4 {
            let mut acc = ends.start(w, r, c);
            for (x, y) in a.as_chunks::<64>().0.iter().zip(b.as_chunks::<64>().0) {
                for l in 0..CHUNK {
                    let lane = 16 * c + l;
                    acc[l] = H::fma32(x[lane / 4 * 4 + r], y[lane], acc[l]);
                }
            }
            let infinite = |l: usize| any_infinite(a, b, 64, (16 * c + l) / 4 * 4 + r, 16 * c + l);
            ends.finish(w, r, c, acc, infinite);
        }
    }
}

/// A sparse A: each of its elements names its row of B.
#[inline(always)]
fn multiply_sparse<H: Host>(w: &mut Wave, ends: Ends, dim: usize, a: &[f32], b: &[f32], k: &[u8]) {
    for i in 0..dim {
        let (register, lane) = output(dim, i, 0);
        for part in 0..dim / 16 {
            let mut acc = H::load(&ends.start(w, register, lane / 16 + part));
            for (x, k) in a.iter().zip(k).skip(i).step_by(dim) {
                let start = usize::from(*k) * dim + 16 * part;
                let Some(y) = b.get(start..).and_then(|b| b.first_chunk::<CHUNK>()) else { continue };
                acc = H::fma_chunk(*x, H::load(y), acc);
            }
            let infinite = |l| any_infinite(a, b, dim, i, 16 * part + l);
            ends.finish(w, register, lane / 16 + part, H::store(acc), infinite);
        }
    }
}

/// One element after the other, by any rule: `dot(i, j, c)` of rows and columns counted over all blocks.
#[inline(never)]
fn each(
    w: &mut Wave,
    ends: Ends,
    dim: usize,
    blocks: usize,
    a: &[f32],
    b: &[f32],
    dot: impl Fn(usize, usize, f32) -> f32,
) {
    let width = dim * blocks;
    for block in 0..blocks {
        for i in 0..dim {
            let (register, lane) = output(dim, i, block);
            for j in 0..dim {
                let at = lane + j;
                let c = f32::from_bits(w.lane(ends.c + ends.c_step * register as u16, at));
                let (row, column) = (block * dim + i, block * dim + j);
                let x = dot(row, column, c);
                let overflow = ends.clamps && x.is_infinite() && !c.is_infinite();
                let value = if x.is_nan() {
                    float::NAN32
                } else if overflow && !any_infinite(a, b, width, row, column) {
                    f32::MAX.copysign(x).to_bits()
                } else {
                    x.to_bits()
                };
                w.set_lane(ends.d + register as u16, at, value);
            }
        }
    }
}

/// Which k each element of a sparse A belongs to: two bits of its lane's index say which of four.
fn place(index: &Lanes, packed: &Packed, shift: usize, out: &mut [u8; MAX_ELEMENTS]) {
    for element in 0..packed.per_lane {
        for lane in 0..64 {
            let k = usize::from(packed.places[lane / packed.width][element]);
            let pair = (index.get(lane) >> (shift + 2 * element) & 3) as u8;
            out[k * packed.width + lane % packed.width] = (k / 2 * 4) as u8 + pair;
        }
    }
}

/// A scale so far from 1 that elements times it could leave the normal numbers of f32.
fn extreme(scale: u8) -> bool {
    !(27..=227).contains(&scale) && scale != 255
}

/// Whether a scale is extreme where it matters. Zeros, infinities and NaNs are the same at any scale; tiles are padded
/// with blocks of zeros whose scales are zero bytes, and such scales become 1.
fn any_extreme(x: &[f32], scales: &mut [u8; 64], dim: usize) -> bool {
    let mut any = false;
    for (block, x) in x.chunks(32 * dim).enumerate() {
        let Some(scales) = scales.get_mut(block * dim..(block + 1) * dim) else { return any };
        for (row, scale) in scales.iter_mut().enumerate().filter(|(_, scale)| extreme(**scale)) {
            if x.iter().skip(row).step_by(dim).all(|x| *x == 0.0 || !x.is_finite()) {
                *scale = 127;
            } else {
                any = true;
            }
        }
    }
    any
}

/// Multiplies elements by their scales, exactly.
fn rescale(x: &mut [f32], scales: &[u8; 64], dim: usize) {
    // Lane `32-block * dim + row` holds a scale.
    for (block, x) in x.chunks_mut(32 * dim).enumerate() {
        let Some(scales) = scales.get(block * dim..(block + 1) * dim) else { return };
        for x in x.chunks_mut(dim) {
            for (x, scale) in x.iter_mut().zip(scales) {
                *x *= if *scale == 255 { f32::NAN } else { f32::from_bits(u32::from(*scale) << 23) };
            }
        }
    }
}

#[inline(always)]
fn products<H: Host>(w: &mut Wave, m: &Matrix, ends: Ends, a: &[f32], b: &[f32], k: &[u8]) {
    match (m.dim, m.blocks) {
        (dim, _) if m.sparse() => multiply_sparse::<H>(w, ends, dim, a, b, k),
        (32, 1) => blocks::<H, 32, 32>(w, ends, 1, a, b),
        (16, 1) => blocks::<H, 16, 16>(w, ends, 1, a, b),
        (32, _) => blocks::<H, 32, 64>(w, ends, 2, a, b),
        (16, _) => blocks::<H, 16, 64>(w, ends, 4, a, b),
        _ => multiply4::<H>(w, ends, a, b),
    }
}

/// A host without fused operations, where products are exact: adding them rounds once too.
struct Separate;
impl Host for Separate {
    #[inline(always)]
    fn fma32(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
    #[inline(always)]
    fn fma64(a: f64, b: f64, c: f64) -> f64 {
        Portable::fma64(a, b, c)
    }
    const FUSED: bool = false;
    type Chunk = [f32; CHUNK];
    const SUMS: usize = 4;
    #[inline(always)]
    fn load(x: &[f32; CHUNK]) -> [f32; CHUNK] {
        *x
    }
    #[inline(always)]
    fn store(x: [f32; CHUNK]) -> [f32; CHUNK] {
        x
    }
    #[inline(always)]
    fn fma_chunk(a: f32, b: [f32; CHUNK], c: [f32; CHUNK]) -> [f32; CHUNK] {
        let mut r = c;
        for l in 0..CHUNK {
            r[l] = a * b[l] + c[l];
        }
        r
    }
}

/// Whether every product of an element of A with one of B is a normal f32 (or zero).
fn exact_products(m: &Matrix, a: &[f32], b: &[f32]) -> bool {
    // All formats but f32 have at most 11 bits of significand. Exponents may still add up to too much or too little.
    let exponents = |x: &[f32]| {
        let (mut least, mut most) = (u32::MAX, 0);
        for x in x {
            let magnitude = x.to_bits() & 0x7FFF_FFFF;
            // A zero becomes the largest number.
            least = least.min(magnitude.wrapping_sub(1));
            most = most.max(magnitude);
        }
        ((least >> 23) as i32 - 127, (most >> 23) as i32 - 127)
    };
    let ((least_a, most_a), (least_b, most_b)) = (exponents(a), exponents(b));
    m.a.element != Element::F32 && least_a + least_b >= -126 && most_a + most_b <= 125
}

#[inline(always)]
fn matrix_body<H: Host>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let Some(m) = e.program.matrices.get(u.imm as usize) else { return Ctl::Next };
    let mut operands = w.operands.take().unwrap_or_else(Operands::new);
    let flush = Modes::of(w).in32;
    for (i, (slot, packed)) in [(u.a, &m.a), (u.b, &m.b)].into_iter().enumerate() {
        let registers = w.registers(slot, packed.registers());
        let copy;
        let registers = match (i, m.broadcast, m.pattern) {
            (0, Some((lanes, first)), _) => {
                copy = moved(registers, |lane| lane % lanes + first);
                &copy[..]
            }
            (1, _, blgp @ 1..) => {
                copy = moved(registers, |lane| pattern(lane, blgp));
                &copy[..]
            }
            _ => registers,
        };
        unpack(registers, packed, flush, if i == 0 { &mut operands.a } else { &mut operands.b });
    }
    if let Some(index) = m.sparse {
        place(w.v(u.c), &m.a, index.shift, &mut operands.k);
    }
    let size = |packed: &Packed| packed.k * packed.width;
    let (a, b) = (&mut operands.a[..size(&m.a)], &mut operands.b[..size(&m.b)]);
    let mut ends = Ends {
        d: u.d,
        c: if m.sparse() { u.d } else { u.c },
        c_step: if m.constant_c { 0 } else { 1 },
        integer: m.integer(),
        clamps: w.mode & mode::FP16_OVFL != 0,
    };
    let mut apart = false;
    if let Some(scale) = m.scale {
        for (scales, (slot, byte)) in operands.scales.iter_mut().zip(scale) {
            for (lane, out) in scales.iter_mut().enumerate() {
                *out = (w.lane(slot, lane) >> (8 * byte)) as u8;
            }
        }
        let [scales_a, scales_b] = &mut operands.scales;
        let far = any_extreme(a, scales_a, m.dim) | any_extreme(b, scales_b, m.dim);
        apart = m.numerics != MatrixNumerics::Fma || far;
        if !apart {
            rescale(a, &operands.scales[0], m.dim);
            rescale(b, &operands.scales[1], m.dim);
        }
    }
    // All other sources have been read: D may share registers with these, too.
    let results = (m.dim * m.dim * m.blocks / 64) as u16;
    if ends.c_step != 0 && ends.c != ends.d && ends.c.abs_diff(ends.d) < results {
        ends.c = shifted(w, ends, results);
    }
    let exact =
        m.numerics == MatrixNumerics::Cdna3Exact && !matches!(m.a.element, Element::F32 | Element::I8);
    if exact || apart {
        slow(w, m, ends, &operands);
    } else if !H::FUSED && exact_products(m, a, b) {
        products::<Separate>(w, m, ends, a, b, &operands.k);
    } else {
        products::<H>(w, m, ends, a, b, &operands.k);
    }
    w.operands = Some(operands);
    Ctl::Next
}
levels!(matrix_handler = matrix_body);

/// C and D share some registers: the unit reads all of C before it writes any of D. Moves C to where D is.
#[cold]
#[inline(never)]
fn shifted(w: &mut Wave, ends: Ends, results: u16) -> u16 {
    let c = w.registers(ends.c, results.into()).to_vec();
    for (slot, c) in (ends.d..).zip(c) {
        *w.v_mut(slot) = c;
    }
    ends.d
}

/// Exact numerics, and scales that f32 cannot take.
#[cold]
#[inline(never)]
fn slow(w: &mut Wave, m: &Matrix, ends: Ends, operands: &Operands) {
    let (width, count) = (m.b.width, m.a.k);
    let (a, b) = (&operands.a[..count * width], &operands.b[..m.b.k * width]);
    // The element of B that element `n` of a row of A is multiplied by, and the scale of their product.
    let k_of = |n: usize, i: usize| if m.sparse() { operands.k[n * width + i].into() } else { n };
    let scale = |n: usize, i: usize, j: usize| match m.scale {
        None => Some(0),
        Some(_) => {
            let byte = |operand: usize, at: usize| e8m0(operands.scales[operand][n / 32 * m.dim + at].into());
            Some(byte(0, i)? + byte(1, j)?)
        }
    };
    let terms = |i: usize, j: usize| {
        (0..count).map(move |n| (a[n * width + i], b[k_of(n, i) * width + j], scale(n, i, j)))
    };
    let products = |i: usize, j: usize, c: f32| match m.numerics {
        MatrixNumerics::Fma => terms(i, j).fold(c, |acc, (x, y, scale)| {
            let Some(n) = scale else { return f32::NAN };
            // Exact: the products have few bits, and f64 has room for the exponents.
            let product = f64::from(x) * f64::from(y) * f64::from_bits(((1023 + n) as u64) << 52);
            float::add_odd(product, f64::from(acc)) as f32
        }),
        MatrixNumerics::Cdna3Exact => exact::dot(m, terms(i, j), c),
    };
    each(w, ends, m.dim, m.blocks, a, b, products);
}

/// The published model of CDNA3's sums (Xie et al., "Bit-Accurate Modeling of GPU Matrix Multiply-Accumulate Units").
mod exact {
    use super::{Element, Matrix};

    /// Fraction bits that products and C keep below the largest exponent, and that sums keep.
    const FRACTION: i32 = 24;
    const SUM_FRACTION: i32 = 31;
    /// The exponent of a zero, and the smallest of an f32.
    const EMIN: i32 = -126;

    /// `s * 2^(e - 23)`, with the exponent of the format where the number is subnormal in it.
    fn split(x: f32, emin: i32) -> (i64, i32) {
        let bits = x.to_bits();
        let (field, fraction) = ((bits >> 23 & 0xFF) as i32, i64::from(bits & 0x7F_FFFF));
        let (mut s, mut e) = if field == 0 { (fraction, EMIN) } else { (fraction | 1 << 23, field - 127) };
        if e < emin {
            // Exact: the bits below are those that the format does not have.
            s >>= (emin - e).min(63);
            e = emin;
        }
        (if x.is_sign_negative() { -s } else { s }, e)
    }

    /// `floor(s * 2^n)`.
    fn shift(s: i64, n: i32) -> i64 {
        if n >= 0 { s << n.min(62) } else { s >> (-n).min(63) }
    }

    /// The sum of products, each cut toward zero at 24 bits below the largest exponent: `sum * 2^(e - 24)`.
    fn truncated(products: impl Iterator<Item = (i64, i32)> + Clone) -> (i64, i32) {
        let exponent = |(s, e): (i64, i32)| if s == 0 { EMIN } else { e };
        let max = products.clone().map(exponent).max().unwrap_or(EMIN);
        let cut = |(s, e): (i64, i32)| {
            // A product is s * 2^(e - 46).
            let n = 46 - FRACTION + max - e;
            s.signum() * (s.abs() >> n.clamp(0, 63))
        };
        (products.filter(|p| p.0 != 0).map(cut).sum(), max)
    }

    /// `s * 2^e` rounded to f32, to nearest even.
    fn round(s: i64, e: i32) -> f32 {
        let m = s.unsigned_abs();
        if m == 0 {
            return 0.0;
        }
        let top = 63 - m.leading_zeros() as i32 + e;
        let place = (top - 23).max(EMIN - 23);
        let n = place - e;
        let units = if n <= 0 {
            m << -n
        } else if n > 63 {
            0
        } else {
            let (kept, rest, half) = (m >> n, m & ((1 << n) - 1), 1 << (n - 1));
            kept + u64::from(rest > half || rest == half && kept & 1 != 0)
        };
        // At most 2^24 units, of which 2^23 are an exponent's worth.
        let bits = units + (((place - (EMIN - 23)) as u64) << 23);
        let bits = if bits >= 0x7F80_0000 { 0x7F80_0000 } else { bits as u32 };
        f32::from_bits(bits | if s < 0 { 0x8000_0000 } else { 0 })
    }

    /// Infinities and NaNs: what an ideal sum of them is. `None` where all is finite.
    fn special(terms: impl Iterator<Item = (f32, f32, Option<i32>)>, c: f32, overflows: bool) -> Option<f32> {
        let (mut sum, mut found) = (0f32, !c.is_finite());
        if found {
            sum = c;
        }
        for (x, y, scale) in terms {
            let product = match scale {
                None => f64::NAN,
                Some(_) => f64::from(x) * f64::from(y),
            };
            // Products of 2^128 and more are infinite, except those of 8-bit formats, which cannot be.
            let large = overflows && product.abs() >= 2f64.powi(128);
            if !product.is_finite() || large {
                found = true;
                sum += if large { f32::INFINITY.copysign(product as f32) } else { product as f32 };
            }
        }
        found.then_some(sum)
    }

    /// `c` and the products in groups, each group's result the next one's C.
    pub fn dot(m: &Matrix, terms: impl Iterator<Item = (f32, f32, Option<i32>)>, c: f32) -> f32 {
        let emin = |element: Element| match element {
            Element::Float(f) => f.emin(),
            _ => EMIN,
        };
        let (emin_a, emin_b) = (emin(m.a.element), emin(m.b.element));
        let (group, halves) = match m.a.element.bits() {
            32 => (4, false),
            16 => (8, false),
            _ => (16, true),
        };
        let terms: Vec<_> = terms.collect();
        terms.chunks(group).fold(c, |c, terms| {
            if let Some(value) = special(terms.iter().copied(), c, !halves) {
                return value;
            }
            let product = |(x, y, scale): &(f32, f32, Option<i32>)| {
                let ((sx, ex), (sy, ey)) = (split(*x, emin_a), split(*y, emin_b));
                (sx * sy, ex + ey + scale.unwrap_or(0))
            };
            let (sum, e) = if halves {
                // Even and odd k apart, then both floored at the larger exponent.
                let (even, e0) = truncated(terms.iter().step_by(2).map(product));
                let (odd, e1) = truncated(terms.iter().skip(1).step_by(2).map(product));
                let e = e0.max(e1);
                (shift(even, e0 - e) + shift(odd, e1 - e), e)
            } else {
                truncated(terms.iter().map(product))
            };
            let (sc, ec) = split(c, EMIN);
            let ec = if sc == 0 { EMIN } else { ec };
            let max = e.max(ec);
            let sum = shift(sum, e - max + SUM_FRACTION - FRACTION);
            // C far below the products of 8-bit formats is dropped, not floored.
            let sc = if halves && ec < max - FRACTION - 1 { 0 } else { shift(sc, ec - max + FRACTION - 23) };
            round(sum + (sc << (SUM_FRACTION - FRACTION)), max - SUM_FRACTION)
        })
    }
}

/// f64: fused multiply-adds in ascending k.
fn double(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let Some(m) = e.program.matrices.get(u.imm as usize) else { return Ctl::Next };
    let (dim, blocks) = (m.dim, m.blocks);
    let sign = |bit: u32| if m.pattern >> bit & 1 != 0 { -1.0 } else { 1.0 };
    let width = dim * blocks;
    let get = |w: &Wave, slot: u16, lane: usize| f64::from_bits(w.lane64(slot, lane));
    let (mut a, mut b) = ([0f64; 64], [0f64; 64]);
    for lane in 0..64 {
        // K = 4: one element per lane, k = lane / width.
        a[lane] = get(w, u.a, lane) * sign(0);
        b[lane] = get(w, u.b, lane) * sign(1);
    }
    let rows = 64 / dim;
    let p = 64usize.div_ceil(dim * dim);
    let c_step = if m.constant_c { 0 } else { 2 };
    let mut out = [[0u64; 64]; 4];
    for block in 0..blocks {
        for i in 0..dim {
            let register = block * (dim * dim / 64) + i / rows;
            for j in 0..dim {
                let lane = (block % p) * dim + i % rows * p * dim + j;
                let mut acc = get(w, u.c + c_step * register as u16, lane) * sign(2);
                for k in 0..4 {
                    acc = libm::fma(a[k * width + block * dim + i], b[k * width + block * dim + j], acc);
                }
                out[register % 4][lane] = if acc.is_nan() { float::NAN64 } else { acc.to_bits() };
            }
        }
    }
    for (register, out) in out.iter().enumerate().take(dim * width / 64) {
        for (lane, value) in out.iter().enumerate() {
            w.set_lane64(u.d + 2 * register as u16, lane, *value);
        }
    }
    Ctl::Next
}
