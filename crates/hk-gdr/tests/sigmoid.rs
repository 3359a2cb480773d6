//! Gates that are computed: alone, and on the way of the recurrence.

use hk_core::registry::{HostTensor, Scalar};
use hk_core::{Float, bf16, f16};
use hk_gdr::{GateBias, GatingInputs, OPERATORS, Softplus, fused_gdn_gating_prefill};
use hk_testkit::{self as kit, Fill, assert_error, check_call, host_call, kind, proptest::prelude::*};

/// A tensor of normal values times a scale.
fn normal<T: Float>(shape: &[usize], seed: u64, scale: f32) -> HostTensor {
    let n = shape.iter().product();
    let values: Vec<T> =
        Fill::Normal.elements::<f32>(n, seed).iter().map(|x| T::from_f32(x * scale)).collect();
    HostTensor::new(shape, &values).unwrap()
}

fn of(type_: usize, shape: &[usize], seed: u64, scale: f32) -> HostTensor {
    match type_ {
        0 => normal::<bf16>(shape, seed, scale),
        1 => normal::<f16>(shape, seed, scale),
        _ => normal::<f32>(shape, seed, scale),
    }
}

proptest! {
    #![proptest_config(kit::config())]

    /// Against the f64 reference, side by side or apart.
    #[test]
    fn recurrences_match_f64(
        type_ in 0usize..3, f32_bias: bool, channels: bool, together: bool, packed: bool, vk: bool, l2norm: bool, pooled: bool,
        n in 1usize..=3, t in 1usize..=4, heads in prop_oneof![Just([1usize, 1]), Just([1, 2]), Just([2, 4])],
        dims in prop_oneof![(1usize..=20, 1usize..=20), Just((64, 40)), Just((128, 16)), Just((16, 136))],
        seed in any::<u64>().no_shrink(),
    ) {
        let (k, v) = dims;
        let [hk, hv] = heads;
        let rows: Vec<usize> = if packed { vec![n * t] } else { vec![n, t] };
        let shape = |rest: &[usize]| [&rows, rest].concat();
        let gate = if channels { vec![hv, k] } else { vec![hv] };
        let bias = if f32_bias { 2 } else { type_ };
        let state = if vk { [n, hv, v, k] } else { [n, hv, k, v] };
        let scale = if l2norm { 1.0 } else { 1.0 / (k as f32).sqrt() };
        let mut tensors = vec![
            ("A_log", of(2, &[hv], seed ^ 1, 0.7)),
            ("a", of(type_, &shape(&gate), seed ^ 2, 3.0)),
            ("dt_bias", of(bias, &gate, seed ^ 3, 1.0)),
            ("b", of(type_, &shape(&[hv]), seed ^ 4, 2.0)),
        ];
        if together {
            tensors.push(("qkv", of(type_, &shape(&[2 * hk * k + hv * v]), seed ^ 5, scale)));
        } else {
            tensors.push(("q", of(type_, &shape(&[hk, k]), seed ^ 5, scale)));
            tensors.push(("k", of(type_, &shape(&[hk, k]), seed ^ 6, scale)));
            tensors.push(("v", of(type_, &shape(&[hv, v]), seed ^ 7, 1.0)));
        }
        if packed {
            let starts: Vec<i32> = (0..=n).map(|i| (i * t) as i32).collect();
            tensors.push(("cu_seqlens", HostTensor::new([n + 1], &starts).unwrap()));
        }
        if pooled {
            let slots: Vec<i32> = (0..n).map(|i| if i == 1 { -1 } else { (n - 1 - i) as i32 }).collect();
            tensors.push(("state_pool", of(2, &state, seed ^ 8, 1.0)));
            tensors.push(("state_indices", HostTensor::new([n], &slots).unwrap()));
        } else {
            tensors.push(("initial_state", of(2, &state, seed ^ 8, 1.0)));
        }
        let mut scalars = vec![("qk_l2norm", Scalar::Bool(l2norm)), ("layout", Scalar::Choice(if vk { "vk" } else { "kv" }))];
        let name = if together {
            scalars.extend([("k_heads", Scalar::Int(hk as i64)), ("k_dim", Scalar::Int(k as i64)), ("v_dim", Scalar::Int(v as i64))]);
            "fused_rearrange_sigmoid_gdr"
        } else {
            "fused_sigmoid_gating_recurrent"
        };
        let wanted: &[&str] = if pooled { &[] } else { &["final_state"] };
        let call = host_call(OPERATORS, name, &tensors, &scalars, wanted).unwrap();
        check_call(&call).unwrap();
    }

    #[test]
    fn gates_match_f64(type_ in 0usize..3, f32_bias: bool, rows in kit::size(0..=700, &[]), heads in 1usize..=40,
        beta in prop_oneof![Just(1.0), Just(0.3)], seed in any::<u64>().no_shrink()) {
        let tensors = [
            ("A_log", of(2, &[heads], seed ^ 1, 1.0)),
            ("a", of(type_, &[rows, heads], seed ^ 2, 12.0)),
            ("b", of(type_, &[rows, heads], seed ^ 3, 8.0)),
            ("dt_bias", of(if f32_bias { 2 } else { type_ }, &[heads], seed ^ 4, 2.0)),
        ];
        let scalars = [("softplus_beta", Scalar::Float(beta))];
        check_call(&host_call(OPERATORS, "fused_gdn_gating_prefill", &tensors, &scalars, &[]).unwrap()).unwrap();
    }
}

/// Calls with `a` alone, other inputs at zero.
#[track_caller]
fn log_decays<T: Float, D: GateBias<T>>(a: &[T], softplus: Softplus) -> Vec<Vec<f32>> {
    let each = kit::devices().into_iter().map(|gpu| {
        let n = a.len();
        let (a, b) = (gpu.upload(a, [n, 1]), gpu.upload(&vec![T::from_f32(0.0); n], [n, 1]));
        let (a_log, dt_bias) = (gpu.upload(&[0.0f32], [1]), gpu.upload(&[D::from_f32(0.0)], [1]));
        let (mut g, mut beta) = (gpu.poisoned::<f32>([n, 1]), gpu.poisoned::<f32>([n, 1]));
        let inputs =
            GatingInputs { a_log: a_log.view(), a: a.view(), b: b.view(), dt_bias: dt_bias.view(), softplus };
        fused_gdn_gating_prefill(gpu.stream(), inputs, g.view_mut(), beta.view_mut()).unwrap();
        gpu.assert_guards(&g);
        assert!(gpu.download(&beta).data.iter().all(|x| *x == 0.5));
        gpu.download(&g).data
    });
    each.collect()
}

/// Far from zero, around the threshold, and special values.
#[test]
fn softplus_is_relatively_accurate() {
    let a = [-80.0f32, -50.0, -20.0, -16.7, -1.0, -1e-6, 0.0, 1e-6, 1.0, 19.9, 20.0, 20.1, 80.0, 3e38];
    for g in log_decays::<f32, f32>(&a, Softplus::default()) {
        for (x, g) in a.iter().zip(&g) {
            let want = -hk_gdr::reference::softplus(f64::from(*x), 1.0, 20.0);
            assert!((f64::from(*g) - want).abs() <= 4e-7 * want.abs(), "softplus({x}): {g}, not {want}");
        }
        // No step at the threshold.
        assert!((g[10] - g[11] - 0.1).abs() < 4e-6);
    }
    let special = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN];
    for g in log_decays::<f32, f32>(&special, Softplus::default()) {
        assert!(g[0] == 0.0 && g[1] == f32::NEG_INFINITY && g[2].is_nan(), "{g:?}");
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let gates = |softplus_beta: f64, threshold: f64, a: [usize; 2], b: [usize; 2], bias: usize| {
        let tensors = [
            ("A_log", of(2, &[4], 1, 1.0)),
            ("a", of(0, &a, 2, 1.0)),
            ("b", of(0, &b, 3, 1.0)),
            ("dt_bias", of(2, &[bias], 4, 1.0)),
        ];
        let scalars = [
            ("softplus_beta", Scalar::Float(softplus_beta)),
            ("softplus_threshold", Scalar::Float(threshold)),
        ];
        check_call(&host_call(OPERATORS, "fused_gdn_gating_prefill", &tensors, &scalars, &[]).unwrap())
    };
    gates(1.0, 20.0, [3, 4], [3, 4], 4).unwrap();
    for beta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_error(gates(beta, 20.0, [3, 4], [3, 4], 4), kind!(Argument), &["softplus_beta"]);
    }
    assert_error(gates(1.0, f64::NAN, [3, 4], [3, 4], 4), kind!(Argument), &["softplus_threshold"]);
    assert_error(gates(1.0, 20.0, [3, 4], [4, 4], 4), kind!(Shape), &["b: shape [4, 4], expected [3, 4]"]);
    assert_error(gates(1.0, 20.0, [3, 4], [3, 4], 5), kind!(Shape), &["dt_bias: shape [5], expected [4]"]);
    assert_error(gates(1.0, 20.0, [3, 5], [3, 5], 5), kind!(Shape), &["A_log: shape [4], expected [5]"]);

    let packed = |columns: usize, k_heads: i64| {
        let tensors = [
            ("A_log", of(2, &[2], 1, 1.0)),
            ("a", of(0, &[1, 3, 2], 2, 1.0)),
            ("b", of(0, &[1, 3, 2], 3, 1.0)),
            ("dt_bias", of(2, &[2], 4, 1.0)),
            ("qkv", of(0, &[1, 3, columns], 5, 0.3)),
        ];
        let scalars =
            [("k_heads", Scalar::Int(k_heads)), ("k_dim", Scalar::Int(8)), ("v_dim", Scalar::Int(8))];
        check_call(&host_call(OPERATORS, "fused_rearrange_sigmoid_gdr", &tensors, &scalars, &[]).unwrap())
    };
    packed(32, 1).unwrap();
    assert_error(packed(33, 1), kind!(Shape), &["qkv: shape [1, 3, 33], expected 32 columns"]);
    assert_error(packed(32, 0), kind!(Argument), &["k_heads: 0"]);
    assert_error(packed(64, 3), kind!(Shape), &["v: shape", "multiple of 3 heads"]);
}
