//! `l2norm` and its gradient, `chunk_local_cumsum`, `fused_qkvzba_split`, the index helpers.

use hk_core::registry::{HostTensor, Scalar};
use hk_core::{Float, Layout, bf16, f16};
use hk_gdr::{
    CumsumOptions, HeadSizes, OPERATORS, SplitOutputs, chunk_local_cumsum, fused_qkvzba_split, l2norm,
    l2norm_bwd, reference,
};
use hk_testkit::{
    self as kit, Fill, Place, RowCase, Tolerance, assert_close, assert_error, check_call, host_call, kind,
    proptest::prelude::*, widen,
};

#[track_caller]
fn check_norm<T: Float>(case: &RowCase<T>, eps: f32) {
    let (want, roots) = reference::l2norm(&widen(&case.x), case.cols, eps.into());
    let dy = case.matrix(1);
    for gpu in kit::devices() {
        let x = gpu.upload(&case.x, case.place(0));
        let (mut y, mut rstd) = (gpu.poisoned::<T>(case.place(1)), gpu.poisoned::<f32>([case.rows]));
        l2norm(gpu.stream(), x.view(), y.view_mut(), Some(rstd.view_mut()), eps).unwrap();
        let got = gpu.download(&y);
        assert_close(&got, &want, Tolerance::Reduction);
        let roots_got = gpu.download(&rstd);
        assert_close(&roots_got, &roots, Tolerance::Elementwise);
        gpu.assert_guards(&y);
        gpu.assert_untouched(&x);

        // The gradient from what came out.
        let (y, rstd) = (gpu.upload(&got.data, case.place(1)), gpu.upload(&roots_got.data, [case.rows]));
        let (grad, mut dx) = (gpu.upload(&dy, case.place(2)), gpu.poisoned::<T>(case.place(3)));
        l2norm_bwd(gpu.stream(), y.view(), rstd.view(), grad.view(), dx.view_mut()).unwrap();
        let (want, size) =
            reference::l2norm_bwd(&widen(&got.data), &widen(&roots_got.data), &widen(&dy), case.cols);
        let step = if T::DTYPE == hk_core::DType::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
        let subnormal = if T::DTYPE == hk_core::DType::F16 { 6e-8 } else { 1e-37 };
        for ((got, want), size) in widen(&gpu.download(&dx).data).iter().zip(&want).zip(&size) {
            let bound = step * want.abs() + 2e-6 * size + subnormal;
            assert!((got - want).abs() <= bound, "{got}, not {want}, of {case:?}");
        }
        gpu.assert_guards(&dx);
    }
}

fn no_tiny(fill: Fill) -> bool {
    // Results of subnormals divide by the root of eps: nothing to be learnt from them.
    fill != Fill::Tiny
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn norms_match_f64(
        b in kit::row_case::<bf16>(1..=40, 1..=9000), h in kit::row_case::<f16>(1..=40, 1..=600),
        s in kit::row_case::<f32>(1..=40, 1..=600), eps in prop_oneof![Just(1e-6f32), Just(0.25)],
    ) {
        prop_assume!(no_tiny(b.fill) && no_tiny(h.fill) && no_tiny(s.fill));
        check_norm(&b, eps);
        check_norm(&h, eps);
        check_norm(&s, eps);
    }

    #[test]
    fn sums_match_f64(
        n in 1usize..=3, t in prop_oneof![1usize..=20, 60usize..=70, Just(129), Just(200)], heads in 1usize..=40,
        inner in prop_oneof![Just(0usize), Just(1), 1usize..=20], chunk in 0u32..=7, reverse: bool, heads_first: bool, packed: bool,
        scale in prop_oneof![Just(1.0), Just(-0.37)], seed in any::<u64>().no_shrink(),
    ) {
        let pair = if heads_first { [heads, t] } else { [t, heads] };
        let mut shape = if packed { pair.to_vec() } else { [&[n], &pair[..]].concat() };
        if inner > 0 {
            shape.push(inner);
        }
        let values: Vec<f32> = Fill::Normal.elements(shape.iter().product(), seed);
        let mut tensors = vec![("x", HostTensor::new(shape, &values).unwrap())];
        if packed {
            // One without tokens among them.
            let starts: Vec<i32> = (0..=n).map(|i| (i * t / n) as i32).chain([t as i32]).collect();
            tensors.push(("cu_seqlens", HostTensor::new([n + 2], &starts).unwrap()));
        }
        let scalars = [
            ("chunk_size", Scalar::Int(1 << chunk)), ("reverse", Scalar::Bool(reverse)), ("scale", Scalar::Float(scale)),
            ("layout", Scalar::Choice(if heads_first { "heads" } else { "tokens" })),
        ];
        check_call(&host_call(OPERATORS, "chunk_local_cumsum", &tensors, &scalars, &[]).unwrap()).unwrap();
    }

    #[test]
    fn splits_copy_every_bit(
        type_ in 0usize..3, t in 0usize..=9, heads in prop_oneof![Just([1usize, 1]), Just([1, 4]), Just([2, 4]), Just([3, 6])],
        dims in prop_oneof![(1usize..=20, 1usize..=20), Just((16, 16)), Just((128, 64)), Just((60, 60))], seed in any::<u64>().no_shrink(),
    ) {
        let ([k_heads, v_heads], (k, v)) = (heads, dims);
        let tensor = |cols: usize, seed| match type_ {
            0 => HostTensor::new([t, cols], &Fill::Wide.elements::<bf16>(t * cols, seed)),
            1 => HostTensor::new([t, cols], &Fill::Wide.elements::<f16>(t * cols, seed)),
            _ => HostTensor::new([t, cols], &Fill::Wide.elements::<f32>(t * cols, seed)),
        };
        let tensors = [
            ("mixed_qkvz", tensor(2 * k_heads * k + 2 * v_heads * v, seed).unwrap()),
            ("mixed_ba", tensor(2 * v_heads, seed ^ 1).unwrap()),
        ];
        let count = |n: usize| Scalar::Int(n as i64);
        let scalars = [("k_heads", count(k_heads)), ("v_heads", count(v_heads)), ("k_dim", count(k)), ("v_dim", count(v))];
        check_call(&host_call(OPERATORS, "fused_qkvzba_split", &tensors, &scalars, &[]).unwrap()).unwrap();
    }

    #[test]
    fn indices_match_plain_loops(
        lens in prop::collection::vec(prop_oneof![Just(0i64), 1i64..=5, 60i64..=70, 100i64..=300], 0..=40), wide: bool, chunk in 0u32..=8,
        capacity in 0i64..=60,
    ) {
        let integers = |v: &[i64]| {
            if wide {
                HostTensor::new([v.len()], v).unwrap()
            } else {
                HostTensor::new([v.len()], &v.iter().map(|x| *x as i32).collect::<Vec<_>>()).unwrap()
            }
        };
        let starts = reference::prepare_cu_seqlens_from_lens(&lens);
        let tokens = starts[starts.len() - 1];
        for op in OPERATORS.iter().filter(|op| op.name.contains("prepare") || op.name.starts_with("get_max")) {
            let name = op.args[0].name;
            let input = if name == "lens" { integers(&lens) } else { integers(&starts) };
            let all = [("chunk_size", Scalar::Int(1 << chunk)), ("tokens", Scalar::Int(tokens)), ("capacity", Scalar::Int(capacity))];
            let scalars: Vec<_> = all.into_iter().filter(|(name, _)| op.scalars.iter().any(|s| s.name == *name)).collect();
            check_call(&host_call(OPERATORS, op.name, &[(name, input)], &scalars, &[]).unwrap()).unwrap();
        }
    }
}

/// Sequences without tokens do not shift the numbers of later ones.
#[test]
fn empty_sequences_are_counted() {
    assert_eq!(reference::sequence_ids(&[0, 1, 1, 4], 4), [0, 2, 2, 2]);
    assert_eq!(reference::chunk_indices(&[0, 1, 1, 4], 64, 9), [[0, 0], [2, 0]]);
    assert_eq!(reference::position_ids(&[0, 1, 1, 4], 4), [0, 0, 1, 2]);
    assert_eq!(reference::chunk_offsets(&[0, 15, 16, 80, 80], 16), [0, 1, 2, 6, 6]);
}

/// The gradient of the f64 mirror by central differences.
#[test]
fn the_gradient_is_that_of_the_norm() {
    let (cols, h) = (60, 1e-4);
    let x: Vec<f64> = widen(&Fill::Normal.elements::<f32>(cols, 3));
    let dy: Vec<f64> = widen(&Fill::Normal.elements::<f32>(cols, 4));
    let (y, rstd) = reference::l2norm(&x, cols, 1e-6);
    let (dx, _) = reference::l2norm_bwd(&y, &rstd, &dy, cols);
    let loss =
        |x: &[f64]| reference::l2norm(x, cols, 1e-6).0.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
    for i in 0..cols {
        let at = |step: f64| {
            let mut moved = x.clone();
            moved[i] += step;
            loss(&moved)
        };
        let want = (at(h) - at(-h)) / (2.0 * h);
        assert!((dx[i] - want).abs() <= 1e-5 * want.abs() + 1e-9, "{i}: {}, not {want}", dx[i]);
    }
}

/// A row of zeros, and rows of one element.
#[test]
fn rows_of_zeros_are_zeros() {
    for gpu in kit::devices() {
        for cols in [1, 100, 128, 9000] {
            let x = gpu.upload(&vec![0.0f32; cols], [1, cols]);
            let (mut y, mut rstd) = (gpu.poisoned::<f32>([1, cols]), gpu.poisoned::<f32>([1]));
            l2norm(gpu.stream(), x.view(), y.view_mut(), Some(rstd.view_mut()), 1e-6).unwrap();
            assert!(gpu.download(&y).data.iter().all(|v| *v == 0.0));
            let root = f64::from(gpu.download(&rstd).data[0]);
            assert!((root - 1000.0).abs() < 1e-3, "{root}");
        }
    }
}

/// Forward and reverse sums of a chunk meet.
#[test]
fn forward_and_reverse_sums_meet() {
    let (tokens, heads, chunk) = (129, 5, 32);
    let x: Vec<f32> = Fill::Grid.elements(tokens * heads, 9);
    for gpu in kit::devices() {
        let sums = |reverse: bool| {
            let input = gpu.upload(&x, [1, tokens, heads]);
            let mut y = gpu.poisoned::<f32>([1, tokens, heads]);
            let options = CumsumOptions { chunk_size: chunk, reverse, ..Default::default() };
            chunk_local_cumsum(gpu.stream(), input.view(), None, y.view_mut(), options).unwrap();
            gpu.download(&y).data
        };
        let (forward, reverse) = (sums(false), sums(true));
        for (i, ((f, r), x)) in forward.iter().zip(&reverse).zip(&x).enumerate() {
            let (t, h) = (i / heads, i % heads);
            let last = (t / chunk * chunk + chunk).min(tokens) - 1;
            // Multiples of an eighth: exact.
            assert_eq!(f + r - x, forward[last * heads + h], "token {t}");
        }
    }
}

/// Tokens out of range are NaN, those of no sequence stay.
#[test]
fn sums_of_sequences_out_of_range_are_nan() {
    let x = vec![1.0f32; 6];
    for gpu in kit::devices() {
        for (starts, want) in [
            ([0, 2, 9], [1.0, 2.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN]),
            ([-1, 2, 6], [f32::NAN, f32::NAN, 1.0, 2.0, 3.0, 4.0]),
            ([1, 3, 5], [-7.0, 1.0, 2.0, 1.0, 2.0, -7.0]),
        ] {
            let (input, cu) = (gpu.upload(&x, [6, 1]), gpu.upload(&starts, [3]));
            let mut y = gpu.upload(&[-7.0f32; 6], [6, 1]);
            let options = CumsumOptions::default();
            chunk_local_cumsum(gpu.stream(), input.view(), Some(cu.view()), y.view_mut(), options).unwrap();
            let got = gpu.download(&y).data;
            assert!(
                got.iter().zip(&want).all(|(a, b)| a == b || (a.is_nan() && b.is_nan())),
                "{starts:?}: {got:?}"
            );
        }
    }
}

/// Rows with gaps.
#[test]
fn splits_take_rows_of_any_stride() {
    let (t, k_heads, v_heads, k_dim, v_dim) = (3, 2, 4, 16, 8);
    let (wide, narrow) = (2 * k_heads * k_dim + 2 * v_heads * v_dim, 2 * v_heads);
    let qkvz: Vec<bf16> = Fill::Normal.elements(t * wide, 1);
    let ba: Vec<bf16> = Fill::Normal.elements(t * narrow, 2);
    for gpu in kit::devices() {
        let run = |gap: usize| {
            let rows = |n: usize| Place::new(Layout::with_strides([t, n], [n + gap, 1]).unwrap());
            let (x, y) = (gpu.upload(&qkvz, rows(wide)), gpu.upload(&ba, rows(narrow)));
            let mut qkv = gpu.poisoned::<bf16>([t, wide - v_heads * v_dim]);
            let mut z = gpu.poisoned::<bf16>([t, v_heads, v_dim]);
            let (mut b, mut a) = (gpu.poisoned::<bf16>([t, v_heads]), gpu.poisoned::<bf16>([t, v_heads]));
            let outputs =
                SplitOutputs { qkv: qkv.view_mut(), z: z.view_mut(), b: b.view_mut(), a: a.view_mut() };
            let sizes = HeadSizes { k_heads, v_heads, k_dim, v_dim };
            fused_qkvzba_split(gpu.stream(), x.view(), y.view(), outputs, sizes).unwrap();
            [&qkv, &z, &b, &a].map(|t| gpu.download(t).data)
        };
        let tight = run(0);
        assert!(run(8) == tight && run(3) == tight);
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let x = || ("x", HostTensor::new([1, 5, 2], &[0.0f32; 10]).unwrap());
    let sums = |scalars: &[(&str, Scalar)]| {
        check_call(&host_call(OPERATORS, "chunk_local_cumsum", &[x()], scalars, &[]).unwrap())
    };
    for chunk in [0, 3, 65, 1 << 17] {
        let refused = sums(&[("chunk_size", Scalar::Int(chunk))]);
        assert_error(refused, kind!(Argument), &["chunk_local_cumsum: chunk_size", "a power of two"]);
    }
    assert_error(sums(&[("scale", Scalar::Float(f64::INFINITY))]), kind!(Argument), &["scale: inf"]);
    let eps = |eps: f64| {
        check_call(&host_call(OPERATORS, "l2norm", &[x()], &[("eps", Scalar::Float(eps))], &[]).unwrap())
    };
    assert_error(eps(-1.0), kind!(Argument), &["l2norm: eps: -1"]);
    assert_error(eps(f64::NAN), kind!(Argument), &["l2norm: eps"]);

    let heads = |k_heads: i64, v_heads: i64| {
        let tensors = [
            ("mixed_qkvz", HostTensor::new([2, 32], &[bf16::ONE; 64]).unwrap()),
            ("mixed_ba", HostTensor::new([2, 4], &[bf16::ONE; 8]).unwrap()),
        ];
        let scalars = [
            ("k_heads", Scalar::Int(k_heads)),
            ("v_heads", Scalar::Int(v_heads)),
            ("k_dim", Scalar::Int(4)),
            ("v_dim", Scalar::Int(4)),
        ];
        check_call(&host_call(OPERATORS, "fused_qkvzba_split", &tensors, &scalars, &[]).unwrap())
    };
    heads(2, 2).unwrap();
    assert_error(heads(2, 3), kind!(Argument), &["v_heads: 3, expected a multiple of 2"]);
    assert_error(heads(0, 2), kind!(Argument), &["k_heads: 0"]);
    assert_error(heads(1, 2), kind!(Shape), &["mixed_qkvz: shape [2, 32], expected [2, 24]"]);

    let starts = [("cu_seqlens", HostTensor::new([2], &[0i32, 5]).unwrap())];
    for op in ["prepare_chunk_offsets", "gpu_prepare_chunk_indices", "get_max_num_splits"] {
        let call = host_call(OPERATORS, op, &starts, &[("chunk_size", Scalar::Int(48))], &[]).unwrap();
        assert_error(check_call(&call), kind!(Argument), &[op, "chunk_size: 48"]);
    }
    let none = [("cu_seqlens", HostTensor::new([1], &[0i32]).unwrap())];
    let call =
        host_call(OPERATORS, "prepare_position_ids", &none, &[("tokens", Scalar::Int(3))], &[]).unwrap();
    assert_error(check_call(&call), kind!(Shape), &["at least one sequence for the tokens"]);
}
