//! `fused_moe`: launches, chunks of tokens, graphs, workspaces, experts of other ranks, refusals. Parity is in the registry's cases.

use crate::common::Numbers;
use hk_core::{E8M0, Element, Float, Fp4x2, bf16};
use hk_moe::{
    ExpertGate, FloatView, FusedMoeInputs, FusedMoeProblem, FusedRouting, FusedScales, FusedWeight,
    GateOrder, GemmWeight, GroupScales, MxActivations, MxScaleView, SharedExperts, TopkOptions, fused_moe,
    fused_moe_workspace, reference,
};
use hk_testkit::{
    self as kit, Gpu, HostTensorF64, Refusals, Tensor, Tolerance, kind, proptest::prelude::*, widen,
};

fn values<T: Float>(n: usize, seed: u64, size: f32) -> Vec<T> {
    let mut numbers = Numbers(seed ^ 0x99);
    (0..n).map(|_| T::from_f32(((numbers.next() % 512) as f32 / 256.0 - 1.0) * size)).collect()
}

/// A layer of `bf16` on a device.
struct Layer {
    problem: FusedMoeProblem,
    x: Tensor<bf16>,
    w1: Tensor<bf16>,
    w2: Tensor<bf16>,
    logits: Tensor<f32>,
    map: Option<Tensor<i32>>,
}

impl Layer {
    fn new(gpu: &Gpu, problem: FusedMoeProblem, map: Option<&[i32]>, seed: u64) -> Self {
        let FusedMoeProblem { tokens, experts, hidden, inner, .. } = problem;
        let local = map.map_or(experts, |map| map.iter().max().map_or(1, |&m| m as usize + 1));
        Self {
            problem,
            x: gpu.upload(&values(tokens * hidden, seed, 1.0), [tokens, hidden]),
            w1: gpu.upload(&values(local * 2 * inner * hidden, seed + 1, 0.5), [local, 2 * inner, hidden]),
            w2: gpu.upload(&values(local * inner * hidden, seed + 2, 0.5), [local, hidden, inner]),
            logits: gpu.upload(&values(tokens * experts, seed + 3, 3.0), [tokens, experts]),
            map: map.map(|map| gpu.upload(map, [experts])),
        }
    }

    fn inputs(&self) -> FusedMoeInputs<'_, bf16, bf16> {
        let (logits, topk) = (self.logits.view().into(), TopkOptions::default());
        FusedMoeInputs {
            x: self.x.view(),
            w1: GemmWeight::Rows(self.w1.view()),
            w2: GemmWeight::Rows(self.w2.view()),
            scales: FusedScales::None,
            w1_bias: None,
            w2_bias: None,
            gate: ExpertGate::silu(GateOrder::Halves),
            routing: FusedRouting::Logits { logits, bias: None, k: self.problem.k, topk },
            expert_map: self.map.as_ref().map(|map| map.view()),
            shared: None,
            residual: None,
        }
    }

    fn run(&self, gpu: &Gpu, bytes: usize) -> Vec<bf16> {
        let mut y = gpu.poisoned::<bf16>([self.problem.tokens, self.problem.hidden]);
        let mut workspace = gpu.stream().alloc_zeroed::<u8>(bytes).unwrap();
        fused_moe(gpu.stream(), self.inputs(), y.view_mut(), workspace.view_mut([bytes]).unwrap()).unwrap();
        gpu.assert_guards(&y);
        gpu.download(&y).data
    }
}

fn problem(tokens: usize, k: usize, experts: usize) -> FusedMoeProblem {
    FusedMoeProblem { tokens, k, experts, hidden: 48, inner: 32, shared: 0 }
}

#[test]
fn a_call_is_four_launches_or_six() {
    for gpu in ["emu:gfx942?details=true", "emu:gfx950?details=true"].map(Gpu::open) {
        for (tokens, most) in [(1, 4), (64, 4), (256, 4), (257, 5)] {
            let layer = Layer::new(&gpu, problem(tokens, 2, 8), None, 1);
            gpu.stream().take_profiles().unwrap();
            layer.run(&gpu, fused_moe_workspace(&layer.problem, None));
            let profiles = gpu.stream().take_profiles().unwrap();
            assert!(!profiles.is_empty(), "the emulator counts launches");
            let launches: u64 = profiles.iter().map(|profile| profile.launches).sum();
            assert_eq!(launches, most, "{tokens} tokens on {}", gpu.spec());
        }
    }
}

/// The weights of a [`Packed`] layer.
#[derive(Debug, Clone, Copy)]
enum Of {
    /// `bf16`.
    Plain,
    /// `i8`, scales of rows.
    Rows,
    /// `i8`, scales of blocks.
    Blocks,
    Mx(MxActivations),
    /// int4 with zero points.
    Groups,
}

/// A layer of weights of random bytes, with shared experts.
struct Packed<W: Element> {
    of: Of,
    problem: FusedMoeProblem,
    x: Tensor<bf16>,
    logits: Tensor<f32>,
    /// `w1`, `w2`, then those of the shared experts.
    w: [Tensor<W>; 4],
    scales: [Tensor<f32>; 4],
    mx: [Tensor<E8M0>; 4],
    zeros: [Tensor<u8>; 4],
}

impl<W: FusedWeight<bf16>> Packed<W> {
    const GROUP: usize = 32;

    fn new(gpu: &Gpu, tokens: usize, of: Of, byte: fn(u8) -> W) -> Self {
        let [experts, hidden, inner, shared] = [6, 192, 64, 32];
        let problem = FusedMoeProblem { tokens, k: 2, experts, hidden, inner, shared };
        let all = [
            [experts, 2 * inner, hidden],
            [experts, hidden, inner],
            [1, 2 * shared, hidden],
            [1, hidden, shared],
        ];
        let packed = if matches!(of, Of::Mx(_) | Of::Groups) { 2 } else { 1 };
        let bytes = |n: usize, seed: u64| {
            let mut numbers = Numbers(seed);
            (0..n).map(move |_| numbers.next() as u8)
        };
        let w = all.map(|[e, n, k]| {
            let data: Vec<W> = bytes(e * n * k / packed, (n + k) as u64).map(byte).collect();
            gpu.upload(&data, [e, n, k / packed])
        });
        let scales = all.map(|[e, n, k]| {
            let shape = match of {
                Of::Blocks => [e, n.div_ceil(128), k.div_ceil(128)],
                _ => [e, n, k.div_ceil(Self::GROUP)],
            };
            let scale = |b: u8| f32::from(b) / 65536.0 + 0.001;
            if matches!(of, Of::Rows) {
                let data: Vec<f32> = bytes(e * n, 5).map(scale).collect();
                return gpu.upload(&data, [e, n]);
            }
            gpu.upload(&bytes(shape.iter().product(), 5).map(scale).collect::<Vec<f32>>(), shape)
        });
        let mx = all.map(|[e, n, k]| {
            let data: Vec<E8M0> = bytes(e * n * k / 32, 6).map(|b| E8M0(118 + b % 4)).collect();
            gpu.upload(&data, [e, n, k / 32])
        });
        let zeros = all.map(|[e, n, k]| {
            let shape = [e, n / 2, k / Self::GROUP];
            gpu.upload(&bytes(shape.iter().product(), 7).collect::<Vec<u8>>(), shape)
        });
        let x = gpu.upload(&values(tokens * hidden, 1, 1.0), [tokens, hidden]);
        let logits = gpu.upload(&values(tokens * experts, 2, 3.0), [tokens, experts]);
        Self { of, problem, x, logits, w, scales, mx, zeros }
    }

    /// Of `w1` and `w2` (0), or of the shared experts (2).
    fn scales(&self, first: usize) -> FusedScales<'_> {
        let [w1, w2] = [0, 1].map(|i| self.scales[first + i].view());
        match self.of {
            Of::Plain => FusedScales::None,
            Of::Rows => FusedScales::Rows { w1, w2 },
            Of::Blocks => FusedScales::Blocks { w1, w2 },
            Of::Mx(activations) => {
                let [w1, w2] = [0, 1].map(|i| MxScaleView::Rows(self.mx[first + i].view()));
                FusedScales::Mx { w1, w2, activations }
            }
            Of::Groups => {
                let of = |scale, i: usize| {
                    let zero = Some(self.zeros[first + i].view());
                    GroupScales { scale: FloatView::F32(scale), zero }
                };
                FusedScales::Groups { bits: 4, group: Self::GROUP, w1: of(w1, 0), w2: of(w2, 1) }
            }
        }
    }

    fn run<Y: Float>(&self, gpu: &Gpu, bytes: usize) -> Vec<Y> {
        let FusedMoeProblem { tokens, hidden, k, .. } = self.problem;
        let inputs = FusedMoeInputs {
            x: self.x.view(),
            w1: GemmWeight::Rows(self.w[0].view()),
            w2: GemmWeight::Rows(self.w[1].view()),
            scales: self.scales(0),
            w1_bias: None,
            w2_bias: None,
            gate: ExpertGate::silu(GateOrder::Halves),
            routing: FusedRouting::Logits {
                logits: self.logits.view().into(),
                bias: None,
                k,
                topk: TopkOptions::default(),
            },
            expert_map: None,
            shared: Some(SharedExperts {
                w1: GemmWeight::Rows(self.w[2].view()),
                w2: GemmWeight::Rows(self.w[3].view()),
                scales: self.scales(2),
            }),
            residual: None,
        };
        let mut y = gpu.poisoned::<Y>([tokens, hidden]);
        let mut workspace = gpu.stream().alloc_zeroed::<u8>(bytes).unwrap();
        fused_moe(gpu.stream(), inputs, y.view_mut(), workspace.view_mut([bytes]).unwrap()).unwrap();
        gpu.assert_guards(&y);
        gpu.download(&y).data
    }
}

/// Beyond 256 tokens the second launch of routing quantizes; chunks of 256 tokens have a launch for that.
#[test]
fn quantized_weights_have_six_launches_and_the_bits_of_any_chunks() {
    fn check<W: FusedWeight<bf16>>(gpu: &Gpu, of: Of, byte: fn(u8) -> W) {
        let small = Packed::new(gpu, 256, of, byte);
        let layer = Packed::new(gpu, 600, of, byte);
        let launches = |layer: &Packed<W>| {
            gpu.stream().take_profiles().unwrap();
            let y = layer.run::<bf16>(gpu, fused_moe_workspace(&layer.problem, None));
            (y, gpu.stream().take_profiles().unwrap().iter().map(|p| p.launches).sum::<u64>())
        };
        // Of them three are those of shared experts.
        assert_eq!(launches(&small).1, 9, "{of:?}, 256 tokens on {}", gpu.spec());
        let (all, count) = launches(&layer);
        assert_eq!(count, 9, "{of:?}, 600 tokens on {}", gpu.spec());
        assert!(all.iter().all(|y| y.is_finite()), "{of:?}");
        let chunks = layer.run::<bf16>(gpu, fused_moe_workspace(&layer.problem, Some(0)));
        assert!(chunks == all, "{of:?} in chunks on {}", gpu.spec());
        let partial = layer.run::<f32>(gpu, fused_moe_workspace(&layer.problem, None));
        assert!(partial.iter().map(|&y| bf16::from_f32(y)).eq(all), "{of:?}, f32 on {}", gpu.spec());
    }
    for gpu in ["emu:gfx942?details=true", "emu:gfx950?details=true"].map(Gpu::open) {
        check(&gpu, Of::Rows, |b| b as i8);
        check(&gpu, Of::Blocks, |b| b as i8);
        check(&gpu, Of::Mx(MxActivations::Fp4), Fp4x2);
        check(&gpu, Of::Mx(MxActivations::Fp8), Fp4x2);
    }
}

/// A layer of int4 groups is that of its dequantized weights, whose GEMMs have other tiles.
#[test]
fn groups_are_their_dequantized_weights() {
    for gpu in kit::devices() {
        let layer = Packed::new(&gpu, 40, Of::Groups, |b| b);
        let got: Vec<f32> = layer.run(&gpu, fused_moe_workspace(&layer.problem, None));
        let half = |byte: u8, odd: bool| f32::from(if odd { byte >> 4 } else { byte & 15 });
        let w = [0, 1, 2, 3].map(|i| {
            let (w, scale, zero) = (&layer.w[i], &layer.scales[i], &layer.zeros[i]);
            let shape = gpu.download(w).shape.clone();
            let (n, k) = (shape[1], 2 * shape[2]);
            let groups = k / 32;
            let [w, zero] = [w, zero].map(|t| gpu.download(t).data);
            let scale = gpu.download(scale).data;
            let values: Vec<bf16> = (0..2 * w.len())
                .map(|at| {
                    let (row, group) = (at / k, at % k / 32);
                    let zero = half(zero[row / 2 * groups + group], row % 2 == 1);
                    bf16::from_f32((half(w[at / 2], at % 2 == 1) - zero) * scale[row * groups + group])
                })
                .collect();
            gpu.upload(&values, [shape[0], n, k])
        });
        let plain = Packed { w, ..Packed::new(&gpu, 40, Of::Plain, |_| bf16::ZERO) };
        let want: Vec<f32> = plain.run(&gpu, fused_moe_workspace(&plain.problem, None));
        let largest = want.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        assert!(largest > 0.0);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= largest / 64.0, "element {i}: {got}, {want} on {}", gpu.spec());
        }
    }
}

#[test]
fn chunks_of_tokens_change_no_bit() {
    let problem = problem(700, 3, 6);
    for gpu in kit::devices() {
        let layer = Layer::new(&gpu, problem, Some(&[0, -1, 1, 2, -1, 3]), 2);
        let all = layer.run(&gpu, fused_moe_workspace(&problem, None));
        let least = fused_moe_workspace(&problem, Some(0));
        assert!(least < fused_moe_workspace(&problem, None));
        for limit in [least, least + 100_000] {
            assert!(
                layer.run(&gpu, fused_moe_workspace(&problem, Some(limit))) == all,
                "within {limit} bytes"
            );
        }
    }
}

#[test]
fn a_graph_holds_the_call() {
    let problem = problem(70, 2, 6);
    for gpu in kit::devices() {
        let layer = Layer::new(&gpu, problem, None, 3);
        let bytes = fused_moe_workspace(&problem, None);
        let want = layer.run(&gpu, bytes);
        let mut y = gpu.poisoned::<bf16>([problem.tokens, problem.hidden]);
        let mut workspace = gpu.stream().alloc_zeroed::<u8>(bytes).unwrap();
        let graph = gpu
            .stream()
            .capture(|| {
                let workspace = workspace.view_mut([bytes])?;
                fused_moe(gpu.stream(), layer.inputs(), y.view_mut(), workspace)
            })
            .unwrap();
        for _ in 0..2 {
            gpu.reset(&mut y);
            // SAFETY: the tensors are alive, and nothing else uses them.
            unsafe { graph.launch(gpu.stream()).unwrap() };
            kit::assert_bits(&gpu.download(&y), &want);
        }
    }
}

#[test]
fn weights_of_idle_experts_are_not_read() {
    for gpu in kit::devices() {
        let mut layer = Layer::new(&gpu, problem(40, 1, 8), None, 4);
        // All tokens choose expert 3 or 5.
        let logits: Vec<f32> =
            (0..40 * 8).map(|i| if i % 8 == 3 + 2 * (i / 8 % 2) { 4.0 } else { 0.0 }).collect();
        layer.logits = gpu.upload(&logits, [40, 8]);
        let want = layer.run(&gpu, fused_moe_workspace(&layer.problem, None));
        let poison = |data: Vec<bf16>| {
            let each = data.len() / 8;
            let idle = |i: usize| i / each != 3 && i / each != 5;
            data.into_iter().enumerate().map(|(i, v)| if idle(i) { bf16::NAN } else { v }).collect::<Vec<_>>()
        };
        layer.w1 = gpu.upload(&poison(gpu.download(&layer.w1).data), [8, 64, 48]);
        layer.w2 = gpu.upload(&poison(gpu.download(&layer.w2).data), [8, 48, 32]);
        assert!(layer.run(&gpu, fused_moe_workspace(&layer.problem, None)) == want);
        assert!(want.iter().all(|v| v.is_finite()));
    }
}

/// Ranks that have a part of the experts each: their outputs add up to those of one rank with all.
#[test]
fn ranks_add_up() {
    let problem = problem(50, 3, 6);
    for gpu in kit::devices() {
        let whole = Layer::new(&gpu, problem, None, 5);
        let want = widen(&whole.run(&gpu, fused_moe_workspace(&problem, None)));
        let (w1, w2) = (gpu.download(&whole.w1).data, gpu.download(&whole.w2).data);
        let mut total = vec![0.0; want.len()];
        for rank in 0..2usize {
            let map: Vec<i32> =
                (0..6).map(|e: i32| if e as usize / 3 == rank { e % 3 } else { -1 }).collect();
            let mut part = Layer::new(&gpu, problem, Some(&map), 5);
            part.w1 = gpu.upload(&w1[rank * 3 * 64 * 48..][..3 * 64 * 48], [3, 64, 48]);
            part.w2 = gpu.upload(&w2[rank * 3 * 32 * 48..][..3 * 32 * 48], [3, 48, 32]);
            let y = widen(&part.run(&gpu, fused_moe_workspace(&problem, None)));
            total.iter_mut().zip(y).for_each(|(total, y)| *total += y);
        }
        let largest = want.iter().fold(0.0f64, |max, v| max.max(v.abs()));
        for (i, (got, want)) in total.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= largest / 64.0, "element {i}: {got}, {want}");
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    /// Random layers against the reference of the sorted gates, whatever the sizes; the workspace is as long as asked for.
    #[test]
    fn layers_are_those_of_the_reference(
        tokens in kit::size(1..=300, &[16, 256]), experts in 1usize..=20, more in 0usize..4, chunks in 1usize..=8, inner in 1usize..=8, seed: u64,
    ) {
        let k = 1 + more.min(experts - 1);
        let problem = FusedMoeProblem { tokens, k, experts, hidden: 8 * chunks, inner: 8 * inner, shared: 0 };
        let FusedMoeProblem { hidden, inner, .. } = problem;
        for gpu in kit::devices() {
            let layer = Layer::new(&gpu, problem, None, seed);
            let got = layer.run(&gpu, fused_moe_workspace(&problem, None));
            let [x, w1, w2] = [&layer.x, &layer.w1, &layer.w2].map(|t| widen(&gpu.download(t).data));
            let logits = widen(&gpu.download(&layer.logits).data);
            let chosen = reference::moe_topk(&logits, experts, None, k, &TopkOptions::default(), 0.0);
            let up = reference::ExpertProblem {
                a: &x, w: &w1, k: hidden, w_rows: 2 * inner, bias: None, weights: None, weight_first: false,
                gate: Some(ExpertGate::silu(GateOrder::Halves)), activation: None, round: None,
            };
            let rows: Vec<_> = chosen.ids.iter().enumerate().map(|(g, &e)| Some((g / k, e as usize))).collect();
            let (h, of_h) = reference::expert_gemm(&up, &rows);
            let down = reference::ExpertProblem { a: &h, w: &w2, k: inner, w_rows: hidden, gate: None, ..up.clone() };
            let rows: Vec<_> = chosen.ids.iter().enumerate().map(|(g, &e)| Some((g, e as usize))).collect();
            let (y, of_y) = reference::expert_gemm(&down, &rows);
            let magnitude = ExpertMagnitude { h: &h, of_h: &of_h, w2: &w2, hidden, inner };
            let (mut want, mut magnitudes) = (vec![0.0; tokens * hidden], vec![0.0; tokens * hidden]);
            for (i, y) in y.iter().enumerate() {
                let (gate, col) = (i / hidden, i % hidden);
                let weight = chosen.weights[gate].abs();
                let at = gate / k * hidden + col;
                want[at] += y * chosen.weights[gate];
                magnitudes[at] += weight * (of_y[i] + magnitude.of(gate, chosen.ids[gate] as usize, col, y.abs()));
            }
            let want = HostTensorF64::new([tokens, hidden], want).with_magnitudes(magnitudes);
            let got = kit::Array::new("y", [tokens, hidden], got);
            kit::assert_near(&got, &want, Tolerance::Sum { terms: reference::EXPERT_TERMS });
        }
    }
}

/// What rounding `h` and the outputs of gates to bf16 adds to the error.
struct ExpertMagnitude<'a> {
    h: &'a [f64],
    of_h: &'a [f64],
    w2: &'a [f64],
    hidden: usize,
    inner: usize,
}

impl ExpertMagnitude<'_> {
    fn of(&self, gate: usize, expert: usize, col: usize, y: f64) -> f64 {
        let &Self { h, of_h, w2, hidden, inner } = self;
        let step = 1.0 / 256.0 / reference::EXPERT_TERMS;
        let of_h = (0..inner).map(|i| {
            let at = gate * inner + i;
            (h[at].abs() * step + of_h[at]) * w2[(expert * hidden + col) * inner + i].abs()
        });
        of_h.sum::<f64>() + y * step
    }
}

/// DeepSeek-V3 and its shared expert: the gates of a rank of eight may be all that there are. Half of 16,384 tokens at a time fit 1.5 GiB.
#[test]
fn the_workspace_of_deepseek_is_bounded_by_the_limit() {
    let deepseek =
        FusedMoeProblem { tokens: 16_384, k: 8, experts: 256, hidden: 7168, inner: 2048, shared: 2048 };
    let limit = 3 << 29;
    assert!(fused_moe_workspace(&deepseek, None) > limit);
    assert_eq!(fused_moe_workspace(&deepseek, Some(limit)), limit);
    let half = FusedMoeProblem { tokens: 8192, ..deepseek };
    assert!(fused_moe_workspace(&half, None) <= limit);
    let decode = FusedMoeProblem { tokens: 64, ..deepseek };
    assert!(fused_moe_workspace(&decode, Some(limit)) < 16 << 20);
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let bytes = fused_moe_workspace(&FusedMoeProblem { shared: 8, ..problem(12, 2, 4) }, None);
    Refusals::new((), |stream, tensors, ()| {
        let topk = TopkOptions::default();
        let inputs = FusedMoeInputs {
            x: tensors.input::<bf16>("x"),
            w1: GemmWeight::Rows(tensors.input::<bf16>("w1")),
            w2: GemmWeight::Rows(tensors.input::<bf16>("w2")),
            scales: FusedScales::None,
            w1_bias: tensors.optional_input::<f32>("w1_bias").map(Into::into),
            w2_bias: None,
            gate: ExpertGate::silu(GateOrder::Halves),
            routing: FusedRouting::Logits {
                logits: tensors.input::<f32>("logits").into(),
                bias: None,
                k: 2,
                topk,
            },
            expert_map: tensors.optional_input("expert_map"),
            shared: Some(SharedExperts {
                w1: GemmWeight::Rows(tensors.input::<bf16>("shared_w1")),
                w2: GemmWeight::Rows(tensors.input::<bf16>("shared_w2")),
                scales: FusedScales::None,
            }),
            residual: tensors.optional_input::<bf16>("residual"),
        };
        fused_moe(stream, inputs, tensors.output("y"), tensors.output::<u8>("workspace"))
    })
    .input::<bf16>("x", [12, 48])
    .input::<bf16>("w1", [4, 64, 48])
    .input::<bf16>("w2", [4, 48, 32])
    .input::<f32>("w1_bias", [4, 64])
    .input::<f32>("logits", [12, 4])
    .input::<i32>("expert_map", [4])
    .input::<bf16>("shared_w1", [1, 16, 48])
    .input::<bf16>("shared_w2", [1, 48, 8])
    .input::<bf16>("residual", [12, 48])
    .output::<bf16>("y", [12, 48])
    .output::<u8>("workspace", [bytes])
    .accepts(|_| {})
    .accepts(|call| call.without("expert_map"))
    .refuses(kind!(Shape), &["fused_moe: w1"], |call| call.shape("w1", [4, 64, 40]))
    .refuses(kind!(Shape), &["fused_moe: w1"], |call| call.shape("w1", [4, 63, 48]))
    .refuses(kind!(Shape), &["fused_moe: w2"], |call| call.shape("w2", [4, 48, 24]))
    .refuses(kind!(Shape), &["fused_moe: w1_bias"], |call| call.shape("w1_bias", [4, 63]))
    .refuses(kind!(Shape), &["fused_moe: logits"], |call| call.shape("logits", [11, 4]))
    .refuses(kind!(Shape), &["fused_moe: expert_map"], |call| call.shape("expert_map", [3]))
    .refuses(kind!(Shape), &["fused_moe: residual"], |call| call.shape("residual", [12, 47]))
    .refuses(kind!(Shape), &["fused_moe: shared_w1"], |call| {
        call.shape("shared_w1", [2, 16, 48]);
        call.shape("shared_w2", [2, 48, 8]);
    })
    .refuses(kind!(Shape), &["fused_moe: shared_w1"], |call| call.shape("shared_w1", [1, 16, 40]))
    .refuses(kind!(Shape), &["fused_moe: shared_w2"], |call| call.shape("shared_w2", [1, 48, 16]))
    .refuses(kind!(Shape), &["fused_moe: y"], |call| call.shape("y", [11, 48]))
    .refuses(kind!(Shape), &["fused_moe: workspace"], |call| call.shape("workspace", [4096]))
    .refuses(kind!(Shape), &["fused_moe: w1", "expert_map"], |call| {
        call.without("expert_map");
        call.shape("logits", [12, 5]);
    })
    .refuses_other_devices();
}
