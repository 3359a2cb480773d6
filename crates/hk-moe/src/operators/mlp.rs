//! Both GEMMs of experts in f64, a few rows of weights at a time: those of a whole rank would not fit memory. Experts without gates
//! cost nothing, and all cores work.

use super::fused::Kind;
use crate::reference::{self, EXPERT_TERMS, ExpertProblem};
use crate::{ExpertGate, GateOrder};
use hk_core::quant::{BlockRule, BlockScale, Quantized, group_scale, linear_scale};
use hk_core::registry::{Described, HostCall, HostTensor, TensorSpec, dot, scale_groups};
use hk_core::{DType, Float, Fp4Rounding, Fp8E4M3, Fp8E4M3Fnuz, Result, bf16, f16};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Rows of weights that are decoded together.
const CHUNK: usize = 64;

/// A token, one of its experts, and the expert's weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gate {
    pub token: usize,
    pub expert: usize,
    pub weight: f64,
}

/// Outputs of a gate, and how far they can be off, in [`EXPERT_TERMS`].
pub(super) struct Sums {
    pub values: Vec<f64>,
    pub reach: Vec<f64>,
}

/// Values that a quantization of rows of `cols` gives.
pub(super) fn quantized(kind: Kind, w: DType, x: &[f64], cols: usize) -> Vec<f64> {
    fn linear<C: Quantized>(x: &[f64], columns: usize, cols: usize, rows: bool) -> Vec<f64> {
        let group = |group: &[f64]| {
            let amax = hk_quant::reference::finite_max(group) as f32;
            let scale = if rows { linear_scale(amax, C::FORMAT) } else { group_scale(amax, C::FORMAT) };
            let code =
                move |&x: &f64| f64::from(C::from_f32(x as f32 * (1.0 / scale)).to_f32()) * f64::from(scale);
            group.iter().map(code).collect::<Vec<_>>()
        };
        x.chunks_exact(cols).flat_map(|row| row.chunks(columns)).flat_map(group).collect()
    }
    let of = |columns: usize, rows: bool| match w {
        DType::I8 => linear::<i8>(x, columns, cols, rows),
        DType::Fp8E4M3Fnuz => linear::<Fp8E4M3Fnuz>(x, columns, cols, rows),
        _ => linear::<Fp8E4M3>(x, columns, cols, rows),
    };
    match kind {
        Kind::Half | Kind::Groups | Kind::MxHalf => x.to_vec(),
        Kind::Rows => of(cols, true),
        Kind::Blocks => of(128, false),
        Kind::MxFp8 => of(cols, true),
        Kind::MxFp4 => {
            let encode = hk_quant::reference::fp4(Fp4Rounding::NearestEven);
            let out = hk_quant::reference::mx_quant(x, cols, BlockRule::fp4(BlockScale::Even, 0), encode);
            let blocks = cols.div_ceil(32);
            out.q.iter().enumerate().map(|(i, q)| q * out.scale[i / cols * blocks + i % cols / 32]).collect()
        }
    }
}

/// A value's distance to the next of its type, at most.
fn step(kind: Kind, w: DType, x: f64, largest: f64) -> f64 {
    match kind {
        Kind::Half | Kind::Groups | Kind::MxHalf => 0.0,
        Kind::Rows | Kind::Blocks if w == DType::I8 => largest / 127.0,
        Kind::MxFp4 => x.abs() / 2.0 + largest / 4.0,
        _ => x.abs() / 8.0 + largest / 240.0 / 64.0,
    }
}

/// Elements of a tensor; pairs of fp4 count once, and give two.
fn decoded(tensor: &HostTensor, elements: Range<usize>) -> Result<Vec<f64>> {
    let size = tensor.dtype().size_bytes();
    let bytes = tensor.bytes()[elements.start * size..elements.end * size].to_vec();
    Ok(HostTensor::from_bytes(TensorSpec::new(tensor.dtype(), [elements.len()]), bytes)?.to_f64())
}

/// Weights `[E, n, k]`, their scales and zero points.
#[derive(Clone)]
pub(super) struct Weights<'a> {
    w: &'a HostTensor,
    scale: Option<&'a HostTensor>,
    zero: Option<&'a HostTensor>,
    /// Type that dequantized groups are rounded to.
    dtype: DType,
    n: usize,
    k: usize,
}

impl<'a> Weights<'a> {
    pub fn new(call: &'a HostCall, [w, scale, zero]: [&'static str; 3], [n, k]: [usize; 2]) -> Result<Self> {
        let dtype = call.get("x")?.dtype();
        let (scale, zero) = (call.optional(scale), call.optional(zero));
        Ok(Self { w: call.get(w)?, scale, zero, dtype, n, k })
    }

    /// Appends row `row` of an expert, as what it stands for.
    fn add_row(&self, expert: usize, row: usize, out: &mut Vec<f64>) -> Result<()> {
        let &Self { w, n, k, .. } = self;
        let (at, packed) = (expert * n + row, w.shape()[2]);
        let mut values = decoded(w, at * packed..(at + 1) * packed)?;
        let Some(scale) = self.scale else {
            out.append(&mut values);
            return Ok(());
        };
        let groups_of_row = w.dtype() == DType::U8 || scale.dtype() == DType::E8M0;
        let scales = match *scale.shape() {
            [_, _, groups] if groups_of_row => at * groups..(at + 1) * groups,
            [_, rows, groups] => {
                let at = expert * rows + row / 128;
                at * groups..(at + 1) * groups
            }
            [_, _] => at..at + 1,
            [1] => 0..1,
            _ => expert..expert + 1,
        };
        let groups = scales.len();
        let group = match (w.dtype(), groups) {
            (_, 1) => k,
            (DType::Fp4x2, _) => 32,
            (DType::U8, _) => k / groups,
            _ => 128,
        };
        let scales = decoded(scale, scales)?;
        if w.dtype() == DType::U8 {
            let int4 = packed * 2 == k;
            let half = |byte: f64, high: bool| if high { (byte / 16.0).floor() } else { byte % 16.0 };
            if int4 {
                values = values.into_iter().flat_map(|b| [half(b, false), half(b, true)]).collect();
            }
            let zeros = match self.zero {
                None => vec![if int4 { 8.0 } else { 128.0 }; groups],
                Some(zero) if int4 => {
                    let bytes = decoded(zero, at / 2 * groups..(at / 2 + 1) * groups)?;
                    bytes.into_iter().map(|b| half(b, at % 2 == 1)).collect()
                }
                Some(zero) => decoded(zero, at * groups..(at + 1) * groups)?,
            };
            for (col, value) in values.iter_mut().enumerate() {
                let (scale, zero) = (scales[col / group] as f32, zeros[col / group]);
                *value = round(self.dtype, f64::from((*value - zero) as f32 * scale));
            }
        } else {
            scale_groups(&mut values, group, &scales);
        }
        out.append(&mut values);
        Ok(())
    }

    fn rows(&self, expert: usize, rows: impl Iterator<Item = usize>) -> Result<Vec<f64>> {
        let mut values = vec![];
        rows.into_iter().try_for_each(|row| self.add_row(expert, row, &mut values))?;
        Ok(values)
    }
}

/// `x` rounded to a 16-bit type.
fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F16 => <f16 as Float>::from_f64(x).to_f64(),
        _ => <bf16 as Float>::from_f64(x).to_f64(),
    }
}

/// The results of tasks `0..n`, in order, of all cores.
fn in_parallel<R: Send>(n: usize, task: impl Fn(usize) -> Result<R> + Sync) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = vec![];
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n {
                return done;
            }
            done.push((i, task(i)));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(n);
    let mut done: Vec<(usize, Result<R>)> = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

/// The two products of experts, and how far another rounding on the way can be off.
#[derive(Clone)]
pub(super) struct Mlp<'a> {
    pub kind: Kind,
    pub of_w: DType,
    /// Type of `h` and of the outputs of gates.
    pub dtype: DType,
    /// Before quantization, and after.
    pub x: &'a [f64],
    pub a: &'a [f64],
    pub gate: ExpertGate,
    pub w1: Weights<'a>,
    pub w2: Weights<'a>,
    pub w1_bias: Option<&'a [f64]>,
    pub w2_bias: Option<&'a [f64]>,
}

/// `h` of a gate as the second GEMM has it, and how far its elements can be off.
struct Hidden {
    q: Vec<f64>,
    off: Vec<f64>,
}

/// Gates and values of some columns of a gate's `h`.
struct Part {
    h: Vec<f64>,
    of_h: Vec<f64>,
    /// What another rounding of the activations moves a sum by, at most.
    widest: f64,
}

impl Mlp<'_> {
    /// The outputs of the gates, times their weights.
    pub fn outputs(&self, gates: &[Gate]) -> Result<Vec<Sums>> {
        let mut by_expert: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, gate) in gates.iter().enumerate() {
            by_expert.entry(gate.expert).or_default().push(i);
        }
        // (expert, its gates, columns)
        let tasks = |columns: usize| -> Vec<(usize, &[usize], Range<usize>)> {
            let chunks = |(&expert, of_expert)| {
                let of_expert: &Vec<usize> = of_expert;
                let chunk = move |first| (expert, &of_expert[..], first..columns.min(first + CHUNK));
                (0..columns).step_by(CHUNK).map(chunk)
            };
            by_expert.iter().flat_map(chunks).collect()
        };
        let inner = self.w1.n / 2;
        let first = tasks(inner);
        let parts = in_parallel(first.len(), |i| {
            let (expert, of_expert, columns) = &first[i];
            self.part(*expert, of_expert.iter().map(|&g| gates[g].token), columns.clone())
        })?;
        let mut hidden: Vec<_> =
            gates.iter().map(|_| Part { h: vec![], of_h: vec![], widest: 0.0 }).collect();
        for ((_, of_expert, _), parts) in first.iter().zip(parts) {
            for (&gate, part) in of_expert.iter().zip(parts) {
                let all = &mut hidden[gate];
                all.h.extend(part.h);
                all.of_h.extend(part.of_h);
                all.widest = all.widest.max(part.widest);
            }
        }
        let hidden: Vec<Hidden> = hidden.into_iter().map(|part| self.rounded(part)).collect();
        let second = tasks(self.w2.n);
        let parts = in_parallel(second.len(), |i| {
            let (expert, of_expert, columns) = &second[i];
            let of_expert = of_expert.iter().map(|&g| (&hidden[g], gates[g].weight));
            self.down(*expert, of_expert, columns.clone())
        })?;
        let mut sums: Vec<_> = gates.iter().map(|_| Sums { values: vec![], reach: vec![] }).collect();
        for ((_, of_expert, _), parts) in second.iter().zip(parts) {
            for (&gate, part) in of_expert.iter().zip(parts) {
                sums[gate].values.extend(part.values);
                sums[gate].reach.extend(part.reach);
            }
        }
        Ok(sums)
    }

    /// Columns of `h` of some tokens.
    fn part(
        &self,
        expert: usize,
        tokens: impl Iterator<Item = usize>,
        columns: Range<usize>,
    ) -> Result<Vec<Part>> {
        let (inner, hidden) = (self.w1.n / 2, self.w1.k);
        let row = |col: usize, value: usize| match self.gate.order {
            GateOrder::Halves => value * inner + col,
            GateOrder::Pairs => 2 * col + value,
        };
        let rows = || (0..2).flat_map(|value| columns.clone().map(move |col| (col, value)));
        let w = self.w1.rows(expert, rows().map(|(col, value)| row(col, value)))?;
        let bias: Option<Vec<f64>> = self
            .w1_bias
            .map(|bias| rows().map(|(col, value)| bias[expert * 2 * inner + row(col, value)]).collect());
        let problem = ExpertProblem {
            a: self.a,
            w: &w,
            k: hidden,
            w_rows: 2 * columns.len(),
            bias: bias.as_deref(),
            weights: None,
            weight_first: false,
            gate: Some(ExpertGate { order: GateOrder::Halves, ..self.gate }),
            activation: None,
            round: None,
        };
        let part = |token| {
            let (h, of_h) = reference::expert_gemm(&problem, &[Some((token, 0))]);
            let mut widest = 0.0;
            if self.kind == Kind::MxFp8 {
                // Another rounding of the activations to fp8, of the other encoding, is as far off as a step.
                let x = &self.x[token * hidden..][..hidden];
                let largest = hk_quant::reference::finite_max(x);
                let steps: Vec<f64> = x.iter().map(|&x| step(self.kind, self.of_w, x, largest)).collect();
                widest = w.chunks_exact(hidden).map(|w| dot(&steps, w).1).fold(0.0, f64::max);
            }
            Part { h, of_h, widest }
        };
        Ok(tokens.map(part).collect())
    }

    /// `h`, rounded and quantized.
    fn rounded(&self, part: Part) -> Hidden {
        let &Self { kind, of_w, dtype, .. } = self;
        let Part { h, mut of_h, widest } = part;
        // Gates are at most as steep as 1.13, and values up to as large as the limit.
        of_h.iter_mut().for_each(|m| *m += 20.0 * widest / EXPERT_TERMS);
        let at = |sign: f64| h.iter().zip(&of_h).map(move |(h, m)| round(dtype, h + sign * EXPERT_TERMS * m));
        let (low, high): (Vec<f64>, Vec<f64>) = (at(-1.0).collect(), at(1.0).collect());
        let largest = hk_quant::reference::finite_max(&high).max(hk_quant::reference::finite_max(&low));
        let exact = low == high;
        let h: Vec<f64> = h.iter().map(|&h| round(dtype, h)).collect();
        let off = |i: usize| {
            let moved = high[i] - low[i];
            if exact { 0.0 } else { moved + step(kind, of_w, h[i].abs() + moved, largest) }
        };
        Hidden { q: quantized(kind, of_w, &h, h.len()), off: (0..h.len()).map(off).collect() }
    }

    /// Columns of the outputs of some gates.
    fn down<'h>(
        &self,
        expert: usize,
        gates: impl Iterator<Item = (&'h Hidden, f64)>,
        columns: Range<usize>,
    ) -> Result<Vec<Sums>> {
        let w = self.w2.rows(expert, columns.clone())?;
        let ulp = if self.dtype == DType::F16 { 1.0 / 1024.0 } else { 1.0 / 128.0 };
        let output = |(hidden, weight): (&Hidden, f64)| {
            let mut sums = Sums { values: vec![], reach: vec![] };
            for (col, w) in columns.clone().zip(w.chunks_exact(self.w2.k)) {
                let bias = self.w2_bias.map_or(0.0, |bias| bias[expert * self.w2.n + col]);
                let (sum, magnitude) = dot(&hidden.q, w);
                let (sum, magnitude, unsure) = (sum + bias, magnitude + bias.abs(), dot(&hidden.off, w).1);
                let rounded = (sum * weight).abs() * ulp;
                sums.values.push(sum * weight);
                sums.reach.push(weight.abs() * (magnitude + unsure / EXPERT_TERMS) + rounded / EXPERT_TERMS);
            }
            sums
        };
        Ok(gates.map(output).collect())
    }
}
