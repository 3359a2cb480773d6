//! The fused all-reduce, residual add and RMSNorm: against f64, against all_reduce, quantized, and on all ranks alike.

use crate::common::{Ranks, bits, options, random, sum};
use hk_comm::{Algorithm, NormOptions, NormOutputs, QuantizedRows, all_reduce_rmsnorm};
use hk_core::{Arch, Element, Float, Fp8E4M3, Fp8E4M3Fnuz, bf16, f16};
use proptest::prelude::*;

/// An fp8 that the reference reads.
trait Fp8: Element {
    const MAX: f64;
    fn value(self) -> f64;
}

impl Fp8 for Fp8E4M3Fnuz {
    const MAX: f64 = 240.0;
    fn value(self) -> f64 {
        self.to_f32().into()
    }
}

impl Fp8 for Fp8E4M3 {
    const MAX: f64 = 448.0;
    fn value(self) -> f64 {
        self.to_f32().into()
    }
}

struct Problem<T> {
    rows: usize,
    cols: usize,
    x: Vec<Vec<T>>,
    residual: Vec<T>,
    weight: Vec<T>,
    options: NormOptions,
}

impl<T: Float> Problem<T> {
    fn new(world: usize, rows: usize, cols: usize, seed: u64) -> Self {
        let values = |n: u64, len| random(100 * seed + n, len);
        Problem {
            rows,
            cols,
            x: (0..world as u64).map(|rank| values(rank, rows * cols)).collect(),
            residual: values(10, rows * cols),
            weight: values(11, cols),
            options: NormOptions { weight_offset: (seed % 2) as f32, ..Default::default() },
        }
    }
}

/// What a rank has afterwards.
#[derive(Clone)]
struct Outcome<T, Q> {
    residual: Vec<T>,
    out: Vec<T>,
    q: Vec<Q>,
    scale: Vec<f32>,
}

fn run<T: Float, Q: Fp8>(ranks: &mut Ranks, p: &Problem<T>, algorithm: Algorithm) -> Vec<Outcome<T, Q>> {
    ranks.each(|rank, comm, stream| {
        let Problem { rows, cols, .. } = *p;
        let x = stream.upload(&p.x[rank]).unwrap();
        let weight = stream.upload(&p.weight).unwrap();
        let mut residual = stream.upload(&p.residual).unwrap();
        let mut out = stream.upload(&vec![T::from_f32(f32::NAN); rows * cols]).unwrap();
        let mut q = stream.alloc_zeroed::<Q>(rows * cols).unwrap();
        let mut scale = stream.alloc_zeroed::<f32>(rows).unwrap();
        let outputs = NormOutputs {
            residual: residual.view_mut([rows, cols]).unwrap(),
            out: Some(out.view_mut([rows, cols]).unwrap()),
            quantized: Some(QuantizedRows::PerToken {
                q: q.view_mut([rows, cols]).unwrap(),
                scale: scale.view_mut([rows]).unwrap(),
            }),
        };
        let (x, weight) = (x.view([rows, cols]).unwrap(), weight.view([cols]).unwrap());
        all_reduce_rmsnorm(comm, stream, x, weight, outputs, p.options, algorithm).unwrap();
        comm.check().unwrap();
        Outcome {
            residual: stream.download(&residual).unwrap(),
            out: stream.download(&out).unwrap(),
            q: stream.download(&q).unwrap(),
            scale: stream.download(&scale).unwrap(),
        }
    })
}

/// In f64 and plain loops, from the rounded sum on.
fn check<T: Float, Q: Fp8>(p: &Problem<T>, got: &Outcome<T, Q>, unit: f64) {
    let a = sum(&p.x);
    for row in 0..p.rows {
        let at = |c: usize| row * p.cols + c;
        let z: Vec<f64> = (0..p.cols).map(|c| a[at(c)].to_f64() + p.residual[at(c)].to_f64()).collect();
        let mean = z.iter().map(|z| z * z).sum::<f64>() / p.cols as f64;
        let rstd = 1.0 / (mean + f64::from(p.options.eps)).sqrt();
        let y: Vec<f64> = (0..p.cols)
            .map(|c| z[c] * rstd * (p.weight[c].to_f64() + f64::from(p.options.weight_offset)))
            .collect();
        let amax = y.iter().fold(0.0f64, |amax, y| amax.max(y.abs()));
        let scale = if amax == 0.0 { 1.0 } else { amax / Q::MAX };
        let got_scale = f64::from(got.scale[row]);
        assert!((got_scale - scale).abs() <= scale * 1e-5, "scale {got_scale}, expected {scale}");
        for c in 0..p.cols {
            // The sum with the residual is one f32 addition and one rounding.
            let want = T::from_f32(a[at(c)].to_f32() + p.residual[at(c)].to_f32());
            assert_eq!(bits(&[got.residual[at(c)]]), bits(&[want]), "residual of row {row}, column {c}");
            let out = got.out[at(c)].to_f64();
            assert!((out - y[c]).abs() <= y[c].abs() * unit + amax * 1e-5, "out {out}, expected {}", y[c]);
            let value = got.q[at(c)].value() * got_scale;
            // Half a step of three mantissa bits, or of the subnormals.
            let step = y[c].abs() / 16.0 + scale / 256.0 + amax * 1e-5;
            assert!((value - y[c]).abs() <= step, "q {value}, expected {}", y[c]);
        }
    }
}

fn parity<T: Float, Q: Fp8>(arch: Arch, world: usize, rows: usize, cols: usize, seed: u64, unit: f64) {
    let p = Problem::<T>::new(world, rows, cols, seed);
    let mut ranks = Ranks::new(arch, world);
    let one: Vec<Outcome<T, Q>> = run(&mut ranks, &p, Algorithm::OneShot);
    check(&p, &one[0], unit);
    let two: Vec<Outcome<T, Q>> = run(&mut ranks, &p, Algorithm::TwoShot);
    for (rank, other) in one.iter().chain(&two).enumerate() {
        let name = format!("{arch}, {world} ranks, {rows} x {cols}, outcome {rank}");
        assert_eq!(bits(&other.residual), bits(&one[0].residual), "residual: {name}");
        assert_eq!(bits(&other.out), bits(&one[0].out), "out: {name}");
        assert_eq!(bits(&other.scale), bits(&one[0].scale), "scale: {name}");
        assert!(
            bytemuck::cast_slice::<Q, u8>(&other.q) == bytemuck::cast_slice::<Q, u8>(&one[0].q),
            "q: {name}"
        );
    }
}

const BF16: f64 = 1.0 / 256.0;
const F16: f64 = 1.0 / 2048.0;

#[test]
fn rows_of_models() {
    for (world, rows, cols) in [(1, 3, 2880), (2, 5, 7168), (4, 3, 8192), (8, 2, 4096)] {
        parity::<bf16, Fp8E4M3Fnuz>(Arch::Gfx942, world, rows, cols, 1, BF16);
        parity::<f16, Fp8E4M3>(Arch::Gfx950, world, rows, cols, 2, F16);
    }
    for (world, rows, cols) in [(8, 13, 512), (4, 33, 2880), (2, 65, 128), (4, 129, 8), (2, 17, 7168)] {
        parity::<bf16, Fp8E4M3>(Arch::Gfx950, world, rows, cols, 3, BF16);
    }
}

/// One packet, more and fewer packets than ranks, the widest row.
#[test]
fn borders_of_rows() {
    for cols in [8, 24, 72, 4096 + 8, 16384] {
        parity::<bf16, Fp8E4M3Fnuz>(Arch::Gfx942, 4, 3, cols, cols as u64, BF16);
    }
}

proptest! {
    #![proptest_config(hk_testkit::config())]
    #[test]
    fn matches_f64_reference(log in 0..4usize, rows in 1..6usize, packets in 1..400usize, seed in 0..1000u64) {
        let (world, cols) = (1 << log, 8 * packets);
        parity::<f16, Fp8E4M3Fnuz>(Arch::Gfx942, world, rows, cols, seed, F16);
        parity::<bf16, Fp8E4M3>(Arch::Gfx950, world, rows, cols, seed, BF16);
    }
}

/// The sum that the fused kernel takes is that of `all_reduce`: with a residual of zeros it is `residual` afterwards.
#[test]
fn fused_is_the_composition() {
    let (rows, cols) = (4, 1024);
    let mut p = Problem::<bf16>::new(4, rows, cols, 5);
    p.residual = vec![bf16::ZERO; rows * cols];
    let mut ranks = Ranks::new(Arch::Gfx942, 4);
    let fused: Vec<Outcome<bf16, Fp8E4M3Fnuz>> = run(&mut ranks, &p, Algorithm::TwoShot);
    let apart = ranks.each(|rank, comm, stream| {
        let mut y = stream.upload(&p.x[rank]).unwrap();
        let view = y.view_mut([rows * cols]).unwrap();
        hk_comm::all_reduce_in_place(comm, stream, view, Algorithm::OneShot).unwrap();
        stream.download(&y).unwrap()
    });
    for (fused, apart) in fused.iter().zip(&apart) {
        assert_eq!(bits(&fused.residual), bits(apart));
    }
}

/// Rows of zeros have scale 1 and stay zero; a NaN stays in its row.
#[test]
fn zeros_and_nans() {
    let (rows, cols) = (3, 64);
    let mut p = Problem::<bf16>::new(2, rows, cols, 4);
    for x in p.x.iter_mut().chain([&mut p.residual]) {
        x[..cols].fill(bf16::ZERO);
    }
    p.x[1][cols + 5] = bf16::NAN;
    let mut ranks = Ranks::new(Arch::Gfx942, 2);
    for outcome in run::<bf16, Fp8E4M3Fnuz>(&mut ranks, &p, Algorithm::OneShot) {
        assert_eq!(outcome.scale[0], 1.0);
        assert!(outcome.q[..cols].iter().all(|q| q.to_f32() == 0.0));
        assert!(outcome.out[..cols].iter().all(|y| y.to_f32() == 0.0));
        assert!(outcome.out[cols..2 * cols].iter().all(|y| y.is_nan()));
        assert!(outcome.out[2 * cols..].iter().all(|y| y.is_finite()));
    }
}

/// `out` may be `x`; without fp8, and with fp8 alone.
#[test]
fn outputs_are_optional_and_out_may_be_x() {
    let (rows, cols) = (4, 256);
    let p = Problem::<bf16>::new(2, rows, cols, 6);
    let mut ranks = Ranks::new(Arch::Gfx942, 2);
    let want: Vec<Outcome<bf16, Fp8E4M3Fnuz>> = run(&mut ranks, &p, Algorithm::OneShot);
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let got = ranks.each(|rank, comm, stream| {
            let mut buffer = stream.upload(&p.x[rank]).unwrap();
            let weight = stream.upload(&p.weight).unwrap();
            let [mut residual, mut again] = [(), ()].map(|()| stream.upload(&p.residual).unwrap());
            let mut q = stream.alloc_zeroed::<Fp8E4M3Fnuz>(rows * cols).unwrap();
            let mut scale = stream.alloc_zeroed::<f32>(rows).unwrap();
            let quantized = QuantizedRows::PerToken {
                q: q.view_mut([rows, cols]).unwrap(),
                scale: scale.view_mut([rows]).unwrap(),
            };
            let weight = weight.view([cols]).unwrap();
            all_reduce_rmsnorm(
                comm,
                stream,
                buffer.view([rows, cols]).unwrap(),
                weight,
                NormOutputs {
                    residual: again.view_mut([rows, cols]).unwrap(),
                    out: None,
                    quantized: Some(quantized),
                },
                p.options,
                algorithm,
            )
            .unwrap();
            let out = buffer.view_mut([rows, cols]).unwrap();
            let (x, residual_view) = (out.alias(), residual.view_mut([rows, cols]).unwrap());
            let outputs =
                NormOutputs::<_, Fp8E4M3Fnuz> { residual: residual_view, out: Some(out), quantized: None };
            all_reduce_rmsnorm(comm, stream, x, weight, outputs, p.options, algorithm).unwrap();
            let read = |buffer| stream.download(buffer).unwrap();
            (read(&residual), read(&again), read(&buffer), stream.download(&q).unwrap())
        });
        for (residual, again, out, q) in got {
            assert_eq!(bits(&out), bits(&want[0].out));
            assert_eq!(bits(&residual), bits(&want[0].residual));
            assert_eq!(bits(&again), bits(&want[0].residual));
            assert!(q == want[0].q);
        }
    }
}

#[test]
fn sanitizers_find_nothing() {
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let p = Problem::<bf16>::new(4, 3, 1032, 7);
        let mut ranks = Ranks::with(Arch::Gfx942, 4, "&sanitize=all", &options());
        for outcome in run::<bf16, Fp8E4M3Fnuz>(&mut ranks, &p, algorithm) {
            check(&p, &outcome, BF16);
        }
    }
}
