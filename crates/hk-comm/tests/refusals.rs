//! Bad input: each error names the operation and the argument.

use crate::common::{options, streams};
use hk_comm::{
    Algorithm, NormOptions, NormOutputs, P2pComm, P2pOptions, QuantizedRows, all_gather, all_gather_dim,
    all_gather_in_place, all_reduce, all_reduce_in_place, all_reduce_rmsnorm, reduce_scatter,
    reduce_scatter_dim, reduce_scatter_rmsnorm,
};
use hk_core::quant::BlockScale;
use hk_core::{Arch, Device, E8M0, Error, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, bf16};

#[track_caller]
fn refused<T>(result: Result<T>, kind: fn(&Error) -> bool, parts: &[&str]) {
    let error = result.err().expect("an error");
    assert!(kind(&error), "{error:?}");
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "`{text}` lacks one of {parts:?}");
}

fn argument(error: &Error) -> bool {
    matches!(error, Error::Argument { .. })
}

fn unsupported(error: &Error) -> bool {
    matches!(error, Error::Unsupported { .. })
}

#[test]
fn communicators() {
    let three = streams(Arch::Gfx942, 3, "");
    refused(
        P2pComm::new(&three, &options()),
        argument,
        &["P2pComm::new: streams", "3 ranks", "1, 2, 4 or 8"],
    );
    refused(P2pComm::new(&[], &options()), argument, &["streams", "0 ranks"]);
    let twice = [three[0].clone(), three[0].device().create_stream().unwrap()];
    refused(P2pComm::new(&twice, &options()), argument, &["streams", "ranks 0 and 1 are both emu:gfx942:0"]);
    let of = |spec: &str| Device::open(spec).unwrap().create_stream().unwrap();
    let mixed = [of("emu:gfx942:0"), of("emu:gfx950:1")];
    refused(
        P2pComm::new(&mixed, &options()),
        unsupported,
        &["ranks 0 on gfx942 and 1 on gfx950", "one target"],
    );
    let apart = [of("emu:gfx942:0?node=a"), of("emu:gfx942:1?node=b")];
    refused(
        P2pComm::new(&apart, &options()),
        unsupported,
        &["access of emu:gfx942:0?node=a", "emu:gfx942:1?node=b"],
    );
    let pair = &three[..2];
    for blocks in [0, 129] {
        let wrong = P2pOptions { blocks: Some(blocks), ..options() };
        refused(P2pComm::new(pair, &wrong), argument, &["blocks", "1 to 128"]);
    }
    refused(P2pComm::new(pair, &P2pOptions { buffer_bytes: 0, ..options() }), argument, &["buffer_bytes"]);
    let most = P2pOptions { buffer_bytes: usize::MAX, ..options() };
    refused(P2pComm::new(pair, &most), |e| matches!(e, Error::TooLarge { .. }), &["buffer_bytes"]);
}

fn alone() -> (P2pComm, Stream) {
    let streams = streams(Arch::Gfx942, 1, "");
    let small = P2pOptions { buffer_bytes: 1 << 10, ..options() };
    (P2pComm::new(&streams, &small).unwrap().remove(0), streams[0].clone())
}

#[test]
fn tensors_of_all_reduce() {
    let (mut comm, stream) = alone();
    let x = stream.alloc_zeroed::<f32>(512).unwrap();
    let mut y = stream.alloc_zeroed::<f32>(512).unwrap();
    let auto = Algorithm::Auto;
    let mut call = |comm: &mut P2pComm, stream: &Stream, n: usize, m: usize| {
        all_reduce(
            comm,
            stream,
            x.view_with(Layout::contiguous([n]).unwrap(), 0).unwrap(),
            y.view_mut_with(Layout::contiguous([m]).unwrap(), 0).unwrap(),
            auto,
        )
    };
    refused(call(&mut comm, &stream, 8, 12), |e| matches!(e, Error::Shape { .. }), &["all_reduce: y"]);
    refused(call(&mut comm, &stream, 6, 6), unsupported, &["24 bytes", "packets of 16"]);
    let other = stream.device().create_stream().unwrap();
    refused(call(&mut comm, &other, 8, 8), argument, &["stream", "the stream of rank 0"]);
    call(&mut comm, &stream, 512, 512).unwrap();
    call(&mut comm, &stream, 0, 0).unwrap();
    let strided = || Layout::with_strides([4, 4], [8, 1]).unwrap();
    let result = all_reduce_in_place(&mut comm, &stream, y.view_mut_with(strided(), 0).unwrap(), auto);
    refused(result, |e| matches!(e, Error::Stride { .. }), &["all_reduce: y"]);
    let shifted = y.view_mut_with(Layout::contiguous([4]).unwrap(), 1).unwrap();
    refused(
        all_reduce_in_place(&mut comm, &stream, shifted, auto),
        |e| matches!(e, Error::Align { .. }),
        &["y"],
    );
    let whole = y.view_mut([512]).unwrap();
    let shifted = whole.alias().slice(0, 4..260).unwrap();
    let (front, _) = whole.split_at(0, 256).unwrap();
    let result = all_reduce(&mut comm, &stream, shifted, front, auto);
    refused(result, |e| matches!(e, Error::Overlap { .. }), &["all_reduce", "x", "y"]);
    let foreign = crate::common::streams(Arch::Gfx942, 1, "").remove(0);
    let mut z = foreign.alloc_zeroed::<f32>(8).unwrap();
    let result = all_reduce_in_place(&mut comm, &stream, z.view_mut([8]).unwrap(), auto);
    refused(result, |e| matches!(e, Error::DeviceMismatch { .. }), &["all_reduce: y"]);
}

#[test]
fn tensors_of_all_reduce_rmsnorm() {
    type Out<'a> = NormOutputs<'a, bf16, Fp8E4M3Fnuz>;
    let (mut comm, stream) = alone();
    let x = stream.alloc_zeroed::<bf16>(520).unwrap();
    let weight = stream.alloc_zeroed::<bf16>(520).unwrap();
    let mut residual = stream.alloc_zeroed::<bf16>(520).unwrap();
    let mut out = stream.alloc_zeroed::<bf16>(520).unwrap();
    let shape = |dims: [usize; 2]| Layout::contiguous(dims).unwrap();
    let mut call = |x_dims: [usize; 2], cols: usize, out_dims: Option<[usize; 2]>, options| {
        let outputs = Out {
            residual: residual.view_mut_with(shape(x_dims), 0).unwrap(),
            out: out_dims.map(|dims| out.view_mut_with(shape(dims), 0).unwrap()),
            quantized: None,
        };
        let x = x.view_with(shape(x_dims), 0).unwrap();
        let weight = weight.view_with(Layout::contiguous([cols]).unwrap(), 0).unwrap();
        all_reduce_rmsnorm(&mut comm, &stream, x, weight, outputs, options, Algorithm::Auto)
    };
    let fine = NormOptions::default();
    call([4, 64], 64, Some([4, 64]), fine).unwrap();
    call([0, 64], 64, Some([0, 64]), fine).unwrap();
    let shape_error = |e: &Error| matches!(e, Error::Shape { .. });
    refused(call([4, 64], 32, Some([4, 64]), fine), shape_error, &["all_reduce_rmsnorm: weight"]);
    refused(call([4, 64], 64, Some([64, 4]), fine), shape_error, &["out"]);
    refused(call([4, 64], 64, None, fine), argument, &["outputs", "neither out nor quantized"]);
    refused(call([4, 12], 12, Some([4, 12]), fine), unsupported, &["cols = 12", "multiple of 8"]);
    refused(call([4, 0], 0, Some([4, 0]), fine), |e| matches!(e, Error::Empty { .. }), &["x"]);
    let large = |e: &Error| matches!(e, Error::TooLarge { .. });
    refused(
        call([1, 520], 520, Some([1, 520]), fine),
        large,
        &["x", "1040 bytes of a row of 1 ranks", "1024"],
    );
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let wrong = NormOptions { eps, ..fine };
        refused(call([4, 64], 64, Some([4, 64]), wrong), argument, &["eps"]);
    }
    let wrong = NormOptions { weight_offset: f32::NAN, ..fine };
    refused(call([4, 64], 64, Some([4, 64]), wrong), argument, &["weight_offset"]);

    // Rows that are not on 16 bytes, columns that are apart.
    for strides in [[68, 1], [64, 2]] {
        let x = x.view_with(Layout::with_strides([3, 64], strides).unwrap(), 0).unwrap();
        let outputs = Out {
            residual: residual.view_mut_with(shape([3, 64]), 0).unwrap(),
            out: Some(out.view_mut_with(shape([3, 64]), 0).unwrap()),
            quantized: None,
        };
        let weight = weight.view_with(Layout::contiguous([64]).unwrap(), 0).unwrap();
        let result = all_reduce_rmsnorm(&mut comm, &stream, x, weight, outputs, fine, Algorithm::Auto);
        refused(result, |e| matches!(e, Error::Stride { .. }), &["all_reduce_rmsnorm: x"]);
    }

    // An fp8 of another target, f32 rows, an output over an input.
    let view = |dims: [usize; 2]| x.view_with(shape(dims), 0).unwrap();
    let weights = || weight.view_with(Layout::contiguous([64]).unwrap(), 0).unwrap();
    let mut q = stream.alloc_zeroed::<Fp8E4M3>(256).unwrap();
    let mut scale = stream.alloc_zeroed::<f32>(4).unwrap();
    let outputs = NormOutputs {
        residual: residual.view_mut_with(shape([4, 64]), 0).unwrap(),
        out: None,
        quantized: Some(QuantizedRows::PerToken {
            q: q.view_mut([4, 64]).unwrap(),
            scale: scale.view_mut([4]).unwrap(),
        }),
    };
    let result =
        all_reduce_rmsnorm(&mut comm, &stream, view([4, 64]), weights(), outputs, fine, Algorithm::Auto);
    refused(result, |e| matches!(e, Error::DType { .. }), &["q", "fp8e4m3fnuz"]);
    let wide = stream.alloc_zeroed::<f32>(256).unwrap();
    let mut wide_residual = stream.alloc_zeroed::<f32>(256).unwrap();
    let outputs = NormOutputs::<f32, Fp8E4M3Fnuz> {
        residual: wide_residual.view_mut([4, 64]).unwrap(),
        out: None,
        quantized: None,
    };
    let wide_weight = wide.view_with(Layout::contiguous([64]).unwrap(), 0).unwrap();
    let result = all_reduce_rmsnorm(
        &mut comm,
        &stream,
        wide.view([4, 64]).unwrap(),
        wide_weight,
        outputs,
        fine,
        Algorithm::Auto,
    );
    refused(result, |e| matches!(e, Error::DType { .. }), &["x", "bf16 or f16"]);
    let target = residual.view_mut_with(shape([4, 64]), 0).unwrap();
    let over = target.alias();
    let outputs =
        Out { residual: target, out: Some(out.view_mut_with(shape([4, 64]), 0).unwrap()), quantized: None };
    let result = all_reduce_rmsnorm(&mut comm, &stream, over, weights(), outputs, fine, Algorithm::Auto);
    refused(result, |e| matches!(e, Error::Overlap { .. }), &["residual"]);
}

/// fp8 by groups and mxfp4: shapes of scales and of packed values, and the mode.
#[test]
fn quantized_rows() {
    type Rows<'a> = QuantizedRows<'a, Fp8E4M3Fnuz>;
    let (mut comm, stream) = alone();
    let (rows, cols) = (2, 160);
    let x = stream.alloc_zeroed::<bf16>(rows * cols).unwrap();
    let weight = stream.alloc_zeroed::<bf16>(cols).unwrap();
    let mut residual = stream.alloc_zeroed::<bf16>(rows * cols).unwrap();
    let mut call = |quantized: Rows| {
        let (x, weight) = (x.view([rows, cols])?, weight.view([cols])?);
        let outputs =
            NormOutputs { residual: residual.view_mut([rows, cols])?, out: None, quantized: Some(quantized) };
        let options = NormOptions::default();
        all_reduce_rmsnorm(&mut comm, &stream, x, weight, outputs, options, Algorithm::Auto)
    };
    let mut q = stream.alloc_zeroed::<Fp8E4M3Fnuz>(rows * cols).unwrap();
    let mut q4 = stream.alloc_zeroed::<Fp4x2>(rows * cols / 2).unwrap();
    let mut scales = stream.alloc_zeroed::<f32>(rows * 21).unwrap();
    let mut e8m0 = stream.alloc_zeroed::<E8M0>(rows * 5).unwrap();
    let shape_error = |e: &Error| matches!(e, Error::Shape { .. });
    let mut groups_of = |group: usize, groups: usize| {
        let scale = scales.view_mut_with(Layout::contiguous([rows, groups]).unwrap(), 0).unwrap();
        call(QuantizedRows::Groups { q: q.view_mut([rows, cols]).unwrap(), scale, group })
    };
    for (group, groups) in [(512, 1), (256, 1), (128, 2), (64, 3), (32, 5), (16, 10), (8, 20)] {
        groups_of(group, groups).unwrap();
        refused(groups_of(group, groups + 1), shape_error, &["all_reduce_rmsnorm: scale"]);
    }
    for group in [0, 4, 12, 48, 1024, usize::MAX] {
        refused(groups_of(group, 1), argument, &["all_reduce_rmsnorm: group", "a power of two, 8 to 512"]);
    }
    let mut blocks_of = |q_cols: usize, blocks: usize, mode| {
        let q = q4.view_mut_with(Layout::contiguous([rows, q_cols]).unwrap(), 0).unwrap();
        let scale = e8m0.view_mut_with(Layout::contiguous([rows, blocks]).unwrap(), 0).unwrap();
        call(QuantizedRows::Mxfp4 { q, scale, mode })
    };
    blocks_of(80, 5, BlockScale::Even).unwrap();
    refused(blocks_of(64, 5, BlockScale::Even), shape_error, &["q"]);
    refused(blocks_of(80, 4, BlockScale::Even), shape_error, &["scale"]);
    refused(blocks_of(80, 5, BlockScale::DivFloor), argument, &["mode", "DivFloor"]);
}

#[test]
fn tensors_of_reduce_scatter_and_all_gather() {
    let streams = streams(Arch::Gfx942, 2, "");
    let mut comm = P2pComm::new(&streams, &options()).unwrap().remove(0);
    let stream = &streams[0];
    let mut a = stream.alloc_zeroed::<f32>(64).unwrap();
    let mut b = stream.alloc_zeroed::<f32>(64).unwrap();
    let shape_error = |e: &Error| matches!(e, Error::Shape { .. });
    let dims = |n: usize| Layout::contiguous([n, 2]).unwrap();
    for (of_x, of_y) in [(16, 16), (15, 8), (8, 16)] {
        let (x, y) = (a.view_with(dims(of_x), 0).unwrap(), b.view_mut_with(dims(of_y), 0).unwrap());
        refused(reduce_scatter(&mut comm, stream, x, y), shape_error, &["reduce_scatter: x", "2 ranks"]);
        let (x, y) = (a.view_with(dims(of_y), 0).unwrap(), b.view_mut_with(dims(of_x), 0).unwrap());
        refused(all_gather(&mut comm, stream, x, y), shape_error, &["all_gather: y", "2 ranks"]);
    }
    let (x, y) = (a.view_with(dims(6), 0).unwrap(), b.view_mut_with(dims(3), 0).unwrap());
    refused(reduce_scatter(&mut comm, stream, x, y), unsupported, &["y of 24 bytes", "packets of 16"]);
    let (x, y) = (a.view_with(dims(4), 0).unwrap(), b.view_mut_with(dims(8), 0).unwrap());
    refused(all_gather_dim(&mut comm, stream, x, y, 2), argument, &["all_gather: dim", "2", "axis of x"]);
    let (x, y) = (a.view_with(dims(4), 0).unwrap(), b.view_mut_with(dims(8), 0).unwrap());
    refused(all_gather_dim(&mut comm, stream, x, y, 1), shape_error, &["all_gather: y", "[4, 4]"]);
    let (x, y) =
        (a.view([16, 4]).unwrap(), b.view_mut_with(Layout::contiguous([16, 2]).unwrap(), 0).unwrap());
    refused(reduce_scatter_dim(&mut comm, stream, x, y, 1), unsupported, &["a row of y of 8 bytes", "16"]);
    let odd = b.view_mut_with(dims(3), 0).unwrap();
    refused(all_gather_in_place(&mut comm, stream, odd), shape_error, &["all_gather: y", "2 parts"]);
    let align = |e: &Error| matches!(e, Error::Align { .. });
    let (x, y) = (a.view_with(dims(4), 1).unwrap(), b.view_mut_with(dims(8), 0).unwrap());
    refused(all_gather(&mut comm, stream, x, y), align, &["all_gather: x"]);
    let overlap = |e: &Error| matches!(e, Error::Overlap { .. });
    let y = a.view_mut_with(dims(8), 0).unwrap();
    let x = y.alias().slice(0, 0..4).unwrap();
    refused(all_gather(&mut comm, stream, x, y), overlap, &["all_gather"]);
    let foreign = streams[1].clone();
    let (x, y) = (a.view_with(dims(4), 0).unwrap(), b.view_mut_with(dims(8), 0).unwrap());
    refused(all_gather(&mut comm, &foreign, x, y), argument, &["stream", "the stream of rank 0"]);

    // The rows of reduce_scatter_rmsnorm are those of a part.
    let x = stream.alloc_zeroed::<bf16>(4 * 64).unwrap();
    let weight = stream.alloc_zeroed::<bf16>(64).unwrap();
    let [mut residual, mut out] = [(), ()].map(|()| stream.alloc_zeroed::<bf16>(4 * 64).unwrap());
    let outputs = NormOutputs::<bf16, Fp8E4M3Fnuz> {
        residual: residual.view_mut([4, 64]).unwrap(),
        out: Some(out.view_mut([4, 64]).unwrap()),
        quantized: None,
    };
    let (x, weight) = (x.view([4, 64]).unwrap(), weight.view([64]).unwrap());
    let result = reduce_scatter_rmsnorm(&mut comm, stream, x, weight, outputs, NormOptions::default());
    refused(result, shape_error, &["reduce_scatter_rmsnorm: x", "[8, 64]", "2 ranks"]);
}
