//! Example data.

use super::tensor::{Convert as _, with_element};
use super::{HostTensor, TensorSpec};
use crate::{DType, Result};

/// Distribution of example data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sample {
    /// Normal.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        deviation: f32,
    },
    /// Uniform.
    Uniform {
        /// Lower bound.
        low: f32,
        /// Upper bound, excluded.
        high: f32,
    },
    /// Uniform integers.
    Integers {
        /// Lower bound.
        low: i64,
        /// Upper bound, excluded.
        high: i64,
    },
    /// Integers from 0 to `below`, excluded, none of them twice: slots, rows.
    Distinct {
        /// Upper bound, excluded; at least the number of elements.
        below: i64,
    },
    /// Uniform integers from -1 to the rows of another input of the call, both included: its rows, and two that it lacks.
    RowsOf(&'static str),
    /// `0, step, 2 * step, ..`: where sequences of one length begin.
    Steps {
        /// From one element to the next.
        step: i64,
    },
    /// Starts of sequences that together have `rows` rows, nearly as many each: `i rows / n`.
    Starts {
        /// Rows of all.
        rows: i64,
    },
    /// [`Starts`](Self::Starts) of the rows of another input of the call.
    StartsOf(&'static str),
    /// Lengths of sequences that together have `rows` rows: up to twice as many as the mean.
    Lengths {
        /// Rows of all.
        rows: i64,
    },
    /// [`Lengths`](Self::Lengths) of the rows of another input of the call.
    LengthsOf(&'static str),
    /// Lengths of sequences whose pages are the columns of another input of the call: uniform, from half to all of their tokens.
    LengthsIn {
        /// The table of pages.
        table: &'static str,
        /// Tokens of a page.
        page: i64,
    },
    /// [`Lengths`](Self::Lengths) of sequences whose whole pages, one sequence after the other, are the columns of another input of the
    /// call: half of their tokens.
    LengthsOfAllIn {
        /// The table of pages.
        table: &'static str,
        /// Tokens of a page.
        page: i64,
    },
    /// Positive, with a sum of one along the last axis, over some orders of magnitude.
    Probabilities,
}

impl Sample {
    /// The distribution with what it takes from other inputs, which `shape` gives by name; without them as of one row or page.
    pub(super) fn resolved<'s>(self, shape: impl Fn(&str) -> Option<&'s [usize]>) -> Self {
        let rows = |of| shape(of).and_then(|s| s.first()).map_or(1, |&n| n as i64);
        let columns = |of| shape(of).and_then(|s| s.last()).map_or(1, |&n| n as i64);
        match self {
            Self::StartsOf(of) => Self::Starts { rows: rows(of) },
            Self::LengthsOf(of) => Self::Lengths { rows: rows(of) },
            Self::RowsOf(of) => Self::Integers { low: -1, high: rows(of).saturating_add(1) },
            Self::LengthsIn { table, page } => {
                let tokens = page.saturating_mul(columns(table));
                Self::Integers { low: tokens / 2, high: tokens.saturating_add(1) }
            }
            Self::LengthsOfAllIn { table, page } => {
                Self::Lengths { rows: page.saturating_mul(columns(table)) / 2 }
            }
            _ => self,
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn draw(&mut self, sample: Sample) -> f64 {
        match sample {
            // The sum of twelve uniform numbers: near enough to normal, and the same bits on every host.
            Sample::Normal { mean, deviation } => {
                let z = (0..12).map(|_| self.unit()).sum::<f64>() - 6.0;
                f64::from(mean) + f64::from(deviation) * z
            }
            Sample::Uniform { low, high } => {
                f64::from(low) + (f64::from(high) - f64::from(low)) * self.unit()
            }
            Sample::Integers { low, high } => self.below(low, high) as f64,
            Sample::Distinct { .. }
            | Sample::Steps { .. }
            | Sample::Starts { .. }
            | Sample::StartsOf(_)
            | Sample::Lengths { .. }
            | Sample::LengthsOf(_)
            | Sample::RowsOf(_)
            | Sample::LengthsIn { .. }
            | Sample::LengthsOfAllIn { .. }
            | Sample::Probabilities => {
                unreachable!("these depend on the other elements: `sequence`")
            }
        }
    }

    /// Uniform in `low..high`.
    fn below(&mut self, low: i64, high: i64) -> i64 {
        let range = high.saturating_sub(low).max(1) as u64;
        low.wrapping_add((self.bits() % range) as i64)
    }

    /// `n` values whose rows have `cols` of them.
    fn sequence(&mut self, sample: Sample, n: usize, cols: usize) -> Vec<f64> {
        match sample {
            Sample::Distinct { below } => {
                // The first steps of a shuffle; only what it has moved is kept.
                let mut moved = std::collections::HashMap::new();
                let pick = |i: i64| {
                    let at = self.below(i, below);
                    let here = moved.get(&i).copied().unwrap_or(i);
                    moved.insert(at, here).unwrap_or(at) as f64
                };
                (0..n as i64).map(pick).collect()
            }
            Sample::Steps { step } => (0..n as i64).map(|i| i.wrapping_mul(step) as f64).collect(),
            Sample::Starts { rows } => {
                let last = (n as i64 - 1).max(1);
                (0..n as i64).map(|i| i.wrapping_mul(rows).wrapping_div(last) as f64).collect()
            }
            Sample::Lengths { rows } => {
                // Each end is up to half a mean from where it would be with equal lengths.
                let mut from = 0.0;
                let mut length = |i: usize| {
                    let end = if i + 1 == n { 1.0 } else { (i as f64 + 0.5 + self.unit()) / n as f64 };
                    let end = (end * rows as f64).floor();
                    end - std::mem::replace(&mut from, end)
                };
                (0..n).map(&mut length).collect()
            }
            Sample::Probabilities => {
                let normal = Sample::Normal { mean: 0.0, deviation: 2.0 };
                let mut values: Vec<f64> = (0..n).map(|_| self.draw(normal).exp()).collect();
                for row in values.chunks_mut(cols.max(1)) {
                    let sum: f64 = row.iter().sum();
                    row.iter_mut().for_each(|v| *v /= sum);
                }
                values
            }
            _ => (0..n).map(|_| self.draw(sample)).collect(),
        }
    }
}

impl HostTensor {
    /// Example data, the same for the same seed. Elements that do not depend on each other repeat after 2^22 or so.
    ///
    /// # Errors
    /// As [`TensorSpec::bytes`].
    pub fn sample(spec: TensorSpec, sample: Sample, seed: u64) -> Result<Self> {
        /// The largest prime below 2^22, so that no two rows are equal.
        const PERIOD: usize = 4_194_301;
        let sample = sample.resolved(|_| None);
        let len = spec.bytes()?;
        let n = match sample {
            Sample::Normal { .. } | Sample::Uniform { .. } | Sample::Integers { .. } => PERIOD,
            _ => usize::MAX,
        };
        let n = n.min(len / spec.dtype.size_bytes());
        let per_element = if spec.dtype == DType::Fp4x2 { 2 } else { 1 };
        let cols = per_element * spec.shape.last().copied().unwrap_or(1);
        let mut values = Random(seed).sequence(sample, n * per_element, cols).into_iter();
        let mut bytes = with_element!(spec.dtype, T => {
            let elements: Vec<T> = (0..n).map(|_| T::encode(|| values.next().unwrap_or(0.0))).collect();
            bytemuck::cast_slice(&elements).to_vec()
        });
        let period = bytes.len();
        bytes.reserve_exact(len - period);
        while bytes.len() < len {
            bytes.extend_from_within(..period.min(len - bytes.len()));
        }
        Self::from_bytes(spec, bytes)
    }
}
