//! Every operator: batch invariance, independence of the layout, tensors of other devices, limits.

use crate::common::bytes;
use hk_core::quant::{BlockScale, GroupSize, ScaleLayout};
use hk_core::{Device, E8M0, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Layout, bf16};
use hk_quant::{
    Fp8Scale, GroupOptions, GroupScaleRule, MoeOrder, MxOptions, NormMxfp4Options, NormRounding, NormRows,
    OPERATORS, PerTokenOptions, downcast_to_mxfp, downcast_to_static_fp8, dynamic_mxfp4_quant,
    fp8_fnuz_to_ocp, fp8_ocp_to_fnuz, fused_rmsnorm_fp8_quant, fused_rmsnorm_mxfp4_quant, group_quant,
    moe_smoothquant, per_tensor_quant_dynamic, per_tensor_quant_static, per_token_quant, shuffle_scales,
    smoothquant, upcast_from_mxfp,
};
use hk_testkit::{self as kit, Fill, Gpu, Place, RowCase, Tensor, assert_error, kind};

/// A place for rows: aligned and contiguous, or neither.
fn place(rows: usize, cols: usize, odd: bool) -> Place {
    if odd { Place::rows([rows, cols], cols + 3).shifted(1) } else { Place::contiguous([rows, cols]) }
}

/// The bytes of outputs, row by row.
fn by_rows(rows: usize, outputs: &[&[u8]]) -> Vec<Vec<u8>> {
    let of_row = |row: usize| {
        let parts = outputs.iter().flat_map(|o| &o[row * (o.len() / rows)..(row + 1) * (o.len() / rows)]);
        parts.copied().collect()
    };
    (0..rows).map(of_row).collect()
}

/// Checks batch invariance: the bytes of a row are the same in a batch and in a batch of one, aligned and not.
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
            let options = GroupOptions { group: GroupSize::G64, scale_rule: GroupScaleRule::Exact };
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

/// Along the last axis, and along one in the middle with `inner` columns after it.
#[test]
fn rows_of_mx_tensors_are_independent() {
    for (cols, inner) in [(96, 1), (102, 1), (2880, 1), (64 * 48, 48), (66 * 16, 16)] {
        check(cols, |gpu, x, [rows, cols], odd| {
            let length = cols / inner;
            // With one inner column the axis is the last.
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
            fused_rmsnorm_fp8_quant(gpu.stream(), norm, None, q.view_mut(), mode, NormRounding::F32).unwrap();
            let mut pairs = gpu.poisoned::<Fp4x2>(place(rows, cols / 2, odd));
            let mut exponents = gpu.poisoned::<E8M0>([rows, cols.div_ceil(32)]);
            let norm = NormRows { x: x.view(), weight: weight.view(), eps: 1e-6, residual: None, out: None };
            let (p, e) = (pairs.view_mut(), exponents.view_mut());
            fused_rmsnorm_mxfp4_quant(gpu.stream(), norm, None, p, e, NormMxfp4Options::default()).unwrap();
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

/// The tensors of each call are on another device than the stream.
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

/// Lengths beyond the kernels' parameters, of broadcast views.
#[test]
fn too_large_lengths_are_refused() {
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

/// Rows beyond a buffer descriptor's range, in tensors without rows; the norms' are in `fused_rmsnorm.rs`.
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
    let group = GroupOptions { group: GroupSize::G128, scale_rule: GroupScaleRule::Exact };
    let mx = MxOptions { mode: BlockScale::Even, scale_layout: ScaleLayout::RowMajor };

    let s = one.view();
    let result = smoothquant(stream, xv, s, q.view_mut(), scale.view_mut());
    assert_error(result, kind!(TooLarge), &["smoothquant: x: 536870912 columns", "536870911"]);
    let result = per_token_quant(stream, xv, q.view_mut(), scale.view_mut(), PerTokenOptions::default());
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

/// Row-major and column-major inputs give the same result.
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
