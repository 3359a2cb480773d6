//! References of the operators, in f64 and plain loops.
//!
//! Inputs are the values that the kernels read, already rounded to their types; results are not rounded. Parameters out of range
//! act as on the device.

use crate::FilterOrder;
use hk_core::registry::{philox, ranked};

/// A random word as a number in (0, 1], a multiple of 2^-24.
pub fn unit_interval(word: u32) -> f64 {
    f64::from((word >> 8) + 1) / f64::from(1 << 24)
}

/// The uniform number of output `b`: [`Draw`](crate::Draw).
pub fn uniform(seed: u64, offset: u64, b: usize) -> f64 {
    unit_interval(philox([offset as u32, (offset >> 32) as u32, b as u32, 0], seed)[0])
}

/// The exponential number of token `i` for output `b`: [`Race`](crate::Race).
pub fn exponential(seed: u64, offset: u64, b: usize, i: usize) -> f64 {
    let words = philox([offset as u32, (offset >> 32) as u32, b as u32, (i / 4) as u32], seed);
    -unit_interval(words[i % 4]).ln()
}

/// The filters of one row; `None` keeps all.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Filters {
    /// As [`crate::Filters::k`].
    pub k: Option<i64>,
    /// As [`crate::Filters::p`].
    pub p: Option<f64>,
    /// As [`crate::Filters::min_p`].
    pub min_p: Option<f64>,
    /// As [`crate::Filters::order`].
    pub order: FilterOrder,
}

/// The tokens that filters keep of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Kept {
    /// The least kept probability; infinite if nothing is kept.
    pub threshold: f64,
    /// Sum of the kept probabilities.
    pub mass: f64,
    /// Number of kept tokens.
    pub count: usize,
}

/// The probabilities that can be drawn: those that are not finite and positive become 0, all of them if one is +Inf.
pub fn clean(row: &[f64]) -> Vec<f64> {
    if row.contains(&f64::INFINITY) {
        return vec![0.0; row.len()];
    }
    row.iter().map(|&v| if v > 0.0 { v } else { 0.0 }).collect()
}

/// The tokens that filters keep of a clean row.
pub fn kept(row: &[f64], filters: Filters) -> Kept {
    let order = ranked(row, true).into_iter().map(|i| row[i]);
    let sorted: Vec<f64> = order.take_while(|&v| v > 0.0).collect();
    let Some(&max) = sorted.first() else { return Kept { threshold: f64::INFINITY, mass: 0.0, count: 0 } };
    // A filter decides by the number and mass of the tokens above, so ties are kept or dropped together.
    let threshold_of = |keeps: &dyn Fn(usize, f64) -> bool| {
        let (mut mass, mut threshold) = (0.0, max);
        for (above, group) in groups(&sorted) {
            if !keeps(above, mass) {
                break;
            }
            threshold = group[0];
            mass += group.iter().sum::<f64>();
        }
        threshold
    };
    let of_k = filters.k.map_or(0.0, |k| threshold_of(&|above, _| (above as i64) < k.max(1)));
    let of_min = filters.min_p.filter(|p| *p > 0.0).map_or(0.0, |p| p.min(1.0) * max);
    let mass_from = |least: f64| sorted.iter().take_while(|v| **v >= least).sum::<f64>();
    let of_p = filters.p.filter(|p| *p <= 1.0).map_or(0.0, |p| {
        let p = match filters.order {
            FilterOrder::Joint => p,
            FilterOrder::TopKFirst => p * mass_from(of_k.max(of_min)),
        };
        threshold_of(&|_, mass| mass < p)
    });
    let threshold = of_k.max(of_min).max(of_p);
    let count = sorted.iter().take_while(|v| **v >= threshold).count();
    Kept { threshold, mass: mass_from(threshold), count }
}

/// The runs of equal values, each with the number of values before it.
fn groups(sorted: &[f64]) -> impl Iterator<Item = (usize, &[f64])> {
    sorted.chunk_by(|a, b| a == b).scan(0, |before, group| {
        let above = *before;
        *before += group.len();
        Some((above, group))
    })
}

/// The token that `u` draws from the kept ones of a clean row; 0 if nothing is kept.
pub fn draw(row: &[f64], kept: &Kept, u: f64) -> usize {
    let mut tokens = row.iter().enumerate().filter(|(_, v)| **v > 0.0 && **v >= kept.threshold);
    let (mut sum, mut last) = (0.0, 0);
    let reaches = |(i, v): &(usize, &f64)| {
        sum += **v;
        last = *i;
        sum >= u * kept.mass
    };
    match tokens.find(reaches) {
        Some((i, _)) => i,
        None => last,
    }
}

/// `softmax(logits / temperature)`, clean. At a temperature of zero the first of the largest logits has probability 1; others are
/// at least 1e-5.
pub fn softmax(logits: &[f64], temperature: f64) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !max.is_finite() {
        return vec![0.0; logits.len()];
    }
    if temperature == 0.0 {
        let first = argmax(logits);
        return (0..logits.len()).map(|i| f64::from(u8::from(i == first))).collect();
    }
    let t = temperature.max(f64::from(1e-5f32));
    let numbers: Vec<f64> =
        logits.iter().map(|v| if v.is_nan() { 0.0 } else { ((v - max) / t).exp() }).collect();
    let sum: f64 = numbers.iter().sum();
    numbers.iter().map(|v| v / sum).collect()
}

/// The smallest index of the largest number; 0 if there is none above -Inf.
pub fn argmax(scores: &[f64]) -> usize {
    let best = |best: (usize, f64), (i, &v): (usize, &f64)| if v > best.1 { (i, v) } else { best };
    scores.iter().enumerate().fold((0, f64::NEG_INFINITY), best).0
}

/// `logits / temperature - ln(exponentials + 1e-10)`: the scores of a race.
pub fn race_scores(logits: &[f64], temperature: f64, exponentials: &[f64]) -> Vec<f64> {
    let t = temperature.max(f64::from(1e-5f32));
    logits.iter().zip(exponentials).map(|(l, e)| l / t - (e + f64::from(1e-10f32)).ln()).collect()
}

/// The kept probabilities of a clean row, divided by their mass (1e-8 at least); 0 for the others.
pub fn renorm(row: &[f64], kept: &Kept) -> Vec<f64> {
    let keeps = |v: f64| v > 0.0 && v >= kept.threshold;
    row.iter().map(|&v| if keeps(v) { v / kept.mass.max(1e-8) } else { 0.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_interval_excludes_zero_and_includes_one() {
        assert_eq!(unit_interval(0), 2f64.powi(-24));
        assert_eq!(unit_interval(u32::MAX), 1.0);
    }

    #[test]
    fn filters_keep_ties_and_the_token_that_crosses() {
        let row = [0.5, 0.2, 0.1, 0.1, 0.1, 0.0];
        let count = |f: Filters| kept(&row, f).count;
        assert_eq!(count(Filters { k: Some(1), ..Default::default() }), 1);
        assert_eq!(count(Filters { k: Some(3), ..Default::default() }), 5);
        assert_eq!(count(Filters { k: Some(0), ..Default::default() }), 1);
        assert_eq!(count(Filters { p: Some(0.5), ..Default::default() }), 1);
        assert_eq!(count(Filters { p: Some(0.51), ..Default::default() }), 2);
        assert_eq!(count(Filters { p: Some(-1.0), ..Default::default() }), 1);
        assert_eq!(count(Filters { p: Some(f64::NAN), ..Default::default() }), 5);
        assert_eq!(count(Filters { min_p: Some(0.4), ..Default::default() }), 2);
        assert_eq!(count(Filters { min_p: Some(2.0), ..Default::default() }), 1);
        assert_eq!(count(Filters::default()), 5);
        // 0.5 / 0.7 is above 0.6, 0.5 is not.
        let both = Filters { k: Some(2), p: Some(0.6), ..Default::default() };
        assert_eq!(count(both), 2);
        assert_eq!(count(Filters { order: FilterOrder::TopKFirst, ..both }), 1);
    }
}
