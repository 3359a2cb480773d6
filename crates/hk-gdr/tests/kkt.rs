//! `chunk_scaled_dot_kkt` against f64, and with `solve_tril` against the recurrence's example.

use hk_core::registry::{HostTensor, Scalar};
use hk_core::{Float, Layout, bf16, f16};
use hk_gdr::{
    CumsumOptions, FusedKktInputs, FusedKktOptions, GateBase, KktInputs, OPERATORS, TokenLayout,
    chunk_local_cumsum, chunk_scaled_dot_kkt, fused_cumsum_kkt, solve_tril,
};
use hk_testkit::{
    self as kit, Fill, Gpu, Place, Refusals, check_call, host_call, kind, proptest::prelude::*,
};

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
            let inputs = FusedKktInputs {
                k: k.view(),
                g: Some(g.view()),
                gk: None,
                beta: beta.view(),
                cu_seqlens: None,
            };
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

/// A call with gates of channels: sums and A.
#[track_caller]
fn with_channels<T: Float>(
    gpu: &Gpu,
    k: &[T],
    gk: &[f32],
    beta: &[f32],
    [tokens, heads, dim, chunk]: [usize; 4],
    starts: Option<&[i32]>,
) -> (Vec<f32>, Vec<f32>) {
    let of_rows = |rest: &[usize]| match starts {
        Some(_) => Place::contiguous([&[tokens], rest].concat()),
        None => Place::contiguous([&[1, tokens], rest].concat()),
    };
    let k = gpu.upload(k, of_rows(&[k.len() / tokens.max(1) / dim, dim]));
    let (gk, beta) = (gpu.upload(gk, of_rows(&[heads, dim])), gpu.upload(beta, of_rows(&[heads])));
    let starts = starts.map(|starts| gpu.upload(starts, [starts.len()]));
    let mut sums = gpu.poisoned::<f32>(of_rows(&[heads, dim]));
    let mut a = gpu.poisoned::<f32>(of_rows(&[heads, chunk]));
    let inputs = FusedKktInputs {
        k: k.view(),
        g: None,
        gk: Some(gk.view()),
        beta: beta.view(),
        cu_seqlens: starts.as_ref().map(|starts| starts.view()),
    };
    fused_cumsum_kkt(gpu.stream(), inputs, sums.view_mut(), a.view_mut(), FusedKktOptions::default())
        .unwrap();
    gpu.assert_guards(&sums);
    gpu.assert_guards(&a);
    (gpu.download(&sums).data, gpu.download(&a).data)
}

/// The example of three tokens with gates of channels, by hand: A_10 = 0.6 exp(-1), A_20 = 0 and A_21 = 0.5 * 0.8 exp(-0.75).
#[test]
fn three_tokens_with_gates_of_channels_give_the_known_numbers() {
    let k = [1.0f32, 0.0, 0.6, 0.8, 0.0, 1.0];
    let (gk, beta) = ([-0.5f32, -0.25, -1.0, 0.0, 0.0, -0.75], [0.5f32, 1.0, 0.5]);
    for gpu in kit::devices() {
        for chunk in [16, 32, 64] {
            let (sums, a) = with_channels(&gpu, &k, &gk, &beta, [3, 1, 2, chunk], None);
            assert_eq!(sums, [-0.5, -0.25, -1.5, -0.25, -1.5, -1.0]);
            let mut want = vec![0.0; 3 * chunk];
            (want[chunk], want[2 * chunk + 1]) = (0.220_727_66, 0.188_946_62);
            assert!(a.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6), "{a:?}, expected {want:?}");
        }
    }
}

/// Gates of channels that are alike are a gate of the head. However strong they are, no exponent is positive; one that is no logarithm of a decay
/// poisons what follows of its chunk.
#[test]
fn gates_of_channels_of_any_strength() {
    let [tokens, heads, dim, chunk] = [70, 2, 40, 64];
    let k: Vec<f32> = Fill::Normal.elements(tokens * dim, 5);
    let beta: Vec<f32> = Fill::Normal.elements(tokens * heads, 7);
    for strength in [0.1, 1.0, 10.0, 300.0] {
        let g: Vec<f32> = Fill::Normal
            .elements::<f32>(tokens * heads, 6)
            .iter()
            .map(|x| -0.3 * strength * x.abs())
            .collect();
        let gk: Vec<f32> = g.iter().flat_map(|g| vec![*g; dim]).collect();
        for gpu in kit::devices() {
            let sizes = [tokens, heads, dim, chunk];
            let (sums, a) = with_channels(&gpu, &k, &gk, &beta, sizes, None);
            let (k, g, betas) = (
                gpu.upload(&k, [1, tokens, 1, dim]),
                gpu.upload(&g, [1, tokens, heads]),
                gpu.upload(&beta, [1, tokens, heads]),
            );
            let mut of_heads = gpu.poisoned::<f32>([1, tokens, heads]);
            let mut want = gpu.poisoned::<f32>([1, tokens, heads, chunk]);
            let inputs = FusedKktInputs {
                k: k.view(),
                g: Some(g.view()),
                gk: None,
                beta: betas.view(),
                cu_seqlens: None,
            };
            let options = FusedKktOptions::default();
            fused_cumsum_kkt(gpu.stream(), inputs, of_heads.view_mut(), want.view_mut(), options).unwrap();
            let of_heads = gpu.download(&of_heads).data;
            assert!(sums.iter().enumerate().all(|(at, sum)| *sum == of_heads[at / dim]));
            let want = gpu.download(&want).data;
            let off = a.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off <= 2e-4, "{off:e} at x {strength}");
        }
    }
    let mut gk = vec![-0.1f32; tokens * heads * dim];
    for bad in [1e-30f32, f32::NAN, f32::INFINITY] {
        gk[(40 * heads + 1) * dim + 3] = bad;
        for gpu in kit::devices() {
            let (sums, a) = with_channels(&gpu, &k, &gk, &beta, [tokens, heads, dim, 32], None);
            for (at, sum) in sums.iter().enumerate() {
                let [t, h, d] = [at / dim / heads, at / dim % heads, at % dim];
                assert_eq!(sum.is_nan(), h == 1 && d == 3 && (40..64).contains(&t), "{bad}: {t}, {h}, {d}");
            }
            for (at, a) in a.iter().enumerate() {
                let [t, h, j] = [at / 32 / heads, at / 32 % heads, at % 32];
                let poisoned = h == 1 && (40..64).contains(&t) && j < t - 32;
                assert_eq!(a.is_nan(), poisoned, "{bad}: {t}, {h}, {j}");
            }
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    /// Against f64; packed sequences have the bits of each alone.
    #[test]
    fn products_with_gates_of_channels_match_f64(
        type_ in 0usize..3, lengths in prop::collection::vec(prop_oneof![Just(0usize), 1usize..=5, 14usize..=70], 1..=4),
        heads in prop_oneof![Just([1usize, 1]), Just([1, 2]), Just([2, 4])],
        dim in prop_oneof![1usize..=20, Just(64), Just(100), Just(128), Just(256)], log2 in 4u32..=6,
        strength in prop_oneof![Just(0.1f32), Just(1.0), Just(10.0)], at in 0usize..4, seed in any::<u64>().no_shrink(),
    ) {
        let tokens: usize = lengths.iter().sum();
        let k = match type_ {
            0 => keys::<bf16>(&[tokens, heads[0], dim], seed),
            1 => keys::<f16>(&[tokens, heads[0], dim], seed),
            _ => keys::<f32>(&[tokens, heads[0], dim], seed),
        };
        let n = tokens * heads[1];
        let beta: Vec<f32> = Fill::Normal.elements::<f32>(n, seed ^ 1).iter().map(|x| 1.0 / (1.0 + x.exp())).collect();
        let gk: Vec<f32> = Fill::Normal.elements::<f32>(n * dim, seed ^ 2).iter().map(|x| -0.3 * strength * x.abs()).collect();
        let mut starts = vec![0i32];
        lengths.iter().for_each(|n| starts.push(starts[starts.len() - 1] + *n as i32));
        let tensors = [
            ("k", k),
            ("gk", HostTensor::new([tokens, heads[1], dim], &gk).unwrap()),
            ("beta", HostTensor::new([tokens, heads[1]], &beta).unwrap()),
            ("cu_seqlens", HostTensor::new([starts.len()], &starts).unwrap()),
        ];
        let scalars = [("chunk_size", Scalar::Int(1 << log2))];
        check_call(&host_call(OPERATORS, "fused_cumsum_kkt", &tensors, &scalars, &[]).unwrap()).unwrap();

        let (chunk, width) = (1 << log2, heads[1] * dim);
        let k: Vec<bf16> = Fill::Normal.elements(tokens * heads[0] * dim, seed);
        let of = at % lengths.len();
        let (from, to) = (starts[of] as usize, starts[of + 1] as usize);
        for gpu in kit::devices().into_iter().filter(|_| tokens > 0) {
            let all = with_channels(&gpu, &k, &gk, &beta, [tokens, heads[1], dim, chunk], Some(&starts[..]));
            if from == to {
                continue;
            }
            let of_k = heads[0] * dim;
            let (sums, a) = with_channels(
                &gpu, &k[from * of_k..to * of_k], &gk[from * width..to * width], &beta[from * heads[1]..to * heads[1]],
                [to - from, heads[1], dim, chunk], None,
            );
            prop_assert!(sums == all.0[from * width..to * width]);
            prop_assert!(a == all.1[from * heads[1] * chunk..to * heads[1] * chunk]);
        }
    }
}

#[test]
fn gates_are_of_heads_or_of_channels() {
    let given = FusedKktOptions::default();
    Refusals::new(given, |stream, tensors, options| {
        let inputs = FusedKktInputs::<bf16> {
            k: tensors.input("k"),
            g: tensors.optional_input("g"),
            gk: tensors.optional_input("gk"),
            beta: tensors.input("beta"),
            cu_seqlens: None,
        };
        fused_cumsum_kkt(stream, inputs, tensors.output("sums"), tensors.output("a"), options)
    })
    .input::<bf16>("k", [1, 40, 2, 32])
    .input::<f32>("g", [1, 40, 4])
    .input::<f32>("gk", [1, 40, 4, 32])
    .input::<f32>("beta", [1, 40, 4])
    .output::<f32>("sums", [1, 40, 4, 32])
    .output::<f32>("a", [1, 40, 4, 32])
    .accepts(|call| call.without("g"))
    .refuses(kind!(Argument), &["fused_cumsum_kkt: g: given, expected nothing beside gk"], |_| {})
    .refuses(kind!(Argument), &["g: no tensor, expected a tensor, or gk"], |call| {
        call.without("g");
        call.without("gk");
    })
    .refuses(kind!(Argument), &["base"], |call| {
        call.without("g");
        call.options.base = GateBase::Two;
    })
    .refuses(kind!(Argument), &["layout"], |call| {
        call.without("g");
        call.options.layout = TokenLayout::Heads;
    })
    .refuses(kind!(Shape), &["gk: shape [1, 40, 4, 16]"], |call| {
        call.without("g");
        call.shape("gk", [1, 40, 4, 16]);
    })
    .refuses(kind!(Shape), &["sums: shape [1, 40, 4]"], |call| {
        call.without("g");
        call.shape("sums", [1, 40, 4]);
    })
    .refuses(kind!(Stride), &["gk"], |call| {
        call.without("g");
        call.strides("gk", [10240, 256, 64, 2]);
    })
    .refuses(kind!(Overlap), &["gk and sums"], |call| {
        call.without("g");
        call.overlap("gk", "sums", 0);
    });
}

#[test]
fn wrong_arguments_of_the_fused_launch_are_refused_by_name() {
    Refusals::new((), |stream, tensors, ()| {
        let inputs = FusedKktInputs::<bf16> {
            k: tensors.input("k"),
            g: Some(tensors.input("g")),
            gk: None,
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
