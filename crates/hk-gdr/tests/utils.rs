//! Conversions, differences and reductions of whole tensors.

use hk_core::registry::HostTensor;
use hk_core::{Float, bf16, f16};
use hk_gdr::{OPERATORS, abs_diff, float_to_bf16, max_reduce, reduce_workspace, squared_diff, sum_reduce};
use hk_testkit::{
    self as kit, Fill, Gpu, Place, assert_error, check_call, host_call, kind, special_values, widen,
};

const SIZES: [usize; 9] = [0, 1, 3, 63, 64, 65, 1023, 16_385, (1 << 20) + 3];

fn check<T: Float>(n: usize) {
    let host = |seed| HostTensor::new([n], &Fill::Normal.elements::<T>(n, seed)).unwrap();
    for name in ["abs_diff", "squared_diff"] {
        check_call(&host_call(OPERATORS, name, &[("x", host(1)), ("y", host(2))], &[], &[]).unwrap())
            .unwrap();
    }
    for name in ["sum_reduce", "max_reduce"] {
        check_call(&host_call(OPERATORS, name, &[("x", host(3))], &[], &[]).unwrap()).unwrap();
    }
}

#[test]
fn sizes_of_every_kind() {
    for n in SIZES {
        check::<bf16>(n);
        if n < 1 << 20 {
            check::<f16>(n);
            check::<f32>(n);
        }
        let x = Fill::Wide.elements::<f32>(n, 5);
        let halves: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        for (name, x) in [
            ("float_to_bf16", HostTensor::new([n], &x).unwrap()),
            ("bf16_to_float", HostTensor::new([n], &halves).unwrap()),
        ] {
            check_call(&host_call(OPERATORS, name, &[("x", x)], &[], &[]).unwrap()).unwrap();
        }
    }
}

/// Every result of tensors that begin anywhere is that of aligned ones.
#[test]
fn tensors_begin_anywhere() {
    let n = 5001;
    let x: Vec<bf16> = Fill::Normal.elements(n, 1);
    for gpu in kit::devices() {
        let run = |shift: usize| {
            let place = |n: usize| Place::contiguous([n]).shifted(shift);
            let (a, b) = (
                gpu.upload(&x, place(n)),
                gpu.upload(&x[..n].iter().rev().copied().collect::<Vec<_>>(), place(n)),
            );
            let (mut d, mut s) = (gpu.poisoned::<f32>(place(n)), gpu.poisoned::<f32>(place(n)));
            abs_diff(gpu.stream(), a.view(), b.view(), d.view_mut()).unwrap();
            squared_diff(gpu.stream(), a.view(), b.view(), s.view_mut()).unwrap();
            gpu.assert_guards(&d);
            gpu.assert_guards(&s);
            let sum = reduced(&gpu, &a, false);
            (gpu.download(&d).data, gpu.download(&s).data, sum.to_bits(), reduced(&gpu, &a, true))
        };
        let aligned = run(0);
        assert!(run(1) == aligned && run(3) == aligned);
    }
}

fn reduced<T: Float>(gpu: &Gpu, x: &kit::Tensor<T>, max: bool) -> f32 {
    let n = x.view().numel();
    let (mut y, mut w) = (gpu.poisoned::<f32>([1]), gpu.poisoned::<f32>([reduce_workspace(n)]));
    if max {
        max_reduce(gpu.stream(), x.view(), y.view_mut(), w.view_mut()).unwrap();
    } else {
        sum_reduce(gpu.stream(), x.view(), y.view_mut(), w.view_mut()).unwrap();
    }
    gpu.download(&y).data[0]
}

#[test]
fn special_values_are_kept() {
    for gpu in kit::devices() {
        let x: Vec<f32> = special_values();
        let n = x.len();
        let input = gpu.upload(&x, [n]);
        let mut y = gpu.poisoned::<bf16>([n]);
        float_to_bf16(gpu.stream(), input.view(), y.view_mut()).unwrap();
        for (got, x) in gpu.download(&y).data.iter().zip(&x) {
            let want = bf16::from_f32(*x);
            assert!(
                got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                "{x}: {got}, not {want}"
            );
        }
        // NaN anywhere, infinities, nothing but negative ones.
        for place in [0, 7, 100, 19_999] {
            let mut x = vec![-1.0f32; 20_000];
            x[place] = f32::NAN;
            let input = gpu.upload(&x, [20_000]);
            assert!(reduced(&gpu, &input, true).is_nan() && reduced(&gpu, &input, false).is_nan(), "{place}");
            x[place] = f32::INFINITY;
            assert_eq!(reduced(&gpu, &gpu.upload(&x, [20_000]), true), f32::INFINITY);
            x[place] = -2.0;
            assert_eq!(reduced(&gpu, &gpu.upload(&x, [20_000]), true), -1.0);
        }
        let none = gpu.upload::<f32>(&[], [0]);
        assert!(reduced(&gpu, &none, false) == 0.0 && reduced(&gpu, &none, true) == f32::NEG_INFINITY);
    }
}

/// The same bits again, and near the sum.
#[test]
fn sums_are_deterministic() {
    let x: Vec<f32> = Fill::Wide.elements(100_003, 9);
    let (sum, size) = widen(&x).iter().fold((0.0, 0.0), |(s, m), x| (s + x, m + x.abs()));
    for gpu in kit::devices() {
        let input = gpu.upload(&x, [x.len()]);
        let first = reduced(&gpu, &input, false);
        assert!((f64::from(first) - sum).abs() <= 1e-6 * size);
        assert_eq!(reduced(&gpu, &input, false).to_bits(), first.to_bits());
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    for gpu in kit::devices() {
        let (x, short) = (gpu.upload(&[1.0f32; 40_000], [40_000]), gpu.upload(&[1.0f32; 9], [9]));
        let (mut y, mut w, mut two) =
            (gpu.poisoned::<f32>([1]), gpu.poisoned::<f32>([2]), gpu.poisoned::<f32>([2]));
        let refused = sum_reduce(gpu.stream(), x.view(), y.view_mut(), w.view_mut());
        assert_error(refused, kind!(Shape), &["sum_reduce: workspace: shape [2], expected [3] or longer"]);
        let refused = max_reduce(gpu.stream(), short.view(), two.view_mut(), w.view_mut());
        assert_error(refused, kind!(Shape), &["max_reduce: y: shape [2]"]);
        let refused = abs_diff(gpu.stream(), short.view(), x.view(), two.view_mut());
        assert_error(refused, kind!(Shape), &["abs_diff: diff: shape [2]"]);
        let mut nine = gpu.poisoned::<f32>([9]);
        let refused = squared_diff(gpu.stream(), short.view(), x.view(), nine.view_mut());
        assert_error(refused, kind!(Shape), &["squared_diff: y: shape [40000]"]);
        gpu.assert_untouched(&y);
        gpu.assert_untouched(&nine);
    }
}
