//! Reduce-scatter and all-gather, the halves of an all-reduce; and tensors that take several launches.

use crate::common::quantized::{Buffers, KINDS, Kind};
use crate::common::{Ranks, bits, integers, options, random, sum};
use hk_comm::{
    Algorithm, NormOptions, NormOutputs, P2pOptions, all_gather, all_gather_dim, all_gather_in_place,
    all_reduce, all_reduce_in_place, all_reduce_rmsnorm, reduce_scatter, reduce_scatter_dim,
    reduce_scatter_rmsnorm,
};
use hk_core::quant::Quantized;
use hk_core::{Arch, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, bf16, f16};
use proptest::prelude::*;

/// Reduce-scatter gives each rank its part of the sum, and all-gather of the parts is the all-reduce.
pub fn halves_are_the_whole<T: Float>(ranks: &mut Ranks, packets: usize, seed: u64) {
    let world = ranks.comms.len();
    let n = packets * 16 / size_of::<T>();
    let x: Vec<Vec<T>> = (0..world as u64).map(|rank| random(8 * seed + rank, world * n)).collect();
    let want = sum(&x);
    let outcomes = ranks.each(|rank, comm, stream| {
        let x = stream.upload(&x[rank]).unwrap();
        let mut part = stream.upload(&vec![T::from_f32(f32::NAN); n]).unwrap();
        let [mut whole, mut in_place, mut sums] =
            [(), (), ()].map(|()| stream.upload(&vec![T::from_f32(f32::NAN); world * n]).unwrap());
        let all = [world * n];
        reduce_scatter(comm, stream, x.view(all).unwrap(), part.view_mut([n]).unwrap()).unwrap();
        all_gather(comm, stream, part.view([n]).unwrap(), whole.view_mut(all).unwrap()).unwrap();
        let own = in_place.view_mut(all).unwrap().slice(0, rank * n..(rank + 1) * n).unwrap();
        reduce_scatter(comm, stream, x.view(all).unwrap(), own).unwrap();
        all_gather_in_place(comm, stream, in_place.view_mut(all).unwrap()).unwrap();
        all_reduce(comm, stream, x.view(all).unwrap(), sums.view_mut(all).unwrap(), Algorithm::Auto).unwrap();
        comm.check().unwrap();
        let read = |buffer| stream.download(buffer).unwrap();
        (read(&part), [read(&whole), read(&in_place), read(&sums)])
    });
    for (rank, (part, wholes)) in outcomes.iter().enumerate() {
        let name = format!("{world} ranks, {n} of {}, rank {rank}", T::DTYPE);
        assert_eq!(bits(part), bits(&want[rank * n..(rank + 1) * n]), "part: {name}");
        for whole in wholes {
            assert_eq!(bits(whole), bits(&want), "{name}");
        }
    }
}

/// A packet, a thread each of both blocks, and one past.
#[test]
fn halves_are_the_whole_in_every_world() {
    for world in [1, 2, 4, 8] {
        let mut ranks = Ranks::new(Arch::Gfx942, world);
        for packets in [1, 512, 1025] {
            halves_are_the_whole::<bf16>(&mut ranks, packets, 1);
        }
        halves_are_the_whole::<f32>(&mut ranks, 513, 2);
        halves_are_the_whole::<f16>(&mut Ranks::new(Arch::Gfx950, world), 33, 3);
    }
}

proptest! {
    #![proptest_config(hk_testkit::config())]
    #[test]
    fn halves_of_any_size(log in 0..4usize, packets in 1..900usize, seed in 0..1000u64) {
        for arch in Arch::AMD {
            halves_are_the_whole::<bf16>(&mut Ranks::new(arch, 1 << log), packets, seed);
        }
    }
}

/// Along any axis: reduce-scatter gives the part, all-gather of the parts the whole, which is the all-reduce.
fn halves_along_an_axis(ranks: &mut Ranks, part: [usize; 3], dim: usize, seed: u64) {
    let world = ranks.comms.len();
    let mut whole = part;
    whole[dim] *= world;
    let (n, all) = (part.iter().product::<usize>(), whole.iter().product::<usize>());
    let x: Vec<Vec<bf16>> = (0..world as u64).map(|rank| random(8 * seed + rank, all)).collect();
    let total = sum(&x);
    let outcomes = ranks.each(|rank, comm, stream| {
        let x = stream.upload(&x[rank]).unwrap();
        let mut y = stream.alloc_zeroed::<bf16>(n).unwrap();
        let mut z = stream.alloc_zeroed::<bf16>(all).unwrap();
        reduce_scatter_dim(comm, stream, x.view(whole).unwrap(), y.view_mut(part).unwrap(), dim).unwrap();
        all_gather_dim(comm, stream, y.view(part).unwrap(), z.view_mut(whole).unwrap(), dim).unwrap();
        comm.check().unwrap();
        (stream.download(&y).unwrap(), stream.download(&z).unwrap())
    });
    let cols: usize = part[dim..].iter().product();
    for (rank, (y, z)) in outcomes.iter().enumerate() {
        let rows = total.chunks(world * cols).flat_map(|row| &row[rank * cols..(rank + 1) * cols]);
        let want: Vec<bf16> = rows.copied().collect();
        assert_eq!(bits(y), bits(&want), "part {rank} of {part:?} along axis {dim}");
        assert_eq!(bits(z), bits(&total), "{part:?} along axis {dim}, rank {rank}");
    }
}

#[test]
fn halves_along_every_axis() {
    let small = P2pOptions { buffer_bytes: 2048, ..options() };
    for world in [1, 2, 4, 8] {
        for ranks in [&mut Ranks::new(Arch::Gfx942, world), &mut Ranks::with(Arch::Gfx950, world, "", &small)]
        {
            for dim in 0..3 {
                halves_along_an_axis(ranks, [3, 5, 24], dim, 9);
                halves_along_an_axis(ranks, [1, 7, 8], dim, 10);
            }
        }
    }
}

/// Rows of any number of bytes, of any type, along the last axis.
#[test]
fn bytes_are_gathered_along_an_axis() {
    let small = P2pOptions { buffer_bytes: 64, ..options() };
    for world in [2, 4] {
        let mut ranks = Ranks::with(Arch::Gfx942, world, "", &small);
        for [rows, cols] in [[5, 1], [3, 13], [7, 32]] {
            let value = |rank: usize, i: usize| (i * 31 + rank * 7) as u8;
            let want = (0..rows).flat_map(|row| (0..world).map(move |rank| (row, rank)));
            let want = want.flat_map(|(row, rank)| (0..cols).map(move |i| value(rank, row * cols + i)));
            let want: Vec<u8> = want.collect();
            let got = ranks.each(|rank, comm, stream| {
                let x: Vec<u8> = (0..rows * cols).map(|i| value(rank, i)).collect();
                let x = stream.upload(&x).unwrap();
                let mut y = stream.alloc_zeroed::<u8>(rows * world * cols).unwrap();
                let view = y.view_mut([rows, world * cols]).unwrap();
                all_gather_dim(comm, stream, x.view([rows, cols]).unwrap(), view, 1).unwrap();
                stream.download(&y).unwrap()
            });
            assert!(got.iter().all(|got| *got == want), "[{rows}, {cols}] of {world} ranks");
        }
    }
}

/// Rows of x that are padded: what lies between them does not count.
#[test]
fn padded_rows_are_rows() {
    let small = P2pOptions { buffer_bytes: 4096, ..options() };
    let (world, rows, cols, padded) = (2, 6, 136, 160);
    let norms = |ranks: &mut Ranks, row: usize| {
        ranks.each(|rank, comm, stream| {
            let values = random::<bf16>(rank as u64, rows * cols);
            let mut x = vec![bf16::NAN; rows * row];
            for (to, from) in x.chunks_mut(row).zip(values.chunks(cols)) {
                to[..cols].copy_from_slice(from);
            }
            let x = stream.upload(&x).unwrap();
            let layout = || Layout::with_strides([rows, cols], [row, 1]).unwrap();
            let weight = stream.upload(&random::<bf16>(70, cols)).unwrap();
            let own = rows / world;
            let mut buffers =
                [rows, rows, own, own].map(|rows| stream.upload(&random::<bf16>(71, rows * cols)).unwrap());
            let [residual, out, part_residual, part_out] = &mut buffers;
            let options = NormOptions::default();
            let outputs = NormOutputs::<bf16, Fp8E4M3Fnuz> {
                residual: residual.view_mut([rows, cols]).unwrap(),
                out: Some(out.view_mut([rows, cols]).unwrap()),
                quantized: None,
            };
            let view = x.view_with(layout(), 0).unwrap();
            let weights = weight.view([cols]).unwrap();
            all_reduce_rmsnorm(comm, stream, view, weights, outputs, options, Algorithm::TwoShot).unwrap();
            let outputs = NormOutputs::<bf16, Fp8E4M3Fnuz> {
                residual: part_residual.view_mut([own, cols]).unwrap(),
                out: Some(part_out.view_mut([own, cols]).unwrap()),
                quantized: None,
            };
            reduce_scatter_rmsnorm(comm, stream, view, weights, outputs, options).unwrap();
            comm.check().unwrap();
            buffers.map(|buffer| bits(&stream.download(&buffer).unwrap()).to_vec())
        })
    };
    for options in [&options(), &small] {
        let mut ranks = Ranks::with(Arch::Gfx942, world, "", options);
        assert!(norms(&mut ranks, padded) == norms(&mut ranks, cols));
    }
}

/// Parts of any number of bytes, of any type.
#[test]
fn bytes_are_gathered() {
    for world in [1, 2, 4, 8] {
        let mut ranks = Ranks::new(Arch::Gfx950, world);
        for n in [1, 13, 16, 1027] {
            let part = |rank: usize| (0..n).map(|i| (i * 31 + rank * 7) as u8).collect::<Vec<_>>();
            let want: Vec<u8> = (0..world).flat_map(part).collect();
            let got = ranks.each(|rank, comm, stream| {
                let x = stream.upload(&part(rank)).unwrap();
                let mut y = stream.alloc_zeroed::<u8>(world * n).unwrap();
                all_gather(comm, stream, x.view([n]).unwrap(), y.view_mut([world * n]).unwrap()).unwrap();
                stream.download(&y).unwrap()
            });
            assert!(got.iter().all(|got| *got == want), "{n} bytes of {world} ranks");
        }
    }
}

/// The residuals, norms, quantized rows and scales of each rank.
type Rows = Vec<[Vec<u8>; 4]>;

fn read_rows<Q: Quantized>(
    stream: &hk_core::Stream,
    residual: &hk_core::DeviceBuffer<bf16>,
    out: &hk_core::DeviceBuffer<bf16>,
    buffers: &Buffers<Q>,
) -> [Vec<u8>; 4] {
    let read = |buffer| bits(&stream.download(buffer).unwrap()).to_vec();
    let [q, scale] = buffers.read(stream);
    [read(residual), read(out), q, scale]
}

/// All-reduce with norm, on all rows of each rank.
fn whole_rows<Q: Quantized>(ranks: &mut Ranks, [rows, cols]: [usize; 2], kind: Kind) -> Rows {
    ranks.each(|rank, comm, stream| {
        let n = rows * cols;
        let x = stream.upload(&random::<bf16>(rank as u64, n)).unwrap();
        let weight = stream.upload(&random::<bf16>(70, cols)).unwrap();
        let mut residual = stream.upload(&random::<bf16>(71, n)).unwrap();
        let mut out = stream.alloc_zeroed::<bf16>(n).unwrap();
        let mut buffers = Buffers::<Q>::new(stream, kind, [rows, cols]);
        let outputs = NormOutputs {
            residual: residual.view_mut([rows, cols]).unwrap(),
            out: Some(out.view_mut([rows, cols]).unwrap()),
            quantized: Some(buffers.view()),
        };
        let (x, weight) = (x.view([rows, cols]).unwrap(), weight.view([cols]).unwrap());
        let options = NormOptions::default();
        all_reduce_rmsnorm(comm, stream, x, weight, outputs, options, Algorithm::TwoShot).unwrap();
        comm.check().unwrap();
        read_rows(stream, &residual, &out, &buffers)
    })
}

/// Reduce-scatter with norm, on the own rows of each rank.
fn own_rows<Q: Quantized>(ranks: &mut Ranks, [rows, cols]: [usize; 2], kind: Kind) -> Rows {
    let world = ranks.comms.len();
    ranks.each(|rank, comm, stream| {
        let (n, part) = (rows * cols, rows / world * cols);
        let own = [rows / world, cols];
        let x = stream.upload(&random::<bf16>(rank as u64, n)).unwrap();
        let weight = stream.upload(&random::<bf16>(70, cols)).unwrap();
        let shard = &random::<bf16>(71, n)[rank * part..(rank + 1) * part];
        let mut residual = stream.upload(shard).unwrap();
        let mut out = stream.alloc_zeroed::<bf16>(part).unwrap();
        let mut buffers = Buffers::<Q>::new(stream, kind, own);
        let outputs = NormOutputs {
            residual: residual.view_mut(own).unwrap(),
            out: Some(out.view_mut(own).unwrap()),
            quantized: Some(buffers.view()),
        };
        let (x, weight) = (x.view([rows, cols]).unwrap(), weight.view([cols]).unwrap());
        reduce_scatter_rmsnorm(comm, stream, x, weight, outputs, NormOptions::default()).unwrap();
        comm.check().unwrap();
        read_rows(stream, &residual, &out, &buffers)
    })
}

/// Parts of the rows, one after the other, are the rows of `all_reduce_rmsnorm`.
#[test]
fn parts_of_rows_are_those_of_the_all_reduce() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        if matches!(kind, Kind::Groups(_, true)) {
            continue; // whose scales are not in the order of rows
        }
        let world = [1, 2, 4, 8][i % 4];
        let shape = [3 * world, [1024, 136, 2880][i % 3]];
        let check = |whole: Rows, own: Rows| {
            for (i, want) in whole[0].iter().enumerate() {
                let parts: Vec<u8> = own.iter().flat_map(|rank| rank[i].clone()).collect();
                assert!(parts == *want, "output {i} of {kind:?}, {world} ranks");
            }
            assert!(whole.iter().all(|rank| *rank == whole[0]), "all ranks alike");
        };
        let mut ranks = Ranks::new(Arch::Gfx942, world);
        check(
            whole_rows::<Fp8E4M3Fnuz>(&mut ranks, shape, kind),
            own_rows::<Fp8E4M3Fnuz>(&mut ranks, shape, kind),
        );
        let mut ranks = Ranks::new(Arch::Gfx950, world);
        check(whole_rows::<Fp8E4M3>(&mut ranks, shape, kind), own_rows::<Fp8E4M3>(&mut ranks, shape, kind));
    }
}

/// Tensors larger than the buffers take several launches, and have the same bits.
#[test]
fn pieces_are_the_whole() {
    let small = P2pOptions { buffer_bytes: 4096, ..options() };
    for world in [1, 2, 4] {
        let mut pieces = Ranks::with(Arch::Gfx942, world, "", &small);
        halves_are_the_whole::<bf16>(&mut pieces, 700, 5);
        let mut ranks = Ranks::new(Arch::Gfx942, world);
        for kind in KINDS {
            let shape = [5 * world, 136];
            let want = whole_rows::<Fp8E4M3Fnuz>(&mut ranks, [5 * world, 136], kind);
            assert!(whole_rows::<Fp8E4M3Fnuz>(&mut pieces, shape, kind) == want, "{kind:?}");
            let want = own_rows::<Fp8E4M3Fnuz>(&mut ranks, shape, kind);
            assert!(own_rows::<Fp8E4M3Fnuz>(&mut pieces, shape, kind) == want, "{kind:?}");
        }
    }
}

/// In a graph, too: replays of several launches of every collective.
#[test]
fn graphs_of_pieces_are_replayed() {
    let small = P2pOptions { buffer_bytes: 1024, ..options() };
    let mut ranks = Ranks::with(Arch::Gfx942, 2, "", &small);
    let n = 1000;
    let results = ranks.each(|rank, comm, stream| {
        let x = stream.upload(&integers::<f32>(rank, 2 * n)).unwrap();
        let mut part = stream.alloc_zeroed::<f32>(n).unwrap();
        let [mut y, mut z] = [(), ()].map(|()| stream.alloc_zeroed::<f32>(2 * n).unwrap());
        let graph = stream
            .capture(|| {
                reduce_scatter(comm, stream, x.view([2 * n])?, part.view_mut([n])?)?;
                all_gather(comm, stream, part.view([n])?, y.view_mut([2 * n])?)?;
                all_reduce(comm, stream, y.view([2 * n])?, z.view_mut([2 * n])?, Algorithm::TwoShot)
            })
            .unwrap();
        for _ in 0..5 {
            // SAFETY: the buffers are alive, and nothing else uses them.
            unsafe { graph.launch(stream).unwrap() };
        }
        all_reduce_in_place(comm, stream, z.view_mut([2 * n]).unwrap(), Algorithm::OneShot).unwrap();
        comm.check().unwrap();
        stream.download(&z).unwrap()
    });
    let want: Vec<f32> =
        sum(&[integers(0, 2 * n), integers(1, 2 * n)]).iter().map(|v: &f32| 4.0 * v).collect();
    assert!(results.iter().all(|result| *result == want));
}

#[test]
fn sanitizers_find_nothing() {
    let small = P2pOptions { buffer_bytes: 8192, ..options() };
    let mut ranks = Ranks::with(Arch::Gfx942, 4, "&sanitize=all", &small);
    halves_are_the_whole::<bf16>(&mut ranks, 200, 6);
    for kind in KINDS {
        whole_rows::<Fp8E4M3Fnuz>(&mut ranks, [4, 264], kind);
        own_rows::<Fp8E4M3Fnuz>(&mut ranks, [4, 264], kind);
    }
}
