//! Norms over `RcclComm`: bit for bit the library's collective and hk-quant's fused norm, and what the peer-memory kernels give where the sums
//! are the same.

use crate::common::quantized::{Buffers, KINDS, Kind};
use crate::common::{bits, options, random, streams};
use crate::quantized::small;
use hk_comm::{
    Algorithm, NormOptions, NormOutputs, P2pComm, QuantizedRows, RcclComm, RcclOptions, ReduceOp,
    all_reduce_rmsnorm, reduce_scatter_rmsnorm,
};
use hk_core::quant::{BlockScale, Quantized};
use hk_core::{Arch, DeviceBuffer, Error, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, bf16};
use hk_quant::NormRows;
use proptest::prelude::*;

/// What a norm gives, as bytes: the residual, the rows, the quantized rows, their scales.
type Outcome = [Vec<u8>; 4];

const EPS: f32 = 1e-5;

#[derive(Clone, Copy)]
struct Shape {
    /// Of a rank.
    rows: usize,
    cols: usize,
    /// Columns of x.
    width: usize,
}

/// Buffers of a call with so many rows of residuals, and of results.
struct Call<'s, Q: Quantized> {
    stream: &'s Stream,
    residual: DeviceBuffer<bf16>,
    out: DeviceBuffer<bf16>,
    quantized: Buffers<Q>,
    shapes: [[usize; 2]; 2],
}

impl<'s, Q: Quantized> Call<'s, Q> {
    fn new(stream: &'s Stream, kind: Kind, residual: &[bf16], results: [usize; 2]) -> Self {
        let cols = results[1];
        Self {
            stream,
            residual: stream.upload(residual).unwrap(),
            out: stream.upload(&vec![bf16::NAN; results[0] * cols]).unwrap(),
            quantized: Buffers::new(stream, kind, results),
            shapes: [[residual.len() / cols, cols], results],
        }
    }

    fn outputs(&mut self) -> NormOutputs<'_, bf16, Q> {
        NormOutputs {
            residual: self.residual.view_mut(self.shapes[0]).unwrap(),
            out: Some(self.out.view_mut(self.shapes[1]).unwrap()),
            quantized: Some(self.quantized.view()),
        }
    }

    fn outcome(&self) -> Outcome {
        let read = |buffer| bits(&self.stream.download(buffer).unwrap()).to_vec();
        let [q, scale] = self.quantized.read(self.stream);
        [read(&self.residual), read(&self.out), q, scale]
    }
}

/// All forms, on a device for each rank, each of which has `rows` rows in the end. `exact`: sums of squares are the same in every order, so the bits
/// are those of hk-quant.
pub fn forms<Q: Quantized>(
    streams: &[Stream],
    [rows, cols, width]: [usize; 3],
    kind: Kind,
    values: fn(u64, usize) -> Vec<bf16>,
    exact: bool,
) {
    let shape = Shape { rows, cols, width };
    let peers = P2pComm::new(streams, &options()).unwrap();
    let library = RcclComm::all(streams, &RcclOptions::default()).unwrap();
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let rank =
            |(peer, comm)| scope.spawn(move || forms_of_rank::<Q>(peer, &comm, shape, kind, values, exact));
        let threads: Vec<_> = peers.into_iter().zip(library).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{kind:?}: all ranks alike");
}

fn forms_of_rank<Q: Quantized>(
    mut peer: P2pComm,
    comm: &RcclComm,
    Shape { rows, cols, width }: Shape,
    kind: Kind,
    values: fn(u64, usize) -> Vec<bf16>,
    exact: bool,
) -> Outcome {
    let stream = comm.stream();
    let (rank, world) = (comm.rank(), comm.world());
    let all = world * rows;
    let (whole, own) = ([all, width], rank * rows * cols..(rank + 1) * rows * cols);
    let name = format!("{kind:?} of {rows} x {cols} of {width}, rank {rank} of {world}");
    let x = stream.upload(&values(rank as u64, all * width)).unwrap();
    let residual = values(90, all * cols);
    let weight = stream.upload(&random::<bf16>(91, cols)).unwrap();
    let weight = weight.view([cols]).unwrap();
    let norm = NormOptions { eps: EPS, ..Default::default() };
    let mut sum = stream.upload(&vec![bf16::NAN; all * width]).unwrap();
    let padded = Layout::with_strides([all, cols], [width, 1]).unwrap();

    // All rows on all ranks: in one call of the library's and one norm, of the peers, and apart.
    let mut one = Call::<Q>::new(stream, kind, &residual, [all, cols]);
    let sums = sum.view_mut(whole).unwrap();
    comm.all_reduce_rmsnorm(stream, x.view(whole).unwrap(), sums, weight, one.outputs(), norm).unwrap();
    comm.check().unwrap();
    let one = one.outcome();
    let mut two = Call::<Q>::new(stream, kind, &residual, [all, cols]);
    let view = x.view_with(padded, 0).unwrap();
    all_reduce_rmsnorm(&mut peer, stream, view, weight, two.outputs(), norm, Algorithm::Auto).unwrap();
    peer.check().unwrap();
    assert!(one == two.outcome(), "as the peers: {name}");
    if exact {
        let mut apart = Call::<Q>::new(stream, kind, &residual, [all, cols]);
        let sums = sum.view_mut(whole).unwrap();
        comm.all_reduce(stream, x.view(whole).unwrap(), sums, ReduceOp::Sum).unwrap();
        let rows = stream
            .download(&sum)
            .unwrap()
            .chunks(width)
            .flat_map(|row| row[..cols].to_vec())
            .collect::<Vec<_>>();
        let rows = stream.upload(&rows).unwrap();
        let view = apart.residual.view_mut([all, cols]).unwrap();
        let rows = NormRows {
            x: rows.view([all, cols]).unwrap(),
            weight,
            eps: EPS,
            residual: Some((view.alias(), view)),
            out: Some(apart.out.view_mut([all, cols]).unwrap()),
        };
        apart.quantized.by_hk_quant(stream, rows);
        assert!(one == apart.outcome(), "as calls apart: {name}");
    }
    // In place.
    let mut place = Call::<Q>::new(stream, kind, &residual, [all, cols]);
    let mut both = stream.upload(&values(rank as u64, all * width)).unwrap();
    let sums = both.view_mut(whole).unwrap();
    comm.all_reduce_rmsnorm(stream, sums.alias(), sums, weight, place.outputs(), norm).unwrap();
    assert!(one == place.outcome(), "in place: {name}");

    // The own rows.
    let mut part = Call::<Q>::new(stream, kind, &residual[own.clone()], [rows, cols]);
    let sums = sum.view_mut_with(Layout::contiguous([rows, width]).unwrap(), 0).unwrap();
    comm.reduce_scatter_rmsnorm(stream, x.view(whole).unwrap(), sums, weight, part.outputs(), norm).unwrap();
    let part = part.outcome();
    let mut of_peers = Call::<Q>::new(stream, kind, &residual[own.clone()], [rows, cols]);
    reduce_scatter_rmsnorm(&mut peer, stream, view, weight, of_peers.outputs(), norm).unwrap();
    peer.check().unwrap();
    assert!(part == of_peers.outcome(), "own rows, as the peers: {name}");
    let mut place = Call::<Q>::new(stream, kind, &residual[own.clone()], [rows, cols]);
    let mut both = stream.upload(&values(rank as u64, all * width)).unwrap();
    let sums = both.view_mut(whole).unwrap();
    let input = sums.alias();
    let sums = sums.slice(0, rank * rows..(rank + 1) * rows).unwrap();
    comm.reduce_scatter_rmsnorm(stream, input, sums, weight, place.outputs(), norm).unwrap();
    assert!(part == place.outcome(), "own rows, in place: {name}");

    // And all rows from them, but for scales that are not in the order of rows.
    if !matches!(kind, Kind::Groups(_, true)) {
        let mut gathered = Call::<Q>::new(stream, kind, &residual[own], [all, cols]);
        let sums = sum.view_mut_with(Layout::contiguous([rows, width]).unwrap(), 0).unwrap();
        let x = x.view(whole).unwrap();
        comm.reduce_scatter_rmsnorm_all_gather(stream, x, sums, weight, gathered.outputs(), norm).unwrap();
        comm.check().unwrap();
        let gathered = gathered.outcome();
        assert!(gathered[0] == part[0] && gathered[1..] == one[1..], "gathered: {name}");
    }
    one
}

fn integers(seed: u64, n: usize) -> Vec<bf16> {
    small(seed as usize, n)
}

#[test]
fn every_kind_is_the_composition() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        let world = [2, 4, 1][i % 3];
        let shapes = [[1, 8, 8], [3, 136, 160], [2, 4096 + 72, 4096 + 80]];
        for shape in shapes {
            forms::<Fp8E4M3Fnuz>(&streams(Arch::Gfx942, world, ""), shape, kind, integers, true);
            forms::<Fp8E4M3>(&streams(Arch::Gfx950, world, ""), shape, kind, integers, true);
        }
    }
    forms::<Fp8E4M3Fnuz>(&streams(Arch::Gfx942, 8, ""), [1, 16384, 16384], KINDS[1], integers, true);
}

proptest! {
    #![proptest_config(hk_testkit::config())]

    /// Random values: on emulated devices the library's sums are those of the peers.
    #[test]
    fn any_shape_is_that_of_the_peers(
        log in 0..3usize, rows in 1..4usize, packets in 1..200usize, padding in 0..3usize, kind in 0..6usize,
    ) {
        let shape = [rows, 8 * packets, 8 * (packets + padding)];
        for arch in Arch::AMD {
            let streams = streams(arch, 1 << log, "");
            match arch {
                Arch::Gfx942 => forms::<Fp8E4M3Fnuz>(&streams, shape, KINDS[kind], random, false),
                _ => forms::<Fp8E4M3>(&streams, shape, KINDS[kind], random, false),
            }
        }
    }
}

#[test]
fn sanitizers_find_nothing() {
    for kind in [Kind::Groups(512, false), Kind::Mxfp4(BlockScale::Even)] {
        forms::<Fp8E4M3Fnuz>(
            &streams(Arch::Gfx942, 2, "&sanitize=all"),
            [3, 1032, 1040],
            kind,
            random,
            false,
        );
    }
}

/// In a graph: the collective and the norm, replayed.
#[test]
fn graphs_replay_norms() {
    let streams = streams(Arch::Gfx942, 2, "");
    let comms = RcclComm::all(&streams, &RcclOptions::default()).unwrap();
    let (rows, cols) = (3, 64);
    let outs = crate::rccl::each(comms, |comm, stream| {
        let x = stream.upload(&small(comm.rank(), rows * cols)).unwrap();
        let weight = stream.upload(&random::<bf16>(1, cols)).unwrap();
        let mut sum = stream.alloc_zeroed::<bf16>(rows * cols).unwrap();
        let [mut residual, mut out] = [(), ()].map(|()| stream.alloc_zeroed::<bf16>(rows * cols).unwrap());
        let mut call = || {
            let outputs = NormOutputs::<_, Fp8E4M3Fnuz> {
                residual: residual.view_mut([rows, cols])?,
                out: Some(out.view_mut([rows, cols])?),
                quantized: None,
            };
            let (x, sum) = (x.view([rows, cols])?, sum.view_mut([rows, cols])?);
            comm.all_reduce_rmsnorm(stream, x, sum, weight.view([cols])?, outputs, NormOptions::default())
        };
        let graph = stream.capture(&mut call).unwrap();
        for _ in 0..4 {
            // SAFETY: all buffers are alive, and nothing else uses them.
            unsafe { graph.launch(stream) }.unwrap();
        }
        call().unwrap();
        comm.check().unwrap();
        (stream.download(&residual).unwrap(), stream.download(&sum).unwrap())
    });
    for (residual, sum) in outs {
        let five: Vec<bf16> = sum.iter().map(|v| bf16::from_f32(5.0 * v.to_f32())).collect();
        assert_eq!(residual, five);
    }
}

/// Bad input: nothing is queued, and each error names its argument.
#[test]
fn refusals() {
    let streams = streams(Arch::Gfx942, 2, "");
    let comms = RcclComm::all(&streams, &RcclOptions::default()).unwrap();
    let (comm, stream) = (&comms[0], &streams[0]);
    let n = 1024;
    let buffer = || stream.alloc_zeroed::<bf16>(n).unwrap();
    let (x, weight) = (buffer(), buffer());
    let (mut sum, mut residual, mut out) = (buffer(), buffer(), buffer());
    let mut q = stream.alloc_zeroed::<Fp8E4M3Fnuz>(n).unwrap();
    let mut scale = stream.alloc_zeroed::<f32>(n).unwrap();
    let layout = |shape: [usize; 2]| Layout::contiguous(shape).unwrap();
    #[derive(Clone, Copy)]
    struct Case {
        x: [usize; 2],
        sum: [usize; 2],
        residual: [usize; 2],
        weight: usize,
        group: usize,
        eps: f32,
        scattered: bool,
        scale_by_columns: bool,
    }
    let fine = Case {
        x: [4, 48],
        sum: [4, 48],
        residual: [4, 40],
        weight: 40,
        group: 16,
        eps: EPS,
        scattered: false,
        scale_by_columns: false,
    };
    let mut call = |on: &Stream, case: Case| -> Result<()> {
        let rows = case.residual[0] * if case.scattered { 2 } else { 1 };
        let groups = case.residual[1].div_ceil(case.group.max(1));
        let strides = if case.scale_by_columns { [1, rows] } else { [groups, 1] };
        let q = q.view_mut_with(layout([rows, case.residual[1]]), 0)?;
        let scale = scale.view_mut_with(Layout::with_strides([rows, groups], strides)?, 0)?;
        let outputs = NormOutputs {
            residual: residual.view_mut_with(layout(case.residual), 0)?,
            out: Some(out.view_mut_with(layout([rows, case.residual[1]]), 0)?),
            quantized: Some(QuantizedRows::Groups { q, scale, group: case.group }),
        };
        let (x, sum) = (x.view_with(layout(case.x), 0)?, sum.view_mut_with(layout(case.sum), 0)?);
        let weight = weight.view_with(Layout::contiguous([case.weight])?, 0)?;
        let options = NormOptions { eps: case.eps, ..Default::default() };
        if case.scattered {
            comm.reduce_scatter_rmsnorm_all_gather(on, x, sum, weight, outputs, options)
        } else {
            comm.all_reduce_rmsnorm(on, x, sum, weight, outputs, options)
        }
    };
    macro_rules! refused {
        ($case:expr, $variant:pat, $($text:literal),+) => {
            let error = call(stream, $case).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, $variant) $(&& text.contains($text))+, "{text}");
        };
    }
    refused!(
        Case { x: [4, 56], ..fine },
        Error::Shape { arg: "x", .. },
        "RcclComm::all_reduce_rmsnorm",
        "[4, 48]"
    );
    refused!(Case { sum: [4, 32], x: [4, 32], ..fine }, Error::Shape { arg: "sum", .. }, "40 or more");
    refused!(Case { sum: [3, 48], ..fine }, Error::Shape { arg: "sum", .. }, "[4, 40 or more]");
    refused!(Case { weight: 48, ..fine }, Error::Shape { arg: "weight", .. }, "[40]");
    refused!(Case { x: [4, 44], sum: [4, 44], ..fine }, Error::Stride { arg: "sum", .. }, "16 bytes");
    refused!(
        Case { residual: [4, 36], weight: 36, ..fine },
        Error::Unsupported { .. },
        "cols = 36",
        "multiple of 8"
    );
    for group in [0, 4, 24, 1024] {
        refused!(Case { group, ..fine }, Error::Argument { arg: "group", .. }, "a power of two, 8 to 512");
    }
    refused!(Case { eps: 0.0, ..fine }, Error::Argument { arg: "eps", .. }, "positive");
    let scattered = Case { scattered: true, x: [8, 48], ..fine };
    refused!(Case { x: [4, 48], ..scattered }, Error::Shape { arg: "x", .. }, "all_gather", "[8, 48]");
    refused!(
        Case { scale_by_columns: true, ..scattered },
        Error::Stride { arg: "scale", .. },
        "reduce_scatter_rmsnorm_all_gather"
    );
    let error = call(&streams[1], fine).unwrap_err();
    assert!(matches!(error, Error::Argument { arg: "stream", .. }), "{error}");

    // Tensors that share memory.
    let overlap = |result: Result<()>, names: [&str; 2]| match result {
        Err(Error::Overlap { a, b, .. }) => assert_eq!([a, b], names),
        other => panic!("{other:?}"),
    };
    let weights = || weight.view_with(Layout::contiguous([32]).unwrap(), 0).unwrap();
    let (mut a, mut b, mut c) = (buffer(), buffer(), buffer());
    let mut shared = |of_sum: bool| {
        let whole = a.view_mut_with(layout([16, 32]), 0).unwrap();
        let over = whole.alias().slice(0, 2..6).unwrap();
        let (front, _) = whole.split_at(0, 4).unwrap();
        let other = b.view_mut_with(layout([4, 32]), 0).unwrap();
        let (sum, residual) = if of_sum { (front, other) } else { (other, front) };
        let out = Some(c.view_mut_with(layout([4, 32]), 0).unwrap());
        let outputs = NormOutputs::<_, Fp8E4M3Fnuz> { residual, out, quantized: None };
        comm.all_reduce_rmsnorm(stream, over, sum, weights(), outputs, NormOptions::default())
    };
    overlap(shared(true), ["x", "sum"]);
    overlap(shared(false), ["x", "residual"]);

    // No rows are no launch, and nothing was queued.
    call(stream, Case { x: [0, 48], sum: [0, 48], residual: [0, 40], ..fine }).unwrap();
    comm.check().unwrap();
    comm.abort();
    let error = call(stream, fine).unwrap_err();
    assert!(matches!(error, Error::Aborted { op: "RcclComm::all_reduce_rmsnorm", .. }), "{error}");
}
