//! What holds of every operator: rows do not depend on each other or on how tensors lie in memory; what shares memory, or is of
//! another device, is refused.

mod common;

use common::bytes;
use hk_core::quant::{BlockScale, GroupSize, ScaleLayout, shuffled_len};
use hk_core::{Device, E8M0, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Layout, bf16};
use hk_quant::{
    Fp8Scale, GroupOptions, MoeOrder, MxOptions, NormRows, OPERATORS, downcast_to_mxfp,
    downcast_to_static_fp8, dynamic_mxfp4_quant, fp8_fnuz_to_ocp, fp8_ocp_to_fnuz, fused_rmsnorm_fp8_quant,
    fused_rmsnorm_mxfp4_quant, group_quant, moe_smoothquant, per_tensor_quant_dynamic,
    per_tensor_quant_static, per_token_quant, shuffle_scales, smoothquant, unshuffle_scales,
    upcast_from_mxfp,
};
use hk_testkit::{self as kit, Fill, Gpu, Place, RowCase, Tensor, assert_error, kind};

/// A place for rows: on 16 bytes without gaps, or neither.
fn place(rows: usize, cols: usize, odd: bool) -> Place {
    if odd { Place::rows([rows, cols], cols + 3).shifted(1) } else { Place::contiguous([rows, cols]) }
}

/// The bytes of outputs with as many rows each, row by row.
fn by_rows(rows: usize, outputs: &[&[u8]]) -> Vec<Vec<u8>> {
    let of_row = |row: usize| {
        let parts = outputs.iter().flat_map(|o| &o[row * (o.len() / rows)..(row + 1) * (o.len() / rows)]);
        parts.copied().collect()
    };
    (0..rows).map(of_row).collect()
}

/// Checks that the bytes of a row are the same among others and alone, on 16 bytes and not.
#[track_caller]
fn check(cols: usize, run: impl Fn(&Gpu, &Tensor<bf16>, [usize; 2], bool) -> Vec<Vec<u8>>) {
    const ROWS: usize = 19;
    let c = RowCase::<bf16>::new(ROWS, cols, Fill::Wide, cols as u64, [(cols, 0); 4]);
    for gpu in kit::devices() {
        let all = run(&gpu, &gpu.upload(&c.x, [ROWS, cols]), [ROWS, cols], false);
        let odd = run(&gpu, &gpu.upload(&c.x, place(ROWS, cols, true)), [ROWS, cols], true);
        assert!(odd == all, "{cols} columns on {}", gpu.spec());
        for row in [0, 11, ROWS - 1] {
            let x = gpu.upload(&c.x[row * cols..(row + 1) * cols], [1, cols]);
            assert!(
                run(&gpu, &x, [1, cols], false)[0] == all[row],
                "row {row} of {cols} columns on {}",
                gpu.spec()
            );
        }
    }
}

const COLS: [usize; 3] = [96, 102, 2880];

#[test]
fn rows_of_one_scale_are_independent() {
    for cols in COLS {
        check(cols, |gpu, x, [rows, cols], odd| {
            let scale = gpu.upload(&[0.03f32], [1]);
            let mut exact = gpu.poisoned::<Fp8E4M3>(place(rows, cols, odd));
            let mut q = gpu.poisoned::<i8>(place(rows, cols, odd));
            per_tensor_quant_static(gpu.stream(), x.view(), scale.view(), q.view_mut()).unwrap();
            downcast_to_static_fp8(gpu.stream(), x.view(), scale.view(), exact.view_mut()).unwrap();
            let mut fnuz = gpu.poisoned::<Fp8E4M3Fnuz>(place(rows, cols, odd));
            let mut back = gpu.poisoned::<Fp8E4M3>(place(rows, cols, odd));
            let mut scale_out = gpu.poisoned::<f32>([1]);
            let (s, t) = (scale.view(), scale_out.view_mut());
            fp8_ocp_to_fnuz(gpu.stream(), exact.view(), s, fnuz.view_mut(), t).unwrap();
            let t = scale_out.view_mut();
            fp8_fnuz_to_ocp(gpu.stream(), fnuz.view(), s, back.view_mut(), t).unwrap();
            for q in [&exact, &back] {
                gpu.assert_guards(q);
            }
            gpu.assert_guards(&fnuz);
            let (q, exact) = (gpu.download(&q), gpu.download(&exact));
            let (fnuz, back) = (gpu.download(&fnuz), gpu.download(&back));
            by_rows(rows, &[bytes(&q.data), bytes(&exact.data), bytes(&fnuz.data), bytes(&back.data)])
        });
    }
}

#[test]
fn rows_of_smoothquant_are_independent() {
    for cols in COLS {
        let factors: Vec<f32> = (0..2 * cols).map(|i| [0.5, -2.0, 1.25, 3.0][i % 4]).collect();
        check(cols, |gpu, x, [rows, cols], odd| {
            let smooth = gpu.upload(&factors[cols..], [cols]);
            let (mut q, mut scale) =
                (gpu.poisoned::<i8>(place(rows, cols, odd)), gpu.poisoned::<f32>([rows]));
            smoothquant(gpu.stream(), x.view(), smooth.view(), q.view_mut(), scale.view_mut()).unwrap();
            let (smooth, ids) = (gpu.upload(&factors, [2, cols]), gpu.upload(&vec![1i32; rows], [rows, 1]));
            let mut expert_q = gpu.poisoned::<i8>(place(rows, cols, odd));
            let mut expert_scale = gpu.poisoned::<f32>([rows]);
            let order = MoeOrder::TokenMajor;
            let (out, s) = (expert_q.view_mut(), expert_scale.view_mut());
            moe_smoothquant(gpu.stream(), x.view(), smooth.view(), ids.view(), out, s, order).unwrap();
            let (q, expert_q) = (gpu.download(&q), gpu.download(&expert_q));
            let (scale, expert_scale) = (gpu.download(&scale), gpu.download(&expert_scale));
            kit::assert_bits(&expert_q, &q.data);
            by_rows(rows, &[bytes(&q.data), bytes(&scale.data), bytes(&expert_scale.data)])
        });
    }
}

#[test]
fn rows_of_groups_and_blocks_are_independent() {
    for cols in COLS {
        check(cols, |gpu, x, [rows, cols], odd| {
            let groups = [rows, cols.div_ceil(64)];
            let (mut q, mut scale) =
                (gpu.poisoned::<Fp8E4M3>(place(rows, cols, odd)), gpu.poisoned::<f32>(groups));
            let options = GroupOptions { group: GroupSize::G64, pow2_scale: false };
            group_quant(gpu.stream(), x.view(), q.view_mut(), scale.view_mut(), options).unwrap();
            let blocks = [rows, cols.div_ceil(32)];
            let mut pairs = gpu.poisoned::<Fp4x2>(place(rows, cols / 2, odd));
            let mut exponents = gpu.poisoned::<E8M0>(blocks);
            let options = MxOptions { mode: BlockScale::Even, scale_layout: ScaleLayout::RowMajor };
            let (p, e) = (pairs.view_mut(), exponents.view_mut());
            hk_quant::dynamic_mxfp4_quant(gpu.stream(), x.view(), p, e, options).unwrap();
            gpu.assert_guards(&pairs);
            let (q, scale) = (gpu.download(&q), gpu.download(&scale));
            let (pairs, exponents) = (gpu.download(&pairs), gpu.download(&exponents));
            by_rows(rows, &[bytes(&q.data), bytes(&scale.data), bytes(&pairs.data), bytes(&exponents.data)])
        });
    }
}

/// Along the last axis, and along one in the middle: `inner` columns behind each of its places.
#[test]
fn rows_of_mx_tensors_are_independent() {
    for (cols, inner) in [(96, 1), (102, 1), (2880, 1), (64 * 48, 48), (66 * 16, 16)] {
        check(cols, |gpu, x, [rows, cols], odd| {
            let length = cols / inner;
            // Of one inner column the axis is the last.
            let rank = if inner == 1 { 2 } else { 3 };
            let place = |length: usize| {
                let row_stride = place(rows, length * inner, odd).layout().strides()[0];
                let (shape, strides) = ([rows, length, inner], [row_stride, inner, 1]);
                let layout = Layout::with_strides(&shape[..rank], &strides[..rank]).unwrap();
                Place::new(layout).shifted(usize::from(odd))
            };
            let blocks = length.div_ceil(32);
            let x = if rank == 2 { x.view() } else { x.view().split_axis(1, inner).unwrap() };
            let mut all = Vec::new();
            macro_rules! run {
                ($element:ident, $length:expr) => {{
                    let mut q = gpu.poisoned::<$element>(place($length));
                    let mut scale = gpu.poisoned::<E8M0>(place(blocks));
                    let mode = BlockScale::RoundUp;
                    downcast_to_mxfp(gpu.stream(), x, q.view_mut(), scale.view_mut(), 1, mode).unwrap();
                    let mut out = gpu.poisoned::<bf16>(place(length));
                    upcast_from_mxfp(gpu.stream(), q.view(), scale.view(), out.view_mut(), 1).unwrap();
                    gpu.assert_guards(&q);
                    gpu.assert_guards(&scale);
                    gpu.assert_guards(&out);
                    all.push(bytes(&gpu.download(&q).data).to_vec());
                    all.push(bytes(&gpu.download(&scale).data).to_vec());
                    all.push(bytes(&gpu.download(&out).data).to_vec());
                }};
            }
            run!(Fp4x2, length / 2);
            run!(Fp8E4M3, length);
            run!(Fp8E5M2, length);
            by_rows(rows, &all.iter().map(Vec::as_slice).collect::<Vec<_>>())
        });
    }
}

#[test]
fn rows_of_fused_norms_are_independent() {
    for cols in COLS {
        check(cols, |gpu, x, [rows, cols], odd| {
            let weight = gpu.upload(&vec![1.5f32; cols], [cols]);
            let mut out = gpu.poisoned::<bf16>(place(rows, cols, odd));
            let (mut q, mut scale) =
                (gpu.poisoned::<i8>(place(rows, cols, odd)), gpu.poisoned::<f32>([rows]));
            let norm = NormRows {
                x: x.view(),
                weight: weight.view(),
                eps: 1e-6,
                residual: None,
                out: Some(out.view_mut()),
            };
            let mode = Fp8Scale::PerToken { scale: scale.view_mut(), smooth: None };
            fused_rmsnorm_fp8_quant(gpu.stream(), norm, None, q.view_mut(), mode, false).unwrap();
            let mut pairs = gpu.poisoned::<Fp4x2>(place(rows, cols / 2, odd));
            let mut exponents = gpu.poisoned::<E8M0>([rows, cols.div_ceil(32)]);
            let norm = NormRows { x: x.view(), weight: weight.view(), eps: 1e-6, residual: None, out: None };
            let (layout, mode) = (ScaleLayout::RowMajor, BlockScale::Even);
            let (p, e) = (pairs.view_mut(), exponents.view_mut());
            fused_rmsnorm_mxfp4_quant(gpu.stream(), norm, None, p, e, layout, mode, false).unwrap();
            let (out, q, scale) = (gpu.download(&out), gpu.download(&q), gpu.download(&scale));
            let (pairs, exponents) = (gpu.download(&pairs), gpu.download(&exponents));
            let all = [
                bytes(&out.data),
                bytes(&q.data),
                bytes(&scale.data),
                bytes(&pairs.data),
                bytes(&exponents.data),
            ];
            by_rows(rows, &all)
        });
    }
}

/// The first tensor of each call is of another device than the stream.
#[test]
fn tensors_of_another_device_are_refused() {
    let (here, there) = (Device::open("emu:gfx942").unwrap(), Device::open("emu:gfx950").unwrap());
    let (here, there) = (here.create_stream().unwrap(), there.create_stream().unwrap());
    for operator in OPERATORS {
        let call = operator.example(&operator.corners[0], 1).unwrap();
        let mut call = hk_core::registry::DeviceCall::prepare(&here, &call).unwrap();
        assert_error(
            (operator.run)(&there, &mut call),
            kind!(DeviceMismatch),
            &[operator.name, "emu:gfx942", "emu:gfx950"],
        );
    }
}

/// Every pair of arguments that can have the same type, one of which is written, in memory that they share.
#[test]
fn shared_memory_is_refused() {
    let gpu = &kit::devices()[0];
    let stream = gpu.stream();
    let mut floats = gpu.upload(&[1.0f32; 256], [4, 64]);
    let ones = gpu.upload(&[1.0f32; 64], [64]);
    let x = gpu.upload(&[bf16::ONE; 256], [4, 64]);
    let mut q = gpu.poisoned::<Fp8E4M3>([4, 64]);
    /// A matrix of f32 and four of its elements.
    macro_rules! shared {
        () => {{
            let whole = floats.view_mut();
            let matrix = whole.alias();
            let four = whole.slice(0, 0..1).unwrap().slice(1, 0..4).unwrap().split_axis(1, 4).unwrap();
            (matrix, four)
        }};
    }
    macro_rules! four {
        ($four:expr) => {
            $four.flatten("test", "four").unwrap()
        };
    }
    let (matrix, four) = shared!();
    let result = per_token_quant(stream, matrix, q.view_mut(), four!(four), None);
    assert_error(result, kind!(Overlap), &["x and scale"]);
    let (matrix, four) = shared!();
    let result = smoothquant(stream, matrix, ones.view(), q.view_mut(), four!(four));
    assert_error(result, kind!(Overlap), &["x and scale"]);
    let (matrix, four) = shared!();
    let row = matrix.slice(0, 0..1).unwrap().flatten("test", "row").unwrap();
    let result = smoothquant(stream, x.view(), row, q.view_mut(), four!(four));
    assert_error(result, kind!(Overlap), &["smooth and scale"]);
    let ids = gpu.upload(&[0i32; 4], [4, 1]);
    let (matrix, four) = shared!();
    let (experts, order) = (matrix, MoeOrder::TokenMajor);
    let result = moe_smoothquant(stream, x.view(), experts, ids.view(), q.view_mut(), four!(four), order);
    assert_error(result, kind!(Overlap), &["smooth and scale"]);
    let (matrix, four) = shared!();
    let all_ones = gpu.upload(&[1.0f32; 64], [1, 64]);
    let result =
        moe_smoothquant(stream, matrix, all_ones.view(), ids.view(), q.view_mut(), four!(four), order);
    assert_error(result, kind!(Overlap), &["x and scale"]);
    let (matrix, four) = shared!();
    let options = GroupOptions { group: GroupSize::G64, pow2_scale: false };
    let column = four!(four).split_axis(0, 1).unwrap();
    let result = group_quant(stream, matrix, q.view_mut(), column, options);
    assert_error(result, kind!(Overlap), &["x and scale"]);
    gpu.assert_untouched(&floats);

    // Scales of fp8 may be converted in place, but not next to it.
    let codes = gpu.upload(&[Fp8E4M3(0); 8], [2, 4]);
    let mut out = gpu.poisoned::<Fp8E4M3Fnuz>([2, 4]);
    let mut some = gpu.upload(&[1.0f32; 4], [4]);
    let whole = some.view_mut();
    let (first, last) = (whole.alias().slice(0, 0..3).unwrap(), whole.slice(0, 1..4).unwrap());
    let result = fp8_ocp_to_fnuz(stream, codes.view(), first, out.view_mut(), last);
    assert_error(result, kind!(Overlap), &["scale and scale_out"]);

    let len = shuffled_len(2, 8).unwrap();
    let mut exponents = gpu.upload(&vec![E8M0(1); len + 16], [len + 16]);
    let whole = exponents.view_mut();
    let plain = whole.alias().slice(0, len - 1..len + 15).unwrap().split_axis(0, 8).unwrap();
    let result = shuffle_scales(stream, plain, whole.slice(0, 0..len).unwrap());
    assert_error(result, kind!(Overlap), &["plain and shuffled"]);
    let whole = exponents.view_mut();
    let shuffled = whole.alias().slice(0, 0..len).unwrap();
    let plain = whole.slice(0, len - 1..len + 15).unwrap().split_axis(0, 8).unwrap();
    assert_error(unshuffle_scales(stream, shuffled, plain), kind!(Overlap), &["shuffled and plain"]);
    gpu.assert_untouched(&exponents);

    // The norm: residual_out on x, out on residual_in, on each other; scale on x.
    let (mut a, mut b) = (gpu.upload(&[bf16::ONE; 256], [4, 64]), gpu.upload(&[bf16::ONE; 256], [4, 64]));
    let weight = gpu.upload(&[bf16::ONE; 64], [64]);
    let mut three_q = gpu.poisoned::<Fp8E4M3>([3, 64]);
    let mut three = gpu.poisoned::<f32>([3]);
    macro_rules! norm {
        ($norm:expr) => {{
            let mode = Fp8Scale::PerToken { scale: three.view_mut(), smooth: None };
            fused_rmsnorm_fp8_quant::<bf16, bf16, _>(stream, $norm, None, three_q.view_mut(), mode, false)
        }};
    }
    let w = weight.view();
    let over = a.view_mut();
    let (rows, shifted) = (over.alias().slice(0, 0..3).unwrap(), over.slice(0, 1..4).unwrap());
    let residual = Some((x.view().slice(0, 0..3).unwrap(), shifted));
    let rows = NormRows { x: rows, weight: w, eps: 1e-6, residual, out: None };
    assert_error(norm!(rows), kind!(Overlap), &["x and residual_out"]);
    let over = a.view_mut();
    let (residual_in, shifted) = (over.alias().slice(0, 0..3).unwrap(), over.slice(0, 1..4).unwrap());
    let (rows, sums) = (x.view().slice(0, 0..3).unwrap(), b.view_mut().slice(0, 0..3).unwrap());
    let rows =
        NormRows { x: rows, weight: w, eps: 1e-6, residual: Some((residual_in, sums)), out: Some(shifted) };
    assert_error(norm!(rows), kind!(Overlap), &["residual_in and out"]);
    let (matrix, four) = shared!();
    let rows = NormRows { x: matrix, weight: ones.view(), eps: 1e-6, residual: None, out: None };
    let mode = Fp8Scale::PerToken { scale: four!(four), smooth: None };
    let result = fused_rmsnorm_fp8_quant::<f32, f32, Fp8E4M3>(stream, rows, None, q.view_mut(), mode, false);
    assert_error(result, kind!(Overlap), &["x and scale"]);
    for tensor in [&a, &b] {
        gpu.assert_untouched(tensor);
    }
    gpu.assert_untouched(&q);
}

/// Lengths that do not fit the kernels' parameters, of views that repeat one element.
#[test]
fn what_is_too_large_is_refused() {
    let gpu = &kit::devices()[0];
    let stream = gpu.stream();
    let (one, scale) = (gpu.upload(&[bf16::ONE], [1]), gpu.upload(&[E8M0(1)], [1, 1]));
    let (mut q, mut exponents) = (gpu.poisoned::<Fp8E4M3>([4]), gpu.poisoned::<E8M0>([4]));
    let long = one.view().broadcast([1 << 31]).unwrap();
    let result = downcast_to_mxfp(stream, long, q.view_mut(), exponents.view_mut(), 0, BlockScale::RoundUp);
    assert_error(result, kind!(TooLarge), &["downcast_to_mxfp: x", "2147483648", "2147483647"]);
    for shape in [[1 << 32, 1], [1, 1 << 32]] {
        let result = shuffle_scales(stream, scale.view().broadcast(shape).unwrap(), exponents.view_mut());
        assert_error(result, kind!(TooLarge), &["shuffle_scales: plain"]);
    }
    gpu.assert_untouched(&q);
    gpu.assert_untouched(&exponents);
}

/// Rows that do not fit a kernel's window, of tensors that have none; the norms' are in `fused_rmsnorm.rs`.
#[test]
fn rows_that_are_too_long_are_refused() {
    const SHAPE: [usize; 2] = [0, 1 << 29];
    let gpu = &kit::devices()[0];
    let stream = gpu.stream();
    let (x, mut q) = (gpu.upload::<bf16>(&[], SHAPE), gpu.poisoned::<Fp8E4M3>(SHAPE));
    let (smooth, ids) = (gpu.upload(&[1.0f32], [1, 1]), gpu.upload::<i32>(&[], [0, 1]));
    let (one, mut scale) = (gpu.upload(&[1.0f32], [1]), gpu.poisoned::<f32>([1]));
    let (mut pairs, mut exponents) = (gpu.poisoned::<Fp4x2>([0, 1]), gpu.poisoned::<E8M0>([0, 1]));
    let (ocp, fnuz) = (gpu.upload::<Fp8E4M3>(&[], SHAPE), gpu.upload::<Fp8E4M3Fnuz>(&[], SHAPE));
    let mut out = gpu.poisoned::<Fp8E4M3Fnuz>(SHAPE);
    let (xv, order) = (x.view(), MoeOrder::TokenMajor);
    let group = GroupOptions { group: GroupSize::G128, pow2_scale: false };
    let mx = MxOptions { mode: BlockScale::Even, scale_layout: ScaleLayout::RowMajor };

    let s = one.view();
    let result = smoothquant(stream, xv, s, q.view_mut(), scale.view_mut());
    assert_error(result, kind!(TooLarge), &["smoothquant: x: 536870912 columns", "536870911"]);
    let result = per_token_quant(stream, xv, q.view_mut(), scale.view_mut(), None);
    assert_error(result, kind!(TooLarge), &["per_token_quant: x: 536870912 columns", "536870911"]);
    let result =
        moe_smoothquant(stream, xv, smooth.view(), ids.view(), q.view_mut(), scale.view_mut(), order);
    assert_error(result, kind!(TooLarge), &["moe_smoothquant: x: 536870912 columns", "536870911"]);
    let mut groups = gpu.poisoned::<f32>([0, 1]);
    let result = group_quant(stream, xv, q.view_mut(), groups.view_mut(), group);
    assert_error(result, kind!(TooLarge), &["group_quant: x: 536870912 columns", "536870911"]);
    let result = dynamic_mxfp4_quant(stream, xv, pairs.view_mut(), exponents.view_mut(), mx);
    assert_error(result, kind!(TooLarge), &["dynamic_mxfp4_quant: x: 536870912 columns", "536870911"]);
    let result = per_tensor_quant_static(stream, xv, s, q.view_mut());
    assert_error(result, kind!(TooLarge), &["per_tensor_quant_static: x: 536870912 columns", "536870911"]);
    let result = downcast_to_static_fp8(stream, xv, s, q.view_mut());
    assert_error(result, kind!(TooLarge), &["downcast_to_static_fp8: x: 536870912 columns", "536870911"]);
    let result = per_tensor_quant_dynamic(stream, xv, q.view_mut(), scale.view_mut());
    assert_error(result, kind!(TooLarge), &["per_tensor_quant_dynamic: x: 536870912 columns", "536870911"]);
    let result = fp8_ocp_to_fnuz(stream, ocp.view(), s, out.view_mut(), scale.view_mut());
    assert_error(result, kind!(TooLarge), &["fp8_ocp_to_fnuz: q: 536870912 columns", "536870911"]);
    let result = fp8_fnuz_to_ocp(stream, fnuz.view(), s, q.view_mut(), scale.view_mut());
    assert_error(result, kind!(TooLarge), &["fp8_fnuz_to_ocp: q: 536870912 columns", "536870911"]);
    gpu.assert_untouched(&scale);
}

/// Inputs that lie in columns give what those in rows do: elements next to each other along the axis, or across it.
#[test]
fn upcast_takes_any_strides() {
    fn run<E: hk_core::quant::MxElement>(gpu: &Gpu, codes: &[E], length: usize, inner: usize) {
        let n = length / E::PER_ELEMENT;
        let scales: Vec<E8M0> =
            (0..length.div_ceil(32) * inner).map(|i| E8M0(100 + (i % 60) as u8)).collect();
        let blocks = scales.len() / inner;
        let turned =
            |rows: usize| Place::new(Layout::with_strides([rows, inner], [1, rows + 3]).unwrap()).shifted(1);
        let out = |q: &Tensor<E>, scale: &Tensor<E8M0>, place: Place| {
            let mut out = gpu.poisoned::<bf16>(place);
            upcast_from_mxfp(gpu.stream(), q.view(), scale.view(), out.view_mut(), 0).unwrap();
            gpu.assert_guards(&out);
            gpu.download(&out)
        };
        let (q, scale) = (gpu.upload(&codes[..n * inner], [n, inner]), gpu.upload(&scales, [blocks, inner]));
        let rows = out(&q, &scale, Place::contiguous([length, inner]));
        let (q, scale) = (gpu.upload(&codes[..n * inner], turned(n)), gpu.upload(&scales, turned(blocks)));
        kit::assert_bits(&out(&q, &scale, Place::contiguous([length, inner])), &rows.data);
        kit::assert_bits(&out(&q, &scale, turned(length)), &rows.data);
        kit::assert_bits(&out(&q, &scale, Place::rows([length, inner], inner + 8)), &rows.data);
    }
    for gpu in kit::devices() {
        for (length, inner) in [(64, 48), (96, 16), (70, 9)] {
            let codes = |i: usize| (i * 37 % 251) as u8;
            run::<Fp4x2>(&gpu, &(0..4000).map(|i| Fp4x2(codes(i))).collect::<Vec<_>>(), length, inner);
            run::<Fp8E4M3>(
                &gpu,
                &(0..4000).map(|i| Fp8E4M3(codes(i) & 0x77)).collect::<Vec<_>>(),
                length,
                inner,
            );
            run::<Fp8E5M2>(
                &gpu,
                &(0..4000).map(|i| Fp8E5M2(codes(i) & 0x7b)).collect::<Vec<_>>(),
                length,
                inner,
            );
        }
    }
}
