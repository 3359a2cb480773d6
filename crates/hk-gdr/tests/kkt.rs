//! `chunk_scaled_dot_kkt` against f64, and with `solve_tril` against the recurrence's example.

use hk_core::registry::{HostTensor, Scalar};
use hk_core::{Float, Layout, bf16, f16};
use hk_gdr::{
    CumsumOptions, FusedKktInputs, FusedKktOptions, GateBase, KktInputs, OPERATORS, TokenLayout,
    chunk_local_cumsum, chunk_scaled_dot_kkt, fused_cumsum_kkt, solve_tril,
};
use hk_testkit::{self as kit, Fill, Place, Refusals, check_call, host_call, kind, proptest::prelude::*};

fn keys<T: Float>(shape: &[usize], seed: u64) -> HostTensor {
    let width = 1.0 / (shape[shape.len() - 1] as f32).sqrt();
    let values = Fill::Normal.elements::<f32>(shape.iter().product(), seed);
    let values: Vec<T> = values.iter().map(|x| T::from_f32(x * width)).collect();
    HostTensor::new(shape, &values).unwrap()
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn products_match_f64(
        type_ in 0usize..3, lengths in prop::collection::vec(prop_oneof![Just(0usize), 1usize..=5, 14usize..=70], 1..=4), packed: bool,
        heads in prop_oneof![Just([1usize, 1]), Just([1, 2]), Just([2, 4]), Just([3, 3])],
        dim in prop_oneof![1usize..=20, Just(64), Just(60), Just(100), Just(128), Just(256)], log2 in 4u32..=6, gates: bool, two: bool,
        strength in prop_oneof![Just(0.1f32), Just(1.0), Just(10.0)], seed in any::<u64>().no_shrink(),
    ) {
        let tokens: usize = if packed { lengths.iter().sum() } else { lengths[0] };
        let rows = if packed { vec![tokens] } else { vec![lengths.len(), tokens] };
        let shape = |rest: &[usize]| [&rows, rest].concat();
        let k = match type_ {
            0 => keys::<bf16>(&shape(&[heads[0], dim]), seed),
            1 => keys::<f16>(&shape(&[heads[0], dim]), seed),
            _ => keys::<f32>(&shape(&[heads[0], dim]), seed),
        };
        let n: usize = shape(&[heads[1]]).iter().product();
        let beta: Vec<f32> = Fill::Normal.elements::<f32>(n, seed ^ 1).iter().map(|x| 1.0 / (1.0 + x.exp())).collect();
        // Falling along the tokens, as sums of logarithms of decays are.
        let step: Vec<f32> = Fill::Normal.elements::<f32>(n, seed ^ 2).iter().map(|x| -0.1 * strength * x.abs()).collect();
        let mut g = step.clone();
        (heads[1]..n).for_each(|i| g[i] += g[i - heads[1]]);
        let mut tensors = vec![("k", k), ("beta", HostTensor::new(shape(&[heads[1]]), &beta).unwrap())];
        if gates {
            tensors.push(("g", HostTensor::new(shape(&[heads[1]]), &g).unwrap()));
        }
        if packed {
            let mut starts = vec![0i32];
            lengths.iter().for_each(|n| starts.push(starts[starts.len() - 1] + *n as i32));
            tensors.push(("cu_seqlens", HostTensor::new([starts.len()], &starts).unwrap()));
        }
        let scalars = [("chunk_size", Scalar::Int(1 << log2)), ("base", Scalar::Choice(if two { "2" } else { "e" }))];
        check_call(&host_call(OPERATORS, "chunk_scaled_dot_kkt", &tensors, &scalars, &[]).unwrap()).unwrap();
    }
}

/// Three tokens: A and its inverse are known numbers.
#[test]
fn three_tokens_give_the_known_numbers() {
    let k = [1.0f32, 0.0, 0.6, 0.8, 0.0, 1.0];
    let (g, beta) = ([-0.5f32, -0.75, -0.75], [0.5f32, 1.0, 0.5]);
    for gpu in kit::devices() {
        let keys = gpu.upload(&k, [1, 3, 1, 2]);
        let (gates, betas) = (gpu.upload(&g, [1, 3, 1]), gpu.upload(&beta, [1, 3, 1]));
        let mut a = gpu.poisoned::<f32>([1, 3, 1, 16]);
        let inputs = KktInputs {
            k: keys.view(),
            g: Some(gates.view()),
            beta: betas.view(),
            cu_seqlens: None,
            base: GateBase::Natural,
        };
        chunk_scaled_dot_kkt(gpu.stream(), inputs, a.view_mut()).unwrap();
        let mut x = gpu.poisoned::<f32>([1, 3, 1, 16]);
        solve_tril(gpu.stream(), a.view(), None, x.view_mut()).unwrap();
        let (a, x) = (gpu.download(&a).data, gpu.download(&x).data);
        let close = |got: f32, want: f32| assert!((got - want).abs() < 1e-6, "{got}, not {want}");
        for (got, want) in [(a[16], 0.467_280), (a[32], 0.0), (a[33], 0.4)] {
            close(got, want);
        }
        for (got, want) in [(x[16], -0.467_280), (x[32], 0.186_912), (x[33], -0.4), (x[34], 1.0)] {
            close(got, want);
        }
        for (i, row) in a.chunks(16).enumerate() {
            assert!(row[i..].iter().all(|v| *v == 0.0), "row {i}: {row:?}");
        }
    }
}

/// Keys with gaps between heads, and misaligned.
#[test]
fn keys_of_any_stride() {
    let (tokens, heads, dim) = (40, 2, 32);
    let k: Vec<bf16> = Fill::Normal.elements(tokens * heads * dim, 5);
    let beta: Vec<f32> = vec![0.5; tokens * heads];
    for gpu in kit::devices() {
        let run = |gap: usize, shift: usize| {
            let strides = [tokens * heads * (dim + gap), heads * (dim + gap), dim + gap, 1];
            let place =
                Place::new(Layout::with_strides([1, tokens, heads, dim], strides).unwrap()).shifted(shift);
            let (keys, betas) = (gpu.upload(&k, place), gpu.upload(&beta, [1, tokens, heads]));
            let mut a = gpu.poisoned::<f32>([1, tokens, heads, 32]);
            let inputs = KktInputs {
                k: keys.view(),
                g: None,
                beta: betas.view(),
                cu_seqlens: None,
                base: GateBase::Two,
            };
            chunk_scaled_dot_kkt(gpu.stream(), inputs, a.view_mut()).unwrap();
            gpu.assert_guards(&a);
            gpu.download(&a).data
        };
        let tight = run(0, 0);
        assert!(run(8, 0) == tight && run(3, 0) == tight && run(0, 1) == tight);
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    Refusals::new((), |stream, tensors, ()| {
        let inputs = KktInputs::<bf16> {
            k: tensors.input("k"),
            g: tensors.optional_input("g"),
            beta: tensors.input("beta"),
            cu_seqlens: None,
            base: GateBase::Natural,
        };
        chunk_scaled_dot_kkt(stream, inputs, tensors.output("a"))
    })
    .input::<bf16>("k", [1, 40, 2, 32])
    .input::<f32>("g", [1, 40, 4])
    .input::<f32>("beta", [1, 40, 4])
    .output::<f32>("a", [1, 40, 4, 32])
    .accepts(|_| {})
    .accepts(|call| call.without("g"))
    .refuses(kind!(Unsupported), &["chunk_scaled_dot_kkt: C = 48"], |call| call.shape("a", [1, 40, 4, 48]))
    .refuses(kind!(Unsupported), &["K = 257"], |call| call.shape("k", [1, 40, 2, 257]))
    .refuses(kind!(Shape), &["k: shape [40, 2, 32], expected 4 axes"], |call| call.shape("k", [40, 2, 32]))
    .refuses(kind!(Shape), &["beta: shape [1, 41, 4]"], |call| call.shape("beta", [1, 41, 4]))
    .refuses(kind!(Shape), &["beta: shape [1, 40, 3]", "multiple of 2"], |call| {
        call.shape("beta", [1, 40, 3])
    })
    .refuses(kind!(Shape), &["g: shape [1, 40, 2], expected [1, 40, 4]"], |call| call.shape("g", [1, 40, 2]))
    .refuses(kind!(Shape), &["a: shape [1, 39, 4, 32]"], |call| call.shape("a", [1, 39, 4, 32]))
    .refuses(kind!(Align), &["a"], |call| call.place("a", Place::contiguous([1, 40, 4, 32]).shifted(1)))
    .refuses(kind!(Stride), &["k"], |call| call.strides("k", [5120, 128, 64, 2]))
    .refuses(kind!(Overlap), &["g and a"], |call| call.overlap("g", "a", 0))
    .refuses_other_devices();
}

/// The sums and the products of one launch are those of two, whatever the base and layout of the sums; a gate that is no logarithm of a decay
/// poisons what follows of its chunk.
#[test]
fn fused_sums_and_products_are_those_of_two_launches() {
    let (tokens, heads, chunk) = (70, 3, 32);
    let k: Vec<f32> = Fill::Normal.elements(tokens * 16, 5);
    let g: Vec<f32> =
        Fill::Normal.elements::<f32>(tokens * heads, 6).iter().map(|x| -0.2 * x.abs()).collect();
    let beta: Vec<f32> = Fill::Normal.elements(tokens * heads, 7);
    for gpu in kit::devices() {
        let [k, beta] = [gpu.upload(&k, [1, tokens, 1, 16]), gpu.upload(&beta, [1, tokens, heads])];
        let stream = gpu.stream();
        let fused = |g: &[f32], base, layout| {
            let g = gpu.upload(g, [1, tokens, heads]);
            let inputs = FusedKktInputs { k: k.view(), g: g.view(), beta: beta.view(), cu_seqlens: None };
            let of_sums = if layout == TokenLayout::Tokens { [1, tokens, heads] } else { [1, heads, tokens] };
            let (mut sums, mut a) =
                (gpu.poisoned::<f32>(of_sums), gpu.poisoned::<f32>([1, tokens, heads, chunk]));
            let options = FusedKktOptions { base, layout };
            fused_cumsum_kkt(stream, inputs, sums.view_mut(), a.view_mut(), options).unwrap();
            gpu.assert_guards(&sums);
            gpu.assert_guards(&a);
            (gpu.download(&sums).data, gpu.download(&a).data)
        };
        let mut sums = gpu.poisoned::<f32>([1, tokens, heads]);
        let gates = gpu.upload(&g, [1, tokens, heads]);
        let options = CumsumOptions { chunk_size: chunk, ..Default::default() };
        chunk_local_cumsum(stream, gates.view(), None, sums.view_mut(), options).unwrap();
        let mut a = gpu.poisoned::<f32>([1, tokens, heads, chunk]);
        let inputs = KktInputs {
            k: k.view(),
            g: Some(sums.view()),
            beta: beta.view(),
            cu_seqlens: None,
            base: GateBase::Natural,
        };
        chunk_scaled_dot_kkt(stream, inputs, a.view_mut()).unwrap();
        let (want, products) = (gpu.download(&sums).data, gpu.download(&a).data);
        for base in [GateBase::Natural, GateBase::Two] {
            for layout in [TokenLayout::Tokens, TokenLayout::Heads] {
                let (sums, a) = fused(&g, base, layout);
                let scale = if base == GateBase::Two { std::f32::consts::LOG2_E } else { 1.0 };
                for t in 0..tokens {
                    for h in 0..heads {
                        let at = if layout == TokenLayout::Tokens { t * heads + h } else { h * tokens + t };
                        let want = want[t * heads + h] * scale;
                        assert!(
                            (sums[at] - want).abs() <= 1e-6 * want.abs() + 1e-7,
                            "{base:?} {layout:?}: {t}, {h}"
                        );
                    }
                }
                assert!(a.iter().zip(&products).all(|(a, b)| (a - b).abs() <= 1e-5), "{base:?} {layout:?}");
            }
        }
        for bad in [1e-30f32, f32::NAN, f32::INFINITY] {
            let mut g = g.clone();
            g[40 * heads + 1] = bad;
            let (sums, a) = fused(&g, GateBase::Natural, TokenLayout::Tokens);
            for (at, sum) in sums.iter().enumerate() {
                let poisoned = at % heads == 1 && (40..64).contains(&(at / heads));
                assert_eq!(sum.is_nan(), poisoned, "{bad}: {at}");
            }
            assert!(a[(41 * heads + 1) * chunk].is_nan() && a[(39 * heads + 1) * chunk].is_finite());
        }
    }
}

#[test]
fn wrong_arguments_of_the_fused_launch_are_refused_by_name() {
    Refusals::new((), |stream, tensors, ()| {
        let inputs = FusedKktInputs::<bf16> {
            k: tensors.input("k"),
            g: tensors.input("g"),
            beta: tensors.input("beta"),
            cu_seqlens: None,
        };
        let (sums, a) = (tensors.output("sums"), tensors.output("a"));
        fused_cumsum_kkt(stream, inputs, sums, a, FusedKktOptions::default())
    })
    .input::<bf16>("k", [1, 40, 2, 32])
    .input::<f32>("g", [1, 40, 4])
    .input::<f32>("beta", [1, 40, 4])
    .output::<f32>("sums", [1, 40, 4])
    .output::<f32>("a", [1, 40, 4, 32])
    .accepts(|_| {})
    .refuses(kind!(Unsupported), &["fused_cumsum_kkt: C = 48"], |call| call.shape("a", [1, 40, 4, 48]))
    .refuses(kind!(Shape), &["g: shape [1, 40, 2], expected [1, 40, 4]"], |call| call.shape("g", [1, 40, 2]))
    .refuses(kind!(Shape), &["sums: shape [1, 4, 40]"], |call| call.shape("sums", [1, 4, 40]))
    .refuses(kind!(Stride), &["sums"], |call| call.strides("sums", [320, 8, 2]))
    .refuses(kind!(Overlap), &["g and sums"], |call| call.overlap("g", "sums", 0))
    .refuses_other_devices();
}
