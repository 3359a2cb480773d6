//! The causal convolutions on the emulated GPUs (and real ones where there are some) against f64 and their laws.

use hk_activation::{
    ConvActivation, ConvInputs, ConvOutputs, ConvUpdateInputs, ConvUpdateOutputs, ConvWeight,
    causal_conv1d_fwd, causal_conv1d_update, reference,
};
use hk_core::{DType, Float, Layout, TensorView, TensorViewMut, bf16, f16};
use hk_testkit::{self as kit, Fill, Gpu, Place, Refusals, assert_error, kind, proptest::prelude::*, widen};
use std::ops::Range;

/// Layout of `x` and `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// `[batch, channels, tokens]` with unit stride on tokens.
    Tokens,
    /// Unit stride on channels.
    Channels,
}

/// A call. Sequences are `[channels, tokens]` each, one after the other.
#[derive(Debug, Clone)]
struct Case {
    lengths: Vec<usize>,
    channels: usize,
    width: usize,
    bias: bool,
    silu: bool,
    packed: bool,
    order: Order,
    /// Elements between rows, and in front of the first element; states with unit stride on taps.
    gap: usize,
    shift: usize,
    taps_first: bool,
    /// Slot of each sequence and number of slots; whether each sequence continues from its slot.
    slots: Option<(Vec<i32>, usize)>,
    flags: Option<Vec<u8>>,
    seed: u64,
}

impl Case {
    fn new(lengths: &[usize], channels: usize, width: usize) -> Self {
        Self {
            lengths: lengths.to_vec(),
            channels,
            width,
            bias: true,
            silu: true,
            packed: false,
            order: Order::Channels,
            gap: 0,
            shift: 0,
            taps_first: false,
            slots: None,
            flags: None,
            seed: 1,
        }
    }

    /// Slots in a random order, from ten times as many; every other sequence continues.
    fn with_states(mut self) -> Self {
        let n = self.lengths.len();
        let slots = (0..n).map(|b| ((b * 7 + 3) % (10 * n)) as i32).collect();
        self.slots = Some((slots, 10 * n));
        self.flags = Some((0..n).map(|b| (b % 2) as u8).collect());
        self
    }

    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Rows that begin on multiples of 8 elements.
    fn with_whole_pitch(mut self) -> Self {
        let inner = match (self.order, self.packed) {
            (Order::Channels, _) => self.channels,
            (Order::Tokens, true) => self.tokens(),
            (Order::Tokens, false) => self.lengths[0],
        };
        self.gap += (inner + self.gap).next_multiple_of(8) - (inner + self.gap);
        self
    }

    /// Tokens of a sequence in packed order.
    fn range(&self, b: usize) -> Range<usize> {
        let start = self.lengths[..b].iter().sum();
        start..start + self.lengths[b]
    }

    /// The layout of `x`.
    fn place(&self) -> Place {
        let (c, n) = (self.channels, self.lengths.len());
        let last = if self.packed { self.tokens() } else { self.lengths[0] };
        let (inner, rows) = if self.order == Order::Tokens { (last, c) } else { (c, last) };
        let pitch = inner.max(1) + self.gap;
        let [channel, token] = if self.order == Order::Tokens { [pitch, 1] } else { [1, pitch] };
        let layout = if self.packed {
            Layout::with_strides([c, last], [channel, token])
        } else {
            Layout::with_strides([n, c, last], [rows.max(1) * pitch, channel, token])
        };
        Place::new(layout.unwrap()).shifted(self.shift)
    }

    fn state_place(&self, slots: usize) -> Place {
        let (c, taps) = (self.channels, self.width - 1);
        let slot = c * taps + self.gap;
        let strides = if self.taps_first { [slot, taps, 1] } else { [slot, 1, c] };
        Place::new(Layout::with_strides([slots, c, taps], strides).unwrap()).shifted(self.shift)
    }

    /// Index into a downloaded or uploaded `x`.
    fn at(&self, b: usize, c: usize, t: usize) -> usize {
        if self.packed {
            c * self.tokens() + self.range(b).start + t
        } else {
            (b * self.channels + c) * self.lengths[0] + t
        }
    }
}

/// The tensors of a case.
struct Data<T, W> {
    x: Vec<T>,
    weight: Vec<W>,
    bias: Vec<W>,
    states: Vec<T>,
}

impl<T: Float, W: Float> Data<T, W> {
    fn new(case: &Case) -> Self {
        let slots = case.slots.as_ref().map_or(0, |(_, n)| *n);
        let normal = |n, seed| Fill::Normal.elements::<f32>(n, case.seed ^ seed);
        let to = |v: Vec<f32>| v.iter().map(|&v| T::from_f32(v)).collect();
        let weights = |v: Vec<f32>| v.iter().map(|&v| W::from_f32(v)).collect();
        Self {
            x: to(normal(case.channels * case.tokens(), 1)),
            weight: weights(normal(case.channels * case.width, 2)),
            bias: weights(normal(case.channels, 3)),
            states: to(normal(slots * case.channels * (case.width - 1), 4)),
        }
    }
}

/// What a call gives.
#[derive(Debug, PartialEq)]
struct Output<T> {
    y: Vec<T>,
    states: Vec<T>,
}

#[track_caller]
fn fwd<T: Float, W: ConvWeight<T>>(gpu: &Gpu, case: &Case, data: &Data<T, W>) -> Output<T> {
    let x = gpu.upload(&data.x, case.place());
    let mut y = gpu.poisoned::<T>(case.place());
    let weight = gpu.upload(&data.weight, [case.channels, case.width]);
    let bias = gpu.upload(&data.bias, [case.channels]);
    let n = case.lengths.len();
    let starts: Vec<i32> = (0..n).map(|b| case.range(b).start as i32).chain([case.tokens() as i32]).collect();
    let starts = gpu.upload(&starts, [n + 1]);
    let (slots, n_slots) = case.slots.clone().unwrap_or((vec![0; n], 0));
    let slots = gpu.upload(&slots, [n]);
    let flags = case.flags.as_ref().map(|b| gpu.upload(b, [n]));
    let mut states = case.slots.is_some().then(|| gpu.upload(&data.states, case.state_place(n_slots)));
    let has_states = states.is_some();
    let inputs = ConvInputs {
        x: x.view(),
        weight: weight.view(),
        bias: case.bias.then(|| bias.view()),
        query_start_loc: case.packed.then(|| starts.view()),
        cache_indices: has_states.then(|| slots.view()),
        has_initial_state: flags.as_ref().filter(|_| has_states).map(|flags| flags.view()),
    };
    let outputs = ConvOutputs { y: y.view_mut(), conv_states: states.as_mut().map(|s| s.view_mut()) };
    let act = if case.silu { ConvActivation::Silu } else { ConvActivation::None };
    causal_conv1d_fwd(gpu.stream(), inputs, outputs, act).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(&x);
    if let Some(states) = &states {
        gpu.assert_guards(states);
    }
    Output { y: gpu.download(&y).data, states: states.map_or(Vec::new(), |s| gpu.download(&s).data) }
}

/// Checks the results of every sequence against f64, and the states exactly; slots that are -1 or out of range by their rules.
#[track_caller]
fn check_output<T: Float, W: Float>(case: &Case, data: &Data<T, W>, got: &Output<T>, continues: bool) {
    // Half a step of what is subnormal in f16.
    let (rtol, atol, step) = match T::DTYPE {
        DType::Bf16 => (8e-3, 1e-3, 0.0),
        DType::F16 => (1e-3, 1e-4, 3e-8),
        _ => (1e-5, 1e-6, 0.0),
    };
    let (c, state) = (case.channels, case.channels * (case.width - 1));
    let (x, weight, bias) = (widen(&data.x), widen(&data.weight), widen(&data.bias));
    let mut states = widen(&data.states);
    for (b, &length) in case.lengths.iter().enumerate() {
        let tokens: Vec<f64> =
            (0..c).flat_map(|c| (0..length).map(move |t| (c, t))).map(|(c, t)| x[case.at(b, c, t)]).collect();
        let each = || (0..c).flat_map(|c| (0..length).map(move |t| (c, t)));
        let slot = case.slots.as_ref().map(|(slots, n)| (slots[b], *n));
        let own = match slot {
            Some((slot, n)) if (0..n as i32).contains(&slot) => Some(slot as usize),
            // Poison, which is NaN, where it is skipped; NaN elsewhere.
            Some(_) => {
                assert!(each().all(|(c, t)| got.y[case.at(b, c, t)].to_f64().is_nan()), "sequence {b}");
                continue;
            }
            None => None,
        };
        let initial = case.flags.as_ref().map_or(continues, |flags| flags[b] != 0);
        let history = match own {
            Some(slot) if initial => states[slot * state..][..state].to_vec(),
            _ => vec![0.0; state],
        };
        let bias = if case.bias { &bias[..] } else { &[] };
        let want = reference::causal_conv1d(&tokens, &history, &weight, bias, c, case.width, case.silu);
        for (i, (c, t)) in each().enumerate() {
            let (got, want) = (got.y[case.at(b, c, t)].to_f64(), (want.y[i], want.size[i]));
            let bound = rtol * want.0.abs() + atol * want.1 + step;
            assert!(
                (got - want.0).abs() <= bound,
                "sequence {b}, channel {c}, token {t} of {case:?}: {got:e}, not {:e}",
                want.0
            );
        }
        if let (Some(slot), true) = (own, length > 0) {
            states[slot * state..][..state].copy_from_slice(&want.state);
        }
    }
    assert_eq!(widen(&got.states), states, "states of {case:?}");
}

#[track_caller]
fn check<T: Float, W: ConvWeight<T>>(case: &Case) {
    let data = Data::<T, W>::new(case);
    for gpu in kit::devices() {
        check_output(case, &data, &fwd(&gpu, case, &data), false);
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let channels = prop_oneof![1usize..=20, Just(64), Just(127), Just(130), Just(136), Just(520)];
    let length = prop_oneof![Just(0usize), 1usize..=5, 6usize..=40];
    let lengths = prop_oneof![
        prop::collection::vec(length, 1..=6).prop_map(|l| (true, l)),
        (1usize..=3, 1usize..=40).prop_map(|(n, l)| (false, vec![l; n])),
    ];
    let flags = any::<(bool, bool, bool, bool, bool, bool)>();
    let gaps =
        (prop_oneof![Just(0usize), Just(16), 1usize..=9], prop_oneof![3 => Just(0usize), 1 => 1usize..=7]);
    (lengths, channels, 2usize..=4, flags, gaps, any::<u64>().no_shrink()).prop_map(
        |(
            (packed, lengths),
            channels,
            width,
            (bias, silu, tokens, taps_first, states, flags),
            (gap, shift),
            seed,
        )| {
            let case = Case::new(&lengths, channels, width);
            let mut case = if states { case.with_states() } else { case };
            if !flags {
                case.flags = None;
            }
            let order = if tokens { Order::Tokens } else { Order::Channels };
            let case = Case { bias, silu, packed, order, gap, shift, taps_first, seed, ..case };
            if gap % 8 == 0 { case.with_whole_pitch() } else { case }
        },
    )
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_reference(case in cases()) {
        check::<bf16, bf16>(&case);
    }

    #[test]
    fn f16_matches_reference(case in cases()) {
        check::<f16, f32>(&case);
    }

    #[test]
    fn f32_matches_reference(case in cases()) {
        check::<f32, f32>(&case);
    }

    /// Packed sequences are bitwise identical to single ones.
    #[test]
    fn packed_is_dense(case in cases().prop_filter("packed", |c| c.packed)) {
        let data = Data::<bf16, bf16>::new(&case);
        for gpu in kit::devices() {
            let all = fwd(&gpu, &case, &data);
            for (b, &length) in case.lengths.iter().enumerate() {
                let alone = Case {
                    lengths: vec![length],
                    packed: false,
                    slots: case.slots.as_ref().map(|(l, n)| (vec![l[b]], *n)),
                    flags: case.flags.as_ref().map(|v| vec![v[b]]),
                    order: if b % 2 == 0 { Order::Tokens } else { Order::Channels },
                    ..case.clone()
                };
                let each = || (0..case.channels).flat_map(|c| (0..length).map(move |t| (c, t)));
                let x = each().map(|(c, t)| data.x[case.at(b, c, t)]).collect();
                let parts = Data { x, ..Data::<bf16, bf16>::new(&case) };
                let got = fwd(&gpu, &alone, &parts);
                for (i, (c, t)) in each().enumerate() {
                    prop_assert_eq!(got.y[i].to_bits(), all.y[case.at(b, c, t)].to_bits());
                }
            }
        }
    }

    /// Two calls chained by the state are bitwise identical to one call.
    #[test]
    fn calls_chain(length in 2usize..=60, cut in any::<prop::sample::Index>(), width in 2usize..=4, tokens: bool, seed: u64) {
        let cut = cut.index(length - 1) + 1;
        let order = if tokens { Order::Tokens } else { Order::Channels };
        let whole = Case {
            slots: Some((vec![2], 4)), flags: Some(vec![1]), order, seed, ..Case::new(&[length], 24, width)
        };
        let data = Data::<bf16, bf16>::new(&whole);
        let part = |range: Range<usize>| -> Vec<bf16> {
            (0..24).flat_map(|c| data.x[c * length..][range.clone()].to_vec()).collect()
        };
        for gpu in kit::devices() {
            let want = fwd(&gpu, &whole, &data);
            let one = Case { lengths: vec![cut], ..whole.clone() };
            let again = || Data::<bf16, bf16>::new(&whole);
            let first = fwd(&gpu, &one, &Data { x: part(0..cut), ..again() });
            let two = Case { lengths: vec![length - cut], ..whole.clone() };
            let second = fwd(&gpu, &two, &Data { x: part(cut..length), states: first.states, ..again() });
            prop_assert_eq!(&second.states, &want.states);
            for c in 0..24 {
                let joined = [&first.y[c * cut..][..cut], &second.y[c * (length - cut)..][..length - cut]].concat();
                prop_assert_eq!(&joined[..], &want.y[c * length..][..length]);
            }
        }
    }
}

/// The shapes of the specification, in both orders.
#[test]
fn every_size() {
    let full = [(2048, 1024), (8192, 64), (1024, 5120), (64, 8193), (4096, 64)];
    let sizes = [(1, 1), (64, 2), (127, 3), (130, 4), (1024, 8), (64, 64), (8, 1024), (16, 700), (520, 33)];
    for (i, &(channels, length)) in sizes.iter().chain(if kit::full() { &full[..] } else { &[] }).enumerate()
    {
        for order in [Order::Tokens, Order::Channels] {
            let case = Case::new(&[length], channels, 2 + i % 3);
            let case = if i % 2 == 0 { case.with_states() } else { case };
            check::<bf16, bf16>(&Case { order, ..case.clone() });
            check::<f32, f32>(&Case { order, gap: 8, ..case });
        }
    }
}

/// Ragged lengths with 1 and 0 among them, runs of lanes that begin anywhere in a sequence, x a slice of wider rows.
#[test]
fn ragged_lengths() {
    let lengths = [1, 0, 17, 2, 3, 0, 0, 40, 1, 1, 15, 100, 7, 16, 33];
    for order in [Order::Tokens, Order::Channels] {
        for (width, channels) in [(2, 64), (3, 72), (4, 9)] {
            let case = Case { packed: true, order, ..Case::new(&lengths, channels, width).with_states() };
            check::<bf16, bf16>(&case);
            check::<bf16, bf16>(&case.clone().with_whole_pitch());
            let wider = Case { gap: 4096, shift: 64, taps_first: true, ..case.clone() };
            check::<f16, f16>(&wider.with_whole_pitch());
            check::<f32, f32>(&Case { gap: 7, shift: 1, ..case });
        }
    }
}

/// Padding is not written, slots out of range give NaN and write no state.
#[test]
fn slots_out_of_range() {
    for order in [Order::Tokens, Order::Channels] {
        for packed in [false, true] {
            let mut case = Case { order, packed, ..Case::new(&[9; 6], 16, 4).with_states() };
            case.slots = Some((vec![-1, 3, 60, -2, i32::MIN, i32::MAX], 60));
            case.flags = Some(vec![1; 6]);
            check::<bf16, bf16>(&case);
            let case = case.with_whole_pitch();
            check::<bf16, bf16>(&case);
            let data = Data::<bf16, bf16>::new(&case);
            // A skipped sequence keeps its bytes; one out of range does not.
            for gpu in kit::devices() {
                let poison = gpu.download(&gpu.poisoned::<bf16>(case.place()));
                let got = fwd(&gpu, &case, &data);
                let kept = |b: usize| {
                    (0..16).all(|c| {
                        (0..9)
                            .all(|t| got.y[case.at(b, c, t)].to_bits() == poison[case.at(b, c, t)].to_bits())
                    })
                };
                assert_eq!([0, 2, 3, 4, 5].map(kept), [true, false, false, false, false], "{}", gpu.spec());
            }
        }
    }
}

/// Starts out of range: nothing outside the tokens is touched.
#[test]
fn starts_out_of_range() {
    let (channels, tokens) = (16, 24);
    for order in [Order::Tokens, Order::Channels] {
        for starts in
            [[-5, 8, 24], [0, 30, 24], [0, 8, 1 << 30], [i32::MIN, i32::MAX, 3], [20, 4, 24], [7, 7, 7]]
        {
            let case = Case { order, packed: true, ..Case::new(&[tokens], channels, 4) };
            let data = Data::<bf16, bf16>::new(&case);
            for gpu in kit::devices() {
                let (x, mut y) = (gpu.upload(&data.x, case.place()), gpu.poisoned::<bf16>(case.place()));
                let weight = gpu.upload(&data.weight, [channels, 4]);
                let mut states = gpu.upload(&vec![bf16::ONE; 2 * channels * 3], [2, channels, 3]);
                let starts = gpu.upload(&starts, [3]);
                let inputs = ConvInputs {
                    query_start_loc: Some(starts.view()),
                    ..ConvInputs::new(x.view(), weight.view())
                };
                let outputs = ConvOutputs { y: y.view_mut(), conv_states: Some(states.view_mut()) };
                causal_conv1d_fwd(gpu.stream(), inputs, outputs, ConvActivation::None).unwrap();
                gpu.assert_guards(&y);
                gpu.assert_guards(&states);
            }
        }
    }
}

/// Calls `causal_conv1d_update`, with `y` over `x` if `in_place`.
fn update<T: Float, W: ConvWeight<T>>(
    gpu: &Gpu,
    case: &Case,
    data: &Data<T, W>,
    rank: usize,
    in_place: bool,
) -> Output<T> {
    let (n, c) = (case.lengths.len(), case.channels);
    let place = if rank == 2 { Place::rows([n, c], c + case.gap).shifted(case.shift) } else { case.place() };
    let mut x = gpu.upload(&data.x, &place);
    let mut y = gpu.poisoned::<T>(&place);
    let weight = gpu.upload(&data.weight, [c, case.width]);
    let bias = gpu.upload(&data.bias, [c]);
    let (slots, n_slots) = case.slots.clone().unwrap();
    let slots = gpu.upload(&slots, [n]);
    let mut states = gpu.upload(&data.states, case.state_place(n_slots));
    let act = if case.silu { ConvActivation::Silu } else { ConvActivation::None };
    let call = |x: TensorView<T>, y: TensorViewMut<T>, states: TensorViewMut<T>| {
        let inputs = ConvUpdateInputs {
            bias: case.bias.then(|| bias.view()),
            conv_state_indices: Some(slots.view()),
            ..ConvUpdateInputs::new(x, weight.view())
        };
        let outputs = ConvUpdateOutputs { y, conv_states: states };
        causal_conv1d_update(gpu.stream(), inputs, outputs, act).unwrap();
    };
    if in_place {
        let over = x.view_mut();
        call(over.alias(), over, states.view_mut());
        gpu.assert_guards(&x);
        y = x;
    } else {
        call(x.view(), y.view_mut(), states.view_mut());
        gpu.assert_guards(&y);
        gpu.assert_untouched(&x);
    }
    gpu.assert_guards(&states);
    Output { y: gpu.download(&y).data, states: gpu.download(&states).data }
}

/// One token and a few, against f64; bitwise identical in place and by `causal_conv1d_fwd`.
#[test]
fn updates() {
    fn check_update<T: Float, W: ConvWeight<T>>(case: &Case, rank: usize) {
        let data = Data::<T, W>::new(case);
        for gpu in kit::devices() {
            let got = update(&gpu, case, &data, rank, false);
            check_output(case, &data, &got, true);
            assert_eq!(update(&gpu, case, &data, rank, true), got, "in place: {case:?}");
            let flags = Some(vec![1; case.lengths.len()]);
            let forward = fwd(&gpu, &Case { flags, ..case.clone() }, &data);
            assert_eq!(forward, got, "forward: {case:?}");
        }
    }
    for (i, (n, channels)) in [(1, 1), (5, 64), (3, 130), (4, 1032), (9, 16)].into_iter().enumerate() {
        for length in [1, 2, 3, 5, 12] {
            for order in [Order::Tokens, Order::Channels] {
                let mut case = Case::new(&vec![length; n], channels, 2 + (i + length) % 3).with_states();
                case.flags = None;
                let case = Case {
                    order,
                    gap: 8 * (i % 2),
                    taps_first: i % 2 == 0,
                    bias: i != 2,
                    silu: i != 3,
                    ..case
                };
                check_update::<bf16, bf16>(&case, 3);
                check_update::<f16, f32>(&Case { gap: 3, shift: 1, ..case.clone() }, 3);
                if length == 1 && order == Order::Channels {
                    check_update::<bf16, f32>(&case, 2);
                    check_update::<f32, f32>(&case, 2);
                }
            }
        }
    }
}

/// Causal; linear without an activation; the impulse response is the weights.
#[test]
fn laws() {
    for order in [Order::Tokens, Order::Channels] {
        let case = Case { order, bias: false, silu: false, ..Case::new(&[50], 16, 4) };
        let data = Data::<bf16, bf16>::new(&case);
        for gpu in kit::devices() {
            let plain = fwd(&gpu, &case, &data);
            for from in [1, 17, 49] {
                let mut x = data.x.clone();
                (0..16).for_each(|c| x[c * 50 + from..(c + 1) * 50].fill(bf16::NAN));
                let got = fwd(&gpu, &case, &Data { x, ..Data::<bf16, bf16>::new(&case) });
                for c in 0..16 {
                    assert_eq!(got.y[c * 50..][..from], plain.y[c * 50..][..from], "from {from}");
                    assert!(got.y[c * 50 + from].is_nan());
                }
            }
            let doubled = data.x.iter().map(|v| bf16::from_f32(2.0 * v.to_f32())).collect();
            let twice = fwd(&gpu, &case, &Data { x: doubled, ..Data::<bf16, bf16>::new(&case) });
            assert!(twice.y.iter().zip(&plain.y).all(|(a, b)| a.to_f32() == 2.0 * b.to_f32()));

            let mut x = vec![bf16::ZERO; 16 * 50];
            (0..16).for_each(|c| x[c * 50 + 20] = bf16::ONE);
            let response = fwd(&gpu, &case, &Data { x, ..Data::<bf16, bf16>::new(&case) });
            for c in 0..16 {
                let weights: Vec<bf16> = data.weight[c * 4..][..4].iter().rev().copied().collect();
                assert_eq!(response.y[c * 50 + 20..][..4], weights);
                assert!(
                    response.y[c * 50..][..20]
                        .iter()
                        .chain(&response.y[c * 50 + 24..][..26])
                        .all(|v| v.to_f32() == 0.0)
                );
            }
        }
    }
}

/// Counted: x is read once and y written once, in coalesced 128-byte accesses, 16 bytes a lane.
#[test]
fn tokens_are_moved_once() {
    for (order, packed) in
        [(Order::Tokens, false), (Order::Tokens, true), (Order::Channels, false), (Order::Channels, true)]
    {
        let case = Case { order, packed, bias: false, ..Case::new(&[256], 512, 4) };
        let data = Data::<bf16, bf16>::new(&case);
        for arch in ["gfx942", "gfx950"] {
            let gpu = Gpu::open(&format!("emu:{arch}?details=true"));
            gpu.stream().take_counters().unwrap();
            fwd(&gpu, &case, &data);
            let counters = gpu.stream().take_counters().unwrap().unwrap();
            let details = counters.details.unwrap();
            let accesses = 512 * 256 * 2 / 128;
            let (weights, starts) = (512 * 4 * 2 / 128, u64::from(packed));
            let at = format!("{order:?}, packed: {packed}, on {arch}");
            assert_eq!(details.distinct_written_lines, accesses, "{at}");
            assert_eq!(details.distinct_read_lines, accesses + weights + starts, "{at}");
            assert_eq!(details.scratch_bytes, 0, "{at}");
            let moved = counters.global_read_bytes + counters.global_written_bytes;
            let narrow = moved - details.wide_bytes;
            assert!(narrow * 20 <= moved * u64::from(packed), "{at}: {narrow} of {moved} bytes");
        }
    }
}

#[test]
fn nothing_is_launched_for_no_tokens() {
    for gpu in kit::devices() {
        let case = Case::new(&[0, 0], 8, 4).with_states();
        let data = Data::<bf16, bf16>::new(&case);
        gpu.assert_nothing_launched(|| assert_eq!(fwd(&gpu, &case, &data).states, data.states));
    }
}

/// Calls of `causal_conv1d_fwd` with every tensor of sequences of one length; of packed ones if `packed`.
fn fwd_refusals<'f>(packed: bool) -> Refusals<'f, ConvActivation> {
    let table = Refusals::new(ConvActivation::None, |stream, tensors, activation| {
        let inputs = ConvInputs {
            x: tensors.input::<bf16>("x"),
            weight: tensors.input::<bf16>("weight"),
            bias: tensors.optional_input("bias"),
            query_start_loc: tensors.optional_input("query_start_loc"),
            cache_indices: tensors.optional_input("cache_indices"),
            has_initial_state: tensors.optional_input("has_initial_state"),
        };
        let outputs =
            ConvOutputs { y: tensors.output("y"), conv_states: tensors.optional_output("conv_states") };
        causal_conv1d_fwd(stream, inputs, outputs, activation)
    })
    .input::<bf16>("weight", [4, 4])
    .input::<bf16>("bias", [4]);
    if packed {
        return table
            .input::<bf16>("x", [4, 5])
            .input::<i32>("query_start_loc", [2])
            .output::<bf16>("y", [4, 5]);
    }
    table
        .input::<bf16>("x", [3, 4, 5])
        .input::<i32>("cache_indices", [3])
        .input::<u8>("has_initial_state", [3])
        .output::<bf16>("y", [3, 4, 5])
        .output::<bf16>("conv_states", [3, 4, 3])
}

#[test]
fn errors() {
    let message = "unit stride on channels or on tokens";
    let mut table = fwd_refusals(false)
        .accepts(|_| {})
        .refuses(kind!(Shape), &["causal_conv1d_fwd: x", "[4, 5]", "3 axes"], |call| call.shape("x", [4, 5]))
        .refuses(kind!(Shape), &["y", "[4, 5]", "[3, 4, 5] (shape of x)"], |call| call.shape("y", [4, 5]))
        .refuses(kind!(Shape), &["weight", "[5, 4]", "[4, width] (channels of x)"], |call| {
            call.shape("weight", [5, 4])
        })
        .refuses(kind!(Stride), &["weight"], |call| call.strides("weight", [5, 1]))
        .refuses(kind!(Shape), &["weight: shape [16]", "2 axes"], |call| call.shape("weight", [16]))
        .refuses(kind!(Shape), &["bias", "[3]", "[4] (channels of x)"], |call| call.shape("bias", [3]))
        .refuses(kind!(Stride), &["bias"], |call| call.strides("bias", [2]))
        .refuses(kind!(Stride), &["x", message], |call| call.strides("x", [60, 10, 2]))
        .refuses(kind!(Stride), &["y", message], |call| call.strides("y", [60, 10, 2]))
        .refuses(kind!(Shape), &["cache_indices", "[2]", "[3] (sequences)"], |call| {
            call.shape("cache_indices", [2])
        })
        .refuses(kind!(Shape), &["has_initial_state", "[2]"], |call| call.shape("has_initial_state", [2]))
        .refuses(kind!(Stride), &["cache_indices"], |call| call.strides("cache_indices", [2]))
        .refuses(kind!(Shape), &["conv_states", "[3, 4, 4]", "[3 or more, 4, 3]"], |call| {
            call.without("cache_indices");
            call.shape("conv_states", [3, 4, 4]);
        })
        .refuses(kind!(Shape), &["conv_states", "[2, 4, 3]"], |call| {
            call.without("cache_indices");
            call.shape("conv_states", [2, 4, 3]);
        })
        // Not dropped: they have no meaning without states.
        .refuses(kind!(Argument), &["causal_conv1d_fwd: cache_indices", "without conv_states"], |call| {
            call.without("conv_states")
        })
        .refuses(kind!(Argument), &["has_initial_state", "without conv_states"], |call| {
            call.without("conv_states");
            call.without("cache_indices");
        })
        .refuses(kind!(DeviceMismatch), &["x", "emu:gfx942", "emu:gfx950"], |call| call.elsewhere("x"))
        .refuses(kind!(Overlap), &["x and y"], |call| call.overlap("x", "y", 0))
        .refuses_other_devices()
        .refuses_overlaps();
    for width in [1, 5] {
        let says = ["weight", &format!("width {width}"), "2, 3 or 4"];
        table = table.refuses(kind!(Argument), &says, |call| call.shape("weight", [4, width]));
    }
    fwd_refusals(true)
        .accepts(|_| {})
        .refuses(kind!(Shape), &["x", "[3, 4, 5]", "2 axes"], |call| call.shape("x", [3, 4, 5]))
        .refuses(kind!(Shape), &["query_start_loc", "[0]"], |call| call.shape("query_start_loc", [0]))
        .refuses(kind!(Stride), &["query_start_loc"], |call| call.strides("query_start_loc", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
    Refusals::new(ConvActivation::None, |stream, tensors, activation| {
        let inputs = ConvUpdateInputs {
            x: tensors.input::<bf16>("x"),
            weight: tensors.input::<bf16>("weight"),
            bias: tensors.optional_input("bias"),
            conv_state_indices: tensors.optional_input("conv_state_indices"),
        };
        let outputs =
            ConvUpdateOutputs { y: tensors.output("y"), conv_states: tensors.output("conv_states") };
        causal_conv1d_update(stream, inputs, outputs, activation)
    })
    .input::<bf16>("x", [3, 4, 5])
    .input::<bf16>("weight", [4, 4])
    .input::<bf16>("bias", [4])
    .input::<i32>("conv_state_indices", [3])
    .output::<bf16>("y", [3, 4, 5])
    .output::<bf16>("conv_states", [3, 4, 3])
    .accepts(|_| {})
    .accepts(|call| call.overlap("x", "y", 0))
    .refuses(kind!(Shape), &["causal_conv1d_update: x", "[4]"], |call| call.shape("x", [4]))
    .refuses(kind!(Shape), &["conv_state_indices", "[2]"], |call| call.shape("conv_state_indices", [2]))
    .refuses(kind!(Overlap), &["x and conv_states"], |call| call.overlap("x", "conv_states", 0))
    .refuses(kind!(Overlap), &["weight and y"], |call| call.overlap("weight", "y", 0))
    .refuses(kind!(Overlap), &["weight and conv_states"], |call| call.overlap("weight", "conv_states", 0))
    .refuses_other_devices()
    .refuses_overlaps();
}

/// More than 2^31 - 1 of anything: of tensors without elements, which need no memory.
#[test]
fn too_many_are_refused() {
    let gpu = &kit::devices()[0];
    let n = 1 << 31;
    let weights = gpu.poisoned::<bf16>([0, 2]);
    let weight = gpu.upload(&[bf16::ONE; 2], [1, 2]);
    for (shape, weight, what) in [
        ([n, 1, 0], &weight, "2147483648 sequences"),
        ([0, 1, n], &weight, "2147483648 tokens"),
        ([1, 0, n], &weights, "2147483648 tokens"),
    ] {
        let (x, mut y) = (gpu.poisoned::<bf16>(shape), gpu.poisoned::<bf16>(shape));
        let inputs = ConvInputs::new(x.view(), weight.view());
        let wrong = causal_conv1d_fwd(gpu.stream(), inputs, y.view_mut(), ConvActivation::None);
        assert_error(wrong, kind!(TooLarge), &["causal_conv1d_fwd: x", what, "2147483647"]);
    }
}

/// Columns of one tensor: the output begins in the last column of the input.
#[test]
fn interleaved_columns_may_not_overlap() {
    let gpu = &kit::devices()[0];
    let weight = gpu.upload(&[bf16::ONE; 16], [4, 4]);
    let mut states = gpu.upload(&[bf16::ONE; 48], [4, 4, 3]);
    let mut wide = gpu.upload(&[bf16::ONE; 20], [4, 5]);
    let whole = wide.view_mut();
    let (x, y) = (whole.alias().slice(1, 0..4).unwrap(), whole.slice(1, 1..5).unwrap());
    let inputs = ConvUpdateInputs::new(x, weight.view());
    let outputs = ConvUpdateOutputs { y, conv_states: states.view_mut() };
    let wrong = causal_conv1d_update(gpu.stream(), inputs, outputs, ConvActivation::None);
    assert_error(wrong, kind!(Overlap), &["x and y"]);
    gpu.assert_untouched(&wide);
    gpu.assert_untouched(&states);
}
