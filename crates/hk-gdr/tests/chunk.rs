//! The gated delta rule in chunks: against f64 token by token, its laws, and its steps one by one.

use crate::recurrent::{Case, Data, Output, Uploaded, error, exchanged, reference, relative, run_by, stored};
use hk_core::{DType, Float, Layout, TensorViewMut, bf16, f16};
use hk_gdr::reference::ChunkHead;
use hk_gdr::{
    ChunkInputs, ChunkOptions, ChunkOutputInputs, ChunkOutputOptions, CumsumOptions, DeltaInputs,
    DeltaOptions, DeltaOutputs, GateBase, KktInputs, RecomputeInputs, RecurrentInputs, StateElement,
    StateLayout, States, WyInputs, WyOutputs, chunk_delta_h, chunk_gated_delta_rule, chunk_local_cumsum,
    chunk_o, chunk_scaled_dot_kkt, recompute_w_u, solve_tril, wy_representation,
};
use hk_testkit::{self as kit, Fill, Gpu, Place, Refusals, kind, proptest::prelude::*};

/// A case, and the tokens of a chunk.
#[derive(Debug, Clone)]
struct Chunked {
    case: Case,
    chunk: usize,
}

impl Chunked {
    fn new(lengths: &[usize], heads: [usize; 2], dims: [usize; 2], chunk: usize) -> Self {
        Self { case: Case::new(lengths, heads, dims), chunk }
    }

    fn options(&self) -> ChunkOptions {
        let Case { scale, l2norm, layout, .. } = self.case;
        ChunkOptions { scale, qk_l2norm: l2norm, chunk_size: self.chunk, layout }
    }
}

fn inputs<'a, T: Float>(from: &RecurrentInputs<'a, T>) -> ChunkInputs<'a, T> {
    let RecurrentInputs { q, k, v, gates, cu_seqlens } = *from;
    ChunkInputs { q, k, v, g: gates.g, gk: gates.gk, beta: gates.beta.unwrap(), cu_seqlens }
}

#[track_caller]
fn call<'a, T: Float, S: StateElement>(
    gpu: &Gpu,
    from: &RecurrentInputs<'a, T>,
    states: States<'a, S>,
    o: TensorViewMut<'a, T>,
    options: ChunkOptions,
) {
    let inputs = inputs(from);
    let bytes = inputs.workspace_bytes(options).unwrap();
    let mut workspace = gpu.poisoned::<u8>([bytes]);
    chunk_gated_delta_rule(gpu.stream(), inputs, states, workspace.view_mut(), o, options).unwrap();
    gpu.assert_guards(&workspace);
}

#[track_caller]
fn chunked<T: Float, S: StateElement>(gpu: &Gpu, of: &Chunked, data: &Data<T, S>) -> Output<T, S> {
    run_by(gpu, &of.case, data, |from, states, o| call(gpu, &from, states, o, of.options()))
}

fn bound<T: Float>() -> f64 {
    match T::DTYPE {
        DType::Bf16 | DType::F16 => 5e-3,
        _ => 5e-5,
    }
}

#[track_caller]
fn check<T: Float, S: StateElement>(of: &Chunked) {
    let data = Data::<T, S>::new(&of.case);
    let want = reference(&of.case, &data);
    // Where a chunk has more keys than they have elements, its updates cancel: operands of 16 bits err by more of what is left.
    let cancels = if of.chunk > of.case.dims[0] && T::DTYPE != DType::F32 { 2.0 } else { 1.0 };
    let of_o = bound::<T>() * cancels;
    let of_states = of_o.max(bound::<S>());
    for gpu in kit::devices() {
        let got = chunked(&gpu, of, &data);
        let (o, states) = (error(&got.o, &want.o), error(&got.states, &want.states));
        assert!(o <= of_o, "o: {o:e} of {of:?} on {}", gpu.spec());
        assert!(states <= of_states, "states: {states:e} of {of:?} on {}", gpu.spec());
    }
}

fn cases() -> impl Strategy<Value = Chunked> {
    let length = || prop_oneof![2 => Just(0usize), 3 => 1usize..=20, 3 => 60usize..=70, 1 => 120usize..=150];
    let lengths = prop_oneof![
        prop::collection::vec(length(), 1..=3).prop_map(|l| (true, l)),
        (1usize..=2, length()).prop_map(|(n, l)| (false, vec![l; n])),
    ];
    // In fewer columns the error of one rounding would be beyond the bound, which is of the norm of all.
    let dim = || prop_oneof![16usize..=24, Just(64), Just(60), Just(100), 120usize..=136, Just(256)];
    let round = || prop_oneof![Just(16usize), Just(64), Just(72), Just(128), Just(136), Just(256)];
    let dims = prop_oneof![1 => (dim(), dim()), 2 => (round(), round())];
    let heads = prop_oneof![Just([1, 1]), Just([1, 2]), Just([2, 2])];
    let flags = any::<(bool, bool, bool, bool, bool)>();
    let strength = prop_oneof![Just(0.1f32), Just(1.0), Just(10.0)];
    let memory = prop_oneof![3 => Just((0usize, 0usize)), 1 => Just((8, 0)), 1 => (0usize..=5, 0usize..=3)];
    (lengths, dims, heads, flags, strength, 4u32..=6, memory, any::<u64>().no_shrink()).prop_map(
        |(
            (packed, lengths),
            (k, v),
            heads,
            (vk, l2norm, gates, channels, initial),
            strength,
            chunk,
            (gap, shift),
            seed,
        )| {
            let case = Case {
                packed,
                layout: if vk { StateLayout::Vk } else { StateLayout::Kv },
                // Normal keys of few elements have any norm: states would grow.
                l2norm: l2norm || k < 60,
                scale: if initial { None } else { Some(0.3) },
                g: gates && !channels,
                gk: gates && channels,
                strength,
                initial,
                gap,
                shift,
                seed,
                ..Case::new(&lengths, heads, [k, v])
            };
            Chunked { case, chunk: 1 << chunk }
        },
    )
}

/// A part of a case's only sequence.
fn part<T: Float>(
    case: &Case,
    data: &Data<T, f32>,
    from: usize,
    to: usize,
    states: Vec<f32>,
) -> Data<T, f32> {
    let ([k_heads, v_heads], [k_dim, v_dim]) = (case.heads, case.dims);
    let of = |x: &[T], width: usize| x[from * width..to * width].to_vec();
    let gates = |x: &[f32]| x[from * v_heads..to * v_heads].to_vec();
    Data {
        q: of(&data.q, k_heads * k_dim),
        k: of(&data.k, k_heads * k_dim),
        v: of(&data.v, v_heads * v_dim),
        g: gates(&data.g),
        gk: data.gk[from * v_heads * k_dim..to * v_heads * k_dim].to_vec(),
        gv: data.gv[from * v_heads * v_dim..to * v_heads * v_dim].to_vec(),
        beta: gates(&data.beta),
        states,
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_the_recurrence(of in cases()) {
        check::<bf16, f32>(&of);
    }

    #[test]
    fn f16_matches_the_recurrence(of in cases()) {
        check::<f16, bf16>(&of);
    }

    #[test]
    fn f32_matches_the_recurrence(of in cases()) {
        check::<f32, f32>(&of);
    }

    /// Each sequence alone, and with sequences without tokens around it: the same bits. Those keep their state.
    #[test]
    fn packed_sequences_have_the_bits_of_each_alone(of in cases(), at in 0usize..=2) {
        let case = &of.case;
        let data = Data::<bf16, f32>::new(case);
        let size = case.heads[1] * case.dims[0] * case.dims[1];
        let n = at % case.lengths.len();
        let first: usize = case.lengths[..n].iter().sum();
        let length = case.lengths[n];
        let alone = Chunked {
            case: Case { lengths: vec![0, length, 0], packed: true, ..case.clone() },
            chunk: of.chunk,
        };
        let mine = &data.states[n * size..][..size];
        let own = part(case, &data, first, first + length, [mine, mine, mine].concat());
        for gpu in kit::devices() {
            let all = chunked(&gpu, &of, &data);
            let got = chunked(&gpu, &alone, &own);
            let width = case.heads[1] * case.dims[1];
            prop_assert!(got.o == all.o[first * width..][..length * width], "{:?}", of);
            prop_assert!(got.states[size..2 * size] == all.states[n * size..][..size], "{:?}", of);
            let kept = if case.initial { mine.to_vec() } else { vec![0.0; size] };
            prop_assert!(got.states[..size] == kept && got.states[2 * size..] == kept);
        }
    }

    /// A sequence in two calls is the recurrence; with whole chunks in the first one it has the bits of one call.
    #[test]
    fn sequences_may_be_split(of in cases(), length in 2usize..=150, cut in 1usize..=149) {
        let of = Chunked { case: Case { lengths: vec![length], packed: true, ..of.case }, ..of };
        let cut = cut.min(length - 1);
        let data = Data::<f16, f32>::new(&of.case);
        let want = reference(&of.case, &data);
        for gpu in kit::devices() {
            let whole = chunked(&gpu, &of, &data);
            let halves = |cut: usize| {
                let half = |from: usize, to: usize, states: Vec<f32>, initial: bool| {
                    let case = Case { lengths: vec![to - from], initial, ..of.case.clone() };
                    chunked(&gpu, &Chunked { case, ..of.clone() }, &part(&of.case, &data, from, to, states))
                };
                let one = half(0, cut, data.states.clone(), of.case.initial);
                let two = half(cut, length, one.states.clone(), true);
                Output { o: [one.o, two.o].concat(), states: two.states }
            };
            let got = halves(cut);
            let errors = [error(&got.o, &want.o), error(&got.states, &want.states)];
            prop_assert!(errors.iter().all(|e| *e <= bound::<f16>()), "{:?} of {:?} at {}", errors, of, cut);
            if let Some(cut) = (length > of.chunk).then_some(of.chunk) {
                prop_assert!(halves(cut) == whole, "{:?} in whole chunks", of);
            }
        }
    }

    /// Outputs depend on no later token.
    #[test]
    fn outputs_are_causal(of in cases(), t in 0usize..=69) {
        let of = Chunked { case: Case { lengths: vec![70], packed: true, ..of.case }, ..of };
        let data = Data::<f16, f32>::new(&of.case);
        let mut other = data.clone();
        let width = of.case.heads[0] * of.case.dims[0];
        other.k[t * width..].iter_mut().for_each(|x| *x = f16::from_f32(-x.to_f32() * 0.5));
        let width = of.case.heads[1] * of.case.dims[1];
        other.v[t * width..].iter_mut().for_each(|x| *x = f16::from_f32(x.to_f32() + 1.0));
        for gpu in kit::devices() {
            let (a, b) = (chunked(&gpu, &of, &data), chunked(&gpu, &of, &other));
            prop_assert!(a.o[..t * width] == b.o[..t * width], "{:?}", of);
            prop_assert!(a.states != b.states);
        }
    }
}

/// Lengths and sizes of the heads of models, each once.
#[test]
fn lengths_and_head_sizes() {
    let dims = [[16, 16], [60, 60], [64, 64], [100, 100], [128, 128], [128, 64], [256, 128], [128, 256]];
    for (i, tokens) in [1, 3, 17, 63, 64, 65, 129, 200].into_iter().enumerate() {
        check::<bf16, f32>(&Chunked::new(&[tokens], [1, 2], dims[i], 64));
        check::<f32, f32>(&Chunked::new(&[tokens], [1, 1], dims[7 - i], 32));
    }
    for lengths in [&[0, 1, 0, 3, 17, 65][..], &[0, 0, 0, 7], &[64, 64]] {
        check::<bf16, f32>(&Chunked::new(lengths, [2, 4], [64, 32], 16));
    }
}

/// The example of three tokens, K = 2, V = 1: a chunk, and each of its steps.
#[test]
fn three_tokens_give_the_known_numbers() {
    let case = Case { l2norm: false, ..Case::new(&[3], [1, 1], [2, 1]) };
    let data = Data::<f32, f32> {
        q: vec![1.0, 0.0, 0.0, 1.0, 0.6, 0.8],
        k: vec![1.0, 0.0, 0.6, 0.8, 0.0, 1.0],
        v: vec![1.0, 2.0, -1.0],
        g: vec![-0.5, -0.25, 0.0],
        gk: vec![0.0; 6],
        gv: vec![0.0; 3],
        beta: vec![0.5, 1.0, 0.5],
        states: vec![1.0, -1.0],
    };
    let near = |got: &[f32], want: &[f32]| {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 2e-6), "{got:?}, expected {want:?}");
    };
    let of_w = [0.303_265, 0.0, 0.141_710, 0.377_893, -0.056_684, 0.085_026];
    let of_u = [0.5, 1.766_36, -1.206_544];
    for gpu in kit::devices() {
        let got = chunked(&gpu, &Chunked { case: case.clone(), chunk: 16 }, &data);
        near(&got.o, &[0.567_994, 0.798_796, 0.811_853]);
        near(&got.states, &[1.827_109, 0.064_834]);

        let tensors = Uploaded::new(&gpu, &case, &data);
        let from = inputs(&tensors.inputs(&case));
        let ChunkInputs { q, k, v, g, beta, cu_seqlens, .. } = from;
        let mut sums = gpu.poisoned::<f32>([3, 1]);
        let (mut w, mut u) = (gpu.poisoned::<f32>([3, 1, 2]), gpu.poisoned::<f32>([3, 1, 1]));
        let inputs = WyInputs { k, v, g, gk: None, beta, cu_seqlens };
        let outputs = WyOutputs { sums: sums.view_mut(), w: w.view_mut(), u: u.view_mut(), kg: None };
        wy_representation(gpu.stream(), inputs, outputs, 16).unwrap();
        near(&gpu.download(&sums).data, &[-0.5, -0.75, -0.75]);
        near(&gpu.download(&w).data, &of_w);
        near(&gpu.download(&u).data, &of_u);

        let initial = gpu.upload(&data.states, [1, 1, 2, 1]);
        let mut last = gpu.poisoned::<f32>([1, 1, 2, 1]);
        let (mut h, mut v_new) = (gpu.poisoned::<f32>([1, 1, 2, 1]), gpu.poisoned::<f32>([3, 1, 1]));
        let (base, g) = (GateBase::Natural, Some(sums.view()));
        let inputs = DeltaInputs { k, w: w.view(), u: u.view(), g, gk: None, cu_seqlens, base };
        let states = States::Dense { initial: Some(initial.view()), last: Some(last.view_mut()) };
        let outputs = DeltaOutputs { h: Some(h.view_mut()), v_new: Some(v_new.view_mut()) };
        let options = DeltaOptions { chunk_size: 16, ..Default::default() };
        chunk_delta_h(gpu.stream(), inputs, states, outputs, options).unwrap();
        near(&gpu.download(&h).data, &data.states);
        near(&gpu.download(&v_new).data, &[0.196_735, 2.002_543, -1.064_834]);
        near(&gpu.download(&last).data, &[1.827_109, 0.064_834]);

        let mut o = gpu.poisoned::<f32>([3, 1, 1]);
        let (h, v_new) = (h.view(), v_new.view());
        let inputs = ChunkOutputInputs { q, k, v_new, h, g, gk: None, cu_seqlens, base };
        let options = ChunkOutputOptions { chunk_size: 16, ..Default::default() };
        chunk_o(gpu.stream(), inputs, o.view_mut(), options).unwrap();
        near(&gpu.download(&o).data, &[0.567_994, 0.798_796, 0.811_853]);
    }
    // The reference itself.
    let rows = |x: &'static [f64], n: usize| x.chunks(n).collect::<Vec<_>>();
    let head = ChunkHead {
        q: rows(&[1.0, 0.0, 0.0, 1.0, 0.6, 0.8], 2),
        k: rows(&[1.0, 0.0, 0.6, 0.8, 0.0, 1.0], 2),
        v: rows(&[1.0, 2.0, -1.0], 1),
        decay: [-0.5f64, -0.75, -0.75].map(f64::exp).to_vec(),
        beta: vec![0.5, 1.0, 0.5],
        ..ChunkHead::default()
    };
    let single = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
    let x = head.inverse();
    near(&single(&x), &[1.0, 0.0, 0.0, -0.467_280, 1.0, 0.0, 0.186_912, -0.4, 1.0]);
    let (w, u) = head.wy(&x, 3);
    near(&single(&w.concat()), &of_w);
    near(&single(&u.concat()), &of_u);
    let mut state = vec![1.0, -1.0];
    let of_states = ChunkHead {
        v: u.iter().map(|u| &u[..]).collect(),
        w: w.iter().map(|w| &w[..]).collect(),
        ..head.clone()
    };
    let new = of_states.states(&mut state);
    near(&single(&new.concat()), &[0.196_735, 2.002_543, -1.064_834]);
    near(&single(&state), &[1.827_109, 0.064_834]);
    let of_outputs = ChunkHead { v: new.iter().map(|v| &v[..]).collect(), ..head };
    near(
        &single(&of_outputs.outputs(&[1.0, -1.0], 0.5f64.sqrt()).concat()),
        &[0.567_994, 0.798_796, 0.811_853],
    );
}

/// The same with gates of rows: those of the example in f64, token by token.
#[test]
fn three_tokens_with_gates_of_rows_give_the_known_numbers() {
    let case = Case { l2norm: false, g: false, gk: true, ..Case::new(&[3], [1, 1], [2, 1]) };
    let data = Data::<f32, f32> {
        q: vec![1.0, 0.0, 0.0, 1.0, 0.6, 0.8],
        k: vec![1.0, 0.0, 0.6, 0.8, 0.0, 1.0],
        v: vec![1.0, 2.0, -1.0],
        g: vec![0.0; 3],
        gk: vec![-0.5, -0.25, -1.0, 0.0, 0.0, -0.75],
        gv: vec![0.0; 3],
        beta: vec![0.5, 1.0, 0.5],
        states: vec![1.0, -1.0],
    };
    for gpu in kit::devices() {
        for chunk in [16, 32, 64] {
            let got = chunked(&gpu, &Chunked { case: case.clone(), chunk }, &data);
            for (got, want) in [
                (got.o, [0.567_994, 0.832_823, 0.622_472].to_vec()),
                (got.states, vec![1.762_947, -0.221_826]),
            ] {
                assert!(
                    got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 2e-6),
                    "{got:?}, expected {want:?}"
                );
            }
        }
    }
}

/// Gates of rows as strong as they come: no exponent is positive, nothing overflows. One that is no logarithm of a decay poisons its chunk, all
/// later ones and the state; other sequences are as before.
#[test]
fn gates_of_rows_of_any_strength() {
    let case = Case { g: false, gk: true, ..Case::new(&[70, 20], [1, 1], [32, 16]) };
    for chunk in [16, 32, 64] {
        let of = Chunked { case: Case { strength: 300.0, ..case.clone() }, chunk };
        let mut data = Data::<f32, f32>::new(&of.case);
        data.gk[5 * 32 + 3] = f32::NEG_INFINITY;
        // No decay at all between tokens that decay by all.
        data.gk[20 * 32..30 * 32].fill(0.0);
        let want = reference(&of.case, &data);
        for gpu in kit::devices() {
            let got = chunked(&gpu, &of, &data);
            assert!(error(&got.o, &want.o) <= 5e-5 && error(&got.states, &want.states) <= 5e-5, "{chunk}");
        }
    }
    let of = Chunked { case, chunk: 16 };
    for bad in [1e-30f32, f32::NAN, f32::INFINITY] {
        let mut data = Data::<bf16, f32>::new(&of.case);
        let good = data.clone();
        data.gk[18 * 32 + 7] = bad;
        for gpu in kit::devices() {
            let (got, good) = (chunked(&gpu, &of, &data), chunked(&gpu, &of, &good));
            assert!(got.o[..16 * 16] == good.o[..16 * 16] && got.o[70 * 16..] == good.o[70 * 16..], "{bad}");
            assert!(got.o[18 * 16..70 * 16].iter().all(|x| x.is_nan()), "{bad}");
            let size = 32 * 16;
            assert!(
                got.states[..size].iter().any(|x| x.is_nan()) && got.states[size..] == good.states[size..]
            );
        }
    }
}

/// The operators one by one are the one of all, at the rounding of what lies between; gates of either base.
#[test]
fn steps_one_by_one_are_the_same() {
    let of = Chunked { case: Case { l2norm: false, ..Case::new(&[70, 33], [1, 2], [72, 40]) }, chunk: 64 };
    let data = Data::<f16, f32>::new(&of.case);
    let (tokens, heads, [k_dim, v_dim]) = (of.case.tokens(), of.case.heads[1], of.case.dims);
    for gpu in kit::devices() {
        let want = chunked(&gpu, &of, &data);
        let tensors = Uploaded::new(&gpu, &of.case, &data);
        let from = inputs(&tensors.inputs(&of.case));
        let ChunkInputs { q, k, v, g, beta, cu_seqlens, .. } = from;
        let stream = gpu.stream();
        for base in [GateBase::Natural, GateBase::Two] {
            let scale = if base == GateBase::Two { std::f32::consts::LOG2_E } else { 1.0 };
            let mut sums = gpu.poisoned::<f32>([tokens, heads]);
            let options = CumsumOptions { chunk_size: 64, scale, ..Default::default() };
            chunk_local_cumsum(stream, g.unwrap(), cu_seqlens, sums.view_mut(), options).unwrap();
            let g = Some(sums.view());
            let mut a = gpu.poisoned::<f32>([tokens, heads, 64]);
            let inputs = KktInputs { k, g, beta, cu_seqlens, base };
            chunk_scaled_dot_kkt(stream, inputs, a.view_mut()).unwrap();
            let mut x = gpu.poisoned::<f16>([tokens, heads, 64]);
            solve_tril(stream, a.view(), cu_seqlens, x.view_mut()).unwrap();
            let (mut w, mut u) =
                (gpu.poisoned::<f16>([tokens, heads, k_dim]), gpu.poisoned::<f16>([tokens, heads, v_dim]));
            let inputs = RecomputeInputs { k, v, beta, x: x.view(), g, cu_seqlens, base };
            recompute_w_u(stream, inputs, w.view_mut(), u.view_mut()).unwrap();
            for h_layout in [StateLayout::Kv, StateLayout::Vk] {
                let [rows, cols] = if h_layout == StateLayout::Kv { [k_dim, v_dim] } else { [v_dim, k_dim] };
                let chunks = tokens / 64 + 2;
                let mut h = gpu.poisoned::<f16>([chunks, heads, rows, cols]);
                let mut v_new = gpu.poisoned::<f16>([tokens, heads, v_dim]);
                let initial = gpu.upload(&data.stored(&of.case), of.case.state());
                let mut last = gpu.poisoned::<f32>(of.case.state());
                let inputs = DeltaInputs { k, w: w.view(), u: u.view(), g, gk: None, cu_seqlens, base };
                let states = States::Dense { initial: Some(initial.view()), last: Some(last.view_mut()) };
                let outputs = DeltaOutputs { h: Some(h.view_mut()), v_new: Some(v_new.view_mut()) };
                let options = DeltaOptions { h_layout, ..Default::default() };
                chunk_delta_h(stream, inputs, states, outputs, options).unwrap();
                let mut o = gpu.poisoned::<f16>([tokens, heads, v_dim]);
                let (h, v_new) = (h.view(), v_new.view());
                let inputs = ChunkOutputInputs { q, k, v_new, h, g, gk: None, cu_seqlens, base };
                let options = ChunkOutputOptions { h_layout, ..Default::default() };
                chunk_o(stream, inputs, o.view_mut(), options).unwrap();
                let wide = |x: &[f16]| x.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
                let of_states: Vec<f64> = want.states.iter().map(|x| f64::from(*x)).collect();
                let errors = [
                    relative(&gpu.download(&o).data, &wide(&want.o)),
                    relative(&gpu.download(&last).data, &of_states),
                ];
                assert!(errors.iter().all(|e| *e < 2e-3), "{errors:?} of {base:?}, {h_layout:?}");
            }
        }
    }
}

/// The same with gates of rows: wy_representation, chunk_delta_h and chunk_o one by one.
#[test]
fn steps_with_gates_of_rows_are_the_same() {
    let case = Case { l2norm: false, g: false, gk: true, ..Case::new(&[70, 33], [1, 2], [72, 40]) };
    let of = Chunked { case, chunk: 64 };
    let data = Data::<f16, f32>::new(&of.case);
    let (tokens, heads, [k_dim, v_dim]) = (of.case.tokens(), of.case.heads[1], of.case.dims);
    for gpu in kit::devices() {
        let want = chunked(&gpu, &of, &data);
        let tensors = Uploaded::new(&gpu, &of.case, &data);
        let ChunkInputs { q, k, v, gk, beta, cu_seqlens, .. } = inputs(&tensors.inputs(&of.case));
        let (stream, base) = (gpu.stream(), GateBase::Natural);
        let mut sums = gpu.poisoned::<f32>([tokens, heads, k_dim]);
        let [mut w, mut kg] = [(); 2].map(|()| gpu.poisoned::<f16>([tokens, heads, k_dim]));
        let [mut u, mut v_new, mut o] = [(); 3].map(|()| gpu.poisoned::<f16>([tokens, heads, v_dim]));
        let outputs =
            WyOutputs { sums: sums.view_mut(), w: w.view_mut(), u: u.view_mut(), kg: Some(kg.view_mut()) };
        let inputs = WyInputs { k, v, g: None, gk, beta, cu_seqlens };
        wy_representation(stream, inputs, outputs, 64).unwrap();
        let gk = Some(sums.view());
        let mut h = gpu.poisoned::<f16>([tokens / 64 + 2, heads, v_dim, k_dim]);
        let initial = gpu.upload(&data.stored(&of.case), of.case.state());
        let mut last = gpu.poisoned::<f32>(of.case.state());
        let inputs = DeltaInputs { k: kg.view(), w: w.view(), u: u.view(), g: None, gk, cu_seqlens, base };
        let states = States::Dense { initial: Some(initial.view()), last: Some(last.view_mut()) };
        let outputs = DeltaOutputs { h: Some(h.view_mut()), v_new: Some(v_new.view_mut()) };
        let options = DeltaOptions { h_layout: StateLayout::Vk, ..Default::default() };
        chunk_delta_h(stream, inputs, states, outputs, options).unwrap();
        let inputs =
            ChunkOutputInputs { q, k, v_new: v_new.view(), h: h.view(), g: None, gk, cu_seqlens, base };
        let options = ChunkOutputOptions { h_layout: StateLayout::Vk, ..Default::default() };
        chunk_o(stream, inputs, o.view_mut(), options).unwrap();
        assert!(gpu.download(&o).data == want.o && gpu.download(&last).data == want.states);
    }
}

/// Outputs of whole chunks by a wave, on a device of few compute units, have the bits of those of 32 tokens.
#[test]
fn waves_of_whole_chunks_have_the_same_bits() {
    for (l2norm, layout, dims, lengths) in [
        (true, StateLayout::Kv, [128, 128], &[64, 70, 1, 0, 33][..]),
        (false, StateLayout::Vk, [72, 136], &[129, 48]),
        (true, StateLayout::Vk, [256, 40], &[16, 65]),
    ] {
        let of = Chunked { case: Case { l2norm, layout, ..Case::new(lengths, [1, 2], dims) }, chunk: 64 };
        let bits = |spec: &str| {
            let gpu = Gpu::open(spec);
            let data = Data::<bf16, f32>::new(&of.case);
            let both = (chunked(&gpu, &of, &data), chunked(&gpu, &of, &Data::<f16, f32>::new(&of.case)));
            let kernels = gpu.stream().device().loaded_kernels();
            let count = |name: &str| kernels.iter().filter(|k| k.name() == name).count();
            (both, [count("outputs_bf16_64"), count("outputs_bf16"), count("outputs_f16_64")])
        };
        for arch in ["gfx942", "gfx950"] {
            let (parts, of_parts) = bits(&format!("emu:{arch}?cus=1000"));
            let (whole, of_whole) = bits(&format!("emu:{arch}?cus=1"));
            assert_eq!((of_parts, of_whole), ([0, 1, 0], [1, 0, 1]));
            assert!(parts == whole, "{of:?} on {arch}");
        }
    }
}

/// A prompt takes three launches, four with gates of rows; LDS conflicts take 5 % of its clocks at most.
#[test]
fn prompts_take_three_launches_or_four() {
    for arch in ["gfx942", "gfx950"] {
        let gpu = Gpu::open(&format!("emu:{arch}?details=true&cus=500"));
        for (gk, want) in [
            (false, &["prepare_bf16", "states_bf16_128", "outputs_bf16"][..]),
            (
                true,
                &[
                    "sums_channels",
                    "prepare_bf16_channels",
                    "states_bf16_128_channels",
                    "outputs_bf16_channels",
                ],
            ),
        ] {
            let case = Case { g: !gk, gk, ..Case::new(&[70, 33], [1, 2], [128, 128]) };
            let of = Chunked { case, chunk: 64 };
            gpu.stream().take_profiles().unwrap();
            chunked(&gpu, &of, &Data::<bf16, f32>::new(&of.case));
            let profiles = gpu.stream().take_profiles().unwrap();
            let kernels: Vec<&str> = profiles.iter().map(|profile| &*profile.kernel).collect();
            assert_eq!(kernels, want, "{arch}");
            for profile in &profiles {
                let details = profile.counters.details.unwrap();
                let (clocks, conflicts) = (details.lds_clocks, details.lds_conflict_clocks);
                assert!(21 * conflicts <= clocks, "{arch}, {}: {conflicts} of {clocks}", profile.kernel);
                assert_eq!(profile.launches, 1, "{arch}, {}", profile.kernel);
            }
        }
    }
}

const POOL: usize = 9;

/// A call with slots; and the pool before it.
fn pooled(gpu: &Gpu, of: &Chunked, slots: &[i32]) -> (Output<bf16, f32>, Vec<f32>) {
    let case = &of.case;
    let data = Data::<bf16, f32>::new(case);
    let tensors = Uploaded::new(gpu, case, &data);
    let [n, heads, rows, inner] = case.state();
    let size = heads * rows * inner;
    let values: Vec<f32> = Fill::Normal.elements(POOL * size, case.seed ^ 77);
    // Slots with a gap.
    let strides = [size + 4, rows * inner, inner, 1];
    let place = Place::new(Layout::with_strides([POOL, heads, rows, inner], strides).unwrap());
    let mut pool = gpu.upload(&values, place);
    let indices = gpu.upload(slots, [n]);
    let mut o = gpu.poisoned::<bf16>(case.place(case.heads[1], case.dims[1]));
    let states = States::Pool { pool: pool.view_mut(), indices: indices.view(), accepted: None };
    call(gpu, &tensors.inputs(case), states, o.view_mut(), of.options());
    gpu.assert_guards(&pool);
    gpu.assert_guards(&o);
    (Output { o: gpu.download(&o).data, states: gpu.download(&pool).data }, values)
}

/// Slots that are named are updated, others stay; a slot beyond the pool poisons its sequence alone.
#[test]
fn pools_are_updated_in_place() {
    for layout in [StateLayout::Kv, StateLayout::Vk] {
        let of = Chunked { case: Case { layout, ..Case::new(&[70, 3, 0, 20], [1, 2], [24, 40]) }, chunk: 32 };
        let [_, heads, rows, inner] = of.case.state();
        let (size, width) = (heads * rows * inner, of.case.heads[1] * of.case.dims[1]);
        for gpu in kit::devices() {
            let (got, before) = pooled(&gpu, &of, &[7, -1, 4, 2]);
            let start = |slot: usize| before[slot * size..][..size].to_vec();
            let as_kv = |s: Vec<f32>| {
                exchanged(&s, if layout == StateLayout::Vk { [40, 24] } else { [24, 40] }, layout)
            };
            let mut data = Data::<bf16, f32>::new(&of.case);
            data.states = [as_kv(start(7)), vec![0.0; size], as_kv(start(4)), as_kv(start(2))].concat();
            let want = chunked(&gpu, &of, &data);
            assert_eq!(got.o, want.o);
            let kept = stored(&want.states, &of.case);
            for slot in 0..POOL {
                let of = match slot {
                    7 => kept[..size].to_vec(),
                    2 => kept[3 * size..].to_vec(),
                    _ => start(slot),
                };
                assert!(got.states[slot * size..][..size] == of, "slot {slot}");
            }
            for beyond in [POOL as i32, i32::MAX] {
                let (bad, _) = pooled(&gpu, &of, &[beyond, -1, 4, 2]);
                assert!(bad.o[..70 * width].iter().all(|x| x.is_nan()), "{beyond}");
                assert!(bad.o[70 * width..] == got.o[70 * width..]);
                assert!(
                    bad.states[7 * size..][..size] == start(7)
                        && bad.states[..2 * size] == before[..2 * size]
                );
            }
        }
    }
}

/// Tokens out of range are NaN where they are tokens; nothing is read or written beyond, and no state of theirs.
#[test]
fn packed_sequences_out_of_range_are_nan() {
    let of = Chunked::new(&[20, 20, 20], [1, 2], [16, 24], 16);
    let data = Data::<bf16, f32>::new(&of.case);
    let width = of.case.heads[1] * of.case.dims[1];
    let size = data.states.len() / 3;
    for gpu in kit::devices() {
        let good = chunked(&gpu, &of, &data);
        for (starts, poisoned, bad) in
            [([0, 20, 40, 61], 40..60, 2), ([-1, 20, 40, 60], 0..20, 0), ([0, 20, 60, i32::MIN], 0..0, 2)]
        {
            let mut tensors = Uploaded::new(&gpu, &of.case, &data);
            tensors.starts = gpu.upload(&starts, [4]);
            let initial = gpu.upload(&data.stored(&of.case), of.case.state());
            let mut last = gpu.upload(&vec![7.5f32; 3 * size], of.case.state());
            let mut o = gpu.poisoned::<bf16>(of.case.place(2, 24));
            let states = States::Dense { initial: Some(initial.view()), last: Some(last.view_mut()) };
            call(&gpu, &tensors.inputs(&of.case), states, o.view_mut(), of.options());
            gpu.assert_guards(&o);
            let got = gpu.download(&o).data;
            for t in 0..60 {
                let row = &got[t * width..][..width];
                if poisoned.contains(&t) {
                    assert!(row.iter().all(|x| x.is_nan()), "{starts:?}: token {t}");
                } else if t < 20 {
                    assert!(row == &good.o[t * width..][..width], "{starts:?}: token {t}");
                }
            }
            let last = gpu.download(&last).data;
            assert!(last[bad * size..][..size].iter().all(|x| *x == 7.5), "{starts:?}");
        }
    }
}

/// Gates that are no logarithms of decays poison their chunk, all later ones and the state; other sequences are as before.
#[test]
fn gates_that_are_positive_or_nan_give_nan() {
    let of = Chunked::new(&[40, 20], [1, 1], [16, 16], 16);
    for bad in [1e-30f32, 3.0, f32::NAN, f32::INFINITY] {
        let mut data = Data::<bf16, f32>::new(&of.case);
        let good = data.clone();
        data.g[18] = bad;
        for gpu in kit::devices() {
            let (got, good) = (chunked(&gpu, &of, &data), chunked(&gpu, &of, &good));
            assert!(got.o[..16 * 16] == good.o[..16 * 16] && got.o[40 * 16..] == good.o[40 * 16..], "{bad}");
            assert!(got.o[18 * 16..40 * 16].iter().all(|x| x.is_nan()), "{bad}");
            assert!(got.states[..256].iter().all(|x| x.is_nan()) && got.states[256..] == good.states[256..]);
        }
    }
    // All of the decay.
    let mut data = Data::<f32, f32>::new(&of.case);
    data.g[5] = f32::NEG_INFINITY;
    data.g[20] = -1e30;
    let want = reference(&of.case, &data);
    for gpu in kit::devices() {
        let got = chunked(&gpu, &of, &data);
        assert!(error(&got.o, &want.o) <= 5e-5 && error(&got.states, &want.states) <= 5e-5);
    }
}

/// The final states may be the initial ones; a graph of the call does what the call does.
#[test]
fn states_in_place_and_graphs() {
    let of = Chunked::new(&[70, 0, 20], [1, 2], [128, 64], 64);
    let data = Data::<bf16, f32>::new(&of.case);
    for gpu in kit::devices() {
        let want = chunked(&gpu, &of, &data);
        let tensors = Uploaded::new(&gpu, &of.case, &data);
        let mut states = gpu.upload(&data.stored(&of.case), of.case.state());
        let mut o = gpu.poisoned::<bf16>(of.case.place(2, 64));
        let bytes = inputs(&tensors.inputs(&of.case)).workspace_bytes(of.options()).unwrap();
        let mut workspace = gpu.poisoned::<u8>([bytes]);
        let mut run = || {
            let last = states.view_mut();
            let both = States::Dense { initial: Some(last.alias()), last: Some(last) };
            let inputs = inputs(&tensors.inputs(&of.case));
            chunk_gated_delta_rule(
                gpu.stream(),
                inputs,
                both,
                workspace.view_mut(),
                o.view_mut(),
                of.options(),
            )
        };
        let graph = gpu.stream().capture(&mut run).unwrap();
        // SAFETY: all tensors are alive, and only this thread uses them.
        unsafe { graph.launch(gpu.stream()).unwrap() };
        assert!(gpu.download(&o).data == want.o);
        assert!(gpu.download(&states).data == want.states);
    }
}

/// What is given to one of the operators.
#[derive(Debug, Clone, Copy)]
struct Options {
    scale: Option<f32>,
    chunk: usize,
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let given = Options { scale: None, chunk: 64 };
    let table = Refusals::new(given, |stream, tensors, Options { scale, chunk }| {
        let inputs = ChunkInputs::<bf16> {
            q: tensors.input("q"),
            k: tensors.input("k"),
            v: tensors.input("v"),
            g: tensors.optional_input("g"),
            gk: tensors.optional_input("gk"),
            beta: tensors.input("beta"),
            cu_seqlens: None,
        };
        let states: States<f32> = States::Dense {
            initial: tensors.optional_input("initial_state"),
            last: Some(tensors.output("final_state")),
        };
        let options = ChunkOptions { scale, chunk_size: chunk, ..Default::default() };
        let (workspace, o) = (tensors.output("workspace"), tensors.output("o"));
        chunk_gated_delta_rule(stream, inputs, states, workspace, o, options)
    });
    table
        .input::<bf16>("q", [1, 40, 2, 16])
        .input::<bf16>("k", [1, 40, 2, 16])
        .input::<bf16>("v", [1, 40, 4, 8])
        .input::<f32>("g", [1, 40, 4])
        .input::<f32>("beta", [1, 40, 4])
        .input::<f32>("initial_state", [1, 4, 16, 8])
        .output::<f32>("final_state", [1, 4, 16, 8])
        .output::<u8>("workspace", [1 << 16])
        .output::<bf16>("o", [1, 40, 4, 8])
        .accepts(|_| {})
        .accepts(|call| call.without("g"))
        .accepts(|call| call.without("initial_state"))
        .accepts(|call| call.overlap("initial_state", "final_state", 0))
        .refuses(kind!(Unsupported), &["chunk_gated_delta_rule: C = 48"], |call| call.options.chunk = 48)
        .refuses(kind!(Unsupported), &["C = 0"], |call| call.options.chunk = 0)
        .refuses(kind!(Argument), &["scale"], |call| call.options.scale = Some(-1.0))
        .refuses(kind!(Argument), &["scale"], |call| call.options.scale = Some(f32::NAN))
        .refuses(kind!(Unsupported), &["K = 257"], |call| {
            call.shape("q", [1, 40, 2, 257]);
            call.shape("k", [1, 40, 2, 257]);
        })
        .refuses(kind!(Shape), &["q: shape [40, 2, 16]"], |call| call.shape("q", [40, 2, 16]))
        .refuses(kind!(Shape), &["k: shape [1, 40, 1, 16]"], |call| call.shape("k", [1, 40, 1, 16]))
        .refuses(kind!(Shape), &["v: shape [1, 40, 3, 8]", "multiple of 2"], |call| {
            call.shape("v", [1, 40, 3, 8])
        })
        .refuses(kind!(Shape), &["g: shape [1, 40, 2]"], |call| call.shape("g", [1, 40, 2]))
        .refuses(kind!(Shape), &["beta: shape [1, 41, 4]"], |call| call.shape("beta", [1, 41, 4]))
        .refuses(kind!(Shape), &["initial_state"], |call| call.shape("initial_state", [1, 4, 8, 16]))
        .refuses(kind!(Shape), &["final_state"], |call| call.shape("final_state", [2, 4, 16, 8]))
        .refuses(kind!(Shape), &["o: shape"], |call| call.shape("o", [1, 40, 4, 16]))
        .refuses(kind!(Shape), &["workspace: shape [1000]", "workspace_bytes"], |call| {
            call.shape("workspace", [1000])
        })
        .refuses(kind!(Align), &["workspace"], |call| {
            call.place("workspace", Place::contiguous([1 << 16]).shifted(1));
        })
        .refuses(kind!(Stride), &["v"], |call| call.strides("v", [2560, 64, 16, 2]))
        .refuses(kind!(Stride), &["g"], |call| call.strides("g", [320, 8, 2]))
        .refuses(kind!(Overlap), &["v and o"], |call| call.overlap("v", "o", 0))
        .refuses_other_devices();
}

/// Gates of rows instead of those of states.
#[test]
fn gates_are_of_states_or_of_rows() {
    let table = Refusals::new((), |stream, tensors, ()| {
        let inputs = ChunkInputs::<bf16> {
            q: tensors.input("q"),
            k: tensors.input("k"),
            v: tensors.input("v"),
            g: tensors.optional_input("g"),
            gk: Some(tensors.input("gk")),
            beta: tensors.input("beta"),
            cu_seqlens: None,
        };
        let states: States<f32> = States::Dense { initial: None, last: None };
        let (workspace, o) = (tensors.output("workspace"), tensors.output("o"));
        chunk_gated_delta_rule(stream, inputs, states, workspace, o, ChunkOptions::default())
    });
    table
        .input::<bf16>("q", [1, 40, 2, 16])
        .input::<bf16>("k", [1, 40, 2, 16])
        .input::<bf16>("v", [1, 40, 4, 8])
        .input::<f32>("g", [1, 40, 4])
        .input::<f32>("gk", [1, 40, 4, 16])
        .input::<f32>("beta", [1, 40, 4])
        .output::<u8>("workspace", [1 << 17])
        .output::<bf16>("o", [1, 40, 4, 8])
        .accepts(|call| call.without("g"))
        .refuses(kind!(Argument), &["chunk_gated_delta_rule: g: given, expected nothing beside gk"], |_| {})
        .refuses(kind!(Shape), &["gk: shape [1, 40, 4, 8]"], |call| {
            call.without("g");
            call.shape("gk", [1, 40, 4, 8]);
        })
        .refuses(kind!(Stride), &["gk"], |call| {
            call.without("g");
            call.strides("gk", [5120, 128, 32, 2]);
        })
        .refuses(kind!(Overlap), &["k and o"], |call| {
            call.without("g");
            call.overlap("k", "o", 0);
        });
}

/// One state a sequence: neither several slots, nor a choice of them.
#[test]
fn slots_are_one_a_sequence() {
    let table = Refusals::new((), |stream, tensors, ()| {
        let inputs = ChunkInputs::<bf16> {
            q: tensors.input("q"),
            k: tensors.input("k"),
            v: tensors.input("v"),
            g: None,
            gk: None,
            beta: tensors.input("beta"),
            cu_seqlens: Some(tensors.input("cu_seqlens")),
        };
        let states: States<f32> = States::Pool {
            pool: tensors.output("state_pool"),
            indices: tensors.input("state_indices"),
            accepted: tensors.optional_input("num_accepted_tokens"),
        };
        let (workspace, o) = (tensors.output("workspace"), tensors.output("o"));
        chunk_gated_delta_rule(stream, inputs, states, workspace, o, ChunkOptions::default())
    });
    table
        .input::<bf16>("q", [40, 2, 16])
        .input::<bf16>("k", [40, 2, 16])
        .input::<bf16>("v", [40, 4, 8])
        .input::<f32>("beta", [40, 4])
        .input::<i32>("cu_seqlens", [3])
        .output::<f32>("state_pool", [5, 4, 16, 8])
        .input::<i32>("state_indices", [2])
        .output::<u8>("workspace", [1 << 16])
        .output::<bf16>("o", [40, 4, 8])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["state_indices: shape [2, 2]", "[2]"], |call| {
            call.shape("state_indices", [2, 2])
        })
        .refuses(kind!(Shape), &["state_indices: shape [3]"], |call| call.shape("state_indices", [3]))
        .refuses(kind!(Shape), &["state_pool"], |call| call.shape("state_pool", [5, 4, 8, 16]))
        .refuses(kind!(Shape), &["cu_seqlens: shape [0]"], |call| call.shape("cu_seqlens", [0]))
        .refuses(kind!(Overlap), &["beta and state_pool"], |call| call.overlap("beta", "state_pool", 3));
}

#[test]
fn wrong_arguments_of_the_steps_are_refused_by_name() {
    let recompute = Refusals::new((), |stream, tensors, ()| {
        let inputs = RecomputeInputs::<bf16> {
            k: tensors.input("k"),
            v: tensors.input("v"),
            beta: tensors.input("beta"),
            x: tensors.input("x"),
            g: tensors.optional_input("g"),
            cu_seqlens: None,
            base: GateBase::Natural,
        };
        recompute_w_u(stream, inputs, tensors.output("w"), tensors.output("u"))
    });
    recompute
        .input::<bf16>("k", [1, 40, 2, 16])
        .input::<bf16>("v", [1, 40, 4, 8])
        .input::<f32>("beta", [1, 40, 4])
        .input::<bf16>("x", [1, 40, 4, 32])
        .input::<f32>("g", [1, 40, 4])
        .output::<bf16>("w", [1, 40, 4, 16])
        .output::<bf16>("u", [1, 40, 4, 8])
        .accepts(|_| {})
        .refuses(kind!(Unsupported), &["recompute_w_u: C = 8"], |call| call.shape("x", [1, 40, 4, 8]))
        .refuses(kind!(Shape), &["x: shape [1, 40, 2, 32]"], |call| call.shape("x", [1, 40, 2, 32]))
        .refuses(kind!(Shape), &["w: shape [1, 40, 2, 16]"], |call| call.shape("w", [1, 40, 2, 16]))
        .refuses(kind!(Shape), &["u: shape"], |call| call.shape("u", [1, 40, 4, 16]))
        .refuses(kind!(Align), &["x"], |call| call.place("x", Place::contiguous([1, 40, 4, 32]).shifted(1)))
        .refuses(kind!(Stride), &["k"], |call| call.strides("k", [2560, 64, 32, 2]))
        .refuses(kind!(Overlap), &["v and w"], |call| call.overlap("v", "w", 0))
        .refuses_other_devices();

    let wy = Refusals::new((), |stream, tensors, ()| {
        let inputs = WyInputs::<bf16> {
            k: tensors.input("k"),
            v: tensors.input("v"),
            g: tensors.optional_input("g"),
            gk: tensors.optional_input("gk"),
            beta: tensors.input("beta"),
            cu_seqlens: None,
        };
        let outputs = WyOutputs {
            sums: tensors.output("sums"),
            w: tensors.output("w"),
            u: tensors.output("u"),
            kg: None,
        };
        wy_representation(stream, inputs, outputs, 64)
    });
    wy.input::<bf16>("k", [1, 40, 2, 16])
        .input::<bf16>("v", [1, 40, 4, 8])
        .input::<f32>("g", [1, 40, 4])
        .input::<f32>("beta", [1, 40, 4])
        .output::<f32>("sums", [1, 40, 4])
        .output::<bf16>("w", [1, 40, 4, 16])
        .output::<bf16>("u", [1, 40, 4, 8])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["wy_representation: sums: shape [1, 40, 2]"], |call| {
            call.shape("sums", [1, 40, 2])
        })
        .refuses(kind!(Stride), &["sums"], |call| call.strides("sums", [320, 8, 2]))
        .refuses(kind!(Overlap), &["g and sums"], |call| call.overlap("g", "sums", 0))
        .refuses_other_devices();

    let delta = Refusals::new((), |stream, tensors, ()| {
        let inputs = DeltaInputs::<bf16> {
            k: tensors.input("k"),
            w: tensors.input("w"),
            u: tensors.input("u"),
            g: tensors.optional_input("g"),
            gk: None,
            cu_seqlens: None,
            base: GateBase::Natural,
        };
        let states: States<f32> = States::Dense { initial: None, last: None };
        let outputs = DeltaOutputs { h: Some(tensors.output("h")), v_new: Some(tensors.output("v_new")) };
        chunk_delta_h(stream, inputs, states, outputs, DeltaOptions::default())
    });
    delta
        .input::<bf16>("k", [1, 70, 2, 16])
        .input::<bf16>("w", [1, 70, 4, 16])
        .input::<bf16>("u", [1, 70, 4, 8])
        .input::<f32>("g", [1, 70, 4])
        .output::<bf16>("h", [1, 2, 4, 16, 8])
        .output::<bf16>("v_new", [1, 70, 4, 8])
        .accepts(|_| {})
        .accepts(|call| call.overlap("u", "v_new", 0))
        .refuses(kind!(Shape), &["chunk_delta_h: u: shape [1, 70, 3, 8]"], |call| {
            call.shape("u", [1, 70, 3, 8])
        })
        .refuses(kind!(Shape), &["w: shape [1, 70, 2, 16]"], |call| call.shape("w", [1, 70, 2, 16]))
        .refuses(kind!(Shape), &["h: shape [1, 1, 4, 16, 8]"], |call| call.shape("h", [1, 1, 4, 16, 8]))
        .refuses(kind!(Shape), &["v_new"], |call| call.shape("v_new", [1, 70, 4, 16]))
        .refuses(kind!(Stride), &["h"], |call| call.strides("h", [4096, 2048, 512, 32, 2]))
        .refuses(kind!(Overlap), &["u and v_new"], |call| call.overlap("u", "v_new", 8))
        .refuses_other_devices();

    let outputs = Refusals::new((), |stream, tensors, ()| {
        let inputs = ChunkOutputInputs::<bf16> {
            q: tensors.input("q"),
            k: tensors.input("k"),
            v_new: tensors.input("v_new"),
            h: tensors.input("h"),
            g: tensors.optional_input("g"),
            gk: None,
            cu_seqlens: None,
            base: GateBase::Natural,
        };
        chunk_o(stream, inputs, tensors.output("o"), ChunkOutputOptions::default())
    });
    outputs
        .input::<bf16>("q", [1, 70, 2, 16])
        .input::<bf16>("k", [1, 70, 2, 16])
        .input::<bf16>("v_new", [1, 70, 4, 8])
        .input::<bf16>("h", [1, 2, 4, 16, 8])
        .input::<f32>("g", [1, 70, 4])
        .output::<bf16>("o", [1, 70, 4, 8])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["chunk_o: h: shape [1, 2, 2, 16, 8]"], |call| {
            call.shape("h", [1, 2, 2, 16, 8])
        })
        .refuses(kind!(Shape), &["o: shape"], |call| call.shape("o", [1, 70, 4, 16]))
        .refuses(kind!(Align), &["h"], |call| call.place("h", Place::contiguous([1, 2, 4, 16, 8]).shifted(1)))
        .refuses(kind!(Overlap), &["v_new and o"], |call| call.overlap("v_new", "o", 0))
        .refuses_other_devices();
}
