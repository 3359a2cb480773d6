//! Products in `f64` and plain loops, with what bounds the error of the same in `f32`.

use crate::{Activation, FuseType};
use hk_core::Fp4Rounding;
use hk_core::quant::{BlockRule, BlockScale, Quantized, group_scale};
use hk_core::registry::{axpy, dot};
use hk_core::{DType, Float, bf16, f16};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};
use std::ops::Range;

/// Error of a sum in `f32`, in its magnitude.
const TERMS: f64 = 1.0 / (1u64 << 18) as f64;

/// Sums and, for each, the sum of its terms' magnitudes: an `f32` sum is off by a small part of the latter at most.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// `sum_k a[m, k] w[n, k]`, row by row.
    pub values: Vec<f64>,
    /// `sum_k |a[m, k] w[n, k]|`.
    pub magnitudes: Vec<f64>,
}

/// `a w^T` for each batch of `a` `[batch, m, k]` and `w` `[batch, n, k]`.
///
/// # Panics
/// If a slice is shorter.
pub fn product(a: &[f64], w: &[f64], [batch, m, n, k]: [usize; 4]) -> Sums {
    let (mut values, mut magnitudes) = (vec![0.0; batch * m * n], vec![0.0; batch * m * n]);
    for b in 0..batch {
        // Eight rows of w stay in the cache while all rows of a pass.
        for first in (0..n).step_by(8) {
            for i in 0..m {
                for j in first..n.min(first + 8) {
                    let (x, y) = ((b * m + i) * k, (b * n + j) * k);
                    let at = (b * m + i) * n + j;
                    (values[at], magnitudes[at]) = dot(&a[x..x + k], &w[y..y + k]);
                }
            }
        }
    }
    Sums { values, magnitudes }
}

/// `h = activation(x w_up[..i]^T) * (x w_up[i..]^T)`, or `activation(x w_up^T)` without gates, rounded to `dtype`, and `h w_down`;
/// of `x` `[m, k]`, `w_up` `[2 i, k]` or `[i, k]`, `w_down` `[i, k]`.
///
/// Another sum of an `h` can round to its other neighbour: a step of that, in all terms, is within the bound of `terms` of the
/// magnitudes.
///
/// # Panics
/// If a slice is shorter.
pub fn feed_forward(
    x: &[f64],
    w_up: &[f64],
    w_down: &[f64],
    [m, k, i]: [usize; 3],
    gated: bool,
    activation: Option<Activation>,
    dtype: DType,
) -> Sums {
    let sums = product(x, w_up, [1, m, if gated { 2 * i } else { i }, k]);
    let exact = if gated { sums.gated(activation, i, TERMS) } else { sums.activated(activation) };
    let round = |x: f64| {
        if dtype == DType::F16 {
            <f16 as Float>::from_f64(x).to_f64()
        } else {
            <bf16 as Float>::from_f64(x).to_f64()
        }
    };
    let h: Vec<f64> = exact.values.iter().map(|&x| round(x)).collect();
    // In units of TERMS: how far h may be off.
    let off = exact.values.iter().zip(&exact.magnitudes).map(|(&x, &magnitude)| {
        let reach = TERMS * magnitude;
        let (low, high) = (round(x - reach), round(x + reach));
        (high - low) / TERMS
    });
    let off: Vec<f64> = off.collect();
    let mut y = Sums { values: vec![0.0; m * k], magnitudes: vec![0.0; m * k] };
    for (row, at) in (0..m).flat_map(|row| (0..i).map(move |at| (row, at))) {
        let (h, off) = (h[row * i + at], off[row * i + at]);
        for (col, w) in w_down[at * k..][..k].iter().enumerate() {
            y.values[row * k + col] += h * w;
            y.magnitudes[row * k + col] += (h * w).abs() + off * w.abs();
        }
    }
    y
}

/// The rows of each group: as many as its size says, after those of the groups before it, of `m` in all. None for a size below
/// zero.
pub fn group_rows(sizes: &[i64], m: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let rows = |&size: &i64| {
        let first = end;
        end = usize::try_from(size.max(0)).map_or(m, |size| m.min(end.saturating_add(size)));
        first..end
    };
    sizes.iter().map(rows).collect()
}

/// For the rows of each group `lhs rhs[g]`, of `lhs` `[m, k]` and `rhs` `[groups, k, n]`; zero for other rows.
///
/// # Panics
/// If a slice is shorter.
pub fn gmm(lhs: &[f64], rhs: &[f64], groups: &[Range<usize>], [m, n, k]: [usize; 3]) -> Sums {
    let mut sums = Sums { values: vec![0.0; m * n], magnitudes: vec![0.0; m * n] };
    for (g, rows) in groups.iter().enumerate() {
        for (row, i) in rows.clone().flat_map(|row| (0..k).map(move |i| (row, i))) {
            let x = lhs[row * k + i];
            let at = row * n..(row + 1) * n;
            let w = &rhs[(g * k + i) * n..][..n];
            axpy(x, w, &mut sums.values[at.clone()], &mut sums.magnitudes[at]);
        }
    }
    sums
}

/// For each group `lhs[:, rows] rhs[rows, :]`, of `lhs` `[k, m]` and `rhs` `[m, n]`, as `[groups, k, n]`.
///
/// # Panics
/// If a slice is shorter.
pub fn tgmm(lhs: &[f64], rhs: &[f64], groups: &[Range<usize>], [m, n, k]: [usize; 3]) -> Sums {
    let len = groups.len() * k * n;
    let mut sums = Sums { values: vec![0.0; len], magnitudes: vec![0.0; len] };
    for (g, rows) in groups.iter().enumerate() {
        for (row, i) in rows.clone().flat_map(|row| (0..k).map(move |i| (row, i))) {
            let at = (g * k + i) * n..(g * k + i + 1) * n;
            let w = &rhs[row * n..][..n];
            axpy(lhs[i * m + row], w, &mut sums.values[at.clone()], &mut sums.magnitudes[at]);
        }
    }
    sums
}

/// The rows of `x`, `k` long, with one scale for each `rows` of them and `columns` of their columns.
///
/// # Panics
/// If there are fewer scales.
pub fn scaled(x: &[f64], k: usize, scales: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    let groups = k.div_ceil(columns);
    let at = |i: usize| scales[i / k / rows * groups + i % k / columns];
    x.iter().enumerate().map(|(i, x)| x * at(i)).collect()
}

/// Rows of `k` values from weights in shuffled order ([`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled)), with chunks of `chunk`.
///
/// # Panics
/// If there are no whole blocks of 16 rows.
pub fn unshuffled(shuffled: &[f64], k: usize, chunk: usize) -> Vec<f64> {
    let mut plain = vec![0.0; shuffled.len()];
    for (i, &value) in shuffled.iter().enumerate() {
        let (block, rest) = (i / (16 * k), i % (16 * k));
        let (column, row) = (rest / (16 * chunk) * chunk + rest % chunk, rest / chunk % 16);
        plain[(block * 16 + row) * k + column] = value;
    }
    plain
}

/// What the codes of rows of `k` 16-bit floats stand for in mxfp4.
pub fn mx_quantized(x: &[f64], k: usize) -> Vec<f64> {
    let rule = BlockRule::fp4(BlockScale::Even, 0);
    let encode = hk_quant::reference::fp4(Fp4Rounding::NearestEven);
    let out = hk_quant::reference::mx_quant(x, k.max(1), rule, encode);
    let blocks = k.div_ceil(32);
    out.q.iter().enumerate().map(|(i, q)| q * out.scale[i / k * blocks + i % k / 32]).collect()
}

/// What the codes of rows of `k` 16-bit floats stand for, with a scale for each `columns`; as kernels compute them in f32.
pub fn group_quantized<C: Quantized>(x: &[f64], k: usize, columns: usize) -> Vec<f64> {
    let group = |group: &[f64]| {
        let amax = hk_quant::reference::finite_max(group) as f32;
        let scale = group_scale(amax, C::FORMAT);
        let code =
            move |&x: &f64| f64::from(C::from_f32(x as f32 * (1.0 / scale)).to_f32()) * f64::from(scale);
        group.iter().map(code).collect::<Vec<_>>()
    };
    x.chunks_exact(k.max(1)).flat_map(|row| row.chunks(columns)).flat_map(group).collect()
}

impl Sums {
    /// Divided by a number.
    #[must_use]
    pub fn divided(mut self, by: f64) -> Self {
        let both = self.values.iter_mut().zip(&mut self.magnitudes);
        both.for_each(|(value, magnitude)| (*value, *magnitude) = (*value / by, *magnitude / by.abs()));
        self
    }

    /// With two terms for each, or for all: `a * g + b`, or `a * b + g`.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn with_terms(mut self, fuse: FuseType, a: &[f64], b: &[f64]) -> Self {
        let at = |terms: &[f64], i: usize| terms[if terms.len() == 1 { 0 } else { i }];
        for (i, (value, magnitude)) in self.values.iter_mut().zip(&mut self.magnitudes).enumerate() {
            let (a, b) = (at(a, i), at(b, i));
            let (factor, rest) = if fuse == FuseType::ScaleAdd { (a, b) } else { (1.0, a * b) };
            *value = *value * factor + rest;
            *magnitude = *magnitude * factor.abs() + rest.abs();
        }
        self
    }

    /// Scaled: of rows of `n`, element `(m, n)` by `x[m] w[n]`, each with a number for each row or one for all of a batch of
    /// `m` rows.
    ///
    /// # Panics
    /// If there are fewer scales.
    #[must_use]
    pub fn scaled(mut self, x: &[f64], w: &[f64], [m, n]: [usize; 2]) -> Self {
        for (i, (value, magnitude)) in self.values.iter_mut().zip(&mut self.magnitudes).enumerate() {
            let (row, batch) = (i / n, i / n / m);
            let x = if x.len() == 1 { x[0] } else { x[row] };
            let w = if w.len() == 1 { w[0] } else { w[batch * n + i % n] };
            *value *= x * w;
            *magnitude *= (x * w).abs();
        }
        self
    }

    /// With a bias for each column, of each batch of `m` rows; or none.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn biased(mut self, bias: &[f64], [m, n]: [usize; 2]) -> Self {
        if !bias.is_empty() {
            for (i, (value, magnitude)) in self.values.iter_mut().zip(&mut self.magnitudes).enumerate() {
                let bias = bias[i / n / m * n + i % n];
                *value += bias;
                *magnitude += bias.abs();
            }
        }
        self
    }

    /// The activation of each.
    #[must_use]
    pub fn activated(mut self, activation: Option<Activation>) -> Self {
        for (value, magnitude) in self.values.iter_mut().zip(&mut self.magnitudes) {
            *value = activate(activation, *value);
            *magnitude *= steepness(activation);
        }
        self
    }

    /// Rows of `n` outputs from rows of `n` gates, then `n` values: `activation(gate) * value`. `terms`: how far sums are off, in
    /// their magnitudes; the result's magnitudes bound its error by the same.
    #[must_use]
    pub fn gated(self, activation: Option<Activation>, n: usize, terms: f64) -> Self {
        let (mut values, mut magnitudes) = (Vec::new(), Vec::new());
        let rows = self.values.chunks_exact(2 * n.max(1)).zip(self.magnitudes.chunks_exact(2 * n.max(1)));
        for (sums, of) in rows {
            for i in 0..n {
                let (gate, value) = (activate(activation, sums[i]), sums[n + i]);
                let farthest = value.abs() + terms * of[n + i];
                values.push(gate * value);
                magnitudes.push(steepness(activation) * of[i] * farthest + gate.abs() * of[n + i]);
            }
        }
        Self { values, magnitudes }
    }
}

/// The function of an activation, or none.
pub fn activate(activation: Option<Activation>, x: f64) -> f64 {
    match activation {
        None => x,
        Some(Activation::Silu) => x / (1.0 + (-x).exp()),
        Some(Activation::Gelu) => x * (0.5 * libm::erfc(-x * FRAC_1_SQRT_2)),
        Some(Activation::GeluTanh) => {
            let u = FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3));
            // (1 + tanh u) / 2, without cancellation.
            x / (1.0 + (-2.0 * u).exp())
        }
        Some(Activation::Relu) => x.max(0.0),
        Some(Activation::Tanh) => x.tanh(),
        Some(Activation::Relu6) => x.clamp(0.0, 6.0),
    }
}

/// The steepest slope of an activation, at least.
fn steepness(activation: Option<Activation>) -> f64 {
    match activation {
        None | Some(Activation::Relu | Activation::Tanh | Activation::Relu6) => 1.0,
        // 1.0998, 1.1290, 1.1290.
        Some(Activation::Silu | Activation::Gelu | Activation::GeluTanh) => 1.13,
    }
}
