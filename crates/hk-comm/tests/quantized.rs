//! All-reduce, norm and quantization in one launch: bit for bit what all-reduce and hk-quant's fused norm give one after the other.

use crate::common::quantized::{Buffers, KINDS, Kind};
use crate::common::{Ranks, bits, random};
use hk_comm::{Algorithm, NormOptions, NormOutputs, all_reduce_in_place, all_reduce_rmsnorm};
use hk_core::quant::{BlockScale, Quantized};
use hk_core::{Arch, Fp8E4M3, Fp8E4M3Fnuz, bf16};
use hk_quant::NormRows;
use proptest::prelude::*;

/// Integers so small that a row's sum of squares is exact in every order.
pub fn small(seed: usize, n: usize) -> Vec<bf16> {
    (0..n).map(|i| bf16::from_f32(((i * 5 + i / 7 + i / 129 + seed * 3) % 5) as f32 - 2.0)).collect()
}

pub fn same_as_apart<Q: Quantized>(
    ranks: &mut Ranks,
    [rows, cols]: [usize; 2],
    kind: Kind,
    algorithm: Algorithm,
    spoil: fn(&mut [bf16]),
) {
    let n = rows * cols;
    let outcomes = ranks.each(|rank, comm, stream| {
        let [mut values, mut residual] = [rank, 9].map(|seed| small(seed, n));
        spoil(&mut values);
        spoil(&mut residual);
        let [x, mut sums] = [(), ()].map(|()| stream.upload(&values).unwrap());
        let weight = stream.upload(&random::<bf16>(7, cols)).unwrap();
        let [mut residual, mut apart_residual] = [(), ()].map(|()| stream.upload(&residual).unwrap());
        let [mut out, mut apart_out] = [(), ()].map(|()| stream.alloc_zeroed::<bf16>(n).unwrap());
        let [mut fused, mut apart] = [(), ()].map(|()| Buffers::<Q>::new(stream, kind, [rows, cols]));
        let eps = 1e-5;
        let outputs = NormOutputs {
            residual: residual.view_mut([rows, cols]).unwrap(),
            out: Some(out.view_mut([rows, cols]).unwrap()),
            quantized: Some(fused.view()),
        };
        let weight = weight.view([cols]).unwrap();
        let norm = NormOptions { eps, ..Default::default() };
        all_reduce_rmsnorm(comm, stream, x.view([rows, cols]).unwrap(), weight, outputs, norm, algorithm)
            .unwrap();
        all_reduce_in_place(comm, stream, sums.view_mut([n]).unwrap(), algorithm).unwrap();
        comm.check().unwrap();
        let after = apart_residual.view_mut([rows, cols]).unwrap();
        let norm = NormRows {
            x: sums.view([rows, cols]).unwrap(),
            weight,
            eps,
            residual: Some((after.alias(), after)),
            out: Some(apart_out.view_mut([rows, cols]).unwrap()),
        };
        apart.by_hk_quant(stream, norm);
        let read = |buffer| stream.download(buffer).unwrap();
        let name = format!("{kind:?} of {rows} x {cols}, {algorithm:?}, rank {rank}");
        assert_eq!(bits(&read(&residual)), bits(&read(&apart_residual)), "residual: {name}");
        assert_eq!(bits(&read(&out)), bits(&read(&apart_out)), "out: {name}");
        let [q, scale] = fused.read(stream);
        let [want_q, want_scale] = apart.read(stream);
        assert_eq!(scale, want_scale, "scale: {name}");
        assert_eq!(q, want_q, "q: {name}");
        (q, scale)
    });
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "all ranks alike");
}

pub fn nothing(_: &mut [bf16]) {}

const GROUPS: [usize; 7] = [8, 16, 32, 64, 128, 256, 512];

/// The scale of a group is the larger one of its halves, whose bytes it has where the scale is the same. Groups of 32, 64 and 128 columns are
/// those of hk-quant.
fn groups_of_every_size<Q: Quantized>(ranks: &mut Ranks, [rows, cols]: [usize; 2]) {
    let n = rows * cols;
    let outcomes = ranks.each(|rank, comm, stream| {
        let x = stream.upload(&random::<bf16>(rank as u64, n)).unwrap();
        let weight = stream.upload(&random::<bf16>(7, cols)).unwrap();
        GROUPS.map(|group| {
            let mut residual = stream.upload(&random::<bf16>(8, n)).unwrap();
            let mut buffers = Buffers::<Q>::new(stream, Kind::Groups(group, false), [rows, cols]);
            let outputs = NormOutputs {
                residual: residual.view_mut([rows, cols]).unwrap(),
                out: None,
                quantized: Some(buffers.view()),
            };
            let (x, weight) = (x.view([rows, cols]).unwrap(), weight.view([cols]).unwrap());
            let options = NormOptions::default();
            all_reduce_rmsnorm(comm, stream, x, weight, outputs, options, Algorithm::Auto).unwrap();
            comm.check().unwrap();
            let [q, scale] = buffers.read(stream);
            let scale: Vec<f32> =
                scale.chunks_exact(4).map(|s| f32::from_ne_bytes([s[0], s[1], s[2], s[3]])).collect();
            (q, scale)
        })
    });
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "all ranks alike");
    for (pair, group) in outcomes[0].windows(2).zip(GROUPS) {
        let [(half_q, halves), (q, scales)] = pair else { unreachable!() };
        for row in 0..rows {
            let halves = &halves[row * cols.div_ceil(group)..][..cols.div_ceil(group)];
            let scales = &scales[row * halves.len().div_ceil(2)..][..halves.len().div_ceil(2)];
            for (j, half) in halves.chunks(2).enumerate() {
                let name = format!("group {j} of {} columns, row {row} of [{rows}, {cols}]", 2 * group);
                assert_eq!(scales[j], half.iter().copied().fold(0.0, f32::max), "{name}");
                for (k, scale) in half.iter().enumerate().filter(|(_, scale)| **scale == scales[j]) {
                    let first = (2 * j + k) * group;
                    let columns = row * cols + first..row * cols + (first + group).min(cols);
                    assert_eq!(q[columns.clone()], half_q[columns], "{name}, of scale {scale}");
                }
            }
        }
    }
}

#[test]
fn groups_of_8_to_512_columns() {
    for (world, shape) in [(1, [2, 8]), (2, [3, 1096]), (4, [2, 4096 + 520])] {
        groups_of_every_size::<Fp8E4M3Fnuz>(&mut Ranks::new(Arch::Gfx942, world), shape);
        groups_of_every_size::<Fp8E4M3>(&mut Ranks::new(Arch::Gfx950, world), shape);
    }
}

/// Rows that end within a group, within a block of 32, after a packet; and the widest.
#[test]
fn every_kind_is_the_composition() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        let (world, algorithm) = [(2, Algorithm::OneShot), (4, Algorithm::TwoShot)][i % 2];
        let mut a = Ranks::new(Arch::Gfx942, world);
        let mut b = Ranks::new(Arch::Gfx950, world);
        for shape in [[3, 1024], [2, 8], [2, 40], [3, 4096 + 72]] {
            same_as_apart::<Fp8E4M3Fnuz>(&mut a, shape, kind, algorithm, nothing);
            same_as_apart::<Fp8E4M3>(&mut b, shape, kind, algorithm, nothing);
        }
    }
    let widest = Kind::Groups(128, false);
    same_as_apart::<Fp8E4M3Fnuz>(
        &mut Ranks::new(Arch::Gfx942, 8),
        [1, 16384],
        widest,
        Algorithm::Auto,
        nothing,
    );
}

/// Groups and a row of zeros, rows with a NaN or an infinity.
#[test]
fn special_values() {
    let spoil: fn(&mut [bf16]) = |x| {
        x[..128].fill(bf16::ZERO);
        x[160 + 3] = bf16::INFINITY;
        x[2 * 160 + 70] = bf16::NAN;
        x[3 * 160..].fill(bf16::ZERO);
    };
    let mut ranks = Ranks::new(Arch::Gfx942, 2);
    for kind in KINDS {
        same_as_apart::<Fp8E4M3Fnuz>(&mut ranks, [4, 160], kind, Algorithm::OneShot, spoil);
    }
}

proptest! {
    #![proptest_config(hk_testkit::config())]
    #[test]
    fn any_shape_is_the_composition(log in 0..4usize, rows in 1..6usize, packets in 1..300usize, kind in 0..6usize) {
        let world = 1 << log;
        let algorithm = if rows % 2 == 0 { Algorithm::OneShot } else { Algorithm::TwoShot };
        let shape = [rows, 8 * packets];
        same_as_apart::<Fp8E4M3Fnuz>(&mut Ranks::new(Arch::Gfx942, world), shape, KINDS[kind], algorithm, nothing);
        same_as_apart::<Fp8E4M3>(&mut Ranks::new(Arch::Gfx950, world), shape, KINDS[kind], algorithm, nothing);
    }
}

/// Random values, whose squares are summed in another order: what is dequantized is near the norm of the unrounded sum, in f64.
#[test]
fn random_values_are_near() {
    let (rows, cols, world) = (4, 1096, 4);
    let n = rows * cols;
    let x: Vec<Vec<bf16>> = (0..world).map(|rank| random(rank, n)).collect();
    let a = crate::common::sum(&x);
    let (residual, weight): (Vec<bf16>, Vec<bf16>) = (random(20, n), random(21, cols));
    let want_rows: Vec<f64> = (0..rows)
        .flat_map(|row| {
            let z = |c: usize| a[row * cols + c].to_f64() + residual[row * cols + c].to_f64();
            let mean = (0..cols).map(|c| z(c) * z(c)).sum::<f64>() / cols as f64;
            let weight = &weight;
            (0..cols).map(move |c| z(c) / (mean + 1e-6).sqrt() * weight[c].to_f64()).collect::<Vec<_>>()
        })
        .collect();
    let mut ranks = Ranks::new(Arch::Gfx942, world as usize);
    let groups = GROUPS.map(|group| Kind::Groups(group, false));
    for kind in groups.into_iter().chain([Kind::Mxfp4(BlockScale::RoundUp)]) {
        let outcomes = ranks.each(|rank, comm, stream| {
            let x = stream.upload(&x[rank]).unwrap();
            let weight = stream.upload(&weight).unwrap();
            let mut residual = stream.upload(&residual).unwrap();
            let mut buffers = Buffers::<Fp8E4M3Fnuz>::new(stream, kind, [rows, cols]);
            let outputs = NormOutputs {
                residual: residual.view_mut([rows, cols]).unwrap(),
                out: None,
                quantized: Some(buffers.view()),
            };
            let (x, weight) = (x.view([rows, cols]).unwrap(), weight.view([cols]).unwrap());
            let options = NormOptions::default();
            all_reduce_rmsnorm(comm, stream, x, weight, outputs, options, Algorithm::OneShot).unwrap();
            buffers.read(stream)
        });
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "all ranks alike");
        let [q, scale] = &outcomes[0];
        let group = if let Kind::Groups(group, _) = kind { group } else { 32 };
        let groups = cols.div_ceil(group);
        for (i, want) in want_rows.iter().enumerate() {
            let (row, c) = (i / cols, i % cols);
            let at = row * groups + c / group;
            let last = (c / group * group + group).min(cols);
            let amax = want_rows[row * cols + c / group * group..row * cols + last]
                .iter()
                .fold(0.0, |amax: f64, y| amax.max(y.abs()));
            let (scale, value, step) = match kind {
                Kind::Mxfp4(_) => {
                    let scale = f64::from(scale[at]) - 127.0;
                    let code = q[i / 2] >> (4 * (i % 2));
                    let value = FP4[usize::from(code % 8)] * if code & 8 == 0 { 1.0 } else { -1.0 };
                    let scale = scale.exp2();
                    assert!(amax <= 6.001 * scale && amax > 2.999 * scale, "scale {scale} of {amax}");
                    // Half a step of one mantissa bit, or of the subnormal.
                    (scale, value, (want.abs() / 4.0).max(scale / 4.0))
                }
                _ => {
                    let bytes: [u8; 4] = scale[4 * at..4 * at + 4].try_into().unwrap();
                    let scale = f64::from(f32::from_ne_bytes(bytes));
                    assert!((scale - amax / 240.0).abs() <= scale * 1e-5, "scale {scale} of {amax}");
                    let value = bytemuck::cast::<u8, Fp8E4M3Fnuz>(q[i]).to_f32();
                    (scale, f64::from(value), (want.abs() / 16.0).max(scale / 256.0))
                }
            };
            let got = value * scale;
            assert!((got - want).abs() <= step + amax * 1e-5, "{kind:?}: {got}, expected {want}");
        }
    }
}

/// The values of fp4 e2m1.
const FP4: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
