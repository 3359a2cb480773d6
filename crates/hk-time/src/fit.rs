//! The fit of the constants marked [`Provenance::Fitted`] to measured launches, and its error on kernels that it has not seen.

use std::collections::BTreeMap;
use std::path::Path;

use hk_codeobj::Arch;
use rayon::prelude::*;

use crate::constants::{CONSTANTS, Provenance, Values};
use crate::error::Error;
use crate::figure::{Point, svg};
use crate::model::{Prediction, Traced};
use crate::parts::Part;
use crate::rows::{Row, Rows};

/// A measured launch that has been traced.
pub struct Case {
    /// The row.
    pub row: Row,
    /// Measured microseconds.
    pub measured: f64,
    traced: Traced,
    facts: Facts,
}

impl Case {
    /// The model's time.
    pub fn predict(&self, values: &Values) -> Prediction {
        self.traced.time(values)
    }
}

/// What the baselines know of a launch.
#[derive(Debug, Clone, Copy)]
struct Facts {
    part: &'static Part,
    /// Compulsory bytes, and flops of the shape.
    bytes: f64,
    flop: f64,
    /// Flops of a compute unit in a clock.
    rate: f64,
    /// Rounds of workgroups, and bytes that one of them loads.
    rounds: f64,
    workgroup_bytes: f64,
}

impl Facts {
    fn of(row: &Row) -> Result<Facts, String> {
        let part = Part::named(row.get("gpu")).ok_or("gpu")?;
        let k: f64 = row.number("K")?;
        let moe = row.get("family").starts_with("moe");
        let dims = |c: &str| row.get(c).split('x').filter_map(|n| n.parse().ok()).collect::<Vec<f64>>();
        let (tile, grid) = (dims("tile"), dims("grid"));
        let (&[tm, tn], &[gx, gy, gz]) = (&tile[..], &grid[..]) else {
            return Err("tile or grid".to_owned());
        };
        let gfx950 = part.arch == Arch::Gfx950;
        let (element, rate) = match row.get("family") {
            "gemm_bf16" => (2.0, 2048.0),
            "gemm_fp4_mx" => (0.5 + 1.0 / 32.0, 8192.0),
            _ => (1.0, 4096.0),
        };
        Ok(Facts {
            part,
            bytes: row.number("bytes")?,
            flop: row.number("flop")?,
            rate: if gfx950 { 2.0 * rate } else { rate },
            rounds: (gx * gy * gz / f64::from(part.cus())).ceil(),
            // A fused MoE kernel reads gates, the first and the second weights of its columns.
            workgroup_bytes: (tm + if moe { 3.0 * tn } else { tn }) * k / gz * element,
        })
    }
}

/// A model of few parameters, each within a range, to compare with.
struct Baseline {
    name: &'static str,
    ranges: &'static [[f64; 2]],
    us: fn(&Facts, &[f64]) -> f64,
}

fn roofline(f: &Facts, p: &[f64]) -> [f64; 2] {
    let hbm = f.bytes / (p[1] * f.part.hbm.value * 1e3);
    let clock = f.part.peak_mhz.value;
    [hbm, f.flop / (p[2] * f.rate * f64::from(f.part.cus()) * clock)]
}

/// The sum in a norm: 1 adds, a large one takes the largest.
fn norm(terms: &[f64], p: f64) -> f64 {
    terms.iter().map(|t| t.powf(p)).sum::<f64>().powf(1.0 / p)
}

/// Constant, reach of HBM, reach of the matrix peak, sharpness of the bend; and bytes that a compute unit loads in a clock.
const BASELINES: [Baseline; 2] = [
    Baseline {
        name: "roofline",
        ranges: &[[0.5, 12.0], [0.1, 1.0], [0.1, 1.0], [1.0, 8.0]],
        us: |f, p| p[0] + norm(&roofline(f, p), p[3]),
    },
    Baseline {
        name: "with fill limit",
        ranges: &[[0.5, 12.0], [0.1, 1.0], [0.1, 1.0], [1.0, 8.0], [8.0, 64.0]],
        us: |f, p| {
            let [hbm, matrix] = roofline(f, p);
            let fill = f.rounds * f.workgroup_bytes / (p[4] * f.part.peak_mhz.value);
            p[0] + norm(&[hbm, matrix, fill], p[3])
        },
    },
];

/// Traces the rows that have a measured time. Gives those that cannot be modelled with the reason.
pub fn cases(rows: &Rows, objects: &Path) -> (Vec<Case>, Vec<(String, String)>) {
    let traced: Vec<Result<Case, (String, String)>> = rows
        .rows
        .par_iter()
        .map(|row| {
            let case = || {
                let (measured, facts) = (row.number("measured_us")?, Facts::of(row)?);
                Ok(Case { row: row.clone(), measured, traced: row.trace(objects, false)?, facts })
            };
            case().map_err(|why: String| (row.get("id").to_owned(), why))
        })
        .collect();
    let (mut cases, mut left) = (vec![], vec![]);
    for result in traced {
        match result {
            Ok(case) => cases.push(case),
            Err(why) => left.push(why),
        }
    }
    (cases, left)
}

/// Folds of cases by code object: no two share one, whatever its revision, and each has its part of every family.
pub fn folds(cases: &[Case], k: usize) -> Vec<usize> {
    let mut objects: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for case in cases {
        *objects.entry((case.row.get("family"), case.row.get("co_path"))).or_default() += 1;
    }
    let mut order: Vec<_> = objects.into_iter().collect();
    order.sort_by_key(|((family, _), n)| (*family, std::cmp::Reverse(*n)));
    let mut of: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let (mut loads, mut all): (BTreeMap<&str, Vec<usize>>, Vec<usize>) = (BTreeMap::new(), vec![0; k]);
    for ((family, path), n) in order {
        let load = loads.entry(family).or_insert_with(|| vec![0; k]);
        let fold = (0..k).min_by_key(|i| (load[*i], all[*i])).unwrap_or(0);
        load[fold] += n;
        all[fold] += n;
        of.insert((family, path), fold);
    }
    let fold = |case: &Case| of.get(&(case.row.get("family"), case.row.get("co_path"))).copied().unwrap_or(0);
    cases.iter().map(fold).collect()
}

/// A box of parameters, each of which is moved as a share of its range.
struct Space<'a> {
    ranges: &'a [[f64; 2]],
}

impl Space<'_> {
    /// How far a parameter moves for a slope.
    const STEP: f64 = 0.06;

    fn value(&self, unit: &[f64]) -> Vec<f64> {
        unit.iter().zip(self.ranges).map(|(u, [low, high])| low + u * (high - low)).collect()
    }

    fn unit(&self, value: &[f64]) -> Vec<f64> {
        let unit = |(v, [low, high]): (&f64, &[f64; 2])| {
            if high > low { ((v - low) / (high - low)).clamp(0.0, 1.0) } else { 0.0 }
        };
        value.iter().zip(self.ranges).map(unit).collect()
    }

    /// Of each parameter, the slopes of all residuals at a point where they are `now`.
    fn slopes(&self, at: &[f64], now: &[f64], residuals: &dyn Fn(&[f64]) -> Vec<f64>) -> Vec<Vec<f64>> {
        (0..at.len())
            .map(|i| {
                // Towards the middle of the range: there is room.
                let step = if at[i] > 0.5 { -Self::STEP } else { Self::STEP };
                let mut moved = at.to_vec();
                moved[i] += step;
                residuals(&self.value(&moved)).iter().zip(now).map(|(r, now)| (r - now) / step).collect()
            })
            .collect()
    }
}

fn loss(residuals: &[f64]) -> f64 {
    residuals.iter().map(|r| r.abs()).sum::<f64>() / residuals.len().max(1) as f64
}

/// Minimises the mean of |residual| over a box by Gauss-Newton steps with weights 1/|residual|. Slopes are measured in
/// every iteration, or, if those of the start are given, corrected by what each step shows (Broyden).
fn minimise(
    ranges: &[[f64; 2]],
    start: &[f64],
    iterations: usize,
    known: Option<Vec<Vec<f64>>>,
    residuals: &dyn Fn(&[f64]) -> Vec<f64>,
) -> Vec<f64> {
    let space = Space { ranges };
    let n = ranges.len();
    let mut at = space.unit(start);
    let mut now = residuals(&space.value(&at));
    let measured = known.is_none();
    let mut slopes = known.unwrap_or_default();
    let mut damping = 0.02;
    for _ in 0..iterations {
        if measured {
            slopes = space.slopes(&at, &now, residuals);
        }
        let weights: Vec<f64> = now.iter().map(|r| 1.0 / r.abs().max(0.03)).collect();
        let dot =
            |a: &[f64], b: &[f64]| a.iter().zip(b).zip(&weights).map(|((a, b), w)| a * b * w).sum::<f64>();
        let gradient: Vec<f64> = slopes.iter().map(|s| -dot(s, &now)).collect();
        let floor = 0.1 * now.len() as f64;
        let normal: Vec<Vec<f64>> =
            slopes.iter().map(|a| slopes.iter().map(|b| dot(a, b)).collect()).collect();
        let mut better = false;
        for _ in 0..4 {
            let mut matrix = normal.clone();
            (0..n).for_each(|i| matrix[i][i] += damping * (matrix[i][i] + floor));
            let delta = solve(matrix, gradient.clone());
            let moved: Vec<f64> =
                at.iter().zip(delta).map(|(u, d)| (u + d.clamp(-0.3, 0.3)).clamp(0.0, 1.0)).collect();
            let step: Vec<f64> = moved.iter().zip(&at).map(|(b, a)| b - a).collect();
            let length: f64 = step.iter().map(|d| d * d).sum();
            let r = residuals(&space.value(&moved));
            if !measured && length > 1e-9 {
                for (i, (r, now)) in r.iter().zip(&now).enumerate() {
                    let expected: f64 = slopes.iter().zip(&step).map(|(s, d)| s[i] * d).sum();
                    let missed = (r - now - expected) / length;
                    slopes.iter_mut().zip(&step).for_each(|(s, d)| s[i] += missed * d);
                }
            }
            if loss(&r) < loss(&now) {
                (at, now, better) = (moved, r, true);
                damping = (damping * 0.4).max(1e-4);
                break;
            }
            damping *= 4.0;
            if !measured {
                // The slopes have changed.
                better = true;
                break;
            }
        }
        if !better {
            break;
        }
    }
    space.value(&at)
}

/// Solves a linear system by elimination.
fn solve(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Vec<f64> {
    let n = b.len();
    for i in 0..n {
        let pivot = (i..n).max_by(|x, y| a[*x][i].abs().total_cmp(&a[*y][i].abs())).unwrap_or(i);
        a.swap(i, pivot);
        b.swap(i, pivot);
        if a[i][i].abs() < 1e-12 {
            continue;
        }
        for row in i + 1..n {
            let by = a[row][i] / a[i][i];
            let upper = a[i].clone();
            a[row].iter_mut().zip(&upper).skip(i).for_each(|(x, y)| *x -= by * y);
            b[row] -= by * b[i];
        }
    }
    let mut x = vec![0.0; n];
    for i in (0..n).rev() {
        let rest: f64 = (i + 1..n).map(|j| a[i][j] * x[j]).sum();
        x[i] = if a[i][i].abs() < 1e-12 { 0.0 } else { (b[i] - rest) / a[i][i] };
    }
    x
}

fn fitted() -> Vec<usize> {
    let fitted = |i: &usize| CONSTANTS[*i].provenance == Provenance::Fitted;
    (0..CONSTANTS.len()).filter(fitted).collect()
}

fn with_fitted(x: &[f64]) -> Values {
    fitted().iter().zip(x).fold(Values::start(), |values, (i, x)| values.with(*i, *x))
}

/// ln(modelled / measured) of cases.
fn residuals(cases: &[&Case], x: &[f64]) -> Vec<f64> {
    let values = with_fitted(x);
    cases.par_iter().map(|case| (case.traced.time(&values).us / case.measured).ln()).collect()
}

/// How the modelled time of each case changes with each fitted constant, where the fit starts. Measured times do not
/// enter.
pub struct Slopes(Vec<Vec<f64>>);

impl Slopes {
    /// Of all cases.
    pub fn new(cases: &[Case]) -> Slopes {
        let all: Vec<&Case> = cases.iter().collect();
        let (ranges, start) = box_of_fit();
        let space = Space { ranges: &ranges };
        let f = |x: &[f64]| residuals(&all, x);
        Slopes(space.slopes(&space.unit(&start), &f(&start), &f))
    }
}

fn box_of_fit() -> (Vec<[f64; 2]>, Vec<f64>) {
    fitted().iter().map(|i| (CONSTANTS[*i].range, CONSTANTS[*i].value)).unzip()
}

/// Fits the constants to some of the cases, by index, from the table's starting values.
pub fn fit(cases: &[Case], chosen: &[usize], slopes: &Slopes, iterations: usize) -> Values {
    let some: Vec<&Case> = chosen.iter().map(|i| &cases[*i]).collect();
    let known = slopes.0.iter().map(|of| chosen.iter().map(|i| of[*i]).collect()).collect();
    let (ranges, start) = box_of_fit();
    with_fitted(&minimise(&ranges, &start, iterations, Some(known), &|x| residuals(&some, x)))
}

/// Predictions of the launches that were left out: of the model, and of each baseline.
pub struct Validation {
    /// For each case, the modelled time and that of each baseline.
    pub predicted: Vec<[f64; 1 + BASELINES.len()]>,
}

/// Predicts each fold from the others.
pub fn validate(
    cases: &[Case],
    folds: &[usize],
    slopes: &Slopes,
    iterations: usize,
    mut told: impl FnMut(usize),
) -> Validation {
    let k = folds.iter().max().map_or(0, |last| last + 1);
    let mut predicted = vec![[0.0; 1 + BASELINES.len()]; cases.len()];
    for fold in 0..k {
        told(fold);
        let (held, seen): (Vec<usize>, Vec<usize>) = (0..cases.len()).partition(|i| folds[*i] == fold);
        let values = fit(cases, &seen, slopes, iterations);
        let seen: Vec<&Case> = seen.into_iter().map(|i| &cases[i]).collect();
        let times: Vec<f64> = held.par_iter().map(|i| cases[*i].traced.time(&values).us).collect();
        held.iter().zip(times).for_each(|(i, us)| predicted[*i][0] = us);
        for (b, baseline) in BASELINES.iter().enumerate() {
            for part in crate::parts::PARTS {
                let of_part = |case: &&&Case| case.facts.part.name == part.name;
                let own: Vec<&Case> = seen.iter().filter(of_part).copied().collect();
                // A part without launches among them is predicted from all others.
                let own = if own.is_empty() { seen.clone() } else { own };
                let start: Vec<f64> =
                    baseline.ranges.iter().map(|[low, high]| low + 0.4 * (high - low)).collect();
                let residuals =
                    |p: &[f64]| own.iter().map(|c| ((baseline.us)(&c.facts, p) / c.measured).ln()).collect();
                let p = minimise(baseline.ranges, &start, 60, None, &residuals);
                for i in held.iter().filter(|i| cases[**i].facts.part.name == part.name) {
                    predicted[*i][1 + b] = (baseline.us)(&cases[*i].facts, &p);
                }
            }
        }
    }
    Validation { predicted }
}

/// Median and 90th percentile of relative errors.
pub fn errors(pairs: &[(f64, f64)]) -> [f64; 2] {
    let mut errors: Vec<f64> = pairs.iter().map(|(got, want)| (got / want - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    [0.5, 0.9]
        .map(|q| errors.get(((errors.len().max(1) - 1) as f64 * q).round() as usize).copied().unwrap_or(0.0))
}

impl Validation {
    /// Predicted against measured times.
    pub fn figure(&self, cases: &[Case]) -> String {
        let pairs = cases.iter().zip(&self.predicted);
        let points: Vec<Point<'_>> = pairs
            .map(|(case, predicted)| Point {
                family: case.row.get("family"),
                measured: case.measured,
                predicted: predicted[0],
            })
            .collect();
        svg(&points)
    }

    /// The model's error on all launches, and on those of each part and each family.
    pub fn errors(&self, cases: &[Case]) -> Vec<(String, Error)> {
        let mut groups: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for (case, predicted) in cases.iter().zip(&self.predicted) {
            for name in ["all", case.facts.part.name, case.row.get("family")] {
                groups.entry(name).or_default().push((predicted[0], case.measured));
            }
        }
        let error = |(name, pairs): (&str, Vec<_>)| {
            let [median, high] = errors(&pairs);
            (name.to_owned(), Error { launches: pairs.len(), median, high, validated: true })
        };
        groups.into_iter().map(error).collect()
    }

    /// A Markdown table: families, parts, all.
    pub fn table(&self, cases: &[Case]) -> String {
        let percent = |[median, high]: [f64; 2]| format!("{:.1} / {:.1}", 100.0 * median, 100.0 * high);
        let mut text = "| launches | n | hk-time |".to_owned();
        BASELINES.iter().for_each(|b| text += &format!(" {} |", b.name));
        text += &format!("\n|---|---|---|{}\n", "---|".repeat(BASELINES.len()));
        let mut groups: BTreeMap<(u8, String), Vec<usize>> = BTreeMap::new();
        for (i, case) in cases.iter().enumerate() {
            let (family, part) = (case.row.get("family"), case.facts.part.name);
            let names = [
                (0, format!("{family}, {part}")),
                (1, family.to_owned()),
                (2, part.to_owned()),
                (3, "all".to_owned()),
            ];
            names.into_iter().for_each(|name| groups.entry(name).or_default().push(i));
        }
        for ((_, name), members) in groups {
            text += &format!("| {name} | {} |", members.len());
            for model in 0..1 + BASELINES.len() {
                let pairs: Vec<_> =
                    members.iter().map(|i| (self.predicted[*i][model], cases[*i].measured)).collect();
                text += &format!(" {} |", percent(errors(&pairs)));
            }
            text.push('\n');
        }
        text
    }

    /// Pairs of launches of one shape on one part whose times differ by more than a tenth, and those that are ranked right.
    pub fn ranking(&self, cases: &[Case]) -> [usize; 2] {
        let shape = |c: &Case| ["gpu", "family", "M", "N", "K"].map(|column| c.row.get(column).to_owned());
        let (mut pairs, mut right) = (0, 0);
        for (i, a) in cases.iter().enumerate() {
            for (j, b) in cases.iter().enumerate().skip(i + 1) {
                let ratio = a.measured / b.measured;
                if shape(a) == shape(b) && !(1.0 / 1.1..=1.1).contains(&ratio) {
                    pairs += 1;
                    right += usize::from((self.predicted[i][0] > self.predicted[j][0]) == (ratio > 1.0));
                }
            }
        }
        [pairs, right]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minimum_inside_the_box_is_found() {
        let xs = [1.0, 2.0, 3.0, 4.0, 5.0];
        let r = |p: &[f64]| xs.iter().map(|x| p[0] * x + p[1] - (3.0 * x + 1.0)).collect();
        let ranges = [[0.0, 10.0], [0.0, 10.0]];
        let slopes = vec![xs.map(|x| 10.0 * x).to_vec(), vec![10.0; 5]];
        for known in [None, Some(slopes)] {
            let p = minimise(&ranges, &[8.0, 8.0], 80, known, &r);
            assert!((p[0] - 3.0).abs() < 0.05 && (p[1] - 1.0).abs() < 0.2, "{p:?}");
        }
    }

    #[test]
    fn errors_are_quantiles() {
        let pairs: Vec<(f64, f64)> = (0..=10).map(|i| (100.0 + f64::from(i), 100.0)).collect();
        let [median, high] = errors(&pairs);
        assert!((median - 0.05).abs() < 1e-9 && (high - 0.09).abs() < 1e-9);
    }
}
