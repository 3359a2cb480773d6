//! `fused_recurrent` against f64, and the laws of the recurrence.

use hk_core::{DType, Float, Layout, TensorViewMut, bf16, f16};
use hk_gdr::reference::{Head, Token};
use hk_gdr::{Gates, RecurrentInputs, RecurrentOptions, StateElement, StateLayout, States, fused_recurrent};
use hk_testkit::{self as kit, Fill, Gpu, Place, Tensor, proptest::prelude::*, widen};

/// Sequences of some lengths, packed or all alike.
#[derive(Debug, Clone)]
pub struct Case {
    pub lengths: Vec<usize>,
    pub packed: bool,
    pub heads: [usize; 2],
    pub dims: [usize; 2],
    pub layout: StateLayout,
    pub l2norm: bool,
    pub scale: Option<f32>,
    pub g: bool,
    pub gk: bool,
    pub gv: bool,
    /// Values of a token and head: 0, 1, or one a column.
    pub beta: usize,
    /// Factor of the logarithms of decays.
    pub strength: f32,
    pub initial: bool,
    /// Elements between heads.
    pub gap: usize,
    /// Misalignment of q, k, v, o.
    pub shift: usize,
    pub seed: u64,
}

impl Case {
    pub fn new(lengths: &[usize], heads: [usize; 2], dims: [usize; 2]) -> Self {
        Self {
            lengths: lengths.to_vec(),
            packed: true,
            heads,
            dims,
            layout: StateLayout::Kv,
            l2norm: true,
            scale: None,
            g: true,
            gk: false,
            gv: false,
            beta: 1,
            strength: 1.0,
            initial: true,
            gap: 0,
            shift: 0,
            seed: 1,
        }
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Axes before heads.
    fn rows(&self) -> Vec<usize> {
        if self.packed { vec![self.tokens()] } else { vec![self.lengths.len(), self.lengths[0]] }
    }

    fn shape(&self, rest: &[usize]) -> Vec<usize> {
        [&self.rows(), rest].concat()
    }

    /// Heads of `dim` elements, with a gap between them.
    pub fn place(&self, heads: usize, dim: usize) -> Place {
        let shape = self.shape(&[heads, dim]);
        let mut strides = vec![1; shape.len()];
        let mut next = dim + self.gap;
        for axis in (0..shape.len() - 1).rev() {
            strides[axis] = next;
            next *= shape[axis].max(1);
        }
        Place::new(Layout::with_strides(shape, strides).unwrap()).shifted(self.shift)
    }

    pub fn state(&self) -> [usize; 4] {
        let ([_, heads], [k, v]) = (self.heads, self.dims);
        match self.layout {
            StateLayout::Kv => [self.lengths.len(), heads, k, v],
            StateLayout::Vk => [self.lengths.len(), heads, v, k],
        }
    }

    pub fn options(&self) -> RecurrentOptions {
        RecurrentOptions { scale: self.scale, qk_l2norm: self.l2norm, layout: self.layout }
    }
}

/// The tensors of a case; states in order `K, V`.
#[derive(Debug, Clone)]
pub struct Data<T, S> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub g: Vec<f32>,
    pub gk: Vec<f32>,
    pub gv: Vec<f32>,
    pub beta: Vec<f32>,
    pub states: Vec<S>,
}

impl<T: Float, S: Float> Data<T, S> {
    pub fn new(case: &Case) -> Self {
        let ([k_heads, v_heads], [k_dim, v_dim]) = (case.heads, case.dims);
        let n = case.tokens();
        let normal = |len: usize, stream: u64| Fill::Normal.elements::<f32>(len, case.seed ^ stream << 32);
        // Keys that are not normalised have norms of about one.
        let width = if case.l2norm { 1.0 } else { 1.0 / (k_dim as f32).sqrt() };
        let keys =
            |stream| normal(n * k_heads * k_dim, stream).iter().map(|x| T::from_f32(x * width)).collect();
        let gates = |len: usize, stream| -> Vec<f32> {
            normal(len, stream).iter().map(|x| -case.strength * 0.3 * x.abs()).collect()
        };
        let size = v_heads * k_dim * v_dim;
        Self {
            q: keys(1),
            k: keys(2),
            v: normal(n * v_heads * v_dim, 3).iter().map(|x| T::from_f32(*x)).collect(),
            g: gates(n * v_heads, 4),
            gk: gates(n * v_heads * k_dim, 5),
            gv: gates(n * v_heads * v_dim, 6),
            beta: normal(n * v_heads * if case.beta == 1 { 1 } else { v_dim }, 7)
                .iter()
                .map(|x| 1.0 / (1.0 + x.exp()))
                .collect(),
            states: normal(case.lengths.len() * size, 8).iter().map(|x| S::from_f32(*x)).collect(),
        }
    }

    /// The states as they lie in memory.
    pub fn stored(&self, case: &Case) -> Vec<S> {
        stored(&self.states, case)
    }
}

/// States in order `K, V` as they lie in memory, or back.
pub fn stored<S: Copy>(states: &[S], case: &Case) -> Vec<S> {
    exchanged(states, case.dims, case.layout)
}

pub fn exchanged<S: Copy>(states: &[S], [rows, cols]: [usize; 2], layout: StateLayout) -> Vec<S> {
    if layout == StateLayout::Kv {
        return states.to_vec();
    }
    let transposed = |s: &[S]| (0..rows * cols).map(|i| s[i % rows * cols + i / rows]).collect::<Vec<_>>();
    states.chunks(rows * cols).flat_map(transposed).collect()
}

/// What a call gives: `o`, and the final states in order `K, V`.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T, S> {
    pub o: Vec<T>,
    pub states: Vec<S>,
}

impl<T: Float, S: Float> Output<T, S> {
    pub fn bits(&self) -> (Vec<u64>, Vec<u64>) {
        (
            self.o.iter().map(|x| x.to_f64().to_bits()).collect(),
            self.states.iter().map(|x| x.to_f64().to_bits()).collect(),
        )
    }
}

pub struct Uploaded<T: Float> {
    q: Tensor<T>,
    k: Tensor<T>,
    v: Tensor<T>,
    g: Tensor<f32>,
    gk: Tensor<f32>,
    gv: Tensor<f32>,
    beta: Tensor<f32>,
    pub starts: Tensor<i32>,
}

impl<T: Float> Uploaded<T> {
    pub fn new<S>(gpu: &Gpu, case: &Case, data: &Data<T, S>) -> Self {
        let ([k_heads, v_heads], [k_dim, v_dim]) = (case.heads, case.dims);
        let plain = |rest: &[usize]| Place::contiguous(case.shape(rest));
        let mut ends = vec![0];
        case.lengths.iter().for_each(|n| ends.push(ends[ends.len() - 1] + *n as i32));
        let beta = if case.beta == 1 { plain(&[v_heads]) } else { plain(&[v_heads, v_dim]) };
        Self {
            q: gpu.upload(&data.q, case.place(k_heads, k_dim)),
            k: gpu.upload(&data.k, case.place(k_heads, k_dim)),
            v: gpu.upload(&data.v, case.place(v_heads, v_dim)),
            g: gpu.upload(&data.g, plain(&[v_heads])),
            gk: gpu.upload(&data.gk, plain(&[v_heads, k_dim])),
            gv: gpu.upload(&data.gv, plain(&[v_heads, v_dim])),
            beta: gpu.upload(&data.beta, beta),
            starts: gpu.upload(&ends, [ends.len()]),
        }
    }

    pub fn inputs(&self, case: &Case) -> RecurrentInputs<'_, T> {
        RecurrentInputs {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            gates: Gates {
                g: case.g.then(|| self.g.view()),
                gk: case.gk.then(|| self.gk.view()),
                gv: case.gv.then(|| self.gv.view()),
                beta: (case.beta > 0).then(|| self.beta.view()),
            },
            cu_seqlens: case.packed.then(|| self.starts.view()),
        }
    }
}

#[track_caller]
pub fn run<T: Float, S: StateElement>(gpu: &Gpu, case: &Case, data: &Data<T, S>) -> Output<T, S> {
    run_by(gpu, case, data, |inputs, states, o| {
        fused_recurrent(gpu.stream(), inputs, states, o, case.options()).unwrap();
    })
}

/// A call of `op`.
#[track_caller]
pub fn run_by<T: Float, S: StateElement>(
    gpu: &Gpu,
    case: &Case,
    data: &Data<T, S>,
    op: impl for<'a> FnOnce(RecurrentInputs<'a, T>, States<'a, S>, TensorViewMut<'a, T>),
) -> Output<T, S> {
    let tensors = Uploaded::new(gpu, case, data);
    let initial = gpu.upload(&data.stored(case), case.state());
    let mut last = gpu.poisoned::<S>(case.state());
    let mut o = gpu.poisoned::<T>(case.place(case.heads[1], case.dims[1]));
    let states = States::Dense { initial: case.initial.then(|| initial.view()), last: Some(last.view_mut()) };
    op(tensors.inputs(case), states, o.view_mut());
    gpu.assert_guards(&o);
    gpu.assert_guards(&last);
    gpu.assert_untouched(&initial);
    let states = gpu.download(&last).data;
    let [k, v] = case.dims;
    let states =
        exchanged(&states, if case.layout == StateLayout::Vk { [v, k] } else { [k, v] }, case.layout);
    Output { o: gpu.download(&o).data, states }
}

/// The same in f64.
pub fn reference<T: Float, S: Float>(case: &Case, data: &Data<T, S>) -> Output<f64, f64> {
    let ([k_heads, v_heads], [k_dim, v_dim]) = (case.heads, case.dims);
    let scale = case.scale.map_or(1.0 / (k_dim as f64).sqrt(), f64::from);
    let head = Head { k_dim, v_dim, scale, l2norm: case.l2norm };
    let (q, k, v) = (widen(&data.q), widen(&data.k), widen(&data.v));
    let (g, gk, gv, beta) = (widen(&data.g), widen(&data.gk), widen(&data.gv), widen(&data.beta));
    let size = k_dim * v_dim;
    let mut states = if case.initial { widen(&data.states) } else { vec![0.0; data.states.len()] };
    let mut o = vec![0.0; v.len()];
    let mut first = 0;
    for (n, &length) in case.lengths.iter().enumerate() {
        for h in 0..v_heads {
            let state = &mut states[(n * v_heads + h) * size..][..size];
            for t in first..first + length {
                let at = t * v_heads + h;
                let key = (t * k_heads + h / (v_heads / k_heads)) * k_dim;
                let channels = |on: bool, x: &'_ [f64], dim: usize| {
                    if on { x[at * dim..][..dim].to_vec() } else { vec![] }
                };
                let token = Token {
                    q: &q[key..][..k_dim],
                    k: &k[key..][..k_dim],
                    v: &v[at * v_dim..][..v_dim],
                    g: if case.g { g[at] } else { 0.0 },
                    gk: &channels(case.gk, &gk, k_dim),
                    gv: &channels(case.gv, &gv, v_dim),
                    beta: &match case.beta {
                        0 => vec![1.0],
                        1 => vec![beta[at]],
                        _ => beta[at * v_dim..][..v_dim].to_vec(),
                    },
                };
                o[at * v_dim..][..v_dim].copy_from_slice(&head.step(state, &token));
            }
        }
        first += length;
    }
    Output { o, states }
}

/// The root mean square of the errors, relative to that of the reference.
pub fn relative<T: Float>(got: &[T], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let errors: f64 = got.iter().zip(want).map(|(x, y)| (x.to_f64() - y).powi(2)).sum();
    let all: f64 = want.iter().map(|y| y * y).sum();
    errors.sqrt() / (all.sqrt() + 1e-8)
}

/// The same, but nothing where every error is small.
pub fn error<T: Float>(got: &[T], want: &[f64]) -> f64 {
    let small = got.iter().zip(want).all(|(x, y)| (x.to_f64() - y).abs() <= 1e-6);
    if small { 0.0 } else { relative(got, want) }
}

fn bound<T: Float>() -> f64 {
    match T::DTYPE {
        DType::Bf16 => 5e-3,
        DType::F16 => 2e-3,
        _ => 2e-5,
    }
}

#[track_caller]
fn check<T: Float, S: StateElement>(case: &Case) {
    let data = Data::<T, S>::new(case);
    let want = reference(case, &data);
    for gpu in kit::devices() {
        let got = run(&gpu, case, &data);
        let (o, states) = (error(&got.o, &want.o), error(&got.states, &want.states));
        assert!(o <= bound::<T>(), "o: {o:e} of {case:?} on {}", gpu.spec());
        assert!(states <= bound::<S>(), "states: {states:e} of {case:?} on {}", gpu.spec());
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let length = prop_oneof![2 => Just(0usize), 5 => 1usize..=4, 2 => 5usize..=9];
    let lengths = prop_oneof![
        prop::collection::vec(length, 1..=4).prop_map(|l| (true, l)),
        (1usize..=3, 1usize..=4).prop_map(|(n, l)| (false, vec![l; n])),
    ];
    let dim = || prop_oneof![1usize..=20, Just(64), Just(60), Just(100), 120usize..=136, Just(256)];
    let round = || prop_oneof![Just(16usize), Just(64), Just(72), Just(128), Just(136), Just(256)];
    let dims = prop_oneof![(dim(), dim()), (round(), round())];
    let heads = prop_oneof![Just([1, 1]), Just([2, 4]), Just([1, 3]), Just([3, 3])];
    let flags = any::<(bool, bool, bool, bool, bool, bool)>();
    let rest =
        (0usize..=2, prop_oneof![Just(0.1f32), Just(1.0), Just(10.0)], 0usize..=2, any::<u64>().no_shrink());
    let memory = prop_oneof![3 => Just((0usize, 0usize)), 1 => Just((8, 0)), 1 => (0usize..=5, 0usize..=3)];
    (lengths, dims, heads, flags, rest, memory).prop_map(
        |(
            (packed, lengths),
            (k, v),
            heads,
            (vk, l2norm, g, gk, gv, initial),
            (beta, strength, scale, seed),
            (gap, shift),
        )| Case {
            packed,
            layout: if vk { StateLayout::Vk } else { StateLayout::Kv },
            l2norm,
            scale: [None, Some(1.0), Some(0.3)][scale],
            g,
            gk,
            gv,
            beta,
            strength,
            initial,
            gap,
            shift,
            seed,
            ..Case::new(&lengths, heads, [k, v])
        },
    )
}

/// Asserts that a sequence in two calls, with the state from one to the other, has the bits of one call.
#[track_caller]
fn split(case: &Case, cut: usize) {
    let length = case.lengths[0];
    let data = Data::<f16, f32>::new(case);
    let [k_heads, v_heads] = case.heads;
    let [k_dim, v_dim] = case.dims;
    let beta = v_heads * if case.beta == 1 { 1 } else { v_dim };
    for gpu in kit::devices() {
        let whole = run(&gpu, case, &data);
        let half = |from: usize, to: usize, states: Vec<f32>, initial: bool| {
            let part = Data {
                q: data.q[from * k_heads * k_dim..to * k_heads * k_dim].to_vec(),
                k: data.k[from * k_heads * k_dim..to * k_heads * k_dim].to_vec(),
                v: data.v[from * v_heads * v_dim..to * v_heads * v_dim].to_vec(),
                g: data.g[from * v_heads..to * v_heads].to_vec(),
                gk: data.gk[from * v_heads * k_dim..to * v_heads * k_dim].to_vec(),
                gv: data.gv[from * v_heads * v_dim..to * v_heads * v_dim].to_vec(),
                beta: data.beta[from * beta..to * beta].to_vec(),
                states,
            };
            run(&gpu, &Case { lengths: vec![to - from], initial, ..case.clone() }, &part)
        };
        let one = half(0, cut, data.states.clone(), case.initial);
        let two = half(cut, length, one.states.clone(), true);
        assert!([one.o, two.o].concat() == whole.o, "o of {case:?}");
        assert!(two.states == whole.states, "states of {case:?}");
    }
}

/// Rows that are not on 16 bytes, of one token and of two: both calls take the scalar path.
#[test]
fn single_tokens_take_the_path_of_many() {
    for layout in [StateLayout::Kv, StateLayout::Vk] {
        let case = Case { layout, g: false, gap: 1, ..Case::new(&[2], [1, 1], [136, 64]) };
        split(&case, 1);
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_f64(case in cases()) {
        check::<bf16, f32>(&case);
        check::<bf16, bf16>(&case);
    }

    #[test]
    fn f16_matches_f64(case in cases()) {
        check::<f16, f32>(&case);
        check::<f16, bf16>(&case);
    }

    #[test]
    fn f32_matches_f64(case in cases()) {
        check::<f32, f32>(&case);
        check::<f32, bf16>(&case);
    }

    /// Each sequence alone, and with sequences without tokens between: the same bits.
    #[test]
    fn results_are_batch_invariant(case in cases(), at in 0usize..=4) {
        let data = Data::<bf16, f32>::new(&case);
        let ([_, v_heads], [k_dim, v_dim]) = (case.heads, case.dims);
        for gpu in kit::devices() {
            let all = run(&gpu, &case, &data);
            let n = at % case.lengths.len();
            let first: usize = case.lengths[..n].iter().sum();
            let length = case.lengths[n];
            let alone = Case { lengths: vec![0, length, 0], packed: true, ..case.clone() };
            let tokens = |x: &[bf16], width: usize| x[first * width..][..length * width].to_vec();
            let gates = |x: &[f32], width: usize| x[first * width..][..length * width].to_vec();
            let size = v_heads * k_dim * v_dim;
            let mine = &data.states[n * size..][..size];
            let keys = case.heads[0] * k_dim;
            let part = Data {
                q: tokens(&data.q, keys),
                k: tokens(&data.k, keys),
                v: tokens(&data.v, v_heads * v_dim),
                g: gates(&data.g, v_heads),
                gk: gates(&data.gk, v_heads * k_dim),
                gv: gates(&data.gv, v_heads * v_dim),
                beta: gates(&data.beta, v_heads * if case.beta == 1 { 1 } else { v_dim }),
                states: [mine, mine, mine].concat(),
            };
            let got = run(&gpu, &alone, &part);
            prop_assert!(got.o == tokens(&all.o, v_heads * v_dim), "{:?}", case);
            prop_assert!(got.states[size..2 * size] == all.states[n * size..][..size], "{:?}", case);
            // Without tokens the state stays; zeros if there is none.
            let kept = if case.initial { mine.to_vec() } else { vec![0.0; size] };
            prop_assert!(got.states[..size] == kept && got.states[2 * size..] == kept);
        }
    }

    /// A sequence in two calls, with the state from one to the other.
    #[test]
    fn split_calls_give_the_same_bits(case in cases(), length in 2usize..=7, cut in 1usize..=6) {
        split(&Case { lengths: vec![length], packed: true, ..case }, cut.min(length - 1));
    }

    /// Tokens, and the states after them, depend on no later token.
    #[test]
    fn outputs_are_causal(case in cases(), t in 0usize..=5) {
        let case = Case { lengths: vec![6], packed: true, ..case };
        let data = Data::<f32, f32>::new(&case);
        let mut other = data.clone();
        let width = case.heads[0] * case.dims[0];
        other.k[t * width..].iter_mut().for_each(|x| *x = -*x * 0.5);
        other.v[t * case.heads[1] * case.dims[1]..].iter_mut().for_each(|x| *x += 1.0);
        for gpu in kit::devices() {
            let before = t * case.heads[1] * case.dims[1];
            let (a, b) = (run(&gpu, &case, &data), run(&gpu, &case, &other));
            prop_assert!(a.o[..before] == b.o[..before]);
            prop_assert!(case.beta > 0 || a.states != b.states);
        }
    }
}

/// The example of three tokens, K = 2, V = 1, with both layouts.
#[test]
fn three_tokens_give_the_known_numbers() {
    for layout in [StateLayout::Kv, StateLayout::Vk] {
        let case = Case { l2norm: false, layout, ..Case::new(&[3], [1, 1], [2, 1]) };
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
        let close = |got: &[f64], want: &[f64]| {
            got.iter().zip(want).for_each(|(x, y)| assert!((x - y).abs() < 2e-6, "{got:?}, not {want:?}"));
        };
        let want = reference(&case, &data);
        close(&want.o, &[0.567994, 0.798796, 0.811853]);
        close(&want.states, &[1.827109, 0.064834]);
        for gpu in kit::devices() {
            let got = run(&gpu, &case, &data);
            close(&widen(&got.o), &[0.567994, 0.798796, 0.811853]);
            close(&widen(&got.states), &[1.827109, 0.064834]);
        }
    }
}

/// beta = 0: the state only decays. g = 0, beta = 1, a unit vector for a key: a row is replaced.
#[test]
fn writes_are_deltas() {
    let mut case = Case { l2norm: false, scale: Some(1.0), ..Case::new(&[1], [1, 1], [64, 32]) };
    let mut data = Data::<f32, f32>::new(&case);
    data.beta = vec![0.0];
    data.g = vec![-1.0];
    for gpu in kit::devices() {
        let got = run(&gpu, &case, &data);
        let want: Vec<f64> = data.states.iter().map(|s| f64::from(*s) * (-1f64).exp()).collect();
        assert!(error(&got.states, &want) < 1e-6);
    }
    case.g = false;
    data.beta = vec![1.0];
    data.k = (0..64).map(|i| f32::from(u8::from(i == 41))).collect();
    data.q = data.k.clone();
    for gpu in kit::devices() {
        let got = run(&gpu, &case, &data);
        for (i, (row, before)) in got.states.chunks(32).zip(data.states.chunks(32)).enumerate() {
            let want = if i == 41 { &data.v[..] } else { before };
            row.iter().zip(want).for_each(|(x, y)| assert!((x - y).abs() < 1e-6, "row {i}: {x}, not {y}"));
        }
        got.o.iter().zip(&data.v).for_each(|(x, y)| assert!((x - y).abs() < 1e-6));
    }
}

#[test]
fn head_sizes_of_models() {
    for dims in [[16, 16], [60, 60], [64, 64], [100, 100], [128, 128], [128, 64], [256, 128]] {
        for heads in [[1, 1], [2, 8]] {
            for layout in [StateLayout::Kv, StateLayout::Vk] {
                let case = Case { layout, ..Case::new(&[0, 3, 1], heads, dims) };
                check::<bf16, f32>(&case);
                check::<f32, f32>(&case);
                check::<bf16, bf16>(&case);
            }
        }
    }
}

/// Slots: several states a sequence, the one to begin with, those that are negative, others that stay.
fn pooled(
    gpu: &Gpu,
    case: &Case,
    slots: &[i32],
    cols: Option<usize>,
    accepted: Option<&[i32]>,
) -> Output<bf16, f32> {
    let data = Data::<bf16, f32>::new(case);
    let tensors = Uploaded::new(gpu, case, &data);
    let [n, heads, rows, inner] = case.state();
    let (size, pool_slots) = (heads * rows * inner, POOL);
    let values: Vec<f32> = Fill::Normal.elements(pool_slots * size, case.seed ^ 77);
    // Slots with a gap.
    let strides = [size + 4, rows * inner, inner, 1];
    let place = Place::new(Layout::with_strides([pool_slots, heads, rows, inner], strides).unwrap());
    let mut pool = gpu.upload(&values, place);
    let indices = match cols {
        None => gpu.upload(slots, [n]),
        Some(cols) => gpu.upload(slots, [n, cols]),
    };
    let accepted = accepted.map(|a| gpu.upload(a, [n]));
    let mut o = gpu.poisoned::<bf16>(case.place(case.heads[1], case.dims[1]));
    let states = States::Pool {
        pool: pool.view_mut(),
        indices: indices.view(),
        accepted: accepted.as_ref().map(|a| a.view()),
    };
    fused_recurrent(gpu.stream(), tensors.inputs(case), states, o.view_mut(), case.options()).unwrap();
    gpu.assert_guards(&pool);
    gpu.assert_guards(&o);
    Output { o: gpu.download(&o).data, states: gpu.download(&pool).data }
}

const POOL: usize = 9;

/// The pool before a call.
fn pool_values(case: &Case) -> Vec<f32> {
    let [_, heads, rows, inner] = case.state();
    Fill::Normal.elements(POOL * heads * rows * inner, case.seed ^ 77)
}

#[test]
fn pools_are_updated_in_place() {
    for layout in [StateLayout::Kv, StateLayout::Vk] {
        let case = Case { layout, packed: false, ..Case::new(&[3, 3, 3], [1, 2], [24, 40]) };
        let [_, heads, rows, inner] = case.state();
        let size = heads * rows * inner;
        let before = pool_values(&case);
        for gpu in kit::devices() {
            let got = pooled(&gpu, &case, &[7, -1, 2], None, None);
            // The same from dense states.
            let mut data = Data::<bf16, f32>::new(&case);
            let start = |slot: usize| before[slot * size..][..size].to_vec();
            let as_kv = |s: Vec<f32>| {
                exchanged(&s, if layout == StateLayout::Vk { [40, 24] } else { [24, 40] }, layout)
            };
            data.states = [as_kv(start(7)), vec![0.0; size], as_kv(start(2))].concat();
            let want = run(&gpu, &case, &data);
            assert_eq!(got.o, want.o);
            let kept = stored(&want.states, &case);
            for slot in 0..POOL {
                let of = match slot {
                    7 => kept[..size].to_vec(),
                    2 => kept[2 * size..].to_vec(),
                    _ => start(slot),
                };
                assert!(got.states[slot * size..][..size] == of, "slot {slot}");
            }

            // A slot for each token: the states on the way, the last of which are those above.
            let slots = [7, 0, 3, -1, 4, -5, 2, 8, 1];
            let several = pooled(&gpu, &case, &slots, Some(3), None);
            assert_eq!(several.o, want.o);
            assert!(several.states[3 * size..][..size] == kept[..size]);
            assert!(several.states[size..][..size] == kept[2 * size..]);
            assert!(several.states[5 * size..][..2 * size] == before[5 * size..][..2 * size]);
            // From the second and third state.
            let later = pooled(&gpu, &case, &slots, Some(3), Some(&[2, 1, 3]));
            let mut from = data.clone();
            from.states = [as_kv(start(0)), vec![0.0; size], as_kv(start(1))].concat();
            let want = run(&gpu, &case, &from);
            assert_eq!(later.o, want.o);
        }
    }
}

/// Of a sequence whose indices are out of range, `o` is NaN and no slot is written; others are as before.
#[test]
fn indices_out_of_range_poison_their_sequence_alone() {
    let case = Case { packed: false, ..Case::new(&[3, 3, 3], [1, 2], [24, 40]) };
    let before = pool_values(&case);
    let size = before.len() / POOL;
    let width = 3 * case.heads[1] * case.dims[1];
    for gpu in kit::devices() {
        let good = pooled(&gpu, &case, &[7, 0, 3, 5, 4, 6, 2, 8, 1], Some(3), Some(&[1, 1, 1]));
        let single = pooled(&gpu, &case, &[7, 5, 2], None, None);
        let nine = POOL as i32;
        type Bad = (Vec<i32>, Option<usize>, Option<[i32; 3]>);
        let bad: [Bad; 7] = [
            (vec![7, nine, 2], None, None),
            (vec![7, i32::MAX, 2], None, None),
            (vec![7, 0, 3, 5, nine, 6, 2, 8, 1], Some(3), Some([1, 1, 1])),
            (vec![7, 0, 3, nine, 4, 6, 2, 8, 1], Some(3), Some([1, 1, 1])),
            (vec![7, 0, 3, 5, 4, 6, 2, 8, 1], Some(3), Some([1, 0, 1])),
            (vec![7, 0, 3, 5, 4, 6, 2, 8, 1], Some(3), Some([1, 4, 1])),
            (vec![7, 0, 3, 5, 4, 6, 2, 8, 1], Some(3), Some([1, i32::MIN, 1])),
        ];
        for (slots, cols, accepted) in bad {
            let got = pooled(&gpu, &case, &slots, cols, accepted.as_ref().map(|a| &a[..]));
            let want = if cols.is_some() { &good } else { &single };
            assert!(got.o[width..2 * width].iter().all(|x| x.is_nan()), "{slots:?}");
            assert!(
                got.o[..width] == want.o[..width] && got.o[2 * width..] == want.o[2 * width..],
                "{slots:?}"
            );
            for slot in [4, 5, 6] {
                assert!(
                    got.states[slot * size..][..size] == before[slot * size..][..size],
                    "{slots:?}: {slot}"
                );
            }
        }
        // More tokens than states.
        let got = pooled(&gpu, &case, &[7, 0, 5, 4, 2, 8], Some(2), None);
        assert!(got.o.iter().all(|x| x.is_nan()) && got.states == before);
    }
}

/// Tokens out of range are NaN where they are tokens; nothing is read or written beyond.
#[test]
fn packed_sequences_out_of_range_are_nan() {
    let case = Case::new(&[2, 2, 2], [1, 2], [16, 24]);
    let data = Data::<bf16, f32>::new(&case);
    let width = case.heads[1] * case.dims[1];
    for gpu in kit::devices() {
        let good = run(&gpu, &case, &data);
        for (starts, poisoned) in [([0, 2, 4, 7], 4..6), ([-1, 2, 4, 6], 0..2), ([0, 2, 6, i32::MIN], 0..0)] {
            let mut tensors = Uploaded::new(&gpu, &case, &data);
            tensors.starts = gpu.upload(&starts, [4]);
            let initial = gpu.upload(&data.stored(&case), case.state());
            let mut last = gpu.upload(&data.stored(&case), case.state());
            let mut o = gpu.poisoned::<bf16>(case.place(2, 24));
            let states = States::Dense { initial: Some(initial.view()), last: Some(last.view_mut()) };
            fused_recurrent(gpu.stream(), tensors.inputs(&case), states, o.view_mut(), case.options())
                .unwrap();
            gpu.assert_guards(&o);
            let got = gpu.download(&o).data;
            for t in 0..6 {
                let row = &got[t * width..][..width];
                if poisoned.contains(&t) {
                    assert!(row.iter().all(|x| x.is_nan()), "{starts:?}: token {t}");
                } else if t < 2 {
                    assert!(row == &good.o[t * width..][..width], "{starts:?}: token {t}");
                }
            }
        }
    }
}

/// Gates that are no logarithms of decays poison what they decay.
#[test]
fn gates_that_are_positive_or_nan_give_nan() {
    for bad in [1e-30f32, 3.0, f32::NAN, f32::INFINITY] {
        let case = Case { packed: false, ..Case::new(&[2, 2], [1, 1], [16, 16]) };
        let mut data = Data::<bf16, f32>::new(&case);
        data.g[1] = bad;
        for gpu in kit::devices() {
            let got = run(&gpu, &case, &data);
            assert!(
                got.o[..16].iter().all(|x| x.is_finite()) && got.o[16..32].iter().all(|x| x.is_nan()),
                "{bad}"
            );
            assert!(got.o[32..].iter().all(|x| x.is_finite()));
            assert!(
                got.states[..256].iter().all(|x| x.is_nan())
                    && got.states[256..].iter().all(|x| x.is_finite())
            );
        }
        let case = Case { gv: true, ..case };
        let mut data = Data::<bf16, f32>::new(&case);
        data.gv[5] = bad;
        for gpu in kit::devices() {
            let got = run(&gpu, &case, &data);
            assert!((0..16).all(|j| got.o[j].is_nan() == (j == 5)), "{bad}");
        }
    }
    // No decay at all, and all of it.
    let case = Case { packed: false, ..Case::new(&[1, 1], [1, 1], [16, 16]) };
    let mut data = Data::<f32, f32>::new(&case);
    data.g = vec![-0.0, f32::NEG_INFINITY];
    let mut want = data.clone();
    want.states[256..].fill(0.0);
    want.g = vec![0.0, 0.0];
    for gpu in kit::devices() {
        assert_eq!(run(&gpu, &case, &data).bits(), run(&gpu, &case, &want).bits());
    }
}

/// The final states may be the initial ones.
#[test]
fn states_in_place() {
    let case = Case::new(&[2, 0, 3], [1, 2], [128, 64]);
    let data = Data::<bf16, f32>::new(&case);
    for gpu in kit::devices() {
        let want = run(&gpu, &case, &data);
        let tensors = Uploaded::new(&gpu, &case, &data);
        let mut states = gpu.upload(&data.stored(&case), case.state());
        let mut o = gpu.poisoned::<bf16>(case.place(2, 64));
        let last = states.view_mut();
        let dense = States::Dense { initial: Some(last.alias()), last: Some(last) };
        fused_recurrent(gpu.stream(), tensors.inputs(&case), dense, o.view_mut(), case.options()).unwrap();
        assert!(gpu.download(&states).data == want.states && gpu.download(&o).data == want.o);
    }
}
