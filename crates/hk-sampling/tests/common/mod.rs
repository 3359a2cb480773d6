//! Shared helpers of the tests.

use hk_core::registry::{HostTensor, Sample, TensorSpec};
use hk_core::{DType, DeviceBuffer, Float, Result, TensorView};
use hk_sampling::reference::{self, Kept};
use hk_sampling::{Draw, FilterOrder, Filters, PerRow, SampledRows, Samples};
use hk_testkit::{Gpu, Place, Tensor};

/// Rows as the specification lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Softmax,
    Uniform,
    Peaked,
    Plateaus,
    Ties,
    OneHot,
    Equal,
    Zeros,
    Nan,
    OneNan,
    OneInfinity,
    Half,
    Double,
    Ascending,
    Descending,
    Tail,
    Tiny,
}

impl Kind {
    pub const ALL: [Kind; 17] = [
        Self::Softmax,
        Self::Uniform,
        Self::Peaked,
        Self::Plateaus,
        Self::Ties,
        Self::OneHot,
        Self::Equal,
        Self::Zeros,
        Self::Nan,
        Self::OneNan,
        Self::OneInfinity,
        Self::Half,
        Self::Double,
        Self::Ascending,
        Self::Descending,
        Self::Tail,
        Self::Tiny,
    ];

    /// A row of `cols` probabilities.
    pub fn row(self, cols: usize, seed: u64) -> Vec<f64> {
        let at = |i: u64| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(20) ^ i) as usize % cols;
        let mut row = random(Sample::Probabilities, cols, seed);
        match self {
            Self::Softmax => {}
            Self::Uniform => row = normalised(random(Sample::Uniform { low: 0.0, high: 1.0 }, cols, seed)),
            Self::Peaked => {
                row.iter_mut().for_each(|v| *v *= 0.08);
                row[at(1)] = 0.92;
            }
            Self::Plateaus => {
                row = normalised((0..cols).map(|i| if i % 7 < 2 { 5.0 } else { 1.0 }).collect());
            }
            // Few different values, so that every threshold falls on a tie.
            Self::Ties => {
                row = random(Sample::Integers { low: 0, high: 6 }, cols, seed);
                row.iter_mut().for_each(|v| *v /= 1024.0);
            }
            Self::OneHot => {
                row.fill(0.0);
                row[at(2)] = 1.0;
            }
            Self::Equal => row.fill(1.0 / cols as f64),
            Self::Zeros => row = (0..cols).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect(),
            Self::Nan => row.fill(f64::NAN),
            Self::OneNan => {
                row[at(3)] = f64::NAN;
                row[at(4)] = -0.5;
                row[at(5)] = f64::NEG_INFINITY;
            }
            Self::OneInfinity => row[at(6)] = f64::INFINITY,
            Self::Half => row.iter_mut().for_each(|v| *v *= 0.5),
            Self::Double => row.iter_mut().for_each(|v| *v *= 2.0),
            Self::Ascending => row.sort_by(f64::total_cmp),
            Self::Descending => row.sort_by(|a, b| b.total_cmp(a)),
            Self::Tail => {
                let from = cols.saturating_sub(1 + seed as usize % 3);
                row[..from].fill(0.0);
            }
            // Subnormal in f32 and in bf16.
            Self::Tiny => row.iter_mut().for_each(|v| *v *= 2f64.powi(-128)),
        }
        row
    }
}

fn normalised(mut row: Vec<f64>) -> Vec<f64> {
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|v| *v /= sum);
    row
}

/// Example data.
pub fn random(sample: Sample, len: usize, seed: u64) -> Vec<f64> {
    HostTensor::sample(TensorSpec::new(DType::F32, [len]), sample, seed).unwrap().to_f64()
}

/// Parameters of a row, also out of range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parameters {
    pub k: i32,
    pub p: f32,
    pub min_p: f32,
}

impl Parameters {
    /// Everything is kept.
    pub const OFF: Self = Self { k: i32::MAX, p: 2.0, min_p: -1.0 };

    pub fn reference(&self, order: FilterOrder) -> reference::Filters {
        reference::Filters {
            k: Some(self.k.into()),
            p: Some(self.p.into()),
            min_p: Some(self.min_p.into()),
            order,
        }
    }

    /// As numbers for all rows; those out of range on the host are left out.
    pub fn filters(&self) -> Filters<'static> {
        Filters {
            k: (self.k >= 1).then_some(PerRow::All(self.k)),
            p: (self.p > 0.0 && self.p <= 1.0).then_some(PerRow::All(self.p)),
            min_p: (0.0..=1.0).contains(&self.min_p).then_some(PerRow::All(self.min_p)),
            order: FilterOrder::Joint,
        }
    }

    /// From the values of the specification, by seed.
    pub fn listed(seed: usize, cols: usize) -> Self {
        let ks = [i32::MAX, 1, 5, 10, 50, 100, 200, 500, cols as i32, cols as i32 + 1, 0, -3];
        let ps = [2.0, 1e-6, 0.1, 0.3, 0.5, 0.8, 0.9, 0.95, 1.0, 0.0, -1.0, f32::NAN];
        let mins = [-1.0, 0.0, 0.01, 0.05, 0.1, 0.5, 1.0, 3.0, f32::NAN];
        // Often only one or two of them.
        let pick = |n: usize, shift: usize| {
            let i = (seed.wrapping_mul(0x9e37_79b9) >> shift) % (2 * n);
            if i < n { i } else { 0 }
        };
        Self { k: ks[pick(ks.len(), 5)], p: ps[pick(ps.len(), 12)], min_p: mins[pick(mins.len(), 19)] }
    }
}

pub const GRID_OF_U: [f32; 7] = [0.0, 5.960_464_5e-8, 0.001, 0.25, 0.5, 0.999, 1.0];

/// Outputs of a draw.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub ids: Vec<i32>,
    pub mass: Vec<f32>,
    pub count: Vec<i32>,
}

impl Output {
    pub fn bits(&self) -> (Vec<i32>, Vec<u32>, Vec<i32>) {
        (self.ids.clone(), self.mass.iter().map(|m| m.to_bits()).collect(), self.count.clone())
    }
}

/// A workspace, filled with garbage.
pub fn workspace(gpu: &Gpu, bytes: usize) -> DeviceBuffer<u8> {
    let mut buffer = gpu.stream().alloc_zeroed::<u8>(bytes).unwrap();
    gpu.stream().fill(&mut buffer, 0xa5).unwrap();
    buffer
}

/// Calls an operator that draws, and checks that it writes only its outputs.
#[track_caller]
pub fn sampled(
    gpu: &Gpu,
    outputs: usize,
    cols: usize,
    f: impl FnOnce(Samples, hk_core::TensorViewMut<u8>) -> Result<()>,
) -> Output {
    let bytes = hk_sampling::sampling_workspace(gpu.stream().device().info(), outputs.min(5), cols);
    let mut workspace = workspace(gpu, bytes);
    let (mut ids, mut mass) = (gpu.poisoned::<i32>([outputs]), gpu.poisoned::<f32>([outputs]));
    let mut count = gpu.poisoned::<i32>([outputs]);
    let samples = Samples { ids: ids.view_mut(), mass: Some(mass.view_mut()), count: Some(count.view_mut()) };
    f(samples, workspace.view_mut([bytes]).unwrap()).unwrap();
    gpu.assert_guards(&ids);
    gpu.assert_guards(&mass);
    gpu.assert_guards(&count);
    Output { ids: gpu.download(&ids).data, mass: gpu.download(&mass).data, count: gpu.download(&count).data }
}

/// A matrix and its draws.
pub struct Problem<T> {
    pub cols: usize,
    pub x: Vec<T>,
    /// One per row.
    pub parameters: Vec<Parameters>,
    /// Row and number of each output.
    pub outputs: Vec<(usize, f32)>,
    pub order: FilterOrder,
}

impl<T: Float> Problem<T> {
    /// Each of `rows` with its parameters, and each uniform number of the grid.
    pub fn new(rows: &[Vec<f64>], parameters: Vec<Parameters>, us: &[f32]) -> Self {
        let outputs = (0..rows.len()).flat_map(|row| us.iter().map(move |&u| (row, u))).collect();
        let x = rows.iter().flatten().map(|&v| T::from_f64(v)).collect();
        Self { cols: rows[0].len(), x, parameters, outputs, order: FilterOrder::Joint }
    }

    pub fn rows(&self) -> usize {
        self.parameters.len()
    }

    /// A row as the kernel sees it.
    pub fn row(&self, row: usize) -> Vec<f64> {
        self.x[row * self.cols..][..self.cols].iter().map(|v| v.to_f64()).collect()
    }

    /// Runs on tensors in the given place.
    #[track_caller]
    pub fn run(&self, gpu: &Gpu, place: impl Into<Place>, temperature: Option<&[f32]>) -> Output {
        let (r, b) = (self.rows(), self.outputs.len());
        let x = gpu.upload(&self.x, place);
        let index: Vec<i32> = self.outputs.iter().map(|o| o.0 as i32).collect();
        let uniform: Vec<f32> = self.outputs.iter().map(|o| o.1).collect();
        let column = |f: fn(&Parameters) -> f32| self.parameters.iter().map(f).collect::<Vec<_>>();
        let ks: Vec<i32> = self.parameters.iter().map(|p| p.k).collect();
        let (index, uniform) = (gpu.upload(&index, [b]), gpu.upload(&uniform, [b]));
        let (k, p) = (gpu.upload(&ks, [r]), gpu.upload(&column(|p| p.p), [r]));
        let min_p = gpu.upload(&column(|p| p.min_p), [r]);
        let temperature = temperature.map(|t| gpu.upload(t, [r]));
        let filters = Filters {
            k: Some(k.view().into()),
            p: Some(p.view().into()),
            min_p: Some(min_p.view().into()),
            order: self.order,
        };
        let draw = Draw { uniform: Some(uniform.view()), ..Default::default() };
        let index = Some(index.view());
        let out = sampled(gpu, b, self.cols, |samples, workspace| match &temperature {
            None => hk_sampling::top_k_top_p_sampling_from_probs(
                gpu.stream(),
                x.view(),
                index,
                samples,
                workspace,
                filters,
                draw,
            ),
            Some(t) => hk_sampling::sample_from_logits(
                gpu.stream(),
                x.view(),
                SampledRows { temperature: t.view().into(), row_index: index },
                samples,
                workspace,
                filters,
                draw,
            ),
        });
        gpu.assert_untouched(&x);
        out
    }

    /// Compares with the reference: sets exactly unless a mass is within `edge` of p, tokens exactly unless the target is within
    /// `edge` of the kept mass from a prefix sum.
    #[track_caller]
    pub fn check(&self, got: &Output, edge: f64, probabilities: impl Fn(&[f64], usize) -> Vec<f64>) {
        let rows: Vec<Vec<f64>> = (0..self.rows()).map(|r| probabilities(&self.row(r), r)).collect();
        let sets: Vec<_> = (0..self.rows()).map(|r| self.sets(&rows[r], r, edge)).collect();
        for (b, &(r, u)) in self.outputs.iter().enumerate() {
            let (fewest, likely, most) = &sets[r];
            let what = format!("output {b}, u {u}, row {r} of {} with {:?}", self.cols, self.parameters[r]);
            let count = got.count[b] as usize;
            assert!((fewest.count..=most.count).contains(&count), "{what}: {count} kept for {likely:?}");
            let kept = [fewest, likely, most].into_iter().find(|k| k.count == count);
            let Some(kept) = kept else { continue };
            let error = (f64::from(got.mass[b]) - kept.mass).abs();
            // A subnormal mass has steps of 2^-149.
            let bound = edge.max(1e-7) * kept.mass + 2f64.powi(-149);
            assert!(error <= bound, "{what}: mass {:e} for {likely:?}", got.mass[b]);

            let id = got.ids[b];
            assert!((0..self.cols as i32).contains(&id), "{what}: id {id}");
            let id = id as usize;
            if kept.count == 0 {
                assert_eq!(id, 0, "{what}");
                continue;
            }
            assert!(rows[r][id] > 0.0 && rows[r][id] >= kept.threshold, "{what}: id {id} is not kept");
            let u = f64::from(u);
            let low = reference::draw(&rows[r], kept, (u - edge).max(0.0));
            let high = reference::draw(&rows[r], kept, (u + edge).min(1.0));
            assert!((low..=high).contains(&id), "{what}: id {id} for {low}..={high}");
        }
    }

    /// The kept sets with every p less and more by `edge`, and as is.
    fn sets(&self, row: &[f64], r: usize, edge: f64) -> (Kept, Kept, Kept) {
        let filters = self.parameters[r].reference(self.order);
        let moved = |by: f64| reference::Filters {
            // Disabled filters, and those that keep only the largest, stay as they are.
            p: filters.p.map(|p| if p > 0.0 && p <= 1.0 { (p + by).min(1.0) } else { p }),
            ..filters
        };
        let most = match filters.p {
            // At one, the total mass may be on either side.
            Some(p) if p <= 1.0 && p + edge > 1.0 => reference::Filters { p: None, ..filters },
            _ => moved(edge),
        };
        (reference::kept(row, moved(-edge)), reference::kept(row, filters), reference::kept(row, most))
    }
}

/// The relative error of sums, 2^-45.
pub const EXACT: f64 = 1e-12;

/// A view of a row tensor, for calls without parameters.
pub fn none<'a>() -> Option<TensorView<'a, i32>> {
    None
}

/// Rows of all kinds.
pub fn all_kinds(cols: usize, seed: u64) -> Vec<Vec<f64>> {
    Kind::ALL.iter().enumerate().map(|(i, kind)| kind.row(cols, seed + i as u64)).collect()
}

/// Uploads probabilities.
pub fn upload<T: Float>(gpu: &Gpu, rows: &[Vec<f64>]) -> Tensor<T> {
    let x: Vec<T> = rows.iter().flatten().map(|&v| T::from_f64(v)).collect();
    gpu.upload(&x, [rows.len(), rows[0].len()])
}
